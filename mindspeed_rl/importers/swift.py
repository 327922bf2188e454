"""Commands of ms-swift: `swift` and `megatron` rlhf (grpo, dpo, ppo, rm, simpo), sft, pt; `swift rollout`, deploy, infer."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast
from urllib.parse import urlsplit

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import (
    Option,
    SourceCommand,
    SourceProject,
    no_effect,
    part,
    read_count,
    read_scalar,
    refused,
    to,
)
from mindspeed_rl.importers.recipe import (
    ACTOR,
    ENGINE,
    RL,
    SAMPLING,
    WARMUP,
    Adapters,
    Batch,
    Objective,
    Placement,
    Prediction,
    Rate,
    Recipe,
    Rewards,
)
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell_text import Command, list_unknown, read_flags, read_variable
from mindspeed_rl.importers.source_files import find_file, require_file
from mindspeed_rl.importers.source_plan import Schedule
from mindspeed_rl.importers.swift_distillation import name_divergence_of, read_distillation, read_policy_teacher
from mindspeed_rl.importers.swift_options import CORRECTIONS, OPTIONS, SERVING_OPTIONS, SUPERVISED_OPTIONS
from mindspeed_rl.importers.swift_rows import map_columns
from mindspeed_rl.importers.swift_templates import (
    find_unknown_weights,
    is_of_hermes,
    list_prompt_defaults,
    note_template,
    write_template,
)
from mindspeed_rl.importers.training_engine import choose_engine
from mindspeed_rl.importers.translators import (
    count_accelerated,
    describe_preprocessing,
    join_words,
    name_prompts,
    name_tokens,
    read_option_file,
)
from mindspeed_rl.importers.writer import (
    RECOMPUTE_LAYERS,
    UNSET_RANK,
    count_experts,
    find_lora_targets,
    list_expert_defaults,
    note_prediction,
    read_shape,
    start_from_adapter,
)

#: program -> stage here; others only generate
_STAGES = {
    "grpo": "ray_grpo", "ppo": "ray_ppo", "dpo": "dpo", "simpo": "simpo", "cpo": "cpo", "orpo": "orpo", "kto": "kto",
    "rm": "orm", "sft": "sft", "pt": "pretrain", "gkd": "ray_grpo",
}  # fmt: skip
#: kinds whose responses are sampled
_WITH_ROLLOUTS = ("grpo", "ppo", "gkd")
#: kinds that read pairs of answers
_PAIRS = ("dpo", "simpo", "cpo", "orpo", "rm")
_MEGATRON = "megatron "
_SERVING = {
    "rollout": "mindspeed-rl rollout --config-name",
    "deploy": "mindspeed-rl rollout --config-name",
    "infer": "mindspeed-rl generate --load",
}
#: programs that train nothing and serve nothing
_OTHER_PROGRAMS = {
    "export": "mindspeed-rl convert converts, merges and exports checkpoints",
    "eval": "mindspeed-rl evaluate",
    "sample": "mindspeed-rl generate --num-return",
    "app": "mindspeed-rl chat",
    "web-ui": "there is no web interface",
    "merge-lora": "mindspeed-rl convert merges adapters",
}
#: earlier names of options that commands still have
_EARLIER = {
    "train_type": "tuner_type", "sft_type": "tuner_type", "load": "model", "save": "output_dir", "save_interval": "save_steps",
    "eval_interval": "eval_steps", "max_epochs": "num_train_epochs",
}  # fmt: skip
#: dataset -> column of map_keys -> the column that ms-swift takes from it
_COLUMNS: dict[str, dict[str, str]] = {
    "AI-MO/NuminaMath-TIR": {"prompt": "problem", "response": "solution", "query": ""},
}
#: owners of datasets and models that only ModelScope has
_MODELSCOPE = frozenset("AI-ModelScope swift modelscope iic LLM-Research ZhipuAI speech_asr llm-wizard liucong".split())
_VISION = re.compile(
    r"(?i)[-_/.](vl|omni|audio|tts|ocr)[-_/.\d]|[-_]vl$|[-_/](omni)$|qwen\d?(\.\d)?-?(vl|omni|audio)|internvl|llava|minicpm-v|"
    r"clevr_cogen|multimodal|latex_ocr|videochat|chartqa|geoqa|aishell|coco-en|mammoth-vl|rlaif-v"
)
#: models of images that there are, and data of images
_IMAGES = re.compile(r"(?i)qwen-?(2\.5|3)-?vl|clevr_cogen|multimodal|latex_ocr|chartqa|geoqa|coco-en|mammoth-vl|rlaif-v")
#: reward function there -> here
_FUNCTIONS = {
    "accuracy": "swift_accuracy",
    "format": "think_answer_alone",
    "cosine": "swift_cosine",
    "repetition": "swift_repetition",
    "soft_overlong": "swift_soft_overlong",
}
#: scheduler of ms-swift -> here
_SCHEDULERS = {"math_tip_trick": "mindspeed_rl.rollout.agents.swift_schedulers:MathTips"}
_LEVELS = {"token": "token", "sequence": "sequence", "sequence_token": "sequence_token"}
#: policy loss there -> here, the name of its formula, its average
_LOSSES = {
    "grpo": ("grpo", "grpo", "sequence"),
    "bnpo": ("bnpo", "grpo", "token"),
    "dr_grpo": ("dr_grpo", "grpo", "constant"),
    "dapo": ("dapo", "grpo", "token"),
    "cispo": ("cispo_cap", "cispo_cap", "token"),
    "sapo": ("sapo", "sapo", "sequence"),
    "fipo": ("fipo", "fipo", "token"),
    "real": ("real", "real", "sequence"),
}
#: variable that the user sets: rows of a preference stage that fit into one pack
_ROWS_PER_PACK = "ROWS_PER_PACK"
#: longest prompt where the command has no limit
_PROMPT_LENGTH = 2048


_BY_STAGE = {name: OPTIONS if name in _WITH_ROLLOUTS else SUPERVISED_OPTIONS for name in _STAGES}
#: options of earlier releases, which its guides still name
_RETIRED: dict[str, Option] = {
    "vllm_device": no_effect("the rollout shares the actor's devices, or has rl_config.rollout_resource", "auto"),
    "num_infer_workers": part(
        "rollout_resource.num_npus use_integrated_worker", off="as many engines as training processes share their devices"
    ),
    "moe_router_bias_update_rate": to(f"{ACTOR}.moe_router_bias_update_rate"),
    "gc_collect_after_offload": no_effect("memory that is freed is always returned to the device"),
    "multi_turn_func": refused("a function of several turns; see rl_config.multi_turn_scheduler"),
}
_TABLES = {
    **_BY_STAGE,
    **{f"{_MEGATRON}{name}": table for name, table in _BY_STAGE.items()},
    **dict.fromkeys(_SERVING, SERVING_OPTIONS),
}


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(commands: list[Command], devices: int | None) -> SourceCommand:
    """Return the training command among those of a script, else the one that serves or generates."""
    read = [(command, parsed) for command in commands if (parsed := _read_command(command)) is not None]
    others = [parsed for _, parsed in read if parsed.program in _OTHER_PROGRAMS]
    found = [item for item in read if item[1].program not in _OTHER_PROGRAMS]
    training = [item for item in found if item[1].program not in _SERVING]
    if others and not training:
        raise ConfigError([f"{' '.join(others[0].trailing)}: {_OTHER_PROGRAMS[others[0].program]}"])
    if not found:
        raise ConfigError(["there is no command of ms-swift, such as swift rlhf --rlhf_type grpo --model Qwen/Qwen3-4B ..."])
    different = [item for item in training if item[1].options != training[0][1].options]
    if different or (training and training[0][0].uncertain):
        lines = ", ".join(str(command.line) for command, _ in training)
        raise ConfigError([f"the script has several trainings, or one that may not run (lines {lines}); import one of them"])
    command, parsed = (training or found)[0]
    environment, options = dict(parsed.environment), dict(parsed.options)
    servers = [item.options for _, item in found if item.program == "rollout"] if training else []
    if training:
        options = _read_cached_data(options, others)
        environment |= {_OTHERS: " ".join(dict.fromkeys(item.program for item in others))}
    if servers:
        # environment and turns of a server are those of its run
        options = {name: value for name, value in servers[0].items() if name in _OF_TURNS} | options
        # the servers of the script are those of the run
        environment |= {"SWIFT_SERVERS": str(len(servers))}
        environment |= {"SWIFT_SERVER_TP": str(servers[0].get("vllm_tensor_parallel_size", 1))}
        environment |= {"SWIFT_SERVER_DP": str(servers[0].get("vllm_data_parallel_size", 1))}
    return replace(parsed, options=options, environment=environment, devices=devices or parsed.devices)


#: options of a server that belong to the run whose server it is
_OF_TURNS = ("multi_turn_scheduler", "max_turns", "gym_env", "use_gym_env", "external_plugins")
#: variable with the programs of a script that neither train nor serve
_OTHERS = "SWIFT_OTHERS"
#: options of `export` that say which rows a folder of tokens has, and what trains of them
_OF_CACHED_DATA = (
    "dataset", "val_dataset", "split_dataset_ratio", "system", "loss_scale", "columns", "truncation_strategy",
    "use_chat_template",
)  # fmt: skip


def _read_cached_data(options: Mapping[str, object], others: list[SourceCommand]) -> dict[str, object]:
    """Return the options of a training with the data of the `export` of its script in place of the folders that it wrote."""
    folders = [options[name] for name in ("cached_dataset", "cached_val_dataset") if name in options]
    names = {str(name) for folder in folders for name in (folder if isinstance(folder, list) else [folder])}
    for export in others:
        own = str(Path(str(export.options.get("output_dir", ""))))
        if names and "to_cached_dataset" in export.options and {str(Path(name).parent) for name in names} == {own}:
            rest = {name: value for name, value in options.items() if name not in ("cached_dataset", "cached_val_dataset")}
            return {name: value for name, value in export.options.items() if name in _OF_CACHED_DATA} | rest
    return dict(options)


def _read_command(command: Command) -> SourceCommand | None:
    """Return a command of ms-swift; None for others."""
    program, words = _find_program(command.words)
    if not program:
        return None
    flags, trailing = read_flags(words)
    if (name := program.removeprefix(_MEGATRON)) in _OTHER_PROGRAMS:
        own = {option: _read_value(value) for option, value in flags.items()}
        launcher = "megatron" if program.startswith(_MEGATRON) else "swift"
        return SourceCommand(name, own, trailing=(launcher, name))
    values = {name: _read_value(value) for name, value in flags.items()}
    files = [word for word in trailing if Path(word).suffix in (".yaml", ".yml", ".json")]
    environment = dict(command.environment)
    for file in [*files, *([str(values.pop("config"))] if "config" in values else [])]:
        content = _read_options(require_file(command, "--config", file), environment)
        values = content | values
    options = {_EARLIER.get(name, name): value for name, value in values.items()}
    if "log_interval" in options and program not in _SERVING:
        options["logging_steps"] = options.pop("log_interval")
    if program.endswith("rlhf"):
        kind = str(options.get("rlhf_type", "dpo"))
        program = program.replace("rlhf", kind)
    if program.removeprefix(_MEGATRON) not in {*_STAGES, *_SERVING}:
        raise ConfigError([f"the command trains {program!r}; available are {', '.join((*_STAGES, *_SERVING))}"])
    table = _RETIRED | _TABLES[program]
    if program in _SERVING:
        # earlier releases had the engine's options without vllm_ in front
        options = {f"vllm_{name}" if name not in table and f"vllm_{name}" in table else name: options[name] for name in options}
    launcher = command.words[: len(command.words) - len(words) - 1]
    world = _count_devices(command, environment, launcher, program)
    return SourceCommand(program, options, environment, world, table, tuple(trailing), command.loop)


def _find_program(words: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the program of a command, "megatron sft" for one of Megatron-SWIFT, and the words after it; "" for others."""
    for place, word in enumerate(words):
        name, before = Path(word).name, Path(words[place - 1]).name if place else ""
        path = Path(word)
        if path.suffix == ".py" and path.parent.name in ("cli", "_megatron"):
            name, before = path.stem, "megatron" if path.parent.name == "_megatron" else "swift"
        if word.startswith("swift.cli.") and before == "-m":
            name, before = word.rpartition(".")[2], "megatron" if "._megatron." in word else "swift"
            if name == "main":
                continue
        elif place and re.search(r"cli[./](_megatron[./])?main(\.py)?$", words[place - 1]):
            before = "megatron" if "_megatron" in words[place - 1] else "swift"
        if before not in ("swift", "megatron"):
            continue
        if name in ("rlhf", "sft", "pt", *_SERVING, *_OTHER_PROGRAMS):
            return (_MEGATRON if before == "megatron" else "") + name, words[place + 1 :]
    return "", ()


#: group of a run under Ray -> variables that its devices become
_RAY_GROUPS = {"train": "RAY_TRAIN_DEVICES", "rollout": "RAY_ROLLOUT_DEVICES"}


def _read_options(path: Path, environment: dict[str, str]) -> dict[str, object]:
    """Return the options of a file of ms-swift.

    Groups of a run under Ray are options of all its programs, and other mappings texts in JSON, as the command has them.

    Args:
        environment: of the command, which wins; takes the variables of the file's ENV.

    Raises:
        ConfigError: the file has a group that no part of a run is.
    """
    options: dict[str, object] = {}
    content = read_option_file(path)
    variables = content.pop("ENV", None) or {}
    if not isinstance(variables, Mapping):
        raise ConfigError([f"{path}: ENV must hold variables and values"])
    for name, value in variables.items():
        environment.setdefault(str(name), str(value))
    together = content.pop("colocate_groups", None) or []
    roles = [group for group in together if isinstance(group, list)] if isinstance(together, list) else []
    groups = content.pop("device_groups", None)
    if (count := _count_ranks(groups)) is not None:
        environment[_RAY_GROUPS["train"]] = str(count)
    elif groups is not None:
        feature = f"device_groups {groups}: not available here: devices by their ranks; take the group out, and write --devices"
        raise ConfigError([f"{path}: {feature}"])
    for name, value in content.items():
        if name in _RAY_GROUPS and isinstance(value, Mapping):
            own = {str(key): item for key, item in value.items()}
            environment[_RAY_GROUPS[name]] = str(own.pop("gpus", 0))
            options |= own
        elif isinstance(value, Mapping) and "gpus" in value:
            raise ConfigError([f"{path}: the group {name}: not available here: devices of this role under Ray"])
        else:
            options[name] = json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else value
    if any({"train", "rollout"} <= set(group) for group in roles):
        environment.pop(_RAY_GROUPS["rollout"], None)
    return options


def _count_ranks(groups: object) -> int | None:
    """Return the devices of a run under Ray whose one group has all workers; None for other groups."""
    rest = {name: group for name, group in groups.items() if name != "nproc_per_node"} if isinstance(groups, Mapping) else {}
    group = next(iter(rest.values()), None)
    if len(rest) != 1 or not isinstance(group, Mapping) or group.get("workers") != ["default"]:
        return None
    ranks = group.get("ranks")
    span = re.fullmatch(r"list\(range\((\d+), *(\d+)\)\)", str(ranks))
    if span is not None:
        return int(span.group(2)) - int(span.group(1)) or None
    return len(ranks) if isinstance(ranks, list) else ranks if isinstance(ranks, int) else None


def _read_value(words: list[str]) -> object:
    """Return the value of an option: true without words, a list of several."""
    values = [word if list_unknown(word) else read_scalar(word) for word in words]
    return True if not values else values[0] if len(values) == 1 else values


def _count_devices(command: Command, environment: Mapping[str, str], launcher: tuple[str, ...], program: str) -> int:
    """Return the processes that train, by what starts them: Ray, accelerate, torchrun or swift itself.

    Args:
        launcher: words before the options of the program.
    """
    if (own := environment.get(_RAY_GROUPS["train"])) is not None:
        return read_count("gpus of the group train", read_scalar(own))
    flags, _ = read_flags(launcher)
    visible = read_variable(environment, "ASCEND_RT_VISIBLE_DEVICES") or read_variable(environment, "CUDA_VISIBLE_DEVICES")
    is_accelerated = any(Path(word).name == "accelerate" for word in launcher)
    if is_accelerated and (count := count_accelerated(command, join_words(flags))) is not None:
        return count
    if is_accelerated or program in _SERVING:
        per_node = None if is_accelerated else read_variable(environment, "NPROC_PER_NODE")
        per_node = per_node or str(len([item for item in (visible or "").split(",") if item.strip()]) or 1)
    else:
        per_node = read_variable(environment, "NPROC_PER_NODE") or next(iter(flags.get("nproc_per_node", [])), "1")
    nodes = read_variable(environment, "NNODES") or next(iter(flags.get("nnodes", [])), "1")
    if not (per_node.isdigit() and nodes.isdigit() and int(per_node) and int(nodes)):
        raise ConfigError([f"NPROC_PER_NODE={per_node} and NNODES={nodes} must be whole numbers; --devices sets their product"])
    return int(per_node) * int(nodes)


# --- sizes --------------------------------------------------------------------------------------------------------------


class _Sizes:
    """The numbers of a batch, by ms-swift's formulas.

    Attributes:
        tp, pp, cp, ep: layout.
        dp: replicas.
        micro: rows of one forward pass.
        step: rows of an optimizer step: completions, samples or pairs.
        packed: rows of a pack; None where rows are not packed.
        group: responses of a prompt; 1 without rollouts.
        iterations: passes over a rollout.
        steps: optimizer steps of one rollout, over all its iterations; 1 without rollouts.
        rollout: completions of one rollout; None without rollouts.
    """

    def __init__(self, command: SourceCommand) -> None:
        self.is_megatron = command.program.startswith(_MEGATRON)
        self.kind = command.program.removeprefix(_MEGATRON)
        world = command.devices
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        self.tp, self.pp, self.cp = (command.count(name, 1) if self.is_megatron else 1 for name in names)
        self.ep = command.count("expert_model_parallel_size", 1) if self.is_megatron else 1
        if not self.is_megatron:
            self.cp = command.count("sequence_parallel_size", 1)
        self.dp, rest = divmod(world, self.tp * self.pp * self.cp)
        if rest or not self.dp:
            raise ConfigError(
                [f"{world} devices are no whole replicas of {self.tp} x {self.pp} x {self.cp}; --devices says them"]
            )
        self.group, self.iterations, self.steps = 1, 1, 1
        self.packed = _count_packed_rows(command, self.kind)
        self.rollout: int | None = None
        if self.is_megatron:
            self.micro, self.step = command.count("micro_batch_size", 1), command.count("global_batch_size", 16)
            passes, per_pass = 1, self.step
        else:
            self.micro = command.count("per_device_train_batch_size", 1)
            default = 1 if self.kind == "grpo" else max(1, math.ceil(16 / self.micro / world))
            accumulated = command.count("gradient_accumulation_steps", default)
            # a rollout's forward passes count those of all processes, also where several share a sequence
            per_pass, passes = self.micro * (world if self.kind in _WITH_ROLLOUTS else self.dp), accumulated
            self.step = per_pass * accumulated
        if self.packed is not None:
            self.micro, self.step = self.micro * self.packed, self.step * self.packed
        if self.kind == "ppo":
            parts = command.count("num_mini_batches", 1)
            self.iterations = command.count("num_ppo_epochs", 4)
            self.rollout, self.steps = self.step * parts, parts * self.iterations
        elif self.kind in _WITH_ROLLOUTS:
            self._set_rollout(command, passes, per_pass)

    def _set_rollout(self, command: SourceCommand, accumulated: int, per_pass: int) -> None:
        self.group = 1 if self.kind == "gkd" else command.count("num_generations", 8)
        self.iterations = command.count("num_iterations", 1)
        total = command.get("generation_batch_size")
        if total is not None:
            passes, rest = divmod(command.count("generation_batch_size", 1), per_pass)
            if rest or not passes:
                raise ConfigError([f"--generation_batch_size {total} must be a multiple of {per_pass}"])
        else:
            passes = command.count("steps_per_generation", accumulated)
        if passes * per_pass % self.group:
            raise ConfigError([f"{passes * per_pass} completions of a rollout are no whole groups of {self.group}"])
        if passes % accumulated == 0:
            self.rollout, self.steps = passes * per_pass, passes // accumulated * self.iterations
        elif accumulated % passes == 0 and self.iterations == 1:
            # the rollouts of one optimizer step are of the same weights, and are one here
            self.rollout = accumulated * per_pass
        else:
            raise ConfigError(
                [f"--steps_per_generation {passes} and --gradient_accumulation_steps {accumulated}: an optimizer step must be "
                 "a whole number of rollouts, or a rollout one of steps"]
            )  # fmt: skip

    @property
    def counts_completions(self) -> bool:
        """True where sizes are written in completions, as Megatron-SWIFT has them, or as a step has no whole groups.

        Counted so, the prompts of a step and of a rollout must divide by the replicas and by the rows of a pass.
        """
        if self.rollout is None or self.step % self.group:
            return self.rollout is not None
        unit = self.group * self.dp * self.micro
        return self.is_megatron and self.group > 1 and self.step % unit == 0 and self.rollout % unit == 0

    def count_steps(self, command: SourceCommand, rows: int) -> int:
        """Return the optimizer steps of the run over so many rows of data."""
        limit = command.number("train_iters" if self.is_megatron else "max_steps", -1)
        epochs = command.get("num_train_epochs")
        if limit > 0 and (epochs is None or not self.is_megatron):
            return int(limit)
        if self.is_megatron:
            if epochs is None:
                raise ConfigError(["the command says no length: --num_train_epochs and --train_iters are missing"])
            unit = self.micro * self.dp
            return int(rows // unit * unit * self.group * command.number("num_train_epochs", 1) // self.step)
        number = command.number("num_train_epochs", 3.0)
        if self.kind == "ppo":
            assert self.rollout is not None, "PPO has rollouts"
            return math.ceil(int(number * rows) / self.rollout) * self.steps
        if self.rollout is not None:
            return math.ceil(number * max(1, rows // (self.rollout // self.group) * self.steps))
        batches = math.ceil(rows / (self.micro * self.dp))
        accumulated = self.step // (self.micro * self.dp)
        return math.ceil(number * max(1, math.ceil(batches / accumulated)))


def _count_packed_rows(command: SourceCommand, kind: str) -> int | None:
    """Return the rows that a pack of a preference stage has on average; None where rows are not joined in a preference stage.

    Raises:
        ConfigError: the user does not say it.
    """
    if not command.flag("packing") or kind not in (*_PAIRS, "kto"):
        return None
    if (count := command.environment.get(_ROWS_PER_PACK)) is None:
        length = _read_length(command)
        text = f"--packing: a step has as many rows as fit into packs of {length} tokens, which only the data knows"
        raise ConfigError([f"{text}; --set {_ROWS_PER_PACK}=NUMBER says how many fit into one on average"])
    return read_count(_ROWS_PER_PACK, read_scalar(count))


def _read_schedule(command: SourceCommand, total: int) -> Schedule:
    """Return the learning rate over optimizer steps.

    Raises:
        ConfigError: there is no such form.
    """
    is_megatron = command.program.startswith(_MEGATRON)
    peak = command.number("lr" if is_megatron else "learning_rate", 1e-5 if _read_tuner(command) == "full" else 1e-4)
    if is_megatron:
        style = command.text("lr_decay_style", "cosine")
        decay = command.count("lr_decay_iters", max(total, 1))
        fraction = command.get("lr_warmup_fraction")
        share = command.number("lr_warmup_fraction", 0.0)
        warmup = int(command.number("lr_warmup_iters", 0)) if fraction is None else int(share * decay)
        return Schedule(peak, style, decay, warmup, command.number("lr_warmup_init", 0.0), command.number("min_lr", 0.0))
    forms = {
        "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine", "inverse_sqrt": "inverse-square-root",
    }  # fmt: skip
    name = command.text("lr_scheduler_type", "cosine")
    if name not in forms:
        raise ConfigError([f"--lr_scheduler_type {name}: not available here; available are {', '.join(forms)}"])
    steps, ratio = command.number("warmup_steps", 0), command.number("warmup_ratio", 0.0)
    warmup = int(steps) if steps >= 1 else math.ceil(total * (steps or ratio))
    floor = 0.0
    if name == "cosine_with_min_lr":
        least = re.search(r'"(min_lr(?:_rate)?)"\s*:\s*([-+.\deE]+)', command.text("lr_scheduler_kwargs"))
        if least is None:
            raise ConfigError(["--lr_scheduler_type cosine_with_min_lr needs --lr_scheduler_kwargs '{\"min_lr\": ...}'"])
        floor = float(least.group(2)) * (peak if least.group(1) == "min_lr_rate" else 1.0)
    return Schedule(peak, forms[name], total, warmup, 0.0, floor)


def _read_tuner(command: SourceCommand) -> str:
    return command.text("tuner_type", "full" if command.program.startswith(_MEGATRON) else "lora")


def _read_rows(command: SourceCommand, rows: int) -> tuple[int, bool]:
    """Return the rows of the data, and True where the command says them: name#count."""
    counts = [name.rpartition("#")[2] for name in command.list_texts("dataset")]
    if counts and all(count.isdigit() for count in counts):
        known = sum(int(count) for count in counts)
        return max(1, round(known * (1 - command.number("split_dataset_ratio", 0.0)))), True
    return rows, False


# --- the run ------------------------------------------------------------------------------------------------------------


def _describe(run: Import, command: SourceCommand) -> Recipe | None:
    """Return the run by ms-swift's formulas; None for a command that serves or generates."""
    kind = command.program.removeprefix(_MEGATRON)
    for name in ("model", "dataset", "val_dataset"):
        for text in command.list_texts(name):
            if _VISION.search(text) and not _IMAGES.search(text):
                run.refuse(f"--{name} {text}", "data with video or audio, and models of images but Qwen2.5-VL and Qwen3-VL")
            elif name != "model" and kind in (*_PAIRS, "kto") and _IMAGES.search(text):
                run.refuse(f"--{name} {text}", "images in preference data")
    if kind in _SERVING:
        _write_serving(run, command, kind)
        return None
    for name in command.environment.get(_OTHERS, "").split():
        run.note(f"swift {name}", _OTHER_PROGRAMS[name])
    shared = _describe_shared(run, command, kind, _Sizes(command))
    _note_calculation(run, command, kind)
    if shared.rollout_completions is None:
        return _describe_dataset(run, command, kind, shared)
    describe = {"ppo": _describe_ppo, "grpo": _describe_grpo, "gkd": _describe_gkd}[kind]
    return describe(run, command, shared)


def _describe_shared(run: Import, command: SourceCommand, kind: str, sizes: _Sizes) -> Recipe:
    """Return what all kinds of training have."""
    rows, knows_rows = _read_rows(command, run.settings.rows)
    total = sizes.count_steps(command, rows)
    schedule = _read_schedule(command, total)
    engine = _MEGATRON_NAMES if sizes.is_megatron else _TRANSFORMERS_NAMES
    tuner, adapters = _read_tuner(command), command.list_texts("adapters")
    each = f"{sizes.steps} steps an iteration" if sizes.steps > 1 else ""
    note = f"{sizes.step} rows of an optimizer step on {command.devices} devices"
    note += "" if sizes.rollout is None else f", {sizes.steps} steps of a rollout of {sizes.rollout} completions"
    has_limit = command.number(engine.limit, -1) > 0 and (not sizes.is_megatron or not command.has("num_train_epochs"))
    counts_rows = not has_limit and (knows_rows or kind == "pt")
    if counts_rows and not knows_rows:
        form = "a length in epochs of documents that are cut into samples; write --max_steps or --train_iters"
        run.refuse("--num_train_epochs", form)
    if has_limit:
        run.note_given("num_train_epochs", f"--{engine.limit} is read instead")
    else:
        run.note_given(engine.limit, "--num_train_epochs is read")
    warmup = f"{schedule.warmup} steps of warm-up, from {schedule.peak:g} to {schedule.floor:g}"
    epochs = None if has_limit or counts_rows else command.number("num_train_epochs", 3.0)
    rate = _read_rate(command, sizes, schedule, total, engine, in_epochs=epochs is not None)
    paths, notes = _read_data(run, command, kind)
    prediction = _read_prediction(run, command, kind)
    lora = _read_adapters(run, command)
    synced = math.ceil(command.number("ref_model_sync_steps", 512) / sizes.steps)
    in_update = sizes.rollout is not None and lora is not None and bool(lora.dropout)
    defaults: list[tuple[str, object, str]] = []
    if not sizes.is_megatron and command.flag("gradient_checkpointing", default=True):
        reason = "ms-swift computes the layers again in the backward pass"
        defaults += [(key, value, reason) for key, value in RECOMPUTE_LAYERS.items()]
    if command.text("optimizer") in ("muon", "dist_muon"):
        muon = {"muon_momentum": 0.9, "muon_tp_mode": "blockwise"}
        defaults += [(f"{ACTOR}.{name}", value, "the default of Megatron-SWIFT") for name, value in muon.items()]
    defaults += list_expert_defaults(command.text("mcore_model") or command.text("model"), "ms-swift")
    defaults += _choose_engine(run, command, kind, sizes)
    _read_agent_template(run, command)
    if command.has("virtual_pipeline_model_parallel_size"):
        form = "chunks by their number; write num_layers_per_virtual_pipeline_stage"
        run.refuse("--virtual_pipeline_model_parallel_size", form)
    return Recipe(
        stage=_STAGES[kind],
        rollout_completions=sizes.rollout,
        step_samples=sizes.step,
        steps_per_rollout=sizes.steps,
        total_steps=total,
        loss="cross_entropy",
        tp=sizes.tp,
        pp=sizes.pp,
        cp=sizes.cp,
        ep=sizes.ep,
        dp=sizes.dp,
        packed_rows=f"as many as fit into packs, {sizes.packed} on average" if sizes.packed is not None else None,
        row_order=_read_order(run, command),
        expert_capacity=_read_capacity(run, command),
        lora_rank=0 if tuner == "full" else UNSET_RANK if adapters else command.count("lora_rank", 8),
        weight_decay=command.number("weight_decay", 0.1),
        clip_grad=rate.clip_grad,
        data=(paths[f"{ACTOR}.data_path"],),
        model=command.text("mcore_model") or command.text("model") or next(iter(adapters), ""),
        placement=Placement(actor=command.devices),
        batch=Batch(
            sizes.micro,
            sizes.group,
            None if sizes.rollout is None else sizes.iterations,
            counts_completions=sizes.counts_completions,
        ),
        rates=(rate,),
        adapters=lora,
        prediction=prediction,
        train_iters=math.ceil(total / sizes.steps) if epochs is None else None,
        train_epochs=epochs,
        keys={
            **paths,
            f"{ACTOR}.save_interval": _count_interval(command, sizes, "save_steps", 500),
            f"{ACTOR}.eval_interval": _count_interval(command, sizes, "eval_steps", 0),
            f"{RL}.ref_model_sync_steps": synced if command.has("ref_model_sync_steps") else None,
            f"{RL}.dropout_in_update": True if in_update else None,
        },
        notes={
            **notes,
            "global_batch_size": note,
            "train_iters": f"over {rows} rows" if counts_rows else each,
            **dict.fromkeys(("save_interval", "eval_interval", "ref_model_sync_steps"), each),
            **dict.fromkeys(WARMUP.split(), warmup),
            "lora_target_modules": "" if command.has("tuner_type") else "the default of swift",
            "mtp_num_layers": note_prediction(adapts=lora is not None),
        },
        unread=engine.unread,
        defaults=tuple(defaults),
    ).follow(schedule)


def _read_order(run: Import, command: SourceCommand) -> str | None:
    """Return the order of the rows where they do not come by chance."""
    if command.flag("streaming"):
        if command.number("max_steps", -1) < 1 and command.number("train_iters", -1) < 1:
            raise ConfigError(["--streaming needs a length in steps: --max_steps or --train_iters"])
        run.note_given("streaming", "the order of rows is that of the seed, there that of a buffer")
    run.note_given("streaming", "off")
    order = command.text("train_sampling_strategy", "random")
    if order not in ("random", "group_by_length"):
        run.refuse("--train_sampling_strategy", f"{order} rows; random and group_by_length are available")
    is_sorted = command.flag("group_by_length") or order == "group_by_length"
    run.note_given("group_by_length train_sampling_strategy", "see row_order of the plan", changes_nothing=False)
    return "rows of similar lengths together" if is_sorted else None


def _choose_engine(run: Import, command: SourceCommand, kind: str, sizes: _Sizes) -> tuple[tuple[str, object, str], ...]:
    """Return the key of the training engine where the command divides all weights, and our engine that does so can train it."""
    names = "fsdp fsdp_config"
    divides = "" if sizes.is_megatron else _find_division(run, command)
    obstacles = {
        "adapters": _read_tuner(command) != "full",
        "sequences that several devices share": sizes.cp > 1,
        "images": any(_IMAGES.search(text) for name in ("model", "dataset") for text in command.list_texts(name)),
        "another optimizer than AdamW": command.text("optimizer", "adam") != "adam",
        "a reference that moves": command.flag("sync_ref_model"),
        "prediction layers": bool(command.get("mtp_num_layers")),
    }
    stage, model = _STAGES[kind], command.text("model")
    defaults, reason = choose_engine(
        run, names, divides, stage=stage, model=model, obstacles=obstacles, otherwise="off"
    )
    if reason and "--deepspeed" in run.translated:
        run.translated["--deepspeed"] += f"; {reason}"
    return defaults


def _find_division(run: Import, command: SourceCommand) -> str:
    """Return what divides all weights over the devices: FSDP or ZeRO-3; empty where nothing does."""
    if command.get("fsdp") or command.get("fsdp_config"):
        return "FSDP"
    value = command.text("deepspeed")
    path = find_file(Command((), {}, 0, folder=run.settings.folder), value) if value.endswith(".json") else None
    zero = read_option_file(path).get("zero_optimization") if path is not None else None
    stage = zero.get("stage") if isinstance(zero, Mapping) else 3 if value.startswith("zero3") else 0
    return "ZeRO-3" if stage == 3 else ""


def _read_agent_template(run: Import, command: SourceCommand) -> None:
    """Note a form of tools that is the one of the tokenizer's own template; others are refused."""
    name = command.text("agent_template")
    if name == "hermes" and is_of_hermes(command.text("model")):
        run.note_given("agent_template", "the tokenizer's chat template writes tools so", changes_nothing=False)
    elif name:
        run.refuse("--agent_template", f"{name}: another form of tools than that of the tokenizer's chat template")


def _read_capacity(run: Import, command: SourceCommand) -> str | None:
    """Return the tokens that an expert takes, where there is a limit and the model may have experts."""
    factor = command.number("moe_expert_capacity_factor", -1.0)
    names = "moe_expert_capacity_factor moe_pad_expert_input_to_capacity"
    run.note_given(names, "see expert_capacity of the plan" if factor > 0 else "off", changes_nothing=False)
    has_experts = count_experts(command.text("mcore_model") or command.text("model")) != 0
    return f"{factor:g} x the mean, further ones are dropped" if factor > 0 and has_experts else None


@dataclass(frozen=True)
class _Names:
    """Names of options that transformers' Trainer and Megatron-SWIFT have for one number, and those that one does not read."""

    limit: str
    rate: str
    warmup: str
    clip: str
    unread: tuple[str, ...]


_TRANSFORMERS_NAMES = _Names(
    limit="max_steps",
    rate="learning_rate",
    warmup="warmup_ratio",
    clip="max_grad_norm",
    unread=("train_iters", "lr", "lr_decay_style"),
)
_MEGATRON_NAMES = _Names(
    limit="train_iters",
    rate="lr",
    warmup="lr_warmup_fraction",
    clip="clip_grad",
    unread=("max_steps", "learning_rate", "lr_scheduler_type", "gradient_checkpointing"),
)


def _count_interval(command: SourceCommand, sizes: _Sizes, name: str, default: int) -> int | None:
    """Return an interval in iterations; None where there is none, or checkpoints are not counted in steps."""
    interval = command.number(name, default)
    counts = name != "save_steps" or command.text("save_strategy", "steps") == "steps"
    return math.ceil(interval / sizes.steps) if interval >= 1 and counts else None


def _read_rate(
    command: SourceCommand, sizes: _Sizes, schedule: Schedule, total: int, engine: _Names, *, in_epochs: bool
) -> Rate:
    """Return the learning rate in iterations."""
    warmup, share = None, None
    if schedule.warmup and schedule.warmup % sizes.steps == 0 and command.has("warmup_steps", "lr_warmup_iters"):
        warmup = schedule.warmup // sizes.steps
    elif schedule.warmup:
        share = command.number(engine.warmup, 0.0)
        if not in_epochs or not share:
            # rounded up there, and down here
            share = (schedule.warmup + 0.01) / (math.ceil(schedule.decay / sizes.steps) * sizes.steps)
    return Rate(
        peak=schedule.peak,
        style=schedule.style,
        floor=schedule.floor,
        decay=None if schedule.decay == total else math.ceil(schedule.decay / sizes.steps),
        warmup=warmup,
        warmup_share=share,
        clip_grad=command.number(engine.clip, 1.0),
    )


def _note_calculation(run: Import, command: SourceCommand, kind: str) -> None:
    """Note options that the stage answers: what trains, and how losses are averaged."""
    stage, unknown = _STAGES[kind], find_unknown_weights(command, kind)
    answers = {
        "calculate_per_token_loss": (
            command.flag("calculate_per_token_loss") == (kind in ("sft", "pt")),
            "as the loss is averaged here",
            "another average of the loss",
        ),
        "loss_scale": (not unknown, "these tokens train here", unknown),
        "use_chat_template": (
            command.flag("use_chat_template") == (kind != "pt"),
            "the stage decides it",
            f"in stage {stage}",
        ),
    }
    for name, (fits, reason, feature) in answers.items():
        if fits:
            run.note_given(name, reason, changes_nothing=False)
        elif command.has(name):
            run.refuse(f"--{name}", feature)
    if command.flag("packing") and kind == "pt":
        run.note_given("packing", "see documents of the plan", changes_nothing=False)


def _read_data(run: Import, command: SourceCommand, kind: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the keys of the data and their notes."""
    sampled = "the last rows; there a random sample"
    keys: dict[str, str] = {}
    notes, flags = {"split": sampled}, ""
    for variable, key in (("MAX_PIXELS", "max_pixels"), ("MIN_PIXELS", "min_pixels"), ("ROOT_IMAGE_DIR", "image_folder")):
        if (value := read_variable(command.environment, variable)) is not None:
            run.translate(variable, {f"{ACTOR}.{key}": value if key == "image_folder" else int(value)})
            flags += f" --{key.replace('_', '-')} {value}"
    side = 32 if re.search(r"(?i)qwen-?3(\.\d)?(-vl|-omni|-?\d)", command.text("model")) else 28
    for variable, key in (("IMAGE_MAX_TOKEN_NUM", "max_pixels"), ("IMAGE_MIN_TOKEN_NUM", "min_pixels")):
        if (value := read_variable(command.environment, variable)) is not None:
            pixels = read_count(variable, read_scalar(value)) * side**2
            run.translate(variable, {f"{ACTOR}.{key}": pixels}, f"tokens of {side} x {side} pixels")
            flags += f" --{key.replace('_', '-')} {pixels}"
    template = "" if kind in (*_WITH_ROLLOUTS, "pt") else write_template(run, command, kind)
    for option, key in (("dataset", "data_path"), ("val_dataset", "eval_data_path")):
        if option == "dataset" or command.has(option):
            path = _find_data(command, option)
            keys[f"{ACTOR}.{key}"], notes[key] = path, _describe_data(run, command, kind, option, path, flags, template)
    fills = any("self-cognition" in item for item in command.list_texts("dataset"))
    for name, place in (("model_author", "AUTHOR"), ("model_name", "NAME")):
        words = " / ".join(command.list_texts(name))
        if fills and command.has(name):
            run.translate(f"--{name}", {}, f"write {words} for {{{{{place}}}}} in the rows of self-cognition before preprocess")
        run.note_given(name, "only self-cognition data has places for it")
    share = command.number("split_dataset_ratio", 0.0)
    if share and kind in _WITH_ROLLOUTS:
        counts = [item.rpartition("#")[2] for item in command.list_texts("dataset")]
        head, _, first = keys[f"{ACTOR}.data_path"].rpartition("[:")
        if all(count.isdigit() for count in counts):
            notes["eval_data_path"] = sampled
            keys[f"{ACTOR}.eval_data_path"] = f"{head}[{first.rstrip(']')}:{sum(int(count) for count in counts)}]"
        else:
            form = "a part of an unknown number of prompts; name a file in --val_dataset"
            run.refuse("--split_dataset_ratio", form)
    elif share:
        keys[f"{ACTOR}.split"] = f"{100 * (1 - share):g},{100 * share:g},0"
    return keys, notes


def _describe_data(run: Import, command: SourceCommand, kind: str, option: str, path: str, flags: str, template: str) -> str:
    """Return the note of the data: what to download, join or preprocess.

    Args:
        flags: options of preprocessing for images.
        template: those for the chat template.
    """
    names, has_rollouts = command.list_texts(option), kind in _WITH_ROLLOUTS
    name, _, count = names[0].partition("#")
    if has_rollouts and any(":" in item.partition("#")[0] and item.count("/") == 1 for item in names):
        run.refuse(f"--{option} {' '.join(names)}", "a subset of a dataset: download it, and give its folder")
    notes = ["the first rows; there a random sample"] if count else []
    is_joined = len(names) > 1 and has_rollouts
    if is_joined:
        notes.append(f"a file with the rows of {', '.join(names)}")
    is_hub = name.count("/") == 1 and not Path(name).expanduser().exists()
    if is_hub and not is_joined and not path.startswith("hf://"):
        notes.append(f"a folder: modelscope download --dataset {name} --local_dir {name}")
    if not has_rollouts:
        form = "Pairwise" if kind in _PAIRS else "Unpaired" if kind == "kto" else "Instruction"
        words = "" if kind == "pt" else f" --handler-name AlpacaStyle{form}Handler{template}{_write_length(command, kind)}"
        rows = f" --max-samples {count}" if count and len(names) == 1 else ""
        notes.append(describe_preprocessing(" + ".join(names), path, command.text("model"), f"{words}{rows}{flags}"))
        notes += [note] if (note := note_template(command)) and kind != "pt" else []
    else:
        for column, source in _COLUMNS.get(name, {}).items():
            run.add_default(f"{ACTOR}.map_keys.{column}", source, f"the column of {name}")
        if not command.has("columns"):
            map_columns(run, f"--{option}", name)
    return "; ".join(notes)


def _write_length(command: SourceCommand, kind: str) -> str:
    """Return the options of preprocessing for long rows, which ms-swift leaves out, and for packs."""
    if kind == "sft" and command.flag("packing"):
        return f" --neat-pack --seq-length {_read_length(command)}"
    # rows of fewer tokens than that are kept
    return f" --seq-length {_read_length(command) + 1}" if command.has("max_length") else ""


def _find_data(command: SourceCommand, option: str = "dataset") -> str:
    """Return data_path here, or eval_data_path.

    Raises:
        ConfigError: there is none.
    """
    names = command.list_texts(option)
    if not names:
        raise ConfigError([f"the command names no data: --{option} is missing"])
    name, _, count = names[0].partition("#")
    if command.program.removeprefix(_MEGATRON) not in _WITH_ROLLOUTS:
        return name_tokens(name, others=len(names) > 1)
    rows, share = sum(int(item.rpartition("#")[2]) for item in names if "#" in item), command.number("split_dataset_ratio", 0.0)
    part = f"[:{round(rows * (1 - share))}]" if share and option == "dataset" else ""
    if len(names) > 1:
        return f"./dataset/{Path(name).stem}_and_others.jsonl{part}"
    is_elsewhere = name.partition("/")[0] in _MODELSCOPE and not command.flag("use_hf")
    return (name if is_elsewhere else name_prompts(name)) + (part or (f"#{count}" if count else ""))


def _read_adapters(run: Import, command: SourceCommand) -> Adapters | None:
    tuner, names = _read_tuner(command), "target_modules lora_rank lora_alpha lora_dropout"
    if tuner == "full":
        run.note_given("tuner_type", "all weights train", changes_nothing=False)
        return None
    if tuner != "lora":
        run.refuse("--tuner_type", f"{tuner}; lora and full are available")
        run.note_given(names, "see --tuner_type")
        return None
    modules = command.list_texts("target_modules") or ["all-linear"]
    targets, dropout = find_lora_targets(modules), command.number("lora_dropout", 0.05)
    if not targets:
        raise ConfigError([f"--target_modules {' '.join(modules)}: none of them is a projection of attention or MLP"])
    if command.has("adapters"):  # which have rank and scale of theirs
        return Adapters(targets, dropout=dropout)
    return Adapters(targets, command.count("lora_rank", 8), int(command.number("lora_alpha", 32)), dropout)


def _read_prediction(run: Import, command: SourceCommand, kind: str) -> Prediction | None:
    names = "mtp_num_layers mtp_loss_scaling_factor"
    if not command.get("mtp_num_layers"):
        run.note_given(names, "without --mtp_num_layers there are no prediction layers")
    elif kind in _WITH_ROLLOUTS:
        reason = "in RL ms-swift computes no loss of prediction layers; megatron_training.mtp_num_layers trains them"
        run.note_given(names, reason)
    elif kind not in ("sft", "pt"):
        run.refuse("--mtp_num_layers", "prediction layers next to a preference loss")
    else:
        factor = command.number("mtp_loss_scaling_factor", 0.1)
        return Prediction(command.count("mtp_num_layers", 1), factor, detaches=False)
    return None


#: options that another stage alone reads
_OF_GRPO = tuple("beta kl_in_reward epsilon epsilon_high loss_type advantage_estimator scale_rewards ref_model".split())
_OF_PPO = ("cliprange", "kl_coef")
_OF_GRPO_ALONE = tuple(name for name in _OF_GRPO if name != "beta")
_OF_ROLLOUTS = tuple(
    "epsilon epsilon_high teacher_model teacher_model_server teacher_kl_coef async_generate vllm_mode vllm_server_host "
    "vllm_server_port vllm_server_base_url reward_funcs reward_weights reward_model reward_model_plugin".split()
)


# --- stages that learn from a dataset ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Preference:
    """A preference loss.

    Attributes:
        losses: its forms; the first is the default.
        refusal: what another form is named as.
        numbers: option -> key and default.
        term: option of a supervised term, and its default.
        key: of the form.
        name: of the loss in a plan; None for its form.
        unread: options of other losses.
    """

    losses: tuple[str, ...]
    refusal: str
    numbers: Mapping[str, tuple[str, float]]
    term: tuple[str, float] = ("", 0.0)
    key: str | None = None
    name: str | None = None
    unread: tuple[str, ...] = ()


_ONE_FORM = "another form of {}'s loss than sigmoid without label smoothing"
_PREFERENCES = {
    "dpo": _Preference(
        ("sigmoid", "hinge", "ipo"),
        "the preference loss {}; sigmoid, hinge and ipo are available",
        {"beta": ("dpo_beta", 0.1), "label_smoothing": ("dpo_label_smoothing", 0.0)},
        term=("rpo_alpha", 0.0),
        key="dpo_loss_type",
        unread=("cpo_alpha",),
    ),
    "simpo": _Preference(
        ("simpo",),
        "the preference loss {}",
        {"beta": ("simpo_beta", 2.0), "label_smoothing": ("simpo_label_smoothing", 0.0)},
        term=("cpo_alpha", 1.0),
        name="simpo_sigmoid",
        unread=("rpo_alpha",),
    ),
    "cpo": _Preference(
        ("sigmoid",),
        _ONE_FORM.format("CPO"),
        {"beta": ("cpo_beta", 0.1), "cpo_alpha": ("cpo_alpha", 1.0)},
        term=("cpo_alpha", 1.0),
        name="cpo",
    ),
    "orpo": _Preference(
        ("sigmoid",),
        _ONE_FORM.format("ORPO"),
        {"beta": ("orpo_lambda", 0.1)},
        term=("per_device_train_batch_size", 1.0),
        name="orpo",
    ),
    "kto": _Preference(
        ("kto", "apo_zero_unpaired"),
        "the preference loss {}; kto and apo_zero_unpaired are available",
        {
            "beta": ("kto_beta", 0.1),
            "desirable_weight": ("kto_desirable_weight", 1.0),
            "undesirable_weight": ("kto_undesirable_weight", 1.0),
        },
        key="kto_loss_type",
    ),
}


def _describe_dataset(run: Import, command: SourceCommand, kind: str, shared: Recipe) -> Recipe:
    """Return the run of a supervised stage."""
    length = _read_length(command)
    strategy = command.text("truncation_strategy", "delete")
    if strategy != "delete" and (kind, strategy) != ("pt", "split"):
        run.refuse("--truncation_strategy", f"{strategy}: rows that are cut; delete leaves them out")
    keys: dict[str, object] = {f"{ACTOR}.seq_length": length}
    limit = "the model's limit; set the longest row where config.json is elsewhere"
    notes = {"seq_length": "" if command.has("max_length") else limit}
    unread: tuple[str, ...] = _OF_ROLLOUTS if kind == "kto" else (*_OF_ROLLOUTS, "calculate_KL")
    if command.flag("packing") and kind == "sft":
        keys |= {f"{ACTOR}.{name}": True for name in ("pack", "neat_pack", "reset_attention_mask", "reset_position_ids")}
        notes["pack"] = f"rows that preprocess --neat-pack has joined; those above {length} tokens are cut, and left out there"
    beta, loss = None, {"rm": "ranking"}.get(kind, "cross_entropy")
    if kind in _PREFERENCES:
        beta = command.number("beta", _PREFERENCES[kind].numbers["beta"][1])
        loss, values = _read_preference(run, command, kind)
        keys |= {f"{ACTOR}.{name}": value for name, value in values.items()}
        unread += _PREFERENCES[kind].unread
        notes["kto_beta"] = "the KL is of the batch of an optimizer step, there of a pass"
    elif command.flag("enable_dft_loss"):
        keys[f"{ACTOR}.sft_loss_type"] = "dft"
        if kind != "sft":
            run.refuse("--enable_dft_loss", f"in stage {_STAGES[kind]}")
    elif command.has("loss_type"):
        run.refuse("--loss_type", f"the loss {command.text('loss_type')} in stage {_STAGES[kind]}")
    return replace(
        shared,
        loss=loss,
        beta=beta,
        documents=_name_documents(command, strategy) if kind == "pt" else None,
        answer_term=_name_answer_term(command, kind),
        sequence_length=length,
        keys={**shared.keys, **keys},
        notes={**shared.notes, **notes},
        unread=(*shared.unread, *unread),
        defaults=(
            *shared.defaults,
            (f"{ACTOR}.no_pad_to_seq_lengths", True, "rows are padded to the longest of a micro-batch"),
        ),
    )


def _read_preference(run: Import, command: SourceCommand, kind: str) -> tuple[str, dict[str, object]]:
    """Return the name of a preference loss, and its keys."""
    record = _PREFERENCES[kind]
    form, *others = command.list_texts("loss_type") or [record.losses[0]]
    keys: dict[str, object] = {key: command.number(name, default) for name, (key, default) in record.numbers.items()}
    if record.key is not None:
        keys[record.key] = form
    if others or form not in record.losses:
        run.refuse("--loss_type", record.refusal.format(", ".join((form, *others))))
    elif kind in ("cpo", "orpo") and command.number("label_smoothing", 0.0):
        run.refuse("--label_smoothing", record.refusal)
    elif kind == "kto" and command.flag("calculate_KL", default=form == "kto") != (form == "kto"):
        run.refuse("--calculate_KL", f"another KL than that of --loss_type {form}")
    option, default = record.term
    term = default if kind == "orpo" else command.number(option, default) if option else 0.0
    if kind in ("dpo", "simpo") and (term or command.has(option)):
        keys["pref_ftx"] = term
    if kind == "simpo":
        keys["gamma_beta_ratio"] = command.number("simpo_gamma", 1.0) / command.number("beta", 2.0)
    if kind in ("dpo", "simpo", "kto"):
        keys["ref_model"] = command.text("ref_model") or None
    if kind in ("cpo", "orpo"):
        run.note_given("loss_type label_smoothing", f"the loss of stage {kind}", changes_nothing=False)
    elif kind == "simpo":
        run.note_given("loss_type", "the loss of stage simpo", changes_nothing=False)
    return record.name or form, keys


def _name_documents(command: SourceCommand, strategy: str) -> str:
    """Return what becomes of the documents of pretraining; here they are joined, and the text is cut into samples."""
    length = _read_length(command)
    rows = f"in packs of {length} tokens" if command.flag("packing") else "one a row"
    return f"{rows}, those above {length} tokens {'split' if strategy == 'split' else 'left out'}"


def _name_answer_term(command: SourceCommand, kind: str) -> str | None:
    """Return the average of a supervised term next to a preference loss; None where it is that of one pair."""
    option, default = _PREFERENCES[kind].term if kind in _PREFERENCES else ("", 0.0)
    has_term = kind == "orpo" or (option and command.number(option, default))
    return "mean of the tokens of a pass" if has_term and _Sizes(command).micro > 1 else None


def _read_length(command: SourceCommand) -> int:
    limit = read_shape(command.text("model")).get("max_position_embeddings")
    default = limit if isinstance(limit, int) and limit > 0 else _PROMPT_LENGTH
    return command.count("packing_length" if command.has("packing_length") else "max_length", default)


# --- stages with rollouts ---------------------------------------------------------------------------------------------


def _describe_rollout(run: Import, command: SourceCommand, shared: Recipe) -> Recipe:
    """Return what GRPO and PPO have alike: lengths, sampling, engine and rewards."""
    response, limit = command.count("max_completion_length", 512), command.get("vllm_max_model_len")
    prompt = _read_prompt_length(command)
    reason = "--vllm_max_model_len without the response"
    if command.has("max_length"):
        reason = ""
        _set_long_prompts(run, command)
    elif prompt is None:
        reason = "ms-swift has no limit here: set your longest prompt"
    length = (_PROMPT_LENGTH if prompt is None else prompt) + response
    known = length if limit is None else command.count("vllm_max_model_len", length)
    is_distilled = command.program.removeprefix(_MEGATRON) == "gkd"
    has_images = any(_IMAGES.search(name) for name in command.list_texts("dataset"))
    rewards, reward_keys = (
        (Rewards(), read_distillation(run, command, has_images=has_images)) if is_distilled else _read_rewards(run, command)
    )
    placement, engine_keys, servers = _read_engine(run, command)
    dtype = "float32" if run.get(f"{ACTOR}.bf16") is False else "bfloat16"
    turns = int(command.number("max_turns", 0)) if command.has("multi_turn_scheduler") else 0
    keys = {
        f"{SAMPLING}.max_tokens": response if command.has("max_new_tokens", "response_length") else None,
        f"{RL}.max_prompt_length": length - response,
        f"{ENGINE}.max_model_len": None if limit is None else max(known, length),
    }
    return replace(
        shared,
        temperature=command.number("temperature", 0.9),
        top_p=command.number("top_p", 1.0),
        top_k=int(command.number("top_k", -1)),
        min_p=command.number("min_p", 0.0),
        prompt_length=prompt,
        response_length=response * (turns or 1),
        infer_tp=int(command.environment.get("SWIFT_SERVER_TP", 0)) or command.count("vllm_tensor_parallel_size", 1),
        level=cast('Literal["token", "sequence", "sequence_token"]', command.text("importance_sampling_level", "token")),
        rewarding=rewards,
        placement=placement,
        keys={**shared.keys, **keys, **engine_keys, **reward_keys},
        notes={
            **shared.notes,
            "max_prompt_length": reason,
            "max_model_len": "" if known >= length else f"longest prompt and response; {known} would cut responses",
            **dict.fromkeys(("rollout_resource.num_npus", "vllm_server_host"), servers),
            "reward_funcs": "the scores of ms-swift's functions; accuracy of docs/rewards.md reads more forms of an answer",
            **dict.fromkeys(
                ("judge_url", "judge_model"),
                "the judge of docs/rewards.md, whose question is ours; judge_prompt and judge_parser take yours",
            ),
            "distillation.enabled": "the teacher's KL is in the advantage",
        },
        defaults=(
            *shared.defaults,
            *list_prompt_defaults(command),
            (f"{RL}.use_remove_padding", True, "sequences are packed without padding"),
            (f"{ENGINE}.dtype", dtype, "that of the training"),
        ),
    )


def _describe_ppo(run: Import, command: SourceCommand, shared: Recipe) -> Recipe:
    recipe = _describe_rollout(run, command, shared)
    clip, coefficient = command.number("cliprange", 0.2), command.number("kl_coef", 0.05)
    rewards, rate = recipe.rewarding, recipe.rates[0]
    critic = None if rewards is None else rewards.model
    return replace(
        recipe,
        loss="grpo",
        clip_low=clip,
        clip_high=clip,
        delta=command.maybe("delta"),
        aggregation=_name_average("bnpo", _Sizes(command)),
        kl_coef=coefficient,
        kl_estimator="k1",
        kl_place="reward",
        advantage="gae",
        gamma=command.number("gamma", 1.0),
        lam=command.number("lam", 0.95),
        value_clip=command.number("cliprange_value", 0.2),
        critic_lr=rate.peak,
        objective=Objective(loss_type="bnpo"),
        keys={**recipe.keys, f"{RL}.clip_ratio": clip},
        unread=(*recipe.unread, *_OF_GRPO, "calculate_KL"),
        defaults=(
            *recipe.defaults,
            (f"{RL}.cliprange_value", 0.2, "the default of ms-swift"),
            ("critic_config.lr", rate.peak, "policy and critic have one learning rate there"),
            *((("critic_config.load", critic, "the critic starts from the reward model"),) if critic else ()),
        ),
    )


def _describe_grpo(run: Import, command: SourceCommand, shared: Recipe) -> Recipe:
    recipe = _describe_rollout(run, command, shared)
    form = command.text("loss_type", "grpo")
    if form not in _LOSSES:
        run.refuse("--loss_type", f"the policy loss {form}; available are {', '.join(_LOSSES)}")
    loss_type, loss, _ = _LOSSES.get(form, _LOSSES["grpo"])
    low = command.number("epsilon", 0.2)
    high, clips = command.number("epsilon_high", low), form not in ("sapo", "real")
    estimator, scale = _read_estimator(command)
    beta, in_reward = command.number("beta", 0.04), _has_kl_in_reward(command)
    mode = CORRECTIONS.get(command.get("rollout_importance_sampling_mode"))
    refusals = {
        "--scale_rewards": (
            estimator == "rloo" and scale != "none",
            f"RLOO advantages that are divided by the spread of the {scale}",
        ),
        "--advantage_estimator": (
            estimator == "reinforce_plus_plus" and scale == "batch",
            "REINFORCE++ whose centred rewards are divided by their own spread over the batch",
        ),
        "--loss_type": (
            form == "real" and beta and not in_reward,
            "the loss real next to a KL that is averaged over tokens; it is available with --beta 0",
        ),
        "--kl_in_reward": (
            beta and in_reward and estimator != "rloo",
            "a KL that enters a reward which is then divided by a spread",
        ),
        "--rollout_importance_sampling_mode": (
            beta and not in_reward and mode is not None,
            "a correction that weighs the KL too; it is available with --beta 0",
        ),
    }
    for option, (is_met, feature) in refusals.items():
        if is_met:
            run.refuse(option, feature)
    if not beta:
        run.note_given("kl_in_reward", "there is no KL")
    has_scale = estimator != "rloo" and scale != "gdpo"
    return replace(
        recipe,
        loss=loss,
        clip_low=low if clips and form != "cispo" else None,
        clip_high=high if clips else None,
        delta=command.maybe("delta"),
        aggregation=_name_average(form, _Sizes(command)),
        kl_coef=beta,
        kl_estimator="k1" if in_reward else "k3",
        kl_place="reward" if in_reward else "loss",
        advantage="gdpo" if scale == "gdpo" else "rloo" if estimator == "rloo" else "group_norm",
        advantage_scale=scale if has_scale else None,
        importance_sampling=f"{mode} {command.number('rollout_importance_sampling_threshold', 2.0):g}" if mode else None,
        objective=Objective(
            loss_type=loss_type,
            clip=(low, high) if clips else None,
            epsilon=1e-4 if has_scale else 1e-8 if scale == "gdpo" else None,
        ),
        keys={**recipe.keys, f"{RL}.integrated_mode_config.ref_model_load_path": command.text("ref_model") or None},
        notes={
            **recipe.notes,
            "loss_type": "averaged over an optimizer step",
            "adv_epsilon": "ms-swift adds it to the standard deviation",
        },
        unread=(*recipe.unread, *_OF_PPO, "calculate_KL"),
    )


def _describe_gkd(run: Import, command: SourceCommand, shared: Recipe) -> Recipe:
    """Return the run of on-policy distillation; nothing but the divergence from the teacher trains."""
    recipe = _describe_rollout(run, command, shared)
    return replace(
        recipe,
        level=None,
        aggregation="token of a micro-batch",
        advantage_scale="none",
        divergence=name_divergence_of(command),
        objective=Objective(loss_type="bnpo"),
        notes={
            **recipe.notes,
            "loss_type": "the average over tokens",
            "distillation.topk": "" if command.has("gkd_logits_topk") else "the most probable tokens; all of them there",
        },
        unread=(*recipe.unread, *_OF_PPO, *_OF_GRPO_ALONE, "calculate_KL"),
    )


def _read_estimator(command: SourceCommand) -> tuple[str, str]:
    """Return estimator and spread, with the default that follows from the estimator."""
    estimator = command.text("advantage_estimator", "grpo")
    if command.text("loss_type", "grpo") == "real" and estimator == "grpo":
        return estimator, "none"  # ms-swift sets it, whatever the command has
    default = {"grpo": "group", "rloo": "none", "reinforce_plus_plus": "batch"}.get(estimator)
    if default is None:
        raise ConfigError([f"--advantage_estimator {estimator}: not available here"])
    scale = command.options.get("scale_rewards", default)
    has_rewards = command.has("reward_funcs", "reward_model") or _has_environment(command)
    is_alone = command.has("teacher_model", "teacher_model_server") and not has_rewards
    if estimator == "grpo" and is_alone and command.count("num_generations", 8) == 1:
        scale = "none"  # rewards of 0, which no spread changes, and a group of one has none
    # it was true or false before, and none is no value elsewhere
    return estimator, {True: "group", False: "none", None: "none"}.get(cast("bool | None", scale), str(scale))


def _has_environment(command: SourceCommand) -> bool:
    return command.flag("use_gym_env", default=command.has("gym_env"))


def _has_kl_in_reward(command: SourceCommand) -> bool:
    return command.flag("kl_in_reward", default=command.text("advantage_estimator", "grpo") != "grpo")


def _name_average(form: str, sizes: _Sizes) -> str:
    """Return what the losses of a step are averaged over; Megatron-SWIFT divides once, transformers each pass or rollout."""
    average = _LOSSES[form][2] if form in _LOSSES else ""
    if sizes.is_megatron or average != "token":
        return average
    if form == "bnpo":
        return "token of a micro-batch"
    return "token" if sizes.steps == sizes.iterations else "token of the rollout"


def _read_rewards(run: Import, command: SourceCommand) -> tuple[Rewards, dict[str, object]]:
    """Return what scores, and the keys of a judge or teacher."""
    names, models = command.list_texts("reward_funcs"), command.list_texts("reward_model")
    value = command.get("reward_weights")
    weights = value if isinstance(value, list) else [] if value is None else [value]
    if not names and not models and not command.has("gym_env", "use_gym_env", "teacher_model", "teacher_model_server"):
        raise ConfigError(["the command names no reward: --reward_funcs and --reward_model are missing"])
    keys = read_policy_teacher(run, command, has_rewards=bool(names or models) or _has_environment(command))
    if weights and len(weights) != len(names) + len(models):
        raise ConfigError([f"--reward_weights has {len(weights)} values for {len(names) + len(models)} rewards"])
    weights = weights or [1.0] * (len(names) + len(models))
    for name in names:
        if name not in _FUNCTIONS and not command.has("external_plugins"):
            form = "ms-swift's reward function of this name, and no file in --external_plugins has it"
            run.refuse(f"--reward_funcs {name}", form)
    plugins = command.list_texts("reward_model_plugin")
    for plugin in plugins:
        if plugin not in ("genrm", "default"):
            form = "code of a plug-in around a reward model; a reward function can call it"
            run.refuse(f"--reward_model_plugin {plugin}", form)
    judges = [place for place, plugin in enumerate(plugins) if plugin == "genrm"]
    others = [place for place in range(len(models)) if place not in judges]
    if len(others) > 1:
        run.refuse(f"--reward_model {' '.join(models)}", "several reward models")
    if judges:
        if judges[0] >= len(models):
            raise ConfigError(["--reward_model_plugin names a judge, but --reward_model has no model for it"])
        # without an address the run serves it, on the devices that the policy has too
        keys[f"{RL}.judge_url"] = run.settings.variables.get("JUDGE_URL")
        keys[f"{RL}.judge_model"] = models[judges[0]]
        keys[f"{RL}.judge_weight"] = weights[len(names) + judges[0]]
    if names:
        run.add_default(f"{ACTOR}.dataset_additional_keys", ["labels"], "the reference answers")
    rewards = Rewards(
        functions=[_FUNCTIONS.get(name, name) for name in names],
        weights=weights[: len(names)],
        model=models[others[0]] if others else None,
        model_weight=weights[len(names) + others[0]] if others else None,
    )
    return rewards, keys


def _read_engine(run: Import, command: SourceCommand) -> tuple[Placement, dict[str, object], str]:
    """Return devices, keys of servers, and a note about them."""
    keys: dict[str, object] = {}
    names_server = command.has("vllm_server_host", "vllm_server_base_url")
    is_server = command.text("vllm_mode", "server" if names_server else "") == "server"
    is_async = command.flag("async_generate")
    servers, rollout = int(read_variable(command.environment, "SWIFT_SERVERS", "0") or 0), _count_own_devices(command)
    if names_server and not is_server:
        run.refuse("--vllm_mode", f"{command.text('vllm_mode')} next to the address of a server; write one of them")
    note = "the servers of the script are the run's own" if servers else "standalone servers: mindspeed-rl rollout"
    if is_server and servers:
        tensor, replicas = (int(command.environment[name]) for name in ("SWIFT_SERVER_TP", "SWIFT_SERVER_DP"))
        rollout = servers * tensor * replicas
        keys[f"{ENGINE}.infer_tensor_parallel_size"] = tensor
    elif is_server:
        urls = [urlsplit(url if "//" in url else f"//{url}") for url in command.list_texts("vllm_server_base_url")]
        hosts = command.list_texts("vllm_server_host") or [url.hostname for url in urls]
        port = command.get("vllm_server_port") or [url.port or 8000 for url in urls] or 8000
        keys[f"{ENGINE}.vllm_server_host"] = hosts[0] if len(hosts) == 1 else hosts
        keys[f"{ENGINE}.vllm_server_port"] = port[0] if isinstance(port, list) and len(port) == 1 else port
    if is_async and not is_server and rollout is None:
        run.refuse("--async_generate", "generation ahead of the update needs servers: --vllm_mode server")
    if command.has("use_gym_env", "gym_env"):
        _read_environment(run, command)
    if command.has("multi_turn_scheduler"):
        _read_turns(run, command)
    if rollout is not None and not is_server:
        note = "the rollout has devices of its own, next to those that train"
    runs_ahead = is_async and (is_server or rollout is not None)
    return Placement(actor=command.devices, rollout=rollout, mode="one_step_off" if runs_ahead else None), keys, note


def _count_own_devices(command: SourceCommand) -> int | None:
    """Return the devices that generate alone: those of a group under Ray, or of engines besides the training processes.

    Releases before 3.5 have --num_infer_workers engines; as many as training processes share their devices.
    """
    if (own := command.environment.get(_RAY_GROUPS["rollout"])) is not None:
        return read_count("gpus of the group rollout", read_scalar(own))
    engines = command.get("num_infer_workers")
    if engines is None or engines == command.devices:
        return None
    return command.count("num_infer_workers", 1) * command.count("vllm_tensor_parallel_size", 1)


def _read_turns(run: Import, command: SourceCommand) -> None:
    """Set the scheduler of several turns, and the length of all turns."""
    name, option = command.text("multi_turn_scheduler"), "--multi_turn_scheduler"
    if name == "gym_scheduler" and command.has("gym_env"):
        run.translate(option, {f"{RL}.multi_turn_enable": True}, "see --gym_env")
    elif name in _SCHEDULERS:
        keys = {f"{RL}.multi_turn_scheduler": _SCHEDULERS[name], f"{RL}.multi_turn_enable": True}
        run.translate(option, keys, "ms-swift's scheduler of this name")
        run.add_default(f"{ACTOR}.dataset_additional_keys", ["labels"], "the answer by which it goes on")
    elif ":" not in name and not command.has("external_plugins"):
        known = ", ".join(_SCHEDULERS)
        run.refuse(option, f"ms-swift's scheduler {name}; {known} is available, and your own is a class in --external_plugins")
    else:
        run.translate(option, {f"{RL}.multi_turn_scheduler": name, f"{RL}.multi_turn_enable": True})
    response = command.count("max_completion_length", 512)
    total = response * max(1, int(command.number("max_turns", 0)))
    run.add_default(f"{RL}.max_total_response_length", total, "all turns")


def _read_environment(run: Import, command: SourceCommand) -> None:
    """Set the environment of a plug-in file, whose rewards are those of the run."""
    scheduler, name = command.text("multi_turn_scheduler"), command.text("gym_env")
    is_on = command.flag("use_gym_env", default=bool(name))
    if is_on and (scheduler != "gym_scheduler" or not name or not command.has("external_plugins")):
        run.refuse("--use_gym_env", "an environment without a name in --gym_env, a file in --external_plugins or gym_scheduler")
    elif is_on:
        run.put("gym_env use_gym_env", {f"{RL}.environment": name}, "the sum of its rewards is the reward")
    run.note_given("use_gym_env gym_env", "see --gym_env" if is_on else "off", changes_nothing=False)


def _set_long_prompts(run: Import, command: SourceCommand) -> None:
    """Set what becomes of prompts of more than max_length tokens."""
    # GKD leaves them out unless it says otherwise
    default = "delete" if command.program.removeprefix(_MEGATRON) == "gkd" else "left"
    strategy = command.text("truncation_strategy", default)
    if strategy not in ("left", "delete"):
        run.refuse("--truncation_strategy", f"{strategy}; rollouts have left and delete")
    kind, note = ("cut_left", "the last tokens; rows with images are left out") if strategy == "left" else ("drop_longer", "")
    run.put("truncation_strategy", {f"{RL}.long_prompts": kind}, note)


def _read_prompt_length(command: SourceCommand) -> int | None:
    """Return the longest prompt: max_length, else what vllm_max_model_len leaves; None where neither is there."""
    if command.get("max_length") is not None:
        return command.count("max_length", 1)
    limit = command.get("vllm_max_model_len")
    rest = 0 if limit is None else command.count("vllm_max_model_len", 1) - command.count("max_completion_length", 512)
    return rest if rest > 0 else None


# --- after the run file has been written ------------------------------------------------------------------------------


def _finish(run: Import, command: SourceCommand) -> None:
    """Start from the adapters of the command, and name the folder of the run."""
    kind = command.program.removeprefix(_MEGATRON)
    if kind in _SERVING:
        return
    adapters = command.list_texts("adapters")
    model = run.get(f"{ACTOR}.load") or next(iter(adapters), None)
    if model is None:
        raise ConfigError(["the command names no model: --model is missing"])
    _start_from_adapters(run, command, adapters)
    folder = f"{'megatron_output' if command.program.startswith(_MEGATRON) else 'output'}/{Path(str(model)).name}"
    run.add_default("run_dir", folder, "ms-swift's folder of the model")
    run.add_default(f"{ACTOR}.save", f"{run.get('run_dir')}/checkpoints", "ms-swift always saves")


def _start_from_adapters(run: Import, command: SourceCommand, adapters: list[str]) -> None:
    """Start from the adapters of the command; the reference is the model without them, or has adapters of its own."""
    references = command.list_texts("ref_adapters")
    for option, folders in (("--adapters", adapters), ("--ref_adapters", references)):
        if len(folders) > 1:
            run.refuse(option, "several adapters at once; merge all but one first")
        elif folders and _read_tuner(command) == "full":
            run.refuse(option, "adapters next to --tuner_type full, which trains all weights")
    if references and not adapters:
        run.refuse("--ref_adapters", "adapters of the reference alone; write ref_config.load and ref_config.base_model")
    if adapters and not {"--adapters", "--ref_adapters"} & run.refused.keys():
        start_from_adapter(run, "--adapters", adapters[0], references[0] if references else None)
        if references:
            run.translated["--ref_adapters"] = "the reference: see --adapters"


def _write_serving(run: Import, command: SourceCommand, kind: str) -> None:
    """Set the engine of a command that serves or generates; the command to run is printed."""
    _read_agent_template(run, command)
    if command.text("infer_backend", "vllm") != "vllm":
        run.note("--infer_backend", "the engine is vLLM", changes_nothing=False)
        run.refused.pop("--infer_backend", None)
    tensor, model = command.count("vllm_tensor_parallel_size", 1), command.text("model")
    if not model:
        raise ConfigError(["the command names no model: --model is missing"])
    words: list[str] = []
    for name, option in (("host", "host"), ("port", "port"), ("served_model_name", "served-model-name")):
        if command.has(name) and kind != "infer":
            words += [f"--{option}", command.text(name)]
            run.note(f"--{name}", f"--{option} of the printed command", changes_nothing=False)
    run.set(f"{ENGINE}.infer_tensor_parallel_size", tensor)
    for name, key in (("vllm_max_model_len", f"{ENGINE}.max_model_len"), ("max_length", f"{ENGINE}.max_model_len")):
        if command.has(name):
            run.translate(f"--{name}", {key: command.count(name, 2048)})
    for name in ("max_new_tokens", "val_dataset", "multi_turn_scheduler", "external_plugins", "split_dataset_ratio", "gym_env"):
        if command.has(name):
            run.refused.pop(f"--{name}", None)
            run.note(f"--{name}", "an option of the run, or of each request, not of the engine")
    if kind == "infer":
        if command.has("vllm_speculative_config"):
            run.refuse("--vllm_speculative_config", "speculative decoding outside of rollouts")
        words = [model]
        for name, option in (("max_new_tokens", "max-new-tokens"), ("temperature", "temperature"), ("val_dataset", "input")):
            if command.has(name):
                words += [f"--{option}", command.text(name)]
        for adapter in command.list_texts("adapters"):
            words += ["--lora-load", adapter]
            run.note("--adapters", "--lora-load of the printed command", changes_nothing=False)
        run.next_command = f"{_SERVING[kind]} {' '.join(words)} --tensor-parallel-size {tensor} --hf-chat-template  #"
    else:
        if command.has("adapters"):
            run.refuse("--adapters", "a server that starts with adapters; the run sends it their weights")
        run.next_command = f"mindspeed-rl rollout --model {model} {' '.join(words)} --config-name".replace("  ", " ")


PROJECT = SourceProject("swift", "ms-swift", "4.6.0", _TABLES, _read, _describe, _finish)
