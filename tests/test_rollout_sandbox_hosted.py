"""Machines of services without a service: `Hosted` over bash on this machine. The real SDKs are in
`tests/environments/test_sandboxes.py`."""

import asyncio
import sys
from pathlib import Path

import pytest

from areax.rollout.errors import ServerError
from areax.rollout.sandbox import hosted, machine
from areax.rollout.sandbox.machine import Ended


class Broken(Exception):
    """An error of the service."""


async def execute(text, seconds):
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", text, cwd="/", stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    said, _ = await process.communicate()
    return said.decode(errors="replace"), process.returncode


async def write(path, content):
    Path(path).write_bytes(content)


def made(ended=None, **how):
    async def end():
        if ended is not None:
            ended.append(1)

    async def gone():
        return ""

    def kind(error):
        return "failed" if isinstance(error, Broken) else ""

    given = dict(execute=execute, write=write, gone=gone, end=end, kind=kind, lifetime_s=60)
    return hosted.Hosted("service", **{**given, **how})


async def broken(*_):
    raise Broken("out of\norder")


def test_commands_end_in_time_and_keep_the_ends_of_their_output(tmp_path):
    async def steps():
        own = await hosted.started(made(), str(tmp_path / "w"))
        late = await own.run("echo first; sleep 30 & sleep 60", timeout_s=0.2)
        killed = await own.run("kill -9 $$", timeout_s=20)
        long = await own.run("printf é; seq 1 100000; exit 3")
        exact = await own.run("head -c 65536 /dev/zero")
        return own.workdir, late, killed, long, exact

    workdir, late, killed, long, exact = asyncio.run(steps())
    assert workdir == str(tmp_path / "w")
    assert (late.stdout, late.code, late.why) == ("first\n", 137, "wall") and late.seconds < 5
    assert (killed.code, killed.why) == (137, "")
    first, last = long.stdout.split("\n... 523361 bytes left out ...\n")
    assert first.startswith("é1\n2\n") and last.endswith("\n100000\n") and long.code == 3
    assert len(first.encode()) == len(last.encode()) == 2**15 and len(exact.stdout) == 2**16


def test_what_is_in_the_background_goes_on_and_is_not_waited_for(tmp_path):
    async def steps():
        own = made()
        begun = await own.run("(sleep 0.2; echo 5 > tick) & echo begun", cwd=str(tmp_path))
        return begun, await own.run("while [ ! -s tick ]; do sleep 0.05; done; cat tick", cwd=str(tmp_path))

    begun, then = asyncio.run(steps())
    assert begun.stdout == "begun\n" and then.stdout == "5\n"


def test_files_come_and_go(tmp_path):
    async def steps():
        own = made()
        data = bytes(range(256)) * 500
        await own.put({f"{tmp_path}/a b/y.bin": data, f"{tmp_path}/t": b"1"})
        assert await own.get(f"{tmp_path}/a b/y.bin") == data
        with pytest.raises(FileNotFoundError):
            await own.get(f"{tmp_path}/none")
        with pytest.raises(IsADirectoryError):
            await own.get(str(tmp_path))
        with pytest.raises(OSError, match="must have at most 4194304 bytes"):
            await own.run(f"head -c 5000000 /dev/zero > {tmp_path}/big")
            await own.get(f"{tmp_path}/big")
        with pytest.raises(OSError, match="is no file"):
            await own.run("ln -s /dev/zero endless", cwd=str(tmp_path))
            await own.get(f"{tmp_path}/endless")
        with pytest.raises(OSError, match="cannot be written"):
            await own.put({f"{tmp_path}/t/x": b""})
        with pytest.raises(OSError, match="too long"):
            await own.run("x" * 70_000)

    asyncio.run(steps())


@pytest.mark.parametrize(
    "damage",
    [
        lambda said: "busy\n" + said,  # four characters of base64's
        lambda said: f"bash: warning: setlocale\n{said}",
        lambda said: said.replace("MC4", "MC4busy"),
        lambda said: said[:-5],
        lambda said: said + "MTE=",
        lambda said: said.replace("M", "<"),
        lambda said: "",
        lambda said: "<html>502 Bad Gateway</html>",
    ],
)
def test_a_file_that_comes_back_changed_is_an_error_of_the_service(tmp_path, damage):
    (tmp_path / "reward.txt").write_text("0.875")

    async def damaged(text, seconds):
        said, code = await execute(text, seconds)
        return damage(said), code

    with pytest.raises(ServerError, match="^service: the file .*/reward.txt did not come back as it is: .*, got '"):
        asyncio.run(made(execute=damaged).get(str(tmp_path / "reward.txt")))


def test_a_machine_that_is_gone_has_ended_and_a_service_that_fails_is_a_server_error():
    async def lost():
        return "its time is over"

    async def steps():
        with pytest.raises(ServerError, match="service: out of order"):
            await made(execute=broken).run("true")
        with pytest.raises(ServerError, match="service: out of order"):
            await made(execute=broken, gone=broken).run("true")
        with pytest.raises(ZeroDivisionError):  # no error of the service
            await made(execute=lambda text, seconds: asyncio.sleep(1 / 0)).run("true")
        own = made(execute=broken, gone=lost)
        for _ in range(2):
            with pytest.raises(Ended, match="its time is over"):
                await own.run("true")

    asyncio.run(steps())


def test_it_is_ended_once_and_what_fails_is_logged(caplog):
    async def steps():
        ended = []
        own = made(ended)
        await asyncio.gather(own.aclose(), own.aclose())
        with pytest.raises(Ended, match="it was closed"):
            await own.put({"/x": b""})
        assert ended == [1] and not caplog.records
        await made(end=broken).aclose()

    asyncio.run(steps())
    assert "service: a machine was not ended (out of order); it ends by itself 60 s after its start" in caplog.text


def test_an_image_without_what_commands_need_is_refused_and_its_machine_ended():
    async def steps():
        ended = []
        with pytest.raises(ValueError, match="an image must have bash .*, got exit code 1 .*/dev/null"):
            await hosted.started(made(ended), "/dev/null/x")
        with pytest.raises(ServerError, match="service: out of order"):
            await hosted.started(made(ended, execute=broken), "")
        assert ended == [1, 1]

    asyncio.run(steps())


def test_what_is_made_for_a_start_that_was_cancelled_is_ended():
    async def steps():
        ended = []

        async def make():
            await asyncio.sleep(0.1)
            return "it"

        async def end(it):
            ended.append(it)

        starting = asyncio.create_task(hosted.owned(make(), end))
        await asyncio.sleep(0.02)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert ended == ["it"]
        assert await hosted.owned(make(), end) == "it" and ended == ["it"]

    asyncio.run(steps())


@pytest.mark.parametrize("provider", ["e2b", "daytona", "modal", "docker"])
def test_a_provider_without_its_package_says_which(provider, monkeypatch):
    monkeypatch.setitem(sys.modules, provider, None)
    with pytest.raises(ImportError, match=rf"^{provider} is not installed: pip install 'areax\[{provider}\]'$"):
        asyncio.run(machine.provider(provider)("image", Path("/none")))
