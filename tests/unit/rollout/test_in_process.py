"""The engine in the training process: what enters a step, what a pause does, on one rank and with a peer."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import patient
from ports import find_free_port

from mindspeed_rl.rollout.in_process import InProcessEngine
from mindspeed_rl.rollout.protocol import Generated, _continuation_seed
from mindspeed_rl.rollout.requests import Completion, Sampling
from mindspeed_rl.run.placement import RolloutLayout

SAMPLING = Sampling(1.0, 6, ())


def token(prompt: Sequence[int], seed: int, place: int, version: int) -> int:
    return (sum(prompt) * 13 + seed * 31 + place * 7 + version * 1009) % 997


class Stepped:
    """Stands where vLLM's engine does: every request that runs grows by a token a step.

    Attributes:
        steps: how many requests ran in each step.
    """

    def __init__(self) -> None:
        self.layout = RolloutLayout(1, 1)
        self.weight_version = 0
        self.steps: list[int] = []
        self.calls: list[str] = []
        self._running: dict[str, tuple[tuple[int, ...], Sampling, int, list[int]]] = {}

    def add_request(self, name: str, prompt_ids: Sequence[int], sampling: Sampling, seed: int) -> None:
        self._running[name] = (tuple(prompt_ids), sampling, seed, [])

    def step(self) -> list[tuple[str, Completion]]:
        self.steps.append(len(self._running))
        ended = []
        for name, (prompt, sampling, seed, tokens) in list(self._running.items()):
            tokens.append(token(prompt, seed, len(tokens), self.weight_version))
            if len(tokens) == sampling.max_tokens:
                ended.append((name, Completion(tokens, [-1.0] * len(tokens), truncated=True)))
                del self._running[name]
        return ended

    def partial_completion(self, name: str) -> Completion:
        tokens = list(self._running[name][3])
        return Completion(tokens, [-1.0] * len(tokens), truncated=False)

    def abort(self, names: Sequence[str]) -> None:
        for name in names:
            self._running.pop(name, None)

    def check_request(self, num_prompt_tokens: int, sampling: Sampling) -> None:
        if num_prompt_tokens > 100:
            raise ValueError("too long")

    def check_freezable(self) -> None:
        pass

    def load_weights(self, named: Any, version: int) -> None:
        self.weight_version = version

    def release_memory(self) -> None:
        self.calls.append("release")

    def restore_memory(self, part: str) -> None:
        self.calls.append(part)


def build_engine() -> tuple[InProcessEngine, Stepped]:
    engine = Stepped()
    return InProcessEngine(engine), engine  # type: ignore[arg-type]


async def steps(count: int) -> None:
    for _ in range(4 * count):
        await asyncio.sleep(0)


def expected(prompt: tuple[int, ...], seed: int, versions: Sequence[int]) -> tuple[int, ...]:
    return tuple(token(prompt, seed, place, version) for place, version in enumerate(versions))


def test_what_is_asked_for_at_once_enters_the_same_step() -> None:
    served, engine = build_engine()

    async def work() -> list[Generated]:
        return await asyncio.gather(*(served.generate((number,), SAMPLING, number) for number in range(5)))

    result = served.run(work)
    assert result is not None
    assert engine.steps == [5] * 6
    assert [response.token_ids for response in result] == [expected((number,), number, [0] * 6) for number in range(5)]
    assert {response.finish for response in result} == {"length"}


def test_a_response_that_was_cut_goes_on_with_its_tokens_and_a_seed_of_that_place() -> None:
    served, _ = build_engine()

    async def work() -> tuple[Generated, Generated]:
        first = asyncio.ensure_future(served.generate((3,), SAMPLING, 9))
        await steps(3)
        await served.pause("abort")
        cut = await first
        served.load([], 1)
        rest = asyncio.ensure_future(served.generate((3,), SAMPLING, 9, cut))
        await steps(3)
        assert not rest.done()  # the engine is paused
        await served.resume()
        return cut, await rest

    cut, whole = served.run(work) or pytest.fail("no answer")
    kept = len(cut.token_ids)
    assert cut.finish == "aborted" and 0 < kept < 6
    assert cut.token_ids == expected((3,), 9, [0] * kept)
    later = tuple(token((3, *cut.token_ids), _continuation_seed(9, kept), place, 1) for place in range(6 - kept))
    assert whole == Generated(cut.token_ids + later, (-1.0,) * 6, (0,) * kept + (1,) * (6 - kept), "length")


def test_frozen_responses_outlive_a_run_and_name_both_versions() -> None:
    served, _ = build_engine()
    waiting: list[asyncio.Future[Generated]] = []

    async def begin() -> None:
        waiting.append(asyncio.ensure_future(served.generate((3,), SAMPLING, 9)))
        await steps(3)
        await served.pause("keep")

    async def go_on() -> Generated:
        await served.resume()
        return await waiting[0]

    served.run(begin)
    served.load([], 4)
    result = served.run(go_on)
    assert result is not None
    assert set(result.versions) == {0, 4} and list(result.versions) == sorted(result.versions)
    assert result.token_ids == expected((3,), 9, result.versions)


def test_a_pause_can_wait_for_what_runs_while_others_wait_for_it() -> None:
    served, _ = build_engine()

    async def work() -> list[Generated]:
        first = asyncio.ensure_future(served.generate((1,), SAMPLING, 1))
        await steps(1)
        await served.pause("wait")
        assert first.done()
        second = asyncio.ensure_future(served.generate((2,), SAMPLING, 2))
        await steps(4)
        assert not second.done()
        served.load([], 1)
        await served.resume()
        return [await first, await second]

    result = served.run(work) or []
    assert [response.versions for response in result] == [(0,) * 6, (1,) * 6]


def test_requests_that_cannot_be_answered_are_refused_and_complete_ones_come_back() -> None:
    served, _ = build_engine()

    async def too_long() -> Generated:
        return await served.generate(tuple(range(101)), SAMPLING, 1)

    async def full() -> Generated:
        return await served.generate((1,), SAMPLING, 1, Generated((5,) * 6, (0.0,) * 6, (0,) * 6, "aborted"))

    async def ended() -> Generated:
        return await served.generate((1,), SAMPLING, 1, Generated((5,), (0.0,), (0,), "stop"))

    with pytest.raises(ValueError, match="too long"):
        served.run(too_long)
    assert served.run(full) == Generated((5,) * 6, (0.0,) * 6, (0,) * 6, "length")
    with pytest.raises(ValueError, match="ended by 'stop'"):
        served.run(ended)


def _rank(rank: int, port: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    engine = Stepped()
    served = InProcessEngine(engine, dist.group.WORLD, 0)  # type: ignore[arg-type]

    async def work() -> list[Generated]:
        first = asyncio.ensure_future(served.generate((3,), SAMPLING, 9))
        await steps(2)
        second = asyncio.ensure_future(served.generate((4,), SAMPLING, 8))
        await steps(2)
        await served.pause("abort")
        await served.resume()
        cut = [await first, await second]
        whole = await asyncio.gather(served.generate((3,), SAMPLING, 9, cut[0]), served.generate((4,), SAMPLING, 8, cut[1]))
        await served.release()
        await served.restore()
        return list(whole)

    async def fails() -> None:
        raise RuntimeError("nobody hangs")

    result = served.run(work)
    try:
        served.run(fails)
    except RuntimeError as error:
        result = (result, str(error))  # type: ignore[assignment]
    results.put((rank, result, engine.steps, engine.calls, len(engine._running)))
    dist.destroy_process_group()


def test_the_ranks_of_a_replica_take_the_same_steps() -> None:
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), find_free_port()
    processes = [context.Process(target=_rank, args=(rank, port, results), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        reports = sorted((results.get(timeout=patient(120)) for _ in processes), key=lambda report: report[0])
    finally:
        for process in processes:
            process.join(timeout=patient(10))
            process.kill()
    (_, (result, said), *first), (_, nothing, *second) = reports
    assert said == "nobody hangs" and nothing is None
    assert [len(response.token_ids) for response in result] == [6, 6]
    assert first == second  # steps with as many requests, the same calls, nothing left over
    assert first[1] == ["release", "weights", "cache"]
