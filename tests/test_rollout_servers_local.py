"""Servers that a run starts: the command line of each asks for all that the run's options do."""

import asyncio
import dataclasses
from types import SimpleNamespace

import tiny

from areax.adapters import cli
from areax.rollout.engine import server
from areax.rollout.servers import local
from areax.rollout.servers.engine_mesh import EngineMesh

OF_THE_RUN = {"inside", "count", "restarts"}  # not of a server


def test_a_server_gets_every_option(tmp_path, monkeypatch):
    folder, given = tiny.model(tmp_path / "model"), {}
    monkeypatch.setattr(server, "serve", lambda path, engine, **others: given.update(vars(engine), **others))
    mesh = EngineMesh(dp=2, ep=3, tp=4)
    options = local.Serve(slots=5, context=66, memory=7.5, mesh=mesh, draft=8, dtype="float16")
    for asked in (options, local.Serve(context=64)):
        assert cli.main(local.words(str(folder), asked)) == 0
        wanted = {name: value for name, value in dataclasses.asdict(asked).items() if name not in OF_THE_RUN}
        assert {name: given[name] for name in wanted} == wanted | {"mesh": asked.mesh} and given["port"] == 0


PARROT = """#!/bin/sh
echo "http://here:$$ is shown $CUDA_VISIBLE_DEVICES"
exec sleep 60
"""


def test_a_server_keeps_its_devices_when_it_is_restarted(tmp_path, monkeypatch):
    program = tmp_path / "areax"
    program.write_text(PARROT)
    program.chmod(0o755)
    monkeypatch.setattr(local, "sys", SimpleNamespace(executable=program))
    log = tmp_path / "log"
    shown = lambda: {line.split()[0]: line.split()[-1] for line in log.read_text().splitlines()}

    async def run():
        environs = [{"CUDA_VISIBLE_DEVICES": gpus} for gpus in ("4,5", "6,7")]
        async with local.servers("model", local.Serve(count=2), log, environs) as own:
            assert sorted(shown()[url] for url in own.urls) == ["4,5", "6,7"]
            for _ in range(2):  # the address changes
                first = own.urls[0]
                again = await own.restart(first, None)
                assert again != first and shown()[again] == shown()[first]

    asyncio.run(run())
