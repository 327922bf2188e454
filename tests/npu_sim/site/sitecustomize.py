"""Every Python process that imports torch_npu gets the simulated device: Ray's workers run no code of a test's.

`run.sh` puts this folder on PYTHONPATH. After a module of the table below was executed, its entry is called; MindSpeed's
operators and vllm-ascend's are stood in for in the same way.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import line_record
from line_record import RecordingLoader

_EXTENSION = "vllm_ascend.vllm_ascend_C"


def _simulated_device(module: ModuleType) -> None:
    import simulator

    simulator.install()


def _mindspeed_operators(module: ModuleType) -> None:
    import mindspeed_operators

    mindspeed_operators.install()


def _part_of_vllm(module: ModuleType) -> None:
    from simulator import rollout

    rollout.AFTER_IMPORT[module.__name__](module)


AFTER: dict[str, Callable[[ModuleType], None]] = {
    "torch_npu": _simulated_device,
    "mindspeed.megatron_adaptor": _mindspeed_operators,
    "vllm_ascend.worker.block_table": _part_of_vllm,
    "vllm_ascend._build_info": _part_of_vllm,
    "vllm_ascend.utils": _part_of_vllm,
    "vllm.triton_utils": _part_of_vllm,
    "vllm.triton_utils.importing": _part_of_vllm,
    "vllm.compilation.decorators": _part_of_vllm,
    "vllm_ascend.ops.triton.triton_utils": _part_of_vllm,
    "vllm_ascend.patch.worker.patch_minimax_m2": _part_of_vllm,
}


class _Loader(importlib.abc.Loader):
    """A module's own loader, then the module's entry of the table."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        AFTER[module.__name__](module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, recorded: Sequence[str]) -> None:
        self._recorded = recorded

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == _EXTENSION:
            from simulator import rollout

            return rollout.extension_spec(name)
        if name not in AFTER and name not in self._recorded:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = RecordingLoader(name, str(spec.origin)) if name in self._recorded else _Loader(spec.loader)
        return spec


if "NPU_SIM_DEVICES" in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported first
    records = os.environ.get("NPU_SIM_LINES")
    if records:
        line_record.install(records)
    sys.meta_path.insert(0, _Finder(line_record.MODULES if records else ()))
