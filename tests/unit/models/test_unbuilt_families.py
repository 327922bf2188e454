"""Published models that nothing here computes: one sentence names what is missing, and none runs as an earlier model."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from published import MODELS

from mindspeed_rl.models import ARCHITECTURES, UNBUILT, find_architecture
from mindspeed_rl.models.plan import read_model

sys.path.append(str(Path(__file__).parents[2] / "dist"))
import tiny_modules

V41 = MODELS["DeepSeek-V4.1-Flash"]
V4 = {**tiny_modules.CONFIGS["deepseek_v4"]().to_dict(), "architectures": ["DeepseekV4ForCausalLM"]}
#: the model of text in it, as somebody might write it for classes of V4
FLAT = V41["text_config"] | {"architectures": V41["architectures"], "model_type": "deepseek_v41"}


def refuse(folder: Path, config: dict[str, Any], engine: str) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"^{re.escape(str(folder / 'config.json'))}: ") as error:
        read_model(folder, engine)
    return str(error.value)


def test_what_is_listed_is_in_no_table() -> None:
    """An entry goes once there is a module for it; DeepSeek-V4.1 gets tests beside V4's once transformers has it."""
    known = {kind for name in ARCHITECTURES for kind in find_architecture(name).model_types}
    assert not known & UNBUILT.keys()
    assert {kind for kind in UNBUILT if kind not in transformers.CONFIG_MAPPING} == {"deepseek_v41"}


@pytest.mark.parametrize("config", [V41, FLAT, V4 | {"model_type": "deepseek_v41"}], ids=["published", "flat", "type"])
def test_deepseek_v41_is_refused_with_what_is_missing(config: dict[str, Any], tmp_path: Path) -> None:
    text = refuse(tmp_path, config, "megatron")
    assert "CSA2" in text and "Engram" in text and "the installed transformers has no class for it either" in text
    text = refuse(tmp_path, config, "fsdp")
    assert f"transformers {transformers.__version__} has no model of type deepseek_v41" in text
    assert "Engram" in text and text.endswith("so no other engine trains it. Install a release that has it.")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (V41 | {"model_type": "deepseek_v4"}, "as DeepseekV4ForCausalLM, and architectures names DeepseekV41ForCausalLM"),
        (FLAT | {"model_type": "deepseek_v4"}, "as DeepseekV4ForCausalLM, and architectures names DeepseekV41ForCausalLM"),
        # all sizes are V4's
        (V4 | {"architectures": ["DeepseekV41ForCausalLM"]}, "and architectures names DeepseekV41ForCausalLM, another model"),
        (FLAT | {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]}, "does not take these values"),
        (V4 | {"layer_types": ["sliding_attention"]}, "must equal `len(layer_types)` (1)"),
        (V4 | {"index_topk": "many"}, "Field 'index_topk' expected int"),
        (V4 | {"n_routed_experts": 0}, ""),
    ],
)
def test_nothing_of_another_model_runs_as_deepseek_v4(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    assert reason in refuse(tmp_path, config, "fsdp")


def test_deepseek_v4_names_the_engine_that_trains_it(tmp_path: Path) -> None:
    assert "engine: fsdp trains" in (text := refuse(tmp_path, V4, "megatron")) and "compressed attention" in text
    architecture, _, _ = read_model(tmp_path, "fsdp")
    assert architecture.name == "deepseek_v4"
