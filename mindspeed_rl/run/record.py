"""The record of a run: its run file and every decision that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mindspeed_rl.catalogue.objective import Objective
from mindspeed_rl.config.keys.deadlines import Deadlines, FaultTolerance
from mindspeed_rl.config.keys.generate import GenerateConfig
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.threads import Threads
from mindspeed_rl.run.batch_sizes import BatchPlan, Sizes
from mindspeed_rl.run.placement import Placement

if TYPE_CHECKING:
    from mindspeed_rl.adaptors.cpu_attention import KernelChoice
    from mindspeed_rl.models.plan import RoleModel  # needs torch, which the record does without
    from mindspeed_rl.run.resume import ResumePoint


@dataclass(frozen=True)
class Run:
    """Everything that driver and workers read of a run; only functions of this package make another one of it.

    Attributes:
        config: the run file, with the keys that follow from others.
        placement: devices of every role.
        sizes: numbers of the batch; None where one that all others depend on is not set.
        objective: the loss; None in supervised stages.
        platform: name of the device kind; "auto" only in a draft.
        num_nodes: machines the devices are spread over.
        folder: absolute path of the run folder, which need not exist yet.
        deadlines: limits of every wait.
        threads: number of threads of each worker; None where the libraries choose.
        attention: kernel of the trainer's attention, from `run.models.plan_models`; None before, and where the device has one.
        models: the model of each role ("actor", "ref", "critic", "reward", "teacher", "teacher_1" ...), from
            `run.models.plan_models`; empty before.
        resume: the checkpoint or weights that the run starts from, from `run.models.plan_models`; None before.
        prepared: prefixes of raw data that the start of a supervised run has tokenized, by key of the trained model.
    """

    config: RunConfig
    placement: Placement
    sizes: Sizes | None
    objective: Objective | None
    platform: str
    num_nodes: int
    folder: Path
    deadlines: Deadlines
    threads: Threads | None = None
    attention: KernelChoice | None = None
    models: Mapping[str, RoleModel] = field(default_factory=dict)
    resume: ResumePoint | None = None
    prepared: Mapping[str, str | list[str | float]] = field(default_factory=dict)

    @cached_property
    def plan(self) -> BatchPlan:
        """The numbers of a batch; for runs that keep every rule."""
        assert self.sizes is not None
        return BatchPlan.from_sizes(self.sizes, self.config.actor_config.train_iters)

    @property
    def data_config(self) -> MegatronConfig:
        """Keys of the trained model, with prefixes of indexed datasets in place of raw data."""
        return replace(self.config.actor_config, **cast("dict[str, Any]", dict(self.prepared)))

    @property
    def vocab_sizes(self) -> dict[str, int]:
        """Number of tokens that the model of each role can read, by its folder; empty before the models are planned."""
        return {str(model.source.hf_folder): model.plan.model_config.vocab_size for model in self.models.values()}

    @property
    def fault_tolerance(self) -> FaultTolerance:
        """Keys of fault_tolerance; supervised stages have the defaults."""
        return FaultTolerance() if self.config.rl_config is None else self.config.rl_config.fault_tolerance

    @property
    def stage(self) -> str:
        """The kind of training; ray_grpo where the run file has rl_config and names no stage."""
        assert self.config.stage is not None
        return self.config.stage

    @property
    def has_ref(self) -> bool:
        """True where a reference has weights of its own; adapters that are off, or the policy without them, need none."""
        actor, rl = self.config.actor_config, self.config.rl_config
        if self.objective is None or rl is None:
            return self.config.stage in ("dpo", "kto") and bool(actor.ref_model or not actor.lora_target_modules)
        return self.objective.needs_ref and not rl.share_backbone

    @property
    def rl(self) -> RLConfig:
        """Keys of rl_config; for runs with rollouts."""
        assert self.config.rl_config is not None
        return self.config.rl_config

    @property
    def generate(self) -> GenerateConfig:
        """Keys of generate_config; for runs with rollouts."""
        assert self.config.generate_config is not None
        return self.config.generate_config
