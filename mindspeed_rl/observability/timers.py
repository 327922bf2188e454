"""Time intervals comparable between processes; the metrics, the timeline and the operator table made of measured times."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# The total of the slowest worker counts here, not the span from the first start to the last end over all workers.
_PER_WORKER = frozenset(
    "resharding_to_infer resharding_to_train resharding_enter_infer resharding_exit_infer update_weights offload".split()
)

# Intervals that may overlap with the old log-prob pass; the part after its end is reported too.
_OVERLAPPING = ("reference_model", "rule_reward", "reward_model", "adv")

# Scores, and what the driver does around all phases.
_REWARDS, _AROUND = ("rule_reward", "reward_model", "judge"), ("all",)

#: a worker is slow from these seconds of a phase on, and from this multiple of the others' median
_MIN_SLOW_S, _SLOWER = 0.1, 1.1

#: rows of an operator table; the others are summed up in one line
_MAX_ROWS = 40


@dataclass(frozen=True)
class Interval:
    """Something that ran from `start_s` to `end_s` (seconds since the epoch) on `worker`."""

    name: str
    start_s: float
    end_s: float
    worker: str = "driver"

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class Timers:
    """Record intervals of one process.

    Args:
        worker: name of the process in reports and timelines.
        clock: seconds since the epoch.
    """

    def __init__(self, worker: str = "driver", clock: Callable[[], float] = time.time) -> None:
        self.worker = worker
        self._clock = clock
        self._intervals: list[Interval] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Record the interval of the block, also when it raises."""
        start_s = self._clock()
        try:
            yield
        finally:
            self.record(name, start_s, self._clock())

    def record(self, name: str, start_s: float, end_s: float) -> None:
        """Record an interval that was measured elsewhere."""
        self._intervals.append(Interval(name, start_s, end_s, self.worker))

    def extend(self, intervals: Iterable[Interval]) -> None:
        """Record the intervals of other workers."""
        self._intervals.extend(intervals)

    def drain(self) -> list[Interval]:
        """Return the intervals since the last call."""
        intervals, self._intervals = self._intervals, []
        return intervals


def compute_timings(intervals: Sequence[Interval]) -> dict[str, float]:
    """Return seconds by `timing/<name>`: from the first start to the last end over all workers.

    For the names in _PER_WORKER it is the longest total of any one worker. `timing/non_overlap_<name>` is the part of an
    interval after the end of the old log-prob pass (of the reference pass where that one is skipped), `timing/reward_wait` the
    seconds in which responses are scored and nothing else goes on.
    """
    by_name: dict[str, list[Interval]] = {}
    for interval in intervals:
        by_name.setdefault(interval.name, []).append(interval)
    metrics: dict[str, float] = {}
    for name, group in by_name.items():
        if name in _PER_WORKER:
            totals: dict[str, float] = {}
            for interval in group:
                totals[interval.worker] = totals.get(interval.worker, 0.0) + interval.duration_s
            metrics[f"timing/{name}"] = max(totals.values())
        else:
            metrics[f"timing/{name}"] = max(i.end_s for i in group) - min(i.start_s for i in group)
    fence = by_name.get("old_log_p") or by_name.get("reference_model")
    for name in _OVERLAPPING:
        group = by_name.get(name, [])
        if not group:
            continue
        if fence is None or group is fence:
            metrics[f"timing/non_overlap_{name}"] = metrics[f"timing/{name}"]
            continue
        start_s, end_s = min(i.start_s for i in group), max(i.end_s for i in group)
        metrics[f"timing/non_overlap_{name}"] = max(end_s - max(max(i.end_s for i in fence), start_s), 0.0)
    scored = [interval for name in _REWARDS for interval in by_name.get(name, [])]
    if scored:
        others = [interval for interval in intervals if interval.name not in (*_REWARDS, *_AROUND)]
        metrics["timing/reward_wait"] = _cover_s([*scored, *others]) - _cover_s(others)
    return metrics


def _cover_s(intervals: Iterable[Interval]) -> float:
    """Return the seconds in which at least one of these runs."""
    seconds, end_s = 0.0, -math.inf
    for interval in sorted(intervals, key=lambda interval: interval.start_s):
        seconds += max(0.0, interval.end_s - max(interval.start_s, end_s))
        end_s = max(end_s, interval.end_s)
    return seconds


def compute_imbalance(intervals: Sequence[Interval]) -> dict[str, float]:
    """Return the slowest worker of each phase: `imbalance/<name>`, its seconds by the median of the others, and its rank.

    Only phases that a worker finishes without the others say something of it; in an update all end together. A phase of one
    worker, one in which no worker is a tenth slower, and a phase of less than a tenth of a second have no such metric.
    """
    totals: dict[str, dict[int, float]] = {}
    for interval in intervals:
        kind, _, rank = interval.worker.rpartition(" ")
        if kind and rank.isdigit():
            workers = totals.setdefault(interval.name, {})
            workers[int(rank)] = workers.get(int(rank), 0.0) + interval.duration_s
    metrics: dict[str, float] = {}
    for name, workers in totals.items():
        if len(workers) < 2:
            continue
        slowest = max(workers, key=lambda rank: workers[rank])
        median = statistics.median(seconds for rank, seconds in workers.items() if rank != slowest)
        if workers[slowest] > max(_MIN_SLOW_S, _SLOWER * median) and median > 0:
            metrics[f"imbalance/{name}"] = workers[slowest] / median
            metrics[f"imbalance/{name}_worker"] = float(slowest)
    return metrics


class Timeline:
    """Write the phases of each worker as a Chrome trace: open timeline.json in chrome://tracing or ui.perfetto.dev.

    The file is a readable trace after every call, also when the run dies.

    Args:
        path: the trace file; an existing one is replaced.
        origin_s: the stamp shown as time zero, seconds since the epoch; the first interval's start when None.
    """

    def __init__(self, path: Path, origin_s: float | None = None) -> None:
        self.path = Path(path)
        self._origin_s = origin_s
        self._workers: dict[str, int] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The JSON array format of Chrome traces needs no closing bracket.
        self.path.write_text("[\n", encoding="utf-8")

    def add(self, iteration: int, intervals: Iterable[Interval]) -> None:
        """Append the intervals of an iteration: one row a worker, one block an interval."""
        intervals = sorted(intervals, key=lambda interval: interval.start_s)
        if not intervals:
            return
        if self._origin_s is None:
            self._origin_s = intervals[0].start_s
        events: list[dict[str, object]] = []
        for interval in intervals:
            if interval.worker not in self._workers:
                row = self._workers[interval.worker] = len(self._workers)
                events.append({"pid": 0, "tid": row, "name": "thread_name", "ph": "M", "args": {"name": interval.worker}})
            event = {"pid": 0, "tid": self._workers[interval.worker], "name": interval.name, "ph": "X"}
            times = {"ts": (interval.start_s - self._origin_s) * 1e6, "dur": interval.duration_s * 1e6}
            events.append({**event, **times, "args": {"iteration": iteration}})
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(event) + ",\n" for event in events)

    def close(self) -> None:
        """Complete the file to strict JSON."""
        text = self.path.read_text(encoding="utf-8")
        self.path.write_text(text.rstrip().rstrip(",") + "\n]\n", encoding="utf-8")


@dataclass(frozen=True)
class OperatorTime:
    """One operator over a full profile.

    Attributes:
        name: name of the operator.
        calls: number of calls.
        host_us, device_us: microseconds of its own, without the operators that it calls.
        memory_bytes: allocated less freed by itself; 0 where that was not recorded.
    """

    name: str
    calls: int
    host_us: float
    device_us: float = 0.0
    memory_bytes: int = 0


def format_operators(operators: Sequence[OperatorTime]) -> str:
    """Return a profile as a Markdown table, the longest first, by device time where there is any, else by host time.

    Columns of zeros are left out.
    """
    has_device = any(operator.device_us for operator in operators)
    has_memory = any(operator.memory_bytes for operator in operators)

    def duration_us(operator: OperatorTime) -> float:
        return operator.device_us if has_device else operator.host_us

    ordered = sorted(operators, key=duration_us, reverse=True)
    total = sum(map(duration_us, operators)) or 1.0
    head = ["operator", "calls", "share", *(["device ms"] if has_device else []), "host ms", "host us a call"]
    head += ["memory MiB"] if has_memory else []
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for operator in ordered[:_MAX_ROWS]:
        cells = [f"`{operator.name}`", str(operator.calls), f"{duration_us(operator) / total:.1%}"]
        cells += [f"{operator.device_us / 1e3:.3f}"] if has_device else []
        cells += [f"{operator.host_us / 1e3:.3f}", f"{operator.host_us / max(operator.calls, 1):.1f}"]
        cells += [f"{operator.memory_bytes / 2**20:.2f}"] if has_memory else []
        lines.append(f"| {' | '.join(cells)} |")
    if others := ordered[_MAX_ROWS:]:
        fraction, calls = sum(map(duration_us, others)) / total, sum(operator.calls for operator in others)
        lines.append(f"| {len(others)} others | {calls} | {fraction:.1%} |{' |' * (len(head) - 3)}")
    kind = "device" if has_device else "host"
    return f"{total / 1e3:.3f} ms of {kind} time in {len(operators)} operators.\n\n" + "\n".join(lines) + "\n"
