"""The watch of event loops finds callbacks that compute or block, and only those."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from loop_watch import LoopWatch


def compute(seconds: float) -> None:
    """Use processor time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def call(function: object, *arguments: object) -> None:
    function(*arguments)  # type: ignore[operator]


def watch(work: object, package: Path = Path(__file__).parent) -> list[str]:
    found = LoopWatch(0.3, package)
    found.start()
    try:
        asyncio.run(work)  # type: ignore[arg-type]
    finally:
        reports = found.stop()
    return reports


@pytest.mark.parametrize("function", [compute, time.sleep])
def test_a_callback_that_computes_or_sleeps_is_found_with_its_stack(function: object) -> None:
    (report,) = watch(call(function, 0.6))
    assert "stood for more than 0.3 s" in report and "function(*arguments)" in report


def test_waiting_other_threads_and_code_of_others_are_not_found() -> None:
    async def wait() -> None:
        threads = [threading.Thread(target=compute, args=(0.4,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        await asyncio.sleep(0.4)  # awaits take no time of the loop
        for _ in range(8):  # many callbacks, each of them short
            compute(0.05)
            await asyncio.sleep(0)
        await asyncio.to_thread(time.sleep, 0.4)

    assert not watch(wait())
    assert not watch(call(time.sleep, 0.6), Path(__file__).parent / "elsewhere")
