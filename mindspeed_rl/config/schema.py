"""How a YAML group becomes a dataclass: declared keys, strict types, numbers that are numbers.

Every key of a group is a dataclass field made by `key`, which carries its meaning and, where it applies, the condition
under which it has an effect. `build` turns a plain mapping into the dataclass and collects every mistake.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from mindspeed_rl.config.errors import unknown_key, unknown_value

_INVALID = object()


def key(
    default: Any,
    doc: str,
    *,
    names: tuple[str, ...] = (),
    needs: tuple[str, tuple[Any, ...]] | None = None,
    only_on: tuple[str, ...] = (),
    no_effect: str = "",
) -> Any:
    """Declare one key of a group.

    Args:
        default: the value when the run file does not set the key; lists and dataclasses are copied for each instance.
        doc: what the key does, with its unit.
        names: the known names of a string key that also takes "module:function".
        needs: (other key of the group, values): the key matters only while the other key has one of these values.
        only_on: the platforms on which the key matters; everywhere when empty.
        no_effect: why the key is accepted although it does nothing here; `explain` prints it when the key is set.
    """
    metadata = {"doc": doc, "names": names, "needs": needs, "only_on": only_on, "no_effect": no_effect}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@cache
def field_types(group: type) -> dict[str, Any]:
    """Return the resolved type of every field of a group, in declaration order."""
    hints = typing.get_type_hints(group)
    return {field.name: hints[field.name] for field in dataclasses.fields(group)}


def default_of(field: dataclasses.Field) -> Any:
    """Return the value a field has when nothing sets it."""
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


def normalized(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the mapping with hyphens in its keys written as underscores."""
    return {str(name).replace("-", "_"): value for name, value in mapping.items()}


def build(
    group: type, values: Mapping[str, Any], path: str, errors: list[str], synonyms: dict[str, str] | None = None
) -> tuple[Any, frozenset[str]]:
    """Return the dataclass for `values` and the names of the keys that were set; `errors` gets a sentence for each mistake.

    Args:
        group: the dataclass of the group.
        values: keys as in the YAML file; hyphens count as underscores.
        path: the dotted name of the group, for the sentences.
        errors: receives one sentence for each unknown key and each value of a wrong type.
        synonyms: spellings of other projects, to name the right key in the sentence.
    """
    types_by_name = field_types(group)
    fields = {field.name: field for field in dataclasses.fields(group)}
    arguments: dict[str, Any] = {}
    for name, value in normalized(values).items():
        where = f"{path}.{name}" if path else name
        if name not in types_by_name:
            errors.append(unknown_key(where, value, types_by_name, synonyms))
            continue
        result = coerce(value, types_by_name[name], where, errors)
        if result is _INVALID:
            continue
        names = fields[name].metadata.get("names", ())
        if names and isinstance(result, str) and result not in names and ":" not in result:
            errors.append(unknown_value(where, result, [*names, "module:function"]))
            continue
        arguments[name] = result
    return group(**arguments), frozenset(arguments)


def coerce(value: Any, expected: Any, path: str, errors: list[str]) -> Any:
    """Return `value` as the expected type, or append a sentence to `errors` and return a marker that `build` drops.

    A number may be quoted or written as 1e-6 (which plain YAML reads as text); a whole float serves as an int. Nothing else is
    converted: text is never a truth value and a truth value is never a number.
    """
    collected: list[str] = []
    result = _coerce(value, expected, path, collected)
    errors.extend(collected)
    return _INVALID if collected else result


def _coerce(value: Any, expected: Any, path: str, errors: list[str]) -> Any:
    origin = typing.get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, typing.get_args(expected), path, errors)
    if origin is Literal:
        allowed = typing.get_args(expected)
        if isinstance(value, str) and value in allowed:
            return value
        errors.append(unknown_value(path, value, allowed))
        return _INVALID
    if origin is list:
        if isinstance(value, (list, tuple)):
            (item_type,) = typing.get_args(expected)
            return [_coerce(item, item_type, f"{path}[{index}]", errors) for index, item in enumerate(value)]
        errors.append(_wrong_type(path, value, expected))
        return _INVALID
    if dataclasses.is_dataclass(expected):
        if isinstance(value, Mapping):
            return build(expected, value, path, errors)[0]
        errors.append(f"{path} is {value!r}, but must be a group with the keys {', '.join(field_types(expected))}")
        return _INVALID
    result = _SCALARS[expected](value)
    if result is _INVALID:
        errors.append(_wrong_type(path, value, expected))
    return result


def _coerce_union(value: Any, members: tuple[Any, ...], path: str, errors: list[str]) -> Any:
    if value is None and type(None) in members:
        return None
    members = tuple(member for member in members if member is not type(None))
    if len(members) == 1:
        return _coerce(value, members[0], path, errors)
    for member in members:
        attempt: list[str] = []
        result = _coerce(value, member, path, attempt)
        if not attempt:
            return result
    errors.append(_wrong_type(path, value, typing.Union[members]))  # noqa: UP007 - built at run time
    return _INVALID


def _as_bool(value: Any) -> Any:
    return value if isinstance(value, bool) else _INVALID


def _as_int(value: Any) -> Any:
    number = _as_float(value)
    if number is _INVALID or number != int(number):
        return _INVALID
    return value if isinstance(value, int) else int(number)


def _as_float(value: Any) -> Any:
    if isinstance(value, bool):
        return _INVALID
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return _INVALID
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return _INVALID
    return float(value)


def _as_str(value: Any) -> Any:
    return value if isinstance(value, str) else _INVALID


_SCALARS = {bool: _as_bool, int: _as_int, float: _as_float, str: _as_str}

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}


def type_name(expected: Any) -> str:
    """Return the type in words that fit behind "must be"."""
    origin = typing.get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(member) for member in typing.get_args(expected))
    if origin is Literal:
        return " or ".join("null" if item is None else str(item) for item in typing.get_args(expected))
    if origin is list:
        return f"a list, each item {type_name(typing.get_args(expected)[0])}"
    return _NAMES.get(expected, f"a group ({getattr(expected, '__name__', expected)})")


def _wrong_type(path: str, value: Any, expected: Any) -> str:
    written = "empty" if value is None else repr(value)
    return f"{path} is {written}, but must be {type_name(expected)}"
