"""One set of worker processes on which many runs of reinforcement learning follow each other: the start is what takes long."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from ray import cloudpickle

from mindspeed_rl.config import BatchPlan, RunConfig, build_batch_plan, load_run_config
from mindspeed_rl.data.prompts import PromptSettings, open_prompts
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.progress import IterationProgress
from mindspeed_rl.observability.trackers import make_trackers
from mindspeed_rl.trainers.rl import RLTrainer
from mindspeed_rl.trainers.rollout_journal import RolloutJournal
from mindspeed_rl.trainers.run import Inputs, assemble, open_data_plane
from mindspeed_rl.workers.integrated import IntegratedWorker
from mindspeed_rl.workers.launch import RewardGroup, WorkerGroup, cluster, worker_environment

if TYPE_CHECKING:
    from mindspeed_rl.workers.role import Role

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it from here

_REWARD_DISPATCH = "reward_dispatch_size"
#: beginnings of what a reward worker reads; the reward model is not its business
_REWARD_KEYS = (
    "verifier_",
    "reward_failure",
    "reward_timeout",
    "external_plugins",
    "cosine_",
    "repetition_",
    "soft_",
    "overlong_b",
)


class VariantWorker(IntegratedWorker):
    """A worker whose next run is another one with the same models."""

    def restart(self, cfg: RunConfig, plan: BatchPlan, plane: DataPlane) -> None:
        """The next run is that of this run file, from the first weights and with fresh optimizers.

        The engine samples as the run file says; the trainer keeps the temperature that the models were built with, so that
        another one makes the two disagree.
        """
        from mindspeed_rl.workers.role import Role

        self.cfg, self.plan = cfg, plan
        self.phases.follow(cfg, plan, plane)
        keys, engine = cfg.generate_config.sampling_config, self.phases.rollout.engine
        engine.sampling = dataclasses.replace(engine.sampling, temperature=keys.temperature, max_tokens=keys.max_tokens)
        configs = {"actor": cfg.actor_config, "ref": cfg.ref_config, "critic": cfg.critic_config}
        for role in self._changing():
            if configs[role.name] is None:
                continue
            role.config = role.engine.config = configs[role.name]
            trains = role in self.phases.roles.trained()
            role.offloader.onload(params=True, grads=trains, optimizer=trains)
            Role._load_start(role, role.source)
            if trains:
                role.engine.start_training(plan.num_optimizer_steps)

    def _changing(self) -> list[Role]:
        roles = self.phases.roles
        return [role for role in (roles.actor, roles.reference, roles.critic) if role is not None]

    def weights(self) -> dict[str, np.ndarray]:
        """All weights of this rank's actor, reference and critic, each as one vector."""
        return {
            role.name: torch.cat([weight.value().flatten() for _, weight in sorted(role.stream.local_weights.items())])
            .detach()
            .numpy()
            .copy()
            for role in self._changing()
        }

    def num_steps(self) -> int:
        """Optimizer steps of the actor since the restart."""
        return self.phases.roles.actor.engine.scheduler.num_steps


class FlippedAdvantages:
    """An advantage stage with the sign of all advantages turned: the negative control."""

    def __init__(self, trainer: RLTrainer, plane: DataPlane, num_rows: int) -> None:
        self._stage, self._plane, self._rows = trainer.advantages, plane, range(num_rows)

    @property
    def entropy_threshold(self) -> float | None:
        return self._stage.entropy_threshold

    def run(self, iteration: int, *, kl_coef: float) -> Metrics:
        metrics = self._stage.run(iteration, kl_coef=kl_coef)
        batch, _ = self._plane.get("metrics", ["advantages"], indexes=self._rows, timeout_s=60.0)
        self._plane.put({"advantages": [-row for row in batch["advantages"]]}, self._rows, overwrite=True)
        return metrics


def task_overrides(task: Path) -> list[str]:
    """What points a run file of the tiny model at the tests' task, with small batches."""
    return [
        f"actor_config.load={task / 'model'}",
        f"megatron_training.tokenizer_name_or_path={task / 'model'}",
        f"megatron_training.data_path={task / 'train.jsonl'}",
        "megatron_training.eval_data_path=null",
        "model.tiny_qwen25.num_layers=null",  # the shape is that of config.json
        "actor_config.save=null",
        "generate_config.kv_cache_memory_gib=0.03",
    ]


def _critic_overrides(task: Path) -> list[str]:
    critic = {"load": task / "model", "save": "null", "tensor_model_parallel_size": 1, "micro_batch_size": 16}
    return [f"critic_config.{key}={value}" for key, value in critic.items()]


class World:
    """Workers with an actor, a reference, a critic and a reward model.

    Args:
        task: from `tiny_task.make_task`.
        folder: run folders go below it.
        overrides: of every run.

    Attributes:
        reward_model: folder of the reward model that a run may ask for.
        held_out: file of prompts that are not trained on.
    """

    def __init__(self, task: Path, folder: Path, overrides: Sequence[str]) -> None:
        self._task, self._folder, self._shared = task, folder, list(overrides)
        self._stack = contextlib.ExitStack()
        self._kept: dict[tuple, tuple[RewardGroup, DataPlane]] = {}
        self.reward_model, self.held_out = task / "reward_model", task / "heldout.jsonl"
        cfg, plan = self._load("ppo_tiny_cpu", [f"rl_config.reward_model={self.reward_model}"])
        self._tokenizer = load_tokenizer(task / "model")
        self._stack.enter_context(cluster(plan.world_size, "cpu"))
        plane = open_data_plane(cfg, plan)
        try:
            self.workers = WorkerGroup(VariantWorker, cfg, plan, "cpu", folder / "world", plane)
            self._stack.callback(self.workers.close)
            self.workers.set_up(plane, uuid.uuid4().hex[:12])
        except BaseException:
            self.close()
            raise
        plane.close()

    def close(self) -> None:
        for rewards, plane in self._kept.values():
            rewards.close()
            plane.close()
        self._stack.close()

    def _load(self, config_name: str, overrides: Sequence[str]) -> tuple[RunConfig, BatchPlan]:
        critic = _critic_overrides(self._task) if "ppo" in config_name else []
        cfg = load_run_config(config_name, None, [*task_overrides(self._task), *critic, *self._shared, *overrides])
        return cfg, build_batch_plan(cfg)

    def run(self, config_name: str, *overrides: str, iterations: int = 1, flip: bool = False) -> Run:
        """A run file has run from the first weights on.

        Args:
            flip: with the sign of the advantages turned.
        """
        cfg, plan = self._load(config_name, [*overrides, f"megatron_training.train_iters={iterations}"])
        rewards, plane = self._services(cfg, plan)
        self.workers.restart(cfg, plan, plane)
        run_dir = self._folder / f"{config_name}-{uuid.uuid4().hex[:6]}"
        run_dir.mkdir(parents=True)
        with self._journal(cfg, plan, run_dir) as journal:
            trainer = assemble(cfg, plan, plane, self.workers, self.workers, rewards, self._inputs(cfg), journal, {})
            if flip:
                trainer.advantages = FlippedAdvantages(trainer, plane, plan.num_train_samples)
            trainer.fit()
        return Run(run_dir, plan, journal.first, self.workers.weights()[0], self.workers.num_steps()[0], plane)

    def _services(self, cfg: RunConfig, plan: BatchPlan) -> tuple[RewardGroup, DataPlane]:
        """Reward worker and data plane; those of an earlier run where they suit."""
        rl = cfg.rl_config
        key = (cfg.generate_config.sampling_config.max_tokens, plan.n_samples_per_prompt, plan.dispatch_sizes[_REWARD_DISPATCH])
        key += (rl.data_strategy, *(str(value) for name, value in vars(rl).items() if name.startswith(_REWARD_KEYS)))
        if key not in self._kept:
            plane = open_data_plane(cfg, plan)
            env = worker_environment(cfg, "cpu")
            rewards = RewardGroup(cfg, plan, plane, str(self._task / "model"), self._folder / "world", env)
            self._kept[key] = rewards, plane
        return self._kept[key]

    def _inputs(self, cfg: RunConfig) -> Inputs:
        actor = cfg.actor_config

        def prompts(path: Any) -> Any:
            return open_prompts(
                path,
                self._tokenizer,
                max_prompt_length=cfg.rl_config.max_prompt_length,
                dataset_additional_keys=actor.dataset_additional_keys,
                settings=PromptSettings(),
            )

        held_out = prompts(actor.eval_data_path) if actor.eval_data_path else None
        return Inputs(self._tokenizer, str(self._task / "model"), prompts(actor.data_path), held_out)

    @contextlib.contextmanager
    def _journal(self, cfg: RunConfig, plan: BatchPlan, run_dir: Path) -> Iterator[RolloutJournal]:
        trackers = make_trackers(cfg.rl_config, run_dir, {})
        with IterationProgress(plan.train_iters, stream=io.StringIO()) as progress:
            journal = RolloutJournal(cfg, plan, run_dir, trackers, progress, self._tokenizer)
            try:
                yield journal
            finally:
                journal.close()


class Run:
    """What a run left behind.

    Attributes:
        plan: its batch plan.
        metrics: one dict of figures an iteration.
        first: of the evaluation before the first iteration.
        weights: by role, as one vector.
        num_steps: optimizer steps of the actor.
        plane: holds the rows of the last iteration until the next run.
    """

    def __init__(
        self,
        folder: Path,
        plan: BatchPlan,
        first: dict[str, float],
        weights: dict[str, np.ndarray],
        num_steps: int,
        plane: DataPlane,
    ) -> None:
        self.folder, self.plan, self.first = folder, plan, first
        self.weights, self.num_steps, self.plane = weights, num_steps, plane
        self.metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def column(self, name: str) -> list[float]:
        """A figure over the iterations."""
        return [record[name] for record in self.metrics]

    def rows(self, *columns: str) -> list[list[Any]]:
        """Columns of the rows that the last iteration trained on."""
        batch, _ = self.plane.get("metrics", list(columns), indexes=range(self.plan.num_train_samples), timeout_s=60.0)
        return [list(batch[name]) for name in columns]
