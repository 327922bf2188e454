"""The phases of reference, critic and reward model, on the actor's devices or on dedicated ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.algorithms.policy_losses import value_loss
from mindspeed_rl.data.prompts import TEACHER_PROMPT_IDS
from mindspeed_rl.dataplane.columns import objects
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.head_outputs import HeadOutputs, TopLogProbs
from mindspeed_rl.engine.interface import Engine, StepResult
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.run.phases import Phase, Phases
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.workers.device_worker import DeviceWorker
from mindspeed_rl.workers.replica import Replica
from mindspeed_rl.workers.roles import Role, Roles, build_micro_batching
from mindspeed_rl.workers.update_plan import split_rows


class _Passes(Protocol):
    """Passes through an engine in a form of their own, of rows with these indexes at the data plane."""

    def forward(
        self,
        engine: Engine,
        rows: Rows,
        batching: MicroBatching,
        indexes: Sequence[int],
        outputs: HeadOutputs | None = None,
    ) -> tuple[list[Tensor], ...] | None:
        """Compute results of the predicted tokens, as `Engine.forward`."""
        ...


class _ModelWorker(DeviceWorker):
    """Passes rows of the data plane through Megatron models. Subclasses build the models and the replica.

    Attributes:
        roles: the models of this rank.
        replica: its part at the data plane.
    """

    roles: Roles
    replica: Replica

    def resident_bytes(self) -> Mapping[str, int]:
        """Return the bytes that are on the device now, by owner in the planner's words."""
        (role,) = self.roles.all()
        return role.offloader.resident_bytes()

    def _release(self, role: Role) -> None:
        """Offload a model until its next phase, where it shares the device with others; nothing on dedicated devices."""

    def _batching(self, use: Literal["update", "actor", "ref"], size: int | None) -> MicroBatching:
        """Return the limits of a micro-batch; without `size` its rows are the actor's micro_batch_size."""
        return build_micro_batching(self.run.rl, use, size or self.run.plan.micro_batch_size)

    def _forward(
        self,
        phase: Phase,
        role: Role,
        batching: MicroBatching,
        selected: range,
        outputs: HeadOutputs | None = None,
        passes: _Passes | None = None,
    ) -> None:
        """Compute the phase's columns for this replica's rows among the selected; waits for rows that are not ready.

        Args:
            outputs: the columns; None for those that a loss gets.
            passes: compute rows in place of the engine; None for the engine.
        """
        role.offloader.onload(params=True)
        for rows in self.replica.dispatches(selected, self.run.plan.dispatch_sizes[phase.dispatch_key]):
            fetched = self.replica.fetch_rows(phase.consumer, rows, pattern=selected[0])
            # without the wait for rows
            with self.timers(phase.timer):
                if passes is None:
                    output = role.engine.forward(fetched, batching, outputs)
                else:
                    output = passes.forward(role.engine, fetched, batching, rows, outputs)
                self.replica.put(dict(zip(phase.columns, output or ())), rows)
        if not role.trains:
            self._release(role)

    def _mini_batches(self, phase: Phase, steps: list[list[int]], columns: Sequence[str]) -> Iterator[Rows]:
        """Yield this replica's rows of each step, with the columns of the loss and each row's index as column `row`."""
        rl = self.run.rl
        for step in steps:
            lengths = None
            if rl.use_dp_batch_balance and self.replica.count > 1:
                # lengths of all rows of the step: every replica divides the same rows in the same way
                batch = self.replica.fetch(Phases.UPDATE_ACTOR.consumer, ["sequence_lengths"], step)
                lengths = [int(row.sum()) for row in batch["sequence_lengths"]]
            objective = self.run.objective
            # adjacent rows that one replica computes faster, or that a loss compares
            together = rl.use_prefix_grouper or (objective is not None and objective.loss.compares_group)
            group_size = rl.n_samples_per_prompt if together else 1
            indexes = split_rows(step, self.replica.count, self.replica.index, lengths, group_size)
            # a replica without rows follows the first of the others
            taken = indexes or step[:1]
            rows = self.replica.fetch_rows(phase.consumer, taken, columns)
            added = {"row": [torch.tensor(index) for index in taken]}
            if (term := None if objective is None else objective.distillation) is not None:
                # several values a token, which a row of the data plane has one after the other
                width = len(term.weights) * (1 if term.estimator else term.topk)
                shaped = {name: rows.columns[name] for name in term.columns if name in rows.columns}
                added |= {name: [values.reshape(-1, width) for values in column] for name, column in shaped.items()}
            rows = replace(rows, columns={**rows.columns, **added})
            yield rows if indexes else rows.select([])

    def _count_idle(self, role: str, rows: Rows, metrics: Metrics) -> None:
        """Count this replica where it has no row of an optimizer step; one of its ranks does so."""
        if not len(rows) and self.replica.is_output:
            metrics.add_sum(f"{role}/idle_replicas", 1)

    def _prepare_step(self, role: Role) -> None:
        """Load the state of a step onto the device, or start to, while the first micro-batches are computed."""
        role.offloader.onload(params=True, grads=True)
        # a swapped optimizer is loaded when activations no longer take its room
        role.offloader.start_onload(optimizer=not role.config.swap_optimizer)


class RefPhases(_ModelWorker):
    """Log-probs of the reference."""

    def compute_log_probs(self, role: str, count: int, start: int = 0) -> WorkerReport:
        """Compute the log-probs of the reference ("ref") for this replica's rows, from `start` up to `count`."""
        assert role == "ref", role
        # without a model of its own the reference is the actor without its adapters
        target = self.roles.ref or self.roles.actor
        assert target is not None
        weights = nullcontext() if self.roles.ref else target.require_adapters().disabled()
        batching = self._batching("ref", self.run.rl.ref_forward_micro_batch_size or target.config.micro_batch_size)
        metrics = Metrics()
        with self.phase(Phases.REF_LOG_PROBS, metrics, target, timed=False), weights:
            self._forward(Phases.REF_LOG_PROBS, target, batching, range(start, count))
        return self._report(metrics)


class TeacherPhases(_ModelWorker):
    """Judgements of the teachers of a distillation."""

    def compute_teacher_log_probs(self, count: int) -> WorkerReport:
        """Compute the teachers' log-probs of the first `count` rows: of sampled tokens, or of their most probable tokens.

        Where a column of the prompts chooses the teacher, each judges only its rows.
        """
        metrics, phase = Metrics(), Phases.TEACHER_LOG_PROBS
        keys = self.run.rl.distillation
        with self.phase(phase, metrics, timed=False):
            for indexes in self.replica.dispatches(range(count)):
                rows, choices = self.replica.fetch_rows(phase.consumer, indexes), None
                if keys.teacher_keys or keys.teacher_prompt:
                    extra = objects(self.replica.fetch(phase.consumer, ["extra"], indexes)["extra"])
                    rows = _with_teacher_prompts(rows, extra) if keys.teacher_prompt else rows
                    choices = [str(columns[keys.teacher_key]) for columns in extra] if keys.teacher_keys else None
                # without the wait for rows
                with self.timers(phase.timer):
                    columns = self._judge(rows, choices)
                self.replica.put(columns, indexes)
        return self._report(metrics)

    def _judge(self, rows: Rows, choices: list[str] | None) -> dict[str, list[Tensor]]:
        """Return the columns of the teachers for rows; nothing on ranks of other pipeline stages than the last.

        Args:
            choices: value of the column that chooses the teacher, of each row; None where all judge all rows.
        """
        objective, keys = self.run.objective, self.run.rl.distillation
        assert objective is not None and objective.distillation is not None
        term = objective.distillation
        judgement = HeadOutputs() if term.estimator is not None else TopLogProbs(term.topk)
        judged: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(len(rows))]
        for index, name in enumerate(term.teachers):
            role = {"actor": self.roles.actor, "ref": self.roles.ref}.get(name) or self.roles.teachers[name]
            chosen = [row for row in range(len(rows)) if choices is None or choices[row] == keys.teacher_keys[index]]
            for row, values in self._ask_teacher(role, rows, chosen, judgement).items():
                judged[row].append(values)
        if not all(judged):
            return {}
        log_probs, ids = ([torch.stack([pair[item] for pair in row], 1).flatten() for row in judged] for item in (0, 1))
        columns = {"teacher_log_probs": log_probs}
        if term.estimator is None:
            columns["teacher_ids"] = [values.int() for values in ids]
        return columns

    def _ask_teacher(
        self, role: Role, rows: Rows, chosen: Sequence[int], judgement: HeadOutputs | TopLogProbs
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the two outputs of a teacher for each of the chosen rows, on the last pipeline stage; collective."""
        # replicas that share experts, layers or the number of micro-batches make their passes together
        together = range(len(rows)) if role.engine.passes_together else chosen or [0][: len(rows)]
        role.offloader.onload(params=True)
        batching = self._batching("ref", self.run.rl.ref_forward_micro_batch_size or role.config.micro_batch_size)
        temperature = self.run.rl.distillation.teacher_temperature
        outputs = role.engine.forward(rows.select(together), batching, judgement, temperature=temperature)
        if not role.trains:
            self._release(role)
        if outputs is None:  # on other pipeline stages than the last
            return {}
        return {row: (values[0], values[1]) for row, *values in zip(together, *outputs) if row in chosen}


def _with_teacher_prompts(rows: Rows, extra: Sequence[Mapping[str, Any]]) -> Rows:
    """Return the rows with the prompts that the teachers read in place of the student's."""
    assert rows.sequences is None  # a rule excludes samples of several turns
    prompts = [torch.tensor(columns[TEACHER_PROMPT_IDS]) for columns in extra]
    responses = [ids[length:] for ids, length in zip(rows.input_ids, rows.prompt_lengths)]
    return replace(
        rows,
        input_ids=[torch.cat(pair) for pair in zip(prompts, responses)],
        prompt_lengths=[len(prompt) for prompt in prompts],
    )


class CriticPhases(_ModelWorker):
    """Values and updates of the critic."""

    def compute_values(self, count: int) -> WorkerReport:
        """Compute the critic's value before each response token."""
        critic, metrics = self.roles.critic, Metrics()
        assert critic is not None
        with self.phase(Phases.VALUES, metrics, critic, timed=False):
            self._forward(Phases.VALUES, critic, self._batching("actor", critic.config.micro_batch_size), range(count))
        return self._report(metrics)

    def update_critic(self, steps: list[list[int]]) -> WorkerReport:
        """Make all steps of the critic on this replica's share of their rows."""
        critic, metrics = self.roles.critic, Metrics()
        assert critic is not None
        loss = partial(_critic_loss, clip_range=self.run.rl.cliprange_value)
        batching = self._batching("update", critic.config.micro_batch_size)
        with self.phase(Phases.UPDATE_CRITIC, metrics, critic) as observer:
            for rows in self._mini_batches(Phases.UPDATE_CRITIC, steps, ["returns", "values", "loss_mask"]):
                self._prepare_step(critic)
                result = critic.engine.train_step(rows, batching, observer.loss(observer.inputs(loss)))
                add_step(metrics, "critic", result)
                self._count_idle("critic", rows, metrics)
            critic.finish_saves(wait=False)
            # or its state would be next to the actor's in the actor's update
            self._release(critic)
        return self._report(metrics)


class RewardModelPhases(_ModelWorker):
    """Scores of the reward model."""

    def compute_model_rewards(self, count: int) -> WorkerReport:
        """Give the first `count` rows of the data plane the reward model's score of prompt and response."""
        metrics = Metrics()
        with self.phase(Phases.MODEL_REWARDS, metrics, self.roles.reward):
            for rows in self.replica.dispatches(range(count)):
                # a replica without rows makes the pass with the others
                batch = self.replica.fetch(Phases.MODEL_REWARDS.consumer, ["prompt_ids", "responses"], rows or [0])
                scores = self._scores(list(batch["prompt_ids"]), list(batch["responses"]))
                self.replica.put(dict.fromkeys(Phases.MODEL_REWARDS.columns, scores), rows)
        return self._report(metrics)

    def score(self, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> list[float] | None:
        """Return the scores of every n-th response, from this replica's index on; None on ranks that return no results."""
        indexes = list(range(self.replica.index, len(prompts), self.replica.count))
        missing = -(-len(prompts) // self.replica.count) - len(indexes)  # replicas that share experts make equally many passes
        padded = indexes + [0] * missing
        scores = self._scores(*([torch.tensor(ids[index]) for index in padded] for ids in (prompts, responses)))
        return scores[: len(indexes)] if self.replica.is_output else None

    def _scores(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> list[float]:
        """Return one score a response; [] on ranks that return no results."""
        role, scoring = self.roles.reward, self.roles.scoring
        assert role is not None and scoring is not None
        role.offloader.onload(params=True)
        rows = scoring.rows(prompts, responses)
        outputs = role.engine.forward(rows, self._batching("ref", role.config.micro_batch_size))
        self._release(role)
        if not self.replica.is_output:
            return []
        assert outputs is not None  # the rank that returns results is on the last pipeline stage
        return scoring.scores(rows, outputs)


def _critic_loss(inputs: LossInputs, *, clip_range: float | None) -> LossOutput:
    """Return the loss of the critic's values against the columns returns and values (those before the update)."""
    columns = inputs.columns
    mask = columns["loss_mask"] & inputs.mask
    return value_loss(inputs.outputs[0], columns["returns"], mask, old_values=columns["values"], clip_range=clip_range)


def add_step(metrics: Metrics, role: str, result: StepResult) -> None:
    """Add the metrics of an optimizer step; one rank adds those that are equal on all."""
    for name, metric in result.metrics.items():
        metrics.add(name if "/" in name else f"{role}/{name}", metric)  # the engine's own have no role
    if result.num_tokens:
        metrics.add_mean(f"{role}/computed_tokens_fraction", result.num_computed, result.num_tokens)
    if dist.get_rank() == 0:
        if result.is_skipped:
            metrics.add_sum(f"{role}/skipped_steps", 1)
        else:
            metrics.add_mean(f"{role}/grad_norm", result.grad_norm)
        metrics.add_last(f"{role}/lr", result.lr)


def add_adapter_step(metrics: Metrics, adapter: str, result: StepResult) -> None:
    """Add what an optimizer step of one of several adapters has of its own."""
    if dist.get_rank() == 0:
        if result.is_skipped:
            metrics.add_sum(f"adapters/{adapter}/skipped_steps", 1)
        else:
            metrics.add_mean(f"adapters/{adapter}/grad_norm", result.grad_norm)
