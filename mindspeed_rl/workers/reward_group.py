"""The reward functions of a run: one worker a node, on CPUs; one that is lost is replaced."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from mindspeed_rl import registry
from mindspeed_rl.data.encoding import TextDecoder
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch, objects
from mindspeed_rl.observability import heartbeat
from mindspeed_rl.observability.logging import redirect_output, set_up_logging
from mindspeed_rl.observability.process_status import remove_status_files, terminate_processes
from mindspeed_rl.observability.timers import Timers
from mindspeed_rl.rewards import ACCURACIES
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.samples import RewardResult, RewardSample
from mindspeed_rl.rewards.totals import add_trajectory_rewards
from mindspeed_rl.rollout.trajectory import Trajectory, make_trial_columns
from mindspeed_rl.run import Run
from mindspeed_rl.run.phases import Phase, Phases
from mindspeed_rl.runtime.cluster import build_runtime_env, build_worker_environment
from mindspeed_rl.runtime.futures import Pending, WaitMonitor, wait_all
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.thoughts import list_mark_tokens
from mindspeed_rl.tools.environment_check import TURNS

if TYPE_CHECKING:
    from ray import ObjectRef
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)
#: columns of the data plane that a sample is made of
SAMPLE_COLUMNS = ("prompt_ids", "responses", "labels", "extra", "truncated", "trajectories")
#: reward workers that a run replaces before it gives up: the cause of more losses is not an accident
_MAX_REPLACED = 5


@dataclass(frozen=True)
class SampleReader:
    """Makes samples for reward functions and judges of token ids.

    Attributes:
        tokenizer: tokenizer of the actor.
        reads: `rl_config.verifier_reads`.
        max_tokens: longest response.
    """

    tokenizer: PreTrainedTokenizerBase
    reads: str
    max_tokens: int

    @cached_property
    def _decoder(self) -> TextDecoder:
        """Decoder of responses, which keeps the marks of thoughts."""
        marks = list_mark_tokens(token.content for token in self.tokenizer.added_tokens_decoder.values())
        return TextDecoder(self.tokenizer, marks, cleans_up=None)

    def read(
        self, prompt_ids: list[int], response_ids: list[int], label: str | None, columns: dict[str, Any], truncated: bool
    ) -> RewardSample:
        """Return the sample of a response."""
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        read_ids = response_ids
        if self.reads == "last_turn":  # the row of a single response has no such column
            read_ids = response_ids[columns.get("last_turn_start", 0) :]
        response = self._decoder.decode(read_ids)
        if self.reads == "output":
            response = columns.get("output") or ""
        assert isinstance(prompt, str) and isinstance(response, str)  # lists for batches
        return RewardSample(
            prompt=prompt,
            response=response,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            label=label,
            columns=columns,
            truncated=truncated,
            max_response_length=self.max_tokens,
        )

    def read_trajectory(self, item: PromptItem, trajectory: Trajectory) -> RewardSample:
        """Return the sample of a response to a prompt."""
        columns = {**item["columns"], **trajectory.reward_columns()}
        return self.read(item["prompt_ids"], trajectory.token_ids, item["label"], columns, trajectory.finish == "length")

    def read_with_turns(self, item: PromptItem, trajectory: Trajectory) -> RewardSample:
        """Return the sample of a response to a prompt with a column of the texts of the model's turns."""
        sample = self.read_trajectory(item, trajectory)
        turns = [self._decoder.decode(list(segment.token_ids)) for segment in trajectory.segments if segment.sampled]
        return replace(sample, columns={**sample.columns, TURNS: turns})

    def read_trial(self, item: PromptItem, *, multi_turn: bool) -> RewardSample:
        """Return a made-up response to a prompt: its label."""
        columns = {**item["columns"], **(make_trial_columns() if multi_turn else {})}
        answer = self.tokenizer.encode(item["label"] or "", add_special_tokens=False)
        return self.read(list(item["prompt_ids"]), answer, item["label"], columns, False)

    def read_rows(self, batch: Batch) -> list[RewardSample]:
        """Return the samples of rows of the data plane, with the columns of `SAMPLE_COLUMNS`."""
        return [
            self.read(prompt.tolist(), response.tolist(), label, {**extra, **columns}, bool(truncated))
            for prompt, response, label, extra, truncated, columns in zip(*(batch[name] for name in SAMPLE_COLUMNS))
        ]


class RewardWorker:
    """Rule rewards of one node, from a pool of killable processes, during generation or after it.

    `RewardGroup` makes this class a Ray actor.
    """

    def __init__(self, run: Run, plane: DataPlane, tokenizer_path: str, index: int) -> None:
        redirect_output(run.folder / "logs" / f"reward_{index}.log")
        set_up_logging(run.folder / "run.log", worker=f"reward {index}", console=False)
        heartbeat.start(run.folder, f"reward worker {index}", interval_s=run.fault_tolerance.heartbeat_interval_s)
        self.run, self.plan, self.plane = run, run.plan, plane
        registry.search_folders(run.config.plugin_folders)
        tokenizer = load_tokenizer(tokenizer_path, use_fast=not run.config.actor_config.tokenizer_not_use_fast)
        self.samples = SampleReader(tokenizer, run.rl.verifier_reads, run.config.response_limit)
        self.pool = RewardPool.from_config(run.rl, max_tokens=run.config.response_limit)
        self.timers = Timers(worker=f"reward {index}")

    def check(self, item: PromptItem) -> list[str]:
        """Score one made-up response, so that a broken reward function stops the run before the first rollout.

        Returns:
            Names of the functions whose score is an accuracy.
        """
        self.pool.check(self.samples.read_trial(item, multi_turn=self.run.rl.multi_turn_enable))
        return self.pool.accuracies

    def score(self, rows: list[int], again: bool = False) -> WorkerReport:
        """Give rows their rewards; waits for responses that are still being generated.

        A score that failed and is to be dropped is NaN: its row does not train.

        Args:
            rows: indexes at the data plane.
            again: a worker that was lost may have scored some of them.
        """
        size = max(1, self.plan.dispatch_sizes[Phases.RULE_REWARDS.dispatch_key])
        for start in range(0, len(rows), size):
            indexes = rows[start : start + size]
            timeout_s = self.run.deadlines.rows_s
            batch, _ = self.plane.get(Phases.RULE_REWARDS.consumer, SAMPLE_COLUMNS, indexes=indexes, timeout_s=timeout_s)
            # without the wait for responses
            with self.timers(Phases.RULE_REWARDS.timer), heartbeat.doing(f"scoring {len(indexes)} responses"):
                results = self._score(self.samples.read_rows(batch), objects(batch["trajectories"]))
                totals = [math.nan if result.total is None else result.total for result in results]
                self.plane.put({"rewards": totals, "reward_results": results}, indexes, overwrite=again)
        return WorkerReport(intervals=self.timers.drain())

    def score_now(self, items: list[PromptItem], trajectories: list[Trajectory]) -> list[RewardResult]:
        """Return the scores of trajectories of prompts."""
        columns = [trajectory.reward_columns() for trajectory in trajectories]
        samples = [self.samples.read_trajectory(item, trajectory) for item, trajectory in zip(items, trajectories)]
        with heartbeat.doing(f"scoring {len(samples)} responses"):
            return self._score(samples, columns)

    def _score(self, samples: list[RewardSample], columns: Sequence[Mapping[str, Any]]) -> list[RewardResult]:
        """Return the scores of the reward functions, with the rewards that the trajectories earned."""
        rl = self.run.rl
        results = self.pool.score(samples, timeout_s=self.run.deadlines.seconds["rewards"])
        return add_trajectory_rewards(results, columns, which=rl.trajectory_reward, weight=rl.trajectory_reward_weight)

    def close(self) -> None:
        """Terminate the pool's processes."""
        self.pool.close()


class RewardGroup:
    """One reward worker a node, each of which scores a part of the rows.

    Attributes:
        accuracies: names of functions whose score is an accuracy; after `check` also the user's.
    """

    def __init__(self, run: Run, plane: DataPlane, tokenizer_path: str) -> None:
        self._run, self._plane, self._tokenizer_path = run, plane, tokenizer_path
        self._monitor = WaitMonitor(run.folder, run.deadlines, run.fault_tolerance)
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
        self._names = [f"reward worker {index}" for index in range(run.num_nodes)]
        self._actors = [self._start_worker(index) for index in range(run.num_nodes)]

    def _start_worker(self, index: int) -> ActorHandle[RewardWorker]:
        remove_status_files(self._run.folder, [self._names[index]])
        return cast("ActorHandle[RewardWorker]", self._remote.remote(self._run, self._plane, self._tokenizer_path, index))

    def check(self, item: PromptItem) -> None:
        """Score a made-up response to a prompt with every reward function."""
        futures = [self._actors[0].check.remote(item)]
        (accuracies,) = wait_all(futures, ["reward worker"], Phases.CHECK_REWARDS.name, None, self._monitor)
        self.accuracies |= frozenset(accuracies)

    def score_now(self, items: list[PromptItem], trajectories: list[Trajectory]) -> list[RewardResult]:
        """Return the scores of trajectories of prompts, in order."""
        size = -(-len(items) // len(self._actors))

        def call(index: int, again: bool) -> ObjectRef[Any]:
            mine = slice(index * size, (index + 1) * size)
            return self._actors[index].score_now.remote(items[mine], trajectories[mine])

        by_worker: list[Any] = self._call_all(Phases.SCORE_NOW, call).wait()
        return [result for results in by_worker for result in results]

    def start(self, num_rows: int) -> Pending:
        """Start to score; rows are taken as soon as they are generated."""
        size = -(-num_rows // len(self._actors))

        def call(index: int, again: bool) -> ObjectRef[Any]:
            rows = list(range(num_rows)[index * size : (index + 1) * size])
            return self._actors[index].score.remote(rows, again)

        return self._call_all(Phases.RULE_REWARDS, call)

    def _call_all(self, phase: Phase, call: Callable[[int, bool], ObjectRef[Any]]) -> Pending:
        """Run a phase on all workers, and again on one that is replaced: no score is lost with a worker."""

        def replace_worker(name: str) -> ObjectRef[Any] | None:
            index = self._names.index(name) if name in self._names else None
            return call(index, True) if index is not None and self._replace(index) else None

        futures = [call(index, False) for index in range(len(self._actors))]
        return Pending(futures, self._names, phase.name, self._plane, self._monitor, replace_worker)

    def _replace(self, index: int) -> bool:
        """Start another worker in place of this one; returns False when too many were replaced already."""
        if self._num_replaced == _MAX_REPLACED:
            return False
        self._num_replaced += 1
        # one that is dead cannot be killed
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actors[index])
        terminate_processes(self._run.folder, [self._names[index]], grace_s=0.0)
        self._actors[index] = self._start_worker(index)
        left = _MAX_REPLACED - self._num_replaced
        _LOG.warning("%s was lost and is replaced (%d more may be)", self._names[index], left)
        return True

    def close(self) -> None:
        """Terminate the workers and their pools."""
        # a worker that died or hangs cannot close its pool
        with contextlib.suppress(RayError):
            ray.get([actor.close.remote() for actor in self._actors], timeout=10)
        for actor in self._actors:
            ray.kill(actor)
        terminate_processes(self._run.folder, self._names)
