"""Batches of samples on worker processes: jobs for the workers, deadlines of their calls, what is done again.

A call that exceeds its limit costs its worker: the value is lost and counted, other workers get the remaining calls of the job,
and a new worker is forked.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from mindspeed_rl.isolation.channel import Message
from mindspeed_rl.isolation.pool import Worker, WorkerEndedError, WorkerError, WorkerPool
from mindspeed_rl.rewards.samples import LARGEST_SCORE, RewardResult, RewardSample, RewardSettings, State
from mindspeed_rl.rewards.scorer import Value
from mindspeed_rl.rewards.worker import Kind

_LOAD_LIMIT_S = 300.0  # a plug-in may import a large library
_LOAD_ATTEMPTS = 3
_ASYNC_GRACE_S = 2.0  # async calls have a soft limit in the worker; the hard one comes later
_ASYNC_CALLS_PER_JOB = 64
_MAX_ROWS_PER_JOB = 32

_Call = tuple[int, int]
"""Row of the batch, index of the function."""
_Failure = tuple[State, str]
"""State and error message."""
_CallResult = tuple[_Call, Value | None, _Failure | None]
"""A call, and its value or its failure."""


def _compute_weighted_total(parts: Mapping[str, float], functions: Sequence[str], weights: Sequence[float]) -> float:
    """Return the sum of weight times score over the functions that had an opinion."""
    return sum(weight * parts[name] for name, weight in zip(functions, weights) if name in parts)


def _compute_overlong_penalty(num_tokens: int, settings: RewardSettings) -> float:
    """Return MindSpeed-RL's length penalty: 0 up to the buffer, then linear down to minus the factor.

    exceed = min(length - (rollout_max_tokens - overlong_buffer), overlong_buffer); min(-exceed / overlong_buffer * factor, 0).
    """
    if not settings.overlong_buffer_enable:
        return 0.0
    buffer = settings.overlong_buffer
    exceed = min(num_tokens - (settings.rollout_max_tokens - buffer), buffer)
    return min(-exceed / buffer * settings.overlong_buffer_penalty_factor, 0.0)


@dataclass(eq=False)
class Batch:
    """Samples in the pool.

    Attributes:
        num_open: calls that have neither a value nor a failure yet.
        values: what the functions returned.
        failures: failures of the calls that returned nothing.
        dropped: its results are no longer needed.
    """

    samples: list[RewardSample]
    num_open: int = 0
    values: dict[_Call, Value | None] = field(default_factory=dict)
    failures: dict[_Call, _Failure] = field(default_factory=dict)
    dropped: bool = False

    def settle(self, call: _Call, value: Value | None, failure: _Failure | None = None) -> None:
        """Record the result of a call."""
        if failure is None:
            self.values[call] = value
        else:
            self.failures[call] = failure
        self.num_open -= 1

    def result(self, row: int, functions: Sequence[str], weights: Sequence[float], settings: RewardSettings) -> RewardResult:
        """Return the result of a sample."""
        parts: dict[str, float] = {}
        notes: dict[str, str] = {}
        failure: _Failure | None = None
        for index, name in enumerate(functions):
            value = self.values.get((row, index))
            if value is not None:
                parts.update(value[0])
                notes.update(value[1])
            if failure is None and (row, index) in self.failures:
                state, text = self.failures[row, index]
                failure = (state, f"{name}: {text}")
        sample = self.samples[row]
        penalty = _compute_overlong_penalty(len(sample.response_ids), settings)
        penalty -= settings.missing_eos_penalty if sample.truncated else 0.0
        total = _compute_weighted_total(parts, functions, weights) + penalty
        if failure is None and not abs(total) <= LARGEST_SCORE:
            names = " and ".join(name for name in functions if name in parts)
            failure = ("failed", f"{names}: the weighted total {total:g} is not a finite number in float32")
        if failure is not None:
            total = 0.0 if settings.reward_failure_policy == "zero" else None
            return RewardResult(total, parts, failure[0], failure[1], penalty, notes)
        if not parts:
            return RewardResult(None, {}, "skipped", "", penalty, notes)
        return RewardResult(total, parts, "ok", "", penalty, notes)


@dataclass(eq=False)
class _Job:
    """Calls for one worker: each of `functions` on each of `rows`.

    Attributes:
        attempt: 1 for calls that failed before.
        open: the calls without a result, in the order in which the worker makes them.
    """

    batch: Batch
    functions: list[int]
    rows: list[int]
    attempt: int = 0
    open: dict[_Call, None] = field(init=False)
    failed: dict[_Call, _Failure] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.open = {(row, function): None for row in self.rows for function in self.functions}

    def read_reply(self, message: Message) -> bool | _CallResult:
        """Read a message of the job's worker: the result of a call, or after the last one that the worker is healthy."""
        if message["op"] == "done":
            return bool(message["healthy"])
        call = self.rows[message["sample"]], int(message["function"])
        failure = None if message["state"] == "ok" else (message["state"], message["error"])
        return call, message["value"], failure

    def settle(self, result: _CallResult) -> bool:
        """Record the result of a call; return False for a call that has one already."""
        call, value, failure = result
        if call not in self.open:
            return False
        del self.open[call]
        if failure is None:
            self.batch.settle(call, value)
        else:
            self.failed[call] = failure
        return True


def _split_into_jobs(batch: Batch, kinds: Sequence[Kind], num_workers: int) -> list[_Job]:
    """Split a batch into jobs and set its number of open calls.

    Plain functions share a job of a few samples, so that the workers finish at about the same time; an async function gets many
    samples, which it awaits together; a function that scores batches gets all.
    """
    # the column `categories` leaves a row to the reward model
    left_to_model = (False, 0, "false", "False", "0")
    rows = [row for row, sample in enumerate(batch.samples) if sample.columns.get("categories", True) not in left_to_model]
    batch.num_open = len(rows) * len(kinds)
    if batch.num_open == 0:
        return []
    plain = [index for index, kind in enumerate(kinds) if not kind.batched and not kind.is_async]
    job_sizes = [(plain, min(_MAX_ROWS_PER_JOB, math.ceil(len(rows) / (4 * num_workers))))] if plain else []
    for index, kind in enumerate(kinds):
        if kind.batched:
            job_sizes.append(([index], len(rows)))
        elif kind.is_async:
            job_sizes.append(([index], min(_ASYNC_CALLS_PER_JOB, math.ceil(len(rows) / num_workers))))
    return [_Job(batch, functions, rows[i : i + size]) for functions, size in job_sizes for i in range(0, len(rows), size)]


def _split_open_calls(job: _Job, *, by_sample: bool) -> list[_Job]:
    """Return jobs for the open calls of a job; with `by_sample` one for each sample, so that a further crash names it."""
    row_functions: dict[int, list[int]] = {}
    for row, function in job.open:
        row_functions.setdefault(row, []).append(function)
    untouched = [] if by_sample else [row for row, functions in row_functions.items() if functions == job.functions]
    jobs = [_Job(job.batch, functions, [row], job.attempt) for row, functions in row_functions.items() if row not in untouched]
    return jobs + ([_Job(job.batch, job.functions, untouched, job.attempt)] if untouched else [])


class Dispatcher:
    """Runs batches on `num_reward_workers` processes, in one event loop.

    Args:
        functions: names of the scorers.
        targets: name -> `module:function`, for those that no plug-in defines.
        counters: the dispatcher counts `retries` and `workers_replaced` here.

    Attributes:
        kinds: kinds of the functions; there after `start`.
    """

    def __init__(
        self, functions: Sequence[str], targets: Mapping[str, str], settings: RewardSettings, counters: Counter[str]
    ) -> None:
        self._names = ", ".join(functions)
        self._settings = settings
        self._counters = counters
        self.kinds: list[Kind] = []
        self._is_loaded = False
        self._num_load_failures = 0
        self._jobs: deque[_Job] = deque()
        self._running: dict[_Job, Worker] = {}
        self._slots: list[asyncio.Task[None]] = []
        self._error: BaseException | None = None
        self._closed = False
        memory_gib = settings.reward_memory_gib
        self._pool = WorkerPool(
            "mindspeed_rl.rewards.worker:run_worker",
            {target.partition(":")[0] for target in targets.values() if target.startswith("mindspeed_rl.rewards.")},
            owner="the reward pool",
            memory_bytes=None if memory_gib is None else int(memory_gib * 2**30),
            memory_reason="took more memory than reward_memory_gib",
            setup={"functions": list(functions), "targets": dict(targets), "settings": asdict(settings)},
        )

    async def start(self) -> None:
        """Start the processes and wait until the first one has loaded the functions.

        Raises:
            ValueError: a scorer or a plug-in does not load.
            RuntimeError: workers die or exceed the time limit while they load.
        """
        self._changed = asyncio.get_running_loop().create_future()
        self._pool.launch()
        self._slots = [asyncio.create_task(self._run_slot()) for _ in range(self._settings.num_reward_workers)]
        while not self._is_loaded:
            await self._wait(None)

    async def run(self, batch: Batch, timeout_s: float | None) -> None:
        """Run the batch until every call of it has a value or a failure.

        Raises:
            TimeoutError: `timeout_s` seconds were not enough; the batch is dropped, the pool stays usable.
            RuntimeError: the spawner process has ended, or the pool is closed.
        """
        if self._closed:
            raise self._error or RuntimeError("the reward pool is closed")
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._jobs.extend(_split_into_jobs(batch, self.kinds, self._settings.num_reward_workers))
        self._notify()
        try:
            while batch.num_open and (left_s := deadline - time.monotonic()) > 0:
                await self._wait(None if left_s == math.inf else left_s)
        finally:
            if batch.num_open:
                self._drop(batch)
        if batch.num_open:
            raise TimeoutError(f"{batch.num_open} reward calls for {len(batch.samples)} samples are open after {timeout_s:g} s")

    async def close(self) -> None:
        """End every process; may be called twice."""
        if self._closed:
            return
        self._closed = True
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        await self._pool.close()

    def _notify(self) -> None:
        """Wake all that wait for jobs, results or kinds."""
        self._changed.set_result(None)
        self._changed = asyncio.get_running_loop().create_future()

    async def _wait(self, timeout_s: float | None) -> None:
        """Wait for the next change; raise the error of a slot, after which the pool is closed."""
        await asyncio.wait([self._changed, *self._slots], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        errors = [slot.exception() for slot in self._slots if slot.done()]
        if errors:
            self._error = errors[0]
            await self.close()
            raise errors[0] or AssertionError("a slot ends only by an error")

    def _drop(self, batch: Batch) -> None:
        batch.dropped = True
        self._jobs = deque(job for job in self._jobs if job.batch is not batch)
        for job, worker in self._running.items():
            if job.batch is batch:
                worker.kill("timeout", "its batch was dropped")

    # Workers

    async def _run_slot(self) -> None:
        """Keep a worker busy, and fork another one when it has ended."""
        while True:
            job: _Job | None = None
            try:
                worker = await self._load_worker()
                while True:
                    job = await self._take_job(worker)
                    await self._run_job(worker, job)
                    job = None
            except WorkerEndedError as ended:
                self._replace(ended, job)

    async def _load_worker(self) -> Worker:
        """Fork a worker and wait until it has loaded the functions."""
        deadline = time.monotonic() + _LOAD_LIMIT_S
        try:
            worker = await self._pool.fork(_LOAD_LIMIT_S)
            kinds = await worker.receive(_read_kinds, deadline)
        except TimeoutError:
            raise RuntimeError(f"loading the reward functions ({self._names}) took over {_LOAD_LIMIT_S:g} s") from None
        except WorkerEndedError:
            raise
        except WorkerError as error:
            raise RuntimeError(str(error)) from None
        if isinstance(kinds, str):
            raise ValueError(kinds)
        self.kinds = self.kinds or kinds
        self._is_loaded, self._num_load_failures = True, 0
        self._notify()
        return worker

    async def _take_job(self, worker: Worker) -> _Job:
        """Return the next job; a worker that has ended meanwhile raises."""
        while not (self._jobs and worker.alive):
            await asyncio.wait([self._changed, worker.ended], return_when=asyncio.FIRST_COMPLETED)
            if worker.ended.done():
                raise worker.ended.result()
        return self._jobs.popleft()

    async def _run_job(self, worker: Worker, job: _Job) -> None:
        """Run a job, and raise the end of its worker if it does not finish."""
        samples = [vars(job.batch.samples[row]) for row in job.rows]
        try:
            worker.send({"op": "score", "functions": job.functions, "samples": samples})
        except ValueError as error:
            self._fail_unsendable(job, str(error))
            return
        self._running[job] = worker
        try:
            healthy = await self._receive_values(worker, job)
        finally:
            del self._running[job]
        self._finish(job)
        if not healthy:
            await asyncio.wait([worker.ended])  # it ends by itself

    async def _receive_values(self, worker: Worker, job: _Job) -> bool:
        """Receive the results of a job, each within its limit; return False if the worker is about to end itself."""
        deadline = self._deadline(job)
        while True:
            try:
                value = await worker.receive(job.read_reply, deadline)
            except TimeoutError:
                value = None
            if isinstance(value, bool):
                return value
            if value is not None and job.settle(value):
                if not job.batch.num_open:
                    self._notify()
                if not self._is_concurrent(job):
                    deadline = self._deadline(job)
            elif time.monotonic() >= deadline:
                limit_s = self.kinds[next(iter(job.open))[1]].timeout_s
                worker.kill("timeout", f"took longer than {limit_s:g} s")
                deadline = math.inf

    def _replace(self, ended: WorkerEndedError, job: _Job | None) -> None:
        """Fail the call that a worker was making when it ended, and queue its other calls again."""
        if self._pool.failure is not None:
            raise RuntimeError(self._pool.failure)
        self._counters["workers_replaced"] += 1
        if job is not None:
            self._fail_calls(job, (ended.state, ended.reason))
        elif not self._is_loaded:
            self._num_load_failures += 1
        if self._num_load_failures >= _LOAD_ATTEMPTS:
            raise RuntimeError(f"workers die while they load the reward functions ({self._names}): {ended.reason}")

    def _fail_calls(self, job: _Job, failure: _Failure) -> None:
        concurrent, batched = self._is_concurrent(job), self.kinds[job.functions[0]].batched
        if batched or not concurrent or len(job.open) == 1:
            for call in list(job.open) if batched else list(job.open)[:1]:
                del job.open[call]
                job.failed[call] = failure
        self._finish(job, by_sample=concurrent)

    # Jobs

    def _is_concurrent(self, job: _Job) -> bool:
        """Return True for jobs whose calls end together, so that a timeout cannot be attributed to one of them."""
        kind = self.kinds[job.functions[0]]
        return kind.batched or kind.is_async

    def _deadline(self, job: _Job) -> float:
        """Return the time at which the next open call of the job exceeds its limit."""
        if not job.open:
            return math.inf
        _, function = next(iter(job.open))
        kind = self.kinds[function]
        return time.monotonic() + kind.timeout_s + (min(_ASYNC_GRACE_S, kind.timeout_s) if kind.is_async else 0.0)

    def _fail_unsendable(self, job: _Job, reason: str) -> None:
        """Find the sample that cannot be sent among the job's rows and fail only that one."""
        if len(job.rows) > 1 and not self.kinds[job.functions[0]].batched:
            self._jobs.extendleft(_split_open_calls(job, by_sample=True))
            self._notify()
            return
        failure: _Failure = ("failed", reason)
        job.failed, job.open, job.attempt = dict.fromkeys(job.open, failure), {}, 1
        self._finish(job)

    def _finish(self, job: _Job, by_sample: bool = False) -> None:
        """Queue the open calls of a job again, and under the policy "retry" the failed ones; record the other failures."""
        if job.batch.dropped:
            return
        self._jobs.extendleft(_split_open_calls(job, by_sample=by_sample))
        if self._settings.reward_failure_policy != "retry" or job.attempt > 0:
            for call, failure in job.failed.items():
                job.batch.settle(call, None, failure)
        else:
            self._counters["retries"] += len(job.failed)
            if self.kinds[job.functions[0]].batched and job.failed:
                self._jobs.append(_Job(job.batch, job.functions, job.rows, attempt=1))
            else:
                self._jobs.extend(_Job(job.batch, [function], [row], attempt=1) for row, function in job.failed)
        self._notify()


def _read_kinds(message: Message) -> list[Kind] | str:
    """Read the first message of a worker: the kinds of its functions, or why they do not load."""
    if message["op"] == "broken":
        return str(message["error"])
    return [Kind(**kind) for kind in message["functions"]]
