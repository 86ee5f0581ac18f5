"""Environments of tinker-cookbook play without its renderers and tokenizers, and are trained on."""

import asyncio
import json
import math

import pytest
import servers
import tiny
from fidelity import Policy, exact
from gateways import TOKENS
from playing import call, play, played

from areax import models
from areax.adapters import hf
from areax.adapters.command_line.options import replaced
from areax.core.losses import GRPO
from areax.core.optim import Optimizer
from areax.recipes import grpo
from areax.recipes.shared import environments
from areax.rollout.types import Sampling

pytest.importorskip("tinker_cookbook", reason="it has an environment of its own")
ENV, ROW = "tinker_cookbook:tinkered:Builder", {"split": "train", "batch": 2, "index": 0}
RECIPES = "tinker_cookbook:tinker_cookbook.recipes."
ARITHMETIC = RECIPES + "math_rl.arithmetic_env:ArithmeticDatasetBuilder"
NUMBERS = RECIPES + "multiplayer_rl.guess_number.env:GuessNumberDatasetBuilder"
FIRST = {"split": "train", "batch": 0, "index": 0}


def test_messages_are_seen_and_answered():
    policy = Policy("2", "3")
    samples = played(ENV, policy, ROW)
    assert exact(policy, samples) and len(policy.said) == 2
    assert [value for sample in samples for _, value in sample.rewards] == [0.0, 1.0]
    assert samples[0].components == {"guesses": 2.0}
    assert policy.heard[0].endswith("user\nWhat is 2 + 1?<|im_end|>\n<|im_start|>assistant\n")
    assert policy.heard[1].endswith("assistant\n2<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n")


def test_tools_are_called_and_their_errors_told():
    policy = Policy(call("add", a=2, b=1), call("add", a="x"), call("sing"), "3")
    samples = played(ENV, policy, ROW, own={"kind": "tools"})
    assert exact(policy, samples) and {sample.reward for sample in samples} == {1.0} and len(policy.said) == 4
    assert samples[0].components["messages"] == 10.0 and samples[0].components["stop/completed"] == 1.0
    assert "Use the tool." in policy.heard[0] and '"Adds two numbers."' in policy.heard[0]
    for heard, told in zip(policy.heard[1:], ("3<|im_end|>", '{"error"', '{"error"'), strict=True):
        assert heard.rpartition("tool\n")[2].startswith(told)


def test_arguments_that_are_no_object_are_worth_what_the_environment_says():
    policy = Policy('<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>')
    samples = played(ENV, policy, ROW, own={"kind": "tools"})
    assert exact(policy, samples) and len(policy.said) == 1


@pytest.mark.parametrize("turns, reward", [(16, 1.2), (1, 0.1)])
def test_a_group_has_a_reward_at_the_end(turns, reward):
    """Of its one episode, also if it is stopped before its end."""
    policy = Policy("2", "3")
    samples = played(ENV, policy, ROW, own={"kind": "group"}, turns=turns)
    assert exact(policy, samples) and math.isclose(sum(sample.reward for sample in samples), reward)
    assert samples[0].components["right"] == float(turns > 1)


def test_what_a_group_has_open_is_closed():
    import tinkered

    tinkered.CLOSED.clear()
    played(ENV, Policy("3"), ROW)
    assert tinkered.CLOSED == [2]


@pytest.mark.parametrize(
    "kind, line", [("broken", "RuntimeError: no such machine"), ("rewrites", "a conversation must grow by the answer")]
)
def test_an_environment_that_fails_costs_its_episode(kind, line, caplog):
    policy = Policy("2")
    [sample] = samples = played(ENV, policy, ROW, own={"kind": kind})
    assert exact(policy, samples) and math.isnan(sample.reward) and line in caplog.text


def test_recipes_of_the_cookbook_play():
    for text, reward in (("91", 1.0), ("87", 0.0)):
        policy = Policy(text)
        [sample] = samples = played(ARITHMETIC, policy, FIRST, own={"n_batches": 3})
        assert exact(policy, samples) and sample.reward == reward
        assert sample.components == {"format": 1.0, "correct": reward} and "What is 44 + 47?" in policy.heard[0]
    policy = Policy("Guess: 3", "hm", *(f"Guess: {n}" for n in range(800, 808)))
    samples = played(NUMBERS, policy, FIRST)
    assert exact(policy, samples) and [value for one in samples for _, value in one.rewards][:3] == [0.0, -1.0, 0.0]
    assert "Failed to parse." in policy.heard[2] and "Your job is to guess" in policy.heard[0]


def test_equal_rows_are_equal_tasks_while_others_run():
    async def together(*batches):
        policies = [Policy("1") for _ in batches]
        rows = [{"split": "train", "batch": batch, "index": 0} for batch in batches]
        own = {"n_batches": 9}
        await asyncio.gather(*(play(ARITHMETIC, one, row, own=own) for one, row in zip(policies, rows, strict=True)))
        return [one.heard for one in policies]

    alone = asyncio.run(together(1))
    many = asyncio.run(together(1, 2, 3, 4, 1, 5, 6, 7, 8))
    assert many[0] == many[4] == alone[0] and len({*map(tuple, many)}) == 8


def test_rows_are_groups_of_its_batches():
    assert environments.rows(ENV, "", "train") == [{"split": "train", "batch": n, "index": 0} for n in range(5)]
    three = environments.rows(ENV, '{"batch_size": 3}', "train")
    assert [(row["batch"], row["index"]) for row in three] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    [row] = environments.first(ENV, "", 1)
    policy = Policy("6")
    [sample] = played(ENV, policy, row)
    assert sample.reward == 1.0 and "What is 5 + 1?" in policy.heard[0]


@pytest.mark.parametrize(
    "name, options, line",
    [
        ("nowhere:Builder", {}, "ValueError: nowhere: there is no module 'nowhere'"),
        ("tinkered:Builder", {"size": 3}, "TypeError: .*unexpected keyword argument 'size'"),
        ("tinkered:Builder", {"renderer_name": "qwen3"}, "ValueError: renderer_name must be left out: messages are"),
        ("tinkered:Group", {"n": 3}, "TypeError: .*missing"),
    ],
)
def test_what_cannot_be_made_is_a_line(name, options, line):
    with pytest.raises(ValueError, match=rf"^tinker_cookbook: the data set {name} cannot be made: {line}.*$"):
        environments.rows(f"tinker_cookbook:{name}", json.dumps(options), "train")


def test_a_data_set_without_a_test_set_and_groups_of_several_are_refused():
    with pytest.raises(ValueError, match="cannot be made: ValueError: it has no test set to evaluate on$"):
        environments.first(ENV, '{"tested": false}', 2)
    with pytest.raises(ValueError, match="a group must have one environment, got 4; set its size to 1"):
        asyncio.run(environments.check(ENV, '{"group_size": 4}', ROW, TOKENS))


@pytest.mark.long
def test_a_run_trains_and_evaluates(tmp_path):
    settings = {**tiny.HF, "max_position_embeddings": 256, "vocab_size": len(TOKENS)}
    shape = models.config_from_hf({**settings, "eos_token_id": TOKENS.eos_token_id})
    hf.save(tmp_path / "model", shape, tiny.weights(models.table(shape), 0.2), tokenizer=TOKENS)
    with servers.embedded(tmp_path / "model", slots=8, context=256) as remote:
        base = grpo.Config(str(tmp_path / "model"), "", "", env=ENV, env_options='{"kind": "group", "turns": 2}')
        config = replaced(
            base, out=str(tmp_path / "run"), groups=2, group_size=2, max_concurrent=4, length=256, rows=2, eta=0,
            steps=2, servers=(remote.url,), sampling=Sampling(max_new_tokens=6), heldout=("env:2",),
            objective=GRPO(advantage={"std": "none"}), optim=Optimizer(lr=1e-3),
        )  # fmt: skip
        done = grpo.main(config)
    assert done["complete"] and done["heldout_rows"] == 2
