"""Where a run begins, by one rule: a checkpoint of ours without `finetune` is gone on with, everything else gives weights."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.checkpoint import checksums
from mindspeed_rl.checkpoint.checksums import DamagedCheckpoint
from mindspeed_rl.checkpoint.mcore import LATEST_NAME, iteration_folder
from mindspeed_rl.checkpoint.model_source import ModelSource, weights_kind
from mindspeed_rl.checkpoint.newest import iterations, newest_checkpoint
from mindspeed_rl.config import MegatronConfig, Run

#: what the state of a run must hold for a run of this kind to go on with it
_NEEDED = {True: ("consumed_samples",), False: ("kl", "rollout")}


@dataclass(frozen=True)
class ResumePoint:
    """Where a run begins.

    Attributes:
        weights: the folder that the weights are read from.
        iteration: after which the run goes on; 0 for one that starts from weights alone.
    """

    weights: Path
    iteration: int

    def __str__(self) -> str:
        if self.iteration:
            return f"goes on after iteration {self.iteration} of {self.weights}"
        return f"starts from the weights of {self.weights}"


def find_resume_point(run: Run, source: ModelSource) -> ResumePoint:
    """Where a run with these weights begins.

    Args:
        source: of the actor, or of the model that a supervised stage trains.

    Raises:
        ValueError: the checkpoint cannot be gone on with in this run, or nothing is left to do.
    """
    config, group = run.config.actor_config, _group(run)
    if source.kind != "training" or config.finetune:
        return ResumePoint(source.weights, 0)
    record = _record(source, group)
    iteration = record["iteration"]
    advice = f"set {group}.finetune: true to start from its weights"
    missing = [name for name in _NEEDED[run.config.is_supervised] if name not in record["run_state"]]
    stage = record.get("stage")  # checkpoints of earlier versions do not say
    if missing or (run.config.is_supervised and stage is not None and stage != run.config.stage):
        written = f"stage {stage}" if stage is not None else "another stage"
        raise ValueError(
            f"{group}.load: {source.weights} was written by {written}, which a run of stage {run.config.stage} cannot go on "
            f"with; {advice}."
        )
    train_iters = run.plan.train_iters or 0
    if iteration >= train_iters and not (run.config.is_supervised and config.skip_train):
        raise ValueError(
            f"{group}.train_iters: {train_iters}, but the run would go on after iteration {iteration} of {source.weights}: "
            f"nothing is left to do. Raise train_iters to go on, or {advice}."
        )
    return ResumePoint(source.weights, iteration)


def how_to_go_on(run: Run, begun: float) -> str:
    """What a user does after the run has ended before its time.

    Args:
        begun: when the run began, in the seconds of `time.time`; older checkpoints in its folders are none of this run.
    """
    config, group = run.config.actor_config, _group(run)
    if config.save is None:
        return f"there is no checkpoint to go on from: {group}.save is not set."
    latest = Path(config.save, LATEST_NAME)
    goes_on = config.load is not None and Path(config.load) == Path(config.save) and not config.finetune
    if not latest.is_file() or (latest.stat().st_mtime < begun and not goes_on):
        every = "only after the last iteration" if config.save_interval is None else f"every {config.save_interval} iterations"
        return f"there is no checkpoint to go on from yet: {group}.save_interval writes one {every}."
    after = f"to go on after iteration {latest.read_text().strip()}"
    if goes_on:
        return f"{after}, give the same command again."
    keys = [f"{group}.load={config.save}", f"{group}.finetune=false"]
    if config.pretrained_checkpoint is None:  # the reference, and base weights below adapters
        keys.append(f"{group}.pretrained_checkpoint={config.load}")
    critic = run.config.critic_config
    if run.objective is not None and run.objective.has_critic and critic is not None:
        if critic.save is None:
            return "there is no checkpoint to go on from: critic_config.save is not set."
        keys += [f"critic_config.load={critic.save}", "critic_config.finetune=false"]
    return f"{after}, give the same command with {' '.join(keys)}"


def _group(run: Run) -> str:
    return "megatron_training" if run.config.is_supervised else "actor_config"


def _record(source: ModelSource, group: str) -> dict[str, Any]:
    """What the checkpoint says of itself, after a look at its files that reads none of the large ones.

    Raises:
        ValueError: a file is missing, of another size than it was written with, or the record is no record.
    """
    folder = iteration_folder(source.weights, source.iteration)
    advice = "load_previous: true goes on from the one before, load_iteration names another"
    try:
        sums = checksums.read(folder)
        if sums is not None:
            checksums.check_sizes(folder, sums, checksums.elsewhere(folder))
        checksums.verify(folder, only=lambda name: name == "run_state.json")
        record = json.loads((folder / "run_state.json").read_text(encoding="utf-8"))
        if not (isinstance(record, dict) and isinstance(record.get("iteration"), int) and "run_state" in record):
            raise DamagedCheckpoint(f"{folder / 'run_state.json'} is no record of a run")
    except (OSError, ValueError) as error:
        words = error if isinstance(error, DamagedCheckpoint) else f"{folder / 'run_state.json'}: {error}"
        raise ValueError(f"{group}.load: {words}; {advice}.") from None
    return record


def with_sound_checkpoint(run: Run) -> Run:
    """The run with the iteration of the newest sound checkpoint where `load_previous` asks for one; else itself.

    Every file of the checkpoint is read, and that of the critic of the same iteration with it. Checkpoints that are passed over
    are named on the console.

    Raises:
        ValueError: no checkpoint is sound.
    """
    config, critic = run.config.actor_config, run.config.critic_config
    if not config.load_previous or config.load is None or config.load_iteration is not None:
        return run
    folders = [Path(config.load).expanduser()]
    if critic is not None and critic.load is not None and not critic.finetune:
        folders.append(Path(critic.load).expanduser())
    newest = newest_or_last(folders[0])
    if newest is None or weights_kind(folders[0], newest) != "training":
        return run
    for iteration in [number for number in reversed(iterations(folders[0])) if number <= newest]:
        try:
            for folder in folders:
                _check_whole(iteration_folder(folder, iteration))
        except ValueError as error:
            print(f"warning: iteration {iteration} is passed over (load_previous): {error}", flush=True)
            continue
        # the critic too: both have to go on from the same iteration
        roles: dict[str, Any] = {
            name: dataclasses.replace(role, load_iteration=iteration)
            for name in ("megatron_training", "actor_config", "critic_config")
            if isinstance(role := getattr(run.config, name), MegatronConfig)
        }
        return dataclasses.replace(run, config=dataclasses.replace(run.config, **roles))
    raise ValueError(f"{_group(run)}.load_previous: no checkpoint in {folders[0]} is sound.")


def newest_or_last(folder: Path) -> int | None:
    """The iteration that is named newest, or the last that is there where the name is damaged or missing."""
    try:
        newest = newest_checkpoint(folder)
    except ValueError as error:
        print(f"warning: {error}", flush=True)
        newest = None
    if newest == "release":
        return None
    return int(newest) if newest is not None else max(iterations(folder), default=None)


def _check_whole(folder: Path) -> None:
    """Raises DamagedCheckpoint unless every file is what was written."""
    if not (folder / "run_state.json").is_file():
        raise DamagedCheckpoint(f"{folder / 'run_state.json'} is missing")
    checksums.verify(folder, leave_out=checksums.elsewhere(folder))
