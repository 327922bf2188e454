"""Megatron's GPTModel with a head that returns log-probs (or values) of the predicted tokens instead of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed_rl.engine.batching import MicroBatch
from mindspeed_rl.engine.multi_token_prediction import PredictionLosses
from mindspeed_rl.engine.sequence_layout import PaddedLayout, PredictionTargets
from mindspeed_rl.engine.vision import AttachFeatures, VisionEncoder
from mindspeed_rl.engine.vocab import compute_squared_probs, compute_top_log_probs, compute_vocab_log_probs
from mindspeed_rl.models.model_config import VisionConfig
from mindspeed_rl.models.reward_model import GPTRewardModel


@dataclass(frozen=True)
class HeadRequest:
    """Request to the head for a micro-batch. It travels through GPTModel.forward as its `labels`.

    Attributes:
        choices: token ids whose logits are the only results.
        top_k: the results are log-probs and ids of so many most probable tokens; 0 for those of the predicted tokens.
        divergence: (log-probs at the column teacher_ids, column teacher_log_probs), [n, k] each -> results [n] that are
            added for rows with these columns; None where no teacher's tokens are compared.
        squares: sums of squared probabilities are a third result.
        predictions: the loss of the multi-token-prediction layers is added; None where they are not run.
    """

    micro_batch: MicroBatch
    temperature: float
    chunk_size: int
    choices: tuple[int, ...] | None = None
    top_k: int = 0
    divergence: Callable[[Tensor, Tensor], tuple[Tensor, ...]] | None = None
    squares: bool = False
    predictions: PredictionLosses | None = None


@dataclass(frozen=True)
class NextTokenRequest:
    """Request to the head for the logits of the token after the last one; travels as `HeadRequest` does.

    Attributes:
        everywhere: for the logits after every token.
    """

    everywhere: bool = False


class _Aligned(torch.autograd.Function):
    """Scatter of token values to their slots, with the disjoint context-parallel parts summed.

    Each rank's gradient is that of its own part, because every rank computes the same loss. Values that the loss does not use
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


class _ResponseAligned(GPTModel):
    """Megatron's model with images among its tokens, and per-token results where the loss expects them.

    Attributes:
        vision: of a model that sees images; None for others.
        encoder: its tower, on the first stage.
    """

    config: TransformerConfig
    vision: VisionConfig | None = None
    encoder: VisionEncoder | None = None

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
        if self.vision is not None and position_ids.dim() == 2:
            position_ids = position_ids.expand(3, *position_ids.shape)
        if self.encoder is not None:
            images = labels.micro_batch.images if isinstance(labels, HeadRequest) else None
            embeddings = self.embedding(input_ids=input_ids, position_ids=position_ids)
            decoder_input, added = self.encoder.embed(embeddings, images)
            if self.config.sequence_parallel:
                group = self.pg_collection.tp
                decoder_input = scatter_to_sequence_parallel_region(decoder_input, group=group)
                if added is not None:
                    length = decoder_input.size(0) * decoder_input.size(1)
                    # a rank adds its slice, and the tower of each needs the gradients of all
                    added.levels = [copy_to_tensor_model_parallel_region(level, group=group) for level in added.levels]
                    added.select_slice(group.rank() * length, length)
            if added is not None:
                packed_seq_params = PaddedLayout() if packed_seq_params is None else packed_seq_params
                decoder_input = AttachFeatures.apply(added, decoder_input, *added.levels)
            if packed_seq_params is not None:
                packed_seq_params.added = added
        output = super().forward(
            input_ids,
            position_ids,
            attention_mask,
            decoder_input,
            labels,
            *args,
            packed_seq_params=packed_seq_params,
            **named,
        )
        if self.encoder is not None and packed_seq_params is not None and not torch.is_grad_enabled():
            packed_seq_params.added = None  # no layer is computed again
        return output

    def _to_response(self, values: Sequence[Tensor], micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """Return [rows, width] of the full micro-batch for each [n] values of this rank's predicted tokens."""
        group = parallel_state.get_context_parallel_group() if self.config.context_parallel_size > 1 else None
        return _Aligned.apply(micro_batch.slots, micro_batch.rows, micro_batch.width, group, *values)


def _compute_choice_logits(
    hidden: Tensor,
    weight: Tensor,
    choices: Sequence[int],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    in_float32: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute [len(choices), n] float32 logits of a few tokens, equal on all ranks of the group; collective over it.

    Arguments and the gradient of `hidden` as in `compute_vocab_log_probs`.
    """
    vocab = weight.size(0)
    local = torch.tensor(choices, device=weight.device) - vocab * (group.rank() if group is not None else 0)
    mine = (local >= 0) & (local < vocab)
    # a rank without the token adds 0
    rows = weight.index_select(0, local.clamp(0, vocab - 1))
    logits = (hidden.float() @ rows.float().t() if in_float32 else (hidden @ rows.t()).float()) * mine
    if group is not None and group.size() > 1:
        logits = reduce_from_tensor_model_parallel_region(logits, group=group)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits / temperature).t()


class PolicyModel(_ResponseAligned):
    """GPTModel whose last stage returns log-probs and entropies instead of logits.

    `forward(input_ids, position_ids, None, labels=HeadRequest(...), packed_seq_params=...)` returns, on the last stage,
    log-prob and entropy of each predicted token, [rows, width] float32 each, 0 on padding, and what a divergence adds; if the
    request names choices (token ids), one [rows, width] for each: its logits; with top_k [rows, width, k] log-probs and ids.
    With `labels=NextTokenRequest()` it returns this rank's part of the logits after the last token of each row, [rows, part of
    the vocabulary], or after every token, [tokens * rows, ...]. Other stages return hidden states as GPTModel does.

    Attributes:
        true_vocab_size: rows of the vocabulary that are real; the rest is padding and gets no probability.
        final_logit_softcapping: cap of the logits, None for none.
        fp32_lm_head: log-probs are those of logits in float32, whatever the format of the weights.
    """

    true_vocab_size: int
    final_logit_softcapping: float | None = None
    fp32_lm_head: bool = False

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
        micro_batch, group = labels.micro_batch, self.pg_collection.tp
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert weight is not None  # the last stage has it
        if labels.predictions is not None:
            hidden_states = self._add_prediction_losses(hidden_states, position_ids, weight, labels, labels.predictions, kwargs)
        hidden = self._select_hidden(hidden_states, micro_batch.hidden_index)
        if labels.choices is not None:
            logits = _compute_choice_logits(
                hidden,
                weight,
                labels.choices,
                temperature=labels.temperature,
                softcap=self.final_logit_softcapping,
                in_float32=self.fp32_lm_head,
                group=group,
            )
            return self._to_response(logits.unbind(0), micro_batch)
        head = self._describe_head(weight, labels)
        if labels.top_k:
            log_probs, ids = compute_top_log_probs(hidden, weight, labels.top_k, **head)
            # ids are exact in float32 up to 2**24, more than any vocabulary has
            values = self._to_response([*log_probs.unbind(1), *ids.float().unbind(1)], micro_batch)
            return torch.stack(values[: labels.top_k], -1), torch.stack(values[labels.top_k :], -1)
        if labels.divergence is None or "teacher_ids" not in micro_batch.columns:
            added = (compute_squared_probs(hidden, weight, **head),) if labels.squares else ()
            results = compute_vocab_log_probs(hidden, weight, micro_batch.labels, **head)
            return self._to_response([*results, *added], micro_batch)
        # [rows, width, k] -> those of this rank's predicted tokens
        ids, teacher = (
            micro_batch.columns[name].flatten(0, 1).index_select(0, micro_batch.slots)
            for name in ("teacher_ids", "teacher_log_probs")
        )
        judged = {"others": ids, "teacher": teacher, "divergence": labels.divergence}
        results = compute_vocab_log_probs(hidden, weight, micro_batch.labels, **head, **judged)
        return self._to_response([*results], micro_batch)

    def _select_hidden(self, hidden_states: Tensor, index: Tensor) -> Tensor:
        """Return [n, h]: the hidden states that reach the vocabulary product, to which prompts and padding do not belong."""
        # either sums the gradient over the ranks, each of which has that of its part of the vocabulary
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states, group=self.pg_collection.tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states, group=self.pg_collection.tp)
        return hidden.reshape(-1, hidden.size(-1)).index_select(0, index)

    def _describe_head(self, weight: Tensor, request: HeadRequest) -> dict[str, Any]:
        """Return the arguments of the functions of `engine/vocab.py`."""
        # padding is at the end of the full vocabulary, so on the last rank, or on several
        end = weight.size(0) * (self.pg_collection.tp.rank() + 1)
        return {
            "temperature": request.temperature,
            "chunk_size": request.chunk_size,
            "padding": min(max(end - self.true_vocab_size, 0), weight.size(0)),
            "softcap": self.final_logit_softcapping,
            "in_float32": self.fp32_lm_head,
            "group": self.pg_collection.tp,
        }

    def _add_prediction_losses(
        self,
        hidden_states: Tensor,
        position_ids: Tensor,
        weight: Tensor,
        request: HeadRequest,
        losses: PredictionLosses,
        inputs: dict[str, Any],
    ) -> Tensor:
        """Run the multi-token-prediction layers; return the hidden states with their losses attached."""
        micro_batch, detaches = request.micro_batch, losses.detaches
        names = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
        output = self.mtp(
            input_ids=[targets.input_ids for targets in micro_batch.predictions],
            position_ids=position_ids,
            hidden_states=hidden_states.detach() if detaches else hidden_states,
            embedding=(lambda **named: self.embedding(**named).detach()) if detaches else self.embedding,
            **{name: inputs[name] for name in names},
        )
        head: dict[str, Any] = {**self._describe_head(weight, request), "temperature": 1.0}
        vocabulary = weight.detach() if detaches else weight

        def compute_log_probs(hidden: Tensor, targets: PredictionTargets) -> Tensor:
            selected = self._select_hidden(hidden, targets.hidden_index)
            return compute_vocab_log_probs(selected, vocabulary, targets.labels, **head)[0]

        # Megatron returns all hidden states in one tensor, the model's first
        predicted = output.chunk(1 + len(micro_batch.predictions))[1:]
        return losses.attach(hidden_states, predicted, micro_batch, compute_log_probs)


class ValueModel(_ResponseAligned, GPTRewardModel):
    """GPTRewardModel whose last stage returns one [rows, width] float32: the value before each predicted token."""

    def _postprocess(self, hidden_states: Tensor, *args: object, **kwargs: Any) -> Any:
        if not self.post_process:
            return hidden_states
        micro_batch = kwargs["labels"].micro_batch  # of a HeadRequest; GPTModel names every argument
        values = self.rm_head(hidden_states).flatten().float()
        return self._to_response([values.index_select(0, micro_batch.hidden_index)], micro_batch)
