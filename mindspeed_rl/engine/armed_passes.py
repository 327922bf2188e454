"""Arguments of forward passes that backward needs again where it recomputes them."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import torch

_T = TypeVar("_T")


class ArmedPasses(Generic[_T]):
    """Arguments of a module's next forward pass, returned again when backward recomputes that pass.

    It is armed before each forward pass of its chunk. The call for which it was armed is the forward pass; any other one
    recomputes, in the order of the forward passes, because backward goes through the micro-batches of a chunk in the order of
    forward.
    """

    def __init__(self) -> None:
        self.armed: _T | None = None
        self._again: deque[_T] = deque()

    def take(self) -> _T | None:
        """Return the arguments of this pass; None for a pass that is not armed, and where no gradient is recorded."""
        taken = self.take_any()
        # a checkpointed layer has its graph in the second call
        return taken if torch.is_grad_enabled() else None

    def take_any(self) -> _T | None:
        """Return the arguments of this pass, whether or not a gradient is recorded; None for a pass that is not armed."""
        taken, self.armed = self.armed, None
        if taken is None:
            return self._again.popleft() if self._again else None
        if not torch.is_grad_enabled():  # backward recomputes a pass that has recorded none
            self._again.append(taken)
        return taken

    def reset(self) -> None:
        """Forget passes."""
        self.armed = None
        self._again.clear()
