"""How long the caches of decoding are."""

import itertools


def segments(context: int) -> list[slice]:
    """The positions of each cache segment: the first two span a sixteenth of the context each (64 to 1024), the next
    ones double; the last ends at a multiple of the first's length."""
    power = 1 << (context - 1).bit_length()
    C = min(power, max(64, min(1024, power // 16)))
    end = -(-context // C) * C
    starts = [0, *itertools.takewhile(lambda start: start < end, (C << i for i in itertools.count()))]
    return [slice(start, min(max(C, 2 * start), end)) for start in starts]
