"""Calls to an engine whose process dies fail, where vLLM would leave them waiting."""

from __future__ import annotations

import asyncio

import pytest

from mindspeed_rl.adaptors.vllm_async import finish_or_fail


class Engine:
    """What the calls look at of vLLM's engine: whether a process of it has died."""

    errored = False
    dead_error = RuntimeError("the engine is dead")

    async def reply(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "replied"

    async def die(self) -> str:
        self.errored = True
        await asyncio.Event().wait()
        return "never"

    async def refuse(self) -> str:
        raise ValueError("an argument is wrong")


def test_a_call_has_its_result_its_error_or_the_engines() -> None:
    engine = Engine()

    async def run() -> str:
        return await asyncio.wait_for(finish_or_fail(engine, engine.reply(0.7)), 20)

    assert asyncio.run(run()) == "replied"
    with pytest.raises(ValueError, match="an argument is wrong"):
        asyncio.run(finish_or_fail(engine, engine.refuse()))
    with pytest.raises(RuntimeError, match="the engine is dead"):
        asyncio.run(asyncio.wait_for(finish_or_fail(engine, engine.die()), 20))
