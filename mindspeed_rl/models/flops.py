"""Floating-point operations that a model needs, from its shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.model_config import ModelConfig


@dataclass(frozen=True)
class ModelFlops:
    """Operations of a forward pass over a sequence of s tokens: per_token * s + per_squared_token * s^2.

    Two operations a weight and token (the embedding is looked up, not multiplied; of the experts the chosen ones count), and
    causal attention: 2 * s^2 * heads * head size a layer.
    """

    per_token: float
    per_squared_token: float

    @classmethod
    def of(cls, architecture: Architecture, model_config: ModelConfig) -> ModelFlops:
        """Those of this model."""
        weights = 0.0
        for op in architecture.weight_ops(model_config):
            if op.place != "pre":
                share = 1.0
                if op.experts:
                    assert model_config.num_moe_experts is not None
                    share = model_config.moe_router_topk / model_config.num_moe_experts
                weights += share * sum(math.prod(shape) for shape in op.shapes if len(shape) > 1)
        head = float(model_config.kv_channels)
        if model_config.multi_latent_attention:
            sizes = (model_config.qk_head_dim, model_config.qk_pos_emb_head_dim, model_config.v_head_dim)
            # query times key takes the first two, weights times value the third: two products of the mean size
            head = sum(size for size in sizes if size is not None) / 2
        return cls(2.0 * weights, 2.0 * model_config.num_layers * model_config.num_attention_heads * head)

    def training(self, lengths: Iterable[int]) -> float:
        """Operations of forward and backward over these sequences; backward costs twice forward; nothing is counted twice."""
        lengths = list(lengths)
        return 3.0 * (self.per_token * sum(lengths) + self.per_squared_token * sum(length**2 for length in lengths))
