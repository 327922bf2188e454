"""The loss that a run file asks for, and its formula with the numbers filled in."""

from __future__ import annotations

from typing import Any

import pytest
from sample_runs import prompt_level

from mindspeed_rl.config import build_run_config
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.formula import formula


@pytest.mark.parametrize(
    ("stage", "rl", "expected"),
    [
        ("ray_grpo", {}, ("clip", "token", "token_mean")),
        ("ray_ppo", {}, ("clip", "token", "token_mean")),
        ("ray_dapo", {}, ("clip", "token", "token_mean")),
        ("ray_dapo", {"token_level_loss": False}, ("clip", "token", "sequence_mean")),
        ("ray_grpo", {"token_level_loss": False}, ("clip", "token", "token_mean")),
        ("ray_grpo", {"loss_type": "grpo"}, ("clip", "token", "sequence_mean")),
        ("ray_grpo", {"loss_type": "bnpo"}, ("clip", "token", "token_mean")),
        ("ray_grpo", {"loss_type": "dapo"}, ("clip", "token", "token_mean")),
        ("ray_grpo", {"loss_type": "dr_grpo"}, ("clip", "token", "constant_length")),
        ("ray_grpo", {"loss_type": "gspo"}, ("clip", "sequence", "sequence_mean")),
        (
            "ray_grpo",
            {"loss_type": "gspo", "importance_sampling_level": "sequence_token"},
            ("clip", "sequence_token", "sequence_mean"),
        ),
        ("ray_grpo", {"loss_type": "cispo"}, ("cispo", "token", "token_mean")),
        ("ray_grpo", {"loss_type": "cispo_cap"}, ("cispo_cap", "token", "token_mean")),
        ("ray_grpo", {"loss_type": "sapo"}, ("sapo", "token", "sequence_mean")),
    ],
)
def test_stage_and_loss_type_decide_the_form(stage: str, rl: dict[str, Any], expected: tuple[str, str, str]) -> None:
    objective = prompt_level(megatron_training={"stage": stage}, rl_config=rl).objective
    form = objective.loss.target.partition(":")[2]
    means = {"token": "token_mean", "sequence": "sequence_mean", "constant": "constant_length"}
    assert (form, objective.level, means[objective.normalizer]) == expected


@pytest.mark.parametrize(
    ("stage", "rl", "in_loss", "in_reward"),
    [
        ("ray_grpo", {}, 0.01, 0.0),
        ("ray_grpo", {"use_kl_in_reward": True}, 0.0, 0.01),
        ("ray_dapo", {}, 0.0, 0.0),
        ("ray_ppo", {}, 0.0, 0.0),
        ("ray_ppo", {"use_kl_in_reward": True, "init_kl_coef": 0.2}, 0.0, 0.2),
        ("ray_grpo", {"init_kl_coef": 0}, 0.0, 0.0),
    ],
)
def test_stage_decides_where_the_kl_goes(stage: str, rl: dict[str, Any], in_loss: float, in_reward: float) -> None:
    objective = prompt_level(megatron_training={"stage": stage}, rl_config=rl).objective
    assert (objective.kl_in_loss, objective.kl_in_reward) == (in_loss, in_reward)
    assert objective.needs_ref == bool(in_loss or in_reward)


def test_clip_higher_replaces_the_symmetric_clip() -> None:
    objective = prompt_level(rl_config={"clip_higher_enable": True, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}).objective
    assert (objective.clip_ratio_low, objective.clip_ratio_high) == (0.2, 0.28)


@pytest.mark.parametrize(
    ("rl", "parts"),
    [
        ({}, ["clip(r, 0.8, 1.2)", "mean_8", "0.01 * aggregate(KL)"]),
        ({"entropy_coeff": 0.003}, ["- 0.003 * aggregate(entropy)"]),
        ({"clip_higher_enable": True, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}, ["clip(r, 0.8, 1.28)"]),
        ({"loss_type": "sapo"}, ["tau = 1 if A > 0 else 1.05"]),
        ({"loss_type": "dr_grpo", "scale_rewards": "none"}, ["/ (sequences x 2048)", "A = r - mean_8(r)"]),
        ({"adv_estimator": "rloo"}, ["other 7 samples"]),
        ({"clip_ratio_c": 3.0}, ["at most -3 * A where A < 0"]),
        ({"delta": 4.0}, ["min(r, 4)"]),
        ({"rollout_importance_sampling_mode": "token_truncate"}, ["token_truncate(pi_old / pi_rollout)"]),
        ({"use_kl_in_reward": True, "kl_penalty": "kl"}, ["r_t - 0.01 * KL_t", "log pi - log pi_ref"]),
        ({"kl_ctrl_type": "adaptive"}, ["adaptive towards 0.1 a token over 1000 samples"]),
        ({"top_entropy_quantile": 0.2}, ["20% of tokens"]),
        ({"adv_epsilon": 1e-4}, ["0.0001"]),
    ],
)
def test_the_formula_carries_the_runs_numbers(rl: dict[str, Any], parts: list[str]) -> None:
    text = formula(prompt_level(rl_config=rl))
    for part in parts:
        assert part in text


_BALANCED = {"num_experts": 8, "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001}


@pytest.mark.parametrize(
    ("keys", "terms", "mean"),
    [
        (_BALANCED, "aggregate(L) + 0.01 * aggregate(KL) + 0.01 * B + 0.001 * Z", "8 sum_e f_e P_e, mean over micro-batches"),
        ({**_BALANCED, "seq_aux": True}, "+ 0.01 * B + 0.001 * Z", "8 sum_e f_e P_e, mean over sequences"),
        (
            {**_BALANCED, "moe_router_load_balancing_type": "none"},
            "+ 0.01 * aggregate(KL) + 0.001 * Z",
            "(log sum_e exp(logit_e))^2",
        ),
        ({**_BALANCED, "stage": "sft"}, "-log pi(token) + 0.01 * B + 0.001 * Z", "B = sum over layers with experts of 8 sum_e"),
        ({**_BALANCED, "num_experts": None}, "aggregate(L) + 0.01 * aggregate(KL)", "loss"),
        ({"dsa_indexer_loss_coeff": 0.02}, "+ 0.01 * aggregate(KL) + 0.02 * I", "gradient only to the indexers"),
        ({"mtp_num_layers": 1}, "+ 0.01 * aggregate(KL) + 0.1 * M", "gradient to only these layers"),
        ({"mtp_num_layers": 2, "stage": "sft"}, "-log pi(token) + 0.1 * M", "mean over 2 prediction layer(s)"),
    ],
)
def test_losses_of_routers_and_prediction_layers_are_terms_of_the_loss(keys: dict[str, Any], terms: str, mean: str) -> None:
    lines = formula(prompt_level(megatron_training=keys)).splitlines()
    assert any(line.endswith(terms) for line in lines) and any(mean in line for line in lines)


@pytest.mark.parametrize(
    ("sampling", "line"),
    [
        ({"temperature": 0.6}, "softmax(logits / 0.6) over all tokens, in rollout engine and trainer"),
        ({"temperature": 0.0}, "softmax(logits) over all tokens, in rollout engine and trainer"),
        (
            {"temperature": 0.6, "top_k": 20, "min_p": 0.01},
            "softmax(logits / 0.6) over all tokens, in rollout engine and trainer; top_k 20 and min_p 0.01 limit what is "
            "sampled, not pi",
        ),
    ],
)
def test_the_first_line_says_of_which_distribution_log_probs_are(sampling: dict[str, Any], line: str) -> None:
    text = formula(prompt_level(generate_config={"sampling_config": {"max_tokens": 8, **sampling}}))
    assert text.splitlines()[0].split(maxsplit=1) == ["pi", line]


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"stage": "sft"}, ["-log pi(token)"]),
        (
            {"stage": "dpo", "dpo_beta": 0.2, "dpo_label_smoothing": 0.1},
            ["-0.9 * log sigmoid(0.2 z) - 0.1 * log sigmoid(-0.2 z)"],
        ),
        ({"stage": "dpo", "dpo_loss_type": "ipo", "dpo_beta": 0.1, "pref_ftx": 0.5}, ["(z - 5)^2", "0.5 * (-log pi(chosen))"]),
        ({"stage": "simpo"}, ["m = 2.5 *", "- 3.5"]),
        ({"stage": "orm"}, ["score(chosen) - score(rejected)"]),
        ({"stage": "prm"}, ["placeholder"]),
    ],
)
def test_supervised_stages_have_formulas_too(keys: dict[str, Any], parts: list[str]) -> None:
    text = formula(draft(build_run_config({"megatron_training": {**keys, "global_batch_size": 4}})))
    for part in parts:
        assert part in text
