"""The probe of a push is computed while servers start; chat templates of servers are compared with the trainer's."""

import asyncio
import threading

import pytest
import tiny

from areax import models
from areax.adapters import hf, tokenizer
from areax.recipes.shared import probe
from areax.rollout import client
from areax.rollout.engine import in_process
from areax.rollout.servers.engine_options import EngineOptions


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


@pytest.mark.slow
def test_a_server_with_another_chat_template_is_named(tmp_path, caplog):
    ours, theirs = tokenizer.byte_level(), tokenizer.byte_level()
    source = {**tiny.HF, "vocab_size": len(ours), "eos_token_id": ours.eos_token_id}
    config = models.config_from_hf(source)
    hf.save(tmp_path, config, tiny.weights(models.table(config), 0.2), tokenizer=theirs)
    assert "assistant" in ours.chat_template

    async def main():
        with in_process.serving(str(tmp_path), EngineOptions(slots=2, context=64), dtype="float32") as (url, _):
            async with client.connect([url]) as fleet:
                await probe.compare_templates(fleet.servers, ours, {})
                assert not caplog.text
                ours.chat_template = ours.chat_template.replace("assistant", "Assistant")
                await probe.compare_templates(fleet.servers, ours, {})
                assert (
                    f"{url}: its chat template makes other tokens of a conversation than the trainer's" in caplog.text
                )

    asyncio.run(main())


def test_programs_for_each_length_are_computed_once():
    computed = []

    async def start():
        async with probe.ahead(computed.append, (1, 2), (3, 4, 5), (6, 7, 8), ()):
            pass

    asyncio.run(start())
    assert sorted(map(len, computed)) == [2, 3]
