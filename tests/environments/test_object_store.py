"""Published versions by way of S3: the real s3fs, against a server with S3's API on loopback (moto)."""

import asyncio
import concurrent.futures
import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter

import aiohttp
import aiohttp.web
import pytest
import servers
import staging
import tiny
from scripted import V0, run, serving
from staging import KEY, contents, process, published

from areax.rollout import client
from areax.rollout.fleet.push import push_weights
from areax.rollout.tasks import arithmetic
from areax.rollout.weights import fetch, file_server, object_store
from areax.rollout.weights.object_store import Bucket, BucketSource

moto = pytest.importorskip("moto.server")
settings = pytest.importorskip("moto.settings")
s3fs = pytest.importorskip("s3fs")

RUN, URL = "0123456789abcdef", "s3://models/a/prefix"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def server():
    own = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    own.start()
    yield "http://{}:{}".format(*own.get_host_and_port())
    own.stop()


@pytest.fixture
def s3(server, monkeypatch):
    """Yields the file system, with an empty bucket "models"."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server)
    for name, value in {"ACCESS_KEY_ID": "id", "SECRET_ACCESS_KEY": "key", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(fetch, "PAUSE_S", 0.01)
    s3fs.S3FileSystem.clear_instance_cache()
    store = s3fs.S3FileSystem(use_listings_cache=False)
    store.mkdir("models")
    yield store
    urllib.request.urlopen(f"{server}/moto-api/reset", b"").close()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def place(tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "server").mkdir()
    return tmp_path


@pytest.fixture
def weights():
    return staging.similar(300_000)


@contextlib.asynccontextmanager
async def between(server, monkeypatch, *faults):
    """A proxy of the server, which s3fs then uses; yields a count of (method, path) so far.

    Args:
      faults: what becomes of successive GETs of tensors: 503; "cut" half-way; None = nothing.
    """
    faults, asked = list(faults), Counter()
    drop = {"host", "content-length", "transfer-encoding", "connection", "content-encoding"}

    async def forward(request):
        asked[request.method, request.path] += 1
        headers = {name: value for name, value in request.headers.items() if name.lower() not in drop}
        async with http.request(
            request.method, server + request.raw_path, headers=headers, data=await request.read(),
            skip_auto_headers=["Content-Type"],
        ) as reply:  # fmt: skip
            body = await reply.read()
        own = {name: value for name, value in reply.headers.items() if name.lower() not in drop}
        if request.method == "GET" and request.path.endswith(".safetensors") and faults:
            if (fault := faults.pop(0)) == 503:
                return aiohttp.web.Response(status=503, text="<Error><Code>SlowDown</Code></Error>")
            if fault == "cut":
                own["Content-Length"] = str(len(body))
                answer = aiohttp.web.StreamResponse(status=reply.status, headers=own)
                await answer.prepare(request)
                await answer.write(body[: len(body) // 2])
                request.transport.close()
                return answer
        if request.method == "HEAD":
            own["Content-Length"] = reply.headers["Content-Length"]
        return aiohttp.web.Response(status=reply.status, body=body or None, headers=own)

    app = aiohttp.web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", forward)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        async with aiohttp.ClientSession(auto_decompress=False) as http:
            yield asked
    finally:
        await runner.cleanup()


def test_versions_are_uploaded_once_and_reach_every_server(s3, server, place, weights, monkeypatch):
    monkeypatch.setenv(file_server.KEY, KEY)

    async def main():
        async with between(server, monkeypatch) as asked, contextlib.AsyncExitStack() as stack:
            bucket = await stack.enter_async_context(object_store.opened(URL, RUN, keep=False))
            there = [await stack.enter_async_context(serving(V0)) for _ in range(3)]
            begin = lambda i: stack.enter_context(process(place / str(i), "--bucket", URL))[0]
            own = [await asyncio.to_thread(begin, i) for i in range(3)]  # they ask the proxy of this loop
            fleet = client.connect([one.url for one in there], stagers=own, source=bucket)
            fleet = await stack.enter_async_context(fleet)
            for v in (1, 2, 3):
                one = published(place / "trainer", v, weights[v - 1], tower=weights[3])
                report = await push_weights(fleet, one.directory, one.label)
                assert len(report.loaded) == 3 and not report.failed
                if v < 3:  # later a delta is fetched only if it was faster, which on loopback it may not be
                    assert (report.stage_bytes < 60_000) == (v == 2)
                for i in range(3):
                    assert contents(place / str(i) / one.label) == contents(one.directory)
            puts = Counter({path: n for (method, path), n in asked.items() if method == "PUT"})
            assert set(puts.values()) == {1} and sum(path.endswith(".delta") for path in puts) == 2
            gets = Counter({path: n for (method, path), n in asked.items() if method == "GET"})
            assert gets[f"/models/a/prefix/{one.label}/listing.json"] == 3 + 1  # stagers, and the trainer before
            for path in (place / "trainer/1").iterdir():
                path.unlink()
            (place / "trainer/1").rmdir()
            await bucket.prune()
            assert {path.split("/")[3][0] for path in s3.find(URL)} == {"r", "2", "3"}
        assert s3.find(URL) == []

    run(main)


def test_a_store_that_fails_at_times(s3, server, place, weights, monkeypatch):
    monkeypatch.setattr(object_store, "RANGE", 50_000)

    async def main():
        async with object_store.opened(URL, RUN, keep=True) as bucket:
            one, two = (published(place / "trainer", v, weights[v]) for v in (0, 3))
            await bucket.offered(one)
            await bucket.offered(two)
        source = lambda one: BucketSource(Bucket(URL, "--bucket"), one.label)
        async with between(server, monkeypatch, 503, "cut", None, "cut", 503):
            said = await fetch.fetch_version(place / "server", one.label, [source(one)])
            assert contents(said["path"]) == contents(one.directory) and said["bytes"] > 300_000
        async with between(server, monkeypatch, *[503] * 999):
            monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
            with pytest.raises(
                RuntimeError, match=f"^{URL}/{two.label}/model.safetensors: 5 attempts .*Failed.*OSError"
            ):
                await fetch.fetch_version(place / "server", two.label, [source(two)])
        s3.rm(f"{URL}/{two.label}/model.safetensors")
        with pytest.raises(ValueError, match="model.safetensors: is not there .The specified key does not exist"):
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server)
            s3fs.S3FileSystem.clear_instance_cache()
            await fetch.fetch_version(place / "server", two.label, [source(two)])

    run(main)


def test_of_two_runs_that_begin_at_once_one_has_the_bucket(s3):
    async def main():
        async def begin(name):
            async with object_store.opened(URL, name, keep=False):
                await asyncio.sleep(0.5)

        for error in (done := await asyncio.gather(begin("a"), begin("b"), return_exceptions=True)):
            assert error is None or "holds versions of another run" in str(error)
        assert done.count(None) == 1 and s3.find(URL) == []

    run(main)


@pytest.mark.parametrize(
    "case, words",
    [
        ("no credentials", "s3://models/a/prefix/run: NoCredentialsError: Unable to locate credentials"),
        ("wrong credentials", "s3://models/a/prefix/run: access is denied .The AWS Access Key Id .*; check the cred"),
        ("no bucket", "s3://none/a: is not there .The specified bucket does not exist"),
        ("no server", "s3://models/a/prefix/run: EndpointConnectionError: Could not connect to the endpoint URL"),
    ],
)
def test_a_bucket_that_cannot_be_used_is_refused_in_one_line(s3, server, case, words, place, monkeypatch):
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    if case == "no credentials":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(place / "none"))
    elif case == "wrong credentials":
        monkeypatch.setattr(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0.0)
    elif case == "no server":
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(ValueError, match=words) as caught:
        run(lambda: object_store.check_owner("s3://none/a" if case == "no bucket" else URL, ""))
    assert "\n" not in str(caught.value)
    if case == "wrong credentials":
        with pytest.raises(ValueError, match="1-00000000/listing.json: access is denied"):
            run(lambda: BucketSource(Bucket(URL, "--bucket"), "1-00000000").listing("", ""))


def killed_while_it_fetches(root, own, begin, done):
    """Kills the stager -9 when it fetches a version after the first, and starts another; returns whether it did."""
    while not done.is_set():
        if any(path.name[1] != "0" for path in root.glob(".*.part")):
            own.kill()
            own.wait()
            begin()
            return True
        time.sleep(0.001)
    return False


@pytest.mark.long
def test_a_run_by_a_bucket_equals_one_without(s3, place, monkeypatch):
    """Also when its stager is killed in the middle of a fetch; no file server of the trainer takes part."""
    monkeypatch.setenv(file_server.KEY, KEY)
    tiny.model(place / "model")
    tiny.rows(place / "rows.jsonl", arithmetic.splits()["train"][:40])
    (place / "rewards.py").write_text("score = lambda text, row: sum(c.isdigit() for c in text) / 4")
    words = {
        "model": place / "model", "data": place / "rows.jsonl", "reward": f"{place}/rewards.py:score", "steps": 4,
        "groups": 4, "group-size": 4, "length": 32, "rows": 4, "eta": 0, "sampling.max-new-tokens": 4,
        "objective.advantage.std": "none", "optim.lr": "1e-2",
    }  # fmt: skip
    command = [sys.executable, "-m", "areax", "train", "grpo"]
    command += [str(word) for name, value in words.items() for word in (f"--{name}", value)]

    def train(out, *more):
        with servers.command("areax", "serve", place / "model", "--slots", 8, "--context", 64) as url:
            done = subprocess.run(
                [*command, "--out", place / out, "--servers", url, *more], capture_output=True, text=True
            )
        assert done.returncode == 0, done.stderr[-3000:]
        journal = (json.loads(line) for line in (place / out / "journal.jsonl").read_text().splitlines())
        return [line for line in journal if line["kind"] == "push"], (
            place / out / "model/model.safetensors"
        ).read_bytes()

    _, wanted = train("without")
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(1) as pool:
        staged = place / "staged"
        begin = lambda port=0: stack.enter_context(process(staged, "--bucket", URL, port=port))
        at, own = begin()
        done = threading.Event()
        killed = pool.submit(killed_while_it_fetches, staged, own, lambda: begin(at.rpartition(":")[2]), done)
        pushes, got = train("with", "--stagers", at, "--push.bucket", URL)
        done.set()
        assert killed.result() and got == wanted
    assert [push["label"].split("-")[0] for push in pushes] == ["0", "1", "2", "3", "4"]
    assert s3.find(URL) == []  # as the folder of versions is removed
