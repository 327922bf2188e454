"""Process rewards: steps, and how their scores become one."""

from typing import get_args, get_type_hints

import pytest

from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.rewards.process_rewards import _AGGREGATIONS, aggregate
from mindspeed_rl.workers.scoring import _mark_steps, _split_steps


def test_steps_are_cut_behind_the_separator_and_join_to_the_response() -> None:
    response = "首先\n\nthen\n\n\n\nso\n\n"
    steps = _split_steps(response)
    assert steps == ["首先\n\n", "then\n\n\n\n", "so\n\n"]
    assert "".join(steps) == response
    assert _split_steps("") == [] and _split_steps("one") == ["one"]


def test_a_step_is_followed_by_its_placeholder() -> None:
    assert _mark_steps(["a\n\n", "b"], "ки") == "a ки\nb ки\n"


@pytest.mark.parametrize(("how", "score"), [("min", 0.2), ("mean", 0.5), ("product", 0.08), ("last", 0.5), ("max", 0.8)])
def test_step_scores_become_one(how: str, score: float) -> None:
    assert aggregate([0.8, 0.2, 0.5], how) == pytest.approx(score)
    assert aggregate([], how) == 0.0


def test_an_unknown_aggregation_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown aggregation .* 'median'"):
        aggregate([1.0], "median")


def test_the_run_file_takes_the_aggregations_that_there_are() -> None:
    assert set(get_args(get_type_hints(RLConfig)["process_reward_aggregation"])) == set(_AGGREGATIONS)
