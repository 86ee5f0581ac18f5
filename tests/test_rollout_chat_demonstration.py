"""Real chat templates, those that TRL has: prompts equal those of transformers, masks the marks of TRL's own templates.

Where they differ, `DIFFERENT` and docs/recipes.md say who is right.
"""

import importlib.util
import json
import os.path
import re
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from areax.adapters import tokenizer
from areax.adapters.data import chat_sft
from areax.rollout.chat import template
from areax.rollout.chat.api import ask, openai, responses

SPEC = importlib.util.find_spec("trl")
assert SPEC and SPEC.submodule_search_locations
FOLDER = Path(SPEC.submodule_search_locations[0]) / "chat_templates"
TEMPLATES = {file.stem: file.read_text() for file in sorted(FOLDER.glob("*.jinja"))}
SPECIAL = re.compile(
    r"<[|｜][^<>{}'\" \n]+[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start_of_turn|end_of_turn|end_of_utterance)>"
)

SYSTEM, USER, AGAIN = (
    {"role": role, "content": text} for role, text in (("system", "Be kind."), ("user", "Hi?"), ("user", "And now?"))
)
HELLO, BYE = ({"role": "assistant", "content": text} for text in ("Hello you.", "Good bye."))
THOUGHT, LEAVING = {**HELLO, "reasoning_content": "I greet."}, {**BYE, "reasoning_content": "I leave."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    ],
}
CALL_AS_TEXT = json.loads(json.dumps(CALL).replace('{"city": "Paris"}', json.dumps('{"city": "Paris"}')))
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "sun"}
PROPERTY = {"city": {"type": "string", "description": "Where."}}
PARAMETERS = {"type": "object", "properties": PROPERTY, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": PARAMETERS}}]
CONVERSATIONS = {
    "plain": ([USER, HELLO], []),
    "system": ([SYSTEM, USER, HELLO], []),
    "several": ([USER, HELLO, AGAIN, BYE], []),
    "call last": ([USER, CALL], TOOLS),
    "call": ([USER, CALL, RESULT, HELLO], TOOLS),
    "thought": ([USER, THOUGHT], []),
    "several thoughts": ([USER, THOUGHT, AGAIN, LEAVING], []),
}
# What TRL's templates do that the model's own do not: see the table in docs/recipes.md.
PATCHED = {"qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}  # earlier turns keep an empty thought
ENDS = {"phi3": "\n</s>", "phi3_5": "\n</s>", "glm4moe": "<|user|>", "diffusion_gemma": ""}  # and how TRL ends a turn


def made():
    tokens = tokenizer.byte_level()
    names = sorted({name for text in TEMPLATES.values() for name in SPECIAL.findall(text)})
    tokens.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": names})
    return tokens


TOKENS = made()


def in_parts(messages):
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def theirs(tokens, messages):
    """The messages as transformers' templates want them; GPT-OSS's and LFM2's read "thinking"."""
    named = [{**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in messages]
    return named if template.takes_texts(tokens) else in_parts(named)


def rendered(tokens, messages, tools, **more):
    """The text of transformers, or None if the template refuses."""
    try:
        return tokens.apply_chat_template(theirs(tokens, messages), tools=tools or None, tokenize=False, **more)
    except Exception:  # whatever templates raise
        return None


def one_line(function, *arguments):
    """What a function returns, or its ValueError as a text."""
    try:
        return function(*arguments)
    except ValueError as error:
        assert "\n" not in str(error)
        return str(error)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name):
    tokens = TOKENS
    tokens.chat_template = TEMPLATES[name]
    for messages, tools in CONVERSATIONS.values():
        asked = messages[:-1]
        wanted = rendered(tokens, asked, tools, add_generation_prompt=True)
        got = one_line(lambda row: template.prompted(tokens, row).text, {"messages": asked, "tools": tools})
        if tools and wanted == rendered(tokens, asked, [], add_generation_prompt=True):
            wanted = None
            assert "does not show them" in got or "refuses them" in got
        if CALL in asked and "Paris" not in (wanted or ""):
            wanted = None
        if wanted is None:
            assert "does not show them" in got or "refuses them" in got or (name == "deepseekv3" and asked[1:])
            continue
        assert got == wanted
        texts = [CALL_AS_TEXT if message is CALL else message for message in asked]
        nulls = [{"tool_calls": None, "thinking": None, **message} for message in in_parts(texts)]
        for given in (texts, nulls):
            row = {"messages": given, "tools": json.dumps(tools), "chat_template_kwargs": None}
            assert template.prompted(tokens, row).text == wanted
        request = ask.Ask(body={}, messages=openai.messages({"messages": texts}), tools=tools)
        assert ask.render(tokens, request) == wanted


def test_calls_that_a_template_leaves_out_are_refused_in_rows_and_requests():
    """Without its calls, an earlier turn is empty, and the results answer nothing."""
    call = {**CALL_AS_TEXT, "content": None}
    asked, refused = [USER, call, RESULT, HELLO, AGAIN], set()
    for name, text in TEMPLATES.items():
        TOKENS.chat_template = text
        row = one_line(lambda row: template.prompted(TOKENS, row).text, {"messages": asked})
        request = ask.Ask(body={}, messages=openai.messages({"messages": asked}))
        assert one_line(ask.render, TOKENS, request) == row
        assert "Paris" in row or "refuses them" in row or "does not show them" in row, name
        refused |= {name.removesuffix("_training")} if "does not show them" in row else set()
    assert refused == {
        "cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next",
        "phi3", "phi3_5", "qwen2_5_vl", "smolvlm",
    }  # fmt: skip


def test_an_answer_that_ends_its_turn_itself_is_the_same_in_rows_and_requests():
    for name, text in TEMPLATES.items():
        TOKENS.chat_template = text
        said = {**HELLO, "content": HELLO["content"] + template.closing(TOKENS)}
        wanted = rendered(TOKENS, [USER, HELLO, AGAIN], [], add_generation_prompt=True)
        request = ask.Ask(body={}, messages=openai.messages({"messages": [USER, said, AGAIN]}))
        assert one_line(ask.render, TOKENS, request) == wanted, name


def test_thoughts_in_several_items_are_joined():
    items = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in ("I greet.", "Hi.")
    ]
    said = {"type": "message", "role": "assistant", "content": "Hello you."}
    assert responses._messages([*items, said]) == [{**HELLO, "reasoning_content": "I greet.\nHi."}]


def test_parts_of_text_are_joined_alike_in_rows_and_requests():
    """As templates that read parts write them: without anything in between."""
    said = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("What is ", "2+2?")]}]
    items = [{**part, "type": "input_text"} for part in said[0]["content"]]
    for name in ("llama3", "gemma3", "qwen3", "qwen3_5_think"):
        TOKENS.chat_template = TEMPLATES[name]
        wanted = rendered(TOKENS, [{"role": "user", "content": "What is 2+2?"}], [], add_generation_prompt=True)
        assert template.prompted(TOKENS, {"messages": said}).text == wanted
        asked = responses._messages([{"type": "message", "role": "user", "content": items}])
        for messages in (openai.messages({"messages": said}), asked):
            assert ask.render(TOKENS, ask.Ask(body={}, messages=messages)) == wanted


def runs(tokens, ids, mask):
    """[(text, whether it is learnt), ...]"""
    out = []
    for id, learnt in zip(ids, mask, strict=True):
        if not out or out[-1][1] != learnt:
            out.append(([], learnt))
        out[-1][0].append(id)
    return [(tokens.decode(ids), learnt) for ids, learnt in out]


def characters(runs):
    """(text, a character for each: "1" = learnt) up to the last that is learnt."""
    text, mask = ("".join(x) for x in zip(*((text, "01"[learnt] * len(text)) for text, learnt in runs), strict=True))
    end = mask.rfind("1") + 1
    return text[:end], mask[:end]


def marked(tokens, messages, tools):
    """(text, mask) by the marks of the tokenizer's template."""
    special = {name: token for name, token in tokens.special_tokens_map.items() if isinstance(token, str)}
    [text], [spans] = render_jinja_template(
        conversations=[theirs(tokens, messages)], tools=tools or None, chat_template=tokens.chat_template,
        return_assistant_tokens_mask=True, **special,
    )  # fmt: skip
    mask = ["0"] * len(text)
    for a, b in spans:
        mask[a:b] = "1" * (b - a)
    end = "".join(mask).rfind("1") + 1
    return text[:end], "".join(mask[:end])


def last(text, mask):
    """Without what is learnt of earlier turns."""
    start = mask.rstrip("1")
    return text, "0" * len(start) + mask[len(start) :]


def refused_rightly(tokens, why, messages, tools, learn):
    """Whether transformers shows the same reason for which a row is refused."""
    whole = rendered(tokens, messages, tools)
    if "refuses them" in why or "does not show them" in why:
        return whole is None or whole == rendered(tokens, messages, []) or "Paris" not in whole
    if "leaves out" in why:
        [part] = re.findall("leaves out '(.*?)' of", why)
        asked = rendered(tokens, messages[:-1], tools, add_generation_prompt=True)
        return part not in whole[len(os.path.commonprefix([asked, whole])) :]
    if "differently once others follow" in why:
        ends = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        parts = [rendered(tokens, messages[: i + 1], tools) for i in ends]
        return learn == "all" and not all(whole.startswith(part.rstrip()) for part in parts)
    return "must end the assistant's turn" in why and learn == "all" and tokens.chat_template == TEMPLATES["glm4moe"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_are_the_marks_of_trl(name):
    """Ours are part of TRL's. What TRL learns besides is the line break behind a turn's end, which no generation
    samples, and what the generation prompt has of a turn already."""
    tokens = TOKENS
    for messages, tools in CONVERSATIONS.values():
        for learn in ("all", "last"):
            tokens.chat_template = TEMPLATES[name]
            got = one_line(chat_sft.demonstration, tokens, {"messages": messages, "tools": tools}, learn)
            if isinstance(got, str):
                assert refused_rightly(tokens, got, messages, tools, learn), got
                continue
            text, mask = characters(runs(tokens, *got))
            prompts = [rendered(tokens, messages[:i], tools, add_generation_prompt=True) for i in range(1, 4)]
            if f"{name}_training" in TEMPLATES:
                tokens.chat_template = TEMPLATES[f"{name}_training"]
            if not template.GENERATION.search(tokens.chat_template):
                assert text == rendered(tokens, messages, tools).rstrip()[: len(text)] and mask.endswith("1")
                continue
            wanted, marks = marked(tokens, messages, tools)
            wanted, marks = last(wanted, marks) if learn == "last" else (wanted, marks)
            if name in PATCHED and wanted.rstrip() != text:
                assert learn == "last"  # what is learnt is the same, but not what is before
                assert wanted[marks.find("1") :].rstrip().endswith(text[mask.find("1") :])
                continue
            if name in ENDS:
                cut = text.removesuffix("</s>") if name == "glm4moe" else text
                assert wanted.startswith(cut) or name == "diffusion_gemma"
                assert wanted.removeprefix(cut).strip() in {ENDS[name].strip(), "", "<|observation|>"} or tools
                continue
            assert text.rstrip() == wanted.rstrip()
            for found in re.finditer("1+", "".join("01"[a < b] for a, b in zip(mask, marks, strict=False))):
                more, before = text[slice(*found.span())], text[: found.end()]
                assert not more.strip() or any(p and p.startswith(before.rstrip("\n")) for p in prompts), (more, learn)
            assert not [1 for a, b in zip(mask, marks, strict=False) if a > b]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_learnt_ends_with_what_ends_completions(name):
    TOKENS.chat_template = TEMPLATES[name]
    special = template.special_tokens(TOKENS)
    for messages, tools in CONVERSATIONS.values():
        got = one_line(chat_sft.demonstration, TOKENS, {"messages": messages, "tools": tools}, "last")
        if isinstance(got, str) or (name == "diffusion_gemma_training" and messages[-1] is CALL):  # marks no end
            continue
        text = TOKENS.decode([id for id, learnt in zip(*got, strict=True) if learnt]).rstrip()
        ends = re.search("(?:" + "|".join(map(re.escape, special.values())) + r")*\Z", text)
        assert any(special[id] in ends[0] for id in tokenizer.stop_ids(TOKENS)), text[-80:]


def test_calls_may_have_an_end_of_their_own():
    found = {}
    for name, text in TEMPLATES.items():
        TOKENS.chat_template = text
        if (end := template.call_end(TOKENS)) not in template.closing(TOKENS):
            found.setdefault(end, set()).add(name.removesuffix("_training").split("_v")[0])
    assert found == {
        "<|call|>": {"gptoss"}, "<|observation|>": {"glm4moe"}, "<|tool_response>": {"gemma4", "diffusion_gemma"},
    }  # fmt: skip


INSIDE = "<think>\nI greet.\n</think>\n\nHello."
LEARNT = {  # (template, row) -> what is learnt
    ("qwen3", "Hello."): "<think>\n\n</think>\n\nHello.<|im_end|>",
    ("qwen3", INSIDE): INSIDE + "<|im_end|>",
    ("qwen3_5_think", "Hello."): "\n</think>\n\nHello.<|im_end|>",
    ("qwen3_5_think", INSIDE): "I greet.\n</think>\n\nHello.<|im_end|>",
    ("qwen3_5_nothink", "Hello."): "Hello.<|im_end|>",
    ("qwen3_5_nothink", INSIDE): "I greet.\n</think>\n\nHello.<|im_end|>",
    ("llama3", " Hello. \n"): "Hello.<|eot_id|>",
    ("llama3", "Hello.<|eot_id|>"): "Hello.<|eot_id|>",
    ("gemma", " Hello. \n"): "Hello.<end_of_turn>",
    ("gptoss", "Hello."): "<|channel|>final<|message|>Hello.<|return|>",
    ("deepseek_r1_distill", "Hello."): "Hello.<｜end▁of▁sentence｜>",
}


@pytest.mark.parametrize("learn", ["all", "last"])
def test_an_answer_is_learnt_as_the_template_writes_it(learn):
    for (name, said), wanted in LEARNT.items():
        TOKENS.chat_template = TEMPLATES[name]
        for row in (
            {"prompt": "Hi?", "completion": said},
            {"messages": [USER, {"role": "assistant", "content": said}]},
        ):
            ids, mask = chat_sft.demonstration(TOKENS, row, learn)
            assert TOKENS.decode([id for id, wanted in zip(ids, mask, strict=True) if wanted]) == wanted, name


def test_a_thought_that_the_template_drops_is_not_lost_unseen():
    TOKENS.chat_template = TEMPLATES["deepseek_r1_distill"]
    with pytest.raises(ValueError, match="leaves out 'I greet.' of the last message"):
        chat_sft.demonstration(TOKENS, {"prompt": "Hi?", "completion": INSIDE}, "last")
