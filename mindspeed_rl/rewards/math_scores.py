"""MindSpeed-RL's and ms-swift's verifiers for mathematical answers."""

from __future__ import annotations

import re
from typing import Any

from mindspeed_rl.rewards.answers import final_answer, math_equal

_BEFORE_ASSISTANT = re.compile(r"^.*?<\|im_start\|>assistant", re.DOTALL)
_STOP_WORDS = re.compile(r"</s>|<\|im_end\|>|<\|endoftext\|>")


def acc(response: str, label: Any) -> float:
    """1.0 if the last boxed answer is right, -0.5 if it is wrong, -1.0 if there is no box or it is empty."""
    text = _STOP_WORDS.split(_BEFORE_ASSISTANT.sub("", response, count=1))[0]
    answer = final_answer(text)
    if "boxed" not in text or not answer:
        return -1.0
    return 1.0 if math_equal(answer, str(label)) else -0.5
