"""Servers that a run starts: the command line of each asks for all that the run's options do."""

import dataclasses

import tiny

from areax.adapters import cli
from areax.rollout.engine import server
from areax.rollout.servers import local
from areax.rollout.servers.engine_mesh import EngineMesh

OF_THE_RUN = {"inside", "count", "restarts"}  # not of a server


def test_a_server_gets_every_option(tmp_path, monkeypatch):
    folder, given = tiny.model(tmp_path / "model"), {}
    monkeypatch.setattr(server, "serve", lambda path, **options: given.update(options))
    mesh = EngineMesh(dp=2, ep=3, tp=4)
    options = local.Serve(slots=5, context=66, memory=7.5, mesh=mesh, draft=8, dtype="float16")
    for asked in (options, local.Serve(context=64)):
        assert cli.main(local.words(str(folder), asked)) == 0
        wanted = {name: value for name, value in dataclasses.asdict(asked).items() if name not in OF_THE_RUN}
        assert {name: given[name] for name in wanted} == wanted | {"mesh": asked.mesh} and given["port"] == 0
