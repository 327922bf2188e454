"""Keys of a model that only transformers computes."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models.module_family import ModuleArchitecture


def _refuse(*_: object) -> Any:
    raise AssertionError("not read here")


@pytest.mark.parametrize("keys", [{"optimizer": "muon"}, {"lora_target_modules": ["linear_qkv"]}])
def test_keys_that_name_layers_of_the_table_are_refused(keys: dict[str, Any]) -> None:
    family = ModuleArchitecture("gpt_neox", (), ("gpt_neox",), (), _refuse, _refuse)
    family.check(MegatronConfig(engine="fsdp"))
    (name,) = keys
    with pytest.raises(ValueError, match=f"{name}: .*only transformers computes gpt_neox"):
        family.check(MegatronConfig(engine="fsdp", **keys))
