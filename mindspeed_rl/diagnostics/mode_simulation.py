"""Simulation of the trainer modes: seconds an iteration, event by event, from published phase times.

`python -m mindspeed_rl.diagnostics.mode_simulation` prints the tables of docs/mode_figures.md. Nothing is measured here: the
order of events is applied to known phase times, so that modes can be compared before a cluster is reserved.

The model. All responses in flight grow by a token in (fixed + varying x active) seconds: reading the weights takes the fixed
part however many responses there are, the varying part is the work for each. Lengths are lognormal, cut at a limit. On a
fraction f of the devices the varying part takes 1/f of the time, and training on the other devices 1/(1 - f). The fixed part
stays, and is as long as the varying part of a whole batch on all devices. Its scale is such that synchronous generation takes
the published time. A weight sync takes the published time in every mode. A response that continues after a weight sync pays
nothing for its prefix.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from mindspeed_rl.trainers.admission import Admission, Hysteresis, InFlight, QueueMarks


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of an iteration of a synchronous run on shared devices.

    Attributes:
        generate_s, train_s, push_s: generation; everything between it and the weight sync; resharding and offload.
        prompts, samples: prompts of an iteration, responses of each.
        max_length: largest length of a response, in mean lengths.
    """

    name: str
    generate_s: float
    train_s: float
    push_s: float
    prompts: int
    samples: int
    max_length: float = 4.0


@dataclass(frozen=True)
class Moving:
    """Devices of the engines that train while the engines are ahead; see `rl_config.elastic_training_devices`.

    Attributes:
        fraction: of all devices.
        high, wait, patience: see `Hysteresis`.
        move_s: seconds of a move, in which nothing is generated or trained: a save, and the start of all processes.
    """

    fraction: float
    high: float
    wait: float
    patience: int
    move_s: float


@dataclass(frozen=True)
class Elastic:
    """The trainers' devices generate too while an iteration waits; see `rl_config.elastic_rollout`.

    Attributes:
        marks: complete prompts at which they start and end.
        wake_s: seconds until they generate: the trainers leave the devices, and engines get weights; the others generate.
    """

    marks: QueueMarks
    wake_s: float


@dataclass(frozen=True)
class Mode:
    """A trainer mode.

    Attributes:
        admission: decides which prompts are started and taken.
        interrupts: a weight sync does not wait for responses.
        device_fraction: fraction of the devices that generate; 1.0 where all devices generate and train in turn.
        num_spare: samples of a prompt beyond those that train; when enough have ended, the others are aborted.
        places: fraction of an iteration's responses that the engines work on at once.
        longest_first: prompts whose earlier responses were longest start first.
        first_samples: one sample of each prompt starts first, and the others follow by what these say of their length.
        moving: devices move between the roles; None: they stay.
        elastic: the trainers' devices generate while they wait; None: they do not.
    """

    admission: Admission
    interrupts: bool
    device_fraction: float
    num_spare: int = 0
    places: float = math.inf
    longest_first: bool = False
    first_samples: bool = False
    moving: Moving | None = None
    elastic: Elastic | None = None


@dataclass(frozen=True)
class Outcome:
    """Means of the iterations after the first three; moves cost time.

    Attributes:
        iteration_s: seconds an iteration.
        trainer_idle, engine_idle: fraction of that time in which they waited for the other side.
        staleness: mean age of the responses that trained, in versions, by their first token.
        aborted: fraction of the generated tokens that were aborted.
        moves: moves of devices in all iterations.
        helped: share of the iterations in which the trainers' devices generated.
    """

    iteration_s: float
    trainer_idle: float
    engine_idle: float
    staleness: float
    aborted: float = 0.0
    moves: int = 0
    helped: float = 0.0


@dataclass
class _Group:
    """A prompt in flight.

    Attributes:
        missing: responses that it waits for.
        expected: length of its responses, from an earlier epoch; 0 where none is known.
        lengths: its responses that have ended.
        started: number of its responses that have started.
    """

    index: int
    version: int
    missing: int
    expected: float = 0.0
    lengths: list[float] = field(default_factory=list)
    started: int = 0

    def predict(self) -> tuple[bool, float]:
        """Return the sorting key of a waiting response: prompts with none first, then those expected to be long.

        A prompt whose responses are still growing is expected to be long; a length of an earlier epoch counts as one more.
        """
        known = [*self.lengths, *([self.expected] if self.expected else [])]
        return self.started > 0, -sum(known) / len(known) if known else -math.inf


#: spread of the logarithm of lengths
_SIGMA = 0.8
_WARM, _ITERATIONS = 3, 10
#: iterations of runs whose devices move
_MOVING_ITERATIONS = 60


class _Engine:
    """Responses that grow together.

    Attributes:
        busy_s: seconds with at least one of them.
        num_tokens, num_aborted: tokens that were generated, and the aborted ones among them.
    """

    def __init__(self, fixed_s: float, varying_s: float, places: float = math.inf, *, predicts: bool = False) -> None:
        self._fixed, self._varying, self._places = fixed_s, varying_s, places
        self._predicts = predicts
        self._heap: list[tuple[float, int, _Group, float]] = []
        self._waiting: deque[tuple[_Group, float]] = deque()
        self._grown = 0.0
        self._count = itertools.count()
        self.busy_s = self.num_tokens = self.num_aborted = 0.0

    def set_pace(self, varying_s: float) -> None:
        """Let responses grow at another pace from now on."""
        self._varying = varying_s

    def add(self, group: _Group, length: float) -> None:
        self._waiting.append((group, length))
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._heap) < self._places:
            if self._predicts:
                best = min(range(len(self._waiting)), key=lambda index: self._waiting[index][0].predict())
                self._waiting.rotate(-best)
                group, length = self._waiting.popleft()
                self._waiting.rotate(best)
            else:
                group, length = self._waiting.popleft()
            group.started += 1
            heapq.heappush(self._heap, (self._grown + length, next(self._count), group, self._grown))

    def next_end_s(self) -> float:
        """Return the seconds until the next response ends; infinite where there is none."""
        if not self._heap:
            return math.inf
        return (self._heap[0][0] - self._grown) * (self._fixed + self._varying * len(self._heap))

    def advance(self, seconds: float) -> Iterator[_Group]:
        """Let time pass; yield the groups whose last response ends."""
        if not self._heap:
            return
        self.busy_s += seconds
        grown = seconds / (self._fixed + self._varying * len(self._heap))
        self._grown += grown
        self.num_tokens += grown * len(self._heap)
        # time is divided by the pace and multiplied by it again, which does not give the same bits
        while self._heap and self._heap[0][0] <= self._grown + 1e-9:
            _, _, group, start = heapq.heappop(self._heap)
            group.missing -= 1
            group.lengths.append(self._grown - start)
            if not group.missing:
                self._abort(group)
                yield group
        self._fill()

    def _abort(self, group: _Group) -> None:
        self._waiting = deque(item for item in self._waiting if item[0] is not group)
        self.num_aborted += sum(self._grown - start for _, _, other, start in self._heap if other is group)
        self._heap = [item for item in self._heap if item[2] is not group]
        heapq.heapify(self._heap)


def _sample_lengths(times: PhaseTimes, seed: int) -> Iterator[float]:
    """Yield lengths in mean lengths; their mean is 1 but for the limit."""
    generator = random.Random(seed)
    while True:
        yield min(times.max_length, generator.lognormvariate(-(_SIGMA**2) / 2, _SIGMA))


def _sample_prompts(times: PhaseTimes, seed: int, count: int) -> Iterator[tuple[float, list[float]]]:
    """Yield the expected length of a prompt's responses, and so many lengths; half of the variance belongs to the prompt.

    Expected is the mean of as many responses as train, of an earlier epoch.
    """
    generator = random.Random(seed)
    spread = _SIGMA / math.sqrt(2)
    while True:
        mean = generator.gauss(-(_SIGMA**2) / 2, spread)
        lengths = [min(times.max_length, generator.lognormvariate(mean, spread)) for _ in range(times.samples + count)]
        yield sum(lengths[: times.samples]) / times.samples, lengths[times.samples :]


@functools.cache
def _fit_scale(times: PhaseTimes, seed: int) -> float:
    """Return the seconds of the fixed part of a mean length with which a synchronous batch takes generate_s."""
    batch = times.prompts * times.samples
    engine = _Engine(1.0, 1.0 / batch)
    lengths, total = _sample_lengths(times, seed), 0.0
    rounds = 4
    for _ in range(rounds):
        for _ in range(batch):
            engine.add(_Group(0, 0, batch), next(lengths))
        while (step := engine.next_end_s()) < math.inf:
            total += step
            list(engine.advance(step))
    return times.generate_s / (total / rounds)


def simulate(
    times: PhaseTimes, mode: Mode, *, seed: int = 0, by_prompt: bool = False, iterations: int | None = None
) -> Outcome:
    """Return the outcome of a mode.

    Args:
        times: phase times of a synchronous run.
        mode: the mode.
        seed: seed of the lengths.
        by_prompt: the responses to a prompt have similar lengths.
        iterations: number of iterations that are counted.
    """
    batch, admission, moving = times.prompts * times.samples, mode.admission, mode.moving
    fixed, fraction, moves = _fit_scale(times, seed), mode.device_fraction, 0
    marks = None if moving is None else Hysteresis(moving.high, moving.wait, moving.patience)
    engine = _Engine(fixed, fixed / batch / mode.device_fraction, mode.places * batch, predicts=mode.first_samples)

    def move(iteration: int) -> None:
        """Move devices before this iteration to the side that the other one waits for; see `ElasticTraining.on_figures`."""
        nonlocal now, fraction, moves, first
        last = iteration - 1
        # the first iteration of an attempt has no level, and does not count
        if moving is None or marks is None or last <= first:
            return
        if not marks.add(levels[last - 1], waited[last], ends[last] - starts[last]):
            return
        first = iteration
        fraction += -moving.fraction if marks.is_moved else moving.fraction
        engine.set_pace(fixed / batch / fraction)
        now += moving.move_s
        moves += 1

    # other lengths than those that the scale was fitted to
    lengths, num_samples = _sample_lengths(times, seed + 1), times.samples + mode.num_spare
    prompts = _sample_prompts(times, seed + 1, num_samples)
    now, taken, started, first = 0.0, 0, 0, 0
    groups: dict[int, _Group] = {}
    complete: set[int] = set()
    starts: list[float] = []
    ends: list[float] = []
    levels: list[float] = []
    waited: list[float] = []
    busy: list[float] = []
    ages: list[int] = []
    helped: list[int] = []

    def admit(version: int) -> None:
        nonlocal started
        admitted: list[tuple[float, _Group, list[float]]] = []
        for _ in range(admission.compute_room(version, taken, len(groups))):
            expected, own = next(prompts) if by_prompt else (0.0, list(itertools.islice(lengths, num_samples)))
            groups[started] = _Group(started, version, times.samples, expected if mode.longest_first else 0.0)
            admitted.append((expected, groups[started], own))
            started += 1
        if mode.longest_first:
            admitted.sort(key=lambda item: -item[0])
        for _, group, own in admitted:
            for length in own:
                engine.add(group, length)

    def advance(seconds: float) -> None:
        """Let the engine work for so many seconds."""
        nonlocal now
        end = now + seconds
        while now < end:
            step = min(engine.next_end_s(), end - now)
            complete.update(group.index for group in engine.advance(step))
            now += step

    def choose(iteration: int) -> list[int] | None:
        in_flight = [InFlight(index, group.version, index in complete) for index, group in sorted(groups.items())]
        return admission.choose(iteration, times.prompts, in_flight)

    def help_until_ready(iteration: int) -> None:
        """Let all devices generate where few prompts are complete, until enough are."""
        elastic, num_complete = mode.elastic, len(complete)
        if elastic is None or choose(iteration) is not None:
            return
        if not elastic.marks.decide(is_awake=False, num_ready=num_complete, num_in_flight=len(groups)):
            return
        helped.append(iteration)
        advance(elastic.wake_s)
        engine.set_pace(fixed / batch)
        while elastic.marks.decide(is_awake=True, num_ready=len(complete), num_in_flight=len(groups)) or (
            choose(iteration) is None and len(complete) < len(groups)
        ):
            advance(engine.next_end_s())
        engine.set_pace(fixed / batch / fraction)

    admit(0)
    for iteration in range(_WARM + (_ITERATIONS if iterations is None else iterations)):
        move(iteration)
        starts.append(now)
        help_until_ready(iteration)
        while (chosen := choose(iteration)) is None:
            num_complete = len(complete)
            while len(complete) == num_complete:  # nothing else changes which may be chosen
                advance(engine.next_end_s())
        taken += len(chosen)
        ages += [admission.version(iteration) - groups.pop(index).version for index in chosen]
        complete.difference_update(chosen)
        waited.append(now - starts[-1])
        advance(times.train_s / (1.0 if fraction == 1.0 else 1.0 - fraction))
        before_push = now
        levels.append(len(complete) / times.prompts)
        while not mode.interrupts and (step := engine.next_end_s()) < math.inf:
            advance(step)
        waited[-1] += now - before_push
        now += times.push_s  # the engine is paused
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
        aborted=engine.num_aborted / engine.num_tokens,
        moves=moves,
        helped=sum(iteration >= _WARM for iteration in helped) / count,
    )


def simulate_partial(
    times: PhaseTimes, split: int, over_sample_rate: float, *, seed: int = 0, by_prompt: bool = False
) -> Outcome:
    """Return the outcome of a synchronous run with `partial_rollout_max_split` and `over_sample_rate`.

    All devices generate and train in turn; a slice ends when each response has ended or has grown by `max_length / split`.
    """
    batch, fixed = times.prompts * times.samples, _fit_scale(times, seed)
    admission = Admission("pace", split, times.prompts)
    limit = math.ceil((1 + over_sample_rate) * times.prompts)
    lengths, prompts = _sample_lengths(times, seed + 1), _sample_prompts(times, seed + 1, times.samples)
    groups: dict[int, tuple[int, list[float]]] = {}  # index -> version of the first token, lengths that are missing
    started, ages = 0, list[int]()
    generate_s: list[float] = []
    for iteration in range(_WARM + _ITERATIONS):
        spent, chosen = 0.0, None
        while chosen is None:
            while len(groups) < limit:
                own = next(prompts)[1] if by_prompt else list(itertools.islice(lengths, times.samples))
                groups[started] = iteration, own
                started += 1
            engine = _Engine(fixed, fixed / batch)
            for _, missing in groups.values():
                for index, length in enumerate(missing):
                    if length > 0:
                        grown = min(length, times.max_length / split)
                        engine.add(_Group(0, 0, batch * limit), grown)
                        missing[index] = max(0.0, length - grown) if length - grown > 1e-9 else 0.0
            while (step := engine.next_end_s()) < math.inf:
                spent += step
                list(engine.advance(step))
            in_flight = [InFlight(index, version, not any(missing)) for index, (version, missing) in sorted(groups.items())]
            chosen = admission.choose(iteration, times.prompts, in_flight)
        ages += [iteration - groups.pop(index)[0] for index in chosen]
        generate_s.append(spent)
    rollout_s = sum(generate_s[_WARM:]) / _ITERATIONS
    total = rollout_s + times.train_s + times.push_s
    staleness = sum(ages[_WARM * times.prompts :]) / (_ITERATIONS * times.prompts)
    return Outcome(total, rollout_s / total, 1.0 - rollout_s / total, staleness)


def simulate_modes(times: PhaseTimes) -> dict[str, tuple[Mode, Outcome]]:
    """Return the outcome of each mode, by its name in the table; sync comes first.

    Modes with dedicated devices have the fraction of the devices, in eighths, with which an iteration is shortest.
    """
    prompts = times.prompts
    modes = {
        "one_step_off": Mode(Admission("wait", 1, prompts), False, 0.5),
        "async, 0.5": Mode(Admission("pace", 0.5, prompts), True, 0.5),
        "async, 1": Mode(Admission("pace", 1, prompts), True, 0.5),
        "async, 2": Mode(Admission("pace", 2, prompts), True, 0.5),
    }
    sync = Mode(Admission("pace", 0, prompts), False, 1.0)
    outcomes = {"sync": (sync, simulate(times, sync))}
    for name, mode in modes.items():
        splits = [replace(mode, device_fraction=eighths / 8) for eighths in range(2, 7)]
        outcomes[name] = min(((split, simulate(times, split)) for split in splits), key=lambda pair: pair[1].iteration_s)
    return outcomes


#: docs/mode_figures.md names the sources
_PUBLISHED = (
    PhaseTimes("DeepSeek-R1, 128 A3 cards", 495.4, 134.0 + 116.7 + 495.1, 67.6 + 20.3, 32, 8),
    PhaseTimes("DeepSeek-R1, optimised", 318.3, 104.7 + 328.8, 11.2 + 24.5, 32, 8),
    PhaseTimes("Qwen3-235B, 64 A3 cards", 4066.0, 1262.0 + 2353.0, 99.0, 32, 8),
    PhaseTimes("Qwen3-30B-A3B, 4 x 910B", 220.7, 342.8 - 220.7, 0.0, 32, 8),
)


def build_table() -> str:
    """Return a Markdown table with a row for each set of phase times and mode."""
    lines = [
        "| phase times | mode, threshold | devices that generate | s an iteration | times sync | trainer waits | engine idles "
        "| mean staleness |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for times in _PUBLISHED:
        outcomes = simulate_modes(times)
        sync_s = outcomes["sync"][1].iteration_s
        for name, (mode, outcome) in outcomes.items():
            devices = "all, in turn" if mode.device_fraction == 1.0 else f"{mode.device_fraction * 8:.0f}/8"
            lines.append(
                f"| {times.name} | {name} | {devices} | {outcome.iteration_s:.0f} | {sync_s / outcome.iteration_s:.2f} | "
                f"{outcome.trainer_idle:.0%} | {outcome.engine_idle:.0%} | {outcome.staleness:.1f} |"
            )
    return "\n".join(lines)


#: partial_rollout_max_split and over_sample_rate of the rows
_PARTIAL = ((2, 0.25), (2, 1.0), (4, 0.25), (4, 1.0), (8, 1.0))


def build_partial_table() -> str:
    """Return a Markdown table with a row for each set of phase times and form of partial rollouts."""
    lines = [
        "| phase times | split | over-sampling | s an iteration | times sync | mean staleness |",
        "|---|---|---|---|---|---|",
    ]
    for times in _PUBLISHED:
        sync_s = simulate(times, Mode(Admission("pace", 0, times.prompts), False, 1.0)).iteration_s
        for split, rate in _PARTIAL:
            outcome = simulate_partial(times, split, rate)
            speed = sync_s / outcome.iteration_s
            lines.append(
                f"| {times.name} | {split} | {rate:g} | {outcome.iteration_s:.0f} | {speed:.2f} | {outcome.staleness:.1f} |"
            )
    return "\n".join(lines)


def build_tail_table() -> str:
    """Return a Markdown table with the methods against a long tail; lengths are similar in a group."""
    times = _PUBLISHED[2]
    sync = Mode(Admission("pace", 0, times.prompts), False, 1.0)
    ahead, trainer_fraction = replace(sync, admission=Admission("pace", 1, times.prompts), interrupts=True), 3 / 8
    quarter = replace(sync, places=0.25)
    rows: list[tuple[str, str, Outcome]] = [
        (name, places, simulate(times, mode, by_prompt=True))
        for name, places, mode in (
            ("sync", "all", sync),
            ("one_step_off", "all", Mode(Admission("wait", 1, times.prompts), False, trainer_fraction)),
            ("async, 1", "all", replace(ahead, device_fraction=trainer_fraction)),
            ("async, 0, 2 spare samples", "all", replace(sync, num_spare=2)),
            ("async, 1, 2 spare samples", "all", replace(ahead, device_fraction=trainer_fraction, num_spare=2)),
            ("sync", "a quarter", quarter),
            ("sync, longest first", "a quarter", replace(quarter, longest_first=True)),
            ("sync, first samples", "a quarter", replace(quarter, first_samples=True)),
            ("sync, longest first, first samples", "a quarter", replace(quarter, longest_first=True, first_samples=True)),
            ("async, 1", "a quarter", replace(ahead, device_fraction=trainer_fraction, places=0.25)),
        )
    ]
    rows.insert(1, ("sync, split 8, over-sampling 1", "all", simulate_partial(times, 8, 1.0, by_prompt=True)))
    lines = [
        "| mode | samples at once | s an iteration | times sync | tokens aborted | mean staleness |",
        "|---|---|---|---|---|---|",
    ]
    first = {}
    for name, places, outcome in rows:
        speed = first.setdefault(places, outcome.iteration_s) / outcome.iteration_s
        cells = [name, places, f"{outcome.iteration_s:.0f}", f"{speed:.2f}", f"{outcome.aborted:.0%}"]
        lines.append("| " + " | ".join([*cells, f"{outcome.staleness:.1f}"]) + " |")
    return "\n".join(lines)


#: patience of devices that move
_PATIENCE = (1, 3)
#: seconds of a move at least
_MOVE_S = 300.0


def build_moving_table() -> str:
    """Return a Markdown table of devices of the engines that train while the engines are ahead, with the default marks."""
    lines = [
        "| phase times | devices that generate | that move | patience | s an iteration, off | on | times best split, on "
        "| moves |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for times in _PUBLISHED:
        half = Mode(Admission("pace", 1, times.prompts), True, 0.5)

        def run(mode: Mode, times: PhaseTimes = times) -> Outcome:
            return simulate(times, mode, iterations=_MOVING_ITERATIONS)

        fixed = {eighths: run(replace(half, device_fraction=eighths / 8)).iteration_s for eighths in range(1, 7)}
        for eighths, moved in ((6, 4), (4, 2), (4, 1), (3, 1)):
            for patience in _PATIENCE:
                moving = Moving(moved / 8, 1.0, 0.2, patience, max(_MOVE_S, times.push_s))
                on = run(replace(half, device_fraction=eighths / 8, moving=moving))
                cells = [times.name, f"{eighths}/8", f"{moved}/8", f"{patience}", f"{fixed[eighths]:.0f}"]
                cells += [f"{on.iteration_s:.0f}", f"{min(fixed.values()) / on.iteration_s:.2f}", f"{on.moves}"]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


#: eighths of the devices that generate in the rows of elastic rollouts
_EIGHTHS = (1, 2, 3, 4)
#: seconds of a wake-up at least
_WAKE_S = 20.0


def build_elastic_table() -> str:
    """Return a Markdown table of trainers' devices that generate while they wait, with the default marks."""
    lines = [
        "| phase times | devices that generate | s an iteration, off | on | times best split, on | trainer waits, off | on "
        "| helped in |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for times in _PUBLISHED:
        half = Mode(Admission("pace", 1, times.prompts), True, 0.5)
        best_s = min(simulate(times, replace(half, device_fraction=eighths / 8)).iteration_s for eighths in range(1, 7))
        elastic = Elastic(QueueMarks(0.5 * times.prompts, times.prompts), max(_WAKE_S, times.push_s))
        for eighths in _EIGHTHS:
            split = replace(half, device_fraction=eighths / 8)
            off, on = simulate(times, split), simulate(times, replace(split, elastic=elastic))
            cells = [times.name, f"{eighths}/8", f"{off.iteration_s:.0f}", f"{on.iteration_s:.0f}"]
            cells += [f"{best_s / on.iteration_s:.2f}", f"{off.trainer_idle:.0%}", f"{on.trainer_idle:.0%}", f"{on.helped:.0%}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(
        f"{build_table()}\n\n{build_partial_table()}\n\n{build_tail_table()}\n\n{build_moving_table()}\n\n{build_elastic_table()}"
    )
