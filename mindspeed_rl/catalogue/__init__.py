"""Every policy loss, advantage estimator, KL estimator and rollout correction: the only module with their names.

No torch here: a record has the function's module and name, its needs, the keys of rl_config that it reads with their bounds,
and its formula. `run.objective` selects the records of a run, which the rest of the package reads. A new algorithm is a
function and an entry below; docs/adding_an_algorithm.md has an example, and one of a plug-in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mindspeed_rl.catalogue.records import (
    AdvantageEstimator,
    Bounds,
    Choice,
    Correction,
    KlEstimator,
    PolicyLoss,
)

_POSITIVE, _NOT_NEGATIVE, _FRACTION = Bounds(0, excludes_low=True), Bounds(0), Bounds(0, 1)

#: bounds of the numbers of rl_config that algorithms read, whatever algorithm a run has
SETTINGS: dict[str, Bounds] = {
    "clip_ratio": _NOT_NEGATIVE,
    "clip_ratio_low": _FRACTION,
    "clip_ratio_high": _NOT_NEGATIVE,
    "clip_ratio_c": Bounds(1, excludes_low=True, default=3.0, rule="dual_clip"),
    "tau_pos": _POSITIVE,
    "tau_neg": _POSITIVE,
    "gamma": _FRACTION,
    "lam": _FRACTION,
    "adv_epsilon": _NOT_NEGATIVE,
    "cliprange_value": _NOT_NEGATIVE,
    "init_kl_coef": _NOT_NEGATIVE,
    "kl_target": _POSITIVE,
    "kl_horizon": Bounds(1),
    "top_entropy_quantile": Bounds(0, 1, excludes_low=True),
    "vespo_k_pos": _NOT_NEGATIVE,
    "vespo_lambda_pos": _POSITIVE,
    "vespo_k_neg": _NOT_NEGATIVE,
    "vespo_lambda_neg": _POSITIVE,
    "fipo_decay_rate": _POSITIVE,
    "fipo_clip_range": _POSITIVE,
    "fipo_safety_threshold": _POSITIVE,
    "dro_beta": _POSITIVE,
    "clip_cov_ratio": Bounds(0, 1, excludes_low=True),
    "clip_cov_lb": Bounds(-1e6, 1e6),
    "clip_cov_ub": Bounds(-1e6, 1e6),
    "kl_cov_ratio": Bounds(0, 1, excludes_low=True),
    "ppo_kl_coef": _NOT_NEGATIVE,
    "real_tau": _POSITIVE,
    "online_dpo_beta": _POSITIVE,
    "rollout_importance_sampling_threshold": _POSITIVE,
    "rollout_importance_sampling_threshold_min": _NOT_NEGATIVE,
}

# --- policy losses ----------------------------------------------------------------------------------------------------

#: levels of the ratio r of new to old policy
LEVELS: dict[str, str] = {
    "token": "r_t = exp(log pi(o_t) - log pi_old(o_t))",
    "sequence": "r = exp(mean_t(log pi(o_t) - log pi_old(o_t)))",
    "sequence_token": "r_t = sg[exp(mean_t(log pi - log pi_old))] * pi(o_t) / sg[pi(o_t)]",
}

#: divisors of the sum over tokens
NORMALIZERS: dict[str, str] = {
    "sequence": "mean over sequences of the mean over each sequence's tokens",
    "token": "mean over all response tokens of the mini-batch",
    "constant": "sum over response tokens / (sequences x {max_response_length})",
    "summed": "mean over sequences of the sum over each sequence's tokens",
}

_LOSSES = "mindspeed_rl.algorithms.policy_losses"
_BOUNDED_RATIO = frozenset(("clip_ratio_low", "clip_ratio_high"))
_CLIP = PolicyLoss(
    target=f"{_LOSSES}:clip",
    reads=_BOUNDED_RATIO | {"clip_ratio_c", "delta"},
    formula="-min({unclipped} * A, clip(r, {lower:g}, {upper:g}) * A){dual}",
    choices={
        "unclipped": Choice("delta", {None: "r"}, "min(r, {delta:g})"),
        "dual": Choice("clip_ratio_c", {None: ""}, ", at most -{clip_ratio_c:g} * A where A < 0"),
    },
)
_PAPERS = "mindspeed_rl.algorithms.paper_losses"
_DPPO = PolicyLoss(
    target=f"{_PAPERS}:dppo_tv",
    levels=("token",),
    reads=_BOUNDED_RATIO | {"clip_ratio_c"},
    formula="-sg[{weight}] * A * log pi * near, near = pi - pi_old <= {clip_ratio_high:g} if A > 0, "
    "else pi - pi_old >= -{clip_ratio_low:g}",
    choices={"weight": Choice("clip_ratio_c", {None: "r"}, "min(r, {clip_ratio_c:g})")},
)

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "grpo": replace(_CLIP, normalizer="sequence"),
    "bnpo": replace(_CLIP, normalizer="token"),
    "dr_grpo": replace(_CLIP, normalizer="constant"),
    "dapo": replace(_CLIP, normalizer="token"),
    "cispo": PolicyLoss(
        target=f"{_LOSSES}:cispo",
        normalizer="token",
        reads=_BOUNDED_RATIO,
        formula="-sg[clip(r, {lower:g}, {upper:g})] * A * log pi",
    ),
    "cispo_cap": PolicyLoss(
        target=f"{_LOSSES}:cispo_cap",
        normalizer="token",
        reads=frozenset(("clip_ratio_high",)),
        bounds={
            "clip_ratio_high": Bounds(
                1, meaning="the ratio's absolute cap", default=5.0, otherwise={"loss_type": "cispo"}, rule="absolute_cap"
            )
        },
        formula="-sg[min(r, {clip_ratio_high:g})] * A * log pi",
    ),
    "sapo": PolicyLoss(
        target=f"{_LOSSES}:sapo",
        normalizer="sequence",
        reads=frozenset(("tau_pos", "tau_neg")),
        formula="-(4 / tau) * sigmoid(tau * (r - 1)) * A, tau = {tau_pos:g} if A > 0 else {tau_neg:g}",
    ),
    "gspo": replace(_CLIP, normalizer="sequence", level="sequence", levels=("sequence", "sequence_token")),
    "luspo": replace(_CLIP, normalizer="summed", level="sequence"),
    "gmpo": PolicyLoss(
        target=f"{_PAPERS}:gmpo",
        normalizer="sequence",
        levels=("token",),
        reads=_BOUNDED_RATIO,
        formula="-A * exp(mean_t(c)), c = min(log(r), {clip_ratio_high:g}) if A > 0, else max(log(r), -{clip_ratio_low:g})",
    ),
    "gpg": PolicyLoss(target=f"{_PAPERS}:gpg", levels=("token",), has_ratio=False, formula="-A * log pi"),
    "dppo_tv": _DPPO,
    "dppo_kl": replace(
        _DPPO,
        target=f"{_PAPERS}:dppo_kl",
        # KL_b: of the distributions token or not
        formula="-sg[{weight}] * A * log pi * near, near = KL_b <= {clip_ratio_high:g} or pi < pi_old if A > 0, "
        "else KL_b <= {clip_ratio_low:g} or pi > pi_old",
    ),
    "vespo": PolicyLoss(
        target=f"{_PAPERS}:vespo",
        levels=("token",),
        reads=frozenset(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")),
        formula="-sg[phi] * A * log pi, phi = (prod r)^{vespo_k_pos:g} * exp({vespo_lambda_pos:g} * (1 - prod r)) if A >= 0, "
        "else (prod r)^{vespo_k_neg:g} * exp({vespo_lambda_neg:g} * (1 - prod r))",
    ),
    "fipo": replace(
        _CLIP,
        target=f"{_PAPERS}:fipo",
        levels=("token",),
        reads=_BOUNDED_RATIO
        | {"clip_ratio_c", "delta", "fipo_decay_rate", "fipo_clip_range", "fipo_clip_high_only", "fipo_safety_threshold"},
        # D: sum of log r from the token on, each as much less as it is further on
        formula="sg[f] * -min({unclipped} * A, clip(r, {lower:g}, {upper:g}) * A){dual}, f = g{safety}, g = clip(exp(D), "
        "{least}, 1 + {fipo_clip_range:g})",
        choices={
            **_CLIP.choices,
            "least": Choice("fipo_clip_high_only", {True: "1"}, "1 - {fipo_clip_range:g}"),
            "safety": Choice(
                "fipo_safety_threshold", {None: ""}, " if A >= 0 or r <= {fipo_safety_threshold:g}, else clip(g, 0.8, 1)"
            ),
        },
    ),
    "dro": PolicyLoss(
        target=f"{_PAPERS}:dro",
        levels=("token",),
        reads=frozenset(("dro_beta",)),
        formula="-A * log pi + {dro_beta:g} / 2 * (log pi - log pi_old)^2",
    ),
    "clip_cov": replace(
        _CLIP,
        target=f"{_PAPERS}:clip_cov",
        marks=f"{_PAPERS}:mark_clip_cov",
        levels=("token",),
        needs=frozenset(("old_log_probs",)),
        reads=_BOUNDED_RATIO | {"clip_ratio_c", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"},
        formula="0 if M else -min(r * A, clip(r, {lower:g}, {upper:g}) * A){dual}; M: {clip_cov_ratio:g} of all tokens, at "
        "random where {clip_cov_lb:g} < (A - mean A)(log pi_old - mean log pi_old) < {clip_cov_ub:g}",
        choices={"dual": _CLIP.choices["dual"]},
    ),
    "kl_cov": PolicyLoss(
        target=f"{_PAPERS}:kl_cov",
        marks=f"{_PAPERS}:mark_kl_cov",
        levels=("token",),
        needs=frozenset(("old_log_probs",)),
        reads=frozenset(("kl_cov_ratio", "ppo_kl_coef")),
        formula="-r * A + (({ppo_kl_coef:g} * |log pi - log pi_old|) if M else 0); M: {kl_cov_ratio:g} of all tokens, "
        "those with the largest (A - mean A)(log pi_old - mean log pi_old)",
    ),
    "real": PolicyLoss(
        target=f"{_PAPERS}:real",
        normalizer="sequence",
        levels=("token",),
        compares_group=True,
        reads=frozenset(("real_tau",)),
        formula="log(1 + sum_+ exp(-s / {real_tau:g})) + log(1 + sum_- exp(s / {real_tau:g})); sum_+, sum_-: over the "
        "{group_size} responses of a prompt with A > 0, and with A <= 0, s = mean_t(log r)",
    ),
    "online_dpo": PolicyLoss(
        target=f"{_PAPERS}:online_dpo",
        normalizer="sequence",
        levels=("token",),
        compares_group=True,
        has_ratio=False,
        needs=frozenset(("reference",)),
        reads=frozenset(("online_dpo_beta", "online_dpo_loss_type")),
        choices={
            "form": Choice(
                "online_dpo_loss_type",
                {"ipo": "(z - 1 / (2 * {online_dpo_beta:g}))^2"},
                "-log sigmoid({online_dpo_beta:g} * z)",
            )
        },
        formula="{form}, z = sum_t(log pi - log pi_ref) of the best of {group_size} responses to a prompt - z of the worst",
    ),
}


@dataclass(frozen=True)
class _Stage:
    """Defaults of a stage.

    Attributes:
        loss_type: loss type of a run file that sets none.
        sequence_loss_type: the same with token_level_loss false; None where that key has no effect.
        kl_in_loss: the KL to the reference is in the loss unless use_kl_in_reward puts it into the reward; False: in neither.
    """

    loss_type: str
    sequence_loss_type: str | None = None
    kl_in_loss: bool = False


STAGES: dict[str, _Stage] = {
    "ray_grpo": _Stage("dapo", kl_in_loss=True),
    "ray_dapo": _Stage("dapo", sequence_loss_type="grpo"),
    "ray_ppo": _Stage("dapo"),
}

# --- advantage estimators ---------------------------------------------------------------------------------------------

_ADVANTAGES = "mindspeed_rl.algorithms.advantages"
_WHITENED = {"whitened": Choice("advantage_whiten", {True: ", whitened over all tokens of the batch"})}
_GROUP_SCALE = Choice(
    "scale_rewards",
    {
        "group": "(r - mean_{group_size}(r)) / (std_{group_size}(r) + {adv_epsilon:g})",
        "batch": "(r - mean_{group_size}(r)) / (std_batch(r) + {adv_epsilon:g})",
        "none": "r - mean_{group_size}(r)",
    },
)

ADVANTAGES: dict[str, AdvantageEstimator] = {
    "group_norm": AdvantageEstimator(
        target=f"{_ADVANTAGES}:group_norm",
        reads=frozenset(("scale_rewards", "adv_epsilon")),
        idle={"adv_epsilon": ("scale_rewards", "none")},
        min_group_size=2,
        groups_while=("scale_rewards", ("group",)),
        instead=("scale_rewards", "gdpo", "gdpo"),
        formula="{scaled}",
        choices={"scaled": _GROUP_SCALE},
    ),
    "group_norm_whitened": AdvantageEstimator(
        target=f"{_ADVANTAGES}:group_norm_whitened",
        reads=frozenset(("scale_rewards", "adv_epsilon")),
        min_group_size=2,
        formula="{scaled}, less its mean, / (its std + {adv_epsilon:g}), both over all tokens of the batch",
        choices={"scaled": _GROUP_SCALE},
    ),
    "rloo": AdvantageEstimator(
        target=f"{_ADVANTAGES}:rloo",
        min_group_size=2,
        formula="r - mean of the other {others} samples of the prompt",
    ),
    "opo": AdvantageEstimator(
        target=f"{_ADVANTAGES}:opo",
        min_group_size=2,
        formula="r - mean_{group_size}(r), weighted by length",
    ),
    "pass_at_k": AdvantageEstimator(
        target=f"{_ADVANTAGES}:pass_at_k",
        reads=frozenset(("scale_rewards", "adv_epsilon")),
        idle={"adv_epsilon": ("scale_rewards", "none")},
        min_group_size=2,
        formula="(best r - second r){scaled} for the best of {group_size}, else 0",
        choices={"scaled": Choice("scale_rewards", {"none": ""}, " / (std_{group_size}(r) + {adv_epsilon:g})")},
    ),
    "gpg": AdvantageEstimator(
        target=f"{_ADVANTAGES}:gpg_advantage",
        min_group_size=2,
        formula="(responses / responses with r other than 0) * (r - mean_{group_size}(r))",
    ),
    "max_rl": AdvantageEstimator(
        target=f"{_ADVANTAGES}:max_rl",
        min_group_size=2,
        kl_in_reward=False,
        formula="(r - mean_{group_size}(r)) / mean_{group_size}(r), 0 where that is 0",
    ),
    "reinforce_plus_plus": AdvantageEstimator(
        target=f"{_ADVANTAGES}:reinforce_plus_plus",
        group_signal="none",
        reads=frozenset(("gamma", "advantage_whiten")),
        formula="return with gamma {gamma:g}{whitened}",
        choices=_WHITENED,
    ),
    "reinforce_plus_plus_baseline": AdvantageEstimator(
        target=f"{_ADVANTAGES}:reinforce_plus_plus_baseline",
        reads=frozenset(("advantage_whiten",)),
        min_group_size=2,
        formula="r - mean_{group_size}(r){whitened}",
        choices=_WHITENED,
    ),
    "flash_reinforce": AdvantageEstimator(
        target=f"{_ADVANTAGES}:flash_reinforce",
        group_signal="none",
        formula="r - mean_batch(r)",
    ),
    "remax": AdvantageEstimator(
        target=f"{_ADVANTAGES}:remax",
        group_signal="none",
        reads=frozenset(("gamma",)),
        needs=frozenset(("greedy_baseline",)),
        formula="return with gamma {gamma:g} - reward of the greedy response",
    ),
    "gae": AdvantageEstimator(
        target=f"{_ADVANTAGES}:gae",
        group_signal="none",
        reads=frozenset(("gamma", "lam", "advantage_whiten")),
        needs=frozenset(("values",)),
        formula="GAE with gamma {gamma:g}, lambda {lam:g}{whitened}",
        choices=_WHITENED,
    ),
    "grouped_gae": AdvantageEstimator(
        target=f"{_ADVANTAGES}:grouped_gae",
        group_signal="none",
        reads=frozenset(("gamma", "lam")),
        needs=frozenset(("values",)),
        min_group_size=2,
        formula="GAE with gamma {gamma:g}, lambda {lam:g}, whitened over the tokens of each group of {group_size}",
    ),
    "optimal_token_baseline": AdvantageEstimator(
        target=f"{_ADVANTAGES}:optimal_token_baseline",
        group_signal="none",
        needs=frozenset(("old_log_probs", "squared_probs")),
        min_group_size=2,
        formula="G_t - sum_{group_size}(G_t W_t) / sum_{group_size}(W_t), W_t = sum_(s <= t)(1 - 2 pi(o_s) + sum_v pi(v)^2)",
    ),
    "gdpo": AdvantageEstimator(
        target=f"{_ADVANTAGES}:gdpo",
        group_signal="parts",
        reads=frozenset(("adv_epsilon",)),
        needs=frozenset(("reward_parts",)),
        min_group_size=2,
        kl_in_reward=False,
        formula="sum_k w_k (r_k - mean_{group_size}(r_k)) / (std_{group_size}(r_k) + {adv_epsilon:g}), whitened over the batch",
    ),
}

# --- KL to the reference ----------------------------------------------------------------------------------------------

_KL = "mindspeed_rl.algorithms.kl"
_LIMITS = (20.0, 10.0)
_K1 = KlEstimator(target=f"{_KL}:k1", formula="log pi - log pi_ref")
_K2 = KlEstimator(target=f"{_KL}:k2", weighted_gradient=f"{_KL}:k2", formula="(log pi - log pi_ref)^2 / 2")
_K3 = KlEstimator(
    target=f"{_KL}:k3",
    weighted_gradient=f"{_KL}:k2",
    clamp=_LIMITS,
    formula="exp(d) - d - 1, d = log pi_ref - log pi",
)
_K3_PLUS = KlEstimator(
    target=f"{_KL}:k3",
    gradient=f"{_KL}:k2",
    clamp=_LIMITS,
    formula="value exp(d) - d - 1, gradient of d^2 / 2, d = log pi_ref - log pi",
)

#: the estimator of a stage with a critic where none is named
CRITIC_ESTIMATOR = "gae"
#: KL estimators whose gradient as a loss is 0 on average, and one of the same divergence that has a gradient
KL_WITHOUT_GRADIENT, KL_WITH_GRADIENT = ("k1", "kl"), "k2"

#: the long names are MindSpeed-RL's, the short ones the field's
KL_ESTIMATORS: dict[str, KlEstimator] = {
    "kl": _K1,
    "abs": KlEstimator(target=f"{_KL}:absolute", formula="|log pi - log pi_ref|"),
    "mse": _K2,
    "low_var_kl": _K3,
    "low_var_kl+": _K3_PLUS,
    "k1": _K1,
    "k2": _K2,
    "k3": _K3,
    "k3+": _K3_PLUS,
}

# --- rollout corrections ----------------------------------------------------------------------------------------------

_CORRECTIONS = "mindspeed_rl.algorithms.corrections"
_HIGH, _LOW = "rollout_importance_sampling_threshold", "rollout_importance_sampling_threshold_min"
_NUMBERS = {"high": Choice(_HIGH, {}, f"{{{_HIGH}:g}}"), "low": Choice(_LOW, {None: "0"}, f"{{{_LOW}:g}}")}
_TRUNCATE = Correction(target=f"{_CORRECTIONS}:truncate", reads=frozenset((_HIGH,)), choices=_NUMBERS)
_MASK = Correction(target=f"{_CORRECTIONS}:mask_outside", reads=frozenset((_HIGH, _LOW)), choices=_NUMBERS)

#: correction of a run whose rollout engine samples from another policy by construction, where none is named
DEFAULT_CORRECTION = "token_truncate"
#: w_t = pi_old / pi_rollout of a token; prod and geo: product and geometric mean over the tokens of the sequence
CORRECTIONS: dict[str, Correction] = {
    "token_truncate": replace(_TRUNCATE, formula="min(w_t, {high})"),
    "token_mask": replace(_MASK, formula="w_t if {low} <= w_t <= {high}, else 0"),
    "sequence_truncate": replace(_TRUNCATE, weight="sequence", formula="min(prod w, {high})"),
    "sequence_mask": replace(
        _MASK, weight="sequence", bounded="sequence", formula="prod w if {low} <= prod w <= {high}, else 0"
    ),
    "geometric_truncate": replace(_TRUNCATE, weight="geometric", formula="min(geo w, {high})"),
    "geometric_mask": replace(
        _MASK, weight="geometric", bounded="geometric", formula="geo w if {low} <= geo w <= {high}, else 0"
    ),
    "token_geometric_mask": replace(_MASK, bounded="geometric", formula="w_t if {low} <= geo w <= {high}, else 0"),
    # verl's rejection by k1: tokens are kept or not, and have no weight
    "token_rejection_mask": replace(_MASK, weight="one", formula="1 if {low} <= w_t <= {high}, else 0"),
    "sequence_rejection_mask": replace(
        _MASK, weight="one", bounded="sequence", formula="1 if {low} <= prod w <= {high}, else 0"
    ),
    "geometric_rejection_mask": replace(
        _MASK, weight="one", bounded="geometric", formula="1 if {low} <= geo w <= {high}, else 0"
    ),
}
