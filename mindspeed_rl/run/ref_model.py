"""Keys and weights of the reference model of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mindspeed_rl.checkpoint.model_source import find_model
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models.plan import ModelSource
from mindspeed_rl.run import Run

#: folder of a moving reference (`sync_ref_model`) inside the actor's checkpoints
_REF_FOLDER = "reference"


def resolve_rollout_ref(
    run: Run, actor: ModelSource, resume_iteration: int | None
) -> tuple[MegatronConfig, ModelSource, int | None]:
    """Find keys and weights of the reference of a run with rollouts, and which of its checkpoints is meant (None: the newest).

    It is what the run file says, else what the actor started from before any resume.

    Args:
        actor: the actor's weights.
        resume_iteration: the iteration after which the actor goes on; None when it starts only from weights.

    Raises:
        ValueError: the weights do not exist, or nothing says what the actor started from.
    """
    config, rl = run.config.ref_config, run.rl
    mode = rl.integrated_mode_config
    group = "ref_config" if "ref_config" in run.config.set_keys else "actor_config"
    named = {
        "rl_config.integrated_mode_config.ref_model_load_path": mode.ref_model_load_path if mode else None,
        f"{group}.pretrained_checkpoint": config.pretrained_checkpoint,
        f"{group}.load": config.load,
    }
    key, path = next((item for item in named.items() if item[1]), (f"{group}.load", None))
    if mode and mode.ref_model_load_path:
        config = config.without_model_keys()  # which say what the group's own weights are
    config = dataclasses.replace(
        config,
        # only weights: a reference takes up no state of a run
        load=path,
        pretrained_checkpoint=None,
        finetune=True,
        # the reference has no adapters, and the number is of the actor's checkpoints
        lora_target_modules=None,
        load_iteration=None,
        save=str(Path(config.save, _REF_FOLDER)) if config.save and rl.sync_ref_model else None,
        # it has no optimizer, and draws nothing
        save_hf=False,
        no_save_optim=True,
        no_save_rng=True,
    )
    same = path is not None and Path(path).expanduser() == actor.weights and actor.adapter is None
    if resume_iteration is not None:
        moved = actor.weights / _REF_FOLDER
        # one that has moved goes on where it was when the actor was saved
        if rl.sync_ref_model and (moved / f"iter_{resume_iteration:07d}").is_dir():
            config = dataclasses.replace(config, load=str(moved))
            return config, find_model(config, "ref_config"), resume_iteration
        if same:
            raise ValueError(
                f"actor_config.pretrained_checkpoint: the actor goes on from {path}, so the reference cannot be taken from "
                "there; name what the run started from, here or in rl_config.integrated_mode_config.ref_model_load_path."
            )
    if same:
        return config, actor, None
    return config, find_model(config, "ref_config", key), None


def resolve_supervised_ref(config: MegatronConfig, start: ModelSource) -> tuple[MegatronConfig, ModelSource]:
    """Find keys and weights of the reference model: `ref_model`, else what the policy started from before any resume.

    Args:
        config: the policy's keys.
        start: the policy's weights.

    Raises:
        ValueError: the weights do not exist, or nothing says what the policy of a resumed run started from.
    """
    path = config.ref_model or config.pretrained_checkpoint or config.load
    ref = dataclasses.replace(
        config.without_model_keys() if config.ref_model else config,  # the model keys say what the policy is
        load=path,
        pretrained_checkpoint=None,
        finetune=True,
        # the number is of `load`'s checkpoints
        load_iteration=config.load_iteration if path == config.load else None,
        save=None,
        lora_target_modules=None,
    )
    resumes = start.is_resumed(config)
    if not config.ref_model and resumes and path == str(start.weights):
        raise ValueError(
            f"ref_model: not set, and load ({path}) is a checkpoint that the run goes on from; name the weights of the "
            "reference in ref_model, or what the policy started from in pretrained_checkpoint."
        )
    return ref, find_model(ref, "ref_model" if config.ref_model else "reference")
