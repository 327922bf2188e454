"""Scores of a reward model: on the actor's devices between its phases, or by workers on devices of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed_rl.config import BatchPlan, RunConfig
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Timers
from mindspeed_rl.workers.model_source import find_model, load_tokenizer_of, reward_model_config
from mindspeed_rl.workers.replica import Replica
from mindspeed_rl.workers.scoring import Scoring
from mindspeed_rl.workers.worker import Worker, WorkerReport
from mindspeed_rl.workers.world import join_world, prepare_process

if TYPE_CHECKING:  # these import Megatron, which the worker first has to prepare for
    from mindspeed_rl.engine.train_engine import MicroBatching
    from mindspeed_rl.workers.role import Role


class RewardModel:
    """A reward model on this rank. Methods are collective over its training world."""

    def __init__(
        self,
        role: Role,
        scoring: Scoring,
        replica: Replica,
        timers: Timers,
        batching: Callable[[], MicroBatching],
        rest: Callable[[Role], None],
    ) -> None:
        """Wraps a built role.

        Args:
            batching: limits of a forward pass, asked for each.
            rest: what becomes of the model's memory after a pass.
        """
        self.role, self._scoring, self._replica, self._timers = role, scoring, replica, timers
        self._batching, self._rest = batching, rest

    def score_rows(self, count: int) -> Metrics:
        """The first `count` rows of the data plane have the score of prompt and response."""
        with self._timers("reward_model"):
            for part in self._replica.dispatches(count):
                batch = self._replica.fetch("reward_scores", ["prompt_ids", "responses"], part)
                self._replica.put({"rm_scores": self._scores(list(batch["prompt_ids"]), list(batch["responses"]))}, part)
        return Metrics()

    def score(self, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> list[float] | None:
        """Scores of every dp_size-th response, starting with this replica's number; None on ranks that hand none out."""
        mine = list(range(self._replica.number, len(prompts), self._replica.count))
        missing = -(-len(prompts) // self._replica.count) - len(mine)  # replicas that share experts make equally many passes
        taken = mine + [0] * missing
        scores = self._scores(*([torch.tensor(ids[row]) for row in taken] for ids in (prompts, responses)))
        return scores[: len(mine)] if self._replica.is_output else None

    def _scores(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> list[float]:
        """[] on ranks that hand none out."""
        self.role.offloader.onload(params=True)
        rows = self._scoring.rows(prompts, responses)
        outputs = self.role.engine.forward(rows, self._batching())
        self._rest(self.role)
        return self._scoring.scores(rows, outputs) if self._replica.is_output else []


class RewardModelWorker(Worker):
    """One rank of a reward model that has devices of its own (`reward_resource`)."""

    title = "reward model worker"
    log_name = "reward_model"

    def set_up(self, master: tuple[str, int], local_rank: int, plane: DataPlane) -> dict[str, Any]:
        """Joins the reward model's world and builds it; collective over its workers."""
        self._take_place(master, local_rank)
        self.model = build_alone(self.cfg, self.plan, plane, self.timers)
        self._settle()
        return {}

    def compute_model_rewards(self, count: int) -> WorkerReport:
        """The first `count` rows have the reward model's score."""
        return self._report(self.model.score_rows(count))

    def score(self, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> list[float] | None:
        """The scores of this replica's share of the responses; None on ranks that do not hand results out."""
        return self.model.score(prompts, responses)


def build_alone(cfg: RunConfig, plan: BatchPlan, plane: DataPlane, timers: Timers) -> RewardModel:
    """The reward model of a run in a world of its own; collective over that world."""
    config = reward_model_config(cfg)
    prepare_process(cfg, config)
    from mindspeed_rl.engine.build import plan_model
    from mindspeed_rl.workers.limits import micro_batching
    from mindspeed_rl.workers.roles import build_reward_model, shared_settings

    source = find_model(config, "reward_config")
    actor = cfg.actor_config
    tokenizer = load_tokenizer_of(actor, find_model(actor, "actor_config"))  # it reads the actor's tokens
    join_world(config, plan_model(config, source.hf_folder))
    role, scoring = build_reward_model(cfg, config, tokenizer, shared_settings(cfg, tokenizer))
    replica = Replica(plane, cfg.rl_config.wait_timeout_s)
    batching = micro_batching(cfg.rl_config, "ref", config.micro_batch_size or plan.micro_batch_size)
    return RewardModel(role, scoring, replica, timers, lambda: batching, rest=lambda role: None)
