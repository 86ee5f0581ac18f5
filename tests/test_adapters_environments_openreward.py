"""The adapter beside what the server of openreward 0.1.167 said of an environment with two tools."""

import asyncio
import contextlib
import json
import math
from pathlib import Path

import pytest
from aiohttp import web
from fidelity import SAMPLING, Policy, exact
from gateways import TOKENS

from areax.adapters.environments import openreward
from areax.recipes.shared import environments as expanded
from areax.rollout.workflows import environments

SAID = json.loads(Path(__file__).with_name("openreward_said.json").read_text())
ROW = {"variant": "adder", "split": "test", "index": 1}


@contextlib.asynccontextmanager
async def server(asked):
    """Answers each request as the real server did; notes what was asked, and in which session."""

    async def answer(request):
        body = await request.json() if request.can_read_body else None
        key = (request.method, request.path.strip("/"), body)
        asked.append((*key[:2], request.headers.get("X-Session-ID")))
        for one in SAID:
            if key == (one["method"], one["path"], one["body"]):
                return web.Response(text=one["reply"], status=one["status"], headers={"Content-Type": one["type"]})
        return web.json_response({"detail": "Not Found"}, status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def play(*said, row=ROW):
    async def run():
        policy, asked = Policy(*said), []
        async with server(asked) as url:
            how = dict(tokenizer=TOKENS, sampling=SAMPLING, world="areax.adapters.environments.openreward:World")
            samples = await environments.play(policy, row, options={"name": f"{url}/"}, **how)
        return policy, samples, asked

    return asyncio.run(run())


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_calls_are_rewarded_until_the_server_is_finished():
    policy, samples, asked = play(call("answer", number=5), call("answer", number=3))
    assert exact(policy, samples) and sum(sample.reward for sample in samples) == 1.0
    assert "What is 1+2? Call answer." in policy.heard[0] and '"Says the sum."' in policy.heard[0]
    assert "wrong\nagain" in policy.heard[1]
    assert [path for _, path, _ in asked[-2:]] == ["delete", "delete_session"]
    assert len({session for _, _, session in asked[1:]}) == 1 and asked[1][2]


def test_what_the_policy_calls_wrongly_it_is_told():
    policy, [sample], _ = play(call("answer", number="q"), call("none"), "I give up.")
    assert "unable to parse string as an integer" in policy.heard[1] and "not a valid tool" in policy.heard[2]
    assert sample.reward == 0.0 and len(policy.said) == 3


def test_a_tool_that_fails_and_a_task_that_is_missing_are_lines(caplog):
    _, [sample], asked = play(call("breaks"))
    assert math.isnan(sample.reward) and "the tool breaks failed: broken" in caplog.text
    assert [path for _, path, _ in asked[-2:]] == ["delete", "delete_session"]
    with pytest.raises(environments.ServerError, match='create: 400: {"detail":"Invalid index"}'):
        play("x", row={**ROW, "index": 99})


def test_rows_are_the_tasks_of_a_split():
    async def run():
        async with server([]) as url:
            made = lambda split, **options: asyncio.to_thread(
                expanded.rows, f"openreward:{url}", json.dumps(options), split
            )
            return (
                await made("train"), await made("eval"), await made("eval", eval_split="train", variant="adder"),
                await asyncio.gather(made("train", train_split="none"), return_exceptions=True),
            )  # fmt: skip

    train, heldout, other, [error] = asyncio.run(run())
    assert len(train) == len(other) == 8 and heldout == [{**ROW, "index": n} for n in range(3)]
    assert "openreward: http://" in str(error) and "no tasks of the split none" in str(error)
    assert "Invalid split" in str(error)
    with pytest.raises(ValueError, match="openreward: http://127.0.0.1:9: no tasks of the split train"):
        openreward.World.rows("train", "http://127.0.0.1:9")
