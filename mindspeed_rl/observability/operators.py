"""What a profile says, operator by operator, as a table that is read without a trace viewer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: rows of the table; the rest is one line
_MOST_ROWS = 40


@dataclass(frozen=True)
class OperatorTime:
    """One operator over the whole profile.

    Attributes:
        calls: how often it ran.
        host_us, device_us: microseconds of its own, without the operators that it calls.
        memory_bytes: allocated less freed by itself; 0 where that was not recorded.
    """

    name: str
    calls: int
    host_us: float
    device_us: float = 0.0
    memory_bytes: int = 0


def operator_table(operators: Sequence[OperatorTime]) -> str:
    """Markdown: what took longest first, by device time where there is any, else by host time. Columns of zeros go."""
    has_device = any(operator.device_us for operator in operators)
    has_memory = any(operator.memory_bytes for operator in operators)

    def spent(operator: OperatorTime) -> float:
        return operator.device_us if has_device else operator.host_us

    ordered = sorted(operators, key=spent, reverse=True)
    total = sum(map(spent, operators)) or 1.0
    head = ["operator", "calls", "share", *(["device ms"] if has_device else []), "host ms", "host us a call"]
    head += ["memory MiB"] if has_memory else []
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for operator in ordered[:_MOST_ROWS]:
        cells = [f"`{operator.name}`", str(operator.calls), f"{spent(operator) / total:.1%}"]
        cells += [f"{operator.device_us / 1e3:.3f}"] if has_device else []
        cells += [f"{operator.host_us / 1e3:.3f}", f"{operator.host_us / max(operator.calls, 1):.1f}"]
        cells += [f"{operator.memory_bytes / 2**20:.2f}"] if has_memory else []
        lines.append(f"| {' | '.join(cells)} |")
    if rest := ordered[_MOST_ROWS:]:
        share = sum(map(spent, rest)) / total
        lines.append(
            f"| {len(rest)} others | {sum(operator.calls for operator in rest)} | {share:.1%} |{' |' * (len(head) - 3)}"
        )
    what = "device" if has_device else "host"
    return f"{total / 1e3:.3f} ms of {what} time in {len(operators)} operators.\n\n" + "\n".join(lines) + "\n"
