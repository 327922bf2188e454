"""Scores of a reward model: on the actor's devices between its phases, or by workers on devices of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mindspeed_rl.checkpoint.model_source import find_model, load_tokenizer_of
from mindspeed_rl.config import Run
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.engine.parallel import init_distributed
from mindspeed_rl.engine.train_engine import MicroBatching
from mindspeed_rl.models.model_keys import reward_model_config
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.runtime.device_memory import PhaseMemory
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.workers.device_worker import DeviceWorker
from mindspeed_rl.workers.limits import micro_batching
from mindspeed_rl.workers.replica import Replica
from mindspeed_rl.workers.role import Role
from mindspeed_rl.workers.roles import build_reward_model, shared_settings
from mindspeed_rl.workers.scoring import Scoring


class RewardModel:
    """A reward model on this rank. Methods are collective over its training world."""

    def __init__(
        self,
        role: Role,
        scoring: Scoring,
        replica: Replica,
        batching: MicroBatching,
        rest: Callable[[Role], None] | None = None,
    ) -> None:
        """Wraps a built role.

        Args:
            batching: limits of a forward pass.
            rest: what becomes of the model's memory after a pass; None leaves it.
        """
        self._role, self._scoring, self._replica = role, scoring, replica
        self._batching, self._rest = batching, rest

    def score_rows(self, count: int) -> None:
        """The first `count` rows of the data plane have the score of prompt and response."""
        for part in self._replica.dispatches(count):
            batch = self._replica.fetch("reward_scores", ["prompt_ids", "responses"], part)
            self._replica.put({"rm_scores": self._scores(list(batch["prompt_ids"]), list(batch["responses"]))}, part)

    def score(self, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> list[float] | None:
        """Scores of every dp_size-th response, starting with this replica's number; None on ranks that hand none out."""
        mine = list(range(self._replica.number, len(prompts), self._replica.count))
        missing = -(-len(prompts) // self._replica.count) - len(mine)  # replicas that share experts make equally many passes
        taken = mine + [0] * missing
        scores = self._scores(*([torch.tensor(ids[row]) for row in taken] for ids in (prompts, responses)))
        return scores[: len(mine)] if self._replica.is_output else None

    def _scores(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> list[float]:
        """[] on ranks that hand none out."""
        self._role.offloader.onload(params=True)
        rows = self._scoring.rows(prompts, responses)
        outputs = self._role.engine.forward(rows, self._batching)
        if self._rest is not None:
            self._rest(self._role)
        if not self._replica.is_output:
            return []
        assert outputs is not None  # who hands out is on the last pipeline stage
        return self._scoring.scores(rows, outputs)


class RewardModelWorker(DeviceWorker):
    """One rank of a reward model that has devices of its own (`reward_resource`)."""

    def __init__(self, run: Run, plane: DataPlane, *, rank: int) -> None:
        """Joins the reward model's world and builds it."""
        super().__init__(run, rank, "reward_model")
        config = reward_model_config(run.config)
        assert config is not None
        source = find_model(config, "reward_config")
        actor = run.config.actor_config
        tokenizer = load_tokenizer_of(actor, find_model(actor, "actor_config"))  # it reads the actor's tokens
        init_distributed(config, plan_model(config, source.hf_folder).layout.vpp)
        role, scoring = build_reward_model(run, config, tokenizer, shared_settings(run, tokenizer))
        batching = micro_batching(run.rl, "ref", config.micro_batch_size or run.plan.micro_batch_size)
        self._model = RewardModel(role, scoring, Replica(plane, run.deadlines.rows_s), batching)
        self.memory = PhaseMemory(role.offloader.resident_bytes)

    def compute_model_rewards(self, count: int) -> WorkerReport:
        """The first `count` rows have the reward model's score."""
        metrics = Metrics()
        with self.timers("reward_model"), self.memory("reward model pass", "activations", metrics):
            self._model.score_rows(count)
        return self._report(metrics)

    def score(self, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> list[float] | None:
        """The scores of this replica's share of the responses; None on ranks that do not hand results out."""
        return self._model.score(prompts, responses)
