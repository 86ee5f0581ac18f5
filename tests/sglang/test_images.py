"""Prompts with images against the embedded server, and against the real SGLang server where it is installed."""

import asyncio
import base64
import os

import jax
import numpy as np
import pytest
import servers
import vlm

from areax import models
from areax.adapters import hf
from areax.adapters.data import images
from areax.models import vision
from areax.rollout import client
from areax.rollout.servers.labels import read_label

CONTEXT = 96
PYTHON = os.environ.get("AREAX_SGLANG_PYTHON")
SERVERS = ["embedded", "sglang"] if PYTHON else ["embedded"]
# SGLang runs Qwen2.5-VL's tower for patches of 14 x 14 pixels alone, takes the epsilon of Qwen3-VL's from the text
# model, and interleaves its axes only if the config says so, as those of real checkpoints do.
TEXT = {
    "qwen2_5_vl": dict(rms_norm_eps=1e-6),
    "qwen3_vl": dict(rms_norm_eps=1e-6, rope_parameters=vlm.AXES(3, 2, 1, mrope_interleaved=True)),
}
PICTURE = [vlm.START, vlm.IMAGE, vlm.END]


@pytest.fixture(scope="module", params=[(where, name) for where in SERVERS for name in TEXT], ids="-".join)
def served(request, tmp_path_factory):
    """(checkpoint, server); SGLang would keep the features of images over changes of the weights."""
    where, name = request.param
    folder = tmp_path_factory.mktemp(where)
    path = vlm.folder(folder / name, name, 14, **TEXT[name])
    if where == "embedded":
        with servers.embedded(path, context=CONTEXT, slots=4) as remote:
            yield path, remote
    else:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("SGLANG_VLM_CACHE_SIZE_MB", "0")
            with servers.sglang(path, PYTHON, folder / "log", "--context-length", str(CONTEXT)) as remote:
                yield path, remote


def sampled(url, processor, cases):
    """Completions of (tokens with one for each image, images, temperature)."""

    async def all_of_them():
        async with client.connect([url], image_token=vlm.IMAGE) as fleet:
            return [
                await fleet.generate(processor.expanded(prompt, seen), seen, temperature=temperature, max_new_tokens=6)
                for prompt, seen, temperature in cases
            ]

    return asyncio.run(all_of_them())


def check_logp(completion, model, processor, prompt, seen, temperature):
    """Compares a completion's log-probabilities with those of the forward pass."""
    config, params = model
    before = processor.expanded(prompt, seen)
    token_BT = np.array([[*before, *completion.tokens]])
    ones_BT, sampled_BT = np.ones_like(token_BT), np.arange(token_BT.shape[1])[None] >= len(before)
    media = [[processor.media(image) for image in seen]]
    arrays = vision.arrange(token_BT, ones_BT, media, config.vision, sampled_BT=sampled_BT) if seen else None
    logits_BTV = models.forward(params, token_BT, config=config, segment_BT=ones_BT, images=arrays)
    logits_TV = np.asarray(logits_BTV[0], np.float64)[len(before) - 1 : -1]
    if not temperature:
        assert (logits_TV.argmax(-1) == completion.tokens).all()
    logits_TV /= temperature or 1.0
    logp_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    wanted = logp_TV[range(len(completion.tokens)), completion.tokens]
    np.testing.assert_allclose(completion.logp, wanted, atol=2e-5)


def test_samples_have_the_logprobs_of_the_forward_pass(served):
    """A wide image and a small one, alone and together, one of them twice, and text; greedy and sampled."""
    path, remote = served
    processor, model = images.load(path), hf.load(path, vision=True)
    wide, small = processor.read(vlm.png(100, 40, seed=1)), processor.read(vlm.png(30, 30, seed=2))
    prompts = [
        ([5, 9, *PICTURE, 3, *PICTURE, 4, 7], [wide, small]), ([8, *PICTURE, *PICTURE], [small, small]),
        ([*PICTURE, 2], [wide]), ([5, 9, 4, 7], []),
    ]  # fmt: skip
    cases = [(*prompt, temperature) for prompt in prompts for temperature in (0.0, 0.8)]
    for completion, case in zip(sampled(remote.url, processor, cases), cases, strict=True):
        check_logp(completion, model, processor, *case)


def test_another_image_is_another_prompt(served):
    path, remote = served
    processor = images.load(path)
    seen = [[processor.read(vlm.png(30, 30, seed=seed))] for seed in (2, 3, 2)]
    one, other, again = sampled(remote.url, processor, [([8, *PICTURE, 2], each, 0.0) for each in seen])
    assert one.tokens == again.tokens
    np.testing.assert_allclose(one.logp, again.logp, atol=1e-5)
    assert one.tokens != other.tokens or not np.allclose(one.logp, other.logp, atol=1e-3)


def test_new_weights_change_the_tower(served, tmp_path):
    path, remote = served
    processor, (config, params) = images.load(path), hf.load(path, vision=True)
    params = {**params, "vision": jax.tree.map(lambda x: 1.3 * x, params["vision"])}
    published = hf.write_published(tmp_path, 1, config, params, base=path)
    body = {"model_path": str(published), "weight_version": read_label(published / "manifest.json")}
    remote.ok("/update_weights_from_disk", body)
    case = [*PICTURE, 2], [processor.read(vlm.png(30, 30, seed=2))], 0.0
    [completion] = sampled(remote.url, processor, [case])
    assert completion.version == [1] * len(completion.tokens)
    check_logp(completion, (config, params), processor, *case)


@pytest.mark.parametrize("served", [(where, "qwen3_vl") for where in SERVERS], indirect=True, ids="-".join)
@pytest.mark.parametrize("ids", [[2, vlm.START, *[vlm.IMAGE] * 4, vlm.END, 9], [2, *PICTURE, vlm.IMAGE, 8]])
def test_sglang_takes_one_token_for_each_image_alone(served, ids):
    """Not those of its features, nor an image token without an image beside others, which a client must not send; the
    embedded server takes both. (SGLang's Qwen2.5-VL hangs.)"""
    path, remote = served
    data = "data:image;base64," + base64.b64encode(vlm.png(56, 56)).decode()
    body = {"input_ids": ids, "image_data": [data], "sampling_params": {"max_new_tokens": 2}}
    assert remote.post("/generate", body)[0] == (500 if path.parent.name.startswith("sglang") else 200)
