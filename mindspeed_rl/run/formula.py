"""The loss of a run as readable lines: the formulas of the catalogue with the run's numbers in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from mindspeed_rl.catalogue.formulas import (
    ADDED_LOSSES,
    DISTILLATION_LINES,
    LAST_LINES,
    LINES,
    SUPERVISED,
    TERMS,
    Formula,
)
from mindspeed_rl.catalogue.objective import Objective
from mindspeed_rl.catalogue.records import Algorithm
from mindspeed_rl.config.keys.generate import GenerateConfig, SamplingConfig
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.run.record import Run

#: keys of sampling that are numbers -> the values with which all tokens stay as likely as they are
_NEUTRAL = {"repetition_penalty": (1.0,), "presence_penalty": (0.0,), "frequency_penalty": (0.0,)}
#: types of the router's balance -> what the loss is averaged over
_BALANCED_OVER = {"aux_loss": "micro-batches, by tokens", "seq_aux_loss": "sequences"}


def formula(run: Run) -> str:
    """Return the loss in use as readable lines with the run's numbers in them."""
    cfg, objective = run.config, run.objective
    numbers = _read_model_numbers(cfg)
    added = {item.name: item for item in ADDED_LOSSES if all(numbers[name] for name in item.needs)}
    weights = [f"{numbers[item.weight]:g} * {name}" for name, item in added.items()]
    forms = [f"{name} = {item.formula.fill(numbers)}" for name, item in added.items()]
    if objective is None or cfg.rl_config is None:
        loss = SUPERVISED.get(cfg.stage or "", SUPERVISED["pretrain"]).fill(numbers)
        return "\n".join([" + ".join([loss, *weights]), *forms])
    numbers = _read_numbers(run, objective)
    term = objective.distillation
    terms = [*filter(None, (item.fill(numbers) for item in TERMS)), *weights]
    lines = [
        *_fill(LINES, numbers),
        *([] if term is None else _fill(DISTILLATION_LINES, term.numbers())),
        *(_label("added", form) for form in forms),
        _label("loss", " + ".join(terms).replace("+ - ", "- ")),
        *_fill(LAST_LINES, numbers),
    ]
    return "\n".join(lines)


def _label(label: str, text: str) -> str:
    return f"{label:<12}{text}"


def _fill(formulas: Iterable[Formula], numbers: Mapping[str, object]) -> list[str]:
    """Return the lines of the formulas that are not empty."""
    texts = ((item.label, item.fill(numbers)) for item in formulas)
    return [_label(label, text) for label, text in texts if text]


def _describe(record: Algorithm, numbers: dict[str, Any]) -> str:
    """Return the record's formula, or its target where it has none."""
    text = record.format_formula(numbers)
    return f"{record.target} (brings no formula)" if text is None else text


def _read_numbers(run: Run, objective: Objective) -> dict[str, Any]:
    """Return what the lines of reinforcement learning name."""
    numbers, rl, term, correction = objective.numbers(), run.rl, objective.distillation, objective.correction
    return {
        **numbers,
        **_read_sampling(run.config.generate_config),
        "advantage": _describe(objective.advantage, numbers),
        "loss": _describe(objective.loss, numbers),
        "kl": _describe(objective.kl, numbers),
        "correction": None if correction is None else _describe(correction, numbers),
        "normalizer": objective.normalizer,
        "max_response_length": "max_tokens" if objective.max_response_length is None else objective.max_response_length,
        "kl_limits": objective.kl.clamp if objective.kl_clamp else None,
        "kl_in_loss": objective.kl_in_loss,
        "entropy_sign": "- " if objective.entropy_coeff > 0 else "",
        "entropy_weight": abs(objective.entropy_coeff),
        "trains_policy": term is None or term.trains_policy,
        "distillation_in_loss": term is not None and not term.use_policy_gradient,
        "distillation_coef": 0.0 if term is None else term.coef,
        "supervised_coef": 0.0 if term is None else term.supervised_coef,
        "masks_by_entropy": objective.masks_by_entropy,
        "group_signal": objective.advantage.group_signal,
        "has_critic": objective.has_critic,
        **{name: getattr(rl, name) for name in ("filter_groups_enable", "filter_groups_metric", "dynamic_sample")},
    }


def _read_sampling(generate: GenerateConfig | None) -> dict[str, Any]:
    """Return the temperature, and the keys of sampling that leave tokens out or change how likely they are."""
    keys = SamplingConfig() if generate is None else generate.sampling_config
    neutral = {"top_k": keys.top_k < 1, "top_p": keys.top_p >= 1.0, "min_p": keys.min_p <= 0.0}
    neutral |= {name: getattr(keys, name) in values for name, values in _NEUTRAL.items()}
    limits = [f"{name} {getattr(keys, name):g}" for name, is_neutral in neutral.items() if not is_neutral]
    limits += [f"structured_output ({', '.join(keys.structured_output)})"] if keys.structured_output else []
    return {
        "has_rollout": generate is not None,
        "temperature": keys.temperature,
        "sampling_limits": " and ".join(limits),
    }


def _read_model_numbers(cfg: RunConfig) -> dict[str, Any]:
    """Return what the formulas of supervised stages and of added losses name: keys of the actor, and numbers from them."""
    train = cfg.actor_config
    numbers = {item.name: getattr(train, item.name) for item in fields(train)}
    # where neither the run file nor the model's config.json has one, it is 0
    derived = cfg.derived.get("actor_config.moe_aux_loss_coeff")
    balance = float(derived.value) if derived else 0.0
    over = _BALANCED_OVER.get(train.moe_router_load_balancing_type)
    return {
        **numbers,
        "mtp_detach_heads": not cfg.is_supervised if train.mtp_detach_heads is None else train.mtp_detach_heads,
        "moe_aux_loss_coeff": balance if train.moe_aux_loss_coeff is None else train.moe_aux_loss_coeff,
        "balanced_over": _BALANCED_OVER["seq_aux_loss"] if over and train.seq_aux else over,
        "dpo_label_right": 1 - train.dpo_label_smoothing,
        # explain shows the formula of a run file with a dpo_beta of 0, which is out of bounds, too
        "dpo_margin": 1 / (2 * train.dpo_beta) if train.dpo_beta else float("inf"),
        "simpo_gamma": train.gamma_beta_ratio * train.simpo_beta,
    }
