"""What a plan assumes of tries, beside what packing makes of groups, JAX keeps, and XLA takes."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_families
from test_parallel_planner_memory import ONE, UNLIKE, job, kept

from areax import models
from areax.adapters.commands import aot, jobs
from areax.core import losses, optim, packing
from areax.core.trie import to_places
from areax.models.attention.pattern import PLAIN, Pattern
from areax.parallel import mesh
from areax.parallel.planner import activations, flops, memory, tries
from areax.rollout.types import Completion, sampled

GROUPS = 3


def packed(groups, group, prompt, new, length, align):
    rng = np.random.default_rng(0)
    draw = lambda count: rng.integers(1, 1 << 30, count).tolist()
    samples = []
    for g, head in enumerate([draw(prompt) for _ in range(groups)]):
        for _ in range(group):
            answer = Completion(draw(new), [-1.0] * new, [0] * new, "stop")
            i = len(samples)
            samples.append(sampled(head, answer, temperature=1.0, reward=0.0, group=g, prompt=g, sample=i, rollout=i))
    return packing.pack_tries(samples, length, rows=1, align=align)


def test_groups_are_laid_out_as_they_are_packed():
    made = 0
    sizes = (1, 3, 8), (2, 4, 6, 16), (13, 40), (5, 20), (64, 128, 256), (1, 32)
    for case in itertools.product(*sizes):
        groups, group, prompt, new, _, align = case
        batch, formula = packed(*case), tries.of_groups(*case)
        assert (formula is None) == (batch.trie is None), case
        if formula is None:
            continue
        made += 1
        held = batch.trie.first_BT >= 0
        found = formula.rows, formula.flattened, formula.slots, formula.tokens
        wanted = held.any((1, 2)).sum(), batch.token_BT.shape[2], batch.sample_BJ.shape[2], (batch.segment_BT > 0).sum()
        assert found == wanted, case
        if align == 1:
            assert formula.ratio == pytest.approx(packing.trie_ratio(batch)), case
            assert formula.places * groups == held.sum(), case
    assert made > 50


@pytest.mark.parametrize("pattern", [PLAIN, Pattern(window=9), Pattern(chunk=16)], ids=["whole", "window", "chunk"])
def test_pairs_are_those_of_tokens_that_see_each_other(pattern):
    """Counted one by one; windows and chunks are of depths in samples."""
    case = GROUPS, 6, 40, 20, 128, 1
    batch, formula = packed(*case), tries.of_groups(*case)
    made = job(tiny_families.config("qwen3"), rows=formula.rows, length=128, tries=formula)
    a_place = flops.pairs(made, SimpleNamespace(pattern=pattern)) / made.tokens
    flat = jax.tree.map(lambda x: jnp.asarray(x.reshape(-1, x.shape[-1])), (batch.trie, batch.position_BT))
    rows = map(np.asarray, (flat[0].first_BT, flat[0].until_BT, to_places(*flat)))
    place_T, seen = np.arange(128), 0
    for first_T, until_T, depth_T in zip(*rows, strict=True):
        on_path = (place_T <= place_T[:, None]) & (place_T[:, None] < until_T) & (first_T >= 0)
        seen += int((on_path & pattern.sees(depth_T[:, None], depth_T[None])).sum())
    assert formula.stems == 2 and a_place * GROUPS * formula.places == pytest.approx(seen)


FORMULA = tries.of_groups(GROUPS, 4, 40, 20, 128, 1)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("family", UNLIKE)
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_saved_activations_match_the_formula(family, remat):
    config = tiny_families.config(family)
    made = job(config, rows=5, length=128, remat=remat, tries=FORMULA)
    assert activations.saved(made) == kept(config, models.Run(remat=remat), 5, 128, flattened=FORMULA.flattened)


STEPS = [
    ("qwen3", losses.GRPO(), ONE, 2),
    ("deepseek_v3", losses.RewardModel(), ONE, 1),
    pytest.param("gemma4_text", losses.GRPO(), mesh.Layout(dp=2, cp=2, tp=2), 1, marks=pytest.mark.mesh),
    pytest.param("deepseek_v3", losses.GRPO(), mesh.Layout(fsdp=2, ep=2, tp=2), 2, marks=pytest.mark.mesh),
    *(pytest.param(family, losses.GRPO(), ONE, 1, marks=pytest.mark.wide) for family in tiny_families.FAMILIES),
]  # fmt: skip


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("family, objective, layout, microbatches", STEPS)
def test_a_step_has_the_arguments_and_about_the_temporaries_of_the_formula(family, objective, layout, microbatches):
    """Temporaries of the CPU's backend, as of rows; arrays of samples' tokens are small among them, and not counted."""
    config, value = tiny_families.config(family), isinstance(objective, losses.RewardModel)
    config = jobs.scored(config) if value else config
    step = aot.Step(
        config, objective, optim.Optimizer(), models.Run(), layout, 8, 128, microbatches, slots=FORMULA.slots,
        flattened=FORMULA.flattened,
    )  # fmt: skip
    made = job(
        config, layout, length=128, microbatches=microbatches, slots=FORMULA.slots, reads=aot.reads(step),
        tries=FORMULA, value=value,
    )  # fmt: skip
    formula, analysis = memory.memory(made), aot.compile(step).memory_analysis()
    assert formula.arguments == analysis.argument_size_in_bytes
    if layout == ONE:
        assert 1 / 2 < formula.temporary / analysis.temp_size_in_bytes < 2


def test_a_ring_does_not_divide_tries():
    with pytest.raises(ValueError, match="--run.cp must be gather or ulysses to divide tries, got ring"):
        job(tiny_families.config("qwen3"), mesh.Layout(cp=2), length=128, tries=FORMULA, cp="ring")
