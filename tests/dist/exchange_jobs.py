"""The exchange of tokens between engines that share experts, without engines."""

from __future__ import annotations

import torch
import torch.distributed as dist
from gloo_world import gloo_world

from mindspeed_rl.adaptors.vllm_cpu_experts import _gather_rows, _scatter_sum


def exchange(sizes: list[int], width: int, dtype: str) -> tuple[list[list[float]], list[list[float]]]:
    """What a rank gets of all ranks' rows, and its own rows of the sum of what all ranks computed for all rows.

    Rank r brings rows of the value 10 r + row; for row i of all it computes i + r.
    """
    with gloo_world() as group:
        rank, kind = dist.get_rank(), getattr(torch, dtype)
        mine = torch.arange(sizes[rank], dtype=kind)[:, None].expand(-1, width) + 10 * rank
        gathered = _gather_rows(mine, sizes, group)
        computed = torch.arange(sum(sizes), dtype=kind)[:, None].expand(-1, width) + rank
        summed = _scatter_sum(computed, sizes, group)
        assert gathered.dtype == summed.dtype == kind
        return gathered.tolist(), summed.tolist()
