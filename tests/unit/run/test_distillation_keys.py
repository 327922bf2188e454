"""Rules of rl_config.distillation, and the lines of the plan page about it."""

from __future__ import annotations

from typing import Any

import pytest
from sample_runs import prompt_level

from mindspeed_rl.run import Run
from mindspeed_rl.run.explain.effects import find_keys_without_effect
from mindspeed_rl.run.formula import formula
from mindspeed_rl.run.rules.validation import validate

ON: dict[str, Any] = {"enabled": True, "teacher_models": ["./teacher"]}
MIXED: dict[str, Any] = {"on_policy_fraction": 0.5, "loss_mode": "jsd_topk", "use_task_rewards": False}


def run_of(*, rl: dict[str, Any] | None = None, keep: tuple[str, ...] = (), **keys: Any) -> Run:
    shared = {"dataset_additional_keys": ["labels", *keep]}
    return prompt_level(megatron_training=shared, rl_config={"distillation": {**ON, **keys}, **(rl or {})})


def test_a_teacher_alone_is_sound_and_needs_no_reward_function() -> None:
    assert validate(run_of()) == []
    assert validate(run_of(use_task_rewards=False, rl={"rule_reward": False})) == []


@pytest.mark.parametrize(
    ("keys", "rl", "rule", "words"),
    [
        ({"teacher_models": []}, {}, "some_teacher", ["teacher_models ([])"]),
        ({"loss_mode": "k1"}, {}, "estimator_as_loss", ["loss_mode (k1)", "use_policy_gradient"]),
        ({"teacher_keys": ["a", "b"]}, {}, "one_for_each_teacher", ["each of the 1 teacher_models"]),
        ({"teacher_keys": ["a"]}, {}, "teacher_columns", ["teacher_key (data_source)", "dataset_additional_keys (labels)"]),
        ({"teacher_weights": [1.0, 2.0]}, {}, "one_for_each_teacher", ["teacher_weights"]),
        ({"teacher_weights": [0.0]}, {}, "some_weight", ["teacher_weights ([0.0])"]),
        ({"teacher_models": ["./a", "http://b/v1"]}, {}, "servers_alone", ["http://b/v1"]),
        ({"teacher_models": ["http://b/v1"], "teacher_temperature": 0.5}, {}, "server_temperature", ["(0.5)", "servers"]),
        ({"teacher_models": ["actor"]}, {}, "own_teacher", ["teacher_prompt"]),
        (
            {"teacher_models": ["actor"], "teacher_prompt": "hint"},
            {"teacher_resource": {"num_npus": 8}},
            "role_devices",
            ["actor"],
        ),
        ({"use_task_rewards": False}, {"dynamic_sample": True}, "filter_without_rewards", ["rl_config.dynamic_sample"]),
        ({"enabled": False}, {"teacher_resource": {"num_npus": 8}}, "teacher_without_distillation", ["teacher_resource"]),
        ({"beta": 1.5, "loss_mode": "jsd_topk"}, {}, "range", ["beta (1.5)"]),
        ({"on_policy_fraction": 1.5}, {}, "range", ["on_policy_fraction (1.5)"]),
        ({"on_policy_fraction": 0.5}, {}, "data_without_policy_loss", ["on_policy_fraction (0.5)", "use_task_rewards"]),
        (MIXED | {"loss_mode": "k2"}, {}, "data_without_samples", ["loss_mode (k2)", "at sampled ones"]),
        (MIXED, {"multi_turn_enable": True}, "data_responses", ["multi_turn_enable", "responses of the data"]),
        (MIXED, {"partial_rollout_max_split": 2}, "data_responses", ["partial_rollout_max_split (2)"]),
        (MIXED, {"router_replay": {"mode": "R3"}}, "data_responses", ["rl_config.router_replay.mode (R3)"]),
        (MIXED, {"old_log_probs": "rollout"}, "data_responses", ["old_log_probs (rollout)"]),
        (
            MIXED,
            {"rollout_importance_sampling_mode": "token_truncate"},
            "data_responses",
            ["rollout_importance_sampling_mode (token_truncate)"],
        ),
        (MIXED | {"response_column": "answer"}, {}, "response_column", ["response_column (answer)", "(labels)"]),
    ],
)
def test_a_broken_rule_names_its_key(keys: dict[str, Any], rl: dict[str, Any], rule: str, words: list[str]) -> None:
    results = {violation.rule: violation.message for violation in validate(run_of(rl=rl, **keys))}
    assert rule in results, results
    assert all(word in results[rule] for word in words), results[rule]


def test_the_plan_page_prints_the_term_and_its_place_in_the_loss() -> None:
    text = formula(run_of(loss_mode="jsd_topk", topk=16, topk_rest="lump", beta=0.25, distillation_loss_coef=0.5))
    assert "D = 0.25 KL(p || m) + 0.75 KL(q || m), m = 0.25 p + 0.75 q over the teacher's 16 most probable tokens" in text
    assert "the rest lumped into one token" in text
    assert "loss        aggregate(L) + 0.5 * aggregate(D)" in text
    assert "loss        1 * aggregate(D)" in formula(run_of(loss_mode="reverse_kl_topk", use_task_rewards=False))
    reward = formula(run_of(loss_mode="k1", use_policy_gradient=True))
    assert "A - 1 * D" in reward and "aggregate(D)" not in reward


def test_the_plan_page_says_whose_responses_train() -> None:
    assert validate(run_of(**MIXED)) == []
    text = formula(run_of(**MIXED, supervised_coef=0.1))
    assert "responses   of the student with probability 0.5 per iteration, else of the data" in text
    assert "loss        1 * aggregate(D) + 0.1 * aggregate(-log q(y)), y of the data" in text
    assert "of the data" not in formula(run_of(loss_mode="jsd_topk", use_task_rewards=False))
    unread = find_keys_without_effect(run_of(**{**MIXED, "on_policy_fraction": 1.0}, supervised_coef=0.1))
    assert unread["rl_config.distillation.supervised_coef"] == "on_policy_fraction is 1.0"


def test_a_key_of_another_loss_mode_is_said_to_have_no_effect() -> None:
    assert find_keys_without_effect(run_of(loss_mode="k3", topk=8))["rl_config.distillation.topk"] == "loss_mode is k3"
