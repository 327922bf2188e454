"""Files with the number of tokens routed to each expert, one for each rank of a rollout that counted them.

`eplb_token_collects_<rank>.json` holds {layer: {expert: tokens}}, both counted from 0, where layers are those with experts:
the format of MindSpeed-RL, which its generator of expert maps and `mindspeed-rl plan experts` read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

#: [layers][experts] tokens
_Counts = list[list[int]]
_NAME = "eplb_token_collects_"


def counts_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"{_NAME}{rank}.json"


def find_counts_files(folder: Path) -> list[Path]:
    """Return the existing files of all ranks."""
    return sorted(folder.glob(f"{_NAME}*.json"))


def write_counts(path: Path, counts: Sequence[Sequence[int]]) -> None:
    """Replace the file by one with these counts; create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({layer: dict(enumerate(row)) for layer, row in enumerate(counts)}))
    partial.replace(path)


def read_counts(path: Path) -> _Counts:
    """Read a file.

    Raises:
        ValueError: it holds something else.
    """
    problem = f"{path} holds no counts of tokens, which are {{layer: {{expert: tokens}}}}, both counted from 0"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        width = len(fields["0"])
        rows = [[fields[str(layer)][str(expert)] for expert in range(width)] for layer in range(len(fields))]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}).") from None
    except (KeyError, TypeError) as error:
        raise ValueError(f"{problem} ({type(error).__name__}: {error}).") from None
    counts = [count for row in rows for count in row]
    # type, because a bool is an int
    if not counts or any(type(count) is not int or not 0 <= count < 2**53 for count in counts):
        raise ValueError(f"{problem}.")
    return rows


def sum_counts(folder: Path) -> _Counts:
    """Return the sum over all files of a folder.

    Raises:
        ValueError: there are none, or they are of several models.
    """
    paths = find_counts_files(folder)
    if not paths:
        raise ValueError(
            f"{folder} holds no {_NAME}<rank>.json; a run writes them with generate_config.eplb_token_collects: true."
        )
    counts_by_rank = [read_counts(path) for path in paths]
    first = counts_by_rank[0]
    for path, counts in zip(paths, counts_by_rank):
        if (len(counts), len(counts[0])) != (len(first), len(first[0])):
            raise ValueError(
                f"{path} has counts of {len(counts)} layers with {len(counts[0])} experts, {paths[0].name} of {len(first)} "
                f"with {len(first[0])}: they are of several models."
            )
    return [[sum(counts) for counts in zip(*rows)] for rows in zip(*counts_by_rank)]
