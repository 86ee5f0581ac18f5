import pytest
import wordpieces
from hypothesis import given
from hypothesis import strategies as st

from areax.adapters import tokenizer
from areax.rollout.chat.detokenizer import CONTEXT, Reader, Text, completing

BYTES = tokenizer.byte_level()
SUMS = tokenizer.character("0123456789+")
TRAINED, FALLING_BACK = wordpieces.trained(), wordpieces.falling_back()


def decode(ids):
    return BYTES.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=40), st.lists(st.integers(1, 9), max_size=30))
def test_text_grows_to_the_full_text(text, cuts):
    ids = BYTES.encode(text, add_special_tokens=False)
    out, rest = Text(decode), ids
    for cut in [*cuts, len(ids)]:
        out.feed(rest[:cut])
        rest = rest[cut:]
        assert text.startswith(out.text)
    out.end()
    assert out.text == text


def test_an_unfinished_character_is_held_back_until_the_end():
    ids = BYTES.encode("a€", add_special_tokens=False)
    out = Text(decode)
    out.feed(ids[:-1])
    assert out.text == "a"
    out.end()
    assert out.text == "a\ufffd"


def test_a_stop_string_cuts_the_text_and_the_tokens_up_to_it_are_counted():
    ids = BYTES.encode("one two\n\nthree", add_special_tokens=False)
    out = Text(decode)
    assert out.feed(ids[:8], ["\n\n"]) is None
    assert out.feed(ids[8:], ["\n\n", "three"]) == (1, "\n\n")
    assert out.text == "one two"


def test_the_first_stop_string_to_be_complete_wins_then_the_earliest_to_begin():
    ids = BYTES.encode("abcd", add_special_tokens=False)
    for stops, hit in [
        (["abcd", "bc"], (3, "bc")),
        (["cd", "bcd"], (4, "bcd")),
        (["abcd", "abc"], (3, "abc")),
        (["d", "cd"], (4, "cd")),
    ]:
        assert Text(decode).feed(ids, stops) == hit


def joined(made, chunks, skip=True):
    """(text of all chunks, text that each of them added)."""
    out, pieces = Text(lambda ids: made.decode(ids, skip_special_tokens=skip)), []
    for chunk in chunks:
        before = out.text
        out.feed(chunk)
        assert out.text.startswith(before)
        pieces.append(out.text[len(before) :])
    out.end()
    return out.text, pieces


def cut(ids, sizes):
    """The ids in chunks of the given sizes, the rest one by one."""
    for size in sizes:
        yield ids[:size]
        ids = ids[size:]
    yield from ([id] for id in ids)


def some_bytes():
    """UTF-8 of characters of every length, complete and broken."""
    parts = [c.encode() for c in "aé€😀\ufffd\n "] + [b"\xf0\x9f", b"\xe2\x82", b"\xc3", b"\x80", b"\xff", b"\xed\xa0"]
    return st.lists(st.sampled_from(parts), max_size=60).map(b"".join)


# Byte-level BPE writes printable bytes of Latin-1 as themselves and the others, in order, from U+0100 on.
OTHERS = [b for b in range(256) if not (33 <= b <= 126 or 161 <= b <= 172 or 174 <= b)]
SPELLED = {b: chr(b) for b in range(256)} | {b: chr(256 + i) for i, b in enumerate(OTHERS)}


@given(some_bytes(), st.lists(st.integers(0, 12), max_size=5))
def test_incremental_decoding_of_bytes_equals_decoding_at_once(content, sizes):
    ids = [BYTES.convert_tokens_to_ids(SPELLED[b]) for b in content]
    text, _ = joined(BYTES, cut(ids, sizes))
    assert text == content.decode("utf-8", errors="replace") == BYTES.decode(ids)


@pytest.mark.parametrize("made", [SUMS, BYTES, TRAINED], ids=["character", "bytes", "merges"])
@given(data=st.data())
def test_incremental_decoding_of_any_ids_equals_decoding_at_once(made, data):
    ids = data.draw(st.lists(st.integers(0, len(made) + 3), max_size=80))  # some beyond the vocabulary
    sizes = data.draw(st.lists(st.integers(0, 12), max_size=5))
    for skip in (True, False):
        text, _ = joined(made, cut(ids, sizes), skip)
        assert text == made.decode(ids, skip_special_tokens=skip)


@given(st.text(st.sampled_from("abcdeé. 😀€"), max_size=60), st.lists(st.integers(0, 12), max_size=5))
def test_incremental_decoding_with_byte_fallback_equals_decoding_at_once(text, sizes):
    ids = FALLING_BACK.encode(text)
    assert joined(FALLING_BACK, cut(ids, sizes))[0] == FALLING_BACK.decode(ids) == text


def test_text_is_released_as_soon_as_it_is_certain():
    _, pieces = joined(BYTES, ([id] for id in BYTES.encode("aé😀<|im_end|>")))
    assert pieces == ["a", "", "é", "", "", "", "😀", ""]


def test_the_window_of_a_detokenizer_is_bounded():
    out = Text(TRAINED.decode)
    for id in TRAINED.encode(wordpieces.TEXT * 20):
        out.feed([id])
        assert len(out._window) <= 2 * CONTEXT + 3  # plus an unfinished character
    out.end()
    assert out.text == wordpieces.TEXT * 20


@given(st.data())
def test_the_token_that_completes_a_number_of_characters(data):
    made = data.draw(st.sampled_from([SUMS, BYTES, TRAINED]))
    ids = data.draw(st.lists(st.integers(0, len(made) - 1), min_size=1, max_size=30))
    decode = lambda ids: made.decode(ids, skip_special_tokens=True)
    ends = data.draw(st.lists(st.integers(0, 40), max_size=4))
    finished = [len(decode(ids[:k]).rstrip("\ufffd")) for k in range(1, len(ids) + 1)]
    for end, found in zip(ends, completing(decode, ids, ends), strict=True):
        enough = [k for k, length in enumerate(finished) if length >= end]
        assert found == (len(ids) - 1 if end >= finished[-1] else enough[0])


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.booleans())
def test_a_reader_shows_what_is_certain_and_no_more(text, stops, ended):
    """Tokens are letters; a last one that ends the text, if there is one, is not part of it."""
    decode = lambda ids: "".join(map(chr, ids))
    reader, shown, tokens = Reader(decode, stops), "", []
    for letter in text:
        if any(stop in decode(tokens) for stop in stops):
            break
        tokens.append(ord(letter))
        shown += reader.push(tokens[-1])
        found = [at for stop in stops if (at := decode(tokens).find(stop)) >= 0]
        begun = [at for at in range(len(tokens)) for stop in stops if stop.startswith(decode(tokens[at:]))]
        assert shown == decode(tokens)[: min(found or begun or [len(tokens)])]
    cut = min([at for stop in stops if (at := decode(tokens).find(stop)) >= 0], default=len(tokens))
    last = [ord("#")] if ended and cut == len(tokens) else []
    whole, rest = reader.finish(tokens + last, bool(last) or cut < len(tokens))
    assert shown + rest == whole == decode(tokens)[:cut]
