"""Whatever workflows, agents and servers return, no wrong value reaches a batch, and each is refused by its name."""

import asyncio
import collections
import contextlib
import copy
import dataclasses
import itertools
import json
import math
import random

import aiohttp
import aiohttp.web
import fuzz
import gateways
import numpy as np
import pytest
import scripted
from gateways import END, TOKENS, USER
from test_rollout_workflows_agents import chat, right
from test_rollout_workflows_multi_turn import SAMPLING, policy

from areax.core import packing
from areax.recipes.shared import describe, rollouts
from areax.recipes.shared.rl_options import Rollout
from areax.rollout import client, events, rewards
from areax.rollout.chat.session import Session
from areax.rollout.errors import ServerError
from areax.rollout.gateway.server import serve
from areax.rollout.rewards import Score, judge
from areax.rollout.scheduling import episodes
from areax.rollout.scheduling.executor import Executor, Prompts
from areax.rollout.types import Completion, Image, Sample, Sampling, sampled
from areax.rollout.workflows import agents, areal, failures

VOCABULARY, NEWEST = 97, 1
PER_TOKEN = ("tokens", "mask", "logp", "version", "turn")
LARGEST = float(np.finfo(np.float32).max)
ROW = {"id": 7}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(episodes, "PAUSE_S", 0.0)


def hostile(name, base=object, error=RuntimeError):
    """An object, one of whose special methods raises."""

    def raises(self, *_, **__):
        raise error("not\nthis way")

    return type(f"Hostile{name.strip('_')}", (base,), {name: raises})()


class Boasting(float):
    """A number that compares as no number does."""

    __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: True
    __abs__ = lambda self: 1.0


class Whole(int):
    __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: True


class Pairs(collections.abc.Sequence):
    __len__ = lambda self: 1

    def __getitem__(self, i):
        raise KeyError("no pair")


class Names(collections.abc.Mapping):
    __len__ = lambda self: 1

    def __getitem__(self, name):
        raise AttributeError("no name")

    def __iter__(self):
        raise AttributeError("no names")


def deep(levels=5000):
    value = []
    for _ in range(levels):
        value = [value]
    return value


METHODS = ("repr", "len", "eq", "array", "iter", "float", "index", "bool", "hash", "getitem")
VALUES = [
    None, "5", "", "ab", "\ud800", b"", b"\0\1", b"12345", 5.5, -7, 2**40, 2**63, 2**64, math.nan, math.inf, -math.inf,
    1e300, 3e38, 1e-300, -1e-300, 10**400, 10**5000, True, False, 1j, [], [[]], [1, [2, 3]], [[1], [2, 3]], deep(),
    (1,), range(5), range(4), object(), Sample, lambda: 0, Boasting(-5), Boasting(math.nan), Whole(-5), Whole(2**40),
    Pairs(), Names(), *(hostile(f"__{name}__") for name in METHODS), hostile("__array__", error=AttributeError),
    hostile("__repr__", dict), hostile("__iter__", list), hostile("__len__", tuple), np.int64(3), np.float64("nan"),
    *(np.zeros(5, kind) for kind in ("f4", "f8", "c8", "O", "U1", "M8[s]", [("a", "i4")])),
    np.full(5, 1e-4, np.float16), np.zeros(4, np.int64), np.zeros(0), np.zeros((5, 1)), np.array(3),
    np.full(5, 2**40), np.full(5, -1),
    np.full(5, 2**63, np.uint64), np.full(5, math.nan), np.full(5, 1e300), np.full(5, True),
    np.array([1, None, 2, 3, 4], object), np.array([hostile("__repr__")] * 5, object),
    np.ma.masked_array(np.full(5, -7), [True] * 5),
    {"a": "b"}, {"a": math.inf}, {"a": 10**400}, {"\ud800": 1.0}, {1: 2}, {"a": hostile("__repr__")},
    {hostile("__repr__"): 1.0}, {"greedy": "x"}, {"text": 5}, {"prompt": b""}, {"episode_reward": "x"},
    {"episode_reward": math.inf},
    ((1, 2, 3),), ((1,),), ((10, 1.0),), ((-1, 1.0),), ((4, "1"),), ((4, None),), ((4, math.inf),), ((4, 10**400),),
    ((4, 3e38), (4, 3e38)), (("4", 1.0),), ((4.0, 1.0),), ((True, 1.0),), ((4, hostile("__repr__")),), (b"\0\1",),
    (Pairs(),), (5,), [None], (hostile("__repr__"),), (Image("x"),), (Image(b"x"),),
    *({"x": (kind, x)} for kind in ("input", "output", 5) for x in (np.zeros(5), np.zeros(4), [0] * 5, None)),
    *({"x": ("target", np.full(5, x))} for x in (2**40, math.inf, math.nan, 1e300, "a", None)),
    {5: ("input", np.zeros(5))}, {"x": (np.array(["input"] * 2), np.zeros(5))}, {"x": ["input", np.zeros(5)]},
]  # fmt: skip
ENTRIES = [
    None, "5", b"5", 5.5, -7, -2, 7, 96, 97, 2**40, 2**70, 10**400, math.nan, math.inf, -math.inf, 0.5, 1e300, -1e300,
    True, [], [1], Whole(-5), Boasting(-5), hostile("__repr__"), hostile("__float__", float),
]  # fmt: skip


def good():
    done = Completion([3, 4, 5], [-0.5, -1.0, -1.5], [0, 0, 0], "stop")
    return sampled([1, 2], done, temperature=1.0, reward=0.5)


def changed(**fields):
    """A good sample with other values, as code that bypasses its constructor may leave them."""
    sample = good()
    for name, value in fields.items():
        object.__setattr__(sample, name, value)
    return sample


def wrong_entry(field, at, value, form):
    entries = [x.item() for x in getattr(good(), field)]
    entries[at] = value
    if form == "list":
        return entries
    array = np.empty(5, object)
    array[:] = entries
    if form == "object":
        return array
    with contextlib.suppress(Exception):  # no such array can be had
        return np.array(entries)
    return array


def cases():
    for field in dataclasses.fields(Sample):
        yield from (one_changed(field.name, value) for value in VALUES)
    for field, at, value, form in itertools.product(PER_TOKEN, (0, 3), ENTRIES, ("list", "object", "array")):
        yield one_changed(field, wrong_entry(field, at, value, form))
    empty = {name: getattr(good(), name)[:0] for name in PER_TOKEN} | {"rewards": ()}
    yield "an empty sample", lambda: changed(**empty)
    for value in VALUES:
        yield "returned", lambda value=value: value
        yield "returned in a list", lambda value=value: [good(), value]


def one_changed(field, value):
    return field, lambda: changed(**{field: value})


def is_number(x):
    return type(x) in (int, float) and (math.isnan(x) or abs(x) <= LARGEST)


def assert_sound(sample, *, vocabulary=VOCABULARY, newest=NEWEST):
    """Asserts what the docstring of Sample says of its fields."""
    n = len(sample.tokens)
    assert type(sample) is Sample and n > 0
    for name, kind in zip(PER_TOKEN, (np.int32, bool, np.float32, np.int32, np.int32), strict=True):
        values = getattr(sample, name)
        assert type(values) is np.ndarray and values.shape == (n,) and values.dtype == kind, name
    mask = sample.mask
    assert (sample.tokens >= 0).all() and (sample.tokens < vocabulary).all()
    assert np.isfinite(sample.logp).all() and (sample.logp <= 1e-3).all() and (sample.logp[~mask] == 0).all()
    assert (sample.version >= -1).all() and (sample.version <= newest).all() and (sample.version[~mask] == -1).all()
    assert (sample.turn >= 0).all()
    assert sample.temperature >= 0 and math.isfinite(sample.temperature) and is_number(sample.temperature)
    assert is_number(sample.weight) and 0 < sample.weight <= 1 and is_number(sample.label)
    for index, value in sample.rewards:
        assert type(index) is int and 0 <= index < n and is_number(value)
    assert is_number(sample.reward)
    for name, value in sample.components.items():
        name.encode()
        assert is_number(value)
    assert type(sample.finish) is str and sample.finish in ("stop", "length", "abort", "error")
    assert all(type(getattr(sample, name)) is int for name in ("group", "prompt", "sample", "rollout", "pair"))
    for name, (kind, values) in sample.arrays.items():
        assert type(name) is str and kind in ("input", "target")
        assert type(values) is np.ndarray and len(values) == n and values.dtype.kind in "fiub"
        assert np.isnan(values).any() or (np.abs(values) <= (LARGEST if values.dtype.kind == "f" else 2**31)).all()
    assert all(type(image) is Image and type(image.data) is bytes for image in sample.images)
    assert is_number(sample.info.get("episode_reward", 0.0))


def assert_one_line(text):
    assert "\n" not in text and len(text) < 1000 and "Traceback" not in text, text


async def generate(tokens, **_):
    return Completion([3], [-0.5], [0], "stop")


async def batch_of(made):
    """(samples of a batch, or the error that ended the run; number of episodes that were played), if the first episode
    returns `made()`."""
    played = itertools.count()
    options = Rollout(sampling=Sampling(temperature=1.0, max_new_tokens=8))

    async def workflow(generate, row):
        return made() if next(played) == 0 else good()

    scheduled = Executor(
        rollouts.fitting(workflow, 32, options), generate, Prompts([ROW]), group_size=2, groups_per_batch=1, eta=0,
        max_concurrent=2, vocabulary=VOCABULARY,
    )  # fmt: skip
    async with scheduled as executor:
        executor.admit(0)
        try:
            groups = await asyncio.wait_for(executor.batch(0), 30)
        except ValueError as error:
            return error, next(played)
    return [sample for group in groups for sample in group], next(played)


def assert_refused_or_sound(all_cases, caplog, path):
    async def main():
        for name, made in all_cases:
            caplog.clear()
            episodes._warned.clear()  # each case is logged, also one with the words of another
            samples, played = await batch_of(made)
            text = caplog.text
            if isinstance(samples, ValueError):
                assert_one_line(str(samples))
                end = "the trainer computes, got" if name == "temperature" else "must return a Sample"
                assert end in str(samples), (name, samples)
                continue
            if played > 2:
                assert "cannot be used: " in text and "; row id 7" in text and "must " in text, (name, text)
                names = (
                    (name, "mask") if name in ("tokens", "version") else (name,)
                )  # of another number, others do not fit
                named = any(f"{x} must " in text or f"{x}[" in text for x in names)
                assert named or name.startswith(("returned", "an empty")), (name, text)
            assert "Traceback" not in text, (name, text)
            for sample in samples:
                assert_sound(sample)
            if len({*map(lambda sample: frozenset(sample.arrays), samples)}) == 1:
                batch = packing.pack(samples, 32, rows=2)
                assert all(np.isfinite(x[batch.mask_BT]).all() for x in (batch.logp_BT, batch.weight_BT))
            describe.batch(samples, 0)
            describe.unstopped(samples, [1])

    with events.writing(path):
        asyncio.run(main())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum(line["kind"] == "episode" for line in lines) > len(all_cases)  # the thread still writes


def test_no_wrong_value_of_a_field_reaches_a_batch(caplog, tmp_path):
    every = [*cases()]
    assert len(every) > 2500
    assert_refused_or_sound(random.Random(0).sample(every, 400), caplog, tmp_path / "events.jsonl")


@pytest.mark.long
def test_no_wrong_value_of_any_field_reaches_a_batch(caplog, tmp_path):
    assert_refused_or_sound([*cases()], caplog, tmp_path / "events.jsonl")


def test_lists_are_samples_too_and_never_hang_a_batch(caplog, tmp_path):
    lists = {name: getattr(good(), name).tolist() for name in PER_TOKEN}
    samples, played = asyncio.run(batch_of(lambda: changed(**lists)))
    assert played == 2
    for sample in samples:
        assert_sound(sample)
        assert sample.tokens.tolist() == [1, 2, 3, 4, 5] and sample.logp.tolist() == [0, 0, -0.5, -1.0, -1.5]


def test_a_workflow_that_writes_into_its_arrays_again_changes_no_sample():
    buffers = {name: getattr(good(), name).copy() for name in PER_TOKEN} | {"arrays": {"x": ("target", np.zeros(5))}}

    async def workflow(generate, row):
        buffers["tokens"][2:] = [10 * row["id"] + i for i in range(3)]
        buffers["arrays"]["x"][1][:] = row["id"]
        return changed(**buffers)

    groups = asyncio.run(episodes.rollouts(workflow, generate, [{"id": i} for i in range(4)]))
    for i, [sample] in enumerate(groups):
        assert sample.tokens.tolist() == [1, 2, 10 * i, 10 * i + 1, 10 * i + 2]
        assert set(sample.arrays["x"][1]) == {i}


def test_arrays_of_several_kinds_are_not_packed_together():
    with_array = lambda kind, x: good().replace(arrays={"x": (kind, x)})
    first = with_array("target", np.zeros((5, 3), np.int32))
    for kind, x in (("input", np.zeros((5, 3), np.int32)), ("target", np.zeros((5, 1), np.int32)),
                    ("target", np.full((5, 3), 0.5, np.float32))):  # fmt: skip
        with pytest.raises(ValueError, match=r"need the same arrays, got .*x.* in sample 1 and .*target int32 3"):
            packing.pack([first, with_array(kind, x)], 8)


# -- workflows of AReaL ----------------------------------------------------------------------------


def test_no_wrong_result_of_an_areal_workflow_reaches_a_batch(caplog):
    right_result = {
        "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "logprobs": [0.0, 0.0, -0.5], "versions": [-1, -1, 0],
        "attention_mask": [1, 1, 1], "rewards": [0.5],
    }  # fmt: skip
    rng, results = random.Random(1), []
    for name, value in itertools.product(right_result, ENTRIES):
        entries = [*right_result[name]]
        entries[-1] = value
        results.append((name, right_result | {name: entries}))
    results += [(name, right_result | {name: value}) for name, value in itertools.product(right_result, VALUES)]
    results += [("", value) for value in VALUES if value is not None]
    current = right_result

    class Workflow:
        async def arun_episode(self, engine, data):
            await engine.agenerate(areal.ModelRequest(input_ids=[1, 2]))
            return current

    async def main():
        nonlocal current
        episode = areal.workflow(Workflow(), TOKENS)
        for name, each in rng.sample(results, 250):
            current = each
            try:
                [samples] = await episodes.rollouts(episode, generate, [ROW])
            except (ValueError, ServerError) as error:
                assert_one_line(str(error))
                assert "must " in str(error) and (not name or name[:4] in str(error)), (name, error)
                continue
            except (RuntimeError, AttributeError) as error:  # of the value's own code
                assert str(error) in ("not\nthis way", "no names", "no name")
                continue
            for sample in samples:
                assert_sound(sample, vocabulary=2**31, newest=2**31)  # of whose bounds an evaluation knows nothing
                ids = np.asarray(current["input_ids"]).ravel()
                assert (
                    sample.tokens.tolist() == ids[np.asarray(current["attention_mask"]).ravel().astype(bool)].tolist()
                )

    asyncio.run(main())
    assert "Traceback" not in caplog.text


# -- agents ----------------------------------------------------------------------------------------

RESULTS = [
    *VALUES, Score("x"), Score(1.0, {"a": "x"}), Score(1.0, {"a": math.inf}), Score(1.0, 5), Score(1.0, {}, 5),
    Score(1.0, {}, ((1, 2),)), {"reward": "x"}, {"reward": None}, {"reward": {"a": 1}}, {"": 1.0}, {None: 1.0},
    {"a" * 200: 1}, {str(i): 1 for i in range(300)}, [(1, 2.0)], [("x", 1)], [(1, math.inf)], [(-1, 1)], KeyError,
]  # fmt: skip


def test_no_wrong_result_of_an_agent_reaches_a_batch(caplog, monkeypatch):
    monkeypatch.setattr(failures, "MOST", 10**9)
    results = [(by_id, result) for by_id, result in itertools.product((False, True), RESULTS)]
    results = random.Random(2).sample(results, 120)
    current = None

    async def run(row, base_url, api_key):
        [(id, _)] = await chat(base_url, api_key, "hi")
        by_id, result = current
        return {id: result} if by_id else result

    async def main():
        nonlocal current
        making, _ = policy(*["4"] * len(results))
        how = dict(tokenizer=TOKENS, reward=right, sampling=SAMPLING)
        async with agents.played(agents.coroutine(run), "agent", **how) as workflow:
            for each in results:
                current = each
                caplog.clear(), episodes._warned.clear()
                [[sample]] = await episodes.rollouts(workflow, making, [{"prompt": "2 + 2", "answer": "4", "id": 7}])
                assert_sound(sample, vocabulary=len(TOKENS), newest=3)
                if caplog.text:
                    assert math.isnan(sample.reward)
                    said = caplog.messages[-1]
                    assert said.startswith("agent agent failed: ") and said.endswith("; row id 7")
                    assert_one_line(said)
                    kind = said.removeprefix("agent agent failed: ").partition(":")[0]
                    assert kind == "ValueError" or "not this way" in said or "no name" in said, said

    asyncio.run(main())


def test_an_agent_that_writes_into_its_row_changes_it_for_nobody():
    seen = []

    async def run(row, base_url, api_key):
        await chat(base_url, api_key, "hi")
        row["tests"].append("mine")
        row["tests"][0]["wanted"] = "4"

    async def scored(text, row, **_):
        seen.append(copy.deepcopy(row))
        return 0.0

    async def main():
        making, _ = policy("4")
        async with agents.played(
            agents.coroutine(run), "agent", tokenizer=TOKENS, reward=scored, sampling=SAMPLING
        ) as workflow:
            return await episodes.rollouts(workflow, making, [row])

    row = {"prompt": "2 + 2", "tests": [{"wanted": "5"}]}
    [[sample]] = asyncio.run(main())
    assert seen == [sample.info["row"]] == [{"prompt": "2 + 2", "tests": [{"wanted": "5"}]}]


JSON = [
    value for value in fuzz.VALUES if not isinstance(value, fuzz.Raw) and len(json.dumps(value)) < 10_000
]  # fmt: skip


def test_no_wrong_reward_over_http_reaches_a_row():
    engine, _, options = gateways.online()

    async def test(place):
        status, opened = await place.request("POST", "/sessions", "the admin's", json={})
        assert status == 200
        engine.say("hi")
        key, path = opened["api_key"], f"/sessions/{opened['id']}"
        status, done = await place.request("POST", "/v1/chat/completions", key, json=gateways.CHAT)
        assert status == 200
        for value, at in itertools.product(JSON, ("value", "interaction", "component", "by id")):
            body = {"value": value} if at == "value" else {"value": 1, "interaction": value}
            body = (
                {"value": {"a": value}}
                if at == "component"
                else {"value": {done["id"]: value}}
                if at == "by id"
                else body
            )
            status, answer = await place.request("POST", f"{path}/reward", key, json=body)
            assert status == 200 or (status == 400 and answer["error"]["message"]), (at, value, answer)
            assert_one_line(json.dumps(answer))
            status, answer = await place.request("GET", f"{path}/trajectories", key)
            assert status == 200, (at, value, answer)
            for index, reward in answer["rows"][0]["rewards"]:
                assert type(index) is int and (reward is None or abs(reward) <= LARGEST)

    gateways.served(test, **options)


# -- servers ---------------------------------------------------------------------------------------

WRONG = [
    None, "5", "", 5.5, -7, 0, 1, 2, 2**31, 2**40, 2**63, 10**400, True, math.nan, math.inf, -math.inf, 0.5, 1e300,
    -1e300, [], [[]], [None], {}, {"a": 1}, [1, 2, 3], "\ud800", [[[[]]]], len(TOKENS), len(TOKENS) - 1, "abort",
    "stop", "0-00000000", "9-00000000", "9999999999-00000000", {"type": "stop"}, [[-0.5, 104, None]],
    [{"version": scripted.V0, "start": 0, "end": 3}],
]  # fmt: skip
LIMIT = {"max_tokens": 8}
REQUESTS = [
    ("/v1/chat/completions", {"messages": USER, **LIMIT}),
    ("/v1/chat/completions", {"messages": USER, "logprobs": True, **LIMIT}),
    ("/v1/chat/completions", {"messages": USER, "tools": [{"type": "function", "function": gateways.FUNCTION}]}),
    ("/v1/completions", {"prompt": "x", **LIMIT}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 8}),
    ("/v1/messages", {"messages": USER, **LIMIT}),
]
STREAMED = [(path, body | {"stream": True}) for path, body in REQUESTS]
READ = [
    ("/v1/completions", {"prompt": "x", "logprobs": 2, "echo": True, **LIMIT}),
    ("/v1/completions", {"prompt": "xyz", "logprobs": 2, "echo": True, "max_tokens": 0}),
]


def right_answer(body):
    ids = body["input_ids"]
    if body["sampling_params"]["max_new_tokens"]:
        out = [*TOKENS.encode("hi"), END]
        answer = scripted.reply(out, [-0.5] * 3, [scripted.V0] * 3, "stop")
        answer["meta_info"] |= {"prompt_tokens": len(ids), "num_retractions": 0, "lora_path": None, "id": "x"}
        return answer
    top = [[[-0.5 - j, j, None] for j in range(body.get("top_logprobs_num", 0))] for _ in ids]
    meta = {
        "finish_reason": {"type": "length"}, "input_token_logprobs": [[-0.5, id, None] for id in ids],
        "input_top_logprobs": top, "output_token_logprobs": [],
    }  # fmt: skip
    return {"text": "", "output_ids": [], "meta_info": meta}


def lying(rng, told):
    """A handler of /generate that spoils one place of its answer, or of an event of it."""

    def spoilt(answer):
        container, key = rng.choice(fuzz.places(answer))
        value = copy.deepcopy(rng.choice(WRONG))
        told.append((key, value))
        container[key] = value
        return json.dumps(answer).encode()

    async def handler(request, body):
        answer = right_answer(body)
        if not body.get("stream"):
            return aiohttp.web.Response(body=spoilt(answer), content_type="application/json")
        reply = aiohttp.web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        early, count = rng.random() < 0.3, len(answer["output_ids"])
        for i in range(1, count + 1):
            event = copy.deepcopy(answer) | {"output_ids": answer["output_ids"][:i]}
            with contextlib.suppress(ConnectionError):
                data = spoilt(event) if early or i == count else json.dumps(event).encode()
                await reply.write(b"data: " + data + b"\n\n")
        return reply

    return handler


def refused_number(text):
    raise AssertionError(f"{text} is not JSON")


@pytest.mark.parametrize(
    "requests, count", [(REQUESTS, 200), (STREAMED, 150), (READ, 100)], ids=["whole", "stream", "read"]
)
def test_no_wrong_answer_of_a_server_reaches_an_agent_or_a_row(requests, count, caplog):
    rng, told = random.Random(count), []

    async def main():
        connector = aiohttp.TCPConnector(force_close=True)
        vocabulary = len(TOKENS)
        async with (
            scripted.serving() as server,
            client.connect([server.url], vocabulary=vocabulary) as fleet,
            serve(TOKENS, read=fleet.read) as gateway,
            aiohttp.ClientSession(connector=connector) as http,
        ):
            for i in range(count):
                caplog.clear()
                path, body = requests[i % len(requests)]
                server.script = [lying(rng, told)] * 20
                session = Session(fleet.generate, TOKENS)
                key = gateway.open(session)
                headers = {"authorization": f"Bearer {key}"}
                async with http.post(gateway.url + path, json={"model": "m", **body}, headers=headers) as reply:
                    status, text = reply.status, await reply.text()
                what = (path, told[-3:], status, text[:300])
                assert status == 200 or 400 <= status < 600, what
                events = [line[6:] for line in text.split("\n") if line.startswith("data: {")]
                answers = [json.loads(x, parse_constant=refused_number) for x in events or [text]]
                assert status == 200 or answers[0]["error"]["message"], what
                assert not any(word in caplog.text + text for word in ("Traceback", "a bug of this", "Exception in")), (
                    what
                )
                for sample in session.samples():
                    assert_sound(sample.replace(rewards=()), vocabulary=vocabulary, newest=10**9)
                    assert set(sample.version[sample.mask].tolist()) <= {-1, 0, 9}
                if session.failure:
                    assert_one_line(str(session.failure))
                    assert str(session.failure).startswith((f"{server.url}/generate: ", "tokens were resampled"))
                await gateway.close(key)

    asyncio.run(main())


def test_a_server_of_the_future_is_named_when_its_tokens_are_to_be_trained_on(caplog):
    async def main():
        async with scripted.serving("9-00000000") as server, client.connect([server.url]) as fleet:

            async def workflow(generate, row):
                return sampled([1, 2], await generate([1, 2], max_new_tokens=3), temperature=1.0)

            options = dict(group_size=2, groups_per_batch=1, eta=0, max_concurrent=2, vocabulary=50, seed=None)
            async with Executor(workflow, fleet.generate, Prompts([ROW]), **options) as executor:
                executor.admit(0)
                with pytest.raises(
                    ServerError, match=r"version must lie in \[-1, the newest version \+ 1 = 2\), got 9"
                ):
                    await executor.batch(0)

    asyncio.run(main())


def test_no_wrong_reply_of_a_judge_is_a_reward():
    replies = [*JSON, *({"choices": value} for value in JSON)]
    replies += [{"choices": [{"message": {"content": value}}]} for value in JSON]
    current = None

    async def handler(request):
        return aiohttp.web.Response(body=json.dumps(current).encode(), content_type="application/json")

    async def main():
        nonlocal current
        async with scripted.answering(handler) as url:
            grade = judge.judge(f"{url}/v1/chat/completions", attempts=1)
            for each in replies:
                current = each
                try:
                    value = await grade("4", {"prompt": "2 + 2"})
                except ServerError as error:
                    assert_one_line(str(error))
                    assert str(error).startswith(url)
                    continue
                assert value is None or 0 <= value <= 1
                assert is_number(rewards.score(value).value)

    asyncio.run(main())
