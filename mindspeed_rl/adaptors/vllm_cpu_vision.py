"""Text models of vLLM whose modules import torchvision (ModelRegistry; vLLM 0.32): Qwen3.5 runs on the CPU without it.

The file of the text class also has the classes for images, and imports their processors from transformers; these import
torchvision, whose published build is for CUDA and does not import next to a CPU build of torch. The text class uses none of
it. So the module is imported while a stand-in of torchvision is there, which has every name and can do nothing; afterwards it
is gone, so that code which looks for torchvision does not find it. vLLM would inspect the class in a new process, which would
lack the stand-in: here this process does it.

A server's engine and its workers are spawned: such a process has the path of torchvision from its parent, and would import it
before the operators are declared. Where this process has torchvision, the function of a new one is pickled as one that first
prepares the process as this one was.

It can go when the text classes are in a module of their own; `tests/unit/adaptors` fails once they import without torchvision.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from mindspeed_rl.adaptors import torchvision_cpu, vllm_video_positions

#: classes of text models, all of vLLM's module `qwen3_5`; then for images, for which this process has torchvision itself
_CLASSES = (
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5MTP",
    "Qwen3_5MoeMTP",
)
_PACKAGE = "torchvision"


class _Names(ModuleType):
    """A module that has every name; each is a class of no use."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIn(MetaPathFinder, Loader):
    """Finds the package and all modules inside."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == _PACKAGE else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are made when they are asked for."""


@contextlib.contextmanager
def _without_torchvision() -> Iterator[None]:
    """Have the stand-in inside the block, unless torchvision itself is imported already."""
    if _PACKAGE in sys.modules:
        yield
        return
    finder = _StandIn()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]


class _PreparedTarget:
    """The function of a new process, whose module is imported there after torchvision."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *args: object, **keywords: object) -> object:
        return self._function(*args, **keywords)

    def __reduce__(self) -> tuple[Callable[[str, str], object], tuple[str, str]]:
        return _prepare_target, (self._function.__module__, self._function.__qualname__)


def _prepare_target(module: str, name: str) -> object:
    """Return a function by its name, in a new process: the first thing that is unpickled there."""
    torchvision_cpu.apply()
    apply()  # its workers are new processes too
    vllm_video_positions.apply()
    return operator.attrgetter(name)(importlib.import_module(module))


def _prepare_spawned() -> None:
    """Prepare engines and workers that vLLM spawns for images."""
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    owner: Any
    for owner, name in ((EngineCoreProc, "run_engine_core"), (WorkerProc, "worker_main")):
        if not isinstance(getattr(owner, name), _PreparedTarget):
            setattr(owner, name, _PreparedTarget(getattr(owner, name)))


def apply() -> None:
    """Let vLLM import these classes here, when a model needs one, and in processes that it spawns; idempotent."""
    from vllm.model_executor.models import registry

    base: Any = registry._LazyRegisteredModel

    class ImportedHere(base):
        """A class that is imported in this process, with the stand-in or with torchvision."""

        def inspect_model_cls(self) -> object:
            return registry._ModelInfo.from_model_cls(self.load_model_cls())

        def load_model_cls(self) -> Any:
            with _without_torchvision():
                return super().load_model_cls()

    for name in _CLASSES:
        known = registry.ModelRegistry.models.get(name)
        if type(known) is base:
            registry.ModelRegistry.models[name] = ImportedHere(known.module_name, known.class_name)
    if _PACKAGE in sys.modules:
        _prepare_spawned()
