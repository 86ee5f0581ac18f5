"""Conversion of rows to prompts: the same ids wherever a row is used, with or without a chat template."""

import asyncio
import dataclasses

import pytest

from areax.adapters import tokenizer
from areax.recipes.shared import probe, rows
from areax.rollout.chat import template
from areax.rollout.chat.api import ask
from areax.rollout.types import Completion, Sampling
from areax.rollout.workflows import single_turn

CHAT = tokenizer.byte_level()
PLAIN = tokenizer.byte_level()
PLAIN.chat_template = None
SAID = {"messages": [{"role": "user", "content": "2 + 3 = é"}]}
ROW = {"prompt": "2 + 3 = é"}


def rollout(tokens, row):
    """The ids that the workflow sends to a server."""
    asked = []

    async def generate(ids, **sampling):
        asked.append(ids)
        return Completion([1], [-0.5], [0], "stop")

    async def reward(text, row, **context):
        assert context["prompt_ids"] == asked[0] and context["prompt"] == tokens.decode(asked[0])
        return 0.0

    asyncio.run(single_turn(generate, row, tokenizer=tokens, reward=reward, sampling=Sampling()))
    return asked[0]


@pytest.mark.parametrize(
    ("tokens", "row", "text"),
    [
        (PLAIN, ROW, "2 + 3 = é"),
        (CHAT, ROW, "<|im_start|>user\n2 + 3 = é<|im_end|>\n<|im_start|>assistant\n"),
        (CHAT, SAID, "<|im_start|>user\n2 + 3 = é<|im_end|>\n<|im_start|>assistant\n"),
        (CHAT, {**ROW, "messages": None}, "<|im_start|>user\n2 + 3 = é<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_row_has_the_same_ids_everywhere(tokens, row, text):
    ids = template.prompt(tokens, row)
    assert tokens.decode(ids) == text
    assert rollout(tokens, row) == ids
    assert tokenizer.supervised(tokens, {**row, "completion": "5"})[0] == ids
    counted = lambda most: rows.prompts(tokens, "areax.rollout.workflows:single_turn", most=most)(row)
    assert counted(len(ids)) is None and counted(len(ids) - 1) == f"longer than --max-prompt {len(ids) - 1}"
    assert list(probe.prompt(tokens, [row], 1024)) == ids[: probe.TOKENS]


def test_special_tokens_added_by_the_tokenizer_are_part_of_a_plain_prompt():
    from tokenizers.processors import TemplateProcessing

    tokens = tokenizer.byte_level()
    tokens.chat_template = None
    start = tokens.convert_tokens_to_ids("<|im_start|>")
    tokens.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    assert rollout(tokens, {"prompt": "a"})[0] == start
    assert tokenizer.supervised(tokens, {"prompt": "a", "completion": "b"})[0] == rollout(tokens, {"prompt": "a"})


def test_messages_need_a_chat_template():
    for use in (rollout, template.prompt, lambda tokens, row: tokenizer.supervised(tokens, {**row, "completion": "5"})):
        with pytest.raises(ValueError, match="the tokenizer has no chat template"):
            use(PLAIN, SAID)


def test_a_row_with_prompt_and_messages_is_refused_except_as_a_demonstration():
    row = {**SAID, "prompt": "another", "completion": "5"}
    for use in (rollout, template.prompt, lambda tokens, row: rows.prompts(tokens, "online", most=99)(row)):
        with pytest.raises(ValueError, match="needs either 'prompt' or 'messages'"):
            use(CHAT, row)
    assert probe.prompt(CHAT, [row], 1024) == ()
    assert tokenizer.supervised(CHAT, row) == tokenizer.supervised(CHAT, {**SAID, "completion": "5"})


def test_a_character_without_a_token_is_refused_everywhere():
    sums = tokenizer.character("0123456789+")
    for use in (rollout, template.prompt, lambda tokens, row: tokenizer.supervised(tokens, {**row, "completion": "5"})):
        with pytest.raises(ValueError, match="no token for 'é' in '2é'"):
            use(sums, {"prompt": "2é"})


def test_tool_calls_may_replace_the_content_of_a_message():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [*SAID["messages"], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "5"}]
    with pytest.raises(ValueError, match="tool_calls: this model's chat template does not show them"):
        template.prompt(CHAT, {"messages": messages})
    tokens = tokenizer.byte_level()
    names = "message['content'] + (message.tool_calls or []) | map(attribute='function.name') | join"
    tokens.chat_template = CHAT.chat_template.replace("message['content']", names)
    shown = tokens.decode(template.prompt(tokens, {"messages": messages}))
    assert shown.count("<|im_start|>") == 4 and "assistant\nadd<|im_end|>" in shown


def test_variables_of_the_chat_template():
    tokens = tokenizer.byte_level()
    tokens.chat_template = CHAT.chat_template + "{% if not enable_thinking | default(true) %}<think></think>{% endif %}"
    template.check_variables(tokens, {"enable_thinking": False})
    for bad, words in (
        ({"enable_thinkin": False}, "not a variable to set: this model's chat template reads enable_thinking"),
        ({"message": "x"}, "not a variable to set"),  # the template sets it
        ({"messages": "x"}, "not a variable to set"),
        ({"chat_template": "{{ 1 }}"}, "not a variable to set"),
        ({"enable_thinking": [1]}, "a scalar"),
    ):
        with pytest.raises(ValueError, match=words):
            template.check_variables(tokens, bad)
    tokens.chat_template = "{% if %}"
    with pytest.raises(ValueError, match="the chat template is not valid"):
        template.check_variables(tokens, {"enable_thinking": False})


@pytest.mark.parametrize(
    "chat_template",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% if x %}" * 2000 + "{% endif %}" * 2000,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
)
def test_a_template_that_recurses_is_refused(chat_template):
    tokens = tokenizer.byte_level()
    tokens.chat_template = chat_template
    with pytest.raises(ValueError, match="recursion") as error:
        template.prompt(tokens, {"prompt": "a"})
    assert "\n" not in str(error.value)
    assert tokenizer.stop_ids(tokens) == (tokens.eos_token_id,)


def test_a_template_that_needs_tools_takes_rows_and_requests_with_tools():
    """As the one that Hermes 2 Pro and Command R+ have for tools."""
    tokens = tokenizer.byte_level()
    tokens.chat_template = (
        "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    said = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    wanted = tokens.apply_chat_template(said, tools=tools, tokenize=False, add_generation_prompt=True)
    assert template.prompted(tokens, {"messages": said, "tools": tools}).text == wanted
    assert ask.render(tokens, ask.Ask(body={}, messages=said, tools=tools)) == wanted
    assert tokenizer.end_of_turn(tokens) == tokens.eos_token_id
    with pytest.raises(ValueError, match="the chat template refuses them"):
        template.prompted(tokens, {"messages": said})


def test_calls_are_refused_where_the_template_for_conversations_without_tools_leaves_them_out():
    """A tokenizer with two chat templates, as Hermes 2 Pro's: of these the row's tools choose one."""
    tokens, plain = tokenizer.byte_level(), tokenizer.byte_level().chat_template
    called = (
        "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|im_end|>\n{% endfor %}"
    )
    tokens.chat_template = {"default": plain, "tool_use": called}
    function = {"name": "f", "arguments": {"a": "b"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    said = [{"role": "user", "content": "a"}, call, {"role": "tool", "content": "c"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    text = {**call, "tool_calls": [{**call["tool_calls"][0], "function": {**function, "arguments": '{"a": "b"}'}}]}
    asked = ask.Ask(body={}, messages=[said[0], text, said[2]], tools=tools)
    wanted = tokens.apply_chat_template(said, tools=tools, tokenize=False, add_generation_prompt=True)
    assert template.prompted(tokens, {"messages": said, "tools": tools}).text == wanted == ask.render(tokens, asked)
    for render in (
        lambda: template.prompted(tokens, {"messages": said}),
        lambda: ask.render(tokens, dataclasses.replace(asked, tools=())),
        lambda: tokenizer.supervised(tokens, {"messages": [*said, {"role": "assistant", "content": "d"}]}),
    ):
        with pytest.raises(ValueError, match="tool_calls: this model's chat template does not show them"):
            render()
