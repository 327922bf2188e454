"""Checks of the records of a run folder before a page, a report or a table reads them.

Folders are old, cut short by a full disk, or edited by hand. Fields that earlier versions did not write may be missing; one
that is there has its type. A check raises ValueError with the field; the reader adds file and line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: integers of JSON above it are not floats of JavaScript
_LARGEST = 1 << 53
#: condition of a value, and its words
_Kind = tuple[Callable[[Any], bool], str]


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= _LARGEST)


_COUNT: _Kind = (lambda value: type(value) is int and 0 <= value <= _LARGEST, "a whole number from 0")
_ID: _Kind = (lambda value: type(value) is int and abs(value) <= _LARGEST, "a whole number")
_NUMBER: _Kind = (_is_number, "a number")
_FINITE: _Kind = (lambda value: _is_number(value) and math.isfinite(value), "a finite number")
_TEXT: _Kind = (lambda value: isinstance(value, str), "a text")
_FLAG: _Kind = (lambda value: isinstance(value, (bool, int)), "true or false")
_OBJECT: _Kind = (lambda value: isinstance(value, dict), "an object")
_LIST: _Kind = (lambda value: isinstance(value, list), "a list")


def _or_null(kind: _Kind) -> _Kind:
    return (lambda value: value is None or kind[0](value)), f"{kind[1]}, or null"


def _check(record: Mapping[str, Any], required: Mapping[str, _Kind], optional: Mapping[str, _Kind], where: str = "") -> None:
    for kinds, is_required in ((required, True), (optional, False)):
        for name, (test, words) in kinds.items():
            if name not in record and is_required:
                raise ValueError(f"{where}{name} is missing")
            if name in record and not test(record[name]):
                raise ValueError(f"{where}{name} is {str(record[name])[:100]!r}, but must be {words}")


def check_metrics(record: Mapping[str, Any]) -> None:
    """Check a line of metrics.jsonl; a metric that is not a number is not drawn."""
    _check(record, {"iteration": _COUNT}, {})
    large = [name for name, value in record.items() if isinstance(value, int) and abs(value) > _LARGEST]
    if large:
        raise ValueError(f"{large[0]} has more than 53 bits")


_EXAMPLE = {"iteration": _COUNT, "index": _COUNT, "prompt": _TEXT}


def check_example(record: Mapping[str, Any]) -> None:
    """Check a line of examples.jsonl."""
    _check(record, _EXAMPLE, {"response": _TEXT, "reward": _or_null(_NUMBER)})


_SAMPLE = {"iteration": _COUNT, "prompt": _TEXT, "response": _TEXT}
_SAMPLE_MORE = {
    **{"reward": _or_null(_NUMBER), "advantage": _or_null(_NUMBER), "group": _or_null(_COUNT), "sample": _or_null(_COUNT)},
    **{"parts": _or_null(_OBJECT), "extra": _or_null(_OBJECT), "tokens": _or_null(_OBJECT), "events": _or_null(_LIST)},
}
#: list of a value for each token -> types of its values
_TOKENS: dict[str, set[type]] = {
    **{"ids": {int}, "texts": {str}, "log_probs": {int, float}, "advantages": {int, float}, "loss_mask": {bool, int}},
    **{"trainer_log_probs": {int, float}, "weights": {int, float}, "versions": {int}, "ratios": {int, float}},
    **{"clipped": {bool, int}, "sampled": {bool, int}},
}
_EVERY_SAMPLE = ("ids", "texts", "loss_mask")
_TURN = {"name": _TEXT, "parent": _or_null(_COUNT), "start_s": _FINITE, "end_s": _FINITE, "start": _COUNT, "stop": _COUNT}
_TURN_MORE = {"reward": _or_null(_NUMBER), "failed": _FLAG}


def check_completion(record: Mapping[str, Any]) -> None:
    """Check a line of completions.jsonl, with its tokens and turns."""
    _check(record, _SAMPLE, _SAMPLE_MORE)
    if record.get("tokens") is not None:
        _check_tokens(record["tokens"])
    for index, event in enumerate(record.get("events") or ()):
        if not isinstance(event, dict):
            raise ValueError(f"events[{index}] is not an object")
        _check(event, _TURN, _TURN_MORE, f"events[{index}].")
        if event["parent"] is not None and event["parent"] >= index:
            raise ValueError(f"events[{index}].parent is {event['parent']}, but must be an earlier one")


def _check_tokens(tokens: Mapping[str, Any]) -> None:
    length: int | None = None
    for name, types in _TOKENS.items():
        values: Sequence[Any] | None = tokens.get(name)
        if values is None and name not in _EVERY_SAMPLE:
            continue
        if not isinstance(values, list) or not set(map(type, values)) <= types:
            words = " or ".join(sorted(kind.__name__ for kind in types))
            raise ValueError(f"tokens.{name} must be a list of {words}")
        length = len(values) if length is None else length
        if len(values) != length:
            raise ValueError(f"tokens.{name} has {len(values)} items, but tokens.ids has {length}")


def check_event(record: Mapping[str, Any]) -> None:
    """Check an event of timeline.json: an interval, or the name of a worker."""
    _check(record, {"ph": _TEXT, "tid": _COUNT, "args": _OBJECT}, {})
    if record["ph"] == "X":
        _check(record, {"name": _TEXT, "ts": _FINITE, "dur": _FINITE}, {})
        _check(record["args"], {"iteration": _COUNT}, {}, "args.")
    elif record["ph"] == "M":
        _check(record["args"], {"name": _TEXT}, {}, "args.")


_REPORT = {
    **{"title": _TEXT, "outcome": _TEXT, "mindspeed_rl": _or_null(_TEXT), "planned_iterations": _or_null(_COUNT)},
    **{"versions": _OBJECT, "plan": _OBJECT, "config_set": _OBJECT, "config": _OBJECT},
}


def check_report(record: Mapping[str, Any]) -> None:
    """Check the fields of report.json that are read."""
    _check(record, {}, _REPORT)
    role = record.get("config", {}).get("actor_config")
    if role is not None:
        if not isinstance(role, dict):
            raise ValueError("config.actor_config is not an object")
        _check(role, {}, {"save": _or_null(_TEXT)}, "config.actor_config.")
