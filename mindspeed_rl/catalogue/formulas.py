"""Formulas of a run's whole loss: its lines in every stage, and the terms that are added to it.

An algorithm has its own formula in its record. A formula here is a template like those, of keys of the run file by their
names, of the formulas of the algorithms in use (`{loss}`, `{advantage}`, `{kl}`, `{correction}`), and of the numbers that
`run.formula` derives. One that comes out empty is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mindspeed_rl.catalogue import LEVELS, NORMALIZERS
from mindspeed_rl.catalogue.records import Choice, fill_formula


@dataclass(frozen=True)
class Formula:
    """A template with texts that depend on settings; see `records.Algorithm`.

    Attributes:
        label: name of the line; empty in supervised stages, and for a term of the loss.
    """

    template: str
    choices: Mapping[str, Choice] = field(default_factory=dict)
    label: str = ""

    def fill(self, numbers: Mapping[str, object]) -> str:
        """Return the text with the run's numbers in it, without its label."""
        return fill_formula(self.template, self.choices, numbers)


def _line(label: str, template: str, **choices: Choice) -> Formula:
    return Formula(template, choices, label)


def _line_where(label: str, setting: str, values: tuple[object, ...], template: str, **choices: Choice) -> Formula:
    """Return a line that is there while a setting has one of these values."""
    return Formula("{line}", {**choices, "line": Choice(setting, dict.fromkeys(values, template))}, label)


def _line_unless(label: str, setting: str, value: object, template: str, **choices: Choice) -> Formula:
    """Return a line that is there while a setting does not have this value."""
    return Formula("{line}", {**choices, "line": Choice(setting, {value: ""}, template)}, label)


# --- lines of reinforcement learning ----------------------------------------------------------------------------------

_KL_LIMITS = {
    "limits": Choice("kl_limits", {None: ""}, " (d within +-{kl_limits[0]:g}, KL within +-{kl_limits[1]:g})"),
    "control": Choice("kl_ctrl_type", {"adaptive": ", adaptive towards {kl_target:g} a token over {kl_horizon} samples"}),
}

#: before the loss itself, in the order in which they are shown
LINES: tuple[Formula, ...] = (
    # the distribution of all log-probs, which is the full one also where sampling leaves tokens out
    _line_where(
        *("pi", "has_rollout", (True,)),
        "softmax(logits{scale}) over all tokens, in rollout engine and trainer{limits}",
        # greedy sampling has no distribution of its own
        scale=Choice("temperature", {0.0: "", 1.0: ""}, " / {temperature:g}"),
        limits=Choice("sampling_limits", {"": ""}, "; {sampling_limits} limit what is sampled, not pi"),
    ),
    _line("advantage", "A = {advantage}"),
    _line("ratio", "{ratio}", ratio=Choice("level", LEVELS)),
    _line_where(
        *("pi_old", "old_log_probs", ("rollout",)),
        "pi_rollout, as the rollout engine recorded it{checked}",
        checked=Choice(
            "old_log_probs_check_fraction", {0.0: ""}, "; the trainer computes {old_log_probs_check_fraction:g} of it too"
        ),
    ),
    _line("policy", "L = {weight}{loss}", weight=Choice("correction", {None: ""}, "w * ")),
    _line_unless(
        *("weight", "correction", None),
        "w = {rollout_importance_sampling_mode}({trained} / pi_rollout) = {correction}, w_t per token",
        trained=Choice("old_log_probs", {"rollout": "pi"}, "pi_old"),
    ),
    _line("aggregate", "{divisor}", divisor=Choice("normalizer", NORMALIZERS)),
    _line_where("reward", "kl_place", ("reward",), "r_t - {kl_coef:g} * KL_t, KL = {kl}{limits}{control}", **_KL_LIMITS),
    _line_where(
        *("KL", "kl_place", ("loss",)),
        "{weight}{kl}{limits}{control}",
        **_KL_LIMITS,
        weight=Choice("use_bias_correction_kl", {True: "ratio x "}),
    ),
)

#: the term of the teachers; p the teacher, q the student
DISTILLATION_LINES: tuple[Formula, ...] = (
    _line(
        "distill",
        "D = {divergence}{clamp}{mean}; q the student, p the teacher",
        rest=Choice(
            "topk_rest",
            {"lump": "the rest lumped into one token", "renormalize": "both renormalized over them"},
            "the rest dropped",
        ),
        mixture=Choice("loss_mode", {}, "{beta:g} p + {beta_rest:g} q"),
        kind=Choice(
            "loss_mode",
            {
                "forward_kl_topk": "sum p (log p - log q)",
                "reverse_kl_topk": "sum q (log q - log p)",
                "jsd_topk": "{beta:g} KL(p || m) + {beta_rest:g} KL(q || m), m = {mixture}",
            },
        ),
        divergence=Choice(
            "kind", {"": "{estimator} at sampled tokens"}, "{kind} over the teacher's {topk} most probable tokens, {rest}"
        ),
        clamp=Choice("loss_max_clamp", {None: ""}, ", within +-{loss_max_clamp:g}"),
        mean=Choice("num_weights", {1: ""}, " (mean over teachers, weights {weight_list})"),
    ),
    _line_where(
        *("advantage", "use_policy_gradient", (True,)),
        "{reward} - {coef:g} * D, D without gradient",
        reward=Choice("use_task_rewards", {True: "A"}, "0"),
    ),
    _line_where("distill", "trains_policy", (False,), "no policy term: rewards of the task do not train"),
    _line_where(
        *("responses", "reads_data", (True,)),
        "of the student with probability {on_policy_fraction:g} per iteration, else of the data",
    ),
)

#: the terms of the loss in front of `ADDED_LOSSES`; one that is subtracted begins with its sign
TERMS: tuple[Formula, ...] = (
    _line_where("", "trains_policy", (True,), "aggregate(L)"),
    _line_where("", "distillation_in_loss", (True,), "{distillation_coef:g} * aggregate(D)"),
    _line_unless("", "supervised_coef", 0.0, "{supervised_coef:g} * aggregate(-log q(y)), y of the data"),
    _line_unless("", "kl_in_loss", 0.0, "{kl_in_loss:g} * aggregate(KL)"),
    _line_unless("", "entropy_coeff", 0.0, "{entropy_sign}{entropy_weight:g} * aggregate(entropy)"),
)

#: after the loss: the tokens and groups that are left out of it, and the loss of the critic
LAST_LINES: tuple[Formula, ...] = (
    _line_unless(
        *("mask", "off_policy_sequence_mask_delta", None),
        "sequences with A < 0 and mean(log pi_old - log pi) > {off_policy_sequence_mask_delta:g} are left out",
    ),
    _line_where(
        *("mask", "masks_by_entropy", (True,)),
        "only the {top_entropy_quantile:.0%} of tokens with the highest entropy enter the policy term",
    ),
    _line_where("mask", "overlong_filter", (True,), "truncated responses are left out"),
    _line_where("filter", "filter_groups_enable", (True,), "groups whose {filter_groups_metric} does not vary are replaced"),
    _line_where(
        *("filter", "dynamic_sample", (True,)),
        "{groups}",
        groups=Choice(
            "group_signal",
            {
                "total": "groups whose reward does not vary are replaced",
                "parts": "groups whose rewards vary in no function are replaced",
            },
        ),
    ),
    _line_where(
        *("critic", "has_critic", (True,)),
        "mean of max((V-R)^2, (clip(V, V_old +- {cliprange_value:g}) - R)^2) / 2",
    ),
)

# --- losses of routers, indexers and prediction layers, in every stage ------------------------------------------------


@dataclass(frozen=True)
class AddedLoss:
    """A loss of parts of the model, which is added to the loss of the stage.

    Attributes:
        name: its symbol.
        weight: the key of its weight.
        needs: keys that have to be set, and not 0.
        formula: its template.
    """

    name: str
    weight: str
    needs: tuple[str, ...]
    formula: Formula


ADDED_LOSSES: tuple[AddedLoss, ...] = (
    AddedLoss(
        "M",
        "mtp_loss_scaling_factor",
        ("mtp_num_layers",),
        _line(
            "",
            "mean over {mtp_num_layers} prediction layer(s) k of sum_t -log p_k(token t) / trained tokens; gradient to {reach}",
            reach=Choice("mtp_detach_heads", {True: "only these layers"}, "the model before them too"),
        ),
    ),
    AddedLoss(
        "I",
        "dsa_indexer_loss_coeff",
        ("dsa_indexer_loss_coeff",),
        _line(
            "",
            "sum over layers of KL(attention of all heads, scores of the indexer) over chosen tokens, mean over tokens; "
            "gradient only to the indexers",
        ),
    ),
    AddedLoss(
        "B",
        "moe_aux_loss_coeff",
        ("num_experts", "moe_aux_loss_coeff", "balanced_over"),
        _line("", "sum over layers with experts of {num_experts} sum_e f_e P_e, mean over {balanced_over}"),
    ),
    AddedLoss(
        "Z",
        "moe_z_loss_coeff",
        ("num_experts", "moe_z_loss_coeff"),
        _line("", "sum over layers with experts of (log sum_e exp(logit_e))^2, mean over tokens"),
    ),
)

# --- supervised stages ------------------------------------------------------------------------------------------------

_TOKENS = "mean over all trained tokens of the global batch of "
_STORED = " over the teacher's stored tokens, p the teacher, the rest {rest}"
_LIKELIHOOD = Choice("pref_ftx", {0.0: ""}, " + {pref_ftx:g} * (-log pi(chosen))")

#: stage -> its loss; a stage that is not here has the lines of "pretrain"
SUPERVISED: dict[str, Formula] = {
    "pretrain": _line("", f"loss = {_TOKENS}-log pi(token)"),
    "sft": _line(
        "",
        f"loss = {_TOKENS}{{form}}",
        rest=Choice("teacher_topk_rest", {"lump": "lumped into one token"}, "dropped"),
        form=Choice(
            "sft_loss_type",
            {
                "dft": "sg[pi(token)] * -log pi(token)",
                "forward_kl": f"sum p (log p - log pi){_STORED}",
                "reverse_kl": f"sum pi (log pi - log p){_STORED}",
            },
            "-log pi(token)",
        ),
    ),
    "dpo": _line(
        "",
        "z = (log pi(chosen) - log pi(rejected)) - (log ref(chosen) - log ref(rejected))\nloss = {form}{likelihood}",
        form=Choice(
            "dpo_loss_type",
            {
                "sigmoid": "-{dpo_label_right:g} * log sigmoid({dpo_beta:g} z) - {dpo_label_smoothing:g} * "
                "log sigmoid(-{dpo_beta:g} z)",
                "hinge": "max(0, 1 - {dpo_beta:g} z)",
                "ipo": "(z - {dpo_margin:g})^2, log-probabilities averaged over tokens",
            },
        ),
        likelihood=_LIKELIHOOD,
    ),
    "simpo": _line(
        "",
        "m = {simpo_beta:g} * (mean log pi(chosen) - mean log pi(rejected)) - {simpo_gamma:g}\nloss = {form}{likelihood}",
        form=Choice("simpo_loss_type", {"sigmoid": "-log sigmoid(m)", "hinge": "max(0, 1 - m)"}),
        likelihood=_LIKELIHOOD,
    ),
    "cpo": _line(
        "",
        "loss = -log sigmoid({cpo_beta:g} * (log pi(chosen) - log pi(rejected))) + {cpo_alpha:g} * (-mean log pi(chosen))",
    ),
    "orpo": _line(
        "",
        "loss = -log p(chosen) + {orpo_lambda:g} * (-log sigmoid(log odds(chosen) - log odds(rejected))), odds = p / (1 - p), "
        "log p the mean log pi",
    ),
    "kto": _line(
        "",
        "m = {kto_beta:g} * (log pi(answer) - log ref(answer){kl})\nloss = {kto_desirable_weight:g} * (1 - sigmoid(m)) where "
        "the answer is desirable, {kto_undesirable_weight:g} * (1 - sigmoid(-m)) where not{note}",
        kl=Choice("kto_loss_type", {"kto": " - KL"}),
        note=Choice(
            "kto_loss_type",
            {"kto": "\nKL = max(0, mean over the global batch of log pi - log ref of answers to other prompts)"},
        ),
    ),
    "orm": _line(
        "",
        "loss = -log sigmoid(score(chosen) - score(rejected)){centre}",
        centre=Choice(
            "center_rewards_coefficient", {0.0: ""}, " + {center_rewards_coefficient:g} * (score(chosen) + score(rejected))^2"
        ),
    ),
    "prm": _line("", "loss = cross entropy of the reward token at each placeholder"),
}
