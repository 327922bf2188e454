"""Costs of a model, only from its shapes: floating-point operations, and bytes of keys and values in a rollout engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.files import read_json
from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.model_config import LinearAttention, ModelConfig
from mindspeed_rl.models.vision import PROJECTORS, TOWER

#: tokens of one KV block on the CPU; a sequence takes full blocks
_CPU_BLOCK_TOKENS = 128
_MAX_DERIVED_BYTES = 8 << 30


@dataclass(frozen=True)
class ModelFlops:
    """Operations of a forward pass over a sequence of s tokens: per_token * s + per_squared_token * s^2.

    Two operations a weight and token (the embedding is looked up, not multiplied; of the experts the chosen ones count), and
    causal attention: 2 * s^2 * heads * head size a layer. With an indexer half of that for its heads.
    """

    per_token: float
    per_squared_token: float

    @classmethod
    def count(cls, architecture: Architecture, model_config: ModelConfig) -> ModelFlops:
        """Count the costs of a model."""
        weights = 0.0
        for op in architecture.weight_ops(model_config):
            if op.section != "pre":
                fraction = 1.0
                if op.experts:
                    assert model_config.num_moe_experts is not None
                    fraction = model_config.moe_router_topk / model_config.num_moe_experts
                weights += fraction * sum(math.prod(shape) for shape in op.shapes if len(shape) > 1)
        head = float(model_config.kv_channels)
        if model_config.multi_latent_attention:
            sizes = (model_config.qk_head_dim, model_config.qk_pos_emb_head_dim, model_config.v_head_dim)
            # query times key takes the first two, weights times value the third: two products of the mean size
            head = sum(size for size in sizes if size is not None) / 2
        # a prediction layer attends, and has a product with the head of its own
        attended = model_config.num_layers + model_config.mtp_num_layers
        weights += model_config.mtp_num_layers * model_config.hidden_size * model_config.vocab_size
        if (linear := model_config.linear_attention) is not None:
            attended -= len(linear.layers)
            weights += len(linear.layers) * linear.products_per_token
        attention = attended * model_config.num_attention_heads * head
        if (sparse := model_config.sparse_attention) is not None:
            # full attention, of which a mask leaves some tokens, and the indexer
            attention += attended * sparse.products_per_pair
        return cls(2.0 * weights, 2.0 * attention)

    def training(self, lengths: Iterable[int]) -> float:
        """Return the operations of forward and backward over these sequences; backward costs twice forward."""
        lengths = list(lengths)
        return 3.0 * (self.per_token * sum(lengths) + self.per_squared_token * sum(length**2 for length in lengths))


@dataclass(frozen=True)
class TowerCosts:
    """Costs of a vision tower with its projector, by tokens of images; a token is merge_size^2 patches.

    Two operations a weight and patch (the projector's: and token), and attention over the patches of the image or of a window:
    4 * patches * hidden size for each patch and block.

    Attributes:
        per_token, per_squared_token: operations of a forward pass over an image of n tokens: a * n + b * n^2.
        block: numbers of a token that backward needs of one block; a forward pass has one block at a time.
        depth: blocks.
        ends: numbers of a token before the first block and after the last: pixels, and features of all levels.
    """

    per_token: float
    per_squared_token: float
    block: float
    depth: int
    ends: float

    @classmethod
    def count(cls, architecture: Architecture, model_config: ModelConfig) -> TowerCosts | None:
        """Count the costs of a model's tower; None for a model of text."""
        vision = model_config.vision
        if vision is None:
            return None
        patches, hidden = vision.merge_size**2, vision.hidden_size
        operations, matrices = 0.0, 0
        for op in architecture.tower_ops(model_config):
            name = op.mcore.removeprefix(TOWER)
            if not name.startswith("pos_embed"):
                weights = sum(math.prod(shape) for shape in op.shapes if len(shape) > 1)
                operations += 2.0 * weights * (1 if name.startswith(PROJECTORS) else patches)
                matrices += name.startswith("blocks.0.mlp.") and name.endswith(".weight")
        full = len(vision.full_layers) if vision.window_size else vision.depth
        window = (vision.window_size // vision.patch_size) ** 2
        operations += 4.0 * patches * window * hidden * (vision.depth - full)
        # inputs of both norms and of all first projections, query, key, value and output; outputs of the MLP's projections
        # and of its activation, where three matrices are a gated one
        block = patches * (8.0 * hidden + matrices * vision.ffn_hidden_size)
        features = model_config.hidden_size * (1 + len(vision.deepstack_layers))
        ends = float(patches * (vision.patch_dim + hidden) + features)
        return cls(operations, 4.0 * patches**2 * hidden * full, block, vision.depth, ends)

    def forward(self, tokens: float, image: float) -> float:
        """Return the operations of a forward pass over so many tokens, of images of `image` tokens each."""
        return tokens * (self.per_token + self.per_squared_token * image)


def measure_head_share(architecture: Architecture, model_config: ModelConfig, product_cost: float) -> float:
    """Return the share of the head's products in an update's, where its logits are in float32.

    Its logits are computed twice, because backward computes them again, at `product_cost` times the cost of other products;
    then come two products for gradients. Other weights have one product forward and two backward.
    """
    head = 2.0 * model_config.hidden_size * model_config.vocab_size
    others = ModelFlops.count(architecture, model_config).per_token
    if model_config.untie_embeddings_and_output_weights:
        others -= head
    head *= 2.0 * product_cost + 2.0
    return head / (head + 3.0 * others)


def kv_bytes_per_token(model_config: ModelConfig, itemsize: int, tensor: int = 1) -> int:
    """Return the bytes of a token on one of `tensor` ranks, which caches full heads, at least one.

    Latent attention caches one head, on every rank, and the key of an indexer; gated delta nets cache no token
    (`state_bytes_per_sequence`).

    Args:
        itemsize: bytes of a cached value.
    """
    if model_config.multi_latent_attention:
        assert model_config.kv_lora_rank is not None and model_config.qk_pos_emb_head_dim is not None
        values = model_config.num_layers * (model_config.kv_lora_rank + model_config.qk_pos_emb_head_dim)
        if (sparse := model_config.sparse_attention) is not None:
            values += sparse.count_cached(model_config.num_layers)
        return values * itemsize
    heads, layers = -(-model_config.num_query_groups // tensor), model_config.num_layers
    if model_config.linear_attention is not None:
        layers -= len(model_config.linear_attention.layers)
    return 2 * layers * heads * model_config.kv_channels * itemsize


def state_bytes_per_sequence(linear: LinearAttention | None, itemsize: int, tensor: int = 1, drafts: int = 0) -> int:
    """Return the bytes of the states of a sequence of any length on one of `tensor` ranks; 0 without gated delta nets.

    Args:
        drafts: draft tokens of a step, each of which has states of its own until it is accepted.
    """
    return 0 if linear is None else linear.count_state_bytes(itemsize, tensor, drafts)


def read_kv_bytes(folder: str | Path, itemsize: int) -> int:
    """Return the bytes of keys and values of one token in all layers of the model in a Hugging Face folder."""
    config = read_json(Path(folder).expanduser() / "config.json")
    config |= config.get("text_config", {})  # of the language model
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return 2 * config["num_hidden_layers"] * kv_heads * head_size * itemsize


def read_draft_bytes(config: GenerateConfig, itemsize: int) -> tuple[int, int]:
    """Return the bytes of the weights of the draft model, and of its keys and values of a token; 0 without one.

    The head and the embedding of EAGLE and of prediction layers are the policy's.
    """
    drafts = config.drafts or {}
    folder = Path(str(drafts.get("model", ""))).expanduser()
    if "model" not in drafts or not (folder / "config.json").is_file():
        return 0, 0
    return read_weight_bytes(folder, itemsize), read_kv_bytes(folder, itemsize)


def read_weight_bytes(folder: Path, itemsize: int) -> int:
    """Return the bytes of the weights in a Hugging Face folder, by the sizes of its files, in a format of so many bytes."""
    stored = read_json(folder / "config.json")
    stored_size = 4 if "32" in str(stored.get("dtype", stored.get("torch_dtype", "float32"))) else 2
    files = [path for kind in ("*.safetensors", "*.bin") for path in folder.glob(kind)]
    return sum(path.stat().st_size for path in files) // stored_size * itemsize


def cpu_cache_bytes(config: GenerateConfig, kv_bytes_per_token: int, state_bytes: int = 0) -> int:
    """Return the cache's bytes on the CPU: from the run file, or for `max_num_seqs` full sequences and some spare blocks.

    Without a size in the run file they are at most 8 GiB.

    Args:
        kv_bytes_per_token: bytes per token of the full model's KV cache.
        state_bytes: size in bytes of the states of a sequence, in the full model.
    """
    if config.kv_cache_memory_gib is not None:
        return int(config.kv_cache_memory_gib * (1 << 30))
    blocks = (config.max_num_seqs + 2) * -(-config.max_model_len // _CPU_BLOCK_TOKENS) + 8
    # a block of keys and values is as large as a state, so that a sequence takes up to one state's bytes more
    states = 2 * (config.max_num_seqs + 2) * state_bytes
    derived = (blocks * _CPU_BLOCK_TOKENS * kv_bytes_per_token + states) // config.infer_tensor_parallel_size
    return min(derived, _MAX_DERIVED_BYTES)
