"""Python programs among the sources of an import, read by their syntax; nothing of them is executed."""

from __future__ import annotations

import ast


def is_program(text: str) -> bool:
    """Return True for the text of a Python program: it parses, and imports something or calls a function."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, (ast.Import, ast.ImportFrom, ast.Call)) for node in ast.walk(tree))
