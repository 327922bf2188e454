"""Replies of sandbox services: every field is checked before it is used, and the work is linear in the bytes."""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from mindspeed_rl.tools.interface import JsonObject
from mindspeed_rl.tools.sandbox_interface import SandboxError

#: bytes of a reply that may consist of only values; a larger one has long texts
_MAX_VALUE_BYTES, _MAX_VALUES = 4 << 20, 2_000_000
_HEADER = struct.Struct(">BI")
_LAST_FRAME = 2
_MAX_FRAMES = 250_000
#: names become parts of addresses and commands
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,199}")
_KINDS: dict[type, str] = {str: "a text", int: "a whole number", dict: "an object"}
_T = TypeVar("_T", str, int, dict[str, Any])


def parse_object(body: bytes | memoryview, url: str) -> JsonObject:
    """Return the JSON object of a body.

    Raises:
        SandboxError: it is none, is nested too deeply, or has too many values.
    """
    data = bytes(body)
    if len(data) > _MAX_VALUE_BYTES and sum(data.count(mark) for mark in (b",", b"[", b"{")) > _MAX_VALUES:
        raise SandboxError(f"the reply of {url} has more than {_MAX_VALUES:,} values")
    try:
        value = json.loads(data)
    except RecursionError:
        raise SandboxError(f"the reply of {url} is nested too deeply") from None
    except ValueError:
        raise SandboxError(f"the reply of {url} is not JSON: {data[:200]!r}") from None
    if not isinstance(value, dict):
        raise SandboxError(f"the reply of {url} is not an object: {data[:200]!r}")
    return value


def read_field(fields: Mapping[str, Any], name: str, kind: type[_T], url: str, default: _T | None = None) -> _T:
    """Return a field of a reply.

    Args:
        default: where the field is absent or null; None where it is required.

    Raises:
        SandboxError: it is absent, or of another type.
    """
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        raise SandboxError(f"the reply of {url}: {name} is {str(value)[:80]!r}, but must be {_KINDS[kind]}")
    return value


def read_name(fields: Mapping[str, Any], name: str, url: str) -> str:
    """Return the name of a sandbox or snapshot.

    Raises:
        SandboxError: it is absent, or has characters that no name of a service has.
    """
    value = read_field(fields, name, str, url)
    if not _NAME.fullmatch(value) or ".." in value or "//" in value:
        raise SandboxError(f"the reply of {url}: {name} is {value[:80]!r}, but must be letters, digits, '_', '-', '.' and ':'")
    return value


def decode_base64(text: str, url: str) -> bytes:
    """Return the bytes of a text in base64.

    Raises:
        SandboxError: it is none.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise SandboxError(f"the reply of {url}: {text[:80]!r} is not base64") from None


def _split_frames(body: bytes, url: str) -> Iterator[tuple[int, memoryview]]:
    """Yield flags and content of each frame of a stream of Connect.

    Raises:
        SandboxError: the last one is cut, or there are too many.
    """
    view, place = memoryview(body), 0
    for _ in range(_MAX_FRAMES):
        if place == len(view):
            return
        if len(view) - place < _HEADER.size:
            break
        flags, size = _HEADER.unpack_from(view, place)
        place += _HEADER.size
        if len(view) - place < size:
            break
        yield flags, view[place : place + size]
        place += size
    else:
        raise SandboxError(f"the reply of {url} has more than {_MAX_FRAMES:,} frames")
    raise SandboxError(f"the reply of {url} ends within a frame", "crashed")


def read_process_events(body: bytes, url: str) -> tuple[int | None, bytes]:
    """Return exit status and output of a command from its stream of events; the status is None where it took too long.

    Raises:
        SandboxError: the service reports an error, the stream ends before the command, or an event is malformed.
    """
    output, status = list[bytes](), None
    for flags, content in _split_frames(body, url):
        event = parse_object(content, url)
        if flags & _LAST_FRAME and event.get("error") is not None:
            error = read_field(event, "error", dict, url)
            if error.get("code") == "deadline_exceeded":
                return None, b"".join(output)
            raise SandboxError(f"{url}: {str(error.get('message') or error.get('code'))[:300]}")
        if not event:
            continue
        inner = read_field(event, "event", dict, url, {})
        if data := read_field(inner, "data", dict, url, {}):
            output += [decode_base64(read_field(data, name, str, url, ""), url) for name in ("stdout", "stderr")]
        if inner.get("end") is not None:  # a field that is 0 is left out
            status = read_field(read_field(inner, "end", dict, url), "exitCode", int, url, 0)
    if status is None:
        raise SandboxError(f"{url}: the stream ended before the command", "crashed")
    return status, b"".join(output)
