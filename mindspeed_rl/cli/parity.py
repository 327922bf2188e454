"""Replay a saved rollout batch through the advantages and the loss, on the CPU.

Writes the loss, the advantages and the gradient of the loss with respect to log_probs, so that another implementation
can be compared with this one number by number on the same batch. The format of the batch is described in
mindspeed_rl/algorithms/rollout_file.py.

With --engines NAME,NAME the argument is a run file, and training engines are compared on two steps of its actor.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mindspeed_rl.algorithms.advantages import compute_advantages
from mindspeed_rl.algorithms.interfaces import AdvantageInputs, PolicyBatch
from mindspeed_rl.algorithms.kl import kl_penalty
from mindspeed_rl.algorithms.masks import entropy_threshold, filter_overlong
from mindspeed_rl.algorithms.policy_losses import policy_loss
from mindspeed_rl.algorithms.rollout_file import RolloutBatch
from mindspeed_rl.catalogue.objective import Objective
from mindspeed_rl.cli import engine_parity
from mindspeed_rl.cli.options import print_status
from mindspeed_rl.config import RLConfig
from mindspeed_rl.config.compat.aliases import apply_aliases
from mindspeed_rl.config.keys.schema import build
from mindspeed_rl.files import write_file
from mindspeed_rl.observability.metrics import merge
from mindspeed_rl.rewards.samples import select_reward_functions
from mindspeed_rl.run.objective import build_objective, unusable_plugins
from mindspeed_rl.run.rules.objective_rules import algorithm_violations

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Replay:
    """Result of a replay.

    Attributes:
        loss, loss_sum, count: the loss is loss_sum / count.
        advantages, returns, gradients: [B, R]; gradients are d loss / d log_probs.
        metrics: by name.
        objective: all settings of advantages and loss.
    """

    loss: float
    loss_sum: float
    count: int
    advantages: Tensor
    returns: Tensor
    gradients: Tensor
    metrics: dict[str, float]
    objective: Objective


def replay(batch: RolloutBatch, overrides: dict[str, Any], dtype: torch.dtype, micro_batch_size: int | None = None) -> Replay:
    """Return loss, advantages and gradients of the batch.

    Args:
        overrides: keys of rl_config that take the place of the batch's own.
        micro_batch_size: rows of one call of the loss; None takes all rows at once. The result does not depend on it.

    Raises:
        ValueError: a key, a value or a column that does not fit.
    """
    config = rl_config(batch, overrides)
    columns = {
        name: column.to(dtype) if column.is_floating_point() else column
        for name, column in batch.columns.items()
        if name != "input_ids"
    }
    objective = build_objective(config, batch.stage, max_response_length=batch.max_response_length, group_size=batch.group_size)
    inputs = _advantage_inputs(config, objective, columns)
    violations = [violation.message for violation in algorithm_violations(config, objective)]
    violations += [
        f"adv_estimator {objective.adv_estimator} needs {missing}" for missing in inputs.list_missing(objective.advantage.needs)
    ]
    if objective.distillation is not None:
        violations.append("rl_config.distillation: a rollout file has no log-probs of teachers; replay with enabled: false")
    if violations:
        raise ValueError("\n".join(violations))
    advantages, returns, metrics = compute_advantages(inputs, objective)
    threshold = None
    if objective.masks_by_entropy:
        if "entropy" not in columns:
            raise ValueError("top_entropy_quantile needs the column entropy")
        threshold = entropy_threshold([(columns["entropy"], _loss_mask(objective, columns))], objective.top_entropy_quantile)
    if "marked" not in columns and (marks := objective.loss.load_marks()) is not None:
        old_log_probs, mask = _find_old_log_probs(objective, columns), _loss_mask(objective, columns)
        columns["marked"] = marks(advantages, old_log_probs, mask, objective, torch.Generator().manual_seed(0))

    log_probs = columns["log_probs"].clone().requires_grad_()
    num_rows = log_probs.shape[0]
    size = micro_batch_size or num_rows
    outputs = [
        policy_loss(_policy_batch(objective, columns, log_probs, advantages, threshold, slice(start, start + size)), objective)
        for start in range(0, num_rows, size)
    ]
    count = sum(int(output.count) for output in outputs)
    if not count:
        raise ValueError("the rollout batch has no token that trains")
    loss_sum = sum((output.loss_sum for output in outputs), start=log_probs.new_zeros(()))
    (gradients,) = torch.autograd.grad(loss_sum / count, log_probs)
    return Replay(
        loss=loss_sum.item() / count,
        loss_sum=loss_sum.item(),
        count=count,
        advantages=advantages,
        returns=returns,
        gradients=gradients,
        metrics=merge([metrics, *(output.metrics for output in outputs)]).results(),
        objective=objective,
    )


def rl_config(batch: RolloutBatch, overrides: dict[str, Any]) -> RLConfig:
    """Return the batch's rl_config with some keys replaced, checked key by key."""
    errors: list[str] = []
    config, set_keys = build(RLConfig, {**batch.rl_config, **overrides}, "rl_config", errors)
    if not errors:
        config, _, _ = apply_aliases(config, None, {"rl_config": set_keys})
        errors += unusable_plugins(config, batch.stage)
    if errors:
        raise ValueError("\n".join(errors))
    return config


def _find_old_log_probs(objective: Objective, columns: dict[str, Tensor]) -> Tensor:
    """Return log-probs of the old policy: [B, R]; without a column for them, the file's only or recorded log-probs."""
    recorded = "rollout_log_probs" if objective.reads_rollout_policy else "log_probs"
    if recorded not in columns:
        raise ValueError(f"old_log_probs rollout needs the column {recorded}")
    return columns.get("old_log_probs", columns[recorded])


def _loss_mask(objective: Objective, columns: dict[str, Tensor]) -> Tensor:
    mask = columns.get("loss_mask", columns["response_mask"])
    if not objective.overlong_filter:
        return mask
    if "truncated" not in columns:
        raise ValueError("overlong_filter needs the column truncated")
    return filter_overlong(mask, columns["truncated"])


def _advantage_inputs(config: RLConfig, objective: Objective, columns: dict[str, Tensor]) -> AdvantageInputs:
    kl = None
    if objective.kl_place == "reward":
        old_log_probs = _find_old_log_probs(objective, columns)
        if "ref_log_probs" not in columns:
            raise ValueError("use_kl_in_reward needs the column ref_log_probs")
        kl = kl_penalty(old_log_probs, columns["ref_log_probs"], objective.kl, clamp=objective.kl_clamp)
    return AdvantageInputs(
        columns["rewards"],
        columns["response_mask"],
        group_size=objective.group_size,
        scored=columns.get("scored"),
        kl=kl,
        kl_coef=objective.kl_in_reward,
        values=columns.get("values"),
        greedy_rewards=columns.get("greedy_rewards"),
        reward_components=columns.get("reward_components"),
        reward_weights=_component_weights(config, columns),
        old_log_probs=_find_old_log_probs(objective, columns),
        squared_probs=columns.get("squared_probs"),
    )


def _component_weights(config: RLConfig, columns: dict[str, Tensor]) -> tuple[float, ...] | None:
    """Return the weights of the reward components if the run file's keys have as many; None otherwise."""
    if "reward_components" not in columns:
        return None
    weights = (*select_reward_functions(config)[1], config.reward_model_weight)
    count = columns["reward_components"].shape[1]
    # the last weight is the reward model's, and not every batch has a column of one
    return weights[:count] if count in (len(weights), len(weights) - 1) else None


def _policy_batch(
    objective: Objective,
    columns: dict[str, Tensor],
    log_probs: Tensor,
    advantages: Tensor,
    threshold: float | None,
    rows: slice,
) -> PolicyBatch:
    names = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "entropy", "marked")
    optional: dict[str, Any] = {name: columns[name][rows] for name in names if name in columns}
    return PolicyBatch(
        log_probs[rows],
        advantages[rows],
        columns["response_mask"][rows],
        _loss_mask(objective, columns)[rows],
        entropy_threshold=threshold,
        **optional,
    )


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r} is not of the form key=value")
    try:
        return key.removeprefix("rl_config."), json.loads(value)
    except json.JSONDecodeError:
        return key.removeprefix("rl_config."), value


def main(argv: list[str]) -> int:
    """Run `mindspeed-rl parity`; return the exit status, 2 for an error in the arguments or the batch."""
    if any(word.partition("=")[0] == "--engines" for word in argv):
        return engine_parity.main(argv)
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl parity", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("batch", type=Path, help="NAME.safetensors; with NAME.json next to it")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of rl_config in place of the batch's own")
    # in float64 a difference comes from a formula, not from rounding
    parser.add_argument("--dtype", choices=_DTYPES, default="float64", help="precision of the replay")
    parser.add_argument(
        "--micro-batch-size", type=int, default=None, help="rows of one call of the loss; the result is the same"
    )
    parser.add_argument("--output", type=Path, default=None, help="OUT.safetensors; default NAME_parity.safetensors")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    # overrides may be between the flags
    arguments = parser.parse_intermixed_args(argv)
    if arguments.micro_batch_size is not None and arguments.micro_batch_size < 1:
        parser.error(f"--micro-batch-size must be at least 1, not {arguments.micro_batch_size}")
    try:
        batch = RolloutBatch.load(arguments.batch)
        result = replay(batch, dict(map(_override, arguments.overrides)), _DTYPES[arguments.dtype], arguments.micro_batch_size)
    except ValueError as error:
        print_status(str(error))
        return 2

    output = arguments.output or arguments.batch.with_name(f"{arguments.batch.stem}_parity.safetensors")
    tensors = {"advantages": result.advantages, "returns": result.returns, "gradients": result.gradients}
    # safetensors refuses tensors that share memory, as advantages and returns may
    save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, output)
    summary = {
        "loss": result.loss,
        "loss_sum": result.loss_sum,
        "count": result.count,
        "dtype": arguments.dtype,
        "tensors": output.name,
        "settings": result.objective.numbers() | {"kl_coef": result.objective.kl_in_loss},
        "metrics": result.metrics,
    }
    write_file(output.with_suffix(".json"), json.dumps(summary, indent=2) + "\n")
    if arguments.json:
        print(json.dumps(summary))
    else:
        how = f"{result.objective.loss_type}, {arguments.dtype}"
        print(f"loss {result.loss:.9g} = {result.loss_sum:.9g} / {result.count}  ({how})")
        print(f"gradient norm {result.gradients.norm().item():.9g}, advantages and gradients in {output}")
        for name, value in result.metrics.items():
            print(f"{name} {value:.6g}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
