"""Ten thousand points become a few hundred without losing what they show."""

import math

from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.page import CHARTS, Chart, _build_curves, _select_metrics


def test_few_points_stay_as_they_are():
    result = _build_curves(
        History([{"iteration": 1, "a": 0.5}, {"iteration": 2, "a": None, "b": 7.0}, {"iteration": 3, "a": 1.5}])
    )
    assert result["a"].x == [1, 3] and result["a"].y == [0.5, 1.5] and result["a"].low == []
    assert result["b"].x == [2]


def test_a_spike_among_many_points_is_still_seen():
    records = [{"iteration": i + 1, "a": 100.0 if i == 4321 else 1.0} for i in range(10_000)]
    curve = _build_curves(History(records), max_points=500)["a"]
    assert len(curve.x) == 500 and curve.x[-1] == 10_000
    assert max(curve.high) == 100.0 and curve.low == [1.0] * 500
    # 20 values share a point: 19 ones and one hundred
    assert max(curve.y) == 5.95


def test_values_that_are_not_finite_are_left_out():
    assert _build_curves(History([{"iteration": 1, "a": math.nan}, {"iteration": 2, "a": math.inf}])) == {}


def test_a_chart_takes_its_metrics_in_its_own_order():
    chart = Chart("t", ("b", "x_*"), "s")
    assert _select_metrics(["x_2", "a", "x_1", "b"], chart) == ["b", "x_2", "x_1"]


def test_no_metric_stands_in_two_charts():
    names = ["grpo/score/mean", "eval/accuracy", "eval/reward", "actor/kl_loss", "rollout/kl", "timing/rollout"]
    names.append("memory/peak_gib")
    shown = [name for chart in CHARTS for name in _select_metrics(names, chart)]
    assert sorted(shown) == sorted(set(shown)) == sorted(names)
