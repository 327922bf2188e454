"""Rules of rollouts: samples of several turns, and the experts of tokens for router replay and counts."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

from mindspeed_rl import registry
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.config.keys.rl import AGENT_LOOP_KEYS, RLConfig
from mindspeed_rl.config.model_metadata import keeps_states
from mindspeed_rl.config.quantized_formats import QUANTIZED_FORMATS, find_format
from mindspeed_rl.files import read_json
from mindspeed_rl.run.record import Run
from mindspeed_rl.run.rules.engine_limits import MIN_TEMPERATURE
from mindspeed_rl.run.rules.quantized_models import UNQUANTIZED_DENSE, explain_actor
from mindspeed_rl.run.rules.violation import Broken, needs, read_key, violate

_MODE = "rl_config.router_replay.mode"
_EXCHANGE = "infer_moe_token_dispatcher_type"
_OPPONENTS = "rl_config.opponents.roles"
_COUNTS = "generate_config.eplb_token_collects"
#: settings of vllm-ascend that are set by this suite -> what to do
_OWN_SETTINGS = {
    "refresh": "remove it",
    "weight_nz_mode": "remove it",
    "enable_sleep_mode_extra_cleanup": "use generate_config.sleep_mode_extra_cleanup",
    "eplb_config": "use generate_config.expert_map_path",
    "rl_config": "remove it; of its settings, generate_config.sleep_mode_extra_cleanup is a key",
}
#: further settings of vllm-ascend that no rollout of this suite can have -> the reason
_REFUSED_SETTINGS = {
    "enable_fused_mc2": "keeps the weights of experts in the NZ layout, which no weight sync can write",
    "enable_mlapo": "copies weights of latent attention, and no weight sync reaches the copies",
    "enable_reduce_sample": "leaves each device its part of the vocabulary, and log-probabilities are of all tokens",
    "enable_async_exponential": "draws the noise of a step before it is known which requests sample, so that the tokens of a "
    "request would not follow from its seed",
    "rejection_sampler_config": "changes which tokens of a draft are accepted, and with them the policy that is sampled",
}
_FUSION = "ascend_fusion_config"
_BY_KEY = "use the key generate_config.{}"
_BY_ROLLOUT = "weights, samples and log-probabilities of a rollout depend on it"
#: arguments of vLLM's engine that keys of this suite decide, or that its rollouts rely on -> what to do
_OWN_ARGUMENTS: dict[str, str] = {
    **dict.fromkeys(
        "model model_weights load_format weights_path skip_tokenizer_init seed logprobs_mode generation_config "
        "override_generation_config hf_overrides hf_config_path enable_chunked_prefill enable_sleep_mode "
        "distributed_executor_backend worker_cls worker_extension_cls disable_log_stats "
        "enable_return_routed_experts runner task convert logits_processors async_scheduling max_logprobs".split(),
        _BY_ROLLOUT,
    ),
    **dict.fromkeys(
        "data_parallel_size data_parallel_rank data_parallel_size_local data_parallel_start_rank data_parallel_address "
        "data_parallel_rpc_port data_parallel_backend data_parallel_hybrid_lb data_parallel_external_lb nnodes "
        "node_rank "
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


@needs("rl_config")
def _replay(run: Run) -> Iterator[Broken]:
    """Check `rl_config.router_replay`."""
    mode = run.rl.router_replay.mode
    switches = {name: getattr(run.rl, name) for name in _SWITCHES}
    for key, configured in switches.items():
        if configured is not None and configured != (mode in _SWITCHES[key]):
            yield violate("replay_spelling", f"[{key}] says the same as [{_MODE}], and the two differ", {key: None})
    if mode == "disabled":
        return
    off = {_MODE: "disabled"} | {key: None for key, configured in switches.items() if configured}
    for reason in _reasons(run, _obstacles):
        yield violate("router_replay", f"[{_MODE}] cannot be used here: {reason}", None, off)


@needs("generate_config")
def _expert_counts(run: Run) -> Iterator[Broken]:
    """Check `generate_config.eplb_token_collects`."""
    if run.generate.eplb_token_collects:
        for reason in _reasons(run, _obstacles_of_engine):
            yield violate("expert_counts", f"[{_COUNTS}] cannot be used here: {reason}", {_COUNTS: False})


def _reasons(run: Run, obstacles: Callable[[Run], Iterator[str]]) -> Iterator[str]:
    if _is_dense(run):
        yield "the model has no experts"
    else:
        yield from obstacles(run)


def _is_dense(run: Run) -> bool:
    """Return True once it is known that the actor has no experts."""
    actor = run.config.with_shape("actor_config")
    return not actor.num_experts and (actor.num_layers is not None or actor.num_attention_heads is not None)


def _obstacles(run: Run) -> Iterator[str]:
    if run.config.actor_config.moe_router_load_balancing_type == "sinkhorn":
        yield "moe_router_load_balancing_type sinkhorn has a router that takes no experts from others"
    if (sizes := run.sizes) is not None and sizes.can_divide and sizes.idle_actor_replicas:
        yield (
            f"an optimizer step has {sizes.step_samples} samples on {sizes.actor.dp_size} data-parallel replicas, and one "
            "without a sample has no experts to replay"
        )
    if run.rl.router_replay.mode == "R3":
        yield from (f"{reason}; R2 works there" for reason in _obstacles_of_engine(run))
    else:
        yield from _obstacles_of_recording(run)


def _obstacles_of_recording(run: Run) -> Iterator[str]:
    sizes, objective = run.sizes, run.objective
    if sizes is None or not sizes.can_divide or objective is None:
        return
    if not objective.needs_old_log_probs(on_policy=sizes.on_policy):
        recorded = objective.reads_rollout_policy
        reason = "old_log_probs is rollout" if recorded else "each rollout is followed by one optimizer step"
        yield (
            "it records in the pass of the old log-probabilities, and this run makes none, because "
            f"{reason}; R3 needs no such pass"
        )


def _obstacles_of_engine(run: Run) -> Iterator[str]:
    splits, generate = run.rl.partial_rollout_max_split, run.config.generate_config
    if run.placement.disaggregated:
        yield "rollout servers do not hand out the experts of their tokens"
    if splits > 1:
        yield f"partial_rollout_max_split ({splits}) keeps responses over iterations, and not the experts of their tokens"
    if generate is not None and generate.expert_map_path is not None:
        yield "with generate_config.expert_map_path vllm-ascend before 0.26 reports where an expert lies, not which one it is"


@needs("rl_config", "generate_config")
def _turns(run: Run) -> Iterator[Broken]:
    """Check runs whose samples have several turns."""
    rl, loop, per_turn = run.rl, run.rl.agent_loop_name, run.generate.sampling_config.max_tokens
    if not rl.multi_turn_enable:
        return
    if 0 < rl.max_total_response_length < per_turn:
        text = "[max_total_response_length] must be at least [max_tokens]"
        yield violate("tool_response_length", text, {"max_total_response_length": per_turn})
    if loop == "single_turn":
        return
    if rl.partial_rollout_max_split > 1:
        yield violate(
            "partial_rollout_turns",
            "[partial_rollout_max_split] lets a response take several iterations, and tools and environments of a "
            "sample of several turns cannot be put aside so long",
            {"partial_rollout_max_split": 1, "multi_turn_enable": False},
            keys={"multi_turn_enable": True},
        )
    if rl.use_dynamic_bsz and not rl.use_remove_padding:
        yield violate(
            "turns_are_packed",
            "[use_dynamic_bsz:name] counts the tokens of a sample of several turns as they are packed, so with "
            "rl_config.multi_turn_enable it needs [use_remove_padding:name]",
            {"use_remove_padding": True, "use_dynamic_bsz": False},
        )
    needed, given = AGENT_LOOP_KEYS.get(loop), {"agent_loop": loop}
    if needed is not None and getattr(rl, needed) is None:
        yield violate("agent_loop_needs", f"[agent_loop:is] needs [{needed}:name]", keys=given)
    if loop == "roles":
        yield from _roles_of_episodes(run)
    if rl.agent is not None and bool(rl.agent.command) == bool(rl.agent.url):
        program = {f"rl_config.agent.{name}": getattr(rl.agent, name) for name in ("command", "url")}
        yield violate("agent_program", "rl_config.agent needs either a command or a url, and not both", keys=program)
    if rl.verifier_reads == "output" and loop != "program":
        text = f"[verifier_reads:is] belongs to a program, but the loop is {loop}: set rl_config.agent"
        yield violate("verifier_reads_output", text, {"verifier_reads": "response"}, keys=given)


def _roles_of_episodes(run: Run) -> Iterator[Broken]:
    """Check runs whose episodes have several roles, each with rewards and a baseline of its own."""
    rl, objective, given = run.rl, run.objective, {"agent_loop": "roles"}
    assert objective is not None
    if needed := sorted(objective.advantage.needs):
        yield violate(
            "roles_estimator",
            f"[agent_loop:is] compares each role's rewards within its group, and [adv_estimator] needs "
            f"{' and '.join(needed)} of whole rows",
            {"adv_estimator": RLConfig.adv_estimator},
            keys=given,
        )
    if objective.kl_place == "reward":
        text = "[agent_loop:is] excludes [use_kl_in_reward:name]: the KL of a row is not divided over its roles"
        yield violate("roles_kl", text, {"use_kl_in_reward": False}, keys=given)
    if rl.trajectory_reward not in ("both", "turns"):
        text = "[agent_loop:is] needs the rewards of turns, which are each role's own, and [trajectory_reward] leaves them out"
        yield violate("roles_reward", text, {"trajectory_reward": "both"}, keys=given)
    for name in ("filter_groups_enable", "dynamic_sample"):
        if getattr(rl, name):
            text = f"[agent_loop:is] excludes [{name}:name]: totals are equal where one role wins what another loses"
            yield violate("roles_filter", text, {name: False}, keys=given)
    if rl.trainer_mode != "sync":
        text = "[agent_loop:is] needs [trainer_mode:name]: sync; responses in flight do not keep whose turn each was"
        yield violate("roles_mode", text, {"trainer_mode": "sync"}, keys=given)


def _find_other_loop(run: Run, key: str) -> str | None:
    """Return the sentence for a key of roles in a run without their loop; None where it has it."""
    if run.rl.agent_loop_name == "roles":
        return None
    return f"[{key}:name] needs multi_turn_enable and [agent_loop:name]: roles, the loop whose turns belong to roles"


def _find_other_push(run: Run, key: str, reason: str) -> str | None:
    """Return the sentence for a key of roles whose engine gets no adapters; None where it does."""
    if run.generate.lora_push == "adapter":
        return None
    return f"[{key}:name] needs [lora_push:name]: adapter and adapters (lora_target_modules): {reason}"


@needs("rl_config", "generate_config")
def _opponents(run: Run) -> Iterator[Broken]:
    """Check runs in which earlier weights of the actor play roles."""
    if not run.rl.opponents.roles:
        return
    key, none = {_OPPONENTS: run.rl.opponents.roles}, {_OPPONENTS: []}
    if (text := _find_other_loop(run, _OPPONENTS)) is not None:
        yield violate("opponents_loop", text, none, keys=key)
    reason = (
        "opponents of full weights would need another engine for each snapshot (14 GiB of a device for 7B, where an "
        "adapter of rank 16 has 0.08) or a weight sync between any two turns; a server of an exported checkpoint can be "
        "asked by the environment"
    )
    if (text := _find_other_push(run, _OPPONENTS, reason)) is not None:
        yield violate("opponents_adapters", text, none, keys=key)


_ADAPTERS = "rl_config.role_adapters"
#: names of adapters, which are folders too
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_NO_TURN = "it compares complete groups, and some episodes have no turn of a role"


@needs("rl_config", "generate_config")
def _role_adapters(run: Run) -> Iterator[Broken]:
    """Check runs whose roles have their own adapters."""
    rl, actor, objective = run.rl, run.config.actor_config, run.objective
    if rl.role_adapters is None:
        return
    assert objective is not None
    key, none = {_ADAPTERS: dict(rl.role_adapters)}, {_ADAPTERS: None}
    wrong = None if rl.role_adapters else f"[{_ADAPTERS}] needs role: adapter for each role"
    for role, name in rl.role_adapters.items():
        if not isinstance(role, str):
            wrong = f"[{_ADAPTERS}] has the role {role!r}, and a role is a text, such as '{role}'"
        elif not isinstance(name, str) or not _ADAPTER_NAME.fullmatch(name):
            wrong = (
                f"[{_ADAPTERS}] has the name {name!r}; a name begins with a letter or digit, then has letters, digits, - or _, "
                "at most 64"
            )
    if wrong is not None:
        yield violate("role_adapters_names", wrong, none, keys=key)
    if (text := _find_other_loop(run, _ADAPTERS)) is not None:
        yield violate("role_adapters_loop", text, none, keys=key)
    reason = "the rollout engine holds the adapters of all roles next to one base"
    if (text := _find_other_push(run, _ADAPTERS, reason)) is not None:
        yield violate("role_adapters_push", text, none, keys=key)
    if not actor.lora_ckpt_filter:
        text = (
            f"[{_ADAPTERS}:name] needs [actor_config.lora_ckpt_filter:name]: true, or the checkpoint of each adapter would "
            "have the base"
        )
        yield violate("role_adapters_checkpoints", text, {"actor_config.lora_ckpt_filter": True, **none}, keys=key)
    for name, holds, off, reason in (
        ("rl_config.ema_decay", rl.ema_decay, 0.0, "an average follows one adapter"),
        ("rl_config.sync_ref_model", rl.sync_ref_model, False, "the reference follows one actor"),
        ("rl_config.distillation.teacher_models", objective.distillation, [], "teachers judge rows of one adapter"),
        ("actor_config.async_save", actor.async_save, False, "adapters take turns while a checkpoint is written"),
        ("actor_config.swap_optimizer", actor.swap_optimizer, False, "the optimizer has the state of one adapter at a time"),
        ("actor_config.optimizer_offload_fraction", actor.optimizer_offload_fraction, 0.0, "each adapter has its own state"),
        ("actor_config.reuse_fp32_param", actor.reuse_fp32_param, False, "each adapter has its own state"),
        ("actor_config.dynamic_context_parallel", actor.has_dynamic_context, False, "the rows of an adapter are parts of rows"),
        ("rl_config.loss_type", objective.loss.compares_group, None, _NO_TURN),
    ):
        if holds:
            text = f"[{_ADAPTERS}:name] excludes [{name}]: {reason}"
            yield violate("role_adapters_excludes", text, {name: off, **none}, keys=key)
    if run.config.reads_images:
        text = f"[{_ADAPTERS}:name] excludes images: those of a row are not divided over its roles"
        yield violate("role_adapters_images", text, none, keys=key)


@needs("generate_config")
def _engine_settings(run: Run) -> Iterator[Broken]:
    """Check settings that go to the engine under its own names, and the number of tokens of a step."""
    generate, sizes = run.generate, "cudagraph_capture_sizes"
    additional = generate.additional_config or {}
    for name, instead in _OWN_SETTINGS.items():
        if name in additional:
            yield _own_setting(f"additional_config.{name}", f"is set by this suite; {instead}")
    for name, reason in _REFUSED_SETTINGS.items():
        if additional.get(name):
            yield _own_setting(f"additional_config.{name}", f"{reason}; remove it")
    integers = generate.quantization in ("int8", "w4a8")
    if integers and run.config.platform == "npu" and not _is_dense(run) and _FUSION in additional:
        experts = f"experts in {generate.quantization}"
        problem = f"is set by this suite for {experts}, which its fused kernels take in the NZ layout only"
        yield _own_setting(f"additional_config.{_FUSION}", f"{problem}; remove it")
    if run.config.platform == "npu" and generate.kv_cache_dtype != "auto":
        text = "[kv_cache_dtype:is] is not available on npu: vllm-ascend's attention writes keys and values as they are"
        yield violate("npu_kv_cache_dtype", text, {"kv_cache_dtype": "auto"})
    if generate.cudagraph_capture_sizes is not None and sizes in (generate.compilation_config or {}):
        both = f"generate_config.compilation_config.{sizes}"
        text = f"[{sizes}:name] and {both} are both set; keep one of them"
        yield violate("capture_sizes_twice", text, keys={both: "..."})
    tokens, sequences = generate.max_num_batched_tokens, generate.max_num_seqs
    if "max_num_batched_tokens" in run.config.set_keys.get("generate_config", ()) and tokens < sequences:
        text = "[max_num_batched_tokens] must be at least [max_num_seqs]: a step of the engine has a token of each response"
        yield violate("step_tokens", text, {"max_num_batched_tokens": sequences, "max_num_seqs": tokens})


def _own_setting(name: str, problem: str, rule: str = "own_engine_setting") -> Broken:
    """Report an item of a group that goes to the engine as it is."""
    return violate(rule, f"generate_config.{name} {problem}", keys={f"generate_config.{name}": "..."})


@needs("generate_config")
def _engine_arguments(run: Run) -> Iterator[Broken]:
    """Check `engine_kwargs`, and keys of sampling that need the whole text of a response."""
    known = _list_vllm_fields("engine/arg_utils.py", "EngineArgs")
    for name in run.generate.engine_kwargs or {}:
        if name in _OWN_ARGUMENTS:
            yield _own_setting(f"engine_kwargs.{name}", f"is set by this suite: {_OWN_ARGUMENTS[name]}")
        elif known and name not in known:
            hint = registry.did_you_mean(name, known) or "."
            problem = f"is not an argument of the installed vLLM's engine{hint}"
            yield _own_setting(f"engine_kwargs.{name}", problem, "engine_argument")
    sampling, prefix = run.generate.sampling_config, "generate_config.sampling_config"
    if "" in sampling.stop:
        yield violate("stop_text", f"[{prefix}.stop:name] has an empty text, which ends nothing")
    forms = set(sampling.structured_output or ())
    if sampling.structured_output is not None and (len(forms) != 1 or forms - _FORMS):
        yield violate(
            "structured_output",
            f"[{prefix}.structured_output:name] has {', '.join(sorted(forms)) or 'nothing'}, but needs exactly one of "
            f"{', '.join(sorted(_FORMS))}",
        )
    splits = 1 if run.config.rl_config is None else run.rl.partial_rollout_max_split
    for name in ("stop", "structured_output", "presence_penalty", "frequency_penalty"):
        if splits > 1 and getattr(sampling, name):
            yield violate(
                "response_in_one",
                f"[{prefix}.{name}:name] looks at the response from its start, and [partial_rollout_max_split] "
                "continues it as a new request",
                {"partial_rollout_max_split": 1},
            )


@cache
def _list_vllm_fields(file: str, name: str) -> frozenset[str]:
    """Return the fields of a class of vLLM, read from its source; empty where it is not installed."""
    spec = importlib.util.find_spec("vllm")
    source = Path(spec.origin).parent / file if spec is not None and spec.origin else None
    if source is None or not source.is_file():
        return frozenset()
    body = ast.parse(source.read_text()).body
    (settings,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    targets = [item.target for item in settings.body if isinstance(item, ast.AnnAssign)]
    return frozenset(target.id for target in targets if isinstance(target, ast.Name))


_DRAFTS = "generate_config.speculative_config"
_OFF: dict[str, object] = {_DRAFTS: None}
#: keys of sampling that drafts exclude -> the reason
_UNLIKE_DRAFTS = {
    "min_p": "vLLM does not apply it to drafts",
    "stop": "a text that ends a response may be in the middle of the tokens of a step",
    "structured_output": "a form is not checked for the tokens of a draft",
}


@needs("generate_config")
def _drafts(run: Run) -> Iterator[Broken]:
    """Check `speculative_config`, and what cannot be used with it."""
    drafts = run.generate.drafts
    if drafts is None:
        return
    method = drafts.get("method")
    if method in _DRAFT_METHODS:
        yield from _draft_keys(drafts)
        yield from _unlike_drafts(run, is_model=_DRAFT_METHODS[method])
    else:
        yield _reject_draft(drafts, "method", f"is {method!r}, but must be one of {', '.join(_DRAFT_METHODS)}")


def _reject_draft(drafts: Mapping[str, object], name: str, problem: str) -> Broken:
    """Report a key of `speculative_config`."""
    return violate("speculative_config", f"{_DRAFTS}.{name} {problem}", keys={f"{_DRAFTS}.{name}": drafts.get(name)})


def _draft_keys(drafts: Mapping[str, object]) -> Iterator[Broken]:
    """Check the keys of `speculative_config` itself."""
    method, tokens, model = str(drafts["method"]), drafts.get("num_speculative_tokens"), drafts.get("model")
    known = _list_vllm_fields("config/speculative.py", "SpeculativeConfig")
    for name in drafts:
        if name in _OWN_DRAFT_KEYS:
            yield _reject_draft(drafts, name, f"is set by this suite: {_BY_ROLLOUT}")
        elif known and name not in known:
            hint = registry.did_you_mean(name, known) or "."
            yield _reject_draft(drafts, name, f"is not a key of the installed vLLM's speculative_config{hint}")
    has_default = method in ("mtp", "eagle", "eagle3")  # a number in the draft's config.json
    if not (tokens is None and has_default) and not (type(tokens) is int and 1 <= tokens <= _MAX_DRAFT):
        text = f"is {tokens!r}, but must be a whole number from 1 to {_MAX_DRAFT}"
        yield _reject_draft(drafts, "num_speculative_tokens", text)
    folder = Path(str(model)).expanduser()
    has_files = (folder / "config.json").is_file() and any(folder.glob("*.[sb][ai][fn]*"))  # safetensors, bin
    if _DRAFT_METHODS[method] and method != "mtp" and not has_files:
        text = f"is {model!r}, but must be the folder of the draft's config.json and weights"
        yield _reject_draft(drafts, "model", text)
    elif method == "draft_model" and _has_states(folder):
        text = f"is {model!r}, whose layers keep states (linear attention, convolutions); the engine has those of a policy only"
        text += "; use method: mtp"
        yield _reject_draft(drafts, "model", text)


def _has_states(folder: Path) -> bool:
    """Return True where layers of the model in a folder keep a recurrent state instead of keys and values."""
    try:
        shape = read_json(folder / "config.json")
    except ValueError:  # the engine reports it
        return False
    text = shape.get("text_config") if isinstance(shape.get("text_config"), dict) else shape
    return keeps_states(text)


def _unlike_drafts(run: Run, is_model: bool) -> Iterator[Broken]:
    """Check what cannot be used with drafts."""
    generate, engines = run.generate, run.placement.engines
    replay = run.config.rl_config is not None and run.rl.router_replay.mode == "R3"
    spreads = is_model and engines is not None and engines.in_step
    sampling = "generate_config.sampling_config"
    for key, is_on, reason in (
        *((f"{sampling}.{name}", getattr(generate.sampling_config, name), text) for name, text in _UNLIKE_DRAFTS.items()),
        (_MODE, replay, "R3 reads the experts of one token a step; R2 works"),
        (_COUNTS, generate.eplb_token_collects, "experts are reported for one token a step"),
        ("generate_config.lora_push", generate.lora_push == "adapter", "adapter was not verified with drafts; merged works"),
    ):
        if is_on:
            text = f"{key} cannot be combined with {_DRAFTS}: {reason}"
            yield violate("speculative_config", text, _OFF, keys={key: "..."})
    if spreads:
        key = "generate_config.infer_expert_parallel_size"
        text = f"{key} cannot be combined with a draft model ({_DRAFTS}.model)"
        yield violate("speculative_config", text, _OFF, keys={key: "..."})


@needs("generate_config")
def _quantization(run: Run) -> Iterator[Broken]:
    """Check `quantization`, and what cannot be used with it."""
    cfg, generate, key = run.config, run.generate, "generate_config.quantization"
    if generate.quantization is None:
        return
    suggested: dict[str, object] = {"enforce_eager": True, _EXCHANGE: "allgather"}
    for keys, reason in explain_quantization(run, cfg.platform):
        change = {f"generate_config.{name}": suggested[name] for name in keys if name in suggested} or {key: None}
        yield violate("quantization", f"[{key}] is not available {reason}", change, keys=keys)


def explain_quantization(run: Run, platform: str) -> Iterator[tuple[dict[str, object], str]]:
    """Yield the other keys and the reason for which `quantization` is not available.

    Args:
        run: its run file sets it.
        platform: device kind of its engines; where it is still open ("auto"), only what no device kind has is a reason.
    """
    cfg, generate = run.config, run.generate
    assert generate.quantization is not None
    actor, drafts = cfg.with_shape("actor_config"), generate.drafts or {}
    is_cpu, is_npu = platform == "cpu", platform == "npu"
    sizes = QUANTIZED_FORMATS[find_format(generate.quantization, platform)]
    compiled = sizes.is_emulated and is_cpu and not generate.enforce_eager
    kinds = [platform] if is_cpu or is_npu else ["npu", "cpu"] if platform == "auto" else []
    refused = [explain_actor(cfg, kind) for kind in kinds]
    model = refused[-1] if all(refused) and refused else ""
    for is_on, other, reason in (
        (platform == "cuda", None, "on cuda, where the layout of its kernels was not verified; npu and cpu have it"),
        (compiled, "enforce_eager", "with enforce_eager (false): it is emulated by Python, which is not in compiled code"),
        (is_npu and generate.dtype == "float32", "dtype", "in float32 on npu: vllm-ascend has it for bfloat16"),
        (
            is_cpu and not _is_dense(run) and actor.num_experts and generate.enable_expert_parallel,
            *("enable_expert_parallel", "with enable_expert_parallel, where engines share experts: only npu has it"),
        ),
        (generate.lora_push == "adapter", "lora_push", "next to an adapter; merged works"),
        (_DRAFT_METHODS.get(str(drafts.get("method"))), "speculative_config", "with a draft model; ngram and suffix work"),
        (model or (is_npu and sizes.others and _is_dense(run)), None, model or UNQUANTIZED_DENSE),
    ):
        if is_on:
            yield {} if other is None else {other: getattr(generate, other)}, reason
    if is_npu and actor.num_experts and (reason := explain_sent_experts(generate)):
        yield {_EXCHANGE: generate.infer_moe_token_dispatcher_type}, reason


def explain_sent_experts(generate: GenerateConfig) -> str:
    """Return why results of quantized experts on NPUs are not exchanged in this way, after "is not available"; "" if they are.

    Args:
        generate: keys of the engine, with `quantization`.
    """
    exchange = generate.infer_moe_token_dispatcher_type
    if generate.quantization != "mxfp8" or not generate.enable_expert_parallel or exchange == "allgather":
        return ""
    return (
        f"for experts in mxfp8 on npu with {_EXCHANGE} ({exchange}): MC2 sends the results of experts in 8 bits too, which is "
        "not the format; set allgather"
    )


#: platform without `exact_log_probs` -> the reason
_EXACT_ELSEWHERE = {
    "cuda": "on cuda; cpu has it",
    "npu": "on npu: trainer and engine have attention kernels of their own there, which add up in different orders, and "
    "vllm-ascend's batch-invariant operators were never run; cpu has it, and actor_config.npu_deterministic fixes the "
    "order of the trainer's sums",
}


def _exact_experts(run: Run) -> tuple[tuple[object, str | None, str], ...]:
    """Return what `exact_log_probs` cannot be used with where the actor has experts, as in `_exact_log_probs`."""
    actor, generate, mode = run.config.actor_config, run.generate, run.rl.router_replay.mode
    tensor, infer = actor.tensor_model_parallel_size, generate.infer_tensor_parallel_size
    gathers = actor.moe_token_dispatcher_type == "allgather" and actor.expert_model_parallel_size > 1
    split = ": the experts of this model are computed on one tensor-parallel rank"
    return (
        (mode != "R3" and mode, _MODE, ": set R3, so that both sides choose the same experts"),
        (tensor > 1 and tensor, "actor_config.tensor_model_parallel_size", split),
        (infer > 1 and infer, "generate_config.infer_tensor_parallel_size", split),
        (generate.enable_expert_parallel and "true", "generate_config.enable_expert_parallel", ": engines have all experts"),
        (actor.moe_grouped_gemm and "true", "actor_config.moe_grouped_gemm", ": experts are computed one by one"),
        (gathers and "allgather", "actor_config.moe_token_dispatcher_type", ": it adds up the ranks in an order of its own"),
    )


@needs("rl_config", "generate_config")
def _exact_log_probs(run: Run) -> Iterator[Broken]:
    """Check `exact_log_probs`, and what cannot be used with it; `run.models` checks the model."""
    cfg, generate, actor, key = run.config, run.generate, run.config.actor_config, "rl_config.exact_log_probs"
    if not run.rl.exact_log_probs:
        return
    on_cpu, block = cfg.platform == "cpu", (generate.engine_kwargs or {}).get("block_size")
    compiled = on_cpu and not generate.enforce_eager
    tensor, slices = "actor_config.tensor_model_parallel_size", cfg.exact_slices
    ranks, infer = actor.tensor_model_parallel_size, generate.infer_tensor_parallel_size
    # neighbours are added in pairs, so that ranks may add up their own slices first
    uneven = 1 < min(ranks, infer) < slices and (ranks & (ranks - 1) or infer & (infer - 1))
    # (value that cannot be used, its key, the reason)
    obstacles: tuple[tuple[object, str | None, str], ...] = (
        *((cfg.platform == name, None, reason) for name, reason in _EXACT_ELSEWHERE.items()),
        *(_exact_experts(run) if cfg.with_shape("actor_config").num_experts else ()),
        (cfg.reads_images, None, "with a model of images"),
        (
            cfg.serve_config is None and actor.lora_target_modules,
            *("actor_config.lora_target_modules", ": the engine has merged weights"),
        ),
        (actor.attention_dropout, "actor_config.attention_dropout", ""),
        (
            actor.loss_vocab_chunk_size,
            *("actor_config.loss_vocab_chunk_size", ": the engine adds up the whole vocabulary at once"),
        ),
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
    present = [(value, other, reason) for value, other, reason in obstacles if value]
    if present:
        reasons = [reason if other is None else f"with {other} ({value}){reason}" for value, other, reason in present]
        given = {other: value for value, other, _ in present if other is not None}
        yield violate("exact_log_probs", f"[{key}] is not available {'; nor '.join(reasons)}", {key: False}, keys=given)


#: keys of generate_config that transformers' module does not serve -> the value that it takes, and the reason
_MODULE_LIMITS: dict[str, tuple[object, str]] = {
    **dict.fromkeys(("infer_tensor_parallel_size", "infer_expert_parallel_size"), (1, "each device has a full model")),
    "enable_expert_parallel": (False, "each device has a full model"),
    "quantization": (None, "it computes with the weights as they are"),
    "kv_cache_dtype": ("auto", "it keeps keys and values in the format of the weights"),
    "speculative_config": (None, "it computes a token at a time"),
    "lora_push": ("merged", "it has no adapters; merged works"),
    "enable_prefix_caching": (False, "it reads the prompt of a group once, and keeps nothing after a response"),
    "eplb_token_collects": (False, "it does not report the experts of its tokens"),
    **dict.fromkeys(("engine_kwargs", "compilation_config", "additional_config"), (None, "it is not vLLM")),
    "sampling_config.stop": ([], "it sees no text; stop_token_ids works"),
    "sampling_config.structured_output": (None, "it sees no text"),
}


@needs("rl_config", "generate_config")
def _module_engine(run: Run) -> Iterator[Broken]:
    """Check what cannot be used with transformers' module as the rollout engine."""
    cfg, key = run.config, "generate_config.engine"
    if run.generate.engine != "transformers":
        return
    for name, (allowed, reason) in _MODULE_LIMITS.items():
        path = f"generate_config.{name}"
        if read_key(run, path) != allowed:
            yield violate("module_engine", f"[{path}] cannot be used with [{key}]: {reason}", {path: allowed})
    elsewhere = cfg.platform not in ("cpu", "npu", "auto")
    for is_on, reason in (
        (elsewhere, f"on {cfg.platform}: it was run on cpu and npu only"),
        (run.placement.disaggregated, "with servers, which are vLLM's; leave out rollout_resource and vllm_server_host"),
        (cfg.reads_images, "with a model of images"),
        (run.rl.exact_log_probs, "with rl_config.exact_log_probs: it adds up as transformers does, and not as the trainer"),
        (run.rl.router_replay.mode == "R3", f"with {_MODE} R3: it does not report the experts of its tokens; R2 works"),
    ):
        if is_on:
            yield violate("module_engine", f"[{key}] cannot be used {reason}", {key: "vllm"})


@needs("generate_config")
def _temperature(run: Run) -> Iterator[Broken]:
    """Check that the engine samples with the temperature by which the trainer divides; vLLM raises smaller ones to 0.01."""
    if 0.0 < run.generate.sampling_config.temperature < MIN_TEMPERATURE:
        yield violate(
            "temperature",
            f"[temperature] must be 0, which is greedy, or at least {MIN_TEMPERATURE:g}, the lowest with which the "
            "rollout engine samples",
            {"temperature": MIN_TEMPERATURE},
            {"temperature": 0.0},
        )


@needs("rl_config", "generate_config")
def _budgets(run: Run) -> Iterator[Broken]:
    """Check that each token budget of micro-batches takes the longest sample."""
    cfg, rl, generate, actor = run.config, run.rl, run.generate, run.config.actor_config
    if not rl.use_dynamic_bsz:
        return
    limit_key = cfg.response_limit_key.rpartition(".")[2]
    longest = min(rl.max_prompt_length + cfg.response_limit, generate.max_model_len)
    # sequence and context parallelism lengthen a micro-batch to a multiple of their ranks
    unit = max(actor.tensor_model_parallel_size, 1) if actor.sequence_parallel else 1
    unit *= 2 * actor.context_parallel_size if actor.context_parallel_size > 1 else 1
    needed = -(-longest // unit) * unit
    padding = "" if needed == longest else f", padded to a multiple of {unit}"
    uses = ("update", "actor", *(("ref",) if run.objective is not None and run.objective.needs_ref else ()))
    set_keys = cfg.set_keys.get("rl_config", ())
    # the shared budget is reported once
    budgets = {
        own if own in set_keys else "max_packing_token_size": getattr(rl, own)
        for own in (f"{use}_max_packing_token_size" for use in uses)
    }
    for name, value in budgets.items():
        if value is not None and value < needed:
            yield violate(
                "packing_budget",
                f"[{name}] must be at least {needed}: a sample may have {longest} tokens{padding} (the smaller of "
                f"max_prompt_length [max_prompt_length:value] + {limit_key} {cfg.response_limit} and max_model_len "
                f"{generate.max_model_len})",
                {name: needed, "use_dynamic_bsz": False},
                keys={name: value},
            )


ROLLOUT_RULES = (
    _turns, _opponents, _role_adapters, _budgets, _replay, _expert_counts, _temperature, _engine_settings, _engine_arguments,
    _drafts, _quantization, _exact_log_probs, _module_engine
)  # fmt: skip
