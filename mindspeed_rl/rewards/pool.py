"""A pool of worker processes that score responses; any of them may hang, crash or eat memory without stopping the run.

The pool's process runs one thread that owns all state below; callers leave tickets in a queue and wait for them. Workers are
forked by the spawner process (`spawner.py`) and do the work (`worker.py`). A call that outlasts its limit costs its worker its
life: the value is lost and counted, the rest of the worker's job goes to others, a fresh worker is forked.
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
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mindspeed_rl.rewards import REWARDS, find
from mindspeed_rl.rewards.channel import Channel, pack
from mindspeed_rl.rewards.jobs import Failure, Job, RewardTicket, cut, leftovers
from mindspeed_rl.rewards.records import RewardResult, RewardSample, RewardSettings, reward_functions
from mindspeed_rl.rewards.worker import Kind

if TYPE_CHECKING:
    from mindspeed_rl.config.rl import RLConfig

_LOAD_LIMIT_S = 300.0  # a plug-in may import a large library
_LOAD_ATTEMPTS = 3
_ASYNC_GRACE_S = 2.0  # async calls have a soft limit in the worker; the hard one comes later
_FAILURE_WINDOW, _FAILURE_MIN_SAMPLES = 1024, 64
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class RewardFailuresExceeded(RuntimeError):
    """More samples failed than `reward_failure_limit` allows."""


@dataclass(eq=False)
class _Worker:
    id: int
    deadline: float
    channel: Channel | None = None
    ready: bool = False
    job: Job | None = None
    verdict: Failure | None = None  # why the pool had it killed


class RewardPool:
    """Scores samples with several functions and adds the scores up.

    Use it as a context manager or call `close`. It may live in any process and thread and needs neither Ray nor a device. Its
    processes end with the process that made it, however that ends.

    Args:
        functions: names in `REWARDS`, `module:function`, or names that a file in `settings.external_plugins` registers.
        weights: one for each function; 1.0 each if not given.
        settings: limits, policy and the parameters of built-in scorers.

    Attributes:
        counters: since the start: samples, each kind of failure, retries, workers_replaced.

    Raises:
        ValueError: an unknown function, a plug-in that does not load, or not one weight for each function.
    """

    def __init__(self, functions: Sequence[str], weights: Sequence[float] | None = None, *, settings: RewardSettings) -> None:
        self.functions = list(functions)
        self.weights = [1.0] * len(functions) if weights is None else [float(weight) for weight in weights]
        if len(self.weights) != len(functions):
            raise ValueError(f"{len(functions)} reward functions ({', '.join(functions)}) but {len(self.weights)} weights")
        if len(set(functions)) < len(functions):
            raise ValueError(f"a reward function is named twice: {', '.join(functions)}")
        self.settings = settings
        self.counters: Counter[str] = Counter()
        self._targets = _targets(functions, settings)
        self._recent: deque[bool] = deque(maxlen=_FAILURE_WINDOW)
        self._submitted: queue.SimpleQueue[RewardTicket | None] = queue.SimpleQueue()
        self._jobs: deque[Job] = deque()
        self._workers: dict[int, _Worker] = {}
        self._num_workers_made = 0
        self._load_failures = 0
        self._kinds: list[Kind] = []
        self._descriptors: deque[int] = deque()
        self._open_tickets: set[RewardTicket] = set()
        self._error: Exception | None = None
        self._loaded = threading.Event()
        self._gate = threading.Lock()  # between submitting and shutting down
        self._closed = False
        self._start()

    @classmethod
    def from_config(cls, rl: RLConfig, *, max_tokens: int) -> RewardPool:
        """Build the pool that `rl_config` asks for; `max_tokens` is the generation limit."""
        functions, weights = reward_functions(rl)
        return cls(functions, weights, settings=RewardSettings.from_config(rl, max_tokens=max_tokens))

    # What callers use

    def submit(self, samples: Sequence[RewardSample]) -> RewardTicket:
        """Start scoring and return at once; hand the ticket to `collect`."""
        ticket = RewardTicket(list(samples))
        with self._gate:
            if self._closed:
                raise self._error or RuntimeError("the reward pool is closed")
            self._submitted.put(ticket)
        self._wake.send(b"\0")
        return ticket

    def collect(self, ticket: RewardTicket, timeout_s: float | None = None) -> list[RewardResult]:
        """Wait for a ticket and return its results in the order of its samples.

        Raises:
            RewardFailuresExceeded: failures are above `reward_failure_limit`.
            TimeoutError: `timeout_s` seconds were not enough; the ticket may be collected again.
            RuntimeError: the pool itself is broken or closed.
        """
        self._wait(ticket, timeout_s)
        results = [ticket.result(row, self.functions, self.weights, self.settings) for row in range(len(ticket.samples))]
        self._count_failures(results)
        return results

    def score(self, samples: Sequence[RewardSample], timeout_s: float | None = None) -> list[RewardResult]:
        """Score samples and wait for it: `collect(submit(samples))`."""
        return self.collect(self.submit(samples), timeout_s)

    def check(self, sample: RewardSample) -> RewardResult:
        """Score one sample before training starts; failures are not counted but raised.

        Raises:
            ValueError: a function cannot score the sample.
        """
        ticket = self.submit([sample])
        self._wait(ticket, None)
        for (_, function), (state, text) in sorted(ticket.failures.items()):
            raise ValueError(
                f"reward function '{self.functions[function]}' cannot score a sample of the dataset ({state}): {text}"
            )
        return ticket.result(0, self.functions, self.weights, self.settings)

    def close(self) -> None:
        """End every process of the pool. Tickets that are still open fail."""
        if not self._closed:
            self._closed = True
            self._submitted.put(None)
            self._wake.send(b"\0")
        self._thread.join()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _wait(self, ticket: RewardTicket, timeout_s: float | None) -> None:
        if not ticket.finished.wait(timeout_s):
            raise TimeoutError(
                f"{ticket.num_open} reward calls for {len(ticket.samples)} samples are open after {timeout_s:g} s"
            )
        if ticket.num_open:
            raise self._error or RuntimeError("the reward pool is closed")

    def _count_failures(self, results: list[RewardResult]) -> None:
        failures = [result for result in results if result.failed]
        self.counters["samples"] += len(results)
        self.counters.update(result.state for result in failures)
        self._recent.extend(result.failed for result in results)
        rate = sum(self._recent) / max(1, len(self._recent))
        enough = len(self._recent) >= _FAILURE_MIN_SAMPLES or len(failures) == len(results)
        if failures and enough and rate > self.settings.reward_failure_limit:
            states = Counter(result.state for result in failures).most_common()
            raise RewardFailuresExceeded(
                f"{rate:.0%} of the last {len(self._recent)} samples have no reward, more than rl_config.reward_failure_limit="
                f"{self.settings.reward_failure_limit:g}; in this batch: {', '.join(f'{n} {state}' for state, n in states)}; "
                f"for example {failures[0].error}"
            )

    # The thread

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        self._woken, self._wake = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mindspeed_rl.rewards.spawner", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        theirs.close()
        memory_gib = self.settings.reward_memory_gib
        setup = {
            "op": "start",
            "functions": self.functions,
            "targets": self._targets,
            "settings": asdict(self.settings),
            "memory_bytes": None if memory_gib is None else int(memory_gib * 2**30),
            "sys_path": [os.path.abspath(entry) for entry in sys.path],
            "preload": sorted({t.partition(":")[0] for t in self._targets.values() if t.startswith("mindspeed_rl.rewards.")}),
        }
        self._spawner = Channel(self._control)
        self._spawner.send(setup)
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()
        self._loaded.wait()
        if self._error is not None:
            error = self._error
            self.close()
            raise error

    def _run(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, _READ, "spawner")
        self._selector.register(self._woken, _READ, "wake")
        try:
            for _ in range(self.settings.num_reward_workers):
                self._add_worker()
            while self._error is None and self._turn():
                pass
        except Exception as error:  # a bug here must reach the callers, who would wait for ever
            self._fail(error)
        finally:
            self._shut_down()

    def _turn(self) -> bool:
        """Wait for something and handle it; False once the pool is to close."""
        for key, events in self._selector.select(self._seconds_to_next_deadline()):
            if key.data == "spawner":
                self._hear_spawner()
            elif key.data == "wake":
                self._woken.recv(4096)
            elif key.data.channel is not None:
                self._hear_worker(key.data, events)
        while self._loaded.is_set() and not self._submitted.empty():
            ticket = self._submitted.get()
            if ticket is None:
                return False
            jobs = cut(ticket, self._kinds, self.settings.num_reward_workers)
            if jobs:
                self._open_tickets.add(ticket)
                self._jobs.extend(jobs)
        self._enforce_deadlines()
        self._hand_out_jobs()
        return True

    def _shut_down(self) -> None:
        self._control.close()  # the spawner takes this as the order to kill everything and end
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for worker in self._workers.values():
            if worker.channel is not None:
                worker.channel.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._selector.close()
        with self._gate:
            self._closed = True
        while not self._submitted.empty():
            ticket = self._submitted.get()
            if ticket is not None:
                ticket.num_open = len(ticket.samples) * len(self.functions)
                self._open_tickets.add(ticket)
        for ticket in self._open_tickets:
            ticket.finished.set()
        self._loaded.set()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error

    # Workers

    def _add_worker(self) -> None:
        worker = _Worker(self._num_workers_made, time.monotonic() + _LOAD_LIMIT_S)
        self._num_workers_made += 1
        self._workers[worker.id] = worker
        self._spawner.send({"op": "fork", "id": worker.id})

    def _hear_spawner(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 64)
        self._descriptors.extend(descriptors)
        if not data:
            self._fail(
                RuntimeError(f"the reward pool's spawner process ended with status {self._process.wait()}; its output says why")
            )
        for message in self._spawner.take(data):
            if message["op"] == "forked":
                worker = self._workers[message["id"]]
                worker.channel = Channel(socket.socket(fileno=self._descriptors.popleft()))
                self._selector.register(worker.channel, _READ, worker)
            else:
                self._bury(self._workers.pop(message["id"]), message["state"], message["reason"])

    def _hear_worker(self, worker: _Worker, events: int = _READ) -> None:
        assert worker.channel is not None
        if events & _WRITE:
            worker.channel.flush()
        messages, alive = worker.channel.receive_ready()
        for message in messages:
            self._take(worker, message)
        if alive:
            self._selector.modify(worker.channel, _READ | (_WRITE if worker.channel.has_unsent else 0), worker)
        else:
            self._hang_up(worker)  # its death is reported by the spawner

    def _hang_up(self, worker: _Worker) -> None:
        if worker.channel is not None:
            self._selector.unregister(worker.channel)
            worker.channel.close()
            worker.channel = None

    def _take(self, worker: _Worker, message: dict[str, Any]) -> None:
        job = worker.job
        if message["op"] == "ready":
            worker.ready, worker.deadline = True, math.inf
            self._kinds = self._kinds or [Kind(**kind) for kind in message["functions"]]
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
                self._settle(job, call, message["value"])
            else:
                job.failed[call] = (message["state"], message["error"])
            if not self._runs_at_once(job):
                worker.deadline = self._deadline(job)
        elif message["op"] == "done" and job is not None:
            worker.job, worker.deadline, worker.ready = None, math.inf, message["healthy"]
            self._finish(job)

    def _bury(self, worker: _Worker, state: str, reason: str) -> None:
        """A worker is dead: blame the call it was making, give its other calls to others, fork another."""
        if worker.channel is not None:
            self._hear_worker(worker)  # what it said before it died
        self._hang_up(worker)
        self.counters["workers_replaced"] += 1
        if worker.job is not None:
            self._blame(worker.job, worker.verdict or (state, reason))
        elif not worker.ready and not self._loaded.is_set():
            self._load_failures += 1
        if self._load_failures >= _LOAD_ATTEMPTS:
            self._fail(
                RuntimeError(f"workers die while they load the reward functions ({', '.join(self.functions)}): {reason}")
            )
        if self._error is None:
            self._add_worker()

    def _blame(self, job: Job, failure: Failure) -> None:
        at_once, batched = self._runs_at_once(job), self._kinds[job.functions[0]].batched
        if batched or not at_once or len(job.open) == 1:
            for call in list(job.open) if batched else list(job.open)[:1]:
                del job.open[call]
                job.failed[call] = failure
        self._finish(job, alone=at_once)

    # Jobs

    def _runs_at_once(self, job: Job) -> bool:
        """True for jobs whose calls have one common end, so that no single one can be blamed for being late."""
        kind = self._kinds[job.functions[0]]
        return kind.batched or kind.is_async

    def _deadline(self, job: Job) -> float:
        """The time at which the next open call of the job is late."""
        if not job.open:
            return math.inf
        _, function = next(iter(job.open))
        kind = self._kinds[function]
        return time.monotonic() + kind.timeout_s + (min(_ASYNC_GRACE_S, kind.timeout_s) if kind.is_async else 0.0)

    def _hand_out_jobs(self) -> None:
        idle = [w for w in self._workers.values() if w.ready and w.job is None and w.channel is not None and w.verdict is None]
        while idle and self._jobs:
            job = self._jobs.popleft()
            samples = [vars(job.ticket.samples[row]) for row in job.rows]
            try:
                frame = pack({"op": "score", "functions": job.functions, "samples": samples})
            except ValueError as error:
                self._refuse(job, str(error))
                continue
            worker = idle.pop()
            worker.job, worker.deadline = job, self._deadline(job)
            worker.channel.send_soon(frame)
            if worker.channel.has_unsent:
                self._selector.modify(worker.channel, _READ | _WRITE, worker)

    def _refuse(self, job: Job, reason: str) -> None:
        """A sample cannot be sent: find it among the job's rows, and fail it alone."""
        if len(job.rows) > 1 and not self._kinds[job.functions[0]].batched:
            self._jobs.extendleft(leftovers(job, alone=True))
            return
        job.failed, job.open, job.attempt = dict.fromkeys(job.open, ("failed", reason)), {}, 1
        self._finish(job)

    def _finish(self, job: Job, alone: bool = False) -> None:
        """A worker is through with a job: queue what it left open, and try failed calls again where the policy says so."""
        self._jobs.extendleft(leftovers(job, alone=alone))
        if self.settings.reward_failure_policy != "retry" or job.attempt > 0:
            for call, failure in job.failed.items():
                self._settle(job, call, None, failure)
            return
        self.counters["retries"] += len(job.failed)
        if self._kinds[job.functions[0]].batched and job.failed:
            self._jobs.append(Job(job.ticket, job.functions, job.rows, attempt=1))
        else:
            self._jobs.extend(Job(job.ticket, [function], [row], attempt=1) for row, function in job.failed)

    def _settle(self, job: Job, call: tuple[int, int], value: Any, failure: Failure | None = None) -> None:
        job.ticket.settle(call, value, failure)
        if job.ticket.done():
            self._open_tickets.discard(job.ticket)

    # Time

    def _seconds_to_next_deadline(self) -> float | None:
        deadline = min((worker.deadline for worker in self._workers.values()), default=math.inf)
        return None if deadline == math.inf else max(0.0, deadline - time.monotonic())

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if worker.deadline <= now and worker.channel is not None:
                self._hear_worker(worker)  # its answer may be waiting to be read
            if worker.deadline > now:
                continue
            if worker.job is None:
                self._fail(
                    RuntimeError(f"loading the reward functions ({', '.join(self.functions)}) took over {_LOAD_LIMIT_S:g} s")
                )
                return
            limit_s = self._kinds[next(iter(worker.job.open))[1]].timeout_s
            worker.deadline, worker.verdict = math.inf, ("timeout", f"took longer than {limit_s:g} s")
            self._spawner.send({"op": "kill", "id": worker.id})


def _targets(functions: Sequence[str], settings: RewardSettings) -> dict[str, str]:
    """Return `module:function` for every function that is known before the plug-ins are loaded.

    Raises:
        ValueError: unknown name and no plug-in that may define it, or a function that another process cannot import.
    """
    targets = {}
    for name in functions:
        if name not in REWARDS and settings.external_plugins and ":" not in name:
            continue  # a plug-in may define it; the worker says so if none does
        entry = find(name)
        if isinstance(entry, str):
            targets[name] = entry
            continue
        if entry.__module__ == "__main__" or "<" in entry.__qualname__:
            raise ValueError(
                f"reward function '{name}' is {entry.__module__}.{entry.__qualname__}, which a worker process cannot import; "
                "put it into a module and name it module:function, or into a file given by external_plugins"
            )
        targets[name] = f"{entry.__module__}:{entry.__qualname__}"
    return targets
