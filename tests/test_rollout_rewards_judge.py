"""Verdicts as judges write them, to rubrics from 0 to 10; the shares are worked out by hand."""

import re

import cpu
import pytest

from areax.rollout.rewards import judge


@pytest.mark.parametrize(
    "reply, share",
    [
        ("Score: 8", 0.8),
        ("Score: 0/10", 0.0),
        ("Score: 10/10\nScore: 3/10", 0.3),
        ("**Score: 8/10**", 0.8),
        ("**Score**: **8**/10", 0.8),
        ("Score: [8]", 0.8),
        ("score = 8.5 / 10.", 0.85),
        ('{"score": 8}', 0.8),
        ('{"score": "8"}', 0.8),
        ("{'score': 8}", 0.8),
        ("Score: <8>", 0.8),
        ("Score: $8$", 0.8),
        ("Score\uff1a8", 0.8),
        ("Score: .5/1", 0.5),
        ("Score: 7 out of 10", 0.7),
        ("Score: 4/5", 0.8),
        ("Score: 80%", 0.8),
        ("Score: -1/10", None),
        ("Score: 11/10", None),
        ("Score: 100", None),
        ("Score: 7-8", None),
        ("Score: between 7 and 8", None),
        ("Score: 7 or 8", None),
        ("Score: 8 1/2", None),
        ("Score: 8\u00bd", None),
        ("Score: 1e1", None),
        ("Score: 8:9", None),
        ("Score (0-10): 8", 0.8),
        ("Score (0 to 10): 8/10", 0.8),
        ("Score (out of 10): 8", 0.8),
        ("Score on a scale of 0-10: 8", 0.8),
        ("Score: 0 - 10: 8", 0.8),
        ("Score: 1\u201310: 7", 0.7),
        ("<think>Score: 9</think>Score: 2", 0.2),
        ("Score: 0-10", None),
        ("Score (from 0 to 10)", None),
        ("Score: 8,5", None),
        ("Score: 8/0", None),
        ("Score: N", None),
        ("Score: 9" * 20_000 + "Score: [" + "(" * 20_000, 0.9),
    ],
)
def test_a_score(reply, share):
    assert judge.grade(reply, re.compile(judge.SCORE), 10) == (share if share is None else pytest.approx(share))


@pytest.mark.parametrize(
    "reply, share",
    [
        ("good.\n8", 0.8),
        ("0/10", 0.0),
        ("10/10", 1.0),
        ("**8**/10", 0.8),
        ("**8/10**\n", 0.8),
        ("Score: 7 out of 10.", 0.7),
        ("7 (out of 10)", 0.7),
        ("7 (0-10)", 0.7),
        ("0-10: 7", 0.7),
        ("8 points", 0.8),
        ("There are 5 reasons for a score of 9", 0.9),
        ("80%", 0.8),
        ("3/4 right, so 6", 0.6),
        ("great: 12!", None),
        ("-3", None),
        ("\u22123", None),
        ("7-8", None),
        ("7 \u2013 8", None),
        ("7 to 8", None),
        ("8 1/2", None),
        ("8\u204410", None),
        ("1e1", None),
        ("2*4", None),
        ("12:30", None),
        ("v2", None),
        ("0-10", None),
        ("from 0 to 10", None),
        ("out of 10", None),
        ("8,5", None),
        ("eight", None),
        ("8 of 9, but bad", None),
        ("1 " * 20_000 + "x", None),
        ("9" * 100_000 + "x", None),
    ],
)
def test_a_number_at_the_end(reply, share):
    with cpu.limit(1):
        given = judge.grade(reply, re.compile(judge.LAST), 10)
    assert given == (share if share is None else pytest.approx(share))
