"""Reference and critic on devices of their own, with layouts of their own (`reference_resource`, `critic_resource`)."""

from __future__ import annotations

from functools import partial
from typing import Any

from mindspeed_rl.checkpoint.model_source import find_model, load_tokenizer_of
from mindspeed_rl.config import Run
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.engine.parallel import init_distributed
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.runtime.device_memory import PhaseMemory
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.workers.dumping import PhaseDumps
from mindspeed_rl.workers.model_worker import ModelWorker, add_step, critic_loss
from mindspeed_rl.workers.replica import Replica
from mindspeed_rl.workers.roles import build_critic, build_reference, shared_settings


class ReferenceWorker(ModelWorker):
    """One rank of a reference model."""

    def __init__(self, run: Run, plane: DataPlane, resumed_at: int | None, *, rank: int) -> None:
        """Joins the reference's world and builds it.

        Args:
            resumed_at: iteration after which the actor goes on; None when it starts from weights alone.
        """
        super().__init__(run, rank, "reference")
        config, actor = run.config.ref_config, run.config.actor_config
        source = find_model(actor, "actor_config")
        init_distributed(config, plan_model(config, source.hf_folder).layout.vpp)
        tokenizer = load_tokenizer_of(actor, source)
        self._role = build_reference(run, source, resumed_at, shared_settings(run, tokenizer))
        self.memory = PhaseMemory(self._role.offloader.resident_bytes)
        self.replica = Replica(plane, run.deadlines.rows_s)
        self.dumps = PhaseDumps(run.config.msprobe_config, resumed_at or 0)

    def compute_log_probs(self, role: str, count: int) -> WorkerReport:
        """Log-probs of the reference for this replica's rows."""
        assert role == "ref", role
        size, metrics = self.run.rl.ref_forward_micro_batch_size or self._role.config.micro_batch_size, Metrics()
        measured = self.memory("reference pass", "activations", metrics)
        with self.profiler("reference_compute_log_prob"), measured, self.dumps.reference(self._role):
            batching = self._batching("ref", size)
            self._forward(
                "reference_model", self._role, "ref_log_prob", ("ref_log_probs",), batching, count, "ref_dispatch_size"
            )
        return self._report(metrics)


class CriticWorker(ModelWorker):
    """One rank of a critic."""

    def __init__(self, run: Run, plane: DataPlane, resumed_at: int | None, *, rank: int) -> None:
        """Joins the critic's world and builds it.

        Args:
            resumed_at: iteration after which the actor goes on; None when it starts from weights alone.
        """
        super().__init__(run, rank, "critic")
        config, actor = run.config.critic_config, run.config.actor_config
        assert config is not None
        source = find_model(actor, "actor_config")
        init_distributed(config, plan_model(config, find_model(config, "critic_config").hf_folder, head="reward").layout.vpp)
        tokenizer = load_tokenizer_of(actor, source)
        self._role = build_critic(run, resumed_at, shared_settings(run, tokenizer))
        self.memory = PhaseMemory(self._role.offloader.resident_bytes)
        self.replica = Replica(plane, run.deadlines.rows_s)
        self.dumps = PhaseDumps(run.config.msprobe_config, resumed_at or 0)

    def compute_values(self, count: int) -> WorkerReport:
        """The critic's value before each response token."""
        metrics = Metrics()
        with self.profiler("critic_compute_values"), self.memory("critic pass", "activations", metrics):
            batching = self._batching("actor", self._role.config.micro_batch_size)
            self._forward(
                "critic_model", self._role, "critic_compute_values", ("values",), batching, count, "critic_value_dispatch_size"
            )
        return self._report(metrics)

    def update_critic(self, steps: list[list[int]]) -> WorkerReport:
        """All steps of the critic on this replica's share of their rows."""
        metrics = Metrics()
        loss = partial(critic_loss, clip_range=self.run.rl.cliprange_value)
        batching = self._batching("update", self._role.config.micro_batch_size)
        dump, measured = self.dumps.update("critic", self._role), self.memory("update critic", "activations", metrics)
        with self.profiler("critic_update"), self.timers("update_critic"), measured, dump as probe:
            for rows in self._mini_batches("critic_train", steps, ["returns", "values", "loss_mask"]):
                add_step(metrics, "critic", self._role.engine.train_step(rows, batching, probe.loss(probe.inputs(loss))))
            self._role.poll_save()
        return self._report(metrics)

    def save(self, iteration: int, run_state: dict[str, Any]) -> WorkerReport:
        """The critic's checkpoint."""
        with self.timers("save"):
            self._role.save(iteration, run_state)
        return self._report()

    def finish(self) -> WorkerReport:
        """Waits for background saves."""
        self._role.finish_saves()
        return self._report()
