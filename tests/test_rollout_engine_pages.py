"""Pages and prefixes of the engine: samples have the same bits with little memory, and prompts are computed once."""

import dataclasses
import threading

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout_engine_decode import TINY, model

from areax.models import paging
from areax.rollout.engine import decode, prefixes
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.pages import Pages
from areax.rollout.engine.request import Request, Sampling

CONTEXT, PAGE = 160, 16
# Plain, windows, experts (whose choice is recorded), latent vectors, delta nets, and Mamba with experts.
CASES = ["qwen3", "qwen3 window", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "nemotron_h"]


def engine_of(case, share=None, slots=4):
    """An engine whose caches have this share of what its slots may need."""
    config, params = model(case)
    if share is not None:
        kinds = paging.kinds(config.records, CONTEXT, PAGE, 4)
        counts = paging.counts(kinds, slots, CONTEXT, PAGE, 4, None)
        fixed = paging.size_of(kinds, [n * kind.limited for n, kind in zip(counts, kinds, strict=True)], slots)
        share = fixed + share * (paging.size_of(kinds, counts, slots) - fixed)
    return Engine(config, params, slots=slots, context=CONTEXT, steps=4, page=PAGE, memory=share)


def requests(case):
    """Long answers, a group with one prompt, and turns of an agent that begin with an earlier prompt."""
    rng = np.random.default_rng(1)
    draw = lambda n: tuple(rng.integers(8, TINY["vocab_size"], n).tolist())
    shared = draw(50)
    prompts = [draw(1), draw(40), shared, shared, shared, (*shared, *draw(30)), shared[:33], draw(16), draw(17)]
    return [
        Request(
            str(i), prompt, Sampling(1.0, max_new_tokens=70, ignore_eos=True, seed=i),
            input_logprobs_from=0 if i == 1 else None, routed_experts="moe" in case and i % 3 > 0,
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


def same(a, b):
    """Bit for bit."""
    known = a.tokens == b.tokens and a.logp == b.logp and a.input_logp == b.input_logp
    return known and np.array_equal(np.array(a.routed), np.array(b.routed))


def unused(engine):
    """Whether every page is free, which `flush` leaves only if no use was lost."""
    assert engine.flush()
    return all(of.free == of.count for of in engine._slots.cache.pages)


@pytest.fixture(scope="module", params=CASES)
def alone(request):
    with engine_of(request.param) as engine:
        found = []
        for one in requests(request.param):
            engine.flush()
            found += engine.generate([one])
        return request.param, found


def test_samples_are_the_same_with_half_the_memory(alone):
    """Although requests wait, share pages, lose theirs and get them back."""
    case, wanted = alone
    with engine_of(case, 0.4) as engine:
        for order in (slice(None), slice(None, None, -1)):
            found = engine.generate(requests(case)[order])
            assert all(map(same, found, wanted[order]))
        assert engine.stats()["preemptions"] > 0 and unused(engine)


def test_a_cached_prefix_changes_no_bit(alone):
    """Of prompts that were computed before, and whose beginning was."""
    case, wanted = alone
    with engine_of(case) as engine:
        engine.generate(requests(case)[2:3])
        assert same(engine.generate(requests(case)[2:3])[0], wanted[2])
        assert engine.stats()["prefilled_tokens"] == 49
        turn = engine.generate(requests(case)[5:6])[0]
        assert same(turn, wanted[5]) and turn.cached_tokens == 48
        assert unused(engine)


def test_a_group_computes_its_prompt_once():
    config, params = model("qwen3")
    prompt = requests("qwen3")[2].prompt * 2
    group = [Request(str(i), prompt, Sampling(max_new_tokens=5, seed=i, ignore_eos=True)) for i in range(16)]
    with Engine(config, params, slots=4, context=CONTEXT, steps=4, page=PAGE) as engine:
        done = engine.generate(group)
        assert engine.stats()["prefilled_tokens"] == 99
    assert sorted(progress.cached_tokens for progress in done) == [0, *[99] * 15]


def test_random_aborts_lose_no_page():
    rng = np.random.default_rng(0)
    with engine_of("qwen3 window", 0.4) as engine:
        ended = threading.Semaphore(0)
        many = [dataclasses.replace(one, rid=f"{turn} {one.rid}") for turn in range(4) for one in requests("qwen3")]
        for one in many:
            engine.submit(one, lambda progress: progress.finish and ended.release())
            if rng.random() < 0.5:
                engine.abort(many[rng.integers(len(many))].rid)
        for _ in many:
            assert ended.acquire(timeout=120)
        assert unused(engine)


def test_requests_that_lost_their_memory_continue_with_new_weights():
    """What was kept of the old weights' cache is then forgotten, as for all requests that wait."""
    config, params = model("qwen3")
    with engine_of("qwen3", 0.4) as engine:
        last, ended = {}, threading.Semaphore(0)

        def tell(progress):
            last[progress.rid] = progress
            if progress.finish:
                ended.release()

        engine.submit_all(requests("qwen3"), tell)
        while engine.stats()["preemptions"] == 0:
            threading.Event().wait(0.01)
        engine.pause("retract")
        engine.load(jax.tree.map(lambda x: -x, params), "new")
        engine.resume()
        for _ in requests("qwen3"):
            assert ended.acquire(timeout=120)
        assert all(len(progress.tokens) == 70 for progress in last.values()) and unused(engine)
        again = [p for p in last.values() if len(p.versions) == 2]
        assert again and all(p.versions[1][0] == "new" for p in again)


def test_a_step_updates_pages_in_place():
    """Else XLA would copy the whole memory at each step."""
    config, params = model("qwen3 window")
    engine = Engine(config, params, slots=4, context=CONTEXT, page=PAGE)
    held, slots = engine._slots.cache.held, engine._slots
    compiled = decode.decode.lower(
        slots.weights, held, np.zeros_like(slots._state), slots.cache.table_KSX, 5, slots._tables,
        slots._masks.fill({}), config=slots.config, of_layer=slots.cache.of_layer, steps=4,
    ).compile()  # fmt: skip
    size = sum(x.nbytes for x in jax.tree.leaves((held, slots._tables)))
    assert compiled.memory_analysis().alias_size_in_bytes == size
    assert compiled.memory_analysis().temp_size_in_bytes < size / 4


def test_memory_that_is_too_small_is_refused():
    with pytest.raises(
        ValueError, match=r"must hold one sequence of 160 tokens.* GB, got .* GB of memory; lower slots or context"
    ):
        engine_of("qwen3", 0.1)
    with pytest.raises(ValueError, match="page must be a power of two of at least 16, got 24"):
        Engine(*model("qwen3"), page=24)


# -- accounting --------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_prefixes_are_found_as_by_comparing_tokens(data):
    """Against brute force over all prefixes that were ever kept, and pages that were not evicted."""
    C, window, count = 2, 3, 12
    first = np.maximum(np.arange(40) - (window - 1), 0) // C
    kinds = [paging.Kind((0,), False, False, 1, np.zeros(40, int)), paging.Kind((1,), True, False, 1, first)]
    pages = [Pages(count), Pages(count)]
    known = prefixes.Prefixes(kinds, pages, C)
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)
    kept: dict[tuple, prefixes.Prefix] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        prompt = data.draw(tokens)
        found = known.longest(None, 0, prompt, 0, routed=False)
        ends = [min(end, len(prompt)) for end in range(C, len(prompt) + C, C)]
        usable = [
            i + 1
            for i, end in enumerate(ends)
            if all(kept.get(tuple(prompt[:e])) and kept[tuple(prompt[:e])].pages[0] for e in ends[: i + 1])
            and all(kept[tuple(prompt[:e])].pages[1] for e in ends[first[end] : i + 1])
        ]
        assert [one.end for one in found] == ends[: max(usable, default=0)]
        last = found[-1] if found and found[-1].end % C == 0 else None
        for start in range(last.end if last else 0, len(prompt), C):
            own = []
            for i in range(2):
                while not (page := pages[i].take()):
                    assert known.evict(i)
                    kept = {key: one for key, one in kept.items() if known.get(one.key) is one}
                own.append(page)
            end = min(start + C, len(prompt))
            key = prefixes.key(last, 0, prompt[start:end])
            if known.get(key) is None:
                last = kept[tuple(prompt[:end])] = known.add(key, last, end, own)
            else:
                last = known.get(key)
            for i in range(2):
                pages[i].give(own[i])  # the sequence ends at once
        for i in range(2):
            assert pages[i].free + sum(one.pages[i] > 0 for one in kept.values()) == count
    known.clear()
    assert all(of.free == count for of in pages)
