"""The interface of an ingredient of training: what a model has besides its layers and the loss of the run.

A new one is a file with a subclass, and a line in `engine/parts.py`. The engine calls its parts in this order, and asks none
of them which it is:

    start_step   once, before the passes of an optimizer step
    arm          before each forward pass of a chunk
    attach       in the head of each forward pass, on the last stage
    metrics      once, after the last backward pass
    revert       instead of the optimizer's step, where no rank had anything to learn from
    end_step     once, after the optimizer's step, or what takes its place
    reset        after all passes, completed or failed; also of passes without training
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.batching import MicroBatch
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.head_outputs import HeadPass
from mindspeed_rl.observability.metrics import Metric


class EnginePart:
    """An ingredient of one model on this rank; a method that a subclass leaves out does nothing.

    Attributes:
        trains_only: False for a part that is prepared, and attached to the head, in passes without training too.
    """

    trains_only: ClassVar[bool] = True

    @classmethod
    def build(cls, config: MegatronConfig, model: BuiltModel) -> EnginePart | None:
        """Build the part of a model, None where the model or the run has no use for it.

        Args:
            config: keys of the role.
            model: its weights are not loaded yet; `ddp_chunks` is empty where it does not train.
        """
        raise NotImplementedError

    def start_step(self, micro_batches: Sequence[MicroBatch], count: Callable[[], Tensor]) -> None:
        """Prepare an optimizer step; collective over the data-parallel ranks.

        Args:
            count: returns the sum of `LossOutput.count` over these micro-batches, 0-d int64, known before any pass. It takes
                time, and is computed once, only where a part calls it.
        """

    def arm(self, chunk: int, micro_batch: MicroBatch) -> None:
        """Prepare this chunk's next forward pass, over the micro-batch."""

    def attach(self, head: HeadPass, hidden_states: Tensor) -> Tensor:
        """Return the hidden states that reach the head, with what the part adds to their graph."""
        return hidden_states

    def metrics(self) -> Mapping[str, Metric]:
        """Return the metrics of the step on this rank, which may still be on the device; collective over the model's ranks."""
        return {}

    def revert(self) -> None:
        """Take back what the passes of the step have changed in the model."""

    def end_step(self, num_updates: int) -> None:
        """Read the updated weights; collective over the training world.

        Args:
            num_updates: optimizer steps since the start of the run, with this one.
        """

    def reset(self) -> None:
        """Forget the passes."""
