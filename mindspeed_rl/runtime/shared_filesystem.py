"""Every machine reads the files that the driver reads: found out before a model is built, in one error for all of them."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.config import MegatronConfig, Run
from mindspeed_rl.config.keys import ROLE_GROUPS

#: files that are read to the end; of others the size decides
_SMALL_BYTES = 1 << 20
_FOLDER_KEYS = ("load", "pretrained_checkpoint", "tokenizer_name_or_path", "ref_model")

#: a network's file system may show what was just written a little later elsewhere
_PATIENCE_S = 5.0

#: file, relative to the path that was asked for -> its size, and a sum of a small one's content
Look = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class HostFiles:
    """What a process sees.

    Attributes:
        host: where it is.
        looks: one for each path it was asked for; None where nothing is.
    """

    host: str
    looks: tuple[Look | None, ...]


def look_at(paths: Sequence[str]) -> HostFiles:
    """What this process sees at these paths."""
    return HostFiles(socket.gethostname(), tuple(_look(Path(path)) for path in paths))


def _look(path: Path) -> Look | None:
    if path.is_file():
        return {"": _about(path)}
    if not path.is_dir():
        return None
    return {file.name: _about(file) for file in sorted(path.iterdir()) if file.is_file()}


def _about(path: Path) -> tuple[int, int]:
    size = path.stat().st_size
    return size, zlib.crc32(path.read_bytes()) if size <= _SMALL_BYTES else 0


def run_files(run: Run) -> dict[str, str]:
    """Path -> the key that names it, of what is on the driver's machine and workers read."""
    found: dict[str, str] = {}
    for name in ("megatron_training", *ROLE_GROUPS):
        role = getattr(run.config, name)
        if isinstance(role, MegatronConfig):
            for key in _FOLDER_KEYS:
                found.setdefault(str(getattr(role, key)), f"{name}.{key}")
    rl = run.config.rl_config
    if rl is not None:
        found.setdefault(str(rl.reward_model), "rl_config.reward_model")
        for path in rl.external_plugins:
            found.setdefault(path, "rl_config.external_plugins")
    # what is not here may be the name of a model at a hub, which every machine gets for itself
    return {path: key for path, key in found.items() if os.path.isabs(path) and os.path.exists(path)}


def check_hosts(
    run: Run, names: Sequence[str], ask: Callable[[Sequence[str]], Sequence[HostFiles]], *, saves: Sequence[str]
) -> list[str]:
    """All processes read what the driver reads, and the first of them writes its checkpoints where the driver finds them.

    Args:
        names: of the processes.
        ask: what each of them sees at these paths.
        saves: groups of the run file whose models they write checkpoints of.

    Returns:
        What the user should know of machines that write to disks of their own.

    Raises:
        ValueError: they do not; names every file, machine and key at once.
    """
    written = {str(run.folder): "run_dir"}
    for name in saves:
        if (role := getattr(run.config, name)) is not None and role.save is not None:
            written.setdefault(role.save, f"{name}.save")
    # a run that goes on reads its checkpoints, of which each disk may have its part
    read = {path: key for path, key in run_files(run).items() if path not in written}
    with _marked(written) as marks:
        paths = [*read, *marks]
        mine, end = look_at(paths).looks, time.monotonic() + _PATIENCE_S
        answers = ask(paths)
        while not all(answer.looks == mine for answer in answers) and time.monotonic() < end:
            time.sleep(1.0)
            answers = ask(paths)
    mistakes: dict[tuple[str, str], str] = {}
    apart: dict[str, dict[str, None]] = {}
    for rank, (name, answer) in enumerate(zip(names, answers, strict=True)):
        for path, ours, theirs in zip(paths, mine, answer.looks, strict=True):
            if ours == theirs:
                continue
            if path in read:
                said = f"{read[path]}: {path} {_difference(ours, theirs)}"
            elif marks[path].startswith("run_dir") or rank > 0:
                apart.setdefault(marks[path], {})[answer.host] = None
                continue
            else:
                said = f"{marks[path]} is another folder than this command's, which has to find the checkpoints there,"
            # once a machine, whose processes all see the same
            mistakes.setdefault((said, answer.host), f"{said} on {answer.host} ({name})")
    if mistakes:
        raise ValueError(
            f"machines do not see the same files: {'; '.join(mistakes.values())}. What is only read may be copied to the same "
            "place on each machine."
        )
    return [f"{folder} is on a disk of its own on {', '.join(hosts)}: {_apart(folder)}" for folder, hosts in apart.items()]


def _apart(folder: str) -> str:
    if folder.startswith("run_dir"):
        return "logs, traces and signs of life of the processes there are there"
    return (
        "a checkpoint lies there in parts, each machine's own; a run that goes on puts together what it needs, to convert one "
        "copy all parts into one folder"
    )


def _difference(ours: Look | None, theirs: Look | None) -> str:
    """What is to be said of a path there, which is not as here."""
    if ours is None or theirs is None:
        return "does not exist"
    changed = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return f"has another {changed}" if changed else "is another file"


@contextlib.contextmanager
def _marked(folders: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Each folder has a file of a new name while the block runs; file -> key and folder."""
    marks: dict[str, str] = {}
    try:
        for folder, key in folders.items():
            mark = Path(folder, f".shared-{uuid.uuid4().hex}")
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
            marks[str(mark)] = f"{key}: {folder}"
        yield marks
    finally:
        for mark in marks:
            with contextlib.suppress(OSError):
                os.unlink(mark)
