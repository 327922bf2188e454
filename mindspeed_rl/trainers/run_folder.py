"""The folder of a run: its absolute paths, its log, and the report that is written however the run ends."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from mindspeed_rl.observability import heartbeat
from mindspeed_rl.observability.console import format_summary
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.logging import set_up_logging
from mindspeed_rl.observability.observer import RunObserver
from mindspeed_rl.observability.report import LivePage, write_report
from mindspeed_rl.observability.run_files import read_lines
from mindspeed_rl.redaction import find_in_configuration, hide_in_configuration, hide_in_text, remember_secrets
from mindspeed_rl.run import Run
from mindspeed_rl.runtime.device_memory import DeviceMemoryError
from mindspeed_rl.runtime.futures import WorkerError
from mindspeed_rl.trainers.termination import RestartError, Terminated


class RunAdvisor(Protocol):
    """A plan of the run from outside: shown on the console, compared in the report, consulted after a memory error."""

    @property
    def summary(self) -> str:
        """The plan in a line."""
        ...

    @property
    def lines(self) -> Sequence[str]:
        """The plan as lines of the console; none where nothing is planned."""
        ...

    def watch(self, history: History, show: Callable[[str], None]) -> RunObserver:
        """Return an observer that compares the figures of the run with the plan.

        Args:
            history: iterations before a resume.
            show: takes a line.
        """
        ...

    def compare(self, history: History) -> Mapping[str, object]:
        """Return predicted next to measured values, for the report."""
        ...

    def suggest_settings(self, phase: str) -> str:
        """Return settings with more room in a phase that ran out of memory, in a sentence."""
        ...


class _RunReport(RunObserver):
    """The report of a run: an observer of its figures that refreshes the page while the run goes."""

    def __init__(self, run: Run, advisor: RunAdvisor | None) -> None:
        self._run, self._advisor, self._launched_s = run, advisor, time.monotonic()
        self._evaluation: dict[str, float] = {}
        self._page: LivePage | None = None

    def on_start(self) -> None:
        """Refresh the page from now on, also when there is a warning of a long wait."""
        page = self._page = LivePage(self._refresh)
        if (beat := heartbeat.current) is not None:
            beat.on_warning = page.refresh

    def on_figures(self, iteration: int, results: Mapping[str, float]) -> None:
        """Refresh the page; the first and the newest evaluation are at its top."""
        self._evaluation |= {name: value for name, value in results.items() if name.startswith("eval/")}
        if self._page is not None:
            self._page.refresh()

    def close(self) -> None:
        """Stop refreshing the page."""
        if self._page is not None:
            self._page.close()

    def _refresh(self) -> None:
        beat = heartbeat.current
        self.write(f"running; {beat.warning}" if beat is not None and beat.warning else "running")

    def write(self, outcome: str) -> None:
        """Write the report of all that the run folder has so far."""
        cfg = self._run.config
        write_report(
            self._run.folder,
            hide_in_configuration(dataclasses.asdict(cfg)),
            title=cfg.config_name,
            outcome=hide_in_text(outcome),
            results=self._evaluation,
            config_set=hide_in_configuration(cfg.as_written()),
            planned_iterations=self._run.plan.train_iters,
            plan=None if self._advisor is None else self._advisor.compare,
        )

    def finish(self, outcome: str) -> None:
        """Write the last report, and show a summary on the console if the loop has begun."""
        folder = self._run.folder
        with _warn_of_full_disk(folder):
            self.write(outcome)
            if self._page is not None:
                text = format_summary(
                    History(read_lines(folder / "metrics.jsonl")),
                    outcome=outcome,
                    seconds=time.monotonic() - self._launched_s,
                    planned=self._run.plan.train_iters,
                    report=folder / "report.html",
                )
                print(text, flush=True)


@contextlib.contextmanager
def report_outcome(run: Run, advisor: RunAdvisor | None = None) -> Iterator[_RunReport]:
    """Make the run folder, which takes the logs; when the block ends a report with the outcome is in it."""
    folder = run.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        set_up_logging(folder / "run.log")
    except OSError as error:
        raise ValueError(f"run_dir: {folder} cannot be written to: {error.strerror}") from None
    remember_secrets(find_in_configuration(dataclasses.asdict(run.config)))
    report, outcome = _RunReport(run, advisor), "failed"
    try:
        with _advise_on_memory(advisor):
            yield report
        outcome = "finished"
    except Terminated as error:
        outcome = "interrupted" if error.signum == signal.SIGINT else f"terminated: {error}"
        raise
    except RestartError as error:
        outcome = f"resumes on other devices: {error}"
        raise
    except BaseException as error:
        outcome = f"failed: {type(error).__name__}: {error}"
        with _warn_of_full_disk(folder), (folder / "run.log").open("a", encoding="utf-8") as log:
            log.write(hide_in_text(traceback.format_exc()))  # the console shows one line
        raise
    finally:
        report.finish(outcome)


def _find_memory_error(error: BaseException | None) -> DeviceMemoryError | None:
    """Return the memory error among the causes of an error, also inside Ray's error of a worker."""
    while error is not None:
        for cause in (error, getattr(error, "cause", None)):
            if isinstance(cause, DeviceMemoryError):
                return cause
        error = error.__cause__
    return None


@contextlib.contextmanager
def _advise_on_memory(advisor: RunAdvisor | None) -> Iterator[None]:
    """Add settings with more room to the error of a worker that ran out of device memory in the block."""
    try:
        yield
    except WorkerError as error:
        failure = _find_memory_error(error)
        if failure is None or advisor is None:
            raise
        raise WorkerError(f"{error} {advisor.suggest_settings(failure.phase)}") from error


@contextlib.contextmanager
def _warn_of_full_disk(folder: Path) -> Iterator[None]:
    """Turn an OSError of the block into a warning, so that it hides no failure that is being reported."""
    try:
        yield
    except OSError as error:
        print(f"warning: the report in {folder} could not be written: {error}", file=sys.stderr)
