"""torch's zip files: opened without running what is pickled in them, tensors as records, written with holes to be filled.

Files are read by ``torch.load`` and written by ``torch.save``; ours is only the list of names that a pickle may refer to, since
``weights_only=True`` refuses upstream's files: their pickle protocol is 4, and their ``args`` hold enums of Megatron.
"""

from __future__ import annotations

import argparse
import collections
import pickle
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mindspeed_rl.checkpoint.tensor_record import TensorRecord, contiguous_strides

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
    "_rebuild_tensor_v3",
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


def load_with_records(path: str | Path) -> Any:
    """The content of a torch zip file with a :class:`TensorRecord` in place of every tensor in its (nested) dicts.

    A tensor that is not stored contiguously, and a file in torch's format from before 1.6, is loaded as a tensor.

    Raises:
        ValueError: the file is missing, truncated or damaged, or refers to code that is not on the safe list.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"checkpoint file {path} is missing")
    try:
        if not _is_zip(path):
            return torch.load(path, map_location="cpu", weights_only=False, pickle_module=safe_pickle)
        if torch.serialization._is_torchscript_zip(torch._C.PyTorchFileReader(str(path))):
            raise ValueError(f"{path} is a TorchScript program; refusing to load it")
        # fake tensors have no data: torch notes where in the file it would have read it
        with FakeTensorMode():
            content = torch.load(path, map_location="cpu", weights_only=False, pickle_module=safe_pickle)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: {error}") from error
    except (RuntimeError, EOFError, OSError, KeyError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ValueError(f"{path} cannot be read as a torch checkpoint (truncated or damaged?): {reason}") from error
    return _with_records(content, str(path))


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _with_records(content: Any, path: str) -> Any:
    if isinstance(content, FakeTensor):
        return record_of(content, path)
    if isinstance(content, dict):
        return {key: _with_records(value, path) for key, value in content.items()}
    return content


def record_of(fake: Tensor, path: str, start: int = 0) -> TensorRecord | Tensor:
    """Where the data of a tensor that was loaded under FakeTensorMode lie; the tensor itself if not in one piece.

    Args:
        start: byte of the file at which torch's zip file starts.
    """
    storage, shape = fake.untyped_storage(), tuple(fake.shape)
    place = start + storage._checkpoint_offset  # type: ignore[attr-defined]
    if fake.stride() == contiguous_strides(shape) or 0 in shape:
        return TensorRecord(path, place + fake.storage_offset() * fake.dtype.itemsize, shape, fake.dtype)
    whole = TensorRecord(path, place, (storage.nbytes() // fake.dtype.itemsize,), fake.dtype).read()
    return whole.as_strided(shape, fake.stride(), fake.storage_offset()).contiguous()


def save_with_holes(content: Any, file: str | Path | IO[bytes]) -> None:
    """Write what ``torch.save`` would write for ``content``, but for the bytes of its fake tensors.

    The file has its final size; on file systems that can, it is sparse.

    Args:
        file: a path, or a stream that can seek; what is before its position stays.
    """
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(content, file)


def create_with_holes(
    path: str | Path, content: Any, shapes: Mapping[tuple[Any, ...], tuple[torch.dtype, tuple[int, ...]]]
) -> dict[tuple[Any, ...], TensorRecord]:
    """Write a torch zip file whose tensors are holes, and say where they are.

    Args:
        path: the file to make.
        content: nested dicts of plain data; the tensors are added to it.
        shapes: path of keys inside ``content`` -> dtype and shape of the tensor that goes there.

    Returns:
        path of keys -> record to write to.
    """
    with FakeTensorMode():
        for keys, (dtype, shape) in shapes.items():
            place = content
            for key in keys[:-1]:
                place = place.setdefault(key, {})
            place[keys[-1]] = torch.empty(shape, dtype=dtype)
    save_with_holes(content, path)
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
