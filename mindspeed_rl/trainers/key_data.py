"""What the driver adds to an accuracy dump: the rows of an iteration, and the configuration with its environment."""

from __future__ import annotations

import dataclasses
import json
import os
import platform as machine
import re
import sys
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from mindspeed_rl.config import Run
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import ragged
from mindspeed_rl.dumps.record import Record

#: columns of the data plane, in the order in which they come to be
_COLUMNS = ("prompt_ids", "responses", "rollout_log_probs", "rewards")
#: variables whose values may open something
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


class KeyData:
    """Rows of the iterations that `msprobe_config` names."""

    def __init__(self, run: Run, plane: DataPlane) -> None:
        self._run, self._plane, self._config = run, plane, run.config.msprobe_config

    def save(self, step: int, advantages: Tensor, loss_mask: Tensor, *, with_trainer: bool, with_reference: bool) -> None:
        """The dump has the rows of this iteration, where it is asked for.

        Args:
            step: the iteration, from 0.
            advantages, loss_mask: [B, R].
            with_trainer: rows have old_log_probs.
            with_reference: rows have ref_log_probs.
        """
        config = self._config
        if not (config.msprobe and config.key_data_dump and config.step_start <= step <= config.step_end):
            return
        columns = [*_COLUMNS, *(["old_log_probs"] if with_trainer else []), *(["ref_log_probs"] if with_reference else [])]
        rows = range(len(advantages))
        batch, _ = self._plane.get("metrics", columns, indexes=rows, timeout_s=self._run.rl.wait_timeout_s)
        most_bytes = int(config.max_dump_gib * 2**30)
        folder = Path(config.dump_path)
        sizes = {"rank": 1}
        record = Record(folder, step, "driver", "data", {"rank": 0}, sizes, config.task == "tensor", most_bytes)
        for order, name in enumerate(columns):
            column = ragged(batch[name])
            if name == "rewards":
                record.add(name, order, column.tensor())
                continue
            longest = max(len(row) for row in batch[name])
            record.add(name, order, column.padded(-1 if name in ("prompt_ids", "responses") else 0.0, longest))
        record.add("advantages", len(columns), advantages)
        record.add("loss_mask", len(columns) + 1, loss_mask)
        record.write()


def write_configurations(run: Run) -> None:
    """`configurations.json` of the dump has the run file, all keys, versions and environment, where it is asked for.

    Values of variables whose names sound like secrets are left out.
    """
    config = run.config.msprobe_config
    if not (config.msprobe and config.configurations_dump):
        return
    found = {
        "run_file": run.config.as_written(),
        "configuration": dataclasses.asdict(run.config),
        "versions": {dist.metadata["Name"]: dist.version for dist in metadata.distributions()},
        "machine": {"python": sys.version, "system": machine.platform(), "torch": torch.__config__.show()},
        "environment": {name: "(left out)" if _SECRET.search(name) else value for name, value in sorted(os.environ.items())},
    }
    folder = Path(config.dump_path)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1, default=str, sort_keys=True)
    (folder / "configurations.json").write_text(text + "\n", encoding="utf-8")
