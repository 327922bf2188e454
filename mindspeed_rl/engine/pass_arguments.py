"""Arguments of forward passes that backward needs again where it recomputes them."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import torch

_T = TypeVar("_T")


class PassArguments(Generic[_T]):
    """Arguments of a module's next forward pass, returned again when backward recomputes that pass.

    They are set in `pending` before each forward pass of the chunk. The call that takes them is the forward pass; any other
    call recomputes, in the order of the forward passes, because backward goes through the micro-batches of a chunk in the order
    of forward.
    """

    def __init__(self) -> None:
        self.pending: _T | None = None
        self._again: deque[_T] = deque()

    def take(self) -> _T | None:
        """Return the arguments of this pass; None where none were set, and where no gradient is recorded."""
        taken = self.take_any()
        # a checkpointed layer has its graph in the second call
        return taken if torch.is_grad_enabled() else None

    def take_any(self) -> _T | None:
        """Return the arguments of this pass, whether or not a gradient is recorded; None where none were set."""
        taken, self.pending = self.pending, None
        if taken is None:
            return self._again.popleft() if self._again else None
        if not torch.is_grad_enabled():  # backward recomputes a pass that has recorded none
            self._again.append(taken)
        return taken

    def reset(self) -> None:
        """Forget passes."""
        self.pending = None
        self._again.clear()
