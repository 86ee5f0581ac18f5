"""Images that clients send with the SDKs of OpenAI and Anthropic reach the policy, with the tokens that stand for them.

References are written by hand: the text as the template of `vlm` renders it, and the image's bytes.
"""

import asyncio
import base64
import json
import sys
import threading

import anthropic
import httpx
import openai
import pytest
import vlm

from areax.adapters import tokenizer
from areax.adapters.data import images
from areax.rollout.chat.session import Session
from areax.rollout.gateway.server import serve
from areax.rollout.types import Completion, Sampling
from areax.rollout.workflows import agents

FIRST, SECOND = vlm.png(8, 8, 1), vlm.png(12, 12, 2)  # 4 and 9 features, of sizes as models see them
END = 3  # <|im_end|>
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = vlm.folder(tmp_path_factory.mktemp("vlm") / "model")
    return tokenizer.load(path), images.load(path)


class Engine:
    """A scripted engine, which records what it is asked."""

    def __init__(self, tokens):
        self.tokens, self.asked, self.says = tokens, [], []

    async def __call__(self, prompt, images=(), *, on_tokens=None, **sampling):
        ids = [*self.tokens.encode(self.says.pop(0), add_special_tokens=False), END]
        self.asked.append((prompt, tuple(image.data for image in images)))
        if on_tokens:
            on_tokens(ids)
        return Completion(ids, [-1.0] * len(ids), [0] * len(ids), "stop")


def served(model, test, processor=True):
    """Runs the coroutine function `test` on (gateway, key, session, engine)."""

    async def run():
        engine, used = Engine(model[0]), model if processor else model[:1]
        async with serve(*used) as gateway:
            session = Session(engine, *used)
            await test(gateway, gateway.open(session), session, engine)

    asyncio.run(asyncio.wait_for(run(), 60))


def rendered(model, text, seen):
    tokens, processor = model
    ids = tokens.encode(text, add_special_tokens=False)
    return processor.expanded(ids, list(map(images.read, seen))), tuple(seen)


def url(data, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def test_chat_completions(model):
    async def test(gateway, key, session, engine):
        engine.says += ["a red cat", "a dog", "two"]
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
            ask = client.chat.completions.create
            part = {"type": "image_url", "image_url": {"url": url(FIRST), "detail": "high"}}
            messages = [{"role": "user", "content": [{"type": "text", "text": "what is "}, part]}]
            first = await ask(model="m", messages=messages)
            more = [{"type": "text", "text": "and "}, {"type": "image_url", "image_url": {"url": url(SECOND)}}]
            more += [{"type": "text", "text": "?"}]
            messages += [first.choices[0].message, {"role": "user", "content": more}]
            second = await ask(model="m", messages=messages)
            messages += [second.choices[0].message, {"role": "user", "content": "how many?"}]
            stream = await ask(model="m", messages=messages, stream=True)
            words = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert [x.choices[0].message.content for x in (first, second)] == ["a red cat", "a dog"] and words == "two"
        one = f"<|im_start|>user\nwhat is {SEEN}<|im_end|>\n<|im_start|>assistant\n"
        two = f"{one}a red cat<|im_end|>\n<|im_start|>user\nand {SEEN}?<|im_end|>\n<|im_start|>assistant\n"
        three = f"{two}a dog<|im_end|>\n<|im_start|>user\nhow many?<|im_end|>\n<|im_start|>assistant\n"
        told = (one, [FIRST]), (two, [FIRST, SECOND]), (three, [FIRST, SECOND])
        assert engine.asked == [rendered(model, *each) for each in told]
        assert first.usage.prompt_tokens == len(engine.asked[0][0])
        [row] = session.samples()
        assert [image.data for image in row.images] == [FIRST, SECOND] and row.mask.sum() == 10 + 6 + 4

    served(model, test)


def test_responses(model):
    async def test(gateway, key, session, engine):
        engine.says += ["a cat", "yes"]
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
            part = {"type": "input_image", "image_url": url(FIRST), "detail": "auto"}
            given = [{"role": "user", "content": [part, {"type": "input_text", "text": "what?"}]}]
            first = await client.responses.create(model="m", input=given)
            given += [*first.output, {"role": "user", "content": "sure?"}]
            second = await client.responses.create(model="m", input=given)
        assert (first.output_text, second.output_text) == ("a cat", "yes")
        one = f"<|im_start|>user\n{SEEN}what?<|im_end|>\n<|im_start|>assistant\n"
        two = f"{one}a cat<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
        assert engine.asked == [rendered(model, one, [FIRST]), rendered(model, two, [FIRST])]
        assert first.usage.input_tokens == len(engine.asked[0][0])

    served(model, test)


def test_messages(model):
    async def test(gateway, key, session, engine):
        engine.says += ["look", "a cat"]
        block = lambda data: {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()},
        }
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0) as client:
            asked = [{"role": "user", "content": [block(FIRST), {"type": "text", "text": "what?"}]}]
            count = await client.messages.count_tokens(model="m", messages=asked)
            first = await client.messages.create(model="m", max_tokens=9, messages=asked)
            result = [{"type": "text", "text": "here "}, block(SECOND)]
            asked += [
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": result}]},
            ]
            second = await client.messages.create(model="m", max_tokens=9, messages=asked)
        assert second.content[0].text == "a cat"
        one = f"<|im_start|>user\n{SEEN}what?<|im_end|>\n<|im_start|>assistant\n"
        two = f"{one}look<|im_end|>\n<|im_start|>tool\nhere {SEEN}<|im_end|>\n<|im_start|>assistant\n"
        assert engine.asked == [rendered(model, one, [FIRST]), rendered(model, two, [FIRST, SECOND])]
        assert first.usage.input_tokens == count.input_tokens == len(engine.asked[0][0])

    served(model, test)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"image_url": {"url": "http://127.0.0.1/a.png"}}, "addresses are not fetched"),
        ({"image_url": {"url": "/etc/hostname"}}, "must be a data URL"),
        ({"image_url": {"url": "file:///etc/hostname"}}, "must be a data URL"),
        ({"image_url": {"url": url(FIRST), "detail": "low"}}, "detail of an image must be auto or high"),
        ({"image_url": {"url": url(b"no image")}}, "messages: images: 8 bytes are no image of PNG"),
        ({"image_url": {"url": "data:image/png;base64,??"}}, "a data URL must hold base64"),
        ({"image_url": {}}, "must be a data URL"),
        ({}, "must be a data URL"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused(model, part, words):
    async def test(gateway, key, session, engine):
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
            message = {"role": "user", "content": [{"type": "image_url", **part}]}
            with pytest.raises(openai.BadRequestError, match=words):
                await client.chat.completions.create(model="m", messages=[message])
        assert not engine.asked

    served(model, test)


def test_limits(model):
    async def refused(gateway, key, session, engine):
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
            message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(FIRST)}}]}
            with pytest.raises(openai.BadRequestError, match="must have at most 256 images, got 257"):
                await client.chat.completions.create(model="m", messages=[message] * 257)
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0) as client:
            block = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
            with pytest.raises(anthropic.BadRequestError, match="needs a source of base64 data"):
                await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": [block]}])
        assert not engine.asked

    served(model, refused)


def test_models_of_text(model):
    async def refused(gateway, key, session, engine):
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
            message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(FIRST)}}]}
            with pytest.raises(openai.BadRequestError, match="this model reads no images"):
                await client.chat.completions.create(model="m", messages=[message] * 257)
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0) as client:
            block = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
            with pytest.raises(anthropic.BadRequestError, match="this model reads no images"):
                await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": [block]}])
        assert not engine.asked

    served(model, refused, processor=False)

    async def written(gateway, key, session, engine):
        """The image token as text would stand for an image that is not there."""
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="got 1 for 0"):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "<|image_pad|>"}])
            with pytest.raises(openai.BadRequestError, match="got 1 for 0"):
                await client.completions.create(model="m", prompt=[5, vlm.IMAGE])
        assert not engine.asked

    served(model, written)


def test_images_are_read_beside_the_event_loop(model, monkeypatch):
    """Even a small file may have many pixels; escapes in the request may hide its name."""
    part = {"type": "image_url", "image_url": {"url": url(FIRST)}}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]}).replace("image", "im\\u0061ge")
    read, threads = images.Processor.read, set()
    monkeypatch.setattr(
        images.Processor, "read", lambda self, source: threads.add(threading.get_ident()) or read(self, source)
    )

    async def asked(gateway, key, session, engine):
        engine.says.append("a cat")
        async with httpx.AsyncClient(base_url=gateway.url, headers={"authorization": f"Bearer {key}"}) as client:
            assert (await client.post("/v1/chat/completions", content=body)).status_code == 200

    served(model, asked)
    assert threads and threading.get_ident() not in threads


PROGRAM = """
import json, sys, openai
row, client = json.load(sys.stdin), openai.OpenAI(max_retries=0)
part = {"type": "image_url", "image_url": {"url": row["images"][0]}}
client.chat.completions.create(model="m", messages=[{"role": "user", "content": [part]}])
print(json.dumps({"reward": 0.5}))
"""


def test_a_program_gets_images_as_data_urls(model, tmp_path):
    engine = Engine(model[0])
    engine.says += ["a cat"]
    (tmp_path / "agent.py").write_text(PROGRAM)

    async def run():
        play, given = agents.command(f"{sys.executable} {tmp_path}/agent.py"), dict(reward=None, sampling=Sampling())
        async with agents.played(play, "exec:", tokenizer=model[0], processor=model[1], **given) as episode:
            return await episode(engine, {"images": [{"bytes": FIRST, "path": "a.png"}]})

    [row] = asyncio.run(asyncio.wait_for(run(), 60))
    assert [image.data for image in row.images] == [FIRST] and row.reward == 0.5


def test_an_agent_passes_images_on(model):
    """An agent sends the row's image; its samples have it."""
    engine = Engine(model[0])
    engine.says += ["a cat"]

    async def agent(row, *, base_url, api_key):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            part = {"type": "image_url", "image_url": {"url": row["image"]}}
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": [part]}])
        return 1.0

    async def run():
        given = dict(tokenizer=model[0], processor=model[1], reward=None, sampling=Sampling())
        async with agents.played(agents.coroutine(agent), "agent", **given) as episode:
            return await episode(engine, {"image": url(SECOND)})

    [row] = asyncio.run(asyncio.wait_for(run(), 60))
    assert [image.data for image in row.images] == [SECOND] and (row.tokens == vlm.IMAGE).sum() == 9
    assert row.reward == 1.0 and "base64" not in json.dumps(row.info["prompt"])
