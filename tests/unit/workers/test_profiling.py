"""Which phases of which ranks leave a trace."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mindspeed_rl import platform
from mindspeed_rl.config import ProfilerConfig
from mindspeed_rl.observability.timers import OperatorTime, format_operators
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.workers.device_worker import _PhaseProfiler


def traces(folder: Path) -> set[str]:
    """Folders with a trace, below `folder`."""
    return {str(path.parent.relative_to(folder)) for path in folder.rglob("*.json")}


def run(config: ProfilerConfig, folder: Path, rank: int = 0) -> set[str]:
    """What four iterations of two phases leave."""
    platform.select("cpu")
    profiler = _PhaseProfiler(config, folder, rank)
    for _ in range(4):
        for phase in (Phases.GENERATE, Phases.UPDATE_ACTOR):
            with profiler(phase):
                torch.ones(3).sum()
    return traces(folder)


def test_nothing_is_recorded_unless_asked_for(tmp_path: Path) -> None:
    assert run(ProfilerConfig(stage="all"), tmp_path) == set()


def test_a_named_phase_is_recorded_in_the_named_runs(tmp_path: Path) -> None:
    config = ProfilerConfig(profile=True, stage="actor_update", profile_step_start=2, profile_step_end=4)
    assert run(config, tmp_path) == {"profile/actor_update_2/rank_0", "profile/actor_update_3/rank_0"}


def test_runs_that_warm_the_profiler_up_leave_nothing(tmp_path: Path) -> None:
    config = ProfilerConfig(
        profile=True, stage="actor_update", profile_step_start=3, profile_step_end=4, profile_warmup_steps=2
    )
    assert run(config, tmp_path) == {"profile/actor_update_3/rank_0"}
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["actor_update_3"]


def test_all_phases_and_lists_of_phases(tmp_path: Path) -> None:
    first = {"profile/actor_generate_1/rank_0", "profile/actor_update_1/rank_0"}
    assert run(ProfilerConfig(profile=True), tmp_path / "all") == first
    phases = ["actor_generate", "critic_update"]
    assert run(ProfilerConfig(profile=True, stage=phases), tmp_path / "list") == {"profile/actor_generate_1/rank_0"}


def test_only_the_named_ranks_record(tmp_path: Path) -> None:
    config = ProfilerConfig(profile=True, stage="actor_update", profile_ranks=[1, 3])
    assert run(config, tmp_path, rank=0) == set()
    assert run(config, tmp_path, rank=3) == {"profile/actor_update_1/rank_3"}


def test_a_trace_goes_where_the_run_file_says_and_has_what_it_asks_for(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    config = ProfilerConfig(
        profile=True, stage="actor_update", profile_save_path=str(target), profile_record_shapes=True, profile_with_memory=True
    )
    assert run(config, tmp_path / "run") == set()
    (trace,) = target.rglob("*.json")
    assert trace.parent == target / "actor_update_1" / "rank_0"
    content = json.loads(trace.read_text())
    assert content["record_shapes"] == 1
    assert any("sum" in event["name"] for event in content["traceEvents"])


def test_a_table_by_operator_lies_beside_the_trace(tmp_path: Path) -> None:
    run(ProfilerConfig(profile=True, stage="actor_update"), tmp_path)
    table = (tmp_path / "profile" / "actor_update_1" / "rank_0" / "operators.md").read_text()
    rows = {line.split("`")[1]: line.split("|")[2].strip() for line in table.splitlines() if "`" in line}
    assert rows["aten::sum"] == "1" and rows["aten::ones"] == "1"


def test_the_table_has_the_longest_first_and_shares_of_the_whole() -> None:
    operators = [OperatorTime("add", 4, 100.0), OperatorTime("mm", 2, 300.0), OperatorTime("copy", 1, 0.0)]
    lines = format_operators(operators).splitlines()
    assert lines[0] == "0.400 ms of host time in 3 operators."
    assert lines[4:] == [
        "| `mm` | 2 | 75.0% | 0.300 | 150.0 |",
        "| `add` | 4 | 25.0% | 0.100 | 25.0 |",
        "| `copy` | 1 | 0.0% | 0.000 | 0.0 |",
    ]
    on_device = format_operators([OperatorTime("mm", 2, 1.0, 30.0, 1 << 20), OperatorTime("add", 1, 90.0, 10.0)]).splitlines()
    assert on_device[4] == "| `mm` | 2 | 75.0% | 0.030 | 0.001 | 0.5 | 1.00 |"
    many = format_operators([OperatorTime(f"op{number}", 1, 1.0) for number in range(45)]).splitlines()
    assert many[-1] == "| 5 others | 5 | 11.1% | | |" and len(many) == 2 + 2 + 40 + 1
