"""Requests with images: servers get one token and the bytes of each, and must read as many tokens as we do."""

import aiohttp.web
import pytest
import vlm
from scripted import V0, reply, run, serving

from areax.adapters.data import images
from areax.rollout import client
from areax.rollout.servers import prefix_routing
from areax.rollout.servers.image_tokens import TokensPrompt

FIRST, SECOND = vlm.png(8, 8, 1), vlm.png(12, 12, 2)  # 4 and 9 features, of sizes as models see them
SHORT = [2, vlm.START, vlm.IMAGE, vlm.END, 8, vlm.START, vlm.IMAGE, vlm.END, 9]
LONG = [2, vlm.START, *[vlm.IMAGE] * 4, vlm.END, 8, vlm.START, *[vlm.IMAGE] * 9, vlm.END, 9]


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return images.load(vlm.folder(tmp_path_factory.mktemp("vlm") / "model"))


def both():
    return tuple(map(images.read, (FIRST, SECOND)))


def seeing(processor, sampled, finish="length", more=0):
    """An answer of a server that puts in the features of images itself, as SGLang does."""

    async def answer(request, body):
        seen = [images.read(each) for each in body["image_data"]]
        read = processor.expanded(body["input_ids"], seen)
        whole = reply(sampled, [-1.0] * len(sampled), [V0] * len(sampled), finish)
        whole["meta_info"]["prompt_tokens"] = len(read) + more
        return aiohttp.web.json_response(whole)

    return answer


def test_a_request_has_one_token_and_the_bytes_of_each_image(processor):
    async def main():
        async with serving() as a, client.connect([a.url], image_token=vlm.IMAGE) as fleet:
            a.script = [seeing(processor, [5, 6])]
            done = await fleet.generate(LONG, both(), max_new_tokens=2)
        assert done.tokens == [5, 6]
        (body,) = a.generated()
        assert body["input_ids"] == SHORT and processor.expanded(SHORT, both()) == LONG
        assert [images.read(each).data for each in body["image_data"]] == [FIRST, SECOND]

    run(main)


def test_an_interrupted_request_goes_on_with_its_images_up_to_an_image_token(processor):
    async def main():
        async with serving() as a, client.connect([a.url], image_token=vlm.IMAGE) as fleet:
            parts = ([5], "abort"), ([6, vlm.IMAGE, 7], "abort"), ([8, vlm.IMAGE], "length")
            a.script = [seeing(processor, *part) for part in parts]
            done = await fleet.generate(LONG, both(), max_new_tokens=9)
        assert done.tokens == [5, 6, 8, vlm.IMAGE] and fleet.counts["dropped"] == 2
        assert [body["input_ids"] for body in a.generated()] == [SHORT, [*SHORT, 5], [*SHORT, 5, 6]]
        assert all(len(body["image_data"]) == 2 for body in a.generated())

    run(main)


def test_a_server_that_reads_other_tokens_is_refused(processor):
    async def main():
        async with serving() as a, client.connect([a.url], image_token=vlm.IMAGE) as fleet:
            a.script = [seeing(processor, [5], more=3)]
            with pytest.raises(RuntimeError, match="must have the 20 tokens that .* makes of it, got 23"):
                await fleet.generate(LONG, both())
            with pytest.raises(ValueError, match=f"a run of the image token {vlm.IMAGE} for each image, got 2 for 1"):
                await fleet.generate(LONG, both()[:1])
        async with serving() as a, client.connect([a.url]) as fleet:
            with pytest.raises(ValueError, match="images need the model's image token"):
                await fleet.generate(LONG, both())
            assert not a.generated()

    run(main)


def test_equal_tokens_of_other_images_are_another_prefix():
    block, (first, second) = prefix_routing.BLOCK, both()
    tokens = [1] * block + [vlm.IMAGE] * 4 + [2] * block * 2
    chains = [TokensPrompt(tokens, (image,), vlm.IMAGE).hashes() for image in (first, second)]
    plain = TokensPrompt(tokens).hashes()
    assert chains[0][0] == chains[1][0] == plain[0] and len(plain) == 3
    assert not {*chains[0][1:]} & {*chains[1][1:]} and not {*chains[0][1:]} & {*plain[1:]}
    assert TokensPrompt(tokens[: 2 * block], (first,), vlm.IMAGE).hashes(tokens[2 * block :]) == chains[0]
