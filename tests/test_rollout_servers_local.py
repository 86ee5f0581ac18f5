"""Servers that a run starts get the run's options."""

from dataclasses import asdict

from areax.rollout.servers import local
from areax.rollout.servers.engine_mesh import EngineMesh

OF_THE_RUN = {"inside", "count", "restarts"}  # not options of a server


def test_every_option_reaches_the_server():
    options = local.Serve(slots=3, context=96, memory=0.5, mesh=EngineMesh(2, 3, 4), draft=5, dtype="float32")
    words = local.command("model", options)
    given = dict(zip(words[5::2], words[6::2], strict=True))  # after: python -m areax serve model
    flat = {f"mesh.{axis}": size for axis, size in asdict(options.mesh).items()} | asdict(options)
    expected = {f"--{name}": str(value) for name, value in flat.items() if name not in OF_THE_RUN | {"mesh"}}
    assert given == expected | {"--port": "0"}


def test_a_server_chooses_what_a_run_leaves_open():
    words = local.command("model", local.Serve())
    assert "--context" not in words and "--memory" not in words
