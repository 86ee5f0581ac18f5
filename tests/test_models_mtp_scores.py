"""Scores of drafts in training: the paper's loss and gradients, in packed rows, tries and on meshes."""

import dataclasses
from functools import cache, partial

import forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_families
import torch
from test_models_mtp import model as tiny_model

from areax import models
from areax.adapters import hf
from areax.core import losses, mtp, packing
from areax.models import mtp as layer_of
from areax.parallel import batches, mesh, rules, token_layout
from areax.rollout.types import Sample

RUN = models.Run(remat="dots")


class Paper:
    """The draft loss of one sequence in float64, from equations 21 to 24 of arXiv:2412.19437 and the layers of Qwen3.5
    and GLM-4.5; weights by their names in checkpoints."""

    def __init__(self, config, w):
        self.config, self.w = config, w

    def norm(self, x, name):
        scale = (x.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt()
        return x / scale * (self.w[f"{name}.weight"] + self.config.norm_offset)

    def rope(self, x_TNH, size):
        """Half of a head is turned, its first half against its second."""
        T = len(x_TNH)
        angle = torch.arange(T)[:, None].double() * 1e4 ** (-torch.arange(0, size, 2).double() / size)
        cos, sin = (f(angle)[:, None] for f in (torch.cos, torch.sin))
        a, b, rest = x_TNH[..., : size // 2], x_TNH[..., size // 2 : size], x_TNH[..., size:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def attention(self, x_TD, at, gated):
        c, T = self.config, len(x_TD)
        of = lambda name, heads: (x_TD @ self.w[f"{at}.{name}_proj.weight"].T).reshape(T, heads, -1)
        q, k, v = of("q", c.heads), of("k", c.kv_heads), of("v", c.kv_heads)
        q, gate = q.split(c.head_dim, -1) if gated else (q, None)
        q, k = (self.rope(self.norm(x, f"{at}.{name}_norm"), c.head_dim // 2) for x, name in ((q, "q"), (k, "k")))
        k, v = (x.repeat_interleave(c.heads // c.kv_heads, 1) for x in (k, v))
        score_NTS = torch.einsum("tnh,snh->nts", q, k) / c.head_dim**0.5
        score_NTS = score_NTS.masked_fill(torch.ones(T, T, dtype=bool).triu(1), -torch.inf)
        out = torch.einsum("nts,snh->tnh", score_NTS.softmax(-1), v)
        out = out * gate.sigmoid() if gated else out
        return out.reshape(T, -1) @ self.w[f"{at}.o_proj.weight"].T

    def mlp(self, x, at):
        gate, up, down = (self.w[f"{at}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def mixture(self, x_TD, at):
        c = self.config
        score_TE = (x_TD @ self.w[f"{at}.gate.weight"].T).sigmoid()
        choice_TGE = (score_TE + self.w[f"{at}.gate.e_score_correction_bias"]).reshape(len(x_TD), c.router.groups, -1)
        best_TG = choice_TGE.topk(2, -1).values.sum(-1).topk(c.router.kept_groups, -1).indices
        kept_TG = torch.zeros(choice_TGE.shape[:2], dtype=bool).scatter(1, best_TG, True)
        chosen_TK = choice_TGE.masked_fill(~kept_TG[..., None], -torch.inf).flatten(1).topk(c.top_k).indices
        rows = []
        for x, score_E, chosen_K in zip(x_TD, score_TE, chosen_TK, strict=True):
            rows.append(sum(score_E[e] * c.router.scale * self.mlp(x, f"{at}.experts.{int(e)}") for e in chosen_K))
        return torch.stack(rows) + self.mlp(x_TD, f"{at}.shared_experts")

    def loss(self, hidden_TD, token_T, learnt_T, embed_VD, head_VD):
        """(sum over the learnt tokens from the third on, their number)."""
        apart = self.config.family in layer_of.APART
        start = "mtp." if apart else f"model.layers.{self.config.layers}."
        names = layer_of.NAMES_APART if apart else layer_of.NAMES
        block = "mtp.layers.0." if apart else start
        name = lambda key: f"{start}{names[key]}"
        both = [
            self.norm(embed_VD[token_T[1:]], name("embed_norm")), self.norm(hidden_TD[:-1], name("hidden_norm")),
        ]  # fmt: skip
        x = torch.cat(both, -1) @ self.w[f"{name('project')}.weight"].T
        x = x + self.attention(self.norm(x, f"{block}input_layernorm"), f"{block}self_attn", gated=apart)
        half = self.norm(x, f"{block}post_attention_layernorm")
        x = x + (self.mlp(half, f"{block}mlp") if apart else self.mixture(half, f"{block}mlp"))
        logp_TV = (self.norm(x, name("norm")) @ head_VD.T).log_softmax(-1)
        drafts = [-logp_TV[t - 2, token_T[t]] for t in range(2, len(token_T)) if learnt_T[t]]
        return sum(drafts), len(drafts)


def demonstration(i, n, rng, vocabulary):
    return Sample(
        tokens=rng.integers(0, vocabulary, n).astype(np.int32), mask=rng.random(n) < 0.7,
        logp=np.zeros(n, np.float32), version=np.full(n, -1, np.int32), turn=np.zeros(n, np.int32), rewards=(),
        group=i, prompt=i, sample=i, rollout=i,
    )  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("case", ["qwen3_5_text", pytest.param("glm4_moe", marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_the_paper(case):
    """In float64, of two sequences in a row; a trunk that is detached gets no gradient at all."""
    config, params, w = tiny_model(case)
    rng = np.random.default_rng(0)
    data = [demonstration(i, n, rng, config.vocab) for i, n in enumerate((11, 2, 14))]
    batch = mtp.Drafting(losses.SFT(), mtp.MTP(coef=1.0)).prepare(packing.pack(data, 32, rows=1))
    one = jax.tree.map(lambda x: x[0], batch)
    hidden = rng.normal(size=(1, 32, config.embed))
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tree)

        @partial(jax.jit, static_argnames="trunk")
        def gradient(w, hidden, embed, head, trunk):
            def loss(w, hidden, embed, head):
                logp, right = layer_of.score(
                    {"embed": embed, "mtp": w}, hidden, one, token_layout.of(one, "gather"), head, lambda x: x,
                    config=config, run=models.Run(remat="none"), trunk=trunk,
                )  # fmt: skip
                return jnp.sum(-logp * one.target[mtp.WEIGHT].astype(jnp.float64)), right

            return jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(w, hidden, embed, head)

        given = wide((w, hidden, params["embed"], models.head(params)))
        (total, right), grads = gradient(*given, trunk="trained")
        (alone, _), detached = gradient(*given, trunk="detached")
        named = lambda tree: dict(
            zip(*(tuple(x) for x in hf.tensors_of(layer_of.table(config), config.prefix, tree, "float64")), strict=True)
        )
        weights, got, got_detached = (named(jax.tree.map(np.asarray, x)) for x in (w, grads[0], detached[0]))

    leaf = lambda x: torch.tensor(np.asarray(x), dtype=torch.float64, requires_grad=True)
    reference = Paper(config, {name: leaf(x) for name, x in weights.items()})
    h, e, v = leaf(hidden[0]), leaf(params["embed"]), leaf(models.head(params))
    segments = np.asarray(one.segment_BT[0])
    rows = [np.flatnonzero(segments == j + 1) for j in range(3)]
    order = [data[int(i)] for i in np.asarray(one.sample_BJ[0, :3])]
    parts = [
        reference.loss(h[at], torch.tensor(s.tokens).long(), s.mask, e, v) for at, s in zip(rows, order, strict=True)
    ]
    wanted = sum(x for x, _ in parts) / sum(n for _, n in parts)
    wanted.backward()
    np.testing.assert_allclose(total, wanted.item(), rtol=1e-6)  # the weights of tokens are in fp32
    assert total == alone
    close = lambda a, b, name="": np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7 * np.abs(b).max(), err_msg=name)
    for name, x in reference.w.items():
        if "e_score_correction_bias" in name:
            assert x.grad is None and not got[name].any()
            continue
        close(got[name], x.grad.numpy(), name)
        assert np.array_equal(got[name], got_detached[name]), name
        assert got[name].any() or ".experts." in name, name  # an expert that no token needed
    close(grads[1][0], h.grad.numpy())
    close(grads[2], e.grad.numpy())
    close(grads[3], v.grad.numpy())
    assert not any(np.asarray(x).any() for x in detached[1:])
    assert set(np.unique(right)) == {0.0, 1.0} or not np.asarray(right).any()


def test_which_drafts_are_learnt():
    """Those of learnt tokens behind two others of their own sequence."""
    rng = np.random.default_rng(1)
    data = [demonstration(i, n, rng, 9) for i, n in enumerate((5, 1, 2, 3))]
    data = [s.replace(mask=np.arange(len(s.tokens)) > 0) for s in data]
    batch = packing.pack(data, 12, rows=1)
    found = np.asarray(mtp.drafted(jax.tree.map(lambda x: x[0], batch)))
    segments, sample_J = np.asarray(batch.segment_BT[0, 0]), np.asarray(batch.sample_BJ[0, 0])
    for j, i in enumerate(sample_J[:4].tolist()):
        n = len(data[i].tokens)
        assert found[0, segments == j + 1].tolist() == [0 < t < n - 1 for t in range(n)]
    assert found.sum() == 4 and not found[0, segments == 0].any()


@cache
def model(family: str):
    """(config with the layer, weights)."""
    config = models.with_mtp(models.config_from_hf(tiny_families.hf(family, num_nextn_predict_layers=1)))
    return config, tiny.weights(models.table(config), 0.3)


@partial(jax.jit, static_argnames=("config", "run", "trunk"))
def gradient(params, batch, config, run, trunk):
    """The log-probabilities of drafts of every microbatch, and the gradient of a weighted sum of them."""

    def one(params, batch):
        out = models.score(params, batch, config=config, run=run, learnt_only=True, drafts=trunk)
        learnt = jnp.where(mtp.drafted(batch), out.draft_logp_BT, 0)
        return jnp.sum(learnt * batch.logp_BT), (learnt, out.draft_right_BT)

    grads, out = jax.lax.map(partial(jax.grad(one, has_aux=True), params), batch)
    return jax.tree.map(lambda x: x.sum(0), grads), *out


def close_trees(got, wanted, tolerance):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        size = np.abs(np.asarray(b)).max()
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= tolerance * max(size, 1e-2), jax.tree_util.keystr(path)


CASES = [
    pytest.param("glm4_moe", marks=pytest.mark.slow),
    *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3_next", "deepseek_v3")),
]


@pytest.mark.parametrize("family", CASES)
def test_packed_rows_and_tries_are_sequences_of_their_own(family):
    """In float64, with gradients of the trunk; without them these are exactly 0."""
    config, params = model(family)
    data = forks.samples(shared=13 if models.trie_alignment(config) == 1 else 90)
    rows, tries = forks.batches(config, data)
    single = [packing.pack([s], rows.token_BT.shape[-1], rows=1) for s in data]
    alone = jax.tree.map(lambda *x: jnp.concatenate(x), *single)  # a microbatch each
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
        found = [gradient(params, batch, config, RUN, "trained") for batch in (rows, tries, alone)]
        detached = gradient(params, rows, config, RUN, "detached")
    by = [forks.by_sample(x[1], batch) for x, batch in zip(found, (rows, tries), strict=False)]
    for i, s in enumerate(data):
        wanted = np.asarray(found[2][1])[i, 0, : len(s.tokens)]
        assert (wanted != 0).sum() == s.mask[2:].sum()
        for got in by:
            np.testing.assert_allclose(got[i], wanted, atol=1e-9, rtol=1e-9)
    for got in found[:2]:
        close_trees(got[0], found[2][0], 1e-9)
    own = detached[0].pop("mtp")
    close_trees(own, found[0][0]["mtp"], 1e-12)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(detached[0]))
    assert all(np.asarray(x).any() for name, x in own["stacks"][0].items() if name != "router_bias")
    np.testing.assert_allclose(detached[1], found[0][1], rtol=1e-12)


MESHES = {
    "dp2 cp2 tp2": ("glm4_moe", mesh.Layout(dp=2, cp=2, tp=2), models.Run(remat="dots"), False),
    "fsdp2 ep2 cp2 ring": ("deepseek_v3", mesh.Layout(fsdp=2, ep=2, cp=2), models.Run(remat="full", cp="ring"), False),
    "fsdp2 cp2 tp2 tries": ("glm4_moe", mesh.Layout(fsdp=2, cp=2, tp=2), models.Run(cp="ulysses"), True),
    "cp4 tp2 delta nets": ("qwen3_next", mesh.Layout(cp=4, tp=2), models.Run(), False),
}


@pytest.mark.mesh
@pytest.mark.sweep
@pytest.mark.parametrize("name", MESHES)
def test_drafts_are_the_same_on_a_mesh(name):
    family, layout, run, shared = MESHES[name]
    config, params = model(family)
    data = forks.samples(shared=13 if models.trie_alignment(config) == 1 else 90)
    batch = forks.batches(config, data)[shared]
    wanted = gradient(params, batch, config, dataclasses.replace(run, cp="gather"), "trained")
    on = mesh.make(layout)
    with jax.set_mesh(on):
        placed = jax.device_put(params, rules.of_params(models.table(config), on))
        got = gradient(placed, batches.batch(batch, on), config, run, "trained")
    np.testing.assert_allclose(batches.host(got[1]), wanted[1], atol=2e-4)
    assert np.mean(np.asarray(batches.host(got[2])) != np.asarray(wanted[2])) < 0.01
    close_trees(jax.tree.map(batches.host, got[0]), wanted[0], 2e-4)


def test_what_has_no_layer_is_refused():
    with pytest.raises(ValueError, match="must have a layer for multi-token prediction, .* got qwen3 without; leave"):
        models.with_mtp(models.config_from_hf(tiny_families.hf("qwen3")))
    with pytest.raises(ValueError, match="got glm4_moe without"):
        models.with_mtp(models.config_from_hf(tiny_families.hf("glm4_moe")))


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(coef=-1.0), "MTP: coef must be at least 0 and finite, got -1.0"),
        (dict(coef=float("inf")), "coef must be at least 0 and finite"),
        (dict(trunk="trained"), "MTP: trunk must be left out without a coef, got trained"),
        (dict(coef=1.0, trunk="frozen"), "MTP: trunk must be detached or trained, got frozen"),
    ],
)
def test_options_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        mtp.MTP(**given)


def test_an_objective_without_the_loss_stays_as_it_is():
    objective = losses.SFT()
    assert mtp.wrap(objective, mtp.MTP()) is objective
    assert "minimised" in str(mtp.wrap(objective, mtp.MTP(0.1)))
