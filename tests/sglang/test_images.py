"""Images in requests to the real SGLang: it takes one token for each, and reads as many as the processor says."""

import asyncio
import base64
import os

import numpy as np
import pytest
import servers
import torch
import vlm

from areax.adapters.data import images
from areax.rollout import client

FIRST, SECOND = vlm.png(9, 7, 1), vlm.png(12, 12, 2)  # 4 and 9 features
# SGLang takes the tower's epsilon from the text model, and interleaves axes only if the config says so.
TEXT = dict(rms_norm_eps=1e-6, rope_parameters=vlm.AXES(3, 2, 1, mrope_interleaved=True))
SHORT = [2, vlm.START, vlm.IMAGE, vlm.END, 8, vlm.START, vlm.IMAGE, vlm.END, 9]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """(model folder, server)"""
    root = tmp_path_factory.mktemp("images")
    path = vlm.folder(root / "model", "qwen3_vl", **TEXT)
    with servers.sglang(
        path,
        os.environ["AREAX_SGLANG_PYTHON"],
        root / "log",
        "--context-length",
        "96",
        "--disable-fast-image-processor",
    ) as server:
        yield path, server


def test_the_server_reads_our_tokens_and_tells_images_apart(place):
    path, server = place
    processor, seen = images.load(path), tuple(map(images.read, (FIRST, SECOND)))

    async def main():
        async with client.connect([server.url], image_token=vlm.IMAGE) as fleet:
            greedy = dict(max_new_tokens=4, temperature=0.0, ignore_eos=True)
            ask = lambda own: fleet.generate(processor.expanded(SHORT, own), own, **greedy)
            return [await ask(own) for own in (seen, seen[::-1], seen)]

    one, other, again = asyncio.run(main())
    assert one.info["prompt_tokens"] == other.info["prompt_tokens"] == len(processor.expanded(SHORT, seen))
    np.testing.assert_allclose(one.logp, again.logp, atol=1e-4)
    assert one.tokens == again.tokens
    for done, own in ((one, seen), (other, seen[::-1])):
        whole = np.array([*processor.expanded(SHORT, own), *done.tokens], np.int32)
        logits_TV = vlm.logits(vlm.reference("qwen3_vl", **TEXT), whole, [processor.media(image) for image in own])
        logp_TV = torch.log_softmax(logits_TV[-5:-1], -1).detach().numpy()
        np.testing.assert_allclose(done.logp, logp_TV[range(4), done.tokens], atol=1e-4)


def test_what_the_client_must_not_send(place):
    """Tokens that were repeated already, and an image token without an image beside others."""
    path, server = place
    url = "data:image;base64," + base64.b64encode(FIRST).decode()
    ids = [2, vlm.START, vlm.IMAGE, vlm.END, 9]
    send = lambda ids: server.post("/generate", {"input_ids": ids, "image_data": [url], "sampling_params": {}})[0]
    assert send(ids) == 200
    assert send([2, vlm.START, *[vlm.IMAGE] * 4, vlm.END, 9]) == 500
    assert send([*ids, vlm.IMAGE, 8]) == 500
