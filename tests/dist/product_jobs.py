# ruff: noqa: E402  (Megatron and vLLM must be imported after the adaptors)
"""The job of a whole run of reinforcement learning in test processes: the loop itself on every rank, without Ray.

Each rank runs `RLTrainer` on the same inputs, with a fleet that calls its own worker; what workers put into the data plane is
exchanged after each phase. Each rank reports what the iterations read and made.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_jobs import parallel_state  # applies the adaptor of Megatron

from mindspeed_rl import adaptors

adaptors.apply("rollout")

# isort: split
import numpy as np
import product_rewards
import torch
import torch.distributed as dist
import vllm.distributed
from random_run_jobs import _Composition, read_gradients, read_weights
from safetensors.torch import load_file

from mindspeed_rl.config import load_run_config
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.dataplane.columns import objects
from mindspeed_rl.dataplane.transfer_dock import TransferDock
from mindspeed_rl.engine.fsdp.engine import FsdpEngine
from mindspeed_rl.engine.weights import list_local_weights
from mindspeed_rl.observability.console import IterationProgress
from mindspeed_rl.observability.trackers import make_trackers
from mindspeed_rl.rewards.judge import Judge
from mindspeed_rl.rewards.samples import RewardResult, RewardSample, RewardSettings, select_reward_functions
from mindspeed_rl.rewards.scorer import read_score
from mindspeed_rl.rewards.totals import add_trajectory_rewards
from mindspeed_rl.rollout.requests import EvaluationSampling
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.run import Run
from mindspeed_rl.run.columns import list_worker_columns
from mindspeed_rl.run.models import plan_models, with_model_configs
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.evaluation import interleave
from mindspeed_rl.trainers.prompt_loader import load_audit_prompts, load_eval_sets, load_prompts
from mindspeed_rl.trainers.rl_setup import DATA_PLANE_USERS, RLInputs, _Services, build_trainer
from mindspeed_rl.trainers.run_logger import LogOutputs
from mindspeed_rl.trainers.termination import Terminated, Termination
from mindspeed_rl.workers.actor_worker import ActorWorker
from mindspeed_rl.workers.reward_group import SampleReader
from mindspeed_rl.workers.update_plan import UpdatePlan

#: columns of the rows that an iteration trains on; those that a run has not are left out
_COLUMNS = (
    *("prompt_ids", "labels", "extra", "input_ids", "sequence_lengths", "responses", "response_mask", "truncated"),
    *("rollout_log_probs", "weight_versions", "rewards", "reward_results", "advantages", "returns", "scored_mask", "loss_mask"),
    *("old_log_probs", "entropies", "ref_log_probs", "values", "teacher_log_probs", "teacher_ids", "rm_scores"),
    "marked_tokens",
)
#: those of runs that replay routers, by pipeline stage
_ROUTED_COLUMNS = ("routed_lengths", "routed_experts_0", "routed_experts_1")


@dataclass(frozen=True)
class Evaluated:
    """Responses outside of a rollout.

    Attributes:
        items: prompts.
        sampling: of their responses.
        is_average: they were sampled with the moving average of the weights.
        trajectories: those to a prompt adjacent.
    """

    items: Sequence[PromptItem]
    sampling: EvaluationSampling
    is_average: bool
    trajectories: Sequence[Trajectory]


@dataclass(frozen=True)
class Played:
    """A response of an opponent.

    Attributes:
        adapter: name of the snapshot.
        temperature: temperature of its tokens; 0 for the most likely ones.
    """

    adapter: str
    temperature: float
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]


class SharedPlane:
    """A transfer dock on every rank; `exchange` brings what one rank's worker has put to the others."""

    def __init__(self, run: Run, users: Mapping[str, Sequence[str]]) -> None:
        self._dock = TransferDock(run.plan.num_prompts, run.plan.n_samples_per_prompt, users)
        self._columns = (*_COLUMNS, *(name for name in _ROUTED_COLUMNS if name in itertools.chain(*users.values())))
        self._mine: list[tuple[Any, list[int], bool]] = []
        self._in_phase = False

    def put(self, data: Any, indexes: Sequence[int], *, overwrite: bool = False) -> None:
        if self._in_phase:
            self._mine.append((data, list(indexes), overwrite))
        self._dock.put(data, indexes, overwrite)

    def get(
        self,
        consumer: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        indexes: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        result = self._dock.get(consumer, list(columns), count, None if indexes is None else list(indexes))
        assert result[0] is not None or timeout_s is None, f"{consumer} would wait for {columns}"
        return result

    def clear(self, num_prompts: int) -> None:
        self._dock.clear(num_prompts)

    def start_phase(self) -> None:
        """From now on a worker puts rows."""
        self._in_phase = True

    def exchange(self) -> None:
        """End the phase; collective."""
        everything: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everything, self._mine)
        self._mine, self._in_phase = [], False
        for rank, puts in enumerate(everything):
            if rank != dist.get_rank():
                for data, indexes, overwrite in puts:
                    self._dock.put(data, indexes, overwrite)

    def read_all(self) -> dict[str, list[Any]]:
        """Every column that is complete."""
        results = {}
        for name in self._columns:
            batch, _ = self._dock.get("metrics", [name], None, list(range(self._dock.capacity)))
            if batch is not None:
                results[name] = [value.numpy() if isinstance(value, torch.Tensor) else value for value in batch[name]]
        return results


class _Ended:
    """A phase that has ended."""

    def __init__(self, reports: list[WorkerReport]) -> None:
        self._reports = reports

    def wait(self) -> list[WorkerReport]:
        return self._reports

    def wait_with(self, other: Any) -> tuple[list[WorkerReport], list[WorkerReport]]:
        return self._reports, other.wait()


class _Later(_Ended):
    """Scores of rows that are generated later."""

    def __init__(self, rewards: OwnRewards, num_rows: int) -> None:
        self._rewards, self._num_rows = rewards, num_rows

    def wait(self) -> list[WorkerReport]:
        self._rewards.score_rows(self._num_rows)
        return []


class OwnRewards:
    """The reward functions of the tests, on every rank."""

    accuracies = frozenset(("product_rewards:even",))

    def __init__(self, run: Run, plane: SharedPlane, tokenizer_path: str) -> None:
        self._rl, self._plane = run.rl, plane
        self._samples = SampleReader(load_tokenizer(tokenizer_path), "response", run.config.response_limit)
        self._judge: Judge | None = None
        if run.rl.judge_url is not None:
            self._judge = Judge(RewardSettings.from_config(run.rl, max_tokens=run.config.response_limit))

    def start(self, num_rows: int) -> _Later:
        return _Later(self, num_rows)

    def score_rows(self, num_rows: int) -> None:
        """Put the scores of the first rows."""
        batch, _ = self._plane.get("rule_reward", ["responses", "trajectories"], indexes=range(num_rows), timeout_s=1.0)
        results = self._score([ids.tolist() for ids in batch["responses"]], objects(batch["trajectories"]))
        totals = [float("nan") if result.total is None else result.total for result in results]
        self._plane.put({"rewards": totals, "reward_results": results}, range(num_rows))

    def score_now(self, items: list[PromptItem], trajectories: list[Trajectory]) -> list[RewardResult]:
        """Scores of trajectories of prompts."""
        columns = [trajectory.reward_columns() for trajectory in trajectories]
        return self._score([trajectory.token_ids for trajectory in trajectories], columns)

    def _score(self, responses: list[list[int]], trajectories: list[Mapping[str, Any]]) -> list[RewardResult]:
        functions, weights = select_reward_functions(self._rl)
        judged = asyncio.run(self._ask_judges(responses)) if self._judge is not None else [None] * len(responses)
        results = []
        for response, opinion in zip(responses, judged, strict=True):
            scores = {name: getattr(product_rewards, name.rpartition(":")[2]) for name in functions if name != "judge"}
            parts = {name: score(list(response)) for name, score in scores.items()}
            parts |= {} if opinion is None else {"judge": opinion}
            total = sum(weight * parts[name] for name, weight in zip(functions, weights))
            results.append(RewardResult(total, parts) if functions else RewardResult(None, {}, "skipped"))
        return add_trajectory_rewards(
            results, trajectories, which=self._rl.trajectory_reward, weight=self._rl.trajectory_reward_weight
        )

    async def _ask_judges(self, responses: Sequence[list[int]]) -> list[float]:
        """Scores of the package's judge, which asks the servers."""
        assert self._judge is not None
        samples = [self._samples.read([], list(ids), None, {}, False) for ids in responses]
        scores = [read_score(score) for score in await asyncio.gather(*map(self._judge, samples))]
        return [score[0] for score in scores if score is not None]


class OwnAudit:
    """The stricter check of the tests, on every rank."""

    def __init__(self, run: Run) -> None:
        self._functions = run.config.audit.verifier_function

    @classmethod
    def of(cls, run: Run) -> OwnAudit | None:
        """The one of a run; None without an audit."""
        return cls(run) if run.config.audit.has_check else None

    def score(self, samples: Sequence[RewardSample], *, timeout_s: float) -> list[RewardResult]:
        """Scores of responses."""
        functions = [getattr(product_rewards, name.rpartition(":")[2]) for name in self._functions]
        return [RewardResult(sum(function(list(one.response_ids)) for function in functions), {}) for one in samples]


class OwnFleet:
    """The fleet of a run whose driver is on every rank: a phase is the own worker's.

    Attributes:
        records: one of each iteration.
        opponents: what adapters of earlier versions have sampled on this rank.
    """

    servers = judge = None

    def __init__(self, run: Run, plane: SharedPlane, worker: ActorWorker) -> None:
        self._run, self._plane, self._worker = run, plane, worker
        self._composition = _Composition()
        worker.hooks.append(self._composition)
        self.records: list[dict[str, Any]] = []
        self._record: dict[str, Any] = {}
        self._has_average = False  # the engine, in place of the weights
        self._folders = itertools.count()
        self.opponents: list[Played] = []
        if run.rl.opponents.roles:
            self._note_opponents(worker.rollout.engine)
        for name, role in (("update_actor", worker.roles.actor), ("update_critic", worker.roles.critic)):
            if role is not None:
                role.engine.on_gradients.append(lambda name=name, role=role: self._note_step(name, role))

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        self._plane.start_phase()
        mine = getattr(self._worker, name)(*arguments)
        self._plane.exchange()
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, mine)
        return results

    # ------------------------------------------------------------------ records

    def _note_opponents(self, engine: Any) -> None:
        """Note the responses of the engine's requests that have an adapter of their own."""
        add_request, step, running = engine.add_request, engine.step, dict[str, tuple[Any, Any]]()

        def add(name: str, prompt_ids: Sequence[int], sampling: Any, seed: int) -> None:
            add_request(name, prompt_ids, sampling, seed)
            running[name] = list(prompt_ids), sampling

        def make_step() -> Any:
            ended = step()
            for name, completion in ended:
                prompt_ids, sampling = running.pop(name)
                if sampling.adapter.startswith("version_"):  # others are the adapters of roles
                    tokens = list(completion.token_ids)
                    of = (sampling.adapter, sampling.temperature)
                    self.opponents.append(Played(*of, prompt_ids, tokens, list(completion.log_probs)))
            return ended

        engine.add_request, engine.step = add, make_step

    def _note_step(self, name: str, role: Any) -> None:
        self._composition.steps[name].append([])
        self._record[name].append(None if role.config.lora_target_modules else read_gradients(role))
        if role.engine.average is not None:  # it is moved by the weights that each step leaves
            self._record["iterates"].append(self._read_moved(name, role))

    def _read_moved(self, name: str, role: Any) -> dict[str, np.ndarray]:
        """What a step moves: adapters where there are some, else weights."""
        return self._read_adapters(name, role) or read_weights(role)

    def _read_weights(self, role: Any) -> dict[str, np.ndarray]:
        role.offloader.onload(params=True)
        return read_weights(role)

    def _read_adapters(self, name: str, role: Any) -> dict[str, np.ndarray]:
        """Adapters of a role by the names of PEFT; nothing where there are none."""
        if role.adapters is None:
            return {}
        folder = self._run.folder.parent / f"adapters_{name}_{next(self._folders)}"
        role.adapters.save(folder, "")
        named = load_file(folder / "adapter_model.safetensors")
        return {key.removeprefix("base_model.model."): value.float().numpy() for key, value in named.items()}

    def _read_role_adapters(self, weights: dict[str, Any]) -> None:
        """Note the weights and the adapter of each role that has its own, and the digests of all adapters."""
        role = self._worker.roles.actor
        if role is None or role.turns is None:
            return
        present = role.turns._present
        for name in role.turns.names:
            role.turns.use(name)
            weights.setdefault("role_adapters", {})[name] = read_weights(role)
            weights["adapters"][f"actor {name}"] = self._read_adapters("actor", role)
            self._record |= {f"copies of {name}": self._digest()} if self._record else {}
        role.turns.use(present)
        first = role.turns.names[0]
        weights["actor"], weights["adapters"]["actor"] = weights["role_adapters"][first], weights["adapters"][f"actor {first}"]

    def _start_record(self) -> None:
        if self._record:
            return
        self._composition.steps = {"update_actor": [[]], "update_critic": [[]]}
        self._record = {"update_actor": [], "update_critic": [], "iterates": [], "columns": self._plane.read_all()}

    def _digest(self) -> list[tuple[Any, str]]:
        """(tensors of the file and shard, digest of the bits) of every weight of the actor that this rank holds."""
        actor = self._worker.actor
        if isinstance(actor.engine, FsdpEngine):  # the ranks of a mesh's row have the shards of a copy
            model = actor.engine.model
            shard = dist.get_rank() % model.shards
            return [((name, model.shards, shard), _digest(model.read_shard(name))) for name in model.names]
        found: list[tuple[Any, str]] = []
        for weight in list_local_weights(actor.model):
            shards = (weight.num_shards, weight.shard) if any(one.dim is not None for one in weight.op.splits) else (1, 0)
            found.append(((weight.op.hf, *shards), _digest(weight.tensor)))
        return found

    # ------------------------------------------------------------------ phases

    def push_weights(self, version: int, average: bool = False) -> list[WorkerReport]:
        """The end of an iteration, and what comes before the first; pushes for an evaluation are noted with that."""
        if average or self._has_average:
            self._has_average = average
            return self._call("push_weights", version, average)
        roles = self._worker.roles
        weights: dict[str, Any] = {"adapters": {}}
        for name, role in (("actor", roles.actor), ("ref", roles.ref), ("critic", roles.critic)):
            # streamed weights never change, and have no storage here
            if role is not None and not (name == "ref" and role.config.stream_ref_weights):
                weights[name] = self._read_weights(role)
                weights["adapters"][name] = self._read_adapters(name, role)
        self._read_role_adapters(weights)
        if roles.actor is not None and roles.actor.engine.average is not None:
            with roles.actor.averaged():
                weights["average"], weights["moved average"] = read_weights(roles.actor), self._read_moved("ema", roles.actor)
                self._record |= {"average copies": self._digest()} if self._record else {}
        if self._record:
            self.records.append(self._record | {"after": weights, "composition": self._composition.steps})
            self.records[-1]["copies"] = self._digest()
            self._record = {}
        else:
            self.records.append({"after": weights})
        return self._call("push_weights", version)

    def generate(self, rollout_index: int) -> _Ended:
        if not self._run.rl.guarantee_order:  # replicas take rows as they come: here each half of them
            replica, count = self._worker.rollout.replica, self._run.plan.num_samples // self._worker.rollout.num_replicas
            others = [row for row in range(self._run.plan.num_samples) if row // count != replica]
            if others:
                self._plane.get(Phases.GENERATE.consumer, ["prompt_ids"], indexes=others)
        return _Ended(self._call("generate", rollout_index))

    def continue_responses(self, responses: Any, num_tokens: int) -> list[Any]:
        return self._call("continue_responses", responses, num_tokens)

    def generate_responses(self, items: Any, seed: int, evaluation: Any) -> list[Any]:
        shares = self._call("generate_responses", items, seed, evaluation)
        held = [share for share in shares if share is not None]
        made = Evaluated(items, evaluation, self._has_average, interleave(held, len(items) * evaluation.num_samples))
        self.records[-1].setdefault("evaluated", []).append(made)
        return shares

    def finish_rollout(self) -> list[WorkerReport]:
        return self._call("finish_rollout")

    def compute_model_rewards(self, count: int) -> list[WorkerReport]:
        return self._call("compute_model_rewards", count)

    def score(self, prompts: Any, responses: Any) -> list[Any]:
        return self._call("score", prompts, responses)

    def compute_log_probs(self, role: str, count: int, start: int = 0) -> list[WorkerReport]:
        return self._call("compute_log_probs", role, count, start)

    def compute_teacher_log_probs(self, count: int) -> list[WorkerReport]:
        return self._call("compute_teacher_log_probs", count)

    def compute_values(self, count: int) -> list[WorkerReport]:
        return self._call("compute_values", count)

    def update_actor(self, plan: UpdatePlan) -> list[WorkerReport]:
        self._start_record()
        self._record["steps"] = plan.steps
        return self._call("update_actor", plan)

    def update_critic(self, steps: list[list[int]]) -> list[WorkerReport]:
        self._start_record()
        self._record["steps"] = steps
        return self._call("update_critic", steps)

    def sync_reference(self, alpha: float) -> list[WorkerReport]:
        return self._call("sync_reference", alpha)

    def save(self, iteration: int, run_state: dict[str, object]) -> list[WorkerReport]:
        return self._call("save", iteration, run_state)

    def finish(self) -> list[WorkerReport]:
        return self._call("finish")


def run(path: str, folder: str, *, stops_after: int | None = None) -> dict[str, Any]:
    """Run a run file; every rank reports its records.

    Args:
        path: the run file.
        folder: a run folder of each rank goes below it.
        stops_after: the iteration after which the run ends early, as after SIGTERM.
    """
    os.environ["MINDSPEED_RL_COLLECTIVE_TIMEOUT_S"] = "60"
    rank = int(os.environ["RANK"])
    own = Path(folder) / f"rank_{rank}"
    own.mkdir(parents=True, exist_ok=True)
    cfg = with_model_configs(load_run_config(path))
    resolved = plan_models(resolve(cfg, platform="cpu", folder=own))
    worker: ActorWorker | None = None
    try:
        users = {**DATA_PLANE_USERS, **list_worker_columns(resolved.config)}
        plane = SharedPlane(resolved, users)
        worker = ActorWorker(resolved, plane, os.environ["MASTER_PORT"], rank=rank)  # pyrefly: ignore[bad-argument-type]
        return _run(resolved, plane, worker, stops_after)
    finally:
        vllm.distributed.parallel_state.destroy_model_parallel()
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        vllm.distributed.parallel_state.destroy_distributed_environment()
        if dist.is_initialized():
            dist.destroy_process_group()
        del worker
        gc.collect()


def _in_turn(call: Callable[[], Any]) -> Callable[[], Any]:
    """The same call, one rank after the other."""

    def calls() -> Any:
        result = None
        for rank in range(dist.get_world_size()):
            if rank == dist.get_rank():
                result = call()
            dist.barrier()
        return result

    return calls


def _run(resolved: Run, plane: SharedPlane, worker: ActorWorker, stops_after: int | None) -> dict[str, Any]:
    fleet: Any = OwnFleet(resolved, plane, worker)
    tokenizer_path = resolved.config.actor_config.tokenizer_name_or_path
    assert tokenizer_path is not None and resolved.resume is not None
    rewards: Any = OwnRewards(resolved, plane, tokenizer_path)
    tokenizer = load_tokenizer(tokenizer_path)
    product_rewards.PLAYED.clear()
    prompts, held_out = load_prompts(resolved, tokenizer)
    devices = resolved.plan.world_size
    inputs = RLInputs(
        resolved,
        tokenizer,
        tokenizer_path,
        prompts,
        held_out,
        resolved.resume,
        devices,
        summary="",
        cards=(),
        eval_sets=load_eval_sets(resolved, tokenizer),
        audit_prompts=load_audit_prompts(resolved, tokenizer),
    )
    trackers = make_trackers(resolved.rl, resolved.folder, {}, last_iteration=resolved.resume.iteration)
    termination = Termination()
    with IterationProgress(resolved.plan.train_iters, stream=io.StringIO()) as progress:
        audit: Any = OwnAudit.of(resolved)
        services: Any = _Services(plane, fleet, rewards, worker.resumed_state(), audit)  # pyrefly: ignore[bad-argument-type]
        outputs = LogOutputs(resolved.folder, trackers, progress)
        trainer = build_trainer(inputs, services, outputs, termination)
        if stops_after is not None:
            termination.in_loop = True
            termination.requested = stops_after == 1
        # every rank is a driver here, and they share the folder in which groups in flight wait for their checkpoint
        trainer.rollout.state_dict = _in_turn(trainer.rollout.state_dict)  # pyrefly: ignore
        greedy: list[list[float]] = []
        plain = trainer.baselines.rewards
        trainer.advantages._baselines.rewards = lambda: _noted(greedy, plain())  # pyrefly: ignore
        try:
            trainer.fit()
        except Terminated:
            termination._shutdown.cancel()  # this process goes on
            assert stops_after is not None
        finally:
            trainer.logger.close()
    lines = [json.loads(line) for line in (resolved.folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "records": fleet.records if dist.get_rank() == 0 else [_small(record) for record in fleet.records],
        "metrics": [line for line in lines if line["iteration"]],
        "greedy": greedy,
        "played": list(product_rewards.PLAYED),
        "opponents": fleet.opponents,
        "start": resolved.resume.iteration,
    }


def _digest(tensor: torch.Tensor) -> str:
    # a copy: a storage that numpy has seen can't be emptied, which offloading does
    bits = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(bits).hexdigest()


def _noted(greedy: list[list[float]], values: torch.Tensor) -> torch.Tensor:
    greedy.append(values.tolist())
    return values


def _small(record: Mapping[str, Any]) -> dict[str, Any]:
    """What only this rank knows."""
    return {name: value for name, value in record.items() if name == "composition" or "copies" in name}
