"""Metadata of the model from which a run starts: its config.json and tokenizer settings, where they are on this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.files import read_json
from mindspeed_rl.hub import find_folder

#: folder inside a Megatron checkpoint that keeps config, generation config and tokenizer of the HF model
HF_FILES = "huggingface"

#: file of a PEFT adapter
ADAPTER_CONFIG = "adapter_config.json"
#: "1" in the environment of all processes of a run whose model reads images: libraries are imported by it
VISION_VARIABLE = "MINDSPEED_RL_VISION"
#: width of a head where config.json has no head_dim and the model type does not derive it from hidden_size
_HEAD_SIZES = {
    "qwen3": 128,
    "gemma": 256,
    "gemma2": 256,
    "gemma3_text": 256,
    "ernie4_5": 128,
    "minimax_m2": 128,
    "hy_v3": 128,
    "seed_oss": 128,
    "glm4": 128,
    "qwen3_next": 256,
    "qwen3_5_text": 256,
    "qwen3_5_moe_text": 256,
}
#: keys of config.json with the number of experts, by family
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")

#: keys of layers that keep a state: linear attention, state-space models, short convolutions, RG-LRU, RWKV, xLSTM
_STATE_KEYS = (
    *("linear_num_value_heads", "linear_attn_config", "mamba_num_heads", "mamba_d_state", "state_size", "ssm_state_size"),
    *("conv_L_cache", "number_of_conv_states", "lru_width", "attention_hidden_size", "qk_dim_factor"),
)
#: keys with the kind of each layer, and parts of the names of kinds with a state
_LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
_STATE_KINDS = ("linear", "conv", "recurrent", "mamba", "hybrid")


def keeps_states(config: Mapping[str, object]) -> bool:
    """Return True for the config.json of a model of text whose layers, or some, keep a state instead of keys and values."""
    kinds = [str(kind) for key in _LAYER_KINDS if isinstance(listed := config.get(key), list) for kind in listed]
    lightning = config.get("attn_type_list")  # of MiniMax-Text-01: 0 for linear attention
    return (
        any(config.get(key) is not None for key in _STATE_KEYS)
        or any(part in kind for kind in kinds for part in _STATE_KINDS)
        or (isinstance(lightning, list) and 0 in lightning)
    )


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """Sizes that the limits of the rollout engine concern; None where they are unknown.

    Attributes:
        source: the folder of the sizes, for messages.
        num_heads, num_kv_heads, head_size: numbers of heads and of key/value heads, and the width of one head.
        is_latent, latent_size: latent attention, and the width of its one cached head.
        max_length: maximum sequence that the positions of the model reach, in tokens.
        num_experts: experts of a layer with experts.
        is_sparse: queries attend to the tokens that an indexer chooses.
        linear_heads, linear_size: key heads of the gated delta nets, and the smaller width of a key and a value head.
        linear_state: bytes of the state of one of them, of all heads, in an engine in bfloat16.
        vocab_size: tokens that it can read.
    """

    source: str
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    is_latent: bool = False
    latent_size: int | None = None
    ffn_hidden_size: int | None = None
    max_length: int | None = None
    num_experts: int | None = None
    is_sparse: bool = False
    linear_heads: int | None = None
    linear_size: int | None = None
    linear_state: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class ModelMetadata:
    """Content of the files of a model.

    Attributes:
        folder: the folder as the run file names it.
        shape: the sizes in the files.
        reads_images: it is a model of images.
        hf_folder: folder of config.json.
    """

    folder: str
    shape: EngineShape
    reads_images: bool = False
    hf_folder: str = ""


def find_adapter_base(folder: str | Path | None, base_model: str | None = None) -> str | None:
    """Return the base model of the PEFT adapter in a folder: `base_model`, else the one that the adapter names ("" for none).

    None for a folder without an adapter.
    """
    path = Path(folder or "", ADAPTER_CONFIG).expanduser()
    if not folder or not path.is_file():
        return None
    return base_model or str(_read(path).get("base_model_name_or_path") or "")


def list_config_folders(name: str, base_model: str | None = None) -> tuple[Path, Path]:
    """Return the folders that may have the config.json of the model that a key names, as a path or as a name on a hub.

    That of an adapter is its base's, and a checkpoint has it in a folder of its own.
    """
    start = find_folder(name)
    if base := find_adapter_base(start, base_model):
        start = find_folder(base)
    return start, start / HF_FILES


def describe_inner_adapters(folder: Path) -> str:
    """Return which of the adapters in a folder can be named, as roles with their own adapters export them; "" without any."""
    names = sorted(path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}"))
    return f"; it has the adapters {', '.join(names)}: name one, such as {folder / names[0]}" if names else ""


def find_code_elsewhere(auto_map: object) -> tuple[str, str] | None:
    """Return the name and the path of a class that `auto_map` takes from another repository; None without one.

    transformers would download that repository and run its code, also for a folder on disk.
    """
    for name, entry in auto_map.items() if isinstance(auto_map, dict) else ():
        for path in entry if isinstance(entry, list) else [entry]:
            if "--" in str(path):
                return str(name), str(path)
    return None


def read_model_metadata(role: MegatronConfig) -> ModelMetadata | None:
    """Return the metadata of the model that the keys of a role name; None where none of its folders has a config.json.

    A name on a hub is the folder in its cache.
    """
    for name in filter(None, (role.load, role.tokenizer_name_or_path, role.pretrained_checkpoint)):
        for folder in list_config_folders(name, role.base_model):
            if config := _read(folder / "config.json"):
                reads_images = "vision_config" in config and "image_token_id" in config
                text = config.get("text_config")
                config |= text if isinstance(text, dict) else {}  # the sizes of a model with several parts are there
                return ModelMetadata(str(name), _read_shape(str(name), folder, config), reads_images, str(folder))
    return None


def _read_shape(source: str, folder: Path, config: Mapping[str, object]) -> EngineShape:
    heads, hidden = _read_count(config, "num_attention_heads"), _read_count(config, "hidden_size")
    width = _read_count(config, "head_dim") or _HEAD_SIZES.get(str(config.get("model_type")))
    if width is None and heads is not None and hidden is not None:
        width = hidden // heads
    counts = [_read_count(config, key) for key in _EXPERT_COUNTS]
    latent, rotary = _read_count(config, "kv_lora_rank"), _read_count(config, "qk_rope_head_dim")
    widths = [_read_count(config, f"linear_{kind}_head_dim") for kind in ("key", "value")]
    return EngineShape(
        source=source,
        num_heads=heads,
        num_kv_heads=_read_count(config, "num_key_value_heads") or heads,
        head_size=width,
        is_latent=latent is not None,
        latent_size=None if latent is None or rotary is None else latent + rotary,
        ffn_hidden_size=_read_count(config, "intermediate_size"),
        max_length=_read_max_length(folder, config),
        num_experts=next((count for count in counts if count), None),
        is_sparse=_read_count(config, "index_topk") is not None,
        linear_heads=_read_count(config, "linear_num_key_heads"),
        linear_size=min((width for width in widths if width), default=None),
        linear_state=_read_state_bytes(config),
        vocab_size=_read_count(config, "vocab_size"),
    )


def _read_state_bytes(config: Mapping[str, object]) -> int | None:
    """Return the bytes of the state of a gated delta net; of the families, vLLM reads the format of Qwen3.5's only."""
    names = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    numbers = [count for name in names if (count := _read_count(config, name))]
    is_wide = "qwen3_5" in str(config.get("model_type")) and config.get("mamba_ssm_dtype") == "float32"
    return math.prod(numbers) * (4 if is_wide else 2) if len(numbers) == len(names) else None


def _read_max_length(folder: Path, config: Mapping[str, object]) -> int | None:
    """Return the length as the rollout engine reads it; where versions differ about scaled positions, the longer one."""
    length = _read_count(config, "max_position_embeddings")
    if length is None:
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    scaling = scaling if isinstance(scaling, Mapping) else {}
    if scaling.get("rope_type", scaling.get("type")) == "longrope":
        # beyond, other frequencies would change the probabilities of a row's first tokens: only transformers computes these
        original = scaling.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
        length = original if isinstance(original, int) else length
        scaling = {}
    factor = scaling.get("factor")
    # llama3 scaling is part of max_position_embeddings already
    if isinstance(factor, (int, float)) and scaling.get("rope_type", scaling.get("type")) != "llama3":
        length = int(length * factor)
    tokenizer = _read_count(_read(folder / "tokenizer_config.json"), "model_max_length")
    return length if tokenizer is None else min(length, tokenizer)


def _read(path: Path) -> dict[str, object]:
    try:
        tree = read_json(path)
    except (OSError, ValueError):
        return {}  # loading the model reports the damaged file
    return tree if isinstance(tree, dict) else {}


def _read_count(config: Mapping[str, object], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
