"""Tasksets of verifiers from 0.4 on play through its servers and programs, and are trained on."""

import asyncio
import itertools
import json
import math
import os

import killing
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

eval_client = pytest.importorskip("verifiers.v1.clients.eval")
pytest.importorskip("verifiers.v1.semantic", reason="verifiers before 0.4")
ENV, ROW = "verifiers:tasksets", {"split": "train", "index": 2}
RIVAL = {"client": {"type": "eval", "base_url": "http://127.0.0.1:1/v1"}, "model": "other"}


def test_a_task_is_worth_its_weighted_rewards():
    for text, reward in (("3", 2.0), ("4", 0.0)):
        policy = Policy(text)
        [sample] = samples = acted(ENV, policy, ROW)
        assert exact(policy, samples) and sample.reward == reward
        assert sample.components == {"right": reward, "messages": 2.0}
    assert "What is 2 + 1?" in policy.heard[0]


def test_a_program_calls_tools_over_several_turns():
    policy = Policy(call("add", a=1, b=2), call("add", a=3, b=0), "3")
    samples = acted(ENV, policy, ROW)
    assert exact(policy, samples) and {sample.reward for sample in samples} == {2.0} and len(policy.said) == 3
    assert policy.heard[1].rpartition("tool\n")[2].startswith("3<|im_end|>")


def test_an_empty_answer_is_the_policys_and_not_unscorable():
    policy = Policy("")
    [sample] = samples = acted(ENV, policy, ROW)
    assert exact(policy, samples) and sample.reward == 0.0


def test_a_prompt_that_has_become_too_long_is_the_policys():
    class Short(Policy):
        async def __call__(self, prompt, **sampling):
            if self.said:
                raise ValueError("the prompt is longer than the model's context length")
            return await super().__call__(prompt, **sampling)

    policy = Short(call("add", a=1, b=2))
    samples = acted(ENV, policy, ROW)
    assert exact(policy, samples) and {sample.reward for sample in samples} == {0.0}


def test_episodes_share_a_client_and_keep_their_sessions_apart(monkeypatch):
    made = []
    monkeypatch.setattr(eval_client.EvalClient, "__init__", counted(made, eval_client.EvalClient.__init__))
    policies = [Policy(call("add", a=1, b=n), str(n)) for n in range(4)]

    async def main():
        async with agent(ENV) as group:
            return await asyncio.gather(*(group(policy, ROW) for policy in policies))

    groups = asyncio.run(main())
    assert all(exact(policy, samples) for policy, samples in zip(policies, groups, strict=True))
    assert [samples[0].reward for samples in groups] == [0.0, 0.0, 0.0, 2.0] and len(made) == 1


def counted(made, function):
    def called(*arguments):
        made.append(arguments)
        return function(*arguments)

    return called


@pytest.mark.parametrize(
    "options, line",
    [
        ({"taskset": {"broken": True}}, "RuntimeError: TaskError: task SumTask scoring: KeyError: 'answer'"),
        ({"taskset": {"judged": True}}, "RuntimeError: ProviderError: this model's maximum context length is 8192"),
        ({"agent": {"harness": {"id": "tasksets", "program": "raise KeyError"}}}, "HarnessError: harness"),
        ({"id": "seats", "trained": ["first"], "again": True, "second": RIVAL}, "first must be run once in an episode"),
    ],
)  # fmt: skip
def test_an_environment_that_raises_costs_its_episode(options, line, caplog):
    samples = acted(ENV, Policy("3"), ROW, **options)
    assert all(math.isnan(sample.reward) for sample in samples) and line in caplog.text


def test_a_program_that_hangs_is_ended_with_its_episode(caplog, tmp_path):
    program = (
        f"import os, pathlib, time; pathlib.Path({str(tmp_path / 'id')!r}).write_text(str(os.getpid())); time.sleep(99)"
    )
    options = {"agent": {"harness": {"id": "tasksets", "program": program}}}
    assert acted(ENV, Policy("3"), ROW, timeout_s=3, **options) == [] and "TimeoutError" in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "id").read_text()), 0)


@pytest.mark.parametrize(
    "options, line",
    [
        ({"id": "seats"}, "ValueError: one agent of an episode must be trained, got first, second"),
        ({"id": "seats", "trained": []}, "ValueError: one agent of an episode must be trained, got none"),
        ({"id": "seats", "trained": ["first"]}, "ValueError: an agent that is not trained needs a model .*, got none"),
        ({"id": "nowhere"}, "ModuleNotFoundError: environment 'nowhere' not found"),
        ({"agent": {"turns": 3}}, "ValidationError: .*agent.turns Extra inputs are not permitted"),
    ],
)
def test_what_cannot_be_trained_on_is_a_line_before_the_run(options, line):
    with pytest.raises(ValueError, match=rf"^verifiers: the environment tasksets cannot be loaded: {line}.*$"):
        environments.rows(ENV, json.dumps(options), "train")


def test_rows_are_tasks_and_those_of_evaluation_are_named():
    assert environments.rows(ENV, "", "train") == [{"split": "train", "index": n} for n in range(3)]
    with pytest.raises(ValueError, match="a taskset has no tasks for evaluation alone; say in --env-options"):
        environments.first(ENV, "", 2)
    options = {"eval": {"taskset": {"first": 7}}}
    assert environments.first(ENV, json.dumps(options), 2) == [{"split": "eval", "index": n} for n in range(2)]
    policy = Policy("10")
    [sample] = acted(ENV, policy, {"split": "eval", "index": 2}, **options)
    assert sample.reward == 2.0 and "What is 9 + 1?" in policy.heard[0]
    endless = environments.rows(ENV, '{"taskset": {"endless": true}}', "train")
    for _ in range(2):
        assert list(itertools.islice(endless, 5))[4] == {"split": "train", "index": 4}
    [sample] = acted(ENV, Policy("6"), {"split": "train", "index": 5}, taskset={"endless": True})
    assert sample.reward == 2.0


def test_a_run_trains_and_evaluates(tmp_path):
    settings = {**tiny.HF, "max_position_embeddings": 1024, "vocab_size": len(TOKENS)}
    shape = models.config_from_hf({**settings, "eos_token_id": TOKENS.eos_token_id})
    hf.save(tmp_path / "model", shape, tiny.weights(models.table(shape), 0.2), tokenizer=TOKENS)
    options = json.dumps({"eval": {"taskset": {"first": 7}}})
    with servers.embedded(tmp_path / "model", slots=8, context=1024) as remote:
        base = grpo.Config(str(tmp_path / "model"), "", "", env=ENV, env_options=options)
        config = replaced(
            base, out=str(tmp_path / "run"), groups=2, group_size=2, max_concurrent=4, length=1024, rows=2, eta=0,
            steps=2, servers=(remote.url,), sampling=Sampling(max_new_tokens=6), heldout=("env:2",),
            objective=GRPO(advantage={"std": "none"}), optim=Optimizer(lr=1e-3),
        )  # fmt: skip
        done = grpo.main(config)
    assert done["complete"] and done["heldout_rows"] == 2 and done["accuracy"] is not None


@pytest.mark.long
def test_a_killed_run_plays_each_task_once(tmp_path):
    killing.model(tmp_path / "model")
    assert killing.plays_each_task_once(ENV, {}, tmp_path, "tasksets")
