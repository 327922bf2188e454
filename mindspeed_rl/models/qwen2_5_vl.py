"""Qwen2.5-VL: Qwen2 with three rotary axes, and a tower most of whose blocks attend within windows of the image."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.models.model_config import HfConfig, ModelConfig
from mindspeed_rl.models.qwen2 import QWEN2, read_qwen
from mindspeed_rl.models.vision import add_vision, list_block_shapes, list_linear_shapes, read_text_config, read_vision

#: values of transformers' vision config for keys that config.json leaves out
_TOWER: HfConfig = {
    "depth": 32,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "window_size": 112,
}


_SECTIONS = (16, 24, 24)


def _read_model_config(hf_config: HfConfig) -> ModelConfig:
    """Return the shape of a Qwen2.5-VL."""
    ids: HfConfig = {"image_token_id": 151655, "video_token_id": 151656, **hf_config}
    common = read_qwen(read_text_config(hf_config), "qwen2_5_vl")
    return read_vision(ids, common, _TOWER, _SECTIONS, interleaved=False)


def _add_published_tower(text: ModelConfig) -> ModelConfig:
    """Return the model with the tower of all published sizes, which are not transformers' defaults."""
    sizes: HfConfig = {"hidden_size": 1280, "out_hidden_size": text.hidden_size}
    config: HfConfig = {
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_config": sizes,
    }
    return read_vision(config, replace(text, architecture="qwen2_5_vl"), _TOWER, _SECTIONS, interleaved=False)


def _list_tower_shapes(model_config: ModelConfig) -> dict[str, tuple[int, ...]]:
    vision = model_config.vision
    assert vision is not None
    hidden, ffn, merged = vision.hidden_size, vision.ffn_hidden_size, vision.hidden_size * vision.merge_size**2
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    mlp = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    return {
        "patch_embed.proj.weight": (hidden, *patch),
        **list_block_shapes(vision, mlp, norm_biases=False),
        "merger.ln_q.weight": (hidden,),
        **list_linear_shapes("merger.mlp.0", merged, merged),
        **list_linear_shapes("merger.mlp.2", model_config.hidden_size, merged),
    }


QWEN2_5_VL = add_vision(
    QWEN2,
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    ("qwen25vl", "qwen2.5-vl"),
    _read_model_config,
    _list_tower_shapes,
    _add_published_tower,
    # as published, and as transformers saves it
    text_prefix="model.",
    tower_prefix="visual.",
)
