"""From groups of responses, of any source, to the rows that an iteration trains on."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl.checkpoint.mcore import iteration_folder
from mindspeed_rl.checkpoint.newest import IN_FLIGHT, IN_FLIGHT_STAGING
from mindspeed_rl.data.images import has_references
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch, concatenate, objects, ragged, take
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.run_files import CONSUMED
from mindspeed_rl.run import Run
from mindspeed_rl.run.resume import ResumePoint
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.group_sources import PartialSource, StreamingSource
from mindspeed_rl.trainers.model_rewards import ModelRewards, reward_totals
from mindspeed_rl.trainers.prompt_groups import PromptGroup, load_groups, save_groups
from mindspeed_rl.trainers.prompt_loader import PromptLoader, prompt_rows
from mindspeed_rl.trainers.rollout import SCORED_COLUMNS, GroupFilter, Rollout
from mindspeed_rl.workers.responses import build_response_columns, compute_response_metrics
from mindspeed_rl.workers.reward_group import RewardGroup


def _response_rows(groups: Sequence[PromptGroup]) -> dict[str, list[Any]]:
    """Return the data plane's columns of complete groups: the rollout's, and the scores where they are there."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    columns = build_response_columns(trajectories, with_images=has_references(groups[0].item["columns"]))
    if all(group.results is not None for group in groups):
        results = [result for group in groups for result in group.results or ()]
        columns["rewards"] = reward_totals(results)
        columns["reward_results"] = results
    return columns


def _version_spans(versions: Sequence[int]) -> list[tuple[int, int]]:
    """Return (version, number of tokens) of each run of equal versions."""
    return [(version, len(list(same))) for version, same in itertools.groupby(versions)]


def _write_record(path: Path, iteration: int, version: int, groups: Sequence[PromptGroup]) -> None:
    """Add a line with the groups that this iteration trains on, in its order.

    Args:
        iteration: the first is 1, as in the metrics.
        version: version of the weights that train.
    """
    line = {
        "iteration": iteration,
        "version": version,
        "prompts": [
            {
                "prompt": group.index,
                **({"part": group.part} if group.part else {}),
                "samples": [
                    {"versions": _version_spans(sample.sampled_versions), "finish": sample.finish}
                    for sample in group.trajectories
                ],
            }
            for group in groups
        ],
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


class GroupRollout(Rollout):
    """Take an iteration's groups from a source, with or without filtering, and record which they were.

    A filter takes only as many further groups as are missing.
    """

    def __init__(
        self,
        run: Run,
        plane: DataPlane,
        rewards: RewardGroup,
        loader: PromptLoader,
        source: StreamingSource | PartialSource,
        group_filter: GroupFilter | None,
        model_rewards: ModelRewards,
    ) -> None:
        """Take nothing yet.

        Args:
            model_rewards: adds its scores before groups are filtered.
        """
        super().__init__(loader)
        actor = run.config.actor_config
        self._plan, self._plane, self._rewards = run.plan, plane, rewards
        self._source, self._filter, self._model_rewards = source, group_filter, model_rewards
        self._timeout_s, self._train_iters = run.deadlines.rows_s, run.plan.train_iters
        self._record = run.folder / CONSUMED
        self._save = Path(actor.save) if actor.save else None
        # a prompt that starts anew after a resume has no second group: what was in flight was counted with it
        self._num_spare = 0 if run.rl.keep_spare_samples else run.rl.spare_samples_per_prompt
        self._pushed: int | None = None
        self._resumed: list[PromptGroup] = []

    # ------------------------------------------------------------------ weights

    def before_push(self, iteration: int) -> int | None:
        """See `Rollout`."""
        version = self._source.admission.version(iteration)
        # after the last iteration the engine takes the last weights, for evaluation
        if version == self._pushed and iteration != self._train_iters:
            return None
        if self._pushed is None:
            # prompts that trained are counted in batches of this run: admission compares them with its iterations
            num_taken = iteration * self._plan.num_train_prompts
            self._source.restore(self._resumed, self._loader.next_prompt, num_taken)
            self._resumed = []
        self._source.before_push()
        return version if version != self._pushed else version + 1

    def after_push(self, iteration: int) -> None:
        """See `Rollout`."""
        self._pushed = self._source.admission.version(iteration)
        if iteration != self._train_iters:
            self._source.after_push(self._pushed)

    # ------------------------------------------------------------------ rows

    def run(self, iteration: int) -> list[WorkerReport]:
        """See `Rollout`."""
        expected = self._plan.num_train_prompts
        if self._filter is not None:
            groups, reports = self._take_filtered(self._filter, iteration, expected)
        else:
            groups, reports = self._source.take(iteration, expected)
            reports = reports + self._put(groups)
        self._loader.batch = [group.index for group in groups]
        reports += self._loader.report()
        _write_record(self._record, iteration + 1, self._source.admission.version(iteration), groups)
        return reports

    def _take_filtered(
        self, group_filter: GroupFilter, iteration: int, expected: int
    ) -> tuple[list[PromptGroup], list[WorkerReport]]:
        reports: list[WorkerReport] = []
        accepted: list[Batch] = []
        spare: list[Batch] = []
        trained: list[PromptGroup] = []
        others: list[PromptGroup] = []
        num_filtered, limit, size = 0, group_filter.limit * self._plan.num_prompts, self._plan.n_samples_per_prompt
        while len(trained) < expected:
            count = expected - len(trained) if limit <= 0 else min(expected - len(trained), limit - num_filtered)
            if count == 0:
                group_filter.give_up(iteration, f"{num_filtered} prompts", len(trained), expected)
                break
            groups, taken = self._source.take(iteration, count)
            reports += taken + self._put(groups)
            rows = range(count * size)
            self._add_model_rewards(groups, rows)
            batch, _ = self._plane.get("dynamic_sampling", list(SCORED_COLUMNS), indexes=rows, timeout_s=self._timeout_s)
            indexes: Batch = {"row": list(rows)}
            self._loader.batch = [group.index for group in groups]
            self._loader.observe(ragged(batch["rewards"]).tensor())
            good, rejected = group_filter.split({**batch, **indexes})
            trained += [groups[row // size] for row in good.pop("row")[::size]]
            others += [groups[row // size] for row in rejected.pop("row")[::size]]
            accepted.append(good)
            spare.append(rejected)
            num_filtered += count
            self._source.reject(len(rejected["rewards"]) // size)
        fill = others[: expected - len(trained)]
        if fill:
            self._source.reject(-len(fill))
        num_rows = range(self._plan.num_train_samples)
        merged = {name: take(concatenate([part[name] for part in accepted + spare]), num_rows) for name in SCORED_COLUMNS}
        self._plane.clear(expected)
        self._plane.put(merged, num_rows)
        metrics = Metrics()
        metrics.add_sum("train/num_gen_batches", num_filtered / self._plan.num_prompts)
        metrics.add_mean("train/kept_groups_fraction", len(trained), num_filtered)
        return trained + fill, [*reports, WorkerReport(metrics)]

    def _put(self, groups: list[PromptGroup]) -> list[WorkerReport]:
        """Replace the rows of the data plane by the rows of these groups, scored."""
        repeat = self._plan.n_samples_per_prompt
        columns = prompt_rows([group.item for group in groups], repeat) | _response_rows(groups)
        self._plane.clear(len(groups))
        self._plane.put(columns, range(len(groups) * repeat))
        scored = [] if "rewards" in columns else self._rewards.start(len(groups) * repeat).wait()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        return [*scored, WorkerReport(compute_response_metrics(trajectories))]

    def _add_model_rewards(self, groups: list[PromptGroup], rows: range) -> None:
        """Add the models' scores to rows that are too few, as a rule, to be dispatched like an iteration's."""
        if self._model_rewards.fleet is None:
            return
        batch, _ = self._plane.get("dynamic_sampling", ["reward_results"], indexes=rows, timeout_s=self._timeout_s)
        items = [group.item for group in groups for _ in group.samples]
        responses = [trajectory.token_ids for group in groups for trajectory in group.trajectories]
        results = self._model_rewards.add(objects(batch["reward_results"]), items, responses)
        self._plane.put({"rewards": reward_totals(results), "reward_results": results}, rows, overwrite=True)

    # ------------------------------------------------------------------ resume

    def state_dict(self) -> dict[str, object]:
        """Write the groups in flight into a file that becomes part of the checkpoint, and return its name."""
        groups, next_prompt, num_taken = self._source.snapshot()
        assert self._save is not None  # only a run that saves needs its state
        staged = self._save / IN_FLIGHT_STAGING
        shutil.rmtree(staged, ignore_errors=True)  # of a killed save
        name = f"prompt_{num_taken:09d}.safetensors"
        save_groups(staged / name, groups)
        position = {"next_prompt": next_prompt, "in_flight": [group.index for group in groups], "file": name}
        # position of a run that resumes without a source
        return super().state_dict() | position | {"draws": -(-next_prompt // self._plan.num_prompts)}

    def load_state_dict(self, state: Mapping[str, Any], resume: ResumePoint) -> None:
        """See `Rollout`; prompts whose responses do not fit this run start anew."""
        super().load_state_dict(state, resume)
        loader, version = self._loader, self._source.admission.version(resume.iteration)
        is_early = "file" in state and "in_flight" not in state  # of an earlier version, which had the file elsewhere
        if is_early or (loader.waiting and "file" in state and not resume.affects("in_flight")):
            folder = resume.weights if is_early else iteration_folder(resume.weights, resume.iteration)
            self._resumed = load_groups(folder / IN_FLIGHT / state["file"], loader.item)
        else:
            size = self._plan.n_samples_per_prompt
            count = size + self._num_spare
            self._resumed = [
                PromptGroup(index, loader.item(index), version, [None] * count, None, size, loader.waiting[:place].count(index))
                for place, index in enumerate(loader.waiting)
            ]
        loader.waiting = []
