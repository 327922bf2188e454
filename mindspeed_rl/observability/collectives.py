"""What flight recorders say of collectives: who waits in which, and for whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stalled:
    """A collective that some ranks have begun and not all.

    Attributes:
        group: what the group of ranks is called.
        number: of the collective in its group, from 1.
        kind: "all_reduce" and so on.
        waiting: ranks that are in it.
        late: ranks of the group that have not begun it, as far as their recorders were heard.
    """

    group: str
    number: int
    kind: str
    waiting: tuple[int, ...]
    late: tuple[int, ...]

    def __str__(self) -> str:
        where = f"{self.kind} number {self.number} of group {self.group}"
        waiting = f"{_ranks(self.waiting)} {'waits' if len(self.waiting) == 1 else 'wait'} in {where}"
        if not self.late:
            return waiting
        return f"{waiting}, which {_ranks(self.late)} {'has' if len(self.late) == 1 else 'have'} not begun"


def stalled_collectives(records: Mapping[int, Mapping[str, Any]]) -> list[Stalled]:
    """The collectives that do not end, the earliest first.

    Args:
        records: by rank, as `Platform.collective_record` returns them; ranks that did not answer are missing.
    """
    members: dict[str, set[int]] = {}
    names: dict[str, str] = {}
    begun: dict[str, dict[int, int]] = {}
    open_by_call: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = {}
    for rank, record in records.items():
        for group, about in record.get("groups", {}).items():
            members.setdefault(group, set()).update(about["ranks"])
            names[group] = about["name"]
        for entry in record.get("entries", ()):
            group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
            # sends and receives are counted apart: only the numbers of collectives are the same on all ranks
            if entry.get("is_p2p"):
                continue
            held = begun.setdefault(group, {})
            held[rank] = max(held.get(rank, 0), number)
            if not entry["retired"]:
                open_by_call.setdefault((group, number), {})[rank] = entry
    found = []
    for (group, number), entries in open_by_call.items():
        first = min(entries.values(), key=lambda entry: entry["time_created_ns"])
        late = [rank for rank in sorted(members.get(group, ())) if begun[group].get(rank, 0) < number]
        # such as nccl:all_reduce
        kind = str(first["profiling_name"]).partition(":")[2] or str(first["profiling_name"])
        name = names.get(group, group)
        stalled = Stalled(name, number, kind, tuple(sorted(entries)), tuple(late))
        found.append((first["time_created_ns"], stalled))
    return [stalled for _, stalled in sorted(found, key=lambda item: item[0])]


def last_collective(record: Mapping[str, Any]) -> str:
    """The collective that a rank has begun last, in words; empty without one."""
    entries = [entry for entry in record.get("entries", ()) if not entry.get("is_p2p")]
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry["time_created_ns"])
    group = str(last["process_group"][0])
    name = record.get("groups", {}).get(group, {}).get("name", group)
    kind = str(last["profiling_name"]).partition(":")[2] or str(last["profiling_name"])
    state = "ended" if last["retired"] else "not ended"
    return f"last collective: {kind} number {last['collective_seq_id']} of group {name} ({state})"


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
