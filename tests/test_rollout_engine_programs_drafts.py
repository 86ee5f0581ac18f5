"""Speculative decoding: drafts change how many tokens a step gives, and not one bit of a sample."""

import dataclasses
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_rollout_engine_adapters as adapting
import test_rollout_engine_grammar as grammars
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout_engine_pages import CONTEXT, engine_of, requests, same, unused
from test_rollout_engine_programs_decode import ALL, TINY

from areax.rollout.engine.engine import Engine
from areax.rollout.engine.programs import drafts
from areax.rollout.engine.request import Request, Sampling
from areax.rollout.servers.local import Serve

WIDTH = 4
NONE = ((0, 0.0),)  # biases: they change nothing, but slots with biases take no drafts


def changed(request, **sampling):
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **sampling))


def counts(engine):
    return np.array([engine.stats()[name] for name in ("drafted", "accepted", "dispatches")])


def spoil(engine):
    """Replaces a third of the tokens in all histories, so that drafts are accepted in part."""
    rng, histories = np.random.default_rng(0), engine._slots.device.known
    token_SL = np.asarray(histories.token_SL)
    other_SL = rng.integers(0, TINY["vocab_size"], token_SL.shape)
    token_SL = np.where(rng.random(token_SL.shape) < 1 / 3, other_SL, token_SL).astype(np.int32)
    engine._slots.device.known = dataclasses.replace(
        histories, token_SL=jax.device_put(token_SL, histories.token_SL.sharding)
    )


def check_bits(engine, asked, i):
    """Asserts that drafts change no bit: none; for request i those from its own text, from an earlier request with its
    whole answer, and from one with parts of it; in company, in two orders."""
    wanted = []
    for one in asked:
        engine.flush()
        wanted += engine.generate([changed(one, logit_bias=NONE)])
    assert list(counts(engine)[:2]) == [0, 0]
    for known in ("nothing", "all", "parts"):
        engine.flush()
        if known == "parts":
            spoil(engine)
        before = counts(engine)
        [found] = engine.generate(asked[i : i + 1])
        assert same(found, wanted[i])
        drafted, accepted, dispatches = counts(engine) - before
        if known == "all":
            assert accepted >= 50 and dispatches <= 6  # 18 without drafts
        if known == "parts":
            assert 0 < accepted < drafted - 10
    for order in (slice(None), slice(None, None, -1)):
        assert all(map(same, engine.generate(asked[order]), wanted[order]))


# Windows, experts that are recorded, and delta nets; latent vectors, and Mamba. Plain attention is below.
FIRST, THEN = ("qwen3 window", "qwen3_moe", "qwen3_5_text"), ("deepseek_v3", "nemotron_h")


def marks(case):
    return () if case in FIRST else pytest.mark.mesh if case in THEN else pytest.mark.wide


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case)) for case in ALL])
def test_drafts_change_no_bit(case):
    """Although requests also share pages, lose theirs and get them back."""
    with engine_of(case, 0.4, draft=WIDTH) as engine:
        check_bits(engine, requests(case), 4)
        windows = all(kind.limited for kind in engine._slots.cache.kinds)  # each slot has its own pages
        assert (engine.stats()["preemptions"] > 0 or windows) and unused(engine)


@pytest.fixture(scope="module")
def engine():
    with engine_of("qwen3", draft=WIDTH) as engine:
        yield engine


def options(stop):
    """Requests with one prompt or none in common, each with other options; `stop` is a token of the first one."""
    shared, rng = requests("qwen3")[2].prompt, np.random.default_rng(3)
    draw = lambda n: tuple(rng.integers(8, TINY["vocab_size"], n).tolist())
    ask = lambda name, prompt=shared, top=0, **sampling: Request(
        name, prompt, Sampling(**{"max_new_tokens": 40, "ignore_eos": True, "seed": 2, **sampling}), top_logprobs=top
    )
    return [
        ask("plain"), ask("filtered", temperature=0.7, top_k=20, top_p=0.9, top=3), ask("greedy", temperature=0.0),
        ask("stops", stop_token_ids=(stop,)), ask("least", stop_token_ids=(stop,), min_new_tokens=30),
        ask("short", max_new_tokens=2), ask("fills", draw(CONTEXT - 9), max_new_tokens=9),
        ask("last", draw(CONTEXT - 1), max_new_tokens=1), ask("frequency", frequency_penalty=0.4),
        ask("biased", logit_bias=((5, 3.0), (stop, -100.0))),
    ]  # fmt: skip


@pytest.mark.slow
def test_options_hold_with_drafts(engine):
    """With the tokens of an engine that computes them one by one; stops, budgets and ends within a step."""
    with engine_of("qwen3") as plain:
        [first] = plain.generate(options(0)[:1])
        asked = options(first.tokens[10])
        wanted = plain.generate(asked)
        assert plain._slots.device.known is None and counts(plain)[0] == 0
    alone = []
    for one in asked:
        engine.flush()
        alone += engine.generate([one if one.sampling.logit_bias else changed(one, logit_bias=NONE)])
    assert len(alone[3].tokens) <= 11 and len(alone[4].tokens) > 30
    for a, b in zip(alone, wanted, strict=True):
        assert (a.tokens, a.finish) == (b.tokens, b.finish)
        np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)
    for order in (slice(None), slice(None), slice(None, None, -1)):
        before = counts(engine)
        found = engine.generate(asked[order])
        assert all(map(same, found, alone[order])) and [p.top for p in found] == [p.top for p in alone[order]]
        assert (counts(engine) - before)[1] > 0


def test_a_text_that_repeats_itself_takes_fewer_steps(engine):
    """Of four tokens at most, as a greedy answer runs into a loop."""
    before = counts(engine)
    [done] = engine.generate([Request("loop", (9, 4, 31, 9, 4, 31), Sampling(0.0, max_new_tokens=96, ignore_eos=True))])
    drafted, accepted, dispatches = counts(engine) - before
    assert len(done.tokens) == 96 and 4 * dispatches < 96 / 2
    assert 96 / 2 < accepted <= drafted


def test_a_pause_in_place_changes_no_bit(engine):
    asked = dataclasses.replace(requests("qwen3")[1], rid="paused")
    engine.flush()
    [wanted] = engine.generate([asked])
    begun, gate, done, last = *(threading.Event() for _ in range(3)), []

    def tell(progress):
        last[:] = [progress]
        (done if progress.finish else begun).set()
        gate.wait()

    engine.submit(asked, tell)
    assert begun.wait(60)
    threading.Timer(0.05, gate.set).start()
    engine.pause("in_place")
    assert not done.is_set()
    engine.resume()
    assert done.wait(60) and same(last[0], wanted)
    engine.submit(asked, tell)
    engine.pause("retract")
    engine.resume()
    done.clear()
    assert done.wait(60) and last[0].tokens == wanted.tokens


@pytest.mark.slow
def test_drafts_with_adapters():
    asked = [adapting.ask(str(i), name, 24) for i, name in enumerate(["", "a", "b"])]
    with adapting.served(draft=WIDTH) as engine:
        for name in ("a", "b"):
            engine.load_adapter(name, adapting.SPEC, adapting.ADAPTERS[name])
        wanted = [engine.generate([changed(one, logit_bias=NONE)])[0] for one in asked if engine.flush()]
        for one, progress in zip(asked, wanted, strict=True):
            adapting.check(progress, one.adapter)
        for _ in range(2):
            assert all(map(same, engine.generate(asked), wanted))
        assert counts(engine)[1] > 10


@pytest.mark.slow
def test_a_grammar_takes_no_drafts_and_neighbours_do():
    held = grammars.ask("held", "regex", "(ab|c){9}", more=40)
    beside = [grammars.ask(f"free{i}", more=40) for i in range(2)]
    known = dict(slots=4, context=64, steps=4, grammars=grammars.GRAMMARS)
    with Engine(grammars.CONFIG, grammars.WEIGHTS, draft=WIDTH, **known) as engine:
        wanted = [engine.generate([one])[0] for one in (held, *beside) if engine.flush()]
        before = counts(engine)
        assert all(map(same, engine.generate([held, *beside]), wanted))
        assert (counts(engine) - before)[1] > 20
        before = counts(engine)
        engine.generate([held])
        assert list((counts(engine) - before)[:2]) == [0, 0]
    assert re.fullmatch("(ab|c){9}", grammars.decode(wanted[0].tokens))


def test_a_width_below_one_or_beyond_the_context_is_refused():
    with pytest.raises(ValueError, match="draft must be at least 1, got 0"):
        engine_of("qwen3", draft=0)
    with pytest.raises(ValueError, match=f"draft must be at most the context, {CONTEXT} tokens, got {CONTEXT + 1}"):
        engine_of("qwen3", draft=CONTEXT + 1)
    with pytest.raises(ValueError, match="draft must be at least 1, got 0"):
        Serve(draft=0)


# -- drafts -------------------------------------------------------------------------------------------


def guess(rows, groups, slot, count):
    """By trying all places: the longest match, of these the slot's own, of these the last."""
    own, best = rows[slot], None
    for other in range(len(rows)):
        for end in range(len(rows[other]) - 1) if groups[other] == groups[slot] else ():
            n = 0
            while n < min(drafts.LONGEST, len(own), end + 1) and rows[other][end - n] == own[-1 - n]:
                n += 1
            score = n, other == slot, end, -other
            if n and (best is None or score > best[0]):
                best = score, rows[other][end + 1 :]
    if best is None:
        return [-1] * count
    return [best[1][i % len(best[1])] for i in range(count)]


draft = jax.jit(drafts.draft, static_argnames="count")


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_drafts_follow_the_longest_match(data):
    S, L, count, grow = 3, 12, 3, jax.jit(drafts.grown)
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=8)
    made, rows, groups = drafts.empty(S, L), [[] for _ in range(S)], [None] * S
    for slot in range(S):
        prompt, done = data.draw(st.sampled_from([(0,), (1, 2, 1)])), data.draw(tokens)
        made = drafts.rewritten(made, slot, prompt, done)
        rows[slot], groups[slot] = [*prompt, *done], prompt
    new_SQ = np.array(data.draw(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=S, max_size=S)))
    count_S = np.array(data.draw(st.lists(st.integers(0, 4), min_size=S, max_size=S)))
    made = grow(made, jnp.asarray(new_SQ, jnp.int32), jnp.asarray(count_S, jnp.int32))
    for slot in range(S):
        rows[slot] = (rows[slot] + new_SQ[slot, : count_S[slot]].tolist())[:L]
    if all(len(row) < L for row in rows):  # an engine never goes beyond the context
        assert np.asarray(draft(made, count=count)).tolist() == [guess(rows, groups, s, count) for s in range(S)]


def test_a_slot_without_a_match_drafts_nothing():
    made = drafts.rewritten(drafts.empty(2, 8), 0, (1, 2, 3), ())
    assert draft(made, count=2).tolist()[0] == [-1, -1]
    made = drafts.rewritten(made, 1, (9, 3), (4,))  # another prompt
    assert draft(made, count=2).tolist()[0] == [-1, -1]
