"""A GPTModel that ends in one score per token: the reward model and the critic."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional


class _ScoreHead(nn.Module):
    """A linear map to one number, its weight [1, hidden] split over tensor parallel ranks along the hidden dimension."""

    def __init__(self, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        if config.hidden_size % tp_group.size():
            raise ValueError(f"hidden_size {config.hidden_size} is not a multiple of tensor parallel size {tp_group.size()}")
        self.tp_group = tp_group
        self.sequence_parallel = config.sequence_parallel
        weight = torch.empty(1, config.hidden_size // tp_group.size(), dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(weight)
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=1, stride=1)
        assert config.init_method is not None  # Megatron makes one of init_method_std
        config.init_method(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [s, b, 1] float32 from [s, b, h] (or the rank's slice of s under sequence parallelism)."""
        if self.sequence_parallel:
            # every rank computes the same scores from the gathered tokens, so its own slice's gradient is already complete
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.tp_group)
        local = scatter_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        # in bfloat16 a score is rounded to 0.4 % of its value, once a rank
        scores = functional.linear(local.float(), self.weight.float())
        return reduce_from_tensor_model_parallel_region(scores, group=self.tp_group)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        state = self.state_dict(prefix="", keep_vars=True)
        groups = {"tp_group": self.tp_group, "dp_cp_group": ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 1}, sharded_offsets, **groups)


class GPTRewardModel(GPTModel):
    """GPTModel whose last stage has ``rm_head`` instead of ``output_layer``; forward returns scores [b, s, 1]."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self.post_process:
            assert self.output_layer.weight is not None  # untied: a reward model has no embedding to share
            device = self.output_layer.weight.device
            del self.output_layer
            self.rm_head = _ScoreHead(config, self.pg_collection.tp, device)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        # LanguageModule's own marks the output layer, which was replaced
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        return self.rm_head(hidden_states).transpose(0, 1).contiguous()
