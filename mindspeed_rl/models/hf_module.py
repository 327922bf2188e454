"""A model as transformers' own module, with weights that it takes under their names in checkpoints.

Importing this imports transformers, so only what computes with its modules does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from mindspeed_rl.config.model_metadata import find_code_elsewhere
from mindspeed_rl.files import read_json
from mindspeed_rl.models import describe_unbuilt, list_classes, read_model_type

_T = TypeVar("_T")

#: mark of transformers' initializer on a parameter that it leaves as it is
_MARK = "_is_hf_initialized"
#: suffix of the float32 parameter by which a weight sync brings a table of whole numbers, exact below 2**24
_AS_FLOATS = "_as_floats"
#: setting of a run that generates with such a module
_ROLLOUT = "generate_config.engine: transformers"
#: classes of transformers by model type; the first is the one that computes a model of text
_CLASSES: tuple[Mapping[str, str | tuple[str, ...]], ...] = (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)


def read_hf_config(hf_folder: Path, key: str, *, trusts_code: bool = False) -> PretrainedConfig:
    """Return the config of a folder's model.

    Args:
        hf_folder: has config.json.
        key: setting for whose sake transformers computes the model, for the error.
        trusts_code: Python code of the folder may be run, where the installed transformers has no class for the model.

    Raises:
        ValueError: there is no class for the model, or only in code that may not be run, such as another repository's.
    """
    path, installed = hf_folder / "config.json", f"transformers {transformers.__version__}"
    content = read_json(path)
    try:
        classes, model_type, mapped = list_classes(content), read_model_type(content), content.get("auto_map")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if model_type in CONFIG_MAPPING:
        _check_class(classes, str(model_type), f"{path}: {installed}")
        return take_values(lambda: AutoConfig.from_pretrained(hf_folder, trust_remote_code=False), path)
    lacks = f"{path}: {installed} has no model of type {model_type}"
    if not isinstance(mapped, dict) or not mapped:
        missing = describe_unbuilt(model_type)
        others = f"; {missing}, so no other engine trains it. Install" if missing else "; set another engine, or install"
        raise ValueError(f"{lacks}, which {key} computes with{others} a release that has it.")
    if not trusts_code:
        raise ValueError(
            f"{lacks}; its code comes with the folder, and {key} runs that only with trust_remote_code: true, for a model "
            "whose authors you trust."
        )
    if missing := [name for name in ("AutoConfig", "AutoModelForCausalLM") if name not in mapped]:
        raise ValueError(f"{lacks}, and auto_map names no class for {missing[0]}.")
    if (found := find_code_elsewhere(mapped)) is not None:
        name, place = found
        raise ValueError(
            f"{lacks}, and auto_map.{name} names code of another repository ({place}), which is not run; copy that file "
            f"into the folder and write {place.rpartition('--')[2]}."
        )
    return _read_foreign_config(hf_folder, lacks)


def _check_class(names: list[str], model_type: str, installed: str) -> None:
    """Check that the class of a model type is the one that config.json names: a newer model may have the type of another one.

    Args:
        names: classes of config.json without marks; see `list_classes`.

    Raises:
        ValueError: there are some, and all of them are of another model.
    """
    found = (mapping.get(model_type) for mapping in _CLASSES)
    built = [name for each in found if each for name in ([each] if isinstance(each, str) else each)]
    if not built or not names:
        return
    if not {_get_stem(name) for name in built} & {_get_stem(name) for name in names}:
        raise ValueError(
            f"{installed} computes model_type {model_type} as {built[0]}, and architectures names "
            f"{', '.join(names)}, another model; take the config.json that came with the weights."
        )


def _get_stem(name: str) -> str:
    """Return the part of the name of a class that is the model's, as LLAMA of LlamaForCausalLM."""
    return re.sub(r"(For[A-Z]\w*|LMHeadModel|LMModel|Model)$", "", name).replace("_", "").upper()


def take_values(build: Callable[[], _T], path: Path) -> _T:
    """Return what transformers makes of a config.json; its checks and classes raise errors of many kinds.

    Raises:
        ValueError: it does not take the values.
    """
    try:
        return build()
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason"
        raise ValueError(
            f"{path}: transformers {transformers.__version__} does not take these values: {type(error).__name__}: {reason}"
        ) from error


def _read_foreign_config(hf_folder: Path, lacks: str) -> PretrainedConfig:
    """Return the config of a model whose classes are in its folder, which runs its code.

    Raises:
        ValueError: the code cannot be run.
    """
    try:
        config = AutoConfig.from_pretrained(hf_folder, trust_remote_code=True)
        # so that an error in the code of the model is found here, and not later in each worker
        get_class_from_dynamic_module(config.auto_map["AutoModelForCausalLM"], hf_folder)
        return config
    except Exception as error:  # any code may raise anything
        raise ValueError(f"{lacks}, and the code in the folder fails: {type(error).__name__}: {error}") from error


def drop_dropout(hf_config: PretrainedConfig) -> None:
    """Set every dropout of a config and its parts to 0: a sampled token's probability comes from the model as it is."""
    for name, value in hf_config.to_dict().items():
        if isinstance(value, float) and name.endswith(("dropout", "pdrop")):
            setattr(hf_config, name, 0.0)
    for part in hf_config.sub_configs:
        if isinstance(inner := getattr(hf_config, part, None), PretrainedConfig):
            drop_dropout(inner)


def list_kept(module: nn.Module) -> list[str]:
    """Return the parameters that the class of a model keeps in float32 whatever the format of the others."""
    kept: set[str] = set()
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            kept |= set(part._keep_in_fp32_modules_strict or ())
    patterns = [re.compile(rf"(^|\.){re.escape(name)}(\.|$)") for name in kept]
    return [name for name, _ in module.named_parameters() if any(pattern.search(name) for pattern in patterns)]


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Store the parameters in a format, but for those that the class keeps in float32.

    Buffers stay as they are: rotary frequencies in bfloat16 would turn late positions by a wrong angle, and a bias by which
    experts are chosen would change the choice.
    """
    kept = set(list_kept(module))
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in kept else dtype)


def mark_loaded(module: nn.Module) -> None:
    """Mark the parameters of a module as loaded: transformers' initializer then computes only the buffers."""
    for parameter in module.parameters():
        setattr(parameter, _MARK, True)


def _share_epsilon(model: PreTrainedModel) -> None:
    """Give the norms of low-rank forms `rms_norm_eps`, as the trainer and vLLM; the class of GLM-5 gives them 1e-6."""
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            cast(Any, module).variance_epsilon = model.config.rms_norm_eps


#: model type -> what the class of transformers computes in another way than the published model
_CORRECTIONS: dict[str, Callable[[PreTrainedModel], None]] = {"glm_moe_dsa": _share_epsilon}


def build_module(hf_config: PretrainedConfig, **settings: str) -> PreTrainedModel:
    """Build a causal language model in float32, on the device of the context.

    Args:
        hf_config: result of `read_hf_config`.
        settings: keyword arguments of `from_config`, such as `attn_implementation`.
    """
    drop_dropout(hf_config)
    # only a config that was read with trust is of a class from its folder
    trusts_code = type(hf_config).__module__.partition(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, trust_remote_code=trusts_code, **settings)
    if (correct := _CORRECTIONS.get(hf_config.model_type)) is not None:
        correct(model)
    return model


def get_decoder(model: PreTrainedModel) -> nn.Module:
    """Return the part of a causal language model before the head, which some classes do not name as their base."""
    decoder = model.get_decoder()
    return cast(nn.Module, model.model) if decoder is model else decoder


def list_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the decoder layers of a model by their names: the longest of the lists of modules that are in no other list.

    Raises:
        ValueError: it has none.
    """
    decoder = get_decoder(model)
    lists = {name: module for name, module in decoder.named_modules() if isinstance(module, nn.ModuleList)}
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if not outer:
        raise ValueError(f"{type(model).__name__} has no list of decoder layers, by which the engine shards.")
    longest = list(lists[max(outer, key=lambda name: len(lists[name]))])
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(layer)]: layer for layer in longest}


def find_obstacle(model: PreTrainedModel) -> str:
    """Return why `engine: fsdp` cannot train a class of transformers; empty where a model without weights shows no reason."""
    name = type(model).__name__
    if model.get_decoder() is model and not hasattr(model, "model"):
        return f"{name} does not name the part before its head"
    if model.config.is_encoder_decoder:
        return f"{name} is the decoder of a pair, which reads what an encoder has computed"
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(model.get_input_embeddings(), nn.Embedding):
        return f"{name} has no embedding of tokens, or no linear head"
    if head.bias is not None:
        return f"{name} has a bias in its head, which this engine does not compute"
    if any(getattr(module, "is_causal", None) is False for module in get_decoder(model).modules()):
        return f"{name} attends to later tokens with this config.json"
    return ""


def build_image_module(hf_config: PretrainedConfig, **settings: str) -> PreTrainedModel:
    """Build a model of images and text in float32, on the device of the context; see `build_module`."""
    drop_dropout(hf_config)
    return AutoModelForImageTextToText.from_config(hf_config, dtype=torch.float32, **settings)


class CheckpointNames:
    """The parameters of a module by the names of tensors in checkpoints, by transformers' own table of conversions.

    Its classes keep the experts of a layer in one tensor, for example, where checkpoints have a matrix of each.
    """

    def __init__(self, model: PreTrainedModel, *, buffers: bool = False) -> None:
        """Read the conversions of a model.

        Args:
            model: the model.
            buffers: names of buffers are found too.
        """
        self._model = model
        self._parameters: dict[str, Tensor] = dict(model.named_parameters())
        if buffers:
            self._parameters |= dict(model.named_buffers())
        conversions = get_model_conversion_mapping(model)
        self._renamings = [item for item in conversions if isinstance(item, WeightRenaming)]
        self._converters = [item for item in conversions if isinstance(item, WeightConverter)]
        self._by_pattern = {pattern: item for item in self._converters for pattern in item.source_patterns}

    def find(self, name: str) -> tuple[str, str | None] | None:
        """Return the parameter that takes a tensor, and the pattern of the conversion, if one is needed; None without one."""
        prefix = self._model.base_model_prefix
        found = rename_source_key(name, self._renamings, self._converters, prefix, self._parameters)
        if found[0] not in self._parameters and name in self._parameters:
            found = (name, None)
        if f"{found[0]}{_AS_FLOATS}" in self._parameters:
            return f"{found[0]}{_AS_FLOATS}", found[1]
        return found if found[0] in self._parameters else None

    def find_module(self, name: str) -> nn.Module:
        """Return a part of the model by its name in parameters."""
        return self._model.get_submodule(name)

    def list_sources(self, pattern: str | None) -> list[str]:
        """Return the patterns of the tensors that a conversion joins into rows, in their order; none without one.

        Raises:
            ValueError: the conversion does more than to stack experts and to join their rows.
        """
        if pattern is None:
            return []
        converter = self._by_pattern[pattern]
        kinds = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in converter.operations]
        if kinds not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
            raise ValueError(f"{type(self._model).__name__} of transformers converts {pattern} by {kinds}, and not row by row.")
        return list(converter.source_patterns)

    @torch.no_grad()
    def load(self, named: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill parameters from full tensors; others stay. A parameter of several tensors is filled once all are there.

        Returns:
            The parameters that were filled.

        Raises:
            RuntimeError: some of the tensors of a parameter are missing, or have other shapes.
        """
        filled: set[str] = set()
        waiting: dict[str, dict[str, list[tuple[str, Tensor]]]] = {}
        for name, tensor in named:
            if (found := self.find(name)) is None:
                continue
            target, pattern = found
            if pattern is None:
                self._fill(target, name, tensor)
                filled.add(target)
                continue
            parts = waiting.setdefault(target, {})
            parts.setdefault(pattern, []).append((name, tensor))
            if self._is_complete(target, parts):
                filled |= self._convert(target, waiting.pop(target))
        if waiting:
            target = min(waiting)
            count = sum(map(len, waiting[target].values()))
            raise RuntimeError(f"{type(self._model).__name__}: {target} got {count} of the tensors that it is made of")
        return filled

    def _is_complete(self, target: str, parts: Mapping[str, list[tuple[str, Tensor]]]) -> bool:
        patterns = self._by_pattern[next(iter(parts))].source_patterns
        stacked = self._parameters[target].shape[0]
        return all(len(parts.get(pattern, ())) == (stacked if "*" in pattern else 1) for pattern in patterns)

    def _convert(self, target: str, parts: Mapping[str, list[tuple[str, Tensor]]]) -> set[str]:
        converter = self._by_pattern[next(iter(parts))]
        collected: dict[str, Any] = {
            pattern: [tensor for _, tensor in sorted(items, key=lambda item: dot_natural_key(item[0]))]
            for pattern, items in parts.items()
        }
        for operation in converter.operations:
            collected = operation.convert(
                collected,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=target,
                model=self._model,
                config=self._model.config,
                missing_keys=None,
            )
        filled = set()
        prefix, _, suffix = next(target.partition(pattern) for pattern in collected if pattern in target)
        for pattern, value in collected.items():
            name = prefix + pattern + suffix
            self._fill(name, target, value[0] if isinstance(value, list) else value)
            filled.add(name)
        return filled

    def _fill(self, target: str, name: str, tensor: Tensor) -> None:
        parameter = self._parameters[target]
        if tensor.dim() == 2 and tensor.shape == (parameter.shape[:-1].numel(), *parameter.shape[-1:]):
            tensor = tensor.view(parameter.shape)  # a weight sync has rows of stacks one after the other
        if parameter.shape != tensor.shape:
            raise RuntimeError(f"{name}: {tuple(tensor.shape)} does not fit {target}, which is {tuple(parameter.shape)}")
        parameter.data.copy_(tensor)


@dataclass(frozen=True)
class TensorPlace:
    """The place of a checkpoint's tensor in a parameter of the module.

    Attributes:
        parameter: name of the parameter or buffer.
        index: index along its first dimension, where it stacks the tensors of several experts; None where it does not.
        start, stop, step: rows of the tensor there; all of them for (0, None, 1).
        transposed: the rows of the tensor are columns there.
    """

    parameter: str
    index: int | None = None
    start: int = 0
    stop: int | None = None
    step: int = 1
    transposed: bool = False

    def select(self, element: Tensor) -> Tensor:
        """Return the tensor as a view of the element of the stack that has it."""
        return (element.t() if self.transposed else element)[self.start : self.stop : self.step]

    def find(self, parameter: Tensor) -> Tensor:
        """Return the tensor as a view of the full parameter."""
        return parameter if self.index is None else self.select(parameter[self.index])

    def shape(self, stack: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor.

        Args:
            stack: shape of the parameter.
        """
        if self.index is None:
            return stack
        size = stack[:0:-1] if self.transposed else stack[1:]
        return len(range(size[0])[self.start : self.stop : self.step]), *size[1:]


def find_place(names: CheckpointNames, name: str, values: Mapping[str, Tensor]) -> tuple[TensorPlace, tuple[int, ...]] | None:
    """Return the place of a tensor in the module, and its shape; None where the module does not take it."""
    found = names.find(name)
    if found is None:
        return _find_in_stack(names, name, values)
    target, pattern = found
    shape = tuple(values[target].shape)
    if pattern is None:
        return TensorPlace(target), shape
    sources, expert = names.list_sources(pattern), re.search(r"\.(\d+)\.(?=\w+\.weight$)", name)
    assert expert is not None  # the conversion has a place for it
    rows, first = shape[1] // len(sources), sources.index(pattern)
    place = TensorPlace(target, int(expert[1]), first * rows, (first + 1) * rows)
    return place, place.shape(shape)


#: projection of an expert -> the stack of a layer's experts that has its rows, which of its parts, and their number
_STACKS = {"gate_proj": ("gate_up_proj", 0, 2), "up_proj": ("gate_up_proj", 1, 2), "down_proj": ("down_proj", 0, 1)}


def _find_in_stack(
    names: CheckpointNames, name: str, values: Mapping[str, Tensor]
) -> tuple[TensorPlace, tuple[int, ...]] | None:
    """Return the place of an expert's matrix or bias in a stack of a class, whose published files have stacks; None without."""
    parts = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.(weight|bias)", name)
    if parts is None or parts[3] not in _STACKS:
        return None
    stack, part, count = _STACKS[parts[3]]
    target = f"{parts[1]}.{stack}" + ("_bias" if parts[4] == "bias" else "")
    if target not in values:
        return None
    # as `use_experts_implementation` of transformers marks the class
    experts, shape = names.find_module(parts[1]), tuple(values[target].shape)
    transposed = getattr(experts, "is_transposed", False) and len(shape) == 3
    rows = shape[2 if transposed else 1] // count
    place = TensorPlace(target, int(parts[2]), part * rows, (part + 1) * rows, transposed=transposed)
    if not getattr(experts, "is_concatenated", True):
        place = TensorPlace(target, int(parts[2]), part, step=count, transposed=transposed)
    return place, place.shape(shape)


class LoadableModule(nn.Module):
    """A causal language model of transformers that takes weights as vLLM's models do; see `rollout.protocol.LoadsWeights`.

    Persistent buffers, such as the bias by which experts are chosen, are parameters here: a weight sync brings them too.

    Attributes:
        model: the module.
        config: its config.
    """

    def __init__(
        self,
        hf_folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        float32_head: bool = False,
        trusts_code: bool = False,
    ) -> None:
        """Build the module with undefined weights.

        Args:
            hf_folder: has config.json; no weights are read.
            dtype: format of the weights.
            device: device of the weights.
            float32_head: logits are computed in float32.
            trusts_code: see `read_hf_config`.

        Raises:
            ValueError: transformers has no such model.
        """
        super().__init__()
        hf_config = read_hf_config(hf_folder, _ROLLOUT, trusts_code=trusts_code)
        with torch.device("meta"):
            self.model = build_module(hf_config, experts_implementation="eager")
        cast_parameters(self.model, dtype)
        self.model.to_empty(device=device)
        mark_loaded(self.model)
        self.model.initialize_weights()
        for module in self.model.modules():
            for name in [name for name in module._buffers if name not in module._non_persistent_buffers_set]:
                value = module._buffers[name]
                if value is not None and value.is_floating_point():
                    del module._buffers[name]
                    module.register_parameter(name, nn.Parameter(value.float()))
                elif value is not None:
                    module.register_parameter(f"{name}{_AS_FLOATS}", nn.Parameter(torch.zeros(value.shape, device=device)))
        self.model.requires_grad_(False).eval()
        self.model.tie_weights()
        self.config = hf_config
        self._names = CheckpointNames(self.model)
        if float32_head and dtype != torch.float32:
            head = cast(nn.Linear, self.model.get_output_embeddings())
            head.register_forward_hook(
                lambda head, arguments, logits: functional.linear(arguments[0].float(), head.weight.float(), head.bias)
            )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
        """Take tensors under HF names; return the names of the parameters that were filled. `finish_load` comes after it."""
        return {f"model.{name}" for name in self._names.load(weights)}

    @torch.no_grad()
    def finish_load(self) -> None:
        """Fill the tables of whole numbers from the parameters that stand for them in a weight sync."""
        for module in self.model.modules():
            for name, table in module.named_buffers(recurse=False):
                if (floats := module._parameters.get(f"{name}{_AS_FLOATS}")) is not None:
                    table.copy_(floats.round())


def list_untaken(hf_folder: Path, names: Iterable[str], *, trusts_code: bool) -> list[str]:
    """Return the names of a checkpoint's tensors that no parameter of the folder's module takes.

    Args:
        hf_folder: has config.json.
        names: names of the tensors.
        trusts_code: see `read_hf_config`.

    Raises:
        ValueError: transformers has no such model.
    """
    with torch.device("meta"):
        model = build_module(read_hf_config(hf_folder, _ROLLOUT, trusts_code=trusts_code))
    known = CheckpointNames(model, buffers=True)
    return [name for name in names if known.find(name) is None]
