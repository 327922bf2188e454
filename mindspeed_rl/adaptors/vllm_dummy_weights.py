"""Buffers of vLLM's models keep their values with dummy weights (DummyModelLoader.load_weights; vLLM 0.32).

An engine starts with dummy weights, and the trainer sends its own. vLLM then fills all of a model's state with random numbers,
also the mean and deviation by which a model of images normalizes pixels: these come from the processor's file, are not weights,
and are never sent. Without this a picture reaches the tower as noise, and log-probs of trainer and engine differ by 0.2.
The same for the scales of a KV cache in fp8, whose first value means that none was loaded.

It can go when vLLM fills only parameters; `tests/unit/adaptors` fails then.
"""

from __future__ import annotations

from typing import Any

from torch import nn

#: scales of attention: queries, keys, values and probabilities
_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")
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
        scales = (value.data for name, value in model.named_parameters() if name.rpartition(".")[2] in _SCALES)
        kept = [(tensor, tensor.detach().clone()) for tensor in (*model.buffers(), *scales)]
        fill(self, model, *others, **named)
        for tensor, value in kept:
            tensor.copy_(value)

    loader.load_weights = fill_parameters
    _applied = True
