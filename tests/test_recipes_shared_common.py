"""Devices of servers that a run starts."""

from types import SimpleNamespace

import jax
import pytest

from areax.recipes.shared import common
from areax.rollout.servers import local
from areax.rollout.servers.engine_mesh import EngineMesh


def test_servers_need_no_more_devices_than_there_are():
    wide = local.Serve(mesh=EngineMesh(dp=2, tp=len(jax.local_devices())))
    with pytest.raises(ValueError, match=r"--serve.mesh: dp 2.* needs \d+ devices, got \d+; lower --serve.mesh.tp"):
        common.check_own_servers(wide, colocated=False)
    common.check_own_servers(local.Serve(), colocated=False)


def test_a_run_on_gpus_says_that_its_servers_share_them(monkeypatch, capsys):
    common.check_own_servers(local.Serve(), colocated=False)
    assert not capsys.readouterr().err  # a CPU
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform="gpu")])
    common.check_own_servers(local.Serve(), colocated=True)
    common.check_own_servers(local.Serve(inside=True), colocated=False)
    assert not capsys.readouterr().err
    common.check_own_servers(local.Serve(), colocated=False)
    assert "servers that this run starts share its GPUs" in capsys.readouterr().err
