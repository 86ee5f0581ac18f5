"""Environments of verifiers up to 0.3 play with their tools, rubrics and failures, and are trained on."""

import json
import math
import signal
import time

import pytest
import servers
import tiny
from fidelity import Policy, exact
from gateways import TOKENS
from playing import acted, call

from areax import models
from areax.adapters import hf
from areax.adapters.command_line.options import replaced
from areax.adapters.environments import verifiers
from areax.core.losses import GRPO
from areax.core.optim import Optimizer
from areax.recipes import grpo
from areax.recipes.shared import environments
from areax.rollout.types import Sampling

pytest.importorskip("verifiers.legacy", reason="verifiers 0.4")
ENV, ROW = "verifiers:rubrics", {"split": "train", "index": 2}


def test_an_answer_is_worth_what_the_rubric_says():
    for text, reward in (("3", 1.0), ("4", 0.0)):
        policy = Policy(text)
        [sample] = samples = acted(ENV, policy, ROW)
        assert exact(policy, samples) and sample.reward == reward
        assert sample.components == {"right": reward, "length": 1.0, "num_turns": 1.0}
    assert "Answer with a number." in policy.heard[0] and "What is 2 + 1?" in policy.heard[0]


def test_tools_are_called_over_several_turns_and_their_errors_told():
    policy = Policy(call("add", a=1, b=2), call("lookup", name="x"), call("add", a=1), call("sing"), "3")
    samples = acted(ENV, policy, ROW, kind="tools")
    assert exact(policy, samples) and {sample.reward for sample in samples} == {1.0} and len(policy.said) == 5
    assert samples[0].components["add_calls"] == 2.0
    assert policy.heard[1].rpartition("tool\n")[2].startswith("3<|im_end|>") and "KeyError" not in policy.heard[1]
    assert "'x'" in policy.heard[2].rpartition("tool\n")[2]


def test_an_environment_may_answer():
    policy = Policy("1", "2", "7", "8")
    samples = acted(ENV, policy, ROW, kind="turns")
    assert exact(policy, samples) and len(policy.said) == 3 and "No, not 2." in policy.heard[2]


@pytest.mark.parametrize("kind", ["single", "tools", "turns"])
def test_an_empty_answer_is_the_policys_and_not_unscorable(kind):
    policy = Policy("")
    [sample] = samples = acted(ENV, policy, ROW, kind=kind)
    assert exact(policy, samples) and sample.reward == 0.0 and sample.components["num_turns"] == 0.0


def test_a_prompt_that_has_become_too_long_ends_an_episode():
    class Short(Policy):
        async def __call__(self, prompt, **sampling):
            if len(self.said) == 2:
                raise ValueError("the prompt is longer than the model's context length")
            return await super().__call__(prompt, **sampling)

    policy = Short("1", "3")
    samples = acted(ENV, policy, ROW, kind="turns")
    assert exact(policy, samples) and {sample.reward for sample in samples} == {1.0} and len(policy.said) == 2


def test_groups_are_scored_by_rubrics_that_compare_them():
    policy = Policy("1", "222", "3", "")
    samples = acted(ENV, policy, ROW, size=4, kind="group")
    said = {"1": 0.0, "222": 1.0, "3": 0.5, "": 0.0}
    assert exact(policy, samples) and len(samples) == 4
    assert sorted(sample.reward for sample in samples) == sorted(said.values())
    for sample in samples:
        assert sample.reward == said[sample.info["text"].removesuffix("<|im_end|>")]
    assert [sample.reward for sample in acted(ENV, Policy("3"), ROW, kind="group")] == [1.5]  # as in an evaluation


def test_a_reward_that_raises_is_0_and_said(caplog, capfd):
    """As verifiers has it."""
    [sample] = acted(ENV, Policy("3"), ROW, kind="judge")
    assert sample.reward == 0.0
    assert "Error calling reward function broken: the judge is away" in caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "kind, options, line",
    [
        ("broken", {}, "Agent failed: RuntimeError: no such machine; row {'split': 'train', 'index': 2}"),
        ("exits", {}, "Agent failed: RuntimeError: the environment exited (3); row"),
        ("slow", {"timeout_s": 0.5}, "Agent failed: TimeoutError"),
    ],
)
def test_an_environment_that_raises_or_hangs_costs_its_episode(kind, options, line, caplog):
    assert acted(ENV, Policy("3"), ROW, kind=kind, **options) == [] and line in caplog.text


def test_a_tool_that_blocks_does_not_block_the_run(caplog, monkeypatch):
    """It holds up other episodes of verifiers, but neither the gateway nor the time limit, nor the end of the run."""
    monkeypatch.setattr(verifiers, "CLOSING_S", 0.5)
    begun, policy = time.monotonic(), Policy(call("hang", seconds=6), "3")
    [sample] = samples = acted(ENV, policy, ROW, kind="tools", timeout_s=1)
    assert exact(policy, samples) and math.isnan(sample.reward) and "TimeoutError" in caplog.text
    assert time.monotonic() - begun < 5


def test_a_request_that_fails_is_not_repeated(caplog):
    """The client's own attempts would be turns of the same episode."""

    class Broken(Policy):
        async def __call__(self, prompt, **sampling):
            self.said.append(prompt)
            raise RuntimeError("the server is gone")

    policy = Broken("3")
    assert acted(ENV, policy, ROW) == [] and len(policy.said) == 1
    assert "InternalServerError: Error code: 500" in caplog.text


def test_an_episode_that_failed_is_not_compared(caplog):
    """Its second request is refused."""

    class Refused(Policy):
        async def __call__(self, prompt, **sampling):
            if "No, not 22." in TOKENS.decode(prompt):
                raise ValueError("no")
            return await super().__call__(prompt, **sampling)

    policy = Refused(say=lambda prompt, turn: ["22", "7", "7"][turn % 3])
    samples = acted(ENV, policy, ROW, size=3, kind="contest")
    rewards = sorted((sample.reward for sample in samples), key=math.isnan)
    assert exact(policy, samples) and rewards[:2] == [1.0, 1.0] and math.isnan(rewards[2])
    assert "BadRequestError: Error code: 400" in caplog.text


def test_rows_are_those_of_its_data_sets():
    assert environments.rows(ENV, "", "train") == [{"split": "train", "index": n} for n in range(6)]
    assert environments.first(ENV, "", 9) == [{"split": "eval", "index": n} for n in range(2)]
    policy = Policy("5")
    [sample] = acted(ENV, policy, {"split": "eval", "index": 0})
    assert sample.reward == 1.0 and "What is 4 + 1?" in policy.heard[0]


@pytest.mark.parametrize(
    "name, options, line",
    [
        ("nowhere", {}, "ValueError: Could not import 'nowhere' environment. Ensure the package .* is installed."),
        ("serving", {}, "RuntimeError: .*does not expose load_environment."),
        ("rubrics", {"kind": "tools", "tools": []}, "RuntimeError: .*multiple values for .*'tools'"),
    ],
)
def test_what_cannot_be_loaded_is_a_line(name, options, line):
    with pytest.raises(ValueError, match=rf"^verifiers: the environment {name} cannot be loaded: {line}.*$"):
        environments.rows(f"verifiers:{name}", json.dumps(options), "train")


def test_signals_stay_the_runs():
    before = [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)]
    environments.rows(ENV, '{"kind": "turns"}', "train")
    assert [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_run_trains_evaluates_and_goes_on(tmp_path):
    """Stopped after a step and run again it makes the same weights."""
    settings = {**tiny.HF, "max_position_embeddings": 256, "vocab_size": len(TOKENS)}
    shape = models.config_from_hf({**settings, "eos_token_id": TOKENS.eos_token_id})
    hf.save(tmp_path / "model", shape, tiny.weights(models.table(shape), 0.2), tokenizer=TOKENS)
    with servers.embedded(tmp_path / "model", slots=8, context=256) as remote:
        base = grpo.Config(str(tmp_path / "model"), "", "", env=ENV, env_options='{"kind": "group"}')
        config = replaced(
            base, out=str(tmp_path / "run"), groups=2, group_size=2, max_concurrent=4, length=256, rows=2, eta=0,
            steps=2, servers=(remote.url,), sampling=Sampling(max_new_tokens=6), heldout=("env:2",), save_every=1,
            objective=GRPO(advantage={"std": "none"}), optim=Optimizer(lr=1e-3),
        )  # fmt: skip
        done = grpo.main(config)
        assert done["complete"] and done["heldout_rows"] == 2 and done["accuracy"] >= 1  # alone, each is the longest
        tiny.cut_off(tmp_path / "run", tmp_path / "again", 1)
        assert grpo.main(replaced(config, out=str(tmp_path / "again")))["complete"]
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("run", "again")]
    assert weights[0] == weights[1]
