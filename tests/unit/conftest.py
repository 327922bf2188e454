"""All unit tests share one process, so Megatron is adapted before any of them can import it."""

from __future__ import annotations

from mindspeed_rl import adaptors, platform

platform.select("cpu")
adaptors.apply("train")
