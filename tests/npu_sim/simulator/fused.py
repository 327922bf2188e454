"""Reference implementations of the fused `npu::` operators, from their documented mathematics, in fp32.

Attention keeps the contract of the real operator: layouts, cumulative sequence ends, sparse modes with their compressed
mask, and a backward pass that uses the softmax statistics and the output it is given. Ring attention passes the global
ones for every block: recomputing them gives gradients that are wrong by a factor while the loss is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from simulator import calls
from simulator.graphs import recorded
from simulator.memory import choose_seed, cpu_view, device_copy

Tensor = torch.Tensor
_INT_MAX = 2147483647
#: sparse modes 2, 3 and 4 want this compressed causal mask instead of a full one
COMPRESSED_MASK = (2048, 2048)


def _mask(sparse_mode: int, atten_mask: Tensor | None, rows: int, columns: int) -> Tensor | None:
    """[rows, columns] bool, True on masked positions, or None."""
    if sparse_mode in (0, 1):
        if atten_mask is None:
            return None
        if atten_mask.shape[-2] < rows or atten_mask.shape[-1] < columns:
            raise RuntimeError(f"npu_fusion_attention: atten_mask {tuple(atten_mask.shape)} is smaller than {rows} x {columns}")
        return atten_mask.reshape(atten_mask.shape[-2:])[:rows, :columns].bool()
    if sparse_mode in (2, 3):
        if atten_mask is None or tuple(atten_mask.shape[-2:]) != COMPRESSED_MASK:
            shape = None if atten_mask is None else tuple(atten_mask.shape)
            raise RuntimeError(f"npu_fusion_attention: sparse_mode {sparse_mode} needs a 2048 x 2048 atten_mask, got {shape}")
        diagonal = 1 if sparse_mode == 2 else columns - rows + 1
        return torch.ones(rows, columns, dtype=torch.bool).triu(diagonal)
    raise RuntimeError(f"npu_fusion_attention: sparse_mode {sparse_mode} is not simulated")


class _Layout:
    """Cuts the tensors of one call into [heads, tokens, dim] sequences and puts results together again."""

    def __init__(self, layout: str, head_num: int, query: Tensor, q_ends: list[int] | None, kv_ends: list[int] | None) -> None:
        self.layout, self.head_dim = layout, query.shape[-1]
        if layout in ("BSH", "SBH"):
            self.head_dim = query.shape[-1] // head_num
        if layout == "TND":
            if not q_ends or not kv_ends:
                raise RuntimeError("npu_fusion_attention: layout TND needs actual_seq_qlen and actual_seq_kvlen")
            if q_ends[-1] != query.shape[0]:
                raise RuntimeError(f"npu_fusion_attention: actual_seq_qlen ends at {q_ends[-1]} of {query.shape[0]} tokens")
            if query.shape[1] != head_num:
                raise RuntimeError(f"npu_fusion_attention: head_num {head_num} but query has {query.shape[1]} heads")
        self.q_ends, self.kv_ends = q_ends, kv_ends

    def split(self, tensor: Tensor, ends: list[int] | None) -> Iterator[Tensor]:
        """Yields [N, S, ...] per sequence; statistics [.., S] without a head dimension keep their layout."""
        if self.layout == "TND":
            start = 0
            for end in ends:
                yield tensor[start:end].transpose(0, 1)
                start = end
            return
        if self.layout == "BSND":
            tensor = tensor.transpose(1, 2)
        elif self.layout == "BSH":
            tensor = tensor.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        elif self.layout == "SBH":
            tensor = tensor.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)
        elif self.layout != "BNSD":
            raise RuntimeError(f"npu_fusion_attention: layout {self.layout} is not simulated")
        yield from tensor

    def join(self, parts: list[Tensor]) -> Tensor:
        """The inverse of `split` for [N, S, D] parts."""
        if self.layout == "TND":
            return torch.cat([part.transpose(0, 1) for part in parts])
        stacked = torch.stack(parts)
        if self.layout == "BSND":
            return stacked.transpose(1, 2).contiguous()
        if self.layout == "BSH":
            return stacked.transpose(1, 2).flatten(2)
        if self.layout == "SBH":
            return stacked.permute(2, 0, 1, 3).flatten(2)
        return stacked

    def split_statistics(self, tensor: Tensor) -> Iterator[Tensor]:
        """Yields [N, S] per sequence: statistics are [T, N, 8] for TND and [B, N, S, 8] otherwise."""
        flat = tensor[..., 0].float()
        if self.layout == "TND":
            start = 0
            for end in self.q_ends:
                yield flat[start:end].transpose(0, 1)
                start = end
        else:
            yield from flat

    def join_statistics(self, parts: list[Tensor]) -> Tensor:
        """The inverse of `split_statistics`, with the eight copies the operator returns."""
        joined = torch.cat([part.transpose(0, 1) for part in parts]) if self.layout == "TND" else torch.stack(parts)
        return joined.unsqueeze(-1).expand(*joined.shape, 8).contiguous()


def _scores(query: Tensor, key: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    scores = (query @ key.transpose(1, 2)) * scale
    return scores if mask is None else scores.masked_fill(mask, float("-inf"))


def _draw_seed(keep_prob: float) -> int:
    """A seed of the device's generator, for a call that drops weights; it moves the generator on."""
    if keep_prob >= 1.0:
        return 0
    return choose_seed(torch.device("npu", torch.npu.current_device()))


def _dropout(seed: int, keep_prob: float) -> Callable[[Tensor], Tensor | float]:
    """Returns what gives the factors of weights, sequence after sequence: 1 / keep_prob, or 0 for what is dropped."""
    if keep_prob >= 1.0:
        return lambda weights: 1.0
    generator = torch.Generator().manual_seed(seed)
    return lambda weights: (torch.rand(weights.shape, generator=generator) < keep_prob) / keep_prob


def _attention(
    query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0, keep_prob=1.0,
    pre_tockens=_INT_MAX, next_tockens=_INT_MAX, inner_precise=0, prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None,
    sparse_mode=0, gen_mask_parallel=True, sync=False, softmax_layout="", sink=None, **unused: Any,
) -> tuple:  # fmt: skip
    if pse is not None or padding_mask is not None or prefix or sink is not None or any(unused.values()):
        raise RuntimeError("npu_fusion_attention: pse, padding_mask, prefix, sink and a given mask are not simulated")
    layout = _Layout(input_layout, head_num, query, actual_seq_qlen, actual_seq_kvlen)
    seed = _draw_seed(keep_prob)
    factors = _dropout(seed, keep_prob)
    outputs, maxima, sums, drawn = [], [], [], 0
    for q, k, v in zip(
        layout.split(query, actual_seq_qlen), layout.split(key, actual_seq_kvlen), layout.split(value, actual_seq_kvlen)
    ):
        q, k, v = q.float(), k.float(), v.float()
        repeat = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        scores = _scores(q, k, scale, _mask(sparse_mode, atten_mask, q.shape[1], k.shape[1]))
        maximum = scores.amax(-1).clamp_min(torch.finfo(torch.float32).min)
        weights = torch.exp(scores - maximum.unsqueeze(-1))
        total = weights.sum(-1)
        outputs.append(weights * factors(weights) @ v / total.clamp_min(1e-30).unsqueeze(-1))
        drawn += weights.numel() if keep_prob < 1.0 else 0
        maxima.append(maximum)
        sums.append(total)
    empty = torch.empty(0, dtype=query.dtype)
    out = layout.join(outputs).to(query.dtype)
    return out, layout.join_statistics(maxima), layout.join_statistics(sums), empty, seed, 0, drawn


def _attention_backward(
    query, key, value, dy, head_num, input_layout, *, pse=None, padding_mask=None, atten_mask=None, softmax_max=None,
    softmax_sum=None, softmax_in=None, attention_in=None, scale_value=1.0, keep_prob=1.0, pre_tockens=_INT_MAX,
    next_tockens=_INT_MAX, inner_precise=0, seed=0, offset=0, numels=0, prefix=None, actual_seq_qlen=None,
    actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False, softmax_layout="", sink=None, **unused: Any,
) -> tuple:  # fmt: skip
    layout = _Layout(input_layout, head_num, query, actual_seq_qlen, actual_seq_kvlen)
    gradients: list[tuple[Tensor, Tensor, Tensor]] = []
    factors = _dropout(seed, keep_prob)
    sequences = zip(
        layout.split(query, actual_seq_qlen), layout.split(key, actual_seq_kvlen), layout.split(value, actual_seq_kvlen),
        layout.split(dy, actual_seq_qlen), layout.split(attention_in, actual_seq_qlen),
        layout.split_statistics(softmax_max), layout.split_statistics(softmax_sum),
    )  # fmt: skip
    for q, k, v, upstream, out, maximum, total in sequences:
        q, k, v, upstream, out = q.float(), k.float(), v.float(), upstream.float(), out.float()
        groups, repeat = k.shape[0], q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
        scores = _scores(q, k, scale_value, _mask(sparse_mode, atten_mask, q.shape[1], k.shape[1]))
        weights = torch.exp(scores - maximum.unsqueeze(-1)) / total.unsqueeze(-1)
        kept = factors(weights)
        grad_v = (weights * kept).transpose(1, 2) @ upstream
        grad_weights = upstream @ v.transpose(1, 2) * kept
        grad_scores = weights * (grad_weights - (upstream * out).sum(-1, keepdim=True)) * scale_value
        grad_q, grad_k = grad_scores @ k, grad_scores.transpose(1, 2) @ q
        grad_k, grad_v = (g.unflatten(0, (groups, repeat)).sum(1) for g in (grad_k, grad_v))
        gradients.append((grad_q, grad_k, grad_v))
    empty = torch.empty(0, dtype=query.dtype)
    return (*(layout.join(list(parts)).to(query.dtype) for parts in zip(*gradients)), empty, empty)


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple:
    values = x.float()
    rstd = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return (values * rstd).to(x.dtype) * gamma, rstd


def _rms_norm_backward(dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor) -> tuple:
    values, upstream = x.float(), dy.float()
    normed, scale = values * rstd.float(), rstd.float()
    weighted = upstream * gamma.float()
    grad_x = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    grad_gamma = (upstream * normed).reshape(-1, *gamma.shape).sum(0)
    return grad_x.to(x.dtype), grad_gamma


def _swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def _swiglu_backward(dy: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.float().chunk(2, dim)
    sigmoid, upstream = torch.sigmoid(gate), dy.float()
    grad_gate = upstream * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([grad_gate, upstream * gate * sigmoid], dim).to(x.dtype)


def _rotate(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
    if mode == "interleave":
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    raise RuntimeError(f"npu_rotary_mul: rotary_mode {mode} is not one of half, interleave")


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    return (x.float() * cos.float() + _rotate(x.float(), rotary_mode) * sin.float()).to(x.dtype)


def _rotary_backward(dy, x, cos, sin, rotary_mode="half", rotate=None) -> tuple:
    upstream = dy.float()
    # the transpose of rotation by a quarter turn is its negative
    grad_x = upstream * cos.float() - _rotate(upstream * sin.float(), rotary_mode)
    grad_cos = (upstream * x.float()).sum_to_size(cos.shape)
    grad_sin = (upstream * _rotate(x.float(), rotary_mode)).sum_to_size(sin.shape)
    return grad_x.to(x.dtype), grad_cos.to(cos.dtype), grad_sin.to(sin.dtype)


def _add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple:
    total = x1 + x2
    normed, rstd = _rms_norm(total, gamma, epsilon)
    return normed, rstd, total


def _rows_by_expert(routing_map: Tensor) -> tuple[Tensor, Tensor]:
    """Experts and tokens of the True entries of [tokens, experts], expert by expert."""
    expert, token = routing_map.bool().t().nonzero(as_tuple=True)
    return expert, token


def _permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple:
    if drop_and_pad:
        raise RuntimeError("npu_moe_token_permute_with_routing_map: drop_and_pad is not simulated")
    expert, token = _rows_by_expert(routing_map)
    if num_out_tokens is not None and num_out_tokens != len(token):
        raise RuntimeError(f"npu_moe_token_permute_with_routing_map: num_out_tokens {num_out_tokens} of {len(token)} rows")
    kept = tokens.new_empty(0) if probs is None else probs[token, expert]
    return tokens[token], kept, token.int()


def _permute_backward(grad, probs_grad, sorted_indices, routing_map, experts_num, tokens_num, drop_and_pad) -> tuple:
    expert, token = _rows_by_expert(routing_map)
    tokens = torch.zeros(tokens_num, grad.shape[1]).index_add_(0, sorted_indices.long(), grad.float()).to(grad.dtype)
    if probs_grad is None:
        return tokens, grad.new_empty(0)
    probs = probs_grad.new_zeros(tokens_num, experts_num)
    probs[token, expert] = probs_grad
    return tokens, probs


def _unpermute(rows, sorted_indices, restore_shape, probs=None, routing_map=None, drop_and_pad=False) -> tuple:
    if drop_and_pad or probs is not None:
        raise RuntimeError("npu_moe_token_unpermute_with_routing_map: this form is not simulated")
    restored = torch.zeros(tuple(restore_shape)).index_add_(0, sorted_indices.long(), rows.float())
    return restored.to(rows.dtype), sorted_indices.clone(), sorted_indices.clone(), rows.new_empty(0)


def _unpermute_backward(
    grad, out_index, permuted_token_id, routing_map, permuted_tokens, probs, drop_and_pad, restore_shape
) -> tuple:
    return grad[permuted_token_id.long()], grad.new_empty(0)


def _ring_update(
    out, maximum, total, block_out, block_maximum, block_total, actual_seq_qlen=None, input_layout="SBH", **_
) -> tuple:
    if input_layout != "TND" or actual_seq_qlen is None or actual_seq_qlen[0] != 0 or actual_seq_qlen[-1] != len(out):
        raise RuntimeError(f"npu_ring_attention_update: {input_layout} with ends {actual_seq_qlen} is not simulated")
    highest = torch.maximum(maximum, block_maximum)
    mine, theirs = total * (maximum - highest).exp(), block_total * (block_maximum - highest).exp()
    sums = mine + theirs
    mixed = out.float() * (mine / sums)[..., :1] + block_out.float() * (theirs / sums)[..., :1]
    return mixed.to(out.dtype), highest, sums


def apply_adam_w(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, max_exp_avg_sq: Tensor | None, step: Tensor,
    lr: float, beta1: float, beta2: float, weight_decay: float, eps: float, amsgrad: bool, maximize: bool,
) -> None:  # fmt: skip
    """aclnnApplyAdamWV2 by its documented formula, in place, for float32 on the device; numbers are rounded to float32 first.

    m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, p = p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) - lr wd p, with
    the maximum of all v instead of v under amsgrad, and -g instead of g under maximize.

    Args:
        step: t, of which the first is 1.
    """
    changed = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    changed |= {"max_exp_avg_sq": max_exp_avg_sq} if amsgrad else {}
    for name, tensor in {**changed, "grad": grad}.items():
        if tensor.device.type != "npu" or tensor.dtype != torch.float32 or tensor.shape != param.shape:
            found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            raise RuntimeError(f"AdamW: {name} is {found}; that is not simulated")
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise RuntimeError(f"AdamW: {name} has no memory")
    lr, beta1, beta2, weight_decay, eps = torch.tensor([lr, beta1, beta2, weight_decay, eps], dtype=torch.float32)
    p, m, v = (cpu_view(tensor) for tensor in (param, exp_avg, exp_avg_sq))
    g = -cpu_view(grad) if maximize else cpu_view(grad)
    time = int(cpu_view(step) if step.device.type == "npu" else step)
    m.copy_(beta1 * m + (1 - beta1) * g)
    v.copy_(beta2 * v + (1 - beta2) * g * g)
    second = v
    if amsgrad:
        second = cpu_view(max_exp_avg_sq)
        second.copy_(torch.maximum(second, v))
    scaled = m / (1 - beta1**time) / ((second / (1 - beta2**time)).sqrt() + eps)
    p.copy_(p - lr * scaled - lr * weight_decay * p)


def _fused_adamw(
    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, *, lr, beta1, beta2, weight_decay, eps, amsgrad,
    maximize, grad_scale=None, found_inf=None,
) -> None:  # fmt: skip
    """torch's operator, for which torch_npu calls the kernel above for each tensor."""
    calls["aten::_fused_adamw_"] += 1
    if grad_scale is not None or found_inf is not None:
        raise RuntimeError("_fused_adamw_: grad_scale and found_inf are not simulated")
    for index, tensors in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        maximum = max_exp_avg_sqs[index] if amsgrad else None
        apply_adam_w(*tensors, maximum, state_steps[index], lr, beta1, beta2, weight_decay, eps, amsgrad, maximize)


def _fused_adamw_of_the_host(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, **settings) -> None:
    calls["aten::_fused_adamw_"] += 1
    tensors = ([cpu_view(tensor) for tensor in row] for row in (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs))
    steps = [cpu_view(step) if step.device.type == "npu" else step for step in state_steps]
    torch._fused_adamw_(*tensors, [step.float() for step in steps], **settings)


def round_adamw_as_the_host() -> None:
    """Compute AdamW on the device by torch's kernel of the host: a run that moves states to the host then changes no bit."""
    _aten.impl("_fused_adamw_", _fused_adamw_of_the_host, "PrivateUse1", allow_override=True)


KERNELS: dict[str, Callable] = {
    "npu_fusion_attention": _attention,
    "npu_fusion_attention_grad": _attention_backward,
    "npu_rms_norm": _rms_norm,
    "npu_rms_norm_backward": _rms_norm_backward,
    "npu_add_rms_norm": _add_rms_norm,
    "npu_swiglu": _swiglu,
    "npu_swiglu_backward": _swiglu_backward,
    "npu_moe_token_permute_with_routing_map": _permute,
    "npu_moe_token_permute_with_routing_map_grad": _permute_backward,
    "_npu_moe_token_unpermute_with_routing_map": _unpermute,
    "npu_moe_token_unpermute_with_routing_map_grad": _unpermute_backward,
    "npu_ring_attention_update": _ring_update,
    "npu_rotary_mul": _rotary,
    "npu_rotary_mul_backward": _rotary_backward,
}


def _grouped_matmul_add(
    self: Tensor, x: Tensor, weight: Tensor, group_list: Tensor, *, transpose_x: bool = True, transpose_weight: bool = False,
    group_type: int = 2, group_list_type: int | None = 0,
) -> Tensor:  # fmt: skip
    """Adds x_i^T weight_i of the rows of each group to its matrix of self, with sums in float32."""
    calls["npu::npu_grouped_matmul_add_"] += 1
    totals, left, right, ends = (cpu_view(value) for value in (self, x, weight, group_list))
    forms = totals.dim() == 3 and left.dim() == right.dim() == 2 and transpose_x and not transpose_weight and group_type == 2
    types = totals.dtype == torch.float32 and left.dtype == right.dtype and left.dtype in (torch.float16, torch.bfloat16)
    sizes = len(ends) == len(totals) <= 1024 and totals.shape[1:] == (left.shape[1], right.shape[1])
    if not (forms and types and sizes and ends.dtype == torch.int64 and group_list_type == 0 and totals.is_contiguous()):
        raise RuntimeError(
            f"npu_grouped_matmul_add_: {list(totals.shape)} {totals.dtype} += {list(left.shape)} {left.dtype} x "
            f"{list(right.shape)} {right.dtype} in {len(ends)} groups is not supported"
        )
    if max(totals.shape[1:]) >= 65536 or int(ends[-1]) > len(left) or (ends.diff(prepend=ends.new_zeros(1)) < 0).any():
        raise RuntimeError(f"npu_grouped_matmul_add_: rows of {list(totals.shape)}, or groups that end at {ends.tolist()}")
    start = 0
    for total, end in zip(totals, ends.tolist()):
        total += left[start:end].float().t() @ right[start:end].float()
        start = end
    return self


def _kernel(name: str, function: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        calls[f"npu::{name}"] += 1
        device: torch.device | None = None

        def to_cpu(value: Any) -> Any:
            nonlocal device
            if isinstance(value, (list, tuple)):
                return [to_cpu(item) for item in value]
            if isinstance(value, Tensor) and value.device.type == "npu":
                device = value.device
                return cpu_view(value)
            return value

        result = function(*(to_cpu(value) for value in args), **{key: to_cpu(value) for key, value in kwargs.items()})
        if isinstance(result, (tuple, list)):
            return type(result)(device_copy(value, device) if isinstance(value, Tensor) else value for value in result)
        return device_copy(result, device)

    return recorded(f"npu::{name}", run)


_library = torch.library.Library("npu", "IMPL")
_aten = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Overrides the fused operators; one the wheel does not have is an error."""
    for name, function in KERNELS.items():
        _library.impl(getattr(torch.ops.npu, name).default, _kernel(name, function), "PrivateUse1", allow_override=True)
    add = recorded("npu::npu_grouped_matmul_add_", _grouped_matmul_add)
    _library.impl(torch.ops.npu.npu_grouped_matmul_add_.default, add, "PrivateUse1", allow_override=True)
    _aten.impl("_fused_adamw_", recorded("aten::_fused_adamw_", _fused_adamw), "PrivateUse1", allow_override=True)
