"""One device's worker: trains with Megatron, generates with vLLM, and shares the device between the two in time."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_rl import platform
from mindspeed_rl.config import BatchPlan, RunConfig
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.logging import redirect_output, set_up_logging
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Interval, Timers


@dataclass
class WorkerReport:
    """What a worker tells the driver after a phase: its part of the metrics, and when it did what."""

    metrics: Metrics = field(default_factory=Metrics)
    intervals: list[Interval] = field(default_factory=list)


@dataclass(frozen=True)
class UpdateOrder:
    """What the driver decides about one update.

    Attributes:
        steps: rows of each optimizer step.
        kl_coef: this iteration's coefficient.
        entropy_threshold: of top-entropy masking, None without.
        use_old_log_probs: False when the update is exactly on-policy.
        use_ref_log_probs: True when the KL to the reference is in the loss.
    """

    steps: list[list[int]]
    kl_coef: float
    entropy_threshold: float | None
    use_old_log_probs: bool
    use_ref_log_probs: bool


class IntegratedWorker:
    """Actor, reference, critic and rollout engine of one rank. A plain class; the launcher makes it a Ray actor.

    Heavy libraries are imported in `set_up`, after the environment of the process is complete.
    """

    def __init__(self, cfg: RunConfig, plan: BatchPlan, rank: int, run_dir: str) -> None:
        self.cfg = cfg
        self.plan = plan
        self.rank = rank
        self.run_dir = Path(run_dir)
        self.timers = Timers(worker=f"rank {rank}")
        self.plane: DataPlane | None = None

    # ------------------------------------------------------------------ start

    def address(self) -> tuple[str, int]:
        """This host's address and a free port on it, for the rendezvous of all ranks."""
        host = "127.0.0.1" if self.plan.num_nodes == 1 else socket.gethostbyname(socket.gethostname())
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, probe.getsockname()[1]

    def pid(self) -> int:
        """Process id, for messages."""
        return os.getpid()

    def set_up(self, master: tuple[str, int], local_rank: int, plane: DataPlane, run_id: str) -> dict[str, Any]:
        """Joins the training world, builds all roles and the rollout engine; collective over all workers.

        Returns:
            {"iteration": ..., "run_state": ...} of a resumed run, else an empty dict.
        """
        log_dir = self.run_dir / "logs"
        log_dir.mkdir(parents=True, exist_ok=True)
        redirect_output(log_dir / f"rank_{self.rank}.log")
        set_up_logging(self.run_dir / "run.log", worker=f"rank {self.rank}", console=False)
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.plan.world_size),
            LOCAL_RANK=str(local_rank),
            MASTER_ADDR=master[0],
            MASTER_PORT=str(master[1]),
        )
        from mindspeed_rl.workers.phases import Phases

        self.plane = plane
        self.phases = Phases(self.cfg, self.plan, self.plane, self.timers, run_id=run_id)
        return self.phases.resumed or {}

    # ------------------------------------------------------------------ phases

    def push_weights(self, version: int) -> WorkerReport:
        """The rollout engine holds the actor's weights, proven; training state is off the device where asked."""
        return self._report(self.phases.push_weights(version))

    def generate(self, iteration: int) -> WorkerReport:
        """All rows of the iteration have a response."""
        return self._report(self.phases.generate(iteration))

    def evaluate(self, prompts: Sequence[list[int]], seed: int) -> list[list[int]] | None:
        """Greedy responses to this replica's share of the prompts; None on ranks that do not hand results out."""
        return self.phases.evaluate(prompts, seed)

    def compute_log_probs(self, role: str, count: int) -> WorkerReport:
        """The first `count` rows have this role's log-probs."""
        return self._report(self.phases.compute_log_probs(role, count))

    def compute_values(self, count: int) -> WorkerReport:
        """The first `count` rows have the critic's values."""
        return self._report(self.phases.compute_values(count))

    def update_actor(self, order: UpdateOrder) -> WorkerReport:
        """The actor made all optimizer steps of the iteration."""
        return self._report(self.phases.update_actor(order))

    def update_critic(self, steps: list[list[int]]) -> WorkerReport:
        """The critic made all its steps of the iteration."""
        return self._report(self.phases.update_critic(steps))

    def sync_reference(self, alpha: float) -> WorkerReport:
        """The reference moved towards the actor: ref = alpha * actor + (1 - alpha) * ref."""
        return self._report(self.phases.sync_reference(alpha))

    def save(self, iteration: int, run_state: dict[str, Any]) -> WorkerReport:
        """A checkpoint of every role that trains is written or on its way."""
        return self._report(self.phases.save(iteration, run_state))

    def finish(self) -> WorkerReport:
        """All checkpoints are complete."""
        return self._report(self.phases.finish())

    def export_hf(self, folder: str) -> None:
        """The actor lies in `folder` as a Hugging Face model."""
        self.phases.actor.save_hf(Path(folder))

    def memory_gib(self) -> float:
        """Peak memory of this process."""
        return platform.current().memory_stats().peak_gib

    def _report(self, metrics: Metrics | None) -> WorkerReport:
        return WorkerReport(metrics or Metrics(), self.timers.drain())
