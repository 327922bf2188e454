"""The vision tower of a published model that a run with `language_model_only` leaves out, for the folders that it exports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from mindspeed_rl.checkpoint.hf import HfFolder, has_weights
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models.plan import ModelPlan, ModelSource


def find_tower(config: MegatronConfig, source: ModelSource, names: Sequence[str]) -> Path | None:
    """Return the first folder among those that the keys of a role name which has all tensors of the tower.

    Args:
        names: tensors of the tower; None is returned for a model that leaves out none.

    Raises:
        ValueError: none has.
    """
    if not names:
        return None
    given = (source.hf_folder, config.load, config.tokenizer_name_or_path, config.pretrained_checkpoint)
    folders = dict.fromkeys(Path(folder).expanduser() for folder in given if folder)
    for folder in folders:
        if (folder / "config.json").is_file() and has_weights(folder, names):
            return folder
    raise ValueError(
        "language_model_only: true with save_hf: true: exported folders get the vision tower of the published model, and none "
        f"of {', '.join(map(str, folders))} has its tensors, such as {names[0]}; name the published folder in "
        "tokenizer_name_or_path."
    )


def read_tower(config: MegatronConfig, source: ModelSource, plan: ModelPlan) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the tower that a model leaves out, as published; none for a model that leaves out nothing."""
    names = [name for op in plan.architecture.list_left_out(plan.model_config, plan.hf_config) for name in op.hf]
    published = find_tower(config, source, names)
    if published is not None:
        folder = HfFolder(published)
        yield from ((name, folder.record(name).read()) for name in names)
