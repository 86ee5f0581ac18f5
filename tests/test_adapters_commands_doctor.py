"""`areax doctor` in broken environments: programs, packages and device files that are missing, old or hang."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import areax
from areax.adapters.commands import doctor
from areax.adapters.commands.doctor import devices, machine, packages

JAXLIB = packages.version("jaxlib")
SMI = """#!/bin/sh
echo 'NVIDIA H100 80GB HBM3, {driver}'
echo 'NVIDIA H100 80GB HBM3, {driver}'
"""
FAILS = """#!/bin/sh
echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
exit 9
"""


def program(folder, text):
    """A folder with a program of this text as nvidia-smi, to be put on PATH."""
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(text)
    (folder / "nvidia-smi").chmod(0o755)
    return str(folder)


def distribution(folder, name, version):
    """A folder with an installed distribution that has no code, to be put on PYTHONPATH."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(folder)


def run(*flags, path="", packages="", **environ):
    """(exit code, lines) of `areax doctor` in an environment of its own; on stderr is only what it waits for."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_PLATFORMS", "CUDA", "HF_"))}
    places = [packages, str(Path(areax.__file__).parents[1])]
    environ = {
        **kept, "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "PATH": f"{path}:{os.environ['PATH']}", **environ,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *flags, "-m", "areax", "doctor"], env=environ, capture_output=True, text=True
    )
    assert done.stderr == "asking JAX for its devices, which runs the attention kernels once ...\n"
    return done.returncode, done.stdout.splitlines()


def broken(lines):
    return [line.removeprefix("broken ") for line in lines if line.startswith("broken ")]


@pytest.mark.slow
def test_a_gpu_beside_a_jax_that_has_only_the_cpu(tmp_path):
    code, lines = run(path=program(tmp_path / "bin", SMI.format(driver="580.65.06")), HF_TOKEN="hf_very_secret")
    assert broken(lines) == [
        "2 x NVIDIA H100 80GB HBM3 here, driver 580.65.06, but jax is a CPU-only build; pip install 'areax[cuda]'"
    ]
    assert code == 1 and lines[-1] == "1 broken"
    assert f"ok     python {sys.version.split()[0]}, {sys.executable}" in lines
    assert [line.partition(" (")[0] for line in lines if "jax sees" in line] == ["ok     jax sees 1 x cpu"]
    assert "ok     attention on cpu: chunked" in lines and "ok     a token of the Hugging Face hub is set" in lines
    assert not any("secret" in line for line in lines)


@pytest.mark.slow
def test_a_driver_that_is_too_old(tmp_path):
    code, lines = run(
        path=program(tmp_path / "bin", SMI.format(driver="550.54.15")),
        packages=distribution(tmp_path / "site", "jax-cuda13-plugin", JAXLIB),
    )
    assert broken(lines) == [
        "2 x NVIDIA H100 80GB HBM3 here, driver 550.54.15: too old for CUDA 13 of jax-cuda13-plugin, which needs 580 "
        "or newer; update the driver, or pip install 'jax[cuda12]' in place of jax-cuda13-plugin"
    ]
    assert code == 1


@pytest.mark.slow
def test_packages_that_are_missing(tmp_path):
    """An extra is a note. Without packages of its own it still runs, and other commands say what to do."""
    site = tmp_path / "site"
    site.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.startswith(("wandb", "tyro")) and not path.name.endswith(".pth"):
            (site / path.name).symlink_to(path)
    code, lines = run("-S", packages=str(site))
    least = dict(packages.requirements(""))["tyro"]
    assert broken(lines) == [f"tyro {least} or newer is needed, got none; pip install 'tyro>={least}'"] and code == 1
    told = "note   wandb is not installed, for --track.wandb: pip install 'areax[wandb]'"
    assert [line for line in lines if "wandb" in line] == [told]
    places = os.pathsep.join([str(site), str(Path(areax.__file__).parents[1])])
    words = [sys.executable, "-S", "-m", "areax", "--help"]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": places}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "areax: a package is missing or broken, No module named 'tyro'; `areax doctor` says which to install\n"
    )


# -- in this process -----------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch):
    """What jax sees, given instead of asking a process that imports it."""
    cpu = {"platform": "cpu", "kind": "cpu", "count": 1, "memory": 0, "tpu_chips": 0, "kernels": {"chunked": ""}}
    monkeypatch.setattr(devices, "probe", lambda: (cpu, "a warning"))
    return cpu


def told(findings):
    return [f"{finding.state} {finding.text}" for finding in findings if finding.state != "ok"]


def proc(root, driver):
    """Device and driver files of one GPU, as in a container without nvidia-smi."""
    (root / "dev").mkdir()
    (root / "dev/nvidia0").touch()
    (root / "dev/nvidiactl").touch()
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").write_text(
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build\nGCC version: 13\n"
    )


@pytest.mark.parametrize(
    "driver, environ, last",
    [
        ("550.54.15", {}, "broken 1 x NVIDIA GPU 0 here, driver 550.54.15: too old for CUDA 13"),
        ("580.65.06", {}, "broken 1 x NVIDIA GPU 0 here, driver 580.65.06, but jax does not use them: a warning;"),
        ("550.54.15", {"JAX_PLATFORMS": "cpu"}, "note 1 x NVIDIA GPU 0 here, driver 550.54.15, but JAX_PLATFORMS=cpu "),
        (
            "580.65.06",
            {"CUDA_VISIBLE_DEVICES": "-1"},
            "note 1 x NVIDIA GPU 0 here, driver 580.65.06, but CUDA_VISIBLE_",
        ),
    ],
)
def test_gpus_without_nvidia_smi(driver, environ, last, tmp_path, monkeypatch, seen):
    proc(tmp_path, driver)
    monkeypatch.syspath_prepend(distribution(tmp_path / "site", "jax-cuda13-plugin", JAXLIB))
    monkeypatch.setenv("PATH", "")
    [said] = told(devices.devices(tmp_path, environ))
    assert said.startswith(last)


def test_nvidia_smi_that_fails_or_hangs(tmp_path, monkeypatch, seen):
    proc(tmp_path, "580.65.06")
    monkeypatch.setenv("PATH", program(tmp_path / "bin", FAILS), prepend=os.pathsep)
    [said] = told(devices.devices(tmp_path, {}))
    assert said.startswith("broken nvidia-smi fails (NVIDIA-SMI has failed because it couldn't communicate with")
    program(tmp_path / "bin", "#!/bin/sh\nsleep 1000 & sleep 1000\n")
    monkeypatch.setattr(devices, "SMI_S", 0.2)
    [said] = told(devices.devices(tmp_path, {}))
    assert said.startswith("broken nvidia-smi fails (no answer); ")
    [said] = told(devices.devices(tmp_path / "other", {}))  # it took the whole limit
    assert said.startswith("note nvidia-smi gives no answer, and /dev has no NVIDIA GPU; ")
    program(tmp_path / "bin", FAILS)
    assert told(devices.devices(tmp_path / "other", {})) == []  # the program alone is not a GPU


def test_a_plugin_of_another_version(tmp_path, monkeypatch, seen):
    monkeypatch.syspath_prepend(distribution(tmp_path, "jax-cuda12-plugin", "0.4.1"))
    said = told(devices.devices(tmp_path, {}))
    assert said[0] == (
        f"broken jax-cuda12-plugin 0.4.1 does not go with jaxlib {JAXLIB}; pip install -U 'jax[cuda12]=={JAXLIB}'"
    )


def test_tpus_and_kernels(tmp_path, monkeypatch, seen):
    monkeypatch.setenv("PATH", "")
    seen |= {"tpu_chips": 4}
    assert told(devices.devices(tmp_path, {})) == [
        "broken 4 TPU chips here, but libtpu is missing; pip install 'areax[tpu]'"
    ]
    seen |= {"platform": "gpu", "tpu_chips": 0, "kernels": {"cudnn": "", "triton": "ValueError: no", "chunked": ""}}
    said = list(devices.devices(tmp_path, {}))
    assert told(said) == [
        "broken attention triton fails on gpu: ValueError: no; --run.attention chunked runs without it"
    ]
    assert "attention on gpu: cudnn, chunked" in [finding.text for finding in said]


def test_a_jax_that_crashes_or_hangs(monkeypatch, tmp_path):
    """A jax of ours stands before the real one."""
    (tmp_path / "jax.py").write_text("raise RuntimeError('jaxlib version 1 is newer than\\nand incompatible with 0')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PATH", "")
    said = told(devices.devices(tmp_path, {}))
    assert said == ["broken jax does not start: and incompatible with 0"]
    (tmp_path / "jax.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    assert told(devices.devices(tmp_path, {})) == ["broken jax does not start: it ended with exit code -11"]
    (tmp_path / "jax.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(devices, "PROBE_S", 0.5)
    assert told(devices.devices(tmp_path, {})) == [
        "broken jax does not start: no answer in 0 s; another process may hold the device, end it"
    ]


def test_what_a_small_machine_lacks(tmp_path, monkeypatch):
    """In a process of its own: its limits cannot be raised again."""
    program = (
        "import os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from pathlib import Path\n"
        "from areax.adapters.commands.doctor import machine\n"
        "environ = {'XDG_CACHE_HOME': '/proc/nowhere', 'HF_HOME': sys.argv[1]}\n"
        "for finding in machine.machine(Path(sys.argv[1]), environ): print(finding.state, finding.text)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(areax.__file__).parents[1])}
    words = [sys.executable, "-c", program, str(tmp_path)]
    lines = subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0].startswith("note 1 CPU threads, ")
    assert lines[1] == f"note {tmp_path}/dev/shm is missing: weights reach servers here through the disk"
    assert lines[2] == "note 256 open files at most: few for many requests at a time; ulimit -n 4096"
    assert lines[4].startswith(
        "note /proc/nowhere/areax/programs cannot be written (No such file or directory): each start compiles"
    )
    assert lines[5].startswith("note no token of the Hugging Face hub")
    (tmp_path / "token").write_text("hf_secret")
    assert (
        "token" in (last := list(machine.machine(tmp_path, {"HF_HOME": str(tmp_path)}))[-1]).text and last.state == "ok"
    )


def test_no_home_directory(tmp_path, monkeypatch):
    """Neither HOME nor an entry in the user database, as in a container with a user of its own."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError
    *_, cache, token = machine.machine(tmp_path, {})
    assert cache.text == "there is no home directory: each start compiles anew; set JAX_COMPILATION_CACHE_DIR"
    assert token.state == "note" and token.text.startswith("no token of the Hugging Face hub (")
    *_, cache, token = machine.machine(tmp_path, {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "HF_TOKEN": "hf_x"})
    assert (cache.state, token.state) == ("ok", "ok")
    *_, token = machine.machine(tmp_path, {"HF_HOME": str(tmp_path / ("x" * 300))})  # as another user's, of root
    assert token.state == "note" and "(" in token.text


def test_versions_are_compared_by_their_numbers():
    assert packages.older("550.54.15", "580") and not packages.older("580.65.06", "580")
    assert not packages.older("2.10.0", "2.8") and not packages.older("2.13.0+cpu", "2.13.0")
    assert packages.older("0.9.1", "0.10") and dict(packages.requirements("torch")).keys() == {"torch"}
    assert set(doctor.packages.EXTRAS) >= {"torch", "wandb", "ray"}
