"""Images of requests over HTTP, and weights of models with a vision tower."""

import asyncio
import base64
import io
import json
import shutil
import types

import numpy as np
import PIL.Image
import pytest
import servers
import tiny
import vlm

from areax import models
from areax.adapters import hf, tokenizer
from areax.adapters.data import images
from areax.rollout.engine import in_process
from areax.rollout.engine import server as program
from areax.rollout.engine.request import Request, Sampling
from areax.rollout.servers.engine_options import EngineOptions

OPTIONS = EngineOptions(slots=4, context=128)
NAMES = "<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"
START, PAD, FILM, END = NAMES


def write(path, seed=0, kind="qwen3_vl"):
    """A checkpoint of a model that reads images, with a tokenizer of bytes and its image processor."""
    tokens = tokenizer.byte_level()
    tokens.add_special_tokens({"additional_special_tokens": list(NAMES)})
    start, image, video, end = tokens.convert_tokens_to_ids(list(NAMES))
    case = vlm.CASES[kind]
    source = {
        "model_type": kind, "architectures": ["Any"], **case, "image_token_id": image, "video_token_id": video,
        "vision_start_token_id": start, "vision_end_token_id": end,
        "text_config": case["text_config"] | {"vocab_size": len(tokens), "max_position_embeddings": 256},
    }  # fmt: skip
    config = models.with_vision(models.config_from_hf(source))
    hf.save(path, config, tiny.weights(models.table(config), 0.16, seed), tokenizer=tokens)
    options = {
        "patch_size": 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 16, "longest_edge": 400},
    }
    (path / images.FILE).write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessorFast", **options}))
    return path


def encoded(width, height, seed=0):
    """Base64 of a PNG."""
    pixels, file = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8), io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


WIDE, TALL = encoded(20, 12), encoded(8, 16, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("model") / "a")


@pytest.fixture(scope="module")
def inside(folder):
    """(server, the `Service` in it)"""
    with in_process.serving(str(folder), OPTIONS, dtype="float32") as (url, handover):
        yield servers.Remote(int(url.rpartition(":")[2])), handover._service


def body(**more):
    return {"sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}, **more}


def test_a_prompt_is_the_same_as_text_or_ids_expanded_or_not(inside):
    server, service = inside
    text = f"a{START}{PAD}{END}b{START}{PAD}{END}c"
    ids = service.tokenizer.encode(text, add_special_tokens=False)
    processor = images.load(service.path)
    pictures = tuple(images.read(base64.b64decode(each)) for each in (WIDE, TALL))
    whole = processor.expanded(ids, pictures)
    assert len(whole) > len(ids) + 10
    url = "data:image/png;base64," + TALL
    found = [
        server.ok("/generate", body(**prompt, image_data=data))
        for prompt in ({"text": text}, {"input_ids": ids}, {"input_ids": whole})
        for data in ([WIDE, url], [[WIDE, TALL]])
    ]
    [made] = service.engine.generate(
        [Request("a", tuple(whole), Sampling(temperature=0, max_new_tokens=8, ignore_eos=True), images=pictures)]
    )
    for one in found:
        assert one["output_ids"] == made.tokens and one["meta_info"]["prompt_tokens"] == len(whole)
    other = server.ok("/generate", body(text=text, image_data=[WIDE, WIDE]))
    assert other["output_ids"] != made.tokens
    several = server.ok("/generate", body(text=[text, "d", text], image_data=[[WIDE, TALL], None, [WIDE, WIDE]]))
    assert [one["output_ids"] for one in several[::2]] == [made.tokens, other["output_ids"]]
    several = server.ok("/generate", body(text=[f"{PAD}1", f"2{PAD}3"], image_data=[WIDE, TALL]))
    assert several[0]["meta_info"]["prompt_tokens"] == 1 + processor.count(pictures[0])
    assert server.ok("/model_info")["has_image_understanding"]


@pytest.mark.parametrize(
    "more, words",
    [
        ({"text": f"a{PAD}b", "image_data": [WIDE, TALL]}, "image 1 of 2 needs 15 tokens 289 in a row"),
        ({"text": "ab", "image_data": WIDE}, "got runs of none"),
        ({"text": f"a{PAD}", "image_data": WIDE}, "must not end with an image"),
        ({"text": f"a{PAD}b", "image_data": "http://127.0.0.1/a.png"}, "addresses are not fetched"),
        ({"text": f"a{PAD}b", "image_data": "/etc/hostname"}, "as base64 or data URLs"),
        ({"text": f"a{PAD}b", "image_data": "§"}, "base64"),
        ({"text": f"a{PAD}b", "image_data": [3]}, "base64"),
        ({"text": [f"a{PAD}b", "c"], "image_data": [WIDE]}, "a list for each of 2 prompts"),
        ({"text": f"a{PAD}b", "video_data": WIDE}, "video_data"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_what_cannot_be_an_image_is_refused_in_one_line(inside, more, words):
    server, _ = inside
    status, answer = server.post("/generate", body(**more))
    assert status == 400 and words in answer["error"]["message"] and "\n" not in answer["error"]["message"]


def test_a_text_model_refuses_images(tmp_path):
    tiny.model(tmp_path / "text")
    with in_process.serving(str(tmp_path / "text"), OPTIONS, dtype="float32") as (url, _):
        server = servers.Remote(int(url.rpartition(":")[2]))
        status, answer = server.post("/generate", body(input_ids=[5, 6], image_data=WIDE))
        assert status == 400 and "reads text alone" in answer["error"]["message"]
        assert len(server.ok("/generate", body(input_ids=[5, 6], image_data=[]))["output_ids"]) == 8
        assert not server.ok("/model_info")["has_image_understanding"]


def probe(server):
    """What depends on the text model, and what on the tower as well."""
    text = server.ok("/generate", body(text="abcdefgh"))["output_ids"]
    return text, server.ok("/generate", body(text=f"a{START}{PAD}{END}b", image_data=WIDE))["output_ids"]


def test_new_weights_have_their_tower_or_leave_the_old_one(folder, tmp_path, inside):
    """From files and from a trainer of this process, also after the memory for weights was released."""
    other = write(tmp_path / "b", seed=1)
    (config, first), (_, second) = (hf.load(path, vision=True) for path in (folder, other))
    mixed = {**second, "vision": first["vision"]}
    hf.save(tmp_path / "mixed", config, mixed, tokenizer=tokenizer.load(folder))
    (tmp_path / "mixed" / images.FILE).write_text((folder / images.FILE).read_text())
    found = {}
    for path in (folder, other, tmp_path / "mixed"):
        with in_process.serving(str(path), OPTIONS, dtype="float32") as (url, _):
            found[path.name] = probe(servers.Remote(int(url.rpartition(":")[2])))
    texts, seen = (list(map(str, each)) for each in zip(*found.values(), strict=True))
    assert len(set(texts)) == 2 and len(set(seen)) == 3

    server, service = inside
    update = lambda path: server.ok("/update_weights_from_disk", {"model_path": str(path)})
    handover = in_process.Inside(service)

    def hand(v, config, params):
        new = in_process.Weights(config, params, hf.manifest(config, params, version=v))
        asyncio.run(handover(None, types.SimpleNamespace(arrays=handover.stage(f"{v}-x", new), label=f"{v}-x"), True))

    assert probe(server) == found["a"]
    update(other)
    assert probe(server) == found["b"]
    update(folder)
    assert probe(server) == found["a"]
    text = hf.load(other)
    hand(1, *text)  # of a trainer that has no tower
    assert probe(server) == found["mixed"]
    hand(2, config, second)
    assert probe(server) == found["b"]
    hand(3, config, first)
    server.ok("/release_memory_occupation", {})
    server.ok("/resume_memory_occupation", {})
    hand(4, *text)
    assert probe(server) == found["mixed"]
    update(folder)
    assert probe(server) == found["a"]


def test_a_folder_without_an_image_processor_serves_text(folder, inside, tmp_path):
    shutil.copytree(folder, tmp_path / "a")
    (tmp_path / "a" / images.FILE).unlink()
    with in_process.serving(str(tmp_path / "a"), OPTIONS, dtype="float32") as (url, handover):
        alone = servers.Remote(int(url.rpartition(":")[2]))
        status, answer = alone.post("/generate", body(text=f"a{PAD}b", image_data=WIDE))
        assert status == 400 and "reads text alone" in answer["error"]["message"]
        shown = program.described(handover._service)
        assert shown.endswith(f"4 slots of 128 tokens, text only (the folder has no {images.FILE})")
        both = [each.ok("/generate", body(text="abcdefgh", return_logprob=True)) for each in (alone, inside[0])]
        assert both[0]["meta_info"]["output_token_logprobs"] == both[1]["meta_info"]["output_token_logprobs"]
    assert program.described(inside[1]).endswith("4 slots of 128 tokens, images")
