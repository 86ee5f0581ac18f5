"""Servers of environments that are away, busy, or answer wrongly: no other reward, and no other token, comes of it."""

import asyncio
import contextlib
import json
import math
import socket

import pytest
from aiohttp import web
from fidelity import SAMPLING, Policy, exact
from gateways import TOKENS

from areax.adapters.environments import openreward, server
from areax.rollout.errors import ServerError
from areax.rollout.rewards.signatures import reported
from areax.rollout.workflows import environments

WORLD = "areax.adapters.environments.{}:World"
ASKED = {
    "input": "What is 1+1?",
    "tools": [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}],
}
ROW = {"responses_create_params": ASKED}
LOOK = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
DEEP = "[" * 100_000 + "]" * 100_000
J = web.json_response


@contextlib.asynccontextmanager
async def serving(answer, port=0):
    """The address of a server, whose answers are those of `answer(path)`."""

    async def handle(request):
        await request.read()
        made = answer(request.path.strip("/"))
        return await made(request) if callable(made) else made

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def episode(kind, url, policy, row=ROW, **options):
    how = dict(tokenizer=TOKENS, sampling=SAMPLING, world=WORLD.format(kind), name=f"{kind}:{url}")
    return await environments.play(policy, row, options={"name": url, **options}, **how)


def nemo(answers, *said, row=ROW):
    """The policy and the samples of an episode whose answers are the next of `answers` by path, the last for ever."""

    async def run():
        left = {path: list(of) for path, of in answers.items()}

        def answer(path):
            of = left.get(path) or [lambda: J({})]
            return (of.pop(0) if len(of) > 1 else of[0])()

        policy = Policy(*said or ["4"])
        async with serving(answer) as url:
            return policy, await episode("nemo_gym", url, policy, row, data="")

    return asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        {"error": 503}, {"status": 503, "detail": "overloaded"}, {"reward": None, "turns": 7}, {"reward": "1.0"}, {},
        {"reward": True}, {"reward": math.nan}, {"reward": math.inf}, {"reward": {"error": 503}}, [1], 1.0, None,
    ],
)  # fmt: skip
def test_only_a_number_called_reward_is_one(answer, caplog):
    _, [sample] = nemo({"verify": [lambda: J(answer)]})
    assert math.isnan(sample.reward)
    assert "step: ValueError: " in caplog.text and "row {'responses_create_params'" in caplog.text
    assert "/verify must answer with" in caplog.text or "a reward must be within" in caplog.text


def test_a_reward_of_the_row_is_not_the_servers():
    row = {**ROW, "reward": 0.0, "level": 9}
    _, [sample] = nemo({"verify": [lambda: J({**row, "reward": 1.0, "turns": 3})]}, row=row)
    assert sample.reward == 1.0 and sample.components == {"turns": 3.0}


@pytest.mark.parametrize("status", [408, 425, 429, 503])
def test_a_request_that_was_not_taken_is_made_again(status):
    """Its answer is no observation, and no end of the episode."""
    busy = lambda: web.Response(status=status, text="<html>busy</html>", headers={"Retry-After": "0.05"})
    seen, right = lambda: J("a tree"), lambda: J({"reward": 1.0})
    answers = {"seed_session": [busy, busy, lambda: J({})], "look": [busy, seen], "verify": [busy, right]}
    policy, samples = nemo(answers, LOOK, "4")
    assert exact(policy, samples) and sum(sample.reward for sample in samples) == 1.0
    assert "a tree" in policy.heard[1] and "busy" not in policy.heard[1]


def test_what_a_tool_raises_is_told_and_what_the_server_does_not_say_itself_is_not(caplog):
    own = lambda: J("KeyError('x')", status=500)
    policy, samples = nemo({"look": [own], "verify": [lambda: J({"reward": 1.0})]}, LOOK, "4")
    assert exact(policy, samples) and "KeyError('x')" in policy.heard[1]
    policy, [sample] = nemo({"look": [lambda: web.Response(status=500, text="Internal Server Error")]}, LOOK, "4")
    assert math.isnan(sample.reward) and len(policy.said) == 1 and "HTTP 500 of http://127.0.0.1:" in caplog.text


@pytest.mark.parametrize(
    "answer, line",
    [
        (lambda: web.Response(status=502, text="<html>"), "HTTP 502: <html>"),
        (lambda: web.Response(status=307, headers={"Location": "http://elsewhere"}), "HTTP 307: it redirects to"),
        (lambda: web.Response(body=b'{"reward": 1, "x": "\xff"}'), "the answer is not UTF-8 (invalid start byte at"),
        (lambda: web.Response(text='{"reward": 1, "x": ' + DEEP + "}"), "the answer is nested too deeply"),
        (lambda: web.Response(text="<html>"), "the answer must be JSON, got '<html>'"),
        (lambda: web.Response(body=bytes(2**20)), "the answer has more than 1000000 bytes"),
    ],
)
@pytest.mark.parametrize("path", ["seed_session", "verify"])
def test_answers_that_are_none_are_errors_of_the_server_and_the_episode_is_played_again(
    path, answer, line, monkeypatch
):
    monkeypatch.setattr(server, "LARGEST", 10**6)
    with pytest.raises(ServerError) as raised:
        nemo({path: [answer]})
    assert f"/{path}: {line}" in str(raised.value) and "environment nemo_gym:http://" in str(raised.value)
    assert "; row {'responses_create_params'" in str(raised.value)


def test_a_server_that_is_away_is_waited_for_at_the_beginning_and_no_longer_than_that(monkeypatch):
    monkeypatch.setattr(server, "AGAIN_S", 3.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, right = f"http://127.0.0.1:{port}", lambda path: J({"reward": 1.0})

    async def away():
        policy = Policy("4")
        playing = asyncio.create_task(episode("nemo_gym", url, policy, data=""))
        await asyncio.sleep(0.5)
        async with serving(right, port):
            return await playing

    [sample] = asyncio.run(away())
    assert sample.reward == 1.0
    monkeypatch.setattr(server, "AGAIN_S", 0.3)
    with pytest.raises(ServerError, match=rf"^environment nemo_gym:{url}: reset: {url}/seed_session: cannot connect"):
        asyncio.run(episode("nemo_gym", url, Policy("4"), data=""))


def test_a_server_that_goes_in_the_middle_ends_the_episode(monkeypatch):
    """Its sessions may be gone: what it would say after a restart is of another episode."""

    async def run():
        async with contextlib.AsyncExitStack() as stack:
            url = await stack.enter_async_context(serving(lambda path: J({})))

            class Leaves(Policy):
                async def __call__(self, prompt, **sampling):
                    await stack.aclose()
                    return await super().__call__(prompt, **sampling)

            await episode("nemo_gym", url, Leaves("4"), data="")

    with pytest.raises(ServerError, match="step: http://127.0.0.1:.*/verify: (cannot connect|connection broke)"):
        asyncio.run(run())


def observed(**data):
    return json.dumps({"type": "observation", "data": data})


BEGUN = observed(observation={"text": "hello"}, reward=None, done=False)


def openenv(*answers, redirected=False):
    async def talk(request):
        if redirected:
            return web.Response(status=302, headers={"Location": "/elsewhere"})
        left, talking = [BEGUN, *answers], web.WebSocketResponse()
        await talking.prepare(request)
        async for _ in talking:
            if not left:
                await talking.close()
                break
            await talking.send_str(left.pop(0))
        return talking

    schema = {"action": {"properties": {"text": {"type": "string"}}}}

    async def run():
        async with serving(lambda path: J(schema) if path == "schema" else talk) as url:
            return await episode("openenv", url, Policy("4"), {"seed": 1})

    return asyncio.run(run())


def test_an_openenv_episode_has_the_rewards_of_its_observations():
    ended = observed(observation={"text": "x"}, reward=0.5, done=True)
    [sample] = openenv(observed(observation={"text": "x"}, reward=None, done=False), ended)
    assert sample.reward == 0.5
    [sample] = openenv(observed(observation={"text": "x"}, reward=None, done=True))
    assert sample.reward == 0.0  # the protocol's null is no reward


@pytest.mark.parametrize(
    "answer",
    [
        json.dumps({"type": "pong", "data": {"observation": "", "reward": 1.0, "done": True}}),
        json.dumps({"type": "state", "data": {}}),
        json.dumps({"type": "observation"}),
        observed(observation={"error": "upstream 503"}, done=True),
        observed(observation={"text": "x"}, reward="1", done=True),
        observed(observation={"text": "x"}, reward=True, done=True),
        observed(observation={"text": "x"}, reward=1.0, done="no"),
        observed(reward=1.0, done=True),
        "[1]",
    ],
)
def test_messages_that_openenv_does_not_have_make_the_episode_unscorable(answer, caplog):
    [sample] = openenv(answer)
    assert math.isnan(sample.reward) and "step: ValueError: http://127.0.0.1" in caplog.text
    assert "row {'seed': 1}" in caplog.text


@pytest.mark.parametrize("answer, line", [('{"a": ' + DEEP + "}", "nested too deeply"), ("<html>", "must be JSON")])
def test_messages_that_are_none_are_errors_of_the_server(answer, line):
    with pytest.raises(ServerError, match=f"step: http://.*/ws: the answer .*{line}"):
        openenv(answer)
    with pytest.raises(ServerError, match="step: http://127.0.0.1:.* must answer, and closed the connection instead"):
        openenv()


def test_a_websocket_follows_no_redirect():
    with pytest.raises(ServerError, match="reset: http://127.0.0.1:.*/ws: it redirects, which is not followed"):
        openenv(redirected=True)


def event(kind, data):
    return web.Response(text=f"event: {kind}\ndata: {data}\n\n", content_type="text/event-stream")


def rewarded(called):
    """The samples of an episode of OpenReward in which the only call has this answer."""
    answers = {
        "create_session": lambda: event("task_id", "s"), "create": lambda: J({}), "v/call": called,
        "v/task_tools": lambda: J({"tools": [{"name": "look", "description": "d"}]}),
        "v/messages": lambda: J([{"role": "user", "blocks": [{"type": "text", "text": "hi"}]}]),
    }  # fmt: skip

    async def run():
        async with serving(lambda path: answers.get(path, lambda: J({}))()) as url:
            return await episode("openreward", url, Policy(LOOK), {"variant": "v", "split": "train", "index": 0})

    return asyncio.run(run())


def ended(**output):
    result = {"ok": True, "output": {"blocks": [{"type": "text", "text": "x"}], "finished": True, **output}}
    return lambda: event("end", json.dumps(result))


def test_a_call_of_openreward_has_its_reward():
    assert [sample.reward for sample in rewarded(ended(reward=0.5))] == [0.5]
    assert [sample.reward for sample in rewarded(ended(reward=None))] == [0.0]  # the protocol's null is no reward


@pytest.mark.parametrize(
    "called",
    [
        ended(), ended(reward="1"), ended(reward=True), ended(reward=math.nan), ended(reward=1.0, finished="no"),
        ended(reward=1.0, blocks=None), lambda: event("end", '{"ok": "no", "output": {"blocks": [], "reward": 1}}'),
        lambda: event("end", '{"ok": false, "error": {"status": 503}}'), lambda: event("end", "[]"),
    ],
)  # fmt: skip
def test_answers_that_openreward_does_not_have_make_the_episode_unscorable(called, caplog):
    [sample] = rewarded(called)
    assert math.isnan(sample.reward) and "step: ValueError: http://127.0.0.1" in caplog.text


def test_events_that_are_cut_off_or_too_many_are_errors_of_the_server(monkeypatch):
    with pytest.raises(ServerError, match="step: http://.*/v/call: the answer must be JSON, got '{\"ok\": t'"):
        rewarded(lambda: event("end", '{"ok": t'))
    monkeypatch.setattr(server, "LARGEST", 10**6)
    with pytest.raises(ServerError, match="step: http://.*/v/call: the answer has more than 1000000 bytes"):
        rewarded(lambda: event("chunk", "x" * 2**20))


@pytest.mark.parametrize("count", [True, 2.5, -3, 10**7, "8", None])
def test_a_count_of_tasks_that_is_none_is_refused(count):
    async def run():
        async with serving(lambda path: J({"num_tasks": count})) as url:
            return await asyncio.to_thread(openreward.World.rows, "train", url, variant="v")

    with pytest.raises(ValueError, match=r"^openreward: http://.*: no tasks of the split train: num_tasks must be"):
        asyncio.run(run())


@pytest.mark.parametrize(
    "answer, line",
    [
        (lambda: web.Response(status=302, headers={"Location": "/v/other"}), "HTTP 302: it redirects"),
        (lambda: web.Response(body=bytes(2**20)), "the answer has more than 1000000 bytes"),
        (lambda: web.Response(text=DEEP), "the answer is nested too deeply"),
    ],
)
def test_rows_follow_no_redirect_and_read_no_more_than_they_may(answer, line, monkeypatch):
    monkeypatch.setattr(server, "LARGEST", 10**6)

    async def run():
        answers = {"v/num_tasks": answer, "v/other": lambda: J({"num_tasks": 3})}
        async with serving(lambda path: answers[path]()) as url:
            return await asyncio.to_thread(openreward.World.rows, "train", url, variant="v")

    with pytest.raises(
        ValueError, match=rf"^openreward: http://.*: no tasks of the split train: http:.*num_tasks: {line}"
    ):
        asyncio.run(run())


def test_numbers_beside_the_reward_that_are_no_parts_are_left_out_and_a_wrong_reward_names_who_gave_it():
    said = {"reward": 1.0, "created_at_ns": 1764465600000000000, "turns": 3, "late": math.inf}
    assert reported(said, "http://a/verify") == {"turns": 3.0, "reward": 1.0}
    for wrong in ({"reward": 1e30}, {"reward": 10**400}, {"reward": 1.0, **{str(i): 1 for i in range(10**4)}}):
        with pytest.raises(ValueError, match="^http://a/verify"):
            reported(wrong, "http://a/verify")
