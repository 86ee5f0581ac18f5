"""Tasks of inspect-ai play with their solvers, tools and scorers, many at a time, and are trained on."""

import asyncio
import json
import logging
import math
import time

import pytest
import servers
import tiny
from fidelity import Policy, exact
from gateways import TOKENS
from playing import acted, agent, call

from areax import models
from areax.adapters import hf
from areax.adapters.command_line.options import replaced
from areax.core.losses import GRPO
from areax.core.optim import Optimizer
from areax.recipes import grpo
from areax.recipes.shared import environments
from areax.rollout.types import Sampling

pytest.importorskip("inspect_ai", reason="it has an environment of its own")
SUMS, ROW = "inspect_ai:inspected:sums", {"split": "train", "index": 2}


def test_an_answer_is_worth_what_the_scorer_says():
    for text, reward in (("3", 1.0), ("4", 0.0), ("", 0.0)):
        policy = Policy(text)
        [sample] = samples = acted(SUMS, policy, ROW)
        assert exact(policy, samples) and sample.reward == reward and sample.components == {"match": reward}
    assert "Answer with a number." in policy.heard[0] and "What is 2 + 1?" in policy.heard[0]


def test_tools_are_called_over_several_turns_and_the_first_scorer_counts():
    policy = Policy(call("add", a=2, b=1), call("add", a=1), call("sing"), "3")
    samples = acted("inspect_ai:inspected:tools", policy, ROW)
    assert exact(policy, samples) and {sample.reward for sample in samples} == {1.0} and len(policy.said) == 4
    assert samples[0].components == {"includes": 1.0, "size": 1.0}
    told = "3<|im_end|>", "Error: Found 1 validation", "Error: Tool sing not found"
    for heard, text in zip(policy.heard[1:], told, strict=True):
        assert heard.rpartition("tool\n")[2].startswith(text)


def test_an_agent_plays_until_it_submits():
    policy = Policy(call("add", a=2, b=1), "It is 3.", call("submit", answer="3"))
    samples = acted("inspect_ai:inspected:agent", policy, ROW)
    assert exact(policy, samples) and {sample.reward for sample in samples} == {1.0} and len(policy.said) == 3
    assert "Please proceed to the next step" in policy.heard[2]


def test_many_episodes_run_at_the_same_time_and_each_has_its_own_session():
    class Slow(Policy):
        most = running = 0

        async def __call__(self, prompt, **sampling):
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.5)
            self.running -= 1
            return await super().__call__(prompt, **sampling)

    policy = Slow(say=lambda prompt, turn: str(turn % 4))
    samples = acted(SUMS, policy, ROW, size=32)
    assert exact(policy, samples) and len(samples) == 32 and policy.most == 32
    for sample in samples:
        assert sample.reward == float(sample.info["text"].removesuffix("<|im_end|>") == "3")


def test_episodes_follow_one_another():
    """The evaluation waits for more."""

    async def main():
        policy = Policy("3", "4", "4", "3")
        async with agent(SUMS, eval={"first": 10}) as group:
            rows = [ROW, ROW, {"split": "eval", "index": 0}, ROW]
            made = [await group(policy, row) for row in rows]
        assert exact(policy, sum(made, [])) and [sample.reward for [sample] in made] == [1, 0, 0, 1]
        assert "What is 10 + 1?" in policy.heard[2]

    asyncio.run(main())


def test_agents_play_at_the_same_time_as_a_run_and_its_evaluation_do():
    async def main():
        policies = [Policy("3"), Policy("4"), Policy("11")]
        async with agent(SUMS) as one, agent(SUMS) as other, agent(SUMS, eval={"first": 10}) as heldout:
            rows = [ROW, ROW, {"split": "eval", "index": 0}]
            made = [one(policies[0], rows[0], 4), other(policies[1], rows[1], 4), heldout(policies[2], rows[2], 4)]
            made = await asyncio.gather(*made)
        assert all(exact(policy, samples) for policy, samples in zip(policies, made, strict=True))
        assert [{sample.reward for sample in samples} for samples in made] == [{1.0}, {0.0}, {1.0}]

    asyncio.run(main())


@pytest.mark.parametrize(
    "kind, line",
    [
        ("solver", "Agent failed: RuntimeError: RuntimeError('no such machine'); row {'split': 'train', 'index': 2}"),
        ("long", 'Agent failed: RuntimeError: RuntimeError("the page exceeds the browser\'s context length")'),
        ("graded", "got 'none: a scorer needs a model of its own, by model_roles in --env-options'"),
        ("several", "the scorer several must give a number, or a text such as C, got {'a': 1, 'b': 0}"),
    ],
)
def test_a_task_that_fails_costs_its_episode(kind, line, caplog):
    policy = Policy("3")
    [sample] = samples = acted("inspect_ai:inspected:wrong", policy, ROW, kind=kind)
    assert exact(policy, samples) and math.isnan(sample.reward) and line in caplog.text


@pytest.mark.parametrize(
    "what, second, line",
    [
        ("too long", None, "RuntimeError: RuntimeError(\"http://judge: HTTP 400: this model's maximum context length"),
        ("503 Service Unavailable", None, "the scorer saying must give a number, or a text such as C, got '503 Serv"),
        ("c", None, "the scorer saying must give a number, or a text such as C, got 'c'"),
        ("", None, "the scorer saying must give a number, or a text such as C, got ''"),
        ("nan", None, "the scorer saying must give a number, or a text such as C, got 'nan'"),
        ("none", None, "ValueError: inspect_ai: each of 1 scorers must give a score, got none"),
        ("none", True, "ValueError: inspect_ai: each of 2 scorers must give a score, got size"),
    ],
)
def test_a_grader_that_fails_is_no_reward(what, second, line, caplog):
    [sample] = acted("inspect_ai:inspected:says", Policy("3"), ROW, what=what, second=second)
    assert math.isnan(sample.reward) and line in caplog.text and "row {'split': 'train', 'index': 2}" in caplog.text


@pytest.mark.parametrize("what, reward", [("C", 1.0), ("I", 0.0), ("P", 0.5), ("N", 0.0), ("Yes", 1.0), ("0.25", 0.25)])
def test_texts_of_inspect_are_scores(what, reward):
    [sample] = acted("inspect_ai:inspected:says", Policy("3"), ROW, what=what)
    assert sample.reward == reward


def test_a_scorer_has_a_model_of_its_own():
    roles = {"grader": "kind/model"}
    policy = Policy("3")
    [sample] = samples = acted("inspect_ai:inspected:wrong", policy, ROW, kind="graded", model_roles=roles)
    assert exact(policy, samples) and len(policy.said) == 1 and sample.components == {"model_graded_qa": 1.0}


def test_a_request_that_fails_is_not_repeated(caplog):
    class Broken(Policy):
        async def __call__(self, prompt, **sampling):
            self.said.append(prompt)
            raise RuntimeError("the server is gone")

    policy = Broken("3")
    assert acted(SUMS, policy, ROW) == [] and len(policy.said) == 1 and "InternalServerError" in caplog.text


def test_a_prompt_that_has_become_too_long_is_the_policys():
    class Short(Policy):
        async def __call__(self, prompt, **sampling):
            if self.said:
                raise ValueError("the prompt is longer than the model's context length")
            return await super().__call__(prompt, **sampling)

    policy = Short(call("add", a=2, b=1))
    [sample] = samples = acted("inspect_ai:inspected:tools", policy, ROW)
    assert exact(policy, samples) and sample.reward == 0.0


def test_code_that_blocks_does_not_block_the_run(caplog):
    begun = time.monotonic()
    [sample] = acted("inspect_ai:inspected:wrong", Policy("3"), ROW, kind="hangs", timeout_s=3)
    assert math.isnan(sample.reward) and "TimeoutError" in caplog.text and time.monotonic() - begun < 6


def test_a_model_that_there_is_not_is_a_line(caplog):
    assert acted(SUMS, Policy("3"), ROW, model_roles={"grader": "nowhere/model"}) == []
    assert "Agent failed: ValueError: Model API nowhere of model 'nowhere/model' not recognized." in caplog.text


@pytest.mark.long
def test_the_runs_log_stays_as_it_is():
    root = logging.getLogger()
    level = root.level
    acted(SUMS, Policy("3"), ROW)
    assert root.level == level


def test_rows_are_its_samples():
    assert environments.rows(SUMS, "", "train") == [{"split": "train", "index": n} for n in range(6)]
    assert environments.first(SUMS, '{"eval": {"first": 10}}', 2) == [{"split": "eval", "index": n} for n in range(2)]
    with pytest.raises(ValueError, match="^inspect_ai: inspected:sums has no samples for evaluation alone; say in"):
        environments.first(SUMS, "", 2)


@pytest.mark.parametrize(
    "name, options, line",
    [
        ("nowhere:sums", {}, "ValueError: nowhere: there is no module 'nowhere'"),
        ("inspected:sums", {"last": 3}, "TypeError: .*unexpected keyword argument 'last'"),
        ("inspected:wrong", {"kind": "none"}, "ValueError: it has no scorer"),
        ("inspected:samples", {}, "TypeError: must be a function with @task, got list"),
    ],
)
def test_what_cannot_be_made_is_a_line(name, options, line):
    with pytest.raises(ValueError, match=rf"^inspect_ai: the task {name} cannot be made: {line}.*$"):
        environments.rows(f"inspect_ai:{name}", json.dumps(options), "train")


@pytest.mark.long
def test_a_run_trains_and_evaluates(tmp_path):
    settings = {**tiny.HF, "max_position_embeddings": 256, "vocab_size": len(TOKENS)}
    shape = models.config_from_hf({**settings, "eos_token_id": TOKENS.eos_token_id})
    hf.save(tmp_path / "model", shape, tiny.weights(models.table(shape), 0.2), tokenizer=TOKENS)
    with servers.embedded(tmp_path / "model", slots=8, context=256) as remote:
        base = grpo.Config(str(tmp_path / "model"), "", "", env=SUMS, env_options='{"eval": {"first": 3}}')
        config = replaced(
            base, out=str(tmp_path / "run"), groups=2, group_size=2, max_concurrent=4, length=256, rows=2, eta=0,
            steps=2, servers=(remote.url,), sampling=Sampling(max_new_tokens=6), heldout=("env:2",),
            objective=GRPO(advantage={"std": "none"}), optim=Optimizer(lr=1e-3),
        )  # fmt: skip
        done = grpo.main(config)
    assert done["complete"] and done["heldout_rows"] == 2
