"""Versions by way of a bucket: uploaded once, complete or not there, verified as from a file server."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
import staging
from scripted import V0, run, serving, states, until
from staging import KEY, contents, process, published

from areax.rollout import client
from areax.rollout.errors import ServerError
from areax.rollout.fleet.push import push_weights
from areax.rollout.servers.types import Published
from areax.rollout.weights import fetch, file_server, object_store
from areax.rollout.weights.object_store import Bucket, BucketSource

RUN = "0123456789abcdef"


@pytest.fixture
def weights():
    return staging.similar(300_000)


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name in ("trainer", "server", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(fetch, "PAUSE_S", 0.001)
    monkeypatch.setattr(object_store, "RANGE", 100_000)
    return tmp_path


def at(place):
    return f"file://{place}/bucket"


def fetched(place, label, folder="server"):
    """What `fetch_version` reports of a version in the bucket."""
    return fetch.fetch_version(place / folder, label, [BucketSource(Bucket(at(place), "--bucket"), label)])


def objects(place):
    return sorted(str(path.relative_to(place / "bucket")) for path in (place / "bucket").rglob("*") if path.is_file())


def test_versions_arrive_intact_and_later_ones_as_deltas(place, weights):
    tower = weights[3][:50_000]

    async def main():
        async with object_store.opened(at(place), RUN, keep=False) as bucket:
            said = []
            for v, data in enumerate(weights):
                one = published(place / "trainer", v, data, tower=tower)
                told = await asyncio.gather(*(bucket.offered(one) for _ in range(3)))
                assert told == [{"sources": [at(place)], "source_key": ""}] * 3
                said.append(await fetched(place, one.label))
                assert contents(said[-1]["path"]) == contents(one.directory)
            assert [one["delta"] for one in said] == [False, True, True, False]  # a delta of the last would not pay
            assert max(said[1]["bytes"], said[2]["bytes"]) < 30_000  # the tower does not change
            assert 300_000 < said[3]["bytes"] < 350_000 < said[0]["bytes"]
            before = published(place / "trainer", 9, weights[1])
            await bucket.offered(before)
            assert not (await fetched(place, before.label, "other"))["delta"]  # holds nothing
            assert (await fetched(place, said[2]["path"].rpartition("/")[2], "other"))["delta"] is False  # another base
        assert objects(place) == []

    run(main)


def test_a_transfer_resumes_by_ranges_and_damage_is_noticed(place, weights):
    async def main():
        async with object_store.opened(at(place), RUN, keep=True) as bucket:
            one, two = (published(place / "trainer", v, weights[v]) for v in (0, 1))
            await bucket.offered(one)
            part = place / f"server/.{one.label}.part"
            part.mkdir()
            (part / "model.safetensors").write_bytes(weights[0][:170_000])
            said = await fetched(place, one.label)
            assert said["resumed"] == 170_000 and contents(said["path"]) == contents(one.directory)
            assert said["bytes"] == sum(map(len, contents(one.directory).values())) - 170_000

            await bucket.offered(two)
            [delta] = (place / "bucket").rglob("*.delta")
            delta.write_bytes(delta.read_bytes()[:-9] + b"unreadable"[:9])
            said = await fetched(place, two.label)
            assert not said["delta"] and contents(said["path"]) == contents(two.directory)

            stored = place / "bucket" / two.label / "model.safetensors"
            for data, words in (
                (weights[0], "model.safetensors: arrived damaged twice"),
                (weights[1][:250_000], "5 attempts in a row without progress; the last: Failed: .*: 250000 of 300000"),
            ):
                stored.write_bytes(data)
                with pytest.raises(RuntimeError, match=words):
                    await fetched(place, two.label, "other")
            stored.unlink()
            with pytest.raises(ValueError, match=f"{two.label}/model.safetensors: is not there .* No such file"):
                await fetched(place, two.label, "other")
            (place / "bucket" / two.label / "listing.json").write_text('{"files": {"conf')
            for label in (two.label, "7-00000000"):
                with pytest.raises(ValueError, match=f"file://.*/bucket/{label}: there is no such version"):
                    await fetched(place, label, "other")
            assert fetch.kept(place / "other") == []

    run(main)


def test_a_full_disk_leaves_nothing_behind(place, weights, monkeypatch):
    async def main():
        async with object_store.opened(at(place), RUN, keep=True) as bucket:
            one = published(place / "trainer", 0, weights[0])
            await bucket.offered(one)
            with monkeypatch.context() as patch:
                patch.setattr(object_store, "open", staging.Full, raising=False)
                with pytest.raises(OSError, match="No space left"):
                    await fetched(place, one.label)
            assert os.listdir(place / "server") == []
            await fetched(place, one.label)

    run(main)


def test_a_request_that_is_not_answered_is_given_up(place, weights, monkeypatch):
    async def main():
        async with object_store.opened(at(place), RUN, keep=True) as bucket:
            one = published(place / "trainer", 0, weights[0])
            await bucket.offered(one)
            stuck = place / "bucket" / one.label / "model.safetensors"
            stuck.unlink()
            os.mkfifo(stuck)  # opening it waits for a writer
            monkeypatch.setattr(object_store, "REQUEST_S", 0.05)
            with pytest.raises(RuntimeError, match="5 attempts in a row.*: TimeoutError: no answer in 0.05 s"):
                await fetched(place, one.label)

    run(main)


def test_an_upload_that_fails_is_repeated_and_is_not_seen_before_it_is_complete(place, weights):
    async def main():
        async with object_store.opened(at(place), RUN, keep=True) as bucket:
            one, two = (published(place / "trainer", v, weights[v]) for v in (0, 1))
            await bucket.offered(one)
            folder = place / "bucket" / two.label / "manifest.json"
            folder.mkdir(parents=True)
            (folder / "in_the_way").touch()
            for error in await asyncio.gather(*(bucket.offered(two) for _ in range(3)), return_exceptions=True):
                assert isinstance(error, ServerError) and "manifest.json: 5 attempts in a row" in str(error)
            with pytest.raises(ValueError, match="there is no such version"):
                await fetched(place, two.label)
            (folder / "in_the_way").unlink()
            folder.rmdir()
            await bucket.offered(two)
            assert contents((await fetched(place, two.label))["path"]) == contents(two.directory)
            (Path(two.directory) / "config.json").unlink()
            Path(one.directory).rename(place / "trainer/gone")
            with pytest.raises(ServerError, match="trainer/0: .*No such file"):
                await bucket.offered(Published(one.directory, "7-00000000"))

    run(main)


def test_a_bucket_belongs_to_one_run(place, weights):
    url = at(place)

    async def main():
        await object_store.check_owner(url, "")
        assert not (place / "bucket").exists()
        async with object_store.opened(url, RUN, keep=False) as bucket:
            await bucket.offered(published(place / "trainer", 0, weights[0]))
            await object_store.check_owner(url, RUN)
            for other, words in (("ff", "this one is ff"), ("", "this one is new")):
                with pytest.raises(
                    ValueError, match=f"--push.bucket {url}: holds versions of another run .{RUN}, {words}"
                ):
                    async with object_store.opened(url, other, keep=False):
                        pass
        await object_store.check_owner(url, "ff")  # it is free again
        (place / "bucket/run").write_text("\x1b[2J\n" * 99)
        with pytest.raises(ValueError, match=r"versions of another run \(\\x1b\[2J\\n.{60,80}, this one is ff\)"):
            await object_store.check_owner(url, "ff")
        (place / "bucket/run").unlink()
        (place / "bucket/notes.txt").write_text("mine")
        with pytest.raises(ValueError, match="must be empty or of the same run, got other objects; name another"):
            await object_store.check_owner(url, RUN)

    run(main)


def test_old_versions_are_removed_and_those_of_a_killed_run(place, weights):
    async def main():
        async with object_store.opened(at(place), RUN, keep=True) as bucket:
            made = [published(place / "trainer", v, weights[v]) for v in range(3)]
            for one in made[:2]:
                await bucket.offered(one)
        first = {path: os.stat(place / "bucket" / path).st_mtime_ns for path in objects(place)}
        for path in ("5-00000000/model.safetensors", "6-00000000/listing.json"):  # half written, and half removed
            (place / "bucket" / path).parent.mkdir()
            (place / "bucket" / path).write_text("{}")
        async with object_store.opened(at(place), RUN, keep=True) as bucket:
            await bucket.offered(made[1])
            for path in first:  # what is there is not uploaded again
                assert os.stat(place / "bucket" / path).st_mtime_ns == first[path]
            await bucket.prune()
            assert {path.partition("/")[0] for path in objects(place)} == {"run", made[1].label}
            await bucket.offered(made[2])
            assert json.loads((place / "bucket" / made[2].label / "listing.json").read_text())["delta"]
            os.rename(made[1].directory, place / "trainer/gone")
            await bucket.prune()
        assert {path.partition("/")[0] for path in objects(place)} == {"run", made[2].label}

    run(main)


@pytest.mark.slow
def test_a_fleet_pushes_by_a_bucket_alone(place, weights, monkeypatch):
    monkeypatch.setenv(file_server.KEY, KEY)
    more = ("--bucket", at(place))

    async def main():
        async with object_store.opened(at(place), RUN, keep=False) as bucket, serving(V0) as a, serving(V0) as b:
            with process(place / "a", *more) as (first, _), process(place / "b", *more) as (second, own):
                async with client.connect([a.url, b.url], stagers=[first, second], source=bucket) as fleet:
                    for v in (1, 2):
                        one = published(place / "trainer", v, weights[v])
                        report = await push_weights(fleet, one.directory, one.label)
                        assert set(report.loaded) == {a.url, b.url}
                        assert report.stage_bytes > 600_000 if v == 1 else 0 < report.stage_bytes < 60_000
                        assert contents(place / "b" / one.label) == contents(one.directory)
                    own.kill()
                    three = published(place / "trainer", 3, weights[3])
                    report = await push_weights(fleet, three.directory, three.label)
                    assert report.loaded == (a.url,) and states(fleet) == ["healthy", "stale"]
                    with process(place / "b", *more, port=second.rpartition(":")[2]):
                        await until(lambda: states(fleet) == ["healthy", "healthy"])
                    assert b.label == three.label

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_stager_of_a_bucket_fetches_from_nowhere_else(place, weights):
    async def main():
        with process(place / "server", "--bucket", at(place) + "/") as (url, _):
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http:
                for source, words in (
                    ("http://127.0.0.1:1", "the source must be file://.*/bucket, which this stager was started with"),
                    (f"file://{place}", "the source must be file://"),
                    (at(place), "there is no such version"),
                ):
                    body = {"label": "1-00000000", "sources": [source], "source_key": ""}
                    async with http.post(f"{url}/stage", json=body) as reply:
                        error = (await reply.json())["error"]["message"]
                        assert reply.status == 400 and re.search(words, error)

    run(main)


@pytest.mark.parametrize(
    "url, words",
    [
        ("nope://a/b", "--bucket nope://a/b: Protocol not known: nope"),
        ("folder", "--bucket: must be a folder of an object store, such as s3://BUCKET/PREFIX, .*got 'folder'"),
        ("simplecache::s3://a/b", "--bucket: must be a folder of an object store"),
        ("s3://me:secret@a/b", "--bucket: an address must have no user, password or query"),
        *(
            (url, r"--bucket: must be a folder of an object store, such as s3://BUCKET/PREFIX, without \* \[ \] and")
            for url in (
                "s3://a/run*",
                "s3://a/run[1]",
                "s3://a/b\n",
                " s3://a/b",
                "S3://a/b",
                "c://a/b",
                "memory://a/b",
            )
        ),
        ("ftp://127.0.0.1:1/b", "--bucket ftp://127.0.0.1:1/b: .*Connection refused"),
        ("reference://a", "--bucket reference://a: .*missing 1 required positional argument"),
    ],
)
def test_addresses_of_buckets(url, words):
    with pytest.raises(ValueError, match=words):
        Bucket(url, "--bucket")


@pytest.mark.slow
def test_a_missing_package_is_named_in_one_line(tmp_path):
    for protocol, package in (("s3", "Install s3fs to access S3"), ("gs", "install gcsfs to access Google Storage")):
        command = [sys.executable, "-m", "areax.rollout.weights.stager", "--root", str(tmp_path / "x"), "--port", "0"]
        done = subprocess.run([*command, "--bucket", f"{protocol}://a/b"], capture_output=True, text=True)
        assert done.returncode == 2 and package in done.stderr and len(done.stderr.splitlines()) == 1
