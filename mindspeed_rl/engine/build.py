"""Megatron modules with weights from the run's keys: model config, layout, layers, DDP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mindspeed_rl import adaptors, platform
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.attention import CoreAttention
from mindspeed_rl.engine.batching import BatchShape
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.context_turns import build_smaller_shapes
from mindspeed_rl.engine.gated_delta import GatedDeltaNet
from mindspeed_rl.engine.lora import adapt_spec, adapt_tower, init_adapters
from mindspeed_rl.engine.lora_layers import LoraSettings
from mindspeed_rl.engine.multi_token_prediction import build_prediction_spec
from mindspeed_rl.engine.optimizer import ddp_config
from mindspeed_rl.engine.policy_model import PolicyModel, ValueModel
from mindspeed_rl.engine.sparse_attention import SparseCoreAttention
from mindspeed_rl.engine.vision import ImagePositions, VisionEncoder, add_to_layers, build_tower
from mindspeed_rl.models.builder import build_gpt_model, layer_spec, prediction_layer_spec, transformer_config
from mindspeed_rl.models.layers import RMSNorm, complete_rotary_gradients, recompute_activations, recompute_grouped_activations
from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.model_config import ModelConfig, VisionConfig
from mindspeed_rl.models.plan import ModelPlan


def batch_shape(
    config: MegatronConfig,
    *,
    packed: bool,
    pad_id: int,
    fixed_width: int = 0,
    shares_prefixes: bool = False,
    vision: VisionConfig | None = None,
    num_predictions: int = 0,
) -> BatchShape:
    """Return the layout of this rank's micro-batches. Needs Megatron's process groups; collective where slices of them vary."""
    cp_size = config.context_parallel_size
    tp_multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
    # ring attention needs zigzag slices of every sequence, and the tokens of a prefix have no place in several
    shares = shares_prefixes and packed and not config.has_ring_attention and not config.has_dynamic_context
    shape = BatchShape(
        packed=packed,
        cp_size=cp_size,
        cp_rank=parallel_state.get_context_parallel_rank(),
        # each rank has two zigzag chunks of every sequence; with prefix sharing, a slice of the computed tokens
        sequence_multiple=2 * cp_size if cp_size > 1 and not shares else 1,
        total_multiple=tp_multiple,
        fixed_width=fixed_width,
        pad_id=pad_id,
        shares_prefixes=shares,
        vision=vision,
        num_predictions=num_predictions,
    )
    if config.has_dynamic_context:
        return replace(shape, smaller=build_smaller_shapes(shape, config.min_dynamic_context_parallel_size))
    return shape


def _run_settings(config: MegatronConfig, model_config: ModelConfig, layout: Layout) -> dict[str, object]:
    """Return the fields of TransformerConfig that the run decides and not the model."""
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    settings: dict[str, object] = {
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "context_parallel_size": config.context_parallel_size,
        "cp_comm_type": "p2p" if config.context_parallel_algo == "megatron_cp_algo" else "a2a",
        # Megatron refuses it without tensor parallelism
        "sequence_parallel": config.sequence_parallel and config.tensor_model_parallel_size > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": config.bf16,
        # shapes differ between micro-batches; Megatron accepts that only with this dispatcher, dense models included
        "variable_seq_lengths": config.pipeline_model_parallel_size > 1,
        "moe_token_dispatcher_type": "alltoall",
        # the loss is a sum; Megatron divides gradients once by the count over all micro-batches and ranks
        "calculate_per_token_loss": True,
        "recompute_granularity": config.recompute_granularity,
        "recompute_method": config.recompute_method,
        "recompute_num_layers": config.recompute_num_layers,
        "attention_softmax_in_fp32": True,
        "deterministic_mode": config.npu_deterministic or config.deterministic,
        "gradient_accumulation_fusion": config.gemm_gradient_accumulation_fusion and platform.current().megatron_kernels,
        "tp_comm_overlap": config.use_ascend_mc2 and platform.current().megatron_kernels,
        "moe_grouped_gemm": bool(model_config.num_moe_experts) and config.moe_grouped_gemm,
        # with both directions batched to one peer, gloo and HCCL match messages in posting order and mix them up
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
    }
    if config.recompute_granularity == "selective":
        settings["recompute_modules"] = list(config.recompute_modules or ["core_attn"])
    settings |= {"attention_dropout": config.attention_dropout, "hidden_dropout": config.hidden_dropout}
    if model_config.sparse_attention is not None:
        settings["dsa_indexer_loss_coeff"] = config.dsa_indexer_loss_coeff
    if model_config.num_moe_experts:
        settings["moe_router_bias_update_rate"] = config.moe_router_bias_update_rate
        if config.moe_token_dispatcher_type == "allgather":
            if config.pipeline_model_parallel_size > 1:
                raise ValueError(
                    "moe_token_dispatcher_type: allgather cannot be used with pipeline_model_parallel_size > 1; use alltoall."
                )
            settings["moe_token_dispatcher_type"] = "allgather"
        if config.moe_router_load_balancing_type == "sinkhorn":
            settings["moe_router_load_balancing_type"] = "sinkhorn"
    return settings


def _reduce_over_expert_ranks(model: nn.Module) -> None:
    """Mark experts that several tensor ranks have, so that their gradients are summed over those ranks.

    Megatron marks them itself, but only where expert parallelism is on; without it the ranks' experts would diverge.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # pyrefly: ignore[missing-attribute]  (Megatron's mark)


def _restore_strides(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """Return [s, b, h] with the strides of a tensor of that shape where b is 1.

    The embedding transposes [b, s, h], and torch treats the result as contiguous where b is 1, whatever its stride. Its
    `matmul` (2.13) does not: it multiplies by a frozen weight token by token, with a copy of the weight for each.
    """
    return output.squeeze(1).unsqueeze(1) if output.size(1) == 1 else output


def plan_transformer_config(config: MegatronConfig, plan: ModelPlan) -> TransformerConfig:
    """Return Megatron's config of a role's model; needs no process groups.

    Raises:
        ValueError: the layout, the adapters or another key does not fit the model.
    """
    activation = plan.model_config.activation
    settings = _run_settings(config, plan.model_config, plan.layout) | adaptors.transformer_settings(activation)
    lora = LoraSettings.from_config(config)
    if lora is not None:
        lora.check(plan.model_config)
        settings["moe_router_bias_update_rate"] = 0.0  # balancing would change the frozen router
    return transformer_config(plan.model_config, layout=plan.layout, **settings)


@dataclass(frozen=True)
class _ChunkBuilder:
    """Builds the model chunks of this rank, one after the other, with random weights.

    Args:
        transformer: Megatron's config of the model.
        lora: adapters; None without.
    """

    config: MegatronConfig
    plan: ModelPlan
    transformer: TransformerConfig
    lora: LoraSettings | None

    def build(self, stage: int) -> GPTModel:
        """Build a chunk."""
        config, layout, model_config = self.config, self.plan.layout, self.plan.model_config
        place = (parallel_state.get_pipeline_model_parallel_rank(), stage)
        # not a module itself, but a factory of one
        norm = cast(type[nn.Module], WrappedTorchNorm) if platform.current().megatron_kernels else RMSNorm
        spec, *predictions = blocks = self._list_blocks(place, norm)
        for block in blocks:
            if config.recompute_activation_function:
                recompute_activations(block)
            if self.lora is not None:
                adapt_spec(block, self.lora, gated=self.transformer.gated_linear_unit)
        model = build_gpt_model(
            model_config,
            self.transformer,
            spec,
            pre_process=place == layout.first_chunk,
            post_process=place == layout.last_chunk,
            vp_stage=_get_vp_stage(layout, stage),
            lm_class=PolicyModel,
            reward_class=ValueModel,
            prediction=build_prediction_spec(predictions[0], norm, model_config.mtp_num_layers) if predictions else None,
        )
        if config.recompute_activation_function:
            recompute_grouped_activations(model)
        if model.mtp_process and not model.pre_process and model.share_embeddings_and_output_weights:
            # this stage has a copy of the embedding, which is its head too; Megatron also makes an unused one
            model.output_layer.weight = None
        if model.pre_process or model.mtp_process:
            model.embedding.register_forward_hook(_restore_strides)
        if model_config.vision is not None and isinstance(model, (PolicyModel, ValueModel)):
            self._add_images(model, model_config.vision, layout.chunk_layers(*place))
        if isinstance(model, PolicyModel):
            model.true_vocab_size = model_config.vocab_size
            model.final_logit_softcapping = model_config.final_logit_softcapping
            model.fp32_lm_head = bool(config.fp32_lm_head)
        if model_config.multi_latent_attention and layout.tp > 1:
            complete_rotary_gradients(model)
        if layout.num_experts and layout.expert_tp_size < layout.tp:
            _reduce_over_expert_ranks(model)
        return model.to(platform.current().current_device())

    def _list_blocks(self, place: tuple[int, int], norm: type[nn.Module]) -> list[TransformerBlockSubmodules]:
        """Return the spec of the layers of a chunk, and after it the spec of its prediction layers where it has any."""
        model_config, layout = self.plan.model_config, self.plan.layout
        core_attention = CoreAttention if model_config.sparse_attention is None else SparseCoreAttention
        pp_rank, stage = place
        spec = layer_spec(
            model_config,
            self.transformer,
            norm=norm,
            core_attention=core_attention,
            linear_attention=GatedDeltaNet,
            layout=layout,
            vp_stage=_get_vp_stage(layout, stage),
            pp_rank=pp_rank,
        )
        if not model_config.mtp_num_layers or place != layout.last_chunk:
            return [spec]
        return [spec, prediction_layer_spec(model_config, self.transformer, norm=norm, core_attention=core_attention)]

    def _add_images(self, model: PolicyModel | ValueModel, vision: VisionConfig, layers: Sequence[int | None]) -> None:
        """Let a chunk see images: the first has the tower, the others only the positions of its tokens."""
        if not model.pre_process:
            model.inputs = ImagePositions(vision)
            return
        model.vision_model = tower = build_tower(self.plan.hf_config)
        if self.lora is not None:
            adapt_tower(tower, self.lora, self.config.trained_tower_parts)
        model.inputs = encoder = VisionEncoder(tower, vision)
        if self.lora is None:  # adapters freeze what is not theirs when all chunks are there
            encoder.set_trained(self.config.trained_tower_parts)
        add_to_layers(model, layers, len(vision.deepstack_layers))


def _move_trained_to_host(chunks: Sequence[nn.Module]) -> None:
    """Move the parameters that train to the host, from where Megatron copies each into its flat buffer.

    It allocates the whole buffer, and the gradients' buffer, before the first parameter gives its memory back; so the device
    would have the weights twice beside the gradients.
    """
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        if parameter.requires_grad:
            parameter.data = parameter.data.cpu()
    platform.current().empty_cache()


def _get_vp_stage(layout: Layout, stage: int) -> int | None:
    """Return Megatron's number of a chunk, which has none where it is the only one of a rank."""
    return stage if layout.vpp > 1 else None


def build_model(config: MegatronConfig, plan: ModelPlan, *, trainable: bool) -> BuiltModel:
    """Build this rank's model chunks with random weights; collective over the training world."""
    lora = LoraSettings.from_config(config)
    transformer = plan_transformer_config(config, plan)
    builder = _ChunkBuilder(config, plan, transformer, lora)
    with platform.current().preserve_rng_state():
        models = [builder.build(stage) for stage in range(plan.layout.vpp)]
        if lora is not None:
            init_adapters(models, plan.layout, seed=config.seed)
    chunks: list[MegatronModule] = [Float16Module(transformer, model) if config.bf16 else model for model in models]
    for router in (module for model in models for module in model.modules() if isinstance(module, TopKRouter)):
        router._maintain_float32_expert_bias()  # Float16Module has made it bfloat16, which is too coarse for a bias
    if not trainable:
        for chunk in chunks:
            chunk.requires_grad_(False)
        return BuiltModel(plan, transformer, chunks, [], models)
    if config.use_distributed_optimizer:
        _move_trained_to_host(chunks)
    ddp_chunks = [
        # in the interleaved schedule Megatron does not divide the chunks after the first into buckets
        DistributedDataParallel(transformer, ddp_config(config), chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for model in models:
        if isinstance(model, PolicyModel):
            model.adds_to_main_grad = config.adds_head_to_main_grad
    return BuiltModel(plan, transformer, [*ddp_chunks], ddp_chunks, models)
