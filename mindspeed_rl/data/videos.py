"""Videos of rows: frames sampled and resized as the model's processor does it, decoded once, and stored as a clip.

A clip is a PNG of the sampled frames, one below the other, with their times in a text of its header. So a video has a
reference as an image does (`images.py`), and the data plane, servers and trainer read the same pixels without a decoder.
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
import io
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rl.bounds import is_number
from mindspeed_rl.data.conversation import MalformedRowError
from mindspeed_rl.data.media_limits import NO_LIMITS, MediaLimits
from mindspeed_rl.files import read_json

if TYPE_CHECKING:
    from PIL.Image import Image

#: stands for a video in the text of a row
VIDEO_TAG = "<video>"
#: columns of videos that are read where map_keys does not name one
VIDEO_COLUMNS = ("videos", "video")
#: types of the parts of a message
VIDEO_PARTS = ("video", "video_url", "input_video")
#: keys of a part of a message, or of a video that is an object, in the order in which they are read
_SOURCES = ("bytes", "video", "video_url", "url", "path", "base64", "data", "frames")
#: further keys of such an object: the rate or number of frames, by the names of transformers and qwen-vl-utils
_RATES, _COUNTS = ("fps", "sample_fps"), ("num_frames", "nframes")
_KNOWN = ("type", *_SOURCES, *_RATES, *_COUNTS)
#: a text of a clip's header
_CLIP = "mindspeed_rl.clip"
#: first bytes of a PNG, which no video has
_PNG = b"\x89PNG\r\n\x1a\n"
_MAX_FILE_BYTES = 8 << 30
_MAX_RATIO = 200
#: pixels of a frame before resizing, and of all frames of a clip after it; pillow reads no larger picture
_MAX_PIXELS = 178_956_970
#: frames per second where the processor has none, as in the model's published program
_DEFAULT_FPS = 2.0
#: resampling of the processors of all supported models (pillow's number), which `_resize` does
_BICUBIC = 3


#: mean and deviation of pixels of the class of images of all these models, where its file has none
_CLIP_COLOURS = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class VideoError(MalformedRowError):
    """A video that cannot be read, or is of a size, rate or place that is not supported."""


@dataclass(frozen=True)
class _Family:
    """Processor and prompt of a family of models.

    Attributes:
        processor: name of the class, from which the defaults below are.
        pixels: fewest and most pixels of a frame.
        sums_frames: the pixels are those of all frames together.
        has_timestamps: each pair of frames is an image of its own in the prompt, after its time as text.
        tokens_per_second: positions in time of a second where config.json does not give them.
        colours: mean and deviation of pixels.
    """

    processor: str
    pixels: tuple[int, int]
    sums_frames: bool
    has_timestamps: bool
    tokens_per_second: int = 1
    colours: tuple[tuple[float, ...], tuple[float, ...]] = ((0.5,) * 3, (0.5,) * 3)


_QWEN2 = _Family(
    "Qwen2VLVideoProcessor",
    (128 * 28 * 28, 768 * 28 * 28),
    sums_frames=False,
    has_timestamps=False,
    tokens_per_second=4,
    colours=_CLIP_COLOURS,
)
_QWEN3 = _Family("Qwen3VLVideoProcessor", (128 * 32 * 32, 768 * 32 * 32), sums_frames=True, has_timestamps=True)
_FAMILIES = {"qwen2_5_vl": _QWEN2, "qwen3_vl": _QWEN3, "qwen3_vl_moe": _QWEN3, "qwen3_5": _QWEN3, "qwen3_5_moe": _QWEN3}


@dataclass(frozen=True)
class Clip:
    """Header of a clip.

    Attributes:
        height, width: size of a frame.
        source_size: its size before it was resized.
        fps: frames per second of the whole video.
        num_frames: frames of the whole video.
        indices: those that were sampled.
        rate_from: what gave the rate or number of frames: "row", or the limits of the run or the processor, for the frames of
            a file ("limits") and for images that are frames, of which it is the rate ("frames").
    """

    height: int
    width: int
    source_size: tuple[int, int]
    fps: float
    num_frames: int
    indices: tuple[int, ...]
    rate_from: str = "row"


@dataclass(frozen=True)
class VideoRules:
    """Sampling, sizes and tokens of the videos of a model.

    Attributes:
        folder: Hugging Face folder with the processor's files.
        sums_frames, has_timestamps: as of `_Family`.
        patch_size, temporal_patch_size, merge_size: patch sizes and merge size of the processor.
        min_pixels, max_pixels: limits of a frame, or of all frames together.
        frame_pixels: with `sums_frames`, most pixels of a frame, on average; else of all frames; None: no such limit.
        min_frames, max_frames: limits of the sampled frames.
        fps: sampled frames per second.
        num_frames: sampled frames, in place of a rate; None: by the rate.
        normalizes_as_images: pixels have the mean and deviation of images, as engines need it.
        token_id: id of a video's tokens.
        frame: ids of the tokens before and after them.
        tokens_per_second: positions in time of a second.
    """

    folder: str
    sums_frames: bool
    has_timestamps: bool
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    frame_pixels: int | None
    min_frames: int
    max_frames: int
    fps: float
    num_frames: int | None
    normalizes_as_images: bool
    token_id: int
    frame: tuple[int, int]
    tokens_per_second: float

    @classmethod
    def read(
        cls, folder: Path, config: Mapping[str, Any], images: Mapping[str, Any], given: MediaLimits = NO_LIMITS
    ) -> VideoRules | None:
        """Read the rules of a model; None for one that reads no videos here, as its processor has other settings.

        Args:
            config: its config.json.
            images: settings of the processor of images.
            given: take the place of the processor's own limits.

        Raises:
            ValueError: the given limits leave no size or number of frames.
        """
        family = _FAMILIES.get(str(config.get("model_type")))
        processor = _read_processor(folder)
        if family is None or "video_token_id" not in config or "patch_size" not in processor:
            return None
        is_known = processor.get("video_processor_type", family.processor) == family.processor
        if not is_known or processor.get("resample", _BICUBIC) != _BICUBIC or not processor.get("do_resize", True):
            return None
        size = processor.get("size") or {}
        limits = [size.get(name) for name in ("shortest_edge", "longest_edge")]
        if not family.sums_frames:  # the older names take the place of the newer ones in this class
            limits = [processor.get(name) or limit for name, limit in zip(("min_pixels", "max_pixels"), limits)]
        own = (given.video_min_pixels, given.video_max_pixels)
        low, high = (key or limit or default for key, limit, default in zip(own, limits, family.pixels))
        patch_size, merge_size = processor["patch_size"], processor.get("merge_size", 2)
        unit = (patch_size * merge_size) ** 2
        caps = None
        if processor.get("cap_pixels_per_frame"):
            tokens = processor.get("max_video_tokens") or (768 if family.sums_frames else 128000)
            caps = tokens * unit if family.sums_frames else int(tokens * unit * 0.9)
        rules = cls(
            folder=str(folder),
            sums_frames=family.sums_frames,
            has_timestamps=family.has_timestamps,
            patch_size=patch_size,
            temporal_patch_size=processor.get("temporal_patch_size", 2),
            merge_size=merge_size,
            min_pixels=low,
            max_pixels=high,
            frame_pixels=caps,
            min_frames=given.video_min_frames or processor.get("min_frames") or 4,
            max_frames=given.video_max_frames or processor.get("max_frames") or 768,
            fps=float(given.video_fps or processor.get("fps") or _DEFAULT_FPS),
            num_frames=None if given.video_fps else processor.get("num_frames"),
            normalizes_as_images=all(
                list(processor.get(name, of_videos)) == list(images.get(name, of_images))
                for name, of_images, of_videos in zip(("image_mean", "image_std"), _CLIP_COLOURS, family.colours)
            ),
            token_id=config["video_token_id"],
            frame=(config["vision_start_token_id"], config["vision_end_token_id"]),
            tokens_per_second=float(config["vision_config"].get("tokens_per_second", family.tokens_per_second)),
        )
        if given.set_video_keys:
            rules._check_limits(given)
        return rules if 0 < rules.min_pixels <= rules.max_pixels and rules.max_pixels >= unit else None

    def _check_limits(self, given: MediaLimits) -> None:
        """Raise ValueError where the limits of a run, with the processor's others, leave nothing."""
        step, unit = self.temporal_patch_size, self.factor**2 * (self.temporal_patch_size if self.sums_frames else 1)
        for name, low, high, fewest, reason in (
            ("frames", self.min_frames, self.max_frames, step, f"frames of this model come in steps of {step}"),
            ("pixels", self.min_pixels, self.max_pixels, unit, f"a token of this model has {unit} pixels"),
        ):
            if not low <= high or high < fewest:
                sources = [
                    f"video_{end}_{name}={value}" + ("" if f"video_{end}_{name}" in given.set_keys else " (the processor's)")
                    for end, value in (("min", low), ("max", high))
                ]
                raise ValueError(
                    f"{', '.join(sources)}: {reason}; the maximum must be at least {fewest}, and not below the minimum"
                )

    def describe(self) -> str:
        """Return rate and limits as a phrase."""
        of = "all frames" if self.sums_frames else "a frame"
        limits = f"{self.min_frames} to {self.max_frames} of them, {self.min_pixels} to {self.max_pixels} pixels of {of}"
        return f"{self.fps:g} frames per second, {limits}"

    @property
    def factor(self) -> int:
        """Width and height of the square of pixels that becomes a token."""
        return self.patch_size * self.merge_size

    def sample(self, num_frames: int, fps: float, *, rate: float | None = None, count: int | None = None) -> tuple[int, ...]:
        """Return the indices of the frames that the processor samples.

        Args:
            num_frames, fps: of the video.
            rate: frames per second to sample; None: the processor's.
            count: frames to sample, in place of a rate.

        Raises:
            VideoError: the video has too few frames.
        """
        if num_frames < self.temporal_patch_size:
            raise VideoError(f"has a video of {num_frames} frames; the model reads {self.temporal_patch_size} or more")
        count = self.num_frames if rate is None and count is None else count
        rate = self.fps if rate is None else rate
        if count is not None and not self.temporal_patch_size <= count <= min(num_frames, self.max_frames):
            raise VideoError(
                f"samples {count} frames of a video with {num_frames}; give {self.temporal_patch_size} to"
                f" {min(num_frames, self.max_frames)} (max_frames of the processor: {self.max_frames})"
            )
        if self.sums_frames:
            if count is None:
                count = min(max(int(num_frames / fps * rate), self.min_frames), self.max_frames, num_frames)
            return tuple(np.linspace(0, num_frames - 1, count).round().astype(int).tolist())
        step = self.temporal_patch_size
        if count is None:
            most = math.floor(min(self.max_frames, num_frames) / step) * step
            count = math.floor(min(max(num_frames / fps * rate, self.min_frames), most, num_frames) / step) * step
        else:
            count = round(count / step) * step
            if not 0 < count <= num_frames:
                raise VideoError(f"samples {count} frames, a multiple of {step}, of a video with {num_frames}; give fewer")
        import torch

        # torch's float32 arithmetic, which the processor has
        return tuple(torch.arange(0, num_frames, num_frames / count).int().tolist())

    def fit(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width to which frames are resized.

        Raises:
            VideoError: one side is over 200 times the other.
        """
        if self.sums_frames and min(height, width) < self.factor:
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > _MAX_RATIO * min(height, width):
            raise VideoError(f"has a video of {width} x {height} pixels: one side may be at most {_MAX_RATIO} times the other")
        most = self._most_pixels(num_frames)
        rows, columns = round(height / self.factor), round(width / self.factor)
        area, unit = height * width, self.factor**2
        together = unit
        if self.sums_frames:
            area *= num_frames
            together *= round(num_frames / self.temporal_patch_size) * self.temporal_patch_size
        if rows * columns * together > most:
            scale = math.sqrt(area / most)
            rows, columns = (max(1, math.floor(side / scale / self.factor)) for side in (height, width))
        elif rows * columns * together < self.min_pixels:
            scale = math.sqrt(self.min_pixels / area)
            rows, columns = (math.ceil(side * scale / self.factor) for side in (height, width))
        return rows * self.factor, columns * self.factor

    def _most_pixels(self, num_frames: int) -> int:
        """Return the limit of `max_pixels` and `frame_pixels` for a video of so many frames."""
        if self.frame_pixels is None:
            return self.max_pixels
        least = int(self.min_pixels * 1.05)
        if self.sums_frames:
            return num_frames * max(min(self.frame_pixels, self.max_pixels // num_frames), least)
        return max(min(self.max_pixels, self.frame_pixels * self.temporal_patch_size // num_frames), least)

    def check_frames(self, clip: Clip) -> None:
        """Check that these rules sample the frames of a clip, where its row has not chosen them.

        Raises:
            VideoError: other limits have sampled them.
        """
        indices, fps = clip.indices, clip.fps
        if clip.rate_from == "limits":
            indices = self.sample(clip.num_frames, clip.fps)
        elif clip.rate_from == "frames":
            fps = self.fps
        if (indices, fps) != (clip.indices, clip.fps) or len(clip.indices) > self.max_frames:
            raise VideoError(
                f"a video was preprocessed to {len(clip.indices)} frames of {clip.num_frames}, by other limits than"
                f" video_fps={self.fps:g}, video_min_frames={self.min_frames} and video_max_frames={self.max_frames} of this"
                " run; preprocess with the same ones"
            )

    def grid(self, clip: Clip) -> tuple[int, int, int]:
        """Return time, rows and columns in patches."""
        times = -(-len(clip.indices) // self.temporal_patch_size)
        return times, clip.height // self.patch_size, clip.width // self.patch_size

    def compute_time_step(self, clip: Clip) -> float:
        """Return the positions between two patches in time of a model without timestamps."""
        sampled_fps = len(clip.indices) / clip.num_frames * clip.fps
        # rounded as the processor and the model of transformers round
        return float(np.float32(self.tokens_per_second) * np.float32(self.temporal_patch_size / sampled_fps))

    def write_times(self, clip: Clip) -> list[str]:
        """Return the text before each pair of frames: the mean of their times in seconds."""
        step, indices = self.temporal_patch_size, list(clip.indices)
        indices += indices[-1:] * (-len(indices) % step)
        times = [index / clip.fps for index in indices]
        return [f"<{(times[i] + times[i + step - 1]) / 2:.1f} seconds>" for i in range(0, len(times), step)]

    def write_tokens(self, clip: Clip, encode: Callable[[str], list[int]]) -> list[int]:
        """Return the ids that take the place of the one token of a video, between those of its frame."""
        times, rows, columns = self.grid(clip)
        count = rows * columns // self.merge_size**2
        if not self.has_timestamps:
            return [self.token_id] * (times * count)
        start, end = self.frame
        return [id_ for text in self.write_times(clip) for id_ in (*encode(text), start, *[self.token_id] * count, end)]


def _read_processor(folder: Path) -> Mapping[str, Any]:
    """Return the settings of the processor of videos, from the files and in the order in which transformers reads them."""
    path = folder / "processor_config.json"
    common = read_json(path) if path.is_file() else {}
    if "video_processor" in common:
        return common["video_processor"]
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            return read_json(folder / name)
    return {}


# ---------------------------------------------------------------------- rows


@dataclass(frozen=True)
class VideoSource:
    """A video of a row before it is decoded.

    Attributes:
        place: a path, the bytes of a file, or the images of its frames by reference.
        rate, count: frames per second to sample, or of frames that are given; frames to sample. None: the processor's rate.
    """

    place: str | bytes | tuple[str, ...]
    rate: float | None = None
    count: int | None = None

    def to_text(self) -> str:
        """Return the source as JSON, which `from_text` reads."""
        place = {"base64": base64.b64encode(self.place).decode()} if isinstance(self.place, bytes) else self.place
        return json.dumps([place, self.rate, self.count])

    @classmethod
    def from_text(cls, text: str) -> VideoSource:
        """Return the source of `to_text`."""
        place, rate, count = json.loads(text)
        if isinstance(place, dict):
            return cls(base64.b64decode(place["base64"]), rate, count)
        return cls(tuple(place) if isinstance(place, list) else place, rate, count)

    @property
    def is_clip(self) -> bool:
        """True for bytes that begin as a clip does; other frames of it cannot be sampled."""
        return isinstance(self.place, bytes) and self.place.startswith(_PNG) and self.rate is self.count is None

    @property
    def name(self) -> str:
        """Name in messages."""
        if isinstance(self.place, tuple):
            return f"video of {len(self.place)} images"
        return f"video of {len(self.place)} bytes" if isinstance(self.place, bytes) else f"video {shorten(self.place)}"


def has_source(part: Mapping[str, object]) -> bool:
    """Return True for a part of a message that has its video, which may be in a column of the row instead."""
    return any(part.get(name) is not None for name in _SOURCES)


def make_source(value: object, folder: str | None, make_frame: Callable[[object], str]) -> VideoSource:
    """Return a video of a row in any of its forms.

    Args:
        value: path, file:// or data: URL, bytes, list of images, or an object or part of a message with one of them.
        folder: folder of relative paths; None: the working directory.
        make_frame: returns the reference of an image.

    Raises:
        VideoError: the form is not supported.
    """
    if not isinstance(value, Mapping):
        return VideoSource(_make_place(value, folder, make_frame))
    given = {name: item for name, item in value.items() if item is not None}
    source = next((given[name] for name in _SOURCES if name in given), None)
    if isinstance(source, Mapping):  # OpenAI's form has an object in the part
        given |= {name: item for name, item in source.items() if item is not None}
        source = next((source[name] for name in _SOURCES if source.get(name) is not None), None)
    if unknown := sorted(set(map(str, given)) - set(_KNOWN)):
        raise VideoError(f"has a video with {unknown[0]!r}, which is not read; a video has one of {', '.join(_KNOWN[1:])}")
    rates, counts = ([given[name] for name in names if name in given] for names in (_RATES, _COUNTS))
    if len(rates) + len(counts) > 1:
        raise VideoError("has a video with several of fps, sample_fps, num_frames and nframes; give one of them")
    for rate in rates:
        if not is_number(rate) or rate <= 0:
            raise VideoError(f"has a video with fps={rate!r}; it is a number above 0, of frames per second")
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise VideoError(f"has a video with num_frames={count!r}; it is a whole number of frames")
    place = _make_place(source, folder, make_frame)
    if isinstance(place, tuple) and counts:
        raise VideoError("has a video of images with num_frames; all its images are read")
    return VideoSource(place, float(rates[0]) if rates else None, counts[0] if counts else None)


def _make_place(value: object, folder: str | None, make_frame: Callable[[object], str]) -> str | bytes | tuple[str, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(make_frame(image) for image in value)
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if not isinstance(value, str) or not value:
        raise VideoError(f"has a video of type {type(value).__name__}; give a path, bytes, a data: URL or a list of images")
    if value.startswith(("http://", "https://")):
        raise VideoError(f"video {shorten(value)} is on the network; download it, training reads local files")
    if value.startswith("data:"):
        try:
            return base64.b64decode(value.partition(";base64,")[2], validate=True)
        except binascii.Error as error:
            raise VideoError(f"video {shorten(value)} is not base64: {error}") from error
    path = Path(value.removeprefix("file://")).expanduser()
    path = path if path.is_absolute() or folder is None else Path(folder).expanduser() / path
    return str(path.absolute())


def shorten(text: str) -> str:
    """Return a text, or its beginning and its length."""
    return text if len(text) <= 120 else f"{text[:60]}...({len(text)} characters)"


# ---------------------------------------------------------------------- decoding


def decode(source: VideoSource, rules: VideoRules, open_frame: Callable[[str], Image]) -> bytes:
    """Sample and resize the frames of a video, and return the clip.

    Args:
        open_frame: returns an image of a reference as RGB.

    Raises:
        VideoError: it cannot be read, or its frames have no size that the model reads.
    """
    if isinstance(source.place, tuple):
        return _join_images(source, source.place, rules, open_frame)
    with _open_file(source) as path:
        return _decode_file(source, path, rules)


@contextmanager
def _open_file(source: VideoSource) -> Iterator[str]:
    """Yield the path of a video; its bytes become a file, since decoders read files.

    Raises:
        VideoError: it is not a file, or too large.
    """
    if isinstance(source.place, bytes):
        with tempfile.NamedTemporaryFile(prefix="mindspeed-rl-video-") as file:
            file.write(source.place)
            file.flush()
            yield file.name
        return
    assert isinstance(source.place, str)
    if not os.path.isfile(source.place):
        raise VideoError(f"{source.name} cannot be read: it does not exist or is not a file")
    if (size := os.path.getsize(source.place)) > _MAX_FILE_BYTES:
        raise VideoError(f"{source.name} has {size} bytes; at most {_MAX_FILE_BYTES} are read")
    yield source.place


def _decode_file(source: VideoSource, path: str, rules: VideoRules) -> bytes:
    """Return the clip of a file.

    The decoder and its count of frames are those of transformers' `opencv` backend, so the sampled frames are the same.
    """
    if importlib.util.find_spec("cv2") is None:
        raise VideoError("is a row with a video, which opencv decodes: pip install opencv-python-headless")
    import cv2

    capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG)
    try:
        if not capture.isOpened():
            raise VideoError(f"{source.name} is broken, or of no format that is known")
        num_frames, fps = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), float(capture.get(cv2.CAP_PROP_FPS))
        height, width = (int(capture.get(name)) for name in (cv2.CAP_PROP_FRAME_HEIGHT, cv2.CAP_PROP_FRAME_WIDTH))
        if num_frames < 1 or not 0 < fps < math.inf:
            raise VideoError(f"{source.name} has {num_frames} frames at {fps:g} per second; it is broken or without frames")
        _check_size(source, height, width)
        with _named(source):
            indices = rules.sample(num_frames, fps, rate=source.rate, count=source.count)
            size = _fit(rules, len(indices), height, width)
        frames: list[np.ndarray] = []
        sampled = frozenset(indices)
        for index in range(indices[-1] + 1):
            if not capture.grab():
                raise VideoError(f"{source.name} is broken: {index} of its {num_frames} frames can be decoded")
            if index not in sampled:
                continue
            success, frame = capture.retrieve()
            if not success:
                raise VideoError(f"{source.name} is broken: frame {index} of {num_frames} cannot be decoded")
            if frame.shape[:2] != (height, width):
                shown = f"{frame.shape[1]} x {frame.shape[0]}"
                raise VideoError(f"{source.name} changes its size from {width} x {height} to {shown}")
            frames.append(_resize(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB), size))
    finally:
        capture.release()
    rate_from = "limits" if source.rate is None and source.count is None else "row"
    return _write_clip(frames, Clip(*size, (height, width), fps, num_frames, indices, rate_from))


def _join_images(source: VideoSource, places: tuple[str, ...], rules: VideoRules, open_frame: Callable[[str], Image]) -> bytes:
    """Return the clip of images that are its frames; all of them are sampled."""
    if not rules.temporal_patch_size <= len(places) <= rules.max_frames:
        raise VideoError(
            f"has a video of {len(places)} images; the model reads {rules.temporal_patch_size} to {rules.max_frames} frames"
        )
    frames: list[np.ndarray] = []
    size = shape = (0, 0)
    for index, place in enumerate(places):
        frame = np.asarray(open_frame(place))
        if not index:
            shape = (frame.shape[0], frame.shape[1])
            _check_size(source, *shape)
            with _named(source):
                size = _fit(rules, len(places), *shape)
        if frame.shape[:2] != shape:
            raise VideoError(
                f"{source.name}: image {index} has {frame.shape[1]} x {frame.shape[0]} pixels, the first one"
                f" {shape[1]} x {shape[0]}; all have the same size"
            )
        frames.append(_resize(frame, size))
    rate_from = "frames" if source.rate is None else "row"
    return _write_clip(frames, Clip(*size, shape, source.rate or rules.fps, len(places), tuple(range(len(places))), rate_from))


@contextmanager
def _named(source: VideoSource) -> Iterator[None]:
    """Add the name of the video to an error."""
    try:
        yield
    except VideoError as error:
        raise VideoError(f"{source.name}: {error}") from None


def _check_size(source: VideoSource, height: int, width: int) -> None:
    if not 0 < height * width <= _MAX_PIXELS:
        raise VideoError(f"{source.name} has frames of {width} x {height} pixels; at most {_MAX_PIXELS} are read")


def _fit(rules: VideoRules, num_frames: int, height: int, width: int) -> tuple[int, int]:
    size = rules.fit(num_frames, height, width)
    if num_frames * size[0] * size[1] > _MAX_PIXELS:
        raise VideoError(
            f"{num_frames} frames of {size[1]} x {size[0]} pixels are too many, at most {_MAX_PIXELS} pixels are read; sample"
            " fewer frames per second (fps), or lower the processor's limits"
        )
    return size


def _resize(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize a frame [height, width, 3] uint8 as torchvision does, whose function is this one of torch."""
    if frame.shape[:2] == size:
        return frame
    import torch

    pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None].contiguous()
    resized = torch.nn.functional.interpolate(pixels, size=size, mode="bicubic", align_corners=False, antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


# ---------------------------------------------------------------------- clips


def _write_clip(frames: Sequence[np.ndarray], clip: Clip) -> bytes:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    header = PngInfo()
    header.add_text(_CLIP, json.dumps(asdict(clip)))
    buffer = io.BytesIO()
    Image.fromarray(np.concatenate(list(frames))).save(buffer, "PNG", pnginfo=header, compress_level=4)
    return buffer.getvalue()


def read_clip(image: Image) -> Clip | None:
    """Return the header of a clip; None for an image.

    Raises:
        VideoError: the header does not fit the picture.
    """
    text: object = getattr(image, "text", {}).get(_CLIP) if image.format == "PNG" and _CLIP in image.info else None
    if not isinstance(text, str):
        return None
    try:
        values = json.loads(text)
        source_height, source_width = map(int, values["source_size"])
        size, source_size = (int(values["height"]), int(values["width"])), (source_height, source_width)
        indices = tuple(map(int, values["indices"]))
        rate_from = str(values.get("rate_from", "row"))  # clips of earlier releases do not tell
        clip = Clip(*size, source_size, float(values["fps"]), int(values["num_frames"]), indices, rate_from)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise VideoError(f"has a clip with a broken header: {error}") from error
    is_ordered = bool(clip.indices) and list(clip.indices) == sorted(clip.indices) and clip.indices[0] >= 0
    is_sound = is_ordered and clip.indices[-1] < clip.num_frames and 0 < clip.fps < math.inf
    is_sound = is_sound and min(clip.height, clip.width, *clip.source_size) > 0
    if not is_sound or image.size != (clip.width, clip.height * len(clip.indices)):
        raise VideoError("has a clip whose header does not fit its frames")
    return clip


def read_frames(image: Image, clip: Clip) -> np.ndarray:
    """Return the frames of a clip, [frames, height, width, 3] uint8."""
    return np.asarray(image.convert("RGB")).reshape(len(clip.indices), clip.height, clip.width, 3)
