"""An environment as a check of responses that exist: in a pool, as the reward that is attacked, and as the stricter check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import build_tokenizer
from test_reward_audit import HEDGE, LONG, ROWS, THOUGHT, attack, won

from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings
from mindspeed_rl.rollout.trajectory import Segment, TokenSequence, Trajectory
from mindspeed_rl.tools.environment_check import ENVIRONMENT_CHECK, TURNS, check_environment
from mindspeed_rl.workers.reward_group import SampleReader

Audit = Callable[..., tuple[int, Any]]
HERE = "environments_with_holes"
PLAYED = ["rl_config.multi_turn_enable=true", "rl_config.rule_reward=false"]


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def score(environment: str, texts: list[str], **columns: Any) -> list[tuple[float | None, str]]:
    settings = RewardSettings(environment=f"{HERE}:{environment}", reward_failure_limit=1.0, reward_timeout_s=2.0)
    with RewardPool([ENVIRONMENT_CHECK], settings=settings) as pool:
        results = pool.score([RewardSample(response=text, label="42", columns=dict(columns)) for text in texts])
    return [(result.total, result.state) for result in results]


def test_an_environment_scores_responses_that_exist() -> None:
    assert score("Exact", ["42", " 42\n", "42 or 43", ""]) == [(1.0, "ok"), (1.0, "ok"), (0.0, "ok"), (0.0, "ok")]
    assert score("Raises", ["42", "none"]) == [(1.0, "ok"), (None, "failed")]


def test_turns_are_played_in_their_order_and_rewards_added() -> None:
    # 4 then 2: both points; the other order: none; one turn only: what the first has earned
    assert score("Points", ["42"], **{TURNS: ["4", "2"]}) == [(2.0, "ok")]
    assert score("Points", ["42"], **{TURNS: ["2", "4"]}) == [(0.0, "ok")]
    assert score("Points", ["4"]) == [(1.0, "ok")]


def test_the_turns_of_a_trajectory_are_read_without_what_others_wrote() -> None:
    tokenizer = build_tokenizer()

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    def sampled(text: str) -> Segment:
        ids = encode(text)
        return Segment(ids, (0.0,) * len(ids), (1,) * len(ids), sampled=True)

    context = Segment.from_context(encode("Next digit?"))
    sequence = TokenSequence(encode("q"), (sampled("<think>4</think>4<|im_end|>"), context, sampled("2")))
    trajectory = Trajectory((sequence,), "stop", turn_rewards=(0.0, 1.0), metrics={"turns": 2.0})
    item: Any = {"prompt_ids": list(encode("q")), "label": "42", "columns": {"level": 3}}
    sample = SampleReader(tokenizer, "last_turn", 100).read_with_turns(item, trajectory)
    assert sample.columns[TURNS] == ["<think>4</think>4", "2"] and sample.columns["level"] == 3 and sample.response == "2"


def test_what_cannot_judge_a_response_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"audit\.environment: verifiers:wordle plays samples itself"):
        check_environment("verifiers:wordle", "audit.environment")
    with pytest.raises(ValueError, match="has several roles, and a response to check has one"):
        check_environment(f"{HERE}:Two")
    with pytest.raises(ValueError, match="there is no file"):
        check_environment(str(tmp_path / "none.yaml"))
    with pytest.raises(ValueError, match="no_such"):
        RewardPool([ENVIRONMENT_CHECK], settings=RewardSettings(environment="no_such:Class"))


def test_the_rewards_of_a_lenient_environment_are_attacked_and_its_twin_passes(audit: Audit) -> None:
    keys = [*PLAYED, LONG, "--rows=1"]
    code, found = audit("reward", ROWS, f"rl_config.environment={HERE}:Lenient", *keys)
    assert code == 1 and found["functions"] == ["the environment"] and {HEDGE, THOUGHT} <= won(found)
    code, found = audit("reward", ROWS, f"rl_config.environment={HERE}:Exact", *keys)
    assert (code, won(found), found["honest"]["reward"]) == (0, set(), 1.0)


def test_an_environment_of_several_roles_is_named_as_not_audited(audit: Audit) -> None:
    keys = ["rl_config.multi_turn_enable=true", f"rl_config.environment={HERE}:Two", "--rows=1"]
    code, found = audit("reward", ROWS, "rl_config.verifier_function=[exact_match]", *keys)
    assert code == 0 and found["functions"] == ["exact_match"] and "has several roles" in found["not_audited"][0]
    code, text = audit("reward", ROWS, "rl_config.rule_reward=false", *keys)
    assert code == 2 and "no reward function of this run can be audited here" in text and "has several roles" in text


def test_a_text_that_fits_every_turn_is_a_cheat_of_an_environment_of_several(audit: Audit) -> None:
    code, found = audit("reward", ROWS, f"rl_config.environment={HERE}:Points", *PLAYED, LONG, "--rows=1")
    assert code == 1 and "all numbers up to 100" in won(found)
    assert found["cheats"]["all numbers up to 100"]["example"][2] == 2.0


def test_the_check_of_the_group_audit_decides_what_cheats(audit: Audit) -> None:
    # without an answer as label the exact comparison knows nothing: the hidden check tells
    tests = [{"prompt": f"Write add_{n}(x).", "labels": f"assert add_{n}(1) == {n + 1}"} for n in range(4)]
    assert attack(audit, "runs", rows=tests)[0] == 1
    assert attack(audit, "runs", "audit.verifier_function=[runs]", rows=tests)[0] == 0
    # a check that pays for nothing clears nothing
    code, found = attack(audit, "anywhere", f"audit.environment={HERE}:Exact")
    assert code == 1 and HEDGE in won(found)


def test_rows_whose_label_is_no_answer_are_not_flat(audit: Audit) -> None:
    tests = [{"prompt": f"Write add_{n}(x).", "labels": f'{{"inputs": ["{n}"], "outputs": ["{n}"]}}'} for n in range(2)]
    code, found = attack(audit, "only_box", "--rows=2", rows=tests)
    assert code == 0 and any("no label is one" in text for text in found["not_audited"])


def test_an_environment_that_hangs_ends_after_the_first_row(audit: Audit) -> None:
    keys = [*PLAYED, LONG, "--rows=1", "rl_config.reward_timeout_s=0.5"]
    code, text = audit("reward", ROWS, f"rl_config.environment={HERE}:Hangs", *keys)
    assert code == 2 and "score no response to the first row" in text
