"""A tiny model whose classes are in its folder: transformers has none, and runs these only with trust."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_CODE = '''
import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


class OwnConfig(PretrainedConfig):
    model_type = "own_decoder"

    def __init__(self, vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **others):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        super().__init__(**others)


class OwnLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.norm = nn.LayerNorm(width)
        self.mixed = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden):
        rows, length, width = hidden.shape
        parts = self.mixed(self.norm(hidden)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        distance = torch.arange(length, device=hidden.device)
        distance = (distance[:, None] - distance).to(hidden.dtype)
        slopes = 2.0 ** -torch.arange(1, self.heads + 1, device=hidden.device, dtype=hidden.dtype)
        bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, float("-inf"))
        mixed = functional.scaled_dot_product_attention(*parts, attn_mask=bias[None])
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return hidden + self.down(torch.sin(self.up(hidden)))


class OwnPreTrainedModel(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "model"
    _no_split_modules = ["OwnLayer"]

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0.0, 0.08)
            if getattr(module, "bias", None) is not None:
                module.bias.data.zero_()


class OwnModel(OwnPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OwnLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(self, input_ids, use_cache=None, past_key_values=None, **others):
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class OwnForCausalLM(OwnPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, **others):
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, **others).last_hidden_state))
'''
_MAP = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}


def write_code(folder: Path, code: str = _CODE, **changes: Any) -> Path:
    """Writes config.json and the code, without weights; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own_code.py").write_text(code)
    config = {"model_type": "own_decoder", "architectures": ["OwnForCausalLM"], "auto_map": _MAP}
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config | sizes | tokens | changes))
    return folder


def build(folder: Path) -> PreTrainedModel:
    """The model of a folder with the same random weights each time."""
    torch.manual_seed(7)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    return AutoModelForCausalLM.from_config(config, trust_remote_code=True, dtype=torch.float32)


def save(folder: Path) -> Path:
    """Writes the model with weights and returns the folder."""
    model = build(write_code(folder))
    model.save_pretrained(folder)
    return write_code(folder)
