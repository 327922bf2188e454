"""The fused attention leaves against plain attention in fp32: outputs and gradients, on one rank or around a ring."""

from __future__ import annotations

import os

import simulator
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from ranks import rank_settings, report
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

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
    slices, start = [], 0
    for length in lengths:
        chunk = length // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            slices.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
        start += length
    return torch.cat(slices)


def difference(got: list[torch.Tensor], index: torch.Tensor) -> float:
    return max((mine.cpu() - theirs[index]).abs().max().item() for mine, theirs in zip(got, plain()))


def tower_difference() -> float:
    """Outputs and gradients of the attention of vision towers, of heads that the kernel does not take as they are."""
    inputs = [torch.randn(1, heads, total, value_dim, generator=generator) for _ in range(3)]
    grad = torch.randn(1, total, heads, value_dim, generator=generator)

    def windows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = zip(*(tensor.split(lengths, dim=2) for tensor in (q, k, v)))
        return torch.cat([(a @ b.mT * scale).softmax(-1) @ c for a, b, c in parts], dim=2).transpose(1, 2)

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        attend = ALL_ATTENTION_FUNCTIONS[npu_attention.tower_attention()]
        ends = torch.tensor([0, *lengths]).cumsum(0).to(device)
        return attend(torch.nn.Identity(), q, k, v, None, scaling=scale, cu_seq_lens_q=ends, is_causal=False)[0]

    results = []
    for compute, place in ((windows, torch.device("cpu")), (kernel, device)):
        leaves = [tensor.to(place).requires_grad_() for tensor in inputs]
        out = compute(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(place))])
    return max((actual - other.cpu()).abs().max().item() for actual, other in zip(*results))


def dropped(dropout: float) -> dict[str, float]:
    """Dropout of attention weights: their factors, read off with unit vectors as values, and gradients with these factors."""
    length = lengths[0]
    # as wide as the unit vectors: the kernel takes one head size
    wide = [torch.nn.functional.pad(tensor[:length], (0, length - dim)) for tensor in (query, key)]
    unit = torch.eye(length)[:, None].expand(-1, groups, -1).contiguous()
    leaves = [tensor.to(device).requires_grad_() for tensor in wide]
    state = torch.npu.get_rng_state()
    whole = npu_attention.packed_attention(*(leaf.detach() for leaf in leaves), unit.to(device), [length], scale).cpu()
    torch.npu.set_rng_state(state)
    out = npu_attention.packed_attention(*leaves, unit.to(device).requires_grad_(), [length], scale, dropout)
    factors = torch.where(whole > 0, out.detach().cpu() / whole, 0.0)  # [q, n, k]
    grad = torch.randn(length, heads, length, generator=generator)
    got = torch.autograd.grad(out, leaves, grad.to(device))
    q, k = (tensor.clone().requires_grad_() for tensor in wide)
    repeated = k.repeat_interleave(heads // groups, 1)
    scores = torch.einsum("qnd,knd->qnk", q, repeated) * scale
    hidden = torch.ones(length, length).triu(1).bool()[:, None]
    expected = torch.autograd.grad(scores.masked_fill(hidden, float("-inf")).softmax(-1) * factors, (q, k), grad)
    again = npu_attention.packed_attention(*leaves, unit.to(device), [length], scale, dropout).detach().cpu()
    seen = factors[(~hidden).expand(-1, heads, -1)]
    return {
        "gradients": max((mine.cpu() - theirs).abs().max().item() for mine, theirs in zip(got, expected)),
        "kept": (seen > 0).float().mean().item(),
        "factors": (seen[seen > 0] - 1 / (1 - dropout)).abs().max().item(),
        "differs": float((again != out.detach().cpu()).any()),
    }


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
if "dropout" in rank_settings():
    results["dropout"] = dropped(rank_settings()["dropout"])
if size == 1:
    results["tower"] = tower_difference()
results["updates"] = simulator.calls["npu::npu_ring_attention_update"]
results["fused calls"] = simulator.calls["npu::npu_fusion_attention"]
report(results)
