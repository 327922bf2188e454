"""The model chunks of a rank, as `build.build_model` makes them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_rl.models.plan import ModelPlan


@dataclass(frozen=True)
class BuiltModel:
    """Model chunks of this rank (one, or one for each virtual stage), their plan and their config.

    Attributes:
        chunks: modules as the schedule runs them (Float16Module and DDP wrapped around).
        ddp_chunks: the same modules where they train; empty where they do not.
        models: the unwrapped models inside, in the same order.
    """

    plan: ModelPlan
    transformer_config: TransformerConfig
    chunks: list[MegatronModule]
    ddp_chunks: list[DistributedDataParallel]
    models: list[GPTModel]

    def gradient_buffers(self) -> list[_ParamAndGradBuffer]:
        """Return Megatron's flat gradient buffers; none of a model that does not train."""
        return [buffer for chunk in self.ddp_chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
