"""The state in a checkpoint by Hugging Face names, whichever engine wrote it, so that each engine starts from the other's.

A moment of the optimizer, momentum or average has the numbers of its weight in the same places. What makes a parameter of
Megatron from HF tensors (`models/weights.py`) only moves numbers, so it makes such a state from theirs too, exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from mindspeed_rl.checkpoint.dist import (
    METADATA_FILE,
    OPTIMIZER_STATE,
    Chunk,
    DistFolder,
    DistGroup,
    list_places,
    listed_chunks,
    read_metadata,
)
from mindspeed_rl.checkpoint.megatron_source import GroupedTensors
from mindspeed_rl.engine.fsdp.model import find_places
from mindspeed_rl.engine.interface import SavedState
from mindspeed_rl.models.hf_module import TensorPlace
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.models.weights import TensorSource, WeightOp, concatenate

#: the state "weights" is in float32 where the checkpoint has that
WEIGHTS = "weights"
AVERAGE = "average"
#: Megatron's name of the float32 weights among the states of a 16-bit model
_MAIN = "fp32_param"


@dataclass(frozen=True)
class FreshHead:
    """Tensors of a language model and a score head of zeros: every value is 0 before the first update, under any layout."""

    source: TensorSource
    hidden_size: int
    name: str = "score.weight"

    def shape(self, name: str) -> tuple[int, ...]:
        return (1, self.hidden_size) if name == self.name else self.source.shape(name)

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        if name != self.name:
            return self.source.read(name, dim, start, stop)
        zeros = torch.zeros(1, self.hidden_size)
        return zeros if stop is None else zeros.narrow(dim, start, stop - start)


class _OpenedState(ABC):
    """The state of a role in a checkpoint; see `interface.SavedState`."""

    def __init__(self, plan: ModelPlan, *, has_score_head: bool) -> None:
        """Note the model.

        Args:
            plan: plan of the model that takes the state.
            has_score_head: the checkpoint ends in a score head.
        """
        self._plan = replace(plan, model_config=replace(plan.model_config, head="reward" if has_score_head else "lm"))
        self._lacks_head = plan.model_config.head == "reward" and not has_score_head

    @abstractmethod
    def open(self, state: str) -> TensorSource:
        """Open a state of the weights by HF names: `WEIGHTS`, `AVERAGE`, or a state of the optimizer by its name in torch."""

    def open_weights(self) -> TensorSource:
        """Open the weights, with a score head of zeros where the model has one and the checkpoint does not."""
        weights = self.open(WEIGHTS)
        return FreshHead(weights, self._plan.model_config.hidden_size) if self._lacks_head else weights


class _MegatronState(_OpenedState):
    """State that Megatron's engine wrote, in any layout."""

    def __init__(self, path: Path, plan: ModelPlan, *, has_score_head: bool) -> None:
        super().__init__(plan, has_score_head=has_score_head)
        self._folder, self._architecture = DistFolder(path, verified=True), plan.architecture
        opened = self._folder.open(plan.architecture, self._plan.model_config)
        self._model_config, self._weights = opened.model_config, cast(Sequence[DistGroup], opened.groups)

    def open(self, state: str) -> TensorSource:
        if state != WEIGHTS:
            prefix = f"{AVERAGE}." if state == AVERAGE else f"{OPTIMIZER_STATE}{state}."
            return GroupedTensors(self._folder.open_states(self._architecture, self._model_config, prefix), state)
        mains = self._folder.open_states(self._architecture, self._model_config, f"{OPTIMIZER_STATE}{_MAIN}.")
        named = {group.op.mcore: group for group in mains}
        return GroupedTensors([named.get(group.op.mcore, group) for group in self._weights], state)


class _ShardedState(_OpenedState):
    """State that the FSDP engine wrote on any number of ranks."""

    def __init__(self, path: Path, plan: ModelPlan, *, has_score_head: bool) -> None:
        super().__init__(plan, has_score_head=has_score_head)
        self._chunks = listed_chunks(path, read_metadata(path / METADATA_FILE))
        self._places = find_places(self._plan)

    def open(self, state: str) -> TensorSource:
        return _ShardedTensors(self, state)

    def read(self, state: str, name: str, rows: tuple[int, int] | None) -> Tensor:
        """Read an HF tensor, or these rows of it.

        Raises:
            ValueError: the checkpoint does not have it.
        """
        place, chunks = self._find(state, name)
        if place.index is None:
            return _read_rows(chunks, *(rows or (0, _count_rows(chunks))))
        tensor = place.select(_read_rows(chunks, place.index, place.index + 1)[0])
        return tensor if rows is None else tensor[slice(*rows)]

    def find_shape(self, state: str, name: str) -> tuple[int, ...]:
        """Return the shape of an HF tensor, of which nothing is read.

        Raises:
            ValueError: the checkpoint does not have it.
        """
        place, chunks = self._find(state, name)
        return place.shape((_count_rows(chunks), *chunks[0].sizes[1:]))

    def _find(self, state: str, name: str) -> tuple[TensorPlace, list[Chunk]]:
        place = self._places.get(name)
        chunks = [] if place is None else self._chunks.get(f"{state}.{place.parameter}", [])
        if place is None or not chunks:
            raise ValueError(f"the checkpoint has no {state} of {name}.")
        return place, chunks


def _count_rows(chunks: list[Chunk]) -> int:
    return max(chunk.offsets[0] + chunk.sizes[0] for chunk in chunks)


def _read_rows(chunks: list[Chunk], start: int, stop: int) -> Tensor:
    """Read rows of a parameter, each of whose chunks has a range of them."""
    parts, row = [], start
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[0]):
        first, last = chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]
        if not first <= row < min(last, stop):
            continue
        data = chunk.locate()
        rows = slice(row - first, min(last, stop) - first)
        parts.append(data[rows] if isinstance(data, Tensor) else data.rows(rows.start, rows.stop).read())
        row = min(last, stop)
    if row != stop:
        raise ValueError(f"rows {row} to {stop} of a tensor are missing in the checkpoint.")
    return concatenate(parts)


@dataclass(frozen=True)
class _ShardedTensors:
    """A TensorSource over a state of the FSDP engine."""

    saved: _ShardedState
    state: str

    def shape(self, name: str) -> tuple[int, ...]:
        return self.saved.find_shape(self.state, name)

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        if stop is None or dim == 0:
            return self.saved.read(self.state, name, None if stop is None else (start, stop))
        return self.saved.read(self.state, name, None).narrow(dim, start, stop - start)


#: engine that wrote a checkpoint -> class of its state
_STATES: dict[str, Callable[..., SavedState]] = {"megatron": _MegatronState, "fsdp": _ShardedState}


def open_saved_state(engine: str, path: Path, plan: ModelPlan, *, has_score_head: bool) -> SavedState:
    """Open the state in the folder of a checkpoint, whose files were verified.

    Args:
        engine: the engine that wrote it.
        path: folder of the checkpoint.
        plan: plan of the model that takes the state.
        has_score_head: the checkpoint ends in a score head.

    Raises:
        ValueError: it is a checkpoint of another model.
    """
    return _STATES[engine](path, plan, has_score_head=has_score_head)


def list_files(path: Path) -> set[str]:
    """Return the names of the files that have tensors of a checkpoint."""
    return {info.relative_path for info in read_metadata(path / METADATA_FILE).storage_data.values()}


# ---------------------------------------------------------------------- Megatron's sharded state, filled from HF tensors


class ShardedFiller:
    """Gives the parts of a sharded state of Megatron, of optimizer or average, their values from HF tensors."""

    def __init__(self, saved: SavedState, plan: ModelPlan) -> None:
        """Take the state of a checkpoint.

        Args:
            saved: the state.
            plan: plan of the model whose sharded state is filled.
        """
        self._saved = saved
        self._sources: dict[str, TensorSource] = {}
        self._ops = {
            (name, index): op
            for op in plan.architecture.weight_ops(plan.model_config)
            if not op.copy_of_tied
            for name, index, _ in list_places(plan.model_config, op)
        }
        #: the last parameter that was read, whose parts follow each other
        self._last: tuple[str, str, Tensor] | None = None

    def fill(self, entry: Any) -> Any:
        """Return an entry of a sharded state with tensors in place of its parts.

        Raises:
            ValueError: the checkpoint lacks one.
        """
        if isinstance(entry, dict):
            return {name: self.fill(value) for name, value in entry.items()}
        if isinstance(entry, (list, tuple)):
            return [self.fill(value) for value in entry]
        if isinstance(entry, ShardedTensorFactory):
            return entry.merge_fn(self.fill(entry.build()))
        if isinstance(entry, LocalNonpersistentObject):
            return entry.unwrap()
        return self._read(entry) if isinstance(entry, ShardedTensor) else entry

    def _read(self, part: ShardedTensor) -> Tensor:
        state, _, name = part.key.removeprefix(OPTIMIZER_STATE).partition(".")
        lead = part.prepend_axis_num
        op = self._ops[name, tuple(part.global_offset[:lead])]
        sizes = part.local_shape[-len(part.global_shape) + lead :]
        ranges = tuple(slice(start, start + size) for start, size in zip(part.global_offset[lead:], sizes))
        values = self._read_parameter(WEIGHTS if state == _MAIN else state, op)[ranges].reshape(part.local_shape)
        data = part.data
        if data is None or data.device.type == "meta":
            return values.to(part.dtype, copy=True)
        return values.to(data.device, part.dtype, copy=True)

    def _read_parameter(self, state: str, op: WeightOp) -> Tensor:
        """Read a full parameter of Megatron's; the rows that pad a vocabulary are 0."""
        if self._last is None or self._last[:2] != (state, op.mcore):
            if state not in self._sources:
                self._sources[state] = self._saved.open(state)
            values = op.read_shard(self._sources[state], 1, 0)
            if op.splits[0].padded:
                values[op.splits[0].size :] = 0.0
            self._last = state, op.mcore, values
        return self._last[2]
