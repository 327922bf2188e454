"""Where a role's shape and weights come from: a Hugging Face folder, a training checkpoint, or both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mindspeed_rl.checkpoint.hf import INDEX_NAME, list_missing_shards, read_weight_files
from mindspeed_rl.checkpoint.megatron_source import has_score_head
from mindspeed_rl.checkpoint.newest import TRACKER_NAME, iterations, newest_checkpoint
from mindspeed_rl.checkpoint.published_tower import find_tower
from mindspeed_rl.checkpoint.source import check_hf_tensors
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.model_metadata import HF_FILES, describe_inner_adapters, find_adapter_base
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.files import describe_missing
from mindspeed_rl.models.plan import ModelSource, read_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_WeightsKind = Literal["hf", "training", "megatron"]


def find_model(config: MegatronConfig, role: str, load_key: str | None = None) -> ModelSource:
    """Find a role's weights in `load`, `pretrained_checkpoint` and `tokenizer_name_or_path`, in this order.

    A PEFT adapter among them is found with its base (`base_model`, else the one that it names).

    `load` may name a folder that holds no checkpoint yet (the `save` folder of a run that may have to resume):
    `pretrained_checkpoint` is then the start.

    Args:
        role: group of the keys, for messages.
        load_key: where the user wrote what stands in `load`; None for the role's own key.

    Raises:
        ValueError: no weights or no config.json are where the keys say.
    """
    candidates = [(key, getattr(config, key)) for key in ("load", "pretrained_checkpoint") if getattr(config, key)]
    if not candidates:
        raise ValueError(f"{role}.load: no weights are named; give a Hugging Face folder or a checkpoint folder.")
    weights: tuple[Path, _WeightsKind, int | None] | None = None
    is_start, adapter = False, None
    for key, value in candidates:
        # the number is of `load`'s checkpoints, and means nothing in another folder
        asked = config.load_iteration if key == "load" else None
        folder = Path(value).expanduser()
        try:
            if find_adapter_base(folder) is not None:
                folder, adapter = _find_base(folder, config.base_model), folder
            kind = weights_kind(folder, asked)
        except ValueError as error:
            raise ValueError(f"{role}.{key}: {error}") from None
        if kind is not None:
            weights = (folder, kind, asked)
            is_start = key == "pretrained_checkpoint"
            break
        if key == candidates[-1][0]:
            named = load_key if key == "load" and load_key else f"{role}.{key}"
            raise ValueError(f"{named}: {_describe_no_weights(str(value))}")
    assert weights is not None
    folders = [weights[0]] if weights[1] == "hf" else []
    folders += [Path(path).expanduser() for path in (config.tokenizer_name_or_path, config.pretrained_checkpoint) if path]
    # last, so that what the user names wins over what was put beside the checkpoints
    folders.append(weights[0] / HF_FILES)
    for folder in folders:
        if (folder / "config.json").is_file():
            return ModelSource(folder, *weights, is_start, adapter)
    raise ValueError(
        f"{role}.tokenizer_name_or_path: {config.tokenizer_name_or_path} has no config.json; the model's shape is read from it."
    )


def _describe_no_weights(value: str) -> str:
    """Return why a folder has no weights that can be used, and what to do."""
    folder = Path(value).expanduser()
    if not folder.exists():
        return f"{describe_missing(value)}; give the folder of a model, of a checkpoint, or a name on a hub as owner/name."
    if not folder.is_dir():
        return f"{folder.absolute()} is a file; give the folder that it is in."
    where = folder.absolute()
    if list_missing_shards(folder):
        missing = list_missing_shards(folder)
        return (
            f"{where} lacks {len(missing)} weight files that {INDEX_NAME} names, such as {missing[0]}: the download or copy is "
            "not complete; repeat it (mindspeed-rl download owner/name resumes one)."
        )
    if (folder / "config.json").is_file():
        pickled = next((file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in sorted(folder.glob(pattern))), None)
        if pickled is not None:
            return (
                f"{where} has config.json and the weights {pickled}, which are pickled: only *.safetensors are read. Take the"
                " model's safetensors, or save it anew with save_pretrained of transformers."
            )
        return f"{where} has config.json and no weights (*.safetensors); download or copy them there too."
    if any(folder.glob("*.safetensors")):
        return f"{where} has weights and no config.json; copy it from the published model."
    inner = next((path for path in sorted(folder.glob("*/config.json"))), None)
    meant = describe_inner_adapters(folder) if inner is None else f"; did you mean '{Path(value) / inner.parent.name}'?"
    return (
        f"{value} holds neither model weights (config.json and *.safetensors) nor a finished checkpoint ({TRACKER_NAME}); it "
        f"is {where}{meant or '.'}"
    )


def _find_base(adapter: Path, base_model: str | None) -> Path:
    """Return the folder of a PEFT adapter's base model; ValueError where it has no weights to add an adapter to."""
    base = find_adapter_base(adapter, base_model)
    if not base:
        raise ValueError(f"{adapter} is an adapter that names no base model; name the folder of its base in base_model.")
    if weights_kind(Path(base).expanduser()) not in ("hf", "megatron"):
        raise ValueError(
            f"{adapter} is an adapter of {base}, which has no Hugging Face or Megatron weights; name the folder of "
            "its base in base_model."
        )
    return Path(base).expanduser()


def load_tokenizer_of(config: MegatronConfig, source: ModelSource) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the keys name, else the one next to the weights."""
    return load_tokenizer(config.tokenizer_name_or_path or source.hf_folder, use_fast=not config.tokenizer_not_use_fast)


def base_of(config: MegatronConfig, role: str) -> ModelSource:
    """Find the base weights of adapters that were saved without them: in `pretrained_checkpoint`.

    Raises:
        ValueError: the key is not set, or names another checkpoint of ours.
    """
    start = config.pretrained_checkpoint
    if start and find_adapter_base(start) is not None:
        start = str(_find_base(Path(start).expanduser(), config.base_model))
    kind = weights_kind(Path(start).expanduser()) if start else None
    if start is None or kind not in ("hf", "megatron"):
        raise ValueError(
            f"{role}.pretrained_checkpoint: {start} holds no Hugging Face or Megatron weights; {config.load} was saved with "
            "lora_ckpt_filter and needs the base weights that its adapters were trained on."
        )
    folder = Path(start).expanduser()
    return ModelSource(folder, folder, kind)


def weights_kind(folder: Path, iteration: int | None = None) -> _WeightsKind | None:
    """Return the kind of weights in a folder, None without usable ones.

    Args:
        iteration: which of its checkpoints is meant; None for the newest.

    Raises:
        ValueError: what names the newest checkpoint is missing beside checkpoints or names none, or the one meant is absent.
    """
    if folder.exists() and not folder.is_dir():
        return None
    newest = newest_checkpoint(folder) if iteration is None else str(iteration)
    if newest is not None:
        checkpoint = folder / ("release" if newest == "release" else f"iter_{int(newest):07d}")
        if not checkpoint.is_dir():
            held = ", ".join(map(str, iterations(folder)[-5:])) or "none"
            raise ValueError(f"{folder} has no checkpoint of iteration {newest} (load_iteration); it has {held}")
        # only our own checkpoints say where the run stood
        return "training" if (checkpoint / "run_state.json").is_file() else "megatron"
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return "hf"
    return None


def check_weights(config: MegatronConfig, source: ModelSource, *, is_scored: bool = False) -> list[str]:
    """Check the weights of a Hugging Face folder against its config.json, as every role does when it loads them.

    Args:
        is_scored: the model ends in a score.

    Returns:
        A sentence for each kind of tensor that is left behind.

    Raises:
        ValueError: the weights are another model's than config.json says, or the tower that exports need is not here.
    """
    exports = config.save and config.save_hf and not (config.lora_target_modules and config.lora_ckpt_filter)
    if config.language_model_only and exports:
        architecture, model_config, hf_config = read_model(source.hf_folder)
        text = replace(model_config, vision=None)
        find_tower(config, source, [name for op in architecture.list_left_out(text, hf_config) for name in op.hf])
    if source.kind != "hf":
        return []
    architecture, model_config, _ = read_model(source.weights, config.engine, trusts_code=config.trust_remote_code)
    model_config = replace(model_config, head="reward" if is_scored else "lm")
    left = check_hf_tensors(source.weights, architecture, model_config, loosely=config.load_checkpoint_loosely)
    return [f"{source.weights}: {sentence}" for sentence in left]


def lacks_score_head(source: ModelSource, iteration: int | None = None) -> bool:
    """Return True for the weights of a language model: a critic or reward model starts from them with a fresh head.

    Args:
        iteration: which of the source's checkpoints is meant; None for the newest.
    """
    if source.kind == "hf":
        return "score.weight" not in read_weight_files(source.weights)
    return not has_score_head(source.weights, iteration)


def describe_fresh_head(role: str, source: ModelSource) -> str:
    """Describe a fresh score head in one line."""
    return f"{role}: {source.weights} has no score head; it starts with a fresh one, whose values are 0"


def check_critic_start(config: MegatronConfig, source: ModelSource, resume_iteration: int | None) -> None:
    """Check that actor and critic both resume or both start anew.

    Args:
        config, source: configuration and model source of the critic.
        resume_iteration: the iteration after which the actor goes on; None when it starts only from weights.

    Raises:
        ValueError: one of them would go on and the other start anew.
    """
    resumes = source.is_resumed(config)
    if resume_iteration is None and resumes:
        raise ValueError(
            f"critic_config.load: the critic would go on from {source.weights}, but the actor starts anew; set "
            "critic_config.finetune: true to take only its weights."
        )
    if resume_iteration is not None and not (resumes and (source.weights / f"iter_{resume_iteration:07d}").is_dir()):
        raise ValueError(
            f"critic_config.load: the actor goes on after iteration {resume_iteration}, but {source.weights} holds no critic "
            "of that iteration to go on with; name the critic's own checkpoints, with critic_config.finetune: false."
        )


def check_reward_start(config: MegatronConfig, source: ModelSource) -> None:
    """Check that a reward model ends in a score, unless `reward_tokens` say how it judges in words.

    Raises:
        ValueError: it has no such head.
    """
    if not config.reward_tokens and lacks_score_head(source):
        raise ValueError(
            f"reward_config.load: {source.weights} has no score.weight; a reward model is a sequence classifier with one "
            "label, a checkpoint of stage orm, or with reward_tokens a language model that judges steps."
        )
