"""The header of a GGUF file, read within bounds: every length is compared with the file before anything is read by it.

The reader of the package `gguf` trusts lengths, and makes a Python object per element of an array: a file of 100 bytes that
states 2^40 elements keeps it busy for days. Versions 2 and 3 of the format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rl.files import open_regular

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MAX_KEYS, _MAX_TENSORS, _MAX_DIMENSIONS = 1 << 16, 1 << 16, 4
#: elements of all arrays together; the largest vocabularies have 3e5 tokens with scores, types and merges
_MAX_ELEMENTS = 1 << 22
_MAX_NAME_BYTES, _MAX_TEXT_BYTES = 1 << 16, 1 << 26
#: bytes of a record of a key (length, type, a value of one byte), and of a tensor
_LEAST_KEY_BYTES, _LEAST_TENSOR_BYTES = 13, 24
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 32, 1 << 20


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file.

    Attributes:
        shape: as numpy has it, the largest stride first.
        data: its bytes in the mapped file; rows of bytes where it is quantized.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensors of a GGUF file.

    Attributes:
        values: numbers, strings and booleans by key; an array is a `list` of None of its length.
    """

    values: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Open a file; needs the package `gguf`.

        Raises:
            ValueError: it is damaged or of a kind that is not supported; the message does not name the file.
            OSError: it cannot be opened.
        """
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size < 24:
                raise ValueError("it is shorter than a header")
            return _Reader(np.memmap(file, np.uint8, "r")).read()


class _Reader:
    """Reads a mapped file from its first byte."""

    def __init__(self, content: np.ndarray) -> None:
        self._content, self._at, self._elements = content, 0, 0

    def read(self) -> GgufFile:
        if (magic := self._take(4)) != _MAGIC:
            raise ValueError(f"it begins with {magic!r}, not {_MAGIC!r}")
        version, num_tensors, num_keys = self._unpack("<I"), self._unpack("<Q"), self._unpack("<Q")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; supported are {', '.join(map(str, _VERSIONS))}, little endian")
        self._check_count("keys", num_keys, _MAX_KEYS, _LEAST_KEY_BYTES)
        values: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("the name of a key", _MAX_NAME_BYTES)
            if key in values:
                raise ValueError(f"the key {key!r} is there twice")
            values[key] = self._value(key, self._unpack("<I"))
        self._check_count("tensors", num_tensors, _MAX_TENSORS, _LEAST_TENSOR_BYTES)
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}; expected a power of 2 up to {_MAX_ALIGNMENT}")
        start = expected = -(-self._at // alignment) * alignment
        tensors = tuple(self._tensor(start, alignment, *entry) for entry in entries)
        # one after the other, as llama.cpp checks too: a wrong type, shape or offset would read bytes of another tensor
        for tensor, (*_, offset) in zip(tensors, entries):
            if start + offset != expected:
                raise ValueError(
                    f"the tensor {tensor.name!r} is at byte {start + offset}, and those before it end at {expected}: a type, a"
                    " shape or an offset is wrong"
                )
            expected += -(-tensor.data.nbytes // alignment) * alignment
        if (rest := len(self._content) - expected) >= alignment:  # negative where the last tensor is not padded
            raise ValueError(
                f"the tensors end at byte {expected}, and {rest} bytes follow: the type or the shape of the last one is wrong,"
                " or bytes were appended"
            )
        names = [tensor.name for tensor in tensors]
        if len(set(names)) < len(names):
            twice = next(name for index, name in enumerate(names) if name in names[:index])
            raise ValueError(f"the tensor {twice!r} is there twice")
        return GgufFile(values, tensors)

    def _left(self) -> int:
        return len(self._content) - self._at

    def _take(self, count: int) -> bytes:
        if count > self._left():
            raise ValueError(f"it ends at byte {len(self._content)}, where {count} bytes from byte {self._at} are expected")
        self._at += count
        return self._content[self._at - count : self._at].tobytes()

    def _unpack(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _check_count(self, what: str, count: int, limit: int, least_bytes: int) -> None:
        if count > limit or count * least_bytes > self._left():
            raise ValueError(f"it states {count} {what}; {self._left()} bytes follow, and {limit} are supported")

    def _string(self, what: str, limit: int) -> str:
        length = self._unpack("<Q")
        if length > min(limit, self._left()):
            raise ValueError(f"{what} has {length} bytes; {self._left()} follow, and {limit} are supported")
        return self._take(length).decode("utf-8", "replace")

    def _value(self, key: str, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string(f"the value of {key!r}", _MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(key, depth)
        if kind not in _SCALARS:
            raise ValueError(f"{key!r} has the unknown type {kind}")
        return self._unpack(_SCALARS[kind])

    def _array(self, key: str, depth: int) -> list[None]:
        """Pass over an array; nothing that is read here is one."""
        kind, count = self._unpack("<I"), self._unpack("<Q")
        if kind == _ARRAY and depth:
            raise ValueError(f"{key!r} has arrays of arrays of arrays")
        width = struct.calcsize(_SCALARS[kind]) if kind in _SCALARS else 8
        self._elements += count
        if self._elements > _MAX_ELEMENTS or count * width > self._left():
            raise ValueError(
                f"{key!r} is an array of {count} elements; {self._left()} bytes follow, and {_MAX_ELEMENTS} elements are"
                " supported"
            )
        if kind in _SCALARS:
            self._at += count * width
        else:
            for _ in range(count):
                self._value(key, kind, depth + 1)
        return [None] * count

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("the name of a tensor", _MAX_NAME_BYTES)
        dimensions = self._unpack("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"the tensor {name!r} has {dimensions} dimensions; expected 1 to {_MAX_DIMENSIONS}")
        shape = tuple(self._unpack("<Q") for _ in range(dimensions))
        return name, shape[::-1], self._unpack("<I"), self._unpack("<Q")

    def _tensor(self, start: int, alignment: int, name: str, shape: tuple[int, ...], code: int, offset: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quant_shape_to_byte_shape

        try:
            kind = GGMLQuantizationType(code)
        except ValueError:
            raise ValueError(f"the tensor {name!r} has the unknown type {code}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        size = math.prod(shape)
        if size == 0 or shape[-1] % block:
            raise ValueError(f"the tensor {name!r} has the shape {list(shape)}; rows of {kind.name} are multiples of {block}")
        begin, num_bytes = start + offset, size // block * block_bytes
        if offset % alignment or begin + num_bytes > len(self._content):
            raise ValueError(
                f"the tensor {name!r} is at bytes {begin} to {begin + num_bytes}, not aligned to {alignment} or past the end of"
                f" {len(self._content)}; is it one of several parts, or cut short?"
            )
        data = self._content[begin : begin + num_bytes].reshape(quant_shape_to_byte_shape(shape, kind))
        return GgufTensor(name, shape, kind, data)
