"""The rollout that a run file asks for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from mindspeed_rl.config import Run
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rollout.protocol import Generated, PartialResponse
from mindspeed_rl.rollout.requests import Sampling, sample_seed
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.admission import Admission
from mindspeed_rl.trainers.group_rollout import GroupRollout
from mindspeed_rl.trainers.group_sources import PartialSource, Requests, StreamingSource
from mindspeed_rl.trainers.model_rewards import ModelRewards, NoModelRewards
from mindspeed_rl.trainers.prompt_groups import PromptGroup
from mindspeed_rl.trainers.prompt_loader import PromptLoader
from mindspeed_rl.trainers.rollout import FilteredRollout, GroupFilter, Rollout, SynchronousRollout
from mindspeed_rl.trainers.services import Services
from mindspeed_rl.workers.fleet import Fleet
from mindspeed_rl.workers.responses import sampling_seed


def build_rollout(
    run: Run,
    services: Services,
    loader: PromptLoader,
    admission: Admission,
    model_rewards: ModelRewards | NoModelRewards,
) -> tuple[Rollout, ModelRewards | NoModelRewards]:
    """Build the rollout that the run file asks for; return also the model rewards that are still to be added to its rows.

    A filter on one reward function leaves the reward model only the groups that are kept; one on the total reward needs the
    model's scores of every rollout.
    """
    rl = run.rl
    group_filter = GroupFilter.from_config(rl, run.plan.n_samples_per_prompt)
    reads_total = rl.dynamic_sample and not rl.filter_groups_enable
    before, after = (model_rewards, NoModelRewards()) if reads_total else (NoModelRewards(), model_rewards)
    if rl.trainer_mode != "sync":
        source = _build_streaming_source(run, services, loader, admission)
        return GroupRollout(run, services, loader, source, group_filter, before), after
    if rl.partial_rollout_max_split > 1:
        max_tokens = run.generate.sampling_config.max_tokens
        partial = PartialSource(
            _OrderedContinuation(services.actors),
            # the engine has its sampling
            _build_requests(run, loader, Sampling(0.0, max_tokens, ())),
            admission,
            math.ceil(max_tokens / rl.partial_rollout_max_split),
        )
        return GroupRollout(run, services, loader, partial, group_filter, before), after
    synchronous = SynchronousRollout(run, services, loader)
    if group_filter is not None:
        return FilteredRollout(run, services.plane, synchronous, group_filter, before), after
    return synchronous, after


class _OrderedContinuation:
    """Responses continued by the workers' engines, in order."""

    def __init__(self, actors: Fleet) -> None:
        self._actors = actors

    def __call__(self, responses: Sequence[PartialResponse], num_tokens: int) -> tuple[list[WorkerReport], list[Generated]]:
        continued = self._actors.continue_responses(responses, num_tokens)
        replicas = [generated for _, generated in continued if generated is not None]
        ordered: list[Generated | None] = [None] * len(responses)
        for replica, generated in enumerate(replicas):
            ordered[replica :: len(replicas)] = generated
        return [report for report, _ in continued], [response for response in ordered if response is not None]


def _build_streaming_source(run: Run, services: Services, loader: PromptLoader, admission: Admission) -> StreamingSource:
    rl, engine = run.rl, services.engine
    if engine is None:
        raise ValueError(f"rl_config.trainer_mode {rl.trainer_mode}: there is no rollout engine with devices of its own")

    async def score(group: PromptGroup) -> list[RewardResult]:
        items = [group.item] * len(group.samples)
        # a wait for Ray, which in the loop would stop the messages of all servers
        return await asyncio.to_thread(services.rewards.score_now, items, group.trajectories)

    return StreamingSource(
        engine.engine,
        engine.agents,
        engine.runner,
        _build_requests(run, loader, engine.sampling),
        admission,
        score,
        interrupts=rl.trainer_mode == "async" and rl.partial_rollout,
        num_warmup_batches=rl.num_warmup_batches if rl.trainer_mode == "async" else 1,
        timeout_s=run.deadlines.rows_s,
        keep_alive=engine.keep_alive,
        generating=engine.generating,
    )


def _build_requests(run: Run, loader: PromptLoader, sampling: Sampling) -> Requests:
    """Build requests with the seeds of a rollout that generates for all prompts of an iteration at once."""
    plan, run_seed = run.plan, sampling_seed(run)

    def derive_seed(prompt: int, sample: int) -> int:
        rollout_index, index = divmod(prompt, plan.num_prompts)
        return sample_seed(run_seed, rollout_index, index, sample)

    return Requests(loader.item, derive_seed, sampling, plan.n_samples_per_prompt)
