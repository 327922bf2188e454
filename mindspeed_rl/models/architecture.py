"""The Architecture that every model file provides, and the weight rows that most of them share."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, SupportsIndex

from mindspeed_rl.models import ARCHITECTURES, find_architecture
from mindspeed_rl.models.model_config import HfConfig, ModelConfig
from mindspeed_rl.models.weights import (
    COLUMNS,
    ROWS,
    Concat,
    FuseQkv,
    GroupedFc1,
    GroupedFc2,
    Split,
    WeightOp,
)


@dataclass(frozen=True)
class ExpertPacking:
    """Storage of the experts of a rank: one module each ("local") or stacked for grouped GEMM ("grouped").

    ``num_groups`` is the number of expert ranks (EP, or EP x TP with moe_tp_extend_ep); it matters for "grouped" only,
    where one parameter has all the experts of a rank.
    """

    kind: Literal["local", "grouped"] = "local"
    num_groups: int = 1


@dataclass(frozen=True)
class ExpertNames:
    """Names of the experts that transformers 5 may store fused as ``mlp.experts.gate_up_proj`` and ``down_proj``.

    ``block`` is the module of router and experts; ``gate``, ``up``, ``down`` are the projections of one expert. Where
    ``may_be_transposed`` is set, published checkpoints have the fused tensors with inputs before outputs, and are written so
    here. Where ``stacked`` is set, every checkpoint has them so, weights and biases, with gate and up in alternate columns: see
    `checkpoint.stacked_experts`.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    may_be_transposed: bool = False
    stacked: bool = False


@dataclass(frozen=True)
class Architecture:
    """One family of models.

    Args:
        name: our name, the model file's name.
        hf_classes: entries of ``architectures`` in config.json that are this family.
        model_types: ``model_type`` values of config.json.
        upstream_names: ``--model-type-hf`` values of MindSpeed-LLM's converters that mean this family.
        read_model_config: config.json -> ModelConfig; ValueError names a key that is missing or has an unsupported value.
        read_layer_ops: (model_config, global layer index, expert packing) -> rows of one decoder layer.
        legacy: whether Megatron's pre-core ("legacy") layout can express the model.
        read_mtp_ops: (model_config, prediction layer, expert packing) -> rows of a multi-token-prediction layer, if it has any.
        read_copies: model_config -> HF tensors that repeat another one and that Megatron does not store: {copy: owner}.
        text_prefix: prefix of the language model's weights in an HF checkpoint; `read_layer_ops` and the like name them with
            "model.".
        read_tower_ops: model_config -> rows of the vision tower and its projector, if the family has one.
        add_published_tower: a language model -> the same with the tower of the published models, for plans without config.json.
        expert_names: names of router and experts in ``read_layer_ops``, where transformers stores experts fused.
        packs: rows may follow each other in one sequence in transformers' module; else they are padded there.
        module_obstacle: why transformers' module does not train under these names of weights; empty where it does.
        kept_in_float32: what transformers' module keeps in float32 in every format, such as a weight; empty for nothing.
    """

    name: str
    hf_classes: tuple[str, ...]
    model_types: tuple[str, ...]
    upstream_names: tuple[str, ...]
    read_model_config: Callable[[HfConfig], ModelConfig]
    read_layer_ops: Callable[[ModelConfig, int, ExpertPacking], list[WeightOp]]
    legacy: bool = False
    read_mtp_ops: Callable[[ModelConfig, int, ExpertPacking], list[WeightOp]] | None = None
    read_copies: Callable[[ModelConfig], dict[str, str]] | None = None
    text_prefix: str = "model."
    read_tower_ops: Callable[[ModelConfig], list[WeightOp]] | None = None
    add_published_tower: Callable[[ModelConfig], ModelConfig] | None = None
    expert_names: ExpertNames = ExpertNames()
    packs: bool = True
    module_obstacle: str = ""
    kept_in_float32: str = ""

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """Pickle a registered family by name: its functions may be lambdas, and plans of models travel to other processes."""
        if self.name in ARCHITECTURES:
            return find_architecture, (self.name,)
        return super().__reduce_ex__(protocol)

    def weight_ops(self, model_config: ModelConfig, experts: ExpertPacking | None = None) -> list[WeightOp]:
        """Return every parameter of the model, in the order of the forward pass, under global names."""
        packing = experts or ExpertPacking()
        hidden = model_config.hidden_size
        embedding = WeightOp(
            "embedding.word_embeddings.weight",
            ("model.embed_tokens.weight",),
            ((model_config.vocab_size, hidden),),
            splits=(_vocab_split(model_config),),
            section="pre",
        )
        ops = [embedding]
        for layer in range(model_config.num_layers):
            ops += self.read_layer_ops(model_config, layer, packing)
        for layer in range(model_config.mtp_num_layers):
            if self.read_mtp_ops is None:
                raise ValueError(f"{self.name} has no multi-token-prediction layers; mtp_num_layers must be 0")
            ops += self.read_mtp_ops(model_config, layer, packing)
        ops += _head_ops(model_config)
        if self.text_prefix != "model.":
            ops = [replace(op, hf=tuple(re.sub(r"^model\.", self.text_prefix, name) for name in op.hf)) for op in ops]
        ops[1:1] = self.tower_ops(model_config)
        return ops

    def tower_ops(self, model_config: ModelConfig) -> list[WeightOp]:
        """Return the parameters of the vision tower alone; none for a model of text."""
        if self.read_tower_ops is None or model_config.vision is None:
            return []
        return self.read_tower_ops(model_config)

    def list_left_out(self, model_config: ModelConfig, hf_config: HfConfig) -> list[WeightOp]:
        """Return the weights of the published tower where the model is built without it (`language_model_only`).

        Args:
            hf_config: config.json of the published model.
        """
        if self.read_tower_ops is None or model_config.vision is not None:
            return []
        return self.read_tower_ops(self.read_model_config(hf_config))

    def get_module_name(self, name: str) -> str:
        """Return the name of a weight in transformers' model, whose tower and language model are always below `model.`."""
        if self.read_tower_ops is None or self.text_prefix != "model.":
            return name
        prefix = "model." if name.startswith("visual.") else "model.language_model."
        return re.sub(r"^(model\.)?(?!lm_head)", prefix, name)

    @property
    def head_name(self) -> str:
        """Name of the head's tensor, where the model has one of its own."""
        return "lm_head.weight"

    def hf_copies(self, model_config: ModelConfig) -> dict[str, str]:
        """Return the HF tensors that no row names because they repeat another HF tensor: {copy: owner}."""
        return {} if self.read_copies is None else self.read_copies(model_config)


# ---------------------------------------------------------------------- rows shared by the families


def _vocab_split(model_config: ModelConfig) -> Split:
    padded = model_config.padded_vocab_size if model_config.padded_vocab_size != model_config.vocab_size else 0
    return Split(dim=0, size=model_config.vocab_size if padded else 0, padded=padded)


def _head_ops(model_config: ModelConfig) -> list[WeightOp]:
    """Return final norm and head: vocabulary logits, a tied copy of the embedding, or one score."""
    hidden = model_config.hidden_size
    ops = [WeightOp("decoder.final_layernorm.weight", ("model.norm.weight",), ((hidden,),), section="post")]
    if model_config.head == "reward":
        # split along its input, as upstream's
        return [*ops, WeightOp("rm_head.weight", ("score.weight",), ((1, hidden),), splits=(COLUMNS,), section="post")]
    tied = not model_config.untie_embeddings_and_output_weights
    head = WeightOp(
        "output_layer.weight",
        ("model.embed_tokens.weight" if tied else "lm_head.weight",),
        ((model_config.vocab_size, hidden),),
        splits=(_vocab_split(model_config),),
        section="post",
        copy_of_tied=tied,
    )
    return [*ops, head]


def norm_op(mcore: str, hf: str, size: int, layer: int) -> WeightOp:
    """Return a norm weight, the same on every rank."""
    return WeightOp(mcore, (hf,), ((size,),), layer=layer)


def attention_ops(model_config: ModelConfig, layer: int) -> list[WeightOp]:
    """Return input norm, fused qkv (weight and bias), output projection and QK norms, with Llama's HF names."""
    mcore, hf = f"decoder.layers.{layer}", f"model.layers.{layer}"
    hidden, head_dim = model_config.hidden_size, model_config.kv_channels
    queries = model_config.num_attention_heads // model_config.num_query_groups
    rows = (model_config.num_attention_heads * head_dim, *[model_config.num_query_groups * head_dim] * 2)
    # a rank has full query groups: no key or value head is split
    splits = (Split(0, unit=queries * head_dim), Split(0, unit=head_dim), Split(0, unit=head_dim))
    ops = [norm_op(f"{mcore}.input_layernorm.weight", f"{hf}.input_layernorm.weight", hidden, layer)]
    for kind in ("weight", "bias") if model_config.add_qkv_bias else ("weight",):
        shapes = tuple((count, hidden) if kind == "weight" else (count,) for count in rows)
        names = tuple(f"{hf}.self_attn.{part}_proj.{kind}" for part in "qkv")
        packing = FuseQkv(queries, head_dim)
        ops.append(WeightOp(f"{mcore}.self_attention.linear_qkv.{kind}", names, shapes, packing, splits, layer=layer))
    if model_config.qk_layernorm:
        for part, count, split in zip("qk", rows, splits):
            mcore_name, hf_name = f"self_attention.{part}_layernorm.weight", f"self_attn.{part}_norm.weight"
            if model_config.qk_layernorm_over_heads:
                ops.append(WeightOp(f"{mcore}.{mcore_name}", (f"{hf}.{hf_name}",), ((count,),), splits=(split,), layer=layer))
            else:
                ops.append(norm_op(f"{mcore}.{mcore_name}", f"{hf}.{hf_name}", head_dim, layer))
    ops.append(attention_output_op(model_config, layer, rows[0]))
    return ops


def attention_output_op(model_config: ModelConfig, layer: int, input_size: int) -> WeightOp:
    """Return the projection after attention; ``input_size`` is heads x value head size."""
    return WeightOp(
        f"decoder.layers.{layer}.self_attention.linear_proj.weight",
        (f"model.layers.{layer}.self_attn.o_proj.weight",),
        ((model_config.hidden_size, input_size),),
        # full heads, as the attention before it puts them out
        splits=(Split(1, unit=input_size // model_config.num_attention_heads),),
        layer=layer,
    )


def fused_gated_mlp_ops(model_config: ModelConfig, layer: int) -> list[WeightOp]:
    """Return a gated MLP whose HF gate_up_proj is [gate; up] as Megatron's, each half divided over ranks."""
    mcore, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
    hidden, ffn = model_config.hidden_size, model_config.ffn_hidden_size
    name, halves = (f"{hf}.gate_up_proj.weight",), (Split(0, blocks=2),)
    fc2 = WeightOp(f"{mcore}.linear_fc2.weight", (f"{hf}.down_proj.weight",), ((hidden, ffn),), splits=(COLUMNS,), layer=layer)
    return [WeightOp(f"{mcore}.linear_fc1.weight", name, ((2 * ffn, hidden),), splits=halves, layer=layer), fc2]


_GATED_MLP = ("gate_proj", "up_proj", "down_proj")


def gated_mlp_ops(
    mcore: str, hf: str, layer: int, hidden: int, ffn: int, names: tuple[str, str, str] = _GATED_MLP
) -> list[WeightOp]:
    """Return a gated MLP: fc1 is [gate; up] on every rank, fc2 is split over its columns."""
    gate, up, down = (f"{hf}.{name}.weight" for name in names)
    fc1_shapes = ((ffn, hidden), (ffn, hidden))
    return [
        WeightOp(f"{mcore}.linear_fc1.weight", (gate, up), fc1_shapes, Concat((1, 1)), (ROWS, ROWS), layer=layer),
        WeightOp(f"{mcore}.linear_fc2.weight", (down,), ((hidden, ffn),), splits=(COLUMNS,), layer=layer),
    ]


def expert_ops(
    model_config: ModelConfig, layer: int, hf: str, packing: ExpertPacking, names: tuple[str, str, str] = _GATED_MLP
) -> list[WeightOp]:
    """Return the experts of one decoder layer; ``hf`` is the HF prefix before the expert's index."""
    mcore = f"decoder.layers.{layer}.mlp.experts"
    hidden, ffn, count = model_config.hidden_size, model_config.moe_ffn_hidden_size, model_config.num_moe_experts
    assert count is not None and ffn is not None
    if packing.kind == "local":
        return [
            replace(op, axis="etp", experts=(expert,))
            for expert in range(count)
            for op in gated_mlp_ops(f"{mcore}.local_experts.{expert}", f"{hf}.{expert}", layer, hidden, ffn, names)
        ]
    size = count // packing.num_groups
    ops = []
    for start in range(0, count, size):
        members = tuple(range(start, start + size))
        fc1 = tuple(f"{hf}.{expert}.{name}.weight" for expert in members for name in names[:2])
        fc2 = tuple(f"{hf}.{expert}.{names[2]}.weight" for expert in members)
        for name, hf_names, shape, how, split in (
            ("weight1", fc1, (ffn, hidden), GroupedFc1(size), ROWS),
            ("weight2", fc2, (hidden, ffn), GroupedFc2(size), COLUMNS),
        ):
            count_in = len(hf_names)
            ops.append(
                WeightOp(
                    # with the experts' indices, because every rank's parameter has the same name in Megatron
                    f"{mcore}.{name}[{start}:{start + size}]",
                    hf_names,
                    (shape,) * count_in,
                    how,
                    (split,) * count_in,
                    axis="etp",
                    layer=layer,
                    experts=members,
                )
            )
    return ops


def router_ops(model_config: ModelConfig, layer: int, hf: str, bias: str | None = None) -> list[WeightOp]:
    """Return the router, and its load-balancing bias (a float32 buffer) if the family has one."""
    mcore = f"decoder.layers.{layer}.mlp.router"
    assert model_config.num_moe_experts is not None
    shape = (model_config.num_moe_experts, model_config.hidden_size)
    ops = [WeightOp(f"{mcore}.weight", (f"{hf}.weight",), (shape,), layer=layer)]
    if bias is not None:
        ops.append(WeightOp(f"{mcore}.expert_bias", (f"{hf}.{bias}",), (shape[:1],), layer=layer, buffer=True))
    return ops


def dense_mlp_ops(model_config: ModelConfig, layer: int) -> list[WeightOp]:
    """Return the norm before the MLP and a gated MLP, with Llama's HF names."""
    mcore, hf = f"decoder.layers.{layer}", f"model.layers.{layer}"
    return [
        mlp_norm_op(model_config, layer),
        *gated_mlp_ops(f"{mcore}.mlp", f"{hf}.mlp", layer, model_config.hidden_size, model_config.ffn_hidden_size),
    ]


def mlp_norm_op(model_config: ModelConfig, layer: int, hf_name: str = "post_attention_layernorm") -> WeightOp:
    """Return the norm before the MLP."""
    mcore, hf = f"decoder.layers.{layer}.pre_mlp_layernorm.weight", f"model.layers.{layer}.{hf_name}.weight"
    return norm_op(mcore, hf, model_config.hidden_size, layer)


def dense_layer_ops(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    """Return a Llama-like decoder layer: attention, a norm, a gated MLP."""
    return [*attention_ops(model_config, layer), *dense_mlp_ops(model_config, layer)]
