"""Parts of Megatron's layer specs, whatever a release makes them of: classes, specs, partials and classmethods."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import experts
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron_release import GROUPED_EXPERTS

from mindspeed_rl.engine.lora import _add_arguments
from mindspeed_rl.models import specs


class Part:
    """Class that a spec builds."""

    def __init__(self, size: int, **arguments: Any) -> None:
        self.built_with = {"size": size, **arguments}

    @classmethod
    def as_part(cls, **arguments: Any) -> Part:
        return cls(**arguments)


class Other(Part):
    pass


@dataclass
class Inside:
    first: Any
    second: Any
    note: str = "kept"


def function() -> None:
    """No class."""


FORMS = {
    "class": Part,
    "spec": ModuleSpec(module=Part, params={"factor": 2}),
    "partial": functools.partial(Part, factor=2),
    "classmethod": functools.partial(Part.as_part, factor=2),
}


def built(part: Any, **arguments: Any) -> Part:
    """As Megatron builds it: a spec or class by `build_module`, everything else by a call."""
    return build_module(part, **arguments) if isinstance(part, (ModuleSpec, type)) else part(**arguments)


@pytest.mark.parametrize("form", FORMS)
def test_another_class_is_built_with_the_same_arguments_and_some_more(form: str) -> None:
    part = FORMS[form]
    assert specs.get_class(part) is Part
    changed = _add_arguments(specs.replace_class(part, Other), shift=3)
    result = built(changed, size=4)
    assert type(result) is Other is specs.get_class(changed)
    assert result.built_with == {"size": 4, "shift": 3} | ({} if form == "class" else {"factor": 2})
    assert type(built(part, size=4)) is Part  # the one that was given is as it was


@pytest.mark.parametrize(
    "value",
    [None, function, functools.partial(function), "text", Part(1)],
    ids=["none", "function", "bound function", "text", "object"],
)
def test_what_is_not_built_from_a_class_has_none(value: object) -> None:
    assert specs.get_class(value) is None and specs._get_submodules(value) is None


@pytest.mark.parametrize("outer", ["spec", "partial", "classmethod"])
def test_inner_parts_are_replaced_from_the_outside_in_and_by_name(outer: str) -> None:
    inside = Inside(first=Part, second=functools.partial(Part, submodules=Inside(Part, function)))
    whole = {
        "spec": ModuleSpec(module=Part, submodules=inside),
        "partial": functools.partial(Part, submodules=inside),
        "classmethod": functools.partial(Part.as_part, submodules=inside),
    }[outer]
    seen = []

    def replace(name: str, part: Any) -> Any:
        seen.append(name)
        return Other if name == "first" else part

    changed = specs._get_submodules(specs._substitute_parts(whole, replace))
    assert seen == ["", "first", "second", "first"]
    assert changed.first is Other and changed.note == "kept"
    deepest = specs._get_submodules(changed.second)
    assert deepest.first is Other and deepest.second is function
    assert inside.first is Part and specs._get_submodules(inside.second).first is Part


def test_layers_that_share_a_spec_share_the_new_one() -> None:
    shared, own = ModuleSpec(module=Part), ModuleSpec(module=Part)
    block = TransformerBlockSubmodules(layer_specs=[shared, own, shared])
    specs.substitute_layers(block, lambda name, part: specs.replace_class(part, Other))
    first, second, third = block.layer_specs
    assert first is third is not second
    assert {specs.get_class(layer) for layer in block.layer_specs} == {Other}


@pytest.mark.parametrize("num_experts", [None, 4])
def test_the_parts_of_the_installed_megatron_are_all_found(num_experts: int | None) -> None:
    results: dict[str, set[type | None]] = {}

    def note(name: str, part: Any) -> Any:
        results.setdefault(name, set()).add(specs.get_class(part))
        return part

    specs._substitute_parts(get_gpt_layer_local_spec(num_experts=num_experts, moe_grouped_gemm=False), note)
    assert results["linear_qkv"] == results["linear_fc1"] == {ColumnParallelLinear}
    assert results["linear_proj"] == results["linear_fc2"] == {RowParallelLinear}
    if num_experts is None:
        assert results["mlp"] == {MLP} and "experts" not in results
    else:
        assert results["experts"] == {experts.SequentialMLP} and "shared_experts" in results


def test_grouped_experts_are_megatrons_class_or_none() -> None:
    assert (specs.GROUPED_EXPERTS is not None) == GROUPED_EXPERTS
    assert specs.GROUPED_EXPERTS is getattr(experts, "GroupedMLP", None)
