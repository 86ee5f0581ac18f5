"""What the adapters of environments share; `make test-environments` has those of the libraries themselves."""

import random
import threading

import numpy as np
import pytest

from areax.adapters import environments
from areax.adapters.environments.randomness import Randomness


def draw(own):
    with own.drawn():
        return random.random(), float(np.random.rand())


def test_episodes_have_random_numbers_of_their_own():
    """Of a seed they are equal, whatever draws between; those of the process stay as they would have been."""
    random.seed(5), np.random.seed(5)
    alone = [(random.random(), float(np.random.rand())) for _ in range(2)]
    random.seed(5), np.random.seed(5)
    one, other, same = Randomness(1), Randomness(2), Randomness(1)
    first = [draw(one), draw(other), draw(same)]
    between = [(random.random(), float(np.random.rand()))]
    threads = [threading.Thread(target=draw, args=(other,)) for _ in range(8)]
    [thread.start() for thread in threads]
    second = [draw(one), draw(same)]
    [thread.join() for thread in threads]
    between += [(random.random(), float(np.random.rand()))]
    assert first[0] == first[2] != first[1] and second[0] == second[1] != first[0]
    assert between == alone


def test_a_missing_library_is_named_with_its_extra():
    with pytest.raises(ImportError, match=r"^no_such_games is not installed: pip install 'areax\[games\]'$"):
        environments.library("no_such_games", "games")
