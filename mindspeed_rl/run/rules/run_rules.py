"""Rules between keys of a run file about roles, lengths, number formats and the rollout."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import reduce

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.errors import unknown_value
from mindspeed_rl.config.keys import PATH_KEYS, ROLE_GROUPS
from mindspeed_rl.config.keys.diagnostics import PROFILER_STAGES
from mindspeed_rl.config.keys.megatron import LORA_TARGETS, NEEDED_BY_MINDSPEED, is_weight, read_split
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.run.placement import RolloutLayout
from mindspeed_rl.run.record import Run
from mindspeed_rl.run.rules.rollout_rules import ROLLOUT_RULES
from mindspeed_rl.run.rules.training_engine_rules import find_idle_reason, training_engine_rules
from mindspeed_rl.run.rules.violation import Broken, needs, violate


def _stage(run: Run) -> Iterator[Broken]:
    cfg = run.config
    if cfg.stage is None:
        yield violate("is_set", "[megatron_training.stage:name] is not set")
        return
    for group in () if cfg.is_supervised else ("rl_config", "generate_config"):
        if getattr(cfg, group) is None:
            text = f"stage [megatron_training.stage:value] needs the group {group}"
            yield violate("group_needed", text)


def _number_format(run: Run) -> Iterator[Broken]:
    """Check that trainer and rollout engine compute in the same formats."""
    actor, generate = run.config.actor_config, run.config.generate_config
    if generate is None:
        return
    if actor.bf16 != (generate.dtype == "bfloat16"):
        yield violate(
            "same_number_format",
            "[bf16] and [dtype] must agree: trainer and rollout engine compute in the same format",
            {"dtype": "bfloat16" if actor.bf16 else "float32", "bf16": not actor.bf16},
        )
    trained, sampled = actor.fp32_lm_head, generate.fp32_lm_head
    if sampled is not None and not run.config.is_supervised and sampled != trained:
        yield violate(
            "same_head_format",
            "[generate_config.fp32_lm_head] must be the actor's: trainer and rollout engine compute logits in the same format",
            {"actor_config.fp32_lm_head": sampled, "generate_config.fp32_lm_head": trained},
            keys={"actor_config.fp32_lm_head": trained},
        )


@needs("rl_config", "generate_config")
def _lengths(run: Run) -> Iterator[Broken]:
    prompt, seq, response = run.rl.max_prompt_length, run.config.actor_config.seq_length, run.config.response_limit
    max_len = run.generate.max_model_len
    # long enough for both, or the other rule would break next
    longer = {"max_model_len": max(prompt + response, seq or 0)}
    if seq is not None and max_len < seq:
        text = "[max_model_len] must be at least [seq_length]"
        yield violate("seq_length_fits_engine", text, longer | {"seq_length": max_len})
    if prompt > max_len:
        text = "[max_prompt_length] must be at most [max_model_len]: a longer prompt leaves no room for a response"
        # proposed only where it leaves room for a prompt
        shorter = {"max_prompt_length": max_len - response} if max_len > response else {}
        yield violate("prompts_fit_engine", text, longer | shorter)


def _packing(run: Run) -> Iterator[Broken]:
    actor, rl = run.config.actor_config, run.config.rl_config
    if actor.neat_pack and not (actor.pack and actor.reset_attention_mask):
        text = "[neat_pack:name] needs [pack:last] and [reset_attention_mask:last]"
        yield violate("neat_pack", text, None, {"pack": True, "reset_attention_mask": True})
    if rl is not None and rl.use_remove_padding and rl.use_prefix_grouper and actor.has_ring_attention:
        yield violate(
            "prefixes_are_whole",
            f"[use_prefix_grouper:name] with actor_config.context_parallel_size ({actor.context_parallel_size}) needs "
            "[actor_config.context_parallel_algo:last]: ulysses_cp_algo. Ring attention passes on slices of every sequence, "
            "and a token that several sequences share would have a place in none of them",
            {"use_prefix_grouper": False, "actor_config.context_parallel_algo": "ulysses_cp_algo"},
        )


def _images(run: Run) -> Iterator[Broken]:
    """Check that every role sees the images of the rows, and that a tower which is left out exists."""
    cfg, rl = run.config, run.config.rl_config
    metadata = cfg.model_metadata.get("actor_config")
    if rl is not None and rl.is_multimodal and metadata is not None and not cfg.reads_images:
        kind = "read without its tower (language_model_only)" if metadata.reads_images else "a model of text"
        text = f"[is_multimodal:name] is true, but {metadata.folder} is {kind}"
        yield violate("model_of_images", text, {"is_multimodal": False})
    # a model whose files are not on this machine may be one of images
    has_images = cfg.reads_images or metadata is None and not cfg.actor_config.language_model_only
    for group in ROLE_GROUPS:
        is_actor, role = group == "actor_config", getattr(cfg, group)
        # a role without a group has the actor's keys
        if role is None or not role.language_model_only or not is_actor and group not in cfg.set_keys:
            continue
        key, own = f"{group}.language_model_only", cfg.model_metadata.get(group)
        if own is not None and not own.reads_images and (is_actor or "language_model_only" in cfg.set_keys[group]):
            text = f"[{key}:name] is true, but {own.folder} has no vision tower to leave out"
            yield violate("language_model_only", text, {key: False})
        elif not is_actor and has_images:
            text = f"[{key}:name] is true, but [actor_config.language_model_only:name] is not: images of rows would be left out"
            yield violate("role_without_tower", text, {key: False}, {"actor_config.language_model_only": True})


def _dynamic_context(run: Run) -> Iterator[Broken]:
    """Check what excludes context-parallel sizes that differ between micro-batches."""
    cfg, key = run.config, "megatron_training.dynamic_context_parallel"
    groups = {"actor_config", *(group for group in ROLE_GROUPS if group in cfg.set_keys)}
    roles: list[MegatronConfig] = [getattr(cfg, group) for group in groups]
    if not any(role.has_dynamic_context for role in roles):
        return
    if cfg.is_supervised:
        text = f"[{key}] needs a token budget of micro-batches, which only reinforcement learning has (use_dynamic_bsz)"
        yield violate("dynamic_context", text, {key: False})
        return
    rl = run.rl
    for name, allowed, reason in (
        ("use_remove_padding", True, "a padded row is as wide as the longest"),
        ("use_dynamic_bsz", True, "a row takes the devices whose part of the token budget holds it"),
        ("use_prefix_grouper", False, "samples of a prompt of different lengths would have to share devices"),
        ("router_replay.mode", "disabled", "recorded experts are placed by the fixed size"),
    ):
        if reduce(getattr, name.split("."), rl) != allowed:
            path = f"rl_config.{name}"
            text = f"[{key}] cannot be used with [{path}]: {reason}"
            yield violate("dynamic_context", text, {path: allowed}, {key: False})
    if cfg.actor_config.mtp_num_layers:
        text = f"[{key}] excludes [megatron_training.mtp_num_layers]: prediction layers sum their losses over the fixed size"
        yield violate("dynamic_context", text, {key: False}, {"megatron_training.mtp_num_layers": 0})
    if cfg.msprobe_config.msprobe:
        text = f"[{key}] excludes [msprobe_config.msprobe]: dumps join the slices of the fixed size"
        yield violate("dynamic_context", text, {key: False}, {"msprobe_config.msprobe": False})


def _prediction_layers(run: Run) -> Iterator[Broken]:
    """Check what excludes layers that predict further tokens."""
    cfg, rl, generate, count = run.config, run.config.rl_config, run.config.generate_config, "megatron_training.mtp_num_layers"
    if not cfg.actor_config.mtp_num_layers:
        return
    if cfg.is_supervised and cfg.stage not in ("pretrain", "sft"):
        yield violate(
            "prediction_stage",
            f"[{count}] trains layers that predict labelled tokens, in stages pretrain, sft and RL; stage "
            "[megatron_training.stage:value] compares answers",
            {count: 0},
        )
    if rl is not None and not cfg.is_supervised and rl.use_prefix_grouper:
        yield violate(
            "prediction_prefixes",
            f"[{count}] excludes [use_prefix_grouper:name]: a prediction layer reads the token after each one, so that "
            "the end of a shared prompt has no state that is the same in all samples",
            {"use_prefix_grouper": False, count: 0},
        )
    if generate is not None and not cfg.is_supervised and generate.lora_push == "adapter":
        text = f"[{count}] excludes [lora_push:name]: adapter, as vLLM's adapters have no prediction layers"
        yield violate("prediction_adapters", text, {"lora_push": "merged", count: 0})


@needs("rl_config")
def _roles(run: Run) -> Iterator[Broken]:
    """Check the groups and the devices of the roles."""
    cfg, rl, objective = run.config, run.rl, run.objective
    yield from _integrated_roles(run) if rl.use_integrated_worker else _separate_roles(run)
    if rl.share_backbone and not cfg.actor_config.lora_target_modules:
        text = "[share_backbone:name] needs [lora_target_modules:name]: the reference is the actor with its adapters off"
        yield violate("share_backbone_lora", text, {"share_backbone": False})
    assert objective is not None
    # with a coefficient of 0 no stage has a reference, so that there is nothing to object to
    if rl.share_backbone and rl.init_kl_coef and not objective.needs_ref:
        text = "[share_backbone:name] has no place in stage [megatron_training.stage:value], which has no reference model"
        yield violate("share_backbone_stage", text, {"share_backbone": False})
    if objective.has_critic and cfg.critic_config is None:
        yield violate("critic_group", "[adv_estimator:is] needs the group [critic_config:name]: it learns the values")


def _integrated_roles(run: Run) -> Iterator[Broken]:
    """Check roles that share the actor's workers."""
    rl = run.rl
    if rl.reference_resource is not None:
        yield violate(
            "integrated_reference",
            "[reference_resource:name] must be left out while [use_integrated_worker:last] is true: the reference shares the "
            "actor's devices",
            {"reference_resource": None},
        )
    # only keys of the file count: without the group, cfg.ref_config is the actor's
    if "ref_config" in run.config.set_keys:
        yield violate(
            "integrated_reference",
            "the group [ref_config:name] must be left out while [use_integrated_worker:name] is true: the reference uses the "
            "actor's settings (its weights: rl_config.integrated_mode_config.ref_model_load_path)",
            {"ref_config": None},
        )
    if rl.rollout_resource is not None:
        yield violate(
            "integrated_rollout",
            "[rollout_resource:name] must be left out while [use_integrated_worker:last] is true: the rollout shares the "
            "actor's devices",
            {"rollout_resource": None, "use_integrated_worker": False},
        )
    if rl.reward_resource is not None and run.config.reward_config is None:
        text = "[reward_resource:name] is set without a group [reward_config:name] for the reward model"
        yield violate("reward_group", text, {"reward_resource": None})


def _separate_roles(run: Run) -> Iterator[Broken]:
    """Check roles with workers of their own."""
    rl = run.rl
    if rl.integrated_mode_config is not None:
        text = "[integrated_mode_config:name] must be left out while [use_integrated_worker:last] is false"
        yield violate("integrated_mode", text, {"integrated_mode_config": None})
    if rl.reference_resource is not None and "ref_config" not in run.config.set_keys:
        text = "[reference_resource:name] is set without a group [ref_config:name] for the reference"
        yield violate("own_role_group", text, {"reference_resource": None})


@needs("rl_config", "generate_config")
def _dedicated_devices(run: Run) -> Iterator[Broken]:
    """Check roles with dedicated devices."""
    rl, generate, placement = run.rl, run.generate, run.placement
    for name in ("rollout", "reference", "critic", "reward", "teacher", "judge"):
        resource, key = getattr(rl, f"{name}_resource"), f"rl_config.{name}_resource.num_npus"
        if resource is not None and resource.num_npus is not None and resource.num_npus < 1:
            yield violate("apart_positive", f"[{key}] must be at least 1", {key: 1})
    # rules also run for numbers that are out of range, so no divisor may be below 1
    devices, tensor = placement.dedicated.get("rollout"), generate.infer_tensor_parallel_size
    if devices is not None and tensor >= 1 and devices % tensor:
        yield violate(
            "rollout_devices",
            "[rl_config.rollout_resource.num_npus] must be divisible by [infer_tensor_parallel_size]: a server has "
            "that many devices",
            {"rl_config.rollout_resource.num_npus": -(-devices // tensor) * tensor},  # rounded up: one server at least
        )
    yield from _judge(run)
    if placement.dedicated.get("ref") is not None and (rl.share_backbone or rl.sync_ref_model):
        key = "share_backbone" if rl.share_backbone else "sync_ref_model"
        text = f"[{key}:name] needs the reference on the actor's devices; leave [reference_resource:name] out"
        yield violate("reference_beside_actor", text, {"reference_resource": None, key: False})
    if placement.servers and generate.infer_expert_parallel_size > 1:
        text = (
            "[infer_expert_parallel_size] must be 1 with [vllm_server_host:name]: how standalone servers spread experts over "
            "their devices is set where they are started"
        )
        yield violate("server_experts", text, {"infer_expert_parallel_size": 1})
    yield from _servers(run)


def _judge(run: Run) -> Iterator[Broken]:
    """Check the judge that the run serves."""
    rl, judge = run.rl, run.placement.layouts.get("judge")
    if judge is not None and judge.tensor >= 1 and (judge.num_npus < judge.tensor or judge.num_npus % judge.tensor):
        key = f"rl_config.{'judge' if judge.dedicated else 'actor'}_resource.num_npus"
        text = f"[{key}] must be divisible by [judge_tensor_parallel_size]: an engine of the judge has that many devices"
        yield violate("judge_devices", text, {"judge_tensor_parallel_size": math.gcd(judge.num_npus, judge.tensor)})
    if rl.served_judge is not None and rl.rule_reward and "judge" in rl.verifier_function:
        others = [pair for pair in zip(rl.verifier_function, rl.verifier_weight) if pair[0] != "judge"]
        names, weights = ([pair[item] for pair in others] for item in (0, 1))
        yield violate(
            "served_judge_name",
            "[verifier_function:name] has judge, the client of a server at judge_url; a judge that the run serves is "
            "added only by [judge_model:last], with judge_weight",
            None,
            {"verifier_function": names, "verifier_weight": weights},
        )
    yield from _judge_votes(rl)


def _judge_votes(rl: RLConfig) -> Iterator[Broken]:
    """Check the votes of several judges, or of one that is asked several times."""
    if rl.judge_panel and rl.judge_url is None:
        text = "[judge_panel:name] adds judges to the one at judge_url, which is not set; the first address belongs there"
        yield violate("judge_panel", text, {"judge_panel": []})
    if rl.num_judge_votes and rl.judge_repeats > 1 and not rl.judge_temperature:
        text = "[judge_repeats] asks for more than one vote of a judge, which are all alike at [judge_temperature:is]"
        yield violate("judge_repeats", text, {"judge_temperature": 0.7}, {"judge_repeats": 1})
    if rl.num_judge_votes and rl.judge_quorum is not None and rl.judge_quorum > rl.num_judge_votes:
        text = f"[judge_quorum] is more than the {rl.num_judge_votes} vote(s) about a response: none would have a score"
        yield violate("judge_quorum", text, {"judge_quorum": rl.num_judge_votes})


def _servers(run: Run) -> Iterator[Broken]:
    """Check standalone servers, which were started by hand."""
    hosts, ports = run.generate.vllm_server_host, run.generate.vllm_server_port
    if hosts is None:
        return
    if run.placement.dedicated.get("rollout") is not None:
        yield violate(
            "one_kind_of_server",
            "[vllm_server_host:name] and [rollout_resource:name] exclude each other: the rollout is on servers that were "
            "started by hand, or on devices of this run",
            {"rollout_resource": None, "vllm_server_host": None},
        )
    num_hosts, num_ports = (len(value) if isinstance(value, list) else 1 for value in (hosts, ports))
    if not num_hosts or not num_ports or (num_hosts != num_ports and 1 not in (num_hosts, num_ports)):
        text = f"[vllm_server_port:name] has {num_ports} entries for {num_hosts} hosts; give one for all or one for each"
        yield violate("server_ports", text, keys={"vllm_server_host": hosts})
    wrong = [port for port in (ports if isinstance(ports, list) else [ports]) if not 0 < port < 65536]
    if wrong:
        text = f"[vllm_server_port:name] ({wrong[0]}) must lie in 1..65535"
        yield violate("server_port", text, {"vllm_server_port": 8000})


_SPLIT = "partial_rollout_max_split"
_WHOLE: dict[str, object] = {_SPLIT: 1}


@needs("rl_config", "generate_config")
def _rollout_modes(run: Run) -> Iterator[Broken]:
    """Check how rollouts are split over iterations, and what follows them."""
    rl, is_split = run.rl, run.rl.partial_rollout_max_split > 1
    # upstream's rule: a response that continues in a later rollout loses its position
    if is_split and rl.guarantee_order:
        text = f"[{_SPLIT}] above 1 and [guarantee_order:name] exclude each other"
        yield violate("partial_rollout_order", text, _WHOLE | {"guarantee_order": False})
    if is_split and rl.over_sample_rate > rl.partial_rollout_max_split:
        yield violate(
            "over_sample_rate",
            f"[over_sample_rate] must be at most [{_SPLIT}]: prompts would wait for more iterations than tokens may be old",
            {"over_sample_rate": 1.0},
        )
    if is_split and run.config.actor_config.num_layers_per_virtual_pipeline_stage:
        chunk = "[actor_config.num_layers_per_virtual_pipeline_stage:last]"
        yield violate("partial_rollout_vpp", f"[{_SPLIT}:name] above 1 and {chunk} exclude each other", _WHOLE)
    if rl.spare_samples_per_prompt and rl.trainer_mode != "async" and rl.partial_rollout_max_split == 1:
        reason = ": which samples end first depends on the time, and this mode repeats exactly"
        yield violate(
            "spare_samples",
            "[spare_samples_per_prompt] needs [trainer_mode:name] async, or sync with partial_rollout_max_split above "
            f"1, but the mode is {rl.trainer_mode}{reason if rl.trainer_mode == 'one_step_off' else ''}",
            {"spare_samples_per_prompt": 0, "trainer_mode": "async"},
        )
    if rl.keep_spare_samples and rl.spare_samples_per_prompt:
        yield from _second_groups(run)
    yield from _overlapping_modes(run)
    if rl.trainer_mode == "async":
        yield from _asynchronous(run)
    if rl.elastic_rollout:
        yield from _elastic(run)
    if rl.elastic_training_devices:
        yield from _elastic_training(run)


def _second_groups(run: Run) -> Iterator[Broken]:
    """Check that the second group of a prompt has room in a later iteration."""
    rl, key, is_async = run.rl, "keep_spare_samples", run.rl.trainer_mode == "async"
    if rl.spare_samples_per_prompt > rl.n_samples_per_prompt:
        yield violate(
            "second_group_size",
            f"[spare_samples_per_prompt] must be at most [n_samples_per_prompt:short] with rl_config.{key}: the second group "
            "of a prompt has as many samples as the first",
            {"spare_samples_per_prompt": rl.n_samples_per_prompt},
        )
    name = "max_off_policy_threshold" if is_async else "over_sample_rate"
    if getattr(rl, name) < 1:
        text = f"[{name}] must be at least 1 with [{key}:name]: the second group of a prompt trains in a later iteration"
        yield violate("second_group_room", text, {name: 1.0, key: False})
    if is_async and rl.max_off_policy_strategy == "wait":
        yield violate(
            "second_group_order",
            f"[max_off_policy_strategy:is] and [{key}:name] exclude each other: groups in strict order wait for the "
            "samples that were to continue later",
            {"max_off_policy_strategy": "pace"},
        )


def _overlapping_modes(run: Run) -> Iterator[Broken]:
    """Check that a rollout is split, or generated while others train, in one way."""
    rl, mode = run.rl, run.rl.trainer_mode
    if mode != "sync" and rl.partial_rollout_max_split > 1:
        yield violate(
            "partial_rollout_mode",
            f"[{_SPLIT}] splits the rollouts of trainer_mode sync; with trainer_mode [trainer_mode:value] responses are "
            "generated while others train, and rl_config.partial_rollout lets new weights interrupt them",
            _WHOLE,
        )
    if run.placement.disaggregated and rl.partial_rollout_max_split > 1:
        text = f"[{_SPLIT}] splits rollouts on the training devices; with rollout servers set rl_config.trainer_mode: async"
        yield violate("partial_rollout_apart", text, _WHOLE, keys={"the rollout": "on devices of its own"})
    # true has become one_step_off by now where trainer_mode was left at sync (spellings.py)
    if rl.async_generate is not None and rl.async_generate != (mode == "one_step_off"):
        text = "[async_generate] says the same as [trainer_mode], and the two differ"
        yield violate("async_generate_mode", text, {"async_generate": None})
    limit = rl.off_policy_token_limit
    if mode == "one_step_off" and limit is not None and limit < 1:
        yield violate(
            "token_limit_one_step",
            "[off_policy_token_limit] must be at least 1 with trainer_mode [trainer_mode:value], whose tokens are all one "
            "version old: none would train",
            {"off_policy_token_limit": None},
        )


def _asynchronous(run: Run) -> Iterator[Broken]:
    """Check the mode in which the rollout is several iterations ahead."""
    rl, actor = run.rl, run.config.actor_config
    # the batch that trains next, and the full versions beyond it
    ahead = int(rl.max_off_policy_threshold) + 1
    if rl.num_warmup_batches > ahead:
        yield violate(
            "warmup_batches",
            f"[num_warmup_batches] may be at most {ahead}, as many as [max_off_policy_threshold] lets the rollout be ahead",
            {"num_warmup_batches": ahead},
        )
    step = rl.parameter_sync_step
    for name, is_used in {"save_interval": actor.save, "eval_interval": actor.has_held_out_data}.items():
        every = getattr(actor, name)
        if is_used and every and every % step:
            yield violate(
                f"sync_step_{name}",
                f"[actor_config.{name}] must be a multiple of [parameter_sync_step]: between two pushes the rollout "
                "engine holds other weights than the trainer",
                {f"actor_config.{name}": -(-every // step) * step},
                {"parameter_sync_step": 1},
            )


def _elastic(run: Run) -> Iterator[Broken]:
    """Check servers on the actor's devices, which generate while an iteration waits."""
    rl, key, tensor = run.rl, "elastic_rollout", run.generate.infer_tensor_parallel_size
    if rl.trainer_mode != "async":
        reason = {
            "sync": "the actor's devices generate all responses where rollout_resource is left out",
            "one_step_off": "a run repeats exactly, and how long these devices generate depends on the time",
        }
        yield violate(
            "elastic_mode",
            f"[{key}:name] needs [trainer_mode:name] async; in {rl.trainer_mode} {reason[rl.trainer_mode]}",
            {key: False, "trainer_mode": "async"},
        )
        return
    if run.generate.infer_expert_parallel_size > 1:
        text = f"[{key}:name] needs generate_config.infer_expert_parallel_size: 1 (it is [infer_expert_parallel_size:value]): "
        text += "a server on the actor's devices has all experts"
        yield violate("elastic_experts", text, {key: False}, {"infer_expert_parallel_size": 1})
    devices = run.placement.world_size or 0
    if tensor >= 1 and devices % tensor:
        yield violate(
            "elastic_devices",
            f"[rl_config.actor_resource.num_npus] must be divisible by [infer_tensor_parallel_size] with "
            f"[{key}:name]: a server on the actor's devices has that many of them",
            {key: False},
        )
    # as in `Admission.compute_room`, after a weight sync
    ahead = rl.max_off_policy_threshold + (2 if rl.max_off_policy_strategy == "drop" else 1)
    if rl.elastic_rollout_high > ahead:
        yield violate(
            "elastic_high",
            f"[elastic_rollout_high] may be at most {ahead:g}: [max_off_policy_threshold] lets so many iterations' prompts be "
            "started and not trained",
            {"elastic_rollout_high": ahead},
        )
    if rl.parameter_sync_step > 1:
        yield violate(
            "elastic_sync_step",
            f"[{key}:name] needs rl_config.parameter_sync_step: 1 (it is [parameter_sync_step:value]): between two weight "
            "syncs the trainers have newer weights than the "
            "other servers, and the servers on their devices would generate with these under the older version",
            {"parameter_sync_step": 1},
            {key: False},
        )
    roles = {"actor_config": run.config.actor_config, "critic_config": run.config.critic_config}
    for group in [group for group, role in roles.items() if role is not None and role.async_save]:
        yield violate(
            "elastic_async_save",
            f"[{key}:name] and [{group}.async_save:name] exclude each other: a save in the background reads the training state "
            "that leaves the devices",
            {key: False, f"{group}.async_save": False},
        )
    if "judge" in run.placement.layouts and not run.placement.layouts["judge"].dedicated:
        text = (
            f"[{key}:name] needs [judge_resource:name]: the judge has an engine on the actor's devices, and both would be there"
        )
        yield violate("elastic_judge", text, {key: False})


def _elastic_training(run: Run) -> Iterator[Broken]:
    """Check devices of the rollout that train while it is ahead."""
    rl, key, actor = run.rl, "elastic_training_devices", run.config.actor_config
    off = {key: 0}
    if rl.trainer_mode != "async":
        reason = {
            "sync": "no rollout is ahead of the training",
            "one_step_off": "a run repeats exactly, and when devices move depends on the time",
        }[rl.trainer_mode]
        text = f"[{key}] needs [trainer_mode:name] async; in {rl.trainer_mode} {reason}"
        yield violate("elastic_training_mode", text, {**off, "trainer_mode": "async"})
        return
    rollout, size = run.placement.dedicated.get("rollout"), RolloutLayout.from_server(run.generate).world_size
    if rollout is None:
        yield violate("elastic_training_servers", f"[{key}] needs [rollout_resource:name]: they are devices of it", off)
    elif size >= 1 and (rl.elastic_training_devices % size or rollout - rl.elastic_training_devices < size):
        text = (
            f"[{key}] must be whole servers of {size} device(s), and one server of [rl_config.rollout_resource.num_npus] "
            "must be left"
        )
        # whole replicas of the actor too
        unit = math.lcm(size, max(1, actor.model_parallel_size))
        nearest = min(-(-rl.elastic_training_devices // unit) * unit, (rollout - size) // unit * unit)
        yield violate("elastic_training_whole", text, {key: nearest} if nearest > 0 else off)
    # as in `Admission.compute_room`, after the iteration's own prompts were taken: whole prompts
    ahead = rl.max_off_policy_threshold + (1 if rl.max_off_policy_strategy == "drop" else 0)
    batch = run.plan.num_train_prompts
    ready = math.floor(ahead * batch + 1e-9)
    if batch > 0 and rl.elastic_training_high > ready / batch:
        # not above it, as a rounded number may be
        reachable = math.floor(ready / batch * 10_000) / 10_000
        text = (
            f"[elastic_training_high] may be at most {reachable:g}: [max_off_policy_threshold] lets {ready} prompt(s) be ready "
            f"at the end of updates, of {batch} in an iteration"
        )
        yield violate("elastic_training_high", text, {"elastic_training_high": reachable} if ready else off)
    if rl.parameter_sync_step > 1:
        text = f"[{key}] needs rl_config.parameter_sync_step: 1 (it is [parameter_sync_step:value]): "
        text += "the level is measured before each weight sync"
        yield violate("elastic_training_sync_step", text, {"parameter_sync_step": 1}, off)
    roles = [role for role in (actor, run.config.critic_config) if role is not None]
    if any(role.save is None or role.no_save_optim or role.no_load_optim for role in roles):
        text = (
            f"[{key}] needs [actor_config.save], and that of a critic, with the states of the optimizer, which "
            "no_save_optim and no_load_optim leave out: devices move by a resume"
        )
        yield violate("elastic_training_save", text, off)
    if rl.fault_tolerance.shrink:
        text = f"[{key}] and [rl_config.fault_tolerance.shrink] exclude each other: each chooses the devices of the next resume"
        yield violate("elastic_training_shrink", text, off, {"rl_config.fault_tolerance.shrink": False})


def _profiler(run: Run) -> Iterator[Broken]:
    profiler, group = run.config.profiler_config.integrated, "profiler_config.integrated"
    for stage in [profiler.stage] if isinstance(profiler.stage, str) else profiler.stage:
        if stage not in PROFILER_STAGES:
            text = unknown_value(f"{group}.stage", stage, PROFILER_STAGES)
            yield violate("profiler_stage", text, {f"{group}.stage": "all"}, keys={f"{group}.stage": profiler.stage})
    if profiler.profile and not (profiler.profile_with_cpu or profiler.profile_with_npu):
        yield violate(
            "profiler_activity",
            f"[{group}.profile_with_cpu:name] and profile_with_npu are both false: nothing would be recorded",
            {f"{group}.profile_with_cpu": True},
            keys={f"{group}.profile_with_npu": False},
        )


def _dumps(run: Run) -> Iterator[Broken]:
    dumps, generate, engine = run.config.msprobe_config, run.config.generate_config, "msprobe_config.actor_infer_dump"
    if not dumps.msprobe:
        return
    for first, last in (("step_start", "step_end"), ("token_range_start", "token_range_end")):
        if getattr(dumps, first) > getattr(dumps, last):
            text = f"[{first}] is after [{last}:short]"
            yield violate("dump_range", text, {last: getattr(dumps, first)})
    if not dumps.actor_infer_dump or run.config.is_supervised:
        return
    if run.placement.disaggregated:
        text = f"[{engine}:name] needs the rollout engine in the workers, not in servers of its own"
        yield violate("dump_engine", text, {engine: False})
    if generate is not None and not generate.enforce_eager:
        text = f"[{engine}:name] needs [enforce_eager:name]: true; a captured graph calls no hooks"
        yield violate("dump_engine", text, {"enforce_eager": True})


#: keys that split or join matrices, or that belong to another optimizer -> the reason
_UNLIKE_MUON = {
    "use_distributed_optimizer": "splits weights without regard to their rows and columns",
    "moe_grouped_gemm": "keeps the experts of a rank in one weight",
    "lora_target_modules": "adapters train with adam",
    "reuse_fp32_param": "puts float32 weights together in the step of AdamW",
}
_UNLIKE_MUON_NPU = {"swap_optimizer": "swaps the state of AdamW"}


def _muon(run: Run) -> Iterator[Broken]:
    """Check that every matrix is in one piece, or in parts that can be put together."""
    cfg = run.config
    reasons = _UNLIKE_MUON | (_UNLIKE_MUON_NPU if cfg.platform == "npu" else {})
    roles = {"actor_config": cfg.actor_config, "critic_config": cfg.critic_config}
    for role, config in roles.items():
        if config is None or config.optimizer != "muon":
            continue
        for name, reason in reasons.items():
            if getattr(config, name) and not find_idle_reason(config, name):
                yield violate(
                    "muon_matrices",
                    f"[{role}.optimizer:is] excludes [{role}.{name}]: {reason}",
                    {f"{role}.{name}": None if name == "lora_target_modules" else False},
                    {f"{role}.optimizer": "adam"},
                )


#: keys that leave states of the optimizer on the device, or bring them there -> the reason
_UNLIKE_OFFLOADED = {
    "swap_optimizer": "it brings all states to the device in each step, and the host computes none of them",
    "reuse_fp32_param": "it keeps half of each float32 weight in the bf16 weight on the device",
}


def _offloaded_optimizer(run: Run) -> Iterator[Broken]:
    """Check that one key decides where the states of the optimizer are."""
    cfg = run.config
    for role, config in {"actor_config": cfg.actor_config, "critic_config": cfg.critic_config}.items():
        key = f"{role}.optimizer_offload_fraction"
        for name, reason in _UNLIKE_OFFLOADED.items():
            if config is not None and config.optimizer_offload_fraction and getattr(config, name):
                text = f"[{key}] excludes [{role}.{name}]: {reason}"
                yield violate("offloaded_optimizer", text, {f"{role}.{name}": False, key: 0.0})


def _mindspeed(run: Run) -> Iterator[Broken]:
    """Check what MindSpeed's optimizers need, which the workers would find."""
    cfg = run.config
    roles = {"actor_config": cfg.actor_config, "critic_config": cfg.critic_config} if cfg.platform == "npu" else {}
    for role, config in roles.items():
        # Muon excludes all of it, see above; other engines have an optimizer of their own
        if config is None or config.optimizer == "muon" or config.computes_by_module:
            continue
        for name, other, value, reason in NEEDED_BY_MINDSPEED:
            if getattr(config, name) and getattr(config, other) != value:
                yield violate(
                    "mindspeed_optimizer",
                    f"[{role}.{name}] needs [{role}.{other}] to be {str(value).lower()} on the NPU: {reason}",
                    {f"{role}.{other}": value},
                    {f"{role}.{name}": False},
                )


def _adapters(run: Run) -> Iterator[Broken]:
    actor, key = run.config.actor_config, "actor_config.lora_target_modules"
    targets = actor.lora_target_modules or []
    for name in targets:
        if name not in LORA_TARGETS:
            text = unknown_value(key, name, LORA_TARGETS)
            yield violate("lora_targets", text, {key: list(LORA_TARGETS)}, keys={key: targets})
    if "linear_qkv" in targets and run.config.with_shape("actor_config").multi_latent_attention:
        yield violate(
            "lora_latent",
            f"{key}: linear_qkv does not exist with multi_latent_attention; linear_proj, linear_fc1 and linear_fc2 do",
            {key: [name for name in targets if name != "linear_qkv"] or ["linear_proj"]},
            keys={key: targets},
        )
    if actor.moe_alltoall_overlap_comm and {"linear_fc1", "linear_fc2"} & set(targets):
        yield violate(
            "lora_overlap",
            "[actor_config.moe_alltoall_overlap_comm:name] has expert layers of its own, which have no adapters; leave "
            "it out with linear_fc1 or linear_fc2 in lora_target_modules",
            {"actor_config.moe_alltoall_overlap_comm": False},
            keys={key: targets},
        )


_PUSH = "generate_config.lora_push"
#: rank of adapters up to which vllm-ascend takes its own kernels for them: engines of larger ones are built for 128 and more
_COMPILED_RANK = 64


@needs("generate_config")
def _pushed_adapters(run: Run) -> Iterator[Broken]:
    """Check that the rollout engine can hold the adapters."""
    actor, metadata = run.config.with_shape("actor_config"), run.config.model_metadata.get("actor_config")
    merged = {_PUSH: "merged"}
    if run.generate.lora_push == "merged":
        return
    if not actor.lora_target_modules:
        text = f"[{_PUSH}:name]: adapter needs adapters; set lora_target_modules or leave it out"
        yield violate("lora_push_needs_lora", text, merged, keys={"actor_config.lora_target_modules": None})
    reasons = {
        "the rollout servers take merged weights": run.placement.disaggregated,
        "the engine takes no adapters of experts": bool(actor.num_experts),
        "the engine takes no adapters of a vision tower": bool(actor.trained_tower_parts),
        "the engine takes no adapters of gated delta nets": metadata is not None and metadata.shape.linear_heads is not None,
        f"the engine's products with adapters of up to rank {_COMPILED_RANK} take bfloat16 on npu, and dtype is "
        "float32": run.config.platform == "npu" and run.generate.dtype == "float32" and actor.lora_r <= _COMPILED_RANK,
        # the largest of vLLM's MaxLoRARanks
        f"the engine takes adapters of rank 512 at most, and lora_r is {actor.lora_r}": actor.lora_r > 512,
    }
    for reason, holds in reasons.items():
        if holds:
            yield violate("lora_push_adapter", f"[{_PUSH}:name]: adapter cannot be used here: {reason}", merged)


@needs("rl_config")
def _shared_backbone(run: Run) -> Iterator[Broken]:
    if run.rl.share_backbone and run.rl.sync_ref_model:
        yield violate(
            "share_backbone_sync",
            "[share_backbone:name] and [sync_ref_model:name] exclude each other: the reference is the frozen base of "
            "the adapters and cannot follow the actor",
            {"sync_ref_model": False, "share_backbone": False},
        )


@needs("rl_config")
def _streamed_ref(run: Run) -> Iterator[Broken]:
    """Check that the weights which a device sees layer by layer never change."""
    group = "ref_config" if "ref_config" in run.config.set_keys else "actor_config"
    if run.has_ref and run.config.ref_config.stream_ref_weights and run.rl.sync_ref_model:
        key = f"{group}.stream_ref_weights"
        yield violate(
            "streamed_reference",
            f"[{key}:name] and [sync_ref_model:name] exclude each other: the copy in host memory is made once, and does not "
            "follow the actor",
            {"sync_ref_model": False},
            {key: False},
        )


@needs("rl_config", "generate_config")
def _moving_average(run: Run) -> Iterator[Broken]:
    """Check that the average of the actor's weights has a reader, and that weights can change places with it."""
    actor, rl = run.config.actor_config, run.rl
    if not rl.ema_decay:
        return
    if not (actor.has_held_out_data or (actor.save and actor.save_hf)):
        yield violate(
            "average_is_read",
            "[ema_decay] keeps an average that nothing would read: it is evaluated with [actor_config.eval_data_path:name], "
            "and exported with [actor_config.save:name] and [actor_config.save_hf:name]",
            {"ema_decay": 0},
        )
    if run.placement.disaggregated and actor.has_held_out_data:
        yield violate(
            "average_on_servers",
            "[ema_decay] cannot be evaluated by rollout servers, which generate for training meanwhile; leave out "
            "[actor_config.eval_data_path:name] and [split:name], and evaluate the exported folder",
            {"ema_decay": 0},
            {"actor_config.eval_data_path": None},
        )


def _split(run: Run) -> Iterator[Broken]:
    key, split = "actor_config.split", run.config.actor_config.split
    try:
        read_split(split)
    except ValueError as error:
        yield violate("split_shares", f"actor_config.{error}", {key: "100,0,0"}, keys={key: split})


def _length(run: Run) -> Iterator[Broken]:
    epochs, iters = run.config.actor_config.train_epochs, run.config.actor_config.train_iters
    if epochs is not None and iters is not None:
        text = "[actor_config.train_epochs] and [actor_config.train_iters] say the length of the run twice"
        yield violate("one_length", text, {"actor_config.train_epochs": None, "actor_config.train_iters": None})
    if epochs is not None and run.config.stage == "pretrain":
        text = "[train_epochs] counts passes over rows; stage pretrain takes train_iters"
        yield violate("epochs_of_rows", text, {"train_epochs": None}, keys={"megatron_training.stage": "pretrain"})


def _rates(run: Run) -> Iterator[Broken]:
    actor = run.config.actor_config
    # Megatron's scheduler asserts both, without a word, and only once the model is built
    for name in ("min_lr", "lr_warmup_init"):
        value, key = getattr(actor, name), f"actor_config.{name}"
        if actor.lr is not None and value > actor.lr:
            text = f"[{key}] must be at most [actor_config.lr]"
            yield violate("rates", text, {key: actor.lr, "actor_config.lr": value})


def _data(run: Run) -> Iterator[Broken]:
    cfg, path, key = run.config, run.config.actor_config.data_path, "megatron_training.data_path"
    if not isinstance(path, list):
        return
    if not cfg.is_supervised:
        text = f"is a list, but reinforcement learning reads one prefix or file (raw files: a.jsonl,b.jsonl): {str(path)[:80]}"
        yield violate("data_path", f"{key} {text}", keys={key: path})
    elif not any(isinstance(item, str) and not is_weight(item) for item in path):
        yield violate("data_path", f"{key} names no prefix: {str(path)[:80]}", keys={key: path})


def _held_out(run: Run) -> Iterator[Broken]:
    actor, skip = run.config.actor_config, "megatron_training.skip_train"
    if run.config.is_supervised and actor.skip_train and not actor.has_held_out_data:
        text = f"[{skip}:name]: there is nothing to evaluate on; set eval_data_path or split"
        yield violate("held_out", text, {skip: False}, keys={"eval_data_path": None})
    off = {"eval_target": None, "eval_patience": None, "keep_best": False, "eval_metric": None}
    for name, value in off.items():
        if getattr(actor, name) != value and not actor.has_held_out_data:
            key = f"megatron_training.{name}"
            text = f"[{key}:name]: there is nothing to evaluate on; set eval_data_path or split"
            yield violate("held_out", text, {key: value}, keys={"eval_data_path": None})


def _generated_answers(run: Run) -> Iterator[Broken]:
    """Check that a supervised run can answer prompts: with the cache of keys and values of Megatron's own modules."""
    actor = run.config.actor_config
    metadata = run.config.model_metadata.get("actor_config")
    reasons = {
        "it runs transformers' modules, without a cache (engine: megatron)": actor.computes_by_module,
        "a pass over one token cannot have sequence_parallel": actor.sequence_parallel and actor.tensor_model_parallel_size > 1,
        "a pass over one token cannot be split (context_parallel_size 1)": actor.context_parallel_size > 1,
        "its cache has no virtual stages (num_layers_per_virtual_pipeline_stage)": bool(
            actor.num_layers_per_virtual_pipeline_stage
        ),
        "its cache has no positions of images": metadata is not None and metadata.reads_images,
    }
    for reason, holds in reasons.items():
        if holds:
            yield violate("answers_of_sft", f"[megatron_training.eval_sets:name] in stage sft: {reason}")
    if not actor.eval_verifier:
        text = "[megatron_training.eval_verifier:name] must name a reward function for the answers to eval_sets"
        yield violate("eval_verifier", text, keys={"megatron_training.eval_sets": actor.eval_sets})
    if actor.seq_length is not None and actor.eval_max_tokens >= actor.seq_length:
        text = "[megatron_training.eval_max_tokens] leaves no room for a prompt in [megatron_training.seq_length]"
        yield violate("eval_max_tokens", text, {"megatron_training.eval_max_tokens": max(1, actor.seq_length // 2)})


def _audit(run: Run) -> Iterator[Broken]:
    """Check the stricter check beside the reward."""
    audit, actor = run.config.audit, run.config.actor_config
    if not audit.has_check:
        return
    if run.config.is_supervised:
        text = "the group audit checks rewards, and supervised stages have none"
        yield violate("audit_of_rewards", text, keys={"audit.verifier_function": audit.verifier_function})
        return
    count, weights = len(audit.verifier_function), len(audit.verifier_weight)
    if weights not in (0, count):
        text = f"[audit.verifier_weight:name] has {weights} entries, but [audit.verifier_function:name] has {count}"
        yield violate("audit_weights", text, {"audit.verifier_weight": [1.0] * count})
    if audit.data_path is None and not actor.has_held_out_data:
        text = "[audit.verifier_function:name] scores responses to held-out prompts; set audit.data_path or eval_data_path"
        yield violate("audit_data", text)
    if audit.full_score is None and run.config.reward_model_keys is not None:
        text = "[audit.full_score] must be set where a reward model scores: its scores have no largest value that is known"
        yield violate("audit_full_score", text)
    step = run.rl.parameter_sync_step
    if run.rl.trainer_mode == "async" and audit.interval % step:
        yield violate(
            "audit_interval",
            "[audit.interval] must be a multiple of [parameter_sync_step]: between two pushes the rollout engine holds other "
            "weights than the trainer",
            {"audit.interval": -(-audit.interval // step) * step},
        )


#: names of sets of prompts, which are parts of names of figures
_SET_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def _evaluations(run: Run) -> Iterator[Broken]:
    """Check the sets and the sampling of evaluations that generate."""
    actor, rl = run.config.actor_config, run.config.rl_config
    functions = set() if rl is None else {*rl.verifier_function}
    for name, path in (actor.eval_sets or {}).items():
        key = f"megatron_training.eval_sets.{name}"
        if not _SET_NAME.fullmatch(name) or name in functions:
            reason = "the name of a reward function" if name in functions else "not a name"
            text = f"{key}: {name!r} is {reason}; name the set by letters, digits, '_', '-' and '.'"
            yield violate("eval_set_name", text, keys={"megatron_training.eval_sets": actor.eval_sets})
        elif not isinstance(path, str) or not path.strip():
            text = f"{key} is {path!r}; it must be one file, prefix or name on a hub"
            yield violate("eval_set_path", text, keys={"megatron_training.eval_sets": actor.eval_sets})
    if run.config.stage == "sft" and actor.eval_sets:
        yield from _generated_answers(run)
    greedy = actor.eval_temperature == 0 or actor.eval_temperature is None and (rl is None or rl.eval_greedy)
    if actor.eval_n_samples > 1 and greedy:
        text = "[megatron_training.eval_n_samples]: greedy responses to a prompt are all the same; set eval_temperature above 0"
        yield violate("eval_samples_vary", text, {"megatron_training.eval_temperature": 1.0})


#: paths that are empty by default
_EMPTY_PATHS = frozenset(("ref_model", "profile_save_path", "wandb_save_dir", "swanlab_save_dir"))
#: groups of `RunConfig.as_written` whose keys have another prefix
_PREFIXES = {"sampling_config": "generate_config.", "run": ""}


def _paths(run: Run) -> Iterator[Broken]:
    """Check that no path is blank or has characters that no name of a file can have."""
    for group, values in run.config.as_written().items():
        for name, value in values.items():
            key = f"{_PREFIXES.get(group, f'{group}.')}{name}"
            written = value if isinstance(value, list) else [value]
            inner = value.items() if isinstance(value, Mapping) else ()
            named = [(key, item) for item in written] if name in PATH_KEYS else []
            named += [(f"{key}.{other}", item) for other, item in inner if other in PATH_KEYS]
            for path, item in named:
                if not isinstance(item, str) or item == "" and path.rpartition(".")[2] in _EMPTY_PATHS:
                    continue
                if not item.strip() or any(ord(char) < 32 for char in item):
                    text = f"{path} is {item!r}, which names no file or folder"
                    yield violate("path", text, {path: None}, keys={path: item})


_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@needs("serve_config")
def _server(run: Run) -> Iterator[Broken]:
    """Check what a server of training needs, and what it has not yet."""
    cfg, actor, generate = run.config, run.config.actor_config, run.config.generate_config
    serve = cfg.serve_config
    assert serve is not None
    if generate is None:
        yield violate("server_engine", "serve_config needs the group generate_config: its clients sample", keys={})
    if not actor.lora_target_modules and serve.num_models > 1:
        text = (
            "[serve_config.num_models] needs actor_config.lora_target_modules: models of several clients are adapters of one "
            "base; without them one model trains full weights"
        )
        yield violate(
            "server_adapters",
            text,
            {"serve_config.num_models": 1},
            {"actor_config.lora_target_modules": list(LORA_TARGETS)},
        )
    yield from _server_layout(run)
    if actor.computes_by_module:
        yield violate(
            "server_training_engine", "serve_config needs [actor_config.engine] megatron", {"actor_config.engine": "megatron"}
        )
    if generate is not None and generate.engine != "vllm":
        text = "serve_config needs [generate_config.engine] vllm: a step has the adapters of several models"
        yield violate("server_rollout_engine", text, {"generate_config.engine": "vllm"})
    if serve.host not in _LOOPBACK and serve.api_keys_file is None:
        text = "[serve_config.host] is not loopback, which needs serve_config.api_keys_file: anyone could train and read"
        yield violate("server_keys", text, {"serve_config.host": _LOOPBACK[0]})


def _server_layout(run: Run) -> Iterator[Broken]:
    """Check the layout of a server of training on several devices: each has all models, and its part of base and rows."""
    actor, size = run.config.actor_config, run.placement.num_devices
    if run.placement.disaggregated:
        text = "serve_config has its rollout engines on the devices that train; leave out rollout_resource and vllm_server_host"
        yield violate("server_devices", text, keys={})
    if size == 1:
        return
    if not actor.lora_target_modules:
        text = f"serve_config trains full weights on one device, and the run file has {size}; models with adapters take several"
        yield violate("server_devices", text, {"rl_config.actor_resource.num_npus": 1})
    for name in ("pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"):
        if getattr(actor, name) > 1:
            text = f"[actor_config.{name}] cannot be used with serve_config, which has tensor and data parallelism"
            yield violate("server_layout", text, {f"actor_config.{name}": 1})


@needs("rl_config")
def _fault_tolerance(run: Run) -> Iterator[Broken]:
    """Check `rl_config.fault_tolerance`."""
    tolerance = run.rl.fault_tolerance
    if tolerance.shrink and not tolerance.enabled:
        yield violate(
            "shrink_recovers",
            "[rl_config.fault_tolerance.shrink] needs rl_config.fault_tolerance.enabled: a run that does not resume by itself "
            "does not resume on fewer devices",
            {"rl_config.fault_tolerance.enabled": True},
        )


RUN_RULES = (
    _stage,
    _length,
    _split,
    _number_format,
    _lengths,
    _packing,
    _images,
    _dynamic_context,
    _prediction_layers,
    _roles,
    training_engine_rules,
    _dedicated_devices,
    _rollout_modes,
    *ROLLOUT_RULES,
    _adapters,
    _pushed_adapters,
    _shared_backbone,
    _streamed_ref,
    _moving_average,
    _muon,
    _offloaded_optimizer,
    _mindspeed,
    _profiler,
    _dumps,
    _rates,
    _data,
    _paths,
    _held_out,
    _evaluations,
    _audit,
    _fault_tolerance,
    _server,
)
