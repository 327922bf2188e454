"""What a group of workers can be asked is what its workers do, and the documented way to the loss exists."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from call_path import ROOT, listed

from mindspeed_rl.workers.groups import _host_by_host

#: group -> its module, and methods of its own, which are made of others
GROUPS = {
    "ActorGroup": ("mindspeed_rl.workers.groups", {"set_up"}),
    "RewardModelGroup": ("mindspeed_rl.workers.groups", {"set_up"}),
    "ReferenceGroup": ("mindspeed_rl.workers.apart", set()),
    "CriticGroup": ("mindspeed_rl.workers.apart", set()),
    "SupervisedGroup": ("mindspeed_rl.workers.groups", {"set_up"}),
    "ComparisonGroup": ("mindspeed_rl.diagnostics.train_vs_rollout", {"set_up"}),
    "InferenceGroup": ("mindspeed_rl.inference.engine_group", set()),
    "MegatronInferenceGroup": ("mindspeed_rl.inference.engine_group", set()),
}


def classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module and those that they are made of, without importing it: workers import Megatron and vLLM."""
    tree = ast.parse(Path(find_spec(module).origin).read_text())
    own = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    bases = {ast.unparse(base) for node in own.values() for base in node.bases} - own.keys()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any(alias.name in bases for alias in node.names):
            if node.module.startswith("mindspeed_rl."):
                own |= {name: found for name, found in classes(node.module).items() if name in bases}
    return own


def public_methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")}


def with_bases(name: str, known: dict[str, ast.ClassDef], *stop: str) -> dict[str, ast.FunctionDef]:
    """Public methods of a class and of its bases in the same module, up to the classes `stop`."""
    methods: dict[str, ast.FunctionDef] = {}
    for base in known[name].bases:
        if ast.unparse(base) in known and ast.unparse(base) not in stop:
            methods |= with_bases(ast.unparse(base), known, *stop)
    return methods | public_methods(known[name])


def target_of(group: ast.ClassDef) -> tuple[str, str]:
    """Module and class of a group's workers."""
    found = [
        item.value
        for item in group.body
        if (isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == "target")
        or (isinstance(item, ast.AnnAssign) and ast.unparse(item.target) == "target")
    ]
    module, _, name = ast.literal_eval(found[0]).partition(":")
    return module, name


def parameters(method: ast.FunctionDef) -> str:
    return ast.unparse(method.args)


@pytest.mark.parametrize("name", GROUPS)
def test_every_method_of_a_group_is_one_of_its_workers_with_the_same_parameters(name: str) -> None:
    module, own = GROUPS[name]
    groups = classes(module)
    worker_module, worker = target_of(groups[name])
    theirs = with_bases(worker, classes(worker_module), "DeviceWorker")
    ours = {key: item for key, item in with_bases(name, groups, "RunGroup", "WorkerGroup").items() if key not in own}
    assert ours
    for key, method in ours.items():
        assert parameters(method) == parameters(theirs[key]), key
        called = [
            ast.literal_eval(node.args[0])
            for node in ast.walk(method)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "process.call.remote"
        ]
        assert called == [key]


def test_the_listed_way_from_the_command_to_the_policy_loss_exists_and_is_short() -> None:
    path = listed()
    assert len(path) <= 8
    assert path[0] == ("mindspeed_rl/cli/train.py", "main") and path[-1][1] == "policy_loss"
    sources = []
    for file, name in path:
        tree: ast.AST = ast.parse((ROOT / file).read_text())
        for part in name.split("."):
            named = [node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part]
            tree = named[-1]  # overloads stand in front of what they describe
        sources.append(ast.unparse(tree))
    # the shell calls what it is asked for by name, and the engine the loss that it was given
    indirect = {"WorkerProcess.call": "getattr(self._worker, method)", "TrainEngine.loss_step": "loss("}
    for source, (_, name), (_, following) in zip(sources, path, path[1:]):
        assert indirect.get(name, following.split(".")[-1]) in source


def test_ranks_of_one_host_follow_each_other() -> None:
    assert _host_by_host({0: "a", 1: "b", 2: "a", 3: "b"}, "a") == [0, 2, 1, 3]
    assert _host_by_host({0: "a", 1: "b", 2: "a", 3: "b"}, "b") == [1, 3, 0, 2]  # the driver's first
    assert _host_by_host({3: "a", 0: "b", 1: "b", 2: "a"}, "another") == [0, 1, 2, 3]
    assert _host_by_host({0: "a"}, "a") == [0]
