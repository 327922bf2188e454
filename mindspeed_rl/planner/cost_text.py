"""Counted costs as text for a terminal, and as plain values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from mindspeed_rl.planner.step_bound import Least

_MIB = float(1 << 20)
#: a rank's counts as `CostLedger.record` returns them
Record = Mapping[str, Any]
_COLUMNS = ("kernels", "waits", "copies", "collective_mib", "peak_mib")
_OPERATORS = 12


def by_phase(record: Record) -> dict[str, dict[str, float]]:
    """Numbers of each phase; an outer phase has those of the phases inside it too."""
    found: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    def add(phase: str, name: str, amount: float) -> None:
        for owner in dict.fromkeys((phase.split(" / ")[0], phase)):
            found[owner][name] += amount

    for phase, _, count in record["kernels"]:
        add(phase, "kernels", count)
    for phase, _, _, count in record["waits"]:
        add(phase, "waits", count)
    for phase, _, count, _ in record["copies"]:
        add(phase, "copies", count)
    for phase, _, _, _, size in record["collectives"]:
        add(phase, "collective_mib", size / _MIB)
    for phase, size in record["peak_bytes"].items():
        found[phase]["peak_mib"] = size / _MIB
    found.pop("outside", None)
    return {phase: {name: values[name] for name in _COLUMNS} for phase, values in sorted(found.items(), key=_place)}


def _place(item: tuple[str, Any]) -> tuple[int, str]:
    order = ("log-probs", "update", "offload", "onload")
    first = item[0].split(" / ")[0]
    return (order.index(first) if first in order else len(order), item[0])


def cost_json(ours: Record, plain: Record | None, least: Mapping[str, Least], said: Mapping[str, Any]) -> dict[str, Any]:
    """All counts, and the phases' numbers, of both trainers."""
    trainers = {"ours": ours} if plain is None else {"ours": ours, "plain": plain}
    return {
        **said,
        "phases": {name: by_phase(record) for name, record in trainers.items()},
        "least": {phase: asdict(value) for phase, value in least.items()},
        "counted": trainers,
    }


def cost_text(ours: Record, plain: Record | None, least: Mapping[str, Least], said: Mapping[str, Any]) -> str:
    """The tables of `mindspeed-rl npu-cost`."""
    lines = [f"{name}: {value}" for name, value in said.items()]
    mine, theirs = by_phase(ours), {} if plain is None else by_phase(plain)
    shown: dict[str, Callable[[float], str]] = {
        "kernels": lambda number: f"{number:.0f}",
        "waits": lambda number: f"{number:.0f}",
        "copies": lambda number: f"{number:.0f}",
        "collective_mib": lambda number: f"{number:.2f}",
        "peak_mib": lambda number: f"{number:.1f}",
    }
    bounds = {phase: _in_mib(value) for phase, value in least.items()}
    lines += ["", "ours / plain Megatron + MindSpeed / least; - is not counted or not modelled"]
    head = ["", "kernels", "waits", "copies", "collectives MiB", "peak MiB"]
    rows = [head]
    for phase in mine:
        cells = []
        for name, text in shown.items():
            three = (mine.get(phase), theirs.get(phase), bounds.get(phase))
            cells.append(" / ".join("-" if one is None or name not in one else text(one[name]) for one in three))
        outer, _, inner = phase.rpartition(" / ")
        rows.append([f"  {inner}" if outer else phase, *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    for name, record in {"ours": ours, **({} if plain is None else {"plain": plain})}.items():
        lines += ["", f"{name}: what the host waits for"]
        lines += [f"  {count:4d}  {phase}: {what}, {line}" for phase, what, line, count in sorted(record["waits"])]
        lines += [f"{name}: copies"]
        lines += [f"  {count:4d}  {phase}: {kind}, {size} bytes" for phase, kind, count, size in sorted(record["copies"])]
        lines += [f"{name}: collectives"]
        lines += [
            f"  {count:4d}  {phase}: {what} over {group}, {size} bytes"
            for phase, what, group, count, size in sorted(record["collectives"])
        ]
        operators: Counter[tuple[str, str]] = Counter()
        for phase, operator, count in record["kernels"]:
            operators[phase.split(" / ")[0], operator] += count
        lines += [f"{name}: the most frequent kernels"]
        lines += [f"  {count:4d}  {phase}: {operator}" for (phase, operator), count in operators.most_common(_OPERATORS)]
    return "\n".join(lines)


def _in_mib(value: Least) -> dict[str, float]:
    numbers: dict[str, float] = {"kernels": value.kernels, "waits": value.waits, "copies": value.copies}
    numbers["collective_mib"] = value.collective_bytes / _MIB
    if value.peak_bytes:
        numbers["peak_mib"] = value.peak_bytes / _MIB
    return numbers
