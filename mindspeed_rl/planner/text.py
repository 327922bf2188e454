"""Plans as text for a terminal, and as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rl.config.rules.violation import written
from mindspeed_rl.planner.advice import Change
from mindspeed_rl.planner.assumptions import Assumption
from mindspeed_rl.planner.chips import GIB, Chip
from mindspeed_rl.planner.fit import Found, Wanted
from mindspeed_rl.planner.memory import EXACT, MODEL_ERROR, Dies, MemoryPlan, Phase
from mindspeed_rl.planner.seconds import ModeTime, TimePlan

#: what a verdict means, behind it
_MEANING = {
    "tight": "It fits as it is computed, and not where all that is modelled takes the most it may.",
    "over": "It does not fit as it is computed, and might where all that is modelled takes less.",
}


def memory_text(plan: MemoryPlan, changes: Sequence[Change], assumed: Sequence[Assumption]) -> str:
    """Return the plan as `mindspeed-rl plan memory` prints it."""
    fullest = plan.fullest
    peak = fullest.peak
    low, high = (bound / GIB for bound in peak.range)
    lines = [
        f"{plan.verdict}: the peak is {_gib(peak.total)} GiB ({low:.0f} to {high:.0f}) of the {plan.capacity / GIB:.0f} GiB "
        f"of a die of {plan.chip}, in phase {peak.name}, on {fullest.name} (dies {fullest.ranks})",
        *([_MEANING[plan.verdict]] if plan.verdict in _MEANING else []),
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
    return "\n".join([*lines, *_assumed(assumed)])


def _assumed(assumed: Sequence[Assumption | str]) -> list[str]:
    return ["", "Assumed:", *(f"  {one}" for one in assumed)]


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


def memory_json(plan: MemoryPlan, changes: Sequence[Change], assumed: Sequence[Assumption]) -> dict[str, Any]:
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
        "assumed": [vars(one) for one in assumed],
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


# ---------------------------------------------------------------------- time


def time_text(plan: TimePlan, modes: Mapping[str, ModeTime], assumed: Sequence[Assumption]) -> str:
    """Return the plan as `mindspeed-rl plan time` prints it: ranges, no number alone."""
    tokens = sorted(plan.tokens / plan.devices / bound for bound in plan.bounds(plan.total))
    lines = [
        f"{seconds_range(plan, plan.total)} s an iteration, {_about(tokens[0])} to {_about(tokens[1])} tokens/s a die, on "
        f"{plan.devices} x {plan.chip}; two times of three a run lies within a range",
        "",
        f"  {'phase':<22}{'seconds':>18}   made of",
    ]
    for name, seconds in plan.phases.items():
        whole = sum(plan.parts[name].values())
        shares = {part: found / whole for part, found in plan.parts[name].items() if whole and found / whole >= 0.01}
        made = ", ".join(f"{part} {share:.0%}" for part, share in sorted(shares.items(), key=lambda one: -one[1]))
        lines.append(f"  {name:<22}{seconds_range(plan, seconds):>18}   {made}")
    if modes:
        lines += ["", f"  {'trainer_mode':<22}{'s an iteration':>18}   devices that generate, time that each side waits"]
    for name, mode in modes.items():
        share = "all, in turn" if mode.share == 1.0 else f"{mode.share * 8:.0f} of 8"
        waits = f"trainer {mode.trainer_idle:.0%}, engine {mode.engine_idle:.0%}"
        lines.append(f"  {name:<22}{seconds_range(plan, mode.seconds):>18}   {share}; {waits}")
    if plan.factors:
        found = ", ".join(f"{name} x {factor:.2g}" for name, factor in plan.factors.items())
        lines += ["", f"Calibrated, measured over predicted: {found}"]
    return "\n".join([*lines, *_assumed([*plan.notes, *assumed])])


def time_json(plan: TimePlan, modes: Mapping[str, ModeTime], assumed: Sequence[Assumption]) -> dict[str, Any]:
    """Return the plan as plain values."""
    return {
        "chip": plan.chip,
        "devices": plan.devices,
        "tokens": plan.tokens,
        "seconds": _bounds(plan, plan.total),
        "phases": {name: {**_bounds(plan, seconds), "parts": plan.parts[name]} for name, seconds in plan.phases.items()},
        "modes": {name: {**_bounds(plan, mode.seconds), "share": mode.share} for name, mode in modes.items()},
        "efficiencies": vars(plan.efficiency),
        "factors": plan.factors,
        "notes": list(plan.notes),
        "assumed": [vars(one) for one in assumed],
    }


def _bounds(plan: TimePlan, seconds: float) -> dict[str, float]:
    low, high = plan.bounds(seconds)
    return {"low": low, "middle": seconds, "high": high}


def seconds_range(plan: TimePlan, seconds: float) -> str:
    """Return where these seconds of a plan lie, in two digits."""
    low, high = plan.bounds(seconds)
    return f"{_about(low)} to {_about(high)}"


def _about(value: float) -> str:
    """Two digits, which is more than is known."""
    text = f"{float(f'{value:.2g}'):f}"
    return text.rstrip("0").rstrip(".") if value < 10 else f"{float(f'{value:.2g}'):.0f}"


# ---------------------------------------------------------------------- layouts

_COLUMNS = {
    "train on": "trainers",
    "TP": "actor_config.tensor_model_parallel_size",
    "PP": "actor_config.pipeline_model_parallel_size",
    "VPP layers": "actor_config.num_layers_per_virtual_pipeline_stage",
    "CP": "actor_config.context_parallel_size",
    "EP": "actor_config.expert_model_parallel_size",
    "recompute": "actor_config.recompute_granularity",
    "swap": "actor_config.swap_optimizer",
    "tokens": "rl_config.max_packing_token_size",
    "rollout TP": "generate_config.infer_tensor_parallel_size",
    "sharing": "generate_config.infer_expert_parallel_size",
    "memory share": "generate_config.gpu_memory_utilization",
    "sequences": "generate_config.max_num_seqs",
}


def fit_text(wanted: Wanted, chip: Chip, found: Sequence[Found]) -> str:
    """Return the table that `mindspeed-rl plan fit` prints."""
    chosen = [one.values | {"trainers": one.trainers} for one in found]
    columns = {name: key for name, key in _COLUMNS.items() if any(values.get(key) is not None for values in chosen)}
    heads = ["", *columns, "GiB", "in phase", "s an iteration"]
    rows = [heads]
    for one, values in zip(found, chosen):
        peak = one.memory.fullest.peak
        cells = [_value(values.get(key)) for key in columns.values()]
        rows.append([one.memory.verdict, *cells, f"{peak.total / GIB:.0f}", peak.name, seconds_range(one.time, one.time.total)])
    widths = [max(len(row[place]) for row in rows) for place in range(len(heads))]
    lines = [
        f"{wanted.model} on {wanted.npus} x {chip.name}, prompts to {wanted.prompt} and responses to {wanted.response} tokens, "
        f"{wanted.prompts} x {wanted.samples} an iteration",
        "",
    ]
    return "\n".join([*lines, *("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows)])


def _value(value: Any) -> str:
    return "-" if value is None else "yes" if value is True else str(value)


def fit_json(found: Sequence[Found]) -> dict[str, Any]:
    """Return the layouts as plain values."""
    return {
        "layouts": [
            {
                "values": one.values,
                "trainers": one.trainers,
                "verdict": one.memory.verdict,
                "bytes": one.memory.fullest.peak.total,
                "phase": one.memory.fullest.peak.name,
                "seconds": _bounds(one.time, one.time.total),
            }
            for one in found
        ]
    }
