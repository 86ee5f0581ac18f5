"""Recipes that train the layer for multi-token prediction: it alone learns from drafts, is resumed and pushed."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import servers
import tiny
from test_models_mtp import CASES, TINY, write

from areax import models
from areax.adapters import hf, safetensors, tokenizer
from areax.adapters.command_line.options import flat, replaced
from areax.adapters.commands import jobs
from areax.adapters.tracking import run_dir
from areax.core import param
from areax.core.losses import GRPO
from areax.core.mtp import MTP
from areax.core.optim import Optimizer
from areax.models import mtp
from areax.models.lora import Lora
from areax.parallel.mesh import Layout
from areax.parallel.planner.chips import CHIPS
from areax.recipes import grpo, sft
from areax.recipes.shared import run_export
from areax.rollout.servers.local import Serve
from areax.rollout.tasks import arithmetic
from areax.rollout.types import Sampling

OWN = "model.layers.2."


def checkpoint(path: Path, family: str) -> Path:
    """A tiny model with its layer, and a tokenizer for sums."""
    tokens = tokenizer.character("0123456789+")
    source = {"model_type": family} | TINY | CASES[family]
    source |= {"vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id}
    config = models.config_from_hf(source)
    write(path, config, tiny.weights(models.table(config), 0.16), tiny.weights(mtp.table(config), 0.16, 1), tokens)
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("mtp")
    checkpoint(path / "model", "glm4_moe")
    split = arithmetic.splits()
    tiny.rows(path / "rows.jsonl", list(itertools.islice(arithmetic.demonstrations(split["train"]), 64)))
    tiny.rows(path / "prompts.jsonl", split["train"][:40])
    (path / "rewards.py").write_text("def score(text, row):\n    return sum(c.isdigit() for c in text) / 4\n")
    return path


def config(place, out, coef=0.3, **changes):
    base = sft.Config(
        model=str(place / "model"), data=str(place / "rows.jsonl"), out=str(place / out), steps=4, batch=8, length=64,
        rows=4, optim=Optimizer(lr=1e-3, mtp_lr=1e-2 if coef else 0.0), mtp=MTP(coef), save_every=2,
    )  # fmt: skip
    return replace(base, **changes)


def of_grpo(place, out, **changes):
    base = grpo.Config(str(place / "model"), str(place / "prompts.jsonl"), f"{place}/rewards.py:score")
    return replaced(
        base, out=str(place / out), steps=2, groups=4, group_size=4, max_concurrent=8, length=32, rows=4, eta=0,
        sampling=Sampling(max_new_tokens=6), objective=GRPO(advantage={"std": "none"}), mtp=MTP(0.3),
        optim=Optimizer(lr=1e-3, mtp_lr=1e-2), **changes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(place):
    """The tensors of a run with drafts, those of the same without, and those that both started from."""
    sft.main(config(place, "drafts"))
    sft.main(config(place, "plain", 0.0))
    return [safetensors.read(place / name) for name in ("drafts/model", "plain/model", "model")]


@pytest.mark.slow
def test_the_layer_alone_learns_from_drafts(place, trained):
    """Without the option exports have it bit for bit; the rest of the model learns what it does without."""
    drafts, plain, start = trained
    assert drafts.keys() == plain.keys() == start.keys()
    copies = {
        f"{OWN}embed_tokens.weight": "model.embed_tokens.weight",
        f"{OWN}shared_head.head.weight": "lm_head.weight",
    }
    for name, x in start.items():
        if name in copies:
            assert all(np.array_equal(each[name], each[copies[name]]) for each in (drafts, plain)), name
        elif name.startswith(OWN):
            assert np.array_equal(plain[name], x), name
            kept = name.endswith("e_score_correction_bias")
            chosen = ".mlp.experts." not in name  # an expert that no token needed stays, too
            assert np.array_equal(drafts[name], x) if kept else not chosen or not np.array_equal(drafts[name], x), name
        else:
            np.testing.assert_allclose(drafts[name], plain[name], atol=2e-6, err_msg=name)
    lines = [x for x in run_dir.read_lines(place / "drafts/metrics.jsonl") if "mtp_loss" in x]
    assert len(lines) == 4 and lines[-1]["mtp_loss"] < lines[0]["mtp_loss"] and 0 <= lines[-1]["mtp_accuracy"] <= 1
    others = [x for x in run_dir.read_lines(place / "plain/metrics.jsonl") if "nll" in x]
    assert not any("mtp_loss" in x for x in others)
    np.testing.assert_allclose([x["nll"] for x in lines], [x["nll"] for x in others], rtol=1e-4)


@pytest.mark.long
def test_a_run_is_resumed_and_exported_with_its_layer(place, trained):
    """From a state in the middle, bit for bit; and from the state alone."""
    tiny.cut_off(place / "drafts", place / "resumed", 2)
    sft.main(config(place, "resumed"))
    run_export.convert(place / "drafts", place / "exported")
    for name, x in trained[0].items():
        for other in ("resumed/model", "exported"):
            assert np.array_equal(safetensors.read(place / other)[name], x), name
    tiny.cut_off(place / "drafts", place / "other", 2)
    with pytest.raises(ValueError, match=r"other options, --mtp.coef 0.3 -> 0.0"):
        sft.main(config(place, "other", 0.0))


@pytest.mark.parametrize("family", CASES)
def test_a_checkpoint_that_was_loaded_with_its_layer_is_written_as_it_was(family, tmp_path):
    path = checkpoint(tmp_path / "model", family)
    read, params = hf.load(path, mtp=True)
    assert read.mtp and params["mtp"]["stacks"][0]["mtp_norm"].shape == (1, read.embed)
    hf.save(tmp_path / "out", read, params)
    before, after = safetensors.read(path), safetensors.read(tmp_path / "out")
    assert before.keys() == after.keys() and all(np.array_equal(after[name], x) for name, x in before.items())
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == family
    own = {name for name in hf.read_manifest(tmp_path / "out", after)["tensors"] if name.startswith(("mtp.", OWN))}
    assert len(own) > 10


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_copies_inside_the_layer_are_written_as_those_of_the_model(family, drafts, tmp_path):
    """Engines that read them draft with the weights of now; where the two are tied, both are the embeddings."""
    config, params = hf.load(path := checkpoint(tmp_path / "model", family), mtp=drafts)
    params |= {name: params[name] + i for i, name in enumerate(("embed", "head"), 1)}
    tied = {name: x for name, x in params.items() if name != "head"}
    for out, settings, weights, head in (
        ("apart", config, params, "head"), ("tied", replace(config, tied=True), tied, "embed"),
    ):  # fmt: skip
        written = safetensors.read(hf.save(tmp_path / out, settings, weights))
        assert written.keys() == safetensors.read(path).keys() - ({"lm_head.weight"} if out == "tied" else set())
        assert np.array_equal(written[f"{OWN}embed_tokens.weight"], params["embed"])
        assert np.array_equal(written[f"{OWN}shared_head.head.weight"], params[head])
        assert hf.verify(tmp_path / out)


@pytest.mark.mesh
def test_a_mesh_trains_what_one_device_does(place, trained):
    sft.main(config(place, "mesh", mesh=Layout(fsdp=2, cp=2, tp=2)))
    for name, x in safetensors.read(place / "mesh/model").items():
        np.testing.assert_allclose(x, trained[0][name], atol=2e-4, err_msg=name)


@pytest.mark.long
def test_a_run_pushes_the_layer_to_servers(place):
    """Over HTTP: the server's hashes are those of the version, and it drafts with the new layer."""
    with servers.embedded(place / "model", slots=8, context=64, draft=3) as remote:
        done = grpo.main(of_grpo(place, "pushed", servers=(remote.url,), published=str(place / "published")))
        assert done["complete"] and done["max_logp_diff"] < 1e-4
        held = remote.ok("/weights_checker", {"action": "checksum"})
    written = json.loads((place / "published/2/manifest.json").read_text())["tensors"]
    last, first = (safetensors.read(place / name) for name in ("published/2", "model"))
    assert all(entry["xxh3_128"] in json.dumps(held) for entry in written.values())
    assert not np.array_equal(last[f"{OWN}eh_proj.weight"], first[f"{OWN}eh_proj.weight"])
    lines = [x for x in run_dir.read_lines(place / "pushed/metrics.jsonl") if x["kind"] == "grpo"]
    assert all(x["mtp_loss"] > 0 for x in lines)


@pytest.mark.long
def test_an_engine_in_the_process_gets_the_layer(place, monkeypatch):
    """From device to device, with what the run started from and what it resumes with."""
    from areax.rollout.engine.device_state import DeviceState

    seen = []
    swap = DeviceState.swap

    def noted(self):
        swap(self)
        seen.append(np.asarray(self.weights["mtp"]["mtp_norm"]).ravel())

    monkeypatch.setattr(DeviceState, "swap", noted)
    inside = dict(serve=Serve(slots=8, context=64, draft=3, inside=True))
    grpo.main(of_grpo(place, "inside", **inside, save_every=1))
    norm = lambda path: np.asarray(safetensors.read(path)[f"{OWN}shared_head.norm.weight"])
    np.testing.assert_array_equal(seen[0], norm(place / "model"))
    np.testing.assert_array_equal(seen[-1], norm(place / "inside/model"))
    assert len(seen) == 3 and not np.array_equal(seen[0], seen[1])
    last = seen[-1]
    seen.clear()
    grpo.main(replaced(of_grpo(place, "inside", **inside, save_every=1), steps=3))
    np.testing.assert_array_equal(seen[0], last)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(lora=Lora(rank=2), optim=Optimizer()), "--mtp.coef 0.3 trains a whole layer, and --lora.rank 2 adapters"),
        (dict(optim=Optimizer(offload=True)), "--mtp.coef 0.3 clips a layer by itself, which --optim.offload does not"),
        (dict(mtp=MTP()), "--optim.mtp-lr 0.01 is for a layer in training, --mtp.coef above 0, got 0"),
    ],
)
def test_options_that_do_not_go_together(place, changes, message):
    with pytest.raises(ValueError, match=message):
        config(place, "refused", **changes)


def test_a_model_without_the_layer_is_refused(place, tmp_path):
    with pytest.raises(ValueError, match="must have a layer for multi-token prediction.*got qwen3 without"):
        sft.main(config(place, tmp_path / "out", model=str(tiny.model(tmp_path / "model"))))


def test_a_checkpoint_that_lacks_the_layer_is_refused(tmp_path):
    """As transformers saves it, which drops the layer and leaves config.json as it was."""
    path = checkpoint(tmp_path / "model", "qwen3_next")
    held = {name: np.array(x) for name, x in safetensors.read(path).items() if not name.startswith("mtp.")}
    (path / "model.safetensors").unlink()
    safetensors.write(path, held, held.values())
    hf.load(path)
    with pytest.raises(ValueError, match="missing mtp.* and 3. more; of the layer .* if --mtp.coef is left out"):
        hf.load(path, mtp=True)


def test_a_plan_counts_the_layer(place):
    planned = [jobs.made(flat(config(place, "planned", coef)), CHIPS["h100"]) for coef in (0.0, 0.3)]
    plain, drafts = ({leaf.path: math.prod(leaf.shape) for leaf in each.job.trained} for each in planned)
    own = drafts.keys() - plain.keys()
    assert plain.keys() < drafts.keys() and all(path.startswith("mtp.") for path in own)
    assert sum(drafts[path] for path in own) == param.count(mtp.table(planned[1].settings))
    assert {"mask_BT", "index_BT"} <= set(planned[1].job.reads)


@pytest.mark.slow
def test_a_teacher_beside_drafts(place):
    """The divergence from it and the drafts are learnt at once."""
    done = grpo.main(of_grpo(place, "taught", servers=(), serve=Serve(slots=8, context=64, inside=True, draft=3),
                             teacher=str(place / "model"), distill_coef=0.5))  # fmt: skip
    lines = [x for x in run_dir.read_lines(place / "taught/metrics.jsonl") if x["kind"] == "grpo"]
    assert done["complete"] and all(x["mtp_loss"] > 0 and x["divergence"] >= 0 for x in lines)
