"""The folder of a run: where it is, and the report that is in it however the run ends."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.config import Run, RunConfig
from mindspeed_rl.config.keys.megatron import is_weight
from mindspeed_rl.observability import heartbeat
from mindspeed_rl.observability.console import summary
from mindspeed_rl.observability.logging import set_up_logging
from mindspeed_rl.observability.page.live import LivePage
from mindspeed_rl.observability.report import write_report
from mindspeed_rl.observability.run_files import read_metrics
from mindspeed_rl.planner.advice import changes_that_relieve
from mindspeed_rl.planner.calibration import later_medians, run_tree
from mindspeed_rl.planner.chips import chip_of
from mindspeed_rl.planner.prediction import comparison
from mindspeed_rl.runtime.device_memory import memory_failure
from mindspeed_rl.runtime.futures import WorkerFailed
from mindspeed_rl.trainers.run_logger import RunLogger
from mindspeed_rl.trainers.termination import Terminated

_MOST_SETTINGS = 3


@dataclass
class RunReport:
    """What the report of a run is made of.

    Attributes:
        run: what runs.
        logger: set as soon as there is one; its last evaluation stands on top of the report.
    """

    run: Run
    logger: RunLogger | None = None

    def write(self, outcome: str) -> None:
        """The run folder has a report of what there is so far."""
        last, first = (self.logger.last, self.logger.first) if self.logger else ({}, {})
        results = {name: value for name, value in last.items() if name.startswith("eval/")}
        results |= {f"{name}/first": value for name, value in first.items()}
        cfg = self.run.config
        write_report(
            self.run.folder,
            dataclasses.asdict(cfg),
            title=cfg.config_name,
            outcome=outcome,
            results=results,
            config_set=cfg.as_written(),
            planned_iterations=self.run.plan.train_iters,
            plan=lambda history: comparison(self.run, later_medians(history)),
        )

    def summary(self, outcome: str, seconds: float) -> str:
        """The end of the run, for the console."""
        assert self.logger is not None
        return summary(
            read_metrics(self.run.folder / "metrics.jsonl"),
            outcome=outcome,
            seconds=seconds,
            planned=self.run.plan.train_iters,
            report=self.run.folder / "report.html",
            before=self.logger.first,
        )

    def show(self, logger: RunLogger) -> None:
        """The report is refreshed while this logger's run goes."""
        self.logger = logger
        page = logger.page = LivePage(lambda: self.write(_running()))
        if (beat := heartbeat.current()) is not None:
            beat.on_notice = page.touch


def _running() -> str:
    """The outcome of a run that goes, with what is to be said of a long wait."""
    beat = heartbeat.current()
    return f"running; {beat.notice}" if beat is not None and beat.notice else "running"


@contextlib.contextmanager
def reported(run: Run) -> Iterator[RunReport]:
    """The run folder exists and takes the logs; a report with the outcome is in it when the block ends."""
    folder = run.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        set_up_logging(folder / "run.log")
    except OSError as error:
        raise ValueError(f"run_dir: {folder} cannot be written to: {error.strerror}") from None
    report, begun = RunReport(run), time.monotonic()
    outcome = "failed"
    try:
        with _advised(run):
            yield report
        outcome = "finished"
    except KeyboardInterrupt:
        outcome = "interrupted"
        raise
    except Terminated as error:
        outcome = f"terminated: {error}"
        raise
    except BaseException as error:
        outcome = f"failed: {type(error).__name__}: {error}"
        with _as_far_as_the_disk_goes(folder), (folder / "run.log").open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)  # the console shows one line
        raise
    finally:
        with _as_far_as_the_disk_goes(folder):
            report.write(outcome)
            if report.logger is not None:
                print(report.summary(outcome, time.monotonic() - begun), flush=True)


@contextlib.contextmanager
def _advised(run: Run) -> Iterator[None]:
    """A worker that ran out of memory says what would have left it more."""
    try:
        yield
    except WorkerFailed as error:
        failure = memory_failure(error)
        if failure is None:
            raise
        raise WorkerFailed(f"{error} {_settings_with_room(run, failure.phase)}") from error


def _settings_with_room(run: Run, phase: str) -> str:
    cfg = run.config
    try:
        changes = changes_that_relieve(
            run_tree(dataclasses.asdict(cfg), cfg.as_written()), cfg, phase, chip_of(cfg), run.num_nodes
        )
    except Exception as error:  # a model of the user's own, for example: the failure itself is what matters
        return f"What would fit cannot be said: {error}"
    found = [
        f"{', '.join(f'{key}: {json.dumps(value)}' for key, value in change.values.items())} ({change.costs})"
        for change in changes[:_MOST_SETTINGS]
    ]
    return f"Nearest settings with more room: {'; '.join(found)}." if found else "No single setting leaves much more room."


@contextlib.contextmanager
def _as_far_as_the_disk_goes(folder: Path) -> Iterator[None]:
    """What the disk does not take of the block is said, and hides no failure that is being reported."""
    try:
        yield
    except OSError as error:
        print(f"warning: the report in {folder} could not be written: {error}", file=sys.stderr)


def absolute_paths(cfg: RunConfig) -> RunConfig:
    """Paths of a run file are relative to where the command was given; workers run elsewhere."""
    roles = (cfg.megatron_training, cfg.actor_config, cfg.ref_config, cfg.reward_config, cfg.critic_config)
    for config in {id(role): role for role in roles if role is not None}.values():
        # what does not exist here may be the name of a model at a hub, or the default, a file that few have
        for key in ("load", "pretrained_checkpoint", "tokenizer_name_or_path", "ref_model", "prompt_type_path"):
            value = getattr(config, key)
            if value and Path(value).expanduser().exists():
                setattr(config, key, _absolute(value))
        _make_absolute(config, "save")
        if cfg.is_supervised:  # the workers read the data; elsewhere the driver does
            if isinstance(config.data_path, list):
                config.data_path = [item if is_weight(item) else _absolute(str(item)) for item in config.data_path]
            else:
                _make_absolute(config, "data_path")
            _make_absolute(config, "eval_data_path")
    _make_absolute(cfg.msprobe_config, "dump_path")
    _make_absolute(cfg.profiler_config.integrated, "profile_save_path")
    if cfg.generate_config is not None:
        _make_absolute(cfg.generate_config, "eplb_token_save_path", "expert_map_path")
    if cfg.rl_config is not None:
        _make_absolute(cfg.rl_config, "reward_model", "tool_config_path")
        if cfg.rl_config.integrated_mode_config is not None:
            _make_absolute(cfg.rl_config.integrated_mode_config, "ref_model_load_path")
        cfg.rl_config.external_plugins = [_absolute(path) for path in cfg.rl_config.external_plugins]
    return cfg


def _make_absolute(group: object, *keys: str) -> None:
    for key in keys:
        if value := getattr(group, key):
            setattr(group, key, _absolute(value))


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())
