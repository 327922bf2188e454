"""gpt-oss: attention sinks, windows in every other layer, biases everywhere, experts with a clamped activation."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import (
    Architecture,
    ExpertNames,
    ExpertPacking,
    attention_ops,
    expert_ops,
    mlp_norm_op,
    router_ops,
)
from mindspeed_rl.models.model_config import (
    HfConfig,
    ModelConfig,
    read_common,
    read_flag,
    read_float,
    read_num_experts,
    read_size,
    read_windows,
)
from mindspeed_rl.models.weights import REPLICATED, ROWS, Concat, WeightOp

_YARN: HfConfig = {
    **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"truncate": False, "original_max_position_embeddings": 4096},
}
#: values of transformers' class for keys that config.json leaves out
_DEFAULTS: HfConfig = {
    **{"num_hidden_layers": 36, "num_local_experts": 128, "vocab_size": 201088, "hidden_size": 2880, "head_dim": 64},
    **{"intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128},
    **{"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_experts_per_tok": 4, "rope_theta": 150000.0},
}


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a gpt-oss; the router's balancing coefficient of its config.json (0.9) is not taken."""
    if not hf_config.get("rope_parameters") and not hf_config.get("rope_scaling"):
        base = {"rope_theta": hf_config["rope_theta"]} if "rope_theta" in hf_config else {}
        hf_config = {**hf_config, "rope_parameters": {**_YARN, **base}}
    hf_config = {**_DEFAULTS, **hf_config}
    if not read_flag(hf_config, "attention_bias", True):
        raise ValueError("config.json sets attention_bias false; gpt-oss is converted with it")
    if (alpha := read_float(hf_config, "swiglu_alpha", 1.702)) != 1.702:
        raise ValueError(f"config.json has swiglu_alpha {alpha}; supported is 1.702")
    common = read_common(hf_config, "gpt_oss")
    return replace(
        read_windows(hf_config, common, full_every=2),
        add_qkv_bias=True,
        add_bias_linear=True,
        attention_sinks=True,
        activation="clamped_swish",
        activation_limit=read_float(hf_config, "swiglu_limit", 7.0),
        num_moe_experts=read_num_experts(hf_config),
        moe_layers=tuple(range(common.num_layers)),
        moe_ffn_hidden_size=common.ffn_hidden_size,
        moe_router_topk=read_size(hf_config, "num_experts_per_tok"),
    )


def _bias_ops(model_config: ModelConfig, layer: int, hf: str, packing: ExpertPacking) -> list[WeightOp]:
    """Return the biases of the experts; ``hf`` is the HF prefix before the expert's index."""
    mcore, count = f"decoder.layers.{layer}.mlp.experts", model_config.num_moe_experts
    hidden, ffn = model_config.hidden_size, model_config.moe_ffn_hidden_size
    assert count is not None and ffn is not None
    size = 1 if packing.kind == "local" else count // packing.num_groups
    ops = []
    for start in range(0, count, size):
        members = tuple(range(start, start + size))
        names = [f"{mcore}.bias{i}[{start}:{start + size}]" for i in (1, 2)]
        if packing.kind == "local":
            names = [f"{mcore}.local_experts.{start}.linear_fc{i}.bias" for i in (1, 2)]
        fc1 = tuple(f"{hf}.{expert}.{part}_proj.bias" for expert in members for part in ("gate", "up"))
        fc2 = tuple(f"{hf}.{expert}.down_proj.bias" for expert in members)
        first = WeightOp(names[0], fc1, ((ffn,),) * len(fc1), Concat((1,) * len(fc1)), (ROWS,) * len(fc1), layer=layer)
        second = WeightOp(names[1], fc2, ((hidden,),) * size, Concat((1,) * size), (REPLICATED,) * size, layer=layer)
        ops += [replace(op, axis="etp", experts=members) for op in (first, second)]
    return ops


def _layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return a gpt-oss layer."""
    mcore, hf = f"decoder.layers.{layer}", f"model.layers.{layer}"
    hidden, heads = model_config.hidden_size, model_config.num_attention_heads
    sinks = f"{mcore}.self_attention.core_attention.softmax_offset"
    biases = (
        (f"{mcore}.self_attention.linear_proj.bias", f"{hf}.self_attn.o_proj.bias", hidden),
        (f"{mcore}.mlp.router.bias", f"{hf}.mlp.router.bias", model_config.num_moe_experts or 0),
    )
    return [
        *attention_ops(model_config, layer),
        WeightOp(sinks, (f"{hf}.self_attn.sinks",), ((heads,),), splits=(ROWS,), layer=layer),
        mlp_norm_op(model_config, layer),
        *router_ops(model_config, layer, f"{hf}.mlp.router"),
        *(WeightOp(name, (hf_name,), ((size,),), layer=layer) for name, hf_name, size in biases),
        *expert_ops(model_config, layer, f"{hf}.mlp.experts", packing),
        *_bias_ops(model_config, layer, f"{hf}.mlp.experts", packing),
    ]


GPT_OSS = Architecture(
    name="gpt_oss",
    hf_classes=("GptOssForCausalLM", "GptOssForSequenceClassification"),
    model_types=("gpt_oss",),
    upstream_names=("gpt-oss",),
    read_model_config=_read_model_config,
    read_layer_ops=_layer_ops,
    expert_names=ExpertNames(stacked=True),
)
