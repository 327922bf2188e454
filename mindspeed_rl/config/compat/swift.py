"""GRPO command lines of ms-swift and Megatron-SWIFT as run files."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from mindspeed_rl.config.compat.importer import Import, lora_targets, scalar
from mindspeed_rl.config.errors import ConfigError

ACTOR, RL, SAMPLING = "megatron_training", "rl_config", "generate_config.sampling_config"

#: key -> what ms-swift takes for its option where it is not given and ours differs
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


class SwiftCommand:
    """The parts of a command line.

    Attributes:
        environment: NAME=value in front of the command.
        options: name without dashes, hyphens as underscores -> its values as text; the last one wins.
        is_megatron: `megatron rlhf`, whose batch sizes have Megatron's names.
    """

    def __init__(self, command: str) -> None:
        try:
            words = shlex.split(command.replace("\\\n", " "))
        except ValueError as error:
            raise ConfigError([f"the command line cannot be read: {error}"]) from None
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
                raise ConfigError([f"{word!r} of the command line stands behind no --option"])
            elif word.strip():
                self.options[name].append(word)
        if not self.options:
            raise ConfigError(["the command line has no --options"])

    def value(self, name: str, default: Any = None) -> Any:
        """The one value of an option; an option without one is true."""
        found = self.options.get(name)
        return default if found is None else True if not found else scalar(found[0])

    def number(self, name: str, default: int) -> int:
        """A count."""
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError([f"--{name} is {value!r}, but must be a whole number, at least 1"])
        return value

    @property
    def num_devices(self) -> int:
        """Processes that train: NPROC_PER_NODE on NNODES, else the visible devices, else 1."""
        per_node = self.environment.get("NPROC_PER_NODE")
        if per_node is None:
            visible = self.environment.get("ASCEND_RT_VISIBLE_DEVICES") or self.environment.get("CUDA_VISIBLE_DEVICES") or ""
            per_node = str(len([item for item in visible.split(",") if item.strip()]) or 1)
        nodes = self.environment.get("NNODES", "1")
        if not (per_node.isdigit() and nodes.isdigit()):
            raise ConfigError([f"NPROC_PER_NODE={per_node} and NNODES={nodes} must be whole numbers"])
        return int(per_node) * int(nodes)


def from_swift(command: str, rewards: Collection[str], num_devices: int | None = None) -> Import:
    """The run file of a command line.

    Args:
        command: `NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model ...`, over several lines or on one.
        rewards: names of the reward functions that exist.
        num_devices: where the environment in front of the command does not say it.

    Raises:
        ConfigError: the command is none that trains with GRPO, or a value does not fit.
    """
    said = SwiftCommand(command)
    if (kind := said.value("rlhf_type", "grpo")) != "grpo":
        raise ConfigError([f"--rlhf_type is {kind!r}, but only grpo can be imported"])
    made = Import("ms-swift")
    made.put("--rlhf_type", {f"{ACTOR}.stage": "ray_grpo"})
    _batch(said, made, num_devices or said.num_devices)
    _adapters(said, made)
    _rewards(said, made, rewards)
    for name, words in said.options.items():
        option = f"--{name}"
        if name in _BY_OTHERS:
            continue
        if name in _SPECIAL:
            _SPECIAL[name](made, option, said.value(name), words)
        elif len(words) > 1:
            _plain(made, name, [scalar(word) for word in words])
        else:
            _plain(made, name, said.value(name))
    if made.get(f"{RL}.clip_ratio_high") is not None:
        made.put(
            "--epsilon",
            {f"{RL}.clip_higher_enable": True, f"{RL}.clip_ratio_low": said.value("epsilon", 0.2)},
            "with --epsilon_high",
        )
    elif "epsilon" in said.options:
        made.put("--epsilon", {f"{RL}.clip_ratio": said.value("epsilon")})
    for path, value in _DEFAULTS.items():
        made.add(path, value, "the default of ms-swift")
    made.add(f"{ACTOR}.lr", 1e-4 if made.get(f"{ACTOR}.lora_target_modules") else 1e-5, "the default of ms-swift")
    made.add(f"{RL}.use_remove_padding", True, "sequences are packed without padding")
    length = made.get(f"{RL}.max_prompt_length") + made.get(f"{SAMPLING}.max_tokens")
    if (longest := made.get("generate_config.max_model_len")) is not None and longest < length:
        made.set("generate_config.max_model_len", length)
        made.added["generate_config.max_model_len"] = f"{length}: longest prompt and response; {longest} would cut them"
    return made.finished()


def _plain(made: Import, name: str, value: Any) -> None:
    """An option that the tables of names know, or nobody."""
    before = set(made.became) | set(made.without)
    if not made.by_name(name, value):
        made.unknown(name)
    for table in (made.became, made.without):
        for option in set(table) - before:
            table[f"--{option}"] = table.pop(option)


def _batch(said: SwiftCommand, made: Import, world: int) -> None:
    """Devices and batch sizes; ms-swift counts completions, our first way prompts.

    Megatron-SWIFT's own rules hold for its commands, so that those are taken over in completions.
    """
    made.put("NPROC_PER_NODE", {f"{RL}.actor_resource.num_npus": world}, "training and rollout share these devices")
    groups = said.number("num_generations", 8)
    if said.is_megatron:
        micro, step = said.number("micro_batch_size", 1), said.number("global_batch_size", 16)
        made.put("--micro_batch_size", {f"{ACTOR}.micro_batch_size": micro})
        rollout_steps = said.number("steps_per_generation", 1)
    else:
        # these steps are forward passes, as in TRL, and by default as many as one optimizer step has
        micro, accumulated = said.number("per_device_train_batch_size", 1), said.number("gradient_accumulation_steps", 1)
        step = micro * accumulated * world
        made.put("--per_device_train_batch_size", {f"{ACTOR}.micro_batch_size": micro})
        rollout_steps = max(1, said.number("steps_per_generation", accumulated) // accumulated)
    if "generation_batch_size" in said.options:
        rollout_steps = max(1, said.number("generation_batch_size", step) // step)
    if said.is_megatron or step % groups:
        made.put("--num_generations", {f"{RL}.num_generations": groups})
        made.set(f"{ACTOR}.global_batch_size", step)
        made.set(f"{RL}.steps_per_generation", rollout_steps)
        sizes = f"global_batch_size: {step}, steps_per_generation: {rollout_steps}"
    else:
        made.put("--num_generations", {f"{RL}.n_samples_per_prompt": groups})
        made.set(f"{RL}.mini_batch_size", step // groups)
        made.set(f"{ACTOR}.global_batch_size", step // groups * rollout_steps)
        sizes = f"mini_batch_size: {step // groups}, global_batch_size: {step // groups * rollout_steps}, in prompts"
    for name in ("gradient_accumulation_steps", "global_batch_size", "steps_per_generation", "generation_batch_size"):
        if name in said.options:
            made.became[f"--{name}"] = f"{sizes} ({step} completions of an optimizer step on {world} devices)"
    # their steps are optimizer steps, our iterations are rollouts
    steps = rollout_steps * said.number("num_iterations", 1)
    for name, path in (
        ("max_steps", "train_iters"),
        ("train_iters", "train_iters"),
        ("save_steps", "save_interval"),
        ("save_interval", "save_interval"),
        ("eval_steps", "eval_interval"),
        ("eval_interval", "eval_interval"),
    ):
        if name in said.options:
            asked = said.number(name, 1)
            note = "" if steps == 1 else f"{asked} optimizer steps, {steps} of them a rollout"
            made.put(f"--{name}", {f"{ACTOR}.{path}": -(-asked // steps)}, note)


def _adapters(said: SwiftCommand, made: Import) -> None:
    """LoRA or all weights; LoRA is what ms-swift does unless it is told otherwise."""
    name = next((name for name in ("train_type", "tuner_type") if name in said.options), "train_type")
    kind = said.value(name, "full" if said.is_megatron else "lora")
    if kind not in ("lora", "full"):
        raise ConfigError([f"--{name} is {kind!r}, but must be lora or full"])
    if kind == "full":
        if name in said.options:
            made.became[f"--{name}"] = "full: all weights train, as they do without lora_target_modules"
        return
    asked = said.options.get("target_modules", ["all-linear"])
    targets = lora_targets(asked)
    if not targets:
        raise ConfigError([f"--target_modules {' '.join(asked)}: none of them is a projection of attention or MLP"])
    made.put("--target_modules", {f"{ACTOR}.lora_target_modules": targets})
    made.became[f"--{name}"] = "lora: lora_target_modules switches it on"
    made.add(f"{ACTOR}.lora_alpha", said.value("lora_alpha", 32), "--lora_alpha, or the default of ms-swift")


def _rewards(said: SwiftCommand, made: Import, known: Collection[str]) -> None:
    names = said.options.get("reward_funcs", [])
    taken = [name for name in names if name in known]
    weights = [scalar(word) for word in said.options.get("reward_weights", [])]
    has_model = "reward_model" in said.options
    if weights and len(weights) != len(names) + has_model:
        raise ConfigError([f"--reward_weights has {len(weights)} values for {len(names) + has_model} rewards"])
    if taken:
        made.put("--reward_funcs", {f"{RL}.reward_funcs": taken})
        own = [weight for name, weight in zip(names, weights) if name in known]
        if own:
            made.put("--reward_weights", {f"{RL}.reward_weights": own})
    elif has_model:
        made.set(f"{RL}.rule_reward", False)
    for name in names:
        if name not in known:
            made.without[f"--reward_funcs {name}"] = (
                "no reward function of this name; one of your own is external_plugins, see docs/rewards.md"
            )
    if has_model:
        made.put("--reward_model", {f"{RL}.reward_model": said.value("reward_model")})
        if weights:
            made.set(f"{RL}.reward_model_weight", weights[-1])
    if "external_plugins" in said.options:
        made.without["--external_plugins"] = "plug-ins of ms-swift have another form; docs/rewards.md shows ours"


def _model(made: Import, option: str, value: Any, words: list[str]) -> None:
    note = "" if Path(str(value)).expanduser().exists() else f"a folder: hf download {value} --local-dir {value}"
    made.put(option, {f"{ACTOR}.load": value, f"{ACTOR}.tokenizer_name_or_path": value, f"{ACTOR}.finetune": True}, note)


def _dataset(made: Import, option: str, value: Any, words: list[str]) -> None:
    key = "eval_data_path" if option == "--val_dataset" else "data_path"
    if len(words) != 1:
        made.without[f"{option} {' '.join(words[1:])}"] = "prompts come from one source; put the files together"
    name, _, count = words[0].partition("#")
    if name.count("/") == 1 and not Path(name).exists():
        name, _, subset = name.partition(":")
        if subset:
            made.without[f"{option} {name}:{subset}"] = f"no subsets of a dataset: download it and give the files of {subset!r}"
    # names of the hub may have a dot too, as NuminaMath-1.5, but behind it no ending of letters alone
    is_file = name.startswith(("/", ".", "~")) or Path(name).expanduser().exists() or bool(Path(name).suffix[1:].isalpha())
    path = (name if is_file else f"hf://{name}") + (f"#{count}" if count else "")
    notes = ["the first rows, not drawn ones" if count else "", "" if is_file else "from the Hugging Face hub"]
    made.put(option, {f"{ACTOR}.{key}": path}, ", ".join(note for note in notes if note))
    for column, theirs in _DATASET_COLUMNS.get(name, {}).items():
        made.add(f"{ACTOR}.map_keys.{column}", theirs, f"the column of {name}")


def _system(made: Import, option: str, value: Any, words: list[str]) -> None:
    text = " ".join(words)
    path = Path(text).expanduser()
    # a text that is too long for a path would raise
    if len(text) < 1024 and path.is_file():
        made.put(option, {f"{ACTOR}.system_prompt": path.read_text(encoding="utf-8").strip()}, f"what stands in {text}")
    elif path.suffix == ".txt":
        made.without[option] = f"there is no file {text} here; put its text into {ACTOR}.system_prompt"
    else:
        made.put(option, {f"{ACTOR}.system_prompt": text})


def _report_to(made: Import, option: str, value: Any, words: list[str]) -> None:
    names = [] if words in (["none"], []) else ["tensorboard", "wandb", "swanlab"] if words == ["all"] else words
    made.put(option, {f"{RL}.report_to": names})


def _deepspeed(made: Import, option: str, value: Any, words: list[str]) -> None:
    made.put(
        option, {f"{ACTOR}.use_distributed_optimizer": True}, "optimizer state is spread; weights by tensor_model_parallel_size"
    )


def _torch_dtype(made: Import, option: str, value: Any, words: list[str]) -> None:
    if value == "float32":
        made.put(option, {f"{ACTOR}.bf16": False, "generate_config.dtype": "float32"})
    elif value in ("bfloat16", "bf16"):
        made.put(option, {f"{ACTOR}.bf16": True, "generate_config.dtype": "bfloat16"})
    else:
        made.without[option] = f"{value}: weights are bfloat16 or float32; bfloat16 is taken"


def _bf16(made: Import, option: str, value: Any, words: list[str]) -> None:
    made.put(option, {f"{ACTOR}.bf16": value, "generate_config.dtype": "bfloat16" if value else "float32"})


def _output_dir(made: Import, option: str, value: Any, words: list[str]) -> None:
    made.put(option, {"run_dir": str(value), f"{ACTOR}.save": str(Path(str(value), "checkpoints"))})


def _checkpointing(made: Import, option: str, value: Any, words: list[str]) -> None:
    if value:
        group = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        made.put(option, {f"{ACTOR}.{name}": item for name, item in group.items()})
    else:
        made.became[option] = "false: nothing is computed again, as without recompute_granularity"


def _shuffle(made: Import, option: str, value: Any, words: list[str]) -> None:
    made.put(option, {f"{ACTOR}.no_shuffle": not value})


#: options that more than a name separates from a key
_SPECIAL: dict[str, Callable[[Import, str, Any, list[str]], None]] = {
    "model": _model,
    "load": _model,
    "dataset": _dataset,
    "val_dataset": _dataset,
    "system": _system,
    "report_to": _report_to,
    "deepspeed": _deepspeed,
    "torch_dtype": _torch_dtype,
    "bf16": _bf16,
    "output_dir": _output_dir,
    "save": _output_dir,
    "gradient_checkpointing": _checkpointing,
    "dataset_shuffle": _shuffle,
    "max_length": lambda made, option, value, words: made.put(option, {f"{RL}.max_prompt_length": value}),
    "multi_turn_scheduler": lambda made, option, value, words: made.put(
        option, {f"{RL}.multi_turn_scheduler": value, f"{RL}.multi_turn_enable": True}
    ),
    "max_epochs": lambda made, option, value, words: made.put(option, {f"{ACTOR}.train_epochs": value}),
    "max_completion_length": lambda made, option, value, words: made.put(option, {f"{SAMPLING}.max_tokens": value}),
    "beta": lambda made, option, value, words: made.put(option, {f"{RL}.init_kl_coef": value}),
}

#: options that are read together with others
_BY_OTHERS = frozenset(
    "rlhf_type epsilon num_generations per_device_train_batch_size gradient_accumulation_steps micro_batch_size "
    "global_batch_size generation_batch_size steps_per_generation max_steps train_iters save_steps save_interval eval_steps "
    "eval_interval train_type tuner_type target_modules lora_alpha reward_funcs reward_weights reward_model "
    "external_plugins".split()
)
