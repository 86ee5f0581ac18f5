"""Images of requests over HTTP, and weights of models with a vision tower."""

import asyncio
import base64
import json
import shutil
import types

import jax
import pytest
import servers
import tiny
import vlm

from areax.adapters import hf, tokenizer
from areax.adapters.data import images
from areax.rollout import client
from areax.rollout.chat import template
from areax.rollout.engine import in_process
from areax.rollout.engine import server as program
from areax.rollout.engine.request import Request, Sampling
from areax.rollout.servers.engine_options import EngineOptions

OPTIONS = EngineOptions(slots=4, context=128)
START, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
WIDE, TALL = (base64.b64encode(vlm.png(*size)).decode() for size in ((20, 12), (8, 16)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return vlm.folder(tmp_path_factory.mktemp("model") / "a", "qwen3_vl")


@pytest.fixture(scope="module")
def inside(folder):
    """(server, the `Service` in it)"""
    with in_process.serving(str(folder), OPTIONS, dtype="float32") as (url, handover):
        yield servers.Remote(int(url.rpartition(":")[2])), handover._service


def body(**more):
    return {"sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}, **more}


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_client_sends_the_prompts_that_sessions_make(inside):
    server, service = inside
    processor = images.load(service.path)
    pictures = tuple(images.read(base64.b64decode(each)) for each in (WIDE, TALL))
    ids = service.tokenizer.encode(f"a{START}{PAD}{END}b{START}{PAD}{END}c", add_special_tokens=False)
    prompt = processor.expanded(ids, pictures)

    async def main():
        async with client.connect([server.url], image_token=processor.token) as fleet:
            wanted = {"temperature": 1.0, "max_new_tokens": 20, "ignore_eos": True, "seed": 3}
            return await fleet.generate(prompt, pictures, **wanted)

    done = asyncio.run(main())
    sampling = Sampling(max_new_tokens=20, ignore_eos=True, seed=3)
    [made] = service.engine.generate([Request("a", tuple(prompt), sampling, images=pictures)])
    assert (done.tokens, done.logp) == (made.tokens, made.logp)


URL = f"data:image/png;base64,{WIDE}"
ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": WIDE}}
ASKS = {  # by route: the image and the text of a message, and how an answer ends
    "/v1/chat/completions": (
        "messages", [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "what is it?"}],
        {"max_tokens": 8},
    ),
    "/v1/responses": (
        "input", [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "what is it?"}],
        {"max_output_tokens": 8},
    ),
    "/v1/messages": ("messages", [ANTHROPIC, {"type": "text", "text": "what is it?"}], {"max_tokens": 8}),
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("path", ASKS)
def test_conversations_have_images(inside, path):
    server, service = inside
    field, content, more = ASKS[path]
    asked = {field: [{"role": "user", "content": content}], "temperature": 0, **more}
    answer = server.ok(path, asked)
    picture = images.read(URL)
    row = {"prompt": "what is it?", "images": [picture]}
    prompt = template.prompted(service.tokenizer, row, images.load(service.path))
    sampling = Sampling(temperature=0, max_new_tokens=8)
    [made] = service.engine.generate([Request("a", tuple(prompt.tokens), sampling, images=(picture,))])
    usage = answer["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == len(prompt.tokens)
    assert made.text.strip() and made.text.strip() in str(answer)
    if path == "/v1/chat/completions":
        counted = server.ok("/tokenize", {"messages": asked["messages"]})
        assert counted["tokens"] == prompt.tokens
        with server.stream(path, asked) as events:
            text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
        assert text == answer["choices"][0]["message"]["content"]
    if path == "/v1/messages":
        counted = server.ok("/v1/messages/count_tokens", {"messages": asked["messages"]})
        assert counted["input_tokens"] == len(prompt.tokens)
    remote = json.loads(json.dumps(asked).replace(URL, "http://127.0.0.1/a.png").replace(WIDE, "AAAA"))
    status, answer = server.post(path, remote)
    assert status == 400 and "image" in answer["error"]["message"] and "\n" not in answer["error"]["message"]


@pytest.mark.parametrize(
    "more, words",
    [
        ({"text": f"a{PAD}b", "image_data": [WIDE, TALL]}, "image 1 of 2 has 6, got runs of"),
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


@pytest.mark.slow
def test_a_text_model_refuses_images(tmp_path):
    tiny.model(tmp_path / "text")
    with in_process.serving(str(tmp_path / "text"), OPTIONS, dtype="float32") as (url, _):
        server = servers.Remote(int(url.rpartition(":")[2]))
        status, answer = server.post("/generate", body(input_ids=[5, 6], image_data=WIDE))
        assert status == 400 and "reads text alone" in answer["error"]["message"]
        for nothing in ([], "", [None], [[]]):
            assert len(server.ok("/generate", body(input_ids=[5, 6], image_data=nothing))["output_ids"]) == 8
        assert not server.ok("/model_info")["has_image_understanding"]
        field, content, more = ASKS["/v1/chat/completions"]
        status, answer = server.post("/v1/chat/completions", {field: [{"role": "user", "content": content}], **more})
        assert status == 400 and "this model reads no images" in answer["error"]["message"]


def probe(server):
    """What depends on the text model, and what on the tower as well."""
    text = server.ok("/generate", body(text="abcdefgh"))["output_ids"]
    return text, server.ok("/generate", body(text=f"a{START}{PAD}{END}b", image_data=WIDE))["output_ids"]


@pytest.mark.slow
def test_new_weights_have_their_tower_or_leave_the_old_one(folder, tmp_path, inside):
    """From files and from a trainer of this process, also after the memory for weights was released."""
    (config, first), tokens = hf.load(folder, vision=True), tokenizer.load(folder)
    second = jax.tree.map(lambda x: -x, first)
    other = hf.save(tmp_path / "b", config, second, tokenizer=tokens)
    hf.save(tmp_path / "mixed", config, {**second, "vision": first["vision"]}, tokenizer=tokens)
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


@pytest.mark.slow
def test_a_folder_without_an_image_processor_serves_text(folder, inside, tmp_path):
    shutil.copytree(folder, tmp_path / "a")
    (tmp_path / "a" / images.FILE).unlink()
    with in_process.serving(str(tmp_path / "a"), OPTIONS, dtype="float32") as (url, handover):
        alone = servers.Remote(int(url.rpartition(":")[2]))
        status, answer = alone.post("/generate", body(text=f"a{PAD}b", image_data=WIDE))
        assert status == 400 and "reads text alone" in answer["error"]["message"]
        shown = program.described(handover._service)
        assert shown.endswith(f"4 slots of 96 tokens, text only (the folder has no {images.FILE})")
        both = [each.ok("/generate", body(text="abcdefgh", return_logprob=True)) for each in (alone, inside[0])]
        assert both[0]["meta_info"]["output_token_logprobs"] == both[1]["meta_info"]["output_token_logprobs"]
    assert program.described(inside[1]).endswith("4 slots of 96 tokens, images")
