"""Answers in channels: read as the template of GPT-OSS writes them, and as the model does."""

import asyncio
from pathlib import Path

import pytest
import trl

from areax.adapters import tokenizer
from areax.rollout import workflows
from areax.rollout.chat import answers, parsers, template
from areax.rollout.chat.channels import MARKERS
from areax.rollout.chat.parsers import Answer, Parser, Text, ToolCall, parse
from areax.rollout.chat.session import Session
from areax.rollout.types import Completion, Sampling
from areax.rollout.workflows import multi_turn

ANALYSIS, FINAL = "<|channel|>analysis<|message|>Two and two.<|end|>", "<|channel|>final<|message|>four"
NEXT = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
ADD = ToolCall("call_n0", "add", '{"a": 1}')


def made():
    """A byte-level tokenizer with the special tokens and the template of GPT-OSS."""
    tokens = tokenizer.byte_level()
    tokens.add_special_tokens({"additional_special_tokens": list(MARKERS)})
    tokens.eos_token = "<|return|>"
    tokens.chat_template = (Path(trl.__file__).parent / "chat_templates/gptoss.jinja").read_text()
    return tokens


TOKENS = made()


@pytest.mark.parametrize(
    "text, answer",
    [
        (ANALYSIS + NEXT + FINAL, Answer("four", "Two and two.")),
        (ANALYSIS + NEXT + FINAL + "<|return|>", Answer("four", "Two and two.")),
        (FINAL, Answer("four")),
        ("four", Answer("four")),  # of a model that was not trained on channels
        (" to=5 is four", Answer(" to=5 is four")),
        (ANALYSIS + NEXT + CALL, Answer("", "Two and two.", (ADD,))),
        (CALL + "<|call|>", Answer("", "", (ADD,))),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', Answer("", "", (ADD,))),
        ("<|channel|>commentary<|message|>I add.<|end|>" + NEXT + CALL, Answer("I add.", "", (ADD,))),
        (ANALYSIS + NEXT + ANALYSIS + NEXT + FINAL, Answer("four", "Two and two.\nTwo and two.")),
        ("<|channel|>analysis to=python<|message|>1 + 1<|call|>", Answer("", "1 + 1")),
        ("<|channel|>analysis<|message|>Two", Answer("", "Two")),  # the answer was cut
        ("<|message|>four", Answer("four")),  # no channel is named
        ("<|message|>four<|end|>" + NEXT + FINAL, Answer("four\nfour")),
        (ANALYSIS + NEXT + "<|channel|>fin", Answer("", "Two and two.")),
        (CALL.replace("}", ""), Answer('{"a": 1')),  # a malformed call is content
        ("", Answer("")),
    ],
)
def test_an_answer_in_channels_is_reasoning_content_and_calls(text, answer):
    assert parse(text, "gpt_oss", tools=TOOLS, nonce="n") == answer
    parser = Parser("gpt_oss", tools=TOOLS, nonce="n")
    pieces = [piece for letter in text for piece in parser.push(letter)]
    assert parsers.collect(pieces + parser.finish()) == answer


def test_what_is_said_is_streamed():
    parser = Parser("gpt_oss")
    assert parser.push(ANALYSIS[:-12]) == [Text("reasoning", "Two and")]
    assert parser.push(" two.<|e") == [Text("reasoning", " two.")]
    assert parser.push("nd|>" + NEXT + FINAL + " <") == [Text("content", "four ")]
    assert parser.finish() == [Text("content", "<")]


def test_the_template_of_the_family_is_read_back():
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "four", "thinking": "Two and two."},
    ]
    prompt = template.render(TOKENS, messages[:1], (), {}, ask=True)
    written = template.render(TOKENS, messages, (), {}, ask=False)
    assert parse(written.removeprefix(prompt), "gpt_oss") == Answer("four", "Two and two.")
    function = {"name": "add", "arguments": {"a": 1}}
    messages[1] = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    prompt = template.render(TOKENS, messages[:1], TOOLS, {}, ask=True)
    written = template.render(TOKENS, messages, TOOLS, {}, ask=False)
    assert parse(written.removeprefix(prompt), "gpt_oss", tools=TOOLS, nonce="n").tool_calls == (ADD,)


def test_rewards_and_environments_read_what_is_said():
    ids = [*TOKENS.encode(ANALYSIS + NEXT + FINAL, add_special_tokens=False), TOKENS.eos_token_id]
    texts = []

    async def generate(tokens, **sampling):
        return Completion(tokens=ids, logp=[-1.0] * len(ids), version=[0] * len(ids), finish="stop")

    async def reward(text, row, **context):
        texts.append(text)
        return [(2, 0.5), (4, 1.0)]

    row = {"prompt": "2+2?"}
    sample = asyncio.run(workflows.single_turn(generate, row, tokenizer=TOKENS, reward=reward, sampling=Sampling()))
    assert texts == ["four"] == [sample.info["text"]]
    begun = len(sample.tokens) - len(ids)
    assert sample.rewards == ((begun + len(ids) - 4, 0.5), (begun + len(ids) - 1, 1.0))  # behind "fo", and the last
    answer = asyncio.run(Session(generate, TOKENS).ask([{"role": "user", "content": "2+2?"}])).answer
    assert (answer.content, answer.reasoning) == ("four", "Two and two.")


def test_thoughts_of_gemma_4_do_not_stay_in_texts():
    tokens = tokenizer.byte_level()
    tokens.add_special_tokens({"additional_special_tokens": ["<|turn>", "<turn|>", "<|channel>", "<channel|>"]})
    tokens.chat_template = (Path(trl.__file__).parent / "chat_templates/gemma4_v5.jinja").read_text()
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four", "reasoning": "Two."}]
    prompt = template.render(tokens, messages[:1], (), {"enable_thinking": True}, ask=True)
    written = template.render(tokens, messages, (), {"enable_thinking": True}, ask=False)
    text = written.removeprefix(prompt).removesuffix("<turn|>\n")
    assert text == "<|channel>thought\nTwo.\n<channel|>four"
    ids = tokens.encode(text, add_special_tokens=False)
    style = parsers.style_for(tokens)
    assert parse(parsers.decoder(tokens)(ids), style) == Answer("four", "Two.")
    assert answers.text(tokens, ids) == "four"
    assert answers.completing(tokens, ids, [1, 4]) == [len(ids) - 4, len(ids) - 1]


def test_thoughts_and_calls_of_seed_oss():
    call = "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    text = f"<seed:think>Two.</seed:think>\nI add.\n{call}"
    assert parse(text, "seed_oss", tools=tools, nonce="n") == Answer("I add.", "Two.", (ADD,))
    assert parsers.said("<seed:think>Two.</seed:think>\nfour", "seed_oss").content == "four"


def test_other_formats_are_read_as_before():
    tokens = tokenizer.character("<think>/abc.")
    ids = [*tokens.encode("<think>ab</think>c", add_special_tokens=False), tokens.eos_token_id]
    assert answers.text(tokens, ids) == "<think>ab</think>c" and answers.completing(tokens, ids, [3, 99]) == [2, 18]


def test_a_turn_behind_a_call_continues_its_tokens(tmp_path):
    source = 'def add(a: int) -> int:\n    """Adds.\n\n    Args:\n      a: a number.\n    """\n    return a + 1\n'
    (tmp_path / "tools.py").write_text(source)
    turns, heard = iter([(ANALYSIS + NEXT + CALL, "<|call|>"), (ANALYSIS + NEXT + FINAL, "<|return|>")]), []

    async def generate(tokens, **sampling):
        heard.append(TOKENS.decode(tokens))
        text, end = next(turns)
        ids = TOKENS.encode(text + end, add_special_tokens=False)
        return Completion(tokens=ids, logp=[-1.0] * len(ids), version=[0] * len(ids), finish="stop")

    async def reward(text, row, **context):
        return float(text == "four")

    how = dict(tokenizer=TOKENS, reward=reward, sampling=Sampling(), tools=[f"{tmp_path}/tools.py:add"])
    [sample] = asyncio.run(multi_turn.tool_loop(generate, {"prompt": "2+2?"}, **how))
    assert sample.reward == 1.0 and set(sample.turn) == {0, 1}
    added = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|><|start|>assistant'
    assert heard[1] == f"{heard[0]}{ANALYSIS}{NEXT}{CALL}<|call|>{added}"
