"""The rollout that a run file asks for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rollout.protocol import Generated, PartialResponse
from mindspeed_rl.rollout.requests import Sampling, sample_seed
from mindspeed_rl.run import Run
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.admission import Admission, QueueMarks
from mindspeed_rl.trainers.data_responses import MixedRollout
from mindspeed_rl.trainers.group_rollout import GroupRollout
from mindspeed_rl.trainers.group_sources import PartialSource, Requests, StreamingSource
from mindspeed_rl.trainers.model_rewards import ModelRewards
from mindspeed_rl.trainers.prompt_groups import PromptGroup
from mindspeed_rl.trainers.prompt_loader import PromptLoader
from mindspeed_rl.trainers.response_mixture import ResponseMixture
from mindspeed_rl.trainers.rollout import FilteredRollout, GroupFilter, Rollout, SynchronousRollout
from mindspeed_rl.workers.fleet import Fleet
from mindspeed_rl.workers.responses import get_sampling_seed
from mindspeed_rl.workers.reward_group import RewardGroup
from mindspeed_rl.workers.server_rollout import ServerRollout


@dataclass(frozen=True)
class _TrainerDevices:
    """The engines on the trainers' devices; see `ElasticEngines`."""

    servers: ServerRollout
    marks: QueueMarks

    @classmethod
    def choose(cls, run: Run, servers: ServerRollout) -> _TrainerDevices | None:
        """Return them where the run file lets them generate."""
        rl, prompts = run.rl, run.plan.num_train_prompts
        marks = QueueMarks(rl.elastic_rollout_low * prompts, rl.elastic_rollout_high * prompts)
        return cls(servers, marks) if rl.elastic_rollout else None

    def wake(self) -> list[WorkerReport]:
        """See `ElasticEngines`."""
        return self.servers.wake_elastic()

    def sleep(self) -> list[WorkerReport]:
        """See `ElasticEngines`."""
        return self.servers.sleep_elastic()


def build_rollout(
    run: Run,
    plane: DataPlane,
    actors: Fleet,
    rewards: RewardGroup,
    loader: PromptLoader,
    admission: Admission,
    model_rewards: ModelRewards,
) -> Rollout:
    """Build the rollout that the run file asks for.

    Args:
        model_rewards: adds its scores before groups are filtered.
    """
    rl, plan, run_seed = run.rl, run.plan, get_sampling_seed(run)
    assert run.objective is not None
    group_filter = GroupFilter.from_config(rl, plan.n_samples_per_prompt, run.objective, model_rewards.part_weights)

    def derive_seed(prompt: int, sample: int) -> int:
        # the seed of a rollout that generates for all prompts of an iteration at once
        rollout_index, index = divmod(prompt, plan.num_prompts)
        return sample_seed(run_seed, rollout_index, index, sample)

    async def score(group: PromptGroup) -> list[RewardResult]:
        items = [group.item] * len(group.samples)
        # a wait for Ray, which in the loop would stop the messages of all servers
        return await asyncio.to_thread(rewards.score_now, items, group.trajectories)

    def continue_in_order(responses: Sequence[PartialResponse], num_tokens: int) -> tuple[list[WorkerReport], list[Generated]]:
        continued = actors.continue_responses(responses, num_tokens)
        replicas = [generated for _, generated in continued if generated is not None]
        # replica i of n continues every n-th response from i on
        ordered = [replicas[index % len(replicas)][index // len(replicas)] for index in range(len(responses))]
        return [report for report, _ in continued], ordered

    build_requests = partial(
        Requests,
        loader.item,
        derive_seed,
        group_size=plan.n_samples_per_prompt,
        num_spare=rl.spare_samples_per_prompt,
        keeps_spare=rl.keep_spare_samples,
    )

    source: StreamingSource | PartialSource
    if rl.trainer_mode != "sync":
        servers = actors.servers
        if servers is None:
            raise ValueError(f"rl_config.trainer_mode {rl.trainer_mode}: there is no rollout engine with devices of its own")
        source = StreamingSource(
            servers.servers.pool,
            servers.agents,
            servers.servers.loop,
            build_requests(sampling=servers.sampling),
            admission,
            score,
            interrupts=rl.trainer_mode == "async" and rl.partial_rollout,
            num_warmup_batches=rl.num_warmup_batches if rl.trainer_mode == "async" else 1,
            timeout_s=run.deadlines.rows_s,
            keep_alive=servers.keep_alive,
            generating=servers.generating,
            elastic=_TrainerDevices.choose(run, servers),
        )
    elif rl.partial_rollout_max_split > 1:
        max_tokens = run.generate.sampling_config.max_tokens
        requests = build_requests(sampling=Sampling(0.0, max_tokens, ()))  # the engine has the temperature
        slice_tokens = math.ceil(max_tokens / rl.partial_rollout_max_split)
        source = PartialSource(continue_in_order, requests, admission, slice_tokens, rl.over_sample_rate)
    else:
        synchronous = SynchronousRollout(actors, rewards, loader, plan.num_samples, blocking=rl.blocking)
        if (mixture := ResponseMixture.choose(run)) is not None:
            return MixedRollout(mixture, synchronous, plane, rewards, loader, plan.n_samples_per_prompt)
        if group_filter is None:
            return synchronous
        return FilteredRollout(run, plane, loader, synchronous, group_filter, model_rewards)
    return GroupRollout(run, plane, rewards, loader, source, group_filter, model_rewards)
