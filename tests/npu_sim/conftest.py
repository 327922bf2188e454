"""The simulator tests need torch_npu and the fake CANN runtime; `tests/npu_sim/run.sh` sets both up."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("torch_npu") is None or "NPU_SIM_DEVICES" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
else:
    import simulator

    simulator.install()


@pytest.fixture(scope="module")
def small_devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Devices of 4 GiB: engines take a share. Ray kills workers, so what their communicators leave goes with the folder."""
    from grpo_command import Command

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_SIM_MEMORY_GIB", "4")
        patch.setenv("NPU_SIM_RUN_DIR", str(tmp_path_factory.mktemp("hccl")))
        patch.setattr(Command, "shares", False)  # workers on the NPU are not forks
        yield


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tests' task: model, data and rewards."""
    from tiny_task import make_task

    return make_task(tmp_path_factory.mktemp("task"))
