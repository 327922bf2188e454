"""Scorers that compare text with text: exact match and multiple choice."""

from __future__ import annotations

import re
from typing import Any

from mindspeed_rl.rewards.answers.extraction import closed_boxed, tagged_answer

_LETTERS = r"[(（]?([A-J](?:\s*[,、，和&]?\s*(?:and\s+)?[A-J])*)[)）]?(?![A-Za-z'’])"
_STATED = re.compile(
    r"(?i:answers?(?:\s+is|\s+are)?|choice(?:\s+is)?|option(?:\s+is)?|答案(?:是|为|选)?|故选|应选|选择?)"
    rf"\s*[:：]?\s*(?:\*\*|\\boxed\{{|\\text\{{|\$|【)*\s*(?i:option\s+|choice\s+)?{_LETTERS}"
)
_ALONE = re.compile(r"(?<![A-Za-z0-9'’])([B-HJ]|A(?! +[a-z])|I(?! +[a-z]))(?![A-Za-z0-9'’])")  # not the words "a" and "I"
_SET = re.compile(r"[A-J]")


def exact_match(response: str, label: Any) -> float:
    """1.0 if the response is the label, blanks around both aside, else 0.0."""
    return 1.0 if response.strip() == str(label).strip() else 0.0


def multiple_choice(response: str, label: Any) -> float:
    """1.0 if the chosen letters are the label's, in any order ("AC", "A, C"), else 0.0.

    The choice is looked for in the last box, in <answer>..</answer>, after the last "answer is" or its Chinese forms, and at
    last as a letter that stands alone.
    """
    chosen = chosen_letters(response)
    return 1.0 if chosen and chosen == frozenset(_SET.findall(str(label).upper())) else 0.0


def chosen_letters(response: str) -> frozenset[str]:
    """Returns the letters that a response to a multiple-choice question settles on, none if it does not."""
    for stated in (closed_boxed(response), tagged_answer(response)):
        if stated is not None:
            letters = _only_letters(stated)
            if letters:
                return letters
    stated_last = _STATED.findall(response)
    if stated_last:
        return frozenset(_SET.findall(stated_last[-1].upper()))
    alone = _ALONE.findall(response)
    return frozenset(alone[-1:])


def _only_letters(stated: str) -> frozenset[str]:
    """The letters of a statement: "B", "(B)", "B. 42", "A, C", "AC"; none for other text."""
    stated = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", stated).strip()
    match = re.match(rf"{_LETTERS}(?:\s*[.．:：、)]|\s*$)", stated)
    if match:
        return frozenset(_SET.findall(match[1]))
    found = _STATED.findall(stated)
    return frozenset(_SET.findall(found[-1].upper())) if found else frozenset(_ALONE.findall(stated)[-1:])
