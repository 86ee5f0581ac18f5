"""Loss masks of conversations, compared with pieces written out by hand, for several styles of template."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from areax.adapters import tokenizer
from areax.adapters.data import chat_sft
from areax.rollout.chat.template import prompt as prompt_ids
from areax.rollout.chat.template import render

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (  # in the style of Llama 3
    "{{ '<|begin|>' }}"
    "{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
THINKING = (  # shows reasoning only after the last user message
    "{% set last = namespace(at=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{BEGIN}"
    "{% if loop.index0 > last.at %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1].lstrip() }}{% endif %}"
    "<|im_end|>{END}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPPING = THINKING.replace("{BEGIN}", "").replace("{END}", "")
MARKED = THINKING.replace("{BEGIN}", "{% generation %}").replace("{END}", "{%- endgeneration -%}")
TOLD = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "<think>one</think> 2"},
    {"role": "user", "content": " 2+2 "},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "<think>two</think>\né"},
    {"role": "user", "content": "Thanks"},
]
CHATML = [  # (text, whether it is trained on), up to the end of the last answer
    ("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n", False),
    ("<think>one</think> 2<|im_end|>", True),
    (
        "\n<|im_start|>user\n 2+2 <|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n",
        False,
    ),
    ("<think>two</think>\né<|im_end|>", True),
]
CASES = {
    "ours": (tokenizer.CHAT_TEMPLATE, CHATML),
    "chatml": (PLAIN, CHATML),
    "headers": (
        HEADERS,
        [
            (
                "<|begin|><|header|>system<|/header|>\n\nAdd.<|eot|><|header|>user<|/header|>\n\n1+1<|eot|>"
                "<|header|>assistant<|/header|>\n\n",
                False,
            ),
            ("<think>one</think> 2<|eot|>", True),
            (
                "<|header|>user<|/header|>\n\n2+2<|eot|><|header|>tool<|/header|>\n\n4<|eot|>"
                "<|header|>assistant<|/header|>\n\n",
                False,
            ),
            ("<think>two</think>\né<|eot|>", True),
        ],
    ),
    "marked": (
        MARKED,
        [
            (CHATML[0][0], False),
            ("2<|im_end|>", True),
            (CHATML[2][0], False),
            ("é<|im_end|>", True),
        ],
    ),
}


def made(template, base=None):
    tokens = base or tokenizer.byte_level()
    tokens.add_special_tokens({"additional_special_tokens": ["<|begin|>", "<|header|>", "<|/header|>", "<|eot|>"]})
    tokens.chat_template = template
    return tokens


def runs(tokens, ids, mask):
    """(text, whether it is trained on) for each run of equal mask values."""
    out: list = []
    for id, learnt in zip(ids, mask, strict=True):
        if not out or out[-1][1] != learnt:
            out.append(([], learnt))
        out[-1][0].append(id)
    return [(tokens.decode(run), learnt) for run, learnt in out]


@pytest.mark.parametrize("name", CASES)
def test_exactly_the_answers_are_trained_on(name):
    template, wanted = CASES[name]
    tokens = made(template)
    ids, mask = chat_sft.demonstration(tokens, {"messages": TOLD}, "all")
    assert runs(tokens, ids, mask) == wanted
    pieces = [tokens.encode(text, add_special_tokens=False) for text, _ in wanted]
    assert ids == sum(pieces, [])
    assert mask == [learnt for piece, (_, learnt) in zip(pieces, wanted, strict=True) for _ in piece]
    whole = tokens.apply_chat_template(TOLD, return_dict=False)
    assert whole[: len(ids)] == ids  # the rest is the user message after the last answer


@pytest.mark.parametrize("template", [tokenizer.CHAT_TEMPLATE, MARKED])
def test_generation_blocks_give_the_same_mask_as_in_transformers(template):
    tokens = made(template)
    theirs = tokens.apply_chat_template(TOLD, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = chat_sft.demonstration(tokens, {"messages": TOLD}, "all")
    assert theirs["input_ids"][: len(ids)] == ids
    assert theirs["assistant_masks"] == [*map(int, mask)] + [0] * (len(theirs["input_ids"]) - len(ids))


def test_the_generation_block_in_our_template_changes_no_text():
    ours, plain = made(tokenizer.CHAT_TEMPLATE), made(PLAIN)
    for prompt in (True, False):
        for end in range(1, len(TOLD) + 1):
            show = lambda tokens: tokens.apply_chat_template(TOLD[:end], add_generation_prompt=prompt, tokenize=False)  # noqa: B023
            assert show(ours) == show(plain)


def test_a_template_that_rewrites_history_is_refused():
    tokens = made(STRIPPING)
    with pytest.raises(ValueError, match="renders message 2 differently once others follow") as error:
        chat_sft.demonstration(tokens, {"messages": TOLD}, "all")
    assert "\n" not in str(error.value)
    kept = [{**m, "content": m["content"].split("</think>")[-1].strip()} for m in TOLD]  # nothing to rewrite
    found = runs(tokens, *chat_sft.demonstration(tokens, {"messages": kept}, "all"))
    assert [text for text, learnt in found if learnt] == ["2<|im_end|>", "é<|im_end|>"]
    last = TOLD[:6]
    ids, mask = chat_sft.demonstration(tokens, {"messages": last}, "last")
    assert runs(tokens, ids, mask)[-1] == ("<think>two</think>\né<|im_end|>", True)


SAID = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=8)
TALK = st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), SAID), max_size=6)


@given(TALK, st.sampled_from([tokenizer.CHAT_TEMPLATE, PLAIN]), st.sampled_from(["bytes", "merges"]))
def test_each_answer_follows_the_prompt_that_generates_it(talk, template, kind):
    tokens = MADE[kind]
    tokens.chat_template = template
    messages = [{"role": role, "content": said} for role, said in [("user", "?"), *talk, ("assistant", "!")]]
    ids, mask = chat_sft.demonstration(tokens, {"messages": messages}, "all")
    starts = [i for i, learnt in enumerate(mask) if learnt and not mask[i - 1]]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(starts) == len(answers) and mask[-1]
    for start, i in zip(starts, answers, strict=True):
        assert tokens.decode(ids[:start]) == render(tokens, messages[:i], (), {}, ask=True)
        end = mask.index(False, start) if False in mask[start:] else len(mask)
        assert tokens.decode(ids[start:end]) == messages[i]["content"] + "<|im_end|>"
    if kind == "bytes" and len(answers) == 1:
        prompt, completion = tokenizer.supervised(tokens, {"messages": messages})
        assert (ids, mask) == ([*prompt, *completion], [False] * len(prompt) + [True] * len(completion))


def merges():
    """A byte-level tokenizer with two merges: two newlines and `+1` are one token each."""
    base = tokenizer.byte_level()
    said = json.loads(base.backend_tokenizer.to_str())
    for pair in (["Ċ", "Ċ"], ["+", "1"]):
        said["model"]["merges"].append(pair)
        said["model"]["vocab"]["".join(pair)] = len(base) + len(said["model"]["merges"]) - 1
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(said)), pad_token="<pad>", eos_token="<|im_end|>"
    )


MADE = {"bytes": tokenizer.byte_level(), "merges": merges()}


@pytest.mark.parametrize("template", [tokenizer.CHAT_TEMPLATE, PLAIN])
def test_no_token_spans_a_prompt_and_an_answer(template):
    tokens = merges()
    tokens.chat_template = template
    assert len(tokens.encode("\n\n")) == 1
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "\n2"}] * 2
    ids, mask = chat_sft.demonstration(tokens, {"messages": messages}, "all")
    prompt = prompt_ids(tokens, {"messages": messages[:1]})
    assert ids[: len(prompt)] == prompt and mask.index(True) == len(prompt)
    assert ids[len(prompt) : len(prompt) + 3] == [*tokens.encode("\n"), *tokens.encode("2"), tokens.eos_token_id]
    assert [text for text, learnt in runs(tokens, ids, mask) if learnt] == ["\n2<|im_end|>"] * 2
    assert tokens.apply_chat_template(messages, return_dict=False)[: len(ids)] != ids  # these do span


def test_an_answer_is_not_encoded_as_the_start_of_a_text():
    """A tokenizer that prepends a mark to each text would put one before every answer encoded separately."""
    inner = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(["<s>", *"▁abcd"])}, merges=[]))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Replace("▁", " ")
    tokens = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<s>")
    tokens.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'a' + m.content }}{% else %}"
        "{% generation %}{{ m.content + '<s>' }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    said = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "b"}]
    ids, mask = chat_sft.demonstration(tokens, {"messages": [*said, {"role": "assistant", "content": "d"}]}, "all")
    assert tokens.convert_ids_to_tokens(ids) == ["▁", "a", "b", "c", "<s>", "▁", "a", "b", "d", "<s>"]
    assert [i for i, learnt in enumerate(mask) if learnt] == [3, 4, 8, 9]


def test_rows_with_a_prompt_and_a_completion():
    tokens = made(tokenizer.CHAT_TEMPLATE)
    row = {"prompt": "1+1", "completion": "2"}
    last, all_ = (chat_sft.demonstration(tokens, row, learn) for learn in ("last", "all"))
    assert last == all_ and runs(tokens, *last)[-1] == ("2<|im_end|>", True)
    longer = {"messages": TOLD, "completion": "Bye"}
    assert runs(tokens, *chat_sft.demonstration(tokens, longer, "all"))[-1] == ("Bye<|im_end|>", True)
    assert [learnt for _, learnt in runs(tokens, *chat_sft.demonstration(tokens, longer, "last"))] == [False, True]


@pytest.mark.parametrize(
    "template, messages, message",
    [
        (None, TOLD, "needs a chat template"),
        (PLAIN, TOLD[:2], "'messages' must have an answer of the assistant, got the roles .'system', 'user'."),
        (PLAIN, TOLD[2:3] + TOLD[:1], "an assistant message at the start is no answer"),
        (PLAIN.replace("<|im_end|>", ";"), TOLD, "must end the assistant's turn with '<.im_end.>'"),
        (
            "{{ raise_exception('no tools') }}{% generation %}{% endgeneration %}",
            TOLD,
            "the chat template refuses them .no tools.",
        ),
        (PLAIN, [{"role": "assistant"}], "a message needs a role and a content"),
    ],
)
def test_conversations_that_cannot_be_trained_on_are_refused_in_one_line(template, messages, message):
    tokens = made(template)
    with pytest.raises(ValueError, match=message) as error:
        chat_sft.demonstration(tokens, {"messages": messages}, "all")
    assert "\n" not in str(error.value)


def test_unknown_characters_are_refused():
    sums = tokenizer.character("0123456789+")
    with pytest.raises(ValueError, match="no token for 'é' in '2é'"):
        chat_sft.demonstration(
            sums, {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2é"}]}, "all"
        )


def test_unknown_characters_of_calls_and_tools_are_refused():
    sums = tokenizer.character("0123456789+")
    sums.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for x in c.function.arguments.values() %}{{ x }}"
        "{% endfor %}{% endfor %}{{ '<|im_end|>' if m.role == 'assistant' }}{% endfor %}"
    )
    row = lambda name, value: [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": {"1": value}}}]},
    ]
    for messages, tools in ((row("é", "1"), []), (row("1", "é"), []), (row("1", "1"), [{"function": {"name": "é"}}])):
        with pytest.raises(ValueError, match="no token for 'é' in 'é'"):
            chat_sft.demonstration(sums, {"messages": messages, "tools": tools})
