"""The state of the FSDP engine in a checkpoint: tensors by HF name in torch.distributed.checkpoint's files.

Each rank writes its rows, and reads those that it has now, so that a checkpoint loads on any number of ranks. `DistReader`
reads without unpickling code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor

from mindspeed_rl.checkpoint.dist import METADATA_FILE, DistReader, read_metadata
from mindspeed_rl.checkpoint.megatron_source import SHARDED_SCORE_HEAD
from mindspeed_rl.engine.disks import failing_together
from mindspeed_rl.engine.fsdp.engine import FsdpEngine
from mindspeed_rl.engine.fsdp.optimizer import init_moments, list_states
from mindspeed_rl.engine.interface import SavedState
from mindspeed_rl.engine.saved_states import AVERAGE, WEIGHTS

#: prefix of the names of weights; optimizer states have the name of the moment there
_WEIGHTS = f"{WEIGHTS}."
_AVERAGE = f"{AVERAGE}."


class DcpFiles:
    """The state of the FSDP engine; see `interface.StateFiles`."""

    name = "fsdp"

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine

    def describe(self) -> dict[str, Any]:
        """Return the layout."""
        context = self._engine.config.context_parallel_size
        layout = {"shards": self._engine.model.shards} | ({"cp": context} if context > 1 else {})
        return {"layout": layout}

    def check(self, record: Mapping[str, Any], path: Path) -> None:
        """Accept every checkpoint of this engine: names and shapes are the model's, which the load compares."""

    def save(self, folder: Path, subset: Literal["all", "adapters", "base"], *, with_optimizer: bool) -> AsyncRequest:
        """Return the request, which is run at once on every rank: a rule excludes `async_save`."""
        state = self._list_tensors(subset, with_optimizer=with_optimizer and self._engine.optimizer is not None)
        state |= self._list_average()

        def write() -> None:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))

        return AsyncRequest(write, (), [])

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

        Raises:
            ValueError: it lacks a tensor.
        """
        if with_optimizer:
            self._engine.start_restored(record)
        metadata = read_metadata(path / METADATA_FILE)
        fetch(lambda: {info.relative_path for info in metadata.storage_data.values()})
        state = self._list_tensors(subset, with_optimizer=with_optimizer)
        average = self._list_average() if with_average else {}
        state |= average
        if fresh_head:
            head = state.pop(SHARDED_SCORE_HEAD)
            if subset != "adapters":  # which have the head of the base weights
                head.to_local().zero_()
        if missing := state.keys() - metadata.state_dict_metadata.keys():
            raise ValueError(f"load: {path} has no {min(missing)}; it is a checkpoint of another model.")
        # into the memory of the parameters and of the moments
        dcp.load(state, storage_reader=DistReader(path), planner=DefaultLoadPlanner())
        if self._engine.average is not None and with_average:
            self._engine.average.load({name.removeprefix(_AVERAGE): rows.to_local() for name, rows in average.items()})

    def adopt(self, saved: SavedState, record: Mapping[str, Any], *, with_optimizer: bool, with_average: bool) -> None:
        """Take the state of a checkpoint that another engine wrote.

        Raises:
            ValueError: it lacks a tensor.
        """
        engine = self._engine
        with failing_together():
            engine.load(saved.open_weights())
        if with_optimizer:
            assert engine.optimizer is not None
            engine.start_restored(record)
            states, rows = list_states(engine.optimizer), dict[str, dict[str, Tensor]]()
            for name, parameter in engine.model.list_trained().items():
                for moment, value in states[parameter].items():
                    rows.setdefault(moment, {})[name] = value.to_local()
            with failing_together():
                for moment, values in rows.items():
                    engine.model.load_states(saved.open(moment), values)
        if engine.average is not None and with_average:
            with failing_together():
                engine.model.load_states(saved.open(AVERAGE), engine.average.values)

    def _list_average(self) -> dict[str, DTensor]:
        """Return a copy of the moving average by the names that it has in the files; nothing without one."""
        average = {} if self._engine.average is None else self._engine.average.values
        tensors = {}
        for name, value in average.items():
            weight = cast(DTensor, self._engine.model.names[name])
            rows = value.to(self._engine.device, copy=True)
            tensors[_AVERAGE + name] = DTensor.from_local(
                rows, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride()
            )
        return tensors

    def _list_tensors(self, subset: Literal["all", "adapters", "base"], *, with_optimizer: bool) -> dict[str, Any]:
        """Return this rank's tensors by the names that they have in the files."""
        engine = self._engine
        trained, matrices = engine.model.list_trained(), engine.model.list_matrices()
        weights: dict[str, Tensor] = {name: parameter.detach() for name, parameter in engine.model.names.items()}
        chosen = {
            "all": weights | engine.model.buffers,
            "adapters": {name: weights[name] for name in trained},
            "base": {name: weight for name, weight in weights.items() if name not in matrices} | engine.model.buffers,
        }
        state: dict[str, Any] = {_WEIGHTS + name: weight for name, weight in chosen[subset].items()}
        if with_optimizer:
            assert engine.optimizer is not None
            # a save before the first step has moments too
            init_moments(engine.optimizer, engine.optimizer_steps)
            states = list_states(engine.optimizer)
            for name, parameter in trained.items():
                state |= {f"{moment}.{name}": value for moment, value in states[parameter].items()}
        return state
