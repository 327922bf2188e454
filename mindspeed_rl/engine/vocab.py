"""Log-probs, entropy and the most probable tokens of a vocabulary that is split across tensor-parallel ranks, by chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl import adaptors, platform


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def _logits(
    hidden: Tensor, weight: Tensor, temperature: float, padding: int, softcap: float | None, in_float32: bool
) -> Tensor:
    """Return [n, v] float32, a new tensor; the last `padding` columns (vocabulary padding of this rank) get no probability."""
    if in_float32 and hidden.dtype != torch.float32:
        multiply = platform.current().float32_product
        logits = adaptors.multiply_rows(lambda rows: multiply(rows, weight), hidden)
    else:
        logits = adaptors.multiply_rows(lambda rows: rows @ weight.t(), hidden).float()
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1.0:
        logits.div_(temperature)
    if padding:
        logits[:, -padding:] = torch.finfo(torch.float32).min
    return logits


def _locate(ids: Tensor, first: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Return the column of each id among the `vocab` of this rank, and False where another rank has the id, or none has."""
    local = ids - first if first else ids
    column = local.clamp(0, vocab - 1)
    return column, column == local


def _gather(values: Tensor, ids: Tensor, first: int) -> Tensor:
    """Return the values at ids of this rank, [n, k]; 0 where another rank has the id, or none has."""
    column, mine = _locate(ids.long(), first, values.size(1))
    return values.gather(1, column) * mine


class _VocabLogProbs(torch.autograd.Function):
    """Function log softmax(hidden @ weight^T / T)[label] and the entropy of that softmax, without keeping any logits.

    With `others`, ids [n, k], a third output has the log softmax at each of them; an id below 0 has no gradient. With a
    `divergence` of these log-probs and those of a teacher its results [n] take that output's place: chunk by chunk, in either
    direction, so that k may be the vocabulary.

    Backward recomputes the logits of each chunk. Memory is two chunks of [chunk, vocab / tp] float32 in either direction, so
    both work in place wherever the values are not needed again.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        chunk_size: int,
        padding: int,
        softcap: float | None,
        in_float32: bool,
        group: dist.ProcessGroup | None,
        others: Tensor | None,
        teacher: Tensor | None,
        divergence: Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None,
    ) -> tuple[Tensor, ...]:
        vocab = weight.size(0)
        first = vocab * (group.rank() if group is not None else 0)
        tokens = hidden.size(0)
        # log-probs, log of the sum of exponentials, entropy of each chunk: a single one is not copied
        found: tuple[list[Tensor], ...] = ([], [], [])
        at_others: Tensor | None = None
        added: list[tuple[Tensor, ...]] = []
        if divergence is None:
            at_others = None if others is None else torch.empty(others.shape, dtype=torch.float32, device=hidden.device)
        elif not tokens:
            assert teacher is not None
            added = [divergence(teacher, teacher)]
        for start in range(0, tokens, chunk_size):
            chunk = slice(start, start + chunk_size)
            logits = _logits(hidden[chunk], weight, temperature, padding, softcap, in_float32)
            # one maximum for all ranks, or their sums of exponentials could not be added
            top = _all_reduce(logits.amax(-1), group, dist.ReduceOp.MAX)
            shifted = logits.sub_(top[:, None])
            weights = shifted.exp()
            # one rank has the label, the others add 0
            picked = _gather(shifted, labels[chunk, None], first)[:, 0]
            # weights of padding are exactly 0, their logits are huge but finite: the product is 0
            at = None if others is None else _gather(shifted, others[chunk], first)  # before `shifted` is overwritten
            sums = torch.stack([adaptors.sum_rows(weights, group), shifted.mul_(weights).sum(-1), picked], 1)
            summed = _all_reduce(sums if at is None else torch.cat([sums, at], 1), group)
            total, weighted, picked = summed[:, :3].unbind(1)
            log_total = total.log()
            if at_others is not None:
                at_others[chunk] = summed[:, 3:] - log_total[:, None]
            elif divergence is not None:
                assert others is not None and teacher is not None
                student = (summed[:, 3:] - log_total[:, None]).masked_fill(others[chunk] < 0, float("-inf"))
                added.append(divergence(student, teacher[chunk]))
            for values, of_chunk in zip(found, (picked - log_total, top + log_total, log_total - weighted / total)):
                values.append(of_chunk)
        nothing = hidden.new_empty(0, dtype=torch.float32)
        log_probs, log_z, entropy = (values[0] if len(values) == 1 else torch.cat([nothing, *values]) for values in found)
        ctx.save_for_backward(hidden, weight, labels, log_z, entropy, others, teacher)
        ctx.settings = (temperature, chunk_size, padding, softcap, in_float32, first, group, divergence)
        # an output that the loss does not use has no gradient, instead of one of zeros that the host would have to read
        ctx.set_materialize_grads(False)
        if added:
            return log_probs, entropy, *(torch.cat(parts) for parts in zip(*added))
        return (log_probs, entropy) if at_others is None else (log_probs, entropy, at_others)

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]  (as above)
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *grad_added: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_z, entropy, others, teacher = ctx.saved_tensors
        temperature, chunk_size, padding, softcap, in_float32, first, group, divergence = ctx.settings
        vocab = weight.size(0)
        grad_hidden = torch.empty_like(hidden)
        # several chunks add up in float32 and are rounded once, at the end
        grad_weight: Tensor | None = None
        if ctx.needs_input_grad[1] and not 0 < hidden.size(0) <= chunk_size:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        has_divergence = divergence is not None and any(grad is not None for grad in grad_added)
        grad_at = grad_added[0] if divergence is None and grad_added else None
        for start in range(0, hidden.size(0), chunk_size):
            chunk = slice(start, start + chunk_size)
            logits = _logits(hidden[chunk], weight, temperature, padding, softcap, in_float32)
            slope = None
            if softcap is not None:
                # padding has no gradient, so its value does not matter here
                slope = (logits * temperature).div_(softcap).clamp_(-1.0, 1.0).square_().neg_().add_(1.0)
            log_softmax = logits.sub_(log_z[chunk, None])
            grad_others = None if grad_at is None else grad_at[chunk]
            if has_divergence:
                student = _all_reduce(_gather(log_softmax, others[chunk], first), group)
                student = student.masked_fill_(others[chunk] < 0, float("-inf"))
                grads = [grad if grad is None else grad[chunk] for grad in grad_added]
                grad_others = _differentiate(divergence, student, teacher[chunk], grads)
            # of all log-probs of a token together: each takes the softmax off the logits once
            grad_totals = grad_log_probs[chunk] if grad_others is None else grad_log_probs[chunk] + grad_others.sum(-1)
            # None where entropy is only measured, as in most runs
            if grad_entropy is None:
                grad_logits = log_softmax.exp_().mul_(-grad_totals[:, None])
            else:
                softmax = log_softmax.exp()
                # dH/dlogit_j = -p_j (log p_j + H); p_j is exactly 0 on padding
                of_entropy = log_softmax.add_(entropy[chunk, None]).mul_(softmax).mul_(grad_entropy[chunk, None])
                grad_logits = softmax.mul_(-grad_totals[:, None]).sub_(of_entropy)
            column, mine = _locate(labels[chunk], first, vocab)
            grad_logits.scatter_add_(1, column[:, None], (grad_log_probs[chunk] * mine)[:, None])
            if grad_others is not None:
                column, mine = _locate(others[chunk].long(), first, vocab)
                grad_logits.scatter_add_(1, column, grad_others * mine)
            if temperature != 1.0:
                grad_logits /= temperature
            if slope is not None:
                grad_logits *= slope
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[chunk] = grad_logits @ weight
            if ctx.needs_input_grad[1]:
                of_chunk = grad_logits.t() @ hidden[chunk]
                grad_weight = of_chunk if grad_weight is None else grad_weight.add_(of_chunk)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *(None,) * 10


def _differentiate(
    divergence: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    student: Tensor,
    teacher: Tensor,
    grads: Sequence[Tensor | None],
) -> Tensor:
    """Return the gradient of a divergence's results with respect to the student's log-probs, [n, k]."""
    with torch.enable_grad():
        leaf = student.detach().requires_grad_()
        both = zip(divergence(leaf, teacher), grads)
        outputs = [(output, grad) for output, grad in both if grad is not None and output.requires_grad]
        # an entry of -inf is no token: 0 times infinity is no number
        found = torch.autograd.grad([output for output, _ in outputs], leaf, [grad for _, grad in outputs])[0]
    return found.masked_fill_(student == float("-inf"), 0.0)


def compute_vocab_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    padding: int = 0,
    softcap: float | None = None,
    in_float32: bool = False,
    group: dist.ProcessGroup | None = None,
    others: Tensor | None = None,
    teacher: Tensor | None = None,
    divergence: Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None = None,
) -> tuple[Tensor, ...]:
    """Compute the log-prob of each label and the entropy of each distribution, equal on all ranks of the group.

    Collective over `group`. The gradient of `hidden` is only the rank's part: the caller sums it over the group (Megatron's
    `copy_to_tensor_model_parallel_region` before this does so).

    Args:
        hidden: [n, h], the same on all ranks.
        weight: [v / tp, h], the rank's rows of the output embedding.
        labels: [n] int64 token ids.
        temperature: divides the logits, as in sampling.
        chunk_size: tokens with logits in memory at one time.
        padding: rows at the end of this rank's `weight` that pad the vocabulary.
        softcap: logits become softcap * tanh(logits / softcap) before the temperature (Gemma 2).
        in_float32: logits of 16-bit `hidden` and `weight` are not rounded to their format (MiniMax-M1, arXiv:2506.13585).
        others: [n, k] further token ids, those of a teacher; -1 for none.
        teacher: [n, k] float32 log-probs of the teacher at these ids.
        divergence: (log-probs at `others` [c, k], teacher's [c, k]) -> results [c] of some tokens; each token by itself. None:
            their log-probs are returned.

    Returns:
        log_probs [n] float32 and entropy [n] float32; with `others` also their log-probs, [n, k] float32, -inf for no id, or
        the results of the divergence, for which this model has no [n, k] tensor.
    """
    settings = temperature, chunk_size, padding, softcap, in_float32, group
    outputs = _VocabLogProbs.apply(hidden, weight, labels, *settings, others, teacher, divergence)
    if others is None or divergence is not None:
        return outputs
    log_probs, entropy, at_others = outputs
    return log_probs, entropy, at_others.masked_fill(others < 0, float("-inf"))


@torch.no_grad()
def compute_squared_probs(
    hidden: Tensor,
    weight: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    padding: int = 0,
    softcap: float | None = None,
    in_float32: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute sum_v pi(v)^2 of each distribution, [n] float32, equal on all ranks of the group; collective over it.

    Arguments as in `compute_vocab_log_probs`; it is a product with the vocabulary of its own.
    """
    results = torch.empty(hidden.size(0), device=hidden.device)
    for start in range(0, hidden.size(0), chunk_size):
        chunk = slice(start, start + chunk_size)
        logits = _logits(hidden[chunk], weight, temperature, padding, softcap, in_float32)
        top = _all_reduce(logits.amax(-1), group, dist.ReduceOp.MAX)
        weights = logits.sub_(top[:, None]).exp_()
        total, squares = _all_reduce(torch.stack([weights.sum(-1), weights.square_().sum(-1)]), group)
        results[chunk] = squares / total.square()
    return results


@torch.no_grad()
def compute_top_log_probs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    padding: int = 0,
    softcap: float | None = None,
    in_float32: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the k most probable tokens of each distribution, equal on all ranks of the group; collective over it.

    Each rank contributes its own k best, so that k columns a rank are exchanged and not the vocabulary.

    Args:
        k: tokens; more than the vocabulary has are filled with -1.

    Returns:
        Log-probs [n, k] float32 in falling order, -inf for no token, and ids [n, k] int64; other arguments as in
        `compute_vocab_log_probs`.
    """
    vocab, size = weight.size(0), 1 if group is None else group.size()
    first, count = vocab * (group.rank() if group is not None else 0), min(k, vocab)
    log_probs = torch.full((hidden.size(0), k), float("-inf"), device=hidden.device)
    ids = torch.full(log_probs.shape, -1, dtype=torch.int64, device=hidden.device)
    for start in range(0, hidden.size(0), chunk_size):
        chunk = slice(start, start + chunk_size)
        logits = _logits(hidden[chunk], weight, temperature, padding, softcap, in_float32)
        best, tokens = logits.topk(count, -1)
        # padding of the vocabulary is no token
        tokens = torch.where(tokens < vocab - padding, tokens + first, -1)
        top = _all_reduce(best[:, 0].clone(), group, dist.ReduceOp.MAX)
        log_z = top + _all_reduce(logits.sub_(top[:, None]).exp_().sum(-1), group).log()
        best = best.masked_fill(tokens < 0, float("-inf"))
        if size > 1:
            both = [torch.empty_like(best) for _ in range(size)], [torch.empty_like(tokens) for _ in range(size)]
            dist.all_gather(both[0], best.contiguous(), group=group)
            dist.all_gather(both[1], tokens.contiguous(), group=group)
            best, order = torch.cat(both[0], -1).topk(min(k, count * size), -1)
            tokens = torch.cat(both[1], -1).gather(1, order)
        log_probs[chunk, : best.size(1)] = best - log_z[:, None]
        ids[chunk, : best.size(1)] = tokens
    return log_probs, ids
