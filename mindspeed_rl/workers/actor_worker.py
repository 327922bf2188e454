"""One device's worker of a reinforcement-learning run: trains with Megatron, generates with vLLM, shares the device in time.

The methods are the phases of an iteration; `groups.ActorGroup` calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_rl import platform
from mindspeed_rl.algorithms.interfaces import LossInputs, PolicyBatch
from mindspeed_rl.algorithms.policy_losses import policy_loss
from mindspeed_rl.checkpoint.model_source import ModelSource, find_model, load_tokenizer_of
from mindspeed_rl.config import Run
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.engine.lora import adapters_disabled
from mindspeed_rl.engine.lora_layers import LoraSettings
from mindspeed_rl.engine.parallel import init_distributed
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.resharding.adapters import AdapterFolder
from mindspeed_rl.rollout.protocol import Generated, PartialResponse
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.runtime.device_memory import PhaseMemory
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.workers.dumping import PhaseDumps
from mindspeed_rl.workers.kept_log_probs import KeptLogProbs
from mindspeed_rl.workers.model_worker import ModelWorker, add_step, critic_loss
from mindspeed_rl.workers.order import UpdateOrder
from mindspeed_rl.workers.replica import Replica
from mindspeed_rl.workers.reward_model import RewardModel
from mindspeed_rl.workers.role import Role
from mindspeed_rl.workers.roles import build_roles
from mindspeed_rl.workers.rollout import RolloutReplica
from mindspeed_rl.workers.routing import make_routing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ActorWorker(ModelWorker):
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
        self.replica = Replica(plane, run.deadlines.rows_s)
        tokenizer = load_tokenizer_of(cfg.actor_config, source)
        self.roles = build_roles(run, source, model_plan, tokenizer)
        self.routing = make_routing(run, self.roles.actor.engine, self.replica)
        self._offload_all()  # vLLM refuses to start on a device that has less than its share free
        self._open_rollout(plane, source, model_plan.model_config, tokenizer, run_id)
        self.dumps = PhaseDumps(run.config.msprobe_config, self.resumed_state().get("iteration", 0))
        self.memory = PhaseMemory(self._resident_bytes)

    def _open_rollout(
        self, plane: DataPlane, source: ModelSource, model_config: ModelConfig, tokenizer: PreTrainedTokenizerBase, run_id: str
    ) -> None:
        """The rollout engine shares this rank's device."""
        self.rollout = RolloutReplica(self.run, plane, source, model_config, tokenizer, run_id)
        self._adapters: AdapterFolder | None = None
        settings = LoraSettings.from_config(self.run.config.actor_config)
        if settings is not None and self.run.generate.lora_push == "adapter":
            self._adapters = AdapterFolder(self.roles.actor.model, settings, str(source.hf_folder))

    def _resident_bytes(self) -> dict[str, int]:
        """Bytes by owner, in the planner's words, of what is on the device now."""
        held = dict(self.roles.actor.offloader.resident_bytes())
        others = {"reference": self.roles.reference, "critic": self.roles.critic, "reward model": self.roles.reward}
        held |= {name: sum(role.offloader.resident_bytes().values()) for name, role in others.items() if role is not None}
        return held | self._engine_bytes()

    def _engine_bytes(self) -> dict[str, int]:
        return self.rollout.engine.resident_bytes()

    def _close_rollout(self) -> None:
        """Nothing is asked of the engine any more."""
        self.rollout.close()

    def follow(self, run: Run, plane: DataPlane) -> None:
        """The phases from now on are those of this run, whose roles are the ones that were built."""
        self.run = run
        self.replica.follow(plane, run.deadlines.rows_s)
        self.rollout.follow(run, plane)
        self.routing = make_routing(run, self.roles.actor.engine, self.replica)
        self.dumps = PhaseDumps(run.config.msprobe_config, self.resumed_state().get("iteration", 0))

    def _rests(self, role: Role) -> bool:
        return role in self.roles.frozen()

    def resumed_state(self) -> dict[str, Any]:
        """{"iteration": ..., "run_state": ...} of the actor's checkpoint when the run goes on from one, else nothing."""
        return self.roles.actor.resumed or {}

    # ------------------------------------------------------------------ rollout

    def push_weights(self, version: int) -> WorkerReport:
        """Actor weights -> rollout engine, with proof; training state leaves the device where the run file says so."""
        metrics = Metrics()
        with self.timers("resharding_to_infer"), self.memory("update_weights", "push buckets", metrics):
            proven = self._hand_over(version)
        self.rollout.add_push(metrics, self._adapters)
        metrics.add_min("rollout/proven_parameters", proven)
        metrics.add_max("rollout/weight_version", version)
        return self._report(metrics)

    def _hand_over(self, version: int) -> int:
        """The device is the engine's, with the actor's weights; returns how many parameters were proven to have arrived.

        Training state leaves before the engine's weights come: both together are more than a device may have.
        """
        for role in (*self.roles.trained(), *self.roles.frozen()):
            # the actor's weights stay: they are what is pushed
            self._rest(role, weights=role is not self.roles.actor)
        self.roles.actor.offloader.onload(params=True)
        proven = self.rollout.load(self.roles.actor.stream, version, self._adapters)
        self._offload_all()
        # only now: the actor's weights were where the cache goes
        self.rollout.engine.restore_cache()
        return proven

    @property
    def _shares_memory(self) -> bool:
        """True where the engine's memory has to go before training state may come."""
        return self.rollout.hands_memory_over

    def _offload_all(self) -> None:
        for role in (*self.roles.trained(), *self.roles.frozen()):
            self._rest(role)

    def _rest(self, role: Role, *, weights: bool = True) -> None:
        """A model leaves the device until its next pass, or until it trains, with what the run file says."""
        config, trains = self.run.generate, role in self.roles.trained()
        role.offloader.offload(
            optimizer=trains and config.offload_train_optimizer,
            grads=trains and config.offload_train_grad,
            params=weights and config.offload_train_param,
        )

    def generate(self, draw: int) -> WorkerReport:
        """All rows have a response."""
        metrics = Metrics()
        measured = self.memory("generate", "engine step", metrics)
        with self.profiler("actor_generate"), self.timers("rollout"), self.dumps.rollout(self.rollout), measured:
            metrics.merge(self.rollout.generate(draw))
        metrics.add_max("memory/generate_gib", platform.current().memory_stats().allocated_gib)
        return self._report(metrics)

    def continue_responses(self, pieces: Sequence[PartialResponse], num_tokens: int) -> tuple[WorkerReport, list[Generated] | None]:
        """This replica's share of the responses, up to `num_tokens` tokens longer; see `RolloutReplica.continue_responses`."""
        metrics = Metrics()
        measured = self.memory("generate", "engine step", metrics)
        with self.profiler("actor_generate"), self.timers("rollout"), self.dumps.rollout(self.rollout), measured:
            found = self.rollout.continue_responses(pieces, num_tokens)
        metrics.add_max("memory/generate_gib", platform.current().memory_stats().allocated_gib)
        return self._report(metrics), found

    def finish_rollout(self) -> WorkerReport:
        """Nothing more is generated in this iteration: the engine's memory goes to training where the device is short of it."""
        self.dumps.end_rollout()
        if self.rollout.hands_memory_over:
            with self.timers("resharding_to_train"):
                self.rollout.engine.release_memory()
        return self._report()

    def generate_responses(self, items: Sequence[PromptItem], seed: int, greedy: bool) -> list[Trajectory] | None:
        """Trajectories of this replica's share of the prompts; see `RolloutReplica.generate_responses`."""
        return self.rollout.generate_responses(items, seed, greedy=greedy)

    # ------------------------------------------------------------------ reward model

    def compute_model_rewards(self, count: int) -> WorkerReport:
        """The first `count` rows have the reward model's score."""
        metrics = Metrics()
        with self.timers("reward_model"), self.memory("reward model pass", "activations", metrics):
            self._reward_model().score_rows(count)
        return self._report(metrics)

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
        rl, metrics = self.run.rl, Metrics()
        if role == "actor":
            batching = self._batching("actor", rl.actor_forward_micro_batch_size)
            names = ("old_log_probs", "entropies")
            with self.profiler("actor_compute_log_prob"), self.memory("log-probs", "activations", metrics):
                key = "actor_logprob_dispatch_size"
                self._forward("old_log_p", self.roles.actor, "actor_log_prob", names, batching, count, key, self.routing)
            self.routing.add_to(metrics)
            return self._report(metrics)
        target = self.roles.reference or self.roles.actor
        batching = self._batching("ref", rl.ref_forward_micro_batch_size)
        measured = self.memory("reference pass", "activations", metrics)
        dump = self.dumps.reference(target)
        with self.profiler("reference_compute_log_prob"), self._reference_weights(), measured, dump:
            self._forward("reference_model", target, "ref_log_prob", ("ref_log_probs",), batching, count, "ref_dispatch_size")
        return self._report(metrics)

    def compute_values(self, count: int) -> WorkerReport:
        """The critic's value before each response token."""
        critic = self.roles.critic
        assert critic is not None
        batching, metrics = self._batching("actor", critic.config.micro_batch_size), Metrics()
        with self.profiler("critic_compute_values"), self.memory("critic pass", "activations", metrics):
            self._forward(
                "critic_model", critic, "critic_compute_values", ("values",), batching, count, "critic_value_dispatch_size"
            )
        return self._report(metrics)

    def _reference_weights(self) -> AbstractContextManager[None]:
        """With a shared backbone the reference is the actor without its adapters."""
        return adapters_disabled(self.roles.actor.model) if self.run.rl.share_backbone else nullcontext()

    # ------------------------------------------------------------------ training

    def update_actor(self, order: UpdateOrder) -> WorkerReport:
        """All optimizer steps of the iteration on this replica's share of their rows."""
        actor, objective, metrics = self.roles.actor, self.run.objective, Metrics()
        assert objective is not None
        loss = partial(policy_loss, objective=replace(objective, kl_coef=order.kl_coef))
        batch: Callable[[LossInputs], PolicyBatch] = partial(PolicyBatch.from_inputs, entropy_threshold=order.entropy_threshold)
        kept = KeptLogProbs()
        if order.keeps_log_probs:
            batch = kept.inputs(batch)
        batching = self._batching("update", actor.config.micro_batch_size)
        dump, measured = self.dumps.update("actor", actor, order.iteration), self.memory("update", "activations", metrics)
        with self.profiler("actor_update"), self.timers("update"), measured, dump as probe:
            for rows in self._mini_batches("actor_train", order.steps, order.columns):
                self._prepare_step(actor)
                told = self.routing.for_update(rows)
                add_step(metrics, "actor", actor.engine.train_step(told, batching, probe.loss(loss), probe.inputs(batch)))
            self.routing.add_to(metrics)
            actor.poll_save()
            # weights are pushed next, which needs none of it
            actor.offloader.begin_offload(optimizer=self.run.generate.offload_train_optimizer)
        if order.keeps_log_probs:
            self.replica.put({"update_log_probs": list(kept.rows.values())}, list(kept.rows))
        for owner, count in actor.offloader.resident_bytes().items():
            metrics.add_max(f"memory/{owner}_gib", count / 2**30)
        memory = platform.current().memory_stats()
        metrics.add_max("memory/update_gib", memory.allocated_gib)
        metrics.add_max("memory/peak_gib", self.memory.peak_gib)
        return self._report(metrics)

    def update_critic(self, steps: list[list[int]]) -> WorkerReport:
        """All steps of the critic on this replica's share of their rows."""
        critic, metrics = self.roles.critic, Metrics()
        assert critic is not None
        loss = partial(critic_loss, clip_range=self.run.rl.cliprange_value)
        batching = self._batching("update", critic.config.micro_batch_size)
        dump, measured = self.dumps.update("critic", critic), self.memory("update critic", "activations", metrics)
        with self.profiler("critic_update"), self.timers("update_critic"), measured, dump as probe:
            for rows in self._mini_batches("critic_train", steps, ["returns", "values", "loss_mask"]):
                self._prepare_step(critic)
                add_step(metrics, "critic", critic.engine.train_step(rows, batching, probe.loss(probe.inputs(loss))))
            critic.poll_save()
            self._rest(critic)  # or the actor's update would find it beside its own state
        return self._report(metrics)

    def _prepare_step(self, role: Role) -> None:
        """What a step needs is on the device, or comes while the first micro-batches are computed."""
        role.offloader.onload(params=True, grads=True)
        # a swapped optimizer comes when activations no longer take its room
        role.offloader.begin_onload(optimizer=not role.config.swap_optimizer)

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
        """Checkpoints of everything that changes; the actor's comes last, since a run resumes where the actor does.

        Where engine and trainer share the device's memory the engine gives it back, and has the weights again in the end; not
        with background saves, which still read what would leave.
        """
        roles = [role for role in (self.roles.reference, self.roles.critic, self.roles.actor) if role is not None]
        shared, metrics = self._shares_memory and not any(role.config.async_save for role in roles), Metrics()
        with self.timers("save"), self.memory("save", "copies", metrics):
            if shared:
                self.rollout.engine.release_memory()
            for role in roles:
                trains = role in self.roles.trained()
                role.offloader.onload(params=True, grads=trains, optimizer=trains)
                role.save(iteration, run_state)
                if shared:
                    self._rest(role)
            if shared:
                self._hand_over(self.rollout.engine.weight_version)
        return self._report(metrics)

    def finish(self) -> WorkerReport:
        """Waits for background saves; tools are ended."""
        self._close_rollout()
        # the actor's last, as in `save`
        for role in (*self.roles.frozen(), *self.roles.trained()[::-1]):
            role.finish_saves()
        return self._report()
