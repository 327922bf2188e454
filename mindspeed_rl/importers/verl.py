"""Commands of verl as run files: `main_ppo` with its estimators and losses, and the supervised trainer.

The options are in `verl_options.py`. Here is what several of them make up, and the plan of a command by verl's own formulas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mindspeed_rl.catalogue import ADVANTAGES, KL_ESTIMATORS
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.keys import collect_keys
from mindspeed_rl.config.keys.ignored import IGNORED
from mindspeed_rl.importers.importer import (
    RECOMPUTE_LAYERS,
    UNSET_RANK,
    Import,
    find_lora_targets,
    read_scalar,
    set_rollout_format,
    start_from_adapter,
    train_prediction_layers,
)
from mindspeed_rl.importers.options import Option, SourceCommand, SourceProject, by, no_effect, refused, to, with_others
from mindspeed_rl.importers.shell_text import Command, list_unknown, request_variables
from mindspeed_rl.importers.source_plan import Rates, Schedule, SourcePlan
from mindspeed_rl.importers.verl_options import GENERATE, MEGATRON, RL, TABLES, TRANSFORMER

_ACTOR, _REF, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}." for name in ("actor", "ref", "rollout", "model"))
_CORRECTION = "algorithm.rollout_correction."
_DEFAULT = "the default of verl"
#: modules of verl's commands -> table
_PROGRAMS = {
    "main_ppo": "ppo",
    "sft_trainer": "sft",
    "sft_trainer_ray": "sft",
    # a recipe of earlier releases, whose groups and penalty main_ppo has now
    "main_dapo": "ppo",
}
_REFUSED_PROGRAMS = {
    "fully_async_policy": "the fully asynchronous trainer; see rl_config.trainer_mode: async",
    "fsdp_sft_trainer": "fsdp_sft_trainer, of releases before 0.9; write the options of sft_trainer",
    "main_generation": "generation; see mindspeed-rl generate",
    "main_eval": "evaluation; see mindspeed-rl evaluate",
    "main_spin": "SPIN",
    "main_prime": "PRIME",
}

#: estimators of verl that are here
_ESTIMATORS = {
    "gae": "gae",
    "grpo": "group_norm",
    "grpo_vectorized": "group_norm",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "opo": "opo",
    "grpo_passk": "pass_at_k",
    "gpg": "gpg",
    "optimal_token_baseline": "optimal_token_baseline",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
#: losses that mark tokens by a covariance -> their numbers under policy_loss, with verl's defaults
_OF_COVARIANCE = {
    "clip_cov": {"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0},
    "kl_cov": {"kl_cov_ratio": 0.0002, "ppo_kl_coef": 0.1},
}
#: aggregation of verl -> ours, and the clipped loss that has it
_AGGREGATIONS = {
    "token-mean": ("token", "dapo"),
    "seq-mean-token-mean": ("sequence", "grpo"),
    "seq-mean-token-sum-norm": ("constant", "dr_grpo"),
    "seq-mean-token-sum": ("summed", "luspo"),
}
#: what verl's default reward computes for a source of data -> reward function here
_REWARDS = {
    "openai/gsm8k": "gsm8k",
    "math_dapo": "acc_for_dapo",
    "math": "acc_for_dapo",
    "math_dapo_reasoning": "acc_for_dapo",
}
#: word of a data file's path -> the source that verl's preprocessing writes for it
_SOURCES = {"gsm8k": "openai/gsm8k", "dapo": "math_dapo", "aime": "aime"}
_KNOWN_TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow")
#: options that releases before 0.9.1 had, and where they are now
_RENAMED = (
    (r"critic\.model\.fsdp_config\.", "critic.fsdp."),
    (r"reward\.reward_kwargs\.", "reward_model.reward_kwargs."),
    (r"reward_model\.sandbox_fusion\.", "sandbox_fusion."),
    (r"reward_model\.overlong_buffer\.", "reward_model.reward_kwargs.overlong_buffer_cfg."),
)
#: options that a release takes without listing them: pattern -> record, by the name that the pattern finds
_OPEN: tuple[tuple[str, Mapping[str, Option] | Option], ...] = (
    (r"actor_rollout_ref\.actor\.megatron\.override_transformer_config\.(\w+)", TRANSFORMER),
    (r"engine\.override_transformer_config\.(\w+)", TRANSFORMER),
    (
        r"(?:actor_rollout_ref\.ref|critic)\.megatron\.override_transformer_config\.(\w+)",
        no_effect("reference and critic have the actor's settings"),
    ),
    (
        r"(?:\w+\.)*optim\.override_optimizer_config\.(?:optimizer_offload_fraction|overlap_cpu_optimizer_d2h_h2d|"
        r"use_precision_aware_optimizer|optimizer_cpu_offload)",
        no_effect("memory of the optimizer; see swap_optimizer"),
    ),
    (r"(?:\w+\.)*override_ddp_config\.\w+", no_effect("buckets and overlap of gradients")),
    (r"(?:\w+\.)*turbo_config\.[\w.]+", no_effect("Megatron-core is the engine: memory and sharding of FSDP")),
    (r"(?:\w+\.)*fsdp_config\.mixed_precision\.\w+", no_effect("weights are bfloat16 with fp32 master weights")),
    (
        r"(?:\w+\.)*model\.override_config\.(?:attn_implementation|_attn_implementation)",
        no_effect("the platform chooses the kernels"),
    ),
    (
        r"(?:\w+\.)*model\.override_config\.(?:model_config\.)?max_position_embeddings",
        no_effect("rotary positions have no end"),
    ),
    (r"(?:\w+\.)*model\.override_config\.(?:attention_dropout|embd_pdrop|resid_pdrop)", refused("dropout")),
    (
        r"actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.(?:disable_mm_preprocessor_cache|mm_processor_cache_gb)",
        no_effect("a cache of vLLM's, which changes no response"),
    ),
    (
        r"actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.(limit_mm_per_prompt(?:\.\w+)?)",
        by(lambda run, option, value: _limit_images(run, option, value), "limit_mm_image_per_prompt"),
    ),
    (
        r"actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.(max_model_len|max_num_seqs|max_num_batched_tokens|enforce_eager|"
        r"gpu_memory_utilization|enable_prefix_caching|dtype|kv_cache_dtype)",
        by(lambda run, option, value: _set_engine(run, option, value, f"{GENERATE}."), "the key of that name"),
    ),
    (r"actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.quantization", by(set_rollout_format, "quantization, int8 or ascend")),
    (r"actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.async_scheduling", no_effect("the engine schedules by itself")),
    (
        r"actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.((?:compilation|additional|speculative)_config\.[\w.]+)",
        by(lambda run, option, value: _set_engine(run, option, value, f"{GENERATE}."), "compilation_config"),
    ),
    (
        r"actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.([\w.]+)",
        by(lambda run, option, value: _set_engine(run, option, value, f"{GENERATE}.engine_kwargs."), "engine_kwargs"),
    ),
    (r"actor_rollout_ref\.rollout\.engine_kwargs\.(?:sglang|trtllm)\.[\w.]+", no_effect("read by other engines alone")),
    (r"data\.apply_chat_template_kwargs\.enable_thinking", to(f"{MEGATRON}.enable_thinking")),
    (r"data\.apply_chat_template_kwargs\.\w+", refused("arguments of the chat template but enable_thinking")),
    # names of earlier releases
    (
        r"actor_rollout_ref\.actor\.router_replay\.mode",
        to(f"{RL}.router_replay.mode", values={"disabled": "disabled", "R2": "R2", "R3": "R3"}),
    ),
    (r"actor_rollout_ref\.actor\.megatron\.grad_offload", to(f"{GENERATE}.offload_train_grad")),
    (r"(?:actor_rollout_ref\.ref|critic)\.megatron\.grad_offload", no_effect("gradients are freed with the actor's")),
    (
        r"reward_model\.(?:use_reward_loop|micro_batch_size_per_gpu|micro_batch_size|use_dynamic_bsz|max_length|strategy|"
        r"forward_max_token_len_per_gpu|ulysses_sequence_parallel_size|model\.(?:input_tokenizer|use_remove_padding|"
        r"fsdp_config\.\w+))",
        no_effect("the reward model is read from its folder, and scores on the actor's devices"),
    ),
    (r"reward_model\.reward_kwargs\.(?:max_resp_len|overlong_buffer_cfg\.\w+)", with_others("overlong_buffer_*")),
    (r"ray_kwargs\.ray_init\.[\w.]+", no_effect("the command starts or finds the Ray cluster")),
    (r"trainer\.use_legacy_worker_impl", no_effect("verl's own loop")),
    (r"hydra\.[\w.]+", no_effect("the folder of the run is run_dir")),
    (r"model_engine", with_others("the engine")),
)


def _set_engine(run: Import, option: str, value: object, prefix: str) -> None:
    run.translate(option, {prefix + option.partition(".vllm.")[2]: value})


def _limit_images(run: Import, option: str, value: object) -> None:
    kind = option.rpartition("limit_mm_per_prompt")[2].removeprefix(".")
    limits = value if isinstance(value, Mapping) else {kind: value}
    if any(limits[name] for name in limits if name != "image"):
        run.refuse(option, "video and sound")
    elif "image" in limits:
        run.translate(option, {f"{GENERATE}.limit_mm_image_per_prompt": limits["image"]})
    else:
        run.note(option, "images alone are read")


def _find_record(name: str) -> Option | None:
    """Return the record of an option that no release lists."""
    for pattern, entry in _OPEN:
        if match := re.fullmatch(pattern, name):
            return entry if isinstance(entry, Option) else entry.get(match.group(1)) or _find_argument(match.group(1))
    return None


def _find_argument(name: str) -> Option | None:
    """Return the record of an argument of Megatron or MindSpeed that is a key here by the same name."""
    if f"{MEGATRON}.{name}" in collect_keys():
        return to(f"{MEGATRON}.{name}")
    ignored = IGNORED["MegatronConfig"].get(name)
    return None if ignored is None else no_effect(ignored.reason[0])


# -------------------------------------------------------------------------------------------------------------------- read


def _read(commands: list[Command], devices: int | None) -> SourceCommand:
    found: list[tuple[str, Command]] = []
    for command in commands:
        modules = [re.split(r"[./]", word.removesuffix(".py")) for word in command.words[:40] if "=" not in word]
        parts = {part for module in modules for part in module}
        for name, feature in _REFUSED_PROGRAMS.items():
            if name in parts:
                raise ConfigError([f"line {command.line}: not available here: {feature}"])
        program = next((table for name, table in _PROGRAMS.items() if name in parts), None)
        if program is not None:
            found.append((program, command))
    # keys alone, or keys on lines of their own after the program
    keys = [command for command in commands if all(_is_key(word) for word in command.words)]
    if len({command.line for _, command in found}) > 1:
        lines = ", ".join(str(command.line) for _, command in found)
        raise ConfigError([f"the script has several commands of verl, in lines {lines}; import one of them"])
    if not found and not keys:
        raise ConfigError(["there is no command of verl, and no key such as data.train_files=train.parquet"])
    program, command = found[0] if found else ("ppo", keys[0])
    if command.uncertain:
        raise ConfigError([f"{command.uncertain} decides whether the command of line {command.line} runs; import it alone"])
    words = [*command.words, *(word for item in keys if item is not command for word in item.words)]
    options: dict[str, object] = {}
    # a word that is nothing but a variable may stand for any option
    start = next((index for index, word in enumerate(words) if "=" not in word and "verl" in word or "main_" in word), 0)
    trailing = tuple(word for word in words[start:] if not _is_key(word) and list_unknown(word) and word.startswith("\0"))
    for word in words:
        if word.startswith("--config-name"):
            options["--config-name"] = word.partition("=")[2]
        elif _is_key(word) or re.match(r"\+*model_engine=", word):
            name, _, text = word.partition("=")
            # Hydra's + and ++ only mark a key as new
            options[_rename(name.lstrip("+"))] = read_scalar(text)
    launched = _count_processes(command.words) if program == "sft" else None
    if unknown := [item for word in trailing for item in list_unknown(word)]:
        raise request_variables(unknown)
    recipe = "main_dapo" if any("main_dapo" in word for word in command.words) else ""
    is_disaggregated = any("one_step_off" in word for word in command.words)
    return _complete(program, options, launched or devices, recipe, is_disaggregated=is_disaggregated)


def _count_processes(words: Sequence[str]) -> int | None:
    """Return the processes that torchrun starts; None without it."""
    text = " ".join(words)
    if unknown := list_unknown(text.partition(" -m ")[0]):
        raise request_variables(unknown)
    counts = [re.search(rf"--{name}[= ](\d+)", text) for name in ("nproc[-_]per[-_]node", "nnodes")]
    return None if counts[0] is None else int(counts[0][1]) * (int(counts[1][1]) if counts[1] else 1)


def _is_key(word: str) -> bool:
    return re.match(r"[+]*[A-Za-z_]\w*(\.[\w-]+)+=", word) is not None


def _rename(name: str) -> str:
    for pattern, here in _RENAMED:
        name = re.sub(f"^{pattern}", here, name)
    return name


def _complete(
    program: str, options: dict[str, object], devices: int | None, recipe: str, *, is_disaggregated: bool
) -> SourceCommand:
    """Return the command with values of other keys in place of their names, its table and its devices."""
    config_name = str(options.pop("--config-name", ""))
    # those keys exist in the configuration of that engine alone
    if "megatron" in config_name or any(name.startswith(f"{_ACTOR}megatron.") for name in options):
        options.setdefault("model_engine", "megatron")
    for name, value in options.items():
        if isinstance(value, str) and (match := re.fullmatch(r"\$\{([\w.]+)\}", value)):
            if match.group(1) not in options:
                raise ConfigError([f"{name}={value}: {match.group(1)} is not in the command; write its value"])
            options[name] = options[match.group(1)]
    table = dict(TABLES[program])
    for name in options:
        if name not in table and (record := _find_record(name)) is not None:
            table[name] = record
    if is_disaggregated and program == "ppo":
        options.setdefault("actor_rollout_ref.hybrid_engine", False)
        # the configuration of that trainer sets it
        options.setdefault(f"{_CORRECTION}bypass_mode", True)
    command = SourceCommand(program, options, table=table)
    per_node = command.count("trainer.n_gpus_per_node", 8 if program == "ppo" else 1)
    world = per_node * command.count("trainer.nnodes", 1)
    if devices is not None and not command.has("trainer.n_gpus_per_node"):
        world = devices
    return SourceCommand(program, options, devices=world, table=table, trailing=(recipe,) if recipe else ())


# ------------------------------------------------------------------------------------------------------------ verl's numbers


@dataclass(frozen=True)
class _Layout:
    """Split of a model by verl: FSDP has data parallelism and Ulysses alone.

    Attributes:
        engine: "fsdp" or "megatron".
    """

    engine: str
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @classmethod
    def of_role(cls, command: SourceCommand, role: str, engine_group: str) -> _Layout:
        """Read the layout of a role; `engine_group` is the group of its FSDP keys."""
        name = str(command.get(f"{role}strategy") or command.get("model_engine") or "fsdp")
        engine = {"fsdp": "fsdp", "fsdp2": "fsdp", "fsdp_turbo": "fsdp", "dp": "fsdp", "megatron": "megatron"}.get(name)
        if engine is None:
            raise ConfigError([f"not available here: the training engine {name}; fsdp and megatron are"])
        if engine == "fsdp":
            ulysses = command.get(f"{engine_group}ulysses_sequence_parallel_size")
            context = command.count(f"{role}ulysses_sequence_parallel_size", 1)
            return cls(engine, context=ulysses if isinstance(ulysses, int) and ulysses > 1 else context)
        group = "engine." if role == "engine." else f"{role}megatron."
        sizes = (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
        )
        return cls(engine, *(command.count(group + size, 1) for size in sizes))

    def replicas(self, devices: int) -> int:
        """Return the data-parallel size."""
        return devices // (self.tensor * self.pipeline * self.context)


def _read_layout(command: SourceCommand) -> _Layout:
    if command.program == "sft":
        return _Layout.of_role(command, "engine.", "engine.")
    return _Layout.of_role(command, _ACTOR, f"{_ACTOR}fsdp_config.")


@dataclass(frozen=True)
class _Batch:
    """Numbers of a batch, in prompts (supervised: rows).

    Attributes:
        rollout: that are sampled.
        trained: that groups are filtered to.
        counted: of which a pass over the data has whole numbers: the recipe of DAPO counts those that are sampled.
    """

    rollout: int
    trained: int
    group: int
    mini: int
    epochs: int
    counted: int

    @classmethod
    def from_command(cls, command: SourceCommand) -> _Batch:
        if command.program == "sft":
            rows = command.count("data.train_batch_size", 256)
            return cls(rows, rows, 1, rows, 1, rows)
        trained = command.count("data.train_batch_size", 1024)
        filters = command.flag("algorithm.filter_groups.enable")
        rollout = command.count("data.gen_batch_size", trained) if filters else trained
        return cls(
            rollout,
            trained,
            command.count(f"{_ROLLOUT}n", 1),
            command.count(f"{_ACTOR}ppo_mini_batch_size", 256),
            command.count(f"{_ACTOR}ppo_epochs", 1),
            rollout if "main_dapo" in command.trailing else trained,
        )

    @property
    def steps(self) -> int:
        """Optimizer steps of a rollout."""
        return self.trained // self.mini * self.epochs if self.mini <= self.trained else self.epochs


def _count_rollouts(command: SourceCommand, batch: _Batch, rows: int) -> int:
    """Return the rollouts (supervised: steps) of the run: verl leaves out the incomplete last batch of an epoch."""
    total = command.get("trainer.total_training_steps")
    if isinstance(total, int) and not isinstance(total, bool) and total > 0:
        return total
    limit = command.get("data.train_max_samples")
    rows = min(rows, limit) if isinstance(limit, int) and limit > 0 else rows
    return rows // batch.counted * command.count("trainer.total_epochs", 30 if command.program == "ppo" else 4)


def _read_schedule(command: SourceCommand, prefix: str, engine: str, peak: float, total: int) -> Schedule:
    """Return the learning rate in verl's steps, of which each is a rollout."""
    steps = command.number(f"{prefix}lr_warmup_steps", -1)
    decay, start, floor = total, 0.0, 0.0
    if engine == "megatron":
        style = command.text(f"{prefix}lr_decay_style", "constant")
        decay = int(command.number(f"{prefix}lr_decay_steps", total))
        start, floor = command.number(f"{prefix}lr_warmup_init", 0.0), command.number(f"{prefix}min_lr", 0.0)
    else:
        style = command.text(f"{prefix}lr_scheduler_type", command.text(f"{prefix}warmup_style", "constant"))
        floor = peak * command.number(f"{prefix}min_lr_ratio", 0.0)
    if style not in ("constant", "cosine", "linear", "inverse-square-root", "WSD") or (engine == "fsdp" and style[0] != "c"):
        raise ConfigError([f"{prefix}lr_scheduler_type {style}: not available here"])
    warmup = int(steps) if steps > 0 else int(command.number(f"{prefix}lr_warmup_steps_ratio", 0.0) * decay)
    return Schedule(peak, style, decay, warmup, start, 0.0 if style == "constant" else floor)


@dataclass(frozen=True)
class _Loss:
    """The loss of verl's actor: names of the catalogue, and bounds of the ratio."""

    loss_type: str
    name: str
    level: Literal["token", "sequence_token"]
    aggregation: str
    low: float | None
    high: float | None
    dual: float | None

    @classmethod
    def from_command(cls, command: SourceCommand) -> _Loss:
        """Read the loss.

        Raises:
            ConfigError: it, or its aggregation, is not available.
        """
        mode, aggregation = (
            command.text(f"{_ACTOR}policy_loss.loss_mode", "vanilla"),
            command.text(f"{_ACTOR}loss_agg_mode", "token-mean"),
        )
        # the defaults of the two sides are numbers, so that clip_ratio alone decides nothing
        either = command.number(f"{_ACTOR}clip_ratio", 0.2)
        low, high = (
            either if command.has(name) and command.options[name] is None else command.number(name, 0.2)
            for name in (f"{_ACTOR}clip_ratio_low", f"{_ACTOR}clip_ratio_high")
        )
        if aggregation not in _AGGREGATIONS:
            raise ConfigError([f"{_ACTOR}loss_agg_mode={aggregation}: not available here: this sum over tokens"])
        normalizer, clipped = _AGGREGATIONS[aggregation]
        scale = command.get(f"{_ACTOR}loss_scale_factor")
        length = command.count("data.max_response_length", 512)
        if scale is not None and normalizer == "constant" and scale != length:
            raise ConfigError(
                [f"{_ACTOR}loss_scale_factor={scale}: not available here: another divisor than max_response_length"]
            )
        dual = command.number(f"{_ACTOR}clip_ratio_c", 3.0)
        if mode == "vanilla":
            return cls(clipped, "grpo", "token", normalizer, low, high, dual)
        if mode == "gspo":
            return cls("gspo" if normalizer == "sequence" else clipped, "grpo", "sequence_token", normalizer, low, high, None)
        # these two have an aggregation of their own
        if mode == "sapo":
            return cls("sapo", "sapo", "token", "sequence", None, None, None)
        if mode == "geo_mean":
            return cls("gmpo", "gmpo", "token", "sequence", low, high, None)
        if mode in ("cispo", "dppo_tv", "dppo_kl", "gpg", "dro", *_OF_COVARIANCE) and normalizer == "token":
            clips = mode in ("cispo", "dppo_tv", "dppo_kl", "clip_cov")
            return cls(
                mode,
                mode,
                "token",
                "token",
                *((low, high) if clips else (None, None)),
                dual if mode[0] == "d" and clips else None,
            )
        feature = "this policy loss" if mode == "bypass_mode" else f"with {aggregation}"
        raise ConfigError([f"{_ACTOR}policy_loss.loss_mode={mode}: not available here: {feature}"])


@dataclass(frozen=True)
class _Kl:
    coefficient: float = 0.0
    estimator: str | None = None
    place: str | None = None

    @classmethod
    def from_command(cls, command: SourceCommand) -> _Kl:
        """Read the KL.

        Raises:
            ConfigError: it has two places, or an estimator that is not available.
        """
        in_reward, in_loss = command.flag("algorithm.use_kl_in_reward"), command.flag(f"{_ACTOR}use_kl_loss")
        if in_reward and in_loss:
            raise ConfigError(["algorithm.use_kl_in_reward and actor.use_kl_loss are both true, but the KL has one place here"])
        coefficient = command.number("algorithm.kl_ctrl.kl_coef" if in_reward else f"{_ACTOR}kl_loss_coef", 0.001)
        if not (in_reward or in_loss) or not coefficient:
            return cls()
        option = "algorithm.kl_penalty" if in_reward else f"{_ACTOR}kl_loss_type"
        estimator = command.text(option, "kl" if in_reward else "low_var_kl")
        if estimator not in KL_ESTIMATORS:
            raise ConfigError([f"{option}={estimator}: not available here; available are {', '.join(KL_ESTIMATORS)}"])
        return cls(coefficient, estimator, "reward" if in_reward else "loss")


def _read_estimator(command: SourceCommand) -> str:
    name = command.text("algorithm.adv_estimator", "gae")
    if name not in _ESTIMATORS:
        raise ConfigError([f"algorithm.adv_estimator={name}: not available here; available are {', '.join(_ESTIMATORS)}"])
    if name.endswith("token_baseline") and command.get(f"{_CORRECTION}rollout_is") is not None:
        raise ConfigError(
            [f"{_CORRECTION}rollout_is: not available here: weights of the correction in the baseline of {name}"]
        )
    return _ESTIMATORS[name]


def _read_correction(command: SourceCommand) -> tuple[str, float, float | None] | None:
    """Return the rollout correction here, its upper and its lower bound."""
    kind = command.get(f"{_CORRECTION}rollout_is")
    if kind is None:
        return None
    low, _, high = str(command.get(f"{_CORRECTION}rollout_is_threshold", 2.0)).rpartition("_")
    if kind not in ("token", "sequence") or (low and kind != "token"):
        raise ConfigError([f"{_CORRECTION}rollout_is={kind}: not available here"])
    return (f"{kind}_mask", float(high), float(low)) if low else (f"{kind}_truncate", float(high), None)


def _list_files(value: object) -> list[str]:
    items = value if isinstance(value, list) else str(value).strip("[]").split(",")
    return [str(item).strip(" '\"") for item in items if str(item).strip(" '\"")]


def _find_source(path: str, variables: Mapping[str, str]) -> str:
    """Return the `data_source` of the rows, by which verl chooses its reward.

    Raises:
        ConfigError: neither the file's name nor the user says it.
    """
    words = set(re.split(r"[^a-z0-9]+", path.lower()))
    source = variables.get("data_source") or next((source for word, source in _SOURCES.items() if word in words), None)
    if source is None:
        raise ConfigError(
            [
                f"the reward of {path} depends on its column data_source; say it with --set data_source=NAME, such as "
                "openai/gsm8k or math_dapo"
            ]
        )
    return source


# ------------------------------------------------------------------------------------------------------------------- build


_ADAPTER = ("lora_adapter_path", "lora.adapter_path")


def _put(run: Import, command: SourceCommand, names: Sequence[str], values: Mapping[str, object], note: str = "") -> None:
    """Set keys that options make up, under the first one that the command has, or as defaults of verl."""
    given = [name for name in names if command.has(name)]
    if not given:
        for key, value in values.items():
            run.add_default(key, value, note or _DEFAULT)
        return
    run.translate(given[0], values, note)
    for name in given[1:]:
        run.translated[name] = f"see {given[0]}"


def _build(run: Import, command: SourceCommand) -> None:
    batch, layout = _Batch.from_command(command), _read_layout(command)
    run.note("model_engine", f"{layout.engine}: Megatron-core is the engine here", changes_nothing=False)
    supervised = command.program == "sft"
    _set_model(run, command, "model." if supervised else _MODEL, layout)
    _set_layout(run, command, layout)
    _set_prediction(run, command, "model." if supervised else _MODEL, layout)
    _set_length(run, command, batch)
    optim = "optim." if supervised else f"{_ACTOR}optim."
    _set_rate(run, command, optim, MEGATRON, layout, batch, {"sft": 1e-3, "ppo": 1e-6}[command.program])
    _set_outputs(run, command)
    if supervised:
        _set_rows(run, command, batch)
        _set_adapter(run, command, "model.")
        return
    critic = "values" in ADVANTAGES[_read_estimator(command)].needs
    run.add_default(f"{MEGATRON}.stage", "ray_ppo" if critic else "ray_grpo", "the loop for the estimator")
    _set_batch(run, command, batch, layout)
    _set_prompts(run, command)
    _set_objective(run, command, has_critic=critic)
    _set_reward(run, command)
    _set_distillation(run, command)
    _set_rollout(run, command)
    _set_critic(run, command, batch, has_critic=critic)
    _set_profiler(run, command)
    _set_adapter(run, command, _MODEL)


def _set_adapter(run: Import, command: SourceCommand, prefix: str) -> None:
    """Start from the folder of an adapter, which has rank and scale; verl's reference is the model without it."""
    names = [f"{prefix}{name}" for name in _ADAPTER if command.has(f"{prefix}{name}")]
    folders = [folder for folder in map(command.get, names) if folder]
    for name in names:
        run.note(name, "no adapter: training starts with fresh ones, or trains all weights", changes_nothing=False)
    if folders:
        start_from_adapter(run, names[0], str(folders[0]), None)
        run.same.pop(names[0])


def _set_model(run: Import, command: SourceCommand, prefix: str, layout: _Layout) -> None:
    path = command.get(f"{prefix}path")
    if path is None:
        raise ConfigError([f"the command names no model: {prefix}path is missing"])
    is_known = re.search(r"qwen-?(2\.5|3)-?vl", str(path).lower())
    if not is_known and {"vl", "omni", "vision"} & set(re.split(r"[^a-z0-9]+", str(path).lower())):
        run.refuse(f"{prefix}path", f"{path}: models with sound, and models of images but Qwen2.5-VL and Qwen3-VL")
    freeze = f"{_ACTOR}freeze_vision_tower"
    if is_known:
        # verl trains all weights of a model without adapters; its tower includes the projector
        has_adapters = any(command.number(f"{prefix}{name}", 0) for name in ("lora_rank", "lora.rank"))
        has_adapters |= any(command.get(f"{prefix}{name}") is not None for name in _ADAPTER)
        frozen = command.flag(freeze) or has_adapters
        values = {f"{MEGATRON}.{name}": frozen for name in ("freeze_vit", "freeze_aligner")}
        _put(run, command, [freeze], values, "verl's tower includes the projector")
    elif command.has(freeze):
        run.note(freeze, "the model reads no images")
    values = {f"{MEGATRON}.load": path}
    if run.get(f"{MEGATRON}.tokenizer_name_or_path") is None:
        values[f"{MEGATRON}.tokenizer_name_or_path"] = path
    _put(run, command, [f"{prefix}path"], values, "a folder on this machine")
    run.add_default(f"{MEGATRON}.finetune", True, "only weights are read")
    option = f"{prefix}enable_gradient_checkpointing"
    if layout.engine == "megatron":
        if command.has(option):
            run.note(option, "override_transformer_config.recompute_* is read with Megatron")
    elif command.flag(option, default=True):
        _put(run, command, [option], RECOMPUTE_LAYERS)
    elif command.has(option):
        run.note(option, "false: nothing is computed again", changes_nothing=False)
    megatron_lora = layout.engine == "megatron"
    rank_name, alpha_name = ("lora.rank", "lora.alpha") if megatron_lora else ("lora_rank", "lora_alpha")
    rank = int(command.number(prefix + rank_name, 0))
    if any(command.get(f"{prefix}{name}") for name in _ADAPTER):
        for name in ("lora_rank", "lora.rank", "lora_alpha", "lora.alpha"):
            if command.has(f"{prefix}{name}"):
                run.note(f"{prefix}{name}", "the adapter that training continues has its own")
        return
    names = [prefix + name for name in ("lora_rank", "lora.rank", "lora_alpha", "lora.alpha")]
    if not rank:
        for name in names:
            if command.has(name):
                run.note(name, "no adapters: all weights train", changes_nothing=False)
        return
    alpha = command.number(prefix + alpha_name, 32 if megatron_lora else 16)
    targets = _list_files(command.get(f"{prefix}{'lora.' if megatron_lora else ''}target_modules") or "all-linear")
    values = {f"{MEGATRON}.lora_r": rank, f"{MEGATRON}.lora_alpha": int(alpha)}
    _put(run, command, names, {**values, f"{MEGATRON}.lora_target_modules": find_lora_targets(targets)})


def _set_prediction(run: Import, command: SourceCommand, prefix: str, layout: _Layout) -> None:
    """Set the prediction layers that train, which verl's Megatron engine alone has, and drafts of theirs."""
    names = (
        ("enable_train", "enable", "detach_encoder", "mtp_loss_scaling_factor"),
        ("enable_rollout", "method", "num_speculative_tokens", "speculative_num_steps", "speculative_algorithm",
         "speculative_eagle_topk", "speculative_num_draft_tokens"),
    )  # fmt: skip
    training, drafts = ([f"{prefix}mtp.{name}" for name in part if command.has(f"{prefix}mtp.{name}")] for part in names)
    is_on, scale = command.flag(f"{prefix}mtp.enable"), f"{MEGATRON}.mtp_loss_scaling_factor"
    if is_on and command.flag(f"{prefix}mtp.enable_train") and layout.engine == "megatron":
        config, count = Path(command.text(f"{prefix}path")).expanduser() / "config.json", 1  # as published models have it
        if config.is_file():
            try:
                shape = json.loads(config.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError([f"{prefix}path: {config} is no JSON: {error}"]) from error
            shape |= shape.get("text_config", {})
            count = shape.get("num_nextn_predict_layers") or shape.get("mtp_num_hidden_layers") or 1
        written = run.get(scale)  # by override_transformer_config, which goes first there
        factor = command.number(f"{prefix}mtp.mtp_loss_scaling_factor", 0.1) if written is None else float(str(written))
        detaches = command.flag(f"{prefix}mtp.detach_encoder")
        train_prediction_layers(run, training, count, factor, detaches=detaches)
        head = "reaches the head" if not detaches else "does not reach the head"
        run.translated[training[0]] += f"; it {head} here, which verl leaves to the release of Megatron"
    else:
        reason = "prediction layers train with enable, enable_train and Megatron alone; they are left out"
        for option in training:
            run.note(option, reason)
        run.tree.get(MEGATRON, {}).pop("mtp_loss_scaling_factor", None)
    if not is_on or not command.flag(f"{prefix}mtp.enable_rollout") or command.program == "sft":
        for option in drafts:
            run.note(option, "only drafts in a rollout, with enable and enable_rollout, read it")
        return
    method, key = command.text(f"{prefix}mtp.method", "mtp"), f"{GENERATE}.speculative_config"
    if not method.endswith("mtp"):
        run.refuse(f"{prefix}mtp.method", f"prediction layers as drafts by the method {method}; mtp is available")
    is_vllm = command.text(f"{_ROLLOUT}name", "vllm") != "sglang"
    tokens = ("num_speculative_tokens", 1) if is_vllm else ("speculative_num_steps", 3)
    written = run.get(key)
    group = {"method": "mtp", "num_speculative_tokens": command.count(f"{prefix}mtp.{tokens[0]}", tokens[1])}
    run.translate(drafts[0], {key: group | (dict(written) if isinstance(written, Mapping) else {})})
    run.translated |= dict.fromkeys(drafts[1:], f"see {drafts[0]}")


def _set_layout(run: Import, command: SourceCommand, layout: _Layout) -> None:
    group, role = ("engine.", "engine.") if command.program == "sft" else (f"{_ACTOR}megatron.", _ACTOR)
    option = f"{group}sequence_parallel"
    splits = layout.tensor > 1 and command.flag(option, default=True)
    if layout.engine == "megatron" and splits:
        _put(run, command, [option], {f"{MEGATRON}.sequence_parallel": True})
    elif command.has(option):
        run.note(option, "without effect where the tensor parallel size is 1")
    names = [f"{role}ulysses_sequence_parallel_size"]
    names += [f"{_ACTOR}fsdp_config.ulysses_sequence_parallel_size"] if role == _ACTOR else []
    if layout.engine == "fsdp":
        _put(run, command, names, {f"{MEGATRON}.context_parallel_size": layout.context}, "Ulysses")
        run.add_default(f"{MEGATRON}.use_distributed_optimizer", True, "FSDP splits the optimizer's state")
    elif command.has(names[0]):
        run.note(names[0], "read with FSDP alone")
    if command.has(f"{role}strategy"):
        note = "; a model that is too large for one device needs tensor_model_parallel_size" if layout.engine == "fsdp" else ""
        run.note(f"{role}strategy", f"Megatron-core is the engine{note}", changes_nothing=False)
    if layout.engine == "megatron":
        run.add_default(f"{MEGATRON}.use_distributed_optimizer", True, _DEFAULT)
    names = ["trainer.n_gpus_per_node", "trainer.nnodes"]
    key = f"{MEGATRON}.num_npus" if command.program == "sft" else f"{RL}.actor_resource.num_npus"
    _put(run, command, names, {key: command.devices}, "over all nodes")


def _set_length(run: Import, command: SourceCommand, batch: _Batch) -> None:
    total = command.get("trainer.total_training_steps")
    unit = "optimizer steps" if command.program == "sft" else "rollouts"
    epochs = command.count("trainer.total_epochs", 30 if command.program == "ppo" else 4)
    if isinstance(total, int) and total > 0:
        run.translate("trainer.total_training_steps", {f"{MEGATRON}.train_iters": total}, unit)
        if command.has("trainer.total_epochs"):
            run.note("trainer.total_epochs", "trainer.total_training_steps is read instead")
        return
    if command.has("trainer.total_training_steps"):
        run.note("trainer.total_training_steps", "null: trainer.total_epochs is read", changes_nothing=False)
    if run.settings.knows_rows:
        count = _count_rollouts(command, batch, run.settings.rows)
        note = f"{epochs} passes over {run.settings.rows} rows, without the incomplete last batch of a pass"
        _put(run, command, ["trainer.total_epochs"], {f"{MEGATRON}.train_iters": count}, note)
        return
    note = "the incomplete last batch of a pass is filled with rows of the next; --rows N makes it exact"
    passes = epochs * batch.rollout / batch.counted
    if passes != epochs:
        note = f"so many iterations as passes over {batch.counted} prompts a step have; {note}"
    values = {f"{MEGATRON}.train_epochs": epochs if passes == epochs else passes}
    _put(run, command, ["trainer.total_epochs"], values, note)


def _set_rate(
    run: Import, command: SourceCommand, prefix: str, group: str, layout: _Layout, batch: _Batch, default: float
) -> None:
    """Set the learning rate of a role, and what else its step needs."""
    peak = command.number(f"{prefix}lr", default)
    total = _count_rollouts(command, batch, run.settings.rows)
    schedule = _read_schedule(command, prefix, layout.engine, peak, total)
    _put(run, command, [f"{prefix}lr"], {f"{group}.lr": peak})
    style_names = [f"{prefix}{name}" for name in ("lr_scheduler_type", "lr_decay_style", "warmup_style")]
    _put(
        run, command, style_names, {f"{group}.lr_decay_style": schedule.style}, "moves once a rollout there, at each step here"
    )
    floors = [f"{prefix}{name}" for name in ("min_lr", "min_lr_ratio")]
    if schedule.style == "constant":
        for name in (*floors, f"{prefix}lr_decay_steps"):
            if command.has(name):
                run.note(name, "the learning rate is constant")
    else:
        _put(run, command, floors, {f"{group}.min_lr": schedule.floor})
        if command.has(f"{prefix}lr_decay_steps"):
            run.translate(f"{prefix}lr_decay_steps", {f"{group}.lr_decay_iters": schedule.decay}, "rollouts")
    steps, ratio = command.number(f"{prefix}lr_warmup_steps", -1), command.number(f"{prefix}lr_warmup_steps_ratio", 0.0)
    warmup: dict[str, object] = {}
    if steps > 0:
        warmup = {f"{group}.lr_warmup_iters": int(steps)}
    elif ratio > 0:
        warmup = {f"{group}.lr_warmup_fraction": ratio}
    order = ("lr_warmup_steps", "lr_warmup_steps_ratio") if steps > 0 else ("lr_warmup_steps_ratio", "lr_warmup_steps")
    _put(run, command, [f"{prefix}{name}" for name in order], warmup, "rollouts" if warmup else "no warm-up")
    if command.has(f"{prefix}lr_warmup_init"):
        run.translate(f"{prefix}lr_warmup_init", {f"{group}.lr_warmup_init": schedule.start})
    clips = [f"{prefix}clip_grad", *([f"{prefix.removesuffix('optim.')}grad_clip"] if prefix != "optim." else [])]
    clip = next((command.number(name, 1.0) for name in clips if command.has(name)), 1.0)
    _put(run, command, clips, {f"{group}.clip_grad": clip})
    _put(run, command, [f"{prefix}weight_decay"], {f"{group}.weight_decay": command.number(f"{prefix}weight_decay", 0.01)})
    if command.has(f"{prefix}betas"):
        first, second = (float(item) for item in _list_files(command.get(f"{prefix}betas")))
        run.translate(f"{prefix}betas", {f"{group}.adam_beta1": first, f"{group}.adam_beta2": second})


def _set_outputs(run: Import, command: SourceCommand) -> None:
    for option, key in (("trainer.save_freq", "save_interval"), ("trainer.test_freq", "eval_interval")):
        value = command.get(option)
        if isinstance(value, int) and value > 0:
            run.translate(option, {f"{MEGATRON}.{key}": value})
        elif value is not None:
            run.note(option, f"{value}: at the end only")
    if command.has("trainer.logger"):
        names = _list_files(command.get("trainer.logger"))
        known = [name for name in names if name in _KNOWN_TRACKERS]
        others = ", ".join(name for name in names if name not in known)
        note = f"{others}: the console and metrics.jsonl are always there" if others else ""
        if command.program == "sft":
            run.note("trainer.logger", "metrics.jsonl and TensorBoard files are written; trackers change no update")
        else:
            run.translate("trainer.logger", {f"{RL}.report_to": known}, note)
    contents = "checkpoint.save_contents" if command.program == "sft" else f"{_ACTOR}checkpoint.save_contents"
    if command.has(contents):
        run.translate(contents, {f"{MEGATRON}.save_hf": "hf_model" in _list_files(command.get(contents))})


def _set_batch(run: Import, command: SourceCommand, batch: _Batch, layout: _Layout) -> None:
    sizes = {f"{MEGATRON}.global_batch_size": batch.rollout}
    if command.flag("algorithm.filter_groups.enable"):
        metric = command.text("algorithm.filter_groups.metric", "reward")
        if metric not in ("acc", "score", "reward", "seq_reward", "seq_final_reward"):
            run.refuse("algorithm.filter_groups.metric", f"groups that are filtered by {metric}")
        limit = int(command.number("algorithm.filter_groups.max_num_gen_batches", 0))
        filters = {"enable": True, "max_batches": limit, "train_batch_size": batch.trained}
        names = [f"algorithm.filter_groups.{name}" for name in ("enable", "metric", "max_num_gen_batches")]
        _put(run, command, names, {f"{RL}.filter_groups_{name}": value for name, value in filters.items()})
    else:
        for name in ("enable", "metric", "max_num_gen_batches"):
            if command.has(f"algorithm.filter_groups.{name}"):
                run.note(f"algorithm.filter_groups.{name}", "no group is filtered", changes_nothing=False)
    _put(run, command, ["data.train_batch_size", "data.gen_batch_size"], sizes, "prompts of a rollout")
    _put(run, command, [f"{_ROLLOUT}n"], {f"{RL}.n_samples_per_prompt": batch.group})
    mini = min(batch.mini, batch.trained)
    _put(run, command, [f"{_ACTOR}ppo_mini_batch_size"], {f"{RL}.mini_batch_size": mini}, "prompts of an optimizer step")
    dynamic = command.flag(f"{_ACTOR}use_dynamic_bsz")
    micro = 1 if dynamic else command.count(f"{_ACTOR}ppo_micro_batch_size_per_gpu", 1)
    names = [f"{_ACTOR}ppo_micro_batch_size_per_gpu", f"{_ACTOR}ppo_micro_batch_size"]
    _put(run, command, names, {f"{MEGATRON}.micro_batch_size": micro}, "use_dynamic_bsz fills micro-batches" if dynamic else "")
    for option, key in (
        (f"{_ACTOR}ppo_max_token_len_per_gpu", "max_packing_token_size"),
        (f"{_REF}log_prob_max_token_len_per_gpu", "ref_max_packing_token_size"),
        (f"{_ROLLOUT}log_prob_max_token_len_per_gpu", "actor_max_packing_token_size"),
    ):
        if dynamic and (command.has(option) or key == "max_packing_token_size"):
            longest = command.count("data.max_prompt_length", 512) + command.count("data.max_response_length", 512)
            tokens = max(longest, command.count(option, 16384) * layout.context)
            _put(run, command, [option], {f"{RL}.{key}": tokens}, f"tokens of a device x {layout.context}")
        elif command.has(option):
            run.note(option, "read with use_dynamic_bsz alone")


def _set_prompts(run: Import, command: SourceCommand) -> None:
    for option, key in (("data.train_files", "data_path"), ("data.val_files", "eval_data_path")):
        files = _list_files(command.get(option) or "")
        if len(files) > 1 and key == "data_path":
            run.refuse(
                option, f"prompts of {len(files)} files, with a reward by the source of each row; put them into one folder"
            )
        elif files:
            run.translate(option, {f"{MEGATRON}.{key}": files[0]}, f"the first of {len(files)}" if len(files) > 1 else "")
        elif key == "data_path":
            raise ConfigError(["the command names no data: data.train_files is missing"])
    limit = command.get("data.train_max_samples")
    if isinstance(limit, int) and limit > 0:
        path = run.get(f"{MEGATRON}.data_path")
        run.translate("data.train_max_samples", {f"{MEGATRON}.data_path": f"{path}#{limit}"}, "the first rows")
    elif command.has("data.train_max_samples"):
        run.note("data.train_max_samples", "all rows", changes_nothing=False)
    leaves_out = command.flag("data.filter_overlong_prompts")
    reason = "prompts of max_prompt_length tokens and more are left out"
    for option in ("data.filter_overlong_prompts", "data.truncation"):
        if command.has(option):
            run.note(option, reason, changes_nothing=False)
    if not leaves_out and command.text("data.truncation", "error") != "error":
        run.without_effect["data.truncation"] = f"{reason}, where verl would cut them"


def _set_objective(run: Import, command: SourceCommand, *, has_critic: bool) -> None:
    estimator, loss, kl = _read_estimator(command), _Loss.from_command(command), _Kl.from_command(command)
    reads = ADVANTAGES[estimator].reads or frozenset()
    _put(run, command, ["algorithm.adv_estimator"], {f"{RL}.adv_estimator": estimator})
    if "scale_rewards" in reads:
        divides = command.flag("algorithm.norm_adv_by_std_in_grpo", default=True)
        scale = {f"{RL}.scale_rewards": "group" if divides else "none"} | ({f"{RL}.adv_epsilon": 1e-6} if divides else {})
        _put(run, command, ["algorithm.norm_adv_by_std_in_grpo"], scale)
    for option, key in (("algorithm.gamma", "gamma"), ("algorithm.lam", "lam")):
        if key in reads:
            # ReMax sums rewards without a discount there
            value = 1.0 if estimator == "remax" else command.number(option, 1.0)
            _put(run, command, [option], {f"{RL}.{key}": value})
    for option in ("algorithm.norm_adv_by_std_in_grpo", "algorithm.gamma", "algorithm.lam"):
        if command.has(option) and option not in run.translated:
            run.note(option, f"the estimator {estimator} does not read it", changes_nothing=False)
    shapes: dict[str, object] = {f"{RL}.loss_type": loss.loss_type}
    if loss.level != "token" or loss.loss_type == "luspo":
        shapes[f"{RL}.importance_sampling_level"] = loss.level
    if loss.loss_type == "sapo":
        taus = (("tau_pos", 1.0), ("tau_neg", 1.05))
        shapes |= {f"{RL}.{name}": command.number(f"{_ACTOR}{name}", value) for name, value in taus}
    if loss.loss_type == "dro":
        shapes[f"{RL}.dro_beta"] = command.number(f"{_ACTOR}policy_loss.dro_beta", 0.0)
    numbers = _OF_COVARIANCE.get(loss.loss_type, {})
    shapes |= {f"{RL}.{name}": command.number(f"{_ACTOR}policy_loss.{name}", value) for name, value in numbers.items()}
    aggregation = command.text(f"{_ACTOR}loss_agg_mode", "token-mean")
    adds_terms = kl.place == "loss" or command.number(f"{_ACTOR}entropy_coeff", 0)
    if loss.loss_type in ("sapo", "gmpo") and adds_terms and aggregation != "seq-mean-token-mean":
        run.refuse(
            f"{_ACTOR}loss_agg_mode", f"{aggregation} of KL and entropy next to the mean of sequences of {loss.loss_type}"
        )
    names = ["policy_loss.loss_mode", "loss_agg_mode", "loss_scale_factor", "tau_pos", "tau_neg", "policy_loss.dro_beta"]
    names += [f"policy_loss.{name}" for name in numbers]
    _put(run, command, [f"{_ACTOR}{name}" for name in names], shapes, f"{loss.aggregation} mean, ratio of a {loss.level}")
    if loss.low is not None:
        bounds = {
            "clip_higher_enable": True,
            "clip_ratio_low": loss.low,
            "clip_ratio_high": loss.high,
            "clip_ratio_c": loss.dual,
        }
        names = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "clip_ratio")
        values = {f"{RL}.{name}": value for name, value in bounds.items() if value is not None}
        _put(
            run,
            command,
            [f"{_ACTOR}{name}" for name in names],
            values,
            "clip_ratio alone decides nothing" if command.has(f"{_ACTOR}clip_ratio") else "",
        )
    else:
        for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "clip_ratio"):
            if command.has(f"{_ACTOR}{name}"):
                run.note(f"{_ACTOR}{name}", "the loss does not clip", changes_nothing=False)
    if kl.place == "loss" and has_critic:
        run.refuse(
            f"{_ACTOR}use_kl_loss", "a KL in the loss next to a critic; algorithm.use_kl_in_reward puts it into the reward"
        )
    values = {f"{RL}.init_kl_coef": kl.coefficient}
    if kl.place is not None:
        values |= {f"{RL}.kl_penalty": kl.estimator, f"{RL}.use_kl_in_reward": kl.place == "reward"}
    names = (
        "algorithm.use_kl_in_reward", f"{_ACTOR}use_kl_loss", "algorithm.kl_ctrl.kl_coef", f"{_ACTOR}kl_loss_coef",
        "algorithm.kl_penalty", f"{_ACTOR}kl_loss_type",
    )  # fmt: skip
    _put(run, command, names, values, f"in the {kl.place}" if kl.place else "no KL")


def _set_distillation(run: Import, command: SourceCommand) -> None:
    """Set the teacher: a Megatron model here, on the devices of its pool."""
    loss, key, prefix = "distillation.distillation_loss.", f"{RL}.distillation", "distillation."
    given = [name for name in command.options if name.startswith(prefix)]
    if not command.flag("distillation.enabled"):
        for name in given:
            run.note(name, "there is no teacher", changes_nothing=False)
        return
    gradient = command.flag(f"{loss}use_policy_gradient")
    tasks = bool(command.get(f"{loss}use_task_rewards", True))
    clips = [name for name in given if name.startswith(f"{loss}clip_ratio")]
    if clips and gradient and any(command.number(name, 0.2) != command.number(f"{_ACTOR}clip_ratio", 0.2) for name in clips):
        run.refuse(clips[0], "another clip for the teacher than for the actor's loss")
    for name in clips:
        run.translated.setdefault(name, "the clip of the actor's loss")
    if gradient and tasks and "vanilla" != str(command.get(f"{_ACTOR}policy_loss.loss_mode", "vanilla")):
        run.refuse(f"{loss}use_policy_gradient", "another policy loss for task rewards than for the teacher")
    path = "distillation.teacher_models.teacher_model.model_path"
    _put(run, command, ["distillation.enabled"], {f"{key}.enabled": True})
    if not command.get(path):
        run.refuse("distillation.enabled", "several teachers in a command; see rl_config.distillation.teacher_keys")
    _put(run, command, [path], {f"{key}.teacher_models": [command.get(path)]})
    defaults = {
        "loss_mode": "k3",
        "topk": 32,
        "use_task_rewards": True,
        "distillation_loss_coef": 1.0,
        "use_policy_gradient": False,
    }
    mode = str(command.get(f"{loss}loss_mode", "k3"))
    for name, default in defaults.items():
        value = command.get(f"{loss}{name}", default)
        if name == "topk" and mode != "forward_kl_topk" or name == "distillation_loss_coef" and not tasks:
            if command.has(f"{loss}{name}"):
                run.note(f"{loss}{name}", f"not read with loss_mode {mode}" if name == "topk" else "use_task_rewards is false")
            continue
        _put(run, command, [f"{loss}{name}"], {f"{key}.{name}": value})
    for name in ("loss_max_clamp", "log_prob_min_clamp"):
        if command.get(f"{loss}{name}") is not None:
            _put(run, command, [f"{loss}{name}"], {f"{key}.{name}": command.number(f"{loss}{name}", 0.0)})
        elif command.has(f"{loss}{name}"):
            run.note(f"{loss}{name}", "off", changes_nothing=False)
    # prompt log-probs of its servers have no temperature
    run.add_default(f"{key}.teacher_temperature", 1.0, "the teacher's log-probs have no temperature in verl")
    pool = ["distillation.n_gpus_per_node", "distillation.nnodes"]
    devices = int(command.number(pool[0], 8)) * int(command.number(pool[1], 0))
    _put(
        run,
        command,
        [name for name in pool if command.has(name)],
        {f"{RL}.teacher_resource.num_npus": devices} if devices else {},
    )


def _set_reward(run: Import, command: SourceCommand) -> None:
    manager_names = [name for name in ("reward_model.reward_manager", "reward.reward_manager.name") if command.has(name)]
    manager = str(command.get(manager_names[0])) if manager_names else "naive"
    for name in manager_names:
        if manager in ("naive", "dapo", "batch"):
            run.note(name, f"{manager}: each response has one score", changes_nothing=False)
        else:
            run.refuse(name, f"the reward manager {manager}")
    if command.has("reward.reward_manager.source"):
        run.note("reward.reward_manager.source", "register: a manager of verl", changes_nothing=False)
    paths = [name for name in ("reward.custom_reward_function.path", "custom_reward_function.path") if command.get(name)]
    names = [name.replace(".path", ".name") for name in paths]
    model_names = (
        "reward.reward_model.enable",
        "reward_model.enable",
        "reward.reward_model.model_path",
        "reward_model.model.path",
    )
    if any(command.flag(name) for name in model_names[:2]):
        path = command.get(model_names[2]) or command.get(model_names[3])
        _put(run, command, model_names, {f"{RL}.reward_model": path, f"{RL}.rule_reward": bool(paths)})
    else:
        for name in model_names:
            if command.has(name):
                run.note(name, "there is no reward model", changes_nothing=False)
    if paths:
        path, function = _find_module(command, paths[0]), command.text(names[0], "compute_score")
        if path.startswith(("/", "~", "..")) or not path.endswith(".py"):
            run.refuse(
                paths[0], f"a function outside the working directory: {path}; write rl_config.verifier_function: [module:name]"
            )
        module = path.removesuffix(".py").replace("/", ".")
        values = {f"{RL}.verifier_function": [f"{module}:{function}"]}
        columns = {f"{MEGATRON}.dataset_additional_keys": ["labels", "data_source", "extra_info"]}
        _put(
            run,
            command,
            [*paths, *names],
            {**values, **columns},
            "solution_str, ground_truth, data_source and extra_info by name",
        )
    elif run.get(f"{RL}.rule_reward") is not False and not run.refused:
        source = _find_source(str(run.get(f"{MEGATRON}.data_path")), run.settings.variables)
        reward = _REWARDS.get(source) or ("acc_for_dapo" if source.startswith("aime") else None)
        if reward is None:
            run.refuse("data.train_files", f"verl's reward for the data_source {source}; available are {', '.join(_REWARDS)}")
        else:
            run.add_default(f"{RL}.verifier_function", [reward], f"verl's reward for the data_source {source}")
    for name in ("custom_reward_function.path", "custom_reward_function.name"):
        for option in (name, f"reward.{name}"):
            if command.has(option) and option not in (*run.translated, *run.refused):
                run.note(option, "verl's own reward", changes_nothing=False)
    _set_overlong(run, command, manager)
    names = run.get(f"{RL}.verifier_function")
    if run.get(f"{RL}.filter_groups_enable") and isinstance(names, list):
        run.add_default(f"{RL}.filter_groups_metric", names[0], "the score by which verl filters groups")
        metric = command.text("algorithm.filter_groups.metric", "reward")
        if metric not in ("acc", "score") and run.get(f"{RL}.overlong_buffer_enable"):
            run.refuse(
                "algorithm.filter_groups.metric", f"groups that are filtered by {metric}, with the penalty of long responses"
            )


def _find_module(command: SourceCommand, option: str) -> str:
    """Return the path of a Python file, from the working directory where it is below it."""
    path = str(command.get(option))
    return path.removeprefix(f"{command.environment.get('PWD', '.')}/").removeprefix("./")


def _set_overlong(run: Import, command: SourceCommand, manager: str) -> None:
    prefix = "reward_model.reward_kwargs."
    given = [name for name in command.options if name.startswith(prefix)]
    if not given:
        return
    buffer = f"{prefix}overlong_buffer_cfg."
    if manager != "dapo" or not command.flag(f"{buffer}enable"):
        for name in given:
            run.note(name, "no penalty of long responses: the reward manager dapo reads it, where enable is true")
        return
    values = {
        f"{RL}.overlong_buffer_enable": True,
        f"{RL}.overlong_buffer": command.count(f"{buffer}len", 1),
        f"{RL}.overlong_buffer_penalty_factor": command.number(f"{buffer}penalty_factor", 1.0),
        f"{RL}.rollout_max_tokens": command.count(f"{prefix}max_resp_len", command.count("data.max_response_length", 512)),
    }
    _put(run, command, given, values, "grows over the last `len` tokens before max_resp_len")


def _set_rollout(run: Import, command: SourceCommand) -> None:
    tensor, data = command.count(f"{_ROLLOUT}tensor_model_parallel_size", 2), command.count(f"{_ROLLOUT}data_parallel_size", 1)
    expert = command.count(f"{_ROLLOUT}expert_parallel_size", 1)
    values: dict[str, object] = {f"{GENERATE}.infer_tensor_parallel_size": tensor}
    if expert > 1:
        values |= {
            f"{GENERATE}.enable_expert_parallel": True,
            f"{GENERATE}.infer_expert_parallel_size": max(1, expert // tensor),
        }
    elif data > 1:
        run.refuse(f"{_ROLLOUT}data_parallel_size", "data parallelism inside a replica without expert parallelism")
    names = ("tensor_model_parallel_size", "expert_parallel_size", "data_parallel_size")
    _put(run, command, [f"{_ROLLOUT}{name}" for name in names], values)
    limit = command.get(f"{_ROLLOUT}max_model_len")
    if limit is not None:
        run.translate(f"{_ROLLOUT}max_model_len", {f"{GENERATE}.max_model_len": limit})
    run.add_default(f"{MEGATRON}.seed", 42, _DEFAULT)
    if command.flag(f"{_ROLLOUT}multi_turn.enable"):
        length = command.count("data.max_response_length", 512)
        run.add_default(f"{RL}.max_total_response_length", length, "data.max_response_length counts all turns")
    if command.has(f"{_ROLLOUT}val_kwargs.do_sample"):
        run.translate(
            f"{_ROLLOUT}val_kwargs.do_sample", {f"{RL}.eval_greedy": not command.flag(f"{_ROLLOUT}val_kwargs.do_sample")}
        )
    loop = command.text(f"{_ROLLOUT}agent.default_agent_loop", "single_turn_agent")
    if command.has(f"{_ROLLOUT}agent.default_agent_loop"):
        if loop == "single_turn_agent":
            run.note(f"{_ROLLOUT}agent.default_agent_loop", "one turn", changes_nothing=False)
        elif loop == "tool_agent":
            run.translate(f"{_ROLLOUT}agent.default_agent_loop", {f"{RL}.agent_loop": "tool_agent"})
        else:
            run.refuse(f"{_ROLLOUT}agent.default_agent_loop", f"the agent loop {loop}")
    correction = _read_correction(command)
    names = [f"{_CORRECTION}{name}" for name in ("rollout_is", "rollout_is_threshold")]
    values = {}
    if correction is not None:
        mode, high, low = correction
        values = {f"{RL}.rollout_importance_sampling_mode": mode, f"{RL}.rollout_importance_sampling_threshold": high}
        values |= {} if low is None else {f"{RL}.rollout_importance_sampling_threshold_min": low}
    _put(run, command, names, values, "" if correction else "no correction")
    dedicated_rollout = command.has("actor_rollout_ref.hybrid_engine") and not command.flag("actor_rollout_ref.hybrid_engine")
    dedicated = command.count("rollout.nnodes", 1) * command.count("rollout.n_gpus_per_node", 8)
    values = {f"{RL}.trainer_mode": "one_step_off", f"{RL}.rollout_resource.num_npus": dedicated} if dedicated_rollout else {}
    values |= {f"{RL}.use_integrated_worker": False} if dedicated_rollout else {}
    names = ["actor_rollout_ref.hybrid_engine", "rollout.n_gpus_per_node", "rollout.nnodes"]
    _put(
        run,
        command,
        names,
        values,
        "the rollout has devices of its own" if dedicated_rollout else "training and rollout share their devices",
    )
    for name in ("nnodes", "n_gpus_per_node"):
        if command.has(f"{_ROLLOUT}{name}"):
            run.note(f"{_ROLLOUT}{name}", "the rollout's devices are those of the trainer, or of the group rollout")


def _set_critic(run: Import, command: SourceCommand, batch: _Batch, *, has_critic: bool) -> None:
    names = [name for name in command.options if name.startswith("critic.")]
    if not has_critic:
        for name in names:
            run.translated.pop(name, None)
            run.refused.pop(name, None)
            run.note(name, "there is no critic")
        run.tree.pop("critic_config", None)
        if command.has("trainer.critic_warmup"):
            run.note("trainer.critic_warmup", "there is no critic")
        return
    if run.get("critic_config.load") is None:
        raise ConfigError(["the command names no critic: critic.model.path is missing"])
    layout = _Layout.of_role(command, "critic.", "critic.fsdp.")
    _set_rate(run, command, "critic.optim.", "critic_config", layout, batch, 1e-5)
    micro = command.count("critic.ppo_micro_batch_size_per_gpu", 1)
    _put(
        run,
        command,
        ["critic.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size"],
        {"critic_config.micro_batch_size": micro},
    )
    for name, value in (("ppo_mini_batch_size", batch.mini), ("ppo_epochs", batch.epochs), ("loss_agg_mode", "token-mean")):
        if command.get(f"critic.{name}", value) != value:
            run.refuse(f"critic.{name}", f"another value than {value} for the critic")
    if command.text(f"{_ACTOR}loss_agg_mode", "token-mean") != "token-mean" and not command.has("critic.loss_agg_mode"):
        run.refuse(f"{_ACTOR}loss_agg_mode", "a value loss that is not the mean over tokens")
    if command.has("trainer.critic_warmup"):
        run.translate(
            "trainer.critic_warmup", {f"{RL}.critic_warmup": int(command.number("trainer.critic_warmup", 0))}, "rollouts"
        )
    for name in names:
        if not any(name in notes for notes in (run.translated, run.same, run.without_effect, run.refused)):
            run.note(name, "as the actor's: roles that share devices share a layout, which changes no result")


def _set_profiler(run: Import, command: SourceCommand) -> None:
    """Set the profiler where its tool is npu and a role is enabled."""
    roles = {
        f"{_ACTOR}profiler.": ["actor_update", "actor_compute_log_prob"],
        f"{_REF}profiler.": ["reference_compute_log_prob"],
        f"{_ROLLOUT}profiler.": ["actor_generate"],
        "critic.profiler.": ["critic_update", "critic_compute_values"],
    }
    traced = [name for name in command.options if name.startswith("global_profiler.") or any(map(name.startswith, roles))]
    traced = [name for name in traced if command.table[name].text.startswith("profiler_config")]
    enabled = {prefix: stages for prefix, stages in roles.items() if command.flag(f"{prefix}enable")}
    tool = command.get("global_profiler.tool")
    if not enabled or tool is None:
        for name in traced:
            run.note(name, "no role is profiled: its steps and roles are not set")
        return
    if tool not in ("npu", "torch"):
        for name in traced:
            run.note(name, f"the profiling tool {tool}; profiler_config records with the platform's own")
        return
    prefix = next(iter(enabled))
    contents = set(_list_files(command.get(f"{prefix}tool_config.npu.contents") or []))
    steps = [int(item) for item in _list_files(command.get("global_profiler.steps") or [1])]
    level = command.text(f"{prefix}tool_config.npu.level", "level0")
    values: dict[str, object] = {
        "profile": True,
        "stage": list(dict.fromkeys(stage for stages in enabled.values() for stage in stages)),
        "profile_level": level if level.startswith("level") else "level0",
        "profile_analysis": command.flag(f"{prefix}tool_config.npu.analysis", default=True),
        "profile_step_start": min(steps),
        "profile_step_end": max(steps) + 1,
        "profile_save_path": command.text("global_profiler.save_path", "outputs/profile"),
    }
    parts = {"npu": "npu", "cpu": "cpu", "memory": "memory", "module": "module", "stack": "module"}
    values |= {f"profile_with_{part}": True for name, part in parts.items() if name in contents}
    values |= {"profile_record_shapes": True} if "shapes" in contents else {}
    ranks = [int(item) for item in _list_files(command.get(f"{prefix}ranks") or [])]
    values["profile_ranks"] = "all" if command.flag(f"{prefix}all_ranks") or not ranks else ranks
    note = f"steps {min(steps)} to {max(steps)}"
    _put(run, command, traced, {f"profiler_config.integrated.{name}": value for name, value in values.items()}, note)


def _set_rows(run: Import, command: SourceCommand, batch: _Batch) -> None:
    """Set what the supervised trainer learns from."""
    run.add_default(f"{MEGATRON}.stage", "sft", "the supervised trainer")
    files = _list_files(command.get("data.train_files") or "")
    if not files:
        raise ConfigError(["the command names no data: data.train_files is missing"])
    if len(files) > 1:
        run.refuse("data.train_files", f"{len(files)} files: preprocess them into one dataset")
    model = run.get(f"{MEGATRON}.tokenizer_name_or_path")
    prefix = re.sub(r"\.\w+$", "", files[0])
    column = command.text("data.messages_key", "messages")
    thinking = command.text("data.enable_thinking_default", "none").lower()
    head = f"mindspeed-rl preprocess --input {files[0]} --output-prefix {prefix} --tokenizer-name-or-path {model}"
    mapped = f""" --map-keys '{{"messages": "{column}"}}'""" if column != "messages" else ""
    switch = f" --enable-thinking {thinking}" if thinking in ("true", "false") else ""
    note = f"the prefix that is written by: {head} --handler-name OpenAIInstructionHandler --prompt-type hf{mapped}{switch}"
    run.translate("data.train_files", {f"{MEGATRON}.data_path": prefix}, note)
    for name in ("data.messages_key", "data.enable_thinking_default"):
        if command.has(name):
            run.translated[name] = "an option of that preprocessing"
    limit = command.get("data.train_max_samples")
    if isinstance(limit, int) and limit > 0:
        run.refuse("data.train_max_samples", "a part of the rows: preprocess that part")
    elif command.has("data.train_max_samples"):
        run.note("data.train_max_samples", "all rows", changes_nothing=False)
    micro = 1 if command.flag("data.use_dynamic_bsz", default=True) else command.count("data.micro_batch_size_per_gpu", 4)
    _put(run, command, ["data.train_batch_size"], {f"{MEGATRON}.global_batch_size": batch.trained})
    _put(run, command, ["data.micro_batch_size_per_gpu"], {f"{MEGATRON}.micro_batch_size": micro})
    _put(run, command, ["data.max_length"], {f"{MEGATRON}.seq_length": command.count("data.max_length", 1024)})
    run.add_default(f"{MEGATRON}.no_pad_to_seq_lengths", True, "rows are padded to the longest of a micro-batch")
    if command.has("data.truncation"):
        if command.get("data.truncation") == "error":
            run.note("data.truncation", "rows of seq_length tokens and more are left out by the preprocessing")
        else:
            run.refuse("data.truncation", "rows that are cut; --seq-length of mindspeed-rl preprocess leaves them out")


# -------------------------------------------------------------------------------------------------------------------- plan


def _plan(command: SourceCommand, rows: int) -> SourcePlan:
    """Return the plan of a command by verl's formulas."""
    batch, layout, supervised = _Batch.from_command(command), _read_layout(command), command.program == "sft"
    rollouts = _count_rollouts(command, batch, rows)
    prefix, role = ("optim.", "") if supervised else (f"{_ACTOR}optim.", _ACTOR)
    peak = command.number(f"{prefix}lr", 1e-3 if supervised else 1e-6)
    steps = batch.steps
    # a step of verl's schedule is a rollout
    rates: Rates = _read_schedule(command, prefix, layout.engine, peak, rollouts).over(rollouts)
    model = "model." if supervised else _MODEL
    rank = command.number(f"{model}{'lora.rank' if layout.engine == 'megatron' else 'lora_rank'}", 0)
    if any(command.get(f"{model}{name}") for name in _ADAPTER):
        rank = UNSET_RANK
    clips = (f"{prefix}clip_grad", f"{role}grad_clip")
    files = _list_files(command.get("data.train_files") or "")
    limit = command.get("data.train_max_samples")
    part = f"#{limit}" if isinstance(limit, int) and limit > 0 else ""
    shared = SourcePlan(
        stage="sft",
        step_samples=batch.mini,
        steps_per_rollout=steps,
        total_steps=rollouts * steps,
        lr_first=rates.rates[0],
        lr_10=rates.rates[1],
        lr_last=rates.rates[2],
        lr_warmup_steps=rates.warmup * steps,
        loss="cross_entropy",
        sequence_length=command.count("data.max_length", 1024) if supervised else None,
        tp=layout.tensor,
        pp=layout.pipeline,
        cp=layout.context,
        ep=layout.expert,
        dp=layout.replicas(command.devices),
        lora_rank=int(rank),
        weight_decay=command.number(f"{prefix}weight_decay", 0.01),
        clip_grad=next((command.number(name, 1.0) for name in clips if command.has(name)), 1.0),
        data=tuple(re.sub(r"\.\w+$", "", path) if supervised else path + part for path in files),
        model=command.text(f"{model}path"),
    )
    return shared if supervised else _plan_rollout(shared, command, batch)


def _plan_rollout(shared: SourcePlan, command: SourceCommand, batch: _Batch) -> SourcePlan:
    """Return the plan of main_ppo."""
    estimator, loss, kl, correction = (
        _read_estimator(command), _Loss.from_command(command), _Kl.from_command(command), _read_correction(command)
    )  # fmt: skip
    reads = ADVANTAGES[estimator].reads or frozenset()
    has_critic = estimator == "gae"
    scale = "group" if command.flag("algorithm.norm_adv_by_std_in_grpo", default=True) else "none"
    paths = [
        _find_module(command, name)
        for name in ("reward.custom_reward_function.path", "custom_reward_function.path")
        if command.get(name)
    ]
    return replace(
        shared,
        stage="ray_ppo" if has_critic else "ray_grpo",
        rollout_prompts=batch.rollout,
        rollout_completions=batch.rollout * batch.group,
        step_samples=min(batch.mini, batch.trained) * batch.group,
        loss=loss.name,
        level=loss.level,
        clip_low=loss.low,
        clip_high=loss.high,
        clip_c=loss.dual,
        aggregation=loss.aggregation,
        kl_coef=kl.coefficient,
        kl_estimator=kl.estimator,
        kl_place=kl.place,
        advantage=estimator,
        advantage_scale=scale if "scale_rewards" in reads else None,
        entropy_coef=command.number(f"{_ACTOR}entropy_coeff", 0),
        gamma=(1.0 if estimator == "remax" else command.number("algorithm.gamma", 1.0)) if "gamma" in reads else None,
        lam=command.number("algorithm.lam", 1.0) if "lam" in reads else None,
        value_clip=command.number("critic.cliprange_value", 0.5) if has_critic else None,
        critic_lr=command.number("critic.optim.lr", 1e-5) if has_critic else None,
        importance_sampling=None if correction is None else f"{correction[0]} {correction[1]:g}",
        temperature=command.number(f"{_ROLLOUT}temperature", 1.0),
        top_p=command.number(f"{_ROLLOUT}top_p", 1.0),
        top_k=int(command.number(f"{_ROLLOUT}top_k", -1)),
        min_p=0.0,
        prompt_length=command.count("data.max_prompt_length", 512),
        response_length=command.count("data.max_response_length", 512),
        infer_tp=command.count(f"{_ROLLOUT}tensor_model_parallel_size", 2),
        rewards=_plan_rewards(command, paths),
    )


def _plan_rewards(command: SourceCommand, paths: Sequence[str]) -> tuple[str, ...]:
    """Return the functions and models that score, sorted."""
    has_model = any(command.flag(name) for name in ("reward.reward_model.enable", "reward_model.enable"))
    model = str(command.get("reward.reward_model.model_path") or command.get("reward_model.model.path"))
    if paths:
        name = command.text("reward.custom_reward_function.name", command.text("custom_reward_function.name", "compute_score"))
        own = f"{paths[0].removesuffix('.py').replace('/', '.')}:{name}"
        return tuple(sorted([own, *([model] if has_model else [])]))
    if has_model:
        return (model,)
    source = _find_source(str(command.get("data.train_files")), command.environment)
    return (_REWARDS.get(source) or "acc_for_dapo",)


PROJECT = SourceProject("verl", "verl", "0.9.1", TABLES, _read, _build, _plan, prefix="")
