"""Indexed datasets without the rest of Megatron, and with it afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from patience import patient

PROGRAM = """
import json, sys
import numpy as np
from mindspeed_rl.data.indexed import IndexedWriter, open_indexed

def loaded():
    return sorted(name for name in sys.modules if name.split(".")[0] == "megatron")

prefix = sys.argv[1]
writer = IndexedWriter(prefix)
writer.add_documents(np.array([3, 1, 4, 1, 5], np.int32), [3, 2])
writer.close()
alone = open_indexed(prefix)
rows, left = [alone[number].tolist() for number in range(2)], [*loaded(), *({"triton"} & set(sys.modules))]

from mindspeed_rl import adaptors, platform
platform.select("cpu")
adaptors.apply("train")
import megatron.core
whole = open_indexed(prefix)
import megatron.core.datasets.indexed_dataset as theirs
print(json.dumps([rows, left, hasattr(megatron.core, "ModelParallelConfig"), isinstance(whole, theirs.IndexedDataset),
                  isinstance(alone, theirs.IndexedDataset), [whole[number].tolist() for number in range(2)]]))
"""


def test_the_packages_around_them_are_not_executed_and_megatron_can_still_come(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "rows")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=patient(120))
    assert result.returncode == 0, result.stderr
    rows = [[3, 1, 4], [1, 5]]
    assert json.loads(result.stdout.splitlines()[-1]) == [rows, [], True, True, False, rows]
