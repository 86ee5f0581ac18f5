"""Models over tries: scores, losses and gradients are those of rows, where every sample has its own tokens."""

from functools import cache, partial

import forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_families
from sweeps import thinned

from areax import models
from areax.core import balance, losses, packing, step
from areax.core.critic import Critic
from areax.core.distill import Distill
from areax.models import frozen

RUN = models.Run(remat="dots")
KINDS = "qwen3", "gpt_oss", "qwen3_next", "nemotron_h", "deepseek_v3", "gemma4_text"  # one of each kind of layer
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

    added = jax.tree.map(jnp.zeros_like, params)
    outs = []
    for i in range(batch.token_BT.shape[0]):
        micro = jax.tree.map(lambda x: x[i], batch)
        grad, out = jax.grad(one, has_aux=True)(params, micro)
        added = jax.tree.map(jnp.add, added, grad)
        outs.append(out)
    aux = jax.tree.map(lambda *parts: sum(parts), *(out.aux for out in outs))
    return added, jax.tree.map(lambda *parts: jnp.stack(parts), *(out_without_aux(out) for out in outs)), aux


def out_without_aux(out):
    return {name: getattr(out, name) for name in ("logp_BT", "entropy_BT", "lse_BT", "value_BT")}


def close(got, wanted, scale: float = 1e-5):
    """Each leaf within `scale` of its largest value."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    for (path, a), b in pairs:
        size = float(np.abs(b).max())
        assert np.isfinite(a).all() and size > 0, jax.tree_util.keystr(path)
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= scale * max(size, 1e-2), jax.tree_util.keystr(path)


def same_scores(family: str, run=RUN, data=None, **changes):
    config, params = model(family, **changes)
    rows, tries = forks.batches(config, data or forks.samples())
    assert tries.trie.first_BT.size < rows.token_BT.size
    (g_rows, rows_out, aux), (g_tries, tries_out, aux_tries) = (
        gradient(params, batch, config, run) for batch in (rows, tries)
    )
    for name, wanted in rows_out.items():
        wanted, got = forks.by_sample(wanted, rows), forks.by_sample(tries_out[name], tries)
        assert set(wanted) == set(got) == set(range(16))
        for i, x_T in wanted.items():
            here = slice(None) if name == "value_BT" else slice(-1)  # nothing follows the last token
            np.testing.assert_allclose(got[i][here], x_T[here], atol=2e-5, rtol=2e-5, err_msg=f"{name} of {i}")
    close(aux_tries, aux)
    close(g_tries, g_rows, 2e-5)


@pytest.mark.parametrize("family", KINDS)
def test_scores_and_gradients_are_those_of_rows(family):
    same_scores(family)
