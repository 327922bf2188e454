"""Which lines of the NPU's own files run, in whatever process and thread: Ray's workers, autograd's threads, killed ones too.

    NPU_SIM_LINES=/tmp/lines tests/npu_sim/run.sh && python tests/npu_sim/line_table.py /tmp/lines

A file of `MODULES` is compiled with a call before each statement, which writes the line's number when it is first reached.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import os
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

MODULES = (
    "mindspeed_rl.platform.npu",
    "mindspeed_rl.adaptors.mindspeed",
    "mindspeed_rl.adaptors.npu_attention",
    "mindspeed_rl.adaptors.vllm_ascend",
    "mindspeed_rl.adaptors.hccl_buffers",
)
_CALL = "_npu_sim_line"


def statements(tree: ast.Module) -> list[ast.stmt]:
    """Those that can run, without documentation and imports from the future."""
    texts = {
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    }
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
        and node not in texts
        and not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
    ]


def _told(tree: ast.Module, module: str) -> ast.Module:
    """The same program with a call before each statement."""
    counted = set(statements(tree))

    def told(body: list[ast.stmt]) -> list[ast.stmt]:
        results: list[ast.stmt] = []
        for statement in body:
            if statement in counted:
                arguments: list[ast.expr] = [ast.Constant(module), ast.Constant(statement.lineno)]
                results.append(ast.Expr(ast.Call(ast.Name(_CALL, ast.Load()), arguments, [])))
                ast.copy_location(results[-1], statement)
            results.append(statement)
        return results

    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):  # an expression's is none
                setattr(node, name, told(body))
    return ast.fix_missing_locations(tree)


class RecordingLoader(importlib.machinery.SourceFileLoader):
    """A module's file as it is, told of line by line."""

    def get_code(self, fullname: str) -> CodeType:  # not from the compiled file that others use
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:
        return compile(_told(ast.parse(data), self.name), path, "exec", optimize=_optimize)


def _recorder(folder: Path) -> Callable[[str, int], None]:
    folder.mkdir(parents=True, exist_ok=True)
    # short lines to the end of one file, each in one call: as many processes as there are may do so
    file = os.open(folder / "lines.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    seen: set[tuple[str, int]] = set()

    def reached(module: str, line: int) -> None:
        if (module, line) not in seen:
            seen.add((module, line))
            os.write(file, f"{module} {line}\n".encode())

    return reached


def install(folder: str) -> None:
    """From now on this process tells which lines it reaches."""
    setattr(builtins, _CALL, _recorder(Path(folder)))
