"""Check that every machine reads the driver's files, before a model is built and in one error for all of them."""

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

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.keys import ROLE_GROUPS
from mindspeed_rl.run import Run

#: files that are read completely; of larger ones only the size is compared
_SMALL_BYTES = 1 << 20
_FOLDER_KEYS = ("load", "pretrained_checkpoint", "tokenizer_name_or_path", "ref_model")

#: a network file system may show new files on other machines a little later
_PATIENCE_S = 5.0

#: file, relative to a path that is compared -> its size, and a checksum of a small one
_Files = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class ObservedFiles:
    """The files that a process reads.

    Attributes:
        host: its machine.
        files: files at each path; None where nothing exists.
    """

    host: str
    files: tuple[_Files | None, ...]


def read_observed_files(paths: Sequence[str]) -> ObservedFiles:
    """Return sizes and checksums of the files at these paths, as this process reads them."""
    by_path: list[_Files | None] = []
    for path in map(Path, paths):
        names = {"": path} if path.is_file() else {}
        if path.is_dir():
            names = {file.name: file for file in sorted(path.iterdir()) if file.is_file()}
        files: dict[str, tuple[int, int]] = {}
        for name, file in names.items():
            size = file.stat().st_size
            files[name] = size, zlib.crc32(file.read_bytes()) if size <= _SMALL_BYTES else 0
        by_path.append(files if path.is_file() or path.is_dir() else None)
    return ObservedFiles(socket.gethostname(), tuple(by_path))


def check_shared_files(
    run: Run, names: Sequence[str], read: Callable[[Sequence[str]], Sequence[ObservedFiles]], *, saves: Sequence[str]
) -> list[str]:
    """Check that all processes read the driver's files, and that the first one saves where the driver finds checkpoints.

    Args:
        run: its files and folders are compared.
        names: names of the processes.
        read: calls `read_observed_files` in each of them.
        saves: groups of the run file whose models they save.

    Returns:
        Warnings about machines that write to disks of their own.

    Raises:
        ValueError: they read other files; names every file, machine and key at once.
    """
    written = {str(run.folder): "run_dir"}
    for name in saves:
        if (role := getattr(run.config, name)) is not None and role.save is not None:
            written.setdefault(role.save, f"{name}.save")
    # a run that resumes reads its checkpoints, of which each disk may have its part
    keys = {path: key for path, key in _find_run_files(run).items() if path not in written}
    with _mark(written) as marks:
        paths = [*keys, *marks]
        own, end_s = read_observed_files(paths).files, time.monotonic() + _PATIENCE_S
        observed = read(paths)
        while not all(seen.files == own for seen in observed) and time.monotonic() < end_s:
            time.sleep(1.0)
            observed = read(paths)
    violations: dict[tuple[str, str], str] = {}
    separate: dict[str, dict[str, None]] = {}
    for rank, (name, seen) in enumerate(zip(names, observed, strict=True)):
        for path, ours, theirs in zip(paths, own, seen.files, strict=True):
            if ours == theirs:
                continue
            if path in keys:
                problem = f"{keys[path]}: {path} {_describe_difference(ours, theirs)}"
            elif marks[path].startswith("run_dir") or rank > 0:
                separate.setdefault(marks[path], {})[seen.host] = None
                continue
            else:
                problem = f"{marks[path]} is another folder than this command's, which has to find the checkpoints there,"
            # one for each machine: all of its processes read the same files
            violations.setdefault((problem, seen.host), f"{problem} on {seen.host} ({name})")
    if violations:
        raise ValueError(
            f"machines do not see the same files: {'; '.join(violations.values())}. Files that are only read may be copied to "
            "the same path on each machine."
        )
    warnings = []
    for folder, machines in separate.items():
        effect = "logs, traces and heartbeats of the processes there are there"
        if not folder.startswith("run_dir"):
            effect = (
                "each machine has its own part of a checkpoint; a run that resumes collects the parts that it needs, to "
                "convert one copy all parts into one folder"
            )
        warnings.append(f"{folder} is on a disk of its own on {', '.join(machines)}: {effect}")
    return warnings


def _find_run_files(run: Run) -> dict[str, str]:
    """Return path -> key, for the files of the driver's machine that workers read."""
    files: dict[str, str] = {}
    for name in ("megatron_training", *ROLE_GROUPS):
        role = getattr(run.config, name)
        if isinstance(role, MegatronConfig):
            for key in _FOLDER_KEYS:
                files.setdefault(str(getattr(role, key)), f"{name}.{key}")
    rl = run.config.rl_config
    if rl is not None:
        files.setdefault(str(rl.reward_model), "rl_config.reward_model")
        for path in rl.external_plugins:
            files.setdefault(path, "rl_config.external_plugins")
    # a path that does not exist here may be the name of a model at a hub, which every machine downloads for itself
    return {path: key for path, key in files.items() if os.path.isabs(path) and os.path.exists(path)}


def _describe_difference(ours: _Files | None, theirs: _Files | None) -> str:
    if ours is None or theirs is None:
        return "does not exist"
    changed = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return f"has another {changed}" if changed else "is another file"


@contextlib.contextmanager
def _mark(folders: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Create a file of a new name in each folder while the block runs; return file -> key and folder."""
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
