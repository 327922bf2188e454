"""Groups are replaced where their advantages are 0; missing scores are not zeros, in filters, baselines and evaluations."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rl.algorithms.advantages import compute_advantages
from mindspeed_rl.algorithms.interfaces import AdvantageInputs
from mindspeed_rl.config import RLConfig
from mindspeed_rl.dataplane.columns import Batch, pack, ragged
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rewards.totals import list_components, read_part_weights
from mindspeed_rl.rollout.requests import EvaluationSampling
from mindspeed_rl.run.objective import build_objective
from mindspeed_rl.trainers.evaluation import EvaluationSet, Evaluator, GreedyBaselines
from mindspeed_rl.trainers.model_rewards import ModelRewards, reward_totals
from mindspeed_rl.trainers.rollout import GroupFilter

_NONE = math.nan
#: scores of two functions, NaN for none; groups of three
_SCORES = [
    *[(2.0, 0.0), (0.0, 1.0), (1.0, 0.5)],  # with weights 1 and 2 equal totals; with equal ones they cancel when normalized
    *[(1.0, 2.0), (1.0, 2.0), (1.0, 2.0)],  # all equal
    *[(1.0, 0.0), (1.0, _NONE), (1.0, 0.0)],  # equal opinions, of which one is missing
    *[(0.0, 1.0), (0.0, _NONE), (0.0, 3.0)],  # only the second function differs
]


def _rl(weight: float = 1.0, **keys: Any) -> RLConfig:
    return RLConfig(verifier_function=["a", "b"], verifier_weight=[1.0, weight], dynamic_sample=True, init_kl_coef=0.0, **keys)


def _results(weight: float) -> list[RewardResult]:
    results = []
    for scores in _SCORES:
        parts = {name: score for name, score in zip("ab", scores) if not math.isnan(score)}
        results.append(RewardResult(parts.get("a", 0.0) + weight * parts.get("b", 0.0), parts))
    return results


def _batch(results: list[RewardResult]) -> Batch:
    return {
        "rewards": pack(torch.tensor(reward_totals(results))),
        "reward_results": pack(results),
        "index": pack(torch.arange(len(results))),
    }


@pytest.mark.parametrize("weight", [1.0, 2.0])
@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "reinforce_plus_plus_baseline", "gdpo"])
def test_a_group_is_dropped_where_all_its_advantages_are_zero(estimator: str, weight: float) -> None:
    rl, results = _rl(weight, adv_estimator=estimator, advantage_whiten=False), _results(weight)
    objective = build_objective(rl, "ray_grpo", group_size=3)
    group_filter = GroupFilter.from_config(rl, 3, objective, read_part_weights(rl))
    assert group_filter is not None
    good, others = group_filter.split(_batch(results))
    kept = {int(index) // 3 for index in ragged(good["index"]).tensor()}
    assert kept | {int(index) // 3 for index in ragged(others["index"]).tensor()} == {0, 1, 2, 3}
    weights, components = list_components(read_part_weights(rl), results)
    inputs = AdvantageInputs(
        torch.tensor(reward_totals(results)),
        torch.ones(12, 1, dtype=torch.bool),
        group_size=3,
        reward_components=torch.tensor(components),
        reward_weights=weights,
    )
    advantages, _, _ = compute_advantages(inputs, objective)
    assert kept == set((advantages.view(4, 3).abs().amax(1) > 1e-5).nonzero().flatten().tolist())
    assert kept == ({0, 3} if (estimator == "gdpo") == (weight == 2.0) else {3})


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "remax", "gae"])
def test_no_group_is_dropped_whose_equal_rewards_have_advantages(estimator: str) -> None:
    rl = _rl(adv_estimator=estimator)
    assert GroupFilter.from_config(rl, 3, build_objective(rl, "ray_ppo", group_size=3), {}) is None


def test_missing_scores_are_no_zeros_unless_the_policy_says_so() -> None:
    results = [
        RewardResult(1.0, {"a": 1.0}),
        RewardResult(None, {"a": 1.0}, "failed", "b: broken"),
        RewardResult(0.0, {"a": 1.0}, "failed", "b: broken"),  # reward_failure_policy zero
        RewardResult(2.5, {"a": 0.0, "b": 1.0, "reward_model": 3.0}),
    ]
    weights, scores = list_components(read_part_weights(_rl(reward_model_weight=0.5)), results)
    assert weights == (1.0, 1.0, 0.5)
    expected = [[1.0, _NONE, _NONE], [1.0, _NONE, _NONE], [1.0, 0.0, 0.0], [0.0, 1.0, 3.0]]
    torch.testing.assert_close(torch.tensor(scores), torch.tensor(expected), equal_nan=True)


def _scored(results: list[RewardResult], monkeypatch: pytest.MonkeyPatch) -> Evaluator:
    evaluator = Evaluator.__new__(Evaluator)
    evaluator._sets, evaluator._sampling = [EvaluationSet("eval", [{}] * len(results))], EvaluationSampling()
    evaluator._rewards, evaluator._read_sample = SimpleNamespace(accuracies={"a"}), lambda *_: None
    evaluator._model_rewards = ModelRewards(None, None, weight=0.0, timeout_s=1.0, part_weights={"a": 1.0, "b": 1.0})
    monkeypatch.setattr(Evaluator, "generate", lambda *_: [SimpleNamespace(token_ids=[1])] * len(results))
    monkeypatch.setattr(Evaluator, "score_trajectories", lambda *_: results)
    return evaluator


def test_an_evaluation_is_the_mean_of_what_was_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [
        RewardResult(1.0, {"a": 1.0}),
        RewardResult(0.0, {"a": 0.0}),
        RewardResult(None, {}, "timeout", "slow"),
        RewardResult(None, {}, "skipped"),
        RewardResult(0.0, {}, "failed", "broken"),  # reward_failure_policy zero
    ]
    evaluator = _scored(results, monkeypatch)
    metrics = evaluator.run()
    result = metrics.results()
    assert result["eval/accuracy"] == result["eval/reward"] == pytest.approx(1 / 3)
    assert result["eval/unscored"] == 2
    assert evaluator.describe(metrics) == "held-out accuracy 33.3% on 5 prompts (greedy, 2 without a score)"


def test_an_evaluation_without_any_score_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = _scored([RewardResult(None, {}, "skipped")], monkeypatch)
    assert evaluator.describe(evaluator.run()) == "held-out responses have no score on 1 prompts (greedy, 1 without a score)"


def test_a_greedy_response_without_a_score_has_no_baseline() -> None:
    baselines = GreedyBaselines.__new__(GreedyBaselines)
    baselines._plan = SimpleNamespace(n_samples_per_prompt=2)
    baselines._model_rewards = ModelRewards(None, None, weight=0.0, timeout_s=1.0)
    baselines._items, baselines._responses = [None] * 3, [[]] * 3
    failed = RewardResult(None, {}, "timeout", "30 s")
    baselines._results = [RewardResult(-1.0), failed, RewardResult(0.0, {}, "failed", "reward_failure_policy zero")]
    torch.testing.assert_close(baselines.rewards(), torch.tensor([-1.0, -1.0, _NONE, _NONE, 0.0, 0.0]), equal_nan=True)
