"""Versions that are LoRA adapters: which servers accept them, their base, and which stay loaded."""

import asyncio
import contextlib
import json

import aiohttp.web
import pytest
import scripted
import virtual

from areax.rollout import client
from areax.rollout.errors import ServerError
from areax.rollout.fleet.push import push_weights
from areax.rollout.servers.labels import read_label
from areax.rollout.servers.server import Server
from areax.rollout.servers.sglang import SGLang
from areax.rollout.servers.sglang_answers import adapter_refusal
from areax.rollout.servers.types import Part, Probe, Published
from areax.rollout.simulation import clock
from areax.rollout.weights import lora, verify

ABLE = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj", "v_proj"], "max_loaded_loras": None}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, ""),
        ({"lora_target_modules": ["all"], "max_lora_rank": None, "max_loaded_loras": 3, "dp_size": 1}, ""),
        ({"enable_lora": None}, "--enable-lora"),
        ({"max_lora_rank": 7}, "rank 7 at most, not 8"),
        ({"lora_target_modules": ["q_proj"]}, "no adapters of v_proj"),
        ({"max_loaded_loras": 2}, "keeps 2 adapters at most"),
        ({"dp_size": 2}, "--dp-size"),
    ],
)
def test_which_servers_accept_adapters(changes, words):
    said = adapter_refusal(ABLE | changes, 8, ["q_proj", "v_proj"])
    assert words in said and bool(said) == bool(words)


def test_adapters_name_their_base(tmp_path):
    base, path = tmp_path / "base", tmp_path / "adapter"
    base.mkdir(), path.mkdir()
    assert lora.published(base, "1-00000000").base is None
    (path / lora.CONFIG).write_text(json.dumps({"base_model_name_or_path": str(base)}))
    with pytest.raises(ValueError, match="adapters to push need a manifest and a published base"):
        lora.published(path, "1-00000000")
    (base / "manifest.json").write_text('{"version": 0}')
    label = read_label(base / "manifest.json")
    (path / "manifest.json").write_text(json.dumps({"base": label}))
    found = lora.published(path, "1-00000000")
    assert (found.base.directory, found.base.label) == (str(base), label)
    (base / "manifest.json").write_text('{"version": 1}')
    with pytest.raises(ValueError, match=f"belong to the base {label}, but .*base is 1-"):
        lora.published(path, "1-00000000")


def test_a_manifest_that_is_no_file_is_refused_before_a_push(tmp_path):
    (tmp_path / "manifest.json").mkdir()
    for names in ({}, {"base_model_name_or_path": str(tmp_path)}):
        (tmp_path / lora.CONFIG).write_text(json.dumps(names))
        with pytest.raises(ValueError, match="manifest.json: must be a file"):
            lora.published(tmp_path, "1-00000000")
        (tmp_path / lora.CONFIG).unlink()


def test_a_base_whose_load_ended_half_way_is_loaded_and_proved_again(tmp_path):
    """The server took the weights and answered with an error, as SGLang does while requests run."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base/manifest.json").write_text('{"version": 0}')
    base = read_label(tmp_path / "base/manifest.json")

    def version(v):
        (path := tmp_path / str(v)).mkdir()
        (path / "manifest.json").write_text(json.dumps({"version": v, "base": base}))
        (path / lora.CONFIG).write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "base")}))
        return path, read_label(path / "manifest.json")

    async def main():
        async with scripted.serving("default") as a, client.connect([a.url], timeout_s=20) as fleet:
            [server] = fleet.servers
            await push_weights(fleet, *version(1))
            a.label, a.source, a.adapters = "default", "/models/other", {}  # killed, and started again

            async def failing(request, body):
                del a.refuse["/update_weights_from_disk"]
                a.label, a.source = body["weight_version"], "/models/other"
                return aiohttp.web.json_response({"success": False, "message": "not flushed"}, status=400)

            a.refuse["/update_weights_from_disk"] = failing
            fleet.mark_suspect(server, "killed")
            await scripted.until(lambda: server.state == "healthy")
            assert server.weights_verified.is_set() and a.source == str(tmp_path / "base")
            assert (await fleet.generate([1], max_new_tokens=2)).version == [1, 1]

    scripted.run(main)


def test_an_adapter_of_the_same_name_from_another_folder_is_replaced():
    network = virtual.Network()
    url = network.start(0.01)
    engine = network.servers[url]
    engine.weights = engine.label = base = f"{virtual.BASE}00000000"
    name = "1-11111111"
    server = Server(SGLang(url, network), [base], base=base)
    version = Published("mine", name, Published("base", base))

    async def main():
        engine.adapters |= {name: "of another run", "4-22222222": "of another run, too", "mine": "a user's own"}
        await lora.load(server, version, version.base, "retract")
        assert engine.adapters == {name: "mine", "mine": "a user's own"} and server.label == name
        engine.faults["/load_lora_adapter"] = "refuse"  # it is not loaded twice
        await lora.load(server, version, version.base, "retract")
        assert engine.adapters == {name: "mine", "mine": "a user's own"} and server.adapters == [name]

    clock.run(asyncio.wait_for(main(), 10))


@pytest.mark.parametrize(
    "info, label",
    [({}, "1-1"), ({"lora_path": "1-1"}, "1-1"), ({"lora_path": "0-0"}, "0-0"), ({"lora_path": None}, "base-1")],
)
def test_tokens_of_the_base_are_the_adapters_unless_the_server_says_that_it_used_none(info, label):
    server = Server(SGLang("http://a", virtual.Network()), ["base-1"], base="base-1")
    part = Part([5], [-1.0], ["base-1"], "length", "", info, adapter=info.get("lora_path") or "")
    assert lora.stamped(server, "1-1", part).labels == [label] and lora.stamped(server, "", part) is part


@pytest.mark.parametrize(
    "trainer, server, refused",
    [
        ([-1.1, -2.1], [-1.01, -2.02], True),  # still the version before
        ([-1.1, -2.1], [-1.1, -2.1], False),
        ([-1.1, -2.1], [-1.03, -2.05], False),  # by its rounding
        ([-1.001, -2.0], [-1.01, -2.02], False),  # a step that rounding may hide
    ],
)
def test_log_probabilities_of_the_probe_must_move_as_the_trainers_do(trainer, server, refused):
    """A server has no checksums of adapters."""
    here = Server(SGLang("http://a", virtual.Network()), ["default"])

    def probe(known, theirs):
        part = Part([], [], [], "length", "", {}, inputs=[[None, 5], *([x] for x in theirs)])
        return verify.probe_difference(here, Probe((5, 6, 7), tuple(known), 0.2), part)

    assert probe([-1.0, -2.0], [-1.01, -2.02]) == pytest.approx(0.015)
    if not refused:
        probe(trainer, server)
        return
    with pytest.raises(ServerError, match=r"http://a: .* by 0.1 nats per token, got 0: it answered"):
        probe(trainer, server)
    probe(trainer, trainer)  # loaded again


def test_small_steps_of_the_trainer_that_a_server_never_takes_add_up():
    here = Server(SGLang("http://a", virtual.Network()), ["default"])
    part = Part([], [], [], "length", "", {}, inputs=[[None, 5], [-1.0]])
    for step in range(4):  # 0.005 nats each
        verify.probe_difference(here, Probe((5, 6), (-1.0 - 0.005 * step,), 0.2), part)
    with pytest.raises(ServerError, match="by 0.025 nats per token, got 0: it answered a push with success"):
        verify.probe_difference(here, Probe((5, 6), (-1.025,), 0.2), part)


def test_an_adapter_that_fails_the_probe_is_loaded_again():
    network = virtual.Network()
    url = network.start(0.01)
    engine = network.servers[url]
    engine.weights = engine.label = base = f"{virtual.BASE}00000000"
    server = Server(SGLang(url, network), [base], base=base)

    async def main():
        for known in (-9.0, -1.0):  # an adapter of version 1 answers with -1
            probe = Probe((5, 6, 7), (known, known), 0.2)
            version = Published("mine", "1-11111111", Published("base", base), probe=probe)
            with pytest.raises(ServerError) if known == -9.0 else contextlib.nullcontext():
                await lora.load(server, version, version.base, "retract")
            assert [*engine.adapters] == server.adapters == ([] if known == -9.0 else ["1-11111111"])

    clock.run(asyncio.wait_for(main(), 10))


def test_unused_adapters_are_unloaded():
    """All but the newest two and those in use; adapters that others loaded under their own names stay."""
    network = virtual.Network()
    url = network.start(0.01)
    names = [f"{v}-0000000{v}" for v in range(6)]
    network.servers[url].adapters = dict.fromkeys(["mine", *names], "somewhere")
    server = Server(SGLang(url, network), ["default"], adapters=names[1:])

    async def main():
        with lora.using(server, names[2]):
            await lora.unload(server)
            assert [*network.servers[url].adapters] == ["mine", names[2], *names[4:]]
            assert server.adapters == [names[2], *names[4:]]
        assert lora.choose(server, names[2]) == names[2] and lora.choose(server, names[3]) == names[5]
        network.servers[url].faults["/unload_lora_adapter"] = "refuse"
        await lora.unload(server)  # it may fail, and is retried next time
        assert server.adapters == names[4:]
        await lora.unload(server)
        assert [*network.servers[url].adapters] == ["mine", *names[4:]]

    clock.run(asyncio.wait_for(main(), 10))
