"""Real servers on loopback ports: texts, tools and forms, a full server, and an environment that breaks."""

import asyncio
import math
from contextlib import contextmanager

import pytest
import serving
from fidelity import Policy, exact
from playing import call, play, played

from areax.adapters.environments import server
from areax.rollout.errors import ServerError
from areax.rollout.scheduling import episodes


@contextmanager
def served(kind, capacity=64):
    """The `--env` of a server."""
    with serving.served("server.py", kind, last=[str(capacity)]) as address:
        yield f"openenv:{address}"


@pytest.fixture(scope="module")
def text():
    with served("text") as env:
        yield env


def test_texts_are_actions_with_rewards(text):
    policy = Policy("ab", "abcd")
    [sample] = samples = played(text, policy, {"seed": 3})
    assert exact(policy, samples) and [value for _, value in sample.rewards] == pytest.approx([0.2, 0.4])
    assert '{"heard": "ab", "length": 2}' in policy.heard[1]


def test_many_sessions_at_once(text):
    """Sessions do not mix, and equal seeds are equal tasks."""

    async def together():
        policies = [Policy(f"me {i}", "bye") for i in range(32)]
        made = await asyncio.gather(*(play(text, own, {"seed": i % 4}) for i, own in enumerate(policies)))
        return policies, made

    policies, made = asyncio.run(together())
    for i, (own, samples) in enumerate(zip(policies, made, strict=True)):
        assert exact(own, samples) and f'"me {i}"' in own.heard[1]
        assert own.heard[0] == policies[i % 4].heard[0] and ("secret" in own.heard[0])
    assert len({own.heard[0] for own in policies}) == 4


def test_an_environment_that_breaks_costs_its_episode(text, caplog):
    policy = Policy("ok", "break")
    samples = played(text, policy, {"seed": 0})
    assert exact(policy, samples) and all(math.isnan(sample.reward) for sample in samples)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        f"environment {text} failed: step: RuntimeError: {text[8:]}: the echo is gone (EXECUTION_ERR"
    )


def test_a_server_with_room_for_one_is_waited_for(caplog):
    """A second session is refused, and tried again as a failing server is; the line says what to do."""
    with served("text", capacity=1) as env:

        async def slow(tokens, **sampling):
            await asyncio.sleep(0.2)
            return await policy(tokens)

        policy = Policy("ab")
        workflow = lambda generate, row: play(env, generate, row)
        both = asyncio.run(episodes.group(workflow, slow, {"seed": 1}, prompt=0, size=2, seed=None))
        assert [sample.reward for sample in both] == pytest.approx([0.4, 0.4])
        assert "(CAPACITY_REACHED); start it with a max_concurrent_envs of at least the episodes" in caplog.text
        assert "cannot begin: reset: RuntimeError" in caplog.text


def test_no_server_is_a_line(monkeypatch):
    monkeypatch.setattr(server, "AGAIN_S", 0.0)
    line = "^environment openenv:http://127.0.0.1:1: reset: http://127.0.0.1:1/schema: cannot connect"
    with pytest.raises(ServerError, match=line):
        played("openenv:http://127.0.0.1:1", Policy("x"), {"seed": 0})


def test_tools_of_mcp_are_tools():
    with served("tools") as env:
        policy = Policy(call("add", a=2, b=3), call("sub", a=2), call("add", a="x"), "5")
        samples = played(env, policy, {"seed": 0})
    assert exact(policy, samples) and {sample.reward for sample in samples} == {0.0}
    assert '"name": "add"' in policy.heard[0] and "Adds two numbers." in policy.heard[0]
    assert (
        policy.heard[1].rpartition("tool\n")[2].startswith("5<|im_end|>")
        and "error: must be a call of a tool" in policy.heard[2]
    )
    assert "error" in policy.heard[3].rpartition("tool\n")[2].lower()


def test_other_actions_are_a_tool():
    with served("form") as env:
        policy = Policy(call("step", steps=12), call("step", steps=7), call("step", steps=2, left=True))
        samples = played(env, policy, {"seed": 0})
    assert exact(policy, samples) and {sample.reward for sample in samples} == {1.0}
    assert "Moves by some steps." in policy.heard[0] and '"maximum": 9' in policy.heard[0]
    assert "error: " in policy.heard[1] and "less_than_equal" in policy.heard[1]
    assert policy.heard[2].rpartition("tool\n")[2].startswith("7<|im_end|>")
