"""Columns of verl that hold objects, where a file (CSV, Spark, a database) has them as JSON text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mindspeed_rl.data import strict_json
from mindspeed_rl.data.conversation import MalformedRowError

#: beginning of a text that is a list of messages, as JSON or as Python writes it
_MESSAGES = re.compile(r"""\s*(array\()?\[\s*\{\s*['"](role|content)['"]\s*:""")
_OBJECT = re.compile(r"\s*\{")
_GROUND_TRUTH = re.compile(r"""\s*\{.*['"]ground_truth['"]\s*:""", re.DOTALL)
#: columns that hold an object in every data set of verl
OBJECT_COLUMNS = ("reward_model", "extra_info")


def has_messages(value: object) -> bool:
    """Return True for chat messages: a list, or the text of one."""
    return isinstance(value, (list, tuple)) or isinstance(value, str) and bool(_MESSAGES.match(value))


def read_messages(value: Any, column: object) -> Any:
    """Return a prompt with the messages of a JSON text as a list; other texts stay.

    Raises:
        MalformedRowError: the text is a list of messages, but not JSON.
    """
    if not isinstance(value, str) or not has_messages(value):
        return value
    return _decode(value, column, "a list of messages")


def read_object(value: Any, column: object) -> Any:
    """Return the value of a column with the object of a JSON text as a mapping.

    The text of an object is read in a column that always holds one (`OBJECT_COLUMNS`), and where it has a ground_truth; in
    other columns it may be an answer.

    Raises:
        MalformedRowError: the text is such an object, but not JSON.
    """
    form = _OBJECT if column in OBJECT_COLUMNS else _GROUND_TRUTH
    if not isinstance(value, str) or not form.match(value):
        return value
    decoded = _decode(value, column, "an object")
    return decoded if column in OBJECT_COLUMNS or isinstance(decoded, Mapping) and "ground_truth" in decoded else value


def _decode(text: str, column: object, what: str) -> Any:
    try:
        return strict_json.loads(text)
    except ValueError as error:
        start = text.strip()[:60]
        raise MalformedRowError(
            f"column {column!r} is the text of {what}, but not JSON ({error}): {start!r}; write it as {what}, or as JSON"
        ) from error
