"""Log-probs, entropy and the most probable tokens of a vocabulary that is split across tensor-parallel ranks, by chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl import adaptors, platform
from mindspeed_rl.config.device_limits import HEAD_ROWS

#: (student's log-probs [n, k], teacher's) -> results [n]
_Divergence = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


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
        vocab_chunk_size: rows of this rank's weight with logits in memory at one time; None for all of them.
        adds_to_main_grad: the weight's gradient is added to Megatron's `main_grad` at once, and autograd gets none.
        frozen: [v / tp, f] columns in front of the weight's that do not train: the weight is B of an adapter, and the last
            columns of the hidden states are its A x.
    """

    temperature: float = 1.0
    chunk_size: int = 1024
    padding: int = 0
    softcap: float | None = None
    in_float32: bool = False
    group: dist.ProcessGroup | None = None
    vocab_chunk_size: int | None = None
    adds_to_main_grad: bool = False
    frozen: Tensor | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the vocabulary."""
        return 1 if self.group is None else self.group.size()

    def first_id(self, weight: Tensor) -> int:
        """Return the id of the first token of this rank's rows of the vocabulary, [v / tp, h]."""
        return weight.size(0) * (0 if self.group is None else self.group.rank())

    def split(self, hidden: Tensor) -> Iterator[slice]:
        """Yield the chunks of the tokens."""
        for start in range(0, hidden.size(0), self.chunk_size):
            yield slice(start, start + self.chunk_size)

    def split_vocab(self, weight: Tensor) -> list[slice]:
        """Return the chunks of this rank's rows of the vocabulary."""
        count, size = weight.size(0), self.vocab_chunk_size or weight.size(0)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def split_product(self, product: Tensor) -> list[slice]:
        """Return the blocks of a product's tokens whose logits are computed with at one time."""
        count, size = len(product), platform.current().logit_block or product.numel()
        tokens = max(size // max(product.size(1), 1), 1)
        return [slice(start, min(start + tokens, count)) for start in range(0, count, tokens)] or [slice(0, 0)]

    def compute_logits(self, hidden: Tensor, weight: Tensor, rows: slice) -> Tensor:
        """Compute the logits of these rows of the weight, [n, rows] float32, a new tensor."""
        return self.scale(self.multiply(hidden, weight, rows), weight, rows)

    def multiply(self, hidden: Tensor, weight: Tensor, rows: slice) -> Tensor:
        """Compute the product with these rows of the weight, [n, rows] of the inputs' format or float32, a new tensor."""
        if self.frozen is None:
            return self._multiply(hidden, weight[rows])
        width = self.frozen.size(1)
        frozen, trained = self._multiply(hidden[:, :width], self.frozen[rows]), self._multiply(hidden[:, width:], weight[rows])
        return frozen.float() + trained.float()

    def scale(self, product: Tensor, weight: Tensor, rows: slice) -> Tensor:
        """Return the logits, float32, of some tokens' product with these rows of the weight; a float32 product is overwritten.

        Padding of the vocabulary gets no probability.
        """
        logits = product.float()
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        if (padding := rows.stop - max(rows.start, weight.size(0) - self.padding)) > 0:
            logits[:, -padding:] = torch.finfo(torch.float32).min
        return logits

    def _multiply(self, hidden: Tensor, part: Tensor) -> Tensor:
        """Compute [n, rows]."""
        if self.in_float32 and hidden.dtype != torch.float32:
            multiply = platform.current().float32_product
            return adaptors.multiply_rows(lambda tokens: multiply(tokens, part), hidden)
        return adaptors.multiply_rows(lambda tokens: tokens @ part.t(), hidden)

    def select_trained(self, hidden: Tensor) -> Tensor:
        """Return the columns of the hidden states that the weight multiplies."""
        return hidden if self.frozen is None else hidden[:, self.frozen.size(1) :]

    def multiply_back(self, grad_logits: Tensor, weight: Tensor, rows: slice) -> Tensor:
        """Compute the gradient of the hidden states, [n, h], of these rows' logits."""
        product = grad_logits @ weight[rows]
        return product if self.frozen is None else torch.cat([grad_logits @ self.frozen[rows], product], 1)

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


@dataclass
class _Sums:
    """Sums over the vocabulary of exp(logit - top), of that times (logit - top), and logit - top at some ids, of each token.

    The chunks of the vocabulary are added one after the other; where a chunk has a larger logit, what is there is scaled.

    Attributes:
        top: largest logit so far, over all ranks that share the vocabulary.
        at: [n, k] logit - top at the ids; 0 where another rank has the id, or none has.
        found: [n, k] True at the ids so far; None where all rows of the vocabulary are one chunk.
    """

    top: Tensor
    total: Tensor
    weighted: Tensor
    at: Tensor
    found: Tensor | None

    @classmethod
    def compute(cls, head: VocabHead, hidden: Tensor, weight: Tensor, ids: Tensor) -> _Sums:
        """Add up a chunk of tokens; collective over the ranks that share the vocabulary.

        Args:
            ids: [n, k] token ids, of any rank.
        """
        parts = head.split_vocab(weight)
        sums: _Sums | None = None
        for rows in parts:
            product, blocks, first = head.multiply(hidden, weight, rows), [], head.first_id(weight) + rows.start
            for block in head.split_product(product):
                logits = head.scale(product[block], weight, rows)
                top = head.find_maxima(logits)
                if sums is not None:
                    top = torch.maximum(top, sums.top[block])
                shifted = logits.sub_(top[:, None])
                at = _gather(shifted, ids[block], first)  # before `shifted` is overwritten
                found = None if len(parts) == 1 else _locate(ids[block], first, shifted.size(1))[1]
                weights = shifted.exp()
                # weights of padding are exactly 0, their logits are huge but finite: the product is 0
                total, weighted = adaptors.sum_rows(weights, head.group), shifted.mul_(weights).sum(-1)
                blocks.append(cls(top, total, weighted, at, found))
            part = cls._join(blocks)
            sums = part if sums is None else sums._add(part)
        assert sums is not None  # a rank has rows
        return sums

    @classmethod
    def _join(cls, blocks: Sequence[_Sums]) -> _Sums:
        """Return the sums of blocks of tokens as those of all of them."""
        if len(blocks) == 1:
            return blocks[0]
        found = [block.found for block in blocks if block.found is not None]
        top, total, weighted, at = zip(*((block.top, block.total, block.weighted, block.at) for block in blocks))
        return cls(torch.cat(top), torch.cat(total), torch.cat(weighted), torch.cat(at), torch.cat(found) if found else None)

    def _add(self, other: _Sums) -> _Sums:
        """Return both together; the other has the larger maxima."""
        falls = self.top - other.top
        scale = falls.exp()
        weighted = scale * (self.weighted + falls * self.total)
        assert self.found is not None and other.found is not None  # of several chunks
        at = self.at + falls[:, None] * self.found + other.at
        total = scale * self.total + other.total
        return _Sums(other.top, total, weighted + other.weighted, at, self.found | other.found)


class _WeightGradient:
    """The sum of a weight's gradient over chunks of tokens, in float32, rounded once at the end."""

    def __init__(self, weight: Tensor, *, is_single: bool) -> None:
        """Begin with nothing.

        Args:
            weight: [v / tp, h].
            is_single: only one chunk of tokens and of rows follows, which is not copied.
        """
        self._dtype = weight.dtype
        self._sum = None if is_single else torch.zeros_like(weight, dtype=torch.float32)

    def add(self, rows: slice, grad_logits: Tensor, hidden: Tensor) -> None:
        """Add grad_logits^T [rows, n] @ hidden [n, h]."""
        product = grad_logits.t() @ hidden
        if self._sum is None:
            self._sum = product
        else:
            self._sum[rows].add_(product)

    def finish(self) -> Tensor | None:
        """Return the gradient for autograd."""
        return None if self._sum is None else self._sum.to(self._dtype)


class _MainGradient(_WeightGradient):
    """The same, added to Megatron's float32 gradient of the weight: without a tensor of the weight's size."""

    def __init__(self, weight: Any) -> None:
        self._main = weight.main_grad

    def add(self, rows: slice, grad_logits: Tensor, hidden: Tensor) -> None:
        for start in range(rows.start, rows.stop, HEAD_ROWS):
            stop = min(start + HEAD_ROWS, rows.stop)
            self._main[start:stop].add_(grad_logits[:, start - rows.start : stop - rows.start].t() @ hidden)

    def finish(self) -> None:
        """Return nothing: autograd has nothing to add."""


class _VocabLogProbs(torch.autograd.Function):
    """Function log softmax(hidden @ weight^T / T)[label] and the entropy of that softmax, without keeping any logits.

    With `others`, ids [n, k], a third output has the log softmax at each of them; an id below 0 has no gradient. With a
    `divergence` of these log-probs and a teacher's its results [n] take that output's place: chunk by chunk, in either
    direction, so that k may be the vocabulary.

    Backward recomputes the logits of each chunk. Memory is the product of a chunk in either direction, [chunk, rows of the
    vocabulary], and two float32 blocks of it (`Platform.logit_block`, or the whole chunk): both work in place wherever the
    values are not needed again.
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
        divergence: _Divergence | None,
    ) -> tuple[Tensor, ...]:
        # log-probs, log of the sum of exponentials, entropy of each chunk: a single one is not copied
        statistics: tuple[list[Tensor], ...] = ([], [], [])
        at_others: Tensor | None = None
        added: list[tuple[Tensor, ...]] = []
        if divergence is None:
            at_others = None if others is None else torch.empty(others.shape, dtype=torch.float32, device=hidden.device)
        elif not hidden.size(0):
            assert teacher is not None
            added = [divergence(teacher, teacher)]
        for chunk in head.split(hidden):
            ids = labels[chunk, None] if others is None else torch.cat([labels[chunk, None], others[chunk].long()], 1)
            sums = _Sums.compute(head, hidden[chunk], weight, ids)
            columns = torch.stack([sums.total, sums.weighted, sums.at[:, 0]], 1)
            # one rank has an id, the others add 0
            summed = head.all_reduce(columns if others is None else torch.cat([columns, sums.at[:, 1:]], 1))
            total, weighted, label = summed[:, :3].unbind(1)
            log_total = total.log()
            if at_others is not None:
                at_others[chunk] = summed[:, 3:] - log_total[:, None]
            elif divergence is not None:
                assert others is not None and teacher is not None
                student = (summed[:, 3:] - log_total[:, None]).masked_fill(others[chunk] < 0, float("-inf"))
                added.append(divergence(student, teacher[chunk]))
            for values, of_chunk in zip(statistics, (label - log_total, sums.top + log_total, log_total - weighted / total)):
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
        head, divergence = ctx.head, ctx.divergence
        first, parts = head.first_id(weight), head.split_vocab(weight)
        grad_hidden = torch.empty_like(hidden)
        gradient: _WeightGradient | None = None
        if ctx.needs_input_grad[1]:
            is_single = 0 < hidden.size(0) <= head.chunk_size and len(parts) == 1
            gradient = _MainGradient(weight) if head.adds_to_main_grad else _WeightGradient(weight, is_single=is_single)
        upstream = _Upstream(
            labels,
            log_z,
            entropy,
            torch.zeros_like(log_z) if grad_log_probs is None else grad_log_probs,
            grad_entropy,
            None if others is None else others.long(),
            grad_added[0] if divergence is None and grad_added else None,
            teacher,
            grad_added if divergence is not None and any(grad is not None for grad in grad_added) else (),
        )
        for chunk in head.split(hidden):
            tokens, of_chunk = hidden[chunk], upstream.select(chunk)
            if of_chunk.divergence_gradients and len(parts) > 1:  # those at an id depend on the log-probs at all of them
                ids = others[chunk].long()
                student = torch.zeros_like(ids, dtype=torch.float32)
                for rows in parts:
                    student += _gather(head.compute_logits(tokens, weight, rows), ids, first + rows.start)
                mine = _locate(ids, first, weight.size(0))[1]
                of_chunk = of_chunk.with_divergence(divergence, student.sub_(of_chunk.log_z[:, None]).mul_(mine), head)
            products: list[Tensor] = []
            for rows in parts:
                product = head.multiply(tokens, weight, rows)
                blocks = head.split_product(product)
                for block in blocks:
                    logits = head.scale(product[block], weight, rows)
                    grad = of_chunk.select(block).differentiate(logits, first + rows.start, head, divergence)
                    if len(blocks) == 1:
                        product = grad
                    else:
                        product[block] = grad
                grad_logits = product.to(hidden.dtype)
                of_hidden = head.multiply_back(grad_logits, weight, rows)
                # several chunks of the vocabulary add up in float32
                products = [of_hidden] if not products else [products[0].float().add_(of_hidden)]
                if gradient is not None:
                    gradient.add(rows, grad_logits, head.select_trained(tokens))
            grad_hidden[chunk] = products[0]
        return grad_hidden, None if gradient is None else gradient.finish(), *(None,) * 5


@dataclass(frozen=True)
class _Upstream:
    """Gradients of the outputs, and statistics of the forward pass, of n tokens.

    Attributes:
        labels, log_z, entropy: [n] of the forward pass.
        grad_log_probs, grad_entropy: [n]; None where nothing depends on the entropy, as in most runs.
        others: [n, k] int64 further ids.
        grad_others: [n, k] gradient of the log-probs at these ids.
        teacher: [n, k] log-probs of the teacher at these ids.
        divergence_gradients: gradients [n] of a divergence's results, from which `grad_others` follows; may be empty.
    """

    labels: Tensor
    log_z: Tensor
    entropy: Tensor
    grad_log_probs: Tensor
    grad_entropy: Tensor | None
    others: Tensor | None
    grad_others: Tensor | None
    teacher: Tensor | None
    divergence_gradients: Sequence[Tensor | None]

    def select(self, tokens: slice) -> _Upstream:
        """Return that of some of the tokens."""
        tensors = {name: tensor[tokens] for name, tensor in vars(self).items() if isinstance(tensor, Tensor)}
        gradients = [None if grad is None else grad[tokens] for grad in self.divergence_gradients]
        return replace(self, **tensors, divergence_gradients=gradients)

    def with_divergence(self, divergence: _Divergence, student: Tensor, head: VocabHead) -> _Upstream:
        """Return it with the gradient of the log-probs that a divergence's results have.

        Args:
            student: [n, k] log-probs at the ids of this rank, 0 elsewhere; overwritten.
        """
        assert self.others is not None and self.teacher is not None
        student = head.all_reduce(student).masked_fill_(self.others < 0, float("-inf"))
        grad_others = _differentiate(divergence, student, self.teacher, self.divergence_gradients)
        return replace(self, grad_others=grad_others, divergence_gradients=())

    def differentiate(self, logits: Tensor, start: int, head: VocabHead, divergence: _Divergence | None) -> Tensor:
        """Return the gradient of the product, [n, rows] float32; the logits [n, rows] are overwritten.

        Args:
            start: token id of the first column.
        """
        slope = None
        if head.softcap is not None:
            # padding has no gradient, so its value does not matter here
            slope = (logits * head.temperature).div_(head.softcap).clamp_(-1.0, 1.0).square_().neg_().add_(1.0)
        log_softmax = logits.sub_(self.log_z[:, None])
        grad_others = self.grad_others
        if self.divergence_gradients:
            assert divergence is not None and self.others is not None
            grad_others = self.with_divergence(divergence, _gather(log_softmax, self.others, start), head).grad_others
        # the sum over all log-probs of a token: each takes the softmax off the logits once
        grad_totals = self.grad_log_probs if grad_others is None else self.grad_log_probs + grad_others.sum(-1)
        if self.grad_entropy is None:
            grad_logits = log_softmax.exp_().mul_(-grad_totals[:, None])
        else:
            softmax = log_softmax.exp()
            # dH/dlogit_j = -p_j (log p_j + H); p_j is exactly 0 on padding
            of_entropy = log_softmax.add_(self.entropy[:, None]).mul_(softmax).mul_(self.grad_entropy[:, None])
            grad_logits = softmax.mul_(-grad_totals[:, None]).sub_(of_entropy)
        column, mine = _locate(self.labels, start, logits.size(1))
        grad_logits.scatter_add_(1, column[:, None], (self.grad_log_probs * mine)[:, None])
        if grad_others is not None:
            assert self.others is not None
            column, mine = _locate(self.others, start, logits.size(1))
            grad_logits.scatter_add_(1, column, grad_others * mine)
        if head.temperature != 1.0:
            grad_logits /= head.temperature
        if slope is not None:
            grad_logits *= slope
        return grad_logits


def _differentiate(divergence: _Divergence, student: Tensor, teacher: Tensor, grads: Sequence[Tensor | None]) -> Tensor:
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
    divergence: _Divergence | None = None,
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
    for chunk in head.split(hidden):
        largest: Tensor | None = None
        sums = torch.zeros(2, *hidden[chunk].shape[:1], device=hidden.device)
        for rows in head.split_vocab(weight):
            logits = head.compute_logits(hidden[chunk], weight, rows)
            top = head.find_maxima(logits)
            if largest is not None:
                top = torch.maximum(top, largest)
                scale = (largest - top).exp()
                sums *= torch.stack([scale, scale.square()])
            largest = top
            weights = logits.sub_(top[:, None]).exp_()
            sums += torch.stack([weights.sum(-1), weights.square_().sum(-1)])
        total, squares = head.all_reduce(sums)
        results[chunk] = squares / total.square()
    return results


def _find_top(head: VocabHead, hidden: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find this rank's best tokens of each distribution; collective over the group.

    Returns:
        The log of the sum of exponentials over all ranks [n], and of the `count` best tokens of this rank logits and ids
        [n, count]; -inf and id -1 for padding.
    """
    best, columns = hidden.new_empty(len(hidden), 0, dtype=torch.float32), hidden.new_empty(len(hidden), 0, dtype=torch.int64)
    largest: Tensor | None = None
    total = hidden.new_zeros(len(hidden), dtype=torch.float32)
    for rows in head.split_vocab(weight):
        logits = head.compute_logits(hidden, weight, rows)
        some, at = logits.topk(min(count, logits.size(1)), -1)
        best, order = torch.cat([best, some], -1).topk(min(count, best.size(1) + some.size(1)), -1)
        columns = torch.cat([columns, at + rows.start], -1).gather(1, order)
        top = head.find_maxima(logits)
        if largest is not None:
            top = torch.maximum(top, largest)
            total *= (largest - top).exp()
        largest = top
        total += logits.sub_(top[:, None]).exp_().sum(-1)
    assert largest is not None  # a rank has rows
    ids = torch.where(columns < weight.size(0) - head.padding, columns + head.first_id(weight), -1)
    return largest + head.all_reduce(total).log(), best.masked_fill_(ids < 0, float("-inf")), ids


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
    size, count = head.num_ranks, min(k, weight.size(0))
    log_probs = torch.full((hidden.size(0), k), float("-inf"), device=hidden.device)
    ids = torch.full(log_probs.shape, -1, dtype=torch.int64, device=hidden.device)
    for chunk in head.split(hidden):
        log_z, best, tokens = _find_top(head, hidden[chunk], weight, count)
        if size > 1:
            both = [torch.empty_like(best) for _ in range(size)], [torch.empty_like(tokens) for _ in range(size)]
            dist.all_gather(both[0], best.contiguous(), group=head.group)
            dist.all_gather(both[1], tokens.contiguous(), group=head.group)
            best, order = torch.cat(both[0], -1).topk(min(k, count * size), -1)
            tokens = torch.cat(both[1], -1).gather(1, order)
        log_probs[chunk, : best.size(1)] = best - log_z[:, None]
        ids[chunk, : best.size(1)] = tokens
    return log_probs, ids
