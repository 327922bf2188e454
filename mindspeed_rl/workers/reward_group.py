"""The reward functions of a run: one worker a node, on CPUs."""

from __future__ import annotations

import contextlib
from typing import Any

import ray

from mindspeed_rl.config import Run
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.rewards import ACCURACIES
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.workers.cluster import worker_environment
from mindspeed_rl.workers.handles import actor_handle
from mindspeed_rl.workers.reward import RewardWorker
from mindspeed_rl.workers.waiting import Pending, wait_all


class RewardGroup:
    """One reward worker a node, each scoring its share of the rows.

    Attributes:
        accuracies: names of functions that say whether an answer is right; the run's own ones after `check`.
    """

    def __init__(self, run: Run, plane: DataPlane, tokenizer_path: str) -> None:
        self._plane = plane
        self.accuracies = frozenset(ACCURACIES)
        env = worker_environment(run.config, run.platform)
        # Scoring needs no tensors: importing torch_npu in these processes would only claim devices.
        options = {
            "num_cpus": 0,
            "runtime_env": {"env_vars": env | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}},
            "scheduling_strategy": "SPREAD",
        }
        remote = ray.remote(RewardWorker).options(**options)
        self._actors = [actor_handle(remote.remote(run, plane, tokenizer_path, number)) for number in range(run.num_nodes)]

    def check(self, prompt_ids: list[int], label: str | None, columns: dict[str, Any]) -> None:
        """Every reward function gives a score to a sample."""
        (found,) = wait_all([self._actors[0].check.remote(prompt_ids, label, columns)], ["reward worker"], "check", None)
        self.accuracies |= frozenset(found)

    def score_now(self, items: list[PromptItem], trajectories: list[Trajectory]) -> list[RewardResult]:
        """Scores of given trajectories, in order."""
        share = -(-len(items) // len(self._actors))
        futures = [
            actor.score_now.remote(*(part[number * share : (number + 1) * share] for part in (items, trajectories)))
            for number, actor in enumerate(self._actors)
        ]
        parts = wait_all(futures, [f"reward worker {number}" for number in range(len(futures))], "score_now", self._plane)
        return [result for part in parts for result in part]

    def start(self, num_rows: int) -> Pending:
        """Starts scoring; rows are taken as soon as they are generated."""
        share = -(-num_rows // len(self._actors))
        futures = [
            actor.score.remote(list(range(number * share, min(num_rows, (number + 1) * share))))
            for number, actor in enumerate(self._actors)
        ]
        return Pending(futures, [f"reward worker {number}" for number in range(len(futures))], "score", self._plane)

    def close(self) -> None:
        """Ends the workers and their pools."""
        with contextlib.suppress(Exception):
            ray.get([actor.close.remote() for actor in self._actors], timeout=10)
        for actor in self._actors:
            ray.kill(actor)
