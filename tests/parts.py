"""Test files of every environment, and parts of about the same length.

    python tests/parts.py ENVIRONMENT [--all | --extra] [--part K/N]

The files of the environments of a lane, one after another, are a line as long as `durations.json` says: seconds of a file
without its slow tests, of these, and of those marked extra. `tests/run.sh` runs the lanes at the same time, after the unit
tests' lane. Part K of N is the K-th of N equal stretches of each line. Where a file is cut, `--share FILE=FROM:TO` chooses its
tests by their position (`pytest_collection_modifyitems` of conftest.py), so each test is in exactly one part. The files of a
part are in falling order of their seconds: processes that take one after another then end at about the same time.
`pytest --record-durations` keeps the longer of what it measured and what is in the file: delete it first to measure anew.
"""

from __future__ import annotations

import argparse
import fcntl
import json
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
DURATIONS = _ROOT / "tests" / "durations.json"

#: what builds, trains, converts and saves Megatron's modules: on every release
_BUILD_AND_TRAIN = (
    "tests/unit/adaptors/test_megatron_async_saves.py tests/unit/adaptors/test_megatron_cpu.py "
    "tests/unit/adaptors/test_megatron_datasets.py tests/unit/adaptors/test_cpu_rope.py tests/unit/engine tests/unit/models "
    "tests/unit/npu/test_stack.py tests/dist/test_families.py tests/dist/test_hybrid_layouts.py tests/dist/test_lora_dist.py "
    "tests/dist/test_training_checkpoints.py tests/dist/test_training_layouts.py tests/dist/test_vision_layouts.py"
)
#: what else a release can change: on the newest
_PATHS_OF_TRAINING = (
    "tests/dist/test_broken_steps.py tests/dist/test_separate_disks.py tests/dist/test_muon_layouts.py "
    "tests/dist/test_prediction_layers.py tests/dist/test_random_runs.py tests/dist/test_router_losses.py "
    "tests/dist/test_router_replay.py tests/dist/test_shared_prefixes.py tests/dist/test_supervised_layouts.py "
    "tests/dist/test_weight_transfer.py tests/e2e/test_grpo_run.py tests/e2e/test_supervised_commands.py"
)
#: environment -> files and folders
ENVIRONMENTS: dict[str, str] = {
    "unit": "tests/unit",
    "dist": "tests/dist",
    # taken out of tests/dist, whose lane would be the longest
    "routers": "tests/dist/test_router_losses.py tests/dist/test_router_replay.py",
    "faults": (
        "tests/faults/test_faults.py tests/faults/test_promise_causes.py tests/faults/test_two_hosts.py "
        "tests/faults/test_engine_mismatch.py tests/faults/test_memory_leak.py"
    ),
    "server_faults": "tests/faults/test_standalone_servers.py",
    "e2e": "tests/e2e",
    # of packages that are optional, or that want other versions than the CPU environment has
    "extras": (
        "tests/unit/observability/test_tracker_services.py tests/unit/inference/test_lm_harness.py "
        "tests/unit/data/test_hub.py tests/unit/test_documents.py "
        "tests/unit/dumps/test_msprobe_compare.py tests/e2e/test_lm_eval.py tests/e2e/test_verifiers_run.py "
        "tests/e2e/test_cookbook.py "
        "tests/unit/rollout/test_public_agent.py tests/unit/tools/test_environments.py "
        "tests/unit/algorithms/test_against_verl.py tests/unit/algorithms/test_against_trl.py"
    ),
    "megatron-0.17.1": _BUILD_AND_TRAIN,
    "megatron-0.19.2": f"{_BUILD_AND_TRAIN} {_PATHS_OF_TRAINING}",
    "npu_sim": "tests/npu_sim",
}
#: kinds of tests: columns of durations.json
QUICK, SLOW, EXTRA = range(3)
#: kinds that `tests/run.sh` runs by default, with --all and with --extra: in most environments, and where it is another choice
RUNS: dict[str, tuple[int, ...]] = {"default": (QUICK,), "all": (QUICK, SLOW), "extra": (EXTRA,)}
_OTHER_RUNS: dict[str, dict[str, tuple[int, ...]]] = {
    "extras": {"default": (), "extra": ()},
    "server_faults": {"default": ()},
    "megatron-0.17.1": {"default": (), "all": (), "extra": (QUICK,)},
    "megatron-0.19.2": {"default": (), "all": (QUICK,), "extra": ()},
}
#: environments of the lanes
_LANES = (
    ("unit",),
    ("npu_sim", "faults", "server_faults"),
    ("dist", "extras", "megatron-0.17.1", "megatron-0.19.2"),
    ("e2e", "routers"),
)
#: seconds of a file that has not been measured, and the least that one counts
_NEW_S, _LEAST_S = 5.0, 0.1


def list_files(environment: str) -> list[str]:
    """Return the test files of an environment in the order in which they run."""
    files: list[str] = []
    for name in ENVIRONMENTS[environment].split():
        path = _ROOT / name
        named = [name] if path.is_file() else sorted(file.relative_to(_ROOT).as_posix() for file in path.rglob("test_*.py"))
        files += [file for file in named if environment != "dist" or file not in ENVIRONMENTS["routers"].split()]
    return files


def list_kinds(environment: str, run: str) -> tuple[int, ...]:
    """Return the kinds of tests of an environment that a run of RUNS has."""
    return _OTHER_RUNS.get(environment, {}).get(run, RUNS[run])


def has_kinds(file: str, kinds: tuple[int, ...]) -> bool:
    """Return whether a file may have such tests; few have extra ones."""
    return bool(kinds) and (kinds != (EXTRA,) or "mark.extra" in (_ROOT / file).read_text(encoding="utf-8"))


def select(environment: str, part: int, count: int, *, run: str) -> list[str]:
    """Return pytest's arguments for what an environment runs in part `part` (from 1) of `count`; `run` is one of RUNS."""
    measured: dict[str, list[float]] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    line: list[tuple[str, str, float]] = []
    for name in next(lane for lane in _LANES if environment in lane):
        kinds = list_kinds(name, run)
        for file in list_files(name):
            if has_kinds(file, kinds):
                seconds = sum(measured.get(file, (_NEW_S, 0.0, 0.0))[kind] for kind in kinds)
                line.append((name, file, max(_LEAST_S, seconds)))
    total = sum(seconds for _, _, seconds in line)
    first, last = total * (part - 1) / count, total if part == count else total * part / count
    start, chosen = 0.0, []
    for index, (name, file, seconds) in enumerate(line):
        end = total if index == len(line) - 1 else start + seconds  # exactly the end of the last part
        low, high = max(0.0, (first - start) / seconds), 1.0 if last >= end else (last - start) / seconds
        if name == environment and low < 1.0 and high > 0.0:
            arguments = [file] if (low, high) == (0.0, 1.0) else [file, f"--share={file}={low!r}:{high!r}"]
            chosen.append(((min(high, 1.0) - low) * seconds, arguments))
        start = end
    return [argument for _, arguments in sorted(chosen, key=lambda item: -item[0]) for argument in arguments]


def is_in_share(position: int, count: int, share: str) -> bool:
    """Return whether test `position` of the `count` tests of a file is in the share FROM:TO of it."""
    low, high = (float(bound) for bound in share.split(":"))
    return low <= (position + 0.5) / count < high


def record(measured: dict[str, list[float]]) -> None:
    """Write seconds of files by kind of test, where they are more than those in the file."""
    with DURATIONS.open("a+") as stream:  # two lanes may end at once
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        known: dict[str, list[float]] = json.loads(stream.read() or "{}")
        for file, seconds in measured.items():
            known[file] = [round(max(pair), 1) for pair in zip(seconds, known.get(file, (0.0, 0.0, 0.0)))]
        lines = [f"  {json.dumps(file)}: {json.dumps(known[file])}" for file in sorted(known) if (_ROOT / file).exists()]
        stream.truncate(0)
        stream.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("environment", choices=ENVIRONMENTS)
    parser.add_argument("--all", dest="run", action="store_const", const="all", default="default")
    parser.add_argument("--extra", dest="run", action="store_const", const="extra")
    parser.add_argument("--part", default="1/1")
    asked = parser.parse_args()
    k, n = (int(number) if number.isdecimal() else 0 for number in asked.part.partition("/")[::2])
    if not 1 <= k <= n:
        parser.error(f"--part is {asked.part}; it is K/N with 1 <= K <= N, as in 2/4")
    print(*select(asked.environment, k, n, run=asked.run), sep="\n", end="")
