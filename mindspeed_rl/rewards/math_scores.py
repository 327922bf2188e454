r"""Scorers for mathematical answers: MindSpeed-RL's verifiers, ms-swift's `accuracy`, and GSM8K."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from mindspeed_rl.rewards.answers import closed_boxed, final_answer, last_number, tagged_answer
from mindspeed_rl.rewards.grading import decimal_value, grade, math_equal, minerva_normal_form, warm_up  # noqa: F401 (the spawner calls warm_up)

_BEFORE_ASSISTANT = re.compile(r"^.*?<\|im_start\|>assistant", re.DOTALL)
_STOP_WORDS = re.compile(r"</s>|<\|im_end\|>|<\|endoftext\|>")
_THINK_ANSWER_BOXED = re.compile(r"<think>.*</think>.*<answer>.*\\boxed\{.*\}.*</answer>", re.DOTALL)
_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_DAPO_TAIL, _STRICT_TAIL = 300, 100  # characters


def acc(response: str, label: Any) -> float:
    """1.0 if the last boxed answer is right, -0.5 if it is wrong, -1.0 if there is no box or it is empty."""
    text = _STOP_WORDS.split(_BEFORE_ASSISTANT.sub("", response, count=1))[0]
    answer = final_answer(text)
    if "boxed" not in text or not answer:
        return -1.0
    return 1.0 if math_equal(answer, str(label)) else -0.5


def boxed_grade(response: str, label: Any) -> float:
    """1.0 if the last closed box holds the label by mathruler's rules, else 0.0: `math_17k_acc` and `acc_for_ppo`."""
    boxed = closed_boxed(response)
    return 1.0 if boxed is not None and grade(boxed.strip(), str(label)) else 0.0


def base_acc(response: str, label: Any) -> float:
    """1.0 if the whole response is <think>..</think>..<answer>..boxed..</answer> and the box is right (mathruler), else 0.0."""
    return boxed_grade(response, label) if _THINK_ANSWER_BOXED.fullmatch(response) else 0.0


def acc_for_dapo(response: str, label: Any) -> float:
    """1.0 if what follows the last "Answer:" in the last 300 characters is the label in Minerva's normal form, else -1.0."""
    lines = _ANSWER_LINE.findall(response[-_DAPO_TAIL:])
    return 1.0 if lines and minerva_normal_form(lines[-1]) == minerva_normal_form(str(label)) else -1.0


_PREDICTION = (ExprExtractionConfig(), LatexExtractionConfig())


@lru_cache(maxsize=4096)
def _parsed_label(label: str) -> list[Any]:
    return parse(f"\\boxed{{{label}}}", (LatexExtractionConfig(),), parsing_timeout=None)


def math_verify_reward(response: str, label: Any) -> float:
    """1.0 if the response has the format that `base_acc` asks for and math-verify finds the label in it, else 0.0."""
    if not _THINK_ANSWER_BOXED.fullmatch(response):
        return 0.0
    gold = _parsed_label(str(label))
    if not gold:
        return 0.0
    return float(verify(gold, parse(response, _PREDICTION, parsing_timeout=None), timeout_seconds=None))


def retool_reward(response: str, label: Any, tool_call_num: int = 0) -> float:
    """1.0 if the last box within the last 100 characters is exactly the label; else -1.0 + 0.1 for each tool call, at most 0.

    ReTool, arXiv:2504.11536. `tool_call_num` is the column that multi-turn rollouts fill.
    """
    if closed_boxed(response[-_STRICT_TAIL:]) == str(label):
        return 1.0
    return min(0.0, -1.0 + 0.1 * int(tool_call_num))


_ANCHORED_LATEX = (
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=True, malformed_operators=False, nits=False, boxed="all"
        ),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    ),
)


_MARKED_FORMULA = re.compile(r"\$|\\boxed|\\fbox|\\\(|\\\[")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LETTERS = re.compile(r"[^\W\d_]{2}")


@lru_cache(maxsize=4096)
def _parsed_solution(solution: str) -> list[Any]:
    """A solution's value; a label that is a formula alone, without dollars, is read as LaTeX.

    Of those math-verify would find no more than a number: nothing in \\sqrt{3}, and 2 in \\{1, 2\\}.
    """
    words = _COMMAND.sub(" ", solution)
    if not _MARKED_FORMULA.search(solution) and not _LETTERS.search(words) and decimal_value(solution) is None:
        found = parse(f"${solution}$", extraction_mode="first_match", parsing_timeout=None)
        if found:
            return found
    return parse(solution, extraction_mode="first_match", parsing_timeout=None)


def accuracy(response: str, solution: Any) -> float:
    """1.0 if math-verify finds the column `solution` (the label without it) in the response, else 0.0: ms-swift's `accuracy`.

    Only the content of <answer>..</answer> is looked at where there is one, on both sides.
    """
    solution = str(solution)
    gold = _parsed_solution(tagged_answer(solution) or solution)
    if not gold:
        return 0.0
    tagged = tagged_answer(response)
    if tagged is not None:
        answer = parse(tagged, extraction_mode="first_match", parsing_timeout=None)
    else:
        answer = parse(response, _ANCHORED_LATEX, extraction_mode="first_match", parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))


_HASHES = re.compile(r"####\s*([^\n]*)")
_MONEY = re.compile(r"[$￥¥€£]|\\\$")


def gsm8k(response: str, label: Any) -> float:
    """1.0 if the number after the response's last "####" is the label's, else 0.0. GSM8K, arXiv:2110.14168."""
    stated = _HASHES.findall(response)
    return float(bool(stated) and _same_number(stated[-1], _gsm8k_label(label)))


def gsm8k_flexible(response: str, label: Any) -> float:
    """1.0 if the number after "####", in the last box, or else the last one in the response is the label's, else 0.0."""
    stated = _HASHES.findall(response)
    answer = stated[-1] if stated else closed_boxed(response) or last_number(response)
    return float(answer is not None and _same_number(answer, _gsm8k_label(label)))


def _gsm8k_label(label: Any) -> str:
    stated = _HASHES.findall(str(label))
    return stated[-1] if stated else str(label)


def _same_number(answer: str, label: str) -> bool:
    values = [decimal_value(_MONEY.sub("", text).strip().rstrip(".%").strip()) for text in (answer, label)]
    return values[0] is not None and values[0] == values[1]
