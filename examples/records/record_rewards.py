"""The reward of the example, and the stricter check that is drawn beside it. Imported by the run and by compare.py."""

from __future__ import annotations

import json
import re

from mindspeed_rl.rewards import register

_OBJECT = re.compile(r"\{[^{}]*\}")


def _read_object(response: str) -> tuple[list[tuple[str, object]], str] | None:
    """Return keys and values of the first JSON object, repeated ones too, and the text around it; None without an object."""
    match = _OBJECT.search(response)
    if match is None:
        return None
    try:
        pairs = json.loads(match.group(0), object_pairs_hook=list)
    except ValueError:
        return None
    return pairs, (response[: match.start()] + response[match.end() :]).strip()


@register("record")
def record(response: str, label: str) -> float:
    """Return the share of right fields: unknown and repeated keys cost a field each, text around the object a fifth."""
    expected, found = json.loads(label), _read_object(response)
    if found is None:
        return 0.0
    pairs, around = found
    given = dict(pairs)
    right = sum(key in given and str(given[key]).strip() == str(value) for key, value in expected.items())
    excess = len(pairs) - len(given.keys() & expected.keys())
    return max(0.0, (right - excess) / len(expected)) * (0.8 if around else 1.0)


@register("exact_record")
def exact_record(response: str, label: str) -> float:
    """Return 1.0 where the response is the JSON object of the label and nothing else, numbers as numbers; else 0.0."""
    found = _read_object(response)
    if found is None or found[1]:
        return 0.0
    expected = json.loads(label)
    same = len(found[0]) == len(expected) and dict(found[0]) == expected
    return float(same and all(type(value) is type(expected[key]) for key, value in found[0]))
