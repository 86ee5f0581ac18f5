"""Pages and prefixes of the engine: samples have the same bits with little memory, and prompts are computed once."""

import contextlib
import dataclasses
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout_engine_programs_decode import TINY, model

from areax.models import paging
from areax.rollout.engine import budget, prefixes
from areax.rollout.engine import engine as engines
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.pages import Pages
from areax.rollout.engine.programs import decode
from areax.rollout.engine.request import Request, Sampling
from areax.rollout.engine.routes import metrics

CONTEXT, PAGE = 160, 16
# Plain, windows, experts (whose choice is recorded), latent vectors, delta nets, and Mamba with experts.
CASES = ["qwen3", "qwen3 window", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "nemotron_h"]


def engine_of(case, share=None, slots=4, draft=1, kept="auto"):
    """An engine whose caches, of keys and values in the dtype `kept`, have this share of what its slots may need."""
    config, params = model(case)
    memory = 0.0
    if share is not None:
        kinds = paging.kinds(config.records, CONTEXT, PAGE, paging.kv_dtype("float32", kept).itemsize)
        counts = paging.counts(kinds, slots, CONTEXT, PAGE, 4 * draft, None)
        fixed = paging.size_of(kinds, [n * kind.limited for n, kind in zip(counts, kinds, strict=True)], slots)
        memory = (fixed + share * (paging.size_of(kinds, counts, slots) - fixed)) / 1e9
    sizes = {"slots": slots, "context": CONTEXT, "page": PAGE, "memory": memory, "steps": 4, "draft": draft}
    return Engine(config, params, **sizes, kv_cache_dtype=kept)


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


@pytest.mark.slow
@pytest.mark.sweep
def test_samples_are_the_same_with_half_the_memory(alone):
    """Although requests wait, share pages, lose theirs and get them back."""
    case, wanted = alone
    with engine_of(case, 0.4) as engine:
        for order in (slice(None), slice(None, None, -1)):
            found = engine.generate(requests(case)[order])
            assert all(map(same, found, wanted[order]))
        assert engine.stats()["preemptions"] > 0 and unused(engine)


@pytest.mark.slow
@pytest.mark.sweep
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


@pytest.mark.long
@pytest.mark.parametrize("case", ["qwen3 window", pytest.param("deepseek_v3", marks=pytest.mark.wide)])
def test_keys_and_values_in_eight_bits(case):
    """A quarter of the memory of fp32; the same bits alone, in company, with 40 % of that, and behind cached prompts;
    log-probabilities near those with whole ones, at tokens before the first that goes to other experts. The attention
    over such pages is tested by itself."""
    asked, experts = requests(case), case == "deepseek_v3"
    scored = [
        dataclasses.replace(one, input_logprobs_from=1, routed_experts=experts, sampling=Sampling(max_new_tokens=1))
        for one in asked[1:]
    ]
    caches = lambda engine: engine.stats()["bytes"] - sum(x.nbytes for x in jax.tree.leaves(engine.device.weights))
    with engine_of(case) as engine:
        whole, wanted = caches(engine), engine.generate(scored)
    with engine_of(case, kept="float8") as engine:
        assert 4 * caches(engine) == whole
        diffs, unmoved = [], []
        for a, b in zip(engine.generate(scored), wanted, strict=True):
            diffs.append(np.abs(np.subtract(a.input_logp, b.input_logp)))
            moved = np.any(np.not_equal(a.routed, b.routed), (1, 2)) if experts else np.zeros(len(diffs[-1]), bool)
            unmoved.append(~np.logical_or.accumulate(moved)[: len(diffs[-1])])
        diff, unmoved = np.concatenate(diffs), np.concatenate(unmoved)
        assert 0 < diff.mean() < 0.1 and diff[unmoved].max() < 0.5 and unmoved.mean() > 0.5
        alone = [engine.generate([one])[0] for one in asked if engine.flush()]
        assert all(map(same, engine.generate(asked), alone))
    with engine_of(case, 0.4, kept="float8") as engine:
        assert all(map(same, engine.generate(asked), alone))
        assert engine.stats()["preemptions"] > 0 and unused(engine)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3", "qwen3_5_text"])
def test_a_group_computes_its_prompt_once(case):
    config, params = model(case)
    prompt = requests(case)[2].prompt * 2
    group = [Request(str(i), prompt, Sampling(max_new_tokens=5, seed=i, ignore_eos=True)) for i in range(16)]
    with Engine(config, params, slots=4, context=CONTEXT, steps=4, page=PAGE) as engine:
        done = engine.generate(group)
        assert engine.stats()["prefilled_tokens"] == 99
    assert sorted(progress.cached_tokens for progress in done) == [0, *[99] * 15]


@pytest.mark.slow
def test_a_complete_prompt_gives_way_to_an_earlier_one_that_is_longer():
    """Before it has decoded anything, and although another one needs no more than its prompt."""
    rng = np.random.default_rng(2)
    sizes = {"long": (150, 5), "short": (40, 5), "only a prompt": (40, 0), "last": (40, 5)}
    asked = [
        Request(name, tuple(rng.integers(8, 89, n).tolist()), Sampling(max_new_tokens=m, seed=n, ignore_eos=True))
        for name, (n, m) in sizes.items()
    ]
    with engine_of("qwen3_5_text") as engine:
        wanted = [engine.generate([one])[0] for one in asked]
    with engine_of("qwen3_5_text", 0.3) as engine:
        assert all(map(same, engine.generate(asked), wanted))
        assert engine.stats()["preemptions"] > 0 and unused(engine)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("case, start", [("qwen3", 0), ("qwen3_5_text", None)])
def test_a_prompt_that_needs_all_memory_gets_that_of_cached_chunks_it_cannot_use(case, start):
    """As its log-probabilities are needed, or as the state behind the chunks is not kept."""
    rng = np.random.default_rng(3)
    first = tuple(rng.integers(8, 89, 60).tolist())
    whole = (*first[:40], *rng.integers(8, 89, 112).tolist())
    asked = [Request("first", first, Sampling(max_new_tokens=2)), Request("whole", whole, Sampling(max_new_tokens=8))]
    asked[1] = dataclasses.replace(asked[1], input_logprobs_from=start)
    with engine_of(case, slots=1) as engine:
        ended = threading.Event()
        engine.generate(asked[:1])
        engine.submit(asked[1], lambda progress: progress.finish and ended.set())
        assert ended.wait(60) and unused(engine)


@pytest.mark.slow
def test_a_prompt_is_cached_again_after_its_last_pages_were_needed():
    rng = np.random.default_rng(4)
    ask = lambda name, n, more: Request(
        name, tuple(rng.integers(8, 89, n).tolist()), Sampling(max_new_tokens=more, ignore_eos=True)
    )
    prompt = ask("a", 60, 2)
    with engine_of("qwen3 window", slots=2) as engine:
        engine.generate([prompt])
        engine.generate([ask("b", 20, 50), ask("c", 20, 50)])  # which take all pages of windows
        found = [engine.generate([prompt])[0].cached_tokens for _ in range(3)]
    assert found == [0, 59, 59]


def half_computed(engine, request, monkeypatch):
    """Submits a request to an engine that does not run, and computes the first chunk of its prompt; returns what
    will be its last progress."""
    done: list = []
    engine.submit(request, lambda progress: progress.finish and done.append(progress))
    with monkeypatch.context() as patch:
        patch.setattr(engines, "ON_CPUS", PAGE)
        engine._admit()
        engine._compute_prompts()
    assert engine.stats()["prefilled_tokens"] == PAGE
    return done


def test_a_prompt_half_computed_with_old_weights_is_not_cached(monkeypatch):
    config, params = model("qwen3")
    new, asked = jax.tree.map(lambda x: -x, params), requests("qwen3")[2]
    with Engine(config, new, slots=4, context=CONTEXT, steps=4, page=PAGE) as engine:
        wanted = engine.generate([asked])[0]
    with contextlib.closing(engine_of("qwen3")) as engine:
        half_computed(engine, dataclasses.replace(asked, rid="half"), monkeypatch)
        engine.pause("in_place")
        engine.load(new, "new", flush=False)
        engine.resume()
        assert all(same(engine.generate([asked])[0], wanted) for _ in range(2))


@pytest.mark.slow
def test_log_probabilities_of_a_prompt_are_of_one_version(monkeypatch):
    config, params = model("qwen3_moe")
    new = jax.tree.map(lambda x: -x, params)
    asked = dataclasses.replace(requests("qwen3_moe")[1], top_logprobs=2, routed_experts=True)
    with Engine(config, new, slots=4, context=CONTEXT, steps=4, page=PAGE) as engine:
        wanted = engine.generate([asked])[0]
    with contextlib.closing(engine_of("qwen3_moe")) as engine:
        done = half_computed(engine, asked, monkeypatch)
        engine.pause("retract")
        engine.load(new, "new")
        engine.resume()
        engine.generate([dataclasses.replace(asked, rid="later")])
    assert same(done[0], wanted) and done[0].input_top == wanted.input_top


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_a_pause_with_abort_also_ends_requests_that_lost_their_memory():
    """Else their answers would be of two versions."""
    with engine_of("qwen3", 0.4) as engine:
        last = {}
        engine.submit_all(requests("qwen3"), lambda progress: last.update({progress.rid: progress}))
        while engine.stats()["preemptions"] == 0:
            threading.Event().wait(0.001)
        engine.pause("abort")
        begun = [progress for progress in last.values() if progress.tokens]
        assert begun and all(progress.finish for progress in begun)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("draft", [1, 4])
def test_a_step_updates_pages_in_place(draft):
    """Else XLA would copy the whole memory at each step."""
    config, params = model("qwen3 window")
    engine = Engine(config, params, slots=4, context=4 * CONTEXT, page=PAGE, draft=draft)
    held, slots = engine._slots.device.held, engine._slots
    compiled = decode.decode.lower(
        slots.device.weights, held, np.zeros_like(slots._state), slots.cache.table_KSX, 5, slots.device.tables,
        slots.device.no_mask_SM, slots.device.known, config=slots.config, of_layer=slots.device.of_layer, steps=4,
        width=draft,
    ).compile()  # fmt: skip
    size = sum(x.nbytes for x in jax.tree.leaves((held, slots.device.tables, slots.device.known)))
    assert compiled.memory_analysis().alias_size_in_bytes == size
    assert compiled.memory_analysis().temp_size_in_bytes < (size / 4 if draft == 1 else size)  # histories are searched


def test_memory_that_is_too_small_is_refused():
    with pytest.raises(
        ValueError, match=r"must hold one sequence of 160 tokens.* GB, got .* GB of memory; lower slots or context"
    ):
        engine_of("qwen3", 0.1)
    with pytest.raises(ValueError, match="page must be a power of two of at least 16, got 24"):
        Engine(*model("qwen3"), page=24)


@pytest.mark.parametrize("share, versions", [(0.67, 2), (0.27, 1)])
def test_caches_leave_room_for_the_next_weights_unless_no_sequence_would_fit(share, versions, monkeypatch):
    config, params = model("qwen3")
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    whole = engine_of("qwen3").stats()["capacity"]
    kinds = paging.kinds(config.records, CONTEXT, PAGE, 4)
    pages = share * paging.size_of(kinds, paging.counts(kinds, 4, CONTEXT, PAGE, 4, None), 4)
    monkeypatch.setattr(budget.memory, "of_devices", lambda _: versions * weights + pages / budget.USABLE)
    assert engine_of("qwen3").stats()["capacity"] / whole == pytest.approx(share, abs=0.05)


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


def test_pages_are_counted_while_prefixes_come():
    """As other threads ask while the engine's thread adds."""

    class Busy(Pages):
        def users(self, page):
            known.add(bytes([len(known)]), None, 1, [self.take()])
            return super().users(page)

    pages = [Busy(9)]
    known = prefixes.Prefixes([paging.Kind((0,), False, False, 1, np.zeros(40, int))], pages, 1)
    known.add(b"first", None, 1, [pages[0].take()])
    assert known.spare(0) == 0


def test_a_prefix_without_pages_may_be_continued_after_it_was_forgotten():
    """As in models of recurrent layers only, while its sequence goes on."""
    pages = [Pages(2)]
    known = prefixes.Prefixes([paging.Kind((0,), True, True, 1, np.arange(40))], pages, 1)
    first = known.add(b"first", None, 1, [0])
    for key in (b"second", b"other"):
        known.add(key, first, 2, [pages[0].take()])
        assert known.evict(0)
    assert len(known) == 0 and pages[0].free == 2


def test_metrics_count_shared_pages_once():
    prompt = requests("qwen3")[2].prompt * 2
    with contextlib.closing(engine_of("qwen3", 0.4)) as engine:
        for i in range(4):
            engine.submit(Request(str(i), prompt, Sampling(max_new_tokens=9)), lambda progress: None)
        engine._admit()
        engine._compute_prompts()
        made = metrics.Metrics(SimpleNamespace(engine=engine, tokenizer_path="x")).collect()
        now = {family.name: family.samples[0].value for family in made}
        assert engine.stats()["running"] == 4 and now["sglang:num_used_tokens"] == 6 * 16 + 4 * 16
        assert now["sglang:token_usage"] == 160 / engine.stats()["capacity"]
