"""The in-process engine: weights handed over as arrays equal those loaded from files."""

import asyncio
import json

import jax
import jax.numpy as jnp
import numpy as np
import parrot
import pytest
import tiny

from areax import models
from areax.adapters import hf, tokenizer
from areax.rollout import client
from areax.rollout.engine import in_process
from areax.rollout.fleet import offload
from areax.rollout.fleet.push import push_weights
from areax.rollout.servers.engine_options import EngineOptions
from areax.rollout.servers.labels import label_of, read_label
from areax.rollout.servers.types import Published

OPTIONS, DTYPE = EngineOptions(slots=2, context=64), "float32"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """(root, config, fp32 master weights of three versions) of a model stored in bf16; `root`/v is version v."""
    root = tmp_path_factory.mktemp("inside")
    tiny.model(root / "model", dtype="bfloat16")
    config, _ = hf.load(root / "model")
    masters = [tiny.weights(models.table(config), 0.2, v) for v in range(3)]
    for v, params in enumerate(masters):
        hf.write_published(root, v, config, params)
    return root, config, masters


def handed(place, v, masters=None):
    """(label, weights) of a version."""
    config, params = place[1], masters or place[2][v]
    manifest = hf.manifest(config, params, version=v)
    return label_of(hf.json_bytes(manifest)), in_process.Weights(config, params, manifest)


@pytest.mark.parametrize("v", [0, 2])
def test_a_manifest_in_memory_equals_the_written_file(place, v):
    root, config, masters = place
    written = (root / str(v) / "manifest.json").read_bytes()
    assert hf.json_bytes(hf.manifest(config, masters[v], version=v)) == written
    label, weights = handed(place, v)
    assert label == read_label(root / str(v) / "manifest.json")
    assert weights.checksums().keys() == json.loads(written)["tensors"].keys()


async def seen(fleet):
    """(versions, tokens, log-probabilities, checksums) of the server's current weights."""
    [server] = fleet.servers
    done = await fleet.generate([5, 6, 7], temperature=1.0, max_new_tokens=20, ignore_eos=True, seed=3)
    sums = (await server.api.checksums())[0]
    return done.version, done.tokens, done.logp, sums


@pytest.mark.slow
def test_weights_handed_over_as_arrays_equal_those_from_files(place):
    """Bit for bit, whatever becomes of the trainer's buffers once they are staged."""
    root, _, masters = place

    async def main(url, handover):
        async with client.connect([url]) as fleet:
            assert fleet.servers[0].label == "0-begun"
            versions = []
            for v in (0, 1, 2):
                await push_weights(fleet, root / str(v), read_label(root / str(v) / "manifest.json"))
                versions.append(await seen(fleet))
            fleet.servers[0].handover = handover
            for v in (0, 1, 2):
                trainers = jax.tree.map(jnp.copy, masters[v])
                label, weights = handed(place, v, trainers)
                if v == 1:
                    await offload.offload(fleet)
                ready = handover.stage(label, weights)
                jax.jit(lambda x: jax.tree.map(lambda w: w * 0, x), donate_argnums=0)(trainers)
                report = await push_weights(fleet, "", label, arrays=ready)
                assert report.failed == {} and 0 < report.load_s <= report.pause_s
                assert handover.stage(label, weights).staged is ready.staged  # what it has is not copied again
                assert await seen(fleet) == versions[v]
            entries = json.loads((root / "2/manifest.json").read_text())["tensors"]
            assert versions[2][3] == {name: entry["xxh3_128"] for name, entry in entries.items()}
            assert versions[0][1:] != versions[1][1:]

    with in_process.serving(str(root / "model"), OPTIONS, lambda: ("0-begun", handed(place, 2)[1]), dtype=DTYPE) as (
        url,
        handover,
    ):
        asyncio.run(main(url, handover))


@pytest.mark.slow
def test_a_base_model_stops_at_the_end_of_turn_of_its_chat_template(tmp_path):
    """Its files name only the end of text; versions that name both ends are the model that is served."""
    path = parrot.model(tmp_path / "model", ["go", "four"], template=tokenizer.CHAT_TEMPLATE)
    for name in ("config.json", "generation_config.json"):
        (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | {"eos_token_id": 0}))
    tokens = tokenizer.load(path)
    tokens.eos_token = "<pad>"
    tokenizer.save(tokens, path)
    config, params = hf.load(path)
    assert config.eos == (0,) and tokenizer.stop_ids(tokens) == (0, tokenizer.end_of_turn(tokens))
    version = hf.write_published(tmp_path, 1, config, params, tokenizer=tokens)

    async def main(url):
        async with client.connect([url]) as fleet:
            go, four, end = tokens.convert_tokens_to_ids(["go", "four", "<|im_end|>"])
            for _ in range(2):
                done = await fleet.generate([go], temperature=0.0, max_new_tokens=8)
                assert (done.tokens, done.finish) == ([four, end], "stop")
                await push_weights(fleet, version, read_label(version / "manifest.json"))

    with in_process.serving(str(path), OPTIONS, dtype=DTYPE) as (url, _):
        asyncio.run(main(url))


@pytest.mark.slow
def test_the_key_of_servers_guards_it_too(place, monkeypatch):
    monkeypatch.setenv("AREAX_SERVER_KEY", "secret")

    async def main(url):
        async with client.connect([url]) as fleet:
            await seen(fleet)
        with pytest.raises(ValueError, match="HTTP 401"):
            async with client.connect([url], key_variable=""):
                pass

    with in_process.serving(str(place[0] / "model"), OPTIONS, dtype=DTYPE) as (url, _):
        asyncio.run(main(url))


@pytest.mark.slow
@pytest.mark.parametrize("released", [False, True])
def test_a_server_that_has_to_reload_gets_the_weights_of_the_last_push(place, released):
    """Those of a failed push if the engine has released the ones before."""
    root = place[0]
    (label, first), (other, second) = (handed(place, v) for v in (1, 2))
    given = []

    async def main(url, handover):
        async def flawed(server, weights, flush_cache):
            given.append(weights.label)
            if weights.label == other and given.count(other) == 1:
                raise RuntimeError("RESOURCE_EXHAUSTED")
            await handover(server, weights, flush_cache)

        async with client.connect([url], timeouts=client.Timeouts(retry_s=0.02)) as fleet:
            fleet.servers[0].handover = flawed
            ready = handover.stage(label, first)
            await push_weights(fleet, "", label, arrays=ready)
            if released:
                await offload.offload(fleet)
            await push_weights(fleet, "", other, arrays=handover.stage(other, second))
            assert given == [label, other, other if released else label, other] and fleet.counts["undone"] == 1
            assert set((await seen(fleet))[0]) == {2}
            if released:
                with pytest.raises(ValueError, match=f"version {label} was released with the engine's memory"):
                    await handover(None, Published("", label, arrays=ready), True)
            strange = in_process.Weights(first.config, {**first.params, "norm": np.ones(3, np.float32)}, first.manifest)
            with pytest.raises(ValueError, match="parameter norm must be .*, got .*3,"):
                handover.stage("3-00000000", strange)
            assert set((await seen(fleet))[0]) == {2}

    with in_process.serving(str(root / "model"), OPTIONS, dtype=DTYPE) as (url, handover):
        asyncio.run(main(url, handover))


def test_a_directory_must_exist_even_if_arrays_are_given(tmp_path):
    with pytest.raises(ValueError, match="the directory to push must exist"):
        asyncio.run(push_weights(None, tmp_path / "nowhere", "1-00000000", arrays=()))
