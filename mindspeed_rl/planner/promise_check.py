"""A promise while its run goes: measured figures against it after 3, 10 and 50 iterations, with the cause where they differ.

A cause is found, not listed: each one compares figures that the run itself measures with what the promise assumed, and is named
only where they say so. `planned`, `measured` and their ratio are of the later half of the iterations so far.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.observer import RunObserver
from mindspeed_rl.run.phases import Phases

#: iterations after which a promise is checked
CHECKS = (3, 10, 50)
#: a measured figure is as promised up to this factor beyond its range
_TOLERANCE = 1.05
#: a ratio from which lengths, or a rank, explain seconds
_LONGER, _SLOWER = 1.2, 1.3
_PASSES = tuple(
    phase.timer
    for phase in (
        Phases.UPDATE_ACTOR,
        Phases.REF_LOG_PROBS,
        Phases.ACTOR_LOG_PROBS,
        Phases.UPDATE_CRITIC,
        Phases.VALUES,
        Phases.MODEL_REWARDS,
        Phases.TEACHER_LOG_PROBS,
    )
)
#: phases that take longer with more tokens
_OF_TOKENS = ("all", Phases.GENERATE.timer, Phases.JUDGE.timer, *_PASSES)
#: phases at whose ends training state leaves the device, or comes back
_BESIDE_COPIES = (Phases.GENERATE.timer, Phases.UPDATE_ACTOR.timer, Phases.PUSH_WEIGHTS.timer)

_UNEXPLAINED = "no measured figure explains it"

_Medians = Mapping[str, float]


@dataclass(frozen=True)
class Promised:
    """A figure that was promised.

    Attributes:
        name: timer of a phase, or "all" for an iteration; "memory: PHASE" for GiB.
        unit: s or GiB.
        metric: metric of the measured value.
    """

    name: str
    unit: str
    metric: str
    low: float
    high: float


@dataclass(frozen=True)
class Assumed:
    """What a promise assumed of the samples and of the run.

    Attributes:
        response, prompt: mean tokens.
        limit: longest response.
        is_eager: the engine was to capture no graphs.
        offloads: training state leaves the device for the rollout.
        has_servers: the engines have dedicated devices, so that the rollout of an iteration is a wait for them.
    """

    response: float
    prompt: float
    limit: float
    is_eager: bool
    offloads: bool
    has_servers: bool

    @property
    def tokens(self) -> float:
        """Mean tokens of a sample."""
        return self.response + self.prompt


@dataclass(frozen=True)
class Kept:
    """A promised figure next to what was measured.

    Attributes:
        cause: sentences; empty where the figure is as promised, or nothing that is measured explains it.
    """

    promised: Promised
    measured: float
    cause: str

    @property
    def is_broken(self) -> bool:
        """True where the figure is above the promised range."""
        return self.measured > self.promised.high * _TOLERANCE

    @property
    def is_better(self) -> bool:
        """True where the figure is below the promised range."""
        return self.measured < self.promised.low / _TOLERANCE

    def __str__(self) -> str:
        """Describe the figure in a line."""
        promised, unit = self.promised, self.promised.unit
        cause = f": {self.cause}" if self.cause else ""
        return f"{promised.name} {self.measured:.3g} {unit}, promised {promised.low:.3g} to {promised.high:.3g}{cause}"

    def encode(self) -> dict[str, Any]:
        """Return the row of the report's page."""
        promised = self.promised
        return {
            "name": promised.name,
            "unit": promised.unit,
            "low": promised.low,
            "high": promised.high,
            "measured": self.measured,
            "broken": self.is_broken,
            "cause": self.cause,
        }


# ---------------------------------------------------------------------- causes


def _find_lengths(name: str, medians: _Medians, assumed: Assumed) -> Iterator[str]:
    """Yield how much longer samples are than assumed."""
    if name not in _OF_TOKENS:
        return
    response, prompt = medians.get("response_length/mean"), medians.get("prompt_length/mean")
    if response is not None and response > _LONGER * assumed.response:
        more = ""
        if prompt is not None and name in _PASSES:
            more = f", so that micro-batches hold {(response + prompt) / assumed.tokens:.2g} times as many tokens in all"
        yield f"responses are longer, {response:.0f} tokens in the mean instead of {assumed.response:.0f}{more}"
    if prompt is not None and prompt > _LONGER * assumed.prompt and name in ("all", *_PASSES):
        yield f"prompts are longer, {prompt:.0f} tokens in the mean instead of {assumed.prompt:.0f}"


def _find_truncation(name: str, medians: _Medians, assumed: Assumed) -> Iterator[str]:
    """Yield the fraction of responses that are cut at the limit."""
    cut = medians.get("rollout/truncated_fraction", 0.0)
    if name in (Phases.GENERATE.timer, "all") and cut >= 0.1:
        yield f"{cut:.0%} of the responses run into the limit of {assumed.limit:.0f} tokens"


def _find_eager(name: str, medians: _Medians, assumed: Assumed) -> Iterator[str]:
    """Yield that the engine runs without graphs though the promise was of captured ones."""
    if name in ("all", Phases.GENERATE.timer) and medians.get("rollout/eager", 0.0) > 0 and not assumed.is_eager:
        yield "the engine runs in eager mode, without the captured graphs that were planned"


def _find_slow_rank(name: str, medians: _Medians, assumed: Assumed) -> Iterator[str]:
    """Yield the worker whose own work in the phase takes longer than the other workers' work."""
    # in an update all ranks end together; a pass without a step shows which one is late
    names = (name, *(timer for timer in _PASSES if name in (*_PASSES, "all")))
    ratios = {timer: medians.get(f"imbalance/{timer}", 0.0) for timer in names}
    slowest = max(ratios, key=lambda timer: ratios[timer])
    if ratios[slowest] >= _SLOWER:
        rank = medians[f"imbalance/{slowest}_worker"]
        ratio = ratios[slowest]
        # never 2.4e+02
        times = f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
        yield f"worker {rank:.0f} is slow, {times} times the median of the others in {slowest}"


def _find_offload(name: str, medians: _Medians, assumed: Assumed) -> Iterator[str]:
    """Yield the seconds in which training state moves, where they are a good part of the phase."""
    moved = medians.get("timing/offload", 0.0)
    total = medians.get(f"timing/{name}", 0.0)
    if assumed.offloads and moved > 0.2 * total > 0 and name in ("all", *_BESIDE_COPIES):
        yield f"offloading takes {moved:.3g} s (offload_train_optimizer, offload_train_param)"


def _find_waiting(name: str, medians: _Medians, assumed: Assumed) -> Iterator[str]:
    """Yield the seconds in which an iteration waits for rewards, tools or servers."""
    total = medians.get("timing/all", 0.0)
    rewards = medians.get("timing/reward_wait", 0.0)
    if name == "all" and rewards > 0.15 * total > 0:
        yield f"the trainer waits {rewards:.3g} s for rewards"
    tools = medians.get("tool_seconds/mean", 0.0)
    if name in ("all", Phases.GENERATE.timer) and tools > 0.2 * medians.get(f"timing/{name}", 0.0) > 0:
        yield f"samples wait {tools:.3g} s for tools"
    servers = medians.get(f"timing/{Phases.GENERATE.timer}", 0.0)
    if assumed.has_servers and name in ("all", Phases.GENERATE.timer) and servers > 0.15 * total > 0:
        yield f"the trainer waits {servers:.3g} s for rollout servers"


def _find_swap(name: str, medians: _Medians, assumed: Assumed) -> Iterator[str]:
    """Yield pages that the machine reads back from swap."""
    pages = medians.get("host/swapped_in_mib", 0.0)
    if pages > 16.0:
        yield f"the machine swaps, {pages:.0f} MiB read back in an iteration"


def _find_contention(name: str, medians: _Medians, assumed: Assumed) -> Iterator[str]:
    """Yield that other programs take the machine's cores, or that its cores are throttled."""
    others = medians.get("host/others_cores", 0.0)
    cores = medians.get("host/cores", 0.0)
    if cores and others > 0.25 * cores:
        yield f"other programs take {others:.2g} of {cores:.0f} cores of the driver's machine"
    steal = medians.get("host/stolen_fraction", 0.0)
    if steal > 0.05:
        yield f"the virtual machine gets {1 - steal:.0%} of its cores' time"
    throttled = medians.get("host/throttled", 0.0)
    if throttled > 0:
        yield "cores of the driver's machine were throttled by heat"


#: causes in the order in which they are said
_CAUSES: tuple[Callable[[str, _Medians, Assumed], Iterator[str]], ...] = (
    _find_lengths,
    _find_truncation,
    _find_eager,
    _find_slow_rank,
    _find_offload,
    _find_waiting,
    _find_swap,
    _find_contention,
)


def compare_with(promised: Sequence[Promised], assumed: Assumed, history: History) -> list[Kept]:
    """Return each promised figure that the run measures, with the cause where it is above its range."""
    medians = {name: statistics.median(half.y) for name, half in history.later_half().items()}
    rows = []
    for figure in promised:
        measured = medians.get(figure.metric)
        if measured is None:
            continue
        row = Kept(figure, measured, "")
        if row.is_broken and figure.unit == "s":
            causes = "; ".join(cause for find in _CAUSES for cause in find(figure.name, medians, assumed))
            row = Kept(figure, measured, causes or _UNEXPLAINED)
        rows.append(row)
    return rows


def format_kept(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of a report's page as a table for a terminal."""
    lines = [f"{'':<24}{'promised':>22}{'measured':>12}   cause"]
    for row in rows:
        promised = f"{row['low']:.3g} to {row['high']:.3g} {row['unit']}"
        mark = "!" if row["broken"] else " "
        lines.append(f"{mark} {row['name']:<22}{promised:>22}{row['measured']:>12.3g}   {row['cause']}".rstrip())
    return "\n".join(lines)


class BrokenPromiseError(RuntimeError):
    """A run is not as promised, and was asked to stop then."""


class PromiseWatch(RunObserver):
    """Check a promise while the run goes, each figure once; an observer of its figures.

    Args:
        promised: figures of the promise.
        assumed: what the promise assumed.
        show: takes a line.
        history: iterations before a resume, which are not checked again.
        is_strict: a broken promise ends the run.
    """

    def __init__(
        self,
        promised: Sequence[Promised],
        assumed: Assumed,
        show: Callable[[str], None],
        history: History,
        *,
        is_strict: bool = False,
    ) -> None:
        self._promised, self._assumed, self._show = promised, assumed, show
        self._history, self._is_strict = history, is_strict
        self._shown = set[str]()

    def on_figures(self, iteration: int, results: Mapping[str, float]) -> None:
        """Show a figure that is not as promised, and name the others, after as many iterations as CHECKS says.

        The figure is the first one with a cause, where one has any.

        Raises:
            BrokenPromiseError: one is above its range, and the run was asked to stop then.
        """
        self._history.add({"iteration": iteration, **results})
        if iteration not in CHECKS:
            return
        rows = compare_with(self._promised, self._assumed, self._history)
        new = [row for row in rows if (row.is_broken or row.is_better) and row.promised.name not in self._shown]
        self._shown |= {row.promised.name for row in new}
        new.sort(key=lambda row: row.cause in ("", _UNEXPLAINED))
        if new:
            others = ", ".join(row.promised.name for row in new[1:])
            self._show(f"promise, iteration {iteration}: {new[0]}{f'; the report has {others} too' if others else ''}")
        broken = [row for row in rows if row.is_broken]
        if broken and self._is_strict:
            raise BrokenPromiseError(f"the run is not as promised (--strict): {'; '.join(map(str, broken))}")
