r"""Scorers that give the scores of another project's function of the same name, right or wrong: imports map to them.

They differ from the project's own scorers on purpose: a thought is not removed, a text is cut where the source cuts it, and a
label is compared as the source compares it. The scores of the sources' functions are in `tests/data/source_scores.json`.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, verify

from mindspeed_rl.rewards.answers.grading import normalize_minerva
from mindspeed_rl.rewards.answers.judge import CpuLimitError, cpu_limit, read_text
from mindspeed_rl.rewards.answers.mathruler import grade_mathruler, spell_math
from mindspeed_rl.rewards.samples import RewardSettings
from mindspeed_rl.rewards.text_scores import think_alone

_TAIL, _BOX_TAIL = 300, 100  # characters


def _find_box(text: str, command: str = "\\boxed{") -> str | None:
    """Return the last box with its command, whose braces are counted without regard to escapes; None if it does not close."""
    start = text.rfind(command)
    if start < 0:
        return None
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0 and text[position] == "}":
            return text[start : position + 1]
    return None


# verl

_GSM8K = re.compile(r"#### (-?[0-9.,]+)")


def verl_gsm8k(response: str, label: object) -> float:
    """Return 1.0 if the last "#### number" of the last 300 characters is the label, commas removed, else 0.0."""
    numbers = _GSM8K.findall(response[-_TAIL:])
    return float(bool(numbers) and numbers[-1].replace(",", "") == str(label))


_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")


def verl_math_dapo(response: str, label: object) -> float:
    """Return 1.0 if the last "Answer:" of the last 300 characters is the label by Minerva's spelling, else -1.0.

    Without one, the last box of the last 100 characters must be exactly the label.
    """
    tail = response[-_TAIL:]
    lines = _ANSWER.findall(tail)
    answer = normalize_minerva(lines[-1]) if lines else "[INVALID]"
    if answer != "[INVALID]":
        return 1.0 if answer == normalize_minerva(str(label)) else -1.0
    box = _find_box(tail[-_BOX_TAIL:])
    if box is not None:
        return 1.0 if box[len("\\boxed{") : -1] == str(label) else -1.0
    return 1.0 if answer == normalize_minerva(str(label)) else -1.0


def verl_math(response: str, label: object) -> float:
    """Return 1.0 if the last box has the spelling of the label by the grader of the MATH data set (arXiv:2103.03874)."""
    answer = _read_math_box(response)
    if answer is None:
        return 0.0
    try:
        return float(spell_math(answer) == spell_math(str(label)))
    except (IndexError, ValueError):
        return float(answer == str(label))


def _read_math_box(response: str) -> str | None:
    r"""Return the content of the last box; `\boxed ` with a blank takes the text up to a dollar sign."""
    if "\\boxed " in response:
        return response.split("\\boxed ")[-1].split("$")[0]
    box = _find_box(response, "\\boxed" if "\\boxed" in response else "\\fbox")
    # the content of an \fbox, and of a box with something before its brace, is not read there
    return box[len("\\boxed{") : -1] if box is not None and box.startswith("\\boxed{") else None


def verl_geo3k(response: str, label: object) -> float:
    """Return 0.9 for the right last box (mathruler), and 0.1 for a response of a thought and a box after it."""
    box = _find_box(response)
    # "None" is the answer of a response without a box there
    right = grade_mathruler("None" if box is None else box[len("\\boxed{") : -1].strip(), str(label))
    position = 0
    for part in ("<think>", "</think>", "\\boxed{", "}"):
        position = response.find(part, position) + len(part)
        if position < len(part):
            return 0.9 * right
    return 0.9 * right + 0.1 * response.startswith("<think>")


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
#: more tags than this quarter the score
_MAX_TAGS = 10


def verl_search_em(response: str, label: object) -> float:
    """Return 1.0 if the last <answer> is one of the targets without case, articles and punctuation, else 0.0.

    `label` is {"target": text or texts}, the same in JSON, or a text. Many answer tags are worth a quarter.
    """
    answers = _TAGGED.findall(response)
    if not answers:
        return 0.0
    targets = [_spell_words(str(target)) for target in _list_targets(label)]
    if _spell_words(answers[-1].strip()) not in targets:
        return 0.0
    return 0.25 if max(response.count("<answer>"), response.count("</answer>")) > _MAX_TAGS else 1.0


def _list_targets(label: object) -> list[object]:
    if isinstance(label, str) and label.lstrip().startswith("{"):
        label = json.loads(label)
    if isinstance(label, Mapping):
        label = label["target"]
    return list(label) if isinstance(label, Iterable) and not isinstance(label, str) else [label]


def _spell_words(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


#: source of a row -> its function
_SOURCES = {
    "openai/gsm8k": verl_gsm8k,
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), verl_math),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), verl_math_dapo),
    "hiyouga/geometry3k": verl_geo3k,
    **dict.fromkeys((f"searchR1_{name}" for name in
                     "nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle".split()), verl_search_em),
}  # fmt: skip


def verl_default(response: str, label: object, data_source: str) -> float:
    """Return the score of the function that verl's default reward has for the column `data_source` of the row.

    Raises:
        ValueError: there is none here.
    """
    scorer = _SOURCES.get(data_source) or (verl_math_dapo if data_source.startswith("aime") else None)
    if scorer is None:
        raise ValueError(f"data_source is {data_source!r}, but must be one of {', '.join(_SOURCES)}, or begin with aime")
    return scorer(response, label)


# slime


def slime_deepscaler(response: str, label: object) -> float:
    """Return 1.0 if the last box after the last </think> (else after ###Response) has the label (mathruler), else 0.0."""
    if "</think>" in response:
        response = response.rsplit("</think>", 1)[1]
    elif "###Response" in response:
        response = response.split("###Response")[1]
    else:
        return 0.0
    return slime_math(response, label)


def slime_math(response: str, label: object) -> float:
    """Return 1.0 if the last box of the response has the label, or the last box of the label (mathruler), else 0.0."""
    expected = str(label)
    if "\\boxed" in expected:
        expected = _read_slime_box(expected) or ""
    answer = _read_slime_box(response)
    return float(bool(expected) and answer is not None and grade_mathruler(answer, expected))


def _read_slime_box(text: str) -> str | None:
    box = _find_box(text, "\\boxed") if "\\boxed" in text else None
    return box[len("\\boxed{") : -1] if box is not None and box.startswith("\\boxed{") else None


def slime_dapo(response: str, label: object) -> float:
    """Return 1.0 if the last "Answer:" of the last 300 characters is the whole number of the label, else -1.0.

    Raises:
        ValueError: the label is not a number.
    """
    lines = _ANSWER.findall(response[-_TAIL:])
    expected = normalize_minerva(str(label))
    try:
        whole = str(int(float(expected)))
    except (ValueError, OverflowError):
        raise ValueError(f"the label is {label!r}, but slime's dapo needs a number") from None
    for token in ("<|im_end|>", "<|endoftext|>"):
        lines = [line.replace(token, "") for line in lines]
    return 1.0 if lines and normalize_minerva(lines[-1]) == whole else -1.0


#: answers that are right or wrong as a whole
_WHOLE_ANSWERS = ("yes", "no", "noanswer")


def slime_f1(response: str, label: object) -> float:
    """Return the F1 score of the words of the response and the label, without case, articles and punctuation."""
    given, expected = _spell_words(response), _spell_words(str(label))
    if given != expected and (given in _WHOLE_ANSWERS or expected in _WHOLE_ANSWERS):
        return 0.0
    words, expected_words = given.split(), expected.split()
    common = sum((Counter(words) & Counter(expected_words)).values())
    return 2 * common / (len(words) + len(expected_words)) if common else 0.0


def slime_boxed_f1(response: str, label: object) -> float:
    """Return the F1 score of the words of the last box; of no words where there is none."""
    return slime_f1(_read_slime_box(response) or "", label)


# ms-swift and TRL

# ms-swift writes boxed=True, which math-verify takes for neither "all" nor "last"
_SWIFT_LATEX = (
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            nits=False, malformed_operators=False, basic_latex=True, boxed="none", units=True
        ),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    ),
)
_TRL_LATEX = (
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    ),
)


def swift_accuracy(response: str, solution: object) -> float:
    """Return 1.0 if math-verify finds the column `solution` in the response, else 0.0; <answer> is read first in both."""
    text = str(solution)
    tagged, given = _TAGGED.search(text), _TAGGED.search(response)
    try:
        with cpu_limit():
            gold = read_text(tagged[1].strip() if tagged else text, extraction_mode="first_match")
            if given is not None:
                answer = read_text(given[1].strip(), extraction_mode="first_match")
            else:
                answer = read_text(response, _SWIFT_LATEX, extraction_mode="first_match")
            return float(bool(gold) and verify(gold, answer, timeout_seconds=None))
    except CpuLimitError:
        return 0.0
    except Exception:  # noqa: BLE001 (math-verify may raise anything on arbitrary text, which is wrong there too)
        return 0.0


def trl_accuracy(response: str, solution: object) -> float | None:
    """Return 1.0 if math-verify finds the column `solution` in the response, else 0.0; None for one that it cannot read."""
    try:
        with cpu_limit():
            gold = read_text(str(solution))
            if not gold:
                return None
            answer = read_text(response, _TRL_LATEX, extraction_mode="first_match")
            return float(verify(gold, answer, timeout_seconds=None))
    except CpuLimitError:
        return 0.0


def swift_soft_overlong(response_ids: list[int], settings: RewardSettings) -> float:
    """Return what `soft_overlong` does, but falling on beyond `soft_max_length`, where that ends at -1.

    Raises:
        ValueError: `soft_cache_length` is not set.
    """
    if settings.soft_cache_length is None:
        raise ValueError("swift_soft_overlong needs soft_cache_length, the tokens over which the penalty grows to 1")
    limit = settings.soft_max_length or settings.max_tokens
    return min(0.0, (limit - settings.soft_cache_length - len(response_ids)) / settings.soft_cache_length)


def swift_cosine(response: str, solution: object, response_ids: list[int], settings: RewardSettings) -> float:
    """Interpolate by length as `cosine` does, by the judgement of `swift_accuracy`; beyond `cosine_max_len` it turns back."""
    limit = settings.cosine_max_len or settings.max_tokens
    if swift_accuracy(response, solution) >= 1.0:
        first, last = settings.cosine_min_len_value_correct, settings.cosine_max_len_value_correct
    else:
        first, last = settings.cosine_min_len_value_wrong, settings.cosine_max_len_value_wrong
    return first - (first - last) * (1 - math.cos(len(response_ids) * math.pi / limit)) / 2


def swift_repetition(response: str, settings: RewardSettings) -> float:
    """Return `repetition_max_penalty` times the fraction of n-grams of words between blanks that occurred before."""
    words, size = response.lower().split(), settings.repetition_n_grams
    grams = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    return settings.repetition_max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0


def trl_reasoning_accuracy(response: str, solution: object) -> float | None:
    """Return what `trl_accuracy` does for the text after the last </think>; 0.0 without one."""
    if "</think>" not in response:
        return 0.0
    return trl_accuracy(response.rpartition("</think>")[2].strip(), solution)


def trl_think_format(response: str) -> float:
    """Return 1.0 for <think>..</think> and an answer in the response itself; a thought that the prompt opened is none there."""
    return think_alone(response)


def trl_cosine(response: str, solution: object, response_ids: list[int], settings: RewardSettings) -> float | None:
    """Interpolate by length as `cosine` does, by the judgement of `trl_accuracy`; None for a solution that it cannot read."""
    right = trl_accuracy(response, solution)
    if right is None:
        return None
    limit = settings.cosine_max_len or settings.max_tokens
    if right:
        first, last = settings.cosine_min_len_value_correct, settings.cosine_max_len_value_correct
    else:
        first, last = settings.cosine_min_len_value_wrong, settings.cosine_max_len_value_wrong
    return last + (first - last) / 2 * (1 + math.cos(math.pi * min(len(response_ids), limit) / limit))


def trl_repetition(response_ids: list[int], settings: RewardSettings) -> float:
    """Return `repetition_max_penalty` times the fraction of n-grams of tokens that occurred before; 0.0 below n tokens."""
    size = settings.repetition_n_grams
    grams = [tuple(response_ids[start : start + size]) for start in range(len(response_ids) - size + 1)]
    return settings.repetition_max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0
