"""A run, resolved once: what its file says and everything that is decided from it, in one record that nobody changes."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mindspeed_rl.config.derived import derive
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.keys.deadlines import Deadlines, FaultTolerance, resolve_deadlines
from mindspeed_rl.config.keys.generate import GenerateConfig
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.objective import Objective, resolve_objective
from mindspeed_rl.config.plan import BatchPlan, build_batch_plan
from mindspeed_rl.config.prediction import Prediction
from mindspeed_rl.config.rules.validation import unavailable
from mindspeed_rl.config.run import PlatformName, RunConfig


@dataclass(frozen=True)
class Run:
    """What driver and workers know of a run.

    Attributes:
        config: the run file.
        plan: its derived numbers; `plan.world_size` counts the devices of the workers that this record is given to.
        objective: what is optimized; None in supervised stages.
        platform: name of the device kind, never "auto".
        num_nodes: machines the devices are spread over.
        folder: absolute path of the run folder, which need not exist yet.
        deadlines: how long it waits for what.
        prediction: bytes and seconds that the planner expects; None before `started` asks it.
    """

    config: RunConfig
    plan: BatchPlan
    objective: Objective | None
    platform: str
    num_nodes: int
    folder: Path
    deadlines: Deadlines
    prediction: Prediction | None = None

    @property
    def fault_tolerance(self) -> FaultTolerance:
        """What becomes of it when a worker dies or hangs; supervised stages have the defaults."""
        return FaultTolerance() if self.config.rl_config is None else self.config.rl_config.fault_tolerance

    @property
    def stage(self) -> str:
        """What kind of training it is; ray_grpo where the run file has rl_config and names no stage."""
        assert self.config.stage is not None
        return self.config.stage

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


def resolve(cfg: RunConfig, num_nodes: int = 1, *, platform: str) -> Run:
    """The run that a run file asks for.

    Args:
        platform: name of the device kind that the run is on, whatever `cfg.platform` leaves open.

    Raises:
        ConfigError: the run file breaks a rule, or asks for what this version does not have.
        ValueError: the run has no length.
    """
    if cfg.platform == "auto":  # what follows from the device kind, now that it is known
        cfg = dataclasses.replace(cfg, platform=cast(PlatformName, platform))
        cfg.derived = derive(cfg)
    plan = build_batch_plan(cfg, num_nodes)
    if missing := unavailable(cfg):
        raise ConfigError(f"not available in this version: {sentence}" for sentence in missing)
    if not plan.train_iters and cfg.actor_config.train_epochs is None:
        epochs = "" if cfg.is_supervised else ", or set train_epochs"
        group, unit = ("megatron_training", "optimizer steps") if cfg.is_supervised else ("actor_config", "iterations")
        raise ValueError(f"{group}.train_iters: not set; say how many {unit} the run has{epochs}.")
    return Run(
        config=cfg,
        plan=plan,
        objective=None if cfg.is_supervised else resolve_objective(cfg),
        platform=platform,
        num_nodes=num_nodes,
        folder=(Path(cfg.run_dir) if cfg.run_dir else default_folder(cfg)).resolve(),
        deadlines=resolve_deadlines(cfg),
    )


def default_folder(cfg: RunConfig) -> Path:
    """runs/<run file>-<time>, below the working directory."""
    return Path("runs", f"{Path(cfg.config_name).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
