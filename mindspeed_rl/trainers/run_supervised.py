"""Puts a supervised run together, runs it, and ends everything it started whatever happens."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from mindspeed_rl import platform
from mindspeed_rl.config import BatchPlan, RLConfig, RunConfig, build_batch_plan
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.observability.progress import IterationProgress
from mindspeed_rl.observability.trackers import make_trackers
from mindspeed_rl.trainers.run_folder import absolute_paths, recorded_run
from mindspeed_rl.trainers.supervised import SupervisedJournal, SupervisedTrainer
from mindspeed_rl.workers.launch import WorkerGroup, cluster
from mindspeed_rl.workers.model_source import find_model
from mindspeed_rl.workers.supervised import SupervisedWorker


def run_supervised(cfg: RunConfig, *, num_nodes: int = 1) -> Path:
    """Trains as the run file says and returns the run folder.

    Raises:
        ConfigError, ValueError: a key or file is wrong.
        WorkerFailed: a worker died or raised.
    """
    plan = build_batch_plan(cfg, num_nodes)
    if not plan.train_iters:
        raise ValueError("megatron_training.train_iters: not set; say how many optimizer steps the run has.")
    config = cfg.actor_config
    source = find_model(config, "megatron_training")
    load_tokenizer(config.tokenizer_name_or_path or source.hf_folder, use_fast=not config.tokenizer_not_use_fast)
    check_data(cfg)
    chosen = platform.detect() if cfg.platform == "auto" else cfg.platform
    with recorded_run(cfg) as record:
        cfg = absolute_paths(cfg)
        with _built(cfg, plan, chosen, record.folder) as trainer:
            record.journal = trainer.journal
            trainer.fit()
    return record.folder


def check_data(cfg: RunConfig) -> None:
    """Raises ValueError when the data that the run file names does not exist or has the wrong columns."""


@contextlib.contextmanager
def _built(cfg: RunConfig, plan: BatchPlan, platform_name: str, run_dir: Path) -> Iterator[SupervisedTrainer]:
    """A trainer with its workers running; they end with the block."""
    config = cfg.actor_config
    trackers = make_trackers(cfg.rl_config or RLConfig(), run_dir, dataclasses.asdict(cfg))
    print(f"run folder: {run_dir}\nstarting {plan.world_size} workers on {platform_name} ...", flush=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cluster(plan, platform_name))
        workers = WorkerGroup(SupervisedWorker, cfg, plan, platform_name, run_dir)
        stack.callback(workers.close)
        resumed = workers.set_up()
        print(workers.describe()[0], flush=True)
        start = resumed.get("iteration", 0)
        if resumed:
            print(f"resumed after iteration {start}", flush=True)
        title = Path(cfg.config_name).stem
        progress = stack.enter_context(IterationProgress(plan.train_iters, title, start=start, every=config.log_interval))
        journal = SupervisedJournal(run_dir, trackers, progress)
        journal.num_devices = plan.world_size
        stack.callback(journal.close)
        evaluates = config.eval_data_path is not None
        yield SupervisedTrainer(workers, config, plan, journal, evaluates=evaluates, start_iteration=start)
