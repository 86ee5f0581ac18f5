"""Questions answered with a search engine over a corpus."""

import json

import pytest
from fidelity import Policy, exact
from playing import call, played

from areax.adapters.environments import search
from areax.recipes.shared import environments

TEXTS = [
    {"id": "0", "contents": "Ulm\nThe minster of Ulm has a tower of 161 metres."},
    {"id": "1", "contents": "Cologne\nThe cathedral of Cologne has two towers."},
    {"id": "2", "contents": "Vienna\nThe cathedral of Saint Stephen stands in Vienna."},
]
ASKED = [
    {"question": "Which minster has a tower of 161 metres?", "golden_answers": ["Ulm Minster", "the minster of Ulm"]},
    {"question": "Where does the cathedral of Saint Stephen stand?", "answer": "Vienna"},
]


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def place(tmp_path):
    return lines(tmp_path / "asked.jsonl", ASKED), lines(tmp_path / "texts.jsonl", TEXTS)


def test_a_policy_searches_and_answers(place):
    name, corpus = place
    first, second = environments.rows(f"search:{name}", json.dumps({"corpus": corpus}), "train")
    policy = Policy(call("search", query="tower of 161 metres"), "It is <answer>The Minster of Ulm.</answer>")
    samples = played(f"search:{name}", policy, first, own={"corpus": corpus, "k": 1})
    assert exact(policy, samples) and samples[-1].components == {"found": 1.0}
    assert samples[-1].reward == 1.0 and "(1) Ulm\nThe minster of Ulm has a tower" in policy.heard[1]
    assert "Cologne" not in policy.heard[1]
    policy = Policy(call("search", query="zebras"), call("search", text="x"), call("look", query="x"), "Cologne")
    samples = played(f"search:{name}", policy, second, own={"corpus": corpus})
    assert exact(policy, samples) and samples[-1].reward == 0.0 and samples[-1].components["found"] == 0.0
    assert "Nothing was found." in policy.heard[1] and "error: must be search" in policy.heard[3]


@pytest.mark.parametrize(
    "said, right, equal",
    [
        ("the  Minster, of Ulm!", "minster of ulm", True),
        ("Ulm", "minster of Ulm", False),
        ("a", "the", False),
        ("A", "a", True),
    ],
)
def test_answers_are_compared_as_in_squad(said, right, equal):
    assert (search.normal(said) == search.normal(right)) is equal


@pytest.mark.parametrize(
    "rows, texts, options, words",
    [
        ([{"question": "?"}], TEXTS, {}, 'asked.jsonl:1: must have "question", and "answer"'),
        ([{"question": "?", "answer": [1]}], TEXTS, {}, "asked.jsonl:1: must have"),
        ([{"question": "?", "answer": 5}], TEXTS, {}, "asked.jsonl:1: must have"),
        ([{"question": "?", "answer": " "}], TEXTS, {}, "asked.jsonl:1: must have"),
        ([{"question": "?", "answer": {"value": "Ulm", "type": "x"}}], TEXTS, {}, "asked.jsonl:1: must have"),
        (ASKED, [{"body": "x"}], {}, 'texts.jsonl:1: must have "contents", or "text", got .*body'),
        (ASKED, [{"text": "a"}], {}, "must have texts with words, got 1 without any"),
    ],
)
def test_wrong_files_are_named(rows, texts, options, words, tmp_path):
    name, corpus = lines(tmp_path / "asked.jsonl", rows), lines(tmp_path / "texts.jsonl", texts)
    with pytest.raises(ValueError, match=words):
        environments.rows(f"search:{name}", json.dumps({"corpus": corpus} | options), "train")


def test_another_corpus_is_refused(place, tmp_path):
    name, corpus = place
    [row, _] = search.World.rows("train", name, corpus)
    other = lines(tmp_path / "other.jsonl", TEXTS[:2])
    with pytest.raises(ValueError, match="other.jsonl: must be the corpus with which the run began"):
        search.World(name, other).reset(row)
    with pytest.raises(ValueError, match="k must be a number from 1 on, got 0"):
        search.World(name, corpus, k=0)
    with pytest.raises(ValueError, match='rows for eval need "heldout"'):
        search.World.rows("eval", name, corpus)
