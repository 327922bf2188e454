"""Reward functions of the product's runs: of token ids, so that groups of a random model vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def even(response_ids: list[int]) -> float:
    """Share of even tokens."""
    return sum(token % 2 == 0 for token in response_ids) / max(1, len(response_ids))


def low(response_ids: list[int]) -> float:
    """1 where the first token is in the lower half of the vocabulary."""
    return float(bool(response_ids) and response_ids[0] < 64)


#: texts of left and right in the episodes of `Pair` that have ended in this process
PLAYED: list[tuple[str, str]] = []


class Pair:
    """Two roles that speak once each: left earns a point for each letter a, and loses one to right for each b of right's."""

    roles = ("left", "right")

    def __init__(self) -> None:
        self._texts = dict.fromkeys(self.roles, "")

    async def reset(self, row: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
        return "left", []

    async def step(self, role: str, text: str) -> tuple[dict[str, float], str | None, list[dict[str, Any]]]:
        self._texts[role] = text
        if role == "left":
            return {"left": float(text.count("a"))}, "right", [{"role": "user", "content": "more="}]
        won = float(text.count("b"))
        return {"left": -won, "right": won}, None, []

    async def close(self) -> None:
        PLAYED.append((self._texts["left"], self._texts["right"]))


class TwoTurns:
    """An environment that asks once more, and gives a point for each letter a of the first turn."""

    async def reset(self, task: Mapping[str, Any]) -> list[dict[str, Any]]:
        return []

    async def step(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], float | None, bool]:
        point = float(str(messages[-1]["content"]).count("a"))
        if len(messages) > 1:
            return [], point, True
        return [{"role": "user", "content": "more="}], point, False

    async def close(self) -> None:
        pass
