"""Trial of each verifier on the labels of a run: labels that no response can match make a reward that is always the lowest."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mindspeed_rl.rewards import REWARDS, find
from mindspeed_rl.rewards.choices import extract_label_letters

#: labels that are tried, at equal distances
_MAX_LABELS = 512
#: share of labels that no response can match, above which a run is refused
_MAX_SHARE = 0.5
#: an answer in a box is no longer than this, and is one line
_MAX_ANSWER = 300
#: text of a label that is around an answer, and not part of it
_AROUND = ("<answer>", "\\boxed{", "</think>", "####")


def _is_answer(label: str) -> bool:
    """Return True if a model can write a text as its answer: not a solution, JSON objects or tags."""
    text = label.strip()
    if not text or len(text) > _MAX_ANSWER or "\n" in text or any(mark in text for mark in _AROUND):
        return False
    if not text.startswith(("{\"", "[{\"")):
        return True
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return True
    return False


def _can_match_answer(label: object, columns: Mapping[str, Any]) -> bool:
    from mindspeed_rl.rewards.answers.extraction import list_accepted_answers  # loads sympy, which only these rewards need

    return any(_is_answer(answer) for answer in list_accepted_answers(label))


def _can_match_text(label: object, columns: Mapping[str, Any]) -> bool:
    return _is_answer(str(label))


def _can_match_solution(label: object, columns: Mapping[str, Any]) -> bool:
    from mindspeed_rl.rewards.math_scores import accuracy  # loads sympy, which only these rewards need

    solution = columns.get("solution", label)
    return bool(str(solution).strip()) and accuracy(str(solution), solution) >= 1.0 or _can_match_answer(solution, columns)


def _can_match_choice(label: object, columns: Mapping[str, Any]) -> bool:
    return bool(extract_label_letters(label))


def _can_match_number(label: object, columns: Mapping[str, Any]) -> bool:
    from mindspeed_rl.rewards.math_scores import gsm8k  # loads sympy, which only these rewards need

    return gsm8k(f"#### {str(label).rpartition('####')[2].strip()}", label) >= 1.0


def _can_match_tests(label: object, columns: Mapping[str, Any]) -> bool:
    from mindspeed_rl.rewards.code import read_tests  # loads the harness, which only this reward needs

    try:
        read_tests(columns.get("tests") or label)
    except ValueError:
        return False
    return True


#: whether a response could match a label, with the other columns of its row
Trial = Callable[[object, Mapping[str, Any]], bool]
_TRIALS: dict[str, Trial] = {
    "acc": _can_match_answer,
    "accuracy": _can_match_solution,
    "cosine": _can_match_solution,
    **dict.fromkeys(("base_acc", "math_17k_acc", "acc_for_dapo", "acc_for_ppo"), _can_match_text),
    **dict.fromkeys(("math_verify_reward", "retool_reward"), _can_match_text),
    "multiple_choice": _can_match_choice,
    **dict.fromkeys(("gsm8k", "gsm8k_flexible"), _can_match_number),
    "code": _can_match_tests,
}
"""Built-in verifier -> its trial."""


class _Rows(Protocol):
    """Rows of a dataset, by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def find_trials(functions: Sequence[str]) -> dict[str, Trial]:
    """Return the trial of each built-in verifier among these reward functions.

    Args:
        functions: `rl_config.verifier_function`.
    """
    return {name: _TRIALS[name] for name in functions if name in _TRIALS and REWARDS.get(name) == find(name)}


def is_matchable(trial: Trial, label: object, columns: Mapping[str, Any]) -> bool:
    """Return False for a label that no response can match; a row without a label is not tried."""
    is_given = label not in (None, "") or "tests" in columns or "solution" in columns
    return not is_given or trial(label, columns)


def try_labels(functions: Sequence[str], rows: _Rows) -> tuple[list[str], list[str]]:
    """Try each built-in verifier on labels of a dataset; return (warnings, errors), one sentence per verifier.

    Args:
        functions: `rl_config.verifier_function`.
        rows: have "label" and "columns"; at most 512 of them are read.
    """
    warnings: list[str] = []
    errors: list[str] = []
    step = max(1, -(-len(rows) // _MAX_LABELS))
    indexes = range(0, len(rows), step)
    for name, trial in find_trials(functions).items():
        wrong: list[tuple[int, object]] = []
        for index in indexes:
            row = rows[index]
            if not is_matchable(trial, row["label"], row["columns"]):
                wrong.append((index, row["label"]))
        if not wrong:
            continue
        index, label = wrong[0]
        text = (
            f"rl_config.verifier_function: no response can match {len(wrong)} of {len(indexes)} labels for {name}; for example "
            f"row {index}: {str(label)[:80]!r}. A label must be the answer itself, without solution, tags or JSON around it"
        )
        (errors if len(wrong) > _MAX_SHARE * len(indexes) else warnings).append(text)
    return warnings, errors
