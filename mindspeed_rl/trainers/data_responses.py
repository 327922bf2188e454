"""Iterations of distillation whose responses are those of the data instead of the student's: GKD, arXiv:2306.13649."""

from __future__ import annotations

from mindspeed_rl.data.prompts import RESPONSE_IDS
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.prompt_loader import PromptLoader
from mindspeed_rl.trainers.response_mixture import ResponseMixture
from mindspeed_rl.trainers.rollout import Rollout, SynchronousRollout
from mindspeed_rl.workers.responses import build_response_columns, compute_response_metrics
from mindspeed_rl.workers.reward_group import RewardGroup


class MixedRollout(Rollout):
    """Responses of the student in some iterations, and of the data in the others."""

    def __init__(
        self,
        mixture: ResponseMixture,
        sampled: SynchronousRollout,
        plane: DataPlane,
        rewards: RewardGroup,
        loader: PromptLoader,
        group_size: int,
    ) -> None:
        """Put nothing yet.

        Args:
            sampled: the rollout by the student.
            group_size: rows of a prompt.
        """
        super().__init__(loader)
        self._mixture, self._sampled = mixture, sampled
        self._plane, self._rewards, self._group_size = plane, rewards, group_size

    def run(self, iteration: int) -> list[WorkerReport]:
        """See `Rollout`; reward functions measure the responses of the data too."""
        is_sampled, metrics = self._mixture.is_sampled(iteration), Metrics()
        metrics.add_mean("distillation/on_policy", float(is_sampled), 1)
        if is_sampled:
            return [*self._sampled.run(iteration), WorkerReport(metrics)]
        self._loader.put()
        trajectories = self._read_trajectories(iteration)
        self._plane.put(build_response_columns(trajectories), range(len(trajectories)))
        metrics.merge(compute_response_metrics(trajectories))
        return [*self._rewards.start(len(trajectories)).wait(), *self._loader.report(), WorkerReport(metrics)]

    def _read_trajectories(self, iteration: int) -> list[Trajectory]:
        """Return the rows of the prompts in the data plane; no engine sampled their tokens, so their log-probs are 0."""
        trajectories: list[Trajectory] = []
        for index in self._loader.batch:
            item = self._loader.item(index)
            ids = item["columns"][RESPONSE_IDS]
            assert isinstance(ids, tuple)
            response = Generated(ids, (0.0,) * len(ids), (iteration,) * len(ids), "stop")
            trajectories += [Trajectory.from_response(item["prompt_ids"], response)] * self._group_size
        return trajectories
