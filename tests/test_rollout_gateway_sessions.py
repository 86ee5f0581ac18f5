"""Sessions of a gateway: ending them, their limits, and sessions started over HTTP."""

import asyncio

import openai
import pytest
from gateways import CHAT, PROMPT, TOKENS, USER, online, served

from areax.rollout.chat.session import Session
from areax.rollout.gateway.sessions import Limits


@pytest.mark.parametrize("stream", [False, True])
def test_closing_a_connection_ends_its_generation(stream):
    async def test(place):
        place.engine.say("some text")
        place.engine.hold = asyncio.Event()
        async with place.openai() as client:
            asked = asyncio.ensure_future(client.chat.completions.create(model="m", messages=USER, stream=stream))
            if stream:
                await (await asked).close()
            else:
                while not place.engine.prompts:
                    await asyncio.sleep(0.01)
                asked.cancel()
        while not place.engine.cancelled:
            await asyncio.sleep(0.01)
        place.engine.hold = None
        assert (await place.request("POST", "/v1/chat/completions", json=CHAT))[0] == 200
        assert len(place.session.interactions) == 1

    served(test)


def test_closing_a_session_ends_its_running_requests():
    async def test(place):
        place.engine.hold = asyncio.Event()
        running = asyncio.create_task(place.request("POST", "/v1/chat/completions", json=CHAT))
        while not place.engine.prompts:
            await asyncio.sleep(0.01)
        await place.gateway.close(place.key)
        assert (await running)[0] == 409 and place.engine.cancelled == 1
        assert (await place.request("POST", "/v1/chat/completions", json=CHAT))[0] == 401
        await place.gateway.close(place.key)

    served(test)


def test_limits_of_generations_and_sessions():
    async def test(place):
        place.engine.hold = asyncio.Event()
        running = [asyncio.create_task(place.request("POST", "/v1/completions", json=PROMPT)) for _ in range(2)]
        while len(place.engine.prompts) < 2:
            await asyncio.sleep(0.01)
        assert (await place.request("POST", "/v1/completions", json=PROMPT))[0] == 429
        place.engine.hold.set()
        assert [(await one)[0] for one in running] == [200, 200]
        with pytest.raises(ValueError, match="already open"):
            place.gateway.open(place.session)
        place.gateway.open(Session(place.engine, TOKENS))
        with pytest.raises(RuntimeError, match="at most 2 sessions"):
            place.gateway.open(Session(place.engine, TOKENS))

    served(test, limits=Limits(generations=2, sessions=2))


def test_sessions_over_http():
    engine, ended, options = online()

    async def test(place):
        admin = "the admin's"
        for task, status in (("odd", 400), ("later", 503)):
            assert (await place.request("POST", "/sessions", admin, json={"task": task}))[0] == status
        _, started = await place.request("POST", "/sessions", admin, json={"task": "sum"})
        key, path = started["api_key"], f"/sessions/{started['id']}"
        engine.say("One.", "Two.")
        async with openai.AsyncOpenAI(base_url=started["base_url"], api_key=key, max_retries=0) as client:
            one = await client.chat.completions.create(model="m", messages=USER)
            await client.chat.completions.create(model="m", messages=USER)
            assert [model.id async for model in client.models.list()] == ["areax"]
        for body in (
            {"value": 1, "interaction": "other"},
            {"value": "good"},
            {},
            {"value": 10**400},
            {"value": 1, "x": 2},
            {"value": True},
            {"value": {"error": 503}},
            {"value": {"reward": None, "seconds": 12}},
        ):
            assert (await place.request("POST", f"{path}/reward", key, json=body))[0] == 400
        assert (await place.request("POST", f"{path}/reward", key, json={"value": 1, "interaction": one.id}))[0] == 200
        last = {"value": {"reward": 0.5, "style": 2}}
        assert (await place.request("POST", f"{path}/reward", key, json=last))[0] == 200
        _, export = await place.request("GET", f"{path}/trajectories?style=interactions&discount=0.5", key)
        first, second = export["rows"]
        assert (first["rewards"][0][1], second["rewards"][0][1]) == (1, 0.5)
        assert (
            TOKENS.decode([t for t, m in zip(first["tokens"], first["mask"], strict=True) if m])
            == f"One.{TOKENS.eos_token}"
        )
        assert {v for v, m in zip(first["version"], first["mask"], strict=True) if m} == {3}
        await place.request("POST", f"{path}/reward", admin, json={"value": None})
        _, export = await place.request("GET", f"{path}/trajectories", admin)
        assert export["rows"][0]["rewards"][0][1] is None
        for query in ("style=odd", "discount=x", "discount=nan", "discount=0.5"):
            assert (await place.request("GET", f"{path}/trajectories?{query}", key))[0] == 400
        assert await place.request("DELETE", path, key) == (200, {"id": started["id"], "ended": True})
        assert [session.id for session in ended] == [started["id"]]
        assert (await place.request("DELETE", path, key))[0] == 401
        assert (await place.request("DELETE", path, admin))[0] == 404

    served(test, **options)


def test_sessions_expire():
    engine, ended, options = online(limits=Limits(idle_s=0.2, total_s=0.6))

    async def test(place):
        start = time_of()
        ids = []
        for _ in range(2):
            _, started = await place.request("POST", "/sessions", "the admin's")
            ids.append(started["id"])
        engine.hold = asyncio.Event()
        busy = await place.request("POST", "/v1/completions", started["api_key"], json=PROMPT)  # ended by total_s
        assert busy[0] == 409 and time_of() - start > 0.6
        assert [session.id for session in ended] == ids
        assert (await place.request("GET", "/v1/models"))[0] == 200  # sessions opened in the process do not expire

    served(test, **options)


def time_of():
    return asyncio.get_running_loop().time()
