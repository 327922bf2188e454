"""Strict JSON for data: no NaN or Infinity, no key twice in an object, no half of a surrogate pair, no endless numbers.

Python's decoder accepts all of these. They would then train a model without a warning, or end the run with a traceback that
names no row.
"""

from __future__ import annotations

import json
import re
from typing import Any

# the limit of Python's int()
_MAX_DIGITS = 4300
_HALF = re.compile(r"[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")


class StrictDecoder:
    """Decoder of JSON values that reports violations; one decoder serves one thread."""

    def __init__(self) -> None:
        self._problem: str | None = None
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._object, parse_constant=self._constant, parse_int=self._integer, strict=True
        )

    def raw_decode(self, text: str, start: int = 0) -> tuple[object, int, str | None]:
        """Decode the JSON value that begins at `start` to (value, its end, the violation or None).

        Raises:
            json.JSONDecodeError: the text is not JSON, or ends early.
        """
        self._problem = None
        try:
            value, end = self._decoder.raw_decode(text, start)
        except RecursionError:
            raise json.JSONDecodeError("nested too deeply", text, start) from None
        half = None if text.isascii() else _HALF.search(text, start, end)
        if half is None and _ESCAPED_HALF.search(text, start, end):
            # two escaped halves may be one character: check the decoded text
            half = _HALF.search(json.dumps(value, ensure_ascii=False))
        if half is not None:
            self._problem = f"it holds U+{ord(half.group()):04X}, half of a surrogate pair, which is not a character"
        return value, end, self._problem

    def loads(self, text: str) -> Any:
        """Decode a text that is one JSON value.

        Raises:
            ValueError: the text is not JSON, or not strict JSON.
        """
        start = len(text) - len(text.lstrip(" \t\r\n"))
        value, end, problem = self.raw_decode(text, start)
        if text[end:].strip(" \t\r\n"):
            raise json.JSONDecodeError("Extra data", text, end)
        if problem is not None:
            raise ValueError(problem)
        return value

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        value = dict(pairs)
        if len(value) != len(pairs):
            seen: set[str] = set()
            # noted, not raised: the value's end has to be found, where the next one may begin
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            self._problem = f"the key {twice!r} stands twice in an object"
        return value

    def _constant(self, name: str) -> float:
        self._problem = f"{name} is not a JSON number"
        return float(name)

    def _integer(self, digits: str) -> int:
        if len(digits) > _MAX_DIGITS:
            self._problem = f"it holds a number of {len(digits)} digits"
            return 0
        return int(digits)


loads = StrictDecoder().loads
