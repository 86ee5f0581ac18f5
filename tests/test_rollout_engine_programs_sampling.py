import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from areax.rollout.engine.programs import sampling

choose = jax.jit(sampling.choose)
filtered = jax.jit(sampling.filtered)


def controls(rows, seed=0, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0):
    full = lambda value, dtype: jnp.full((rows,), value, dtype)
    seed_S2 = jnp.stack([full(0, jnp.uint32), full(seed, jnp.uint32)], -1)
    return sampling.Controls(
        seed_S2, full(temperature, "float32"), full(top_k, "int32"), full(top_p, "float32"), full(min_p, "float32")
    )


def draw(logits_V, rows, banned=(), top=0, **how):
    """Tokens and log-probabilities of `rows` draws, at positions 0, 1, ... of one random stream."""
    logits_SV = jnp.broadcast_to(jnp.asarray(logits_V, jnp.float32), (rows, len(logits_V)))
    banned_SE = jnp.broadcast_to(jnp.asarray([*banned, len(logits_V)], jnp.int32), (rows, len(banned) + 1))
    out = choose(logits_SV, jnp.arange(rows), banned_SE, controls(rows, **how), jnp.full((rows,), top))
    return [np.asarray(x) for x in out]


def probabilities(logits_V, temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, banned=()):
    """The filtered distribution, computed by sorting in float64."""
    x = np.asarray(logits_V, np.float64) / temperature
    x[list(banned)] = -np.inf
    p = np.exp(x - x.max())
    order = np.argsort(-p)
    keep = np.ones(len(p), bool)
    if top_k > 0:
        keep &= p >= p[order[min(top_k, len(p)) - 1]]
    p = np.where(keep, p, 0) / p[keep].sum()
    if top_p < 1:
        mass, needed = 0.0, []
        for i in order:
            if mass >= top_p:
                break
            mass += p[i]
            needed.append(i)
        p = np.where(p >= p[needed].min(), p, 0)
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


LOGITS = np.random.default_rng(0).normal(size=12) * 1.5


@pytest.mark.sweep
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 6, "top_p": 0.7, "min_p": 0.1},
        {"banned": (0, 3)},
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_filtered_distribution(how):
    rows = 20000
    token_S, logp_S, *_ = draw(LOGITS, rows, **how)
    expected_V = probabilities(LOGITS, **how) * rows
    seen_V = np.bincount(token_S, minlength=len(LOGITS))
    assert (seen_V[expected_V == 0] == 0).all()
    kept = expected_V > 0
    assert scipy.stats.chisquare(seen_V[kept], expected_V[kept]).pvalue > 1e-3
    # ... but the logprobs are those before bans and filters
    plain_V = np.log(probabilities(LOGITS, how.get("temperature", 1.0)))
    np.testing.assert_allclose(logp_S, plain_V[token_S], atol=1e-5)


@pytest.mark.parametrize(
    "how", [{"top_p": 0.8}, {"temperature": 1.3, "top_p": 0.7, "min_p": 0.1}, {"top_p": 0.9, "banned": (0, 3)}], ids=str
)
def test_rows_report_the_tokens_they_could_draw(how):
    """Against the filtered distribution in float64; rows that do not ask draw what they drew."""
    rows, V, top_k = 20000, len(LOGITS), 6
    how, banned = {name: value for name, value in how.items() if name != "banned"}, how.get("banned", ())
    logits_SV = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (rows, V))
    banned_SE = jnp.broadcast_to(jnp.asarray([*banned, V], jnp.int32), (rows, len(banned) + 1))
    masked_S = jnp.arange(rows) % 4 > 0
    given = logits_SV, jnp.arange(rows), banned_SE, controls(rows, top_k=top_k, **how), jnp.zeros(rows, jnp.int32)
    token_S, logp_S, *_ = choose(*given)
    got_S, got_logp_S, _, _, kept_SK, kept_logp_S = map(np.asarray, choose(*given, masked_S=masked_S))
    expected_V = probabilities(LOGITS, top_k=top_k, banned=banned, **how)
    kept = np.flatnonzero(expected_V)
    np.testing.assert_array_equal(
        kept_SK[masked_S], np.tile(np.pad(kept, (0, V - len(kept)), constant_values=-1), (15000, 1))
    )
    assert (kept_SK[~masked_S] == -1).all() and (kept_logp_S[~masked_S] == 0).all()
    np.testing.assert_allclose(kept_logp_S[masked_S], np.log(expected_V[got_S[masked_S]]), atol=1e-6)
    np.testing.assert_array_equal(got_S, token_S)  # the same noise over the same tokens
    np.testing.assert_array_equal(got_logp_S, logp_S)
    assert scipy.stats.chisquare(np.bincount(got_S, minlength=V)[kept], expected_V[kept] * rows).pvalue > 1e-3


def test_a_mask_has_no_more_than_top_k_tokens_where_several_tie():
    logits_SV = jnp.zeros((500, 12)).at[:, 7].set(1)
    given = jnp.arange(500), jnp.full((500, 1), 12), controls(500, top_k=4, top_p=0.99), jnp.zeros(500, jnp.int32)
    token_S, _, _, _, kept_SK, logp_S = map(np.asarray, choose(logits_SV, *given, masked_S=jnp.ones(500, bool)))
    np.testing.assert_array_equal(kept_SK, np.tile([0, 1, 2, 7, *[-1] * 8], (500, 1)))
    assert {*token_S.tolist()} == {0, 1, 2, 7}
    np.testing.assert_allclose(logp_S, np.where(token_S == 7, 1, 0) - np.log(3 + np.e), atol=1e-6)


@pytest.mark.parametrize("V", [7, 3001])
def test_the_call_of_cpus_draws_what_xla_draws(V, compiled):
    rng, S = np.random.default_rng(0), 96
    logits_SV = jnp.asarray(rng.normal(size=(S, V)) * 3, jnp.float32).at[5, 2].set(-jnp.inf)
    some = lambda *values: jnp.asarray(rng.choice(values, S), jnp.float32)
    seed_S2 = jnp.asarray(rng.integers(0, 1 << 32, (S, 2)), jnp.uint32)
    top_k_S = some(-1, 1, 5, 50).astype(jnp.int32)
    mixed = sampling.Controls(seed_S2, some(0, 0.7, 1.3), top_k_S, some(1, 0.9, 0.3), some(0, 0.1))
    index_S, active_S = jnp.asarray(rng.integers(0, 1 << 20, S), jnp.int32), jnp.asarray(rng.random(S) < 0.9)
    open_SV = logits_SV.at[:, 1].set(-jnp.inf)
    token_S, *others = sampling._by_call(logits_SV, open_SV, mixed, index_S, active_S)
    expected_S, *rest = sampling._by_xla(logits_SV, open_SV, mixed, index_S, active_S)
    np.testing.assert_array_equal(token_S, np.where(active_S, expected_S, 0))
    for x_S, y_S in zip(others, rest, strict=True):
        np.testing.assert_allclose(x_S, np.where(active_S, y_S, 0), atol=5e-6)


@pytest.mark.slow
def test_greedy_takes_the_first_maximum_with_its_logprob_at_temperature_1():
    logits_V = [0.5, 2.0, -1.0, 2.0]
    token_S, logp_S, *_ = draw(logits_V, 4, temperature=0.0, top_k=1)
    assert (token_S == 1).all()
    np.testing.assert_allclose(logp_S, np.log(probabilities(logits_V))[1], atol=1e-6)
    assert (draw(logits_V, 4, temperature=0.0, banned=(1, 3))[0] == 0).all()


@settings(max_examples=60)
@given(
    logits=st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=9, max_size=9),  # with ties
    top_k=st.sampled_from([-1, 1, 2, 5, 9, 100]),
    top_p=st.sampled_from([0.01, 0.3, 0.77, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.4, 0.99]),
)
def test_filters_equal_filtering_by_sorting(logits, top_k, top_p, min_p):
    x_SV = jnp.asarray([logits], jnp.float32)
    kept = np.isfinite(np.asarray(filtered(x_SV, controls(1, top_k=top_k, top_p=top_p, min_p=min_p)))[0])
    sure = probabilities(logits, 1.0, top_k, min(1.0, top_p * (1 + 1e-6)), min_p * (1 - 1e-6)) > 0
    least = probabilities(logits, 1.0, top_k, top_p * (1 - 1e-6), min_p * (1 + 1e-6)) > 0
    assert (kept <= sure).all() and (kept >= least).all()


@pytest.mark.slow
def test_a_row_depends_on_its_own_logits_and_controls_only():
    rng = np.random.default_rng(1)
    S, V = 16, 300
    logits_SV = jnp.asarray(rng.normal(size=(S, V)) * 3, jnp.float32)
    index_S = jnp.asarray(rng.integers(0, 100, S), jnp.int32)
    banned_SE = jnp.asarray(np.where(rng.random((S, 3)) < 0.3, rng.integers(0, V, (S, 3)), V), jnp.int32)
    some = lambda values, dtype: jnp.asarray(rng.choice(values, S), dtype)
    mixed = sampling.Controls(
        jnp.asarray(rng.integers(0, 9, (S, 2)), jnp.uint32), some([0.0, 0.7, 1.0], "float32"),
        some([-1, 5, 50], "int32"), some([1.0, 0.9, 0.3], "float32"), some([0.0, 0.1], "float32"),
    )  # fmt: skip
    top_S = some([0, 3], "int32")
    whole = choose(logits_SV, index_S, banned_SE, mixed, top_S)
    for row in range(S):
        # the row alone, copied into every slot: branches that no row needs are skipped
        alone = jax.tree.map(
            lambda x, row=row: jnp.broadcast_to(x[row], x.shape), (logits_SV, index_S, banned_SE, mixed, top_S)
        )
        for together, single in zip(whole[:2], choose(*alone)[:2], strict=True):
            assert (np.asarray(single) == np.asarray(together)[row]).all()


@pytest.mark.slow
def test_top_logprobs_are_the_largest_log_softmax():
    _, _, logp_SK, id_SK = draw(LOGITS, 2, temperature=0.5, top=3, top_k=1)
    wanted_V = np.log(probabilities(LOGITS, 0.5))
    best = np.argsort(-wanted_V)
    assert (id_SK == best).all()
    np.testing.assert_allclose(logp_SK[0], wanted_V[best], atol=1e-5)


def test_noise_is_the_documented_random_stream():
    noise_SV = sampling.noise(jnp.asarray([[0, 7], [0, 7], [0, 8]], jnp.uint32), jnp.asarray([3, 4, 3]), 5)
    for row, (seed, index) in enumerate([(7, 3), (7, 4), (8, 3)]):
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index)
        np.testing.assert_array_equal(noise_SV[row], jax.random.gumbel(key, (5,)))


@pytest.mark.slow
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=20, max_size=20))
def test_ordered_bits_sort_as_floats(values):
    x = np.asarray(values, np.float32) + np.float32(0)  # -0 and 0 are equal, their bits are not
    bits = np.asarray(sampling.ordered(jnp.asarray(x)))
    assert ((x[:, None] < x) == (bits[:, None] < bits)).all()


def test_the_likeliest_by_turns_are_those_of_a_sort():
    """With ties, also between -inf, and with fewer values than are asked for in turn."""
    x = np.random.default_rng(0).integers(-3, 3, (5, 40)).astype(np.float32)
    x[1], x[2, 7:], x[3, 20] = -np.inf, -np.inf, np.inf
    for K in (1, 20, 40):
        for found, wanted in zip(sampling.by_turns(x, K), jax.lax.top_k(x, K), strict=True):
            np.testing.assert_array_equal(found, wanted)
