"""The fused attention leaves against plain attention in fp32: outputs and gradients, on one rank or around a ring."""

from __future__ import annotations

import os

import simulator
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from ranks import rank_settings, report

from mindspeed_rl.adaptors import npu_attention

simulator.install()
lengths = rank_settings()["lengths"]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.npu.set_device(rank)
device = torch.device("npu", rank)
heads, groups, dim, value_dim, scale = 4, 2, 16, 12, 0.25
generator = torch.Generator().manual_seed(7)
total = sum(lengths)
query, key, value, upstream = (
    torch.randn(total, n, d, generator=generator)
    for n, d in ((heads, dim), (groups, dim), (groups, value_dim), (heads, value_dim))
)


def plain() -> list[torch.Tensor]:
    """Output and gradients by the definition, one sequence and head at a time."""
    q, k, v = (tensor.clone().requires_grad_() for tensor in (query, key, value))
    rows, start = [], 0
    for length in lengths:
        here = slice(start, start + length)
        outputs = []
        for head in range(heads):
            scores = q[here, head] @ k[here, head * groups // heads].T * scale
            hidden = torch.ones(length, length).triu(1).bool()
            outputs.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[here, head * groups // heads])
        rows.append(torch.stack(outputs, 1))
        start += length
    out = torch.cat(rows)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), upstream)]


def held() -> torch.Tensor:
    """Positions of this rank's two zigzag chunks of each sequence."""
    pieces, start = [], 0
    for length in lengths:
        chunk = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            pieces.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
        start += length
    return torch.cat(pieces)


def difference(got: list[torch.Tensor], index: torch.Tensor) -> float:
    return max((mine.cpu() - theirs[index]).abs().max().item() for mine, theirs in zip(got, plain()))


index = held() if size > 1 else torch.arange(total)
q, k, v = (tensor[index].to(device).requires_grad_() for tensor in (query, key, value))
results = {}
simulator.calls.clear()
if size == 1:
    out = npu_attention.packed_attention(q, k, v, lengths, scale)
    gradients = torch.autograd.grad(out, (q, k, v), upstream.to(device))
    results["packed"] = difference([out.detach(), *gradients], index)
    if len(set(lengths)) == 1:
        dense = [tensor.unflatten(0, (len(lengths), -1)) for tensor in (q, k, v)]
        out = npu_attention.causal_attention(*dense, scale).flatten(0, 1)
        gradients = torch.autograd.grad(out, (q, k, v), upstream.to(device))
        results["dense"] = difference([out.detach(), *gradients], index)
else:
    dist.init_process_group("hccl")
    npu_attention.configure(fuse_ring_update=rank_settings().get("fuse_ring_update", False))
    mine = [length // size for length in lengths]
    out = npu_attention.ring_attention(q, k, v, mine, scale, dist.group.WORLD)
    gradients = torch.autograd.grad(out, (q, k, v), upstream[index].to(device))
    results["ring"] = difference([out.detach(), *gradients], index)
results["updates"] = simulator.calls["npu::npu_ring_attention_update"]
results["fused calls"] = simulator.calls["npu::npu_fusion_attention"]
report(results)
