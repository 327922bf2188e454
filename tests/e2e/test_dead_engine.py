"""A call to an engine whose process dies before it replies fails at once; vLLM lets it wait for the limit of its caller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from patience import patient
from tiny_task import make_other_task

PROGRAM = """
import asyncio, os, sys, time
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
        call = asyncio.ensure_future(engine.resume())
        await asyncio.sleep(1.0)
        assert not call.done()
        core.kill()
        start_s = time.monotonic()
        try:
            await asyncio.wait_for(call, float(sys.argv[2]))
        except Exception as error:
            print(f"failed: {type(error).__name__} after {time.monotonic() - start_s:.0f} s", flush=True)
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

    async def run():
        engine = build_engine(ServerSettings(sys.argv[1], keys, "cpu", None, load_weights=True))
        finishes = []
        for modes in (["wait"], ["abort", "wait"]):
            calls = [asyncio.ensure_future(engine.generate((5, 6, 7 + i), Sampling(1.0, 24, ()), i)) for i in range(4)]
            await asyncio.sleep(0.2)
            for mode in modes:
                await engine.pause(mode)
            await engine.resume()
            finishes.append([(await call).finish in ("stop", "length", "aborted") for call in calls])
        processes = [process.pid for process in psutil.Process().children(recursive=True)]
        print(json.dumps([finishes, processes]), flush=True)
        os.kill(os.getpid(), 9)

    asyncio.run(run())


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_engines_that_share_experts_pause_together_and_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SHARED)
    folder = make_other_task(tmp_path / "task", "qwen3-moe") / "model"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, program, folder], stdout=-1, timeout=patient(200), env=environment, text=True)
    finishes, processes = json.loads(done.stdout.splitlines()[-1])
    assert finishes == [[True] * 4] * 2 and done.returncode == -9
    # two engines, vLLM's process between them, and what watches shared memory
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)], timeout=patient(10))
    assert len(processes) >= 3 and not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_a_call_to_an_engine_that_dies_fails_at_once(task: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = [sys.executable, program, task / "model", f"{patient(60):.0f}"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=patient(200), env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert "failed: EngineDeadError after" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
