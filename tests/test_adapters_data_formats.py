"""Converts records of every format to rows; other records give a one-line error."""

import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areax.adapters.data import formats

SYSTEM = {"role": "system", "content": "Be brief"}
USER = {"role": "user", "content": "Hi"}
SAID, BETTER = ({"role": "assistant", "content": text} for text in ("Ho", "Hello"))
READS = [
    (formats.chat, {"messages": [USER, {**SAID, "name": None}], "id": 1}, {"messages": [USER, SAID], "id": 1}),
    (
        formats.prompt_answer,
        {"question": "1+1", "answer": "2", "level": 3},
        {"question": "1+1", "prompt": "1+1", "answer": "2", "completion": "2", "level": 3},
    ),
    (
        formats.prompt_answer,
        {"problem": "1+1", "solution": "It is 2.", "answer": "2"},
        {"problem": "1+1", "prompt": "1+1", "answer": "2", "completion": "It is 2.", "solution": "It is 2."},
    ),
    (
        formats.prompt_answer,
        {"problem": "1+1", "answer": "2"},
        {"problem": "1+1", "prompt": "1+1", "answer": "2", "completion": "2"},
    ),
    (
        formats.prompt_answer,
        {"query": "1+1", "response": "2"},
        {"query": "1+1", "response": "2", "prompt": "1+1", "answer": "2", "completion": "2"},
    ),
    (formats.prompt_answer, {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b", "answer": "b"}),
    (
        formats.instruction,
        {"instruction": "Add", "input": "1, 1", "output": "2"},
        {"prompt": "Add\n\n1, 1", "completion": "2"},
    ),
    (formats.instruction, {"instruction": "Sing", "input": "", "output": "La"}, {"prompt": "Sing", "completion": "La"}),
    (
        formats.instruction,
        {"instruction": "Sing", "output": "La", "system": "Be brief.", "history": [["Hum", "Mm"]]},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hum"},
                {"role": "assistant", "content": "Mm"},
                {"role": "user", "content": "Sing"},
            ],
            "completion": "La",
        },
    ),
    (formats.instruction, {"instruction": "Hum", "output": "", "id": 4}, {"prompt": "Hum", "completion": "", "id": 4}),
    (
        formats.sharegpt,
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}], "system": "Be brief"},
        {"messages": [SYSTEM, USER, SAID]},
    ),
    (
        formats.preference,
        {"prompt": "Hi", "chosen": "Hello", "rejected": "Ho", "margin": 2},
        {"prompt": "Hi", "chosen": "Hello", "rejected": "Ho", "margin": 2},
    ),
    (
        formats.preference,
        {"prompt": [SYSTEM, USER], "chosen": "Hello", "rejected": "Ho"},
        {"messages": [SYSTEM, USER], "chosen": "Hello", "rejected": "Ho"},
    ),
    (  # whole conversations
        formats.preference,
        {"chosen": [SYSTEM, USER, BETTER], "rejected": [SYSTEM, USER, SAID]},
        {"messages": [SYSTEM, USER], "chosen": "Hello", "rejected": "Ho"},
    ),
    (  # the prompt in its own field, as messages
        formats.preference,
        {"prompt": [SYSTEM, USER], "chosen": [BETTER], "rejected": [SAID]},
        {"messages": [SYSTEM, USER], "chosen": "Hello", "rejected": "Ho"},
    ),
    (  # ... as text
        formats.preference,
        {"prompt": "Hi", "chosen": [BETTER], "rejected": [SAID]},
        {"messages": [USER], "chosen": "Hello", "rejected": "Ho"},
    ),
    (  # ... and repeated in both conversations, as in UltraFeedback
        formats.preference,
        {"prompt": "Hi", "chosen": [USER, BETTER], "rejected": [USER, SAID], "messages": [USER, BETTER]},
        {"messages": [USER], "chosen": "Hello", "rejected": "Ho"},
    ),
    (
        formats.hh_rlhf,
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: Ho"},
        {"messages": [USER], "chosen": "Hello", "rejected": "Ho"},
    ),
    (
        formats.hh_rlhf,
        {
            "chosen": "\n\nHuman: Hi\n\nAssistant: Ho\n\nHuman: Say:\n\nyes\n\nAssistant: yes\n\nyes",
            "rejected": "\n\nHuman: Hi\n\nAssistant: Ho\n\nHuman: Say:\n\nyes\n\nAssistant:",
        },
        {"messages": [USER, SAID, {"role": "user", "content": "Say:\n\nyes"}], "chosen": "yes\n\nyes", "rejected": ""},
    ),
]  # fmt: skip


@pytest.mark.parametrize("read, record, row", READS)
def test_a_record_becomes_a_row(read, record, row):
    before = repr(record)
    assert read(record) == row and repr(record) == before


@pytest.mark.parametrize("read, record, row", [case for case in READS if case[0] is not formats.hh_rlhf])
def test_a_format_is_recognised_by_its_fields(read, record, row):
    if "messages" in record and read is not formats.chat:
        with pytest.raises(ValueError, match="chat and preference are possible; name one as --row"):
            formats.auto(record)
    else:
        assert formats.auto({**record, "conversation_id": None, "conversations": record.get("conversations")}) == {
            **row, "conversation_id": None, **({} if "conversations" in record else {"conversations": None})
        }  # fmt: skip


def test_the_ground_truth_of_verl_is_the_answer_unless_there_is_one():
    judged = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "2"}}
    record = {"prompt": [USER], **judged}
    assert formats.recognised(record).endswith(":conversational")
    assert formats.conversational(record) == {"messages": [USER], "answer": "2", **judged}
    assert formats.conversational({**record, "answer": "3"})["answer"] == "3"


def test_unusable_hh_rlhf_pairs_are_skipped():
    same = "\n\nHuman: Hi\n\nAssistant: Ho"
    assert formats.hh_rlhf({"chosen": same, "rejected": same}) is None
    assert formats.hh_rlhf({"chosen": same, "rejected": f"{same}\n\nHuman: So?\n\nAssistant: No"}) is None
    assert formats.hh_rlhf({"chosen": same, "rejected": "\n\nHuman: He\n\nAssistant: Ho"}) is None


@pytest.mark.parametrize(
    "read, record, message",
    [
        (formats.chat, {"text": 1}, r"chat: a record needs 'messages' as a list .*, got the fields \['text'\]"),
        (formats.chat, {"messages": []}, "'messages' as a list of messages"),
        (formats.chat, {"messages": [{"role": "user", "content": None}]}, "strings 'role' and 'content'"),
        (
            formats.prompt_answer,
            {"question": "1"},
            r"exactly one of question/answer, .*, got the fields \['question'\]",
        ),
        (formats.prompt_answer, {"question": "1", "answer": 1}, "needs the texts of exactly one"),
        (formats.prompt_answer, {"question": "", "answer": "", "prompt": "", "completion": ""}, "exactly one of"),
        (
            formats.prompt_answer,
            {"question": "Which?", "answer": "b", "choices": ["a", "b"]},
            "'choices' would not be in the prompt, got .*--row of your own",
        ),
        (formats.instruction, {"instruction": "1"}, r"'instruction' and 'output'.*, got the fields \['instruction'\]"),
        (formats.instruction, {"instruction": "1", "output": "2", "input": 3}, "optionally 'input'"),
        (formats.instruction, {"instruction": "1", "output": "2", "history": ["3"]}, "'history' as a list of pairs"),
        (formats.sharegpt, {"messages": [USER]}, r"needs 'conversations' .*, got the fields \['messages'\]"),
        (formats.sharegpt, {"conversations": [USER]}, r"\(found {'role': 'user', 'content': 'Hi'}\)"),
        (
            formats.sharegpt,
            {"conversations": [{"from": "bird", "value": "x"}]},
            r"'from' one of .*found {'from': 'bird'",
        ),
        (formats.preference, {"chosen": "a", "rejected": "b"}, r"transcripts: hh_rlhf.* got the fields \['chosen', "),
        (formats.preference, {"chosen": [USER, SAID]}, "needs 'rejected' as a list of messages"),
        (formats.preference, {"chosen": [USER, SAID], "rejected": [USER, SAID]}, "differ only in the assistant's last"),
        (
            formats.preference,
            {"chosen": [USER, SAID, USER, SAID], "rejected": [USER, BETTER]},
            "only in the assistant's last message",
        ),
        (formats.preference, {"chosen": [USER], "rejected": [SYSTEM]}, "only in the assistant's last message"),
        (formats.preference, {"chosen": [SAID], "rejected": [BETTER]}, "only in the assistant's last message"),
        (formats.hh_rlhf, {"chosen": "Hi", "rejected": "Ho"}, r"hh_rlhf: .*start with '.n.nHuman:', got the fields"),
        (formats.auto, {"text": "a"}, r"auto: .*known are chat, prompt_answer, .* got the fields \['text'\]"),
        (formats.auto, {"problem": "a", "solution": "b", "messages": []}, "chat and prompt_answer are possible"),
    ],
)
def test_records_of_other_formats_are_refused_in_one_line(read, record, message):
    with pytest.raises(ValueError, match=message) as error:
        read(record)
    assert "\n" not in str(error.value)


FORMATS = "areax.adapters.data.formats:"
GSM8K = {"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}
MATH = {"problem": "1+1?", "solution": "It is \\boxed{2}.", "level": "Level 1", "type": "Algebra"}


@pytest.mark.parametrize(
    ("record", "row"),
    [
        (GSM8K, "areax.rollout.tasks.gsm8k:row"),
        (MATH, "areax.rollout.tasks.competition_math:row"),
        ({"question": "1+1?", "answer": "2"}, f"{FORMATS}prompt_answer"),
        ({"problem": "1+1?", "answer": "2"}, f"{FORMATS}prompt_answer"),
        ({"problem": "1+1?", "solution": "2", "answer": "2"}, f"{FORMATS}prompt_answer"),
        ({"query": "1+1?", "response": "2", "prompt": None}, f"{FORMATS}prompt_answer"),
        ({"instruction": "Add", "input": "1, 1", "output": "2"}, f"{FORMATS}instruction"),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, f"{FORMATS}sharegpt"),
        ({"prompt": [USER]}, f"{FORMATS}conversational"),
        ({"prompt": [USER], "completion": [SAID], "answer": "2"}, f"{FORMATS}conversational"),
        ({"prompt": [USER], "chosen": [SAID], "rejected": [BETTER]}, f"{FORMATS}preference"),
        ({"chosen": [USER, SAID], "rejected": [USER, BETTER]}, f"{FORMATS}preference"),
        (
            {"chosen": "\n\nHuman: Hi\n\nAssistant: Ho", "rejected": "\n\nHuman: Hi\n\nAssistant: Oh"},
            f"{FORMATS}hh_rlhf",
        ),
        ({"prompt": "1+1", "completion": "2"}, ""),
        ({"prompt": "1+1", "question": "1+1", "answer": "2"}, ""),
        ({"messages": [USER, SAID]}, ""),
        ({"messages": [USER], "chosen": [SAID], "rejected": [BETTER]}, ""),
        ({"text": "a"}, None),
        ({}, None),
        ({"chosen": "a", "rejected": "b"}, None),
        ({"question": "a", "answer": "b", "instruction": "c", "output": "d"}, None),
    ],
)
def test_the_function_that_reads_a_record_is_recognised(record, row):
    assert formats.recognised(record) == row
    if row:  # and it does read it
        module, _, name = row.partition(":")
        made = getattr(importlib.import_module(module), name)(record)
        assert made.get("prompt") or made.get("messages")


def test_what_else_turns_in_sharegpt_have_is_kept():
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho", "weight": 0}]
    assert formats.sharegpt({"conversations": turns})["messages"] == [USER, {**SAID, "weight": 0}]
    turns[1] |= {"thinking": "Hm.", "training": False}
    assert formats.sharegpt({"conversations": turns})["messages"][1] == {
        **SAID, "weight": 0, "thinking": "Hm.", "training": False
    }  # fmt: skip


def test_conversations_of_trl():
    assert formats.conversational({"prompt": [USER], "completion": [SAID], "id": 1}) == {
        "messages": [USER], "completion": "Ho", "id": 1,
    }  # fmt: skip
    assert formats.conversational({"prompt": [USER], "answer": "2"}) == {"messages": [USER], "answer": "2"}
    with pytest.raises(ValueError, match="conversational: a record needs one assistant message as its 'completion'"):
        formats.conversational({"prompt": [USER], "completion": [SAID, USER, SAID]})


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": TEXTS}), min_size=1
)


@given(MESSAGES, st.none() | TEXTS)
def test_conversations_round_trip_through_sharegpt(messages, system):
    spoken = {"user": "human", "assistant": "gpt", "tool": "observation"}
    turns = [{"from": spoken[message["role"]], "value": message["content"]} for message in messages]
    said = [{"role": "system", "content": system}] if system else []
    row = formats.sharegpt({"conversations": turns, "system": system, "id": 7})
    assert row == {"messages": said + messages, "id": 7} == formats.chat(row)


@given(MESSAGES, TEXTS, TEXTS)
def test_pairs_round_trip_through_conversations(messages, chosen, rejected):
    sides = {
        name: [*messages, {"role": "assistant", "content": text}]
        for name, text in (("chosen", chosen), ("rejected", rejected))
    }
    if chosen == rejected:
        with pytest.raises(ValueError, match="only in the assistant's last message"):
            formats.preference(sides)
        return
    row = {"messages": messages, "chosen": chosen, "rejected": rejected}
    assert formats.preference(sides) == row == formats.auto(sides)
    assert formats.preference({"prompt": messages, **{name: side[-1:] for name, side in sides.items()}}) == row


WORDS = st.text("ab :\n", max_size=12).map(str.strip).filter(lambda text: "\n\n" not in text)


@given(st.lists(st.tuples(WORDS, WORDS), max_size=3), WORDS, WORDS, WORDS)
def test_transcripts_round_trip_through_hh_rlhf(turns, asked, chosen, rejected):
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    messages.append({"role": "user", "content": asked})
    name = {"user": "Human", "assistant": "Assistant"}
    shown = "".join(f"\n\n{name[m['role']]}: {m['content']}" for m in messages)
    record = {"chosen": f"{shown}\n\nAssistant: {chosen}", "rejected": f"{shown}\n\nAssistant: {rejected}"}
    wanted = {"messages": messages, "chosen": chosen, "rejected": rejected} if chosen != rejected else None
    assert formats.hh_rlhf(record) == wanted
