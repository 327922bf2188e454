"""What a worker does in each phase of an iteration, on this rank's models and engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl.config import BatchPlan, RunConfig, resolve_objective
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Timers
from mindspeed_rl.workers.integrated import UpdateOrder
from mindspeed_rl.workers.limits import micro_batching
from mindspeed_rl.workers.model_source import find_model, load_tokenizer_of
from mindspeed_rl.workers.replica import Replica
from mindspeed_rl.workers.reward_model import RewardModel
from mindspeed_rl.workers.rows import to_rows
from mindspeed_rl.workers.world import join_world, prepare_process

if TYPE_CHECKING:  # these import Megatron, which `prepare_process` has to come before
    from mindspeed_rl.engine.train_engine import LossFunction, MicroBatching
    from mindspeed_rl.workers.role import Role


class Phases:
    """The roles of this rank and the phases of an iteration. Every public method is collective over the workers.

    Attributes:
        resumed: what the actor's checkpoint said when the run goes on from one, else None.
    """

    def __init__(self, cfg: RunConfig, plan: BatchPlan, plane: DataPlane, timers: Timers, *, run_id: str) -> None:
        prepare_process(cfg)
        from mindspeed_rl.engine.build import plan_model
        from mindspeed_rl.workers.roles import build_roles
        from mindspeed_rl.workers.rollout import Rollout

        self.timers = timers
        source = find_model(cfg.actor_config, "actor_config")
        model_plan = plan_model(cfg.actor_config, source.hf_folder)
        join_world(cfg.actor_config, model_plan)
        self.replica = Replica(plane, cfg.rl_config.wait_timeout_s)
        tokenizer = load_tokenizer_of(cfg.actor_config, source)
        self.roles = build_roles(cfg, plan, source, model_plan, tokenizer)
        self.resumed = self.roles.actor.resumed
        self.generate_config = cfg.generate_config
        self._offload_all()  # vLLM refuses to start on a device that has less than its share free
        self.rollout = Rollout(cfg, plan, plane, source, model_plan.network, tokenizer.eos_token_id, run_id)
        self.follow(cfg, plan, plane)

    def follow(self, cfg: RunConfig, plan: BatchPlan, plane: DataPlane) -> None:
        """The phases from now on are those of this run file, whose roles are the ones that were built."""
        self.cfg, self.plan = cfg, plan
        self.rl, self.generate_config = cfg.rl_config, cfg.generate_config
        self.replica.follow(plane, self.rl.wait_timeout_s)
        self.rollout.cfg, self.rollout.plan, self.rollout.plane = cfg, plan, plane

    # ------------------------------------------------------------------ rollout

    def push_weights(self, version: int) -> Metrics:
        """Actor weights -> rollout engine, with proof; then training state leaves the device where the run file says so."""
        metrics = Metrics()
        with self.timers("resharding_to_infer"):
            self.roles.actor.offloader.onload(params=True)
            proven = self.rollout.load(self.roles.actor.stream, version)
            self._offload_all()
            self.rollout.engine.restore_cache()
        metrics.add_min("rollout/proven_parameters", proven)
        metrics.add_max("rollout/weight_version", version)
        return metrics

    def _offload_all(self) -> None:
        config = self.generate_config
        parts = {
            "optimizer": config.offload_train_optimizer,
            "grads": config.offload_train_grad,
            "params": config.offload_train_param,
        }
        for role in self.roles.trained():
            role.offloader.offload(**parts)
        for role in self.roles.frozen():
            role.offloader.offload(params=config.offload_train_param)

    def generate(self, draw: int) -> Metrics:
        """All rows have a response."""
        with self.timers("rollout"):
            return self.rollout.generate(draw)

    def finish_rollout(self) -> Metrics:
        """Nothing more is generated in this iteration: the engine's memory goes to training where the device is short of it."""
        if self.rollout.hands_memory_over:
            with self.timers("resharding_to_train"):
                self.rollout.engine.release_memory()
        return Metrics()

    def answer(self, prompts: Sequence[list[int]], seed: int, greedy: bool) -> list[list[int]] | None:
        """Responses to this replica's share of the prompts; see `Rollout.answer`."""
        return self.rollout.answer(prompts, seed, greedy=greedy)

    # ------------------------------------------------------------------ forward passes

    def _batching(self, use: Literal["update", "actor", "ref"], size: int | None = None) -> MicroBatching:
        """Limits of a pass; rows of a micro-batch are the actor's micro_batch_size unless `size` says otherwise."""
        return micro_batching(self.rl, use, size or self.plan.micro_batch_size)

    def compute_log_probs(self, role: str, count: int) -> Metrics:
        """Log-probs of the actor ("actor") or the reference ("ref") for this replica's rows."""
        rl = self.rl
        if role == "actor":
            batching = self._batching("actor", rl.actor_forward_micro_batch_size)
            names = ("old_log_probs", "entropies")
            with self.timers("old_log_p"):
                self._forward(self.roles.actor, "actor_log_prob", names, batching, count, "actor_logprob_dispatch_size")
            return Metrics()
        target = self.roles.reference or self.roles.actor
        batching = self._batching("ref", rl.ref_forward_micro_batch_size)
        with self.timers("reference_model"), self._adapters_off() if rl.share_backbone else torch.no_grad():
            self._forward(target, "ref_log_prob", ("ref_log_probs",), batching, count, "ref_dispatch_size")
        return Metrics()

    def compute_values(self, count: int) -> Metrics:
        """The critic's value before each response token."""
        critic = self.roles.critic
        batching = self._batching("actor", critic.config.micro_batch_size)
        with self.timers("critic_model"):
            self._forward(critic, "critic_compute_values", ("values",), batching, count, "critic_value_dispatch_size")
        return Metrics()

    def _forward(
        self, role: Role, consumer: str, names: Sequence[str], batching: MicroBatching, count: int, dispatch_key: str
    ) -> None:
        role.offloader.onload(params=True)
        for part in self.replica.dispatches(count, self.plan.dispatch_sizes[dispatch_key]):
            batch = self.replica.fetch(consumer, ["input_ids", "prompt_length"], part)
            output = role.engine.forward(to_rows(batch, {}), batching)
            self.replica.put(dict(zip(names, output or ())), part)
        if role in self.roles.frozen():
            self._rest(role)

    def _rest(self, role: Role) -> None:
        """A model that does not train leaves the device until its next pass, where the run file says so."""
        role.offloader.offload(params=self.generate_config.offload_train_param)

    def _adapters_off(self) -> AbstractContextManager:
        from mindspeed_rl.engine.lora import adapters_disabled

        return adapters_disabled(self.roles.actor.model)

    # ------------------------------------------------------------------ reward model

    @property
    def reward_model(self) -> RewardModel:
        """The reward model that shares this rank's device."""
        role = self.roles.reward
        return RewardModel(
            role,
            self.roles.scoring,
            self.replica,
            self.timers,
            lambda: self._batching("ref", role.config.micro_batch_size),
            self._rest,
        )

    # ------------------------------------------------------------------ training

    def update_actor(self, order: UpdateOrder) -> Metrics:
        """All optimizer steps of the iteration on this replica's share of their rows."""
        from dataclasses import replace

        from mindspeed_rl.algorithms.policy_losses import policy_loss
        from mindspeed_rl.algorithms.records import PolicyBatch

        objective = replace(resolve_objective(self.cfg), kl_coef=order.kl_coef)
        columns = {name: name for name in ("advantages", "rollout_log_probs", "scored_mask", "loss_mask")}
        if order.use_old_log_probs:
            columns["old_log_probs"] = "old_log_probs"
        if order.entropy_threshold is not None or "entropies" in objective.needs:
            columns["old_entropy"] = "entropies"
        if order.use_ref_log_probs:
            columns["ref_log_probs"] = "ref_log_probs"

        def loss(micro_batch: Any, log_probs: Tensor, entropy: Tensor | None) -> Any:
            values = micro_batch.columns
            return policy_loss(
                PolicyBatch(
                    log_probs=log_probs,
                    advantages=values["advantages"],
                    response_mask=values["scored_mask"] & micro_batch.response_mask,
                    loss_mask=values["loss_mask"] & micro_batch.response_mask,
                    old_log_probs=values.get("old_log_probs"),
                    ref_log_probs=values.get("ref_log_probs"),
                    rollout_log_probs=values["rollout_log_probs"],
                    entropy=entropy,
                    old_entropy=values.get("old_entropy"),
                    entropy_threshold=order.entropy_threshold,
                ),
                objective,
            )

        with self.timers("update"):
            return self._update(self.roles.actor, "actor", order.steps, columns, loss)

    def update_critic(self, steps: list[list[int]]) -> Metrics:
        """All steps of the critic on this replica's share of their rows."""
        from mindspeed_rl.algorithms.value_losses import value_loss

        columns = {"returns": "returns", "old_values": "values", "loss_mask": "loss_mask"}

        def loss(micro_batch: Any, values: Tensor, *others: Tensor | None) -> Any:
            given = micro_batch.columns
            mask = given["loss_mask"] & micro_batch.response_mask
            return value_loss(
                values, given["returns"], mask, old_values=given["old_values"], clip_range=self.rl.cliprange_value
            )

        with self.timers("update_critic"):
            return self._update(self.roles.critic, "critic", steps, columns, loss)

    def _update(self, role: Role, name: str, steps: list[list[int]], columns: dict[str, str], loss: LossFunction) -> Metrics:
        """Optimizer steps of one role; columns are engine column -> data-plane column."""
        metrics = Metrics()
        role.offloader.onload(params=True, grads=True, optimizer=True)
        batching = self._batching("update", role.config.micro_batch_size)
        for rows in steps:
            batch = self.replica.fetch(
                f"{name}_train", ["input_ids", "prompt_length", *columns.values()], self._step_rows(rows)
            )
            result = role.engine.step(to_rows(batch, columns), batching, loss)
            metrics.merge(result.metrics)
            if dist.get_rank() == 0:
                metrics.add_mean(f"{name}/grad_norm", result.grad_norm)
                metrics.add_last(f"{name}/lr", result.lr)
        role.poll_save()
        return metrics

    def _step_rows(self, rows: Sequence[int]) -> list[int]:
        """This replica's share of a step's rows, balanced by tokens where the run file asks for it."""
        lengths = None
        if self.rl.use_dp_batch_balance and self.replica.count > 1:
            batch = self.replica.fetch("actor_train", ["prompt_length", "response_length"], rows)
            lengths = [int(p) + int(r) for p, r in zip(batch["prompt_length"], batch["response_length"])]
        return self.replica.share(rows, lengths)

    @torch.no_grad()
    def sync_reference(self, alpha: float) -> Metrics:
        """ref <- alpha * actor + (1 - alpha) * ref, weight by weight; the actor's adapters are merged."""
        actor, reference = self.roles.actor, self.roles.reference
        actor.offloader.onload(params=True)
        reference.offloader.onload(params=True)
        for name, weight in reference.stream.local_weights.items():
            weight.tensor.lerp_(actor.stream.local_weights[name].value(), alpha)
        return Metrics()

    # ------------------------------------------------------------------ saving

    def save(self, iteration: int, run_state: dict[str, Any]) -> Metrics:
        """Checkpoints of everything that changes; the actor's comes last, since a run resumes where the actor does."""
        roles = [role for role in (self.roles.reference, self.roles.critic, self.roles.actor) if role is not None]
        with self.timers("save"):
            for role in roles:
                trains = role in self.roles.trained()
                role.offloader.onload(params=True, grads=trains, optimizer=trains)
                role.save(iteration, run_state)
        return Metrics()

    def finish(self) -> Metrics:
        """Waits for background saves."""
        for role in (*self.roles.frozen(), *self.roles.trained()[::-1]):
            role.finish_saves()
        return Metrics()
