"""A prepared process lets these floors import what they need at the top."""

from __future__ import annotations

import ast

import pytest
from call_path import ROOT

FLOORS = ("workers", "trainers", "rollout", "engine")


def deferred_imports(source: str) -> list[str]:
    """Imports of the package's own modules inside functions."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    statements = [node for function in functions for node in ast.walk(function)]
    results = [ast.unparse(node) for node in statements if isinstance(node, (ast.Import, ast.ImportFrom))]
    return [text for text in results if text.split()[1].split(".")[0] == "mindspeed_rl"]


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_defers_no_import_of_own_modules(floor: str) -> None:
    results = {str(path): deferred_imports(path.read_text()) for path in (ROOT / "mindspeed_rl" / floor).rglob("*.py")}
    assert {path: texts for path, texts in results.items() if texts} == {}


def test_a_deferred_import_is_seen() -> None:
    assert deferred_imports("def f():\n    from mindspeed_rl.engine import parallel\n    import json\n") == [
        "from mindspeed_rl.engine import parallel"
    ]
