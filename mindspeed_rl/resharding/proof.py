"""Proof that the rollout engine holds exactly the trained weights, by exact integer sums over their bits.

The sum of x (x + C) modulo 2^64 over the bit patterns x of a tensor does not depend on the order of the elements and adds up
over pieces. So the sum over an engine parameter equals the sum over the HF tensors that went into it, however the engine
fuses, transposes, pads (with zeros) or splits them. The trained side is summed over the shards where they are trained, not
over what arrived: a lost, stale, misrouted or damaged tensor changes the sums. The square is there because changes of a plain
sum cancel: +d on a weight of one sign and on its like of the other. What no such sum can see is a permutation of the elements
of one tensor; that shows in `rollout/log_probs_diff_max`, the trainer's log-probs against the engine's in every iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed_rl.adaptors.engine_hooks import DERIVED
from mindspeed_rl.engine.weights import LocalWeight
from mindspeed_rl.models.weights import WeightOp

_INTEGERS = {2: torch.int16, 4: torch.int32}
_MASK = (1 << 64) - 1
# odd, with well mixed bits; as a signed number, because torch sums in int64, which wraps modulo 2^64
_C = 0x9E3779B97F4A7C15 - (1 << 64)
_CHUNK = 1 << 22


class WeightDeliveryError(RuntimeError):
    """The rollout engine does not hold the weights that were trained."""


def bit_sum(tensor: Tensor) -> int:
    """The sum of x (x + C) over the elements' bit patterns x as signed integers, modulo 2^64."""
    patterns = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
    total = 0
    for chunk in patterns.split(_CHUNK):  # eight bytes an element exist for one chunk at a time
        x = chunk.to(torch.int64)
        total += int((x * (x + _C)).sum())
    return total & _MASK


@dataclass(frozen=True)
class DeliveryProof:
    """What a push was checked for.

    Attributes:
        num_parameters: engine parameters of this rank that were compared.
        num_tensors: HF tensors they were made of.
    """

    num_parameters: int
    num_tensors: int


def trained_sums(
    weights: Iterable[LocalWeight],
    ops: Sequence[WeightOp],
    dtype: torch.dtype,
    *,
    owns_replica: bool,
    owns_expert_replica: bool,
) -> dict[str, int]:
    """The bit sum of every HF tensor, from the training shards themselves; collective over the world.

    Args:
        weights: this rank's shards.
        ops: every weight of the model.
        dtype: what the engine stores floating-point weights in.
        owns_replica, owns_expert_replica: True on one data-parallel (and context-parallel) copy of each dense and expert shard.
    """
    names = [name for op in ops if not op.copy_of_tied for name in op.hf]
    index = {name: position for position, name in enumerate(names)}
    sums = [0] * len(names)
    for weight in weights:
        op = weight.op
        if op.copy_of_tied or not (owns_expert_replica if op.axis == "etp" else owns_replica):
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
            # cast before summing: the engine holds the bits of the cast
            sums[index[name]] = bit_sum(part if op.buffer else part.to(dtype)) if part.numel() else 0
    packed = torch.tensor([[value & 0xFFFFFFFF, value >> 32] for value in sums], dtype=torch.int64)
    device = next(iter(weights)).tensor.device
    packed = packed.to(device)
    dist.all_reduce(packed)  # low and high halves apart: no rank count overflows them
    return {name: (int(low) + (int(high) << 32)) & _MASK for name, (low, high) in zip(names, packed.tolist())}


def check_delivery(
    engine_model: nn.Module, trained: Mapping[str, int], *, infer_tp_size: int, group: dist.ProcessGroup | None, kv_heads: int
) -> DeliveryProof:
    """Compares every parameter of the engine with the trained tensors it was made of; collective over the inference group.

    Args:
        engine_model: vLLM's model on this rank.
        trained: from `trained_sums`.
        infer_tp_size, group: the inference tensor-parallel group (None for a single rank).
        kv_heads: key/value heads of the model; fewer heads than ranks are repeated.

    Raises:
        WeightDeliveryError: naming the first parameter that differs, or tensors no parameter accounts for.
    """
    packed_names: Mapping[str, Sequence[str]] = getattr(engine_model, "packed_modules_mapping", {})
    remaining = dict(trained)
    parameters = {name: value for name, value in engine_model.named_parameters() if not name.endswith(DERIVED)}
    local = [bit_sum(parameter) for parameter in parameters.values()]
    everyone = [local]
    if infer_tp_size > 1:
        everyone = [[] for _ in range(infer_tp_size)]
        dist.all_gather_object(everyone, local, group=group)
    wrong: list[str] = []
    for position, name in enumerate(parameters):
        sources = _sources(name, packed_names, remaining)
        if not sources:
            wrong.append(f"{name} (no trained tensor has this name)")
            continue
        values = [part[position] for part in everyone]
        repeat = max(1, infer_tp_size // kv_heads) if kv_heads < infer_tp_size else 1
        split = sum((repeat if _is_key_or_value(source) else 1) * trained[source] for source in sources) & _MASK
        replicated = sum(trained[source] for source in sources) & _MASK
        # a parameter is either cut over the inference ranks or held whole by each of them
        if sum(values) & _MASK != split and any(value != replicated for value in values):
            wrong.append(name)
        for source in sources:
            remaining.pop(source, None)
    if wrong:
        raise WeightDeliveryError(
            f"weight push: {len(wrong)} parameters of the rollout engine differ from those trained: {', '.join(wrong[:5])}."
        )
    if remaining:
        raise WeightDeliveryError(
            f"weight push: the rollout engine has no parameter for {len(remaining)} tensors, for example {min(remaining)}."
        )
    return DeliveryProof(num_parameters=len(parameters), num_tensors=len(trained))


def _is_key_or_value(name: str) -> bool:
    return ".k_proj." in name or ".v_proj." in name


def _sources(name: str, packed_names: Mapping[str, Sequence[str]], trained: Mapping[str, int]) -> list[str]:
    """The trained tensors that an engine parameter is made of."""
    if name in trained:
        return [name]
    prefix, _, rest = name.rpartition(".experts.")
    if prefix and rest in _EXPERT_SOURCES:
        wanted = _EXPERT_SOURCES[rest]
        start = f"{prefix}.experts."
        return [key for key in trained if key.startswith(start) and key.removeprefix(start).partition(".")[2] in wanted]
    for fused, parts in packed_names.items():
        marker = f".{fused}."
        if marker in name:
            found = [name.replace(marker, f".{part}.") for part in parts]
            return [key for key in found if key in trained]
    return []


#: vLLM's stacked expert weights and the HF tensors of one expert in them
_EXPERT_SOURCES = {
    "w13_weight": ("gate_proj.weight", "up_proj.weight", "w1.weight", "w3.weight"),
    "w2_weight": ("down_proj.weight", "w2.weight"),
    "routed_experts.w13_weight": ("gate_proj.weight", "up_proj.weight", "w1.weight", "w3.weight"),
    "routed_experts.w2_weight": ("down_proj.weight", "w2.weight"),
}
