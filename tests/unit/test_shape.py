"""The shape of the package, counted: what a reader of its upper floors relies on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import mindspeed_rl

PACKAGE = Path(mindspeed_rl.__file__).parent
MOST_DEFERRED = 20


def _sources() -> Iterator[tuple[Path, list[str], ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield path.relative_to(PACKAGE), text.splitlines(), ast.parse(text)


def _is_own(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.level > 0 or (node.module or "").split(".")[0] == PACKAGE.name
    return isinstance(node, ast.Import) and any(alias.name.split(".")[0] == PACKAGE.name for alias in node.names)


def _deferred() -> list[tuple[str, bool]]:
    """Imports of own modules inside functions: (file:line, whether a comment on or above the line says why)."""
    found = set()
    for path, lines, tree in _sources():
        for function in ast.walk(tree):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            for node in ast.walk(function):
                if _is_own(node):
                    first = node.lineno - 1
                    while lines[first - 1].strip().startswith(("from ", "import ")):
                        first -= 1  # one comment serves the imports below it
                    near = lines[first - 1 : node.end_lineno]
                    found.add((f"{path}:{node.lineno}", any("#" in line for line in near)))
    return sorted(found)


def test_few_imports_of_own_modules_are_deferred_and_each_has_its_reason():
    deferred = _deferred()
    assert len(deferred) <= MOST_DEFERRED, deferred
    assert not [place for place, has_reason in deferred if not has_reason]


def test_nobody_dispatches_on_attribute_names():
    """Workers and loops are called by methods that a reader finds by their names."""
    places = [
        f"{path}:{node.lineno}"
        for path, _, tree in _sources()
        if path.parts[0] in ("trainers", "workers")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
    ]
    assert not places
