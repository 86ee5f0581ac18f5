"""Served teachers: scores from the embedded server equal those of the model, and bad answers are detected."""

import asyncio
from functools import partial

import jax
import numpy as np
import pytest
import servers
import test_rollout_client as scripted
import tiny

from areax import models
from areax.adapters import hf
from areax.core import divergence, packing
from areax.rollout import client
from areax.rollout.types import supervised
from areax.rollout.workflows import teacher

K = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tiny.model(tmp_path_factory.mktemp("teacher") / "model")


@pytest.fixture(scope="module")
def server(place):
    with servers.embedded(place, slots=4, context=64) as remote:
        yield remote


def samples(info=None, count=5):
    rng = np.random.default_rng(0)
    return [supervised(rng.integers(3, 14, 3), rng.integers(3, 14, n + 2), info=info or {}) for n in range(count)]


def asked(url, work, **options):
    """The result of the coroutine function `work(fleet)`."""

    async def main():
        async with client.connect([url], **options) as fleet:
            return await work(fleet)

    return asyncio.run(main())


@pytest.mark.slow
def test_a_served_teacher_gives_the_scores_of_the_model(server, place):
    data = samples()
    told = asked(server.url, lambda fleet: teacher.annotate(data, {"": fleet}, top_k=K))
    config, params = hf.load(place)
    batch = jax.tree.map(lambda x: x[0], packing.pack(told, 16))
    likeliest = lambda logits_CV, target_C, given: divergence.teacher_top(logits_CV, K)
    score = jax.jit(partial(models.score, config=config, per_chunk=likeliest))
    own, learnt = score(params, batch), np.asarray(batch.mask_BT)
    np.testing.assert_allclose(batch.target["teacher"][learnt], own.logp_BT[learnt], atol=1e-5)
    ids, logp = (np.asarray(x)[learnt] for x in own.extra)
    np.testing.assert_array_equal(batch.target["teacher_ids"][learnt], ids)
    np.testing.assert_allclose(batch.target["teacher_logp"][learnt], logp, atol=1e-5)
    for s in told:
        kinds = {name: (kind, x.dtype, x.shape) for name, (kind, x) in s.arrays.items()}
        n = len(s.tokens)
        assert kinds == {
            "teacher": ("target", np.float32, (n,)), "teacher_ids": ("target", np.int32, (n, K)),
            "teacher_logp": ("target", np.float32, (n, K)),
        }  # fmt: skip
        assert s.arrays["teacher"][1][0] == 0


def test_rows_choose_their_teacher_by_name(server):
    """With one teacher, rows need no name."""

    async def work(fleet):
        named = await teacher.annotate(samples({"row": {"teacher": "b"}}, 2), {"a": None, "b": fleet})
        with pytest.raises(ValueError, match="'teacher' must be one of a, b, got 'c'; row {'teacher': 'c'}"):
            await teacher.annotate(samples({"row": {"teacher": "c"}}, 1), {"a": fleet, "b": fleet})
        with pytest.raises(ValueError, match="'teacher' must be one of a, b, got None; row {}"):
            await teacher.annotate(samples(count=1), {"a": fleet, "b": fleet})
        return named, await teacher.annotate(samples({"row": {"teacher": None}}, 2), {"a": fleet})

    named, alone = asked(server.url, work)
    for a, b in zip(named, alone, strict=True):
        assert set(a.arrays) == set(b.arrays) == {"teacher"}
        np.testing.assert_array_equal(a.arrays["teacher"][1], b.arrays["teacher"][1])


def test_refusals_of_a_server_name_the_row(server):
    long = supervised([3] * 60, [4] * 5, info={"row": {"id": 7}})
    with pytest.raises(ValueError, match=r"annotate: .*longer than the model's context length.*; row id 7"):
        asked(server.url, lambda fleet: teacher.annotate([long], {"": fleet}))
    with pytest.raises(ValueError, match="top_logprobs must be from 0 to 128, got 129"):
        asked(server.url, lambda fleet: teacher.score(fleet, [3, 4], 129))


def answer(tokens, logp, top=None):
    """A server's answer with log-probabilities of the input tokens."""
    meta = {
        "input_token_logprobs": [[x, t, None] for x, t in zip(logp, tokens, strict=True)],
        "prompt_tokens": len(logp),
    }
    whole = scripted.reply([], [], [], "length")
    whole["meta_info"] |= meta | ({"input_top_logprobs": top} if top else {})
    return scripted.answers(200, whole)


def against(*script, top_k=0, vocabulary=None):
    """(`teacher.score` of the tokens 5, 6, 7 by a server with scripted answers, bodies that it received)."""

    async def main():
        async with scripted.serving() as state, client.connect([state.url]) as fleet:
            state.script += script
            return await teacher.score(fleet, [5, 6, 7], top_k, vocabulary), state.generated()

    return asyncio.run(main())


def test_the_request_and_its_retries():
    busy, good = scripted.answers(503, {}), answer([5, 6, 7], [None, -1.5, -0.25])
    (logp, ids, top), bodies = against(busy, scripted.hangs_up, good)
    np.testing.assert_array_equal(logp, [0, -1.5, -0.25])
    assert ids.shape == top.shape == (3, 0)
    assert all(len(body.pop("rid")) == 32 for body in bodies)
    assert bodies == [
        {
            "input_ids": [5, 6, 7], "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True, "logprob_start_len": 0, "extra_key": "0-00000000",
        }
    ] * 3  # fmt: skip


def test_missing_log_probabilities_become_nan():
    pairs = [None, [[-0.5, 9, None], [None, 8, None]], [[-0.1, 3, None], [-3.0, 4, None]]]
    (logp, ids, top), bodies = against(answer([5, 6, 7], [None, None, -3.25], pairs), top_k=2)
    np.testing.assert_array_equal(logp, np.float32([0, np.nan, -3.25]))
    np.testing.assert_array_equal(ids, [[0, 0], [9, 8], [3, 4]])
    np.testing.assert_array_equal(top, np.float32([[0, 0], [-0.5, np.nan], [-0.1, -3]]))
    assert bodies[0]["top_logprobs_num"] == 2


@pytest.mark.sweep
@pytest.mark.parametrize(
    "bad, words",
    [
        (answer([5, 6, 8], [None, -1.0, -1.0]), "the 3 input tokens, got those of others"),
        (answer([5, 6], [None, -1.0]), "the 3 input tokens, got those of others"),
        (answer([5, 6, 7], [None, -1.0, -1.0]), "2 likeliest tokens at each of 3 positions"),
        (
            answer([5, 6, 7], [None, -1.0, -1.0], [None, [[-1.0, 1, None]], [[-1.0, 1, None]]]),
            r"positions, got \[1\] at 3",
        ),
        (
            answer([5, 6, 7], [None, -1.0, -1e38], [None, *[[[-0.9, 1, None], [-1.0, 2, None]]] * 2]),
            r"/generate: a log-probability must be a number from -10000 to 0, got -1e\+38",
        ),
        (
            answer([5, 6, 7], [None, -1.0, -1.0], [None, *[[[-0.9, 1, None], [-3e38, 2, None]]] * 2]),
            r"/generate: a log-probability must be a number from -10000 to 0, got -3e\+38",
        ),
        (
            answer([5, 6, 7], [None, -1.0, -1.0], [None, *[[[-0.9, 1, None], [-1.0, 1, None]]] * 2]),
            "/generate: a position's likeliest tokens must differ, got one twice",
        ),
        (
            answer([5, 6, 7], [None, -1.0, -0.9], [None, *[[[-0.9, 1, None], [-1.0, 2, None]]] * 2]),
            "/generate: a token must have .* that the list of its position has, at most its least, got -0.9 at 2",
        ),
        (
            answer([5, 6, 7], [None, -1.0, -1.5], [None, *[[[-0.9, 7, None], [-1.0, 2, None]]] * 2]),
            "/generate: a token must have .* got -1.5 at 2",
        ),
        (
            answer([5, 6, 7], [None, -1.0, -1.0], [None, *[[[None, 1, None], [None, 2, None]]] * 2]),
            "must be numbers, got null at every position",
        ),
        (
            answer([5, 6, 7], [None, -1.0, -1.0], [None, *[[[-0.1, 1, None], [-0.2, 2, None]]] * 2]),
            "/generate: probabilities of a position's 2 likeliest tokens must have a sum of at most 1, got 1.72",
        ),
        (
            answer([5, 6, 7], [None, -9.0, -9.0], [None, *[[[-5.0, 1, None], [-5.0, 2, None]]] * 2]),
            "/generate: probabilities of all 20 tokens must have a sum of 1, got likeliest ones with a sum of 0.01348",
        ),
        (
            answer([5, 6, 7], [None, -1.0, -1.0], [None, *[[[None, 1, None], [-1.0, 2, None]]] * 2]),
            "/generate: log-probabilities of the likeliest tokens must be numbers, got null at every position",
        ),
    ],
    ids=[
        "others",
        "fewer",
        "none",
        "one",
        "low",
        "low among the likeliest",
        "twice",
        "unlisted",
        "listed",
        "null",
        "more than 1",
        "too little",
        "null among the likeliest",
    ],
)
def test_an_answer_for_other_tokens_is_an_error(bad, words):
    with pytest.raises(RuntimeError, match=words):
        against(bad, top_k=2, vocabulary=20)


def test_null_for_the_token_itself_is_an_error():
    with pytest.raises(RuntimeError, match="/generate: must return a log-probability of each input token .*null at 2"):
        against(answer([5, 6, 7], [None, -1.0, None]))


def test_a_teacher_may_be_asked_again(monkeypatch):
    monkeypatch.setattr(teacher, "PAUSE_S", 0.0)
    bad, good = answer([5, 6, 8], [None, -1.0, -1.0]), answer([5, 6, 7], [None, -1.5, -0.25])
    sample = supervised([5, 6], [7])

    async def main(attempts):
        async with scripted.serving() as state, client.connect([state.url]) as fleet:
            state.script += [bad, bad, good]
            return await teacher.annotate([sample], {"": fleet}, attempts=attempts)

    [told] = asyncio.run(main(3))
    np.testing.assert_array_equal(told.arrays["teacher"][1], [0, -1.5, -0.25])
    with pytest.raises(RuntimeError, match="got those of others"):
        asyncio.run(main(2))
