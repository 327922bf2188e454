"""Seconds an iteration by trainer_mode, computed event by event from phase times that others published.

`python -m mindspeed_rl.diagnostics.mode_simulation` prints the table of docs/modes.md. Nothing is measured here: it says what
the order of events alone makes of known phase times, so that modes can be compared before a cluster is reserved.

The model. All responses that are being generated grow by a token in (fixed + varying x active) seconds: reading the weights
takes the fixed part however many there are, the varying part is the work for each. Lengths are lognormal, cut at a limit. On a
share s of the devices the varying part takes 1/s of the time, and training on the other share 1/(1 - s). The fixed part stays,
and is as long as the varying part of a whole batch on all devices. Its scale is such that synchronous generation takes the
published time. A push takes as long as published whoever waits for it. What goes on behind a push pays nothing for its prefix.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mindspeed_rl.trainers.admission import Admission, InFlight


@dataclass(frozen=True)
class PhaseTimes:
    """What an iteration of a synchronous run on shared devices takes.

    Attributes:
        generate_s, train_s, push_s: generation; everything between it and the push; resharding and offload.
        prompts, samples: prompts of an iteration, responses of each.
        longest: of a batch, in mean lengths; the limit of lengths.
    """

    name: str
    generate_s: float
    train_s: float
    push_s: float
    prompts: int
    samples: int
    longest: float = 4.0


@dataclass(frozen=True)
class Mode:
    """Attributes:
    admission: which prompts are started and taken.
    interrupts: a push does not wait for what is being generated.
    share: of the devices that generate, 1.0 where all do both in turn.
    """

    admission: Admission
    interrupts: bool
    share: float


@dataclass(frozen=True)
class Outcome:
    """Attributes:
    iteration_s: mean of the iterations after the first three.
    trainer_idle, engine_idle: share of that time in which they waited for the other side.
    staleness: mean age of what trained, in versions, by each response's first token.
    """

    iteration_s: float
    trainer_idle: float
    engine_idle: float
    staleness: float


@dataclass
class _Group:
    number: int
    version: int
    missing: int


#: spread of the logarithm of lengths
_SIGMA = 0.8
_WARM, _ITERATIONS = 3, 10


class _Engine:
    """Responses that grow together.

    Attributes:
        active: how many.
    """

    def __init__(self, fixed_s: float, varying_s: float) -> None:
        self._fixed, self._varying = fixed_s, varying_s
        self._heap: list[tuple[float, int, _Group]] = []
        self._grown = 0.0
        self._count = itertools.count()
        self.busy_s = 0.0

    @property
    def active(self) -> int:
        return len(self._heap)

    def begin(self, group: _Group, length: float) -> None:
        heapq.heappush(self._heap, (self._grown + length, next(self._count), group))

    def next_end_s(self) -> float:
        """Seconds until the next response ends."""
        if not self._heap:
            return math.inf
        return (self._heap[0][0] - self._grown) * self._pace()

    def advance(self, seconds: float) -> Iterator[_Group]:
        """Time goes by; yields the groups whose last response ends."""
        if not self._heap:
            return
        self.busy_s += seconds
        self._grown += seconds / self._pace()
        # time is divided by the pace and multiplied by it again, which does not give the same bits
        while self._heap and self._heap[0][0] <= self._grown + 1e-9:
            group = heapq.heappop(self._heap)[2]
            group.missing -= 1
            if not group.missing:
                yield group

    def _pace(self) -> float:
        return self._fixed + self._varying * self.active


def _lengths(times: PhaseTimes, seed: int) -> Iterator[float]:
    """In mean lengths, mean 1 but for the cut."""
    generator = random.Random(seed)
    while True:
        yield min(times.longest, generator.lognormvariate(-(_SIGMA**2) / 2, _SIGMA))


@functools.cache
def _scale(times: PhaseTimes, seed: int) -> float:
    """Seconds of the fixed part of a mean length, by which a synchronous batch takes generate_s."""
    batch = times.prompts * times.samples
    engine = _Engine(1.0, 1.0 / batch)
    lengths, total = _lengths(times, seed), 0.0
    rounds = 4
    for _ in range(rounds):
        for _ in range(batch):
            engine.begin(_Group(0, 0, batch), next(lengths))
        while engine.active:
            step = engine.next_end_s()
            total += step
            list(engine.advance(step))
    return times.generate_s / (total / rounds)


def simulate(times: PhaseTimes, mode: Mode, *, seed: int = 0) -> Outcome:
    """What an iteration takes in this mode."""
    batch, admission = times.prompts * times.samples, mode.admission
    fixed = _scale(times, seed)
    engine = _Engine(fixed, fixed / batch / mode.share)
    train_s = times.train_s / (1.0 if mode.share == 1.0 else 1.0 - mode.share)
    # other lengths than those that the scale was fitted to
    lengths = _lengths(times, seed + 1)
    now, taken, started = 0.0, 0, 0
    groups: dict[int, _Group] = {}
    complete: set[int] = set()
    ends: list[float] = []
    waited: list[float] = []
    busy: list[float] = []
    ages: list[int] = []

    def admit(version: int) -> None:
        nonlocal started
        for _ in range(admission.compute_room(version, taken, len(groups))):
            groups[started] = _Group(started, version, times.samples)
            for _ in range(times.samples):
                engine.begin(groups[started], next(lengths))
            started += 1

    def go_on(seconds: float) -> None:
        """Time goes by for the engine."""
        nonlocal now
        end = now + seconds
        while now < end:
            step = min(engine.next_end_s(), end - now)
            complete.update(group.number for group in engine.advance(step))
            now += step

    def in_flight() -> list[InFlight]:
        return [InFlight(number, group.version, number in complete) for number, group in sorted(groups.items())]

    admit(0)
    for iteration in range(_WARM + _ITERATIONS):
        began = now
        while (chosen := admission.choose(iteration, times.prompts, in_flight())) is None:
            known = len(complete)
            while len(complete) == known:  # nothing else changes what may be chosen
                go_on(engine.next_end_s())
        taken += len(chosen)
        ages += [admission.version(iteration) - groups.pop(number).version for number in chosen]
        complete.difference_update(chosen)
        waited.append(now - began)
        go_on(train_s)
        before_push = now
        while not mode.interrupts and engine.active:
            go_on(engine.next_end_s())
        waited[-1] += now - before_push
        now += times.push_s  # the engine stands still
        admit(admission.version(iteration + 1))
        ends.append(now)
        busy.append(engine.busy_s)
    total = ends[-1] - ends[_WARM - 1]
    count = len(ends) - _WARM
    return Outcome(
        iteration_s=total / count,
        trainer_idle=sum(waited[_WARM:]) / total,
        engine_idle=max(0.0, 1.0 - (busy[-1] - busy[_WARM - 1]) / total),
        staleness=sum(ages[_WARM * times.prompts :]) / (count * times.prompts),
    )


def best(times: PhaseTimes, mode: Mode) -> tuple[Mode, Outcome]:
    """The mode on the share of the devices, in eighths, at which an iteration is shortest."""
    tried = [replace(mode, share=eighths / 8) for eighths in range(2, 7)]
    return min(((one, simulate(times, one)) for one in tried), key=lambda found: found[1].iteration_s)


#: docs/modes.md names the sources
PUBLISHED = (
    PhaseTimes("DeepSeek-R1, 128 A3 cards", 495.4, 134.0 + 116.7 + 495.1, 67.6 + 20.3, 32, 8),
    PhaseTimes("DeepSeek-R1, optimised", 318.3, 104.7 + 328.8, 11.2 + 24.5, 32, 8),
    PhaseTimes("Qwen3-235B, 64 A3 cards", 4066.0, 1262.0 + 2353.0, 99.0, 32, 8),
    PhaseTimes("Qwen3-30B-A3B, 4 x 910B", 220.7, 342.8 - 220.7, 0.0, 32, 8),
)


def modes_of(times: PhaseTimes) -> dict[str, Mode]:
    """By the words of the table; shares are those of one half."""
    prompts = times.prompts
    return {
        "sync": Mode(Admission("pace", 0, prompts), False, 1.0),
        "one_step_off": Mode(Admission("wait", 1, prompts), False, 0.5),
        "async, 0.5": Mode(Admission("pace", 0.5, prompts), True, 0.5),
        "async, 1": Mode(Admission("pace", 1, prompts), True, 0.5),
        "async, 2": Mode(Admission("pace", 2, prompts), True, 0.5),
    }


def table() -> str:
    """Markdown: a row for each set of phase times and mode."""
    lines = [
        "| phase times | mode, threshold | devices that generate | s an iteration | times sync | trainer waits | engine idles "
        "| mean staleness |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for times in PUBLISHED:
        slowest = 0.0
        for name, mode in modes_of(times).items():
            found, outcome = (mode, simulate(times, mode)) if mode.share == 1.0 else best(times, mode)
            slowest = slowest or outcome.iteration_s  # of sync, which comes first
            share = "all, in turn" if found.share == 1.0 else f"{found.share * 8:.0f}/8"
            lines.append(
                f"| {times.name} | {name} | {share} | {outcome.iteration_s:.0f} | {slowest / outcome.iteration_s:.2f} | "
                f"{outcome.trainer_idle:.0%} | {outcome.engine_idle:.0%} | {outcome.staleness:.1f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
