"""One device's worker: trains with Megatron, generates with vLLM, and shares the device between the two in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.workers.worker import Worker, WorkerReport


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


class IntegratedWorker(Worker):
    """Actor, reference, critic, reward model and rollout engine of one rank."""

    # ------------------------------------------------------------------ start

    def set_up(self, master: tuple[str, int], local_rank: int, plane: DataPlane, run_id: str) -> dict[str, Any]:
        """Joins the training world, builds all roles and the rollout engine; collective over all workers.

        Returns:
            {"iteration": ..., "run_state": ...} of a resumed run, else an empty dict.
        """
        self._take_place(master, local_rank)
        from mindspeed_rl.workers.phases import Phases

        self.phases = Phases(self.cfg, self.plan, plane, self.timers, run_id=run_id)
        self._settle()
        return self.phases.resumed or {}

    # ------------------------------------------------------------------ phases

    def push_weights(self, version: int) -> WorkerReport:
        """The rollout engine holds the actor's weights, proven; training state is off the device where asked."""
        return self._report(self.phases.push_weights(version))

    def generate(self, iteration: int) -> WorkerReport:
        """All rows of the iteration have a response."""
        with self.profiler("actor_generate"):
            return self._report(self.phases.generate(iteration))

    def finish_rollout(self) -> WorkerReport:
        """Nothing more is generated in this iteration; the engine's memory belongs to training."""
        return self._report(self.phases.finish_rollout())

    def answer(self, prompts: Sequence[list[int]], seed: int, greedy: bool) -> list[list[int]] | None:
        """Responses to this replica's share of the prompts; None on ranks that do not hand results out."""
        return self.phases.answer(prompts, seed, greedy)

    def compute_model_rewards(self, count: int) -> WorkerReport:
        """The first `count` rows have the reward model's score."""
        return self._report(self.phases.reward_model.score_rows(count))

    def score(self, prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> list[float] | None:
        """The reward model's scores of this replica's share of the responses; None on ranks that do not hand results out."""
        return self.phases.reward_model.score(prompts, responses)

    def compute_log_probs(self, role: str, count: int) -> WorkerReport:
        """The first `count` rows have this role's log-probs."""
        with self.profiler("actor_compute_log_prob" if role == "actor" else "reference_compute_log_prob"):
            return self._report(self.phases.compute_log_probs(role, count))

    def compute_values(self, count: int) -> WorkerReport:
        """The first `count` rows have the critic's values."""
        with self.profiler("critic_compute_values"):
            return self._report(self.phases.compute_values(count))

    def update_actor(self, order: UpdateOrder) -> WorkerReport:
        """The actor made all optimizer steps of the iteration."""
        with self.profiler("actor_update"):
            return self._report(self.phases.update_actor(order))

    def update_critic(self, steps: list[list[int]]) -> WorkerReport:
        """The critic made all its steps of the iteration."""
        with self.profiler("critic_update"):
            return self._report(self.phases.update_critic(steps))

    def sync_reference(self, alpha: float) -> WorkerReport:
        """The reference moved towards the actor: ref = alpha * actor + (1 - alpha) * ref."""
        return self._report(self.phases.sync_reference(alpha))

    def save(self, iteration: int, run_state: dict[str, Any]) -> WorkerReport:
        """A checkpoint of every role that changes is written or on its way."""
        return self._report(self.phases.save(iteration, run_state))

    def finish(self) -> WorkerReport:
        """All checkpoints are complete."""
        return self._report(self.phases.finish())

    def export_hf(self, folder: str) -> None:
        """The actor lies in `folder` as a Hugging Face model."""
        self.phases.roles.actor.save_hf(Path(folder))
