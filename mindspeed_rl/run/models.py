"""Models of a run, planned on the driver before anything is started: shapes only, no weight is read."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mindspeed_rl.adaptors.cpu_attention import keep_kernel, try_kernels
from mindspeed_rl.adaptors.exact_kernels import find_violation
from mindspeed_rl.checkpoint.lora import PeftMerge, open_peft
from mindspeed_rl.checkpoint.model_source import (
    check_critic_start,
    check_reward_start,
    find_model,
)
from mindspeed_rl.checkpoint.other_engine import check_source
from mindspeed_rl.config import ConfigError, GenerateConfig, MegatronConfig, RunConfig
from mindspeed_rl.config.keys import ROLE_GROUPS
from mindspeed_rl.config.model_metadata import list_config_folders
from mindspeed_rl.config.run import Derivation
from mindspeed_rl.files import read_json
from mindspeed_rl.hub import find_folder, parse_hub_name
from mindspeed_rl.models.costs import measure_head_share
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.model_keys import fill_model_keys
from mindspeed_rl.models.module_family import ModuleArchitecture
from mindspeed_rl.models.plan import ModelPlan, ModelSource, RoleModel, plan_model, read_model
from mindspeed_rl.models.quantized_names import explain_divided_blocks
from mindspeed_rl.platform import platform_class, resolve_name
from mindspeed_rl.run import Run
from mindspeed_rl.run.hub_models import Hubs, fetch_configs, fetch_models
from mindspeed_rl.run.ref_model import resolve_rollout_ref, resolve_supervised_ref
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.run.resume import find_resume_point, loads_its_save
from mindspeed_rl.run.rules.quantized_models import explain_unquantized
from mindspeed_rl.run.rules.training_engine_rules import check_model_form

#: part of an update's products that logits in float32 may take by default
_MAX_HEAD_SHARE = 0.1
#: roles whose keys are filled from config.json; those of a teacher are read for each of its models
_ROLES = tuple(group for group in ROLE_GROUPS if group != "teacher_config")
#: models whose layers `adaptors.exact_kernels` computes, and tests compare
_EXACT_MODELS = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
#: tokens whose probabilities these kernels add up at once
_VOCAB_GROUP = 16

#: start of a path in the run files that are included -> the command that makes it; the longer one first
_EXAMPLES = {
    **{f"runs/quickstart/data/{name}": "bash examples/supervised_stages.sh" for name in ("documents", "pairs", "steps")},
    **{f"runs/{name}": f"bash examples/{name}.sh" for name in ("quickstart", "agent", "swe_tiny", "vision", "distill")},
}


def resolve_run(cfg: RunConfig, num_nodes: int, *, hubs: Hubs | None = None) -> Run:
    """Run the first stage of checks: what the run file says, with the config.json of its models.

    The second is `trainers.rl_setup.check_rl` or `trainers.sft_setup.check_supervised`: what only this machine knows.

    Args:
        hubs: where models that are named as on a hub come from, with what it has fetched before; None for new ones.

    Raises:
        ValueError: the run file is wrong; all violations are named.
    """
    hubs = hubs or Hubs()
    cfg = fetch_configs(cfg, hubs)
    _check_hub_models(cfg)
    cfg = with_model_configs(fetch_models(cfg, hubs))
    run = resolve(cfg, num_nodes, platform=resolve_name(cfg.platform))
    if run.platform == "cpu" and cfg.exact_slices:
        threads = 1 if run.threads is None else run.threads.count
        if (problem := find_violation(cfg.exact_slices, threads)) is not None:
            raise ConfigError([problem])
    return run


def with_model_configs(cfg: RunConfig) -> RunConfig:
    """Return the run file with the model keys that it omits filled from the config.json of each role's model.

    A role whose weights are missing stays as it is: loading them fails later, where its model is one that can be built.

    Raises:
        ConfigError: a written key contradicts the config.json of its role's model, or a model is not supported.
    """
    shared = cfg.set_keys.get("megatron_training", frozenset())
    changes: dict[str, MegatronConfig] = {}
    violations: list[str] = []
    for name in _ROLES:
        role = getattr(cfg, name)
        # without ref_config the reference is the actor
        if role is None or (name != "actor_config" and role is cfg.actor_config):
            continue
        try:
            source = find_model(role, name)
        except ValueError:
            changes[name] = role
            # a model that cannot be built is refused first: its weights would be fetched in vain
            violations += [f"{name}: {reason}" for reason in _list_unsupported(role)]
            continue
        try:
            # only the actor has prediction layers
            check_source(role if name == "actor_config" else dataclasses.replace(role, mtp_num_layers=0), source)
            architecture, model_config, _ = read_model(source.hf_folder, role.engine, trusts_code=role.trust_remote_code)
            written = shared | cfg.set_keys.get(name, frozenset())
            role = fill_model_keys(role, model_config, Path(source.hf_folder, "config.json"), written)
            if name == "actor_config" and cfg.rl_config is not None and cfg.rl_config.exact_log_probs:
                _check_exact(architecture.name, model_config, role)
            if source.adapter is not None and role.lora_target_modules:
                ops = architecture.weight_ops(model_config)
                adapter = open_peft(source.adapter, ops)
                ranks = adapter.count_ranks(ops, role.adapted_parts)
                role = dataclasses.replace(role, **_derive_adapter_keys(adapter, ranks, role.lora_r, written))
            changes[name] = role
        except ValueError as error:
            violations.append(f"{name}: {error}")
    if violations:
        raise ConfigError(violations)
    actor = changes["actor_config"]
    return dataclasses.replace(
        cfg,
        actor_config=actor,
        ref_config=changes.get("ref_config", actor),
        reward_config=changes.get("reward_config"),
        critic_config=changes.get("critic_config"),
    )


def _check_hub_models(cfg: RunConfig) -> None:
    """Check that the models that a run names as on a hub can be built, by their config.json, before weights are fetched.

    Raises:
        ConfigError: some cannot.
    """
    violations: list[str] = []
    for name, role in _list_models(cfg):
        if any(map(parse_hub_name, (role.load, role.pretrained_checkpoint))):
            violations += [f"{name}: {reason}" for reason in _list_unsupported(role)]
    judge = None if cfg.rl_config is None or cfg.is_supervised else cfg.rl_config.served_judge
    if judge is not None and parse_hub_name(judge) and (reason := _find_quantized_judge(find_folder(judge))):
        violations.append(reason)
    if violations:
        raise ConfigError(dict.fromkeys(violations))


def _list_models(cfg: RunConfig) -> Iterator[tuple[str, MegatronConfig]]:
    """Yield each model of a run that an engine of the trainer builds: the key or the group that names it, and its keys."""
    for name in _ROLES:
        if (role := getattr(cfg, name)) is not None:
            yield name, role
    if cfg.is_supervised:
        if (ref := cfg.actor_config.ref_model) is not None:
            yield "ref_model", _of_folder(cfg.actor_config, ref)
        return
    if (rl := cfg.rl_config) is None:
        return
    if rl.reward_model is not None and cfg.reward_model_keys is not None:
        yield "rl_config.reward_model", cfg.reward_model_keys
    for teacher in () if rl.distillation is None else rl.distillation.teacher_models:
        yield "rl_config.distillation.teacher_models", cfg.read_teacher_keys(teacher)
    if rl.integrated_mode_config is not None and (ref := rl.integrated_mode_config.ref_model_load_path) is not None:
        yield "rl_config.integrated_mode_config.ref_model_load_path", _of_folder(cfg.ref_config, ref)


def _of_folder(role: MegatronConfig, folder: str) -> MegatronConfig:
    """Return the keys of a role with other weights."""
    return dataclasses.replace(role.without_model_keys(), load=folder, pretrained_checkpoint=None)


def _list_unsupported(role: MegatronConfig) -> Iterator[str]:
    """Yield why no layout of a role builds its model, of which only config.json needs to be here."""
    for name in filter(None, (role.load, role.pretrained_checkpoint)):
        folder, _ = list_config_folders(name, role.base_model)
        if (folder / "config.json").is_file():
            try:
                read_model(folder, role.engine, trusts_code=role.trust_remote_code)
            except ValueError as error:
                yield str(error)


def _check_exact(name: str, model_config: ModelConfig, role: MegatronConfig) -> None:
    """Raise ValueError where the kernels of `exact_log_probs` do not compute a model in the layout of its role."""
    scaling, ranks = model_config.rope_scaling, role.tensor_model_parallel_size
    vocab = role.padded_vocab_size or model_config.pad_vocab(1, ranks).padded_vocab_size
    if ranks > 1 and vocab % (_VOCAB_GROUP * ranks):
        fits = -(-vocab // (_VOCAB_GROUP * ranks)) * _VOCAB_GROUP * ranks
        raise ValueError(
            f"rl_config.exact_log_probs (true) needs a multiple of {_VOCAB_GROUP} tokens of the vocabulary on each of the "
            f"{ranks} tensor-parallel ranks, and there are {vocab} together; set padded_vocab_size: {fits}"
        )
    for is_on, reason in (
        (name not in _EXACT_MODELS, f"this model ({name}); it has {', '.join(_EXACT_MODELS)}"),
        (model_config.sliding_window_layers, "layers that attend to a sliding window"),
        (scaling is not None and scaling.type != "llama3", f"rope_scaling of type {scaling and scaling.type}"),
        (model_config.moe_router_pre_softmax, "routers whose softmax is over all experts (norm_topk_prob: false)"),
    ):
        if is_on:
            raise ValueError(f"rl_config.exact_log_probs (true) is not available with {reason}; set it to false")


def _check_rollout(platform: str, model: RoleModel, generate: GenerateConfig) -> None:
    """Raise ValueError for a policy that the rollout engine does not compute on this device kind, or not in this format."""
    plan = model.plan
    if generate.engine == "transformers":
        if isinstance(plan.architecture, ModuleArchitecture):
            plan.architecture.check_rollout(generate.dtype, "generate_config.dtype:")
        _check_module(plan, model.source.hf_folder, trusts_code=generate.trust_remote_code)
        return
    slow = "generate_config.engine: transformers generates with it, slowly"
    if (quantization := generate.quantization) is not None:
        # the rule that says so reads config.json where the run file names it, without what only the plan knows
        if reason := explain_unquantized(plan.architecture.name, plan.model_config, quantization, platform):
            raise ValueError(f"generate_config.quantization ({quantization}) is not available {reason}")
        if reason := explain_divided_blocks(plan.architecture, plan.model_config, plan.layout, generate, platform):
            raise ValueError(f"generate_config.quantization ({quantization}) is not available {reason}")
    if platform == "cpu" and plan.model_config.sparse_attention is not None:
        raise ValueError(
            f"actor_config: vLLM's CPU build has no sparse attention, which this model ({plan.architecture.name}) has; {slow}"
        )
    if platform == "cpu" and plan.model_config.linear_attention is not None and generate.dtype == "float32":
        raise ValueError(
            "generate_config.dtype: float32 is not available for gated delta nets on cpu, whose kernel in vLLM takes only "
            f"bfloat16; set it, or {slow}"
        )


def _check_module(plan: ModelPlan, hf_folder: Path, *, trusts_code: bool) -> None:
    """Raise ValueError where transformers' module of a model cannot take the weights of the trainer."""
    from mindspeed_rl.models.hf_module import list_untaken  # imports transformers

    names = [name for op in plan.architecture.weight_ops(plan.model_config) if not op.copy_of_tied for name in op.hf]
    if untaken := list_untaken(hf_folder, names, trusts_code=trusts_code):
        raise ValueError(
            f"generate_config.engine: transformers' module of {plan.architecture.name} has no parameter for {untaken[0]}, "
            "which is trained; set it to vllm"
        )


def _derive_adapter_keys(adapter: PeftMerge, ranks: int, lora_r: int, written: frozenset[str]) -> dict[str, Any]:
    """Return the keys of a PEFT adapter that trains on, `lora_r` and `lora_alpha`, that the run file does not have.

    Raises:
        ValueError: the rank in the run file is too small for the adapter.
    """
    if "lora_r" in written and lora_r < ranks:
        raise ValueError(
            f"lora_r: {lora_r} is too small to train {adapter.path} on, which needs {ranks}: adapters of tensors that are "
            "one parameter here (query, key and value; gate and up) need the sum of their ranks; leave it out"
        )
    rank = lora_r if "lora_r" in written else ranks
    keys = {"lora_r": rank, "lora_alpha": max(1, round(adapter.scale * rank))}
    return {key: value for key, value in keys.items() if key not in written}


def check_outputs(missing: Sequence[str], folders: Mapping[str, Path | str | None]) -> None:
    """Check that no key is missing, and that the folders that a run writes to can be made.

    Args:
        missing: from `rules.validation.missing_for_training`.
        folders: by the key that names them.

    Raises:
        ConfigError: a sentence for each.
    """
    violations = list(missing)
    for key, name in folders.items():
        if name is None:
            continue
        folder = Path(name).expanduser().absolute()
        there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if not there.is_dir():
            violations.append(f"{key}: {folder} cannot be written to: {there} is not a folder")
        elif (reason := _find_obstacle(there)) is not None:
            violations.append(f"{key}: {folder} cannot be written to: {reason}")
    if violations:
        raise ConfigError(violations)


def _find_obstacle(folder: Path) -> str | None:
    """Return why no file can be made in a folder; None where one can be. Root has permission where nothing can be made."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"no permission for {folder}"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"no file can be made in {folder} ({error.strerror or error})"


def list_source_checks(run: Run) -> Iterator[Callable[[], object]]:
    """Yield a check of the weights of each role that the run file names, and of the files of an example."""
    cfg = run.config
    roles = {"megatron_training" if cfg.is_supervised else "actor_config": cfg.actor_config}
    if cfg.critic_config is not None and not cfg.is_supervised:
        roles["critic_config"] = cfg.critic_config
    for name, role in roles.items():
        yield partial(_check_example, role)
        yield partial(find_model, role, name)
    if cfg.is_supervised:
        return
    if cfg.reward_model_keys is not None:
        yield partial(_find_reward_model, cfg, cfg.reward_model_keys)
    if cfg.rl_config is not None and cfg.rl_config.served_judge is not None:
        yield partial(check_judge_folder, Path(cfg.rl_config.served_judge).expanduser())
    term = None if run.objective is None else run.objective.distillation
    for folder in () if term is None else term.models:
        keys = cfg.read_teacher_keys(folder)
        yield partial(find_model, keys, "teacher_config", "rl_config.distillation.teacher_models")


def check_judge_folder(folder: Path) -> None:
    """Check that a folder has a model that an engine of the run can load as a judge.

    Raises:
        ValueError: it does not.
    """
    key, path = "rl_config.judge_model", folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{key}: '{folder}' is not a folder with config.json, weights and tokenizer of a model; as a model's name on a "
            "server it needs rl_config.judge_url"
        )
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{key}: {folder} has no weights (*.safetensors)")
    if reason := _find_quantized_judge(folder):
        raise ValueError(reason)


def _find_quantized_judge(folder: Path) -> str | None:
    """Return why a judge whose weights are quantized cannot be served; None for another, and where no config.json is here."""
    path = folder / "config.json"
    if not path.is_file() or "quantization_config" not in read_json(path):
        return None
    return (
        f"rl_config.judge_model: the weights in {folder} are quantized, which engines of a run do not load; serve it with "
        "`vllm serve` and set rl_config.judge_url"
    )


def _check_example(config: MegatronConfig) -> None:
    """Raise ValueError with the command that makes the files of a run file that is included, where they are not here."""
    data = config.data_path if isinstance(config.data_path, list) else [config.data_path]
    for name in (config.load, config.tokenizer_name_or_path, *data):
        path = name.removeprefix("./") if isinstance(name, str) else ""
        start = next((start for start in _EXAMPLES if path.startswith(start)), None)
        if start is None or Path(path).exists() or (name in data and any(Path().glob(f"{path}[_.]*"))):
            continue
        raise ValueError(
            f"{start} is made by `{_EXAMPLES[start]}`, in the project's folder; train there. "
            "`mindspeed-rl new NAME` makes the files of a run of your own here"
        )


def _find_reward_model(cfg: RunConfig, keys: MegatronConfig) -> ModelSource:
    assert cfg.rl_config is not None
    return find_model(keys, "reward_config", "rl_config.reward_model" if cfg.rl_config.reward_model else None)


def plan_models(run: Run) -> Run:
    """Return the run with the model of every role, as its workers build it, and the point that it resumes from.

    No weight is read.

    Raises:
        ValueError: weights or config.json are missing; a model is not supported, contradicts the run file, or does not fit its
            layout; or the checkpoints of the roles do not belong together. The role is named.
    """
    cfg, actor = run.config, run.config.actor_config
    source = find_model(actor, "megatron_training" if cfg.is_supervised else "actor_config")
    models = {"actor": _plan_role("actor_config", actor, source, "reward" if cfg.stage == "orm" else "lm")}
    resume = find_resume_point(run, source)
    resumes_after = resume.iteration or None
    if cfg.is_supervised:
        if run.has_ref:
            config, ref = resolve_supervised_ref(actor, source)
            named = config.ref_model and "refer_model_iter" in cfg.set_keys["megatron_training"]
            iteration = config.refer_model_iter if named else None
            models["ref"] = _plan_role("ref_model", config, ref, iteration=iteration)
    else:
        assert run.objective is not None
        _check_rollout(run.platform, models["actor"], run.generate)
        if run.has_ref:
            config, ref, iteration = resolve_rollout_ref(run, source, resumes_after)
            models["ref"] = _plan_role("ref_config", config, ref, iteration=iteration)
        if run.objective.has_critic:
            models["critic"] = _plan_critic(cfg, resumes_after)
        term = run.objective.distillation
        for folder, name in () if term is None else term.models.items():
            keys = cfg.read_teacher_keys(folder)
            models[name] = _plan_role(name, keys, find_model(keys, "teacher_config", "rl_config.distillation.teacher_models"))
        if term is not None:
            term = dataclasses.replace(term, topk=min(term.topk, models["actor"].plan.model_config.vocab_size))
            run = dataclasses.replace(run, objective=dataclasses.replace(run.objective, distillation=term))
        if (reward := cfg.reward_model_keys) is not None:
            reward_source = _find_reward_model(cfg, reward)
            check_reward_start(reward, reward_source)
            models["reward"] = _plan_role("reward_config", reward, reward_source, "lm" if reward.reward_tokens else "reward")
    models, derived = _decide_losses(models, run.platform, cfg.set_keys, is_supervised=cfg.is_supervised)
    generate = cfg.generate_config
    if generate is not None and generate.fp32_lm_head is None and models["actor"].config.fp32_lm_head:
        generate = dataclasses.replace(generate, fp32_lm_head=True)
    cfg = dataclasses.replace(cfg, derived=cfg.derived | derived, generate_config=generate)
    attention = None
    if run.platform == "cpu":
        # other last bits than before would make a resumed run another run
        recorded = resume.state.get("cpu_attention")
        threads = 1 if run.threads is None else run.threads.count
        attention = try_kernels(threads) if recorded is None else keep_kernel(recorded)
    return dataclasses.replace(run, config=cfg, attention=attention, models=models, resume=resume)


def _plan_critic(cfg: RunConfig, resumes_after: int | None) -> RoleModel:
    """Return the model of the critic.

    Args:
        resumes_after: the iteration after which the run resumes; None when it starts.

    Raises:
        ValueError: see `plan_models`.
    """
    critic = cfg.critic_config
    assert critic is not None  # a rule requires it
    if resumes_after is None and critic.pretrained_checkpoint and loads_its_save(critic):
        # a run was killed between the critic's first checkpoint and the actor's: both start anew, as they did
        critic = dataclasses.replace(critic, load=None, load_iteration=None)
    source = find_model(critic, "critic_config")
    check_critic_start(critic, source, resumes_after)
    return _plan_role("critic_config", critic, source, "reward", resumes_after)


def _decide_losses(
    models: Mapping[str, RoleModel], platform: str, set_keys: Mapping[str, frozenset[str]], *, is_supervised: bool
) -> tuple[dict[str, RoleModel], dict[str, Derivation]]:
    """Decide the format of each head's logits.

    Returns:
        The models by role, and what they and the platform decide about losses where the run file does not.
    """
    decided, derived, cost = dict(models), {}, platform_class(platform).float32_product_cost
    for name, model in models.items():
        config, plan = model.config, model.plan
        if config.fp32_lm_head is None and config.bf16 and plan.model_config.head == "lm":
            share = 1.0 if cost is None else measure_head_share(plan.architecture, plan.model_config, cost)
            is_cheap = share < _MAX_HEAD_SHARE
            decided[name] = dataclasses.replace(model, config=dataclasses.replace(config, fp32_lm_head=is_cheap))
            source = f"in float32 the head takes {share:.1%} of an update's products; the limit is {_MAX_HEAD_SHARE:.0%}"
            derived[f"{name}_config.fp32_lm_head"] = Derivation(
                is_cheap, f"the cost of a float32 head is not measured on {platform}" if cost is None else source
            )
        if config.computes_by_module and not plan.architecture.packs:
            source = (
                f"rows are padded, and each has its own prompt: transformers' module of {plan.architecture.name} takes no "
                "packed ones"
            )
            derived[f"{name}_config.engine"] = Derivation(config.engine, source)
        if plan.model_config.mtp_num_layers and config.mtp_detach_heads is None:
            detaches = not is_supervised
            decided[name] = dataclasses.replace(
                decided[name], config=dataclasses.replace(decided[name].config, mtp_detach_heads=detaches)
            )
            source = "the policy's gradient comes only from its objective" if detaches else "as in pre-training"
            derived[f"{name}_config.mtp_detach_heads"] = Derivation(detaches, source)
        if model.source.adapter is not None:
            use = "trains on" if config.lora_target_modules else "is merged into it"
            derived[f"{name}_config.base_model"] = Derivation(
                str(model.source.weights), f"the base of the adapter in {model.source.adapter}, which {use}"
            )
        written = set_keys.get("megatron_training", frozenset()) | set_keys.get(f"{name}_config", frozenset())
        if plan.model_config.num_moe_experts and name in ("actor", "critic") and "moe_aux_loss_coeff" not in written:
            kind, coeff = config.moe_router_load_balancing_type, plan.model_config.moe_aux_loss_coeff
            source = "the model's config.json" if coeff is not None else "neither the run file nor config.json has one"
            source = source if kind in ("aux_loss", "seq_aux_loss") else f"moe_router_load_balancing_type is {kind}"
            derived[f"{name}_config.moe_aux_loss_coeff"] = Derivation(plan.balancing.coeff, source)
    return decided, derived


def _plan_role(
    name: str,
    config: MegatronConfig,
    source: ModelSource,
    head: Literal["lm", "reward"] = "lm",
    iteration: int | None = None,
) -> RoleModel:
    if name != "actor_config":  # multi-token-prediction layers are for training and drafts; an indexer trains in the actor
        config = dataclasses.replace(config, mtp_num_layers=0, dsa_indexer_loss_coeff=0.0)
    try:
        plan = plan_model(config, source.hf_folder, head=head)
        check_model_form(config, plan.architecture, plan.model_config)
        if source.adapter is not None:
            open_peft(source.adapter, plan.architecture.weight_ops(plan.model_config))
            source = dataclasses.replace(source, adapter=source.adapter.resolve())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if source.is_start:
        config = dataclasses.replace(config, finetune=True)
    # workers run in other folders
    source = dataclasses.replace(source, hf_folder=source.hf_folder.resolve(), weights=source.weights.resolve())
    return RoleModel(config, source, plan, iteration)
