"""Agreement of raters: percent agreement, Cohen's and Fleiss' kappa, and Krippendorff's alpha.

A table has a row for each unit and a column for each rater; None is a unit that the rater has not rated. A coefficient is None
where it is undefined: no two raters share a unit, or chance would agree on everything, as all ratings are equal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Literal


def _list_pairs(one: Sequence[Hashable | None], other: Sequence[Hashable | None]) -> list[tuple[Hashable, Hashable]]:
    return [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]


def percent_agreement(one: Sequence[Hashable | None], other: Sequence[Hashable | None]) -> float | None:
    """Return the share of the units that two raters rate alike, among those that both have rated."""
    pairs = _list_pairs(one, other)
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def cohen_kappa(one: Sequence[Hashable | None], other: Sequence[Hashable | None]) -> float | None:
    """Return (p_o - p_e) / (1 - p_e) of two raters; p_e from the frequencies of each. Cohen 1960."""
    pairs = _list_pairs(one, other)
    if not pairs:
        return None
    observed = sum(a == b for a, b in pairs) / len(pairs)
    first, second = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    expected = math.fsum(first[category] * second[category] for category in first) / len(pairs) ** 2
    return None if expected == 1 else (observed - expected) / (1 - expected)


def fleiss_kappa(table: Sequence[Sequence[Hashable | None]]) -> float | None:
    """Return the kappa of any number of raters, over the units that all of them have rated. Fleiss 1971."""
    units = [Counter(row) for row in table if None not in row]
    if not units or (num_raters := units[0].total()) < 2:
        return None
    totals: Counter[Hashable | None] = sum(units, Counter())
    pairs = num_raters * (num_raters - 1)
    observed = math.fsum(sum(n * (n - 1) for n in unit.values()) / pairs for unit in units) / len(units)
    expected = math.fsum((n / totals.total()) ** 2 for n in totals.values())
    return None if expected == 1 else (observed - expected) / (1 - expected)


def krippendorff_alpha(
    table: Sequence[Sequence[float | None]], level: Literal["nominal", "interval"] = "nominal"
) -> float | None:
    """Return 1 - D_o / D_e, over the units that two raters or more have rated.

    D is the mean distance of two ratings: 1 for different ones (nominal), or their squared difference (interval). Krippendorff,
    "Computing Krippendorff's Alpha-Reliability", 2011.
    """
    units = [[value for value in row if value is not None] for row in table]
    units = [values for values in units if len(values) > 1]
    counts = Counter(value for values in units for value in values)
    total = counts.total()
    if len(counts) < 2:
        return None

    def distance(one: float, other: float) -> float:
        return float(one != other) if level == "nominal" else (one - other) ** 2

    within = math.fsum(2 * distance(a, b) / (len(values) - 1) for values in units for a, b in combinations(values, 2))
    # over all pairs of ratings, without listing the pairs: there are a million of a thousand scores
    if level == "nominal":
        between = float(total**2 - sum(count**2 for count in counts.values()))
    else:
        mean = math.fsum(value * count for value, count in counts.items()) / total
        between = 2 * total * math.fsum(count * (value - mean) ** 2 for value, count in counts.items())
    return 1 - (total - 1) * within / between
