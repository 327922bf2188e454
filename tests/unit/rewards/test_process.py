"""Process rewards: steps, where they end, and how their scores become one or many."""

import pytest

from mindspeed_rl.rewards.process import add_process_scores, aggregate, mark_steps, split_steps, step_ends, token_rewards
from mindspeed_rl.rewards.records import RewardResult


def test_steps_are_cut_behind_the_separator_and_join_to_the_response() -> None:
    response = "首先\n\nthen\n\n\n\nso\n\n"
    steps = split_steps(response)
    assert steps == ["首先\n\n", "then\n\n\n\n", "so\n\n"]
    assert "".join(steps) == response
    assert split_steps("") == [] and split_steps("one") == ["one"]


def test_a_step_is_followed_by_its_placeholder() -> None:
    assert mark_steps(["a\n\n", "b"], "ки") == "a ки\nb ки\n"


def test_step_ends_are_tokens_even_where_a_token_spans_two_steps() -> None:
    assert step_ends(["ab", "\n", "\nc", "d"], ["ab\n\n", "cd"]) == [2, 3]
    with pytest.raises(ValueError, match="do not spell"):
        step_ends(["a"], ["b"])


@pytest.mark.parametrize(("how", "score"), [("min", 0.2), ("mean", 0.5), ("product", 0.08), ("last", 0.5), ("max", 0.8)])
def test_step_scores_become_one(how: str, score: float) -> None:
    assert aggregate([0.8, 0.2, 0.5], how) == pytest.approx(score)
    assert aggregate([], how) == 0.0


def test_an_unknown_aggregation_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown aggregation .* 'median'"):
        aggregate([1.0], "median")


def test_token_rewards_lie_on_the_last_token_of_each_step() -> None:
    assert token_rewards([1.0, -1.0, 0.5], [1, 3, 3], 5, weight=2.0) == [0.0, 2.0, 0.0, -1.0, 0.0]
    with pytest.raises(ValueError, match="ends at token 5"):
        token_rewards([1.0], [5], 5)


def test_process_scores_are_added_as_a_part() -> None:
    added = add_process_scores([RewardResult(1.0, {"acc": 1.0})], [[0.4, 0.9]], how="min", weight=0.5)
    assert added[0].total == pytest.approx(1.2) and added[0].parts["process_reward"] == pytest.approx(0.4)
