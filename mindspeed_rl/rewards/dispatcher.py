"""The event loop of the pool: sends jobs to worker processes, kills workers past their deadline, replaces dead ones.

The spawner process (`spawner.py`) forks the workers (`worker.py`). A call that exceeds its limit costs its worker: the value is
lost and counted, other workers get the remaining calls of the job, and a new worker is forked. The loop runs in the caller's
thread while that waits for a batch; between batches only the spawner watches the workers.
"""

from __future__ import annotations

import math
import os
import selectors
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from mindspeed_rl.isolation import spawner
from mindspeed_rl.isolation.channel import Channel, ChannelError, Message, pack
from mindspeed_rl.rewards.samples import LARGEST_SCORE, RewardResult, RewardSample, RewardSettings, State
from mindspeed_rl.rewards.scorer import Value
from mindspeed_rl.rewards.worker import Kind

_LOAD_LIMIT_S = 300.0  # a plug-in may import a large library
_LOAD_ATTEMPTS = 3
_ASYNC_GRACE_S = 2.0  # async calls have a soft limit in the worker; the hard one comes later
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


_ASYNC_CALLS_PER_JOB = 64
_MAX_ROWS_PER_JOB = 32

_Call = tuple[int, int]
"""Row of the batch, index of the function."""
_Failure = tuple[State, str]
"""State and error message."""


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
        failures: of the calls that returned nothing.
    """

    samples: list[RewardSample]
    num_open: int = 0
    values: dict[_Call, Value | None] = field(default_factory=dict)
    failures: dict[_Call, _Failure] = field(default_factory=dict)

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


def _split_open_calls(job: _Job, *, alone: bool) -> list[_Job]:
    """Return jobs for the open calls of a job; with `alone` one for each sample, so that the next crash names its sample."""
    row_functions: dict[int, list[int]] = {}
    for row, function in job.open:
        row_functions.setdefault(row, []).append(function)
    untouched = [] if alone else [row for row, functions in row_functions.items() if functions == job.functions]
    jobs = [_Job(job.batch, functions, [row], job.attempt) for row, functions in row_functions.items() if row not in untouched]
    return jobs + ([_Job(job.batch, job.functions, untouched, job.attempt)] if untouched else [])


@dataclass(eq=False)
class _Worker:
    id: int
    deadline: float
    channel: Channel | None = None
    ready: bool = False
    job: _Job | None = None
    kill_reason: _Failure | None = None

    @property
    def is_idle(self) -> bool:
        return self.ready and self.job is None and self.channel is not None and self.kill_reason is None


class Dispatcher:
    """Runs batches on `num_reward_workers` processes, which end with `close` or with the process that created them.

    Args:
        functions: names of the scorers.
        targets: name -> `module:function`, for those that no plug-in defines.
        counters: the dispatcher counts `retries` and `workers_replaced` here.

    Raises:
        ValueError: a scorer or a plug-in does not load.
        RuntimeError: workers die or exceed the time limit while they load.
    """

    def __init__(
        self, functions: Sequence[str], targets: Mapping[str, str], settings: RewardSettings, counters: Counter[str]
    ) -> None:
        self._names = ", ".join(functions)
        self._settings = settings
        self._counters = counters
        self.kinds: list[Kind] = []
        self._is_loaded = False
        self._load_failures = 0
        self._jobs: deque[_Job] = deque()
        self._workers: dict[int, _Worker] = {}
        self._num_workers_created = 0
        self._descriptors: deque[int] = deque()  # sockets of new workers that arrived before the messages with their ids
        self._error: Exception | None = None
        self._closed = False
        self._control, self._process = spawner.launch()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, _READ)
        self._spawner = Channel(self._control)
        memory_gib = settings.reward_memory_gib
        setup = {
            "op": "start",
            "worker": "mindspeed_rl.rewards.worker:run_worker",
            "functions": list(functions),
            "targets": dict(targets),
            "settings": asdict(settings),
            "memory_bytes": None if memory_gib is None else int(memory_gib * 2**30),
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
            "preload": sorted({t.partition(":")[0] for t in targets.values() if t.startswith("mindspeed_rl.rewards.")}),
        }
        try:
            self._spawner.send(setup)
            for _ in range(settings.num_reward_workers):
                self._add_worker()
            while not self._is_loaded:
                self._process_events(math.inf)
        except BaseException:
            self.close()
            raise

    def run(self, batch: Batch, timeout_s: float | None) -> None:
        """Run the batch until every call of it has a value or a failure.

        Raises:
            TimeoutError: `timeout_s` seconds were not enough; the batch is dropped, the pool stays usable.
            RuntimeError: the spawner process has ended, or the pool is closed.
        """
        if self._closed:
            raise self._error or RuntimeError("the reward pool is closed")
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._jobs.extend(_split_into_jobs(batch, self.kinds, self._settings.num_reward_workers))
        try:
            if batch.num_open:
                self._process_events(-math.inf)  # first the workers that died since the last batch
            while batch.num_open and time.monotonic() < deadline:
                self._process_events(deadline)
            if batch.num_open:
                self._drop(batch)
        except BaseException as error:  # after half a step the state is inconsistent
            self._error = error if isinstance(error, Exception) else None
            self.close()
            raise
        if batch.num_open:
            raise TimeoutError(f"{batch.num_open} reward calls for {len(batch.samples)} samples are open after {timeout_s:g} s")

    def close(self) -> None:
        """End every process."""
        if self._closed:
            return
        self._closed = True
        spawner.end(self._control, self._process)
        for worker in self._workers.values():
            if worker.channel is not None:
                worker.channel.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._selector.close()

    def _process_events(self, until: float) -> None:
        """Wait for events, at most until a time (-inf: not at all), handle them and send jobs to idle workers."""
        wake = min([until, *(worker.deadline for worker in self._workers.values())])
        for key, events in self._selector.select(None if wake == math.inf else max(0.0, wake - time.monotonic())):
            if key.data is None:
                self._read_spawner()
            elif key.data.channel is not None:
                self._read_worker(key.data, events)
        self._kill_expired_workers()
        self._assign_jobs()

    def _drop(self, batch: Batch) -> None:
        self._jobs = deque(job for job in self._jobs if job.batch is not batch)
        for worker in self._workers.values():
            if worker.job is not None and worker.job.batch is batch:
                worker.job = None
                self._kill(worker, ("timeout", "its batch was dropped"))

    # Workers

    def _add_worker(self) -> None:
        worker = _Worker(self._num_workers_created, time.monotonic() + _LOAD_LIMIT_S)
        self._num_workers_created += 1
        self._workers[worker.id] = worker
        self._spawner.send({"op": "fork", "id": worker.id})

    def _read_spawner(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 64)
        self._descriptors.extend(descriptors)
        if not data:
            raise RuntimeError(f"the reward pool's spawner process ended with status {self._process.wait()}; see its output")
        for message in self._spawner.receive_bytes(data):
            if message["op"] == "forked":
                worker = self._workers[message["id"]]
                worker.channel = Channel(socket.socket(fileno=self._descriptors.popleft()))
                self._selector.register(worker.channel, _READ, worker)
            else:
                self._replace(self._workers.pop(message["id"]), message["state"], message["reason"])

    def _read_worker(self, worker: _Worker, events: int = _READ) -> None:
        assert worker.channel is not None
        if events & _WRITE:
            worker.channel.flush()
        try:
            messages, alive = worker.channel.receive_ready()
            for message in messages:
                self._handle(worker, message)
        except (ChannelError, LookupError, TypeError) as error:
            # a reward function wrote to the connection, or changed a library that this needs
            alive = False
            if worker.kill_reason is None:
                self._kill(worker, ("crashed", f"its process sends no messages any more ({type(error).__name__}: {error})"))
        if alive:
            self._selector.modify(worker.channel, _READ | (_WRITE if worker.channel.unsent else 0), worker)
        else:
            self._close_channel(worker)  # the spawner reports its death

    def _close_channel(self, worker: _Worker) -> None:
        if worker.channel is not None:
            self._selector.unregister(worker.channel)
            worker.channel.close()
            worker.channel = None

    def _handle(self, worker: _Worker, message: Message) -> None:
        job = worker.job
        if message["op"] == "ready":
            worker.ready, worker.deadline = True, math.inf
            self.kinds = self.kinds or [Kind(**kind) for kind in message["functions"]]
            self._load_failures = 0
            self._is_loaded = True
        elif message["op"] == "broken":
            raise ValueError(message["error"])
        elif message["op"] == "value" and job is not None:
            call = (job.rows[message["sample"]], message["function"])
            if call not in job.open:
                return
            del job.open[call]
            if message["state"] == "ok":
                job.batch.settle(call, message["value"])
            else:
                job.failed[call] = (message["state"], message["error"])
            if not self._is_concurrent(job):
                worker.deadline = self._deadline(job)
        elif message["op"] == "done" and job is not None:
            worker.job, worker.deadline, worker.ready = None, math.inf, message["healthy"]
            self._finish(job)

    def _replace(self, worker: _Worker, state: State, reason: str) -> None:
        """Fail the call that a dead worker was making, requeue its other calls and have a new worker forked."""
        if worker.channel is not None:
            self._read_worker(worker)  # messages that it sent before it died
        self._close_channel(worker)
        self._counters["workers_replaced"] += 1
        if worker.job is not None:
            self._fail_calls(worker.job, worker.kill_reason or (state, reason))
        elif not worker.ready and not self._is_loaded:
            self._load_failures += 1
        if self._load_failures >= _LOAD_ATTEMPTS:
            raise RuntimeError(f"workers die while they load the reward functions ({self._names}): {reason}")
        self._add_worker()

    def _fail_calls(self, job: _Job, failure: _Failure) -> None:
        concurrent, batched = self._is_concurrent(job), self.kinds[job.functions[0]].batched
        if batched or not concurrent or len(job.open) == 1:
            for call in list(job.open) if batched else list(job.open)[:1]:
                del job.open[call]
                job.failed[call] = failure
        self._finish(job, alone=concurrent)

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

    def _assign_jobs(self) -> None:
        idle = [worker for worker in self._workers.values() if worker.is_idle]
        while idle and self._jobs:
            job = self._jobs.popleft()
            samples = [vars(job.batch.samples[row]) for row in job.rows]
            try:
                frame = pack({"op": "score", "functions": job.functions, "samples": samples})
            except ValueError as error:
                self._fail_unsendable(job, str(error))
                continue
            worker = idle.pop()
            assert worker.channel is not None
            worker.job, worker.deadline = job, self._deadline(job)
            worker.channel.send_soon(frame)
            if worker.channel.unsent:
                self._selector.modify(worker.channel, _READ | _WRITE, worker)

    def _fail_unsendable(self, job: _Job, reason: str) -> None:
        """Find the sample that cannot be sent among the job's rows and fail only that one."""
        if len(job.rows) > 1 and not self.kinds[job.functions[0]].batched:
            self._jobs.extendleft(_split_open_calls(job, alone=True))
            return
        failure: _Failure = ("failed", reason)
        job.failed, job.open, job.attempt = dict.fromkeys(job.open, failure), {}, 1
        self._finish(job)

    def _finish(self, job: _Job, alone: bool = False) -> None:
        """Queue the open calls of a job again, and under the policy "retry" the failed ones; record the other failures."""
        self._jobs.extendleft(_split_open_calls(job, alone=alone))
        if self._settings.reward_failure_policy != "retry" or job.attempt > 0:
            for call, failure in job.failed.items():
                job.batch.settle(call, None, failure)
            return
        self._counters["retries"] += len(job.failed)
        if self.kinds[job.functions[0]].batched and job.failed:
            self._jobs.append(_Job(job.batch, job.functions, job.rows, attempt=1))
        else:
            self._jobs.extend(_Job(job.batch, [function], [row], attempt=1) for row, function in job.failed)

    # Time

    def _kill_expired_workers(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if worker.deadline <= now and worker.channel is not None:
                self._read_worker(worker)  # its result may have arrived unread
            if worker.deadline > now:
                continue
            if worker.job is None:
                raise RuntimeError(f"loading the reward functions ({self._names}) took over {_LOAD_LIMIT_S:g} s")
            limit_s = self.kinds[next(iter(worker.job.open))[1]].timeout_s
            self._kill(worker, ("timeout", f"took longer than {limit_s:g} s"))

    def _kill(self, worker: _Worker, reason: _Failure) -> None:
        worker.deadline, worker.kill_reason = math.inf, reason
        self._spawner.send({"op": "kill", "id": worker.id})
