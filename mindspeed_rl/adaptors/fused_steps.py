"""Embedding, rotation and optimizer step on the NPU with as few operator calls as they need.

| patch | symbol | why |
|---|---|---|
| rotation | rope_utils._apply_rotary_pos_emb_bshd | MindSpeed takes cosine and sine of the same angles for query and key of every layer, and copies heads that rotate as a whole |
| embedding | vocab_parallel_embedding_forward_impl of MindSpeed | ten calls for the ids of other ranks |
| norms' gradients | finalize_model_grads._flatten_dense_tensors | torch_npu asks for the format of each before it joins them |
| norm, clipping | clip_grads.multi_tensor_applier, l2_norm_impl, multi_tensor_scale_impl | a norm, a power and a sum for each parameter; a product and a copy |
| AdamW | adamw of mindspeed.optimizer.adamw, mindspeed.core.optimizer.adamw | a call of `_fused_adamw_` for each parameter, though it takes lists |
| weights | DistributedOptimizer._copy_main_params_to_model_params | a copy for each parameter; one that swaps its state \
copies them in its step and keeps its own, which is empty |

Numbers do not change, except for the norm's rounding. The calls take lists of tensors; how many launches torch_npu makes of a list is
its matter. `remove` takes the patches back, for a comparison. They can go when MindSpeed caches the angles and calls lists itself.

Not verified on NPU hardware.
"""  # noqa: E501

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.adaptors import swapped_optimizer

#: tables of angles whose cosines are kept: models with a second rotary base take turns
_TABLES = 2
#: (owner, name, what was there) of every patch
_originals: list[tuple[Any, str, Any]] = []


def apply() -> None:
    """Patch Megatron and MindSpeed, after MindSpeed's own patches. A second call starts from what is there then."""
    rope: Any = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    # MindSpeed's operator, from the module of its rotation; None where another rotation is in place, which stays
    rotate = getattr(sys.modules[rope._apply_rotary_pos_emb_bshd.__module__], "npu_rotary_position_embedding", None)
    if rotate is not None:
        _replace(rope, "_apply_rotary_pos_emb_bshd", _build_rotation(rotate))
    embedding = importlib.import_module("mindspeed.core.tensor_parallel.vocab_parallel.adaptor")
    _replace(embedding, "vocab_parallel_embedding_forward_impl", _embed)
    finalization = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    _replace(finalization, "_flatten_dense_tensors", _flatten)
    clipping = importlib.import_module("megatron.core.optimizer.clip_grads")
    _replace(clipping, "multi_tensor_applier", lambda function, _, lists, *others: function(lists, *others))
    _replace(clipping, "l2_norm_impl", _compute_norm)
    _replace(clipping, "multi_tensor_scale_impl", _scale)
    for name in ("mindspeed.optimizer.adamw", "mindspeed.core.optimizer.adamw"):
        _replace(importlib.import_module(name), "adamw", _step_together)
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    if not swapped_optimizer.swaps(optimizer):
        _replace(optimizer, "_copy_main_params_to_model_params", _build_copy(optimizer._copy_main_params_to_model_params))


def remove() -> None:
    """Put back what was there before `apply`."""
    while _originals:
        setattr(*_originals.pop())


def _replace(owner: Any, name: str, patch: Callable[..., Any]) -> None:
    current = getattr(owner, name)
    if current.__module__ != __name__:
        _originals.append((owner, name, current))
        setattr(owner, name, patch)


def _build_rotation(rotate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the rotation of heads [..., dim] by angles [..., rotary dim] with one cosine and sine for each table of angles."""
    # angles stay in memory here, so no other tensor can have their address
    known: list[tuple[Tensor, tuple[object, ...], Tensor, Tensor]] = []

    def apply_bshd(
        t: Tensor, freqs: Tensor, rotary_interleaved: bool = False, multi_latent_attention: bool = False, mscale: float = 1.0
    ) -> Tensor:
        key = freqs.data_ptr(), freqs.shape, freqs.stride(), freqs._version, t.dtype, mscale
        table = next((entry for entry in known if entry[1] == key), None)
        if table is None:
            with torch.no_grad():
                cos, sin = freqs.cos(), freqs.sin()
                if mscale != 1.0:
                    cos, sin = cos * mscale, sin * mscale
                table = freqs, key, cos.to(t.dtype), sin.to(t.dtype)
            known[:] = [*known, table][-_TABLES:]
        if multi_latent_attention:
            t = torch.cat((t[..., 0::2], t[..., 1::2]), dim=-1)
        width = freqs.size(-1)
        if width == t.size(-1):
            return rotate(t.contiguous(), *table[2:], int(rotary_interleaved))
        return torch.cat((rotate(t[..., :width].contiguous(), *table[2:], int(rotary_interleaved)), t[..., width:]), dim=-1)

    return apply_bshd


def _embed(
    self: Any,
    input_: Tensor,
    reduce_from_tensor_model_parallel_region: Callable[[Tensor], Tensor],
    reduce_scatter_to_sequence_parallel_region: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the embeddings of ids [batch, tokens], of which this rank has some rows of the vocabulary."""
    ids, mine = input_, None
    if self.tp_group.size() > 1:
        local = input_ - self.vocab_start_index
        ids = local.clamp(0, self.weight.size(0) - 1)
        mine = (ids == local)[..., None]
    rows = self.weight[ids] if self.deterministic_mode else torch.nn.functional.embedding(ids, self.weight)
    if mine is not None:
        rows = rows.mul_(mine)
    if self.reduce_scatter_embeddings:
        return reduce_scatter_to_sequence_parallel_region(rows.transpose(0, 1).contiguous())
    return reduce_from_tensor_model_parallel_region(rows)


def _flatten(tensors: list[Tensor]) -> Tensor:
    """Return all elements as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _compute_norm(lists: list[list[Tensor]], per_parameter: bool) -> tuple[Tensor, None]:
    """Return the [1] norm of all tensors together."""
    return torch.stack(torch._foreach_norm(lists[0])).norm().view(1), None


def _scale(lists: list[list[Tensor]], factor: float) -> None:
    """Multiply the gradients in place: Megatron's lists are the same tensors twice."""
    torch._foreach_mul_(lists[0], factor)


def _step_together(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    step_tensor: Tensor,
    **settings: Any,
) -> None:
    """Update the parameters of a group in one call."""
    if params:
        steps = [step_tensor] * len(params)
        torch._fused_adamw_(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, **settings)


def _build_copy(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the copy of main weights to the shard of the buffers, as one call."""

    def copy_main_params(self: Any) -> None:
        others = self.ddp_config.use_megatron_fsdp or self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        if self.is_stub_optimizer or others:
            original(self)
            return
        mains, shards = [], []
        for main_groups, model_groups in (
            (self.shard_fp32_from_float16_groups, self.model_float16_groups),
            (self.shard_fp32_groups, self.model_fp32_groups),
        ):
            for main_group, model_group in zip(main_groups, model_groups):
                for main, weight in zip(main_group, model_group):
                    world = self._get_model_param_range_map(weight)["gbuf_world_in_bucket"]
                    index, _, bucket = self.model_param_gbuf_map[weight]
                    shards.append(self.buffers[index].buckets[bucket].param_data.view(-1)[world.start : world.end])
                    mains.append(main)
        if mains:
            torch._foreach_copy_(shards, mains)

    return copy_main_params
