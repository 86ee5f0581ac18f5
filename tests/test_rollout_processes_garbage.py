"""Full garbage collections become rare where they take long, and garbage is still found."""

import asyncio
import gc
import weakref

from areax.rollout.processes import garbage, memory


class Knot:
    def __init__(self):
        self.itself = self


def test_short_collections_stay_as_they_are_and_everything_is_restored():
    thresholds, callbacks = gc.get_threshold(), [*gc.callbacks]

    async def main():
        async with garbage.spared():
            assert gc.get_freeze_count() > 0
            gc.collect()  # a short one: what was there is frozen
            await asyncio.sleep(0.05)
            assert gc.get_threshold() == thresholds

    asyncio.run(main())
    assert (gc.get_threshold(), gc.callbacks, gc.get_freeze_count()) == (thresholds, callbacks, 0)


def test_long_ones_wait_until_memory_has_grown(monkeypatch):
    monkeypatch.setattr(garbage, "LONG_S", 0.0)
    monkeypatch.setattr(garbage, "EVERY_S", 0.01)
    resident = 100
    monkeypatch.setattr(memory, "resident", lambda: resident)

    async def main():
        nonlocal resident
        async with garbage.spared():
            gc.collect()
            await asyncio.sleep(0.05)
            assert gc.get_threshold()[2] == garbage.NEVER
            knot = Knot()
            gone = weakref.ref(knot)
            await asyncio.sleep(0.05)  # it is frozen
            del knot
            gc.collect()
            await asyncio.sleep(0.05)
            assert gone() is not None
            resident = 200
            await asyncio.sleep(0.05)
            assert gone() is None

    asyncio.run(main())
