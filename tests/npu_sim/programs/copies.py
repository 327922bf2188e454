"""On which stream bytes are copied."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Copies(TorchDispatchMode):
    """Counts copies of bytes on another stream than the default one, and on it."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = self.with_others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].dtype == torch.uint8:
            default = torch.npu.current_stream() == torch.npu.default_stream()
            self.with_others, self.beside = self.with_others + default, self.beside + (not default)
        return func(*args, **(kwargs or {}))
