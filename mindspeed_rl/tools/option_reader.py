"""Reading the mappings of a tool file, with one sentence for whatever is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl import registry


class OptionReader:
    """A mapping that is read key by key; `end` tells of keys that nobody asked for.

    Args:
        where: file, line and entry, as errors begin.
    """

    def __init__(self, values: Any, where: str) -> None:
        if values is None:
            values = {}
        if not isinstance(values, Mapping):
            raise ValueError(f"{where} must be a mapping, not {type(values).__name__}")
        self._left = {str(key): value for key, value in values.items()}
        self._where = where
        self._known: list[str] = []

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value as it is; null counts as absent."""
        self._known.append(name)
        value = self._left.pop(name, None)
        return default if value is None else value

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return a text.

        Raises:
            ValueError: it is none.
        """
        value = self.take(name, default)
        if value is not None and (not isinstance(value, str) or not value):
            raise ValueError(f"{self._where}.{name} is {value!r}, but must be a text")
        return value

    def whole(self, name: str, default: int, lowest: int, highest: int) -> int:
        """Return a whole number within bounds.

        Raises:
            ValueError: it is none.
        """
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise ValueError(f"{self._where}.{name} is {value!r}, but must be a whole number from {lowest} to {highest}")
        return value

    def number(self, name: str, default: float, lowest: float, highest: float) -> float:
        """Return a number within bounds.

        Raises:
            ValueError: it is none.
        """
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not lowest <= value <= highest:
            raise ValueError(f"{self._where}.{name} is {value!r}, but must be a number from {lowest:g} to {highest:g}")
        return float(value)

    def texts(self, name: str) -> list[str]:
        """Return a list of texts, empty if absent.

        Raises:
            ValueError: it is none.
        """
        value = self.take(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{self._where}.{name} is {value!r}, but must be a list of texts")
        return value

    def mapping(self, name: str) -> dict[str, str]:
        """Return a mapping of texts to texts, empty if absent.

        Raises:
            ValueError: it is none.
        """
        value = self.take(name, {})
        if not isinstance(value, Mapping) or not all(isinstance(item, str) for pair in value.items() for item in pair):
            raise ValueError(f"{self._where}.{name} must be a mapping of texts to texts (quote numbers)")
        return dict(value)

    def ignore(self, *names: str) -> dict[str, Any]:
        """What stands under keys of other projects that have no meaning here."""
        return {name: self._left.pop(name) for name in names if name in self._left}

    def end(self) -> None:
        """Raise ValueError if a key is left."""
        for name, value in self._left.items():
            hint = registry.did_you_mean(name, self._known)
            raise ValueError(
                f"{self._where}.{name} (value {value!r}) is unknown{hint or '.'} There are {', '.join(self._known)}"
            )
