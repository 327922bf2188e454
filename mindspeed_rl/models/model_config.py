"""Shape of a language model in Megatron's words, read from config.json without importing torch or Megatron."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from mindspeed_rl.bounds import is_number

#: a config.json as parsed
HfConfig: TypeAlias = Mapping[str, object]


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of rotary frequencies beyond the length the model was first trained on.

    ``linear`` divides every frequency by ``factor``; ``llama3`` divides the low ones and blends the middle ones
    (Llama 3.1); ``yarn`` is arXiv:2309.00071.
    """

    type: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


#: tokens that a gated delta net computes together (engine/gated_delta.py)
LINEAR_CHUNK = 64


@dataclass(frozen=True)
class LinearAttention:
    """Gated delta nets of a hybrid model; the names are Megatron's, after `linear_`.

    ``layers`` has the global indices of the decoder layers that have one in place of attention.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads {self.num_value_heads} is not a multiple of linear_num_key_heads {self.num_key_heads}"
            )

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Rows of a key head that are convolved: query, key, and the values of its value heads."""
        return self.key_head_dim, self.key_head_dim, self.num_value_heads // self.num_key_heads * self.value_head_dim

    @property
    def group(self) -> tuple[int, ...]:
        """Rows of a key head in the projection: `convolved`, output gate, beta and decay of its value heads."""
        ratio = self.num_value_heads // self.num_key_heads
        return *self.convolved, ratio * self.value_head_dim, ratio, ratio

    @property
    def products_per_token(self) -> int:
        """Multiplications of a token in a layer: its state is read, written and put out, then those inside a chunk."""
        state = 3 * self.key_head_dim * self.value_head_dim
        inside = LINEAR_CHUNK * (self.key_head_dim + self.value_head_dim)
        return self.num_value_heads * (state + inside)

    def count_saved(self, itemsize: int) -> float:
        """Count the numbers of `itemsize` bytes that backward needs of a token in a layer.

        Input of the convolution, output, gate and gated output; in float32 query and key before and after their norms, values,
        output and its norm, and the inverse of each chunk (engine/gated_delta.py).
        """
        keys, values = self.num_key_heads * self.key_head_dim, self.num_value_heads * self.value_head_dim
        wide = 4 * keys + 3 * values + LINEAR_CHUNK * self.num_value_heads
        return self.num_key_heads * sum(self.convolved) + 3 * values + 4 / itemsize * wide

    def count_state_bytes(self, itemsize: int, tensor: int = 1, drafts: int = 0) -> int:
        """Count the bytes of the states of a sequence of any length on one of `tensor` ranks.

        A state is in float32; next to it are the last tokens that the convolution sees. With `drafts` in a step both are kept
        once more for each of them, and the tokens of the convolution reach back over all.
        """
        state = self.num_value_heads * self.key_head_dim * self.value_head_dim * 4
        window = self.num_key_heads * sum(self.convolved) * (self.conv_kernel_dim - 1 + drafts) * itemsize
        return len(self.layers) * (1 + drafts) * (state + window) // tensor


@dataclass(frozen=True)
class SparseAttention:
    """Indexer of latent attention that attends only to some tokens; the names are Megatron's, after `dsa_indexer_`.

    Each query attends to the ``topk`` tokens before it, itself included, that the indexer scores highest.

    Attributes:
        interleaved: pairs of neighbours rotate in queries and keys of the indexer, not halves.
        shared_layers: decoder layers without an indexer, which attend to the tokens that the one before them chose.
    """

    n_heads: int
    head_dim: int
    topk: int
    interleaved: bool = False
    shared_layers: tuple[int, ...] = ()

    @property
    def products_per_pair(self) -> float:
        """Multiplications for two tokens in a layer; one product, where attention has the two that `ModelFlops` counts."""
        return self.n_heads * self.head_dim / 2

    def count_saved(self, itemsize: int) -> float:
        """Count the numbers of `itemsize` bytes that backward needs of a token: queries, keys, and float32 weights."""
        return (self.n_heads + 1) * self.head_dim + 4 / itemsize * self.n_heads

    def count_cached(self, num_layers: int) -> int:
        """Count the cached numbers of a token, the key of each indexer."""
        return (num_layers - len(self.shared_layers)) * self.head_dim


@dataclass(frozen=True)
class VisionConfig:
    """Vision tower of a model with its projector, and the way in which the language model sees images.

    Attributes:
        image_token_id, video_token_id: ids of the tokens in whose place the features of an image or a video are put.
        image_frame: ids of the tokens before and after an image's tokens.
        patch_size, temporal_patch_size, in_channels: size of a patch in pixels, frames and colours.
        merge_size: patches of this many rows and columns become one token.
        depth, hidden_size, ffn_hidden_size, num_heads: shape of the tower; its blocks see `window_size` pixels of height and
            width but for those in `full_layers`, which see the image; a window size of 0 means that all do.
        num_positions: learned positions, 0 where there are none.
        deepstack_layers: layers of the tower whose features are added after the first layers of the language model, too.
        rotary_sections: rotary frequencies that follow the time, the height and the width of a token.
        rotary_interleaved: the frequencies of the axes alternate, instead of one section after the other.
    """

    image_token_id: int
    video_token_id: int
    patch_size: int
    depth: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    rotary_sections: tuple[int, int, int]
    rotary_interleaved: bool = False
    temporal_patch_size: int = 2
    in_channels: int = 3
    merge_size: int = 2
    window_size: int = 0
    full_layers: tuple[int, ...] = ()
    num_positions: int = 0
    deepstack_layers: tuple[int, ...] = ()
    image_frame: tuple[int, int] | None = None

    @property
    def patch_dim(self) -> int:
        """Numbers of a patch: a row of the processor's pixel values."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    def count_tokens(self, grid: tuple[int, int, int]) -> int:
        """Return the tokens that an image of this grid (frames, rows and columns of patches) takes in a prompt."""
        return math.prod(grid) // self.merge_size**2


@dataclass(frozen=True)
class ModelConfig:
    """Shape of one model; the names are Megatron's, so they can be compared with a training script.

    ``num_layers`` counts real decoder layers only: neither no-op layers of a pipeline layout nor multi-token-prediction
    layers. ``padded_vocab_size`` is the number of embedding rows in Megatron, ``vocab_size`` the number in HF. ``moe_layers``
    has the global indices (from 0) of the decoder layers with experts. A model with ``head`` "lm" ends in vocabulary logits,
    one with "reward" in one score per token. With ``qk_layernorm_over_heads`` a query or key is normalized over all its heads
    together. With ``local_rotary_base`` the layers in ``sliding_window_layers`` rotate with this base and without scaling. With
    ``moe_router_biased_softmax`` the bias is added to scores of a softmax, which Megatron computes as sigmoids of other logits.
    ``clamped_swish`` is gate * sigmoid(1.702 gate) * (up + 1), both at most ``activation_limit``. With ``attention_sinks`` each
    head has a logit that takes part in every softmax and gives nothing.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    padded_vocab_size: int
    max_position_embeddings: int
    untie_embeddings_and_output_weights: bool
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    qk_layernorm_over_heads: bool = False
    qk_layernorm_after_rope: bool = False
    normalization: Literal["RMSNorm"] = "RMSNorm"
    norm_epsilon: float = 1e-6
    layernorm_zero_centered_gamma: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    activation: Literal["silu", "gelu_tanh", "clamped_swish"] = "silu"
    activation_limit: float | None = None
    add_bias_linear: bool = False
    attention_sinks: bool = False
    head: Literal["lm", "reward"] = "lm"

    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rope_scaling: RopeScaling | None = None
    local_rotary_base: float | None = None

    sliding_window: int | None = None
    sliding_window_layers: tuple[int, ...] = ()
    query_scale: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    embedding_scale: float | None = None

    attention_output_gate: bool = False
    linear_attention: LinearAttention | None = None
    vision: VisionConfig | None = None

    num_moe_experts: int | None = None
    moe_layers: tuple[int, ...] = ()
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 0
    moe_router_pre_softmax: bool = False
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_biased_softmax: bool = False
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_aux_loss_coeff: float | None = None
    seq_aux: bool = False

    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    sparse_attention: SparseAttention | None = None

    mtp_num_layers: int = 0

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_query_groups {self.num_query_groups}"
            )
        if self.num_moe_experts is not None and self.moe_router_topk > self.num_moe_experts:
            raise ValueError(f"num_experts_per_tok {self.moe_router_topk} exceeds the {self.num_moe_experts} experts")
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}")

    @property
    def is_homogeneous(self) -> bool:
        """True where all decoder layers have the same parameters."""
        has_same_attention = self.linear_attention is None and not self.layers_without_indexer
        return has_same_attention and len(self.moe_layers) in (0, self.num_layers)

    @property
    def normalizes_one_expert(self) -> bool:
        """True where each token goes to one expert, whose weight is normalized to 1 whatever its score."""
        return self.moe_router_topk == 1 and not self.moe_router_pre_softmax

    @property
    def layers_without_indexer(self) -> tuple[int, ...]:
        """Decoder layers that attend to the tokens that the indexer of an earlier layer chose."""
        return () if self.sparse_attention is None else self.sparse_attention.shared_layers

    def pad_vocab(self, make_vocab_size_divisible_by: int = 1, tp_size: int = 1) -> ModelConfig:
        """Return the same model with its vocabulary padded to a multiple of ``make_vocab_size_divisible_by`` x ``tp_size``.

        Raises:
            ValueError: ``make_vocab_size_divisible_by`` is below 1.
        """
        if make_vocab_size_divisible_by < 1:
            raise ValueError(f"make_vocab_size_divisible_by is {make_vocab_size_divisible_by}; it must be at least 1")
        multiple = make_vocab_size_divisible_by * tp_size
        return replace(self, padded_vocab_size=math.ceil(self.vocab_size / multiple) * multiple)


#: No model has more of them; a larger number in config.json is a mistake that would take hours to process.
_MAX_LAYERS = _MAX_EXPERTS = 10_000
_REWARD_SUFFIX = "ForSequenceClassification"


def read_size(hf_config: HfConfig, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
    """Return a count or a length in config.json; a missing key and null mean ``default``.

    Raises:
        ValueError: it is missing without a default, not a whole number, or not from ``minimum`` to ``maximum``.
    """
    value = default if hf_config.get(key) is None else hf_config[key]
    if value is None:
        raise ValueError(f"config.json has no {key!r}; a {hf_config.get('model_type', 'model')} checkpoint needs it")
    # JSON has one kind of number: a whole one may come as 4096.0
    if is_number(value) and value == int(value):
        if minimum <= value <= maximum:
            return int(value)
    raise _wrong_value(key, value, f"a whole number from {minimum} to {maximum}")


def read_optional_size(hf_config: HfConfig, key: str) -> int | None:
    """Return a length in config.json, None where the key is missing, null or 0; ValueError if it is anything else."""
    return read_size(hf_config, key, 0, minimum=0) or None


def read_float(hf_config: HfConfig, key: str, default: float, *, may_be_zero: bool = False) -> float:
    """Return a positive number in config.json, ``default`` where it is missing or null; ValueError for anything else."""
    value = default if hf_config.get(key) is None else hf_config[key]
    if not is_number(value) or value < 0 or value == 0 and not may_be_zero:
        raise _wrong_value(key, value, "a number of at least 0" if may_be_zero else "a number above 0")
    return float(value)


def read_optional_float(hf_config: HfConfig, key: str) -> float | None:
    """Return a positive number in config.json, None where it is missing or null; ValueError for anything else."""
    return None if hf_config.get(key) is None else read_float(hf_config, key, 1.0)


def read_flag(hf_config: HfConfig, key: str, default: bool = False) -> bool:
    """Return a truth value in config.json, ``default`` where it is missing or null; ValueError for anything else."""
    value = hf_config.get(key)
    # 1 and 0 equal True and False, and pass
    if value not in (None, True, False):
        raise _wrong_value(key, value, "true or false")
    return default if value is None else bool(value)


def read_indices(hf_config: HfConfig, key: str) -> tuple[int, ...]:
    """Return a list of numbers from 0 in config.json, empty if there is none; ValueError if it is anything else."""
    values = hf_config.get(key) or []
    if not isinstance(values, list) or not all(isinstance(value, int) and value >= 0 for value in values):
        raise _wrong_value(key, values, "a list of whole numbers from 0")
    return tuple(values)


def read_layer_types(hf_config: HfConfig, num_layers: int) -> tuple[str, ...]:
    """Return the name of each layer's kind in config.json, empty without them; ValueError unless every layer has one."""
    types = hf_config.get("layer_types") or []
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise _wrong_value("layer_types", types, "a list of names")
    if types and len(types) != num_layers:
        raise ValueError(f"config.json has {len(types)} layer_types for num_hidden_layers {num_layers}")
    return tuple(types)


def read_linear_attention(hf_config: HfConfig, num_layers: int) -> LinearAttention:
    """Return the gated delta nets that config.json describes.

    Raises:
        ValueError: a layer is of another kind than these and full attention.
    """
    expected = ("linear_attention", "full_attention")
    kinds = read_layer_types(hf_config, num_layers)
    if not kinds:
        interval = read_size(hf_config, "full_attention_interval", 4)
        kinds = tuple(expected[(layer + 1) % interval == 0] for layer in range(num_layers))
    if strange := sorted(set(kinds) - set(expected)):
        raise ValueError(f"config.json has layer_types {strange[0]!r}; expected {' or '.join(expected)}")
    return LinearAttention(
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == expected[0]),
        num_key_heads=read_size(hf_config, "linear_num_key_heads", 16),
        num_value_heads=read_size(hf_config, "linear_num_value_heads", 32),
        key_head_dim=read_size(hf_config, "linear_key_head_dim", 128),
        value_head_dim=read_size(hf_config, "linear_value_head_dim", 128),
        conv_kernel_dim=read_size(hf_config, "linear_conv_kernel_dim", 4),
    )


def read_windows(hf_config: HfConfig, common: ModelConfig, full_every: int) -> ModelConfig:
    """Return the model with its sliding window, which all layers have except layers of full attention.

    Args:
        full_every: without ``layer_types`` every so many layers end in one of full attention.
    """
    kinds, layers = read_layer_types(hf_config, common.num_layers), range(common.num_layers)
    windowed = tuple(i for i in layers if (kinds[i] == "sliding_attention" if kinds else (i + 1) % full_every))
    window = read_optional_size(hf_config, "sliding_window")
    return replace(common, sliding_window=window, sliding_window_layers=windowed if window else ())


def split_rope_parameters(hf_config: HfConfig, base: float, local_base: float) -> tuple[HfConfig, float]:
    """Return config.json with only the rotary settings of full attention, and the base of the layers with a window.

    Args:
        base, local_base: their bases where config.json has none.

    Raises:
        ValueError: the layers with a window have a scaling of their own.
    """
    rope = read_group(hf_config, "rope_parameters")
    full, local = read_group(rope, "full_attention"), read_group(rope, "sliding_attention")
    if local.get("rope_type", "default") != "default":
        raise ValueError(f"config.json has rope type {local['rope_type']!r} for sliding_attention; supported is default")
    common = full if full or local else rope
    config = {**hf_config, "rope_parameters": {"rope_theta": hf_config.get("rope_theta") or base, **common}}
    return config, read_float(local, "rope_theta", read_float(hf_config, "rope_local_base_freq", local_base))


def read_group(hf_config: HfConfig, key: str) -> HfConfig:
    """Return a group of settings in config.json, empty if there is none; ValueError if it is not a JSON object."""
    group = hf_config.get(key) or {}
    if not isinstance(group, Mapping):
        raise _wrong_value(key, group, "a JSON object")
    return group


def read_quantization_block(hf_config: HfConfig) -> tuple[int, int] | None:
    """Return the rows and columns of a weight that share a scale in config.json; None for weights that are not quantized.

    Raises:
        ValueError: they are quantized in a way that is not read here.
    """
    settings = read_group(hf_config, "quantization_config")
    if not settings:
        return None
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    if method == "mxfp4":
        return None  # tensors in it are known by their names: see `checkpoint.stacked_experts`
    if method == "fp8" and isinstance(block, list) and len(block) == 2:
        rows, columns = block
        if isinstance(rows, int) and isinstance(columns, int) and rows > 0 and columns > 0:
            return rows, columns
    raise ValueError(
        f"config.json has a quantization_config with quant_method {method!r} and weight_block_size {block!r}; read are "
        "weights without one, mxfp4, and fp8 with a block of two sizes"
    )


def _wrong_value(key: str, value: object, expected: str) -> ValueError:
    shown = json.dumps(value)
    return ValueError(f"config.json has {key} {shown if len(shown) <= 60 else shown[:60] + '...'}; expected {expected}")


def _read_rope_scaling(scaling: HfConfig, max_positions: int) -> RopeScaling | None:
    # older configs have type, newer ones rope_type
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"config.json has rope type {kind!r}; supported are default, linear, llama3 and yarn")
    for key in ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",):
        if scaling.get(key) is None:
            raise ValueError(f"config.json has no {key!r} among the settings of its rope type")
    factor = read_float(scaling, "factor", 1.0)
    if kind == "linear":
        return RopeScaling("linear", factor)
    original = read_size(scaling, "original_max_position_embeddings", max_positions, minimum=0)
    if kind == "llama3":
        low, high = read_float(scaling, "low_freq_factor", 1.0), read_float(scaling, "high_freq_factor", 1.0)
        return RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=read_float(scaling, "beta_fast", 32),
        beta_slow=read_float(scaling, "beta_slow", 1),
        mscale=read_optional_float(scaling, "mscale"),
        mscale_all_dim=read_optional_float(scaling, "mscale_all_dim"),
        attention_factor=read_optional_float(scaling, "attention_factor"),
        truncate=read_flag(scaling, "truncate", True),
    )


def read_common(
    hf_config: HfConfig, architecture: str, *, activations: tuple[str, ...] = ("silu",), tied_by_default: bool = False
) -> ModelConfig:
    """Return the fields that nearly every decoder-only config.json spells the same way; a family replaces the others.

    Rotary settings come from one ``rope_parameters`` mapping (transformers 5), or from ``rope_theta``, ``rope_scaling`` and
    ``partial_rotary_factor`` at the top level (earlier releases).

    Args:
        activations: activations that the architecture is defined with.

    Raises:
        ValueError: a key is missing or has a value that is not supported.
    """
    # Gemma 2 has both keys and computes with hidden_activation
    activation = hf_config.get("hidden_activation") or hf_config.get("hidden_act") or activations[0]
    if activation not in activations:
        raise ValueError(
            f"config.json has activation {activation!r}; this architecture is built with {' or '.join(activations)}"
        )
    hidden, heads = read_size(hf_config, "hidden_size"), read_size(hf_config, "num_attention_heads")
    vocab = read_size(hf_config, "vocab_size")
    classes = hf_config.get("architectures")
    # the head size that follows would be 0
    if heads > hidden and not hf_config.get("head_dim"):
        raise ValueError(f"config.json has num_attention_heads {heads}, more than its hidden_size {hidden}")
    if "rms_norm_eps" in hf_config and hf_config["rms_norm_eps"] is None:
        raise _wrong_value("rms_norm_eps", None, "a number above 0")
    rope = read_group(hf_config, "rope_parameters")
    scaling = dict(read_group(hf_config, "rope_scaling")) or dict(rope)
    return ModelConfig(
        architecture=architecture,
        num_layers=read_size(hf_config, "num_hidden_layers", maximum=_MAX_LAYERS),
        hidden_size=hidden,
        ffn_hidden_size=read_size(hf_config, "intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=read_size(hf_config, "num_key_value_heads", heads),
        kv_channels=read_optional_size(hf_config, "head_dim") or hidden // heads,
        vocab_size=vocab,
        padded_vocab_size=vocab,
        max_position_embeddings=read_optional_size(hf_config, "max_position_embeddings") or 2048,
        untie_embeddings_and_output_weights=not read_flag(hf_config, "tie_word_embeddings", tied_by_default),
        norm_epsilon=read_float(hf_config, "rms_norm_eps", 1e-6),
        head="reward" if isinstance(classes, list) and any(str(name).endswith(_REWARD_SUFFIX) for name in classes) else "lm",
        rotary_base=read_float(rope, "rope_theta", read_float(hf_config, "rope_theta", 10000.0)),
        rotary_percent=read_float(rope, "partial_rotary_factor", read_float(hf_config, "partial_rotary_factor", 1.0)),
        rope_scaling=_read_rope_scaling(scaling, read_size(hf_config, "max_position_embeddings", 0, minimum=0)),
    )


def read_num_experts(hf_config: HfConfig) -> int:
    """Return the number of experts, whatever the config calls it; ValueError if it is missing."""
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if hf_config.get(key):
            return read_size(hf_config, key, maximum=_MAX_EXPERTS)
    raise ValueError("config.json has none of num_experts, num_local_experts, n_routed_experts; a MoE checkpoint needs one")
