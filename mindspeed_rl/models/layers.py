"""Modules that Megatron-core does not have, or not without TransformerEngine and Apex."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import mlp as megatron_mlp
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    BaseTransformerLayer,
    get_transformer_layer_offset,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from mindspeed_rl import adaptors
from mindspeed_rl.models import specs
from mindspeed_rl.models.model_config import VisionConfig

_LATENT_ATTENTION = "megatron.core.transformer.multi_latent_attention"


class NoopLayer(MegatronModule, BaseTransformerLayer):
    """An empty layer that evens out a pipeline: it has no parameters and returns its input."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        **unused: object,
    ) -> None:
        super().__init__(config=config)
        pp_rank = None if pg_collection is None else pg_collection.pp.rank()
        # Megatron's block makes checkpoint keys from the index of every layer
        self.layer_number = layer_number + get_transformer_layer_offset(config, vp_stage, pp_rank)

    def forward(self, hidden_states: Tensor, context: Tensor | None = None, **unused: object) -> tuple[Tensor, Tensor | None]:
        return hidden_states, context

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        return {}


@dataclass
class GatedDeltaNetSubmodules:
    """Classes of the two projections of a gated delta net."""

    in_proj: ModuleSpec | type
    out_proj: ModuleSpec | type


class WindowedAttention(nn.Module):
    """Causal attention with a sliding window, capped logits or sinks, written out in plain tensor operations.

    It materializes the scores of one sequence at a time; context parallelism is refused.

    Args:
        window: a token sees itself and the ``window`` - 1 tokens before it; None means all.
        softcap: logits become softcap * tanh(logits / softcap); None means unchanged.
        sinks: each head has a logit that takes part in the softmax, and whose weight is dropped.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        softmax_scale: float | None = None,
        **unused: object,
    ) -> None:
        super().__init__()
        if config.context_parallel_size > 1:
            raise ValueError("context_parallel_size must be 1 for a model with sliding-window or capped attention")
        if config.attention_dropout:
            raise ValueError("attention_dropout must be 0 for a model with sliding-window or capped attention")
        self.window, self.softcap = window, softcap
        assert config.kv_channels is not None  # Megatron derives it where it is not given
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.softmax_offset: nn.Parameter | None = None
        if sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        state = self.state_dict(keep_vars=True)  # the optimizer finds its parameters by identity
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return [s, b, n * d] from [s, b, n, d], or [t, 1, n * d] from packed [t, n, d].

        Keys and values of earlier tokens may come before the queries' own, from a cache.
        """
        if packed_seq_params is None:
            return self._attend(query, key, value)
        # with padding after each sequence the tokens are at the padded bounds
        bounds = packed_seq_params.cu_seqlens_q_padded
        bounds = packed_seq_params.cu_seqlens_q if bounds is None else bounds
        assert bounds is not None
        lengths = bounds.diff().tolist()
        # prefix sharing (engine/sequence_layout.py): only tokens that are computed here have queries
        shared = getattr(packed_seq_params, "shared", None)
        if shared is not None:
            key, value = shared.expand(key), shared.expand(value)
        # the output has a row for every token, padding after the last sequence included
        if (tail := key.size(0) - sum(lengths)) > 0:
            lengths.append(tail)
        num_queries = lengths if shared is None else list(shared.lengths)
        sequences = zip(
            *(tensor.unsqueeze(1).split(sizes) for tensor, sizes in ((query, num_queries), (key, lengths), (value, lengths)))
        )
        return torch.cat([self._attend(*sequence) for sequence in sequences if sequence[0].size(0)])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [b, n, s, d]
        repeats = query.size(1) // key.size(1)
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        scores = query @ key.transpose(-1, -2) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        position = torch.arange(scores.size(-1), device=scores.device)
        distance = position[-scores.size(-2) :, None] - position[None, :]
        hidden = distance < 0 if self.window is None else (distance < 0) | (distance >= self.window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.softmax_offset is not None:
            sinks = self.softmax_offset.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : key.size(-2)]
        out = (weights @ value).permute(2, 0, 1, 3)
        return out.reshape(out.size(0), out.size(1), -1)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, with the constructor of Megatron's own norms.

    Megatron's `finalize_model_grads` sums the gradients of parameters marked `sequence_parallel` over the TP group, which
    a norm inside a sequence-parallel region needs because each rank sees only a slice of the tokens.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = bool(config.layernorm_zero_centered_gamma)
        initial = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(initial(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # pyrefly: ignore[missing-attribute]  (Megatron's mark)

    def forward(self, x: Tensor) -> Tensor:
        # checkpoints of such models have the factor less 1
        weight = self.weight + 1.0 if self.zero_centered else self.weight
        return adaptors.rms_norm(x, weight, self.eps)


class MultimodalRotary(nn.Module):
    """Rotary angles of tokens that have a position on each of three axes: time, height and width.

    Each frequency follows one axis: in sections, one axis after the other (Qwen2.5-VL), or in turn (Qwen3-VL).
    """

    def __init__(self, inv_freq: Tensor, vision: VisionConfig) -> None:
        super().__init__()
        # not a buffer: a 16-bit model must not round it
        self.inv_freq = inv_freq.float()
        _, height, width = vision.rotary_sections
        if vision.rotary_interleaved:
            axes = torch.zeros(len(inv_freq), dtype=torch.int64)
            axes[1 : 3 * height : 3], axes[2 : 3 * width : 3] = 1, 2
        else:
            axes = torch.arange(3).repeat_interleave(torch.tensor(vision.rotary_sections))
        self._axes = axes.to(inv_freq.device)

    def forward(self, position_ids: Tensor, *unused: object, **others: object) -> Tensor:
        """Return [s, b, 1, d] angles of [3, b, s] positions."""
        # [d / 2, b, s]
        positions = position_ids.to(self.inv_freq).index_select(0, self._axes)
        angles = (positions * self.inv_freq[:, None, None]).permute(2, 1, 0)
        return torch.cat([angles, angles], dim=-1).unsqueeze(2)


class HeadsNorm(RMSNorm):
    """RMSNorm of queries or keys over all their heads together, with the heads of other tensor parallel ranks.

    Args:
        hidden_size: width of one head.
        num_heads: number of heads of the model.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, num_heads: int, **unused: object
    ) -> None:
        super().__init__(config, num_heads // config.tensor_model_parallel_size * hidden_size, eps)
        self.divided = config.tensor_model_parallel_size > 1
        self.full_size = num_heads * hidden_size
        # a rank has the elements of its heads, and sees all tokens
        self.weight.sequence_parallel = False  # pyrefly: ignore[missing-attribute]  (Megatron's mark)
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., heads, head size] of the same."""
        full = x.float()
        squares = full.square().sum((-2, -1), keepdim=True)
        if self.divided:
            # the sum over ranks forward, and the sum of its gradients backward
            squares = tensor_parallel.reduce_from_tensor_model_parallel_region(squares)
            squares = tensor_parallel.copy_to_tensor_model_parallel_region(squares)
        normalized = full * torch.rsqrt(squares / self.full_size + self.eps)
        return self.weight.view(x.shape[-2:]) * normalized.to(x.dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        return make_sharded_tensors_for_checkpoint(self.state_dict(keep_vars=True), prefix, {"weight": 0}, sharded_offsets)


class NormalizedAttention(nn.Module):
    """Core attention that normalizes queries and keys first, each head by itself, so that they have been rotated before.

    Args:
        norm: class of the two norms.
        attention: core attention after them.
    """

    def __init__(
        self, config: TransformerConfig, *, norm: type[nn.Module], attention: ModuleSpec | type, **arguments: Any
    ) -> None:
        super().__init__()
        assert config.kv_channels is not None  # Megatron derives it where it is not given
        sizes = {"config": config, "hidden_size": config.kv_channels, "eps": config.layernorm_epsilon}
        self.q_layernorm, self.k_layernorm = norm(**sizes), norm(**sizes)
        self.attention = build_module(attention, config=config, **arguments)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *inputs: Any, **named: Any) -> Tensor:
        """Return what core attention returns."""
        return self.attention(self.q_layernorm(query), self.k_layernorm(key), value, *inputs, **named)


class NormalizedRouter(TopKRouter):
    """A router whose chosen experts share a weight of 1, times the scaling factor, also where only one is chosen.

    Megatron leaves the score of a single expert as it is. The weight is computed as transformers and vLLM do, not put in as
    a constant, so that the router's weight takes part in backward.
    """

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return probabilities and choices, [tokens, experts] each."""
        probs, routing_map = super().routing(logits, *args, **kwargs)
        if self.topk == 1:
            factor = self.config.moe_router_topk_scaling_factor or 1.0
            probs = factor * (probs / (probs.sum(-1, keepdim=True) + 1e-20))
        return probs, routing_map


class BiasedSoftmaxRouter(NormalizedRouter):
    """A router whose experts are chosen by a softmax over all of them plus a bias; chosen ones share their softmax scores.

    Megatron has the bias only with sigmoid scores: the logits are changed into those whose sigmoids are the softmax scores.
    """

    def gating(self, input: Tensor) -> Tensor:
        scores = super().gating(input).softmax(-1, dtype=torch.float32)
        # a score of 1 would have an infinite logit
        return torch.logit(scores.clamp(1e-12, 1.0 - 1e-7))


class BiasedRowLinear(tensor_parallel.RowParallelLinear):
    """The second linear layer of an expert with biases.

    Megatron adds the bias in place, weighted by the router. Autograd refuses that for what the layer returns on one rank.
    And it sums gradients of such a bias over tensor parallel ranks twice: as an expert's, which each has for
    tokens of its own, and as a bias's in a sequence-parallel region.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.bias.sequence_parallel = False  # pyrefly: ignore[missing-attribute]  (Megatron's mark)
        # counted in the norm of gradients on every rank, as its weight
        tensor_parallel.set_tensor_model_parallel_attributes(self.bias, True, 0, 1)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:  # pyrefly: ignore[bad-override]  (no types there)
        """Return output and bias."""
        output, bias = super().forward(input_)
        return output.clone(), bias


class HeadsNormAttention(SelfAttention):
    """Attention that normalizes queries and keys over all their heads.

    Megatron must not know of these norms: with `qk_layernorm` it sums their gradients over tensor parallel ranks, and
    without it releases from 0.19 refuse norms among the submodules.

    Args:
        num_heads: numbers of heads of queries and of keys; None: no such norms.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        *,
        num_heads: tuple[int, int] | None,
        **arguments: Any,
    ) -> None:
        super().__init__(config, submodules, **arguments)
        if num_heads is not None:
            sizes: dict[str, Any] = {
                "config": config, "hidden_size": self.hidden_size_per_attention_head, "eps": config.layernorm_epsilon
            }  # fmt: skip
            for name, count in zip(("q_layernorm", "k_layernorm"), num_heads):
                setattr(self, name, HeadsNorm(**sizes, num_heads=count))


class TwoBaseAttention(HeadsNormAttention):
    """Attention of a model with two rotary bases: the angles that it gets are [angles of full attention; angles of windows].

    Args:
        local: this layer attends to a window. Its frequencies are not scaled.
        num_heads: see `HeadsNormAttention`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        *,
        local: bool,
        num_heads: tuple[int, int] | None = None,
        **arguments: Any,
    ) -> None:
        if local:
            config = copy.copy(config)
            for name in [name for name in vars(config) if name.startswith("yarn_")]:
                delattr(config, name)
        super().__init__(config, submodules, num_heads=num_heads, **arguments)
        self.local = local

    def forward(self, *inputs: Any, **named: Any) -> tuple[Tensor, Tensor | None]:  # pyrefly: ignore[bad-override]  (Megatron's)
        """Return what `SelfAttention` does with the angles of this layer."""
        named["rotary_pos_emb"] = named["rotary_pos_emb"].chunk(2, -1)[self.local]
        return super().forward(*inputs, **named)


# ---------------------------------------------------------------------- recomputed activations


class _RecomputingMLP(MLP):
    """A gated MLP without biases that drops the input of linear_fc2 until backward and computes its activation again.

    The activation is computed from the output of linear_fc1, which backward keeps anyway: one of an MLP's three large
    activations is saved for an elementwise operation. MindSpeed's function of this feature does not take the arguments that
    Megatron 0.16.1 passes; on NPUs this class calls its fused activation.
    """

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not torch.is_grad_enabled():
            return super().forward(hidden_states, per_token_scale, **unused)
        inner, bias = self.linear_fc1(hidden_states)
        assert bias is None and self.config.gated_linear_unit
        # fp8=False would mean yes, and need TransformerEngine
        checkpoint = CheckpointWithoutOutput(fp8=None)
        scale = () if per_token_scale is None else (per_token_scale,)
        output, output_bias = self.linear_fc2(checkpoint.checkpoint(self._activate, inner, *scale))
        checkpoint.discard_output_and_register_recompute(output)
        return output, output_bias

    def _activate(self, inner: Tensor, per_token_scale: Tensor | None = None) -> Tensor:
        # Megatron fuses that of other functions under other names
        if self.config.bias_activation_fusion and self.activation_func is torch.nn.functional.silu:
            narrow = self.config.activation_func_fp8_input_store
            if per_token_scale is None:
                return megatron_mlp.bias_swiglu_impl(inner, None, narrow)
            return megatron_mlp.weighted_bias_swiglu_impl(inner, None, per_token_scale.unsqueeze(-1), narrow)
        gate, up = inner.chunk(2, dim=-1)
        product = self.activation_func(gate) * up
        return product if per_token_scale is None else (product * per_token_scale.unsqueeze(-1)).to(inner.dtype)


class _RecomputingSharedExpertMLP(SharedExpertMLP, _RecomputingMLP):  # pyrefly: ignore[inconsistent-inheritance]  (Megatron's)
    """The experts that every token goes through."""


class _RecomputingSequentialMLP(SequentialMLP):
    """Experts one by one."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
        **named: Any,
    ) -> None:
        assert pg_collection is not None
        super().__init__(num_local_experts, config, submodules, pg_collection=pg_collection, **named)
        self.local_experts = nn.ModuleList(
            _RecomputingMLP(
                self.config,
                submodules,
                ffn_hidden_size=self.config.moe_ffn_hidden_size,
                is_expert=True,
                tp_group=pg_collection.expt_tp,
            )
            for _ in range(num_local_experts)
        )


_RECOMPUTING: dict[type, type] = {
    MLP: _RecomputingMLP,
    SharedExpertMLP: _RecomputingSharedExpertMLP,
    SequentialMLP: _RecomputingSequentialMLP,
}


def recompute_activations(spec: TransformerBlockSubmodules) -> None:
    """Replace the MLPs in a block's spec by those that compute their activation function again in backward."""

    def replace(name: str, part: specs.Part) -> specs.Part:
        module = specs.get_class(part)
        return part if module not in _RECOMPUTING else specs.replace_class(part, _RECOMPUTING[module])

    specs.substitute_layers(spec, replace)


def recompute_grouped_activations(model: nn.Module) -> None:
    """Let experts in grouped products compute their activation function again in backward, as Megatron's do for `moe_act`.

    Raises:
        ValueError: they have adapters.
    """
    grouped = specs.GROUPED_EXPERTS
    for module in (module for module in model.modules() if grouped is not None and isinstance(module, grouped)):
        if type(module) is not grouped:
            raise ValueError("recompute_activation_function: true cannot be used with adapters on grouped experts.")
        cast(Any, module).activation_recompute = True


def complete_rotary_gradients(model: nn.Module) -> None:
    """Have latent attention sum the gradient of its keys' rotary part over tensor ranks, each of which has other heads.

    Megatron's class gathers the columns of its projection, and passes back to each rank what its own heads give it. That is
    complete for the latent part, which is exchanged again before the heads, and not for the rotary one. Here the projection
    returns what one that every rank has would: Megatron exchanges the rotary part itself then, or it is exchanged here.
    """

    def complete(projection: nn.Module, inputs: tuple[Tensor, ...], result: tuple[Tensor, Tensor | None]) -> Any:
        output, bias = result
        full, config = tensor_parallel.gather_from_tensor_model_parallel_region(output), cast(Any, projection).config
        if config.sequence_parallel:
            return tensor_parallel.scatter_to_sequence_parallel_region(full), bias
        latent, rotary = full.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        return torch.cat([latent, tensor_parallel.copy_to_tensor_model_parallel_region(rotary)], dim=-1), bias

    for module in model.modules():
        # a class of another library has its own exchange
        if isinstance(module, MLASelfAttention) and type(module).get_query_key_value_tensors.__module__ == _LATENT_ATTENTION:
            cast(nn.Module, module.linear_kv_down_proj).register_forward_hook(complete)
