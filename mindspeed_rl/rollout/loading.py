"""New weights for vLLM's model, in place, in a worker of ours or in one of vLLM's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from mindspeed_rl.adaptors.engine_hooks import DERIVED, EngineHooks


class LoadsWeights(Protocol):
    """All of vLLM's models; they have no base class with this method."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
        """Take tensors under HF names; return the names of the parameters that were filled."""
        ...


def load_named(model: torch.nn.Module, named: Iterable[tuple[str, Tensor]], hooks: EngineHooks) -> None:
    """Fill the model with these weights.

    Args:
        model: vLLM's, of this rank.
        named: every full tensor of the model under its HF checkpoint name; this rank takes its slices.
        hooks: of the engine.

    Raises:
        RuntimeError: a parameter of the engine was given no tensor.
    """
    hooks.before_load(model)
    loaded = cast(LoadsWeights, model).load_weights(iter(named))
    # a tied head is the embedding, and is not reported as loaded
    config: Any = model.config
    tied = {"lm_head.weight"} if getattr(config, "tie_word_embeddings", False) else set()
    missing = {name for name, _ in model.named_parameters() if not name.endswith(DERIVED)} - tied - set(loaded)
    if missing:
        raise RuntimeError(
            f"weight push: {len(missing)} parameters of the rollout engine got no tensor, for example {min(missing)}."
        )
    hooks.after_load(model)
