"""The shape of the package: what a reader of its upper floors relies on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mindspeed_rl

PACKAGE = Path(mindspeed_rl.__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef

#: function that decides something of a run -> the modules that may call it
DECIDED_IN = {
    "place": ("run/draft.py",),
    "read_sizes": ("run/draft.py",),
    "read_objective": ("run/draft.py",),
    # parity compares losses of given batches, without a run
    # the page shows the formula of every algorithm
    "build_objective": ("run/objective.py", "cli/parity.py", "run/explain/algorithm_page.py"),
    # nor has the command that stores log-probs of a teacher
    "find_model": ("run/models.py", "run/ref_model.py", "workers/stages/teacher_store.py", "diagnostics/engine_parity.py"),
    # inference has no run, and engines are compared in another layout than the run's
    "plan_model": ("run/models.py", "inference/megatron_engine.py", "diagnostics/engine_parity.py"),
}


@dataclass(frozen=True)
class Source:
    """A file of the package: its path below the package, its lines and its tree."""

    path: Path
    lines: list[str]
    tree: ast.Module

    @property
    def functions(self) -> Iterator[Function]:
        """Functions and methods, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))


TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
SOURCES = [Source(path.relative_to(PACKAGE), text.splitlines(), ast.parse(text)) for path, text in TEXTS.items()]


def _is_own(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.level > 0 or (node.module or "").split(".")[0] == PACKAGE.name
    return isinstance(node, ast.Import) and any(alias.name.split(".")[0] == PACKAGE.name for alias in node.names)


def _deferred() -> list[tuple[str, bool]]:
    """Imports of own modules inside functions: (file:line, whether a comment on or above the line says why)."""
    results = set()
    for source in SOURCES:
        for function in source.functions:
            for node in ast.walk(function):
                if _is_own(node):
                    first = node.lineno - 1
                    while source.lines[first - 1].strip().startswith(("from ", "import ")):
                        first -= 1  # one comment serves the imports below it
                    near = source.lines[first - 1 : node.end_lineno]
                    results.add((f"{source.path}:{node.lineno}", any("#" in line for line in near)))
    return sorted(results)


def test_each_deferred_import_of_an_own_module_has_its_reason():
    assert not [place for place, has_reason in _deferred() if not has_reason]


def test_no_method_is_found_by_attribute_dispatch():
    """Workers and loops are called by methods that a reader can find by name."""
    places = [
        f"{source.path}:{function.lineno}"
        for source in SOURCES
        if source.path.parts[0] in ("trainers", "workers", "serving", "runtime")
        for function in source.functions
        if function.name == "__getattr__"
    ]
    assert not places


def test_a_run_is_decided_in_one_place():
    calls = [
        f"{source.path}:{node.lineno} {node.func.id}"
        for source in SOURCES
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and str(source.path) not in DECIDED_IN.get(node.func.id, (str(source.path),))
    ]
    assert not calls
