"""What is optimized: the choices that make up the loss, resolved from the run file, and the formula with its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_rl.config.run import RunConfig


@dataclass(frozen=True)
class Objective:
    """The loss of a reinforcement learning run after every default has been decided.

    Attributes:
        ratio: form of the policy term: clip, cispo (bounds 1 +- eps), cispo_cap (absolute cap) or sapo.
        level: what the ratio new / old is computed over.
        aggregation: token_mean over the global batch; sequence_mean of per-sequence means; constant_length (Dr. GRPO).
        clip_low, clip_high: the ratio is clipped to 1 - clip_low .. 1 + clip_high; for cispo_cap clip_high is the cap itself.
        kl_in_loss, kl_in_reward: coefficient of the KL term in each place; 0 when it is not used there.
        needs_reference: whether reference log-probabilities are computed at all.
    """

    ratio: Literal["clip", "cispo", "cispo_cap", "sapo"]
    level: Literal["token", "sequence", "sequence_token"]
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"]
    clip_low: float
    clip_high: float
    kl_in_loss: float
    kl_in_reward: float

    @property
    def needs_reference(self) -> bool:
        """True when some KL coefficient is not 0."""
        return bool(self.kl_in_loss or self.kl_in_reward)


def resolve_objective(cfg: RunConfig) -> Objective:
    """Return the loss that a run file asks for.

    Without loss_type, ray_grpo and ray_ppo take the token mean; so does ray_dapo, unless token_level_loss is false. As in
    MindSpeed-RL, ray_dapo has no KL term and ray_ppo has one in the reward only.

    Raises:
        ValueError: the run has no rl_config.
    """
    rl = cfg.rl_config
    if rl is None:
        raise ValueError("only a run with rl_config has a reinforcement learning objective")
    loss_type = rl.loss_type
    if loss_type is None:
        by_sequence = cfg.stage == "ray_dapo" and not rl.token_level_loss
        loss_type = "grpo" if by_sequence else "dapo"
    aggregations = {"dr_grpo": "constant_length", "grpo": "sequence_mean", "gspo": "sequence_mean", "sapo": "sequence_mean"}
    low, high = (rl.clip_ratio_low, rl.clip_ratio_high) if rl.clip_higher_enable else (rl.clip_ratio, rl.clip_ratio)
    in_loss = 0.0 if rl.use_kl_in_reward or cfg.stage in ("ray_dapo", "ray_ppo") else rl.init_kl_coef
    return Objective(
        ratio=loss_type if loss_type in ("cispo", "cispo_cap", "sapo") else "clip",
        level=rl.importance_sampling_level or ("sequence" if loss_type == "gspo" else "token"),
        aggregation=aggregations.get(loss_type, "token_mean"),
        clip_low=low,
        clip_high=high,
        kl_in_loss=in_loss,
        kl_in_reward=rl.init_kl_coef if rl.use_kl_in_reward else 0.0,
    )


_AGGREGATION = {
    "token_mean": "mean over all response tokens of the mini-batch",
    "sequence_mean": "mean over sequences of the mean over each sequence's tokens",
    "constant_length": "sum over response tokens / (sequences x {length})",
}

_RATIO = {
    "token": "r_t = exp(log pi(o_t) - log pi_old(o_t))",
    "sequence": "r = exp(mean_t(log pi(o_t) - log pi_old(o_t)))",
    "sequence_token": "r_t = sg[exp(mean_t(log pi - log pi_old))] * pi(o_t) / sg[pi(o_t)]",
}

_KL = {
    "kl": "log pi - log pi_ref",
    "k1": "log pi - log pi_ref",
    "abs": "|log pi - log pi_ref|",
    "mse": "(log pi - log pi_ref)^2 / 2",
    "k2": "(log pi - log pi_ref)^2 / 2",
    "low_var_kl": "exp(d) - d - 1, d = log pi_ref - log pi",
    "k3": "exp(d) - d - 1, d = log pi_ref - log pi",
    "low_var_kl+": "value exp(d) - d - 1, gradient of d^2 / 2, d = log pi_ref - log pi",
    "k3+": "value exp(d) - d - 1, gradient of d^2 / 2, d = log pi_ref - log pi",
}


def formula(cfg: RunConfig) -> str:
    """Return the loss in use as readable lines with the run's numbers in them."""
    if cfg.is_supervised or cfg.rl_config is None:
        return _supervised_formula(cfg)
    rl, objective = cfg.rl_config, resolve_objective(cfg)
    length = cfg.generate_config.sampling_config.max_tokens if cfg.generate_config is not None else "max_tokens"
    lines = [f"advantage   {_advantage(cfg)}", f"ratio       {_RATIO[objective.level]}"]
    lines.append(f"policy      L = {_policy(cfg, objective)}")
    lines.append(f"aggregate   {_AGGREGATION[objective.aggregation].format(length=length)}")
    terms = ["aggregate(L)"]
    kl = _KL.get(rl.kl_penalty, rl.kl_penalty)
    clamp = " (d within +-20, KL within +-10)" if rl.kl_clamp and rl.kl_penalty.startswith(("low_var_kl", "k3")) else ""
    correction = "ratio x " if rl.use_bias_correction_kl else ""
    adaptive = f", adaptive towards {rl.kl_target:g} over {rl.kl_horizon}" if rl.kl_ctrl_type == "adaptive" else ""
    if objective.kl_in_loss:
        terms.append(f"{objective.kl_in_loss:g} * aggregate(KL)")
        lines.append(f"KL          {correction}{kl}{clamp}{adaptive}")
    if objective.kl_in_reward:
        lines.append(f"reward      r_t - {objective.kl_in_reward:g} * KL_t, KL = {kl}{clamp}{adaptive}")
    if rl.entropy_coeff:
        terms.append(f"{-rl.entropy_coeff:+g} * aggregate(entropy)".replace("-", "- ", 1).replace("+", "", 1))
    lines.append("loss        " + " + ".join(terms).replace("+ - ", "- "))
    lines.extend(_masks(cfg))
    if rl.adv_estimator == "gae":
        lines.append(f"critic      mean of max((V-R)^2, (clip(V, V_old +- {rl.cliprange_value:g}) - R)^2) / 2")
    return "\n".join(lines)


def _advantage(cfg: RunConfig) -> str:
    rl = cfg.rl_config
    n = rl.n_samples_per_prompt
    spread = {
        "group": f"(r - mean_{n}(r)) / (std_{n}(r) + {rl.adv_epsilon:g})",
        "batch": f"(r - mean_{n}(r)) / (std_batch(r) + {rl.adv_epsilon:g})",
        "none": f"r - mean_{n}(r)",
        "gdpo": f"sum_k w_k (r_k - mean_{n}(r_k)) / (std_{n}(r_k) + {rl.adv_epsilon:g}), whitened over the batch",
    }
    whitened = ", whitened over all tokens of the batch" if rl.advantage_whiten else ""
    forms = {
        "group_norm": spread[rl.scale_rewards],
        "rloo": f"r - mean of the other {n - 1} samples of the prompt",
        "reinforce_plus_plus": f"return with gamma {rl.gamma:g}{whitened}",
        "reinforce_plus_plus_baseline": f"r - mean_{n}(r){whitened}",
        "remax": "r - reward of the greedy response",
        "gae": f"GAE with gamma {rl.gamma:g}, lambda {rl.lam:g}{whitened}",
        "gdpo": spread["gdpo"],
    }
    return f"A = {forms.get(rl.adv_estimator, rl.adv_estimator)}"


def _policy(cfg: RunConfig, objective: Objective) -> str:
    rl = cfg.rl_config
    low, high = f"{1 - objective.clip_low:g}", f"{1 + objective.clip_high:g}"
    weight = f"{rl.rollout_importance_sampling_mode}(pi_old / pi_rollout) * " if rl.rollout_importance_sampling_mode else ""
    if objective.ratio == "cispo":
        return f"{weight}-sg[clip(r, {low}, {high})] * A * log pi"
    if objective.ratio == "cispo_cap":
        return f"{weight}-sg[min(r, {objective.clip_high:g})] * A * log pi"
    if objective.ratio == "sapo":
        return f"{weight}-(4 / tau) sigmoid(tau (r - 1)) * A, tau = {rl.tau_pos:g} if A > 0 else {rl.tau_neg:g}"
    ratio = "r" if rl.delta is None else f"min(r, {rl.delta:g})"
    text = f"-min({ratio} * A, clip(r, {low}, {high}) * A)"
    if rl.clip_ratio_c is not None:
        text += f", at most -{rl.clip_ratio_c:g} * A where A < 0"
    return weight + text


def _masks(cfg: RunConfig) -> list[str]:
    rl = cfg.rl_config
    lines = []
    if rl.off_policy_sequence_mask_delta is not None:
        lines.append(
            "mask        sequences with A < 0 and mean(log pi_old - log pi) > "
            f"{rl.off_policy_sequence_mask_delta:g} are left out"
        )
    if rl.top_entropy_quantile < 1:
        lines.append(
            f"mask        only the {rl.top_entropy_quantile:.0%} of tokens with the highest entropy enter the policy term"
        )
    if rl.overlong_filter:
        lines.append("mask        truncated responses are left out")
    if rl.filter_groups_enable:
        lines.append(f"filter      groups whose {rl.filter_groups_metric} does not vary are replaced")
    if rl.dynamic_sample:
        lines.append("filter      groups whose reward does not vary are replaced")
    return lines


def _supervised_formula(cfg: RunConfig) -> str:
    train = cfg.actor_config
    z = "z = (log pi(chosen) - log pi(rejected)) - (log ref(chosen) - log ref(rejected))"
    beta, eps = f"{train.dpo_beta:g}", train.dpo_label_smoothing
    half = f"{1 / (2 * train.dpo_beta):g}" if train.dpo_beta else "inf"
    preference = {
        "sigmoid": f"loss = -{1 - eps:g} * log sigmoid({beta} z) - {eps:g} * log sigmoid(-{beta} z)",
        "hinge": f"loss = max(0, 1 - {beta} z)",
        "ipo": f"loss = (z - {half})^2, log-probabilities averaged over tokens",
    }
    gamma = f"{train.gamma_beta_ratio * train.simpo_beta:g}"
    margin = f"m = {train.simpo_beta:g} * (mean log pi(chosen) - mean log pi(rejected)) - {gamma}"
    simpo = {"sigmoid": "loss = -log sigmoid(m)", "hinge": "loss = max(0, 1 - m)"}
    forms = {
        "dpo": f"{z}\n{preference[train.dpo_loss_type]}",
        "simpo": f"{margin}\n{simpo[train.simpo_loss_type]}",
        "orm": "loss = -log sigmoid(score(chosen) - score(rejected))",
        "prm": "loss = cross entropy of the reward token at each placeholder",
    }
    text = forms.get(cfg.stage or "", "loss = mean over all trained tokens of the global batch of -log pi(token)")
    if cfg.stage in ("dpo", "simpo") and train.pref_ftx:
        text += f" + {train.pref_ftx:g} * (-log pi(chosen))"
    return text
