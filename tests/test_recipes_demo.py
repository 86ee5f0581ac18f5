"""The demo on pictures has what its stages read, in microbatches that are full."""

import itertools
import json
from pathlib import Path

import pytest

from areax.adapters import hf, tokenizer
from areax.adapters.data import images
from areax.core import packing
from areax.recipes import demo
from areax.recipes.shared import offline
from areax.rollout import object_path


@pytest.mark.slow
def test_the_stages_of_the_demo_on_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "DEMONSTRATIONS", 300)
    config = demo.Config(task="shapes", out=str(tmp_path))
    assert demo.write_data(config, tmp_path) == 1000
    sft, rl = demo.sft_config(config, tmp_path), demo.grpo_config(config, tmp_path, "grpo")
    for data in (sft.data, rl.data, *rl.evaluation.heldout, tmp_path / "data/pictures.jsonl"):
        row = json.loads(Path(data).read_text().splitlines()[0])
        assert object_path.resolve(rl.reward)(row["answer"], row) == 1.0
    assert sft.vision == rl.training.vision == "trained"
    settings, _ = hf.load(sft.model, vision=True)
    tokens, processor = tokenizer.load(sft.model), images.load(sft.model)
    sample = offline.Demonstrations(tokens, sft.learn, processor)
    with open(sft.data) as file:
        samples = [sample(json.loads(line)) for line in itertools.islice(file, sft.batch)]
    assert all(processor.media(each.images[0]).grid == (1, 6, 6) for each in samples[:3])
    assert max(len(each.tokens) for each in samples) <= rl.serving.serve.context
    for count, rows in ((sft.batch, sft.rows), (2 * sft.batch, rl.training.rows)):
        full = packing.pack((samples * 2)[:count], sft.length, rows=rows)
        assert full.token_BT.shape[0] == count // sft.batch and settings.vision


def test_a_directory_has_the_demo_of_one_task(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ValueError, match="has the demo of another task than shapes; name another directory"):
        demo.main(demo.Config(task="shapes", out=str(tmp_path)))
    assert [*tmp_path.iterdir()] == [base]
    (base / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "vision_config": {}}))
    with pytest.raises(ValueError, match="another task than sums"):
        demo.main(demo.Config(out=str(tmp_path)))


def test_few_steps_of_imitation_have_a_shorter_warmup(tmp_path):
    assert [demo.sft_config(demo.Config(sft_steps=n), tmp_path).optim.warmup for n in (1, 2, 1000)] == [0, 1, 20]
