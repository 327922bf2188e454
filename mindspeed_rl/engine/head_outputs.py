"""Results of the head: a class for each form, which computes it for the predicted tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import NUM_DIVERGENCES
from mindspeed_rl.engine.batching import MicroBatch
from mindspeed_rl.engine.vocab import VocabHead, compute_squared_probs, compute_top_log_probs, compute_vocab_log_probs


@dataclass(frozen=True)
class HeadPass:
    """Pass of a micro-batch through the head, on the last stage.

    Attributes:
        weight: [v / tp, h], this rank's rows of the output embedding.
        vocab: form of the logits.
        select: (hidden states, indices of predicting positions) -> [n, h]; the gradient is summed over the tensor ranks.
        align: [n] values of this rank's predicted tokens -> [rows, width] of the full micro-batch, for each.
        position_ids: positions of the tokens.
        inputs: arguments of the decoder's layers.
    """

    micro_batch: MicroBatch
    weight: Tensor
    vocab: VocabHead
    select: Callable[[Tensor, Tensor], Tensor]
    align: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
    position_ids: Tensor
    inputs: Mapping[str, Any]


class HeadOutputs:
    """Log-probs and entropies of the predicted tokens; subclasses compute other results.

    Attributes:
        count: number of results of a micro-batch that trains.
    """

    count: int = 2

    def compute(self, head: HeadPass, hidden: Tensor) -> tuple[Tensor, ...]:
        """Compute the results, [rows, width] float32 each, 0 on padding; `hidden` is [n, h]."""
        return head.align(compute_vocab_log_probs(hidden, head.weight, head.micro_batch.labels, head.vocab))


@dataclass(frozen=True)
class SquaredProbs(HeadOutputs):
    """Sums of squared probabilities, after log-probs and entropies."""

    count = 3

    def compute(self, head: HeadPass, hidden: Tensor) -> tuple[Tensor, ...]:
        """Compute the three, [rows, width] each; the sums have no gradient."""
        squares = compute_squared_probs(hidden, head.weight, head.vocab)
        results = compute_vocab_log_probs(hidden, head.weight, head.micro_batch.labels, head.vocab)
        return head.align([*results, squares])


@dataclass(frozen=True)
class TeacherDivergence(HeadOutputs):
    """Log-probs, entropies and results of a divergence, for rows that have the columns of teachers.

    Attributes:
        divergence: (log-probs at the column teacher_ids, column teacher_log_probs), [n, k] each -> results [n].
    """

    divergence: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    count = HeadOutputs.count + NUM_DIVERGENCES

    def compute(self, head: HeadPass, hidden: Tensor) -> tuple[Tensor, ...]:
        """Compute them, [rows, width] each; only log-probs and entropies for rows without teachers."""
        micro_batch = head.micro_batch
        if "teacher_ids" not in micro_batch.columns:
            return super().compute(head, hidden)
        # [rows, width, k] -> values of this rank's predicted tokens
        ids, teacher = (
            micro_batch.columns[name].flatten(0, 1).index_select(0, micro_batch.slots)
            for name in ("teacher_ids", "teacher_log_probs")
        )
        judged: dict[str, Any] = {"others": ids, "teacher": teacher, "divergence": self.divergence}
        return head.align(compute_vocab_log_probs(hidden, head.weight, micro_batch.labels, head.vocab, **judged))


@dataclass(frozen=True)
class TopLogProbs(HeadOutputs):
    """Log-probs and ids of the most probable tokens; without a gradient.

    Attributes:
        k: tokens for each predicted one.
    """

    k: int

    def compute(self, head: HeadPass, hidden: Tensor) -> tuple[Tensor, ...]:
        """Compute both, [rows, width, k] each."""
        log_probs, ids = compute_top_log_probs(hidden, head.weight, self.k, head.vocab)
        # ids are exact in float32 up to 2**24, more than any vocabulary has
        values = head.align([*log_probs.unbind(1), *ids.float().unbind(1)])
        return torch.stack(values[: self.k], -1), torch.stack(values[self.k :], -1)


@dataclass(frozen=True)
class ChoiceLogits(HeadOutputs):
    """Logits of a few tokens, one result for each.

    Attributes:
        choices: their ids.
    """

    choices: tuple[int, ...]

    @property
    def count(self) -> int:  # pyrefly: ignore[bad-override]  (a property in place of a constant)
        """Number of the tokens."""
        return len(self.choices)

    def compute(self, head: HeadPass, hidden: Tensor) -> tuple[Tensor, ...]:
        """Compute them, [rows, width] each."""
        return head.align(_compute_choice_logits(hidden, head.weight, self.choices, head.vocab).unbind(0))


@dataclass(frozen=True)
class JoinedOutputs(HeadOutputs):
    """Results of joined micro-batches (`join_micro_batches`), each by its own outputs and as if it were alone.

    Attributes:
        members: the micro-batches and their outputs.
        align: (values, micro-batch) -> [rows, width] of it for each.
    """

    members: Sequence[tuple[MicroBatch, HeadOutputs]]
    align: Callable[[Sequence[Tensor], MicroBatch], tuple[Tensor, ...]]

    @property
    def count(self) -> int:  # pyrefly: ignore[bad-override]  (a property in place of a constant)
        """Number of the results of all members."""
        return sum(outputs.count for _, outputs in self.members)

    def compute(self, head: HeadPass, hidden: Tensor) -> tuple[Tensor, ...]:
        """Compute the results of one member after the other, [rows, width] of it each."""
        parts = hidden.split([len(member.hidden_index) for member, _ in self.members])
        results: list[Tensor] = []
        for (member, outputs), own in zip(self.members, parts):
            alone = replace(head, micro_batch=member, align=lambda values, member=member: self.align(values, member))
            # a copy: products of rows that begin at another address may round otherwise
            results += outputs.compute(alone, own.clone())
        return tuple(results)


def _compute_choice_logits(hidden: Tensor, weight: Tensor, choices: Sequence[int], head: VocabHead) -> Tensor:
    """Compute [len(choices), n] float32 logits of a few tokens, equal on all ranks of the group; collective over it.

    Arguments and the gradient of `hidden` as in `compute_vocab_log_probs`.
    """
    vocab = weight.size(0)
    local = torch.tensor(choices, device=weight.device) - head.first_id(weight)
    mine = (local >= 0) & (local < vocab)
    # a rank without the token adds 0
    rows = weight.index_select(0, local.clamp(0, vocab - 1))
    logits = (hidden.float() @ rows.float().t() if head.in_float32 else (hidden @ rows.t()).float()) * mine
    if head.num_ranks > 1:
        logits = reduce_from_tensor_model_parallel_region(logits, group=head.group)
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return (logits / head.temperature).t()
