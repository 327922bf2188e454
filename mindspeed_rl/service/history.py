"""Metrics of models and of tenants as run folders, which `mindspeed-rl report` and `watch` read."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path

from mindspeed_rl.observability.run_files import LineWriter

_LOG = logging.getLogger(__name__)
_METRICS = "metrics.jsonl"


class Histories:
    """A folder for each model and tenant, below one folder.

    Args:
        folder: folder of the folders.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add_step(self, model_id: str, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step of a model."""
        self._write(Path("models") / make_folder_name(model_id), step, metrics)

    def add_account(self, tenant: str, index: int, metrics: Mapping[str, float]) -> None:
        """Add what a tenant has used up to now."""
        self._write(Path("tenants") / make_folder_name(tenant), index, metrics)

    def _write(self, name: Path, iteration: int, metrics: Mapping[str, float]) -> None:
        folder = self._folder / name
        values = {f"train/{re.sub(r'[^A-Za-z0-9_]+', '_', key)}": value for key, value in metrics.items()}
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        try:
            with contextlib.closing(LineWriter(folder / _METRICS)) as writer:
                writer.write({"iteration": iteration, **finite})
        except OSError as error:  # the operation itself has succeeded
            _LOG.warning("metrics of %s are not written: %s", name, error)


def make_folder_name(id: str) -> str:
    """Return the name of a folder of an id that the server has made, or of a tenant's."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", id).lstrip(".")[:200] or "_"
