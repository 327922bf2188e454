"""Puts a reinforcement-learning run together, runs it, and ends everything it started whatever happens."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_rl import platform
from mindspeed_rl.config import BatchPlan, RunConfig, build_batch_plan
from mindspeed_rl.data.prompts import PromptDataset, PromptSettings, open_prompts
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.dataplane.client import make_data_plane
from mindspeed_rl.dataplane.records import ColumnSpec, rl_columns
from mindspeed_rl.observability.progress import IterationProgress
from mindspeed_rl.observability.trackers import make_trackers
from mindspeed_rl.trainers.advantage_stage import AdvantageStage
from mindspeed_rl.trainers.evaluation import Evaluator
from mindspeed_rl.trainers.rl import RLTrainer
from mindspeed_rl.trainers.rollout_journal import RolloutJournal
from mindspeed_rl.trainers.rollout_stage import PromptFeed, make_rollout
from mindspeed_rl.trainers.run_folder import absolute_paths, recorded_run
from mindspeed_rl.trainers.schedule import Schedule
from mindspeed_rl.workers.integrated import IntegratedWorker
from mindspeed_rl.workers.launch import RewardGroup, WorkerGroup, cluster, worker_environment
from mindspeed_rl.workers.model_source import find_model

#: columns of this loop besides those every loop has
_COLUMNS = {
    "truncated": ColumnSpec("actor_rollout"),
    "scored_mask": ColumnSpec("compute_advantage"),
    "loss_mask": ColumnSpec("compute_advantage"),
    "reward_results": ColumnSpec("rule_reward"),
}


def run_rl(cfg: RunConfig, *, num_nodes: int = 1) -> Path:
    """Trains as the run file says and returns the run folder.

    Everything that can be wrong in files and keys is found before Ray starts.

    Raises:
        ConfigError, ValueError: a key or file is wrong.
        WorkerFailed: a worker died or raised.
    """
    plan = build_batch_plan(cfg, num_nodes)
    if not plan.train_iters:
        raise ValueError("actor_config.train_iters: not set; say how many iterations the run has.")
    chosen = platform.detect() if cfg.platform == "auto" else cfg.platform
    actor = cfg.actor_config
    source = find_model(actor, "actor_config")
    tokenizer_path = str(Path(actor.tokenizer_name_or_path or source.hf_folder).expanduser())
    tokenizer = load_tokenizer(tokenizer_path, use_fast=not actor.tokenizer_not_use_fast)
    prompts = _open(cfg, actor.data_path, tokenizer, "data_path")
    held_out = _open(cfg, actor.eval_data_path, tokenizer, "eval_data_path") if actor.eval_data_path else None
    with recorded_run(cfg) as record:
        cfg = absolute_paths(cfg)
        with _built(cfg, plan, chosen, record.folder, tokenizer, tokenizer_path, prompts, held_out) as trainer:
            record.journal = trainer.journal
            trainer.fit()
    return record.folder


def _open(cfg: RunConfig, path: Any, tokenizer: Any, key: str) -> PromptDataset:
    if not isinstance(path, str):
        raise ValueError(f"actor_config.{key}: {path!r} must be one prefix or file of prompts.")
    actor = cfg.actor_config
    return open_prompts(
        path,
        tokenizer,
        max_prompt_length=cfg.rl_config.max_prompt_length,
        dataset_additional_keys=actor.dataset_additional_keys or ("labels",),
        settings=PromptSettings(prompt_type=actor.prompt_type, prompt_type_path=_existing(actor.prompt_type_path)),
    )


def _existing(path: str | None) -> str | None:
    """The template file of the run file when there is one; the built-in templates otherwise."""
    return path if path and Path(path).is_file() else None


@contextlib.contextmanager
def _built(
    cfg: RunConfig,
    plan: BatchPlan,
    platform_name: str,
    run_dir: Path,
    tokenizer: Any,
    tokenizer_path: str,
    prompts: PromptDataset,
    held_out: PromptDataset | None,
) -> Iterator[RLTrainer]:
    """A trainer with workers, rewards and data plane running; they end with the block."""
    rl, actor = cfg.rl_config, cfg.actor_config
    trackers = make_trackers(rl, run_dir, dataclasses.asdict(cfg))
    schedule = Schedule(cfg, plan)
    print(f"run folder: {run_dir}\n{prompts.describe()}\nstarting {plan.world_size} workers on {platform_name} ...", flush=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cluster(plan, platform_name))
        plane = make_data_plane(rl.data_strategy, plan.num_prompts, plan.n_samples_per_prompt, columns=rl_columns() | _COLUMNS)
        stack.callback(plane.close)
        workers = WorkerGroup(IntegratedWorker, cfg, plan, platform_name, run_dir, plane)
        stack.callback(workers.close)
        rewards = RewardGroup(cfg, plan, plane, tokenizer_path, run_dir, worker_environment(cfg, platform_name))
        stack.callback(rewards.close)
        first = prompts[0]
        rewards.check(first["prompt_ids"], first["label"], first["columns"])
        resumed = workers.set_up(plane, uuid.uuid4().hex[:12])
        start = resumed.get("iteration", 0)
        progress = stack.enter_context(IterationProgress(schedule.train_iters, Path(cfg.config_name).stem, start=start))
        journal = RolloutJournal(cfg, plan, run_dir, trackers, progress, tokenizer)
        stack.callback(journal.close)
        feed = PromptFeed(prompts, plane, plan, seed=actor.seed, shuffle=not actor.no_shuffle)
        rollout = make_rollout(cfg, plan, feed, workers, rewards, plane)
        evaluator = Evaluator(held_out, workers, rewards, num_prompts=actor.eval_num_prompts, seed=actor.seed)
        if resumed:
            schedule.load_state_dict(resumed["run_state"])
            rollout.load_state_dict(resumed["run_state"]["rollout"])
            print(f"resumed after iteration {start}", flush=True)
        advantages = AdvantageStage(cfg, plan, plane, journal, greedy_rewards=evaluator.greedy_rewards)
        yield RLTrainer(workers, rollout, advantages, evaluator, schedule, journal, start_iteration=start)
