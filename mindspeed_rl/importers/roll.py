"""Files and commands of ROLL: `start_NAME_pipeline.py --config_path DIR --config_name NAME`, or the YAML.

Rollouts (RLVR with texts and images, on-policy distillation), distillation on the answers of rows, SFT and DPO are imported;
agents are refused by name. What scores in ROLL is a worker class of a domain, so the user names the function that scores here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import SourceCommand, SourceProject
from mindspeed_rl.importers.recipe import ACTOR, ENGINE, RL, SAMPLING, Adapters, Batch, Layout, Placement, Recipe, Rewards
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.roll_distillation import describe_distillation
from mindspeed_rl.importers.roll_objective import describe_objective, read_rate
from mindspeed_rl.importers.roll_options import INFER, SFT, TABLES, TRAIN, find_records
from mindspeed_rl.importers.roll_rows import describe_rows
from mindspeed_rl.importers.shell import Command, make_mark
from mindspeed_rl.importers.source_files import (
    find_file,
    flatten_options,
    list_folders,
    load_yaml,
    refuse_changed,
    require_file,
)
from mindspeed_rl.importers.training_engine import keep_fsdp
from mindspeed_rl.importers.translators import require_one
from mindspeed_rl.importers.writer import RECOMPUTE_LAYERS, find_lora_targets, has_experts, list_expert_defaults

#: program of ROLL -> what its file is read as
_PIPELINES = {
    "start_rlvr_pipeline": "rlvr",
    "start_rlvr_vl_pipeline": "rlvr",
    "start_onpolicy_distill_pipeline": "rlvr",
    "start_distill_pipeline": "distill",
    "start_distill_vl_pipeline": "distill",
    "start_dpo_pipeline": "dpo",
    "start_sft_pipeline": "sft",
}
_DISTILLS = "start_onpolicy_distill_pipeline"
#: variables of the user: what scores, and the prompts of several domains in one file
_REWARD, _PROMPTS = "REWARD", "PROMPTS"
_FORMATS: dict[str | None, str | None] = {None: None, "fp32": None, "float32": None, "bf16": "bfloat16", "bfloat16": "bfloat16"}
_MOST_DEVICES = 100_000
_IMAGES = re.compile(r"qwen-?(2\.5|3)-?vl", re.IGNORECASE)
#: models of images, video or sound that there are not
_OTHER_IMAGES = re.compile(r"(?i)(^|[^a-z])(vl|omni|vision|audio)([^a-z]|$)")
#: families whose weight of the balancing loss ROLL's Megatron reads from config.json, as it is read here
_BALANCED = re.compile(r"(?i)qwen|mixtral")
#: parts of a model of images that do not train -> whether tower and projector do
_FROZEN = {
    "": (False, False),
    "vision_model": (True, True),
    "model.visual": (True, True),
    "visual": (True, True),
    "vision_model.blocks,vision_model.patch_embed": (True, False),
}

# -------------------------------------------------------------------------------------------------------------------- read


def _read(commands: list[Command], devices: int | None) -> SourceCommand:
    """Return the pipeline of a command or a file.

    Raises:
        ConfigError: there is none, or it is another pipeline.
    """
    if len(commands) == 1 and len(commands[0].words) == 1 and Path(commands[0].words[0]).suffix in (".yaml", ".yml"):
        command, path, program = commands[0], require_file(commands[0], "ROLL", commands[0].words[0]), ""
    else:
        command, path, program = _find_file(commands)
    tree = _load(command, path)
    kind = _find_kind(tree, path, program)
    options = flatten_options(_resolve(tree, path, command))
    if program == _DISTILLS or "student_train" in tree:
        # ROLL gives the roles these names too
        roles = {"student_train": TRAIN[:-1], "student_infer": INFER[:-1]}
        options = {".".join([roles.get(role := name.partition(".")[0], role), *name.split(".")[1:]]): value
                   for name, value in options.items()}  # fmt: skip
        options.setdefault("is_pure_opd", True)
    if kind == "distill":
        options = {re.sub(r"^student\.", TRAIN, name): value for name, value in options.items()}
        options |= {"pretrain": options.pop("student_pretrain")} if "student_pretrain" in options else {}
    role = SFT if kind == "sft" else TRAIN
    count = len(_read_devices(options.get(f"{role}device_mapping"), f"{role}device_mapping"))
    records = find_records(kind, options)
    return SourceCommand(kind, options, command.environment, devices if devices and not count else count, records,
                         loop=command.loop)  # fmt: skip


def _find_kind(tree: Mapping[str, object], path: Path, program: str) -> str:
    """Return what a file is read as.

    Raises:
        ConfigError: it is a file of another pipeline, or a part of one.
    """
    if any(name in tree for name in ("train_env_manager", "custom_envs")):
        managers = tree.get("train_env_manager")
        tags = managers.get("tags") if isinstance(managers, dict) else None
        listed = ", ".join(map(str, tags)) if isinstance(tags, list) else "its environments"
        raise ConfigError([f"{path.name}: not available here: the pipeline of agents, which play {listed} of ROLL; "
                           "docs/agents.md has the environments that are"])  # fmt: skip
    roles = {"distill": {"student", "teacher"}, "rlvr": {TRAIN[:-1], INFER[:-1]}, "dpo": {TRAIN[:-1], "reference"}}
    roles["sft"] = {SFT[:-1]}
    found = {"student_train": TRAIN[:-1], "student_infer": INFER[:-1]}
    names = {found.get(name, name) for name in tree}
    kind = next((kind for kind, needed in roles.items() if needed <= names), "")
    if not kind:
        listed = "actor_train and actor_infer, actor_train and reference, student and teacher, or sft_train"
        raise ConfigError([f"there is no command of a pipeline of ROLL for {path.name}, a part of another file: it lacks "
                           f"{listed}"])  # fmt: skip
    if program and _PIPELINES[program] != kind:
        raise ConfigError([f"{program} reads no file with the roles of {path.name}, which is one of {kind}"])
    return kind


def _find_file(commands: list[Command]) -> tuple[Command, Path, str]:
    """Return the command of the pipeline, the file that it names and the program."""
    found = [(command, place) for command in commands for place, word in enumerate(command.words) if "_pipeline.py" in word]
    if not found:
        raise ConfigError(
            ["there is no command of ROLL, such as python examples/start_rlvr_pipeline.py --config_path DIR --config_name NAME"]
        )
    require_one([command for command, _ in found])
    command, place = found[0]
    program = Path(command.words[place]).stem
    if program not in _PIPELINES:
        raise ConfigError([f"line {command.line}: not available here: {program} of ROLL; {', '.join(_PIPELINES)} are"])
    words = iter(command.words[place + 1 :])
    flags: dict[str, str] = {}
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        flags[name.replace("-", "_")] = value if equals else next(words, "")
    if unknown := sorted(flags.keys() - {"config_path", "config_name"}):
        raise ConfigError([f"--{unknown[0]}: no option of {program}.py"])
    folder, name = flags.get("config_path", "config"), flags.get("config_name", "sppo_config")
    # ROLL reads it from the folder of its program, and its examples from theirs
    places = [*(str(Path(start) / folder) for start in ("", "examples")), folder]
    own = [str(base) for base in list_folders(command) if base.name == Path(folder).name]
    candidates = [f"{place}/{name.removesuffix('.yaml')}.yaml" for place in (*places, *own)]
    path = next((path for item in candidates if (path := find_file(command, item)) is not None), None)
    return command, path or require_file(command, "--config_name", candidates[0]), program


def _load(command: Command, path: Path) -> dict[str, object]:
    """Return a file over the entries of its defaults list.

    Raises:
        ConfigError: an entry is not here.
    """
    tree = load_yaml(path)
    tree.pop("hydra", None)
    entries = tree.pop("defaults", None)
    for entry in entries if isinstance(entries, list) else []:
        if entry == "_self_":
            continue
        name = str(entry).partition("@")[0]
        found = next(
            (place for start in (path.parent, path.parent.parent) if (place := start / f"{name}.yaml").is_file()), None
        )
        if found is None:
            raise ConfigError([f"{path}: its defaults list names {entry}, and {name}.yaml is not here"])
        refuse_changed(command, found)
        tree = {**load_yaml(found), **tree}
    return tree


def _resolve(tree: Mapping[str, object], path: Path, command: Command) -> dict[str, object]:
    """Return a tree without references.

    Raises:
        ConfigError: a reference has no value.
    """
    try:
        composed = OmegaConf.to_container(OmegaConf.create(_replace_calls(tree, command)), resolve=True)
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError([f"{path}: a reference has no value: {(str(error) or 'it is circular').splitlines()[0]}"]) from None
    assert isinstance(composed, dict)
    return {str(name): value for name, value in composed.items()}


def _replace_calls(value: object, command: Command) -> Any:
    """Return a tree without the times that Hydra writes into names of folders, and with the variables of the command."""
    if isinstance(value, Mapping):
        return {name: _replace_calls(item, command) for name, item in value.items()}
    if isinstance(value, list):
        return [_replace_calls(item, command) for item in value]
    if not isinstance(value, str):
        return value

    def read_variable(match: re.Match[str]) -> str:
        default = make_mark(match[1], command.line) if match[2] is None else match[2].strip(" '\"")
        return command.environment.get(match[1], default)

    return re.sub(r"\$\{oc\.env:(\w+)(?:,([^}]*))?\}", read_variable, re.sub(r"\$\{now:[^}]*\}", "now", value))


def _read_devices(value: object, option: str) -> set[int]:
    """Return the devices of a role: a list, or the text of a sum of lists and ranges.

    Raises:
        ConfigError: it is something else.
    """
    try:
        devices = value if isinstance(value, list) else _read_list(ast.parse(str(value), mode="eval").body)
        return {int(item) for item in devices}
    except (SyntaxError, ValueError, TypeError, RecursionError):
        raise ConfigError([f"{option} is {value!r}, but must be a list of devices, such as list(range(0,8))"]) from None


def _read_list(node: ast.expr) -> list[int]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _read_list(node.left) + _read_list(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "list" and len(node.args) == 1:
        return _read_list(node.args[0])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        devices = range(*(ast.literal_eval(argument) for argument in node.args))
        if len(devices) > _MOST_DEVICES:
            raise ValueError("more devices than there are")
        return list(devices)
    return [int(item) for item in ast.literal_eval(node)]


# --------------------------------------------------------------------------------------------------------------------- run


def _read_layout(command: SourceCommand, role: str) -> Layout:
    """Return the split of the model: Megatron's, or FSDP with Ulysses."""
    name = command.text(f"{role}strategy_args.strategy_name", "fsdp2_train")
    if name == "megatron_train":
        names = ("tensor_model", "pipeline_model", "context", "expert_model")
        strategy = f"{role}strategy_args.strategy_config."
        return Layout("megatron", *(command.count(f"{strategy}{kind}_parallel_size", 1) for kind in names))
    if name == "fsdp2_train":
        return Layout("fsdp", context=command.count(f"{role}model_args.ulysses_size", 1))
    raise ConfigError([f"{role}strategy_args.strategy_name={name}: not available here; megatron_train and fsdp2_train are"])


def _describe(run: Import, command: SourceCommand) -> Recipe:
    """Return the run by ROLL's formulas."""
    role = SFT if command.program == "sft" else TRAIN
    layout, arguments = _read_layout(command, role), f"{role}training_args."
    micro = command.count(f"{arguments}per_device_train_batch_size", 8)
    if not command.devices:
        raise ConfigError([f"{role}device_mapping has no device"])
    if command.devices % layout.devices:
        raise ConfigError(
            [f"{command.devices} devices of {role[:-1]} are not a multiple of the {layout.devices} of its layout"]
        )
    model = command.text(f"{role}model_args.model_name_or_path") or command.text("pretrain")
    if not model:
        raise ConfigError(["the file names no model: pretrain is missing"])
    replicas, adapters = command.devices // layout.devices, _read_adapters(command, role)
    keys, defaults = _read_model(run, command, role, model, layout, adapters)
    shared = Recipe(
        stage="",
        step_samples=micro * command.count(f"{arguments}gradient_accumulation_steps", 1) * replicas,
        total_steps=0,
        loss="",
        engine=layout.engine,
        weights=_read_format(command, role, layout),
        tp=layout.tensor,
        pp=layout.pipeline,
        cp=layout.context,
        ep=layout.expert,
        dp=replicas,
        lora_rank=0 if adapters is None else int(adapters.rank or 0),
        model=model,
        batch=Batch(micro),
        adapters=adapters,
        placement=Placement(actor=command.devices),
        keys=keys,
        notes={"load": "a folder on this machine"},
        defaults=(
            *defaults,
            (f"{ACTOR}.finetune", True, "only weights are read"),
            (f"{ACTOR}.use_distributed_optimizer", True, "optimizer states are split"),
        ),
    )
    for name in command.options:
        if name.startswith(f"{role}strategy_args."):
            run.note_given(name, "the layout of the plan", changes_nothing=False)
    if command.program == "distill":
        if _IMAGES.search(model):
            run.refuse("pretrain", "distillation on the answers of rows with images")
        return describe_distillation(run, command, shared, role)
    return describe_rows(run, command, shared, role) if command.program != "rlvr" else _describe_rollout(run, command, shared)


def _read_adapters(command: SourceCommand, role: str) -> Adapters | None:
    """Return the adapters, of which only lora_target says that there are some.

    Raises:
        ConfigError: a pattern of names, or layers that have none here.
    """
    prefix = f"{role}model_args.lora_"
    names = [name.strip() for text in command.list_texts(f"{prefix}target") for name in text.split(",")]
    if not names:
        return None
    names = ["all-linear" if name == "all" else name for name in names]
    if unknown := [name for name in names if not find_lora_targets([name])]:
        raise ConfigError([f"{prefix}target: not available here: adapters in {', '.join(unknown)}"])
    rank = command.count(f"{prefix}rank", 8)
    alpha, dropout = command.number(f"{prefix}alpha", 0) or 2 * rank, command.number(f"{prefix}dropout", 0.0)
    return Adapters(find_lora_targets(names), rank, alpha, dropout)


def _read_model(
    run: Import, command: SourceCommand, role: str, model: str, layout: Layout, adapters: Adapters | None
) -> tuple[dict[str, object], tuple[tuple[str, object, str], ...]]:
    """Return the keys of model and layout, and what ROLL sets without an option."""
    checkpoints = not command.flag(f"{role}model_args.disable_gradient_checkpointing")
    run.note_given(f"{role}model_args.disable_gradient_checkpointing", "recompute_granularity", changes_nothing=False)
    strategy = f"{role}strategy_args.strategy_config."
    splits = layout.engine == "megatron" and layout.tensor > 1 and command.flag(f"{strategy}sequence_parallel")
    keys: dict[str, object] = {
        f"{ACTOR}.load": model,
        f"{ACTOR}.tokenizer_name_or_path": model,
        f"{ACTOR}.tensor_model_parallel_size": layout.tensor,
        f"{ACTOR}.pipeline_model_parallel_size": layout.pipeline,
        f"{ACTOR}.context_parallel_size": layout.context,
        f"{ACTOR}.expert_model_parallel_size": layout.expert,
        f"{ACTOR}.sequence_parallel": True if splits else None,
        **(RECOMPUTE_LAYERS if checkpoints else {}),
    }
    frozen = f"{role}model_args.freeze_module_prefix"
    has_images = _IMAGES.search(model) is not None
    if has_images:
        parts = command.text(frozen).replace(" ", "")
        if parts not in _FROZEN:
            run.refuse(frozen, f"frozen parts {parts}; {', '.join(filter(None, _FROZEN))} are")
        if adapters is not None:
            run.refuse(
                f"{role}model_args.lora_target", "adapters of a model of images, whose tower has layers of these names too"
            )
        for name, value in zip(("freeze_vit", "freeze_aligner"), _FROZEN.get(parts, (True, True))):
            keys[f"{ACTOR}.{name}"] = value
    elif _OTHER_IMAGES.search(model) or command.get(frozen) is not None or command.has(f"{role}data_args.image_max_pixels"):
        run.refuse("pretrain", f"{model}: models with sound, and models of images but Qwen2.5-VL and Qwen3-VL")
    run.note_given(frozen, "freeze_vit and freeze_aligner", changes_nothing=False)
    return keys, _list_experts(run, command, role, model, layout)


def _list_experts(
    run: Import, command: SourceCommand, role: str, model: str, layout: Layout
) -> tuple[tuple[str, object, str], ...]:
    """Return the balancing of experts: none with FSDP, and config.json's weight with Megatron where its converter reads it."""
    names = f"{role}model_args.moe_aux_loss_coef {role}strategy_args.strategy_config.moe_aux_loss_coeff"
    if not has_experts(model):
        run.note_given(names, "the model has no experts")
        return ()
    if layout.engine == "fsdp":
        run.note_given(names, "ROLL's losses leave it out under FSDP")
        return list_expert_defaults(model, "ROLL under FSDP")
    if not _BALANCED.search(model):
        run.refuse("pretrain", f"experts, as {model} has them: ROLL's converter decides about their balancing")
    given = next((command.maybe(name) for name in reversed(names.split()) if command.get(name) is not None), None)
    if given is None:
        return ()
    run.note_given(names, f"moe_aux_loss_coeff: {given:g}", changes_nothing=False)
    return ((f"{ACTOR}.moe_aux_loss_coeff", given, "the weight of the balancing loss"),)


def _read_format(command: SourceCommand, role: str, layout: Layout) -> str | None:
    """Return the format of weights and optimizer state of FSDP, where it is another one than float32."""
    option = f"{role}strategy_args.strategy_config.param_dtype"
    name = (command.text(option) or None) if layout.engine == "fsdp" else None
    if name not in _FORMATS:
        raise ConfigError([f"{option}={name}: not available here; fp32 and bf16 are"])
    return _FORMATS[name]


# ----------------------------------------------------------------------------------------------------------------- rollouts


def _describe_rollout(run: Import, command: SourceCommand, shared: Recipe) -> Recipe:
    """Return the run of a pipeline with rollouts."""
    prompts, group = command.count("rollout_batch_size", 128), command.count("num_return_sequences_in_group", 1)
    step, epochs = shared.step_samples, command.count("ppo_epochs", 1)
    if prompts * group % step:
        raise ConfigError([f"{prompts * group} responses of a rollout are not whole optimizer steps of {step}"])
    steps, iterations = prompts * group // step * epochs, command.count("max_steps", 500)
    rate, schedule = read_rate(command, TRAIN, iterations * steps)
    prompt, response = _read_lengths(command)
    run.note_given("prompt_length response_length sequence_length", f"{prompt} and {response} tokens", changes_nothing=False)
    placement, ahead = _read_placement(run, command)
    batch = Batch(shared.batch.micro if shared.batch else None, group, epochs)
    domains = [name for name in command.options if name.startswith(f"{TRAIN}data_args.domain_interleave_probs.")]
    recipe = replace(
        shared,
        stage="ray_grpo",
        rollout_completions=prompts * group,
        steps_per_rollout=steps,
        total_steps=iterations * steps,
        loss="grpo",
        weight_decay=rate.weight_decay,
        clip_grad=rate.clip_grad,
        batch=batch,
        rates=(rate,),
        placement=placement,
        train_iters=iterations,
        prompt_length=prompt,
        response_length=response,
        keys={
            **shared.keys,
            **ahead,
            f"{RL}.max_prompt_length": prompt,
            f"{RL}.long_prompts": "drop_longer",
            f"{SAMPLING}.max_tokens": response,
            f"{RL}.dropout_in_update": True if shared.adapters is not None and shared.adapters.dropout else None,
        },
        notes={**shared.notes, "train_iters": "pipeline steps"},
        defaults=(
            *shared.defaults,
            (
                f"{ACTOR}.prompt_type",
                "hf",
                "messages are written by the tokenizer's chat template; ROLL's template is not compared",
            ),
            (f"{ACTOR}.dataset_additional_keys", ["labels"], "the answer of a prompt"),
        ),
    ).follow(schedule)
    return _describe_generation(run, command, describe_objective(run, command, recipe, group, len(domains)))


def _read_lengths(command: SourceCommand) -> tuple[int, int]:
    """Return the tokens of prompts and responses; a sequence has both."""
    prompt = command.count("prompt_length", 1024)
    if command.get("response_length") is not None:
        return prompt, command.count("response_length", 1)
    if command.get("sequence_length") is None:
        raise ConfigError(["response_length and sequence_length are missing"])
    response = command.count("sequence_length", 1) - prompt
    if response < 1:
        raise ConfigError([f"sequence_length leaves no room for a response behind {prompt} tokens of a prompt"])
    return prompt, response


def _read_placement(run: Import, command: SourceCommand) -> tuple[Placement, dict[str, object]]:
    """Return the devices, and how far rollouts run ahead; a rollout that shares devices has all of the actor's."""
    actor = _read_devices(command.get(f"{TRAIN}device_mapping"), f"{TRAIN}device_mapping")
    rollout = _read_devices(command.get(f"{INFER}device_mapping", []), f"{INFER}device_mapping")
    ratio, shares = command.number("async_generation_ratio", 0.0), not rollout or bool(rollout & actor)
    if ratio and shares:
        run.refuse("async_generation_ratio", "rollouts that run ahead on the devices that train")
    run.note_given("async_generation_ratio", "0: an iteration trains on its own rollout" if not ratio else
                   f"rollouts that are {ratio:g} iterations old at most", changes_nothing=False)  # fmt: skip
    if shares:
        if rollout != actor:
            run.note(f"{INFER}device_mapping", f"the {len(actor)} devices of the actor, of which it shares some in ROLL; "
                     "the number of replicas changes no result", changes_nothing=False)  # fmt: skip
        return Placement(actor=len(actor)), {}
    if not ratio:
        return Placement(actor=len(actor), rollout=len(rollout)), {}
    return Placement(actor=len(actor), rollout=len(rollout), mode="async"), {f"{RL}.max_off_policy_threshold": ratio}


def _describe_generation(run: Import, command: SourceCommand, recipe: Recipe) -> Recipe:
    """Return the run with sampling, data and rewards."""
    prefix, config = f"{INFER}generating_args.", f"{INFER}strategy_args.strategy_config."
    sampling = {
        name: command.number(f"{prefix}{name}", value) for name, value in (("temperature", 0.95), ("top_p", 0.7), ("top_k", 50))
    }
    run.put(" ".join(prefix + name for name in sampling), {f"{SAMPLING}.{name}": value for name, value in sampling.items()})
    tensor = command.count(f"{config}tensor_parallel_size", 1)
    half = "rollouts in float16" if command.text(f"{INFER}model_args.dtype") == "fp16" else ""
    data, rewards = _read_data(run, command, str(recipe.model)), _read_rewards(run, command)
    return replace(
        recipe,
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=int(sampling["top_k"]),
        min_p=0.0,
        infer_tp=tensor,
        weights=" and ".join(filter(None, (recipe.weights, half))) or None,
        data=(data,),
        keys={
            **recipe.keys,
            **_read_filter(run, command),
            f"{ENGINE}.infer_tensor_parallel_size": tensor,
            f"{ACTOR}.data_path": data,
            f"{ACTOR}.map_keys.prompt": command.text(f"{TRAIN}data_args.messages") or "prompt",
            f"{ACTOR}.map_keys.response": "ground_truth",
        },
        rewarding=rewards,
    )


def _read_rewards(run: Import, command: SourceCommand) -> Rewards:
    """Return what the user names, as classes of ROLL score there.

    Raises:
        ConfigError: nothing is named.
    """
    given = command.environment.get(_REWARD)
    if given is None:
        classes = [str(value) for name, value in command.options.items() if re.fullmatch(r"rewards\.\w+\.worker_cls", name)]
        listed = ", ".join(sorted({name.rpartition(".")[2] for name in classes})) or "none"
        raise ConfigError([f"rewards: classes of ROLL ({listed}) score there; name the functions that score here, such as "
                           f"accuracy or module:function: --set {_REWARD}=NAME"])  # fmt: skip
    for name in command.options:
        if name.startswith(("rewards.", "reward_model.", "reward_system_config.")) and "_filter_config." not in name:
            run.note_given(name, f"{given} scores, as --set {_REWARD} has it", changes_nothing=False)
    return Rewards(functions=given.split(","), weights=[1.0] * len(given.split(",")))


def _read_filter(run: Import, command: SourceCommand) -> dict[str, object]:
    """Return the keys of groups that are replaced as all of their responses score alike."""
    names = [name for name in command.options if re.fullmatch(r"rewards\.[^.]+\.query_filter_config\..+", name)]
    domains = {name.split(".")[1] for name in command.options if name.startswith("rewards.")}
    kinds = {domain: command.text(f"rewards.{domain}.query_filter_config.type", "no_filter") for domain in domains}
    others = " ".join(name for name in command.options if ".response_filter_config." in name)
    run.note_given(others, "ROLL reads it nowhere")
    if set(kinds.values()) <= {"no_filter"}:
        run.note_given(" ".join(names), "no group is filtered")
        return {}
    for domain, kind in kinds.items():
        prefix = f"rewards.{domain}.query_filter_config."
        if kind != "std_filter":
            run.refuse(f"{prefix}type", f"{kind}: groups of one domain that bounds of their mean score choose, or of no filter "
                       "next to another; std_filter of all domains is")  # fmt: skip
        elif command.number(f"{prefix}filter_args.std_threshold", -1) != 0:
            run.refuse(f"{prefix}filter_args.std_threshold", "another spread than 0 up to which groups are replaced")
    run.note_given(" ".join(names), "filter_groups_enable: groups of equal scores are replaced", changes_nothing=False)
    return {f"{RL}.filter_groups_enable": True, f"{RL}.filter_groups_max_batches": 0}


def _read_data(run: Import, command: SourceCommand, model: str) -> str:
    """Return the prompts; several domains are one file of the user, as ROLL samples each by its share."""
    prefix = f"{TRAIN}data_args."
    files, given = command.list_texts(f"{prefix}file_name"), command.environment.get(_PROMPTS)
    shares = [name for name in command.options if name.startswith(f"{prefix}domain_interleave_probs.")]
    for name in command.options:
        if name.startswith(prefix):
            run.note_given(name, "the data of the plan", changes_nothing=False)
    run.note_given("global_template", "prompt_type hf", changes_nothing=False)
    if given is None and (len(files) != 1 or len(shares) > 1):
        raise ConfigError([f"{prefix}file_name: {len(files)} files with {len(shares)} domains, drawn by shares in ROLL: "
                           f"write them to one file in that mixture, and say --set {_PROMPTS}=FILE"])  # fmt: skip
    if given is None and _IMAGES.search(model):
        raise ConfigError([f"{prefix}file_name: ROLL writes text around the questions of images: write prompts, images and "
                           f"ground_truth to a file, and say --set {_PROMPTS}=FILE"])  # fmt: skip
    return given or files[0]


def _finish(run: Import, command: SourceCommand) -> None:
    """Keep FSDP where `engine: fsdp` supports the run; name the reason in the plan where it is Megatron's."""
    layout = _read_layout(command, SFT if command.program == "sft" else TRAIN)
    if run.refused or layout.engine != "fsdp":
        return
    if reason := keep_fsdp(run, []):
        run.reasons["engine"] = f"megatron, as {reason}"
    else:
        run.added[f"{ACTOR}.engine"] = "fsdp, the strategy of the role that trains"


PROJECT = SourceProject("roll", "ROLL", "0.3.0", TABLES, _read, _describe, _finish, prefix="")
