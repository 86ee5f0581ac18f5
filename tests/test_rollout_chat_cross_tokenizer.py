"""Spans of two tokenizers, against all prefixes of a text; what cannot be aligned is in none."""

import itertools
import random

import numpy as np
import pytest
import wordpieces
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areax.adapters import tokenizer
from areax.rollout.chat import cross_tokenizer
from areax.rollout.types import Image, supervised

TEXTS = [
    "Grüße aus Zürich 😀👍🏽, ça va ?",
    "数学は楽しい。",
    "The fox doesn't jump .",
    " two  spaces\n",
    "é",
    "😀",
    "",
]


def with_end(tokens):
    if tokens.eos_token is None:
        tokens.add_special_tokens({"eos_token": "</s>"})
    return tokens


MAKERS = {
    "merges": wordpieces.trained,
    "bytes": tokenizer.byte_level,
    "fallback": lambda: with_end(wordpieces.falling_back()),
}


@pytest.fixture(scope="module")
def made():
    return {name: make() for name, make in MAKERS.items()}


def pair(made, own, theirs):
    own, theirs = made[own], made[theirs]
    ends = tokenizer.end_of_turn(own), tokenizer.end_of_turn(theirs)
    return cross_tokenizer.Pair(own, theirs, tokenizer.stop_ids(own), ends)


def pieces(tokens, rng, text):
    """A text in random tokens of a byte-level tokenizer, which may be parts of a character."""
    known = {raw: id for id, raw in cross_tokenizer.token_bytes(tokens).items() if id >= 3}
    left, ids = text.encode(), []
    while left:
        sizes = [n for n in range(1, 12) if left[:n] in known and n <= len(left)]
        ids.append(known[left[: (size := rng.choice(sizes))]])
        left = left[size:]
    return ids


def by_prefixes(own, theirs, text):
    """All pairs (i, j) of numbers of tokens, given the bytes of each, that are the same prefix of the text."""
    joined = lambda words, i: b"".join(words[:i])
    cuts = {len(joined(own, i)): i for i in range(len(own), -1, -1) if text.startswith(joined(own, i))}
    others = {len(joined(theirs, j)): j for j in range(len(theirs), -1, -1) if text.startswith(joined(theirs, j))}
    return [(cuts[n], others[n]) for n in sorted({*cuts} & {*others})]


@pytest.mark.parametrize("name", MAKERS)
def test_the_bytes_of_tokens_are_those_of_the_text(made, name):
    tokens, raw = made[name], cross_tokenizer.token_bytes(made[name])
    for text in TEXTS:
        found = b"".join(raw[id] for id in tokens.encode(text, add_special_tokens=False))
        assert found == ((b" " if name == "fallback" and text else b"") + text.encode())
    for id in set(raw) - set(tokens.added_tokens_decoder):
        alone = tokens.decode([id])
        assert "\ufffd" in alone or alone.strip() == raw[id].decode().strip()


def test_spans_are_those_between_all_common_prefixes(made):
    """Random texts of letters, accents, ideographs and emoji, in random tokens that may cut a character in two."""
    rng, letters = random.Random(0), "ab é。楽😀👍🏽'\n"
    for own, theirs in itertools.product(("merges", "bytes"), MAKERS):
        both = pair(made, own, theirs)
        raw = [cross_tokenizer.token_bytes(made[name]) for name in (own, theirs)]
        for _ in range(60):
            text = "".join(rng.choices(letters, k=rng.randrange(1, 12)))
            ids = pieces(made[own], rng, text)
            got, spans = both.spans([*ids, tokenizer.end_of_turn(made[own])])
            words = [[known[id] for id in each] for known, each in zip(raw, (ids, got[:-1]), strict=True)]
            if theirs == "fallback":
                words[1][0] = words[1][0][1:]  # the space before a text
            assert b"".join(words[1]) == text.encode() and got[-1] == tokenizer.end_of_turn(made[theirs])
            cuts = [cut for cut in by_prefixes(*words, text.encode()) if cut != (0, 0)]
            if theirs == "fallback" and not words[1][0]:
                assert spans[0][0] == (0, 0)  # the space alone is a token, in the first span
            assert [stop for _, stop in spans] == [*cuts, (len(ids) + 1, len(got))]
            assert [start for start, _ in spans] == [(0, 0), *cuts]


def test_equal_tokenizers_have_spans_of_one_token(made):
    both = pair(made, "merges", "merges")
    end = tokenizer.end_of_turn(made["merges"])
    for text in TEXTS:
        ids = [*made["merges"].encode(text), end]
        got, spans = both.spans(ids)
        assert got == ids and spans == [((i, i), (i + 1, i + 1)) for i in range(len(ids))]
    assert (both.common[0] == both.common[1]).all() and both.common.shape[1] == len(made["merges"])


def test_a_completion_that_is_cut_off_ends_before_its_last_span(made):
    """The teacher would have more to read: of "hel", cut from "hello", it may expect nothing."""
    both, own = pair(made, "bytes", "merges"), made["bytes"]
    cut = own.encode("The quick")
    got, spans = both.spans(cut)
    assert got == made["merges"].encode("The quick", add_special_tokens=False)
    whole = both.spans([*cut, tokenizer.end_of_turn(own)])[1]
    assert spans == whole[:-2]
    # A character that is cut in two is not read.
    smile = own.encode("x 😀")
    got, spans = both.spans(smile[:-1])
    assert got == made["merges"].encode("x ", add_special_tokens=False) and all(stop[0] < 2 for _, stop in spans)
    # Nor is what follows bytes that are no character, nor the end behind them.
    broken = [*own.encode("ab"), smile[-1], *own.encode("cd"), tokenizer.end_of_turn(own)]
    got, spans = both.spans(broken)
    assert got == made["merges"].encode("ab", add_special_tokens=False) and all(stop[0] <= 1 for _, stop in spans)
    assert both.spans([]) == ([], [])
    assert both.spans([tokenizer.end_of_turn(own)])[1] == [((0, 0), (1, 1))]


def test_a_space_that_a_tokenizer_adds_is_none_of_the_text(made):
    own = made["fallback"]
    ids = own.encode("ab cd", add_special_tokens=False)
    assert own.convert_ids_to_tokens(ids)[0] == "▁a"
    got, _ = pair(made, "fallback", "bytes").spans([*ids, tokenizer.end_of_turn(own)])
    assert made["bytes"].decode(got[:-1]) == "ab cd"


def test_a_tokenizer_may_add_a_space_only_before_a_text_that_begins_with_none(made):
    inner = Tokenizer.from_str(made["merges"].backend_tokenizer.to_str())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    adding = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<s>")
    both, own = pair({**made, "adding": adding}, "bytes", "adding"), made["bytes"]
    raw = cross_tokenizer.token_bytes(adding)
    for text in ("ab", " ab", "  ab", " ", ""):
        ids = own.encode(text)
        got, spans = both.spans([*ids, tokenizer.end_of_turn(own)])
        words = [raw[id] for id in got[:-1]]
        if not text.startswith(" ") and text:
            words[0] = words[0][1:]
        cuts = [cut for cut in by_prefixes([*map(str.encode, text)], words, text.encode()) if cut != (0, 0)]
        assert [stop for _, stop in spans] == [*cuts, (len(ids) + 1, len(got))], text


def test_texts_that_a_normaliser_changes_are_aligned_up_to_there(made):
    inner = Tokenizer.from_str(made["merges"].backend_tokenizer.to_str())
    inner.normalizer = normalizers.Lowercase()
    lower = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<s>")
    both = pair({**made, "lower": lower}, "bytes", "lower")
    own = made["bytes"]
    got, spans = both.spans([*own.encode("ab Xy"), tokenizer.end_of_turn(own)])
    assert spans and max(stop[0] for _, stop in spans) <= len("ab ")  # neither what follows nor the end
    assert lower.decode(got[:-1]) == "ab xy"


def test_special_tokens_inside_are_no_text(made):
    """A mark that the teacher does not have is read as text, and in no span; one that both have is."""
    own, end = made["bytes"], tokenizer.end_of_turn(made["bytes"])
    start = own.convert_tokens_to_ids("<|im_start|>")
    ids = [*own.encode("a"), start, *own.encode("b"), end]
    aligned = [own.convert_ids_to_tokens(ids[a:b]) for (a, _), (b, _) in pair(made, "bytes", "merges").spans(ids)[1]]
    assert aligned == [["a"], ["b"], ["<|im_end|>"]]
    assert len(pair(made, "bytes", "bytes").spans(ids)[1]) == 4


def test_common_tokens_are_the_same_bytes(made):
    both = pair(made, "merges", "fallback")
    raw = [cross_tokenizer.token_bytes(made[name]) for name in ("merges", "fallback")]
    ends = tokenizer.end_of_turn(made["merges"]), tokenizer.end_of_turn(made["fallback"])
    for a, b in both.common.T.tolist():
        assert raw[0][a] == raw[1][b] or (a, b) == ends
        assert both.to_own[b] == a
    assert ends in [tuple(column) for column in both.common.T.tolist()]
    assert (both.to_own >= 0).sum() == both.common.shape[1] == len({*both.common[1].tolist()})
    # Of two tokens for "a", a letter and the byte of byte fallback, the letter is common.
    letter = made["merges"].convert_tokens_to_ids("a"), made["fallback"].convert_tokens_to_ids("a")
    assert letter in [tuple(column) for column in both.common.T.tolist()]


def test_samples_get_what_their_teacher_reads(made):
    both = pair(made, "merges", "bytes")
    own, end = made["merges"], tokenizer.end_of_turn(made["merges"])
    ids = [*own.encode("The é"), end]
    [sample] = both.read([supervised([5, 6, 7], ids)], {"prompt": "Hi"})
    tokens, span = sample.reading
    before = len(both.prompt({"prompt": "Hi"}))
    assert made["bytes"].decode(tokens[:before]).endswith("Hi<|im_end|>\n<|im_start|>assistant\n")
    assert made["bytes"].decode(tokens[before:]) == "The é<|im_end|>"
    np.testing.assert_array_equal(span[:before], 0)
    kind, numbers = sample.arrays["teacher_span"]
    assert kind == "target" and set(numbers[3:]) == set(span[before:]) == {*range(1, numbers.max() + 1)}
    counts = [np.bincount(x, minlength=numbers.max() + 1)[1:] for x in (numbers, span)]
    exact = sample.arrays["teacher_exact"][1]
    np.testing.assert_array_equal(exact[3:], ((counts[0] == 1) & (counts[1] == 1))[numbers[3:] - 1])
    assert exact.any() and not exact.all() and not exact[:3].any()
    np.testing.assert_array_equal(sample.teacher_tokens, tokens)
    [told] = both.read([supervised([5], ids)], {"prompt": "Hi", "teacher_prompt": "Ho"})
    assert "Ho" in made["bytes"].decode(told.reading[0]) and "Hi" not in made["bytes"].decode(told.reading[0])


def test_samples_that_no_other_tokenizer_reads_are_refused(made):
    both = pair(made, "merges", "bytes")
    plain = supervised([5, 6, 7], [8, 9])
    for sample, words in (
        (plain.replace(images=(Image(b""),)), "must have no images, got 1"),
        (plain.replace(teacher_prompt=(1, 2)), "must have no teacher_prompt of tokens, got 2"),
        (plain.replace(mask=np.array([0, 1, 0, 1, 1], bool)), "must have one completion behind a prompt"),
        (plain.replace(mask=np.ones(5, bool)), "must have one completion behind a prompt"),
    ):
        with pytest.raises(ValueError, match=f"{words}.*; row {{'prompt': 'Hi'}}"):
            both.read([sample], {"prompt": "Hi"})


def test_tokenizers_whose_tokens_are_no_bytes_are_refused(made):
    inner = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}))
    inner.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="bytes or pieces of text, got one with the decoder WordPiece; take a model"):
        cross_tokenizer.token_bytes(PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]"))
    digits, letters = (tokenizer.character(alphabet, words=()) for alphabet in ("01", "ab"))
    for tokens in (digits, letters):
        tokens.add_special_tokens({"eos_token": f"<{len(tokens)}>"})
    ends = tuple(tokens.eos_token_id for tokens in (digits, letters))
    both = cross_tokenizer.Pair(digits, letters, ends[:1], ends)
    assert [digits.convert_ids_to_tokens(int(id)) for id in both.common[0]].count("0") == 0
