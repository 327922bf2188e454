"""The files that say how many tokens each expert was sent, one for each rank of a rollout that counted.

`eplb_token_collects_<rank>.json` holds {layer: {expert: tokens}}, both numbered from 0, where layers are those with experts:
the form of MindSpeed-RL, whose generator of expert maps reads it, as does `mindspeed-rl plan experts`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

#: [layers][experts] tokens
Counts = list[list[int]]
_NAME = "eplb_token_collects_"


def counts_file(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"{_NAME}{rank}.json"


def counts_files(folder: Path) -> list[Path]:
    """The files of all ranks that are there."""
    return sorted(folder.glob(f"{_NAME}*.json"))


def write_counts(path: Path, counts: Sequence[Sequence[int]]) -> None:
    """Replaces the file by one with these counts; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps({layer: dict(enumerate(row)) for layer, row in enumerate(counts)}))
    beside.replace(path)


def read_counts(path: Path) -> Counts:
    """What a file holds.

    Raises:
        ValueError: it holds something else.
    """
    wrong = f"{path} holds no counts of tokens, which are {{layer: {{expert: tokens}}}}, both numbered from 0"
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        width = len(held["0"])
        rows = [[held[str(layer)][str(expert)] for expert in range(width)] for layer in range(len(held))]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}).") from None
    except (KeyError, TypeError) as error:
        raise ValueError(f"{wrong} ({type(error).__name__}: {error}).") from None
    numbers = [number for row in rows for number in row]
    # (a bool is an int)
    if not numbers or any(type(number) is not int or not 0 <= number < 2**53 for number in numbers):
        raise ValueError(f"{wrong}.")
    return rows


def sum_counts(folder: Path) -> Counts:
    """The tokens of all files of a folder together.

    Raises:
        ValueError: there are none, or they are of several models.
    """
    paths = counts_files(folder)
    if not paths:
        raise ValueError(
            f"{folder} holds no {_NAME}<rank>.json; a run writes them with generate_config.eplb_token_collects: true."
        )
    found = [read_counts(path) for path in paths]
    first = found[0]
    for path, counts in zip(paths, found):
        if (len(counts), len(counts[0])) != (len(first), len(first[0])):
            raise ValueError(
                f"{path} has counts of {len(counts)} layers with {len(counts[0])} experts, {paths[0].name} of {len(first)} "
                f"with {len(first[0])}: they are of several models."
            )
    return [[sum(numbers) for numbers in zip(*rows)] for rows in zip(*found)]
