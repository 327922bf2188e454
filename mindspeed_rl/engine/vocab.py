"""Log-probs, entropy and the most probable tokens of a vocabulary that is split across tensor-parallel ranks, by chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl import adaptors, platform


@dataclass(frozen=True)
class VocabHead:
    """Form of the logits, the same for all that is computed from them; `split` is the loop over chunks of tokens.

    Attributes:
        temperature: divides the logits, as in sampling.
        chunk_size: tokens with logits in memory at one time.
        padding: rows at the end of this rank's weight that pad the vocabulary.
        softcap: logits become softcap * tanh(logits / softcap) before the temperature (Gemma 2).
        in_float32: logits of 16-bit inputs are not rounded to their format (MiniMax-M1, arXiv:2506.13585).
        group: the ranks that have the other rows of the vocabulary; None where one rank has all.
    """

    temperature: float = 1.0
    chunk_size: int = 1024
    padding: int = 0
    softcap: float | None = None
    in_float32: bool = False
    group: dist.ProcessGroup | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the vocabulary."""
        return 1 if self.group is None else self.group.size()

    def first_id(self, weight: Tensor) -> int:
        """Return the id of the first token of this rank's rows of the vocabulary, [v / tp, h]."""
        return weight.size(0) * (0 if self.group is None else self.group.rank())

    def split(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the chunks of the tokens and their logits on this rank, [chunk, v / tp] float32, new tensors.

        Padding of the vocabulary gets no probability. No local name has the logits, so that only the caller keeps them.
        """
        for start in range(0, hidden.size(0), self.chunk_size):
            chunk = slice(start, start + self.chunk_size)
            yield chunk, self._compute_logits(hidden[chunk], weight)

    def _compute_logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        if self.in_float32 and hidden.dtype != torch.float32:
            multiply = platform.current().float32_product
            logits = adaptors.multiply_rows(lambda rows: multiply(rows, weight), hidden)
        else:
            logits = adaptors.multiply_rows(lambda rows: rows @ weight.t(), hidden).float()
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        if self.padding:
            logits[:, -self.padding :] = torch.finfo(torch.float32).min
        return logits

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a tensor in place over the ranks that share the vocabulary, and return it."""
        if self.num_ranks > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def find_maxima(self, logits: Tensor) -> Tensor:
        """Return the maximum of each row over all ranks, [chunk]: one for all, or sums of exponentials could not be added."""
        return self.all_reduce(logits.amax(-1), dist.ReduceOp.MAX)


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
    `divergence` of these log-probs and a teacher's its results [n] take that output's place: chunk by chunk, in either
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
        head: VocabHead,
        others: Tensor | None,
        teacher: Tensor | None,
        divergence: Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None,
    ) -> tuple[Tensor, ...]:
        first = head.first_id(weight)
        # log-probs, log of the sum of exponentials, entropy of each chunk: a single one is not copied
        statistics: tuple[list[Tensor], ...] = ([], [], [])
        at_others: Tensor | None = None
        added: list[tuple[Tensor, ...]] = []
        if divergence is None:
            at_others = None if others is None else torch.empty(others.shape, dtype=torch.float32, device=hidden.device)
        elif not hidden.size(0):
            assert teacher is not None
            added = [divergence(teacher, teacher)]
        for chunk, logits in head.split(hidden, weight):
            top = head.find_maxima(logits)
            shifted = logits.sub_(top[:, None])
            weights = shifted.exp()
            # one rank has the label, the others add 0
            picked = _gather(shifted, labels[chunk, None], first)[:, 0]
            # weights of padding are exactly 0, their logits are huge but finite: the product is 0
            at = None if others is None else _gather(shifted, others[chunk], first)  # before `shifted` is overwritten
            sums = torch.stack([adaptors.sum_rows(weights, head.group), shifted.mul_(weights).sum(-1), picked], 1)
            summed = head.all_reduce(sums if at is None else torch.cat([sums, at], 1))
            total, weighted, picked = summed[:, :3].unbind(1)
            log_total = total.log()
            if at_others is not None:
                at_others[chunk] = summed[:, 3:] - log_total[:, None]
            elif divergence is not None:
                assert others is not None and teacher is not None
                student = (summed[:, 3:] - log_total[:, None]).masked_fill(others[chunk] < 0, float("-inf"))
                added.append(divergence(student, teacher[chunk]))
            for values, of_chunk in zip(statistics, (picked - log_total, top + log_total, log_total - weighted / total)):
                values.append(of_chunk)
        nothing = hidden.new_empty(0, dtype=torch.float32)
        log_probs, log_z, entropy = (values[0] if len(values) == 1 else torch.cat([nothing, *values]) for values in statistics)
        ctx.save_for_backward(hidden, weight, labels, log_z, entropy, others, teacher)
        ctx.head, ctx.divergence = head, divergence
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
        head, divergence, vocab = ctx.head, ctx.divergence, weight.size(0)
        first = head.first_id(weight)
        grad_hidden = torch.empty_like(hidden)
        # several chunks add up in float32 and are rounded once, at the end
        grad_weight: Tensor | None = None
        if ctx.needs_input_grad[1] and not 0 < hidden.size(0) <= head.chunk_size:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        has_divergence = divergence is not None and any(grad is not None for grad in grad_added)
        grad_at = grad_added[0] if divergence is None and grad_added else None
        for chunk, logits in head.split(hidden, weight):
            slope = None
            if head.softcap is not None:
                # padding has no gradient, so its value does not matter here
                slope = (logits * head.temperature).div_(head.softcap).clamp_(-1.0, 1.0).square_().neg_().add_(1.0)
            log_softmax = logits.sub_(log_z[chunk, None])
            grad_others = None if grad_at is None else grad_at[chunk]
            if has_divergence:
                student = head.all_reduce(_gather(log_softmax, others[chunk], first))
                student = student.masked_fill_(others[chunk] < 0, float("-inf"))
                grads = [grad if grad is None else grad[chunk] for grad in grad_added]
                grad_others = _differentiate(divergence, student, teacher[chunk], grads)
            # the sum over all log-probs of a token: each takes the softmax off the logits once
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
            if head.temperature != 1.0:
                grad_logits /= head.temperature
            if slope is not None:
                grad_logits *= slope
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[chunk] = grad_logits @ weight
            if ctx.needs_input_grad[1]:
                of_chunk = grad_logits.t() @ hidden[chunk]
                grad_weight = of_chunk if grad_weight is None else grad_weight.add_(of_chunk)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, *(None,) * 5


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
        # an entry of -inf stands for no token: 0 times infinity is not a number
        gradient = torch.autograd.grad([output for output, _ in outputs], leaf, [grad for _, grad in outputs])[0]
    return gradient.masked_fill_(student == float("-inf"), 0.0)


def compute_vocab_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    head: VocabHead = VocabHead(),
    *,
    others: Tensor | None = None,
    teacher: Tensor | None = None,
    divergence: Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None = None,
) -> tuple[Tensor, ...]:
    """Compute the log-prob of each label and the entropy of each distribution, equal on all ranks of the group.

    Collective over the group. The gradient of `hidden` is only the rank's part: the caller sums it over the group (Megatron's
    `copy_to_tensor_model_parallel_region` before this does so).

    Args:
        hidden: [n, h], the same on all ranks.
        weight: [v / tp, h], the rank's rows of the output embedding.
        labels: [n] int64 token ids.
        head: form of the logits.
        others: [n, k] further token ids, chosen by a teacher; -1 for none.
        teacher: [n, k] float32 log-probs of the teacher at these ids.
        divergence: (log-probs at `others` [c, k], teacher's [c, k]) -> results [c] of some tokens; each token by itself. None:
            their log-probs are returned.

    Returns:
        log_probs [n] float32 and entropy [n] float32; with `others` also their log-probs, [n, k] float32, -inf for no id, or
        the results of the divergence, for which this model has no [n, k] tensor.
    """
    outputs = _VocabLogProbs.apply(hidden, weight, labels, head, others, teacher, divergence)
    if others is None or divergence is not None:
        return outputs
    log_probs, entropy, at_others = outputs
    return log_probs, entropy, at_others.masked_fill(others < 0, float("-inf"))


@torch.no_grad()
def compute_squared_probs(hidden: Tensor, weight: Tensor, head: VocabHead = VocabHead()) -> Tensor:
    """Compute sum_v pi(v)^2 of each distribution, [n] float32, equal on all ranks of the group; collective over it.

    Arguments as in `compute_vocab_log_probs`; it is a product with the vocabulary of its own.
    """
    results = torch.empty(hidden.size(0), device=hidden.device)
    for chunk, logits in head.split(hidden, weight):
        weights = logits.sub_(head.find_maxima(logits)[:, None]).exp_()
        total, squares = head.all_reduce(torch.stack([weights.sum(-1), weights.square_().sum(-1)]))
        results[chunk] = squares / total.square()
    return results


@torch.no_grad()
def compute_top_log_probs(hidden: Tensor, weight: Tensor, k: int, head: VocabHead = VocabHead()) -> tuple[Tensor, Tensor]:
    """Compute the k most probable tokens of each distribution, equal on all ranks of the group; collective over it.

    Each rank contributes its own k best, so that k columns a rank are exchanged and not the vocabulary.

    Args:
        k: tokens; more than the vocabulary has are filled with -1.

    Returns:
        Log-probs [n, k] float32 in falling order, -inf for no token, and ids [n, k] int64; other arguments as in
        `compute_vocab_log_probs`.
    """
    vocab, size, first = weight.size(0), head.num_ranks, head.first_id(weight)
    count = min(k, vocab)
    log_probs = torch.full((hidden.size(0), k), float("-inf"), device=hidden.device)
    ids = torch.full(log_probs.shape, -1, dtype=torch.int64, device=hidden.device)
    for chunk, logits in head.split(hidden, weight):
        best, tokens = logits.topk(count, -1)
        # padding of the vocabulary is not a token
        tokens = torch.where(tokens < vocab - head.padding, tokens + first, -1)
        top = head.all_reduce(best[:, 0].clone(), dist.ReduceOp.MAX)
        log_z = top + head.all_reduce(logits.sub_(top[:, None]).exp_().sum(-1)).log()
        best = best.masked_fill(tokens < 0, float("-inf"))
        if size > 1:
            both = [torch.empty_like(best) for _ in range(size)], [torch.empty_like(tokens) for _ in range(size)]
            dist.all_gather(both[0], best.contiguous(), group=head.group)
            dist.all_gather(both[1], tokens.contiguous(), group=head.group)
            best, order = torch.cat(both[0], -1).topk(min(k, count * size), -1)
            tokens = torch.cat(both[1], -1).gather(1, order)
        log_probs[chunk, : best.size(1)] = best - log_z[:, None]
        ids[chunk, : best.size(1)] = tokens
    return log_probs, ids
