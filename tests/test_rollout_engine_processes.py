"""A server of several processes, each with some of the mesh's devices: one process's samples, pushes, and ends."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import engine_program
import jobs
import pytest
import servers
import tiny

from areax.adapters import hf
from areax.models import paging
from areax.parallel.multihost import liveness
from areax.rollout import client

CONTEXT, SLOTS = 160, 4
END_S = 60  # for processes to end; seconds, but this may be a slow machine
LONG = [5 + i % 11 for i in range(100)]  # a prompt of several chunks
ASKED = [
    {"prompt": [5, 6, 7], "max_new_tokens": 20, "regex": "([0-4][5-9])+", "ignore_eos": False},
    {"prompt": LONG, "max_new_tokens": 60, "temperature": 1.0, "sampling_seed": 1},
    {"prompt": LONG[1:71], "max_new_tokens": 80, "temperature": 1.0, "sampling_seed": 2},
    {"prompt": [9, 8], "max_new_tokens": 90, "temperature": 0.7, "sampling_seed": 3, "frequency_penalty": 0.5},
    {"prompt": LONG[2:35], "max_new_tokens": 80, "temperature": 1.0, "sampling_seed": 4, "top_p": 0.9},
]
SEEN = {"max_new_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two checkpoints of one model, "a" and "b"."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        tiny.model(root / name, seed, max_position_embeddings=CONTEXT, num_attention_heads=4)
    return root


def memory(path, tp):
    """GB of caches that do not hold what the slots' sequences need."""
    records, page = hf.read_config(path).records, paging.default_page(CONTEXT)
    kinds = paging.kinds(records, CONTEXT, page, 4, tp)
    counts = paging.counts(kinds, SLOTS, CONTEXT, page, paging.STEPS, None)
    return 0.4 * paging.size_of(kinds, counts, SLOTS) / 1e9


def words(path, tp, port=0):
    sizes = ["--slots", SLOTS, "--context", CONTEXT, "--memory", memory(path, tp)]
    return [str(word) for word in ("-m", "areax", "serve", path, "--port", port, "--mesh.tp", tp, *sizes)]


@contextlib.contextmanager
def over(path, logs, *, devices=1, processes=2):
    """Runs a server over processes with so many devices each, process i in logs/i; yields it, with its `processes` and
    `said(i)`."""
    port, folders = servers.free_port(), [logs / str(i) for i in range(processes)]
    for folder in folders:
        folder.mkdir(parents=True)
    commands = [words(path, devices * processes, port)] * processes
    running = jobs.start(commands, logs, devices=devices, folders=folders)
    said = lambda i: (logs / f"{i}.log").read_text()
    try:
        jobs.until(lambda: "http://" in said(0) or any(process.poll() is not None for process in running))
        assert "http://" in said(0), [said(i)[-2000:] for i in range(processes)]
        remote = servers.Remote(port)
        remote.processes, remote.said = running, said
        yield remote
    finally:
        jobs.end(running)


@contextlib.contextmanager
def alone(path, tp):
    """Runs a server of one process."""
    environ = {**os.environ, **jobs.settings(tp)}
    with subprocess.Popen(
        [sys.executable, *words(path, tp)], stdout=subprocess.PIPE, text=True, env=environ
    ) as process:
        try:
            yield servers.Remote(int(process.stdout.readline().split()[0].rpartition(":")[2]))
        finally:
            process.terminate()


def answers(server, asked=ASKED):
    """(tokens, log-probabilities) of the answers to all that is asked at the same time."""
    ask = lambda one: server.generate(one["prompt"], **{key: one[key] for key in one if key != "prompt"})
    made = [later.result() for later in [servers.Later(lambda one=one: ask(one)) for one in asked]]
    logp = lambda one: [entry[0] for entry in one["meta_info"]["output_token_logprobs"]]
    return [(one["output_ids"], logp(one)) for one in made]


def compare(found, wanted, atol):
    for (tokens, logp), (wanted_tokens, wanted_logp) in zip(found, wanted, strict=True):
        assert tokens == wanted_tokens
        assert logp == pytest.approx(wanted_logp, rel=0, abs=atol) if atol else logp == wanted_logp


def stats(server):
    return server.ok("/server_info")["internal_states"][0]


def update(server, path):
    return server.ok("/update_weights_from_disk", {"model_path": str(path), "weight_version": path.name})


def check_refusals(server, models, folders):
    """Of a folder that process 1, process 0, or neither reads as the other does."""
    refused = [({0: "b"}, "process 1: new: "), ({1: "b"}, "new: "), ({0: "a", 1: "b"}, "new: has other weights in pro")]
    for there, why in refused:
        links = [folders / str(i) / "new" for i in there]
        for link, name in zip(links, there.values(), strict=True):
            link.symlink_to(models / name)
        status, answer = server.post("/update_weights_from_disk", {"model_path": "new"})
        assert status == 400 and answer["message"].startswith(why)
        for link in links:
            link.unlink()


@pytest.mark.long
@pytest.mark.parametrize(
    "devices, atol", [pytest.param(1, 0, marks=pytest.mark.mesh), pytest.param(2, 1e-5, marks=pytest.mark.wide)]
)
def test_samples_are_those_of_one_process(models, tmp_path, devices, atol):
    """Bit for bit over two devices. More are summed in a ring, each part of an array beginning at another device, so
    that sums of four numbers round by their place: tokens are the same, log-probabilities within 1e-5."""
    with alone(models / "a", 2 * devices) as one:
        wanted = answers(one)
        update(one, models / "b")
        new = answers(one, ASKED[:2])
    with over(models / "a", tmp_path / "logs", devices=devices) as server:
        compare(answers(server), wanted, atol)
        assert stats(server)["preemptions"] > 0
        for i in (1, 3):
            compare(answers(server, ASKED[i : i + 1]), wanted[i : i + 1], atol)

        check_refusals(server, models, tmp_path / "logs")
        compare(answers(server, ASKED[:1]), wanted[:1], atol)
        update(server, models / "b")
        assert server.ok("/model_info")["weight_version"] == "b"
        compare(answers(server, ASKED[:2]), new, atol)

        server.ok("/release_memory_occupation", {})
        server.ok("/resume_memory_occupation", {})
        update(server, models / "a")
        compare(answers(server, ASKED[:1]), wanted[:1], atol)

        last = servers.Later(lambda: server.post("/generate", {"input_ids": LONG, "sampling_params": SEEN}))
        jobs.until(lambda: stats(server)["running"])
        for process in server.processes[:devices]:
            process.send_signal(signal.SIGTERM if devices == 1 else signal.SIGINT)  # Ctrl-C reaches all of a terminal
        assert [process.wait(END_S) for process in server.processes] == [0, 0] and last.result()[0] == 200
        assert "http://" not in server.said(1)


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("killed", [0, 1])
def test_if_a_process_is_killed_the_other_ends_and_the_fleet_goes_on(models, tmp_path, killed):
    async def generate(server, healthy):
        async with client.connect([server.url, healthy.url]) as fleet:
            ask = lambda i: fleet.generate([5, 6, i + 5], temperature=1.0, max_new_tokens=100, ignore_eos=True)
            asked = [asyncio.create_task(ask(i)) for i in range(8)]
            while await asyncio.to_thread(lambda: stats(server)["tokens"]) == 0:
                await asyncio.sleep(0.01)
            server.processes[killed].kill()
            return await asyncio.gather(*asked)

    with alone(models / "a", 1) as healthy, over(models / "a", tmp_path / "logs") as server:
        done = asyncio.run(generate(server, healthy))
        assert [len(one.tokens) for one in done] == [100] * 8
        assert server.processes[1 - killed].wait(END_S) == liveness.LOST
        pid, other = (server.processes[i].pid for i in (killed, 1 - killed))
        line = f"process {killed} of 2 (pid {pid} on {socket.gethostname()}) ended: it was killed, or its host; ending "
        line += f"process {1 - killed} of 2 (pid {other} on {socket.gethostname()})"
        own = [said for said in server.said(1 - killed).splitlines() if said.startswith(("process", "Traceback"))]
        assert own == [line]  # beside what JAX logs where process 0 was


@pytest.mark.wide
@pytest.mark.parametrize(
    "case, mesh, draft",
    [
        ("qwen3", '{"tp": 2}', 4),
        ("glm4_moe", '{"tp": 2}', 4),
        ("qwen3_5_text", '{"tp": 2}', 1),
        ("qwen3_moe", '{"ep": 2}', 1),
        ("qwen2_5_vl", '{"tp": 2}', 1),
    ],
)
def test_an_engine_over_processes_has_the_bits_of_one(tmp_path, case, mesh, draft):
    """With drafts and adapters, or by multi-token prediction; delta nets; experts over processes, and their choice;
    images."""
    with engine_program.over_devices(case, mesh, draft) as engine:
        wanted = engine_program.generate(engine, case)
    said = jobs.run([engine_program.__file__, case, mesh, str(draft)], 2, tmp_path)
    assert json.loads(said.partition("RESULT ")[2]) == wanted


@pytest.mark.wide
@pytest.mark.mesh
def test_processes_that_cannot_serve_together_are_refused(models, tmp_path):
    """In a line of process 0; the other names it."""
    each = {
        "and dp 1, got dp 2;": [[*words(models / "a", 1), "--mesh.dp", "2"]] * 2,
        "got tp 3;": [words(models / "a", 3)] * 2,
        "all need the same options and weights": [words(models / name, 2) for name in "ab"],
    }
    for i, (why, commands) in enumerate(each.items()):
        running = jobs.start(commands, tmp_path / str(i))
        try:
            codes = {process.wait(END_S) for process in running}
        finally:
            jobs.end(running)
        assert {2} <= codes <= {2, 3} and why in (tmp_path / str(i) / "0.log").read_text()
