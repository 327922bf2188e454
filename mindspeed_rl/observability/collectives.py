"""Find collectives that do not end, from the flight recorders of the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict


class _Entry(TypedDict, total=False):
    process_group: list[str]
    collective_seq_id: int
    profiling_name: str
    time_created_ns: int
    retired: bool
    is_p2p: bool


class _Group(TypedDict):
    name: str
    ranks: list[int]


class CollectiveRecord(TypedDict, total=False):
    """The collectives of a rank, as `Platform.collective_record` returns them."""

    rank: int
    groups: dict[str, _Group]
    entries: list[_Entry]


@dataclass(frozen=True)
class StalledCollective:
    """A collective that some ranks of its group have entered and others not.

    Attributes:
        group: name of the group of ranks.
        number: of the collective in its group, from 1; a field of `doctor --hang --json`.
        kind: "all_reduce" and so on.
        waiting: ranks that are in it.
        late: ranks of the group that have not entered it, as far as their recorders were read.
    """

    group: str
    number: int
    kind: str
    waiting: tuple[int, ...]
    late: tuple[int, ...]

    def __str__(self) -> str:
        waits, has = ("waits" if len(self.waiting) == 1 else "wait"), ("has" if len(self.late) == 1 else "have")
        text = f"{_join_ranks(self.waiting)} {waits} in {self.kind} number {self.number} of group {self.group}"
        return f"{text}, which {_join_ranks(self.late)} {has} not begun" if self.late else text


def match_collectives(records: Mapping[int, CollectiveRecord]) -> list[StalledCollective]:
    """Return the collectives that do not end, the earliest first.

    Args:
        records: by rank; ranks that did not answer are missing.
    """
    members: dict[str, set[int]] = {}
    names: dict[str, str] = {}
    entered: dict[str, dict[int, int]] = {}
    open_by_call: dict[tuple[str, int], dict[int, _Entry]] = {}
    for rank, record in records.items():
        for group, fields in record.get("groups", {}).items():
            members.setdefault(group, set()).update(fields["ranks"])
            names[group] = fields["name"]
        for entry in record.get("entries", ()):
            group, index = str(entry["process_group"][0]), int(entry["collective_seq_id"])
            # sends and receives are counted apart: only the indices of collectives are the same on all ranks
            if entry.get("is_p2p"):
                continue
            last = entered.setdefault(group, {})
            last[rank] = max(last.get(rank, 0), index)
            if not entry["retired"]:
                open_by_call.setdefault((group, index), {})[rank] = entry
    stalled: list[tuple[int, StalledCollective]] = []
    for (group, index), entries in open_by_call.items():
        first = min(entries.values(), key=lambda entry: entry["time_created_ns"])
        late = [rank for rank in sorted(members.get(group, ())) if entered[group].get(rank, 0) < index]
        call = StalledCollective(names.get(group, group), index, _kind(first), tuple(sorted(entries)), tuple(late))
        stalled.append((first["time_created_ns"], call))
    return [call for _, call in sorted(stalled, key=lambda item: item[0])]


def describe_last_collective(record: CollectiveRecord) -> str:
    """Describe the collective that a rank has entered last; empty without one."""
    entries = [entry for entry in record.get("entries", ()) if not entry.get("is_p2p")]
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry["time_created_ns"])
    group = str(last["process_group"][0])
    fields = record.get("groups", {}).get(group)
    name = group if fields is None else fields["name"]
    state = "ended" if last["retired"] else "not ended"
    return f"last collective: {_kind(last)} number {last['collective_seq_id']} of group {name} ({state})"


def _kind(entry: _Entry) -> str:
    """Return the name of the call without its backend, for example all_reduce of nccl:all_reduce."""
    name = str(entry["profiling_name"])
    return name.partition(":")[2] or name


def _join_ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
