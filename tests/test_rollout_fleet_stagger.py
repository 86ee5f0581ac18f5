"""Many calls that are made together begin a few in a turn of the loop."""

import asyncio
from collections import Counter

from areax.rollout.fleet.stagger import AT_ONCE, stagger


def test_a_few_begin_in_each_turn():
    async def main():
        turn, begun = 0, Counter()

        async def call(number):
            await stagger(number)
            begun[turn] += 1

        calls = asyncio.gather(*map(call, range(10 * AT_ONCE + 3)))
        while not calls.done():
            await asyncio.sleep(0)
            turn += 1
        assert max(begun.values()) == AT_ONCE and begun.total() == 10 * AT_ONCE + 3

    asyncio.run(main())
