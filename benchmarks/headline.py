"""The lines by which a benchmark tells `python -m benchmarks.all` what it found."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

_MARK = "headline: "


@dataclass(frozen=True)
class Headline:
    """One comparison of what ran in turn.

    Attributes:
        what: that was measured, with its unit.
        ours, other: as printed; other is empty where there is nothing to hold it against.
        beside: what the other one is.
        ratio: how many times better ours is (faster, smaller); None where the question does not arise.
    """

    what: str
    ours: str
    beside: str = ""
    other: str = ""
    ratio: float | None = None

    def say(self) -> None:
        """Prints the line."""
        print(_MARK + json.dumps(asdict(self)), flush=True)


def read(output: str) -> list[Headline]:
    """The headlines of what a benchmark printed."""
    return [Headline(**json.loads(line.removeprefix(_MARK))) for line in output.splitlines() if line.startswith(_MARK)]
