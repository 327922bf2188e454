"""GGUF files of llama.cpp to Hugging Face folders: dense models of the families llama (also Mistral), qwen2 and qwen3.

Quantized tensors are restored to 16-bit values, a tensor at a time. In files of the family llama the rows of query and key are
in the order of interleaved rotary embedding; Hugging Face has a head's halves one after the other. Needs the package `gguf`.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl.checkpoint.command import DTYPES, parse_size
from mindspeed_rl.checkpoint.gguf_file import GgufFile, GgufTensor
from mindspeed_rl.checkpoint.hf import HfFolderWriter, write_config
from mindspeed_rl.checkpoint.options import ConvertOptions
from mindspeed_rl.files import describe_missing
from mindspeed_rl.models import architecture_for

#: general.architecture -> class and model_type of Hugging Face
_FAMILIES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TYPES = {torch.float32: "F32", torch.float16: "F16"}


@dataclass(frozen=True)
class GgufModel:
    """An open GGUF file.

    Attributes:
        config: config.json of the model, without its dtype.
        dtype: dtype of the weights: as the file's matrices, bfloat16 where they are quantized.
        names: tensor of the file -> name in Hugging Face.
    """

    path: Path
    config: dict[str, Any]
    dtype: torch.dtype
    names: dict[str, str]
    tensors: tuple[GgufTensor, ...]

    def describe(self) -> str:
        """Return what the file holds, in a line."""
        kinds = sorted({tensor.kind.name for tensor in self.tensors if len(tensor.shape) > 1})
        return f"{self.path} ({self.config['model_type']}, {len(self.names)} tensors, {', '.join(kinds)})"

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor under its name in Hugging Face, in float32."""
        from gguf import dequantize

        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        for tensor in self.tensors:
            name = self.names[tensor.name]
            values = np.array(dequantize(tensor.data, tensor.kind), dtype=np.float32)
            if self.config["model_type"] == "llama" and (match := re.search(r"self_attn\.([qk])_proj", name)):
                values = _split_halves(values, heads if match[1] == "q" else kv_heads)
            yield name, torch.from_numpy(values)


def _split_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of each head with the even ones first: from interleaved pairs to two halves."""
    return np.ascontiguousarray(values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape))


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that the path is, or the only one of a folder without config.json; None where there is none.

    Raises:
        ValueError: the folder has several.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    files = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
    if len(files) > 1:
        raise ValueError(f"{path} has {len(files)} GGUF files; name one: {', '.join(file.name for file in files)}")
    return files[0] if files else None


def open_gguf(path: Path) -> GgufModel:
    """Open a GGUF file; no tensor is read.

    Raises:
        ValueError: the package is missing, the file is damaged, or its model is not supported.
    """
    if find_spec("gguf") is None:
        raise ValueError(f"{path}: reading GGUF needs the package gguf: pip install gguf")
    try:
        content = GgufFile.open(path)
        _check_kinds(content.tensors)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not a GGUF file, or damaged: {error}") from error
    try:
        return _build_model(path, content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_kinds(tensors: Iterable[GgufTensor]) -> None:
    """Raise ValueError for a format of numbers that the package cannot restore."""
    from gguf import GGML_QUANT_SIZES, dequantize

    for kind in {tensor.kind for tensor in tensors}:
        try:
            dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], dtype=np.uint8), kind)
        except NotImplementedError:
            raise ValueError(f"tensors of the format {kind.name} are not supported") from None


def _build_model(path: Path, content: GgufFile) -> GgufModel:
    values, tensors = content.values, content.tensors
    family = values.get("general.architecture")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise ValueError(f"its model is of the family {family!r}; supported are {', '.join(_FAMILIES)}")
    names, unknown = {}, []
    for tensor in tensors:
        outer, _, kind = tensor.name.rpartition(".")
        match = _BLOCK.fullmatch(tensor.name)
        if match is not None and match[2] in _BLOCK_NAMES:
            names[tensor.name] = f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.{match[3]}"
        elif outer in _OUTER_NAMES:
            names[tensor.name] = f"{_OUTER_NAMES[outer]}.{kind}"
        else:
            unknown.append(tensor.name)
    if unknown:
        raise ValueError(
            f"{len(unknown)} tensors, such as {unknown[0][:100]!r}, are of no dense {family} model; experts and scaled rotary "
            "embedding (rope_freqs, Llama 3.1) are not supported"
        )
    if scaling := values.get(f"{family}.rope.scaling.type"):
        if scaling != "none":
            raise ValueError(f"rotary embedding scaled by {scaling!r} is not supported")
    config = _build_config(family, values, {tensor.name: tensor.shape for tensor in tensors})
    if (num_layers := len({name.split(".")[2] for name in names.values() if name.startswith("model.layers.")})) != (
        layers := config["num_hidden_layers"]
    ):
        raise ValueError(f"it has tensors of {num_layers} layers, and states {layers}; is it one of several parts?")
    _check_shapes(config, {names[tensor.name]: tensor.shape for tensor in tensors})
    kinds = {tensor.kind.name for tensor in tensors if len(tensor.shape) > 1}
    dtype = next((dtype for dtype, kind in _TYPES.items() if kinds == {kind}), torch.bfloat16)
    return GgufModel(path, config, dtype, names, tensors)


def _build_config(family: str, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return config.json by the metadata of the file."""

    def read(name: str, default: float | None = None) -> float:
        value = values.get(f"{family}.{name}", default)
        if value is None:
            raise ValueError(f"it lacks {family}.{name}")
        if type(value) not in (int, float) or not 0 < value < math.inf:
            kind = f"a list of {len(value)}" if isinstance(value, list) else repr(value)[:60]
            raise ValueError(f"{family}.{name} is {kind}; expected a number above 0")
        return value

    heads, hidden = int(read("attention.head_count")), int(read("embedding_length"))
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise ValueError(f"its embedding, token_embd.weight, has the shape {list(embedding)}; expected tokens x {hidden}")
    architecture, model_type = _FAMILIES[family]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": int(read("feed_forward_length")),
        "num_hidden_layers": int(read("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(read("attention.head_count_kv", heads)),
        "head_dim": int(read("attention.key_length", hidden // heads)),
        "vocab_size": embedding[0],
        "max_position_embeddings": int(read("context_length")),
        "rope_theta": float(read("rope.freq_base", 10000.0)),
        "rms_norm_eps": round(float(read("attention.layer_norm_rms_epsilon")), 12),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": family != "qwen2" and "blk.0.attn_q.bias" in shapes,
    }
    for name, key in (("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id"), ("padding_token_id", "pad_token_id")):
        if (token := values.get(f"tokenizer.ggml.{name}")) is not None:
            if type(token) is not int or not 0 <= token < embedding[0]:
                raise ValueError(f"tokenizer.ggml.{name} is {token!r}; expected a token below {embedding[0]}")
            config[key] = token
    return config


def _check_shapes(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError where the tensors of the file are not those of the model that its metadata describes."""
    architecture = architecture_for(config)
    ops = architecture.weight_ops(architecture.read_model_config(config))
    expected = {name: shape for op in ops for name, shape in zip(op.hf, op.shapes)}
    lacking, surplus = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    if lacking or surplus:
        what = f"it lacks {lacking[0]}" if lacking else f"it has {surplus[0]}, which such a model has not"
        raise ValueError(f"{what} ({len(lacking)} tensors are missing, {len(surplus)} are not known)")
    for name, shape in expected.items():
        if shapes[name] != tuple(shape):
            raise ValueError(f"{name} has the shape {list(shapes[name])}; by the metadata it is {list(shape)}")


def convert_file(options: ConvertOptions, *, dry_run: bool) -> str:
    """Write the GGUF file at `load_dir` as a Hugging Face folder; return what was done, in a line.

    Raises:
        ValueError: the file does not exist, it is not supported, or the destination exists.
    """
    path = find_gguf(options.load_dir.expanduser())
    if path is None:
        is_there = options.load_dir.expanduser().exists()
        problem = f"{options.load_dir} is not a GGUF file, nor a folder that has one"
        raise ValueError(f"--load-dir: {problem if is_there else describe_missing(options.load_dir)}")
    model, folder, start = open_gguf(path), options.save_dir.expanduser(), time.perf_counter()
    if dry_run:
        return f"would write {model.describe()} to {folder}"
    if folder.exists() and not options.overwrite and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; choose another --save-dir, or pass --overwrite to replace it")
    dtype = model.dtype if options.params_dtype is None else DTYPES[options.params_dtype]
    _export_hf(model, folder, dtype, 5 * 10**9 if options.max_shard_size is None else parse_size(options.max_shard_size))
    return f"wrote {model.describe()} to {folder} in {time.perf_counter() - start:.1f} s"


def _export_hf(model: GgufModel, folder: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    """Write the model as a Hugging Face folder with its tokenizer, in place of what is there; one file's tensors are in memory.

    Args:
        dtype: dtype of the weights.
        shard_bytes: size at which a new weight file starts.

    Raises:
        ValueError: the file has no tokenizer that transformers reads.
    """
    from transformers import AutoTokenizer

    ends = {name: model.config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in model.config}
    with tempfile.TemporaryDirectory() as companions:
        write_config(Path(companions), {**model.config, "dtype": str(dtype).removeprefix("torch.")})
        Path(companions, "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n", encoding="utf-8")
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(model.path.parent, gguf_file=model.path.name)
        except (ValueError, KeyError, TypeError, OSError, ImportError) as error:
            raise ValueError(f"{model.path} has no tokenizer that transformers reads: {error}") from error
        tokenizer.save_pretrained(companions)
        if folder.exists():
            shutil.rmtree(folder)
        with HfFolderWriter(folder, companions, max_shard_bytes=shard_bytes) as writer:
            for name, values in model.named_tensors():
                writer.add(name, values.to(dtype))
