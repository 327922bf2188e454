"""Commands of ms-swift: `swift` and `megatron` rlhf (grpo, dpo, ppo, rm, simpo), sft, pt; `swift rollout`, deploy, infer."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast
from urllib.parse import urlsplit

import yaml

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.importer import (
    RECOMPUTE_LAYERS,
    UNSET_RANK,
    Import,
    find_lora_targets,
    read_scalar,
    start_from_adapter,
    train_prediction_layers,
)
from mindspeed_rl.importers.options import Option, SourceCommand, SourceProject, no_effect, refused
from mindspeed_rl.importers.shell_text import Command, list_unknown, read_flags, read_variable
from mindspeed_rl.importers.source_plan import Schedule, SourcePlan
from mindspeed_rl.importers.swift_options import (
    ACTOR,
    CORRECTIONS,
    ENGINE,
    OPTIONS,
    RL,
    SAMPLING,
    SERVING_OPTIONS,
    SUPERVISED_OPTIONS,
)

#: program -> stage here; others only generate
_STAGES = {
    "grpo": "ray_grpo", "ppo": "ray_ppo", "dpo": "dpo", "simpo": "simpo", "cpo": "cpo", "orpo": "orpo", "kto": "kto",
    "rm": "orm", "sft": "sft", "pt": "pretrain",
}  # fmt: skip
#: kinds that read pairs of answers
_PAIRS = ("dpo", "simpo", "cpo", "orpo", "rm")
_MEGATRON = "megatron "
_SERVING = {
    "rollout": "mindspeed-rl rollout --config-name",
    "deploy": "mindspeed-rl rollout --config-name",
    "infer": "mindspeed-rl generate --load",
}
#: kinds of `rlhf` without a counterpart
_OTHER_KINDS = {
    "gkd": "commands of GKD; rl_config.distillation has its losses (docs/distillation.md)",
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
_EXPERTS = re.compile(r"(?i)-a\d+b|moe|mixtral|deepseek-v[23]")
#: reward function there -> here
_FUNCTIONS = {
    "accuracy": "accuracy",
    "format": "think_answer_alone",
    "cosine": "cosine",
    "repetition": "repetition",
    "soft_overlong": "soft_overlong",
}
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
#: longest prompt where the command has no limit
_PROMPT_LENGTH = 2048


_BY_STAGE = {name: OPTIONS if name in ("grpo", "ppo") else SUPERVISED_OPTIONS for name in _STAGES}
#: options of earlier releases, which its guides still name
_RETIRED: dict[str, Option] = {
    "vllm_device": no_effect("the rollout shares the actor's devices, or has rl_config.rollout_resource", "auto"),
    "num_infer_workers": no_effect("it follows from the devices / generate_config.infer_tensor_parallel_size"),
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
    found: list[tuple[Command, str, Mapping[str, object], tuple[str, ...]]] = []
    for command in commands:
        program, words = _find_program(command.words)
        if not program:
            continue
        flags, trailing = read_flags(words)
        values = {name: _read_value(value) for name, value in flags.items()}
        files = [word for word in trailing if Path(word).suffix in (".yaml", ".yml", ".json")]
        for file in [*files, *([str(values.pop("config"))] if "config" in values else [])]:
            values = _read_file(Path(file)) | values
        options = {_EARLIER.get(name, name): value for name, value in values.items()}
        if "log_interval" in options and program not in _SERVING:
            options["logging_steps"] = options.pop("log_interval")
        if program.endswith("rlhf"):
            kind = str(options.get("rlhf_type", "dpo"))
            if kind in _OTHER_KINDS:
                raise ConfigError([f"--rlhf_type {kind}: not available here: {_OTHER_KINDS[kind]}"])
            program = program.replace("rlhf", kind)
        if program.removeprefix(_MEGATRON) not in {*_STAGES, *_SERVING}:
            raise ConfigError([f"the command trains {program!r}; available are {', '.join((*_STAGES, *_SERVING))}"])
        found.append((command, program, options, tuple(trailing)))
    if not found:
        raise ConfigError(["there is no command of ms-swift, such as swift rlhf --rlhf_type grpo --model Qwen/Qwen3-4B ..."])
    training = [item for item in found if item[1] not in _SERVING]
    different = [item for item in training if item[2] != training[0][2]]
    if different or (training and training[0][0].uncertain):
        lines = ", ".join(str(item[0].line) for item in training)
        raise ConfigError([f"the script has several trainings, or one that may not run (lines {lines}); import one of them"])
    command, program, options, trailing = (training or found)[0]
    environment = dict(command.environment)
    servers = [item for item in found if item[1] == "rollout"] if training else []
    if servers:
        # the servers of the script are those of the run
        environment |= {"SWIFT_SERVERS": str(len(servers))}
        environment |= {"SWIFT_SERVER_TP": str(servers[0][2].get("vllm_tensor_parallel_size", 1))}
        environment |= {"SWIFT_SERVER_DP": str(servers[0][2].get("vllm_data_parallel_size", 1))}
    world = devices or _count_devices(environment, command.words, program)
    return SourceCommand(program, options, environment, world, _RETIRED | _TABLES[program], trailing)


def _find_program(words: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the program of a command, "megatron sft" for one of Megatron-SWIFT, and the words after it; "" for other commands.

    Raises:
        ConfigError: it has no counterpart.
    """
    for place, word in enumerate(words):
        name, before = Path(word).name, Path(words[place - 1]).name if place else ""
        path = Path(word)
        if path.suffix == ".py" and path.parent.name in ("cli", "_megatron"):
            name, before = path.stem, "megatron" if path.parent.name == "_megatron" else "swift"
        if before not in ("swift", "megatron"):
            continue
        if name in _OTHER_PROGRAMS:
            raise ConfigError([f"{before} {name}: {_OTHER_PROGRAMS[name]}"])
        if name in ("rlhf", "sft", "pt", *_SERVING):
            return (_MEGATRON if before == "megatron" else "") + name, words[place + 1 :]
    return "", ()


def _read_value(words: list[str]) -> object:
    """Return the value of an option: true without words, a list of several."""
    values = [word if list_unknown(word) else read_scalar(word) for word in words]
    return True if not values else values[0] if len(values) == 1 else values


def _read_file(path: Path) -> dict[str, object]:
    """Return the options of a YAML or JSON file.

    Raises:
        ConfigError: it cannot be read, or holds something else than options.
    """
    try:
        content = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError([f"the file of options {path} cannot be read: {error}"]) from None
    nested = [str(name) for name, value in content.items() if isinstance(value, dict)] if isinstance(content, dict) else ["it"]
    if nested:
        raise ConfigError([f"the file of options {path} must hold names and values, and {', '.join(nested)} is something else"])
    # YAML reads 1e-6 as a text
    return {str(name): read_scalar(value) if isinstance(value, str) else value for name, value in content.items()}


def _count_devices(environment: Mapping[str, str], words: tuple[str, ...], program: str) -> int:
    """Return the processes that train: NPROC_PER_NODE on NNODES, those of torchrun, else the visible devices, else 1."""
    launcher, _ = read_flags(words)
    per_node = read_variable(environment, "NPROC_PER_NODE") or next(iter(launcher.get("nproc_per_node", [])), None)
    nodes = read_variable(environment, "NNODES") or next(iter(launcher.get("nnodes", [])), "1")
    visible = read_variable(environment, "ASCEND_RT_VISIBLE_DEVICES") or read_variable(environment, "CUDA_VISIBLE_DEVICES")
    counts_visible = per_node is None and (program in _SERVING or any(Path(word).name == "accelerate" for word in words))
    if counts_visible:
        per_node = str(len([item for item in (visible or "").split(",") if item.strip()]) or 1)
    per_node = per_node or "1"
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
        self.rollout: int | None = None
        if self.is_megatron:
            self.micro, self.step = command.count("micro_batch_size", 1), command.count("global_batch_size", 16)
            passes, per_pass = 1, self.step
        else:
            self.micro = command.count("per_device_train_batch_size", 1)
            default = 1 if self.kind == "grpo" else max(1, math.ceil(16 / self.micro / world))
            accumulated = command.count("gradient_accumulation_steps", default)
            # a rollout's forward passes count those of all processes, also where several share a sequence
            per_pass, passes = self.micro * (world if self.kind in ("grpo", "ppo") else self.dp), accumulated
            self.step = per_pass * accumulated
        if self.kind == "ppo":
            parts = command.count("num_mini_batches", 1)
            self.iterations = command.count("num_ppo_epochs", 4)
            self.rollout, self.steps = self.step * parts, parts * self.iterations
        elif self.kind == "grpo":
            self._set_rollout(command, passes, per_pass)

    def _set_rollout(self, command: SourceCommand, accumulated: int, per_pass: int) -> None:
        self.group = command.count("num_generations", 8)
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


# --- the run file -------------------------------------------------------------------------------------------------------


def _build(run: Import, command: SourceCommand) -> None:
    kind = command.program.removeprefix(_MEGATRON)
    for name in ("model", "dataset", "val_dataset"):
        for text in command.list_texts(name):
            if _VISION.search(text) and not _IMAGES.search(text):
                run.refuse(f"--{name} {text}", "data with video or audio, and models of images but Qwen2.5-VL and Qwen3-VL")
            elif name != "model" and kind in (*_PAIRS, "kto") and _IMAGES.search(text):
                run.refuse(f"--{name} {text}", "images in preference data")
    if kind in _SERVING:
        _build_serving(run, command, kind)
        return
    sizes, stage = _Sizes(command), _STAGES[kind]
    run.set(f"{ACTOR}.stage", stage)
    if command.text("optimizer") == "muon":
        for name, default in (("muon_momentum", 0.9), ("muon_tp_mode", "blockwise")):
            if not command.has(name):
                run.add_default(f"{ACTOR}.{name}", default, "the default of Megatron-SWIFT")
    if command.has("rlhf_type"):
        run.translated["--rlhf_type"] = f"megatron_training.stage: {stage}"
    _set_data(run, command, kind)
    _set_batch(run, command, sizes)
    _set_rate(run, command, sizes)
    _set_adapters(run, command, kind)
    _set_prediction(run, command, kind)
    if not sizes.is_megatron:
        if command.flag("gradient_checkpointing", default=True):
            for key, value in RECOMPUTE_LAYERS.items():
                run.add_default(key, value, "ms-swift computes the layers again in the backward pass")
        if command.has("gradient_checkpointing"):
            run.translated["--gradient_checkpointing"] = "recomputation of each layer, or none"
    if command.has("virtual_pipeline_model_parallel_size"):
        run.refuse(
            "--virtual_pipeline_model_parallel_size", "chunks by their number; write num_layers_per_virtual_pipeline_stage"
        )
    if _EXPERTS.search(command.text("model")) and run.get(f"{ACTOR}.moe_aux_loss_coeff") is None:
        run.add_default(f"{ACTOR}.moe_aux_loss_coeff", 0.0, "ms-swift trains without a balancing loss")
    _note_calculation(run, command, kind)
    if kind in ("grpo", "ppo"):
        run.add_default(
            f"{ENGINE}.dtype", "float32" if run.get(f"{ACTOR}.bf16") is False else "bfloat16", "that of the training"
        )
        _set_objective(run, command, kind)
        _set_rewards(run, command, kind)
        _set_engine(run, command, sizes)
        if kind == "ppo":
            run.add_default("critic_config.lr", run.get(f"{ACTOR}.lr"), "policy and critic have one learning rate there")
    else:
        run.add_default(f"{ACTOR}.no_pad_to_seq_lengths", True, "rows are padded to the longest of a micro-batch")
        _set_preference(run, command, kind, sizes)
    adapters = command.list_texts("adapters")
    model = run.get(f"{ACTOR}.load") or next(iter(adapters), None)
    if model is None:
        raise ConfigError(["the command names no model: --model is missing"])
    _start_from_adapters(run, command, adapters)
    folder = f"{'megatron_output' if sizes.is_megatron else 'output'}/{Path(str(model)).name}"
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


def _note_calculation(run: Import, command: SourceCommand, kind: str) -> None:
    """Note options that the stage answers: what trains, and how losses are averaged."""
    if command.has("calculate_per_token_loss"):
        if command.flag("calculate_per_token_loss") == (kind in ("sft", "pt")):
            run.note("--calculate_per_token_loss", "as the loss is averaged here", changes_nothing=False)
        else:
            run.refuse("--calculate_per_token_loss", "another average of the loss")
    scale = command.text("loss_scale", "default")
    if command.has("loss_scale"):
        fits = {"pt": ("all",), "sft": ("default",), "grpo": ("last_round", "default")}.get(kind, ("last_round", "default"))
        if scale in fits:
            run.note("--loss_scale", "these tokens train here", changes_nothing=False)
        else:
            run.refuse("--loss_scale", f"the weights of tokens {scale}; available are {', '.join(fits)}")
    if command.has("use_chat_template"):
        if command.flag("use_chat_template") == (kind != "pt"):
            run.note("--use_chat_template", "the stage decides it", changes_nothing=False)
        else:
            run.refuse("--use_chat_template", f"in stage {_STAGES[kind]}")
    for name in ("packing", "packing_length"):
        if not command.flag("packing") or name == "packing_length":
            if command.has(name):
                run.note(f"--{name}", "rows are not joined" if name == "packing" else "--packing reads it")
        elif kind == "sft":
            keys = ("pack", "neat_pack", "reset_attention_mask", "reset_position_ids")
            run.translate("--packing", {f"{ACTOR}.{key}": True for key in keys}, "rows that preprocess --neat-pack has joined")
        else:
            run.refuse("--packing", f"joined rows in stage {_STAGES[kind]}")


def _find_data(command: SourceCommand, option: str = "dataset") -> str:
    """Return data_path here, or eval_data_path.

    Raises:
        ConfigError: there is none.
    """
    names = command.list_texts(option)
    if not names:
        raise ConfigError([f"the command names no data: --{option} is missing"])
    name, _, count = names[0].partition("#")
    kind = command.program.removeprefix(_MEGATRON)
    if kind not in ("grpo", "ppo"):
        return f"./dataset/{Path(name).stem}{'_and_others' if len(names) > 1 else ''}/data"
    rows, share = sum(int(item.rpartition("#")[2]) for item in names if "#" in item), command.number("split_dataset_ratio", 0.0)
    part = f"[:{round(rows * (1 - share))}]" if share and option == "dataset" else ""
    if len(names) > 1:
        return f"./dataset/{Path(name).stem}_and_others.jsonl{part}"
    # names of the hub may have a dot too, as NuminaMath-1.5, but after it no extension of letters alone
    is_file = name.startswith(("/", ".", "~")) or Path(name).expanduser().exists() or bool(Path(name).suffix[1:].isalpha())
    is_file = is_file or name.count("/") != 1 or (name.partition("/")[0] in _MODELSCOPE and not command.flag("use_hf"))
    return (name if is_file else f"hf://{name}") + (part or (f"#{count}" if count else ""))


def _set_data(run: Import, command: SourceCommand, kind: str) -> None:
    flags = ""
    for variable, key in (("MAX_PIXELS", "max_pixels"), ("MIN_PIXELS", "min_pixels"), ("ROOT_IMAGE_DIR", "image_folder")):
        if (value := read_variable(command.environment, variable)) is not None:
            is_number = key != "image_folder"
            run.translate(variable, {f"{ACTOR}.{key}": int(value) if is_number else value})
            flags += f" --{key.replace('_', '-')} {value}"
    for option in ("dataset", "val_dataset"):
        if option == "val_dataset" and not command.has(option):
            continue
        names, path = command.list_texts(option), _find_data(command, option)
        name, _, count = names[0].partition("#")
        is_hub = name.count("/") == 1 and not Path(name).expanduser().exists()
        is_subset = any(":" in item.partition("#")[0] and item.count("/") == 1 for item in names)
        if is_subset and kind in ("grpo", "ppo"):
            run.refuse(f"--{option} {' '.join(names)}", "a subset of a dataset: download it, and give its folder")
        notes = ["the first rows; there a random sample"] if count else []
        if len(names) > 1 and kind in ("grpo", "ppo"):
            notes.append(f"a file with the rows of {', '.join(names)}")
            is_hub = False
        if is_hub and not path.startswith("hf://"):
            notes.append(f"a folder: modelscope download --dataset {name} --local_dir {name}")
        if kind not in ("grpo", "ppo"):
            form = "Pairwise" if kind in _PAIRS else "Unpaired" if kind == "kto" else "Instruction"
            handler = f"AlpacaStyle{form}Handler"
            words = "" if kind == "pt" else f" --handler-name {handler} --prompt-type hf"
            rows = f" --max-samples {count}" if count and len(names) == 1 else ""
            notes.append(
                f"the prefix that is written by: mindspeed-rl preprocess --input {' + '.join(names)} --output-prefix {path} "
                f"--tokenizer-name-or-path {command.text('model')}{words}{rows}{flags}"
            )
        key = "eval_data_path" if option == "val_dataset" else "data_path"
        run.translate(f"--{option}", {f"{ACTOR}.{key}": path}, "; ".join(notes))
        for column, source in _COLUMNS.get(name, {}).items():
            if kind in ("grpo", "ppo"):
                run.add_default(f"{ACTOR}.map_keys.{column}", source, f"the column of {name}")
    for name in ("model_author", "model_name"):
        if not command.has(name):
            continue
        words, fills = (
            " / ".join(command.list_texts(name)),
            any("self-cognition" in item for item in command.list_texts("dataset")),
        )
        if fills:
            place = "AUTHOR" if name == "model_author" else "NAME"
            run.translate(f"--{name}", {}, f"write {words} for {{{{{place}}}}} in the rows of self-cognition before preprocess")
        else:
            run.note(f"--{name}", "only self-cognition data has places for it")
    if command.has("split_dataset_ratio"):
        share = command.number("split_dataset_ratio", 0.0)
        if not share:
            run.note("--split_dataset_ratio", "no rows are held back", changes_nothing=False)
        elif kind in ("grpo", "ppo"):
            counts = [item.rpartition("#")[2] for item in command.list_texts("dataset")]
            path, total = _find_data(command), sum(int(count) for count in counts if count.isdigit())
            if all(count.isdigit() for count in counts):
                first = path.rpartition("[:")[2].rstrip("]")
                held = path.rpartition("[:")[0] + f"[{first}:{total}]"
                run.translate(
                    "--split_dataset_ratio", {f"{ACTOR}.eval_data_path": held}, "the last rows; there a random sample"
                )
            else:
                run.refuse("--split_dataset_ratio", "a part of an unknown number of prompts; name a file in --val_dataset")
        else:
            run.translate(
                "--split_dataset_ratio", {f"{ACTOR}.split": f"{100 * (1 - share):g},{100 * share:g},0"},
                "the last rows; there a random sample",
            )  # fmt: skip


def _set_batch(run: Import, command: SourceCommand, sizes: _Sizes) -> None:
    note = f"{sizes.step} rows of an optimizer step on {command.devices} devices"
    run.set(f"{RL}.actor_resource.num_npus" if sizes.rollout else f"{ACTOR}.num_npus", command.devices)
    values: dict[str, object] = {f"{ACTOR}.micro_batch_size": sizes.micro}
    if sizes.rollout is None:
        values[f"{ACTOR}.global_batch_size"] = sizes.step
    elif (sizes.is_megatron and sizes.group > 1) or sizes.step % sizes.group:
        # counts of completions, with Megatron-SWIFT's own rules
        values |= {f"{ACTOR}.global_batch_size": sizes.step, f"{RL}.num_generations": sizes.group}
        values |= {f"{RL}.generation_batch_size": sizes.rollout, f"{RL}.epochs": sizes.iterations}
    else:
        values |= {f"{ACTOR}.global_batch_size": sizes.rollout // sizes.group, f"{RL}.n_samples_per_prompt": sizes.group}
        values |= {f"{RL}.mini_batch_size": sizes.step // sizes.group, f"{RL}.epochs": sizes.iterations}
    if sizes.rollout is not None:
        note += f", {sizes.steps} steps of a rollout of {sizes.rollout} completions"
    first = "--global_batch_size" if sizes.is_megatron else "--per_device_train_batch_size"
    run.translate(first, values, note)
    for name in (
        "per_device_train_batch_size gradient_accumulation_steps micro_batch_size global_batch_size num_generations "
        "generation_batch_size steps_per_generation num_iterations num_ppo_epochs num_mini_batches"
    ).split():
        if command.has(name) and f"--{name}" not in run.translated:
            run.translated[f"--{name}"] = f"see {first}"
    rows, is_known = _read_rows(command, run.settings.rows)
    limit = "train_iters" if sizes.is_megatron else "max_steps"
    total = sizes.count_steps(command, rows)
    by_limit = command.number(limit, -1) > 0 and (not sizes.is_megatron or not command.has("num_train_epochs"))
    each = f"{sizes.steps} steps an iteration" if sizes.steps > 1 else ""
    length = "--num_train_epochs"
    if by_limit:
        run.translate(f"--{limit}", {f"{ACTOR}.train_iters": math.ceil(total / sizes.steps)}, each)
        if command.has("num_train_epochs"):
            run.note(length, f"--{limit} is read instead")
    elif is_known or sizes.kind == "pt":
        if not is_known and sizes.kind == "pt":
            run.refuse(length, "a length in epochs of documents that are cut into samples; write --max_steps or --train_iters")
        run.translate(length, {f"{ACTOR}.train_iters": math.ceil(total / sizes.steps)}, f"over {rows} rows")
    else:
        run.translate(length, {f"{ACTOR}.train_epochs": command.number("num_train_epochs", 3.0)})
    if command.has(limit) and f"--{limit}" not in run.translated:
        run.note(f"--{limit}", f"{length} is read")
    intervals = {"save_steps": "save_interval", "eval_steps": "eval_interval"}
    strategy = command.text("save_strategy", "steps")
    for name, key in intervals.items():
        interval = command.number(name, 500 if name == "save_steps" else 0)
        if interval >= 1 and (name == "eval_steps" or strategy == "steps"):
            run.translate(f"--{name}", {f"{ACTOR}.{key}": math.ceil(interval / sizes.steps)}, each)
        elif command.has(name):
            run.note(f"--{name}", "the last checkpoint is always written")
    if command.has("save_strategy"):
        run.note("--save_strategy", "see save_interval; the last checkpoint is always written")
    if command.has("ref_model_sync_steps"):
        count = math.ceil(command.number("ref_model_sync_steps", 512) / sizes.steps)
        run.translate("--ref_model_sync_steps", {f"{RL}.ref_model_sync_steps": count}, each)


def _set_rate(run: Import, command: SourceCommand, sizes: _Sizes) -> None:
    total = sizes.count_steps(command, _read_rows(command, run.settings.rows)[0])
    schedule = _read_schedule(command, total)
    names = ("lr", "lr_decay_style") if sizes.is_megatron else ("learning_rate", "lr_scheduler_type")
    run.translate(f"--{names[0]}", {f"{ACTOR}.lr": schedule.peak})
    run.translate(f"--{names[1]}", {f"{ACTOR}.lr_decay_style": schedule.style, f"{ACTOR}.min_lr": schedule.floor})
    run.add_default(
        f"{ACTOR}.clip_grad", command.number("clip_grad" if sizes.is_megatron else "max_grad_norm", 1.0), "as there"
    )
    if schedule.decay != total:
        run.translate("--lr_decay_iters", {f"{ACTOR}.lr_decay_iters": math.ceil(schedule.decay / sizes.steps)})
    if schedule.warmup and schedule.warmup % sizes.steps == 0 and command.has("warmup_steps", "lr_warmup_iters"):
        run.set(f"{ACTOR}.lr_warmup_iters", schedule.warmup // sizes.steps)
    elif schedule.warmup:
        ratio = command.number("lr_warmup_fraction" if sizes.is_megatron else "warmup_ratio", 0.0)
        is_known = run.get(f"{ACTOR}.train_epochs") is None
        # rounded up there, and down here
        exact = (schedule.warmup + 0.01) / (math.ceil(schedule.decay / sizes.steps) * sizes.steps)
        run.set(f"{ACTOR}.lr_warmup_fraction", exact if is_known or not ratio else ratio)
    for name in (
        "warmup_steps warmup_ratio lr_warmup_iters lr_warmup_fraction lr_decay_iters min_lr lr_scheduler_kwargs max_grad_norm "
        "clip_grad"
    ).split():
        if command.has(name) and f"--{name}" not in run.translated:
            run.translated[f"--{name}"] = f"{schedule.warmup} steps of warm-up, from {schedule.peak:g} to {schedule.floor:g}"


def _set_adapters(run: Import, command: SourceCommand, kind: str) -> None:
    names = [name for name in ("target_modules", "lora_rank", "lora_alpha", "lora_dropout") if command.has(name)]
    tuner = _read_tuner(command)
    if tuner == "full":
        for name in [*names, *(["tuner_type"] if command.has("tuner_type") else [])]:
            run.note(f"--{name}", "all weights train", changes_nothing=name != "tuner_type")
        return
    if tuner != "lora":
        run.refuse("--tuner_type", f"{tuner}; lora and full are available")
        for name in names:
            run.note(f"--{name}", "see --tuner_type")
        return
    modules = command.list_texts("target_modules") or ["all-linear"]
    targets = find_lora_targets(modules)
    if not targets:
        raise ConfigError([f"--target_modules {' '.join(modules)}: none of them is a projection of attention or MLP"])
    dropout = command.number("lora_dropout", 0.05)
    values: dict[str, object] = {f"{ACTOR}.lora_target_modules": targets, f"{ACTOR}.lora_dropout": dropout}
    if not command.has("adapters"):  # which have theirs
        alpha = int(command.number("lora_alpha", 32))
        values |= {f"{ACTOR}.lora_r": command.count("lora_rank", 8), f"{ACTOR}.lora_alpha": alpha}
    if dropout and kind in ("grpo", "ppo"):
        values[f"{RL}.dropout_in_update"] = True
    run.translate("--tuner_type", values, "the default of swift" if not command.has("tuner_type") else "")
    for name in names:
        run.translated[f"--{name}"] = "see --tuner_type"


def _set_prediction(run: Import, command: SourceCommand, kind: str) -> None:
    given = [f"--{name}" for name in ("mtp_num_layers", "mtp_loss_scaling_factor") if command.has(name)]
    if not command.get("mtp_num_layers") or kind in ("grpo", "ppo"):
        reason = "without --mtp_num_layers there are no prediction layers"
        if command.get("mtp_num_layers"):
            reason = "in RL ms-swift computes no loss of prediction layers; megatron_training.mtp_num_layers trains them"
        for option in given:
            run.note(option, reason)
    elif kind not in ("sft", "pt"):
        run.refuse("--mtp_num_layers", "prediction layers next to a preference loss")
    else:
        factor = command.number("mtp_loss_scaling_factor", 0.1)
        train_prediction_layers(run, given, command.count("mtp_num_layers", 1), factor, detaches=False)


def _set_preference(run: Import, command: SourceCommand, kind: str, sizes: _Sizes) -> None:
    """Set the keys of supervised stages."""
    run.set(f"{ACTOR}.seq_length", _read_length(command))
    if command.has("max_length"):
        run.translated["--max_length"] = f"megatron_training.seq_length: {_read_length(command)}"
    else:
        run.added["megatron_training.seq_length"] = (
            f"{_read_length(command)}: set the longest row; ms-swift has the model's limit"
        )
    if kind == "kto":
        form, weight = command.text("loss_type", "kto"), f"{ACTOR}.kto_{{}}desirable_weight"
        if form not in ("kto", "apo_zero_unpaired"):
            run.refuse("--loss_type", f"the preference loss {form}; kto and apo_zero_unpaired are available")
        elif command.flag("calculate_KL", default=form == "kto") != (form == "kto"):
            run.refuse("--calculate_KL", f"another KL than that of --loss_type {form}")
        run.translate("--loss_type", {f"{ACTOR}.kto_loss_type": form})
        run.translate(
            "--beta",
            {f"{ACTOR}.kto_beta": command.number("beta", 0.1)},
            "the KL is of the batch of an optimizer step, there of a pass",
        )
        for name in ("", "un"):
            run.translate(f"--{name}desirable_weight", {weight.format(name): command.number(f"{name}desirable_weight", 1.0)})
        if command.has("ref_model"):
            run.translate("--ref_model", {f"{ACTOR}.ref_model": command.text("ref_model")})
        return
    if kind in ("cpo", "orpo"):
        _set_reference_free(run, command, kind, sizes)
        return
    if kind not in ("dpo", "simpo"):
        if command.has("loss_type"):
            run.refuse("--loss_type", f"the loss {command.text('loss_type')} in stage {_STAGES[kind]}")
        return
    forms = command.list_texts("loss_type") or ["sigmoid" if kind == "dpo" else "simpo"]
    beta = command.number("beta", 0.1 if kind == "dpo" else 2.0)
    weight = command.number("rpo_alpha", 0.0) if kind == "dpo" else command.number("cpo_alpha", 1.0)
    if kind == "dpo" and (len(forms) > 1 or forms[0] not in ("sigmoid", "hinge", "ipo")):
        run.refuse("--loss_type", f"the preference loss {', '.join(forms)}; sigmoid, hinge and ipo are available")
    elif kind == "simpo" and forms != ["simpo"]:
        run.refuse("--loss_type", f"the preference loss {', '.join(forms)}")
    elif kind == "dpo":
        run.translate("--loss_type", {f"{ACTOR}.dpo_loss_type": forms[0]})
        run.translate("--beta", {f"{ACTOR}.dpo_beta": beta})
        run.translate("--label_smoothing", {f"{ACTOR}.dpo_label_smoothing": command.number("label_smoothing", 0.0)})
    else:
        margin = command.number("simpo_gamma", 1.0)
        run.translate("--simpo_gamma", {f"{ACTOR}.simpo_beta": beta, f"{ACTOR}.gamma_beta_ratio": margin / beta})
        run.translate("--label_smoothing", {f"{ACTOR}.simpo_label_smoothing": command.number("label_smoothing", 0.0)})
        for name in ("beta", "loss_type"):
            if command.has(name):
                run.translated[f"--{name}"] = "see --simpo_gamma"
    option = "--rpo_alpha" if kind == "dpo" else "--cpo_alpha"
    if weight and sizes.micro > 1:
        run.refuse(
            option, "a supervised term that is averaged over the tokens of several pairs; with one pair a pass it is available"
        )
    elif weight or command.has(option[2:]):
        run.translate(option, {f"{ACTOR}.pref_ftx": weight})
    if command.has("ref_model"):
        run.translate("--ref_model", {f"{ACTOR}.ref_model": command.text("ref_model")})


def _set_reference_free(run: Import, command: SourceCommand, kind: str, sizes: _Sizes) -> None:
    """Set the keys of CPO and ORPO, which have no reference."""
    if (form := command.text("loss_type", "sigmoid")) != "sigmoid" or command.number("label_smoothing", 0.0):
        option = "--loss_type" if form != "sigmoid" else "--label_smoothing"
        run.refuse(option, f"another form of {kind.upper()}'s loss than sigmoid without label smoothing")
    alpha = command.number("cpo_alpha", 1.0) if kind == "cpo" else 1.0
    if alpha and sizes.micro > 1:
        run.refuse(
            "--cpo_alpha" if kind == "cpo" else "--per_device_train_batch_size",
            "a supervised term that is averaged over the tokens of several pairs; with one pair a pass it is available",
        )
    run.translate("--beta", {f"{ACTOR}.{'cpo_beta' if kind == 'cpo' else 'orpo_lambda'}": command.number("beta", 0.1)})
    if kind == "cpo":
        run.translate("--cpo_alpha", {f"{ACTOR}.cpo_alpha": alpha})
    for name in ("loss_type", "label_smoothing"):
        if command.has(name):
            run.note(f"--{name}", f"the loss of stage {kind}", changes_nothing=False)


def _read_length(command: SourceCommand) -> int:
    return command.count("packing_length" if command.has("packing_length") else "max_length", 2048)


def _set_objective(run: Import, command: SourceCommand, kind: str) -> None:
    """Set loss, advantages and KL."""
    if kind == "ppo":
        clip, coefficient = command.number("cliprange", 0.2), command.number("kl_coef", 0.05)
        run.translate("--cliprange", {f"{RL}.clip_ratio": clip, f"{RL}.adv_estimator": "gae", f"{RL}.loss_type": "bnpo"})
        run.translate(
            "--kl_coef", {f"{RL}.init_kl_coef": coefficient, f"{RL}.use_kl_in_reward": True, f"{RL}.kl_penalty": "k1"}
        )
        run.add_default(f"{RL}.cliprange_value", 0.2, "the default of ms-swift")
        run.add_default(f"{RL}.n_samples_per_prompt", 1, "PPO has one response a prompt")
        return
    form = command.text("loss_type", "grpo")
    if form not in _LOSSES:
        run.refuse("--loss_type", f"the policy loss {form}; available are {', '.join(_LOSSES)}")
    else:
        run.translate("--loss_type", {f"{RL}.loss_type": _LOSSES[form][0]}, "averaged over an optimizer step")
    low = command.number("epsilon", 0.2)
    high = command.number("epsilon_high", low)
    if form in ("sapo", "real"):
        clips: dict[str, object] = {}
    else:
        clips = {f"{RL}.clip_higher_enable": True, f"{RL}.clip_ratio_low": low, f"{RL}.clip_ratio_high": high}
    run.translate("--epsilon", clips, "" if clips else f"{form} clips nothing")
    if command.has("epsilon_high"):
        run.translated["--epsilon_high"] = "see --epsilon"
    estimator, scale = _read_estimator(command)
    if estimator == "rloo" and scale == "none":
        run.translate("--advantage_estimator", {f"{RL}.adv_estimator": "rloo"})
    elif estimator == "rloo":
        run.refuse("--scale_rewards", f"RLOO advantages that are divided by the spread of the {scale}")
    elif estimator == "reinforce_plus_plus" and scale == "batch":
        run.refuse("--advantage_estimator", "REINFORCE++ whose centred rewards are divided by their own spread over the batch")
    elif scale == "gdpo":
        run.translate("--scale_rewards", {f"{RL}.adv_estimator": "gdpo", f"{RL}.adv_epsilon": 1e-8})
    else:
        run.translate("--advantage_estimator", {f"{RL}.adv_estimator": "group_norm", f"{RL}.scale_rewards": scale})
        run.add_default(f"{RL}.adv_epsilon", 1e-4, "ms-swift adds it to the standard deviation")
    for name in ("advantage_estimator", "scale_rewards"):
        if command.has(name) and f"--{name}" not in {*run.translated, *run.refused}:
            run.translated[f"--{name}"] = f"rl_config.scale_rewards: {scale}"
    beta, in_reward = command.number("beta", 0.04), _has_kl_in_reward(command)
    if form == "real" and beta and not in_reward:
        run.refuse("--loss_type", "the loss real next to a KL that is averaged over tokens; it is available with --beta 0")
    run.translate("--beta", {f"{RL}.init_kl_coef": beta})
    if beta:
        run.set(f"{RL}.kl_penalty", "k1" if in_reward else "k3")
        run.set(f"{RL}.use_kl_in_reward", in_reward)
        if in_reward and estimator != "rloo":
            run.refuse("--kl_in_reward", "a KL that enters a reward which is then divided by a spread")
    if beta and not in_reward and command.get("rollout_importance_sampling_mode") is not None:
        run.refuse("--rollout_importance_sampling_mode", "a correction that weighs the KL too; it is available with --beta 0")
    if command.has("kl_in_reward") and "--kl_in_reward" not in run.refused:
        run.translated["--kl_in_reward"] = f"rl_config.use_kl_in_reward: {str(in_reward and bool(beta)).lower()}"
    if command.has("ref_model"):
        run.translate("--ref_model", {f"{RL}.integrated_mode_config.ref_model_load_path": command.text("ref_model")})


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


def _set_teacher(run: Import, command: SourceCommand, *, has_rewards: bool) -> None:
    """Set a teacher of GRPO: coef * (log-prob of the teacher - old log-prob) is added to the advantage of each token."""
    given = [name for name in ("teacher_model", "teacher_model_server") if command.has(name)]
    if not given:
        if command.has("teacher_kl_coef"):
            run.note("--teacher_kl_coef", "there is no teacher", changes_nothing=False)
        return
    teacher, key = command.text(given[0], ""), f"{RL}.distillation"
    if teacher.startswith(("[", "{")):
        run.refuse(f"--{given[0]}", "several teachers in a command; see rl_config.distillation.teacher_keys")
    if given[0] == "teacher_model_server" and not teacher.rstrip("/").endswith("/v1"):
        teacher = teacher.rstrip("/") + "/v1"
    values: dict[str, object] = {"enabled": True, "teacher_models": [teacher], "loss_mode": "k1"}
    values["use_policy_gradient"] = True
    # prompt log-probs of a server have no temperature
    values |= {"teacher_temperature": 1.0} if given[0] == "teacher_model_server" else {}
    values = {f"{key}.{name}": value for name, value in values.items()}
    run.translate(f"--{given[0]}", values, "the teacher's KL is in the advantage")
    run.set(f"{key}.use_task_rewards", has_rewards)
    coefficient = command.number("teacher_kl_coef", 1.0)
    if has_rewards and command.has("teacher_kl_coef"):
        run.translate("--teacher_kl_coef", {f"{key}.distillation_loss_coef": coefficient})
    elif coefficient != 1.0:
        run.refuse("--teacher_kl_coef", "a coefficient of a teacher without task rewards; it scales the loss like lr")
    elif command.has("teacher_kl_coef"):
        run.note("--teacher_kl_coef", "the teacher alone trains", changes_nothing=False)
    if not has_rewards:
        run.add_default(f"{RL}.rule_reward", False, "the command names no reward")


def _set_rewards(run: Import, command: SourceCommand, kind: str) -> None:
    names, models = command.list_texts("reward_funcs"), command.list_texts("reward_model")
    value = command.get("reward_weights")
    weights = value if isinstance(value, list) else [] if value is None else [value]
    plugins = command.list_texts("reward_model_plugin")
    if not names and not models and not command.has("gym_env", "use_gym_env", "teacher_model", "teacher_model_server"):
        raise ConfigError(["the command names no reward: --reward_funcs and --reward_model are missing"])
    _set_teacher(run, command, has_rewards=bool(names or models) or _has_environment(command))
    if weights and len(weights) != len(names) + len(models):
        raise ConfigError([f"--reward_weights has {len(weights)} values for {len(names) + len(models)} rewards"])
    weights = weights or [1.0] * (len(names) + len(models))
    taken: list[str] = []
    for name in names:
        if name in _FUNCTIONS:
            taken.append(_FUNCTIONS[name])
        elif command.has("external_plugins"):
            taken.append(name)
        else:
            run.refuse(
                f"--reward_funcs {name}", "ms-swift's reward function of this name, and no file in --external_plugins has it"
            )
    if taken:
        values: dict[str, object] = {f"{RL}.reward_funcs": taken, f"{RL}.reward_weights": weights[: len(names)]}
        run.translate("--reward_funcs", values, "accuracy compares answers by the rules of docs/rewards.md")
        run.add_default(f"{ACTOR}.dataset_additional_keys", ["labels"], "the reference answers")
    else:
        run.add_default(f"{RL}.rule_reward", False, "the reward model alone scores")
        if command.has("reward_funcs"):
            run.note("--reward_funcs", "none")
    judges = [place for place, plugin in enumerate(plugins) if plugin == "genrm"]
    others = [place for place in range(len(models)) if place not in judges]
    if len(others) > 1:
        run.refuse(f"--reward_model {' '.join(models)}", "several reward models")
    for plugin in plugins:
        if plugin not in ("genrm", "default"):
            run.refuse(
                f"--reward_model_plugin {plugin}", "code of a plug-in around a reward model; a reward function can call it"
            )
    if judges:
        address = run.settings.variables.get("JUDGE_URL")
        # without an address the run serves it, on the devices that the policy has too
        served = {} if address is None else {f"{RL}.judge_url": address}
        run.translate(
            "--reward_model_plugin",
            {**served, f"{RL}.judge_model": models[judges[0]],
             f"{RL}.judge_weight": weights[len(names) + judges[0]]},
            "the judge of docs/rewards.md, whose question is ours; judge_prompt and judge_parser take yours",
        )  # fmt: skip
    if others and models:
        run.translate("--reward_model", {f"{RL}.reward_model": models[others[0]]})
        run.set(f"{RL}.reward_model_weight", weights[len(names) + others[0]])
        if kind == "ppo":
            run.add_default("critic_config.load", models[others[0]], "the critic starts from the reward model")
    for name in ("reward_model", "reward_model_plugin", "reward_weights"):
        if command.has(name) and f"--{name}" not in run.translated:
            run.translated[f"--{name}"] = "with the rewards"


def _set_engine(run: Import, command: SourceCommand, sizes: _Sizes) -> None:
    """Set lengths, servers and the mode of the trainer."""
    response, limit = command.count("max_completion_length", 512), command.get("vllm_max_model_len")
    for name in ("max_new_tokens", "response_length"):
        if command.has(name):
            run.translate(f"--{name}", {f"{SAMPLING}.max_tokens": response})
    prompt = _read_prompt_length(command)
    if command.has("max_length"):
        run.translate("--max_length", {f"{RL}.max_prompt_length": prompt}, "prompts that are longer are left out, not cut")
    elif prompt is not None:
        run.add_default(f"{RL}.max_prompt_length", prompt, "--vllm_max_model_len without the response")
    else:
        run.add_default(f"{RL}.max_prompt_length", _PROMPT_LENGTH, "ms-swift has no limit here: set your longest prompt")
    length = cast("int", run.get(f"{RL}.max_prompt_length")) + response
    if limit is not None:
        known = command.count("vllm_max_model_len", length)
        note = "" if known >= length else f"longest prompt and response; {known} would cut responses"
        run.translate("--vllm_max_model_len", {f"{ENGINE}.max_model_len": max(known, length)}, note)
    run.add_default(f"{RL}.use_remove_padding", True, "sequences are packed without padding")
    is_server, is_async = command.text("vllm_mode") == "server", command.flag("async_generate")
    servers = int(read_variable(command.environment, "SWIFT_SERVERS", "0") or 0)
    if is_server and servers:
        tensor, replicas = (int(command.environment[name]) for name in ("SWIFT_SERVER_TP", "SWIFT_SERVER_DP"))
        values = {f"{RL}.rollout_resource.num_npus": servers * tensor * replicas, f"{RL}.use_integrated_worker": False}
        run.set(f"{ENGINE}.infer_tensor_parallel_size", tensor)
        run.translate("--vllm_mode", values, "the servers of the script are the run's own")
    elif is_server:
        hosts = command.list_texts("vllm_server_host") or [urlsplit(url).hostname for url in _list_urls(command)]
        port = command.get("vllm_server_port") or [urlsplit(url).port or 8000 for url in _list_urls(command)] or 8000
        port = port[0] if isinstance(port, list) and len(port) == 1 else port
        values = {f"{ENGINE}.vllm_server_host": hosts[0] if len(hosts) == 1 else hosts, f"{ENGINE}.vllm_server_port": port}
        run.translate("--vllm_mode", values, "standalone servers: mindspeed-rl rollout")
    if is_async and not is_server:
        run.refuse("--async_generate", "generation ahead of the update needs servers: --vllm_mode server")
    elif is_async:
        run.translate("--async_generate", {f"{RL}.trainer_mode": "one_step_off"})
    for name in ("vllm_mode", "vllm_server_host", "vllm_server_port", "vllm_server_base_url", "async_generate"):
        if command.has(name) and f"--{name}" not in {*run.translated, *run.refused}:
            run.note(f"--{name}", "the engines share the devices of the trainer, or the servers are those of another option")
    if command.has("use_gym_env", "gym_env"):
        _set_environment(run, command)
    if command.has("multi_turn_scheduler"):
        name = command.text("multi_turn_scheduler")
        if name == "gym_scheduler" and command.has("gym_env"):
            run.translate("--multi_turn_scheduler", {f"{RL}.multi_turn_enable": True}, "see --gym_env")
        elif ":" not in name and not command.has("external_plugins"):
            run.refuse("--multi_turn_scheduler", f"ms-swift's scheduler {name}; your own is a class in --external_plugins")
        else:
            run.translate("--multi_turn_scheduler", {f"{RL}.multi_turn_scheduler": name, f"{RL}.multi_turn_enable": True})
        turns = command.number("max_turns", 0)
        total = response * int(turns) if turns else response
        run.add_default(f"{RL}.max_total_response_length", max(total, response), "all turns")


def _set_environment(run: Import, command: SourceCommand) -> None:
    """Set the environment of a plug-in file, whose rewards are those of the run."""
    scheduler, name = command.text("multi_turn_scheduler"), command.text("gym_env")
    is_on = command.flag("use_gym_env", default=bool(name))
    if is_on and (scheduler != "gym_scheduler" or not name or not command.has("external_plugins")):
        run.refuse("--use_gym_env", "an environment without a name in --gym_env, a file in --external_plugins or gym_scheduler")
    elif is_on:
        run.translate("--gym_env", {f"{RL}.environment": name}, "the sum of its rewards is the reward")
    for option in ("use_gym_env", "gym_env"):
        if command.has(option) and f"--{option}" not in {*run.translated, *run.refused}:
            run.translated[f"--{option}"] = "see --gym_env" if is_on else "off"


def _list_urls(command: SourceCommand) -> list[str]:
    return [url if "//" in url else f"//{url}" for url in command.list_texts("vllm_server_base_url")]


def _read_prompt_length(command: SourceCommand) -> int | None:
    """Return the longest prompt: max_length, else what vllm_max_model_len leaves; None where neither is there."""
    if command.get("max_length") is not None:
        return command.count("max_length", 1)
    limit = command.get("vllm_max_model_len")
    rest = 0 if limit is None else command.count("vllm_max_model_len", 1) - command.count("max_completion_length", 512)
    return rest if rest > 0 else None


def _build_serving(run: Import, command: SourceCommand, kind: str) -> None:
    """Set the engine of a command that serves or generates; the command to run is printed."""
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


# --- the plan of ms-swift -------------------------------------------------------------------------------------------------


def _plan(command: SourceCommand, rows: int) -> SourcePlan | None:
    """Return the numbers of the run by ms-swift's formulas; None for a command that serves or generates."""
    kind = command.program.removeprefix(_MEGATRON)
    if kind in _SERVING:
        return None
    sizes = _Sizes(command)
    total = sizes.count_steps(command, _read_rows(command, rows)[0])
    rates = _read_schedule(command, total).over(total, sizes.steps)
    tuner, adapters = _read_tuner(command), command.list_texts("adapters")
    forms = command.list_texts("loss_type")
    losses = {"dpo": (forms or ["sigmoid"])[0], "kto": (forms or ["kto"])[0], "simpo": "simpo_sigmoid", "rm": "ranking"}
    losses |= {"cpo": "cpo", "orpo": "orpo"}
    plan = SourcePlan(
        stage=_STAGES[kind],
        step_samples=sizes.step,
        steps_per_rollout=sizes.steps,
        total_steps=total,
        lr_first=rates.rates[0],
        lr_10=rates.rates[1],
        lr_last=rates.rates[2],
        lr_warmup_steps=rates.warmup,
        loss=losses.get(kind, "cross_entropy"),
        beta=command.number("beta", 2.0 if kind == "simpo" else 0.1) if kind in (*_PAIRS[:4], "kto") else None,
        sequence_length=None if sizes.rollout else _read_length(command),
        tp=sizes.tp,
        pp=sizes.pp,
        cp=sizes.cp,
        ep=sizes.ep,
        dp=sizes.dp,
        lora_rank=0 if tuner == "full" else UNSET_RANK if adapters else command.count("lora_rank", 8),
        weight_decay=command.number("weight_decay", 0.1),
        clip_grad=command.number("clip_grad" if sizes.is_megatron else "max_grad_norm", 1.0),
        data=(_find_data(command),),
        model=command.text("mcore_model") or command.text("model") or next(iter(adapters), ""),
    )
    return plan if sizes.rollout is None else _plan_rollout(command, sizes, plan)


def _plan_rollout(command: SourceCommand, sizes: _Sizes, plan: SourcePlan) -> SourcePlan:
    """Return the plan with the numbers of GRPO or PPO."""
    assert sizes.rollout is not None, "grpo and ppo have rollouts"
    is_ppo = sizes.kind == "ppo"
    form = "bnpo" if is_ppo else command.text("loss_type", "grpo")
    low = command.number("cliprange" if is_ppo else "epsilon", 0.2)
    high = low if is_ppo else command.number("epsilon_high", low)
    beta = command.number("kl_coef", 0.05) if is_ppo else command.number("beta", 0.04)
    in_reward = is_ppo or _has_kl_in_reward(command)
    estimator, scale = ("gae", None) if is_ppo else _read_estimator(command)
    names = {"grpo": "group_norm", "rloo": "rloo", "gae": "gae", "reinforce_plus_plus": "group_norm"}
    mode = None if is_ppo else CORRECTIONS.get(command.get("rollout_importance_sampling_mode"))
    level = cast('Literal["token", "sequence", "sequence_token"]', _LEVELS[command.text("importance_sampling_level", "token")])
    plugins, models = command.list_texts("reward_model_plugin"), command.list_texts("reward_model")
    scored = [model for place, model in enumerate(models) if plugins[place : place + 1] != ["genrm"]]
    tensor = int(command.environment.get("SWIFT_SERVER_TP", 0)) or command.count("vllm_tensor_parallel_size", 1)
    return dataclasses.replace(
        plan,
        rollout_prompts=sizes.rollout // sizes.group,
        rollout_completions=sizes.rollout,
        loss=_LOSSES[form][1],
        level=level,
        clip_low=None if form in ("cispo", "sapo", "real") else low,
        clip_high=None if form in ("sapo", "real") else high,
        delta=None if command.get("delta") is None else command.number("delta", 0.0),
        aggregation=_name_average(form, sizes),
        kl_coef=beta,
        kl_estimator=None if not beta else "k1" if in_reward else "k3",
        kl_place=None if not beta else "reward" if in_reward else "loss",
        advantage="gdpo" if scale == "gdpo" else names[estimator],
        advantage_scale=None if estimator in ("gae", "rloo") or scale == "gdpo" else scale,
        gamma=command.number("gamma", 1.0) if is_ppo else None,
        lam=command.number("lam", 0.95) if is_ppo else None,
        value_clip=command.number("cliprange_value", 0.2) if is_ppo else None,
        critic_lr=_read_schedule(command, 1).peak if is_ppo else None,
        importance_sampling=f"{mode} {command.number('rollout_importance_sampling_threshold', 2.0):g}" if mode else None,
        temperature=command.number("temperature", 0.9),
        top_p=command.number("top_p", 1.0),
        top_k=int(command.number("top_k", -1)),
        min_p=command.number("min_p", 0.0),
        prompt_length=_read_prompt_length(command),
        response_length=_read_response_length(command),
        infer_tp=tensor,
        rewards=tuple(sorted([*(_FUNCTIONS.get(name, name) for name in command.list_texts("reward_funcs")), *scored])),
    )


def _name_average(form: str, sizes: _Sizes) -> str:
    """Return what the losses of a step are averaged over; Megatron-SWIFT divides once, transformers each pass or rollout."""
    average = _LOSSES[form][2]
    if sizes.is_megatron or average != "token":
        return average
    if form == "bnpo":
        return "token of a micro-batch"
    return "token" if sizes.steps == sizes.iterations else "token of the rollout"


def _read_response_length(command: SourceCommand) -> int:
    """Return the longest response over all its turns."""
    one, turns = command.count("max_completion_length", 512), command.number("max_turns", 0)
    return one * int(turns) if command.has("multi_turn_scheduler") and turns else one


PROJECT = SourceProject("swift", "ms-swift", "4.6.0", _TABLES, _read, _build, _plan)
