"""Logits of vLLM's language models in float32, where the config of the model asks for them.

| patch | symbol | why |
|---|---|---|
| mark | `UnquantizedEmbeddingMethod.create_weights` | only while a model is built is its config known |
| product | `UnquantizedEmbeddingMethod.apply` | it rounds logits to the format of the weights: an error of a log-prob of 0.01 at logits around 12, of 0.5 at 200 |

A head multiplies by `apply`, an embedding looks up by another method, so one class has both, tied or not, in vLLM and in
vllm-ascend. Engines ask by `hf_overrides` (`rollout/arguments.py`). Looked up in 0.18 to 0.32, which has a switch of its own
(`head_dtype`) that converts the full weight in every step where the device is not a GPU; it can go when that is in all
releases and does not.
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_rl import adaptors, platform

#: entry of the model's config
FLOAT32_HEAD = "has_float32_head"

_applied = False


def apply() -> None:
    """Replace both methods in this process. Imports vLLM; idempotent."""
    global _applied
    if _applied:
        return
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    method: Any = UnquantizedEmbeddingMethod
    create, multiply = method.create_weights, method.apply

    def create_weights(self: Any, layer: nn.Module, *args: object, **named: object) -> None:
        create(self, layer, *args, **named)
        model = get_current_vllm_config().model_config
        setattr(layer, FLOAT32_HEAD, model is not None and getattr(model.hf_config, FLOAT32_HEAD, False))

    def product(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype == torch.float32 or not getattr(layer, FLOAT32_HEAD, False):
            return multiply(self, layer, x, bias)
        multiply_wide = platform.current().float32_product
        logits = adaptors.multiply_rows(lambda rows: multiply_wide(rows, layer.weight), x.view(-1, x.size(-1)))
        logits = logits.view(*x.shape[:-1], -1)
        return logits if bias is None else logits + bias.float()

    method.create_weights, method.apply = create_weights, product
    _applied = True
