"""Reference, critic, reward model and teachers on dedicated devices, in layouts that need not be the actor's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mindspeed_rl.checkpoint.model_source import load_tokenizer_of
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.engine.parallel import init_distributed
from mindspeed_rl.run import Run
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.workers.device_worker import DeviceWorker
from mindspeed_rl.workers.engines import PassSettings
from mindspeed_rl.workers.model_worker import CriticPhases, RefPhases, RewardModelPhases, TeacherPhases
from mindspeed_rl.workers.replica import Replica
from mindspeed_rl.workers.responses import read_image_rules
from mindspeed_rl.workers.roles import Roles, build_pass_settings, build_reward_model, build_role, build_teachers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _DedicatedWorker(DeviceWorker):
    """One rank of a role on devices of its own. Subclasses say which, and build it.

    Attributes:
        role: name of the model in `Run.models` that decides the layout.
        title: title of the workers, in logs.
    """

    role: str
    title: str
    roles: Roles
    replica: Replica

    def __init__(self, run: Run, plane: DataPlane, resumed_at: int | None = None, *, rank: int) -> None:
        """Join the role's world and build it.

        Args:
            run: the resolved run.
            plane: where rows come from.
            resumed_at: iteration after which the actor resumes; None when it starts only from weights.
            rank: rank of this process.
        """
        super().__init__(run, rank, self.title)
        model, actor = run.models[self.role], run.models["actor"]
        init_distributed(model.config, model.plan.layout.vpp)
        # the actor's, whose tokens every role reads
        tokenizer = load_tokenizer_of(run.config.actor_config, actor.source)
        self.roles = self._build_roles(tokenizer, build_pass_settings(run, tokenizer))
        self.roles.time_copies(self.timers)
        self.replica = Replica(plane, run.deadlines.rows_s, image_rules=read_image_rules(actor))
        self.add_hooks(resumed_at or 0)

    @abstractmethod
    def _build_roles(self, tokenizer: PreTrainedTokenizerBase, shared: PassSettings) -> Roles:
        """Build the models of the role."""


class RefWorker(_DedicatedWorker, RefPhases):
    """One rank of a reference (`reference_resource`)."""

    role, title = "ref", "reference"

    def _build_roles(self, tokenizer: PreTrainedTokenizerBase, shared: PassSettings) -> Roles:
        return Roles(ref=build_role(self.run, "ref", shared))


class CriticWorker(_DedicatedWorker, CriticPhases):
    """One rank of a critic (`critic_resource`)."""

    role, title = "critic", "critic"
    _saved: int | None = None

    def _build_roles(self, tokenizer: PreTrainedTokenizerBase, shared: PassSettings) -> Roles:
        return Roles(critic=build_role(self.run, "critic", shared))

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


class RewardModelWorker(_DedicatedWorker, RewardModelPhases):
    """One rank of a reward model (`reward_resource`)."""

    role, title = "reward", "reward_model"

    def _build_roles(self, tokenizer: PreTrainedTokenizerBase, shared: PassSettings) -> Roles:
        role, scoring = build_reward_model(self.run, tokenizer, shared)
        return Roles(reward=role, scoring=scoring)


class TeacherWorker(_DedicatedWorker, TeacherPhases):
    """One rank of the teachers (`teacher_resource`), which have one layout."""

    role, title = "teacher", "teacher"

    def _build_roles(self, tokenizer: PreTrainedTokenizerBase, shared: PassSettings) -> Roles:
        return Roles(teachers=build_teachers(self.run, shared, self._release))

    def resident_bytes(self) -> Mapping[str, int]:
        """Return the bytes that are on the device now."""
        return {role.name: sum(role.offloader.resident_bytes().values()) for role in self.roles.all()}
