"""Rules between a network and the way it is split over devices, for every role and for the rollout engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from mindspeed_rl.config.keys.megatron import MegatronConfig, join_layers
from mindspeed_rl.config.model_metadata import EngineShape
from mindspeed_rl.run.record import Run
from mindspeed_rl.run.rules.engine_limits import EngineRequest, engine_obstacles, read_engine_shape
from mindspeed_rl.run.rules.violation import Broken, Violation, needs, read_key, violate

_TENSOR, _EXPERT = "tensor_model_parallel_size", "expert_model_parallel_size"
_PIPELINE, _CONTEXT = "pipeline_model_parallel_size", "context_parallel_size"
#: sizes of a model, which sentences name without a group
_SHAPE = frozenset(
    "num_attention_heads num_query_groups ffn_hidden_size padded_vocab_size num_experts num_layers devices".split()
)


def layout_violations(run: Run) -> Iterator[Violation]:
    """Yield every broken layout rule of every role that has its own settings."""
    cfg = run.config
    yield from _role(run, "actor_config", run.placement.world_size)
    for role in ("ref", "reward", "critic", "teacher"):
        if (group := f"{role}_config") in cfg.set_keys:
            yield from _role(run, group, run.placement.dedicated.get(role))
    for item in _rollout(run):
        yield item.fill(partial(read_key, run))


def _role(run: Run, group: str, world: int | None) -> Iterator[Violation]:
    """Yield the broken rules of a role; sentences have the names of its keys without a group."""
    cfg, role = run.config, run.config.with_shape(group)

    def rename(name: str) -> str:
        """Return the dotted name under which a key of the role is set: in its group, or in the shared one."""
        if name in _SHAPE or "." in name:
            return name
        return f"{group if name in cfg.set_keys.get(group, ()) else 'megatron_training'}.{name}"

    for item in _check_role(role, world):
        rule = item.rule if item.rule == "positive" else f"{group}.{item.rule}"
        yield replace(item, rule=rule).fill(partial(getattr, role), rename)


def _check_role(role: MegatronConfig, world: int | None) -> Iterator[Broken]:
    small = [name for name in (_TENSOR, _PIPELINE, _CONTEXT, _EXPERT) if getattr(role, name) < 1]
    for name in small:
        yield violate("positive", f"[{name}] must be at least 1", {name: 1})
    if small:
        return
    ulysses = role.context_parallel_size > 1 and role.context_parallel_algo == "ulysses_cp_algo"
    # latent attention makes a key and a value for every query head
    grouped = role.group_query_attention and not role.multi_latent_attention
    for is_split, rule, dimension, factors, reason in (
        (True, "heads", "num_attention_heads", (_TENSOR,), "each tensor parallel rank holds whole heads"),
        (grouped, "kv_heads", "num_query_groups", (_TENSOR,), "each rank holds whole key/value heads"),
        (True, "ffn", "ffn_hidden_size", (_TENSOR,), "the MLP is split evenly"),
        (True, "vocabulary", "padded_vocab_size", (_TENSOR,), "the vocabulary is split evenly"),
        (ulysses, "ulysses_heads", "num_attention_heads", (_TENSOR, _CONTEXT), "Ulysses exchanges whole heads"),
    ):
        if is_split:
            yield from _divide(role, rule, dimension, factors, reason)
    yield from _layers(role)
    yield from _recomputed(role)
    smallest, context = role.min_dynamic_context_parallel_size, role.context_parallel_size
    if role.has_dynamic_context and (smallest < 1 or context % smallest):
        divisors = [size for size in range(1, context + 1) if context % size == 0]
        yield violate(
            "context_slices",
            f"[min_dynamic_context_parallel_size] must divide [{_CONTEXT}]: equal slices of its devices share a turn",
            {"min_dynamic_context_parallel_size": min(divisors, key=lambda size: abs(size - smallest))},
        )
    if role.num_experts is not None:
        yield from _experts(role, world)
    # else config.json has it, which is not here
    elif role.expert_model_parallel_size > 1 and (role.num_layers is not None or role.num_attention_heads is not None):
        yield violate("experts", f"[{_EXPERT}] needs a model with num_experts", {_EXPERT: 1}, keys={"num_experts": None})


def _divide(role: MegatronConfig, rule: str, dimension: str, factors: Iterable[str], reason: str) -> Iterator[Broken]:
    """Check that a size of the model is a multiple of the product of some parallel sizes."""
    value, divisor = getattr(role, dimension), math.prod(getattr(role, factor) for factor in factors)
    if value is not None and value % divisor:
        names, numbers = (" x ".join(f"[{factor}:{form}]" for factor in factors) for form in ("name", "value"))
        yield violate(rule, f"[{dimension}] must be divisible by {names} ({numbers}): {reason}")


def _experts(role: MegatronConfig, world: int | None) -> Iterator[Broken]:
    """Check that experts are whole, and that the devices take all of them."""
    ranks, inner = role.expert_sizes
    pp, whole = role.pipeline_model_parallel_size, role.moe_tp_extend_ep
    factors = (_EXPERT, *((_TENSOR,) if whole else ()))
    yield from _divide(role, "experts", "num_experts", factors, "each rank holds whole experts")
    if role.tensor_model_parallel_size > 1 and not role.sequence_parallel:
        # Megatron's expert layer raises without it, in the first training step
        yield violate(
            "expert_sequences",
            f"a mixture of experts with {_TENSOR} [{_TENSOR}:value] needs [megatron_training.sequence_parallel] to be true",
            {"megatron_training.sequence_parallel": True},
            keys={"megatron_training.sequence_parallel": False},
        )
    if whole and role.expert_tensor_parallel_size not in (None, 1):
        text = "[expert_tensor_parallel_size] must be 1 or unset while moe_tp_extend_ep keeps experts whole"
        yield violate("whole_experts", text, {"expert_tensor_parallel_size": 1}, keys={"moe_tp_extend_ep": True})
    if world is not None and world % (ranks * inner * pp):
        yield violate(
            "expert_devices",
            f"{world} devices must be divisible by expert ranks x expert tensor parallel size x "
            f"pipeline_model_parallel_size ({ranks} x {inner} x {pp})",
            keys={**{factor: getattr(role, factor) for factor in factors}, "devices": world},
        )


def _recomputed(role: MegatronConfig) -> Iterator[Broken]:
    """Check that the model has the modules of recompute_modules, in a form that can be recomputed."""
    yield from _recomputed_experts(role)
    if role.recompute_granularity != "selective" or role.num_layers is None:  # without the latter config.json has it
        return
    modules, has_experts = role.recompute_modules or [], role.num_experts is not None
    needed = {
        "mla_up_proj": (role.multi_latent_attention, "multi_latent_attention"),
        "moe": (has_experts, "num_experts"),
        "moe_act": (has_experts and role.moe_grouped_gemm, "num_experts and moe_grouped_gemm"),
        "shared_experts": (bool(role.n_shared_experts), "n_shared_experts"),
    }
    for module in modules:
        is_there, needs_key = needed.get(module, (True, ""))
        if not is_there:
            yield violate(
                "recompute_modules",
                f"[recompute_modules:name] ({', '.join(modules)}): {module} needs a model with {needs_key}",
                {"recompute_modules": [other for other in modules if other != module] or None},
            )


def _recomputed_experts(role: MegatronConfig) -> Iterator[Broken]:
    """Check that activations of grouped experts, which are computed again, have no adapters."""
    if not (role.moe_grouped_gemm and {"linear_fc1", "linear_fc2"} & {*(role.lora_target_modules or ())}):
        return
    if role.recompute_granularity == "selective" and "moe_act" in (role.recompute_modules or []):
        changes: dict[str, object] = {"recompute_modules": None}
    elif role.recompute_activation_function:
        changes = {"recompute_activation_function": False}
    else:
        return
    (name,) = changes
    text = f"[{name}] excludes [lora_target_modules] with [moe_grouped_gemm]: adapters of grouped experts read the activation"
    yield violate("recomputed_experts", text, changes, {"moe_grouped_gemm": False})


def _parse_layers(layers: str | int | list[int] | None) -> list[int] | None:
    """Return the numbers of a comma-separated list, or None when the text is not such a list."""
    text = join_layers(layers)
    try:
        return [int(item) for item in text.split(",")] if text else []
    except ValueError:
        return None


def _layers(role: MegatronConfig) -> Iterator[Broken]:
    """Check the layers of each pipeline stage."""
    layers = role.num_layers
    per_stage, noop = _parse_layers(role.num_layer_list), _parse_layers(role.noop_layers)
    for name, numbers in {"num_layer_list": per_stage, "noop_layers": noop}.items():
        if numbers is None:
            yield violate(name, f"[{name}] must be whole numbers with commas")
    if noop and layers is not None and not all(0 <= layer < layers for layer in noop):
        yield violate("noop_range", f"[noop_layers] must lie in 0..{layers - 1}", keys={"num_layers": layers})
    # the list replaces the even split
    if per_stage:
        yield from _listed_layers(role, per_stage)
    elif layers is not None:
        yield from _even_layers(role, layers)


def _listed_layers(role: MegatronConfig, per_stage: list[int]) -> Iterator[Broken]:
    pp, layers = role.pipeline_model_parallel_size, role.num_layers
    if len(per_stage) != pp:
        yield violate(
            "layer_list_stages",
            f"[num_layer_list] has {len(per_stage)} entries, but must have one for each of the {pp} pipeline stages "
            f"([{_PIPELINE}:name])",
        )
    if layers is not None and sum(per_stage) != layers:
        text = f"[num_layer_list] sums to {sum(per_stage)}, but must sum to [num_layers]"
        yield violate("layer_list_sum", text)
    for name in ("num_layers_per_virtual_pipeline_stage", "noop_layers"):
        if getattr(role, name):
            text = f"[num_layer_list] and [{name}] exclude each other"
            yield violate("layer_list_alone", text, {name: None, "num_layer_list": None})


def _even_layers(role: MegatronConfig, layers: int) -> Iterator[Broken]:
    pp, chunk = role.pipeline_model_parallel_size, role.num_layers_per_virtual_pipeline_stage
    if layers % pp:
        yield violate(
            "layers", f"[num_layers] must be divisible by [{_PIPELINE}], or num_layer_list must say the layers of each stage"
        )
    elif chunk is not None and (chunk < 1 or layers // pp % chunk or pp < 2):
        key, each = "num_layers_per_virtual_pipeline_stage", layers // pp
        rule = "needs at least two pipeline stages" if pp < 2 else f"must divide the {each} layers of a pipeline stage"
        # not all layers of a stage: one chunk is not interleaving
        options = [value for value in range(1, each) if each % value == 0] if pp > 1 else []
        suggested = min(options, key=lambda value: abs(value - chunk), default=None)
        yield violate("chunks", f"[{key}] {rule}", {key: suggested}, keys={_PIPELINE: pp})


_LENGTH, _INFER_TENSOR = "generate_config.max_model_len", "generate_config.infer_tensor_parallel_size"
_DTYPE, _INFER_EXPERT = "generate_config.dtype", "generate_config.infer_expert_parallel_size"
_PREFIXES, _DRAFTS = "generate_config.enable_prefix_caching", "generate_config.speculative_config"


@needs("rl_config", "generate_config")
def _rollout(run: Run) -> Iterator[Broken]:
    """Check the layout of the rollout engine."""
    generate, pipeline = run.generate, "generate_config.infer_pipeline_parallel_size"
    if generate.infer_pipeline_parallel_size != 1:
        yield violate(
            "rollout.pipeline",
            f"[{pipeline}] must be 1: the rollout engine has no pipeline; a model that one device does not hold takes more "
            "infer_tensor_parallel_size or, with experts, infer_expert_parallel_size",
            {pipeline: 1},
        )
    if generate.infer_tensor_parallel_size < 1:
        yield violate("rollout.positive", f"[{_INFER_TENSOR}] must be at least 1", {_INFER_TENSOR: 1})
        return
    yield from _engine_limits(run)
    if generate.enable_expert_parallel:
        world = run.placement.dedicated.get("rollout") or run.placement.world_size
        yield from _spread_experts(run, world)


def _engine_limits(run: Run) -> Iterator[Broken]:
    """Check the model against the limits of the rollout engine."""
    cfg, rl, generate, shape = run.config, run.rl, run.generate, read_engine_shape(run.config)
    tensor = {_INFER_TENSOR: generate.infer_tensor_parallel_size}
    kernels = {"platform": cfg.platform}
    concerned = {
        "heads": {"num_attention_heads": shape.num_heads, **tensor},
        "kv_heads": {"num_query_groups": shape.num_kv_heads, **tensor},
        "ffn": {"ffn_hidden_size": shape.ffn_hidden_size, **tensor},
        "head_size": {"kv_channels": shape.head_size, **kernels},
        "latent_size": {"kv_lora_rank": shape.latent_size, **kernels},
        "linear_heads": {"linear_num_key_heads": shape.linear_heads, **tensor},
        "linear_size": {"linear_key_head_dim": shape.linear_size, **kernels},
        "linear_dtype": {_DTYPE: generate.dtype, **kernels},
        "linear_prefixes": {_PREFIXES: generate.enable_prefix_caching, **kernels},
        "linear_drafts": {_DRAFTS: "...", **kernels},
        "linear_state": {**tensor, **kernels},
        "length": {_LENGTH: generate.max_model_len},
    }
    needed = max(rl.max_prompt_length + cfg.response_limit, cfg.actor_config.seq_length or 0)
    fits = shape.max_length is not None and needed <= shape.max_length
    suggestions = {
        "linear_dtype": {_DTYPE: "bfloat16"},
        "linear_prefixes": {_PREFIXES: False},
        "linear_drafts": {_DRAFTS: None},
        "length": {_LENGTH: shape.max_length} if fits else {},
    }
    derived = cfg.derived.get(_LENGTH)
    if generate.engine == "transformers":  # it has no kernels of its own, and a full model on each device
        shape = EngineShape(source=shape.source, max_length=shape.max_length)
    request = EngineRequest(
        generate.infer_tensor_parallel_size,
        generate.max_model_len,
        _INFER_TENSOR,
        _LENGTH,
        "" if derived is None else derived.source,
        generate.dtype,
        _DTYPE,
        _PREFIXES if generate.enable_prefix_caching else "",
        generate.draft_method,
        _DRAFTS,
    )
    for obstacle in engine_obstacles(shape, request, cfg.platform):
        rule = obstacle.rule
        yield violate(f"rollout.{rule}", obstacle.message, suggestions.get(rule), keys=concerned[rule])


def _spread_experts(run: Run, world: int | None) -> Iterator[Broken]:
    """Check an engine whose experts are spread over its replicas."""
    cfg, ep, tp = run.config, run.generate.infer_expert_parallel_size, run.generate.infer_tensor_parallel_size
    both = f"[{_INFER_EXPERT}:name] x [{_INFER_TENSOR}:name] ({ep} x {tp})"

    def suggest(limit: int, *totals: int | None) -> dict[str, object]:
        """Return the size nearest to the present one with which the devices divide these totals."""
        known = [total for total in totals if total is not None]
        options = [value for value in range(1, limit // tp + 1) if not any(total % (value * tp) for total in known)]
        return {_INFER_EXPERT: min(options, key=lambda value: abs(value - ep))} if options else {}

    if ep < 1 or (world is not None and world % (ep * tp)):
        rule = "must be at least 1" if world is None else f"must divide the {world} devices"
        yield violate("rollout.experts", f"{both} {rule}", suggest(world or tp, world) or {_INFER_EXPERT: 1})
        return
    actor, metadata = cfg.actor_config, cfg.model_metadata.get("actor_config")
    experts, source = cfg.with_shape("actor_config").num_experts, "num_experts"
    if actor.num_layers is None:  # the shape follows from config.json
        if metadata is None:
            return
        source = f"the experts of {metadata.folder}"
    if experts is None:
        switch = "generate_config.enable_expert_parallel"
        text = f"[{switch}] needs a model with experts: the rollout engine refuses others"
        yield violate("rollout.no_experts", text, {switch: False}, keys={"num_experts": None})
    elif experts % (ep * tp):
        yield violate(
            "rollout.whole_experts",
            f"{source} ({experts}) must be divisible by {both}: each of the {ep * tp} devices that share a layer's "
            "experts holds as many whole ones",
            suggest(experts, experts, world),
            keys={"num_experts": experts},
        )
