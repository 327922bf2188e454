"""Which checkpoint of a folder is the newest: what `latest_checkpointed_iteration.txt` says, held against what is there."""

from __future__ import annotations

import os
from pathlib import Path

from mindspeed_rl.files import read_regular

TRACKER_NAME = "latest_checkpointed_iteration.txt"
#: folder beside the checkpoints with what `save_hf` writes: a Hugging Face folder for each, and the link `latest`
EXPORTS = "hf"
#: the same of the moving average of the weights, with `ema_decay`
AVERAGES = "hf_ema"
#: folder beside the checkpoints with a folder of them for each adapter of `role_adapters` but the first, which is in the run's
ADAPTERS = "adapters"
#: entry of the trainer's state: iteration of the best evaluation, whose checkpoint `keep_best` keeps
BEST_ITERATION = "best_iteration"
#: folder of a checkpoint with the responses that were being generated when it was written
IN_FLIGHT = "in_flight"
IN_FLIGHT_STAGING = f"{IN_FLIGHT}.partial"


def newest_checkpoint(folder: str | Path) -> str | None:
    """Return the digits of the newest iteration, or "release"; None for a folder without checkpoints.

    Raises:
        ValueError: the file that names it is missing beside checkpoints, is damaged, or names none that is there. A run that
            took such a folder for an empty one would begin anew and write over what is there.
    """
    path = Path(folder, TRACKER_NAME)
    others = iterations(folder)
    held = f"the folder holds iterations {', '.join(map(str, others[-5:]))}" if others else "the folder holds no checkpoint"
    try:
        text = read_regular(path).decode("utf-8").strip()
    except FileNotFoundError:
        if not others:
            return None
        if len(others) == 1 and (Path(folder) / f"iter_{others[0]:07d}" / "checksums.json").is_file():
            return str(others[0])  # a run was killed after its first checkpoint was complete, and before it was named
        raise ValueError(
            f"{path}: missing, but {held}; write the number to go on from into it, or name another folder."
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({type(error).__name__}: {error}); {held}.") from None
    if text == "release":
        name = text
    elif text.isdecimal() and len(text) < 20:
        # (int() refuses thousands of digits, which a damaged file may hold)
        text = str(int(text))
        name = f"iter_{int(text):07d}"
    else:
        raise ValueError(f"{path}: holds {text[:40]!r}, not an iteration number; {held}.")
    if not Path(folder, name).is_dir():
        raise ValueError(f"{path}: names iteration {text}, but {Path(folder, name)} does not exist; {held}.")
    return text


def iterations(folder: str | Path) -> list[int]:
    """List the numbers of the finished checkpoints in a folder, in order."""
    names = (path.name.removeprefix("iter_") for path in Path(folder).glob("iter_*") if path.is_dir())
    return sorted(int(name) for name in names if name.isdecimal())


def lacks_export(folder: str | Path, iteration: int, exports: str = EXPORTS) -> bool:
    """Return True where a run was killed before the Hugging Face folder of this checkpoint, or the link to it, was there.

    Args:
        exports: folder of the exports beside the checkpoints.
    """
    name, link = f"iter_{iteration:07d}", Path(folder, exports, "latest")
    # a later one is of a run that was then restarted from this checkpoint
    return not link.with_name(name).is_dir() or not link.is_symlink() or os.readlink(link) < name


def list_old(folder: Path, iteration: int, keep_last: int | None, *, best: int | None = None) -> list[Path]:
    """Return the folders of iterations that `keep_last` leaves out, of those up to this iteration.

    Newer ones are of a run that restarted from an older one: they are neither counted nor returned.

    Args:
        best: iteration of the best evaluation where its checkpoint is kept.
    """
    known = [folder / f"iter_{number:07d}" for number in iterations(folder) if number <= iteration]
    old = known[:-keep_last] if keep_last else []
    return [path for path in old if best is None or path.name != f"iter_{best:07d}"]
