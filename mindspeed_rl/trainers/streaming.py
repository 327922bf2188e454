"""Responses that are generated while others train: prompts started as there is room, taken as they become ready."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Interval, Timers
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rollout.agents.loop import Agents, Task
from mindspeed_rl.rollout.protocol import RolloutEngine
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.admission import Admission, InFlight
from mindspeed_rl.trainers.prompt_groups import PromptGroup

Answer = TypeVar("Answer")
#: how often a wait for responses looks whether the engine lives
_LOOK_EVERY_S = 2.0
#: (group) -> what the reward functions say of its responses
Scorer = Callable[[PromptGroup], Awaitable[list[RewardResult]]]


class Runner(Protocol):
    """Where coroutines run, beside the loop of training."""

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """What `work` returns."""
        ...


@dataclass(frozen=True)
class Requests:
    """How the samples of a prompt are asked for.

    Attributes:
        item: (number of the prompt) -> the prompt.
        seed: (number of the prompt, number of the sample) -> of the response.
        group_size: samples of a prompt.
    """

    item: Callable[[int], PromptItem]
    seed: Callable[[int, int], int]
    sampling: Sampling
    group_size: int

    def task(self, item: PromptItem, seed: int) -> Task:
        """For an agent loop."""
        return Task(tuple(item["prompt_ids"]), self.sampling, seed, item["label"], item["columns"])


class StreamingSource:
    """Groups from an engine with devices of its own; see `Admission` for which are started and taken.

    Public methods are called by the driver's thread; the others run where the engine's coroutines do.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        agents: Agents,
        runner: Runner,
        requests: Requests,
        admission: Admission,
        score: Scorer,
        *,
        interrupts: bool,
        num_warmup_batches: int = 1,
        timeout_s: float,
        keep_alive: Callable[[], None] = lambda: None,
        generating: Callable[[], Coroutine[Any, Any, list[Interval]]] | None = None,
    ) -> None:
        """
        Args:
            interrupts: new weights interrupt what is being generated, which goes on with them; else they wait for it.
            num_warmup_batches: iterations' worth of prompts that are ready before the first iteration trains.
            timeout_s: longest wait for responses.
            keep_alive: called by the driver's thread while it waits: an engine that was lost is started again.
            generating: when the engine had requests, since the last call; None where it does not say.
        """
        self._engine, self._agents, self._runner = engine, agents, runner
        self._requests, self.admission = requests, admission
        self._score, self._timeout_s, self._keep_alive, self._engine_times = score, timeout_s, keep_alive, generating
        self._interrupts, self._num_warmup = interrupts, num_warmup_batches
        self._groups: dict[int, PromptGroup] = {}
        self._ready: set[int] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._next = self._taken = 0
        self._version: int | None = None
        self._failure: BaseException | None = None
        self._dropped_tokens = self._dropped = 0
        self._timers = Timers()
        self._changed: asyncio.Event | None = None
        self._generating = 0

    # ------------------------------------------------------------------ what the stage asks for

    def take(self, iteration: int, count: int) -> tuple[list[PromptGroup], list[WorkerReport]]:
        """`count` complete, scored groups for this iteration, in the order of their prompts.

        Raises:
            TimeoutError: they did not get ready in time; says what is being generated.
        """
        with self._timers("rollout"):
            groups = self._wait(lambda: self._take(iteration, count), lambda: self._describe(iteration, count))
        metrics = Metrics()
        metrics.add_last("rollout/in_flight_prompts", len(self._groups))
        metrics.add_last("rollout/ready_prompts", len(self._ready))
        if self.admission.strategy == "drop":
            metrics.add_sum("rollout/dropped_prompts", self._dropped)
            metrics.add_sum("rollout/dropped_tokens", self._dropped_tokens)
            self._dropped = self._dropped_tokens = 0
        engines = [] if self._engine_times is None else self._runner.run(self._engine_times())
        return groups, [WorkerReport(metrics, [*self._timers.drain(), *engines])]

    def rejected(self, count: int) -> None:
        """So many of the prompts taken do not train after all: others may be started for them. Negative: they do."""
        self._runner.run(self._reject(count))

    def before_push(self) -> None:
        """New weights may come."""
        # nothing is started before the first weights
        if self._version is None:
            return
        with self._timers("rollout_pause"):
            if not self._interrupts:
                # not by the engine's own pause: what runs on a server that is lost meanwhile must be able to go on
                self._wait(self._all_ended, lambda: self._describe_running("the push of new weights"))
            self._runner.run(self._engine.pause("abort" if self._interrupts else "wait"))

    def _wait(self, look: Callable[[], Coroutine[Any, Any, Answer | None]], describe: Callable[[], str]) -> Answer:
        """What `look` returns once it is not None.

        Raises:
            TimeoutError: it stays None; with `describe`'s words.
        """
        waited_s = 0.0
        while (found := self._runner.run(self._look(look, min(_LOOK_EVERY_S, self._timeout_s - waited_s)))) is None:
            waited_s += _LOOK_EVERY_S
            if waited_s >= self._timeout_s:
                raise TimeoutError(describe())
            self._keep_alive()
        return found

    def after_push(self, version: int) -> None:
        """New weights are there: what was interrupted goes on, and prompts are started that there is room for now."""
        self._runner.run(self._go_on(version))

    def snapshot(self) -> tuple[list[PromptGroup], int, int]:
        """What is in flight, the number of the next prompt, and how many were taken; tokens as of the last interruption."""
        return self._runner.run(self._snapshot())

    def restore(self, groups: list[PromptGroup], next_prompt: int, num_taken: int) -> None:
        """Goes on where `snapshot` was taken; the next `after_push` starts it."""
        self._groups = {group.number: group for group in groups}
        self._next, self._taken = next_prompt, num_taken

    # ------------------------------------------------------------------ where the coroutines run

    async def _look(self, look: Callable[[], Coroutine[Any, Any, Answer | None]], seconds: float) -> Answer | None:
        """What `look` returns, asked whenever something has changed in so many seconds."""
        assert self._changed is not None
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            if self._failure is not None:
                raise self._failure
            # before the look: what changes during it is not missed
            self._changed.clear()
            found = await look()
            if found is not None or loop.time() >= end:
                return found
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), end - loop.time())

    async def _all_ended(self) -> bool | None:
        # what is being scored meanwhile needs no engine
        return None if self._generating else True

    async def _snapshot(self) -> tuple[list[PromptGroup], int, int]:
        copies = [
            # a copy of the list, in which responses go on arriving while the snapshot is written
            PromptGroup(group.number, group.item, group.version, list(group.samples), group.results)
            for group in self._groups.values()
        ]
        return copies, self._next, self._taken

    async def _go_on(self, version: int) -> None:
        first = self._version is None
        self._version = version
        if first:
            self._changed = asyncio.Event()
            for group in self._groups.values():  # of a checkpoint
                self._start(group)
        else:
            await self._engine.resume()
        self._admit()

    async def _reject(self, count: int) -> None:
        self._taken -= count
        self._admit()

    def _admit(self) -> None:
        assert self._version is not None
        for _ in range(self.admission.room(self._version, self._taken, len(self._groups))):
            samples = [None] * self._requests.group_size
            group = PromptGroup(self._next, self._requests.item(self._next), self._version, list(samples))
            self._groups[group.number] = group
            self._next += 1
            self._start(group)

    def _start(self, group: PromptGroup) -> None:
        if group.is_complete and group.results is not None:
            self._ready.add(group.number)
            return
        task = asyncio.get_running_loop().create_task(self._grow(group))
        self._tasks[group.number] = task
        task.add_done_callback(lambda task: self._ended(group.number, task))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(number, None)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = self._failure or failure  # later ones may follow from the first
        if self._changed is not None:
            self._changed.set()

    async def _grow(self, group: PromptGroup) -> None:
        """The group is complete and scored."""
        await asyncio.gather(*(self._sample(group, number) for number in range(len(group.samples))))
        group.results = await self._score(group)
        self._ready.add(group.number)

    async def _sample(self, group: PromptGroup, number: int) -> None:
        seed = self._requests.seed(group.number, number)
        self._generating += 1
        try:
            # interrupted by a push: asked for again, it goes on when the engine does
            while (sample := group.samples[number]) is None or sample.finish == "aborted":
                task = replace(self._requests.task(group.item, seed), begun=None if sample is None else sample.response)
                group.samples[number] = await self._agents.sample(self._engine, task)
        finally:
            self._generating -= 1
            if self._changed is not None:
                self._changed.set()

    async def _take(self, iteration: int, count: int) -> list[PromptGroup] | None:
        if self.admission.strategy == "drop":
            self._drop(iteration)
        numbers = self._chosen(iteration, count)
        if numbers is None:
            return None
        # makes no room for other prompts: those taken count as those in flight do
        self._taken += count
        self._ready -= set(numbers)
        return [self._groups.pop(number) for number in numbers]

    def _chosen(self, iteration: int, count: int) -> list[int] | None:
        if self._taken == 0 and len(self._ready) < self._num_warmup * self.admission.batch_prompts:
            return None
        return self.admission.chosen(iteration, count, self._in_flight())

    def _in_flight(self) -> list[InFlight]:
        return [
            InFlight(group.number, group.oldest_version, group.number in self._ready)
            for _, group in sorted(self._groups.items())
        ]

    def _drop(self, iteration: int) -> None:
        """What is too old is gone, and others are started for it."""
        for number in self.admission.overdue(iteration, self._in_flight()):
            if (task := self._tasks.pop(number, None)) is not None:
                task.cancel()
            group = self._groups.pop(number)
            self._ready.discard(number)
            self._dropped += 1
            self._dropped_tokens += sum(len(sample.sampled_versions) for sample in group.samples if sample is not None)
        self._admit()

    def _describe(self, iteration: int, count: int) -> str:
        return self._describe_running(f"iteration {iteration + 1}", f" for the responses to {count} prompts")

    def _describe_running(self, who: str, what: str = "") -> str:
        running = [group for number, group in sorted(self._groups.items()) if number not in self._ready]
        missing = sum(sample is None or sample.finish == "aborted" for group in running[:1] for sample in group.samples)
        oldest = f"; prompt {running[0].number} lacks {missing} of {len(running[0].samples)} responses" if running else ""
        return (
            f"{who} waited {self._timeout_s:g} s (rl_config.wait_timeout_s){what}: {len(self._ready)} are ready, "
            f"{len(running)} are being generated or scored{oldest}."
        )
