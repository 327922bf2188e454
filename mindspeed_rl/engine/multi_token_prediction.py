"""Training of multi-token-prediction layers: Megatron's block after the decoder, its targets, its loss.

Layer k (from 0) combines the hidden state of token i with the embedding of token i + k + 1 and predicts token i + k + 2
(DeepSeek-V3, arXiv:2412.19437). To the loss of the model, which is (sum of the model's loss) / C, it adds

    lambda / D * sum over layers k of  (sum over trained tokens t of -log p_k(t)) / T

D: layers (`mtp_num_layers`). lambda: `mtp_loss_scaling_factor`. T: trained tokens of the optimizer step, over all micro-batches
and data-parallel ranks; one without k + 2 tokens before it in its sequence has no p_k and adds 0. This is Megatron's loss where
C counts tokens, as in supervised stages; where C counts sequences, a token has the same weight all the same.

Megatron shifts tokens and labels on the device. Here they are shifted on the host, before a context-parallel rank takes its
slice: nothing is exchanged, and no shift crosses the end of a sequence of a pack. Forward passes for log-probs do not run these
layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn

from mindspeed_rl.algorithms.interfaces import PendingMetrics
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.batching import MicroBatch
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.head_outputs import HeadPass
from mindspeed_rl.engine.part import EnginePart
from mindspeed_rl.engine.vision import LaterTokens, list_later_tokens
from mindspeed_rl.engine.vocab import compute_vocab_log_probs
from mindspeed_rl.observability.metrics import Metric

#: name of the decoder layer inside: `transformer_layer` in megatron-core 0.16, `mtp_model_layer` in later releases
_INNER = next(field.name for field in dataclasses.fields(MultiTokenPredictionLayerSubmodules) if field.name.endswith("_layer"))


class _PredictionLayer(MultiTokenPredictionLayer):
    """Megatron's layer with tokens that are shifted already: its `input_ids` are those of this layer and of all after it.

    The decoder layer inside has the name `transformer_layer` in every release, as it has in all their checkpoints.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if _INNER != "transformer_layer":
            self.transformer_layer = self._modules.pop(_INNER)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("transformer_layer" if name == _INNER and name not in self._modules else name)

    def forward(  # pyrefly: ignore[bad-override]  (the tokens of several layers)
        self,
        input_ids: Sequence[LaterTokens],
        position_ids: Tensor,
        hidden_states: Tensor,
        *,
        embedding: Callable[..., Tensor],
        **others: Any,
    ) -> tuple[Any, ...]:
        """Return hidden states, the tokens of the layers after this one, and what else the release's block passes on."""
        decoder_input = embedding(input_ids=input_ids[0], position_ids=position_ids)
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        if not hidden_states.requires_grad:  # detached: a recomputed layer needs an input with a gradient
            hidden_states.requires_grad_(True)

        def compute(hidden: Tensor, embedded: Tensor) -> Tensor:
            return self._proj_and_transformer_layer(hidden_states=hidden, decoder_input=embedded, **others)

        if self.config.recompute_granularity == "full" and self.training:
            # Megatron's own recomputation takes no layout of packed sequences in release 0.16
            distributes = self.config.distribute_saved_activations
            hidden_states = tensor_parallel.checkpoint(compute, distributes, hidden_states, decoder_input)
        else:
            hidden_states = compute(hidden_states, decoder_input)
        masks = (others["padding_mask"],) if "padding_mask" in others else ()  # from release 0.18 on
        return hidden_states, input_ids[1:], position_ids, *masks


def build_prediction_spec(
    inner: TransformerBlockSubmodules, norm: type[nn.Module], num_layers: int
) -> MultiTokenPredictionBlockSubmodules:
    """Return the spec of the block of prediction layers, each of which has the one decoder layer of `inner`."""
    assert inner.layer_specs is not None
    (layer,) = inner.layer_specs
    inner_layer: dict[str, Any] = {_INNER: layer}
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=ColumnParallelLinear, **inner_layer
    )
    return MultiTokenPredictionBlockSubmodules([ModuleSpec(module=_PredictionLayer, submodules=parts)] * num_layers)


class PredictionLosses(EnginePart):
    """Loss of the prediction layers in training, on one rank."""

    def __init__(self, model: BuiltModel, scaling_factor: float, *, detaches: bool) -> None:
        """Set the weight of a layer.

        Args:
            scaling_factor: weight of the loss.
            detaches: no gradient of this loss reaches the model's own weights.
        """
        # the layers are in the last chunk, on the last stage
        self._model: Any = model.models[-1]
        self._weight, self._detaches = scaling_factor / model.plan.model_config.mtp_num_layers, detaches
        self._ratio = torch.zeros(())
        self._sums = torch.zeros(2)

    @classmethod
    def build(cls, config: MegatronConfig, model: BuiltModel) -> PredictionLosses | None:
        """Build them for a model that trains with prediction layers."""
        if not model.ddp_chunks or not model.plan.model_config.mtp_num_layers:
            return None
        return cls(model, config.mtp_loss_scaling_factor, detaches=bool(config.mtp_detach_heads))

    def start_step(self, micro_batches: Sequence[MicroBatch], count: Callable[[], Tensor]) -> None:
        """Find the weight of a token in this optimizer step; collective over the data-parallel ranks."""
        counted = count()
        trained = sum(
            (self._trained(micro_batch).sum() for micro_batch in micro_batches if not micro_batch.is_filler),
            torch.zeros_like(counted),
        )
        totals = torch.stack([counted, trained])
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        self._ratio = totals[0] / totals[1].clamp(min=1)
        self._sums = torch.zeros(2, device=counted.device)

    @staticmethod
    def _trained(micro_batch: MicroBatch) -> Tensor:
        """Return [rows, width] bool: the tokens that train."""
        mask = micro_batch.columns.get("loss_mask")
        return micro_batch.predicted_mask if mask is None else micro_batch.predicted_mask & mask.bool()

    def attach(self, head: HeadPass, hidden_states: Tensor) -> Tensor:
        """Run the layers; return the model's hidden states with the loss in their graph.

        The loss has the gradient of its sum.
        """
        micro_batch, model = head.micro_batch, self._model
        names = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")

        def embed(input_ids: LaterTokens, position_ids: Tensor) -> Tensor:
            embedded = model.inputs.embed_later(model, input_ids, position_ids)
            return embedded.detach() if self._detaches else embedded

        output = model.mtp(
            input_ids=list_later_tokens([targets.input_ids for targets in micro_batch.predictions], micro_batch.images),
            position_ids=head.position_ids,
            hidden_states=hidden_states.detach() if self._detaches else hidden_states,
            embedding=embed,
            **{name: head.inputs[name] for name in names},
        )
        vocab = dataclasses.replace(head.vocab, temperature=1.0)
        weight = head.weight.detach() if self._detaches else head.weight
        trained = self._trained(micro_batch).flatten()
        # Megatron returns all hidden states in one tensor, the model's first
        predicted = output.chunk(1 + len(micro_batch.predictions))[1:]
        for hidden, targets in zip(predicted, micro_batch.predictions, strict=True):
            is_trained = trained.index_select(0, targets.slots)
            log_probs = compute_vocab_log_probs(head.select(hidden, targets.hidden_index), weight, targets.labels, vocab)[0]
            loss = -torch.where(is_trained, log_probs, 0.0).sum()
            if not micro_batch.is_filler:
                self._sums += torch.stack([loss.detach(), is_trained.sum().float()])
            factor = 0.0 if micro_batch.is_filler else self._weight * self._ratio
            hidden_states = MTPLossAutoScaler.apply(hidden_states, factor * loss)
        return hidden_states

    def metrics(self) -> Mapping[str, Metric]:
        """Return the mean loss of a target over the layers since `start_step`, not read yet; none on other stages.

        Collective over the context-parallel ranks.
        """
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return {}
        if parallel_state.get_context_parallel_world_size() > 1:
            dist.all_reduce(self._sums, group=parallel_state.get_context_parallel_group())
        return PendingMetrics({"mtp_loss": ("mean", (self._sums[0], self._sums[1]))})
