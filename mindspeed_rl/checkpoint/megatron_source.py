"""The weights of a Megatron checkpoint in any layout, tensor by tensor under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mindspeed_rl.checkpoint.jobs import Group
from mindspeed_rl.checkpoint.mcore import MegatronFolder, iteration_folder
from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.model_config import ModelConfig

if TYPE_CHECKING:
    from mindspeed_rl.checkpoint.dist import DistFolder

#: Megatron's name of the one weight that a critic or reward model has and a language model does not
SCORE_HEAD = "rm_head.weight"
#: the same in a checkpoint of the FSDP engine
SHARDED_SCORE_HEAD = "weights.score.weight"


class GroupedTensors:
    """A TensorSource over stored parameters; the last one read stays in memory, as its tensors are asked for together."""

    def __init__(self, groups: Sequence[Group], state: str = "weights") -> None:
        """Take parameters.

        Args:
            groups: the parameters.
            state: what the tensors are, for messages.
        """
        self._groups = {name: group for group in groups for name in group.hf}
        self._state = state
        self._last: dict[str, Tensor] = {}

    def _tensor(self, name: str) -> Tensor:
        if name not in self._last:
            if name not in self._groups:
                raise ValueError(f"the checkpoint has no {self._state} for {name}.")
            self._last = self._groups[name].load()
        return self._last[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        tensor = self._tensor(name)
        return tensor if stop is None else tensor.narrow(dim, start, stop - start)


def open_megatron(
    path: Path,
    architecture: Architecture,
    model_config: ModelConfig,
    iteration: int | None = None,
    *,
    loosely: bool = False,
    verified: bool = False,
) -> GroupedTensors:
    """Open the weights of a checkpoint that Megatron, MindSpeed or `mindspeed-rl convert` wrote, per rank or `torch_dist`.

    Args:
        iteration: the newest when None.
        loosely: parameters that the model does not have are skipped.
        verified: the files have been checked against their checksums already.

    Raises:
        ValueError: the checkpoint is incomplete, damaged, or of another model.
    """
    opened = open_layout(path, iteration, verified=verified).open(architecture, model_config, loosely)
    if model_config.vision is not None and opened.model_config.vision is None:
        raise ValueError(
            f"{path} has no vision tower: it was saved with language_model_only: true; set that here too, or start from the "
            "folder that save_hf or `mindspeed-rl convert` writes, which has the published tower."
        )
    return GroupedTensors(opened.groups)


def open_layout(path: Path, iteration: int | None, *, verified: bool) -> MegatronFolder | DistFolder:
    """Open a checkpoint of Megatron in the layout that it has: `torch_dist`, or a file of each rank.

    Args:
        iteration: the newest when None.
        verified: the files have been checked against their checksums already.

    Raises:
        ValueError: the checkpoint is incomplete or damaged.
    """
    if (iteration_folder(path, iteration) / "metadata.json").is_file():
        from mindspeed_rl.checkpoint.dist import DistFolder  # loads torch.distributed.checkpoint, which takes a second

        return DistFolder(path, iteration, verified=verified)
    return MegatronFolder(path, iteration, verified=verified)


def has_score_head(path: Path, iteration: int | None = None) -> bool:
    """Return True when a checkpoint of either engine, in any layout, ends in a score head, False for a language model's.

    Raises:
        ValueError: the checkpoint is incomplete or damaged.
    """
    folder = iteration_folder(path, iteration)
    if (folder / ".metadata").is_file():
        from mindspeed_rl.checkpoint.dist import METADATA_FILE, read_metadata  # takes a second, see open_megatron

        names = read_metadata(folder / METADATA_FILE).state_dict_metadata
        return any(name in names for name in (SCORE_HEAD, SHARDED_SCORE_HEAD))
    # the files are checked when the weights are read
    return SCORE_HEAD in MegatronFolder(path, iteration, verified=True).names()
