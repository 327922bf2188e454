"""Plans as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_rl.config.violation import written
from mindspeed_rl.planner.advice import Change
from mindspeed_rl.planner.chips import GIB
from mindspeed_rl.planner.memory import EXACT, MODEL_ERROR, Dies, MemoryPlan, Phase


def memory_text(plan: MemoryPlan, changes: Sequence[Change]) -> str:
    """Return the plan as `mindspeed-rl plan memory` prints it."""
    fullest = plan.fullest
    peak = fullest.peak
    low, high = (bound / GIB for bound in peak.range)
    lines = [
        f"{plan.verdict}: the peak is {_gib(peak.total)} GiB ({low:.0f} to {high:.0f}) of the {plan.capacity / GIB:.0f} GiB "
        f"of a die of {plan.chip}, in phase {peak.name}, on {fullest.name} (dies {fullest.ranks})",
        "",
        f"GiB of a die by owner and phase; * is modelled and may be off by {MODEL_ERROR:.0%}, the rest is counted",
    ]
    for dies in _shown(plan):
        lines += ["", f"{dies.name}, dies {dies.ranks}", *_table(dies)]
    if plan.cache is not None:
        cache = plan.cache
        runs = cache.room // cache.sequence if cache.sequence else 0
        lines += [
            "",
            f"KV cache of a rank: {cache.bytes_per_token / 1024:.0f} KiB a token; room for {runs} sequences of the longest "
            f"length, {cache.sequences} may run at once and would take {_gib(cache.needed)} GiB",
        ]
    lines += [f"  - {problem}" for problem in plan.problems]
    if changes:
        enough = changes[0].plan.verdict == "fits"
        lines += ["", "Changes after which it fits, nearest first" if enough else "Nearest to fitting"]
        lines += [f"  {_change(change)}" for change in changes]
    elif plan.verdict == "does not fit":
        lines += ["", "No change of the layout, of offloading or of recomputation was found after which it fits."]
    return "\n".join(lines)


def _shown(plan: MemoryPlan) -> list[Dies]:
    """The fullest dies, and the emptiest where they differ."""
    emptiest = min(plan.dies, key=lambda dies: dies.peak.total)
    fullest = plan.fullest
    return [fullest] if emptiest.peak.total == fullest.peak.total else [fullest, emptiest]


def _table(dies: Dies) -> list[str]:
    owners = list(dict.fromkeys(owner for phase in dies.phases for owner in phase.owners))
    names = [owner if owner in EXACT else f"{owner} *" for owner in owners]
    first = max(len(name) for name in [*names, "together"])
    heads = [phase.name for phase in dies.phases]
    lines = [" " * (first + 2) + "  ".join(f"{head:>7}" for head in heads)]
    for owner, name in zip(owners, names):
        cells = [_cell(phase, owner, len(head)) for phase, head in zip(dies.phases, heads)]
        lines.append(f"  {name:<{first}}" + "  ".join(cells))
    totals = [f"{_gib(phase.total):>{max(7, len(head))}}" for phase, head in zip(dies.phases, heads)]
    return [*lines, f"  {'together':<{first}}" + "  ".join(totals)]


def _cell(phase: Phase, owner: str, width: int) -> str:
    count = phase.owners.get(owner)
    return f"{'' if count is None else _gib(count):>{max(7, width)}}"


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}" if 0 < count < GIB else f"{count / GIB:.1f}"


def _change(change: Change) -> str:
    keys = " ".join(f"{name}={written(value)}" for name, value in change.values.items())
    peak = change.plan.fullest.peak
    return f"{keys}\n      then {_gib(peak.total)} GiB in {peak.name}; costs: {change.costs}"


def memory_json(plan: MemoryPlan, changes: Sequence[Change]) -> dict[str, Any]:
    """Return the plan as plain values; bytes are whole numbers."""
    peak = plan.fullest.peak
    return {
        "verdict": plan.verdict,
        "chip": plan.chip,
        "capacity": plan.capacity,
        "peak": {
            "bytes": peak.total,
            "range": list(peak.range),
            "phase": peak.name,
            "dies": plan.fullest.ranks,
            "group": plan.fullest.name,
        },
        "dies": [
            {
                "name": dies.name,
                "ranks": dies.ranks,
                "count": dies.count,
                "phases": [{"phase": phase.name, "bytes": phase.total, "owners": phase.owners} for phase in dies.phases],
            }
            for dies in plan.dies
        ],
        "kv_cache": None if plan.cache is None else vars(plan.cache),
        "problems": list(plan.problems),
        "modelled_may_be_off_by": MODEL_ERROR,
        "changes": [
            {
                "values": change.values,
                "costs": change.costs,
                "verdict": change.plan.verdict,
                "bytes": change.plan.fullest.peak.total,
            }
            for change in changes
        ],
    }
