"""The engine that a worker steps: requests in, a token of each at a time, weights in place.

`vllm_engine.VllmEngine` and `module_engine.ModuleEngine` implement it; `in_process.InProcessEngine` makes a `RolloutEngine` of
one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor, nn

from mindspeed_rl.adaptors.engine_hooks import EngineHooks
from mindspeed_rl.data.images import ImageRules
from mindspeed_rl.rollout.requests import Completion, Sampling
from mindspeed_rl.run.placement import RolloutLayout


class StepEngine(Protocol):
    """One rank's part of a rollout engine; ranks of a replica call the methods with the same arguments in the same order.

    Attributes:
        layout: layout of all engines of the run.
        sampling: sampling parameters of training responses.
        weight_version: version of the loaded weights, -1 before the first ones.
        hooks: hooks of the platform.
        image_rules: image rules of a model of images; None for a model of text.
        list_replaced: returns the tensors of the model that the next weight sync writes; None where that is not known.
        syncs_drafts: weight syncs bring the multi-token-prediction layers too, which make drafts.
        fell_back_to_eager: the engine captures no graphs, although its keys ask for them.
    """

    layout: RolloutLayout
    sampling: Sampling
    weight_version: int
    hooks: EngineHooks
    image_rules: ImageRules | None
    list_replaced: Callable[[nn.Module], Sequence[Tensor]] | None
    syncs_drafts: bool
    fell_back_to_eager: bool

    def add_request(self, name: str, prompt_ids: Sequence[int], sampling: Sampling, seed: int) -> None:
        """Add a request, under a name that no running one has; results depend on its arguments and the weights only."""
        ...

    def has_unfinished(self, busy: bool = False) -> bool:
        """Return True while a replica that shares experts with this one has requests or is busy; collective over them."""
        ...

    def step(self) -> list[tuple[str, Completion]]:
        """Compute a token of every running request; return those that have ended, by name."""
        ...

    def partial_completion(self, name: str) -> Completion:
        """Return the tokens that a request has so far."""
        ...

    def abort(self, names: Iterable[str]) -> None:
        """Abort these requests; names of others are ignored."""
        ...

    def check_request(self, num_tokens: int, sampling: Sampling) -> None:
        """Raise ValueError where a prompt leaves no room for another token, or the engine cannot sample so."""
        ...

    def check_freezable(self) -> None:
        """Raise RuntimeError where requests cannot continue under other weights with the keys and values that they have."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]] | Callable[[nn.Module], None], version: int) -> None:
        """Replace all weights, by full tensors under HF names or a function that fills the model in place."""
        ...

    def reset_prefix_cache(self) -> None:
        """Drop cached prefixes, so that later prompts are computed in full; nothing may be running."""
        ...

    def load_adapter(self, folder: Path, version: int) -> None:
        """Sample later responses with this adapter next to the weights."""
        ...

    def load_named_adapters(self, folders: Mapping[str, Path], *, changed: Collection[str] = ()) -> None:
        """Hold these adapters too, for requests that name one, and no other; they must exist until the next call.

        Args:
            changed: names whose folders have other content than in the last call.
        """
        ...

    def find_adapter_slot(self, name: str = "") -> int:
        """Return the index of an adapter among those in the model's layers; "" for the trained one."""
        ...

    def get_model(self) -> nn.Module:
        """Return the module of this rank, to be read and not changed."""
        ...

    def release_memory(self) -> None:
        """Release memory until `restore_memory`; no request is running."""
        ...

    def restore_memory(self, part: Literal["weights", "cache"]) -> None:
        """Allocate weights, whose content is undefined until the next `load_weights`, or the cache."""
        ...

    def resident_bytes(self) -> dict[str, int]:
        """Return the bytes on the device now, by owner."""
        ...

    def absent_bytes(self) -> int:
        """Return the bytes that sleep, whose storages keep their sizes."""
        ...
