"""Versions in parts: each process serves its own and nothing else, and what arrives is the whole."""

import asyncio
import contextlib
import errno
import os
from pathlib import Path

import pytest
import staging
from scripted import run, until
from staging import contents

from areax.rollout.servers.labels import read_label
from areax.rollout.servers.types import Published
from areax.rollout.weights import fetch, file_server, http_source, parts, store

COUNT = 3  # processes


@pytest.fixture
def place(tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "server").mkdir()
    return tmp_path


@contextlib.asynccontextmanager
async def trainer():
    """(the source of stagers, what the other processes keep), all of them in this process."""
    async with file_server.serve("127.0.0.1") as own:
        with contextlib.ExitStack() as stack:
            others = [stack.enter_context(parts.keeping("http://127.0.0.1:1", own.key, 0)) for _ in range(COUNT - 1)]
            yield parts.Parts(own, [one.url for one in others]), others


def failed(error):
    raise AssertionError(error)


async def offered(place, source, others, v, data, kept=()):
    """(version, what a stager is told of it, its files) with these bytes for tensors."""
    size = len(data) // COUNT
    files = {f"model-{i}.safetensors": data[i * size : (i + 1) * size] for i in range(COUNT)}

    def write(path, name):
        path.mkdir()
        (path / name).write_bytes(files[name])
        return {name: {"first": files[name][:8].hex()}}

    asked = asyncio.create_task(source.tensors(v))  # before they have begun
    await asyncio.sleep(0.01)
    for one, name in zip(others, [*files][1:], strict=True):
        one.keep(v, lambda path, name=name: write(path, name), kept, failed)
    entries = await asked
    directory = place / f"trainer/{v}"
    entries |= write(directory, "model-0.safetensors")
    manifest = directory / "manifest.json"
    manifest.write_text(f'{{"version": {v}, "tensors": "{sorted(entries.items())}"}}')
    version = Published(str(directory), read_label(manifest))
    return version, await source.offered(version), files | {"manifest.json": manifest.read_bytes()}


@contextlib.asynccontextmanager
async def sources(label, told):
    async with http_source.session(told["source_key"]) as http:
        yield [http_source.HTTPSource(http, f"{url}/{label}") for url in told["sources"]]


async def fetched(place, label, told):
    async with sources(label, told) as found:
        return await fetch.fetch_version(place / "server", label, found)


def test_versions_arrive_whole_and_later_ones_as_deltas_of_each_part(place):
    async def main():
        async with trainer() as (source, others):
            sent, made = [], []
            for v, data in enumerate(staging.similar()[:3]):
                version, told, files = await offered(place, source, others, v, data, kept=[v - 1])
                said = await fetched(place, version.label, told)
                assert contents(said["path"]) == files
                sent.append((said["bytes"], said["delta"]))
                made.append(version)
                for one in made[-2:]:  # also for a server that recovers while the next version is pushed
                    assert await source.offered(one) == told
                    async with sources(one.label, told) as found:
                        assert all([(await part.listing("", ""))["files"] for part in found])
                async with sources(version.label, told) as found:
                    names = [sorted((await one.listing("", ""))["files"]) for one in found]
                assert names[0] == ["manifest.json", "model-0.safetensors"]
                assert names[1:] == [["model-1.safetensors"], ["model-2.safetensors"]]
            assert [delta for _, delta in sent] == [False, True, True]
            assert max(sent[1][0], sent[2][0]) < 0.1 * sent[0][0]
            for one in others:
                assert sorted(path.name for path in one._root.iterdir() if path.is_dir()) == ["1", "2"]
        assert not others[0]._root.exists()

    run(main)


def test_a_part_goes_to_whoever_has_the_key_and_knows_the_label(place):
    async def main():
        async with trainer() as (source, others):
            version, told, _ = await offered(place, source, others, 0, bytes(90))
            with pytest.raises(ValueError, match="HTTP 401: the key is missing or wrong"):
                await fetched(place, version.label, told | {"source_key": "another"})
            with pytest.raises(ValueError, match=f"{others[0].url}/0-00000000: HTTP 404: no version 0-00000000 here"):
                await fetched(place, "0-00000000", told | {"sources": told["sources"][1:]})
            async with http_source.session(told["source_key"]) as http:
                with pytest.raises(ValueError, match="HTTP 404: no part of version 1-00000000 here"):
                    await http_source.asked(http, "POST", f"{others[0].url}/parts/1-00000000")
            with pytest.raises(RuntimeError, match="must name files once, without folders"):
                await fetched(place, version.label, told | {"sources": [told["sources"][0], *told["sources"][1:] * 2]})
            with pytest.raises(RuntimeError, match="the listing of .* is malformed"):  # without process 0's part
                await fetched(place, version.label, told | {"sources": told["sources"][1:]})
            assert not [path for path in (place / "server").iterdir() if not path.name.startswith(".")]

    run(main)


def test_a_part_that_is_damaged_or_gone_fails_the_version_and_is_named(place, monkeypatch):
    monkeypatch.setattr(fetch, "PAUSE_S", 0.001)

    async def main():
        async with trainer() as (source, others):
            version, told, files = await offered(place, source, others, 0, os.urandom(3000))
            async with sources(version.label, told) as found:
                await found[1].listing("", "")  # hashes its file
            part = others[0]._root / "0/model-1.safetensors"
            part.write_bytes(bytes(1000))
            where = f"{others[0].url}/{version.label}/model-1.safetensors"
            with pytest.raises(RuntimeError, match=f"^{where}: arrived damaged twice"):
                await fetched(place, version.label, told)
            assert not (place / "server" / version.label).exists()
            part.unlink()
            with pytest.raises(ValueError, match=f"^{where}: HTTP 404"):
                await fetched(place, version.label, told)
            part.write_bytes(files["model-1.safetensors"])
            said = await fetched(place, version.label, told)
            assert contents(said["path"]) == files and said["bytes"] < 1500  # the others have stayed
        with pytest.raises(RuntimeError, match=f"^{told['sources'][0]}/1-00000000: 5 attempts in a row without"):
            await fetched(place, "1-00000000", told)

    run(main)


def test_a_full_disk_of_another_process_is_its_error(monkeypatch):
    monkeypatch.setattr(store, "ROOMS", 0)
    errors = []

    async def main():
        async with trainer() as (_, others):
            others[0].keep(0, lambda path: Path("/dev/full").write_bytes(bytes(9)), (), errors.append)
            await until(lambda: errors)

    run(main)
    assert [error.errno for error in errors] == [errno.ENOSPC]
