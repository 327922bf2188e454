"""Parts of a layer spec of Megatron, read and changed in the same way in every release.

A spec gives the class that builds each part of a layer. Until megatron-core 0.16 a part is a class or a `ModuleSpec`; 0.17
makes experts and shared experts `functools.partial`s of their classes, and 0.18 the MLP too, a dense one by its classmethod
`as_mlp_submodule`. 0.19 builds shared experts by a function, `_build_shared_experts`. The functions here accept all of these.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, TypeAlias

from megatron.core.transformer.moe import experts
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

#: `megatron.core.transformer.moe.experts.GroupedMLP`, all experts of a rank in one product without TransformerEngine; None in
#: megatron-core from 0.17 on, which has removed it
GROUPED_EXPERTS: type | None = getattr(experts, "GroupedMLP", None)


#: a class, a `ModuleSpec` or a partial of a class; fields of Megatron's dataclasses take one or another of them
Part: TypeAlias = Any
#: (name of a part, the part) -> what replaces it
_Replacement: TypeAlias = Callable[[str, Part], Part]


def get_class(part: object) -> type | None:
    """Return the class that a part of a spec is built from; None for functions, values and missing parts."""
    if isinstance(part, ModuleSpec):
        part = part.module
    elif isinstance(part, functools.partial):
        part = part.func
    if isinstance(part, types.MethodType):  # a classmethod that builds its class
        part = part.__self__
    if getattr(part, "__name__", "") == "_build_shared_experts":
        return SharedExpertMLP
    return part if isinstance(part, type) else None


def replace_class(part: object, module: type) -> Part:
    """Return the part built from another class, with the same arguments and inner parts."""
    if isinstance(part, ModuleSpec):
        return dataclasses.replace(part, module=module)
    if isinstance(part, functools.partial):
        build = getattr(module, part.func.__name__) if isinstance(part.func, types.MethodType) else module
        return functools.partial(build, *part.args, **part.keywords)
    assert isinstance(part, type)
    return module


def _get_submodules(part: object) -> object:
    """Return the dataclass of a part's inner parts, None where it has none."""
    if isinstance(part, ModuleSpec):
        return part.submodules
    return part.keywords.get("submodules") if isinstance(part, functools.partial) else None


def _substitute_parts(part: Part, replace: _Replacement, name: str = "") -> Part:
    """Return a part of a spec with itself and all its inner parts replaced; the given one stays unchanged.

    Args:
        replace: called with the name of a part in the one around it ("" for the outermost) and the part, from the outside in;
            returns its replacement, or the part. It receives only parts that are built from a class.
    """
    part = replace(name, part)
    inner = _get_submodules(part)
    if inner is None:
        return part
    assert dataclasses.is_dataclass(inner) and not isinstance(inner, type)
    parts = {field.name: getattr(inner, field.name) for field in dataclasses.fields(inner)}
    changed = {
        field: _substitute_parts(value, replace, field) for field, value in parts.items() if get_class(value) is not None
    }
    submodules = dataclasses.replace(inner, **changed)
    if isinstance(part, ModuleSpec):
        return dataclasses.replace(part, submodules=submodules)
    return functools.partial(part, submodules=submodules)


def substitute_layers(block: TransformerBlockSubmodules, replace: _Replacement) -> None:
    """Replace parts in every layer of a block; layers that share a spec share the new one too."""
    assert block.layer_specs is not None
    # the old specs stay referenced until all are done, so that no two have the same id
    done: dict[int, tuple[ModuleSpec, ModuleSpec]] = {}
    for layer in block.layer_specs:
        if id(layer) not in done:
            done[id(layer)] = (layer, _substitute_parts(layer, replace))
    block.layer_specs = [done[id(layer)][1] for layer in block.layer_specs]
