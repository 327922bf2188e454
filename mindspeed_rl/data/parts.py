"""Encode chunks to the token files of parts, in this process or in forked workers, then join and rename them at the end."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mindspeed_rl.data.chunk_workers import map_chunks
from mindspeed_rl.data.conversation import DropReason
from mindspeed_rl.data.handlers.base import Handler
from mindspeed_rl.data.indexed import IMAGE_BYTES, SUFFIXES, IndexedWriter, column_type, read_index
from mindspeed_rl.data.preprocess_config import PreprocessConfig
from mindspeed_rl.data.sources import Chunk, RowSource, read_chunk
from mindspeed_rl.data.summary import Counts


@dataclass
class _ChunkResult:
    """Result of a worker: for each column the concatenated tokens and the rows' lengths."""

    columns: dict[str, tuple[np.ndarray, np.ndarray]]
    counts: Counts
    weight: int
    first_error: str | None = None


def _encode_chunk(handler: Handler, chunk: Chunk, *, on_bad_row: str) -> _ChunkResult:
    """Read and encode one chunk."""
    rows = read_chunk(chunk)
    batch = handler.encode(rows)
    counts = Counts(rows_read=len(rows), rows_kept=len(batch.rows), rows_added=batch.added, dropped=batch.dropped)
    counts.bad_rows = [f"{chunk.path}, row {number}: {problem}" for number, problem in batch.bad[: counts.max_bad_rows]]
    first_error = counts.bad_rows[0] if batch.bad and on_bad_row == "error" else None
    if batch.bad:
        counts.dropped[DropReason.MALFORMED] += len(batch.bad)
    counts.rows_truncated = sum(row.truncated for row in batch.rows)
    columns = {}
    for name in handler.columns:
        kind = column_type(name)
        values = [np.asarray(row.columns[name], dtype=kind) for row in batch.rows]
        lengths = np.fromiter((len(value) for value in values), dtype=np.int32, count=len(values))
        columns[name] = (np.concatenate(values) if values else np.empty(0, dtype=kind), lengths)
    counts.tokens, counts.tokens_trained = handler.count_tokens({name: flat for name, (flat, _) in columns.items()})
    return _ChunkResult(columns, counts, chunk.weight, first_error)


def make_folder(output_prefix: str) -> None:
    """Create the folder of the written files.

    Raises:
        ValueError: it cannot be created.
    """
    folder = Path(output_prefix).expanduser().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"the folder {str(folder)!r} cannot be made: {error.strerror}"
        raise ValueError(f"output_prefix={output_prefix!r}: {problem}") from error


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


class _PartWriter:
    """Writer of the columns of one part."""

    def __init__(self, part: int, prefixes: Mapping[str, str]) -> None:
        self.part = part
        self.counts = Counts()
        self._writers = {name: IndexedWriter(prefix, name) for name, prefix in prefixes.items()}

    def add(self, result: _ChunkResult) -> None:
        """Append the rows of a chunk."""
        self.counts.add(result.counts)
        for name, (flat, lengths) in result.columns.items():
            self._writers[name].add_documents(flat, lengths.tolist())

    def close(self, stamp: Path) -> Counts:
        """Write the indexes, then the file that marks the part complete."""
        for writer in self._writers.values():
            writer.close()
        stamp.write_text(json.dumps(vars(self.counts), ensure_ascii=False))
        return self.counts

    def abort(self) -> None:
        for writer in self._writers.values():
            writer.abort()


class _Progress:
    """A bar with rows/s, tokens/s and time left; without a terminal, a line every `log_interval` rows, but 5 s apart."""

    def __init__(self, total_weight: int | None, log_interval: int) -> None:
        self._total = total_weight
        self._interval = log_interval
        self._start = self._last = time.monotonic()
        self._logged_rows = 0
        self._done = 0
        self._rows = 0
        self._tokens = 0
        self._bar = tqdm(
            total=total_weight,
            disable=not sys.stderr.isatty(),
            bar_format="{percentage:3.0f}%|{bar:30}| {elapsed}<{remaining} {postfix}",
        )

    def add(self, result: _ChunkResult) -> None:
        """Count one chunk."""
        self._rows += result.counts.rows_read
        self._tokens += result.counts.tokens
        self._done += result.weight
        now = time.monotonic()
        rate = f"{self._rows / (now - self._start + 1e-9):.0f} rows/s, {self._tokens / (now - self._start + 1e-9):.0f} tokens/s"
        if not self._bar.disable:
            self._bar.set_postfix_str(f"{self._rows} rows, {rate}", refresh=False)
            self._bar.update(result.weight)
        elif self._rows - self._logged_rows >= self._interval and now - self._last >= 5:
            self._logged_rows, self._last = self._rows, now
            left = ""
            if self._total and self._done:
                fraction = self._done / self._total
                left = f", {100 * fraction:.0f} %, {(now - self._start) * (1 - fraction) / fraction:.0f} s left"
            print(f"{self._rows} rows, {rate}{left}", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()


def _numbered_parts(chunks: Iterator[Chunk], total_weight: int | None, n_subs: int) -> Iterator[tuple[int, Chunk]]:
    """Assign chunks to parts: consecutive runs of about equal weight (all in part 0 where the total is unknown)."""
    done = 0
    for chunk in chunks:
        part = min(n_subs - 1, done * n_subs // total_weight) if total_weight else 0
        yield part, chunk
        done += chunk.weight


def write_parts(
    config: PreprocessConfig,
    handler: Handler,
    source: RowSource,
    total_weight: int | None,
    work: Path,
    names: Mapping[str, str],
) -> tuple[Counts, list[str]]:
    """Write every part that is not there yet; return the counts and the parts' path prefixes in order."""
    total = Counts()
    prefixes = [str(work / f"{k:03d}_of_{config.n_subs - 1:03d}") for k in range(config.n_subs)]
    stamps = [Path(f"{prefix}.json") for prefix in prefixes]
    finished: dict[int, Counts] = {}
    for index, stamp in enumerate(stamps):
        if stamp.is_file():
            values = json.loads(stamp.read_text())
            values["dropped"] = Counter(values["dropped"])
            finished[index] = Counts(**values)
    # chunks are taken ahead of their results, which come back in the same order
    result_parts: deque[int] = deque()

    def remaining_chunks() -> Iterator[Chunk]:
        for part, chunk in _numbered_parts(source.chunks(), total_weight, config.n_subs):
            if part not in finished:
                result_parts.append(part)
                yield chunk

    progress = _Progress(total_weight, config.log_interval)
    writer: _PartWriter | None = None
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker is one core
    encode = partial(_encode_chunk, handler, on_bad_row=config.on_bad_row)
    results = map_chunks(encode, remaining_chunks(), workers=config.workers)
    try:
        for result in results:
            part = result_parts.popleft()
            if writer is None or writer.part != part:
                if writer is not None:
                    finished[writer.part] = writer.close(stamps[writer.part])
                writer = _PartWriter(part, {name: f"{prefixes[part]}_{Path(prefix).name}" for name, prefix in names.items()})
            if result.first_error is not None:
                raise ValueError(f"{result.first_error} (on_bad_row=skip leaves such rows out)")
            writer.add(result)
            progress.add(result)
        if writer is not None:
            finished[writer.part] = writer.close(stamps[writer.part])
            writer = None
    finally:
        # ends the workers if a row has stopped the run
        results.close()
        progress.close()
        if writer is not None:
            writer.abort()
    for part in sorted(finished):
        total.add(finished[part])
    # a part without rows has an empty .bin, which no reader accepts
    return total, [prefixes[part] for part in sorted(finished) if finished[part].rows_kept]


def join_parts(parts: Sequence[str], prefix: str, *, move: bool, column: str = "") -> None:
    """Concatenate indexed datasets into one, a column; with `move` there is only one, which gets the new name."""
    if move:
        for suffix in SUFFIXES:
            os.replace(parts[0] + suffix, prefix + suffix)
        return
    writer = IndexedWriter(prefix, column)
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
        ValueError: the folder or one file of a pair is missing, or no name contains a key.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ValueError(f"input={folder!r} must be a folder of .bin and .idx files when merge_group_keys is given")
    target = Path(output_prefix).expanduser()
    groups: dict[str, list[str]] = {}
    for key in keys:
        names = sorted(
            {
                path.stem
                for path in root.iterdir()
                if path.suffix in SUFFIXES and key in path.stem and not path.name.startswith(".")
            }
        )
        if not names:
            raise ValueError(f"merge_group_keys: no .bin/.idx file in {folder!r} has {key!r} in its name")
        for name in names:
            # half a pair is found before anything is written
            read_index(root / name)
        groups[key] = [str(root / name) for name in names]
    make_folder(output_prefix)
    work = target.parent / f".{target.name}.merge-{os.getpid()}.incomplete"
    work.mkdir()
    try:
        built = {key: str(work / key) for key in keys}
        for key, parts in groups.items():
            holds_bytes = all(part.endswith(f"_packed_{IMAGE_BYTES}_document") for part in parts)
            join_parts(parts, built[key], move=False, column=IMAGE_BYTES if holds_bytes else key)
        return publish(built, {key: f"{target}_{key}" for key in keys})
    finally:
        shutil.rmtree(work)
