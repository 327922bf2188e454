"""Folders of the adapters of `role_adapters` in a checkpoint: the first has the run's, the others are next to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl.checkpoint.newest import ADAPTERS, EXPORTS


def find_adapter_folders(folder: Path, record: Mapping[str, Any], names: Sequence[str], *, is_resumed: bool) -> dict[str, Path]:
    """Return the folder with the checkpoints of each adapter of a run that starts from a checkpoint.

    All start from the adapter of a checkpoint with only one, unless the run resumes from it.

    Args:
        folder: has the checkpoint.
        record: record of the checkpoint; `adapters` has its adapters, of which the first is in this folder.
        names: adapters of the run.
        is_resumed: the run continues each adapter.

    Raises:
        ValueError: the checkpoint has adapters, and not one of these.
    """
    saved = record.get("adapters") or (list(names) if is_resumed else [])
    if len(saved) < 2 and not is_resumed:
        return dict.fromkeys(names, folder)
    if lacking := [name for name in names if name not in saved]:
        raise ValueError(
            f"load: {folder} has the adapters {', '.join(saved)}, and not {lacking[0]!r} of rl_config.role_adapters: name "
            f"those that it has, or, for all to start from one, set load to a PEFT folder in {folder / EXPORTS}/latest."
        )
    return {name: folder if name == saved[0] else folder / ADAPTERS / name for name in names}
