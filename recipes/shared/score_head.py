"""What a reward model's settings have beside those of the model that it starts from."""

import json
from dataclasses import replace

from areax.adapters import tokenizer


def settings(config, tokens):
    """The Config of a reward model, from that of a checkpoint read with all of `hf.HEADS`: a score head, no output
    head, and a padding token."""
    source = {**json.loads(config.source), "pad_token_id": pad_id(tokens)}
    return replace(config, value_head=True, tied=True, source=json.dumps(source))


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
                "RewardModel: the tokenizer needs a special token beside its end of turn, got none; set its pad_token"
            )
        tokens.pad_token = tokens.convert_ids_to_tokens(others[0])
    return tokens.pad_token_id
