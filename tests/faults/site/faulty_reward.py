"""A reward function, a tool and a tracker that misbehave when they are told to; a plug-in of the fault suite's runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from sitecustomize import commit, take

from mindspeed_rl.rewards import register
from mindspeed_rl.tools.interface import ParsedTurn, ToolCall


@register("faulty")
def faulty(response: str, label: str) -> float:
    """1.0 for the label."""
    fault = take("reward", None)
    if fault is not None:
        how = fault["how"]
        if how == "nan":
            return float("nan")
        if how == "memory":
            kept = [bytearray(64 << 20) for _ in range(100)]
            return float(len(kept))
        if how == "fork":
            for _ in range(20):
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            os._exit(3)
        commit(fault)
    return float(response.strip() == label)


def looked_up(digits: str) -> str:
    """The digits; a tool.

    Args:
        digits: two of them.
    """
    fault = take("tool", None)
    if fault is not None:
        commit(fault)
    return digits


class EveryTurn:
    """A parser for which each turn is a call of the tool."""

    def __init__(self, schemas: Sequence[dict[str, Any]], tokenizer: Any) -> None:
        self._name = schemas[0]["function"]["name"]

    def parse(self, text: str, token_ids: Sequence[int]) -> ParsedTurn:
        return ParsedTurn("", None, (ToolCall(self._name, {"digits": text}, "1"),))


class DownTracker:
    """A tracker whose service goes down."""

    def __init__(self, rl_config: Any, run_dir: Any, config: Mapping[str, Any]) -> None:
        pass

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if take("tracker", None) is not None:
            raise ConnectionError("the tracker is down")

    def close(self) -> None:
        pass
