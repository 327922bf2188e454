"""The length of a run whose run file sets it in passes over the data."""

from __future__ import annotations

import dataclasses
import math

from mindspeed_rl.config.keys import ROLE_GROUPS
from mindspeed_rl.run import Run
from mindspeed_rl.run.resume import check_remaining_iterations


def resolve_length(run: Run, num_prompts: int, done: tuple[int, int] = (0, 0)) -> Run:
    """Return the run with the iterations of its train_epochs over so many prompts or rows; itself where it has train_iters.

    Args:
        run: with its batch.
        num_prompts: number of prompts of its data.
        done: iterations before a resume, and prompts of their rollouts, which may have been of another number.

    Raises:
        ValueError: nothing is left to do after the point that it resumes from.
    """
    epochs = run.config.actor_config.train_epochs
    if epochs is None:
        return run
    rl = run.config.rl_config
    visits = epochs * (2 if rl is not None and rl.keep_spare_samples else 1)  # a prompt trains as two groups
    iters = done[0] + max(0, math.ceil((visits * num_prompts - done[1]) / run.plan.num_prompts))
    # the learning rate of each role follows its train_iters
    roles = {
        name: dataclasses.replace(role, train_iters=iters)
        for name in ("megatron_training", *ROLE_GROUPS)
        if (role := getattr(run.config, name)) is not None
    }
    models = {
        role: dataclasses.replace(model, config=dataclasses.replace(model.config, train_iters=iters))
        for role, model in run.models.items()
    }
    longer = dataclasses.replace(
        run,
        config=dataclasses.replace(run.config, **roles),
        models=models,
    )
    if run.resume is not None:
        check_remaining_iterations(longer, run.resume)
    return longer
