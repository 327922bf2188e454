"""The point that a run resumes from, by one rule: a training checkpoint without `finetune` is resumed, all else gives weights.

A run resumes when the user gives the command for it, or by itself after a fault where `rl_config.fault_tolerance` asks for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_rl.checkpoint import checksums
from mindspeed_rl.checkpoint.adapter_folders import find_adapter_folders
from mindspeed_rl.checkpoint.checksums import DamagedCheckpointError
from mindspeed_rl.checkpoint.mcore import iteration_folder
from mindspeed_rl.checkpoint.model_source import weights_kind
from mindspeed_rl.checkpoint.newest import (
    ADAPTERS,
    AVERAGES,
    EXPORTS,
    TRACKER_NAME,
    iterations,
    lacks_export,
    newest_checkpoint,
)
from mindspeed_rl.checkpoint.torch_file import check_small_files
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.keys.schema import ON_RESUME, OnResume
from mindspeed_rl.files import read_json
from mindspeed_rl.models.plan import ModelSource
from mindspeed_rl.run import Run
from mindspeed_rl.run.rules.resume_rules import (
    ROLE_ADAPTERS,
    KeyChange,
    describe_changes,
    find_changes,
    list_keys_on_resume,
)

#: keys that the state of a run must have for a run of this kind (supervised or not) to resume from it
_STATE_KEYS = {True: ("consumed_samples",), False: ("kl", "rollout")}


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint or weights that a run starts from.

    Attributes:
        weights: the folder that the weights are read from.
        iteration: last iteration before the run resumes; 0 for a run that starts only from weights.
        state: state of the trainer; empty for a run that starts from weights without a state.
        changes: keys that have another value than in the run that wrote the checkpoint.
        notes: sentences on what they do to the run.
    """

    weights: Path
    iteration: int
    state: Mapping[str, Any] = field(default_factory=dict, repr=False)
    changes: Sequence[KeyChange] = ()
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        if self.iteration:
            return "\n".join([f"resumes after iteration {self.iteration} of {self.weights}", *self.notes])
        return f"starts from the weights of {self.weights}"

    def affects(self, effect: OnResume) -> bool:
        """Return True where a key has changed whose change has this effect."""
        return any(change.on_resume == effect for change in self.changes)

    def describe_order_change(self, order: list[int]) -> str:
        """Return a sentence where the data, or their order, differ from the checkpoint; empty where they do not.

        Args:
            order: prompt order of this run; see `trainers.prompt_loader.describe_order`.
        """
        if self.state.get("rollout", self.state).get("order", order) == order:
            return ""
        named = ", ".join(str(change) for change in self.changes if change.on_resume == "order")
        return f"changed since that checkpoint: {named or 'the content of data_path'}: {ON_RESUME['order'][0]}"


def find_resume_point(run: Run, source: ModelSource) -> ResumePoint:
    """Return the point that a run with these weights starts from.

    Args:
        source: source of the actor, or of the model that a supervised stage trains.

    Raises:
        ValueError: this run cannot resume from the checkpoint, or nothing is left to do.
    """
    config, group = run.config.actor_config, _actor_group(run)
    if not source.is_resumed(config):
        _check_adapters_to_start(run, source)
        return ResumePoint(source.weights, 0)
    record = _read_record(source, group)
    iteration = record["iteration"]
    advice = f"set {group}.finetune: true to start from its weights"
    missing = [name for name in _STATE_KEYS[run.config.is_supervised] if name not in record["run_state"]]
    stage = record.get("stage")  # missing in checkpoints of earlier versions
    if missing or (run.config.is_supervised and stage is not None and stage != run.config.stage):
        written = f"stage {stage}" if stage is not None else "another stage"
        raise ValueError(
            f"{group}.load: {source.weights} was written by {written}, from which a run of stage {run.config.stage} cannot "
            f"resume; {advice}."
        )
    state = record["run_state"]
    changes = find_changes(state.get("keys", {}), list_keys_on_resume(run.config))
    # without optimizer states too the checkpoint has an adapter of each name
    refused = [
        str(change)
        for change in changes
        if change.on_resume == "fixed" and (change.name == ROLE_ADAPTERS or not config.no_load_optim)
    ]
    if refused:
        raise ValueError(
            f"{group}.load: the run would resume after iteration {iteration} of {source.weights}, but its training state does "
            f"not fit: changed since that checkpoint: {', '.join(refused)}; keep the value, or {advice}."
        )
    names = () if run.config.is_supervised else run.rl.adapter_names
    folders = find_adapter_folders(source.weights, record, names, is_resumed=True).values()
    lost = [str(path) for path in (folder / f"iter_{iteration:07d}" for folder in folders) if not path.is_dir()]
    if lost:
        raise ValueError(
            f"{group}.load: {lost[0]} is missing, and the run would resume after iteration {iteration} with the adapters "
            f"{', '.join(run.rl.adapter_names)} of rl_config.role_adapters; {advice}."
        )
    has_kl = run.objective is not None and run.objective.needs_ref
    effects: dict[OnResume, bool] = {  # the order of the data is compared when they are read
        "schedule": config.lr_decay_style != "constant",
        "in_flight": bool(state.get("rollout", {}).get("in_flight")),
        "random": max(config.hidden_dropout, config.attention_dropout, config.lora_dropout) > 0,
        "kl": has_kl and run.rl.kl_ctrl_type == "adaptive",
        "reference": has_kl or run.config.stage in ("dpo", "kto"),
    }
    resume = ResumePoint(source.weights, iteration, state, changes, describe_changes(changes, effects))
    check_remaining_iterations(run, resume)
    return resume


def _check_adapters_to_start(run: Run, source: ModelSource) -> None:
    """Check that a checkpoint of which only the weights are taken has the adapters of this run's roles.

    Raises:
        ValueError: it has several, and not one of these, or the run names none.
    """
    names = () if run.config.is_supervised else run.rl.adapter_names
    if source.kind != "training":
        return
    group = _actor_group(run)
    record = _read_record(source, group)
    saved = record.get("adapters") or []
    if not names and len(saved) > 1:
        raise ValueError(
            f"{group}.load: {source.weights} has the adapters {', '.join(saved)}, and the run would take only the first; set "
            f"rl_config.role_adapters, or set load to a PEFT folder in {source.weights / EXPORTS}/latest."
        )
    find_adapter_folders(source.weights, record, names, is_resumed=False)


def check_remaining_iterations(run: Run, resume: ResumePoint) -> None:
    """Raise ValueError where the run, once its length is known, has no iteration left and no lost export to write."""
    train_iters, group, config = run.plan.train_iters, _actor_group(run), run.config.actor_config
    if train_iters is None or resume.iteration < max(train_iters, 1):
        return
    averages = [] if run.config.is_supervised or not run.rl.ema_decay else [AVERAGES]
    lost = (lacks_export(resume.weights, resume.iteration, name) for name in (EXPORTS, *averages))
    if config.save_hf and loads_its_save(config) and any(lost):
        return
    if not (run.config.is_supervised and run.config.actor_config.skip_train):
        raise ValueError(
            f"{group}.train_iters: {train_iters}, but the run would resume after iteration {resume.iteration} of "
            f"{resume.weights}: nothing is left to do. Raise train_iters to go on, or set {group}.finetune: true to start "
            "from its weights."
        )


def _actor_group(run: Run) -> str:
    return "megatron_training" if run.config.is_supervised else "actor_config"


def _read_record(source: ModelSource, group: str) -> dict[str, Any]:
    """Return the record of a checkpoint, after a check of its files that reads none of the large ones.

    Raises:
        ValueError: a file is missing or refers to code, its size has changed since it was written, or the record is invalid.
    """
    folder = iteration_folder(source.weights, source.iteration)
    path = folder / "run_state.json"
    try:
        sums = checksums.read(folder)
        if sums is not None:
            checksums.check_sizes(folder, sums, checksums.elsewhere(folder))
        checksums.verify(folder, only=lambda name: name == path.name)
        check_small_files(folder)
        record = read_json(path)
        if not (isinstance(record, dict) and isinstance(record.get("iteration"), int) and "run_state" in record):
            raise DamagedCheckpointError(f"{path} is not a record of a run")
    except (OSError, ValueError) as error:
        reason = error if str(folder) in str(error) else f"{path}: {error}"
        advice = "load_previous: true resumes from the one before, load_iteration names another"
        raise ValueError(f"{group}.load: {reason}; {advice}.") from None
    return record


# ---------------------------------------------------------------------- a damaged checkpoint


def select_sound_checkpoint(run: Run) -> Run:
    """Return the run with the iteration of the newest sound checkpoint where `load_previous` asks for one; else itself.

    Every file of the checkpoint is read, also of the critic's checkpoint of the same iteration. Checkpoints that are skipped
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
    if not (run.config.is_supervised or config.finetune):
        folders += [folders[0] / ADAPTERS / name for name in run.rl.adapter_names[1:]]
    newest = _newest_or_last(folders[0])
    if newest is None or weights_kind(folders[0], newest) != "training":
        return run
    for iteration in [saved for saved in reversed(iterations(folders[0])) if saved <= newest]:
        try:
            for folder in (iteration_folder(folder, iteration) for folder in folders):
                if not (folder / "run_state.json").is_file():
                    raise DamagedCheckpointError(f"{folder / 'run_state.json'} is missing")
                checksums.verify(folder, leave_out=checksums.elsewhere(folder))
        except ValueError as error:
            print(f"warning: iteration {iteration} is passed over (load_previous): {error}", flush=True)
            continue
        # the critic too: both have to resume after the same iteration
        roles: dict[str, Any] = {
            name: dataclasses.replace(role, load_iteration=iteration)
            for name in ("megatron_training", "actor_config", "critic_config")
            if isinstance(role := getattr(run.config, name), MegatronConfig)
        }
        return dataclasses.replace(run, config=dataclasses.replace(run.config, **roles))
    raise ValueError(f"{_actor_group(run)}.load_previous: no checkpoint in {folders[0]} is sound.")


def _newest_or_last(folder: Path) -> int | None:
    """Return the iteration that is named newest, or the last one in the folder where the name is damaged or missing."""
    try:
        newest = newest_checkpoint(folder)
    except ValueError as error:
        print(f"warning: {error}", flush=True)
        newest = None
    if newest == "release":
        return None
    return int(newest) if newest is not None else max(iterations(folder), default=None)


# ---------------------------------------------------------------------- after a run has ended before its last iteration


def describe_resume(run: Run, launched_s: float) -> str:
    """Return how a user resumes a run that has ended early.

    Args:
        launched_s: when the run was launched, in the seconds of `time.time`; older checkpoints are not of this run.
    """
    config, group = run.config.actor_config, _actor_group(run)
    if config.save is None:
        return f"there is no checkpoint to resume from: {group}.save is not set."
    newest = read_newest_iteration(config, launched_s)
    if newest is None:
        every = "only after the last iteration" if config.save_interval is None else f"every {config.save_interval} iterations"
        return f"there is no checkpoint to resume from yet: {group}.save_interval writes one {every}."
    after, keys = f"to resume after iteration {newest}", []
    if not loads_its_save(config):
        keys += [f"{group}.load={config.save}", f"{group}.finetune=false"]
        if config.pretrained_checkpoint is None:  # the reference, and base weights below adapters
            keys.append(f"{group}.pretrained_checkpoint={config.load}")
    critic = run.config.critic_config
    if run.objective is not None and run.objective.has_critic and critic is not None and not loads_its_save(critic):
        if critic.save is None:
            return "there is no checkpoint to resume from: critic_config.save is not set."
        keys += [f"critic_config.load={critic.save}", "critic_config.finetune=false"]
    return f"{after}, give the same command with {' '.join(keys)}" if keys else f"{after}, give the same command again."


def read_newest_iteration(config: MegatronConfig, launched_s: float) -> str | None:
    """Return the newest iteration that the run has saved, as its file has it; None where there is none."""
    if config.save is None:
        return None
    tracker = Path(config.save, TRACKER_NAME)
    if not tracker.is_file() or (tracker.stat().st_mtime < launched_s and not loads_its_save(config)):
        return None
    return tracker.read_text(encoding="utf-8").strip()


def loads_its_save(config: MegatronConfig) -> bool:
    """Return True when the same command resumes from the checkpoints that it writes."""
    if config.load is None or config.save is None or config.finetune:
        return False
    return Path(config.load) == Path(config.save)


def resume_from_save(run: Run, launched_s: float) -> Run:
    """Return the run as a user would resume it; itself where the same command does, or without a checkpoint."""
    config, critic = run.config.actor_config, run.config.critic_config
    newest, is_same = read_newest_iteration(config, launched_s), loads_its_save(config)
    if not newest or not newest.isdecimal():
        return run
    if is_same and Path(config.save or "", TRACKER_NAME).stat().st_mtime < launched_s:
        return run  # nothing was saved since it started there

    def load_save(role: MegatronConfig, save: str | None) -> MegatronConfig:
        if loads_its_save(role):  # an iteration that the run file names is where it started
            return dataclasses.replace(role, load_iteration=None)
        # the weights that it started from are the reference, and the base weights below adapters
        base = role.pretrained_checkpoint or role.load
        return dataclasses.replace(role, load=save, load_iteration=None, finetune=False, pretrained_checkpoint=base)

    changed: dict[str, Any] = {}
    for name in ("megatron_training", "actor_config", "ref_config"):
        role = getattr(run.config, name)
        if isinstance(role, MegatronConfig) and (loads_its_save(role) if is_same else role.load == config.load):
            changed[name] = load_save(role, config.save)
    if critic is not None and critic.save is not None:
        changed["critic_config"] = load_save(critic, critic.save)
    changed = {name: role for name, role in changed.items() if role != getattr(run.config, name)}
    return dataclasses.replace(run, config=dataclasses.replace(run.config, **changed)) if changed else run
