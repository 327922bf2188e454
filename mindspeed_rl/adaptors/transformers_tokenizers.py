"""Tokenizers of transformers in processes that have no other use for it: the driver and preprocessing.

| patch | symbol | why |
|---|---|---|
| a stand-in while `AutoTokenizer` is imported | transformers.generation.GenerationMixin | the module that finds tokenizers' \
classes also finds models', and imports that one name for old models that bring their own code; with it come generation, \
modelling and torch's compilers: 1.2 s and 82 MiB, where a tokenizer needs 1.1 s and 25 MiB |

The stand-in is gone afterwards: whoever imports models gets all of it then. What keeps it is the finding of models with remote
code from before transformers 4.45, which nothing here loads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import AutoTokenizer

_NAME = "GenerationMixin"


def auto_tokenizer() -> type[AutoTokenizer]:
    """`transformers.AutoTokenizer`; brings no models, unless they are here already."""
    generation: Any = importlib.import_module("transformers.generation")
    # a name that was asked for before lies in the module; the others are imported when they are asked for
    stands_in = _NAME not in vars(generation)
    if stands_in:
        setattr(generation, _NAME, type(_NAME, (), {}))
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer
    finally:
        if stands_in:
            delattr(generation, _NAME)
