"""The evaluations of a run: which is best, whether its checkpoint is kept, and whether the run is to end."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from mindspeed_rl.checkpoint.newest import EXPORTS
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.files import read_json, write_file

#: file of `save` with the value of `eval_metric` after each iteration that was evaluated, and the best one
FILE = "evaluations.json"
#: link next to the Hugging Face folders of `save_hf`
BEST = "best"


class EvaluationProgress:
    """Follow `eval_metric` over the evaluations of a run, also over one that resumes.

    Attributes:
        end_reason: why the run is to end, for the console; empty while it continues.
    """

    def __init__(self, config: MegatronConfig, note: Callable[[str], None], *, start_iteration: int) -> None:
        """Read the evaluations up to the iteration that the run resumes from.

        Args:
            note: shows a line to the user.
            start_iteration: last iteration of the checkpoint that the run resumes from; 0 for a new run.
        """
        self._config, self._note = config, note
        self._is_needed = config.keep_best or config.eval_target is not None or config.eval_patience is not None
        self._file = None if config.save is None else Path(config.save).expanduser() / FILE
        self._metric = config.eval_metric
        self._values: dict[int, float] = {}
        self.end_reason = ""
        if self._is_needed and self._file is not None and self._file.is_file() and start_iteration:
            record = read_json(self._file)
            if self._metric in (None, record["metric"]):
                self._metric = record["metric"]
                self._values = {
                    step: math.nan if value is None else value
                    for step, value in record["evaluations"]
                    if step <= start_iteration
                }
        self._decide()
        if self.end_reason:
            note(f"an earlier evaluation has ended this run: {self.end_reason}")

    def add(self, iteration: int, results: Mapping[str, float]) -> None:
        """Take the figures of an evaluation after this iteration; 0: before the first one.

        Raises:
            ValueError: `eval_metric` is none of them.
        """
        if not self._is_needed:
            return
        if self._metric is None:
            self._metric = _choose_metric(results)
        # figures of responses without any score have no mean
        elif self._metric not in results and not self._values:
            names = ", ".join(sorted(name for name in results if name.startswith("eval/")))
            raise ValueError(f"megatron_training.eval_metric: the evaluation has no {self._metric}; it has {names}")
        value = results.get(self._metric, math.nan)
        self._values = {step: known for step, known in self._values.items() if step < iteration} | {iteration: value}
        self._decide()
        if self.best_checkpoint == iteration:
            self._note(f"best so far: {self._metric} {value:.4g} after iteration {iteration}")
        if self.end_reason:
            self._note(f"the run ends: {self.end_reason}")
        self._write()

    @property
    def kept_iteration(self) -> int | None:
        """Iteration of the best evaluation that may have a checkpoint; None before the first."""
        return self._find_best(first=1)

    @property
    def best_checkpoint(self) -> int | None:
        """Iteration of the checkpoint that all roles keep; None where `keep_best` of the actor is off."""
        return self.kept_iteration if self._config.keep_best else None

    def needs_checkpoint(self, iteration: int) -> bool:
        """Return True where the evaluation after this iteration is the best one to keep, or ends the run."""
        if self._config.save is None or iteration not in self._values:
            return False
        return bool(self.end_reason) or self.best_checkpoint == iteration

    def _find_best(self, *, first: int = 0) -> int | None:
        """Return the iteration of the best evaluation from iteration `first` on; of equal ones the earliest."""
        sign = -1.0 if self._metric is not None and self._metric.endswith("loss") else 1.0
        known = {step: sign * value for step, value in self._values.items() if step >= first and not math.isnan(value)}
        return max(known, key=lambda step: (known[step], -step)) if known else None

    def _decide(self) -> None:
        best, target, patience = self._find_best(), self._config.eval_target, self._config.eval_patience
        self.end_reason = ""
        if best is None or self._metric is None:
            return
        value = self._values[best]
        reached = target is not None and (value <= target if self._metric.endswith("loss") else value >= target)
        since = sum(step > best for step in self._values)
        if reached:
            self.end_reason = f"{self._metric} is {value:.4g} after iteration {best} (eval_target {target:g})"
        elif patience is not None and since >= patience:
            self.end_reason = (
                f"{since} evaluations without a better {self._metric} than {value:.4g} after iteration {best} "
                f"(eval_patience {patience})"
            )

    def _write(self) -> None:
        """Write the file of the evaluations, and the link to the best export."""
        if self._file is None:
            return
        kept = self.kept_iteration
        best = None if kept is None else {"iteration": kept, "value": self._values[kept]}
        # JSON has no NaN
        values = [[step, None if math.isnan(value) else value] for step, value in sorted(self._values.items())]
        content = {"metric": self._metric, "best": best, "evaluations": values}
        write_file(self._file, json.dumps(content, indent=1) + "\n", makes_folder=True)
        if self.best_checkpoint is not None and self._config.save_hf:
            folder = self._file.parent / EXPORTS
            folder.mkdir(exist_ok=True)
            partial = folder / f"{BEST}.partial"
            partial.unlink(missing_ok=True)
            partial.symlink_to(f"iter_{self.best_checkpoint:07d}")
            os.replace(partial, folder / BEST)


def _choose_metric(results: Mapping[str, float]) -> str:
    """Return the figure that tells which evaluation is best: an accuracy, else a reward, else the loss."""
    for last in ("accuracy", "reward"):
        names = [name for name in results if name.startswith("eval/") and name.rpartition("/")[2] == last]
        # the unnamed set is the first
        if names:
            return min(names, key=lambda name: name.count("/"))
    return "eval/loss"
