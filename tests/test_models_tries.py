"""Models over tries: scores, losses and gradients are those of rows, where every sample has its own tokens."""

import dataclasses
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter

import forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_families

from areax import models
from areax.core import balance, distill, divergence, losses, metrics, packing, process_reward, step
from areax.core import trie as tries
from areax.core.critic import Critic
from areax.models import frozen, lora
from areax.parallel import batches, mesh, rules

RUN = models.Run(remat="dots")
# Windows, sinks and experts; states; latent attention; long rope, with samples on both sides of the length.
KINDS = "qwen3", "gpt_oss", "qwen3_next", "deepseek_v3", "phi3"
OTHERS = [name for name in tiny_families.FAMILIES if name not in KINDS]


@cache
def model(family: str, **changes):
    """(config, weights), with a critic's head."""
    source = tiny_families.COMMON | tiny_families.OPTIONS[family] | dict(model_type=family) | changes
    config = models.config_from_hf(source)
    params = tiny.weights(models.table(config), source["initializer_range"])
    head = np.random.default_rng(1).normal(0, 0.3, (1, config.embed)).astype(np.float32)
    return config, params | {"score": jnp.asarray(head)}


@partial(jax.jit, static_argnums=(2, 3))
def gradient(params, batch, config, run):
    """Scores of every microbatch, and the gradient of a sum over all of a sample's tokens with weights of their own."""

    def one(params, batch):
        out = models.score(params, batch, config=config, run=run, temperature=1.3)
        weigh = lambda x_BT: jnp.sum(jnp.where(batch.mask_BT, batch.logp_BT * x_BT, 0))
        total = weigh(out.logp_BT) + 0.3 * weigh(out.entropy_BT) - 0.2 * weigh(out.lse_BT)
        total += jnp.sum(jnp.where(batch.segment_BT > 0, out.value_BT * (batch.index_BT % 3 - 1), 0))
        total += sum(jnp.sum(out.aux[name]) / 100 for name in ("prob", "lse2") if name in out.aux)
        return total, out

    grads, out = jax.lax.map(partial(jax.grad(one, has_aux=True), params), batch)
    added, aux = jax.tree.map(lambda x: x.sum(0), (grads, out.aux))
    return added, {name: getattr(out, name) for name in ("logp_BT", "entropy_BT", "lse_BT", "value_BT")}, aux


def close(got, wanted, scale: float):
    """Each leaf within `scale` of its largest value."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    for (path, a), b in pairs:
        size, name = float(np.abs(b).max()), jax.tree_util.keystr(path)
        assert size > 0 or "router_bias" in name, name
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= scale * max(size, 1e-2), name


def same_scores(family: str, run=RUN, data=None, **changes):
    """In fp64, so that what differs is not rounding."""
    config, params = model(family, **changes)
    rows, tries = forks.batches(config, data or forks.samples(shared=13 if models.trie_alignment(config) == 1 else 90))
    with jax.enable_x64(True):
        same_in(jax.tree.map(lambda x: x.astype(jnp.float64), params), rows, tries, config, run, 1e-9)


def same_in(params, rows, tries, config, run, tolerance: float):
    (g_rows, rows_out, aux), (g_tries, tries_out, aux_tries) = (
        gradient(params, batch, config, run) for batch in (rows, tries)
    )
    for name, wanted in rows_out.items():
        wanted, got = forks.by_sample(wanted, rows), forks.by_sample(tries_out[name], tries)
        assert set(wanted) == set(got)
        for i, x_T in wanted.items():
            here = slice(None) if name == "value_BT" else slice(-1)  # nothing follows the last token
            np.testing.assert_allclose(
                got[i][here], x_T[here], atol=tolerance, rtol=tolerance, err_msg=f"{name} of {i}"
            )
    close(aux_tries, aux, tolerance)
    close(g_tries, g_rows, tolerance)


@pytest.mark.parametrize(
    "family",
    [
        KINDS[0],
        *(
            pytest.param(name, marks=pytest.mark.long if name in KINDS else pytest.mark.wide)
            for name in [*KINDS[1:], *OTHERS]
        ),
    ],
)
def test_scores_and_gradients_are_those_of_rows(family):
    same_scores(family)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("seed", [pytest.param(i, marks=pytest.mark.wide if i > 2 else ()) for i in range(16)])
def test_random_tries_are_rows(seed):
    same_scores("qwen3", data=forks.random(seed))


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["full", pytest.param("none", marks=pytest.mark.wide)])
def test_every_rematerialisation_gives_the_same(keep):
    same_scores("qwen3", models.Run(remat=keep, query_chunk=16, head_chunk=24))


@pytest.mark.wide
@pytest.mark.slow
def test_replayed_experts_are_shared_where_they_are_the_same():
    family, L, K = "qwen3_moe", 2, 2
    data = forks.samples(routed=(L, K, 8))
    free = [s.replace(arrays={}) for s in data]
    same_scores(family, data=data)
    config, _ = model(family)
    places = lambda some: int((forks.batches(config, some)[1].trie.first_BT >= 0).sum())
    assert places(data) > places(free)  # completions that are the same have other experts


def test_recurrent_layers_need_nodes_at_their_chunks():
    config, params = model("qwen3_next")
    batch = jax.tree.map(itemgetter(0), packing.pack_tries(forks.samples(), 96, rows=2))
    with pytest.raises(ValueError, match=r"multiples of 32, got 1; pack them with align=models.trie_alignment"):
        jax.eval_shape(partial(models.score, config=config), params, batch)


def test_tries_of_samples_whose_rope_differs_are_refused():
    """By the number of places: no sample is longer."""
    config, params = model("phi3")
    score = partial(models.score, config=config)
    pack = lambda length, **options: packing.pack_tries(data, length, rows=4, **options)
    one = lambda batch: jax.tree.map(itemgetter(0), batch)
    data = forks.samples()
    with pytest.raises(ValueError, match=r"samples of more than 20 tokens share nothing .*apart=models.trie_lengths"):
        jax.eval_shape(score, params, one(pack(96, apart=(19,))))
    jax.eval_shape(score, params, one(pack(96, apart=(19, 20))))
    config, params = model.__wrapped__(
        "qwen3", rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=64
    )
    with pytest.raises(
        ValueError, match="dynamic rope needs rows of tries of at most 64 tokens.*, got 96; pack longer"
    ):
        jax.eval_shape(partial(models.score, config=config), params, one(pack(96)))
    jax.eval_shape(partial(models.score, config=config), params, one(pack(64)))


@pytest.mark.wide
@pytest.mark.slow
def test_one_sample_a_trie_is_a_row():
    """Samples that share nothing, laid out by hand: their first tokens are roots."""
    config, params = model("gpt_oss")
    data = forks.samples()[::5]
    rows = packing.pack(data, 48, rows=2)
    place = np.broadcast_to(np.arange(48), rows.token_BT.shape)
    real = rows.segment_BT > 0
    until = [
        [[np.flatnonzero(segment_T == x)[-1] + 1 if x else t + 1 for t, x in enumerate(segment_T)] for segment_T in one]
        for one in rows.segment_BT
    ]
    trie = tries.Trie(
        np.where(real, place, -1), np.where(real & (rows.index_BT > 0), place - 1, place), np.array(until),
        np.where(real, place, 0),
    )  # fmt: skip
    trie = jax.tree.map(lambda x: x.astype(np.int32), trie)
    same_in(params, rows, rows.replace(trie=trie), config, RUN, 1e-5)


def loss_and_gradient(objective, score, params, batch, frozen=()):
    """(metrics with the loss, gradient) of a whole batch."""

    def whole(params, batch, *frozen):
        before = step.make_scores(score)(params, batch, *frozen) if objective.needs_scores else None
        total, report, _ = step.whole_gradient(score, objective)(params, objective.prepare(batch, before), *frozen)
        return report, total.params

    report, gradient = jax.jit(whole)(params, batch, *frozen)
    return metrics.to_dict(report), gradient


def same_metrics(got, wanted):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def same_objective(objective, score, params, data=None, frozen=(), beside=lambda batch: batch):
    found = []
    for batch in forks.batches(CONFIG, data or forks.samples()):
        batch = batch.with_scalars(version=np.int32(4))
        if batch.trie is not None and score is SCORE:  # losses read no other predictions
            score = partial(score, learnt_only=True, run=replace(RUN, head_chunk=16))
        found.append(loss_and_gradient(objective, score, params, beside(batch), frozen))
    (got, g_tries), (wanted, g_rows) = found[::-1]
    assert got.keys() == wanted.keys()
    same_metrics(got, wanted)
    leaves = jax.tree.leaves(g_rows)
    assert sum(bool(np.abs(g).max() > 0) for g in leaves) >= len(leaves) - 1  # a head may be of no use
    for a, b in zip(jax.tree.leaves(g_tries), leaves, strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max() + 1e-8


CONFIG, PARAMS = model("qwen3")
SCORE = partial(models.score, config=CONFIG, run=RUN)
OTHER = tiny.weights(models.table(CONFIG), 0.2, seed=1)
GRPO = losses.GRPO
OFTEN = {
    "sft": losses.SFT(),
    "grpo": GRPO(kl={"coef": 0.1}, entropy={"coef": 0.1}, correction={"mask": "k3", "veto": 1e-4}),
    "dpo": losses.PREFERENCES["DPO"](sft_coef=0.1),
}
RARELY = {
    **{f"policy {name}": preset() for name, preset in losses.POLICIES.items()},
    **{f"preference {name}": preset() for name, preset in losses.PREFERENCES.items()},
    "interpolated": GRPO(correction={"proximal": "interpolate"}),
    "terms": GRPO(kl={"coef": 0.1, "place": "reward"}, entropy={"coef": 0.1, "floor": 3.0}),
    "observations": GRPO(observation={"coef": 0.5}),
    "prompts": GRPO(denominator="prompt", shaping={"overlong_tokens": 9, "overlong_buffer": 4}),
}


def prepared(batch):
    """The batch with reference scores and values of other weights."""
    other = jax.jit(step.make_scores(SCORE))(OTHER | {"score": PARAMS["score"]}, batch)
    return batch.replace(ref_BT=other.logp_BT, value_BT=other.value_BT)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.wide) for name in RARELY)]
)  # fmt: skip
def test_objectives_are_those_of_rows(name):
    objective = (OFTEN | RARELY)[name]
    value, pairs = getattr(objective, "needs_values", False), name == "dpo" or name.startswith("preference")
    params = PARAMS if value or name == "preference RewardModel" else {**OTHER, "embed": PARAMS["embed"]}
    data = forks.samples(pairs=pairs)
    if name == "observations":  # which only every other sample has, also of tokens that they share
        kinds = lambda s: np.where(s.mask | (s.sample % 2 == 0), 0, s.tokens % 4).astype(np.int8)
        data = [s.replace(arrays={"observation": ("target", kinds(s))}) for s in data]
    same_objective(objective, SCORE, params, data, beside=prepared)


@pytest.mark.slow
def test_critics_are_those_of_rows():
    actor = losses.POLICIES["PPO"]()
    critic = partial(models.value, config=CONFIG, run=RUN)

    @jax.jit
    def advantages(batch):
        return actor.prepare(batch, step.make_scores(SCORE)(PARAMS, batch))

    same_objective(Critic(), critic, PARAMS, beside=lambda batch: advantages(prepared(batch)))


@pytest.mark.slow
def test_process_rewards_are_those_of_rows():
    """Samples whose labels differ do not share the token that has them."""
    rng = np.random.default_rng(0)
    label = lambda s: ("input", np.where(s.mask, rng.integers(0, 3, len(s.tokens)), 0).astype(np.int32))
    data = [s.replace(arrays={process_reward.LABEL: label(s)}) for s in forks.samples()]
    head = models.ScoreHead(labels=2)
    config = dataclasses.replace(CONFIG, score_head=head)
    weights = jnp.asarray(rng.normal(0, 0.3, (2, config.embed)), jnp.float32)
    score = partial(models.classify, config=config, run=RUN)
    same_objective(process_reward.ProcessReward(), score, PARAMS | {"score": weights}, data)


@pytest.mark.long
@pytest.mark.sweep
@pytest.mark.parametrize("local", [True, False], ids=["a local teacher", "a teacher's likeliest tokens"])
def test_distillation_is_that_of_rows(local):
    spec = distill.Distill("js", beta=0.3, temperature=1.5, sft_coef=0.2, top_k=0 if local else 3)
    teacher = tiny.weights(models.table(CONFIG), 0.3, seed=2)
    data = forks.samples()
    if not local:
        told = jax.jit(
            lambda token_T: divergence.teacher_top(
                models.forward(teacher, token_T[None], config=CONFIG)[0, :-1], 3, 1.5
            )
        )
        data = [with_teacher(s, told) for s in data]
    objective = distill.Taught(GRPO(), spec, 0.7) if local else spec
    its = CONFIG if local else None
    score = partial(frozen.score, objective=spec, config=CONFIG, teacher_config=its, run=RUN)
    same_objective(objective, score, PARAMS, data, (teacher,) * local)


def with_teacher(s, told):
    """A sample with what a teacher says of each of its tokens; it says the same where samples are the same."""
    n = len(s.tokens)
    ids, logp = (np.asarray(x)[: n - 1] for x in told(np.pad(s.tokens, (0, 48 - n))))
    logp = np.round(logp, 3)  # the same to the bit, whatever is behind
    own = lambda x: ("target", np.pad(x, ((1, 0), (0, 0))))
    return s.replace(arrays={"teacher_ids": own(ids), "teacher_logp": own(logp)})


@pytest.mark.wide
@pytest.mark.slow
def test_adapters_are_those_of_rows():
    spec = lora.Lora(rank=4)
    adapters = tiny.weights(lora.table(models.table(CONFIG), spec), 0.2)
    score = lora.over_base(SCORE, spec)
    same_objective(GRPO(), score, adapters, frozen=(PARAMS,))


@pytest.mark.wide
@pytest.mark.slow
def test_the_statistics_of_experts_count_samples():
    config, params = model("qwen3_moe")
    score = partial(models.score, config=config, run=RUN)
    objective = balance.wrap(losses.SFT(), balance.Balance(load=0.1, z=0.01))
    found = [loss_and_gradient(objective, score, params, batch) for batch in forks.batches(config, forks.samples())]
    wanted = {name: x for name, x in found[0][0].items() if not name.endswith("_max")}  # those are of a microbatch
    same_metrics({name: found[1][0][name] for name in wanted}, wanted)
    for a, b in zip(jax.tree.leaves(found[1][1]), jax.tree.leaves(found[0][1]), strict=True):
        assert np.abs(a - b).max() <= 2e-5 * np.abs(b).max()


GATHER, ULYSSES = (models.Run(remat="dots", cp=method) for method in ("gather", "ulysses"))
MESHES = {
    "qwen3 dp2 cp2 tp2": ("qwen3", mesh.Layout(dp=2, cp=2, tp=2), GATHER),
    "qwen3 fsdp2 cp4": ("qwen3", mesh.Layout(fsdp=2, cp=4), ULYSSES),
    "gpt_oss fsdp2 ep2 cp2": ("gpt_oss", mesh.Layout(fsdp=2, ep=2, cp=2), GATHER),
    "qwen3_next cp2 tp2 ep2": ("qwen3_next", mesh.Layout(cp=2, tp=2, ep=2), ULYSSES),
    "nemotron_h fsdp2 cp2 tp2": ("nemotron_h", mesh.Layout(fsdp=2, cp=2, tp=2), GATHER),
    "deepseek_v3 cp2 tp2 ep2": ("deepseek_v3", mesh.Layout(cp=2, tp=2, ep=2), GATHER),
    "phi3 dp2 cp4": ("phi3", mesh.Layout(dp=2, cp=4), GATHER),
    "gemma4_text fsdp2 cp2 tp2": ("gemma4_text", mesh.Layout(fsdp=2, cp=2, tp=2), GATHER),
}
OFTEN_ON = "qwen3 dp2 cp2 tp2", "qwen3 fsdp2 cp4", "gpt_oss fsdp2 ep2 cp2", "qwen3_next cp2 tp2 ep2"


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.mesh if name in OFTEN_ON else pytest.mark.wide) for name in MESHES]
)
def test_tries_on_a_mesh_are_rows_on_one_device(name):
    family, layout, run = MESHES[name]
    config, params = model(family)
    params = {key: x for key, x in params.items() if key != "score"}
    align = models.trie_alignment(config)
    data = forks.samples(shared=13 if align == 1 else 90)
    length = 96 if align == 1 else 256
    score, objective = partial(models.score, config=config, run=run), losses.SFT()
    wanted = loss_and_gradient(objective, score, params, packing.pack(data, length, rows=4))
    tries = packing.pack_tries(data, length, rows=4, align=align, apart=models.trie_lengths(config))
    assert tries.trie is not None
    on = mesh.make(layout)
    with jax.set_mesh(on):
        placed = jax.device_put(params, rules.of_params(models.table(config), on))
        got = jax.tree.map(np.asarray, loss_and_gradient(objective, score, placed, batches.batch(tries, on)))
    np.testing.assert_allclose(got[0]["loss"], wanted[0]["loss"], rtol=1e-5)
    close(got[1], wanted[1], 5e-5)


@pytest.mark.mesh
def test_a_ring_of_devices_has_no_tries():
    on = mesh.make(mesh.Layout(cp=2))
    batch = forks.batches(CONFIG, forks.samples())[1]
    score = partial(models.score, config=CONFIG, run=models.Run(cp="ring"))
    with jax.set_mesh(on), pytest.raises(ValueError, match="need the method gather or ulysses"):
        jax.eval_shape(score, PARAMS, jax.tree.map(itemgetter(0), batches.batch(batch, on)))
