"""GRPO command lines of ms-swift and Megatron-SWIFT as run files."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from mindspeed_rl.config.compat.legacy_importer import (
    RECOMPUTE_LAYERS,
    Import,
    find_lora_targets,
    read_count,
    read_scalar,
    split_command,
)
from mindspeed_rl.config.errors import ConfigError

ACTOR, RL, _SAMPLING = "megatron_training", "rl_config", "generate_config.sampling_config"

#: key -> the default of ms-swift's option, where it differs from ours
_DEFAULTS: dict[str, object] = {
    "rl_config.init_kl_coef": 0.04,
    "rl_config.loss_type": "grpo",
    "rl_config.adv_epsilon": 1e-4,
    "rl_config.max_prompt_length": 2048,
    "generate_config.sampling_config.max_tokens": 512,
    "generate_config.sampling_config.temperature": 0.9,
    "generate_config.sampling_config.top_k": -1,
    "generate_config.gpu_memory_utilization": 0.9,
    "generate_config.enable_prefix_caching": True,
    "megatron_training.lr_decay_style": "cosine",
    "megatron_training.clip_grad": 1.0,
    "megatron_training.weight_decay": 0.1,
}

#: dataset -> key of megatron_training.map_keys -> the column that ms-swift takes from it
_DATASET_COLUMNS: dict[str, dict[str, str]] = {
    "AI-MO/NuminaMath-TIR": {"prompt": "problem", "response": "solution", "query": ""},
}
#: options of which each is the same number of optimizer steps as the key is of iterations
_STEPS = {
    "max_steps": "train_iters",
    "train_iters": "train_iters",
    "save_steps": "save_interval",
    "save_interval": "save_interval",
    "eval_steps": "eval_interval",
    "eval_interval": "eval_interval",
}


class _Command:
    """The parts of a command line.

    Attributes:
        environment: NAME=value in front of the command.
        options: name without dashes, hyphens as underscores -> its values as text; the last one wins.
        is_megatron: `megatron rlhf`, whose batch sizes have Megatron's names.
    """

    def __init__(self, command: str) -> None:
        words = split_command(command)
        self.environment: dict[str, str] = {}
        while words and "=" in words[0] and not words[0].startswith("-"):
            name, _, value = words.pop(0).partition("=")
            self.environment[name] = value
        program: list[str] = []
        while words and not words[0].startswith("-"):
            program.append(words.pop(0))
        self.is_megatron = bool(program) and Path(program[0]).name == "megatron"
        if program and program[-1] != "rlhf":
            raise ConfigError(
                [f"the command is {' '.join(program)!r}, but only 'swift rlhf' and 'megatron rlhf' train with GRPO"]
            )
        self.options: dict[str, list[str]] = {}
        name = ""
        for word in words:
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
                name = name.replace("-", "_")
                self.options[name] = [value] if equals else []
            elif word.strip() and not name:
                raise ConfigError([f"{word!r} of the command line follows no --option"])
            elif word.strip():
                self.options[name].append(word)
        if not self.options:
            raise ConfigError(["the command line has no --options"])

    def read(self, name: str, default: object = None) -> object:
        """Return the first value of an option; one without a value is true."""
        values = self.options.get(name)
        return default if values is None else True if not values else read_scalar(values[0])

    def read_count(self, name: str, default: int) -> int:
        """Return the value of an option that counts something."""
        return read_count(f"--{name}", self.read(name, default))

    def count_devices(self) -> int:
        """Return the processes that train: NPROC_PER_NODE on NNODES, else the visible devices, else 1."""
        per_node = self.environment.get("NPROC_PER_NODE")
        if per_node is None:
            visible = self.environment.get("ASCEND_RT_VISIBLE_DEVICES") or self.environment.get("CUDA_VISIBLE_DEVICES") or ""
            per_node = str(len([item for item in visible.split(",") if item.strip()]) or 1)
        nodes = self.environment.get("NNODES", "1")
        if not (per_node.isdigit() and nodes.isdigit()):
            raise ConfigError([f"NPROC_PER_NODE={per_node} and NNODES={nodes} must be whole numbers"])
        return int(per_node) * int(nodes)


def from_swift(command: str, rewards: Collection[str], num_devices: int | None = None) -> Import:
    """Return the run file of a command line.

    Args:
        command: `NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model ...`, over several lines or on one.
        rewards: names of the reward functions that exist.
        num_devices: the number of devices, where the environment in front of the command does not set it.

    Raises:
        ConfigError: the command does not train with GRPO, or a value does not fit.
    """
    parsed, run = _Command(command), Import("ms-swift")
    if (kind := parsed.read("rlhf_type", "grpo")) != "grpo":
        raise ConfigError([f"--rlhf_type is {kind!r}, but only grpo can be imported"])
    run.translate("--rlhf_type", {f"{ACTOR}.stage": "ray_grpo"})
    _translate_sizes(parsed, run, num_devices or parsed.count_devices())
    _translate_adapters(parsed, run)
    _translate_rewards(parsed, run, rewards)
    for name, words in parsed.options.items():
        option, value = f"--{name}", parsed.read(name) if len(words) < 2 else [read_scalar(word) for word in words]
        if name in _BY_OTHERS:
            continue
        if name in _KEYS:
            run.translate(option, {_KEYS[name]: value})
        elif name in _SPECIAL:
            _SPECIAL[name](run, option, parsed.read(name), words)
        elif not run.translate_by_name(name, value):
            run.omit_unknown(name)
        for table in (run.translated, run.omitted):
            if name in table:
                table[option] = table.pop(name)
    if run.get(f"{RL}.clip_ratio_high") is not None:
        low = parsed.read("epsilon", 0.2)
        values = {f"{RL}.clip_higher_enable": True, f"{RL}.clip_ratio_low": low}
        run.translate("--epsilon", values, "with --epsilon_high")
    elif "epsilon" in parsed.options:
        run.translate("--epsilon", {f"{RL}.clip_ratio": parsed.read("epsilon")})
    for path, default in _DEFAULTS.items():
        run.add_default(path, default, "the default of ms-swift")
    run.add_default(f"{ACTOR}.lr", 1e-4 if run.get(f"{ACTOR}.lora_target_modules") else 1e-5, "the default of ms-swift")
    run.add_default(f"{RL}.use_remove_padding", True, "sequences are packed without padding")
    prompt, response = run.get(f"{RL}.max_prompt_length"), run.get(f"{_SAMPLING}.max_tokens")
    length = read_count("--max_length", prompt) + read_count("--max_completion_length", response)
    limit = run.get("generate_config.max_model_len")
    if isinstance(limit, int) and limit < length:
        run.set("generate_config.max_model_len", length)
        run.added["generate_config.max_model_len"] = f"{length}: longest prompt and response; {limit} would cut them"
    return run.satisfy_rules()


def _translate_sizes(parsed: _Command, run: Import, world: int) -> None:
    """Set devices and batch sizes; ms-swift counts completions, our prompt-level keys count prompts.

    Megatron-SWIFT's rules hold for its commands, so that those keep their counts of completions.
    """
    run.translate("NPROC_PER_NODE", {f"{RL}.actor_resource.num_npus": world}, "training and rollout share these devices")
    group_size = parsed.read_count("num_generations", 8)
    if parsed.is_megatron:
        micro, step = parsed.read_count("micro_batch_size", 1), parsed.read_count("global_batch_size", 16)
        run.translate("--micro_batch_size", {f"{ACTOR}.micro_batch_size": micro})
        rollout_steps = parsed.read_count("steps_per_generation", 1)
    else:
        # these steps are forward passes, as in TRL, and by default as many as one optimizer step has
        micro = parsed.read_count("per_device_train_batch_size", 1)
        accumulated = parsed.read_count("gradient_accumulation_steps", 1)
        step = micro * accumulated * world
        run.translate("--per_device_train_batch_size", {f"{ACTOR}.micro_batch_size": micro})
        rollout_steps = max(1, parsed.read_count("steps_per_generation", accumulated) // accumulated)
    if "generation_batch_size" in parsed.options:
        rollout_steps = max(1, parsed.read_count("generation_batch_size", step) // step)
    if parsed.is_megatron or step % group_size:
        run.translate("--num_generations", {f"{RL}.num_generations": group_size})
        run.set(f"{ACTOR}.global_batch_size", step)
        run.set(f"{RL}.steps_per_generation", rollout_steps)
        sizes = f"global_batch_size: {step}, steps_per_generation: {rollout_steps}"
    else:
        run.translate("--num_generations", {f"{RL}.n_samples_per_prompt": group_size})
        run.set(f"{RL}.mini_batch_size", step // group_size)
        run.set(f"{ACTOR}.global_batch_size", step // group_size * rollout_steps)
        sizes = f"mini_batch_size: {step // group_size}, global_batch_size: {step // group_size * rollout_steps}, in prompts"
    for name in ("gradient_accumulation_steps", "global_batch_size", "steps_per_generation", "generation_batch_size"):
        if name in parsed.options:
            run.translated[f"--{name}"] = f"{sizes} ({step} completions of an optimizer step on {world} devices)"
    # their steps are optimizer steps, our iterations are rollouts
    steps = rollout_steps * parsed.read_count("num_iterations", 1)
    for name, key in _STEPS.items():
        if name in parsed.options:
            count = parsed.read_count(name, 1)
            note = "" if steps == 1 else f"{count} optimizer steps, {steps} of them a rollout"
            run.translate(f"--{name}", {f"{ACTOR}.{key}": -(-count // steps)}, note)


def _translate_adapters(parsed: _Command, run: Import) -> None:
    """Set LoRA or all weights; LoRA is the default of ms-swift."""
    name = next((name for name in ("train_type", "tuner_type") if name in parsed.options), "train_type")
    kind = parsed.read(name, "full" if parsed.is_megatron else "lora")
    if kind not in ("lora", "full"):
        raise ConfigError([f"--{name} is {kind!r}, but must be lora or full"])
    if kind == "full":
        if name in parsed.options:
            run.translated[f"--{name}"] = "full: all weights train, as they do without lora_target_modules"
        return
    modules = parsed.options.get("target_modules", ["all-linear"])
    targets = find_lora_targets(modules)
    if not targets:
        raise ConfigError([f"--target_modules {' '.join(modules)}: none of them is a projection of attention or MLP"])
    run.translate("--target_modules", {f"{ACTOR}.lora_target_modules": targets})
    run.translated[f"--{name}"] = "lora: lora_target_modules switches it on"
    run.add_default(f"{ACTOR}.lora_alpha", parsed.read("lora_alpha", 32), "--lora_alpha, or the default of ms-swift")


def _translate_rewards(parsed: _Command, run: Import, known: Collection[str]) -> None:
    names = parsed.options.get("reward_funcs", [])
    taken = [name for name in names if name in known]
    weights = [read_scalar(word) for word in parsed.options.get("reward_weights", [])]
    has_model = "reward_model" in parsed.options
    if weights and len(weights) != len(names) + has_model:
        raise ConfigError([f"--reward_weights has {len(weights)} values for {len(names) + has_model} rewards"])
    if taken:
        run.translate("--reward_funcs", {f"{RL}.reward_funcs": taken})
        if taken_weights := [weight for name, weight in zip(names, weights) if name in known]:
            run.translate("--reward_weights", {f"{RL}.reward_weights": taken_weights})
    elif has_model:
        run.set(f"{RL}.rule_reward", False)
    for name in names:
        if name not in known:
            run.omitted[f"--reward_funcs {name}"] = (
                "no reward function of this name; your own function goes into external_plugins, see docs/rewards.md"
            )
    if has_model:
        run.translate("--reward_model", {f"{RL}.reward_model": parsed.read("reward_model")})
        if weights:
            run.set(f"{RL}.reward_model_weight", weights[-1])
    if "external_plugins" in parsed.options:
        run.omitted["--external_plugins"] = "plug-ins of ms-swift have another form; docs/rewards.md shows ours"


# --- options that more than a name separates from a key ---------------------------------------------------------------


def _translate_model(run: Import, option: str, value: object, words: list[str]) -> None:
    note = "" if Path(str(value)).expanduser().exists() else f"a folder: hf download {value} --local-dir {value}"
    values = {f"{ACTOR}.load": value, f"{ACTOR}.tokenizer_name_or_path": value, f"{ACTOR}.finetune": True}
    run.translate(option, values, note)


def _translate_dataset(run: Import, option: str, value: object, words: list[str]) -> None:
    key = "eval_data_path" if option == "--val_dataset" else "data_path"
    if len(words) != 1:
        run.omitted[f"{option} {' '.join(words[1:])}"] = "prompts come from one source; put the files together"
    name, _, count = words[0].partition("#")
    if name.count("/") == 1 and not Path(name).exists():
        name, _, subset = name.partition(":")
        if subset:
            run.omitted[f"{option} {name}:{subset}"] = f"no subsets of a dataset: download it and pass the files of {subset!r}"
    # names of the hub may have a dot too, as NuminaMath-1.5, but after it no extension of letters alone
    is_file = name.startswith(("/", ".", "~")) or Path(name).expanduser().exists() or bool(Path(name).suffix[1:].isalpha())
    path = (name if is_file else f"hf://{name}") + (f"#{count}" if count else "")
    notes = ["the first rows, not a random sample" if count else "", "" if is_file else "from the Hugging Face hub"]
    run.translate(option, {f"{ACTOR}.{key}": path}, ", ".join(note for note in notes if note))
    for column, source in _DATASET_COLUMNS.get(name, {}).items():
        run.add_default(f"{ACTOR}.map_keys.{column}", source, f"the column of {name}")


def _translate_system(run: Import, option: str, value: object, words: list[str]) -> None:
    text = " ".join(words)
    path = Path(text).expanduser()
    # a text that is too long for a path would raise
    if len(text) < 1024 and path.is_file():
        prompt = path.read_text(encoding="utf-8").strip()
        run.translate(option, {f"{ACTOR}.system_prompt": prompt}, f"the text of {text}")
    elif path.suffix == ".txt":
        run.omitted[option] = f"there is no file {text} here; put its text into {ACTOR}.system_prompt"
    else:
        run.translate(option, {f"{ACTOR}.system_prompt": text})


def _translate_trackers(run: Import, option: str, value: object, words: list[str]) -> None:
    names = [] if words in (["none"], []) else ["tensorboard", "wandb", "swanlab"] if words == ["all"] else words
    run.translate(option, {f"{RL}.report_to": names})


def _translate_deepspeed(run: Import, option: str, value: object, words: list[str]) -> None:
    note = "optimizer state is spread; weights by tensor_model_parallel_size"
    run.translate(option, {f"{ACTOR}.use_distributed_optimizer": True}, note)


def _translate_dtype(run: Import, option: str, value: object, words: list[str]) -> None:
    is_bf16 = value if option == "--bf16" else {"float32": False, "bfloat16": True, "bf16": True}.get(str(value))
    if is_bf16 is None:
        run.omitted[option] = f"{value}: weights are bfloat16 or float32; bfloat16 is taken"
    else:
        run.translate(option, {f"{ACTOR}.bf16": is_bf16, "generate_config.dtype": "bfloat16" if is_bf16 else "float32"})


def _translate_output(run: Import, option: str, value: object, words: list[str]) -> None:
    run.translate(option, {"run_dir": str(value), f"{ACTOR}.save": str(Path(str(value), "checkpoints"))})


def _translate_checkpointing(run: Import, option: str, value: object, words: list[str]) -> None:
    if value:
        run.translate(option, RECOMPUTE_LAYERS)
    else:
        run.translated[option] = "false: nothing is computed again, as without recompute_granularity"


#: options that other names or their values do not translate
_SPECIAL: dict[str, Callable[[Import, str, object, list[str]], None]] = {
    "model": _translate_model,
    "load": _translate_model,
    "dataset": _translate_dataset,
    "val_dataset": _translate_dataset,
    "system": _translate_system,
    "report_to": _translate_trackers,
    "deepspeed": _translate_deepspeed,
    "torch_dtype": _translate_dtype,
    "bf16": _translate_dtype,
    "output_dir": _translate_output,
    "save": _translate_output,
    "gradient_checkpointing": _translate_checkpointing,
    "dataset_shuffle": lambda run, option, value, words: run.translate(option, {f"{ACTOR}.no_shuffle": not value}),
    "multi_turn_scheduler": lambda run, option, value, words: run.translate(
        option, {f"{RL}.multi_turn_scheduler": value, f"{RL}.multi_turn_enable": True}
    ),
}
#: options whose names mean another key elsewhere
_KEYS: dict[str, str] = {
    "max_length": f"{RL}.max_prompt_length",
    "max_epochs": f"{ACTOR}.train_epochs",
    "max_completion_length": f"{_SAMPLING}.max_tokens",
    "beta": f"{RL}.init_kl_coef",
}

#: options that are read together with others
_BY_OTHERS = frozenset(
    "rlhf_type epsilon num_generations per_device_train_batch_size gradient_accumulation_steps micro_batch_size "
    "global_batch_size generation_batch_size steps_per_generation train_type tuner_type target_modules lora_alpha "
    "reward_funcs reward_weights reward_model external_plugins".split()
).union(_STEPS)
