"""Programs lowered from shapes are those that an engine runs."""

import functools
import re

import pytest
from test_rollout_engine_mesh import engine_of
from test_rollout_engine_pages import requests

from areax.rollout.engine import lowering
from areax.rollout.engine.programs import decode, prefill
from areax.rollout.servers.engine_mesh import EngineMesh

CASES = [
    ("qwen3", EngineMesh(tp=2), 4),
    pytest.param("qwen3_moe", EngineMesh(ep=2), 1, marks=pytest.mark.mesh),
    pytest.param("qwen3_5_text", EngineMesh(tp=2), 1, marks=pytest.mark.mesh),
    pytest.param("deepseek_v3", EngineMesh(ep=3), 1, marks=pytest.mark.mesh),
]


def text(lowered):
    return re.sub(r"loc\(.*?\)|#loc\d*", "", lowered.as_text())


def recorded(monkeypatch, module, name, found):
    """Records the programs of a jitted function, by name, as they run."""
    jitted = getattr(module, name)

    @functools.wraps(jitted)
    def run(*args, **options):
        found.setdefault(name, set()).add(text(jitted.lower(*args, **options)))
        return jitted(*args, **options)

    run.lower = jitted.lower
    monkeypatch.setattr(module, name, run)


def check(engine, asked, found, monkeypatch, *modules):
    """The programs lowered from shapes are among those that run for requests, to the letter."""
    names = {"decoding": "decode", "prefill": "prefill", "an image": "encode"}
    for module, name in modules:
        recorded(monkeypatch, module, name, found)
    engine.generate(asked)
    on = list(engine.device.mesh.devices.flat)
    for name, lower in lowering.programs(engine.config, "float32", engine.options, 1e9, False).items():
        if names.get(name) in found:
            assert text(lower(on)) in found.pop(names[name]), name
    assert not found


@pytest.mark.sweep
@pytest.mark.parametrize("case, split, draft", CASES)
def test_what_is_lowered_from_shapes_is_what_runs(case, split, draft, monkeypatch):
    with engine_of(case, split, draft=draft) as engine:
        check(engine, requests(case), {}, monkeypatch, (decode, "decode"), (prefill, "prefill"))
