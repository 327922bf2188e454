"""One file per architecture: HF config -> Megatron config, layer spec, and the invertible HF <-> Megatron weight table."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_rl import registry
from mindspeed_rl.models.model_config import HfConfig, ModelConfig

if TYPE_CHECKING:
    from mindspeed_rl.models.architecture import Architecture

ARCHITECTURES: dict[str, str] = {
    "llama": "mindspeed_rl.models.llama:LLAMA",
    "mistral": "mindspeed_rl.models.mistral:MISTRAL",
    "qwen2": "mindspeed_rl.models.qwen2:QWEN2",
    "qwen3": "mindspeed_rl.models.qwen3:QWEN3",
    "mixtral": "mindspeed_rl.models.mixtral:MIXTRAL",
    "qwen2_moe": "mindspeed_rl.models.qwen2_moe:QWEN2_MOE",
    "qwen3_moe": "mindspeed_rl.models.qwen3_moe:QWEN3_MOE",
    "qwen3_next": "mindspeed_rl.models.qwen3_next:QWEN3_NEXT",
    "qwen3_5": "mindspeed_rl.models.qwen3_5:QWEN3_5",
    "qwen3_5_moe": "mindspeed_rl.models.qwen3_5:QWEN3_5_MOE",
    "qwen2_5_vl": "mindspeed_rl.models.qwen2_5_vl:QWEN2_5_VL",
    "qwen3_vl": "mindspeed_rl.models.qwen3_vl:QWEN3_VL",
    "qwen3_vl_moe": "mindspeed_rl.models.qwen3_vl:QWEN3_VL_MOE",
    "qwen3_5_vl": "mindspeed_rl.models.qwen3_vl:QWEN3_5_VL",
    "qwen3_5_moe_vl": "mindspeed_rl.models.qwen3_vl:QWEN3_5_MOE_VL",
    "deepseek_v2": "mindspeed_rl.models.deepseek_v2:DEEPSEEK_V2",
    "deepseek_v3": "mindspeed_rl.models.deepseek_v3:DEEPSEEK_V3",
    "deepseek_v32": "mindspeed_rl.models.deepseek_v32:DEEPSEEK_V32",
    "gemma": "mindspeed_rl.models.gemma:GEMMA",
    "gemma2": "mindspeed_rl.models.gemma2:GEMMA2",
    "gemma3": "mindspeed_rl.models.gemma3:GEMMA3",
    "glm4": "mindspeed_rl.models.glm4:GLM4",
    "glm4_moe": "mindspeed_rl.models.glm4_moe:GLM4_MOE",
    "glm5": "mindspeed_rl.models.glm5:GLM5",
    "minimax_m2": "mindspeed_rl.models.minimax_m2:MINIMAX_M2",
    "seed_oss": "mindspeed_rl.models.seed_oss:SEED_OSS",
    "mimo": "mindspeed_rl.models.mimo:MIMO",
    "internlm3": "mindspeed_rl.models.internlm3:INTERNLM3",
    "phi3": "mindspeed_rl.models.phi3:PHI3",
    "olmo3": "mindspeed_rl.models.olmo3:OLMO3",
    "ernie4_5": "mindspeed_rl.models.ernie4_5:ERNIE4_5",
    "ernie4_5_moe": "mindspeed_rl.models.ernie4_5:ERNIE4_5_MOE",
    "hunyuan": "mindspeed_rl.models.hunyuan:HUNYUAN",
    "hunyuan_moe": "mindspeed_rl.models.hunyuan:HUNYUAN_MOE",
    "hy_v3": "mindspeed_rl.models.hy_v3:HY_V3",
    "gpt_oss": "mindspeed_rl.models.gpt_oss:GPT_OSS",
}

#: model type -> what its layers have that no module here computes, of published models that are asked for; transformers may
UNBUILT = {
    "deepseek_v4": "compressed attention, hyper-connections and experts that a hash of the token chooses",
    "deepseek_v41": (
        "compressed keys that layers share (CSA2), tables of n-grams (Engram), hyper-connections in one pass, and a tower for "
        "images of its own"
    ),
    "qwen4_exp": "attention to indexed keys, hyper-connections, tables of n-grams, and a tower for images of its own",
    "qwen4_exp_text": "attention to indexed keys, hyper-connections and tables of n-grams",
}


def describe_unbuilt(model_type: object) -> str:
    """Return a clause about what the layers of a model type have that no module here computes; "" where that is not known."""
    known = UNBUILT.get(model_type) if isinstance(model_type, str) else None
    return "" if known is None else f"its layers have {known}, which no module here computes"


def _is_in_transformers(model_type: str) -> bool:
    """Return True where the installed transformers has a folder for a model type; it is not imported."""
    spec = find_spec("transformers")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return any(Path(folder, "models", model_type.removesuffix("_text")).is_dir() for folder in folders)


def find_architecture(name: str) -> Architecture:
    """Return the Architecture registered under a name, or one of your own given as ``module:attribute``.

    Raises:
        ValueError: no such name; the message lists the known ones and a suggestion.
    """
    if name not in ARCHITECTURES and ":" not in name:
        hint = registry.did_you_mean(name, ARCHITECTURES)
        raise ValueError(f"unknown architecture {name!r}; known are {', '.join(ARCHITECTURES)}{hint}")
    return registry.load(ARCHITECTURES.get(name, name), f"architecture {name!r}")


#: classes around a model, whose names say nothing about it: of PEFT, of transformers' factories and of torch.compile
_WRAPPERS = re.compile(r"(AutoModel|PeftModel|PreTrainedModel)(For\w+)?|OptimizedModule")


def list_classes(hf_config: HfConfig) -> list[str]:
    """Return the classes of a model that config.json names, without the marks of what saved it.

    transformers' Trainer wrote FSDPQwen2ForCausalLM for a model under FSDP.

    Raises:
        ValueError: `architectures` is not a list of strings.
    """
    names = hf_config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config.json has architectures {names!r}; expected a list of class names")
    plain = (name.removeprefix("FSDP") for name in names)
    return [name for name in plain if not _WRAPPERS.fullmatch(name)]


def read_model_type(hf_config: HfConfig) -> str | None:
    """Return the model type of config.json; None where it has none.

    Raises:
        ValueError: it is not a string.
    """
    model_type = hf_config.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise ValueError(f"model_type is {model_type!r}; expected the name of a type, such as 'qwen3'")
    return model_type


def _check_type(family: Architecture, classes: list[str], model_type: str | None, known: list[Architecture]) -> None:
    """Check that the model type of config.json is not another model's than its classes.

    Types that no family has are taken: some models have one for code of their own. So are those of a model's part of text.

    Raises:
        ValueError: it is another family's, or that of a model that nothing here computes.
    """
    if model_type is None or _name_family(model_type) in map(_name_family, family.model_types):
        return
    if model_type in UNBUILT or any(model_type in other.model_types for other in known):
        raise ValueError(
            f"config.json is of two models: architectures has {', '.join(classes)}, and model_type is "
            f"{model_type}, another model's; take the config.json that came with the weights"
        )


def _name_family(model_type: str) -> str:
    return model_type.removesuffix("_text")


def architecture_for(hf_config: HfConfig) -> Architecture:
    """Return the Architecture of a checkpoint, from its config.json.

    Raises:
        ValueError: neither ``architectures`` nor ``model_type`` is supported, or they are of different models.
    """
    classes, model_type = list_classes(hf_config), read_model_type(hf_config)
    known = [find_architecture(name) for name in ARCHITECTURES]
    for candidate in known:
        if any(name in candidate.hf_classes for name in classes):
            _check_type(candidate, classes, model_type, known)
            return candidate
    if not classes:
        for candidate in known:
            if model_type in candidate.model_types:
                return candidate
    inner = hf_config.get("text_config")
    if isinstance(inner, dict) and any(inner.get("model_type") in candidate.model_types for candidate in known):
        raise ValueError(
            f"config.json is of {classes or [model_type]}, a text model with a vision tower; its text model is supported: save "
            "it with AutoModelForCausalLM.from_pretrained(folder).save_pretrained(text_folder)"
        )
    if reason := describe_unbuilt(model_type):
        other = "; engine: fsdp trains models of text by their classes in transformers, which has this one"
        other = other if _is_in_transformers(str(model_type)) else ", and the installed transformers has no class for it either"
        raise ValueError(f"config.json is of {classes or [model_type]}, which is not supported: {reason}{other}")
    names = [name for candidate in known for name in candidate.hf_classes]
    supported = ", ".join(name for name in names if name.endswith(("CausalLM", "Generation")))
    raise ValueError(
        f"config.json is of {classes or [model_type]}, which is not supported{_suggest_family(hf_config, known)}; supported "
        f"are {supported}"
    )


def has_layers(hf_config: HfConfig) -> bool:
    """Return whether the table of architectures has the layers of a model; other layers only transformers computes."""
    try:
        architecture_for(hf_config).read_model_config(hf_config)
    except ValueError:
        return False
    return True


#: parts of the names of keys in config.json that say nothing about layers and weights
_NOT_SHAPE = re.compile(
    r"^_|^(architectures|model_type|auto_map|torch_dtype|dtype|use_cache|transformers_version|quantization_config|pretraining_tp)$"
    r"|^(output|problem|id2label|label2id|chunk_size|return|is_encoder|add_cross|tie_encoder|use_return|bos|eos|pad|sep)_?"
    r"|dropout|_pdrop$|initializer|_std$|token_id|pruned_heads|task_specific|max_window_layers"
)


def _list_unread(family: Architecture, expected: ModelConfig, hf_config: HfConfig, keys: list[str]) -> list[str]:
    """Return the keys without which a family reads the same from config.json."""
    unread = []
    for key in keys:
        # no key has a value of this form, so that a family refuses it in those that it reads
        with contextlib.suppress(ValueError):
            if family.read_model_config({**hf_config, key: ["?"]}) == expected:
                unread.append(key)
    return unread


def _suggest_family(hf_config: HfConfig, families: list[Architecture]) -> str:
    """Return the family that reads most of config.json, and what it does not read; empty if none reads it."""
    keys = [key for key in hf_config if not _NOT_SHAPE.search(key) and hf_config[key] not in (None, False, 0, [], {})]
    candidates: list[tuple[int, int, list[str], Architecture]] = []
    for family in families:
        try:
            expected = family.read_model_config(hf_config)
        except ValueError:
            continue
        # parts of which such a family has defaults
        parts = {"linear_": expected.linear_attention, "index_": expected.sparse_attention}
        if any(part is not None and not any(key.startswith(prefix) for key in hf_config) for prefix, part in parts.items()):
            continue
        unread = _list_unread(family, expected, hf_config, keys)
        if 2 * len(unread) > len(keys):
            continue  # it has defaults of its own for what it does not read
        # where two read as much, the one that adds less by itself wins
        fields = dataclasses.fields(expected)
        added = sum(field.default not in (dataclasses.MISSING, getattr(expected, field.name)) for field in fields)
        candidates.append((len(unread), added, unread, family))
    if not candidates or not keys:
        return ""
    *_, unread, family = min(candidates, key=lambda candidate: candidate[:2])
    values = (f"{key} {shown if len(shown) < 40 else '...'}" for key in unread if (shown := json.dumps(hf_config[key])))
    differs = f", which does not read {', '.join(values)}" if unread else ", which reads all of its sizes"
    return (
        f"; by its config.json the nearest family is {family.name} ({family.hf_classes[0]}){differs}; a family is one file: "
        "docs/adding_a_model.md"
    )
