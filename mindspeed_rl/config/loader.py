"""From a run file on disk to a `RunConfig`: Hydra composes, the schema checks, roles are merged."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_rl.config.diagnostics import MsprobeConfig, ProfilerGroups
from mindspeed_rl.config.errors import ConfigError, nearest, unknown_key, unknown_value
from mindspeed_rl.config.generate import ENGINE_SAMPLING, GenerateConfig
from mindspeed_rl.config.megatron import MegatronConfig
from mindspeed_rl.config.objective import unusable_plugins
from mindspeed_rl.config.rl import RLConfig
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.schema import build, normalized

PLATFORMS = ("auto", "npu", "cpu", "cuda")
ROLE_GROUPS = ("actor_config", "ref_config", "reward_config", "critic_config", "vit_config")
TOP_LEVEL = ("megatron_training", *ROLE_GROUPS, "rl_config", "generate_config", "profiler_config", "msprobe_config")

# How other projects spell keys that exist here.
SYNONYMS = {
    "advantage_estimator": "adv_estimator",
    "cliprange": "clip_ratio",
    "epsilon": "clip_ratio",
    "epsilon_high": "clip_ratio_high",
    "gradient_accumulation_steps": "mini_batch_size",
    "kl_coef": "init_kl_coef",
    "kl_in_reward": "use_kl_in_reward",
    "kl_loss_coef": "init_kl_coef",
    "learning_rate": "lr",
    "mask_truncated_completions": "overlong_filter",
    "num_samples_per_prompt": "n_samples_per_prompt",
    "per_device_train_batch_size": "micro_batch_size",
    "ppo_epochs": "epochs",
    "ppo_mini_batch_size": "mini_batch_size",
    "save_steps": "save_interval",
    "shuffle_minibatch": "shuffle_mini_batch",
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_max_model_len": "max_model_len",
    "vllm_max_num_seqs": "max_num_seqs",
    "vllm_tensor_parallel_size": "infer_tensor_parallel_size",
}


def load_run_config(config_name: str, config_dir: str | Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the run file as typed, merged groups.

    Args:
        config_name: name of the run file with or without ".yaml", or a path to it.
        config_dir: folder of the run file; the project's `configs/`, then `configs/` of the working directory when unset.
            A folder without a `model/` group of its own uses the project's model blocks.
        overrides: "group.key=value" items as on the command line; they also set keys that the file does not have.

    Raises:
        ConfigError: missing file, unknown key, wrong type or unknown model block; all mistakes at once.
    """
    directory, name = locate(config_name, config_dir)
    return build_run_config(compose(directory, name, list(overrides)), config_name=name, config_dir=str(directory))


def project_configs() -> Path:
    """Return the `configs/` folder beside the package."""
    return Path(__file__).resolve().parents[2] / "configs"


def locate(config_name: str, config_dir: str | Path | None) -> tuple[Path, str]:
    """Return the folder and the bare name of a run file that exists.

    Raises:
        ConfigError: no such folder or file; the sentence names the most similar run file.
    """
    if config_dir is None and os.sep in config_name:
        config_dir, config_name = os.path.split(config_name)
    name = config_name.removesuffix(".yaml")
    folders = [Path(config_dir)] if config_dir is not None else [project_configs(), Path.cwd() / "configs"]
    for folder in folders:
        if (folder / f"{name}.yaml").is_file():
            return folder.resolve(), name
    existing = [folder for folder in folders if folder.is_dir()]
    if not existing:
        raise ConfigError([f"the configuration folder {folders[0]} does not exist"])
    available = sorted(path.stem for folder in existing for path in folder.glob("*.yaml"))
    likely = nearest(name, available)
    hint = f"the nearest name there is {likely}" if likely else f"it holds {', '.join(available) or 'no run file'}"
    raise ConfigError([f"there is no run file {name}.yaml in {existing[0]}; {hint}"])


def compose(directory: Path, name: str, overrides: list[str]) -> dict[str, Any]:
    """Return the composed run file as plain containers, with interpolations resolved.

    Raises:
        ConfigError: YAML that cannot be read, a model block or an override that Hydra rejects.
    """
    # Imported here so that the package itself loads at once and without Hydra.
    import yaml
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    items = [_as_forced(item) for item in overrides]
    if directory != project_configs():
        items.append(f"hydra.searchpath=['file://{project_configs()}']")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Hydra asks for `_self_` in defaults; upstream's run files have none.
            with initialize_config_dir(version_base=None, config_dir=str(directory)):
                composed = hydra_compose(name, overrides=items)
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingConfigException as error:
        missing = (error.missing_cfg_file or "").removesuffix(".yaml")
        group, _, block = missing.rpartition("/")
        available = sorted({path.stem for folder in (directory, project_configs()) for path in (folder / group).glob("*.yaml")})
        likely = nearest(block, available)
        hint = f"the nearest name there is {likely}" if likely else f"known names are {', '.join(available) or 'none'}"
        raise ConfigError([f"defaults of {name}.yaml: {missing}.yaml does not exist in {directory}; {hint}"]) from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError([f"{name}.yaml cannot be read: {_one_line(error)}"]) from error


def _as_forced(item: str) -> str:
    """Let "group.key=value" also add a key the file does not have; the schema decides whether the key exists."""
    key = re.match(r"[^=]*", item).group()
    if "=" not in item and not item.startswith("~"):
        raise ConfigError([f"override {item!r} is not of the form group.key=value"])
    if item[0] in "+~" or key.startswith("hydra.") or key == "model" or "@" in key:
        return item
    return f"++{item}"


def _one_line(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def build_run_config(tree: Mapping[str, Any], *, config_name: str = "", config_dir: str = "") -> RunConfig:
    """Return the typed run for plain containers as `compose` gives them.

    A role's engine starts from its model block; the keys of megatron_training come over it, then the role's own.

    Raises:
        ConfigError: every unknown key, wrong type and unknown model block at once; else every plug-in that cannot be used.
    """
    errors: list[str] = []
    tree = normalized(tree)
    known = (*TOP_LEVEL, "model", "platform", "run_dir")
    groups: dict[str, dict[str, Any]] = {}
    for name, value in tree.items():
        if name not in known:
            errors.append(unknown_key(name, value, known))
        elif name in TOP_LEVEL:
            if isinstance(value, Mapping):
                groups[name] = normalized(value)
            elif value is not None:
                errors.append(f"{name} is {value!r}, but must be a group of keys")
    set_keys: dict[str, frozenset[str]] = {}

    def group(name: str, schema: type) -> Any:
        built, set_keys[name] = build(schema, groups[name], name, errors, SYNONYMS)
        return built

    if "megatron_training" not in groups:
        errors.append("the group megatron_training is missing")
        groups["megatron_training"] = {}
    for name in ("megatron_training", *ROLE_GROUPS):
        if name in groups:
            group(name, MegatronConfig)
    blocks = _model_blocks(tree.get("model"), errors)
    shared = groups["megatron_training"]
    actor = _role(shared, groups.get("actor_config", {}), "actor_config", blocks, errors)
    roles = {
        name: _role(shared, groups[name], name, blocks, errors) if name in groups else None
        for name in ROLE_GROUPS
        if name != "actor_config"
    }
    rl = group("rl_config", RLConfig) if "rl_config" in groups else None
    generate = None
    if "generate_config" in groups:
        sampling = groups["generate_config"].get("sampling_config")
        if isinstance(sampling, Mapping):
            groups["generate_config"]["sampling_config"] = {**ENGINE_SAMPLING, **normalized(sampling)}
        generate = group("generate_config", GenerateConfig)
        set_keys["sampling_config"] = frozenset(normalized(sampling)) if isinstance(sampling, Mapping) else frozenset()
    profiler = group("profiler_config", ProfilerGroups) if "profiler_config" in groups else ProfilerGroups()
    msprobe = group("msprobe_config", MsprobeConfig) if "msprobe_config" in groups else MsprobeConfig()
    platform = tree.get("platform") or "auto"
    if platform not in PLATFORMS:
        errors.append(unknown_value("platform", platform, PLATFORMS))
    run_dir = tree.get("run_dir")
    if run_dir is not None and not isinstance(run_dir, str):
        errors.append(f"run_dir is {run_dir!r}, but must be text or null")
    if errors:
        raise ConfigError(dict.fromkeys(errors))
    spelled = apply_second_spellings(rl, generate, set_keys) if rl is not None else {}
    set_keys["run"] = frozenset(name for name in ("platform", "run_dir") if name in tree)
    cfg = RunConfig(
        config_name=config_name,
        config_dir=config_dir,
        platform=platform,
        run_dir=run_dir,
        megatron_training=_role(shared, {}, "megatron_training", blocks, errors),
        actor_config=actor,
        ref_config=roles["ref_config"] or actor,
        reward_config=roles["reward_config"],
        critic_config=roles["critic_config"],
        vit_config=roles["vit_config"],
        rl_config=rl,
        generate_config=generate,
        profiler_config=profiler,
        msprobe_config=msprobe,
        set_keys=set_keys,
        spelled=spelled,
    )
    if rl is not None and not cfg.is_supervised and (wrong := unusable_plugins(rl, cfg.stage or "ray_grpo")):
        raise ConfigError(wrong)
    return cfg


def _model_blocks(value: Any, errors: list[str]) -> dict[str, dict[str, Any]]:
    """Return the model blocks by name, each checked against the schema."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        errors.append(f"model is {value!r}, but must hold model blocks (list them under defaults: [{{model: [...]}}])")
        return {}
    blocks: dict[str, dict[str, Any]] = {}
    for name, block in value.items():
        if isinstance(block, Mapping):
            build(MegatronConfig, block, f"model.{name}", errors, SYNONYMS)
            blocks[str(name)] = normalized(block)
        else:
            errors.append(f"model.{name} is {block!r}, but must be a group of keys")
    return blocks


def _role(
    shared: dict[str, Any], own: dict[str, Any], name: str, blocks: dict[str, dict[str, Any]], errors: list[str]
) -> MegatronConfig:
    """Return one role's engine keys: model block, then shared keys, then its own."""
    model = own.get("model") or shared.get("model")
    block: dict[str, Any] = {}
    if isinstance(model, str):
        if model in blocks:
            block = blocks[model]
        else:
            where = f"{name}.model" if own.get("model") else "megatron_training.model"
            wrong = unknown_value(where, model, blocks) if blocks else f"{where} is {model!r}, but no model block is loaded"
            errors.append(f"{wrong}; blocks are listed under defaults: [{{model: [...]}}]")
    built, _ = build(MegatronConfig, {**block, **shared, **own}, name, [])  # mistakes were reported for each source already
    return built


def apply_second_spellings(
    rl: RLConfig, generate: GenerateConfig | None, set_keys: Mapping[str, frozenset[str]]
) -> dict[str, Any]:
    """Write what ms-swift's spellings say into the keys the rest of the system reads; return what the run file said.

    `num_generations` is n_samples_per_prompt, `num_iterations` is epochs, `reward_funcs` and `reward_weights` are the
    verifiers, `max_completion_length` is max_tokens, and `beta` beside num_generations is init_kl_coef. `validate` reports
    spellings that contradict each other.
    """
    said = {f"rl_config.{name}": getattr(rl, name) for name in set_keys["rl_config"] if getattr(rl, name) is not None}
    if generate is not None and "max_tokens" in set_keys["sampling_config"]:
        said["generate_config.sampling_config.max_tokens"] = generate.sampling_config.max_tokens
    if rl.num_generations is not None:
        rl.n_samples_per_prompt = rl.num_generations
        if rl.beta is not None:
            rl.init_kl_coef = rl.beta
    if rl.num_iterations is not None:
        rl.epochs = rl.num_iterations
    if rl.reward_funcs is not None:
        rl.verifier_function = list(rl.reward_funcs)
        rl.verifier_weight = list(rl.reward_weights) if rl.reward_weights is not None else [1.0] * len(rl.reward_funcs)
    if rl.max_completion_length is not None and generate is not None:
        generate.sampling_config.max_tokens = rl.max_completion_length
    return said
