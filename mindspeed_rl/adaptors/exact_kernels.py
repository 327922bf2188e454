"""Forward passes on the CPU that give each token the same bits, whatever else is in the batch (`rl_config.exact_log_probs`).

Trainer and rollout engine call these same functions, so that log-probs of both are equal bit for bit:

| step | rule |
|---|---|
| products | rows in blocks of 16, 32, ... 256 (fewer where a processor has another kernel for large blocks), filled up with \
zeros: oneDNN and MKL add up one to three rows in another order, and may divide the sums of many rows among threads |
| products that tensor-parallel ranks add up | in as many slices as the larger layout of both sides has ranks, added in pairs \
of neighbours; a column of a product depends on nothing but that column |
| attention | in float32; keys from the first one on in blocks of `KEY_BLOCK`, whose parts are added up one after the other |
| sums of probabilities | groups of 16, then pairs of neighbours: zeros at the end change nothing, and the sums of ranks are \
among the sums of one |
| rotation, SiLU | in float32 by single operations: torch's fused ones round the last elements of a tensor otherwise |
| norms | torch's kernel, which computes row by row |
| gradients of tokens | products with frozen weights, norms and SiLU by the same rules, so that rows of several models share \
them; other gradients are as in other runs |
| experts | products as above; the outputs of a token's experts are added in float32, in the order of their numbers |

Zeros that are added never change a sum, which is what all of it rests on: a key after the last one has probability 0.
`check` finds out whether the products of this processor keep the first rule, and `find_violation` does so before a worker is
started. The idea comes from Thinking Machines' batch-invariant operators ("Defeating Nondeterminism in LLM Inference", 2025).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mindspeed_rl.adaptors import cpu_halves, cpu_products
from mindspeed_rl.adaptors.cpu_attention import CausalAttention, split_into_blocks

#: rows of a product: a multiple of the first, at most one of the others (`find_max_rows`)
ROWS, _BLOCKS = 16, (256, 128, 64, 32, 16)
#: sums of the products that are tried
_WIDTHS = (64, 896, 4864)
#: the same of attention, whose products are many and small
QUERY_ROWS = 8
#: keys whose values are added up in one product
KEY_BLOCK = 128
#: elements that one instruction adds up, in any order that depends only on their number
_GROUP = 16


def find_max_rows(dtype: torch.dtype) -> int:
    """Return the rows of the largest block that gives a row the same bits as smaller ones, by trial; 16 where none does.

    Some processors have another kernel for more than about a hundred rows, or for more than a few in bfloat16 (AMX). Products
    of 16-bit rows may also be computed in float32 (`Platform.float32_product`), so their blocks are exact in both formats. The
    answer holds for the threads of the first call.
    """
    return min(_try_blocks(tried) for tried in {dtype, torch.float32})


@functools.cache
def _try_blocks(dtype: torch.dtype) -> int:
    matrices = [_waves(torch.cos, columns, width).to(dtype).t() for width in _WIDTHS for columns in (48, 1024)]
    matrices += [matrix.contiguous() for matrix in matrices]

    def is_exact(size: int) -> bool:
        for matrix in matrices:
            rows = _waves(torch.sin, size, matrix.size(0)).to(dtype)
            full = torch.mm(rows, matrix)
            counts = (ROWS, 2 * ROWS, size // 2, size - ROWS)
            if any(not torch.equal(torch.mm(rows[:count], matrix), full[:count]) for count in counts):
                return False
        return True

    return next(size for size in _BLOCKS if size == ROWS or is_exact(size))


def _waves(wave: Callable[[Tensor], Tensor], rows: int, width: int) -> Tensor:
    """Return a float32 matrix of sines or cosines, which need all the digits there are."""
    return wave(torch.arange(float(rows * width)).view(rows, width))


def multiply_rows(product: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Return `product` of [n, k] rows, computed in blocks of fixed sizes.

    Args:
        product: [m, k] -> [m, ...], each row on its own.
    """
    max_rows = find_max_rows(rows.dtype)
    if len(rows) <= max_rows and not len(rows) % ROWS:
        return product(rows)
    parts = []
    for block in rows.split(max_rows):
        count = block.size(0)
        part = product(functional.pad(block, (0, 0, 0, -count % ROWS)) if count % ROWS else block)
        parts.append(part[:count])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def matmul(x: Tensor, matrix: Tensor, slices: int = 1) -> Tensor:
    """Return x @ matrix of [..., k] and [k, n], made of so many slices of k; no gradient."""
    rows = x.reshape(-1, x.size(-1))
    pairs = zip(rows.chunk(slices, 1), matrix.chunk(slices))
    parts = [multiply_rows(lambda block, part=part: torch.mm(block, part), columns) for columns, part in pairs]
    return add_slices(parts).view(*x.shape[:-1], matrix.size(1))


def add_slices(slices: Sequence[Tensor]) -> Tensor:
    """Add neighbours in pairs, then neighbours of those: so ranks that add up their own slices first get the same bits."""
    sums = list(slices)
    while len(sums) > 1:
        sums = [sum(sums[first + 1 : first + 2], sums[first]) for first in range(0, len(sums), 2)]
    return sums[0]


def sum_rows(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sums over the last dimension of [..., n]; zeros appended to it change none of them.

    Args:
        group: process group of the ranks that have equal parts of the dimension, multiples of 16; its first rank returns the
            sums over all parts, the others return 0.
    """
    sums = functional.pad(x, (0, -x.size(-1) % _GROUP)).unflatten(-1, (-1, _GROUP)).sum(-1)
    ranks = 1 if group is None else group.size()
    while sums.size(-1) > 1 or ranks > 1:
        if ranks > 1 and sums.size(-1) % 2:  # no further pair is within this rank
            parts = sums.new_empty(ranks * sums.size(0), *sums.shape[1:])
            dist.all_gather_into_tensor(parts, sums.contiguous(), group=group)
            sums, ranks = torch.cat(parts.chunk(ranks), -1), 1
        else:
            sums = functional.pad(sums, (0, 1)) if sums.size(-1) % 2 else sums
            sums = sums[..., 0::2] + sums[..., 1::2]
    return sums[..., 0] if group is None or group.rank() == 0 else torch.zeros_like(sums[..., 0])


def log_softmax(logits: Tensor) -> Tensor:
    """Return the log-probs of [n, v] float32 logits, as the trainer's head computes a token's."""
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted.sub_(sum_rows(shifted.exp()).log()[:, None])


# ---------------------------------------------------------------- single tokens


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        ctx.save_for_backward(x)
        wide = x.float()
        return wide.div(wide.neg().exp_().add_(1.0)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]  (as above)
        (x,) = ctx.saved_tensors
        wide = x.float()
        sigmoid = wide.neg().exp_().add_(1.0).reciprocal_()
        # s (1 + x (1 - s)), by single operations
        slope = sigmoid.neg().add_(1.0).mul_(wide).add_(1.0).mul_(sigmoid)
        return slope.mul_(grad).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """Return x sigmoid(x)."""
    return _Silu.apply(x)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves a and b of [..., d] heads: (a cos - b sin, b cos + a sin).

    Args:
        cos, sin: [..., d / 2] float32, of the angles.
    """
    a, b = heads.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(heads.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # pyrefly: ignore[bad-override]  (as above)
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return functional.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyrefly: ignore[bad-override]  (as above)
        x, weight = ctx.saved_tensors
        width, values, grads = x.size(-1), x.float(), grad.float()
        scale = sum_rows(values * values)[..., None].div_(width).add_(ctx.eps).sqrt_().reciprocal_()
        normed = values * scale
        products = grads * normed
        grad_weight = products.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        # d(x / rms) / dx: what lies along x is taken out
        factors = weight.float()
        along = sum_rows(products * factors)[..., None].div_(width)
        return (grads * factors).sub_(normed * along).mul_(scale).to(x.dtype), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension of [..., h]."""
    return _RMSNorm.apply(x, weight, eps)


# ---------------------------------------------------------------- experts


def add_experts(outputs: Tensor) -> Tensor:
    """Return the sums [n, d] of weighted outputs [n, k, d] of each token's experts, which are in the order of their numbers."""
    total = outputs[:, 0].float()
    for index in range(1, outputs.size(1)):
        total = total + outputs[:, index]
    return total.to(outputs.dtype)


class _AddExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, tokens: Tensor, count: int) -> Tensor:  # pyrefly: ignore[bad-override]  (as above)
        ctx.save_for_backward(tokens)
        return add_experts(outputs.index_select(0, tokens.argsort(stable=True)).view(count, -1, outputs.size(-1)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]  (as above)
        return grad.index_select(0, *ctx.saved_tensors), None, None


def unpermute(outputs: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Return the sums [count, d] of outputs [p, d] of experts in the order of their numbers, each for one of the tokens [p]."""
    return _AddExperts.apply(outputs, tokens, count)


def compute_experts(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Return what a token's experts make of [n, d] tokens, as Megatron computes it; no gradient.

    Args:
        up: [experts, 2 f, d], of gates and values.
        down: [experts, d, f].
        weights: [n, k] float32; the activations are multiplied by them.
        ids: [n, k].
    """
    ids, order = ids.long().sort(1)
    scales, pairs = weights.gather(1, order).flatten(), ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=len(up)).tolist()
    outputs = x.new_empty(len(pairs), x.size(1))
    for expert, of_expert in enumerate(pairs.split(counts)):
        if len(of_expert):
            gates, values = matmul(x[of_expert // ids.size(1)], up[expert].t()).chunk(2, -1)
            scaled = (silu(gates) * values * scales[of_expert, None]).to(x.dtype)
            outputs[of_expert] = matmul(scaled, down[expert].t())
    return add_experts(outputs.view(*ids.shape, -1))


# ---------------------------------------------------------------- attention


def attend(scores: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Return softmax(scores) @ values of blocks of keys.

    Args:
        scores: [b, r, t] float32, -inf for hidden keys; overwritten. Rows are filled up only for the products.
        values: [b, k, d] of each `KEY_BLOCK` of the t keys, the last of which may have fewer keys; only of the first of all b
            where the others have no key in a block.
    """
    count = scores.size(1)
    probs = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    sums = sum_rows(probs)[..., None]
    probs = functional.pad(probs, (0, 0, 0, -count % QUERY_ROWS)) if count % QUERY_ROWS else probs
    out = torch.bmm(probs[..., :KEY_BLOCK], values[0])
    for index, value in enumerate(values[1:], 1):
        used = len(value)
        out[:used] += torch.bmm(probs[:used, :, index * KEY_BLOCK : (index + 1) * KEY_BLOCK], value)
    return out[:, :count].div_(sums)


class _ExactAttention(CausalAttention):
    """The same function with the same gradient."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, shared: int) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.shared = shared
        out = query.new_empty(*query.shape[:2], value.size(-1))
        padded = [functional.pad(x, (0, 0, 0, -x.size(1) % ROWS)) for x in (key, value)]
        for heads, rows, seen in split_into_blocks(query, key, shared):
            queries, length = query[heads, rows], seen.stop
            count = queries.size(1)
            keys, values = (x[heads, : length + -length % ROWS] for x in padded)
            if count % ROWS:
                queries = functional.pad(queries, (0, 0, 0, -count % ROWS))
            visible = torch.arange(length - count // shared, length).repeat_interleave(shared)
            visible = functional.pad(visible, (0, queries.size(1) - count))[:, None]
            scores = torch.bmm(queries, keys.transpose(1, 2))
            scores.masked_fill_(torch.arange(scores.size(-1)) > visible, float("-inf"))
            out[heads, rows] = attend(scores, values.split(KEY_BLOCK, 1))[:, :count]
        return out


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """Compute causal attention of the last s of t tokens; arguments as in `adaptors.causal_attention`, without dropout."""
    assert not dropout  # a rule refuses it
    (b, s, n, d), groups = query.shape, key.size(2)
    shared = n // groups
    queries = (query.float() * scale).unflatten(2, (groups, shared)).transpose(1, 2).reshape(b * groups, s * shared, d)
    keys, values = (x.float().transpose(1, 2).flatten(0, 1) for x in (key, value))
    out = _ExactAttention.apply(queries, keys, values, shared)
    return out.view(b, groups, s, shared, value.size(-1)).transpose(1, 2).flatten(2, 3).to(query.dtype)


def check(slices: int = 1) -> None:
    """Check that torch's products on this processor give a row the same bits in blocks of every size, at every place.

    Args:
        slices: columns of so many ranks must have the same bits too, and so must slices of rows.

    Raises:
        RuntimeError: they do not.
    """
    for reason in _find_violations(slices):
        raise RuntimeError(f"rl_config.exact_log_probs: {reason}")


def find_violation(slices: int, threads: int) -> str | None:
    """Return the sentence that `check` would end a worker on this machine with; None where it would not.

    torch has a worker's settings meanwhile, and its earlier ones afterwards.

    Args:
        threads: number of threads of a worker.
    """
    before = torch.get_num_threads()
    _try_blocks.cache_clear()
    try:
        torch.set_num_threads(threads)
        with cpu_products.applied(), cpu_halves.applied():
            return next((f"rl_config.exact_log_probs: {reason}" for reason in _find_violations(slices)), None)
    finally:
        torch.set_num_threads(before)
        _try_blocks.cache_clear()


def equals_torch(multiply: Callable[[Tensor, Tensor], Tensor], slices: int = 1) -> bool:
    """Return True where a product gives the bits of torch's in blocks of every size: another library may add up otherwise.

    Args:
        multiply: [m, k] and [k, n] -> [m, n].
        slices: as in `check`.
    """
    return not any(True for _ in _find_differences(multiply, slices))


def _find_violations(slices: int) -> Iterator[str]:
    """Yield a sentence for each kind of products on which exact log-probs cannot rest."""
    heads = torch.arange(2.0 * 64 * 64).view(2, 64, 64).sin()
    few = torch.bmm(heads[:, :QUERY_ROWS], heads[:, : 2 * ROWS].transpose(1, 2))
    if not torch.equal(few, torch.bmm(heads, heads.transpose(1, 2))[:, :QUERY_ROWS, : 2 * ROWS]):
        yield "products of attention on this processor depend on the number of queries; set it to false"
    yield from _find_differences(torch.mm, slices)


def _find_differences(multiply: Callable[[Tensor, Tensor], Tensor], slices: int) -> Iterator[str]:
    """Yield a sentence for each kind of block whose rows differ from the rows of torch's product of all rows."""
    for dtype in (torch.float32, torch.bfloat16):
        max_rows = find_max_rows(dtype)
        for width in _WIDTHS:
            rows, matrix = _waves(torch.sin, max_rows, width).to(dtype), _waves(torch.cos, 48, width).to(dtype).t()
            full = torch.mm(rows, matrix)
            if slices > 1:
                part = slice(width // slices, 2 * width // slices)
                copied = torch.mm(rows[:, part].contiguous(), matrix[part].t().contiguous().t())
                columns = [multiply(rows, columns) for columns in matrix.chunk(slices, 1)]
                strided = multiply(rows[:, part], matrix[part])
                if not torch.equal(torch.cat(columns, 1), full) or not torch.equal(strided, copied):
                    yield (
                        f"products of {dtype} on this processor depend on the number of columns or on their distance in memory "
                        f"({slices} slices of {width}); use it without tensor parallelism"
                    )
            places = ((0, 16), (16, 16), (16, 48), (32, 128), (0, max_rows))
            for first, count in (place for place in places if sum(place) <= max_rows):
                if not torch.equal(multiply(rows[first : first + count], matrix), full[first : first + count]):
                    yield (
                        f"products of {dtype} on this processor depend on the number of rows ({count} rows of {width}); "
                        "set it to false"
                    )
            # a block of `ROWS` rows, where no larger one is exact, has a row at any place
            for shift in (1, 5, 11):
                if not torch.equal(multiply(rows[:ROWS].roll(shift, 0), matrix), full[:ROWS].roll(shift, 0)):
                    yield f"products of {dtype} on this processor depend on the place of a row ({width} wide); set it to false"
