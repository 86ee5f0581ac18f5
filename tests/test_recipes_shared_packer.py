"""What recipes compute of a batch: few positions without a token, in few shapes, on GSM8K with default options."""

import collections
import json
from pathlib import Path

import pytest
import tiny

from areax.adapters import hf
from areax.adapters.command_line.options import flat, replaced
from areax.core import losses, packing
from areax.recipes import distill, grpo, preference, prm, sft
from areax.recipes.shared import microbatch, packer
from areax.rollout.types import supervised

# (prompt, answer) tokens of the first training problems, as messages, by the tokenizer of SmolLM2-135M-Instruct
LENGTHS = json.loads((Path(__file__).parent / "data/gsm8k_lengths.json").read_text())
STEPS = {4: 24, 16: 12, 64: 3}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return hf.read_config(tiny.model(tmp_path_factory.mktemp("packer") / "model", max_position_embeddings=4096))


def text(kind: int, row: int, size: int) -> list[int]:
    return [kind, row, *range(size - 2)]


def single(rows):
    return [supervised(text(0, i, LENGTHS[i][0]), text(1, i, LENGTHS[i][1])) for i in rows]


def pairs(rows):
    answers = {i: (LENGTHS[i][1], LENGTHS[(i + 1) % len(LENGTHS)][1]) for i in rows}
    return [
        supervised(text(0, i, LENGTHS[i][0]), text(kind, i, size)).replace(pair=i)
        for i in rows
        for kind, size in enumerate(answers[i], 1)
    ]


def completions(rows):
    pick = lambda i, j: LENGTHS[(i + 7 * j) % len(LENGTHS)][1]
    return [supervised(text(0, i, LENGTHS[i][0]), text(1 + j, i, pick(i, j))) for i in rows for j in range(8)]


RECIPES = {
    "sft": (sft, {}, single),
    "distill": (distill, dict(teacher="x"), single),
    "prm": (prm, {}, single),
    "dpo": (preference, {}, pairs),
    "kto": (preference, dict(objective=losses.KTO()), lambda rows: [s.replace(pair=-1) for s in pairs(rows)]),
    "reward": (preference, dict(objective=losses.RewardModel()), pairs),
    "grpo": (grpo, dict(reward="x"), completions),
}


@pytest.mark.parametrize("batch", STEPS)
@pytest.mark.parametrize("trie", ["auto", "off"])
@pytest.mark.parametrize("name", RECIPES)
def test_gsm8k_computes_little_padding_in_few_shapes(settings, name, trie, batch):
    recipe, own, samples = RECIPES[name]
    size = {"groups": batch} if name == "grpo" else {"batch": batch}
    config = replaced(recipe.Config(model="x", data="x", **own), trie=trie, **size)
    pack, rows = packer.make(flat(config), settings), microbatch.rows(config)
    shapes: collections.Counter = collections.Counter()
    tokens = positions = 0
    for step in range(STEPS[batch]):
        made = pack(samples([i % len(LENGTHS) for i in range(step * batch, (step + 1) * batch)]), rows)
        tokens += packing.computed(made)
        positions += packing.computed(made) / packing.filled(made)
        shapes[tuple(made.token_BT.shape), made.trie and made.trie.first_BT.shape, made.group_BJ.shape] += 1
    assert positions <= 1.35 * tokens  # 1.07 to 1.18
    assert len(shapes) <= 9
