"""A rollout server without a model: which token comes next is arithmetic, and when it comes is the test's business."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.serving.rollout_service import RolloutService
from mindspeed_rl.serving.server_process import describe_log_probs


def token(prompt_ids: Iterable[int], seed: int, position: int) -> int:
    """The token at this position of the response."""
    return (sum(prompt_ids) * 31 + seed * 7 + position * 13) % 97


@dataclass(frozen=True)
class Chunk:
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    version: int
    finish: str | None


class ScriptedEngine:
    """Gives a token whenever `steps` is released; `hold` keeps requests without any.

    Attributes:
        seen: (prompt, tokens that the response had) of every request.
    """

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.steps = asyncio.Semaphore(0)
        self.seen: list[tuple[tuple[int, ...], int]] = []
        self.paused: list[str] = []
        self.running: set[asyncio.Event] = set()
        self.error: Exception | None = None

    async def stream(
        self, prompt_ids: Iterable[int], sampling: Sampling, seed: int, partial: Generated | None = None
    ) -> AsyncIterator[Chunk]:
        prompt, kept = tuple(prompt_ids), 0 if partial is None else len(partial.token_ids)
        self.seen.append((prompt, kept))
        if len(prompt) > 8:
            raise ValueError("the prompt is too long")
        aborted = asyncio.Event()
        self.running.add(aborted)
        try:
            for position in range(kept, sampling.max_tokens):
                step, stop = asyncio.create_task(self.steps.acquire()), asyncio.create_task(aborted.wait())
                await asyncio.wait([step, stop], return_when=asyncio.FIRST_COMPLETED)
                for task in (step, stop):
                    if not task.done():
                        task.cancel()
                if self.error is not None:
                    raise self.error
                if aborted.is_set():
                    yield Chunk((), (), self.version, "aborted")
                    return
                last = position + 1 == sampling.max_tokens
                yield Chunk((token(prompt, seed, position),), (-0.5,), self.version, "length" if last else None)
        finally:
            self.running.discard(aborted)

    async def pause(self, mode: str) -> None:
        self.paused.append(mode)
        if mode == "abort":
            for aborted in self.running:
                aborted.set()

    async def resume(self) -> None:
        self.paused.append("resumed")

    async def join(self, rendezvous: str, first_rank: int) -> None:
        pass

    async def leave(self) -> None:
        pass

    async def receive(self, version: int) -> list[str]:
        self.version = version
        return []

    async def check(self) -> None:
        if self.error is not None:
            raise self.error

    def release(self, count: int = 1) -> None:
        """So many tokens come, of whichever request asks first."""
        for _ in range(count):
            self.steps.release()


class ScriptedServer:
    """The way to it; every message goes through JSON, as over HTTP.

    Attributes:
        silent: no call is answered any more.
        gone: calls fail at once.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine = ScriptedEngine()
        facts = {"num_workers": 1, "dtype": "float32", "max_model_len": 64, "log_probs": describe_log_probs(0)}
        self.service = RolloutService(self.engine, facts)
        self.silent = asyncio.Event()
        self.gone = False
        self.calls: list[str] = []

    async def call(self, name: str, **arguments: Any) -> Any:
        self.calls.append(name)
        if self.gone:
            raise ConnectionError("connection refused")
        answer = asyncio.create_task(self.service.call(name, json.loads(json.dumps(arguments))))
        silence = asyncio.create_task(self.silent.wait())
        await asyncio.wait([answer, silence], return_when=asyncio.FIRST_COMPLETED)
        if self.silent.is_set():
            await asyncio.Event().wait()
        silence.cancel()
        if self.gone:
            raise ConnectionError("connection reset by peer")
        return json.loads(json.dumps(await answer))
