"""Many calls that are made together begin a few in a turn of the loop."""

import asyncio
from collections import Counter

from areax.rollout.processes.turns import AT_ONCE, turn

MANY = 10 * AT_ONCE + 3


def begun(cancelled=()):
    """{turn of the loop: the calls that begin in it}, of MANY made together, of which some are cancelled at once."""

    async def main():
        turns, order, now = Counter(), [], 0

        async def call(number):
            await turn()
            turns[now] += 1
            order.append(number)

        calls = [asyncio.create_task(call(number)) for number in range(MANY)]
        await asyncio.sleep(0)
        for number in cancelled:
            calls[number].cancel()
        while not all(one.done() for one in calls):
            await asyncio.sleep(0)
            now += 1
        await turn()  # once none waits, at once
        return turns, order

    return asyncio.run(main())


def test_a_few_begin_in_each_turn_in_their_order():
    turns, order = begun()
    assert max(turns.values()) == AT_ONCE and order == [*range(MANY)]


def test_a_cancelled_call_takes_no_place():
    gone = {*range(AT_ONCE, 5 * AT_ONCE)}
    turns, order = begun(gone)
    assert order == [number for number in range(MANY) if number not in gone] and len(turns) < 9
