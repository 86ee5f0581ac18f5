"""Long sweeps over many cases: a part of them in `make test`, the others under a mark."""

from collections.abc import Iterable

import pytest


def thinned(cases: Iterable, keep: int, mark: pytest.MarkDecorator) -> list:
    """The cases for `parametrize`, where all but each `keep`-th have `mark`.

    Args:
      cases: names, or tuples of several arguments.
      mark: such as `pytest.mark.slow`, named where it is used: `make test-slow` searches the files for it.
    """
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[mark] * (i % keep != 0)) for i, case in enumerate(tuples)]
