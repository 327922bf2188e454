"""ModelConfig -> Megatron's TransformerConfig, layer spec and GPTModel, without TransformerEngine or Apex.

Importing this imports Megatron, so on a machine that needs an adaptor `adaptors.apply("train")` must have run.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias, cast

import torch
from megatron.core.activations import quick_gelu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn
from torch.nn import functional

from mindspeed_rl.models import specs
from mindspeed_rl.models.layers import (
    BiasedRowLinear,
    BiasedSoftmaxRouter,
    GatedDeltaNetSubmodules,
    HeadsNormAttention,
    MultimodalRotary,
    NoopLayer,
    NormalizedAttention,
    NormalizedRouter,
    TwoBaseAttention,
    WindowedAttention,
)
from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.model_config import ModelConfig, RopeScaling
from mindspeed_rl.models.names import get_fused_norm_prefixes
from mindspeed_rl.models.reward_model import GPTRewardModel

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    # x sigmoid(1.702 x)
    "clamped_swish": quick_gelu,
}

#: fields of a TransformerConfig
_Settings: TypeAlias = dict[str, Any]

#: No TransformerEngine and no Apex: their fused kernels are off. MindSpeed turns its own on by patching.
_WITHOUT_FUSED_KERNELS = {
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
}


def transformer_config(model_config: ModelConfig, *, layout: Layout | None = None, **run: object) -> TransformerConfig:
    """Return Megatron's config of a model.

    Args:
        model_config: its shape.
        layout: division over ranks; sets the parallel sizes, the uneven pipeline of ``num_layer_list`` and the number
            of layers with no-op layers. Without it the parallel sizes come from ``run``.
        run: any field of TransformerConfig (parallel sizes, dtype, recomputation, dropout ...); wins over the model's.

    Raises:
        ValueError: the model has experts that the options of Megatron cannot express.
    """
    settings: _Settings = {
        **_WITHOUT_FUSED_KERNELS,
        "num_layers": model_config.num_layers,
        "hidden_size": model_config.hidden_size,
        "ffn_hidden_size": model_config.ffn_hidden_size,
        "num_attention_heads": model_config.num_attention_heads,
        "num_query_groups": model_config.num_query_groups,
        "kv_channels": model_config.kv_channels,
        "normalization": model_config.normalization,
        "layernorm_epsilon": model_config.norm_epsilon,
        "layernorm_zero_centered_gamma": model_config.layernorm_zero_centered_gamma,
        "gated_linear_unit": True,
        "activation_func": _ACTIVATIONS[model_config.activation],
        "activation_func_clamp_value": model_config.activation_limit,
        "glu_linear_offset": 1.0 if model_config.activation == "clamped_swish" else 0.0,
        "add_bias_linear": model_config.add_bias_linear,
        "add_qkv_bias": model_config.add_qkv_bias,
        # with it Megatron sums gradients of the norms over tensor parallel ranks, which `HeadsNorm` divides its weight over
        "qk_layernorm": model_config.qk_layernorm_after_rope
        or model_config.qk_layernorm
        and not model_config.qk_layernorm_over_heads,
        "rotary_interleaved": model_config.rotary_interleaved,
        "softmax_scale": model_config.query_scale,
        "attention_output_gate": model_config.attention_output_gate,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if model_config.num_moe_experts:
        settings |= _moe_settings(model_config, layout)
    if model_config.vision is not None:
        settings["mrope_section"] = list(model_config.vision.rotary_sections)
    if model_config.linear_attention is not None or model_config.layers_without_indexer:
        settings["hetereogenous_dist_checkpoint"] = True  # layers of two kinds: each has its own key
    if model_config.multi_latent_attention:
        settings |= _mla_settings(model_config)
    if model_config.mtp_num_layers:
        settings["mtp_num_layers"] = model_config.mtp_num_layers
    if layout is not None:
        settings |= _layout_settings(layout, model_config.mtp_num_layers)
    settings |= run
    config = (MLATransformerConfig if model_config.multi_latent_attention else TransformerConfig)(**settings)
    if (
        model_config.rope_scaling is not None
        and model_config.rope_scaling.type == "yarn"
        and not model_config.multi_latent_attention
    ):
        _set_yarn(config, model_config.rope_scaling)
    if model_config.sparse_attention is not None:
        # latent attention hands its input to core attention then; only now, because Megatron's own core attention of that
        # name refuses context parallelism, and its config with it
        config.experimental_attention_variant = "dsa"
    return config


def _moe_settings(model_config: ModelConfig, layout: Layout | None) -> _Settings:
    slots: list[int | None] = list(range(model_config.num_layers))
    if layout is not None:
        slots = layout.list_slots()
    return {
        "num_moe_experts": model_config.num_moe_experts,
        "moe_ffn_hidden_size": model_config.moe_ffn_hidden_size,
        # an int keeps Megatron's distributed checkpoints in their default form, with one key for all layers
        "moe_layer_freq": 1
        if model_config.is_homogeneous and None not in slots
        else [int(layer in model_config.moe_layers) for layer in slots],
        "moe_router_topk": model_config.moe_router_topk,
        # Megatron asks for it where one expert is chosen; `NormalizedRouter` normalizes the score
        "moe_router_pre_softmax": model_config.moe_router_pre_softmax
        or model_config.normalizes_one_expert
        and model_config.moe_router_score_function == "softmax",
        "moe_router_score_function": model_config.moe_router_score_function,
        "moe_router_enable_expert_bias": model_config.moe_router_enable_expert_bias,
        "moe_router_num_groups": model_config.moe_router_num_groups,
        "moe_router_group_topk": model_config.moe_router_group_topk,
        "moe_router_topk_scaling_factor": model_config.moe_router_topk_scaling_factor,
        # losses of the router are not Megatron's (engine/router_losses.py), and without one it has no coefficient
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        # as transformers computes the router; in bfloat16 other experts could be chosen
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": model_config.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": model_config.moe_shared_expert_gate,
        "moe_token_dispatcher_type": "alltoall",
    }


def _mla_settings(model_config: ModelConfig) -> _Settings:
    scaling = model_config.rope_scaling
    yarn = scaling is not None and scaling.type == "yarn"
    settings: _Settings = {
        "q_lora_rank": model_config.q_lora_rank,
        "kv_lora_rank": model_config.kv_lora_rank,
        "qk_head_dim": model_config.qk_head_dim,
        "qk_pos_emb_head_dim": model_config.qk_pos_emb_head_dim,
        "v_head_dim": model_config.v_head_dim,
        "qk_layernorm": True,
        "rotary_base": model_config.rotary_base,
        # the rotary part of a head has its own dimensions, all of which rotate
        "rotary_percent": 1.0,
        "rope_type": "yarn" if yarn else "rope",
        # MLASelfAttention scales its softmax by factor and mscale under either rope type: these leave it unchanged
        "rotary_scaling_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    if scaling is not None and yarn:
        settings |= {
            "rotary_scaling_factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "mscale": 1.0 if scaling.mscale is None else scaling.mscale,
            "mscale_all_dim": 0.0 if scaling.mscale_all_dim is None else scaling.mscale_all_dim,
        }
    return settings


def _layout_settings(layout: Layout, num_predictions: int) -> _Settings:
    settings: _Settings = {
        "num_layers": layout.num_slots,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
    }
    if layout.num_experts:
        settings |= {"expert_model_parallel_size": layout.ep, "expert_tensor_parallel_size": layout.expert_tp_size}
    if layout.schedule == "dualpipev":
        raise ValueError("dualpipev is a schedule of MindSpeed; Megatron's pipeline schedules cannot run that layout")
    if layout.moe_tp_extend_ep and layout.num_experts:
        raise ValueError(
            "moe_tp_extend_ep is MindSpeed's dispatcher; to train without it use expert_model_parallel_size = EP x TP and "
            "expert_tensor_parallel_size = 1, which places the same experts on the same ranks"
        )
    if layout.noop_layers:
        # empty layers have nothing to save: every layer then gets its own key in a distributed checkpoint
        settings["hetereogenous_dist_checkpoint"] = True
    if layout.num_layer_list is not None and layout.pp > 1:
        stages: list[list[str]] = [["decoder"] * count for count in layout.num_layer_list]
        stages[0].insert(0, "embedding")
        stages[-1] += [*["mtp"] * num_predictions, "loss"]
        settings["pipeline_model_parallel_layout"] = stages
    return settings


def _set_yarn(config: TransformerConfig, scaling: RopeScaling) -> None:
    # GPTModel reads these from the config object; TransformerConfig has no such fields, so they are set afterwards.
    mscale, mscale_all_dim = scaling.mscale, scaling.mscale_all_dim
    if scaling.attention_factor is not None:
        expected = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
        if not math.isclose(scaling.attention_factor, expected, rel_tol=1e-6):
            raise ValueError(f"yarn attention_factor {scaling.attention_factor} is not supported; Megatron computes {expected}")
    for name, value in {
        "yarn_rotary_scaling_factor": scaling.factor,
        "yarn_original_max_position_embeddings": scaling.original_max_position_embeddings,
        "yarn_beta_fast": scaling.beta_fast,
        "yarn_beta_slow": scaling.beta_slow,
        "yarn_mscale": mscale,
        "yarn_mscale_all_dim": mscale_all_dim,
        "yarn_correction_range_round_to_int": scaling.truncate,
    }.items():
        setattr(config, name, value)


# ---------------------------------------------------------------------- layer spec


def layer_spec(
    model_config: ModelConfig,
    config: TransformerConfig,
    *,
    norm: type[nn.Module],
    core_attention: type[nn.Module],
    linear_attention: type[nn.Module] | None = None,
    layout: Layout | None = None,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the layers of one model chunk, with the given norm and core attention.

    Layers with a sliding window or capped attention logits use :class:`WindowedAttention` instead of
    ``core_attention``: no fused kernel of the platforms computes those.

    Args:
        core_attention: for a model with indexers one that takes their shape, an `IndexerOutput` and `shares`, too.
        linear_attention: the gated delta net of hybrid models.
        layout: the layout the config was made with; needed when it has no-op layers.
        vp_stage, pp_rank: the chunk; ``pp_rank`` defaults to this process's.
    """
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    slots = list(range(model_config.num_layers)) if layout is None else layout.list_slots()
    kinds: dict[tuple[bool, bool, bool, bool], ModuleSpec] = {}
    linear, last_output = model_config.linear_attention, IndexerOutput()
    layers = []
    for layer in slots[first : first + count]:
        if layer is None:
            layers.append(ModuleSpec(module=NoopLayer))
            continue
        windowed = layer in model_config.sliding_window_layers
        is_linear, shares = linear is not None and layer in linear.layers, layer in model_config.layers_without_indexer
        kind = (layer in model_config.moe_layers, windowed, is_linear, shares)
        if kind not in kinds:
            core = _core_attention(model_config, core_attention, last_output, shares=shares)
            kinds[kind] = _build_layer(model_config, config, norm, core, *kind[:2], linear_attention if is_linear else None)
        layers.append(kinds[kind])
    # declared as a built module, but built from its class like the layers
    block = TransformerBlockSubmodules(layer_specs=layers, layer_norm=cast(nn.Module, norm))
    _substitute_router(block, model_config)
    if model_config.add_bias_linear:
        specs.substitute_layers(block, lambda name, part: BiasedRowLinear if name == "linear_fc2" else part)
    return block


def prediction_layer_spec(
    model_config: ModelConfig, config: TransformerConfig, *, norm: type[nn.Module], core_attention: type[nn.Module]
) -> TransformerBlockSubmodules:
    """Return the decoder layer inside a multi-token-prediction layer: full attention, and experts in a model that has any."""
    core = _core_attention(model_config, core_attention, IndexerOutput(), shares=False)
    layer = _build_layer(model_config, config, norm, core, model_config.num_moe_experts is not None, False, None)
    block = TransformerBlockSubmodules(layer_specs=[layer], layer_norm=cast(nn.Module, norm))
    _substitute_router(block, model_config)
    return block


def _substitute_router(block: TransformerBlockSubmodules, model_config: ModelConfig) -> None:
    """Replace Megatron's router in every layer of a block where the model's computes other weights of experts."""
    router = BiasedSoftmaxRouter if model_config.moe_router_biased_softmax else NormalizedRouter
    if model_config.moe_router_biased_softmax or model_config.normalizes_one_expert:
        specs.substitute_layers(block, lambda name, part: router if name == "router" else part)


class IndexerOutput:
    """Output of the last indexer that ran in a forward pass of a model chunk; the layers after it that have none read it."""

    features: Any = None


def _core_attention(
    model_config: ModelConfig, core_attention: type[nn.Module], last_output: IndexerOutput, *, shares: bool
) -> type[nn.Module] | ModuleSpec:
    if model_config.sparse_attention is None:
        return core_attention
    params = {"shape": model_config.sparse_attention, "last_output": last_output, "shares": shares}
    return ModuleSpec(module=core_attention, params=params)


class _SandwichNormLayer(TransformerLayer):
    """A decoder layer that also normalizes the outputs of attention and MLP, before the residual (Gemma 2, GLM-4-0414)."""

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, post_norm: type[nn.Module], **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, **kwargs)
        shape = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_attn_norm = cast(nn.Module, build_module(post_norm, **shape))
        self.post_mlp_layernorm = cast(nn.Module, build_module(post_norm, **shape))
        # the bias-dropout-add is the only step between the output of a sublayer and the residual
        self.self_attn_bda = _normalize_before(self.self_attn_bda, self.post_attn_norm)
        self.mlp_bda = _normalize_before(self.mlp_bda, self.post_mlp_layernorm)


def _normalize_before(bias_dropout_add: Callable[..., Any], norm: nn.Module) -> Callable[..., Any]:
    def build(training: bool, fused: bool) -> Callable[..., Tensor]:
        add = bias_dropout_add(training, fused)

        def apply(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            return add((norm(output if bias is None else output + bias), None), residual, dropout)

        return apply

    return build


def _build_layer(
    model_config: ModelConfig,
    config: TransformerConfig,
    norm: type[nn.Module],
    core_attention: type[nn.Module] | ModuleSpec,
    moe: bool,
    windowed: bool,
    linear_attention: type[nn.Module] | None,
) -> ModuleSpec:
    spec = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=model_config.num_moe_experts if moe else None,
            moe_grouped_gemm=config.moe_grouped_gemm if moe else False,
            qk_layernorm=config.qk_layernorm and not model_config.qk_layernorm_after_rope,
            multi_latent_attention=model_config.multi_latent_attention,
        )
    )
    layer = spec.submodules
    assert isinstance(layer, TransformerLayerSubmodules)
    layer.input_layernorm = layer.pre_mlp_layernorm = norm if model_config.pre_norm else IdentityOp
    assert isinstance(layer.self_attention, ModuleSpec)
    # a class for each kind of attention, each with its own fields
    attention = cast(Any, layer.self_attention.submodules)
    if model_config.multi_latent_attention:
        attention.q_layernorm = attention.kv_layernorm = norm
    elif model_config.qk_layernorm_over_heads:
        counts = (model_config.num_attention_heads, model_config.num_query_groups)
        attention.q_layernorm = attention.k_layernorm = None
        layer.self_attention = dataclasses.replace(
            layer.self_attention, module=HeadsNormAttention, params={**layer.self_attention.params, "num_heads": counts}
        )
    elif model_config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    attention.core_attention = core_attention
    if windowed or model_config.attn_logit_softcapping or model_config.attention_sinks:
        attention.core_attention = ModuleSpec(
            module=WindowedAttention,
            params={
                "window": model_config.sliding_window if windowed else None,
                "softcap": model_config.attn_logit_softcapping,
                "sinks": model_config.attention_sinks,
            },
        )
    if model_config.qk_layernorm_after_rope:
        params = {"norm": norm, "attention": attention.core_attention}
        attention.core_attention = ModuleSpec(module=NormalizedAttention, params=params)
    if model_config.local_rotary_base is not None:
        layer.self_attention = dataclasses.replace(
            layer.self_attention, module=TwoBaseAttention, params={**layer.self_attention.params, "local": windowed}
        )
    if linear_attention is not None:
        layer.self_attention = ModuleSpec(
            module=linear_attention,
            params={"shape": model_config.linear_attention},
            submodules=GatedDeltaNetSubmodules(attention.linear_qkv, attention.linear_proj),
        )
    layer.sharded_state_dict_keys_map = get_fused_norm_prefixes(model_config, moe, linear_attention is not None)
    if model_config.post_norm:
        spec.module = _SandwichNormLayer
        spec.params = {"post_norm": norm}
    return spec


# ---------------------------------------------------------------------- the model


def build_gpt_model(
    model_config: ModelConfig,
    config: TransformerConfig,
    spec: TransformerBlockSubmodules,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    parallel_output: bool = True,
    max_sequence_length: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    lm_class: type[GPTModel] = GPTModel,
    reward_class: type[GPTRewardModel] = GPTRewardModel,
    prediction: object = None,
) -> GPTModel:
    """Build one model chunk, with random weights; logits, or scores [b, s, 1] when ``model_config.head`` is "reward".

    ``lm_class`` and ``reward_class`` may be subclasses that return something else from the same weights.

    Collective when an embedding is tied across pipeline stages. Multi-token-prediction layers are built from the spec of their
    block, `prediction`, in the chunk that has it.
    """
    reward, rotation = model_config.head == "reward", _choose_rotation(model_config)
    if hasattr(config, "position_embedding_type"):  # MindSpeed's configs have it, and Megatron then ignores its own argument
        setattr(config, "position_embedding_type", rotation)  # noqa: B010  (undeclared)
    model = (reward_class if reward else lm_class)(
        config,
        cast(ModuleSpec, spec),  # Megatron accepts the specs of a block too, undeclared
        vocab_size=model_config.padded_vocab_size,
        max_sequence_length=max_sequence_length or model_config.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=parallel_output,
        # a score head has no rows in common with the vocabulary
        share_embeddings_and_output_weights=not (model_config.untie_embeddings_and_output_weights or reward),
        position_embedding_type=rotation,
        # images are put into full embeddings, which are scattered after that
        scatter_embedding_sequence_parallel=model_config.vision is None,
        rotary_percent=model_config.rotary_percent,
        rotary_base=cast(int, model_config.rotary_base),  # declared int, computed as a float
        vp_stage=vp_stage,
        pg_collection=pg_collection,
        **({} if prediction is None else {"mtp_block_spec": cast(Any, prediction)}),
    )
    _fit_rotary(model, config, model_config)
    if model_config.sparse_attention is not None:
        for module in model.modules():
            if isinstance(module, MLASelfAttention):
                module.checkpoint_core_attention = False  # it recomputes by itself, from inputs that Megatron's does not pass
    if pre_process and model_config.embedding_scale is not None:
        # Megatron's embedding has no factor; a hook keeps the names of its parameters
        # and the factor is rounded to the output's dtype first, as transformers does
        factor = model_config.embedding_scale
        model.embedding.word_embeddings.register_forward_hook(
            lambda module, inputs, output: output * torch.tensor(factor, dtype=output.dtype)
        )
    if post_process and model_config.final_logit_softcapping is not None and not reward:
        cap = model_config.final_logit_softcapping
        model.output_layer.register_forward_hook(
            lambda module, inputs, output: (cap * torch.tanh(output[0] / cap), output[1])  # logits and bias
        )
    return model


def _choose_rotation(model_config: ModelConfig) -> Literal["yarn", "rope", "mrope"]:
    """Return Megatron's name of the positions; latent attention computes its own yarn."""
    scaling = model_config.rope_scaling
    if scaling is not None and scaling.type == "yarn" and not model_config.multi_latent_attention:
        return "yarn"
    return "rope" if model_config.vision is None else "mrope"


def _fit_rotary(model: GPTModel, config: TransformerConfig, model_config: ModelConfig) -> None:
    """Give a model the rotary angles that Megatron's own class does not compute."""
    scaling = model_config.rope_scaling
    if model_config.vision is not None:
        # Megatron's has no interleaved sections, and slices the positions, which are this rank's already
        rotary: Any = MultimodalRotary(model.rotary_pos_emb.inv_freq, model_config.vision)
        model.rotary_pos_emb = rotary
    if scaling is not None and scaling.type != "yarn":
        # Megatron's own rope scaling fixes every constant of Llama 3.1 but the factor, and has no linear scaling
        embedding = model.rotary_pos_emb
        scaled = _scale_frequencies(embedding.inv_freq.float().cpu(), scaling)
        embedding.inv_freq = scaled.to(embedding.inv_freq.device)
    if model_config.local_rotary_base is not None:
        local = RotaryEmbedding(
            config.kv_channels or 0,
            model_config.rotary_percent,
            config.rotary_interleaved,
            rotary_base=cast(int, model_config.local_rotary_base),
            cp_group=model.rotary_pos_emb.cp_group,
        )

        # `TwoBaseAttention` takes its half; angles from yarn come with a factor, which the layers compute themselves
        def append_local(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
            angles, *factor = output if isinstance(output, tuple) else (output,)
            both = torch.cat([angles, local(*inputs, **named)], -1)
            return (both, *factor) if factor else both

        model.rotary_pos_emb.register_forward_hook(append_local, with_kwargs=True)


def _scale_frequencies(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Return rotary frequencies after ``linear`` or ``llama3`` scaling. [rotary_dim / 2] float32."""
    if scaling.type == "linear":
        return inv_freq / scaling.factor
    wavelength = 2 * math.pi / inv_freq
    low = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high = scaling.original_max_position_embeddings / scaling.high_freq_factor
    blend = (scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * inv_freq / scaling.factor + blend * inv_freq
    stretched = torch.where(wavelength > low, inv_freq / scaling.factor, blended)
    return torch.where(wavelength < high, inv_freq, stretched)
