"""Limits of images and videos that a run sets in place of those of the model's processor."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class MediaLimits:
    """Keys of a run, or of `preprocess`, under the same names; None: the processor's own value.

    Attributes:
        min_pixels, max_pixels: area of an image after resizing.
        video_fps: frames per second that are sampled.
        video_min_frames, video_max_frames: limits of the sampled frames.
        video_min_pixels, video_max_pixels: area of a frame, or of all frames together, as the processor counts it.
        language_model_only: the model is used without its tower, as a model of text.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    video_fps: float | None = None
    video_min_frames: int | None = None
    video_max_frames: int | None = None
    video_min_pixels: int | None = None
    video_max_pixels: int | None = None
    language_model_only: bool = False

    @classmethod
    def from_keys(cls, config: Any) -> MediaLimits:
        """Return the limits of a group of keys that has these names."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    @property
    def set_keys(self) -> list[str]:
        """The keys that are set."""
        names = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        return [name for name in names if name != "language_model_only"]

    @property
    def set_video_keys(self) -> list[str]:
        """The keys of videos that are set."""
        return [name for name in self.set_keys if name.startswith("video_")]


#: the processor's own limits
NO_LIMITS = MediaLimits()
