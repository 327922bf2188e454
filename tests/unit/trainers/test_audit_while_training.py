"""A stricter check beside the reward: the gap is drawn, and an alert comes where they part and nowhere else."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rl.config import RLConfig, build_run_config
from mindspeed_rl.config.keys.audit import AuditKeys
from mindspeed_rl.observability.alerts import find_alerts
from mindspeed_rl.observability.history import History
from mindspeed_rl.rewards.judge_addresses import list_judges
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.samples import RewardResult, RewardSample, RewardSettings, select_reward_functions
from mindspeed_rl.rewards.totals import read_part_weights
from mindspeed_rl.run.audit_rewards import derive_audit_rewards, derive_audit_settings
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import validate
from mindspeed_rl.tools.environment_check import ENVIRONMENT_CHECK
from mindspeed_rl.trainers.reward_audit import RewardAuditor, _Shares

KEYS = AuditKeys(verifier_function=["exact_match"], interval=5, samples=2)


class Responses:
    """Responses of a policy, which the lenient reward scores: any number of the answer counts."""

    def __init__(self, texts: list[str], pool: RewardPool) -> None:
        self.texts, self._pool = texts, pool

    def generate(self, items: list[dict[str, Any]], sampling: object) -> list[str]:
        return self.texts

    def score_trajectories(self, items: list[dict[str, Any]], texts: list[str]) -> list[Any]:
        return self._pool.score([read_sample(item, text) for item, text in zip(items, texts)])


def read_sample(item: dict[str, Any], text: Any) -> RewardSample:
    return RewardSample(prompt="p", response=text, label=item["label"])


def run_of(folder: Path, audit: AuditKeys = KEYS) -> Any:
    rl = RLConfig(verifier_function=["gsm8k_flexible"], verifier_weight=[2.0])
    return SimpleNamespace(
        config=SimpleNamespace(audit=audit), rl=rl, folder=folder, plan=SimpleNamespace(train_iters=12),
        deadlines=SimpleNamespace(seconds={"rewards": 60.0}),
    )  # fmt: skip


ITEMS = [{"prompt_ids": [1], "label": str(number), "columns": {}} for number in range(10, 26)]


def test_the_gap_of_a_tricked_reward_is_drawn_recorded_and_found(tmp_path: Path) -> None:
    honest = [item["label"] for item in ITEMS[:4]] + ["no idea"] * 12
    hedged = [f"I think {item['label']}" for item in ITEMS]
    settings = RewardSettings(max_tokens=8)
    with (
        RewardPool(["gsm8k_flexible"], [2.0], settings=settings) as earned,
        RewardPool(["exact_match"], settings=settings) as strict,
    ):
        policy = Responses(honest, earned)
        auditor = RewardAuditor(run_of(tmp_path), ITEMS, strict, policy, read_sample)
        assert [step for step in range(13) if auditor.is_due(step)] == [0, 5, 10, 12]
        before = auditor.run(0).results()
        policy.texts = hedged
        after = auditor.run(5).results()
    # 4 of 16 right by both; then all earn 2 of 2, and no answer is exact
    assert (before["audit/earned"], before["audit/audited"], before["audit/gap"]) == (0.25, 0.25, 0.0)
    assert (after["audit/earned"], after["audit/audited"], after["audit/gap"]) == (1.0, 0.0, 1.0)
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 0, 5, 5] and lines[-1]["response"].startswith("I think 1")
    (alert,) = find_alerts(History([{"iteration": 0, **before}, {"iteration": 5, **after}]))
    assert (alert.kind, alert.severity, alert.iteration) == ("reward_tricked", "bad", 5)
    assert "from 0.25 to 1.00" in alert.text and "from 0.25 to 0.00" in alert.text


def measure(rl: RLConfig, full_score: float | None, *results: tuple[float | None, dict[str, float]]) -> list[float | None]:
    shares = _Shares("the reward", "audit.full_score", read_part_weights(rl), full_score)
    return shares.measure([RewardResult(total, parts) for total, parts in results])


def test_earned_is_a_share_of_all_that_scores() -> None:
    """The full score is the sum of the positive weights: here 1 of acc, 0.5 of the environment or 3 of the judge."""
    functions = {"verifier_function": ["acc", "length"], "verifier_weight": [1.0, -0.2]}
    played = RLConfig(**functions, trajectory_reward_weight=0.5)
    right = {"acc": 1.0, "length": 0.5}
    # what the environment gives counts where it gives something
    assert measure(played, None, (0.9, right)) == pytest.approx([0.9])
    both = (1.4, {**right, "trajectory": 1.0}), (0.9, {**right, "trajectory": 0.0}), (None, {})
    assert measure(played, None, *both) == pytest.approx([1.4 / 1.5, 0.9 / 1.5, None])
    served = RLConfig(**functions, judge_model="/models/judge", judge_weight=3.0)
    assert measure(served, None, (2.4, {**right, "judge": 0.5})) == pytest.approx([0.6])
    # scores of a reward model have no largest value but the one of the run file
    scored = RLConfig(**functions, reward_model="/models/reward")
    assert measure(scored, 8.0, (6.0, {**right, "reward_model": 5.1}), (-2.0, {})) == pytest.approx([0.75, -0.25])


def test_more_than_the_full_score_is_a_share_of_1_and_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    shares = _Shares("the reward", "audit.full_score", {"acc": 1.0, "trajectory": 1.0})
    points = [RewardResult(7.0, {"acc": 1.0, "trajectory": 6.0}), RewardResult(1.0, {"acc": 1.0, "trajectory": 0.0})]
    assert shares.measure(points) == [1.0, 0.5] == shares.measure(points)
    (line,) = caplog.messages
    assert "7 of the reward" in line and "full score 2" in line and "audit.full_score" in line


def audits(earned: list[float], audited: list[float], num_rows: int = 64) -> History:
    """Audits of rows that are right or wrong by chance, with the figures that an audit has."""
    draws, lines = random.Random(1), []
    for step, (ours, theirs) in enumerate(zip(earned, audited)):
        pairs = [(float(draws.random() < ours), float(draws.random() < theirs)) for _ in range(num_rows)]
        gaps = [a - b for a, b in pairs]
        mean = sum(gaps) / num_rows
        error = (sum((gap - mean) ** 2 for gap in gaps) / (num_rows - 1) / num_rows) ** 0.5
        figures = {"audit/earned": sum(a for a, _ in pairs) / num_rows, "audit/audited": sum(b for _, b in pairs) / num_rows}
        lines.append({"iteration": 10 * step, **figures, "audit/gap": mean, "audit/gap_error": error})
    return History(lines)


@pytest.mark.parametrize(
    ("earned", "audited"),
    [
        ([0.2, 0.4, 0.6, 0.8], [0.2, 0.4, 0.6, 0.8]),  # both rise
        ([0.9, 0.9, 0.9, 0.9], [0.3, 0.3, 0.3, 0.3]),  # a stricter check from the start
        ([0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]),  # nothing is learnt
        ([0.2, 0.5, 0.9, 0.9], [0.1, 0.4, 0.8, 0.9]),
    ],
)
def test_a_reward_that_its_check_follows_is_no_alarm(earned: list[float], audited: list[float]) -> None:
    assert find_alerts(audits(earned, audited)) == []


def test_the_alert_names_the_audit_at_which_they_part() -> None:
    (alert,) = find_alerts(audits([0.2, 0.3, 0.9, 0.95], [0.2, 0.3, 0.25, 0.1]))
    assert (alert.kind, alert.iteration) == ("reward_tricked", 20)


def test_the_check_has_its_own_functions_and_judge_and_no_penalty_of_the_run() -> None:
    rl = RLConfig(verifier_function=["acc"], judge_url="http://a/v1", overlong_buffer_enable=True, overlong_buffer=4)
    strict = derive_audit_rewards(rl, replace(KEYS, judge_url="http://b/v1"))
    assert select_reward_functions(strict) == (["exact_match", "judge"], [1.0, 1.0])
    assert strict.judge_url == "http://b/v1" and not strict.overlong_buffer_enable
    assert select_reward_functions(derive_audit_rewards(rl, KEYS))[0] == ["exact_match"]
    # the environment of the run trains; the audit has its own, or none
    played = RLConfig(multi_turn_enable=True, environment="mine:Game")
    assert derive_audit_rewards(played, KEYS).environment is None
    hidden = AuditKeys(environment="mine:Hidden", verifier_function=["acc"], verifier_weight=[3.0])
    strict = derive_audit_rewards(played, hidden)
    assert strict.environment == "mine:Hidden" and select_reward_functions(strict) == (["acc", ENVIRONMENT_CHECK], [3.0, 1.0])


@pytest.mark.parametrize(
    ("address", "keys", "expected"),
    [
        ("http://b/v1", {}, ""),
        ("http://b/v1", {"AUDIT_JUDGE_API_KEY": "audit"}, "audit"),
        ("http://a/v1", {}, "run"),
        ("http://a/v1", {"AUDIT_JUDGE_API_KEY": "audit"}, "audit"),
        ("https://a/v1", {}, ""),
    ],
)
def test_the_judge_of_the_check_gets_the_key_of_the_run_on_its_server_only(
    address: str, keys: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"JUDGE_API_KEY": "run", **keys}.items():
        monkeypatch.setenv(name, value)
    rl = RLConfig(verifier_function=["acc"], judge_url="http://a/v1")
    settings = derive_audit_settings(rl, replace(KEYS, judge_url=address), max_tokens=8)
    (judge,) = list_judges(settings.judge_url, None, key_variables=settings.judge_key_variables)
    assert judge.api_key == expected
    assert RewardSettings.from_message(asdict(settings)) == settings
    assert RewardSettings.from_config(rl, max_tokens=8).judge_key_variables == ("JUDGE_API_KEY",)


@pytest.mark.parametrize(
    ("audit", "training", "sentence"),
    [
        ({"verifier_function": ["acc"]}, {}, "set audit.data_path or eval_data_path"),
        ({"environment": "mine:Game"}, {}, "set audit.data_path or eval_data_path"),
        ({"verifier_function": ["acc"], "verifier_weight": [1, 2]}, {"eval_data_path": "x"}, "has 2 entries, but"),
        ({"verifier_function": ["acc"]}, {"stage": "sft"}, "supervised stages have none"),
        ({"intervall": 3}, {}, "interval"),
    ],
)
def test_an_audit_that_cannot_be_is_refused(audit: dict[str, Any], training: dict[str, Any], sentence: str) -> None:
    tree = {
        "megatron_training": {"stage": "ray_grpo", "global_batch_size": 8, "train_iters": 1, **training},
        "actor_config": {},
        "rl_config": {"n_samples_per_prompt": 8, "mini_batch_size": 8},
        "generate_config": {},
        "audit": audit,
    }
    try:
        found = "\n".join(map(str, validate(draft(build_run_config(tree)))))
    except ValueError as error:
        found = str(error)
    assert sentence in found


def test_a_reward_model_needs_the_full_score() -> None:
    tree = {
        "megatron_training": {"stage": "ray_grpo", "global_batch_size": 8, "train_iters": 1, "eval_data_path": "x"},
        "actor_config": {},
        "rl_config": {"n_samples_per_prompt": 8, "mini_batch_size": 8, "reward_model": "/models/reward"},
        "generate_config": {},
        "audit": {"verifier_function": ["acc"]},
    }
    rules = [{each.rule for each in validate(draft(build_run_config(tree | {"audit": audit})))} for audit in
             (tree["audit"], tree["audit"] | {"full_score": 4.0}, {})]  # fmt: skip
    assert ["audit_full_score" in found for found in rules] == [True, False, False]
