"""Gated delta nets of vllm-ascend 0.23: its Triton kernels by Triton's interpreter, its own operators by their definitions.

| stand-in | in place of |
|---|---|
| Triton's interpreter on the memory of the device | triton-ascend; `insert_slice`, `extract_slice` and any shape are its own |
| `_C_ascend::npu_causal_conv1d_custom` | the convolution of prompts (run mode 0) and of new tokens (1) |
| `_C_ascend::npu_gemma_rms_norm` | norms whose weights are 1 + w |
| `_C_ascend::npu_fused_gdn_gating` | decay and strength of each token |
| `_C_ascend::chunk_gated_delta_rule_fwd_h`, `_C_ascend::chunk_fwd_o` | states at the chunks of prompts, and outputs from them |
| `_C_ascend::npu_recurrent_gated_delta_rule` | the rule token by token |

The operators are written from the sources of their kernels, which lie in the wheel (`_cann_ops_custom`, ascendc). The device's
take 16-bit numbers alone; these also take float32, in which a test can compare them closely. Kernels in Triton compute in
float32 where their arguments are bfloat16, which the interpreter would read as whole numbers, and round what they store.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from simulator import calls
from simulator.fused import _rms_norm
from simulator.graphs import recorded
from simulator.memory import cpu_view

Tensor = torch.Tensor
#: cores of an Ascend 910B3, over which kernels spread their rows
CUBE_CORES, VECTOR_CORES = 20, 40
CHUNK = 64


# ---------------------------------------------------------------- operators


def _check(name: str, **wanted: tuple[object, object]) -> None:
    """Raises for an argument that is not as the only simulated form has it; of each (given, wanted)."""
    others = [f"{key}={given}" for key, (given, want) in wanted.items() if given != want]
    if others:
        raise RuntimeError(f"{name}: {', '.join(others)} is not simulated")


def _causal_conv1d(
    output: Tensor, x: Tensor, weight: Tensor, conv_state: Tensor, bias_opt: Tensor | None, query_start_loc_opt: Tensor | None,
    cache_indices_opt: Tensor | None, initial_state_mode_opt: Tensor | None, num_accepted_tokens_opt: Tensor | None,
    activation_mode: int, pad_slot_id: int, run_mode: int,
) -> Tensor:  # fmt: skip
    """out_t = silu(sum_j weight_j x_(t - W + 1 + j) + bias), in front of x the last W - 1 tokens of the sequence's slot.

    Writes the last W - 1 tokens there. In run mode 0 a sequence without an initial state has zeros in front.

    Args:
        x: [tokens, channels], output as well; sequence i has the rows from query_start_loc[i] on.
        weight: [W, channels], the newest token's last.
        conv_state: [slots, at least W - 1, channels].
        cache_indices_opt: [sequences] slots, or tables that begin with them; one without a slot has no output.
    """
    name = "npu_causal_conv1d_custom"
    _check(name, num_accepted_tokens=(num_accepted_tokens_opt, None))
    fits = conv_state.shape[-1] == x.shape[-1] and conv_state.is_contiguous()
    if query_start_loc_opt is None or cache_indices_opt is None or not fits:
        raise RuntimeError(f"{name}: batches of one length, no slots or states [slots, channels, tokens] are not simulated")
    if run_mode == 0 and initial_state_mode_opt is None:
        raise RuntimeError(f"{name}: prompts that do not say whether they have an initial state are not simulated")
    calls[f"_C_ascend::{name}"] += 1
    out, rows, taps, states = (cpu_view(tensor) for tensor in (output, x, weight, conv_state))
    starts = cpu_view(query_start_loc_opt).tolist()
    slots = cpu_view(cache_indices_opt).view(len(cache_indices_opt), -1)[:, 0].tolist()
    continues = [True] * len(slots) if initial_state_mode_opt is None else cpu_view(initial_state_mode_opt).tolist()
    kept = len(taps) - 1
    for start, end, slot, has_state in zip(starts, starts[1:], slots, continues):
        if start == end or slot == pad_slot_id or not 0 <= slot < len(states):
            continue
        before = states[slot, :kept] if run_mode == 1 or has_state else torch.zeros_like(states[slot, :kept])
        window = torch.cat([before, rows[start:end]])
        sums = sum(window[tap : tap + end - start].float() * taps[tap].float() for tap in range(len(taps)))
        sums = sums if bias_opt is None else sums + cpu_view(bias_opt).float()
        out[start:end] = (torch.nn.functional.silu(sums) if activation_mode else sums).to(out.dtype)
        states[slot, :kept] = window[-kept:]
    return output


def _gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return _rms_norm(x, 1.0 + gamma, epsilon)


def _fused_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = 20.0  # noqa: N803
) -> tuple[Tensor, Tensor]:
    """Return g = -exp(A_log) softplus(a + dt_bias) in float32 and sigmoid(b), both [1, tokens, heads]."""
    x = a.float() + dt_bias.float()
    g = -A_log.float().exp() * torch.nn.functional.softplus(x, beta, threshold)
    return g[None], b.float().sigmoid().to(b.dtype)[None]


def _each_chunk(tokens: int, ends: Sequence[int] | None, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (sequence, chunk among all, start, end) of the chunks of packed sequences."""
    ends, chunk = list(ends or (0, tokens)), 0
    for sequence, (start, end) in enumerate(zip(ends, ends[1:])):
        for first in range(start, end, size):
            yield sequence, chunk, first, min(first + size, end)
            chunk += 1


def _repeat_heads(rows: Tensor, heads: int) -> Tensor:
    """[1, keys' heads, tokens, d] -> [heads, tokens, d] in float32; neighbours share a key."""
    return rows[0].float().repeat_interleave(heads // rows.shape[1], 0)


def _chunk_states(
    k: Tensor, w: Tensor, u: Tensor, g: Tensor | None = None, *, gk: Tensor | None = None, initial_state: Tensor | None = None,
    output_final_state: bool | None = False, chunk_size: int | None = None, save_new_value: bool | None = True,
    cu_seqlens: Sequence[int] | None = None, chunk_indices: Sequence[int] | None = None, use_exp2: bool | None = False,
    transpose_state_layout: bool | None = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The state S in front of each chunk, and values v = u - w S that it lacks; S' = exp(g_end) S + k^T (exp(g_end - g) v).

    Args:
        k: [1, keys' heads, T, K]; w [1, H, T, K], u [1, H, T, V].
        g: [1, H, T], summed up from the begin of each chunk.
        initial_state: [sequences, H, K, V].

    Returns:
        [1, H, chunks, K, V], v like u, and the states behind the sequences like the initial ones.
    """
    name = "chunk_gated_delta_rule_fwd_h"
    _check(name, gk=(gk, None), use_exp2=(bool(use_exp2), False), transposed=(bool(transpose_state_layout), False))
    _check(name, chunk_size=(chunk_size, CHUNK), batch=(len(k), 1), save_new_value=(save_new_value, True))
    if g is None or initial_state is None:
        raise RuntimeError(f"{name}: no decay or no initial state is not simulated")
    heads, tokens = u.shape[1:3]
    chunks = list(_each_chunk(tokens, cu_seqlens, CHUNK))
    sequences = len(cu_seqlens or (0, tokens)) - 1
    numbered = [value for number, _, start, _ in chunks for value in (number, (start - (cu_seqlens or (0,))[number]) // CHUNK)]
    if len(initial_state) != sequences or (chunk_indices is not None and list(chunk_indices) != numbered):
        raise RuntimeError(f"{name}: {len(initial_state)} states or chunks {chunk_indices} do not fit {cu_seqlens}")
    keys, states = _repeat_heads(k, heads), initial_state.float()
    h = torch.zeros(1, heads, len(chunks), k.shape[-1], u.shape[-1], dtype=k.dtype)
    v_new = torch.zeros_like(u)
    for sequence, chunk, start, end in chunks:
        state, decay = states[sequence], g[0, :, start:end].float()
        h[0, :, chunk] = state.to(h.dtype)
        v = u[0, :, start:end].float() - w[0, :, start:end].float() @ h[0, :, chunk].float()
        v_new[0, :, start:end] = v.to(v_new.dtype)
        rest = (v * (decay[:, -1:] - decay).exp()[..., None]).to(k.dtype).float()
        states[sequence] = state * decay[:, -1].exp()[:, None, None] + keys[:, start:end].transpose(1, 2) @ rest
    return h, v_new, states.to(initial_state.dtype)


def _chunk_outputs(
    q: Tensor, k: Tensor, v: Tensor, h: Tensor, scale: float, *, g: Tensor | None = None, g_gamma: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None, chunk_indices: Sequence[int] | None = None, chunk_size: int | None = None,
    transpose_state_layout: bool | None = False,
) -> Tensor:  # fmt: skip
    """out_i = scale (exp(g_i) q_i S + sum_(j <= i) exp(g_i - g_j) (q_i k_j) v_j) within each chunk, like v."""
    name = "chunk_fwd_o"
    _check(name, g_gamma=(g_gamma, None), chunk_size=(chunk_size, CHUNK), transposed=(bool(transpose_state_layout), False))
    if g is None:
        raise RuntimeError(f"{name}: no decay is not simulated")
    heads, out = v.shape[1], torch.zeros_like(v)
    queries, keys = _repeat_heads(q, heads), _repeat_heads(k, heads)
    for _, chunk, start, end in _each_chunk(v.shape[2], cu_seqlens, CHUNK):
        decay, query = g[0, :, start:end].float(), queries[:, start:end]
        seen = torch.ones(end - start, end - start).tril()
        weights = (query @ keys[:, start:end].transpose(1, 2)) * ((decay[..., None] - decay[:, None]) * seen).exp() * seen
        before = (query * decay.exp()[..., None]) @ h[0, :, chunk].float()
        sums = before + weights.to(v.dtype).float() @ v[0, :, start:end].float()
        out[0, :, start:end] = (sums * scale).to(out.dtype)
    return out


def _recurrent_rule(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, *, beta: Tensor | None = None, scale: float | None = None,
    actual_seq_lengths: Tensor | None = None, ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, g: Tensor | None = None, gk: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """S = exp(g) S; S = S + beta (v - S k) k^T; out = S q scale, token by token.

    Args:
        query: [T, keys' heads, K]; value [T, H, V], g and beta [T, H].
        state: [slots, H, V, K], read at the slot of a sequence's first token and written at the slot of each.
        actual_seq_lengths: [1 + sequences], the first token and then lengths.

    Returns:
        Like value.
    """
    name = "npu_recurrent_gated_delta_rule"
    _check(name, gk=(gk, None), num_accepted_tokens=(num_accepted_tokens, None))
    if beta is None or scale is None or actual_seq_lengths is None or ssm_state_indices is None or g is None:
        raise RuntimeError(f"{name}: this form is not simulated")
    calls[f"_C_ascend::{name}"] += 1
    queries, keys, values, states = (cpu_view(tensor) for tensor in (query, key, value, state))
    decays, strengths = cpu_view(g).float().exp(), cpu_view(beta).float()
    first, *lengths = cpu_view(actual_seq_lengths).tolist()
    slots, repeat = cpu_view(ssm_state_indices).tolist(), value.shape[1] // query.shape[1]
    result = torch.zeros_like(value)
    out = cpu_view(result)
    for length in lengths:
        tokens, first = range(first, first + length), first + length
        memory = states[slots[tokens[0]]].float() if length else None
        for token in tokens:
            k, q = (rows[token].float().repeat_interleave(repeat, 0)[:, None] for rows in (keys, queries))
            memory = memory * decays[token][:, None, None]
            missing = (values[token].float() - (memory * k).sum(-1)) * strengths[token][:, None]
            memory = memory + missing[..., None] * k
            out[token] = ((memory * q).sum(-1) * scale).to(out.dtype)
            states[slots[token]] = memory.to(states.dtype)
    return result


#: name -> schema as the wheel has it, and the function on CPU views
OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "npu_gemma_rms_norm": ("(Tensor x, Tensor gamma, float epsilon=1e-6) -> (Tensor y, Tensor rstd)", _gemma_rms_norm),
    "npu_fused_gdn_gating": (
        "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias, float beta=1.0, float threshold=20.0) "
        "-> (Tensor g, Tensor beta_output)",
        _fused_gating,
    ),
    "chunk_gated_delta_rule_fwd_h": (
        "(Tensor k, Tensor w, Tensor u, Tensor? g=None, *, Tensor? gk=None, Tensor? initial_state=None, "
        "bool? output_final_state=False, int? chunk_size=None, bool? save_new_value=True, int[]? cu_seqlens=None, "
        "int[]? chunk_indices=None, bool? use_exp2=False, bool? transpose_state_layout=False) "
        "-> (Tensor h_out, Tensor v_new_out, Tensor final_state_out)",
        _chunk_states,
    ),
    "chunk_fwd_o": (
        "(Tensor q, Tensor k, Tensor v, Tensor h, float scale, *, Tensor? g=None, Tensor? g_gamma=None, "
        "int[]? cu_seqlens=None, int[]? chunk_indices=None, int? chunk_size=None, bool? transpose_state_layout=False) "
        "-> Tensor",
        _chunk_outputs,
    ),
}

#: those that write into what they are given, the first two into arguments that their schema has as inputs alone
WRITING: dict[str, tuple[str, Callable[..., Any]]] = {
    "npu_causal_conv1d_custom": (
        "(Tensor output, Tensor x, Tensor weight, Tensor conv_state, Tensor? bias_opt, Tensor? query_start_loc_opt, "
        "Tensor? cache_indices_opt, Tensor? initial_state_mode_opt, Tensor? num_accepted_tokens_opt, int activation_mode, "
        "int pad_slot_id, int run_mode) -> (Tensor output)",
        _causal_conv1d,
    ),
    "npu_recurrent_gated_delta_rule": (
        "(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None, float? scale=None, "
        "Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, Tensor? num_accepted_tokens=None, Tensor? g=None, "
        "Tensor? gk=None) -> Tensor",
        _recurrent_rule,
    ),
}


# ---------------------------------------------------------------- Triton


def _interpret(executor: Any, *args: Any, **keywords: Any) -> None:
    """Runs a kernel on the memory of the device; bfloat16 as float32 of the whole storage, which is rounded afterwards."""
    calls[f"triton::{executor.fn.__name__}"] += 1
    wide: dict[int, tuple[Tensor, Tensor]] = {}

    def on_host(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        view = cpu_view(item)
        if view.dtype != torch.bfloat16:
            return view
        address = item.untyped_storage().data_ptr()
        if address not in wide:
            whole = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
            wide[address] = whole, whole.float()
        return wide[address][1].as_strided(view.size(), view.stride(), view.storage_offset())

    executor.run_on_host(*map(on_host, args), **{name: on_host(value) for name, value in keywords.items()})
    for whole, numbers in wide.values():
        whole.copy_(numbers)


def _fit_blocks(LARGE_BLOCK_T: int, cu_seqlens: Tensor | None, **keywords: Any) -> dict[str, Any]:  # noqa: N803
    """Arguments of a kernel whose programs have 1216 rows, with fewer where no sequence has more: the others are masked."""
    longest = keywords["T"] if cu_seqlens is None else int(cpu_view(cu_seqlens).diff().max())
    size = min(LARGE_BLOCK_T, -(-longest // CHUNK) * CHUNK)
    return keywords | {"LARGE_BLOCK_T": size, "cu_seqlens": cu_seqlens, "EXTRACT_SLICE_STRIDE_1": size // 32}


#: kernel -> its arguments with the same results in less time
_QUICKER = {"solve_tril_16x16_kernel": _fit_blocks}


def _run_kernel(executor: Any, *args: Any, **keywords: Any) -> None:
    if fit := _QUICKER.get(executor.fn.__name__):
        keywords = fit(**keywords)
    recorded(f"triton::{executor.fn.__name__}", functools.partial(_interpret, executor))(*args, **keywords)


def _read_number(value: Any) -> int:
    """A whole number of a kernel, which may be one of Triton's tensors."""
    return int(value.handle.data.item()) if hasattr(value, "handle") else int(getattr(value, "value", value))


def _region(offsets: Sequence[Any], sizes: Sequence[Any], strides: Sequence[Any]) -> tuple[slice, ...]:
    numbers = (tuple(map(_read_number, values)) for values in (offsets, sizes, strides))
    return tuple(slice(first, first + size * step, step) for first, size, step in zip(*numbers))


def insert_slice(ful: Any, sub: Any, offsets: Sequence[Any], sizes: Sequence[Any], strides: Sequence[Any]) -> Any:
    """Return a block with the numbers of another one at a place; of triton-ascend."""
    from triton.language import tensor
    from triton.runtime.interpreter import TensorHandle

    data = ful.handle.data.copy()
    place = _region(offsets, sizes, strides)
    data[place] = sub.handle.data.reshape(data[place].shape)
    return tensor(TensorHandle(data, ful.dtype.scalar), ful.type)


def extract_slice(ful: Any, offsets: Sequence[Any], sizes: Sequence[Any], strides: Sequence[Any]) -> Any:
    """Return the numbers of a block at a place; of triton-ascend."""
    from triton.language import block_type, tensor
    from triton.runtime.interpreter import TensorHandle

    data = ful.handle.data[_region(offsets, sizes, strides)].copy()
    return tensor(TensorHandle(data, ful.dtype.scalar), block_type(ful.dtype.scalar, list(data.shape)))


def _allow_any_shape() -> None:
    """Blocks of any size, as triton-ascend has them; Triton's own are powers of 2."""
    import math

    from triton.language import core, semantic

    def arange(self: Any, start: int, end: int, *, ret_ty: Any = None) -> Any:
        kind = core.block_type(core.int32, [end - start]) if ret_ty is None else ret_ty
        return self.tensor(self.builder.create_make_range(kind.to_ir(self.builder), start, end), kind)

    setattr(core, "validate_block_shape", math.prod)  # noqa: B010
    setattr(semantic.TritonSemantic, "arange", arange)  # noqa: B010


class _Driver:
    """The part of Triton's driver that vLLM calls before kernels run."""

    def get_current_target(self) -> SimpleNamespace:
        return SimpleNamespace(backend="npu")


def triton_by_interpreter(module: ModuleType) -> None:
    """Gives vLLM's modules Triton itself, which needs TRITON_INTERPRET in the environment before its first import.

    Triton stays "absent" where they ask for it, and they take their other paths there; kernels that are called in any case run.
    """
    import triton
    import triton.language
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import GridExecutor

    if not triton.knobs.runtime.interpret:
        raise RuntimeError("triton was imported without TRITON_INTERPRET=1")
    module.triton, module.tl, module.tldevice = triton, triton.language, libdevice
    # asked for the kind of the device; where MindSpeed lets torch.cuda say yes, Triton would take its driver for CUDA
    triton.runtime.driver.set_active(_Driver())
    _allow_any_shape()
    if not hasattr(GridExecutor, "run_on_host"):
        GridExecutor.run_on_host, GridExecutor.__call__ = GridExecutor.__call__, _run_kernel


def triton_of_ascend(module: ModuleType) -> None:
    """Functions of triton-ascend that vllm-ascend imports, and the numbers of cores."""
    module.insert_slice, module.extract_slice = insert_slice, extract_slice
    module._NUM_AICORE, module._NUM_VECTORCORE = CUBE_CORES, VECTOR_CORES
