"""`mindspeed-rl doctor --hang RUN`: where every process of a run stands, alive or afterwards, and who holds it up."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.observability.collectives import StalledCollective
from mindspeed_rl.observability.heartbeat import FOLDER
from mindspeed_rl.observability.process_status import ProcessStatus, collect_statuses, find_stalled_collectives, find_straggler


@dataclass(frozen=True)
class HangReport:
    """What was found.

    Attributes:
        folder: of the run.
        phase: what the driver does, in its own words.
        straggler: the process that holds up the others; None where none does, as far as can be seen.
        stalled: collectives that do not end, the earliest first.
        processes: all of them.
    """

    folder: Path
    phase: str
    straggler: ProcessStatus | None
    stalled: list[StalledCollective]
    processes: list[ProcessStatus]

    @property
    def ok(self) -> bool:
        """True when nobody is late."""
        return not self.stalled and not any(item.is_late for item in self.processes)

    def as_text(self) -> str:
        """For people."""
        lines = [f"run: {self.folder}", f"driver: {self.phase}"]
        if self.straggler is not None:
            lines.append(f"held up by: {self.straggler}")
        lines += [f"collective: {found}" for found in self.stalled]
        lines += ["", *(f"  {item}" for item in self.processes), "", f"all stacks: {self.folder / FOLDER}"]
        return "\n".join(lines)

    def as_plain(self) -> dict[str, Any]:
        """For programs."""
        return {
            "run": str(self.folder),
            "driver": self.phase,
            "culprit": None if self.straggler is None else _plain(self.straggler),
            "stalled": [asdict(found) for found in self.stalled],
            "processes": [_plain(item) for item in self.processes],
            "ok": self.ok,
        }


def examine_hang(folder: Path) -> HangReport:
    """Asks the processes of the run that live, and reads what the others have left.

    Raises:
        ValueError: the folder holds no run with heartbeats.
    """
    if not (folder / FOLDER).is_dir():
        raise ValueError(
            f"--hang {folder}: no folder {FOLDER}/ in it; name the folder of a run (it is printed at a run's start)."
        )
    processes = collect_statuses(folder)
    if not processes:
        raise ValueError(f"--hang {folder}: no process of this run has written a heartbeat.")
    driver = next((item for item in processes if item.name == "driver"), None)
    others = [item for item in processes if item is not driver]
    doing = "" if driver is None else driver.doing
    awaited = [item.name for item in others if item.name in doing]
    phase = "left no heartbeat" if driver is None else f"{doing} ({driver.state})"
    return HangReport(
        folder,
        phase,
        find_straggler(others, awaited or [item.name for item in others]),
        find_stalled_collectives(others),
        processes,
    )


def _plain(item: ProcessStatus) -> dict[str, Any]:
    return {name: value for name, value in asdict(item).items() if name != "record"}
