"""Chunks of rows are worked on by processes, in the order of the data."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

from mindspeed_rl.data.sources import Chunk

_T = TypeVar("_T")
#: in a worker, what it does with a chunk
_function: Callable[[Chunk], Any] | None = None


def _keep(function: Callable[[Chunk], Any]) -> None:
    global _function
    _function = function


def _call(chunk: Chunk) -> Any:
    assert _function is not None
    return _function(chunk)


def map_chunks(function: Callable[[Chunk], _T], chunks: Iterable[Chunk], *, workers: int) -> Generator[_T, None, None]:
    """Yield the result of each chunk in order. At most three chunks a worker are under way, so memory stays flat.

    Several workers are forked with the function and what it refers to in memory; the tokenizer's own threads are off there,
    one worker is one core. Without a second worker the chunks are worked on here.
    """
    if workers == 1:
        yield from map(function, chunks)
        return
    threads = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # objects loaded by now live to the end: the garbage collector need not check them, nor forks copy them
    gc.freeze()
    fork = multiprocessing.get_context("fork")  # the function is not pickled
    pool = ProcessPoolExecutor(workers, mp_context=fork, initializer=_keep, initargs=(function,))
    waiting: deque[Future[_T]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_call, chunk))
            if len(waiting) >= 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        gc.unfreeze()
        if threads is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = threads
