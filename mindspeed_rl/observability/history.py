"""The figures of a run by metric: sixteen bytes each, however many iterations there are."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

#: an iteration's record: metric -> value, None where it was not finite
Record = Mapping[str, float | None]


def _numbers() -> array[int]:
    return array("q")


def _values() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Series:
    """One metric.

    Attributes:
        x: the iterations that have it, ascending.
        y: its values; NaN where metrics.jsonl has none because it was not finite.
    """

    x: array[int] = field(default_factory=_numbers)
    y: array[float] = field(default_factory=_values)

    def put(self, iteration: int, value: float) -> None:
        """The iteration has this value, whatever it had."""
        if not self.x or iteration > self.x[-1]:
            self.x.append(iteration)
            self.y.append(value)
            return
        place = bisect_left(self.x, iteration)
        if self.x[place] == iteration:
            self.y[place] = value
        else:
            self.x.insert(place, iteration)
            self.y.insert(place, value)

    def finite(self, since: int = 0) -> Series:
        """Its finite values, of the iterations from `since` on."""
        start = bisect_left(self.x, since)
        kept = [place for place in range(start, len(self.x)) if math.isfinite(self.y[place])]
        return Series(array("q", (self.x[place] for place in kept)), array("d", (self.y[place] for place in kept)))


class History:
    """What all iterations of a run measured.

    Args:
        records: lines of metrics.jsonl. What a resumed run measures again takes the place of what it had measured before.

    Attributes:
        iterations: their numbers, ascending.
        series: of each metric, in order of appearance.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.iterations = _numbers()
        self.series: dict[str, Series] = {}
        for record in records:
            self.add(record)

    def __len__(self) -> int:
        return len(self.iterations)

    def add(self, record: Record) -> None:
        """The figures of one more iteration, which the record names by "iteration"."""
        iteration = int(record["iteration"] or 0)
        place = bisect_left(self.iterations, iteration)
        if place == len(self.iterations) or self.iterations[place] != iteration:
            self.iterations.insert(place, iteration)
        for name, value in record.items():
            if name != "iteration" and (value is None or isinstance(value, (int, float))):
                self.series.setdefault(name, Series()).put(iteration, math.nan if value is None else float(value))

    def finite(self, *names: str) -> Series:
        """The finite values of the first of these metrics that has some; an empty series where none has."""
        for name in names:
            if (series := self.series.get(name)) is not None and (found := series.finite()).x:
                return found
        return Series()

    def last(self, name: str) -> float | None:
        """The newest finite value of a metric."""
        values = self.series.get(name, Series()).y
        return next((value for value in reversed(values) if math.isfinite(value)), None)

    def later_half(self) -> dict[str, Series]:
        """The finite values of the later half of the iterations, of the metrics that have some."""
        if not self.iterations:
            return {}
        since = self.iterations[len(self.iterations) // 2]
        halves = ((name, series.finite(since)) for name, series in self.series.items())
        return {name: half for name, half in halves if half.x}
