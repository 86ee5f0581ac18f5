"""The probe of a push is computed once while servers start."""

import asyncio
import threading

import pytest

from areax.recipes.shared import probe


def test_the_probe_is_computed_in_a_thread_during_the_block():
    computed, inside = threading.Event(), threading.Event()

    def known(ids):
        assert ids == (1, 2) and inside.wait(60)  # the block is not waiting for it
        computed.set()

    async def start(ids):
        async with probe.ahead(known, ids):
            inside.set()
        return computed.is_set()

    assert asyncio.run(start((1, 2)))
    computed.clear()
    assert not asyncio.run(start(()))


def test_what_fails_there_ends_the_block():
    def known(ids):
        raise ValueError("no memory")

    async def start():
        async with probe.ahead(known, (1, 2)):
            pass

    with pytest.raises(ValueError, match="no memory"):
        asyncio.run(start())
