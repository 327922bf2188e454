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

from mindspeed_rl.models import ARCHITECTURES, UNBUILT, architecture_for, find_architecture
from mindspeed_rl.models.hf_module import _check_class, read_hf_config
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
        (V4 | {"n_routed_experts": 0}, "greater than 0, got: 0"),
    ],
)
def test_nothing_of_another_model_runs_as_deepseek_v4(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    assert reason in refuse(tmp_path, config, "fsdp")


def test_deepseek_v4_names_the_engine_that_trains_it(tmp_path: Path) -> None:
    assert "engine: fsdp trains" in (text := refuse(tmp_path, V4, "megatron")) and "compressed attention" in text
    architecture, _, _ = read_model(tmp_path, "fsdp")
    assert architecture.name == "deepseek_v4"


TYPES = [(name, kind) for name in ARCHITECTURES for kind in find_architecture(name).model_types]


@pytest.mark.parametrize(("classes", "kind"), [("Qwen2ForCausalLM", "llama"), ("Qwen2ForCausalLM", "deepseek_v41")])
@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_classes_and_type_of_two_models_are_refused(classes: str, kind: str, engine: str, tmp_path: Path) -> None:
    text = refuse(tmp_path, MODELS["Qwen2.5-0.5B"] | {"architectures": [classes], "model_type": kind}, engine)
    assert kind in text and (engine == "fsdp" or f"architectures has {classes}, and model_type is {kind}, another" in text)


@pytest.mark.parametrize("kind", ["gpt_neox", "minimax", None])
def test_a_type_of_no_family_is_taken_by_the_engine_that_reads_classes_alone(kind: str | None, tmp_path: Path) -> None:
    config = MODELS["Qwen2.5-0.5B"] | {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path)[0].name == "qwen2"
    assert refuse(tmp_path, config, "fsdp")  # whose workers build the class of the type


@pytest.mark.parametrize("name", MODELS)
def test_published_models_are_of_one_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    if MODELS[name]["model_type"] not in UNBUILT:
        for config in (MODELS[name], MODELS[name] | MODELS[name].get("text_config", {})):  # as an engine's arguments have it
            assert MODELS[name]["architectures"][0] in architecture_for(config).hf_classes


@pytest.mark.parametrize(("name", "kind"), TYPES)
def test_each_class_of_a_family_has_each_of_its_types(name: str, kind: str) -> None:
    for named in find_architecture(name).hf_classes:
        for listed in (kind, f"{kind}_text", kind.removesuffix("_text"), "of_code_with_the_weights", None):
            assert architecture_for({"architectures": [named], "model_type": listed}).name == name


@pytest.mark.parametrize("kind", [kind for _, kind in TYPES if kind in transformers.CONFIG_MAPPING])
def test_transformers_own_classes_of_a_type_are_of_one_model(kind: str) -> None:
    auto = transformers.models.auto.modeling_auto
    mappings = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    named = [mapping[kind] for mapping in mappings if kind in mapping]
    for classes in named:
        _check_class([classes], kind, "transformers")


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
@pytest.mark.parametrize("classes", ["FSDPQwen2ForCausalLM", "PeftModelForCausalLM", "AutoModelForCausalLM", "PeftModel"])
def test_what_saved_a_model_is_not_its_class(classes: str, engine: str, tmp_path: Path) -> None:
    config = MODELS["Qwen2.5-0.5B"] | {"architectures": [classes]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path, engine)[0].name == "qwen2"
    assert read_hf_config(tmp_path, "engine: fsdp").model_type == "qwen2"


def test_a_marked_class_of_another_model_is_refused(tmp_path: Path) -> None:
    config = MODELS["Qwen2.5-0.5B"] | {"architectures": ["FSDPQwen2ForCausalLM"], "model_type": "gpt_neox"}
    assert "as GPTNeoXForCausalLM, and architectures names Qwen2ForCausalLM" in refuse(tmp_path, config, "fsdp")


@pytest.mark.parametrize("kind", [["a"], {"a": 1}, 3])
@pytest.mark.parametrize(("classes", "engine"), [("GPTNeoXForCausalLM", "fsdp"), ("Qwen2ForCausalLM", "megatron")])
def test_a_type_that_is_no_name_is_one_sentence(kind: object, classes: str, engine: str, tmp_path: Path) -> None:
    text = refuse(tmp_path, {"architectures": [classes], "model_type": kind}, engine)
    assert text.endswith(f"model_type is {kind!r}; expected the name of a type, such as 'qwen3'")
