"""Several asyncio tasks of which the first failure is raised."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

_Result = TypeVar("_Result")


def start_task(work: Coroutine[object, None, _Result]) -> asyncio.Task[_Result]:
    """Start one of several tasks; its failure counts as read.

    Who waits for them raises the first failure. asyncio logs each of the others, which mostly follow from it, with a stack when
    the task is collected: long after the error, in the middle of anything.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(read_failure)
    return task


def read_failure(task: asyncio.Task[_Result]) -> None:
    """Mark the failure of an ended task as read."""
    if not task.cancelled():
        task.exception()
