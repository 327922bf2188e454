"""Imports of many libraries in a process, with fewer garbage collections and without needless further libraries."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

#: objects between collections, and collections between two of the next generation; the first is 700 in Python
_SELDOM = (50_000, 10, 10)


@contextlib.contextmanager
def collecting_seldom() -> Iterator[None]:
    """Collect garbage seldom in a block that imports.

    torch, Megatron and vLLM are a million objects that stay, and collecting while they come took 3.3 of 14.5 s of processor
    time (torch, Ray and transformers: 1.1 of 9 s).

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
    """Let imports of the package fail in the block, unless it was imported before."""
    modules = cast("dict[str, Any]", sys.modules)
    if package in modules:
        yield
        return
    modules[package] = None
    try:
        yield
    finally:
        del modules[package]


def auto_tokenizer() -> type[AutoTokenizer]:
    """Import `transformers.AutoTokenizer` without models, unless they are here already.

    The module that finds tokenizers' classes also finds models', and imports `GenerationMixin` for old models that bring their
    own code; with it come generation, modelling and torch's compilers: 1.2 s and 82 MiB, where a tokenizer needs 1.1 s and
    25 MiB. Meanwhile there is a stand-in; later imports of models load all of it. It only keeps out the search
    of models with remote code from before transformers 4.45, which nothing here loads.
    """
    name = "GenerationMixin"
    generation: Any = importlib.import_module("transformers.generation")
    # a name that was used before is in the module; the others are imported on first use
    stands_in = name not in vars(generation)
    if stands_in:
        setattr(generation, name, type(name, (), {}))
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer
    finally:
        if stands_in:
            delattr(generation, name)


def plain_tokenizer() -> type[PreTrainedTokenizerFast]:
    """Import the class of transformers that takes all steps of a tokenizer from tokenizer.json."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast
