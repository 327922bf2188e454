"""Puts a supervised run together, runs it, and ends everything it started whatever happens."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from mindspeed_rl import platform
from mindspeed_rl.config import BatchPlan, ConfigError, MegatronConfig, RLConfig, RunConfig, build_batch_plan, unavailable
from mindspeed_rl.data.indexed import packed_columns
from mindspeed_rl.observability.progress import IterationProgress
from mindspeed_rl.observability.trackers import make_trackers
from mindspeed_rl.trainers.run_folder import absolute_paths, is_weight, recorded_run
from mindspeed_rl.trainers.supervised import SupervisedJournal, SupervisedTrainer
from mindspeed_rl.workers.launch import WorkerGroup, cluster
from mindspeed_rl.workers.model_source import find_model, load_tokenizer_of
from mindspeed_rl.workers.supervised import SupervisedWorker, has_own_reference, reference_of


def run_supervised(cfg: RunConfig, *, num_nodes: int = 1) -> Path:
    """Trains as the run file says and returns the run folder.

    Raises:
        ConfigError, ValueError: a key or file is wrong.
        WorkerFailed: a worker died or raised.
    """
    plan = build_batch_plan(cfg, num_nodes)
    if missing := unavailable(cfg):
        raise ConfigError(f"not available in this version: {sentence}" for sentence in missing)
    if not plan.train_iters:
        raise ValueError("megatron_training.train_iters: not set; say how many optimizer steps the run has.")
    config = cfg.actor_config
    source = find_model(config, "megatron_training")
    load_tokenizer_of(config, source)  # raises where there is none
    check_data(config)
    if config.stage == "dpo" and has_own_reference(config):
        reference_of(config, source)
    chosen = platform.detect() if cfg.platform == "auto" else cfg.platform
    with recorded_run(cfg) as record:
        cfg = absolute_paths(cfg)
        with _built(cfg, plan, chosen, record.folder) as trainer:
            record.journal = trainer.journal
            trainer.fit()
    return record.folder


#: columns a stage reads; Megatron's dataset of stage pretrain has one file without columns
_COLUMNS = {
    "sft": ("input_ids", "attention_mask", "labels"),
    **dict.fromkeys(("dpo", "simpo"), ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")),
    "orm": ("chosen_input_ids", "rejected_input_ids"),
    "prm": ("input_ids", "labels"),
}


def check_data(config: MegatronConfig) -> None:
    """Looks for the files that the workers will read; what is in them, the workers check.

    Raises:
        ValueError: data_path is not set, or a file or column that the stage needs does not exist.
    """
    for key in ("data_path", "eval_data_path"):
        value = getattr(config, key)
        if value is None and key == "data_path":
            raise ValueError(f"megatron_training.data_path: not set; stage {config.stage} learns from it.")
        for prefix in [] if value is None else value if isinstance(value, list) else [value]:
            if config.stage == "pretrain":
                missing = [] if is_weight(prefix) or Path(f"{prefix}.idx").expanduser().is_file() else [f"{prefix}.idx"]
                hint = "give the whole prefix, with _text_document"
            else:
                found = packed_columns(Path(str(prefix)).expanduser())
                missing = [f"{prefix}_packed_{name}_document.idx" for name in _COLUMNS[config.stage] if name not in found]
                hint = f"found {', '.join(found) or 'no column at all'}; give the --output-prefix of preprocessing"
            if missing:
                raise ValueError(f"megatron_training.{key}: {missing[0]} does not exist ({hint}).")


@contextlib.contextmanager
def _built(cfg: RunConfig, plan: BatchPlan, platform_name: str, run_dir: Path) -> Iterator[SupervisedTrainer]:
    """A trainer with its workers running; they end with the block."""
    config = cfg.actor_config
    trackers = make_trackers(cfg.rl_config or RLConfig(), run_dir, dataclasses.asdict(cfg))
    print(f"run folder: {run_dir}\nstarting {plan.world_size} workers on {platform_name} ...", flush=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cluster(plan.world_size, platform_name))
        workers = WorkerGroup(SupervisedWorker, cfg, plan, platform_name, run_dir)
        stack.callback(workers.close)
        resumed = workers.set_up()
        data = workers.data()[0]
        print(data, flush=True)
        start = resumed.get("iteration", 0)
        if resumed:
            print(f"resumed after iteration {start}", flush=True)
        title = Path(cfg.config_name).stem
        progress = stack.enter_context(IterationProgress(plan.train_iters, title, start=start, every=config.log_interval))
        journal = SupervisedJournal(run_dir, trackers, progress)
        journal.num_devices = plan.world_size
        stack.callback(journal.close)
        evaluates = data.num_held_out > 0
        if config.skip_train and not evaluates:
            raise ValueError("megatron_training.skip_train: there is nothing to evaluate on; set eval_data_path or split.")
        yield SupervisedTrainer(workers, config, plan, journal, evaluates=evaluates, start_iteration=start)
