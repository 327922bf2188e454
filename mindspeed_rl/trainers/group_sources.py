"""Sources of groups of responses: generated while others train, or over several rollouts of the same devices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from mindspeed_rl.data.images import read_references
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.loop_thread import LoopThread
from mindspeed_rl.observability.console import format_duration
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Interval, Timers
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rollout.agents.loop import AgentRunner, Task
from mindspeed_rl.rollout.protocol import Generated, PartialResponse, RolloutEngine
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.tools.tasks import start_task
from mindspeed_rl.trainers.admission import Admission, InFlight, QueueMarks
from mindspeed_rl.trainers.prompt_groups import PromptGroup

_Result = TypeVar("_Result")
#: seconds between two checks, during a wait for responses, that the engine is alive
_CHECK_EVERY_S = 2.0
#: a wait is reported after this time, or after a multiple of the longest one so far, and again whenever the time has doubled
_REPORT_AFTER_S, _UNUSUAL = 60.0, 2.0
_DEADLINE = "rl_config.wait_timeout_s"
#: prompts that were ready when the updates before this iteration had ended, in iterations' prompts
QUEUE_LEVEL = "rollout/queue_level"
_LOG = logging.getLogger(__name__)
#: (group) -> results of the reward functions for its responses
_Scorer = Callable[[PromptGroup], Awaitable[list[RewardResult]]]


@dataclass(frozen=True)
class Requests:
    """The settings with which the samples of a prompt are generated.

    Attributes:
        item: (index of the prompt) -> the prompt.
        seed: (index of the prompt, index of the sample) -> of the response.
        group_size: samples of a prompt that train.
        num_spare: samples of a prompt that are generated in addition, until enough others have ended.
        keeps_spare: True where samples that have not ended by then continue in a second group of their prompt.
    """

    item: Callable[[int], PromptItem]
    seed: Callable[[int, int], int]
    sampling: Sampling
    group_size: int
    num_spare: int = 0
    keeps_spare: bool = False

    def new_group(self, index: int, version: int) -> PromptGroup:
        """Return the group of a prompt that is started by weights of this version."""
        samples: list[Trajectory | None] = [None] * (self.group_size + self.num_spare)
        return PromptGroup(index, self.item(index), version, samples, needed=self.group_size)

    def list_in_flight(self, groups: Iterable[PromptGroup], is_ready: Callable[[PromptGroup], bool]) -> list[InFlight]:
        """Return the groups in the order of their prompts, each with the second one that will come of it."""
        listed = []
        for group in sorted(groups, key=lambda group: group.order):
            listed.append(InFlight(group.order, group.oldest_version, is_ready(group)))
            if self.keeps_spare and group.has_spare:
                listed.append(InFlight(group.order + 1, group.oldest_version, False))
        return listed

    def end_group(self, group: PromptGroup) -> tuple[PromptGroup, PromptGroup | None, int]:
        """Return what trains of a complete group, the group that follows, and the number of samples left out of the first.

        Samples that have ended are not counted where they are kept.
        """
        if not group.has_spare:
            return group, None, 0
        num_unfinished, num_rest = len(group.unfinished), len(group.samples) - group.num_trained
        complete = group.split()
        return (complete, group, num_unfinished) if self.keeps_spare else (complete, None, num_rest)

    def report_spare(self, count: int) -> Metrics:
        """Return the number of samples that did not train with the first ones of their prompt, by what became of them."""
        metrics = Metrics()
        if self.num_spare:
            metrics.add_sum("rollout/continued_samples" if self.keeps_spare else "rollout/aborted_samples", count)
        return metrics


class ElasticEngines(Protocol):
    """Further engines on devices that train."""

    @property
    def marks(self) -> QueueMarks:
        """Numbers of ready prompts at which they start and end to generate."""

    def wake(self) -> list[WorkerReport]:
        """Let them generate with the others, with the same weights; the trainers are idle."""

    def sleep(self) -> list[WorkerReport]:
        """Give the trainers their devices; what they were generating continues on the others."""


class StreamingSource:
    """Groups from an engine on dedicated devices; `Admission` decides which are started and taken.

    Public methods are called by the driver's thread; the others run where the engine's coroutines do.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        agents: AgentRunner,
        runner: LoopThread,
        requests: Requests,
        admission: Admission,
        score: _Scorer,
        *,
        interrupts: bool,
        num_warmup_batches: int = 1,
        timeout_s: float,
        keep_alive: Callable[[], None] = lambda: None,
        generating: Callable[[], Coroutine[object, object, list[Interval]]] | None = None,
        elastic: ElasticEngines | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            interrupts: new weights interrupt responses, which continue with them; else the new weights wait for the responses.
            num_warmup_batches: iterations' worth of prompts that are ready before the first iteration trains.
            timeout_s: longest wait for responses.
            keep_alive: called by the driver's thread during a wait: servers that were lost are started again.
            generating: returns when the engine had requests, since the last call; None where that is unknown.
            elastic: engines on the trainers' devices, which generate while an iteration waits for its prompts.
        """
        self._engine, self._agents, self._runner = engine, agents, runner
        self._requests, self.admission = requests, admission
        self._longest_s = 0.0  # of the waits so far
        self._score, self._timeout_s, self._keep_alive, self._engine_times = score, timeout_s, keep_alive, generating
        self._interrupts, self._num_warmup = interrupts, num_warmup_batches
        self._groups: dict[int, PromptGroup] = {}
        self._ready: set[int] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._next = self._taken = 0
        self._version: int | None = None
        self._failure: BaseException | None = None
        self._dropped_tokens = self._dropped = self._num_spare = 0
        self._timers = Timers()
        self._changed: asyncio.Event | None = None
        self._generating, self._elastic = 0, elastic
        self._level: float | None = None  # see QUEUE_LEVEL

    # ------------------------------------------------------------------ called by the driver's thread

    def take(self, iteration: int, count: int) -> tuple[list[PromptGroup], list[WorkerReport]]:
        """Return `count` complete, scored groups for this iteration, in the order of their prompts.

        Raises:
            TimeoutError: they are not ready in time; the message has what is being generated.
        """
        purpose, detail = f"iteration {iteration + 1}", f" for the responses to {count} prompts"
        reports = [] if self._elastic is None else self._generate_elastic(self._elastic, iteration, count, purpose, detail)
        with self._timers("rollout"):
            groups = self._wait(lambda: self._take(iteration, count), purpose, detail)
        metrics = Metrics()
        metrics.add_last("rollout/in_flight_prompts", len(self._groups))
        metrics.add_last("rollout/ready_prompts", len(self._ready))
        if self._level is not None:
            metrics.add_last(QUEUE_LEVEL, self._level)
        if self.admission.strategy == "drop":
            metrics.add_sum("rollout/dropped_prompts", self._dropped)
            metrics.add_sum("rollout/dropped_tokens", self._dropped_tokens)
            self._dropped = self._dropped_tokens = 0
        metrics.merge(self._requests.report_spare(self._num_spare))
        self._num_spare = 0
        engines = [] if self._engine_times is None else self._runner.run(self._engine_times())
        return groups, [*reports, WorkerReport(metrics, [*self._timers.drain(), *engines])]

    def _generate_elastic(
        self, elastic: ElasticEngines, iteration: int, count: int, purpose: str, detail: str
    ) -> list[WorkerReport]:
        """Let the trainers' devices generate where an iteration waits and few prompts are ready, until enough are."""

        def is_low(*, is_awake: bool) -> bool:
            num_in_flight = len(self._list_in_flight())
            return elastic.marks.decide(is_awake=is_awake, num_ready=len(self._ready), num_in_flight=num_in_flight)

        async def starts() -> bool:
            return self._choose(iteration, count) is None and is_low(is_awake=False)

        async def ends() -> bool | None:
            waits = self._choose(iteration, count) is None
            # an iteration may wait for certain prompts while many others are ready
            return None if is_low(is_awake=True) or (waits and len(self._ready) < len(self._groups)) else True

        if not self._runner.run(starts()):
            metrics = Metrics()
            metrics.add_max("rollout/elastic_servers", 0)
            return [WorkerReport(metrics)]
        _LOG.info("%s: the trainers' devices generate; %s", purpose, self._describe_groups())
        reports = elastic.wake()
        with self._timers("rollout"):
            self._wait(ends, purpose, detail)
        reports += elastic.sleep()
        _LOG.info("%s: the trainers' devices train; %s", purpose, self._describe_groups())
        return reports

    def reject(self, count: int) -> None:
        """Start others for so many of the prompts taken, which do not train after all. Negative: they do."""
        self._taken -= count
        self._runner.run(_call(self._admit))

    def before_push(self) -> None:
        """Interrupt what is being generated, or wait until it has ended: new weights come."""
        # nothing is started before the first weights
        if self._version is None:
            return
        self._level = self._runner.run(_call(lambda: len(self._ready))) / self.admission.batch_prompts
        with self._timers("rollout_pause"):
            if not self._interrupts:
                # not by the engine's pause: responses on a server that is lost meanwhile must be able to continue elsewhere;
                # scoring needs no engine
                self._wait(lambda: _call(lambda: None if self._generating else True), "the push of new weights")
            self._runner.run(self._engine.pause("abort" if self._interrupts else "wait"))

    def after_push(self, version: int) -> None:
        """Continue what was interrupted, and start as many prompts as there is room for with the new weights."""
        self._runner.run(self._continue(version))

    def snapshot(self) -> tuple[list[PromptGroup], int, int]:
        """Return the groups in flight, the index of the next prompt, and how many were taken.

        Tokens are counted at the last interruption.
        """
        # lists are copied: responses go on arriving while the snapshot is written
        copies = (replace(group, samples=list(group.samples), ids=list(group.ids)) for group in self._groups.values())
        return self._runner.run(_call(lambda: (list(copies), self._next, self._taken)))

    def restore(self, groups: list[PromptGroup], next_prompt: int, num_taken: int) -> None:
        """Load a snapshot; the next `after_push` starts it."""
        self._groups = {group.order: group for group in groups}
        self._next, self._taken = next_prompt, num_taken

    def _wait(self, poll: Callable[[], Coroutine[object, object, _Result | None]], purpose: str, detail: str = "") -> _Result:
        """Return the result of `poll` once it is not None.

        Raises:
            TimeoutError: it stays None; the message has the purpose.
        """
        waited_s, report_s = 0.0, max(_REPORT_AFTER_S, _UNUSUAL * self._longest_s)
        while (result := self._runner.run(self._poll(poll, min(_CHECK_EVERY_S, self._timeout_s - waited_s)))) is None:
            waited_s += _CHECK_EVERY_S
            if waited_s >= self._timeout_s:
                raise TimeoutError(f"{purpose} waited {self._timeout_s:g} s ({_DEADLINE}){detail}: {self._describe_groups()}.")
            if waited_s >= report_s:
                report_s = 2 * waited_s
                left = f"the run gives up in {format_duration(self._timeout_s - waited_s)} ({_DEADLINE})"
                took = format_duration(waited_s)
                _LOG.warning("waiting for %s: %s%s; %s; %s", took, purpose, detail, left, self._describe_groups())
            self._keep_alive()
        self._longest_s = max(self._longest_s, waited_s)
        return result

    def _describe_groups(self) -> str:
        running = [group for order, group in sorted(self._groups.items()) if order not in self._ready]
        oldest = ""
        if running:
            first = running[0]
            oldest = f"; prompt {first.index} lacks {first.num_missing} of {first.num_trained} responses"
        return f"{len(self._ready)} are ready, {len(running)} are being generated or scored{oldest}"

    # ------------------------------------------------------------------ run where the engine's coroutines do

    async def _poll(self, poll: Callable[[], Coroutine[object, object, _Result | None]], seconds: float) -> _Result | None:
        """Return the result of `poll`, called after every change within so many seconds."""
        assert self._changed is not None
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while True:
            if self._failure is not None:
                raise self._failure
            # before the poll: a change during it is not missed
            self._changed.clear()
            result = await poll()
            if result is not None or loop.time() >= end:
                return result
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), end - loop.time())

    async def _continue(self, version: int) -> None:
        first = self._version is None
        self._version = version
        if first:
            self._changed = asyncio.Event()
            for group in self._groups.values():  # of a checkpoint
                self._start(group)
        else:
            await self._engine.resume()
        self._admit()

    def _admit(self) -> None:
        """Start as many prompts as there is room for."""
        assert self._version is not None
        room = self.admission.compute_room(self._version, self._taken, len(self._list_in_flight()))
        for _ in range(room // (2 if self._requests.keeps_spare else 1)):
            group = self._requests.new_group(self._next, self._version)
            self._groups[group.order] = group
            self._next += 1
            self._start(group)

    def _start(self, group: PromptGroup) -> None:
        if group.is_complete and group.results is not None:
            self._ready.add(group.order)
            return
        task = asyncio.get_running_loop().create_task(self._complete(group))
        self._tasks[group.order] = task
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks = {order: other for order, other in self._tasks.items() if other is not task}
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = self._failure or failure  # later ones may follow from the first
        if self._changed is not None:
            self._changed.set()

    async def _complete(self, group: PromptGroup) -> None:
        """Generate and score what the group lacks, and the second group of the prompt where there is one.

        What is still being generated when enough samples have ended continues there, or is aborted.
        """
        running = {start_task(self._sample(group, sample)) for sample in group.unfinished}
        following: PromptGroup | None = group
        try:
            while following is not None:
                while not group.is_complete:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                known = group.ids
                complete, following, count = self._requests.end_group(group)
                self._groups[complete.order] = complete
                self._num_spare += count
                if following is not None:
                    self._groups[following.order], self._tasks[following.order] = following, self._tasks[complete.order]
                    new = [sample for sample in following.ids if sample not in known]
                    running |= {start_task(self._sample(following, sample)) for sample in new}
                else:
                    for task in running:
                        task.cancel()
                    # their tools and environments end too
                    await asyncio.gather(*running, return_exceptions=True)
                complete.results = await self._score(complete)
                self._ready.add(complete.order)
                if self._changed is not None:
                    self._changed.set()
        finally:
            for task in running:
                task.cancel()

    async def _sample(self, group: PromptGroup, index: int) -> None:
        item = group.item
        new = Task(
            tuple(item["prompt_ids"]),
            replace(self._requests.sampling, images=read_references(item["columns"])),
            self._requests.seed(group.index, index),
            item["label"],
            item["columns"],
        )
        self._generating += 1
        try:
            # interrupted by a weight sync: requested again, it continues when the engine does
            # its place changes when the group is split
            while (sample := group.samples[group.ids.index(index)]) is None or sample.finish == "aborted":
                task = replace(new, partial=None if sample is None else sample.response)
                sampled = await self._agents.sample(self._engine, task)
                group.samples[group.ids.index(index)] = sampled
        finally:
            self._generating -= 1
            if self._changed is not None:
                self._changed.set()

    def _choose(self, iteration: int, count: int) -> list[int] | None:
        """Return the groups that train next; None while some of these are not ready."""
        if self.admission.strategy == "drop":
            self._drop_overdue(iteration)
        if self._taken == 0 and len(self._ready) < self._num_warmup * self.admission.batch_prompts:
            return None
        return self.admission.choose(iteration, count, self._list_in_flight())

    async def _take(self, iteration: int, count: int) -> list[PromptGroup] | None:
        if (indexes := self._choose(iteration, count)) is None:
            return None
        # makes no room for other prompts: those taken count as those in flight do
        self._taken += count
        self._ready -= set(indexes)
        return [self._groups.pop(index) for index in indexes]

    def _list_in_flight(self) -> list[InFlight]:
        return self._requests.list_in_flight(self._groups.values(), lambda group: group.order in self._ready)

    def _drop_overdue(self, iteration: int) -> None:
        """Drop the groups that are too old, and start others for them."""
        overdue = self.admission.find_overdue(iteration, self._list_in_flight())
        for index in filter(self._groups.__contains__, overdue):  # not the second groups that are still to come
            if (task := self._tasks.pop(index, None)) is not None:
                task.cancel()
            group = self._groups.pop(index)
            self._ready.discard(index)
            self._dropped += 1
            self._dropped_tokens += sum(len(sample.sampled_versions) for sample in group.samples if sample is not None)
        self._admit()


async def _call(function: Callable[[], _Result]) -> _Result:
    """Call a function where the engine's coroutines run."""
    return function()


#: (partial responses, tokens that each may grow by) -> reports, and the responses in the same order
_Continuation = Callable[[Sequence[PartialResponse], int], tuple[list[WorkerReport], list[Generated]]]


class PartialSource:
    """Groups from the engine that shares its devices with training.

    More prompts than an iteration trains on are under way. In every iteration each of their responses grows by
    `slice_tokens`, and by as many again until enough groups are complete; the others continue in the next iteration, with its
    weights. MindSpeed-RL's partial rollout does the same but stops at any token; here it stops after full slices, so that a
    run repeats exactly, and resumes exactly, at any number of replicas.
    """

    def __init__(
        self,
        continue_responses: _Continuation,
        requests: Requests,
        admission: Admission,
        slice_tokens: int,
        over_sample_rate: float = 1.0,
    ) -> None:
        """Start nothing yet.

        Args:
            slice_tokens: by which a response grows at once.
            over_sample_rate: prompts under way beyond an iteration's, as a fraction of them.
        """
        self._continue, self._requests, self.admission = continue_responses, requests, admission
        self._slice_tokens = slice_tokens
        self._num_prompts = math.ceil((1 + over_sample_rate) * admission.batch_prompts)
        self._groups: list[PromptGroup] = []
        self._next = self._taken = 0
        self._taken_now = 0  # since the weights changed
        self._version = self._num_spare = 0

    def take(self, iteration: int, count: int) -> tuple[list[PromptGroup], list[WorkerReport]]:
        """See `GroupSource`."""
        reports: list[WorkerReport] = []
        # once in any case: the others grow, also where enough groups are complete already
        if self._taken_now == 0:
            reports += self._grow()
        while (
            indexes := self.admission.choose(
                iteration,
                count,
                self._requests.list_in_flight(self._groups, lambda group: group.is_complete),
            )
        ) is None:
            reports += self._grow()
        self._taken += count
        self._taken_now += count
        taken = [group for group in self._groups if group.order in indexes]
        self._groups = [group for group in self._groups if group.order not in indexes]
        if self._requests.num_spare:
            reports.append(WorkerReport(self._requests.report_spare(self._num_spare)))
            self._num_spare = 0
        return taken, reports

    def reject(self, count: int) -> None:
        """See `GroupSource`."""
        self._taken -= count
        self._taken_now -= count

    def before_push(self) -> None:
        """See `GroupSource`; between two rollouts nothing is being generated."""

    def after_push(self, version: int) -> None:
        """See `GroupSource`."""
        self._version, self._taken_now = version, 0

    def snapshot(self) -> tuple[list[PromptGroup], int, int]:
        """See `GroupSource`."""
        return list(self._groups), self._next, self._taken

    def restore(self, groups: list[PromptGroup], next_prompt: int, num_taken: int) -> None:
        """See `GroupSource`."""
        self._groups, self._next, self._taken = groups, next_prompt, num_taken

    def _grow(self) -> list[WorkerReport]:
        """Start as many prompts as may be under way, and let every response that has not ended grow by a slice."""
        in_flight = self._requests.list_in_flight(self._groups, lambda group: group.is_complete)
        room = self._num_prompts - self._taken_now - len(in_flight)
        for _ in range(room // (2 if self._requests.keeps_spare else 1)):
            self._groups.append(self._requests.new_group(self._next, self._version))
            self._next += 1
        slots: list[tuple[PromptGroup, int]] = []
        responses: list[PartialResponse] = []
        for group in self._groups:
            for index, sample in enumerate(group.samples):
                if not group.is_complete and (sample is None or sample.finish == "aborted"):
                    slots.append((group, index))
                    partial = None if sample is None else sample.response
                    seed = self._requests.seed(group.index, group.ids[index])
                    images = read_references(group.item["columns"])
                    responses.append(PartialResponse(tuple(group.item["prompt_ids"]), seed, partial, images))
        reports, continued = self._continue(responses, self._slice_tokens)
        for (group, index), response in zip(slots, continued, strict=True):
            images = read_references(group.item["columns"])
            group.samples[index] = Trajectory.from_response(group.item["prompt_ids"], response, images)
        self._groups = [part for group in self._groups for part in self._end(group)]
        return reports

    def _end(self, group: PromptGroup) -> list[PromptGroup]:
        """Return what becomes of a group after a slice: itself, or its complete part with what follows it."""
        if not group.is_complete:
            return [group]
        complete, following, count = self._requests.end_group(group)
        self._num_spare += count
        return [complete] if following is None else [complete, following]
