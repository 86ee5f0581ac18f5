"""What an evaluation says if no completion ends."""

import numpy as np
import pytest

from areax.adapters import tokenizer
from areax.recipes.shared import describe, evaluation
from areax.rollout.types import Sample

TOKENS = tokenizer.character("0123456789+")
END = TOKENS.eos_token_id


def cut(completion, *, finish="length", earlier=()):
    """An answer after a prompt of two tokens, and after an earlier turn with an answer of its own."""
    tokens = np.array([5, 6, *earlier, *([7] if earlier else []), *completion], np.int32)
    sampled = np.isin(np.arange(len(tokens)), [0, 1, 2 + len(earlier)] if earlier else [0, 1], invert=True)
    turn = (np.arange(len(tokens)) >= 2 + len(earlier)).astype(np.int32) if earlier else np.zeros(len(tokens), np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(tokens=tokens, mask=sampled, logp=zeros, version=turn, turn=turn, finish=finish)


@pytest.mark.parametrize(
    "samples, said",
    [
        ([cut([8, END]), cut([8, 9], finish="stop")], ""),
        ([cut([8, 9]), cut([8, 9], finish="stop")], ""),
        ([cut([8, 9]), cut([8, END])], "eval: no completion ended before the length limit: the model writes no token"),
        ([cut([8, 9]), cut([8, END, 9])], "eval: completions go on past the token that ends a turn: servers do not"),
        ([cut([8, 9], earlier=[8, END])], "eval: no completion ended before the length limit: the model writes no"),
    ],
)
def test_an_evaluation_without_an_end_says_why(capsys, samples, said):
    evaluation.say_endless([samples], TOKENS)
    assert capsys.readouterr().err.startswith(said) if said else not capsys.readouterr().err


def test_the_share_of_answers_that_go_on_behind_an_end():
    assert describe.unstopped([cut([8, END, 9]), cut([8, 9]), cut([END, 9], finish="stop")], [END]) == 1 / 3
