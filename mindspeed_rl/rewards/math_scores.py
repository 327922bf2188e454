r"""Scorers for mathematical answers: MindSpeed-RL's verifiers, ms-swift's `accuracy`, and GSM8K."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, verify

from mindspeed_rl.rewards.answers.equality import same_answer
from mindspeed_rl.rewards.answers.extraction import (
    accepted_answers,
    closed_boxed,
    final_answer,
    last_boxed,
    last_number,
    tagged_answer,
)
from mindspeed_rl.rewards.answers.formulas import TooCostly, cpu_limit, read_text, warm_up  # noqa: F401 (the spawner calls warm_up)
from mindspeed_rl.rewards.answers.grading import grade, minerva_normal_form
from mindspeed_rl.rewards.answers.quantities import read_quantity

_BEFORE_ASSISTANT = re.compile(r"^.*?<\|im_start\|>assistant", re.DOTALL)
_STOP_WORDS = re.compile(r"</s>|<\|im_end\|>|<\|endoftext\|>")
_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_DAPO_TAIL, _STRICT_TAIL = 300, 100  # characters


def acc(response: str, label: Any) -> float:
    """Return 1.0 if the last boxed answer is right, -0.5 if it is wrong, -1.0 if there is no box or it is empty."""
    text = _STOP_WORDS.split(_BEFORE_ASSISTANT.sub("", response, count=1))[0]
    answer = final_answer(text)
    if "boxed" not in text or not answer:
        return -1.0
    return 1.0 if any(same_answer(answer, wanted) for wanted in accepted_answers(label)) else -0.5


def boxed_grade(response: str, label: Any) -> float:
    """Return 1.0 if the last closed box holds the label by mathruler's rules, else 0.0: `math_17k_acc` and `acc_for_ppo`."""
    boxed = closed_boxed(response)
    return 1.0 if boxed is not None and grade(boxed.strip(), str(label)) else 0.0


def base_acc(response: str, label: Any) -> float:
    """Return 1.0 if the whole response is <think>..</think>..<answer>..boxed..</answer> and the box is right (mathruler), else 0.0."""
    return boxed_grade(response, label) if _is_framed(response) else 0.0


def _is_framed(response: str) -> bool:
    """Return True for <think>..</think>..<answer>..\\boxed{..}..</answer> from the first to the last character."""
    position = 0
    for part in ("<think>", "</think>", "<answer>", "\\boxed{", "}", "</answer>"):
        # a regular expression would try every combination of repeated tags
        position = response.find(part, position) + len(part)
        if position < len(part):
            return False
    return response.startswith("<think>") and response.endswith("</answer>")


def acc_for_dapo(response: str, label: Any) -> float:
    """Return 1.0 if what follows the last "Answer:" in the last 300 characters is the label in Minerva's normal form, else -1.0."""
    lines = _ANSWER_LINE.findall(response[-_DAPO_TAIL:])
    return 1.0 if lines and minerva_normal_form(lines[-1]) == minerva_normal_form(str(label)) else -1.0


_PREDICTION = (ExprExtractionConfig(), LatexExtractionConfig())


@lru_cache(maxsize=4096)
def _parsed_label(label: str) -> list[Any]:
    return read_text(f"\\boxed{{{label}}}", (LatexExtractionConfig(),))


def math_verify_reward(response: str, label: Any) -> float:
    """Return 1.0 if the response has the format that `base_acc` asks for and math-verify finds the label in it, else 0.0."""
    if not _is_framed(response):
        return 0.0
    try:
        with cpu_limit():
            gold = _parsed_label(str(label))
            return float(bool(gold) and verify(gold, read_text(response, _PREDICTION), timeout_seconds=None))
    except TooCostly:
        return 0.0
    except Exception:  # as in read_text: what cannot be decided is not right
        return 0.0


def retool_reward(response: str, label: Any, tool_call_num: int = 0) -> float:
    """Return 1.0 if the last box within the last 100 characters is exactly the label; else -1.0 + 0.1 for each tool call, at most 0.

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


#: characters at the end of a response in which its answer is looked for
_TAIL = 20_000
_FORMULA = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SENTENCE = re.compile(r"[^\W\d_]{2,}\s+[^\W\d_]{2,}")


def accuracy(response: str, solution: Any) -> float:
    """Return 1.0 if the answer that the response states is the column `solution` (the label without it), else 0.0.

    Where to look is as in ms-swift's `accuracy`: the content of <answer>..</answer> where there is one, else LaTeX in the last
    box or anchored by "the final answer is". What counts as the same is not math-verify's verdict alone: see
    `equality.same_answer`. A list of solutions accepts each of them.
    """
    try:
        with cpu_limit():
            given = _stated_answers(response)
            wanted = [_stated_in_solution(solution) for solution in accepted_answers(solution)]
            return float(any(same_answer(answer, one) for one in wanted for answer in given))
    except TooCostly:
        return 0.0


@lru_cache(maxsize=4096)
def _stated_in_solution(solution: str) -> str:
    """Return the answer of a solution: in its tag, its last box, its last formula, or the whole text where it is the bare answer."""
    text = (tagged_answer(solution) or solution).strip()
    boxed = closed_boxed(text)
    if boxed is not None:
        return boxed
    formulas = _formulas(text)
    if formulas:
        return formulas[-1]
    return _read_by_math_verify(text) or text if _SENTENCE.search(text) and re.search(r"\d", text) else text


def _stated_answers(response: str) -> list[str]:
    """What the response may mean by its answer, one reading or two."""
    tagged = tagged_answer(response)
    if tagged is None:
        boxed = last_boxed(response)
        if boxed is not None:
            return [boxed]
        found = _read_by_math_verify(response[-_TAIL:], _ANCHORED_LATEX)
        return [found] if found else []
    boxed = closed_boxed(tagged)
    if boxed is not None:
        return [boxed]
    readings = [tagged]
    if _SENTENCE.search(tagged):
        readings += _formulas(tagged)[-1:] or [_read_by_math_verify(tagged[-_TAIL:])]
    return readings


def _formulas(text: str) -> list[str]:
    return [next(group for group in match.groups() if group) for match in _FORMULA.finditer(text)]


def _read_by_math_verify(text: str, *config: Any) -> str:
    """Return the text of the answer that math-verify finds, "" for none."""
    found = read_text(text, *config, extraction_mode="first_match")
    return found[-1] if found and isinstance(found[-1], str) else ""


_STATED_NUMBER = re.compile(r"####\s*((?:\\?[$￥¥€£]\s*)?-?\s*(?:\\?[$￥¥€£]\s*)?(?:\d[\d,]*(?:\.\d+)?|\.\d+))")
_MONEY = re.compile(r"[$￥¥€£\s]|\\\$")


def gsm8k(response: str, label: Any) -> float:
    """Return 1.0 if the number after the response's last "####" is the label's, else 0.0. GSM8K, arXiv:2110.14168; as in verl."""
    stated = _STATED_NUMBER.findall(response)
    return float(bool(stated) and _same_number(stated[-1], _gsm8k_label(label)))


def gsm8k_flexible(response: str, label: Any) -> float:
    """Return 1.0 if the number after "####", in the last box, or else the last one in the response is the label's, else 0.0."""
    stated = _STATED_NUMBER.findall(response)
    answer = stated[-1] if stated else closed_boxed(response) or last_number(response)
    return float(answer is not None and _same_number(answer, _gsm8k_label(label)))


def _gsm8k_label(label: Any) -> str:
    stated = _STATED_NUMBER.findall(str(label))
    return stated[-1] if stated else str(label)


def _same_number(answer: str, label: str) -> bool:
    values = [read_quantity(_MONEY.sub("", text).rstrip(".%").strip()) for text in (answer, label)]
    return values[0] is not None and values[1] is not None and values[0].value == values[1].value
