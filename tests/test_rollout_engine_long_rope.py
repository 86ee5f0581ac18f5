"""Rope that depends on a sequence's length, in the engine: each token is that of transformers' pass over the sequence
as long as it is then."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
import transformers

from areax import models
from areax.adapters import hf
from areax.core import packing, param
from areax.models import paging
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.request import Request, Sampling
from areax.rollout.types import supervised

SWITCH, CONTEXT, NEW = 24, 64, 20
HF = dict(
    model_type="phi3", vocab_size=89, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=96, original_max_position_embeddings=SWITCH, initializer_range=0.2,
    eos_token_id=7, pad_token_id=None, tie_word_embeddings=False, sliding_window=None,
    rope_parameters={
        "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.5, 1.2],
        "long_factor": [2.0, 3.0, 4.0],
    },
)  # fmt: skip
CONFIG = models.config_from_hf(HF)
PARAMS = tiny.weights(models.table(CONFIG), 0.2)
LENGTHS = (1, 9, SWITCH - 1, SWITCH, SWITCH + 1, 40)
ASKED = [tuple(np.random.default_rng(n).integers(8, 89, n).tolist()) for n in LENGTHS]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = hf.save(tmp_path_factory.mktemp("phi") / "model", CONFIG, PARAMS)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def logp_TV(theirs, tokens):
    """Of a pass over the whole sequence."""
    with torch.no_grad():
        logits = theirs(torch.tensor([tokens]), attention_mask=None, use_cache=False).logits[0]
    return torch.log_softmax(logits, -1).numpy()


def requests(**options):
    sampling = lambda i: Sampling(1.0, max_new_tokens=NEW, ignore_eos=True, seed=i)
    return [Request(str(i), prompt, sampling(i), **options) for i, prompt in enumerate(ASKED)]


@functools.cache
def made(draft: int):
    """What an engine with room for all gives, and its engine's counts."""
    with Engine(CONFIG, PARAMS, slots=3, context=CONTEXT, page=16, draft=draft) as engine:
        return engine.generate(requests(input_logprobs_from=0)), engine.stats()


def same(one, other):
    assert (one.tokens, one.logp) == (other.tokens, other.logp)


def test_logprobs_are_those_of_a_pass_over_the_sequence_so_far(theirs):
    for prompt, done in zip(ASKED, made(1)[0], strict=True):
        whole = [*prompt, *done.tokens]
        for n, logp in enumerate(done.logp, len(prompt)):
            np.testing.assert_allclose(logp, logp_TV(theirs, whole[:n])[-1, whole[n]], atol=2e-5)
        of_prompt = logp_TV(theirs, prompt)[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(done.input_logp[1:], of_prompt, atol=2e-5)
        # The other choice would be far off: after the switch, it is that of a pass over the whole, before it is not.
        logp = logp_TV(theirs, whole)[np.arange(len(whole) - 1), whole[1:]][len(prompt) - 1 :]
        crosses = max(0, SWITCH + 1 - len(prompt))
        np.testing.assert_allclose(done.logp[crosses:], logp[crosses:], atol=2e-5)
        if crosses > 1 and len(whole) > SWITCH:
            assert np.abs(done.logp[:crosses] - logp[:crosses]).max() > 0.05


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(theirs):
    """Whose `generate` computes the cache again where a sequence gets longer than the switch."""
    with Engine(CONFIG, PARAMS, slots=3, context=CONTEXT, page=16) as engine:
        greedy = [Request(str(i), p, Sampling(0.0, max_new_tokens=NEW, ignore_eos=True)) for i, p in enumerate(ASKED)]
        for prompt, done in zip(ASKED, engine.generate(greedy), strict=True):
            ids, every = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.long)
            ids = theirs.generate(
                ids, attention_mask=every, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=88 + 1
            )
            assert done.tokens == ids[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_training_scores_a_sequence_as_the_engine_does_beyond_the_switch():
    """In packed rows of short and long sequences."""
    rows = [
        supervised(prompt, done.tokens, sample=i)
        for i, (prompt, done) in enumerate(zip(ASKED, made(1)[0], strict=True))
    ]
    batch = packing.pack(rows, 96, rows=4)
    out = models.score(PARAMS, jax.tree.map(lambda x: x[0], batch), config=CONFIG)
    for prompt, done, logp in zip(ASKED, made(1)[0], packing.unpack(out.logp_BT[None], batch, rows), strict=True):
        first = 0 if len(prompt) + NEW <= SWITCH else max(0, SWITCH + 1 - len(prompt))
        np.testing.assert_allclose(done.logp[first:], logp[len(prompt) :][first:], atol=2e-5)


@pytest.mark.slow
def test_neighbours_drafts_and_little_memory_change_no_bit():
    alone = made(1)[0]
    with Engine(CONFIG, PARAMS, slots=3, context=CONTEXT, page=16) as engine:
        for request, beside in zip(requests(), alone, strict=True):
            same(engine.generate([request])[0], beside)
        # A group shares its prompt on either side of the switch.
        sampling = Sampling(1.0, max_new_tokens=NEW, ignore_eos=True, seed=1)
        for one in engine.generate([Request(str(i), ASKED[1], sampling) for i in range(3)]):
            same(one, alone[1])
    drafted, counts = made(4)
    assert counts["drafted"] > 0
    for one, other in zip(drafted, alone, strict=True):
        same(one, other)
    kinds = paging.kinds(CONFIG.records, CONTEXT, 16, 4)
    memory = paging.size_of(kinds, [5], 3) / 1e9  # pages for one sequence and a quarter
    with Engine(CONFIG, PARAMS, slots=3, context=CONTEXT, page=16, memory=memory) as engine:
        for one, other in zip(engine.generate(requests()), alone, strict=True):
            same(one, other)
        assert engine.stats()["preemptions"] > 0 and engine.flush()
        assert all(of.free == of.count for of in engine._slots.cache.pages)


@pytest.mark.slow
def test_a_request_that_goes_on_from_its_tokens_so_far_gives_the_same():
    with Engine(CONFIG, PARAMS, slots=3, context=CONTEXT, page=16) as engine:
        whole = made(1)[0][1]
        for done in (SWITCH - len(ASKED[1]), SWITCH - len(ASKED[1]) + 1):  # as long as the switch, and longer
            sampling = Sampling(1.0, max_new_tokens=NEW - done, ignore_eos=True, seed=1)
            again = engine.generate([Request("again", (*ASKED[1], *whole.tokens[:done]), sampling)])[0]
            assert again.tokens == whole.tokens[done:]
            np.testing.assert_allclose(again.logp, whole.logp[done:], atol=2e-5)


def test_decoding_with_dynamic_rope_ends_where_it_would_scale():
    options = dict(original_max_position_embeddings=4096, rope_parameters=None)
    source = {**HF, "model_type": "llama", **options, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    config = models.config_from_hf(source)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), param.abstract(models.table(config)))
    with pytest.raises(
        ValueError,
        match="Engine: context must be at most max_position_embeddings, 96 tokens, with dynamic rope, .* got 97",
    ):
        Engine(config, params, slots=1, context=97)
    Engine(config, params, slots=1, context=96).close()
