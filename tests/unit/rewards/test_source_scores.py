"""Scorers of other projects: the scores that their own functions gave, in tests/data/source_scores.json."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_rl.rewards import REWARDS
from mindspeed_rl.rewards.samples import RewardSettings

TABLE = json.loads((Path(__file__).resolve().parents[2] / "data" / "source_scores.json").read_text(encoding="utf-8"))["scores"]
REPETITION = RewardSettings(repetition_n_grams=3, repetition_max_penalty=-1.0)


def find(name: str) -> Callable[..., float | None]:
    module, _, function = str(REWARDS[name]).partition(":")
    return getattr(importlib.import_module(module), function)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_scores_are_those_of_the_source(name: str) -> None:
    scorer = find(name)
    for response, label, score in TABLE[name]:
        given = scorer(response, REPETITION) if name == "swift_repetition" else scorer(response, label)
        assert given == (None if score is None else pytest.approx(score)), (response, label)


@pytest.mark.parametrize(
    ("source", "response", "label", "score"),
    [
        ("openai/gsm8k", "#### 18", "18", 1.0),
        ("openai/gsm8k", "#### $18", "18", 0.0),
        ("lighteval/MATH", "\\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("math_dapo", "Answer: 3", "4", -1.0),
        ("aime2024", "Answer: 3", "3", 1.0),
        ("hiyouga/geometry3k", "<think>a</think>\\boxed{5}", "5", 1.0),
        ("searchR1_nq", "<answer>The Nile</answer>", '{"target": ["nile"]}', 1.0),
    ],
)
def test_the_source_of_a_row_chooses_its_function(source: str, response: str, label: str, score: float) -> None:
    assert find("verl_default")(response, label, source) == score


def test_an_unknown_source_is_named() -> None:
    with pytest.raises(ValueError, match="data_source is 'taco', but must be one of openai/gsm8k"):
        find("verl_default")("x", "y", "taco")


def test_a_label_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="the label is 'x', but slime's dapo needs a number"):
        find("slime_dapo")("Answer: 1", "x")


def test_cosine_of_ms_swift() -> None:
    settings = RewardSettings(cosine_max_len=100)
    right, wrong = (find("swift_cosine")(text, "$5$", [0] * 50, settings) for text in ("\\boxed{5}", "\\boxed{6}"))
    # half way between the values at length 0 and at the limit
    assert right == pytest.approx((settings.cosine_min_len_value_correct + settings.cosine_max_len_value_correct) / 2)
    assert wrong == pytest.approx((settings.cosine_min_len_value_wrong + settings.cosine_max_len_value_wrong) / 2)


def test_the_thought_of_the_prompt_is_none_in_trl() -> None:
    # the scores of TRL 1.16's think_format_reward
    for response, score in (("<think>a</think>b", 1.0), ("a</think>b", 0.0), ("<think>a", 0.0), ("<think>a</think>", 1.0)):
        assert find("trl_think_format")(response) == score
