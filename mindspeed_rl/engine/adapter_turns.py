"""Several adapters on one base that take turns in the layers of a model, each with its optimizer state and schedule.

Each adapter trains as it does in a run of its own: it has its own moments, norm of the gradient, position in the schedule and
count of steps, so the others change none of its bits. `adapter_slot.py` has the models of a service, whose clients send passes
and steps by hand; here the engine, its optimizer and its checkpoints are those of a run with one adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from mindspeed_rl.engine.offload import collect_storages
from mindspeed_rl.engine.train_engine import TrainEngine

#: entries of an optimizer's parameter group that each adapter has for itself; the others follow the keys of the run
_GROUP_ENTRIES = ("step",)


@dataclass(frozen=True)
class _TrainingState:
    """The state of an adapter's optimizer while another one trains, in host memory.

    Attributes:
        groups: own entries of each group.
        mains: float32 weights of each parameter; None where they are the model's.
        states: moments of each parameter; empty before its first step.
        num_updates, optimizer_steps: see `TrainEngine`.
        schedule_steps: position in the schedule.
    """

    groups: list[dict[str, Any]]
    mains: list[Tensor | None]
    states: list[dict[str, Any]]
    num_updates: int
    optimizer_steps: int
    schedule_steps: int


class AdapterTurns:
    """The adapters; the one in the model computes, saves and is exported, and the optimizer has the state of one.

    Not collective; every rank makes the same calls. Adapters that wait are in host memory.

    Attributes:
        names: their names.
    """

    def __init__(self, engine: TrainEngine, names: Sequence[str]) -> None:
        """Let all adapters start as the one in the model; its optimizer has made no step.

        Args:
            engine: with its optimizer, on the device.
            names: the first one is in the model.
        """
        self.names = tuple(names)
        self._engine = engine
        self._present = self._training = self.names[0]
        weights, state = self._read_weights(), self._read_state()
        self._weights: dict[str, Mapping[str, Tensor]] = dict.fromkeys(self.names[1:], weights)
        self._states = dict.fromkeys(self.names[1:], state)

    @torch.no_grad()
    def use(self, name: str) -> None:
        """Compute with an adapter from now on; the weights must be on the device."""
        if name == self._present:
            return
        self._weights[self._present] = self._read_weights()
        waiting = self._weights.pop(name)
        for key, weight in self._engine.list_trained().items():
            weight.copy_(waiting[key])
        self._present = name

    def train(self, name: str) -> None:
        """Compute with an adapter, and let the optimizer step it, from now on; the optimizer must be on the device too."""
        self.use(name)
        if name == self._training:
            return
        self._states[self._training] = self._read_state()
        self._write_state(self._states.pop(name))
        self._training = name

    def _read_weights(self) -> Mapping[str, Tensor]:
        return {name: weight.to("cpu", copy=True) for name, weight in self._engine.list_trained().items()}

    def _list_parameters(self) -> Iterator[tuple[torch.optim.Optimizer, Tensor, bool]]:
        """Yield each parameter of each optimizer, and whether it is a float32 copy of a weight."""
        weights = collect_storages(self._engine.list_trained().values())
        for optimizer in self._list_optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield optimizer, parameter, parameter.data.untyped_storage().data_ptr() not in weights

    def _list_optimizers(self) -> list[torch.optim.Optimizer]:
        optimizer = self._engine.optimizer
        assert optimizer is not None  # of an engine that trains
        chain: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
        return [part.optimizer for part in chain if part.optimizer is not None]

    def _read_state(self) -> _TrainingState:
        engine, parameters = self._engine, list(self._list_parameters())
        assert engine.scheduler is not None
        return _TrainingState(
            [
                {name: _copy(group[name]) for name in _GROUP_ENTRIES if name in group}
                for optimizer in self._list_optimizers()
                for group in optimizer.param_groups
            ],
            [_copy(parameter.data) if is_copy else None for _, parameter, is_copy in parameters],
            [
                {name: _copy(value) for name, value in optimizer.state.get(parameter, {}).items()}
                for optimizer, parameter, _ in parameters
            ],
            engine.num_updates,
            engine.optimizer_steps,
            engine.scheduler.num_steps,
        )

    @torch.no_grad()
    def _write_state(self, kept: _TrainingState) -> None:
        engine = self._engine
        groups = [group for optimizer in self._list_optimizers() for group in optimizer.param_groups]
        for group, entries in zip(groups, kept.groups, strict=True):
            for name in _GROUP_ENTRIES:
                group.pop(name, None)
            group.update({name: _copy(value) for name, value in entries.items()})
        for (optimizer, parameter, _), main, entries in zip(self._list_parameters(), kept.mains, kept.states, strict=True):
            if main is not None:
                parameter.data.copy_(main)
            _write_entries(optimizer.state, parameter, entries)
        engine.num_updates, engine.optimizer_steps = kept.num_updates, kept.optimizer_steps
        scheduler = engine.scheduler
        assert scheduler is not None
        scheduler.num_steps = kept.schedule_steps
        # sets the learning rate of this position
        scheduler.step(increment=0)


def _write_entries(states: Any, parameter: Tensor, entries: Mapping[str, Any]) -> None:
    """Give a parameter its moments, in the memory of those that it has, where there are some."""
    if not entries:
        states.pop(parameter, None)
        return
    present = states.setdefault(parameter, {})
    for name in present.keys() - entries.keys():
        del present[name]
    for name, value in entries.items():
        if torch.is_tensor(value) and torch.is_tensor(present.get(name)) and present[name].shape == value.shape:
            cast(Tensor, present[name]).copy_(value)
        elif torch.is_tensor(value) and value.dim():
            present[name] = value.to(parameter.device, copy=True)
        else:  # counts of steps are on the host
            present[name] = _copy(value)


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if torch.is_tensor(value) else value
