"""An architecture that the package does not have, in one file as a user would add it: names of its own for norm and MLP."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.architecture import Architecture, ExpertPacking, attention_ops, gated_mlp_ops, mlp_norm_op
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_common
from mindspeed_rl.models.weights import WeightOp


def read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a toy model."""
    return replace(read_common(hf_config, "toy"), add_qkv_bias=True)


def layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """Llama's attention, and an MLP under names of its own."""
    hidden, ffn = model_config.hidden_size, model_config.ffn_hidden_size
    mcore, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.feed_forward"
    return [
        *attention_ops(model_config, layer),
        mlp_norm_op(model_config, layer, "ffn_norm"),
        *gated_mlp_ops(mcore, hf, layer, hidden, ffn, ("wi_0", "wi_1", "wo")),
    ]


TOY = Architecture(
    name="toy",
    hf_classes=("ToyForCausalLM",),
    model_types=("toy",),
    upstream_names=(),
    read_model_config=read_model_config,
    read_layer_ops=layer_ops,
)
