"""Keys of layouts on two processes, and tables of layouts of which some are slow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
VPP = PP | {"num_layers_per_virtual_pipeline_stage": 1}
RING = {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo"}
ULYSSES = {"context_parallel_size": 2, "context_parallel_algo": "ulysses_cp_algo"}
EP = {"expert_model_parallel_size": 2}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE_RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def marked(layouts: Mapping[str, tuple[Any, ...]], slow: Collection[str]) -> list[Any]:
    """A parameter set for each, by its name; those named in `slow` are run by --all only."""
    return [pytest.param(*layout, id=name, marks=pytest.mark.slow if name in slow else ()) for name, layout in layouts.items()]
