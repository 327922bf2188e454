"""A plug-in file as a user would write it, and the scorers that the pool has to survive."""

import asyncio
import contextlib
import ctypes
import mmap
import os
import signal
import time
from collections.abc import Sequence

import msgpack

from mindspeed_rl.rewards import REWARDS, register
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings


@register("hostile")
def hostile(response: str) -> float:
    """Does what the response says."""
    if response == "sleep":
        time.sleep(1000)
    elif response == "spin":
        while True:
            pass
    elif response == "segfault":
        ctypes.string_at(0)
    elif response == "exit":
        os._exit(3)
    elif response == "raise":
        raise KeyError("no such thing")
    elif response == "nan":
        return float("nan")
    elif response == "text":
        return "good"  # type: ignore[return-value]
    elif response == "eat":
        eaten = []
        while True:
            eaten.append(bytes(8 << 20))
    elif response == "eat in a child":  # shared memory, which no resource limit counts
        if os.fork() == 0:
            shared = mmap.mmap(-1, 400 << 20)
            for _ in range(400):
                shared.write(b"x" * (1 << 20))
            time.sleep(1000)
        time.sleep(1000)
    elif response == "breaks msgpack":
        msgpack.packb = lambda *_, **__: b"\xc1"
    elif response.startswith("writes to every descriptor "):
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, bytes.fromhex(response.split()[-1]))
    elif response == "prints much":
        for _ in range(100):
            print("x" * (1 << 20), flush=True)
    elif response == "fork":
        os.fork()  # both come back
    elif response == "kill the spawner":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    elif response == "leave a child":
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
    return 1.0


@register("parts")
def parts(response: str) -> dict[str, float | str]:
    return {"score": 0.5, "length": float(len(response)), "remark": "fine"}


@register("summed")
def summed() -> dict[str, float]:
    return {"a": 1.0, "b": 2.0}


@register("difficulty_batch")
def difficulty_batch(
    completions: Sequence[str], difficulty: Sequence[float], prompts: Sequence[str], **columns: object
) -> list[float]:
    """ms-swift's and TRL's form."""
    assert len(completions) == len(difficulty) == len(prompts)
    return [float(value) * len(text) for text, value in zip(completions, difficulty)]


@register("group_rank")
def group_rank(samples: Sequence[RewardSample]) -> list[float]:
    lengths = sorted(len(sample.response_ids) for sample in samples)
    return [float(lengths.index(len(sample.response_ids))) for sample in samples]


@register("async_sample")
async def async_sample(response: str, label: str) -> float | None:
    await asyncio.sleep(0)
    if response == "sleep":
        await asyncio.sleep(1000)
    elif response == "block":
        time.sleep(1000)
    elif response == "no opinion":
        return None
    return float(response == label)


@register("async_batch")
async def async_batch(responses: Sequence[str], labels: Sequence[str]) -> list[float]:
    async def one(response: str, label: str) -> float:
        await asyncio.sleep(0)
        return float(response == label)

    return list(await asyncio.gather(*(one(r, label) for r, label in zip(responses, labels))))


class SwiftStyle:
    """ms-swift's form: a class with `args`, whose instances are called."""

    def __init__(self, args: RewardSettings | None = None) -> None:
        self.limit = args.repetition_n_grams if args is not None else -1

    def __call__(self, completions: Sequence[str], solution: Sequence[str], **kwargs: object) -> list[float]:
        return [self.limit + float(text == wanted) for text, wanted in zip(completions, solution)]


REWARDS["swift_style"] = SwiftStyle


@register("too_few")
def too_few(responses: Sequence[str]) -> list[float]:
    return [1.0]


@register("wants_column")
def wants_column(response: str, colour: str) -> float:
    return float(response == colour)
