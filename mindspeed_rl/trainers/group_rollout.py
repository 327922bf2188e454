"""From groups of responses, however they came about, to the rows that an iteration trains on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mindspeed_rl.config import Run
from mindspeed_rl.dataplane.columns import Batch, concatenate, objects, take
from mindspeed_rl.observability.lines import CONSUMED
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.admission import Admission
from mindspeed_rl.trainers.group_filter import GroupFilter
from mindspeed_rl.trainers.model_rewards import ModelRewards, NoModelRewards
from mindspeed_rl.trainers.prompt_groups import (
    PromptGroup,
    group_metrics,
    load_groups,
    prompt_rows,
    response_rows,
    save_groups,
    totals_of,
    write_record,
)
from mindspeed_rl.trainers.rollout import SCORED_COLUMNS, PromptFeed
from mindspeed_rl.trainers.services import Services

_IN_FLIGHT = "in_flight"


class GroupSource(Protocol):
    """Where groups come from: see `StreamingSource` and `PartialSource`, whose methods say more."""

    admission: Admission

    def take(self, iteration: int, count: int) -> tuple[list[PromptGroup], list[WorkerReport]]:
        """`count` complete groups for this iteration."""

    def rejected(self, count: int) -> None:
        """So many of the prompts taken do not train after all."""

    def before_push(self) -> None:
        """New weights may come."""

    def after_push(self, version: int) -> None:
        """New weights are there."""

    def snapshot(self) -> tuple[list[PromptGroup], int, int]:
        """What is in flight, the number of the next prompt, and how many were taken."""

    def restore(self, groups: list[PromptGroup], next_prompt: int, num_taken: int) -> None:
        """Goes on where `snapshot` was taken."""


class GroupRollout:
    """Takes an iteration's groups from a source, with or without filtering, and writes down which they were.

    A filter draws only as many further groups as are missing.
    """

    def __init__(
        self, run: Run, services: Services, feed: PromptFeed, source: GroupSource, model_rewards: ModelRewards | NoModelRewards
    ) -> None:
        """
        Args:
            model_rewards: adds its scores before groups are looked at.
        """
        rl, actor = run.rl, run.config.actor_config
        self._plan, self._plane, self._rewards = run.plan, services.plane, services.rewards
        self._feed, self._source, self._model_rewards = feed, source, model_rewards
        self._filter = GroupFilter(run) if rl.filter_groups_enable or rl.dynamic_sample else None
        self._timeout_s, self._train_iters = run.deadlines.rows_s, run.plan.train_iters
        self._record = run.folder / CONSUMED
        self._save = Path(actor.save) if actor.save else None
        self._load = Path(actor.load).expanduser() if actor.load else None
        self._pushed: int | None = None
        self._resumed = False

    # ------------------------------------------------------------------ weights

    def before_push(self, iteration: int) -> int | None:
        version = self._source.admission.version(iteration)
        # after the last iteration the engine takes the last weights, for evaluation
        if version == self._pushed and iteration != self._train_iters:
            return None
        if self._pushed is None and not self._resumed:  # a run may have begun without a source
            num_prompts = iteration * self._plan.num_train_prompts
            self._source.restore([], num_prompts, num_prompts)
        self._source.before_push()
        return version if version != self._pushed else version + 1

    def after_push(self, iteration: int) -> None:
        self._pushed = self._source.admission.version(iteration)
        if iteration != self._train_iters:
            self._source.after_push(self._pushed)

    # ------------------------------------------------------------------ rows

    def run(self, iteration: int) -> list[WorkerReport]:
        wanted = self._plan.num_train_prompts
        if self._filter is None:
            groups, reports = self._source.take(iteration, wanted)
            scored = self._put(groups)
            self._write_record(iteration, groups)
            return reports + scored
        return self._run_filtered(self._filter, iteration, wanted)

    def _run_filtered(self, chosen: GroupFilter, iteration: int, wanted: int) -> list[WorkerReport]:
        reports: list[WorkerReport] = []
        kept: list[Batch] = []
        spare: list[Batch] = []
        trained: list[PromptGroup] = []
        others: list[PromptGroup] = []
        looked_at, limit = 0, chosen.limit * self._plan.num_prompts
        while len(trained) < wanted:
            count = wanted - len(trained) if limit <= 0 else min(wanted - len(trained), limit - looked_at)
            if count == 0:
                chosen.give_up(iteration, f"{looked_at} prompts", len(trained), wanted)
                break
            groups, taken = self._source.take(iteration, count)
            reports += taken + self._put(groups)
            rows = range(count * self._plan.n_samples_per_prompt)
            self._add_model_rewards(groups, rows)
            batch, _ = self._plane.get("dynamic_sampling", list(SCORED_COLUMNS), indexes=rows, timeout_s=self._timeout_s)
            places: Batch = {"place": list(range(len(rows)))}
            good, rest = chosen.split({**batch, **places})
            size = self._plan.n_samples_per_prompt
            trained += [groups[place // size] for place in good.pop("place")[::size]]
            others += [groups[place // size] for place in rest.pop("place")[::size]]
            kept.append(good)
            spare.append(rest)
            looked_at += count
            self._source.rejected(len(rest["rewards"]) // size)
        fill = others[: wanted - len(trained)]
        if fill:
            self._source.rejected(-len(fill))
        size = self._plan.num_train_samples
        merged = {name: take(concatenate([part[name] for part in kept + spare]), range(size)) for name in SCORED_COLUMNS}
        self._plane.clear(wanted)
        self._plane.put(merged, range(size))
        self._write_record(iteration, trained + fill)
        metrics = Metrics()
        metrics.add_sum("train/num_gen_batches", looked_at / self._plan.num_prompts)
        metrics.add_mean("train/kept_groups_fraction", len(trained), looked_at)
        return [*reports, WorkerReport(metrics)]

    def _put(self, groups: list[PromptGroup]) -> list[WorkerReport]:
        """The data plane holds these groups, scored, and nothing else."""
        repeat = self._plan.n_samples_per_prompt
        columns = prompt_rows([group.item for group in groups], repeat) | response_rows(groups)
        self._plane.clear(len(groups))
        self._plane.put(columns, range(len(groups) * repeat))
        scored = [] if "rewards" in columns else self._rewards.start(len(groups) * repeat).wait()
        return [*scored, WorkerReport(group_metrics(groups))]

    def _add_model_rewards(self, groups: list[PromptGroup], rows: range) -> None:
        """Rows have the reward model's score as well; they are too few, as a rule, to be dealt out as those of an iteration."""
        if isinstance(self._model_rewards, NoModelRewards):
            return
        batch, _ = self._plane.get("dynamic_sampling", ["reward_results"], indexes=rows, timeout_s=self._timeout_s)
        items = [group.item for group in groups for _ in group.samples]
        responses = [trajectory.token_ids for group in groups for trajectory in group.trajectories]
        results = self._model_rewards.add(objects(batch["reward_results"]), items, responses)
        self._plane.put({"rewards": totals_of(results), "reward_results": results}, rows, overwrite=True)

    def _write_record(self, iteration: int, groups: list[PromptGroup]) -> None:
        write_record(self._record, iteration + 1, self._source.admission.version(iteration), groups)

    # ------------------------------------------------------------------ going on

    def state_dict(self) -> dict[str, Any]:
        """Writes what is in flight into a file beside the checkpoints, and returns its name."""
        groups, next_prompt, num_taken = self._source.snapshot()
        assert self._save is not None  # only a run that saves asks for its state
        name = f"prompt_{num_taken:09d}.safetensors"
        save_groups(self._save / _IN_FLIGHT / name, groups)
        draws = -(-next_prompt // self._plan.num_prompts)  # for whoever goes on without a source
        return {"next_prompt": next_prompt, "num_taken": num_taken, "file": name, "draws": draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "file" not in state:
            return
        assert self._load is not None  # there was a checkpoint
        groups = load_groups(self._load / _IN_FLIGHT / state["file"], self._feed.item)
        self._source.restore(groups, state["next_prompt"], state["num_taken"])
        self._resumed = True
