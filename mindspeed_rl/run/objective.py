"""The objective of a run, built from catalogue and run file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from mindspeed_rl.catalogue import ADVANTAGES, CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES, STAGES
from mindspeed_rl.catalogue.objective import TOP_K_KINDS, Distillation, Objective
from mindspeed_rl.catalogue.records import AdvantageEstimator, Algorithm, Correction, KlEstimator, PolicyLoss, find
from mindspeed_rl.config.keys.rl import DistillationKeys, RLConfig
from mindspeed_rl.config.run import RunConfig

_FAMILIES: tuple[tuple[dict[str, Any], type[Algorithm]], ...] = (
    (POLICY_LOSSES, PolicyLoss),
    (ADVANTAGES, AdvantageEstimator),
    (KL_ESTIMATORS, KlEstimator),
    (CORRECTIONS, Correction),
)


def _list_plugin_folders(rl: RLConfig) -> tuple[str, ...]:
    """Return the folders of plug-in modules in addition to sys.path: the working directory and the folders of plug-in files."""
    files = (Path(path).expanduser().resolve() for path in rl.external_plugins)
    # a console script has its folder on sys.path, not the working directory
    return tuple(dict.fromkeys((str(Path.cwd()), *(str(file.parent) for file in files))))


def named_estimator(rl: RLConfig) -> AdvantageEstimator:
    """Return the record that adv_estimator names, before another key may replace it."""
    return find(ADVANTAGES, AdvantageEstimator, rl.adv_estimator, _list_plugin_folders(rl))


def unusable_plugins(rl: RLConfig, stage: str) -> list[str]:
    """Return a sentence for each algorithm of the run file that does not exist, or whose formula cannot be filled in."""
    folders = _list_plugin_folders(rl)
    sentences, records = [], {}
    for table, kind in _FAMILIES:
        name = getattr(rl, kind.key)
        if name is None or name in table:
            continue
        try:
            records[kind] = find(table, kind, name, folders)
        except ValueError as error:
            sentences.append(str(error))
    # formulas are filled with the numbers of an objective, which needs every record
    if not sentences and records:
        numbers = build_objective(rl, stage).numbers()
        for kind, record in records.items():
            where = f"rl_config.{kind.key} is {getattr(rl, kind.key)!r}"
            named = {*(record.reads or ()), *record.bounds, *(choice.setting for choice in record.choices.values())}
            # a broken bound is reported by its key in rl_config, so there has to be one
            bounded = set(record.bounds) - {item.name for item in dataclasses.fields(rl)}
            if unknown := sorted((named - set(numbers)) | bounded):
                sentences.append(f"{where}: its record names {', '.join(unknown)}, no number of an objective")
                continue
            try:
                record.format_formula(numbers)
            except (KeyError, ValueError, TypeError) as error:
                sentences.append(f"{where}: its formula cannot be filled: {type(error).__name__} {error}")
    return sentences


def build_objective(
    rl: RLConfig, stage: str, *, max_response_length: int | None = None, group_size: int | None = None
) -> Objective:
    """Return the objective of a group rl_config, sound or not: rules read it too.

    Args:
        stage: a key of `catalogue.STAGES`.
        max_response_length: maximum tokens that the rollout may sample for a response.
        group_size: responses of a prompt; default n_samples_per_prompt.

    Raises:
        ValueError: a stage without a reinforcement learning objective, an unknown algorithm or an unusable plug-in.
    """
    if stage not in STAGES:
        raise ValueError(f"stage {stage} has no reinforcement learning objective; {', '.join(STAGES)} have one")
    rule, folders = STAGES[stage], _list_plugin_folders(rl)
    loss_type = rl.loss_type
    if loss_type is None:
        # in a stage without a second loss token_level_loss does nothing
        loss_type = rule.loss_type if rl.token_level_loss else rule.sequence_loss_type or rule.loss_type
    loss = find(POLICY_LOSSES, PolicyLoss, loss_type, folders)
    adv_estimator, advantage = rl.adv_estimator, named_estimator(rl)
    if advantage.instead is not None and getattr(rl, advantage.instead[0]) == advantage.instead[1]:
        # ms-swift selects GDPO by scale_rewards
        adv_estimator = advantage.instead[2]
        advantage = ADVANTAGES[adv_estimator]
    mode = rl.rollout_importance_sampling_mode
    low, high = (rl.clip_ratio_low, rl.clip_ratio_high) if rl.clip_higher_enable else (rl.clip_ratio, rl.clip_ratio)
    kl_place: Literal["loss", "reward"] | None = "reward" if rl.use_kl_in_reward else "loss" if rule.kl_in_loss else None
    return Objective(
        loss_type=loss_type,
        loss=loss,
        level=rl.importance_sampling_level or loss.level,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=rl.clip_ratio_c,
        delta=rl.delta,
        tau_pos=rl.tau_pos,
        tau_neg=rl.tau_neg,
        vespo_k_pos=rl.vespo_k_pos,
        vespo_lambda_pos=rl.vespo_lambda_pos,
        vespo_k_neg=rl.vespo_k_neg,
        vespo_lambda_neg=rl.vespo_lambda_neg,
        fipo_decay_rate=rl.fipo_decay_rate,
        fipo_clip_range=rl.fipo_clip_range,
        fipo_clip_high_only=rl.fipo_clip_high_only,
        fipo_safety_threshold=rl.fipo_safety_threshold,
        dro_beta=rl.dro_beta,
        clip_cov_ratio=rl.clip_cov_ratio,
        clip_cov_lb=rl.clip_cov_lb,
        clip_cov_ub=rl.clip_cov_ub,
        kl_cov_ratio=rl.kl_cov_ratio,
        ppo_kl_coef=rl.ppo_kl_coef,
        real_tau=rl.real_tau,
        online_dpo_beta=rl.online_dpo_beta,
        online_dpo_loss_type=rl.online_dpo_loss_type,
        max_response_length=max_response_length,
        entropy_coeff=rl.entropy_coeff,
        top_entropy_quantile=rl.top_entropy_quantile,
        off_policy_sequence_mask_delta=rl.off_policy_sequence_mask_delta,
        overlong_filter=rl.overlong_filter,
        adv_estimator=adv_estimator,
        advantage=advantage,
        group_size=rl.n_samples_per_prompt if group_size is None else group_size,
        scale_rewards=rl.scale_rewards,
        adv_epsilon=rl.adv_epsilon,
        gamma=rl.gamma,
        lam=rl.lam,
        advantage_whiten=rl.advantage_whiten,
        cliprange_value=rl.cliprange_value,
        kl_penalty=rl.kl_penalty,
        kl=find(KL_ESTIMATORS, KlEstimator, rl.kl_penalty, folders),
        kl_coef=rl.init_kl_coef,
        # with a coefficient of 0 no reference model is built
        kl_place=kl_place if rl.init_kl_coef else None,
        kl_clamp=rl.kl_clamp,
        use_bias_correction_kl=rl.use_bias_correction_kl,
        kl_ctrl_type=rl.kl_ctrl_type,
        kl_target=rl.kl_target,
        kl_horizon=rl.kl_horizon,
        rollout_importance_sampling_mode=mode,
        correction=None if mode is None else find(CORRECTIONS, Correction, mode, folders),
        rollout_importance_sampling_threshold=rl.rollout_importance_sampling_threshold,
        rollout_importance_sampling_threshold_min=rl.rollout_importance_sampling_threshold_min,
        log_rollout_offpolicy_metrics=rl.log_rollout_offpolicy_metrics,
        old_log_probs=rl.old_log_probs,
        old_log_probs_check_fraction=rl.old_log_probs_check_fraction,
        distillation=build_distillation(rl.distillation) if rl.distillation.enabled else None,
    )


def build_distillation(keys: DistillationKeys) -> Distillation:
    """Return the term of the teachers."""
    weights = [1.0] if keys.teacher_keys else keys.teacher_weights or [1.0] * len(keys.teacher_models)
    total = sum(weights) or 1.0
    return Distillation(
        loss_mode=keys.loss_mode,
        topk=keys.topk,
        topk_rest=keys.topk_rest,
        beta=keys.beta,
        use_task_rewards=keys.use_task_rewards,
        coef=keys.distillation_loss_coef if keys.use_task_rewards else 1.0,
        loss_max_clamp=keys.loss_max_clamp,
        log_prob_min_clamp=keys.log_prob_min_clamp,
        use_policy_gradient=keys.use_policy_gradient,
        weights=tuple(weight / total for weight in weights) or (1.0,),
        estimator=None if keys.loss_mode in TOP_K_KINDS else KL_ESTIMATORS[keys.loss_mode],
        teachers=tuple(keys.teacher_models),
        on_policy_fraction=keys.on_policy_fraction,
        supervised_coef=keys.supervised_coef if keys.on_policy_fraction < 1.0 else 0.0,
    )


def read_objective(cfg: RunConfig) -> Objective | None:
    """Return the objective of a run file; None in supervised stages."""
    if cfg.rl_config is None or cfg.is_supervised:
        return None
    limit = cfg.response_limit if cfg.generate_config is not None else None
    return build_objective(cfg.rl_config, cfg.stage or "ray_grpo", max_response_length=limit)
