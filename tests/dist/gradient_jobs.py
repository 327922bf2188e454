"""Jobs of test_gloo_exchange.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from gloo_world import gloo_world

from mindspeed_rl.adaptors import gloo_exchange


def _whole(rank: int, ranks: int, length: int) -> torch.Tensor:
    """What a rank holds: whole numbers, whose sums have no rounding."""
    return torch.arange(ranks * length, dtype=torch.float32) % 251 + 1000 * (rank + 1)


def reduced(length: int, chunk: int, in_place: bool) -> tuple[list[float], bool]:
    """This rank's sums, and whether the places of the other ranks are as they were."""
    gloo_exchange._CHUNK = chunk
    with gloo_world() as group:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        source = _whole(rank, ranks, length)
        shards = source.chunk(ranks)
        output = shards[rank] if in_place else torch.empty(length)
        for _ in range(2):  # a second exchange must not take the first one's messages
            source.copy_(_whole(rank, ranks, length))
            gloo_exchange._reduce_scatter(output, source, group)
    kept = all(
        torch.equal(shard, whole)
        for other, (shard, whole) in enumerate(zip(shards, _whole(rank, ranks, length).chunk(ranks)))
        if other != rank or not in_place
    )
    return output.tolist(), kept


def gathered(length: int, in_place: bool) -> list[float]:
    """What all ranks have, on this one."""
    with gloo_world() as group:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        output = torch.zeros(ranks * length, dtype=torch.bfloat16)
        source = torch.arange(length, dtype=torch.bfloat16) + 16 * rank
        if in_place:
            output.chunk(ranks)[rank].copy_(source)
            source = output.chunk(ranks)[rank]
        gloo_exchange.all_gather(output, source, group)
    return output.tolist()
