"""A run file as a run that keeps every rule."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.record import Run
from mindspeed_rl.run.rules.validation import unavailable, validate


def resolve(cfg: RunConfig, num_nodes: int = 1, *, platform: str, folder: Path | None = None) -> Run:
    """Resolve a run file to a run, without its models: see `run.models.resolve_run` and `run.models.plan_models`.

    Args:
        platform: name of the device kind of this run, also where `cfg.platform` is "auto".
        folder: the run folder, in place of `cfg.run_dir`.

    Raises:
        ConfigError: the run file breaks a rule, or requests a feature that this version does not have.
        ValueError: the run has no length.
    """
    run = draft(cfg, num_nodes, platform=platform, folder=folder)
    if violations := validate(run):
        raise ConfigError(str(violation) for violation in violations)
    if missing := unavailable(run):
        raise ConfigError(missing)
    actor = run.config.actor_config
    if not actor.train_iters and actor.train_epochs is None:
        epochs = "" if cfg.stage == "pretrain" else ", or set train_epochs"
        group, unit = ("megatron_training", "optimizer steps") if cfg.is_supervised else ("actor_config", "iterations")
        raise ValueError(f"{group}.train_iters: not set; say how many {unit} the run has{epochs}.")
    return run
