"""Environments with a planted hole each, and their clean twins."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


class Lenient:
    """One turn: the label anywhere in it."""

    def reset(self, task: Mapping[str, Any]) -> list[Message]:
        self.label = str(task["label"])
        return []

    def step(self, messages: Sequence[Message]) -> tuple[list[Message], float, bool]:
        return [], self.score(messages[-1]["content"]), True

    def score(self, text: str) -> float:
        return float(self.label in re.findall(r"\d+", text))


class Exact(Lenient):
    """The clean twin."""

    def score(self, text: str) -> float:
        return float(text.strip() == self.label)


class Points(Lenient):
    """Two turns: a point for each digit of the label, anywhere; the episode ends with the second."""

    def step(self, messages: Sequence[Message]) -> tuple[list[Message], float, bool]:
        turn = sum(message["role"] == "assistant" for message in messages)
        found = float(self.label[turn - 1] in messages[-1]["content"])
        return ([], found, True) if turn == 2 else ([{"role": "user", "content": "Next digit?"}], found, False)


class Hangs(Lenient):
    """No turn ever ends."""

    def score(self, text: str) -> float:
        time.sleep(60)
        return 1.0


class Raises(Lenient):
    """Reads nothing but numbers."""

    def score(self, text: str) -> float:
        return float(int(text) == int(self.label))


class Two:
    """Has roles."""

    roles = ("a", "b")

    def reset(self, task: Mapping[str, Any]) -> tuple[str, list[Message]]:
        return "a", []

    def step(self, role: str, text: str) -> tuple[dict[str, float], None, list[Message]]:
        return {}, None, []
