"""Machines: their shell, their files, their limits, and commands that attack what runs them.

With the name of an image in AREAX_DOCKER_IMAGE, which has bash and Python, the first ones run in Docker, too.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from areax.rollout import sandbox
from areax.rollout.errors import ServerError
from areax.rollout.processes import folders
from areax.rollout.sandbox import isolation, launch, machine
from areax.rollout.sandbox.machine import Ended, alone, in_shell

isolated = pytest.mark.skipif(not isolation().files, reason="needs namespaces")
IMAGE = os.environ.get("AREAX_DOCKER_IMAGE", "")
everywhere = pytest.mark.parametrize(
    "provider", [pytest.param("local", marks=isolated), *(["docker"] if IMAGE else [])]
)


def on_a_machine(steps, provider="local", **options):
    async def run():
        own = await machine.provider(provider)(IMAGE or "any", Path("/none"), workdir="/app", **options)
        try:
            return await steps(own)
        finally:
            await own.aclose()
            await own.aclose()  # again: nothing

    return asyncio.run(run())


@everywhere
def test_a_shell_keeps_its_directory_and_variables(provider):
    async def steps(own):
        said = []
        for command in ("pwd; echo $GIVEN", "mkdir -p a/b; cd a/b; export X='1 2'; Y=3", 'pwd; echo "$X/$Y"; (exit 3)',
                        "cd /nowhere", "pwd; echo 'no end", "pwd; exit 4", "pwd"):  # fmt: skip
            result = await own.run(in_shell(command, "/app", {"GIVEN": "it's"}))
            said.append((result.stdout.rstrip(), result.code))
        return said

    first, second, third, fourth, fifth, sixth, last = on_a_machine(steps, provider)
    assert first == ("/app\nit's", 0) and second == ("", 0) and third == ("/app/a/b\n1 2/", 3)
    assert fourth[1] == 1 and "/nowhere" in fourth[0] and fifth[1] == 2 and "unexpected EOF" in fifth[0]
    assert sixth == ("/app/a/b", 4) and last == ("/app/a/b", 0)


@everywhere
def test_files_come_and_go(provider):
    async def steps(own):
        data = bytes(range(256)) * 1000
        await own.put({"/app/x/y.bin": data, "/tests/t.sh": b"echo $V; exit 7"})
        assert await own.get("/app/x/y.bin") == data
        result = await own.run(alone("bash /tests/t.sh", "/app/x", {"V": "a b"}))
        with pytest.raises(FileNotFoundError):
            await own.get("/app/none")
        if provider == "local":
            with pytest.raises(OSError, match="Read-only"):
                await own.put({"/usr/x": b""})
            with pytest.raises(OSError, match="must have at most"):
                await own.run("head -c 5000000 /dev/zero > /app/big")
                await own.get("/app/big")
        with pytest.raises(OSError):
            await own.get("/app")
        return result

    result = on_a_machine(steps, provider)
    assert (result.stdout, result.code) == ("a b\n", 7)


@isolated
def test_it_sees_nothing_of_this_machine():
    async def steps(own):
        return (await own.run("cat /etc/passwd; ls /home /var; env; cat /proc/net/dev; ls /proc")).stdout

    os.environ["AREAX_TEST_SECRET"] = "s3cret"
    said = on_a_machine(steps)
    assert "root:" not in said and "s3cret" not in said and str(os.getpid()) not in said.split()


@everywhere
def test_late_commands_are_killed_and_others_go_on(provider):
    async def steps(own):
        began = time.monotonic()
        late = await own.run("echo first; sleep 30 & sleep 60", timeout_s=0.5)
        seconds = time.monotonic() - began
        background = await own.run(
            "(while true; do echo x; sleep 0.1; date +%s%N > /app/t; mv /app/t /app/tick; done) & echo started"
        )
        one = await own.run("sleep 0.5; cat /app/tick")
        two = await own.run("sleep 0.5; cat /app/tick")
        return late, seconds, background, one, two

    late, seconds, background, one, two = on_a_machine(steps, provider)
    assert (late.why, late.stdout) == ("wall", "first\n") and late.code in (-9, 137) and seconds < 5
    assert "started\n" in background.stdout and 0 < int(one.stdout) < int(two.stdout)


@isolated
def test_long_output_keeps_its_ends():
    async def steps(own):
        return await own.run("seq 1 100000")

    text = on_a_machine(steps, output_bytes=2000).stdout
    assert (
        text.startswith("1\n2\n") and text.endswith("99999\n100000\n") and "bytes left out" in text and len(text) < 2100
    )


@isolated
@pytest.mark.parametrize(
    "attack, why",
    [
        ("for i in {1..5}; do python3 -c 'import time; x = bytearray(8 * 10**7); time.sleep(9)'& done; wait", "memory"),
        ("kill -9 -1", "killed"),
        ("kill -9 $PPID", "killed"),
        (":(){ :|:& };:", "processes"),
        ("for i in /proc/[0-9]*/fd/1; do echo nonsense > $i; done 2>/dev/null; sleep 1", "nonsense"),
    ],
)  # fmt: skip
def test_attacks_end_at_most_the_machine(attack, why):
    async def steps(own):
        try:
            result = await own.run(attack, timeout_s=10)
            after = await own.run("echo fine")
            return f"{result.code} {after.stdout}"
        except Ended as error:
            with pytest.raises(Ended):
                await own.run("echo again")
            return error.why
        except BlockingIOError:  # nothing more can be started
            return "processes"

    said = on_a_machine(steps, memory_bytes=2**28)
    assert why in said or said.endswith("fine\n") and why != "killed"


@isolated
def test_cancelled_and_concurrent_commands_do_not_mix_answers():
    async def steps(own):
        texts = await asyncio.gather(*(own.run(f"sleep 0.0{9 - i}; echo {i}") for i in range(8)))
        task = asyncio.create_task(own.run("sleep 5; echo late"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(Ended, match="cancelled"):
            await own.run("echo next")
        return [text.stdout for text in texts]

    assert on_a_machine(steps) == [f"{i}\n" for i in range(8)]


@isolated
def test_what_cannot_be_started_is_said():
    with pytest.raises(ValueError, match="provider local has no images, and /none/Dockerfile is one; use docker"):
        asyncio.run(machine.start("", Path("/none")))
    with pytest.raises(ValueError, match="memory_bytes must be a positive number"):
        asyncio.run(machine.start("any", Path("/none"), memory_bytes=-1))
    with pytest.raises(ValueError, match="provider must be local, docker, e2b, daytona, modal"):
        machine.provider("clouds")
    with pytest.raises(ServerError, match="sandbox: .*memory|its processes were killed"):
        asyncio.run(machine.start("any", Path("/none"), memory_bytes=2**22))


@isolated
def test_a_python_below_tmp_is_read_only_in_a_machine(tmp_path, monkeypatch):
    """As that of a checkout there; what can be written to lies elsewhere."""
    (tmp_path / "package.py").write_text("x = 1")
    tmp_path.chmod(0o755)
    real = launch.python_folders()
    monkeypatch.setattr(launch, "python_folders", lambda: [*real, str(tmp_path)])

    async def steps(own):
        said = await own.run(f"cat {tmp_path}/package.py; echo y > {tmp_path}/y; echo z > /app/z; cat /app/z")
        return said.stdout

    said = on_a_machine(steps)
    assert said.startswith("x = 1") and "Read-only file system" in said and said.endswith("z\n")
    before = tmp_path.stat()
    assert asyncio.run(sandbox.run_python("print(1)")).stdout == "1\n" and tmp_path.stat() == before


@isolated
@pytest.mark.parametrize("workdir", ["/", "/usr/src/app", "/tests", "app", "/tmp", sys.prefix, "/etc/x"])
def test_a_working_directory_that_is_taken_is_refused(workdir):
    with pytest.raises(ValueError, match="workdir must be a folder of its own, such as /app, got"):
        asyncio.run(machine.start("any", Path("/none"), workdir=workdir))


@isolated
def test_a_machine_has_a_lifetime():
    async def steps(own):
        await asyncio.sleep(1.0)
        with pytest.raises(Ended, match="wall"):
            await own.run("echo x")

    on_a_machine(steps, timeout_s=0.6)


@isolated
def test_nothing_is_left():
    async def steps(own):
        await own.run("sleep 1000 &")
        return own._process.pid, [*Path(folders.of_process("sandbox")).glob("tmp*")]

    pid, made = on_a_machine(steps)
    assert len(made) == 1 and not made[0].exists() and not Path(f"/proc/{pid}").exists()
