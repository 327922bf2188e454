"""This rank's Megatron parameters as rows of the weight table, loaded from the tensors of an HF checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from torch import Tensor, nn

from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.lora_layers import AdaptedModule
from mindspeed_rl.models.architecture import ExpertPacking
from mindspeed_rl.models.weights import TensorSource, WeightOp


@dataclass(frozen=True)
class LocalWeight:
    """One parameter (or buffer) of this rank.

    Attributes:
        op: its row in the table of weights.
        tensor: the parameter's storage; writing to it changes the model.
        num_shards, shard: the number of its shards along the op's axis, and the index of this rank's.
        merged: computes the weight with its low-rank adapter added; None without an adapter.
        parameter: owner of the storage, with Megatron's marks (its gradient among them).
    """

    op: WeightOp
    tensor: Tensor
    num_shards: int
    shard: int
    merged: Callable[[], Tensor] | None = None
    parameter: Tensor | None = None

    def value(self) -> Tensor:
        """Return the weight that the model computes with: a new tensor with the adapter merged, or `tensor` without one."""
        return self.tensor if self.merged is None else self.merged()

    @property
    def is_computed(self) -> bool:
        """True where the weight's HF tensors are not views of its storage: they are computed anew for each reading."""
        return self.merged is not None or self.op.packing.copies


def list_model_ops(model: BuiltModel) -> list[WeightOp]:
    """Return every weight of the full model, in forward order, packed as this run stores its experts."""
    layout = model.plan.layout
    grouped = model.transformer_config.moe_grouped_gemm
    packing = ExpertPacking("grouped" if grouped else "local", layout.num_expert_groups if grouped else 1)
    return model.plan.architecture.weight_ops(model.plan.model_config, packing)


def _list_merged_weights(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Return for each adapted parameter of an unwrapped model, by name, the function that computes it with its adapter."""
    return {
        f"{name}.{weight}": partial(module.merge, weight)
        for name, module in model.named_modules()
        if isinstance(module, AdaptedModule)
        for weight in module.adapted_weights
    }


def list_local_weights(model: BuiltModel) -> list[LocalWeight]:
    """Return the weights of this rank, in forward order.

    Raises:
        RuntimeError: the model has a parameter without a row in its architecture's weight map, or a row has no parameter.
    """
    layout = model.plan.layout
    by_name = {op.mcore: op for op in list_model_ops(model)}
    tp_rank, pp_rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    ep_rank = parallel_state.get_expert_model_parallel_rank() if layout.num_experts else 0
    weights: list[LocalWeight] = []
    for stage, module in enumerate(model.models):
        merged = _list_merged_weights(module)
        # the router's expert bias is the only buffer in checkpoints
        for name, tensor in [
            *module.named_parameters(),
            *((n, b) for n, b in module.named_buffers() if n.endswith("expert_bias")),
        ]:
            # adapters travel merged into the weight they adapt
            if ".lora_" in name:
                continue
            global_name = layout.global_name(name, pp_rank, stage, tp_rank, ep_rank)
            op = by_name.get(global_name)
            if op is None:
                raise RuntimeError(
                    f"{name} (globally {global_name}) has no row in the weight map of {model.plan.architecture.name}."
                )
            if op.axis == "etp":
                shards, shard = layout.expert_tp_size, parallel_state.get_expert_tensor_parallel_rank()
            else:
                shards, shard = layout.tp, tp_rank
            assert shard is not None  # Megatron's groups exist
            weights.append(LocalWeight(op, tensor.data, shards, shard, merged.get(name), tensor))
    order = {name: index for index, name in enumerate(by_name)}
    return sorted(weights, key=lambda weight: order[weight.op.mcore])


class StoredWeights:
    """The weights of a model as they are stored, each step of an average rounded to their format."""

    @torch.no_grad()
    def mix(self, weight: LocalWeight, other: Tensor, alpha: float) -> None:
        """Set weight <- alpha * other + (1 - alpha) * weight, computed in float32."""
        weight.tensor.copy_(torch.lerp(weight.tensor.float(), other.float(), alpha))

    def substitute(self, module: nn.Module, state: ShardedStateDict) -> None:
        """Put the values that a checkpoint has in place of the weights into the sharded state of a model chunk."""

    def load_state(self, module: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Take the values of a model chunk from its loaded state."""


class Float32Weights(StoredWeights):
    """Float32 values of a model's 16-bit weights where many small changes add up; the weights are these, rounded.

    A change below half a unit in the last place of a bfloat16 weight, 0.2 % of its value, would be lost each time. The values
    are on the host, so that they take no memory of the device. A checkpoint of the model has them in place of the weights.
    """

    def __init__(self, model: BuiltModel) -> None:
        """Take the values of the weights as they are now."""
        parameters = (parameter for module in model.models for parameter in module.parameters())
        self._values: dict[Tensor, Tensor] = {
            parameter: parameter.detach().float().cpu() for parameter in parameters if parameter.dtype != torch.float32
        }

    @torch.no_grad()
    def mix(self, weight: LocalWeight, other: Tensor, alpha: float) -> None:
        """Set weight <- alpha * other + (1 - alpha) * weight in float32; a weight in float32 has no other values."""
        assert weight.parameter is not None
        value = self._values.get(weight.parameter, weight.tensor)
        mixed = torch.lerp(value.to(weight.tensor.device), other.float(), alpha)
        weight.tensor.copy_(mixed)
        if weight.parameter in self._values:
            # a new tensor: a checkpoint may still be written from the old one
            self._values[weight.parameter] = mixed.cpu()

    def substitute(self, module: nn.Module, state: ShardedStateDict) -> None:
        """Put the values in place of the weights in the sharded state of a model chunk."""
        for name, value in self._list_values(module):
            entry = state[name]
            dtype = {"dtype": torch.float32} if isinstance(entry, ShardedTensor) else {}
            state[name] = dataclasses.replace(entry, data=value, **dtype)

    def load_state(self, module: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Take the values of a model chunk from its loaded state."""
        named = dict(module.named_parameters())
        self._values |= {named[name]: state[name].detach().float().cpu() for name, _ in self._list_values(module)}

    def _list_values(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        return [(name, self._values[parameter]) for name, parameter in module.named_parameters() if parameter in self._values]


@torch.no_grad()
def load_weights(model: BuiltModel, source: TensorSource) -> None:
    """Fill this rank's parameters from HF tensors, reading no more than this rank's slices.

    Raises:
        ValueError: a tensor is missing, has another shape, or cannot be split over the tensor-parallel ranks.
    """
    for weight in list_local_weights(model):
        value = weight.op.read_shard(source, weight.num_shards, weight.shard)
        if value.shape != weight.tensor.shape:
            raise ValueError(
                f"{', '.join(weight.op.hf)}: {tuple(value.shape)} does not fit {weight.op.mcore} {tuple(weight.tensor.shape)}."
            )
        weight.tensor.copy_(value)
