"""Tiny models with random weights and one token per printable ASCII character, for first runs; the same bytes every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TinyKind = Literal["dense", "experts", "vision"]

#: tokens that the models read
MAX_LENGTH = 512
_SPECIAL = ("<pad>", "<eos>", "<unk>")
_IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
#: texts without marks, and tool calls as Hermes and Qwen write them
_CHAT_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>"
    "{% else %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% else %}\n{% endif %}{% endfor %}"
)
_SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    "tie_word_embeddings": True,
    "bos_token_id": None,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "head_dim": 32,
    "norm_topk_prob": True,
}
#: a patch of 14 pixels; four are a token
_PATCH, _MERGE, _TOWER_DIM = 14, 2, 64
#: pixels of a side of a picture: 3 x 3 tokens
PICTURE_SIDE = 84


def save_tiny_model(folder: Path, kind: TinyKind = "dense", *, seed: int = 7, spread: float = 0.05) -> None:
    """Save a random model of about a million parameters as a Hugging Face folder.

    Args:
        folder: folder to make.
        kind: Qwen2.5, Qwen3 with four experts, or Qwen2.5-VL.
        seed: seed of the weights.
        spread: standard deviation of the weights; larger, some tokens are far more probable than others.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen2_5_VLForConditionalGeneration, Qwen2Config, Qwen3MoeConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _make_tokenizer((*_SPECIAL, *_IMAGE_TOKENS) if kind == "vision" else _SPECIAL)
    shape = _SHAPE | {"initializer_range": spread}
    shape |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(seed)
    if kind == "vision":
        model = Qwen2_5_VLForConditionalGeneration(_make_vision_config(shape, tokenizer)).float()
    else:
        config = Qwen2Config(**shape) if kind == "dense" else Qwen3MoeConfig(**shape, **_EXPERTS)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if kind == "vision":
        _save_processor(folder)


def _make_tokenizer(special: tuple[str, ...]) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*special, *map(chr, range(32, 127)), "\n"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    if special != _SPECIAL:
        tokenizer.add_special_tokens(list(special))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def _make_vision_config(shape: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> Any:
    from transformers import Qwen2_5_VLConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    tower = {
        "depth": 2,
        "hidden_size": _TOWER_DIM,
        "intermediate_size": 2 * _TOWER_DIM,
        "num_heads": 4,
        "out_hidden_size": shape["hidden_size"],
        "patch_size": _PATCH,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": 2,
        "window_size": 2 * _MERGE * _PATCH,
        "fullatt_block_indexes": [1],
        "initializer_range": shape["initializer_range"],
    }
    vocabulary = tokenizer.get_vocab()
    start, end, image, video = (vocabulary[token] for token in _IMAGE_TOKENS)
    return Qwen2_5_VLConfig(
        text_config={**shape, "rope_parameters": rope},
        vision_config=tower,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )


def _save_processor(folder: Path) -> None:
    """Save what the processors of transformers and vLLM read next to the tokenizer."""
    path = folder / "tokenizer_config.json"
    extra = {"tokenizer_class": "PreTrainedTokenizerFast", "image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    path.write_text(json.dumps(json.loads(path.read_text()) | extra))
    sizes = {
        "patch_size": _PATCH,
        "merge_size": _MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": (_MERGE * _PATCH) ** 2, "longest_edge": PICTURE_SIDE**2},
    }
    half = [0.5] * 3  # pixels between -1 and 1
    image = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", **sizes}
    colours = {"image_mean": half, "image_std": half}
    (folder / "preprocessor_config.json").write_text(json.dumps(image | colours))
    video = {"video_processor_type": "Qwen2VLVideoProcessor", **sizes}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video | colours))
