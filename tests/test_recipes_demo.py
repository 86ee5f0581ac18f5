"""The demo: what its stages read fits them, full microbatches with pictures, a chat model from file to file."""

import itertools
import json
from pathlib import Path

import gguf_models
import pytest

from areax.adapters import hf, tokenizer
from areax.adapters.commands import convert
from areax.adapters.data import images
from areax.adapters.tracking import run_dir
from areax.core import packing
from areax.recipes import demo
from areax.recipes.shared import offline
from areax.rollout import object_path
from areax.rollout.tasks import digits


@pytest.mark.slow
def test_the_stages_of_the_demo_on_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "DEMONSTRATIONS", 300)
    config = demo.Config(task="shapes", out=str(tmp_path))
    assert demo.write_data(config, tmp_path) == 1000
    sft, rl = demo.sft_config(config, tmp_path), demo.grpo_config(config, tmp_path, "grpo")
    for data in (sft.data, rl.data, *rl.evaluation.heldout, tmp_path / "data/pictures.jsonl"):
        row = json.loads(Path(data).read_text().splitlines()[0])
        assert object_path.resolve(rl.reward)(row["answer"], row) == 1.0
    assert sft.vision == rl.training.vision == "trained"
    settings, _ = hf.load(sft.model, vision=True)
    tokens, processor = tokenizer.load(sft.model), images.load(sft.model)
    sample = offline.Demonstrations(tokens, sft.learn, processor)
    with open(sft.data) as file:
        samples = [sample(json.loads(line)) for line in itertools.islice(file, sft.batch)]
    assert all(processor.media(each.images[0]).grid == (1, 6, 6) for each in samples[:3])
    assert max(len(each.tokens) for each in samples) <= rl.serving.serve.context
    for count, rows in ((sft.batch, sft.rows), (2 * sft.batch, rl.training.rows)):
        full = packing.pack((samples * 2)[:count], sft.length, rows=rows)
        assert full.token_BT.shape[0] == count // sft.batch and settings.vision


def test_a_directory_has_the_demo_of_one_task(tmp_path):
    own = demo.Config(out=str(tmp_path))
    demo.refuse_another(own, tmp_path)
    demo.refuse_another(own, tmp_path)
    (tmp_path / "base").mkdir()
    left = [*tmp_path.iterdir()]
    for other in ({"task": "shapes"}, {"task": "chat", "model": "m"}, {"split": 3}, {"seed": 1}):
        with pytest.raises(ValueError, match="has the demo of {'task': 'sums', .* name another directory"):
            demo.main(demo.Config(out=str(tmp_path), **other))
    assert [*tmp_path.iterdir()] == left
    (tmp_path / demo.STARTED).write_text("{")
    with pytest.raises(ValueError, match="demo.json: damaged or half-written JSON"):
        demo.main(own)


def test_a_directory_has_the_demo_of_one_file(tmp_path):
    """Replaced by another of the same name, it is another model."""
    (source := tmp_path / "x.gguf").write_bytes(b"GGUF a")
    config, out = demo.Config(task="chat", model=str(source), out=str(tmp_path / "out")), tmp_path / "out"
    (out / "base").mkdir(parents=True)
    run_dir.write_json(out / demo.STARTED, {})
    with pytest.raises(ValueError, match="has the demo of {}"):
        demo.refuse_another(config, out)
    (out / "base").rmdir()
    demo.refuse_another(config, out)
    (out / "base").mkdir()
    demo.refuse_another(config, out)
    source.write_bytes(b"GGUF bb")
    with pytest.raises(ValueError, match="has the demo of .*name another directory"):
        demo.refuse_another(config, out)


def test_a_model_that_is_not_there_leaves_a_directory_to_others(tmp_path):
    with pytest.raises(ValueError, match="nowhere.gguf"):
        demo.main(demo.Config(task="chat", model="nowhere.gguf", out=str(tmp_path)))
    demo.refuse_another(demo.Config(task="chat", model="m", out=str(tmp_path)), tmp_path)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "sft"])
def test_the_files_of_another_run_are_not_overwritten(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"has {name}, which is of no demo; name another directory"):
        demo.main(demo.Config(out=str(tmp_path)))
    assert [*tmp_path.iterdir()] == [tmp_path / name]


def test_options_are_of_the_task_that_uses_them():
    with pytest.raises(ValueError, match=r"--model names the model of --task chat, got '' for chat; .*make demo-real"):
        demo.Config(task="chat")
    with pytest.raises(ValueError, match="--model names the model of --task chat, got 'x' for sums; leave it out"):
        demo.Config(model="x")
    with pytest.raises(ValueError, match="--error-rate is for SFT, which --task chat does not need; leave it out"):
        demo.Config(task="chat", model="x", error_rate=0.5)
    with pytest.raises(ValueError, match="--rl-lr must be at least 0, got -1"):
        demo.Config(rl_lr=-1.0)


@pytest.mark.long
def test_the_demo_of_a_chat_model_from_a_gguf_file_to_another(tmp_path, capsys):
    """A tiny model learns nothing in two steps; the parts fit, and a second call has nothing left to do."""
    source, out = tmp_path / "model.gguf", tmp_path / "out"
    convert.convert(gguf_models.model(tmp_path / "model", "llama"), source, gguf_kind="q8_0")
    config = demo.Config(task="chat", model=str(source), out=str(out), rows="dev", rl_steps=2)
    assert demo.main(config) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["heldout_rows"] == len(digits.splits(digits.Task())["dev"]) and summary["rl_steps"] == 2
    assert f"talk to it  areax serve {out}/model.gguf" in capsys.readouterr().out
    held = [line for line in run_dir.read_lines(out / run_dir.SAMPLES) if line["kind"] == "eval"]
    assert [line["step"] for line in held] == [0] * 10 + [2] * 10  # the same ten before and after
    assert [line["prompt"] for line in held[:10]] == [line["prompt"] for line in held[10:]]
    assert "eval step 2: 10 samples" in (out / "report.html").read_text()
    assert demo.main(config) == 0


def test_few_steps_of_imitation_have_a_shorter_warmup(tmp_path):
    assert [demo.sft_config(demo.Config(sft_steps=n), tmp_path).optim.warmup for n in (1, 2, 1000)] == [0, 1, 20]
