"""The interface of a training engine: what workers, stages and checkpoints use of one, whichever computes the model.

`engine/train_engine.py` is Megatron's, `engine/fsdp/engine.py` the one of transformers' modules. `workers/engines.py` has the
table of both, and is the only place that reads which one a role has; a key or a feature that an engine lacks is refused before
anything starts (`run/rules/training_engine_rules.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, overload

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.checkpoint.lora import PeftMerge
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.batching import BatchShape, MicroBatching, Rows
from mindspeed_rl.engine.head_outputs import HeadOutputs
from mindspeed_rl.engine.weight_average import WeightAverage
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.models.weights import TensorSource
from mindspeed_rl.observability.metrics import Metrics, merge

#: input of a loss: `LossInputs`, or a batch type made of them
_Batch = TypeVar("_Batch")


class NonFiniteError(RuntimeError):
    """A loss, a gradient or its norm was NaN or infinite."""


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step.

    Attributes:
        losses: losses of this rank's micro-batches, without gradient; none on ranks without results.
        grad_norm: global norm before clipping.
        lr: learning rate of the step.
        is_skipped: no rank had anything to learn from, so nothing has changed but the position in the schedule.
        num_computed, num_tokens: with prefix sharing, tokens that this rank has computed, and all tokens of its sequences.
    """

    losses: list[LossOutput]
    grad_norm: float
    lr: float
    is_skipped: bool = False
    num_computed: int = 0
    num_tokens: int = 0

    @property
    def metrics(self) -> Metrics:
        """Metrics of the losses, merged over micro-batches."""
        return merge(loss.metrics for loss in self.losses)


class OffloadsState(Protocol):
    """Weights, gradients and optimizer state of one engine, each on or off the device.

    Attributes:
        timed: gives the context of a block in which this process waits for copies, by a name.
    """

    timed: Callable[[str], AbstractContextManager[object]]

    def resident_bytes(self) -> dict[str, int]:
        """Return the bytes of weights, gradients and optimizer state that are on the device now."""
        ...

    def start_offload(self, *, optimizer: bool) -> None:
        """Start to copy the optimizer's state to the host in the background; `offload` then only frees it."""
        ...

    def offload(self, *, params: bool = False, grads: bool = False, optimizer: bool = False) -> None:
        """Offload the named states."""
        ...

    def start_onload(self, *, optimizer: bool) -> None:
        """Start to copy the optimizer's state to the device in the background; `onload` waits for it."""
        ...

    def onload(self, *, params: bool = False, grads: bool = False, optimizer: bool = False) -> None:
        """Put the named states back; those on the device stay unchanged."""
        ...


class Engine(Protocol):
    """A model and, when it trains, its optimizer and schedule; methods are collective over the training world.

    Attributes:
        config: keys of the role.
        plan: the model's plan.
        device: device of the tensors.
        shape: layout of micro-batches.
        outputs: results of the head that losses get, and `forward` returns by default.
        offloader: moves its state off the device.
        scheduler: schedule of the optimizer; None where the engine does not train.
        steps_per_iteration: optimizer steps of an iteration.
        num_updates: optimizer steps since the start of the run.
        optimizer_steps: those that have changed weights; in the others there was nothing to learn from.
        on_gradients: functions that are called in every step between the backward pass and the optimizer.
        average: moving average of the trained weights; None without one.
        passes_together: all ranks must make equally many calls of `forward`, because each pass is collective over them.
    """

    config: MegatronConfig
    shape: BatchShape
    outputs: HeadOutputs
    scheduler: OptimizerParamScheduler | None
    steps_per_iteration: int
    num_updates: int
    optimizer_steps: int
    on_gradients: list[Callable[[], None]]
    average: WeightAverage | None

    @property
    def device(self) -> torch.device: ...

    @property
    def plan(self) -> ModelPlan: ...

    @property
    def offloader(self) -> OffloadsState: ...

    @property
    def passes_together(self) -> bool: ...

    def start_training(self, steps_per_iteration: int) -> None:
        """Build optimizer and schedule; the weights must be loaded."""
        ...

    def list_trained(self) -> Mapping[str, Tensor]:
        """Return this rank's storage of the weights that train, by their names in checkpoints. Not collective."""
        ...

    def load(self, source: TensorSource) -> None:
        """Fill this rank's part of the weights from HF tensors, reading no more than it needs."""
        ...

    def limit_vocab(self, size: int) -> None:
        """Give no probability to tokens from this id on. Not collective."""
        ...

    def forward(
        self, rows: Rows, batching: MicroBatching, outputs: HeadOutputs | None = None, *, temperature: float | None = None
    ) -> tuple[list[Tensor], ...] | None:
        """Compute results of the predicted tokens: one list for each, of a float32 CPU tensor a row, in row order."""
        ...

    def measure(self, rows: Rows, batching: MicroBatching, loss: Callable[[LossInputs], LossOutput]) -> list[LossOutput]:
        """Compute a loss on each of this rank's micro-batches, without gradients; none on ranks without results."""
        ...

    @overload
    def train_step(
        self,
        rows: Rows,
        batching: MicroBatching,
        loss: Callable[[LossInputs], LossOutput],
        batch: None = None,
        *,
        has_next: bool = False,
    ) -> StepResult: ...

    @overload
    def train_step(
        self,
        rows: Rows,
        batching: MicroBatching,
        loss: Callable[[_Batch], LossOutput],
        batch: Callable[[LossInputs], _Batch],
        *,
        has_next: bool = False,
    ) -> StepResult: ...


class Adapters(Protocol):
    """The low-rank adapters of a model, whose layers have Megatron's names (`lora_target_modules`) on every engine."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        ...

    @property
    def device(self) -> torch.device: ...

    def disabled(self) -> AbstractContextManager[None]:
        """Return a block in which the model computes with only its base weights. Not collective."""
        ...

    def load(self, adapter: PeftMerge) -> None:
        """Set them to the values of a PEFT folder that was opened for this model."""
        ...

    def save(self, folder: str | Path, base_model: str) -> None:
        """Write a folder that `peft` loads, on the first rank; collective over the training world.

        Raises:
            ValueError: the folder exists and is not empty.
        """
        ...

    def find_differing(self, tensors: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Compare this rank's part of each matrix with the tensors of a PEFT folder, bit by bit. Not collective.

        Returns:
            Modules that differ or are missing, and the names of all tensors that the folder has of this rank's adapters.
        """
        ...


class SavedState(Protocol):
    """The state of a role in a checkpoint by HF names, whichever engine wrote it."""

    def open(self, state: str) -> TensorSource:
        """Open a state of the weights: them, their average, or a state of the optimizer; `saved_states` has the names."""
        ...

    def open_weights(self) -> TensorSource:
        """Open the weights, with a score head of zeros where the model has one and the checkpoint does not."""
        ...


class StateFiles(Protocol):
    """The form in which a checkpoint has the state of one engine; methods are collective over the training world.

    Attributes:
        name: the engine, as the record of a checkpoint names it.
    """

    name: str

    def describe(self) -> dict[str, Any]:
        """Return this engine's part of a checkpoint's record: `layout`, and what `check` or `restore` read."""
        ...

    def check(self, record: Mapping[str, Any], path: Path) -> None:
        """Check that this engine can take the weights of a checkpoint with such a record.

        Raises:
            ValueError: it cannot.
        """
        ...

    def adopt(self, saved: SavedState, record: Mapping[str, Any], *, with_optimizer: bool, with_average: bool) -> None:
        """Take the state of a checkpoint that another engine wrote.

        Args:
            saved: the state by HF names.
            record: its record.
            with_optimizer: also optimizer and schedule.
            with_average: also the moving average, which the checkpoint has.

        Raises:
            ValueError: it lacks a tensor.
        """
        ...

    def save(self, folder: Path, subset: Literal["all", "adapters", "base"], *, with_optimizer: bool) -> AsyncRequest:
        """Return the request that writes this rank's files `__<rank>_*.distcp` into the folder; of the average too."""
        ...

    def restore(
        self,
        path: Path,
        record: Mapping[str, Any],
        subset: Literal["all", "adapters", "base"],
        *,
        with_optimizer: bool,
        with_average: bool,
        fresh_head: bool,
        fetch: Callable[[Callable[[], set[str]]], None],
    ) -> None:
        """Take the state of a checkpoint.

        Args:
            path: folder of the checkpoint.
            record: its record.
            subset: the weights that it has for this model.
            with_optimizer: also optimizer and schedule.
            with_average: also the moving average, which the checkpoint has.
            fresh_head: the checkpoint lacks the score head, whose values are then 0.
            fetch: brings files, by the names that a function lists, to this rank's disk where it lacks some.
        """
        ...
