from hypothesis import given
from hypothesis import strategies as st

from areax.adapters import tokenizer
from areax.rollout.chat.detokenizer import Text

BYTES = tokenizer.byte_level()


def decode(ids):
    return BYTES.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=40), st.lists(st.integers(1, 9), max_size=30))
def test_pieces_join_to_the_whole(text, cuts):
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


def test_a_stop_string_cuts_text_and_counts_the_tokens_up_to_it():
    ids = BYTES.encode("one two\n\nthree", add_special_tokens=False)
    out = Text(decode)
    assert out.feed(ids[:8], ["\n\n"]) is None
    assert out.feed(ids[8:], ["\n\n", "three"]) == (1, "\n\n")
    assert out.text == "one two"


def test_of_stop_strings_the_first_to_be_complete_then_to_begin_then_the_longest_counts():
    ids = BYTES.encode("abcd", add_special_tokens=False)
    for stops, hit in [
        (["abcd", "bc"], (3, "bc")),
        (["cd", "bcd"], (4, "bcd")),
        (["abcd", "abc"], (3, "abc")),
        (["d", "cd"], (4, "cd")),
    ]:
        assert Text(decode).feed(ids, stops) == hit
