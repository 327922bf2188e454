"""Commands of ms-swift: `swift` and `megatron` rlhf (grpo, dpo, ppo, rm, simpo), sft, pt; `swift rollout`, deploy, infer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import SourceCommand, SourceProject
from mindspeed_rl.importers.recipe import ACTOR, ENGINE, RL, WARMUP, Adapters, Batch, Placement, Prediction, Recipe
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command
from mindspeed_rl.importers.source_files import find_file
from mindspeed_rl.importers.swift_commands import (
    MEGATRON,
    OTHER_PROGRAMS,
    OTHERS,
    SERVING,
    STAGES,
    TABLES,
    WITH_ROLLOUTS,
    choose_command,
)
from mindspeed_rl.importers.swift_data import IMAGES, VISION, read_data
from mindspeed_rl.importers.swift_plugins import ROWS, list_absent, list_additions, list_made_rows
from mindspeed_rl.importers.swift_rollouts import describe_gkd, describe_grpo, describe_ppo
from mindspeed_rl.importers.swift_sizes import (
    MEGATRON_NAMES,
    TRANSFORMERS_NAMES,
    Sizes,
    count_interval,
    read_rate,
    read_rows,
    read_schedule,
    read_tuner,
)
from mindspeed_rl.importers.swift_supervised import describe_dataset
from mindspeed_rl.importers.swift_templates import find_unknown_weights, is_of_hermes
from mindspeed_rl.importers.swift_weights import (
    name_adapter_form,
    name_adapter_start,
    name_embedding_noise,
    name_formats,
    name_optimizer_state,
    name_positions,
    name_tower,
    note_chat_template,
)
from mindspeed_rl.importers.training_engine import Split, choose_engine
from mindspeed_rl.importers.translators import read_mapping, read_option_file
from mindspeed_rl.importers.writer import (
    RECOMPUTE_LAYERS,
    UNSET_RANK,
    count_experts,
    find_lora_targets,
    list_expert_defaults,
    note_prediction,
    start_from_adapter,
)

# --- the run ------------------------------------------------------------------------------------------------------------


def _describe(run: Import, command: SourceCommand) -> Recipe | None:
    """Return the run by ms-swift's formulas; None for a command that serves or generates."""
    kind = command.program.removeprefix(MEGATRON)
    for name in ("model", "dataset", "val_dataset"):
        for text in command.list_texts(name):
            if VISION.search(text) and not IMAGES.search(text):
                run.refuse(f"--{name} {text}", "data with video or audio, and models of images but Qwen2.5-VL and Qwen3-VL")
    if "diffusion" in (model := command.text("model")).lower():
        run.refuse(f"--model {model}", "a model that denoises; those that predict the next token are trained")
    if kind in SERVING:
        _write_serving(run, command, kind)
        return None
    _read_plugins(run, command, kind)
    for name in command.environment.get(OTHERS, "").split():
        run.note(f"swift {name}", OTHER_PROGRAMS[name])
    shared = _describe_shared(run, command, kind, Sizes(command))
    _note_calculation(run, command, kind)
    if shared.rollout_completions is None:
        return describe_dataset(run, command, kind, shared)
    describe = {"ppo": describe_ppo, "grpo": describe_grpo, "gkd": describe_gkd}[kind]
    return describe(run, command, shared)


def _describe_shared(run: Import, command: SourceCommand, kind: str, sizes: Sizes) -> Recipe:
    """Return what all kinds of training have."""
    rows, knows_rows = read_rows(command, run.settings)
    total = sizes.count_steps(command, rows)
    schedule = read_schedule(command, total)
    engine = MEGATRON_NAMES if sizes.is_megatron else TRANSFORMERS_NAMES
    tuner, adapters = read_tuner(command), command.list_texts("adapters")
    each = f"{sizes.steps} steps an iteration" if sizes.steps > 1 else ""
    note = f"{sizes.step} rows of an optimizer step on {command.devices} devices"
    note += "" if sizes.rollout is None else f", {sizes.steps} steps of a rollout of {sizes.rollout} completions"
    has_limit = command.number(engine.limit, -1) > 0 and (not sizes.is_megatron or not command.has("num_train_epochs"))
    counts_rows = not has_limit and (knows_rows or kind == "pt")
    if has_limit:
        run.note_given("num_train_epochs", f"--{engine.limit} is read instead")
    else:
        run.note_given(engine.limit, "--num_train_epochs is read")
    warmup = f"{schedule.warmup} steps of warm-up, from {schedule.peak:g} to {schedule.floor:g}"
    epochs = None if has_limit or counts_rows else command.number("num_train_epochs", 3.0)
    rate = read_rate(command, sizes, schedule, total, engine, in_epochs=epochs is not None)
    paths, notes = read_data(run, command, kind)
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
    if tuner == "lora_llm" and not sizes.is_megatron:
        defaults += [(f"{ACTOR}.{name}", False, "tower and projector train there") for name in ("freeze_vit", "freeze_aligner")]
    defaults += list_expert_defaults(command.text("mcore_model") or command.text("model"), "ms-swift")
    defaults += _choose_engine(run, command, kind, sizes, [] if lora is None else lora.targets)
    _read_agent_template(run, command)
    note_chat_template(run, command)
    if command.has("virtual_pipeline_model_parallel_size"):
        form = "chunks by their number; write num_layers_per_virtual_pipeline_stage"
        run.refuse("--virtual_pipeline_model_parallel_size", form)
    return Recipe(
        stage=STAGES[kind],
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
        layers=name_positions(run, command),
        weights=name_formats(run, command, adapts=tuner != "full"),
        adapter_start=name_adapter_start(run, command, adapts=tuner != "full" and not adapters),
        adapter_form=name_adapter_form(run, command, adapts=tuner != "full"),
        tower=name_tower(run, command),
        optimizer_state=name_optimizer_state(run, command),
        embedding_noise=name_embedding_noise(run, command),
        early_stop=_name_early_stop(run, command),
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
            f"{ACTOR}.save_interval": count_interval(command, sizes, "save_steps", 500),
            f"{ACTOR}.eval_interval": count_interval(command, sizes, "eval_steps", 0),
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


def _read_plugins(run: Import, command: SourceCommand, kind: str) -> None:
    """Refuse what Python files of the command add to a run besides functions that its options name."""
    option, files = "--external_plugins", Command((), {}, 0, folder=run.settings.folder)
    if rows := list_made_rows(files, command.options):
        form = f"rows of {', '.join(rows)} that its code makes (register_dataset): write them to a file, --set {ROWS}=FILE"
        run.refuse(option, form)
    elif additions := list_additions(files, command.options):
        run.refuse(option, f"{' and '.join(additions)} that its code registers; prompt_type_path names a template of yours")
    absent = list_absent(files, command.options)
    if absent and kind not in WITH_ROLLOUTS:
        run.refuse(option, f"{', '.join(absent)} is not here, and may make the rows of the data; run the import where it is")
    if kind not in WITH_ROLLOUTS:
        run.take(f"{RL}.external_plugins", "its code makes no rows, models or templates of this run")


def _name_early_stop(run: Import, command: SourceCommand) -> str | None:
    """Return the saves without a better result after which a run ends; None where nothing ends it."""
    interval = int(command.number("early_stop_interval", 0))
    if not interval:
        return None
    run.note_given("early_stop_interval", "see early_stop of the plan", changes_nothing=False)
    return f"{interval} saves without a better {command.text('metric_for_best_model', 'loss')}"


def _read_order(run: Import, command: SourceCommand) -> str | None:
    """Return the order of the rows where they do not come by chance."""
    if command.flag("streaming"):
        if command.number("max_steps", -1) < 1 and command.number("train_iters", -1) < 1:
            raise ConfigError(["--streaming needs a length in steps: --max_steps or --train_iters"])
        run.note_given("streaming", "rows are ordered by the seed, there by a buffer")
    run.note_given("streaming", "off")
    order = command.text("train_sampling_strategy", "random")
    if order not in ("random", "group_by_length"):
        run.refuse("--train_sampling_strategy", f"{order} rows; random and group_by_length are available")
    is_sorted = command.flag("group_by_length") or order == "group_by_length"
    run.note_given("group_by_length train_sampling_strategy", "see row_order of the plan", changes_nothing=False)
    return "rows of similar lengths together" if is_sorted else None


#: note of the keys of an offload
_OFFLOADED = "the source has gradients and optimizer states in host memory, and its host makes the update"


def _choose_engine(
    run: Import, command: SourceCommand, kind: str, sizes: Sizes, targets: list[str]
) -> tuple[tuple[str, object, str], ...]:
    """Return the key of the training engine where the command divides all weights, and our engine that does so can train it."""
    names = "fsdp fsdp_config"
    divides = "" if sizes.is_megatron else _find_division(run, command)
    obstacles = {
        "another optimizer than AdamW": command.text("optimizer", "adam") != "adam",
        "a reference that moves": command.flag("sync_ref_model"),
        "prediction layers": bool(command.get("mtp_num_layers")),
    }
    stage, model = STAGES[kind], command.text("model")
    defaults, reason = choose_engine(
        run, names, divides, stage=stage, model=model, layout=Split(targets, sizes.cp), obstacles=obstacles, otherwise="off"
    )
    if reason and "--deepspeed" in run.translated:
        run.translated["--deepspeed"] += f"; {reason}"
    if not defaults:
        return ()
    return (*defaults, *((f"{ACTOR}.{name}", value, _OFFLOADED) for name, value in _list_offloaded(run, command).items()))


def _read_division(run: Import, command: SourceCommand, option: str) -> Mapping[str, object]:
    """Return the settings of an option that names a file or holds JSON; nothing for a name or words."""
    text = command.text(option)
    path = find_file(Command((), {}, 0, folder=run.settings.folder), text) if text.endswith(".json") else None
    if path is not None:
        return read_option_file(path)
    return read_mapping(option, text) if text.startswith("{") else {}


def _list_offloaded(run: Import, command: SourceCommand) -> dict[str, object]:
    """Return the keys of what FSDP or ZeRO-3 has in host memory: gradients, and optimizer states that the host updates."""
    settings = [_read_division(run, command, name) for name in ("fsdp", "fsdp_config")]
    nested = [inner for entry in settings if isinstance(inner := entry.get("fsdp_config"), Mapping)]
    words = [command.text("fsdp"), *(str(entry.get("fsdp", "")) for entry in settings)]
    by_fsdp = any(entry.get(name) is True for entry in (*settings, *nested) for name in ("offload_params", "cpu_offload"))
    by_fsdp |= any("offload" in text.split() for text in words)
    zero = _read_division(run, command, "deepspeed").get("zero_optimization")
    states = zero.get("offload_optimizer") if isinstance(zero, Mapping) else None
    by_zero = command.text("deepspeed") == "zero3_offload" or (isinstance(states, Mapping) and states.get("device") == "cpu")
    if not (by_fsdp or by_zero):
        return {}
    return {"offload_gradients": True, "optimizer_offload_fraction": 1.0}


def _find_division(run: Import, command: SourceCommand) -> str:
    """Return what divides all weights over the devices: FSDP or ZeRO-3; empty where nothing does."""
    if command.get("fsdp") or command.get("fsdp_config"):
        return "FSDP"
    value = command.text("deepspeed")
    zero = _read_division(run, command, "deepspeed").get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else 3 if value.startswith("zero3") else 0
    return "ZeRO-3" if stage == 3 else ""


def _read_agent_template(run: Import, command: SourceCommand) -> None:
    """Note a form of tools that is the one of the tokenizer's own template; others are refused."""
    name = command.text("agent_template")
    if name == "hermes" and is_of_hermes(command.text("model")):
        run.note_given("agent_template", "the tokenizer's chat template writes tools so", changes_nothing=False)
    elif name:
        run.refuse("--agent_template", f"{name}: another form of tools than in the tokenizer's chat template")


def _read_capacity(run: Import, command: SourceCommand) -> str | None:
    """Return the tokens that an expert takes, where there is a limit and the model may have experts."""
    factor = command.number("moe_expert_capacity_factor", -1.0)
    names = "moe_expert_capacity_factor moe_pad_expert_input_to_capacity"
    run.note_given(names, "see expert_capacity of the plan" if factor > 0 else "off", changes_nothing=False)
    has_experts = count_experts(command.text("mcore_model") or command.text("model")) != 0
    return f"{factor:g} x the mean, further ones are dropped" if factor > 0 and has_experts else None


def _note_calculation(run: Import, command: SourceCommand, kind: str) -> None:
    """Note options that the stage answers: what trains, and how losses are averaged."""
    stage, unknown = STAGES[kind], find_unknown_weights(command, kind)
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


def _read_adapters(run: Import, command: SourceCommand) -> Adapters | None:
    tuner, names = read_tuner(command), "target_modules lora_rank lora_alpha lora_dropout"
    if tuner == "full":
        run.note_given("tuner_type", "all weights train", changes_nothing=False)
        return None
    if tuner not in ("lora", "lora_llm"):
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
    elif kind in WITH_ROLLOUTS:
        reason = "in RL ms-swift computes no loss of prediction layers; megatron_training.mtp_num_layers trains them"
        run.note_given(names, reason)
    elif kind not in ("sft", "pt"):
        run.refuse("--mtp_num_layers", "prediction layers next to a preference loss")
    else:
        factor = command.number("mtp_loss_scaling_factor", 0.1)
        return Prediction(command.count("mtp_num_layers", 1), factor, detaches=False)
    return None


# --- after the run file has been written ------------------------------------------------------------------------------


def _finish(run: Import, command: SourceCommand) -> None:
    """Start from the adapters of the command, and name the folder of the run."""
    kind = command.program.removeprefix(MEGATRON)
    if kind in SERVING:
        return
    adapters = command.list_texts("adapters")
    model = run.get(f"{ACTOR}.load") or next(iter(adapters), None)
    if model is None:
        raise ConfigError(["the command names no model: --model is missing"])
    _start_from_adapters(run, command, adapters)
    folder = f"{'megatron_output' if command.program.startswith(MEGATRON) else 'output'}/{Path(str(model)).name}"
    run.add_default("run_dir", folder, "ms-swift's folder of the model")
    run.add_default(f"{ACTOR}.save", f"{run.get('run_dir')}/checkpoints", "ms-swift always saves")


def _start_from_adapters(run: Import, command: SourceCommand, adapters: list[str]) -> None:
    """Start from the adapters of the command; the reference is the model without them, or has adapters of its own."""
    references = command.list_texts("ref_adapters")
    for option, folders in (("--adapters", adapters), ("--ref_adapters", references)):
        if len(folders) > 1:
            run.refuse(option, "several adapters at once; merge all but one first")
        elif folders and read_tuner(command) == "full":
            run.refuse(option, "adapters next to --tuner_type full, which trains all weights")
    if references and not adapters:
        run.refuse("--ref_adapters", "adapters only of the reference; write ref_config.load and ref_config.base_model")
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
        run.next_command = f"{SERVING[kind]} {' '.join(words)} --tensor-parallel-size {tensor} --hf-chat-template  #"
    else:
        if command.has("adapters"):
            run.refuse("--adapters", "a server that starts with adapters; the run sends it their weights")
        run.next_command = f"mindspeed-rl rollout --model {model} {' '.join(words)} --config-name".replace("  ", " ")


PROJECT = SourceProject("swift", "ms-swift", "4.6.0", TABLES, choose_command, _describe, _finish)
