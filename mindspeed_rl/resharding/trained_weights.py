"""The training side of a weight sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mindspeed_rl.resharding.exchange import ReadsSlices
from mindspeed_rl.resharding.transfer_plan import RanksBySlice


@dataclass(frozen=True)
class TrainedWeights:
    """The training side of a weight sync, the same on every member of the group but for its sources.

    Attributes:
        holders: the members that have each slice of each HF tensor (`layouts.training_slices`).
        shapes: shapes of all HF tensors, in forward order.
        sources: this member's shards; None on a member that trains nothing.
        device: device of the buckets, the same as of this member's weights.
        bucket_bytes: limit of the bytes in flight on a member in one exchange.
        find_node: returns the machine of a member.
        copies: HF tensors that repeat another one: copy -> owner. An engine need not take them.
        quantized: matrices that the engines have in another number format (`quantization.quantize_side`).
        quantization: that format (`config.quantized_formats.find_format`); None without quantized matrices.
        predicted: tensors of multi-token-prediction layers. An engine takes all, where they make its drafts, or none.
    """

    holders: RanksBySlice
    shapes: Mapping[str, tuple[int, ...]]
    sources: ReadsSlices | None
    device: torch.device
    bucket_bytes: int
    find_node: Callable[[int], int] = lambda rank: 0
    copies: Mapping[str, str] | None = None
    quantized: tuple[str, ...] = ()
    quantization: str | None = None
    predicted: tuple[str, ...] = ()
