"""Reads the mappings of a tool file, with one sentence for every error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl import registry


class OptionReader:
    """A mapping that is read key by key; `reject_unknown` finds keys that were not read.

    Args:
        where: prefix of errors: file, line and entry.
    """

    def __init__(self, values: object, where: str) -> None:
        if values is None:
            values = {}
        if not isinstance(values, Mapping):
            raise ValueError(f"{where} must be a mapping, not {type(values).__name__}")
        self._unread = {str(key): value for key, value in values.items()}
        self._where = where
        self._known: list[str] = []

    def read(self, name: str, default: object = None) -> Any:
        """Return the unchecked value; null is the same as absent."""
        self._known.append(name)
        value = self._unread.pop(name, None)
        return default if value is None else value

    def read_text(self, name: str, default: str | None = None) -> str | None:
        """Return a non-empty text, or the default.

        Raises:
            ValueError: another value.
        """
        value = self.read(name, default)
        if value is not None and (not isinstance(value, str) or not value):
            raise ValueError(f"{self._where}.{name} is {value!r}, but must be a text")
        return value

    def read_integer(self, name: str, default: int, low: int, high: int) -> int:
        """Return an integer within bounds.

        Raises:
            ValueError: another value.
        """
        value = self.read(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{self._where}.{name} is {value!r}, but must be a whole number from {low} to {high}")
        return value

    def read_float(self, name: str, default: float, low: float, high: float) -> float:
        """Return a number within bounds.

        Raises:
            ValueError: another value.
        """
        value = self.read(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ValueError(f"{self._where}.{name} is {value!r}, but must be a number from {low:g} to {high:g}")
        return float(value)

    def read_texts(self, name: str) -> list[str]:
        """Return a list of texts, empty if absent.

        Raises:
            ValueError: another value.
        """
        value = self.read(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{self._where}.{name} is {value!r}, but must be a list of texts")
        return value

    def read_mapping(self, name: str) -> dict[str, str]:
        """Return a mapping of texts to texts, empty if absent.

        Raises:
            ValueError: another value.
        """
        value = self.read(name, {})
        if not isinstance(value, Mapping) or not all(isinstance(item, str) for pair in value.items() for item in pair):
            raise ValueError(f"{self._where}.{name} must be a mapping of texts to texts (quote numbers)")
        return dict(value)

    def discard(self, *names: str) -> dict[str, object]:
        """Remove keys of other projects that have no effect here, and return their values."""
        return {name: self._unread.pop(name) for name in names if name in self._unread}

    def reject_unknown(self) -> None:
        """Raise ValueError if a key has not been read."""
        for name, value in self._unread.items():
            hint = registry.did_you_mean(name, self._known)
            raise ValueError(
                f"{self._where}.{name} (value {value!r}) is unknown{hint or '.'} There are {', '.join(self._known)}"
            )
