"""Named time intervals with wall-clock stamps, comparable between processes, and the timing metrics made of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

# Each worker's own duration counts here, not the span from the first start to the last end over all workers.
LONGEST_DURATION = frozenset(
    {"resharding_to_infer", "resharding_to_train", "resharding_enter_infer", "resharding_exit_infer", "update_weights"}
)

# Intervals that may run beside the old log-prob pass; what of them sticks out behind it is reported too.
OVERLAPPING = ("reference_model", "rule_reward", "reward_model", "adv")


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
    """Records intervals of one process.

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
        """The block's interval is recorded, also when it raises."""
        start_s = self._clock()
        try:
            yield
        finally:
            self._intervals.append(Interval(name, start_s, self._clock(), self.worker))

    def record(self, name: str, start_s: float, end_s: float) -> None:
        """An interval measured elsewhere."""
        self._intervals.append(Interval(name, start_s, end_s, self.worker))

    def extend(self, intervals: Iterable[Interval]) -> None:
        """Takes over the intervals of other workers."""
        self._intervals.extend(intervals)

    def drain(self) -> list[Interval]:
        """The intervals since the last call."""
        intervals, self._intervals = self._intervals, []
        return intervals


def timing_metrics(intervals: Sequence[Interval]) -> dict[str, float]:
    """Seconds by `timing/<name>`: from the first start to the last end over all workers.

    For the names in LONGEST_DURATION it is the longest total of any one worker. `timing/non_overlap_<name>` is the part of an
    interval that lies behind the end of the old log-prob pass (of the reference pass where that one is skipped).
    """
    by_name: dict[str, list[Interval]] = {}
    for interval in intervals:
        by_name.setdefault(interval.name, []).append(interval)
    metrics = {f"timing/{name}": _seconds(name, group) for name, group in by_name.items()}
    fence = by_name.get("old_log_p") or by_name.get("reference_model")
    for name in OVERLAPPING:
        group = by_name.get(name)
        if group is None:
            continue
        if fence is None or group is fence:
            metrics[f"timing/non_overlap_{name}"] = metrics[f"timing/{name}"]
            continue
        start_s, end_s = min(i.start_s for i in group), max(i.end_s for i in group)
        metrics[f"timing/non_overlap_{name}"] = max(end_s - max(max(i.end_s for i in fence), start_s), 0.0)
    return metrics


def _seconds(name: str, group: Sequence[Interval]) -> float:
    if name not in LONGEST_DURATION:
        return max(i.end_s for i in group) - min(i.start_s for i in group)
    totals: dict[str, float] = {}
    for interval in group:
        totals[interval.worker] = totals.get(interval.worker, 0.0) + interval.duration_s
    return max(totals.values())


def throughput_metrics(timing: Mapping[str, float], num_tokens: float, num_devices: int) -> dict[str, float]:
    """Tokens (prompt and response) per second and device over the iteration, the update and the rollout."""
    phases = {"e2e_tps": "timing/all", "update_tps": "timing/update", "vllm_tps": "timing/rollout"}
    return {name: num_tokens / num_devices / timing[phase] for name, phase in phases.items() if timing.get(phase, 0.0) > 0.0}
