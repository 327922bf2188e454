"""Between this rank's Megatron parameters and the tensors of an HF checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_rl.engine.build import BuiltModel
from mindspeed_rl.engine.lora import merged_weights
from mindspeed_rl.models.architecture import ExpertPacking
from mindspeed_rl.models.weights import TensorSource, WeightOp


@dataclass(frozen=True)
class LocalWeight:
    """One parameter (or buffer) of this rank.

    Attributes:
        op: what it is made of and how it is cut.
        tensor: the parameter's storage; writing to it changes the model.
        num_shards, shard: into how many pieces the op's axis cuts it, and which of them this rank holds.
        merged: computes the weight with its low-rank adapter added; None where there is no adapter.
        parameter: what has the storage, with Megatron's marks (its gradient among them).
    """

    op: WeightOp
    tensor: Tensor
    num_shards: int
    shard: int
    merged: Callable[[], Tensor] | None = None
    parameter: Tensor | None = None

    def value(self) -> Tensor:
        """What the model computes with: a new tensor with the adapter merged, or `tensor` itself without an adapter."""
        return self.tensor if self.merged is None else self.merged()


def model_ops(model: BuiltModel) -> list[WeightOp]:
    """Every weight of the whole model, in forward order, packed as this run stores its experts."""
    layout = model.plan.layout
    grouped = model.transformer_config.moe_grouped_gemm
    packing = ExpertPacking("grouped" if grouped else "local", layout.num_expert_groups if grouped else 1)
    return model.plan.architecture.weight_ops(model.plan.model_config, packing)


def local_weights(model: BuiltModel) -> list[LocalWeight]:
    """The weights this rank holds, in forward order.

    Raises:
        RuntimeError: the model has a parameter without a row in its architecture's weight map, or a row has no parameter.
    """
    layout = model.plan.layout
    by_name = {op.mcore: op for op in model_ops(model)}
    tp_rank, pp_rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    ep_rank = parallel_state.get_expert_model_parallel_rank() if layout.num_experts else 0
    found: list[LocalWeight] = []
    for stage, module in enumerate(model.models):
        merged = merged_weights(module)
        # the router's expert bias is the one buffer that checkpoints hold
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
            found.append(LocalWeight(op, tensor.data, shards, shard, merged.get(name), tensor))
    order = {name: index for index, name in enumerate(by_name)}
    return sorted(found, key=lambda weight: order[weight.op.mcore])


@dataclass(frozen=True)
class WithFreshHead:
    """A language model's tensors and a score head of zeros: every value is 0 before the first update, under any layout."""

    source: TensorSource
    hidden_size: int
    name: str = "score.weight"

    def shape(self, name: str) -> tuple[int, ...]:
        return (1, self.hidden_size) if name == self.name else self.source.shape(name)

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        if name != self.name:
            return self.source.read(name, dim, start, stop)
        whole = torch.zeros(1, self.hidden_size)
        return whole if stop is None else whole.narrow(dim, start, stop - start)


@torch.no_grad()
def load_weights(model: BuiltModel, source: TensorSource) -> None:
    """Fills this rank's parameters from HF tensors, reading no more than this rank's slices.

    Raises:
        ValueError: a tensor is missing, has another shape, or cannot be cut over the tensor-parallel ranks.
    """
    for weight in local_weights(model):
        value = weight.op.read_shard(source, weight.num_shards, weight.shard)
        if value.shape != weight.tensor.shape:
            raise ValueError(
                f"{', '.join(weight.op.hf)}: {tuple(value.shape)} does not fit {weight.op.mcore} {tuple(weight.tensor.shape)}."
            )
        weight.tensor.copy_(value)
