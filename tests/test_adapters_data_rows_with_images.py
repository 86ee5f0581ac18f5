"""Rows with images from every kind of source become samples with the tokens and images that transformers' way gives."""

import base64
import json

import datasets as hf_datasets
import numpy as np
import PIL.Image
import pyarrow
import pytest
import vlm
from pyarrow import parquet

from areax.adapters import tokenizer
from areax.adapters.data import chat_sft, datasets, formats, images
from areax.recipes.shared import evaluation, offline, rows, sources
from areax.rollout.chat import images as chat_images
from areax.rollout.chat import template

FIRST, SECOND = vlm.png(8, 8, 1), vlm.png(12, 12, 2)  # 4 and 9 features, of sizes as models see them
ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PLACE = {"type": "image"}
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return vlm.folder(tmp_path_factory.mktemp("vlm") / "model")


@pytest.fixture(scope="module")
def tokens(model):
    return tokenizer.load(model)


@pytest.fixture(scope="module")
def processor(model):
    return images.load(model)


def url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def text(words):
    return {"type": "text", "text": words}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def pictures(path):
    """The files of two images beside a data file."""
    (path / "pictures").mkdir()
    for name, data in (("a.png", FIRST), ("b.png", SECOND)):
        (path / "pictures" / name).write_bytes(data)
    return ["pictures/a.png", "pictures/b.png"]


def check(tokens, processor, row, words, seen):
    made = template.prompted(tokens, row, processor)
    assert made.text == ASKED.format(words)
    assert [image.data for image in made.images] == seen
    short = tokens.encode(made.text, add_special_tokens=False)
    counts = iter({FIRST: 4, SECOND: 9}[data] for data in seen)
    assert made.tokens == [t for id in short for t in [id] * (next(counts) if id == vlm.IMAGE else 1)]
    assert tokens.decode(made.tokens).count("<|image_pad|>") == sum({FIRST: 4, SECOND: 9}[data] for data in seen)


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "bytes", "saved", "given", "given many"])
def test_every_kind_of_data_set(tokens, processor, tmp_path, kind, monkeypatch):
    paths = pictures(tmp_path)
    plain = [
        {"prompt": "which <image>or <image>?", "images": paths},
        {"messages": [{"role": "user", "content": [text("a"), {"type": "image", "path": paths[1]}]}]},
        {"messages": [user(PLACE, text("b"))], "images": paths[:1]},
        {"prompt": "c", "image": url(FIRST)},
    ]
    stored = [{"prompt": "which <image>or <image>?", "images": [FIRST, SECOND]}, {"prompt": "c", "images": [FIRST]}]
    features = hf_datasets.Features(prompt=hf_datasets.Value("string"), images=hf_datasets.List(hf_datasets.Image()))
    table = hf_datasets.Dataset.from_list(stored, features=features)
    if kind == "given many":
        monkeypatch.setattr(datasets, "MUCH", 100)
    if kind == "jsonl":
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in plain))
    elif kind == "json":
        file = tmp_path / "rows.json"
        file.write_text(json.dumps(plain))
    elif kind == "parquet":
        file = tmp_path / "rows.parquet"
        parquet.write_table(
            pyarrow.Table.from_pylist([{"prompt": p["prompt"], "images": p["images"]} for p in plain[:1]]), file
        )
    elif kind == "bytes":
        file = tmp_path / "rows.parquet"
        table.to_parquet(file)
    elif kind == "saved":
        file = tmp_path / "saved"
        table.save_to_disk(file)
    if kind.startswith("given"):
        order = sources.opened("", table, check=lambda row: None, bad="stop", recognise=False, seed=0)
        read = [order.rows[i] for i in range(len(order.rows))]
        assert isinstance(order.rows, list) == (kind == "given")
    else:
        read = datasets.rows(file)
    check(tokens, processor, read[0], f"which {SEEN}or {SEEN}?", [FIRST, SECOND])
    if kind in ("jsonl", "json"):
        check(tokens, processor, read[1], f"a{SEEN}", [SECOND])
        check(tokens, processor, read[2], f"{SEEN}b", [FIRST])
    if kind != "parquet":
        check(tokens, processor, read[-1], f"{SEEN}c", [FIRST])


@pytest.mark.parametrize("format", ["jsonl", "parquet", "saved"])
def test_much_stays_on_the_disk(tokens, processor, tmp_path, format, monkeypatch):
    """Few rows of many bytes are read one at a time, as many rows are."""
    path, image = tmp_path / f"rows.{format}", {"bytes": None, "path": "pictures/b.png"}
    stored = {"prompt": "<image>a", "images": [image]}
    pictures(tmp_path)
    if format == "jsonl":
        path.write_text(json.dumps(stored) + "\n")
    elif format == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist([stored]), path)
    else:
        image["path"] = str(tmp_path / "pictures" / "b.png")
        hf_datasets.Dataset.from_list([stored]).save_to_disk(path)
    assert datasets.many(path) is None
    monkeypatch.setattr(datasets, "MUCH", 8)
    [(row, place)] = datasets.many(path)
    assert place == (f"{path}:1" if format == "jsonl" else f"{path}: row 1")
    check(tokens, processor, row, f"{SEEN}a", [SECOND])


def test_images_are_not_decoded_until_they_are_used(tmp_path):
    """A data set's images stay files: the rows have their bytes, also where `datasets` would decode them."""
    features = hf_datasets.Features(image=hf_datasets.Image(), prompt=hf_datasets.Value("string"))
    table = hf_datasets.Dataset.from_list([{"prompt": "a", "image": {"bytes": b"broken", "path": None}}] * 3, features)
    [*read] = datasets.given(table)
    assert [row["image"] for row, _ in read] == [{"bytes": b"broken", "path": None}] * 3
    assert datasets.given(table)[2] == (read[2][0], "rows: row 3")
    shown = [[row for row, _ in read[:1]], [{"prompt": "a", "image": PIL.Image.new("RGB", (2, 2))}]]
    for some in shown:
        order = [sources.opened("", some, check=lambda row: None, bad="stop", recognise=False, seed=0) for _ in "ab"]
        assert sources.identity(order[0]) == sources.identity(order[1])


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_bad_image_is_a_bad_row(tokens, processor, tmp_path, format, capsys):
    made = [{"prompt": p, "images": [{"bytes": data, "path": None}]} for p, data in (("a", FIRST), ("b", b"no"))]
    file = tmp_path / f"rows.{format}"
    if format == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(made), file)
        where = f"{file}: row 2"
    else:
        lines = [{"prompt": "a", "image": url(FIRST)}, {"prompt": "b", "image": url(b"no")}]
        file.write_text("".join(json.dumps(row) + "\n" for row in lines))
        where = f"{file}:2"
    check = rows.prompts(tokens, "areax.rollout.workflows:single_turn", processor)
    with pytest.raises(ValueError, match=f"^{where}: images: 2 bytes are no image of PNG"):
        rows.read(str(file), check=check)
    assert [row["prompt"] for row in rows.read(str(file), check=check, bad="skip")] == ["a"]
    assert "1 of 2 rows are left out, bad" in capsys.readouterr().err


def test_demonstrations_and_preferences_have_their_images(tokens, processor):
    said = [{"role": "user", "content": "<image>a"}, {"role": "assistant", "content": "b"}]
    more = [*said, user(text("c"), PLACE), {"role": "assistant", "content": "d"}]
    once = {"messages": said, "images": [FIRST]}
    whole = {"prompt": "<image>a", "completion": "b", "images": [FIRST]}
    by_parts = [
        user(PLACE, text("a")),
        {"role": "assistant", "content": [text("b")]},
    ]
    for row in (once, whole, {"messages": by_parts, "images": [FIRST]}):
        for learn in ("last", "all"):
            made = offline.Demonstrations(tokens, learn, processor)(row)
            assert tokens.decode(made.tokens[made.mask].tolist()) == "b<|im_end|>"
            assert [image.data for image in made.images] == [FIRST]
            assert (made.tokens == vlm.IMAGE).sum() == 4 and not made.mask[made.tokens == vlm.IMAGE].any()
    both = [message | {"content": message["content"]} for message in more]
    both[0] = user(PLACE, text("a"))
    made = offline.Demonstrations(tokens, "all", processor)({"messages": both, "images": [SECOND, FIRST]})
    assert [image.data for image in made.images] == [SECOND, FIRST] and (made.tokens == vlm.IMAGE).sum() == 13
    assert tokens.decode(made.tokens[made.mask].tolist()) == "b<|im_end|>d<|im_end|>"
    after = {"messages": both[:3], "images": [FIRST, SECOND]}  # the user's last word is not among the tokens
    made = offline.Demonstrations(tokens, "all", processor)(after)
    assert [image.data for image in made.images] == [FIRST] and (made.tokens == vlm.IMAGE).sum() == 4
    sample = offline.Demonstrations(tokens, "last", processor).of
    pair = [sample({"prompt": "a", "image": FIRST}, answer) for answer in ("b", "c")]
    assert [tokens.decode(s.tokens[s.mask].tolist()) for s in pair] == ["b<|im_end|>", "c<|im_end|>"]
    assert pair[0].images == pair[1].images and len(pair[0].images) == 1


def test_formats_keep_images():
    image, empty = {"bytes": FIRST, "path": None}, {"image": None}
    answers = [[{"role": "assistant", "content": [text(words) | empty]}] for words in "bc"]
    asked, wanted = [user(PLACE | {"text": None}, text("a") | empty)], [user(PLACE, text("a"))]
    trl = formats.auto({"prompt": asked, "chosen": answers[0], "rejected": answers[1], "images": [image]})
    assert trl == {"messages": wanted, "chosen": "b", "rejected": "c", "images": [image]}
    said = [{"role": "user", "content": "<image>a"}]
    verl = formats.conversational({"prompt": said, "images": [image], "reward_model": {"ground_truth": "1"}})
    assert (verl["messages"], verl["images"], verl["answer"]) == (said, [image], "1")
    turns = [{"from": "human", "value": "<image>a"}, {"from": "gpt", "value": "b"}]
    llava = formats.auto({"conversations": turns, "image": "a.png"})
    assert llava["image"] == "a.png" and llava["messages"][0] == said[0]
    assert formats.recognised({"question": "a", "answer": "b", "image": image}).endswith("prompt_answer")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "<image> <image>", "images": [FIRST]}, "as many images as placeholders of images, got 1 for 2"),
        ({"messages": [user(PLACE)]}, "got 0 for 1"),
        ({"prompt": "a", "images": [FIRST], "image": FIRST}, "images or image, got both"),
        ({"messages": [{"role": "system", "content": "a"}], "images": [FIRST]}, "needs a user message"),
        ({"prompt": "a <|image_pad|>", "images": [FIRST]}, "got 2 for 1; in texts write <image>"),
        ({"prompt": "a <|image_pad|>"}, "got 1 for 0"),
        ({"messages": [user({"type": "video", "video": "a.mp4"})]}, "text or an image, got 'video'"),
        ({"prompt": "a", "image": "http://127.0.0.1/a.png"}, "not fetched"),
        ({"prompt": "a", "image": "none.png"}, "none.png.: cannot be read"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong(tokens, processor, row, words):
    with pytest.raises(ValueError, match=words):
        template.prompted(tokens, row, processor)


def test_a_model_of_text_refuses_images(tokens, processor):
    for row in (
        {"prompt": "a", "image": FIRST},
        {"messages": [user({"type": "image", "image": FIRST})]},
    ):
        with pytest.raises(ValueError, match="this model reads no images"):
            template.prompt(tokens, row)
    with pytest.raises(ValueError, match="an answer must have no image token"):
        chat_sft.sample(tokens, {"prompt": "a", "completion": "<|image_pad|>"}, "last", processor)
    with pytest.raises(ValueError, match="an answer must have no image token"):
        chat_sft.sample(tokens, {"prompt": "a", "completion": "<|image_pad|>"}, "all", processor)


def test_logs_have_hashes_instead_of_images():
    row = {
        "image": url(FIRST),
        "messages": [user({"type": "image", "image": FIRST}, text("a"))],
    }
    [shown] = evaluation.answers([row], [[]], None)
    assert "base64" not in json.dumps(shown) and "sha256" in shown["row"]["image"]
    assert shown["row"]["messages"][0]["content"][1] == text("a")
    assert np.unique([chat_images.shown(x) for x in (FIRST, images.read(FIRST))]).size == 1
