"""Plug-ins of the agent tests, which worker processes import."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl.rewards.text_scores import exact_match
from mindspeed_rl.tools.interface import ParsedTurn, ToolCall


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


class OneAnswer:
    """One turn, scored as `exact_match` does."""

    def reset(self, task: Mapping[str, Any]) -> list[dict[str, Any]]:
        self.label = str(task["label"])
        return []

    def step(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], float, bool]:
        return [], exact_match(messages[-1]["content"], self.label), True


class HeldUp(TwoQuestions):
    """Does not answer while the file AGENT_HOLD is there, and notes beside it who waits."""

    async def step(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], float | None, bool]:
        hold = Path(os.environ["AGENT_HOLD"])
        if hold.exists():
            with hold.with_suffix(".waits").open("a") as waits:
                waits.write(f"{self._wanted}\n")
        while hold.exists():
            await asyncio.sleep(0.05)
        return await super().step(messages)


class EveryTurn:
    """A parser for which whatever the model says is a call of `flipped` with it."""

    def __init__(self, schemas: Sequence[dict[str, Any]], tokenizer: Any) -> None:
        self._name = schemas[0]["function"]["name"]

    def parse(self, text: str, token_ids: Sequence[int]) -> ParsedTurn:
        return ParsedTurn("", None, (ToolCall(self._name, {"digits": text}, "1"),))


def flipped(digits: str) -> str:
    """The digits in the other order.

    Args:
        digits: two of them.
    """
    if not digits.isdigit():
        raise ValueError("these are not digits")
    return digits[::-1]


def called(response: str, label: str, tool_call_num: float) -> float:
    """A point for each call, and one for the right digits in front."""
    return tool_call_num + float(response.startswith(label))


class Duel:
    """Two players copy the row's digits; the one that does where the other does not takes a point from it."""

    roles = ("first", "second")

    def reset(self, task):
        self.label, self.right = task["label"], {}
        return "first", []

    def step(self, role, text):
        self.right[role] = text.strip() == self.label
        if role == "first":
            return {}, "second", []
        point = float(self.right["first"]) - float(self.right["second"])
        return {"first": point, "second": -point}, None, []


class Pair:
    """Two players copy the row's digits, one after the other; each has a point where it does."""

    roles = ("first", "second")

    def reset(self, task):
        self.label = task["label"]
        return self.roles[0], []

    def step(self, role, text):
        following = dict(zip(self.roles, self.roles[1:])).get(role)
        return {role: float(text.strip() == self.label)}, following, []


class PairOfFirst(Pair):
    """The same game without the second player."""

    roles = ("first",)


class PairOfSecond(Pair):
    """The same game without the first player."""

    roles = ("second",)


class Seldom(Pair):
    """The same game, in which the second player only plays rows whose digits have an even sum."""

    def step(self, role, text):
        rewards, following, messages = super().step(role, text)
        return rewards, following if sum(map(int, self.label)) % 2 == 0 else None, messages


class DuelWithFrozen:
    """The same game against an opponent that never learns: it is right where the sum of the digits is even."""

    roles = ("first",)

    def reset(self, task):
        self.label = task["label"]
        return "first", []

    def step(self, role, text):
        frozen = sum(map(int, self.label)) % 2 == 0
        return {"first": float(text.strip() == self.label) - float(frozen)}, None, []
