"""Sparse latent attention (DeepSeek-V3.2, arXiv:2512.02556): each query attends to the tokens that an indexer scores highest.

The score of token s for query t, of the indexer's heads h, all of which share the key of a token, is

    I_ts = sum_h w_th relu(q_th . k_s)

q comes from the query's low-rank form, k and w from the input of the layer. Scores are inside a sequence and causal. Of equal
ones earlier tokens are chosen first, so that the choice does not depend on what else is in a micro-batch. DeepSeek's
inference code turns q and k by a Hadamard matrix before it quantizes them: products, and so scores, are the same without it.

The choice has no gradient: the loss of the model does not reach the indexer. By default its weights are frozen. With
`dsa_indexer_loss_coeff` they follow a divergence of their own, see `IndexerLosses`; the indexer's inputs get no gradient.

Scores and weights of a few queries exist at a time, in backward too, which computes them again: memory is linear in the tokens.
Where no sequence is longer than the number of chosen tokens, attention is the causal one of `CoreAttention`. With context
parallelism ranks exchange tokens for heads, and gather what the indexer makes of their tokens.

Layers of GLM-5.2 without an indexer take the features of the one before them (arXiv:2603.12201) and score again: what a layer
passes on is as large as the chosen tokens would be.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding, apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mindspeed_rl import adaptors, platform
from mindspeed_rl.algorithms.interfaces import PendingMetrics
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.attention import CoreAttention, heads_to_sequence
from mindspeed_rl.engine.batching import MicroBatch
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.part import EnginePart
from mindspeed_rl.engine.pass_arguments import PassArguments
from mindspeed_rl.engine.sequence_layout import PackedLayout
from mindspeed_rl.models.builder import IndexerOutput
from mindspeed_rl.models.model_config import SparseAttention

#: elements of a matrix of scores, of all heads, that exists at a time
_SCORES = 1 << 25


@dataclass(frozen=True)
class IndexFeatures:
    """Output of the indexer for tokens [..., tokens].

    Attributes:
        queries: [..., s, h, d].
        keys: [..., t, d].
        weights: [..., s, h] of the heads, with the scale of their products, in float32 at least.
    """

    queries: Tensor
    keys: Tensor
    weights: Tensor

    def list_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three, in their order."""
        return self.queries, self.keys, self.weights

    def score(self) -> Tensor:
        """Return [r, s, t] scores of every token for every query, from [r, ...] features, in the type of the weights."""
        r, s, h, _ = self.queries.shape
        products = self.queries.flatten(1, 2).to(self.weights) @ self.keys.to(self.weights).transpose(1, 2)
        return (self.weights.unsqueeze(2) @ functional.relu(products).view(r, s, h, -1)).squeeze(2)


def select_keys(scores: Tensor, topk: int) -> Tensor:
    """Return [..., t] bool: True for the `topk` highest finite scores of each row, the first ones among equals."""
    is_visible = scores > float("-inf")
    if scores.size(-1) <= topk:
        return is_visible
    last = scores.topk(topk, dim=-1).values[..., -1:]
    above, equal = scores > last, scores == last
    room = topk - above.sum(-1, keepdim=True)
    return (above | equal & (equal.cumsum(-1) <= room)) & is_visible


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: tuple[Tensor, Tensor, Tensor],
    topk: int,
    scale: float,
    groups: Sequence[dist.ProcessGroup] | None,
) -> tuple[Tensor, Tensor]:
    """Return the attention of the last s of t tokens [r, s, n, d_v] and divergences [r, s], 0 without `groups`."""
    scores = IndexFeatures(*features).score()
    s, t = scores.shape[1:]
    future = torch.ones(s, t, dtype=torch.bool, device=scores.device).triu(t - s + 1)
    scores = scores.masked_fill(future, float("-inf"))
    is_chosen = select_keys(scores.detach(), topk)
    logits = (query.transpose(1, 2) @ key.permute(0, 2, 3, 1)).to(scores) * scale
    weights = logits.masked_fill(~is_chosen.unsqueeze(1), float("-inf")).softmax(-1)
    out = (weights.to(value.dtype) @ value.transpose(1, 2)).transpose(1, 2)
    if groups is None:
        return out, scores.new_zeros(scores.shape[:2])
    target = weights.detach().sum(1)
    for group in groups:  # of ranks with other heads
        dist.all_reduce(target, group=group)
    target = target / target.sum(-1, keepdim=True)
    log_chosen = scores.masked_fill(~is_chosen, float("-inf")).log_softmax(-1).masked_fill(~is_chosen, 0.0)
    return out, (torch.xlogy(target, target) - target * log_chosen).sum(-1)


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    features: IndexFeatures,
    topk: int,
    scale: float,
    groups: Sequence[dist.ProcessGroup] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of rows of tokens to the `topk` tokens with the highest scores.

    Args:
        query, key, value: [r, s, n, d], [r, t, n, d], [r, t, n, d_v]; queries belong to the last s of t tokens.
        features: features of the same tokens.
        groups: the ranks that have other heads, in turn; the second result is the divergence of `IndexerLosses` then.
            Collective over them, in backward too.

    Returns:
        [r, s, n, d_v] and [r, s], zeros without `groups`.
    """
    (r, s, n, _), t = query.shape, key.size(1)
    step = max(1, _SCORES // (r * t * max(n, features.queries.size(2))))
    outputs = []
    for first in range(0, s, step):
        mine, seen = slice(first, min(first + step, s)), t - s + min(first + step, s)
        index = (features.queries[:, mine], features.keys[:, :seen], features.weights[:, mine])
        inputs = (query[:, mine], key[:, :seen], value[:, :seen], index, topk, scale, groups)
        if torch.is_grad_enabled():
            outputs.append(checkpoint(_attend, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(_attend(*inputs))
    attended, divergences = zip(*outputs)
    return torch.cat(attended, dim=1), torch.cat(divergences, dim=1)


# ---------------------------------------------------------------- the modules


def _gather(x: Tensor, order: PackedLayout, group: dist.ProcessGroup) -> Tensor:
    """Return the tokens of all context-parallel ranks, [tokens, ...] in natural order, of a rank's slice."""
    return order.order_naturally(gather_from_sequence_parallel_region(x, False, group))


class _Indexer(nn.Module):
    """Projections of the indexer, under Megatron's names; each tensor parallel rank has all heads.

    With sequence parallelism a rank projects its slice of the tokens, so gradients are summed over the ranks.
    """

    def __init__(self, config: MLATransformerConfig, shape: SparseAttention) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        assert config.q_lora_rank is not None
        dtype, rows = config.params_dtype, shape.n_heads * shape.head_dim
        self.linear_wq_b = nn.Linear(config.q_lora_rank, rows, bias=False, dtype=dtype)
        self.linear_wk = nn.Linear(config.hidden_size, shape.head_dim, bias=False, dtype=dtype)
        self.k_norm = nn.LayerNorm(shape.head_dim, eps=1e-6, dtype=dtype)
        self.linear_weights_proj = nn.Linear(config.hidden_size, shape.n_heads, bias=False, dtype=dtype)
        for linear in (self.linear_wq_b, self.linear_wk, self.linear_weights_proj):
            assert config.init_method is not None  # Megatron derives it where it is not given
            config.init_method(linear.weight)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # pyrefly: ignore[missing-attribute]  (Megatron's mark)
        # pairs of neighbours rotate in the rest of the layer; where halves do here, Megatron must not know of it
        self._rotation = copy.copy(config)
        self._rotation.multi_latent_attention = shape.interleaved
        common: dict[str, Any] = {
            "rotary_base": config.rotary_base, "cp_group": parallel_state.get_context_parallel_group()
        }  # fmt: skip
        self._rotary: Any  # its functions declare no type that may be None
        if config.rope_type == "yarn":
            self._rotary = YarnRotaryEmbedding(
                config.qk_pos_emb_head_dim,
                scaling_factor=config.rotary_scaling_factor,
                original_max_position_embeddings=config.original_max_position_embeddings,
                beta_fast=config.beta_fast,
                beta_slow=config.beta_slow,
                mscale=config.mscale,
                mscale_all_dim=config.mscale_all_dim,
                **common,
            )
        else:
            self._rotary = RotaryEmbedding(config.qk_pos_emb_head_dim, 1.0, **common)

    def forward(self, hidden: Tensor, query: Tensor, layout: PackedLayout | None) -> IndexFeatures:
        """Return the features [s, b, ...] of a context-parallel rank's tokens.

        Args:
            hidden: [s, b, h], input of the layer.
            query: [s, b, rank] or [s, rank], the normalized low-rank form of the query.
        """
        queries, keys = self.linear_wq_b(query.reshape(*hidden.shape[:2], -1)), self.k_norm(self.linear_wk(hidden))
        # the sum over heads is in float32, so its weights are
        weights = functional.linear(hidden.float(), self.linear_weights_proj.weight.float())
        length = self._rotary.get_rotary_seq_len(None, None, hidden, self.config, layout)
        if self.config.sequence_parallel:
            # the rest of the layer is the same on each rank, so the gradient of a rank's slice is complete
            queries, keys, weights = (
                gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False) for x in (queries, keys, weights)
            )
        queries = self._rotate(queries.unflatten(-1, (self.shape.n_heads, -1)), length, layout)
        keys = self._rotate(keys.unsqueeze(2), length, layout).squeeze(2)
        return IndexFeatures(queries, keys, weights * (self.shape.n_heads * self.shape.head_dim) ** -0.5)

    def _rotate(self, x: Tensor, length: int, layout: PackedLayout | None) -> Tensor:
        """Return [s, b, heads, d] with its first dimensions rotated."""
        angles, factor = self._rotary(length, packed_seq=layout is not None), 1.0
        if isinstance(angles, tuple):
            angles, factor = angles
        turned, rest = x.split([self.config.qk_pos_emb_head_dim, x.size(-1) - self.config.qk_pos_emb_head_dim], dim=-1)
        group: Any = parallel_state.get_context_parallel_group()
        lengths = None if layout is None else layout.cu_seqlens_q_padded
        turned = apply_rotary_pos_emb(
            turned if lengths is None else turned.squeeze(1),
            angles,
            config=self._rotation,
            cu_seqlens=lengths,
            mscale=factor,
            cp_group=group,
        )
        turned = turned if lengths is None else turned.unsqueeze(1)
        return torch.cat([turned, rest], dim=-1)


class SparseCoreAttention(CoreAttention):
    """Core attention of latent attention with an indexer; Megatron calls it as its own `DSAttention`."""

    #: from megatron-core 0.19 on; earlier releases read the config
    requires_dsa_inputs = True

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        *,
        shape: SparseAttention,
        last_output: IndexerOutput,
        shares: bool,
        **arguments: Any,
    ) -> None:
        super().__init__(config, layer_number, **arguments)
        if self.dropout:
            raise ValueError(f"attention_dropout: {self.dropout} is not available with sparse attention; set it to 0.")
        self.ring = False
        self.topk, self.indexer = shape.topk, None if shares else _Indexer(config, shape)
        self._is_shared = bool(shape.shared_layers)
        if self.indexer is not None:
            self.indexer.requires_grad_(bool(config.dsa_indexer_loss_coeff))
        #: for passes without arguments of their own, and for passes with them
        self.last_output, self.outputs = last_output, PassArguments[IndexerOutput]()
        self.passes = PassArguments[_TokenWeights]()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        x: Tensor | None = None,
        qr: Tensor | None = None,
    ) -> Tensor:
        """Return [s, b, n * d_v] (dense) or [t, n, d_v] (packed), as `CoreAttention` does.

        Args:
            x: [s, b, h], input of the layer, a rank's slice with sequence parallelism.
            qr: the normalized low-rank form of the query, of the same tokens.
        """
        layout = packed_seq_params if isinstance(packed_seq_params, PackedLayout) else None
        group = parallel_state.get_context_parallel_group() if self.config.context_parallel_size > 1 else None
        ranks = 1 if group is None else group.size()
        longest, tokens = key.size(0) * ranks if layout is None else max(layout.lengths), self.passes.take()
        output = self.outputs.take_any() or self.last_output
        if longest <= self.topk and tokens is None:
            return super().forward(query, key, value, packed_seq_params=packed_seq_params)
        if key.size(0) > query.size(0) and layout is None:
            raise ValueError(f"sparse attention generates no more than {self.topk} tokens here, whose indexer has no cache.")
        weights = query.new_zeros(0) if tokens is None else tokens.values.view(query.size(0), -1)
        exchange = None
        if group is not None:
            exchange = (layout or PackedLayout.build([query.size(0) * ranks], query.device, ranks), group)
        if self.indexer is None:
            features = output.features
        else:
            assert x is not None and qr is not None
            with contextlib.nullcontext() if tokens is not None else torch.no_grad():
                features = self._gather_features(self.indexer(x.detach(), qr.detach(), layout), exchange, output)
        if layout is not None:
            query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        if exchange is not None:
            order, group = exchange
            query, key, value = map(order.order_naturally, self._split_heads(query, key, value, group))
            weights = _gather(weights, *exchange) if len(weights) else weights
        groups = None if tokens is None else self._list_groups()
        out, divergences = self._attend((query, key, value, *features.list_tensors()), layout, groups)
        if tokens is not None:
            out = MoEAuxLossAutoScaler.apply(out, tokens.add_up(divergences, weights))
        if exchange is not None:
            order, group = exchange
            out = heads_to_sequence(order.order_by_rank(out), group)
        return out.flatten(2) if layout is None else out.squeeze(1)

    def _gather_features(
        self, features: IndexFeatures, exchange: tuple[PackedLayout, dist.ProcessGroup] | None, output: IndexerOutput
    ) -> IndexFeatures:
        """Return the features of all context-parallel ranks, and keep them for later layers that have no indexer."""
        if exchange is not None:
            features = IndexFeatures(*(_gather(tensor, *exchange) for tensor in features.list_tensors()))
        if self._is_shared:
            output.features = features
        return features

    def _attend(
        self, tensors: Sequence[Tensor], layout: PackedLayout | None, groups: Sequence[dist.ProcessGroup] | None
    ) -> tuple[Tensor, Tensor]:
        """Return the attention of full sequences, [s, b, n, d_v], and the divergences [s, b], 0 without `groups`.

        Args:
            tensors: query, key, value and the features, [s, b, ...] each; b is 1 where they are packed.
        """
        if layout is not None:
            out, divergences = self._inside_rows([tensor.squeeze(1) for tensor in tensors], layout, groups)
            return out.unsqueeze(1), divergences.unsqueeze(1)
        query, key, value, *index = (tensor.transpose(0, 1) for tensor in tensors)
        out, divergences = sparse_attention(query, key, value, IndexFeatures(*index), self.topk, self.scale, groups)
        return out.transpose(0, 1), divergences.transpose(0, 1)

    def _list_groups(self) -> list[dist.ProcessGroup]:
        """Return the groups of ranks that have other heads of the same tokens."""
        # declared as if one could be missing
        groups: list[Any] = [parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()]
        return [group for group in groups if group.size() > 1]

    def _inside_rows(
        self, tensors: Sequence[Tensor], layout: PackedLayout, groups: Sequence[dist.ProcessGroup] | None
    ) -> tuple[Tensor, Tensor]:
        """Return the attention of packed sequences in natural order, [t, n, d_v], and the divergences [t], 0 without `groups`.

        Args:
            tensors: query, key, value and the features, [t, ...] each.
        """
        blocks: list[tuple[Tensor, Tensor]] = []
        for block in layout.view.groups:
            queries, keys = (block.gather, (block.rows, block.width)), (block.keys, (block.rows, block.key_width))
            query, key, value, *index = (
                tensor.index_select(0, gather).unflatten(0, shape)
                for tensor, (gather, shape) in zip(tensors, (queries, keys, keys, queries, keys, queries))
            )
            if block.key_width <= self.topk and groups is None:
                out = adaptors.causal_attention(query, key, value, self.scale)
                blocks.append((out, index[2].new_zeros(out.shape[:2])))
            else:
                blocks.append(sparse_attention(query, key, value, IndexFeatures(*index), self.topk, self.scale, groups))
        out, divergences = (torch.cat([block.flatten(0, 1) for block in part]) for part in zip(*blocks))
        return out.index_select(0, layout.view.restore), divergences.index_select(0, layout.view.restore)


class SharedIndexers(EnginePart):
    """Layers of this rank's model of which some attend to the tokens that the indexer of another one chose."""

    def __init__(self, model: BuiltModel) -> None:
        self._chunks = [
            [module for module in chunk.modules() if isinstance(module, SparseCoreAttention)] for chunk in model.models
        ]

    @classmethod
    def build(cls, config: MegatronConfig, model: BuiltModel) -> SharedIndexers | None:
        """Build them for a model with layers without an indexer; they are cleared after passes without training too."""
        return cls(model) if model.plan.model_config.layers_without_indexer else None

    def arm(self, chunk: int, micro_batch: MicroBatch) -> None:
        """Prepare this chunk's next forward pass of training, over the micro-batch."""
        output = IndexerOutput()
        for layer in self._chunks[chunk]:
            if layer.indexer is not None:  # one for the layer and those after it that have none
                output = IndexerOutput()
            layer.outputs.pending = output

    def reset(self) -> None:
        """Clear the layers after a pass over all micro-batches, completed or failed."""
        for layer in (layer for chunk in self._chunks for layer in chunk):
            layer.outputs.reset()
            layer.last_output.features = None


# ---------------------------------------------------------------- the indexer's loss


@dataclass(frozen=True)
class _TokenWeights:
    """Tokens of a micro-batch for the loss of the indexers.

    Attributes:
        values: [n] float32, the number of sequences that have each computed token of this context-parallel rank; 0 for padding.
        factor: 0-d float32, weight of a token's divergence.
        sums: [1] float32, to which divergences are added.
    """

    values: Tensor
    factor: Tensor
    sums: Tensor

    def add_up(self, divergences: Tensor, values: Tensor) -> Tensor:
        """Return the loss of [s, b] divergences; `values` cover the full sequences."""
        total = (divergences * values).sum()
        self.sums.add_(total.detach())
        return total * self.factor


class IndexerLosses(EnginePart):
    """Loss of the indexers of all layers in training, on one rank.

    It adds to the loss that is minimised (`engine/router_losses.py`), as DeepSeek's sparse training does,

        dsa_indexer_loss_coeff * sum over layers of the mean over tokens t of  sum_s p_ts log(p_ts / softmax_s(I_ts))

    over the chosen tokens s, where p_t is the sum of the attention weights of all heads, divided by their number, and constant:
    the loss moves only the indexers. The mean is over all tokens of the step, prompts included.
    """

    def __init__(self, model: BuiltModel, coeff: float) -> None:
        """Attach them to the layers."""
        self._coeff = coeff
        self._chunks = [
            [module.passes for module in chunk.modules() if isinstance(module, SparseCoreAttention)] for chunk in model.models
        ]
        self._tokens: dict[int, _TokenWeights] = {}
        self._factor, self._sums, self._num_tokens = torch.zeros(()), torch.zeros(1), 0

    @classmethod
    def build(cls, config: MegatronConfig, model: BuiltModel) -> IndexerLosses | None:
        """Build them for a model that trains, where `dsa_indexer_loss_coeff` is not 0."""
        coeff = config.dsa_indexer_loss_coeff
        return cls(model, coeff) if model.ddp_chunks and coeff else None

    def start_step(self, micro_batches: Sequence[MicroBatch], count: Callable[[], Tensor]) -> None:
        """Find the weight of a token in this optimizer step; collective over the data-parallel ranks."""
        counted = count()
        self._num_tokens = sum(sum(micro_batch.lengths) for micro_batch in micro_batches if not micro_batch.is_filler)
        totals = torch.stack([counted, torch.full_like(counted, self._num_tokens)])
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        self._factor = self._coeff * totals[0] / totals[1].clamp(min=1)
        self._sums = torch.zeros(1, device=counted.device)

    def arm(self, chunk: int, micro_batch: MicroBatch) -> None:
        """Prepare this chunk's next forward pass, over the micro-batch."""
        if id(micro_batch) not in self._tokens:
            layout = micro_batch.packed
            values = (micro_batch.tokens >= 0).float() * (not micro_batch.is_filler)
            if layout is not None and layout.shared is not None and not micro_batch.is_filler:
                # values of all computed tokens, of which a context-parallel rank has a slice
                real = layout.shared.representatives[: sum(micro_batch.lengths)]
                first = parallel_state.get_context_parallel_rank() * len(values)
                values = torch.bincount(real, minlength=len(layout.shared.computed)).float()[first : first + len(values)]
            (values,) = platform.current().to_device([values], self._factor.device)
            self._tokens[id(micro_batch)] = _TokenWeights(values, self._factor, self._sums)
        for passes in self._chunks[chunk]:
            passes.pending = self._tokens[id(micro_batch)]

    def reset(self) -> None:
        """Clear the layers after a pass over all micro-batches, completed or failed."""
        self._tokens.clear()
        for passes in (passes for chunk in self._chunks for passes in chunk):
            passes.reset()

    def metrics(self) -> PendingMetrics:
        """Return the sum over layers of the mean divergence of a token, not read yet; collective over the pipeline stages."""
        dist.all_reduce(self._sums, group=parallel_state.get_pipeline_model_parallel_group())
        count = torch.full_like(self._sums[0], self._num_tokens)
        return PendingMetrics({"indexer_loss": ("mean", (self._sums[0], count))})
