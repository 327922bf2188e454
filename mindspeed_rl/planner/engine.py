"""Bytes of one rank of a rollout replica."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config.placement import RolloutLayout, engine_adapter_rank
from mindspeed_rl.models.costs import cpu_cache_bytes, kv_bytes_per_token
from mindspeed_rl.planner.chips import GIB
from mindspeed_rl.planner.run_shape import RunShape
from mindspeed_rl.planner.shapes import packed_elements, rollout_adapters, rollout_weights


@dataclass(frozen=True)
class KvCache:
    """The cache of one rank of a rollout replica.

    Attributes:
        bytes_per_token: on one rank.
        needed: for all sequences that may run at once, at their longest.
        room: what there is.
        sequence: for one sequence at its longest.
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
        packed: copies of weights that the CPU's kernels keep while it generates.
        adapters: room that it keeps for low-rank adapters beside its weights (`lora_push: adapter`).
        step: what a step takes while it is computed.
        problem: why no sequence fits; "" where one does.
    """

    weights: int
    packed: int
    adapters: int
    step: int
    cache: KvCache
    problem: str = ""


def engine_of(run: RunShape) -> Engine | None:
    """Return a rank of the run's engines; None where nothing is generated."""
    generate = run.generate
    if generate is None:
        return None
    lie = RolloutLayout.from_config(generate, run.sizes.rollout.num_npus)
    model_config = run.actor.plan.model_config
    itemsize = 2 if generate.dtype == "bfloat16" else 4
    weights = rollout_weights(run.actor.plan, lie) * itemsize
    if model_config.multi_latent_attention:
        # the engine keeps what its absorbed products need beside the projection itself
        heads, widths = (
            model_config.num_attention_heads // lie.tensor,
            (model_config.qk_head_dim or 0) + (model_config.v_head_dim or 0),
        )
        weights += model_config.num_layers * heads * widths * (model_config.kv_lora_rank or 0) * itemsize
    packed = 0 if run.chip.sleeps else packed_elements(run.actor.plan.architecture, model_config, lie.tensor) * itemsize
    adapters = 0
    if generate.lora_push == "adapter":
        rank = engine_adapter_rank(run.cfg.actor_config.lora_r)
        adapters = rollout_adapters(run.actor.plan.architecture, model_config, lie.tensor, rank) * itemsize
    each = kv_bytes_per_token(model_config, itemsize, lie.tensor)
    sequence = each * generate.max_model_len
    rows = max(generate.max_num_batched_tokens, generate.max_num_seqs)
    inner = (
        model_config.moe_router_topk * (model_config.moe_ffn_hidden_size or 0)
        if model_config.moe_layers
        else model_config.ffn_hidden_size
    )
    step = int(rows * (4 * model_config.hidden_size + 3 * inner / lie.tensor) * itemsize)
    # the sampler's rows: logits, their float32 form and the log-probs, of the whole vocabulary
    step += min(generate.max_num_seqs, rows) * model_config.vocab_size * 12
    problem = ""
    if not run.chip.sleeps:
        room = cpu_cache_bytes(generate, kv_bytes_per_token(model_config, itemsize))
    else:
        room = int(generate.gpu_memory_utilization * run.chip.visible) - weights - adapters - step
        if room < sequence:
            problem = (
                f"generate_config.gpu_memory_utilization {generate.gpu_memory_utilization:g} leaves {_gib(room)} for keys and "
                f"values beside {_gib(weights)} of weights; one sequence of {generate.max_model_len} tokens takes "
                f"{_gib(sequence)}"
            )
    needed = sequence * generate.max_num_seqs
    cache = KvCache(each, needed, max(0, room), sequence, generate.max_num_seqs)
    return Engine(weights, packed, adapters, step, cache, problem)


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"
