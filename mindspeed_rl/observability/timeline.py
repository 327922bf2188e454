"""The phases of each worker as a Chrome trace: open timeline.json in chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from mindspeed_rl.observability.timers import Interval


class Timeline:
    """Writes intervals as they come; the file is a readable trace after every call, also when the run dies.

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
        """Appends the intervals of an iteration: one row a worker, one block an interval."""
        intervals = sorted(intervals, key=lambda interval: interval.start_s)
        if not intervals:
            return
        if self._origin_s is None:
            self._origin_s = intervals[0].start_s
        events = []
        for interval in intervals:
            if interval.worker not in self._workers:
                self._workers[interval.worker] = len(self._workers)
                events.append(self._event(interval.worker, name="thread_name", ph="M", args={"name": interval.worker}))
            start_us, duration_us = (interval.start_s - self._origin_s) * 1e6, interval.duration_s * 1e6
            args = {"iteration": iteration}
            events.append(self._event(interval.worker, name=interval.name, ph="X", ts=start_us, dur=duration_us, args=args))
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(event) + ",\n" for event in events)

    def close(self) -> None:
        """The file is strict JSON."""
        text = self.path.read_text(encoding="utf-8")
        self.path.write_text(text.rstrip().rstrip(",") + "\n]\n", encoding="utf-8")

    def _event(self, worker: str, **fields: object) -> dict[str, object]:
        return {"pid": 0, "tid": self._workers[worker], **fields}
