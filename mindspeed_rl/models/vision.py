"""Models that see images: text and vision parts of config.json, and weights of towers, which every tensor rank has in full."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.model_config import (
    HfConfig,
    ModelConfig,
    VisionConfig,
    read_group,
    read_indices,
    read_optional_size,
    read_size,
)
from mindspeed_rl.models.names import list_adapted_modules
from mindspeed_rl.models.weights import WeightOp

if TYPE_CHECKING:
    from torch import Tensor

#: prefix of the tower's parameters in Megatron's model
TOWER = "vision_model."
#: the part of the tower that maps its features to the language model: projector, or aligner
PROJECTORS = ("merger.", "deepstack_merger_list.")


def get_tower_part(name: str) -> str:
    """Return "projector" or "tower": the part that a parameter or module of a vision tower belongs to."""
    return "projector" if name.removeprefix(TOWER).startswith(PROJECTORS) else "tower"


def is_adapted(name: str, parts: Sequence[str]) -> bool:
    """Return True for a weight of a module that has an adapter.

    Args:
        name: in Megatron.
        parts: `MegatronConfig.adapted_parts`.
    """
    if not name.startswith(TOWER):
        return any(f".{module}." in name for module in list_adapted_modules(parts))
    # its linear layers
    is_linear = name.endswith(".weight") and not re.search(r"norm|ln_q|_embed", name)
    return is_linear and get_tower_part(name) in parts


class PreparedImage(Protocol):
    """An image of a row, as the processor of the model prepares it.

    Attributes:
        key: the same for images with the same pixels, and for no others.
        grid: frames, rows and columns of patches.
    """

    @property
    def key(self) -> str: ...

    @property
    def grid(self) -> tuple[int, int, int]: ...

    def read(self) -> Tensor:
        """Return the processor's pixel values, [frames * rows * columns, patch size] float32."""
        ...


@runtime_checkable
class PreparedVideo(Protocol):
    """Frames of a video between two tokens of text: as `PreparedImage`, in the place of video tokens.

    Attributes:
        time_step: rotary positions from one index in time of its grid to the next.
    """

    @property
    def time_step(self) -> float: ...


def read_text_config(hf_config: HfConfig) -> HfConfig:
    """Return the config of the language model: `text_config`, or the config itself, with what both parts share."""
    text = {**hf_config, **read_group(hf_config, "text_config")}
    if "tie_word_embeddings" in hf_config:  # the whole model is tied or not, whatever its text part states
        text["tie_word_embeddings"] = hf_config["tie_word_embeddings"]
    for name in ("rope_scaling", "rope_parameters"):
        rope = dict(read_group(text, name))
        # older configs give sections of the axes as a type; the frequencies are the default ones
        rope |= {key: "default" for key in ("type", "rope_type") if rope.get(key) == "mrope"}
        text[name] = rope
    return text


def read_vision(
    hf_config: HfConfig, common: ModelConfig, defaults: HfConfig, sections: tuple[int, int, int], *, interleaved: bool
) -> ModelConfig:
    """Return the model with the vision part that config.json describes.

    Args:
        common: the language model.
        defaults: values of transformers' vision config for keys that config.json leaves out.
        sections: rotary frequencies of each axis where config.json does not give them.
        interleaved: as `VisionConfig.rotary_interleaved`.

    Raises:
        ValueError: a key is missing or has a value that is not supported.
    """
    tower: HfConfig = {**defaults, **read_group(hf_config, "vision_config")}
    text = read_text_config(hf_config)
    rope = {**read_group(text, "rope_scaling"), **read_group(text, "rope_parameters")}
    given = read_indices(rope, "mrope_section") or sections
    pairs = int(common.kv_channels * common.rotary_percent) // 2
    if len(given) != 3 or sum(given) != pairs:
        raise ValueError(f"config.json has mrope_section {list(given)}; expected three sizes that add up to {pairs}")
    if common.rope_scaling is not None:
        raise ValueError(f"config.json has rope type {common.rope_scaling.type!r}; models with images are read with default")
    output = read_size(tower, "out_hidden_size", common.hidden_size)
    if output != common.hidden_size:
        raise ValueError(f"config.json has out_hidden_size {output} for a language model of hidden_size {common.hidden_size}")
    frame = [read_optional_size(hf_config, f"vision_{side}_token_id") for side in ("start", "end")]
    vision = VisionConfig(
        image_token_id=read_size(hf_config, "image_token_id", minimum=0),
        video_token_id=read_size(hf_config, "video_token_id", minimum=0),
        patch_size=read_size(tower, "patch_size"),
        depth=read_size(tower, "depth"),
        hidden_size=read_size(tower, "hidden_size"),
        ffn_hidden_size=read_size(tower, "intermediate_size"),
        num_heads=read_size(tower, "num_heads"),
        rotary_sections=given[:3],
        rotary_interleaved=interleaved,
        temporal_patch_size=read_size(tower, "temporal_patch_size", 2),
        # published configs of Qwen2.5-VL have another name for it
        in_channels=read_size(tower, "in_channels", read_size(tower, "in_chans", 3)),
        merge_size=read_size(tower, "spatial_merge_size", 2),
        window_size=read_optional_size(tower, "window_size") or 0,
        full_layers=read_indices(tower, "fullatt_block_indexes"),
        num_positions=read_optional_size(tower, "num_position_embeddings") or 0,
        deepstack_layers=read_indices(tower, "deepstack_visual_indexes"),
        image_frame=None if frame[0] is None or frame[1] is None else (frame[0], frame[1]),
    )
    return replace(common, vision=vision)


def tower_ops(prefix: str, shapes: dict[str, tuple[int, ...]]) -> list[WeightOp]:
    """Return the weights of a tower, of which every rank of the first pipeline stage has all."""
    return [WeightOp(f"{TOWER}{name}", (f"{prefix}{name}",), (shape,), section="pre") for name, shape in shapes.items()]


def list_block_shapes(
    vision: VisionConfig, mlp: dict[str, tuple[int, int]], *, norm_biases: bool
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tower's blocks.

    Args:
        mlp: output and input size of each linear layer of an MLP; all have biases.
        norm_biases: the norms have biases too.
    """
    hidden = vision.hidden_size
    linear = {"attn.qkv": (3 * hidden, hidden), "attn.proj": (hidden, hidden), **{f"mlp.{name}": mlp[name] for name in mlp}}
    shapes: dict[str, tuple[int, ...]] = {}
    for block in range(vision.depth):
        for norm in ("norm1", "norm2"):
            shapes[f"blocks.{block}.{norm}.weight"] = (hidden,)
            if norm_biases:
                shapes[f"blocks.{block}.{norm}.bias"] = (hidden,)
        for name, shape in linear.items():
            shapes |= list_linear_shapes(f"blocks.{block}.{name}", *shape)
    return shapes


def list_linear_shapes(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a linear layer with a bias."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def add_vision(
    text: Architecture,
    name: str,
    hf_class: str,
    upstream_names: tuple[str, ...],
    read_model_config: Callable[[HfConfig], ModelConfig],
    list_tower_shapes: Callable[[ModelConfig], dict[str, tuple[int, ...]]],
    add_published_tower: Callable[[ModelConfig], ModelConfig],
    *,
    text_prefix: str = "model.language_model.",
    tower_prefix: str = "model.visual.",
) -> Architecture:
    """Return the family of models with a language model of another family and a vision tower.

    Args:
        name, hf_class, upstream_names, read_model_config: names of the new family and the reader of its config.json.
        list_tower_shapes: name -> shape of each weight of the tower and its projectors.
        add_published_tower: as of `Architecture`.
        text_prefix, tower_prefix: prefixes of the weights of language model and tower in an HF checkpoint.
    """
    return replace(
        text,
        name=name,
        hf_classes=(hf_class,),
        model_types=(name,),
        upstream_names=upstream_names,
        read_model_config=read_model_config,
        legacy=False,
        add_published_tower=add_published_tower,
        text_prefix=text_prefix,
        read_tower_ops=lambda model_config: tower_ops(tower_prefix, list_tower_shapes(model_config)),
    )
