"""Score heads: linear layers on the last hidden states, of reward models, critics and classifiers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.nn.initializers import normal, zeros

from ...core.param import Param
from .linear import linear

NAMES = ("score", "score_bias", "score_hidden", "score_hidden_bias")  # in the parameter tree
CLASSIFIER = re.compile(r"(\w+)For(Sequence|Token)Classification")


@dataclass(frozen=True)
class ScoreHead:
    """A head that gives each token a score for each of its labels.

    Attributes:
      labels: number of labels; 1 = the scalar head of reward models and critics.
      bias: it has a bias, as in transformers' ForTokenClassification; those of ForSequenceClassification have none.
      hidden: a layer as wide as the model, with biases and a ReLU, comes before, as in Qwen2.5-Math-PRM
        (arXiv:2501.07301).
    """

    labels: int = 1
    bias: bool = False
    hidden: bool = False


# Reward models that come with code of their own. Skywork's have transformers' names for all but the head.
REWARD_MODELS = {
    "Qwen2ForProcessRewardModel": ScoreHead(2, bias=True, hidden=True),
    "Qwen2ForRewardModel": ScoreHead(1, bias=True, hidden=True),
    "Qwen2ForPrmModel": ScoreHead(1, bias=True),
}


def stated(hf: Mapping[str, Any]) -> ScoreHead | None:
    """The head that the architecture in a config.json has; None if it is none with a head.

    As in transformers, a classifier has the labels of id2label, else num_labels, else 2.

    Raises:
      ValueError: id2label does not name labels 0, 1, ..., or num_labels is another number.
    """
    for name in hf.get("architectures") or []:
        if name in REWARD_MODELS:
            return REWARD_MODELS[name]
        if found := CLASSIFIER.fullmatch(name):
            bias = found[2] == "Token" and hf.get("token_classification_bias") is not False
            return ScoreHead(_labels(hf), bias)
    return None


def classifier(hf: Mapping[str, Any]) -> str | None:
    """The class of transformers that a config.json states, if it is a classifier's."""
    return next((name for name in hf.get("architectures") or [] if CLASSIFIER.fullmatch(name)), None)


def _labels(hf: Mapping[str, Any]) -> int:
    names, count = hf.get("id2label"), hf.get("num_labels")
    if names is None:
        return 2 if count is None else count
    if sorted(names) != sorted(map(str, range(len(names)))) or not names:
        raise ValueError(f'config.json: id2label must name labels "0", "1", ..., got {names!r:.200}')
    if count not in (None, len(names)):
        raise ValueError(f"config.json: num_labels must be the number of labels in id2label, {len(names)}, got {count}")
    return len(names)


def found(tensors: Mapping[str, Any]) -> ScoreHead | None:
    """The head among the tensors of a checkpoint, by their names; None without any."""
    hidden = "score.2.weight" in tensors
    stem = "score.2" if hidden else next((s for s in ("score", "v_head.summary") if f"{s}.weight" in tensors), None)
    if stem is None:
        return None
    return ScoreHead(max((1, *tensors[f"{stem}.weight"].shape[:1])), f"{stem}.bias" in tensors, hidden)


def params(head: ScoreHead, std: float) -> tuple[dict[str, Param], dict[str, int]]:
    """(the head's weights by name, the sizes of their own axes but "score_hidden", the model's width)."""

    def at(name: str) -> tuple[str, ...]:
        """TRL's value heads, as in Skywork's process reward models, have another name."""
        return (f"score.2.{name}",) if head.hidden else (f"score.{name}", f"v_head.summary.{name}", f"score.{name}")

    found = {"score": Param("labels embed", at("weight"), normal(std))}
    if head.bias:
        found["score_bias"] = Param("labels", at("bias"), zeros)
    if head.hidden:
        found["score_hidden"] = Param("score_hidden embed", ("score.0.weight",), normal(std))
        found["score_hidden_bias"] = Param("score_hidden", ("score.0.bias",), zeros)
    return found, {"labels": head.labels}


def apply(params: Mapping[str, Any], hidden_BTD):
    """The score of each label at each token, [B, T, Y], in fp32 or wider."""
    x_BTD = hidden_BTD.astype(jnp.promote_types(hidden_BTD.dtype, jnp.float32))
    if "score_hidden" in params:
        x_BTD = jnp.maximum(linear(x_BTD, params["score_hidden"], params["score_hidden_bias"]), 0)
    return linear(x_BTD, params["score"], params.get("score_bias"))


def label_names(hf: Mapping[str, Any], labels: int) -> list[str]:
    """The names of a head's labels by a config.json, transformers' default ones if it names others."""
    names = hf.get("id2label") or {}
    at = lambda i: str(names.get(str(i), f"LABEL_{i}"))
    return [at(i) if len(names) == labels else f"LABEL_{i}" for i in range(labels)]


def to_hf(head: ScoreHead, source: Mapping[str, Any], causal: str) -> dict[str, Any]:
    """What the config.json of a model with this head says beside that of its causal model.

    Args:
      source: the config.json that the model came from, whose architecture and names of labels are kept if they fit.
      causal: the architecture of the causal model.

    Raises:
      ValueError: no architecture has such a head.
    """
    names = label_names(source, head.labels)
    return {
        "architectures": [_architecture(head, source, causal)],
        "num_labels": head.labels,
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        **({"token_classification_bias": True} if head.bias and "token_classification_bias" in source else {}),
    }


def _architecture(head: ScoreHead, source: Mapping[str, Any], causal: str) -> str:
    stem = causal.removesuffix("ForCausalLM")
    if head.hidden:
        own = next((name for name, one in REWARD_MODELS.items() if one == head and name.startswith(f"{stem}For")), None)
        if own is None:
            raise ValueError(
                f"save: no architecture of {stem} has a score head with a hidden layer and {head.labels} labels; "
                "Qwen2's have 1 or 2"
            )
        return own
    kept = classifier(source)
    if kept and stated(source) == head:
        return kept
    return f"{stem}For{'Token' if head.bias else 'Sequence'}Classification"
