"""Prompts with images: samples have the log-probabilities of training, and bits that do not depend on the schedule."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import tiny
import torch
import vlm

from areax import models
from areax.adapters import torch as torch_dicts
from areax.core import packing
from areax.models import paging, vision
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.request import Request, Sampling
from areax.rollout.types import Image, supervised

CONTEXT, PAGE = 96, 16
SIZES = {"slots": 4, "context": CONTEXT, "page": PAGE, "steps": 4}


def picture(seed, *grid):
    """An image that `Processor` knows."""
    return Image(json.dumps([grid, seed]).encode())


class Processor:
    """In place of a model's: random patches of small grids."""

    def media(self, image):
        grid, seed = json.loads(image.data)
        return vlm.media(tuple(grid), seed)


WIDE, SMALL, NARROW, OTHER = picture(0, 1, 6, 10), picture(1, 1, 4, 6), picture(2, 1, 2, 14), picture(3, 1, 6, 10)


def prompt(seed, *parts):
    """Tokens with these texts (their lengths) and images."""
    rng = np.random.default_rng(seed)
    tokens, images = [], []
    for part in parts:
        if isinstance(part, Image):
            grid, _ = json.loads(part.data)
            tokens += [vlm.START, *[vlm.IMAGE] * (grid[1] * grid[2] // 4), vlm.END]
            images.append(part)
        else:
            tokens += rng.integers(0, vlm.IMAGE, part).tolist()
    return tuple(tokens), tuple(images)


@functools.cache
def model(name, trained=True, seed=0):
    config = models.config_from_hf({"model_type": name, "architectures": ["Any"], **vlm.CASES[name]})
    config = dataclasses.replace(models.with_vision(config, trained), eos=(61,))
    return config, tiny.weights(models.table(config), 0.16, seed)


def engine_of(name, **options):
    config, params = model(name)
    return Engine(config, params, processor=Processor(), **SIZES | options)


def ask(rid, tokens, images=(), more=20, **fields):
    return Request(
        str(rid), tokens, Sampling(max_new_tokens=more, ignore_eos=True, seed=int(rid)), images=images, **fields
    )


def requests():
    """Two images, text alone, a narrow image first, one over several chunks, a group, the same text of another image,
    turns with one more image."""
    shared = prompt(4, 20, WIDE, 9)
    turns = shared[0] + prompt(5, 3, SMALL, 4)[0], (WIDE, SMALL)
    return [
        ask(i, *each)
        for i, each in enumerate([
            prompt(0, 3, WIDE, 2, SMALL, 4), prompt(1, 40), prompt(2, NARROW, 5), prompt(3, 11, WIDE, 17), shared,
            shared, (shared[0], (OTHER,)), turns, prompt(4, 20),
        ])
    ]  # fmt: skip


def same(a, b):
    """Bit for bit."""
    return a.tokens == b.tokens and a.logp == b.logp and a.input_logp == b.input_logp


@functools.partial(jax.jit, static_argnames="config")
def score(params, batch, config):
    return models.score(params, batch, config=config).logp_BT


def trained(config, params, tokens, images, prompt):
    """The log-probability of each token but the first `prompt` ones, as the trainer computes it. Image tokens behind
    them, which the model has sampled, are text."""
    plain = [*tokens[:prompt], *(0 if token in (vlm.IMAGE, vlm.VIDEO) else token for token in tokens[prompt:])]
    packed = lambda tokens: packing.pack([supervised(tokens[:1], tokens[1:])], CONTEXT, rows=1)
    seen = [Processor().media(image) for image in images]
    found = vision.attach(packed(plain), [seen], config.vision, patches=192).input
    batch = packed(tokens).replace(
        input={**packed(tokens).input, **{name: found[name] for name in vision.patches.NAMES if name in found}}
    )
    return np.asarray(score(params, jax.tree.map(lambda x: x[0], batch), config))[0, prompt - 1 : len(tokens) - 1]


@pytest.fixture(scope="module", params=vlm.CASES)
def alone(request):
    """(case, each request served alone)."""
    with engine_of(request.param) as engine:
        found = []
        for one in requests():
            engine.flush()
            found += engine.generate([one])
    return request.param, found


def test_log_probabilities_are_those_of_training(alone):
    name, found = alone
    config, params = model(name)
    for one, made in zip(requests(), found, strict=True):
        wanted = trained(config, params, [*one.prompt, *made.tokens], one.images, len(one.prompt))
        np.testing.assert_allclose(made.logp, wanted, atol=2e-5)


def unused(engine):
    """Whether every page is free, and no features are kept."""
    assert engine.flush() and not engine.device._features
    return all(of.free == of.count for of in engine._slots.cache.pages)


def test_samples_are_those_of_requests_alone_with_half_the_memory(alone):
    """In company and in another order, although requests share pages, lose theirs and get them back."""
    name, wanted = alone
    config, _ = model(name)
    kinds = paging.kinds(config.records, CONTEXT, PAGE, 4)
    counts = paging.counts(kinds, SIZES["slots"], CONTEXT, PAGE, 4, None)
    fixed = paging.size_of(kinds, [n * kind.limited for n, kind in zip(counts, kinds, strict=True)], SIZES["slots"])
    memory = (fixed + 0.4 * (paging.size_of(kinds, counts, SIZES["slots"]) - fixed)) / 1e9
    with engine_of(name, memory=memory) as engine:
        for order in (slice(None), slice(None, None, -1)):
            assert all(map(same, engine.generate(requests()[order]), wanted[order]))
        assert engine.stats()["preemptions"] > 0 and unused(engine)


def test_a_cached_prefix_is_that_of_the_same_image(alone):
    """Of another one as far as the text before it; with recurrent layers only the states behind prompts are kept."""
    name, wanted = alone
    begun = 0 if "qwen3_5" in name else PAGE
    with engine_of(name) as engine:
        asked = requests()
        engine.generate(asked[4:5])
        for i, cached in ((5, len(asked[4].prompt) - 1), (6, begun), (7, 2 * PAGE), (8, begun)):
            [made] = engine.generate(asked[i : i + 1])
            assert same(made, wanted[i]) and made.cached_tokens == cached
        assert unused(engine)


def encoded(engine):
    """The hashes of images that the engine encodes from now on."""
    found, encode = [], engine.device.operations["encode"]

    def counted(name, patches):
        found.append(name)
        encode(name, patches)

    engine.device.operations["encode"] = counted
    return found


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_a_group_encodes_its_images_once(name):
    tokens, images = prompt(9, 4, WIDE, 30, SMALL, 3)
    with engine_of(name) as engine:
        found = encoded(engine)
        engine.generate([ask(i, tokens, images, 5) for i in range(16)])
        assert sorted(found) == sorted(image.hash for image in images)
        engine.generate([ask(0, tokens, images, 5)])
        assert len(found) == 2 and not engine.device._features


def reference(name):
    """(model of transformers, config, weights)."""
    theirs = vlm.reference(name)
    config = models.with_vision(models.config_from_hf(theirs.config.to_dict()))
    return theirs, *torch_dicts.from_state_dict(config, theirs.state_dict())


@pytest.mark.parametrize("name", vlm.CASES)
def test_greedy_answers_are_those_of_transformers(name):
    theirs, config, params = reference(name)
    tokens, images = prompt(0, 3, WIDE, 2, SMALL, 4)
    given = vlm.inputs(np.array(tokens), [Processor().media(image) for image in images])
    given |= {"attention_mask": torch.ones_like(given["input_ids"]), "eos_token_id": None, "do_sample": False}
    wanted = theirs.generate(**given, max_new_tokens=16)[0, len(tokens) :].tolist()
    with Engine(config, params, processor=Processor(), **SIZES) as engine:
        greedy = Sampling(temperature=0, max_new_tokens=16, ignore_eos=True)
        assert engine.generate([Request("a", tokens, greedy, images=images)])[0].tokens == wanted
