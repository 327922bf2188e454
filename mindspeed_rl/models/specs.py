"""What a layer spec of Megatron is made of, read and changed alike in every release.

A spec says which class builds each part of a layer. Until megatron-core 0.16 a part is a class or a `ModuleSpec`; 0.17 makes
experts and shared experts `functools.partial`s of their classes, and 0.18 the whole MLP, a plain one by its classmethod
`as_mlp_submodule`. The functions here take all of these.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.moe import experts
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

#: `megatron.core.transformer.moe.experts.GroupedMLP`, all experts of a rank in one product without TransformerEngine; None in
#: megatron-core from 0.17 on, which has removed it
GROUPED_EXPERTS: type | None = getattr(experts, "GroupedMLP", None)


def module_of(part: object) -> type | None:
    """The class that a part of a spec is built from; None for functions, values and what is not there."""
    if isinstance(part, ModuleSpec):
        part = part.module
    elif isinstance(part, functools.partial):
        part = part.func
    if isinstance(part, types.MethodType):  # a classmethod that builds its class
        part = part.__self__
    return part if isinstance(part, type) else None


def with_module(part: object, module: type) -> Any:
    """The part built from another class, with the same arguments and inner parts."""
    if isinstance(part, ModuleSpec):
        return dataclasses.replace(part, module=module)
    if isinstance(part, functools.partial):
        build = getattr(module, part.func.__name__) if isinstance(part.func, types.MethodType) else module
        return functools.partial(build, *part.args, **part.keywords)
    assert isinstance(part, type)
    return module


def with_arguments(part: object, **arguments: Any) -> Any:
    """The part with more arguments for its class."""
    if isinstance(part, ModuleSpec):
        return dataclasses.replace(part, params={**part.params, **arguments})
    if isinstance(part, functools.partial):
        return functools.partial(part, **arguments)
    assert isinstance(part, type)
    return ModuleSpec(module=part, params=arguments)


def submodules_of(part: object) -> Any:
    """The dataclass of a part's inner parts, None where it has none."""
    if isinstance(part, ModuleSpec):
        return part.submodules
    return part.keywords.get("submodules") if isinstance(part, functools.partial) else None


def substituted(part: Any, replace: Callable[[str, Any], Any], name: str = "") -> Any:
    """A part of a spec with itself and all its inner parts replaced; the one that was given stays as it is.

    Args:
        replace: called with the name of a part in the one around it ("" for the outermost) and the part, from the outside in;
            returns what takes its place, or the part. It sees parts that are built from a class, and no others.
    """
    part = replace(name, part)
    inner = submodules_of(part)
    if inner is None:
        return part
    assert dataclasses.is_dataclass(inner) and not isinstance(inner, type)
    found = {field.name: getattr(inner, field.name) for field in dataclasses.fields(inner)}
    changed = {field: substituted(value, replace, field) for field, value in found.items() if module_of(value) is not None}
    submodules = dataclasses.replace(inner, **changed)
    if isinstance(part, ModuleSpec):
        return dataclasses.replace(part, submodules=submodules)
    return functools.partial(part, submodules=submodules)


def substitute_layers(block: TransformerBlockSubmodules, replace: Callable[[str, Any], Any]) -> None:
    """Replaces parts in every layer of a block; layers that share a spec share the new one too."""
    assert block.layer_specs is not None
    # the old specs are kept until all are done, so that no two have the same id
    done: dict[int, tuple[ModuleSpec, ModuleSpec]] = {}
    for layer in block.layer_specs:
        if id(layer) not in done:
            done[id(layer)] = (layer, substituted(layer, replace))
    block.layer_specs = [done[id(layer)][1] for layer in block.layer_specs]
