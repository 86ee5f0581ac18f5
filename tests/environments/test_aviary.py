"""Environments of aviary: a story that needs no data, and GSM8K of a folder with its calculator."""

import itertools
import json
import math

import pytest
from fidelity import Policy, exact
from playing import call, played

from areax.recipes.shared import environments

TRAIN = [
    {"question": "What is 2 times 9?", "answer": "Twice.\n#### 18"},
    {"question": "Seven and 1,000?", "answer": "Sum.\n#### 1,007"},
]
TEST = [{"question": "One and one?", "answer": "#### 2"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gsm8k")
    for name, rows in (("train", TRAIN * 5), ("test", TEST)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"hf_source": str(path)}


def test_a_story_is_told_by_a_tool():
    policy = Policy("A story.", call("print_story", story="Once upon a time there"))
    samples = played("aviary:dummy", policy, {"split": "train", "seed": 0})
    assert exact(policy, samples) and [value for _, value in samples[-1].rewards] == [0.0, 1.0]
    assert '"name": "print_story"' in policy.heard[0] and "Write a 5 word story" in policy.heard[0]
    assert "No tool calls received. Please call one or more tools to proceed." in policy.heard[1]


@pytest.mark.parametrize(
    "text, said",
    [
        (call("print_story", tale="x"), "Encountered exception during tool call: TypeError("),
        (call("cast_float", x="no"), "Encountered exception during tool call: ValueError("),
        (call("cast_float", x=[1]), "Encountered exception during tool call: TypeError("),
        (call("sing", x=1), "Invalid tool call: sing"),
        ("", "No tool calls received"),
    ],
)
def test_a_mistake_is_told(text, said):
    policy = Policy(text, call("print_story", story="Once"))
    samples = played("aviary:dummy", policy, {"split": "train", "seed": 0})
    assert exact(policy, samples) and len(policy.said) == 2 and samples[-1].reward == 1.0
    assert said in policy.heard[1]


def test_a_text_does_not_end_an_episode_but_turns_do():
    policy = Policy("no")
    samples = played("aviary:dummy", policy, {"split": "train", "seed": 0}, turns=3)
    assert exact(policy, samples) and len(policy.said) == 3 and {sample.reward for sample in samples} == {0.0}


def test_a_problem_is_solved_with_the_calculator(folder):
    policy = Policy(call("calculator", expr="2*9"), "18, I think.", call("submit_answer", answer=18))
    samples = played("aviary:gsm8k", policy, {"split": "train", "index": 2}, own=folder | {"train_split": "train_full"})
    assert exact(policy, samples) and [value for _, value in samples[-1].rewards] == [0.0, 0.0, 1.0]
    assert TRAIN[0]["question"] in policy.heard[0]
    assert policy.heard[1].rpartition("tool\n")[2].startswith("18<|im_end|>")


@pytest.mark.parametrize(
    "text, rewards",
    [
        (call("submit_answer", answer="17"), [0.0]),  # as the environment says: -1 for a failure, which ends it
        (call("submit_answer", answer="a dozen"), [-1.0]),
        (call("calculator", expr="import os"), [-1.0]),
        (call("calculator", expr=3), [-1.0]),
        (call("guess", answer="18"), [-1.0]),
        ('<tool_call>\n{"name": "submit_answer", "arguments": {"ans\n</tool_call>', [0.0, 1.0]),
        (call("submit_answer", answer=[18]), [1.0]),  # raises in the environment: told, without a reward
        (call("submit_answer", number="18"), [1.0]),
        (call("submit_answer"), [1.0]),
    ],
)
def test_nonsense_is_worth_what_the_environment_says_or_told(folder, text, rewards):
    policy = Policy(text, call("submit_answer", answer="18"))
    samples = played("aviary:gsm8k", policy, {"split": "train", "index": 0}, own=folder | {"train_split": "train_full"})
    assert exact(policy, samples) and [value for _, value in samples[-1].rewards] == rewards
    if rewards == [1.0]:
        assert "error: submit_answer: " in policy.heard[1] and "(JSONDecodeError)" in policy.heard[1]


def test_an_environment_that_raises_costs_its_episode(folder, caplog):
    """Python does not write numbers of so many digits; the arguments are what the tool asks for."""
    policy = Policy(call("calculator", expr="9**9999"))
    [sample] = samples = played("aviary:gsm8k", policy, {"split": "train", "index": 0}, own=folder)
    assert exact(policy, samples) and math.isnan(sample.reward)
    assert "environment aviary:gsm8k failed: step: ValueError: Exceeds the limit (4300 digits)" in caplog.text


def test_rows_are_those_of_the_splits(folder):
    options = json.dumps(folder | {"turns": 4})
    rows = environments.rows("aviary:gsm8k", options, "train")
    assert rows[0] == {"split": "train", "index": 0} and len(rows) == 8  # 4 of 5 of the file
    assert environments.first("aviary:gsm8k", options, 9) == [{"split": "eval", "index": 0}]
    full = json.dumps(folder | {"train_split": "train_full", "eval_split": "val"})
    assert len(environments.rows("aviary:gsm8k", full, "train")) == 10
    assert len(environments.first("aviary:gsm8k", full, 9)) == 2
    endless = environments.rows("aviary:dummy", "", "train")
    for _ in range(2):
        assert list(itertools.islice(endless, 2)) == [{"split": "train", "seed": n} for n in (0, 1)]
    assert environments.first("aviary:dummy", "", 1) == [{"split": "eval", "seed": 2**30}]


def test_splits_are_played_and_equal_rows_are_equal_tasks(folder):
    heard = []
    for row in ({"split": "eval", "index": 0}, {"split": "train", "index": 1}, {"split": "train", "index": 1}):
        policy = Policy(call("submit_answer", answer="2"))
        samples = played("aviary:gsm8k", policy, row, own=folder)
        assert exact(policy, samples) and samples[0].reward == float(row["split"] == "eval")
        heard.append(policy.heard)
    assert TEST[0]["question"] in heard[0][0] and heard[0] != heard[1] == heard[2]


@pytest.mark.parametrize(
    "name, options, line",
    [
        ("chess", {}, "ValueError: must be one of dummy, gsm8k, hotpotqa"),
        ("hotpotqa", {}, "ImportError: No module named 'aviary.envs.hotpotqa': pip install 'fhaviary.hotpotqa.'"),
        ("dummy", {"size": 3}, "TypeError: .* takes no arguments"),
        ("dummy", {"train_split": "x"}, "ValueError: it has no splits; leave out train_split and eval_split"),
        ("gsm8k", {"hf_source": "no/where/at/all"}, ".*no/where/at/all"),
        ("gsm8k", {"train_split": "dev"}, "ValueError: 'dev' is not a valid GSM8kDatasetSplit"),
        ("gsm8k", {"size": 3}, "TypeError: .* unexpected keyword argument 'size'"),
    ],
)
def test_what_cannot_be_loaded_is_a_line(name, options, line):
    with pytest.raises(ValueError, match=rf"^aviary: the data set {name} cannot be loaded: {line}.*$"):
        environments.rows(f"aviary:{name}", json.dumps(options), "train")
