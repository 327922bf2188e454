"""completions.jsonl: what the model said, what it was worth, and how much it was pushed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Completion:
    """One sampled response with everything its advantage was made of.

    Attributes:
        prompt: text the model was given.
        response: text it gave.
        reward: total reward; None for a response that could not be scored.
        parts: unweighted score by verifier.
        advantage: advantage of its tokens (their mean where they differ).
        extra: anything else worth reading: label, length, finish reason, tool calls.
    """

    prompt: str
    response: str
    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    advantage: float | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


class CompletionWriter:
    """Appends completions of every `interval`-th iteration to a JSONL file.

    Args:
        path: the file; lines of an earlier part of the run stay.
        interval: iterations between two writes; 0 writes none.
        limit: completions kept of one iteration; all when None.
    """

    def __init__(self, path: Path, interval: int = 1, limit: int | None = None) -> None:
        self.path = Path(path)
        self.interval = interval
        self.limit = limit

    def wants(self, iteration: int) -> bool:
        """True when `write` would write: decode texts only then. The first iteration is 1."""
        return self.interval > 0 and (iteration == 1 or iteration % self.interval == 0)

    def write(self, iteration: int, completions: Sequence[Completion]) -> None:
        """Appends the iteration's completions if it is one to be written."""
        if not self.wants(iteration):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for completion in completions[: self.limit]:
                file.write(json.dumps({"iteration": iteration, **asdict(completion)}, ensure_ascii=False) + "\n")
