"""`areax launch` for Kubernetes and SkyPilot: what it writes is valid, and runs a job on loopback addresses.

The environment is what the cluster would set; addresses stand for the hostnames that its DNS would resolve.
"""

import contextlib
import errno
import itertools
import json
import os
import re
import shlex
import socket
import stat
import subprocess
import sys
from pathlib import Path

import jobs
import jsonschema
import kubernetes_validate
import launching
import pytest
import servers
import tiny
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from launching import SERVED, TASKS, free_ports, gone, grpo, said_in, trained

from areax.adapters import cli
from areax.adapters.launch import config as launch_config
from areax.adapters.launch import job as launch_job
from areax.adapters.launch import kubernetes, shell
from areax.adapters.tracking import run_dir
from areax.rollout.tasks import arithmetic

SKYPILOT = json.loads(Path(__file__).with_name("data").joinpath("skypilot.json").read_text())
VERSION = "1.33.0"  # of Kubernetes, where indices have their own backoff limit

ANSWERS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    tiny.model(path / "model")
    tiny.rows(path / "rows.jsonl", arithmetic.splits()["train"][:40])
    tiny.rows(path / "sft.jsonl", list(itertools.islice(arithmetic.demonstrations(arithmetic.splits()["train"]), 64)))
    (path / "server.py").write_text(launching.SERVER)
    (path / "recipe.py").write_text(launching.RECIPE)
    return path


def written(capsys, on, *words):
    """The documents that `areax launch` prints; a task has passed SkyPilot's schemas."""
    assert cli.main(["launch", "--on", on, *map(str, words)]) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    if on == "skypilot":
        [task] = documents
        parts = {"task": [task], "resources": [task["resources"]], "storage": task.get("file_mounts", {}).values()}
        for name, found in parts.items():
            for part in found:
                jsonschema.validate(part, SKYPILOT[name])
    return documents


def expanded(words, variables):
    """A container's command as the kubelet passes it on: $$ is $, $(NAME) a known variable's value."""
    kept = lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0])
    return [re.sub(r"\$\$|\$\(([^)]*)\)", kept, word) for word in words]


def valid(documents):
    """Checks documents of a manifest; returns their Jobs by name, which are checked as Jobs of their own."""
    found = {}
    for document in documents:
        if document["kind"] != "JobSet":
            kubernetes_validate.validate(document, VERSION, strict=True)
            if document["kind"] == "Job":
                found[document["metadata"]["name"]] = document["spec"]
            continue
        assert document["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and set(document["metadata"]) == {"name"}
        # the models of JobSet's own OpenAPI schema refuse wrong types, and drop unknown fields
        assert JobsetV1alpha2JobSet.from_dict(document).to_dict() == document
        assert document["spec"]["successPolicy"]["operator"] in ("All", "Any")
        for rule in document["spec"]["failurePolicy"]["rules"]:
            assert rule["action"] in ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
            assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
        for one in document["spec"]["replicatedJobs"]:
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": one["name"]}, **one["template"]}
            kubernetes_validate.validate(job, VERSION, strict=True)
            found[one["name"]] = one["template"]["spec"]
        named = [name for part in (document["spec"]["successPolicy"], *document["spec"]["failurePolicy"]["rules"])
                 for name in part["targetReplicatedJobs"]]  # fmt: skip
        assert set(named) <= set(found)
    return found


class Pods:
    """Runs containers of indexed Jobs as Kubernetes would, each pod on a loopback address."""

    def __init__(self, folder, documents, ports):
        """
        Args:
          ports: {port in the manifest: a free one}.
        """
        self.folder, self.jobs, self.running = folder, valid(documents), {}
        self.secrets = {one["metadata"]["name"]: one["stringData"] for one in documents if one["kind"] == "Secret"}
        name = next(one for one in documents if one["kind"] in ("JobSet", "Job"))["metadata"]["name"]
        self.pods = [(job, i) for job, spec in self.jobs.items() for i in range(spec["completions"])]
        plain = name in self.jobs
        hosts = [f"{name}-{i}" if plain else f"{name}-{job}-0-{i}" for job, i in self.pods]
        self.addresses = [f"127.0.0.{number}" for number in range(1, len(hosts) + 1)]
        self.named = {f"{host}.{name}": at for host, at in zip(hosts, self.addresses, strict=True)}
        self.named |= {str(port): str(free) for port, free in ports.items()}

    @contextlib.contextmanager
    def all(self):
        with contextlib.ExitStack() as stack:
            for (job, i), address in zip(self.pods, self.addresses, strict=True):
                for container in self.jobs[job]["template"]["spec"]["containers"]:
                    process = self.start(container, i, address)
                    self.running[f"{container['name']} {i}"] = process
                    stack.enter_context(servers.ended(process))
            yield self

    def start(self, container, index, address):
        own = {"JOB_COMPLETION_INDEX": str(index)}
        for one in container["env"]:
            field = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            own[one["name"]] = {"status.podIP": address, None: one.get("value")}[field]
        for source in container.get("envFrom", []):
            own |= self.secrets[source["secretRef"]["name"]]
        words = expanded(container["command"], own)
        memory = {"/dev/shm/areax": str(self.folder / f"shm-{index}")}  # each pod has its own
        for name, instead in (self.named | memory).items():
            words = [word.replace(name, instead) for word in words]
        environ = environment(self.folder) | own
        log = open(self.folder / f"{container['name']}-{index}.log", "w")  # noqa: SIM115 - closed with the process
        with log:
            return subprocess.Popen(words, env=environ, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)

    def log(self, name):
        return (self.folder / f"{name.replace(' ', '-')}.log").read_text()


def environment(folder):
    """Variables of a container: `python` is this interpreter."""
    program = folder / "bin/python"
    if not program.exists():
        program.parent.mkdir()
        program.write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} "$@"\n')
        program.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AREAX_")}
    return {**kept, **jobs.settings(1), "PATH": f"{folder}/bin:{os.environ['PATH']}"}


@pytest.mark.parametrize("on, more", [("slurm", []), ("skypilot", []), ("kubernetes", ["--kubernetes.image", "a:1"])])
def test_stagers_get_the_bucket_of_the_command(capsys, on, more):
    """Also where they would not be needed without one."""
    command = ["train", "grpo", "--model", "m", "--data", "d", "--reward", "r:f", "--push.bucket", "s3://a/b"]
    assert cli.main(["launch", "--on", on, *more, "--servers", "2", "--", *command, "--published", "/shared"]) == 0
    said = capsys.readouterr().out
    said = " ".join(said.replace("\\", " ").split())
    assert "areax.rollout.weights.stager --bucket s3://a/b --host" in said and "--stagers" in said


def stand_in(data, folder):
    return f"python {data / 'server.py'} {folder} {{host}} {{port}}"


def listens(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_what_waits_for_servers_says_for_which_and_ends():
    """One of two answers. What runs between tries may end the job before."""
    port, other = free_ports(2)
    urls = " ".join(f"http://127.0.0.1:{at}" for at in (port, other))
    say = lambda **more: shell.ready(urls, 6, python=shlex.quote(sys.executable), late='echo "its log: $url"', **more)
    answering = subprocess.Popen([sys.executable, "-c", ANSWERS, str(port)], stderr=subprocess.DEVNULL)
    with servers.ended(answering):
        jobs.until(lambda: listens(port))
        late = subprocess.run(["bash", "-uc", say()], capture_output=True, text=True, timeout=60)
        ended = subprocess.run(["bash", "-uc", say(check="exit 7")], capture_output=True, text=True, timeout=60)
    why = "(urllib.error.URLError: <urlopen error [Errno 111] Connection refused>)"
    lines = late.stderr.splitlines()
    assert (late.returncode, late.stdout) == (1, f"its log: http://127.0.0.1:{other}\n")
    assert lines[-2:] == [
        f"areax: waiting for http://127.0.0.1:{other} to answer {why}",
        f"areax: http://127.0.0.1:{other} did not answer in 6 s {why}",
    ]
    assert ended.returncode == 7


@pytest.mark.slow
def test_a_pod_that_has_no_machine_yet_is_waited_for():
    """Its name has no address: the time for its server to answer begins when it has one."""
    more = {"python": shlex.quote(sys.executable), "check": kubernetes.QUEUED.replace(f"{launch_job.START_S:.0f}", "1")}
    queued, placed = (
        subprocess.Popen(
            ["bash", "-uc", shell.ready(f"http://{host}:{port}", 1, **more)], stdout=-1, stderr=-2, text=True
        )
        for host, port in zip(("server-0-0.invalid", "127.0.0.1"), free_ports(2), strict=True)
    )
    with servers.ended(queued), servers.ended(placed):
        assert placed.wait(60) == 1 and "did not answer in 1 s" in placed.stdout.read()
        with pytest.raises(subprocess.TimeoutExpired):
            queued.wait(2)
        queued.kill()
        assert queued.stdout.read().startswith("areax: waiting for http://server-0-0.invalid:")


# -- Kubernetes ----------------------------------------------------------------------------------

IMAGE = ["--kubernetes.image", "registry/areax:1"]


@pytest.mark.slow
def test_pods_of_a_jobset(data, tmp_path, capsys):
    """Two trainer pods wait for two server pods with stagers beside, and get their addresses and keys."""
    documents = written(
        capsys, "kubernetes", *IMAGE, "--processes", 2, "--devices", 2, "--servers", 2, "--logs", tmp_path / "logs",
        "--server.command", stand_in(data, tmp_path), "--kubernetes.name", "run-1",
        "--kubernetes.server-image", "other", "--", "train", data / "recipe.py", "--out", tmp_path, "--code", "5",
    )  # fmt: skip
    assert [one["kind"] for one in documents] == ["Secret", "JobSet"]
    first, second, third = free_ports(3)
    with Pods(tmp_path, documents, {9876: first, 30000: second, 31000: third}).all() as pods:
        jobs.until(lambda: all((tmp_path / f"told-{i}").exists() for i in range(2)))
        (tmp_path / "go").touch()
        assert [pods.running[f"trainer {i}"].wait(60) for i in range(2)] == [5, 5]
        assert all(pods.running[f"{name} {i}"].poll() is None for name in ("server", "stager") for i in range(2))
    told = [json.loads((tmp_path / f"told-{i}").read_text()) for i in range(2)]
    assert [x["AREAX_PROCESS"] for x in told] == ["0", "1"] and {x["AREAX_PROCESSES"] for x in told} == {"2"}
    assert {x["AREAX_COORDINATOR"] for x in told} == {f"127.0.0.3:{first}"}  # that of process 0
    assert {x["JAX_NUM_CPU_DEVICES"] for x in told} == {"2"}
    assert told[0]["servers"] == [f"http://127.0.0.{i}:{second}" for i in (1, 2)]
    assert told[0]["stagers"] == [f"http://127.0.0.{i}:{third}" for i in (1, 2)]
    [secret] = pods.secrets.values()
    # the stand-in's key is its own; a stager without one would not listen on a pod's address
    assert told[0]["AREAX_SERVER_KEY"] is None and told[0]["AREAX_STAGER_KEY"] == secret["AREAX_STAGER_KEY"]
    assert [at for what, at, *_ in said_in(tmp_path) if what == "began"] == [second] * 2
    # each ran in place of its shell, so that a pod's SIGTERM reaches it
    assert sorted(what for what, *_ in said_in(tmp_path)) == ["began"] * 2 + ["ended"] * 2
    assert all(gone(x["pid"]) for x in told)
    logs = ["process-0.log", "process-1.log", "server-0.log", "server-1.log", "stager-0.log", "stager-1.log"]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == logs
    images = {c["name"]: c["image"] for spec in pods.jobs.values() for c in spec["template"]["spec"]["containers"]}
    assert images == {"server": "other", "stager": "registry/areax:1", "trainer": "registry/areax:1"}


@pytest.mark.long
def test_a_plain_job_trains_in_two_pods(data, tmp_path, capsys):
    """Two processes of real training; what Kubernetes does not start again is bad input."""
    out = tmp_path / "out"
    documents = written(
        capsys, "kubernetes", *IMAGE, "--kubernetes.kind", "job", "--kubernetes.resource", "", "--processes", 2, "--",
        "train", "sft", "--model", data / "model", "--data", data / "sft.jsonl", "--out", out, "--steps", 2,
        "--batch", 8, "--rows", 4, "--length", 64, "--mesh.fsdp", 2,
    )  # fmt: skip
    assert [one["kind"] for one in documents] == ["Service", "Job"]
    service, job = documents
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels and service["metadata"]["name"] == "areax"
    assert job["spec"]["template"]["spec"]["subdomain"] == "areax"  # or pods had no names
    [port] = free_ports(1)
    with Pods(tmp_path, documents, {9876: port}).all() as pods:
        codes = [pods.running[f"trainer {i}"].wait(240) for i in range(2)]
    assert codes == [0, 0], [pods.log(f"trainer {i}")[-2000:] for i in range(2)]
    lines = list(run_dir.read_lines(out / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [1, 2] and json.loads((out / "summary.json").read_text())["complete"]
    assert job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"] == {
        "containerName": "trainer", "operator": "In", "values": [2]
    }  # fmt: skip


@pytest.mark.wide
@pytest.mark.slow
def test_a_jobset_trains_with_servers(data, tmp_path, capsys):
    documents = written(capsys, "kubernetes", *IMAGE, *SERVED, "--", *grpo(data, tmp_path / "run", 2))
    with Pods(tmp_path, documents, dict(zip((30000, 31000), free_ports(2), strict=True))).all() as pods:
        assert pods.running["trainer 0"].wait(300) == 0, pods.log("trainer 0")[-2000:]
    [secret] = pods.secrets.values()
    assert len(trained(tmp_path / "run", 2)) == 2 and secret.keys() == {"AREAX_SERVER_KEY", "AREAX_STAGER_KEY"}


def test_devices_volumes_and_secrets_of_pods(capsys):
    words = [
        *IMAGE, "--processes", 2, "--devices", 8, "--cpus", 32, "--servers", 3, "--server.devices", 1,
        "--kubernetes.claim", "data", "--kubernetes.secret", "mine", "--kubernetes.memory", "64Gi",
        "--kubernetes.restarts", 5, "--", "train",
        "r.py", "--model", "/shared/model", "--data", "it's here.jsonl", "--published", "/shared/weights",
    ]  # fmt: skip
    documents = written(capsys, "kubernetes", *words)
    specs = valid(documents)
    assert documents[0]["stringData"].keys() == {"AREAX_SERVER_KEY"}  # the shared folder needs no stagers
    assert documents[1]["spec"]["failurePolicy"]["maxRestarts"] == 5
    assert {name: spec["completions"] for name, spec in specs.items()} == {"server": 3, "trainer": 2}
    [server], [trainer] = (specs[name]["template"]["spec"]["containers"] for name in ("server", "trainer"))
    assert trainer["resources"] == {
        "requests": {"cpu": "32", "memory": "64Gi"}, "limits": {"nvidia.com/gpu": 8}
    }  # fmt: skip
    assert server["resources"]["limits"] == {"nvidia.com/gpu": 1}
    mounts = {mount["name"]: mount["mountPath"] for mount in trainer["volumeMounts"]}
    assert mounts == {"shm": "/dev/shm", "shared": "/shared"} and trainer["workingDir"] == "/shared"
    # the later wins, as of a key of one's own
    assert [source["secretRef"]["name"] for source in trainer["envFrom"]] == [
        documents[0]["metadata"]["name"], "mine"
    ]  # fmt: skip
    [*_, script] = expanded(trainer["command"], {})
    assert shlex.split(script[script.index("exec") :].replace("\\\n", ""))[8:10] == ["--data", "it's here.jsonl"]
    assert subprocess.run(["bash", "-n", "-c", script]).returncode == 0


def test_an_option_reaches_a_pod_as_it_is(tmp_path, capsys):
    """Neither Kubernetes' $(NAME) and $$, nor placeholders of the launcher, nor an empty word change it."""
    words = ["cost$$5.jsonl", "$(AREAX_SERVER_KEY)", "$$(POD_IP)", "$", "@HOST@:@PORT@", "", "it's {host}", "{model}"]
    model = "{host}/$(POD_IP)"
    [secret, jobset] = written(capsys, "kubernetes", *IMAGE, "--servers", 1, "--",
                               "train", "r.py", "--model", model, "--published", "w", "--data", *words)  # fmt: skip
    own = {"POD_IP": "127.0.0.1", **secret["stringData"]}
    (tmp_path / "python").write_text("#!/bin/bash\nprintf '%s\\0' \"$@\"\n")
    (tmp_path / "python").chmod(0o755)
    environ = {**os.environ, **own, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for name, spec in valid([jobset]).items():
        command = expanded(spec["template"]["spec"]["containers"][0]["command"], own)
        if name == "trainer":
            command[2] = "exec" + command[2].partition("\nexec")[2]  # without waiting for the server
        got = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.split("\0")
        assert got[4:6] == ["--model", model] if name == "trainer" else got[3] == model
        if name == "trainer":
            assert got[9 : 9 + len(words)] == words


def test_another_manifest_leaves_the_keys_of_a_running_job(capsys):
    """Its Secret has another name; the pods of each manifest name its own."""
    names = set()
    for _ in range(2):
        documents = written(capsys, "kubernetes", *IMAGE, "--servers", 1, "--", "train", "r.py", "--model", "m")
        kubernetes_validate.validate(documents[0], VERSION, strict=True)
        assert documents[0]["immutable"] is True
        containers = [c for spec in valid(documents).values() for c in spec["template"]["spec"]["containers"]]
        [name] = {source["secretRef"]["name"] for container in containers for source in container["envFrom"]}
        assert name == documents[0]["metadata"]["name"]
        names.add(name)
    assert len(names) == 2 and all(name.startswith("areax-keys-") for name in names)


def test_options_that_kubernetes_takes(capsys):
    for image in ("areax", "registry:5000/a/b_c:1.0-x", "ghcr.io/a/b@sha256:" + "0f" * 32):
        for memory in ("64Gi", "1.5G", "500M", "1e9", "128974848000m"):
            words = ["--kubernetes.image", image, "--kubernetes.memory", memory, "--kubernetes.secret", "a.b-1"]
            words += ["--kubernetes.resource", "google.com/tpu", "--kubernetes.claim", "9"]
            valid(written(capsys, "kubernetes", *words, "--", "train", "r.py"))


@pytest.mark.parametrize(
    "kind, processes, count, server, more",
    [
        ("job", 1, 0, "", []),
        ("job", 2, 0, "", []),
        ("jobset", 2, 0, "", []),
        ("jobset", 1, 2, "", []),
        ("jobset", 2, 1, "", ["--published", "w"]),
        ("jobset", 1, 1, "serve {port}", []),
        ("jobset", 1, 1, "serve {port}", ["--published", "w"]),
    ],
)
def test_kubernetes_takes_every_kind_of_document_with_each_option(kind, processes, count, server, more):
    """By its own schemas, and JobSet's."""
    others = {"server_image": "b", "claim": "data", "secret": "mine", "memory": "64Gi", "resource": "", "restarts": 0}
    for given in ({}, *({name: value} for name, value in others.items()), others):
        options = launch_config.Kubernetes(image="areax", kind=kind, **given)
        config = launch_config.Config(
            on="kubernetes", processes=processes, devices=2, servers=count, logs="logs" * bool(given),
            server=launch_config.Server(command=server), kubernetes=options,
        )  # fmt: skip
        documents = list(yaml.safe_load_all(kubernetes.manifest(config, ["train", "r.py", "--model", "m", *more])))
        keys = count and not (server and more)
        assert [one["kind"] for one in documents] == {
            "job": ["Service", "Job"], "jobset": ["Secret"] * bool(keys) + ["JobSet"]
        }[kind]  # fmt: skip
        assert valid(documents).keys() == ({"areax"} if kind == "job" else {"trainer", *["server"][:count]})


def test_a_file_with_keys_is_its_owners(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("old")
    words = ["launch", "--on", "kubernetes", "--kubernetes.file", str(path), *IMAGE, "--servers", "1"]
    words += ["--", "train", "r.py", "--model", "m"]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"wrote {path}; review it, then run: kubectl apply -f {path}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = yaml.safe_load(path.read_text().partition("---\n")[0])["stringData"]
    assert cli.main(words) == 0
    assert first != yaml.safe_load(path.read_text().partition("---\n")[0])["stringData"]


@pytest.mark.parametrize("on", ["slurm --slurm.script", "skypilot --skypilot.file"])
def test_a_file_is_replaced_when_the_new_one_is_complete_and_a_device_stays(on, tmp_path, capsys, monkeypatch):
    path = tmp_path / "job"
    path.write_text("old")
    path.chmod(0o644)
    words = ["launch", "--on", *on.split(), str(path), "--", "train", "r.py", "--out", "\udcff"]
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left", str(path)))
        )
        assert cli.main(words) == 2
    assert f"{path}: No space left" in capsys.readouterr().err
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["job"]
    assert cli.main(words) == 0 and stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["job"]
    assert capsys.readouterr().out.startswith(f"wrote {path}; ")
    path.unlink()
    os.mkfifo(path)  # as /dev/stdout may be one
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert cli.main(words) == 0 and stat.S_ISFIFO(path.stat().st_mode)
        assert b"areax" in os.read(reader, 1 << 16) and capsys.readouterr().out == ""
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    "words, told",
    [
        ("--on kubernetes", "--on kubernetes needs --kubernetes.image, an image with areax, got none"),
        (
            "--on kubernetes --kubernetes.image a --kubernetes.name Run_1",
            "lower-case letters, digits and -, got 'Run_1'",
        ),
        (
            "--on kubernetes --kubernetes.image a --kubernetes.kind job --servers 2",
            "trainer processes only, got --servers 2",
        ),
        (
            "--on kubernetes --kubernetes.image a --kubernetes.restarts -1",
            "--kubernetes.restarts must be at least 0, got -1",
        ),
        *(
            (f"--on kubernetes --kubernetes.image a --kubernetes.{name} {value}", f"--kubernetes.{name} must be {told}")
            for name, value, told in (
                ("image", "Areax:1", "an image's reference, as registry/areax:1, got 'Areax:1'"),
                ("image", "a:", "an image's reference"),
                ("server-image", "a//b", "an image's reference"),
                ("secret", "My_Secret", "lower-case letters, digits, - and ., as data-1, got 'My_Secret'"),
                ("secret", "a" * 254, "lower-case letters"),
                ("claim", "data-", "lower-case letters"),
                ("claim", "a..b", "lower-case letters"),
                ("memory", "64GB", "a quantity of Kubernetes, as 64Gi"),
                ("memory", "lots", "a quantity"),
                ("memory", "0Gi", "a quantity"),
                ("resource", "gpu", "a resource's full name, as nvidia.com/gpu, got 'gpu'"),
            )
        ),
        ("--on kubernetes --kubernetes.image a --processes 5001", "must be at most 5000 pods"),
        (
            "--on kubernetes --kubernetes.image a --servers 4000",
            "must be at most 131071 bytes, which Linux passes as one argument",
        ),
        ("--on skypilot --skypilot.shared mine", "must be the address of a whole bucket of SkyPilot's stores, as s3:"),
        ("--on skypilot --skypilot.shared s3://mine/runs", "must be the address of a whole bucket"),
        ("--on skypilot --skypilot.shared ftp://mine", "must be the address of a whole bucket"),
        (f"--on skypilot --skypilot.accelerators H100:{'9' * 5000}", "must be NAME:COUNT, as H100:8, got"),
        ("--on skypilot --skypilot.accelerators :8", "must be NAME:COUNT, as H100:8, got ':8'"),
        ("--on skypilot --skypilot.accelerators H100:x", "must be NAME:COUNT, as H100:8, got 'H100:x'"),
        (
            "--on skypilot --skypilot.accelerators H100:4 --devices 8",
            "must be at most --skypilot.accelerators 4, got 8",
        ),
    ],
)
def test_impossible_options_give_a_one_line_error(words, told, capsys):
    assert cli.main(["launch", *words.split(), "--", "train", "r.py", "--model", "m"]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1


# -- SkyPilot ------------------------------------------------------------------------------------

PORTS = (20000, 20001, 20002, 20003)


def test_tasks_pass_skypilots_schemas(capsys):
    """`make test-skypilot` has SkyPilot itself read them."""
    for words in TASKS.values():
        written(capsys, "skypilot", *words, "--", "train", "r.py", "--model", "m")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"num_nodes": 1, "secret": {}}, SKYPILOT["task"])


@contextlib.contextmanager
def nodes(folder, task, **more):
    """The task's script on each of its nodes, as SkyPilot runs it; yields the processes."""
    script, base = task["run"], free_base()
    for i, port in enumerate(PORTS):
        script = script.replace(str(port), str(base + i))
    addresses = [f"127.0.0.{i + 1}" for i in range(task["num_nodes"])]
    with contextlib.ExitStack() as stack:
        running = []
        for rank in range(len(addresses)):
            environ = {
                **environment(folder), **task.get("secrets", {}), "SKYPILOT_NODE_IPS": "\n".join(addresses),
                "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_TASK_ID": "sky-1",
            }  # fmt: skip
            process = subprocess.Popen(["bash", "-c", script], env=environ, cwd=folder, start_new_session=True, **more)
            running.append(process)
            stack.enter_context(servers.ended(process))
        yield running, base


def free_base():
    """A port from which eight are free."""
    while True:
        [base] = free_ports(1)
        with contextlib.suppress(OSError, OverflowError), contextlib.ExitStack() as stack:
            for i in range(1, 8):
                stack.enter_context(servers.socket.create_server(("", base + i)))
            return base


@pytest.mark.slow
def test_nodes_of_a_task(data, tmp_path, capsys):
    """Two trainer processes on two nodes, two servers on a third, one of which is killed."""
    [task] = written(
        capsys, "skypilot", "--processes", 2, "--devices", 2, "--servers", 2, "--skypilot.accelerators", "H100:2",
        "--skypilot.shared", "s3://mine", "--cpus", 4, "--server.command", stand_in(data, tmp_path), "--",
        "train", data / "recipe.py", "--out", tmp_path,
    )  # fmt: skip
    assert task["num_nodes"] == 3 and task["resources"] == {"cpus": "8+", "accelerators": "H100:2"}
    assert task["file_mounts"] == {"/shared": {"source": "s3://mine", "mode": "MOUNT"}} and task["workdir"] == "."
    assert task["secrets"].keys() == {"AREAX_STAGER_KEY"} and task["setup"] == "pip install '.[cuda]'"
    with nodes(tmp_path, task) as (running, base):
        jobs.until(lambda: all((tmp_path / f"told-{i}").exists() for i in range(2)))
        first = said_in(tmp_path)
        os.kill(first[0][2], 9)
        jobs.until(lambda: len(said_in(tmp_path)) > 2)
        assert [process.poll() for process in running] == [None] * 3
        (tmp_path / "go").touch()
        assert [process.wait(60) for process in running] == [0, 0, 0]
    told = [json.loads((tmp_path / f"told-{i}").read_text()) for i in range(2)]
    assert [x["AREAX_PROCESS"] for x in told] == ["0", "1"] and {x["AREAX_PROCESSES"] for x in told} == {"2"}
    assert {x["AREAX_COORDINATOR"] for x in told} == {f"127.0.0.1:{base + 1}"}
    assert {x["CUDA_VISIBLE_DEVICES"] for x in told} == {"0,1"}
    assert told[0]["servers"] == [f"http://127.0.0.3:{base + 2 + 2 * i}" for i in range(2)]
    assert told[0]["stagers"] == [f"http://127.0.0.3:{base + 3 + 2 * i}" for i in range(2)]
    assert told[0]["AREAX_STAGER_KEY"] == task["secrets"]["AREAX_STAGER_KEY"]
    assert sorted((at, gpu) for what, at, _, gpu in first) == [(base + 2, "0"), (base + 4, "1")]
    assert sorted(what for what, *_ in said_in(tmp_path)) == ["began"] * 3 + ["ended"] * 2
    assert all(gone(pid) for _, _, pid, _ in said_in(tmp_path)) and all(gone(x["pid"]) for x in told)
    logs = {path.name for path in (tmp_path / "areax-sky-1").iterdir()}
    assert logs == {"process-1.log", "server-0.log", "server-1.log", "stager-0.log", "stager-1.log"}


def test_one_node_with_servers_and_trainers(data, tmp_path, capsys):
    """Two processes and two servers share its four devices; a failing process's exit code is the node's."""
    [task] = written(
        capsys, "skypilot", "--processes", 2, "--servers", 2, "--skypilot.accelerators", "H100:4",
        "--server.command", stand_in(data, tmp_path), "--", "train", data / "recipe.py", "--out", tmp_path, "--code", 5,
    )  # fmt: skip
    assert task["num_nodes"] == 1 and "secrets" not in task  # the servers see the trainer's files
    with nodes(tmp_path, task) as ([node], _):
        jobs.until(lambda: all((tmp_path / f"told-{i}").exists() for i in range(2)))
        (tmp_path / "go").touch()
        assert node.wait(60) == 5
    told = [json.loads((tmp_path / f"told-{i}").read_text()) for i in range(2)]
    assert [(x["CUDA_VISIBLE_DEVICES"], x["JAX_LOCAL_DEVICE_IDS"]) for x in told] == [("0,1", "0"), ("0,1", "1")]
    assert sorted(gpu for what, *_, gpu in said_in(tmp_path) if what == "began") == ["2", "3"]
    assert told[0]["stagers"] == [] and all(gone(pid) for _, _, pid, _ in said_in(tmp_path))


@pytest.mark.slow
def test_nodes_pass_sigterm_on_and_a_server_that_cannot_start_ends_its_node(data, tmp_path, capsys):
    words = ["--servers", 1, "--server.command", "bash -c 'echo no weights; exit 7 # {port}'", "--"]
    words += ["train", data / "recipe.py", "--out", tmp_path, "--published", "w"]
    [task] = written(capsys, "skypilot", *words)
    assert task["num_nodes"] == 2
    with open(tmp_path / "output", "w") as output, nodes(tmp_path, task, stderr=output) as ([trainer, server], _):
        assert server.wait(60) == 1 and trainer.poll() is None  # SkyPilot ends the other nodes
        trainer.terminate()
        assert trainer.wait(60) == 143
    said = (tmp_path / "output").read_text()
    assert "areax: waiting for http://127.0.0.2:" in said and "no such process" not in said.lower()
    assert "areax: server-0 on 127.0.0.2 has failed four times\nareax: the end of areax-sky-1/server-0.log:\n" in said
    assert "  no weights\n" in said


@pytest.mark.wide
@pytest.mark.slow
def test_a_task_trains_with_servers(data, tmp_path, capsys):
    [task] = written(capsys, "skypilot", *SERVED, "--", *grpo(data, tmp_path / "run", 2))
    with nodes(tmp_path, task) as (running, _):
        assert [process.wait(300) for process in running] == [0, 0, 0]
    assert {url.split(":")[1] for url in trained(tmp_path / "run", 2)} == {"//127.0.0.2", "//127.0.0.3"}
