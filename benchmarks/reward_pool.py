"""The reward pool beside pebble, loky and Ray tasks: the same scorers, good and hostile, through each.

    pip install pebble loky                         (Ray comes with the package)
    python benchmarks/reward_pool.py                every candidate that is installed, 2 workers
    python benchmarks/reward_pool.py --candidates ours pebble --scenarios hang segfault --rounds 3

Each scenario runs in a process of its own with a fresh pool. The libraries get the layer that a page of code can put around
them: a session of its own for each worker, death with the parent, a bound on private memory, an end for late calls. A process
counts as left over if it still lives 2 s after the process of the pool has ended.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import functools
import importlib.metadata
import json
import mmap
import multiprocessing
import os
import platform
import resource
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from mindspeed_rl.rewards.math_scores import accuracy, warm_up
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings

_MARK, _FOLDER = "REWARD_POOL_BENCHMARK", "REWARD_POOL_BENCHMARK_FOLDER"
_LIMIT_S = 1.0
_LONG_LIMIT_S = 30.0
_MEMORY_BYTES = 256 << 20
_SCENARIO_LIMIT_S = 120.0

Call = tuple[str, str, Any]
"""Name of a scorer of this file, response, label."""
Outcome = tuple[float | None, str]
"""Score, or None and why there is none."""


class Trap:
    """A result whose unpickling runs a line of the scorer's choice in whatever process reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({os.environ[_FOLDER]!r} + '/trapped_' + str(__import__('os').getpid()), 'w').close()",)


class Stateful:
    """A scorer that is set up once for each process."""

    def __init__(self) -> None:
        Path(os.environ[_FOLDER], f"setup_{os.getpid()}_{secrets.token_hex(4)}").touch()

    def __call__(self, response: str) -> float:
        return float(len(response))


def maths(response: str, label: str) -> float:
    """The built-in scorer `accuracy`."""
    return accuracy(response, label)


def program(response: str, label: str) -> float:
    """The built-in scorer `code`; it starts a sandboxed process."""
    from mindspeed_rl.rewards.code import code  # needed by one scenario of many

    return float(code(response, RewardSettings(), label)["score"])


def deed(response: str) -> Any:
    """Does what the response says."""
    if response == "hang":
        time.sleep(1000)
    elif response == "slow":
        time.sleep(0.6 * _LIMIT_S)
    elif response == "hang with a child":
        if os.fork() == 0:
            os.setsid()
            Path(os.environ[_FOLDER], f"child_{os.getpid()}").touch()
            time.sleep(1000)
        time.sleep(1000)
    elif response == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif response == "die later":
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif response == "eat":
        eaten = []
        while True:
            eaten.append(bytes(8 << 20))
    elif response == "eat in a child":
        if os.fork() == 0:
            shared = mmap.mmap(-1, 2 * _MEMORY_BYTES)
            for _ in range(2 * _MEMORY_BYTES >> 20):
                shared.write(b"x" * (1 << 20))
            time.sleep(1000)
        time.sleep(1000)
    elif response == "raise":
        raise KeyError("no such thing")
    elif response == "trap":
        return Trap()
    elif response == "unpicklable":
        return lambda: 1.0
    return 1.0


@functools.lru_cache(maxsize=1)
def _stateful_scorer() -> Stateful:
    return Stateful()


def stateful(response: str) -> float:
    """`Stateful`, made when first called: what a pool without set-up of scorers needs."""
    return _stateful_scorer()(response)


def _score(call: Call) -> Any:
    name, response, label = call
    return globals()[name](response) if label is None else globals()[name](response, label)


def _prepare(memory_bytes: int) -> None:
    """What the layer does in a new worker."""
    if hasattr(os, "setsid") and os.getsid(0) != os.getpid():
        try:
            os.setsid()
        except PermissionError:
            pass  # the library made the worker a group leader
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    with open("/proc/self/statm") as statm:
        data_bytes = int(statm.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + memory_bytes,) * 2)
    warm_up()


class Candidate(Protocol):
    """A pool under test; scores come back in the order of the calls."""

    def run(self, calls: Sequence[Call]) -> list[Outcome]: ...

    def close(self) -> None: ...


class Ours:
    """`mindspeed_rl.rewards.pool`."""

    def __init__(self, workers: int, limit_s: float) -> None:
        self._settings = RewardSettings(
            num_reward_workers=workers,
            reward_timeout_s=limit_s,
            reward_memory_gib=_MEMORY_BYTES / 2**30,
            reward_failure_limit=1.0,
        )
        self._pools: dict[str, RewardPool] = {}

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        (name,) = {call[0] for call in calls}
        target = {"maths": "accuracy", "stateful": "reward_pool:Stateful"}.get(name, f"reward_pool:{name}")
        if name not in self._pools:
            self._pools[name] = RewardPool([target], settings=self._settings)
        samples = [RewardSample(response=response, label=label) for _, response, label in calls]
        return [(result.total, result.error) for result in self._pools[name].score(samples)]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


class Pebble:
    """`pebble.ProcessPool`, its workers forked by a server that has the scorers loaded."""

    def __init__(self, workers: int, limit_s: float) -> None:
        from pebble import ProcessPool

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["reward_pool"])
        self._limit_s = limit_s
        self._pool = ProcessPool(workers, initializer=_prepare, initargs=(_MEMORY_BYTES,), context=context)

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        futures = [self._pool.schedule(_score, (call,), timeout=self._limit_s) for call in calls]
        return [_outcome(future.result) for future in futures]

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()


class Loky:
    """`loky.ProcessPoolExecutor`. A late call costs all workers: the executor can only be killed as a whole."""

    def __init__(self, workers: int, limit_s: float) -> None:
        self._workers, self._limit_s = workers, limit_s
        self._notes = _StartNotes()
        self._executor = self._make()

    def _make(self) -> Any:
        from loky import ProcessPoolExecutor

        return ProcessPoolExecutor(self._workers, initializer=_prepare, initargs=(_MEMORY_BYTES,))

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        while waiting := [row for row in range(len(calls)) if row not in outcomes]:
            futures = {row: self._executor.submit(_noted_score, self._notes.new(row), calls[row]) for row in waiting}
            broken = False
            while not broken and not all(future.done() for future in futures.values()):
                time.sleep(0.002)
                started = [row for row, future in futures.items() if future.running()]
                for row in self._notes.late(started, self._limit_s):
                    outcomes[row] = (None, f"TimeoutError: over {self._limit_s:g} s")
                    broken = True
            for row, future in futures.items():
                if row not in outcomes and future.done():
                    outcomes[row] = _outcome(future.result)
                    broken = broken or "TerminatedWorkerError" in outcomes[row][1] or "Broken" in outcomes[row][1]
            if broken:
                self._executor.shutdown(wait=False, kill_workers=True)
                self._executor = self._make()
        return [outcomes[row] for row in range(len(calls))]

    def close(self) -> None:
        self._executor.shutdown(wait=True, kill_workers=True)


class Ray:
    """Ray tasks on a local Ray, one submitted for each free processor, cancelled with force when late."""

    def __init__(self, workers: int, limit_s: float) -> None:
        import ray

        self._ray, self._workers, self._limit_s = ray, workers, limit_s
        self._notes = _StartNotes()
        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, configure_logging=False)
        self._task = ray.remote(max_retries=0)(_noted_score_in_ray)

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        waiting = list(range(len(calls)))[::-1]
        running: dict[int, Any] = {}
        while len(outcomes) < len(calls):
            while waiting and len(running) < self._workers:
                row = waiting.pop()
                running[row] = self._task.remote(self._notes.new(row), calls[row])
            ready, _ = self._ray.wait(list(running.values()), timeout=0.05)
            for row in [row for row, reference in running.items() if reference in ready]:
                outcomes[row] = _outcome(functools.partial(self._ray.get, running.pop(row)))
            for row in self._notes.late(running, self._limit_s):
                self._ray.cancel(running.pop(row), force=True)
                outcomes[row] = (None, f"TimeoutError: over {self._limit_s:g} s")
        return [outcomes[row] for row in range(len(calls))]

    def close(self) -> None:
        self._ray.shutdown()


class _StartNotes:
    """Says when calls started, which neither loky nor Ray tell: each call makes a file."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(dir=os.environ[_FOLDER])
        self._paths: dict[int, str] = {}

    def new(self, row: int) -> str:
        self._paths[row] = os.path.join(self._folder, secrets.token_hex(8))
        return self._paths[row]

    def late(self, rows: Iterable[int], limit_s: float) -> list[int]:
        started = [row for row in rows if os.path.exists(self._paths[row])]
        return [row for row in started if time.time() - os.stat(self._paths[row]).st_mtime > limit_s]


def _noted_score(path: str, call: Call) -> Any:
    Path(path).touch()
    return _score(call)


@functools.lru_cache(maxsize=1)
def _prepare_once() -> None:
    _prepare(_MEMORY_BYTES)


def _noted_score_in_ray(path: str, call: Call) -> Any:
    _prepare_once()
    return _noted_score(path, call)


def _outcome(result: Callable[[], Any]) -> Outcome:
    try:
        value = result()
    except Exception as error:  # noqa: BLE001  (the outcome of a scorer may be any failure)
        return None, " ".join(f"{type(error).__name__}: {error}".split())
    return (float(value), "") if isinstance(value, (int, float)) else (None, f"not a number: {value!r}")


CANDIDATES: dict[str, Callable[[int, float], Candidate]] = {"ours": Ours, "pebble": Pebble, "loky": Loky, "ray": Ray}


def _answers(count: int) -> list[Call]:
    return [("maths", f"So the answer is $\\boxed{{{i % 7}}}$.", str(i % 5)) for i in range(count)]


def _deeds(*responses: str) -> list[Call]:
    return [("deed", response, None) for response in responses]


_PROGRAM = "```python\nprint(int(input()) + 1)\n```"
SCENARIOS: dict[str, tuple[str, list[Call], list[float | None], float]] = {
    "throughput": ("512 short answers, `accuracy`", _answers(512), [float(i % 7 == i % 5) for i in range(512)], _LONG_LIMIT_S),
    "code": (
        "32 programs in the sandbox",
        [("program", _PROGRAM, json.dumps({"inputs": ["1"], "outputs": ["2"]}))] * 32,
        [1.0] * 32,
        _LONG_LIMIT_S,
    ),
    "queue": ("8 calls of 0.6 s, limit 1 s", _deeds(*["slow"] * 8), [1.0] * 8, _LIMIT_S),
    "hang": ("one of 8 never ends", _deeds("", "hang", *[""] * 6), [1.0, None, *[1.0] * 6], _LIMIT_S),
    "child": ("it never ends, with a child", _deeds("", "hang with a child", *[""] * 6), [1.0, None, *[1.0] * 6], _LIMIT_S),
    "segfault": ("one of 8 segfaults", _deeds("", "segfault", *[""] * 6), [1.0, None, *[1.0] * 6], _LIMIT_S),
    "memory": ("one of 8 eats memory", _deeds("", "eat", *[""] * 6), [1.0, None, *[1.0] * 6], _LONG_LIMIT_S),
    "child memory": ("a child of one eats memory", _deeds("", "eat in a child", "", ""), [1.0, None, 1.0, 1.0], 5.0),
    "exception": ("one of 8 raises", _deeds("", "raise", *[""] * 6), [1.0, None, *[1.0] * 6], _LIMIT_S),
    "unpicklable": ("one of 8 returns a lambda", _deeds("", "unpicklable", *[""] * 6), [1.0, None, *[1.0] * 6], _LIMIT_S),
    "trap": ("one of 8 returns code", _deeds("", "trap", *[""] * 6), [1.0, None, *[1.0] * 6], _LIMIT_S),
    "state": ("64 calls, set-up once a process", [("stateful", "x" * i, None) for i in range(64)], list(range(64)), _LIMIT_S),
    "idle death": ("workers die between batches", _deeds(*["die later"] * 2), [1.0, 1.0], _LIMIT_S),
    "killed": ("the pool's process is killed", _deeds("hang with a child", "hang"), [None, None], _LONG_LIMIT_S),
}
"""Name -> words, calls, right scores, limit of one call in seconds."""


def run_scenario(candidate: str, scenario: str, workers: int) -> None:
    """Run one scenario in this process and print what came of it as JSON."""
    _, calls, right, limit_s = SCENARIOS[scenario]
    name = calls[0][0]
    harmless: list[Call] = [(name, "", None) if name in ("deed", "stateful") else calls[0]] * 4
    start = time.perf_counter()
    pool = CANDIDATES[candidate](workers, limit_s)
    atexit.register(pool.close)
    pool.run(harmless)
    report: dict[str, Any] = {"start_s": time.perf_counter() - start}
    if scenario == "killed":
        print("ready", flush=True)
    start = time.perf_counter()
    outcomes = pool.run(calls)
    report["seconds"] = time.perf_counter() - start
    report["right"] = [score for score, _ in outcomes] == right
    report["errors"] = sorted({error[:90] for _, error in outcomes if error})
    report["lost"] = sum(score is None for score, _ in outcomes) - right.count(None)
    time.sleep(1.0)
    found = {kind: [p.name for p in Path(os.environ[_FOLDER]).glob(f"{kind}_*")] for kind in ("child", "setup", "trapped")}
    report["children"] = sum(_is_alive(int(name.split("_")[1])) for name in found["child"])
    report["setups"], report["trapped"] = len(found["setup"]), f"trapped_{os.getpid()}" in found["trapped"]
    again = pool.run(harmless)
    report["goes_on"] = all(score is not None for score, _ in again)
    pool.close()
    atexit.unregister(pool.close)
    print(json.dumps(report), flush=True)
    os._exit(0)  # what the candidate leaves to the end of the interpreter is left over


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _marked(mark: str) -> list[psutil.Process]:
    """Return the living processes that were started below a scenario."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def measure(candidate: str, scenario: str, workers: int) -> dict[str, Any]:
    """Run one scenario in a new process; returns its report, with `left_over` processes, or `error`."""
    mark = secrets.token_hex(8)
    here = str(Path(__file__).resolve().parent)
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")  # files: what is left over would hold a pipe open
        process = subprocess.Popen(
            [sys.executable, "-c", f"import reward_pool; reward_pool.run_scenario({candidate!r}, {scenario!r}, {workers})"],
            stdout=output.open("w"),
            stderr=errors.open("w"),
            env={
                **os.environ,
                _MARK: mark,
                _FOLDER: folder,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]),
            },
        )
        deadline = time.monotonic() + _SCENARIO_LIMIT_S
        while process.poll() is None and time.monotonic() < deadline and output.read_text() != "ready\n":
            time.sleep(0.05)
        if output.read_text() == "ready\n":
            time.sleep(2.0)
            report["processes"] = len(_marked(mark)) - 1
        process.kill()
        process.wait()
        lines, text = output.read_text().splitlines(), errors.read_text().strip().splitlines()
        if "processes" not in report:
            if lines:
                report = json.loads(lines[-1])
            else:
                report["error"] = text[-1][:100] if text and process.returncode > 0 else f"no end in {_SCENARIO_LIMIT_S:g} s"
        time.sleep(2.0)
        left = _marked(mark)
        for orphan in left:
            orphan.kill()
    return {**report, "left_over": len(left)}


def _row(candidate: str, scenario: str, reports: Sequence[dict[str, Any]]) -> str:
    last = reports[-1]
    cells = [f"{candidate:8}{scenario:14}"]
    if "seconds" in last:
        seconds = statistics.median(report["seconds"] for report in reports)
        start = statistics.median(report["start_s"] for report in reports)
        cells.append(f"start {start:6.2f} s, run {seconds:6.2f} s, {'right' if last['right'] else 'WRONG'}")
        if last["lost"]:
            cells.append(f"{last['lost']} others lost")
        if scenario == "child":
            cells.append(f"{last['children']} children live on in the open pool")
        if scenario == "state":
            cells.append(f"{last['setups']} set-ups")
        if last["trapped"]:
            cells.append("THE RESULT RAN CODE IN THE POOL'S PROCESS")
        cells += [] if last["goes_on"] else ["POOL BROKEN"]
    if "processes" in last:
        cells.append(f"{last['processes']} processes before")
    if "error" in last:
        cells.append(f"ERROR {last['error']}")
    cells.append(f"{last['left_over']} left over")
    return "; ".join([*cells, *last.get("errors", [])])


def main() -> None:
    """Measures what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each; times are medians")
    given = parser.parse_args()
    versions = {}
    for name in ("pebble", "loky", "ray"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}, {given.workers} workers; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
    )
    for scenario in given.scenarios:
        print(f"-- {scenario}: {SCENARIOS[scenario][0]}")
        for candidate in given.candidates or ["ours", *versions]:
            reports = [measure(candidate, scenario, given.workers) for _ in range(given.rounds)]
            print(_row(candidate, scenario, reports), flush=True)


if __name__ == "__main__":
    main()
