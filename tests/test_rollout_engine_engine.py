"""Requests through the engine: independence of the schedule, pauses, new weights, and how requests end."""

import dataclasses
import threading

import jax
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from areax import models
from areax.adapters import tokenizer
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.request import Request, Sampling

BYTES = tokenizer.byte_level()
CONFIG = models.config_from_hf(
    dict(
        model_type="qwen3", vocab_size=len(BYTES), hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=20, tie_word_embeddings=True, eos_token_id=7,
        max_position_embeddings=256,
    )
)  # fmt: skip
OLD, NEW = (tiny.weights(models.table(CONFIG), 0.16, seed) for seed in (0, 1))


def decode(ids):
    return BYTES.decode(ids, skip_special_tokens=True)


@pytest.fixture
def engine():
    """A new engine; its compiled programs are shared by all tests here."""
    with Engine(CONFIG, OLD, slots=4, context=160, steps=4, decode=decode) as engine:
        yield engine


def prompt(seed, n):
    return tuple(np.random.default_rng(seed).integers(8, CONFIG.vocab, n).tolist())


def ask(rid, tokens, more=40, **sampling):
    return Request(rid, tuple(tokens), Sampling(**{"max_new_tokens": more, "ignore_eos": True, "seed": 5, **sampling}))


def same(a, b):
    """Bit for bit."""
    return a.tokens == b.tokens and a.logp == b.logp and a.top == b.top and a.input_logp == b.input_logp


def test_decoding_is_compiled_once_ahead_of_requests():
    """For a number of slots of its own, so that no other test has compiled it."""
    compiled = []

    def note(event, seconds, **of):
        if event.endswith("backend_compile_duration"):
            compiled.append(of["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        with Engine(CONFIG, OLD, slots=3, context=160, steps=4) as engine:
            engine.compile_ahead().join()
            assert compiled.count("jit(decode)") == 1
            engine.generate([ask("a", prompt(1, 5), more=3)])
        assert compiled.count("jit(decode)") == 1 and compiled.count("jit(prefill)") == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


# Samples do not depend on the schedule.


POOL = [
    dataclasses.replace(
        ask(
            str(i), prompt(i % 7, (1, 5, 17, 60, 64, 65, 100)[i % 7]), more=(0, 3, 30, 9, 55)[i % 5], seed=100 + i,
            temperature=(1.0, 0.0, 0.7)[i % 3], top_k=(-1, 8)[i % 4 == 1], top_p=(1.0, 0.8)[i % 6 == 2],
            min_p=(0.0, 0.1)[i % 8 == 3], min_new_tokens=(0, 2)[i % 10 == 2], ignore_eos=i % 3 > 0,
        ),
        input_logprobs_from=(None, 0, 3)[i % 4] if i % 4 < 3 and i % 7 else None,
        top_logprobs=(0, 4)[i % 5 == 2],
    )
    for i in range(28)
]  # fmt: skip


@pytest.fixture(scope="module")
def alone():
    """Each request of the pool, served alone."""
    with Engine(CONFIG, OLD, slots=4, context=160, steps=4, decode=decode) as engine:
        results = {}
        for request in POOL:
            engine.flush()
            results[request.rid] = engine.generate([request])[0]
    return results


@settings(max_examples=12)
@given(st.permutations(POOL), st.integers(1, 28), st.lists(st.integers(0, 28), max_size=3))
def test_samples_do_not_depend_on_neighbours_slots_or_order(alone, order, count, cuts):
    ended, done = threading.Semaphore(0), {}
    with Engine(CONFIG, OLD, slots=4, context=160, steps=4, decode=decode) as engine:
        cuts = sorted(min(cut, count) for cut in cuts)
        for start, stop in zip([0, *cuts], [*cuts, count], strict=True):  # bursts that arrive while others run
            arrived = threading.Event()

            def tell(progress, arrived=arrived):
                arrived.set()
                if progress.finish:
                    done[progress.rid] = progress
                    ended.release()

            for request in order[start:stop]:
                engine.submit(request, tell)
            if stop > start:
                arrived.wait()
        for _ in range(count):
            ended.acquire()
    assert all(same(done[request.rid], alone[request.rid]) for request in order[:count])


def test_requests_with_one_prompt_share_its_prefill(engine, alone):
    sampling = lambda seed: dataclasses.replace(POOL[23].sampling, seed=seed)
    requests = [dataclasses.replace(POOL[23], rid=str(i), sampling=sampling(i)) for i in range(9)]
    together = engine.generate(requests)
    shared = len(POOL[23].prompt) - 1
    assert [p.cached_tokens for p in together] == [0, *[shared] * 8]
    assert engine.stats()["prefilled_tokens"] == shared
    for request, progress in zip(requests, together, strict=True):
        assert engine.flush()
        single = engine.generate([request])[0]
        assert single.cached_tokens == 0 and same(single, progress)


def test_seeds_reproduce_and_differ(engine):
    a, b, c = engine.generate([ask("a", prompt(1, 9)), ask("b", prompt(1, 9)), ask("c", prompt(1, 9), seed=6)])
    assert same(a, b) and a.tokens != c.tokens
    unseeded = [ask(str(i), prompt(1, 9), seed=None) for i in range(3)]
    first = engine.generate(unseeded)
    assert len({tuple(p.tokens) for p in first}) == 3
    with Engine(CONFIG, OLD, slots=4, context=160, steps=4, decode=decode) as again:
        assert all(map(same, again.generate(unseeded), first))


def test_a_request_resent_with_its_tokens_continues_as_before(engine):
    whole = engine.generate([ask("whole", prompt(2, 20), 60)])[0]
    for n in (1, 13, 59):
        rest = engine.generate([ask("rest", [*prompt(2, 20), *whole.tokens[:n]], 60 - n)])[0]
        assert rest.tokens == whole.tokens[n:]
        np.testing.assert_allclose(rest.logp, whole.logp[n:], atol=1e-5)


# Pauses and new weights.


def pause_midway(engine, requests, mode):
    """Submits the requests and pauses once each has some tokens; returns (progress at the pause, wait for all ends)."""
    had, ends, gate = {}, {r.rid: threading.Event() for r in requests}, threading.Event()
    begun, last = threading.Event(), {}

    def tell(progress):
        last[progress.rid] = progress
        if progress.finish:
            ends[progress.rid].set()
        elif len(last) == len(requests) and not begun.is_set():
            begun.set()
            gate.wait()  # blocks the engine's thread until the pause is requested

    for request in requests:
        engine.submit(request, tell)
    begun.wait()
    threading.Timer(0.1, gate.set).start()
    engine.pause(mode)
    had = dict(last)

    def finish():
        for end in ends.values():
            end.wait()
        return last

    return had, finish


def midway():
    return [ask(str(i), prompt(i, 10 + 7 * i), 60, seed=i) for i in range(3)]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_no_token(engine, mode):
    whole = {p.rid: p for p in engine.generate(midway())}
    had, finish = pause_midway(engine, midway(), mode)
    assert engine.paused and not any(p.finish for p in had.values())
    assert engine.stats()["running"] == (3 if mode == "in_place" else 0)
    late = threading.Event()
    engine.submit(ask("late", prompt(9, 4), 3), lambda p: p.finish and late.set())
    assert not late.wait(0.1)
    engine.resume()
    done = finish()
    late.wait()
    for rid, progress in done.items():
        assert progress.tokens == whole[rid].tokens and progress.tokens[: len(had[rid].tokens)] == had[rid].tokens
        np.testing.assert_allclose(progress.logp, whole[rid].logp, atol=1e-5)
        assert progress.retractions == (mode == "retract")
    if mode == "in_place":
        assert all(same(done[rid], whole[rid]) for rid in done)


def test_a_pause_with_abort_ends_running_requests_with_their_tokens_so_far(engine):
    whole = {p.rid: p for p in engine.generate(midway())}
    had, finish = pause_midway(engine, midway(), "abort")
    done = finish()
    for rid, progress in done.items():
        assert progress.finish["type"] == "abort"
        n = len(progress.tokens)
        assert 0 < n < 60 and progress.tokens == whole[rid].tokens[:n] and progress.versions == [("default", 0, n)]
    assert engine.paused and engine.stats()["running"] == 0
    engine.resume()
    assert engine.generate([ask("after", prompt(1, 3), 2)])[0].finish["type"] == "length"


def test_tokens_carry_the_version_that_sampled_them(engine):
    had, finish = pause_midway(engine, midway(), "retract")
    engine.load(NEW, "v1")
    assert engine.version == "v1"
    engine.resume()
    for rid, progress in finish().items():
        n = len(had[rid].tokens)
        assert progress.versions == [("default", 0, n), ("v1", n, 60)]
        # after the switch the tokens are those that the new weights alone would sample
        with Engine(CONFIG, NEW, slots=4, context=160, steps=4) as fresh:
            request = ask(rid, [*midway()[int(rid)].prompt, *progress.tokens[:n]], 60 - n, seed=int(rid))
            rest = fresh.generate([request])[0]
        assert rest.tokens == progress.tokens[n:] and rest.logp == progress.logp[n:]


def test_with_requests_paused_in_place_a_flush_is_refused_and_the_old_weights_stay(engine):
    whole = {p.rid: p for p in engine.generate(midway())}
    _, finish = pause_midway(engine, midway(), "in_place")
    assert engine.flush() is False
    with pytest.raises(ValueError, match="paused in place"):
        engine.load(NEW, "v1")
    assert engine.version == "default"
    engine.resume()
    assert all(same(progress, whole[rid]) for rid, progress in finish().items())


def test_a_load_without_flush_continues_over_the_old_cache(engine):
    had, finish = pause_midway(engine, midway(), "in_place")
    engine.load(NEW, "v1", flush=False)
    engine.resume()
    for rid, progress in finish().items():
        n = len(had[rid].tokens)
        assert progress.versions == [("default", 0, n), ("v1", n, 60)] and len(progress.tokens) == 60
    # new requests do not use the cache of the old weights
    repeat = engine.generate([midway()[0]])[0]
    with Engine(CONFIG, NEW, slots=4, context=160, steps=4) as fresh:
        assert repeat.cached_tokens == 0 and same(repeat, fresh.generate([midway()[0]])[0])


def test_a_load_without_a_pause_waits_for_running_requests_while_new_ones_queue(engine):
    running, loaded = threading.Event(), threading.Event()
    results = {}

    def tell(progress):
        results[progress.rid] = progress
        running.set()

    engine.submit(ask("old", prompt(0, 5), 150), tell)
    running.wait()
    threading.Thread(target=lambda: (engine.load(NEW, "v1"), loaded.set())).start()
    late = engine.generate([ask("late", prompt(0, 5), 8)])[0]
    loaded.wait()
    assert results["old"].versions == [("default", 0, 150)] or results["old"].finish is None
    assert late.versions == [("v1", 0, 8)] or late.versions == [("default", 0, 8)]


def test_a_new_label_applies_from_the_next_token(engine):
    had, finish = pause_midway(engine, midway()[:1], "in_place")
    engine.set_version("renamed")
    engine.resume()
    n = len(had["0"].tokens)
    assert finish()["0"].versions == [("default", 0, n), ("renamed", n, 60)]


def test_weights_of_another_shape_are_refused(engine):
    with pytest.raises(ValueError, match=r"norm must be \(\(48,\), 'float32'\)"):
        engine.load({**NEW, "norm": NEW["norm"][1:]}, "v1")
    with pytest.raises(ValueError, match="head must be absent"):
        engine.load({**NEW, "head": NEW["embed"]}, "v1")
    assert engine.version == "default"


def test_the_callers_weights_may_be_deleted():
    params = jax.tree.map(lambda x: x.copy(), OLD)
    with Engine(CONFIG, params, slots=4, context=160, steps=4) as engine:
        jax.tree.map(lambda x: x.delete(), params)
        assert len(engine.generate([ask("a", prompt(0, 5), 3)])[0].tokens) == 3


def test_nan_weights_leave_no_trace_in_the_cache(engine):
    asked = [dataclasses.replace(POOL[i], rid=str(i)) for i in (16, 23, 9)]
    before = engine.generate(asked)
    engine.load(jax.tree.map(lambda x: x * np.nan, OLD), "diverged")
    engine.generate([ask("a", prompt(0, 100), 50), ask("b", prompt(1, 30), 50)])
    engine.load(OLD, "restored")
    assert all(map(same, engine.generate(asked), before))


@pytest.mark.slow
def test_weights_may_be_sharded_over_a_training_mesh(engine):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    last = lambda x: jax.sharding.PartitionSpec(*[None] * (x.ndim - 1), "tp")
    with jax.set_mesh(mesh):
        sharded = jax.tree.map(lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, last(x))), OLD)
        with Engine(CONFIG, sharded, slots=4, context=160, steps=4) as beside:
            first = beside.generate([POOL[16]])[0]
            beside.load(sharded, "v1")
            second = beside.generate([POOL[16]])[0]
    assert same(first, second) and same(first, engine.generate([POOL[16]])[0])


# How requests end.


def test_stop_ids_end_a_request_and_are_included(engine):
    whole = engine.generate([ask("whole", prompt(3, 9))])[0]
    stop = whole.tokens[11]
    first = whole.tokens.index(stop)
    for sampling in ({"stop_token_ids": (stop,)}, {"stop_token_ids": (1, 2, stop), "ignore_eos": False}):
        done = engine.generate([ask("stopped", prompt(3, 9), **sampling)])[0]
        if 7 in whole.tokens[:first] and "ignore_eos" in sampling:
            continue
        assert done.tokens == whole.tokens[: first + 1] and done.logp == whole.logp[: first + 1]
        assert done.finish == {"type": "stop", "matched": stop}
        assert done.text == decode(whole.tokens[:first])
    later = engine.generate([ask("later", prompt(3, 9), stop_token_ids=(stop,), min_new_tokens=20)])[0]
    assert stop not in later.tokens[:20] and later.tokens[:first] == whole.tokens[:first]


def test_the_stop_ids_of_the_model_apply_unless_ignored():
    config = dataclasses.replace(CONFIG, eos=tuple(range(16)))
    with Engine(config, OLD, slots=4, context=160, steps=4) as engine:
        a, b, c = engine.generate([
            ask("a", prompt(3, 9), 80, ignore_eos=False), ask("b", prompt(3, 9), 80),
            ask("c", prompt(3, 9), 80, ignore_eos=False, min_new_tokens=30),
        ])  # fmt: skip
    assert a.finish["type"] == "stop" and a.tokens[-1] < 16 and min(a.tokens[:-1], default=99) >= 16
    assert len(b.tokens) == 80 and len(c.tokens) > 30 and min(c.tokens[:30]) >= 16


def test_a_stop_string_removes_what_was_generated_after_it(engine):
    whole = engine.generate([ask("whole", prompt(4, 9), 60)])[0]
    stop = next(pair for i in range(5, 60) if (pair := whole.text[i : i + 2]).isascii())
    done = engine.generate([ask("stopped", prompt(4, 9), 60, stop=("not in there", stop))])[0]
    at = whole.text.index(stop)
    assert done.finish == {"type": "stop", "matched": stop} and done.text == whole.text[:at]
    n = len(done.tokens)
    assert done.tokens == whole.tokens[:n] and done.logp == whole.logp[:n] and done.versions == [("default", 0, n)]
    assert stop in decode(done.tokens) and stop not in decode(done.tokens[:-1])


def test_no_new_tokens_means_prefill_only(engine):
    done = engine.generate([
        dataclasses.replace(ask("a", prompt(5, 30), 0), input_logprobs_from=0, top_logprobs=2),
        ask("b", prompt(5, 30), 0),
        dataclasses.replace(ask("c", prompt(5, 1), 0), input_logprobs_from=0),
        dataclasses.replace(ask("d", prompt(5, 30), 0), input_logprobs_from=28),
    ])  # fmt: skip
    assert all(p.finish == {"type": "length", "length": 0} and p.tokens == [] for p in done)
    a, b, c, d = done
    assert len(a.input_logp) == len(a.input_top) == 30 and a.input_logp[0] is None and len(a.input_top[1]) == 2
    assert b.input_logp == [] and c.input_logp == [None] and d.input_logp == a.input_logp[28:] and d.input_top == []


def test_abort_ends_running_and_waiting_requests(engine):
    begun, ended, done = threading.Event(), threading.Semaphore(0), {}

    def tell(progress):
        begun.set()
        if progress.finish:
            done[progress.rid] = progress
            ended.release()

    for i in range(6):  # four slots: two wait
        engine.submit(ask(str(i), prompt(i, 5), 150), tell)
    begun.wait()
    engine.abort("5")
    engine.abort("nobody")
    engine.abort_all()
    for _ in range(6):
        ended.acquire()
    assert all(p.finish["type"] == "abort" for p in done.values())
    assert done["5"].tokens == [] and engine.stats()["running"] == engine.stats()["queued"] == 0


def test_closing_ends_running_requests():
    done = []
    with Engine(CONFIG, OLD, slots=4, context=160, steps=4) as engine:
        engine.pause("abort")
        engine.submit(ask("a", prompt(0, 5)), done.append)
    assert done[0].finish["type"] == "abort"
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(ask("a", prompt(0, 5)), done.append)


def test_progress_grows_and_earlier_reports_stay_unchanged(engine):
    seen, end = [], threading.Event()

    def tell(progress):
        seen.append((progress, len(progress.tokens)))
        if progress.finish:
            end.set()

    engine.submit(ask("a", prompt(0, 5), 30), tell)
    end.wait()
    assert [n for _, n in seen] == [4, 8, 12, 16, 20, 24, 28, 30]
    for progress, n in seen:
        assert len(progress.tokens) == len(progress.logp) == n and progress.versions == [("default", 0, n)]
        assert seen[-1][0].text.startswith(progress.text)


@pytest.mark.parametrize(
    "request_, words",
    [
        (ask("a", ()), "Either text"),
        (ask("a", (3, CONFIG.vocab)), f"from 0 to {CONFIG.vocab - 1}"),
        (ask("a", (3, -1)), "input_ids"),
        (ask("a", (3, 1.5)), "input_ids"),
        (ask("a", (3,) * 161, 0), r"The input \(161 tokens\) is longer than the model's context length \(160 tokens\)"),
        (ask("a", (3,) * 160, 1), "are together longer"),
        (ask("a", (3,), -1), "max_new_tokens"),
        (ask("a", (3,), 5, min_new_tokens=6), "min_new_tokens"),
        (ask("a", (3,), temperature=-1), "temperature must be a non-negative finite number, got -1."),
        (ask("a", (3,), temperature=float("nan")), "temperature"),
        (ask("a", (3,), top_p=0.0), "top_p"),
        (ask("a", (3,), top_k=0), "top_k"),
        (ask("a", (3,), min_p=1.5), "min_p"),
        (ask("a", (3,), seed=-1), "sampling_seed"),
        (ask("a", (3,), seed=1.5), "seed must be an integer"),
        (ask("a", (3,), 2.0), "max_new_tokens must be an integer"),
        (ask("a", (3,), stop=("",)), "stop strings"),
        (ask("a", (3,), stop_token_ids=(9999,)), "stop_token_ids"),
        (ask("a", (3,), stop_token_ids=tuple(range(33))), "at most 32 are supported"),
        (dataclasses.replace(ask("a", (3,)), top_logprobs=129), "top_logprobs"),
        (dataclasses.replace(ask("a", (3,)), input_logprobs_from=2), "input logprobs"),
    ],
    ids=lambda x: None if isinstance(x, Request) else x[:20],
)
def test_bad_requests_are_refused_in_one_line(request_, words):
    engine = Engine(CONFIG, OLD, slots=4, context=160, decode=decode)
    with pytest.raises(ValueError, match=words) as error:
        engine.submit(request_, print)
    assert "\n" not in str(error.value) and engine.stats()["queued"] == 0


@pytest.mark.parametrize(
    "options, words",
    [
        ({"slots": 1.5}, "slots must be a whole number, got 1.5"),
        ({"slots": True}, "slots must be a whole number, got True"),
        ({"context": None}, "context must be a whole number, got None"),
        ({"context": 2**31}, "context must be at most 67,108,864 tokens, got 2,147,483,648"),
        ({"memory": "8GB"}, "memory must be a number of GB, or 0, got '8GB'"),
        ({"draft": "4"}, "draft must be a whole number, got '4'"),
        ({"page": 2**40}, "page must be at most 67,108,864 tokens, got 1,099,511,627,776"),
        ({"steps": 2.0}, "steps must be a whole number, got 2.0"),
        ({"mesh": "tp=2"}, r"mesh must be an EngineMesh, such as EngineMesh\(tp=2\), got 'tp=2'"),
    ],
    ids=str,
)
def test_options_of_another_kind_are_refused_at_once(options, words):
    with pytest.raises(ValueError, match=words):
        Engine(CONFIG, OLD, **options)


def test_impossible_engine_calls_are_refused(engine):
    with pytest.raises(ValueError, match="slots must be at least 1"):
        Engine(CONFIG, OLD, slots=-1)
    with pytest.raises(
        ValueError, match=r"and 16 tokens of each of 100000000000 slots, .*e\+\d\d GB, got .* GB of memory; lower"
    ):
        Engine(CONFIG, OLD, slots=10**11, context=64)
    with pytest.raises(ValueError, match="mode must be abort, retract or in_place"):
        engine.pause("soon")
    with pytest.raises(ValueError, match="unique"):
        engine.generate([ask("a", (3,)), ask("a", (4,))])
    with pytest.raises(RuntimeError, match="starts once"):
        engine.start()
    plain = Engine(CONFIG, OLD, slots=4, context=160)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        plain.submit(ask("a", (3,), stop=("x",)), print)


def test_an_engine_that_cannot_decode_says_so_where_text_is_read():
    with Engine(CONFIG, OLD, slots=4, context=160, steps=4) as plain:
        [done] = plain.generate([ask("a", (3, 4), more=5)])
    assert len(done.tokens) == 5
    with pytest.raises(ValueError, match=r"text needs an engine that decodes; .* Engine\(decode=tokenizer.decode\)"):
        print(done.text)


def test_a_callback_may_submit_and_abort_but_not_pause(engine):
    errors, end = [], threading.Event()

    def tell(progress):
        if not errors:
            try:
                engine.pause("abort")
            except RuntimeError as error:
                errors.append(error)
            engine.abort("a")
            engine.submit(ask("b", prompt(1, 3), 2), lambda p: p.finish and end.set())

    engine.submit(ask("a", prompt(0, 5), 100), tell)
    end.wait()
    assert errors


# Releasing memory.


def held():
    """Bytes of all live arrays in this process."""
    return sum(x.nbytes for x in jax.live_arrays())


def test_release_frees_weights_and_caches_and_generation_waits_for_new_weights(engine):
    request = lambda rid: ask(rid, prompt(3, 20), more=10)
    with Engine(CONFIG, NEW, slots=4, context=160, steps=4) as other:
        wanted = other.generate([request("new")])[0]
    engine.generate([request("old")])
    before, own = held(), engine.stats()["bytes"]
    pages = 1 + 4 * 3  # one that is never read; 160 positions are three pages of 64
    caches = 2 * CONFIG.layers * pages * 64 * CONFIG.kv_heads * CONFIG.head_dim * 4
    weights = sum(x.nbytes for x in jax.tree.leaves(OLD)) + OLD["embed"].nbytes  # tied head: its own matrix
    assert own == weights + caches
    engine.release()
    assert engine.stats()["bytes"] == 0 and before - held() == own
    later = threading.Event()
    results = []
    engine.submit(request("later"), lambda progress: progress.finish and (results.append(progress), later.set()))
    for step in (lambda: None, lambda: engine.reclaim(["kv_cache"]), engine.reclaim):
        step()
        assert not later.wait(0.05) and not engine.able
    assert engine.stats()["bytes"] == caches
    engine.load(NEW, "new")
    assert later.wait(60) and same(results[0], wanted) and results[0].versions == [("new", 0, 10)]
    assert engine.stats()["bytes"] == own


def test_parts_are_released_by_name(engine):
    request = lambda rid: ask(rid, prompt(3, 20), more=10)
    wanted = engine.generate([request("a")])[0]
    engine.release(["kv_cache"])
    assert engine.flush() and engine.stats()["released"] == ["kv_cache"]
    engine.load(OLD, "again")  # for those who resume the weights first
    assert engine.stats()["bytes"] > 0 and not engine.able
    engine.reclaim(["kv_cache", "cuda_graph"])
    assert same(engine.generate([request("b")])[0], wanted)
    engine.release(["weights"])
    with pytest.raises(ValueError, match="the memory for weights is released"):
        engine.load(OLD, "refused")
    with pytest.raises(ValueError, match=r"must be of kv_cache, weights, cuda_graph, got \['wieghts'\]"):
        engine.release(["wieghts"])


def test_memory_is_not_released_while_requests_run(engine):
    going = threading.Event()
    engine.submit(ask("long", prompt(0, 5), more=150), lambda progress: going.set())
    assert going.wait(60)
    engine.pause("in_place")
    with pytest.raises(ValueError, match="no requests may be running, got 1"):
        engine.release()
    assert engine.stats()["bytes"] > 0
    engine.resume()
