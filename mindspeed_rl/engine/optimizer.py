"""Megatron's optimizer, gradient buckets and learning-rate schedule, from the run's keys."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from mindspeed_rl.config import MegatronConfig


def ddp_config(config: MegatronConfig) -> DistributedDataParallelConfig:
    """How gradients are bucketed and reduced: always in fp32, so that DP size and bf16 do not change the sum's precision."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        use_distributed_optimizer=config.use_distributed_optimizer,
        bucket_size=config.ddp_bucket_size,
        check_for_nan_in_grad=False,  # the engine checks, and can say which micro-batch it was
    )


def build_optimizer(config: MegatronConfig, chunks: list[MegatronModule]) -> MegatronOptimizer:
    """AdamW over the trainable parameters of the model chunks, with fp32 main parameters under bf16.

    Raises:
        ValueError: no learning rate was given.
    """
    if config.lr is None:
        raise ValueError("lr: no learning rate is set; a role that trains needs one.")
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=config.clip_grad,
            bf16=config.bf16,
            params_dtype=torch.bfloat16 if config.bf16 else torch.float32,
            use_distributed_optimizer=config.use_distributed_optimizer,
            overlap_param_gather=config.overlap_param_gather,
        ),
        chunks,
    )


def build_scheduler(config: MegatronConfig, optimizer: MegatronOptimizer, steps_per_iteration: int) -> OptimizerParamScheduler:
    """Warm-up and decay, counted in optimizer steps.

    Args:
        steps_per_iteration: optimizer steps of one iteration; the schedule's keys count iterations.

    Raises:
        ValueError: the schedule has no length, or two warm-up keys contradict each other.
    """
    assert config.lr is not None  # there would be no optimizer
    decay_iters = config.lr_decay_iters or config.train_iters
    if not decay_iters:
        raise ValueError("train_iters: not set; the learning-rate schedule needs train_iters or lr_decay_iters.")
    decay_steps = decay_iters * steps_per_iteration
    if config.lr_warmup_fraction is not None and config.lr_warmup_iters:
        raise ValueError(
            f"lr_warmup_fraction ({config.lr_warmup_fraction}) and lr_warmup_iters ({config.lr_warmup_iters}) are both set."
        )
    warmup_steps = config.lr_warmup_iters * steps_per_iteration
    if config.lr_warmup_fraction is not None:
        warmup_steps = int(config.lr_warmup_fraction * decay_steps)
    if warmup_steps >= decay_steps:
        raise ValueError(f"lr_warmup_iters: the warm-up takes {warmup_steps} steps, the whole schedule only {decay_steps}.")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=max(1, decay_steps // 10) if config.lr_decay_style == "WSD" else None,
        lr_wsd_decay_style="linear" if config.lr_decay_style == "WSD" else None,
    )
