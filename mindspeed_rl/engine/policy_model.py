"""Megatron's GPTModel with a head that returns log-probs (or values) of the predicted tokens instead of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.batching import MicroBatch
from mindspeed_rl.engine.head_outputs import HeadOutputs, HeadPass
from mindspeed_rl.engine.part import EnginePart
from mindspeed_rl.engine.vision import DecoderInputs
from mindspeed_rl.engine.vocab import VocabHead
from mindspeed_rl.models.reward_model import GPTRewardModel


@dataclass(frozen=True)
class HeadRequest:
    """Request to the head for a micro-batch. It travels through GPTModel.forward as its `labels`.

    Attributes:
        chunk_size, vocab_chunk_size: see `VocabHead`.
        outputs: what is computed.
        parts: parts of the engine that add to the hidden states first.
    """

    micro_batch: MicroBatch
    temperature: float
    chunk_size: int
    vocab_chunk_size: int | None = None
    outputs: HeadOutputs = HeadOutputs()
    parts: Sequence[EnginePart] = ()


@dataclass(frozen=True)
class NextTokenRequest:
    """Request to the head for the logits of the token after the last one; travels as `HeadRequest` does.

    Attributes:
        everywhere: for the logits after every token.
    """

    everywhere: bool = False


class _Aligned(torch.autograd.Function):
    """Scatter of token values to their slots, with the disjoint context-parallel parts summed.

    Each rank has the gradient of its own part, because every rank computes the same loss. Values that the loss does not use
    have no gradient.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        ctx: Any, slots: Tensor, rows: int, width: int, group: dist.ProcessGroup | None, *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(slots)
        flat = values[0].new_zeros(len(values), rows * width).index_copy_(1, slots, torch.stack(values))
        if group is not None:
            dist.all_reduce(flat, group=group)
        return tuple(flat.view(-1, rows, width))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        return None, None, None, None, *(None if grad is None else grad.flatten().index_select(0, slots) for grad in grads)


def align_values(values: Sequence[Tensor], micro_batch: MicroBatch, group: dist.ProcessGroup | None) -> tuple[Tensor, ...]:
    """Return [rows, width] of the full micro-batch for each [n] values of this rank's predicted tokens.

    Args:
        group: ranks that have the other tokens of the micro-batch; None where this rank has all.
    """
    return _Aligned.apply(micro_batch.slots, micro_batch.rows, micro_batch.width, group, *values)


class _ResponseAligned(GPTModel):
    """Megatron's model with images among its tokens, and per-token results where the loss expects them.

    Attributes:
        inputs: what the decoder reads; `build.build_model` gives a model that sees images another one.
    """

    config: TransformerConfig
    inputs: DecoderInputs = DecoderInputs()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Any,
        decoder_input: Any = None,
        labels: Any = None,
        *args: Any,
        packed_seq_params: Any = None,
        **named: Any,
    ) -> Any:
        """Run GPTModel, with the features of images in place of their tokens' embeddings."""
        images = labels.micro_batch.images if isinstance(labels, HeadRequest) else None
        # Megatron declares the second and the third as if they were never None
        prepared: tuple[Tensor, Any, Any] = self.inputs.prepare(
            self, input_ids, position_ids, decoder_input, packed_seq_params, images
        )
        position_ids, decoder_input, layout = prepared
        output = super().forward(
            input_ids, position_ids, attention_mask, decoder_input, labels, *args, packed_seq_params=layout, **named
        )
        if not self.post_process:
            output = self.inputs.send(output)
        self.inputs.release(layout)
        return output

    def _to_response(self, values: Sequence[Tensor], micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """Return [rows, width] of the full micro-batch for each [n] values of this rank's predicted tokens."""
        context = parallel.find_context(self.config.context_parallel_size, micro_batch.packed)
        return align_values(values, micro_batch, context.group)


class PolicyModel(_ResponseAligned):
    """GPTModel whose last stage returns log-probs and entropies instead of logits.

    `forward(input_ids, position_ids, None, labels=HeadRequest(...), packed_seq_params=...)` returns, on the last stage, the
    results of `HeadRequest.outputs`, [rows, width] float32 each unless they say otherwise, 0 on padding.
    With `labels=NextTokenRequest()` it returns this rank's part of the logits after the last token of each row, [rows, part of
    the vocabulary], or after every token, [tokens * rows, ...]. Other stages return hidden states as GPTModel does.

    Attributes:
        true_vocab_size: rows of the vocabulary that are real; the rest is padding and gets no probability.
        final_logit_softcapping: cap of the logits, None for none.
        fp32_lm_head: log-probs are computed from logits in float32, whatever the format of the weights.
        adds_to_main_grad: the head's gradient goes into Megatron's buffer at once; see `VocabHead`.
    """

    true_vocab_size: int
    final_logit_softcapping: float | None = None
    fp32_lm_head: bool = False
    adds_to_main_grad: bool = False

    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: HeadRequest | NextTokenRequest,
        *args: object,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, ...]:
        if not self.post_process:
            return hidden_states
        if isinstance(labels, NextTokenRequest):
            tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
            logits = self.output_layer(hidden_states if labels.everywhere else hidden_states[-1:], weight=tied)[0]
            return logits.flatten(0, 1)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert weight is not None  # the last stage has it
        # padding is at the end of the full vocabulary, so on the last rank, or on several
        end = weight.size(0) * (self.pg_collection.tp.rank() + 1)
        head = HeadPass(
            labels.micro_batch,
            weight,
            VocabHead(
                labels.temperature,
                labels.chunk_size,
                padding=min(max(end - self.true_vocab_size, 0), weight.size(0)),
                softcap=self.final_logit_softcapping,
                in_float32=self.fp32_lm_head,
                group=self.pg_collection.tp,
                vocab_chunk_size=labels.vocab_chunk_size,
                adds_to_main_grad=self.adds_to_main_grad,
            ),
            select=self._select_hidden,
            align=lambda values: self._to_response(values, labels.micro_batch),
            position_ids=position_ids,
            inputs=kwargs,
        )
        for part in labels.parts:
            hidden_states = part.attach(head, hidden_states)
        return labels.outputs.compute(head, self._select_hidden(hidden_states, labels.micro_batch.hidden_index))

    def _select_hidden(self, hidden_states: Tensor, index: Tensor) -> Tensor:
        """Return [n, h]: the hidden states that reach the vocabulary product, to which prompts and padding do not belong."""
        # either sums the gradient over the ranks, each of which has it for its part of the vocabulary
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states, group=self.pg_collection.tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states, group=self.pg_collection.tp)
        return hidden.reshape(-1, hidden.size(-1)).index_select(0, index)


class ValueModel(_ResponseAligned, GPTRewardModel):
    """GPTRewardModel whose last stage returns one [rows, width] float32: the value before each predicted token."""

    def _postprocess(self, hidden_states: Tensor, *args: object, **kwargs: Any) -> Any:
        if not self.post_process:
            return hidden_states
        micro_batch = kwargs["labels"].micro_batch  # of a HeadRequest; GPTModel names every argument
        values = self.rm_head(hidden_states).flatten().float()
        return self._to_response([values.index_select(0, micro_batch.hidden_index)], micro_batch)
