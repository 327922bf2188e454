"""Plug-ins of the agent tests, which worker processes import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class TwoQuestions:
    """Asks for two more digits once the first answer is there, and gives a point for each copy of what was asked."""

    def __init__(self) -> None:
        self._wanted = ""

    async def reset(self, task: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._wanted = str(task["label"])
        return []

    async def step(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], float | None, bool]:
        point = float(messages[-1]["content"] == self._wanted)
        if len(messages) > 1:
            return [], point, True
        self._wanted = self._wanted[::-1]
        return [{"role": "user", "content": f"{self._wanted}="}], point, False

    async def close(self) -> None:
        pass
