"""Option files and commands of LLaMA-Factory: `llamafactory-cli train FILE name=value`, its `train.py`, stages pt to kto."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.llama_factory_data import describe_data
from mindspeed_rl.importers.llama_factory_mca import TABLE as TABLE_OF_MCA
from mindspeed_rl.importers.llama_factory_mca import describe_mca, read_layout, uses_mca
from mindspeed_rl.importers.llama_factory_options import STAGES, TABLES, TRACKERS_KEY
from mindspeed_rl.importers.llama_factory_weights import (
    find_base,
    list_muon_keys,
    name_adapter_form,
    name_adapter_start,
    name_formats,
    name_optimizer_state,
)
from mindspeed_rl.importers.options import SourceCommand, SourceProject, read_count, read_number, read_scalar
from mindspeed_rl.importers.recipe import ACTOR, ENGINE, Adapters, Batch, Layout, Placement, Rate, Recipe
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command, is_switched_on, read_flags
from mindspeed_rl.importers.source_files import find_file, require_file
from mindspeed_rl.importers.source_plan import Schedule
from mindspeed_rl.importers.swift_data import IMAGES, VISION
from mindspeed_rl.importers.training_engine import Split, choose_engine
from mindspeed_rl.importers.translators import (
    ALL_DEVICES,
    count_accelerated,
    join_words,
    read_mapping,
    read_option_file,
    require_one,
    set_trackers,
)
from mindspeed_rl.importers.trl import SCHEDULES
from mindspeed_rl.importers.writer import RECOMPUTE_LAYERS, find_lora_targets, list_expert_defaults, start_from_adapter

_PROGRAMS = ("llamafactory-cli", "lmf", "llamafactory.cli", "llamafactory.launcher", "llamafactory")
_SUFFIXES = (".yaml", ".yml", ".json")
#: subcommands of llamafactory-cli that start no training
_OTHERS = {
    "chat": "mindspeed-rl chat talks to a model",
    "webchat": "mindspeed-rl chat talks to a model",
    "api": "a server is started by vLLM",
    "webui": "press its button for the command, and import that",
    "export": "mindspeed-rl convert writes a Hugging Face folder",
    "eval": "mindspeed-rl evaluate measures a model",
    "env": "it trains nothing",
    "version": "it trains nothing",
    "help": "it trains nothing",
}
#: files of DeepSpeed that LLaMA-Factory ships, which leave all numbers to the command
_OWN_DEEPSPEED = frozenset(f"ds_{name}_config" for name in "z0 z1 z2 z3 z2_offload z3_offload".split())
#: stage here
_STAGES = {"pt": "pretrain", "sft": "sft", "rm": "orm", "dpo": "dpo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}
_LOSSES = {"rm": "ranking", "simpo": "simpo_sigmoid", "orpo": "orpo", "kto": "kto"}
_SWITCHES = {
    "USE_MEGATRON_BRIDGE": "the Megatron bridge of LLaMA-Factory, whose options are its own",
    "USE_V1": "the second engine of LLaMA-Factory (v1), whose options are its own",
    "USE_KT": "KTransformers",
    "USE_HYPER_PARALLEL": "HyperParallel",
}
#: programs that start a process on each device of the machine
_ON_ALL_DEVICES = frozenset((*_PROGRAMS, "launcher.py", "cli.py", "accelerate", "deepspeed"))
#: options that only the files of the second engine have
_OF_V1 = ("model", "model_class", "train_dataset", "dist_config", "peft_config", "init_config", "quant_config")
#: folder of a run without output_dir
_OUTPUT = "trainer_output"
#: names of LoRA's layers that are all of them
_ALL_LAYERS = ("all", "all-linear")


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Command(SourceCommand):
    """A command with what its files are searched by.

    Attributes:
        is_mca: Megatron trains, by mcore_adapter.
    """

    source: Command = Command((), {}, 0)
    is_mca: bool = False


def _read(commands: list[Command], devices: int | None) -> SourceCommand:
    """Return the training command of a script: of llamafactory-cli, of its scripts, or a file of options."""
    require_one([command for command in commands if _trains(command)])
    for command in commands:
        words = list(command.words)
        place = _find_program(words)
        if place is None:
            continue
        options = _read_options(command, words[place + 1 :])
        program = _choose_program(options)
        world = devices or _count_processes(command, words[:place], options)
        is_mca = uses_mca(options, command.environment)
        table = TABLES[program] | (TABLE_OF_MCA if is_mca else {})
        return _Command(program, options, command.environment, world, table, loop=command.loop, source=command,
                        is_mca=is_mca)  # fmt: skip
    raise ConfigError(["there is no command of LLaMA-Factory, such as llamafactory-cli train FILE, or a file of its options"])


def _trains(command: Command) -> bool:
    try:
        return _find_program(list(command.words)) is not None
    except ConfigError:  # it exports or serves
        return False


def _find_program(words: list[str]) -> int | None:
    """Return the place before the arguments of training; None for other commands.

    Raises:
        ConfigError: llamafactory-cli does something else.
    """
    for place, word in enumerate(words):
        name = Path(word).name
        if name in _PROGRAMS or (name in ("launcher.py", "cli.py") and "llamafactory" in word):
            following = words[place + 1] if place + 1 < len(words) else "help"
            if following == "train":
                return place + 1
            if following in _OTHERS:
                raise ConfigError([f"llamafactory-cli {following}: {_OTHERS[following]}"])
            return place
        if name in ("train.py", "train_bash.py"):
            return place
    is_file = bool(words) and Path(words[0]).suffix in _SUFFIXES
    return -1 if is_file else None


def _read_options(command: Command, words: list[str]) -> dict[str, object]:
    """Return the options of a file and those that replace them, or of a command line."""
    if not words or Path(words[0]).suffix not in _SUFFIXES:
        flags, leading = read_flags(tuple(words))
        if leading:
            raise ConfigError([f"{' '.join(leading)}: neither a file of options nor one of them"])
        return join_words(flags)
    values = read_option_file(require_file(command, "the file of options", words[0]))
    for word in words[1:]:
        name, equals, value = word.lstrip("-").partition("=")
        if not equals:
            raise ConfigError([f"{word}: after a file of options come name=value"])
        values[name] = read_scalar(value)
    return values


def _choose_program(options: Mapping[str, object]) -> str:
    """Return the table of a stage; preference losses with a stage here are programs of their own.

    Raises:
        ConfigError: there is no such stage, or nothing trains.
    """
    if others := [name for name in _OF_V1 if name in options]:
        raise ConfigError([f"{', '.join(others)}: options of the second engine of LLaMA-Factory (v1), which is not imported"])
    stage, form = str(options.get("stage") or "sft"), str(options.get("pref_loss") or "sigmoid")
    if stage == "ppo":
        raise ConfigError(
            ["stage ppo: not available here: LLaMA-Factory's PPO, which has no rollout engine; docs/algorithms.md has PPO"]
        )
    if stage not in STAGES or stage in ("orpo", "simpo"):
        raise ConfigError([f"stage {stage}: there is no such stage; pt, sft, rm, dpo and kto are"])
    if not options.get("do_train") or options["do_train"] in ("false", "False"):
        raise ConfigError(["do_train is not true, so that the command trains nothing"])
    return form if stage == "dpo" and form in ("orpo", "simpo") else stage


def _count_processes(command: Command, launcher: list[str], options: Mapping[str, object]) -> int:
    """Return the training processes: of accelerate or torchrun, of NPROC_PER_NODE, of the visible devices, else 1.

    Raises:
        ConfigError: it takes all devices of a machine, as it does by itself and with accelerate, whose number nothing says.
    """
    launch = join_words(read_flags(tuple(launcher))[0])
    environment = command.environment
    if (count := count_accelerated(command, launch)) is not None:
        return count
    if (per_node := launch.get("nproc_per_node", launch.get("num_gpus"))) is not None:
        return read_count("nproc_per_node", per_node) * read_count("nnodes", launch.get("nnodes", launch.get("num_nodes", 1)))
    if options.get("ray_num_workers") is not None:
        return read_count("ray_num_workers", options["ray_num_workers"])
    nodes = read_count("NNODES", read_scalar(environment.get("NNODES", "1")))
    if (processes := environment.get("NPROC_PER_NODE")) is not None:
        return read_count("NPROC_PER_NODE", read_scalar(processes)) * nodes
    visible = environment.get("ASCEND_RT_VISIBLE_DEVICES") or environment.get("CUDA_VISIBLE_DEVICES") or ""
    if listed := [item for item in visible.split(",") if item.strip()]:
        return len(listed) * nodes
    is_alone = is_switched_on(environment, "USE_RAY") or is_switched_on(environment, "USE_KT")
    is_alone |= bool(launcher) and not any(Path(word).name in _ON_ALL_DEVICES for word in launcher)
    if nodes > 1 or is_switched_on(environment, "FORCE_TORCHRUN") or not is_alone:
        raise ConfigError([ALL_DEVICES])
    return 1


# --- options that are read together -----------------------------------------------------------------------------------


def _read_schedule(command: _Command, total: int) -> Schedule:
    """Return the learning rate over optimizer steps.

    Raises:
        ConfigError: there is no such style.
    """
    name = command.text("lr_scheduler_type", "linear")
    if name not in SCHEDULES:
        raise ConfigError([f"lr_scheduler_type {name}: not available here: its form; available are {', '.join(SCHEDULES)}"])
    settings = read_mapping("lr_scheduler_kwargs", command.get("lr_scheduler_kwargs"))
    steps, ratio = command.number("warmup_steps", 0), command.number("warmup_ratio", 0.0)
    # transformers takes warmup_steps below 1 for a ratio
    warmup = int(steps) if steps >= 1 else math.ceil(total * (steps or ratio))
    if name == "inverse_sqrt" and not warmup:
        raise ConfigError(["lr_scheduler_type inverse_sqrt: not available here without a warm-up"])
    peak, floor = command.number("learning_rate", 5e-5), 0.0
    if name == "cosine_with_min_lr":
        least, rate = settings.pop("min_lr", None), settings.pop("min_lr_rate", None)
        given = "lr_scheduler_kwargs"
        floor = read_number(given, least or 0.0) if rate is None else read_number(given, rate) * peak
    if settings:
        raise ConfigError([f"lr_scheduler_kwargs {', '.join(settings)}: not available here"])
    # a constant rate has no warm-up in transformers
    unheated = name == "constant" and not command.is_mca
    return Schedule(peak, SCHEDULES[name], total, 0 if unheated else warmup, floor=floor)


def _count_steps(run: Import, command: _Command, step: int) -> int:
    """Return the optimizer steps of the run, over the rows of the settings."""
    limit = command.number("max_steps", -1)
    if limit > 0:
        return int(limit)
    if command.flag("streaming"):
        raise ConfigError(["streaming needs max_steps"])
    accumulated = command.count("gradient_accumulation_steps", 1)
    batches = math.ceil(run.settings.rows / (step // accumulated))
    whole = math.floor if command.is_mca else math.ceil
    return math.ceil(command.number("num_train_epochs", 3.0) * max(1, whole(batches / accumulated)))


def _describe(run: Import, command: SourceCommand) -> Recipe:
    """Return the run by the formulas of LLaMA-Factory and transformers' Trainer."""
    assert isinstance(command, _Command), "made by _read"
    stage = command.program
    if command.get("model_name_or_path") is None:
        raise ConfigError(["the command names no model: model_name_or_path is missing"])
    micro, model = command.count("per_device_train_batch_size", 8), find_base(run, command.text("model_name_or_path"))
    if VISION.search(model) and not IMAGES.search(model):
        others = "models with sound, and models of images but Qwen2.5-VL, Qwen3-VL and Qwen3.5"
        run.refuse(f"model_name_or_path {model}", others)
    named = replace(command, options={**command.options, "model_name_or_path": model})
    layout = read_layout(command) if command.is_mca else Layout("megatron")
    replicas = command.devices // layout.devices
    step = micro * command.count("gradient_accumulation_steps", 1) * replicas
    total = _count_steps(run, command, step)
    schedule = _read_schedule(command, total)
    has_limit = command.number("max_steps", -1) > 0
    # documents that are cut into samples have no number of rows that the data says
    in_samples = stage == "pt" and not has_limit
    if in_samples and not run.settings.knows_rows:
        run.refuse("num_train_epochs", "a length in epochs of documents that are cut into samples; write max_steps, or --rows")
    epochs = None if has_limit or in_samples else command.number("num_train_epochs", 3.0)
    path, written_by = describe_data(run, named, command.source, "dataset")
    lora = _read_adapters(run, command)
    loss, beta, losses = _read_loss(run, command)
    keys, notes = _read_evaluation(run, command)
    muon = list_muon_keys(run, command, adapts=lora is not None)
    _read_rest(run, command)
    length, saved = command.count("cutoff_len", 2048), command.number("save_steps", 500)
    saves = command.text("save_strategy", "steps") == "steps" and saved >= 1
    if command.flag("packing") and stage == "pt":
        length -= 1
    steps = command.number("warmup_steps", 0)
    warmup = int(steps) if steps >= 1 and schedule.warmup else None
    share = (steps or command.number("warmup_ratio", 0.0) or None) if warmup is None and schedule.warmup else None
    if share and epochs is None:
        # rounded up there, and down here
        share = (schedule.warmup + 0.01) / total
    defaults: list[tuple[str, object, str]] = [*(() if command.is_mca else list_expert_defaults(model, "LLaMA-Factory"))]
    if not command.has("output_dir"):
        reason = "the default of LLaMA-Factory"
        defaults += [("run_dir", _OUTPUT, reason), (f"{ACTOR}.save", f"{_OUTPUT}/checkpoints", reason)]
    if command.is_mca:
        describe_mca(run, command, model, adapts=lora is not None)
    elif not command.flag("disable_gradient_checkpointing"):
        reason = "LLaMA-Factory computes the layers again in the backward pass"
        defaults += [(key, value, reason) for key, value in RECOMPUTE_LAYERS.items()]
    if lora is None and not any(command.flag(name) for name in ("bf16", "pure_bf16", "use_badam", "fp8")):
        reason = "without bf16 the weights that train are in fp32, and so are their products"
        defaults.append((f"{ACTOR}.bf16", False, reason))
        if command.has("trust_remote_code"):  # a key of the engine, whose format is the trainer's
            defaults.append((f"{ENGINE}.dtype", "float32", reason))
    if stage != "pt":
        defaults.append((f"{ACTOR}.no_pad_to_seq_lengths", True, "rows are padded to the longest of a micro-batch"))
    if not command.is_mca:
        defaults += _choose_engine(run, command, stage, model, [] if lora is None else lora.targets)
    by_micro_batch = command.is_mca and stage == "sft" and not command.flag("calculate_per_token_loss")
    recipe = Recipe(
        stage=_STAGES[stage],
        step_samples=step,
        total_steps=total,
        loss=loss,
        beta=beta,
        sequence_length=length,
        aggregation="token of a micro-batch" if by_micro_batch else None,
        tp=layout.tensor,
        pp=layout.pipeline,
        cp=layout.context,
        ep=layout.expert,
        dp=replicas,
        lora_rank=0 if lora is None else command.count("lora_rank", 8),
        weight_decay=command.number("weight_decay", 0.0),
        clip_grad=command.number("max_grad_norm", 1.0),
        weights=name_formats(run, command, adapts=lora is not None),
        adapter_start=name_adapter_start(run, command, adapts=lora is not None and not command.has("adapter_name_or_path")),
        adapter_form=name_adapter_form(run, command, adapts=lora is not None),
        optimizer_state=name_optimizer_state(run, command),
        data=(path,),
        model=model,
        placement=Placement(actor=command.devices),
        batch=Batch(micro),
        rates=(Rate(peak=schedule.peak, style=schedule.style, floor=schedule.floor, warmup=warmup, warmup_share=share),),
        adapters=lora,
        train_iters=total if epochs is None else None,
        train_epochs=epochs,
        keys={
            f"{ACTOR}.data_path": path,
            f"{ACTOR}.seq_length": length,
            f"{ACTOR}.save_interval": math.ceil(saved) if saves else None,
            **{f"{ACTOR}.{name}": value for name, value in (losses | keys | muon).items()},
        },
        notes={
            "data_path": written_by,
            "global_batch_size": f"{step} rows of an optimizer step on {command.devices} devices, which --devices sets",
            "seq_length": "longer rows: LLaMA-Factory shortens question and answer; docs/data.md says what is cut here",
            "train_iters": f"over {run.settings.rows} rows" if in_samples else "",
            "lora_target_modules": "q_proj, k_proj and v_proj are one matrix here, and so are gate_proj and up_proj",
            "lr_warmup_fraction": "as a fraction of the run",
            "kto_beta": "the KL is of the batch of an optimizer step, there of a pass",
            **notes,
        },
        defaults=tuple(defaults),
    ).follow(schedule)
    return _start(run, command, recipe)


def _start(run: Import, command: SourceCommand, recipe: Recipe) -> Recipe:
    """Return the run that continues an adapter, where the command names one."""
    listed = command.get("adapter_name_or_path")
    if listed is None:
        return recipe
    names = [str(item).strip() for item in (listed if isinstance(listed, list) else str(listed).split(","))]
    if len(names) > 1 or recipe.adapters is None:
        reason = (
            "several adapters, of which all but the last are merged" if len(names) > 1 else "an adapter of a run without LoRA"
        )
        run.refuse("adapter_name_or_path", reason)
        return recipe
    # as there, the reference has no adapter
    reference = command.text("ref_model", recipe.model or "") if command.program in ("dpo", "kto") else None
    start_from_adapter(run, "adapter_name_or_path", names[0], reference)
    return replace(recipe, adapters=None)


def _read_adapters(run: Import, command: SourceCommand) -> Adapters | None:
    kind = command.text("finetuning_type", "lora")
    if kind == "full":
        return None
    if kind != "lora":
        run.refuse("finetuning_type", f"{kind}; lora and full are available")
        run.note_given("lora_target lora_rank lora_alpha lora_dropout", "see finetuning_type")
        return None
    listed = command.get("lora_target")
    names = [str(item).strip() for item in (listed if isinstance(listed, list) else str(listed or "all").split(","))]
    targets = find_lora_targets(["all-linear"] if set(names) & {*_ALL_LAYERS} else names)
    if not targets:
        raise ConfigError([f"lora_target {','.join(names)}: none of them is a projection of attention or MLP"])
    rank = command.count("lora_rank", 8)
    return Adapters(targets, rank, command.number("lora_alpha", 0) or 2 * rank, command.number("lora_dropout", 0.0))


def _read_loss(run: Import, command: SourceCommand) -> tuple[str, float | None, dict[str, object]]:
    """Return the name of the loss in a plan, its beta and its keys."""
    stage = command.program
    if stage in ("pt", "sft", "rm"):
        keys: dict[str, object] = {}
        if stage == "sft":
            keys = _pack(command) | ({"sft_loss_type": "dft"} if command.flag("use_dft_loss") else {})
        return _LOSSES.get(stage, "cross_entropy"), None, keys
    beta, term = command.number("pref_beta", 0.1), command.number("pref_ftx", 0.0)
    reference = command.text("ref_model") or None
    if stage == "kto":
        return "kto", beta, {"kto_beta": beta, "ref_model": reference}
    if stage == "orpo":
        if term:
            run.refuse("pref_ftx", "a second supervised term next to ORPO's")
        return "orpo", beta, {"orpo_lambda": beta}
    if stage == "simpo":
        ratio = command.number("simpo_gamma", 0.5) / beta
        return "simpo_sigmoid", beta, {"simpo_beta": beta, "gamma_beta_ratio": ratio, "pref_ftx": term}
    form = command.text("pref_loss", "sigmoid")
    if form not in ("sigmoid", "hinge", "ipo"):
        run.refuse("pref_loss", f"{form}; sigmoid, hinge, ipo, orpo and simpo are available")
    keys = {"dpo_loss_type": form, "dpo_beta": beta, "pref_ftx": term or None, "ref_model": reference}
    keys["dpo_label_smoothing"] = command.number("dpo_label_smoothing", 0.0) or None
    return form, beta, keys


def _pack(command: SourceCommand) -> dict[str, object]:
    """Return the keys of rows that preprocessing has joined; with neat_packing they do not see each other."""
    if command.flag("neat_packing"):
        return dict.fromkeys(("pack", "neat_pack", "reset_attention_mask", "reset_position_ids"), True)
    return {"pack": True} if command.flag("packing") else {}


def _read_evaluation(run: Import, command: _Command) -> tuple[dict[str, object], dict[str, str]]:
    """Return the keys of held-out data and their notes."""
    share, keys, notes = command.number("val_size", 0.0), dict[str, object](), dict[str, str]()
    if command.get("eval_dataset") is not None:
        keys["eval_data_path"], notes["eval_data_path"] = describe_data(run, command, command.source, "eval_dataset")
    elif share:
        if share >= 1 and not run.settings.knows_rows:
            run.refuse("val_size", f"{share:g} rows of data whose number nothing says; write a fraction, or --rows")
        # rows are those that train
        share = share if share < 1 else share / (run.settings.rows + share)
        keys["split"] = f"{100 * (1 - share):g},{100 * share:g},0"
        notes["split"] = "the last rows, there a random sample"
    interval = command.number("eval_steps", command.number("logging_steps", 500))
    if keys and command.text("eval_strategy", "no") == "steps" and interval >= 1:
        keys["eval_interval"] = int(interval)
    return keys, notes


def _read_rest(run: Import, command: _Command) -> None:
    """Set or note options that only need another one."""
    listed = command.list_texts("report_to")
    trackers = [name for name in listed if name not in ("none", "None")] + ["swanlab"] * command.flag("use_swanlab")
    if command.has("report_to"):
        set_trackers(run, "report_to", trackers)
        run.note_given("use_swanlab", "see report_to", changes_nothing=False)
    elif command.flag("use_swanlab"):
        run.translate("use_swanlab", {TRACKERS_KEY: trackers})
    run.note_given("use_swanlab", "off", changes_nothing=False)
    recomputes = not command.flag("disable_gradient_checkpointing") and not command.is_mca
    reason = "each layer is computed again in the backward pass" if recomputes else "nothing is computed again"
    run.note_given("disable_gradient_checkpointing", reason, changes_nothing=False)
    run.note_given("stage", f"stage {_STAGES[command.program]}", changes_nothing=False)
    for option, key in (("freeze_vision_tower", "freeze_vit"), ("freeze_multi_modal_projector", "freeze_aligner")):
        if not command.flag(option, default=True):
            run.translate(option, {f"{ACTOR}.{key}": False})
    run.note_given("max_samples", "a word of preprocessing, see data_path", changes_nothing=False)
    if command.flag("streaming"):
        run.note_given("streaming", "rows are ordered by the seed, there by a buffer")


def _choose_engine(
    run: Import, command: _Command, stage: str, model: str, targets: list[str]
) -> tuple[tuple[str, object, str], ...]:
    """Return the key of the training engine where ZeRO-3 divides all weights, and ours that does so can train the run."""
    divides = "ZeRO-3" if _read_deepspeed(run, command) == 3 else ""
    stage, kept = _STAGES[stage], "optimizer state is spread by use_distributed_optimizer"
    return choose_engine(
        run, "deepspeed", divides, stage=stage, model=model, layout=Split(targets), obstacles={}, otherwise=kept
    )[0]


def _read_deepspeed(run: Import, command: _Command) -> int:
    """Return the stage of ZeRO, and refuse what a file of DeepSpeed sets besides memory.

    Trainer checks that its other numbers equal the command's.
    """
    value = command.get("deepspeed")
    if value in (None, "", False):
        return 0
    content: Mapping[str, object]
    if isinstance(value, Mapping):
        content = {str(name): item for name, item in value.items()}
    elif (path := find_file(command.source, str(value))) is not None:
        content = read_option_file(path)
    elif Path(str(value)).stem in _OWN_DEEPSPEED:
        content = {"zero_optimization": {"stage": int(Path(str(value)).stem[4])}}
    else:
        content = read_option_file(require_file(command.source, "deepspeed", str(value)))
    if others := [name for name in ("optimizer", "scheduler", "tensor_parallel", "autotuning") if content.get(name)]:
        run.refuse("deepspeed", f"{', '.join(others)} of {value}; write the numbers of the command")
    zero = content.get("zero_optimization")
    found = zero.get("stage") if isinstance(zero, Mapping) else 0
    return found if isinstance(found, int) else 0


PROJECT = SourceProject("llama-factory", "LLaMA-Factory", "0.9.6", TABLES, _read, _describe, prefix="", switches=_SWITCHES)
