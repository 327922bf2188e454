"""Log-probs and entropy over a vocabulary that is split across tensor-parallel ranks, a chunk of tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl import platform


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def _logits(
    hidden: Tensor, weight: Tensor, temperature: float, padding: int, softcap: float | None, in_float32: bool
) -> Tensor:
    """Return [n, v] float32, a new tensor; the last `padding` columns (vocabulary padding of this rank) get no probability."""
    if in_float32 and hidden.dtype != torch.float32:
        logits = platform.current().float32_product(hidden, weight)
    else:
        logits = (hidden @ weight.t()).float()
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1.0:
        logits.div_(temperature)
    if padding:
        logits[:, -padding:] = torch.finfo(torch.float32).min
    return logits


class _VocabLogProbs(torch.autograd.Function):
    """Function log softmax(hidden @ weight^T / T)[label] and the entropy of that softmax, without keeping any logits.

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
    ) -> tuple[Tensor, Tensor]:
        vocab = weight.size(0)
        first = vocab * (group.rank() if group is not None else 0)
        tokens = hidden.size(0)
        log_probs = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        log_z = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs)
        for start in range(0, tokens, chunk_size):
            chunk = slice(start, start + chunk_size)
            logits = _logits(hidden[chunk], weight, temperature, padding, softcap, in_float32)
            local = labels[chunk] - first
            mine = (local >= 0) & (local < vocab)
            # one maximum for all ranks, or their sums of exponentials could not be added
            top = _all_reduce(logits.amax(-1), group, dist.ReduceOp.MAX)
            shifted = logits.sub_(top[:, None])
            weights = shifted.exp()
            # one rank has the label, the others add 0
            picked = shifted.gather(1, local.clamp(0, vocab - 1)[:, None])[:, 0].masked_fill(~mine, 0.0)
            # weights of padding are exactly 0, their logits are huge but finite: the product is 0
            sums = torch.stack([weights.sum(-1), shifted.mul_(weights).sum(-1), picked])
            total, weighted, picked = _all_reduce(sums, group).unbind(0)
            log_total = total.log()
            log_probs[chunk] = picked - log_total
            log_z[chunk] = top + log_total
            entropy[chunk] = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, labels, log_z, entropy)
        ctx.settings = (temperature, chunk_size, padding, softcap, in_float32, first)
        # an output that the loss does not use has no gradient, instead of one of zeros that the host would have to read
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]  (as above)
        hidden, weight, labels, log_z, entropy = ctx.saved_tensors
        temperature, chunk_size, padding, softcap, in_float32, first = ctx.settings
        vocab = weight.size(0)
        grad_hidden = torch.empty_like(hidden)
        # several chunks add up in float32 and are rounded once, at the end
        grad_weight: Tensor | None = None
        if ctx.needs_input_grad[1] and not 0 < hidden.size(0) <= chunk_size:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        for start in range(0, hidden.size(0), chunk_size):
            chunk = slice(start, start + chunk_size)
            logits = _logits(hidden[chunk], weight, temperature, padding, softcap, in_float32)
            slope = None
            if softcap is not None:
                # padding has no gradient, so its value does not matter here
                slope = (logits * temperature).div_(softcap).clamp_(-1.0, 1.0).square_().neg_().add_(1.0)
            log_softmax = logits.sub_(log_z[chunk, None])
            # None where entropy is only measured, as in most runs
            if grad_entropy is None:
                grad_logits = log_softmax.exp_().mul_(-grad_log_probs[chunk, None])
            else:
                softmax = log_softmax.exp()
                # dH/dlogit_j = -p_j (log p_j + H); p_j is exactly 0 on padding
                of_entropy = log_softmax.add_(entropy[chunk, None]).mul_(softmax).mul_(grad_entropy[chunk, None])
                grad_logits = softmax.mul_(-grad_log_probs[chunk, None]).sub_(of_entropy)
            local = labels[chunk] - first
            mine = (local >= 0) & (local < vocab)
            grad_logits.scatter_add_(1, local.clamp(0, vocab - 1)[:, None], (grad_log_probs[chunk] * mine)[:, None])
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
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


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
) -> tuple[Tensor, Tensor]:
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

    Returns:
        log_probs [n] float32 and entropy [n] float32.
    """
    return _VocabLogProbs.apply(hidden, weight, labels, temperature, chunk_size, padding, softcap, in_float32, group)
