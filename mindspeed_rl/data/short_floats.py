"""Numbers of 16 and 32 bits as the file's writer sees them: 0.1 in a column of float32 is 0.1, not 0.10000000149011612."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

_Change = Callable[[Any], Any]


def shorten_floats(rows: Sequence[Mapping[str, Any]], schema: Any) -> list[dict[str, Any]]:
    """Return rows whose numbers of 16 and 32 bits are the shortest decimals that round to them, at any depth.

    Args:
        rows: rows of an Arrow table, as Python's objects.
        schema: schema of that table.
    """
    changes = {field.name: change for field in schema if (change := _find_change(field.type)) is not None}
    return [{**row, **{name: change(row[name]) for name, change in changes.items() if name in row}} for row in rows]


def _find_change(kind: Any) -> _Change | None:
    """Return the change of the values of an Arrow type; None for a type without such numbers."""
    import pyarrow.types as types

    kind = getattr(kind, "storage_type", kind)
    if types.is_float16(kind):
        return _skip_null(lambda value: float(str(np.float16(value))))
    if types.is_float32(kind):
        return _skip_null(lambda value: float(str(np.float32(value))))
    if types.is_dictionary(kind):
        return _find_change(kind.value_type)
    if types.is_struct(kind):
        return _change_struct([kind.field(index) for index in range(kind.num_fields)])
    if types.is_map(kind):
        changes = [_find_change(part) or _keep for part in (kind.key_type, kind.item_type)]
        return None if changes == [_keep, _keep] else _skip_null(lambda pairs: [_change_pair(pair, changes) for pair in pairs])
    change = _find_change(kind.value_type) if kind.num_fields == 1 and hasattr(kind, "value_type") else None
    return None if change is None else _skip_null(lambda values: [change(value) for value in values])


def _change_struct(fields: Sequence[Any]) -> _Change | None:
    changes = {field.name: change for field in fields if (change := _find_change(field.type)) is not None}
    if not changes:
        return None
    return _skip_null(lambda value: {**value, **{name: change(value[name]) for name, change in changes.items()}})


def _change_pair(pair: tuple[Any, Any], changes: Sequence[_Change]) -> tuple[Any, Any]:
    return changes[0](pair[0]), changes[1](pair[1])


def _keep(value: Any) -> Any:
    return value


def _skip_null(change: _Change) -> _Change:
    return lambda value: None if value is None else change(value)
