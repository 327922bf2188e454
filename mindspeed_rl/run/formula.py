"""The loss of a run as readable lines with its numbers in them."""

from __future__ import annotations

from typing import Any

from mindspeed_rl.catalogue import LEVELS, NORMALIZERS
from mindspeed_rl.catalogue.objective import TOP_K_KINDS, Objective
from mindspeed_rl.catalogue.records import Algorithm
from mindspeed_rl.config.keys.generate import GenerateConfig
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.run.record import Run


def formula(run: Run) -> str:
    """Return the loss in use as readable lines with the run's numbers in them."""
    cfg, objective = run.config, run.objective
    if objective is None or cfg.rl_config is None:
        routers = _list_added_losses(cfg)
        terms = "".join(f" + {weight:g} * {name}" for name, (weight, _) in routers.items())
        return "\n".join([_supervised_formula(cfg) + terms, *(f"{name} = {text}" for name, (_, text) in routers.items())])
    numbers = objective.numbers()
    weight = "w * " if objective.correction is not None else ""
    length = "max_tokens" if objective.max_response_length is None else objective.max_response_length
    lines = [
        *_policy_lines(cfg.generate_config),
        f"advantage   A = {_text(objective.advantage, numbers)}",
        f"ratio       {LEVELS[objective.level]}",
        f"policy      L = {weight}{_text(objective.loss, numbers)}",
    ]
    if objective.correction is not None:
        mode, form = objective.rollout_importance_sampling_mode, _text(objective.correction, numbers)
        lines.append(f"weight      w = {mode}(pi_old / pi_rollout) = {form}, w_t that of a token")
    lines.append(f"aggregate   {NORMALIZERS[objective.normalizer].format(max_response_length=length)}")
    lines += _kl_lines(objective, numbers)
    term = objective.distillation
    lines += [] if term is None else term.describe()
    trains_policy = term is None or term.use_task_rewards or term.use_policy_gradient
    terms = "aggregate(L)" if trains_policy else ""
    if term is not None and not term.use_policy_gradient:
        terms += f"{' + ' if terms else ''}{term.coef:g} * aggregate(D)"
    if objective.kl_in_loss:
        terms += f" + {objective.kl_in_loss:g} * aggregate(KL)"
    if coefficient := objective.entropy_coeff:
        terms += f" {'-' if coefficient > 0 else '+'} {abs(coefficient):g} * aggregate(entropy)"
    routers = _list_added_losses(cfg)
    lines += [f"added       {name} = {text}" for name, (_, text) in routers.items()]
    lines.append(f"loss        {terms}{''.join(f' + {weight:g} * {name}' for name, (weight, _) in routers.items())}")
    lines += _masks(cfg.rl_config, objective)
    if objective.has_critic:
        lines.append(f"critic      mean of max((V-R)^2, (clip(V, V_old +- {objective.cliprange_value:g}) - R)^2) / 2")
    return "\n".join(lines)


def _list_added_losses(cfg: RunConfig) -> dict[str, tuple[float, str]]:
    """Return the losses of the actor's routers and prediction layers: name -> (weight, its form); none where it has neither."""
    train, losses = cfg.actor_config, {}
    if count := train.mtp_num_layers:
        detaches = train.mtp_detach_heads if train.mtp_detach_heads is not None else not cfg.is_supervised
        reach = "gradient to these layers alone" if detaches else "gradient to the model before them too"
        text = f"mean over {count} prediction layer(s) k of sum_t -log p_k(token t) / trained tokens; {reach}"
        losses["M"] = (train.mtp_loss_scaling_factor, text)
    if weight := train.dsa_indexer_loss_coeff:
        text = "sum over layers of KL(attention of all heads, scores of the indexer) over chosen tokens, mean over tokens"
        losses["I"] = (weight, f"{text}; gradient to the indexers alone")
    if not train.num_experts:
        return losses
    # where neither the run file nor the model's config.json has one, it is 0
    derived = cfg.derived.get("actor_config.moe_aux_loss_coeff")
    weight = train.moe_aux_loss_coeff if train.moe_aux_loss_coeff is not None else derived.value if derived else 0.0
    kind = train.moe_router_load_balancing_type
    if weight and kind in ("aux_loss", "seq_aux_loss"):
        part = "sequences" if kind == "seq_aux_loss" or train.seq_aux else "micro-batches, by tokens"
        losses["B"] = (float(weight), f"sum over layers with experts of {train.num_experts} sum_e f_e P_e, mean over {part}")
    if train.moe_z_loss_coeff:
        losses["Z"] = (train.moe_z_loss_coeff, "sum over layers with experts of (log sum_e exp(logit_e))^2, mean over tokens")
    return losses


def _policy_lines(generate: GenerateConfig | None) -> list[str]:
    """Return the distribution of all log-probs, which is the full one also where sampling leaves tokens out."""
    if generate is None:
        return []
    keys = generate.sampling_config
    neutral = {"top_k": keys.top_k < 1, "top_p": keys.top_p >= 1.0, "min_p": keys.min_p <= 0.0}
    neutral |= {"repetition_penalty": keys.repetition_penalty == 1.0}
    neutral |= {name: not getattr(keys, name) for name in ("presence_penalty", "frequency_penalty")}
    cuts = [f"{name} {getattr(keys, name):g}" for name, is_neutral in neutral.items() if not is_neutral]
    cuts += [f"structured_output ({', '.join(keys.structured_output)})"] if keys.structured_output else []
    # greedy sampling has no distribution of its own
    text = f"pi          softmax(logits{'' if keys.temperature in (0.0, 1.0) else f' / {keys.temperature:g}'}) over all tokens"
    text += ", in rollout engine and trainer"
    return [f"{text}; {' and '.join(cuts)} limit what is sampled, not pi" if cuts else text]


def _text(record: Algorithm, numbers: dict[str, Any]) -> str:
    """Return the record's formula, or its target where it has none."""
    text = record.format_formula(numbers)
    return f"{record.target} (brings no formula)" if text is None else text


def _kl_lines(objective: Objective, numbers: dict[str, Any]) -> list[str]:
    if objective.kl_place is None:
        return []
    text, limits = _text(objective.kl, numbers), objective.kl.clamp
    if objective.kl_clamp and limits is not None:
        text += f" (d within +-{limits[0]:g}, KL within +-{limits[1]:g})"
    if objective.kl_ctrl_type == "adaptive":
        text += f", adaptive towards {objective.kl_target:g} a token over {objective.kl_horizon} samples"
    if objective.kl_place == "reward":
        return [f"reward      r_t - {objective.kl_in_reward:g} * KL_t, KL = {text}"]
    return [f"KL          {'ratio x ' if objective.use_bias_correction_kl else ''}{text}"]


def _masks(rl: RLConfig, objective: Objective) -> list[str]:
    lines = []
    if objective.off_policy_sequence_mask_delta is not None:
        lines.append(
            "mask        sequences with A < 0 and mean(log pi_old - log pi) > "
            f"{objective.off_policy_sequence_mask_delta:g} are left out"
        )
    if objective.masks_by_entropy:
        fraction = f"{objective.top_entropy_quantile:.0%}"
        lines.append(f"mask        only the {fraction} of tokens with the highest entropy enter the policy term")
    if objective.overlong_filter:
        lines.append("mask        truncated responses are left out")
    if rl.filter_groups_enable:
        lines.append(f"filter      groups whose {rl.filter_groups_metric} does not vary are replaced")
    signal = {"total": "reward does not vary", "parts": "rewards vary in no function"}.get(objective.advantage.group_signal)
    if rl.dynamic_sample and signal:
        lines.append(f"filter      groups whose {signal} are replaced")
    return lines


def _kto_formula(cfg: RunConfig) -> str:
    train = cfg.actor_config
    up, down = (f"{weight:g} * " for weight in (train.kto_desirable_weight, train.kto_undesirable_weight))
    kl, note = " - KL", "\nKL = max(0, mean over the global batch of log pi - log ref of answers to other prompts)"
    if train.kto_loss_type != "kto":
        kl = note = ""
    margin = f"m = {train.kto_beta:g} * (log pi(answer) - log ref(answer){kl})"
    return f"{margin}\nloss = {up}(1 - sigmoid(m)) where the answer is desirable, {down}(1 - sigmoid(-m)) where not{note}"


def _supervised_formula(cfg: RunConfig) -> str:
    train = cfg.actor_config
    z = "z = (log pi(chosen) - log pi(rejected)) - (log ref(chosen) - log ref(rejected))"
    beta, eps = f"{train.dpo_beta:g}", train.dpo_label_smoothing
    # explain shows the formula of a run file with a dpo_beta of 0, which is out of bounds, too
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
        "cpo": f"loss = -log sigmoid({train.cpo_beta:g} * (log pi(chosen) - log pi(rejected))) + {train.cpo_alpha:g} * "
        "(-mean log pi(chosen))",
        "orpo": f"loss = -log p(chosen) + {train.orpo_lambda:g} * (-log sigmoid(log odds(chosen) - log odds(rejected))), "
        "odds = p / (1 - p), log p the mean log pi",
        "kto": _kto_formula(cfg),
        "orm": "loss = -log sigmoid(score(chosen) - score(rejected))",
        "prm": "loss = cross entropy of the reward token at each placeholder",
    }
    weight = "sg[pi(token)] * " if cfg.stage == "sft" and train.sft_loss_type == "dft" else ""
    if cfg.stage == "sft" and train.sft_loss_type in TOP_K_KINDS.values():
        rest = "lumped into one token" if train.teacher_topk_rest == "lump" else "dropped"
        sums = {"forward_kl": "p (log p - log pi)", "reverse_kl": "pi (log pi - log p)"}
        return (
            f"loss = mean over all trained tokens of the global batch of sum {sums[train.sft_loss_type]} over the teacher's "
            f"stored tokens, p the teacher, the rest {rest}"
        )
    text = forms.get(cfg.stage or "", f"loss = mean over all trained tokens of the global batch of {weight}-log pi(token)")
    if cfg.stage in ("dpo", "simpo") and train.pref_ftx:
        text += f" + {train.pref_ftx:g} * (-log pi(chosen))"
    return text
