"""`areax serve --bench`: what it prints, and that it computes every prompt and token that it counts."""

import re

import pytest
import tiny

from areax import models
from areax.adapters import cli
from areax.rollout.engine import bench
from areax.rollout.engine.engine import Engine


@pytest.mark.slow
def test_every_size_up_to_the_slots_is_measured(tmp_path, capsys):
    model = tiny.model(tmp_path / "model")
    assert cli.main(["serve", str(model), "--bench", "--slots", "3", "--context", "64"]) == 0
    about, heads, *rows = capsys.readouterr().out.splitlines()
    assert "qwen3" in about and "prompts of 32 random tokens, answers of 32, float32, one device" in about
    assert re.split(r"  +", heads.strip()) == ["requests", "prompt tokens/s", "first token s", "tokens/s", "ms a token"]
    numbers = [[float(x.replace(",", "")) for x in row.split()] for row in rows]
    assert [row[0] for row in numbers] == [1, 2, 3] and all(x > 0 for row in numbers for x in row)
    for requests, _, _, rate, each in numbers:
        assert abs(each - 1000 * requests / rate) < 0.1 + 0.01 * each


@pytest.mark.slow
def test_prompts_are_computed_and_answers_are_as_long_as_counted():
    config = models.config_from_hf({**tiny.HF, "vocab_size": 60, "eos_token_id": 3})
    with Engine(config, tiny.weights(models.table(config), 0.2), slots=3, context=64) as engine:
        list(bench.measure(engine))
        stats = engine.stats()
    assert stats["tokens"] == 2 * (1 + 2 + 3) * 32
    assert stats["prompt_tokens"] == 2 * (1 + 2 + 3) * 32
    assert stats["prefilled_tokens"] == 2 * (1 + 2 + 3) * 31  # the last token of each is the first that decoding reads


def test_a_context_too_short_to_measure_is_refused(tmp_path, capsys):
    model = tiny.model(tmp_path / "model")
    assert cli.main(["serve", str(model), "--bench", "--context", "32"]) == 2
    assert "--bench needs a context of at least 64 tokens, got 32" in capsys.readouterr().err
    assert cli.main(["serve", str(model), "--bench", "--context", "64", "--draft", "3"]) == 2
    assert "--bench needs a context of at least 96 tokens with --draft 3, got 64" in capsys.readouterr().err


@pytest.mark.parametrize("draft", [1, 2, 5, 16, 64])
def test_an_answer_takes_several_dispatches_even_if_all_drafts_are_accepted(draft):
    for context in (max(64, 32 * draft), 32 * draft + 65, 4096):
        prompt, answer = bench.lengths(context, draft)
        assert answer >= 2 * 8 * draft and 1 <= prompt <= context - answer
    assert bench.lengths(4096) == (512, 128)
