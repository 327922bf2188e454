"""GGUF files of llama.cpp to Hugging Face folders: Llama (also Mistral), Qwen2 and 3, dense or with experts, Gemma 2 and 3.

Quantized tensors are restored to 16-bit values, a tensor at a time. llama.cpp keeps some tensors in another form: the rows of
query and key of Llama are in the order of interleaved rotary embedding, where Hugging Face has a head's halves one after the
other; norms of Gemma have 1 added, and the experts of a layer are one tensor. Needs the package `gguf`.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class _Family:
    """A family of llama.cpp.

    Attributes:
        class_name, model_type: names that Hugging Face has for it.
        names: names of tensors of a layer that differ from `_BLOCK_NAMES`, or that it adds.
        keys: keys of config.json -> key of the file after the family's name, and the value without it (None: it is needed).
        fixed: keys of config.json with a value of their own.
        interleaved: query and key have the rows of a head in pairs.
        shifted_norms: 1 is added to the weights of norms.
        scalings: types of scaled rotary embedding.
    """

    class_name: str
    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False
    shifted_norms: bool = False
    scalings: tuple[str, ...] = ()


_EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_SHARED_NAMES = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_EXPERT_KEYS: dict[str, tuple[str, float | None]] = {
    "num_experts": ("expert_count", None),
    "num_experts_per_tok": ("expert_used_count", None),
    "moe_intermediate_size": ("expert_feed_forward_length", None),
}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: end of the name of a matrix of one row, which is a vector in a file
_GATE = "shared_expert_gate.weight"
_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
#: general.architecture -> family
_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "llama", interleaved=True),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": _Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        names=_EXPERT_NAMES | _SHARED_NAMES,
        keys=_EXPERT_KEYS | {"shared_expert_intermediate_size": ("expert_shared_feed_forward_length", None)},
        fixed={"norm_topk_prob": False, "decoder_sparse_step": 1},
    ),
    "qwen3moe": _Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        names=_EXPERT_NAMES,
        keys=_EXPERT_KEYS,
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
    "gemma2": _Family(
        "Gemma2ForCausalLM",
        "gemma2",
        names=_FOUR_NORMS,
        keys={
            "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", 30.0),
            "sliding_window": ("attention.sliding_window", 4096),
        },
        fixed=_GELU,
        shifted_norms=True,
    ),
    "gemma3": _Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        names=_FOUR_NORMS,
        keys={"sliding_window": ("attention.sliding_window", None)},
        fixed=_GELU | {"rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
        shifted_norms=True,
        scalings=("linear",),
    ),
}
#: (family, layers) of the models whose queries are divided by the root of hidden size / heads, as llama.cpp knows them
_WIDE_QUERIES = (("gemma2", 46), ("gemma3", 62))
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
        names: tensor of the file -> name in Hugging Face, with * for the index of an expert in one of all experts.
    """

    path: Path
    family: _Family
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
            if self.family.interleaved and (match := re.search(r"self_attn\.([qk])_proj", name)):
                values = _split_halves(values, heads if match[1] == "q" else kv_heads)
            if self.family.shifted_norms and name.endswith("norm.weight"):
                values -= 1.0
            if name.endswith(_GATE) and values.ndim == 1:
                values = values[None]
            if "*" not in name:
                yield name, torch.from_numpy(values)
                continue
            for expert, part in enumerate(values):
                yield name.replace("*", str(expert)), torch.from_numpy(np.ascontiguousarray(part))


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


def _name_tensors(family: str, form: _Family, tensors: Sequence[GgufTensor]) -> dict[str, str]:
    """Return the HF name of each tensor by its name in the file.

    Raises:
        ValueError: the family has no such tensors.
    """
    names, unknown = {}, []
    block_names = {**_BLOCK_NAMES, **form.names}
    for tensor in tensors:
        outer, _, kind = tensor.name.rpartition(".")
        match = _BLOCK.fullmatch(tensor.name)
        if match is not None and match[2] in block_names:
            names[tensor.name] = f"model.layers.{match[1]}.{block_names[match[2]]}.{match[3]}"
        elif outer in _OUTER_NAMES:
            names[tensor.name] = f"{_OUTER_NAMES[outer]}.{kind}"
        else:
            unknown.append(tensor.name)
    if unknown:
        raise ValueError(
            f"{len(unknown)} tensors, such as {unknown[0][:100]!r}, are of no {family} model that is supported; experts of "
            "Llama (Mixtral) and scaled rotary embedding (rope_freqs, Llama 3.1) are not"
        )
    return names


def _build_model(path: Path, content: GgufFile) -> GgufModel:
    values, tensors = content.values, content.tensors
    family = values.get("general.architecture")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise ValueError(f"its model is of the family {family!r}; supported are {', '.join(_FAMILIES)}")
    form = _FAMILIES[family]
    names = _name_tensors(family, form, tensors)
    if scaling := values.get(f"{family}.rope.scaling.type"):
        if scaling not in ("none", *form.scalings):
            raise ValueError(f"rotary embedding scaled by {scaling!r} is not supported")
    config = _build_config(family, values, {tensor.name: tensor.shape for tensor in tensors})
    if (num_layers := len({name.split(".")[2] for name in names.values() if name.startswith("model.layers.")})) != (
        layers := config["num_hidden_layers"]
    ):
        raise ValueError(f"it has tensors of {num_layers} layers, and states {layers}; is it one of several parts?")
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:
        name, parts = names[tensor.name], tensor.shape[:1] if "*" in names[tensor.name] else (1,)
        shape = tensor.shape[1:] if "*" in name else tensor.shape
        shape = (1, *shape) if name.endswith(_GATE) and len(shape) == 1 else shape
        shapes |= {name.replace("*", str(expert)): shape for expert in range(*parts)}
    _check_shapes(config, shapes)
    kinds = {tensor.kind.name for tensor in tensors if len(tensor.shape) > 1}
    dtype = next((dtype for dtype, kind in _TYPES.items() if kinds == {kind}), torch.bfloat16)
    return GgufModel(path, form, config, dtype, names, tensors)


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
    form, layers = _FAMILIES[family], int(read("block_count"))
    config = {
        "architectures": [form.class_name],
        "model_type": form.model_type,
        "hidden_size": hidden,
        "intermediate_size": int(read("feed_forward_length")),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(read("attention.head_count_kv", heads)),
        "head_dim": int(read("attention.key_length", hidden // heads)),
        "vocab_size": embedding[0],
        "max_position_embeddings": int(read("context_length")),
        "rope_theta": float(read("rope.freq_base", 10000.0)),
        "rms_norm_eps": round(float(read("attention.layer_norm_rms_epsilon")), 12),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": not family.startswith("qwen2") and "blk.0.attn_q.bias" in shapes,
        **form.fixed,
    }
    for key, (name, default) in form.keys.items():
        value = read(name, default)
        config[key] = int(value) if value == int(value) and not key.endswith("softcapping") else float(value)
    if form.names is _FOUR_NORMS:
        config["query_pre_attn_scalar"] = hidden // heads if (family, layers) in _WIDE_QUERIES else config["head_dim"]
    if values.get(f"{family}.rope.scaling.type") in form.scalings:
        config["rope_scaling"] = {"rope_type": "linear", "factor": float(read("rope.scaling.factor"))}
    for name, key in (("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id"), ("padding_token_id", "pad_token_id")):
        if (token := values.get(f"tokenizer.ggml.{name}")) is not None:
            if type(token) is not int or not 0 <= token < embedding[0]:
                raise ValueError(f"tokenizer.ggml.{name} is {token!r}; expected a token below {embedding[0]}")
            config[key] = token
    return config


def _check_shapes(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError where the tensors of the file do not fit the model that its metadata describes."""
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
