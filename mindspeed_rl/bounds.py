"""Bounds of what programs, models and services send: token ids, numbers, metrics, nesting.

A value that breaks one raises ValueError with a sentence. The caller decides whose fault it is: a request is refused, or a
sample fails. Nothing here ends a run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TypeGuard

#: rewards, metrics and log-probs are float32 sooner or later
LARGEST_FLOAT32 = 3.4028234663852886e38
#: of one report of a program, of one call of a tool
MAX_METRICS, MAX_METRIC_NAME = 100, 100
#: objects and lists of a value within each other; readers of deeper ones run out of stack
MAX_DEPTH = 100
#: no tokenizer has fewer tokens for a useful text; longer texts are refused or truncated before they are tokenized
MAX_CHARACTERS_PER_TOKEN = 32
_SHOWN = 200


def show(value: object) -> str:
    """Return the start of a value as text, for a message."""
    try:
        return repr(value[:_SHOWN] if isinstance(value, str) else value)[: _SHOWN + 2]
    except (ValueError, RecursionError):  # of an integer with thousands of digits, or a value that contains itself
        return f"a {type(value).__name__} that cannot be written"


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True for a finite number of JSON that float32 can hold; booleans are none."""
    # an integer of hundreds of digits compares with a float, and is none
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST_FLOAT32


def read_number(value: object, name: str, *, allows_bool: bool = False) -> float:
    """Return a finite number that float32 can hold.

    Args:
        allows_bool: True and False are 1 and 0.

    Raises:
        ValueError: it is something else.
    """
    number = math.nan
    if isinstance(value, Real) and (allows_bool or not isinstance(value, bool)):
        with contextlib.suppress(OverflowError):  # of an integer that is too large for any float
            number = float(value)
    if not abs(number) <= LARGEST_FLOAT32:
        shown = show(value) if isinstance(value, str) else repr(show(value))
        raise ValueError(f"{name} is {shown}, but must be a finite number of at most 3.4e38")
    return number


def add_numbers(values: Iterable[float], name: str) -> float:
    """Return the sum of numbers.

    Raises:
        ValueError: float32 cannot hold it.
    """
    try:
        total = math.fsum(values)
    except (OverflowError, ValueError):  # of finite numbers, and of infinite ones of both signs
        total = math.nan
    return read_number(total, name)


def read_metrics(values: object, where: str) -> dict[str, float]:
    """Return metrics by name; a slash in a name becomes an underscore, since names with one belong to the run.

    Raises:
        ValueError: it is not a mapping, has too many names, or a name is not a short printable text, or a value not a finite
            number.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {show(values)}, but must be an object of names and numbers")
    if len(values) > MAX_METRICS:
        raise ValueError(f"{where} has {len(values)} names, but may have at most {MAX_METRICS}")
    metrics: dict[str, float] = {}
    for name, value in values.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_METRIC_NAME or not name.isprintable():
            raise ValueError(f"{where}: a name is {show(name)}, but must be 1 to {MAX_METRIC_NAME} printable characters")
        plain = name.replace("/", "_")
        if plain in metrics:
            raise ValueError(f"{where}: two names are {plain!r}")
        metrics[plain] = read_number(value, f"{where}: {name}", allows_bool=True)
    return metrics


def check_token_ids(ids: Iterable[int], vocab_size: int, where: str) -> None:
    """Check that all ids are in the vocabulary; a million right ones take 0.03 s, also of an event loop.

    Raises:
        ValueError: one is not.
    """
    ids = ids if isinstance(ids, (list, tuple)) else list(ids)
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size):
        return
    for index, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ValueError(f"{where}: token {index} is {show(token)}, but ids are whole numbers from 0 to {vocab_size - 1}")


def check_depth(value: object, where: str) -> None:
    """Check that lists and objects are not nested too deeply.

    Raises:
        ValueError: they are.
    """
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
        if not level:
            return
    if any(isinstance(item, (dict, list)) for item in level):
        raise ValueError(f"{where} is nested too deeply: more than {MAX_DEPTH} lists and objects within each other")
