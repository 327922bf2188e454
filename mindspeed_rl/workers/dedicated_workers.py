"""Reference, critic and reward model on dedicated devices, in layouts that need not be the actor's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_rl.checkpoint.model_source import load_tokenizer_of
from mindspeed_rl.config import Run
from mindspeed_rl.config.phases import Phases
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.engine.parallel import init_distributed
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.workers.model_worker import CriticPhases, ReferencePhases, RewardModelPhases
from mindspeed_rl.workers.replica import Replica
from mindspeed_rl.workers.roles import Roles, build_pass_settings, build_reward_model, build_role

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ReferenceWorker(ReferencePhases):
    """One rank of a reference (`reference_resource`)."""

    def __init__(self, run: Run, plane: DataPlane, resumed_at: int | None, *, rank: int) -> None:
        """Join the reference's world and build it.

        Args:
            run: the resolved run.
            plane: where rows come from.
            resumed_at: iteration after which the actor resumes; None when it starts from weights alone.
            rank: of this process.
        """
        super().__init__(run, rank, "reference")
        tokenizer = _join_world(run, "ref")
        self.roles = Roles(reference=build_role(run, "ref", build_pass_settings(run, tokenizer)))
        self.replica = Replica(plane, run.deadlines.rows_s)
        self.add_hooks(resumed_at or 0)


class CriticWorker(CriticPhases):
    """One rank of a critic (`critic_resource`)."""

    def __init__(self, run: Run, plane: DataPlane, resumed_at: int | None, *, rank: int) -> None:
        """Join the critic's world and build it; see `ReferenceWorker`."""
        super().__init__(run, rank, "critic")
        self._saved: int | None = None
        tokenizer = _join_world(run, "critic")
        self.roles = Roles(critic=build_role(run, "critic", build_pass_settings(run, tokenizer)))
        self.replica = Replica(plane, run.deadlines.rows_s)
        self.add_hooks(resumed_at or 0)

    def save(self, iteration: int, run_state: dict[str, object]) -> WorkerReport:
        """Write the critic's checkpoint, completely: a run that resumes with the actor's checkpoint needs all of this one.

        The last actor's checkpoint that may be incomplete now is the one before this: the critic's before that one stays.
        """
        critic = self.roles.critic
        assert critic is not None
        with self.timers(Phases.SAVE.timer):
            critic.remove_old(iteration, spare=1)
            critic.save(iteration, run_state, companions=None)
            critic.finish_saves()
        self._saved = iteration
        return self._report()

    def finish(self) -> WorkerReport:
        """Remove old checkpoints, now that the actor's newest is complete."""
        assert self.roles.critic is not None
        if self._saved is not None:
            self.roles.critic.remove_old(self._saved)
        return self._report()


class RewardModelWorker(RewardModelPhases):
    """One rank of a reward model (`reward_resource`)."""

    def __init__(self, run: Run, plane: DataPlane, *, rank: int) -> None:
        """Join the reward model's world and build it."""
        super().__init__(run, rank, "reward_model")
        tokenizer = _join_world(run, "reward")
        role, scoring = build_reward_model(run, tokenizer, build_pass_settings(run, tokenizer))
        self.roles = Roles(reward=role, scoring=scoring)
        self.replica = Replica(plane, run.deadlines.rows_s)
        self.add_hooks(0)


def _join_world(run: Run, role: str) -> PreTrainedTokenizerBase:
    """Join the world of a role; returns the actor's tokenizer, whose tokens every role reads."""
    model = run.models[role]
    init_distributed(model.config, model.plan.layout.vpp)
    return load_tokenizer_of(run.config.actor_config, run.models["actor"].source)
