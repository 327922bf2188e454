"""Differences of trainer and rollout engine by depth, and the rows of those that are beyond a bound."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_rl.algorithms.mismatch import find_places, measure_depths
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch, ragged
from mindspeed_rl.dumps.mismatch_rows import COMPARED_TOKENS, MISMATCH_ROWS, MismatchRows, write_rows
from mindspeed_rl.observability.alerts import find_mismatches
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.run import Run
from mindspeed_rl.trainers.advantages import TrainBatch
from mindspeed_rl.trainers.schedule import Schedule

#: rows of an iteration that are compared, and those that are recorded
_COMPARED_ROWS, _RECORDED_ROWS = 64, 4


class EngineMismatch:
    """Compare the log-probs of an iteration's first rows, which trainer and rollout engine computed with the same weights.

    The trainer's are those of a pass before the update, or of an update of one step.
    """

    def __init__(self, run: Run, plane: DataPlane, schedule: Schedule, *, start_iteration: int = 0) -> None:
        """Compare nothing yet; a run that does not resume drops the rows of the folder's earlier run."""
        self._run, self._plane, self._schedule = run, plane, schedule
        self._path = run.folder / MISMATCH_ROWS
        if not start_iteration:
            self._path.unlink(missing_ok=True)
        self._count = min(run.plan.num_train_samples, _COMPARED_ROWS)
        self._has_old_log_probs = False

    def on_batch(self, batch: TrainBatch) -> None:
        """Note whether a pass has computed the trainer's log-probs of this batch."""
        self._has_old_log_probs = batch.has_old_log_probs

    def measure(self, iteration: int) -> Metrics:
        """Return by how much the two differ at each depth, after the update of an iteration.

        Where a depth or class of tokens is beyond its bound, the rows with the largest differences become the file of the run
        folder that `mindspeed-rl diff train rollout` reads. A run that reads images has no such file: tokens alone do not make
        its prompts.

        Args:
            iteration: the first is 0.
        """
        schedule = self._schedule
        if not (schedule.objective.log_rollout_offpolicy_metrics and schedule.samples_responses(iteration)):
            return Metrics()
        if not (self._has_old_log_probs or schedule.compares_update(iteration)):
            return Metrics()
        column = "old_log_probs" if self._has_old_log_probs else "update_log_probs"
        rows = self._get(["response_mask", "rollout_log_probs", column], range(self._count))
        mask = ragged(rows["response_mask"]).pad(0).bool()
        recorded, computed = (ragged(rows[name]).pad(0.0, mask.size(1)) for name in ("rollout_log_probs", column))
        metrics = measure_depths(computed, recorded, mask)
        place = next(find_mismatches(metrics.results()), None)
        if place is not None and not self._run.config.reads_images:
            contexts = self._list_contexts(find_places(place, mask, (computed - recorded).abs())[:_RECORDED_ROWS])
            write_rows(self._path, MismatchRows(iteration + 1, place, contexts))
        return metrics

    def _list_contexts(self, places: Sequence[tuple[int, int, int]]) -> list[list[int]]:
        """Return the tokens of rows, up to those that differ; see `find_places`."""
        rows = self._get(["prompt_ids", "responses"], [row for row, _, _ in places])
        contexts = []
        for prompt, response, (_, first, worst) in zip(rows["prompt_ids"], rows["responses"], places):
            end = max(first, worst - COMPARED_TOKENS + 1)
            contexts.append([*prompt.tolist(), *response[:end].tolist()])
        return contexts

    def _get(self, columns: Sequence[str], indexes: Sequence[int]) -> Batch:
        return self._plane.get("metrics", columns, indexes=indexes, timeout_s=self._run.deadlines.rows_s)[0]
