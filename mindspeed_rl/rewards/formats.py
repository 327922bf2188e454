"""Rewards for the shape of a response, whatever it says."""

from __future__ import annotations

import re

_THINK_ANSWER = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>$", re.DOTALL | re.MULTILINE)


def think_answer(response: str) -> float:
    """1.0 if the response starts with <think>..</think> followed by <answer>..</answer> up to the end of a line, else 0.0.

    The name is `format` in MindSpeed-RL and ms-swift (DeepSeek-R1, arXiv:2501.12948).
    """
    return 1.0 if _THINK_ANSWER.match(response) else 0.0
