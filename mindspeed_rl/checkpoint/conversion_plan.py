"""Plans a conversion: which files the result has, where each parameter goes, and what happens to it on the way."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mindspeed_rl.checkpoint.hf import dtype_keys, make_safetensors_header, plan_shards, write_index
from mindspeed_rl.checkpoint.jobs import HfTarget, MegatronGroup, Target, Transform
from mindspeed_rl.checkpoint.lora import PeftMerge
from mindspeed_rl.checkpoint.mcore import plan_ranks
from mindspeed_rl.checkpoint.megatron_args import write_args
from mindspeed_rl.checkpoint.source import Source
from mindspeed_rl.checkpoint.stacked_experts import list_targets, stack_shapes
from mindspeed_rl.checkpoint.tensor_record import TensorRecord, is_finite
from mindspeed_rl.config.model_metadata import HF_FILES
from mindspeed_rl.models.architecture import ExpertPacking
from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.names import fuse_mindspeed_mla
from mindspeed_rl.models.weights import WeightOp

_ITERATION = "iter_0000001"

#: What a conversion writes below the folder of a Megatron checkpoint.
WRITTEN_BELOW = (_ITERATION, HF_FILES)


@dataclass(frozen=True)
class Destination:
    """The checkpoint to be made.

    Args:
        kind: the form.
        path: the checkpoint folder (HF: the model folder).
        layout: how a per-rank checkpoint is cut.
        grouped_gemm: experts of a rank in one parameter.
        transformer_engine: parameter names of Megatron's TransformerEngine implementation.
        mindspeed_mla: latent attention packed as MindSpeed's own implementation has it.
        make_vocab_size_divisible_by: vocabulary padding (times TP).
        dtype: dtype of the weights; None keeps it.
        max_shard_bytes: size limit of an HF weight file.
        overwrite: replace a checkpoint that is there already.
    """

    kind: Literal["hf", "mcore", "legacy", "torch_dist"]
    path: Path
    layout: Layout | None = None
    grouped_gemm: bool = False
    transformer_engine: bool = False
    mindspeed_mla: bool = False
    make_vocab_size_divisible_by: int = 1
    dtype: torch.dtype | None = None
    max_shard_bytes: int = 5 * 10**9
    overwrite: bool = False

    @property
    def final(self) -> Path:
        """The folder that appears when everything is done."""
        return self.path if self.kind == "hf" else self.path / _ITERATION

    @property
    def staging(self) -> Path:
        """Folder in which it is built."""
        return self.final.with_name(self.final.name + ".partial")


@dataclass(frozen=True)
class _Cast:
    """A transform that casts floating-point weights; buffers keep their dtype.

    A value that the dtype cannot hold, and that would become an infinity, is a ValueError.
    """

    dtype: torch.dtype
    keep: frozenset[str]

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name in self.keep or not tensor.is_floating_point():
            return tensor
        cast = tensor.to(self.dtype)
        # the source is looked at only when the result is not finite: what it held already is not a fault of the cast
        if not is_finite(cast) and is_finite(tensor):
            largest = tensor.abs().max().item()
            raise ValueError(
                f"{name} holds {largest:g}, beyond {torch.finfo(self.dtype).max:g}, the largest {self.dtype}; "
                "choose another --params-dtype"
            )
        return cast


@dataclass(frozen=True)
class _Chain:
    """Transforms one after the other."""

    steps: tuple[Transform, ...]

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        for step in self.steps:
            tensor = step(name, tensor)
        return tensor


@dataclass(frozen=True)
class _HfPlan:
    """The weight files of an HF folder and their tensors; `stacked` are matrices of experts that are stored in one tensor."""

    folder: Path
    files: Sequence[tuple[str, list[str]]]
    entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    owners: Mapping[str, str]
    stacked: Sequence[str]
    alternate: bool

    def create(self) -> list[Target]:
        """Make the files with holes, write the index, and return what fills the holes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        targets: list[Target] = []
        weight_map: dict[str, str] = {}
        total = 0
        for file_name, names in self.files:
            path = self.folder / file_name
            header, offsets = make_safetensors_header([(name, *self.entries[name]) for name in names])
            records = {
                name: TensorRecord(str(path), offsets[name], self.entries[name][1], self.entries[name][0]) for name in names
            }
            size = max((record.offset + record.num_bytes for record in records.values()), default=len(header))
            # a resumed run finds it, partly filled
            if not path.is_file():
                with path.open("wb") as stream:
                    stream.write(header)
                    stream.truncate(size)
            stacks = list_targets(records, self.stacked, alternate=self.alternate)
            filled = {target.name for target in stacks}
            singles = (name for name in names if name not in filled)
            targets += [HfTarget(name, records[name], self.owners.get(name, name)) for name in singles]
            targets += stacks
            weight_map |= dict.fromkeys(names, file_name)
            total += size - len(header)
        write_index(self.folder, weight_map, total)
        return targets


@dataclass(frozen=True)
class Plan:
    """A conversion that has been checked and can be run.

    Args:
        files: (path below the destination, bytes) of every weight file.
        create: makes the files in the staging folder and returns the targets.
        transform: what happens to tensors on the way.
        memory_bytes: upper bound of the tensors in memory at once, per worker.
        num_bytes: bytes to be written.
        beside: what is read beside the source: the folder of an adapter, another config.json.
        settings: what else decides the numbers that are written, for the record of an interrupted run.
        adapter: adapter that becomes part of an HF folder: its tokenizer and generation settings replace the base's.
    """

    source: Source
    destination: Destination
    files: Sequence[tuple[Path, int, Sequence[tuple[str, tuple[int, ...], torch.dtype]]]]
    create: Callable[[], Sequence[Target]]
    transform: Transform | None
    memory_bytes: int
    num_bytes: int
    beside: tuple[Path, ...] = ()
    settings: str = ""
    adapter: Path | None = None


#: (path at the destination, (name, shape, dtype) of every tensor) of every weight file.
_Listing = list[tuple[Path, list[tuple[str, tuple[int, ...], torch.dtype]]]]


@dataclass(frozen=True)
class _Content:
    """The content of the checkpoint.

    Args:
        model_config: shape of the model, with the vocabulary as the destination pads it.
        layout: how it is cut.
        ops: where each parameter goes.
        dtypes: HF name -> dtype at the destination.
    """

    source: Source
    destination: Destination
    model_config: ModelConfig
    layout: Layout
    ops: Sequence[WeightOp]
    dtypes: Mapping[str, torch.dtype]

    def dtype_of(self, op: WeightOp) -> torch.dtype:
        """Return the dtype of a parameter."""
        if op.hf[0] not in self.dtypes:
            raise ValueError(f"{self.source.path} lacks {op.hf[0]!r}")
        # the first tensor's: a parameter whose tensors differ in dtype is refused when its pieces are written
        return self.dtypes[op.hf[0]]

    def make_args(self) -> argparse.Namespace:
        """Return the args of a Megatron checkpoint."""
        destination, config = self.destination, dict(self.source.hf_config)
        if destination.dtype is not None:
            config |= dtype_keys(config, destination.dtype)
        return write_args(
            self.model_config,
            self.layout,
            config,
            destination.dtype or self.source.dtype,
            make_vocab_size_divisible_by=destination.make_vocab_size_divisible_by,
            grouped_gemm=destination.grouped_gemm,
            transformer_impl="transformer_engine" if destination.transformer_engine else "local",
            legacy=destination.kind == "legacy",
        )


def make_plan(source: Source, destination: Destination, peft: PeftMerge | None = None) -> Plan:
    """Check a conversion and plan its files; nothing is written.

    Raises:
        ValueError: the layout does not fit the model, the destination exists, or the form cannot hold the model.
    """
    _refuse(source, destination)
    content, cast = _plan_content(source, destination)
    steps = tuple(step for step in (peft, cast) if step is not None)
    listed, create = _FORMS[destination.kind](content)
    files = [
        (path, sum(TensorRecord("", 0, shape, dtype).num_bytes for _, shape, dtype in items), items) for path, items in listed
    ]
    return Plan(
        source,
        destination,
        files,
        create,
        _Chain(steps) if len(steps) > 1 else next(iter(steps), None),
        _memory_bound(source, content.ops, content.dtypes, frozenset() if peft is None else peft.pairs.keys()),
        sum(size for _, size, _ in files),
    )


def _refuse(source: Source, destination: Destination) -> None:
    """Refuse a model or a request that the form of the destination cannot hold."""
    model_config, layout = source.model_config, destination.layout
    refusals = {
        "torch_dist": (
            (
                destination.mindspeed_mla and model_config.multi_latent_attention,
                "--mla-layout mindspeed with --ckpt-format torch_dist: MindSpeed keeps the norms of such a checkpoint under "
                "keys of its own, which neither this tool nor Megatron reads; use --ckpt-format torch, or "
                "--mla-layout megatron",
            ),
            (
                layout is not None and layout.noop_layers,
                "torch_dist checkpoints load under any layout and hold no empty layers; leave out --noop-layers",
            ),
        ),
        "legacy": (
            (
                not source.architecture.legacy,
                f"Megatron's legacy layout cannot hold {source.architecture.name}; use the mcore layout",
            ),
            (model_config.head == "reward", "Megatron's legacy layout has no reward head; use the mcore layout"),
        ),
    }
    for cannot_hold, text in refusals.get(destination.kind, ()):
        if cannot_hold:
            raise ValueError(text)


def _plan_content(source: Source, destination: Destination) -> tuple[_Content, _Cast | None]:
    """Return what the checkpoint will hold, and the cast of what does not have that dtype yet."""
    model_config = source.model_config
    num_experts = model_config.num_moe_experts or 0
    layout = destination.layout or Layout(num_layers=model_config.num_layers, num_experts=num_experts)
    model_config = model_config.pad_vocab(destination.make_vocab_size_divisible_by, layout.tp)
    packing = ExpertPacking("local", 1)
    # elsewhere experts lie one by one, and the legacy layout has none
    if destination.grouped_gemm and num_experts and destination.kind == "mcore":
        packing = ExpertPacking("grouped", layout.num_expert_groups)
    ops = source.architecture.weight_ops(model_config, packing)
    if destination.mindspeed_mla and model_config.multi_latent_attention:
        ops = fuse_mindspeed_mla(model_config, ops)
    dtypes = {name: group.dtype for group in source.groups for name in group.hf}
    cast = None
    if destination.dtype is not None:
        # a router's balancing bias: in bfloat16 the small steps of its updates would be lost
        buffers = frozenset(name for op in ops if op.buffer for name in op.hf)
        cast = _Cast(destination.dtype, buffers)
        dtypes |= dict.fromkeys(dtypes.keys() - buffers, destination.dtype)
    return _Content(source, destination, model_config, layout, ops, dtypes), cast


def _list_hf(content: _Content) -> tuple[_Listing, Callable[[], Sequence[Target]]]:
    architecture = content.source.architecture
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for op in content.ops:
        if not op.copy_of_tied:
            entries |= {name: (content.dtype_of(op), shape) for name, shape in zip(op.hf, op.shapes)}
    copies = architecture.hf_copies(content.source.model_config)
    entries |= {copy: entries[owner] for copy, owner in copies.items()}
    experts = architecture.expert_names
    separate = tuple(entries) if experts.stacked or experts.may_be_transposed else ()
    entries = stack_shapes(entries) if separate else entries
    sizes = {name: TensorRecord("", 0, shape, dtype).num_bytes for name, (dtype, shape) in entries.items()}
    shards = plan_shards(sizes, content.destination.max_shard_bytes)
    plan = _HfPlan(content.destination.staging, shards, entries, copies, separate, experts.stacked)
    listed = [
        (content.destination.final / file_name, [(name, entries[name][1], entries[name][0]) for name in names])
        for file_name, names in shards
    ]
    return listed, plan.create


def _list_ranks(content: _Content) -> tuple[_Listing, Callable[[], Sequence[Target]]]:
    args, destination = content.make_args(), content.destination
    plan = plan_ranks(
        destination.staging,
        content.ops,
        content.model_config,
        content.layout,
        content.dtype_of,
        legacy=destination.kind == "legacy",
        transformer_engine=destination.transformer_engine,
    )
    listed = [
        (
            destination.final / file.path.relative_to(destination.staging),
            [("/".join(keys), shape, dtype) for keys, (dtype, shape) in file.tensors.items()],
        )
        for file in plan.files
    ]
    return listed, functools.partial(plan.create, args)


def _list_dist(content: _Content) -> tuple[_Listing, Callable[[], Sequence[Target]]]:
    from mindspeed_rl.checkpoint.dist import plan_dist  # loads torch.distributed.checkpoint, which takes a second

    args = content.make_args()
    plan = plan_dist(content.destination.staging, content.ops, content.model_config, content.dtype_of)
    listed = [
        (content.destination.final / file.path.name, [(op.mcore, shape, dtype) for op, dtype, shape in file.items])
        for file in plan.files
    ]
    return listed, functools.partial(plan.create, args)


#: Lists the weight files of a form, and returns what makes them.
_FORMS = {"hf": _list_hf, "mcore": _list_ranks, "legacy": _list_ranks, "torch_dist": _list_dist}


def _memory_bound(
    source: Source, ops: Sequence[WeightOp], dtypes: Mapping[str, torch.dtype], with_adapter: Collection[str]
) -> int:
    # a job holds what it read and one packed shard; a cast adds one more copy of a tensor
    shapes = {name: shape for op in ops for name, shape in zip(op.hf, op.shapes)}
    sizes = {name: TensorRecord("", 0, shape, dtypes.get(name, torch.float32)).num_bytes for name, shape in shapes.items()}
    by_target = (sum(sizes[name] for name in op.hf) for op in ops)
    by_group = (sum(sizes.get(name, 0) for name in group.hf) for group in source.groups)
    # adapters are added in float32, to one tensor of an HF folder or to one Megatron parameter at a time
    merged = [[name] for name in with_adapter]
    merged += [list(group.hf) for group in source.groups if isinstance(group, MegatronGroup) and group.lora is not None]
    deltas = (sum(4 * math.prod(shapes[name]) for name in names if name in shapes) for names in merged)
    return 2 * max(max(by_target, default=0), max(by_group, default=0)) + max(deltas, default=0)
