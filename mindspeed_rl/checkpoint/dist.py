"""Megatron's ``torch_dist`` checkpoints: whole tensors that load under any layout, in torch.distributed.checkpoint's files.

DCP's classes are the index, but its FileSystemReader unpickles ``.metadata`` and objects unchecked and copies every chunk (0.9
GB per second of processor time; records 4.2), so `DistReader` replaces it where Megatron loads. FileSystemWriter cannot leave
holes, so neither workers nor a resumed run could fill them.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

from mindspeed_rl.checkpoint import checksums
from mindspeed_rl.checkpoint.jobs import LoraShards, MegatronTarget, StoredTensor
from mindspeed_rl.checkpoint.mcore import Adapters, OpenCheckpoint, iteration_folder, list_surplus
from mindspeed_rl.checkpoint.megatron_args import CheckpointArgs, read_args
from mindspeed_rl.checkpoint.tensor_record import TensorRecord
from mindspeed_rl.checkpoint.torch_file import (
    UNREADABLE,
    Inert,
    SafeUnpickler,
    load_part_with_records,
    load_with_records,
    save_with_holes,
)
from mindspeed_rl.files import open_regular, read_json
from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.names import get_distributed_name, list_names
from mindspeed_rl.models.vision import TOWER
from mindspeed_rl.models.weights import WeightOp, concatenate

METADATA_FILE = ".metadata"
#: the object of megatron-core 0.19 with what earlier releases save in common.pt
COMMON_STATE = "common_state"

#: Holds the one object that stands for every layer's empty extra state.
_EXTRA_STATE_FILE = "__0_extra_state.distcp"
#: first letters of the names of linear layers
_LINEAR = ("linear_", "in_proj", "out_proj")

_LORA = (".lora_A.default.weight", ".lora_B.default.weight")

_OPTIMIZER = ("optimizer.", "chained_")
#: prefix of the names of the optimizer's states in training checkpoints, before the state and the parameter
OPTIMIZER_STATE = "optimizer.state."
#: the same of a moving average of the weights, before the parameter
_AVERAGE = "average."

_METADATA_CLASSES = {
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
}


class _MetadataUnpickler(SafeUnpickler):
    """Reads ``.metadata`` files: besides plain data only the record classes of torch.distributed.checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.distributed.checkpoint.metadata" and name in _METADATA_CLASSES:
            return getattr(dcp, name)
        if (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            return _StorageInfo
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if module.startswith("torch.distributed."):
            return Inert  # Megatron also keeps the plans by which it saved
        return super().find_class(module, name)


def _check_index(metadata: dcp.Metadata) -> None:
    """Raise one of UNREADABLE where a part of an index is missing or of another kind, or leads out of its folder."""
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, dcp.TensorStorageMetadata):
            for numbers in (entry.size, *((*chunk.offsets, *chunk.sizes) for chunk in entry.chunks)):
                # raises for any other kind
                math.prod(torch.Size(numbers))
        elif not isinstance(entry, dcp.BytesStorageMetadata):
            raise TypeError(f"{type(entry).__name__} is neither a tensor nor an object")
    for index, info in metadata.storage_data.items():
        name, start, length = info.relative_path, info.offset, info.length
        if not isinstance(index.fqn, str) or os.path.basename(name) != name or min(start, length) < 0:
            raise ValueError(f"its entry {index.fqn!r} is at bytes {start} to {start} + {length} of {name!r}")


def read_metadata(path: Path) -> dcp.Metadata:
    """Read the index of a ``torch_dist`` checkpoint; ValueError if it is missing, damaged, or refers to code."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        with open_regular(path) as file:
            metadata = _MetadataUnpickler(file).load()
        _check_index(metadata)
        return metadata
    except UNREADABLE as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _load_part(path: str, start: int, length: int, *, as_tensors: bool = False) -> Any:
    """Load what was saved into a part of a file; see `load_part_with_records`.

    Raises:
        ValueError: the file is truncated or damaged, or refers to code.
    """
    available = os.path.getsize(path) - start
    if available < length:
        raise ValueError(f"{path} is truncated: {length} bytes expected at {start}, {max(available, 0)} found")
    with open_regular(path) as file:
        view = cast(IO[bytes], _create_file_view(cast(io.IOBase, file), start, length))  # declared as its base class
        # many zip files lie in one .distcp, and torch's reader takes its stream for a whole one
        return load_part_with_records(path, view, start, as_tensors=as_tensors)


class DistReader(FileSystemReader):
    """torch.distributed.checkpoint's reader of a folder, for Megatron's load: all is unpickled by `SafeUnpickler`."""

    _index: dcp.Metadata | None = None

    def read_metadata(self, *args: object, **kwargs: object) -> dcp.Metadata:
        """Read the index, once.

        Raises:
            ValueError: see the function of this name.
        """
        if self._index is None:
            self._index = read_metadata(Path(self.path, METADATA_FILE))
            self._index.storage_meta = dcp.StorageMeta(load_id=self.load_id)
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan names into the tensors and the state of the planner.

        Raises:
            ValueError: a file is truncated or damaged, refers to code, or has a tensor of another shape.
        """
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            path = os.path.join(self.path, info.relative_path)
            if item.type == LoadItemType.BYTE_IO:
                # the planner unpickles unchecked, so it gets the bytes of what was checked
                content = io.BytesIO()
                torch.save(_load_part(path, info.offset, info.length, as_tensors=True), content)
                content.seek(0)
                planner.load_bytes(item, content)
                continue
            stored = _load_part(path, info.offset, info.length)
            tensor = narrow_tensor_by_index(
                stored.read() if isinstance(stored, TensorRecord) else stored, item.storage_offsets, item.lengths
            )
            target = planner.resolve_tensor(item).detach()
            if tensor.shape != target.shape:
                shapes = f"{list(tensor.shape)}, not {list(target.shape)}"
                raise ValueError(f"{path}: {item.storage_index.fqn} has the shape {shapes}")
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


@dataclass(frozen=True)
class Chunk:
    """A stored piece of a tensor: its place in the tensor and in a file."""

    path: str
    start: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def locate(self) -> StoredTensor:
        """Find its data in the file, of shape [sizes].

        Raises:
            ValueError: the file is truncated or damaged.
        """
        data = _load_part(self.path, self.start, self.length)
        if not isinstance(data, (TensorRecord, Tensor)) or math.prod(data.shape) != math.prod(self.sizes):
            raise ValueError(f"{self.path}: no tensor of shape {list(self.sizes)} is at byte {self.start}")
        return data.reshaped(*self.sizes) if isinstance(data, TensorRecord) else data.reshape(self.sizes)

    def part(self, index: tuple[int, ...]) -> Tensor:
        """Read the values at these indices of the leading axes."""
        data = self.locate()
        if isinstance(data, Tensor):
            return data[index]
        for number in index:
            data = data.rows(number, number + 1).reshaped(*data.shape[1:])
        return data.read()


def listed_chunks(folder: Path, metadata: dcp.Metadata) -> dict[str, list[Chunk]]:
    """List the chunks of every tensor of a checkpoint as its index has them, whether their files are there or not."""
    chunks: dict[str, list[Chunk]] = {}
    sizes: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    for index, info in metadata.storage_data.items():
        entry = metadata.state_dict_metadata.get(index.fqn)
        if not isinstance(entry, dcp.TensorStorageMetadata):
            continue
        path = folder / info.relative_path
        if index.fqn not in sizes:
            sizes[index.fqn] = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
        offsets = tuple(index.offset or (0,) * len(entry.size))
        if offsets not in sizes[index.fqn]:
            raise ValueError(f"{folder / METADATA_FILE}: {index.fqn} has no slice at {list(offsets)}")
        chunk = Chunk(str(path), info.offset, info.length, offsets, sizes[index.fqn][offsets])
        chunks.setdefault(index.fqn, []).append(chunk)
    return chunks


def _load_common_state(folder: Path, metadata: dcp.Metadata) -> object:
    """Return what megatron-core 0.19 saves among the objects, and earlier releases in common.pt; {} where there is none."""
    places = [info for index, info in metadata.storage_data.items() if index.fqn.partition("/")[0] == COMMON_STATE]
    # a list with the one object of all ranks
    return _load_part(str(folder / places[0].relative_path), places[0].offset, places[0].length)[0] if places else {}


def _stored_chunks(folder: Path, metadata: dcp.Metadata) -> dict[str, list[Chunk]]:
    """List the chunks of every tensor of a checkpoint; ValueError if a file is missing."""
    chunks = listed_chunks(folder, metadata)
    missing = sorted(path for path in {c.path for listed in chunks.values() for c in listed} if not os.path.isfile(path))
    if missing:
        raise ValueError(f"{folder} lacks {os.path.basename(missing[0])}, which .metadata names")
    return chunks


@dataclass(frozen=True)
class DistGroup:
    """One Megatron parameter inside a ``torch_dist`` tensor that may also hold other layers or experts.

    Args:
        op: its row of the weight table.
        chunks: the stored pieces that overlap it.
        index: its place along the leading (layer, expert) axes.
        shape: its own shape.
        lora: an adapter to merge into it.
    """

    op: WeightOp
    chunks: tuple[Chunk, ...]
    index: tuple[int, ...]
    shape: tuple[int, ...]
    stored_dtype: torch.dtype
    lora: LoraShards | None = None

    @property
    def hf(self) -> tuple[str, ...]:
        return self.op.hf

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.stored_dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        return self.stored_dtype

    def load(self, strict: bool = False) -> dict[str, Tensor]:
        return {name: concatenate(slices) for name, slices in self.load_chunks().items()}

    def load_chunks(self) -> dict[str, list[Tensor]]:
        whole = self.read()
        return self.op.shards_to_hf_chunks([whole if self.lora is None else self.lora.merge_into(self.op, whole)])

    def read(self) -> Tensor:
        """Read the full stored parameter."""
        lead = len(self.index)
        whole = torch.empty(0, dtype=self.stored_dtype)
        for chunk in self.chunks:
            part = chunk.part(tuple(i - offset for i, offset in zip(self.index, chunk.offsets[:lead])))
            # usually one piece is the whole, and stays a view of the file
            if part.shape == self.shape:
                return part
            if not whole.numel():
                whole = torch.empty(self.shape, dtype=self.stored_dtype)
            spans = tuple(slice(start, start + size) for start, size in zip(chunk.offsets[lead:], chunk.sizes[lead:]))
            whole[spans] = part
        return whole


class DistFolder:
    """A ``torch_dist`` checkpoint opened for reading.

    Args:
        path: the checkpoint folder, or its ``iter_*`` folder.
        iteration: which iteration; None for the latest.
        verified: the files have been checked against their checksums already.

    Raises:
        ValueError: a file is missing or damaged.
    """

    legacy = False

    def __init__(self, path: str | Path, iteration: int | None = None, *, verified: bool = False) -> None:
        self.path = Path(path)
        self.folder = iteration_folder(path, iteration)
        if not verified:
            checksums.verify(self.folder)
        self.metadata = read_metadata(self.folder / METADATA_FILE)
        common = self.folder / "common.pt"
        content = load_with_records(common) if common.is_file() else _load_common_state(self.folder, self.metadata)
        self.args: CheckpointArgs = read_args(content.get("args") if isinstance(content, Mapping) else None)
        # a training checkpoint says here which adapters it holds
        record = self.folder / "run_state.json"
        lora = read_json(record).get("lora") if record.is_file() else None
        if lora is not None:
            self.args = replace(self.args, lora_r=int(lora["r"]), lora_alpha=float(lora["alpha"]))
        self.chunks = _stored_chunks(self.folder, self.metadata)
        #: whether it holds the state of an optimizer
        self.holds_optimizer = any(name.startswith(_OPTIMIZER) for name in self.metadata.state_dict_metadata)

    def open(self, architecture: Architecture, model_config: ModelConfig, loosely: bool = False) -> OpenCheckpoint:
        """Match the tensors with the architecture's weight table.

        Raises:
            ValueError: a parameter is missing, has the wrong shape, or (unless ``loosely``) is not in the table.
        """
        entries = self.metadata.state_dict_metadata
        embedding = entries.get("embedding.word_embeddings.weight")
        if not isinstance(embedding, dcp.TensorStorageMetadata):
            raise ValueError(f"{self.folder} has no embedding.word_embeddings.weight")
        predictions = [int(name.split(".")[2]) for name in entries if name.startswith("mtp.layers.")]
        model_config = replace(
            model_config,
            padded_vocab_size=max(embedding.size[0], model_config.vocab_size),
            mtp_num_layers=max(predictions, default=-1) + 1,
            # none of a run with `language_model_only`
            vision=model_config.vision if any(name.startswith(TOWER) for name in entries) else None,
        )
        used: set[str] = set()
        groups = []
        for op in architecture.weight_ops(model_config):
            # Megatron stores a tied head under the embedding's key
            if not op.copy_of_tied:
                groups.append(self._group(model_config, op, used))
        adapters = self._adapters(architecture, model_config, used)
        model_keys = {
            name
            for name, entry in entries.items()
            if isinstance(entry, dcp.TensorStorageMetadata)
            # moments and averages have the parameters' names behind these, and would all count as unknown tensors
            and not name.startswith((*_OPTIMIZER, "rng_state", "rerun_state", "opt_param", _AVERAGE))
        }
        extra = list_surplus(model_config, model_keys - used)
        if extra and not loosely:
            raise ValueError(
                f"{self.folder} holds {extra[0]!r}, unknown to {model_config.architecture} with num_hidden_layers "
                f"{model_config.num_layers}; --load-checkpoint-loosely skips it"
            )
        layout = Layout(num_layers=model_config.num_layers, num_experts=model_config.num_moe_experts or 0)
        return OpenCheckpoint(architecture, model_config, layout, groups, adapters, extra)

    def open_states(self, architecture: Architecture, model_config: ModelConfig, prefix: str) -> list[DistGroup]:
        """Match tensors that have the names of weights after a prefix with the table; weights without one are left out.

        Args:
            prefix: a state of the optimizer, such as "optimizer.state.exp_avg."
        """
        ops = [op for op in architecture.weight_ops(model_config) if not op.copy_of_tied]
        found = (self._stored(model_config, op, set(), prefix=prefix) for op in ops)
        return [group for group in found if group is not None]

    def adapters(self, architecture: Architecture, model_config: ModelConfig) -> Adapters:
        """Read the LoRA weights of a checkpoint that need not hold the base weights.

        Raises:
            ValueError: it holds none, an adapter is incomplete, or one belongs to no parameter of the architecture.
        """
        used: set[str] = set()
        adapters = self._adapters(architecture, model_config, used)
        unknown = sorted(name for name in self.chunks if name.endswith(_LORA) and name not in used)
        # the moments of adapters end in the same names
        unknown = [name for name in unknown if not name.startswith("optimizer.")]
        if unknown:
            raise ValueError(f"{self.path} holds {unknown[0]!r}, which belongs to no parameter of {model_config.architecture}")
        if not adapters:
            raise ValueError(f"{self.path} holds no LoRA weights (names ending in {_LORA[0]})")
        return adapters

    def _adapters(self, architecture: Architecture, model_config: ModelConfig, used: set[str]) -> Adapters:
        adapters: dict[str, tuple[WeightOp, tuple[Tensor], tuple[Tensor]]] = {}
        for op in architecture.weight_ops(model_config):
            a, b = (self._stored(model_config, op, used, kind) for kind in _LORA)
            if (a is None) != (b is None):
                raise ValueError(f"{self.folder}: the adapter of {op.mcore} is incomplete")
            if a is not None and b is not None:
                adapters[op.mcore] = (op, (a.read(),), (b.read(),))
        return adapters

    def _group(self, model_config: ModelConfig, op: WeightOp, used: set[str]) -> DistGroup:
        stored = self._stored(model_config, op, used)
        if stored is None:
            name = list_places(model_config, op)[0][0]
            raise ValueError(
                f"{self.folder} lacks {name!r}, which a {model_config.architecture} checkpoint with num_hidden_layers "
                f"{model_config.num_layers} has"
            )
        return stored

    def _stored(
        self, model_config: ModelConfig, op: WeightOp, used: set[str], kind: str = "", prefix: str = ""
    ) -> DistGroup | None:
        """Find the stored parameter, or the part of its adapter that `kind` names; None if there is none.

        Args:
            prefix: of the name; a state of the optimizer has the parameter's name after one.
        """
        for name, index, sizes in list_places(model_config, op):
            name = prefix + (f"{name.removesuffix('.weight')}{kind}" if kind else name)
            entry = self.metadata.state_dict_metadata.get(name)
            if not isinstance(entry, dcp.TensorStorageMetadata):
                continue
            # the table does not know an adapter's rank: its shape is taken as it is stored
            shape = tuple(entry.size)[len(sizes) :] if kind else op.shard_shape(1)
            if tuple(entry.size) != (*sizes, *shape):
                counted = f" for num_hidden_layers {model_config.num_layers}" if model_config.num_layers in sizes else ""
                raise ValueError(f"{self.folder}: {name} has shape {list(entry.size)}; expected {[*sizes, *shape]}{counted}")
            lead = len(index)
            overlapping = tuple(
                chunk
                for chunk in self.chunks.get(name, ())
                if all(o <= i < o + s for i, o, s in zip(index, chunk.offsets[:lead], chunk.sizes[:lead]))
            )
            covered = sum(math.prod(chunk.sizes[lead:]) for chunk in overlapping)
            # pieces do not overlap, so the count shows that none is missing
            if covered != math.prod(shape):
                raise ValueError(f"{self.folder}: the stored pieces of {name} do not cover {op.mcore}")
            used.add(name)
            return DistGroup(op, overlapping, index, shape, entry.properties.dtype)
        return None


def list_places(model_config: ModelConfig, op: WeightOp) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """List the possible keys of a parameter in a ``torch_dist`` checkpoint: one for all layers, one a layer, unfused norms.

    Returns:
        Key, index along the leading axes (layer, expert), and sizes of these axes.
    """
    name, index, sizes = get_distributed_name(model_config, op)
    places = [(name, index, sizes)]
    expert = index[-1:] if op.experts else ()
    expert_sizes = sizes[-1:] if op.experts else ()
    if op.section == "layer":
        assert op.layer is not None
        inner = name.removeprefix(f"decoder.layers.{op.layer}.").removeprefix("decoder.layers.")
        plain = op.mcore.removeprefix(f"decoder.layers.{op.layer}.")
        for tail in (inner,) if op.experts else (inner, plain):
            places.append((f"decoder.layers.{op.layer}.{tail}", expert, expert_sizes))
            places.append((f"decoder.layers.{tail}", (op.layer, *expert), (model_config.num_layers, *expert_sizes)))
    else:
        places += [(alias, (), ()) for alias in list_names(model_config, op, op.mcore)]
    return list(dict.fromkeys(places))


# ---------------------------------------------------------------------- writing


@dataclass(frozen=True)
class _DistFile:
    """One ``.distcp`` file to be made."""

    path: Path
    items: Sequence[tuple[WeightOp, torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class DistPlan:
    """The files of a ``torch_dist`` checkpoint and the place of each parameter in them."""

    folder: Path
    model_config: ModelConfig
    files: Sequence[_DistFile]

    def create(self, args: argparse.Namespace) -> list[MegatronTarget]:
        """Make the files with holes, index and common state unless they are there; return what fills the holes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # `_write_files` writes the index last: where it is, the other files are whole
        if not (self.folder / METADATA_FILE).is_file():
            self._write_files(args)
        chunks = _stored_chunks(self.folder, read_metadata(self.folder / METADATA_FILE))
        places = {(name, chunk.offsets): chunk for name, listed in chunks.items() for chunk in listed}
        targets = []
        for op, _, shape in (item for file in self.files for item in file.items):
            name, index, _ = get_distributed_name(self.model_config, op)
            record = places[name, (*index, *(0 for _ in shape))].locate()
            assert isinstance(record, TensorRecord)
            targets.append(MegatronTarget(op, ((record.reshaped(*shape),),)))
        return targets

    def _write_files(self, args: argparse.Namespace) -> None:
        entries: dict[str, dcp.TensorStorageMetadata] = {}
        storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
        for file in self.files:
            with file.path.open("wb") as stream:
                for op, dtype, shape in file.items:
                    name, index, sizes = get_distributed_name(self.model_config, op)
                    # a piece for each layer and expert: a hole of its own, which any worker fills without the others
                    stored = torch.Size((*(1 for _ in index), *shape))
                    offsets = torch.Size((*index, *(0 for _ in shape)))
                    start = stream.tell()
                    save_with_holes(torch.empty(stored, dtype=dtype), stream)
                    properties = dcp.TensorProperties(dtype=dtype)
                    empty = dcp.TensorStorageMetadata(properties, torch.Size((*sizes, *shape)), [])
                    entry = entries.setdefault(name, empty)
                    place = _StorageInfo(file.path.name, start, stream.tell() - start)
                    storage[dcp.MetadataIndex(name, offsets, len(entry.chunks))] = place
                    entry.chunks.append(dcp.ChunkStorageMetadata(offsets, stored))
        metadata = dcp.Metadata({**entries, **self._extra_states(storage)}, planner_data={}, storage_data=storage)
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
        # by these keys Megatron's dist_checkpointing chooses its reader
        (self.folder / "metadata.json").write_text(json.dumps({**config, "common_backend_version": 1}), encoding="utf-8")
        torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 1}, self.folder / "common.pt")
        with (self.folder / METADATA_FILE).open("wb") as stream:
            pickle.dump(metadata, stream)

    def _extra_states(self, storage: dict[dcp.MetadataIndex, _StorageInfo]) -> dict[str, dcp.BytesStorageMetadata]:
        """Write the (empty) extra states of linear layers and attention that Megatron's loader needs; all share one object."""
        empty = io.BytesIO()
        # a list of one, as Megatron saves the objects under a key; None is a state without 8-bit scales
        torch.save([None], empty)
        path = self.folder / _EXTRA_STATE_FILE
        path.write_bytes(empty.getvalue())
        info = _StorageInfo(path.name, 0, len(empty.getvalue()))
        names: dict[str, dcp.BytesStorageMetadata] = {}
        for file in self.files:
            for op, _, _ in file.items:
                module, suffix, _ = op.mcore.rpartition(".weight")
                if not suffix or op.section not in ("layer", "mtp") or not module.rpartition(".")[2].startswith(_LINEAR):
                    continue
                name, index, sizes = get_distributed_name(self.model_config, op)
                # Megatron's ShardedObject.unique_key, in which no leading axis is place 0 of 1
                position = "/shard_" + ".".join(map(str, index or (0,))) + "_" + ".".join(map(str, sizes or (1,)))
                names[name.removesuffix(".weight") + "._extra_state" + position] = dcp.BytesStorageMetadata()
                if module.endswith(".self_attention.linear_proj"):
                    # TransformerEngine's attention has one as well
                    attention = name.removesuffix("linear_proj.weight") + "core_attention._extra_state"
                    names[attention + position] = dcp.BytesStorageMetadata()
        storage |= {dcp.MetadataIndex(name): info for name in names}
        return names


def plan_dist(
    folder: Path,
    ops: Sequence[WeightOp],
    model_config: ModelConfig,
    dtype_of: Callable[[WeightOp], torch.dtype],
    max_file_bytes: int = 5 * 10**9,
) -> DistPlan:
    """Plan the files of a ``torch_dist`` checkpoint in ``folder``, which is not touched."""
    files: list[list[tuple[WeightOp, torch.dtype, tuple[int, ...]]]] = []
    filled = 0
    for op in ops:
        if op.copy_of_tied:
            continue
        item = (op, dtype_of(op), op.shard_shape(1))
        size = TensorRecord("", 0, item[2], item[1]).num_bytes
        if not files or filled + size > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(item)
        filled += size
    return DistPlan(folder, model_config, [_DistFile(folder / f"__0_{i}.distcp", items) for i, items in enumerate(files)])
