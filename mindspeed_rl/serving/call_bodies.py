"""Bodies of calls, read in a thread in slices: a JSON decoder holds the interpreter, and with it the event loop, until its end.

Lists of numbers, which a rollout's prompts are, are decoded some thousand at a time; lists and objects around them are read by
the decoder's Python form, between whose steps other threads run. Texts and blanks, which have no slices, have limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json import decoder, scanner
from typing import Any

# the type stubs of Python lack these names
_scan_text: Any = getattr(decoder, "scanstring")  # noqa: B009
_scan_list: Any = getattr(decoder, "JSONArray")  # noqa: B009
_make_scanner: Any = getattr(scanner, "py_make_scanner")  # noqa: B009
#: numbers, blanks and commas of a slice
_NUMBERS = re.compile(r"[-+.0-9eE, \t\r\n]{0,262144}")
_MAX_TEXT, _MAX_ESCAPES, _MAX_BLANKS = 64 << 20, 8 << 20, 64 << 20
_PART_BYTES = 16 << 20


def read_arguments(body: bytes) -> dict[str, Any]:
    """Return the arguments of a call; an empty body has none. Runs in a thread.

    Raises:
        ValueError: it is not the JSON of an object, or beyond the limits.
        RecursionError: it is nested too deeply.
    """
    parts = [body[start : start + _PART_BYTES] for start in range(0, len(body), _PART_BYTES)]
    for marks, limit, noun in (((b"\\",), _MAX_ESCAPES, "backslashes"), ((b" ", b"\n", b"\t", b"\r"), _MAX_BLANKS, "blanks")):
        if sum(part.count(mark) for part in parts for mark in marks) > limit:
            raise ValueError(f"a call has at most {limit:,} {noun}")
    value = _SlicingDecoder().decode(body.decode("utf-8")) if body else {}
    if not isinstance(value, dict):
        raise ValueError("arguments are a JSON object")
    return value


class _SlicingDecoder(json.JSONDecoder):
    """A decoder that lets other threads run."""

    def __init__(self) -> None:
        super().__init__()
        self.parse_array = _parse_array
        self.parse_string = _parse_text
        self.scan_once = _make_scanner(self)


def _parse_text(text: str, end: int, strict: bool = True) -> tuple[str, int]:
    if len(text) - end > _MAX_TEXT and text.find('"', end, end + _MAX_TEXT) < 0:
        raise ValueError(f"a text of a call has at most {_MAX_TEXT:,} characters")
    return _scan_text(text, end, strict)


def _parse_array(
    position: tuple[str, int], scan_once: Callable[[str, int], tuple[Any, int]], *unused: object
) -> tuple[list[Any], int]:
    """Return a list and the position after it; `position` is that after its bracket."""
    text, start = position
    values: list[Any] = []
    while True:
        numbers = _NUMBERS.match(text, start)
        assert numbers is not None  # it may be empty
        stop = numbers.end()
        if stop < len(text) and text[stop] == "]" and stop > start:
            if values and not numbers[0].strip():
                raise ValueError(f"a list has a comma before its end, at character {stop}")
            values += json.loads(f"[{numbers[0]}]")
            return values, stop + 1
        comma = text.rfind(",", start, stop)
        if comma < 0:
            break
        values += json.loads(f"[{text[start:comma]}]")
        start = comma + 1
    rest, stop = _scan_list((text, start), scan_once)
    if values and not rest:
        raise ValueError(f"a list has a comma before its end, at character {stop - 1}")
    return values + rest, stop
