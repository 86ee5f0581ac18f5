"""Classifiers and process reward models as rewards: what transformers computes of the same tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import transformers

from areax import models
from areax.adapters import hf, reward_model, tokenizer

NAMES = {"0": "bad", "1": "neutral", "2": "good"}
ROW = {"prompt": "12+34", "answer": "46"}
TEXTS = ("46", "4\n\n6+\n\n1", "")


def classifier(path: Path, head: models.ScoreHead, **said) -> Path:
    """A tiny model with this head and a bias that is not 0."""
    tokens = tokenizer.load(tiny.model(path / "base"))
    config, params = hf.load(path / "base", init_missing=("score",), score_head=head)
    params["score"] *= 5
    if head.bias:
        params["score_bias"] += np.arange(head.labels) - 0.5
    hf.save(path / "model", config, params, tokenizer=tokens)
    told = json.loads((path / "model/config.json").read_text()) | said
    (path / "model/config.json").write_text(json.dumps(told))
    return path / "model"


def theirs(path: Path, kind: str, ids: list[int]) -> np.ndarray:
    model = getattr(transformers, f"AutoModelFor{kind}Classification").from_pretrained(path).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits.double().numpy()


def completed(path: Path, text: str) -> list[int]:
    return sum(tokenizer.supervised(tokenizer.load(path), {**ROW, "completion": text}), [])


def softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "problem, function",
    [
        (None, softmax),
        ("single_label_classification", softmax),
        ("multi_label_classification", lambda x: 1 / (1 + np.exp(-x))),
        ("regression", lambda x: x),
    ],
)
def test_a_classifier_rewards_with_the_probability_of_a_label(tmp_path, problem, function):
    path = classifier(tmp_path, models.ScoreHead(3), id2label=NAMES, problem_type=problem)
    for label in ("good", 2, "bad"):
        reward, at = reward_model.load(path, label=label), int(label == "bad") * -2 + 2
        for text in TEXTS:
            wanted = function(theirs(path, "Sequence", completed(path, text)))[at]
            np.testing.assert_allclose(reward(text, ROW), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_token_classifier_with_one_label_rewards_with_its_score(tmp_path):
    path = classifier(tmp_path, models.ScoreHead(1, bias=True))
    reward = reward_model.load(path)
    for text in TEXTS:
        wanted = theirs(path, "Token", completed(path, text))[-1, 0]
        np.testing.assert_allclose(reward(text, ROW), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("marker", [None, "\n", "<|extra_0|>"])
def test_a_process_reward_model_judges_each_step(tmp_path, marker):
    """At the last token of the marker behind each step; the ends are those of the steps in the text."""
    path = classifier(tmp_path, models.ScoreHead(2, bias=True))
    tokens, reward = tokenizer.load(path), reward_model.steps(path, marker=marker)
    text = "4\n\n6+\n\n\n\n1"
    prompt, _ = tokenizer.supervised(tokens, {**ROW, "completion": ""})
    judged = [tokens.encode(piece + (marker or "\n\n"), add_special_tokens=False) for piece in ("4", "6+", "1")]
    ids, ends = list(prompt), []
    for piece in judged:
        ids += piece
        ends.append(len(ids) - 1)
    wanted = softmax(theirs(path, "Token", ids)[ends])[:, 1]
    got = reward(text, ROW)
    assert [end for end, _ in got] == [3, 7, 10] and text[:3] == "4\n\n" and text[:7] == "4\n\n6+\n\n"
    np.testing.assert_allclose([value for _, value in got], wanted, rtol=1e-4, atol=1e-5)
    assert len(set(wanted)) == 3
    other = reward_model.steps(path, marker=marker, label=0)(text, ROW)
    np.testing.assert_allclose([value for _, value in other], 1 - wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "text, steps",
    [
        ("", [("", 0)]),
        ("\n\n", [("\n\n", 2)]),
        ("a", [("a", 1)]),
        ("a\n\n", [("a", 3)]),
        ("a\n\nb", [("a", 3), ("b", 4)]),
        ("\n\na\n\n \n\nb\n\n", [("a", 5), ("b", 11)]),
        ("a\n\n\nb", [("a", 3), ("\nb", 5)]),
    ],
)
def test_steps_are_what_separators_part(text, steps):
    assert reward_model._split(text, "\n\n") == steps


def test_labels_and_heads_that_are_not_there_are_refused(tmp_path):
    three = classifier(tmp_path / "three", models.ScoreHead(3), id2label=NAMES)
    for label in (None, 3, -1, "best", 1.0):
        with pytest.raises(ValueError, match="label must be one of 0 'bad', 1 'neutral', 2 'good', got"):
            reward_model.load(three, label=label)
    with pytest.raises(ValueError, match="label must be one of 0 'bad', 1 'neutral', 2 'good', got None"):
        reward_model.steps(three)
    one = classifier(tmp_path / "one", models.ScoreHead(1))
    with pytest.raises(ValueError, match="label must be one of 0 'LABEL_0', got 1"):
        reward_model.load(one, label=1)
    with pytest.raises(ValueError, match="separator and marker must not be empty, got '' and ''"):
        reward_model.steps(one, separator="")
    with pytest.raises(ValueError, match="a reward model needs a score head, got no score.weight"):
        reward_model.steps(tmp_path / "one/base")
