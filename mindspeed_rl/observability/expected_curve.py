"""The curve that a run is expected to follow: a band of a metric, in windows of iterations, and where a run leaves it.

`expected.json` in a run folder has it: {"metric", "source", "windows": [{"first", "last", "low", "high"}, ...]}. A window is
judged by the mean of the metric in its iterations, once the run has passed them: published curves are means of this kind.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mindspeed_rl.bounds import is_number
from mindspeed_rl.observability.alerts import Alert
from mindspeed_rl.observability.history import History, Series

#: file of a run folder
EXPECTED = "expected.json"


@dataclass(frozen=True)
class Window:
    """The expected mean of a metric in the iterations `first` to `last`: at least `low`, at most `high`."""

    first: int
    last: int
    low: float
    high: float

    def __str__(self) -> str:
        """Describe the iterations."""
        return f"iteration {self.first}" if self.first == self.last else f"iterations {self.first} to {self.last}"


@dataclass(frozen=True)
class Departure:
    """A window outside of the band.

    Attributes:
        mean: mean of the metric in its iterations.
    """

    window: Window
    mean: float

    def __str__(self) -> str:
        """Describe the figures."""
        window = self.window
        return f"the mean of {window} is {self.mean:.3g}, expected {window.low:.3g} to {window.high:.3g}"


@dataclass(frozen=True)
class ExpectedCurve:
    """A band of a metric.

    Attributes:
        metric: name in metrics.jsonl.
        source: where the band is from.
        windows: ascending, none overlaps another.
    """

    metric: str
    source: str
    windows: tuple[Window, ...]

    @classmethod
    def parse(cls, record: object) -> ExpectedCurve:
        """Return the band that a record describes.

        Raises:
            ValueError: a field is missing, unknown or of another kind; windows overlap.
        """
        names = {"metric", "source", "windows"}
        if not isinstance(record, Mapping) or record.keys() != names:
            raise ValueError(f"a curve has the fields {', '.join(sorted(names))}, and only these")
        metric, source, windows = record["metric"], record["source"], record["windows"]
        for name, text in (("metric", metric), ("source", source)):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{name} is {text!r}, but must be a text")
        if not isinstance(windows, Sequence) or isinstance(windows, str) or not windows:
            raise ValueError(f"windows is {windows!r}, but must be a list of at least one")
        parsed = tuple(_parse_window(index, window) for index, window in enumerate(windows, 1))
        for before, after in zip(parsed, parsed[1:]):
            if after.first <= before.last:
                raise ValueError(f"windows: {after} follows {before}, but windows must ascend and not overlap")
        return cls(metric, source, parsed)

    def encode(self) -> dict[str, Any]:
        """Return the record of `parse`."""
        return {"metric": self.metric, "source": self.source, "windows": [asdict(window) for window in self.windows]}

    def judge(self, history: History) -> Judgement:
        """Compare a run with the band."""
        series = history.finite(self.metric)
        reached = max([*history.iterations[-1:], *series.x[-1:]], default=-1)
        inside, empty = list[Window](), list[Window]()
        departures = list[Departure]()
        for window in self.windows:
            if window.last > reached:
                break
            values = [y for x, y in zip(series.x, series.y) if window.first <= x <= window.last]
            if not values:
                empty.append(window)
            elif window.low <= (mean := statistics.fmean(values)) <= window.high:
                inside.append(window)
            else:
                departures.append(Departure(window, mean))
        return Judgement(self, tuple(inside), tuple(departures), tuple(empty))

    def draw(self) -> tuple[Series, list[float], list[float]]:
        """Return the middle of the band as a curve, and its lowest and highest values."""
        middle, low, high = Series(), list[float](), list[float]()
        for window in self.windows:
            for iteration in sorted({window.first, window.last}):
                middle.put(iteration, (window.low + window.high) / 2)
                low.append(window.low)
                high.append(window.high)
        return middle, low, high


def _parse_window(index: int, record: object) -> Window:
    names = ("first", "last", "low", "high")
    if not isinstance(record, Mapping) or record.keys() != set(names):
        raise ValueError(f"window {index} must have the fields {', '.join(names)}, and only these")
    for name in ("first", "last"):
        if type(record[name]) is not int or record[name] < 0:
            raise ValueError(f"window {index}: {name} is {record[name]!r}, but must be an iteration, a whole number from 0")
    for name in ("low", "high"):
        value = record[name]
        if not is_number(value):
            raise ValueError(f"window {index}: {name} is {value!r}, but must be a finite number")
    window = Window(record["first"], record["last"], float(record["low"]), float(record["high"]))
    if window.first > window.last or window.low > window.high:
        raise ValueError(f"window {index}: first and low must not be above last and high")
    return window


@dataclass(frozen=True)
class Judgement:
    """A run next to the band that it is expected in.

    Attributes:
        inside, departures, empty: windows that the run has passed: in the band, outside of it, and without a value.
    """

    curve: ExpectedCurve
    inside: tuple[Window, ...]
    departures: tuple[Departure, ...]
    empty: tuple[Window, ...]

    def __str__(self) -> str:
        """Describe it in a sentence."""
        curve = self.curve
        ends = f"(source: {curve.source})"
        passed = [*self.inside, *(departure.window for departure in self.departures), *self.empty]
        if not passed:
            return f"too early: {curve.windows[0]} of {curve.metric} are not over yet {ends}"
        if self.departures:
            first, last = self.departures[0], max(passed, key=lambda window: window.last)
            back = f"; inside again at iteration {last.last}" if last in self.inside else ""
            return f"{curve.metric} left its band at iteration {first.window.last}: {first}{back} {ends}"
        without = f"no value in {self.empty[0]}" if self.empty else ""
        if not self.inside:
            return f"not known: {curve.metric} has {without} {ends}"
        count = ", ".join(filter(None, [f"{len(self.inside)} of {len(curve.windows)} windows", without]))
        return f"{curve.metric} is inside its band up to iteration {self.inside[-1].last}, {count} {ends}"

    def find_alerts(self) -> list[Alert]:
        """Return a warning where the run has left the band."""
        if not self.departures:
            return []
        return [
            Alert(
                "left_band",
                "watch",
                self.departures[0].window.last,
                f"{self}.",
                "Compare model, data, reward, batch and learning rate with the source's.",
            )
        ]
