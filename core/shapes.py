"""Names carry shapes: `x_BTD` has axes B, T, D, and `@shaped` checks that while tracing.

Letters: B rows, T positions, J segment slots of a row, M microbatches, D embed, F ffn, V vocabulary, N query heads,
K kv heads, G query heads a kv head, H head size, E experts, L layers, C chunk, S keys, A tokens in any order. Among
experts: K those of a token, P pairs of a token and an expert, R rows that pairs are sorted into, S blocks of rows, and
N devices.
"""

import functools
import inspect


def shaped(fn):
    """Makes `fn` check that its array arguments agree on every letter of their names.

    An argument called `words_XYZ` must end in as many axes as capital letters, and a letter has one size everywhere.
    Axes in front of them (microbatches) must be the same for all. None is passed over. The check runs in Python, so it
    costs nothing once compiled.

    Raises:
      ValueError: naming the function, the letter, both arguments and both sizes.
    """
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def checked(*args, **kwargs):
        sizes: dict = {}  # letter -> (size, the argument that fixed it)
        for name, x in signature.bind(*args, **kwargs).arguments.items():
            letters = name.rpartition("_")[2]
            if "_" not in name or not letters.isupper() or x is None:
                continue
            front = len(x.shape) - len(letters)
            if front < 0:
                raise ValueError(f"{fn.__name__}: {name} needs axes {letters}, got shape {tuple(x.shape)}")
            named = [("front", tuple(x.shape[:front])), *zip(letters, x.shape[front:], strict=True)]
            for letter, size in named:
                known, first = sizes.setdefault(letter, (size, name))
                if size != known:
                    raise ValueError(f"{fn.__name__}: {letter} is {known} in {first} but {size} in {name}")
        return fn(*args, **kwargs)

    return checked
