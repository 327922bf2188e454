"""Merges models of one architecture into one Hugging Face folder: a conversion whose weights are computed of several sources.

A weight is read from every model, merged in float32, and rounded once. A model is a Hugging Face folder or a PEFT adapter, and
an adapter is added to its base before that, without being rounded to the base's format.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.checkpoint.conversion_plan import Destination, Plan, make_plan
from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.checkpoint.jobs import FreshGroup, Group, same_bits
from mindspeed_rl.checkpoint.lora import PeftMerge, is_peft_folder, open_peft
from mindspeed_rl.checkpoint.merge_methods import METHODS, MergeSettings
from mindspeed_rl.checkpoint.source import ModelOptions, Source, open_hf
from mindspeed_rl.config.model_metadata import describe_inner_adapters, find_adapter_base
from mindspeed_rl.files import read_json
from mindspeed_rl.hub import fetch, parse_hub_name
from mindspeed_rl.models import architecture_for
from mindspeed_rl.models.model_config import ModelConfig


@dataclass(frozen=True)
class MergedModel:
    """A model of a merge, opened.

    Attributes:
        path: folder as the user names it.
        source: its weights, the base's where it is an adapter.
        adapter: the adapter; None for a whole model.
    """

    path: Path
    source: Source
    adapter: PeftMerge | None = None
    groups: Mapping[str, Group] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", {name: group for group in self.source.groups for name in group.hf})

    def select(self, name: str) -> _Weight:
        """Return one weight of the model."""
        copies = tuple(self.groups[copy] for copy, owner in self.source.equal.items() if owner == name)
        pair = None if self.adapter is None or name not in self.adapter.pairs else self.adapter
        adapter = None if pair is None else replace(pair, pairs={name: pair.pairs[name]})
        return _Weight(str(self.path), self.groups[name], copies, adapter)


@dataclass(frozen=True)
class _Weight:
    """A weight of one model: where it is stored, the copies that must be equal to it, and its adapter."""

    origin: str
    group: Group
    copies: tuple[Group, ...]
    adapter: PeftMerge | None

    def read(self, name: str) -> Tensor:
        """Return the weight as it is stored; ValueError where a tied copy has other numbers."""
        tensor = self.group.load()[name]
        for copy in self.copies:
            for copied, value in copy.load().items():
                if not same_bits(tensor, value):
                    raise ValueError(
                        f"{self.origin}: {copied} differs from {name}, to which config.json ties it; set tie_word_embeddings to"
                        " false in its config.json, or save the model again"
                    )
        return tensor

    def read_float32(self, name: str) -> Tensor:
        """Return the weight in float32, with its adapter."""
        tensor = self.read(name).float()
        return tensor if self.adapter is None else self.adapter(name, tensor)


@dataclass(frozen=True)
class _MergedGroup(Group):
    """One weight of the result.

    Attributes:
        models, base: the weight in each model, and in the base of their task vectors.
        result_dtype: format in which it is handed on.
    """

    name: str
    models: tuple[_Weight, ...]
    base: _Weight | None
    settings: MergeSettings
    result_dtype: torch.dtype

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def num_bytes(self) -> int:
        return sum(weight.group.num_bytes for weight in self._all())

    @property
    def dtype(self) -> torch.dtype:
        return self.result_dtype

    def load(self, strict: bool = False) -> dict[str, Tensor]:
        if not self.result_dtype.is_floating_point:
            return {self.name: self._read_equal()}
        base = None if self.base is None else self.base.read_float32(self.name)
        merged = METHODS[self.settings.method](base, self._read_models(), self.settings)
        return {self.name: merged.to(self.result_dtype)}

    def _all(self) -> tuple[_Weight, ...]:
        return (*self.models, *(() if self.base is None else (self.base,)))

    def _read_models(self) -> Iterator[Tensor]:
        return (weight.read_float32(self.name) for weight in self.models)

    def _read_equal(self) -> Tensor:
        """Return a tensor of integers, which all models must have in common."""
        first, *others = (weight.read(self.name) for weight in self._all())
        for other, weight in zip(others, self._all()[1:]):
            if not same_bits(first, other):
                raise ValueError(f"{weight.origin}: {self.name} holds integers that differ from {self.models[0].origin}'s")
        return first


def open_model(path: Path, base: Path | None, mtp_num_layers: int | None) -> MergedModel:
    """Open a model of a merge; no weight is read.

    Args:
        path: Hugging Face folder, PEFT adapter, or name on a hub.
        base: base of an adapter; None takes the one that it names.
        mtp_num_layers: prediction layers that are merged too.

    Raises:
        ValueError: the folder is damaged, or its weights are not of the model that config.json describes.
    """
    hub_name = None if path.is_dir() else parse_hub_name(str(path))
    folder = path if hub_name is None else Path(fetch(hub_name, "--models"))
    below = folder
    is_model = is_peft_folder(folder) or (folder / "config.json").is_file()
    if not is_model and (inner := describe_inner_adapters(folder)):
        raise ValueError(f"{path} is not a model{inner}")
    if is_peft_folder(folder):
        below = base or Path(find_adapter_base(folder) or "").expanduser()
        hub_name = None if below.is_dir() else parse_hub_name(str(below))
        below = below if hub_name is None else Path(fetch(hub_name, "--models"))
        if below == Path() or not below.is_dir():
            named = below if below != Path() else "not named"
            raise ValueError(f"{path} is an adapter, and its base ({named}) is not here; pass it as --base")
    config = HfFolder(below).config
    is_reward_model = architecture_for(config).read_model_config(config).head == "reward"
    source = open_hf(below, ModelOptions(reward_head=is_reward_model, mtp_num_layers=mtp_num_layers))
    if fresh := next((group.name for group in source.groups if isinstance(group, FreshGroup)), None):
        raise ValueError(f"{below} has no {fresh}, so there is no reward head to merge")
    ops = source.architecture.weight_ops(source.model_config)
    return MergedModel(path, source, open_peft(folder, ops) if below != folder else None)


def plan_merge(
    models: Sequence[MergedModel], base: MergedModel | None, settings: MergeSettings, destination: Destination
) -> tuple[Plan, list[str]]:
    """Plan the folder of a merge; its config, tokenizer and chat template are the first model's.

    Returns:
        The plan, and notes on what the models do not have in common.

    Raises:
        ValueError: the models have other weights, or give tokens other ids.
    """
    first, *others = models
    others = [*others, *(() if base is None else (base,))]
    notes = list(first.source.warnings)
    for other in others:
        _check_weights(first, other)
        _check_tokens(first, other)
        notes += _describe_differences(first, other)
    ops = first.source.architecture.weight_ops(first.source.model_config)
    buffers = {name for op in ops if op.buffer for name in op.hf}

    def choose_dtype(name: str, group: Group) -> torch.dtype:
        # a cast follows, which is the only rounding
        casts = destination.dtype is not None and group.dtype.is_floating_point and name not in buffers
        return torch.float32 if casts else group.dtype

    merged = [
        _MergedGroup(
            name,
            tuple(model.select(name) for model in models),
            None if base is None else base.select(name),
            settings,
            choose_dtype(name, group),
        )
        for name, group in first.groups.items()
        if name not in first.source.equal
    ]
    plan = make_plan(replace(first.source, groups=merged, equal={}), destination)
    folders = {model.source.path for model in (*models, *others)}
    folders |= {model.adapter.path for model in (*models, *others) if model.adapter is not None}
    trained = None if first.adapter is None else first.adapter.path
    # in float32: the weight of each model, sums and a mask
    memory = plan.memory_bytes + 4 * (len(models) + 3) * max(math.prod(shape) for op in ops for shape in op.shapes)
    order = repr((settings, [str(model.path) for model in models]))
    return replace(plan, beside=tuple(sorted(folders)), settings=order, adapter=trained, memory_bytes=memory), notes


def _check_weights(first: MergedModel, other: MergedModel) -> None:
    """Raise ValueError unless two models have the same weights, of the same shapes."""
    mine, theirs = first.source, other.source
    if mine.architecture.name != theirs.architecture.name:
        raise ValueError(
            f"{other.path} is a {theirs.architecture.name}, {first.path} a {mine.architecture.name}; merge models of one"
            " architecture"
        )
    ties = [str(not source.model_config.untie_embeddings_and_output_weights).lower() for source in (mine, theirs)]
    if ties[0] != ties[1]:
        raise ValueError(
            f"{other.path} has tie_word_embeddings {ties[1]}, {first.path} {ties[0]}; both need a head of their own, or none"
        )
    shapes = [
        {name: shape for op in source.architecture.weight_ops(source.model_config) for name, shape in zip(op.hf, op.shapes)}
        for source in (mine, theirs)
    ]
    for name in sorted(shapes[0].keys() | shapes[1].keys()):
        here, there = (table.get(name) for table in shapes)
        if here != there:
            said = [f"no {name}" if shape is None else f"{name} of shape {list(shape)}" for shape in (there, here)]
            raise ValueError(f"{other.path} has {said[0]}, {first.path} {said[1]}; merge models of one shape")


def _describe_differences(first: MergedModel, other: MergedModel) -> list[str]:
    """Describe the settings of config.json in which two models of the same shape differ; the result has the first model's."""
    mine, theirs = (dataclasses.asdict(model.source.model_config) for model in (first, other))
    names = [item.name for item in dataclasses.fields(ModelConfig) if mine[item.name] != theirs[item.name]]
    return [
        f"{name} is {theirs[name]!r} in {other.path} and {mine[name]!r} in {first.path}; the result has the latter"
        for name in names
    ]


def _check_tokens(first: MergedModel, other: MergedModel) -> None:
    """Raise ValueError where the tokenizers of two models give a token different ids: its row would be two tokens' mean."""
    mine, theirs = (_read_tokens(model.source.path) for model in (first, other))
    for token in mine.keys() & theirs.keys():
        if mine[token] != theirs[token]:
            raise ValueError(
                f"{other.path} has id {theirs[token]} for the token {token!r}, {first.path} {mine[token]}: rows of the"
                " embedding are of different tokens; merge models of one tokenizer"
            )


def _read_tokens(folder: Path) -> dict[str, Any]:
    """Return the ids of a folder's tokens; none where it has no tokenizer.json."""
    if not (folder / "tokenizer.json").is_file():
        return {}
    content = read_json(folder / "tokenizer.json")
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    tokens = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    if isinstance(vocabulary, list):  # Unigram: [token, score] in the order of the ids
        tokens = {str(entry[0]): index for index, entry in enumerate(vocabulary)}
    return tokens | {entry["content"]: entry["id"] for entry in content.get("added_tokens") or ()}
