"""Several asyncio tasks of which the first exception is raised."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

_Result = TypeVar("_Result")


def start_task(work: Coroutine[object, None, _Result]) -> asyncio.Task[_Result]:
    """Start one of several tasks; its exception counts as retrieved.

    The caller that waits for them raises the first exception. asyncio logs each of the others, which mostly follow from it,
    with a traceback when the task is garbage-collected: long after the error, in the middle of any other code.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(retrieve_exception)
    return task


def retrieve_exception(future: asyncio.Future[_Result]) -> None:
    """Retrieve the exception of a future that is done, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
