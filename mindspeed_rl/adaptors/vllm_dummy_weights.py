"""Buffers of vLLM's models keep their values with dummy weights (DummyModelLoader.load_weights; vLLM 0.32).

An engine starts with dummy weights, and the trainer sends its own. vLLM then fills all of a model's state with random numbers,
also the mean and deviation by which a model of images normalizes pixels: these come from the processor's file, are no weights,
and are never sent. Without this a picture reaches the tower as noise, and log-probs of trainer and engine differ by 0.2.

It can go when vLLM fills parameters alone; `tests/unit/adaptors` fails then.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_applied = False


def apply() -> None:
    """Keep the buffers of models that are loaded in this process from now on. Imports vLLM's loader; idempotent."""
    global _applied
    if _applied:
        return
    from vllm.model_executor.model_loader import dummy_loader

    loader: Any = dummy_loader.DummyModelLoader
    fill = loader.load_weights

    def fill_parameters(self: Any, model: nn.Module, *others: Any, **named: Any) -> None:
        kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        fill(self, model, *others, **named)
        for buffer, value in kept:
            buffer.copy_(value)

    loader.load_weights = fill_parameters
    _applied = True
