"""A run that is killed goes on at its task: none is played twice, none is left out, and each is the same."""

import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

import killing
import pytest
import serving
from test_nemo_gym import COUNT
from test_nemo_gym import served as nemo

from areax.rollout.sandbox import isolation

PROGRAMS = Path(__file__).resolve().parents[2] / "benchmarks/failing_programs.py"


@contextlib.contextmanager
def openenv():
    with serving.served("server.py", "text", last=("64",)) as address:
        yield f"openenv:{address}"


@contextlib.contextmanager
def harbor():
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, PROGRAMS, folder, "6"], check=True)
        yield f"harbor:{folder}"


KINDS = {  # kind: (what `--env` names, or how it is served, options)
    "reasoning_gym": ("reasoning_gym:chain_sum", {}),
    "textarena": ("textarena:GuessTheNumber-v0", {"turns": 2}),
    "players": ("textarena:KuhnPoker-v0", {"players": 2, "turns": 2}),
    "gymnasium": ("gymnasium:FrozenLake-v1", {"turns": 2}),
    "aviary": ("aviary:dummy", {"turns": 2}),
    "openenv": (openenv, {"turns": 2}),
    "nemo_gym": (lambda: nemo("example_session_state_mgmt"), {"turns": 2, "data": str(COUNT)}),
    "harbor": (harbor, {"turns": 2}),
    "verifiers": ("verifiers:rubrics", {"kind": "tools"}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("killed")
    killing.model(path / "model")
    return path


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "openenv" else pytest.mark.long) for kind in KINDS]
)
def test_a_killed_run_plays_each_task_once(kind, place):
    if kind == "harbor" and not isolation().files:
        pytest.skip("needs namespaces")
    env, options = KINDS[kind]
    with contextlib.nullcontext(env) if isinstance(env, str) else env() as named:
        assert killing.plays_each_task_once(named, options, place, kind)
