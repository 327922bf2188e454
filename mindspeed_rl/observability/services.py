"""TensorBoard, Weights & Biases, SwanLab and MLflow, each as a tracker; `TRACKERS` in trackers.py has their names."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from mindspeed_rl.config import RLConfig
from mindspeed_rl.observability.completions import Completion

_logger = logging.getLogger(__name__)

#: heads of a table of completions
_COLUMNS = ("iteration", "group", "sample", "prompt", "response", "reward", "parts", "advantage")


class TensorBoardTracker:
    """TensorBoard event files; tags get the prefix `train/` unless they have `eval/`. Completions are a table of texts.

    Events are plain scalars: tensorboard.summary.Writer makes tensors, which `EventAccumulator.Scalars` does not find. They are
    written here: tensorboard's own writer has a thread whose failures (a full disk) end in a traceback on the console.
    """

    def __init__(self, rl_config: RLConfig, run_dir: Path, config: Mapping[str, object]) -> None:
        self._events = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = import_module("tensorboard.compat.proto.summary_pb2")
        self._tensors = import_module("tensorboard.util.tensor_util")
        self._texts = import_module("tensorboard.plugins.text.metadata")
        folder, now_ns = run_dir / "tensorboard", time.time_ns()
        folder.mkdir(parents=True, exist_ok=True)
        # named as by tensorboard's own writer: readers search for the word and read files in this order
        name = f"events.out.tfevents.{now_ns // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{now_ns % 10**9}"
        records = import_module("tensorboard.summary.writer.record_writer")
        # unbuffered: a write that the disk refused is not tried again when the file is closed
        self._records = records.RecordWriter((folder / name).open("wb", buffering=0))
        # readers expect the version as the first event
        version = self._events.Event(wall_time=time.time(), file_version="brain.Event:2")
        self._records.write(version.SerializeToString())

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        named = _add_prefix(metrics).items()
        self._write(iteration, [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in named])

    def completions(self, iteration: int, completions: Sequence[Completion]) -> None:
        # a text of two dimensions is drawn as a table, its cells as Markdown
        rows = [list(_COLUMNS), *([_cell_text(value) for value in row] for row in _make_rows(iteration, completions))]
        values = self._tensors.make_tensor_proto(rows)
        metadata = self._texts.create_summary_metadata(display_name="completions", description="")
        self._write(iteration, [self._summaries.Summary.Value(tag="completions", metadata=metadata, tensor=values)])

    def close(self) -> None:
        self._records.close()

    def _write(self, iteration: int, values: list[object]) -> None:
        summary = self._summaries.Summary(value=values)
        event = self._events.Event(wall_time=time.time(), step=iteration, summary=summary)
        self._records.write(event.SerializeToString())


class _RunTracker:
    """A tracker whose library hands out a run with `log` and `finish`."""

    _run: Any

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log(_add_prefix(metrics), step=iteration)

    def close(self) -> None:
        self._run.finish()


class WandbTracker(_RunTracker):
    """A Weights & Biases run."""

    def __init__(self, rl_config: RLConfig, run_dir: Path, config: Mapping[str, object]) -> None:
        self._wandb = import_module("wandb")
        self._run = self._wandb.init(
            project=rl_config.wandb_project or None,
            name=rl_config.wandb_exp_name or None,
            dir=rl_config.wandb_save_dir or str(run_dir),
            mode=rl_config.wandb_mode,
            config=dict(config),
            # by default it redirects the console, and prints a summary at the end
            settings={"console": "off", "silent": True},
        )
        _logger.info("wandb: %s", self._run.url or f"offline in {self._run.dir}; wandb sync sends it")

    def completions(self, iteration: int, completions: Sequence[Completion]) -> None:
        rows = self._wandb.Table(columns=list(_COLUMNS), data=_make_rows(iteration, completions))
        self._run.log({"completions": rows}, step=iteration)


class SwanlabTracker(_RunTracker):
    """A SwanLab run."""

    def __init__(self, rl_config: RLConfig, run_dir: Path, config: Mapping[str, object]) -> None:
        self._swanlab = import_module("swanlab")
        self._run = self._swanlab.init(
            project=rl_config.swanlab_project or None,
            experiment_name=rl_config.swanlab_exp_name or None,
            mode=rl_config.swanlab_mode or None,
            logdir=rl_config.swanlab_save_dir or str(run_dir / "swanlab"),
            config=dict(config),
        )

    def completions(self, iteration: int, completions: Sequence[Completion]) -> None:
        texts = [
            self._swanlab.Text("\n".join(f"{head}: {_cell_text(value)}" for head, value in zip(_COLUMNS, row)))
            for row in _make_rows(iteration, completions)
        ]
        self._run.log({"completions": texts}, step=iteration)


class MlflowTracker:
    """An MLflow run, in the folder or at the server of `mlflow_tracking_uri`; in the run folder's `mlflow/` when unset."""

    def __init__(self, rl_config: RLConfig, run_dir: Path, config: Mapping[str, object]) -> None:
        mlflow = import_module("mlflow")
        self._metric = import_module("mlflow.entities").Metric
        # later releases of MLflow refuse a folder without it; a database would need more than mlflow-skinny brings
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = rl_config.mlflow_tracking_uri or (run_dir / "mlflow").resolve().as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        name = rl_config.mlflow_experiment or "mindspeed_rl"
        existing = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if existing is None else existing.experiment_id
        run = self._client.create_run(experiment, run_name=rl_config.mlflow_run_name or run_dir.name)
        self._run_id = run.info.run_id
        self._client.log_text(self._run_id, json.dumps(config, indent=1, ensure_ascii=False), "config.json")

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        figures = [self._metric(name, float(value), now_ms, iteration) for name, value in _add_prefix(metrics).items()]
        self._client.log_batch(self._run_id, metrics=figures)

    def completions(self, iteration: int, completions: Sequence[Completion]) -> None:
        columns = zip(*_make_rows(iteration, completions))
        self._client.log_table(
            self._run_id, {head: list(values) for head, values in zip(_COLUMNS, columns)}, "completions.json"
        )

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _add_prefix(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with the names that all services show."""
    return {name if name.startswith("eval/") else f"train/{name}": value for name, value in metrics.items()}


def _make_rows(iteration: int, completions: Sequence[Completion]) -> list[list[int | float | str | None]]:
    """Return one row of `_COLUMNS` a completion; the parts of the reward are one text."""
    return [
        [
            iteration,
            item.group,
            item.sample,
            item.prompt,
            item.response,
            None if item.reward is None or not math.isfinite(item.reward) else item.reward,
            ", ".join(f"{name} {value:g}" for name, value in item.parts.items()),
            item.advantage,
        ]
        for item in completions
    ]


def _cell_text(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
