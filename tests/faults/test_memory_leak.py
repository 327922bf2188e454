"""Memory that a process keeps on purpose in each iteration: the console and the report name its owner."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fault_run import struck
from grpo_command import ONE_PROCESS

pytestmark = [pytest.mark.slow, pytest.mark.extra]

MIB = 60

#: place of the leak -> owner and point of the alert
LEAKS = {
    "worker.generate": r"tensors, after (rollout|weight sync)",
    "driver.advantages": "driver, after iteration",
}


@pytest.mark.parametrize("place", LEAKS)
def test_a_leak_is_an_alert_with_its_owner(place: str, task: Path, tmp_path: Path) -> None:
    keys = [*ONE_PROCESS, "megatron_training.train_iters=14", "actor_config.save=null"]
    with struck(task, tmp_path, *keys, shares=True) as run:
        (run.faults / "0.json").write_text(json.dumps({"place": place, "how": "leak", "mib": MIB, "stays": True}))
        assert run.wait(600.0) == 0, run.output[-3000:]
        (line,) = (line for line in run.output.splitlines() if "Memory does not come back" in line)
    text = rf"Memory does not come back \({LEAKS[place]}\): [\d.]+ GiB more than at iteration 3, (\d+) MiB an iteration"
    found = re.search(text, line)
    assert found is not None, line
    assert MIB / 2 < int(found.group(found.lastindex or 1)) < 2 * MIB
    assert re.search(text, (tmp_path / "run" / "report.md").read_text())
