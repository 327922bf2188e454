"""Values of JSON with one field replaced or removed, by a seed: what services and programs may send."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

#: values that a field is replaced by
ODD = [None, True, 0, -1, 1.5, 10**12, 1e400, float("nan"), "", "../etc/passwd", [], [[]], {}, {"a": {}}, "é\ud800"]


def list_fields(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in a value, its own among them."""
    yield keys
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from list_fields(item, (*keys, key))


def change_field(value: Any, at: random.Random) -> Any:
    """The value with a field replaced by one of ODD, or without a key."""
    keys = at.choice(list(list_fields(value)))
    copy = json.loads(json.dumps(value))
    if not keys:
        return at.choice(ODD)
    place = copy
    for key in keys[:-1]:
        place = place[key]
    if at.random() < 0.2:
        del place[keys[-1]]
    else:
        place[keys[-1]] = at.choice(ODD)
    return copy
