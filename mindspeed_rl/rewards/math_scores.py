r"""Scorers for mathematical answers: MindSpeed-RL's verifiers, ms-swift's `accuracy`, and GSM8K."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, verify

from mindspeed_rl.rewards.answers.equality import is_same_answer, is_same_plain_number
from mindspeed_rl.rewards.answers.extraction import (
    extract_boxed,
    extract_closed_boxed,
    extract_final_answer,
    extract_last_number,
    extract_tagged_answer,
    join_last,
    list_accepted_answers,
)
from mindspeed_rl.rewards.answers.grading import grade, normalize_minerva
from mindspeed_rl.rewards.answers.judge import (
    CpuLimitError,
    ExtractionConfigs,
    cpu_limit,
    read_text,
    warm_up,  # noqa: F401 (the spawner calls it)
)
from mindspeed_rl.rewards.answers.notation import normalize
from mindspeed_rl.rewards.answers.values import Text, read_value
from mindspeed_rl.rewards.text_scores import add_opened_thought
from mindspeed_rl.thoughts import remove_thought

_BEFORE_ASSISTANT = re.compile(r"^.*?<\|im_start\|>assistant", re.DOTALL)
_STOP_WORDS = re.compile(r"</s>|<\|im_end\|>|<\|endoftext\|>")
_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_DAPO_TAIL, _STRICT_TAIL = 300, 100  # characters


def acc(response: str, label: object, prompt: str = "") -> float:
    """Return 1.0 if the last boxed answer is right, -0.5 if it is wrong, -1.0 if there is no box or it is empty."""
    text = remove_thought(_STOP_WORDS.split(_BEFORE_ASSISTANT.sub("", response, count=1))[0], prompt)
    answer = extract_final_answer(text)
    if "boxed" not in text or not answer:
        return -1.0
    return 1.0 if any(is_same_answer(answer, accepted) for accepted in list_accepted_answers(label)) else -0.5


def boxed_grade(response: str, label: object, prompt: str = "") -> float:
    """Return 1.0 if the last closed box has the label by mathruler's rules, else 0.0: `math_17k_acc` and `acc_for_ppo`."""
    boxed = extract_closed_boxed(remove_thought(response, prompt))
    return 1.0 if boxed is not None and grade(boxed.strip(), str(label)) else 0.0


def base_acc(response: str, label: object, prompt: str = "") -> float:
    """Return 1.0 if the response is <think>..</think>..<answer>..boxed..</answer> with the right box (mathruler), else 0.0.

    The prompt may have opened the thought.
    """
    return boxed_grade(response, label, prompt) if _is_framed(add_opened_thought(prompt, response)) else 0.0


def _is_framed(response: str) -> bool:
    r"""Return True for <think>..</think>..<answer>..\boxed{..}..</answer> from the first to the last character."""
    position = 0
    for part in ("<think>", "</think>", "<answer>", "\\boxed{", "}", "</answer>"):
        # a regular expression would try every combination of repeated tags
        position = response.find(part, position) + len(part)
        if position < len(part):
            return False
    return response.startswith("<think>") and response.endswith("</answer>")


def acc_for_dapo(response: str, label: object, prompt: str = "") -> float:
    """Return 1.0 if the last "Answer:" in the last 300 characters has the label in Minerva's normal form, else -1.0."""
    lines = _ANSWER_LINE.findall(remove_thought(response, prompt)[-_DAPO_TAIL:])
    return 1.0 if lines and normalize_minerva(lines[-1]) == normalize_minerva(str(label)) else -1.0


_PREDICTION = (ExprExtractionConfig(), LatexExtractionConfig())


@lru_cache(maxsize=4096)
def _parse_label(label: str) -> list[Any]:
    return read_text(f"\\boxed{{{label}}}", (LatexExtractionConfig(),))


def math_verify_reward(response: str, label: object, prompt: str = "") -> float:
    """Return 1.0 if the response has the format of `base_acc` and math-verify finds the label in it, else 0.0."""
    if not _is_framed(add_opened_thought(prompt, response)):
        return 0.0
    try:
        with cpu_limit():
            gold = _parse_label(str(label))
            return float(
                bool(gold) and verify(gold, read_text(remove_thought(response, prompt), _PREDICTION), timeout_seconds=None)
            )
    except Exception:  # noqa: BLE001 (math-verify may raise anything on arbitrary text; an undecided answer is not right)
        return 0.0


def retool_reward(response: str, label: object, tool_call_num: int = 0, prompt: str = "") -> float:
    """Return 1.0 if the last box in the last 100 characters is exactly the label; else -1.0 + 0.1 per tool call, at most 0.

    ReTool, arXiv:2504.11536. `tool_call_num` is the column that multi-turn rollouts fill.
    """
    if extract_closed_boxed(remove_thought(response, prompt)[-_STRICT_TAIL:]) == str(label):
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


#: characters at the end of a response that are searched for its answer
_TAIL = 20_000
#: characters of a sentence around an answer
_LONGEST_SENTENCE = 2000
#: a label longer than this is a worked solution, whose last formula is the answer
_SHORT_LABEL = 200
_FORMULA = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_CONCLUDED = re.compile(r"(?:answers? (?:is|are)|答案[是为]|hence|thus|therefore)[^.。]*$", re.IGNORECASE)
_STATED = re.compile(r"(?:\bis|\bare|\bequals?|\bthus|\btherefore|[:=为是])\s*(?=\$|\\\(|\\\[)", re.IGNORECASE)


def accuracy(response: str, solution: object, prompt: str = "") -> float:
    """Return 1.0 if the answer in the response is the column `solution` (the label without it), else 0.0.

    The answer is searched as in ms-swift's `accuracy`, after the thought: the content of <answer>..</answer> where there is
    one, else LaTeX in the last box or anchored by "the final answer is". `equality.is_same_answer` compares it. A list of
    solutions accepts each of them.
    """
    try:
        with cpu_limit():
            given = _extract_candidates(remove_thought(response, prompt))
            expected = [_extract_from_solution(solution) for solution in list_accepted_answers(solution)]
            return float(any(is_same_answer(answer, accepted) for accepted in expected for answer in given))
    except CpuLimitError:
        return 0.0


@lru_cache(maxsize=4096)
def _extract_from_solution(solution: str) -> str:
    """Return the answer of a solution: in its tag, its last boxes, its last formulas, or the whole text if that is the answer.

    A short text with several formulas is one answer, with all of them.
    """
    text = remove_thought(solution)
    text = (extract_tagged_answer(text) or text).strip()
    boxed = extract_boxed(text)
    if boxed is not None:
        return boxed
    formulas = _find_formulas(text)
    joined = join_last(text, formulas)
    if joined is None or (len(text) <= _SHORT_LABEL and not isinstance(read_value(normalize(text)), Text)):
        return text
    others = join_last(text, formulas[:-1])
    if others is None or others in joined or len(text) > _SHORT_LABEL or _CONCLUDED.search(text[: formulas[-1][0]]):
        return joined
    return text


def _extract_candidates(response: str) -> list[str]:
    """Return the possible final answers of the response, one reading or two."""
    tagged = extract_tagged_answer(response)
    boxed = extract_boxed(response if tagged is None else tagged)
    if boxed is not None:
        return [boxed]
    if tagged is None:
        answer = _extract_by_math_verify(response[-_TAIL:], _ANCHORED_LATEX)
        return [answer] if answer else []
    readings = [tagged]
    # regular expressions cannot be interrupted, and some of them take quadratic time
    stated = _STATED.search(tagged) if len(tagged) <= _LONGEST_SENTENCE else None
    if stated is not None:
        rest = tagged[stated.end() :].strip().rstrip(".。")
        formulas = _find_formulas(rest)
        if formulas and formulas[0][0] == 0 and formulas[-1][1] == len(rest):
            readings.append(join_last(rest, formulas) or "")
    return readings


def _find_formulas(text: str) -> list[tuple[int, int, str]]:
    """Return (start, end, content) of each formula between dollar signs or LaTeX's brackets."""
    return [(match.start(), match.end(), next(group for group in match.groups() if group)) for match in _FORMULA.finditer(text)]


def _extract_by_math_verify(text: str, *config: ExtractionConfigs) -> str:
    """Return the text of the answer that math-verify finds, "" for none."""
    parsed = read_text(text, *config, extraction_mode="first_match")
    return parsed[-1] if parsed and isinstance(parsed[-1], str) else ""


_GSM8K_NUMBER = re.compile(r"####\s*((?:\\?[$￥¥€£]\s*)?-?\s*(?:\\?[$￥¥€£]\s*)?(?:\d[\d,]*(?:\.\d+)?|\.\d+))")
_MONEY = re.compile(r"[$￥¥€£\s]|\\\$")


def gsm8k(response: str, label: object, prompt: str = "") -> float:
    """Return 1.0 if the number after the last "####" is the label's, else 0.0. GSM8K, arXiv:2110.14168."""
    numbers = _GSM8K_NUMBER.findall(remove_thought(response, prompt))
    return float(bool(numbers) and _has_number(label, numbers[-1]))


def gsm8k_flexible(response: str, label: object, prompt: str = "") -> float:
    """Return 1.0 if the number after "####", else in the last box, else the last in the response is the label's, else 0.0."""
    response = remove_thought(response, prompt)
    numbers = _GSM8K_NUMBER.findall(response)
    answer = numbers[-1] if numbers else extract_closed_boxed(response) or extract_last_number(response)
    return float(answer is not None and _has_number(label, answer))


def _has_number(label: object, answer: str) -> bool:
    """Return True if the answer is the number of the label, after the last "####" where it has one."""
    expected = (_GSM8K_NUMBER.findall(str(label)) or [str(label)])[-1]
    return is_same_plain_number(*(_MONEY.sub("", text).rstrip(".%").strip() for text in (answer, expected)))
