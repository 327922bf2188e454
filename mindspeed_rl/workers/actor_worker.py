"""One device's worker of a reinforcement-learning run: trains with Megatron, generates with vLLM, shares the device in time.

The methods are the phases of an iteration; `groups.ActorGroup` calls them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from mindspeed_rl import platform
from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput, PolicyBatch
from mindspeed_rl.algorithms.policy_losses import policy_loss
from mindspeed_rl.algorithms.value_losses import value_loss
from mindspeed_rl.config import Run
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.lora import adapters_disabled
from mindspeed_rl.engine.parallel import init_distributed
from mindspeed_rl.engine.train_engine import MicroBatching, StepResult
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.workers.device_worker import DeviceWorker
from mindspeed_rl.workers.limits import micro_batching
from mindspeed_rl.workers.model_source import find_model, load_tokenizer_of
from mindspeed_rl.workers.order import UpdateOrder
from mindspeed_rl.workers.replica import Replica
from mindspeed_rl.workers.reports import WorkerReport
from mindspeed_rl.workers.reward_model import RewardModel
from mindspeed_rl.workers.role import Role
from mindspeed_rl.workers.roles import build_roles
from mindspeed_rl.workers.rollout import RolloutReplica
from mindspeed_rl.workers.rows import to_rows


class ActorWorker(DeviceWorker):
    """Actor, reference, critic, reward model and rollout engine of one rank."""

    def __init__(self, run: Run, plane: DataPlane, run_id: str, *, rank: int) -> None:
        """Joins the training world, builds all roles and the rollout engine.

        Args:
            run_id: unique to the run and equal on all its ranks.
        """
        super().__init__(run, rank)
        cfg = run.config
        source = find_model(cfg.actor_config, "actor_config")
        model_plan = plan_model(cfg.actor_config, source.hf_folder)
        init_distributed(cfg.actor_config, model_plan.layout.vpp)
        self.replica = Replica(plane, run.rl.wait_timeout_s)
        tokenizer = load_tokenizer_of(cfg.actor_config, source)
        self.roles = build_roles(run, source, model_plan, tokenizer)
        self._offload_all()  # vLLM refuses to start on a device that has less than its share free
        self.rollout = RolloutReplica(run, plane, source, model_plan.network, tokenizer.eos_token_id, run_id)

    def follow(self, run: Run, plane: DataPlane) -> None:
        """The phases from now on are those of this run, whose roles are the ones that were built."""
        self.run = run
        self.replica.follow(plane, run.rl.wait_timeout_s)
        self.rollout.run, self.rollout.plane = run, plane

    def resumed_state(self) -> dict[str, Any]:
        """{"iteration": ..., "run_state": ...} of the actor's checkpoint when the run goes on from one, else nothing."""
        return self.roles.actor.resumed or {}

    # ------------------------------------------------------------------ rollout

    def push_weights(self, version: int) -> WorkerReport:
        """Actor weights -> rollout engine, with proof; training state leaves the device where the run file says so.

        It leaves before the engine's weights come: both together are more than a device may have.
        """
        metrics = Metrics()
        with self.timers("resharding_to_infer"):
            for role in (*self.roles.trained(), *self.roles.frozen()):
                self._rest(role, weights=role is not self.roles.actor)
            self.roles.actor.offloader.onload(params=True)
            proven = self.rollout.load(self.roles.actor.stream, version)
            self._offload_all()
            self.rollout.engine.restore_cache()
        metrics.add_min("rollout/proven_parameters", proven)
        metrics.add_max("rollout/weight_version", version)
        return self._report(metrics)

    def _offload_all(self) -> None:
        for role in (*self.roles.trained(), *self.roles.frozen()):
            self._rest(role)

    def generate(self, draw: int) -> WorkerReport:
        """All rows have a response."""
        with self.profiler("actor_generate"), self.timers("rollout"):
            metrics = self.rollout.generate(draw)
        metrics.add_max("memory/generate_gib", platform.current().memory_stats().allocated_gib)
        return self._report(metrics)

    def finish_rollout(self) -> WorkerReport:
        """Nothing more is generated in this iteration: the engine's memory goes to training where the device is short of it."""
        if self.rollout.hands_memory_over:
            with self.timers("resharding_to_train"):
                self.rollout.engine.release_memory()
        return self._report()

    def answer(self, prompts: Sequence[list[int]], seed: int, greedy: bool) -> list[list[int]] | None:
        """Responses to this replica's share of the prompts; see `RolloutReplica.answer`."""
        return self.rollout.answer(prompts, seed, greedy=greedy)

    # ------------------------------------------------------------------ reward model

    def compute_model_rewards(self, count: int) -> WorkerReport:
        """The first `count` rows have the reward model's score."""
        with self.timers("reward_model"):
            self._reward_model().score_rows(count)
        return self._report()

    def score(self, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> list[float] | None:
        """The reward model's scores of this replica's share of the responses; None on ranks that do not hand results out."""
        return self._reward_model().score(prompts, responses)

    def _reward_model(self) -> RewardModel:
        """The reward model that shares this rank's device."""
        role, scoring = self.roles.reward, self.roles.scoring
        assert role is not None and scoring is not None
        batching = self._batching("ref", role.config.micro_batch_size)
        return RewardModel(role, scoring, self.replica, batching, self._rest)

    # ------------------------------------------------------------------ forward passes

    def compute_log_probs(self, role: str, count: int) -> WorkerReport:
        """Log-probs of the actor ("actor") or the reference ("ref") for this replica's rows."""
        rl = self.run.rl
        if role == "actor":
            batching = self._batching("actor", rl.actor_forward_micro_batch_size)
            names = ("old_log_probs", "entropies")
            with self.profiler("actor_compute_log_prob"), self.timers("old_log_p"):
                self._forward(self.roles.actor, "actor_log_prob", names, batching, count, "actor_logprob_dispatch_size")
            return self._report()
        target = self.roles.reference or self.roles.actor
        batching = self._batching("ref", rl.ref_forward_micro_batch_size)
        with self.profiler("reference_compute_log_prob"), self.timers("reference_model"), self._reference_weights():
            self._forward(target, "ref_log_prob", ("ref_log_probs",), batching, count, "ref_dispatch_size")
        return self._report()

    def compute_values(self, count: int) -> WorkerReport:
        """The critic's value before each response token."""
        critic = self.roles.critic
        assert critic is not None
        batching = self._batching("actor", critic.config.micro_batch_size)
        with self.profiler("critic_compute_values"), self.timers("critic_model"):
            self._forward(critic, "critic_compute_values", ("values",), batching, count, "critic_value_dispatch_size")
        return self._report()

    def _batching(self, use: Literal["update", "actor", "ref"], size: int | None = None) -> MicroBatching:
        """Limits of a pass; rows of a micro-batch are the actor's micro_batch_size unless `size` says otherwise."""
        return micro_batching(self.run.rl, use, size or self.run.plan.micro_batch_size)

    def _forward(
        self, role: Role, consumer: str, names: Sequence[str], batching: MicroBatching, count: int, dispatch_key: str
    ) -> None:
        role.offloader.onload(params=True)
        for part in self.replica.dispatches(count, self.run.plan.dispatch_sizes[dispatch_key]):
            batch = self.replica.fetch(consumer, ["input_ids", "prompt_length"], part)
            output = role.engine.forward(to_rows(batch), batching)
            self.replica.put(dict(zip(names, output or ())), part)
        if role in self.roles.frozen():
            self._rest(role)

    def _rest(self, role: Role, *, weights: bool = True) -> None:
        """A model leaves the device until its next pass, or until it trains, with what the run file says."""
        config, trains = self.run.generate, role in self.roles.trained()
        role.offloader.offload(
            optimizer=trains and config.offload_train_optimizer,
            grads=trains and config.offload_train_grad,
            params=weights and config.offload_train_param,
        )

    def _reference_weights(self) -> AbstractContextManager[None]:
        """With a shared backbone the reference is the actor without its adapters."""
        return adapters_disabled(self.roles.actor.model) if self.run.rl.share_backbone else nullcontext()

    # ------------------------------------------------------------------ training

    def update_actor(self, order: UpdateOrder) -> WorkerReport:
        """All optimizer steps of the iteration on this replica's share of their rows."""
        actor, objective, metrics = self.roles.actor, self.run.objective, Metrics()
        assert objective is not None
        loss = partial(policy_loss, objective=replace(objective, kl_coef=order.kl_coef))
        batch = partial(PolicyBatch.from_inputs, entropy_threshold=order.entropy_threshold)
        batching = self._batching("update", actor.config.micro_batch_size)
        with self.profiler("actor_update"), self.timers("update"):
            actor.offloader.onload(params=True, grads=True, optimizer=True)
            for rows in self._mini_batches("actor_train", order.steps, order.columns):
                _add_step(metrics, "actor", actor.engine.train_step(rows, batching, loss, batch))
            actor.poll_save()
        memory = platform.current().memory_stats()
        metrics.add_max("memory/update_gib", memory.allocated_gib)
        metrics.add_max("memory/peak_gib", memory.peak_gib)
        return self._report(metrics)

    def update_critic(self, steps: list[list[int]]) -> WorkerReport:
        """All steps of the critic on this replica's share of their rows."""
        critic, metrics = self.roles.critic, Metrics()
        assert critic is not None
        loss = partial(critic_loss, clip_range=self.run.rl.cliprange_value)
        batching = self._batching("update", critic.config.micro_batch_size)
        with self.profiler("critic_update"), self.timers("update_critic"):
            critic.offloader.onload(params=True, grads=True, optimizer=True)
            for rows in self._mini_batches("critic_train", steps, ["returns", "values", "loss_mask"]):
                _add_step(metrics, "critic", critic.engine.train_step(rows, batching, loss))
            critic.poll_save()
            self._rest(critic)  # or the actor's update would find it beside its own state
        return self._report(metrics)

    def _mini_batches(self, consumer: str, steps: list[list[int]], columns: Sequence[str]) -> Iterator[Rows]:
        """This replica's rows of each step, with the columns that the loss reads."""
        for step in steps:
            batch = self.replica.fetch(consumer, ["input_ids", "prompt_length", *columns], self._share_of_step(step))
            yield to_rows(batch, columns)

    def _share_of_step(self, rows: Sequence[int]) -> list[int]:
        """This replica's share of a step's rows, balanced by tokens where the run file asks for it."""
        lengths = None
        if self.run.rl.use_dp_batch_balance and self.replica.count > 1:
            batch = self.replica.fetch("actor_train", ["prompt_length", "response_length"], rows)
            lengths = [int(p) + int(r) for p, r in zip(batch["prompt_length"], batch["response_length"])]
        return self.replica.share(rows, lengths)

    @torch.no_grad()
    def sync_reference(self, alpha: float) -> WorkerReport:
        """ref <- alpha * actor + (1 - alpha) * ref, weight by weight; the actor's adapters are merged."""
        actor, reference = self.roles.actor, self.roles.reference
        assert reference is not None
        actor.offloader.onload(params=True)
        reference.offloader.onload(params=True)
        for name, weight in reference.stream.local_weights.items():
            weight.tensor.lerp_(actor.stream.local_weights[name].value(), alpha)
        return self._report()

    # ------------------------------------------------------------------ saving

    def save(self, iteration: int, run_state: dict[str, Any]) -> WorkerReport:
        """Checkpoints of everything that changes; the actor's comes last, since a run resumes where the actor does."""
        roles = [role for role in (self.roles.reference, self.roles.critic, self.roles.actor) if role is not None]
        with self.timers("save"):
            for role in roles:
                trains = role in self.roles.trained()
                role.offloader.onload(params=True, grads=trains, optimizer=trains)
                role.save(iteration, run_state)
        return self._report()

    def finish(self) -> WorkerReport:
        """Waits for background saves."""
        for role in (*self.roles.frozen(), *self.roles.trained()[::-1]):
            role.finish_saves()
        return self._report()


def critic_loss(inputs: LossInputs, *, clip_range: float | None) -> LossOutput:
    """The loss of the critic's values against the columns returns and values (those before the update)."""
    columns = inputs.columns
    mask = columns["loss_mask"] & inputs.mask
    return value_loss(inputs.outputs[0], columns["returns"], mask, old_values=columns["values"], clip_range=clip_range)


def _add_step(metrics: Metrics, role: str, result: StepResult) -> None:
    """Adds what an optimizer step did; what all ranks know is told by one."""
    metrics.merge(result.metrics)
    if dist.get_rank() == 0:
        metrics.add_mean(f"{role}/grad_norm", result.grad_norm)
        metrics.add_last(f"{role}/lr", result.lr)
