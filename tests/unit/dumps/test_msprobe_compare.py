"""`msprobe compare` of mindstudio-probe reads dumps in its form, and finds what differs.

Needs mindstudio-probe, which `bash envs/cpu/extras.sh` installs over the CPU environment; `tests/run.sh --all` does.
"""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mindspeed_rl.dumps.record import RECORDS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("msprobe") is None, reason="mindstudio-probe comes with envs/cpu/extras.sh"),
]


MODULES = {"attention": "SelfAttention", "mlp": "MLP", "output": "TransformerLayer"}


def write_dump(folder: Path, task: str, change: float) -> Path:
    """Two ranks with two micro-batches of a layer; the second feed-forward network differs by `change`."""
    generator = torch.Generator().manual_seed(0)
    for rank in range(2):
        record = RECORDS["msprobe"](folder, 0, "actor", "update", {"rank": rank}, {"rank": 2}, task == "tensor", 1 << 24)
        for micro in range(2):
            for order, (name, kind) in enumerate(MODULES.items()):
                tensor = torch.randn(5, 1, 8, generator=generator) + (change if (micro, name) == (1, "mlp") else 0.0)
                record.add(f"update_0.micro_{micro}.layers.0.{name}", order, tensor.requires_grad_(), kind=kind)
            gradient = torch.randn(5, 1, 8, generator=generator)
            record.add(f"update_0.micro_{micro}.layers.0.mlp", 1, gradient, kind="MLP", is_gradient=True)
            record.add(f"update_0.micro_{micro}.loss_inputs.mask", 3, torch.tensor([True, False]))
        record.add("update_0.gradients.model.norm.weight", 9, torch.randn(8, generator=generator))
        record.write()
    return folder / "actor_update" / "step0"


@pytest.mark.parametrize("task", ["tensor", "statistics"])
def test_the_comparison_of_msprobe_pairs_all_tensors_and_finds_the_one_that_differs(tmp_path: Path, task: str) -> None:
    ours, theirs = (write_dump(tmp_path / name, task, change) for name, change in (("a", 0.0), ("b", 2.0)))
    command = [sys.executable, "-m", "msprobe.msprobe", "compare", "-m", "auto", "-tp", ours, "-gp", theirs, "-o", tmp_path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert "compare ends successfully" in done.stdout + done.stderr, done.stderr[-2000:]
    column = "MaxAbsErr" if task == "tensor" else "Mean diff"
    for rank in range(2):
        (path,) = tmp_path.glob(f"compare_result_rank{rank}_*.csv")
        rows = list(csv.DictReader(path.read_text(encoding="utf-8-sig").splitlines()))
        assert len(rows) == 2 * 5 + 1 and all(row["NPU Name"] == row["Bench Name"] for row in rows)
        numbers = {row["NPU Name"]: row[column] for row in rows}
        different = {name for name, text in numbers.items() if text not in ("N/A", "unsupported") and abs(float(text)) > 1e-6}
        assert different == {"Module.decoder.layers.0.mlp.MLP.forward.1.output.0"}
