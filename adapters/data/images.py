"""Images for models with a vision tower: reading them, and turning them into patches with the model's processor."""

from __future__ import annotations

import base64
import functools
import io
import os
import stat
import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...models.vision import Media, Tower
from ...rollout.types import Image
from .. import tokenizer
from ..hf import config_files
from ..runtime import hub

if TYPE_CHECKING:
    import PIL.Image

FORMATS = "PNG", "JPEG", "WEBP"  # read as they are
READABLE = *FORMATS, "BMP", "GIF", "TIFF"  # of these the first frame
MOST_PIXELS = 1 << 26
MOST_BYTES = 1 << 26
FILE = "preprocessor_config.json"
ORIENTATION = 0x0112  # of EXIF
SHARED = 64  # images that are kept in the size in which the model sees them, the last read
LOCKS = 16
# What Pillow raises for damaged files, in EXIF above all.
DAMAGED = (
    OSError, ValueError, SyntaxError, TypeError, AssertionError, LookupError, ArithmeticError, EOFError,
    NotImplementedError, MemoryError, struct.error, zlib.error,
)  # fmt: skip


def read(source: Any) -> Image:
    """An Image of what data sets and clients have.

    Args:
      source: bytes of a file, the path of one, a data URL (`data:image/png;base64,...`), a PIL image, or what
        `datasets` stores of an image: {"bytes": ..., "path": ...}.

    Returns:
      The bytes as they are if they are an upright RGB image; else a PNG of it.

    Raises:
      ValueError: it is no image of a known format, damaged, of 32 bits a channel, or of more than 2^26 pixels or
        bytes; a path is no regular file. Addresses other than data URLs are not fetched.
    """
    if isinstance(source, Image):
        return source
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, str) and source[:5].lower() == "data:":
        source = _from_url(source)
    elif isinstance(source, str) and "://" in source[:16]:
        raise ValueError(
            f"images: addresses are not fetched, got {source!r:.80}; give a data URL, or in rows a file's path"
        )
    elif isinstance(source, str | os.PathLike):
        try:
            return read(_from_file(Path(source)))
        except ValueError as error:
            words = str(error).removeprefix("images: ")
            raise ValueError(f"images: {str(source)[-70:]!r}: {words}") from None
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
        opened = _opened(data)
        if opened.format in FORMATS and opened.mode == "RGB" and _orientation(opened) == 1:
            _decoded(opened)
            return Image(data)
        return _written(opened)
    if hasattr(source, "convert") and hasattr(source, "getexif"):
        return _written(source)
    raise ValueError(f"images: an image must be bytes, a path, a data URL or a PIL image, got {type(source).__name__}")


class Processor:
    """What a model's image processor does, and which tokens stand for its features; loaded when it is first used.

    Attributes:
      token: id of the token that stands for a feature of an image.
      video: that of a video, which no prompt may have; None = the model knows none.
    """

    def __init__(self, folder: Path, token: int, video: int | None = None, resizes: bool = True):
        self.token, self.video, self._folder, self._resizes = token, video, folder, resizes
        self._shared = functools.lru_cache(SHARED)(self._resized)
        self._locks = [threading.Lock() for _ in range(LOCKS)]

    @functools.cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        where, named = self._folder / FILE, ("patch_size", "merge_size", "temporal_patch_size")
        try:
            made = AutoImageProcessor.from_pretrained(self._folder, backend="pil")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: cannot be loaded: {' '.join(str(error).split())}") from None
        for name in named:
            if not (type(value := getattr(made, name, None)) is int and value > 0):
                raise ValueError(f"{where}: a processor of Qwen-VL has a {name} of at least 1, got {value!r:.80}")
        return made

    def check(self, tower: Tower) -> None:
        """Raises ValueError unless patches are as large as those of the model's tower."""
        own = {"patch_size": tower.patch, "merge_size": tower.merge, "temporal_patch_size": tower.frames}
        for name, wanted in own.items():
            if (value := getattr(self._processor, name)) != wanted:
                raise ValueError(
                    f"{self._folder / FILE}: {name} must be {wanted}, as in the vision tower of config.json, got "
                    f"{value}"
                )

    def read(self, source: Any) -> Image:
        """As the function `read`, in the size in which the model sees it: servers then need not resize it, which each
        image library does a little differently. The episodes of a group, which read an image at a time, share one."""
        image = read(source)
        if not (self._resizes and self._processor.do_resize):
            return image
        with self._locks[int(image.hash[:8], 16) % LOCKS]:
            return self._shared(image)

    def _resized(self, image: Image) -> Image:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        processor, opened = self._processor, _opened(image.data)
        bounds = processor.size.shortest_edge, processor.size.longest_edge
        try:
            rows, columns = smart_resize(*opened.size[::-1], processor.patch_size * processor.merge_size, *bounds)
        except ValueError as error:
            raise self._refused(opened, error) from error
        size = columns, rows
        return image if opened.size == size else _written(opened.resize(size, processor.resample))

    def as_given(self) -> Processor:
        """The same, whose `read` leaves images in their size: many times faster, where no server gets them."""
        return Processor(self._folder, self.token, self.video, resizes=False)

    def count(self, image: Image) -> int:
        """How many features an image has: so many tokens stand for it."""
        processor, opened = self._processor, _opened(image.data)
        try:
            patches = processor.get_number_of_image_patches(opened.height, opened.width, {})
        except ValueError as error:
            raise self._refused(opened, error) from error
        return patches // processor.merge_size**2

    def media(self, image: Image) -> Media:
        """The image's patches, resized and normalised as the model's processor does."""
        processor, decoded = self._processor, _decoded(_opened(image.data))
        try:
            made = processor(images=[decoded], return_tensors="np")
        except ValueError as error:
            raise self._refused(decoded, error) from error
        [grid] = made["image_grid_thw"].tolist()
        return Media(np.asarray(made["pixel_values"], np.float32), tuple(grid))

    def expanded(self, tokens: Sequence[int], images: Sequence[Image]) -> list[int]:
        """Tokens as the model reads them: each image's one token, as templates write it, as often as it has features.

        Raises:
          ValueError: there are more or fewer of these tokens than images, or some that stand for videos.
        """
        if self.video in tokens:
            raise ValueError(
                f"images: a prompt must have no video token, id {self.video}, got one; take it out of the text"
            )
        found = sum(token == self.token for token in tokens)
        if found != len(images):
            raise ValueError(
                f"images: a prompt needs one image token for each image, got {found} for {len(images)}; in texts write "
                "<image>, not the model's own token"
            )
        counts = iter([self.count(image) for image in images])
        return [each for token in tokens for each in ([token] * next(counts) if token == self.token else [token])]

    def _refused(self, opened: PIL.Image.Image, error: ValueError) -> ValueError:
        size = f"{opened.width} x {opened.height} pixels"
        return ValueError(f"images: the model's processor ({self._folder / FILE}) refuses {size}: {error}")


def load(path: str | Path) -> Processor:
    """The image processor of a model folder, or of a hub model `owner/name`.

    Raises:
      ValueError: the folder has no image processor, or config.json names no image token.
    """
    folder = Path(hub.folder(path, needs=(FILE,)))
    if not (folder / FILE).is_file():
        raise ValueError(f"{path}: a model that reads images needs {FILE}, its image processor, got none")
    token, video = _tokens(folder)
    if type(token) is not int:
        raise ValueError(f"{path}: config.json names no image_token_id, got {token!r:.80}")
    return Processor(folder, token, video)


def of_model(path: str | Path) -> Processor | None:
    """The image processor of a model, as `load`; None if it has none or names no image token: it reads only text."""
    folder = Path(hub.folder(path, needs=("config.json", *tokenizer.FILES)))  # of a text model, a copy is complete
    if (folder / FILE).is_file() and type((tokens := _tokens(folder))[0]) is int:
        return Processor(folder, *tokens)
    return None


def _tokens(folder: Path) -> tuple[Any, Any]:
    """The tokens of images and videos in config.json; None without them."""
    config = folder / "config.json"
    source = config_files.read_json(config) if config.is_file() else {}
    return source.get("image_token_id"), source.get("video_token_id")


def _from_url(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ValueError(f"images: a data URL must be data:image/...;base64,..., got {url!r:.80}")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise ValueError(f"images: a data URL must hold base64, got {url!r:.80}: {error}") from None


def _from_file(path: Path) -> bytes:
    try:
        if stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its writer
            with open(path, "rb") as file:
                return file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise ValueError(f"cannot be read: {why}; give a file's path, or a data URL") from None
    raise ValueError("must be a regular file")


def _opened(data: bytes) -> PIL.Image.Image:
    """The image, whose pixels are not decoded yet."""
    try:
        import PIL.Image
    except ImportError as error:
        raise ValueError(f"images: they need Pillow ({error}); pip install 'areax[vision]'") from None
    if len(data) > MOST_BYTES:
        raise ValueError(f"images: an image may have {MOST_BYTES:,} bytes, got {len(data):,} or more")
    try:
        opened = PIL.Image.open(io.BytesIO(data), formats=READABLE)
    except PIL.UnidentifiedImageError:  # its text is only the address of the bytes
        raise ValueError(f"images: {len(data):,} bytes are no image of {', '.join(READABLE)}") from None
    except (*DAMAGED, PIL.Image.DecompressionBombError) as error:
        raise ValueError(f"images: {len(data):,} bytes cannot be read: {error}") from None
    if opened.width * opened.height > MOST_PIXELS:
        raise ValueError(
            f"images: an image may have {MOST_PIXELS:,} pixels, got {opened.width} x {opened.height}; make it smaller"
        )
    return opened


def _decoded(opened: PIL.Image.Image) -> PIL.Image.Image:
    """The image in RGB; of 16 bits the upper 8.

    Raises:
      ValueError: it is damaged, or has 32 bits a channel, whose range is not known.
    """
    import PIL.Image

    if opened.mode in ("I", "F"):
        raise ValueError(f"images: an image must have 8 or 16 bits a channel, got 32 (mode {opened.mode}); convert it")
    try:
        if opened.mode.startswith("I;16"):  # Pillow's own conversion makes all above 255 white
            opened = PIL.Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
        return opened.convert("RGB")
    except DAMAGED as error:
        raise ValueError(f"images: the image is damaged: {error}") from None


def _orientation(opened: PIL.Image.Image) -> int:
    """That of EXIF; 1 = upright."""
    try:
        return opened.getexif().get(ORIENTATION, 1)
    except DAMAGED as error:
        raise ValueError(f"images: the image is damaged: {error}") from None


def _written(opened: PIL.Image.Image) -> Image:
    """A PNG of an image, upright, in RGB."""
    from PIL import ImageOps

    file = io.BytesIO()
    try:
        upright = ImageOps.exif_transpose(opened)
    except DAMAGED as error:
        raise ValueError(f"images: the image is damaged: {error}") from None
    _decoded(upright).save(file, "PNG", compress_level=1)  # 6 takes five times as long
    return Image(file.getvalue())
