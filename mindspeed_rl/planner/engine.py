"""Bytes of one rank of a rollout replica."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config.placement import engine_adapter_rank
from mindspeed_rl.models.costs import cpu_cache_bytes, kv_bytes_per_token
from mindspeed_rl.planner.devices import GIB
from mindspeed_rl.planner.run_shape import RunShape
from mindspeed_rl.planner.shapes import count_packed_elements, count_rollout_adapters, count_rollout_elements


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
        step: bytes that a step takes while it is computed.
        problem: why no sequence fits; "" where one does.
    """

    weights: int
    packed: int
    adapters: int
    step: int
    cache: KvCache
    problem: str = ""


def plan_engine(run: RunShape) -> Engine | None:
    """Compute the bytes of a rank of the run's engines; None without rollouts."""
    generate, engines = run.generate, run.cfg.placement.engines
    if generate is None or engines is None:
        return None
    model_config, architecture = run.actor.plan.model_config, run.actor.plan.architecture
    itemsize, tensor = 2 if generate.dtype == "bfloat16" else 4, engines.tensor
    weights = count_rollout_elements(architecture, model_config, tensor, engines.expert_ranks) * itemsize
    if model_config.multi_latent_attention:
        # the engine stores what its absorbed products need in addition to the projection itself
        widths = (model_config.qk_head_dim or 0) + (model_config.v_head_dim or 0)
        elements = model_config.num_attention_heads // tensor * widths * (model_config.kv_lora_rank or 0)
        weights += model_config.num_layers * elements * itemsize
    packed = 0 if run.device.sleeps else count_packed_elements(architecture, model_config, tensor) * itemsize
    adapters = 0
    if generate.lora_push == "adapter":
        rank = engine_adapter_rank(run.cfg.actor_config.lora_r)
        adapters = count_rollout_adapters(architecture, model_config, tensor, rank) * itemsize
    token = kv_bytes_per_token(model_config, itemsize, tensor)
    sequence = token * generate.max_model_len
    rows = max(generate.max_num_batched_tokens, generate.max_num_seqs)
    inner = model_config.ffn_hidden_size
    if model_config.moe_layers:
        inner = model_config.moe_router_topk * (model_config.moe_ffn_hidden_size or 0)
    step = int(rows * (4 * model_config.hidden_size + 3 * inner / tensor) * itemsize)
    # the sampler's rows: logits, their float32 form and the log-probs, of the full vocabulary
    step += min(generate.max_num_seqs, rows) * model_config.vocab_size * 12
    problem = ""
    if not run.device.sleeps:
        room = cpu_cache_bytes(generate, kv_bytes_per_token(model_config, itemsize))
    else:
        room = int(generate.gpu_memory_utilization * run.device.visible) - weights - adapters - step
        if room < sequence:
            problem = (
                f"generate_config.gpu_memory_utilization {generate.gpu_memory_utilization:g} leaves {room / GIB:.1f} GiB for "
                f"keys and values in addition to {weights / GIB:.1f} GiB of weights; one sequence of {generate.max_model_len} "
                f"tokens takes {sequence / GIB:.1f} GiB"
            )
    cache = KvCache(token, sequence * generate.max_num_seqs, max(0, room), sequence, generate.max_num_seqs)
    return Engine(weights, packed, adapters, step, cache, problem)
