"""Destinations of an iteration's metrics: metrics.jsonl always, and the services that a run file names, several at once.

A service's tracker runs on a thread of its own: its failure or hang is reported once, and the run goes on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import logging
import math
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from mindspeed_rl import registry
from mindspeed_rl.config import RLConfig
from mindspeed_rl.files import read_json, write_file
from mindspeed_rl.observability.completions import Completion
from mindspeed_rl.observability.run_files import AUDIT, CONSUMED, EXAMPLES, LineWriter

#: name of a tracker -> its class, called with (rl_config, run_dir, config) and imported on use
TRACKERS = {
    "tensorboard": "mindspeed_rl.observability.trackers:_TensorBoardTracker",
    "wandb": "mindspeed_rl.observability.trackers:_WandbTracker",
    "swanlab": "mindspeed_rl.observability.trackers:_SwanlabTracker",
    "mlflow": "mindspeed_rl.observability.trackers:_MlflowTracker",
    "trackio": "mindspeed_rl.observability.trackers:_TrackioTracker",
    "otlp": "mindspeed_rl.observability.trackers:_OtlpTracker",
}

#: tracker -> the package that it needs, and the wheel to install
_WHEELS = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "swanlab": ("swanlab", "swanlab"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "trackio": ("trackio", "trackio"),
    "otlp": ("opentelemetry.exporter.otlp.proto.http", "opentelemetry-exporter-otlp-proto-http"),
}
#: exports in a row that an OTLP endpoint may refuse before the tracker is given up
_MAX_REFUSED = 5

#: heads of a table of completions
_COLUMNS = ("iteration", "group", "sample", "prompt", "response", "reward", "parts", "advantage")
#: file with the ids of the services' runs; trackers write it from threads of their own
_RUN_IDS, _RUN_IDS_LOCK = "trackers.json", threading.Lock()
#: time that all trackers together have to finish when a run ends
_CLOSE_S = 60.0
#: records that wait for a slow tracker before further ones are left out
_CAPACITY = 256

_logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Takes the metrics of each iteration."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an iteration."""

    def close(self) -> None:
        """Write or send everything recorded."""


@runtime_checkable
class _TableTracker(Tracker, Protocol):
    """A tracker that also shows completions; a tracker without this method gets none."""

    def completions(self, iteration: int, completions: Sequence[Completion]) -> None:
        """Record the completions of an iteration."""


class _BackgroundTracker:
    """Call a tracker on a thread of its own, its construction included; only `close` waits for it.

    The first failure is a warning, once; after an error the tracker gets nothing more. While it is slow, `capacity` records
    wait for it, and further ones are left out.

    Args:
        name: in messages.
        make: constructs the tracker.
        capacity: records that may wait.

    Attributes:
        closing: set it to let the thread record what waits, then close the tracker.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], capacity: int = _CAPACITY) -> None:
        self._name, self._make = name, make
        self._waiting: queue.Queue[Callable[[Tracker], None]] = queue.Queue(capacity)
        self._num_left_out = 0
        self._failed, self.closing = threading.Event(), threading.Event()
        # a daemon: a tracker that hangs when the run is over does not keep the process
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics, without waiting."""
        values = dict(metrics)
        self._put(iteration, lambda tracker: tracker.log(iteration, values))

    def completions(self, iteration: int, completions: Sequence[Completion]) -> None:
        """Queue the completions for a tracker that takes them, without waiting."""
        rows = list(completions)

        def show(tracker: Tracker) -> None:
            if isinstance(tracker, _TableTracker):
                tracker.completions(iteration, rows)

        self._put(iteration, show)

    def close(self, deadline_s: float) -> None:
        """Wait until the tracker has recorded everything and is closed, or give it up.

        Args:
            deadline_s: on the monotonic clock.
        """
        self.closing.set()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            _logger.warning(
                "%s has not finished in time and is left behind; %d record(s) still waited for it",
                self._name,
                self._waiting.qsize(),
            )
        elif self._num_left_out and not self._failed.is_set():
            _logger.warning("%s lacks %d record(s): it was too slow to take them", self._name, self._num_left_out)

    def _put(self, iteration: int, call: Callable[[Tracker], None]) -> None:
        if self._failed.is_set():
            return
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            if not self._num_left_out:
                _logger.warning(
                    "%s hangs or is slow: %d records wait for it, further ones are left out from iteration %d on",
                    self._name, self._waiting.maxsize, iteration,
                )  # fmt: skip
            self._num_left_out += 1

    def _run(self) -> None:
        try:
            tracker = self._make()
            while not self.closing.is_set() or not self._waiting.empty():
                with contextlib.suppress(queue.Empty):
                    self._waiting.get(timeout=0.2)(tracker)
            tracker.close()
        except BaseException as error:  # noqa: BLE001 - no failure of a service, SystemExit included, may reach the run
            self._failed.set()
            _logger.warning(
                "%s failed and is given nothing more; the run goes on: %s: %s", self._name, type(error).__name__, error
            )


class _JsonlTracker:
    """One JSON object a line, flushed at once: {"iteration": 3, "actor/pg_loss": 0.1, ...}; NaN and infinities are null.

    Written by the run itself: report and page are made of this file. A checkpoint exists before the line of its iteration,
    which has results of work after the save: evaluations take minutes. A run that is killed in between resumes after an
    iteration without a line, or with half a one; so the line of the last saved iteration is in a pending file from the save on.
    """

    def __init__(self, path: Path, last_iteration: int = 0) -> None:
        """Open the file, and append the pending line of `last_iteration` where the file lacks it.

        Args:
            path: the file.
            last_iteration: the last one before a run resumes.
        """
        self._path, self._file = path, LineWriter(path)
        self._pending = path.with_name(f"{path.stem}.held.json")
        self._has_failed = False
        self._last_pending: int | None = None
        if self._pending.is_file():
            record, lines = json.loads(self._pending.read_text(encoding="utf-8")), path.read_bytes().splitlines()
            if record["iteration"] == last_iteration and (not lines or json.loads(lines[-1])["iteration"] < last_iteration):
                self._file.write(record)

    def log(self, iteration: int, metrics: Mapping[str, float], *, is_pending: bool = False) -> None:
        """Append the line, or warn once that lines are missing.

        Args:
            iteration: from 1.
            metrics: its values.
            is_pending: before the iteration's save: write only the pending file.
        """
        record = {"iteration": iteration} | {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        try:
            if not is_pending:
                self._file.write(record)
            if is_pending or iteration == self._last_pending:
                # in one step: a run that resumes would fail on half a record
                write_file(self._pending, json.dumps(record), temporary=self._pending.with_suffix(".tmp"))
                self._last_pending = iteration
        except OSError as error:
            if not self._has_failed:
                _logger.warning("%s cannot be written, lines will be missing; the run goes on: %s", self._path, error)
            self._has_failed = True

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _TensorBoardTracker:
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


class _WandbTracker(_RunTracker):
    """A Weights & Biases run."""

    def __init__(self, rl_config: RLConfig, run_dir: Path, config: Mapping[str, object]) -> None:
        self._wandb = import_module("wandb")
        run_id = _read_run_ids(run_dir).get("wandb")
        self._run = self._wandb.init(
            id=run_id,
            resume=None if run_id is None else "allow",
            project=rl_config.wandb_project or None,
            name=rl_config.wandb_exp_name or None,
            dir=rl_config.wandb_save_dir or str(run_dir),
            mode=rl_config.wandb_mode,
            config=dict(config),
            # by default it redirects the console, and prints a summary at the end
            settings={"console": "off", "silent": True},
        )
        _keep_run_id(run_dir, "wandb", self._run.id)
        _logger.info("wandb: %s", self._run.url or f"offline in {self._run.dir}; wandb sync sends it")

    def completions(self, iteration: int, completions: Sequence[Completion]) -> None:
        rows = self._wandb.Table(columns=list(_COLUMNS), data=_make_rows(iteration, completions))
        self._run.log({"completions": rows}, step=iteration)


class _SwanlabTracker(_RunTracker):
    """A SwanLab run."""

    def __init__(self, rl_config: RLConfig, run_dir: Path, config: Mapping[str, object]) -> None:
        self._swanlab = import_module("swanlab")
        # a run on a disk has no id to go on with
        is_online = rl_config.swanlab_mode in (None, "", "cloud", "online")
        run_id = _read_run_ids(run_dir).get("swanlab") if is_online else None
        self._run = self._swanlab.init(
            **({} if run_id is None else {"id": run_id, "resume": "allow"}),
            project=rl_config.swanlab_project or None,
            experiment_name=rl_config.swanlab_exp_name or None,
            mode=rl_config.swanlab_mode or None,
            logdir=rl_config.swanlab_save_dir or str(run_dir / "swanlab"),
            config=dict(config),
        )
        made = getattr(self._run, "id", None)  # releases before 0.8 have none
        if is_online and isinstance(made, str):
            _keep_run_id(run_dir, "swanlab", made)

    def completions(self, iteration: int, completions: Sequence[Completion]) -> None:
        texts = [
            self._swanlab.Text("\n".join(f"{head}: {_cell_text(value)}" for head, value in zip(_COLUMNS, row)))
            for row in _make_rows(iteration, completions)
        ]
        self._run.log({"completions": texts}, step=iteration)


class _MlflowTracker:
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
        run_id = _read_run_ids(run_dir).get("mlflow")
        if run_id is None:
            run_id = self._client.create_run(experiment, run_name=rl_config.mlflow_run_name or run_dir.name).info.run_id
            _keep_run_id(run_dir, "mlflow", run_id)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id
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


class _TrackioTracker(_RunTracker):
    """A Trackio run: on this machine, where `trackio show` finds it, or in the Space of `trackio_space_id`."""

    def __init__(self, rl_config: RLConfig, run_dir: Path, config: Mapping[str, object]) -> None:
        self._trackio = import_module("trackio")
        # the library knows a run by its name
        name = _read_run_ids(run_dir).get("trackio")
        self._run = self._trackio.init(
            project=rl_config.trackio_project or "mindspeed_rl",
            name=name or rl_config.trackio_run_name or run_dir.name,
            space_id=rl_config.trackio_space_id or None,
            config=dict(config),
            resume="never" if name is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        _keep_run_id(run_dir, "trackio", self._run.name)

    def completions(self, iteration: int, completions: Sequence[Completion]) -> None:
        rows = [dict(zip(_COLUMNS, row)) for row in _make_rows(iteration, completions)]
        frame = import_module("pandas").DataFrame(rows, columns=list(_COLUMNS))
        self._run.log({"completions": self._trackio.Table(dataframe=frame)}, step=iteration)


class _OtlpTracker:
    """Gauges of OpenTelemetry, sent to a collector after each iteration (OTLP over HTTP).

    A gauge has the name of `metrics.jsonl` with dots: `actor/grad_norm` is `mindspeed_rl.actor.grad_norm`, in Prometheus
    `mindspeed_rl_actor_grad_norm`. Attribute `run` is the name of the run folder, so that a run that resumes goes on.
    """

    def __init__(self, rl_config: RLConfig, run_dir: Path, config: Mapping[str, object]) -> None:
        exporters = import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        metrics = import_module("opentelemetry.sdk.metrics")
        self._reader = import_module("opentelemetry.sdk.metrics.export").InMemoryMetricReader()
        self._success = import_module("opentelemetry.sdk.metrics.export").MetricExportResult.SUCCESS
        endpoint = rl_config.otlp_endpoint
        # without one the variables of OpenTelemetry decide, as for every program: OTEL_EXPORTER_OTLP_ENDPOINT, _HEADERS ...
        options = {"endpoint": f"{endpoint.rstrip('/')}/v1/metrics"} if endpoint else {}
        self._exporter = exporters.OTLPMetricExporter(**options)
        resource = import_module("opentelemetry.sdk.resources").Resource.create({"service.name": "mindspeed_rl"})
        self._provider = metrics.MeterProvider(metric_readers=[self._reader], resource=resource)
        self._meter = self._provider.get_meter("mindspeed_rl")
        self._attributes = {"run": run_dir.absolute().name}
        self._gauges: dict[str, Any] = {}
        self._num_refused = 0

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in {**metrics, "iteration": float(iteration)}.items():
            if math.isfinite(value):
                if name not in self._gauges:
                    self._gauges[name] = self._meter.create_gauge(name_gauge(name))
                self._gauges[name].set(float(value), self._attributes)
        data = self._reader.get_metrics_data()
        refused = data is not None and self._exporter.export(data) != self._success
        # a collector that starts anew takes the next ones
        self._num_refused = self._num_refused + 1 if refused else 0
        if self._num_refused == _MAX_REFUSED:
            raise ConnectionError(f"the endpoint {self._exporter._endpoint} did not take {_MAX_REFUSED} exports in a row")

    def close(self) -> None:
        self._exporter.shutdown()
        self._provider.shutdown()


def name_gauge(metric: str) -> str:
    """Return the OpenTelemetry name of a metric of `metrics.jsonl`."""
    return "mindspeed_rl." + re.sub(r"[^A-Za-z0-9_.-]", "_", metric.replace("/", "."))


def _read_run_ids(run_dir: Path) -> dict[str, str]:
    """Return the ids of the services' runs that a run which resumes goes on with, by tracker."""
    path = run_dir / _RUN_IDS
    try:
        ids = read_json(path) if path.is_file() else {}
    except ValueError as error:
        _logger.warning("services show a new run: %s", error)
        ids = {}
    return {str(name): str(value) for name, value in ids.items()}


def _keep_run_id(run_dir: Path, tracker: str, run_id: object) -> None:
    """Keep the id of a service's run, for a run that resumes."""
    with _RUN_IDS_LOCK:
        write_file(run_dir / _RUN_IDS, json.dumps(_read_run_ids(run_dir) | {tracker: str(run_id)}) + "\n")


def _add_prefix(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with the names that all services show."""
    return {name if name.startswith(("eval/", "eval_ema/")) else f"train/{name}": value for name, value in metrics.items()}


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


@dataclass(frozen=True)
class Trackers:
    """metrics.jsonl, and any number of trackers on threads of their own.

    Attributes:
        lines: writes metrics.jsonl.
        others: the trackers on threads.
        close_s: time that they have together to finish.
    """

    lines: _JsonlTracker
    others: Sequence[_BackgroundTracker]
    close_s: float = _CLOSE_S

    def log(self, iteration: int, metrics: Mapping[str, float], *, is_pending: bool = False) -> None:
        """Write the metrics of an iteration to metrics.jsonl and queue them for the others.

        Args:
            iteration: from 1.
            metrics: its values.
            is_pending: before the iteration's save: write them only to the pending file of metrics.jsonl.
        """
        self.lines.log(iteration, metrics, is_pending=is_pending)
        if not is_pending:
            for tracker in self.others:
                tracker.log(iteration, metrics)

    def completions(self, iteration: int, completions: Sequence[Completion]) -> None:
        """Queue the completions of an iteration for the trackers that have tables."""
        for tracker in self.others:
            tracker.completions(iteration, completions)

    def close(self) -> None:
        """Close every tracker; one that takes longer than `close_s` is left behind, with a warning."""
        deadline_s = time.monotonic() + self.close_s
        for tracker in self.others:
            # all of them before the first wait: they share one deadline
            tracker.closing.set()
        for tracker in self.others:
            tracker.close(deadline_s)
        self.lines.close()


def _cut_back(path: Path, iteration: int) -> None:
    """Move records of later iterations, which the run repeats, to `<name>.superseded.jsonl`, and half a line too."""
    if not path.is_file():
        return
    earlier, later = [], []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            # a run that starts anew repeats the evaluation before the first iteration, which is iteration 0, too
            is_earlier = line.endswith(b"\n") and json.loads(line)["iteration"] <= iteration and iteration > 0
        except (ValueError, TypeError, KeyError):
            is_earlier = False
        (earlier if is_earlier else later).append(line)
    if not later:
        return
    with path.with_name(f"{path.stem}.superseded.jsonl").open("ab") as file:
        file.writelines(later)
    write_file(path, b"".join(earlier))


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the one that it is a part of
        return False


def find_trackers(names: Iterable[str]) -> dict[str, Callable[..., Tracker]]:
    """Return the class of each tracker by its name.

    Raises:
        ValueError: a tracker is unknown, or its package is not installed.
    """
    classes: dict[str, Callable[..., Tracker]] = {}
    for name in names:
        target = registry.target_of(TRACKERS, name, f"rl_config.report_to: {name!r}")
        # not imported: that may take long
        if name in _WHEELS and not _is_installed(_WHEELS[name][0]):
            package, wheel = _WHEELS[name]
            raise ValueError(f"rl_config.use_{name} is true, but '{package}' is not installed: pip install {wheel}.")
        classes[name] = cast("Callable[..., Tracker]", registry.load(target, f"rl_config.report_to {name}"))
    return classes


def make_trackers(rl_config: RLConfig, run_dir: Path, config: Mapping[str, object], *, last_iteration: int = 0) -> Trackers:
    """Start the trackers that the run file names, metrics.jsonl always among them; each has its own thread.

    `use_wandb` switches `use_tensorboard` off, as upstream does; a tracker that `report_to` names is never switched off.
    Files with a line an iteration are cut back to the iterations that the run does not repeat.

    Args:
        rl_config: `report_to`, the use_ keys, and the keys of the trackers.
        run_dir: for files unless a *_save_dir is set.
        config: the run's configuration, shown with the curves.
        last_iteration: the last one that is not repeated.

    Raises:
        ValueError: a tracker is unknown, or its package is not installed.
    """
    classes = find_trackers(rl_config.tracker_names)
    # before the tracker, which reads the last line that stays
    for name in ("metrics.jsonl", "completions.jsonl", EXAMPLES, AUDIT, CONSUMED):
        _cut_back(run_dir / name, last_iteration)

    if not last_iteration:  # another run, which the services show as one of its own
        (run_dir / _RUN_IDS).unlink(missing_ok=True)

    def convert(value: object) -> object:
        return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)

    plain = json.loads(json.dumps(config, default=convert))
    lines = _JsonlTracker(run_dir / "metrics.jsonl", last_iteration)
    others = [_BackgroundTracker(name, functools.partial(made, rl_config, run_dir, plain)) for name, made in classes.items()]
    return Trackers(lines, others)
