"""Scores rows of the data plane with a pool of killable processes, beside generation or after it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rl.config import Run
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import objects
from mindspeed_rl.observability import heartbeat
from mindspeed_rl.observability.logging import redirect_output, set_up_logging
from mindspeed_rl.observability.timers import Timers
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.samples import RewardResult, RewardSample
from mindspeed_rl.rewards.totals import add_trajectory_rewards
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.runtime.reports import WorkerReport


class RewardWorker:
    """Rule rewards of one node. A plain class; the launcher makes it a Ray actor."""

    def __init__(self, run: Run, plane: DataPlane, tokenizer_path: str, number: int) -> None:
        redirect_output(run.folder / "logs" / f"reward_{number}.log")
        set_up_logging(run.folder / "run.log", worker=f"reward {number}", console=False)
        heartbeat.start(run.folder, f"reward worker {number}", interval_s=run.fault_tolerance.heartbeat_interval_s)
        self.run, self.plan, self.plane = run, run.plan, plane
        self.max_tokens = run.config.response_limit
        self.tokenizer = load_tokenizer(tokenizer_path, use_fast=not run.config.actor_config.tokenizer_not_use_fast)
        self.pool = RewardPool.from_config(run.rl, max_tokens=self.max_tokens)
        self.timers = Timers(worker=f"reward {number}")

    def check(self, prompt_ids: list[int], label: str | None, columns: dict[str, Any]) -> list[str]:
        """Scores one made-up response, so that a broken reward function stops the run before the first rollout.

        Returns:
            Names of the functions that say whether an answer is right.
        """
        answer = self.tokenizer.encode(label or "", add_special_tokens=False)
        facts = Trajectory((), "stop", metrics={"turns": 1.0, "tool_call_num": 0.0}).reward_columns()
        told = {**columns, **facts} if self.run.rl.multi_turn_enable else columns
        self.pool.check(self._sample(list(prompt_ids), answer, label, told, False))
        return self.pool.accuracies

    def score(self, rows: list[int], again: bool = False) -> WorkerReport:
        """The rows have rewards; waits for responses that are still being generated.

        A score that failed and is to be dropped is NaN: its row does not train.

        Args:
            again: a worker that was lost may have scored some of them.
        """
        size = max(1, self.plan.dispatch_sizes["reward_dispatch_size"])
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            columns = ["prompt_ids", "responses", "labels", "extra", "truncated", "trajectories"]
            batch, _ = self.plane.get("rule_reward", columns, indexes=part, timeout_s=self.run.deadlines.rows_s)
            # waiting for responses is no part of it
            with self.timers("rule_reward"), heartbeat.doing(f"scoring {len(part)} responses"):
                rows_of = zip(*(batch[name] for name in columns))
                samples = [
                    self._sample(prompt.tolist(), response.tolist(), label, {**extra, **facts}, bool(cut))
                    for prompt, response, label, extra, cut, facts in rows_of
                ]
                results = self._score(samples, objects(batch["trajectories"]))
                totals = [math.nan if result.total is None else result.total for result in results]
                self.plane.put({"rewards": totals, "reward_results": results}, part, overwrite=again)
        return WorkerReport(intervals=self.timers.drain())

    def score_now(self, items: list[PromptItem], trajectories: list[Trajectory]) -> list[RewardResult]:
        """Scores given trajectories of prompts."""
        facts = [trajectory.reward_columns() for trajectory in trajectories]
        samples = [
            self._sample(
                item["prompt_ids"],
                trajectory.token_ids,
                item["label"],
                {**item["columns"], **fact},
                trajectory.finish == "length",
            )
            for item, trajectory, fact in zip(items, trajectories, facts)
        ]
        with heartbeat.doing(f"scoring {len(samples)} responses"):
            return self._score(samples, facts)

    def _score(self, samples: list[RewardSample], facts: Sequence[Mapping[str, Any]]) -> list[RewardResult]:
        """What the reward functions say, and what the trajectories earned."""
        rl = self.run.rl
        results = self.pool.score(samples, timeout_s=self.run.deadlines.seconds["rewards"])
        return add_trajectory_rewards(results, facts, which=rl.trajectory_reward, weight=rl.trajectory_reward_weight)

    def _sample(
        self, prompt_ids: list[int], response_ids: list[int], label: str | None, columns: dict[str, Any], truncated: bool
    ) -> RewardSample:
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        read = response_ids
        if self.run.rl.verifier_reads == "last_turn":  # the row of a single response has no such fact
            read = response_ids[columns.get("last_turn_start", 0) :]
        response = self.tokenizer.decode(read, skip_special_tokens=True)
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

    def close(self) -> None:
        """Ends the pool's processes."""
        self.pool.close()
