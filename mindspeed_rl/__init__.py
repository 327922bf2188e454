"""MindSpeed-RL: Ascend-first post-training for large language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_rl.api import Result, Run, explain, train

__version__ = "0.1.0"
__all__ = ["Result", "Run", "__version__", "explain", "train"]


def __getattr__(name: str) -> object:
    """Import the functions for programs when they are used: the package itself loads at once."""
    if name in __all__:
        return getattr(importlib.import_module("mindspeed_rl.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
