"""A gateway on real sockets in front of a scripted engine."""

import asyncio

import aiohttp
import anthropic
import openai

from areax.adapters import tokenizer
from areax.rollout.chat.session import Session
from areax.rollout.gateway.server import serve
from areax.rollout.types import Completion

TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking else '') }}
{%- endif %}"""
TOKENS = tokenizer.byte_level()
TOKENS.chat_template = TEMPLATE
END = TOKENS.eos_token_id
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
FUNCTION = {"name": "add", "description": "Adds two numbers.", "parameters": SCHEMA}
CALL = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2.5}}\n</tool_call>'
USER = [{"role": "user", "content": "Hello?"}]
CHAT, PROMPT = {"model": "m", "messages": USER}, {"model": "m", "prompt": "x"}
INPUT, MESSAGE = {"model": "m", "input": "x"}, {"model": "m", "messages": USER, "max_tokens": 5}


class Engine:
    """A scripted engine with one token per byte that records its requests."""

    def __init__(self):
        self.script, self.prompts, self.asked = [], [], []
        self.cancelled, self.info = 0, {}
        self.hold = None  # an event to await before the last token

    def say(self, *texts, finish="stop"):
        self.script += [(TOKENS.encode(text) + [END] * (finish == "stop"), finish) for text in texts]

    async def __call__(self, prompt, *, on_tokens=None, **sampling):
        out, finish = self.script.pop(0) if self.script else ([], "length")
        self.prompts.append(prompt)
        self.asked.append(sampling)
        try:
            for count in range(1, len(out)) if on_tokens else ():
                on_tokens(out[:count])
                await asyncio.sleep(0)
            if self.hold:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if "refuse" in TOKENS.decode(prompt):
            raise ValueError("the prompt is longer than the context")
        if "break" in TOKENS.decode(prompt):
            raise RuntimeError("the server is gone")
        logp = [-(i + 1) / 8 for i in range(len(out))]
        return Completion(tokens=out, logp=logp, version=[3] * len(out), finish=finish, info=self.info)

    @property
    def texts(self):
        return [TOKENS.decode(prompt) for prompt in self.prompts]


class Place:
    """A gateway, its engine, and an open session with its key."""

    def __init__(self, gateway, engine):
        self.gateway, self.engine = gateway, engine
        self.session = Session(engine, TOKENS)
        self.key = gateway.open(self.session)

    def openai(self, key=None):
        return openai.AsyncOpenAI(base_url=f"{self.gateway.url}/v1", api_key=key or self.key, max_retries=0)

    def anthropic(self, key=None):
        return anthropic.AsyncAnthropic(base_url=self.gateway.url, api_key=key or self.key, max_retries=0)

    async def request(self, method, path, key=None, headers=(), **more):
        """(status, body) of one request; `key` defaults to that of the session."""
        headers = {"authorization": f"Bearer {self.key if key is None else key}", **dict(headers)}
        async with aiohttp.ClientSession() as http:
            async with http.request(method, self.gateway.url + path, headers=headers, **more) as reply:
                return reply.status, await reply.json(content_type=None)


def served(test, **options):
    """Runs the coroutine function `test` on a Place."""

    async def run():
        engine = Engine()
        async with serve(TOKENS, **options) as gateway:
            await test(Place(gateway, engine))

    asyncio.run(asyncio.wait_for(run(), 60))


def online(**options):
    """(engine, ended sessions, options of `serve`) for sessions that are started over HTTP."""
    engine, ended = Engine(), []

    async def on_start(wanted):
        if wanted.get("task") == "odd":
            raise ValueError("task: no such task")
        if wanted.get("task") == "later":
            raise RuntimeError("no capacity")
        return Session(engine, TOKENS)

    async def on_end(session):
        ended.append(session)

    return engine, ended, {"admin_key": "the admin's", "on_start": on_start, "on_end": on_end, **options}


def extends(place):
    """Whether each prompt starts with all tokens read and sampled before it."""
    done = place.session.interactions
    return all(y.extends and y.prompt[: len(x.tokens)] == x.tokens for x, y in zip(done, done[1:], strict=False))
