"""Rules between a network and the way it is split over devices, for every role and for the rollout engine."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_rl.config.keys.generate import GenerateConfig
from mindspeed_rl.config.keys.megatron import MegatronConfig, join_layers
from mindspeed_rl.run.record import Run
from mindspeed_rl.run.rules.engine_limits import EngineRequest, engine_obstacles, read_engine_shape
from mindspeed_rl.run.rules.violation import Violation


def layout_violations(run: Run) -> Iterator[Violation]:
    """Yield every broken layout rule of every role that has its own settings."""
    cfg = run.config
    yield from _role(run, "actor_config", cfg.with_shape("actor_config"), run.placement.world_size)
    for role in ("ref", "reward", "critic", "teacher"):
        if (group := f"{role}_config") in cfg.set_keys:
            yield from _role(run, group, cfg.with_shape(group), run.placement.dedicated.get(role))
    if not cfg.is_supervised:
        yield from _rollout(run)


def _key(run: Run, group: str, name: str) -> str:
    """Return the dotted name under which a key of a role is set: in its group, or in the shared one."""
    cfg = run.config
    return f"{group if name in cfg.set_keys.get(group, ()) else 'megatron_training'}.{name}"


def _role(run: Run, group: str, role: MegatronConfig, world: int | None) -> Iterator[Violation]:
    tp, pp, cp, ep = (
        role.tensor_model_parallel_size,
        role.pipeline_model_parallel_size,
        role.context_parallel_size,
        role.expert_model_parallel_size,
    )
    sizes = {
        name: getattr(role, name)
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
        )
    }
    for name, value in sizes.items():
        if value < 1:
            key = _key(run, group, name)
            yield Violation("positive", {key: value}, f"{key} ({value}) must be at least 1", ({key: 1},))
    if min(sizes.values()) < 1:
        return

    def divides(
        rule: str, dimension: str, value: int | None, size: int, factors: tuple[str, ...], why: str
    ) -> Iterator[Violation]:
        if value is None or value % size == 0:
            return
        keys: dict[str, object] = {_key(run, group, factor): getattr(role, factor) for factor in factors}
        divisor = " x ".join(f"{factor}" for factor in keys)
        numbers = " x ".join(str(number) for number in keys.values())
        yield Violation(
            f"{group}.{rule}",
            {dimension: value, **keys},
            f"{dimension} ({value}) must be divisible by {divisor} ({numbers}): {why}",
        )

    tensor = ("tensor_model_parallel_size",)
    heads, kv_heads = role.num_attention_heads, role.num_query_groups if role.group_query_attention else None
    yield from divides("heads", "num_attention_heads", heads, tp, tensor, "each tensor parallel rank holds whole heads")
    # latent attention makes a key and a value for every query head
    if not role.multi_latent_attention:
        yield from divides("kv_heads", "num_query_groups", kv_heads, tp, tensor, "each rank holds whole key/value heads")
    yield from divides("ffn", "ffn_hidden_size", role.ffn_hidden_size, tp, tensor, "the MLP is split evenly")
    yield from divides("vocabulary", "padded_vocab_size", role.padded_vocab_size, tp, tensor, "the vocabulary is split evenly")
    if cp > 1 and role.context_parallel_algo == "ulysses_cp_algo":
        yield from divides(
            "ulysses_heads",
            "num_attention_heads",
            heads,
            tp * cp,
            ("tensor_model_parallel_size", "context_parallel_size"),
            "Ulysses exchanges whole heads",
        )
    yield from _layers(run, group, role)
    yield from _recomputed(run, group, role)
    if role.num_experts is not None:
        ranks, inner = role.expert_sizes
        factors = ("expert_model_parallel_size", *(tensor if role.moe_tp_extend_ep else ()))
        yield from divides("experts", "num_experts", role.num_experts, ranks, factors, "each rank holds whole experts")
        if tp > 1 and not role.sequence_parallel:
            keys = {_key(run, group, "tensor_model_parallel_size"): tp, "megatron_training.sequence_parallel": False}
            yield Violation(
                f"{group}.expert_sequences",
                keys,
                # Megatron's expert layer raises without it, in the first training step
                f"a mixture of experts with tensor_model_parallel_size {tp} needs "
                "megatron_training.sequence_parallel (false) to be true",
                ({"megatron_training.sequence_parallel": True},),
            )
        if role.moe_tp_extend_ep and role.expert_tensor_parallel_size not in (None, 1):
            key, split = _key(run, group, "expert_tensor_parallel_size"), role.expert_tensor_parallel_size
            yield Violation(
                f"{group}.whole_experts",
                {key: split, _key(run, group, "moe_tp_extend_ep"): True},
                f"{key} ({split}) must be 1 or unset while moe_tp_extend_ep keeps experts whole",
                ({key: 1},),
            )
        if world is not None and world % (ranks * inner * pp):
            yield Violation(
                f"{group}.expert_devices",
                {_key(run, group, factor): getattr(role, factor) for factor in factors} | {"devices": world},
                f"{world} devices must be divisible by expert ranks x expert tensor parallel size x "
                f"pipeline_model_parallel_size ({ranks} x {inner} x {pp})",
            )
    elif ep > 1 and (role.num_layers is not None or heads is not None):  # else config.json has it, which is not here
        key = _key(run, group, "expert_model_parallel_size")
        yield Violation(
            f"{group}.experts", {key: ep, "num_experts": None}, f"{key} ({ep}) needs a model with num_experts", ({key: 1},)
        )


def _recomputed(run: Run, group: str, role: MegatronConfig) -> Iterator[Violation]:
    """Check that the model has the modules of recompute_modules, in a form that can be recomputed."""
    if role.recompute_granularity != "selective" or role.num_layers is None:  # without the latter config.json has it
        return
    modules = role.recompute_modules or []
    has = {
        "mla_up_proj": (role.multi_latent_attention, "multi_latent_attention"),
        "moe": (role.num_experts is not None, "num_experts"),
        "moe_act": (role.num_experts is not None and role.moe_grouped_gemm, "num_experts and moe_grouped_gemm"),
        "shared_experts": (bool(role.n_shared_experts), "n_shared_experts"),
    }
    for module in modules:
        there, needs = has.get(module, (True, ""))
        if not there:
            key = _key(run, group, "recompute_modules")
            left = [other for other in modules if other != module] or None
            yield Violation(
                f"{group}.recompute_modules",
                {key: modules},
                f"{key} ({', '.join(modules)}): {module} needs a model with {needs}",
                ({key: left},),
            )


def _parse_layers(layers: str | int | list[int] | None) -> list[int] | None:
    """Return the numbers of a comma-separated list, or None when the text is not such a list."""
    text = join_layers(layers)
    try:
        return [int(item) for item in text.split(",")] if text else []
    except ValueError:
        return None


def _layers(run: Run, group: str, role: MegatronConfig) -> Iterator[Violation]:
    pp, layers, chunk = role.pipeline_model_parallel_size, role.num_layers, role.num_layers_per_virtual_pipeline_stage
    pp_key, list_key = _key(run, group, "pipeline_model_parallel_size"), _key(run, group, "num_layer_list")
    for name in ("num_layer_list", "noop_layers"):
        if _parse_layers(getattr(role, name)) is None:
            key = _key(run, group, name)
            yield Violation(
                f"{group}.{name}",
                {key: getattr(role, name)},
                f"{key} ({getattr(role, name)}) must be whole numbers with commas",
            )
    per_stage, noop = _parse_layers(role.num_layer_list), _parse_layers(role.noop_layers)
    if noop and layers is not None and not all(0 <= layer < layers for layer in noop):
        key = _key(run, group, "noop_layers")
        yield Violation(
            f"{group}.noop_range",
            {key: role.noop_layers, "num_layers": layers},
            f"{key} ({role.noop_layers}) must lie in 0..{layers - 1}",
        )
    # the list replaces the even split, whose rules follow
    if per_stage:
        if len(per_stage) != pp:
            yield Violation(
                f"{group}.layer_list_stages",
                {list_key: role.num_layer_list, pp_key: pp},
                f"{list_key} ({role.num_layer_list}) has {len(per_stage)} entries, but must have one for each of "
                f"the {pp} pipeline stages "
                f"({pp_key})",
            )
        if layers is not None and sum(per_stage) != layers:
            yield Violation(
                f"{group}.layer_list_sum",
                {list_key: role.num_layer_list, "num_layers": layers},
                f"{list_key} ({role.num_layer_list}) sums to {sum(per_stage)}, but must sum to num_layers ({layers})",
            )
        for name in ("num_layers_per_virtual_pipeline_stage", "noop_layers"):
            if getattr(role, name):
                key = _key(run, group, name)
                yield Violation(
                    f"{group}.layer_list_alone",
                    {list_key: role.num_layer_list, key: getattr(role, name)},
                    f"{list_key} ({role.num_layer_list}) and {key} ({getattr(role, name)}) exclude each other",
                    ({key: None}, {list_key: None}),
                )
        return
    if layers is None:
        return
    if layers % pp:
        yield Violation(
            f"{group}.layers",
            {"num_layers": layers, pp_key: pp},
            f"num_layers ({layers}) must be divisible by {pp_key} ({pp}), or num_layer_list must say the layers of each stage",
        )
    elif chunk is not None and (chunk < 1 or layers // pp % chunk or pp < 2):
        key = _key(run, group, "num_layers_per_virtual_pipeline_stage")
        rule = "needs at least two pipeline stages" if pp < 2 else f"must divide the {layers // pp} layers of a pipeline stage"
        # not all layers of a stage: one chunk is not interleaving
        options = [value for value in range(1, layers // pp) if layers // pp % value == 0] if pp > 1 else []
        suggested = min(options, key=lambda value: abs(value - chunk), default=None)
        yield Violation(f"{group}.chunks", {key: chunk, pp_key: pp}, f"{key} ({chunk}) {rule}", ({key: suggested},))


def _rollout(run: Run) -> Iterator[Violation]:
    cfg = run.config
    generate = cfg.generate_config
    if generate is None or cfg.rl_config is None:
        return
    length_key = "generate_config.max_model_len"
    tp_key, tp = "generate_config.infer_tensor_parallel_size", generate.infer_tensor_parallel_size
    if generate.infer_pipeline_parallel_size != 1:
        key = "generate_config.infer_pipeline_parallel_size"
        value = generate.infer_pipeline_parallel_size
        yield Violation("rollout.pipeline", {key: value}, f"{key} ({value}) must be 1", ({key: 1},))
    if tp < 1:
        yield Violation("rollout.positive", {tp_key: tp}, f"{tp_key} ({tp}) must be at least 1", ({tp_key: 1},))
        return
    shape = read_engine_shape(cfg)
    concerned = {
        "heads": {"num_attention_heads": shape.num_heads, tp_key: tp},
        "kv_heads": {"num_query_groups": shape.num_kv_heads, tp_key: tp},
        "ffn": {"ffn_hidden_size": shape.ffn_hidden_size, tp_key: tp},
        "head_size": {"kv_channels": shape.head_size, "platform": cfg.platform},
        "latent_size": {"kv_lora_rank": shape.latent_size, "platform": cfg.platform},
        "linear_heads": {"linear_num_key_heads": shape.linear_heads, tp_key: tp},
        "linear_size": {"linear_key_head_dim": shape.linear_size, "platform": cfg.platform},
        "linear_dtype": {"generate_config.dtype": generate.dtype, "platform": cfg.platform},
        "length": {length_key: generate.max_model_len},
    }
    derived = cfg.derived.get(length_key)
    origin = "" if derived is None else derived.source
    length = generate.max_model_len
    request = EngineRequest(tp, length, tp_key, length_key, origin, generate.dtype, "generate_config.dtype")
    for obstacle in engine_obstacles(shape, request, cfg.platform):
        suggestions: tuple[dict[str, int | str], ...] = ()
        if obstacle.rule == "linear_dtype":
            suggestions = ({"generate_config.dtype": "bfloat16"},)
        needed = max(cfg.rl_config.max_prompt_length + cfg.response_limit, cfg.actor_config.seq_length or 0)
        if obstacle.rule == "length" and shape.max_length is not None and needed <= shape.max_length:
            suggestions = ({length_key: shape.max_length},)
        yield Violation(f"rollout.{obstacle.rule}", concerned[obstacle.rule], obstacle.message, suggestions)
    world = run.placement.dedicated.get("rollout") or run.placement.world_size
    if generate.enable_expert_parallel:
        yield from _rollout_experts(run, generate, world)


def _rollout_experts(run: Run, generate: GenerateConfig, world: int | None) -> Iterator[Violation]:
    """Check an engine whose experts are spread over its replicas."""
    cfg = run.config
    key, tp_key = "generate_config.infer_expert_parallel_size", "generate_config.infer_tensor_parallel_size"
    ep, tp = generate.infer_expert_parallel_size, generate.infer_tensor_parallel_size
    if ep < 1 or (world is not None and world % (ep * tp)):
        options = [value for value in range(1, (world or tp) // tp + 1) if world is None or world % (value * tp) == 0]
        suggested = min(options, key=lambda value: abs(value - ep), default=1)
        rule = "must be at least 1" if world is None else f"must divide the {world} devices"
        yield Violation("rollout.experts", {key: ep, tp_key: tp}, f"{key} x {tp_key} ({ep} x {tp}) {rule}", ({key: suggested},))
        return
    actor, metadata = cfg.actor_config, cfg.model_metadata.get("actor_config")
    experts, source = cfg.with_shape("actor_config").num_experts, "num_experts"
    if actor.num_layers is None:  # the shape follows from config.json
        if metadata is None:
            return
        source = f"the experts of {metadata.folder}"
    if experts is None:
        switch = "generate_config.enable_expert_parallel"
        yield Violation(
            "rollout.no_experts",
            {switch: True, "num_experts": None},
            f"{switch} (true) needs a model with experts: the rollout engine refuses others",
            ({switch: False},),
        )
        return
    if experts % (ep * tp):
        options = [
            value
            for value in range(1, experts // tp + 1)
            if experts % (value * tp) == 0 and (world is None or world % (value * tp) == 0)
        ]
        suggested = min(options, key=lambda value: abs(value - ep), default=None)
        yield Violation(
            "rollout.whole_experts",
            {"num_experts": experts, key: ep, tp_key: tp},
            f"{source} ({experts}) must be divisible by {key} x {tp_key} ({ep} x {tp}): each of the {ep * tp} devices that "
            "share a layer's experts holds as many whole ones",
            () if suggested is None else ({key: suggested},),
        )
