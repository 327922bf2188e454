"""Import every example of a checkout of another project, and print what becomes of them.

    python -m tests.importing FOLDER --project verl [--devices 8] [--each]

The folder is the root of the checkout. A variable that a script leaves open has a value by its name; a number that differs by
its nature is accepted, and counted. For verl, EasyR1, AReaL and ROLL the numbers of each run file are compared with the
configuration that their own files compose, for TRL with what its own parser makes of the command, where TRL is installed
(envs/cpu/extras.sh). Nothing of a script is executed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import io
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.command import PROJECTS
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import ASSUMED_ROWS, Import, ImportSettings
from mindspeed_rl.importers.shell import read_script
from mindspeed_rl.importers.source_plan import SourcePlan

#: files of a checkout that may hold a command; a file of options is named, not read
PATTERNS: dict[str, tuple[str, ...]] = {
    "areal": ("examples/**/*.yaml",),
    "llama-factory": ("examples/**/*.yaml",),
    "roll": ("examples/**/*.yaml",),
    "trl": ("**/*.sh", "examples/cli_configs/*.yaml", "examples/scripts/**/*.py", "trl/scripts/*.py", "docs/**/*.md"),
}
_SCRIPTS = ("**/*.sh",)
#: part of a variable's name -> value that it has here, the first that fits
_GUESSES = (
    (r"^DEVICE(_NAME|_TYPE)?$", "npu"),
    (r"ARGS$|OPTIONS$|FLAGS$", ""),
    (r"^DATA_SOURCE$", "openai/gsm8k"),
    (r"^DATASET_DIR$", "data"),
    (r"^REWARD$", "accuracy"),
    (r"^PROGRAM$", "examples/math/gsm8k_rl.py"),
    (r"UTIL|FRACTION|RATIO", "0.8"),
    (r"^(LOCAL_)?(NODE_)?RANK$|INDEX", "0"),
    (r"PORT", "29500"),
    (r"ADDR|HOST|IP$", "10.0.0.1"),
    (r"NNODES|NUM_NODES|WORLD_SIZE", "1"),
    (r"GPUS|NPUS|NPROC|DEVICES", "8"),
    (r"BATCH|_BS$", "8"),
    (r"LEN|TOKENS", "4096"),
    (r"(^|_)(TP|PP|CP|SP|EP|ETP|VPP|DP)(_|$)|SIZE|NUM_|STEPS|EPOCH|WORKERS", "1"),
    (r"TIME|DATE", "20260101"),
    (r"ROWS_PER", "4"),
    (r"DATA|TRAIN|TEST|FILE", "/data/{}.parquet"),
    (r"", "/given/{}"),
)
#: project -> where its own configuration is
_CONFIGURATIONS = {
    "verl": "verl/trainer/config",
    "easyr1": "verl/trainer/config.py",
    "areal": "areal/api/cli_args.py",
    "roll": "roll/configs/base_config.py",
    "trl": "trl/scripts",
}
#: a command of TRL in a page or in the head of a program, with its continued lines
_SHOWN = re.compile(
    r"^ *(?:\w+=\S+ )*(?:trl (?!env|skills)\w+|accelerate launch|torchrun|python3? \S*\.py)\b(?:.*\\\n)*.*", re.MULTILINE
)
_TRAINS = re.compile(r"\b(?:GRPO|RLOO|SFT|DPO|KTO|Reward|GKD)Trainer\(")
#: rows of data whose number a command needs and only a user knows
_ROWS = 100_000
#: beginnings of sentences about files that hold no command which trains
_NO_COMMAND = ("there is no c", "do_train is not true")
#: rounds of questions and answers
_MAX_ROUNDS = 12


@dataclass
class Outcome:
    """What became of an example.

    Attributes:
        kind: "valid", "valid but for named numbers", "refused" or "no command".
        reasons: of a refusal.
        accepted: numbers that differ and are named.
        different: numbers that differ from the composed configuration without a word.
    """

    path: Path
    kind: str
    reasons: list[str] = field(default_factory=list)
    accepted: frozenset[str] = frozenset()
    different: list[str] = field(default_factory=list)


def guess(name: str) -> str:
    """Return a value for a variable of a script."""
    value = next(value for pattern, value in _GUESSES if re.search(pattern, name.upper()))
    return value.format(name.lower())


def list_texts(path: Path) -> list[str]:
    """Return what a file has to import: its script, its path, or the commands that a page or the head of a program shows."""
    if path.suffix not in (".py", ".md"):
        return [path.read_text(encoding="utf-8", errors="replace") if path.suffix == ".sh" else str(path)]
    text = path.read_text(encoding="utf-8", errors="replace")
    page = (ast.get_docstring(ast.parse(_skip_comments(text))) or "") if path.suffix == ".py" else text
    commands = [" ".join(found.group().split("\\\n")).strip() for found in _SHOWN.finditer(page)]
    if path.suffix == ".py" and not commands and _TRAINS.search(text):
        return [str(path)]
    return commands


def _skip_comments(text: str) -> str:
    """Return a program without what precedes its last text before the code, which describes how it is called."""
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    return ast.unparse(nodes[-1]) if nodes else ""


def judge(project: str, path: Path, devices: int, text: str | None = None) -> tuple[Outcome, Import | None, dict[str, str]]:
    """Import an example, answering what the importer asks for; return the variables too."""
    variables = {"HOME": "/root", "PWD": os.getcwd()}
    accepted: frozenset[str] = frozenset()
    text = list_texts(path)[0] if text is None else text
    given: int | None = None
    rows = ASSUMED_ROWS
    reasons: list[str] = []
    own_reasons: list[str] = []
    for _ in range(_MAX_ROUNDS):
        settings = ImportSettings(devices=given, variables=variables, accepted=accepted, folder=path.parent, rows=rows)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                run = import_command(PROJECTS[project], text, settings)
        except ConfigError as error:
            reasons = list(error.errors)
        else:
            kind = "valid but for named numbers" if accepted else "valid"
            return Outcome(path, kind, accepted=accepted), run, variables
        # documents that are cut into samples have no number of rows that a file says
        rows = _ROWS if any("or --rows" in reason for reason in reasons) else rows
        asked = {name for reason in reasons for name in re.findall(r"--set (\w+)=", reason)} - variables.keys()
        named = {name for reason in reasons for name in re.findall(r"--accept (\w+) takes", reason)} - accepted
        variables |= {name: guess(name) for name in asked}
        accepted |= named
        if not asked and not named and settings.rows == rows:
            if given is not None:
                break
            given, own_reasons = devices, [reason for reason in reasons if "write --devices N" not in reason]
    # with other devices than its own a script may be refused for its sizes
    reasons = own_reasons or reasons
    kind = "no command" if any(reason.startswith(_NO_COMMAND) for reason in reasons) else "refused"
    return Outcome(path, kind, reasons), None, variables


def shorten(reason: str) -> str:
    """Return the kind of a refusal: without paths and numbers."""
    return re.sub(r"\d+", "N", re.sub(r"/[\w./-]+", "PATH", reason))[:120]


# ------------------------------------------------------------------------------------------------- verl's own composition

_OVERRIDE = re.compile(r"[+~]*[A-Za-z_][\w.@/-]*=")
_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


def _lower(config: DictConfig, *names: str) -> object:
    """Return the first of several options that has a value."""
    return next((value for name in names if (value := OmegaConf.select(config, name)) is not None), None)


def _by_mode(config: DictConfig, value: object) -> object:
    """Return a bound of the ratio for the losses that read it."""
    return value if _lower(config, f"{_A}policy_loss.loss_mode") in (None, "vanilla", "gspo") else None


def _kl(config: DictConfig) -> object:
    if _lower(config, "algorithm.use_kl_in_reward"):
        return _lower(config, "algorithm.kl_ctrl.kl_coef")
    return _lower(config, f"{_A}kl_loss_coef") if _lower(config, f"{_A}use_kl_loss") else 0.0


def _rate(config: DictConfig) -> object:
    style = _lower(config, f"{_A}optim.lr_decay_style", f"{_A}optim.lr_scheduler_type")
    return _lower(config, f"{_A}optim.lr") if style == "constant" else None


def _count_step(config: DictConfig) -> object:
    names = (f"{_A}ppo_mini_batch_size", "data.train_batch_size", f"{_R}n")
    mini, batch, group = (int(str(_lower(config, name))) for name in names)
    return min(mini, batch) * group


def _count_prompts(config: DictConfig) -> object:
    """Return the prompts of a rollout; None where the loader's batches are another number, or one is no batch of the update."""
    batch = int(str(_lower(config, "data.train_batch_size")))
    if _lower(config, "trainer.v1.trainer_mode") == "separate_async":
        return batch // int(str(_lower(config, "trainer.v1.separate_async.parameter_sync_step")))
    if _lower(config, "rollout.total_rollout_steps") is not None:
        return None  # the fully asynchronous trainer counts in require_batches
    own = _lower(config, "algorithm.filter_groups.enable") and _lower(config, "data.gen_batch_size")
    return int(str(own or batch))


def _rank(config: DictConfig) -> object:
    model = "actor_rollout_ref.model."
    if _lower(config, f"{model}lora_adapter_path", f"{model}lora.adapter_path"):
        return None  # the adapter has it
    return _lower(config, f"{model}{'lora.rank' if 'megatron' in str(_lower(config, f'{_A}strategy')) else 'lora_rank'}")


#: number of the plan -> its value in a composed configuration of main_ppo; None is not compared
_OF_PPO: dict[str, Callable[[DictConfig], object]] = {
    "lr_last": _rate,
    "weight_decay": lambda c: _lower(c, f"{_A}optim.weight_decay"),
    "clip_low": lambda c: _by_mode(c, _lower(c, f"{_A}clip_ratio_low", f"{_A}clip_ratio")),
    "clip_high": lambda c: _by_mode(c, _lower(c, f"{_A}clip_ratio_high", f"{_A}clip_ratio")),
    "entropy_coef": lambda c: _lower(c, f"{_A}entropy_coeff"),
    "kl_coef": _kl,
    "temperature": lambda c: _lower(c, f"{_R}temperature"),
    "top_p": lambda c: _lower(c, f"{_R}top_p"),
    "top_k": lambda c: _lower(c, f"{_R}top_k"),
    "prompt_length": lambda c: _lower(c, "data.max_prompt_length"),
    "response_length": lambda c: _lower(c, "data.max_response_length"),
    "infer_tp": lambda c: _lower(c, f"{_R}tensor_model_parallel_size"),
    "step_samples": _count_step,
    "rollout_prompts": _count_prompts,
    "lora_rank": _rank,
    "model": lambda c: _lower(c, "actor_rollout_ref.model.path"),
}
_OF_SFT: dict[str, Callable[[DictConfig], object]] = {
    "weight_decay": lambda c: _lower(c, "optim.weight_decay"),
    "clip_grad": lambda c: _lower(c, "optim.clip_grad"),
    "step_samples": lambda c: _lower(c, "data.train_batch_size"),
    "sequence_length": lambda c: _lower(c, "data.max_length"),
    "model": lambda c: _lower(c, "model.path"),
}


def _quote(word: str) -> str:
    """Return an override in Hydra's grammar, with quotes around text that the grammar would read otherwise."""
    name, _, value = word.partition("=")
    special = re.search(r"[\s,:;=(){}~]", value) and not value.startswith(("[", "'", '"', "{"))
    return f"{name}='{value}'" if special else word


def compose_verl(root: Path, path: Path, variables: Mapping[str, str]) -> tuple[bool, DictConfig] | None:
    """Return whether a script is supervised, and its configuration as Hydra composes it; None where it cannot be composed."""
    for command in read_script(path.read_text(encoding="utf-8"), variables, path.parent):
        text = " ".join(command.words[:40])
        if (found := re.search(r"main_ppo|sft_trainer|main_dapo|one_step_off", text)) is None:
            continue
        words = [_quote(word) for word in command.words if _OVERRIDE.match(word)]
        name = next(iter(re.findall(r"--config-name[= ]'?([\w-]+)", text)), "ppo_trainer")
        name = "sft_trainer_engine" if found.group() == "sft_trainer" else name
        for prefix in ("", "++"):  # a key that today's release has not
            forced = [word if not prefix or "." not in word.partition("=")[0] else prefix + word.lstrip("+") for word in words]
            with contextlib.suppress(HydraException, OmegaConfBaseException):
                with initialize_config_dir(str(root / "verl" / "trainer" / "config"), version_base=None):
                    return found.group() == "sft_trainer", compose(name, overrides=forced)
    return None


# ---------------------------------------------------------------------------------------------------- EasyR1's own composition

#: number of the plan -> its value in a composed configuration of EasyR1; None is not compared
_OF_EASYR1: dict[str, Callable[[DictConfig], object]] = {
    "rollout_prompts": lambda c: c.data.rollout_batch_size,
    "rollout_completions": lambda c: c.data.rollout_batch_size * c.worker.rollout.n,
    "step_samples": lambda c: c.worker.actor.global_batch_size * c.worker.rollout.n,
    "steps_per_rollout": lambda c: c.data.rollout_batch_size // c.worker.actor.global_batch_size * c.worker.actor.ppo_epochs,
    "lr_last": lambda c: c.worker.actor.optim.lr if c.worker.actor.optim.lr_scheduler_type == "constant" else None,
    "weight_decay": lambda c: c.worker.actor.optim.weight_decay,
    "clip_grad": lambda c: c.worker.actor.max_grad_norm,
    "clip_low": lambda c: None if c.worker.actor.loss_type == "sapo" else c.worker.actor.clip_ratio_low,
    "clip_high": lambda c: None if c.worker.actor.loss_type == "sapo" else c.worker.actor.clip_ratio_high,
    "clip_c": lambda c: None if c.worker.actor.loss_type in ("sapo", "cispo") else c.worker.actor.clip_ratio_dual,
    "kl_coef": lambda c: 0.0 if c.algorithm.disable_kl else c.algorithm.kl_coef,
    "kl_place": lambda c: None if c.algorithm.disable_kl else "loss" if c.algorithm.use_kl_loss else "reward",
    "kl_estimator": lambda c: None if c.algorithm.disable_kl else c.algorithm.kl_penalty,
    "temperature": lambda c: c.worker.rollout.temperature,
    "top_p": lambda c: c.worker.rollout.top_p,
    "top_k": lambda c: c.worker.rollout.top_k,
    "prompt_length": lambda c: c.data.max_prompt_length,
    "response_length": lambda c: c.data.max_response_length,
    "infer_tp": lambda c: c.worker.rollout.tensor_parallel_size,
    "lora_rank": lambda c: c.worker.actor.model.lora.rank,
    "dp": lambda c: c.trainer.nnodes * c.trainer.n_gpus_per_node // c.worker.actor.ulysses_size,
    "model": lambda c: c.worker.actor.model.model_path,
}


def _read_dataclasses(root: Path) -> dict[str, ast.ClassDef]:
    """Return the classes of EasyR1's configuration; nothing of them is imported."""
    files = [*root.glob("verl/trainer/config.py"), *root.glob("verl/workers/config.py"), *root.glob("verl/workers/*/config.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    return {item.name: item for tree in trees for item in tree.body if isinstance(item, ast.ClassDef)}


def _read_defaults(classes: Mapping[str, ast.ClassDef], name: str) -> dict[str, object]:
    """Return the defaults of a dataclass, nested as it is."""
    defaults: dict[str, object] = {}
    for item in classes[name].body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name) or item.value is None:
            continue
        kind, value = ast.unparse(item.annotation), item.value
        if kind in classes:
            defaults[item.target.id] = _read_defaults(classes, kind)
        elif not isinstance(value, ast.Call):
            defaults[item.target.id] = ast.literal_eval(value)
        elif not any(part.arg == "init" for part in value.keywords):
            defaults[item.target.id] = {}
    return defaults


def compose_easyr1(root: Path, path: Path, variables: Mapping[str, str]) -> DictConfig | None:
    """Return the configuration of a script as EasyR1 merges it; None without a command of its trainer."""
    for command in read_script(path.read_text(encoding="utf-8"), variables, path.parent):
        if "verl.trainer.main" not in command.words:
            continue
        words = OmegaConf.from_cli([word for word in command.words if _OVERRIDE.match(word)])
        file = OmegaConf.load(root / str(words.pop("config")))
        merged = OmegaConf.merge(OmegaConf.create(_read_defaults(_read_dataclasses(root), "PPOConfig")), file, words)
        assert isinstance(merged, DictConfig)
        return merged
    return None


# ----------------------------------------------------------------------------------------------------- AReaL's own composition


def _upper_bound(c: DictConfig) -> float:
    return c.actor.eps_clip if c.actor.eps_clip_higher is None else c.actor.eps_clip_higher


#: number of the plan -> its value in a composed configuration of AReaL; None is not compared
_OF_AREAL_ROWS: dict[str, Callable[[DictConfig], object]] = {
    "step_samples": lambda c: c.train_dataset.batch_size,
    "lr_last": lambda c: c.actor.optimizer.lr if c.actor.optimizer.lr_scheduler_type == "constant" else None,
    "weight_decay": lambda c: c.actor.optimizer.weight_decay,
    "clip_grad": lambda c: c.actor.optimizer.gradient_clipping,
    "beta": lambda c: c.actor.get("beta"),
    "lora_rank": lambda c: c.actor.lora_rank if c.actor.use_lora else 0,
    "dp": lambda c: int(re.findall(r"d(\d+)", c.actor.backend)[0]),
    "model": lambda c: c.actor.path,
}
_OF_AREAL: dict[str, Callable[[DictConfig], object]] = {
    **_OF_AREAL_ROWS,
    "rollout_prompts": lambda c: c.train_dataset.batch_size,
    "rollout_completions": lambda c: c.train_dataset.batch_size * c.gconfig.n_samples,
    "step_samples": lambda c: c.train_dataset.batch_size * c.gconfig.n_samples // c.actor.ppo_n_minibatches,
    "steps_per_rollout": lambda c: c.actor.ppo_n_minibatches,
    "clip_low": lambda c: None if c.actor.use_sapo_loss else c.actor.eps_clip,
    "clip_high": lambda c: None if c.actor.use_sapo_loss else _upper_bound(c),
    "clip_c": lambda c: c.actor.c_clip,
    "kl_coef": lambda c: c.actor.kl_ctl,
    "kl_estimator": lambda c: c.actor.kl_estimator if c.actor.kl_ctl else None,
    "level": lambda c: c.actor.importance_sampling_level,
    "temperature": lambda c: c.gconfig.temperature,
    "top_p": lambda c: c.gconfig.top_p,
    "response_length": lambda c: c.gconfig.max_new_tokens,
    "value_clip": lambda c: None if c.critic is None else c.critic.eps_clip,
    "infer_tp": lambda c: int([*re.findall(r"t(\d+)", c.rollout.backend), "1"][0]),
}


def _read_areal_defaults(classes: Mapping[str, ast.ClassDef], name: str) -> dict[str, object]:
    """Return the defaults of a dataclass of AReaL and its bases, nested as it is; None for what only code says."""
    defaults: dict[str, object] = {}
    for base in classes[name].bases:
        defaults |= _read_areal_defaults(classes, ast.unparse(base)) if ast.unparse(base) in classes else {}
    for item in classes[name].body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        value = item.value
        if "ClassVar" in ast.unparse(item.annotation):
            continue
        if isinstance(value, ast.Call):
            found = {part.arg: part.value for part in value.keywords}
            kind = ast.unparse(found.get("default_factory", ast.Constant(value=None)))
            if kind in classes:
                defaults[item.target.id] = _read_areal_defaults(classes, kind)
                continue
            value = found.get("default")
        with contextlib.suppress(ValueError):
            defaults[item.target.id] = None if value is None else ast.literal_eval(value)
    return defaults


def compose_areal(root: Path, path: Path) -> tuple[bool, DictConfig]:
    """Return whether a file is one of rollouts, and its configuration as AReaL merges it over its dataclasses."""
    tree = ast.parse((root / _CONFIGURATIONS["areal"]).read_text(encoding="utf-8"))
    classes = {item.name: item for item in tree.body if isinstance(item, ast.ClassDef)}
    file = OmegaConf.load(path)
    assert isinstance(file, DictConfig)
    has_rollouts = "gconfig" in file
    name = "PPOConfig" if has_rollouts else "DPOConfig" if file.train_dataset.type == "dpo" else "SFTConfig"
    defaults = _read_areal_defaults(classes, name)
    for group, kind in {"actor.optimizer": "OptimizerConfig", "critic": "PPOCriticConfig"}.items():
        if OmegaConf.select(file, group) is not None:
            merged = OmegaConf.merge(_read_areal_defaults(classes, kind), OmegaConf.select(file, group))
            OmegaConf.update(file, group, merged)
    composed = OmegaConf.merge(OmegaConf.create(defaults), file)
    assert isinstance(composed, DictConfig)
    return has_rollouts, composed


# ------------------------------------------------------------------------------------------------------ ROLL's own composition


def _read_roll_role(config: DictConfig) -> DictConfig:
    """Return the role that trains."""
    return config.sft_train if "sft_train" in config else config.actor_train


def _count_roll_step(config: DictConfig) -> int:
    arguments = _read_roll_role(config).training_args
    return arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * _count_roll_replicas(config)


def _count_roll_replicas(config: DictConfig) -> int:
    role = _read_roll_role(config)
    mapping, layout = str(role.device_mapping), role.strategy_args.strategy_config or {}
    devices = sum(int(last) - int(first) for first, last in re.findall(r"range\((\d+), *(\d+)\)", mapping))
    devices = devices or len(re.findall(r"\d+", mapping))
    if role.strategy_args.strategy_name != "megatron_train":
        return devices // (role.model_args.ulysses_size or 1)
    names = ("tensor_model", "pipeline_model", "context")
    return devices // math.prod(layout.get(f"{name}_parallel_size", 1) for name in names)


def _clip_roll(config: DictConfig, side: str) -> float:
    return config.get(f"pg_clip_{side}") if config.use_pg_clip_range else config.pg_clip


#: number of the plan -> its value in a composed configuration of ROLL; None is not compared
_OF_ROLL_ROWS: dict[str, Callable[[DictConfig], object]] = {
    "step_samples": _count_roll_step,
    "dp": _count_roll_replicas,
    "lr_last": lambda c: _read_roll_role(c).training_args.learning_rate
    if _read_roll_role(c).training_args.lr_scheduler_type == "constant" else None,
    "weight_decay": lambda c: _read_roll_role(c).training_args.weight_decay,
    "clip_grad": lambda c: c.max_grad_norm,
    "lora_rank": lambda c: _read_roll_role(c).model_args.lora_rank if _read_roll_role(c).model_args.lora_target else 0,
    "model": lambda c: c.pretrain,
    "sequence_length": lambda c: None if "actor_infer" in c and c.actor_infer.device_mapping else c.sequence_length,
}  # fmt: skip
#: of distillation on rows, whose loss is divided by its weight here
_OF_ROLL_TEACHERS: dict[str, Callable[[DictConfig], object]] = {
    **{name: read for name, read in _OF_ROLL_ROWS.items() if name != "sequence_length"},
    "clip_grad": lambda c: c.max_grad_norm / c.distill_loss_weight,
    "divergence": lambda c: f"{c.kd_objective} over {c.logits_topk} tokens of the teacher, renormalized",
    "prompt_length": lambda c: c.sequence_length - c.sequence_length // 2,
    "response_length": lambda c: c.sequence_length // 2,
}
_OF_ROLL: dict[str, Callable[[DictConfig], object]] = {
    **_OF_ROLL_ROWS,
    "rollout_prompts": lambda c: c.rollout_batch_size,
    "rollout_completions": lambda c: c.rollout_batch_size * c.num_return_sequences_in_group,
    "steps_per_rollout": lambda c: c.rollout_batch_size * c.num_return_sequences_in_group * c.ppo_epochs // _count_roll_step(c),
    "lr_warmup_steps": lambda c: c.actor_train.training_args.warmup_steps
    if c.actor_train.strategy_args.strategy_name == "megatron_train" else None,
    "clip_low": lambda c: _clip_roll(c, "low"),
    "clip_high": lambda c: _clip_roll(c, "high"),
    "clip_c": lambda c: 1 + 2 * c.pg_clip if c.dual_clip_loss else None,
    "kl_coef": lambda c: c.kl_loss_coef if c.use_kl_loss else c.init_kl_coef if c.add_token_level_kl else 0.0,
    "entropy_coef": lambda c: c.entropy_loss_coef,
    "temperature": lambda c: c.actor_infer.generating_args.temperature,
    "top_p": lambda c: c.actor_infer.generating_args.top_p,
    "top_k": lambda c: c.actor_infer.generating_args.top_k,
    "prompt_length": lambda c: c.prompt_length,
    "response_length": lambda c: c.response_length or c.sequence_length - c.prompt_length,
    "infer_tp": lambda c: c.actor_infer.strategy_args.strategy_config.get("tensor_parallel_size", 1),
}  # fmt: skip


def compose_roll(root: Path, path: Path) -> Composed:
    """Return the numbers that are compared, and the configuration of a file as ROLL merges it over its dataclasses."""
    files = [*root.glob("roll/configs/*.py"), *root.glob("roll/pipeline/*/*_config.py")]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    classes = {item.name: item for tree in trees for item in tree.body if isinstance(item, ast.ClassDef)}
    text = re.sub(r"\$\{now:[^}]*\}", "now", path.read_text(encoding="utf-8"))
    file = OmegaConf.create(text)
    assert isinstance(file, DictConfig)
    for name in ("train", "infer"):
        if f"student_{name}" in file:
            file[f"actor_{name}"] = file[f"student_{name}"]
    kind = "SFTConfig" if "sft_train" in file else "RLVRConfig" if "actor_infer" in file else "DPOConfig"
    if {"student", "teacher"} <= set(file):
        kind = "DistillConfig"
        file["actor_train"], file["pretrain"] = file["student"], file["student_pretrain"]
    config = OmegaConf.merge(_read_areal_defaults(classes, kind), file)
    worker = _read_areal_defaults(classes, "WorkerConfig")
    parts = {"training_args": "TrainingArguments", "model_args": "ModelArguments", "generating_args": "GeneratingArguments"}
    for role in ("sft_train", "actor_train", "actor_infer"):
        if role in file:
            merged = {part: OmegaConf.merge(_read_areal_defaults(classes, name), file[role].get(part) or {})
                      for part, name in parts.items()}  # fmt: skip
            config[role] = OmegaConf.merge(worker, file[role], merged)
    assert isinstance(config, DictConfig)
    if kind == "DistillConfig":
        return _OF_ROLL_TEACHERS, config
    return (_OF_ROLL if kind == "RLVRConfig" else _OF_ROLL_ROWS), config


# ---------------------------------------------------------------------------------------------------------- TRL's own parser

#: program -> whether it has rollouts
_TRL_PROGRAMS = {"grpo": True, "rloo": True, "sft": False, "dpo": False, "kto": False, "reward": False}
#: number of the plan -> its value in TRL's parsed arguments; None is not compared
_OF_TRL_ROWS: dict[str, Callable[[DictConfig], object]] = {
    "step_samples": lambda c: c.per_device_train_batch_size * c.gradient_accumulation_steps * c.devices,
    "total_steps": lambda c: c.max_steps if c.max_steps > 0 else None,
    "lr_last": lambda c: c.learning_rate if c.lr_scheduler_type.startswith("constant") else None,
    "lr_warmup_steps": lambda c: int(c.warmup_steps) if c.warmup_steps >= 1 or not c.warmup_steps else None,
    "weight_decay": lambda c: c.weight_decay,
    "clip_grad": lambda c: c.max_grad_norm,
    "beta": lambda c: c.get("beta"),
    "sequence_length": lambda c: c.max_length,
    "lora_rank": lambda c: c.lora_r if c.use_peft else 0,
    "dp": lambda c: c.devices,
    "model": lambda c: c.model_name_or_path,
}
_OF_TRL: dict[str, Callable[[DictConfig], object]] = {
    **{name: read for name, read in _OF_TRL_ROWS.items() if name not in ("beta", "sequence_length")},
    "rollout_completions": lambda c: c.per_device_train_batch_size * c.devices * c.steps_per_generation,
    "rollout_prompts": lambda c: c.per_device_train_batch_size * c.devices * c.steps_per_generation // c.num_generations,
    "steps_per_rollout": lambda c: c.steps_per_generation // c.gradient_accumulation_steps * c.num_iterations,
    "clip_low": lambda c: None if c.get("loss_type") in ("sapo", "vespo", "cispo") else c.epsilon,
    "clip_high": lambda c: None if c.get("loss_type") in ("sapo", "vespo") else c.epsilon_high or c.epsilon,
    "delta": lambda c: c.get("delta"),
    "kl_coef": lambda c: c.beta,
    "level": lambda c: c.get("importance_sampling_level"),
    "advantage_scale": lambda c: c.get("scale_rewards"),
    "entropy_coef": lambda c: c.get("entropy_coef"),
    "temperature": lambda c: c.temperature,
    "top_p": lambda c: c.top_p,
    "top_k": lambda c: c.top_k or -1,
    "min_p": lambda c: c.min_p,
    "response_length": lambda c: c.max_completion_length,
    "infer_tp": lambda c: c.vllm_tensor_parallel_size,
}


def count_trl_processes(text: str, root: Path, devices: int) -> int:
    """Return the processes of a command of TRL: by number, by a file of accelerate, 1 of Python itself, else all devices."""
    if (found := re.search(r"--num_processes[= ](\d+)", text)) is not None:
        return int(found.group(1))
    if (found := re.search(r"(?:--config_file|--accelerate_config)[= ](\S+)", text)) is not None:
        names = (found.group(1), f"trl/accelerate_configs/{found.group(1)}.yaml")
        files = [root / name for name in names if (root / name).is_file()]
        if files and (number := re.search(r"^num_processes: (\d+)", files[0].read_text(encoding="utf-8"), re.MULTILINE)):
            return int(number.group(1))
    return 1 if re.match(r" *(\w+=\S+ )*python", text) else devices


def compose_trl(text: str, variables: Mapping[str, str], folder: Path, devices: int) -> Composed | None:
    """Return what TRL's own parser makes of a command of one of its programs; None for another command, or without TRL."""
    if importlib.util.find_spec("trl") is None:
        return None
    for command in read_script(text, variables, folder):
        words = list(command.words)
        place = next((place for place, word in enumerate(words) if place and words[place - 1] == "trl"), None)
        if place is None:
            script = re.compile(r"^trl\.scripts\.|(trl|examples)/scripts/\w+\.py$")
            place = next((place for place, word in enumerate(words) if script.search(word)), None)
        name = "" if place is None else Path(words[place].removeprefix("trl.scripts.")).stem
        if place is None or name not in _TRL_PROGRAMS:
            continue
        launcher = {"--num_processes", "--accelerate_config"}
        given = words[place + 1 :]
        for flag in launcher & set(given):
            del given[(at := given.index(flag)) : at + 2]
        parser = importlib.import_module(f"trl.scripts.{name}").make_parser()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            parsed = parser.parse_args_and_config([*given, "--use_cpu", "True"], fail_with_unknown_args=False)
        plain = (str, int, float, bool, type(None))
        values = {key: value for part in parsed for key, value in vars(part).items()} | {"devices": devices}
        values = {key: value.value if isinstance(value, Enum) else value for key, value in values.items()}
        config = OmegaConf.create({key: value for key, value in values.items() if isinstance(value, plain)})
        return (_OF_TRL if _TRL_PROGRAMS[name] else _OF_TRL_ROWS), config
    return None


def _compose(
    project: str, root: Path, path: Path, variables: Mapping[str, str], text: str = "", devices: int = 1
) -> Composed | None:
    """Return what a project composes of a script, with the numbers that are compared."""
    if project == "trl":
        return compose_trl(text, variables, path.parent, devices)
    if project == "roll":
        return compose_roll(root, path)
    if project == "areal":
        has_rollouts, merged = compose_areal(root, path)
        return (_OF_AREAL if has_rollouts else _OF_AREAL_ROWS), merged
    if project == "easyr1":
        config = compose_easyr1(root, path, variables)
        return None if config is None else (_OF_EASYR1, config)
    composed = compose_verl(root, path, variables)
    return None if composed is None else (_OF_SFT if composed[0] else _OF_PPO, composed[1])


Composed = tuple[dict[str, Callable[[DictConfig], object]], DictConfig]


def find_different(composed: Composed, here: SourcePlan, accepted: frozenset[str]) -> Iterator[str]:
    """Yield the numbers of a run file that differ from the composed configuration."""
    numbers, config = composed
    for name, read in numbers.items():
        there, ours = read(config), getattr(here, name)
        if there is not None and name not in accepted and there != ours:
            yield f"{name} is {ours} here, {there} in the composed configuration"


# ------------------------------------------------------------------------------------------------------------------- table


def judge_all(project: str, root: Path, devices: int) -> list[Outcome]:
    """Import every example below a folder, in its order of names."""
    outcomes: list[Outcome] = []
    composes = (root / _CONFIGURATIONS[project]).exists() if project in _CONFIGURATIONS else False
    paths = sorted({path for pattern in PATTERNS.get(project, _SCRIPTS) for path in root.glob(pattern)})
    for path, text in ((each, text) for each in paths for text in list_texts(each)):
        outcome, run, variables = judge(project, path, devices, text)
        outcomes.append(outcome)
        if not composes or run is None or run.plans is None:
            continue
        processes = count_trl_processes(text, root, devices)
        if (composed := _compose(project, root, path, variables, text, processes)) is not None:
            outcome.different = list(find_different(composed, run.plans[1], outcome.accepted))
    return outcomes


def describe(outcomes: list[Outcome], *, each: bool = False) -> str:
    """Return the table, the reasons of refusals with their numbers, and what differs."""
    counts = Counter(outcome.kind for outcome in outcomes)
    with_command = sum(counts.values()) - counts["no command"]
    valid = counts["valid"] + counts["valid but for named numbers"]
    share = f" ({valid / with_command:.0%})" if with_command else ""
    lines = [
        f"{len(outcomes)} files, {with_command} with a command: {valid} valid{share}, of which "
        f"{counts['valid but for named numbers']} but for named numbers, {counts['refused']} refused"
    ]
    reasons: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for outcome in outcomes:
        kinds = {shorten(reason) for reason in outcome.reasons} if outcome.kind == "refused" else set()
        reasons.update(kinds)
        alone.update(kinds if len(kinds) == 1 else ())
    lines += ["", "refused | alone | reason"] if reasons else []
    lines += [f"{count:7} | {alone[reason]:5} | {reason}" for reason, count in reasons.most_common()]
    different = [f"{outcome.path}: {text}" for outcome in outcomes for text in outcome.different]
    lines += ["", f"{len(different)} numbers differ without a word", *different]
    if each:
        lines += ["", *(f"{outcome.kind}: {outcome.path}" for outcome in outcomes if outcome.kind != "no command")]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.importing", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="root of the checkout")
    parser.add_argument("--project", required=True, choices=sorted(PROJECTS))
    parser.add_argument("--devices", type=int, default=8, help="devices where a script does not say them")
    parser.add_argument("--each", action="store_true", help="name every example")
    arguments = parser.parse_args()
    outcomes = judge_all(arguments.project, arguments.folder.resolve(), arguments.devices)
    print(describe(outcomes, each=arguments.each))


if __name__ == "__main__":
    main()
