"""A vision-language model learns to see, with a fixed seed: `make test-learning`.

The task is the demo's: counting shapes in pictures, imitated from a teacher that overlooks one in 70 % of its examples.
A guess is right in a quarter.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from areax.adapters import safetensors
from areax.adapters.command_line.options import replaced
from areax.recipes import demo, grpo

pytestmark = pytest.mark.learning


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """That of the demo, which has run."""
    made = demo.Config(task="shapes", out=str(tmp_path_factory.mktemp("shapes")))
    assert demo.main(made) == 0
    return made


def test_reinforcement_leads_past_the_teacher(config):
    summary = json.loads(Path(config.out, "summary.json").read_text())
    assert summary["sft_accuracy"] < 0.4 and summary["rl_accuracy"] >= 0.8
    assert summary["max_logp_diff"] <= 1e-4
    before, after = (safetensors.read(f"{config.out}/{stage}/model") for stage in ("sft", "grpo"))
    assert all(not np.array_equal(before[name], after[name]) for name in before if name.startswith("model.visual."))


def test_pictures_of_other_rows_teach_nothing(config):
    run = demo.grpo_config(config, Path(config.out), "control-pictures")
    run = replaced(run, data=f"{config.out}/data/pictures.jsonl", steps=25)
    assert grpo.main(run)["accuracy"] < demo.CONTROLS["pictures"]
