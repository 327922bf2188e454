"""`mindspeed-rl plan tune`: pilots of the best layouts of a run, and the fastest as a run file.

A pilot is a process with its own workers, Ray and run folder, below a temporary folder. What becomes of it is an entry of the
table: measured, out of memory, failed, took too long. After it none of its processes and folders is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from mindspeed_rl import registry
from mindspeed_rl.cli.explain import build_report
from mindspeed_rl.cli.options import print_status
from mindspeed_rl.cli.sessions import end_session
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run_files import compose, locate
from mindspeed_rl.files import FileWriteError, read_json, write_file
from mindspeed_rl.observability.run_files import read_lines
from mindspeed_rl.planner.devices import find_device
from mindspeed_rl.planner.samples import SampleMeans
from mindspeed_rl.planner.tune import (
    ITERATIONS,
    Layout,
    Outcome,
    Pilot,
    build_pilot_tree,
    choose,
    format_table,
    format_tree,
    format_tuned_file,
    list_layouts,
    parse_variations,
)
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import unavailable, validate
from mindspeed_rl.runtime.fork_server import RL, TRAINING, shared_fork_server
from mindspeed_rl.scratch import remove_folders_of, scratch_folder
from mindspeed_rl.texts import cut_end

#: environment variable by which the processes of a pilot are found
_MARK = "MINDSPEED_RL_PILOT"
#: seconds in which a pilot ends its workers and Ray after SIGTERM (a shutdown that hangs is cut off after 60), and its
#: processes end after it
_END_S, _LINGER_S = 75.0, 15.0
_MAX_DETAIL = 300


class _Stopped(BaseException):
    """SIGTERM or SIGHUP came: no Exception, as KeyboardInterrupt is none."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = 128 + signum


@dataclass(frozen=True)
class _Box:
    """Time of the pilots.

    Attributes:
        end_s: time of the monotonic clock after which none starts.
        pilot_s: seconds that each may take.
    """

    end_s: float
    pilot_s: float

    @property
    def left_s(self) -> float:
        """Seconds of the next pilot."""
        return min(self.pilot_s, self.end_s - time.monotonic())


def tune(arguments: argparse.Namespace) -> int:
    """Try layouts; return 0 where one was measured, 1 where none was, 130 or 143 where a signal ended it.

    Raises:
        ValueError: an argument, the run file or a file that it names is wrong; nothing was started.
    """
    _check_numbers(arguments)
    directory, name = locate(arguments.config_name, arguments.config_dir)
    tree = compose(directory, name, arguments.overrides)
    run = draft(build_run_config(tree, config_name=name, config_dir=str(directory)), arguments.nodes)
    if violations := [*map(str, validate(run)), *unavailable(run)]:
        raise ConfigError(violations)
    if run.config.serve_config is not None:
        raise ValueError(f"{name} has the group serve_config: a server has no iterations whose layout could be measured.")
    output = Path(arguments.output or f"{Path(name).name}_tuned.yaml")
    _check_output(output, directory / f"{name}.yaml")
    kept = None if arguments.keep is None else _check_kept(Path(arguments.keep))
    device = find_device(run, arguments.chip, arguments.memory_gib)
    layouts = list_layouts(
        tree, run, device, variations=parse_variations(arguments.vary), samples=SampleMeans(arguments.mean_response)
    )
    tried = layouts[: arguments.top + 1]
    for layout in tried:
        format_tree([], layout.tree)  # refuses what cannot be written, before anything starts
    _check_files(tree, run)
    with _stopped_by_signals(), contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch_folder("mindspeed-rl-tune-")) if kept is None else kept
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--keep: {folder} cannot be made: {error.strerror}.") from None
        try:
            pilots = _run_pilots(tried, run, folder, arguments)
        except (KeyboardInterrupt, _Stopped) as error:
            print_status("interrupted: the pilot was ended, and no run file was written.")
            return 130 if isinstance(error, KeyboardInterrupt) else error.exit_code
        chosen = choose(pilots)
        if chosen is not None:
            _write(output, format_tuned_file(name, pilots, chosen))
    left_out = len(layouts) - len(tried)
    if arguments.json:
        record = {
            "pilots": [pilot.encode() for pilot in pilots],
            "chosen": None if chosen is None else pilots.index(chosen),
            "not_tried": left_out,
            "file": None if chosen is None else str(output),
        }
        print(json.dumps(record, indent=2), flush=True)
    else:
        print("\n".join(format_table(pilots)), flush=True)
    if chosen is None:
        print_status("error: no pilot was measured, and no run file was written.")
        return 1
    more = f"; {left_out} further layouts were planned and not tried (--top)" if left_out else ""
    print_status(f"wrote {output}; train with: mindspeed-rl train --config-name {output}{more}")
    return 0


# ---------------------------------------------------------------------- checks


def _check_numbers(arguments: argparse.Namespace) -> None:
    for flag in ("top", "nodes"):
        if vars(arguments)[flag] < 1:
            raise ValueError(f"--{flag}: {vars(arguments)[flag]} must be at least 1.")
    for flag in ("minutes", "pilot_minutes"):
        value = vars(arguments)[flag]
        if not 0 < value < float("inf"):
            raise ValueError(f"--{flag.replace('_', '-')}: {value:g} must be above 0.")


def _check_output(path: Path, source: Path) -> None:
    if path.suffix != ".yaml":
        raise ValueError(f"--output: {path} is not the name of a run file; it must end in .yaml.")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--output: {path} is a folder, or is in one that does not exist.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--output: {path} cannot be written to: no permission.")
    if path.exists() and path.samefile(source):
        raise ValueError(f"--output: {path} is the run file that is tuned; name another one.")


def _check_kept(folder: Path) -> Path:
    """Return the absolute path of the folder that keeps the folders of pilots, which need not exist.

    Raises:
        ValueError: it is not empty, or a file.
    """
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"--keep: {folder} is not empty; pilots do not mix with other files.")
    except OSError as error:
        raise ValueError(f"--keep: {folder} cannot be used: {error.strerror}.") from None
    return folder.resolve()


def _check_files(tree: Mapping[str, object], run: Run) -> None:
    """Check the files of the run as `train` does.

    Raises:
        ConfigError: one is missing or wrong.
    """
    with scratch_folder("mindspeed-rl-tune-") as folder:
        cfg = build_run_config(
            build_pilot_tree(tree, str(folder / "run")), config_name=run.config.config_name, config_dir=run.config.config_dir
        )
        report = build_report(cfg, run.num_nodes, checks_files=True)
    if report["errors"]:
        raise ConfigError(list(map(str, report["errors"])))


# ---------------------------------------------------------------------- pilots


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise `_Stopped` for SIGTERM and SIGHUP in the block, so that it ends its pilot as for Ctrl-C."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise _Stopped(signum)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _run_pilots(layouts: Sequence[Layout], run: Run, folder: Path, arguments: argparse.Namespace) -> list[Pilot]:
    """Run a pilot of each layout, one after the other, within the time box."""
    box = _Box(time.monotonic() + 60 * arguments.minutes, 60 * arguments.pilot_minutes)
    pilots: list[Pilot] = []
    # by name: it imports torch
    platform = registry.load("mindspeed_rl.platform:resolve_name", "plan tune")(run.platform)
    forks = registry.load("mindspeed_rl.platform:platform_class", "plan tune")(platform).forks
    server = shared_fork_server(platform, TRAINING if run.config.is_supervised else RL)
    with server if forks else contextlib.nullcontext({}) as environment:
        for index, layout in enumerate(layouts):
            print_status(f"pilot {index + 1} of {len(layouts)}: {layout}")
            if layout.problem:
                pilot = Pilot(layout, "refused", detail=cut_end(layout.problem, _MAX_DETAIL))
            elif box.left_s <= 0:
                pilot = Pilot(layout, "not run", detail=f"--minutes {arguments.minutes:g} were over")
            else:
                pilot = _run_pilot(layout, folder / f"pilot_{index + 1:02}", run.num_nodes, box.left_s, environment)
            figure = f"{pilot.iteration_s:.3g} s an iteration" if pilot.outcome == "measured" else pilot.detail
            print_status(f"  {pilot.outcome}: {figure}")
            pilots.append(pilot)
    return pilots


def _run_pilot(layout: Layout, folder: Path, num_nodes: int, limit_s: float, environment: Mapping[str, str]) -> Pilot:
    """Run a pilot, and end everything that it has started."""
    folder.mkdir()
    run_folder, path = folder / "run", folder / "pilot.yaml"
    tree = build_pilot_tree(layout.tree, str(run_folder))
    write_file(path, format_tree([f"a pilot of mindspeed-rl plan tune: {layout}"], tree))
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "mindspeed_rl.cli.pilot", str(path), str(ITERATIONS), str(num_nodes)]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment, _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for this command, which ends the pilot
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process, mark)
    seconds = tuple(line["timing/all"] for line in _read_iterations(run_folder))
    if code is None:
        return Pilot(layout, "took too long", seconds, f"no {ITERATIONS} iterations within {limit_s / 60:.3g} minutes")
    if code == 0 and seconds:
        return Pilot(layout, "measured", seconds)
    outcome, detail = _read_failure(run_folder, folder / "output.txt", code)
    return Pilot(layout, outcome, seconds, detail)


def _read_iterations(folder: Path) -> list[dict[str, float]]:
    """Return the records of the iterations of a run folder so far; without the evaluation before them."""
    path = folder / "metrics.jsonl"
    lines = list(read_lines(path)) if path.is_file() else []
    return [line for line in lines if line.get("iteration") and "timing/all" in line]


def _read_failure(folder: Path, output: Path, code: int) -> tuple[Outcome, str]:
    """Return the outcome of a pilot that has ended in an error, and the reason in a line."""
    text = ""
    with contextlib.suppress(OSError, ValueError):
        text = str(read_json(folder / "report.json").get("outcome", "")).removeprefix("failed: ")
    if not text or text == "running":
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        text = errors[-1] if errors else f"its process ended with exit code {code}"
    is_memory = any(words in text.lower() for words in ("out of memory", "memoryerror", "devicememoryerror", "oom-kill"))
    return "out of memory" if is_memory else "failed", cut_end(text, _MAX_DETAIL)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a pilot and all of its processes, wherever they have moved to, and remove its temporary folders.

    Signals wait until nothing of it is left.
    """
    held = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        end_session(process, _END_S)
        end_s = time.monotonic() + _LINGER_S
        while (left := _find_marked(mark)) and time.monotonic() < end_s:
            time.sleep(0.2)
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(left, timeout=_LINGER_S)
        remove_folders_of(process.pid)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)


def _find_marked(mark: str) -> list[psutil.Process]:
    """Return the live processes of a pilot."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.status() != psutil.STATUS_ZOMBIE and one.environ().get(_MARK) == mark:
                found.append(one)
    return found


def _write(path: Path, text: str) -> None:
    try:
        write_file(path, text)
    except FileWriteError as error:
        raise ValueError(f"--output: {error}.") from None
