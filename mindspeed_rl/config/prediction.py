"""What `mindspeed-rl plan` says of a run before it begins; part of the run's record, so that it is computed once."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Range:
    """A prediction, and between which bounds the truth is expected; equal where it is counted."""

    predicted: float
    low: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """Made once, by `planner.prediction.predict`.

    Attributes:
        chip: that it is made for.
        verdict: one of `planner.memory.VERDICTS`; "" where there is no prediction.
        summary: the verdict, the peak and the seconds of an iteration, in a line.
        seconds: by phase.
        gib: of the fullest die, by phase and owner.
        totals: of the fullest die by phase, as far as the run measures it.
        assumed: what the numbers take as given, in sentences.
        missing: why there is none: a model of the user's own, for example; "" where there is one.
    """

    chip: str = ""
    verdict: str = ""
    summary: str = ""
    seconds: dict[str, Range] = field(default_factory=dict)
    gib: dict[str, dict[str, Range]] = field(default_factory=dict)
    totals: dict[str, Range] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    missing: str = ""
