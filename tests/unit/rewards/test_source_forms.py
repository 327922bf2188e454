"""Scorers of other projects on 220 forms of responses and labels each: the scores that the sources' own functions gave.

`tests/data/source_form_scores.json` has the scores, in the order of `source_forms.list_forms`; versions are in it.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from source_forms import ANSWERS, WHOLE, list_forms

from mindspeed_rl.rewards import REWARDS
from mindspeed_rl.rewards.samples import RewardSettings

FORMS = 220
#: numbers of the scorers that read tokens, which are the bytes of a response here; for cosine TRL's defaults
SETTINGS = RewardSettings(
    cosine_max_len=90,
    cosine_min_len_value_wrong=-1.0,
    cosine_max_len_value_wrong=-0.5,
    soft_max_length=60,
    soft_cache_length=40,
)
SCORES: dict[str, list[float | None]] = json.loads(
    (Path(__file__).resolve().parents[2] / "data" / "source_form_scores.json").read_text(encoding="utf-8")
)["scores"]


def find_forms(name: str) -> list[tuple[str, str]]:
    return list_forms(WHOLE if name == "slime_dapo" else tuple(ANSWERS), FORMS)


def score(name: str, response: str, label: object) -> float | None:
    module, _, attribute = str(REWARDS[name]).partition(":")
    function: Callable[..., float | None] = getattr(importlib.import_module(module), attribute)
    given = {"response": response, "label": label, "solution": label, "settings": SETTINGS}
    given |= {"response_ids": list(response.encode())}
    return function(**{part: given[part] for part in inspect.signature(function).parameters if part in given})


def label_for(name: str, label: str) -> Any:
    return {"target": [label, "other"]} if name == "verl_search_em" else label


@pytest.mark.parametrize("name", sorted(SCORES))
def test_scores_are_those_of_the_source(name: str) -> None:
    forms = find_forms(name)
    assert len(forms) == len(set(forms)) == len(SCORES[name]) == FORMS
    different = []
    for (response, label), expected in zip(forms, SCORES[name]):
        given = score(name, response, label_for(name, label))
        if given != (expected if expected is None else pytest.approx(expected, abs=1e-9)):
            different.append((response, label, expected, given))
    assert different == []


@pytest.mark.slow
def test_scores_are_those_of_the_installed_packages() -> None:
    """The environment of optional packages has verl and TRL."""
    gsm8k = pytest.importorskip("verl.utils.reward_score.gsm8k")
    names = ("math_dapo", "math_reward", "search_r1_like_qa_em")
    math_dapo, math_reward, search = (importlib.import_module(f"verl.utils.reward_score.{name}") for name in names)
    trl = importlib.import_module("trl.rewards")

    def completions(response: str) -> list[list[dict[str, str]]]:
        return [[{"role": "assistant", "content": response}]]

    functions: dict[str, Callable[[str, Any], float | None]] = {
        "verl_gsm8k": gsm8k.compute_score,
        "verl_math_dapo": lambda response, label: math_dapo.compute_score(response, label)["score"],
        "verl_math": math_reward.compute_score,
        "verl_search_em": search.compute_score,
        "trl_accuracy": lambda response, label: trl.accuracy_reward(completions(response), [label])[0],
        "trl_reasoning_accuracy": lambda response, label: trl.reasoning_accuracy_reward(completions(response), [label])[0],
        "trl_think_format": lambda response, label: trl.think_format_reward(completions(response))[0],
        "trl_cosine": lambda response, label: cosine(completions(response), [label], [list(response.encode())])[0],
        "trl_repetition": lambda response, label: trl.get_repetition_penalty_reward()([list(response.encode())])[0],
        "soft_overlong": lambda response, label: overlong([list(response.encode())])[0],
    }
    cosine, overlong = trl.get_cosine_scaled_reward(90), trl.get_soft_overlong_punishment(60, 40)
    for name, function in functions.items():
        given = [function(response, label_for(name, label)) for response, label in find_forms(name)]
        assert given == [value if value is None else pytest.approx(value, abs=1e-9) for value in SCORES[name]], name


def test_soft_overlong_of_ms_swift_falls_on() -> None:
    settings = RewardSettings(soft_max_length=100, soft_cache_length=20)
    module = importlib.import_module("mindspeed_rl.rewards.source_scores")
    # min(-(length - 80) / 20, 0), without an end
    for length, expected in ((80, 0.0), (90, -0.5), (100, -1.0), (120, -2.0)):
        assert module.swift_soft_overlong([0] * length, settings) == expected
    with pytest.raises(ValueError, match="needs soft_cache_length"):
        module.swift_soft_overlong([0], RewardSettings())
