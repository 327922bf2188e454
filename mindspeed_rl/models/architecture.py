"""What every model file provides: an Architecture, and the weight rows that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from mindspeed_rl.models.network import Network
from mindspeed_rl.models.weights import (
    COLUMNS,
    REPLICATED,
    ROWS,
    Concat,
    FuseQkv,
    GroupedFc1,
    GroupedFc2,
    Rename,
    Split,
    WeightOp,
)


@dataclass(frozen=True)
class ExpertPacking:
    """How a rank stores its experts: one module each ("local") or stacked for grouped GEMM ("grouped").

    ``num_groups`` is the number of expert ranks (EP, or EP x TP with moe_tp_extend_ep); it matters for "grouped" only,
    where one parameter holds all the experts of a rank.
    """

    kind: Literal["local", "grouped"] = "local"
    num_groups: int = 1


@dataclass(frozen=True)
class Architecture:
    """One family of models.

    Args:
        name: our name, the model file's name.
        hf_classes: entries of ``architectures`` in config.json that are this family.
        model_types: ``model_type`` values of config.json.
        upstream_names: ``--model-type-hf`` values of MindSpeed-LLM's converters that mean this family.
        read_network: config.json -> Network.
        read_layer_ops: (network, global layer number, expert packing) -> rows of one decoder layer.
        legacy: whether Megatron's pre-core ("legacy") layout can express the model.
        mtp_ops: (network, prediction layer, expert packing) -> rows of a multi-token-prediction layer, if it has any.
    """

    name: str
    hf_classes: tuple[str, ...]
    model_types: tuple[str, ...]
    upstream_names: tuple[str, ...]
    read_network: Callable[[Mapping[str, Any]], Network]
    read_layer_ops: Callable[[Network, int, ExpertPacking], list[WeightOp]]
    legacy: bool = False
    read_mtp_ops: Callable[[Network, int, ExpertPacking], list[WeightOp]] | None = None

    def network(self, hf_config: Mapping[str, Any]) -> Network:
        """Shape facts from a config.json; ValueError names a key that is missing or has an unsupported value."""
        return self.read_network(hf_config)

    def weight_ops(self, network: Network, experts: ExpertPacking | None = None) -> list[WeightOp]:
        """Every parameter of the model, in the order of the forward pass, under global names."""
        packing = experts or ExpertPacking()
        ops = [embedding_op(network)]
        for layer in range(network.num_layers):
            ops += self.read_layer_ops(network, layer, packing)
        for layer in range(network.mtp_num_layers):
            if self.read_mtp_ops is None:
                raise ValueError(f"{self.name} has no multi-token-prediction layers; mtp_num_layers must be 0")
            ops += self.read_mtp_ops(network, layer, packing)
        return ops + head_ops(network)


# ---------------------------------------------------------------------- rows shared by the families


def vocab_split(network: Network) -> Split:
    """Rows over ranks, padded to ``padded_vocab_size``."""
    padded = network.padded_vocab_size if network.padded_vocab_size != network.vocab_size else 0
    return Split(dim=0, size=network.vocab_size if padded else 0, padded=padded)


def embedding_op(network: Network) -> WeightOp:
    """The word embedding."""
    return WeightOp(
        "embedding.word_embeddings.weight", ("model.embed_tokens.weight",), splits=(vocab_split(network),), place="pre"
    )


def head_ops(network: Network) -> list[WeightOp]:
    """Final norm and head: vocabulary logits, a tied copy of the embedding, or one score."""
    ops = [WeightOp("decoder.final_layernorm.weight", ("model.norm.weight",), place="post")]
    if network.head == "reward":
        return [*ops, WeightOp("rm_head.weight", ("score.weight",), splits=(COLUMNS,), place="post")]
    tied = not network.untie_embeddings_and_output_weights
    hf_name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    return [*ops, WeightOp("output_layer.weight", (hf_name,), splits=(vocab_split(network),), place="post", copy_of_tied=tied)]


def norm_op(mcore: str, hf: str, layer: int) -> WeightOp:
    """A norm weight, the same on every rank."""
    return WeightOp(mcore, (hf,), layer=layer)


def attention_ops(network: Network, layer: int) -> list[WeightOp]:
    """Input norm, fused qkv (weight and bias), output projection and QK norms, with Llama's HF names."""
    mcore, hf = f"decoder.layers.{layer}", f"model.layers.{layer}"
    queries, head_dim = network.num_attention_heads // network.num_query_groups, network.kv_channels
    packing = FuseQkv(queries, head_dim)
    group_rows = (Split(0, unit=queries * head_dim), Split(0, unit=head_dim), Split(0, unit=head_dim))
    ops = [norm_op(f"{mcore}.input_layernorm.weight", f"{hf}.input_layernorm.weight", layer)]
    for kind in ("weight", "bias") if network.add_qkv_bias else ("weight",):
        names = tuple(f"{hf}.self_attn.{part}_proj.{kind}" for part in "qkv")
        ops.append(WeightOp(f"{mcore}.self_attention.linear_qkv.{kind}", names, packing, group_rows, layer=layer))
    if network.qk_layernorm:
        for part in "qk":
            ops.append(norm_op(f"{mcore}.self_attention.{part}_layernorm.weight", f"{hf}.self_attn.{part}_norm.weight", layer))
    ops.append(
        WeightOp(
            f"{mcore}.self_attention.linear_proj.weight", (f"{hf}.self_attn.o_proj.weight",), splits=(COLUMNS,), layer=layer
        )
    )
    return ops


GATED_MLP = ("gate_proj", "up_proj", "down_proj")


def gated_mlp_ops(mcore: str, hf: str, layer: int, names: tuple[str, str, str] = GATED_MLP) -> list[WeightOp]:
    """A gated MLP: fc1 is [gate; up] on every rank, fc2 is split over its columns."""
    gate, up, down = (f"{hf}.{name}.weight" for name in names)
    return [
        WeightOp(f"{mcore}.linear_fc1.weight", (gate, up), Concat((1, 1)), (ROWS, ROWS), layer=layer),
        WeightOp(f"{mcore}.linear_fc2.weight", (down,), splits=(COLUMNS,), layer=layer),
    ]


def expert_ops(
    network: Network,
    mcore: str,
    hf: str,
    layer: int,
    packing: ExpertPacking,
    names: tuple[str, str, str] = GATED_MLP,
) -> list[WeightOp]:
    """The experts of one layer; ``hf`` is the HF prefix before the expert's number."""
    count = network.num_moe_experts
    assert count is not None
    if packing.kind == "local":
        ops = []
        for expert in range(count):
            for op in gated_mlp_ops(f"{mcore}.local_experts.{expert}", f"{hf}.{expert}", layer, names):
                ops.append(replace(op, axis="etp", experts=(expert,)))
        return ops
    size = count // packing.num_groups
    ops = []
    for start in range(0, count, size):
        members = tuple(range(start, start + size))
        fc1 = tuple(f"{hf}.{expert}.{name}.weight" for expert in members for name in names[:2])
        fc2 = tuple(f"{hf}.{expert}.{names[2]}.weight" for expert in members)
        span = f"[{start}:{start + size}]"
        for name, hf_names, how, split in (
            ("weight1", fc1, GroupedFc1(size), ROWS),
            ("weight2", fc2, GroupedFc2(size), COLUMNS),
        ):
            ops.append(
                WeightOp(
                    f"{mcore}.{name}{span}", hf_names, how, (split,) * len(hf_names), axis="etp", layer=layer, experts=members
                )
            )
    return ops


def dense_layer_ops(network: Network, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """A Llama-like decoder layer: attention, a norm, a gated MLP."""
    mcore, hf = f"decoder.layers.{layer}", f"model.layers.{layer}"
    return [
        *attention_ops(network, layer),
        norm_op(f"{mcore}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight", layer),
        *gated_mlp_ops(f"{mcore}.mlp", f"{hf}.mlp", layer),
    ]


__all__ = [
    "COLUMNS",
    "REPLICATED",
    "ROWS",
    "Architecture",
    "Concat",
    "ExpertPacking",
    "Rename",
    "Split",
    "WeightOp",
    "attention_ops",
    "dense_layer_ops",
    "embedding_op",
    "expert_ops",
    "gated_mlp_ops",
    "head_ops",
    "norm_op",
    "vocab_split",
]
