"""Canaries of GRPO runs: every step compares servers with the trainer, and none drifts where there is no fault."""

import contextlib

import pytest
import servers
import tiny

from areax.adapters.command_line.options import replaced
from areax.adapters.tracking import run_dir
from areax.core.losses import GRPO
from areax.core.optim import Optimizer
from areax.models.lora import Lora
from areax.recipes import grpo
from areax.rollout.engine.slots import Slots
from areax.rollout.fleet.canary import ROUNDING
from areax.rollout.fleet.push import Push
from areax.rollout.servers.local import Serve
from areax.rollout.tasks import arithmetic
from areax.rollout.types import Sampling

WAYS = {  # of versions to servers
    "whole": {},
    "inside": {"serve": Serve(slots=8, context=64, inside=True)},
    "adapters": {"lora": Lora(rank=2), "push": Push(canary_every=1, lora="adapter")},
    "differences": {"optim": Optimizer(lr=1e-4)},  # of weights in bf16, of which most stay in a step
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("canary")
    tiny.model(path / "model")
    tiny.model(path / "halved", dtype="bfloat16")
    tiny.rows(path / "rows.jsonl", arithmetic.splits()["train"][:40])
    (path / "rewards.py").write_text("def score(text, row):\n    return sum(c.isdigit() for c in text) / 4\n")
    return path


def compared(place, way, eta, steps):
    """The canaries of a run: its events of this kind, metrics and summary."""
    model, out = place / ("halved" if way == "differences" else "model"), place / f"{way}-{eta}-{steps}"
    base = grpo.Config(str(model), str(place / "rows.jsonl"), f"{place}/rewards.py:score")
    config = replaced(
        base, out=str(out), steps=steps, groups=2, group_size=4, max_concurrent=4, length=60, rows=4, eta=eta,
        sampling=Sampling(max_new_tokens=4), objective=GRPO(advantage={"std": "none"}), optim=Optimizer(lr=3e-3),
        serve=Serve(slots=8, context=64), push=Push(canary_every=1), samples_every=0, save_minutes=0.0, journal="off",
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        own = WAYS[way]
        if way == "differences":
            remote = stack.enter_context(servers.embedded(model, slots=8, context=64))
            url = stack.enter_context(servers.stager(place / f"stager-{eta}-{steps}"))
            own = own | {"servers": (remote.url,), "stagers": (url,), "serve": Serve()}
        summary = grpo.main(replaced(config, **own))
    events = [*run_dir.read_lines(out / "events.jsonl")]
    pushed = [event for event in events if event["kind"] == "push"]
    lines = [line for line in run_dir.read_lines(out / "metrics.jsonl") if line["kind"] == "grpo"]
    return [event for event in events if event["kind"] == "canary"], pushed, lines, summary


def check(place, way, eta, steps):
    """Runs without a fault; prints the largest differences and limits."""
    made, pushed, lines, summary = compared(place, way, eta, steps)
    assert summary["complete"] and summary["steps"] == steps and "drifted" not in summary["counts"]
    assert len(made) == len(pushed) == steps + 1 and not any(event["drifts"] for event in made)
    seen = [line for line in lines if "canary_diff" in line]
    assert len(seen) > steps / 2 and not any(line["canary_drifts"] for line in seen)
    least, most = ROUNDING["rounded" if way == "differences" else "F32"]
    largest = {name: max(event[name] for event in made) for name in ("trainer", "cache")}
    print(way, eta, steps, largest, "of", made[-1]["limits"], "moved", len({e["label"] for e in made}))
    assert largest["trainer"] < least and largest["cache"] < 1e-5 and made[0]["limits"][0] == most
    if way == "differences":
        sizes = [push["stage_bytes"] / push["bytes"] for push in pushed[2:]]
        assert min(sizes) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("way", ["whole", "adapters"])
def test_a_run_without_a_fault_has_no_drift(place, way):
    check(place, way, 0, 3)


@pytest.mark.slow
def test_a_run_flushes_a_prefix_cache_that_keeps_old_weights_and_goes_on(place, monkeypatch):
    updated, swap, clear = set(), Slots.swap, Slots.clear
    monkeypatch.setattr(Slots, "swap", lambda self, weights: (updated.add(self), swap(self, weights))[1])
    monkeypatch.setattr(Slots, "clear", lambda self: updated.discard(self) if self in updated else clear(self))
    made, _, lines, summary = compared(place, "inside", 0, 4)
    assert summary["complete"] and summary["counts"]["drifted"] >= 3 and summary["counts"]["stale"] >= 3
    steps = [(int(event["label"].partition("-")[0]), event["after"], event["drifts"]) for event in made]
    assert steps[:5] == [(0, "", False), (1, "", True), (1, "flush", False), (2, "", True), (2, "flush", False)]
    assert [line["canary_drifts"] for line in lines] == [0, 1, 1, 1] and lines[2]["canary_cache_diff"] > 0.001


@pytest.mark.long
@pytest.mark.parametrize("eta", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_no_drift_in_many_steps_without_a_fault(place, way, eta):
    check(place, way, eta, 130)
