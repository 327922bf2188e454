"""Rules of rollouts: samples of several turns, and the experts of tokens for router replay and counts."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from mindspeed_rl import registry
from mindspeed_rl.config.keys.rl import AGENT_LOOP_KEYS
from mindspeed_rl.run.record import Run
from mindspeed_rl.run.rules.engine_limits import MIN_TEMPERATURE
from mindspeed_rl.run.rules.violation import Violation

_MODE = "rl_config.router_replay.mode"
_COUNTS = "generate_config.eplb_token_collects"
_TEMPERATURE = "generate_config.sampling_config.temperature"
#: settings of vllm-ascend that this suite makes: without them weights could not be updated, or a key of its own decides
_OWN_SETTINGS = ("refresh", "weight_nz_mode", "enable_sleep_mode_extra_cleanup", "eplb_config", "rl_config")
_BY_KEY = "use the key generate_config.{}"
_BY_ROLLOUT = "weights, samples and log-probabilities of a rollout depend on it"
#: arguments of vLLM's engine that keys of this suite decide, or that its rollouts rely on -> what to do
_OWN_ARGUMENTS: dict[str, str] = {
    **dict.fromkeys(
        "model model_weights load_format weights_path skip_tokenizer_init seed logprobs_mode "
        "generation_config override_generation_config hf_overrides hf_config_path enable_chunked_prefill enable_sleep_mode "
        "distributed_executor_backend worker_cls worker_extension_cls disable_log_stats "
        "enable_return_routed_experts runner task convert logits_processors async_scheduling max_logprobs".split(),
        _BY_ROLLOUT,
    ),
    **dict.fromkeys(
        "data_parallel_size data_parallel_rank data_parallel_size_local data_parallel_start_rank data_parallel_address "
        "data_parallel_rpc_port data_parallel_backend data_parallel_hybrid_lb data_parallel_external_lb nnodes node_rank "
        "master_addr master_port".split(),
        "replicas follow from rl_config.actor_resource or rollout_resource and infer_tensor_parallel_size",
    ),
    **dict.fromkeys(("enable_lora", "max_lora_rank", "max_loras"), _BY_KEY.format("lora_push")),
    "tensor_parallel_size": _BY_KEY.format("infer_tensor_parallel_size"),
    "pipeline_parallel_size": _BY_KEY.format("infer_pipeline_parallel_size"),
    "kv_cache_memory_bytes": _BY_KEY.format("kv_cache_memory_gib"),
    **{
        name: _BY_KEY.format(name)
        for name in "dtype enforce_eager trust_remote_code max_model_len max_num_seqs max_num_batched_tokens additional_config "
        "enable_prefix_caching gpu_memory_utilization compilation_config enable_expert_parallel speculative_config "
        "quantization kv_cache_dtype".split()
    },
}
#: methods of speculative decoding -> True where drafts come from a model
_DRAFT_METHODS = {"ngram": False, "suffix": False, "draft_model": True, "eagle": True, "eagle3": True, "mtp": True}
#: longest draft that vLLM's sampler takes
_MAX_DRAFT = 128
#: keys of vLLM's `speculative_config` that it fills in itself, or that change what is sampled
_OWN_DRAFT_KEYS = frozenset(
    "target_model_config target_parallel_config draft_model_config draft_parallel_config draft_load_config "
    "tensor_parallel_size rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length".split()
)
#: names of one form of a response
_FORMS = frozenset(("regex", "json", "choice", "grammar"))
#: switch of verl or slime -> modes in which it is on
_SWITCHES = {
    "use_routing_replay": ("R2", "R3"),  # slime's R3 is R2 as well
    "use_rollout_routing_replay": ("R3",),
    "enable_rollout_routing_replay": ("R3",),
}


def _replay(run: Run) -> Iterator[Violation]:
    """Check `rl_config.router_replay`."""
    cfg = run.config
    rl = cfg.rl_config
    if rl is None or cfg.is_supervised:
        return
    mode = rl.router_replay.mode
    for name, modes in _SWITCHES.items():
        configured = getattr(rl, name)
        if configured is not None and configured != (mode in modes):
            key = f"rl_config.{name}"
            yield Violation(
                "replay_spelling",
                {key: configured, _MODE: mode},
                f"{key} ({str(configured).lower()}) says the same as {_MODE} ({mode}), and the two differ",
                ({key: None},),
            )
    if mode == "disabled":
        return
    off = {_MODE: "disabled"} | {f"rl_config.{name}": None for name in _SWITCHES if getattr(rl, name)}
    for reason in _reasons(run, _obstacles):
        yield Violation("router_replay", {_MODE: mode}, f"{_MODE} ({mode}) cannot be used here: {reason}", (off,))


def _expert_counts(run: Run) -> Iterator[Violation]:
    """Check `generate_config.eplb_token_collects`."""
    cfg = run.config
    if cfg.is_supervised or cfg.generate_config is None or not cfg.generate_config.eplb_token_collects:
        return
    for reason in _reasons(run, _obstacles_of_engine):
        yield Violation(
            "expert_counts", {_COUNTS: True}, f"{_COUNTS} (true) cannot be used here: {reason}", ({_COUNTS: False},)
        )


def _reasons(run: Run, obstacles: Callable[[Run], Iterator[str]]) -> Iterator[str]:
    if _is_dense(run):
        yield "the model has no experts"
    else:
        yield from obstacles(run)


def _is_dense(run: Run) -> bool:
    """Return True once it is known that the actor has no experts."""
    cfg = run.config
    actor = cfg.with_shape("actor_config")
    return not actor.num_experts and (actor.num_layers is not None or actor.num_attention_heads is not None)


def _obstacles(run: Run) -> Iterator[str]:
    cfg = run.config
    if cfg.actor_config.moe_router_load_balancing_type == "sinkhorn":
        yield "moe_router_load_balancing_type sinkhorn has a router that takes no experts from others"
    assert cfg.rl_config is not None
    if cfg.rl_config.router_replay.mode == "R3":
        yield from (f"{reason}; R2 works there" for reason in _obstacles_of_engine(run))
    else:
        yield from _obstacles_of_recording(run)


def _obstacles_of_recording(run: Run) -> Iterator[str]:
    sizes, objective = run.sizes, run.objective
    if sizes is None or not sizes.can_divide or objective is None:
        return
    if not objective.needs_old_log_probs(on_policy=sizes.on_policy):
        yield (
            "it records in the pass of the old log-probabilities, and this run makes none, because each rollout is followed by "
            "one optimizer step; R3 needs no such pass"
        )


def _obstacles_of_engine(run: Run) -> Iterator[str]:
    cfg = run.config
    rl, generate = cfg.rl_config, cfg.generate_config
    assert rl is not None
    if run.placement.disaggregated:
        yield "rollout servers do not hand out the experts of their tokens"
    if rl.partial_rollout_max_split > 1:
        yield (
            f"partial_rollout_max_split ({rl.partial_rollout_max_split}) keeps responses over iterations, and not the experts "
            "of their tokens"
        )
    if generate is not None and generate.expert_map_path is not None:
        yield "with generate_config.expert_map_path vllm-ascend before 0.26 reports where an expert lies, not which one it is"


def _turns(run: Run) -> Iterator[Violation]:
    """Check runs whose samples have several turns."""
    cfg = run.config
    rl, generate = cfg.rl_config, cfg.generate_config
    if rl is None or generate is None or cfg.is_supervised or not rl.multi_turn_enable:
        return
    one, total = generate.sampling_config.max_tokens, rl.max_total_response_length
    if 0 < total < one:
        yield Violation(
            "tool_response_length",
            {"rl_config.max_total_response_length": total, "generate_config.sampling_config.max_tokens": one},
            f"rl_config.max_total_response_length ({total}) must be at least "
            f"generate_config.sampling_config.max_tokens ({one})",
            ({"rl_config.max_total_response_length": one},),
        )
    loop = rl.agent_loop_name
    if loop == "single_turn":
        return
    if rl.partial_rollout_max_split > 1:
        yield Violation(
            "partial_rollout_turns",
            {"rl_config.partial_rollout_max_split": rl.partial_rollout_max_split, "rl_config.multi_turn_enable": True},
            f"rl_config.partial_rollout_max_split ({rl.partial_rollout_max_split}) lets a response take several iterations, "
            "and tools and environments of a sample of several turns cannot be put aside so long",
            ({"rl_config.partial_rollout_max_split": 1}, {"rl_config.multi_turn_enable": False}),
        )
    if rl.use_dynamic_bsz and not rl.use_remove_padding:
        yield Violation(
            "turns_are_packed",
            {"rl_config.use_dynamic_bsz": True, "rl_config.use_remove_padding": False},
            "rl_config.use_dynamic_bsz counts the tokens of a sample of several turns as they are packed, so with "
            "rl_config.multi_turn_enable it needs rl_config.use_remove_padding",
            ({"rl_config.use_remove_padding": True}, {"rl_config.use_dynamic_bsz": False}),
        )
    needed = AGENT_LOOP_KEYS.get(loop)
    if needed is not None and getattr(rl, needed) is None:
        yield Violation(
            "agent_loop_needs",
            {"rl_config.agent_loop": loop, f"rl_config.{needed}": None},
            f"rl_config.agent_loop {loop} needs rl_config.{needed}",
        )
    agent = rl.agent
    if agent is not None and bool(agent.command) == bool(agent.url):
        given = {"rl_config.agent.command": agent.command, "rl_config.agent.url": agent.url}
        yield Violation("agent_program", given, "rl_config.agent needs either a command or a url, and not both")
    if rl.verifier_reads == "output" and loop != "program":
        keys = {"rl_config.verifier_reads": "output", "rl_config.agent_loop": loop}
        text = f"rl_config.verifier_reads output is that of a program, but the loop is {loop}: set rl_config.agent"
        yield Violation("verifier_reads_output", keys, text, ({"rl_config.verifier_reads": "response"},))


def _engine_settings(run: Run) -> Iterator[Violation]:
    """Check settings that go to the engine under its own names, and the number of tokens of a step."""
    cfg = run.config
    generate = cfg.generate_config
    if generate is None or cfg.is_supervised:
        return
    for name in _OWN_SETTINGS:
        if name in (generate.additional_config or {}):
            instead = "use generate_config.expert_map_path" if name == "eplb_config" else "remove it"
            key = f"generate_config.additional_config.{name}"
            yield Violation("own_engine_setting", {key: "..."}, f"{key} is set by this suite; {instead}")
    sizes, name = generate.cudagraph_capture_sizes, "cudagraph_capture_sizes"
    if sizes is not None and name in (generate.compilation_config or {}):
        keys = {f"generate_config.{name}": sizes, f"generate_config.compilation_config.{name}": "..."}
        yield Violation("capture_sizes_twice", keys, f"{' and '.join(keys)} are both set; keep one of them")
    tokens, sequences = generate.max_num_batched_tokens, generate.max_num_seqs
    if "max_num_batched_tokens" in cfg.set_keys.get("generate_config", ()) and tokens < sequences:
        yield Violation(
            "step_tokens",
            {"generate_config.max_num_batched_tokens": tokens, "generate_config.max_num_seqs": sequences},
            f"generate_config.max_num_batched_tokens ({tokens}) must be at least generate_config.max_num_seqs ({sequences}): a "
            "step of the engine has a token of each response",
            ({"generate_config.max_num_batched_tokens": sequences}, {"generate_config.max_num_seqs": tokens}),
        )


def _engine_arguments(run: Run) -> Iterator[Violation]:
    """Check `engine_kwargs`, and keys of sampling that need the whole text of a response."""
    cfg = run.config
    generate = cfg.generate_config
    if generate is None or cfg.is_supervised:
        return
    known = _list_vllm_fields("engine/arg_utils.py", "EngineArgs")
    for name in generate.engine_kwargs or {}:
        key = f"generate_config.engine_kwargs.{name}"
        if name in _OWN_ARGUMENTS:
            yield Violation("own_engine_setting", {key: "..."}, f"{key} is set by this suite: {_OWN_ARGUMENTS[name]}")
        elif known and name not in known:
            hint = registry.did_you_mean(name, known) or "."
            yield Violation("engine_argument", {key: "..."}, f"{key} is not an argument of the installed vLLM's engine{hint}")
    sampling, prefix = generate.sampling_config, "generate_config.sampling_config"
    if "" in sampling.stop:
        yield Violation("stop_text", {f"{prefix}.stop": sampling.stop}, f"{prefix}.stop has an empty text, which ends nothing")
    forms = set(sampling.structured_output or ())
    if sampling.structured_output is not None and (len(forms) != 1 or forms - _FORMS):
        yield Violation(
            "structured_output",
            {f"{prefix}.structured_output": sampling.structured_output},
            f"{prefix}.structured_output has {', '.join(sorted(forms)) or 'nothing'}, but needs exactly one of "
            f"{', '.join(sorted(_FORMS))}",
        )
    splits = 1 if cfg.rl_config is None else cfg.rl_config.partial_rollout_max_split
    for name in ("stop", "structured_output", "presence_penalty", "frequency_penalty"):
        if splits > 1 and getattr(sampling, name):
            yield Violation(
                "response_in_one",
                {f"{prefix}.{name}": getattr(sampling, name), "rl_config.partial_rollout_max_split": splits},
                f"{prefix}.{name} looks at the response from its start, and rl_config.partial_rollout_max_split ({splits}) "
                "continues it as a new request",
                ({"rl_config.partial_rollout_max_split": 1},),
            )


@cache
def _list_vllm_fields(file: str, name: str) -> frozenset[str]:
    """Return the fields of a class of vLLM, read from its source; empty where it is not installed."""
    spec = importlib.util.find_spec("vllm")
    source = Path(spec.origin).parent / file if spec is not None and spec.origin else None
    if source is None or not source.is_file():
        return frozenset()
    body = ast.parse(source.read_text()).body
    (found,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    targets = [item.target for item in found.body if isinstance(item, ast.AnnAssign)]
    return frozenset(target.id for target in targets if isinstance(target, ast.Name))


def _drafts(run: Run) -> Iterator[Violation]:
    """Check `speculative_config`, and what cannot be used with it."""
    cfg = run.config
    generate, group = cfg.generate_config, "generate_config.speculative_config"
    drafts = None if generate is None or cfg.is_supervised else generate.drafts
    if generate is None or drafts is None:
        return

    def wrong(key: str, problem: str, *suggestions: dict[str, object]) -> Violation:
        name = key.rpartition(".")[2]
        value = drafts.get(name) if key.startswith(group) else "..."
        return Violation("speculative_config", {key: value}, f"{key} {problem}", suggestions)

    method, tokens, model = drafts.get("method"), drafts.get("num_speculative_tokens"), drafts.get("model")
    if method not in _DRAFT_METHODS:
        yield wrong(f"{group}.method", f"is {method!r}, but must be one of {', '.join(_DRAFT_METHODS)}")
        return
    known = _list_vllm_fields("config/speculative.py", "SpeculativeConfig")
    for name in drafts:
        if name in _OWN_DRAFT_KEYS:
            yield wrong(f"{group}.{name}", f"is set by this suite: {_BY_ROLLOUT}")
        elif known and name not in known:
            hint = registry.did_you_mean(name, known) or "."
            yield wrong(f"{group}.{name}", f"is not a key of the installed vLLM's speculative_config{hint}")
    has_default = method in ("mtp", "eagle", "eagle3")  # a number in the draft's config.json
    if not (tokens is None and has_default) and not (type(tokens) is int and 1 <= tokens <= _MAX_DRAFT):
        yield wrong(f"{group}.num_speculative_tokens", f"is {tokens!r}, but must be a whole number from 1 to {_MAX_DRAFT}")
    folder = Path(str(model)).expanduser()
    has_files = (folder / "config.json").is_file() and any(folder.glob("*.[sb][ai][fn]*"))  # safetensors, bin
    if _DRAFT_METHODS[str(method)] and method != "mtp" and not has_files:
        yield wrong(f"{group}.model", f"is {model!r}, but must be the folder of the draft's config.json and weights")
    sampling, off = generate.sampling_config, dict[str, object]({group: None})
    for name, reason in (
        ("min_p", "vLLM does not apply it to drafts"),
        ("stop", "a text that ends a response may be in the middle of the tokens of a step"),
        ("structured_output", "a form is not checked for the tokens of a draft"),
    ):
        if getattr(sampling, name):
            key = f"generate_config.sampling_config.{name}"
            yield wrong(key, f"cannot be combined with {group}: {reason}", off)
    replay = cfg.rl_config is not None and cfg.rl_config.router_replay.mode == "R3"
    for key, is_on, reason in (
        (_MODE, replay, "R3 reads the experts of one token a step; R2 works"),
        (_COUNTS, generate.eplb_token_collects, "experts are reported for one token a step"),
        ("generate_config.lora_push", generate.lora_push == "adapter", "adapter was not verified with drafts; merged works"),
    ):
        if is_on:
            yield wrong(key, f"cannot be combined with {group}: {reason}", off)
    if _DRAFT_METHODS[str(method)] and run.placement.engines is not None and run.placement.engines.in_step:
        yield wrong("generate_config.infer_expert_parallel_size", f"cannot be combined with a draft model ({group}.model)", off)
    metadata = cfg.model_metadata.get("actor_config")
    if metadata is not None and metadata.shape.linear_heads:
        yield wrong(group, "cannot be used with this model: the states of its gated delta nets are not rolled back here", off)


def _quantization(run: Run) -> Iterator[Violation]:
    """Check `quantization`, and what cannot be used with it."""
    cfg = run.config
    generate, key = cfg.generate_config, "generate_config.quantization"
    if generate is None or cfg.is_supervised or generate.quantization is None:
        return
    actor, metadata, drafts = cfg.with_shape("actor_config"), cfg.model_metadata.get("actor_config"), generate.drafts or {}
    gated = metadata is not None and metadata.shape.linear_heads
    is_npu = cfg.platform == "npu"
    for is_on, other, reason in (
        (cfg.platform == "cuda", None, "on cuda, where the layout of its kernels was not verified; npu and cpu have it"),
        (is_npu and generate.dtype == "float32", "dtype", "in float32 on npu: vllm-ascend has it for bfloat16"),
        (not _is_dense(run) and actor.num_experts, None, "with the experts of this model: only dense matrices are quantized"),
        (actor.multi_latent_attention, None, "with latent attention, which computes further matrices from its weights"),
        (gated, None, "with the gated delta nets of this model"),
        (cfg.reads_images, None, "with a model of images"),
        (generate.lora_push == "adapter", "lora_push", "next to an adapter; merged works"),
        (_DRAFT_METHODS.get(str(drafts.get("method"))), "speculative_config", "with a draft model; ngram and suffix work"),
    ):
        if is_on:
            names = {key: generate.quantization}
            names |= {} if other is None else {f"generate_config.{other}": getattr(generate, other)}
            message = f"{key} ({generate.quantization}) is not available {reason}"
            yield Violation("quantization", names, message, ({key: None},))


def _exact_experts(run: Run) -> tuple[tuple[object, str | None, str], ...]:
    """Return what `exact_log_probs` cannot be used with where the actor has experts, as in `_exact_log_probs`."""
    cfg = run.config
    assert cfg.rl_config is not None and cfg.generate_config is not None
    actor, generate, mode = cfg.actor_config, cfg.generate_config, cfg.rl_config.router_replay.mode
    tensor, infer = actor.tensor_model_parallel_size, generate.infer_tensor_parallel_size
    gathers = actor.moe_token_dispatcher_type == "allgather" and actor.expert_model_parallel_size > 1
    split = ": the experts of this model are computed on one tensor-parallel rank"
    return (
        (cfg.platform == "npu", None, "with the experts of this model on npu"),
        (mode != "R3" and mode, _MODE, ": set R3, so that both sides choose the same experts"),
        (tensor > 1 and tensor, "actor_config.tensor_model_parallel_size", split),
        (infer > 1 and infer, "generate_config.infer_tensor_parallel_size", split),
        (generate.enable_expert_parallel and "true", "generate_config.enable_expert_parallel", ": engines have all experts"),
        (actor.moe_grouped_gemm and "true", "actor_config.moe_grouped_gemm", ": experts are computed one by one"),
        (gathers and "allgather", "actor_config.moe_token_dispatcher_type", ": it adds up the ranks in an order of its own"),
    )


def _exact_log_probs(run: Run) -> Iterator[Violation]:
    """Check `exact_log_probs`, and what cannot be used with it; `run.models` checks the model."""
    cfg = run.config
    rl, generate, actor, key = cfg.rl_config, cfg.generate_config, cfg.actor_config, "rl_config.exact_log_probs"
    if rl is None or generate is None or cfg.is_supervised or not rl.exact_log_probs:
        return
    on_cpu, block = cfg.platform == "cpu", (generate.engine_kwargs or {}).get("block_size")
    compiled = on_cpu and not generate.enforce_eager
    tensor, slices = "actor_config.tensor_model_parallel_size", cfg.exact_slices
    ranks, infer = actor.tensor_model_parallel_size, generate.infer_tensor_parallel_size
    # neighbours are added in pairs, so that ranks may add up their own slices first
    uneven = 1 < min(ranks, infer) < slices and (ranks & (ranks - 1) or infer & (infer - 1))
    # (value that cannot be used, its key, the reason)
    obstacles: tuple[tuple[object, str | None, str], ...] = (
        (cfg.platform == "cuda", None, "on cuda; cpu has it, and npu sets keys of its libraries"),
        *(() if _is_dense(run) or not actor.num_experts else _exact_experts(run)),
        (cfg.reads_images, None, "with a model of images"),
        (
            cfg.platform == "npu" and not actor.npu_deterministic and "false",
            *("actor_config.npu_deterministic", ": the trainer's kernels add up in a fixed order only with it"),
        ),
        (actor.lora_target_modules, "actor_config.lora_target_modules", ": the engine has merged weights"),
        (actor.attention_dropout, "actor_config.attention_dropout", ""),
        (generate.quantization, "generate_config.quantization", ""),
        (generate.kv_cache_dtype != "auto" and generate.kv_cache_dtype, "generate_config.kv_cache_dtype", ""),
        (generate.drafts and "...", "generate_config.speculative_config", ": a step has several tokens of a response"),
        (compiled and "false", "generate_config.enforce_eager", ": compiled code adds up in another order"),
        (on_cpu and block, "generate_config.engine_kwargs.block_size", ": keys are added up in blocks of 128"),
        (
            actor.context_parallel_size > 1 and actor.context_parallel_size,
            *("actor_config.context_parallel_size", ": its slices of the keys are added up in another order"),
        ),
        (
            uneven and ranks,
            *(tensor, f" and infer_tensor_parallel_size ({infer}): both are powers of two, or equal, or one of them is 1"),
        ),
    )
    names, reasons = dict[str, object]({key: True}), []
    for found, other, reason in obstacles:
        if found:
            names |= {} if other is None else {other: found}
            reasons.append(reason if other is None else f"with {other} ({found}){reason}")
    if reasons:
        yield Violation("exact_log_probs", names, f"{key} (true) is not available {'; nor '.join(reasons)}", ({key: False},))


def _temperature(run: Run) -> Iterator[Violation]:
    """Check that the engine samples with the temperature by which the trainer divides; vLLM raises smaller ones to 0.01."""
    cfg = run.config
    temperature = 0.0 if cfg.is_supervised or cfg.generate_config is None else cfg.generate_config.sampling_config.temperature
    if 0.0 < temperature < MIN_TEMPERATURE:
        yield Violation(
            "temperature",
            {_TEMPERATURE: temperature},
            f"{_TEMPERATURE} ({temperature:g}) must be 0, which is greedy, or at least {MIN_TEMPERATURE:g}, the lowest with "
            "which the rollout engine samples",
            ({_TEMPERATURE: MIN_TEMPERATURE}, {_TEMPERATURE: 0.0}),
        )


def _budgets(run: Run) -> Iterator[Violation]:
    """Check that each token budget of micro-batches takes the longest sample."""
    cfg = run.config
    rl, generate, actor = cfg.rl_config, cfg.generate_config, cfg.actor_config
    if rl is None or generate is None or cfg.is_supervised or not rl.use_dynamic_bsz:
        return
    limit_key = cfg.response_limit_key.rpartition(".")[2]
    longest = min(rl.max_prompt_length + cfg.response_limit, generate.max_model_len)
    # sequence and context parallelism lengthen a micro-batch to a multiple of their ranks
    unit = max(actor.tensor_model_parallel_size, 1) if actor.sequence_parallel else 1
    unit *= 2 * actor.context_parallel_size if actor.context_parallel_size > 1 else 1
    needed = -(-longest // unit) * unit
    padding = "" if needed == longest else f", padded to a multiple of {unit}"
    reported: set[str] = set()
    uses = {"update": True, "actor": True, "ref": run.objective is not None and run.objective.needs_reference}
    for use, is_used in uses.items():
        own = f"{use}_max_packing_token_size"
        name = own if own in cfg.set_keys.get("rl_config", ()) else "max_packing_token_size"
        value = getattr(rl, own)
        if not is_used or value is None or value >= needed or name in reported:
            continue
        reported.add(name)
        yield Violation(
            "packing_budget",
            {f"rl_config.{name}": value, "rl_config.max_prompt_length": rl.max_prompt_length},
            f"rl_config.{name} ({value}) must be at least {needed}: a sample may have {longest} tokens{padding} (the smaller "
            f"of max_prompt_length {rl.max_prompt_length} + {limit_key} {cfg.response_limit} and max_model_len "
            f"{generate.max_model_len})",
            ({f"rl_config.{name}": needed}, {"rl_config.use_dynamic_bsz": False}),
        )


ROLLOUT_RULES = (
    _turns, _budgets, _replay, _expert_counts, _temperature, _engine_settings, _engine_arguments, _drafts, _quantization,
    _exact_log_probs
)  # fmt: skip
