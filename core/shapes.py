"""Shape suffixes: `x_BTD` has axes B, T, D, and `@shaped` checks them while tracing.

Letters: B rows, T positions, J segment slots of a row, M microbatches, D embed, F ffn, V vocabulary, N query heads,
K kv heads, G query heads per kv head, H head size, E experts, L layers, C chunk, S keys, Y labels,
A tokens in any order. In attention: H query and key size, V value size. In MoE code: K experts per token, P (token,
expert) pairs, R rows that pairs are sorted into, S blocks of rows, N devices.
"""

import functools
import inspect


def shaped(fn):
    """Makes `fn` check that its array arguments agree on the size of every letter in their names.

    An argument `words_XYZ` has one trailing axis per capital letter, and a letter has one size in all arguments. Any
    leading axes (microbatches) must be the same for all. None is skipped. The check runs in Python while tracing, so it
    costs nothing once compiled.

    Raises:
      ValueError: sizes differ; names the function, the letter, both arguments and both sizes.
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
