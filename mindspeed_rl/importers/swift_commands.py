"""Commands of ms-swift as they are read: programs, launchers, files of options, and the command of a script that trains."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import Option, SourceCommand, no_effect, part, read_count, read_scalar, to
from mindspeed_rl.importers.recipe import ACTOR
from mindspeed_rl.importers.shell import Command, list_unknown, read_flags, read_variable
from mindspeed_rl.importers.source_files import require_file
from mindspeed_rl.importers.swift_options import OPTIONS, SERVING_OPTIONS, SUPERVISED_OPTIONS
from mindspeed_rl.importers.swift_plugins import give_rows
from mindspeed_rl.importers.translators import ALL_DEVICES, count_accelerated, join_words, read_option_file

#: program -> stage here; others only generate
STAGES = {
    "grpo": "ray_grpo", "ppo": "ray_ppo", "dpo": "dpo", "simpo": "simpo", "cpo": "cpo", "orpo": "orpo", "kto": "kto",
    "rm": "orm", "sft": "sft", "pt": "pretrain", "gkd": "ray_grpo",
}  # fmt: skip
#: kinds whose responses are sampled
WITH_ROLLOUTS = ("grpo", "ppo", "gkd")
#: kinds that read pairs of answers
PAIRS = ("dpo", "simpo", "cpo", "orpo", "rm")
MEGATRON = "megatron "
SERVING = {
    "rollout": "mindspeed-rl rollout --config-name",
    "deploy": "mindspeed-rl rollout --config-name",
    "infer": "mindspeed-rl generate --load",
}
#: programs that train nothing and serve nothing
OTHER_PROGRAMS = {
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
    "eval_interval": "eval_steps", "max_epochs": "num_train_epochs", "multi_turn_func": "multi_turn_scheduler",
}  # fmt: skip
_BY_STAGE = {name: OPTIONS if name in WITH_ROLLOUTS else SUPERVISED_OPTIONS for name in STAGES}
#: options of earlier releases, which its guides still name
_RETIRED: dict[str, Option] = {
    "vllm_device": no_effect("the rollout shares the actor's devices, or has rl_config.rollout_resource", "auto"),
    "num_infer_workers": part(
        "rollout_resource.num_npus use_integrated_worker", off="as many engines as training processes share their devices"
    ),
    "moe_router_bias_update_rate": to(f"{ACTOR}.moe_router_bias_update_rate"),
    "gc_collect_after_offload": no_effect("memory that is freed is always returned to the device"),
}
TABLES = {
    **_BY_STAGE,
    **{f"{MEGATRON}{name}": table for name, table in _BY_STAGE.items()},
    **dict.fromkeys(SERVING, SERVING_OPTIONS),
}


def choose_command(commands: list[Command], devices: int | None) -> SourceCommand:
    """Return the training command of a script, else the one that serves or generates."""
    pairs = [(command, item) for command in commands if (item := _read_command(command)) is not None]
    others = [item for _, item in pairs if item.program in OTHER_PROGRAMS]
    found = [pair for pair in pairs if pair[1].program not in OTHER_PROGRAMS]
    training = [item for item in found if item[1].program not in SERVING]
    if others and not training:
        raise ConfigError([f"{' '.join(others[0].trailing)}: {OTHER_PROGRAMS[others[0].program]}"])
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
        environment |= {OTHERS: " ".join(dict.fromkeys(item.program for item in others))}
    if servers:
        # environment and turns of a server belong to its run
        options = {name: value for name, value in servers[0].items() if name in _OF_TURNS} | options
        # the servers of the script belong to the run
        environment |= {"SWIFT_SERVERS": str(len(servers))}
        environment |= {"SWIFT_SERVER_TP": str(servers[0].get("vllm_tensor_parallel_size", 1))}
        environment |= {"SWIFT_SERVER_DP": str(servers[0].get("vllm_data_parallel_size", 1))}
    return replace(parsed, options=options, environment=environment, devices=devices or parsed.devices)


#: options of a server that belong to the run whose server it is
_OF_TURNS = ("multi_turn_scheduler", "max_turns", "gym_env", "use_gym_env", "external_plugins")
#: variable with the programs of a script that neither train nor serve
OTHERS = "SWIFT_OTHERS"
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
    flags, trailing = read_flags(words, has_blanks=True)
    if (name := program.removeprefix(MEGATRON)) in OTHER_PROGRAMS:
        own = {option: _read_value(value) for option, value in flags.items()}
        launcher = "megatron" if program.startswith(MEGATRON) else "swift"
        return SourceCommand(name, own, trailing=(launcher, name))
    values = {name: _read_value(value) for name, value in flags.items()}
    files = [word for word in trailing if Path(word).suffix in (".yaml", ".yml", ".json")]
    environment = dict(command.environment)
    for file in [*files, *([str(values.pop("config"))] if "config" in values else [])]:
        content = _read_options(require_file(command, "--config", file), environment)
        values = content | values
    options = {_EARLIER.get(name, name): value for name, value in values.items()}
    if "log_interval" in options and program not in SERVING:
        options["logging_steps"] = options.pop("log_interval")
    if program.endswith("rlhf"):
        kind = str(options.get("rlhf_type", "dpo"))
        program = program.replace("rlhf", kind)
    if program.removeprefix(MEGATRON) not in {*STAGES, *SERVING}:
        raise ConfigError([f"the command trains {program!r}; available are {', '.join((*STAGES, *SERVING))}"])
    table = _RETIRED | TABLES[program]
    if program in SERVING:
        # earlier releases had the engine's options without vllm_ in front
        options = {f"vllm_{name}" if name not in table and f"vllm_{name}" in table else name: options[name] for name in options}
    else:
        options = give_rows(command, options)
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
        if name in ("rlhf", "sft", "pt", *SERVING, *OTHER_PROGRAMS):
            return (MEGATRON if before == "megatron" else "") + name, words[place + 1 :]
    return "", ()


#: group of a run under Ray -> variables that its devices become
RAY_GROUPS = {"train": "RAY_TRAIN_DEVICES", "rollout": "RAY_ROLLOUT_DEVICES"}


def _read_options(path: Path, environment: dict[str, str]) -> dict[str, object]:
    """Return the options of a file of ms-swift.

    Groups of a run under Ray are options of all its programs, and other mappings texts in JSON, as the command has them.

    Args:
        environment: variables of the command, which win; takes the variables of the file's ENV.

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
        environment[RAY_GROUPS["train"]] = str(count)
    elif groups is not None:
        feature = f"device_groups {groups}: not available here: devices by their ranks; take the group out, and write --devices"
        raise ConfigError([f"{path}: {feature}"])
    for name, value in content.items():
        if name in RAY_GROUPS and isinstance(value, Mapping):
            own = {str(key): item for key, item in value.items()}
            environment[RAY_GROUPS[name]] = str(own.pop("gpus", 0))
            options |= own
        elif isinstance(value, Mapping) and "gpus" in value:
            raise ConfigError([f"{path}: the group {name}: not available here: devices of this role under Ray"])
        else:
            options[name] = json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else value
    if any({"train", "rollout"} <= set(group) for group in roles):
        environment.pop(RAY_GROUPS["rollout"], None)
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
    if (own := environment.get(RAY_GROUPS["train"])) is not None:
        return read_count("gpus of the group train", read_scalar(own))
    flags, _ = read_flags(launcher)
    visible = read_variable(environment, "ASCEND_RT_VISIBLE_DEVICES") or read_variable(environment, "CUDA_VISIBLE_DEVICES")
    is_accelerated = any(Path(word).name == "accelerate" for word in launcher)
    if is_accelerated and (count := count_accelerated(command, join_words(flags))) is not None:
        return count
    if is_accelerated and not visible:
        raise ConfigError([ALL_DEVICES])
    if is_accelerated or program in SERVING:
        per_node = None if is_accelerated else read_variable(environment, "NPROC_PER_NODE")
        per_node = per_node or str(len([item for item in (visible or "").split(",") if item.strip()]) or 1)
    else:
        per_node = read_variable(environment, "NPROC_PER_NODE") or next(iter(flags.get("nproc_per_node", [])), "1")
    nodes = read_variable(environment, "NNODES") or next(iter(flags.get("nnodes", [])), "1")
    if not (per_node.isdigit() and nodes.isdigit() and int(per_node) and int(nodes)):
        raise ConfigError([f"NPROC_PER_NODE={per_node} and NNODES={nodes} must be whole numbers; --devices sets their product"])
    return int(per_node) * int(nodes)
