"""What is declared of the data plane is what trainers and workers do with it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import mindspeed_rl
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.run.phases import Phase, Phases
from mindspeed_rl.trainers.rl_setup import DATA_PLANE_USERS

PACKAGE = Path(mindspeed_rl.__file__).parent
SOURCES = [
    ast.parse(path.read_text()) for folder in ("trainers", "workers") for path in sorted((PACKAGE / folder).rglob("*.py"))
]


def calls(*methods: str) -> Iterator[ast.Call]:
    """Calls of methods by these names on data planes and replicas."""
    for node in (node for tree in SOURCES for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
            if ast.unparse(node.func.value).rpartition(".")[2].strip("_") in ("plane", "replica"):
                yield node


def text_outside_declarations() -> set[str]:
    """All text but the keys of dicts, among which the users are declared."""
    results: set[str] = set()
    for tree in SOURCES:
        keys = {id(key) for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}
        results |= {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in keys}
    return results


def consumers_of_named_phases() -> set[str]:
    """The consumers of the phases that trainers and workers name."""
    names = {node.attr for tree in SOURCES for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {phase.consumer for name, phase in vars(Phases).items() if isinstance(phase, Phase) and name in names}


def test_every_column_that_is_put_by_name_is_declared_once() -> None:
    declared = [column for columns in DATA_PLANE_USERS.values() for column in columns]
    assert len(declared) == len(set(declared))
    literals = [call.args[0] for call in calls("put") if isinstance(call.args[0], ast.Dict)]
    put = {key.value for literal in literals for key in literal.keys if isinstance(key, ast.Constant)}
    assert put and put <= set(declared)


def test_every_user_without_columns_of_its_own_asks_for_rows() -> None:
    asking = [call.args[0] for call in calls("get", "fetch")]
    used = text_outside_declarations() | consumers_of_named_phases()
    endings = tuple(str(name.values[-1].value) for name in asking if isinstance(name, ast.JoinedStr))
    for user, columns in DATA_PLANE_USERS.items():
        assert columns or user in used or user.endswith(endings), user
    by_name = {name.value for name in asking if isinstance(name, ast.Constant)}
    assert by_name and by_name <= set(DATA_PLANE_USERS)


def test_every_method_of_the_protocol_is_called() -> None:
    methods = {name for name in vars(DataPlane) if not name.startswith("_")}
    assert methods == {"put", "get", "clear", "abort", "close"}
    text = "\n".join(ast.unparse(tree) for tree in SOURCES)
    assert all(f"plane.{name}" in text for name in methods)
