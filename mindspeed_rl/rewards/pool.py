"""A pool of worker processes that score responses; any of them may hang, crash or eat memory without stopping the run.

The pool's process runs one thread that owns all state below; callers leave commands in a queue and wait on their ticket. Workers are
forked by the spawner process (`spawner.py`) and do the work (`worker.py`). A call that takes longer than `verifier_timeout` costs its
worker its life: the value is lost and counted, the rest of the worker's job goes to others, a fresh worker is forked.
"""

from __future__ import annotations

import math
import os
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any

from mindspeed_rl.rewards import REWARDS, find
from mindspeed_rl.rewards.channel import Channel, pack
from mindspeed_rl.rewards.records import RewardResult, RewardSample, RewardSettings
from mindspeed_rl.rewards.totals import overlong_penalty, weighted_total

_LOAD_LIMIT_S = 300.0  # a plug-in may import a large library
_ASYNC_GRACE_S = 2.0  # async calls have a soft limit in the worker; the hard one comes later
_ASYNC_CALLS_PER_WORKER = 64
_MAX_ROWS_PER_JOB = 32
_FAILURE_WINDOW = 1024
_FAILURE_MIN_SAMPLES = 64


class RewardFailuresExceeded(RuntimeError):
    """More samples failed than `reward_failure_limit` allows."""


@dataclass(eq=False)
class RewardTicket:
    """A batch on its way; `RewardPool.collect` waits for it."""

    samples: list[RewardSample]
    num_open: int = 0
    values: list[dict[int, dict[str, float] | None]] = field(default_factory=list)  # row -> function -> parts
    errors: list[dict[int, tuple[str, str]]] = field(default_factory=list)  # row -> function -> (state, text)
    finished: threading.Event = field(default_factory=threading.Event)

    def done(self) -> bool:
        """True once collecting will not wait."""
        return self.finished.is_set()


@dataclass(eq=False)
class _Job:
    """Calls for one worker: `functions` on each of `rows`; `open` keeps the order in which the worker makes them."""

    ticket: RewardTicket
    functions: list[int]
    rows: list[int]
    attempt: int = 0
    open: dict[tuple[int, int], None] = field(default_factory=dict)
    failed: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.open = {(row, function): None for row in self.rows for function in self.functions}


@dataclass(eq=False)
class _Worker:
    id: int
    channel: Channel | None = None
    ready: bool = False
    job: _Job | None = None
    deadline: float = math.inf
    verdict: tuple[str, str] | None = None  # why the pool had it killed: (state, text)


class RewardPool:
    """Scores samples with several functions and adds the scores up.

    Use it as a context manager or call `close`. It may live in any process and thread; it needs neither Ray nor a device, and its
    processes end with the process that made it, however that ends.

    Args:
        functions: names in `REWARDS`, `module:function`, or names that a file in `settings.external_plugins` registers.
        weights: one for each function.
        settings: limits, policy and the parameters of built-in scorers.

    Raises:
        ValueError: an unknown function, a plug-in that does not load, or not one weight for each function; before any sample is scored.
    """

    def __init__(self, functions: Sequence[str], weights: Sequence[float] | None = None, *, settings: RewardSettings) -> None:
        self.functions = [_portable_name(name, settings) for name in functions]
        self.weights = [1.0] * len(self.functions) if weights is None else [float(weight) for weight in weights]
        if len(self.weights) != len(self.functions):
            raise ValueError(
                f"there are {len(self.functions)} reward functions ({', '.join(functions)}) but {len(self.weights)} weights"
            )
        if len(set(self.functions)) < len(self.functions):
            raise ValueError(f"reward functions are named twice: {', '.join(functions)}")
        self.settings = settings
        self.counters: Counter[str] = Counter()
        self._recent: deque[bool] = deque(maxlen=_FAILURE_WINDOW)
        self._commands: queue.SimpleQueue[RewardTicket | None] = queue.SimpleQueue()
        self._jobs: deque[_Job] = deque()
        self._workers: dict[int, _Worker] = {}
        self._next_worker = 0
        self._kinds: list[dict[str, bool]] = []
        self._load_failures = 0
        self._descriptors: deque[int] = deque()
        self._open_tickets: set[RewardTicket] = set()
        self._error: Exception | None = None
        self._loaded = threading.Event()
        self._closed = False
        self._start()

    # what callers use

    def submit(self, samples: Sequence[RewardSample]) -> RewardTicket:
        """Start scoring and return at once; hand the ticket to `collect`."""
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        ticket = RewardTicket(list(samples), values=[{} for _ in samples], errors=[{} for _ in samples])
        self._commands.put(ticket)
        self._wake.send(b"\0")
        return ticket

    def collect(self, ticket: RewardTicket, timeout_s: float | None = None) -> list[RewardResult]:
        """Wait for a ticket and return its results in the order of its samples.

        Raises:
            RewardFailuresExceeded: failures are above `reward_failure_limit`.
            TimeoutError: `timeout_s` seconds were not enough; the ticket may be collected again.
            RuntimeError: the pool itself is broken or closed.
        """
        if not ticket.finished.wait(timeout_s):
            raise TimeoutError(
                f"rewards of {len(ticket.samples)} samples are not ready after {timeout_s:g} s ({ticket.num_open} calls are open)"
            )
        if self._error is not None:
            raise self._error
        results = [self._result(ticket, row) for row in range(len(ticket.samples))]
        self._count_failures(results)
        return results

    def score(self, samples: Sequence[RewardSample], timeout_s: float | None = None) -> list[RewardResult]:
        """Score samples and wait for it: `collect(submit(samples))`."""
        return self.collect(self.submit(samples), timeout_s)

    def check(self, sample: RewardSample) -> RewardResult:
        """Score one sample and say at once, before training, which function cannot score it.

        Raises:
            ValueError: a function failed on the sample.
        """
        ticket = self.submit([sample])
        ticket.finished.wait()
        if self._error is not None:
            raise self._error
        for function, (state, text) in sorted(ticket.errors[0].items()):
            raise ValueError(
                f"reward function '{self.functions[function]}' cannot score a sample of the data set: {state}: {text}"
            )
        return self._result(ticket, 0)

    def close(self) -> None:
        """End every process of the pool. Tickets that are still open fail."""
        if self._closed:
            return
        self._closed = True
        self._commands.put(None)
        self._wake.send(b"\0")
        self._thread.join()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # results

    def _result(self, ticket: RewardTicket, row: int) -> RewardResult:
        parts: dict[str, float] = {}
        for function in sorted(ticket.values[row]):
            parts.update(ticket.values[row][function] or {})
        penalty = overlong_penalty(len(ticket.samples[row].response_ids), self.settings)
        for function, (state, text) in sorted(ticket.errors[row].items()):
            total = 0.0 if self.settings.reward_failure_policy == "zero" else None
            return RewardResult(total, parts, state, f"{self.functions[function]}: {text}", penalty)
        if not parts:
            return RewardResult(None, {}, "skipped", "", penalty)
        return RewardResult(weighted_total(parts, self.functions, self.weights) + penalty, parts, "ok", "", penalty)

    def _count_failures(self, results: list[RewardResult]) -> None:
        failures = [result for result in results if result.failed]
        self.counters["samples"] += len(results)
        self.counters.update(result.state for result in failures)
        self._recent.extend(result.failed for result in results)
        rate = sum(self._recent) / max(1, len(self._recent))
        enough = len(self._recent) >= _FAILURE_MIN_SAMPLES or len(failures) == len(results)
        if failures and enough and rate > self.settings.reward_failure_limit:
            states = ", ".join(
                f"{count} {state}" for state, count in Counter(result.state for result in failures).most_common()
            )
            raise RewardFailuresExceeded(
                f"{rate:.0%} of the last {len(self._recent)} samples have no reward, above reward_failure_limit="
                f"{self.settings.reward_failure_limit:g}; in this batch {states}, for example: {failures[0].error}"
            )

    # start and the thread

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "mindspeed_rl.rewards.spawner", str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        theirs.close()
        entries = [REWARDS.get(name, name) for name in self.functions]
        setup = {
            "op": "start",
            "functions": self.functions,
            "targets": {
                name: f"{e.__module__}:{e.__qualname__}" for name, e in zip(self.functions, entries) if not isinstance(e, str)
            },
            "settings": asdict(self.settings),
            "memory_bytes": int(self.settings.reward_memory_gib * 2**30),
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
            "preload": sorted(
                {e.partition(":")[0] for e in entries if isinstance(e, str) and e.startswith("mindspeed_rl.rewards.")}
            ),
        }
        self._spawner = Channel(self._control)
        self._spawner.send(setup)
        self._control.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()
        self._loaded.wait()
        if self._error is not None:
            error = self._error
            self.close()
            raise error

    def _run(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ, "spawner")
        self._selector.register(self._woken, selectors.EVENT_READ, "wake")
        for _ in range(self.settings.num_reward_workers):
            self._add_worker()
        try:
            while self._error is None and self._turn():
                pass
        finally:
            self._shut_down()

    def _turn(self) -> bool:
        """Wait for something and handle it; False once the pool is to close."""
        for key, events in self._selector.select(self._seconds_to_next_deadline()):
            if key.data == "spawner":
                self._hear_spawner()
            elif key.data == "wake":
                self._woken.recv(4096)
            else:
                self._hear_worker(key.data, events)
        while not self._commands.empty():
            ticket = self._commands.get()
            if ticket is None:
                return False
            self._admit(ticket)
        self._enforce_deadlines()
        self._hand_out_jobs()
        return True

    def _shut_down(self) -> None:
        self._control.close()  # the spawner takes this as the order to kill everything and end
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for worker in self._workers.values():
            if worker.channel is not None:
                worker.channel.close()
        self._selector.close()
        if self._error is None:
            self._error = RuntimeError("the reward pool was closed while samples were being scored")
        for ticket in self._open_tickets:
            ticket.finished.set()
        self._loaded.set()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error

    # workers

    def _add_worker(self) -> None:
        worker = _Worker(self._next_worker, deadline=time.monotonic() + _LOAD_LIMIT_S)
        self._next_worker += 1
        self._workers[worker.id] = worker
        self._spawner.send_soon(pack({"op": "fork", "id": worker.id}))

    def _hear_spawner(self) -> None:
        messages: list[dict[str, Any]] = []
        alive = True
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 16)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data, descriptors = b"", []
            self._descriptors.extend(descriptors)
            if not data:
                alive = False
                break
            messages += self._spawner.take(data)
        for message in messages:
            if message["op"] == "forked":
                connection = socket.socket(fileno=self._descriptors.popleft())
                connection.setblocking(False)
                worker = self._workers[message["id"]]
                worker.channel = Channel(connection)
                self._selector.register(worker.channel, selectors.EVENT_READ, worker)
            else:
                self._bury(self._workers.pop(message["id"]), message["state"], message["reason"])
        if not alive:
            self._fail(
                RuntimeError(f"the reward pool's spawner process ended (status {self._process.wait()}); see its output above")
            )

    def _hear_worker(self, worker: _Worker, events: int) -> None:
        assert worker.channel is not None
        if events & selectors.EVENT_WRITE:
            worker.channel.flush()
        messages, alive = worker.channel.receive_ready()
        for message in messages:
            self._take(worker, message)
        if alive:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.channel.has_unsent else 0)
            self._selector.modify(worker.channel, wanted, worker)
        else:  # its death is reported by the spawner
            self._selector.unregister(worker.channel)
            worker.channel.close()
            worker.channel = None

    def _take(self, worker: _Worker, message: dict[str, Any]) -> None:
        job = worker.job
        if message["op"] == "ready":
            worker.ready, worker.deadline = True, math.inf
            self._kinds = message["functions"]
            self._load_failures = 0
            self._loaded.set()
        elif message["op"] == "broken":
            self._fail(ValueError(message["error"]))
        elif message["op"] == "value" and job is not None:
            call = (job.rows[message["sample"]], message["function"])
            if call not in job.open:
                return
            del job.open[call]
            if message["state"] == "ok":
                self._settle(job.ticket, call, message["parts"], None)
            else:
                job.failed[call] = (message["state"], message["error"])
            if not self._runs_at_once(job):
                worker.deadline = time.monotonic() + self.settings.verifier_timeout
        elif message["op"] == "done" and job is not None:
            worker.job, worker.deadline = None, math.inf
            worker.ready = message["healthy"]
            self._finish(job)

    def _bury(self, worker: _Worker, state: str, reason: str) -> None:
        """A worker is dead: blame the call it was making, give its other calls to others, fork another."""
        if worker.channel is not None:
            self._hear_worker(worker, selectors.EVENT_READ)  # what it said before it died
        if worker.channel is not None:
            self._selector.unregister(worker.channel)
            worker.channel.close()
        if self._closed or self._error is not None:
            return
        self.counters["workers_replaced"] += 1
        if worker.job is not None:
            self._blame(worker.job, *(worker.verdict or (state, reason)))
        elif not worker.ready and worker.verdict is None and not self._kinds:
            self._load_failures += 1
        if self._load_failures >= 3:
            self._fail(
                RuntimeError(f"reward workers die while they load the reward functions ({', '.join(self.functions)}): {reason}")
            )
            return
        self._add_worker()

    def _blame(self, job: _Job, state: str, reason: str) -> None:
        at_once = self._runs_at_once(job)
        batched = self._kinds[job.functions[0]]["batched"]
        if batched or len(job.open) == 1 or not at_once:
            guilty = list(job.open) if batched else list(job.open)[:1]
            for call in guilty:
                del job.open[call]
                job.failed[call] = (state, reason)
        self._finish(job, alone=at_once)

    def _runs_at_once(self, job: _Job) -> bool:
        kind = self._kinds[job.functions[0]]
        return kind["batched"] or kind["is_async"]

    # jobs

    def _admit(self, ticket: RewardTicket) -> None:
        """Cut a ticket into jobs."""
        rows = [row for row, sample in enumerate(ticket.samples) if _wants_rules(sample)]
        ticket.num_open = len(rows) * len(self.functions)
        if ticket.num_open == 0:
            ticket.finished.set()
            return
        self._open_tickets.add(ticket)
        plain = [i for i, kind in enumerate(self._kinds) if not kind["batched"] and not kind["is_async"]]
        workers = self.settings.num_reward_workers
        if plain:
            self._cut(ticket, plain, rows, min(_MAX_ROWS_PER_JOB, math.ceil(len(rows) / (4 * workers))))
        for i, kind in enumerate(self._kinds):
            if kind["batched"]:
                self._cut(ticket, [i], rows, len(rows))
            elif kind["is_async"]:
                self._cut(ticket, [i], rows, min(_ASYNC_CALLS_PER_WORKER, math.ceil(len(rows) / workers)))

    def _cut(self, ticket: RewardTicket, functions: list[int], rows: list[int], size: int) -> None:
        self._jobs.extend(_Job(ticket, functions, rows[start : start + size]) for start in range(0, len(rows), size))

    def _hand_out_jobs(self) -> None:
        idle = [w for w in self._workers.values() if w.ready and w.job is None and w.channel is not None and w.verdict is None]
        for worker in idle:
            if not self._jobs:
                return
            job = self._jobs.popleft()
            samples = [vars(job.ticket.samples[row]) for row in job.rows]
            try:
                frame = pack({"op": "score", "functions": job.functions, "samples": samples})
            except ValueError as error:
                self._refuse(job, str(error))
                continue
            grace_s = _ASYNC_GRACE_S if self._kinds[job.functions[0]]["is_async"] else 0.0
            worker.job, worker.deadline = job, time.monotonic() + self.settings.verifier_timeout + grace_s
            worker.channel.send_soon(frame)
            if worker.channel.has_unsent:
                self._selector.modify(worker.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def _refuse(self, job: _Job, reason: str) -> None:
        """A sample cannot be sent: find it among the job's rows, and fail it alone."""
        if len(job.rows) > 1 and not self._kinds[job.functions[0]]["batched"]:
            self._jobs.extendleft(replace(job, rows=[row], open={}, failed={}) for row in job.rows)
            return
        job.failed = {call: ("failed", reason) for call in job.open}
        job.open, job.attempt = {}, 1
        self._finish(job)

    def _finish(self, job: _Job, alone: bool = False) -> None:
        """A worker is through with a job: queue what it left open, and try failed calls again where the policy says so."""
        by_row: dict[int, list[int]] = {}
        for row, function in job.open:
            by_row.setdefault(row, []).append(function)
        same = [row for row, functions in by_row.items() if functions == job.functions]
        if alone:
            same = []
        for row, functions in by_row.items():
            if row not in same:
                self._jobs.appendleft(_Job(job.ticket, functions, [row], job.attempt))
        if same:
            self._jobs.appendleft(_Job(job.ticket, job.functions, same, job.attempt))
        if self.settings.reward_failure_policy == "retry" and job.attempt == 0:
            self.counters["retries"] += len(job.failed)
            if job.failed and self._kinds[job.functions[0]]["batched"]:
                self._jobs.append(_Job(job.ticket, job.functions, job.rows, 1))
            else:
                self._jobs.extend(_Job(job.ticket, [function], [row], 1) for row, function in job.failed)
            return
        for call, failure in job.failed.items():
            self._settle(job.ticket, call, None, failure)

    def _settle(
        self, ticket: RewardTicket, call: tuple[int, int], parts: dict[str, float] | None, failure: tuple[str, str] | None
    ) -> None:
        row, function = call
        if failure is None:
            ticket.values[row][function] = parts
        else:
            ticket.errors[row][function] = failure
        ticket.num_open -= 1
        if ticket.num_open == 0:
            self._open_tickets.discard(ticket)
            ticket.finished.set()

    # time

    def _seconds_to_next_deadline(self) -> float | None:
        deadline = min((worker.deadline for worker in self._workers.values()), default=math.inf)
        return None if deadline == math.inf else max(0.0, deadline - time.monotonic())

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if worker.deadline <= now and worker.channel is not None:
                self._hear_worker(worker, selectors.EVENT_READ)  # its answer may be waiting to be read
            if worker.deadline > now:
                continue
            if worker.job is None and not worker.ready:
                self._fail(
                    RuntimeError(
                        f"loading the reward functions ({', '.join(self.functions)}) took longer than {_LOAD_LIMIT_S:g} s"
                    )
                )
                return
            worker.deadline = math.inf
            worker.verdict = ("timeout", f"took longer than verifier_timeout ({self.settings.verifier_timeout:g} s)")
            self._spawner.send_soon(pack({"op": "kill", "id": worker.id}))


def _portable_name(name: str, settings: RewardSettings) -> str:
    """Return the name under which a worker process finds the function.

    Raises:
        ValueError: unknown name and no plug-in that may define it, or a function that another process cannot import.
    """
    if name not in REWARDS and settings.external_plugins:
        return name  # a plug-in may define it; the worker says so if none does
    entry = find(name)
    if isinstance(entry, str):
        return name
    module, qualname = entry.__module__, entry.__qualname__
    if module == "__main__" or "<" in qualname:
        raise ValueError(
            f"reward function '{name}' is defined in {module}.{qualname}, which a worker process cannot import; "
            "put it in a module (module:function) or in a file given by external_plugins"
        )
    return name


def _wants_rules(sample: RewardSample) -> bool:
    """False for rows that the column `categories` leaves to the reward model."""
    categories = sample.columns.get("categories", True)
    return categories not in (False, 0, "false", "False", "0")
