"""MiMo: Qwen2 with multi-token-prediction layers."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture, ExpertPacking, dense_layer_ops, norm_op
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.qwen2 import read_qwen
from mindspeed_rl.models.weights import ROWS, SwapHalves, WeightOp


def _prediction_layer_ops(model_config: ModelConfig, index: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return a multi-token-prediction layer; HF multiplies [hidden state; embedding], Megatron [embedding; hidden state]."""
    hf, mcore, hidden = f"model.mtp_layers.{index}", f"mtp.layers.{index}", model_config.hidden_size
    decoder, source = f"decoder.layers.{index}.", f"model.layers.{index}."
    projection = (f"{hf}.input_proj.weight",)
    ops = [
        norm_op(f"{mcore}.enorm.weight", f"{hf}.token_layernorm.weight", hidden, index),
        norm_op(f"{mcore}.hnorm.weight", f"{hf}.hidden_layernorm.weight", hidden, index),
        WeightOp(f"{mcore}.eh_proj.weight", projection, ((hidden, 2 * hidden),), SwapHalves(), (ROWS,), layer=index),
        *(
            replace(
                op,
                mcore=op.mcore.replace(decoder, f"{mcore}.transformer_layer."),
                hf=tuple(name.replace(source, f"{hf}.") for name in op.hf),
            )
            for op in dense_layer_ops(model_config, index, packing)
        ),
        norm_op(f"{mcore}.final_layernorm.weight", f"{hf}.final_layernorm.weight", hidden, index),
    ]
    return [replace(op, section="mtp") for op in ops]


MIMO = Architecture(
    name="mimo",
    hf_classes=("MiMoForCausalLM",),
    model_types=("mimo",),
    upstream_names=(),
    read_model_config=lambda hf_config: read_qwen(hf_config, "mimo", biased_key="attention_bias"),
    read_layer_ops=dense_layer_ops,
    read_mtp_ops=_prediction_layer_ops,
    module_obstacle="transformers has no class of its own for it",
)
