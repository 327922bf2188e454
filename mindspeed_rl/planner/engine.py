"""Bytes of one rank of a rollout replica."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from mindspeed_rl.config.device_limits import HEAD_ROWS, PACKED_ELEMENTS, engine_adapter_rank
from mindspeed_rl.config.quantized_formats import QUANTIZED_FORMATS, find_format
from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.costs import (
    TowerCosts,
    cpu_cache_bytes,
    kv_bytes_per_token,
    read_draft_bytes,
    state_bytes_per_sequence,
)
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.quantized_names import is_quantized, name_matrix_format
from mindspeed_rl.models.vision import TOWER
from mindspeed_rl.models.weights import WeightOp
from mindspeed_rl.planner.devices import GIB
from mindspeed_rl.planner.run_shape import RunShape
from mindspeed_rl.planner.shapes import list_grouped_ops

#: rows of the vocabulary that the rollout engine pads to
_ENGINE_VOCAB = 64


@dataclass(frozen=True)
class KvCache:
    """The cache of one rank of a rollout replica.

    Attributes:
        bytes_per_token: on one rank.
        needed: for all sequences that may run at once, each of the maximum length.
        room: bytes that there are.
        sequence: for one sequence of the maximum length.
        sequences: that may run at once.
    """

    bytes_per_token: int
    needed: int
    room: int
    sequence: int
    sequences: int


@dataclass(frozen=True)
class Engine:
    """One rank of a rollout replica.

    Attributes:
        packed: copies of weights that the CPU's kernels hold while the engine generates.
        adapters: room for low-rank adapters in addition to the weights (`lora_push: adapter`).
        draft: weights of the model that makes drafts (`speculative_config`).
        step: bytes that a step takes while it is computed.
        problem: why no sequence fits; "" where one does.
    """

    weights: int
    packed: int
    adapters: int
    draft: int
    step: int
    cache: KvCache
    problem: str = ""


def plan_engine(run: RunShape) -> Engine | None:
    """Compute the bytes of a rank of the run's engines; None without rollouts."""
    generate, engines = run.generate, run.placement.engines
    if generate is None or engines is None:
        return None
    model_config, architecture = run.actor.plan.model_config, run.actor.plan.architecture
    itemsize, tensor = 2 if generate.dtype == "bfloat16" else 4, engines.tensor
    elements = _count_rollout_elements(architecture, model_config, tensor, engines.expert_ranks)
    weights, quantized = elements * itemsize, 0
    if generate.quantization is not None:
        ranks = tensor, engines.expert_ranks
        quantized = _count_rollout_elements(architecture, model_config, *ranks, quantized=True)
        form = find_format(generate.quantization, run.device.kind)
        stored = _count_quantized_bytes(architecture, model_config, *ranks, form, itemsize)
        weights += stored - quantized * itemsize
    if model_config.multi_latent_attention:
        # the engine stores what its absorbed products need in addition to the projection itself
        widths = (model_config.qk_head_dim or 0) + (model_config.v_head_dim or 0)
        elements = model_config.num_attention_heads // tensor * widths * (model_config.kv_lora_rank or 0)
        weights += model_config.num_layers * elements * itemsize
    packed = 0
    if not run.device.sleeps:
        quantizes = generate.quantization is not None
        packed = _count_packed_elements(architecture, model_config, tensor, quantized=quantizes) * itemsize
        if generate.quantization is not None:  # an emulated format is multiplied in float32
            packed += quantized * (4 if QUANTIZED_FORMATS[generate.quantization].is_emulated else 1)
    adapters = 0
    if generate.lora_push == "adapter":
        rank = engine_adapter_rank(run.cfg.actor_config.lora_r)
        elements, serve = _count_rollout_adapters(architecture, model_config, tensor, rank), run.cfg.serve_config
        if serve is not None:  # adapters of several models, of the output layer too
            elements += rank * (model_config.hidden_size + model_config.vocab_size)
            elements *= serve.num_engine_adapters or serve.num_models
        elif run.cfg.rl_config is not None:
            elements *= run.cfg.rl_config.num_engine_adapters
        adapters = elements * itemsize
    draft, draft_token = read_draft_bytes(generate, itemsize)[0], read_draft_bytes(generate, generate.cache_itemsize)[1]
    draft //= tensor
    token = kv_bytes_per_token(model_config, generate.cache_itemsize, tensor) + draft_token // tensor
    linear = model_config.linear_attention
    drafted = generate.num_draft_tokens
    sequence = token * generate.max_model_len + state_bytes_per_sequence(linear, itemsize, tensor, drafted)
    rows = max(generate.max_num_batched_tokens, generate.max_num_seqs)
    inner = model_config.ffn_hidden_size
    if model_config.moe_layers:
        inner = model_config.moe_router_topk * (model_config.moe_ffn_hidden_size or 0)
    step = int(rows * (4 * model_config.hidden_size + 3 * inner / tensor) * itemsize)
    # the sampler's rows, with the drafts' rows: logits, their float32 form and the log-probs, of the full vocabulary
    step += min(generate.max_num_seqs * (1 + drafted), rows) * model_config.vocab_size * 12
    if itemsize == 2 and (generate.fp32_lm_head or run.cfg.actor_config.fp32_lm_head):
        step += 4 * model_config.hidden_size * min(HEAD_ROWS, model_config.vocab_size // tensor)
    if (tower := TowerCosts.count(architecture, model_config)) is not None:
        # images of a step, at most its tokens or one prompt's tokens; their features wait for the prompt's tokens
        images = min(max(rows, run.count_image_tokens(run.actor)), generate.max_num_seqs * run.count_image_tokens(run.actor))
        step += int(images * (tower.block / tensor + tower.ends) * itemsize)
    problem = ""
    if generate.engine == "transformers":  # caches come and go with their responses
        room = sequence * generate.max_num_seqs
    elif not run.device.sleeps:
        states = state_bytes_per_sequence(linear, itemsize, drafts=drafted)
        room = cpu_cache_bytes(generate, kv_bytes_per_token(model_config, generate.cache_itemsize) + draft_token, states)
    else:
        room = int(generate.gpu_memory_utilization * run.device.visible) - weights - adapters - draft - step
        if room < sequence:
            problem = (
                f"generate_config.gpu_memory_utilization {generate.gpu_memory_utilization:g} leaves {room / GIB:.1f} GiB for "
                f"keys and values in addition to {weights / GIB:.1f} GiB of weights; one sequence of {generate.max_model_len} "
                f"tokens takes {sequence / GIB:.1f} GiB"
            )
    cache = KvCache(token, sequence * generate.max_num_seqs, max(0, room), sequence, generate.max_num_seqs)
    return Engine(weights, packed, adapters, draft, step, cache, problem)


@lru_cache(maxsize=256)
def _count_rollout_elements(
    architecture: Architecture, model_config: ModelConfig, tensor: int, expert_ranks: int, *, quantized: bool = False
) -> int:
    """Count the weights of one rank of the rollout engine, or the quantized ones only."""
    return sum(
        size * _count_quantized(op) // sum(map(math.prod, op.shapes)) if quantized else size
        for op, size in _list_engine_rows(architecture, model_config, tensor, expert_ranks)
    )


@lru_cache(maxsize=256)
def _count_quantized_bytes(
    architecture: Architecture, model_config: ModelConfig, tensor: int, expert_ranks: int, quantization: str, itemsize: int
) -> int:
    """Count the bytes of elements and scales of the quantized matrices on one rank of the rollout engine."""
    total = 0
    for op, size in _list_engine_rows(architecture, model_config, tensor, expert_ranks):
        stored = sum(
            QUANTIZED_FORMATS[name_matrix_format(name, quantization)].count_bytes([(shape[0], shape[1])], itemsize)
            for name, shape in _list_quantized(op)
        )
        total += stored * size // sum(map(math.prod, op.shapes))
    return total


def _list_engine_rows(
    architecture: Architecture, model_config: ModelConfig, tensor: int, expert_ranks: int
) -> Iterator[tuple[WeightOp, int]]:
    """Yield the rows of the table with their elements on one rank of the rollout engine, under the engine's rules of sharding.

    Query, key and value are sharded by heads (a rank has one key/value head at least), the low-rank down projections of latent
    attention are replicated, and experts are spread over `expert_ranks` where those are above 1.
    """
    for op in list_grouped_ops(architecture, model_config.pad_vocab(1, 1)):
        # the engine has one matrix for a tied head, and loads no prediction layers
        if op.copy_of_tied or op.section == "mtp":
            continue
        if op.axis == "etp" and expert_ranks > 1:
            size = math.prod(op.shard_shape()) // expert_ranks
        else:
            size = _on_engine_rank(op, model_config, tensor)
        yield op, size


def _list_quantized(op: WeightOp) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the HF tensors of a row of the table that engines have quantized."""
    return [(name, shape) for name, shape in zip(op.hf, op.shapes) if len(shape) == 2 and is_quantized(name)]


def _count_quantized(op: WeightOp) -> int:
    return sum(math.prod(shape) for _, shape in _list_quantized(op))


def _on_engine_rank(op: WeightOp, model_config: ModelConfig, tensor: int) -> int:
    """Count the elements of one row of the table on a rank of the engine, experts sharded over the tensor ranks."""
    vocab = -(-model_config.vocab_size // _ENGINE_VOCAB) * _ENGINE_VOCAB
    total, linear = 0, model_config.linear_attention
    has_key_heads = linear is not None and op.layer in linear.layers and ".self_attention." in op.mcore
    for shape, split in zip(op.shapes, op.splits):
        size = math.prod(shape)
        if op.mcore.startswith(TOWER) and len(shape) == 2 and "pos_embed" not in op.mcore:
            total += size // tensor  # the trainer has it whole, the engine by heads and columns
        elif split.dim is None or "_down_proj" in op.mcore:
            total += size
        elif shape[0] == model_config.vocab_size:
            total += size // shape[0] * (vocab // tensor)
        elif has_key_heads:  # of a gated delta net, each with its value heads on one rank
            total += size // tensor
        else:
            # query heads may be on another rank than their key/value head
            unit = split.unit if split.unit % model_config.kv_channels else model_config.kv_channels
            units = shape[split.dim] // unit
            total += size // units * -(-units // tensor)
    return total


@lru_cache(maxsize=256)
def _count_packed_elements(
    architecture: Architecture, model_config: ModelConfig, tensor: int, *, quantized: bool = False
) -> int:
    """Count the elements that a rank of the CPU's engine also holds packed: of large linear layers and the head.

    With `quantized` the quantized ones are left out: engines hold all of these packed, of any size.

    Matrices that the engine has as one (query, key and value; gate and up) count as one here too.
    """
    total = 0
    ops = list_grouped_ops(architecture, model_config.pad_vocab(1, 1))
    tied = any(op.copy_of_tied for op in ops)
    for op in ops:
        is_lookup = op.section == "pre" and not tied and not op.mcore.startswith(TOWER)
        if op.copy_of_tied or op.section == "mtp" or op.axis == "etp" or is_lookup or any(len(s) != 2 for s in op.shapes):
            continue
        if quantized and _count_quantized(op):
            continue
        size = _on_engine_rank(op, model_config, tensor)
        total += size if size >= PACKED_ELEMENTS else 0
    return total


@lru_cache(maxsize=64)
def _count_rollout_adapters(architecture: Architecture, model_config: ModelConfig, tensor: int, rank: int) -> int:
    """Count the elements of adapters that a rank of the rollout engine has room for.

    They are A and B of every linear layer, whatever trains. The input of A is sharded where the layer's input is, the output
    of B where its output is.
    """
    total = 0
    for op in list_grouped_ops(architecture, model_config.pad_vocab(1, 1)):
        if op.section != "layer" or op.axis != "tp" or op.buffer:
            continue
        for shape, split in zip(op.shapes, op.splits):
            if len(shape) == 2:
                outputs, inputs = (size // tensor if split.dim == dim else size for dim, size in enumerate(shape))
                total += rank * (outputs + inputs)
    return total
