"""Causal attention on the CPU as products of batched matrices, with a gradient of its own.

torch's kernel (2.13) takes 32 queries of one head at a time below 768 tokens, and its products are MKL's, slow on processors
that are not Intel's (see `cpu_products`): 40 GFLOPS of a core's 245. Here the queries of all heads that share a key are one
matrix, in blocks of positions, each with the keys up to its end, so that a block's scores stay in the processor's caches and
memory grows only with the length. Always in float32: in bfloat16 torch's gradient takes four to six times as long.

Which one is faster depends on the processor: torch's is ahead by up to 1.6 times without AVX-512 (Zen 3), and by 1.8 times on
Intel's with it, whose products are MKL's best. So both are tried for 50 ms. Their last bits differ, so one choice is for
all workers of a run: the driver makes it (`try_kernels`), passes it on as `ATTENTION_VARIABLE`, and a run that resumes has the
choice of its checkpoint. It can go when torch's kernel is as fast; `benchmarks/products.py` compares them.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_rl.adaptors import cpu_products, torch_attention
from mindspeed_rl.platform.environment import ATTENTION_VARIABLE

Kernel = Literal["torch", "blocks"]

#: from here on torch's kernel has larger blocks and is as fast
_LONG = 768
#: most positions of a block of queries
_BLOCK = 64
#: scores of a block that one thread computes at a time
_SCORES = 1 << 18
#: seconds of a trial, and its tensors: sequences, positions, heads, heads of keys, width
_TRIAL_S, _TRIAL_SHAPE = 0.05, (1, 256, 8, 2, 64)
#: blocks are chosen where they take less than this share of torch's time; far from 1, so that trials of a processor agree
_CLEARLY_FASTER = 0.8


@dataclass(frozen=True)
class KernelChoice:
    """The kernel of attention on the CPU, and the reason in words."""

    kernel: Kernel
    reason: str


@functools.cache
def try_kernels(threads: int) -> KernelChoice:
    """Try both kernels for 50 ms, with torch's settings as workers have them, and choose one; once in a process.

    A kernel that `ATTENTION_VARIABLE` names is not tried: runs that are compared bit by bit must have the same.

    Args:
        threads: number of threads of a worker.

    Raises:
        ValueError: it names no kernel.
    """
    if given := os.environ.get(ATTENTION_VARIABLE):
        return _find_kernel(given, ATTENTION_VARIABLE, f"as {ATTENTION_VARIABLE} says")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with cpu_products.applied():
            in_blocks, by_torch = _measure(_attention_in_blocks), _measure(torch_attention)
    finally:
        torch.set_num_threads(before)
    return _choose(in_blocks, by_torch)


def keep_kernel(kernel: object) -> KernelChoice:
    """Return the choice that a checkpoint has recorded.

    Raises:
        ValueError: there is no such kernel.
    """
    return _find_kernel(kernel, "cpu_attention of the checkpoint", "as before the run was resumed")


def _find_kernel(kernel: object, where: str, reason: str) -> KernelChoice:
    for known in get_args(Kernel):
        if known == kernel:
            return KernelChoice(known, f"{_TITLES[known]}, {reason}")
    raise ValueError(f"{where}: '{kernel}' is not one of {', '.join(get_args(Kernel))}.")


def _choose(in_blocks: float, by_torch: float) -> KernelChoice:
    """Choose by the seconds of both."""
    kernel: Kernel = "blocks" if in_blocks < _CLEARLY_FASTER * by_torch else "torch"
    times = {"torch": by_torch, "blocks": in_blocks}
    other = "torch" if kernel == "blocks" else "blocks"
    took = f"{times[kernel] * 1e3:.1f} ms by trial, {_TITLES[other]} {times[other] * 1e3:.1f} ms"
    return KernelChoice(kernel, f"{_TITLES[kernel]} ({took})")


_TITLES: dict[Kernel, str] = {"torch": "torch's kernel", "blocks": "blocks of products"}


def _measure(attention: Callable[..., Tensor]) -> float:
    """Return the shortest time of several passes forwards and backwards; no random number is taken.

    It is the processor's time: work of others on the machine does not decide, by which two runs of a seed would differ.
    """
    (b, s, n, g, d), times = _TRIAL_SHAPE, []
    clock = time.thread_time if torch.get_num_threads() == 1 else time.process_time
    with torch.inference_mode(False), torch.enable_grad():
        query, key, value = (torch.arange(float(b * s * h * d)).sin().view(b, s, h, d).requires_grad_() for h in (n, g, g))
        end = time.perf_counter() + _TRIAL_S / 2
        while len(times) < 3 or time.perf_counter() < end:
            start = clock()
            torch.autograd.grad(attention(query, key, value, d**-0.5).sum(), (query, key, value))
            times.append(clock() - start)
    return min(times)


@functools.cache
def _get_kernel() -> str:
    """Return the kernel of this process: the driver's, or by a trial where no driver has started it."""
    return os.environ.get(ATTENTION_VARIABLE) or _choose(_measure(_attention_in_blocks), _measure(torch_attention)).kernel


def split_into_blocks(queries: Tensor, keys: Tensor, shared: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield (sequences' heads, rows of queries, positions they see) of each block.

    Args:
        queries: [b * g, s * shared, d], of the last s of t positions.
        keys: [b * g, t, d], each shared by so many heads.
    """
    length = queries.size(1) // shared
    before = keys.size(1) - length
    count = -(-length // _BLOCK)
    bounds = [length * index // count for index in range(count + 1)]
    for first, end in zip(bounds, bounds[1:]):
        heads = max(1, _SCORES * torch.get_num_threads() // ((end - first) * shared * (before + end)))
        for head in range(0, keys.size(0), heads):
            yield slice(head, head + heads), slice(first * shared, end * shared), slice(before + end)


def _probabilities(query: Tensor, key: Tensor, shared: int) -> Tensor:
    """Compute the probabilities [h, w * shared, t] of the last w of t positions.

    Args:
        query: [h, w * shared, d], position by position.
        key: [h, t, d].
    """
    scores = torch.bmm(query, key.transpose(1, 2))
    width = query.size(1) // shared
    later = torch.full((width, width), float("-inf")).triu_(1)
    scores.unflatten(1, (width, shared))[..., -width:] += later[:, None]
    return torch.softmax(scores, -1)


class CausalAttention(torch.autograd.Function):
    """query [h, s * r, d], position by position and scaled; key [h, t, d], value [h, t, d_v], r; out [h, s * r, d_v]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, shared: int) -> Tensor:  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        ctx.save_for_backward(query, key, value)
        ctx.shared = shared
        out = query.new_empty(*query.shape[:2], value.size(-1))
        for heads, rows, seen in split_into_blocks(query, key, shared):
            probs = _probabilities(query[heads, rows], key[heads, seen], shared)
            out[heads, rows] = torch.bmm(probs, value[heads, seen])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyrefly: ignore[bad-override]  (as above)
        query, key, value = ctx.saved_tensors
        shared = ctx.shared
        grad = grad.contiguous()
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for heads, rows, seen in split_into_blocks(query, key, shared):
            probs = _probabilities(query[heads, rows], key[heads, seen], shared)
            of_probs = torch.bmm(grad[heads, rows], value[heads, seen].transpose(1, 2))
            of_scores = torch._softmax_backward_data(of_probs, probs, -1, probs.dtype)
            grad_query[heads, rows] = torch.bmm(of_scores, key[heads, seen])
            grad_key[heads, seen].baddbmm_(of_scores.transpose(1, 2), query[heads, rows])
            grad_value[heads, seen].baddbmm_(probs.transpose(1, 2), grad[heads, rows])
        return grad_query, grad_key, grad_value, None


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """Compute causal attention of the last s of t tokens in float32.

    Args:
        query: [b, s, n, d].
        key, value: [b, t, g, d], [b, t, g, d_v].

    Returns:
        [b, s, n, d_v]
    """
    q, k, v = query.float(), key.float(), value.float()
    # where keys come before the first query torch's kernel has a mask, and computes what that hides
    fast = q.size(1) >= _LONG and q.size(1) == k.size(1)
    if dropout or fast or _get_kernel() == "torch":
        return torch_attention(q, k, v, scale, dropout).to(query.dtype)
    return _attention_in_blocks(q, k, v, scale).to(query.dtype)


def _attention_in_blocks(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute `causal_attention` of float32 tensors by this module's products."""
    (b, s, n, d), groups = query.shape, key.size(2)
    shared = n // groups
    q = (query * scale).unflatten(2, (groups, shared)).transpose(1, 2).reshape(b * groups, s * shared, d)
    k, v = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
    out = CausalAttention.apply(q, k, v, shared)
    return out.view(b, groups, s, shared, value.size(-1)).transpose(1, 2).flatten(2, 3)
