"""What a group of workers can be asked is what its workers do, and the documented way to the loss exists."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from call_path import ROOT, listed

from mindspeed_rl.diagnostics import train_vs_rollout
from mindspeed_rl.run import phases
from mindspeed_rl.trainers import sft_setup
from mindspeed_rl.workers import fleet, remote_group
from mindspeed_rl.workers.remote_group import _order_by_host

#: class of the driver -> its module, and the workers that its phases run on; a phase runs on one of them at least
CALLERS = {
    "Fleet": ("mindspeed_rl.workers.fleet", list(fleet._KINDS.values())),
    "ServerRollout": ("mindspeed_rl.workers.server_rollout", [fleet._KINDS["trainer"]]),
    "SupervisedTrainer": ("mindspeed_rl.trainers.supervised", [sft_setup._SUPERVISED]),
    "Comparison": ("mindspeed_rl.diagnostics.train_vs_rollout", [train_vs_rollout.COMPARISON]),
}


def classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module and those that they are made of, without importing it: workers import Megatron and vLLM."""
    tree = ast.parse(Path(find_spec(module).origin).read_text())
    own = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    bases = {ast.unparse(base) for node in own.values() for base in node.bases} - own.keys()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name in bases for alias in node.names):
            if node.module.startswith("mindspeed_rl."):
                own = classes(node.module) | own
    return own


def methods(name: str, known: dict[str, ast.ClassDef]) -> dict[str, ast.FunctionDef]:
    """Public methods of a class and of its bases."""
    results: dict[str, ast.FunctionDef] = {}
    for base in map(ast.unparse, known[name].bases):
        results |= methods(base, known) if base in known else {}
    own = [item for item in known[name].body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")]
    return results | {item.name: item for item in own}


def worker_methods(kind: remote_group.WorkerKind) -> dict[str, ast.FunctionDef]:
    module, _, name = kind.target.partition(":")
    return methods(name, classes(module))


def phase_calls(node: ast.ClassDef) -> Iterator[tuple[str, list[str]]]:
    """Name of each phase that methods run by `call` or `start`, and the arguments that they pass."""
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
            continue
        first = ast.unparse(call.args[0])
        if call.func.attr in ("call", "start") and (first.removeprefix("Phases.").isupper() or first.startswith("Phase(")):
            yield eval(first, vars(phases)).name, [ast.unparse(argument) for argument in call.args[1:]]


@pytest.mark.parametrize("name", CALLERS)
def test_every_phase_that_the_driver_runs_is_a_method_of_its_workers_with_these_parameters(name: str) -> None:
    module, kinds = CALLERS[name]
    results = list(phase_calls(classes(module)[name]))
    assert results
    for phase, arguments in results:
        having = [known[phase] for known in map(worker_methods, kinds) if phase in known]
        assert having, phase
        for method in having:
            most = len(method.args.args) - 1  # without self
            assert most - len(method.args.defaults) <= len(arguments) <= most, phase


def test_a_phase_of_the_fleet_has_the_parameters_of_its_workers() -> None:
    ours, kinds = methods("Fleet", classes("mindspeed_rl.workers.fleet")), CALLERS["Fleet"][1]
    theirs = [known for known in map(worker_methods, kinds)]
    shared = {phase for known in theirs for phase in known} & set(phases.PHASE_DEADLINES) & set(ours)
    assert {
        "generate",
        "compute_log_probs",
        "compute_values",
        "update_actor",
        "update_critic",
        "push_weights",
        "save",
    } <= shared
    for phase in shared:
        for known in theirs:
            assert phase not in known or ast.unparse(known[phase].args) == ast.unparse(ours[phase].args), phase


def test_the_phases_of_an_engine_for_users_are_methods_of_its_workers() -> None:
    known = classes("mindspeed_rl.inference.replica_worker")
    for phase in (
        phases.Phases.ADD_REQUESTS,
        phases.Phases.TAKE_TOKENS,
        phases.Phases.CANCEL,
        phases.Phases.NEXT_TOKENS,
        phases.Phases.MODEL_SCORES,
    ):
        for worker in ("InferenceWorker", "MegatronInferenceWorker"):
            assert phase.name in methods(worker, known)


def test_the_listed_way_from_the_command_to_the_policy_loss_exists() -> None:
    path = listed()
    assert path[0] == ("mindspeed_rl/cli/train.py", "main") and path[-1][1] == "policy_loss"
    sources = []
    for file, name in path:
        tree: ast.AST = ast.parse((ROOT / file).read_text())
        for part in name.split("."):
            named = [node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part]
            tree = named[-1]  # overloads stand in front of what they describe
        sources.append(ast.unparse(tree))
    # the shell calls what it is asked for by name, and the engine the loss that it was given
    indirect = {"WorkerProcess.call": "getattr(self._worker, method)", "compute_loss": "loss("}
    for source, (_, name), (_, following) in zip(sources, path, path[1:]):
        assert indirect.get(name, following.split(".")[-1]) in source


def test_ranks_of_one_host_follow_each_other() -> None:
    assert _order_by_host({0: "a", 1: "b", 2: "a", 3: "b"}, "a") == [0, 2, 1, 3]
    assert _order_by_host({0: "a", 1: "b", 2: "a", 3: "b"}, "b") == [1, 3, 0, 2]  # the driver's first
    assert _order_by_host({3: "a", 0: "b", 1: "b", 2: "a"}, "another") == [0, 1, 2, 3]
    assert _order_by_host({0: "a"}, "a") == [0]
