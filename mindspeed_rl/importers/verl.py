"""Commands of verl as run files: `main_ppo` with its estimators and losses, and the supervised trainer.

The options are in `verl_options.py`. Here is what several of them make up, and the plan of a command by verl's own formulas.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_rl.catalogue import ADVANTAGES
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.keys import collect_keys
from mindspeed_rl.config.keys.ignored import IGNORED
from mindspeed_rl.files import read_json
from mindspeed_rl.importers.megatron_options import divide_layers
from mindspeed_rl.importers.options import (
    UNSET,
    Option,
    SourceCommand,
    SourceProject,
    by,
    no_effect,
    part,
    read_number,
    refused,
    to,
    with_others,
)
from mindspeed_rl.importers.recipe import (
    ACTOR,
    ENGINE,
    OVERLONG,
    RL,
    Adapters,
    Batch,
    Correction,
    Layout,
    Objective,
    Overlong,
    Placement,
    Prediction,
    Rate,
    Recipe,
    Rewards,
)
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command, list_unknown, request_variables
from mindspeed_rl.importers.source_files import require_file
from mindspeed_rl.importers.source_plan import RECORDED_POLICY, Schedule
from mindspeed_rl.importers.training_engine import keep_fsdp
from mindspeed_rl.importers.translators import (
    describe_preprocessing,
    find_module,
    offload_optimizer,
    take_template_words,
)
from mindspeed_rl.importers.verl_earlier import PLAIN, PROMPT, RESPONSE, TRAINER, name_differences, rename_options
from mindspeed_rl.importers.verl_earlier import TABLE as EARLIER_TABLE
from mindspeed_rl.importers.verl_files import Composition, References, is_key
from mindspeed_rl.importers.verl_losses import AGGREGATIONS, OF_COVARIANCE, RELEASE, Kl, Loss, is_reinforce
from mindspeed_rl.importers.verl_options import ROLLOUT_FORMAT, TABLES, TRACED, TRANSFORMER, list_words
from mindspeed_rl.importers.writer import (
    RECOMPUTE_LAYERS,
    UNSET_RANK,
    find_lora_targets,
    has_experts,
    list_expert_defaults,
    note_prediction,
    start_from_adapter,
)

_ACTOR, _REF, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}." for name in ("actor", "ref", "rollout", "model"))
_CORRECTION = "algorithm.rollout_correction."
#: modules of verl's commands -> table
_PROGRAMS = {
    "main_ppo": "ppo",
    "sft_trainer": "sft",
    "sft_trainer_ray": "sft",
    # of releases before 0.9
    TRAINER: "sft",
    # a recipe of earlier releases, whose groups and penalty main_ppo has now
    "main_dapo": "ppo",
    "fully_async_main": "ppo",
}
_FULLY_ASYNC = "fully_async_main"
#: verl's newer trainer: its modes, and the groups of their options
_MODE, _MODES = "trainer.v1.trainer_mode", ("sync", "colocate_async", "separate_async")
_COLOCATED, _SEPARATE, _SAMPLER = (f"trainer.v1.{name}." for name in ("colocate_async", "separate_async", "sampler"))
_REFUSED_PROGRAMS = {
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
#: what verl's default reward computes for a source of data -> reward function here
_REWARDS = {
    "openai/gsm8k": "verl_gsm8k",
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), "verl_math_dapo"),
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), "verl_math"),
    "hiyouga/geometry3k": "verl_geo3k",
    **dict.fromkeys(
        (f"searchR1_{name}" for name in "nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle".split()),
        "verl_search_em",
    ),
}
#: word of a data file's path -> the source that verl's preprocessing writes for it
_SOURCES = {"gsm8k": "openai/gsm8k", "dapo": "math_dapo", "aime": "aime"}
#: options that releases before 0.9.1 had, and where they are now
_RENAMED = (
    (r"critic\.model\.fsdp_config\.", "critic.fsdp."),
    (r"reward\.reward_kwargs\.", "reward_model.reward_kwargs."),
    (r"reward_model\.sandbox_fusion\.", "sandbox_fusion."),
    (r"reward_model\.overlong_buffer\.", "reward_model.reward_kwargs.overlong_buffer_cfg."),
)
_NO_PENALTY = "no penalty of long responses: the reward manager dapo reads it, where enable is true"
_OFFLOAD_NAMES = r"override_optimizer_config\.(optimizer_cpu_offload|optimizer_offload_fraction)"
#: options that a release takes without listing them: pattern -> record, by the name that the pattern finds
_OPEN: tuple[tuple[str, Mapping[str, Option] | Option], ...] = (
    (r"actor_rollout_ref\.actor\.megatron\.override_transformer_config\.(\w+)", TRANSFORMER),
    (r"engine\.override_transformer_config\.(\w+)", TRANSFORMER),
    (
        r"(?:actor_rollout_ref\.ref|critic)\.megatron\.override_transformer_config\.(\w+)",
        no_effect("reference and critic have the actor's settings"),
    ),
    (rf"actor_rollout_ref\.actor\.optim\.{_OFFLOAD_NAMES}", offload_optimizer(ACTOR, 0.0)),
    (rf"optim\.{_OFFLOAD_NAMES}", offload_optimizer(ACTOR, 0.0)),
    (rf"critic\.optim\.{_OFFLOAD_NAMES}", offload_optimizer("critic_config", 0.0)),
    (rf"(?:\w+\.)*optim\.{_OFFLOAD_NAMES}", no_effect("a model that does not train has no optimizer")),
    (
        r"(?:\w+\.)*optim\.override_optimizer_config\.(?:overlap_cpu_optimizer_d2h_h2d|use_torch_optimizer_for_cpu_offload|"
        r"use_precision_aware_optimizer)",
        no_effect("copies overlap with the host's AdamW, which is torch's, and states are float32"),
    ),
    (r"actor_rollout_ref\.actor\.megatron\.override_ddp_config\.grad_reduce_in_fp32", to(f"{ACTOR}.grad_reduce_in_fp32")),
    (r"(?:\w+\.)*override_ddp_config\.\w+", no_effect("buckets and overlap of gradients")),
    (r"(?:\w+\.)*turbo_config\..+", no_effect("Megatron-core is the engine: memory and sharding of FSDP")),
    (
        r"(?:actor_rollout_ref\.actor\.fsdp_config|engine)\.mixed_precision\.param_dtype",
        to(f"{ACTOR}.bf16", values={**dict.fromkeys(("bf16", "bfloat16"), True), **dict.fromkeys(("fp32", "float32"), False)}),
    ),
    (
        r"(?:\w+\.)*(?:fsdp_config|fsdp|engine)\.mixed_precision\.(?:reduce_dtype|buffer_dtype)",
        no_effect("gradients are reduced in fp32, which rounds less than bf16", "fp32", "float32", "bf16", "bfloat16"),
    ),
    (
        r"(?:\w+\.)*(?:fsdp_config|fsdp)\.mixed_precision\.param_dtype",
        no_effect("reference and critic are computed in the actor's format"),
    ),
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
        by(lambda run, option, value: _limit_media(run, option, value), "limit_mm_image_per_prompt, and of videos"),
    ),
    (r"actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.enable_expert_parallel", to(f"{ENGINE}.enable_expert_parallel")),
    (r"actor_rollout_ref\.rollout\.moe_tensor_parallel_size", no_effect("how TensorRT-LLM splits experts")),
    (
        r"actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.(max_model_len|max_num_seqs|max_num_batched_tokens|enforce_eager|"
        r"gpu_memory_utilization|enable_prefix_caching|dtype|kv_cache_dtype)",
        by(lambda run, option, value: _set_engine(run, option, value, f"{ENGINE}."), "the key of that name"),
    ),
    (r"actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.quantization", ROLLOUT_FORMAT),
    (r"actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.async_scheduling", no_effect("the engine schedules by itself")),
    (
        r"actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.((?:compilation|additional|speculative)_config\.[\w.]+)",
        by(lambda run, option, value: _set_engine(run, option, value, f"{ENGINE}."), "compilation_config"),
    ),
    (
        r"actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.([\w.]+)",
        by(lambda run, option, value: _set_engine(run, option, value, f"{ENGINE}.engine_kwargs."), "engine_kwargs"),
    ),
    (r"actor_rollout_ref\.rollout\.engine_kwargs\.(?:sglang|trtllm)\.[\w.]+", no_effect("read only by other engines")),
    (r"data\.apply_chat_template_kwargs\.enable_thinking", to(f"{ACTOR}.enable_thinking")),
    (
        r"data\.apply_chat_template_kwargs\.[\w.]+",
        by(lambda run, option, value: _set_template_argument(run, option, value), "chat_template_kwargs"),
    ),
    # names of earlier releases
    (
        r"actor_rollout_ref\.actor\.router_replay\.mode",
        to(f"{RL}.router_replay.mode", values={"disabled": "disabled", "R2": "R2", "R3": "R3"}),
    ),
    (r"actor_rollout_ref\.actor\.megatron\.grad_offload", to(f"{ENGINE}.offload_train_grad")),
    (r"(?:actor_rollout_ref\.ref|critic)\.megatron\.grad_offload", no_effect("gradients are freed with the actor's")),
    (
        r"reward_model\.(?:use_reward_loop|micro_batch_size_per_gpu|micro_batch_size|use_dynamic_bsz|max_length|strategy|"
        r"forward_max_token_len_per_gpu|ulysses_sequence_parallel_size|model\.(?:input_tokenizer|use_remove_padding|"
        r"fsdp_config\.\w+))",
        no_effect("the reward model is read from its folder, and scores on the actor's devices"),
    ),
    (
        r"reward_model\.reward_kwargs\.(?:max_resp_len|overlong_buffer_cfg\.\w+)",
        part(OVERLONG, off=_NO_PENALTY),
    ),
    (r"ray_kwargs\.ray_init\.[\w.]+", no_effect("the command starts or finds the Ray cluster")),
    (r"actor_rollout_ref\.rollout\.enable_sleep_mode", no_effect("the engine gives its memory back where it shares devices")),
    (r"trainer\.use_legacy_worker_impl", no_effect("verl's own loop")),
    (r"hydra\.[\w.]+", no_effect("the folder of the run is run_dir")),
    (r"model_engine", with_others("the engine")),
    (
        r"distillation\.teacher_models\.\w+\.(?:model_path|key)",
        part("distillation.teacher_models distillation.teacher_keys", off="there is no teacher"),
    ),
    (
        r"distillation\.teacher_models\.\w+\.(?:num_replicas|inference\.[\w.]+)",
        no_effect("a teacher is a Megatron model on the devices of its pool"),
    ),
)


def _set_engine(run: Import, option: str, value: object, prefix: str) -> None:
    run.translate(option, {prefix + option.partition(".vllm.")[2]: value})


def _set_template_argument(run: Import, option: str, value: object) -> None:
    run.translate(option, {f"{ACTOR}.chat_template_kwargs.{option.partition('_kwargs.')[2]}": value})


def _limit_media(run: Import, option: str, value: object) -> None:
    kind = option.rpartition("limit_mm_per_prompt")[2].removeprefix(".")
    limits = value if isinstance(value, Mapping) else {kind: value}
    if any(limits[name] for name in limits if name not in ("image", "video")):
        run.refuse(option, "sound")
        return
    named = [name for name in ("image", "video") if limits.get(name) or (name == "image" and name in limits)]
    keys = {f"{ENGINE}.limit_mm_{name}_per_prompt": limits[name] for name in named}
    run.translate(option, keys, "" if keys else "0: only images are read")


def _find_record(name: str) -> Option | None:
    """Return the record of an option that no release lists."""
    for pattern, entry in _OPEN:
        if match := re.fullmatch(pattern, name):
            return entry if isinstance(entry, Option) else entry.get(match.group(1)) or _find_argument(match.group(1))
    return None


def _find_argument(name: str) -> Option | None:
    """Return the record of an argument of Megatron or MindSpeed that is a key here by the same name."""
    if f"{ACTOR}.{name}" in collect_keys():
        return to(f"{ACTOR}.{name}")
    ignored = IGNORED["MegatronConfig"].get(name)
    return None if ignored is None else no_effect(ignored.reason[0])


# -------------------------------------------------------------------------------------------------------------------- read


def _read(commands: list[Command], devices: int | None) -> SourceCommand:
    """Return the verl command of a script, a file of its configuration, or only keys."""
    if len(commands) == 1 and len(commands[0].words) == 1 and Path(commands[0].words[0]).suffix in (".yaml", ".yml"):
        composition = Composition(commands[0])
        composition.read_file(require_file(commands[0], "verl", commands[0].words[0]))
        program = "ppo" if any(name.startswith("actor_rollout_ref.") for name in composition.options) else "sft"
        return _complete(program, composition.options, devices, commands[0].environment)
    # only keys, or keys on lines of their own after the program
    keys = [command for command in commands if all(is_key(word) for word in command.words)]
    program, command, place = _find_command(commands, keys)
    words = [*command.words[place:], *(word for item in keys if item is not command for word in item.words)]
    # a word that is nothing but a variable may stand for any option
    if unknown := [item for word in words if word.startswith("\0") for item in list_unknown(word)]:
        raise request_variables(unknown)
    launched = _count_processes(command.words) if program == "sft" else None
    composition = Composition(command)
    recipe = next((name for name in ("main_dapo", _FULLY_ASYNC, TRAINER) if any(name in word for word in command.words)), "")
    plain = [word for word in words if recipe == TRAINER and word.lstrip("+").partition("=")[0] in PLAIN]
    composition.read_words([word for word in words if word not in plain])
    for word in plain:
        name, _, text = word.lstrip("+").partition("=")
        composition.set(name, text)
    options = rename_options(composition.options) if recipe == TRAINER else composition.options
    return _complete(
        program, options, launched or devices, command.environment, recipe,
        is_disaggregated=any("one_step_off" in word for word in command.words), loop=command.loop,
    )  # fmt: skip


def _find_command(commands: list[Command], keys: list[Command]) -> tuple[str, Command, int]:
    """Return the table of a program, its command and the place after the program; the first of the keys without a program.

    Raises:
        ConfigError: there is none, or several, or one that has no counterpart.
    """
    found: list[tuple[str, Command, int]] = []
    for command in commands:
        modules = [set(re.split(r"[./=]", word.removesuffix(".py"))) for word in command.words[:40] if not is_key(word)]
        parts = {part for module in modules for part in module}
        if feature := next((feature for name, feature in _REFUSED_PROGRAMS.items() if name in parts), None):
            raise ConfigError([f"line {command.line}: not available here: {feature}"])
        names = [(table, name) for name, table in _PROGRAMS.items() if name in parts][:1]
        found += [(table, command, 1 + next(i for i, module in enumerate(modules) if name in module)) for table, name in names]
    if len({command.line for _, command, _ in found}) > 1:
        lines = ", ".join(str(command.line) for _, command, _ in found)
        conditions = dict.fromkeys(command.uncertain for _, command, _ in found if command.uncertain)
        decides = "".join(f"; {condition} decides which one runs" for condition in conditions)
        raise ConfigError([f"the script has several commands of verl, in lines {lines}{decides}; import one of them"])
    if not found and not keys:
        raise ConfigError(["there is no command of verl, and no key such as data.train_files=train.parquet"])
    program, command, place = found[0] if found else ("ppo", keys[0], 0)
    if command.uncertain:
        raise ConfigError([f"{command.uncertain} decides whether the command of line {command.line} runs; import only it"])
    return program, command, place


def _count_processes(words: Sequence[str]) -> int | None:
    """Return the processes that torchrun starts; None without it."""
    text = " ".join(words)
    if unknown := list_unknown(text.partition(" -m ")[0]):
        raise request_variables(unknown)
    counts = [re.search(rf"--{name}[= ](\d+)", text) for name in ("nproc[-_]per[-_]node", "nnodes")]
    return None if counts[0] is None else int(counts[0][1]) * (int(counts[1][1]) if counts[1] else 1)


def _rename(name: str) -> str:
    for pattern, here in _RENAMED:
        name = re.sub(f"^{pattern}", here, name)
    return name


def _complete(
    program: str,
    composed: Mapping[str, object],
    devices: int | None,
    environment: Mapping[str, str],
    recipe: str = "",
    *,
    is_disaggregated: bool = False,
    loop: str = "",
) -> SourceCommand:
    """Return the command with values of other options in place of their names, its table and its devices."""
    options = {_rename(name): value for name, value in composed.items()}
    # those keys exist only in the configuration of that engine
    if any(name.startswith(f"{_ACTOR}megatron.") for name in options):
        options.setdefault("model_engine", "megatron")
    table = dict(TABLES[program])
    if recipe == TRAINER:
        table |= EARLIER_TABLE
    for name in options:
        if name not in table and (record := _find_record(name)) is not None:
            table[name] = record

    def look_up(name: str) -> tuple[bool, object]:
        record = table.get(name)
        if record is not None and record.default is UNSET:
            raise ConfigError([f"the value of {name}, which another option refers to, is verl's default; write it"])
        return record is not None, None if record is None else record.default

    options = References(options, environment, look_up).resolve()
    if recipe == _FULLY_ASYNC:
        # the configuration of that trainer has them
        options = {"rollout.total_rollout_steps": 100, "async_training.trigger_parameter_sync_step": 4, **options}
    if (is_disaggregated or recipe == _FULLY_ASYNC) and program == "ppo":
        options.setdefault("actor_rollout_ref.hybrid_engine", False)
        # the configuration of that trainer sets it
        options.setdefault(f"{_CORRECTION}bypass_mode", True)
    command = SourceCommand(program, options, table=table)
    per_node = command.count("trainer.n_gpus_per_node", 8 if program == "ppo" else 1)
    world = per_node * command.count("trainer.nnodes", 1)
    if devices is not None and not command.has("trainer.n_gpus_per_node"):
        world = devices
    trailing = (recipe,) if recipe else ()
    return SourceCommand(program, options, environment, world, table, trailing, loop)


# ------------------------------------------------------------------------------------------------------------ verl's numbers


#: format of FSDP's weights there -> its name
_FORMATS = {"bf16": "bfloat16", "bfloat16": "bfloat16"}
#: engine of verl's options -> the one whose options and formulas it has
_ENGINES = {**dict.fromkeys(("fsdp", "fsdp2", "fsdp_turbo", "dp"), "fsdp"), "veomni": "veomni", "megatron": "megatron"}


def _read_role_layout(command: SourceCommand, role: str, engine_group: str) -> Layout:
    """Return the split of a role: FSDP has only data parallelism and Ulysses, VeOmni experts too.

    Args:
        engine_group: group of the role's FSDP keys.
    """
    name = str(command.get(f"{role}strategy") or command.get("model_engine") or "fsdp")
    engine = _ENGINES.get(name)
    if engine is None:
        known = ", ".join(dict.fromkeys(_ENGINES.values()))
        raise ConfigError([f"not available here: the training engine {name}; {known} are"])
    if engine == "veomni":
        group = "engine." if role == "engine." else f"{role}veomni."
        context, expert = (command.count(f"{group}{name}_parallel_size", 1) for name in ("ulysses", "expert"))
        return Layout(engine, context=context, expert=expert)
    if engine == "fsdp":
        ulysses = command.get(f"{engine_group}ulysses_sequence_parallel_size")
        context = command.count(f"{role}ulysses_sequence_parallel_size", 1)
        return Layout(engine, context=ulysses if isinstance(ulysses, int) and ulysses > 1 else context)
    group = "engine." if role == "engine." else f"{role}megatron."
    names = ("tensor_model", "pipeline_model", "context", "expert_model")
    return Layout(engine, *(command.count(f"{group}{kind}_parallel_size", 1) for kind in names))


def _read_layout(command: SourceCommand) -> Layout:
    if command.program == "sft":
        return _read_role_layout(command, "engine.", "engine.")
    return _read_role_layout(command, _ACTOR, f"{_ACTOR}fsdp_config.")


@dataclass(frozen=True)
class _Ahead:
    """How far rollouts of an asynchronous trainer of verl run ahead of training on other devices.

    Attributes:
        taken: prompts of an iteration, on which the trainer works before it takes the next ones.
        steps: iterations of a version of the weights.
        versions: how many versions ahead prompts are started.
        interrupts: new weights interrupt responses, which continue.
        reason: reason of `versions`.
    """

    taken: int
    steps: int
    versions: float
    interrupts: bool
    reason: str

    @classmethod
    def from_command(cls, command: SourceCommand) -> _Ahead | None:
        """Read it; None where each rollout is trained on before the next one starts, or with it (one step off)."""
        mini = command.count(f"{_ACTOR}ppo_mini_batch_size", 256)
        if _FULLY_ASYNC in command.trailing:
            prefix = "async_training."
            steps = command.count(f"{prefix}trigger_parameter_sync_step", 4)
            taken = mini * command.count(f"{prefix}require_batches", 1)
            age = command.number(f"{prefix}staleness_threshold", 0.1)
            return cls(taken, steps, age, command.flag(f"{prefix}partial_rollout", default=True), "staleness_threshold")
        if _read_mode(command) != "separate_async":
            return None
        steps, batch = command.count(f"{_SEPARATE}parameter_sync_step", 4), command.count("data.train_batch_size", 1024)
        if batch != steps * mini:
            raise ConfigError([f"data.train_batch_size is {batch}, but separate_async needs parameter_sync_step ({steps}) x "
                               f"ppo_mini_batch_size ({mini})"])  # fmt: skip
        # a prompt may be of that many versions there, the one that trains included
        spans = command.count(f"{_SAMPLER}max_off_policy_threshold", 8)
        started = command.count(f"{_SEPARATE}num_warmup_batches", 1)
        reason = f"num_warmup_batches are started ahead there; prompts of {spans} versions are too old, which none is here"
        return cls(mini, steps, float(min(started, spans - 1)), True, reason)


def _read_mode(command: SourceCommand) -> str:
    """Return the mode of verl's newer trainer, which use_v1: false leaves out."""
    return command.text(_MODE, "sync") if command.program == "ppo" and command.flag("trainer.use_v1", default=True) else "sync"


@dataclass(frozen=True)
class _Batch:
    """Numbers of a batch, in prompts (supervised: rows).

    Attributes:
        rollout: that are sampled.
        trained: that groups are filtered to.
        counted: prompts by which a pass over the data is counted: DAPO's recipe counts the sampled ones.
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
        if (ahead := _Ahead.from_command(command)) is not None:
            mini, epochs = command.count(f"{_ACTOR}ppo_mini_batch_size", 256), command.count(f"{_ACTOR}ppo_epochs", 1)
            return cls(ahead.taken, ahead.taken, command.count(f"{_ROLLOUT}n", 1), mini, epochs, ahead.taken)
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
    if _FULLY_ASYNC in command.trailing:
        return command.count("rollout.total_rollout_steps", 100) // batch.rollout
    # a step of that trainer is a version of the weights
    ahead, total = _Ahead.from_command(command), command.get("trainer.total_training_steps")
    steps = 1 if ahead is None else ahead.steps
    if isinstance(total, int) and not isinstance(total, bool) and total > 0:
        return total * steps
    limit = command.get("data.train_max_samples")
    rows = min(rows, limit) if isinstance(limit, int) and limit > 0 else rows
    epochs = command.count("trainer.total_epochs", 30 if command.program == "ppo" else 4)
    return rows // (batch.counted * steps) * steps * epochs


def _read_schedule(command: SourceCommand, prefix: str, engine: str, peak: float, total: int) -> Schedule:
    """Return the learning rate in verl's steps, of which each is a rollout."""
    steps = _count_warmup(command, prefix, engine)
    decay, start, floor = total, 0.0, 0.0
    if engine == "megatron":
        style = command.text(f"{prefix}lr_decay_style", "constant")
        decay = int(command.number(f"{prefix}lr_decay_steps", total))
        start, floor = command.number(f"{prefix}lr_warmup_init", 0.0), command.number(f"{prefix}min_lr", 0.0)
    elif engine == "veomni":
        style = command.text(f"{prefix}lr_scheduler_type", "cosine")
        start, floor = command.number(f"{prefix}lr_start", 0.0), command.number(f"{prefix}lr_min", 0.0)
    else:
        style = command.text(f"{prefix}lr_scheduler_type", command.text(f"{prefix}warmup_style", "constant"))
        floor = peak * command.number(f"{prefix}min_lr_ratio", 0.0)
    styles = ("constant", "cosine", "linear", "inverse-square-root", "WSD")
    if style not in styles or (engine != "megatron" and style not in styles[:2]):
        raise ConfigError([f"{prefix}lr_scheduler_type {style}: not available here"])
    warmup = int(steps) if steps > 0 else int(command.number(f"{prefix}lr_warmup_steps_ratio", 0.0) * decay)
    return Schedule(peak, style, decay, warmup, start, 0.0 if style == "constant" else floor)


def _count_warmup(command: SourceCommand, prefix: str, engine: str) -> float:
    """Return the steps of the warm-up, of which VeOmni has only the ratio; -1 without any."""
    return -1.0 if engine == "veomni" else command.number(f"{prefix}lr_warmup_steps", -1)


def _read_estimator(command: SourceCommand) -> str:
    name = command.text("algorithm.adv_estimator", "gae")
    if name not in _ESTIMATORS:
        raise ConfigError([f"algorithm.adv_estimator={name}: not available here; available are {', '.join(_ESTIMATORS)}"])
    if name.endswith("token_baseline") and command.get(f"{_CORRECTION}rollout_is") is not None:
        raise ConfigError([f"{_CORRECTION}rollout_is: not available here: weights of the correction in the baseline of {name}"])
    return "reinforce_plus_plus" if _is_single(command) else _ESTIMATORS[name]


def _is_single(command: SourceCommand) -> bool:
    """Return True for groups of one response, whose mean is 0 and whose spread is 1 there: the advantage is the reward."""
    has_kl = command.flag("algorithm.use_kl_in_reward")
    return command.get("algorithm.adv_estimator") == "grpo" and command.count(f"{_ROLLOUT}n", 1) == 1 and not has_kl


def _read_correction(command: SourceCommand) -> Correction | None:
    """Return the rollout correction.

    In bypass_mode the clipped ratio is to the rollout engine, and verl only logs the weights; tokens that are rejected there
    still count in the mean, and without it they leave it (`_name_rejected`).

    Raises:
        ConfigError: it is not available.
    """
    recorded, kind = command.flag(f"{_CORRECTION}bypass_mode"), command.get(f"{_CORRECTION}rollout_is")
    kind = None if recorded and not is_reinforce(command) else kind
    if kind is not None and command.flag(f"{_CORRECTION}rollout_is_batch_normalize"):
        raise ConfigError([f"{_CORRECTION}rollout_is_batch_normalize: not available here: importance weights whose mean is 1"])
    if command.get(f"{_CORRECTION}rollout_rs") is not None:
        if kind is not None:
            raise ConfigError([f"{_CORRECTION}rollout_rs: not available here: with weights of rollout_is"])
        return _read_rejection(command, recorded=recorded)
    if kind is None:
        return None
    bounds = str(command.get(f"{_CORRECTION}rollout_is_threshold", 2.0))
    low, _, high = bounds.rpartition("_")
    if kind not in ("token", "sequence") or (low and kind != "token"):
        raise ConfigError([f"{_CORRECTION}rollout_is={kind}: not available here"])
    try:
        return Correction(f"{kind}_{'mask' if low else 'truncate'}", float(high), float(low) if low else None)
    except ValueError:
        raise ConfigError([f"{_CORRECTION}rollout_is_threshold is {bounds}, but must be a number, or two as 0.5_5"]) from None


#: rejection of verl that compares the ratio with two bounds -> its mode here
_REJECTIONS = {"token_k1": "token", "token_k2": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}


def _name_rejected(command: SourceCommand) -> str | None:
    """Return what becomes of rejected tokens where they do not count in the mean of the loss."""
    leaves = command.get(f"{_CORRECTION}rollout_rs") is not None and not command.flag(f"{_CORRECTION}bypass_mode")
    return "leave policy loss, KL and entropy, and their means" if leaves else None


def _read_rejection(command: SourceCommand, *, recorded: bool) -> Correction:
    """Return the rejection by the rollout's log-probs as a mask.

    k1 is log(mu / pi), so that its bounds are the bounds of 1 / w; k2 is log(w)^2 / 2.

    Raises:
        ConfigError: it is another one, or has no bounds.
    """
    names = list_words(command.get(f"{_CORRECTION}rollout_rs"))
    if len(names) != 1 or names[0] not in _REJECTIONS:
        listed = ", ".join(_REJECTIONS)
        raise ConfigError([f"{_CORRECTION}rollout_rs={','.join(names)}: not available here; one of {listed} is"])
    squares = names[0] == "token_k2"
    bounds = str(command.get(f"{_CORRECTION}rollout_rs_threshold")).strip("'\"")
    words = bounds.split("_")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if not numbers or len(numbers) > 2 - squares or min(numbers) <= 0 or numbers[0] > numbers[-1]:
        text = f"{_CORRECTION}rollout_rs_threshold is {bounds}, but must be a number above 0, or for k1 two as 0.5_2"
        raise ConfigError([text])
    upper = math.exp(math.sqrt(2 * numbers[0])) if squares else numbers[-1]
    lower = numbers[0] if len(numbers) == 2 else 1 / upper
    if lower > upper:
        raise ConfigError([f"{_CORRECTION}rollout_rs_threshold is {bounds}, which rejects all tokens"])
    of_tokens = recorded and _REJECTIONS[names[0]] == "token"
    if of_tokens and command.text(f"{_ACTOR}loss_agg_mode", "token-mean") == "seq-mean-token-mean":
        raise ConfigError([f"{_CORRECTION}rollout_rs={names[0]}: not available here: tokens that leave the mean of a sequence"])
    return Correction(f"{_REJECTIONS[names[0]]}_rejection_mask", 1 / lower, 1 / upper)


def _find_source(paths: str, variables: Mapping[str, str]) -> str | None:
    """Return the `data_source` of the rows, by which verl chooses its reward; None where only the rows say it."""
    if "data_source" in variables:
        return variables["data_source"]
    words = (set(re.split(r"[^a-z0-9]+", path.lower())) for path in paths.split(","))
    sources = {next((source for word, source in _SOURCES.items() if word in path), None) for path in words}
    return sources.pop() if len(sources) == 1 else None


# --------------------------------------------------------------------------------------------------------------------- run


_ADAPTER = ("lora_adapter_path", "lora.adapter_path")


def _describe(run: Import, command: SourceCommand) -> Recipe:
    """Return the run by verl's formulas."""
    batch, layout, supervised = _Batch.from_command(command), _read_layout(command), command.program == "sft"
    model, prefix = ("model.", "optim.") if supervised else (_MODEL, f"{_ACTOR}optim.")
    if layout.engine == "veomni":
        _note_veomni(run, command, prefix)
    rollouts, steps = _count_rollouts(command, batch, run.settings.rows), batch.steps
    rate, schedule = _read_rate(command, prefix, layout, rollouts, 1e-3 if supervised else 1e-6)
    lora = _read_adapters(run, command, model, layout)
    weights, defaults = _read_model(run, command, model, layout)
    iterations, epochs, length = _read_length(run, command, batch)
    option = "engine.sequence_parallel" if supervised else f"{_ACTOR}megatron.sequence_parallel"
    splits = layout.engine == "megatron" and layout.tensor > 1 and command.flag(option, default=True)
    prediction, drafts = _read_prediction(run, command, model, layout)
    reach = "does not reach" if prediction is not None and prediction.detaches else "reaches"
    betas = list_words(command.get(f"{prefix}betas")) if command.has(f"{prefix}betas") else []
    if betas and len(betas) != 2:
        raise ConfigError([f"{prefix}betas is {', '.join(betas)}, but must be two numbers"])
    shared = Recipe(
        stage="sft",
        step_samples=batch.mini,
        steps_per_rollout=steps,
        total_steps=rollouts * steps,
        loss="cross_entropy",
        engine=layout.engine,
        weights=_read_format(command, layout),
        tp=layout.tensor,
        pp=layout.pipeline,
        cp=layout.context,
        ep=layout.expert,
        dp=command.devices // layout.devices,
        lora_rank=_read_rank(command, model, layout),
        weight_decay=rate.weight_decay,
        clip_grad=rate.clip_grad,
        model=command.text(f"{model}path"),
        placement=Placement(actor=command.devices),
        rates=(rate,),
        adapters=lora,
        prediction=prediction,
        train_iters=iterations,
        train_epochs=epochs,
        keys={
            **weights,
            **{f"{ACTOR}.adam_beta{place}": float(beta) for place, beta in enumerate(betas, 1)},
            f"{ACTOR}.sequence_parallel": True if splits else None,
            f"{ACTOR}.num_layer_list": _list_stage_layers(run, command, model, layout),
            f"{ACTOR}.context_parallel_size": layout.context if layout.engine != "megatron" else None,
            f"{ACTOR}.expert_model_parallel_size": layout.expert if layout.engine == "veomni" else None,
            f"{ENGINE}.speculative_config": drafts,
        },
        notes={
            "load": "a folder on this machine",
            "freeze_vit": "verl's tower includes the projector",
            **dict.fromkeys(("train_iters", "train_epochs"), length),
            "context_parallel_size": "Ulysses",
            "num_layer_list": "the layers that config.json has, less the first and the last stage's",
            "weight_decay": "" if layout.engine == "megatron" else "there of norms and biases too, which have none here",
            "num_npus": "over all nodes",
            "actor_resource.num_npus": "over all nodes",
            "lr_decay_style": "moves once a rollout there, at each step here",
            "lr_decay_iters": "rollouts",
            "lr_warmup_iters": "rollouts",
            "lr_warmup_fraction": "rollouts",
            "mtp_num_layers": f"{note_prediction(adapts=lora is not None)}; it {reach} the head here, which verl leaves to the "
            "release of Megatron",
        },
        defaults=defaults,
    )
    # a step of verl's schedule is a rollout
    rates = schedule.over(rollouts)
    first, tenth, last = rates.rates
    shared = replace(shared, lr_first=first, lr_10=tenth, lr_last=last, lr_warmup_steps=rates.warmup * steps)
    return _describe_rows(run, command, batch, shared) if supervised else _describe_rollout(run, command, batch, layout, shared)


def _read_format(command: SourceCommand, layout: Layout) -> str | None:
    """Return the format of weights and optimizer state of the roles that train, where FSDP has another one than float32."""
    if layout.engine != "fsdp":
        return None
    groups = ("engine.",) if command.program == "sft" else (f"{_ACTOR}fsdp_config.",)
    if command.program == "ppo" and "values" in ADVANTAGES[_read_estimator(command)].needs:
        groups += ("critic.fsdp.",)
    formats = (_FORMATS.get(command.text(f"{group}model_dtype", "fp32")) for group in groups)
    return next((name for name in formats if name is not None), None)


def _read_rank(command: SourceCommand, prefix: str, layout: Layout) -> int:
    if any(command.get(f"{prefix}{name}") for name in _ADAPTER):
        return UNSET_RANK
    return int(command.number(f"{prefix}{'lora.rank' if layout.engine == 'megatron' else 'lora_rank'}", 0))


def _read_adapters(run: Import, command: SourceCommand, prefix: str, layout: Layout) -> Adapters | None:
    """Return fresh adapters; one that training continues has its own."""
    if any(command.get(f"{prefix}{name}") for name in _ADAPTER):
        names = (f"{prefix}{name}" for name in ("lora_rank", "lora.rank", "lora_alpha", "lora.alpha"))
        run.note_given(" ".join(names), "the adapter that training continues has its own")
        return None
    rank = _read_rank(command, prefix, layout)
    if not rank:
        return None
    group, alpha, default = ("lora.", "lora.alpha", 32) if layout.engine == "megatron" else ("", "lora_alpha", 16)
    targets = list_words(command.get(f"{prefix}{group}target_modules") or "all-linear")
    return Adapters(find_lora_targets(targets), rank, int(command.number(prefix + alpha, default)))


def _read_model(
    run: Import, command: SourceCommand, prefix: str, layout: Layout
) -> tuple[dict[str, object], tuple[tuple[str, object, str], ...]]:
    """Return the keys of the model, and what verl sets without an option."""
    path = command.get(f"{prefix}path")
    if path is None:
        raise ConfigError([f"the command names no model: {prefix}path is missing"])
    has_images = re.search(r"qwen-?(2\.5|3)-?vl", str(path).lower()) is not None
    if not has_images and {"vl", "omni", "vision"} & set(re.split(r"[^a-z0-9]+", str(path).lower())):
        run.refuse(f"{prefix}path", f"{path}: models with sound, and models of images but Qwen2.5-VL and Qwen3-VL")
    tokenizer = run.get(f"{ACTOR}.tokenizer_name_or_path")
    keys: dict[str, object] = {f"{ACTOR}.load": path, f"{ACTOR}.tokenizer_name_or_path": path if tokenizer is None else None}
    if has_images:
        # verl trains all weights of a model without adapters; its tower includes the projector
        has_adapters = any(command.number(f"{prefix}{name}", 0) for name in ("lora_rank", "lora.rank"))
        has_adapters |= any(command.get(f"{prefix}{name}") is not None for name in _ADAPTER)
        frozen = command.flag(f"{_ACTOR}freeze_vision_tower") or has_adapters
        targets = "all-linear" in list_words(command.get(f"{prefix}target_modules") or "all-linear")
        if layout.engine == "fsdp" and has_adapters and targets and command.get(f"{prefix}exclude_modules") is None:
            feature = f"adapters in the vision tower; {prefix}exclude_modules='.*visual.*' leaves it out"
            run.refuse(f"{prefix}lora_rank", feature)
        keys |= {f"{ACTOR}.{name}": frozen for name in ("freeze_vit", "freeze_aligner")}
    option, reason = f"{prefix}enable_gradient_checkpointing", "FSDP splits the optimizer's state"
    if layout.engine == "megatron":
        reason = "the default of verl"
        run.note_given(option, "override_transformer_config.recompute_* is read with Megatron")
    elif command.flag(option, default=True):
        keys |= RECOMPUTE_LAYERS
    else:
        run.note_given(option, "false: nothing is computed again", changes_nothing=False)
    written = run.get(f"{ACTOR}.moe_aux_loss_coeff") is not None
    if written and run.get(f"{ACTOR}.moe_router_load_balancing_type") is None:
        keys[f"{ACTOR}.moe_router_load_balancing_type"] = "none"  # verl's Megatron engine has it, whatever the weight is
    return keys, (
        *list_expert_defaults(str(path), "verl"),
        (f"{ACTOR}.finetune", True, "only weights are read"),
        (f"{ACTOR}.use_distributed_optimizer", True, reason),
    )


def _read_prediction(
    run: Import, command: SourceCommand, prefix: str, layout: Layout
) -> tuple[Prediction | None, dict[str, object] | None]:
    """Return the prediction layers that train, which only verl's Megatron engine has, and drafts of theirs."""
    prefix, is_on = f"{prefix}mtp.", command.flag(f"{prefix}mtp.enable")
    scale, prediction = f"{ACTOR}.mtp_loss_scaling_factor", None
    if is_on and command.flag(f"{prefix}enable_train") and layout.engine == "megatron":
        written = run.get(scale)  # by override_transformer_config, which goes first there
        factor = command.number(f"{prefix}mtp_loss_scaling_factor", 0.1) if written is None else read_number(scale, written)
        count = _count_prediction_layers(command, prefix.removesuffix("mtp."))
        prediction = Prediction(count, factor, detaches=command.flag(f"{prefix}detach_encoder"))
    else:
        run.tree.get(ACTOR, {}).pop("mtp_loss_scaling_factor", None)
    if not is_on or not command.flag(f"{prefix}enable_rollout") or command.program == "sft":
        return prediction, None
    method = command.text(f"{prefix}method", "mtp")
    if not method.endswith("mtp"):
        run.refuse(f"{prefix}method", f"prediction layers as drafts by the method {method}; mtp is available")
    is_vllm = command.text(f"{_ROLLOUT}name", "vllm") != "sglang"
    tokens = ("num_speculative_tokens", 1) if is_vllm else ("speculative_num_steps", 3)
    written = run.get(f"{ENGINE}.speculative_config")
    drafts: dict[str, object] = {"method": "mtp", "num_speculative_tokens": command.count(f"{prefix}{tokens[0]}", tokens[1])}
    return prediction, drafts | (dict(written) if isinstance(written, Mapping) else {})


def _count_prediction_layers(command: SourceCommand, prefix: str) -> int:
    """Return the prediction layers of config.json where the folder is here; otherwise 1, as published models have it."""
    shape = _read_model_shape(command, prefix)
    return shape.get("num_nextn_predict_layers") or shape.get("mtp_num_hidden_layers") or 1


def _read_model_shape(command: SourceCommand, prefix: str) -> dict[str, Any]:
    """Return config.json of the model where the folder is here, with the entries of its language model; otherwise nothing.

    Raises:
        ConfigError: the file is not JSON.
    """
    config = Path(command.text(f"{prefix}path")).expanduser() / "config.json"
    if not config.is_file():
        return {}
    try:
        shape = read_json(config)
    except ValueError as error:
        raise ConfigError([f"{prefix}path: {config} is not JSON: {error}"]) from error
    return {**shape, **shape.get("text_config", {})}


def _list_stage_layers(run: Import, command: SourceCommand, model: str, layout: Layout) -> str | None:
    """Return the layers of each pipeline stage where the first or the last one has a number of its own.

    The layers of the others follow from config.json, and from the run file where the folder is elsewhere.
    """
    group = "engine." if command.program == "sft" else f"{_ACTOR}megatron."
    names = [f"{group}override_transformer_config.num_layers_in_{place}_pipeline_stage" for place in ("first", "last")]
    first, last = ([] if command.get(name) is None else [command.count(name, 1)] for name in names)
    if layout.engine != "megatron" or layout.pipeline == 1 or not (first or last):
        return None
    num_layers = _read_model_shape(command, model).get("num_hidden_layers")
    layers = divide_layers(num_layers, layout.pipeline, first, last)
    if layers is None and num_layers is not None:
        stages = f"{num_layers} layers of config.json over {layout.pipeline} stages"
        run.refuse(" ".join(run.list_given(" ".join(names))), f"the other stages would not have equally many: {stages}")
    return layers


def _read_length(run: Import, command: SourceCommand, batch: _Batch) -> tuple[int | None, float | None, str]:
    """Return iterations or passes over the data, and a note."""
    limit, total, rows = "trainer.total_training_steps", command.get("trainer.total_training_steps"), run.settings.rows
    epochs = command.count("trainer.total_epochs", 30 if command.program == "ppo" else 4)
    if _FULLY_ASYNC in command.trailing:
        if (iterations := _count_rollouts(command, batch, rows)) < 1:
            raise ConfigError([f"rollout.total_rollout_steps must be at least the {batch.rollout} prompts of a step"])
        run.note_given(f"trainer.total_epochs {limit}", "rollout.total_rollout_steps is read; the data must last for it")
        return iterations, None, f"rollout.total_rollout_steps / {batch.rollout} prompts of a step"
    if isinstance(total, int) and total > 0:
        run.note_given("trainer.total_epochs", f"{limit} is read instead")
        ahead = _Ahead.from_command(command)
        unit = "optimizer steps" if command.program == "sft" else "rollouts"
        unit = unit if ahead is None else f"of its steps, each of {ahead.steps} iterations"
        return _count_rollouts(command, batch, rows), None, unit
    run.note_given(limit, "null: trainer.total_epochs is read", changes_nothing=False)
    if (part_of_rows := _limit_rows(command)) is not None or run.settings.knows_rows:
        rows = rows if part_of_rows is None else min(rows, part_of_rows)
        note = f"{epochs} passes over {rows} rows, without the incomplete last batch of a pass"
        return _count_rollouts(command, batch, rows), None, note
    note = "the incomplete last batch of a pass is filled with rows of the next; --rows N makes it exact"
    if batch.rollout == batch.counted:
        return None, epochs, note
    note = f"so many iterations as passes over {batch.counted} prompts a step have; {note}"
    return None, epochs * batch.rollout / batch.counted, note


def _note_veomni(run: Import, command: SourceCommand, prefix: str) -> None:
    """Note the options of VeOmni's schedule, which other engines do not read."""
    for name, key in (("lr_min", "min_lr"), ("lr_start", "lr_warmup_init")):
        if command.has(f"{prefix}{name}"):
            del run.without_effect[f"{prefix}{name}"]
            run.note(f"{prefix}{name}", f"{key} of the schedule", changes_nothing=False)
    if command.number(f"{prefix}lr_decay_ratio", 1.0) != 1.0:
        run.refuse(f"{prefix}lr_decay_ratio", "a decay that ends before the run")


def _read_rate(
    command: SourceCommand, prefix: str, layout: Layout, rollouts: int, default: float, group: str = ACTOR
) -> tuple[Rate, Schedule]:
    """Return the learning rate of a role, which moves once a rollout there."""
    schedule = _read_schedule(command, prefix, layout.engine, command.number(f"{prefix}lr", default), rollouts)
    steps, share = _count_warmup(command, prefix, layout.engine), command.number(f"{prefix}lr_warmup_steps_ratio", 0.0)
    of_role = [] if prefix == "optim." or layout.engine == "veomni" else [f"{prefix.removesuffix('optim.')}grad_clip"]
    clips = [f"{prefix}clip_grad", *of_role]
    moves = schedule.style != "constant"
    rate = Rate(
        group=group,
        peak=schedule.peak,
        style=schedule.style,
        floor=schedule.floor if moves else None,
        decay=schedule.decay if moves and command.has(f"{prefix}lr_decay_steps") else None,
        warmup=int(steps) if steps > 0 else None,
        warmup_share=share if steps <= 0 and share > 0 else None,
        start=schedule.start if command.has(f"{prefix}lr_warmup_init", f"{prefix}lr_start") else None,
        clip_grad=next((command.number(name, 1.0) for name in clips if command.has(name)), 1.0),
        weight_decay=command.number(f"{prefix}weight_decay", 0.01),
    )
    return rate, schedule


def _describe_rows(run: Import, command: SourceCommand, batch: _Batch, shared: Recipe) -> Recipe:
    """Return the run of the supervised trainer."""
    files = list_words(command.get("data.train_files") or "")
    if not files:
        raise ConfigError(["the command names no data: data.train_files is missing"])
    if len(files) > 1:
        run.refuse("data.train_files", f"{len(files)} files: preprocess them into one dataset")
    tokenizer = shared.keys.get(f"{ACTOR}.tokenizer_name_or_path") or run.get(f"{ACTOR}.tokenizer_name_or_path")
    prefix = re.sub(r"\.\w+$", "", files[0])
    column, thinking = (
        command.text("data.messages_key", "messages"),
        command.text("data.enable_thinking_default", "none").lower(),
    )
    template = take_template_words(run)
    mapped = f""" --map-keys '{{"messages": "{column}"}}'""" if column != "messages" else ""
    handler, is_pair = "OpenAIInstructionHandler", command.has(PROMPT)
    if is_pair:
        handler, prompt, response = "AlpacaStyleInstructionHandler", command.text(PROMPT), command.text(RESPONSE)
        mapped = f""" --map-keys '{{"prompt": "{prompt}", "query": "", "response": "{response}"}}'"""
    is_set = thinking in ("true", "false") and "--enable-thinking" not in template
    switch = f" --enable-thinking {thinking}" if is_set else ""
    words = f" --handler-name {handler} --prompt-type hf{mapped}{switch}{template}"
    if _limit_rows(command):
        run.refuse("data.train_max_samples", "a part of the rows: preprocess that part")
    run.note_given("data.train_max_samples", "all rows", changes_nothing=False)
    if command.get("data.truncation") == "error":
        run.note_given("data.truncation", "rows of seq_length tokens and more are left out by the preprocessing")
    elif command.has("data.truncation"):
        run.refuse("data.truncation", "rows that are cut; --seq-length of mindspeed-rl preprocess leaves them out")
    micro = 1 if command.flag("data.use_dynamic_bsz", default=True) else command.count("data.micro_batch_size_per_gpu", 4)
    length = command.count("data.max_length", 1024)
    if TRAINER in command.trailing:
        shared = name_differences(shared, has_columns=is_pair)
    return replace(
        shared,
        sequence_length=length,
        data=tuple(re.sub(r"\.\w+$", "", path) for path in files),
        batch=Batch(micro),
        keys={**shared.keys, f"{ACTOR}.data_path": prefix, f"{ACTOR}.seq_length": length},
        notes={**shared.notes, "data_path": describe_preprocessing(files[0], prefix, tokenizer, words)},
        defaults=(
            *shared.defaults,
            (f"{ACTOR}.no_pad_to_seq_lengths", True, "rows are padded to the longest of a micro-batch"),
            *_find_save_folder(command, "gsm8k-sft", "test"),
        ),
    )


def _find_save_folder(command: SourceCommand, project: str, experiment: str) -> list[tuple[str, object, str]]:
    """Return the folder of checkpoints, which verl names by project and experiment; nothing where none is written."""
    if command.number("trainer.save_freq", -1) <= 0 or command.has("trainer.default_local_dir"):
        return []
    names = command.text("trainer.project_name", project), command.text("trainer.experiment_name", experiment)
    return [(f"{ACTOR}.save", "/".join(("checkpoints", *names)), "verl's folder of the project and the experiment")]


def _describe_part(command: SourceCommand) -> str:
    """Return the note of a part of the rows, which verl draws where it shuffles."""
    if not command.flag("data.shuffle", default=True):
        return "the first rows"
    return "the first rows; verl draws as many at random (data.shuffle)"


def _limit_rows(command: SourceCommand) -> int | None:
    limit = command.get("data.train_max_samples")
    return limit if isinstance(limit, int) and limit > 0 else None


# ---------------------------------------------------------------------------------------------------------------- main_ppo


def _describe_rollout(run: Import, command: SourceCommand, batch: _Batch, layout: Layout, shared: Recipe) -> Recipe:
    """Return the run of main_ppo."""
    has_critic = "values" in ADVANTAGES[_read_estimator(command)].needs
    if not has_critic:
        _drop_critic(run, command)
    recipe = _describe_generation(run, command, batch, layout, _describe_objective(run, command, shared, has_critic=has_critic))
    if not has_critic:
        return recipe
    critic, warmup = _read_critic(run, command, batch), command.number("trainer.critic_warmup", 0)
    return replace(
        recipe,
        value_clip=command.number("critic.cliprange_value", 0.5),
        critic_lr=critic.peak,
        rates=(*recipe.rates, critic),
        keys={
            **recipe.keys,
            "critic_config.micro_batch_size": command.count("critic.ppo_micro_batch_size_per_gpu", 1),
            f"{RL}.critic_warmup": int(warmup) if command.has("trainer.critic_warmup") else None,
        },
    )


def _describe_objective(run: Import, command: SourceCommand, shared: Recipe, *, has_critic: bool) -> Recipe:
    """Return the run with loss, estimator, KL and correction."""
    estimator, loss, kl = _read_estimator(command), Loss.from_command(command), Kl.from_command(command)
    _refuse_objective(run, command, loss, kl, has_critic=has_critic)
    normalizer = AGGREGATIONS[command.text(f"{_ACTOR}loss_agg_mode", "token-mean")][0]
    average = loss.aggregation
    if loss.loss_type == "gspo" and normalizer != average:
        average = f"{average} (main), {normalizer} (0.9.1)"
        run.reasons["aggregation"] = f"as in verl's main branch; --set {RELEASE}=0.9.1 takes the release's"
    reads, divides = ADVANTAGES[estimator].reads or (), command.flag("algorithm.norm_adv_by_std_in_grpo", default=True)
    has_scale = "scale_rewards" in reads
    single = _is_single(command)
    # ReMax sums rewards without a discount there, and GRPO has none
    gamma = 1.0 if single or estimator == "remax" else command.number("algorithm.gamma", 1.0)
    return replace(
        shared,
        stage="ray_ppo" if has_critic else "ray_grpo",
        loss=loss.name,
        level=loss.level,
        clip_low=loss.low,
        clip_high=loss.high,
        clip_c=loss.dual,
        aggregation=average,
        kl_coef=kl.coefficient,
        kl_estimator=kl.estimator,
        kl_place=kl.place,
        advantage=estimator,
        advantage_scale=("group" if divides else "none") if has_scale else None,
        entropy_coef=command.number(f"{_ACTOR}entropy_coeff", 0),
        gamma=gamma if "gamma" in reads else None,
        lam=command.number("algorithm.lam", 1.0) if "lam" in reads else None,
        old_policy=_read_old_policy(run, command),
        rejected_tokens=_name_rejected(command),
        objective=Objective(
            loss_type=loss.loss_type,
            level=loss.level if loss.level != "token" or loss.loss_type == "luspo" else None,
            clip=None if loss.low is None or loss.high is None else (loss.low, loss.high),
            clip_c=loss.dual if loss.low is not None else None,
            epsilon=1e-6 if divides and has_scale else None,
            whiten=False if single else None,
            correction=_read_correction(command),
        ),
        keys={**shared.keys, **{f"{RL}.{name}": value for name, value in _read_loss_numbers(command, loss).items()}},
        notes={
            **shared.notes,
            "stage": "the loop for the estimator",
            "loss_type": f"{loss.aggregation} mean, ratio of a {loss.level}"
            + (f"; {loss.loss_type} has it there too, whatever loss_agg_mode is" if loss.fixes else ""),
            "clip_ratio_low": "clip_ratio by itself decides nothing" if command.has(f"{_ACTOR}clip_ratio") else "",
            "init_kl_coef": f"in the {kl.place}" if kl.place else "no KL",
        },
    )


def _read_evaluation(run: Import, command: SourceCommand) -> dict[str, object]:
    """Return the sampling of an evaluation: greedy, or with its temperature and number of samples, and else as in training."""
    prefix = f"{_ROLLOUT}val_kwargs."
    if not any(name.startswith(prefix) for name in command.options):
        return {}
    count, temperature = command.count(f"{prefix}n", 1), command.number(f"{prefix}temperature", 0.0)
    greedy = not command.flag(f"{prefix}do_sample") or temperature == 0
    keys: dict[str, object] = {f"{RL}.eval_greedy": greedy}
    for name, default in (("top_p", 1.0), ("top_k", -1)):
        value, training = (command.number(f"{place}{name}", default) for place in (prefix, _ROLLOUT))
        if greedy or value == training:
            run.note_given(f"{prefix}{name}", "the evaluation is greedy" if greedy else "as in training")
        else:
            keys[f"{ACTOR}.eval_{name}"] = value if name == "top_p" else int(value)
    if greedy and count > 1:
        run.note(f"{prefix}n", "one sample of each held-out prompt: greedy ones are all the same")
    if not greedy:
        keys[f"{ACTOR}.eval_n_samples"] = count if count > 1 else None
        differs = temperature != command.number(f"{_ROLLOUT}temperature", 1.0)
        keys[f"{ACTOR}.eval_temperature"] = temperature if differs else None
    return keys


def _describe_generation(run: Import, command: SourceCommand, batch: _Batch, layout: Layout, shared: Recipe) -> Recipe:
    """Return the run with its batch, data, rewards, engine and devices."""
    response, tensor = (
        command.count("data.max_response_length", 512), command.count(f"{_ROLLOUT}tensor_model_parallel_size", 2)
    )  # fmt: skip
    data = _read_file(run, command)
    rewards, columns = _read_rewards(run, command, data)
    teachers = _read_teacher(run, command)
    micro, tokens = _read_micro_batches(command, layout)
    dedicated = command.has("actor_rollout_ref.hybrid_engine") and not command.flag("actor_rollout_ref.hybrid_engine")
    ahead, group = _Ahead.from_command(command), "rollout."
    if ahead is not None and _FULLY_ASYNC not in command.trailing:
        dedicated, group = True, _ROLLOUT
    devices = command.count(f"{group}nnodes", 1) * command.count(f"{group}n_gpus_per_node", 8)
    defaults = [*shared.defaults, (f"{ACTOR}.seed", 42, "the default of verl")]
    defaults.append((f"{ACTOR}.prompt_type", "hf", "verl writes prompts by the tokenizer's chat template"))
    defaults += _find_save_folder(command, "verl_examples", "gsm8k")
    turns = _read_turns(command)
    if turns:
        defaults.append((f"{RL}.max_total_response_length", response, "data.max_response_length counts all turns"))
    return replace(
        shared,
        rollout_completions=batch.rollout * batch.group,
        step_samples=min(batch.mini, batch.trained) * batch.group,
        temperature=command.number(f"{_ROLLOUT}temperature", 1.0),
        top_p=command.number(f"{_ROLLOUT}top_p", 1.0),
        top_k=int(command.number(f"{_ROLLOUT}top_k", -1)),
        min_p=0.0,
        prompt_length=command.count("data.max_prompt_length", 512),
        response_length=response,
        infer_tp=tensor,
        data=(data,),
        placement=Placement(
            actor=command.devices,
            rollout=devices if dedicated else None,
            mode="async" if ahead is not None else "one_step_off" if dedicated else None,
        ),
        batch=Batch(micro, batch.group),
        rewarding=rewards,
        keys={
            **shared.keys,
            **_read_engine(run, command, tensor),
            **_read_filters(run, command, batch, rewards),
            **turns,
            **teachers,
            **_read_age(run, command),
            **_read_profiler(run, command),
            **_read_evaluation(run, command),
            **tokens,
            **_add_column(columns, teachers.get(f"{RL}.distillation.teacher_key")),
            f"{ACTOR}.data_path": data,
            f"{ACTOR}.eval_data_path": ",".join(list_words(command.get("data.val_files") or "")) or None,
        },
        notes={
            **shared.notes,
            "global_batch_size": "prompts of a rollout",
            "mini_batch_size": "prompts of an optimizer step",
            "micro_batch_size": "use_dynamic_bsz fills micro-batches" if command.flag(f"{_ACTOR}use_dynamic_bsz") else "",
            **{path.partition(".")[2]: f"tokens of a device x {layout.context}" for path in tokens},
            "trainer_mode": "the rollout has devices of its own",
            "max_off_policy_threshold": "" if ahead is None else ahead.reason,
            "partial_rollout_max_split": "responses continue with new weights; prompts of more versions are too old there",
            "over_sample_rate": "batches that are started ahead",
            **({"data_path": _describe_part(command)} if _limit_rows(command) else {}),
            "max_turns": "a turn of the tools is followed by one of the model, which is the last",
            "max_parallel_calls": "further calls of a turn get an error as their reply; verl drops them",
            "max_tool_response_characters": "verl counts characters, of which a longer reply keeps so many",
            "tool_response_truncate_side": "verl names the side that is cut, ours the one that is kept",
            "overlong_buffer": "grows over the last `len` tokens before max_resp_len",
            "critic_warmup": "rollouts",
        },
        defaults=tuple(defaults),
    )


def _refuse_objective(run: Import, command: SourceCommand, loss: Loss, kl: Kl, *, has_critic: bool) -> None:
    """Refuse what the objective has and no loss here."""
    aggregation = command.text(f"{_ACTOR}loss_agg_mode", "token-mean")
    if is_reinforce(command):
        run.translate(f"{_CORRECTION}loss_type", {f"{RL}.loss_type": loss.loss_type}, "-A log pi with weights")
    adds_terms = kl.place == "loss" or command.number(f"{_ACTOR}entropy_coeff", 0)
    if loss.fixes and adds_terms and aggregation != "seq-mean-token-mean":
        feature = f"{aggregation} of KL and entropy next to the mean of sequences of {loss.loss_type}"
        run.refuse(f"{_ACTOR}loss_agg_mode", feature)
    if kl.place == "loss" and has_critic:
        feature = "a KL in the loss next to a critic; algorithm.use_kl_in_reward puts it into the reward"
        run.refuse(f"{_ACTOR}use_kl_loss", feature)
    if has_critic and aggregation != "token-mean" and not command.has("critic.loss_agg_mode"):
        run.refuse(f"{_ACTOR}loss_agg_mode", "a value loss that is not the mean over tokens")


def _read_loss_numbers(command: SourceCommand, loss: Loss) -> dict[str, float]:
    """Return the numbers that one loss has."""
    if loss.loss_type == "sapo":
        return {name: command.number(f"{_ACTOR}{name}", value) for name, value in (("tau_pos", 1.0), ("tau_neg", 1.05))}
    numbers = {"dro": {"dro_beta": 0.0}, **OF_COVARIANCE}.get(loss.loss_type, {})
    return {name: command.number(f"{_ACTOR}policy_loss.{name}", value) for name, value in numbers.items()}


def _read_file(run: Import, command: SourceCommand) -> str:
    """Return the files of prompts with the number of their first rows; note what becomes of long prompts."""
    files = list_words(command.get("data.train_files") or "")
    if not files:
        raise ConfigError(["the command names no data: data.train_files is missing"])
    limit = _limit_rows(command)
    if limit is None:
        run.note_given("data.train_max_samples", "all rows", changes_nothing=False)
    filters = command.flag("data.filter_overlong_prompts")
    reason = "the rollout keeps the last tokens of a longer prompt, whatever data.truncation is; rows with images are left out"
    kind, note = ("drop_longer", "prompts of max_prompt_length tokens stay") if filters else ("cut_left", reason)
    run.put("data.filter_overlong_prompts data.truncation", {f"{RL}.long_prompts": kind}, note)
    return ",".join(files) if limit is None else f"{','.join(files)}#{limit}"


#: side of a long reply that verl cuts, since 0.8 -> side that is kept here
_SIDES = {"left": "right", "right": "left", "middle": "middle"}


def _read_turns(command: SourceCommand) -> dict[str, object]:
    """Return the limits of turns and tools; nothing where a sample has one turn.

    Raises:
        ConfigError: the side has another name.
    """
    prefix = f"{_ROLLOUT}multi_turn."
    uses_tools = command.text(f"{_ROLLOUT}agent.default_agent_loop") == "tool_agent"
    if not command.flag(f"{prefix}enable") and not uses_tools:
        return {}
    # the model's turn after the last one of the tools ends the sample there
    limits = [
        command.count(f"{prefix}{name}", 1) + extra
        for name, extra in (("max_assistant_turns", 0), ("max_user_turns", 1))
        if command.get(f"{prefix}{name}")
    ]
    side = command.text(f"{prefix}tool_response_truncate_side", "middle")
    if side not in _SIDES:
        raise ConfigError([f"{prefix}tool_response_truncate_side is {side}, but must be left, middle or right"])
    calls = int(command.number(f"{prefix}max_parallel_calls", 1))
    length = int(command.number(f"{prefix}max_tool_response_length", 256))
    if calls < 1 or length < 1:
        raise ConfigError([f"{prefix}max_parallel_calls and max_tool_response_length must be at least 1"])
    values = {
        # its loop of tools does not read multi_turn.enable
        "multi_turn_enable": True if uses_tools else None,
        "max_turns": min(limits, default=None),
        "max_parallel_calls": calls,
        "max_tool_response_characters": length,
        "tool_response_truncate_side": _SIDES[side],
    }
    return {f"{RL}.{name}": value for name, value in values.items()}


def _read_micro_batches(command: SourceCommand, layout: Layout) -> tuple[int, dict[str, object]]:
    """Return the rows of a micro-batch, and the tokens of micro-batches that are filled."""
    if not command.flag(f"{_ACTOR}use_dynamic_bsz"):
        return command.count(f"{_ACTOR}ppo_micro_batch_size_per_gpu", 1), {}
    longest = command.count("data.max_prompt_length", 512) + command.count("data.max_response_length", 512)
    options = {
        "max_packing_token_size": f"{_ACTOR}ppo_max_token_len_per_gpu",
        "ref_max_packing_token_size": f"{_REF}log_prob_max_token_len_per_gpu",
        "actor_max_packing_token_size": f"{_ROLLOUT}log_prob_max_token_len_per_gpu",
    }
    return 1, {
        f"{RL}.{key}": max(longest, command.count(option, 16384) * layout.context)
        for key, option in options.items()
        if command.has(option) or key == "max_packing_token_size"
    }


def _read_age(run: Import, command: SourceCommand) -> dict[str, object]:
    """Return how far rollouts run ahead, or how far responses extend over rollouts on the same devices."""
    mode = _read_mode(command)
    if mode not in _MODES:
        run.refuse(_MODE, f"the mode {mode}; {', '.join(_MODES)} are")
    ahead = _Ahead.from_command(command)
    if command.flag(switch := f"{_SEPARATE}hybrid_rollout.enable_switch") and mode == "separate_async":
        if ahead is not None and ahead.steps > 1:
            run.refuse(switch, "trainers' devices that generate, with several steps between two weight syncs")
        else:
            text = "its marks are elastic_rollout_low and _high, in iterations' prompts; verl adapts its own"
            run.translate(switch, {f"{RL}.elastic_rollout": True}, text)
    if mode != "sync" or ahead is not None:
        if command.flag("algorithm.filter_groups.enable"):
            run.refuse("algorithm.filter_groups.enable", "groups that are filtered while rollouts run ahead")
    if mode == "colocate_async":
        spans, started = (
            command.count(f"{_SAMPLER}max_off_policy_threshold", 8), command.count(f"{_COLOCATED}num_warmup_batches", 1)
        )  # fmt: skip
        if spans - 1 <= started:
            run.refuse(f"{_SAMPLER}max_off_policy_threshold", "prompts that must end before the next ones do")
        return {f"{RL}.partial_rollout_max_split": spans - 1, f"{RL}.over_sample_rate": float(started)}
    if ahead is None:
        return {}
    styles = {command.text(f"{_ACTOR}optim.{name}", "constant") for name in ("lr_decay_style", "lr_scheduler_type")}
    if _FULLY_ASYNC in command.trailing and styles != {"constant"}:
        run.refuse(f"{_ACTOR}optim.lr_scheduler_type", "a rate that moves over the versions of the fully asynchronous trainer")
    for option, key in (("trainer.test_freq", "eval_interval"), ("trainer.save_freq", "save_interval")):
        if command.has(option) and command.number(option, -1) > 0:
            run.translate(option, {f"{ACTOR}.{key}": command.count(option, 1) * ahead.steps},
                          f"versions of {ahead.steps} steps each")  # fmt: skip
    return {
        f"{RL}.max_off_policy_threshold": ahead.versions,
        f"{RL}.parameter_sync_step": ahead.steps,
        f"{RL}.partial_rollout": ahead.interrupts,
    }


def _read_old_policy(run: Import, command: SourceCommand) -> str:
    """Return what the ratio's denominator is of."""
    if command.flag(f"{_CORRECTION}bypass_mode"):
        if command.text(f"{_ACTOR}policy_loss.loss_mode", "vanilla") != "vanilla":
            run.refuse(f"{_ACTOR}policy_loss.loss_mode", "verl computes the clipped loss instead in bypass_mode; leave it out")
        return RECORDED_POLICY
    ahead = _Ahead.from_command(command)
    return "synced actor" if ahead is not None and ahead.steps > 1 else "actor"


def _read_filters(run: Import, command: SourceCommand, batch: _Batch, rewards: Rewards) -> dict[str, object]:
    """Return the keys of groups that are filtered."""
    prefix = "algorithm.filter_groups."
    if not command.flag(f"{prefix}enable"):
        return {}
    metric = command.text(f"{prefix}metric", "reward")
    if metric not in ("acc", "score", "reward", "seq_reward", "seq_final_reward"):
        run.refuse(f"{prefix}metric", f"groups that are filtered by {metric}")
    elif metric not in ("acc", "score") and rewards.functions and rewards.overlong:
        run.refuse(f"{prefix}metric", f"groups that are filtered by {metric}, with the penalty of long responses")
    if rewards.functions:
        run.add_default(f"{RL}.filter_groups_metric", rewards.functions[0], "the score by which verl filters groups")
    limit = int(command.number(f"{prefix}max_num_gen_batches", 0))
    filters = {"enable": True, "max_batches": limit, "train_batch_size": batch.trained}
    return {f"{RL}.filter_groups_{name}": value for name, value in filters.items()}


def _add_column(columns: Mapping[str, object], name: object) -> dict[str, object]:
    """Return the key of the columns that rows keep, with another one."""
    key = f"{ACTOR}.dataset_additional_keys"
    kept = columns.get(key, ["labels"])
    assert isinstance(kept, list)
    return dict(columns) if name is None or name in kept else {**columns, key: [*kept, name]}


_TEACHER = re.compile(r"distillation\.teacher_models\.(\w+)\.([\w.]+)")


def _list_teachers(command: SourceCommand) -> dict[str, str]:
    """Return the teachers: value of the teacher_key -> folder; named ones take the place of teacher_model, as in verl."""
    groups = list(dict.fromkeys(match.group(1) for option in command.options if (match := _TEACHER.fullmatch(option))))
    if len(groups) > 1:
        groups = [name for name in groups if name != "teacher_model"]
    teachers: dict[str, str] = {}
    for name in groups:
        prefix = f"distillation.teacher_models.{name}."
        path, key = (command.get(f"{prefix}{part}") for part in ("model_path", "key"))
        if not path or (len(groups) > 1 and (key is None or key in teachers)):
            raise ConfigError([f"{prefix}model_path and, next to other teachers, a key of its own are missing"])
        teachers[str(key)] = str(path)
    if not teachers:
        raise ConfigError(["distillation.enabled: distillation.teacher_models.teacher_model.model_path is missing"])
    return teachers


def _read_teacher(run: Import, command: SourceCommand) -> dict[str, object]:
    """Return the keys of a teacher: a Megatron model here, on the devices of its pool."""
    loss, prefix = "distillation.distillation_loss.", "distillation."
    given = [name for name in command.options if name.startswith(prefix)]
    if not command.flag("distillation.enabled"):
        for name in given:
            run.note(name, "there is no teacher", changes_nothing=False)
        return {}
    gradient, tasks = command.flag(f"{loss}use_policy_gradient"), bool(command.get(f"{loss}use_task_rewards", True))
    clips, clip = [name for name in given if name.startswith(f"{loss}clip_ratio")], command.number(f"{_ACTOR}clip_ratio", 0.2)
    if clips and gradient and any(command.number(name, 0.2) != clip for name in clips):
        run.refuse(clips[0], "another clip for the teacher than for the actor's loss")
    if gradient and tasks and command.text(f"{_ACTOR}policy_loss.loss_mode", "vanilla") != "vanilla":
        run.refuse(f"{loss}use_policy_gradient", "another policy loss for task rewards than for the teacher")
    teachers = _list_teachers(command)
    mode = str(command.get(f"{loss}loss_mode", "k3"))
    values: dict[str, object] = {
        "enabled": True,
        "teacher_models": list(teachers.values()),
        **(
            {"teacher_key": command.text("distillation.teacher_key", "data_source"), "teacher_keys": list(teachers)}
            if len(teachers) > 1
            else {}
        ),
        "loss_mode": mode,
        "topk": command.get(f"{loss}topk", 32) if mode == "forward_kl_topk" else None,
        "use_task_rewards": command.get(f"{loss}use_task_rewards", True),
        "distillation_loss_coef": command.get(f"{loss}distillation_loss_coef", 1.0) if tasks else None,
        "use_policy_gradient": command.get(f"{loss}use_policy_gradient", False),
        **{name: command.maybe(loss + name) for name in ("loss_max_clamp", "log_prob_min_clamp")},
    }
    devices = int(command.number("distillation.n_gpus_per_node", 8)) * int(command.number("distillation.nnodes", 0))
    reason = "the teacher's log-probs have no temperature in verl"
    # prompt log-probs of its servers have no temperature
    run.add_default(f"{RL}.distillation.teacher_temperature", 1.0, reason)
    return {f"{RL}.distillation.{name}": value for name, value in values.items()} | {
        f"{RL}.teacher_resource.num_npus": devices or None
    }


def _read_rewards(run: Import, command: SourceCommand, data: str) -> tuple[Rewards, dict[str, object]]:
    """Return what scores, and the columns that a function of the user reads."""
    managers = [name for name in ("reward_model.reward_manager", "reward.reward_manager.name") if command.has(name)]
    manager = str(command.get(managers[0])) if managers else "naive"
    for name in managers:
        if manager in ("naive", "dapo", "batch"):
            run.note(name, f"{manager}: each response has one score", changes_nothing=False)
        else:
            run.refuse(name, f"the reward manager {manager}")
    model = None
    if any(command.flag(name) for name in ("reward.reward_model.enable", "reward_model.enable")):
        model = command.get("reward.reward_model.model_path") or command.get("reward_model.model.path")
        if model is None:
            raise ConfigError(["the command enables a reward model, but reward_model.model.path is missing"])
    overlong = _read_overlong(command, manager)
    option = next((f"{group}custom_reward_function" for group in ("reward.", "") if _has_function(command, group)), None)
    if option is not None:
        name = command.text(f"{option}.name", "compute_score")
        function = f"{find_module(run, command, f'{option}.path')}:{name}"
        columns: dict[str, object] = {f"{ACTOR}.dataset_additional_keys": ["labels", "data_source", "extra_info"]}
        return Rewards(functions=[function], keys=_VERIFIERS, model=model, overlong=overlong), columns
    if model is not None:
        return Rewards(keys=_VERIFIERS, model=model, overlong=overlong), {}
    source = _find_source(data, command.environment)
    if source is None:
        note = "verl's reward by the column data_source of each row; --set data_source=NAME chooses one"
        run.add_default(f"{RL}.verifier_function", ["verl_default"], note)
        columns = {f"{ACTOR}.dataset_additional_keys": ["labels", "data_source"]}
        return Rewards(functions=["verl_default"], keys=_VERIFIERS, overlong=overlong), columns
    reward = _REWARDS.get(source) or ("verl_math_dapo" if source.startswith("aime") else None)
    if reward is None:
        feature = f"verl's reward for the data_source {source}; available are {', '.join(_REWARDS)}"
        run.refuse("data.train_files", feature)
        return Rewards(keys=_VERIFIERS), {}
    run.add_default(f"{RL}.verifier_function", [reward], f"verl's reward for the data_source {source}")
    return Rewards(functions=[reward], keys=_VERIFIERS, overlong=overlong), {}


_VERIFIERS = ("verifier_function", "verifier_weight")


def _has_function(command: SourceCommand, group: str) -> bool:
    return bool(command.get(f"{group}custom_reward_function.path"))


def _read_overlong(command: SourceCommand, manager: str) -> Overlong | None:
    """Return the penalty of long responses, which the reward manager dapo reads."""
    prefix = "reward_model.reward_kwargs."
    buffer = f"{prefix}overlong_buffer_cfg."
    if manager != "dapo" or not command.flag(f"{buffer}enable"):
        return None
    limit = command.count(f"{prefix}max_resp_len", command.count("data.max_response_length", 512))
    return Overlong(command.count(f"{buffer}len", 1), command.number(f"{buffer}penalty_factor", 1.0), limit)


def _read_engine(run: Import, command: SourceCommand, tensor: int) -> dict[str, object]:
    """Return the layout of the engine."""
    data, expert = command.count(f"{_ROLLOUT}data_parallel_size", 1), command.count(f"{_ROLLOUT}expert_parallel_size", 1)
    if data > 1 and expert == 1:
        if has_experts(command.text(f"{_MODEL}path")):  # vLLM cuts every expert for all devices of the group
            feature = "data parallelism inside a replica without expert parallelism, of a model with experts"
            run.refuse(f"{_ROLLOUT}data_parallel_size", feature)
        else:
            reason = "without experts the engines of a data-parallel group share nothing, so each of them is a replica here"
            run.note(f"{_ROLLOUT}data_parallel_size", reason, changes_nothing=False)
    return {
        f"{ENGINE}.infer_tensor_parallel_size": tensor,
        f"{ENGINE}.enable_expert_parallel": True if expert > 1 else None,
        f"{ENGINE}.infer_expert_parallel_size": max(1, expert // tensor) if expert > 1 else None,
    }


def _drop_critic(run: Import, command: SourceCommand) -> None:
    """Note that nothing reads the options of a critic."""
    for name in command.options:
        if name.startswith("critic."):
            for notes in (run.translated, run.refused):
                notes.pop(name, None)
            run.note(name, "there is no critic")
    run.tree.pop("critic_config", None)


def _read_critic(run: Import, command: SourceCommand, batch: _Batch) -> Rate:
    """Return the learning rate of a critic."""
    if run.get("critic_config.load") is None:
        raise ConfigError(["the command names no critic: critic.model.path is missing"])
    layout = _read_role_layout(command, "critic.", "critic.fsdp.")
    for name, value in (("ppo_mini_batch_size", batch.mini), ("ppo_epochs", batch.epochs), ("loss_agg_mode", "token-mean")):
        if command.get(f"critic.{name}", value) != value:
            run.refuse(f"critic.{name}", f"another value than {value} for the critic")
    rollouts = _count_rollouts(command, batch, run.settings.rows)
    return _read_rate(command, "critic.optim.", layout, rollouts, 1e-5, "critic_config")[0]


def _read_profiler(run: Import, command: SourceCommand) -> dict[str, object]:
    """Return the profiler where its tool is npu and a role is enabled."""
    traced = " ".join(name for name in command.options if command.table.get(name) is TRACED)
    enabled = {prefix: stages for prefix, stages in _PROFILED.items() if command.flag(f"{prefix}enable")}
    tool = command.get("global_profiler.tool")
    if not enabled or tool is None:
        run.note_given(traced, "no role is profiled: its steps and roles are not set")
        return {}
    if tool not in ("npu", "torch"):
        run.note_given(traced, f"the profiling tool {tool}; profiler_config records with the platform's own")
        return {}
    prefix = next(iter(enabled))
    contents = set(list_words(command.get(f"{prefix}tool_config.npu.contents") or []))
    steps = [int(item) for item in list_words(command.get("global_profiler.steps") or [1])]
    level = command.text(f"{prefix}tool_config.npu.level", "level0")
    ranks = [int(item) for item in list_words(command.get(f"{prefix}ranks") or [])]
    values: dict[str, object] = {
        "profile": True,
        "stage": list(dict.fromkeys(stage for stages in enabled.values() for stage in stages)),
        "profile_level": level if level.startswith("level") else "level0",
        "profile_analysis": command.flag(f"{prefix}tool_config.npu.analysis", default=True),
        "profile_step_start": min(steps),
        "profile_step_end": max(steps) + 1,
        "profile_save_path": command.text("global_profiler.save_path", "outputs/profile"),
        **{f"profile_with_{part}": True for name, part in _CONTENTS.items() if name in contents},
        "profile_record_shapes": True if "shapes" in contents else None,
        "profile_ranks": "all" if command.flag(f"{prefix}all_ranks") or not ranks else ranks,
    }
    return {f"profiler_config.integrated.{name}": value for name, value in values.items()}


#: group of a role's profiler -> stages here
_PROFILED = {
    f"{_ACTOR}profiler.": ["actor_update", "actor_compute_log_prob"],
    f"{_REF}profiler.": ["reference_compute_log_prob"],
    f"{_ROLLOUT}profiler.": ["actor_generate"],
    "critic.profiler.": ["critic_update", "critic_compute_values"],
}
#: what a trace has there -> here
_CONTENTS = {"npu": "npu", "cpu": "cpu", "memory": "memory", "module": "module", "stack": "module"}


def _finish(run: Import, command: SourceCommand) -> None:
    """Start from the folder of an adapter, which has rank and scale; verl's reference is the model without it."""
    prefix = "model." if command.program == "sft" else _MODEL
    names = [f"{prefix}{name}" for name in _ADAPTER if command.has(f"{prefix}{name}")]
    folders = [folder for folder in map(command.get, names) if folder]
    for name in names:
        run.note(name, "no adapter: training starts with fresh ones, or trains all weights", changes_nothing=False)
    if folders:
        start_from_adapter(run, names[0], str(folders[0]), None)
        run.same.pop(names[0])
    _choose_engine(run, command)
    critic = " ".join(name for name in command.options if name.startswith("critic."))
    run.note_given(critic, "as the actor's: roles that share devices share a layout, which changes no result")


def _choose_engine(run: Import, command: SourceCommand) -> None:
    """Keep FSDP where `engine: fsdp` supports the run; name the reason in the plan where the run is Megatron's."""
    layout, group = _read_layout(command), "engine." if command.program == "sft" else _ACTOR
    strategy = command.text(f"{group}strategy") or command.text("model_engine") or "fsdp"
    names = [name for name in (f"{group}strategy", "model_engine") if command.has(name)]
    prefix = "engine." if command.program == "sft" else f"{_ACTOR}fsdp_config."
    offload, groups = f"{prefix}offload_policy", f"{prefix}fsdp_size"
    if layout.engine != "megatron" and not run.refused:
        obstacles = [f"{strategy} spreads experts or sequences"] if strategy in ("veomni", "fsdp_turbo") else []
        if not (reason := keep_fsdp(run, obstacles)):
            for name in names:
                run.translate(name, {f"{ACTOR}.engine": "fsdp"}, "a shard of all weights, gradients and states on each device")
            if command.flag(offload) and strategy == "fsdp2":
                moved = {f"{ACTOR}.swap_optimizer": True}
                if run.get(f"{ACTOR}.optimizer") != "muon":
                    moved[f"{ACTOR}.offload_gradients"] = True
                run.translate(offload, moved, "weights are on the device in an update")
            if 0 < (size := int(command.number(groups, -1))) < command.devices:
                run.translate(groups, {f"{ACTOR}.fsdp_size": size}, "the other devices have copies")
            if not names:
                run.added[f"{ACTOR}.engine"] = f"fsdp, the default of {run.project}"
        else:
            run.reasons["engine"] = f"megatron, as {reason}"
    for name in names:
        if not run.is_noted(name):
            run.note(name, run.reasons.get("engine", f"{layout.engine}: Megatron-core is the engine"), changes_nothing=False)
    run.note_given(offload, "read only with fsdp2, or offload_train_* is for the rollout")
    run.note_given(groups, "all devices divide each weight" if run.get(f"{ACTOR}.engine") else "see engine")


PROJECT = SourceProject("verl", "verl", "0.9.1", TABLES, _read, _describe, _finish, prefix="")
