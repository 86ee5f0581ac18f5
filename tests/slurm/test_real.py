"""Batch scripts of `areax launch --on slurm`, submitted to a real Slurm of three nodes by a user who is not root."""

import json
import os
import re
import shlex
import sys

import cluster as machines
import launching
import pytest
import tiny
from launching import trained

from areax.adapters import cli
from areax.adapters.tracking import run_dir
from areax.rollout.tasks import arithmetic

SERVED = ["--server.slots", "8", "--server.context", "64"]
# Takes half a second as long as a file is there.
REWARD = """
import pathlib, time
from areax.rollout.tasks import arithmetic
def reward(text, row):
    time.sleep(0.5 * pathlib.Path(__file__).with_name("slow").exists())
    return arithmetic.reward(text, row)
"""
# Prints {pid: words} of all processes.
PROCESSES = """
import contextlib, json, pathlib
found = {}
for path in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found[path.name] = (path / "cmdline").read_text().split(chr(0))
print(json.dumps(found))
"""


@pytest.fixture(scope="session")
def cluster():
    with machines.running() as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(made.home / "jax"))  # the user cannot write to the checkout's
        yield made


@pytest.fixture(scope="session")
def data(cluster):
    path = cluster.home / "data"
    tiny.model(path / "model")
    tiny.rows(path / "rows.jsonl", arithmetic.splits()["train"][:40])
    return path


@pytest.fixture
def place(cluster, request):
    """A folder of the user's. Afterwards all nodes are as before: they run nothing, and hold nothing in memory."""
    path = cluster.home / re.sub(r"\W", "-", request.node.name)
    path.mkdir()
    os.chown(path, machines.USER, machines.USER)
    (path / "reward.py").write_text(REWARD)
    (path / "slow").touch()
    yield path
    cluster.ask("scancel", "--quiet", "--user", str(machines.USER))
    cluster.until(lambda: all(map(cluster.idle, machines.NODES)), "all nodes are idle", 90)
    for name, address in machines.NODES.items():
        assert cluster.run(name, "ls", "/dev/shm") == "", name
        assert areax_processes(cluster, name) == {}, name
        cluster.name(name, address)


def areax_processes(cluster, node):
    """{pid there: words} of what runs areax on a node."""
    found = json.loads(cluster.run(node, sys.executable, "-c", PROCESSES))
    return {pid: words for pid, words in found.items() if any(word.startswith("areax") for word in words)}


def script(place, *words, **settings):
    """Writes a batch script; `settings` are variables that it exports."""
    path = place / "job.sh"
    assert cli.main(["launch", "--on", "slurm", "--slurm.script", str(path), *map(str, words)]) == 0
    lines = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())
    path.write_text(path.read_text().replace("set -u\n", f"set -u\n{lines}"))
    os.chown(path, machines.USER, machines.USER)  # only its owner can read it


def grpo(place, data, steps):
    words = launching.grpo(data, place / "run", steps)
    words[words.index("--reward") + 1] = f"{place / 'reward.py'}:reward"
    return words


def submitted(cluster, place, *options):
    """Submits the script of a folder; returns the job's id, and its log as a function."""
    number = cluster.sbatch(place / "job.sh", "--chdir", place, *options)
    log = place / f"areax-{number}.log"
    return number, lambda: log.read_text() if log.exists() else ""


def server(number, node="n3"):
    """The address of a job's first server."""
    return f"http://{node}:{10000 + int(number) % 200 * 100 + 1}"


def steps(place):
    path = place / "run/metrics.jsonl"
    return [x["step"] for x in run_dir.read_lines(path) if x["kind"] == "grpo"] if path.exists() else []


def saved(place):
    """The newest step whose state is saved; 0 if none is."""
    found = (path.name for path in (place / "run/state").glob("*"))
    return max((int(name) for name in found if name.isdecimal()), default=0)


def started(cluster, place, number, log, *, step=1):
    """Waits until a run has done a step."""
    going = lambda: cluster.job(number)["JobState"] in ("PENDING", "RUNNING", "COMPLETING")
    cluster.until(lambda: max(steps(place), default=0) >= step or not going(), f"step {step}", 180)
    assert going(), log()


def queued_steps(cluster, number):
    """{name: id} of a job's steps in `squeue --steps`."""
    lines = cluster.ask("squeue", "--steps", "--noheader", "--jobs", number, "--format", "%j %i").splitlines()
    return dict(line.split() for line in lines)


def at_once(cluster, number):
    """Waits until a job is queued again, and has it start without the pause that Slurm makes."""
    cluster.until(lambda: cluster.job(number)["JobState"] == "PENDING", f"job {number} is queued again", 90)
    cluster.ask("scontrol", "update", f"JobId={number}", "StartTime=now")


def test_two_trainer_nodes_save_at_the_time_limit_and_the_next_job_goes_on(cluster, data, place):
    """A job that follows any end goes on, and a further one changes nothing; one that follows success never starts."""
    words = ["--processes", "2", "--servers", "1", *SERVED, "--", *grpo(place, data, 40), "--mesh.fsdp", "2"]
    script(place, *words)
    number, log = submitted(cluster, place)
    after, _ = submitted(cluster, place, f"--dependency=afterok:{number}")
    following, its_log = submitted(cluster, place, f"--dependency=afterany:{number}")
    further, last_log = submitted(cluster, place, f"--dependency=afterany:{following}")
    started(cluster, place, number, log)
    names = queued_steps(cluster, number)
    assert names.keys() == {"batch", "server-0", "stager-0", "trainers"}
    # 225: it tells n3, too, which says that it has no such step
    cluster.run("n1", "scancel", "--signal=USR1", names["trainers"], user=machines.USER, codes=(0, 225))
    cluster.until(lambda: log().count("most recent call first") >= 2, "both trainers print their stacks", 30)
    cluster.ask("scontrol", "update", f"JobId={number}", "TimeLimit=3")  # which warns two minutes before
    assert cluster.ended(number) == ("FAILED", "130:0"), log()
    done = saved(place)
    assert 1 <= done < 40 and done == max(steps(place))
    assert "the same command goes on" in log() and "KILLED" not in log() and "no such process" not in log().lower()
    (place / "slow").unlink()
    never = lambda: cluster.job(after)["Reason"] == "DependencyNeverSatisfied"
    cluster.until(never, "the job that follows success never starts", 60)
    cluster.ask("scancel", after)
    assert cluster.ended(following) == ("COMPLETED", "0:0"), its_log()
    assert trained(place / "run", 40) == [server(following)]
    assert cluster.ended(further) == ("COMPLETED", "0:0"), last_log()
    assert len(steps(place)) == 40 and "the run is complete after 40 steps" in last_log()
    assert (place / "run").stat().st_uid == machines.USER


def test_a_requeued_job_keeps_its_log_and_goes_on(cluster, data, place):
    """Submitted without the variables of who submits it, on nodes that believe to be 127.0.1.1, as Debian has it."""
    for name in machines.NODES:
        cluster.name(name, "127.0.1.1")
    names = ("PYTHONPATH", "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS")
    given = {name: os.environ[name] for name in names if name in os.environ}
    script(place, "--servers", "1", *SERVED, "--", *grpo(place, data, 40), **given)
    number, log = submitted(cluster, place, "--export=NONE")
    started(cluster, place, number, log)
    cluster.ask("scontrol", "requeue", number)
    at_once(cluster, number)
    done = saved(place)
    assert done >= 1
    (place / "slow").unlink()
    assert cluster.ended(number) == ("COMPLETED", "0:0"), log()
    trained(place / "run", 40)
    assert log().count("areax train grpo: importing libraries") == 2 and "the same command goes on" in log()
    logs = place / f"areax-{number}"
    assert (logs / "server-0.log").read_text().count("areax serve: importing libraries") == 2
    assert {path.name for path in logs.iterdir()} == {"server-0.log", "stager-0.log"}


def test_a_killed_server_is_restarted_and_scancel_saves(cluster, data, place):
    script(place, "--servers", "1", *SERVED, "--", *grpo(place, data, 400))
    number, log = submitted(cluster, place)
    started(cluster, place, number, log)
    serving = lambda: [pid for pid, words in areax_processes(cluster, "n2").items() if "serve" in words]
    for pid in (before := serving()):
        cluster.run("n2", "kill", "-KILL", pid)
    began = max(steps(place))
    started(cluster, place, number, log, step=began + 2)
    assert not set(before) & set(serving()) and "areax: server-0 on n2 ended with exit code 137; see " in log()
    cluster.ask("scancel", number)
    assert cluster.ended(number)[0] == "CANCELLED", log()
    cluster.until(lambda: "the same command goes on" in log(), "the trainer has saved its state", 40)
    assert began + 2 <= saved(place) == max(steps(place)) < 400


@pytest.mark.parametrize("lost", ["n1", "n2"])
def test_after_the_loss_of_a_node_the_job_goes_on_with_others(cluster, data, place, lost):
    """n1 has the script and the trainer, n2 the server; the node is back, empty, before the job starts again."""
    script(place, "--servers", "1", *SERVED, "--", *grpo(place, data, 40), "--save-every", "1")
    number, log = submitted(cluster, place)
    started(cluster, place, number, log, step=2)
    cluster.lose(lost)
    cluster.until(lambda: cluster.job(number)["JobState"] == "PENDING", f"job {number} is queued again", 120)
    done = saved(place)
    assert done >= 1
    cluster.boot(lost)
    cluster.until(lambda: all(map(cluster.idle, machines.NODES)), "all nodes are idle", 90)
    for name in machines.NODES:
        assert cluster.run(name, "ls", "/dev/shm") == "", name
    (place / "slow").unlink()
    at_once(cluster, number)
    assert cluster.ended(number) == ("COMPLETED", "0:0"), log()
    assert trained(place / "run", 40) and log().count("areax train grpo: importing libraries") == 2


def test_a_server_that_cannot_start_ends_the_job_with_its_last_lines(cluster, data, place):
    script(place, "--servers", "1", "--server.command", "bash -c 'echo no weights for {port}; exit 7'", "--",
           *grpo(place, data, 1))  # fmt: skip
    number, log = submitted(cluster, place)
    assert cluster.ended(number) == ("FAILED", "1:0")
    said = log()
    assert said.count("areax: server-0 on n2 ended with exit code 7; see ") == 4
    assert "areax: server-0 on n2 has failed four times\nareax: the end of areax-" in said
    assert f"  no weights for {server(number).rpartition(':')[2]}\n" in said
    assert "importing libraries" not in said and "no such process" not in said.lower()


def test_a_job_says_for_which_server_it_waits_and_for_how_long(cluster, data, place):
    script(place, "--servers", "1", "--server.command", "bash -c 'echo loading; sleep 1000 # {port}'", "--",
           *grpo(place, data, 1))  # fmt: skip
    path = place / "job.sh"
    path.write_text(path.read_text().replace("1800", "4"))
    number, log = submitted(cluster, place)
    assert cluster.ended(number) == ("FAILED", "1:0")
    url = server(number, "n2")
    assert f"areax: waiting for {url} to answer (urllib.error.URLError: <urlopen error [Errno 111] " in log()
    assert f"areax: {url} did not answer in 4 s (urllib.error.URLError: " in log() and "\n  loading\n" in log()
