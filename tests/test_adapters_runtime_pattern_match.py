"""Regular expressions of somebody else's: as `re.fullmatch`, with limits."""

import time

import pytest

from areax.adapters.runtime import pattern_match


def test_names_match_as_in_re():
    names = ["a.q_proj", "a.v_proj", "b.q_proj", "a.q_proj\n", ""]
    assert pattern_match.fullmatches(r"a\..*_proj", names) == {"a.q_proj", "a.v_proj"}
    assert pattern_match.fullmatches(r"(?!a)(.*)", names) == {"b.q_proj", ""}


@pytest.mark.parametrize("pattern", ["(a", "*", "(?P<a>x)(?P<a>y)", "(" * 5000])
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(ValueError, match="must be a regular expression"):
        pattern_match.fullmatches(pattern, ["a"])


def test_a_pattern_that_takes_for_ever_is_refused(monkeypatch):
    monkeypatch.setattr(pattern_match, "SECONDS", 1)
    begun = time.monotonic()
    with pytest.raises(ValueError, match="must match 1 names within 1 s"):
        pattern_match.fullmatches(r"(a+)+b", ["a" * 60])
    assert time.monotonic() - begun < 20
