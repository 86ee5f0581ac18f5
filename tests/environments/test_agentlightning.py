"""Agents of agent-lightning play as they are, with the rewards that they return or emit, and are trained."""

import json
import os

import pytest
import servers
import tiny
from fidelity import Policy, exact
from gateways import TOKENS
from playing import acted

from areax import models
from areax.adapters import hf
from areax.adapters.command_line.options import replaced
from areax.adapters.environments.agentlightning import Agent
from areax.core.losses import GRPO
from areax.core.optim import Optimizer
from areax.recipes import grpo
from areax.recipes.shared import environments
from areax.rollout.types import Sampling

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import asks the network
pytest.importorskip("agentlightning", reason="it has an environment of its own")
ROW = {"a": 2, "b": 1}


@pytest.mark.parametrize("name, reward", [("adder", 1.0), ("Spans", 1.0)])
def test_an_answer_is_worth_what_the_agent_returns(name, reward):
    for text, worth in (("3", reward), ("4", 0.0), ("", 0.0)):
        policy = Policy(text)
        [sample] = samples = acted(f"agentlightning:lightning:{name}", policy, ROW)
        assert exact(policy, samples) and sample.reward == worth and sample.components == {}
    assert "What is 2 + 1?" in policy.heard[0]


def test_options_are_those_of_the_class():
    [sample] = acted("agentlightning:lightning:Spans", Policy("3"), ROW, bonus=0.5)
    assert sample.reward == 1.5


def test_the_last_reward_that_is_emitted_counts_and_its_dimensions_are_curves():
    policy = Policy("1234", "3")
    samples = acted("agentlightning:lightning:emitter", policy, ROW)
    assert exact(policy, samples) and {sample.reward for sample in samples} == {1.0} and len(policy.said) == 2
    assert samples[0].components == {"short": 1.0} and "Sure, train?" in policy.heard[1]


@pytest.mark.parametrize("name", ["adder", "emitter"])
def test_episodes_of_a_group_have_their_own_rewards(name):
    policy = Policy(say=lambda prompt, turn: str(turn % 4))
    samples = acted(f"agentlightning:lightning:{name}", policy, ROW, size=8)
    assert exact(policy, samples) and len(policy.said) == (8 if name == "adder" else 16)
    for sample in samples:
        last = sample.info["text"].removesuffix("<|im_end|>").rpartition("\n")[2].strip()
        assert sample.reward == float(last == "3")


@pytest.mark.parametrize(
    "name, line",
    [
        ("broken", "Agent failed: KeyError: 'no such machine'; row {'a': 2, 'b': 1}"),
        ("silent", "ValueError: must return a reward, or call emit_reward, got None"),
        ("prompted", "ValueError: No prompt template resource found"),
    ],
)
def test_an_agent_that_fails_costs_its_episode(name, line, caplog):
    assert all(sample.reward != sample.reward for sample in acted(f"agentlightning:lightning:{name}", Policy("3"), ROW))
    assert line in caplog.text


@pytest.mark.parametrize(
    "name, options, line",
    [
        ("lightning:plain", {}, "agentlightning: lightning:plain must be a LitAgent, or a .*, got function"),
        ("lightning:adder", {"bonus": 1}, "agentlightning: only a class takes options, got bonus for lightning:adder"),
        ("lightning:nobody", {}, "lightning:nobody: there is no 'nobody' in lightning; "),
    ],
)
def test_what_is_no_agent_is_a_line(name, options, line):
    with pytest.raises(ValueError, match=f"^{line}"):
        Agent(name, **options)


def test_tasks_are_rows_of_a_file():
    with pytest.raises(ValueError, match="^agentlightning: tasks of lightning:adder are rows of a file; give one as"):
        environments.rows("agentlightning:lightning:adder", "", "train")


def test_a_run_trains_and_evaluates(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"a": n, "b": 1}) + "\n" for n in range(8)))
    settings = {**tiny.HF, "max_position_embeddings": 256, "vocab_size": len(TOKENS)}
    shape = models.config_from_hf({**settings, "eos_token_id": TOKENS.eos_token_id})
    hf.save(tmp_path / "model", shape, tiny.weights(models.table(shape), 0.2), tokenizer=TOKENS)
    with servers.embedded(tmp_path / "model", slots=8, context=256) as remote:
        base = grpo.Config(str(tmp_path / "model"), str(tmp_path / "rows.jsonl"), "")
        config = replaced(
            base, env="agentlightning:lightning:emitter", out=str(tmp_path / "run"), groups=2, group_size=2,
            max_concurrent=4, length=256, rows=2, eta=0, steps=2, servers=(remote.url,),
            sampling=Sampling(max_new_tokens=6), heldout=(str(tmp_path / "rows.jsonl"),),
            objective=GRPO(advantage={"std": "none"}), optim=Optimizer(lr=1e-3),
        )  # fmt: skip
        done = grpo.main(config)
    assert done["complete"] and done["heldout_rows"] == 8
