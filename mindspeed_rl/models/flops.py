"""Floating-point operations that a model needs, from its shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.network import Network


@dataclass(frozen=True)
class ModelFlops:
    """Operations of a forward pass over a sequence of s tokens: per_token * s + per_squared_token * s^2.

    Two operations a weight and token (the embedding is looked up, not multiplied; of the experts the chosen ones count), and
    causal attention: 2 * s^2 * heads * head size a layer.
    """

    per_token: float
    per_squared_token: float

    @classmethod
    def of(cls, architecture: Architecture, network: Network) -> ModelFlops:
        """Those of this model."""
        weights = 0.0
        for op in architecture.weight_ops(network):
            if op.place != "pre":
                share = 1.0
                if op.experts:
                    assert network.num_moe_experts is not None
                    share = network.moe_router_topk / network.num_moe_experts
                weights += share * sum(math.prod(shape) for shape in op.shapes if len(shape) > 1)
        head = float(network.kv_channels)
        if network.multi_latent_attention:
            sizes = (network.qk_head_dim, network.qk_pos_emb_head_dim, network.v_head_dim)
            # query times key takes the first two, weights times value the third: two products of the mean size
            head = sum(size for size in sizes if size is not None) / 2
        return cls(2.0 * weights, 2.0 * network.num_layers * network.num_attention_heads * head)

    def training(self, lengths: Iterable[int]) -> float:
        """Operations of forward and backward over these sequences; backward costs twice forward; nothing is counted twice."""
        lengths = list(lengths)
        return 3.0 * (self.per_token * sum(lengths) + self.per_squared_token * sum(length**2 for length in lengths))
