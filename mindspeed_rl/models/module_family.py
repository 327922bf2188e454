"""Families outside the table of architectures, which only transformers computes, with the weights of its module.

`engine: fsdp` trains them. Shapes and names are read from a module without memory, once on the driver; plans carry them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.files import read_json
from mindspeed_rl.models.architecture import Architecture, ExpertPacking
from mindspeed_rl.models.model_config import HfConfig, ModelConfig
from mindspeed_rl.models.weights import WeightOp

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from mindspeed_rl.models.hf_module import TensorPlace


#: model types whose attention computes packed rows: positions and the bounds of sequences are all that it asks for
_PACKED = ("gpt_neox", "phi3")
#: name of the key that allows these families
_ENGINE = "engine: fsdp"


@dataclass(frozen=True)
class ModuleArchitecture(Architecture):
    """A family by its module in transformers; see `Architecture`.

    Args:
        tensors: name, shape and decoder layer of each tensor of a checkpoint, in forward order.
        buffers: those that are buffers, which do not train.
        kept_weight: a weight that its class keeps in float32 whatever the format of the others; empty for none.
        longest: longest row whose tokens have the probabilities that they have in shorter ones; None for any length.
        recomputes: its class can compute the activations of a layer again in the backward pass.
        embedding, head: names of the embedding, and of the head where it is a tensor of its own.
    """

    tensors: tuple[tuple[str, tuple[int, ...], int | None], ...] = ()
    buffers: frozenset[str] = frozenset()
    kept_weight: str = ""
    longest: int | None = None
    recomputes: bool = True
    embedding: str = ""
    head: str | None = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        return object.__reduce_ex__(self, protocol)

    def weight_ops(self, model_config: ModelConfig, experts: ExpertPacking | None = None) -> list[WeightOp]:
        """Return every tensor of the model; experts are separate where checkpoints have them so."""
        ops = []
        for name, shape, index in self.tensors:
            if name == self.embedding:
                ops.append(WeightOp("embedding.word_embeddings.weight", (name,), (shape,), section="pre"))
            elif name == self.head:
                if model_config.head == "lm":
                    ops.append(WeightOp("output_layer.weight", (name,), (shape,), section="post"))
            else:
                section = "post" if index is None else "layer"
                ops.append(WeightOp(name, (name,), (shape,), section=section, layer=index, buffer=name in self.buffers))
        if model_config.head == "reward":
            score = ((1, model_config.hidden_size),)
            ops.append(WeightOp("rm_head.weight", ("score.weight",), score, section="post"))
        return ops

    @property
    def head_name(self) -> str:
        """Name of the head's tensor; empty for a tied one."""
        return self.head or ""

    def check(self, config: MegatronConfig) -> None:
        """Check the keys of a role with such a model.

        Raises:
            ValueError: rows may be too long for it, or the keys name layers of Megatron's or what its class cannot do.
        """
        if config.optimizer == "muon":
            raise ValueError(
                f"optimizer: muon moves matrices that the support table names, and only transformers computes {self.name}; set "
                "optimizer: adam"
            )
        if config.lora_target_modules:
            raise ValueError(
                f"lora_target_modules: {', '.join(config.lora_target_modules)} are layers of the support table's families, and "
                f"only transformers computes {self.name}; leave it out, which trains all weights"
            )
        if config.recompute_granularity == "full" and not self.recomputes:
            raise ValueError(
                f"recompute_granularity: full is not available with {', '.join(self.hf_classes) or self.name}, whose class has "
                "no gradient checkpointing (supports_gradient_checkpointing); leave it out"
            )
        if self.longest is not None and config.seq_length is not None and config.seq_length > self.longest:
            raise ValueError(
                f"seq_length: {config.seq_length} is above the {self.longest} tokens (original_max_position_embeddings) up to "
                f"which frequencies of type longrope do not depend on the length of a row; set it to {self.longest} or less"
            )

    def check_rollout(self, dtype: str, key: str) -> None:
        """Check the format in which the class generates: it mixes the weights that it keeps in float32 with the others.

        A residual in float32, as in Mamba, is accepted: the class casts it before each product.

        Raises:
            ValueError: it is another one than float32, and the class keeps some.
        """
        if dtype != "float32" and self.kept_weight:
            raise ValueError(
                f"{key} {dtype} computes with weights in that format, and transformers' class of {self.name} keeps some in "
                f"float32, such as {self.kept_weight}; set float32"
            )

    def hf_copies(self, model_config: ModelConfig) -> dict[str, str]:
        """Return the name of a tied head, which a checkpoint may have."""
        return {} if self.head is not None else {"lm_head.weight": self.embedding}


def _list_stored(hf_folder: Path) -> list[str]:
    """Return the names of the tensors in a folder; none where it has no weights."""
    from safetensors import safe_open

    index = hf_folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        return sorted(weight_map) if isinstance(weight_map, dict) else []
    names: list[str] = []
    for path in sorted(hf_folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            names += file.keys()
    return names


def read_module_family(
    hf_folder: Path, hf_config: HfConfig, *, trusts_code: bool = False
) -> tuple[ModuleArchitecture, ModelConfig]:
    """Return the family and the shape of a folder's model as transformers' module has them.

    Tensors have the names that they have in the folder, and where it has no weights those that transformers gives them.

    Args:
        hf_folder: folder of the model.
        hf_config: its config.json.
        trusts_code: Python code of the folder may be run, where the installed transformers has no class for the model.

    Raises:
        ValueError: the installed transformers has no class for it, or the class has a form that the engine does not train.
    """
    # imports transformers' models, which a plan of a known family does without
    from mindspeed_rl.models.hf_module import read_hf_config

    path, config = hf_folder / "config.json", read_hf_config(hf_folder, _ENGINE, trusts_code=trusts_code)
    model = _build_trained(config, path)
    classes = tuple(cast(list[str], hf_config.get("architectures") or []))
    try:
        return _read_family(config, model, _list_stored(hf_folder), classes)
    except (ValueError, RuntimeError) as error:  # of transformers' conversions, for sizes of 0
        raise ValueError(f"{path}: {error}") from error


def _build_trained(config: PretrainedConfig, path: Path) -> PreTrainedModel:
    """Return the module of a config without memory.

    Raises:
        ValueError: it has a form that the engine does not train; the message has the path of its config.json.
    """
    import torch

    # imports transformers' models, which a plan of a known family does without; so do those below
    from mindspeed_rl.models.hf_module import build_module, find_obstacle, take_values

    with torch.device("meta"):
        model = take_values(lambda: build_module(config), path)
    if obstacle := find_obstacle(model):
        raise ValueError(f"{path}: engine: fsdp does not train {config.model_type}: {obstacle}.")
    return model


def _match_names(
    model: PreTrainedModel, values: Mapping[str, Tensor], stored: list[str]
) -> dict[str, tuple[TensorPlace, tuple[int, ...]]]:
    """Return place and shape of each tensor of a checkpoint, by the names of a folder or else by those that transformers gives.

    Args:
        values: parameters and buffers that checkpoints have.
        stored: names of the folder's tensors; none without weights.

    Raises:
        ValueError: a value is in no tensor that the class saves.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # deferred as in `_build_trained`
    from mindspeed_rl.models.hf_module import CheckpointNames, find_place

    names, missing = CheckpointNames(model, buffers=True), set[str]()
    for candidates in (stored, list(revert_weight_conversion(model, dict(values)))):
        found = {name: place for name in candidates if (place := find_place(names, name, values)) is not None}
        missing = values.keys() - {place.parameter for place, _ in found.values()}
        if not missing:
            return found
    raise ValueError(f"{type(model).__name__} of transformers does not save {min(missing)}, which engine: fsdp needs.")


def _read_family(
    config: PretrainedConfig, model: PreTrainedModel, stored: list[str], classes: tuple[str, ...]
) -> tuple[ModuleArchitecture, ModelConfig]:
    """Return family and shape of a module; see `read_module_family` and `_match_names`."""
    # deferred as in `_build_trained`
    from mindspeed_rl.models.hf_module import list_kept, list_layers

    layers = {f"{name}.": index for index, name in enumerate(list_layers(model))}
    parameters, state = dict(model.named_parameters()), model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in state}
    values = {**parameters, **buffers}
    found = _match_names(model, values, stored)
    by_module = {id(value): name for name, value in parameters.items()}
    embedding, head = (
        by_module[id(cast(Any, module).weight)] for module in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    stored_as = {place.parameter: name for name, (place, _) in found.items()}
    order = {name: index for index, name in enumerate(values)}
    ordered = sorted(found, key=lambda name: (order[(place := found[name][0]).parameter], place.index or 0, place.start))
    kept = next(iter(list_kept(model)), "")
    architecture = ModuleArchitecture(
        name=config.model_type,
        hf_classes=classes,
        model_types=(config.model_type,),
        upstream_names=(),
        read_model_config=_refuse_config,
        read_layer_ops=_refuse_layers,
        packs=config.model_type in _PACKED,
        tensors=tuple((name, found[name][1], _find_layer(found[name][0].parameter, layers)) for name in ordered),
        buffers=frozenset(name for name, (place, _) in found.items() if place.parameter in buffers),
        # Mamba's default: layers add to float32, which the head that training computes in bfloat16 does not take
        kept_in_float32=kept or ("the residual" if getattr(config, "residual_in_fp32", False) else ""),
        kept_weight=kept,
        longest=_read_longest(config),
        recomputes=model.supports_gradient_checkpointing,
        embedding=stored_as[embedding],
        head=None if head == embedding else stored_as[head],
    )
    sizes = {name: shape for name, shape, _ in architecture.tensors}
    return architecture, _read_shape(config, architecture, sizes, len(layers))


def _find_layer(parameter: str, layers: Mapping[str, int]) -> int | None:
    """Return the decoder layer of a parameter; None where it is in none."""
    return next((index for prefix, index in layers.items() if parameter.startswith(prefix)), None)


_NO_TABLE = "a model that only transformers computes has no table of layers: engine: fsdp trains it"


def _refuse_config(hf_config: HfConfig) -> ModelConfig:
    raise ValueError(_NO_TABLE)


def _refuse_layers(model_config: ModelConfig, layer: int, packing: ExpertPacking) -> list[WeightOp]:
    raise ValueError(_NO_TABLE)


def _read_shape(
    config: PretrainedConfig, architecture: ModuleArchitecture, tensors: Mapping[str, tuple[int, ...]], num_layers: int
) -> ModelConfig:
    """Return the sizes of a config that all families share."""
    heads = int(getattr(config, "num_attention_heads", None) or 1)  # none in state-space models
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    vocab, hidden = tensors[architecture.embedding]
    width = int(getattr(config, "head_dim", None) or hidden // heads)
    return ModelConfig(
        architecture=architecture.name,
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=int(getattr(config, "intermediate_size", None) or 4 * hidden),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=width,
        vocab_size=vocab,
        padded_vocab_size=vocab,
        max_position_embeddings=int(getattr(config, "max_position_embeddings", None) or 2**31 - 1),
        untie_embeddings_and_output_weights=architecture.head is not None,
        final_logit_softcapping=getattr(config, "final_logit_softcapping", None),
    )


def _read_longest(config: PretrainedConfig) -> int | None:
    """Return the longest row of a model whose frequencies depend on the length of the row.

    With type longrope they do beyond `original_max_position_embeddings`: tokens would have other probabilities in a longer row.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return int(rope.get("original_max_position_embeddings") or config.original_max_position_embeddings)
