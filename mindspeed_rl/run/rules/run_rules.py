"""Rules between keys of a run file about roles, lengths, number formats and the rollout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from mindspeed_rl.config.errors import unknown_value
from mindspeed_rl.config.keys import PATH_KEYS, RLConfig
from mindspeed_rl.config.keys.diagnostics import PROFILER_STAGES
from mindspeed_rl.config.keys.megatron import LORA_TARGETS, is_weight, read_split
from mindspeed_rl.run.record import Run
from mindspeed_rl.run.rules.rollout_rules import ROLLOUT_RULES
from mindspeed_rl.run.rules.violation import Violation


def _stage(run: Run) -> Iterator[Violation]:
    cfg = run.config
    if cfg.stage is None:
        yield Violation("is_set", {"megatron_training.stage": None}, "megatron_training.stage is not set")
    elif not cfg.is_supervised:
        for group in ("rl_config", "generate_config"):
            if getattr(cfg, group) is None:
                yield Violation(
                    "group_needed", {"megatron_training.stage": cfg.stage}, f"stage {cfg.stage} needs the group {group}"
                )


def _number_format(run: Run) -> Iterator[Violation]:
    cfg = run.config
    if cfg.generate_config is None:
        return
    dtype, bf16 = cfg.generate_config.dtype, cfg.actor_config.bf16
    if bf16 != (dtype == "bfloat16"):
        yield Violation(
            "same_number_format",
            {"megatron_training.bf16": bf16, "generate_config.dtype": dtype},
            f"megatron_training.bf16 ({str(bf16).lower()}) and generate_config.dtype ({dtype}) must agree: "
            "trainer and rollout engine "
            f"compute in the same format",
            ({"generate_config.dtype": "bfloat16" if bf16 else "float32"}, {"megatron_training.bf16": not bf16}),
        )
    trained, sampled = cfg.actor_config.fp32_lm_head, cfg.generate_config.fp32_lm_head
    if sampled is not None and not cfg.is_supervised and sampled != trained:
        yield Violation(
            "same_head_format",
            {"actor_config.fp32_lm_head": trained, "generate_config.fp32_lm_head": sampled},
            f"generate_config.fp32_lm_head ({str(sampled).lower()}) must be that of the actor: trainer and rollout engine "
            "compute logits in the same format",
            ({"actor_config.fp32_lm_head": sampled}, {"generate_config.fp32_lm_head": trained}),
        )


def _lengths(run: Run) -> Iterator[Violation]:
    cfg = run.config
    rl, generate, seq = cfg.rl_config, cfg.generate_config, cfg.actor_config.seq_length
    if rl is None or generate is None or cfg.is_supervised:
        return
    max_len, response = generate.max_model_len, cfg.response_limit
    if seq is not None and max_len < seq:
        yield Violation(
            "seq_length_fits_engine",
            {"generate_config.max_model_len": max_len, "megatron_training.seq_length": seq},
            f"generate_config.max_model_len ({max_len}) must be at least megatron_training.seq_length ({seq})",
            (
                {"generate_config.max_model_len": max(seq, rl.max_prompt_length + response)},
                {"megatron_training.seq_length": max_len},
            ),
        )
    if rl.max_prompt_length > max_len:
        yield Violation(
            "prompts_fit_engine",
            {"rl_config.max_prompt_length": rl.max_prompt_length, "generate_config.max_model_len": max_len},
            f"rl_config.max_prompt_length ({rl.max_prompt_length}) must be at most generate_config.max_model_len ({max_len}): "
            "a longer prompt leaves no room for a response",
            # long enough for seq_length too, or the rule above would break next
            (
                {"generate_config.max_model_len": max(rl.max_prompt_length + response, seq or 0)},
                # proposed only where it leaves room for a prompt
                *([{"rl_config.max_prompt_length": max_len - response}] if max_len > response else []),
            ),
        )


def _packing(run: Run) -> Iterator[Violation]:
    cfg = run.config
    actor, rl = cfg.actor_config, cfg.rl_config
    if actor.neat_pack and not (actor.pack and actor.reset_attention_mask):
        yield Violation(
            "neat_pack",
            {
                "megatron_training.neat_pack": True,
                "megatron_training.pack": actor.pack,
                "megatron_training.reset_attention_mask": actor.reset_attention_mask,
            },
            "megatron_training.neat_pack needs pack and reset_attention_mask",
            ({"megatron_training.pack": True, "megatron_training.reset_attention_mask": True},),
        )
    metadata = cfg.model_metadata.get("actor_config")
    if rl is not None and rl.is_multimodal and metadata is not None and not metadata.reads_images:
        yield Violation(
            "model_of_images",
            {"rl_config.is_multimodal": True},
            f"rl_config.is_multimodal is true, but {metadata.folder} is a model of text",
            ({"rl_config.is_multimodal": False},),
        )
    if rl is None or not rl.use_remove_padding:
        return
    if rl.use_prefix_grouper and actor.context_parallel_size > 1 and actor.context_parallel_algo != "ulysses_cp_algo":
        yield Violation(
            "prefixes_are_whole",
            {"rl_config.use_prefix_grouper": True, "actor_config.context_parallel_algo": actor.context_parallel_algo},
            f"rl_config.use_prefix_grouper with actor_config.context_parallel_size ({actor.context_parallel_size}) needs "
            "context_parallel_algo: ulysses_cp_algo. Ring attention passes on slices of every sequence, and a token "
            "that several sequences share would have a place in none of them",
            ({"rl_config.use_prefix_grouper": False}, {"actor_config.context_parallel_algo": "ulysses_cp_algo"}),
        )


def _prediction_layers(run: Run) -> Iterator[Violation]:
    cfg = run.config
    count, rl, none = cfg.actor_config.mtp_num_layers, cfg.rl_config, {"megatron_training.mtp_num_layers": 0}
    if count and cfg.is_supervised and cfg.stage not in ("pretrain", "sft"):
        yield Violation(
            "prediction_stage",
            {"megatron_training.mtp_num_layers": count, "megatron_training.stage": cfg.stage},
            f"megatron_training.mtp_num_layers ({count}) trains layers that predict labelled tokens, in stages pretrain, "
            f"sft and RL; stage {cfg.stage} compares answers",
            (none,),
        )
    if count and rl is not None and not cfg.is_supervised and rl.use_prefix_grouper:
        yield Violation(
            "prediction_prefixes",
            {"megatron_training.mtp_num_layers": count, "rl_config.use_prefix_grouper": True},
            f"megatron_training.mtp_num_layers ({count}) excludes rl_config.use_prefix_grouper: a prediction layer reads the "
            "token after each one, so that the end of a shared prompt has no state that is the same in all samples",
            ({"rl_config.use_prefix_grouper": False}, none),
        )
    push = cfg.generate_config.lora_push if cfg.generate_config is not None else None
    if count and not cfg.is_supervised and push == "adapter":
        yield Violation(
            "prediction_adapters",
            {"megatron_training.mtp_num_layers": count, "generate_config.lora_push": "adapter"},
            f"megatron_training.mtp_num_layers ({count}) excludes generate_config.lora_push: adapter, as vLLM's adapters have "
            "no prediction layers",
            ({"generate_config.lora_push": "merged"}, none),
        )


def _roles(run: Run) -> Iterator[Violation]:
    cfg = run.config
    rl = cfg.rl_config
    if rl is None or cfg.is_supervised:
        return
    if rl.use_integrated_worker:
        if rl.reference_resource is not None:
            yield Violation(
                "integrated_reference",
                {"rl_config.use_integrated_worker": True, "rl_config.reference_resource": rl.reference_resource.num_npus},
                "rl_config.reference_resource must be left out while use_integrated_worker is true: the "
                "reference shares the actor's "
                "devices",
                ({"rl_config.reference_resource": None},),
            )
        # only keys of the file count: cfg.ref_config is the actor's where there is no such group
        if "ref_config" in cfg.set_keys:
            yield Violation(
                "integrated_reference",
                {"rl_config.use_integrated_worker": True, "ref_config": "present"},
                "the group ref_config must be left out while rl_config.use_integrated_worker is true: the "
                "reference uses the actor's "
                "settings (its weights: rl_config.integrated_mode_config.ref_model_load_path)",
                ({"ref_config": None},),
            )
        if rl.rollout_resource is not None:
            yield Violation(
                "integrated_rollout",
                {"rl_config.use_integrated_worker": True, "rl_config.rollout_resource": rl.rollout_resource.num_npus},
                "rl_config.rollout_resource must be left out while use_integrated_worker is true: the rollout shares the "
                "actor's devices",
                ({"rl_config.rollout_resource": None}, {"rl_config.use_integrated_worker": False}),
            )
        if rl.reward_resource is not None and cfg.reward_config is None:
            yield Violation(
                "reward_group",
                {"rl_config.reward_resource": rl.reward_resource.num_npus, "reward_config": None},
                "rl_config.reward_resource is set but there is no group reward_config for the reward model",
                ({"rl_config.reward_resource": None},),
            )
    else:
        if rl.integrated_mode_config is not None:
            yield Violation(
                "integrated_mode",
                {"rl_config.use_integrated_worker": False, "rl_config.integrated_mode_config": "present"},
                "rl_config.integrated_mode_config must be left out while use_integrated_worker is false",
                ({"rl_config.integrated_mode_config": None},),
            )
        if rl.reference_resource is not None and "ref_config" not in cfg.set_keys:
            yield Violation(
                "own_role_group",
                {"rl_config.reference_resource": rl.reference_resource.num_npus, "ref_config": None},
                "rl_config.reference_resource is set but there is no group ref_config for the reference",
                ({"rl_config.reference_resource": None},),
            )
    if rl.share_backbone and not cfg.actor_config.lora_target_modules:
        yield Violation(
            "share_backbone_lora",
            {"rl_config.share_backbone": True, "megatron_training.lora_target_modules": cfg.actor_config.lora_target_modules},
            "rl_config.share_backbone needs megatron_training.lora_target_modules: the reference is the actor "
            "with its adapters off",
            ({"rl_config.share_backbone": False},),
        )
    # raises nothing: names and plug-ins were looked up when the file was loaded
    objective = run.objective
    assert objective is not None
    # with a coefficient of 0 no stage has a reference, so that there is nothing to object to
    if rl.share_backbone and rl.init_kl_coef and not objective.needs_reference:
        yield Violation(
            "share_backbone_stage",
            {"rl_config.share_backbone": True, "megatron_training.stage": cfg.stage},
            f"rl_config.share_backbone has no place in stage {cfg.stage}, which has no reference model",
            ({"rl_config.share_backbone": False},),
        )
    if objective.has_critic and cfg.critic_config is None:
        yield Violation(
            "critic_group",
            {"rl_config.adv_estimator": rl.adv_estimator, "critic_config": None},
            f"rl_config.adv_estimator {rl.adv_estimator} needs the group critic_config: it learns the values",
        )


def _dedicated_devices(run: Run) -> Iterator[Violation]:
    """Check roles with dedicated devices."""
    cfg = run.config
    rl, generate = cfg.rl_config, cfg.generate_config
    if rl is None or generate is None or cfg.is_supervised:
        return
    for name in ("rollout", "reference", "critic", "reward", "teacher", "judge"):
        resource = getattr(rl, f"{name}_resource")
        if resource is not None and resource.num_npus is not None and resource.num_npus < 1:
            key = f"rl_config.{name}_resource.num_npus"
            yield Violation(
                "apart_positive", {key: resource.num_npus}, f"{key} ({resource.num_npus}) must be at least 1", ({key: 1},)
            )
    # rules also run for numbers that are out of range, so no divisor may be below 1
    devices, tensor = run.placement.dedicated.get("rollout"), generate.infer_tensor_parallel_size
    if devices is not None and tensor >= 1 and devices % tensor:
        keys = {"rl_config.rollout_resource.num_npus": devices, "generate_config.infer_tensor_parallel_size": tensor}
        yield Violation(
            "rollout_devices",
            keys,
            f"rl_config.rollout_resource.num_npus ({devices}) must be divisible by "
            f"generate_config.infer_tensor_parallel_size ({tensor}): a server has that many devices",
            # rounded up, which leaves one server at least
            ({"rl_config.rollout_resource.num_npus": -(-devices // tensor) * tensor},),
        )
    judge = run.placement.layouts.get("judge")
    if judge is not None and judge.tensor >= 1 and (judge.num_npus < judge.tensor or judge.num_npus % judge.tensor):
        name = "judge_resource" if judge.dedicated else "actor_resource"
        yield Violation(
            "judge_devices",
            {f"rl_config.{name}.num_npus": judge.num_npus, "rl_config.judge_tensor_parallel_size": judge.tensor},
            f"rl_config.{name}.num_npus ({judge.num_npus}) must be divisible by rl_config.judge_tensor_parallel_size "
            f"({judge.tensor}): an engine of the judge has that many devices",
            ({"rl_config.judge_tensor_parallel_size": math.gcd(judge.num_npus, judge.tensor)},),
        )
    if rl.served_judge is not None and rl.rule_reward and "judge" in rl.verifier_function:
        rest = [(name, weight) for name, weight in zip(rl.verifier_function, rl.verifier_weight) if name != "judge"]
        names, weights = ([pair[item] for pair in rest] for item in (0, 1))
        yield Violation(
            "served_judge_name",
            {"rl_config.judge_model": rl.judge_model, "rl_config.verifier_function": rl.verifier_function},
            "rl_config.verifier_function has judge, the client of a server at judge_url; a judge that the run serves is added "
            "by judge_model alone, with judge_weight",
            ({"rl_config.verifier_function": names, "rl_config.verifier_weight": weights},),
        )
    if run.placement.dedicated.get("ref") is not None and (rl.share_backbone or rl.sync_ref_model):
        name = "share_backbone" if rl.share_backbone else "sync_ref_model"
        yield Violation(
            "reference_beside_actor",
            {"rl_config.reference_resource": run.placement.dedicated.get("ref"), f"rl_config.{name}": True},
            f"rl_config.{name} needs the reference on the actor's devices; leave rl_config.reference_resource out",
            ({"rl_config.reference_resource": None}, {f"rl_config.{name}": False}),
        )
    if run.placement.disaggregated and generate.infer_expert_parallel_size > 1:
        value = generate.infer_expert_parallel_size
        yield Violation(
            "server_experts",
            {"generate_config.infer_expert_parallel_size": value},
            f"generate_config.infer_expert_parallel_size ({value}) must be 1 for rollout servers, each of which holds all "
            "experts on its own devices",
            ({"generate_config.infer_expert_parallel_size": 1},),
        )
    yield from _servers(run)


def _servers(run: Run) -> Iterator[Violation]:
    """Check standalone servers, which were started by hand."""
    cfg = run.config
    generate = cfg.generate_config
    assert generate is not None
    hosts, ports = generate.vllm_server_host, generate.vllm_server_port
    if hosts is None:
        return
    if run.placement.dedicated.get("rollout") is not None:
        yield Violation(
            "one_kind_of_server",
            {"generate_config.vllm_server_host": hosts, "rl_config.rollout_resource": run.placement.dedicated.get("rollout")},
            "generate_config.vllm_server_host and rl_config.rollout_resource exclude each other: the rollout is on servers "
            "that were started by hand, or on devices of this run",
            ({"rl_config.rollout_resource": None}, {"generate_config.vllm_server_host": None}),
        )
    num_hosts, num_ports = (len(value) if isinstance(value, list) else 1 for value in (hosts, ports))
    if not num_hosts or not num_ports or (num_hosts != num_ports and 1 not in (num_hosts, num_ports)):
        yield Violation(
            "server_ports",
            {"generate_config.vllm_server_host": hosts, "generate_config.vllm_server_port": ports},
            f"generate_config.vllm_server_port has {num_ports} entries for {num_hosts} hosts; give one for all or one for each",
        )
    wrong = [port for port in (ports if isinstance(ports, list) else [ports]) if not 0 < port < 65536]
    if wrong:
        key = "generate_config.vllm_server_port"
        yield Violation("server_port", {key: ports}, f"{key} ({wrong[0]}) must lie in 1..65535", ({key: 8000},))


def _rollout_modes(run: Run) -> Iterator[Violation]:
    cfg = run.config
    rl, generate = cfg.rl_config, cfg.generate_config
    if rl is None or generate is None or cfg.is_supervised:
        return
    # upstream's rule: a response that continues in a later rollout loses its position
    if rl.partial_rollout_max_split > 1 and rl.guarantee_order:
        yield Violation(
            "partial_rollout_order",
            {"rl_config.partial_rollout_max_split": rl.partial_rollout_max_split, "rl_config.guarantee_order": True},
            f"rl_config.partial_rollout_max_split ({rl.partial_rollout_max_split}) above 1 and "
            "rl_config.guarantee_order exclude each other",
            ({"rl_config.partial_rollout_max_split": 1}, {"rl_config.guarantee_order": False}),
        )
    if rl.partial_rollout_max_split > 1 and rl.over_sample_rate > rl.partial_rollout_max_split:
        keys: dict[str, object] = {
            "rl_config.over_sample_rate": rl.over_sample_rate,
            "rl_config.partial_rollout_max_split": rl.partial_rollout_max_split,
        }
        yield Violation(
            "over_sample_rate",
            keys,
            f"rl_config.over_sample_rate ({rl.over_sample_rate:g}) must be at most rl_config.partial_rollout_max_split "
            f"({rl.partial_rollout_max_split}): prompts would wait for more iterations than tokens may be old",
            ({"rl_config.over_sample_rate": 1.0},),
        )
    if rl.partial_rollout_max_split > 1 and cfg.actor_config.num_layers_per_virtual_pipeline_stage:
        yield Violation(
            "partial_rollout_vpp",
            {
                "rl_config.partial_rollout_max_split": rl.partial_rollout_max_split,
                "actor_config.num_layers_per_virtual_pipeline_stage": cfg.actor_config.num_layers_per_virtual_pipeline_stage,
            },
            "rl_config.partial_rollout_max_split above 1 and num_layers_per_virtual_pipeline_stage exclude each other",
            ({"rl_config.partial_rollout_max_split": 1},),
        )
    if rl.spare_samples_per_prompt and rl.trainer_mode != "async" and rl.partial_rollout_max_split == 1:
        key, mode = "rl_config.spare_samples_per_prompt", rl.trainer_mode
        reason = "which samples end first depends on the time, and this mode repeats exactly"
        yield Violation(
            "spare_samples",
            {key: rl.spare_samples_per_prompt, "rl_config.trainer_mode": mode},
            f"{key} ({rl.spare_samples_per_prompt}) needs rl_config.trainer_mode async, or sync with partial_rollout_max_split "
            f"above 1, but the mode is {mode}" + (f": {reason}" if mode == "one_step_off" else ""),
            ({key: 0}, {"rl_config.trainer_mode": "async"}),
        )
    if rl.keep_spare_samples and rl.spare_samples_per_prompt:
        yield from _second_groups(rl)
    yield from _asynchronous(run)


def _second_groups(rl: RLConfig) -> Iterator[Violation]:
    """Check that the second group of a prompt has room in a later iteration."""
    key, spare, size = "rl_config.keep_spare_samples", rl.spare_samples_per_prompt, rl.n_samples_per_prompt
    if spare > size:
        yield Violation(
            "second_group_size",
            {"rl_config.spare_samples_per_prompt": spare, "rl_config.n_samples_per_prompt": size},
            f"rl_config.spare_samples_per_prompt ({spare}) must be at most n_samples_per_prompt ({size}) with {key}: the "
            "second group of a prompt has as many samples as the first",
            ({"rl_config.spare_samples_per_prompt": size},),
        )
    name, room = "rl_config.over_sample_rate", rl.over_sample_rate
    if rl.trainer_mode == "async":
        name, room = "rl_config.max_off_policy_threshold", rl.max_off_policy_threshold
    if room < 1:
        yield Violation(
            "second_group_room",
            {key: True, name: room},
            f"{name} ({room:g}) must be at least 1 with {key}: the second group of a prompt trains in a later iteration",
            ({name: 1.0}, {key: False}),
        )
    if rl.trainer_mode == "async" and rl.max_off_policy_strategy == "wait":
        yield Violation(
            "second_group_order",
            {key: True, "rl_config.max_off_policy_strategy": "wait"},
            f"rl_config.max_off_policy_strategy wait and {key} exclude each other: groups in strict order wait for the samples "
            "that were to continue later",
            ({"rl_config.max_off_policy_strategy": "pace"},),
        )


def _asynchronous(run: Run) -> Iterator[Violation]:
    """Check the modes in which responses are generated while others train."""
    cfg = run.config
    rl, actor = cfg.rl_config, cfg.actor_config
    assert rl is not None
    mode = rl.trainer_mode
    if mode != "sync" and rl.partial_rollout_max_split > 1:
        yield Violation(
            "partial_rollout_mode",
            {"rl_config.trainer_mode": mode, "rl_config.partial_rollout_max_split": rl.partial_rollout_max_split},
            f"rl_config.partial_rollout_max_split ({rl.partial_rollout_max_split}) splits the rollouts of trainer_mode sync; "
            f"with trainer_mode {mode} responses are generated while others train, and rl_config.partial_rollout lets new "
            "weights interrupt them",
            ({"rl_config.partial_rollout_max_split": 1},),
        )
    if run.placement.disaggregated and rl.partial_rollout_max_split > 1:
        yield Violation(
            "partial_rollout_apart",
            {"rl_config.partial_rollout_max_split": rl.partial_rollout_max_split, "the rollout": "on devices of its own"},
            f"rl_config.partial_rollout_max_split ({rl.partial_rollout_max_split}) splits rollouts on the training devices; "
            "with rollout servers set rl_config.trainer_mode: async",
            ({"rl_config.partial_rollout_max_split": 1},),
        )
    # true has become one_step_off by now where trainer_mode was left at sync (spellings.py)
    if rl.async_generate is not None and rl.async_generate != (mode == "one_step_off"):
        yield Violation(
            "async_generate_mode",
            {"rl_config.async_generate": rl.async_generate, "rl_config.trainer_mode": mode},
            f"rl_config.async_generate ({str(rl.async_generate).lower()}) says the same as rl_config.trainer_mode ({mode}), "
            "and the two differ",
            ({"rl_config.async_generate": None},),
        )
    limit = rl.off_policy_token_limit
    if mode == "one_step_off" and limit is not None and limit < 1:
        yield Violation(
            "token_limit_one_step",
            {"rl_config.trainer_mode": mode, "rl_config.off_policy_token_limit": limit},
            f"rl_config.off_policy_token_limit ({limit:g}) must be at least 1 with trainer_mode one_step_off, whose tokens are "
            "all one version old: none would train",
            ({"rl_config.off_policy_token_limit": None},),
        )
    if mode != "async":
        return
    # the batch that trains next, and the full versions beyond it
    ahead = int(rl.max_off_policy_threshold) + 1
    if rl.num_warmup_batches > ahead:
        yield Violation(
            "warmup_batches",
            {
                "rl_config.num_warmup_batches": rl.num_warmup_batches,
                "rl_config.max_off_policy_threshold": rl.max_off_policy_threshold,
            },
            f"rl_config.num_warmup_batches ({rl.num_warmup_batches}) may be at most {ahead}, as many as "
            f"rl_config.max_off_policy_threshold ({rl.max_off_policy_threshold:g}) lets the rollout be ahead",
            ({"rl_config.num_warmup_batches": ahead},),
        )
    step = rl.parameter_sync_step
    for name in ("save_interval", "eval_interval"):
        every = getattr(actor, name)
        used = actor.save if name == "save_interval" else actor.has_held_out_data
        if used and every and every % step:
            yield Violation(
                f"sync_step_{name}",
                {f"actor_config.{name}": every, "rl_config.parameter_sync_step": step},
                f"actor_config.{name} ({every}) must be a multiple of rl_config.parameter_sync_step ({step}): between two "
                "pushes the rollout engine holds other weights than the trainer",
                ({f"actor_config.{name}": -(-every // step) * step}, {"rl_config.parameter_sync_step": 1}),
            )


def _profiler(run: Run) -> Iterator[Violation]:
    cfg = run.config
    profiler = cfg.profiler_config.integrated
    for stage in [profiler.stage] if isinstance(profiler.stage, str) else profiler.stage:
        if stage not in PROFILER_STAGES:
            yield Violation(
                "profiler_stage",
                {"profiler_config.integrated.stage": profiler.stage},
                unknown_value("profiler_config.integrated.stage", stage, PROFILER_STAGES),
                ({"profiler_config.integrated.stage": "all"},),
            )
    if profiler.profile and not (profiler.profile_with_cpu or profiler.profile_with_npu):
        yield Violation(
            "profiler_activity",
            {"profiler_config.integrated.profile_with_cpu": False, "profiler_config.integrated.profile_with_npu": False},
            "profiler_config.integrated.profile_with_cpu and profile_with_npu are both false: nothing would be recorded",
            ({"profiler_config.integrated.profile_with_cpu": True},),
        )


def _dumps(run: Run) -> Iterator[Violation]:
    cfg = run.config
    dumps = cfg.msprobe_config
    if not dumps.msprobe:
        return
    for first, last in (("step_start", "step_end"), ("token_range_start", "token_range_end")):
        if getattr(dumps, first) > getattr(dumps, last):
            keys = {f"msprobe_config.{name}": getattr(dumps, name) for name in (first, last)}
            message = f"msprobe_config.{first} ({getattr(dumps, first)}) is after {last} ({getattr(dumps, last)})"
            yield Violation("dump_range", keys, message, ({f"msprobe_config.{last}": getattr(dumps, first)},))
    if not dumps.actor_infer_dump or cfg.is_supervised:
        return
    if run.placement.disaggregated:
        yield Violation(
            "dump_engine",
            {"msprobe_config.actor_infer_dump": True},
            "msprobe_config.actor_infer_dump needs the rollout engine in the workers, not in servers of its own",
            ({"msprobe_config.actor_infer_dump": False},),
        )
    if cfg.generate_config is not None and not cfg.generate_config.enforce_eager:
        yield Violation(
            "dump_engine",
            {"msprobe_config.actor_infer_dump": True, "generate_config.enforce_eager": False},
            "msprobe_config.actor_infer_dump needs generate_config.enforce_eager: true; a captured graph calls no hooks",
            ({"generate_config.enforce_eager": True},),
        )


def _muon(run: Run) -> Iterator[Violation]:
    """Check that every matrix is in one piece, or in parts that can be put together."""
    cfg = run.config
    roles = {"actor_config": cfg.actor_config} | ({} if cfg.critic_config is None else {"critic_config": cfg.critic_config})
    for role, config in roles.items():
        if config.optimizer != "muon":
            continue
        reasons = {
            "use_distributed_optimizer": "splits weights without regard to their rows and columns",
            "moe_grouped_gemm": "keeps the experts of a rank in one weight",
            "lora_target_modules": "adapters train with adam",
        }
        if cfg.platform == "npu":
            reasons |= {"swap_optimizer": "swaps the state of AdamW", "reuse_fp32_param": "needs the AdamW of MindSpeed"}
        for name, reason in reasons.items():
            if value := getattr(config, name):
                shown = str(value).lower() if isinstance(value, bool) else str(value)
                yield Violation(
                    "muon_matrices",
                    {f"{role}.optimizer": "muon", f"{role}.{name}": value},
                    f"{role}.optimizer muon excludes {role}.{name} ({shown}): {reason}",
                    ({f"{role}.{name}": None if name == "lora_target_modules" else False}, {f"{role}.optimizer": "adam"}),
                )


def _adapters(run: Run) -> Iterator[Violation]:
    cfg = run.config
    targets = cfg.actor_config.lora_target_modules or []
    for name in targets:
        if name not in LORA_TARGETS:
            yield Violation(
                "lora_targets",
                {"actor_config.lora_target_modules": targets},
                unknown_value("actor_config.lora_target_modules", name, LORA_TARGETS),
                ({"actor_config.lora_target_modules": list(LORA_TARGETS)},),
            )
    if cfg.actor_config.moe_alltoall_overlap_comm and {"linear_fc1", "linear_fc2"} & set(targets):
        yield Violation(
            "lora_overlap",
            {"actor_config.lora_target_modules": targets, "actor_config.moe_alltoall_overlap_comm": True},
            "actor_config.moe_alltoall_overlap_comm has expert layers of its own, which have no adapters; "
            "leave it out with linear_fc1 or linear_fc2 in lora_target_modules",
            ({"actor_config.moe_alltoall_overlap_comm": False},),
        )
    yield from _pushed_adapters(run)
    rl = cfg.rl_config
    if rl is not None and not cfg.is_supervised and rl.share_backbone and rl.sync_ref_model:
        yield Violation(
            "share_backbone_sync",
            {"rl_config.share_backbone": True, "rl_config.sync_ref_model": True},
            "rl_config.share_backbone and rl_config.sync_ref_model exclude each other: the reference is the frozen base of the "
            "adapters and cannot follow the actor",
            ({"rl_config.sync_ref_model": False}, {"rl_config.share_backbone": False}),
        )


def _pushed_adapters(run: Run) -> Iterator[Violation]:
    cfg = run.config
    actor, generate = cfg.actor_config, cfg.generate_config
    if generate is None or cfg.is_supervised or generate.lora_push == "merged":
        return
    requested = {"generate_config.lora_push": "adapter"}
    merged = {"generate_config.lora_push": "merged"}
    if not actor.lora_target_modules:
        yield Violation(
            "lora_push_needs_lora",
            requested | {"actor_config.lora_target_modules": None},
            "generate_config.lora_push: adapter needs adapters; set lora_target_modules or leave it out",
            (merged,),
        )
    known = cfg.model_metadata.get("actor_config")
    reasons = {
        "the rollout servers take merged weights": run.placement.disaggregated,
        "the engine takes no adapters of experts": bool(actor.num_experts),
        "the engine takes no adapters of a vision tower": bool(actor.trained_tower_parts),
        "the engine takes no adapters of gated delta nets": known is not None and known.shape.linear_heads is not None,
        # the largest of vLLM's MaxLoRARanks
        f"the engine takes adapters of rank 512 at most, and lora_r is {actor.lora_r}": actor.lora_r > 512,
    }
    for reason, holds in reasons.items():
        if holds:
            yield Violation(
                "lora_push_adapter", requested, f"generate_config.lora_push: adapter cannot be used here: {reason}", (merged,)
            )


def _split(run: Run) -> Iterator[Violation]:
    cfg = run.config
    try:
        read_split(cfg.actor_config.split)
    except ValueError as error:
        yield Violation(
            "split_shares",
            {"actor_config.split": cfg.actor_config.split},
            f"actor_config.{error}",
            ({"actor_config.split": "100,0,0"},),
        )


def _length(run: Run) -> Iterator[Violation]:
    cfg = run.config
    epochs, iters = cfg.actor_config.train_epochs, cfg.actor_config.train_iters
    if epochs is None:
        return
    if iters is not None:
        yield Violation(
            "one_length",
            {"actor_config.train_epochs": epochs, "actor_config.train_iters": iters},
            f"actor_config.train_epochs ({epochs:g}) and actor_config.train_iters ({iters}) say the length of the run twice",
            ({"actor_config.train_epochs": None}, {"actor_config.train_iters": None}),
        )
    if cfg.stage == "pretrain":
        yield Violation(
            "epochs_of_rows",
            {"megatron_training.train_epochs": epochs, "megatron_training.stage": cfg.stage},
            f"megatron_training.train_epochs ({epochs:g}) counts passes over rows; stage pretrain takes train_iters",
            ({"megatron_training.train_epochs": None},),
        )


def _rates(run: Run) -> Iterator[Violation]:
    cfg = run.config
    actor = cfg.actor_config
    # Megatron's scheduler asserts both, without a word, and only once the model is built
    for name in ("min_lr", "lr_warmup_init"):
        value = getattr(actor, name)
        if actor.lr is not None and value > actor.lr:
            yield Violation(
                "rates",
                {f"actor_config.{name}": value, "actor_config.lr": actor.lr},
                f"actor_config.{name} ({value:g}) must be at most actor_config.lr ({actor.lr:g})",
                ({f"actor_config.{name}": actor.lr}, {"actor_config.lr": value}),
            )


def _data(run: Run) -> Iterator[Violation]:
    cfg = run.config
    path = cfg.actor_config.data_path
    if not isinstance(path, list):
        return
    if not cfg.is_supervised:
        text = f"megatron_training.data_path is a list, but reinforcement learning reads one prefix or file: {str(path)[:80]}"
        yield Violation("data_path", {"megatron_training.data_path": path}, text)
    elif not any(isinstance(item, str) and not is_weight(item) for item in path):
        text = f"megatron_training.data_path names no prefix: {str(path)[:80]}"
        yield Violation("data_path", {"megatron_training.data_path": path}, text)


def _held_out(run: Run) -> Iterator[Violation]:
    cfg = run.config
    actor = cfg.actor_config
    if cfg.is_supervised and actor.skip_train and not actor.has_held_out_data:
        keys = {"megatron_training.skip_train": True, "megatron_training.eval_data_path": None}
        text = "megatron_training.skip_train: there is nothing to evaluate on; set eval_data_path or split"
        yield Violation("held_out", keys, text, ({"megatron_training.skip_train": False},))


#: paths that are empty by default
_EMPTY_PATHS = frozenset(("ref_model", "profile_save_path", "wandb_save_dir", "swanlab_save_dir"))


def _paths(run: Run) -> Iterator[Violation]:
    """Check that no path is blank or has characters that no name of a file can have."""
    cfg = run.config
    for group, values in cfg.as_written().items():
        for name, value in values.items():
            key = f"generate_config.{name}" if group == "sampling_config" else name if group == "run" else f"{group}.{name}"
            written = value if isinstance(value, list) else [value]
            inner = value.items() if isinstance(value, Mapping) else ()
            named = [(key, item) for item in written] if name in PATH_KEYS else []
            named += [(f"{key}.{other}", item) for other, item in inner if other in PATH_KEYS]
            for path, item in named:
                if not isinstance(item, str) or item == "" and path.rpartition(".")[2] in _EMPTY_PATHS:
                    continue
                if not item.strip() or any(ord(char) < 32 for char in item):
                    text = f"{path} is {item!r}, which names no file or folder"
                    yield Violation("path", {path: item}, text, ({path: None},))


RUN_RULES = (
    _stage,
    _length,
    _split,
    _number_format,
    _lengths,
    _packing,
    _prediction_layers,
    _roles,
    _dedicated_devices,
    _rollout_modes,
    *ROLLOUT_RULES,
    _adapters,
    _muon,
    _profiler,
    _dumps,
    _rates,
    _data,
    _paths,
    _held_out,
)
