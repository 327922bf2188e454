"""The wire format of protocol buffers, for messages that are described by tables: no generated code, and no library.

https://protobuf.dev/programming-guides/encoding has the format. A field that the table does not have is refused: a client of
another release would otherwise believe that it was read.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: wire types
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES = {_FIXED64: 8, _FIXED32: 4}
#: an integer of 64 bits has at most ten bytes
_MAX_VARINT_BYTES = 10
#: fields of a message and of those in it, and bytes of a list of integers: each takes microseconds, which others would wait for
_MAX_FIELDS, _MAX_PACKED_BYTES = 1 << 18, 1 << 16
#: a message as values by name; a field that repeats is a list, and one that is not set is missing
Message = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """How a value is written.

    Attributes:
        wire: its wire type.
        read: from a varint, or from bytes.
        write: to a varint, or to bytes.
        default: value that is not written outside a choice of fields, as proto3 has it; None for none.
    """

    wire: int
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    default: object = None


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _unsigned(value: int) -> int:
    return value & ((1 << 64) - 1)


def _read_text(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"a text is not UTF-8: {error.reason} at byte {error.start}") from None


def _read_packed(data: memoryview) -> list[int]:
    if len(data) > _MAX_PACKED_BYTES:
        raise ValueError(f"a list of integers has {len(data)} bytes; it has at most {_MAX_PACKED_BYTES}")
    values, position = [], 0
    while position < len(data):
        value, position = _read_varint(data, position)
        values.append(_signed(value))
    return values


INTEGER = Kind(_VARINT, _signed, _unsigned, 0)
BOOLEAN = Kind(_VARINT, bool, int, False)
DOUBLE = Kind(_FIXED64, lambda data: struct.unpack("<d", data)[0], lambda value: struct.pack("<d", value), 0.0)
TEXT = Kind(_BYTES, _read_text, lambda value: value.encode(), "")
BYTES = Kind(_BYTES, lambda data: data, bytes, b"")
#: integers in one field
PACKED = Kind(_BYTES, _read_packed, lambda values: b"".join(_write_varint(_unsigned(value)) for value in values))


@dataclass(frozen=True)
class Field:
    """A field of a message.

    Attributes:
        name: its name.
        kind: kind of its value, or the table of a message.
        repeats: it is a list.
        is_optional: it is written also with its default, as fields are whose presence says something.
    """

    name: str
    kind: Kind | Table
    repeats: bool = False
    is_optional: bool = False


@dataclass(frozen=True)
class Table:
    """A message.

    Attributes:
        name: its name.
        fields: by number.
    """

    name: str
    fields: Mapping[int, Field]


def map_of(value: Kind | Table) -> Table:
    """Describe an entry of a map from texts."""
    return Table("an entry", {1: Field("key", TEXT), 2: Field("value", value)})


def read_map(entries: list[Message]) -> dict[str, Any]:
    """Return the map of entries.

    Raises:
        ValueError: an entry has no value.
    """
    for entry in entries:
        if "value" not in entry:
            raise ValueError(f"the entry {entry.get('key', '')!r} of a map has no value")
    return {entry.get("key", ""): entry["value"] for entry in entries}


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if position + index >= len(data):
            raise ValueError("the message ends within a number")
        byte = data[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & ((1 << 64) - 1), position + index + 1
    raise ValueError("a number has more than 64 bits")


def _write_varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _read_fields(data: memoryview) -> Iterator[tuple[int, int, Any]]:
    """Yield number, wire type and value of each field: an integer, or bytes."""
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, position = _read_varint(data, position)
            yield number, wire, value
            continue
        if wire == _BYTES:
            size, position = _read_varint(data, position)
        elif wire in _SIZES:
            size = _SIZES[wire]
        else:
            raise ValueError(f"field {number} has the wire type {wire}, which does not exist")
        if size > len(data) - position:
            raise ValueError(f"field {number} has {size} bytes, but {len(data) - position} are left")
        yield number, wire, data[position : position + size]
        position += size


def decode(table: Table, data: memoryview) -> Message:
    """Read a message.

    Raises:
        ValueError: it is not of this table, or takes too long to read; the text says what was found.
    """
    return _decode(table, data, itertools.count(1))


def _decode(table: Table, data: memoryview, numbers: Iterator[int]) -> Message:
    message: Message = {}
    for number, wire, value in _read_fields(data):
        if next(numbers) > _MAX_FIELDS:
            raise ValueError(f"the message has more than {_MAX_FIELDS} fields; send less at once")
        field = table.fields.get(number)
        if field is None:
            raise ValueError(f"{table.name} has no field {number} here; known: {', '.join(map(str, table.fields))}")
        if isinstance(field.kind, Table):
            expected, read = _BYTES, lambda data, inner=field.kind: _decode(inner, data, numbers)
        else:
            expected, read = field.kind.wire, field.kind.read
        if field.kind is PACKED and wire == _VARINT:  # the older form, which every reader has to accept
            message.setdefault(field.name, []).append(_signed(value))
            continue
        if wire != expected:
            raise ValueError(f"{table.name}.{field.name} has the wire type {wire}, but should have {expected}")
        if field.repeats:
            message.setdefault(field.name, []).append(read(value))
        elif field.kind is PACKED:
            message.setdefault(field.name, []).extend(read(value))
        else:
            message[field.name] = read(value)
    return message


def encode(table: Table, message: Message) -> bytes:
    """Write a message; names that the table does not have are a mistake of the caller."""
    written: list[bytes] = []
    unknown = set(message) - {field.name for field in table.fields.values()}
    assert not unknown, f"{table.name} has no {unknown}"
    for number, field in table.fields.items():
        value = message.get(field.name)
        if value is None:
            continue
        for item in value if field.repeats else (value,):
            if isinstance(field.kind, Table):
                wire, data = _BYTES, encode(field.kind, item)
            elif item == field.kind.default and not field.is_optional and not field.repeats:
                continue
            elif field.kind.wire == _VARINT:
                wire, data = _VARINT, _write_varint(field.kind.write(item))
            else:
                wire, data = field.kind.wire, field.kind.write(item)
            size = _write_varint(len(data)) if wire == _BYTES else b""
            written += [_write_varint(number << 3 | wire), size, data]
    return b"".join(written)
