"""What a run file leads to, as far as it can be seen without a device: plan, objective, models, data, environment."""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_rl.adaptors import mindspeed
from mindspeed_rl.config import build_run_config
from mindspeed_rl.config.keys.schema import list_keys
from mindspeed_rl.data.prompts import PromptSettings
from mindspeed_rl.engine.build import plan_transformer_config
from mindspeed_rl.engine.lora_layers import LoraSettings
from mindspeed_rl.engine.optimizer import ddp_config
from mindspeed_rl.models.model_keys import fill_model_keys
from mindspeed_rl.models.plan import plan_model, read_model
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.explain.effects import describe_learning_rate
from mindspeed_rl.run.rules.validation import unavailable, validate
from mindspeed_rl.runtime.cluster import build_worker_environment
from mindspeed_rl.workers.roles import build_micro_batching

Tree = dict[str, dict[str, Any]]


def observed(tree: Tree, folder: Path) -> dict[str, str] | None:
    """Everything that a sound run file leads to, in words; None for one that breaks a rule between keys.

    Args:
        folder: has the config.json of the model.
    """
    try:
        run = draft(build_run_config(copy.deepcopy(tree), config_name="observed"))
        if validate(run) or unavailable(run):
            return None
        _, model_config, _ = read_model(folder)
        cfg = run.config
        written = cfg.set_keys["megatron_training"] | cfg.set_keys.get("actor_config", frozenset())
        try:
            actor = fill_model_keys(cfg.actor_config, model_config, folder / "config.json", written)
        except ValueError as error:
            return {"contradiction": str(error)}
        filled = dataclasses.replace(run, config=dataclasses.replace(cfg, actor_config=actor))
        return {name: repr(value) for name, value in _parts(filled, folder)}
    except (ValueError, AssertionError):  # Megatron asserts
        return None


def _parts(run: Run, folder: Path) -> Iterator[tuple[str, Any]]:
    cfg, actor = run.config, run.config.actor_config
    yield "plan", run.plan
    yield "learning rate", describe_learning_rate(cfg)
    yield "derived keys", cfg.derived
    plan = plan_model(actor, folder)
    yield "layout", (plan.layout, plan.model_config)
    yield "model", plan_transformer_config(actor, plan)
    yield "adapters", LoraSettings.from_config(actor)
    yield "gradient buckets", ddp_config(actor)
    yield "MindSpeed", mindspeed.settings(actor)
    yield "prompts", PromptSettings.from_config(actor)
    yield "environment", [build_worker_environment(cfg, name) for name in ("cpu", "npu")]
    yield "reward model", None if (reward := cfg.reward_model_keys) is None else (reward.load, reward.reward_tokens)
    if cfg.rl_config is None or cfg.is_supervised:
        return
    rl = cfg.rl_config
    yield "objective", run.objective
    yield (
        "limits",
        [
            build_micro_batching(rl, "update", 1),
            build_micro_batching(rl, "actor", 1),
            build_micro_batching(rl, "ref", 1),
        ],
    )
    yield "spelled", (rl.n_samples_per_prompt, rl.init_kl_coef, rl.epochs, rl.verifier_function, rl.verifier_weight)


def values_of(group: type, field: dataclasses.Field[Any]) -> list[Any]:
    """Values of the key's type; the default comes last, for a key whose unset value means something else."""
    kind, default = list_keys(group)[field.name].kind, field.default
    results = list(_values(kind, field.name))
    return [value for value in results if value != default] + ([] if default is dataclasses.MISSING else [default])


def _values(kind: Any, name: str) -> Iterator[Any]:
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        yield from members
    elif origin is list:
        yield [next(_values(members[0], name))]
    elif members:
        for member in members:
            if member is not type(None):
                yield from _values(member, name)
    elif kind is bool:
        yield from (True, False)
    elif kind is int:
        yield from (2, 4, 1, 8, 64, 262144)
    elif kind is float:
        yield from (0.25, 2.0, 1e-5)
    elif kind is str:
        yield from ("1", "other", "90,10,0")
    elif dataclasses.is_dataclass(kind):
        for inner in dataclasses.fields(kind):
            for value in _values(list_keys(typing.cast(type, kind))[inner.name].kind, inner.name):
                yield {inner.name: value}
                break
