"""Length and repetition: hand-computed values at the ends, in the middle and beyond."""

import math

import pytest

from mindspeed_rl.rewards.dispatcher import Batch, _compute_overlong_penalty, _compute_weighted_total
from mindspeed_rl.rewards.samples import RewardResult, RewardSample, RewardSettings
from mindspeed_rl.rewards.shaping import cosine, length, repetition, soft_overlong
from mindspeed_rl.rewards.totals import add_trajectory_rewards
from mindspeed_rl.trainers.model_rewards import _add_judgements, _Judgement

SETTINGS = RewardSettings(max_tokens=100)


@pytest.mark.parametrize(
    ("answer", "num_tokens", "score"),
    [
        ("5", 0, 1.0),
        ("5", 50, 0.75),
        ("5", 100, 0.5),
        ("5", 150, 0.5),  # clamped: the plain cosine would give 0.75 again
        ("6", 0, -0.5),
        ("6", 50, -0.25),
        ("6", 100, 0.0),
        ("6", 150, 0.0),
    ],
)
def test_cosine_makes_right_answers_shorter_and_wrong_ones_longer(answer: str, num_tokens: int, score: float) -> None:
    assert cosine(rf"\boxed{{{answer}}}", "5", [7] * num_tokens, SETTINGS) == pytest.approx(score)


def test_cosine_takes_its_own_length_and_values() -> None:
    settings = RewardSettings(
        max_tokens=100, cosine_max_len=8, cosine_min_len_value_correct=2.0, cosine_max_len_value_correct=0.0
    )
    assert cosine(r"\boxed{5}", "5", [0] * 8, settings) == pytest.approx(0.0)
    assert cosine(r"\boxed{5}", "5", [0] * 2, settings) == pytest.approx(1 + math.cos(math.pi / 4))


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("", 0.0),
        ("a b", 0.0),  # shorter than n
        ("a b c d", 0.0),
        ("a b c a b c", -0.25),  # abc bca cab abc: 3 of 4 differ
        ("A a a A a a", -0.75),  # one gram four times, case aside
        ("今天天气", 0.0),
        ("好好好好好好", -0.75),
        ("今天好今天好", -0.25),
        ("答案是。答案是。答案是。", -0.6),  # 10 grams, 4 different
    ],
)
def test_repetition_counts_words_and_in_chinese_characters(response: str, score: float) -> None:
    assert repetition(response, SETTINGS) == pytest.approx(score)


def test_repetition_takes_size_and_penalty_from_the_settings() -> None:
    settings = RewardSettings(repetition_n_grams=1, repetition_max_penalty=-2.0)
    assert repetition("a a a b", settings) == pytest.approx(-2.0 * (1 - 2 / 4))


@pytest.mark.parametrize(("num_tokens", "score"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (300, -1.0)])
def test_soft_overlong_falls_over_its_cache_and_stops_at_minus_one(num_tokens: int, score: float) -> None:
    assert soft_overlong([0] * num_tokens, RewardSettings(max_tokens=100, soft_cache_length=20)) == pytest.approx(score)
    assert soft_overlong([0] * num_tokens, RewardSettings(soft_max_length=100, soft_cache_length=20)) == pytest.approx(score)


def test_soft_overlong_without_its_cache_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="soft_cache_length"):
        soft_overlong([0], SETTINGS)


def test_length_falls_from_one_to_zero_at_the_limit() -> None:
    assert [length([0] * n, SETTINGS) for n in (0, 25, 100, 200)] == [1.0, 0.75, 0.0, 0.0]


@pytest.mark.parametrize(("num_tokens", "penalty"), [(0, 0.0), (70, 0.0), (80, -0.5), (90, -1.0), (100, -1.5), (400, -1.5)])
def test_the_overlong_penalty_is_linear_in_the_buffer_and_ends_at_its_factor(num_tokens: int, penalty: float) -> None:
    """Here with 30 tokens of buffer before 100, and factor 1.5: 80 tokens exceed 70 by 10, so 10 / 30 * 1.5."""
    settings = RewardSettings(
        overlong_buffer_enable=True, overlong_buffer=30, overlong_buffer_penalty_factor=1.5, rollout_max_tokens=100
    )
    assert _compute_overlong_penalty(num_tokens, settings) == pytest.approx(penalty)
    assert _compute_overlong_penalty(num_tokens, SETTINGS) == 0.0


def test_a_response_without_an_end_token_pays_for_it_in_the_total_and_in_no_part() -> None:
    """0.5 * 2 - 1.5 where the length limit cut it, 0.5 * 2 where it ended."""
    batch = Batch([RewardSample(truncated=True), RewardSample()], values={(0, 0): ({"a": 2.0}, {}), (1, 0): ({"a": 2.0}, {})})
    settings = RewardSettings(missing_eos_penalty=1.5)
    results = [batch.result(row, ["a"], [0.5], settings) for row in (0, 1)]
    assert [(one.total, one.penalty, one.parts) for one in results] == [(-0.5, -1.5, {"a": 2.0}), (1.0, 0.0, {"a": 2.0})]


def test_totals_leave_out_functions_without_an_opinion() -> None:
    assert _compute_weighted_total({"a": 1.0, "c": -1.0, "c/x": 9.0}, ["a", "b", "c"], [0.5, 100.0, 2.0]) == -1.5


def test_a_reward_models_score_comes_last_and_stands_alone_where_the_rules_said_nothing() -> None:
    results = [
        RewardResult(1.5, {"acc": 1.0}, penalty=-0.5),
        RewardResult(None, {}, "skipped", penalty=-0.5),
        RewardResult(None, {}, "timeout", "slow"),
    ]
    added = _add_judgements(results, [_Judgement(score) for score in (2.0, 3.0, 4.0)], weight=0.5)
    assert [result.total for result in added] == [2.5, 1.0, None]
    assert [result.state for result in added] == ["ok", "ok", "timeout"]
    assert list(added[0].parts) == ["acc", "reward_model"]
    with pytest.raises(ValueError, match="3 samples but 1"):
        _add_judgements(results, [_Judgement(2.0)])


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 1e39, 3.4e38])
def test_a_reward_models_score_that_float32_cannot_hold_in_the_total_is_a_failure(score: float) -> None:
    (added,) = _add_judgements([RewardResult(3e38, {"acc": 3e38})], [_Judgement(score)])
    assert (added.total, added.state, added.parts) == (None, "failed", {"acc": 3e38})
    assert added.error.startswith(f"reward_model: its score {score:g}")


@pytest.mark.parametrize("reward", [1e39, 3e38, float("nan")])
def test_a_trajectorys_reward_that_float32_cannot_hold_in_the_total_is_a_failure(reward: float) -> None:
    scored = RewardResult(3e38, {"acc": 3e38})
    (added,) = add_trajectory_rewards([scored], [{"final_reward": reward}], which="both")
    assert added.total is None and added.state == "failed" and "finite numbers in float32" in added.error


def test_a_weighted_total_that_float32_cannot_hold_names_the_functions() -> None:
    batch = Batch([RewardSample()])
    for index in range(2):
        batch.settle((0, index), ({"ab"[index]: 3e38}, {}))
    assert batch.result(0, ["a", "b"], [0.1, 1.0], SETTINGS).total == pytest.approx(3.3e38)
    failed = batch.result(0, ["a", "b"], [1.0, 1.0], SETTINGS)
    assert (failed.total, failed.state) == (None, "failed")
    assert failed.error == "a and b: the weighted total 6e+38 is not a finite number in float32"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reward_timeout_s", 0),
        ("num_reward_workers", 0),
        ("reward_memory_gib", -1.0),
        ("reward_failure_policy", "ignore"),
        ("reward_failure_limit", 1.5),
        ("max_tokens", 0),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"rl_config.{key} is '?{value}"):
        RewardSettings(**{key: value})
