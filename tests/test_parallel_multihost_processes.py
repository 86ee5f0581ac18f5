"""Several real processes, connected by gloo on loopback: they compute what one computes, and end together."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import job_program
import jobs
import numpy as np
import pytest
import servers
import tiny

from areax.adapters import cli, hf, safetensors
from areax.adapters.tracking import run_dir
from areax.core import losses
from areax.parallel.multihost import agreement, liveness, lockstep, meeting, processes
from areax.recipes import sft
from areax.rollout.servers.labels import read_label
from areax.rollout.tasks import arithmetic

PROGRAM = str(Path(job_program.__file__))


def marked(**values):
    """Parameters, by the mark of those that are named with it."""
    return [pytest.param(value, marks=getattr(pytest.mark, mark)) for mark in values for value in values[mark]]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("jobs")
    tiny.model(path / "model")
    split = arithmetic.splits()
    shown = list(itertools.islice(arithmetic.demonstrations(split["train"]), 60))
    tiny.rows(path / "rows.jsonl", shown[:54])
    tiny.rows(path / "heldout.jsonl", shown[54:])
    tiny.rows(path / "prompts.jsonl", split["train"][:40])
    tiny.rows(path / "greedy.jsonl", split["heldout"][:6])
    return path


def options(place, out, steps=5, **changes):
    """Of `areax train sft`; the optimiser is gradient descent."""
    named = {
        "model": place / "model", "data": place / "rows.jsonl", "heldout": place / "heldout.jsonl", "out": place / out,
        "steps": steps, "batch": 8, "length": 64, "rows": 4, "optim.lr": job_program.PLAIN.lr, "optim.b1": 0,
        "optim.b2": 0, "optim.eps": job_program.PLAIN.eps, "optim.warmup": 0, **changes,
    }  # fmt: skip
    return [str(word) for name, value in named.items() for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def alone(place):
    """The same five steps in this process, on one device."""
    rows = {"data": str(place / "rows.jsonl"), "heldout": str(place / "heldout.jsonl")}
    sft.main(
        sft.Config(
            model=str(place / "model"), out=str(place / "alone"), steps=5, batch=8, length=64, rows=4,
            optim=job_program.PLAIN, **rows,
        )
    )  # fmt: skip
    return place / "alone"


def agree(one, other, start, tolerance=1e-5):
    """Two directories of weights differ by less than `tolerance` of the largest change since `start`, and four units in
    the last place of the largest weight, leaf by leaf.

    Returns the share of the leaves that changed.
    """
    a, b, start = (safetensors.read(path) for path in (one, other, start))
    assert a.keys() == b.keys() == start.keys()
    moves = [np.abs(a[name] - start[name]).max() for name in a]
    for name, moved in zip(a, moves, strict=True):
        rounding = 4 * np.spacing(np.abs(a[name]).max())
        np.testing.assert_allclose(b[name], a[name], rtol=0, atol=tolerance * moved + rounding, err_msg=name)
    return np.mean(np.array(moves) > 0)


def metrics_of(out):
    return list(run_dir.read_lines(out / "metrics.jsonl"))


def same_metrics(got, wanted):
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert a.keys() == b.keys()
        for name in set(a) - {"seconds", "kind", "filled"}:  # each device has a row, be it empty
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-5, err_msg=name)


@contextlib.contextmanager
def launch(place, *arguments, logs="logs", **more):
    """`areax launch`; on leaving the block it is ended, and its processes by it."""
    command = [sys.executable, "-m", "areax", "launch", "--logs", str(place / logs), *arguments]
    process = subprocess.Popen(command, env={**os.environ, **jobs.settings(1)}, text=True, **more)
    with servers.ended(process):
        yield process


# -- the numbers ---------------------------------------------------------------------------------


@pytest.mark.mesh
def test_two_processes_train_as_one(place, alone):
    command = ["--processes", "2", "--", "train", "sft", *options(place, "two"), "--mesh.fsdp", "2"]
    with launch(place, *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    same_metrics(metrics_of(place / "two"), metrics_of(alone))
    assert agree(alone / "model", place / "two/model", place / "model") == 1
    assert "steps: 5\ncomplete: True\n" in said
    lines = [line for line in (place / "logs/process-1.log").read_text().splitlines() if "Gloo" not in line]
    assert lines == ["areax train sft: importing libraries ..."]


@pytest.mark.wide
@pytest.mark.mesh
def test_four_processes_of_two_devices_train_as_one(place, alone):
    layout = ["--mesh.dp", "2", "--mesh.cp", "2", "--mesh.tp", "2"]
    jobs.run(["-m", "areax", "train", "sft", *options(place, "four"), *layout], 4, place / "four-logs", devices=2)
    same_metrics(metrics_of(place / "four"), metrics_of(alone))
    assert agree(alone / "model", place / "four/model", place / "model") == 1


@pytest.mark.parametrize(
    "count, devices, layout",
    [
        pytest.param(2, 2, {"fsdp": 2, "tp": 2}, marks=pytest.mark.long),
        pytest.param(4, 1, {"fsdp": 4}, marks=pytest.mark.wide),
    ],
)
def test_grpo_steps_on_batches_from_process_0(place, count, devices, layout):
    wanted = job_program.grpo_steps(str(place / "model"), "{}", str(place / "grpo-alone"))
    out = place / f"grpo-{count}"
    command = [PROGRAM, "grpo_steps", str(place / "model"), json.dumps(layout), str(out)]
    got = result(jobs.run(command, count, place / f"grpo-logs-{count}", devices=devices))
    assert len(got) == 3
    same_metrics(got, wanted)
    assert agree(place / "grpo-alone", out, place / "model") == 1


@pytest.mark.mesh
def test_two_processes_name_the_number_that_is_not_finite(place):
    """As one process does: a token's, and a gradient's, for which both take part in each try."""
    wanted = job_program.not_finite(str(place / "model"), "{}")
    command = [PROGRAM, "not_finite", str(place / "model"), '{"fsdp": 2}']
    assert result(jobs.run(command, 2, place / "not finite logs", devices=1)) == wanted
    assert wanted[0].startswith(f"not finite first: the sampler's log-probability, -inf, of token {job_program.TOKEN} ")
    assert wanted[1].startswith("not finite first: the gradient of the model of prompt 2, group 2, sample 9, id 'nine'")


@pytest.mark.wide
@pytest.mark.sweep
@pytest.mark.parametrize("beside", marked(mesh=["critic", "adapters", "tries"], wide=["teacher", "moving reference"]))
def test_auxiliary_models_and_adapters_are_sharded_too(place, beside):
    wanted = job_program.grpo_steps(str(place / "model"), "{}", str(place / f"{beside} alone"), beside)
    out = place / beside
    command = [PROGRAM, "grpo_steps", str(place / "model"), '{"fsdp": 2}', str(out), beside]
    got = result(jobs.run(command, 2, place / f"{beside} logs", devices=1))
    same_metrics(got, wanted)
    # a critic's or a teacher's numbers are differences of like ones: their rounding grows over the three steps
    changed = agree(place / f"{beside} alone", out, place / "model", tolerance=5e-5)
    assert changed > (0.5 if beside == "adapters" else 0.99)


@pytest.mark.wide
@pytest.mark.parametrize("recipe", marked(mesh=["dpo"], wide=["kto", "distill"]))
def test_preferences_and_teachers_of_two_processes(place, recipe):
    """What learns from given rows: pairs, labels, or a teacher beside the student."""
    rows = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    made = {
        "dpo": lambda row: {"prompt": row["prompt"], "chosen": row["answer"], "rejected": row["answer"][::-1] + "0"},
        "kto": lambda row: {"prompt": row["prompt"], "completion": row["answer"], "label": row["carry"]},
        "distill": lambda row: row,
    }[recipe]
    tiny.rows(place / f"{recipe}.jsonl", [made(row) for row in rows])
    teacher = ["--teacher", str(place / "teacher")] if recipe == "distill" else []
    if teacher:
        tiny.model(place / "teacher", seed=1)
    for name, mesh_options, count in (("alone", [], 1), ("two", ["--mesh.fsdp", "2"], 2)):
        out = place / f"{recipe}-{name}"
        given = options(place, out.name, data=place / f"{recipe}.jsonl", heldout=place / f"{recipe}.jsonl")
        command = ["-m", "areax", "train", recipe, *given, *teacher, *mesh_options]
        jobs.run(command, count, place / f"{out.name}-logs", devices=1)
    same_metrics(metrics_of(place / f"{recipe}-two"), metrics_of(place / f"{recipe}-alone"))
    assert agree(place / f"{recipe}-alone/model", place / f"{recipe}-two/model", place / "model") > 0.99


@pytest.mark.long
def test_grpo_end_to_end(place):
    """A server, rewards and pushes at process 0, two processes that train; stopped and resumed."""
    command = [
        "train", "grpo", "--model", place / "model", "--data", place / "prompts.jsonl", "--heldout",
        place / "greedy.jsonl", "--reward", "areax.rollout.tasks.arithmetic:reward", "--out", place / "rl",
        "--groups", 4,
        "--group-size", 4, "--max-concurrent", 8, "--length", 32, "--rows", 4, "--eta", 0, "--sampling.max-new-tokens",
        4, "--objective.advantage.std", "none", "--serve.slots", 8, "--serve.context", 64, "--mesh.fsdp", 2,
    ]  # fmt: skip
    for steps in (2, 3):
        words = ["--processes", "2", "--", *map(str, command), "--steps", str(steps)]
        with launch(place, *words, logs="rl-logs") as process:
            assert process.wait(400) == 0
    lines = [line for line in metrics_of(place / "rl") if line["kind"] == "grpo"]
    assert [line["step"] for line in lines] == [1, 2, 3]
    # the servers sample from what two processes exported: the trainer finds the same log-probabilities
    assert all(line["max_logp_diff"] <= 1e-4 and line["staleness_max"] == 0 for line in lines)
    hf.verify(place / "rl/model")


@pytest.mark.mesh
@pytest.mark.mesh
def test_versions_are_served_in_parts_and_arrive_as_one_process_writes_them(place):
    folder = place / "parts"
    with servers.stager(place / "staged") as at:
        made = result(jobs.run([PROGRAM, "push_in_parts", str(place / "model"), at, str(folder)], 2, folder / "logs"))
        for v, one in enumerate(made):
            staged, whole = Path(one["path"]), folder / str(v)
            assert staged.name == one["label"] == read_label(whole / "manifest.json")
            tensors, wanted = safetensors.read(staged), safetensors.read(whole)
            assert [*tensors] == [*wanted] and all(tensors[k].tobytes() == wanted[k].tobytes() for k in wanted)
            others = {path.name for path in whole.iterdir()} - {"model.safetensors"}
            assert all((staged / name).read_bytes() == (whole / name).read_bytes() for name in others)
            first, second = one["served"]
            assert {*first} == others | {"model-00001-of-00002.safetensors", "model.safetensors.index.json"}
            assert {*second} == {"model-00002-of-00002.safetensors"} == {p.name for p in staged.iterdir()} - {*first}
            sizes = [part[f"model-0000{i}-of-00002.safetensors"]["bytes"] for i, part in enumerate(one["served"], 1)]
            assert max(sizes) < 0.55 * sum(sizes)
    assert made[0]["label"] != made[1]["label"]


@pytest.mark.mesh
def test_a_process_that_cannot_write_its_part_ends_the_run_by_its_name(place):
    folder = place / "no-room"
    command = [PROGRAM, "push_in_parts", str(place / "model"), "http://127.0.0.1:1", str(folder), "20000"]
    with servers.stager(place / "nothing-staged") as at:
        running = jobs.start([[*command[:3], at, *command[4:]]] * 2, folder / "logs")
        try:
            assert [process.wait(200) for process in running] == [3, 2]
        finally:
            jobs.end(running)
    line = r"process 1 of 2 \(pid \d+ on \S+\) ended: OSError: .*File too large: '.*/model-00002-of-00002"
    assert re.search(line, (folder / "logs/0.log").read_text())  # a request that broke off may say so behind it


def test_states_need_a_folder_that_all_processes_see(place):
    logs = place / "apart"
    running = jobs.start([[PROGRAM, "open_apart", str(logs)]] * 2, logs)
    try:
        assert [process.wait(300) for process in running] == [0, 0]
    finally:
        jobs.end(running)
    for said in (result((logs / f"{i}.log").read_text()) for i in range(2)):
        assert said.startswith("processes: all need the same folder on a shared file system, got different ones in")
    assert not [*logs.rglob(".shared-*")]


def test_a_single_process_needs_no_lockstep():
    with lockstep.leader({"add": lambda a, b: a + b}) as run_on_all:
        assert run_on_all("add", 1, 2) == 3
    assert processes.anyone(True, False) == [True, False]
    agreement.same("numbers", number=1)


def result(said):
    return json.loads(said.split("RESULT ")[1])


# -- states and weights --------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.mesh
def test_a_state_of_two_processes_restores_in_one_and_the_reverse(place):
    model, both = str(place / "model"), json.dumps({"fsdp": 2, "tp": 2})
    jobs.run([PROGRAM, "save_state", model, both, str(place / "by-two")], 2, place / "save-logs", devices=2)
    back = job_program.restore_state(model, "{}", str(place / "by-two"))
    assert back["arrays"] == back["equal"] > 20
    job_program.save_state(model, "{}", str(place / "by-one"))
    command = [PROGRAM, "restore_state", model, both, str(place / "by-one")]
    assert result(jobs.run(command, 2, place / "restore-logs", devices=2)) == back
    assert result((place / "restore-logs/1.log").read_text()) == back


@pytest.mark.wide
@pytest.mark.mesh
def test_memory_to_load_and_to_export_is_that_of_a_shard(tmp_path):
    """Peak resident memory, mapped files included; a quarter of the model, copied once on the CPU, a leaf at a time.

    Exporting takes some tens of MB of either model, programs and buffers of messages among them.
    """
    shape = dict(hidden_size=512, intermediate_size=2048, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    measured = []
    for layers in (4, 16):
        model, logs = tiny.model(tmp_path / f"{layers}", num_hidden_layers=layers, **shape), tmp_path / f"logs-{layers}"
        jobs.run([PROGRAM, "load_and_export", str(model), '{"fsdp": 4}', str(tmp_path / f"out-{layers}")], 4, logs)
        measured.append([result((logs / f"{i}.log").read_text()) for i in range(4)])
    for small, large in zip(*measured, strict=True):
        assert large["whole"] - small["whole"] > 150e6 and 4 * large["held"] < 1.01 * large["whole"]
        for what in ("loading", "exporting"):
            assert large[what] - small[what] < 2 * (large["held"] - small["held"]), (what, small, large)
            assert large[what] < 0.5 * large["whole"], (what, large)


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("victim", [0, 1])
def test_killing_one_process_ends_the_others(place, victim):
    out, logs = f"killed-{victim}", place / f"killed-logs-{victim}"
    command = ["-m", "areax", "train", "sft", *options(place, out, steps=100000), "--mesh.fsdp", "2"]
    running = jobs.start([command] * 2, logs)
    metrics = place / out / "metrics.jsonl"
    try:
        jobs.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
        running[victim].kill()
        code = running[1 - victim].wait(60)
    finally:
        jobs.end(running)
    said = (logs / f"{1 - victim}.log").read_text()
    assert code == 3, said
    assert f"process {victim} of 2 (pid {running[victim].pid} on" in said and "it was killed" in said


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize("how, codes", [("nothing", [0, 0]), ("text", [3, 1]), ("error", [3, 1]), ("nonsense", [3, 2])])
def test_a_process_leaves_with_its_words_alone(place, how, codes):
    logs = place / f"leave-{how}"
    running = jobs.start([[PROGRAM, "leave", how]] * 2, logs)
    try:
        assert [process.wait(300) for process in running] == codes
    finally:
        jobs.end(running)
    said = (logs / "1.log").read_text()
    assert ("enough of this" in said) == (how in ("text", "error")) and "Traceback" not in said
    assert ("(its text cannot be read)" in said) == (how == "nonsense")


@pytest.mark.mesh
def test_processes_fail_together_once_each_has_saved(place):
    folder = place / "fail"
    running = jobs.start([[PROGRAM, "fail", str(folder)]] * 2, folder)
    try:
        assert all(process.wait(300) for process in running)
    finally:
        jobs.end(running)
    assert sorted(path.name for path in folder.glob("*.saved")) == ["0.saved", "1.saved"]
    assert "no such row" in (folder / "1.log").read_text() and "Traceback" not in (folder / "0.log").read_text()


# -- the meeting, without JAX ----------------------------------------------------------------------


def meetings(address, *numbers, count=2):
    """Processes, all in this one, that meet in threads of their own: (Meeting, Later) of each."""
    made = [meeting.Meeting(address, meeting.here(i, count)) for i in numbers]
    return [(one, servers.Later(one.attend)) for one in made]


def watched(pairs):
    """The Watch of each, once all have met."""
    return [liveness.Watch(one, attending.result(20).links) for one, attending in pairs]


def end(watches):
    for done in [servers.Later(watch.goodbye) for watch in watches]:
        done.result(20)


@pytest.fixture
def address():
    return f"127.0.0.1:{servers.free_port()}"


def test_foreign_connections_do_not_disturb_a_job(address, monkeypatch):
    """One is silent, one resets its connection, one says something else."""
    monkeypatch.setattr(meeting, "GREETING_S", 0.2)
    [(first, gathering)] = meetings(address, 0)
    jobs.until(lambda: "process 1" in first.waits, 20)
    connect = lambda: socket.create_connection(("127.0.0.1", int(address.split(":")[1])))
    with contextlib.ExitStack() as stack:
        silent, gone, other = (stack.enter_context(contextlib.closing(connect())) for _ in range(3))
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()  # by a reset
        other.sendall(b"GET / HTTP/1.1\r\n\r\n")
        met = watched([(first, gathering), *meetings(address, 1)])
        stack.enter_context(contextlib.closing(connect())).sendall(b"." * 9000)
        end(met)
    assert gathering.result().here == "127.0.0.1"


@pytest.mark.parametrize("number", [0, 1])
def test_a_number_given_twice_ends_both_at_once(address, number):
    pair = meetings(address, 0, 1, count=3)
    jobs.until(lambda: pair[0][0].waits.endswith("for process 2 to start"), 20)
    wanted = rf"each needs a number of its own, got {number} twice: from pid \d+ on \S+ and from pid \d+ on \S+; number"
    for _, attending in [*pair, *meetings(address, number, count=3)]:
        with pytest.raises(ValueError, match=wanted):
            attending.result(20)


def test_one_too_many_is_refused_and_the_job_goes_on(address):
    met = watched(meetings(address, 0, 1))
    for number, count, words in (
        (1, 2, "got 1 twice"),
        (0, 2, "got 0 twice"),
        (1, 3, "got 3 from pid .* and 2 from pid"),
    ):
        [(_, late)] = meetings(address, number, count=count)
        with pytest.raises(ValueError, match=words):
            late.result(20)
    end(met)


def test_a_process_that_ends_before_all_are_there_may_come_again(address):
    [(first, gathering)] = meetings(address, 0, count=3)
    jobs.until(lambda: "processes 1 and 2" in first.waits, 20)
    with contextlib.closing(socket.create_connection(("127.0.0.1", int(address.split(":")[1])))) as gone:
        gone.sendall(meeting._greeting(meeting.here(1, 3)))
        jobs.until(lambda: first.waits.endswith("for process 2 to start"), 20)
    end(watched([(first, gathering), *meetings(address, 1, 2, count=3)]))


def test_who_does_not_come_is_named(address, monkeypatch):
    monkeypatch.setattr(meeting, "START_S", 1)
    pair = meetings(address, 0, 2, count=4)
    for _, attending in pair:
        with pytest.raises(ValueError, match="within 1 s, got no processes 1 and 3 at 127.0.0.1:"):
            attending.result(20)
    [(_, alone)] = meetings(address, 1, count=4)
    with pytest.raises(ValueError, match=r"process 1 of 4 \(pid .*\) must reach process 0 at 127.*: .*refused; is"):
        alone.result(20)


WATCHED = """
import sys, time
from areax.parallel.multihost import liveness, meeting
liveness.BEAT_S, meeting.SILENT_S = 0.5, 5
one = meeting.Meeting(sys.argv[1], meeting.here(int(sys.argv[2]), 2))
watch = liveness.Watch(one, one.attend().links)
end = time.monotonic() + 6
while time.monotonic() < end:
    pass  # is busy, for longer than it may be silent
print("busy no more", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt as error:
    watch.leave(error)
"""


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_stands_still_is_named_and_one_that_is_busy_is_not(address, victim, tmp_path):
    environ = {**os.environ, **jobs.settings(1)}
    with contextlib.ExitStack() as stack:
        running = []
        for i in range(2):
            log = stack.enter_context(open(tmp_path / str(i), "w"))
            command = [sys.executable, "-c", WATCHED, address, str(i)]
            running.append(subprocess.Popen(command, stdout=log, stderr=log, env=environ))
        stack.callback(jobs.end, running)
        said = lambda i: (tmp_path / str(i)).read_text()
        jobs.until(lambda: any(process.poll() for process in running) or all("busy no more" in said(i) for i in (0, 1)))
        assert [process.poll() for process in running] == [None, None], (said(0), said(1))
        running[victim].send_signal(signal.SIGSTOP)
        assert running[1 - victim].wait(60) == liveness.LOST
        running[victim].send_signal(signal.SIGCONT)  # finds that it is too late
        assert running[victim].wait(60) == liveness.LOST
    assert f"process {victim} of 2 (pid {running[victim].pid} on " in said(1 - victim), said(1 - victim)
    assert "stands still" in said(1 - victim), said(1 - victim)


@pytest.mark.long
def test_the_launcher_names_the_one_that_ended(place):
    command = ["--processes", "2", "--", "train", "sft", *options(place, "named", steps=100000), "--mesh.fsdp", "2"]
    metrics, log = place / "named/metrics.jsonl", place / "named-logs/process-1.log"
    with launch(place, *command, logs="named-logs", stderr=subprocess.PIPE) as process:
        jobs.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        second = next(pid for pid in children if b"AREAX_PROCESS=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
        os.kill(int(second), signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 137
    assert f"process 1 (pid {second}) was killed by SIGKILL" in said and str(log) in said and "Gloo" in said


@pytest.mark.sweep
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_launcher_saves_and_ends_all(place, number):
    """Ctrl-C, and the end of the terminal, which may be ignored where the tests run."""
    out, before = place / f"asked-{number}", signal.signal(signal.SIGHUP, signal.SIG_DFL)
    command = ["--processes", "2", "--", "train", "sft", *options(place, out, steps=100000), "--mesh.fsdp", "2"]
    metrics = out / "metrics.jsonl"
    with launch(place, *command, logs="asked-logs") as process:
        signal.signal(signal.SIGHUP, before)
        jobs.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
        process.send_signal(number)
        assert process.wait(300) == 130
    hf.verify(out / "model")
    assert json.loads((out / "summary.json").read_text())["steps"] >= 2


@pytest.mark.mesh
def test_processes_with_different_options_are_refused(place):
    logs = place / "other-logs"
    command = ["-m", "areax", "train", "sft", *options(place, "other"), "--mesh.fsdp", "2", "--seed"]
    running = jobs.start([[*command, str(i)] for i in range(2)], logs)
    try:
        codes = {process.wait(300) for process in running}
    finally:
        jobs.end(running)
    assert {2} <= codes <= {2, 3}  # all find it; the last to say so may find that another was first
    said = (logs / "0.log").read_text()
    assert "all need the same options and rows, got different ones in process 1 than in process 0: " in said
    assert "seed is 1 in process 1, 0 in process 0; start all" in said


# -- who is who ----------------------------------------------------------------------------------


def test_plain_variables():
    set_ = lambda **given: processes.found({f"AREAX_{name}": value for name, value in given.items()})
    assert processes.found({}) is None
    assert set_(COORDINATOR="host:1234", PROCESSES="4", PROCESS="2") == {
        "coordinator_address": "host:1234", "num_processes": 4, "process_id": 2,
        "cluster_detection_method": "deactivate",
    }  # fmt: skip
    assert set_(COORDINATOR="host:1234", PROCESSES="1", PROCESS="0") is None
    assert set_(PROCESSES="auto") == {} and set_(PROCESSES="1") is None
    for given, words in (
        ({"PROCESSES": "4"}, "must be set together, got no AREAX_COORDINATOR and no AREAX_PROCESS;"),
        ({"PROCESS": "0", "COORDINATOR": "host:1"}, "got no AREAX_PROCESSES;"),
        ({"COORDINATOR": "host", "PROCESSES": "2", "PROCESS": "0"}, "must be host:port, .* got 'host'"),
        ({"COORDINATOR": "host:0", "PROCESSES": "2", "PROCESS": "0"}, "1 to 65535, got 'host:0'"),
        ({"COORDINATOR": "host:65536", "PROCESSES": "2", "PROCESS": "0"}, "1 to 65535, got 'host:65536'"),
        ({"COORDINATOR": "host:1", "PROCESSES": "two", "PROCESS": "0"}, "AREAX_PROCESSES must be an integer"),
        ({"COORDINATOR": "host:1", "PROCESSES": "2", "PROCESS": "2"}, "AREAX_PROCESS must be below .* = 2, got 2"),
    ):
        with pytest.raises(ValueError, match=words):
            set_(**given)


def test_clusters_are_left_to_jax():
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "3"}
    assert processes.found(slurm) is None  # a shell inside an allocation
    assert processes.found({**slurm, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert processes.found({**slurm, "SLURM_STEP_NUM_TASKS": "8"}) == {}
    assert processes.found({**slurm, "SLURM_STEP_NUM_TASKS": "8", "AREAX_PROCESSES": "1"}) is None
    assert processes.found({"OMPI_COMM_WORLD_SIZE": "2"}) == {}
    assert processes.found({"TPU_WORKER_HOSTNAMES": "localhost"}) is None
    assert processes.found({"TPU_WORKER_HOSTNAMES": "a,b"}) == {}


def test_the_launcher_refuses_impossible_options(capsys):
    for arguments, words in (
        (["--processes", "2"], "needs a command after --"),
        (["--processes", "1", "--", "train"], "--processes must be at least 2, got 1"),
        (["--procesess", "2", "--", "train"], "did you mean --processes?"),
    ):
        assert cli.main(["launch", *arguments]) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1


def test_options_with_a_function_are_compared_by_its_name():
    """Its address is another one in each process."""
    make = lambda: lambda spec, now: (now.adv_BT, None)
    one, other = (losses.GRPO(surrogate=make()) for _ in range(2))
    assert repr(one) != repr(other) and agreement.shown(one) == agreement.shown(other)
    assert agreement.shown(one) != agreement.shown(losses.GRPO(surrogate=len))
