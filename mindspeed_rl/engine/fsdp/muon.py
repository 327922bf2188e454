"""Muon over shards: Megatron's (`engine/muon.py`) for the same matrices, of which each rank has rows.

Momentum stays divided as the weights are. A step gathers what a matrix is made of, joins it as Megatron does by the table of
weights, and each rank takes its rows of the result. Experts are divided as full matrices, and need no exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.fsdp.lora import gather_rows, get_rows, read_rows
from mindspeed_rl.engine.fsdp.model import ShardedModel
from mindspeed_rl.engine.muon import ENDS, orthogonalize_parts, split_heads
from mindspeed_rl.models.weights import WeightOp

#: state of a weight that Muon updates
MOMENTUM = "momentum_buffer"


class ShardedMuon(torch.optim.AdamW):
    """Muon for the matrices of a model, AdamW for everything else; a step is collective over the training world."""

    def __init__(self, groups: Iterable[dict[str, Any]], model: ShardedModel, config: MegatronConfig, **settings: Any) -> None:
        """Take the parameters of a model.

        Args:
            groups: parameter groups of AdamW.
            model: the model on this rank.
            config: keys of the role.
            settings: arguments of AdamW.
        """
        super().__init__(groups, **settings)
        self._model, self._config = model, config
        shape = model.plan.model_config
        trained = model.list_trained()
        self._ops: list[tuple[WeightOp, tuple[int, ...] | None]] = []
        for op in model.plan.architecture.weight_ops(shape):
            size = op.shard_shape(1)
            names = [model.places[name].parameter for name in op.hf if name in model.places]
            is_matrix = len(size) == 2 and min(size) > 1 and not any(end in op.mcore for end in ENDS)
            if is_matrix and not op.copy_of_tied and names and all(name in trained for name in names):
                self._ops.append((op, split_heads(op.mcore, config, shape)))
        self._matrices = {model.names[model.places[name].parameter] for op, _ in self._ops for name in op.hf}

    def is_matrix(self, parameter: Tensor) -> bool:
        """Return True for a parameter that Muon updates, and False for one of AdamW."""
        return parameter in self._matrices

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one update from the gradients in `parameter.grad`."""
        assert closure is None
        gradients = {parameter: parameter.grad for parameter in self._matrices if parameter.grad is not None}
        for parameter in gradients:
            parameter.grad = None
        super().step()
        updates: dict[Tensor, Tensor] = {}
        groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
        # in the order of the model, which is the same on every rank
        for parameter in (parameter for parameter in self._model.names.values() if parameter in gradients):
            group = groups[parameter]
            updates[parameter] = self._advance(parameter, gradients[parameter])
            get_rows(parameter).mul_(1.0 - group["lr"] * group["weight_decay"])
        for op, heads in self._ops:
            parameters = [self._model.names[self._model.places[name].parameter] for name in op.hf]
            if all(parameter in updates for parameter in parameters):
                self._move(op, heads, updates, groups[parameters[0]]["lr"])
        return None

    def _advance(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Update the momentum of a parameter; return what is orthogonalized, sharded as the parameter is."""
        config, state = self._config, self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter)
        momentum, rows = get_rows(state[MOMENTUM]), get_rows(gradient)
        momentum.lerp_(rows, 1.0 - config.muon_momentum)
        if not config.muon_use_nesterov:
            return state[MOMENTUM]
        ahead = rows.lerp(momentum, config.muon_momentum)
        sharded = cast(DTensor, parameter.detach())
        size = {"shape": sharded.shape, "stride": sharded.stride()}
        return DTensor.from_local(ahead, sharded.device_mesh, sharded.placements, **size)

    def _move(self, op: WeightOp, heads: tuple[int, ...] | None, updates: dict[Tensor, Tensor], rate: float) -> None:
        """Move the weights of a matrix of Megatron's; collective but for experts."""
        places = [self._model.places[name] for name in op.hf]
        parameters = [self._model.names[place.parameter] for place in places]
        if places[0].index is None:
            parts = [gather_rows(updates[parameter]) for parameter in parameters]
            for parameter, direction in zip(parameters, self._orthogonalize(op, heads, parts)):
                rows, start = read_rows(parameter)
                rows.add_(direction[start : start + len(rows)].view_as(rows), alpha=-rate)
            return
        locals_ = [read_rows(parameter) for parameter in parameters]
        rows, start = locals_[0]
        if not start <= places[0].index < start + len(rows):
            return
        index = places[0].index - start
        parts = [place.select(get_rows(updates[parameter])[index]) for parameter, place in zip(parameters, places)]
        for (own, _), place, direction in zip(locals_, places, self._orthogonalize(op, heads, parts)):
            place.select(own[index]).add_(direction, alpha=-rate)

    def _orthogonalize(self, op: WeightOp, heads: tuple[int, ...] | None, parts: list[Tensor]) -> list[Tensor]:
        """Return the scaled orthogonal factor for each of the HF tensors that Megatron has in one matrix."""
        return op.packing.unpack(orthogonalize_parts(op.packing.pack(parts), heads, self._config))
