"""Parts of a dataset in a hidden folder next to the target, joined and renamed at the end."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from mindspeed_rl.data.indexed import SUFFIXES, IndexedWriter, open_indexed
from mindspeed_rl.data.pool import ChunkResult
from mindspeed_rl.data.summary import Counts


@contextmanager
def work_folder(output_prefix: str, fingerprint: str, *, resume: bool) -> Iterator[Path]:
    """Lock a hidden folder next to the target; keep it after a failure only if a repeated run can resume from it."""
    target = Path(output_prefix).expanduser()
    folder = target.parent / f".{target.name}.incomplete"
    folder.mkdir(exist_ok=True)
    lock = open(folder / "lock", "a")
    try:
        # the kernel takes the lock back with its process, so a killed run blocks no other run
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ValueError(f"output_prefix={output_prefix!r} is being written by another run") from error
    stamp = folder / "fingerprint"
    if not (resume and stamp.is_file() and stamp.read_text() == fingerprint):
        for path in folder.iterdir():
            if path.name != "lock":
                path.unlink()
        stamp.write_text(fingerprint)
    done = False
    try:
        yield folder
        done = True
    finally:
        if done or not resume:
            shutil.rmtree(folder)
        lock.close()


class PartWriter:
    """Writer of the columns of one part."""

    def __init__(self, number: int, prefixes: Mapping[str, str]) -> None:
        self.number = number
        self.counts = Counts()
        self._writers = {name: IndexedWriter(prefix) for name, prefix in prefixes.items()}

    def add(self, result: ChunkResult) -> None:
        """Append the rows of a chunk."""
        self.counts.add(result.counts)
        for name, (flat, lengths) in result.columns.items():
            self._writers[name].add_documents(flat, lengths.tolist())

    def close(self, stamp: Path) -> Counts:
        """Write the indexes, then the file that marks the part complete."""
        for writer in self._writers.values():
            writer.close()
        stamp.write_text(json.dumps(self.counts.as_dict(), ensure_ascii=False))
        return self.counts

    def abort(self) -> None:
        for writer in self._writers.values():
            writer.abort()


def join_parts(parts: Sequence[str], prefix: str, *, move: bool) -> None:
    """Concatenate indexed datasets into one; with `move` there is only one, which gets the new name."""
    if move:
        for suffix in SUFFIXES:
            os.replace(parts[0] + suffix, prefix + suffix)
        return
    writer = IndexedWriter(prefix)
    for part in parts:
        writer.add_dataset(part)
    writer.close()


def publish(built: Mapping[str, str], final: Mapping[str, str]) -> list[str]:
    """Move finished files to their names: old indexes go first, new indexes come last."""
    for name in built:
        # without its index nothing opens a dataset: new tokens are not read with old positions
        Path(f"{final[name]}.idx").unlink(missing_ok=True)
    files = []
    for suffix in SUFFIXES:
        for name, prefix in built.items():
            os.replace(prefix + suffix, f"{final[name]}{suffix}")
            files.append(f"{final[name]}{suffix}")
    return sorted(files)


def merge(folder: str, output_prefix: str, keys: Sequence[str]) -> list[str]:
    """For each key, join all pairs in `folder` whose name contains it, in name order, into `<output_prefix>_<key>.bin/.idx`.

    Raises:
        ValueError: the folder or a twin file is missing, or no name contains a key.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ValueError(f"input={folder!r} must be a folder of .bin and .idx files when merge_group_keys is given")
    target = Path(output_prefix).expanduser()
    if not target.parent.is_dir():
        raise ValueError(f"output_prefix={output_prefix!r}: the folder {str(target.parent)!r} does not exist")
    groups: dict[str, list[str]] = {}
    for key in keys:
        names = sorted(
            {path.stem for path in root.iterdir() if path.suffix in SUFFIXES and key in path.stem and not _hidden(path)}
        )
        if not names:
            raise ValueError(f"merge_group_keys: no .bin/.idx file in {folder!r} has {key!r} in its name")
        for name in names:
            # half a pair is found before anything is written
            open_indexed(root / name)
        groups[key] = [str(root / name) for name in names]
    work = target.parent / f".{target.name}.merge-{os.getpid()}.incomplete"
    work.mkdir()
    try:
        built = {key: str(work / key) for key in keys}
        for key, parts in groups.items():
            writer = IndexedWriter(built[key])
            for part in parts:
                writer.add_dataset(part)
            writer.close()
        return publish(built, {key: f"{target}_{key}" for key in keys})
    finally:
        shutil.rmtree(work)


def _hidden(path: Path) -> bool:
    return path.name.startswith(".")
