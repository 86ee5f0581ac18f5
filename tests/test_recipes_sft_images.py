"""SFT on rows with images, from files to files: transformers' loss, the tower as it was, resumed, converted."""

import json
from dataclasses import replace

import jobs
import numpy as np
import pytest
import tiny
import torch
import transformers
import vlm

from areax.adapters import cli, safetensors, tokenizer
from areax.adapters.data import images as readers
from areax.adapters.tracking import run_dir
from areax.core import losses as core
from areax.core.optim import Optimizer
from areax.models.lora import Lora
from areax.recipes import distill, preference, sft
from areax.recipes.shared import offline

ROWS = 12


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Rows whose images differ in size and number, some without any, and some with the same."""
    path = tmp_path_factory.mktemp("sft")
    vlm.folder(path / "model", "qwen3_vl")
    made = []
    for i in range(ROWS):
        for j in range(i % 3):
            (path / f"{i}{j}.png").write_bytes(vlm.png(5 + 3 * j + i % 5, 6 + i % 4, i // 6))
        content = [*[{"type": "image"}] * (i % 3), {"type": "text", "text": f"{i % 3} images?"}]
        answer = f"{i % 3} of {i}."
        row = {"images": [f"{i}{j}.png" for j in range(i % 3)], "messages": [{"role": "user", "content": content}]}
        made.append({**row, "completion": answer})
    tiny.rows(path / "rows.jsonl", made)
    return path


def config(place, out, **changes):
    base = sft.Config(
        model=str(place / "model"), data=str(place / "rows.jsonl"), out=str(out), steps=4, batch=ROWS, length=64,
        rows=2, optim=Optimizer(lr=1e-2),
    )  # fmt: skip
    return replace(base, **changes)


def losses(out) -> list[float]:
    return [json.loads(line)["nll"] for line in (out / "metrics.jsonl").read_text().splitlines() if "nll" in line]


def reference(place) -> float:
    """Mean negative log-likelihood of the answers by transformers, which reads one row at a time."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(place / "model", attn_implementation="eager")
    tokens, processor = tokenizer.load(place / "model"), readers.load(place / "model")
    sample, found = offline.Demonstrations(tokens, "last", processor), []
    for line in (place / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        one = sample({**row, "images": [str(place / name) for name in row["images"]]})
        with torch.no_grad():
            logits = vlm.logits(model, one.tokens, [processor.media(image) for image in one.images])
        logp = torch.log_softmax(logits, -1).numpy()
        found += [logp[i - 1, one.tokens[i]] for i in np.flatnonzero(one.mask)]
    return -float(np.mean(found))


@pytest.mark.slow
def test_a_run_starts_at_transformers_loss_and_learns(place, tmp_path, capfd):
    sft.main(config(place, tmp_path / "out"))
    assert " GB, its vision tower frozen ...\n" in capfd.readouterr().err
    first, *_, last = losses(tmp_path / "out")
    assert first == pytest.approx(reference(place), rel=1e-4) and last < first - 0.1
    before, after = safetensors.read(place / "model"), safetensors.read(tmp_path / "out/model")
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert before.keys() == after.keys() and {name for name in before if "visual" in name} == same


@pytest.mark.long
@pytest.mark.parametrize("more", [{"vision": "auto"}, {"vision": "trained"}], ids=str)
def test_a_run_is_resumed_and_converted_exactly(place, tmp_path, more):
    """With a tower of its own learning rate, and with one that stays."""
    more = dict(more, steps=2, optim=Optimizer(lr=1e-2, vision_lr=1e-3 if more["vision"] == "trained" else 0.0))
    sft.main(config(place, tmp_path / "whole", save_every=1, **more))
    tiny.cut_off(tmp_path / "whole", tmp_path / "out", step=1)
    sft.main(config(place, tmp_path / "out", **more))
    files = [safetensors.read(tmp_path / name / "model") for name in ("whole", "out")]
    assert cli.main(["convert", str(tmp_path / "whole"), str(tmp_path / "converted")]) == 0
    files.append(safetensors.read(tmp_path / "converted"))
    start = safetensors.read(place / "model")
    for other in files[1:]:
        assert other.keys() == start.keys() and all(np.array_equal(other[name], files[0][name]) for name in start)
    moved = {name for name in start if not np.array_equal(start[name], files[0][name])}
    assert any("visual" in name for name in moved) == (more["vision"] == "trained")
    written = json.loads((tmp_path / "whole/config.json").read_text())["vision"]
    assert written == more["vision"].replace("auto", "frozen")


@pytest.mark.wide
@pytest.mark.mesh
def test_adapters_of_a_run_are_merged(place, tmp_path):
    """Into the text model; also of the state."""
    sft.main(config(place, tmp_path / "out", steps=2, lora=Lora(rank=2)))
    merged = safetensors.read(tmp_path / "out/model")
    assert cli.main(["convert", str(tmp_path / "out"), str(tmp_path / "converted"), "--merge"]) == 0
    assert cli.main(["convert", str(tmp_path / "out/adapter"), str(tmp_path / "other"), "--merge"]) == 0
    start = safetensors.read(place / "model")
    for path in (tmp_path / "converted", tmp_path / "other"):
        other = safetensors.read(path)
        assert other.keys() == merged.keys() == start.keys()
        assert all(np.array_equal(other[name], merged[name]) for name in merged)
    assert {name for name in start if not np.array_equal(start[name], merged[name])} == {
        name for name in start if "_proj" in name and "visual" not in name
    }


@pytest.mark.wide
@pytest.mark.mesh
def test_two_processes_train_as_one(place, tmp_path):
    """Each makes the patches of all images, and holds its part of the weights."""
    sft.main(config(place, tmp_path / "alone", steps=2))
    names = {"model": place / "model", "data": place / "rows.jsonl", "out": tmp_path / "both", "steps": 2, "rows": 2}
    words = [f"--{name}={value}" for name, value in names.items()]
    words += [f"--batch={ROWS}", "--length=64", "--optim.lr=1e-2", "--optim.warmup=0", "--mesh.fsdp=2"]
    jobs.run(["-m", "areax", "train", "sft", *words], 2, tmp_path / "logs")
    one, both = (safetensors.read(tmp_path / name / "model") for name in ("alone", "both"))
    start = safetensors.read(place / "model")
    for name, x in one.items():
        np.testing.assert_allclose(both[name], x, atol=1e-3 * np.abs(x - start[name]).max() + 1e-6, err_msg=name)


@pytest.mark.wide
@pytest.mark.mesh
def test_another_way_of_the_tower_does_not_fit_the_state(place, tmp_path):
    sft.main(config(place, tmp_path / "out", steps=1))
    with pytest.raises(
        ValueError, match="with other options, --vision frozen -> trained, which its state does not fit"
    ):
        sft.main(config(place, tmp_path / "out", vision="trained"))


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(init="random"), "--init random draws the text model alone, which reads no images"),
        (dict(vision="trained", lora=Lora(rank=2)), "--vision trained trains all of the tower, and --lora.rank 2"),
        (dict(optim=Optimizer(vision_lr=1e-6)), "--optim.vision-lr 1e-06 is for a tower in training, .* got auto"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(place, tmp_path, changes, words):
    with pytest.raises(ValueError, match=words) as raised:
        sft.main(config(place, tmp_path / "out", **changes))
    assert "\n" not in str(raised.value) and not (tmp_path / "out/metrics.jsonl").exists()


def preferred(place):
    """Rows with two answers each."""
    for line in (place / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        images = [str(place / name) for name in row["images"]]
        yield {**row, "images": images, "chosen": row["completion"], "rejected": "none of them."}


@pytest.mark.long
@pytest.mark.parametrize(
    "lora", [Lora(), pytest.param(Lora(rank=2), marks=pytest.mark.mesh)], ids=["weights", "adapters"]
)
def test_preferences_compare_with_a_reference_that_sees_the_images(place, tmp_path, lora):
    """Before the first step it is the policy itself: the loss is log 2."""
    rows = [{name: x for name, x in row.items() if name != "completion"} for row in preferred(place)]
    tiny.rows(tmp_path / "rows.jsonl", rows)
    asked = preference.Config(
        model=str(place / "model"), data=str(tmp_path / "rows.jsonl"), out=str(tmp_path / "out"), steps=2, batch=ROWS,
        length=64, rows=2, optim=Optimizer(lr=1e-2), lora=lora,
    )  # fmt: skip
    preference.main(asked)
    lines = [line for line in run_dir.read_lines(tmp_path / "out/metrics.jsonl") if line["kind"] == "preference"]
    assert lines[0]["loss"] == pytest.approx(np.log(2), abs=1e-6) and lines[1]["loss"] < lines[0]["loss"] - 1e-3
    asked = replace(asked, objective=core.RewardModel(), lora=Lora(), out=str(tmp_path / "reward"))
    with pytest.raises(ValueError, match="reward models read no images, got --vision frozen, or rows with images"):
        preference.main(asked)


@pytest.mark.wide
@pytest.mark.mesh
def test_a_teacher_sees_the_images_of_its_student(place, tmp_path):
    asked = distill.Config(
        model=str(place / "model"), teacher=str(place / "model"), data=str(place / "rows.jsonl"),
        out=str(tmp_path / "out"), steps=1, batch=ROWS, length=64, rows=2,
    )  # fmt: skip
    assert distill.main(asked)["divergence"] == pytest.approx(0, abs=1e-6)
    vlm.folder(tmp_path / "other", "qwen2_5_vl")
    with pytest.raises(ValueError, match="--teacher .*: must see images as the student, with window None of its tower"):
        distill.main(replace(asked, teacher=str(tmp_path / "other"), out=str(tmp_path / "two")))
    with pytest.raises(ValueError, match="--teachers, servers, get no images, and rows have some"):
        distill.main(replace(asked, teacher="", teachers=("http://127.0.0.1:9",), objective=core.Distill(top_k=2)))
