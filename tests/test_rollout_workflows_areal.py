"""Workflows written for AReaL give the same samples as ours."""

import asyncio
import math
import time

import numpy as np
import pytest
from test_rollout_workflows_multi_turn import SAMPLING, TOKENS, learnt, policy

from areax.rollout.workflows import areal, resolve

PLACE = "tests/areal_workflows.py"
HERE = __file__.replace("test_rollout_workflows_areal.py", "areal_workflows.py")
ROW = {"messages": [{"role": "user", "content": "2 + 2"}], "answer": "4"}


async def right(text, row, **_):
    return int(text == row["answer"])


def play(name, texts, **options):
    generate, heard = policy(*texts)

    async def main():
        how = dict(tokenizer=TOKENS, reward=right, sampling=SAMPLING, options=options)
        async with resolve.bind(f"{HERE}:{name}", **how) as workflow:
            return await workflow(generate, ROW)

    return asyncio.run(main()), heard


def test_a_single_turn_workflow_with_several_samples():
    samples, heard = play("SingleTurn", ["4", "no idea"], n_samples=2)
    assert [s.reward for s in samples] == [1.0, 0.0] and heard[0] == heard[1]
    assert [learnt(s) for s in samples] == ["4<|im_end|>", "no idea<|im_end|>"]
    for s in samples:
        assert set(s.version[s.mask]) == {3} and set(s.logp[s.mask]) == {-0.5} and s.temperature == 1.0
        assert set(s.version[~s.mask]) == {-1} and set(s.logp[~s.mask]) == {0.0}


def test_a_workflow_that_retries_over_several_turns():
    [s], heard = play("Retry", ["5", "4"])
    assert s.reward == 0.5 and learnt(s) == "5<|im_end|>4<|im_end|>"
    assert heard[1].startswith(heard[0] + "5<|im_end|>") and "wrong, again" in heard[1]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"versions": None}, "must have input_ids.* but lacks versions"),
        ({"rewards": [1.0, 2.0]}, "rewards must be one per row, got 2 for 1 rows"),
        ({"logprobs": [[0.0]]}, r"logprobs must be \[rows, T\] as input_ids \(1, 2\), got \(1, 1\)"),
    ],
)
def test_incomplete_results_are_refused(changes, message):
    whole = {
        "input_ids": [[1, 2]],
        "loss_mask": [[0, 1]],
        "logprobs": [[0, -1.0]],
        "versions": [[-1, 0]],
        "rewards": [1],
    }
    result = {name: value for name, value in (whole | changes).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        areal.samples(result, 1.0, ROW)


def test_padded_rows_are_trimmed():
    row = lambda n: {name: np.full((1, n), n) for name in ("input_ids", "loss_mask", "logprobs", "versions")} | {
        "attention_mask": np.ones((1, n), bool), "rewards": np.array([n]),
    }  # fmt: skip
    samples = areal.samples(areal.concat_padded_tensors([row(2), row(5)]), 1.0, ROW)
    assert [s.tokens.tolist() for s in samples] == [[2, 2], [5] * 5] and [s.reward for s in samples] == [2, 5]


def test_requests_are_checked_and_rewards_have_a_timeout():
    generate, _ = policy("x")
    engine = areal.InferenceEngine(generate)
    for changes in ({"n_samples": 2}, {"max_tokens": 3}):
        how = areal.GenerationHyperparameters(**changes)
        with pytest.raises(ValueError, match="n_samples must be 1 and leave room"):
            asyncio.run(engine.agenerate(areal.ModelRequest(input_ids=[1, 2, 3], gconfig=how)))
    slow = areal.AsyncRewardWrapper(lambda *_, **__: time.sleep(0.3), timeout_seconds=0.05)
    assert math.isnan(asyncio.run(slow("", "", [], [])))
    assert asyncio.run(areal.AsyncRewardWrapper(lambda p, c, pi, ci, **row: row["n"])("", "", [], [], n=3)) == 3
