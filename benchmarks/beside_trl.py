"""What grpo_vs_trl.py and dpo_vs_trl.py have in common: a run of ours, the faster of two of TRL's, and what is said of them."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headline import Headline
from tiny_run import SHAPES, train_command, watched

from mindspeed_rl.observability.history import Series
from mindspeed_rl.observability.run_files import read_run

WARM_UP = 1


@dataclass(frozen=True)
class Measured:
    """Seconds an iteration, GiB of all processes, and where the seconds go or which setting it was."""

    iteration_s: float
    memory_gib: float
    notes: str


@dataclass(frozen=True)
class OurRun:
    """What a run of ours measured."""

    series: Mapping[str, Series]
    memory_gib: float

    def values(self, name: str) -> list[float]:
        """A metric of each iteration that counts."""
        return list(self.series[name].y)[WARM_UP:]

    def measured(self, notes: str) -> Measured:
        return Measured(statistics.median(self.values("timing/all")), self.memory_gib, notes)


def run_ours(folder: Path, config: str, keys: Mapping[str, Any], threads: int) -> OurRun:
    """A run of a tiny run file with other keys, each process of it with so many threads."""
    command = train_command({"run_dir": folder, **keys}, config=config)
    seen = watched(command, folder.with_name(f"{folder.name}.log"), {"OMP_NUM_THREADS": str(threads)})
    return OurRun(read_run(folder).history.series, seen.memory_gib)


def run_trl(folder: Path, kind: str, settings: dict[str, Any], python: str, at_once: Sequence[int]) -> Measured:
    """The fastest run of trl_side.py among those that take so many rows at a time."""
    return min((_trl(folder, kind, settings, python, rows) for rows in at_once), key=lambda one: one.iteration_s)


def _trl(folder: Path, kind: str, settings: dict[str, Any], python: str, at_once: int) -> Measured:
    place = folder.with_name(f"{folder.name}_{at_once}")
    place.mkdir()
    asked, output = place / "settings.json", place / "seconds.json"
    asked.write_text(json.dumps({**settings, "at_once": at_once}))
    script = Path(__file__).with_name("trl_side.py")
    environment = {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    seen = watched([python, str(script), kind, str(asked), str(output)], place / "log.txt", environment)
    seconds = json.loads(output.read_text())[WARM_UP:]
    return Measured(statistics.median(seconds), seen.memory_gib, f"{at_once} at a time")


def say(what: str, mine: Measured, theirs: Measured) -> None:
    """Headlines of a comparison, and where our time goes."""
    name = f"TRL, {theirs.notes}"
    pairs = [("seconds an iteration", mine.iteration_s, theirs.iteration_s), ("GiB", mine.memory_gib, theirs.memory_gib)]
    for unit, a, b in pairs:
        Headline(f"{what}, {unit}", f"{a:.2f}", name, f"{b:.2f}", b / a).say()
    print(f"where our {mine.iteration_s:.2f} s go: {mine.notes}", flush=True)


def options_parser(
    description: str | None, sizes: Sequence[str], iterations: int, others: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """The options of both, with these defaults; `others` are sizes that only run where they are asked for."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="python of an environment with TRL")
    parser.add_argument("--sizes", nargs="+", choices=[*SHAPES, *others], default=list(sizes))
    parser.add_argument("--precisions", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--iterations", type=int, default=iterations)
    return parser
