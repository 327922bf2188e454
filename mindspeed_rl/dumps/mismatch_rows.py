"""mismatch_rows.json of a run folder: rows on which `mindspeed-rl diff train rollout` compares trainer and rollout engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mindspeed_rl.files import write_file

MISMATCH_ROWS = "mismatch_rows.json"
#: tokens that a comparison samples after each row
COMPARED_TOKENS = 16


@dataclass(frozen=True)
class MismatchRows:
    """Rows of an iteration in which trainer and rollout engine differed beyond a bound.

    Attributes:
        iteration: the first is 1.
        place: metric of the depth or class of tokens that differs, such as "mismatch/depth/4096".
        contexts: tokens of each row, prompt and response, up to those that differ.
    """

    iteration: int
    place: str
    contexts: Sequence[Sequence[int]]


def write_rows(path: Path, rows: MismatchRows) -> None:
    """Write the file; rows of an earlier iteration are replaced."""
    write_file(path, json.dumps(asdict(rows)) + "\n")


def read_rows(path: Path) -> MismatchRows:
    """Read the file.

    Raises:
        ValueError: it is damaged.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        contexts = [[int(token) for token in tokens] for tokens in record["contexts"]]
        if not contexts or not all(contexts):
            raise ValueError("it has no tokens")
        return MismatchRows(int(record["iteration"]), str(record["place"]), contexts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): --prompts 4 compares prompts of the data instead.") from None
