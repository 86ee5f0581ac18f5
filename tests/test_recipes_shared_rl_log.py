"""The log of an RL run: what is logged again after a run was killed is there once."""

import types

import pytest

from areax.adapters.tracking import run_dir
from areax.recipes.shared import rl_log
from areax.recipes.shared.stop_on import StopOn


@pytest.mark.parametrize("heldout, kept", [(("rows.jsonl",), [1, 2]), ((), [1, 2, 2])])
def test_an_evaluation_that_is_repeated_is_logged_once(tmp_path, heldout, kept):
    """A run evaluates the version that it begins with, if it has rows to evaluate."""
    with run_dir.open_run(tmp_path) as run:
        for step in (1, 2, 3):
            run.log("grpo", step)
        run.log("eval", 2)
    config = types.SimpleNamespace(
        out=str(tmp_path), steps=4, evaluation=types.SimpleNamespace(heldout=heldout),
    )  # fmt: skip
    with rl_log.opened(config, None, None, 2, StopOn()):
        pass
    assert [line["step"] for line in run_dir.read_lines(tmp_path / run_dir.METRICS)] == kept
