"""`areax launch` with real processes: on this machine, on a Ray cluster of two nodes, and as a batch script in bash."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import jobs
import launching
import pytest
import raylets
import servers
import tiny
from hypothesis import given
from hypothesis import strategies as st
from launching import SERVED, free_ports, gone, grpo, said_in, trained

from areax.adapters import cli
from areax.adapters.launch import config as launch_config
from areax.adapters.launch import devices as launch_devices
from areax.adapters.launch import job as launch_job
from areax.adapters.launch.host import PYTHON, Gone, Host
from areax.adapters.launch.job import Part
from areax.adapters.report import chrome_trace
from areax.adapters.tracking import run_dir
from areax.rollout.servers.engine_mesh import EngineMesh
from areax.rollout.tasks import arithmetic


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("launch")
    (path / "server.py").write_text(launching.SERVER)
    (path / "recipe.py").write_text(launching.RECIPE)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    tiny.model(path / "model")
    tiny.rows(path / "rows.jsonl", arithmetic.splits()["train"][:40])
    return path


def serving(url):
    """Pid of the process that serves at an address, or None."""
    port = url.rpartition(":")[2].encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = path.read_bytes().split(b"\0")
            if b"serve" in words and port in words:
                return int(path.parent.name)
    return None


@contextlib.contextmanager
def launched(*words, **more):
    """Runs `areax launch`; ends it on leaving the block."""
    command = [sys.executable, "-m", "areax", "launch", *map(str, words)]
    process = subprocess.Popen(command, env={**os.environ, **jobs.settings(1)}, text=True, **more)
    with servers.ended(process):
        yield process


# -- devices -------------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.integers(1, 2), st.booleans())
def test_no_gpu_is_assigned_twice(processes, devices, count, of_server, named):
    wanted = processes * devices + count * of_server
    names = [f"GPU-{i:x}" if named else str(i) for i in range(wanted)]
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(names)}
    trainers, served = launch_devices.of_each(processes, devices, count, of_server, environ)
    seen = [trainer.get("CUDA_VISIBLE_DEVICES", environ["CUDA_VISIBLE_DEVICES"]).split(",") for trainer in trainers]
    taken = [its[int(i)] for trainer, its in zip(trainers, seen, strict=True) for i in ids(trainer)]
    if count:  # a single process joins no job, and takes all devices that it sees
        assert all(its == names[: processes * devices] for its in seen)
    assert sorted(taken + [gpu for one in served for gpu in one["CUDA_VISIBLE_DEVICES"].split(",")]) == sorted(names)
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[1:])
    if wanted > 1:
        with pytest.raises(ValueError, match=f"need {wanted} GPUs, this machine has {wanted - 1};"):
            launch_devices.of_each(processes, devices, count, of_server, environ)


@given(st.integers(1, 9), st.integers(0, 12), st.integers(1, 6), st.integers(1, 9))
def test_servers_of_a_run_take_the_devices_that_its_trainer_leaves(there, trainer, count, each):
    if each > there:
        return
    places = launch_devices.of_own_servers(there, trainer, count, each)
    assert [len(ids) for ids in places] == [each] * count and {i for ids in places for i in ids} <= set(range(there))
    fit = min(count, max(0, there - trainer) // each)
    own, shared = places[:fit], places[fit:]
    assert [i for ids in own for i in ids] == list(range(trainer, trainer + fit * each))
    assert all(ids[0] < (trainer or there) for ids in shared)
    assert shared[:1] in ([], [list(range(each))])  # the others begin with the first device, and spread
    on = [sum(i in ids for ids in shared) for i in range(max(1, (min(trainer, there) or there) // each) * each)]
    assert max(on) - min(on) <= 1


@pytest.mark.parametrize(
    "amd, environ, shown",
    [
        (False, {}, {"CUDA_VISIBLE_DEVICES": "1,3"}),
        (False, {"CUDA_VISIBLE_DEVICES": "4,5, 6,GPU-7"}, {"CUDA_VISIBLE_DEVICES": "5,GPU-7"}),
        (False, {"HIP_VISIBLE_DEVICES": "4,5,6,7"}, {"CUDA_VISIBLE_DEVICES": "1,3"}),
        (True, {}, {"HIP_VISIBLE_DEVICES": "1,3"}),
        (True, {"HIP_VISIBLE_DEVICES": "4,5,6,7", "CUDA_VISIBLE_DEVICES": "0"}, {"HIP_VISIBLE_DEVICES": "5,7"}),
        (True, {"CUDA_VISIBLE_DEVICES": "3,2,1,0"}, {"HIP_VISIBLE_DEVICES": "2,0"}),
        (True, {"ROCR_VISIBLE_DEVICES": "4,5,6,7"}, {"HIP_VISIBLE_DEVICES": "1,3"}),  # within the inherited four
    ],
)
def test_a_process_is_shown_its_gpus_among_those_that_are_visible(amd, environ, shown):
    assert launch_devices.showing([1, 3], amd, environ) == shown


def ids(trainer):
    return trainer["JAX_LOCAL_DEVICE_IDS"].split(",")


def test_devices_of_other_kinds(monkeypatch):
    on_cpu = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0"}
    trainers, served = launch_devices.of_each(2, 2, 2, 1, on_cpu)
    assert [ids(trainer) for trainer in trainers] == [["0", "1"], ["2", "3"]] and served == [{}, {}]
    monkeypatch.setattr(launch_devices, "tpu_chips", lambda environ: 4)
    [trainer], served = launch_devices.of_each(1, 2, 2, 1, {})
    assert [x["TPU_VISIBLE_CHIPS"] for x in (trainer, *served)] == ["0,1", "2", "3"]
    assert [x["TPU_CHIPS_PER_PROCESS_BOUNDS"] for x in (trainer, *served)] == ["1,2,1", "1,1,1", "1,1,1"]
    with pytest.raises(ValueError, match="need 5 TPU chips, this machine has 4;"):
        launch_devices.of_each(1, 4, 1, 1, {})
    with pytest.raises(ValueError, match="a TPU host with servers must have one trainer process"):
        launch_devices.of_each(2, 1, 1, 1, {})


def test_servers_of_other_kinds_get_what_training_needs():
    own = launch_config.Config(servers=2, server=launch_config.Server(kind="vllm", devices=2, dtype="bfloat16"))
    words = " ".join(
        launch_config.server_words(own, ["train", "grpo", "--model", "my model", "--length", "4096"], "h", 7)
    )
    assert words == (
        "env VLLM_SERVER_DEV_MODE=1 vllm serve my model --host h --port 7 --tensor-parallel-size 2 --enable-scale-out "
        "--logprobs-mode processed_logprobs --dtype bfloat16 --max-model-len 4096"
    )
    own = launch_config.Config(servers=1, server=launch_config.Server(kind="sglang", context=512))
    words = " ".join(launch_config.server_words(own, ["train", "grpo", "--model", "m"], "h", 7))
    assert words == (
        "python -m sglang.launch_server --model-path m --host h --port 7 --tp-size 1 --dtype auto --context-length 512"
    )


@pytest.mark.parametrize(
    "words, told",
    [
        ("--servers 1 -- train grpo --data d", "got none; add it, or set --server.command"),
        ("--servers 1 -- train grpo --model m --servers http://a:1", "got --servers in the command; leave it out"),
        (
            "--servers 1 -- train grpo --model m --serve.slots=4",
            "got --serve.slots in the command; leave it out, and set --server.slots",
        ),
        ("--servers 1 -- train grpo --model m --init=random", "got --init random, which has none"),
        ("--servers 1 -- train grpo --model m --serve.count=4", "got --serve.count in the command; leave it out\n"),
        (
            "--servers 1 --server.devices 2 -- train grpo --model m",
            "is for --server.kind and --server.command, got 2 without; `areax serve` takes --server.mesh",
        ),
        (
            "--servers 1 --server.mesh.tp 2 --server.command {port} -- train grpo --model m",
            "no options of `areax serve`, got --server.mesh.dp 1 --server.mesh.ep 1 --server.mesh.tp 2; set ",
        ),
        (
            "--servers 1 --server.kind vllm --server.slots 4 -- train grpo --model m",
            "no options of `areax serve`, got --server.slots 4",
        ),
        (
            "--servers 1 --server.kind vllm --server.command {port} -- train grpo --model m",
            "both say which server, got kind vllm; leave out one",
        ),
        ("--servers 1 --server.command sglang -- train grpo --model m", "must contain {port}, got 'sglang'"),
        (
            "--servers 1 --server.command x'{port} -- train grpo --model m",
            '--server.command must be words as a shell reads them, got "x\'{port}" (no closing quotation)',
        ),
        ("--on slurm --slurm.gpus-per-node 4 --devices 8 -- train r.py", "at most --slurm.gpus-per-node 4, got 8"),
        (f"--processes {10**8} -- train sft", "--processes must be at most 10000, got 100000000"),
        ("--on slurm --servers 10001 -- train sft", "--servers must be at most 10000, got 10001"),
        ("--processes 9999 --servers 9 -- train sft", "--processes 9999 and --servers 9 must fit into"),
        (f"--processes 2 --cpus {10**8} -- train sft", "--cpus must be at most 4096, got 100000000"),
        ("--on slurm --slurm.time soon -- train r.py", "minutes, hours:minutes:seconds or days-hours, as 30, "),
        ("--on slurm --slurm.account a#b -- train r.py", "--slurm.account must be one word of letters, digits and "),
        ("--processes 2 -- frobnicate --model m", "areax: unknown command 'frobnicate'; commands are train, "),
        ("--processes 2 -- sft --model m", "unknown command 'sft'; did you mean areax train sft?"),
        ("--on slurm -- train srft --model m", "recipe must be one of sft, grpo, "),
        (
            "--on slurm -- train dapo --modle m --serve.no-inside",
            "unrecognized options: --modle; did you mean --model?",
        ),
        ("--on slurm --servers 1 -- train grpo --model m", "areax train grpo: needs --data, --reward; see areax train"),
        (
            "--processes 2 -- train sft --model m --data d --steps ten",
            "areax train sft: --steps must be a whole number",
        ),
        ("--processes 2 -- train sft --model m --data d --steps -1", "--steps must be at least 0, got -1"),
        ("--processes 2 -- train sft --model m --config gone.yaml", "gone.yaml"),
        (
            "--on slurm -- train sft --config gone.yaml --stpes 1",
            "unrecognized options: --stpes; did you mean --steps?",
        ),
        ("--processes 2 -- train", "areax train: needs a recipe as first argument"),
        ("--processes 2 -- eval --model m --data d", "areax eval: needs --reward"),
        ("--processes 2 -- serve m --dtype int3", "areax serve: invalid choice 'int3' for argument '--dtype'"),
        (f"--processes 2 --devices {10**8} -- train sft", "--devices must be at most 1024, got 100000000"),
        ("--on ray --ray.address 127.0.0.1:1 -- train r.py", "no Ray cluster answers at --ray.address 127.0.0.1:1"),
        ("--on ray --ray.address auto -- train r.py", "--ray.address must be the address of a cluster, as 10."),
    ],
)
def test_impossible_options_give_a_one_line_error(words, told, capsys):
    assert cli.main(["launch", *words.split()]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1


def test_a_ray_cluster_of_the_environment_that_is_gone_is_named_at_once(monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert cli.main(["launch", "--on", "ray", "--", "train", "r.py"]) == 2
    assert "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1 (" in capsys.readouterr().err


def test_options_of_the_command_are_known_by_all_their_names(capsys):
    words = "train grpo --config a.yaml --lr 1e-5 --group_size=4 --serve.no-inside"
    assert cli.main(["launch", "--on", "slurm", "--", *words.split()]) == 0
    assert "--group_size=4" in capsys.readouterr().out


def test_a_command_for_several_servers_is_accepted(capsys):
    assert cli.main(["launch", "--on", "slurm", "--servers", "3", "--", *map(str, grpo(Path("d"), "run", 1))]) == 0
    assert "train grpo" in capsys.readouterr().out


def test_a_server_gets_the_launchers_options():
    server = launch_config.Server(
        mesh=EngineMesh(tp=2, dp=2), slots=3, context=96, memory=0.5, draft=5, kv_cache_dtype="float8", dtype="float32"
    )
    config = launch_config.Config(servers=1, server=server)
    words = launch_config.server_words(config, ["train", "grpo", "--model", "m"], "h", 1)
    assert words[:3] == ["env", "AREAX_PROCESSES=1", "JAX_NUM_CPU_DEVICES=4"]
    assert words[3:8] == [PYTHON, "-m", "areax", "serve", "m"]
    assert dict(zip(words[8::2], words[9::2], strict=True)) == {
        "--host": "h", "--port": "1", "--slots": "3", "--context": "96", "--dtype": "float32", "--memory": "0.5",
        "--draft": "5", "--kv-cache-dtype": "float8", "--mesh.dp": "2", "--mesh.ep": "1", "--mesh.tp": "2",
    }  # fmt: skip


def test_an_option_is_no_line_of_a_batch_script(capsys):
    for option in ("partition", "account", "time"):
        for value in ("gpu\ntouch x", "gpu\r", "a b", "'a", "1:2\n"):
            assert cli.main(["launch", "--on", "slurm", f"--slurm.{option}", value, "--", "train", "r.py"]) == 2
            said = capsys.readouterr()
            assert said.err.startswith(f"areax launch: --slurm.{option} must be ") and said.err.count("\n") == 1
            assert said.out == ""
    for limit in ("30", "30:00", "4:00:00", "1-12", "1-12:30", "1-12:30:15", "UNLIMITED"):
        words = ["--slurm.time", limit, "--slurm.partition", "gpu,long_1", "--", "train", "r.py"]
        assert cli.main(["launch", "--on", "slurm", *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert f"#SBATCH --time={limit}" in lines and "#SBATCH --partition=gpu,long_1" in lines


# -- one machine ---------------------------------------------------------------------------------


@pytest.fixture
def here():
    host = Host()
    yield host
    host.close()


def test_a_command_after_env_runs_with_this_interpreter(here, tmp_path):
    out = tmp_path / "out"
    code = "import os, sys; print(sys.executable, os.environ['LEVEL'])"
    here.start("one", ["env", "LEVEL=4", PYTHON, "-c", code], {}, str(out))
    while here.poll("one") is None:
        time.sleep(0.01)
    assert out.read_text().split() == [sys.executable, "4"]


def test_the_log_of_an_earlier_run_stays(here, tmp_path):
    log = tmp_path / "log"
    log.write_text("of an earlier run\n")
    here.start("one", [PYTHON, "-c", "print('of this run')"], {}, str(log))
    while here.poll("one") is None:
        time.sleep(0.01)
    assert log.read_text() == "of an earlier run\nof this run\n"
    assert here.last("one") == (str(log), ["of this run"]) and here.read("one") == "of this run\n"


def test_asked_for_stacks_from_its_start_on_a_process_goes_on(here, tmp_path):
    out, ready = tmp_path / "out", tmp_path / "ready"
    code = "import faulthandler, pathlib, signal, sys, time\n"
    code += "faulthandler.register(signal.SIGUSR1)\npathlib.Path(sys.argv[1]).touch()\ntime.sleep(1000)"
    here.start("one", [PYTHON, "-c", code, str(ready)], {}, str(out))
    jobs.until(lambda: b"python" in Path(f"/proc/{here._running['one'].pid}/cmdline").read_bytes().split(b"\0")[0])
    while not ready.exists():
        here.signal("one", signal.SIGUSR1)
        assert here.poll("one") is None
        time.sleep(0.002)
    for _ in range(20):
        here.signal("one", signal.SIGUSR1)
        time.sleep(0.01)
    assert here.poll("one") is None and "most recent call first" in out.read_text()


def server_part(place, host, folder, port, name="server 0"):
    words = [PYTHON, str(place / "server.py"), str(folder), "127.0.0.1", str(port)]
    return Part(name, host, words, {}, str(folder / f"{port}.log"), url=f"http://127.0.0.1:{port}")


def test_a_server_is_restarted_at_most_three_times_an_hour(place, here, tmp_path, monkeypatch, capsys):
    """It restarts at its address, its leftover processes ended; the trainer's exit ends the job, servers last."""
    monkeypatch.setattr(launch_job, "PAUSE_S", 0.01)
    port, other = free_ports(2)
    parts = [server_part(place, here, tmp_path, port), server_part(place, here, tmp_path, other, "server 1")]
    began = lambda: [pid for what, at, pid, _ in said_in(tmp_path) if (what, at) == ("began", port)]

    def kill_four_times():
        jobs.until(lambda: trainer.pid)  # then the servers are ready
        for i in range(4):
            jobs.until(lambda: len(began()) > i)  # noqa: B023
            os.kill(began()[i], signal.SIGKILL)
        jobs.until(lambda: parts[0].due == float("inf"))
        (tmp_path / "go").touch()

    wait = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\nsys.exit(7)"
    trainer = Part("process 0", here, [PYTHON, "-c", wait, str(tmp_path / "go")], {}, str(tmp_path / "0.log"))
    killing = threading.Thread(target=kill_four_times)
    killing.start()
    assert launch_job.run([trainer], parts, look_s=0.01) == 7
    killing.join()
    said = capsys.readouterr().err
    assert said.count("was killed by SIGKILL; restarting it; the end of") == 3
    assert said.count("was killed by SIGKILL; not restarting it; the end of") == 1
    assert "process 0 (pid" in said and "ended with exit code 7; ending the others; the end of" in said
    assert len(began()) == 4 and [x[0] for x in said_in(tmp_path) if x[1] == other] == ["began", "ended"]
    assert all(gone(pid) for _, _, pid, _ in said_in(tmp_path))


def test_a_server_that_cannot_start_ends_the_job(place, here, tmp_path, capsys):
    port, other = free_ports(2)
    bad = server_part(place, here, tmp_path / "nowhere", other, "server 1")
    good, trainer = server_part(place, here, tmp_path, port), Part("process 0", here, ["no-such-program"], {}, "")
    (tmp_path / "nowhere").touch()  # not a folder: the server cannot log its start
    bad.log = str(tmp_path / "bad.log")
    assert launch_job.run([trainer], [good, bad], look_s=0.01) == 1
    said = capsys.readouterr().err
    assert "server 1 (pid" in said and "ended with exit code 1 before it was ready; the end of" in said
    assert "NotADirectoryError" in said and not trainer.pid
    assert gone(good.pid) and gone(bad.pid)


class Away(Host):
    """A machine that is lost after some polls, as those of Ray are."""

    def __init__(self, polls):
        super().__init__()
        self.polls = polls

    def poll(self, name):
        self.polls -= 1
        if self.polls < 0:
            raise Gone("lost")
        return super().poll(name)


@pytest.mark.parametrize("polls", range(4))
def test_a_lost_machine_of_a_trainer_is_named_whenever_it_is_noticed(polls, capsys):
    host = Away(polls)
    trainer = Part("process 0", host, ["sleep", "1000"], {}, "", " on h")
    with pytest.raises(Gone, match="process 0 .* on h. is gone: lost"):
        launch_job.run([trainer], [], look_s=0.01)
    assert "on h) is gone: lost; ending the others" in capsys.readouterr().err
    host.polls = 9
    host.close()


def test_a_job_whose_servers_are_all_lost_can_go_on_elsewhere(place, here, tmp_path, capsys):
    [port] = free_ports(1)
    server = server_part(place, Away(10**9), tmp_path, port)
    wait = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\nsys.exit(1)"
    trainer = Part("process 0", here, [PYTHON, "-c", wait, str(tmp_path / "go")], {}, str(tmp_path / "0.log"))

    def lose():
        jobs.until(lambda: trainer.pid)
        server.host.polls = 0
        jobs.until(lambda: server.due)
        (tmp_path / "go").touch()

    losing = threading.Thread(target=lose)
    losing.start()
    with pytest.raises(Gone, match="ended with exit code 1"):
        launch_job.run([trainer], [server], look_s=0.01)
    losing.join()
    assert "server 0 (pid" in (said := capsys.readouterr().err) and "is gone: lost; the run goes on without it" in said
    server.host.polls = 9
    server.host.close()


def test_child_processes_end_with_a_killed_launcher(tmp_path):
    """Including what the children started in their process groups, and their scratch folders."""
    child = "import os, subprocess, sys; p = subprocess.Popen(['sleep', '1000']); print(p.pid, flush=True); p.wait()"
    program = (
        "import time\n"
        "from areax.adapters.launch.host import PYTHON, Host\n"
        "host = Host()\n"
        f"host.start('one', [PYTHON, '-c', {child!r}], {{}}, {str(tmp_path / 'log')!r})\n"
        "print(host.scratch('nowhere'), flush=True)\n"
        "time.sleep(1000)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with launcher, servers.ended(launcher):
        folder = Path(launcher.stdout.readline().strip())
        jobs.until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().endswith("\n"))
        sleeper = int((tmp_path / "log").read_text())
        assert folder.is_dir() and not gone(sleeper)
        launcher.kill()
        jobs.until(lambda: gone(sleeper) and not folder.exists())


@pytest.mark.wide
@pytest.mark.slow
def test_a_killed_server_restarts_with_the_newest_weights(data, tmp_path):
    """One of two servers is killed; then Ctrl-C saves the state and ends the run with its servers."""
    out = tmp_path / "run"
    with launched(*SERVED, "--logs", tmp_path / "logs", "--", *grpo(data, out, 100000)) as process:
        metrics = out / "metrics.jsonl"
        jobs.until(lambda: process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") > 1))
        urls = json.loads((out / "config.json").read_text())["serving"]["servers"]
        before = [serving(url) for url in urls]
        os.kill(before[1], signal.SIGKILL)
        jobs.until(lambda: serving(urls[1]) not in (None, before[1]))

        changes = lambda: [x for x in run_dir.read_lines(out / chrome_trace.EVENTS) if x["kind"] == "server"]
        jobs.until(lambda: [x["state"] for x in changes() if x["url"] == urls[1]][-1:] == ["healthy"])
        again = serving(urls[1])
        assert (
            servers.Remote(int(urls[1].rpartition(":")[2])).ok("/get_model_info")["weight_version"] != "default"
        )  # the label of a freshly started server
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    assert all(gone(pid) for pid in (*before, again))
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] >= 1 and (out / "state").is_dir()
    assert summary["counts"]["recovered"] >= 1
    assert (tmp_path / "logs/server-1.log").read_text().count(f"{urls[1]} serves qwen3") == 2


def test_keys_are_made_where_none_is_given(monkeypatch):
    for name in ("A", "A_FILE", "B", "B_FILE"):
        monkeypatch.delenv(name, raising=False)
    made = launch_config.new_keys("A", "B")
    assert made.keys() == {"A", "B"} and made["A"] != made["B"] and min(map(len, made.values())) > 30
    monkeypatch.setenv("A", "given")
    monkeypatch.setenv("B_FILE", "/run/secrets/b")
    assert launch_config.new_keys("A", "B") == {}


# -- Ray -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray():
    """Two nodes that each claim to have two GPUs."""
    with raylets.cluster(*(["--num-cpus", "2", "--num-gpus", "2"] for _ in range(2))) as cluster:
        yield ["--on", "ray", "--ray.address", cluster.address]


@pytest.mark.long
def test_ray_assigns_devices_and_ends_all_processes_with_the_launcher(ray, place, tmp_path, monkeypatch):
    """Two trainer processes take one node; two servers and their stagers take the other."""
    monkeypatch.delenv("JAX_PLATFORMS")
    command = f"{sys.executable} {place / 'server.py'} {tmp_path} {{host}} {{port}}"
    job = ["--processes", "2", "--servers", "2", "--server.command", command, "--"]
    job += ["train", str(place / "recipe.py"), "--out", str(tmp_path), "--code", "5"]
    told = lambda: [json.loads(path.read_text()) for path in sorted(tmp_path.glob("told-*"))]
    for killed in (False, True):
        with launched(*ray, "--logs", tmp_path / "logs", *job, stderr=subprocess.PIPE) as process:
            jobs.until(lambda: process.poll() is not None or len(told()) == 2)  # noqa: B023
            if killed:
                process.kill()
            (tmp_path / "go").touch()
            _, said = process.communicate(timeout=60)
            assert process.returncode == (-9 if killed else 5), said
        pids = [x["pid"] for x in told()] + [pid for _, _, pid, _ in said_in(tmp_path)]
        jobs.until(lambda: all(map(gone, pids)))  # noqa: B023
        if not killed:
            assert "ended with exit code 5; ending the others; " in said
            first, second = told()
            assert (first["AREAX_PROCESSES"], first["AREAX_PROCESS"], second["AREAX_PROCESS"]) == ("2", "0", "1")
            assert first["AREAX_COORDINATOR"] == second["AREAX_COORDINATOR"]
            assert len(first["stagers"]) == 2 and first["AREAX_STAGER_KEY"] == second["AREAX_STAGER_KEY"] != ""
            assert {x["CUDA_VISIBLE_DEVICES"] for x in (first, second)} == {"0", "1"}
            assert {gpus for _, _, _, gpus in said_in(tmp_path)} == {"0", "1"}
            at = {url.split(":")[1][2:] for url in first["servers"]}
            assert len(at) == 1 and at.isdisjoint(first["AREAX_COORDINATOR"].split(":"))
        (tmp_path / "go").unlink()
        for path in tmp_path.glob("told-*"):
            path.unlink()


@pytest.mark.long
def test_ray_trains_with_servers_on_two_nodes(ray, data, tmp_path):
    """Neither server sees the trainer's folder: stagers fetch the weights."""
    with launched(*ray, *SERVED, "--logs", tmp_path / "logs", "--", *grpo(data, tmp_path / "run", 2)) as process:
        assert process.wait(300) == 0
    urls = trained(tmp_path / "run", 2)
    assert {url.split(":")[1][2:] for url in urls} == set(raylets.ADDRESSES[:2]) and not any(map(serving, urls))


@contextlib.contextmanager
def mishap(data, folder, out, count, processes=1):
    """A run on a cluster of three nodes with room for one process each, after its first steps.

    Yields the cluster, the launcher, and its output so far as a function. Afterwards nothing of it is left on any node.
    """
    patience = "import sys; from areax.adapters import cli; from areax.adapters.launch import ray; "
    patience += "ray.AGAIN_S = ray.HEAD_S = 3; sys.exit(cli.main(sys.argv[1:]))"
    run = ["--servers", str(count), *SERVED[2:], "--processes", str(processes), "--"]
    run += [*grpo(data, out, 100000), "--save-every", "1", "--mesh.fsdp", str(processes)]
    with raylets.cluster(*(["--num-cpus", "1"] for _ in range(3))) as cluster:
        command = [sys.executable, "-c", patience, "launch", "--on", "ray", "--ray.address", cluster.address, *run]
        environ = {**os.environ, **jobs.settings(1), "AREAX_MARK": str(folder)}
        with open(folder / "said", "w") as file:
            launcher = subprocess.Popen(command, env=environ, stdout=file, stderr=file)
        said = (folder / "said").read_text
        with servers.ended(launcher):
            jobs.until(lambda: launcher.poll() is not None or stepped(out) > 1)
            roots = [words[words.index("--root") + 1] for words in marked(folder) if "--root" in words]
            assert launcher.poll() is None and roots and all(map(os.path.isdir, roots)), said()
            yield cluster, launcher, said
        jobs.until(lambda: not marked(folder))
        assert not any(map(os.path.exists, roots))


def marked(folder):
    """The words of the processes of a `mishap`, and its launcher's."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"AREAX_MARK={folder}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_text().split("\0"))
    return found


def stepped(out):
    """The last step of a run."""
    path = out / "metrics.jsonl"
    return max((x["step"] for x in run_dir.read_lines(path) if x["kind"] == "grpo"), default=0) if path.exists() else 0


def hosts(out):
    """Addresses of the machines of a run's servers."""
    urls = json.loads((out / "config.json").read_text())["serving"]["servers"]
    return [url.split(":")[1][2:] for url in urls]


@pytest.mark.long
def test_ray_loses_the_machine_of_a_server_and_its_head(data, tmp_path):
    """The run goes on without the server, also when the machine is back. Without a head it saves its state and ends."""
    out = tmp_path / "run"
    with mishap(data, tmp_path, out, 2) as (cluster, launcher, said):
        i, lost = max(enumerate(hosts(out)), key=lambda pair: pair[1])  # not the head's
        cluster.lose(lost)
        jobs.until(lambda: "the run goes on without it" in said())
        assert re.search(
            rf"areax launch: server {i} \(pid \d+ on {lost}\) is gone: .*; the run goes on without", said()
        )
        assert said().count("is gone:") == 1  # not of its stager, too
        before = stepped(out)
        jobs.until(lambda: launcher.poll() is not None or stepped(out) > before + 1)
        cluster.join(lost, "--num-cpus", "1")
        back = stepped(out)
        jobs.until(lambda: launcher.poll() is not None or stepped(out) > back + 1)
        cluster.lose(raylets.ADDRESSES[0])
        assert launcher.wait(120) == 1, said()
        assert "areax launch: the head of the Ray cluster must answer, " in said()
    assert stepped(out) > back and (out / "state").is_dir()


@pytest.mark.long
def test_ray_loses_the_machine_of_a_trainer(data, tmp_path):
    """The job waits for room, and goes on from its last state when another machine joins."""
    out = tmp_path / "run"
    with mishap(data, tmp_path, out, 1, 2) as (cluster, launcher, said):
        [served] = hosts(out)
        lost = next(address for address in raylets.ADDRESSES[1:] if address != served)
        cluster.lose(lost)
        jobs.until(lambda: "starting the job again" in said())
        assert re.search(rf"areax launch: process [01] \(pid \d+ on {lost}\) is gone: .*; ending the others", said())
        jobs.until(lambda: re.search("waiting for room in the Ray cluster .* up to 1800 s", said()))
        before = stepped(out)
        cluster.join("127.0.0.5", "--num-cpus", "1")
        jobs.until(lambda: launcher.poll() is not None or stepped(out) > before + 1)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 130, said()
    steps = [line["step"] for line in run_dir.read_lines(out / "metrics.jsonl") if line["kind"] == "grpo"]
    assert steps == list(range(1, len(steps) + 1)) and said().count("grpo 1/100000") == 1  # not from its beginning


# -- Slurm ---------------------------------------------------------------------------------------

# Runs steps locally, and sets the variables by which the tasks of a step know their rank. As the real srun 22.05, which
# `make test-slurm` runs, it answers SIGTERM and SIGHUP by killing its tasks, passes on SIGINT only with
# --disable-status, names tasks that fail, ends with their highest exit code, and after `sbatch --export=NONE` passes on
# variables only with --export=ALL.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
with open(os.environ["STEPS"], "a") as steps:
    print(*sys.argv[1:], file=steps)
KNOWN = {{"overlap", "disable-status", "export", "cpus-per-task", "gpus-per-node", "job-name", "nodes", "ntasks",
         "ntasks-per-node", "nodelist"}}
options, words = {{}}, sys.argv[1:]
while words[0].startswith("--"):
    name, _, value = words.pop(0)[2:].partition("=")
    options[name] = value
if options.keys() - KNOWN:
    sys.exit(f"srun: unrecognized option '--{{min(options.keys() - KNOWN)}}'")
given = os.environ if options.get("export", os.environ["SLURM_EXPORT_ENV"]) == "ALL" else {{}}
signal.signal(signal.SIGINT, lambda *_: None) # a background job of the script ignores it; its tasks do not
count, local = int(options.get("ntasks", 1)), int(options.get("ntasks-per-node", 1))
tasks = [
    subprocess.Popen(words, env={{
        **given, "SLURM_STEP_NUM_TASKS": str(count), "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i % local)
    }})
    for i in range(count)
]
def tell(number, _):
    for task in tasks:
        task.send_signal(number if number == signal.SIGINT else signal.SIGKILL)
for number in (signal.SIGTERM, signal.SIGHUP, *([signal.SIGINT] if "disable-status" in options else [])):
    signal.signal(number, tell)
codes = [code if code >= 0 else 128 - code for code in (task.wait() for task in tasks)]
for i, code in enumerate(codes):
    if code:
        print(f"srun: error: task {{i}}: Exited with exit code {{code}}", file=sys.stderr, flush=True)
sys.exit(max(codes))
"""
SCONTROL = """#!/bin/bash
[[ "$1 $2" == "show hostnames" ]] || exit 1
for node in ${3//,/ }; do echo "$node"; done
"""


@contextlib.contextmanager
def batch(place, folder, nodes, words):
    """The script of `areax launch --on slurm`, run by bash with stand-ins for the Slurm commands."""
    bin, script = folder / "bin", folder / "job.sh"
    bin.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)
    assert cli.main(["launch", "--on", "slurm", "--slurm.script", str(script), *words]) == 0
    environ = {
        **os.environ, **jobs.settings(1), "PATH": f"{bin}:{os.environ['PATH']}", "STEPS": str(folder / "steps"),
        "SLURM_EXPORT_ENV": "NONE", "SLURM_JOB_ID": str(job := job_id()), "SLURM_JOB_NODELIST": ",".join(nodes),
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
    }  # fmt: skip
    process = subprocess.Popen(["bash", str(script)], env=environ, cwd=folder, start_new_session=True)
    process.job = job
    with servers.ended(process):
        yield process


def job_id():
    """The id of a job whose ports are free."""
    for number in range(os.getpid() % 200, 400):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for i in range(8):
                stack.enter_context(socket.create_server(("", 10000 + number % 200 * 100 + i)))
            return number
    raise AssertionError("no ports are free")


@pytest.mark.slow
def test_a_batch_script_under_bash(place, tmp_path):
    """Two servers share a node, one of them is killed; two trainer processes have a node each, and exit with code 5."""
    nodes = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    words = [
        "--processes", "2", "--devices", "2", "--servers", "2", "--slurm.gpus-per-node", "2", "--slurm.time", "1:00",
        "--server.command", f"{sys.executable} {place / 'server.py'} {tmp_path} {{host}} {{port}}", "--",
        "train", str(place / "recipe.py"), "--out", str(tmp_path), "--code", "5",
    ]  # fmt: skip
    with batch(place, tmp_path, nodes, words) as process:
        jobs.until(lambda: all((tmp_path / f"told-{i}").exists() for i in range(2)) or process.poll() is not None)
        first = said_in(tmp_path)
        os.kill(first[0][2], signal.SIGKILL)
        jobs.until(lambda: len(said_in(tmp_path)) > 2)
        (tmp_path / "go").touch()
        assert process.wait(60) == 5
    told = [json.loads((tmp_path / f"told-{i}").read_text()) for i in range(2)]
    assert [x["AREAX_PROCESS"] for x in told] == ["0", "1"] and {x["AREAX_PROCESSES"] for x in told} == {"2"}
    assert {x["AREAX_COORDINATOR"].partition(":")[0] for x in told} == {"127.0.0.1"}
    assert {x["CUDA_VISIBLE_DEVICES"] for x in told} == {"4,5"} and {x["JAX_NUM_CPU_DEVICES"] for x in told} == {"2"}
    assert len(told[0]["servers"]) == len(told[0]["stagers"]) == 2 and told[0]["AREAX_STAGER_KEY"]
    assert told[0]["AREAX_SERVER_KEY"] is None  # the command says whether its servers have one
    assert {url.split(":")[1] for url in told[0]["servers"]} == {"//127.0.0.3"}
    assert sorted((at, gpus) for what, at, _, gpus in first if what == "began") == [
        (int(url.rpartition(":")[2]), gpu) for url, gpu in zip(told[0]["servers"], ("4", "5"), strict=True)
    ]
    again = said_in(tmp_path)[2]
    assert again[:2] + again[3:] == ["began", *first[0][1::2]]
    assert sorted(what for what, *_ in said_in(tmp_path)) == ["began"] * 3 + ["ended"] * 2
    assert all(gone(pid) for _, _, pid, _ in said_in(tmp_path)) and all(gone(x["pid"]) for x in told)
    steps = (tmp_path / "steps").read_text()
    assert steps.count("--nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=127.0.0.1,127.0.0.2 ") == 1
    names = {word.removeprefix("--job-name=") for word in steps.split() if word.startswith("--job-name=")}
    assert names == {"server-0", "server-1", "stager-0", "stager-1", "trainers"}
    script = (tmp_path / "job.sh").read_text()
    assert all(
        f"#SBATCH --{x}\n" in script
        for x in ("nodes=3", "gpus-per-node=2", "time=1:00", "signal=B:TERM@120", "open-mode=append")
    )
    assert "--partition" not in script and "--account" not in script


@pytest.mark.wide
@pytest.mark.slow
def test_a_batch_script_trains_and_goes_on_after_its_time_limit(data, tmp_path):
    words = [*SERVED, "--logs", str(tmp_path / "logs"), "--", *grpo(data, tmp_path / "run", 8)]
    config, metrics = tmp_path / "run/config.json", tmp_path / "run/metrics.jsonl"
    nodes = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    (first := tmp_path / "first").mkdir()
    with batch(data, first, nodes, words) as process:
        stepped = lambda: metrics.exists() and '"grpo"' in metrics.read_text()
        jobs.until(lambda: stepped() or process.poll() is not None)
        url = json.loads(config.read_text())["serving"]["servers"][0]
        with pytest.raises(urllib.error.HTTPError, match="401"):  # they need the job's key
            urllib.request.urlopen(f"{url}/model_info")
        process.terminate()  # as `--signal=B:TERM@120` does
        assert process.wait(120) == 130
    assert not serving(url) and not list(Path("/dev/shm").glob(f"areax-{process.job}*"))
    done = max(int(path.name) for path in (tmp_path / "run/state").iterdir() if path.name.isdecimal())
    assert 1 <= done < 8
    with batch(data, tmp_path, nodes, words) as process:
        assert process.wait(300) == 0
    urls = trained(tmp_path / "run", 8)
    assert [url.split(":")[1] for url in urls] == ["//127.0.0.2", "//127.0.0.3"]
    assert not any(map(serving, urls)) and not list(Path("/dev/shm").glob(f"areax-{process.job}*"))
