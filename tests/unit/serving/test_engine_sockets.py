"""The files by which the processes of an engine meet are there until the engine has answered, and not after that."""

from __future__ import annotations

from vllm_program import run_program

PROGRAM = """
import asyncio, json, os
os.environ.update(VLLM_LOGGING_LEVEL="ERROR")
from pathlib import Path
from types import SimpleNamespace
from mindspeed_rl import adaptors, platform

platform.select("cpu")
adaptors.apply("rollout")
from mindspeed_rl.adaptors import vllm_async
from mindspeed_rl.serving.async_engine import AsyncEngine
from mindspeed_rl.rollout.requests import Sampling

places, seen = [], []

class Llm:
    shape = SimpleNamespace(get_vocab_size=lambda: 64, max_model_len=128)
    vllm_config = SimpleNamespace(model_config=shape, speculative_config=None)

    async def generate(self, prompt, params, name):
        seen.append(places[-1].is_dir())  # the process of the engine may look for its sockets as late as this
        for finished in (False, True):
            sample = SimpleNamespace(finish_reason="length" if finished else None, token_ids=[], logprobs=None)
            yield SimpleNamespace(outputs=[sample], finished=finished)

    def shutdown(self):
        pass

def build(arguments):
    places.append(Path(os.environ["VLLM_RPC_BASE_PATH"]))
    seen.append(places[-1].is_dir())
    if arguments:
        raise RuntimeError("no engine")
    return Llm()

vllm_async.build_async_engine = build
engine = AsyncEngine({})

async def ask():
    return [chunk async for chunk in engine.stream((1, 2), Sampling(1.0, 4, ()), seed=3)]

asyncio.run(ask())
seen.append(places[-1].exists())
engine.close()
AsyncEngine({}).close()
seen.append(places[-1].exists())
try:
    AsyncEngine({"fails": True})
except RuntimeError:
    seen.append(places[-1].exists())
print(json.dumps([seen, "VLLM_RPC_BASE_PATH" in os.environ, len(set(places))]))
"""


def test_sockets_have_files_until_the_first_answer_or_the_end() -> None:
    built, asked, gone = True, True, False
    assert run_program(PROGRAM) == [[built, asked, gone, built, gone, built, gone], False, 3]
