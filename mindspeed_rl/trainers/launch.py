"""The beginning and the end of every run: checks, run folder, cluster, workers, logger; and all of it ended afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path

from mindspeed_rl.config import RLConfig, Run
from mindspeed_rl.config.explain.warnings import run_warnings
from mindspeed_rl.observability import heartbeat
from mindspeed_rl.observability.console import table
from mindspeed_rl.observability.progress import IterationProgress
from mindspeed_rl.observability.steps import StartSteps
from mindspeed_rl.observability.trackers import make_trackers
from mindspeed_rl.planner.prediction import predict
from mindspeed_rl.runtime.cluster import cluster
from mindspeed_rl.trainers.key_data import write_configurations
from mindspeed_rl.trainers.plan_table import plan_rows
from mindspeed_rl.trainers.rl import RLTrainer
from mindspeed_rl.trainers.rl_setup import RLParts
from mindspeed_rl.trainers.run_folder import absolute_paths, reported
from mindspeed_rl.trainers.sft_setup import SupervisedParts
from mindspeed_rl.trainers.supervised import SupervisedTrainer
from mindspeed_rl.trainers.termination import Ending, Terminated


@contextlib.contextmanager
def started(run: Run) -> Iterator[RLTrainer | SupervisedTrainer]:
    """A trainer with everything that it needs running.

    Everything that can be wrong in files and keys is found before Ray starts. When the block ends, however it ends, all
    processes are gone and the run folder has a report of the outcome.

    SIGTERM is handled in the block; see `Ending`.

    Raises:
        ValueError: a key or file is wrong.
        WorkerFailed: a worker died or raised.
        Terminated: SIGTERM came.
    """
    steps = StartSteps()
    run = dataclasses.replace(run, prediction=predict(run))
    cfg = run.config
    # before the run folder is made: a mistake in a key leaves none behind
    parts = SupervisedParts(run) if cfg.is_supervised else RLParts(run)
    run, cfg = parts.run, parts.run.config  # with the length of the run, where the prompts decide it
    ending = Ending(cfg.actor_config.sigterm_grace_s)
    with ending.installed(), reported(run) as report, _whoever_ended_it(ending), contextlib.ExitStack() as stack:
        beat = heartbeat.begin(run.folder, "driver", interval_s=run.fault_tolerance.heartbeat_interval_s)
        stack.callback(beat.end)
        absolute_paths(cfg)
        write_configurations(run)
        goes_on_after = parts.beginning.iteration
        trackers = make_trackers(cfg.rl_config or RLConfig(), run.folder, dataclasses.asdict(cfg), goes_on_after=goes_on_after)
        steps.done("files and keys are checked")
        print(table(f"run folder: {run.folder}", plan_rows(run, parts.num_devices)), flush=True)
        print(parts.describe(), flush=True)
        for text in run_warnings(cfg, run.num_nodes):
            print(f"warning: {text}", flush=True)
        beside = (cfg.rl_config or RLConfig()).num_cpus_for_placement_group
        logs = run.folder / "logs" / "ray"
        stack.enter_context(cluster(parts.num_devices, run.platform, cpus_per_device=beside, logs=logs))
        ending.install()
        steps.done("Ray runs")
        resumed = parts.start(stack, steps)
        start = resumed.get("iteration", 0)
        assert run.plan.train_iters is not None  # resolve refuses a run without a length
        title = Path(cfg.config_name).stem
        progress = stack.enter_context(IterationProgress(run.plan.train_iters, title, start=start, every=parts.log_every))
        logger = parts.logger(trackers, progress)
        report.show(logger)
        logger.steps = steps
        stack.callback(logger.close)
        trainer = parts.trainer()
        trainer.ending = ending
        yield trainer


@contextlib.contextmanager
def _whoever_ended_it(ending: Ending) -> Iterator[None]:
    """Workers that got the same SIGTERM as the driver have not failed; nor has Ray, whose handler is there while it starts."""
    try:
        yield
    except SystemExit as error:
        if error.code != signal.SIGTERM:
            raise
        raise Terminated("SIGTERM: all workers were ended.") from error
    except (RuntimeError, TimeoutError) as error:
        if not ending.requested:
            raise
        raise Terminated(f"SIGTERM: the run ended before the iteration did: {error}") from error
