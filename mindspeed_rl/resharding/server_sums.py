"""What rollout servers must hold: the bit sum of every HF tensor, from the training shards themselves."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mindspeed_rl.engine.build import BuiltModel
from mindspeed_rl.engine.weights import local_weights, model_ops
from mindspeed_rl.resharding.bit_sums import MASK, bit_sum


@torch.no_grad()
def trained_sums(model: BuiltModel, dtype: torch.dtype) -> dict[str, int]:
    """By HF name, of what an engine that stores `dtype` must hold; collective over the training world.

    Every shard is summed by one of the data-parallel ranks that hold it, cast as the engine stores it.
    """
    owns = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    owns_expert = parallel_state.get_expert_data_parallel_rank() == 0
    names = [name for op in model_ops(model) if not op.copy_of_tied for name in op.hf]
    index = {name: position for position, name in enumerate(names)}
    sums, device = [0] * len(names), None
    for weight in local_weights(model):
        op, device = weight.op, weight.tensor.device
        if op.copy_of_tied or not (owns_expert if op.axis == "etp" else owns):
            continue
        for name, part, split in zip(op.hf, op.packing.unpack(weight.value()), op.splits):
            # every tensor rank holds all of it: the first one counts
            if split.dim is None and weight.shard:
                continue
            # vocabulary padding stays behind, so it is not summed
            if split.padded:
                assert split.dim is not None
                first = weight.shard * part.size(split.dim)
                part = part.narrow(split.dim, 0, min(max(split.size - first, 0), part.size(split.dim)))
            sums[index[name]] = bit_sum(part if op.buffer else part.to(dtype)) if part.numel() else 0
    packed = torch.tensor([[value & 0xFFFFFFFF, value >> 32] for value in sums], dtype=torch.int64).to(device)
    dist.all_reduce(packed)  # low and high halves apart: no rank count overflows them
    trained = {name: (int(low) + (int(high) << 32)) & MASK for name, (low, high) in zip(names, packed.tolist())}
    copies = model.plan.architecture.hf_copies(model.plan.network)
    return trained | {copy: trained[owner] for copy, owner in copies.items()}
