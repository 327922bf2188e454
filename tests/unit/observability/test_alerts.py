"""What the figures of a run warn of, and what they do not."""

import json
import random
from pathlib import Path

import pytest

from mindspeed_rl.cli.train import needs_comparison
from mindspeed_rl.observability.alerts import LiveAlerts, _is_garbled, _is_repetitive, find_alerts
from mindspeed_rl.observability.history import History


def run(count, **metrics):
    """Records of `count` iterations; a metric is a function of the iteration's number or one value."""
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return [
        {"iteration": i + 1, **{name: value(i) if callable(value) else value for name, value in named.items()}}
        for i in range(count)
    ]


def kinds(records, completions=()):
    return {sign.kind for sign in find_alerts(History(records), completions)}


def healthy(count=100):
    noise = random.Random(0)
    return run(
        count,
        grpo__score__mean=lambda i: 0.2 + 0.6 * i / count + noise.uniform(-0.05, 0.05),
        rewards__groups_without_spread=lambda i: 0.3,
        rewards__failure_rate=0.0,
        judge__missing_rewards__mean=lambda i: 0.02 * (i % 2),
        rollout__log_probs_diff_mean=lambda i: noise.uniform(1e-3, 3e-3),
        rollout__truncated_fraction=0.05,
        response_length__mean=lambda i: 100 + i,
        actor__entropy=lambda i: 1.0 - 0.5 * i / count,
        actor__grad_norm=1.0,
        actor__pg_clipfrac=0.02,
    )


def test_a_healthy_run_has_no_warning():
    assert find_alerts(History(healthy())) == []


def test_no_iteration_is_no_warning():
    assert find_alerts(History()) == []


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("reward_flat", {"grpo/score/mean": lambda i: 0.4 + 0.01 * (-1) ** i}),
        ("reward_falls", {"grpo/score/mean": lambda i: 0.8 - 0.003 * i + 0.01 * (-1) ** i}),
        ("reward_zero", {"grpo/score/mean": lambda i: 0.0, "grpo/score/max": lambda i: 0.0, "grpo/score/min": lambda i: 0.0}),
        ("collapse", {"grpo/score/mean": lambda i: 0.6 if i < 50 else 0.1}),
        ("collapse", {"eval/accuracy": lambda i: 0.66 - 0.005 * i}),
        ("overfitting", {"eval/loss": lambda i: 1.0 + abs(i - 40) / 100}),
        ("gradient_spike", {"actor/grad_norm": lambda i: 80.0 if i == 98 else 1.0}),
        ("kl_far", {"actor/kl_loss": lambda i: 0.02 * i}),
        ("no_spread", {"rewards/groups_without_spread": lambda i: 1.0 if i > 90 else 0.2}),
        ("length_explosion", {"response_length/mean": lambda i: 100 * 1.03**i}),
        ("truncated", {"rollout/truncated_fraction": lambda i: 0.6 if i > 95 else 0.0}),
        ("mismatch", {"rollout/log_probs_diff_mean": lambda i: 0.3 if i == 60 else 0.002}),
        ("entropy_collapse", {"actor/entropy": lambda i: 1.0 * 0.9**i}),
        ("rewards_failing", {"rewards/failure_rate": lambda i: 0.2 if i > 90 else 0.0}),
        ("votes_missing", {"judge/missing_rewards/mean": lambda i: 1.0 if i > 90 else 0.0}),
        ("not_finite", {"actor/grad_norm": lambda i: None if i == 70 else 1.0}),
        ("clipped", {"actor/pg_clipfrac": lambda i: 0.5 if i > 80 else 0.0}),
    ],
)
def test_each_fault_gives_its_warning_and_no_other(kind, change):
    records = healthy()
    for index, record in enumerate(records):
        record.update({name: value(index) for name, value in change.items()})
    assert kinds(records) == {kind}


def advice(records):
    return {alert.kind: alert.advice for alert in find_alerts(History(records))}


def changed(**metrics):
    records = healthy()
    for index, record in enumerate(records):
        record.update({name.replace("__", "/"): value(index) for name, value in metrics.items()})
    return records


def test_a_collapse_is_never_answered_with_a_higher_learning_rate():
    collapse = changed(grpo__score__mean=lambda i: 0.66 if i < 40 else 0.2, actor__lr=lambda i: 1e-3)
    said = advice(collapse)
    assert set(said) == {"collapse"} and "lower actor_config.lr (0.001 here)" in said["collapse"]


def test_the_best_iteration_before_a_collapse_is_named():
    records = [{"iteration": i, "eval/accuracy": value} for i, value in ((0, 0.3), (10, 0.66), (20, 0.5), (30, 0.2))]
    (alert,) = find_alerts(History(records))
    assert alert.text == "The held-out score has fallen to 0.2, from 0.66 at iteration 10." and alert.severity == "bad"


def test_a_higher_learning_rate_is_proposed_only_where_the_policy_stands_still():
    still = {"grpo__score__mean": lambda i: 0.4 + 0.01 * (-1) ** i, "actor__pg_clipfrac": lambda i: 0.0}
    still["actor__lr"] = lambda i: 1e-7
    assert advice(changed(**still)) == {"reward_flat": "The policy hardly moves either: raise actor_config.lr (1e-07 here)."}
    moving = advice(changed(**still | {"actor__kl_loss": lambda i: 0.2}))
    assert "raise" not in moving["reward_flat"] and "tell them apart" in moving["reward_flat"]


def test_a_task_that_is_learnt_is_no_fault():
    learnt = changed(
        grpo__score__mean=lambda i: min(1.0, 0.2 + i / 50) - 0.01 * (i % 2),
        grpo__score__max=lambda i: 1.0,
        rewards__groups_without_spread=lambda i: 0.97 if i > 60 else 0.3,
        actor__entropy=lambda i: 0.9**i,
    )
    (alert,) = find_alerts(History(learnt))
    assert (alert.kind, alert.severity) == ("no_spread", "watch") and "the task is learnt" in alert.advice


def test_a_running_run_shows_each_kind_of_warning_once():
    lines = []
    live = LiveAlerts(History(), lines.append)
    live.on_start()
    for record in changed(rollout__truncated_fraction=lambda i: 0.6 if 20 < i < 30 or i > 40 else 0.0):
        live.on_figures(record["iteration"], {name: value for name, value in record.items() if name != "iteration"})
    live.close()
    (line,) = lines
    assert line.startswith("warning, iteration 24: 60% of the responses are cut at the limit of tokens. Raise")


def test_the_iteration_of_a_jump_is_named():
    records = healthy()
    records[60]["rollout/log_probs_diff_mean"] = 0.3
    (sign,) = find_alerts(History(records))
    assert sign.iteration == 61 and sign.severity == "bad"


def test_a_rollout_that_always_differs_a_little_is_no_jump():
    records = run(50, rollout__log_probs_diff_mean=lambda i: 0.06 + 0.01 * (i % 3))
    assert find_alerts(History(records)) == []


def test_text_that_repeats_or_is_garbled_is_seen():
    assert _is_repetitive("the same words again. " * 40)
    noise = random.Random(1)
    assert not _is_repetitive("".join(noise.choice("abcdefgh ij") for _ in range(800)))
    assert not _is_repetitive("yes yes yes")  # short answers may repeat
    assert _is_garbled("\ufffd\x00\x01" * 10 + "some text")
    assert not _is_garbled("一个普通的句子，里面没有乱码。It is fine.\nA new line, too: 3 + 4 = 7.")


def test_the_last_written_iteration_decides_about_its_text():
    def sample(iteration, text):
        return {"iteration": iteration, "response": text}

    loops = "I think so. " * 60
    assert kinds(healthy(5), [sample(1, loops), sample(2, "fine")]) == set()
    assert kinds(healthy(5), [sample(1, "fine"), sample(2, loops)]) == {"repeating"}


def _leak(name: str, values: list[float]) -> list[str]:
    history = History([{"iteration": index, name: value} for index, value in enumerate(values, 1)])
    return [alert.text for alert in find_alerts(history) if alert.kind == "memory_leak"]


def test_only_growth_that_goes_on_is_a_leak() -> None:
    # 240 MB a wake-up, as reported publicly
    (text,) = _leak("residue/sleep/engine_gib", [1.0 + 0.24 * index for index in range(20)])
    assert text.startswith("Memory does not come back (engine, after sleep): 4.08 GiB more than at iteration 3, 246 MiB")
    warm_up = [1.0, 3.0, 4.0, 4.5, 4.7, 4.8]
    assert _leak("residue/sleep/cache_gib", [*warm_up, *(4.85 + 0.001 * index for index in range(30))]) == []
    assert _leak("residue/sleep/cache_gib", [4.0 + index % 3 for index in range(40)]) == []
    assert _leak("residue/sleep/tensors_gib", [1.0 + 0.001 * index for index in range(40)]) == []  # 40 MiB in all
    assert _leak("residue/iteration/driver_gib", [1.0 + 0.24 * index for index in range(6)]) == []  # too early


def _depths(values: dict[str, float], start: float = 0.005) -> list[str]:
    records = [{"iteration": index, "mismatch/depth/0": start, **values} for index in range(1, 6)]
    return [alert.kind + ": " + alert.text for alert in find_alerts(History(records)) if "mismatch" in alert.kind]


def test_a_difference_that_grows_with_depth_is_named() -> None:
    # a published fault was 0.02 at 8K and 0.16 at 64K; sound runs stay below 0.011 at 64K
    (text,) = _depths({"mismatch/depth/4096": 0.02, "mismatch/depth/65536": 0.16})
    assert text == (
        "mismatch_depth: Trainer and rollout differ from token 65536 of a response on: log-probs by 0.16 in the mean, 0.005 in "
        "the first 16 tokens."
    )
    assert _depths({"mismatch/depth/65536": 0.011}) == []
    assert _depths({"mismatch/depth/65536": 0.16}, start=0.1) == []  # it differs everywhere: another alert's
    (text,) = _depths({"mismatch/after_tool": 0.5})
    assert text.startswith("mismatch_token: Trainer and rollout differ at the first token after a tool")
    # it is said while it is there, and stays in the report
    values = enumerate([0.1] * 4 + [0.0] * 9)
    records = [{"iteration": index, "mismatch/depth/0": 0.005, "mismatch/depth/64": value} for index, value in values]
    (alert,) = [alert for alert in find_alerts(History(records)) if alert.kind == "mismatch_depth"]
    assert alert.iteration == 3
    assert _depths({"mismatch/rare_token": 0.5}) == []  # rare tokens always differ more


def test_a_run_whose_tokens_differ_by_depth_is_compared_at_its_end(tmp_path: Path) -> None:
    for deep, needed in ((0.16, True), (0.006, False)):
        figures = {"mismatch/depth/0": 0.005, "mismatch/depth/4096": deep}
        lines = (json.dumps({"iteration": index, **figures}) + "\n" for index in range(1, 6))
        (tmp_path / "metrics.jsonl").write_text("".join(lines))
        assert needs_comparison(tmp_path) is needed
