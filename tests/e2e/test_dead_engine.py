"""A call to an engine whose process dies before it replies fails at once; vLLM lets it wait for the limit of its caller."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import patient
from tiny_task import make_other_task

PROGRAM = """
import asyncio, json, os, sys, time
import psutil


def main():
    from mindspeed_rl import platform
    from mindspeed_rl.config import GenerateConfig
    from mindspeed_rl.runtime.process import prepare_process

    os.environ.update(platform.select("cpu").worker_env())
    prepare_process(("rollout",), None)
    from mindspeed_rl.rollout.requests import Sampling
    from mindspeed_rl.serving.async_engine import build_engine
    from mindspeed_rl.serving.server_process import ServerSettings

    keys = GenerateConfig(
        infer_tensor_parallel_size=1, max_num_seqs=4, max_model_len=64, dtype="float32", kv_cache_memory_gib=0.03
    )

    async def run():
        engine = build_engine(ServerSettings(sys.argv[1], keys, "cpu", None, load_weights=True))
        await engine.generate((5, 6, 7), Sampling(1.0, 4, ()), 1)
        await engine.pause("abort")
        (core,) = [child for child in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(child.cmdline())]
        core.suspend()
        try:
            call = asyncio.ensure_future(engine.resume())
            await asyncio.sleep(1.0)
            assert not call.done()
        finally:
            core.kill()
        start_s = time.monotonic()
        try:
            await asyncio.wait_for(call, float(sys.argv[2]))
        except Exception as error:
            print(json.dumps([type(error).__name__, time.monotonic() - start_s]), flush=True)
        engine.close()

    asyncio.run(run())


if __name__ == "__main__":
    main()
"""


SHARED = """
import asyncio, json, os, sys
import psutil


def main():
    from mindspeed_rl import platform
    from mindspeed_rl.config import GenerateConfig
    from mindspeed_rl.runtime.process import prepare_process

    os.environ.update(platform.select("cpu").worker_env())
    prepare_process(("rollout",), None)
    from mindspeed_rl.rollout.requests import Sampling
    from mindspeed_rl.serving.async_engine import build_engine
    from mindspeed_rl.serving.server_process import ServerSettings

    keys = GenerateConfig(
        infer_tensor_parallel_size=1, infer_expert_parallel_size=2, enable_expert_parallel=True, max_num_seqs=4,
        max_model_len=64, dtype="float32", kv_cache_memory_gib=0.03,
    )

    async def follow(engine, index, begun):
        async for chunk in engine.stream((5, 6, 7 + index), Sampling(1.0, 60, ()), index):
            begun.set()
        return chunk.finish

    def generate(engine):
        begun = [asyncio.Event() for _ in range(4)]
        return [asyncio.ensure_future(follow(engine, index, event)) for index, event in enumerate(begun)], begun

    async def are_paused(engine):
        core = engine.llm.engine_core
        return [await core._call_utility_async("is_scheduler_paused", engine=each) for each in core.core_engines]

    async def run():
        engine = build_engine(ServerSettings(sys.argv[1], keys, "cpu", None, load_weights=True))
        rounds = []
        for modes in (["wait"], ["abort", "wait"]):
            calls, begun = generate(engine)
            for event in begun:
                await event.wait()
            for mode in modes:
                await engine.pause(mode)
            paused, (later, _) = await are_paused(engine), generate(engine)
            await asyncio.sleep(1.0)
            done = [any(call.done() for call in later), all(call.done() for call in calls)]
            await engine.resume()
            finishes = [[await call for call in group] for group in (calls, later)]
            rounds.append([paused, await are_paused(engine), done, *finishes])
        processes = [[process.pid, process.create_time()] for process in psutil.Process().children(recursive=True)]
        print(json.dumps([rounds, processes]), flush=True)
        os.kill(os.getpid(), 9)

    asyncio.run(run())


if __name__ == "__main__":
    main()
"""


def start(folder: Path, text: str, *words: object) -> subprocess.Popen[str]:
    """A program in a group of its own. It writes into files: a process that it leaves would keep pipes open."""
    program = folder / "program.py"
    program.write_text(text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "out.txt").open("w") as out, (folder / "err.txt").open("w") as err:
        command = [sys.executable, program, *map(str, words)]
        return subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True, text=True)


@contextlib.contextmanager
def finished(folder: Path, text: str, *words: object) -> Iterator[tuple[int, Any]]:
    """Exit code and last line of a program that has ended; what it has left ends after the block."""
    process = start(folder, text, *words)
    try:
        code = process.wait(patient(200))
        lines = (folder / "out.txt").read_text().splitlines()
        assert lines, (folder / "err.txt").read_text()[-3000:]
        yield code, json.loads(lines[-1])
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing was left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def find_alive(pid: int, start_s: float) -> psutil.Process | None:
    """The process that has this id and began then, unless it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.create_time() == start_s and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


@pytest.mark.slow
def test_engines_that_share_experts_pause_together_and_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    folder = make_other_task(tmp_path / "task", "qwen3-moe") / "model"
    with finished(tmp_path, SHARED, folder) as (code, (rounds, processes)):
        assert code == -signal.SIGKILL
        for paused, resumed, (any_later, all_earlier), _, later in rounds:
            assert paused == [True, True] and resumed == [False, False]
            # what comes to paused engines waits, and what they had has ended
            assert not any_later and all_earlier and set(later) <= {"stop", "length"}
        (waited, aborted) = (earlier for *_, earlier, _ in rounds)
        assert set(waited) <= {"stop", "length"} and "aborted" in aborted
        # two engines, vLLM's process between them, and what watches shared memory
        assert len(processes) >= 3
        deadline_s = time.monotonic() + patient(10)
        while any(find_alive(pid, start_s) for pid, start_s in processes) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert [process for pid, start_s in processes if (process := find_alive(pid, start_s))] == []


@pytest.mark.slow
def test_a_call_to_an_engine_that_dies_fails_at_once(task: Path, tmp_path: Path) -> None:
    # vLLM's own call waits for ever; the engine's death is seen within a second, when the machine has time
    with finished(tmp_path, PROGRAM, task / "model", f"{patient(120):.0f}") as (_, (error, seconds)):
        assert error == "EngineDeadError" and seconds < patient(15)
