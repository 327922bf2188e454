"""Calls to an engine whose process dies fail, where vLLM would leave them waiting."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from patience import patient

from mindspeed_rl.adaptors.engine_hooks import compile_forms_at_once
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


#: vLLM's process between the engines of a server that has ended before it runs, and of one that lives
COORDINATOR = """
import os, sys, time
from mindspeed_rl.adaptors.vllm_async import run_coordinator

run_coordinator.__wrapped__ = lambda *arguments, **keywords: (time.sleep(2.5), print(arguments, keywords))
run_coordinator(os.getppid() + int(sys.argv[1]), 5, front="end")
"""


@pytest.mark.parametrize(("difference", "expected"), [(0, (0, "(5,) {'front': 'end'}\n")), (1, (1, ""))])
def test_the_process_between_engines_ends_with_a_server_that_was_gone_before_it_began(
    difference: int, expected: tuple[int, str]
) -> None:
    words = [sys.executable, "-c", COORDINATOR, str(difference)]
    done = subprocess.run(words, stdout=-1, text=True, timeout=patient(60))
    assert (done.returncode, done.stdout) == expected


def test_a_vllm_whose_forms_cannot_be_compiled_at_once_is_named() -> None:
    def engine(**switches: bool) -> Any:
        manager = SimpleNamespace(**switches)
        core = SimpleNamespace(engine_core=SimpleNamespace(structured_output_manager=manager))
        return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core), manager=manager)

    known = engine(_use_async_grammar_compilation=True)
    compile_forms_at_once(known)
    assert known.manager._use_async_grammar_compilation is False
    with pytest.raises(RuntimeError, match="this vLLM has no StructuredOutputManager._use_async_grammar_compilation"):
        compile_forms_at_once(engine())
