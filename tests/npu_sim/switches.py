"""Switches of an NPU: each value of a key that changes what runs on the device, with its simulated run or its refusal.

    python tests/npu_sim/switches.py             # prints the table
    python tests/npu_sim/switches.py --open      # only those without a run and without a refusal

Nothing here is a list of keys. A switch is a value other than the default of a key that a module of the device's side reads;
the modules are those that `adaptors` names for an NPU, and the parts of the package that build and run what is on the device. A
run is a test of this folder that sets the value, whichever way: in a dictionary, as an argument, or as `group.key=value`. A
refusal is what the rules say of a run file with that value on `platform: npu`. Importers, the planner and shipped run files can
only write keys, so what they switch on is among these; the table says which of them do.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import functools
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from mindspeed_rl import adaptors
from mindspeed_rl.config import GenerateConfig, MegatronConfig, RLConfig, SamplingConfig, build_run_config
from mindspeed_rl.config.keys.audit import AuditKeys
from mindspeed_rl.config.keys.megatron import LEFT_OFF_FEATURES
from mindspeed_rl.config.keys.schema import Key, Range, list_keys
from mindspeed_rl.config.keys.serve import ServeConfig
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import unavailable, validate

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = ROOT / "mindspeed_rl"
GROUPS: dict[str, type] = {
    "actor_config": MegatronConfig,
    "rl_config": RLConfig,
    "generate_config": GenerateConfig,
    "sampling_config": SamplingConfig,
    "serve_config": ServeConfig,
    "audit": AuditKeys,
}
#: parts of the package that build and run what is on the device, besides the adaptors of an NPU
DEVICE_PARTS = (
    "engine",
    "platform",
    "resharding",
    "models/plan.py",
    "models/builder.py",
    "models/layout.py",
    "rollout/arguments.py",
    "rollout/module_engine.py",
    "rollout/vllm_engine.py",
    "run/divisions.py",
    "run/placement.py",
    "runtime/cluster.py",
    "service/sampling.py",
    "service/tenants.py",
    "serving",
    "trainers/evaluation.py",
    "trainers/old_policy.py",
    "trainers/reward_audit.py",
    "trainers/rollout_modes.py",
    "workers/device_worker.py",
    "workers/fleet.py",
    "workers/model_worker.py",
    "workers/responses.py",
    "workers/roles.py",
    "workers/rollout_replica.py",
    "workers/server_rollout.py",
    "workers/trainer_worker.py",
    "workers/update_plan.py",
)
#: names that hold a group of a run file in these modules
_HOLDERS = frozenset(
    "config cfg rl generate sampling actor keys role serve audit "
    "actor_config rl_config generate_config sampling_config serve_config".split()
)
_SIZES = (Range.PROCESSES, Range.DEVICES)
#: any value that is not the default
SET = "set"
#: defaults that leave something out: -1 is all tokens of `top_k`
_OFF = (None, 0, "", [], {}, -1)
#: keys whose group has names of its own -> a value
_GROUPS_OF_OTHERS: dict[str, dict[str, object]] = {
    "structured_output": {"choice": ["yes", "no"]},
    "engine_kwargs": {"long_prefill_token_threshold": 32},
}
#: keys (of one group, where it is named) that these modules read and that change nothing of what runs on the device -> what
#: they change
ON_HOST = {
    "keep_last": "folders of old checkpoints",
    "trust_remote_code": "Python code of a model folder",
    "seed": "numbers that are drawn, not how",
    "guarantee_order": "the order of requests",
    "longest_first": "the order of requests",
    "use_dp_batch_balance": "which rank has which row",
    "distillation": "terms of the loss and who computes its columns",
    "opponents": "which adapter of the engine a request names; several at a time are those of serve_config.num_models",
    "elastic_rollout_high": "how many prompts are ready when engines end to generate",
    "dynamic_sample": "which prompts train",
    "filter_groups_enable": "which prompts train",
    "partial_rollout": "which requests an engine has at a weight sync",
    "over_sample_rate": "how many requests an engine has",
    "spare_samples_per_prompt": "how many requests an engine has",
    "keep_spare_samples": "which requests end early",
    "blocking": "when a pass starts, not what it computes",
    "role_adapters": "rows of each pass, and which adapter they have; tests/npu_sim/test_newer_features.py runs them",
    "stop": "decoded text on the host",
    "load_checkpoint_loosely": "which tensors a checkpoint may lack",
    "process_reward_aggregation": "how the scores of a response's steps become one",
    "model_name": "a name for clients",
    "fault_tolerance": "a run starts anew from its checkpoint, on fewer devices in a layout that a fresh run has as well",
    "vllm_server_token_file": "what a server asks of its clients",
    "judge_url": "requests to a service that answers them with a model of its own",
    "judge_model": "a name in these requests",
    "audit.full_score": "a number that scores are compared with",
    "audit.environment": "programs that play responses again, as rewards do",
    "min_pixels": "images on the host, before the tower gets them",
    "max_pixels": "images on the host, before the tower gets them",
    "video_fps": "frames that the host decodes",
    "video_min_frames": "frames that the host decodes",
    "video_max_frames": "frames that the host decodes",
    "video_min_pixels": "frames on the host, before the tower gets them",
    "video_max_pixels": "frames on the host, before the tower gets them",
}


@dataclasses.dataclass(frozen=True)
class Switch:
    """A value of a key that changes what runs on the device.

    Attributes:
        group, key: as in a run file.
        value: one value of a key with few, `SET` for any other than the default.
    """

    group: str
    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.group}.{self.key}: {self.value}"


# ---------------------------------------------------------------------- the switches


def list_device_modules() -> list[Path]:
    """Return the modules of the device's side, those that the adaptors' tables name for an NPU among them."""
    tables: tuple[Mapping[tuple[str, str], Any], ...] = (adaptors._ADAPTORS, adaptors._KERNELS)
    named = [name for table in tables for (platform, _), names in table.items() if platform == "npu" for name in _listed(names)]
    named.append(adaptors._ENGINE_HOOKS["npu"][0])
    own = [ROOT / f"{name.replace('.', '/')}.py" for name in named]
    own += [path for path in own for path in _imported_adaptors(path)]
    parts = [PACKAGE / part for part in DEVICE_PARTS]
    return sorted({*own, *(file for part in parts for file in (part.rglob("*.py") if part.is_dir() else [part]))})


def _listed(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _imported_adaptors(path: Path) -> list[Path]:
    """Return the adaptors that a module imports."""
    folder = PACKAGE / "adaptors"
    imports = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
    names = [name.name for node in imports if node.module == "mindspeed_rl.adaptors" for name in node.names]
    return [folder / f"{name}.py" for name in names if (folder / f"{name}.py").is_file()]


def _read_names(path: Path) -> Iterator[str]:
    """Yield the attributes of run-file groups that a module reads, and the words of its tables of keys."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            holder = node.value
            name = holder.id if isinstance(holder, ast.Name) else holder.attr if isinstance(holder, ast.Attribute) else ""
            if name.lstrip("_") in _HOLDERS:
                yield node.attr


@functools.cache
def _list_properties() -> dict[str, set[str]]:
    """Return property of a group -> what it reads of the group itself."""
    results: dict[str, set[str]] = {}
    for path in sorted((PACKAGE / "config" / "keys").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list
            ):
                inner = (item for item in ast.walk(node) if isinstance(item, ast.Attribute))
                own = {item.attr for item in inner if isinstance(item.value, ast.Name) and item.value.id == "self"}
                results.setdefault(node.name, set()).update(own)
    return results


def _follow_properties(names: set[str]) -> set[str]:
    """Return names with those that the properties among them read."""
    properties = _list_properties()
    found = set(names)
    waiting = list(names & properties.keys())
    while waiting:
        new = properties[waiting.pop()] - found
        found |= new
        waiting += new & properties.keys()
    return found


@functools.cache
def _shape_keys() -> frozenset[str]:
    """Keys that follow the model's config.json: they say what the model is, not how it runs."""
    tree = ast.parse((PACKAGE / "models" / "model_keys.py").read_text())
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return frozenset(word for text in texts for word in text.split())


def _list_values(key: Key) -> Iterator[str]:
    """Yield the values of a key that are switches."""
    choices = _choices(key.kind)
    if choices:
        yield from (spell(value) for value in choices if value != key.default)
    elif dataclasses.is_dataclass(key.kind):  # `sampling_config` is a group of its own
        for name, inner in list_keys(typing.cast(type, key.kind)).items():
            yield from (f"{name}={value}" for value in _list_values(inner))
    # 1.0 is all of `top_p`, and a factor that changes nothing
    elif key.default in _OFF or key.range in _SIZES or (key.kind is float and key.default == 1.0):
        yield SET


def _choices(kind: Any) -> list[object]:
    """Return the values of a type that has few; empty for others."""
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if kind is bool:
        return [True, False]
    if origin is Literal:
        return list(members)
    if origin is list:
        return _choices(members[0])
    return [value for member in members for value in _choices(member)] if origin is not dict else []


def spell(value: object) -> str:
    """Return a value as a run file has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@functools.cache
def list_switches() -> tuple[Switch, ...]:
    """Return all switches, in the order of the groups and of their keys."""
    names = {name for path in list_device_modules() for name in _read_names(path)} - ON_HOST.keys()
    read = _follow_properties(names) - ON_HOST.keys()
    # a key of which others depend decides for these modules, wherever it is read
    keys = {name: key for owner in GROUPS.values() for name, key in list_keys(owner).items()}
    read |= {key.needs[0] for name, key in keys.items() if name in read and key.needs and key.needs[0] in keys}
    results = []
    for group, owner in GROUPS.items():
        for name, key in list_keys(owner).items():
            on_npu = "npu" in key.only_on or (not key.only_on and name in read)
            left_out = not {name, f"{group}.{name}"}.isdisjoint({*ON_HOST, *_shape_keys()})
            if on_npu and not key.no_effect and key.on_resume != "schedule" and not left_out:
                results += [Switch(group, name, value) for value in _list_values(key) if name not in GROUPS]
    return tuple(results)


# ---------------------------------------------------------------------- their runs


def _constant(node: ast.AST) -> object:
    """Return the value of an expression that is written out, None for others."""
    try:
        return ast.literal_eval(node)  # pyrefly: ignore[bad-argument-type]
    except (ValueError, TypeError, SyntaxError):
        return None if not isinstance(node, ast.expr) else SET


_OVERRIDE = re.compile(r"\+{0,2}((?:[a-z_]+\.)*)([a-z_0-9]+)=(.*)", re.DOTALL)


def _read_override(text: str, value: object = None) -> Iterator[tuple[str, object]]:
    """Yield (key, value) of an override, and the keys that are groups around it; nothing for another text."""
    if match := _OVERRIDE.fullmatch(text):
        groups, name, written = match.groups()
        yield name, _read_value(written) if value is None else value
        yield from ((group, SET) for group in groups.split(".")[1:-1])


def _read_value(text: str) -> object:
    """Return the value of an override; `SET` for the start of one that a test completes."""
    try:
        return yaml.safe_load(text or "null")
    except yaml.YAMLError:
        return SET


def _written_pairs(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Yield (key, value) for what a piece of a test sets."""
    for item in ast.walk(node):
        if isinstance(item, ast.Dict):
            for name, value in zip(item.keys, item.values):
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield name.value, _constant(value)
        elif isinstance(item, ast.keyword) and item.arg is not None:
            yield item.arg, _constant(item.value)
        elif isinstance(item, ast.Constant) and isinstance(item.value, str):
            yield from _read_override(item.value.strip())
        elif isinstance(item, ast.JoinedStr) and item.values and isinstance(item.values[0], ast.Constant):
            yield from _read_override(str(item.values[0].value), SET)


def _list_keys(tree: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the keys of a run file with their values, groups within groups too."""
    for name, value in tree.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from _list_keys(value)


class _Module:
    """A module of tests or a program: what each of its functions sets, through the names that it uses."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text())
        self.parts: dict[str, list[ast.stmt]] = {}
        for node in self.tree.body:
            for name in self._defined(node):
                self.parts.setdefault(name, []).append(node)

    @staticmethod
    def _defined(node: ast.stmt) -> list[str]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return [node.name]
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        return [target.id for target in targets for target in ast.walk(target) if isinstance(target, ast.Name)]

    def imported(self) -> dict[str, str]:
        """Return the names that the module takes from others, wherever it imports them, with their names there."""
        imports = (node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom))
        return {alias.asname or alias.name: alias.name for node in imports for alias in node.names}

    def reach(self, name: str, seen: set[str]) -> Iterator[ast.stmt]:
        """Yield a definition and those that it uses."""
        if name in seen:
            return
        seen.add(name)
        for node in self.parts.get(name, ()):
            yield node
            used = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
            used |= {item.arg for item in ast.walk(node) if isinstance(item, ast.arg)}  # fixtures
            for other in sorted(used):
                yield from self.reach(other, seen)


@functools.cache
def list_runs() -> dict[tuple[str, str], tuple[str, ...]]:
    """Return (key, value) -> tests of this folder that run it; the value is `SET` as well for any that is written."""
    programs = {path.stem: _Module(path) for path in sorted((HERE / "programs").glob("*.py"))}
    shared = [_Module(path) for path in sorted((ROOT / "tests" / "e2e").glob("*.py"))]
    run_files = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "configs").glob("*.yaml")}
    results: dict[tuple[str, str], dict[str, None]] = {}
    for path in sorted(HERE.glob("test_*.py")):
        module = _Module(path)
        for name in (name for name in module.parts if name.startswith("test_")):
            seen: set[str] = set()
            nodes = list(module.reach(name, seen))
            # what the test takes from the tests on the CPU, the run file of its command with it
            imported = module.imported()
            names = {item.id for node in nodes for item in ast.walk(node) if isinstance(item, ast.Name)}
            used = {imported[item] for item in names & imported.keys()}
            nodes += [node for other in shared for part in sorted(used) for node in other.reach(part, set())]
            started = {item.value for node in nodes for item in ast.walk(node) if isinstance(item, ast.Constant)}
            nodes += [node for stem in sorted(programs.keys() & started) for node in programs[stem].reach("main", set())]
            files = [run_files[item] for item in sorted(started & run_files.keys(), key=str)]
            pairs = [pair for node in nodes for pair in _written_pairs(node)]
            for key, value in [*pairs, *(pair for tree in files for pair in _list_keys(tree))]:
                for item in value if isinstance(value, list) else [value]:
                    for spelled in {spell(item), SET}:
                        results.setdefault((key, spelled), {})[f"{path.name}::{name}"] = None
    return {pair: tuple(tests) for pair, tests in results.items()}


def find_runs(switch: Switch) -> tuple[str, ...]:
    """Return the tests that run a switch."""
    if "=" in switch.value:  # a key inside the key
        inner, _, value = switch.value.partition("=")
        return list_runs().get((inner, value), ())
    return list_runs().get((switch.key, switch.value), ())


# ---------------------------------------------------------------------- their refusals

Tree = dict[str, Any]
_BASE: Tree = {
    "platform": "npu",
    "megatron_training": {"stage": "ray_grpo", "global_batch_size": 32, "micro_batch_size": 1, "train_iters": 10, "lr": 1e-6},
    "actor_config": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "save": "checkpoints"},
    "rl_config": {
        "actor_resource": {"num_npus": 16},
        "n_samples_per_prompt": 8,
        "mini_batch_size": 32,
        "max_prompt_length": 512,
    },
    "generate_config": {"infer_tensor_parallel_size": 1, "max_model_len": 4096, "sampling_config": {"max_tokens": 2048}},
}
#: further keys of sound run files, so that what is missing in one is not taken for a refusal
_VARIANTS: tuple[Tree, ...] = (
    {},
    {"actor_config": {"lora_target_modules": ["linear_qkv"]}},
    {"actor_config": {"npu_deterministic": True}},
    {"actor_config": {"use_distributed_optimizer": True, "overlap_grad_reduce": True}},
    {"actor_config": {"num_experts": 8, "num_layers": 4, "moe_router_topk": 2}},
    {"actor_config": {"pipeline_model_parallel_size": 2, "num_layers": 4}},
    {"actor_config": {"tensor_model_parallel_size": 1, "sequence_parallel": False}},
    {"rl_config": {"mini_batch_size": 8}, "actor_config": {"num_experts": 8, "num_layers": 4, "moe_router_topk": 2}},
    {"rl_config": {"use_integrated_worker": False, "rollout_resource": {"num_npus": 16}}},
    {
        "rl_config": {
            "use_integrated_worker": False,
            "actor_resource": {"num_npus": 4},
            "rollout_resource": {"num_npus": 16},
            "trainer_mode": "async",
            "max_off_policy_threshold": 2,
        }
    },
    {"actor_config": {"fp32_lm_head": True}, "generate_config": {"fp32_lm_head": True}},
    {"actor_config": {"bf16": False}, "generate_config": {"dtype": "float32"}},
    {"generate_config": {"enforce_eager": False}},
)


def _merge(tree: Tree, changes: Mapping[str, Any]) -> Tree:
    """Return a copy of a run file with further keys in its groups."""
    merged = copy.deepcopy(tree)
    for name, value in changes.items():
        merged[name] = _merge(merged.get(name, {}), value) if isinstance(value, Mapping) else value
    return merged


def _sample_values(kind: Any) -> Iterator[object]:
    """Yield some values of a type that no rule about types refuses."""
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if kind is bool or origin is Literal:
        yield from _choices(kind)
    elif origin is list:
        yield from ([value] for value in _sample_values(members[0]))
    elif kind is int:
        yield from (1, 2, 4)
    elif kind is float:
        yield from (0.25, 1e-5)
    elif kind is str:
        yield from ("1", "2,2")
    elif origin in (dict, Mapping):
        yield {"name": "value"}
    else:
        for member in members:
            if member is not type(None):
                yield from _sample_values(member)


def _find_values(switch: Switch, kind: Any, default: object = None) -> list[object]:
    """Return values of a run file that are the switch."""
    if "=" in switch.value:
        inner, _, value = switch.value.partition("=")
        key = list_keys(kind)[inner]
        found = _find_values(dataclasses.replace(switch, key=inner, value=value), key.kind, key.default)
        return [{inner: item} for item in found]
    if switch.value == SET:
        if switch.key in _GROUPS_OF_OTHERS:
            return [_GROUPS_OF_OTHERS[switch.key]]
        return [value for value in _sample_values(kind) if value != default]
    value = next(value for value in _choices(kind) if spell(value) == switch.value)
    return [[value] if typing.get_origin(_optional(kind)) is list else value]


def _optional(kind: Any) -> Any:
    """Return the type of an optional value."""
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    return members[0] if len(members) == 1 and typing.get_origin(kind) is not list else kind


def _list_violations(tree: Tree) -> list[str]:
    """Return the sentences of the rules about a run file."""
    try:
        run = draft(build_run_config(copy.deepcopy(tree), config_name="switch"))
        return [str(sentence) for sentence in (*validate(run), *unavailable(run))]
    except ValueError as error:
        return str(error).splitlines()


def find_refusal(switch: Switch) -> str | None:
    """Return the sentence with which the rules refuse a switch on an NPU in every variant; None where one takes it."""
    if switch.key in LEFT_OFF_FEATURES:
        return f"left off, as `explain` says: {LEFT_OFF_FEATURES[switch.key]}"
    key = list_keys(GROUPS[switch.group])[switch.key]
    if key.needs and key.needs[0] in LEFT_OFF_FEATURES:
        return f"a setting of {key.needs[0]}, which is left off"
    refusal = None
    for variant in _VARIANTS:
        for value in _find_values(switch, key.kind, key.default):
            group: Tree = {switch.key: value}
            if key.needs and isinstance(key.needs[1], tuple):
                group[key.needs[0]] = key.needs[1][0]
            keys: Tree = {switch.group: group}
            if switch.group == "sampling_config":
                keys = {"generate_config": keys}
            sentences = _list_violations(_merge(_merge(_BASE, variant), keys))
            refusal = next((sentence for sentence in sentences if switch.key in sentence), None)
            if refusal is None:
                return None
    return refusal


# ---------------------------------------------------------------------- who sets them


@functools.cache
def list_sources() -> dict[str, str]:
    """Return texts by what can set a key without the user: the planner, importers, shipped run files of NPUs."""
    files = {"planner": (PACKAGE / "planner").glob("*.py"), "importers": (PACKAGE / "importers").glob("*.py")}
    shipped = sorted((ROOT / "configs").glob("*.yaml"))
    files["run files"] = (path for path in shipped if re.search("_(A2|A3|950)", path.name))
    return {name: "\n".join(path.read_text() for path in paths) for name, paths in files.items()}


def find_sources(switch: Switch) -> list[str]:
    """Return what writes the key of a switch."""
    return [name for name, text in list_sources().items() if re.search(rf"\b{switch.key}\b", text)]


def list_open() -> list[Switch]:
    """Return the switches with neither a run nor a refusal."""
    return [switch for switch in list_switches() if not find_runs(switch) and find_refusal(switch) is None]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--open", action="store_true", help="only switches without a run and without a refusal")
    arguments = parser.parse_args()
    opened = list_open()
    for switch in opened if arguments.open else list_switches():
        runs = find_runs(switch)
        outcome = "; ".join(runs[:2]) + (f" and {len(runs) - 2} more" if runs[2:] else "") or find_refusal(switch) or "NONE"
        print(f"{switch} [{', '.join(find_sources(switch))}] {outcome}")
    return int(bool(opened))


if __name__ == "__main__":
    sys.exit(main())
