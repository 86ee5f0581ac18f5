"""Replicas of an engine: together they do what one does, with its bits, and computing each prompt once."""

import contextlib
import dataclasses
import json
import threading
import time

import jax
import numpy as np
import pytest
import tiny
from test_rollout_engine_mesh import model as even_model
from test_rollout_engine_pages import CONTEXT, PAGE, requests, same
from test_rollout_engine_programs_decode import model

from areax.adapters import cli
from areax.models import lora, table
from areax.rollout.engine import server
from areax.rollout.engine.checkpoint import read_weights
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.replicas import SUMMED, Replicas, serving
from areax.rollout.engine.request import Request, Sampling
from areax.rollout.servers.engine_mesh import EngineMesh
from areax.rollout.servers.engine_options import EngineOptions

OPTIONS = {"slots": 4, "context": CONTEXT, "steps": 4, "page": PAGE}
LONG = Sampling(max_new_tokens=100, ignore_eos=True, seed=3)
SPEC = lora.Lora(rank=3, alpha=5)


def replicas(**options):
    config, params = model("qwen3")
    return Replicas(config, params, mesh=EngineMesh(dp=2), **OPTIONS | options)


def one_engine(params=None):
    config, own = model("qwen3")
    return Engine(config, own if params is None else params, **OPTIONS)


def negative():
    return jax.tree.map(lambda x: -x, model("qwen3")[1])


def loads(both):
    return [engine.requests for engine in both._engines]


def watched(monkeypatch):
    """A list that gets each barrier that is made."""
    barriers: list = []
    make = threading.Barrier
    monkeypatch.setattr(threading, "Barrier", lambda n: barriers.append(make(n)) or barriers[-1])
    return barriers


def await_(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def started(act, *arguments):
    thread = threading.Thread(target=act, args=arguments)
    thread.start()
    return thread


def paused(both, mode, told):
    """Pauses while `told` holds what has begun to run."""
    pause = started(both.pause, mode)
    await_(lambda: all(engine._commands.soon or engine.paused for engine in both._engines))
    told.go.set()
    pause.join(60)
    assert both.paused


class Told:
    """Collects the last progress of requests that were submitted; `running` is set once one has a token. An engine
    that reports one waits for `go`."""

    def __init__(self, both, *asked, go=True):
        self.last, self.count = {}, len(asked)
        self.ended, self.running, self.go = threading.Event(), threading.Event(), threading.Event()
        if go:
            self.go.set()
        both.submit_all(asked, self)

    def __call__(self, progress):
        self.last[progress.rid] = progress
        self.running.set()
        assert self.go.wait(60)
        if sum(one.finish is not None for one in self.last.values()) == self.count:
            self.ended.set()

    def wait(self):
        assert self.ended.wait(60)
        return self.last


@pytest.mark.slow
def test_a_request_has_the_bits_of_one_engine_in_any_replica():
    with one_engine() as one, replicas() as both:
        wanted = one.generate(requests("qwen3"))
        for order in (slice(None), slice(None, None, -1)):
            assert all(map(same, both.generate(requests("qwen3")[order]), wanted[order]))
        assert all(engine.stats()["ended"] > 2 for engine in both._engines)
        each, stats = [engine.stats() for engine in both._engines], both.stats()
    assert all(stats[name] == sum(one[name] for one in each) for name in SUMMED)
    assert stats["slots"] == both.slots == 8 and stats["ended"] == 18


@pytest.mark.mesh
def test_replicas_may_be_split_themselves():
    config, params = even_model("qwen3")
    split = EngineMesh(dp=2, tp=2)
    with (
        Engine(config, params, mesh=split.replica, **OPTIONS) as one,
        serving(config, params, mesh=split, **OPTIONS) as both,
    ):
        assert all(map(same, both.generate(requests("qwen3")), one.generate(requests("qwen3"))))
        used = [{d for x in jax.tree.leaves(e._slots.device.weights) for d in x.devices()} for e in both._engines]
    assert [len(devices) for devices in used] == [2, 2] and not used[0] & used[1]


def test_a_group_goes_to_one_replica_and_its_prompt_is_computed_once():
    """If it is submitted together, whatever its prompt; else as far as whole chunks of it go."""
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(8, 89, n).tolist()) for n in (50, 50, 8, 8)]
    short = Sampling(max_new_tokens=3, ignore_eos=True)
    with replicas() as both:
        done = both.generate([Request(f"{i} {k}", p, short) for k in range(3) for i, p in enumerate(prompts)])
        assert [progress.cached_tokens for progress in done] == [0] * 4 + [49, 49, 7, 7] * 2
        assert [engine.stats()["ended"] for engine in both._engines] == [6, 6]
        for _ in range(3):
            for i in (1, 0):
                assert both.generate([Request("again", prompts[i], short)])[0].cached_tokens == 49
        assert both.flush() and both.generate([Request("again", prompts[0], short)])[0].cached_tokens == 0


def test_a_busy_replica_passes_requests_on_even_if_it_has_their_prompt():
    prompt = requests("qwen3")[2].prompt
    with contextlib.closing(replicas()) as both:
        for i in range(20):
            both.submit(Request(str(i), prompt, LONG), lambda _: None)
        assert min(loads(both)) > 0 and abs(np.subtract(*loads(both))) <= 9


def test_requests_without_seeds_get_those_that_one_engine_would_give_them():
    asked = [Request(str(i), (9, 10, 11 + i % 2), Sampling(max_new_tokens=8, ignore_eos=True)) for i in range(6)]
    with one_engine() as one, replicas() as both:
        for refused in (Request("a", (1000,)), Request("a", (9,), adapter="none")):
            with pytest.raises(ValueError, match="vocabulary|not loaded"):
                both.submit(refused, lambda _: None)  # takes no seed
        found = both.generate(asked)
        assert all(map(same, found, one.generate(asked)))
    assert len({tuple(progress.tokens) for progress in found}) == 6


def test_what_one_replica_refuses_none_has():
    good = [Request("a", (9, 10), LONG), Request("b", (11, 12), LONG)]
    with contextlib.closing(replicas()) as both:
        for bad, words in [
            (Request("a", (13,)), "names must be unique"),
            (Request("c", (13,), adapter="x"), "'x' is not loaded"),
            (Request("c", (1000,)), "vocabulary"),
        ]:
            with pytest.raises(ValueError, match=words):
                both.submit_all([*good, bad], lambda _: None)
            assert loads(both) == [0, 0]
        both.submit_all(good, lambda _: None)
        assert loads(both) == [1, 1]
        for taken in good:
            with pytest.raises(ValueError, match="names must be unique"):
                both.submit(taken, lambda _: None)


def test_a_pause_an_abort_and_new_weights_reach_all():
    asked = [Request(str(i), (9, 10 + i), dataclasses.replace(LONG, max_new_tokens=60)) for i in range(4)]
    with one_engine(negative()) as one:
        wanted = one.generate(asked)
    with replicas() as both:
        told = Told(both, *asked, go=False)
        paused(both, "retract", told)
        assert not both.able and loads(both) == [2, 2]
        both.load(negative(), "new")
        assert both.version == "new" and {engine.version for engine in both._engines} == {"new"}
        later = Told(both, *(dataclasses.replace(one, rid=f"later {one.rid}") for one in asked))
        both.resume()
        assert {progress.versions[-1][0] for progress in told.wait().values()} == {"new"}
        assert all(same(later.wait()[f"later {progress.rid}"], progress) for progress in wanted)
        told = Told(both, *asked, go=False)
        both.abort("0", "1")
        both.abort_all()
        told.go.set()
        assert {progress.finish["type"] for progress in told.wait().values()} == {"abort"}
        both.set_version("renamed")
        assert both.generate(asked[:1])[0].versions[0][0] == "renamed"


def test_either_all_replicas_switch_or_none(monkeypatch):
    """One of them has a request that is paused in place, whose cache cannot be flushed; then both wait for it."""
    barriers = watched(monkeypatch)
    with replicas() as both:
        told = Told(both, Request("a", (9, 10), LONG), go=False)
        await_(told.running.is_set)
        paused(both, "in_place", told)
        assert loads(both) == [1, 0]
        staged = both.stage(negative())
        with pytest.raises(ValueError, match="cannot be flushed while 1 requests are paused in place"):
            both.swap(staged, "new")
        with pytest.raises(ValueError, match="no requests may be running, got 1"):
            both.release()
        assert {engine.version for engine in both._engines} == {"default"} and not both.released
        told.go.clear()
        both.resume()
        swap = started(both.swap, staged, "new")
        await_(lambda: len(barriers) == 3 and barriers[2].n_waiting)
        later = Told(both, Request("b", (9, 10), LONG))  # to the idle one
        assert loads(both) == [1, 1] and both.version == "default"
        told.go.set()
        swap.join(60)
        assert [span[0] for span in told.wait()["a"].versions] == ["default"]
        assert [span[0] for span in later.wait()["b"].versions] == ["new"]


def test_a_pause_lets_new_weights_in_that_wait_for_a_replica(monkeypatch):
    barriers = watched(monkeypatch)
    with replicas() as both:
        told = Told(both, Request("a", (9, 10), LONG), go=False)
        swap = started(both.load, negative(), "new")
        await_(lambda: barriers and barriers[0].n_waiting)
        flush = started(both.flush)
        time.sleep(0.05)  # so that it comes first, and yet does not hold up the pause
        paused(both, "retract", told)
        for thread in (swap, flush):
            thread.join(60)
        assert both.version == "new"
        both.resume()
        assert [span[0] for span in told.wait()["a"].versions] == ["default", "new"]


@pytest.mark.slow
def test_engines_that_wait_for_each_other_can_be_closed(monkeypatch):
    barriers, failed = watched(monkeypatch), []
    both = replicas()
    both.start()
    told = Told(both, Request("a", (9, 10), LONG), go=False)

    def load():
        try:
            both.load(negative(), "new")
        except RuntimeError as error:
            failed.append(str(error))

    waiting = started(load)
    await_(lambda: barriers and barriers[0].n_waiting)
    closing = started(both.close)
    await_(lambda: both._engines[0]._closing)
    told.go.set()
    closing.join(60)
    waiting.join(60)
    assert failed == ["Engine: the engine is closed"] and told.wait()["a"].finish["type"] == "abort"


def test_memory_is_released_and_taken_by_all():
    ask = [Request(str(i), (9, 10), LONG) for i in range(2)]
    with replicas() as both:
        wanted = both.generate(ask)
        both.release()
        assert len(both.released) == 3 and both.stats()["bytes"] == 0 and not both.loaded
        both.reclaim()
        assert not both.released
        both.load(model("qwen3")[1], "again")
        assert both.able and all(map(same, both.generate(ask), wanted))


@pytest.mark.slow
def test_adapters_are_loaded_by_all_or_by_none():
    config, _ = model("qwen3")
    one, other = (
        (spec, tiny.weights(lora.table(table(config), spec), 0.2)) for spec in (SPEC, dataclasses.replace(SPEC, rank=4))
    )
    asked = [Request(str(i), (9, 10 + i), LONG, adapter="one") for i in range(2)]
    with one_engine() as engine, replicas() as both:
        for each in (engine, both):
            each.load_adapter("one", *one, "path")
        assert both.adapters == {"one": "path"}
        assert all(map(same, both.generate(asked), engine.generate(asked)))
        both._engines[0].unload_adapter("one")  # now the first would take what the second refuses
        with pytest.raises(ValueError, match="same rank"):
            both.load_adapter("other", *other)
        assert not both._engines[0].adapters
        both._engines[0].load_adapter("one", *one, "path")
        both.unload_adapter("one")
        assert both.adapters == {} and all(done._slots.device.adapters.factors is None for done in both._engines)


def test_replicas_need_devices_of_their_own(tmp_path, capsys):
    folder = tiny.model(tmp_path / "model")
    assert cli.main(["serve", str(folder), "--bench", *EngineMesh(dp=3, tp=3).words]) == 2
    assert "Engine: dp 3 x tp 3 needs 9 devices, got 8 of this process" in capsys.readouterr().err
    config, params = model("qwen3")
    with pytest.raises(ValueError, match="dp must be 1, got 2"):
        Engine(config, params, mesh=EngineMesh(dp=2))


def test_a_callback_may_not_wait_for_its_engine():
    refused = []
    with replicas() as both:

        def tell(progress):
            try:
                both.pause("abort")
            except RuntimeError as error:
                refused.append(str(error))

        both.submit(Request("a", (9, 10), Sampling(max_new_tokens=1)), tell)
        both.generate([Request("b", (9, 10), LONG)])
    assert "a callback may only submit and abort" in refused[0]


def test_the_ready_line_says_what_is_served(tmp_path):
    path = str(tiny.model(tmp_path / "model"))
    config, params, sums = read_weights(path, "float32")
    stored = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    config = dataclasses.replace(
        config, source=json.dumps({**json.loads(config.source), "quantization_config": stored})
    )  # fmt: skip
    options = EngineOptions(slots=4, context=64, mesh=EngineMesh(dp=2), kv_cache_dtype="float8")
    service = server.prepare(path, options, config, params, sums, dtype="float32", version="0")
    assert server.described(service) == (
        f"qwen3 {path}: 16.6K parameters in float32 (stored in fp8) on dp 2, a cache of 512 tokens in float8, 8 slots "
        "of 64 tokens"
    )
    service.engine.close()
