"""Importing many libraries in a process: without the garbage collector's looking at all of them again and again, and without
those that they would only bring along."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any, cast

#: objects between collections, and collections between those of the next generation; the first is 700 in Python
_SELDOM = (50_000, 10, 10)


@contextlib.contextmanager
def collecting_seldom() -> Iterator[None]:
    """For blocks that import: torch, Megatron and vLLM are a million objects that stay, and collecting while they come took 3.3
    of 14.5 s of processor time (torch, Ray and transformers: 1.1 of 9 s).

    Not for blocks that compute: a cycle that holds a tensor would keep it for long.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def without(package: str) -> Iterator[None]:
    """Whoever imports the package in the block is told that it is not there, unless it was imported before."""
    modules = cast("dict[str, Any]", sys.modules)
    if package in modules:
        yield
        return
    modules[package] = None
    try:
        yield
    finally:
        del modules[package]
