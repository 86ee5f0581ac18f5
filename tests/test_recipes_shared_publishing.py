"""How a version gets from the loop to the servers: what is written, pushed and removed, through how many functions."""

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import shutil
import sys
import types
from pathlib import Path

import aiohttp
import aiohttp.web
import jax
import numpy as np
import pytest
import tiny
from scripted import answers, reply, run, serving

from areax import models
from areax.adapters import hf, peft, safetensors
from areax.models import lora
from areax.recipes.shared import publishing
from areax.recipes.shared.probe import Canaries
from areax.rollout import client, loop
from areax.rollout.fleet import offload
from areax.rollout.fleet.push import Push
from areax.rollout.servers.labels import read_label
from areax.rollout.servers.types import Probe
from areax.rollout.weights import tensors

ROOT = Path(__file__).resolve().parents[1]
MOST = 10  # functions of ours from the loop to an HTTP request
ABOVE = contextvars.ContextVar("functions of ours that started the task", default=())


def functions():
    """Functions of ours that are running, the outermost first, those that wait for the tasks below them included."""
    frame, found = sys._getframe(1), []
    while frame:
        path = Path(frame.f_code.co_filename).resolve()
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ("recipes", "rollout", "adapters"):
            found.append(f"{path.relative_to(ROOT)}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return (*ABOVE.get(), *reversed(found))


def followed(own, coroutine, context=None):
    """A task factory that remembers which functions started the task."""
    context = context or contextvars.copy_context()
    context.run(ABOVE.set, functions())
    return asyncio.Task(coroutine, loop=own, context=context)


@pytest.fixture
def chains(monkeypatch):
    """{path of the request: the functions below the loop that made it}, of the deepest of each path."""
    found = {}
    request = aiohttp.ClientSession.request

    def noted(self, method, url, **options):
        chain = functions()
        below = [i for i, name in enumerate(chain) if name.startswith("rollout/loop.py:")]
        if below:
            chain = chain[below[-1] + 1 :]
            path = url.removeprefix("http://").partition("/")[2]
            found[path] = max(found.get(path, ()), chain, key=len)
        return request(self, method, url, **options)

    monkeypatch.setattr(aiohttp.ClientSession, "request", noted)
    return found


CONFIG = models.config_from_hf({**tiny.HF, "vocab_size": 16})
TABLE = models.table(CONFIG)
SPEC = lora.Lora(rank=2)
PROBE = (1, 2, 3)


def sync(root, way):
    """A WeightSync of a small model, whose versions are all the same, and of adapters one where asked for."""
    params, adapters = tiny.weights(TABLE, 0.2), None
    write = lambda v, host: hf.write_published(root, v, CONFIG, host)
    if way == "adapters":
        params, adapters = tiny.weights(lora.table(TABLE, SPEC), 0.2), SPEC
        base = hf.write_published(root / "base", 0, CONFIG, tiny.weights(TABLE, 0.2))
        label = read_label(base / "manifest.json")
        write = lambda v, host: peft.write_published(root, v, CONFIG, host, SPEC, base, label)
    work = {"host_copy": lambda spec: params, "probe": lambda ids: [-0.5] * (len(ids) - 1)}
    run_on_all = lambda name, *given: work[name](*given)
    parts = tensors.handover(lambda arrays: iter([("a part", False), ("the rest", True)]))
    handover = parts if way == "tensors" else None
    return publishing.WeightSync(CONFIG, Push(), run_on_all, root, root, write, adapters, handover=handover)


async def probed(request, body):
    rows = [[None, body["input_ids"][0], None], *([-0.5, i, None] for i in body["input_ids"][1:])]
    answer = reply([], [], [], "length")
    answer["meta_info"]["input_token_logprobs"] = rows
    return aiohttp.web.json_response(answer)


@contextlib.asynccontextmanager
async def server():
    """A server that takes tensors and adapters too, and knows the probe."""
    async with serving() as own:
        adapters = {}

        async def load(request, body):
            adapters[body["lora_name"]] = body["lora_path"]
            return aiohttp.web.json_response({"success": True})

        async def listed(request, body):
            cards = [{"id": name, "root": path, "parent": "base"} for name, path in adapters.items()]
            return aiohttp.web.json_response({"data": cards})

        async def tensor(request, body):
            own.label = body.get("weight_version", own.label)
            return aiohttp.web.json_response({"success": True})

        succeeded = answers(200, {"success": True})
        own.refuse = {
            "/load_lora_adapter": load, "/v1/models": listed, "/update_weights_from_tensor": tensor,
            "/begin_weight_update": succeeded, "/end_weight_update": succeeded,
        }  # fmt: skip
        own.script = [probed] * 4
        yield own


WAYS = {  # a request that only this way makes
    "files": "update_weights_from_disk",
    "offloaded": "resume_memory_occupation",
    "tensors": "update_weights_from_tensor",
    "adapters": "load_lora_adapter",
}


@pytest.mark.parametrize("way", WAYS)
def test_few_functions_lie_between_the_loop_and_a_request(tmp_path, chains, way):
    async def main():
        asyncio.get_running_loop().set_task_factory(followed)
        own = sync(tmp_path, way)
        async with server() as a, client.connect([a.url], handover=own.handover) as fleet:
            if way == "offloaded":
                await offload.offload(fleet)
            publish = functools.partial(publishing.prepare_push, own, fleet, PROBE)
            await loop.run(None, None, publish, eta=0, steps=0)
            assert fleet.healthy[0].label == read_label(tmp_path / "0/manifest.json")

    run(main)
    assert {WAYS[way], "generate", "model_info", "weights_checker"} <= chains.keys()
    assert all(chain[0].startswith("recipes/shared/publishing.py:prepare_push") for chain in chains.values())
    assert {path: chain for path, chain in chains.items() if len(chain) > MOST} == {}


def test_a_push_writes_the_version_and_removes_older_ones(tmp_path):
    async def main():
        own, pushed = sync(tmp_path, "files"), []
        async with server() as a, client.connect([a.url]) as fleet:
            for v in range(4):
                push = publishing.prepare_push(own, fleet, PROBE, v)
                assert not (tmp_path / str(v)).exists()  # a copy so far
                await push()
                pushed.append((fleet.published.label, fleet.published.probe))
        labels = [read_label(tmp_path / name / "manifest.json") for name in ("2", "3")]
        assert [label for label, _ in pushed[2:]] == labels
        assert {probe for _, probe in pushed} == {Probe(PROBE, (-0.5, -0.5), Push().tolerance)}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]

    run(main)


def test_canaries_go_with_the_first_version_then_every_few_and_while_a_server_drifts(tmp_path):
    async def main():
        own, pushed = sync(tmp_path, "files"), []
        own = dataclasses.replace(own, options=Push(canary_every=3))
        async with server() as a, client.connect([a.url]) as fleet:
            a.script = [probed] * 9
            for v in range(2, 10):
                fleet.servers[0].drifts = v == 8
                canaries = Canaries(((4, 5), (6, 7)), "F32")
                await publishing.prepare_push(own, fleet, PROBE, v, canaries)()
                pushed.append(fleet.published.canaries)
        assert [v for v, one in enumerate(pushed, 2) if one] == [2, 3, 6, 8, 9]
        assert pushed[0] == tuple(Probe(ids, (-0.5,), Push().tolerance, "F32") for ids in ((4, 5), (6, 7)))

    run(main)


def weights(scale):
    return tiny.weights(TABLE, scale)


@contextlib.contextmanager
def published(root, run="a", start=0):
    """A folder of versions, as a run that starts at version `start` opens it."""
    with publishing.folder(str(root), None, run, start) as path:
        yield path, publishing.writer(types.SimpleNamespace(written=CONFIG), path, None, None, None, written=())


def test_a_version_of_a_former_process_is_replaced_by_the_trainers(tmp_path):
    """It is whole and has the same number, but other weights."""
    with published(tmp_path) as (root, write):
        for v in range(4):
            write(v, weights(0.1))
    with published(tmp_path, start=2) as (root, write):
        assert sorted(path.name for path in root.iterdir()) == ["0", "1", "2", "run"]  # 3 was never reached
        for v in (2, 3):
            directory = write(v, weights(0.2))
            loaded = hf.load(directory, dtype=None)[1]
            for x, y in zip(*map(jax.tree.leaves, (loaded, weights(0.2))), strict=True):
                np.testing.assert_array_equal(x, y)


def test_versions_of_a_wrapper_are_whole_and_share_what_is_passed_on(tmp_path):
    """A server may start from any of them; a process writes the tensors that do not change once."""
    config, params = hf.load(tiny.wrapped(tiny.model(tmp_path / "model")))

    def writer():
        policy = types.SimpleNamespace(written=config)
        return publishing.writer(policy, tmp_path / "versions", None, None, None, written=())

    def own(v):
        files = sorted((tmp_path / "versions" / str(v)).glob("model-*.safetensors"))
        assert len(files) == 2 and set(safetensors.read(files[1])) == {*config.rest.names}
        return [file.stat().st_ino for file in files]

    write = writer()
    for v in range(3):
        write(v, jax.tree.map(lambda x, v=v: np.asarray(x) + v, params))
    files = [own(v) for v in range(3)]
    assert len({text for text, _ in files}) == 3 and len({rest for _, rest in files}) == 1
    for v in (0, 1):
        shutil.rmtree(tmp_path / "versions" / str(v))
    assert hf.verify(tmp_path / "versions/2") and hf.load(tmp_path / "versions/2")[0].rest.names == config.rest.names
    writer()(3, params)
    assert own(3)[1] not in [rest for _, rest in files]


def test_what_a_killed_process_left_in_the_folder_is_removed(tmp_path):
    with published(tmp_path) as (_, write):
        write(0, weights(0.1))
    shutil.copytree(tmp_path / "0", tmp_path / ".1.0badcafe.tmp")
    shutil.copytree(tmp_path / "0", tmp_path / ".0.removing")
    with published(tmp_path) as (root, _):
        assert sorted(path.name for path in root.iterdir()) == ["0", "run"]


def test_a_folder_of_another_run_or_with_other_files_is_refused(tmp_path):
    def refused(root, line, run="b"):
        before = sorted(path.name for path in tmp_path.rglob("*"))
        with pytest.raises(ValueError, match=line):
            with published(root, run):
                pass
        assert sorted(path.name for path in tmp_path.rglob("*")) == before

    with published(tmp_path / "versions") as (_, write):
        write(0, weights(0.1))
        refused(tmp_path / "versions", "another process is publishing versions here", run="a")
    refused(tmp_path / "versions", r"holds versions of another run \(a, this one is b\)")
    (tmp_path / "versions/run").unlink()
    refused(tmp_path / "versions", "must be empty or of the same run, got other files", run="a")
    refused(tmp_path / "versions/0/config.json", "is needed, got a file")
    (tmp_path / "other/run").mkdir(parents=True)  # a run's directory, not a folder of versions
    refused(tmp_path / "other", "must be empty or of the same run, got other files")
