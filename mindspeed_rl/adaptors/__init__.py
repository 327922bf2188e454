"""Every patch of somebody else's library, one file per library and reason; applied here and nowhere else."""

from __future__ import annotations

import importlib
from typing import Literal

from mindspeed_rl import platform

Stage = Literal["train", "rollout"]

#: (platform, stage) -> modules whose `apply()` runs, in order, before the library is imported
ADAPTORS: dict[tuple[str, str], tuple[str, ...]] = {
    ("cpu", "train"): ("mindspeed_rl.adaptors.megatron_cpu",),
    ("cpu", "rollout"): ("mindspeed_rl.adaptors.vllm_cpu",),
    ("npu", "train"): ("mindspeed_rl.adaptors.mindspeed",),
    ("npu", "rollout"): ("mindspeed_rl.adaptors.vllm_ascend",),
    ("cuda", "train"): (),
    ("cuda", "rollout"): (),
}


def apply(stage: Stage) -> None:
    """Prepares this process for Megatron ("train") or vLLM ("rollout") on the current platform. Idempotent."""
    for module in ADAPTORS[platform.current().name, stage]:
        importlib.import_module(module).apply()
