"""Conversations are token-exact: training uses exactly the tokens that the engine sampled, each of them once."""

import asyncio
import functools
import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areax.adapters import tokenizer
from areax.core import advantages
from areax.rollout.chat import template, trajectory
from areax.rollout.chat.parsers import Answer, ToolCall
from areax.rollout.chat.session import Session
from areax.rollout.types import Completion, Sampling

THINKING = """
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content and loop.index0 > ns.last %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""  # drops old reasoning
OPENED = THINKING.replace("'<|im_start|>assistant\\n' }}{% endif %}", "'<|im_start|>assistant\\n<think>' }}{% endif %}")
TEMPLATES = {"plain": tokenizer.CHAT_TEMPLATE, "thinking": THINKING, "opened": OPENED}
TOKENS = {}
for name, text in TEMPLATES.items():
    TOKENS[name] = tokenizer.byte_level()
    TOKENS[name].chat_template = text
END = TOKENS["plain"].eos_token_id
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def plain(text, cut):
    return Answer(text)


def parse(text, cut=False, opened=False):
    """Parses reasoning, content and calls in the format of the templates above."""
    reasoning, _, rest = text.partition("</think>") if opened or text.startswith("<think>") else ("", "", text)
    reasoning = reasoning.removeprefix("<think>")
    content, *calls = rest.split("<call>")
    calls = [json.loads(call.removesuffix("</call>")) for call in calls]
    told = lambda i, call: ToolCall(f"c{i}", call["name"], json.dumps(call["arguments"]))
    return Answer(content, reasoning, tuple(told(i, call) for i, call in enumerate(calls)))


class Engine:
    """A scripted engine that records its completions."""

    def __init__(self, tokens, seed=0):
        self.tokens, self.draw = tokens, random.Random(seed)
        self.record = []
        self.next = []

    def say(self, text, finish="stop"):
        self.next.append((self.tokens.encode(text) + [END] * (finish == "stop"), finish))

    async def __call__(self, prompt, *, on_tokens=None, **sampling):
        out, finish = self.next.pop(0)
        await asyncio.sleep(0)
        for count in range(1, len(out) + 1) if on_tokens else ():
            on_tokens(out[:count])
        done = Completion(
            tokens=list(out), logp=[-self.draw.random() for _ in out],
            version=[self.draw.randrange(5) for _ in out], finish=finish,
        )  # fmt: skip
        self.record.append((list(prompt), done))
        return done


def check(session, engine):
    """Asserts that every sampled token is trained on once, after exactly the context it was sampled in."""
    rows, learnt = session.samples(), [0] * len(engine.record)
    for row in rows:
        explained = np.zeros(len(row.tokens), bool)
        for i, (prompt, done) in enumerate(engine.record):
            start, end = len(prompt), len(prompt) + len(done.tokens)
            if end > len(row.tokens) or row.tokens[:end].tolist() != prompt + done.tokens or not row.mask[start:].any():
                continue
            if row.mask[start:end].all() and not explained[start:end].any() and not learnt[i]:
                np.testing.assert_array_equal(row.logp[start:end], np.float32(done.logp))
                np.testing.assert_array_equal(row.version[start:end], done.version)
                explained[start:end] = True
                learnt[i] += 1
        np.testing.assert_array_equal(explained, row.mask)
        assert (row.logp[~row.mask] == 0).all() and (row.version[~row.mask] == -1).all()
    assert learnt == [1] * len(engine.record)
    return rows


def user(text):
    return {"role": "user", "content": text}


def test_six_turns_with_tools_reasoning_branches_and_truncation():
    tokens = TOKENS["thinking"]
    engine = Engine(tokens)
    session = Session(engine, tokens)

    async def episode():
        async def ask(messages, text, finish="stop"):
            engine.say(text, finish)
            return (await session.ask(messages, tools=TOOLS, parse=parse)).answer.message()

        talk = [user("what is 2 + 3?")]
        talk.append(await ask(talk, '<think>add</think><call>{"name": "add", "arguments": {}}</call>'))
        assert talk[-1]["tool_calls"] and talk[-1]["reasoning_content"] == "add"
        talk.append({"role": "tool", "content": "5", "tool_call_id": "c0"})
        talk.append(await ask(talk, "<think>so</think>it is 5"))  # after a tool result: extends the row
        talk.append(user("and 4 + 4?"))
        talk.append(await ask(talk, "<think>double</think>eight"))  # reasoning is stripped: starts a new row
        talk.append(user("sure?"))
        del talk[-2]["reasoning_content"]  # like agents do
        talk.append(await ask(talk, "<think>it is lo", finish="length"))
        left, right = [*talk, user("left")], [*talk, user("right")]
        for branch, said in ((left, "l"), (right, "r")):
            branch.append(await ask(branch, said))
        return left

    asyncio.run(episode())
    rows = check(session, engine)
    # The first two turns are one row; the third, the fourth, and both branches after it start new rows.
    chains = [len(set(row.turn[row.mask].tolist())) for row in rows]
    assert len(engine.record) == 6 and sorted(chains) == [1, 1, 1, 1, 2]
    assert [x.extends for x in session.interactions] == [False, True, False, False, False, False]
    assert [x.parent and session.interactions.index(x.parent) for x in session.interactions] == [None, 0, 1, 2, 3, 3]
    assert rows[2].finish == "length"


def test_branches_share_what_they_extend():
    tokens = TOKENS["plain"]
    engine = Engine(tokens)
    session = Session(engine, tokens)

    async def episode():
        engine.say("one")
        first = await session.ask([user("a")])
        for text in ("two", "three"):
            engine.say(text)
            await session.ask([user("a"), first.answer.message(), user("b")])
        session.set_reward(1.0)
        session.set_reward(0.5, first.id)

    asyncio.run(episode())
    rows = check(session, engine)
    assert [x.extends for x in session.interactions] == [False, True, True]
    assert [row.turn[row.mask].tolist() for row in rows] == [[0] * 4 + [1] * 4, [1] * 6]
    # Each row has the reward of the episode: that of its own turns at their tokens, the rest at its end.
    assert [row.reward for row in rows] == [1.5, 1.5]
    start = int(rows[0].mask.argmax())
    assert rows[0].rewards == ((start + 3, 0.5), (len(rows[0].tokens) - 1, 1.0))
    assert rows[1].rewards == ((len(rows[1].tokens) - 1, 1.5),)
    assert rows[0].info["prompt"].endswith("assistant\n") and rows[0].info["text"].startswith("one<|im_end|>")


def test_a_truncated_turn_is_closed_by_tokens_that_are_not_trained_on():
    tokens = TOKENS["plain"]
    engine = Engine(tokens)
    session = Session(engine, tokens)

    async def episode():
        for finish in ("length", "stop", "stop"):
            engine.say("abc", finish)
            talk = [user("q")] + [m for x in session.interactions for m in (x.answer.message(), user("go on"))]
            await session.ask(talk)

    asyncio.run(episode())
    [row] = check(session, engine)
    between = "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    assert tokens.decode(row.tokens.tolist()).endswith(f"abc{between}abc{between}abc<|im_end|>")
    assert int(row.mask.sum()) == 3 + 4 + 4


@pytest.mark.parametrize("name, extends", [("plain", True), ("thinking", False), ("opened", False)])
def test_reasoning_dropped_by_the_template_is_not_kept_in_the_context(name, extends):
    """Reasoning that the template drops from earlier turns must not stay in the context that is trained on."""
    tokens = TOKENS[name]
    engine = Engine(tokens)
    session = Session(engine, tokens)
    opened = name == "opened"
    read = plain if name == "plain" else functools.partial(parse, opened=opened)

    async def episode():
        for _ in range(2):
            engine.say(("" if opened else "<think>") + "hm</think>yes")
            talk = [user("q")] + [m for x in session.interactions for m in (x.answer.message(), user("?"))]
            await session.ask(talk, parse=read)

    asyncio.run(episode())
    check(session, engine)
    assert session.interactions[1].extends == extends
    assert ("hm" in tokens.decode(list(session.interactions[1].prompt))) == extends


@st.composite
def plans(draw):
    """Episodes of up to 8 requests: which earlier conversation each continues, and how it is answered."""
    steps = []
    for i in range(draw(st.integers(1, 8))):
        steps.append(
            dict(
                parent=draw(st.integers(-1, i - 1)), text=draw(st.text("ab<é ", max_size=5)),
                think=draw(st.sampled_from(["", "", "hm"])), call=draw(st.booleans()),
                finish=draw(st.sampled_from(["stop", "stop", "length"])), then=draw(st.sampled_from(["user", "tool"])),
                edit=draw(st.integers(0, 9)) == 0, tools=draw(st.integers(0, 5)) > 0,
                temperature=draw(st.sampled_from([1.0, 1.0, 1.0, 0.7])), reward=draw(st.sampled_from([None, 0.0, 0.5])),
            )
        )  # fmt: skip
    return steps


@pytest.mark.slow
@settings(max_examples=150)
@given(plans(), st.sampled_from(sorted(TEMPLATES)), st.integers(0, 3))
def test_random_trees_of_conversations(steps, name, seed):
    tokens = TOKENS[name]
    engine = Engine(tokens, seed)
    session = Session(engine, tokens)
    opened = name == "opened"
    read = plain if name == "plain" else functools.partial(parse, opened=opened)

    async def episode():
        talks = []
        for step in steps:
            talk = list(talks[step["parent"]]) if step["parent"] >= 0 else []
            if talk and step["edit"]:
                talk[-1] = talk[-1] | {"content": "edited"}
            talk.append({"role": step["then"] if talk else "user", "content": step["text"]})
            text = step["text"]
            if name != "plain":
                text = f"{step['think']}</think>{text}" if opened or step["think"] else text
                text = text if opened or not step["think"] else f"<think>{text}"
                text += '<call>{"name": "add", "arguments": {}}</call>' * step["call"]
            engine.say(text, step["finish"])
            x = await session.ask(
                talk, tools=TOOLS if step["tools"] else (), parse=read, temperature=step["temperature"]
            )
            if step["reward"] is not None:
                session.set_reward(step["reward"], x.id)
            talks.append([*talk, x.answer.message()])

    asyncio.run(episode())
    record = [(p, d) for p, d in engine.record if d.tokens]
    engine.record = record
    rows = check(session, engine)
    given_ = [step["reward"] for step in steps if step["reward"] is not None]
    for row in rows:
        assert row.reward == pytest.approx(sum(given_)) if given_ else math.isnan(row.reward)
    for row, x in zip(
        session.samples(style="interactions"), [x for x in session.interactions if x.completion.tokens], strict=True
    ):
        assert row.tokens.tolist() == [*x.prompt, *x.completion.tokens] and row.mask.sum() == len(x.completion.tokens)


def test_rewards_are_discounted_along_the_tree():
    tokens = TOKENS["plain"]
    engine = Engine(tokens)
    session = Session(engine, tokens)

    async def episode():
        talks = {"": []}
        for path in ("a", "ab", "ac", "abd"):
            engine.say(path)
            talk = [*talks[path[:-1]], user(path)]
            x = await session.ask(talk)
            talks[path] = [*talk, x.answer.message()]
        for x, value in zip(session.interactions, (1, 2.0, {"x": 3, "y": 1}, 8), strict=True):
            session.set_reward(value, x.id)

    asyncio.run(episode())
    rows = session.samples(style="interactions", discount=0.5)
    abd, ac = 8, 4
    ab = 2 + 0.5 * abd
    assert [row.reward for row in rows] == [1 + 0.5 * (ab + ac), ab, ac, abd]
    assert all(row.components == {"x": 3, "y": 1} for row in rows)
    session.set_reward(None, session.interactions[2].id)
    assert all(math.isnan(row.reward) for row in session.samples())
    with pytest.raises(ValueError, match='a discount needs style "interactions", got 0.5'):
        session.samples(discount=0.5)
    with pytest.raises(ValueError, match="no interaction 'nobody'"):
        session.set_reward(1.0, "nobody")


@pytest.mark.slow
def test_rows_of_an_episode_count_as_one_in_the_baseline():
    """Two rows of one rollout against one of another: the baseline is the mean of both rewards."""
    reward_BJ, group_BJ, rollout_BJ = np.array([[1.5, 1.5, 0.5]]), np.zeros((1, 3), int), np.array([[0, 0, 1]])
    adv_BJ = advantages.group(reward_BJ, group_BJ, rollout_BJ, std="none")
    np.testing.assert_allclose(adv_BJ, [[0.5, 0.5, -0.5]])


@settings(max_examples=60)
@given(st.text("ab#é€", max_size=12), st.sampled_from(["stop", "length"]), st.sampled_from([(), ("#",), ("a#", "b")]))
def test_text_is_streamed_in_pieces(text, finish, stops):
    """The streamed pieces join to the text without its stop string."""
    tokens = TOKENS["plain"]
    engine = Engine(tokens)
    session = Session(engine, tokens)
    found = [(text.find(stop), -len(stop)) for stop in stops if stop in text]
    if found:
        at, length = min((text.find(s) + len(s), len(s)) for s in stops if s in text)
        engine.next = [(tokens.encode(text[:at]), "stop")]
        wanted = text[: min(f for f, _ in found if f + 1 <= at)]
    else:
        engine.say(text, finish)
        wanted = text
    pieces = []
    x = asyncio.run(session.ask([user("q")], stop=stops, on_text=pieces.append))
    assert x.text == wanted and "".join(pieces) == wanted


def test_sampling_parameters_of_the_run_override_those_of_requests():
    seen = {}

    async def generate(prompt, **sampling):
        seen.update(sampling)
        return Completion([END], [-0.1], [0], "stop")

    own = Sampling(temperature=0.8, max_new_tokens=64, stop=("#",))
    session = Session(generate, TOKENS["plain"], sampling=own)
    x = asyncio.run(session.ask([user("q")], temperature=0.1, top_p=0.5, max_new_tokens=999, stop=("%",)))
    assert seen == own.arguments() | {"stop": ("#", "%")} and x.temperature == 0.8
    asyncio.run(session.ask([user("q")], max_new_tokens=3))
    assert seen["max_new_tokens"] == 3
    asyncio.run(Session(generate, TOKENS["plain"]).ask([user("q")], temperature=0.1, top_p=0.5, max_new_tokens=None))
    assert {k: seen[k] for k in ("temperature", "top_p")} == {"temperature": 0.1, "top_p": 0.5}


def test_bad_requests_leave_nothing_behind():
    tokens = tokenizer.byte_level()
    tokens.chat_template = "{{ raise_exception('no ' + messages[0].role) }}"
    session = Session(Engine(tokens), tokens)
    with pytest.raises(ValueError, match=r"the chat template refuses them \(no user\)"):
        asyncio.run(session.ask([user("q")]))
    tokens.chat_template = None
    with pytest.raises(ValueError, match="no chat template; send a prompt of tokens"):
        asyncio.run(session.ask([user("q")]))
    assert session.interactions == [] and session.samples() == []


def test_a_prompt_of_token_ids_belongs_to_no_conversation():
    engine = Engine(TOKENS["plain"])
    session = Session(engine, TOKENS["plain"])
    engine.say("abc", "length")
    x = asyncio.run(session.complete([5, 6]))
    assert (x.text, x.prompt, x.parent) == ("abc", (5, 6), None)
    [row] = check(session, engine)
    assert row.tokens.tolist() == [5, 6, *x.completion.tokens] and math.isnan(row.reward)


def test_rows_that_do_not_start_with_the_row_they_extend_are_refused():
    engine = Engine(TOKENS["plain"])
    session = Session(engine, TOKENS["plain"])

    async def episode():
        engine.say("one")
        first = await session.ask([user("a")])
        engine.say("two")
        await session.ask([user("a"), first.answer.message(), user("b")])

    asyncio.run(episode())
    first, second = session.interactions
    first.completion = replace(first.completion, tokens=[*first.completion.tokens[:-1], 7])
    with pytest.raises(AssertionError, match=f"{second.id} does not begin with the tokens of {first.id}"):
        trajectory.samples(session.interactions)


QWEN3 = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
CALL = '<call>{"name": "add", "arguments": %s}</call>'


def talk(tokens, *said, then, send=lambda message: message, reader=parse):
    """A session with the answers `said`; `send` maps each as the agent sends it back, and `then` follows it."""
    engine = Engine(tokens)
    session = Session(engine, tokens)

    async def episode():
        messages = [user("q")]
        for text in said:
            engine.say(text)
            x = await session.ask(messages, tools=TOOLS, parse=reader)
            messages = [*messages, send(x.answer.message()), *then]

    asyncio.run(episode())
    check(session, engine)
    return session


def with_template(text):
    tokens = tokenizer.byte_level()
    tokens.chat_template = text
    return tokens


def test_a_template_that_keeps_the_text_of_earlier_turns_extends_the_row():
    """A template that adds empty reasoning only to the last answer has not rewritten anything."""
    said = CALL % "{}"
    session = talk(with_template(QWEN3), said, "done", then=[{"role": "tool", "content": "5"}])
    assert [x.extends for x in session.interactions] == [False, True]


@pytest.mark.parametrize("spelt", ['{"b":"\\u00e9","a":2}', '{"b": "é", "a": 2}'])
@pytest.mark.parametrize("content", ["well", None, ""])
def test_tool_calls_reserialised_by_an_sdk_are_recognised(spelt, content):
    """Arguments may be formatted differently, and text next to a call may be missing."""

    def send(message):
        calls = [{**call, "function": {"name": "add", "arguments": spelt}} for call in message["tool_calls"]]
        return {**message, "content": content, "tool_calls": calls}

    reader = lambda text, cut: replace(answer := parse(text), tool_calls=tuple(
        replace(call, arguments=json.dumps({"a": 2, "b": "é"})) for call in answer.tool_calls))  # fmt: skip
    session = talk(
        TOKENS["thinking"], "well" + CALL % "{}", "well" + CALL % "{}", then=[{"role": "tool", "content": "5"}],
        send=send, reader=reader,
    )  # fmt: skip
    assert [x.extends for x in session.interactions] == [False, True]


JOINED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.tool_calls %}
{%- for call in m.tool_calls %}{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def test_templates_that_expect_arguments_as_text():
    session = talk(with_template(JOINED), CALL % "{}", "done", then=[{"role": "tool", "content": "5"}])
    assert "assistant\nadd {}<|im_end|>" in session.interactions[1].before


def test_of_equal_branches_the_one_that_is_sent_back_is_extended():
    tokens = TOKENS["thinking"]
    engine = Engine(tokens)
    session = Session(engine, tokens)

    async def episode():
        for thought in ("left", "right"):
            engine.say(f"<think>{thought}</think>same")
            await session.ask([user("q")], parse=parse)
        left, right = session.interactions
        for sent in (left.answer.message(), right.answer.message()):
            engine.say("x")
            await session.ask([user("q"), sent, {"role": "tool", "content": "5"}], parse=parse)

    asyncio.run(episode())
    left, right, after_left, after_right = session.interactions
    assert (after_left.parent, after_right.parent) == (left, right) and after_left.extends


@pytest.mark.parametrize("end, closing, rest", [
    ("<|im_end|>", "<|im_end|>\n", "\n"), ("<|im_end|>", " <|im_end|>", ""), ("<pad>", "<|im_end|>\n", "\n"),
])  # fmt: skip
def test_a_turn_has_one_end_token(end, closing, rest):
    tokens = TOKENS["plain"]
    assert template.after(tokens, tokens.convert_tokens_to_ids(end), closing) == rest
    assert template.after(tokens, tokens.encode("a")[0], closing) == closing


def test_an_unscorable_episode_is_unscorable_in_every_row():
    session = talk(TOKENS["plain"], "one", "two", then=[user("?")], reader=plain)
    session.set_reward(None)
    assert all(math.isnan(row.reward) for row in session.samples(style="interactions"))
    session.set_reward(2.0)
    assert [row.info["episode_reward"] for row in session.samples(style="interactions")] == [2.0, 2.0]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "developer", "content": "Be kind."},
        {"role": "assistant", "content": "A<|im_end|>"},
        {"role": "assistant", "content": "A<|im_end|>\n<|im_end|>"},
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]},
        {"role": "assistant", "content": "A", "reasoning": "Hm."},
        {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": "{}"}},
        {"role": "user", "content": 5},
        {"content": "?"},
        {"role": "user", "content": [{"type": "input_audio"}]},
    ],
)
def test_messages_mean_what_they_mean_in_rows(message):
    messages = [user("?"), message, user("!")]

    async def generate(tokens, **sampling):
        return Completion([END], [-1.0], [0], "stop")

    def read(how):
        try:
            return how()
        except ValueError as error:
            return str(error)

    session = Session(generate, TOKENS["thinking"], sampling=Sampling())
    asked = read(lambda: asyncio.run(session.ask(messages)).before)
    assert asked == read(lambda: template.prompted(TOKENS["thinking"], {"messages": messages}).text)
