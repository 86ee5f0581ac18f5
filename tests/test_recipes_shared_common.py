"""Devices of servers that a run starts, and what it says of the ends of its completions."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest
import tiny

from areax import models
from areax.adapters import tokenizer
from areax.recipes.shared import common
from areax.rollout.servers import local
from areax.rollout.servers.engine_mesh import EngineMesh


def host(monkeypatch, count, platform="gpu", version="cuda 12090"):
    """A machine with these devices."""
    device = SimpleNamespace(platform=platform, client=SimpleNamespace(platform_version=version))
    monkeypatch.setattr(jax, "local_devices", lambda: [device] * count)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_servers_need_no_more_devices_than_there_are():
    wide = local.Serve(mesh=EngineMesh(dp=2, tp=len(jax.local_devices())))
    with pytest.raises(ValueError, match=r"--serve.mesh: dp 2.* needs \d+ devices, got \d+; lower --serve.mesh.tp"):
        common.check_own_servers(wide, 1, colocated=False)
    common.check_own_servers(local.Serve(), 1, colocated=False)
    assert common.own_environs(local.Serve(count=3, mesh=EngineMesh(tp=2)), 1, colocated=False) == []


def test_servers_of_a_run_get_the_gpus_that_its_trainer_leaves(monkeypatch, capsys):
    host(monkeypatch, 8)
    serve = local.Serve(count=2, mesh=EngineMesh(tp=2))
    common.check_own_servers(serve, 4, colocated=False)
    assert not capsys.readouterr().err
    shown = [each["CUDA_VISIBLE_DEVICES"] for each in common.own_environs(serve, 4, colocated=False)]
    assert shown == ["4,5", "6,7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    assert common.own_environs(serve, 4, colocated=False)[0] == {"CUDA_VISIBLE_DEVICES": "3,2"}
    assert common.own_environs(serve, 4, colocated=True)[1] == {"CUDA_VISIBLE_DEVICES": "5,4"}  # in turns
    assert common.own_environs(local.Serve(inside=True), 4, colocated=False) == []
    host(monkeypatch, 8, version="rocm 60300")
    assert common.own_environs(serve, 5, colocated=False) == [
        {"HIP_VISIBLE_DEVICES": "5,6"}, {"HIP_VISIBLE_DEVICES": "0,1"}
    ]  # fmt: skip


def test_a_run_on_gpus_says_which_its_servers_share(monkeypatch, capsys):
    common.check_own_servers(local.Serve(), 1, colocated=False)
    assert not capsys.readouterr().err  # a CPU
    host(monkeypatch, 4)
    common.check_own_servers(local.Serve(count=4), 4, colocated=True)
    common.check_own_servers(local.Serve(inside=True), 4, colocated=False)
    assert not capsys.readouterr().err
    common.check_own_servers(local.Serve(count=3), 3, colocated=False)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "2 of 3 servers of this run share GPU 0, 1 and its memory with the trainer, whose mesh takes"
    )
    for remedy in ("a smaller --mesh", "`areax launch`", "--serve.inside", "--colocated --eta 0"):
        assert remedy in line


def test_a_run_on_tpus_starts_no_other_process_on_its_chips(monkeypatch):
    host(monkeypatch, 4, platform="tpu")
    for colocated in (False, True):
        with pytest.raises(ValueError, match="this one has all TPU chips that it sees; .*--serve.inside, .*launch"):
            common.check_own_servers(local.Serve(), 1, colocated)
    common.check_own_servers(local.Serve(inside=True), 1, colocated=False)


@pytest.mark.parametrize(
    ("written", "published", "stays"),
    [
        ({"metrics.jsonl": "", "events.jsonl": '{"kind": "open"}'}, "", False),
        ({"metrics.jsonl": "", "server.log": "Traceback"}, "", True),  # it says why a server ended
        ({"metrics.jsonl": ""}, "versions", True),  # which have the run's id
    ],
)
def test_a_run_that_is_refused_leaves_no_new_directory(tmp_path, written, published, stays):
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="refused"), common.run_directory(str(out), published):
        (out / "state").mkdir()
        for name, text in written.items():
            (out / name).write_text(text)
        raise ValueError("refused")
    assert out.exists() == stays and bool(common.run_id(str(out))) == stays


def test_ends_that_the_files_of_a_model_do_not_name_are_said(capsys):
    tokens = tokenizer.character("")
    tokens.eos_token = "<pad>"
    config = models.config_from_hf({**tiny.HF, "vocab_size": len(tokens), "eos_token_id": 0})
    common.say_added_ends("base", config, tokens)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("base: config.json and generation_config.json do not name <|im_end|>, with which its")
    common.say_added_ends("chat", dataclasses.replace(config, eos=(0, tokenizer.end_of_turn(tokens))), tokens)
    assert capsys.readouterr().err == ""
