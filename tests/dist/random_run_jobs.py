"""The job of a random run: all phases of one iteration after the rollout, on the worker that trains in a real run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from random_runs import ITERATION, RandomRun, Row
from router_jobs import collect_gradients
from training_jobs import parallel_state

from mindspeed_rl.algorithms.interfaces import LossInputs
from mindspeed_rl.dataplane.transfer_dock import TransferDock
from mindspeed_rl.engine.fsdp.engine import FsdpEngine
from mindspeed_rl.observability.metrics import Metrics, merge
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rollout.trajectory import NO_VERSION, Segment, TokenSequence, Trajectory, TurnEvent
from mindspeed_rl.run.columns import list_worker_columns
from mindspeed_rl.run.phases import Phase, Phases
from mindspeed_rl.trainers.advantages import Advantages
from mindspeed_rl.trainers.rl_setup import DATA_PLANE_USERS
from mindspeed_rl.trainers.schedule import Schedule
from mindspeed_rl.workers.device_worker import LossObserver
from mindspeed_rl.workers.responses import build_response_columns
from mindspeed_rl.workers.roles import Role
from mindspeed_rl.workers.routing import build_routing_columns
from mindspeed_rl.workers.trainer_worker import TrainerWorker


class _Plane:
    """A transfer dock on every rank; `exchange` brings what one rank has put to the others."""

    def __init__(self, run: RandomRun, users: Mapping[str, Sequence[str]]) -> None:
        self._dock = TransferDock(len(run.rows) // run.group_size, run.group_size, users)
        self._mine: list[tuple[Any, list[int], bool]] = []

    def put(self, data: Any, indexes: Sequence[int], *, overwrite: bool = False) -> None:
        self._mine.append((data, list(indexes), overwrite))
        self._dock.put(data, indexes, overwrite)

    def get(self, consumer: str, columns: Sequence[str], *, indexes: Sequence[int], timeout_s: float | None = None) -> Any:
        result = self._dock.get(consumer, columns, indexes=indexes)
        assert result[0] is not None, (consumer, columns)
        return result

    def exchange(self) -> None:
        everything: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everything, self._mine)
        self._mine = []
        for rank, puts in enumerate(everything):
            if rank != dist.get_rank():
                for data, indexes, overwrite in puts:
                    self._dock.put(data, indexes, overwrite)

    def forget(self) -> None:
        """Do nothing: every rank has put the same values."""
        self._mine = []


class _Greedy:
    """Rewards of greedy responses."""

    def __init__(self, run: RandomRun) -> None:
        self._rewards = [float("nan") if value is None else value for value in run.greedy]
        self._group_size = run.group_size

    def rewards(self) -> torch.Tensor:
        return torch.tensor(self._rewards).repeat_interleave(self._group_size)


class _Composition(LossObserver):
    """Notes the rows of every micro-batch of every step, by role."""

    def __init__(self) -> None:
        self.steps: dict[str, list[list[tuple[int, ...]]]] = {"update_actor": [[]], "update_critic": [[]]}
        self._phase = ""

    @contextmanager
    def __call__(self, phase: Phase, target: object = None, iteration: int | None = None) -> Iterator[LossObserver]:
        self._phase = phase.name
        yield self

    def inputs(self, function: Any) -> Any:
        def note(inputs: LossInputs) -> Any:
            rows = tuple(int(row) for row in inputs.columns["row"])
            if rows not in self.steps[self._phase][-1]:
                self.steps[self._phase][-1].append(rows)
            return function(inputs)

        return note


def read_weights(role: Role) -> dict[str, np.ndarray]:
    """Weights by the names of a checkpoint, whichever engine has them; collective."""
    return {name: value.float().clone().numpy() for name, value in role.stream.named_tensors()}


def read_gradients(role: Role) -> dict[str, np.ndarray] | None:
    """The gradients of a step by the same names; None of a distributed optimizer of Megatron. Collective."""
    if isinstance(role.engine, FsdpEngine):
        return {name: value.float().numpy() for name, value in role.engine.read_gradients().items()}
    return None if role.config.use_distributed_optimizer else collect_gradients(role.megatron)


def _trajectory(row: Row, log_probs: Sequence[float], version: int) -> Trajectory:
    position, sequences = 0, []
    for index, sequence in enumerate(row.sequences):
        segments, length = [], len(sequence.prompt)
        for tokens, sampled in sequence.stretches:
            places = range(position, position + len(tokens))
            position += len(tokens)
            length += len(tokens)
            if not sampled:
                segments.append(Segment.from_context(tokens))
                continue
            routing = None if row.routing is None else np.array(row.routing[index][: length - 1], dtype=np.int16)
            values, versions = tuple(log_probs[place] for place in places), tuple(version - row.ages[place] for place in places)
            segments.append(Segment(tuple(tokens), values, versions, True, routing))
        sequences.append(TokenSequence(tuple(sequence.prompt), tuple(segments)))
    assert NO_VERSION == -1
    finish: Any = "length" if row.truncated else "stop"
    if not row.turns:
        return Trajectory(tuple(sequences), finish)
    events, start = [], 0
    for (role, reward), sequence in zip(row.turns, row.sequences, strict=True):
        stop = start + len(sequence.response)
        events.append(TurnEvent("model", None, start, stop, 0.0, 0.0, reward, role=role))
        start = stop
    rewards = tuple(reward for _, reward in row.turns)
    return Trajectory(tuple(sequences), finish, turn_rewards=rewards, metrics={"turns": 1.0}, events=tuple(events))


def iterate(run: RandomRun, rollout_log_probs: list[list[float]]) -> dict[str, Any]:
    """Makes the iteration; rank 0 reports gradients, weights and columns, every rank its metrics."""
    os.environ["MINDSPEED_RL_COLLECTIVE_TIMEOUT_S"] = "60"
    resolved = run.resolve()
    schedule = Schedule(resolved)
    plane = _Plane(run, {**DATA_PLANE_USERS, **list_worker_columns(resolved.config)})
    try:
        worker = TrainerWorker(resolved, plane, rank=int(os.environ["RANK"]))  # pyrefly: ignore[bad-argument-type]
        return _iterate(run, worker, plane, schedule, rollout_log_probs)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _iterate(run: RandomRun, worker: TrainerWorker, plane: _Plane, schedule: Schedule, log_probs: list[list[float]]) -> Any:
    count, everyone = len(run.rows), list(range(len(run.rows)))
    version = schedule.admission.version(ITERATION)
    trajectories = [_trajectory(row, values, version) for row, values in zip(run.rows, log_probs)]
    rewards = [float("nan") if row.reward is None else row.reward for row in run.rows]
    results = [
        RewardResult(
            row.reward,
            {name: value for name, value in row.parts.items() if value is not None},
            "failed" if row.reward is None else "ok",
        )
        for row in run.rows
    ]
    plane.put(build_response_columns(trajectories), everyone)
    iterates: list[dict[str, np.ndarray]] = []
    plane.put({"rewards": rewards, "reward_results": results}, everyone)
    if worker.run.rl.router_replay.mode == "R3":
        plane.put(build_routing_columns(worker.run.models["actor"].plan, trajectories), everyone)
    plane.forget()
    metrics, result, names = Metrics(), dict[str, Any](), ["advantages", "returns", "scored_mask", "loss_mask"]
    if schedule.needs_ref:
        metrics.merge(worker.compute_log_probs("ref", count).metrics)
        plane.exchange()
        names.append("ref_log_probs")
    if schedule.computes_old_log_probs(ITERATION):
        metrics.merge(worker.compute_log_probs("actor", count).metrics)
        plane.exchange()
        names += ["old_log_probs", "entropies"]
        old, _ = plane.get("metrics", ["old_log_probs"], indexes=everyone)
        moved = [values + torch.tensor(row.drift) for values, row in zip(old["old_log_probs"], run.rows)]
        plane.put({"old_log_probs": moved}, everyone, overwrite=True)
    if schedule.has_critic:
        metrics.merge(worker.compute_values(count).metrics)
        plane.exchange()
        names.append("values")
    advantages = Advantages(worker.run, plane, _Greedy(run), schedule, ())  # pyrefly: ignore[bad-argument-type]
    on_driver = advantages.compute(ITERATION, kl_coef=schedule.kl.coef)
    plane.forget()
    composition = _Composition()
    worker.hooks.append(composition)
    roles = [("update_critic", worker.roles.critic)] if schedule.has_critic else []
    if schedule.trains_actor(ITERATION):
        roles.append(("update_actor", worker.actor))
    for name, role in roles:
        assert role is not None
        gradients = result[name] = list[Any]()

        def collect(name: str = name, role: Role = role, result: list[Any] = gradients) -> None:
            composition.steps[name].append([])
            result.append(read_gradients(role))
            if role.engine.average is not None:  # it is moved by the weights that each step leaves
                iterates.append(read_weights(role))

        role.engine.on_gradients.append(collect)
        if name == "update_critic":
            metrics.merge(worker.update_critic(schedule.steps(ITERATION)).metrics)
        else:
            plan = schedule.update_plan(ITERATION, advantages.entropy_threshold)
            metrics.merge(worker.update_actor(plan).metrics)
        result[f"{name} weights"] = read_weights(role)
        if role.engine.average is not None:
            result["iterates"] = [*iterates, result[f"{name} weights"]]
            with role.averaged():
                result["average"] = read_weights(role)
    columns, _ = plane.get("metrics", names, indexes=everyone)
    if dist.get_rank() == 0:
        metrics.merge(on_driver)
    else:
        result = {}
    return result | {
        "metrics": metrics,
        "columns": {name: [row.numpy() for row in columns[name]] for name in names},
        "steps": schedule.steps(ITERATION),
        "composition": composition.steps,
        "consumer": Phases.UPDATE_ACTOR.consumer,
    }


def merge_reports(reports: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, list[list[tuple[int, ...]]]]]:
    """(metrics over all ranks, rows of each micro-batch of each step by phase)."""
    steps = merge_compositions([report["composition"] for report in reports])
    return merge(report["metrics"] for report in reports).results(), steps


def merge_compositions(compositions: Sequence[Mapping[str, Any]]) -> dict[str, list[list[tuple[int, ...]]]]:
    """Rows of each micro-batch of each step by phase, over all ranks."""
    steps: dict[str, list[list[tuple[int, ...]]]] = {}
    for composition in compositions:
        for name, result in composition.items():
            for number, groups in enumerate(result):
                known = steps.setdefault(name, [])
                if number == len(known):
                    known.append([])
                known[number] += [rows for rows in groups if rows not in known[number]]
    return steps
