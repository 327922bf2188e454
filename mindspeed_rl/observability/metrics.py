"""Metrics with a declared reduction, so that parts merge to the same result in any order and grouping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

# combine the values of two parts of one metric
_REDUCTIONS: dict[str, Callable[[float, float], float]] = {
    "mean": lambda a, b: a + b,
    "sum": lambda a, b: a + b,
    "max": max,
    "min": min,
    "last": lambda a, b: b,
}


@dataclass(frozen=True)
class Metric:
    """A part of a metric: its reduction and the items so far.

    Attributes:
        reduction: mean, sum, max, min or last.
        value: for mean the SUM of the items; else the reduced value.
        count: number of items; the divisor of mean.
    """

    reduction: str
    value: float
    count: float = 1.0

    def __post_init__(self) -> None:
        if self.reduction not in _REDUCTIONS:
            from mindspeed_rl import registry  # not at the top: losses load metrics, and little else

            near = registry.find_similar(self.reduction, _REDUCTIONS)
            hint = "" if near is None else f" Did you mean '{near}'?"
            raise ValueError(f"Unknown reduction '{self.reduction}'.{hint} Known: {', '.join(_REDUCTIONS)}.")

    def merge(self, other: Metric) -> Metric:
        """Return both parts together; for `last`, the other one.

        Raises:
            ValueError: the parts declare different reductions.
        """
        if self.reduction != other.reduction:
            raise ValueError(f"A metric cannot be reduced by '{self.reduction}' here and by '{other.reduction}' there.")
        # a part without items must not win a maximum, or be the last
        if not self.count or not other.count:
            return self if self.count else other
        return Metric(self.reduction, _REDUCTIONS[self.reduction](self.value, other.value), self.count + other.count)

    def result(self) -> float:
        """Return the value to show; NaN for a mean over nothing."""
        if self.reduction != "mean":
            return self.value
        return self.value / self.count if self.count else math.nan


class Metrics(dict[str, Metric]):
    """Named metrics that accumulate over micro-batches, ranks and workers. Plain data: pickles anywhere.

    Example:
        metrics.add_mean("actor/pg_loss", loss_sum, num_tokens)   # each micro-batch
        total = merge(parts_of_all_ranks).results()               # {"actor/pg_loss": sum / count}
    """

    def add(self, name: str, metric: Metric) -> None:
        """Merge `metric` into the metric of this name.

        Raises:
            ValueError: the name was used with another reduction before.
        """
        known = self.get(name)
        try:
            self[name] = metric if known is None else known.merge(metric)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def add_mean(self, name: str, total: float, count: float = 1.0) -> None:
        """Add `count` items with the sum `total` to a mean. Numbers or one-element tensors."""
        self.add(name, Metric("mean", float(total), float(count)))

    def add_sum(self, name: str, value: float) -> None:
        """Add to a total."""
        self.add(name, Metric("sum", float(value)))

    def add_max(self, name: str, value: float) -> None:
        """Add a value to a maximum."""
        self.add(name, Metric("max", float(value)))

    def add_min(self, name: str, value: float) -> None:
        """Add a value to a minimum."""
        self.add(name, Metric("min", float(value)))

    def add_last(self, name: str, value: float) -> None:
        """Replace the value (a learning rate, a step)."""
        self.add(name, Metric("last", float(value)))

    def add_spread(self, name: str, values: Iterable[float]) -> None:
        """Add values to the three metrics `name/mean`, `name/max` and `name/min`; nothing for no values."""
        values = [float(value) for value in values]
        if values:
            # fsum, because its result does not depend on the order of the values
            self.add(f"{name}/mean", Metric("mean", math.fsum(values), float(len(values))))
            self.add(f"{name}/max", Metric("max", max(values), float(len(values))))
            self.add(f"{name}/min", Metric("min", min(values), float(len(values))))

    def merge(self, other: Mapping[str, Metric]) -> None:
        """Merge all metrics of `other`."""
        for name, metric in other.items():
            self.add(name, metric)

    def results(self) -> dict[str, float]:
        """Return the value of each metric, in order of appearance; a mean over nothing is left out."""
        return {name: metric.result() for name, metric in self.items() if metric.count or metric.reduction != "mean"}


def merge(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Return one `Metrics` over all parts; `last` is the last part's."""
    total = Metrics()
    for part in parts:
        total.merge(part)
    return total
