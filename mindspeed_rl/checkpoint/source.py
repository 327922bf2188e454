"""Opens what is to be converted: an HF folder, or a Megatron checkpoint of either form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from mindspeed_rl.checkpoint.block_fp8 import group_of, is_scale, without_quantization
from mindspeed_rl.checkpoint.hf import HfFolder, has_weights
from mindspeed_rl.checkpoint.jobs import FreshGroup, Group, HfGroup, LoraShards, MegatronGroup, same_bits
from mindspeed_rl.checkpoint.mcore import Adapters, iteration_folder
from mindspeed_rl.checkpoint.megatron_source import open_layout
from mindspeed_rl.config.model_metadata import HF_FILES
from mindspeed_rl.files import read_json
from mindspeed_rl.models import ARCHITECTURES, architecture_for, find_architecture, has_layers
from mindspeed_rl.models.architecture import Architecture, ExpertPacking
from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.model_config import ModelConfig, read_group, read_quantization_block, read_size
from mindspeed_rl.models.module_family import read_module_family
from mindspeed_rl.models.vision import read_text_config

# buffers that old releases of transformers saved: rotary frequencies and causal masks, which models compute
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.bias$|masked_bias$")
#: prefixes of prediction layers that are not numbered with the decoder layers
_MTP = ("mtp.", "model.mtp_layers.")
#: rows at either end of a stored head that are compared with the embedding's
_COMPARED_ROWS = 8
_HF_LAYER = re.compile(r"^model\.(?:language_model\.)?layers\.(\d+)\.")


@dataclass(frozen=True)
class ModelOptions:
    """The user's options about the model itself.

    Args:
        model_type: an upstream ``--model-type-hf`` name, checked against the checkpoint; None infers it.
        add_qkv_bias, post_norm: upstream switches; True is checked against the checkpoint.
        reward_head: the model ends in one score (``--orm``).
        mtp_num_layers: prediction layers to keep; None keeps what a Megatron source has and none of an HF source.
        num_layers, first_k_dense_replace: convert a truncated model (for debugging).
        loosely: skip tensors that the model does not have.
        hf_folder: where a Megatron source finds config.json and tokenizer, if not in the checkpoint.
        iteration: which iteration of a Megatron source.
    """

    model_type: str | None = None
    add_qkv_bias: bool = False
    post_norm: bool = False
    reward_head: bool = False
    mtp_num_layers: int | None = None
    num_layers: int | None = None
    first_k_dense_replace: int | None = None
    loosely: bool = False
    hf_folder: Path | None = None
    iteration: int | None = None


@dataclass(frozen=True)
class Source:
    """An opened checkpoint.

    Args:
        kind: what it is.
        path: where it is.
        hf_config: config.json of the model, changed by the options.
        groups: its tensors in HF's terms.
        companions: folder with config and tokenizer files, if there is one.
        equal: HF tensors that repeat another one: {copy: owner}.
        layout: how a Megatron source is cut.
        adapters: LoRA weights in it.
        warnings: messages for the user.
        num_dropped: tensors of the checkpoint that are left behind, as a notice says.
        lora: (r, alpha) that the checkpoint states.
    """

    kind: Literal["hf", "mcore", "legacy", "torch_dist"]
    path: Path
    architecture: Architecture
    model_config: ModelConfig
    hf_config: Mapping[str, Any]
    groups: Sequence[Group]
    companions: Path | None
    equal: Mapping[str, str] = field(default_factory=dict)
    layout: Layout | None = None
    adapters: Adapters = field(default_factory=dict)
    warnings: Sequence[str] = ()
    num_dropped: int = 0
    lora: tuple[int | None, float | None] = (None, None)

    @property
    def dtype(self) -> torch.dtype:
        """Format of the largest part of the weights."""
        sizes: dict[torch.dtype, int] = {}
        for group in self.groups:
            sizes[group.dtype] = sizes.get(group.dtype, 0) + group.num_bytes
        return max(sizes, key=sizes.__getitem__)

    def merge_adapters(self, scale: float, adapters: Adapters | None = None) -> Source:
        """Return the same checkpoint with adapters (its own by default) added to their weights as they are read."""
        adapters = self.adapters if adapters is None else adapters
        merged: list[Group] = []
        for group in self.groups:
            if isinstance(group, (HfGroup, FreshGroup)):
                merged.append(group)
                continue
            stored = cast("MegatronGroup", group)  # or a DistGroup, which has the same fields
            adapter = adapters.get(stored.op.mcore)
            merged.append(stored if adapter is None else replace(stored, lora=LoraShards(*adapter[1:], scale)))
        return replace(self, groups=merged)


def _check_model_type(options: ModelOptions, architecture: Architecture, model_config: ModelConfig) -> None:
    """Raise ValueError if what the user says about the model contradicts the checkpoint; the error names what is right."""
    right = " or ".join(dict.fromkeys((*architecture.upstream_names, architecture.name)))
    name = options.model_type
    if (
        name is not None
        and name not in architecture.upstream_names
        and name not in (architecture.name, *architecture.model_types)
    ):
        known = {name for other in map(find_architecture, ARCHITECTURES) for name in (*other.upstream_names, other.name)}
        what = "is another family" if name in known else "is not supported"
        raise ValueError(f"--model-type-hf {name} {what}: the checkpoint is {architecture.name}; use {right}, or leave it out")
    if options.add_qkv_bias and not model_config.add_qkv_bias:
        raise ValueError(
            f"--add-qkv-bias contradicts the checkpoint: this {architecture.name} has no bias on query, key and value"
        )
    if options.post_norm and not model_config.post_norm:
        raise ValueError(f"--post-norm contradicts the checkpoint: {architecture.name} has no norm behind attention and MLP")


def _changed_config(config: Mapping[str, Any], options: ModelOptions) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if options.num_layers is not None:
        if options.mtp_num_layers:
            raise ValueError("--mtp-num-layers needs every decoder layer; drop --num-layers")
        real = read_size(config, "num_hidden_layers")
        if not 0 < options.num_layers <= real:
            raise ValueError(f"--num-layers {options.num_layers} must be between 1 and {real}")
        changes["num_hidden_layers"] = options.num_layers
        if config.get("layer_types"):
            changes["layer_types"] = list(config["layer_types"])[: options.num_layers]
    if options.first_k_dense_replace is not None:
        if "first_k_dense_replace" not in config:
            raise ValueError("--first-k-dense-replace needs a model whose config.json has first_k_dense_replace")
        if options.first_k_dense_replace < 0:
            raise ValueError(f"--first-k-dense-replace is {options.first_k_dense_replace}; it must be at least 0")
        changes["first_k_dense_replace"] = options.first_k_dense_replace
    return {**config, **changes}


def make_reward_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the same model with one score in place of the vocabulary head.

    Raises:
        ValueError: the config is of a classifier with several labels.
    """
    names = [re.sub(r"ForCausalLM$", "ForSequenceClassification", name) for name in config.get("architectures") or []]
    classifier = any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or [])
    labels = read_group(config, "id2label")
    # transformers leaves id2label out where there are 2 labels, its default
    if classifier and len(labels) != 1:
        raise ValueError(f"config.json describes a classifier with {len(labels) or 2} labels; a reward model has 1")
    return {**config, "architectures": names, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def _model_config(architecture: Architecture, config: Mapping[str, Any], options: ModelOptions) -> ModelConfig:
    model_config = architecture.read_model_config(config)
    if options.reward_head:
        model_config = replace(model_config, head="reward")
    elif model_config.head == "reward":
        raise ValueError("config.json describes a classifier (a reward model); pass --orm to convert it as one")
    return model_config


def open_hf(path: Path, options: ModelOptions, *, by_module: bool = False, trusts_code: bool = False) -> Source:
    """Open an HF folder.

    Args:
        path: the folder.
        options: what the user states about the model.
        by_module: transformers' module will compute it, so that families outside the table of architectures are opened too.
        trusts_code: Python code of the folder may be run for that.

    Raises:
        ValueError: the folder is incomplete, of an unknown architecture, contradicts the options, or holds tensors that
            the architecture does not have.
    """
    folder = HfFolder(path)
    block = read_quantization_block(folder.config)
    config = _changed_config(folder.config, options)
    if by_module and not has_layers(config):
        architecture, shape = read_module_family(path, config, trusts_code=trusts_code)
    else:
        architecture = architecture_for(config)
        shape = _model_config(architecture, config, options)
    model_config = replace(shape, mtp_num_layers=options.mtp_num_layers or 0)
    _check_model_type(options, architecture, model_config)
    _check_layer_count(folder, architecture, model_config)
    warnings = []
    if gone := without_quantization(config):
        form = "4-bit floats (MXFP4)" if block is None else "8-bit floats"
        warnings.append(f"the weights are in {form} with a scale for each block; they are written as bfloat16")
        config = {name: value for name, value in config.items() if name not in gone}
    groups: list[Group] = []
    expected: set[str] = set()
    for op in architecture.weight_ops(model_config):
        for name, shape in zip(op.hf, op.shapes):
            # a tied head names the embedding once more
            if name in expected:
                continue
            expected.add(name)
            if name == "score.weight" and name not in folder.records:
                warnings.append("the checkpoint has no score.weight: the reward head starts from normal(0, 0.02), seed 0")
                groups.append(FreshGroup(name, shape, folder.record(f"{architecture.text_prefix}embed_tokens.weight").dtype))
                continue
            if name not in folder.records:
                raise ValueError(f"{path} has no tensor {name!r}, which a {_described(model_config)} has")
            record = folder.record(name)
            if record.shape != shape:
                raise ValueError(f"{path}: {name} has shape {list(record.shape)}; config.json means {list(shape)}")
            groups.append(group_of(folder, name, block))
    copies = architecture.hf_copies(model_config)
    # the head that a tied model may store is read all the same, to be held against the embedding that stands for it
    if not model_config.untie_embeddings_and_output_weights and model_config.head == "lm":
        copies = {"lm_head.weight": f"{architecture.text_prefix}embed_tokens.weight", **copies}
    copies = {copy: owner for copy, owner in copies.items() if copy in folder.records}
    groups += [group_of(folder, copy, block) for copy in copies]
    dropped, dropped_warnings = _dropped(folder, expected | set(copies), architecture, model_config, options)
    warnings += dropped_warnings
    if options.reward_head:
        config = make_reward_config(config)
    return Source(
        "hf", path, architecture, model_config, config, groups, path, equal=copies, warnings=warnings, num_dropped=len(dropped)
    )


def _described(model_config: ModelConfig) -> str:
    """Describe a model in the terms of config.json."""
    return f"{model_config.architecture} whose config.json says num_hidden_layers {model_config.num_layers}"


def _layer_of(name: str) -> int | None:
    return int(match[1]) if (match := _HF_LAYER.match(name)) else None


def _check_layer_count(folder: HfFolder, architecture: Architecture, model_config: ModelConfig) -> None:
    """Raise ValueError if config.json has more layers than the weights; before a table of as many is made."""
    if model_config.mtp_num_layers < 0:
        raise ValueError(f"--mtp-num-layers is {model_config.mtp_num_layers}; it must be at least 0")
    if model_config.mtp_num_layers and architecture.read_mtp_ops is None:
        raise ValueError(f"{architecture.name} has no multi-token-prediction layers; --mtp-num-layers must be 0")
    stored = {layer for name in folder.stored_names if (layer := _layer_of(name)) is not None}
    # HF numbers prediction layers on behind the decoder's, or gives them names of their own
    are_separate = any(name.startswith(_MTP) for name in folder.stored_names)
    num_expected = model_config.num_layers + (0 if are_separate else model_config.mtp_num_layers)
    if not stored or num_expected <= max(stored) + 1:
        return
    first = max(stored) + 1
    if first < model_config.num_layers:
        raise ValueError(f"{folder.path} has no tensor of 'model.layers.{first}', which a {_described(model_config)} has")
    raise ValueError(
        f"{folder.path} has no tensor of 'model.layers.{first}', which --mtp-num-layers {model_config.mtp_num_layers} behind "
        f"num_hidden_layers {model_config.num_layers} of config.json asks for"
    )


def check_hf_tensors(path: Path, architecture: Architecture, model_config: ModelConfig, *, loosely: bool) -> list[str]:
    """Check that an HF folder has the weights of the model that its config.json describes; reads headers and a few rows.

    Args:
        model_config: model config of the model that will be built; a reward head need not be among the weights.
        loosely: tensors that the model does not have are skipped.

    Returns:
        A sentence for each kind of tensor that is left behind.

    Raises:
        ValueError: it holds tensors or layers that the model does not have, or another head than `tie_word_embeddings` states.
    """
    folder = HfFolder(path)
    _check_layer_count(folder, architecture, model_config)
    _check_vocabulary(folder, architecture, model_config)
    _check_head(folder, architecture, model_config, loosely=loosely)
    ops = architecture.weight_ops(model_config) + architecture.list_left_out(model_config, folder.config)
    names = {name for op in ops for name in op.hf}
    copies = {
        *architecture.hf_copies(model_config),
        *(() if model_config.untie_embeddings_and_output_weights else ("lm_head.weight",)),
    }
    options = ModelOptions(reward_head=model_config.head == "reward", loosely=loosely)
    surplus = _surplus(folder, names | copies, architecture, model_config, options)
    if surplus.unknown and not loosely:
        raise ValueError(f"{_unknown(folder, surplus, model_config)}; load_checkpoint_loosely: true skips them")
    notes = [_skipped(surplus, model_config)] if surplus.unknown else []
    if surplus.predictions:
        notes.append(f"left out {_num_layers(surplus.predictions)} multi-token-prediction layer(s), which are not trained")
    return notes


def _check_vocabulary(folder: HfFolder, architecture: Architecture, model_config: ModelConfig) -> None:
    """Raise ValueError where the rows of embedding or head are not the tokens that config.json states."""
    for op in architecture.weight_ops(model_config):
        if op.mcore not in ("embedding.word_embeddings.weight", "output_layer.weight"):
            continue
        for name, shape in zip(op.hf, op.shapes):
            record = folder.records.get(name)
            if record is not None and len(record.shape) == 2 and record.shape[0] != shape[0]:
                raise ValueError(
                    f"{folder.path.absolute()}: {name} has {record.shape[0]} tokens, and vocab_size of its config.json is"
                    f" {shape[0]}; weights and config.json are of different models, or one was edited"
                )


def _check_head(folder: HfFolder, architecture: Architecture, model_config: ModelConfig, *, loosely: bool) -> None:
    """Raise ValueError where the weights lack an untied head, or have a tied one that is not the embedding."""
    if model_config.head != "lm":
        return
    origin = folder.path.absolute()
    if model_config.untie_embeddings_and_output_weights:
        heads = [op.hf[0] for op in architecture.weight_ops(model_config) if op.mcore == "output_layer.weight"]
        for name in () if loosely else heads:
            stem = name.removesuffix(".weight").rpartition(".")[2]
            # weights of a quantized head have other endings
            if not any(stem in stored.split(".") for stored in folder.stored_names):
                raise ValueError(
                    f"{origin} has no {name}, and tie_word_embeddings of its config.json is false; weights and config.json are"
                    " of different models, or one was edited"
                )
        return
    tied, embedding = "lm_head.weight", f"{architecture.text_prefix}embed_tokens.weight"
    if not {tied, embedding} <= folder.records.keys():
        return
    rows = folder.records[embedding].shape[0]
    for start in (0, max(0, rows - _COMPARED_ROWS)):
        stop = min(rows, start + _COMPARED_ROWS)
        # types may differ: the values are the same where one is rounded to the other
        head, rows_of_tokens = (folder.read(name, 0, start, stop).float() for name in (tied, embedding))
        if not same_bits(head, rows_of_tokens):
            raise ValueError(
                f"{origin}: {tied} differs from {embedding}, to which config.json ties it; set tie_word_embeddings to false in "
                "its config.json, or save the model again"
            )


@dataclass(frozen=True)
class _Surplus:
    """Names of the tensors of an HF folder that are not taken.

    Args:
        unknown: the architecture has none of these names.
        predictions: names of the weights of whole multi-token-prediction layers.
        truncated: names of the weights of decoder layers beyond --num-layers.
        replaced: the vocabulary head of what becomes a reward model.
    """

    unknown: list[str]
    predictions: list[str]
    truncated: list[str]
    replaced: list[str]


def _num_layers(names: Sequence[str]) -> int:
    return len({_layer_of(name) for name in names})


def _skipped(surplus: _Surplus, model_config: ModelConfig) -> str:
    return f"skipped {len(surplus.unknown)} tensors unknown to {model_config.architecture}, the first {surplus.unknown[0]!r}"


def _unknown(folder: HfFolder, surplus: _Surplus, model_config: ModelConfig) -> str:
    """Describe the tensors that the architecture does not have."""
    real = read_size(read_text_config(folder.config), "num_hidden_layers", model_config.num_layers)
    beyond = (layer := _layer_of(surplus.unknown[0])) is not None and layer >= real
    return (
        f"{folder.path} holds {surplus.unknown[0]!r}"
        + (f" and {len(surplus.unknown) - 1} more tensors" if len(surplus.unknown) > 1 else "")
        + f" unknown to {f'a {_described(model_config)}' if beyond else model_config.architecture}"
    )


def _dropped(
    folder: HfFolder, expected: set[str], architecture: Architecture, model_config: ModelConfig, options: ModelOptions
) -> tuple[list[str], list[str]]:
    """List the tensors that are left behind on purpose, with a warning for each kind; ValueError for unknown ones."""
    surplus = _surplus(folder, expected, architecture, model_config, options)
    if surplus.unknown and not options.loosely:
        raise ValueError(f"{_unknown(folder, surplus, model_config)}; --load-checkpoint-loosely skips them")
    warnings = [_skipped(surplus, model_config)] if surplus.unknown else []
    if surplus.predictions:
        count = _num_layers(surplus.predictions)
        warnings.append(f"dropped {count} multi-token-prediction layer(s); --mtp-num-layers keeps them")
    if surplus.truncated:
        count = _num_layers(surplus.truncated)
        warnings.append(f"dropped {count} decoder layers beyond --num-layers {model_config.num_layers}")
    return [*surplus.unknown, *surplus.predictions, *surplus.truncated, *surplus.replaced], warnings


def _surplus(
    folder: HfFolder, expected: set[str], architecture: Architecture, model_config: ModelConfig, options: ModelOptions
) -> _Surplus:
    # Nemotron-H has a list of layers instead
    real = read_size(read_text_config(folder.config), "num_hidden_layers", model_config.num_layers)
    # a fused tensor is known by the separate ones that it holds: one too many is one expert too many
    rest = [
        name
        for name in folder.records
        if not (name in expected or name in folder.renamed or _HARMLESS.search(name) or is_scale(folder, name))
    ]
    # prediction layers come behind all real layers, also where --num-layers keeps fewer of them
    predictions = _prediction_tensors(folder, rest, architecture, replace(model_config, num_layers=real))
    truncated: list[str] = []
    unknown: list[str] = []
    replaced: list[str] = []
    for name in rest:
        layer = _layer_of(name)
        if name in predictions:
            continue
        if layer is not None and model_config.num_layers <= layer < real:
            truncated.append(name)
        elif options.reward_head and name == architecture.head_name:
            replaced.append(name)
        else:
            unknown.append(name)
    return _Surplus(unknown, [name for name in rest if name in predictions], truncated, replaced)


def _prediction_tensors(
    folder: HfFolder, names: Sequence[str], architecture: Architecture, model_config: ModelConfig
) -> frozenset[str]:
    """Find the tensors that make up complete multi-token-prediction layers, by their names and shapes.

    A decoder layer that config.json does not count lacks what only prediction layers have, and is none.
    """
    if architecture.read_mtp_ops is None:
        return frozenset()
    layers: dict[int, set[str]] = {}
    are_separate = architecture.read_mtp_ops(model_config, 0, ExpertPacking())[0].hf[0].startswith(_MTP)
    for name in names:
        layer = _layer_of(name)
        if are_separate and name.startswith(_MTP):
            layers.setdefault(0, set()).add(name)
        elif not are_separate and layer is not None and layer >= model_config.num_layers:
            layers.setdefault(layer - model_config.num_layers, set()).add(name)
    complete: set[str] = set()
    for number, present in layers.items():
        ops = architecture.read_mtp_ops(model_config, number, ExpertPacking())
        shapes = {name: shape for op in ops for name, shape in zip(op.hf, op.shapes)}
        copies = architecture.hf_copies(replace(model_config, mtp_num_layers=number + 1))
        shaped = all(folder.shape(name) == shapes[name] for name in present & shapes.keys())
        if shaped and shapes.keys() <= present <= shapes.keys() | copies.keys():
            complete |= present
    return frozenset(complete)


def _open_tower(folder: Path | None, names: Sequence[str], path: Path) -> list[Group]:
    """Return the tower of a published folder, for a checkpoint of a run that left it out; ValueError where it has none."""
    if folder is None or not has_weights(folder, names):
        raise ValueError(
            f"{path} has no vision tower, as a run with language_model_only: true saves it; pass --hf-cfg-dir with the "
            f"published folder, whose tensors such as {names[0]} are taken"
        )
    opened = HfFolder(folder)
    return [group_of(opened, name, None) for name in names]


def open_megatron(path: Path, options: ModelOptions, fallback_hf: Path | None = None, *, verified: bool = False) -> Source:
    """Open a Megatron checkpoint, per-rank or ``torch_dist``, mcore or legacy.

    Its config.json comes from ``options.hf_folder``, from the checkpoint itself (ours carry it), or from ``fallback_hf``.

    Args:
        verified: the files have been checked against their checksums already.

    Raises:
        ValueError: the checkpoint is incomplete or damaged, no config.json is found, or it contradicts the options.
    """
    folder = iteration_folder(path, options.iteration)
    distributed = (folder / "metadata.json").is_file()
    opened = open_layout(path, options.iteration, verified=verified)
    companions = next(
        (place for place in (options.hf_folder, path / HF_FILES, fallback_hf) if place and (place / "config.json").is_file()),
        None,
    )
    if options.hf_folder is not None and companions != options.hf_folder:
        raise ValueError(f"--hf-cfg-dir {options.hf_folder} has no config.json")
    if companions is not None:
        config: Mapping[str, Any] = read_json(companions / "config.json")
    elif opened.args.hf_config is not None:
        config = opened.args.hf_config
    else:
        raise ValueError(f"{path} does not say which model it holds; pass --hf-cfg-dir with the HF folder it was made from")
    if options.reward_head:
        config = make_reward_config(config)
    config = _changed_config(config, options)
    architecture = architecture_for(config)
    model_config = _model_config(architecture, config, options)
    _check_model_type(options, architecture, model_config)
    checkpoint = opened.open(architecture, model_config, options.loosely)
    # with what only the files tell: padding of the vocabulary, prediction layers, the tower
    groups, warnings, num_dropped = list(checkpoint.groups), list[str](), len(checkpoint.skipped)
    if model_config.vision is not None and checkpoint.model_config.vision is None:
        left_out = architecture.list_left_out(checkpoint.model_config, config)
        groups += _open_tower(companions, [name for op in left_out for name in op.hf], path)
        warnings.append(f"the checkpoint has no vision tower (language_model_only); the result has that of {companions}")
        checkpoint = replace(checkpoint, model_config=replace(checkpoint.model_config, vision=model_config.vision))
    model_config = checkpoint.model_config
    if opened.holds_optimizer:
        warnings.append(f"the optimizer state in {folder} is not converted, only the weights are")
    if checkpoint.skipped:
        warnings.append(
            f"skipped {num_dropped} tensors unknown to {model_config.architecture}, the first {checkpoint.skipped[0]!r}"
        )
    if options.mtp_num_layers is not None and options.mtp_num_layers != model_config.mtp_num_layers:
        if not 0 <= options.mtp_num_layers < model_config.mtp_num_layers:
            raise ValueError(f"--mtp-num-layers {options.mtp_num_layers}: {path} has {model_config.mtp_num_layers} such layers")
        warnings.append(f"dropped {model_config.mtp_num_layers - options.mtp_num_layers} multi-token-prediction layer(s)")
        model_config = replace(model_config, mtp_num_layers=options.mtp_num_layers)
        kept = {name for op in architecture.weight_ops(model_config) for name in op.hf}
        num_dropped += sum(1 for group in checkpoint.groups for name in group.hf if name not in kept)
    return Source(
        "torch_dist" if distributed else "legacy" if opened.legacy else "mcore",
        path,
        architecture,
        model_config,
        config,
        groups,
        companions,
        layout=checkpoint.layout,
        adapters=checkpoint.adapters,
        warnings=warnings,
        num_dropped=num_dropped,
        lora=(opened.args.lora_r, opened.args.lora_alpha),
    )
