"""Prompts with images: samples have the log-probabilities of training, and bits that do not depend on the schedule."""

import contextlib
import dataclasses
import functools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
import tiny
import torch
import vlm
from test_rollout_engine_pages import half_computed

from areax import models
from areax.adapters import torch as torch_dicts
from areax.core import packing
from areax.models import lora, mtp, paging, vision
from areax.rollout.engine import budget
from areax.rollout.engine.engine import Engine
from areax.rollout.engine.options import Options
from areax.rollout.engine.pictures import Pictures
from areax.rollout.engine.replicas import Replicas
from areax.rollout.engine.request import Request, Sampling
from areax.rollout.engine.slots import mesh_of
from areax.rollout.servers.engine_mesh import ONE_DEVICE, EngineMesh
from areax.rollout.types import Image, supervised

CONTEXT, PAGE = 96, 16
SIZES = {"slots": 4, "context": CONTEXT, "page": PAGE, "steps": 4}


def picture(seed, *grid):
    """An image that `Processor` knows."""
    return Image(json.dumps([grid, seed]).encode())


class Processor:
    """In place of a model's: random patches of small grids."""

    def count(self, image):
        return int(np.prod(json.loads(image.data)[0])) // 4

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


def engine_of(name, share=None, *, draft=1, mesh=ONE_DEVICE, **options):
    """An engine whose caches have this share of what its slots may need."""
    config, params = model(name)
    slots, memory = SIZES["slots"], 0.0
    if share is not None:
        kinds = paging.kinds(config.records, CONTEXT, PAGE, 4, mesh.tp)
        counts = paging.counts(kinds, slots, CONTEXT, PAGE, 4 * draft, None)
        fixed = paging.size_of(kinds, [n * kind.limited for n, kind in zip(counts, kinds, strict=True)], slots)
        memory = (fixed + share * (paging.size_of(kinds, counts, slots) - fixed)) / 1e9
    sizes = SIZES | {"memory": memory, "draft": draft, "mesh": mesh}
    return Engine(config, params, processor=Processor(), **sizes | options)


def ask(seed, tokens, images=(), more=20, **fields):
    sampling = Sampling(max_new_tokens=more, ignore_eos=True, seed=seed)
    return Request(**{"rid": str(seed), **fields}, prompt=tokens, sampling=sampling, images=images)


def requests(name):
    """Two images, text alone, a narrow image first, one over several chunks, a group, the same text of another image,
    turns with one more image."""
    shared = prompt(4, 20, WIDE, 9)
    turns = shared[0] + prompt(5, 3, SMALL, 4)[0], (WIDE, SMALL)
    return [
        ask(i, *each, input_logprobs_from=1 if i == 3 else None, routed_experts="moe" in name and i % 3 > 0)
        for i, each in enumerate([
            prompt(0, 3, WIDE, 2, SMALL, 4), prompt(1, 40), prompt(2, NARROW, 5), prompt(3, 11, WIDE, 17), shared,
            shared, (shared[0], (OTHER,)), turns, prompt(4, 20),
        ])
    ]  # fmt: skip


def same(a, b):
    """Bit for bit."""
    known = a.tokens == b.tokens and a.logp == b.logp and a.input_logp == b.input_logp
    return known and np.array_equal(np.array(a.routed), np.array(b.routed))


@functools.partial(jax.jit, static_argnames="config")
def score(params, batch, config):
    return models.score(params, batch, config=config).logp_BT


def trained(config, params, tokens, images, prompt):
    """The log-probability of each token but the first, as the trainer computes it. Image tokens behind the prompt of so
    many tokens, which the model has sampled, are text."""
    plain = [*tokens[:prompt], *(0 if token in (vlm.IMAGE, vlm.VIDEO) else token for token in tokens[prompt:])]
    packed = lambda tokens: packing.pack([supervised(tokens[:1], tokens[1:])], CONTEXT, rows=1)
    media = [Processor().media(image) for image in images]
    seen = vision.attach(packed(plain), [media], config.vision, patches=192).input
    seen = {name: x for name, x in seen.items() if name in vision.patches.NAMES}
    batch = packed(tokens)
    batch = jax.tree.map(lambda x: x[0], batch.replace(input={**batch.input, **seen}))
    return np.asarray(score(params, batch, config))[0, : len(tokens) - 1]


@pytest.fixture(scope="module", params=vlm.CASES)
def alone(request):
    """(case, each request served alone)."""
    with engine_of(request.param) as engine:
        found = []
        for one in requests(request.param):
            engine.flush()
            found += engine.generate([one])
    return request.param, found


@pytest.mark.long
@pytest.mark.sweep
def test_log_probabilities_are_those_of_training(alone):
    name, found = alone
    config, params = model(name)
    for one, made in zip(requests(name), found, strict=True):
        n = len(one.prompt)
        wanted = trained(config, params, [*one.prompt, *made.tokens], one.images, n)
        np.testing.assert_allclose(made.logp, wanted[n - 1 :], atol=2e-5)
        if one.input_logprobs_from:
            np.testing.assert_allclose(made.input_logp, wanted[: n - 1], atol=2e-5)


def unused(engine):
    """Whether every page is free, and no features are kept."""
    assert engine.flush() and not engine.device._features
    return all(of.free == of.count for of in engine._slots.cache.pages)


@pytest.mark.slow
@pytest.mark.sweep
def test_samples_are_those_of_requests_alone_with_half_the_memory(alone):
    """In company and in another order, although requests share pages, lose theirs and get them back."""
    name, wanted = alone
    with engine_of(name, 0.4) as engine:
        for order in (slice(None), slice(None, None, -1)):
            assert all(map(same, engine.generate(requests(name)[order]), wanted[order]))
        assert engine.stats()["preemptions"] > 0 and unused(engine)


@pytest.mark.slow
@pytest.mark.sweep
def test_a_cached_prefix_is_that_of_the_same_image(alone):
    """Of another one as far as the text before it; with recurrent layers only the states behind prompts are kept."""
    name, wanted = alone
    begun = 0 if "qwen3_5" in name else PAGE
    with engine_of(name) as engine:
        asked = requests(name)
        engine.generate(asked[4:5])
        for i, cached in ((5, len(asked[4].prompt) - 1), (6, begun), (7, 2 * PAGE), (8, begun)):
            [made] = engine.generate(asked[i : i + 1])
            assert same(made, wanted[i]) and made.cached_tokens == cached
        assert unused(engine)


@pytest.mark.long
def test_pages_of_another_size_give_the_same_tokens():
    name = "qwen3_vl"
    with engine_of(name) as small, engine_of(name, page=32) as large:
        for a, b in zip(small.generate(requests(name)), large.generate(requests(name)), strict=True):
            assert a.tokens == b.tokens
            np.testing.assert_allclose(a.logp, b.logp, atol=1e-5)


@pytest.mark.slow
def test_random_aborts_lose_no_page_and_no_features():
    rng, ended = np.random.default_rng(0), threading.Semaphore(0)
    many = [dataclasses.replace(one, rid=f"{turn} {one.rid}") for turn in range(3) for one in requests("qwen3_vl")]
    with engine_of("qwen3_vl", 0.4) as engine:
        for one in many:
            engine.submit(one, lambda progress: progress.finish and ended.release())
            if rng.random() < 0.5:
                engine.abort(many[rng.integers(len(many))].rid)
        for _ in many:
            assert ended.acquire(timeout=120)
        assert not engine.device._features and unused(engine)


def test_caches_leave_room_for_the_tower(monkeypatch):
    _, params = model("qwen3_vl")
    memory, tower = 3.2e6, sum(x.nbytes for x in jax.tree.leaves(params["vision"]))
    monkeypatch.setattr(budget.memory, "of_devices", lambda _: memory)
    sizes = Options(slots=64, context=CONTEXT, page=PAGE, steps=4)
    config = vision.without_vision(model("qwen3_vl")[0])
    [kind], [without] = budget.pages(config, np.float32, sizes, mesh_of())
    _, [count] = budget.pages(model("qwen3_vl")[0], np.float32, sizes, mesh_of())
    assert 0 < without - count == pytest.approx(2 * budget.USABLE * tower / kind.bytes, abs=1)


def encoded(engine):
    """The hashes of images that the engine encodes from now on."""
    found, encode = [], engine.device.operations["encode"]

    def counted(name, patches):
        found.append(name)
        encode(name, patches)

    engine.device.operations["encode"] = counted
    return found


@pytest.mark.slow
@pytest.mark.sweep
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


@pytest.mark.slow
@pytest.mark.sweep
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


@pytest.mark.slow
def test_image_tokens_that_were_sampled_are_text():
    """In an answer, and where a request is sent again with its tokens so far: they stand for no feature."""
    config, params = model("qwen3_vl")
    tokens, images = prompt(0, 3, WIDE, 2, SMALL, 4)
    likely = Sampling(max_new_tokens=30, ignore_eos=True, seed=1, logit_bias=((vlm.IMAGE, 6.0), (vlm.VIDEO, 6.0)))
    with engine_of("qwen3_vl") as engine:
        [whole] = engine.generate([Request("whole", tokens, likely, images=images)])
        assert whole.tokens.count(vlm.IMAGE) > 3 < whole.tokens.count(vlm.VIDEO)
        wanted = trained(config, params, [*tokens, *whole.tokens], images, len(tokens))
        np.testing.assert_allclose(whole.logp, wanted[len(tokens) - 1 :], atol=2e-5)
        for n in (1, 11, 25):
            rest = dataclasses.replace(likely, max_new_tokens=30 - n)
            [again] = engine.generate([Request("again", (*tokens, *whole.tokens[:n]), rest, images=images)])
            assert again.tokens == whole.tokens[n:]
            np.testing.assert_allclose(again.logp, whole.logp[n:], atol=1e-5)


def negative(params):
    return jax.tree.map(lambda x: -x, params)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_features_are_those_of_the_weights_in_use(mode, monkeypatch):
    """Also of a prompt that was computed as far as the middle of an image when new weights came."""
    config, params = model("qwen3_vl")
    tokens, images = prompt(8, 9, WIDE, 20)
    asked = ask(1, tokens, images)
    with Engine(config, negative(params), processor=Processor(), **SIZES) as engine:
        [wanted] = engine.generate([asked])
    with contextlib.closing(engine_of("qwen3_vl")) as engine:
        found, done = encoded(engine), half_computed(engine, dataclasses.replace(asked, rid="half"), monkeypatch)
        engine.pause(mode)
        engine.load(negative(params), "new", flush=mode == "retract")
        engine.resume()
        assert all(same(engine.generate([asked])[0], wanted) for _ in range(2))
        assert len(found) == 2 if mode == "retract" else len(found) == 3
        assert mode == "in_place" or same(done[0], wanted)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("predicts", [False, True], ids=["text", "mtp"])
def test_drafts_change_no_bit(predicts):
    """Found in texts, or predicted, by a layer that sees no images."""
    name = "qwen3_5" if predicts else "qwen3_vl"
    config, params = model(name)
    params = {**params, "mtp": tiny.weights(mtp.table(config), 0.16)} if predicts else params
    asked = requests(name)
    with Engine(config, params, processor=Processor(), draft=4, **SIZES) as engine:
        assert engine.draft_from == ("mtp" if predicts else "text")
        bias = ((0, 0.0),)  # a request with one takes no drafts
        alone = [
            engine.generate([dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, logit_bias=bias))])[0]
            for one in asked
            if engine.flush()
        ]
        assert engine.stats()["drafted"] == 0
        for order in (slice(None), slice(None, None, -1), slice(None)):
            assert all(map(same, engine.generate(asked[order]), alone[order]))
        assert engine.stats()["accepted"] > 0


@pytest.mark.slow
def test_adapters_read_images():
    config, params = model("qwen3_vl")
    spec = lora.Lora(rank=3, alpha=5)
    factors = tiny.weights(lora.table(models.table(config), spec), 0.2)
    tokens, images = prompt(0, 3, WIDE, 2, SMALL, 4)
    with engine_of("qwen3_vl") as engine:
        engine.load_adapter("a", spec, factors)
        plain, adapted = engine.generate([ask(0, tokens, images), ask(1, tokens, images, adapter="a")])
    assert adapted.cached_tokens == plain.cached_tokens == 0
    for made, own in ((plain, params), (adapted, lora.join(params, factors, spec))):
        wanted = trained(config, own, [*tokens, *made.tokens], images, len(tokens))
        np.testing.assert_allclose(made.logp, wanted[len(tokens) - 1 :], atol=1e-4)


@pytest.mark.sweep
@pytest.mark.mesh
@pytest.mark.parametrize(
    "name, split",
    [("qwen2_5_vl", EngineMesh(tp=2)), ("qwen3_5", EngineMesh(tp=2)), ("qwen3_5_moe", EngineMesh(ep=5))],
)
def test_samples_over_devices_are_those_of_one_device(name, split):
    with engine_of(name) as one, engine_of(name, mesh=split) as engine:
        found, wanted = engine.generate(requests(name)), one.generate(requests(name))
        assert engine.flush()
        assert same(engine.generate(requests(name)[:1])[0], found[0])
    for a, b in zip(found, wanted, strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logp, b.logp, atol=4e-5)


@pytest.mark.slow
def test_replicas_share_the_prompts_of_images():
    """Requests with the same images go where these have been computed, those with others may go elsewhere."""
    config, params = model("qwen3_vl")
    tokens, images = prompt(4, 20, WIDE, 9)
    with engine_of("qwen3_vl") as one:
        wanted = one.generate([ask(0, tokens, images), ask(0, tokens, (OTHER,), rid="other")])
    with Replicas(config, params, mesh=EngineMesh(dp=2), processor=Processor(), **SIZES) as both:
        found = [*both.generate([ask(0, tokens, images)]), *both.generate([ask(0, tokens, (OTHER,), rid="other")])]
        assert all(map(same, found, wanted))
        [again] = both.generate([ask(0, tokens, images)])
        assert same(again, wanted[0]) and again.cached_tokens == len(tokens) - 1


def test_bad_images_are_refused_in_one_line():
    tokens, images = prompt(0, 3, WIDE, 2, SMALL, 4)
    with engine_of("qwen3_vl") as engine:
        for given, seen, words in [
            (tokens, images[:1] * 2, "the image token, id 57, .* image 2 of 2 has 15"),
            (tokens, images[::-1], "got runs of 15, 6"), (tokens, (*images, SMALL), "image 3 of 3"),
            (tokens[:19], images[:1], "must not end with an image"), (tokens[:18], images[:1], "got runs of 14"),
            ((1, 2), images, "got runs of none"),
        ]:  # fmt: skip
            with pytest.raises(ValueError, match=words):
                engine.generate([ask(0, given, seen)])
        assert engine.generate([ask(0, tokens, images, 3)])[0].tokens
    config, params = model("qwen3_vl")
    with pytest.raises(ValueError, match="tp must divide the heads of the vision tower, 6, got 4"):
        engine_of("qwen3_vl", mesh=EngineMesh(tp=4))
    with Engine(config, params, **SIZES) as engine:
        with pytest.raises(ValueError, match="this model reads text alone"):
            engine.generate([ask(0, tokens, images)])
        assert engine.generate([ask(0, tokens, more=3)])[0].tokens


def test_prompts_are_expanded_as_chat_templates_write_them():
    pictures = Pictures(Processor(), model("qwen3_vl")[0].vision)
    whole, images = prompt(0, 3, SMALL, 2, SMALL, 4)
    one, six = [vlm.IMAGE], [vlm.IMAGE] * 6
    short = (*whole[:4], *one, *whole[10:14], *one, *whole[20:])
    assert pictures.expanded(short, images) == pictures.expanded(whole, images) == whole
    assert pictures.expanded((*short, *one, 5, *one * 3), images) == (*whole, *one, 5, *one * 3)  # sampled
    assert pictures.expanded((1, *one, *one, 2), images) == (1, *six, *six, 2)
    assert pictures.expanded((1, *one, 2), images) == (1, *one, 2) and pictures.expanded(short, ()) == short


def test_patches_of_an_image_are_computed_once_at_a_time():
    class Slow(Processor):
        times = 0

        def media(self, image):
            self.times += 1
            time.sleep(0.05)
            return super().media(image)

    slow = Slow()
    pictures = Pictures(slow, model("qwen3_vl")[0].vision)
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(pictures.picture, [Image(WIDE.data) for _ in range(8)])]
    assert len(set(found)) == slow.times == 1


def test_patches_beyond_the_memory_for_them_are_made_again(monkeypatch):
    tokens, images = prompt(0, 3, WIDE, 2, SMALL, 4)
    with engine_of("qwen3_vl") as engine:
        [wanted] = engine.generate([ask(0, tokens, images)])
        kept = [picture.kept for picture in [*map(engine.pictures.picture, images)]]
        monkeypatch.setattr("areax.rollout.engine.pictures.KEPT", kept[0])
        assert engine.flush()
        held = [*map(engine.pictures.picture, images)]
        assert [picture.kept for picture in held] == [kept[0], 0]
        assert same(engine.generate([ask(0, tokens, images)])[0], wanted)
        assert [picture.kept for picture in held] == [0, 0]
