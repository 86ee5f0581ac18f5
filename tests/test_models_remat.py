"""What a layer keeps for its backward pass changes memory and time, not numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from sweeps import thinned

from areax import models
from areax.models import remat

TINY = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, initializer_range=0.3, tie_word_embeddings=True,
)  # fmt: skip
FAMILIES = {
    "qwen3": TINY,
    "qwen2": TINY | dict(use_sliding_window=True, sliding_window=5, max_window_layers=0),
    "qwen3_moe": TINY | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
}
T = 40
POLICIES = ["full", "dots", "offload", (("qkv", "save"), ("attention", "offload")), (("layer_input", "offload"),)]
CASES = [("qwen2", POLICIES), ("qwen3_moe", POLICIES[:-1])]


def model(family):
    config = models.config_from_hf(FAMILIES[family] | {"model_type": family})
    return config, tiny.weights(models.table(config), 0.3)


def loss(params, config, keep):
    token_BT = np.random.default_rng(0).integers(0, 64, (2, T))
    segment_BT = np.tile(np.repeat([1, 2, 0], [13, 21, 6]), (2, 1)).astype(np.int32)
    run = models.Run(remat=keep)
    logits_BTV = models.forward(params, token_BT, config=config, segment_BT=segment_BT, run=run)
    return jnp.mean(jnp.square(jax.nn.log_softmax(logits_BTV)) * (segment_BT > 0)[..., None])


@pytest.mark.long
@pytest.mark.parametrize("family, policies", thinned(CASES, 2, pytest.mark.slow), ids=["qwen2", "qwen3_moe"])
def test_loss_and_gradients_are_the_same(family, policies):
    with jax.enable_x64(True):  # so that what differs is not rounding
        config, params = model(family)
        params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
        step = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))
        wanted, reference = step(params, config, "none")
        for keep in policies:
            got, gradient = step(params, config, keep)
            np.testing.assert_allclose(got, wanted, rtol=1e-12, err_msg=str(keep))
            for (path, a), b in zip(
                jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(reference), strict=True
            ):
                scale = float(np.abs(b).max())
                assert scale > 0
                assert np.abs(a - b).max() <= 1e-10 * scale, (keep, jax.tree_util.keystr(path))


def kept(keep):
    """{(numbers a token, memory): how many arrays} of what the layers of a dense model keep."""
    config, params = model("qwen3")
    program = jax.make_jaxpr(lambda params: jax.vjp(lambda p: loss(p, config, keep), params))(params)
    found = {}
    for x in program.out_avals:
        width, rest = divmod(int(np.prod(x.shape[1:])), 2 * T)
        if x.shape[:1] == (config.layers,) and not rest:  # weights are not multiples of the tokens
            key = width, x.memory_space.name.lower()
            found[key] = found.get(key, 0) + 1
    return found


def test_which_activations_are_saved():
    """Widths: 32 the layer's input, q, attention's output and its projection; 16 k and v; 48 gate and up; 4 the
    log-sum-exp of each head."""
    assert kept("full") == {(32, "device"): 1}
    dots = {32: 4, 16: 2, 48: 2, 4: 1}
    assert kept("dots") == {(width, "device"): count for width, count in dots.items()}
    assert kept("offload") == {(width, "host"): count for width, count in dots.items()}
    assert kept((("mlp_gate_up", "save"),)) == {(32, "device"): 1, (48, "device"): 2}
    assert kept((("layer_input", "offload"),)) == {(32, "host"): 1}


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("keep, loops", [("full", 3), ("dots", 2), ((("mlp_gate_up", "save"),), 2), ("none", 2)])
def test_experts_are_recomputed_unless_their_activations_are_saved(keep, loops):
    """Loops over pieces, of which there are four sizes: forward, backward, and forward once more."""
    config, params = model("qwen3_moe")
    program = jax.make_jaxpr(jax.grad(loss), static_argnums=(1, 2))(params, config, keep)
    assert str(program).count("while[") == 4 * loops


@pytest.mark.parametrize(
    "keep, words",
    [
        ((("mlp", "save"),), "names must be distinct and among layer_input, qkv, attention, "),
        ((("qkv", "save"), ("qkv", "offload")), "names must be distinct and among .*, got qkv, qkv"),
        ((("qkv", "of-load"),), "places must be save or offload, got of-load"),
        ("dost", "must be one of auto, full, dots, none, offload, or pairs .*, got 'dost'"),
    ],
)
def test_meaningless_policies_are_refused(keep, words):
    with pytest.raises(ValueError, match=f"remat: {words}"):
        remat.checkpoint(keep)
