"""MindSpeed-LLM's FSDP2 programs: `train_fsdp2.py FILE --group.name value ...`, its stages pt and sft."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.llama_factory_data import OPTIONS as DATA_OPTIONS
from mindspeed_rl.importers.llama_factory_data import describe_data
from mindspeed_rl.importers.options import (
    Option,
    SourceCommand,
    by,
    each,
    no_effect,
    part,
    read_count,
    read_scalar,
    refused,
    same,
    to,
    with_others,
)
from mindspeed_rl.importers.recipe import ACTOR, BATCH, ENGINE, WARMUP, Batch, Placement, Rate, Recipe
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command, read_flags
from mindspeed_rl.importers.source_files import find_file, require_file
from mindspeed_rl.importers.source_plan import Schedule
from mindspeed_rl.importers.training_engine import Split, choose_engine
from mindspeed_rl.importers.translators import (
    describe_preprocessing,
    join_words,
    name_tokens,
    read_mapping,
    read_option_file,
    set_model,
    set_output,
    set_recomputation,
)
from mindspeed_rl.importers.writer import count_experts, list_expert_defaults

PROGRAM = "fsdp2"
#: groups of its files
GROUPS = ("model", "data", "parallel", "training", "optimization")
#: folder of dataset_info.json without an option
_DATASET_DIR = "./configs/fsdp2/data"
#: endings of files of documents; other names are prefixes of tokens, or folders
_RAW = (".parquet", ".json", ".jsonl", ".txt", ".csv", ".arrow")
#: way of dividing the tokens of a row there -> here
_CONTEXT = {"ulysses": "ulysses_cp_algo", "ring": "megatron_cp_algo", "kvallgather": "megatron_cp_algo"}
#: value of model_id whose layers or losses there are not here -> what they are
_OTHER_MODELS = {
    "mamba3": "Mamba-3, whose layers no supported model has",
    "longcat_flash_ngram": "LongCat-Flash, whose layers no supported model has",
    "step35": "Step-3.5, whose layers no supported model has",
    "deepseek_v4": "DeepSeek-V4 with prediction layers that train; engine: fsdp trains it without (docs/engines.md)",
    "glm52": "GLM-5.2 with indexers that train by a loss of their own; megatron_training.dsa_indexer_loss_coeff is ours",
}


def _choose_model(run: Import, option: str, value: object) -> None:
    """Note the module of a model, which computes what the published model does; refuse others by name."""
    if str(value) in _OTHER_MODELS:
        run.refuse(option, _OTHER_MODELS[str(value)])
    else:
        run.note(option, "config.json of the model has its layers", changes_nothing=False)


def _save_weights_only(run: Import, option: str, value: object) -> None:
    run.translate(option, {f"{ACTOR}.no_save_optim": bool(value), f"{ACTOR}.no_save_rng": bool(value)})


#: group -> its options; a name is in one group only
_TABLES: dict[str, dict[str, Option]] = {
    "model": {
        "model_name_or_path": by(set_model, "load = tokenizer_name_or_path = value"),
        "model_id": by(_choose_model, "the layers, which config.json has"),
        "tokenizer_name_or_path": with_others("tokenizer_name_or_path = value", off="the model's", by_nature=True),
        "trust_remote_code": to(f"{ENGINE}.trust_remote_code"),
        "train_from_scratch": refused("weights that start at random; leave megatron_training.load out of the run file"),
        "model_revision": refused("a revision of the hub", unless=("main",)),
        **each(
            "resize_vocab split_special_tokens add_tokens add_special_tokens new_special_tokens_config",
            refused("other tokens than the tokenizer has"),
        ),
        "init_special_tokens": no_effect("only added tokens read it"),
        "quant_recipe_name": with_others("the plan's weights", off="off"),
        **each(
            "quant_apply_modules quant_ignored_modules quant_converters enable_fsdp_low_precision_all_gather "
            "fsdp_low_precision_all_gather_mode",
            no_effect("only quant_recipe_name reads it"),
        ),
        **each(
            "init_model_with_meta_device cache_dir use_fast_tokenizer hf_hub_token ms_hub_token om_hub_token",
            no_effect("weights and tokenizer are read from the folder of the run file"),
        ),
    },
    "data": {
        **DATA_OPTIONS,
        "data_manager_type": with_others("rows of answers, or documents", off="the stage decides it", by_nature=True),
        "template": with_others("the prompt type of preprocessing", off="documents have no template", by_nature=True),
        "default_system": with_others("system message", off="it is a word of preprocessing", by_nature=True),
        "enable_thinking": with_others("the empty thought", off="it is a word of preprocessing", by_nature=True),
        "split": with_others("split = value", off="only documents read it"),
        "reset_attention_mask": with_others("reset_attention_mask = value", off="only documents read it"),
        "append_eod": with_others("--append-eod of preprocessing", off="it is a word of preprocessing", by_nature=True),
        "train_on_prompt": refused("questions that train"),
        "mask_history": refused("rows of which only the last answer trains"),
        "streaming": refused("rows in the order of a buffer; leave it out, and preprocessing writes all of them"),
        "tokenized_path": refused("tokens that MindSpeed-LLM wrote"),
        **each("eval_dataset eval_num_beams eval_on_each_dataset", no_effect("the program evaluates nothing")),
        "dataloader_type": same("one row after another", "single"),
        **each(
            "buffer_size overwrite_cache preprocessing_batch_size preprocessing_num_workers data_shared_file_system "
            "create_attention_mask_in_dataloader",
            no_effect("mindspeed-rl preprocess writes tokens once"),
        ),
        "no_shared_storage": to(f"{ACTOR}.no_shared_storage"),
    },
    "parallel": {
        "fsdp_size": with_others("the training engine"),
        "tp_size": same("the program stops with tensor parallelism", 1),
        "cp_size": part("context_parallel_size", off="1: rows are not divided"),
        "cp_type": part("context_parallel_algo", off="only cp_size above 1 reads it"),
        "recompute": by(set_recomputation, "each layer"),
        "param_dtype": to(f"{ACTOR}.bf16", values={"bf16": True, "fp32": False}, default="bf16"),
        "reduce_dtype": no_effect("gradients are reduced in fp32", "bf16", "fp32"),
        **each(
            "ep_size ep_fsdp_size ep_modules ep_fsdp_modules ep_dispatcher efsdp_shard_placement_fn",
            no_effect("engine fsdp divides the stacked experts over all devices; Megatron's key is expert_model_parallel_size"),
        ),
        **each(
            "fsdp_modules ignored_modules reshard_after_forward shard_placement_fn hook_modules fsdp_implementation "
            "tp_colwise tp_rowwise recompute_modules num_to_forward_prefetch num_to_backward_prefetch enable_chunk_batch "
            "chunk_mbs chunk_mbs_batch_dim chunk_mbs_modules chunk_mbs_arg_indexs chunk_mbs_kwarg_names",
            no_effect("it changes memory or speed, not numbers"),
        ),
    },
    "training": {
        "stage": with_others("stage", off="the stage of the run", by_nature=True),
        "output_dir": by(set_output, "run_dir = value, save = value/checkpoints"),
        "optimizer": same("AdamW", "adamw", "fused_adamw"),
        "lr": part("lr"),
        "lr_scheduler_type": part("lr_decay_style"),
        "min_lr": part("min_lr", off="only a cosine reads it"),
        "warmup_ratio": part(WARMUP, off="0: no warm-up"),
        "weight_decay": to(f"{ACTOR}.weight_decay", formula="norms and biases decay too there, not here", default=0.01),
        "adam_beta1": to(f"{ACTOR}.adam_beta1", default=0.9),
        "adam_beta2": to(f"{ACTOR}.adam_beta2", default=0.95),
        "adam_epsilon": to(f"{ACTOR}.adam_eps", default=1e-8),
        "max_grad_norm": to(f"{ACTOR}.clip_grad", default=1.0),
        **each("per_device_train_batch_size gradient_accumulation_steps", part(BATCH)),
        "max_steps": part("train_iters", off="-1: num_train_epochs is read"),
        "num_train_epochs": part("train_epochs", off="max_steps is read instead"),
        "disable_shuffling": with_others("no_shuffle = value", off="documents are always drawn at random", by_nature=True),
        "seed": to(f"{ACTOR}.seed", default=42),
        "router_aux_loss_coef": with_others("moe_aux_loss_coeff = value, in stage pt", off="only stage pt reads it"),
        "indexer_loss_coeff": no_effect("only GLM-5.2 and DeepSeek-V4 read it"),
        "mtp_loss_scaling_factor": no_effect("only DeepSeek-V4 has prediction layers that train"),
        "calculate_per_token_loss": no_effect("all samples of documents have as many tokens"),
        "save_steps": part("save_interval", off="the last checkpoint is always written"),
        "save_epochs": no_effect("a checkpoint at the end of an epoch; save_interval counts steps"),
        "save_total_limit": to(f"{ACTOR}.keep_last", default=3),
        "save_only_model": by(_save_weights_only, "no_save_optim = no_save_rng = value"),
        "save_hf_weights": to(f"{ACTOR}.save_hf", default=True),
        "save_async": to(f"{ACTOR}.async_save"),
        "resume_from_checkpoint": refused(
            "a checkpoint of MindSpeed-LLM's FSDP2 programs; the Hugging Face weights that they write start a run"
        ),
        "logging_steps": to(f"{ACTOR}.log_interval", default=1),
        **each("log_throughput log_cpu_memory", no_effect("metrics of every iteration go to the console and metrics.jsonl")),
        "deterministic": no_effect("npu_deterministic is our key for kernels that repeat their results bit by bit"),
        **each(
            "dataloader_num_workers dataloader_prefetch_factor dataloader_pin_memory dataloader_persistent_workers",
            no_effect("rows are read from token files"),
        ),
        "dataloader_drop_last": with_others("the length of an epoch", off="max_steps is read instead", by_nature=True),
        **each(
            "profile profile_step_start profile_step_end profile_ranks profile_level profile_export_type "
            "profile_data_simplification profile_with_cpu profile_with_stack profile_with_memory profile_record_shapes "
            "profile_save_path",
            no_effect("profiler_config records a profile"),
        ),
    },
    "optimization": {
        "fix_router": with_others("the plan's routing"),
        "pre_tokens": same("attention reads all tokens before", 1048576),
        "next_tokens": same("attention reads no later token", 0),
        **each(
            "use_fused_rmsnorm moe_grouped_gemm use_fused_rotary_pos_emb use_flash_attn use_sparse_flash_attn "
            "use_fused_lightning_indexer use_fused_lightning_indexer_loss use_ascend_mhc use_triton_swiglu_limit "
            "use_triton_gdn use_flash_gdn gdn_chunk_size chunk_loss_size use_triton_rmsnormgated",
            no_effect("the platform has one set of kernels; log-probs are computed in chunks"),
        ),
    },
}
TABLE: dict[str, Option] = {name: record for table in _TABLES.values() for name, record in table.items()}


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Command(SourceCommand):
    """A command with what its files are searched by."""

    source: Command = Command((), {}, 0)


def is_file_of_options(path: Path) -> bool:
    """Return True for a file with groups of these programs."""
    content = read_option_file(path)
    return bool(content) and content.keys() <= {*GROUPS} and not {"model", "training"}.isdisjoint(content)


def read_fsdp2(command: Command, words: list[str], launched: int | None, devices: int | None) -> SourceCommand:
    """Return the call of train_fsdp2.py; words of the command win over its file.

    Args:
        words: behind the program.
        launched: processes that the launcher starts; None where it does not say them.
        devices: of the user.

    Raises:
        ConfigError: the file is not here, or the program would stop at once.
    """
    flags, leading = read_flags(words)
    files = [word for word in leading if Path(word).suffix in (".yaml", ".yml")]
    values = _flatten(read_option_file(require_file(command, "train_fsdp2.py", files[0]))) if files else {}
    options = {_strip(name): value for name, value in {**values, **join_words(flags)}.items()}
    world = launched if launched is not None else read_count("parallel.fsdp_size", options.get("fsdp_size", 1))
    if devices is None and options.get("fsdp_size", 1) != world:
        size = options.get("fsdp_size", 1)
        raise ConfigError([f"fsdp_size is {size} of {world} processes: train_fsdp2.py stops unless it is all of them"])
    return _Command(PROGRAM, options, command.environment, devices or world, TABLE, loop=command.loop, source=command)


def _flatten(tree: Mapping[str, object]) -> dict[str, object]:
    """Return the options of a file as they are written in a command; what has no value is left to the default."""
    flat: dict[str, object] = {}
    for group, content in tree.items():
        if not isinstance(content, Mapping):
            continue  # the program reads groups only
        for name, value in content.items():
            if value is not None:
                flat[f"{group}.{name}"] = read_scalar(value) if isinstance(value, str) else value
    return flat


def _strip(name: str) -> str:
    """Return the name of an option without its group; another group's name, which the program does not read, stays whole."""
    group, _, rest = name.partition(".")
    return rest if rest in _TABLES.get(group, {}) else name


# --- the run ----------------------------------------------------------------------------------------------------------


def describe_fsdp2(run: Import, command: SourceCommand) -> Recipe:
    """Return the run by the formulas of the programs.

    Raises:
        ConfigError: the program would stop at once.
    """
    assert isinstance(command, _Command), "made by read_fsdp2"
    pretrains = command.text("stage", "sft") == "pt"
    if missing := [name for name in ("model_name_or_path", "output_dir", "dataset") if not command.get(name)]:
        raise ConfigError([f"{name} is missing, without which train_fsdp2.py does not start" for name in missing])
    if pretrains != (command.text("data_manager_type", "lf") == "mg"):
        raise ConfigError(["train_fsdp2.py stops unless stage pt has data_manager_type mg, and stage sft has lf"])
    context = command.count("cp_size", 1)
    if command.devices % context:
        raise ConfigError([f"cp_size {context} does not divide {command.devices} devices"])
    model, replicas = command.text("model_name_or_path"), command.devices // context
    micro = command.count("per_device_train_batch_size", 8)
    step = micro * command.count("gradient_accumulation_steps", 1) * replicas
    total, epochs, limit = _count_steps(run, command, micro, replicas, pretrains=pretrains)
    path, written_by = (_describe_documents if pretrains else _describe_rows)(run, command)
    schedule, stage = _read_schedule(command, total), "pretrain" if pretrains else "sft"
    length = command.count("cutoff_len", 2048)
    keys: dict[str, object] = {"context_parallel_size": context if context > 1 else None}
    if context > 1:
        keys["context_parallel_algo"] = _CONTEXT.get(command.text("cp_type", "ulysses"), "megatron_cp_algo")
    keys |= _read_documents(run, command) if pretrains else _read_rows(run, command)
    if not pretrains and (command.flag("packing") or command.flag("neat_packing")):
        length -= 1  # of a pack, as the program counts it
    _note_rest(run, command, pretrains=pretrains)
    saved = int(command.number("save_steps", 500))
    return Recipe(
        stage=stage,
        step_samples=step,
        total_steps=total,
        loss="cross_entropy",
        sequence_length=length,
        cp=context,
        dp=replicas,
        lora_rank=0,
        weight_decay=command.number("weight_decay", 0.01),
        clip_grad=command.number("max_grad_norm", 1.0),
        weights=f"products in {command.text('quant_recipe_name')}" if command.get("quant_recipe_name") else None,
        routing="evenly over the experts" if command.flag("fix_router") and count_experts(model) != 0 else None,
        data=(path,),
        model=model,
        placement=Placement(actor=command.devices),
        batch=Batch(micro),
        rates=(_read_rate(command, schedule, total, epochs),),
        train_iters=total if epochs is None else None,
        train_epochs=epochs,
        keys={
            f"{ACTOR}.data_path": path,
            f"{ACTOR}.seq_length": length,
            f"{ACTOR}.save_interval": saved if saved > 0 else None,
            **{f"{ACTOR}.{name}": value for name, value in keys.items()},
        },
        notes={
            "data_path": written_by,
            "global_batch_size": f"{step} rows of an optimizer step on {command.devices} devices, which --devices sets",
            "seq_length": "" if pretrains else "longer rows: the program shortens question and answer; see docs/data.md",
            "train_iters": limit,
        },
        defaults=(
            *list_expert_defaults(model, "train_fsdp2.py"),
            *((f"{ACTOR}.no_pad_to_seq_lengths", True, "rows are padded to the longest of a micro-batch"),) * (not pretrains),
            *_choose_engine(run, command, stage, model, context),
        ),
    ).follow(schedule)


def _count_steps(
    run: Import, command: SourceCommand, micro: int, replicas: int, *, pretrains: bool
) -> tuple[int, float | None, str]:
    """Return the optimizer steps of the run, its epochs where they are its length, and what a number of steps depends on.

    Raises:
        ConfigError: nothing says the number of steps.
    """
    steps, epochs = command.number("max_steps", -1), command.number("num_train_epochs", 3.0)
    accumulated = command.count("gradient_accumulation_steps", 1)
    if steps > 0:
        rows = math.ceil(steps * micro * accumulated * replicas / max(1, int(epochs)))
        ends = f"there the run ends after {int(epochs)} epochs if these are fewer steps, with fewer than about {rows} rows"
        return int(steps), None, "" if pretrains else ends
    if pretrains:
        raise ConfigError(["max_steps is missing: the program counts documents where it should count samples; write max_steps"])
    if epochs != int(epochs):
        raise ConfigError([f"num_train_epochs {epochs:g}: train_fsdp2.py trains whole epochs only; write max_steps"])
    whole = math.floor if command.flag("dataloader_drop_last") else math.ceil
    batches = whole(whole(run.settings.rows / replicas) / micro)
    return math.ceil(batches / accumulated) * int(epochs), epochs, ""


def _read_schedule(command: SourceCommand, total: int) -> Schedule:
    """Return the learning rate over optimizer steps; only a cosine has a floor.

    Raises:
        ConfigError: there is no such style.
    """
    style = command.text("lr_scheduler_type", "cosine")
    if style not in ("cosine", "linear", "constant"):
        raise ConfigError([f"lr_scheduler_type {style}: there is no such style; cosine, linear and constant are"])
    floor = command.number("min_lr", 1e-6) if style == "cosine" else 0.0
    warmup = int(total * command.number("warmup_ratio", 0.03))
    return Schedule(command.number("lr", 1e-5), style, total, warmup, floor=floor)


def _read_rate(command: SourceCommand, schedule: Schedule, total: int, epochs: float | None) -> Rate:
    share = command.number("warmup_ratio", 0.03)
    return Rate(
        peak=schedule.peak,
        style=schedule.style,
        floor=schedule.floor,
        warmup=schedule.warmup if epochs is None and schedule.warmup else None,
        warmup_share=share if epochs is not None and schedule.warmup else None,
    )


def _describe_rows(run: Import, command: _Command) -> tuple[str, str]:
    """Return the prefix of supervised rows, and the command that writes it; data and templates are LLaMA-Factory's."""
    text = command.get("dataset")
    inline = read_mapping("dataset", text) if str(text).strip().startswith("{") or isinstance(text, Mapping) else {}
    tokenizer = command.text("tokenizer_name_or_path", command.text("model_name_or_path"))
    options = {"dataset_dir": _DATASET_DIR, **command.options, "model_name_or_path": tokenizer}
    if command.text("template") == "gpt":
        run.note("template", "the chat template of the tokenizer; that its text is the template's is not checked")
        options.pop("template", None)
    rows = SourceCommand("sft", options | ({"dataset": inline} if inline else {}), command.environment, command.devices)
    return describe_data(run, rows, command.source, "dataset", reads_images=False)


def _describe_documents(run: Import, command: _Command) -> tuple[str, str]:
    """Return the prefix of documents, and the command that writes it.

    Raises:
        ConfigError: no file is named, or a name may be a prefix of tokens or a folder of documents.
    """
    named = read_mapping("dataset", command.get("dataset")).get("file_name")
    files = [str(item).strip() for item in (named if isinstance(named, list) else str(named or "").split(","))]
    files = [name for name in files if name]
    if not files:
        raise ConfigError(['dataset of stage pt is {"file_name": FILE}, and no file is named'])
    if len(files) > 1 and any(isinstance(read_scalar(name), (int, float)) for name in files):
        run.refuse("dataset", "shares of several data sets; data_path of a run file takes shares and prefixes")
    given = run.settings.variables.get("DATASET")
    tokens = given or next((name for name in files if find_file(command.source, f"{name}.idx") is not None), None)
    if tokens is not None:
        return tokens, "the prefix of its tokens"
    if unclear := [name for name in files if Path(name).suffix not in _RAW and not Path(name).is_dir()]:
        name = f"dataset: {unclear[0]} is a prefix of tokens or a folder of documents, and neither is here"
        raise ConfigError([f"{name}; write --set DATASET=PREFIX for tokens"])
    path = name_tokens(files[0], others=len(files) > 1)
    end = " --append-eod" if command.flag("append_eod") else ""
    tokenizer = command.text("tokenizer_name_or_path", command.text("model_name_or_path"))
    words = f" --handler-name GeneralPretrainHandler --json-keys text{end}"
    return f"{path}_text_document", describe_preprocessing(",".join(files), path, tokenizer, words)


def _read_rows(run: Import, command: SourceCommand) -> dict[str, object]:
    """Return the keys of supervised rows."""
    keys: dict[str, object] = {}
    if command.flag("neat_packing"):
        keys |= dict.fromkeys(("pack", "neat_pack", "reset_attention_mask", "reset_position_ids"), True)
    elif command.flag("packing"):
        keys["pack"] = True
    if share := command.number("val_size", 0.0):
        if share > 1 and not run.settings.knows_rows:
            run.refuse("val_size", f"{share:g} rows of data whose number nothing says; write a fraction, or --rows")
        share = share if share <= 1 else share / (run.settings.rows + share)
        keys["split"] = f"{100 * (1 - share):g},{100 * share:g},0"
    if command.has("disable_shuffling"):
        run.translate("disable_shuffling", {f"{ACTOR}.no_shuffle": command.flag("disable_shuffling")})
    run.note_given("split reset_attention_mask append_eod", "only documents read it")
    run.note_given("router_aux_loss_coef", "only stage pt reads it")
    return keys


def _read_documents(run: Import, command: SourceCommand) -> dict[str, object]:
    """Return the keys of documents.

    Raises:
        ConfigError: the program would stop at once.
    """
    if command.flag("reset_attention_mask") and not command.flag("append_eod"):
        raise ConfigError(["reset_attention_mask: train_fsdp2.py stops without append_eod"])
    for option, key in (("split", "split"), ("reset_attention_mask", "reset_attention_mask")):
        if command.has(option):
            run.translate(option, {f"{ACTOR}.{key}": command.get(option)})
    if command.has("router_aux_loss_coef") and count_experts(command.text("model_name_or_path")) != 0:
        run.translate("router_aux_loss_coef", {f"{ACTOR}.moe_aux_loss_coeff": command.number("router_aux_loss_coef", 0.0)})
    run.note_given("router_aux_loss_coef", "the model has no experts")
    names = "template default_system enable_thinking packing neat_packing mix_strategy interleave_probs max_samples val_size"
    run.note_given(names, "documents are read as they are")
    return {}


def _note_rest(run: Import, command: SourceCommand, *, pretrains: bool) -> None:
    """Set or note options that only need another one."""
    if command.get("tokenizer_name_or_path"):
        run.translate("tokenizer_name_or_path", {f"{ACTOR}.tokenizer_name_or_path": command.text("tokenizer_name_or_path")})
    run.note_given("stage", f"stage {'pretrain' if pretrains else 'sft'}", changes_nothing=False)
    run.note_given("quant_recipe_name", "see weights of the plan" if command.get("quant_recipe_name") else "off")
    run.note_given("fix_router", "tokens go where the router sends them", changes_nothing=False)
    run.note_given("max_samples", "a word of preprocessing, see data_path", changes_nothing=False)


def _choose_engine(
    run: Import, command: SourceCommand, stage: str, model: str, context: int
) -> tuple[tuple[str, object, str], ...]:
    """Return the key of the engine that divides all weights, where it can train the run."""
    kind, module = command.text("cp_type", "ulysses"), command.text("model_id")
    obstacles = {
        f"attention by cp_type {kind}": context > 1 and kind != "ulysses",
        "layers that compute whole rows only": context > 1 and module == "qwen3_next",
    }
    layout = Split((), context)
    return choose_engine(
        run, "fsdp_size", "FSDP2", stage=stage, model=model, layout=layout, obstacles=obstacles, otherwise=""
    )[0]  # fmt: skip

