"""Timing metrics from stamps of several workers, and the trace made of them."""

import json

import pytest

from mindspeed_rl.observability.timers import Interval, Timeline, Timers, compute_timings
from mindspeed_rl.trainers.rollout_logger import _compute_throughput


def test_a_timer_stamps_start_and_end_also_when_the_block_fails():
    stamps = iter([10.0, 12.5, 13.0, 14.0])
    timers = Timers("rank 1", clock=lambda: next(stamps))
    with timers("rollout"):
        pass
    with pytest.raises(KeyError), timers("update"):
        raise KeyError
    assert timers.drain() == [Interval("rollout", 10.0, 12.5, "rank 1"), Interval("update", 13.0, 14.0, "rank 1")]
    assert timers.drain() == []


def test_a_phase_lasts_from_the_first_start_to_the_last_end():
    intervals = [Interval("rollout", 1.0, 4.0, "rank 0"), Interval("rollout", 2.0, 6.5, "rank 1")]
    assert compute_timings(intervals) == {"timing/rollout": 5.5}


def test_resharding_counts_the_slowest_worker():
    intervals = [
        Interval("resharding_to_infer", 0.0, 1.0, "rank 0"),
        Interval("resharding_to_infer", 5.0, 5.5, "rank 0"),
        Interval("resharding_to_infer", 3.0, 4.25, "rank 1"),
    ]
    assert compute_timings(intervals) == {"timing/resharding_to_infer": 1.5}


def test_non_overlap_is_what_sticks_out_behind_the_old_log_probs():
    intervals = [
        Interval("old_log_p", 0.0, 4.0),
        Interval("reference_model", 1.0, 6.0),  # sticks out by 2
        Interval("rule_reward", 0.0, 3.0),  # hidden
        Interval("reward_model", 5.0, 5.5),  # wholly behind
    ]
    timing = compute_timings(intervals)
    assert timing["timing/non_overlap_reference_model"] == 2.0
    assert timing["timing/non_overlap_rule_reward"] == 0.0
    assert timing["timing/non_overlap_reward_model"] == 0.5


def test_without_old_log_probs_the_reference_pass_is_the_fence():
    timing = compute_timings([Interval("reference_model", 0.0, 4.0), Interval("rule_reward", 3.0, 5.0)])
    assert timing["timing/non_overlap_rule_reward"] == 1.0
    assert timing["timing/non_overlap_reference_model"] == 4.0
    assert compute_timings([Interval("adv", 2.0, 2.5)])["timing/non_overlap_adv"] == 0.5


def test_a_wait_for_rewards_is_scoring_while_nothing_else_goes_on():
    scored = [Interval("rule_reward", 1.0, 4.0, "reward worker 0"), Interval("rule_reward", 3.0, 6.0, "reward worker 1")]
    around = Interval("all", 0.0, 10.0)
    assert compute_timings([*scored, around])["timing/reward_wait"] == 5.0
    # of seconds 1 to 6 a rollout and a pass take 1 to 2 and 5 to 6
    busy = [Interval("rollout", 0.0, 2.0, "device worker 0"), Interval("old_log_p", 5.0, 8.0, "device worker 1")]
    assert compute_timings([*scored, *busy, around])["timing/reward_wait"] == 3.0
    assert "timing/reward_wait" not in compute_timings(busy)


def test_throughput_is_tokens_a_second_and_device():
    timing = {"timing/all": 4.0, "timing/update": 2.0}
    assert _compute_throughput(timing, num_tokens=800, num_devices=2) == {"e2e_tps": 100.0, "update_tps": 200.0}


def test_the_trace_shows_each_phase_on_its_worker_in_microseconds(tmp_path):
    timeline = Timeline(tmp_path / "timeline.json")
    timeline.add(1, [Interval("update", 101.5, 102.0, "rank 1"), Interval("rollout", 100.0, 101.5, "rank 0")])
    timeline.add(2, [Interval("rollout", 103.0, 103.25, "rank 0")])
    timeline.close()
    events = json.loads((tmp_path / "timeline.json").read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    blocks = [(names[e["tid"]], e["name"], e["ts"], e["dur"], e["args"]["iteration"]) for e in events if e["ph"] == "X"]
    assert blocks == [
        ("rank 0", "rollout", 0.0, 1.5e6, 1),
        ("rank 1", "update", 1.5e6, 0.5e6, 1),
        ("rank 0", "rollout", 3e6, 0.25e6, 2),
    ]
