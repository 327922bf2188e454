"""Images and videos of rows: read in all their forms, placed in text and tokens, stored by reference, turned into patches.

An image is a string everywhere, from the data plane to servers and rewards: `file.bin#offset+bytes` for encoded bytes in a
memory-mapped column of a preprocessed dataset, a path, or `data:image/...;base64,...`. A video is one too: the picture of its
sampled frames (`videos.py`), whose header says so. Text runs import neither pillow nor transformers' processors.
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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rl.data.content_marks import IMAGE_MARK, VIDEO_MARK, Medium, join_texts
from mindspeed_rl.data.conversation import Conversation, MalformedRowError, Row
from mindspeed_rl.data.encoding import TurnIds
from mindspeed_rl.data.indexed import IMAGE_BYTES, IMAGE_SIZES, IndexedColumns, column_prefix, read_index
from mindspeed_rl.data.media_limits import NO_LIMITS, MediaLimits
from mindspeed_rl.data.sources import ArrowRow
from mindspeed_rl.data.videos import (
    VIDEO_COLUMNS,
    VIDEO_PARTS,
    VIDEO_TAG,
    Clip,
    VideoError,
    VideoRules,
    VideoSource,
    decode,
    has_source,
    make_source,
    read_clip,
    read_frames,
    shorten,
)
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
#: texts of columns that are JSON in a file of text
_NOTHING = ("[]", "{}", "null")
_STORED = re.compile(r"(?P<path>.+)#(?P<offset>\d+)\+(?P<size>\d+)")
_DATA = re.compile(r"data:image/[\w.+-]+;base64,")
#: beginnings of the reference of a clip that is its bytes, and of a video that is decoded once the model is known
_CLIP_DATA, _SOURCE_DATA = "data:image/x-clip;base64,", "data:video/x-source;json,"
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")
#: keys of a part of a message, or of an image that is an object, in the order in which they are read
_SOURCES = ("bytes", "image_url", "image", "url", "path", "base64", "data")
#: types of the parts of a message
_IMAGE_PARTS, _OTHER_PARTS = ("image", "image_url", "input_image"), ("audio", "audio_url", "input_audio")
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
        video: rules of the videos of the model; None where it reads none.
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
    video: VideoRules | None = None

    @classmethod
    def read(cls, folder: str | Path, limits: MediaLimits = NO_LIMITS) -> ImageRules | None:
        """Read the rules of the model in a Hugging Face folder; None for a model of text.

        Args:
            limits: take the place of the processor's own.

        Raises:
            ValueError: the processor's file is missing, or the limits leave no size or number of frames.
        """
        folder = Path(folder).expanduser()
        config = _read_json(folder / "config.json")
        if limits.language_model_only or "vision_config" not in config or "image_token_id" not in config:
            if limits.set_keys:
                reason = " with language_model_only: true" if limits.language_model_only else ""
                raise ValueError(f"{limits.set_keys[0]}: the model in {folder} reads no images{reason}; leave it out")
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
        low, high = (given if given is not None else other for given, other in zip((limits.min_pixels, limits.max_pixels), own))
        rules = cls(
            folder=str(folder),
            patch_size=processor["patch_size"],
            temporal_patch_size=processor.get("temporal_patch_size", 2),
            merge_size=processor.get("merge_size", 2),
            min_pixels=low or 56 * 56,
            max_pixels=high or 28 * 28 * 1280,
            token_id=config["image_token_id"],
            frame=(config["vision_start_token_id"], config["vision_end_token_id"]),
            own_limits=limits.min_pixels is None and limits.max_pixels is None,
            video=VideoRules.read(folder, config, processor, limits),
        )
        if rules.video is None and limits.set_video_keys:
            raise ValueError(f"{limits.set_video_keys[0]}: the model in {folder} reads no videos; leave it out")
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
    def reference(self) -> str:
        """The reference, as of `VideoPart`."""
        return self.key

    @property
    def num_tokens(self) -> int:
        """Tokens of the image."""
        return self.rules.count_tokens(self.grid)

    def read(self) -> Tensor:
        """Return the patches, [patches, 3 * temporal_patch_size * patch_size^2] float32, as the processor makes them."""
        return _read_patches(self.rules, self.key, self.grid)


@dataclass(frozen=True)
class StoredVideo:
    """A video of a row, by reference, as `StoredImage`.

    Attributes:
        key: the reference of its clip.
        clip: header of the clip.
    """

    rules: VideoRules
    key: str
    clip: Clip

    @property
    def grid(self) -> Grid:
        """Time, rows and columns, in patches."""
        return self.rules.grid(self.clip)

    @property
    def num_tokens(self) -> int:
        """Tokens of its frames, without those of their times."""
        return math.prod(self.grid) // self.rules.merge_size**2

    def list_parts(self) -> tuple[VideoPart, ...]:
        """Return what stands in the place of adjacent tokens: the video, or with timestamps each pair of frames."""
        times, rows, columns = self.grid
        if not self.rules.has_timestamps:
            return (VideoPart(self, 0, self.grid, self.rules.compute_time_step(self.clip)),)
        return tuple(VideoPart(self, time, (1, rows, columns), 1.0) for time in range(times))

    def read_frames(self) -> np.ndarray:
        """Return the frames, [frames, height, width, 3] uint8."""
        with _open(self.key) as image:
            return read_frames(image, self.clip)


@dataclass(frozen=True)
class VideoPart:
    """A video or some frames of one, between two tokens of text.

    Attributes:
        first: its first index in time.
        grid: time, rows and columns, in patches.
        time_step: rotary positions from one index in time to the next.
    """

    video: StoredVideo
    first: int
    grid: Grid
    time_step: float

    @property
    def key(self) -> str:
        """A text that is the same for equal pixels."""
        return f"{self.video.key}@{self.first}"

    @property
    def reference(self) -> str:
        """The reference of all of the video."""
        return self.video.key

    def read(self) -> Tensor:
        """Return the patches, as `StoredImage.read`."""
        size = math.prod(self.grid)
        start = self.first * math.prod(self.grid[1:])
        return _read_video_patches(self.video)[start : start + size]


def list_parts(media: Iterable[StoredImage | StoredVideo]) -> tuple[StoredImage | VideoPart, ...]:
    """Return images and parts of videos, each of which has adjacent tokens, in their order."""
    return tuple(part for one in media for part in (one.list_parts() if isinstance(one, StoredVideo) else (one,)))


def read_references(columns: Mapping[str, object]) -> tuple[str, ...]:
    """Return the references of the images of a row; none for a row of text."""
    images = columns.get(IMAGES)
    return tuple(images) if isinstance(images, References) else ()


def has_references(columns: Mapping[str, object]) -> bool:
    """Return True for a row of a run with images, which may have none itself."""
    return isinstance(columns.get(IMAGES), References)


def list_grids(media: Iterable[StoredImage | StoredVideo]) -> list[Grid]:
    """Return the grids of images and videos, as a dataset has them: the time of a video is negative."""
    grids = [(one.grid, -1 if isinstance(one, StoredVideo) else 1) for one in media]
    return [(sign * times, rows, columns) for (times, rows, columns), sign in grids]


def prepare_images(rules: ImageRules, references: Iterable[str]) -> tuple[StoredImage | StoredVideo, ...]:
    """Return images and videos with their grids, which the first bytes of each tell.

    Raises:
        ImageError: one cannot be read.
        VideoError: a clip is of another model.
    """
    return tuple(_prepare(rules, reference) for reference in references)


def _prepare(rules: ImageRules, reference: str) -> StoredImage | StoredVideo:
    header = _read_size(reference)
    if not isinstance(header, Clip):
        return StoredImage(rules, reference, rules.grid(*header))
    video = rules.video
    if video is None:
        raise VideoError(f"{shorten(reference)} is a video, and the model in {rules.folder} reads none")
    height, width = video.fit(len(header.indices), *header.source_size)
    if len(header.indices) < video.temporal_patch_size or (height, width) != (header.height, header.width):
        raise VideoError(
            f"{shorten(reference)}: a video was preprocessed to {header.width} x {header.height} pixels, and is"
            f" {width} x {height} with the processor in {video.folder}; preprocess with this model"
        )
    return StoredVideo(video, reference, header)


@lru_cache(maxsize=32)
def _read_patches(rules: ImageRules, reference: str, grid: Grid) -> Tensor:
    outputs = _load_processor(rules)(images=[open_image(reference)], return_tensors="pt")
    if (found := tuple(outputs["image_grid_thw"][0].tolist())) != grid:
        raise ValueError(
            f"{shorten(reference)}: the processor in {rules.folder} makes a grid of {found}, but the row has tokens of {grid};"
            " was it preprocessed with other min_pixels or max_pixels?"
        )
    return outputs["pixel_values"].float()


@lru_cache(maxsize=8)
def _read_video_patches(video: StoredVideo) -> Tensor:
    import torch

    frames = torch.from_numpy(video.read_frames().transpose(0, 3, 1, 2).copy())
    outputs = _load_video_processor(video.rules.folder)(
        videos=[frames], do_resize=False, do_sample_frames=False, return_tensors="pt"
    )
    assert tuple(outputs["video_grid_thw"][0].tolist()) == video.grid
    return outputs["pixel_values_videos"].float()


@lru_cache(maxsize=4)
def _load_video_processor(folder: str) -> Any:
    """Load transformers' processor of videos; see `_load_processor`."""
    from transformers import AutoVideoProcessor

    return AutoVideoProcessor.from_pretrained(folder)


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
            raise ImageError(f"image {shorten(reference)} is not base64: {error}") from error
    try:
        if (stored := _STORED.fullmatch(reference)) and not os.path.exists(reference):
            return _read_slice(stored["path"], int(stored["offset"]), int(stored["size"]))
        return read_regular(Path(reference.removeprefix("file://")).expanduser(), _MAX_FILE_BYTES)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~user of no user
        raise ImageError(f"image {shorten(reference)} cannot be read: {error}") from error


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
            _check_form(image, f"image {shorten(reference)}")
            yield image
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError(f"image {shorten(reference)} is broken, or of no format that pillow knows") from error
    except (*_UNREADABLE, Image.DecompressionBombError) as error:
        raise ImageError(f"image {shorten(reference)} is broken: {error}") from error


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
    """Return a small copy of an image, or of the first frame of a video, as a data: URL, for pages."""
    picture, buffer = open_frames(reference)[0] if is_video(reference) else open_image(reference), io.BytesIO()
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    picture.save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@lru_cache(maxsize=65536)
def _read_stored_size(reference: str) -> tuple[int, int] | Clip:
    with _open(reference) as image:
        if (clip := read_clip(image)) is not None:
            return clip
        tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
        # pillow gives the size of a TIFF as it is once turned
        width, height = (tags.get(tag, side) for tag, side in zip(_SIDES, image.size))
        return (width, height) if image.getexif().get(_ORIENTATION) in _TURNED else (height, width)


def _read_size(reference: str) -> tuple[int, int] | Clip:
    """Return height and width of an upright image, or the clip's header, from the first bytes."""
    # an image that is part of its reference would stay in memory
    return _read_stored_size.__wrapped__(reference) if is_embedded(reference) else _read_stored_size(reference)


def is_video(reference: str) -> bool:
    """Return True for the reference of a video of a row, or of a clip in a file.

    Raises:
        ImageError: it cannot be read.
    """
    if reference.startswith((_CLIP_DATA, _SOURCE_DATA)):
        return True
    # bytes of an image that a row has itself are not decoded for this
    return not is_embedded(reference) and isinstance(_read_size(reference), Clip)


def count_videos(references: Iterable[str]) -> int:
    """Return the number of videos among images and videos."""
    return sum(map(is_video, references))


def check_media_limits(before: Sequence[str], new: Sequence[str], max_images: int, max_videos: int) -> None:
    """Check the numbers of images and videos of a context.

    Args:
        before, new: references that the context has, and those that are added.

    Raises:
        ValueError: they are more than the engine takes.
    """
    videos = count_videos(new)
    for kind, added, limit, present in (
        ("image", len(new) - videos, max_images, len(before) - count_videos(before)),
        ("video", videos, max_videos, count_videos(before)),
    ):
        if added and (count := present + added) > limit:
            raise ValueError(f"the context has {count} {kind}s, and generate_config.limit_mm_{kind}_per_prompt is {limit}")


def open_frames(reference: str) -> list[Image]:
    """Return the sampled frames of a video as pillow's images, RGB.

    Raises:
        ImageError: it cannot be read, or is an image.
    """
    from PIL import Image

    with _open(reference) as image:
        if (clip := read_clip(image)) is None:
            raise ImageError(f"image {shorten(reference)} is no video: open it with open_image")
        return [Image.fromarray(frame) for frame in read_frames(image, clip)]


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
    """Return an image as a data: URL that names its format, for programs that do not read references.

    A video is the picture of its frames, of the type image/x-clip: a program sends it on as the URL of a video.
    """
    with _open(reference) as image:
        kind = "x-clip" if read_clip(image) is not None else (image.format or "png").lower()
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
        raise ImageError(f"image {shorten(value)} is on the network; download it, training reads local files")
    path = Path(value.removeprefix("file://")).expanduser()
    path = path if path.is_absolute() or folder is None else Path(folder).expanduser() / path
    with contextlib.suppress(OSError):  # base64 may be too long for a name
        if path.is_file():
            return str(path.absolute())
    return f"data:image/any;base64,{''.join(value.split())}" if _BASE64.fullmatch(value) else str(path.absolute())


def read_parts(content: object) -> tuple[object, tuple[str, ...]]:
    """Return a message's content with a mark for each image and video, and the references; other than a list of parts stays.

    A mark in a text is left out: there is no image. A video is not decoded here (`ImageReader.decode_videos`).

    Raises:
        ImageError: a part is neither text nor an image nor a video.
        VideoError: a video has a form that is not supported.
    """
    if isinstance(content, str):
        return join_texts([content]), ()
    if not isinstance(content, (list, tuple)):
        return content, ()
    texts: list[str | Medium] = []
    references = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        if kind in _IMAGE_PARTS:
            texts.append(Medium.IMAGE)
            references.append(make_reference(part))
        elif kind in VIDEO_PARTS:
            texts.append(Medium.VIDEO)
            references.append(make_video_reference(part))
        elif isinstance(text := part if isinstance(part, str) else part.get("text"), str):
            texts.append(text)
        else:
            raise ImageError(f"has a part of type {kind!r}: only text, images and videos are supported")
    return join_texts(texts), tuple(references)


def is_media(value: object) -> bool:
    """Return True for what may be one or several images or videos: not for nothing in any of its forms, and not for numbers."""
    if isinstance(value, (list, tuple)):
        return any(map(is_media, value))
    if isinstance(value, Mapping):  # an empty image of `datasets` is {"bytes": null, "path": null}
        return any(part not in (None, "", b"") for part in value.values())
    if isinstance(value, (str, bytes)):
        return bool(value) and value not in _NOTHING
    return value is not None and not isinstance(value, (bool, int, float))


def find_media(row: Mapping[str, object]) -> str:
    """Return where a row has images or videos, such as "column images" or "message parts"; empty for a row of text."""
    if name := find_media_column(row):
        return f"column {name}"
    return "message parts" if any(map(_has_part, row.values())) else ""


def find_media_column(row: Mapping[str, object], but: Collection[str] = ()) -> str | None:
    """Return the column of a row with images or videos, other than `but`, if it has one."""
    return next((name for name in (*_COLUMNS, *VIDEO_COLUMNS) if name not in but and is_media(row.get(name))), None)


def _has_part(value: object) -> bool:
    """Return True where a value of a row has parts of messages that are images or videos."""
    if isinstance(value, Mapping):
        return value.get("type") in (*_IMAGE_PARTS, *VIDEO_PARTS) or any(map(_has_part, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_part, value))


def _is_video_part(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in VIDEO_PARTS


def has_videos(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Return True where a message has a video among its parts."""
    contents = (message.get("content") for message in messages)
    return any(_is_video_part(part) for content in contents if isinstance(content, (list, tuple)) for part in content)


def make_video_reference(value: object, folder: str | None = None) -> str:
    """Return the reference of a video in any of its forms, which is not decoded yet; a clip stays what it is.

    Args:
        folder: folder of relative paths; None: the working directory.

    Raises:
        VideoError: the form is not supported.
    """
    source = make_source(value, folder, lambda image: make_reference(image, folder))
    if isinstance(source.place, bytes) and source.is_clip:
        return _CLIP_DATA + base64.b64encode(source.place).decode()
    return _SOURCE_DATA + source.to_text()


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of raw rows.

    Attributes:
        rules: image rules of the model; None reads rows before the model is known.
        marker: text of an image whose tokens are not counted yet: start, one token, end; or IMAGE_MARK.
        folder: folder of relative paths; None: the working directory.
        video_marker: the same of a video; "" for a model that reads none.
        tokenizer: the model's, which writes the times of frames; None without `rules`.
    """

    rules: ImageRules | None
    marker: str
    folder: str | None = None
    video_marker: str = VIDEO_MARK
    tokenizer: PreTrainedTokenizerBase | None = None

    @classmethod
    def build(cls, rules: ImageRules, tokenizer: PreTrainedTokenizerBase, folder: str | None = None) -> ImageReader:
        """Build a reader with the texts of the model's tokens.

        Raises:
            ValueError: the folder does not exist, or the tokenizer is another model's.
        """
        if folder is not None and not Path(folder).expanduser().is_dir():
            raise ValueError(f"image_folder={folder!r} is not a folder")
        marker = _write_marker(tokenizer, rules.frame, rules.token_id)
        if not marker:
            raise ValueError(f"the tokenizer has not the image tokens of the model in {rules.folder}; give the model's own")
        video = "" if rules.video is None else _write_marker(tokenizer, rules.frame, rules.video.token_id)
        return cls(rules, marker, folder, video, tokenizer)

    def take(self, row: Row, columns: Iterable[object]) -> tuple[Row, tuple[str, ...]]:
        """Return the row with the marker in the place of each image and video, and their references: images, then videos.

        Parts of messages that are images or videos become text; `<image>` and, in a row with videos, `<video>` become markers.
        Videos are decoded here, once.

        Args:
            row: as the data set has it.
            columns: that are text or messages.

        Raises:
            ImageError: an image has a form that is not supported, or a part of a message has none.
            VideoError: the same of a video, or it cannot be decoded.
        """
        images, videos = (_read_column(row, names) for names in (_COLUMNS, VIDEO_COLUMNS))
        own = [*_COLUMNS, *VIDEO_COLUMNS]
        names = [name for name in columns if isinstance(name, str) and name in row and name not in own]
        marked = _MarkedParts({TAG: self.marker, **({VIDEO_TAG: self.video_marker} if videos else {})})
        changed: Row = {**row, **{name: self._mark(row[name], marked) for name in dict.fromkeys(names)}}
        changed = ArrowRow(changed) if isinstance(row, ArrowRow) else changed
        images, videos = _match(marked.images, images, "image"), _match(marked.videos, videos, "video")
        references = (*(make_reference(value, self.folder) for value in images), *map(self.read_video, videos))
        return changed, references

    def read_video(self, value: object) -> str:
        """Return the reference of the clip of a video in any of its forms; it is decoded.

        Raises:
            VideoError: it cannot be read.
        """
        reference = make_video_reference(value, self.folder)
        return reference if self.rules is None else self.decode_videos([reference])[0]

    def decode_videos(self, references: Iterable[str]) -> tuple[str, ...]:
        """Return references in which videos that are not decoded yet are clips.

        Raises:
            VideoError: one cannot be decoded, or the model reads no videos.
        """
        return tuple(
            self._decode(VideoSource.from_text(one.removeprefix(_SOURCE_DATA))) if one.startswith(_SOURCE_DATA) else one
            for one in references
        )

    def decode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return messages of an agent in which the video of each part is a clip, so that it is decoded once.

        Raises:
            VideoError: as of `decode_videos`, or a form is not supported.
        """

        def decode_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
            return {**message, "content": [self._decode_part(part) for part in message["content"]]}

        return [decode_message(message) if has_videos([message]) else message for message in messages]

    def _decode_part(self, part: Any) -> Any:
        if not _is_video_part(part):
            return part
        (clip,) = self.decode_videos([make_video_reference(part)])
        return {"type": "video", "video": clip}

    def _decode(self, source: VideoSource) -> str:
        assert self.rules is not None
        if self.rules.video is None:
            raise VideoError(f"has a video, and the model in {self.rules.folder} reads none; give some of its frames as images")
        return _CLIP_DATA + base64.b64encode(decode(source, self.rules.video, open_image)).decode()

    def _mark(self, value: Any, marked: _MarkedParts) -> Any:
        """Return a column's value with markers; images and videos of message parts are added, None for a part without one."""
        if isinstance(value, str):
            for tag, marker in marked.tags.items():
                value = value.replace(tag, marker)
            return value
        if isinstance(value, Mapping):
            return {name: self._mark(item, marked) for name, item in value.items()}
        if not isinstance(value, (list, tuple)):
            return value
        result = []
        for item in value:
            kind = item.get("type") if isinstance(item, Mapping) else None
            if kind in _IMAGE_PARTS:
                marked.images.append(next((item[name] for name in _SOURCES if item.get(name) is not None), None))
                item = {"type": "text", "text": self.marker}
            elif kind in VIDEO_PARTS and not self.video_marker:
                raise ImageError(f"has a part of type {kind!r}: only images are supported, so give a few frames as images")
            elif kind in VIDEO_PARTS:
                marked.videos.append(item if has_source(item) else None)
                item = {"type": "text", "text": self.video_marker}
            elif kind in _OTHER_PARTS:
                raise ImageError(f"has a part of type {kind!r}: only text, images and videos are supported")
            else:
                item = self._mark(item, marked)
            result.append(item)
        return result

    def place(self, conversation: Conversation, references: tuple[str, ...]) -> Conversation:
        """Return the conversation with a marker for each image and video, and their references in the order of the markers.

        Without any markers of their kind, images, and videos after them, come before the first question.

        Raises:
            ImageError: the text has places for another number of images or videos, or an answer has one.
        """
        videos = [one for one in references if one.startswith((_CLIP_DATA, _SOURCE_DATA))]
        images = [one for one in references if not one.startswith((_CLIP_DATA, _SOURCE_DATA))]
        markers = (self.marker, *filter(None, [self.video_marker]))
        messages = list(conversation.messages)
        for marker, kind in zip(markers, ("an image", "a video")):
            if any(marker in text for message in messages[1::2] for text in message.contents):
                raise ImageError(f"has {kind} in an answer, which the model cannot write")
        added = ""
        for marker, kind, tag, some in zip(markers, ("images", "videos"), (TAG, VIDEO_TAG), (images, videos)):
            count = sum(text.count(marker) for text in _list_texts(conversation))
            if some and not count:
                added += marker * len(some)
            elif count != len(some):
                raise ImageError(f"has {len(some)} {kind}, and {count} times {tag} in its text")
        if added:
            first = messages[0]
            contents = (added + first.contents[0], *first.contents[1:])
            entries = first.entries and ({**first.entries[0], "content": contents[0]}, *first.entries[1:])
            messages[0] = replace(first, contents=contents, entries=entries)
        check_images(images)
        placed = replace(conversation, messages=messages)
        kinds = {self.marker: iter(images), self.video_marker: iter(videos)}
        found = re.findall("|".join(map(re.escape, markers)), "\0".join(_list_texts(placed)))
        return replace(placed, images=tuple(next(kinds[marker]) for marker in found))

    def select(self, conversation: Conversation) -> Conversation:
        """Return the beginning of a conversation with the images of its markers only."""
        markers = (self.marker, *filter(None, [self.video_marker]))
        count = sum(text.count(marker) for text in _list_texts(conversation) for marker in markers)
        return replace(conversation, images=conversation.images[:count])

    def write_markers(self, conversation: Conversation) -> Conversation:
        """Return the conversation with this reader's markers in the place of each IMAGE_MARK and VIDEO_MARK."""

        def write(text: str) -> str:
            return text.replace(IMAGE_MARK, self.marker).replace(VIDEO_MARK, self.video_marker)

        messages = [
            replace(
                one,
                contents=tuple(map(write, one.contents)),
                entries=tuple({**entry, "content": write(entry["content"])} for entry in one.entries),
            )
            for one in conversation.messages
        ]
        return replace(conversation, messages=messages, system=conversation.system and write(conversation.system))

    def expand(
        self, turns: Sequence[TurnIds], references: Sequence[str]
    ) -> tuple[list[TurnIds], tuple[StoredImage | StoredVideo, ...]]:
        """Return the ids of the turns with all tokens of images and videos, as the model's processor writes them, and both.

        Raises:
            ImageError: the ids have another number of images or videos, or one cannot be read.
        """
        assert self.rules is not None
        media, rules = prepare_images(self.rules, references), self.rules
        kinds = {rules.token_id: StoredImage} | ({} if rules.video is None else {rules.video.token_id: StoredVideo})
        found = [kinds[id_] for turn in turns for side in turn for id_ in side if id_ in kinds]
        if found != list(map(type, media)):
            numbers = [[list(map(type, media)).count(kind), found.count(kind)] for kind in (StoredImage, StoredVideo)]
            (images, image_tokens), (videos, video_tokens) = numbers
            text = f"has {images} images, and {image_tokens} image tokens in its text"
            is_text_of_videos = videos or video_tokens
            raise ImageError(text + (f"; {videos} videos, and {video_tokens} of theirs" if is_text_of_videos else ""))
        following = iter(media)

        def expand_side(ids: list[int]) -> list[int]:
            if not kinds.keys() & set(ids):
                return ids
            return [token for id_ in ids for token in ([id_] if id_ not in kinds else self._write_tokens(next(following)))]

        return [(expand_side(source), expand_side(target)) for source, target in turns], media

    def _write_tokens(self, one: StoredImage | StoredVideo) -> list[int]:
        """Return what takes the place of the one token of an image or a video."""
        if isinstance(one, StoredImage):
            return [one.rules.token_id] * one.num_tokens
        tokenizer = self.tokenizer
        assert tokenizer is not None
        return one.rules.write_tokens(one.clip, lambda text: tokenizer.encode(text, add_special_tokens=False))


@dataclass
class _MarkedParts:
    """Images and videos of the parts of messages, and the tags of texts with their markers."""

    tags: Mapping[str, str]
    images: list[object] = field(default_factory=list)
    videos: list[object] = field(default_factory=list)


def _write_marker(tokenizer: PreTrainedTokenizerBase, frame: tuple[int, int], token_id: int) -> str:
    """Return the text of an image or video with one token; "" where the tokenizer has not these tokens."""
    ids = [frame[0], token_id, frame[1]]
    tokens: Any = tokenizer.convert_ids_to_tokens(ids)
    marker = "".join(token or "" for token in tokens)
    return marker if tokenizer.encode(marker, add_special_tokens=False) == ids else ""


def _read_column(row: Row, names: Sequence[str]) -> list[object]:
    """Return the images or videos of the first of these columns that has any."""
    own = next((row[name] for name in names if row.get(name) not in (None, [], "")), [])
    return list(own) if isinstance(own, (list, tuple)) else [own]


def _match(parts: Sequence[object], own: Sequence[object], kind: str) -> Sequence[object]:
    """Return the images or videos of a row from the parts of its messages and from its column.

    Raises:
        ImageError: their numbers differ.
    """
    if parts and own and len(parts) != len(own):
        raise ImageError(f"has {len(parts)} {kind}s in its messages and {len(own)} in its column")
    if missing := sum(part is None for part in parts):
        if len(own) != len(parts):
            article = "an" if kind == "image" else "a"
            raise ImageError(f"has {missing} {kind} parts without {article} {kind}, and no column with them")
        return own
    return parts or own


def _list_texts(conversation: Conversation) -> list[str]:
    return [conversation.system or "", *(text for message in conversation.messages for text in message.contents)]


def collapse_image_tokens(ids: Sequence[int], images: Sequence[StoredImage | StoredVideo]) -> list[int]:
    """Return the ids with one token for each image and video, as engines take them.

    The k-th image has the k-th run of its number of image tokens between the tokens before and after an image; other runs were
    sampled, and stay. A video with timestamps has a run for each time, and the texts between them go too.

    Raises:
        ValueError: there are fewer such runs than images, or an image follows an image token that was sampled: engines would
            put it there.
    """
    spans: list[tuple[int, int, int]] = []  # first and end of the tokens of each image, and the token in their place
    waiting = [(part, one) for one in images for part in list_parts([one])][::-1]
    first = start = 0
    for token, run in itertools.groupby(ids):
        length = len(list(run))
        end = start + length
        if any(token == later.rules.token_id for _, later in waiting):
            part, one = waiting[-1]
            frame = (*ids[start - 1 : start], *ids[end : end + 1])
            is_next = token == one.rules.token_id and frame == one.rules.frame
            if not is_next or length != math.prod(part.grid) // one.rules.merge_size**2:
                raise ValueError("the model has sampled an image token, after which the engine cannot place another image")
            waiting.pop()
            has_times = isinstance(one, StoredVideo) and one.rules.has_timestamps
            if not isinstance(part, VideoPart) or part.first == 0:
                # the time is between the mark before the video and the one before its frames
                first = _find_last(ids, one.rules.frame[0], start - 1) + 1 if has_times else start
            if not waiting or waiting[-1][1] is not one:
                spans.append((first, end + has_times, token))
        start = end
    if waiting:
        missing = len(images) - len(spans)
        raise ValueError(f"a context of {len(ids)} tokens lacks the tokens of {missing} of its {len(images)} images")
    collapsed: list[int] = []
    start = 0
    for first, end, token in spans:
        collapsed += [*ids[start:first], token]
        start = end
    return [*collapsed, *ids[start:]]


def _find_last(ids: Sequence[int], token: int, end: int) -> int:
    """Return the last index of a token before `end`.

    Raises:
        ValueError: it is not there.
    """
    for index in range(end - 1, -1, -1):
        if ids[index] == token:
            return index
    raise ValueError(f"a context of {len(ids)} tokens lacks the token {token} before a video")


# ---------------------------------------------------------------------- columns of a dataset


def build_image_columns(images: Sequence[StoredImage | StoredVideo]) -> dict[str, np.ndarray]:
    """Return the columns of a row with these images and videos: never empty, since no reader takes an empty file.

    The time of a video's grid is negative.
    """
    data = [read_image(image.key) for image in images]
    sizes = [number for content, grid in zip(data, list_grids(images)) for number in (len(content), *grid)]
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
                if isinstance(image, StoredVideo):
                    continue  # reading it has compared its frames with the rules
                expected = _prepare(rules, image.key).grid
                if expected != image.grid:
                    raise ValueError(
                        f"{path}.bin, row {index}: an image was preprocessed to {image.grid[1]} x {image.grid[2]} patches, and"
                        f" is {expected[1]} x {expected[2]} with min_pixels={rules.min_pixels} and"
                        f" max_pixels={rules.max_pixels} of this run; preprocess with the same ones"
                    )
        return images

    def row(self, index: int) -> tuple[StoredImage | StoredVideo, ...]:
        """Return the images and videos of a row, in the order of their tokens.

        Raises:
            ValueError: a video was preprocessed for another model.
        """
        sizes = self.rows.row(index, IMAGE_SIZES).tolist()
        images: list[StoredImage | StoredVideo] = []
        offset = int(self.offsets[index])
        for first in range(1, len(sizes), 4):
            size, *grid = sizes[first : first + 4]
            reference = f"{self.path}#{offset}+{size}"
            if grid[0] < 0:
                images.append(self._read_video(index, reference))
            else:
                images.append(StoredImage(self.rules, reference, (grid[0], grid[1], grid[2])))
            offset += size
        return tuple(images)

    def _read_video(self, index: int, reference: str) -> StoredImage | StoredVideo:
        try:
            video = _prepare(self.rules, reference)
            if isinstance(video, StoredVideo):
                video.rules.check_frames(video.clip)
            return video
        except MalformedRowError as error:
            raise ValueError(f"{self.path}, row {index}: {error}") from error

    def parts(self, index: int) -> tuple[StoredImage | VideoPart, ...]:
        """Return the images and the parts of videos of a row, each of which has adjacent tokens."""
        return list_parts(self.row(index))


def describe_images(rules: ImageRules, rows: Sequence[Sequence[Grid]]) -> str:
    """Return a line with the tokens of the images and videos of some rows, the frames of the latter, and the limits.

    Args:
        rules: image rules of the model.
        rows: the grids of each row's images and videos; the time of a video is negative.
    """
    counts = ["+".join(_describe_grid(rules, grid) for grid in row) or "none" for row in rows]
    limits = f"a token is {rules.factor} x {rules.factor} pixels, an image {rules.min_pixels} to {rules.max_pixels}"
    kinds = "images"
    if rules.video is not None and any(grid[0] < 0 for row in rows for grid in row):
        kinds += " and videos"
        limits += f"; videos: {rules.video.describe()}"
    return f"tokens of {kinds} in the first {len(counts)} rows: {', '.join(counts)} ({limits})"


def _describe_grid(rules: ImageRules, grid: Grid) -> str:
    """Return the number of tokens, and of frames of a video; the texts of its times are not among them."""
    tokens = abs(rules.count_tokens(grid))
    if rules.video is None or grid[0] > 0:
        return str(tokens)
    frames = -grid[0] * rules.video.temporal_patch_size
    return f"{tokens} of {frames} frames"


def read_first_grids(prefix: str | Path, count: int = 8) -> list[list[Grid]]:
    """Return the grids of the images and videos of the first rows of a preprocessed dataset; [] for one of text.

    The time of a video is negative.
    """
    path = column_prefix(Path(prefix).expanduser(), IMAGE_SIZES)
    if not os.path.isfile(f"{path}.idx"):
        return []
    index, sizes = read_index(path), np.memmap(f"{path}.bin", np.int32, "r")
    firsts = (index.pointers[:count] // sizes.itemsize).tolist()
    rows = [sizes[first + 1 : first + length].reshape(-1, 4) for first, length in zip(firsts, index.lengths[:count].tolist())]
    return [[(int(t), int(h), int(w)) for _, t, h, w in row] for row in rows]


def split_images(
    images: Sequence[StoredImage | VideoPart], samples: Sequence[np.ndarray]
) -> list[tuple[StoredImage | VideoPart, ...]]:
    """Return the images and parts of videos of each sample of a pack, by the tokens of theirs that its ids have.

    Raises:
        ValueError: a sample has a part of an image.
    """
    split, following = [], list(reversed(images))
    rules = [image.video.rules if isinstance(image, VideoPart) else image.rules for image in images]
    token_ids = list({one.token_id for one in rules})
    counts = {image: math.prod(image.grid) // one.merge_size**2 for image, one in zip(images, rules)}
    for ids in samples:
        own: list[StoredImage | VideoPart] = []
        waiting = int(np.isin(ids, token_ids).sum()) if images else 0
        while waiting > 0 and following:
            own.append(following.pop())
            waiting -= counts[own[-1]]
        if waiting:
            raise ValueError(
                f"a row of {len(ids)} tokens has a part of an image: seq_length cuts it; preprocess with the run's seq_length"
            )
        split.append(tuple(own))
    return split


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
