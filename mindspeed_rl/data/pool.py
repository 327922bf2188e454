"""Encode chunks to token arrays, in this process or in forked workers, in input order."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from mindspeed_rl.data.handlers.base import Handler
from mindspeed_rl.data.sources import Chunk, read_chunk
from mindspeed_rl.data.summary import MALFORMED, MAX_BAD_ROWS_LISTED, Counts


@dataclass
class ChunkResult:
    """Result of a worker: for each column the concatenated tokens and the rows' lengths."""

    columns: dict[str, tuple[np.ndarray, np.ndarray]]
    counts: Counts
    weight: int
    first_error: str | None = None


def _encode_chunk(handler: Handler, chunk: Chunk, *, on_bad_row: str) -> ChunkResult:
    """Read and encode one chunk."""
    rows = read_chunk(chunk)
    batch = handler.encode(rows)
    counts = Counts(rows_read=len(rows), rows_kept=len(batch.rows), dropped=batch.dropped)
    counts.bad_rows = [f"{chunk.path}, row {number}: {problem}" for number, problem in batch.bad[:MAX_BAD_ROWS_LISTED]]
    first_error = counts.bad_rows[0] if batch.bad and on_bad_row == "error" else None
    if batch.bad:
        counts.dropped[MALFORMED] += len(batch.bad)
    counts.rows_truncated = sum(row.truncated for row in batch.rows)
    columns = {}
    for name in handler.columns:
        values = [np.asarray(row.columns[name], dtype=np.int32) for row in batch.rows]
        lengths = np.fromiter((len(value) for value in values), dtype=np.int32, count=len(values))
        columns[name] = (np.concatenate(values) if values else np.empty(0, dtype=np.int32), lengths)
    counts.tokens, counts.tokens_trained = handler.count_tokens({name: flat for name, (flat, _) in columns.items()})
    return ChunkResult(columns, counts, chunk.weight, first_error)


_worker_handler: Handler | None = None
_worker_on_bad_row = "error"


def _encode_in_worker(chunk: Chunk) -> ChunkResult:
    assert _worker_handler is not None
    return _encode_chunk(_worker_handler, chunk, on_bad_row=_worker_on_bad_row)


def encode_chunks(
    handler: Handler, chunks: Iterator[Chunk], *, workers: int, on_bad_row: str
) -> Generator[ChunkResult, None, None]:
    """Yield the chunks' results in order. At most three chunks a worker are under way, so memory stays flat.

    The workers are forked with the handler in memory; the tokenizer's own threads are off, one worker is one core.
    """
    global _worker_handler, _worker_on_bad_row
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # What is loaded by now lives to the end: the garbage collector need not look at it, and forks need not copy it.
    gc.freeze()
    _worker_handler, _worker_on_bad_row = handler, on_bad_row
    # it makes its processes once work is submitted, so with one worker there are none
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"))
    waiting: deque[Future[ChunkResult]] = deque()
    try:
        for chunk in chunks:
            if workers == 1:
                yield _encode_chunk(handler, chunk, on_bad_row=on_bad_row)
                continue
            waiting.append(pool.submit(_encode_in_worker, chunk))
            if len(waiting) >= 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        _worker_handler = None
        pool.shutdown(cancel_futures=True)
        gc.unfreeze()
