"""Metrics of a run over its iterations: sixteen bytes a value."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

#: an iteration's record: metric -> value, None where it was not finite
Record = Mapping[str, float | None]


@dataclass(slots=True)
class Series:
    """One metric.

    Attributes:
        x: iterations that have the metric, ascending.
        y: values; NaN where metrics.jsonl has null, for one that was not finite.
    """

    x: array[int] = field(default_factory=lambda: array("q"))
    y: array[float] = field(default_factory=lambda: array("d"))

    def put(self, iteration: int, value: float) -> None:
        """Set the value of an iteration."""
        if not self.x or iteration > self.x[-1]:
            self.x.append(iteration)
            self.y.append(value)
            return
        index = bisect_left(self.x, iteration)
        if self.x[index] == iteration:
            self.y[index] = value
        else:
            self.x.insert(index, iteration)
            self.y.insert(index, value)

    def finite(self, since: int = 0) -> Series:
        """Return the finite values of the iterations from `since` on."""
        import numpy as np  # plans read no history, and start without it

        start = bisect_left(self.x, since)
        x, y = np.array(self.x[start:]), np.array(self.y[start:])
        finite = np.isfinite(y)
        return Series(array("q", x[finite].tobytes()), array("d", y[finite].tobytes()))


class History:
    """The metrics of all iterations of a run.

    Args:
        records: lines of metrics.jsonl. Iterations that a resumed run repeats replace the earlier ones.

    Attributes:
        iterations: ascending, from 1.
        series: series of each metric, in order of appearance; iteration 0 is the evaluation before the first one.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.iterations = array("q")
        self.series: dict[str, Series] = {}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Add the metrics of an iteration, whose index is the record's "iteration"."""
        iteration = int(record["iteration"] or 0)
        index = bisect_left(self.iterations, iteration)
        if iteration and (index == len(self.iterations) or self.iterations[index] != iteration):
            self.iterations.insert(index, iteration)
        for name, value in record.items():
            if name != "iteration" and (value is None or isinstance(value, (int, float))):
                self.series.setdefault(name, Series()).put(iteration, math.nan if value is None else float(value))

    def finite(self, *names: str) -> Series:
        """Return the finite values of the first of these metrics that has some; an empty series where none has."""
        for name in names:
            if (series := self.series.get(name)) is not None and (finite := series.finite()).x:
                return finite
        return Series()

    def later_half(self) -> dict[str, Series]:
        """Return the finite values in the later half of the iterations, of the metrics that have some."""
        if not self.iterations:
            return {}
        since = self.iterations[len(self.iterations) // 2]
        halves = ((name, series.finite(since)) for name, series in self.series.items())
        return {name: half for name, half in halves if half.x}
