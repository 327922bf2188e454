"""All unit tests share one process, so Megatron is adapted before any of them can import it."""

from __future__ import annotations

import os

from mindspeed_rl import adaptors, platform

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # as in all workers on the CPU, for programs that import vLLM too
platform.select("cpu")
adaptors.apply("train")
