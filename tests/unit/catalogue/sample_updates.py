"""Losses of small updates, computed as driver and workers compute them, and edits of the functions on the way."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "data"))

from byte_tokenizer import build_tokenizer

from mindspeed_rl import registry
from mindspeed_rl.algorithms.advantages import compute_advantages
from mindspeed_rl.algorithms.distillation import compute_weighted_divergence
from mindspeed_rl.algorithms.interfaces import AdvantageInputs, LossInputs, LossOutput, PolicyBatch
from mindspeed_rl.algorithms.kl import kl_penalty
from mindspeed_rl.algorithms.masks import entropy_threshold
from mindspeed_rl.algorithms.policy_losses import policy_loss
from mindspeed_rl.catalogue.objective import Objective
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.head_outputs import TeacherDivergence
from mindspeed_rl.workers.model_worker import _critic_loss
from mindspeed_rl.workers.stages import STAGES

#: prompts, tokens of a response, tokens of a teacher at each position
GROUPS, WIDTH, TOP_K = 2, 5, 3


@contextmanager
def edited(function: Callable[..., Any], edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Edit the result of a function, the first of several or the sum of a loss, as an edit of its file would.

    The code of the function is replaced, not a name that refers to it: whoever has imported the function runs the edit.
    """
    assert isinstance(function, types.FunctionType) and function.__closure__ is None
    code, names = function.__code__, function.__globals__
    original = types.FunctionType(code, names, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__

    def change(result: Any) -> Any:
        if isinstance(result, LossOutput):
            return replace(result, loss_sum=edit(result.loss_sum))
        return (edit(result[0]), *result[1:]) if isinstance(result, tuple) else edit(result)

    names |= {"_original": original, "_change": change}
    function.__code__ = eval("lambda *args, **kwargs: _change(_original(*args, **kwargs))").__code__
    try:
        yield
    finally:
        function.__code__ = code
        del names["_original"], names["_change"]


def _random_rows(seed: int, rows: int) -> tuple[Callable[..., Tensor], Tensor]:
    """Return a source of random numbers in (0, 1), [rows, WIDTH] by default, and a mask with a gap in its first row."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(WIDTH) < torch.randint(2, WIDTH + 1, (rows, 1), generator=generator)
    mask[0, :3] = torch.tensor([True, False, True])
    return lambda *shape: torch.rand(shape or (rows, WIDTH), generator=generator), mask


def compute_policy_update(objective: Objective) -> tuple[float, list[float]]:
    """Return the loss of the actor's update on random rows, from their scores on, and its gradient."""
    rows, term = GROUPS * objective.group_size, objective.distillation
    uniform, mask = _random_rows(0, rows)
    log_probs = (-3.0 * uniform()).requires_grad_()
    old, ref, rollout = (log_probs.detach() + uniform() - 0.5 for _ in range(3))
    rewards = uniform(rows)
    if term is not None and not term.use_task_rewards:
        rewards = torch.zeros_like(rewards)
    offered = {
        "values": ("values", uniform()),
        "old_log_probs": ("old_log_probs", old),
        "squared_probs": ("squared_probs", uniform()),
        "greedy_baseline": ("greedy_rewards", uniform(rows)),
        "reward_parts": ("reward_components", uniform(rows, 2)),
    }
    given: dict[str, Any] = dict(offered[need] for need in objective.advantage.needs)
    if objective.kl_place == "reward":
        given |= {"kl": kl_penalty(old, ref, objective.kl, clamp=objective.kl_clamp), "kl_coef": objective.kl_coef}
    scores = AdvantageInputs(rewards, mask, group_size=objective.group_size, **given)
    advantages, _, _ = compute_advantages(scores, objective)

    entropies = uniform()
    columns = {"advantages": advantages, "scored_mask": mask, "loss_mask": mask, "entropies": entropies}
    columns |= {"old_log_probs": old, "rollout_log_probs": rollout}
    if objective.loss_reads_ref:
        columns["ref_log_probs"] = ref
    if (marks := objective.loss.load_marks()) is not None:
        columns["marked_tokens"] = marks(advantages, old, mask, objective, torch.Generator().manual_seed(0))
    outputs = [log_probs, uniform()]
    if term is not None and term.estimator is not None:
        columns["teacher_log_probs"] = -3.0 * uniform(rows, WIDTH, len(term.weights))
    elif term is not None:
        student, teacher = (uniform(rows * WIDTH, len(term.weights) * TOP_K).log() - 2.0 for _ in range(2))
        outputs += [values.view(rows, WIDTH) for values in compute_weighted_divergence(student.requires_grad_(), teacher, term)]
    threshold = entropy_threshold([(entropies, mask)], objective.top_entropy_quantile) if objective.masks_by_entropy else None

    loss = partial(policy_loss, objective=replace(objective, kl_coef=objective.kl_coef))
    batch = partial(PolicyBatch.from_inputs, entropy_threshold=threshold)
    output = loss(batch(LossInputs(tuple(outputs), mask, columns)))
    output.loss_sum.backward()
    gradient = torch.zeros_like(log_probs) if log_probs.grad is None else log_probs.grad
    return output.loss_sum.item() / output.count.item(), gradient.flatten().tolist()


def compute_critic_update(objective: Objective) -> float:
    """Return the loss of the critic's update on random rows."""
    uniform, mask = _random_rows(1, GROUPS)
    columns = {"loss_mask": mask, "values": uniform(), "returns": uniform()}
    output = _critic_loss(LossInputs((uniform(),), mask, columns), clip_range=objective.cliprange_value)
    return output.loss_sum.item() / output.count.item()


def compute_supervised_update(name: str, config: MegatronConfig) -> float:
    """Return the loss of a supervised stage on random rows."""
    stage = registry.load(STAGES[name], "stage")(config, build_tokenizer())
    uniform, mask = _random_rows(2, 4)
    columns = {"loss_mask": mask, "ref_log_probs": -9.0 * uniform(4), "desirable": uniform(4) > 0.5, "kl": uniform(4)}
    columns["judgements"] = torch.zeros_like(mask, dtype=torch.int64)
    outputs = [-3.0 * uniform() for _ in range(stage.outputs.count)]
    if isinstance(stage.outputs, TeacherDivergence):
        student, teacher = (uniform(4 * WIDTH, TOP_K).log() - 2.0 for _ in range(2))
        outputs[2:] = [values.view(4, WIDTH) for values in stage.outputs.divergence(student, teacher)]
    output = stage.loss(LossInputs(tuple(outputs), mask, columns))
    return output.loss_sum.item() / output.count.item()
