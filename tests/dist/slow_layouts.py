"""Tables of layouts of which some are slow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def marked(layouts: Mapping[str, tuple[Any, ...]], slow: Collection[str]) -> list[Any]:
    """A parameter set for each, by its name; those named in `slow` are run by --all only."""
    return [pytest.param(*layout, id=name, marks=pytest.mark.slow if name in slow else ()) for name, layout in layouts.items()]
