"""Agents against a gateway on a real socket with a scripted policy: rewards, failures, processes, online users."""

import asyncio
import json
import logging
import math
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest
from test_rollout_workflows_multi_turn import SAMPLING, TOKENS, learnt, policy

from areax.rollout import object_path
from areax.rollout.errors import ServerError
from areax.rollout.scheduling import episodes
from areax.rollout.workflows import agents, failures, regroup, resolve
from areax.rollout.workflows.resolve import bind

ROW = {"prompt": "2 + 2", "answer": "4"}


async def right(text, row, **_):
    return float(text == row["answer"])


async def chat(base_url, api_key, *said):
    """The ids and texts of the answers to successive user messages of one conversation."""
    messages, answers = [], []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as http:
        for text in said:
            messages.append({"role": "user", "content": text})
            body = {"model": "areax", "messages": messages}
            async with http.post(f"{base_url}/chat/completions", json=body) as reply:
                assert reply.status == 200, await reply.text()
                answer = await reply.json()
            messages.append(answer["choices"][0]["message"])
            answers.append((answer["id"], messages[-1]["content"]))
    return answers


def play(run, *texts, options=None, row=ROW):
    generate, _ = policy(*texts)

    async def main():
        how = dict(tokenizer=TOKENS, reward=right, sampling=SAMPLING, options=options or agents.Options())
        async with agents.played(agents.coroutine(run), "agent", **how) as workflow:
            return await workflow(generate, row)

    return asyncio.run(main())


@pytest.mark.parametrize(
    "result, wanted",
    [(lambda ids: 0.5, 0.5), (lambda ids: 1, 1.0), (lambda ids: {"a": 1, "b": 2.0}, 3.0),
     (lambda ids: {ids[0]: 1, ids[1]: 0.25}, 1.25), (lambda ids: None, 1.0), (lambda ids: math.nan, math.nan)],
    ids=["number", "integer", "components", "interactions", "nothing", "nan"],
)  # fmt: skip
def test_the_return_value_of_an_agent_is_its_reward(result, wanted):
    async def run(row, base_url, api_key):
        answers = await chat(base_url, api_key, row["prompt"], "sure?")
        return result([id for id, _ in answers])

    [sample] = play(run, "5", "4")
    assert sample.reward == pytest.approx(wanted, nan_ok=True)
    assert learnt(sample) == "5<|im_end|>4<|im_end|>" and sample.info["row"] == ROW
    one, two = play(run, "5", "4", options=agents.Options(rows="interactions", discount=0.5))
    if wanted == 1.25:
        assert (one.reward, two.reward) == (1 + 0.5 * 0.25, 0.25)


def test_an_agent_that_fails_or_times_out_is_unscorable(caplog):
    async def fails(row, base_url, api_key):
        await chat(base_url, api_key, "hello")
        raise KeyError("no such tool")

    async def hangs(row, base_url, api_key):
        await chat(base_url, api_key, "hello")
        await asyncio.sleep(60)

    with caplog.at_level(logging.WARNING):
        [sample] = play(fails, "x")
        [late] = play(hangs, "x", options=agents.Options(timeout_s=0.5))
    assert math.isnan(sample.reward) and math.isnan(late.reward)
    assert "agent agent failed: KeyError: 'no such tool'" in caplog.text and "TimeoutError" in caplog.text


def test_a_server_error_is_not_treated_as_a_failure_of_the_agent():
    """The executor must see the original error, not the SDK's exception."""

    async def generate(tokens, **_):
        raise ServerError("no usable generation server is left")

    async def run(row, base_url, api_key):
        await chat(base_url, api_key, "hello")

    async def main():
        async with agents.played(
            agents.coroutine(run), "mine", tokenizer=TOKENS, reward=right, sampling=SAMPLING
        ) as workflow:
            with pytest.raises(RuntimeError, match="no usable generation server"):
                await workflow(generate, ROW)

    asyncio.run(main())


def test_an_agent_may_be_a_plain_function():
    def run(row, base_url, api_key):
        asyncio.run(chat(base_url, api_key, row["prompt"]))
        return 0.5

    [sample] = play(agents.coroutine(run), "4")
    assert sample.reward == 0.5


def test_rewards_for_unknown_interactions_are_refused(caplog):
    async def run(row, base_url, api_key):
        [(id, _)] = await chat(base_url, api_key, "hello")
        return {id: 0.25, "other": 1.0}

    [sample] = play(run, "x")
    assert math.isnan(sample.reward) and "there is no interaction 'other'" in caplog.text


def test_an_agent_that_always_fails_ends_the_run():
    async def fails(row, base_url, api_key):
        raise OSError("not installed")

    async def main():
        async with agents.played(
            agents.coroutine(fails), "mine", tokenizer=TOKENS, reward=right, sampling=SAMPLING
        ) as workflow:
            for _ in range(failures.MOST - 1):
                assert await workflow(None, ROW) is None
            with pytest.raises(
                ValueError, match="agent mine: failed 16 times in a row; the last time: OSError: not inst"
            ):
                await workflow(None, ROW)

    asyncio.run(main())


PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "areax", "messages": [{"role": "user", "content": row["prompt"]}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
made = json.load(urllib.request.urlopen(request))
said = made["choices"][0]["message"]["content"]
print("the answer is", said)
print(17)
if said == "crash":
    sys.exit("no idea what to do")
if said != "4":
    print(json.dumps({"reward": 0.25, "looked": 3}))
"""


@pytest.mark.parametrize("said, wanted", [("4", 1.0), ("5", 0.25), ("crash", math.nan)])
def test_a_program_runs_as_an_agent_in_its_own_process(said, wanted, tmp_path, caplog):
    """Its last line is the result if it is a JSON object; otherwise the reward scores its last answer."""
    (tmp_path / "agent.py").write_text(PROGRAM)
    [sample] = play(agents.command(f"{sys.executable} {tmp_path}/agent.py"), said)
    assert sample.reward == pytest.approx(wanted, nan_ok=True) and learnt(sample) == f"{said}<|im_end|>"
    assert ("no idea what to do" in caplog.text) == (said == "crash")


@pytest.mark.parametrize(
    "says, wanted, words",
    [
        ("'{\"reward\": -1.0' + ' ' * 5000 + '}'", -1.0, ""),
        ("'{\"reward\": ' + '9' * 5000 + '}'", math.nan, "begins like its result, a JSON object"),
        ("'{\"reward\": 1'", math.nan, "begins like its result, a JSON object"),
        ("'x' * 2**21", math.nan, "must have less than 1048576 bytes"),
        ("json.dumps({'error': 503})", math.nan, "with a number \"reward\", got {'error': 503}"),
        ("json.dumps({'duration_ms': 5321, 'tokens': 12})", math.nan, "must answer with an object with a number"),
        ("json.dumps({'reward': None})", math.nan, "must answer with a number as the reward, got None"),
        ("json.dumps({'reward': '0.5'})", math.nan, "must answer with a number as the reward, got '0.5'"),
        ("json.dumps({'reward': True})", math.nan, "must answer with a number as the reward, got True"),
        ("json.dumps({'reward': math.nan})", math.nan, "must answer with a number as the reward, got nan"),
        ("json.dumps({made['id']: 0.5})", 0.5, ""),
        ("json.dumps({made['id']: {'error': 503}})", math.nan, "must answer with a number as the reward, got {'er"),
    ],
)
def test_a_program_s_last_line_is_its_result_or_an_error(says, wanted, words, tmp_path, caplog):
    (tmp_path / "agent.py").write_text(f"{PROGRAM}\nimport json, math\nprint({says})\n".replace("print(17)\n", ""))
    [sample] = play(agents.command(f"{sys.executable} {tmp_path}/agent.py"), "4")
    assert sample.reward == pytest.approx(wanted, nan_ok=True) and words in caplog.text


def test_a_program_sees_no_secret_unless_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")  # never the agent's
    see = "import json, os\nsees = [name in os.environ for name in ('MY_TOKEN', 'PATH', 'HOME')]\n"
    say = "print(json.dumps({'reward': 10.0 * sees[0] + float(all(sees[1:]))}))\n"
    (tmp_path / "agent.py").write_text(PROGRAM.replace("print(17)\n", "") + see + say)
    program = f"{sys.executable} {tmp_path}/agent.py"
    for names, wanted in ((), 1.0), (("MY_TOKEN", "OPENAI_API_KEY"), 11.0):
        [sample] = play(agents.command(program, names), "4")
        assert sample.reward == wanted
    with pytest.raises(ValueError, match="--agent.environment: must name variables that are set, got NO_TOKEN$"):
        agents.command(program, ["NO_TOKEN"])


@asynccontextmanager
async def served(generate, **options):
    """(workflow for online users, address that they connect to)."""
    said = []
    async with agents.online(
        tokenizer=TOKENS, sampling=SAMPLING, options=agents.Options(**options), say=said.append
    ) as workflow:
        yield workflow, said[0].split()[0]


def test_online_users_open_sessions_themselves(monkeypatch):
    monkeypatch.delenv("AREAX_ADMIN_KEY", raising=False)
    with pytest.raises(ValueError, match="set AREAX_ADMIN_KEY"):
        bound("online")
    monkeypatch.setenv("AREAX_ADMIN_KEY", "secret")
    generate, _ = policy("4", "no")

    async def main():
        async with served(generate) as (workflow, url), aiohttp.ClientSession() as http:

            async def post(path, body, key="secret"):
                headers = {"Authorization": f"Bearer {key}"}
                async with http.post(url + path, json=body, headers=headers) as reply:
                    return reply.status, await reply.json()

            status, answer = await post("/sessions", {})
            assert status == 503 and "try again" in json.dumps(answer)
            episodes = [asyncio.create_task(workflow(generate, ROW)) for _ in range(2)]
            await asyncio.sleep(0.05)
            samples = []
            for reward in (None, 0.5):
                status, session = await post("/sessions", {})
                assert status in (200, 201), session
                await chat(session["base_url"], session["api_key"], "2 + 2?")
                if reward is not None:
                    await post(f"/sessions/{session['id']}/reward", {"value": reward}, session["api_key"])
                headers = {"Authorization": f"Bearer {session['api_key']}"}
                async with http.delete(f"{url}/sessions/{session['id']}", headers=headers) as reply:
                    assert reply.status in (200, 204)
            for episode in episodes:
                samples += await episode
            return samples

    first, second = asyncio.run(main())
    assert math.isnan(first.reward) and second.reward == 0.5
    assert [learnt(first), learnt(second)] == ["4<|im_end|>", "no<|im_end|>"]


# -- names on the command line -------------------------------------------------------------------

WORKFLOWS = """
import asyncio

async def plain(generate, row, *, tokenizer, extra=0):
    return tokenizer, extra

class Agent:
    def __init__(self, times=1):
        self.times = times
    async def run(self, row, base_url):
        return self.times

class Shared(Agent):
    closed = []
    async def run(self, row, session_id, admin_key, **more):
        assert set(more) == {"base_url", "api_key"} and len(session_id) == 16 and admin_key not in more.values()
        return self.times
    async def aclose(self):
        Shared.closed.append(self.times)

class Hangs(Agent):
    async def aclose(self):
        await asyncio.sleep(600)

class Fails(Agent):
    def aclose(self):
        raise RuntimeError("already\\nclosed")

class Ignores(Agent):
    async def run(self, row, base_url):
        while True:
            try:
                await asyncio.sleep(1)
            except BaseException:
                pass

class Exits(Agent):
    async def run(self, row, base_url):
        raise SystemExit(3)

class Entered(Agent):
    open = []
    async def __aenter__(self):
        Entered.open.append(self)
        return self
    async def __aexit__(self, kind, error, place):
        Entered.open.remove(self)
    async def run(self, row, base_url):
        assert Entered.open == [self], "one object an episode, entered before it runs"
        raise RuntimeError("broken")

ready = Agent(3)

def nothing(x):
    return x

number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(WORKFLOWS)
    return path


def bound(name, agent=None, **options):
    async def main():
        how = dict(tokenizer=TOKENS, reward=right, sampling=SAMPLING, options=options, agent=agent)
        async with bind(name, **how) as workflow:
            return await workflow(None, ROW)

    return asyncio.run(main())


def test_a_workflow_gets_the_arguments_it_takes(file):
    assert bound(f"{file}:plain") == (TOKENS, 0) and bound(f"{file}:plain", extra=2) == (TOKENS, 2)


def test_agents_may_be_classes_or_objects(file):
    for name in ("Agent", "ready", "Shared"):
        assert bound(f"{file}:{name}") is None  # it made no requests
    assert object_path.load_object(f"{file}:Shared").closed == [1]  # at the end, if it can be


@pytest.mark.parametrize("name, words", [("Hangs", "must return within 0.2 s"), ("Fails", "already closed")])
def test_an_agent_that_cannot_be_closed_is_a_warning(file, monkeypatch, caplog, name, words):
    monkeypatch.setattr(resolve, "CLOSE_S", 0.2)
    assert bound(f"{file}:{name}") is None
    *_, line = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert words in line and name in line and "\n" not in line


def test_an_agent_that_ignores_its_time_limit_or_exits_is_named(file, monkeypatch, caplog):
    monkeypatch.setattr(agents, "CANCEL_S", 0.2)
    assert bound(f"{file}:Ignores", agent=agents.Options(timeout_s=0.2)) is None
    assert "did not end within --agent.timeout-s, 0.2 s, and ignores its cancellation" in caplog.text
    with pytest.raises(SystemExit):  # `episodes` names it
        bound(f"{file}:Exits")


COMPARING = """
import asyncio

calls = []

async def one(generate, row, *, tokenizer):
    from areax.rollout.types import sampled
    return sampled([1], await generate([1]), temperature=1.0, info={"row": row})

async def ranked(episodes):
    calls.append([[sample.reward for sample in samples] for samples in episodes])
    return [{"reward": float(n), "rank": float(n)} for n, _ in enumerate(episodes)]

one.regroup = ranked

async def two(generate, row, *, tokenizer):
    made = await one(generate, row, tokenizer=tokenizer)
    return [made, made.replace(seat=1)]

two.regroup = ranked

class Agent:
    async def run(self, row, base_url, api_key):
        import openai
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            asked = [{"role": "user", "content": row["prompt"]}]
            answer = await client.chat.completions.create(model="m", messages=asked)
            if answer.choices[0].message.content == "no":
                raise KeyError("no")
            return {"length": float(len(answer.choices[0].message.content))}

    def regroup(self, episodes):
        results = [samples[0].info["result"] for samples in episodes]
        best = max(result["length"] for result in results if result)
        return [result and float(result["length"] == best) for result in results]

class Kept(Agent):
    def regroup(self, episodes):
        return None

class Odd(Agent):
    def regroup(self, episodes):
        return [1.0]

class Slow(Agent):
    async def regroup(self, episodes):
        await asyncio.sleep(60)
"""


def compared(tmp_path, name, *texts, **agent):
    """The samples of a group of `texts`."""
    file = tmp_path / "comparing.py"
    file.write_text(COMPARING)
    generate, _ = policy(*texts)

    async def main():
        how = dict(tokenizer=TOKENS, reward=right, sampling=SAMPLING, agent=agents.Options(**agent))
        async with bind(f"{file}:{name}", **how) as workflow:
            of = regroup.of(workflow)
            [samples] = await episodes.rollouts(workflow, generate, [ROW], group_size=len(texts), regroup=of)
            return samples

    return asyncio.run(main())


def test_a_group_is_scored_once_it_is_complete(tmp_path):
    samples = compared(tmp_path, "Agent", "aa", "a", "aaa")
    assert [(s.rollout, s.reward, s.info["episode_reward"]) for s in samples] == [(0, 0, 0), (1, 0, 0), (2, 1, 1)]
    assert [s.components for s in samples] == [{"length": n} for n in (2.0, 1.0, 3.0)]
    assert [index for index, _ in samples[0].rewards] == [len(samples[0].tokens) - 1]
    assert [s.reward for s in compared(tmp_path, "Agent", "aa")] == [1.0]  # as in an evaluation
    assert [s.reward for s in compared(tmp_path, "Kept", "aa", "a")] == [2.0, 1.0]
    assert [s.components for s in compared(tmp_path, "one", "aa", "a")] == [{"rank": 0.0}, {"rank": 1.0}]


def test_an_episode_that_failed_is_seen_as_such_and_may_stay_unscorable(tmp_path):
    rewards = [s.reward for s in compared(tmp_path, "Agent", "aa", "no", "aaa")]
    assert rewards[::2] == [0.0, 1.0] and math.isnan(rewards[1])


@pytest.mark.parametrize(
    "name, why",
    [("Odd", "ValueError: must return a reward for each of 2 episodes, got 1"), ("Slow", "TimeoutError")],
)
def test_a_comparison_that_fails_costs_its_group(tmp_path, caplog, name, why):
    samples = compared(tmp_path, name, "aa", "a", timeout_s=0.5)
    assert all(math.isnan(s.reward) for s in samples) and len(samples) == 2
    [said] = caplog.messages
    assert f"regroup of {tmp_path}/comparing.py:{name} failed: {why}" in said and "row {'prompt': '2 + 2'" in said


def test_rewards_of_a_group_are_of_episodes_with_one_player(tmp_path, caplog):
    samples = compared(tmp_path, "two", "aa", "a")
    assert len(samples) == 4 and all(math.isnan(s.reward) for s in samples)
    assert "must be of episodes with one player" in caplog.text


def test_a_class_with_a_beginning_and_an_end_is_entered_and_left_for_each_episode(file, caplog):
    async def main():
        async with bind(f"{file}:Entered", tokenizer=TOKENS, reward=right, sampling=SAMPLING) as workflow:
            return [await workflow(None, ROW) for _ in range(2)]

    assert asyncio.run(main()) == [None, None] and caplog.text.count("Entered failed: RuntimeError: broken") == 2
    assert object_path.load_object(f"{file}:Entered").open == []


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("plain", {"more": 1}, "--workflow-options: .*plain takes .*extra.*, got more"),
        ("Agent", {"more": 1}, "takes times, got more"),
        ("ready", {"more": 1}, "takes nothing, got more"),
        ("nothing", {}, r"must be a function that takes `generate`.*got function\(x\)"),
        ("number", {}, "must be a function that takes `generate`"),
        ("plane", {}, "there is no 'plane' .* did you mean plain"),
    ],
)
def test_names_that_are_not_workflows_are_refused(file, name, options, message):
    with pytest.raises(ValueError, match=message):
        bound(f"{file}:{name}", **options)


def test_options_that_a_workflow_does_not_take_are_refused(file):
    async def main(name, **how):
        async with bind(name, tokenizer=TOKENS, reward=right, sampling=SAMPLING, **how):
            raise AssertionError("it was taken")

    for name, told in (("exec:a 'b", r"got \"a 'b\" \(no closing quotation\)"), ("exec: ", "a command, got nothing")):
        with pytest.raises(ValueError, match=told):
            resolve.check(name, {})
    with pytest.raises(ValueError, match="--workflow-options: exec:true takes nothing, got turns"):
        asyncio.run(main("exec:true", options={"turns": 1}))
    with pytest.raises(ValueError, match="which --workflow .*plain is not, got --agent.rows interactions"):
        asyncio.run(main(f"{file}:plain", agent=agents.Options(rows="interactions")))
    with pytest.raises(ValueError, match="--agent.environment: is for programs, --workflow exec:..., got .*:Agent"):
        asyncio.run(main(f"{file}:Agent", agent=agents.Options(environment=("PATH",))))
