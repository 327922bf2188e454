"""Qwen3-VL, dense and with experts, and Qwen3.5 with images: interleaved rotary axes, a tower with learned positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from mindspeed_rl.models.architecture import Architecture, ExpertNames
from mindspeed_rl.models.model_config import HfConfig, ModelConfig
from mindspeed_rl.models.qwen3 import QWEN3
from mindspeed_rl.models.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from mindspeed_rl.models.qwen3_moe import QWEN3_MOE
from mindspeed_rl.models.vision import add_vision, list_block_shapes, list_linear_shapes, read_text_config, read_vision

#: values of transformers' vision config for keys that config.json leaves out
_TOWER: HfConfig = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 3584,
    "patch_size": 16,
}
#: hidden size of Qwen3.5's dense language models -> the tower that is published with it, where it is another
_SMALL_TOWERS: dict[int, HfConfig] = {2560: {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}}
_DEEPSTACK: HfConfig = {**_TOWER, "deepstack_visual_indexes": [8, 16, 24]}
_IDS: HfConfig = {"image_token_id": 151655, "video_token_id": 151656}
_HYBRID_IDS: HfConfig = {"image_token_id": 248056, "video_token_id": 248057}


def _list_tower_shapes(model_config: ModelConfig) -> dict[str, tuple[int, ...]]:
    vision = model_config.vision
    assert vision is not None
    hidden, ffn, merged = vision.hidden_size, vision.ffn_hidden_size, vision.hidden_size * vision.merge_size**2
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (hidden, *patch),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (vision.num_positions, hidden),
        **list_block_shapes(vision, {"linear_fc1": (ffn, hidden), "linear_fc2": (hidden, ffn)}, norm_biases=True),
    }
    # a projector of deepstack features has its norm after the patches of a token are joined
    mergers = {"merger": hidden} | {f"deepstack_merger_list.{index}": merged for index in range(len(vision.deepstack_layers))}
    for name, norm in mergers.items():
        shapes |= {f"{name}.norm.weight": (norm,), f"{name}.norm.bias": (norm,)}
        shapes |= list_linear_shapes(f"{name}.linear_fc1", merged, merged)
        shapes |= list_linear_shapes(f"{name}.linear_fc2", model_config.hidden_size, merged)
    return shapes


def _build_family(
    text: Architecture,
    name: str,
    hf_class: str,
    upstream_names: tuple[str, ...],
    tower: HfConfig = _DEEPSTACK,
    ids: HfConfig = _IDS,
    sections: tuple[int, int, int] = (24, 20, 20),
    towers: Mapping[int, HfConfig] = MappingProxyType({}),
) -> Architecture:
    def read_model_config(hf_config: HfConfig) -> ModelConfig:
        # weights of the chosen experts always sum to 1 in models that see images
        common = text.read_model_config({**read_text_config(hf_config), "norm_topk_prob": True})
        return replace(read_vision({**ids, **hf_config}, common, tower, sections, interleaved=True), architecture=name)

    def add_published_tower(common: ModelConfig) -> ModelConfig:
        own = towers.get(common.hidden_size, {})
        config: HfConfig = {**ids, "vision_config": {**own, "out_hidden_size": common.hidden_size}}
        return replace(read_vision(config, common, tower, sections, interleaved=True), architecture=name)

    return add_vision(text, name, hf_class, upstream_names, read_model_config, _list_tower_shapes, add_published_tower)


QWEN3_VL = _build_family(QWEN3, "qwen3_vl", "Qwen3VLForConditionalGeneration", ("qwen3vl", "qwen3-vl"))
QWEN3_VL_MOE = replace(
    _build_family(QWEN3_MOE, "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", ("qwen3vl-moe",)),
    expert_names=ExpertNames(may_be_transposed=True),
)
QWEN3_5_VL = replace(
    _build_family(
        QWEN3_5,
        "qwen3_5_vl",
        "Qwen3_5ForConditionalGeneration",
        ("qwen3.5-vl",),
        _TOWER,
        _HYBRID_IDS,
        (11, 11, 10),
        _SMALL_TOWERS,
    ),
    model_types=("qwen3_5",),
)
QWEN3_5_MOE_VL = replace(
    _build_family(
        QWEN3_5_MOE,
        "qwen3_5_moe_vl",
        "Qwen3_5MoeForConditionalGeneration",
        ("qwen3.5-moe-vl",),
        _TOWER,
        _HYBRID_IDS,
        (11, 11, 10),
    ),
    model_types=("qwen3_5_moe",),
)
