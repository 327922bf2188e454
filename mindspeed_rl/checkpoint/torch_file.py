"""torch's zip files: opened without running what is pickled in them, tensors as records, written with holes to be filled.

Megatron's rank files hold an argparse.Namespace and enums beside the tensors, and upstream writes them with pickle
protocol 4, which ``torch.load(weights_only=True)`` refuses. The unpickler here resolves a fixed list of harmless names;
names of Megatron, MindSpeed and NumPy become inert placeholders, everything else is an error.
"""

from __future__ import annotations

import argparse
import collections
import io
import math
import os
import pickle
import sys
import types
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.checkpoint.records import TensorRecord, contiguous_strides

_SAFE: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("builtins", "slice"): slice,
    ("builtins", "complex"): complex,
    ("__builtin__", "set"): set,
    ("_codecs", "encode"): None,  # filled below
    ("pathlib", "PosixPath"): Path,
    ("pathlib", "Path"): Path,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch", "Tensor"): torch.Tensor,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
}
_SAFE_REBUILDERS = (
    "_rebuild_tensor",
    "_rebuild_tensor_v2",
    "_rebuild_parameter",
    "_rebuild_parameter_with_state",
    "_rebuild_device_tensor_from_numpy",
)
_INERT_PACKAGES = (
    "megatron",
    "mindspeed",
    "mindspeed_llm",
    "modellink",
    "numpy",
    "transformer_engine",
    "signal",
    "mindspeed_rl",
)


def _encode_latin1(text: str, encoding: str) -> bytes:
    # what pickle protocol 2 calls to rebuild a bytes object
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"refusing to encode with {encoding!r}")
    return text.encode("latin1")


_SAFE["_codecs", "encode"] = _encode_latin1


class Inert:
    """Stands in for an object whose class is not loaded; holds nothing and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        return self

    def append(self, item: Any) -> None:
        """Accepts what pickle appends to list subclasses."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def _inert_attribute(owner: Any, name: str) -> Inert:
    # some releases of Python pickle an enum's member as getattr(class, name)
    if owner is not Inert and not isinstance(owner, Inert):
        raise pickle.UnpicklingError(f"refusing to take {name!r} of {owner!r}")
    return Inert()


_SAFE["builtins", "getattr"] = _inert_attribute


class SafeUnpickler(pickle.Unpickler):
    """Unpickles tensors and plain data; refuses every name that is not on the list above."""

    def find_class(self, module: str, name: str) -> Any:
        """The object a pickle refers to by name.

        Raises:
            pickle.UnpicklingError: the name is not on the list.
        """
        if (module, name) in _SAFE:
            return _SAFE[module, name]
        if module == "torch._utils" and name in _SAFE_REBUILDERS:
            return getattr(torch._utils, name)
        if module in ("torch", "torch.storage") and name.endswith("Storage") and hasattr(torch, name):
            return getattr(torch, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] in _INERT_PACKAGES:
            return Inert
        raise pickle.UnpicklingError(f"refusing to load {module}.{name}: it is neither tensor data nor plain settings")


#: What ``torch.load(pickle_module=...)`` needs.
safe_pickle = types.ModuleType("safe_pickle")
safe_pickle.Unpickler = SafeUnpickler
safe_pickle.UnpicklingError = pickle.UnpicklingError
safe_pickle.load = lambda file, **options: SafeUnpickler(file, **options).load()


@dataclass(frozen=True)
class _Storage:
    """A storage inside a torch zip file: dtype, and where its bytes start."""

    path: str
    offset: int
    num_bytes: int
    dtype: torch.dtype


class _RecordUnpickler(SafeUnpickler):
    """Unpickles the ``data.pkl`` of a torch zip file; tensors become records, their bytes stay in the file."""

    def __init__(self, path: str, archive: zipfile.ZipFile, prefix: str) -> None:
        super().__init__(archive.open(f"{prefix}/data.pkl"))
        self._path, self._archive, self._prefix = path, archive, prefix

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key, _, count = pid
        if kind != "storage":
            raise pickle.UnpicklingError(f"unknown persistent object {kind!r}")
        dtype = _STORAGE_DTYPES.get(storage_type)
        if dtype is None:
            raise pickle.UnpicklingError(f"unknown storage type {storage_type!r}")
        offset, size = _entry_data(self._path, self._archive, f"{self._prefix}/data/{key}")
        if size != count * dtype.itemsize:
            raise pickle.UnpicklingError(f"storage {key} has {size} bytes; its pickle says {count * dtype.itemsize}")
        return _Storage(self._path, offset, size, dtype)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor")):
            return _record_of
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return _record_of_v3
        if module == "torch._utils" and name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
            return lambda data, *unused: data
        return super().find_class(module, name)


def _record_of(
    storage: _Storage, start: int, size: Sequence[int], stride: Sequence[int], *unused: Any
) -> TensorRecord | Tensor:
    shape = tuple(size)
    record = TensorRecord(storage.path, storage.offset + start * storage.dtype.itemsize, shape, storage.dtype)
    if tuple(stride) == contiguous_strides(shape) or 0 in shape:
        return record
    whole = TensorRecord(storage.path, storage.offset, (storage.num_bytes // storage.dtype.itemsize,), storage.dtype).read()
    return whole.as_strided(shape, tuple(stride), start).contiguous()


def _record_of_v3(
    storage: _Storage,
    start: int,
    size: Sequence[int],
    stride: Sequence[int],
    grad: bool,
    hooks: Any,
    dtype: torch.dtype,
    *unused: Any,
) -> TensorRecord | Tensor:
    # dtypes without a storage type of their own (float8) lie in untyped storages
    return _record_of(replace(storage, dtype=dtype), start, size, stride)


def _entry_data(path: str, archive: zipfile.ZipFile, name: str) -> tuple[int, int]:
    """Offset and size of the bytes of a stored zip entry."""
    info = archive.getinfo(name)
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        header = file.read(30)  # the local header's fixed part ends with the lengths of name and extra field
    if len(header) < 30 or info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{path}: {name} is not stored as plain bytes")
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return info.header_offset + 30 + lengths, info.file_size


def load_with_records(path: str | Path) -> Any:
    """The content of a torch zip file with a :class:`TensorRecord` in place of every tensor.

    A tensor that is not stored contiguously, and a file in torch's format from before 1.6, is loaded as a tensor.

    Raises:
        ValueError: the file is missing, truncated or damaged, or refers to code that is not on the safe list.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"checkpoint file {path} is missing")
    try:
        if not _looks_zipped(path):
            return torch.load(path, map_location="cpu", weights_only=False, pickle_module=safe_pickle)
        with zipfile.ZipFile(path) as archive:
            prefix = next(name.removesuffix("/data.pkl") for name in archive.namelist() if name.endswith("/data.pkl"))
            return _RecordUnpickler(str(path), archive, prefix).load()
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: {error}") from error
    except (zipfile.BadZipFile, RuntimeError, EOFError, OSError, KeyError, StopIteration) as error:
        raise ValueError(f"{path} cannot be read as a torch checkpoint (truncated or damaged?): {error}") from error


def _looks_zipped(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


@dataclass(frozen=True)
class Hole:
    """Stands for a tensor that will be written later."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _HoleStorage:
    hole: Hole
    key: str


class _HolePickler(pickle.Pickler):
    """Pickles holes the way torch pickles contiguous CPU tensors, each with a storage of its own."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.holes: list[Hole] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _HoleStorage):
            return None
        storage_type = _STORAGE_TYPES[obj.hole.dtype]
        return ("storage", storage_type, obj.key, "cpu", math.prod(obj.hole.shape))

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Hole):
            return NotImplemented
        storage = _HoleStorage(obj, str(len(self.holes)))
        self.holes.append(obj)
        arguments = (storage, 0, obj.shape, contiguous_strides(obj.shape), False, collections.OrderedDict())
        return (torch._utils._rebuild_tensor_v2, arguments)


_STORAGE_TYPES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
_STORAGE_DTYPES = {storage: dtype for dtype, storage in _STORAGE_TYPES.items()} | {torch.UntypedStorage: torch.uint8}


def write_with_holes(path: str | Path, content: Any) -> None:
    """Write what ``torch.save`` would write for ``content``, but for the bytes of the :class:`Hole` objects in it.

    The file has its final size; on file systems that can, it is sparse.
    """
    pickled = io.BytesIO()
    pickler = _HolePickler(pickled)
    pickler.dump(content)
    writer = torch._C.PyTorchFileWriter(str(path))
    data = pickled.getvalue()
    writer.write_record("data.pkl", data, len(data))
    writer.write_record("byteorder", sys.byteorder, len(sys.byteorder))
    for key, hole in enumerate(pickler.holes):
        writer.write_record_metadata(f"data/{key}", hole.num_bytes)
    writer.write_end_of_file()


def create_with_holes(
    path: str | Path, content: Any, shapes: Mapping[tuple[Any, ...], tuple[torch.dtype, tuple[int, ...]]]
) -> dict:
    """Write a torch zip file whose tensors are holes, and say where they are.

    Args:
        path: the file to make.
        content: nested dicts of plain data; the tensors are added to it.
        shapes: path of keys inside ``content`` -> dtype and shape of the tensor that goes there.

    Returns:
        path of keys -> record to write to.
    """
    for keys, (dtype, shape) in shapes.items():
        place = content
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = Hole(dtype, shape)
    write_with_holes(path, content)
    return records_at(path, shapes)


def records_at(path: str | Path, places: Iterable[tuple[Any, ...]]) -> dict[tuple[Any, ...], TensorRecord]:
    """The records of some tensors of a torch zip file, by their path of keys."""
    content = load_with_records(path)
    found = {}
    for keys in places:
        entry = content
        for key in keys:
            entry = entry[key]
        found[keys] = entry
    return found


def walk_records(content: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], TensorRecord | Tensor]]:
    """Every tensor or record in nested dicts, with its path of keys."""
    if isinstance(content, (TensorRecord, Tensor)):
        yield keys, content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from walk_records(value, (*keys, str(key)))


def tensor_envelope(dtype: torch.dtype, shape: tuple[int, ...], scratch: Path) -> tuple[bytes, bytes]:
    """The bytes that ``torch.save`` puts before and after the data of one contiguous tensor.

    Args:
        scratch: a file name that may be overwritten.
    """
    write_with_holes(scratch, Hole(dtype, shape))
    record = load_with_records(scratch)
    with open(scratch, "rb") as file:
        head = file.read(record.offset)
        file.seek(record.num_bytes, os.SEEK_CUR)
        tail = file.read()
    os.remove(scratch)
    return head, tail


def load_bytes(data: bytes) -> Any:
    """Unpickle an object that ``torch.save`` wrote, from memory, by the same rules."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=safe_pickle)
