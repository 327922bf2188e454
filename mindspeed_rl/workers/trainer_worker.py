"""One device's worker of a run: trains the actor and the models that share its device, and sends weights to rollout servers.

The methods are the phases of an iteration; `Fleet` calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl.algorithms.distillation import compute_weighted_divergence
from mindspeed_rl.algorithms.interfaces import LossInputs, PolicyBatch
from mindspeed_rl.algorithms.policy_losses import policy_loss
from mindspeed_rl.checkpoint.model_source import load_tokenizer_of
from mindspeed_rl.config.quantized_formats import find_format
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.head_outputs import SquaredProbs, TeacherDivergence
from mindspeed_rl.engine.parallel import init_distributed
from mindspeed_rl.models.plan import ModelSource
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.resharding.disaggregated import WeightSyncGroup
from mindspeed_rl.resharding.push import WeightPush
from mindspeed_rl.resharding.quantization import quantize_side
from mindspeed_rl.resharding.rendezvous import Rendezvous
from mindspeed_rl.run import Run
from mindspeed_rl.run.columns import SEQUENCE_ADAPTERS
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.workers.model_worker import (
    CriticPhases,
    RefPhases,
    RewardModelPhases,
    TeacherPhases,
    add_adapter_step,
    add_step,
)
from mindspeed_rl.workers.replica import Replica
from mindspeed_rl.workers.responses import read_image_rules
from mindspeed_rl.workers.role_adapters import PLACES, RoleAdapters
from mindspeed_rl.workers.roles import Role, Roles, build_pass_settings, build_reward_model, build_role, build_teachers
from mindspeed_rl.workers.routing import REPLAYS, RolloutRouting
from mindspeed_rl.workers.update_plan import UpdatePlan

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_Result = TypeVar("_Result")


def _build_roles(run: Run, tokenizer: PreTrainedTokenizerBase, release: Callable[[Role], None]) -> Roles:
    """Build the models that share the actor's devices, with their weights; collective over the training world.

    Args:
        run: with its models.
        tokenizer: tokenizer of the actor.
        release: is called with each model before the next is built: a device may not have room for two.
    """
    shared = build_pass_settings(run, tokenizer)
    built = Roles()
    # the actor is the first of the run's models
    for name in ("actor", "ref", "critic"):
        if name in run.models and name not in run.placement.dedicated:
            role = build_role(run, name, shared)
            setattr(built, name, role)
            release(role)
    if "teacher" in run.models and "teacher" not in run.placement.dedicated:
        built.teachers = build_teachers(run, shared, release)
    if "reward" in run.models and "reward" not in run.placement.dedicated:
        built.reward, built.scoring = build_reward_model(run, tokenizer, shared)
        release(built.reward)
    return built


class ActorPhases(RefPhases, CriticPhases, RewardModelPhases, TeacherPhases):
    """The actor, and reference, critic, reward model and teachers where they share its device.

    Attributes:
        actor: the role.
        source: source of its weights.
        tokenizer: tokenizer of the actor.
    """

    actor: Role
    source: ModelSource
    tokenizer: PreTrainedTokenizerBase

    def _build(self, plane: DataPlane) -> None:
        """Join the training world and build all roles."""
        run, model = self.run, self.run.models["actor"]
        self.source = model.source
        init_distributed(model.config, model.plan.layout.vpp)
        self.tokenizer = load_tokenizer_of(model.config, self.source)
        with self.memory.starting():
            self.roles = _build_roles(run, self.tokenizer, self._release)
        self.roles.time_copies(self.timers)
        assert self.roles.actor is not None
        self.actor, term = self.roles.actor, run.objective.distillation if run.objective is not None else None
        if term is not None and term.estimator is None:
            self.actor.engine.outputs = TeacherDivergence(partial(compute_weighted_divergence, settings=term))
        self.actor.write_lost_export()
        self.connect(plane)
        self.offload_all()

    def connect(self, plane: DataPlane) -> None:
        """Take rows from this plane from now on, with the routing and the hooks of the run; collective over the world."""
        run, mode = self.run, self.run.rl.router_replay.mode
        rules = read_image_rules(run.models["actor"])
        self.replica = Replica(plane, run.deadlines.rows_s, by_stage=mode != "disabled", image_rules=rules)
        self.routing: RolloutRouting | None = None
        if mode != "disabled":
            self.routing = REPLAYS[mode](self.actor.replay_experts(), self.actor.engine.plan, self.replica)
        self.role_adapters: RoleAdapters | None = None
        if self.actor.turns is not None:
            self.role_adapters = RoleAdapters(self.actor.turns, self._fetch_sequence_adapters)
        self.add_hooks(self.resumed_state().get("iteration", 0))

    def _fetch_sequence_adapters(self, rows: Sequence[int]) -> list[Tensor]:
        return list(self.replica.fetch(Phases.ACTOR_LOG_PROBS.consumer, [SEQUENCE_ADAPTERS], rows)[SEQUENCE_ADAPTERS])

    def _divide(self, rows: Rows) -> Iterator[tuple[str, Rows]]:
        """Yield the rows of each optimizer step of a mini-batch, with the name of the adapter where roles have their own."""
        if self.role_adapters is None:
            yield "", rows
            return
        # the states of another adapter take the place of those of the last step
        self.actor.offloader.onload(optimizer=True)
        for own in self.role_adapters.divide(rows):
            yield own.name, own.rows

    def resident_bytes(self) -> Mapping[str, int]:
        """Return the bytes that are on the device now, by owner in the planner's words."""
        others = {"reference": self.roles.ref, "critic": self.roles.critic, "reward model": self.roles.reward}
        totals = {name: sum(role.offloader.resident_bytes().values()) for name, role in others.items() if role is not None}
        totals |= {role.name: sum(role.offloader.resident_bytes().values()) for role in self.roles.teachers.values()}
        return {**self.actor.offloader.resident_bytes(), **totals}

    def resumed_state(self) -> dict[str, Any]:
        """Return {"iteration": ..., "run_state": ...} of the actor's checkpoint when the run resumes from one, else nothing."""
        return self.actor.resumed or {}

    def offload_all(self, *, actor_weights: bool = True) -> None:
        """Offload all models.

        Args:
            actor_weights: False leaves the actor's weights on the device.
        """
        for role in self.roles.all():
            self._release(role, weights=actor_weights or role is not self.actor)

    def _release(self, role: Role, *, weights: bool = True) -> None:
        """Offload a model until its next phase, with the parts that the run file names."""
        config, trains = self.run.generate, role.trains
        with self.memory.exchange():
            role.offloader.offload(
                optimizer=trains and config.offload_train_optimizer,
                grads=trains and config.offload_train_grad,
                params=weights and config.offload_train_param,
            )

    # ------------------------------------------------------------------ passes and updates

    def compute_log_probs(self, role: str, count: int, start: int = 0) -> WorkerReport:
        """Compute log-probs of the actor ("actor") or the reference ("ref") for this replica's rows from `start` to `count`."""
        if role != "actor":
            return super().compute_log_probs(role, count, start)
        metrics, batching = Metrics(), self._batching("actor", self.run.rl.actor_forward_micro_batch_size)
        objective = self.run.objective
        has_squares = objective is not None and "squared_probs" in objective.needs
        outputs = SquaredProbs() if has_squares else None
        with self.phase(Phases.ACTOR_LOG_PROBS, metrics, self.actor, timed=False):
            passes = self.routing or self.role_adapters
            self._forward(Phases.ACTOR_LOG_PROBS, self.actor, batching, range(start, count), outputs, passes)
        if self.routing is not None:
            self.routing.add_to(metrics)
        return self._report(metrics)

    def update_actor(self, plan: UpdatePlan) -> WorkerReport:
        """Make all optimizer steps of the iteration on this replica's share of their rows."""
        actor, objective, metrics = self.actor, self.run.objective, Metrics()
        assert objective is not None
        term = objective.distillation
        term = None if term is None else replace(term, supervised_coef=plan.supervised_coef)
        loss = partial(policy_loss, objective=replace(objective, kl_coef=plan.kl_coef, distillation=term))
        batch: Callable[[LossInputs], PolicyBatch] = partial(PolicyBatch.from_inputs, entropy_threshold=plan.entropy_threshold)
        recorded = _RecordedLogProbs()
        if plan.records_log_probs:
            batch = recorded.inputs(batch)
        batching = self._batching("update", actor.config.micro_batch_size)
        if objective.loss.compares_group:  # whose limits count groups
            max_groups = None if batching.max_rows is None else max(1, batching.max_rows // objective.group_size)
            batching = replace(
                batching, micro_batch_size=max(1, batching.micro_batch_size // objective.group_size), max_rows=max_groups
            )
        with self.phase(Phases.UPDATE_ACTOR, metrics, actor, plan.iteration) as observer:
            columns = plan.columns if self.role_adapters is None else (*plan.columns, SEQUENCE_ADAPTERS)
            for mini_batch in self._mini_batches(Phases.UPDATE_ACTOR, plan.steps, columns):
                self._prepare_step(actor)
                if objective.loss.compares_group:
                    groups = len(mini_batch) // objective.group_size
                    mini_batch = replace(mini_batch, group_sizes=[objective.group_size] * groups)
                for adapter, rows in self._divide(mini_batch):
                    routed = rows if self.routing is None else self.routing.for_update(rows)
                    result = actor.engine.train_step(routed, batching, observer.loss(loss), observer.inputs(batch))
                    add_step(metrics, "actor", result)
                    if adapter:
                        add_adapter_step(metrics, adapter, result)
                self._count_idle("actor", mini_batch, metrics)
            if self.routing is not None:
                self.routing.add_to(metrics)
            actor.finish_saves(wait=False)
            # the weight sync is next, which needs none of it
            actor.offloader.start_offload(optimizer=self.run.generate.offload_train_optimizer)
        if plan.records_log_probs:
            # with dynamic context parallelism a row is on some of the replica's ranks
            written = self.replica.join(recorded.rows) if actor.config.has_dynamic_context else recorded.rows
            self.replica.put(dict.fromkeys(Phases.UPDATE_ACTOR.columns, list(written.values())), list(written))
        for owner, count in actor.offloader.resident_bytes().items():
            metrics.add_max(f"memory/{owner}_gib", count / 2**30)
        metrics.add_max("memory/update_gib", self.memory.allocated_gib)
        metrics.add_max("memory/peak_gib", self.memory.peak_gib)
        metrics.add_max("memory/start_gib", self.memory.start_gib)
        return self._report(metrics)

    @torch.no_grad()
    def sync_reference(self, alpha: float) -> WorkerReport:
        """Set ref <- alpha * actor + (1 - alpha) * ref, weight by weight in float32; the actor's adapters are merged."""
        ref = self.roles.ref
        assert ref is not None
        self.actor.offloader.onload(params=True)
        ref.offloader.onload(params=True)
        actor_weights = self.actor.megatron_stream.local_weights
        for name, weight in ref.megatron_stream.local_weights.items():
            ref.megatron.stored_weights.mix(weight, actor_weights[name].value(), alpha)
        return self._report()

    # ------------------------------------------------------------------ checkpoints

    def save(self, iteration: int, run_state: dict[str, object]) -> WorkerReport:
        """Write checkpoints of everything that changes; the actor's is last, since a run resumes where the actor does."""
        metrics = Metrics()
        with self.phase(Phases.SAVE, metrics):
            self._save_roles(iteration, run_state)
        self.memory.measure_residue("checkpoint", metrics)
        return self._report(metrics)

    def _save_roles(self, iteration: int, run_state: dict[str, object], *, release: bool = False) -> None:
        roles = self._saved_roles()
        for role in roles:
            role.offloader.onload(params=True, grads=role.trains, optimizer=role.trains)
            role.save(iteration, run_state, companions=roles[:-1] if role is self.actor else None)
            if release:
                self._release(role)

    def _saved_roles(self) -> list[Role]:
        return [role for role in (self.roles.ref, self.roles.critic, self.actor) if role is not None]

    def finish(self) -> WorkerReport:
        """Wait for background saves."""
        # the actor's is last, as in `save`
        for role in reversed(self.roles.all()):
            role.finish_saves()
        return self._report()


class TrainerWorker(ActorPhases):
    """A worker without a rollout engine: responses come from servers on other devices, which get the weights from it."""

    def __init__(self, run: Run, plane: DataPlane, *, rank: int) -> None:
        """Join the training world and build all roles."""
        super().__init__(run, rank)
        self._build(plane)
        # with each kind of servers; the plan of a sync is of the members of a group
        self._groups: dict[str, WeightSyncGroup] = {}
        self._pushes: dict[str, WeightPush] = {}
        self.actor.restore_random()

    def join_servers(self, rendezvous: Rendezvous, group: str) -> None:
        """Become a member of a new group with the servers' workers; leaves the previous one of this name."""
        self.leave_servers(group)
        self._groups[group] = WeightSyncGroup(rendezvous, dist.get_rank())

    def leave_servers(self, group: str) -> None:
        """Leave the group with the servers' workers."""
        self._pushes.pop(group, None)
        if (left := self._groups.pop(group, None)) is not None:
            left.close()

    def release_devices(self) -> None:
        """Offload the training state, as far as the run file says: an engine on this device wakes up."""
        self.offload_all()

    def send_weights(self, version: int, group: str) -> WorkerReport:
        """Send the actor's weights to the servers of the group, with the sums that prove their arrival.

        Raises:
            Exception: the group broke; torch's own words. It is left then, so that no member waits for this rank.
        """
        generate, metrics = self.run.generate, Metrics()
        assert group in self._groups, "join_servers comes before send_weights"
        with self.phase(Phases.SEND_WEIGHTS, metrics, self.actor):
            self.actor.offloader.onload(params=True)
            try:
                if group not in self._pushes:
                    stream, quantization = self.actor.stream, generate.quantization
                    # each server takes the prediction layers where they make its drafts
                    if quantization is None:
                        trained = stream.with_predictions
                    else:
                        trained = quantize_side(stream.trained, find_format(quantization, self.run.platform))
                    trained = replace(trained, bucket_bytes=generate.update_weights_bucket_mb << 20)
                    is_delta = generate.update_weight_mode == "delta"
                    self._pushes[group] = self._groups[group].build_trainer_push(trained, delta=is_delta)
                self._pushes[group].write(None)
                self._pushes[group].compare(None)
            except Exception:
                self.leave_servers(group)
                raise
            finally:
                self.offload_all()
        return self._report(metrics)


def _place(row: Tensor | None, values: Tensor, places: Tensor) -> Tensor:
    """Return a row with values at these places, as long as they need; the other tokens are those of another adapter."""
    size = max(int(places.max()) + 1 if len(places) else 0, 0 if row is None else len(row))
    placed = values.new_zeros(size)
    if row is not None:
        placed[: len(row)] = row
    placed[places] = values
    return placed


@dataclass(frozen=True)
class _RecordedLogProbs:
    """The log-probs that the policy loss read in the last optimizer step of each row, which the update's ratios are made of.

    Attributes:
        rows: index of the row -> [tokens of its response] float32, on the host.
    """

    rows: dict[int, Tensor] = field(default_factory=dict)

    def inputs(self, function: Callable[[LossInputs], _Result]) -> Callable[[LossInputs], _Result]:
        """Return the function, which also records the log-probs of its inputs; column `row` has the index of each row."""

        def record(inputs: LossInputs) -> _Result:
            log_probs, lengths = inputs.outputs[0].detach().cpu(), inputs.mask.sum(1).tolist()
            places = inputs.columns.get(PLACES)
            for position, (index, row, length) in enumerate(zip(inputs.columns["row"].tolist(), log_probs, lengths)):
                # a view would keep the padded micro-batch in memory
                own = row[:length].clone()
                if places is not None:
                    own = _place(self.rows.get(int(index)), own, places[position, :length].cpu())
                self.rows[int(index)] = own
            return function(inputs)

        return record
