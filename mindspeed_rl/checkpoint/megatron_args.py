"""The settings a Megatron checkpoint carries beside its tensors: written for Megatron, read from Megatron or MindSpeed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.model_config import ModelConfig

#: Where our checkpoints keep the HF config.json they were made from.
_HF_CONFIG_KEY = "hf_config_json"


@dataclass(frozen=True)
class CheckpointArgs:
    """The values that a reader takes from a checkpoint's ``args``; None where they have none.

    ``tp``, ``pp``, ``ep``, ``etp``, ``vpp`` are sizes; ``vpp`` counts chunks per stage.
    """

    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    etp: int | None = None
    vpp: int | None = None
    num_layer_list: tuple[int, ...] | None = None
    noop_layers: tuple[int, ...] = ()
    moe_tp_extend_ep: bool = False
    schedule: str | None = None
    lora_r: int | None = None
    lora_alpha: float | None = None
    hf_config: Mapping[str, Any] | None = None


def parse_layers(value: Any, key: str) -> tuple[int, ...]:
    """Parse layer numbers from what users and Megatron write: "1,2", "1, 2", [1, 2], {1, 2}, None.

    Raises:
        ValueError: an entry is not a number.
    """
    if value is None or value == "":
        return ()
    entries = value.split(",") if isinstance(value, str) else value
    try:
        numbers = [int(str(entry).strip()) for entry in entries if str(entry).strip()]
    except (TypeError, ValueError):
        raise ValueError(f"{key} is {value!r}; expected layer numbers separated by commas, such as 11,13") from None
    return tuple(sorted(numbers)) if isinstance(value, (set, frozenset)) else tuple(numbers)


def read_args(args: object) -> CheckpointArgs:
    """Read the layout from a checkpoint's ``args`` (a Namespace, a dict, or nothing)."""
    values: Mapping[str, Any] = (
        vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, Mapping) else {}
    )

    def size(name: str) -> int | None:
        value = values.get(name)
        return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else None

    config = values.get(_HF_CONFIG_KEY)
    layers = parse_layers(values.get("num_layer_list"), "num_layer_list")
    alpha = values.get("lora_alpha")
    pp, num_layers, per_chunk = (
        size("pipeline_model_parallel_size"),
        size("num_layers"),
        size("num_layers_per_virtual_pipeline_stage"),
    )
    vpp = size("virtual_pipeline_model_parallel_size")
    if vpp is None and per_chunk and num_layers and pp:
        vpp = num_layers // pp // per_chunk
    return CheckpointArgs(
        tp=size("tensor_model_parallel_size"),
        pp=pp,
        ep=size("expert_model_parallel_size"),
        etp=size("expert_tensor_parallel_size"),
        vpp=vpp,
        num_layer_list=layers or None,
        noop_layers=parse_layers(values.get("noop_layers"), "noop_layers"),
        moe_tp_extend_ep=bool(values.get("moe_tp_extend_ep")),
        schedule="dualpipev" if values.get("schedules_method") == "dualpipev" else None,
        lora_r=size("lora_r"),
        lora_alpha=float(alpha) if isinstance(alpha, (int, float)) else None,
        hf_config=json.loads(config) if isinstance(config, str) else None,
    )


def write_args(
    model_config: ModelConfig,
    layout: Layout,
    hf_config: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    make_vocab_size_divisible_by: int = 1,
    grouped_gemm: bool = False,
    transformer_impl: str = "local",
    legacy: bool = False,
) -> argparse.Namespace:
    """Build the ``args`` of a checkpoint, under Megatron's names, with the HF config inside."""
    vpp = layout.vpp if layout.vpp > 1 else None
    moe = model_config.num_moe_experts is not None
    return argparse.Namespace(
        num_layers=layout.num_slots,
        hidden_size=model_config.hidden_size,
        ffn_hidden_size=model_config.ffn_hidden_size,
        num_attention_heads=model_config.num_attention_heads,
        group_query_attention=model_config.num_query_groups != model_config.num_attention_heads,
        num_query_groups=model_config.num_query_groups,
        kv_channels=model_config.kv_channels,
        max_position_embeddings=model_config.max_position_embeddings,
        seq_length=model_config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=model_config.rotary_base,
        rotary_percent=model_config.rotary_percent,
        swiglu=True,
        normalization=model_config.normalization,
        norm_epsilon=model_config.norm_epsilon,
        add_bias_linear=False,
        add_qkv_bias=model_config.add_qkv_bias,
        qk_layernorm=model_config.qk_layernorm,
        post_norm=model_config.post_norm,
        untie_embeddings_and_output_weights=model_config.untie_embeddings_and_output_weights,
        vocab_size=model_config.vocab_size,
        padded_vocab_size=model_config.padded_vocab_size,
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        orm=model_config.head == "reward",
        num_experts=model_config.num_moe_experts,
        moe_ffn_hidden_size=model_config.moe_ffn_hidden_size,
        moe_router_topk=model_config.moe_router_topk if moe else None,
        moe_shared_expert_intermediate_size=model_config.moe_shared_expert_intermediate_size,
        moe_grouped_gemm=grouped_gemm,
        moe_tp_extend_ep=layout.moe_tp_extend_ep,
        multi_latent_attention=model_config.multi_latent_attention,
        q_lora_rank=model_config.q_lora_rank,
        kv_lora_rank=model_config.kv_lora_rank,
        qk_head_dim=model_config.qk_head_dim,
        qk_pos_emb_head_dim=model_config.qk_pos_emb_head_dim,
        v_head_dim=model_config.v_head_dim,
        mtp_num_layers=model_config.mtp_num_layers or None,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=vpp,
        num_layers_per_virtual_pipeline_stage=layout.num_slots // layout.pp // layout.vpp if vpp else None,
        num_layer_list=",".join(map(str, layout.num_layer_list)) if layout.num_layer_list else None,
        noop_layers=",".join(map(str, layout.noop_layers)) or None,
        schedules_method=layout.schedule,
        expert_model_parallel_size=layout.ep,
        # Megatron derives TP for a dense model too
        expert_tensor_parallel_size=layout.expert_tp_size if moe else layout.tp,
        use_mcore_models=not legacy,
        transformer_impl=transformer_impl,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        iteration=1,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        **{_HF_CONFIG_KEY: json.dumps(dict(hf_config))},
    )
