"""Machines at E2B, Daytona and Modal: the real SDKs, against doubles of the services on loopback (`rooms`)."""

import asyncio
import io
import json
import tarfile
import time
from pathlib import Path

import pytest
import rooms as services

from areax.adapters.environments import harbor
from areax.rollout.errors import ServerError
from areax.rollout.sandbox import hosted, machine
from areax.rollout.sandbox.machine import Ended

for package in ("e2b", "daytona", "modal"):
    pytest.importorskip(package)

PROVIDERS = ("e2b", "daytona", "modal")
each = pytest.mark.parametrize("provider", PROVIDERS)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def at(monkeypatch, tmp_path):
    """`at(provider, steps)` runs `steps(rooms, start)` while the double of a service is there."""
    for name in ("E2B_API_KEY", "DAYTONA_API_KEY", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)  # Daytona's SDK reads .env of the current directory

    def run(provider, steps):
        async def go():
            rooms = services.Rooms(tmp_path)
            async with getattr(services, provider)(rooms, monkeypatch.setenv):

                def start(image="python:3", context=Path("/none"), **options):
                    return machine.provider(provider)(image, context, **{"workdir": str(tmp_path / "w"), **options})

                try:
                    return await steps(rooms, start)
                finally:
                    assert rooms.ended == set(rooms.asked), "a sandbox was left"

        return asyncio.run(go())

    return run


@each
def test_commands_and_files(at, provider, tmp_path):
    async def steps(rooms, start):
        own = await start()
        assert own.workdir == str(tmp_path / "w")
        one = await own.run('pwd; echo "it\'s" >&2; exit 3', cwd=own.workdir)
        assert (one.stdout, one.stderr, one.code, one.why) == (f"{own.workdir}\nit's\n", "", 3, "")
        assert "No such file" in (await own.run("true", cwd="/nowhere")).stdout
        data = bytes(range(256)) * 5000
        await own.put({f"{own.workdir}/a b/y.bin": data, f"{own.workdir}/t.sh": b"exit 7"})
        assert await own.get(f"{own.workdir}/a b/y.bin") == data
        assert (await own.run("bash t.sh", cwd=own.workdir)).code == 7
        with pytest.raises(FileNotFoundError):
            await own.get(f"{own.workdir}/none")
        with pytest.raises(IsADirectoryError):
            await own.get(own.workdir)
        with pytest.raises(OSError, match="must have at most 4194304 bytes"):
            await own.run("head -c 5000000 /dev/zero > big", cwd=own.workdir)
            await own.get(f"{own.workdir}/big")
        with pytest.raises(OSError, match="cannot be written"):
            await own.put({f"{own.workdir}/t.sh/x": b""})
        with pytest.raises(OSError, match="too long"):
            await own.run("x" * 140_000)
        await own.aclose()
        await own.aclose()  # again: nothing
        with pytest.raises(Ended, match="it was closed"):
            await own.run("true")

    at(provider, steps)


@each
def test_late_commands_long_outputs_and_background(at, provider):
    async def steps(rooms, start):
        own = await start()
        began = time.monotonic()
        late = await own.run("echo first; sleep 30 & sleep 60", timeout_s=0.3)
        assert (late.why, late.stdout, late.code) == ("wall", "first\n", 137) and time.monotonic() - began < 5
        killed = await own.run("kill -9 $$", timeout_s=20)
        assert (killed.why, killed.code) == ("", 137)
        long = (await own.run("printf é; seq 1 100000")).stdout
        first, last = long.split("\n... 523361 bytes left out ...\n")
        assert first.startswith("é1\n2\n") and last.endswith("\n100000\n") and len(first + last) in (2**16, 2**16 - 1)
        begun = await own.run("(sleep 0.2; echo 5 > tick) & echo begun", cwd=own.workdir)
        assert begun.stdout == "begun\n" and begun.seconds < 5
        await asyncio.sleep(0.4)
        assert (await own.run("cat tick", cwd=own.workdir)).stdout == "5\n"
        await own.aclose()

    at(provider, steps)


@each
def test_a_sandbox_that_is_gone_has_ended(at, provider):
    async def steps(rooms, start):
        own, other = await start(), await start()
        [first, second] = rooms.asked
        running = asyncio.create_task(own.run("sleep 30"))
        await asyncio.sleep(0.2)
        rooms.end(first)
        rooms.end(second)
        with pytest.raises(Ended):
            await running
        with pytest.raises(Ended):
            await own.get("/etc/passwd")
        with pytest.raises(Ended):
            await other.put({"/tmp/x": b""})
        await own.aclose()
        await other.aclose()

    at(provider, steps)


@each
def test_a_service_that_fails_meanwhile_is_a_server_error(at, provider):
    async def steps(rooms, start):
        own = await start()
        rooms.broken = True
        with pytest.raises(ServerError, match=f"{provider}: .*out of order"):
            await own.run("true")
        rooms.broken = False
        assert (await own.run("echo fine")).stdout == "fine\n"
        await own.aclose()

    at(provider, steps)


@each
@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_service_is_a_server_error(at, provider, status):
    async def steps(rooms, start):
        rooms.refusal = (status, "come again")
        with pytest.raises(ServerError, match=f"{provider}: .*come again"):
            await start()

    at(provider, steps)


@each
def test_what_a_service_refuses_is_one_line(at, provider, monkeypatch):
    async def steps(rooms, start):
        rooms.refusal = (400, "so much\nmemory")
        with pytest.raises(ValueError, match=f"{provider}: .*so much.+memory") as refused:
            await start()
        assert "\n" not in str(refused.value)

    at(provider, steps)


@each
@pytest.mark.parametrize("key", ["wrong", ""])
def test_keys_come_from_the_variables_of_the_sdk(at, provider, key, monkeypatch):
    name = {"e2b": "E2B_API_KEY", "daytona": "DAYTONA_API_KEY", "modal": "MODAL_TOKEN_SECRET"}[provider]

    async def steps(rooms, start):
        monkeypatch.setenv(name, key) if key else monkeypatch.delenv(name)
        with pytest.raises(ValueError, match=f"^{provider}: .*; set .*{name}$"):
            await start()

    at(provider, steps)


@pytest.mark.parametrize(
    "provider", ["e2b", "daytona", pytest.param("modal", marks=pytest.mark.long)]
)  # tries a minute
def test_a_service_that_cannot_be_reached_is_a_server_error(at, provider, monkeypatch):
    name = {"e2b": "E2B_API_URL", "daytona": "DAYTONA_API_URL", "modal": "MODAL_SERVER_URL"}[provider]

    async def steps(rooms, start):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.setenv("E2B_CONNECTION_RETRIES", "0")
        with pytest.raises(ServerError, match=f"{provider}: "):
            await start()

    at(provider, steps)


@each
def test_a_start_that_is_cancelled_leaves_no_sandbox(at, provider):
    async def steps(rooms, start):
        rooms.start_s = 0.2
        starting = asyncio.create_task(start())
        await rooms.starting.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert len(rooms.asked) == 1

    at(provider, steps)


def test_a_long_start_that_is_cancelled_is_ended_by_its_name(at, monkeypatch):
    monkeypatch.setattr(hosted, "LATE_S", 0.1)

    async def steps(rooms, start):
        rooms.start_s = 5
        starting = asyncio.create_task(start())
        await rooms.starting.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert rooms.ended == {"sb-1"}

    at("daytona", steps)


@each
def test_a_sandbox_that_cannot_run_commands_is_ended(at, provider):
    async def steps(rooms, start):
        with pytest.raises(ValueError, match=f"provider {provider}: an image must have .*/dev/null"):
            await start(workdir="/dev/null/x")
        assert len(rooms.asked) == 1

    at(provider, steps)


def asked_of(provider, asked):
    """(lifetime in seconds, whether there is a network, memory in MiB or None) of what a service was asked for."""
    if provider == "e2b":
        return asked["timeout"], asked["allow_internet_access"], None
    if provider == "daytona":
        assert asked["autoStopInterval"] == asked["autoDeleteInterval"] == 0
        return 60 * asked["ttlMinutes"], not asked["networkBlockAll"], asked.get("memory", 0) * 1024 or None
    network = asked.network_access
    size = asked.resources.memory_mb_max if asked.resources.memory_mb_max == asked.resources.memory_mb else -1
    return asked.timeout_secs, network.network_access_type != network.BLOCKED, size or None


@each
def test_options_are_asked_for_or_refused(at, provider):
    async def steps(rooms, start):
        for options in ({}, dict(memory_mb=2048, lifetime_s=119.5, network="internet", cpus=2)):
            await (await start(**options)).aclose()
        first, second = (asked_of(provider, asked) for asked in rooms.asked.values())
        assert first == (3600, False, None)
        assert second == (120, True, None if provider == "e2b" else 2048)
        with pytest.raises(ValueError, match="network must be none or internet, got 'bridge'"):
            await start(network="bridge")
        with pytest.raises(TypeError, match="processes"):
            await start(processes=5)
        if provider == "e2b":
            sizes = [(built.get("memoryMB"), built.get("cpuCount")) for built in rooms.built.values()]
            assert sizes == [(None, None), (2048, 2)]

    at(provider, steps)


@pytest.mark.parametrize("provider, option", [("e2b", "template"), ("daytona", "snapshot")])
def test_what_is_prepared_is_started_as_it_is(at, provider, option):
    async def steps(rooms, start):
        await (await start(**{option: "known"})).aclose()
        [asked] = rooms.asked.values()
        assert "known" in (asked.get("templateID"), asked.get("snapshot")) and not rooms.built
        with pytest.raises(ValueError, match=f"a {option} has the size it was"):
            await start(**{option: "known"}, memory_mb=512)
        with pytest.raises(ValueError, match=f"{provider}: .*not found"):
            await start(**{option: "other"})

    at(provider, steps)


def folder(at, last="true", copy="COPY secret.txt /x/"):
    """A folder with a Dockerfile and a file that it copies."""
    at.mkdir(exist_ok=True)
    (at / "Dockerfile").write_text(f"FROM python:3\nRUN {last}\n{copy}\n")
    (at / "secret.txt").write_text("forty-two")
    return at


def test_e2b_builds_a_template_once_of_each_content(at, tmp_path):
    async def steps(rooms, start):
        for own in await asyncio.gather(*(start("", folder(tmp_path / "environment")) for _ in range(4))):
            await own.aclose()
        assert len(rooms.asked) == 4 and rooms.builds == 1
        await (await start("", folder(tmp_path / "environment", last="false"))).aclose()
        assert rooms.builds == 2 and len(rooms.sent) == 2
        with tarfile.open(fileobj=io.BytesIO(rooms.sent[0])) as archive:
            assert archive.extractfile("secret.txt").read() == b"forty-two"
        assert [built["fromImage"] for built in rooms.built.values()] == ["python:3"] * 2

    at("e2b", steps)


def test_modal_builds_a_dockerfile(at, tmp_path):
    async def steps(rooms, start):
        await (await start("", folder(tmp_path / "environment"))).aclose()
        assert "RUN true" in rooms.built["im-0"] and [*rooms.built.values()][-1][-1] == "ENTRYPOINT []"
        assert b"forty-two" in rooms.sent

    at("modal", steps)


def test_daytona_builds_a_dockerfile(at, tmp_path):
    """Without files: its SDK sends those to a store that it reaches by TLS alone."""

    async def steps(rooms, start):
        await (await start("", folder(tmp_path / "environment", copy=""))).aclose()
        assert rooms.asked["sb-1"]["buildInfo"]["dockerfileContent"] == "FROM python:3\nRUN true\n\n"

    at("daytona", steps)


@each
def test_a_service_that_does_not_end_a_machine_is_logged(at, provider, monkeypatch, caplog):
    async def steps(rooms, start):
        own = await start(lifetime_s=90)
        monkeypatch.setattr(rooms, "end_refused", True)
        await own.aclose()
        rooms.end("sb-1")

    at(provider, steps)
    assert (
        f"{provider}: a machine was not ended" in caplog.text and "ends by itself 90 s after its start" in caplog.text
    )


@each
def test_a_task_is_played_and_scored(at, provider, tmp_path, monkeypatch):
    tests, logs = tmp_path / "tests", tmp_path / "logs"
    monkeypatch.setattr(harbor, "TESTS", str(tests))
    monkeypatch.setattr(harbor, "LOGS", str(logs))
    monkeypatch.setattr(machine, "STATE", str(tmp_path / "shell"))
    task = tmp_path / "task"
    for path, text in {
        "task.toml": f'[environment]\ndocker_image = "python:3"\nworkdir = "{tmp_path}/app"\n',
        "instruction.md": "Write yes into done.", "environment/given": "7",
        "tests/test.sh": f"#!/bin/bash\ngrep -c yes done > {logs}/reward.txt\n",
    }.items():  # fmt: skip
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(text)

    async def steps(rooms, start):
        [row] = harbor.World.rows("train", str(task))
        world = harbor.World(str(task), provider=provider)
        try:
            assert await world.reset(row) == "Write yes into done."
            function = {"name": "bash", "arguments": json.dumps({"command": "pwd; cat given; echo yes > done"})}
            seen, _, done = await world.step({"tool_calls": [{"id": "1", "function": function}]})
            assert seen[0]["content"] == f"{tmp_path}/app\n7" and not done
            assert await world.step({}) == ([], {"reward": 1.0}, True)
        finally:
            await world.close()

    at(provider, steps)
