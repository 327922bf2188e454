"""Images of rows: read in all their forms, placed in text and tokens, stored by reference, and turned into patches.

An image is a string everywhere, from the data plane to servers and rewards: `file.bin#offset+bytes` for encoded bytes in a
memory-mapped column of a preprocessed dataset, a path, or `data:image/...;base64,...`. Text runs import neither pillow nor
transformers' processors.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import itertools
import math
import os
import re
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rl.data.content_marks import IMAGE_MARK, join_texts
from mindspeed_rl.data.conversation import Conversation, MalformedRowError, Row
from mindspeed_rl.data.encoding import TurnIds
from mindspeed_rl.data.indexed import IMAGE_BYTES, IMAGE_SIZES, IndexedColumns, column_prefix, read_index
from mindspeed_rl.data.sources import ArrowRow
from mindspeed_rl.files import open_regular, read_json, read_regular

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

#: column of a row with the references of its images, in the order of their tokens
IMAGES = "images"
#: stands for an image in the text of a row
TAG = "<image>"
#: columns that are read where map_keys does not name one; the second is LLaVA's
_COLUMNS = ("images", "image")
_STORED = re.compile(r"(?P<path>.+)#(?P<offset>\d+)\+(?P<size>\d+)")
_DATA = re.compile(r"data:image/[\w.+-]+;base64,")
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")
#: keys of a part of a message, or of an image that is an object, in the order in which they are read
_SOURCES = ("bytes", "image_url", "image", "url", "path", "base64", "data")
#: types of the parts of a message
_IMAGE_PARTS, _OTHER_PARTS = ("image", "image_url", "input_image"), ("video", "video_url", "audio", "input_audio")
_MAX_RATIO = 200
#: bytes of an encoded image: above pillow's limit of 1.8e8 pixels, as 16-bit RGB without compression
_MAX_FILE_BYTES = 1 << 30
#: formats for which pillow starts a program
_PROGRAMS = ("EPS", "WMF")
#: pixels of the longer side of an image on a page
_THUMBNAIL = 160
#: rows of a dataset whose images are compared with the run's limits
_CHECKED_ROWS = 64
#: values of an image's orientation by which width and height change places (EXIF 2.32, tag 274)
_ORIENTATION, _TURNED = 274, (5, 6, 7, 8)
#: tags of a TIFF (6.0): width and height as stored; bits of a value; 0 is white where the last is 0
_SIDES, _BITS, _PHOTOMETRIC = (256, 257), 258, 262
#: errors of pillow at damaged bytes, by format
_UNREADABLE = (ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError, SyntaxError)
_UNREADABLE += (TypeError, ValueError, struct.error, zlib.error)
#: modes of pillow with values of 16 bits, and formats which it reads as such values in mode I
_GREY_16, _GREY_16_IN_I = ("I;16", "I;16L", "I;16B", "I;16N"), ("PNG", "PPM")
#: modes of pillow whose black and white nothing defines
_NO_RANGE = {"I": "32-bit integers", "F": "floating-point numbers"}
#: formats with several pictures, all of which count; what others have next to the first are small copies or layers
_FRAMES = ("GIF", "WEBP", "PNG", "TIFF", "AVIF")
#: modes of pillow that a PNG has
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")

Grid = tuple[int, int, int]


class References(tuple[str, ...]):
    """References of a row's images, told from a column of that name in a data set of text by this type."""


class ImageError(MalformedRowError):
    """An image that cannot be read, or is of a size or place that is not supported."""


@dataclass(frozen=True)
class ImageRules:
    """Sizes and tokens of the images of a model.

    Attributes:
        folder: Hugging Face folder with the processor's files.
        patch_size, temporal_patch_size, merge_size: patch sizes and merge size of the processor; merge_size^2 patches are a
            token.
        min_pixels, max_pixels: an image is resized to an area between them.
        token_id: id of an image's tokens.
        frame: ids of the tokens before and after them.
        own_limits: the two limits are the processor's own, not the run file's.
    """

    folder: str
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    token_id: int
    frame: tuple[int, int]
    own_limits: bool = True

    @classmethod
    def read(cls, folder: str | Path, min_pixels: int | None = None, max_pixels: int | None = None) -> ImageRules | None:
        """Read the rules of the model in a Hugging Face folder; None for a model of text.

        Args:
            min_pixels: takes the place of the processor's own limit.
            max_pixels: the same.

        Raises:
            ValueError: the processor's file is missing, or the limits leave no size.
        """
        folder = Path(folder).expanduser()
        config = _read_json(folder / "config.json")
        if "vision_config" not in config or "image_token_id" not in config:
            if min_pixels is not None or max_pixels is not None:
                key = "min_pixels" if min_pixels is not None else "max_pixels"
                raise ValueError(f"{key}: the model in {folder} reads no images; leave it out")
            return None
        processor = _read_json(folder / "preprocessor_config.json")
        # transformers 5 writes one file for the processor and its parts
        processor = processor or _read_json(folder / "processor_config.json").get("image_processor", {})
        if "patch_size" not in processor:
            raise ValueError(
                f"{folder} has no preprocessor_config.json with a patch_size, which the images of this model are cut by;"
                " copy the processor's files from the published model"
            )
        size = processor.get("size") or {}
        names = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
        own = [processor.get(old) or size.get(new) for old, new in names]
        low, high = (value if value is not None else default for value, default in zip((min_pixels, max_pixels), own))
        rules = cls(
            folder=str(folder),
            patch_size=processor["patch_size"],
            temporal_patch_size=processor.get("temporal_patch_size", 2),
            merge_size=processor.get("merge_size", 2),
            min_pixels=low or 56 * 56,
            max_pixels=high or 28 * 28 * 1280,
            token_id=config["image_token_id"],
            frame=(config["vision_start_token_id"], config["vision_end_token_id"]),
            own_limits=min_pixels is None and max_pixels is None,
        )
        if not rules.factor**2 <= rules.max_pixels or not 0 < rules.min_pixels <= rules.max_pixels:
            raise ValueError(
                f"min_pixels={rules.min_pixels}, max_pixels={rules.max_pixels}: an image of this model has at least"
                f" {rules.factor} x {rules.factor} = {rules.factor**2} pixels, and min_pixels is not above max_pixels"
            )
        return rules

    @property
    def factor(self) -> int:
        """Width and height of the square of pixels that becomes a token."""
        return self.patch_size * self.merge_size

    def grid(self, height: int, width: int) -> Grid:
        """Return (1, rows, columns) of patches of an image after resizing.

        Both sides become multiples of `factor`; the area comes between the limits, and the ratio changes as little as possible.

        Raises:
            ImageError: one side is over 200 times the other.
        """
        if max(height, width) > _MAX_RATIO * min(height, width):
            raise ImageError(f"an image of {width} x {height} pixels: one side may be at most {_MAX_RATIO} times the other")
        rows, columns = round(height / self.factor), round(width / self.factor)
        area, unit = height * width, self.factor**2
        if rows * columns * unit > self.max_pixels:
            scale = math.sqrt(area / self.max_pixels)
            rows, columns = (max(1, math.floor(side / scale / self.factor)) for side in (height, width))
        elif rows * columns * unit < self.min_pixels:
            scale = math.sqrt(self.min_pixels / area)
            rows, columns = (math.ceil(side * scale / self.factor) for side in (height, width))
        return 1, rows * self.merge_size, columns * self.merge_size

    def count_tokens(self, grid: Grid) -> int:
        """Return the tokens of an image."""
        return math.prod(grid) // self.merge_size**2


@dataclass(frozen=True)
class StoredImage:
    """An image of a row, by reference.

    Attributes:
        key: the reference; equal keys are equal pixels.
        grid: time, rows and columns, in patches.
    """

    rules: ImageRules
    key: str
    grid: Grid

    @property
    def num_tokens(self) -> int:
        """Tokens of the image."""
        return self.rules.count_tokens(self.grid)

    def read(self) -> Tensor:
        """Return the patches, [patches, 3 * temporal_patch_size * patch_size^2] float32, as the processor makes them."""
        return _read_patches(self.rules, self.key, self.grid)


def read_references(columns: Mapping[str, object]) -> tuple[str, ...]:
    """Return the references of the images of a row; none for a row of text."""
    images = columns.get(IMAGES)
    return tuple(images) if isinstance(images, References) else ()


def has_references(columns: Mapping[str, object]) -> bool:
    """Return True for a row of a run with images, which may have none itself."""
    return isinstance(columns.get(IMAGES), References)


def prepare_images(rules: ImageRules, references: Iterable[str]) -> tuple[StoredImage, ...]:
    """Return images with their grids, which the first bytes of each tell.

    Raises:
        ImageError: one cannot be read.
    """
    return tuple(StoredImage(rules, reference, rules.grid(*_read_size(reference))) for reference in references)


@lru_cache(maxsize=32)
def _read_patches(rules: ImageRules, reference: str, grid: Grid) -> Tensor:
    outputs = _load_processor(rules)(images=[open_image(reference)], return_tensors="pt")
    if (found := tuple(outputs["image_grid_thw"][0].tolist())) != grid:
        raise ValueError(
            f"{_shorten(reference)}: the processor in {rules.folder} makes a grid of {found}, but the row has tokens of {grid};"
            " was it preprocessed with other min_pixels or max_pixels?"
        )
    return outputs["pixel_values"].float()


@lru_cache(maxsize=4)
def _load_processor(rules: ImageRules) -> Any:
    """Load transformers' image processor, which has no type of its own; the process has applied the adaptors for vision."""
    from transformers import AutoImageProcessor

    limits = {} if rules.own_limits else {"size": {"shortest_edge": rules.min_pixels, "longest_edge": rules.max_pixels}}
    return AutoImageProcessor.from_pretrained(rules.folder, **limits)


# ---------------------------------------------------------------------- bytes


def read_image(reference: str) -> bytes:
    """Return the encoded bytes of an image.

    Raises:
        ImageError: the file does not exist, or the text is not base64.
    """
    if match := _DATA.match(reference):
        try:
            return base64.b64decode(reference[match.end() :], validate=True)
        except binascii.Error as error:
            raise ImageError(f"image {_shorten(reference)} is not base64: {error}") from error
    try:
        if (stored := _STORED.fullmatch(reference)) and not os.path.exists(reference):
            return _read_slice(stored["path"], int(stored["offset"]), int(stored["size"]))
        return read_regular(Path(reference.removeprefix("file://")).expanduser(), _MAX_FILE_BYTES)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~user of no user
        raise ImageError(f"image {_shorten(reference)} cannot be read: {error}") from error


def _read_slice(path: str, offset: int, size: int) -> bytes:
    """Read bytes of a file that has more of them.

    Raises:
        ValueError: they are more than an image may have, or the file ends before.
    """
    with open_regular(path) as file:
        end = os.fstat(file.fileno()).st_size
        if size > _MAX_FILE_BYTES or offset + size > end:
            raise ValueError(f"{size} bytes from byte {offset} are not in the file of {end} bytes, or above {_MAX_FILE_BYTES}")
        return os.pread(file.fileno(), size, offset)


@contextlib.contextmanager
def _open(reference: str) -> Iterator[Image]:
    """Open an image; only its header is read until a pixel is needed. All errors of pillow become one that names the image."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():  # pillow's, of large images and of damage that decoding finds
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(read_image(reference)))
            _check_form(image, f"image {_shorten(reference)}")
            yield image
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError(f"image {_shorten(reference)} is broken, or of no format that pillow knows") from error
    except (*_UNREADABLE, Image.DecompressionBombError) as error:
        raise ImageError(f"image {_shorten(reference)} is broken: {error}") from error


def _check_form(image: Image, name: str) -> None:
    """Raise ImageError for an image of which pillow's RGB would be another one: without a range, or with further pictures.

    So it does for a format that is a program.
    """
    if image.format in _PROGRAMS:
        raise ImageError(f"{name} has the format {image.format}, which is a program; save it as PNG")
    numbers = _NO_RANGE.get(image.mode)
    if numbers and not (image.mode == "I" and image.format in _GREY_16_IN_I):
        raise ImageError(f"{name} has {numbers} as pixels, whose black and white are not defined; save it with 8 or 16 bits")
    if image.mode == "LAB":
        raise ImageError(f"{name} has the colours of LAB; save it as RGB")
    if image.format in _FRAMES and getattr(image, "is_animated", False):
        raise ImageError(f"{name} has several frames or pages, of which a model would see the first; give each as an image")


def _to_rgb(image: Image) -> Image:
    """Return an image upright and as RGB; what is transparent is white."""
    from PIL import Image, ImageOps

    if image.mode in _GREY_16 or image.mode == "I":
        image = _to_8_bits(image)
    upright = ImageOps.exif_transpose(image)
    if upright.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in upright.info:
        white = Image.new("RGBA", upright.size, "white")
        return Image.alpha_composite(white, upright.convert("RGBA")).convert("RGB")
    return upright.convert("RGB")


def _to_8_bits(image: Image) -> Image:
    """Return a grey image of 16 bits with values of 8; pillow would cut those above 255."""
    from PIL import Image

    tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
    white = 2 ** tags.get(_BITS, (16,))[0] - 1
    # a table, since a large image must not have 8 bytes per pixel
    levels = np.clip((np.arange(1 << 16) * 255 + white // 2) // white, 0, 255)
    levels = 255 - levels if tags.get(_PHOTOMETRIC) == 0 else levels
    if isinstance(clear := image.info.get("transparency"), int) and 0 <= clear < len(levels):
        levels[clear] = 255
    converted = Image.fromarray(levels.astype(np.uint8)[np.clip(np.asarray(image), 0, len(levels) - 1)])
    converted.getexif()[_ORIENTATION] = image.getexif().get(_ORIENTATION, 1)
    return converted


def open_image(reference: str) -> Image:
    """Return an image as pillow's, decoded, upright, RGB; what is transparent is white.

    Raises:
        ImageError: it cannot be read or is broken, or its pixels are numbers without a range, or it has several frames.
    """
    with _open(reference) as image:
        return _to_rgb(image)


def make_thumbnail(reference: str) -> str:
    """Return a small copy of an image as a data: URL, for pages."""
    picture, buffer = open_image(reference), io.BytesIO()
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    picture.save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@lru_cache(maxsize=65536)
def _read_stored_size(reference: str) -> tuple[int, int]:
    with _open(reference) as image:
        tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
        # pillow gives the size of a TIFF as it is once turned
        width, height = (tags.get(tag, side) for tag, side in zip(_SIDES, image.size))
        return (width, height) if image.getexif().get(_ORIENTATION) in _TURNED else (height, width)


def _read_size(reference: str) -> tuple[int, int]:
    """Return height and width of an upright image from its header."""
    # an image that is part of its reference would stay in memory
    return _read_stored_size.__wrapped__(reference) if is_embedded(reference) else _read_stored_size(reference)


def check_images(references: Iterable[str]) -> None:
    """Decode images.

    Raises:
        ImageError: one cannot be read or is broken.
    """
    for reference in references:
        with _open(reference) as image:
            image.draft("RGB", (image.width // 8, image.height // 8))  # a JPEG is decoded at an eighth of its size
            image.load()


def make_data_url(reference: str) -> str:
    """Return an image as a data: URL that names its format, for programs that do not read references."""
    with _open(reference) as image:
        kind = (image.format or "png").lower()
    return f"data:image/{kind};base64,{base64.b64encode(read_image(reference)).decode()}"


def _write_png(image: Any) -> bytes:
    """Return pillow's image, which may be one of an open file, as a PNG of the same pixels, upright.

    Raises:
        ImageError: it has several frames, or its pixels are numbers without a range.
    """
    from PIL import ImageOps

    _check_form(image, "an image of the row")
    upright = ImageOps.exif_transpose(image)
    buffer = io.BytesIO()
    (upright if upright.mode in _PNG_MODES else _to_rgb(upright)).save(buffer, "PNG")
    return buffer.getvalue()


def find_file(reference: str) -> tuple[str, int] | None:
    """Return path and size of the file that an image is in; None for an image that its reference has, or that is gone."""
    if is_embedded(reference):
        return None
    stored = _STORED.fullmatch(reference)
    path = stored["path"] if stored and not os.path.exists(reference) else reference.removeprefix("file://")
    with contextlib.suppress(OSError):
        return path, os.path.getsize(os.path.expanduser(path))
    return None


def embed_image(data: bytes) -> str:
    """Return the reference of an image that is its bytes."""
    return f"data:image/any;base64,{base64.b64encode(data).decode()}"


def is_embedded(reference: str) -> bool:
    """Return True for a reference that has the image's bytes in it."""
    return bool(_DATA.match(reference))


# ---------------------------------------------------------------------- rows


def make_reference(value: object, folder: str | None = None) -> str:
    """Return the reference of an image in any of its forms.

    Args:
        folder: folder of relative paths; None: the working directory.

    Raises:
        ImageError: the form is not supported.
    """
    if isinstance(value, Mapping):
        value = next((value[name] for name in _SOURCES if value.get(name) is not None), None)
        return make_reference(value, folder)
    if isinstance(value, (bytes, bytearray)):
        return embed_image(bytes(value))
    if hasattr(value, "save") and hasattr(value, "mode"):  # pillow's, in a dataset of the hub
        return embed_image(_write_png(value))
    if not isinstance(value, str) or not value:
        raise ImageError(f"has an image of type {type(value).__name__}; give a path, bytes, base64 or a data: URL")
    if is_embedded(value):
        return value
    if value.startswith(("http://", "https://")):
        raise ImageError(f"image {_shorten(value)} is on the network; download it, training reads local files")
    path = Path(value.removeprefix("file://")).expanduser()
    path = path if path.is_absolute() or folder is None else Path(folder).expanduser() / path
    with contextlib.suppress(OSError):  # base64 may be too long for a name
        if path.is_file():
            return str(path.absolute())
    return f"data:image/any;base64,{''.join(value.split())}" if _BASE64.fullmatch(value) else str(path.absolute())


def read_parts(content: object) -> tuple[object, tuple[str, ...]]:
    """Return a message's content with IMAGE_MARK for each image, and the references; what is not a list of parts stays.

    IMAGE_MARK in a text is left out: there is no image.

    Raises:
        ImageError: a part is neither text nor an image.
    """
    if isinstance(content, str):
        return join_texts([content]), ()
    if not isinstance(content, (list, tuple)):
        return content, ()
    texts: list[str | None] = []
    references = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        if kind in _IMAGE_PARTS:
            texts.append(None)
            references.append(make_reference(part))
        elif isinstance(text := part if isinstance(part, str) else part.get("text"), str):
            texts.append(text)
        else:
            raise ImageError(f"has a part of type {kind!r}: only text and images are supported")
    return join_texts(texts), tuple(references)


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of raw rows.

    Attributes:
        rules: image rules of the model; None reads rows before the model is known.
        marker: text of an image whose tokens are not counted yet: start, one token, end; or IMAGE_MARK.
        folder: folder of relative paths; None: the working directory.
    """

    rules: ImageRules | None
    marker: str
    folder: str | None = None

    @classmethod
    def build(cls, rules: ImageRules, tokenizer: PreTrainedTokenizerBase, folder: str | None = None) -> ImageReader:
        """Build a reader with the texts of the model's tokens.

        Raises:
            ValueError: the folder does not exist, or the tokenizer is another model's.
        """
        if folder is not None and not Path(folder).expanduser().is_dir():
            raise ValueError(f"image_folder={folder!r} is not a folder")
        tokens: Any = tokenizer.convert_ids_to_tokens([rules.frame[0], rules.token_id, rules.frame[1]])
        marker = "".join(token or "" for token in tokens)
        if tokenizer.encode(marker, add_special_tokens=False) != [rules.frame[0], rules.token_id, rules.frame[1]]:
            raise ValueError(f"the tokenizer has not the image tokens of the model in {rules.folder}; give the model's own")
        return cls(rules, marker, folder)

    def take(self, row: Row, columns: Iterable[object]) -> tuple[Row, tuple[str, ...]]:
        """Return the row with the marker in the place of each image, and the references of its images.

        Parts of messages that are images become text; `<image>` becomes the marker.

        Args:
            row: as the data set has it.
            columns: that are text or messages.

        Raises:
            ImageError: an image has a form that is not supported, or a part of a message has none.
        """
        own = next((row[name] for name in _COLUMNS if row.get(name) not in (None, [], "")), [])
        own = list(own) if isinstance(own, (list, tuple)) else [own]
        parts: list[object] = []
        names = [name for name in columns if isinstance(name, str) and name in row and name not in _COLUMNS]
        changed: Row = {**row, **{name: self._mark(row[name], parts) for name in dict.fromkeys(names)}}
        changed = ArrowRow(changed) if isinstance(row, ArrowRow) else changed
        if parts and own and len(parts) != len(own):
            raise ImageError(f"has {len(parts)} images in its messages and {len(own)} in its column")
        if missing := sum(part is None for part in parts):
            if len(own) != len(parts):
                raise ImageError(f"has {missing} image parts without an image, and no column with them")
            parts = own
        return changed, tuple(make_reference(value, self.folder) for value in parts or own)

    def _mark(self, value: Any, parts: list[object]) -> Any:
        """Return a column's value with markers; images of message parts are added to `parts`, None for a part without one."""
        if isinstance(value, str):
            return value.replace(TAG, self.marker)
        if isinstance(value, Mapping):
            return {name: self._mark(item, parts) for name, item in value.items()}
        if not isinstance(value, (list, tuple)):
            return value
        marked = []
        for item in value:
            kind = item.get("type") if isinstance(item, Mapping) else None
            if kind in _IMAGE_PARTS:
                parts.append(next((item[name] for name in _SOURCES if item.get(name) is not None), None))
                item = {"type": "text", "text": self.marker}
            elif kind in _OTHER_PARTS:
                raise ImageError(f"has a part of type {kind!r}: only images are supported, so give a few frames as images")
            else:
                item = self._mark(item, parts)
            marked.append(item)
        return marked

    def place(self, conversation: Conversation, references: tuple[str, ...]) -> Conversation:
        """Return the conversation with a marker for each image; without any, they come before the first question.

        Raises:
            ImageError: the text has places for another number of images, or an answer has one.
        """
        counts = [sum(text.count(self.marker) for text in message.contents) for message in conversation.messages]
        count = sum(counts) + (conversation.system or "").count(self.marker)
        if any(counts[1::2]):
            raise ImageError("has an image in an answer, which the model cannot write")
        messages = list(conversation.messages)
        if references and not count:
            first = messages[0]
            contents = (self.marker * len(references) + first.contents[0], *first.contents[1:])
            entries = first.entries and ({**first.entries[0], "content": contents[0]}, *first.entries[1:])
            messages[0] = replace(first, contents=contents, entries=entries)
        elif count != len(references):
            raise ImageError(f"has {len(references)} images, and {count} times {TAG} in its text")
        check_images(references)
        return replace(conversation, messages=messages, images=references)

    def select(self, conversation: Conversation) -> Conversation:
        """Return the beginning of a conversation with the images of its markers only."""
        texts = [conversation.system or "", *(text for message in conversation.messages for text in message.contents)]
        return replace(conversation, images=conversation.images[: sum(text.count(self.marker) for text in texts)])

    def write_markers(self, conversation: Conversation) -> Conversation:
        """Return the conversation with this reader's marker in the place of each IMAGE_MARK."""
        messages = [
            replace(
                one,
                contents=tuple(text.replace(IMAGE_MARK, self.marker) for text in one.contents),
                entries=tuple({**entry, "content": entry["content"].replace(IMAGE_MARK, self.marker)} for entry in one.entries),
            )
            for one in conversation.messages
        ]
        system = conversation.system and conversation.system.replace(IMAGE_MARK, self.marker)
        return replace(conversation, messages=messages, system=system)

    def expand(self, turns: Sequence[TurnIds], references: Sequence[str]) -> tuple[list[TurnIds], tuple[StoredImage, ...]]:
        """Return the ids of the turns with all tokens of each image, as the model's processor writes them, and the images.

        Raises:
            ImageError: the ids have another number of images, or an image cannot be read.
        """
        assert self.rules is not None
        images, token_id = prepare_images(self.rules, references), self.rules.token_id
        count = sum(side.count(token_id) for turn in turns for side in turn)
        if count != len(images):
            raise ImageError(f"has {len(images)} images, and {count} image tokens in its text")
        following = iter(images)

        def expand_side(ids: list[int]) -> list[int]:
            if token_id not in ids:
                return ids
            return [token for id_ in ids for token in ([id_] if id_ != token_id else [id_] * next(following).num_tokens)]

        return [(expand_side(source), expand_side(target)) for source, target in turns], images


def collapse_image_tokens(ids: Sequence[int], images: Sequence[StoredImage]) -> list[int]:
    """Return the ids with one token for each image, as engines take them.

    The k-th image has the k-th run of its number of image tokens between the tokens before and after an image; other runs were
    sampled, and stay.

    Raises:
        ValueError: there are fewer such runs than images, or an image follows an image token that was sampled: engines would
            put it there.
    """
    collapsed: list[int] = []
    waiting = list(reversed(images))
    start = 0
    for token, run in itertools.groupby(ids):
        length = len(list(run))
        frame = (*ids[start - 1 : start], *ids[start + length : start + length + 1])
        start += length
        is_image = bool(waiting) and token == waiting[-1].rules.token_id and length == waiting[-1].num_tokens
        is_image = is_image and frame == waiting[-1].rules.frame
        if waiting and token == waiting[-1].rules.token_id and not is_image:
            raise ValueError("the model has sampled an image token, after which the engine cannot place another image")
        collapsed += [token] * (1 if is_image else length)
        if is_image:
            waiting.pop()
    if waiting:
        raise ValueError(f"a context of {len(ids)} tokens lacks the tokens of {len(waiting)} of its {len(images)} images")
    return collapsed


# ---------------------------------------------------------------------- columns of a dataset


def build_image_columns(images: Sequence[StoredImage]) -> dict[str, np.ndarray]:
    """Return the columns of a row with these images: never empty, since no reader takes an empty file."""
    data = [read_image(image.key) for image in images]
    sizes = [number for content, image in zip(data, images) for number in (len(content), *image.grid)]
    return {
        IMAGE_BYTES: np.frombuffer(b"".join(data) + b"\0", dtype=np.uint8),
        IMAGE_SIZES: np.array([len(images), *sizes], dtype=np.int32),
    }


def join_image_columns(contents: Sequence[np.ndarray], sizes: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return both columns of a pack from its samples' columns."""
    count = sum(int(row[0]) for row in sizes)
    joined = np.concatenate([*(row[:-1] for row in contents), np.zeros(1, dtype=np.uint8)])
    return joined, np.concatenate([np.array([count], dtype=np.int32), *(row[1:] for row in sizes)])


@dataclass(frozen=True)
class StoredImages:
    """The images of a preprocessed dataset, by reference.

    Attributes:
        rules: image rules of the model.
        path: path of the file with the bytes.
        offsets: [rows] of the first byte of each row.
        rows: all columns of the dataset.
    """

    rules: ImageRules
    path: str
    offsets: np.ndarray
    rows: IndexedColumns

    @classmethod
    def open(cls, prefix: str | Path, rules: ImageRules, rows: IndexedColumns) -> StoredImages | None:
        """Open the images next to the other columns; None for a dataset of text.

        Raises:
            ValueError: the images were preprocessed for another model, or with other limits.
        """
        if IMAGE_SIZES not in rows.columns:
            return None
        path = column_prefix(prefix, IMAGE_BYTES)
        images = cls(rules, os.path.abspath(f"{path}.bin"), read_index(path).pointers, rows)
        for index in np.linspace(0, len(rows) - 1, min(len(rows), _CHECKED_ROWS), dtype=int).tolist():
            for image in images.row(index):
                expected = rules.grid(*_read_size(image.key))
                if expected != image.grid:
                    raise ValueError(
                        f"{path}.bin, row {index}: an image was preprocessed to {image.grid[1]} x {image.grid[2]} patches, and"
                        f" is {expected[1]} x {expected[2]} with min_pixels={rules.min_pixels} and"
                        f" max_pixels={rules.max_pixels} of this run; preprocess with the same ones"
                    )
        return images

    def row(self, index: int) -> tuple[StoredImage, ...]:
        """Return the images of a row, in the order of their tokens."""
        sizes = self.rows.row(index, IMAGE_SIZES).tolist()
        images, offset = [], int(self.offsets[index])
        for first in range(1, len(sizes), 4):
            size, *grid = sizes[first : first + 4]
            images.append(StoredImage(self.rules, f"{self.path}#{offset}+{size}", (grid[0], grid[1], grid[2])))
            offset += size
        return tuple(images)


def describe_images(rules: ImageRules, rows: Iterable[Iterable[Grid]]) -> str:
    """Return a line with the tokens of the images of some rows, and the limits.

    Args:
        rules: image rules of the model.
        rows: the grids of each row's images.
    """
    counts = ["+".join(str(rules.count_tokens(grid)) for grid in row) or "none" for row in rows]
    limits = f"a token is {rules.factor} x {rules.factor} pixels, an image {rules.min_pixels} to {rules.max_pixels}"
    return f"tokens of images in the first {len(counts)} rows: {', '.join(counts)} ({limits})"


def read_first_grids(prefix: str | Path, count: int = 8) -> list[list[Grid]]:
    """Return the grids of the images of the first rows of a preprocessed dataset; [] for one of text."""
    path = column_prefix(Path(prefix).expanduser(), IMAGE_SIZES)
    if not os.path.isfile(f"{path}.idx"):
        return []
    index, sizes = read_index(path), np.memmap(f"{path}.bin", np.int32, "r")
    firsts = (index.pointers[:count] // sizes.itemsize).tolist()
    rows = [sizes[first + 1 : first + length].reshape(-1, 4) for first, length in zip(firsts, index.lengths[:count].tolist())]
    return [[(int(t), int(h), int(w)) for _, t, h, w in row] for row in rows]


def split_images(images: Sequence[StoredImage], samples: Sequence[np.ndarray]) -> list[tuple[StoredImage, ...]]:
    """Return the images of each sample of a pack, by the image tokens that its ids have.

    Raises:
        ValueError: a sample has a part of an image.
    """
    split, following = [], list(reversed(images))
    for ids in samples:
        own: list[StoredImage] = []
        waiting = int(np.count_nonzero(ids == images[0].rules.token_id)) if images else 0
        while waiting > 0 and following:
            own.append(following.pop())
            waiting -= own[-1].num_tokens
        if waiting:
            raise ValueError(
                f"a row of {len(ids)} tokens has a part of an image: seq_length cuts it; preprocess with the run's seq_length"
            )
        split.append(tuple(own))
    return split


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _shorten(reference: str) -> str:
    return reference if len(reference) <= 120 else f"{reference[:60]}...({len(reference)} characters)"
