"""LoRA adapters by name in the engine: each request uses its own, whichever its neighbours in the batch use."""

import dataclasses
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from areax import models
from areax.adapters import peft
from areax.models import lora
from areax.rollout.engine import adapters
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.programs import staging
from areax.rollout.engine.request import Request, Sampling

CONFIG = models.config_from_hf(
    dict(
        model_type="qwen3", vocab_size=61, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=20, tie_word_embeddings=True, eos_token_id=7,
        max_position_embeddings=256,
    )
)  # fmt: skip
BASE, OTHER = (tiny.weights(models.table(CONFIG), 0.3, seed) for seed in (0, 1))
SPEC = lora.Lora(rank=3, alpha=5, rslora=True)
NAMES = ("a", "b", "c", "d")  # more than the initial number of adapter slots
ADAPTERS = {name: tiny.weights(lora.table(models.table(CONFIG), SPEC), 0.2, i) for i, name in enumerate(NAMES)}


def served(**options):
    return Engine(CONFIG, BASE, slots=4, context=128, steps=4, **options)


def ask(rid, name="", n=12, prompt=(5, 17, 42), **more):
    sampling = Sampling(max_new_tokens=n, ignore_eos=True, seed=3, **more)
    return Request(rid, tuple(prompt), sampling, adapter=name)


def same(a, b):
    """Bit for bit."""
    return a.tokens == b.tokens and a.logp == b.logp and a.input_logp == b.input_logp


@jax.jit
def logp_of(params, token_T):
    return jax.nn.log_softmax(models.forward(params, token_T[None], config=CONFIG)[0])


def check(done, name="", base=BASE, prompt=(5, 17, 42)):
    """Asserts the log-probabilities of the adapter over the base, computed by the training forward pass."""
    params = lora.join(base, ADAPTERS[name], SPEC) if name else base
    ids = np.zeros(64, np.int32)
    ids[: len(prompt) + len(done.tokens)] = [*prompt, *done.tokens]
    logp_TV = np.asarray(logp_of(params, ids))
    wanted = [logp_TV[len(prompt) + i - 1, token] for i, token in enumerate(done.tokens)]
    np.testing.assert_allclose(done.logp, wanted, atol=1e-4)


POOL = [
    dataclasses.replace(
        ask(f"{name}{i}", name, (3, 9, 20)[i], ((5,), (5, 17, 42), range(8, 40))[i], temperature=(1.0, 0, 0.7)[i]),
        input_logprobs_from=0 if i == 2 else None,
    )
    for name in ("", *NAMES)
    for i in range(3)
]  # fmt: skip


@pytest.fixture(scope="module")
def alone():
    """Each request of the pool served alone; those without an adapter on an engine without adapters."""
    with served() as engine:
        results = {r.rid: engine.generate([r])[0] for r in POOL if not r.adapter and engine.flush()}
        for name in NAMES:
            engine.load_adapter(name, SPEC, ADAPTERS[name])
            results |= {r.rid: engine.generate([r])[0] for r in POOL if r.adapter == name and engine.flush()}
            engine.unload_adapter(name)
    return results


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_loading_an_adapter_changes_no_bit_of_requests_without_one(dtype, monkeypatch):
    monkeypatch.setattr(staging, "LEAST", 1)  # weights of this size in blocks, as large ones are
    base = jax.tree.map(lambda x: jnp.asarray(x, dtype), BASE)
    with Engine(CONFIG, base, slots=2, context=64, steps=4) as engine:
        before = engine.generate([ask("before")])[0]
        engine.load_adapter("a", SPEC, ADAPTERS["a"])
        assert same(engine.generate([ask("after")])[0], before)
        engine.flush()
        assert same(engine.generate([ask("again"), ask("beside", "a")])[0], before)


@pytest.mark.long
@settings(max_examples=5)
@given(st.permutations(POOL), st.permutations(NAMES))
def test_samples_do_not_depend_on_the_adapters_of_neighbours(alone, requests, names):
    with served() as engine:
        for name in names:
            engine.load_adapter(name, SPEC, ADAPTERS[name])
        done = engine.generate(requests)
    assert all(same(progress, alone[progress.rid]) for progress in done)


@pytest.mark.slow
def test_each_request_uses_its_own_adapter_over_the_current_base(alone):
    for request in POOL:
        if request.sampling.temperature != 0.7:  # greedy requests report log-probabilities at temperature 1
            check(alone[request.rid], request.adapter, prompt=request.prompt)
    with served() as engine:
        engine.load_adapter("a", SPEC, ADAPTERS["a"])
        first, *again = [engine.generate([ask(str(i), name)])[0] for i, name in enumerate(["a", "", "a", ""])]
        assert [progress.cached_tokens for progress in (first, *again)] == [0, 0, 2, 2]  # cached per adapter
        for progress, name in zip((first, *again), ("a", "", "a", ""), strict=True):
            check(progress, name)
        engine.load(OTHER, "1")
        done = engine.generate([ask("5", "a")])[0]
        check(done, "a", OTHER)
        assert done.versions == [("1", 0, 12)]


@pytest.mark.slow
def test_published_adapters_of_fused_modules_are_served(tmp_path):
    """Phi 3's parts of qkv_proj and gate_up_proj, from a directory in PEFT's form."""
    config = models.config_from_hf(json.loads(CONFIG.source) | dict(model_type="phi3", tie_word_embeddings=False))
    base = tiny.weights(models.table(config), 0.3)
    drawn = tiny.weights(lora.table(models.table(config), SPEC), 0.2, 1)
    path = peft.write_published(tmp_path, 3, config, drawn, SPEC, "base", "label")
    with Engine(config, base, slots=2, context=128, steps=4) as engine:
        engine.load_adapter("a", *peft.load(path, config))
        done = engine.generate([ask("1", "a")])[0]
    logits_TV = models.forward(lora.join(base, drawn, SPEC), np.array([[5, 17, 42, *done.tokens]]), config=config)[0]
    logp_TV = jax.nn.log_softmax(logits_TV[2:-1])
    np.testing.assert_allclose(done.logp, logp_TV[np.arange(12), np.array(done.tokens)], atol=1e-4)


@pytest.mark.slow
def test_adapters_of_latent_attention_are_absorbed_as_its_weights_are():
    """Decoding applies the part of an adapter that makes keys to queries, and the part that makes values to outputs."""
    config = models.config_from_hf(
        dict(
            model_type="deepseek_v3", vocab_size=61, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=3, q_lora_rank=14, kv_lora_rank=18, qk_nope_head_dim=10, qk_rope_head_dim=6,
            v_head_dim=12, first_k_dense_replace=2, max_position_embeddings=256,
        )
    )  # fmt: skip
    spec = lora.Lora(rank=3, alpha=5, targets=("kv_up",))
    base = tiny.weights(models.table(config), 0.3)
    drawn = tiny.weights(lora.table(models.table(config), spec), 0.4, 1)
    with Engine(config, base, slots=2, context=128, steps=4) as engine:
        engine.load_adapter("a", spec, drawn)
        plain, adapted = engine.generate([ask("1"), ask("2", "a")])
    assert plain.tokens != adapted.tokens
    for done, params in ((plain, base), (adapted, lora.join(base, drawn, spec))):
        logits_TV = models.forward(params, np.array([[5, 17, 42, *done.tokens]]), config=config)[0]
        logp_TV = jax.nn.log_softmax(logits_TV[2:-1])
        np.testing.assert_allclose(done.logp, logp_TV[np.arange(12), np.array(done.tokens)], atol=1e-4)


@pytest.mark.slow
def test_loading_and_unloading_do_not_affect_running_requests():
    begun, ended, done = threading.Event(), threading.Event(), []

    def tell(progress):
        begun.set()
        if progress.finish:
            done.append(progress)
            ended.set()

    with served() as engine:
        engine.load_adapter("a", SPEC, ADAPTERS["a"])
        engine.submit(ask("long", "a", n=60, prompt=(5,)), tell)
        begun.wait()
        for name in NAMES[1:]:  # more adapters than there were slots
            engine.load_adapter(name, SPEC, ADAPTERS[name])
        unloading = threading.Thread(target=engine.unload_adapter, args=("a",))
        unloading.start()
        while "a" in engine.adapters:
            pass
        with pytest.raises(ValueError, match="adapters: 'a' is not loaded; loaded are b, c, d"):
            engine.submit(ask("late", "a"), tell)
        assert unloading.is_alive() or ended.is_set()  # unloading waits for the request that uses it
        ended.wait()
        unloading.join()
        check(done[0], "a", prompt=(5,))
        engine.load_adapter("a", SPEC, ADAPTERS["b"])  # name and slot are free, and the old cache is gone
        check(engine.generate([ask("2", "a", prompt=(5,))])[0], "b", prompt=(5,))
        for name in NAMES:
            engine.unload_adapter(name)
        assert engine.adapters == {}
        check(engine.generate([ask("3")])[0])


def test_a_retracted_request_continues_with_its_adapter():
    with served() as engine:
        engine.load_adapter("a", SPEC, ADAPTERS["a"])
        begun, ended, done = threading.Event(), threading.Event(), []
        quiet = engine.generate([ask("quiet", "a", n=60, prompt=(5,))])[0]

        def tell(progress):
            begun.set()
            if progress.finish:
                done.append(progress)
                ended.set()

        engine.flush()
        engine.submit(ask("long", "a", n=60, prompt=(5,)), tell)
        begun.wait()
        engine.pause("retract")
        engine.resume()
        ended.wait()
        check(done[0], "a", prompt=(5,))
        assert done[0].tokens == quiet.tokens and done[0].retractions == 1


def test_layers_without_targets_have_no_factors():
    """In a mixture-of-experts model only whose first layer has a dense MLP."""
    config = models.config_from_hf(
        dict(
            model_type="qwen3_moe", vocab_size=61, hidden_size=8, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, head_dim=4, intermediate_size=6, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=6, mlp_only_layers=[0],
        )
    )  # fmt: skip
    base, spec = models.table(config), lora.Lora(rank=2, targets=("gate",))
    made = adapters.factors(spec, tiny.weights(lora.table(base, spec), 0.2), base, "bfloat16")
    assert [{name: (a.shape, b.shape) for name, (a, b) in layer.items()} for layer in made] == [
        {"gate": ((2, 8), (6, 2))}, {}, {},
    ]  # fmt: skip
    assert made[0]["gate"][0].dtype == "bfloat16"


def test_a_request_whose_logits_are_not_finite_fails_alone():
    """Whatever its neighbours got, and what gets its memory next, has the same bits as without it."""
    prompts = [tuple(range(i, i + 9)) for i in range(4)]
    with served() as engine:
        engine.load_adapter("a", SPEC, ADAPTERS["a"])
        engine.load_adapter("huge", SPEC, jax.tree.map(lambda x: x * 1e38, ADAPTERS["b"]))
        requests = [
            ask(str(i), name, 40, prompt) for i, (name, prompt) in enumerate(zip(["", "a"] * 2, prompts, strict=True))
        ]
        before = engine.generate(requests)
        broken = [ask("x", "huge", 40), dataclasses.replace(ask("y", "huge", 0), input_logprobs_from=0)]
        *mixed, x, y = engine.generate([*requests, *broken])
        after = engine.generate(requests)
    assert all(map(same, before, mixed)) and all(map(same, before, after))
    why = "adapter 'huge' on weights 'default': the logits are not finite; load others"
    assert x.finish == y.finish == {"type": "abort", "message": why, "status_code": 500}
    assert not x.tokens


def test_bad_adapters_and_names_are_refused():
    table = lora.table(models.table(CONFIG), lora.Lora(rank=2))
    with served() as engine:
        engine.load_adapter("a", SPEC, ADAPTERS["a"])
        with pytest.raises(ValueError, match="adapters: 'a' is loaded already"):
            engine.load_adapter("a", SPEC, ADAPTERS["a"])
        with pytest.raises(ValueError, match="must have the same rank and targets"):
            engine.load_adapter("b", lora.Lora(rank=2), tiny.weights(table, 0.2))
        with pytest.raises(ValueError, match="adapters: 'x' is not loaded; loaded are a"):
            engine.unload_adapter("x")
        with pytest.raises(ValueError, match="adapters: 'x' is not loaded; loaded are a"):
            engine.generate([ask("1", "x")])
        experts = {"stacks": [{"expert_up_a": np.zeros((2, 4, 3, 8)), "expert_up_b": np.zeros((2, 4, 8, 3))}]}
        with pytest.raises(ValueError, match="none for expert weights, got expert_up"):
            engine.load_adapter("b", SPEC, experts)
        dora = dataclasses.replace(SPEC, dora=True)
        with pytest.raises(ValueError, match="supports no DoRA adapters by name, got use_dora; load the merged"):
            engine.load_adapter("b", dora, tiny.weights(lora.table(models.table(CONFIG), dora), 0.2))
        assert list(engine.adapters) == ["a"]
        engine.unload_adapter("a")
        engine.load_adapter("b", lora.Lora(rank=2), tiny.weights(table, 0.2))  # none is loaded now
