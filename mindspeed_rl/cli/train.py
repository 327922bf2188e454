"""`mindspeed-rl train`: train with a run file."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mindspeed_rl import registry
from mindspeed_rl.cli.main import keep_without_reader
from mindspeed_rl.cli.options import RunParser, print_status, report_failure
from mindspeed_rl.config import RunConfig, load_run_config
from mindspeed_rl.config.model_metadata import VISION_VARIABLE
from mindspeed_rl.importing import collecting_seldom
from mindspeed_rl.observability.alerts import find_alerts
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.logging import build_quiet_environment
from mindspeed_rl.observability.run_files import read_lines
from mindspeed_rl.run import Run
from mindspeed_rl.run.hub_models import Hubs, fetch_configs
from mindspeed_rl.runtime.fork_server import RL, TRAINING, build_local_ray_environment, fork_server

#: alerts after which trainer and rollout engine are compared, and seconds that this may take
_COMPARED, _COMPARISON_S = frozenset(("mismatch_depth", "mismatch_token")), 1800.0


def main(argv: list[str]) -> int:
    """Train; return 0 on success, 1 when the run failed, 2 for a wrong run file, 130 after Ctrl-C, 143 after SIGTERM.

    The run goes on when the reader of its output ends.
    """
    keep_without_reader()
    parser = RunParser(prog="mindspeed-rl train", description="Train with a run file.")
    parser.add_argument("--config-name", "--config", default=None, help="run file, with or without .yaml")
    parser.add_argument(
        "--from-swift", metavar="COMMAND", default=None,
        help="train with this command of ms-swift; its run file is written first (from_swift.yaml, or --config-name)",
    )  # fmt: skip
    parser.add_argument("--config-dir", default=None, help="folder of the run file; default: the project's configs/")
    parser.add_argument("--nodes", type=int, default=1, help="machines the devices are spread over")
    parser.add_argument(
        "--strict", action="store_true",
        help="start no run that is predicted not to fit, and end one that is not as promised after 3, 10 or 50 iterations",
    )  # fmt: skip
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example rl_config.clip_ratio=0.1")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.config_name is None and arguments.from_swift is None:
        parser.error("--config-name or --from-swift is needed")
    run, launched_s = None, time.time() - 1.0  # file systems may count in whole seconds
    try:
        if arguments.from_swift is not None:
            if arguments.config_dir is not None:
                parser.error("--config-dir is for an existing run file; --config-name is the path that --from-swift writes")
            written = Path(arguments.config_name or "from_swift.yaml").resolve()
            # by name: importers are the top floor, which no module imports
            write_import = registry.load("mindspeed_rl.importers.command:write_import", "train")
            arguments.config_name = str(write_import("swift", arguments.from_swift, written)[0])
        cfg = load_run_config(arguments.config_name, arguments.config_dir, arguments.overrides)
        if cfg.serve_config is not None:
            raise ValueError(
                f"{cfg.config_name} has the group serve_config: it is the run file of a server; mindspeed-rl serve starts it"
            )
        with prepare_run(cfg, arguments.nodes) as run:
            # these also import Ray
            from mindspeed_rl.trainers.launch import launch
            from mindspeed_rl.trainers.recovery import Recovery
            from mindspeed_rl.trainers.termination import Terminated, Termination

            predict = registry.load("mindspeed_rl.planner.prediction:predict", "train")
            bands = registry.load("mindspeed_rl.cli.bands:find_bands", "train")(run)
            advise = partial(predict, bands=bands, is_strict=arguments.strict)
            if arguments.strict and not (expected := predict(run)).fits:
                raise ValueError(f"--strict: the run is not predicted to fit: {expected.summary}")
            shrinker = registry.load("mindspeed_rl.planner.shrink:Shrinker", "train")
            resolve = registry.load("mindspeed_rl.run.models:resolve_run", "train")
            fit = shrinker(run, arguments.config_name, arguments.config_dir, arguments.overrides, resolve)
            recovery = Recovery(run, fit)
            try:
                with Termination().handled():  # also between two attempts
                    for attempt in recovery.attempts():
                        with recovery.retry_on_fault(), launch(attempt, advise, recovery.observers) as trainer:
                            recovery.follow(trainer.termination)
                            trainer.fit()
            except Terminated as error:
                print_status(str(error))
                _print_resume(run, launched_s)
                return error.exit_code
    except (ValueError, RuntimeError, OSError) as error:
        code = report_failure(error)
        if not isinstance(error, ValueError):
            _print_resume(run, launched_s)
        if run is not None and isinstance(error, registry.load("mindspeed_rl.trainers.old_policy:DisagreementError", "train")):
            _compare_engines(run)
        return code
    print(f"finished: {run.folder}")
    if needs_comparison(run.folder):
        _compare_engines(run)
    return 0


def needs_comparison(folder: Path) -> bool:
    """Return True where the figures of a run say that trainer and rollout engine differ at some depth or class of tokens."""
    alerts = find_alerts(History(read_lines(folder / "metrics.jsonl")))
    return any(alert.kind in _COMPARED for alert in alerts)


def _compare_engines(run: Run) -> None:
    """Run `diff train rollout` on a run that has ended, which names the first module that differs; it decides nothing."""
    result = run.folder / "mismatch.json"
    print(f"trainer and rollout engine differ: comparing them module by module, result in {result} ...", flush=True)
    command = [sys.executable, "-m", "mindspeed_rl.cli.main", "diff", "train", "rollout", "--run", str(run.folder)]
    command += ["--nodes", str(run.num_nodes)]
    try:
        subprocess.run([*command, "--json", str(result)], timeout=_COMPARISON_S, check=False)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        when = "" if isinstance(error, KeyboardInterrupt) else f" after {_COMPARISON_S:g} s"
        print_status(f"the comparison was ended{when}; repeat it with: {' '.join(command[2:])}")


@contextlib.contextmanager
def prepare_run(cfg: RunConfig, num_nodes: int) -> Iterator[Run]:
    """Prepare this process for a run and yield it; workers may be started in the block.

    Raises:
        ValueError: the run file is wrong; all violations are named.
    """
    registry.search_folders(cfg.plugin_folders)
    prepare_environment()
    hubs = Hubs()
    cfg = fetch_configs(cfg, hubs)  # first: what a model reads decides which libraries are imported
    if cfg.reads_images:
        os.environ[VISION_VARIABLE] = "1"
    # to the end: apart from importing, the driver waits and records metrics
    with collecting_seldom(), fork_server(cfg.platform, TRAINING if cfg.is_supervised else RL):
        # by name: this imports torch and transformers, which read the environment
        yield registry.load("mindspeed_rl.run.models:resolve_run", "train")(cfg, num_nodes, hubs=hubs)


def _print_resume(run: Run | None, launched_s: float) -> None:
    """Print how to resume a run that has ended early, if it was launched."""
    if run is not None:
        # by name, as in main: it imports torch
        describe_resume = registry.load("mindspeed_rl.run.resume:describe_resume", "train")
        print(describe_resume(run, launched_s), file=sys.stderr)


def prepare_environment() -> None:
    """Hide devices and library output from the driver; call before torch, Ray and transformers are imported."""
    os.environ.update(build_quiet_environment(os.environ))
    os.environ.update(build_local_ray_environment(os.environ))
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
