"""Every patch of somebody else's library, one file per library and reason; applied here and nowhere else."""

from __future__ import annotations

import importlib
from typing import Literal

from mindspeed_rl import platform
from mindspeed_rl.adaptors.engine_hooks import EngineHooks

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

#: platform -> module and class of what it does around vLLM's calls
ENGINE_HOOKS: dict[str, tuple[str, str]] = {
    "cpu": ("mindspeed_rl.adaptors.vllm_cpu", "VllmCpuHooks"),
    "npu": ("mindspeed_rl.adaptors.vllm_ascend", "VllmAscendHooks"),
    "cuda": ("mindspeed_rl.adaptors.engine_hooks", "EngineHooks"),
}


def engine_hooks() -> EngineHooks:
    """New hooks of the current platform for one vLLM engine."""
    module, attribute = ENGINE_HOOKS[platform.current().name]
    return getattr(importlib.import_module(module), attribute)()


def apply(stage: Stage) -> None:
    """Prepares this process for Megatron ("train") or vLLM ("rollout") on the current platform. Idempotent."""
    for module in ADAPTORS[platform.current().name, stage]:
        importlib.import_module(module).apply()
