"""Lengths of responses: lognormal, cut at the limit, as they are in published runs; no random numbers are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

#: spread of the logarithm of lengths
SIGMA = 0.8
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens.

    Attributes:
        mean: after the cut.
        limit: no response is longer.
    """

    mean: float
    limit: float

    @property
    def _median(self) -> float:
        return _median(self.mean, self.limit)

    def above(self, length: float) -> float:
        """Share of responses that are longer than this."""
        if length >= self.limit:
            return 0.0
        if length <= 0 or self.mean >= self.limit:
            return 1.0
        return 1.0 - _NORMAL.cdf(math.log(length / self._median) / SIGMA)

    def longest_of(self, count: float) -> float:
        """Length that the longest of so many responses has, typically."""
        if self.mean >= self.limit:
            return self.limit
        share = 1.0 - 1.0 / (count + 1.0)
        return min(self.limit, self._median * math.exp(SIGMA * _NORMAL.inv_cdf(share)))

    @property
    def mean_square(self) -> float:
        """Mean of the squared length."""
        if self.mean >= self.limit:
            return self.limit**2
        return _moment(self._median, self.limit, 2)


def _moment(median: float, limit: float, power: int) -> float:
    """Mean of min(length, limit) ** power."""
    z = math.log(limit / median) / SIGMA
    whole = median**power * math.exp(power**2 * SIGMA**2 / 2)
    return whole * _NORMAL.cdf(z - power * SIGMA) + limit**power * (1.0 - _NORMAL.cdf(z))


@lru_cache(maxsize=1024)
def _median(mean: float, limit: float) -> float:
    """The median at which lengths, cut at the limit, have this mean."""
    low, high = mean * 1e-3, limit * 1e3
    for _ in range(80):
        middle = math.sqrt(low * high)
        if _moment(middle, limit, 1) < mean:
            low = middle
        else:
            high = middle
    return low
