"""Responses that people have called right or wrong, next to what the reward functions of a run give for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_rl.audit.report import Section
from mindspeed_rl.rewards.agreement import cohen_kappa, percent_agreement
from mindspeed_rl.texts import cut_middle

#: part of the full score from which a response is paid for
_PAID = 0.5


@dataclass(frozen=True)
class MarkedResponses:
    """Rewards of responses that people have called right or wrong.

    Attributes:
        places: row of each in its file, and the response.
        right: what people say.
        rewards: scores of the reward functions; None for a failed one.
        full: sum of the positive weights; half of it is paid for.
    """

    places: Sequence[tuple[str, str]]
    right: Sequence[bool]
    rewards: Sequence[float | None]
    full: float

    @property
    def paid(self) -> list[bool | None]:
        """True for each response that earns at least half of the full score; None without a score."""
        return [None if reward is None else reward >= _PAID * self.full for reward in self.rewards]

    def _find(self, right: bool, paid: bool) -> list[int]:
        return [index for index, each in enumerate(self.paid) if each is paid and self.right[index] is right]

    @property
    def paid_share(self) -> float:
        """Share of the wrong responses that are paid for."""
        return len(self._find(False, True)) / max(1, self.right.count(False))

    def list_sections(self) -> list[Section]:
        """Return the tables of a report."""
        percent, kappa = percent_agreement(self.paid, self.right), cohen_kappa(self.paid, self.right)
        shown = {"wrong, and paid for": self._find(False, True), "right, and not paid for": self._find(True, False)}
        rows = []
        for title, found in shown.items():
            of = self.right.count(title.startswith("right"))
            shortest = min(found, key=lambda index: len(self.places[index][1]), default=None)
            example = "" if shortest is None else f"{self.places[shortest][0]}: {cut_middle(self.places[shortest][1])!r}"
            rows.append((title, f"{len(found)} of {of}", example))
        agreement = [
            ("responses", str(len(self.right))),
            ("percent agreement", "undefined" if percent is None else f"{percent:.3f}"),
            ("Cohen's kappa", "undefined" if kappa is None else f"{kappa:.3f}"),
        ]
        return [
            Section("Agreement with people", ("", ""), agreement),
            Section("Where people and the reward differ", ("responses", "number", "shortest"), rows),
        ]

    def encode(self) -> dict[str, object]:
        """Return plain values."""
        return {
            "responses": len(self.right),
            "percent": percent_agreement(self.paid, self.right),
            "kappa": cohen_kappa(self.paid, self.right),
            "wrong_and_paid": len(self._find(False, True)),
            "right_and_unpaid": len(self._find(True, False)),
            "paid_share": self.paid_share,
        }
