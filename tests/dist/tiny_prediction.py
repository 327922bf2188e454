"""Tiny models with multi-token-prediction layers, and their plain computation: transformers' own decoder layers, row by row."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tiny_families
import tiny_hf
import tiny_vision
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_INDEXERS = ["full", "shared", "full"]
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
#: of layers with gated delta nets; a config does not write it
_EVERY_SECOND = {"full_attention_interval": 2}
#: family -> (config of as many layers as it has in all, decoder layers, form of the names)
_MODELS: dict[str, tuple[Callable[[], Any], int, str]] = {
    "deepseek_v3": (lambda: tiny_hf.CONFIGS["deepseek"].to_dict() | {"num_hidden_layers": 4}, 2, "numbered"),
    "deepseek_v32": (lambda: tiny_families._CONFIGS["deepseek_v32"]().to_dict() | {"num_hidden_layers": 3}, 2, "numbered"),
    "glm5": (
        lambda: tiny_families._CONFIGS["glm5"]().to_dict() | {"num_hidden_layers": 3, "indexer_types": _INDEXERS},
        2,
        "numbered",
    ),
    "glm4_moe": (lambda: tiny_families._CONFIGS["glm4_moe"]().to_dict() | {"num_hidden_layers": 3}, 2, "numbered"),
    # every second layer has full attention, as prediction layers have
    "qwen3_5": (lambda: tiny_hf.CONFIGS["hybrid"].to_dict() | _EVERY_SECOND | {"tie_word_embeddings": False}, 3, "separate"),
    "qwen3_5_tied": (
        lambda: tiny_hf.CONFIGS["hybrid"].to_dict() | _EVERY_SECOND | {"tie_word_embeddings": True},
        3,
        "separate",
    ),
    "qwen3_next": (
        lambda: tiny_hf.CONFIGS["hybrid_moe"].to_dict() | _EVERY_SECOND | {"num_hidden_layers": 4},
        3,
        "separate",
    ),
    "qwen3_5_moe": (
        lambda: (
            tiny_hf.CONFIGS["hybrid_moe"].to_dict()
            | _EVERY_SECOND
            | {"num_hidden_layers": 4, "model_type": "qwen3_5_moe_text"}
        ),
        3,
        "separate",
    ),
    "mimo": (lambda: tiny_hf.CONFIGS["untied"].to_dict() | {"num_hidden_layers": 3}, 2, "mimo"),
}
FAMILIES = tuple(name for name in _MODELS if not name.endswith("_tied"))
#: names of the projection, the norms of embedding and hidden state, and the last norm
_NAMES = {
    "numbered": ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    "separate": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    "mimo": ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
}
_PREFIXES = {"numbered": "model.layers.{layer}.", "separate": "mtp.layers.{index}.", "mimo": "model.mtp_layers.{index}."}


class _Parts(nn.Module):
    """The norms and the projection of a prediction layer around its decoder layer."""

    def __init__(self, norm: nn.Module, hidden: int, eps: float) -> None:
        super().__init__()
        self.projection = nn.Linear(2 * hidden, hidden, bias=False)
        norms: Any = type(norm)
        self.embedding_norm, self.hidden_norm, self.final_norm = (norms(hidden, eps=eps) for _ in range(3))
        for parameter in self.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.1)


@dataclasses.dataclass
class Predicting:
    """A model of transformers with more layers than it is said to have: those are inside prediction layers."""

    family: str
    model: Any
    parts: nn.ModuleList
    num_layers: int

    @classmethod
    def build(cls, family: str) -> Predicting:
        torch.manual_seed(11)
        keys, num_layers, _ = _MODELS[family]
        values = keys()
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        for kinds in ("layer_types", "mlp_layer_types"):  # of another number of layers
            values.pop(kinds, None)
        config = transformers.CONFIG_MAPPING[values.pop("model_type")](**values)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **plain)
        tiny_hf.spread(model, 2.0)
        hidden, eps, inner = config.hidden_size, config.rms_norm_eps, model.model
        parts = nn.ModuleList(_Parts(inner.norm, hidden, eps) for _ in range(config.num_hidden_layers - num_layers))
        return cls(family, model, parts, num_layers)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by the names of the checkpoint, but for experts."""
        form = _MODELS[self.family][2]
        results = {self._rename(name): value for name, value in self.model.named_parameters() if ".experts." not in name}
        for index, part in enumerate(self.parts):
            for value, own in zip(part.parameters(), _NAMES[form], strict=True):
                results[f"{self._prefix(index)}{own}.weight" if form != "separate" else f"mtp.{own}.weight"] = value
        return results

    def _prefix(self, index: int) -> str:
        return _PREFIXES[_MODELS[self.family][2]].format(index=index, layer=self.num_layers + index)

    def _rename(self, name: str) -> str:
        for index in range(len(self.parts)):
            name = name.replace(f"model.layers.{self.num_layers + index}.", self._prefix(index))
        return name

    def save(self, folder: Path) -> Path:
        """Writes the folder as the family is published."""
        form = _MODELS[self.family][2]
        self.model.save_pretrained(folder)
        tensors = {self._rename(name): value for name, value in load_file(folder / "model.safetensors").items()}
        tensors |= {name: value.data.clone() for name, value in self.named_parameters().items() if name not in tensors}
        if form == "mimo":  # [hidden state; embedding]
            for name in [name for name in tensors if name.endswith("input_proj.weight")]:
                tensors[name] = tensors[name].roll(tensors[name].size(1) // 2, 1)
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": self.num_layers}
        config["mtp_num_hidden_layers" if form == "separate" else "num_nextn_predict_layers"] = len(self.parts)
        if form == "separate":
            config["layer_types"] = config["layer_types"][: self.num_layers]
        if "mlp_layer_types" in config:
            config["mlp_layer_types"] = config["mlp_layer_types"][: self.num_layers]
            config["layer_types"] = config["layer_types"][: self.num_layers]
        if "indexer_types" in config:
            config["indexer_types"] = config["indexer_types"][: self.num_layers]
        if form == "mimo":
            config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def logits(self, ids: Tensor, *, detaches: bool = False) -> tuple[Tensor, list[Tensor]]:
        """Logits [length, vocabulary] of the model and of every prediction layer, for one row [length].

        Args:
            detaches: the prediction layers' losses have no gradient of embedding, decoder and head.
        """

        def stop(value: Tensor) -> Tensor:
            return value.detach() if detaches else value

        inner, total = self.model.model, self.model.config.num_hidden_layers
        self.model.config.num_hidden_layers = self.num_layers
        layers, inner.layers = inner.layers, inner.layers[: self.num_layers]
        try:
            hidden = inner(ids[None], use_cache=False).last_hidden_state
        finally:
            inner.layers, self.model.config.num_hidden_layers = layers, total
        length, predicted = len(ids), []
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        first, hidden = self.model.lm_head(hidden)[0], stop(hidden)
        for index, part in enumerate(self.parts):
            later = torch.cat([ids[index + 1 :], ids.new_zeros(min(index + 1, length))])[:length]
            both = [part.embedding_norm(stop(inner.embed_tokens(later[None]))), part.hidden_norm(hidden)]
            hidden = inner.layers[self.num_layers + index](
                part.projection(torch.cat(both, -1)),
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=inner.rotary_emb(hidden, positions),
            )
            hidden = part.final_norm(hidden[0] if isinstance(hidden, tuple) else hidden)
            predicted.append(nn.functional.linear(hidden, stop(self.model.lm_head.weight))[0])
        return first, predicted


class PredictingImages(Predicting):
    """A Qwen3.5 with its tower; a prediction layer embeds features of images in place of their tokens, as the decoder does."""

    @classmethod
    def build(cls, family: str = "qwen3_5_vl") -> PredictingImages:
        torch.manual_seed(11)
        config = tiny_vision.CONFIGS["qwen3.5"]
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
        tiny_hf.spread(model, 2.0)
        text = model.model.language_model
        parts = nn.ModuleList([_Parts(text.norm, config.text_config.hidden_size, config.text_config.rms_norm_eps)])
        return cls("qwen3_5", model, parts, config.text_config.num_hidden_layers - 1)

    def _rename(self, name: str) -> str:
        return name.replace(f"model.language_model.layers.{self.num_layers}.", self._prefix(0))

    def save(self, folder: Path) -> Path:
        """Writes the folder as the family is published."""
        self.model.save_pretrained(folder)
        path = folder / "model.safetensors"
        tensors = {self._rename(name): value for name, value in load_file(path).items()}
        tensors |= {name: value.data.clone() for name, value in self.named_parameters().items() if name not in tensors}
        save_file({name: value.contiguous() for name, value in tensors.items()}, path, {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        text = config["text_config"] | {"num_hidden_layers": self.num_layers, "mtp_num_hidden_layers": 1}
        text["layer_types"] = text["layer_types"][: self.num_layers]
        (folder / "config.json").write_text(json.dumps(config | {"text_config": text}))
        return folder

    def image_logits(
        self, ids: Tensor, prompt: int, images: Sequence[tiny_vision.NoiseImage], *, detaches: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logits [length, vocabulary] of the model and of the prediction layer, for one row [length].

        Args:
            prompt: its tokens; one of an image after them is text that a model sampled.
            detaches: as of `Predicting.logits`.
        """

        def stop(value: Tensor) -> Tensor:
            return value.detach() if detaches else value

        whole, text = self.model.model, self.model.model.language_model
        is_image = (ids == tiny_vision.IMAGE) & (torch.arange(len(ids)) < prompt)
        embedded, grids = text.embed_tokens(ids), torch.tensor([image.grid for image in images]) if images else None
        if images:
            features = whole.visual(torch.cat([image.read() for image in images]), grid_thw=grids).pooler_output
            embedded = embedded.masked_scatter(is_image[:, None].expand_as(embedded), features)
        positions, _ = whole.get_rope_index(ids[None], is_image[None].int(), image_grid_thw=grids)
        layers, text.layers = text.layers, text.layers[: self.num_layers]
        text.config.num_hidden_layers = self.num_layers
        try:
            hidden = text(inputs_embeds=embedded[None], position_ids=positions, use_cache=False).last_hidden_state
        finally:
            text.layers, text.config.num_hidden_layers = layers, self.num_layers + 1
        first, hidden, (part,) = self.model.lm_head(hidden)[0], stop(hidden), self.parts
        later = torch.cat([embedded[1:], text.embed_tokens(ids.new_zeros(1))])
        length = len(ids)
        predicted = text.layers[self.num_layers](
            part.projection(torch.cat([part.embedding_norm(stop(later[None])), part.hidden_norm(hidden)], -1)),
            attention_mask=torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None],
            position_embeddings=text.rotary_emb(hidden, positions),
        )
        predicted = part.final_norm(predicted[0] if isinstance(predicted, tuple) else predicted)
        return first, nn.functional.linear(predicted, stop(self.model.lm_head.weight))[0]
