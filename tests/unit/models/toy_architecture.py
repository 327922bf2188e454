"""An architecture that the package does not have, in one file as a user would add it: names of its own for norm and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.models.architecture import Architecture, ExpertPacking, attention_ops, gated_mlp_ops, mlp_norm_op
from mindspeed_rl.models.network import Network, read_common
from mindspeed_rl.models.weights import WeightOp


def read_network(hf_config: Mapping[str, Any]) -> Network:
    """Shape facts of a toy config.json."""
    return Network(**read_common(hf_config, "toy"), add_qkv_bias=True)


def layer_ops(network: Network, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """Llama's attention, and an MLP under names of its own."""
    hidden, ffn = network.hidden_size, network.ffn_hidden_size
    mcore, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.feed_forward"
    return [
        *attention_ops(network, layer),
        mlp_norm_op(network, layer, "ffn_norm"),
        *gated_mlp_ops(mcore, hf, layer, hidden, ffn, ("wi_0", "wi_1", "wo")),
    ]


TOY = Architecture(
    name="toy",
    hf_classes=("ToyForCausalLM",),
    model_types=("toy",),
    upstream_names=(),
    read_network=read_network,
    read_layer_ops=layer_ops,
)
