"""Every key of a run file does something, is refused where it cannot, or says that it does nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mindspeed_rl
from mindspeed_rl.config import (
    GenerateConfig,
    MegatronConfig,
    MsprobeConfig,
    ProfilerConfig,
    RLConfig,
    SamplingConfig,
    ServeConfig,
    build_run_config,
)
from mindspeed_rl.config.keys.ignored import IGNORED
from mindspeed_rl.config.keys.megatron import LEFT_OFF_FEATURES
from mindspeed_rl.config.keys.schema import list_keys
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import unavailable

PACKAGE = Path(mindspeed_rl.__file__).parent
GROUPS = (MegatronConfig, RLConfig, GenerateConfig, SamplingConfig, ProfilerConfig, MsprobeConfig, ServeConfig)
#: folders that declare, check and explain keys
ABOUT_KEYS = tuple(PACKAGE / name for name in ("config", "run/rules", "run/explain"))
#: modules among them that turn keys into others
DERIVING = ("loader.py", "compat/aliases.py", "keys/deadlines.py", "keys/rl.py", "run.py")
#: modules that put what a run does into words
WORDS = tuple(PACKAGE / "run" / name for name in ("formula.py", "phases.py", "columns.py"))
#: objects of other layers that have attributes of the same names
OTHERS = {"args", "arguments", "options", "model_config", "scaling", "destination", "sample"}


def names_read(paths: list[Path]) -> set[str]:
    """Attributes that these modules read, and their strings, which name keys in tables."""
    results: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and holder(node) not in OTHERS:
                results.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                results.add(node.value)
    return results


def holder(node: ast.Attribute) -> str:
    """The name in front of the last dot."""
    value = node.value
    return value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""


@pytest.fixture(scope="module")
def read() -> set[str]:
    """Names that code which acts reads, or that `config` turns into other keys."""
    acting = [path for path in PACKAGE.rglob("*.py") if path not in WORDS and not is_about_keys(path)]
    return names_read(acting) | names_read([PACKAGE / "config" / name for name in DERIVING])


def is_about_keys(path: Path) -> bool:
    return any(folder in path.parents for folder in ABOUT_KEYS)


def refused() -> set[str]:
    """Keys that `unavailable` looks at: a trainer does not start with them."""
    tree = ast.parse((PACKAGE / "run" / "rules" / "validation.py").read_text())
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "unavailable")
    return {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_every_key_is_read_refused_or_declared_without_effect(group: type, read: set[str]) -> None:
    switches = refused()
    silent = []
    for name, key in list_keys(group).items():
        switch = None if key.needs is None else key.needs[0]
        is_left_off = not {name, switch}.isdisjoint(LEFT_OFF_FEATURES)
        if not (key.no_effect or name in read or name in switches or switch in switches or is_left_off):
            silent.append(name)
    assert silent == []


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_no_key_that_is_declared_without_effect_is_read_as_an_attribute_of_its_group(group: type) -> None:
    """A reason that went stale would hide a key that works from `explain`."""
    names = {name for name, key in list_keys(group).items() if key.no_effect} | set(IGNORED.get(group.__name__, ()))
    for other in GROUPS:
        names -= {name for name, key in list_keys(other).items() if not key.no_effect}
    holders = {"config", "_config", "cfg", "actor", "actor_config", "rl", "rl_config", "generate_config", "role", "keys"}
    stale = set()
    for path in PACKAGE.rglob("*.py"):
        if is_about_keys(path):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in names and holder(node) in holders:
                stale.add(f"{path.relative_to(PACKAGE)}: {node.attr}")
    assert stale == set()


def test_a_refused_key_stops_a_run_with_a_sentence_that_names_it() -> None:
    critic = build_run_config(
        {
            "megatron_training": {"stage": "ray_ppo"},
            "rl_config": {"actor_resource": {"num_npus": 8}, "critic_resource": {"num_npus": 4}},
        }
    )
    assert [sentence.split(":")[0] for sentence in unavailable(draft(critic))] == [
        "rl_config.critic_resource",
    ]
