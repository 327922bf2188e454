"""This rank's Megatron parameters as rows of the weight table, loaded from the tensors of an HF checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from mindspeed_rl.engine.build import BuiltModel
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
        merged: computes the weight with its low-rank adapter added; None where there is no adapter.
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
