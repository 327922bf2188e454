"""One set of worker processes on which many runs of reinforcement learning follow each other: the start is what takes long."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from call_path import Call
from patience import patient
from shared_forks import shared

from mindspeed_rl.config import load_run_config
from mindspeed_rl.data.prompts import PromptSettings, open_prompts
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.console import IterationProgress
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.trackers import make_trackers
from mindspeed_rl.run import Run as ResolvedRun
from mindspeed_rl.run.batch_sizes import BatchPlan
from mindspeed_rl.run.models import plan_models
from mindspeed_rl.run.phases import Phase
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.run.resume import ResumePoint
from mindspeed_rl.runtime.cluster import _set_environment, connect_cluster
from mindspeed_rl.runtime.fork_server import RL, fork_server
from mindspeed_rl.trainers.rl import RLTrainer
from mindspeed_rl.trainers.rl_setup import RLInputs, _open_data_plane, _Services, build_trainer
from mindspeed_rl.trainers.run_logger import LogOutputs
from mindspeed_rl.trainers.termination import Termination
from mindspeed_rl.workers.fleet import Fleet
from mindspeed_rl.workers.remote_group import WorkerKind
from mindspeed_rl.workers.reward_group import RewardGroup

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
    "trajectory_reward",
    "multi_turn",
)


class VariantFleet(Fleet):
    """Workers on which runs follow each other; see `VariantWorker`."""

    def __init__(self, run: ResolvedRun, plane: DataPlane) -> None:
        super().__init__(run, plane, WorkerKind("variant_worker:VariantWorker", ("train", "rollout")))

    def restart(self, run: ResolvedRun, plane: DataPlane) -> None:
        """The next run is this one, from the first weights and with fresh optimizers."""
        self.actor.call(Phase("restart"), run, plane)

    def weights(self) -> dict[str, np.ndarray]:
        """All weights of rank 0's actor, reference and critic, each as one vector."""
        return self.actor.call(Phase("weights"))[0]

    def num_steps(self) -> int:
        """Optimizer steps of the actor since the restart."""
        return self.actor.call(Phase("num_steps"))[0]

    def watch(self) -> None:
        """From now on the way to the policy loss is noted."""
        self.actor.call(Phase("watch"))

    def stacks(self) -> list[list[Call]]:
        """The ways that rank 0 noted, each outermost first; nothing more is noted."""
        return self.actor.call(Phase("stacks"))[0]


class FlippedAdvantages:
    """Advantages with their sign turned: the negative control."""

    def __init__(self, trainer: RLTrainer, plane: DataPlane, num_rows: int) -> None:
        self._advantages, self._plane, self._rows = trainer.advantages, plane, range(num_rows)

    @property
    def entropy_threshold(self) -> float | None:
        return self._advantages.entropy_threshold

    def compare_log_probs(self, iteration: int, count: int) -> tuple[Metrics, bool]:
        return self._advantages.compare_log_probs(iteration, count)

    def compute(self, iteration: int, *, kl_coef: float) -> Metrics:
        metrics = self._advantages.compute(iteration, kl_coef=kl_coef)
        batch, _ = self._plane.get("metrics", ["advantages"], indexes=self._rows, timeout_s=patient(60.0))
        self._plane.put({"advantages": [-row for row in batch["advantages"]]}, self._rows, overwrite=True)
        return metrics


def task_overrides(task: Path) -> list[str]:
    """What points a run file of the tiny model at the tests' task, with small batches."""
    return [
        f"actor_config.load={task / 'model'}",
        f"megatron_training.tokenizer_name_or_path={task / 'model'}",
        f"megatron_training.data_path={task / 'train.jsonl'}",
        "megatron_training.eval_data_path=null",
        "model.tiny_qwen25.num_layers=null",  # config.json has the shape
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
        run = self._load("ppo_tiny_cpu", [f"rl_config.reward_model={self.reward_model}"], folder / "world")
        self._tokenizer = load_tokenizer(task / "model")
        here = Path(__file__).parent  # worker processes import `variant_worker` and what it needs
        os.environ["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
        self._stack.enter_context(_set_environment(**shared(RL)))
        self._stack.enter_context(fork_server("cpu", RL))
        self._stack.enter_context(connect_cluster(run.plan.world_size, "cpu"))
        plane = _open_data_plane(run)
        try:
            self.workers = VariantFleet(run, plane)
            self._stack.callback(self.workers.close)
            self.workers.set_up()
        except BaseException:
            self.close()
            raise
        plane.close()

    def close(self) -> None:
        for rewards, plane in self._kept.values():
            rewards.close()
            plane.close()
        self._stack.close()

    def _load(self, config_name: str, overrides: Sequence[str], folder: Path) -> ResolvedRun:
        critic = _critic_overrides(self._task) if "ppo" in config_name else []
        cfg = load_run_config(config_name, None, [*task_overrides(self._task), *critic, *self._shared, *overrides])
        return dataclasses.replace(plan_models(resolve(cfg, platform="cpu")), folder=folder)

    def run(self, config_name: str, *overrides: str, iterations: int = 1, flip: bool = False) -> Run:
        """A run file has run from the first weights on.

        Args:
            flip: with the sign of the advantages turned.
        """
        folder = self._folder / f"{config_name}-{uuid.uuid4().hex[:6]}"
        folder.mkdir(parents=True)
        run = self._load(config_name, [*overrides, f"megatron_training.train_iters={iterations}"], folder)
        rewards, plane = self._services(run)
        self.workers.restart(run, plane)
        services = _Services(plane, self.workers, rewards, resumed={})
        trackers = make_trackers(run.config.rl_config, run.folder, {})
        with IterationProgress(run.plan.train_iters, stream=io.StringIO()) as progress:
            outputs = LogOutputs(run.folder, trackers, progress)
            trainer = build_trainer(self._inputs(run), services, outputs, Termination())
            try:
                if flip:
                    trainer.advantages = FlippedAdvantages(trainer, plane, run.plan.num_train_samples)
                trainer.fit()
            finally:
                trainer.logger.close()
        return Run(folder, run.plan, trainer.logger.first_evaluation, self.workers.weights(), self.workers.num_steps(), plane)

    def _services(self, run: ResolvedRun) -> tuple[RewardGroup, DataPlane]:
        """Reward worker and data plane; an earlier run's where they suit."""
        cfg, plan, rl = run.config, run.plan, run.config.rl_config
        key = (cfg.generate_config.sampling_config.max_tokens, plan.n_samples_per_prompt, plan.dispatch_sizes[_REWARD_DISPATCH])
        key += (rl.data_strategy, *(str(value) for name, value in vars(rl).items() if name.startswith(_REWARD_KEYS)))
        if key not in self._kept:
            plane = _open_data_plane(run)
            world = dataclasses.replace(run, folder=self._folder / "world")
            rewards = RewardGroup(world, plane, str(self._task / "model"))
            self._kept[key] = rewards, plane
        return self._kept[key]

    def _inputs(self, run: ResolvedRun) -> RLInputs:
        cfg, actor = run.config, run.config.actor_config

        def prompts(path: Any) -> Any:
            return open_prompts(
                path,
                self._tokenizer,
                max_prompt_length=cfg.rl_config.max_prompt_length,
                dataset_additional_keys=actor.dataset_additional_keys,
                settings=PromptSettings(),
            )

        held_out = prompts(actor.eval_data_path) if actor.eval_data_path else None
        model = self._task / "model"
        resume, devices = ResumePoint(model, 0), run.plan.world_size
        return RLInputs(
            run, self._tokenizer, str(model), prompts(actor.data_path), held_out, resume, devices, summary="", cards=()
        )


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
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.metrics = [line for line in lines if line["iteration"]]  # 0: the evaluation before them

    def column(self, name: str) -> list[float]:
        """A figure over the iterations."""
        return [record[name] for record in self.metrics]

    def rows(self, *columns: str) -> list[list[Any]]:
        """Columns of the rows that the last iteration trained on."""
        batch, _ = self.plane.get("metrics", list(columns), indexes=range(self.plan.num_train_samples), timeout_s=patient(60.0))
        return [list(batch[name]) for name in columns]
