"""Servers that join and leave an asynchronous run under load: the real pool and services, engines that take virtual time."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from fake_engine import JumpingClock
from scripted_server import Chunk, token

from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rollout.agents.loop import AgentRunner, SingleTurn
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.serving.engine_pool import ServerPool
from mindspeed_rl.serving.rollout_service import RolloutService
from mindspeed_rl.trainers.admission import Admission
from mindspeed_rl.trainers.group_sources import Requests, StreamingSource
from mindspeed_rl.trainers.prompt_groups import PromptGroup

BATCH, GROUP, PLACES, TRAIN_S = 16, 4, 16, 1.0


def length(seed: int) -> int:
    """20 tokens on average, 80 at most."""
    return max(1, min(80, round(random.Random(seed).lognormvariate(2.7, 0.8))))


class Engine:
    """Gives each of 16 responses a token a second; others wait for a place.

    Attributes:
        num_tokens: that it has given.
    """

    def __init__(self, version: int) -> None:
        self.version, self.num_tokens = version, 0
        self._places, self._interrupted, self._is_open = asyncio.Semaphore(PLACES), asyncio.Event(), asyncio.Event()
        self._is_open.set()

    async def stream(
        self, prompt_ids: Iterable[int], sampling: Sampling, seed: int, partial: Generated | None = None
    ) -> AsyncIterator[Chunk]:
        await self._is_open.wait()
        prompt = tuple(prompt_ids)
        async with self._places:
            for position in range(0 if partial is None else len(partial.token_ids), length(seed)):
                if not self._interrupted.is_set():
                    await asyncio.sleep(1.0)
                if self._interrupted.is_set():
                    yield Chunk((), (), self.version, "aborted")
                    return
                self.num_tokens += 1
                last = position + 1 == length(seed)
                yield Chunk((token(prompt, seed, position),), (-0.5,), self.version, "stop" if last else None)

    async def pause(self, mode: str) -> None:
        self._is_open.clear()
        self._interrupted.set()
        await asyncio.sleep(1.5)  # all of them have seen it

    async def resume(self) -> None:
        self._interrupted.clear()
        self._is_open.set()

    async def check(self) -> None:
        """The engine is alive."""


class Server:
    """A client and its server; what travels is JSON."""

    def __init__(self, index: int, version: int) -> None:
        self.name, self.engine = f"server {index}", Engine(version)
        self._service: Any = RolloutService(self.engine, {})  # type: ignore[arg-type]

    async def call(self, name: str, **arguments: object) -> Any:
        result = await self._service.call(name, json.loads(json.dumps(arguments)))
        return json.loads(json.dumps(result))


async def score(group: PromptGroup) -> list[RewardResult]:
    return [RewardResult(1.0, {}) for _ in group.samples]


def test_the_second_iteration_with_more_servers_has_nine_tenths_of_the_added_throughput() -> None:
    clock = JumpingClock()
    try:
        rates, taken, left = scaled(clock)
    finally:
        clock.end()
    alone = sum(rates[2:6]) / 4
    joined = sum(rates[8:16]) / 8
    assert alone == pytest.approx(PLACES, rel=0.1) and joined > 3.5 * alone
    assert rates[7] >= alone + 0.9 * (joined - alone)  # iterations 6 and 7 are the first two with four servers
    assert sum(rates[18:22]) / 4 == pytest.approx(alone, rel=0.1)
    assert sorted(taken + left) == list(range(len(taken + left)))  # no prompt is lost, none comes twice


def scaled(clock: JumpingClock) -> tuple[list[float], list[int], list[int]]:
    """Tokens a second of each iteration with 1, 4 and again 1 servers; the prompts that trained, and those under way."""
    pool = clock.run(build_pool())
    servers = {0: Server(0, 0)}
    clock.run(pool.add(servers[0]))
    requests = Requests(
        lambda number: PromptItem(prompt_ids=[number, 1], label="", columns={}),
        lambda number, sample: number * 100 + sample,
        Sampling(1.0, 80, ()),
        GROUP,
    )
    source = StreamingSource(
        pool,
        AgentRunner(SingleTurn()),
        clock,  # type: ignore[arg-type]
        requests,
        Admission("pace", 4, BATCH),  # the longest response takes as long as four iterations with four servers
        score,
        interrupts=True,
        timeout_s=10_000.0,
    )
    pool.version = 0
    source.after_push(0)
    rates, taken, engines = list[float](), list[int](), [servers[0].engine]
    for iteration in range(22):
        start_s, before = clock.now, sum(engine.num_tokens for engine in engines)
        groups, _ = source.take(iteration, BATCH)
        for group in groups:
            taken.append(group.index)
            for sample, response in enumerate(group.trajectories):
                seed = group.index * 100 + sample
                expected = [token((group.index, 1), seed, position) for position in range(length(seed))]
                assert list(response.token_ids) == expected  # no token is lost or doubled either
        clock.run(asyncio.sleep(TRAIN_S))
        seconds = clock.now - start_s
        rates.append((sum(engine.num_tokens for engine in engines) - before) / seconds)
        source.before_push()
        if iteration == 5:
            for index in (1, 2, 3):
                servers[index] = Server(index, iteration)
                clock.run(pool.add(servers[index]))
                engines.append(servers[index].engine)
        if iteration == 15:
            for index in (1, 2, 3):
                clock.run(pool.leave(servers.pop(index).name))
        pool.version = iteration + 1
        for server in servers.values():
            server.engine.version = iteration + 1
        source.after_push(iteration + 1)
    left = [group.index for group in source.snapshot()[0]]
    clock.run(pool.close())
    return rates, taken, left


async def build_pool() -> ServerPool:
    return ServerPool(timeout_s=10_000.0)
