"""Puts a reinforcement-learning run together, runs it, and ends everything it started whatever happens."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindspeed_rl import platform
from mindspeed_rl.config import (
    BatchPlan,
    ConfigError,
    MegatronConfig,
    RunConfig,
    build_batch_plan,
    own_reward_devices,
    resolve_objective,
    unavailable,
)
from mindspeed_rl.data.prompts import PromptDataset, PromptSettings, open_prompts
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.dataplane import ALIASES as DATA_STRATEGY_ALIASES
from mindspeed_rl.dataplane.client import DataPlane, make_data_plane
from mindspeed_rl.observability.progress import IterationProgress
from mindspeed_rl.observability.trackers import make_trackers
from mindspeed_rl.trainers.advantage_stage import ADVANTAGE_COLUMNS, AdvantageStage
from mindspeed_rl.trainers.evaluation import Evaluator
from mindspeed_rl.trainers.greedy_baselines import GreedyBaselines, NoBaselines
from mindspeed_rl.trainers.model_rewards import ModelRewards, NoModelRewards
from mindspeed_rl.trainers.rl import RLTrainer
from mindspeed_rl.trainers.rollout_journal import RolloutJournal
from mindspeed_rl.trainers.rollout_stage import PROMPT_COLUMNS, PromptFeed, make_rollout
from mindspeed_rl.trainers.run_folder import absolute_paths, recorded_run
from mindspeed_rl.trainers.schedule import Schedule
from mindspeed_rl.workers.columns import WORKER_COLUMNS
from mindspeed_rl.workers.integrated import IntegratedWorker
from mindspeed_rl.workers.launch import RewardGroup, WorkerGroup, cluster, worker_environment
from mindspeed_rl.workers.model_source import find_model, lacks_score_head, reward_model_config
from mindspeed_rl.workers.reward_model import RewardModelWorker

#: who uses the data plane in this loop, and the columns that each puts
DATA_PLANE_USERS = {
    "trainer": PROMPT_COLUMNS,
    **WORKER_COLUMNS,
    "dynamic_sampling": (),
    "compute_advantage": ADVANTAGE_COLUMNS,
    "metrics": (),
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run reads before anything is started.

    Attributes:
        held_out: None without evaluation.
    """

    tokenizer: Any
    tokenizer_path: str
    prompts: PromptDataset
    held_out: PromptDataset | None


def run_rl(cfg: RunConfig, *, num_nodes: int = 1) -> Path:
    """Trains as the run file says and returns the run folder.

    Everything that can be wrong in files and keys is found before Ray starts.

    Raises:
        ConfigError, ValueError: a key or file is wrong.
        WorkerFailed: a worker died or raised.
    """
    plan = build_batch_plan(cfg, num_nodes)
    if missing := unavailable(cfg):
        raise ConfigError(f"not available in this version: {sentence}" for sentence in missing)
    if not plan.train_iters:
        raise ValueError("actor_config.train_iters: not set; say how many iterations the run has.")
    chosen = platform.detect() if cfg.platform == "auto" else cfg.platform
    actor = cfg.actor_config
    source = find_model(actor, "actor_config")
    tokenizer_path = str(Path(actor.tokenizer_name_or_path or source.hf_folder).expanduser())
    tokenizer = load_tokenizer(tokenizer_path, use_fast=not actor.tokenizer_not_use_fast)
    prompts = open_run_prompts(cfg, actor.data_path, tokenizer, "data_path")
    held_out = open_run_prompts(cfg, actor.eval_data_path, tokenizer, "eval_data_path") if actor.eval_data_path else None
    inputs = Inputs(tokenizer, tokenizer_path, prompts, held_out)
    _check_models(cfg, inputs)
    with recorded_run(cfg) as record:
        cfg = absolute_paths(cfg)
        with _built(cfg, plan, chosen, record.folder, inputs) as trainer:
            record.journal = trainer.journal
            trainer.fit()
    return record.folder


def _check_models(cfg: RunConfig, inputs: Inputs) -> None:
    """Says where the critic's head comes from; raises for a reward model that cannot read the actor's tokens."""
    if resolve_objective(cfg).has_critic and cfg.critic_config is not None:
        critic = find_model(cfg.critic_config, "critic_config")
        if lacks_score_head(critic):
            print(f"critic: {critic.weights} has no score head; it starts with a fresh one, whose values are 0", flush=True)
    reward = reward_model_config(cfg)
    if reward is None:
        return
    folder = find_model(reward, "reward_config").hf_folder
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return
    other = load_tokenizer(folder, use_fast=not cfg.actor_config.tokenizer_not_use_fast)
    if other.get_vocab() != inputs.tokenizer.get_vocab():
        raise ValueError(
            f"reward_config.load: the tokenizer of {folder} differs from the actor's ({inputs.tokenizer_path}), but the reward "
            "model reads the actor's token ids."
        )


def open_run_prompts(cfg: RunConfig, path: Any, tokenizer: Any, key: str) -> PromptDataset:
    """The prompts at `path`, the value of `actor_config.<key>`, read as the run file says."""
    if not isinstance(path, str):
        raise ValueError(f"actor_config.{key}: {path!r} must be one prefix or file of prompts.")
    actor = cfg.actor_config
    return open_prompts(
        path,
        tokenizer,
        max_prompt_length=cfg.rl_config.max_prompt_length,
        dataset_additional_keys=actor.dataset_additional_keys or None,
        settings=_raw_prompts(actor),
    )


def _raw_prompts(actor: MegatronConfig) -> PromptSettings:
    """How prompts that were not preprocessed are read."""
    columns = None
    if actor.map_keys is not None:
        columns = {name: column for name, column in dataclasses.asdict(actor.map_keys).items() if column is not None}
    return PromptSettings(
        prompt_type=actor.prompt_type,
        prompt_type_path=_existing(actor.prompt_type_path),
        map_keys=columns,
        handler_name=actor.handler_name,
        enable_thinking="none" if actor.enable_thinking is None else "true" if actor.enable_thinking else "false",
        on_bad_row=actor.on_bad_row,
    )


def _existing(path: str | None) -> str | None:
    """The template file of the run file when there is one; the built-in templates otherwise."""
    return path if path and Path(path).is_file() else None


@contextlib.contextmanager
def _built(cfg: RunConfig, plan: BatchPlan, platform_name: str, run_dir: Path, inputs: Inputs) -> Iterator[RLTrainer]:
    """A trainer with workers, rewards and data plane running; they end with the block."""
    rl = cfg.rl_config
    trackers = make_trackers(rl, run_dir, dataclasses.asdict(cfg))
    print(f"run folder: {run_dir}\n{inputs.prompts.describe()}", flush=True)
    apart = own_reward_devices(cfg) or 0
    beside = f" and {apart} for the reward model" if apart else ""
    print(f"starting {plan.world_size} workers{beside} on {platform_name} ...", flush=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cluster(plan.world_size + apart, platform_name))
        plane = open_data_plane(cfg, plan)
        stack.callback(plane.close)
        workers = WorkerGroup(IntegratedWorker, cfg, plan, platform_name, run_dir, plane)
        stack.callback(workers.close)
        rewards = RewardGroup(cfg, plan, plane, inputs.tokenizer_path, run_dir, worker_environment(cfg, platform_name))
        stack.callback(rewards.close)
        first = inputs.prompts[0]
        rewards.check(first["prompt_ids"], first["label"], first["columns"])
        scorers = workers
        if apart:
            theirs = dataclasses.replace(plan, world_size=apart)
            scorers = WorkerGroup(RewardModelWorker, cfg, theirs, platform_name, run_dir, plane)
            stack.callback(scorers.close)
            scorers.set_up(plane)
        resumed = workers.set_up(plane, uuid.uuid4().hex[:12])
        start = resumed.get("iteration", 0)
        progress = stack.enter_context(IterationProgress(plan.train_iters, Path(cfg.config_name).stem, start=start))
        journal = RolloutJournal(cfg, plan, run_dir, trackers, progress, inputs.tokenizer)
        stack.callback(journal.close)
        trainer = assemble(cfg, plan, plane, workers, scorers, rewards, inputs, journal, resumed)
        if resumed:
            print(f"resumed after iteration {start}", flush=True)
        yield trainer


def open_data_plane(cfg: RunConfig, plan: BatchPlan) -> DataPlane:
    """The data plane that the run file asks for, for the users of this loop."""
    rl = cfg.rl_config
    options = {}
    if DATA_STRATEGY_ALIASES.get(rl.data_strategy, rl.data_strategy) == "tq":
        options["num_storage_units"] = rl.transfer_queue_data_shard_num
    return make_data_plane(rl.data_strategy, plan.num_prompts, plan.n_samples_per_prompt, DATA_PLANE_USERS, **options)


def assemble(
    cfg: RunConfig,
    plan: BatchPlan,
    plane: DataPlane,
    workers: WorkerGroup,
    scorers: WorkerGroup,
    rewards: RewardGroup,
    inputs: Inputs,
    journal: RolloutJournal,
    resumed: Mapping[str, Any],
) -> RLTrainer:
    """The loop of this run file on workers that are set up.

    Args:
        scorers: who holds the reward model, if there is one.
        resumed: what `WorkerGroup.set_up` returned.
    """
    actor = cfg.actor_config
    model_rewards = NoModelRewards() if reward_model_config(cfg) is None else ModelRewards(cfg, scorers, plane)
    evaluator = Evaluator(cfg, inputs.held_out, workers, rewards, model_rewards)
    baselines: GreedyBaselines | NoBaselines = NoBaselines()
    if "greedy_baseline" in resolve_objective(cfg).needs:
        baselines = GreedyBaselines(plan, plane, evaluator, model_rewards, timeout_s=cfg.rl_config.wait_timeout_s)
    feed = PromptFeed(inputs.prompts, plane, plan, seed=actor.seed, shuffle=not actor.no_shuffle)
    rollout, to_add = make_rollout(cfg, plan, feed, workers, rewards, plane, model_rewards)
    schedule = Schedule(cfg, plan)
    if resumed:
        schedule.load_state_dict(resumed["run_state"])
        rollout.load_state_dict(resumed["run_state"]["rollout"])
    advantages = AdvantageStage(cfg, plan, plane, journal, baselines, schedule)
    start = resumed.get("iteration", 0)
    return RLTrainer(workers, rollout, baselines, to_add, advantages, evaluator, schedule, journal, start_iteration=start)
