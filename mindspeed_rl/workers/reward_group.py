"""The reward functions of a run: one worker a node, on CPUs; one that is lost is replaced."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle

from mindspeed_rl.config import Run
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.process_status import remove_status_files, terminate_processes
from mindspeed_rl.rewards import ACCURACIES
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.runtime.cluster import build_runtime_env, build_worker_environment, cast_handle
from mindspeed_rl.runtime.futures import Pending, WaitMonitor, wait_all
from mindspeed_rl.workers.reward import RewardWorker

_LOG = logging.getLogger(__name__)
#: reward workers that a run replaces before it gives up: what kills more of them is no accident
_MOST_REPLACED = 5


class RewardGroup:
    """One reward worker a node, each scoring its share of the rows.

    Attributes:
        accuracies: names of functions that say whether an answer is right; the run's own ones after `check`.
    """

    def __init__(self, run: Run, plane: DataPlane, tokenizer_path: str) -> None:
        self._run, self._plane, self._tokenizer_path = run, plane, tokenizer_path
        self._watch = WaitMonitor.from_run(run)
        self._num_replaced = 0
        self.accuracies = frozenset(ACCURACIES)
        env = build_worker_environment(run.config, run.platform, run.num_nodes)
        # Scoring needs no tensors: importing torch_npu in these processes would only claim devices.
        options = {
            "num_cpus": 0,
            "runtime_env": build_runtime_env(env | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
            "scheduling_strategy": "SPREAD",
        }
        self._remote = ray.remote(RewardWorker).options(**options)
        self._names = [f"reward worker {number}" for number in range(run.num_nodes)]
        self._actors = [self._start(number) for number in range(run.num_nodes)]

    def _start(self, number: int) -> ActorHandle[RewardWorker]:
        remove_status_files(self._run.folder, [self._names[number]])
        return cast_handle(self._remote.remote(self._run, self._plane, self._tokenizer_path, number))

    def check(self, prompt_ids: list[int], label: str | None, columns: dict[str, Any]) -> None:
        """Every reward function gives a score to a sample."""
        futures = [self._actors[0].check.remote(prompt_ids, label, columns)]
        (found,) = wait_all(futures, ["reward worker"], "check", None, self._watch)
        self.accuracies |= frozenset(found)

    def score_now(self, items: list[PromptItem], trajectories: list[Trajectory]) -> list[RewardResult]:
        """Scores of given trajectories, in order."""
        share = -(-len(items) // len(self._actors))

        def ask(number: int, again: bool) -> Any:
            parts = (part[number * share : (number + 1) * share] for part in (items, trajectories))
            return self._actors[number].score_now.remote(*parts)

        parts: list[Any] = self._ask_all("score_now", ask).wait()
        return [result for part in parts for result in part]

    def start(self, num_rows: int) -> Pending:
        """Starts scoring; rows are taken as soon as they are generated."""
        share = -(-num_rows // len(self._actors))

        def ask(number: int, again: bool) -> Any:
            return self._actors[number].score.remote(list(range(number * share, min(num_rows, (number + 1) * share))), again)

        return self._ask_all("score", ask)

    def _ask_all(self, method: str, ask: Callable[[int, bool], Any]) -> Pending:
        """The workers are asked, and asked again where one is replaced meanwhile: nothing is lost with a worker."""

        def replace_worker(name: str) -> Any | None:
            number = self._names.index(name) if name in self._names else None
            if number is None or not self._replace(number):
                return None
            return ask(number, True)

        futures = [ask(number, False) for number in range(len(self._actors))]
        return Pending(futures, self._names, method, self._plane, self._watch, replace_worker)

    def _replace(self, number: int) -> bool:
        """Another worker is there in place of this one; False when too many were replaced already."""
        if self._num_replaced == _MOST_REPLACED:
            return False
        self._num_replaced += 1
        with contextlib.suppress(Exception):
            ray.kill(self._actors[number])
        terminate_processes(self._run.folder, [self._names[number]], grace_s=0.0)
        self._actors[number] = self._start(number)
        left = _MOST_REPLACED - self._num_replaced
        _LOG.warning("%s was lost and is replaced (%d more may be)", self._names[number], left)
        return True

    def close(self) -> None:
        """Ends the workers and their pools."""
        with contextlib.suppress(Exception):
            ray.get([actor.close.remote() for actor in self._actors], timeout=10)
        for actor in self._actors:
            ray.kill(actor)
        terminate_processes(self._run.folder, self._names)
