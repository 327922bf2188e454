"""Figures of an iteration, without those that are measured: they depend on the machine and on what else it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MEASURED = ("timing/", "memory/", "residue/", "host/", "imbalance/", "rollout/push_")


def select_computed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that a run repeats to the bit."""
    return {name: value for name, value in record.items() if not name.startswith(_MEASURED) and not name.endswith("_tps")}
