"""The bookkeeping of the pool: batches (what callers wait for) and jobs (what workers do)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mindspeed_rl.rewards.samples import RewardResult, RewardSample, RewardSettings, State
from mindspeed_rl.rewards.scorer import Value
from mindspeed_rl.rewards.totals import overlong_penalty, weighted_total
from mindspeed_rl.rewards.worker import Kind

_ASYNC_CALLS_PER_JOB = 64
_MAX_ROWS_PER_JOB = 32

Call = tuple[int, int]
"""Row of the batch, index of the function."""
Failure = tuple[State, str]
"""State and words."""


@dataclass(eq=False)
class Batch:
    """Samples on their way through the pool.

    Attributes:
        samples: what is scored.
        num_open: calls that have neither a value nor a failure yet.
        values: what the functions returned.
        failures: why they did not.
    """

    samples: list[RewardSample]
    num_open: int = 0
    values: dict[Call, Value | None] = field(default_factory=dict)
    failures: dict[Call, Failure] = field(default_factory=dict)

    def settle(self, call: Call, value: Value | None, failure: Failure | None = None) -> None:
        """Enters the outcome of a call."""
        if failure is None:
            self.values[call] = value
        else:
            self.failures[call] = failure
        self.num_open -= 1

    def result(self, row: int, functions: Sequence[str], weights: Sequence[float], settings: RewardSettings) -> RewardResult:
        """Returns what became of a sample."""
        parts: dict[str, float] = {}
        notes: dict[str, str] = {}
        failure: Failure | None = None
        for index, name in enumerate(functions):
            value = self.values.get((row, index))
            if value is not None:
                parts.update(value[0])
                notes.update(value[1])
            if failure is None and (row, index) in self.failures:
                state, text = self.failures[row, index]
                failure = (state, f"{name}: {text}")
        penalty = overlong_penalty(len(self.samples[row].response_ids), settings)
        if failure is not None:
            total = 0.0 if settings.reward_failure_policy == "zero" else None
            return RewardResult(total, parts, failure[0], failure[1], penalty, notes)
        if not parts:
            return RewardResult(None, {}, "skipped", "", penalty, notes)
        return RewardResult(weighted_total(parts, functions, weights) + penalty, parts, "ok", "", penalty, notes)


@dataclass(eq=False)
class Job:
    """Calls for one worker: each of `functions` on each of `rows`.

    Attributes:
        attempt: 1 for calls that failed before.
        open: the calls without an answer, in the order in which the worker makes them.
        failed: the calls that failed.
    """

    batch: Batch
    functions: list[int]
    rows: list[int]
    attempt: int = 0
    open: dict[Call, None] = field(init=False)
    failed: dict[Call, Failure] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.open = {(row, function): None for row in self.rows for function in self.functions}


def cut(batch: Batch, kinds: Sequence[Kind], num_workers: int) -> list[Job]:
    """Cuts a batch into jobs and counts its calls.

    Plain functions go together, a few samples at a time, so that the workers end at about the same time; an async function
    gets many samples, which it waits for together; a function that scores batches gets all.
    """
    rows = [row for row, sample in enumerate(batch.samples) if wants_rules(sample)]
    batch.num_open = len(rows) * len(kinds)
    if batch.num_open == 0:
        return []
    plain = [index for index, kind in enumerate(kinds) if not kind.batched and not kind.is_async]
    shares = [(plain, min(_MAX_ROWS_PER_JOB, math.ceil(len(rows) / (4 * num_workers))))] if plain else []
    for index, kind in enumerate(kinds):
        if kind.batched:
            shares.append(([index], len(rows)))
        elif kind.is_async:
            shares.append(([index], min(_ASYNC_CALLS_PER_JOB, math.ceil(len(rows) / num_workers))))
    return [Job(batch, functions, rows[i : i + size]) for functions, size in shares for i in range(0, len(rows), size)]


def leftovers(job: Job, *, alone: bool) -> list[Job]:
    """Returns jobs for the calls that a job left open; with `alone` one a sample, so that the next death has one suspect."""
    functions_of_row: dict[int, list[int]] = {}
    for row, function in job.open:
        functions_of_row.setdefault(row, []).append(function)
    whole = [] if alone else [row for row, functions in functions_of_row.items() if functions == job.functions]
    jobs = [Job(job.batch, functions, [row], job.attempt) for row, functions in functions_of_row.items() if row not in whole]
    return jobs + ([Job(job.batch, job.functions, whole, job.attempt)] if whole else [])


def wants_rules(sample: RewardSample) -> bool:
    """False for rows that the column `categories` leaves to the reward model."""
    return sample.columns.get("categories", True) not in (False, 0, "false", "False", "0")
