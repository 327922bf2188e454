"""mindspeed_rl: Ascend-first post-training for large language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_rl.api import Result, Run, Trainer, evaluate, explain, train
    from mindspeed_rl.objects import (
        DistillationConfig,
        DistillationTrainer,
        DPOConfig,
        DPOTrainer,
        GRPOConfig,
        GRPOTrainer,
        NotebookProgress,
        PPOConfig,
        PPOTrainer,
        SFTConfig,
        SFTTrainer,
        TrainerCallback,
    )

__version__ = "0.1.0"
__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "DistillationConfig",
    "DistillationTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "NotebookProgress",
    "PPOConfig",
    "PPOTrainer",
    "Result",
    "Run",
    "SFTConfig",
    "SFTTrainer",
    "Trainer",
    "TrainerCallback",
    "__version__",
    "evaluate",
    "explain",
    "train",
]
#: names of `api`; the others are of `objects`
_FUNCTIONS = ("Result", "Run", "Trainer", "evaluate", "explain", "train")


def __getattr__(name: str) -> object:
    """Import what programs use when it is used: the package itself loads at once."""
    if name in __all__:
        return getattr(importlib.import_module("mindspeed_rl.api" if name in _FUNCTIONS else "mindspeed_rl.objects"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
