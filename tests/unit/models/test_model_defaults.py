"""A key that config.json leaves out has the value of the transformers class, which is asked here key by key."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from mindspeed_rl.models import ARCHITECTURES, architecture_for, find_architecture

_KINDS = {kind: name for name in ARCHITECTURES for kind in find_architecture(name).model_types if kind in CONFIG_MAPPING}
#: `adaptors.model_classes` may have added to transformers' classes
FAMILIES = {kind: name for kind, name in _KINDS.items() if CONFIG_MAPPING[kind].__module__.startswith("transformers.")}
#: keys that say what a model is for, and those that every layer repeats
NOT_SHAPE = ("architectures", "model_type", "layer_types")
#: values other than the defaults, so that a key that is left out is not there by chance
OTHER: dict[str, Any] = {"sliding_window": 77, "rms_norm_eps": 0.25, "rope_theta": 123.0, "max_position_embeddings": 999,
                         "routed_scaling_factor": 7.5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0,
                         "query_pre_attn_scalar": 16, "first_k_dense_replace": 2, "router_aux_loss_coef": 0.7}  # fmt: skip


def released(kind: str) -> dict[str, Any]:
    """Return a complete config.json of a family, with rotary settings at its top level as in released models."""
    config = AutoConfig.for_model(kind).to_dict()
    config["architectures"] = [find_architecture(FAMILIES[kind]).hf_classes[0]]
    rope = config.pop("rope_parameters", None) or {}
    config |= {key: value for key, value in rope.items() if key in ("rope_theta", "partial_rotary_factor")}
    config.pop("layer_types", None)
    if kind == "deepseek_v2":  # of which its class has no default
        config["num_experts_per_tok"] = 6
    return config | {key: value for key, value in OTHER.items() if key in config}


def shape(config: dict[str, Any]) -> Any:
    """Return the shape that is read, or the first words of the message that refuses it."""
    try:
        return architecture_for(config).read_model_config(config)
    except ValueError as error:
        return f"refused: {error}"


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json as transformers completes it."""
    known = {key: value for key, value in config.items() if key not in ("architectures", "transformers_version")}
    return AutoConfig.for_model(**known).to_dict() | {"architectures": config["architectures"]}


#: switches behind which other keys are read
VARIANTS = [(kind, {}) for kind in FAMILIES] + [(kind, {"use_sliding_window": True}) for kind in FAMILIES if "qwen" in kind]


@pytest.mark.parametrize(("kind", "switches"), VARIANTS, ids=str)
def test_a_missing_key_has_the_value_of_the_transformers_class(kind: str, switches: dict[str, bool]) -> None:
    full = json.loads(json.dumps(released(kind))) | switches
    wrong = {}
    for key in full:
        if key in NOT_SHAPE:
            continue
        partial = {name: value for name, value in full.items() if name != key}
        ours, theirs = shape(partial), shape(completed(partial))
        # a size that is missing may be refused: "has no ...", "has none of ..."
        if ours != theirs and not str(ours).startswith("refused: config.json has no"):
            fields = vars(ours) if not isinstance(ours, str) and not isinstance(theirs, str) else {}
            wrong[key] = {name: (value, vars(theirs)[name]) for name, value in fields.items() if value != vars(theirs)[name]}
    assert wrong == {}


def test_null_is_no_missing_key() -> None:
    gemma = released("gemma2") | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    read = shape(gemma)
    assert read.attn_logit_softcapping is None and read.final_logit_softcapping is None
    assert shape(released("mistral") | {"sliding_window": None}).sliding_window is None
    assert shape(released("deepseek_v2") | {"q_lora_rank": None}).q_lora_rank is None
