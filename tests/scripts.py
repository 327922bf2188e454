"""Scripts of examples/, tools/ and tests/ as modules: they are in no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load_script(path: str | Path) -> ModuleType:
    """Run a Python file anew, as a module with the file's name; a relative path is below the root of the project."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
