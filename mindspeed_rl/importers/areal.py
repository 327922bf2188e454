"""Commands and files of AReaL: `python PROGRAM.py --config FILE.yaml name=value ...`, through its launchers too, or the YAML.

A file holds the numbers, and a Python program names workflow, reward function and data; the program is read by its syntax.
Agents and workflows of several turns are refused by name.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.areal_objective import describe_critic, describe_objective, read_rate
from mindspeed_rl.importers.areal_options import ENGINE_KEYS, OPEN, TABLES
from mindspeed_rl.importers.areal_program import SINGLE_TURN, Program, find_program
from mindspeed_rl.importers.options import SourceCommand, SourceProject, to
from mindspeed_rl.importers.recipe import ACTOR, ENGINE, RL, SAMPLING, Adapters, Batch, Layout, Placement, Recipe, Rewards
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command, list_unknown, request_variables
from mindspeed_rl.importers.source_files import flatten_options, require_file
from mindspeed_rl.importers.training_engine import keep_fsdp
from mindspeed_rl.importers.translators import describe_preprocessing, name_tokens, require_one
from mindspeed_rl.importers.writer import RECOMPUTE_LAYERS, find_lora_targets, has_experts
from mindspeed_rl.importers.yaml_text import load_yaml_text

#: variables of the user: the program, what scores, prompts or pairs that AReaL's code makes of rows, the longest row
_PROGRAM, _REWARD, _PROMPTS, _PAIRS, _LENGTH = "PROGRAM", "REWARD", "PROMPTS", "DATA", "MAX_LENGTH"
#: kind of a program -> stage and loss here
_STAGES = {"sft": ("sft", "cross_entropy"), "dpo": ("dpo", "sigmoid"), "rw": ("orm", "ranking")}
_TYPES = {"rl": "ppo", "sft": "sft", "dpo": "dpo", "rw": "rw"}
#: options that decide how others are read
_READ_FIRST = ("actor.backend", "rollout.backend", "train_dataset.type")
_TRAINING, _ROLLOUT = ("fsdp", "megatron", "archon"), ("sglang", "vllm")
#: data sets whose rows have images in AReaL
_IMAGES = re.compile(r"clevr_count_70k|geometry3k|virl39k", re.IGNORECASE)
#: AReaL's number for all tokens of the vocabulary
_ALL_TOKENS = 100_000_000
#: defaults of the dataclasses that files refer to
_DEFAULTS = {
    "seed": 1,
    "tokenizer_path": "",
    "total_train_epochs": 1,
    "gconfig": {"n_samples": 1, "max_new_tokens": 16384, "min_new_tokens": 0, "temperature": 1.0, "top_p": 1.0},
    "rollout": {"use_lora": False, "max_head_offpolicyness": 0, "consumer_batch_size": 1},
    "actor": {"dtype": "bfloat16", "use_lora": False, "ppo_n_minibatches": 4, "temperature": 1.0, "max_new_tokens": 1024},
    "cluster": {"fileroot": "/tmp/areal/", "n_nodes": 32, "n_gpus_per_node": 8},
    "train_dataset": {"batch_size": 1},
}
_OVERRIDE = re.compile(r"(\+{0,2})([A-Za-z_][\w.]*)=(.*)", re.DOTALL)

# -------------------------------------------------------------------------------------------------------------------- read


def _read(commands: list[Command], devices: int | None) -> SourceCommand:
    """Return the run of a command or a file.

    Raises:
        ConfigError: there is none, or its workflow is not one response to a prompt.
    """
    command, path, program, words = _find(commands)
    options = _compose(path, words)
    kind = "ppo" if "gconfig.n_samples" in options or any(name.startswith("rollout.") for name in options) else ""
    kind = kind or _TYPES.get(str(options.get("train_dataset.type")), "")
    if not kind or not any(name.startswith("actor.") for name in options):
        listed = ", ".join(_TYPES)
        raise ConfigError([f"there is no command of AReaL's trainers for {path.name}: actor and train_dataset.type {listed}"])
    if program is None:
        program = _choose_program(command, path, kind)
    unknown = [item for name in _READ_FIRST for item in list_unknown(options.get(name))]
    if unknown:
        raise request_variables(unknown)
    found = Program.from_file(program)
    if found is None or found.kind != kind:
        trains = "no trainer" if found is None else f"the trainer of {found.kind} runs"
        raise ConfigError([f"{program.name} starts {trains}, but {path.name} is a file of {kind}: "
                           f"--set {_PROGRAM}=FILE names its program"])  # fmt: skip
    if kind == "ppo" and found.workflow != SINGLE_TURN:
        workflow = found.workflow or "none, an agent that is played elsewhere"
        raise ConfigError([f"{program.name}: not available here: the workflow {workflow}; {SINGLE_TURN} is (docs/agents.md)"])
    if kind == "ppo" and found.filters:
        raise ConfigError([f"{program.name}: not available here: groups that {found.filters} chooses"])
    options["program"] = str(program)
    if kind == "ppo":
        options |= {"program.workflow": found.workflow, "program.reward_fn": found.reward}
        options["program.enable_thinking"] = found.enable_thinking
    table = dict(TABLES[kind])
    backend = str(options.get("rollout.backend")).partition(":")[0]
    for name, key in ENGINE_KEYS.get(backend, {}).items():
        if options.get(f"{backend}.{name}") is not None:
            table[f"{backend}.{name}"] = to(f"{ENGINE}.{key}")
    for name in options:
        if name not in table and (record := next((item for form, item in OPEN if re.fullmatch(form, name)), None)) is not None:
            table[name] = record
    _, count = read_layout(str(options.get("actor.backend")), "actor.backend", _TRAINING)
    return SourceCommand(kind, options, command.environment, count, table, ("own prompts",) * found.own_prompts, command.loop)


def _trains(command: Command) -> bool:
    place = next((place for place, word in enumerate(command.words) if word.endswith(".py")), len(command.words))
    return any(word.partition("=")[0] == "--config" for word in command.words[place:])


def _find(commands: list[Command]) -> tuple[Command, Path, Path | None, list[str]]:
    """Return the command, its file, its program and what it sets."""
    if len(commands) == 1 and len(commands[0].words) == 1 and Path(commands[0].words[0]).suffix in (".yaml", ".yml"):
        return commands[0], require_file(commands[0], "AReaL", commands[0].words[0]), None, []
    require_one([command for command in commands if _trains(command)])
    for command in commands:
        words = [part for word in command.words for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
        programs = [place for place, word in enumerate(words) if word.endswith(".py")]
        if not programs or "--config" not in words[programs[0] :]:
            continue
        place = words.index("--config", programs[0])
        if unknown := [item for word in words[programs[0] : place + 2] for item in list_unknown(word)]:
            raise request_variables(unknown)
        path = require_file(command, "--config", words[place + 1] if place + 1 < len(words) else "")
        others = [*words[programs[0] + 1 : place], *words[place + 2 :]]
        return command, path, require_file(command, "AReaL", words[programs[0]]), others
    raise ConfigError(["there is no command of AReaL, such as python examples/math/gsm8k_rl.py --config FILE.yaml"])


def _choose_program(command: Command, path: Path, kind: str) -> Path:
    """Return the program that starts a file: the user's, or the one that is next to it.

    Raises:
        ConfigError: there are several, or none.
    """
    if given := command.environment.get(_PROGRAM):
        return require_file(command, _PROGRAM, given)
    found = find_program(path, kind)
    if len(found) != 1:
        listed = ", ".join(other.name for other in found) or "none"
        raise ConfigError([f"{path.name}: the program that starts it names workflow and reward, and next to it there is "
                           f"{listed}: --set {_PROGRAM}=FILE, such as examples/math/gsm8k_rl.py"])  # fmt: skip
    return found[0]


def _compose(path: Path, words: list[str]) -> dict[str, object]:
    """Return the options of a file, replaced by a command's, without references.

    Raises:
        ConfigError: it cannot be read, a word sets nothing, or a reference or value is missing.
    """
    try:
        text = path.read_text(encoding="utf-8")
        load_yaml_text(text)  # refused where its aliases grow too large
        tree: Any = OmegaConf.create(text)
        for word in words:
            if (match := _OVERRIDE.fullmatch(word)) is None:
                raise ConfigError([f"{word}: not available here; a word of the command is NAME=VALUE"])
            if list_unknown(match[3]):
                OmegaConf.update(tree, match[2], match[3], force_add=True)
            else:
                tree = OmegaConf.merge(tree, OmegaConf.from_dotlist([f"{match[2]}={match[3]}"]))
        # a reference may be to a default of the dataclasses
        written = OmegaConf.to_container(tree, resolve=False)
        composed = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(_DEFAULTS), tree), resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        raise ConfigError([f"{path}: {str(error).splitlines()[0]}"]) from None
    if not isinstance(composed, dict) or not isinstance(written, dict):
        raise ConfigError([f"{path} must hold names and values"])
    given = flatten_options(written)
    options = {
        name: value
        for name, value in flatten_options(composed).items()
        # a reference to a group is all of the group
        if name in given or any(name.startswith(f"{group}.") for group in given)
    }
    if missing := [name for name, value in options.items() if value == "???"]:
        raise ConfigError([f"{path.name}: {', '.join(missing)} has no value"])
    return options


def read_layout(text: str, option: str, engines: tuple[str, ...]) -> tuple[Layout, int]:
    """Return the layout of "ENGINE:d4p1t2", or of "megatron:(attn:d4t2|ffn:d2e4)", and its devices.

    Raises:
        ConfigError: it has another form.
    """
    engine, _, dimensions = text.replace(" ", "").partition(":")
    # the layout of attention counts the devices, which experts share
    parts = [part.partition(":") for part in dimensions.strip("()").split("|")] if "|" in dimensions else []
    sections = {name: sizes for name, _, sizes in parts}
    attention, experts = sections.get("attn", dimensions), sections.get("ffn", dimensions)
    sizes, of_experts = (dict(re.findall(r"([a-z])(\d+)", text)) for text in (attention, experts))
    valid = all(re.fullmatch(r"(?:[dptce][1-9]\d*)+", text) for text in (attention, experts))
    if engine not in engines or not valid or (sections and set(sections) != {"attn", "ffn"}):
        raise ConfigError([f"{option} is {text!r}, but must be {' or '.join(engines)} with sizes, such as {engines[0]}:d4p1t1"])
    number = {name: int(sizes.get(name, "1")) for name in "dptc"}
    layout = Layout(engine, number["t"], number["p"], number["c"], int(of_experts.get("e", "1")))
    return layout, layout.devices * number["d"]


# --------------------------------------------------------------------------------------------------------------------- run


def _describe(run: Import, command: SourceCommand) -> Recipe:
    """Return the run by AReaL's formulas."""
    layout, devices = read_layout(command.text("actor.backend"), "actor.backend", _TRAINING)
    model = command.text("actor.path")
    if not model:
        raise ConfigError(["the file names no model: actor.path is missing"])
    if has_experts(model):
        run.refuse("actor.path", f"experts, as {model} has them: AReaL's engines decide about their balancing")
    if any(name.startswith("teacher.") for name in command.options):
        run.refuse("teacher", "a teacher next to rewards; see docs/distillation.md")
    if _IMAGES.search(command.text("train_dataset.path")):
        run.refuse("train_dataset.path", "rows with images")
    batch, epochs = command.count("train_dataset.batch_size", 1), command.count("total_train_epochs", 1)
    group = command.count("gconfig.n_samples", 1)
    steps = command.count("actor.ppo_n_minibatches", 4) if command.program == "ppo" else 1
    # a batch that is not full is dropped
    iterations, limit = run.settings.rows // batch * epochs, command.maybe("total_train_steps")
    taken = iterations if limit is None else min(command.count("total_train_steps", 1), iterations)
    rate, schedule = read_rate(command, "actor.", iterations, steps, limited=limit is not None)
    rates = schedule.over(taken * steps, steps)
    adapters = _read_adapters(command)
    run.note_given("actor.gradient_checkpointing", "recompute_granularity", changes_nothing=False)
    run.note_given("actor.backend", "the layout of the plan", changes_nothing=False)
    run.note_given("program train_dataset.type actor.optimizer", f"{command.program} of the program", changes_nothing=False)
    run.note_given("actor.use_lora", "see the adapters" if adapters else "all weights train", changes_nothing=False)
    run.note_given("actor.dtype", "weights of the plan", changes_nothing=False)
    tokenizer = command.text("tokenizer_path") or model
    if tokenizer != model:
        run.translate("tokenizer_path", {f"{ACTOR}.tokenizer_name_or_path": tokenizer})
    run.note_given("tokenizer_path", "the tokenizer of the model", changes_nothing=False)
    shared = Recipe(
        stage=_STAGES[command.program][0] if command.program in _STAGES else "ray_grpo",
        step_samples=batch if command.program in _STAGES else batch * group // steps,
        steps_per_rollout=steps,
        total_steps=taken * steps,
        loss="grpo",
        engine="megatron" if layout.engine == "megatron" else "fsdp",
        weights=_read_format(command, layout),
        tp=layout.tensor,
        pp=layout.pipeline,
        cp=layout.context,
        ep=layout.expert,
        dp=devices // layout.devices,
        lora_rank=0 if adapters is None else int(adapters.rank or 0),
        weight_decay=rate.weight_decay,
        clip_grad=rate.clip_grad,
        model=model,
        lr_first=rates.rates[0],
        lr_10=rates.rates[1],
        lr_last=rates.rates[2],
        lr_warmup_steps=rates.warmup,
        batch=Batch(1),
        rates=(rate,),
        adapters=adapters,
        placement=Placement(actor=devices),
        train_epochs=epochs if limit is None else None,
        train_iters=None if limit is None else taken,
        packed_rows=None if steps == 1 else f"about {batch * group // steps}, as many as have an equal share of the tokens",
        keys={
            f"{ACTOR}.load": model,
            f"{ACTOR}.tokenizer_name_or_path": tokenizer,
            f"{ACTOR}.tensor_model_parallel_size": layout.tensor,
            f"{ACTOR}.pipeline_model_parallel_size": layout.pipeline,
            f"{ACTOR}.context_parallel_size": layout.context,
            f"{ACTOR}.expert_model_parallel_size": layout.expert,
            f"{ACTOR}.sequence_parallel": True if layout.tensor > 1 and layout.engine == "megatron" else None,
            **(RECOMPUTE_LAYERS if command.flag("actor.gradient_checkpointing") else {}),
        },
        notes={
            "load": "a folder on this machine",
            "train_iters": f"at most the epochs of {run.settings.rows} rows",
            "lr_decay_iters": f"epochs of {run.settings.rows} rows",
        },
        defaults=(
            (f"{ACTOR}.finetune", True, "only weights are read"),
            (f"{ACTOR}.use_distributed_optimizer", True, "optimizer states are split"),
        ),
    )
    return (_describe_rollout if command.program == "ppo" else _describe_rows)(run, command, shared)


def _read_format(command: SourceCommand, layout: Layout) -> str | None:
    """Return the format of weights and optimizer state where it is not float32: FSDP and archon train what they load."""
    group = {"megatron": "actor.megatron.fp8_config.", "archon": "actor.archon.fp8_config."}.get(layout.engine)
    mode = None if group is None else command.get(f"{group}mode", "e4m3" if command.has(f"{group}recipe") else None)
    products = f", products of matrices in fp8 ({mode})" if mode not in (None, "disabled") else ""
    name = command.text("actor.dtype", "bfloat16")
    if name not in ("bfloat16", "float32"):
        raise ConfigError([f"actor.dtype={name}: not available here; bfloat16 and float32 are"])
    kept = "bfloat16" if name == "bfloat16" and layout.engine != "megatron" else "float32"
    return f"{kept}{products}" if products or kept != "float32" else None


def _read_adapters(command: SourceCommand) -> Adapters | None:
    if not command.flag("actor.use_lora"):
        return None
    names = command.list_texts("actor.target_modules") or ["all-linear"]
    if unknown := [name for name in names if not find_lora_targets([name])]:
        raise ConfigError([f"actor.target_modules: not available here: adapters in {', '.join(unknown)}"])
    targets = find_lora_targets(names)
    return Adapters(targets, command.count("actor.lora_rank", 32), command.number("actor.lora_alpha", 16), 0.0)


def _describe_rows(run: Import, command: SourceCommand, shared: Recipe) -> Recipe:
    """Return the run of a trainer that learns from rows: SFT, DPO or a reward model."""
    stage, loss = _STAGES[command.program]
    name, length = command.text("train_dataset.path"), command.maybe("train_dataset.max_length")
    if length is None:
        given = command.environment.get(_LENGTH, "")
        if not given.isdigit():
            raise ConfigError([f"train_dataset.max_length is missing, and rows of all lengths train: --set {_LENGTH}=TOKENS"])
        length = int(given)
    if command.program != "sft" or "gsm8k" not in name or "own prompts" in command.trailing:
        name = command.environment.get(_PAIRS, "")
        what = "prompt and answer" if command.program == "sft" else "prompt, chosen and rejected"
        if not name:
            raise ConfigError([f"train_dataset.path: AReaL's code makes the rows, whose text it takes as it is: "
                               f"write {what} to a file, --set {_PAIRS}=FILE"])  # fmt: skip
    handler = "AlpacaStyleInstructionHandler" if command.program == "sft" else "AlpacaStylePairwiseHandler"
    columns = ' --map-keys \'{"prompt": "question", "query": "", "response": "answer"}\'' if "gsm8k" in name else ""
    data, words = name_tokens(name), f" --handler-name {handler} --prompt-type empty{columns} --seq-length {int(length)}"
    run.note_given("train_dataset.path train_dataset.max_length", "see data_path", changes_nothing=False)
    run.note_given("actor.scheduling_strategy.type actor.scheduling_strategy.target actor.scheduling_strategy.fork",
                   "one role trains", changes_nothing=False)  # fmt: skip
    reference = command.text("ref.path") if command.program == "dpo" else ""
    run.note_given("ref.path", "the weights at the start" if reference in ("", shared.model) else "ref_model",
                   changes_nothing=False)  # fmt: skip
    kind = command.text("actor.loss_type", "sigmoid")
    return replace(
        shared,
        stage=stage,
        loss=kind if stage == "dpo" else loss,
        beta=command.number("actor.beta", 0.1) if stage == "dpo" else None,
        sequence_length=int(length),
        data=(data,),
        keys={
            **shared.keys,
            f"{ACTOR}.data_path": data,
            f"{ACTOR}.seq_length": int(length),
            f"{ACTOR}.ref_model": reference if reference not in ("", shared.model) else None,
        },
        notes={**shared.notes, "data_path": describe_preprocessing(name, data, shared.model, words),
               "global_batch_size": "rows of an optimizer step"},
        defaults=(
            *shared.defaults,
            (f"{ACTOR}.no_pad_to_seq_lengths", True, "rows are padded to the longest of a micro-batch"),
        ),
    )  # fmt: skip


def _describe_rollout(run: Import, command: SourceCommand, shared: Recipe) -> Recipe:
    """Return the run with rollouts: batch, sampling, devices, data and reward."""
    batch, group = command.count("train_dataset.batch_size", 1), command.count("gconfig.n_samples", 1)
    if batch * group % shared.steps_per_rollout:
        run.refuse("actor.ppo_n_minibatches", f"{batch * group} responses do not make {shared.steps_per_rollout} equal parts")
    response = command.count("gconfig.max_new_tokens", 16384)
    for name, default, what in (("actor.max_new_tokens", 1024, "the limit of a response"),
                                ("actor.temperature", 1.0, "the temperature")):  # fmt: skip
        of_sampling = response if name.endswith("tokens") else command.number("gconfig.temperature", 1.0)
        read = name.endswith("ature") or command.flag("actor.overlong_reward_penalty")
        if read and command.number(name, default) != of_sampling:
            run.refuse(name, f"{what} {command.number(name, default):g} next to {of_sampling:g} of sampling")
        run.note_given(name, f"{what}, as in gconfig" if read else "nothing reads it", changes_nothing=False)
    longest = command.maybe("train_dataset.max_length")
    uses_vllm = command.text("rollout.backend").startswith("vllm")
    context = int(command.number("vllm.max_model_len" if uses_vllm else "sglang.context_length", 32768))
    if command.number("gconfig.max_tokens", context) < min(context, int(longest or 0) + response):
        run.refuse("gconfig.max_tokens", "a limit of prompt and response together below the sum of both")
    prompt = int(longest) if longest is not None else max(1, min(context - response, 1024))
    reward, data = _read_reward(run, command), _read_prompts(run, command)
    top_k = int(command.number("gconfig.top_k", _ALL_TOKENS))
    sampling = {"temperature": command.number("gconfig.temperature", 1.0), "top_p": command.number("gconfig.top_p", 1.0),
                "top_k": -1 if top_k >= _ALL_TOKENS else top_k}  # fmt: skip
    run.put(" ".join(f"gconfig.{name}" for name in sampling), {f"{SAMPLING}.{name}": value for name, value in sampling.items()})
    run.note_given("gconfig.max_new_tokens gconfig.max_tokens", f"max_tokens {response}", changes_nothing=False)
    servers, infer_devices = read_layout(command.text("rollout.backend"), "rollout.backend", _ROLLOUT)
    run.note_given("rollout.backend", "infer_tensor_parallel_size and rollout_resource", changes_nothing=False)
    placement, ahead = _read_placement(run, command, batch, infer_devices)
    recipe = describe_objective(run, command, shared, group, shares=placement.rollout is None)
    scaling = command.number("actor.reward_scaling", 1.0)
    rewards = Rewards(functions=reward, weights=[scaling] * len(reward))
    if recipe.rewarding is not None:
        rewards = replace(rewards, overlong=recipe.rewarding.overlong)
    recipe = replace(
        recipe,
        rollout_completions=batch * group,
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=int(sampling["top_k"]),
        min_p=0.0,
        response_length=response,
        infer_tp=servers.tensor,
        data=(data,),
        placement=placement,
        batch=Batch(1, group),
        rewarding=rewards,
        keys={
            **recipe.keys,
            **ahead,
            f"{ENGINE}.infer_tensor_parallel_size": servers.tensor,
            f"{ENGINE}.infer_pipeline_parallel_size": servers.pipeline if servers.pipeline > 1 else None,
            f"{ACTOR}.data_path": data,
            f"{ACTOR}.map_keys.prompt": "messages",
            f"{ACTOR}.map_keys.response": "answer",
            f"{RL}.max_prompt_length": prompt,
            f"{RL}.long_prompts": "drop_longer" if longest is not None else None,
            f"{SAMPLING}.max_tokens": response,
        },
        notes={
            **recipe.notes,
            "n_samples_per_prompt": f"{shared.steps_per_rollout} optimizer steps of a rollout",
            "max_prompt_length": "train_dataset.max_length counts the question without the chat template: check it"
            if longest is not None
            else "AReaL has no limit: check it",
            "max_off_policy_threshold": "max_head_offpolicyness",
        },
        defaults=(
            *recipe.defaults,
            (f"{ACTOR}.prompt_type", "hf", "messages are written by the tokenizer's chat template"),
            (f"{ACTOR}.dataset_additional_keys", ["labels"], "the answer of a prompt"),
            (f"{ENGINE}.max_num_seqs", 256, "responses of a server at once"),
        ),
    )
    for name in ("train_dataset.path", "train_dataset.max_length"):
        run.note_given(name, "data_path and max_prompt_length", changes_nothing=False)
    return describe_critic(run, command, recipe)


def _read_placement(run: Import, command: SourceCommand, batch: int, servers: int) -> tuple[Placement, dict[str, object]]:
    """Return the devices, and how far rollouts run ahead."""
    strategies = ("actor.scheduling_strategy", "rollout.scheduling_strategy")
    kinds = [command.text(f"{name}.type", "separation") for name in strategies]
    shares = "colocation" in kinds
    for name in strategies:
        words = f"{name} {name}.type {name}.target {name}.fork"
        run.note_given(words, "rollout and training take turns" if shares else "their own devices", changes_nothing=False)
    age, counted = int(command.number("rollout.max_head_offpolicyness", 0)), command.count("rollout.consumer_batch_size", 1)
    if age and counted != batch:
        run.refuse("rollout.consumer_batch_size", f"an age of rollouts in {counted} prompts next to batches of {batch}")
    run.note_given("rollout.consumer_batch_size", "the batch, in which the age counts", changes_nothing=False)
    if shares:
        if age:
            run.refuse("rollout.max_head_offpolicyness", "rollouts that run ahead on the devices that train")
        run.note_given("rollout.max_head_offpolicyness", "0: an iteration trains on its own rollout", changes_nothing=False)
        if servers != command.devices:
            run.refuse("rollout.backend", f"{servers} devices of a rollout that shares the {command.devices} of training")
        return Placement(actor=command.devices), {}
    if not age:
        run.note_given("rollout.max_head_offpolicyness", "0: an iteration trains on its own rollout", changes_nothing=False)
        return Placement(actor=command.devices, rollout=servers), {}
    return Placement(actor=command.devices, rollout=servers, mode="async"), {f"{RL}.max_off_policy_threshold": float(age)}


def _read_reward(run: Import, command: SourceCommand) -> list[str]:
    given, function = command.environment.get(_REWARD), command.text("program.reward_fn") or "none"
    if given is None:
        raise ConfigError([f"the program's reward function {function} scores there: name the functions that score here, "
                           f"such as accuracy or module:function, --set {_REWARD}=NAME"])  # fmt: skip
    run.note_given("program.reward_fn", f"{given} scores, as --set {_REWARD} has it", changes_nothing=False)
    return given.split(",")


def _read_prompts(run: Import, command: SourceCommand) -> str:
    """Return the prompts: AReaL's code makes messages of rows, and adds words to the questions of some."""
    if given := command.environment.get(_PROMPTS):
        return given
    adds = ' (gsm8k: "\\nPlease put your final answer within \\boxed{}." after the question)'
    raise ConfigError([f"train_dataset.path: AReaL's code makes messages of the rows{adds}: "
                       f"write messages and answer to a file, --set {_PROMPTS}=FILE"])  # fmt: skip


def _finish(run: Import, command: SourceCommand) -> None:
    """Keep FSDP where `engine: fsdp` supports the run; name the reason in the plan where it is Megatron's."""
    layout, _ = read_layout(command.text("actor.backend"), "actor.backend", _TRAINING)
    if run.refused or layout.engine == "megatron":
        return
    split = {"tensor parallelism": layout.tensor, "pipelines": layout.pipeline}
    obstacles = [f"engine: fsdp has no {name}" for name, size in split.items() if size > 1]
    if reason := keep_fsdp(run, obstacles):
        run.reasons["engine"] = f"megatron, as {reason}"
    else:
        run.added[f"{ACTOR}.engine"] = f"fsdp, which divides every weight as {layout.engine} does"


PROJECT = SourceProject("areal", "AReaL", "1.0.4", TABLES, _read, _describe, _finish, prefix="")
