"""Tiny random models that see images: Hugging Face folders of them, and images of random pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

IMAGE, VIDEO, START, END = 120, 121, 122, 123
_TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INTERLEAVED = {**_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_LEARNED = {**_TOWER, "num_position_embeddings": 36, "patch_size": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "router_aux_loss_coef": 0.0}

CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "qwen2.5": transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}},
        # windows of 2 x 2 tokens, but in the last block
        vision_config={**_TOWER, "depth": 2, "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]},
        **_IDS,
    ),
    "qwen3": transformers.Qwen3VLConfig(
        text_config={**_TEXT, "head_dim": 16, "rope_parameters": _INTERLEAVED},
        vision_config={**_LEARNED, "depth": 3, "deepstack_visual_indexes": [0, 1]},
        tie_word_embeddings=True,
        **_IDS,
    ),
    "qwen3_moe": transformers.Qwen3VLMoeConfig(
        text_config={**_TEXT, **_EXPERTS, "head_dim": 16, "num_hidden_layers": 2, "rope_parameters": _INTERLEAVED},
        vision_config={**_LEARNED, "depth": 2, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=False,
        **_IDS,
    ),
    "qwen3.5": transformers.Qwen3_5Config(
        text_config={
            **_TEXT,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "full_attention_interval": 2,
            "rope_parameters": {**_INTERLEAVED, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
        },
        vision_config={**_LEARNED, "depth": 2},
        **_IDS,
    ),
}


def build(name: str) -> transformers.PreTrainedModel:
    """The model with the same random weights each time."""
    torch.manual_seed(7)
    model = transformers.AutoModelForImageTextToText.from_config(
        CONFIGS[name], dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(3.0)  # far from uniform: wrong attention or a wrong image must show
    return model


def save(name: str, folder: Path) -> Path:
    """Writes the model as a Hugging Face folder and returns the folder."""
    build(name).save_pretrained(folder)
    return folder


def get_saved_name(name: str, parameter: str) -> str:
    """The name under which a parameter of the model is in its Hugging Face folder."""
    if name == "qwen2.5":
        return parameter.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    return parameter


class NoiseImage:
    """An image of random pixels, the same for the same seed."""

    def __init__(self, seed: int, rows: int, columns: int, patch_dim: int = 3 * 2 * 4 * 4) -> None:
        self.key, self.grid, self._patch_dim = f"{seed}/{rows}x{columns}", (1, rows, columns), patch_dim
        self._seed = seed

    def read(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed)
        return torch.randn(self.grid[1] * self.grid[2], self._patch_dim, generator=generator)


def save_for_the_example(
    example: Any, folder: Path, other: dict[str, Any] | None = None, *, experts: bool = False, **sizes: int
) -> None:
    """Writes a tiny model with the tokenizer and the processor of the example.

    Args:
        other: config.json of a model that has the processor of Qwen3-VL; None for Qwen3-VL itself.
        experts: Qwen3-VL has experts.
        sizes: of its language model.
    """
    tokenizer = example.make_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(token) for token in example.SPECIAL]
    torch.manual_seed(7)
    token_ids = dict(zip(("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"), ids[3:]))
    config_class = transformers.Qwen3VLMoeConfig if experts else transformers.Qwen3VLConfig
    config = config_class(
        text_config={
            # as published; vLLM reads it there
            **({**_EXPERTS, "moe_intermediate_size": 64, "norm_topk_prob": True} if experts else {}),
            **{"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.05},
            **{"bos_token_id": None, "eos_token_id": ids[1], "pad_token_id": ids[0], **sizes},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10000.0},
                **{"mrope_section": [6, 5, 5], "mrope_interleaved": True},
            },
        },
        vision_config={
            **{"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4},
            **{
                "out_hidden_size": sizes.get("hidden_size", 128),
                "patch_size": 14,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
                "initializer_range": 0.05,
            },
        },
        **token_ids,
        tie_word_embeddings=not experts,
    )
    if other is not None:
        parts = {name: {**other[name], "initializer_range": 0.1} for name in ("text_config", "vision_config")}
        config = transformers.AutoConfig.for_model(**other | token_ids | parts)
    transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _save_processor(example, folder)


def _save_processor(example: Any, folder: Path) -> None:
    """Writes the example's processor as one of Qwen3-VL."""
    example.save_processor(folder)
    for name, changes in (
        ("preprocessor_config.json", {"processor_class": "Qwen3VLProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


def save_hybrid_for_the_example(
    example: Any, folder: Path, *, experts: bool = False, tied: bool = True, tokenizer: Any = None
) -> None:
    """Write a tiny Qwen3.5 as it is published: with a tower and a prediction layer, and sizes that vLLM's CPU kernels take.

    All weights are far from uniform, and in bfloat16. Another tokenizer takes the place of one as Qwen3.5 has it.
    """
    tokenizer = tokenizer or _make_byte_tokenizer(example)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in example.SPECIAL]
    torch.manual_seed(7)
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "router_aux_loss_coef": 0.0}
    text = {
        **({**sizes, "num_experts": 4, "num_experts_per_tok": 2} if experts else {"intermediate_size": 192}),
        **{"vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 3, "head_dim": 32, "mtp_num_hidden_layers": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.06},
        **{"bos_token_id": None, "eos_token_id": ids[1], "pad_token_id": ids[0]},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "rope_parameters": {**_INTERLEAVED, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
        "tie_word_embeddings": tied,
    }
    config_class = transformers.Qwen3_5MoeConfig if experts else transformers.Qwen3_5Config
    config = config_class(
        text_config=text,
        vision_config={
            **{"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128},
            **{"patch_size": 14, "num_position_embeddings": 64, "initializer_range": 0.06},
        },
        **dict(zip(("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"), ids[3:])),
        tie_word_embeddings=tied,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        # transformers leaves it at 0, where a norm has a gradient of 1000 and more
        model.get_input_embeddings().weight[ids[0]].normal_(std=0.06)
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.1 if parameter.dim() == 1 else 0.0
            parameter.copy_((parameter + noise).bfloat16().float())
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    layer = "model.language_model.layers.1."  # has full attention, as the prediction layer has
    copied = {name: value for name, value in tensors.items() if name.startswith(layer)}
    tensors |= {name.replace(layer, "mtp.layers.0."): value.clone() for name, value in copied.items()}
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    tensors |= {f"mtp.{name}.weight": torch.zeros(128) for name in norms} | {"mtp.fc.weight": torch.eye(128, 256)}
    save_file(tensors, path, {"format": "pt"})
    tokenizer.save_pretrained(folder)
    _save_processor(example, folder)


def _make_byte_tokenizer(example: Any) -> transformers.PreTrainedTokenizerBase:
    """The example's tokenizer with the pre-tokenizer of Qwen3.5, which vLLM gives to all models of this type."""
    plain = example.make_tokenizer()
    vocabulary = {"Ġ" if token == " " else token: index for token, index in plain.get_vocab().items()}
    tokenizer = transformers.Qwen3_5Tokenizer(
        vocabulary, [], eos_token=plain.eos_token, pad_token=plain.pad_token, unk_token=plain.unk_token
    )
    tokenizer.add_special_tokens({"additional_special_tokens": example.SPECIAL})
    tokenizer.chat_template = plain.chat_template
    return tokenizer
