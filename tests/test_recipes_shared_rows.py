"""Rows are tokenised many at once, and their tokens, samples and errors are those of rows one after the other."""

import json

import pytest
import tiny

from areax.adapters import tokenizer
from areax.adapters.data import chat_sft
from areax.recipes.shared import offline, rows
from areax.rollout.chat import template

ASKED = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(5)]
BAD = [{"prompt": "a \ud800"}, {"answer": "1"}, {"messages": [{"role": "assistant", "content": "a"}]}]
MERGED = ["\n ", "1 ", "+ 1"]  # tokens, of which the first spans the start of an answer


def merging():
    """A tokenizer with tokens of several characters."""
    tokens = tokenizer.byte_level()
    tokens.add_tokens(MERGED)
    return tokens


def encoded_alone(tokens, texts):
    return [tokens.encode(text, add_special_tokens=False) for text in texts]


def shown(made):
    """An error's text, or tokens and mask."""
    return str(made) if isinstance(made, ValueError) else (made.tokens.tolist(), made.mask.tolist())


@pytest.mark.parametrize("tokens", [merging(), tokenizer.character("0123456789 +=")], ids=["merging", "character"])
def test_prompts_together_are_those_of_each_alone(tokens, monkeypatch):
    asked = [*ASKED, *BAD, ASKED[0], {"prompt": "é"}]  # the last: no token of `character`
    together = template.prompted_together(tokens, asked)
    monkeypatch.setattr(template, "encoded_together", encoded_alone)
    for row, made in zip(asked, together, strict=True):
        try:
            assert made == template.prompted(tokens, row)
        except ValueError as error:
            assert str(made) == str(error)
    assert sum(isinstance(made, ValueError) for made in together) == len(BAD) + (tokens.unk_token_id is not None)


@pytest.mark.parametrize("learn", ["last", "all"])
def test_samples_together_are_those_of_each_alone(learn, monkeypatch):
    tokens, said = merging(), {"role": "assistant", "content": " 2"}
    tokens.chat_template = tokens.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    talk = [{"role": "user", "content": "1 + 1"}, said, {"role": "user", "content": "2 + 1"}, {**said, "content": "3"}]
    shown_rows = [{**row, "completion": f" {row['answer']}"} for row in ASKED]
    shown_rows += [{"messages": talk}, {"messages": talk[:1]}, shown_rows[0], *BAD]
    together = chat_sft.samples(tokens, shown_rows, learn)
    monkeypatch.setattr(template, "encoded_together", encoded_alone)
    for row, made in zip(shown_rows, together, strict=True):
        [alone] = chat_sft.samples(tokens, [row], learn)
        assert shown(made) == shown(alone)
    assert [isinstance(made, ValueError) for made in together] == [False] * 6 + [True, False] + [True] * 3


def counted(monkeypatch):
    calls, encode = [], template.encoded_together
    monkeypatch.setattr(
        template, "encoded_together", lambda tokens, texts: calls.append(len(texts)) or encode(tokens, texts)
    )
    return calls


def test_a_file_of_prompts_is_tokenised_in_few_calls(tmp_path, monkeypatch):
    file = tiny.rows(tmp_path / "rows.jsonl", [{"prompt": f"{i}"} for i in range(rows.TOGETHER + 44)])
    check = rows.prompts(tokenizer.byte_level(), "areax.rollout.workflows:single_turn", most=35)
    calls = counted(monkeypatch)
    kept = rows.read(str(file), check=check, quiet=True)
    assert calls == [rows.TOGETHER, 44]
    assert [row["prompt"] for row in kept] == [f"{i}" for i in range(rows.TOGETHER + 44) if 31 + len(f"{i}") <= 35]


def test_the_first_bad_row_is_named_whatever_is_behind_it(tmp_path):
    some = [*ASKED, {"prompt": ""}, {"prompt": 7}]
    file = tiny.rows(tmp_path / "rows.jsonl", some)
    check = rows.prompts(tokenizer.byte_level(), "areax.rollout.workflows:single_turn", room=41)
    with pytest.raises(ValueError, match=r"rows.jsonl:7: 'prompt' must be a text, got 7"):
        rows.read(str(file), check=check, quiet=True)
    assert rows.read(str(file), check=check, bad="skip", quiet=True) == [*ASKED, {"prompt": ""}]


def test_demonstrations_ahead_are_tokenised_once(monkeypatch):
    made = offline.Demonstrations(tokenizer.byte_level(), "last")
    pairs = [{"prompt": f"{i}", "chosen": "a", "rejected": "b"} for i in range(9)]
    calls = counted(monkeypatch)
    made.ahead([*pairs, {"prompt": 3, "chosen": "a", "rejected": None}], names=("chosen", "rejected"))
    samples = [made.of(row, row[name]) for row in pairs for name in ("chosen", "rejected")]
    assert calls == [3 * 18] and len({json.dumps(sample.tokens.tolist()) for sample in samples}) == 18
    with pytest.raises(ValueError, match="'prompt' must be a text, got 3"):
        made.of({"prompt": 3}, "a")


def test_samples_that_are_kept_stay_few(monkeypatch):
    monkeypatch.setattr(offline, "KEPT", 4)
    made, shown_rows = offline.Demonstrations(tokenizer.byte_level(), "last"), []
    for i in range(9):
        shown_rows.append({"prompt": f"{i}", "completion": "a"})
        made(shown_rows[-1])
    calls = counted(monkeypatch)
    for row in shown_rows[::-1]:
        made(row)
    assert len(calls) == 5
