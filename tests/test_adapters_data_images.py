"""Images of users as the model's processor reads them, and errors that say what is wrong."""

import base64
import io
import json
import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import PIL.Image
import pytest
from transformers import AutoImageProcessor

from areax.adapters.data import images
from areax.rollout.chat import images as chat_images
from areax.rollout.types import Image

IMAGE = 57


def pixels(width=37, height=52, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def encoded(picture, kind="PNG", **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor")
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    options = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 4, "size": size, "merge_size": 2}
    (folder / images.FILE).write_text(json.dumps(options))
    (folder / "config.json").write_text(json.dumps({"image_token_id": IMAGE}))
    return folder


def test_every_source_of_one_image_gives_its_bytes(tmp_path):
    data = encoded(PIL.Image.fromarray(pixels()))
    (tmp_path / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    sources = [data, bytearray(data), url, tmp_path / "a.png", str(tmp_path / "a.png"), {"bytes": data, "path": None}]
    assert {images.read(source) for source in [*sources, {"bytes": None, "path": str(tmp_path / "a.png")}]} == {
        Image(data)
    }
    assert images.read(Image(data)).hash == Image(data).hash and len(Image(data).hash) == 64


def test_other_images_become_upright_rgb():
    picture = PIL.Image.fromarray(pixels())
    turned = picture.copy().getexif()
    turned[images.ORIENTATION] = 6  # to be shown turned by 90 degrees
    upright = PIL.Image.open(io.BytesIO(images.read(encoded(picture, exif=turned)).data))
    np.testing.assert_array_equal(np.asarray(upright), np.rot90(pixels(), -1))
    for other in (picture.convert("L"), picture.convert("P"), picture.convert("RGBA"), picture):
        seen = PIL.Image.open(io.BytesIO(images.read(other).data))
        assert (seen.mode, seen.format) == ("RGB", "PNG")
        np.testing.assert_array_equal(np.asarray(seen), np.asarray(other.convert("RGB")))


@pytest.mark.parametrize("size", [(37, 52), (200, 30), (8, 9), (64, 64)])
def test_patches_and_their_count_are_those_of_the_processor(folder, size):
    processor, picture = images.load(folder), PIL.Image.fromarray(pixels(*size))
    image, wanted = images.read(picture), AutoImageProcessor.from_pretrained(folder)(images=[picture])
    made = processor.media(image)
    np.testing.assert_allclose(made.patches, wanted["pixel_values"], atol=1e-6)
    assert made.grid == tuple(np.asarray(wanted["image_grid_thw"])[0])
    assert processor.count(image) == np.prod(made.grid) // 4
    expanded = processor.expanded([1, IMAGE, 2, IMAGE], [image, image])
    assert expanded == [1, *[IMAGE] * processor.count(image), 2, *[IMAGE] * processor.count(image)]


@pytest.mark.parametrize("size", [(37, 52), (200, 30), (8, 9)])
def test_images_are_resized_once(folder, size):
    processor, picture = images.load(folder), PIL.Image.fromarray(pixels(*size))
    seen = processor.read(picture)
    assert processor.read(seen) is seen
    with ThreadPoolExecutor(4) as pool:  # the episodes of a group
        assert {*map(id, pool.map(processor.read, [picture] * 8))} == {id(seen)}
    wanted = processor.media(images.read(picture))
    np.testing.assert_array_equal(processor.media(seen).patches, wanted.patches)
    assert processor.media(seen).grid == wanted.grid
    given = processor.as_given().read(picture)
    assert PIL.Image.open(io.BytesIO(given.data)).size == size and given == images.read(picture)
    assert processor.as_given().count(given) == processor.count(seen)


def test_deep_images_keep_their_upper_bits():
    ramp = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    for kind in ("PNG", "TIFF"):
        seen = PIL.Image.open(io.BytesIO(images.read(encoded(PIL.Image.fromarray(ramp), kind)).data))
        np.testing.assert_array_equal(np.asarray(seen)[..., 1], ramp >> 8)
    with pytest.raises(ValueError, match="8 or 16 bits a channel, got 32"):
        images.read(encoded(PIL.Image.fromarray(ramp.astype(np.float32)), "TIFF"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Pillow
def test_damaged_files_are_one_error():
    turned = PIL.Image.fromarray(pixels(9, 7)).getexif()
    turned[images.ORIENTATION] = 6
    turned[0x010E] = "words"
    whole = [encoded(PIL.Image.fromarray(pixels(9, 7)), kind, exif=turned) for kind in ("JPEG", "PNG", "WEBP", "TIFF")]
    rng, refused = np.random.default_rng(0), set()
    for data in whole * 100:
        at = max(0, data.find(b"MM\0*")) + rng.integers(0, 60)  # EXIF
        try:
            images.read(data[:at] + rng.bytes(2) + data[at + 2 :])
        except ValueError as error:
            assert str(error).startswith("images: ") and "\n" not in str(error)
            refused.add(str(error))
    assert refused


def test_errors_say_what_is_wrong(folder, tmp_path):
    data = encoded(PIL.Image.fromarray(pixels()))
    processor = images.load(folder)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "cut.png").write_bytes(data[:300])
    for source, words in [
        (b"text", "4 bytes are no image of [A-Z, ]+$"), (data[:300], "damaged"),
        ("http://127.0.0.1/a.png", "not fetched"), ("iVBOR" * 9999, "^.{1,200}$"),
        ("data:image/png,abc", "base64"), ("data:image/png;base64,a", "base64"), (tmp_path / "none", "cannot be read"),
        (tmp_path / "cut.png", "cut.png': the image is damaged"),
        (tmp_path, "regular file"), (tmp_path / "pipe", "regular file"), ("a\0b", "cannot be read"),
        ("data:image/png;base64,é", "base64"),
        (3, "int"), ({"bytes": None}, "NoneType"), (b"", "are no image"),
        (encoded(PIL.Image.new("1", (1 << 13, 9000))), "smaller"),
        (encoded(PIL.Image.new("1", (1 << 14, 12000))), "bomb"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            images.read(source)
    with pytest.raises(ValueError, match="got 1 for 2"):
        processor.expanded([IMAGE], [Image(data), Image(data)])
    with pytest.raises(ValueError, match="refuses 600 x 2 pixels"):
        processor.count(images.read(PIL.Image.fromarray(pixels(600, 2))))
    with pytest.raises(ValueError, match="preprocessor_config.json"):
        images.load(tmp_path)


@pytest.mark.parametrize(
    "written, words",
    [
        ("", "cannot be loaded"), ("[]", "cannot be loaded"),
        ('{"image_processor_type": "CLIPImageProcessor"}', "patch_size of at least 1, got None"),
        ({"merge_size": 0}, "merge_size of at least 1, got 0"), ({"patch_size": "a"}, "at least 1, got 'a'"),
        ({"do_resize": False}, "refuses 37 x 52 pixels"), ({"image_mean": [1]}, "mean must have 3"),
    ],
)  # fmt: skip
def test_damaged_processors_are_one_error_that_names_the_file(folder, tmp_path, written, words):
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": IMAGE}))
    whole = json.loads((folder / images.FILE).read_text())
    (tmp_path / images.FILE).write_text(written if isinstance(written, str) else json.dumps(whole | written))
    with pytest.raises(ValueError, match=f"(?s){images.FILE}.*{words}"):
        processor = images.load(tmp_path)
        processor.media(processor.read(PIL.Image.fromarray(pixels())))


def test_a_processor_has_the_sizes_of_the_tower(folder):
    tower = types.SimpleNamespace(patch=4, merge=2, frames=2)
    images.load(folder).check(tower)
    for name, field in (("patch", "patch_size"), ("merge", "merge_size"), ("frames", "temporal_patch_size")):
        with pytest.raises(ValueError, match=f"{images.FILE}: {field} must be 7, as in the vision tower"):
            images.load(folder).check(types.SimpleNamespace(**{**vars(tower), name: 7}))


def test_videos_and_a_missing_pillow_are_refused(folder, tmp_path, monkeypatch):
    (tmp_path / images.FILE).write_bytes((folder / images.FILE).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": IMAGE, "video_token_id": 58}))
    processor = images.load(tmp_path)
    with pytest.raises(ValueError, match="no video token, id 58"):
        processor.expanded([1, 58], [])
    with pytest.raises(ValueError, match="no video token, id 58"):
        chat_images.refuse([1, 58], processor)
    assert images.load(folder).expanded([1, 58], []) == [1, 58]
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="damaged or half-written JSON"):
        images.of_model(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ValueError, match=r"pip install 'areax\[vision\]'"):
        images.read(b"a")


def test_a_model_of_text_has_no_processor(folder, tmp_path, monkeypatch):
    assert images.of_model(folder).token == IMAGE
    (tmp_path / "config.json").write_text("{}")
    assert images.of_model(tmp_path) is None
    (tmp_path / images.FILE).write_text("{}")
    assert images.of_model(tmp_path) is None
    cached = lambda name, **_: str(folder) if name == "a/b" else pytest.fail("only the cache")
    monkeypatch.setattr("huggingface_hub.snapshot_download", cached)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (folder / images.FILE).rename(tmp_path / "kept")
    assert images.of_model("a/b") is None
    (tmp_path / "kept").rename(folder / images.FILE)
    assert images.of_model("a/b").token == IMAGE
