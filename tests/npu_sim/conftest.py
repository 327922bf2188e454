"""The simulator tests need torch_npu and the fake CANN runtime; `tests/npu_sim/run.sh` sets both up."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("torch_npu") is None or "NPU_SIM_DEVICES" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
else:
    import simulator

    simulator.install()
