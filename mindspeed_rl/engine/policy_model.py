"""Megatron's GPTModel with a head that returns log-probs (or values) of the predicted tokens instead of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed_rl.engine.batching import MicroBatch
from mindspeed_rl.engine.vocab import choice_logits, vocab_log_probs
from mindspeed_rl.models.reward_model import GPTRewardModel


@dataclass(frozen=True)
class HeadRequest:
    """What the head is to compute for a micro-batch. Travels through GPTModel.forward as its `labels`."""

    micro_batch: MicroBatch
    temperature: float
    chunk_size: int
    choices: tuple[int, ...] | None = None


@dataclass(frozen=True)
class NextTokenRequest:
    """Asks the head for the logits of the token behind the last one; travels as `HeadRequest` does.

    Attributes:
        everywhere: for those behind every token.
    """

    everywhere: bool = False


class _SumOverSlices(torch.autograd.Function):
    """Sums disjoint context-parallel parts; each rank's gradient is its own part, because every rank computes the same loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        # all_reduce works in place, and x belongs to the graph
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]  (as above)
        return grad, None


class _ResponseAligned:
    """Puts per-token results where the loss expects them; mixed into Megatron's models."""

    config: TransformerConfig

    def _to_response(self, values: Tensor, micro_batch: MicroBatch) -> Tensor:
        """[k, n] values of this rank's predicted tokens -> [k, rows, width] of the whole micro-batch."""
        flat = values.new_zeros(values.size(0), micro_batch.rows * micro_batch.width)
        flat = flat.index_copy(1, micro_batch.slots, values)
        if self.config.context_parallel_size > 1:
            flat = _SumOverSlices.apply(flat, parallel_state.get_context_parallel_group())
        return flat.view(-1, micro_batch.rows, micro_batch.width)


class PolicyModel(_ResponseAligned, GPTModel):
    """GPTModel whose last stage returns log-probs and entropies instead of logits.

    `forward(input_ids, position_ids, None, labels=HeadRequest(...), packed_seq_params=...)` returns, on the last stage,
    [2, rows, width] float32: log-prob and entropy of each predicted token, 0 on padding; if the request names choices (token
    ids), [len(choices), rows, width]: their logits. With `labels=NextTokenRequest()` it returns this rank's part of the logits
    behind the last token of each row, [rows, part of the vocabulary], or behind every token, [tokens * rows, ...]. Other stages
    return hidden states as GPTModel does.

    Attributes:
        true_vocab_size: rows of the vocabulary that are real; the rest is padding and gets no probability.
        final_logit_softcapping: cap of the logits, None for none.
    """

    true_vocab_size: int
    final_logit_softcapping: float | None = None

    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: HeadRequest | NextTokenRequest,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if not self.post_process:
            return hidden_states
        if isinstance(labels, NextTokenRequest):
            tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
            logits = self.output_layer(hidden_states if labels.everywhere else hidden_states[-1:], weight=tied)[0]
            return logits.flatten(0, 1)
        micro_batch, group = labels.micro_batch, self.pg_collection.tp
        # either sums the gradient over the ranks: each has that of its part of the vocabulary
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        # prompts and padding never reach the vocabulary product
        hidden = hidden.reshape(-1, hidden.size(-1)).index_select(0, micro_batch.hidden_index)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert weight is not None  # the last stage holds it
        if labels.choices is not None:
            logits = choice_logits(
                hidden,
                weight,
                labels.choices,
                temperature=labels.temperature,
                softcap=self.final_logit_softcapping,
                group=group,
            )
            return self._to_response(logits, micro_batch)
        # padding ends the whole vocabulary, so it lies on the last rank, or on several
        end = weight.size(0) * (group.rank() + 1)
        results = vocab_log_probs(
            hidden,
            weight,
            micro_batch.labels,
            temperature=labels.temperature,
            chunk_size=labels.chunk_size,
            padding=min(max(end - self.true_vocab_size, 0), weight.size(0)),
            softcap=self.final_logit_softcapping,
            group=group,
        )
        return self._to_response(torch.stack(results), micro_batch)


class ValueModel(_ResponseAligned, GPTRewardModel):
    """GPTRewardModel whose last stage returns [1, rows, width] float32: the value before each predicted token."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        micro_batch = kwargs["labels"].micro_batch  # of a HeadRequest; GPTModel names every argument
        values = self.rm_head(hidden_states).flatten().float()
        return self._to_response(values.index_select(0, micro_batch.hidden_index)[None], micro_batch)
