"""Score heads of reward models and critics: what their settings have beside those of the model that they start from."""

import json
from dataclasses import replace

import jax

from areax import models
from areax.adapters import hf, tokenizer
from areax.adapters.runtime import hub
from areax.recipes.shared import common, terminal

SCALAR = models.ScoreHead()


def settings(config, head: models.ScoreHead = SCALAR, option: str = "--model"):
    """The Config with its own score head, or `head` if it has none, and without an output head.

    Raises:
      ValueError: its own has another number of labels; names the option that named the checkpoint.
    """
    own = config.score_head or head
    if own.labels != head.labels:
        wanted = "1 label" if head.labels == 1 else f"{head.labels} labels"
        raise ValueError(f"{option}: needs a score head with {wanted}, or none, got one with {own.labels}")
    return replace(config, tied=True, output_head=True, score_head=own)


def padded(config, tokens):
    """The Config with a padding token, which transformers' classifiers read."""
    return replace(config, source=json.dumps({**json.loads(config.source), "pad_token_id": pad_id(tokens)}))


def open_model(options, head: models.ScoreHead, tokens, mesh: jax.sharding.Mesh):
    """(config, weights) that a reward model starts from: with its own score head, else a new one, and no output head.

    Args:
      options: a recipe's Config.
      head: the new one; as many labels must its own have.

    Raises:
      ValueError: as `settings` and `common.check_same`; or rows have images.
    """
    if options.vision != "auto":
        raise ValueError(f"--model: reward models read no images, got --vision {options.vision}, or rows with images")
    if options.init == "random":
        common.check_same(hub.folder(options.model), weights=False)
        config = padded(settings(models.text_only(hf.read_config(hub.folder(options.model))), head), tokens)
        return config, common.draw(models.table(config), options.seed, mesh)
    path = hub.folder(options.model, weights=True)
    common.check_weights(path)
    common.check_same(path)
    config = padded(settings(hf.loaded_config(path, hf.HEADS, head), head), tokens)
    with terminal.loading(path):
        params = hf.load(path, mesh=mesh, init_missing=hf.HEADS, score_head=head)[1]
    return config, {name: x for name, x in params.items() if name != "head"}


def pad_id(tokens) -> int:
    """Returns the padding token, and sets it in the tokenizer.

    transformers reads a score at the last token that is not padding, so padding must not be the end of turn.

    Raises:
      ValueError: there is no other special token.
    """
    end = tokenizer.end_of_turn(tokens)
    if tokens.pad_token_id in (None, end):
        others = [id for id in sorted(tokens.all_special_ids) if id != end]
        if not others:
            raise ValueError(
                "--model: the tokenizer needs a special token beside its end of turn, got none; set its pad_token"
            )
        tokens.pad_token = tokens.convert_ids_to_tokens(others[0])
    return tokens.pad_token_id
