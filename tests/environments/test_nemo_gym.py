"""Resources servers of nemo-gym on loopback ports: tools with state, verifiers, rows of the package."""

import asyncio
import json
import math
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest
import serving
from fidelity import Policy, exact
from playing import call, play, played

from areax.adapters.environments import server
from areax.adapters.environments.nemo_gym import World, _conversation
from areax.recipes.shared import environments
from areax.rollout.errors import ServerError

PLACE = Path(str(metadata.distribution("nemo-gym").locate_file("resources_servers")))
COUNT, PUZZLES = (PLACE / name / "data" / "example.jsonl" for name in ("example_session_state_mgmt", "reasoning_gym"))


@contextmanager
def served(name):
    with serving.served("nemo_server.py", name) as address:
        yield f"nemo_gym:{address}"


@pytest.fixture(scope="module")
def counter():
    with served("example_session_state_mgmt") as env:
        yield env


@pytest.fixture(scope="module")
def puzzles():
    with served("reasoning_gym") as env:
        yield env


def rows(env, file, **options):
    return environments.rows(env, json.dumps({"data": str(file), **options}), "train")


def counted(row):
    """What a policy says that counts as it is asked."""
    asked = row["responses_create_params"]["input"][0]["content"]
    numbers = [int(word) for word in asked.split() if word.isdecimal()]
    return [*(call("increment_counter", count=n) for n in numbers), call("get_counter_value"), "Done."]


def test_tools_of_a_session_count(counter):
    own = {"data": str(COUNT)}
    for row in rows(counter, COUNT):
        policy = Policy(*counted(row))
        samples = played(counter, policy, row, own=own)
        assert exact(policy, samples) and samples[-1].reward == 1.0
        assert '"name": "increment_counter"' in policy.heard[0] and '{"success":true}' in policy.heard[1]
        assert policy.heard[-1].rpartition("tool\n")[2].startswith(f'{{"count":{row["expected_count"]}}}')


def test_many_sessions_at_once(counter):
    given = rows(counter, COUNT)

    async def together():
        policies = [Policy(*counted(given[n % len(given)])) for n in range(24)]
        policies[7] = Policy("Done.")
        made = await asyncio.gather(
            *(play(counter, one, given[n % len(given)], own={"data": ""}) for n, one in enumerate(policies))
        )
        return policies, made

    policies, made = asyncio.run(together())
    for n, (one, samples) in enumerate(zip(policies, made, strict=True)):
        assert exact(one, samples) and samples[-1].reward == float(n != 7)
        assert one.heard == policies[n % len(given)].heard or n == 7


@pytest.mark.parametrize(
    "text, said",
    [
        (call("increment_counter", count="x"), '"type":"int_parsing"'),
        (call("increment_counter"), '"type":"missing"'),
        (call("verify"), "error: must be a call of a tool, got 'verify'"),
        (call("../verify"), "error: must be a call of a tool"),
    ],
)
def test_a_mistake_is_told_as_the_server_does(counter, text, said):
    row = rows(counter, COUNT)[0]
    policy = Policy(text, *counted(row))
    samples = played(counter, policy, row, own={"data": ""})
    assert exact(policy, samples) and samples[-1].reward == 1.0 and said in policy.heard[1]


@pytest.mark.parametrize("turns, reward", [(2, 1.0), (1, 0.0)])
def test_an_episode_that_is_ended_is_verified(counter, turns, reward):
    row = rows(counter, COUNT)[0]
    policy = Policy(*counted(row))
    samples = played(counter, policy, row, own={"data": ""}, turns=turns)
    assert exact(policy, samples) and len(policy.said) == turns and samples[-1].reward == reward


def test_one_call_at_a_time_is_kept_to(counter):
    row = rows(counter, COUNT)[0]
    row = row | {"responses_create_params": row["responses_create_params"] | {"parallel_tool_calls": False}}
    one, two, *rest = counted(row)
    policy = Policy(f"{one}\n{two}", two, *rest)
    samples = played(counter, policy, row, own={"data": ""})
    assert exact(policy, samples) and samples[-1].reward == 1.0
    assert policy.heard[1].rpartition("tool\n")[2].startswith("error: only one call at a time")


def test_answers_are_verified_and_other_numbers_are_curves(puzzles):
    for row in rows(puzzles, PUZZLES):
        for answer, score in ((row["answer"], 1.0), ("", None), ("no\u00e9", None)):
            policy = Policy(f"<answer>{answer}</answer>")
            [sample] = samples = played(puzzles, policy, row, own={"data": ""})
            assert exact(policy, samples) and sample.components == {"score": sample.reward}
            assert sample.reward == score or score is None and 0 <= sample.reward < 1


def test_a_row_that_the_server_does_not_take_is_a_line(counter, puzzles):
    row = rows(puzzles, PUZZLES)[0]
    with pytest.raises(ServerError, match="cannot begin: reset: RuntimeError: http://.*/seed_session: 422: .*missing"):
        played(counter, Policy("x"), row, own={"data": ""})
    row = {name: value for name, value in row.items() if name != "metadata"}
    [sample] = played(puzzles, Policy("x"), row, own={"data": ""})
    assert math.isnan(sample.reward)


def test_no_server_is_a_line(monkeypatch):
    monkeypatch.setattr(server, "AGAIN_S", 0.0)
    line = "^environment nemo_gym:http://127.0.0.1:1: reset: http://127.0.0.1:1/seed_session: cannot connect"
    with pytest.raises(ServerError, match=line):
        played("nemo_gym:http://127.0.0.1:1", Policy("x"), rows("nemo_gym:x", COUNT)[0], own={"data": ""})


def test_rows_for_evaluation_are_of_another_file():
    options = json.dumps({"data": str(COUNT), "heldout": str(PUZZLES)})
    assert environments.first("nemo_gym:x", options, 1)[0]["metadata"]["source_dataset"] == "knights_knaves"
    with pytest.raises(ValueError, match='^nemo_gym: rows for eval need "heldout" in --env-options, a file, got'):
        environments.first("nemo_gym:x", json.dumps({"data": str(COUNT)}), 1)


@pytest.mark.parametrize(
    "asked, line",
    [
        (None, "must have responses_create_params with an input"),
        ({"input": []}, "must have responses_create_params with an input"),
        (
            {"input": "x", "reasoning": {"effort": "high"}},
            r"reasoning = .* is not supported; to drop it, set the option ignore",
        ),
        ({"input": [{"content": "x"}]}, r"input must be items of OpenAI's Responses \(KeyError: 'role'\)"),
        ({"input": [{"role": "user", "content": None}]}, "input must be items of OpenAI's Responses .TypeError"),
        ({"input": ["x"]}, "input must be items of OpenAI's Responses .AttributeError"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice = 'required' is not supported"),
        ({"input": [{"type": "reasoning"}]}, "input must be messages, calls and their outputs, got reasoning"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input must be texts, got input_image"),
    ],
)
def test_rows_that_cannot_be_played_are_named(tmp_path, asked, line):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"responses_create_params": asked}) + "\n")
    with pytest.raises(ValueError, match=rf"^nemo_gym: .*rows.jsonl:1: {line}"):
        rows("nemo_gym:x", file)
    if "ignore" in line:
        assert len(rows("nemo_gym:x", file, ignore=["reasoning"])) == 1


def test_conversations_of_responses_become_chats():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [
        {"role": "user", "content": parts}, {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ]  # fmt: skip
    said = _conversation({"responses_create_params": {"input": items, "instructions": "Be brief."}}, ())
    assert [message["role"] for message in said] == ["system", "user", "assistant", "tool"]
    assert said[1]["content"] == "ab" and [one["id"] for one in said[2]["tool_calls"]] == ["1", "2"]
    assert said[3] == {"role": "tool", "tool_call_id": "1", "content": "x"}


def test_reasoning_is_verified_as_reasoning(puzzles):
    row = rows(puzzles, PUZZLES)[0]

    async def scored(message):
        world = World(puzzles.removeprefix("nemo_gym:"), "")
        try:
            await world.reset(row)
            return await world.step(message)
        finally:
            await world.close()

    said = {"content": f"<answer>{row['answer']}</answer>", "reasoning_content": "<answer>hm</answer>"}
    assert asyncio.run(scored(said)) == ("", {"reward": 1.0, "score": 1.0}, True)


def test_numbers_of_the_row_are_no_curves(counter, monkeypatch):
    """Servers may answer with the whole request."""
    row = rows(counter, COUNT)[0]

    async def answer(own, method, path, data, **how):
        return {**row, "reward": 0.5, "right": True, "words": "x"}

    monkeypatch.setattr(server.Server, "json", answer)
    [sample] = played(counter, Policy("Done."), row, own={"data": ""})
    assert isinstance(row["expected_count"], int) and sample.reward == 0.5 and sample.components == {"right": 1.0}


def test_an_option_that_is_none_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'dat'"):
        World("http://x", dat="rows.jsonl")
