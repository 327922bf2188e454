"""torch's zip files: opened without running what is pickled in them, tensors as records, written with holes to be filled.

Megatron's rank files hold an argparse.Namespace and enums beside the tensors, and upstream writes them with pickle
protocol 4, which ``torch.load(weights_only=True)`` refuses. The unpickler here resolves a fixed list of harmless names;
names of Megatron, MindSpeed and NumPy become inert placeholders, everything else is an error.
"""

from __future__ import annotations

import argparse
import collections
import io
import os
import pickle
import types
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from mindspeed_rl.checkpoint.records import TensorRecord

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


def load_with_records(path: str | Path) -> Any:
    """The content of a torch zip file with a :class:`TensorRecord` in place of every tensor.

    A tensor that is not stored contiguously, or a file in torch's format from before 1.6, is loaded as a tensor.

    Raises:
        ValueError: the file is missing, truncated or damaged, or refers to code that is not on the safe list.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"checkpoint file {path} is missing")
    zipped = zipfile.is_zipfile(path)
    try:
        if not zipped:
            return torch.load(path, map_location="cpu", weights_only=False, pickle_module=safe_pickle)
        with FakeTensorMode():
            content = torch.load(path, map_location="cpu", weights_only=False, pickle_module=safe_pickle)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: {error}") from error
    except (RuntimeError, EOFError, OSError, KeyError) as error:
        raise ValueError(f"{path} cannot be read as a torch checkpoint (truncated or damaged?): {error}") from error
    size = path.stat().st_size
    return _replace_tensors(content, str(path), size)


def _replace_tensors(value: Any, path: str, size: int) -> Any:
    if isinstance(value, Tensor):
        return _record(value, path, size)
    if isinstance(value, Mapping):
        return {key: _replace_tensors(entry, path, size) for key, entry in value.items()}
    if isinstance(value, list):
        return [_replace_tensors(entry, path, size) for entry in value]
    return value


def _record(tensor: Tensor, path: str, size: int) -> TensorRecord | Tensor:
    offset = tensor.untyped_storage()._checkpoint_offset
    if offset is None or not tensor.is_contiguous():
        return _load_one(path, tensor)
    start = offset + tensor.storage_offset() * tensor.element_size()
    record = TensorRecord(path, start, tuple(tensor.shape), tensor.dtype)
    if record.offset + record.num_bytes > size:
        raise ValueError(f"{path} is truncated: it ends inside a tensor of shape {list(record.shape)}")
    return record


def _load_one(path: str, tensor: Tensor) -> Tensor:
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None, f"{path}: a tensor without a place in the file"
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = TensorRecord(path, offset, (count,), tensor.dtype).read()
    return whole.as_strided(tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


def create_with_holes(
    path: str | Path, content: Any, shapes: Mapping[tuple[Any, ...], tuple[torch.dtype, tuple[int, ...]]]
) -> dict:
    """Write a torch zip file whose tensors are holes, and say where they are.

    Args:
        path: the file to make.
        content: nested dicts of plain data; the tensors are added to it.
        shapes: path of keys inside ``content`` -> dtype and shape of the tensor that goes there.

    Returns:
        path of keys -> record to write to. The file is sparse and has its final size.
    """
    with FakeTensorMode():
        for keys, (dtype, shape) in shapes.items():
            place = content
            for key in keys[:-1]:
                place = place.setdefault(key, {})
            place[keys[-1]] = torch.empty(shape, dtype=dtype)
    with skip_data(materialize_fake_tensors=True):
        torch.save(content, path)
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
    with FakeTensorMode():
        tensor = torch.empty(shape, dtype=dtype)
    with skip_data(materialize_fake_tensors=True):
        torch.save(tensor, scratch)
    with FakeTensorMode():
        offset = torch.load(scratch, weights_only=False, pickle_module=safe_pickle).untyped_storage()._checkpoint_offset
    with open(scratch, "rb") as file:
        head = file.read(offset)
        file.seek(TensorRecord("", offset, shape, dtype).num_bytes, os.SEEK_CUR)
        tail = file.read()
    os.remove(scratch)
    return head, tail


def load_bytes(data: bytes) -> Any:
    """Unpickle an object that ``torch.save`` wrote, from memory, by the same rules."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=safe_pickle)
