"""A real model that says what it is told: each token has one successor, whatever came before."""

from pathlib import Path

import numpy as np
import tiny
from tokenizers import AddedToken

from areax import models
from areax.adapters import hf, tokenizer
from areax.core import param

# A prompt ends with the last message, or with "<go on>" if that is not the user's: the model continues from there.
TEMPLATE = """
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}
{%- endfor %}
{{- '<|im_start|>' + message.content }}
{%- endfor %}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<off>' }}{% endif %}
{%- if messages[-1].role != 'user' %}{{ '<go on>' }}{% endif %}"""


def model(path: Path, *scripts: list[str], template: str = TEMPLATE, context: int = 1024, special=()) -> Path:
    """Writes a model that continues each token of a script with the next, and the last one with the end of the turn.

    A script is a list of tokens of any length; a text of several bytes that is not to be a token is given as bytes. No
    token may be in two scripts, or twice in one. Those in `special` are special tokens.
    """
    tokens = tokenizer.byte_level()
    tokens.chat_template = template
    words = [word for script in scripts for word in script if isinstance(word, str)] + ["<off>", "<go on>"]
    tokens.add_tokens([AddedToken(word, normalized=False, special=word in special) for word in dict.fromkeys(words)])
    follows = {}
    for script in scripts:
        ids = [id for item in script for id in _ids(tokens, item)] + [tokens.eos_token_id]
        for one, other in zip(ids, ids[1:], strict=False):
            assert follows.setdefault(one, other) == other, f"{tokens.decode([one])!r} has two successors"
    size = len(tokens)
    head = np.zeros((size, size), np.float32)
    for one in range(size):
        head[follows.get(one, tokens.eos_token_id), one] = 5
    source = {
        **tiny.HF, "vocab_size": size, "hidden_size": size, "tie_word_embeddings": False,
        "eos_token_id": tokens.eos_token_id, "max_position_embeddings": context,
    }  # fmt: skip
    config = models.config_from_hf(source)
    values = {"embed": np.eye(size, dtype=np.float32), "head": head}  # of an untouched residual stream
    fill = lambda leaf: values.get(leaf.path, np.full(leaf.shape, "norm" in leaf.path, np.float32))
    return hf.save(path, config, param.tree_map(fill, models.table(config)), tokenizer=tokens)


def _ids(tokens, item):
    return [tokens.convert_tokens_to_ids(item)] if isinstance(item, str) else tokens.encode(item.decode())
