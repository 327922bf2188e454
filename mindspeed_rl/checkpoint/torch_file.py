"""torch's zip files: opened without running what is pickled in them, tensors as records, written with holes to be filled.

torch writes the files and finds their parts; the unpickler stays as ``weights_only=True`` refuses upstream's (pickle protocol
4, enums of Megatron), and torch says where data lie only under FakeTensorMode (2 s of imports, 0.7 ms a tensor; here 0.02 ms).
"""

from __future__ import annotations

import argparse
import collections
import io
import math
import pickle
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from mindspeed_rl.checkpoint.tensor_record import TensorRecord, contiguous_strides
from mindspeed_rl.files import open_regular

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
    # pickle up to protocol 2 writes Python 2's names
    ("__builtin__", "set"): set,
    ("_codecs", "encode"): None,  # filled below
    # Megatron keeps the states of TransformerEngine's layers so
    ("_io", "BytesIO"): io.BytesIO,
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
# enums in args, arrays in rng_state, exit signals: training checkpoints hold them, and no weight depends on one
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

#: what an unpickler raises at bytes that are not a pickle, or another one than expected
UNREADABLE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Inert:
    """Stands in for an object whose class is not loaded; holds nothing and does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    # state, and the items that pickle adds to lists and dicts, are taken in the same way
    __setstate__ = append = __setitem__ = __init__

    def __call__(self, *args: object, **kwargs: object) -> Inert:
        return self


def _inert_attribute(owner: object, name: str) -> Inert:
    # some releases of Python pickle an enum's member as getattr(class, name)
    if owner is not Inert and not isinstance(owner, Inert):
        raise pickle.UnpicklingError(f"refusing to take {name!r} of {owner!r}")
    return Inert()


_SAFE["builtins", "getattr"] = _inert_attribute


class SafeUnpickler(pickle.Unpickler):
    """Unpickles tensors and plain data; refuses every name that is not on the list above."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the object a pickle refers to by name.

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
_safe_pickle = types.ModuleType("safe_pickle")
vars(_safe_pickle).update(
    Unpickler=SafeUnpickler,
    UnpicklingError=pickle.UnpicklingError,
    load=lambda file, **options: SafeUnpickler(file, **options).load(),
)


@dataclass(frozen=True)
class _Storage:
    """A storage inside a torch zip file: where its bytes start, how many, and as what it was saved."""

    offset: int
    num_bytes: int
    dtype: torch.dtype


class _RecordUnpickler(SafeUnpickler):
    """Unpickles the ``data.pkl`` of a torch zip file; tensors become records, their bytes stay in the file.

    Args:
        archive: the zip file, which begins at byte ``start`` of the file ``path``.
    """

    def __init__(self, archive: torch._C.PyTorchFileReader, path: str, start: int) -> None:
        super().__init__(io.BytesIO(archive.get_record("data.pkl")))
        self._archive, self._path, self._start = archive, path, start

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key, _, count = pid
        if kind != "storage":
            raise pickle.UnpicklingError(f"unknown persistent object {kind!r}")
        untyped = storage_type is torch.UntypedStorage
        dtype = torch.uint8 if untyped else torch.storage._get_dtype_from_pickle_storage_type(storage_type.__name__)
        size = self._archive.get_record_size(f"data/{key}")
        # a record takes its length from the pickle, and must not reach into the bytes behind its storage
        if size != count * dtype.itemsize:
            raise pickle.UnpicklingError(f"storage {key} has {size} bytes; its pickle says {count * dtype.itemsize}")
        offset = self._archive.get_record_offset(f"data/{key}")  # pyrefly: ignore[missing-attribute]  # torch's stub lacks it
        return _Storage(self._start + offset, size, dtype)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor", "_rebuild_tensor_v2"):
            return self._record
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            # dtypes without a storage type of their own (float8) lie in untyped storages
            return lambda storage, start, size, stride, grad, hooks, dtype, *unused: self._record(
                _Storage(storage.offset, storage.num_bytes, dtype), start, size, stride
            )
        if module == "torch._utils" and name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
            return lambda data, *unused: data
        return super().find_class(module, name)

    def _record(
        self, storage: _Storage, start: int, size: Sequence[int], stride: Sequence[int], *unused: object
    ) -> TensorRecord | Tensor:
        shape, width = tuple(size), storage.dtype.itemsize
        if tuple(stride) == contiguous_strides(shape) or 0 in shape:
            if start < 0 or min(shape, default=0) < 0 or (start + math.prod(shape)) * width > storage.num_bytes:
                raise pickle.UnpicklingError(f"a tensor of shape {list(shape)} does not fit its {storage.num_bytes} bytes")
            return TensorRecord(self._path, storage.offset + start * width, shape, storage.dtype)
        # a view with other strides, such as a transposed weight, is not a run of bytes
        whole = TensorRecord(self._path, storage.offset, (storage.num_bytes // width,), storage.dtype).read()
        return whole.as_strided(shape, tuple(stride), start).contiguous()


class _TensorUnpickler(_RecordUnpickler):
    """Reads every tensor instead of leaving a record."""

    def _record(
        self, storage: _Storage, start: int, size: Sequence[int], stride: Sequence[int], *unused: object
    ) -> TensorRecord | Tensor:
        record = super()._record(storage, start, size, stride)
        return record.read().clone() if isinstance(record, TensorRecord) else record


def load_with_records(path: str | Path, *, as_tensors: bool = False) -> Any:
    """Load the content of a torch zip file with a :class:`TensorRecord` in place of every tensor.

    A tensor that is not stored contiguously, and a file in torch's format from before 1.6, is loaded as a tensor.

    Args:
        as_tensors: every tensor is loaded.

    Raises:
        ValueError: the file is missing, truncated or damaged, or refers to code that is not on the safe list.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"checkpoint file {path} is missing")
    with open_regular(path) as file:
        # the mark of a zip file, which torch writes since 1.6
        if file.read(4) == b"PK\x03\x04":
            return load_part_with_records(str(path), path, 0, as_tensors=as_tensors)
    try:
        # weights_only takes no pickle_module; the module's list of names is what keeps this safe
        return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_safe_pickle)
    except UNREADABLE as error:
        raise _unreadable(str(path), 0, error) from error


def load_part_with_records(path: str, zip_file: Path | IO[bytes], start: int, *, as_tensors: bool = False) -> Any:
    """Load the content of a torch zip file inside another file, with records in place of tensors.

    Args:
        path: the file that holds it.
        zip_file: only the zip file, as a path or a stream.
        start: the byte of ``path`` where it begins.

    Raises:
        ValueError: as for `load_with_records`.
    """
    try:
        archive = torch._C.PyTorchFileReader(str(zip_file) if isinstance(zip_file, Path) else zip_file)
        return (_TensorUnpickler if as_tensors else _RecordUnpickler)(archive, path, start).load()
    except UNREADABLE as error:
        raise _unreadable(path, start, error) from error


class _CheckingUnpickler(SafeUnpickler):
    """Reads a pickle only for its names: what torch.distributed defines is not loaded, which would take a second."""

    def find_class(self, module: str, name: str) -> Any:
        return Inert if module.startswith("torch.distributed.") else super().find_class(module, name)


def check_small_files(folder: Path) -> None:
    """Check that index and common state of a ``torch_dist`` checkpoint can be read, and name no code.

    Raises:
        ValueError: one cannot, or does.
    """
    for path in (folder / ".metadata", folder / "common.pt"):
        if path.is_file() and path.suffix:
            load_with_records(path)
        elif path.is_file():
            with open_regular(path) as file:
                try:
                    _CheckingUnpickler(file).load()
                except UNREADABLE as error:
                    raise _unreadable(str(path), 0, error) from error


def _unreadable(path: str, start: int, error: Exception) -> ValueError:
    if isinstance(error, pickle.UnpicklingError):
        return ValueError(f"{path}: {error}")
    where = f" (zip file at byte {start})" if start else ""
    # torch goes on with advice and a C++ stack
    reason = str(error).partition("\n")[0].partition(". ")[0]
    return ValueError(f"{path}{where} cannot be read as a torch checkpoint (truncated or damaged?): {reason}")


def save_with_holes(content: object, file: str | Path | IO[bytes]) -> None:
    """Write what ``torch.save`` would write for ``content``, but for the bytes of its tensors.

    The file has its final size; on file systems that can, it is sparse. Tensors of ``torch.empty`` occupy address space only.

    Args:
        file: a path, or a stream that can seek; what is before its position stays.
    """
    with torch.serialization.skip_data():
        torch.save(content, file)


def create_with_holes(
    path: str | Path, content: Any, shapes: Mapping[tuple[str, ...], tuple[torch.dtype, tuple[int, ...]]]
) -> dict[tuple[str, ...], TensorRecord]:
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
        place[keys[-1]] = torch.empty(shape, dtype=dtype)
    save_with_holes(content, path)
    return records_at(path, shapes)


def records_at(path: str | Path, places: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], TensorRecord]:
    """Return the records of some tensors of a torch zip file, by their path of keys."""
    content = load_with_records(path)
    records = {}
    for keys in places:
        entry = content
        for key in keys:
            entry = entry[key]
        records[keys] = entry
    return records


def walk_records(content: object, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], TensorRecord | Tensor]]:
    """Yield every tensor or record in nested dicts, with its path of keys."""
    if isinstance(content, (TensorRecord, Tensor)):
        yield keys, content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from walk_records(value, (*keys, str(key)))
