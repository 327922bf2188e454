"""Which rollout a run file asks for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from mindspeed_rl.config import Run
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rollout.protocol import Generated, Piece
from mindspeed_rl.rollout.requests import Sampling, sample_seed
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.admission import admission_of
from mindspeed_rl.trainers.group_rollout import GroupRollout
from mindspeed_rl.trainers.model_rewards import ModelRewards, NoModelRewards
from mindspeed_rl.trainers.partial import PartialSource
from mindspeed_rl.trainers.prompt_groups import PromptGroup
from mindspeed_rl.trainers.rollout import FilteredRollout, PromptLoader, Rollout, SynchronousRollout
from mindspeed_rl.trainers.services import Services
from mindspeed_rl.trainers.streaming import Requests, StreamingSource
from mindspeed_rl.workers.groups import ActorGroup
from mindspeed_rl.workers.responses import sampling_seed


def make_rollout(
    run: Run, services: Services, feed: PromptLoader, model_rewards: ModelRewards | NoModelRewards
) -> tuple[Rollout, ModelRewards | NoModelRewards]:
    """The rollout that the run file asks for, and the model rewards that are still to be added to what it yields.

    A filter that looks at one reward function leaves the reward model only the groups that are kept; one that looks at the
    total reward needs the model's scores of every draw.
    """
    rl = run.rl
    before, after = (model_rewards, NoModelRewards()) if rl.dynamic_sample else (NoModelRewards(), model_rewards)
    if rl.filter_groups_enable:
        before, after = NoModelRewards(), model_rewards
    if rl.trainer_mode != "sync":
        return GroupRollout(run, services, feed, _streaming(run, services, feed), before), after
    if rl.partial_rollout_max_split > 1:
        most = run.generate.sampling_config.max_tokens
        source = PartialSource(
            _Extended(services.actors), _requests(run, feed), admission_of(run), math.ceil(most / rl.partial_rollout_max_split)
        )
        return GroupRollout(run, services, feed, source, before), after
    synchronous = SynchronousRollout(run, services, feed)
    if rl.filter_groups_enable or rl.dynamic_sample:
        return FilteredRollout(run, services.plane, synchronous, before), after
    return synchronous, after


class _Extended:
    """Responses grown by the workers' engines, in order."""

    def __init__(self, actors: ActorGroup) -> None:
        self._actors = actors

    def __call__(self, pieces: Sequence[Piece], num_tokens: int) -> tuple[list[WorkerReport], list[Generated]]:
        answers = self._actors.continue_responses(pieces, num_tokens)
        shares = [share for _, share in answers if share is not None]
        found: list[Generated | None] = [None] * len(pieces)
        for replica, share in enumerate(shares):
            found[replica :: len(shares)] = share
        return [report for report, _ in answers], [response for response in found if response is not None]


def _streaming(run: Run, services: Services, feed: PromptLoader) -> StreamingSource:
    rl = run.rl
    if services.engine is None:
        raise ValueError(f"rl_config.trainer_mode {rl.trainer_mode}: there is no rollout engine with devices of its own")

    async def score(group: PromptGroup) -> list[RewardResult]:
        items = [group.item] * len(group.samples)
        # a wait for Ray, which in the loop would stop the news of all servers
        return await asyncio.to_thread(services.rewards.score_now, items, group.trajectories)

    return StreamingSource(
        services.engine.engine,
        services.engine.agents,
        services.engine.runner,
        _requests(run, feed, services.engine.sampling),
        admission_of(run),
        score,
        interrupts=rl.trainer_mode == "async" and rl.partial_rollout,
        num_warmup_batches=rl.num_warmup_batches if rl.trainer_mode == "async" else 1,
        timeout_s=run.deadlines.rows_s,
        keep_alive=services.engine.keep_alive,
        generating=services.engine.generating,
    )


def _requests(run: Run, feed: PromptLoader, sampling: Sampling | None = None) -> Requests:
    """Seeds are those of a rollout that draws all prompts of an iteration at once.

    Args:
        sampling: None where the engine has its own.
    """
    plan, seed = run.plan, sampling_seed(run)

    def seed_of(prompt: int, sample: int) -> int:
        draw, place = divmod(prompt, plan.num_prompts)
        return sample_seed(seed, draw, place, sample)

    sampling = sampling or Sampling(0.0, run.generate.sampling_config.max_tokens, ())
    return Requests(feed.item, seed_of, sampling, plan.n_samples_per_prompt)
