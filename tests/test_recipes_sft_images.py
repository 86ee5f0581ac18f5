"""SFT on rows with images, from files to files: transformers' loss, the tower as it was, resumed, converted."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
import transformers
import vlm

from areax.adapters import cli, safetensors, tokenizer
from areax.adapters.data import images as readers
from areax.core.optim import Optimizer
from areax.models.lora import Lora
from areax.recipes import sft
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
    sample, found = offline.demonstrations(tokens, "last", processor), []
    for line in (place / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        one = sample({**row, "images": [str(place / name) for name in row["images"]]})
        with torch.no_grad():
            logits = vlm.logits(model, one.tokens, [processor.media(image) for image in one.images])
        logp = torch.log_softmax(logits, -1).numpy()
        found += [logp[i - 1, one.tokens[i]] for i in np.flatnonzero(one.mask)]
    return -float(np.mean(found))


def test_a_run_starts_at_transformers_loss_and_learns(place, tmp_path):
    sft.main(config(place, tmp_path / "out"))
    first, *_, last = losses(tmp_path / "out")
    assert first == pytest.approx(reference(place), rel=1e-4) and last < first - 0.1
    before, after = safetensors.read(place / "model"), safetensors.read(tmp_path / "out/model")
    same = {name for name in before if np.array_equal(before[name], after[name])}
    assert before.keys() == after.keys() and {name for name in before if "visual" in name} == same


@pytest.mark.parametrize("more", [{"vision": "trained"}, {"vision": "auto"}], ids=str)
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
