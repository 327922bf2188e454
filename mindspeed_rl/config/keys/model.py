"""Keys that describe a network; they normally come from a model block (`configs/model/<name>.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_rl.config.keys.schema import key

_ROPE = ("position_embedding_type", ("rope",))
_MLA = ("multi_latent_attention", (True,))


@dataclass(kw_only=True)
class ModelKeys:
    """Shape of a decoder-only transformer."""

    num_layers: int | None = key(None, "transformer layers, noop layers included")
    hidden_size: int | None = key(None, "width of the residual stream")
    ffn_hidden_size: int | None = key(None, "width inside the MLP")
    num_attention_heads: int | None = key(None, "query heads")
    kv_channels: int | None = key(None, "width of one head; hidden_size / num_attention_heads when unset")
    group_query_attention: bool = key(False, "fewer key/value heads than query heads")
    num_query_groups: int = key(1, "key/value heads", needs=("group_query_attention", (True,)))
    untie_embeddings_and_output_weights: bool = key(False, "a separate output layer instead of the transposed embedding")
    add_qkv_bias: bool = key(False, "bias on the query/key/value projection (Qwen2.x)")
    attention_bias: bool = key(
        False,
        "bias on all attention projections",
        no_effect="no supported model has one; add_qkv_bias is the one that Qwen has",
    )
    disable_bias_linear: bool = key(False, "no bias on linear layers")
    qk_layernorm: bool = key(False, "normalize queries and keys (Qwen3)")
    swiglu: bool = key(False, "gated MLP with SiLU")
    normalization: Literal["LayerNorm", "RMSNorm"] = key("LayerNorm", "kind of normalization")
    norm_epsilon: float = key(1e-5, "epsilon inside the normalization")
    init_method_std: float = key(
        0.02, "standard deviation of fresh weights", no_effect="every weight is loaded, and a fresh score head starts from 0"
    )
    attention_dropout: float = key(0.0, "dropout on attention weights; published models have none")
    hidden_dropout: float = key(0.0, "dropout on the residual branches; published models have none")
    max_position_embeddings: int | None = key(
        None, "longest sequence the positions reach, in tokens", no_effect="rotary positions have no end"
    )

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = key(
        "learned_absolute", "kind of position information"
    )
    rotary_base: int = key(10000, "base of the rotary frequencies", needs=_ROPE)
    rope_scaling_type: Literal["llama3", "yarn", "linear", "plm", "longrope"] | None = key(
        None, "how rotary frequencies are stretched for long sequences", needs=_ROPE
    )
    rope_scaling_factor: float = key(1.0, "stretch factor", needs=_ROPE)
    low_freq_factor: float | None = key(
        None, "llama3 scaling: below it frequencies are divided", needs=("rope_scaling_type", ("llama3",))
    )
    high_freq_factor: float | None = key(None, "llama3 scaling: above it they stay", needs=("rope_scaling_type", ("llama3",)))
    original_max_position_embeddings: int | None = key(
        None, "llama3 scaling: length the model was pretrained with", needs=("rope_scaling_type", ("llama3",))
    )
    beta_fast: int = key(32, "yarn: rotations above which a frequency stays", needs=("rope_scaling_type", ("yarn",)))
    beta_slow: int = key(1, "yarn: rotations below which it is divided", needs=("rope_scaling_type", ("yarn",)))
    rope_scaling_mscale: float = key(1.0, "yarn: scale of the attention logits", needs=("rope_scaling_type", ("yarn",)))
    rope_scaling_mscale_all_dim: float = key(0.0, "yarn: the same for all dimensions", needs=("rope_scaling_type", ("yarn",)))
    rope_scaling_original_max_position_embeddings: int | None = key(
        None, "yarn: length the model was pretrained with", needs=("rope_scaling_type", ("yarn",))
    )

    multi_latent_attention: bool = key(False, "DeepSeek's low-rank attention (MLA)")
    q_lora_rank: int | None = key(None, "MLA: rank of the query projection; none when unset", needs=_MLA)
    kv_lora_rank: int | None = key(None, "MLA: rank of the key/value projection", needs=_MLA)
    qk_head_dim: int | None = key(None, "MLA: head width without rotary part", needs=_MLA)
    qk_pos_emb_head_dim: int | None = key(None, "MLA: head width of the rotary part", needs=_MLA)
    v_head_dim: int | None = key(None, "MLA: width of a value head", needs=_MLA)

    num_experts: int | None = key(None, "experts of a MoE layer; dense when unset")
    n_shared_experts: int | None = key(None, "experts every token goes through")
    moe_ffn_hidden_size: int | None = key(None, "width inside one expert; ffn_hidden_size when unset")
    moe_router_topk: int = key(2, "experts a token goes to")
    first_k_dense_replace: int | None = key(None, "leading layers that stay dense")
    moe_layer_freq: int | list[int] | str | None = key(
        None,
        "every how many layers experts come, or one 0/1 for each layer",
        no_effect="config.json says which layers have experts",
    )
    norm_topk_prob: bool = key(False, "expert weights of a token sum to one")
    seq_aux: bool = key(False, "load balancing loss for each sequence instead of each batch")
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "sinkhorn", "none", "softmax_topk", "noaux_tc"] = key(
        "aux_loss", "how the router is balanced"
    )
    moe_router_num_groups: int | None = key(None, "groups the experts form")
    moe_router_group_topk: int | None = key(None, "groups a token may use")
    moe_router_topk_scaling_factor: float | None = key(None, "factor on the expert weights")
    moe_router_score_function: Literal["softmax", "sigmoid"] = key("softmax", "from router logits to scores")
    moe_router_enable_expert_bias: bool = key(False, "balance by a bias on the choice instead of a loss")
    moe_aux_loss_coeff: float = key(0.001, "weight of the balancing loss")
    moe_grouped_gemm: bool = key(False, "all experts of a device in one grouped product")
    moe_permutation_async_comm: bool = key(False, "overlap token permutation with communication", only_on=("npu",))
    moe_alltoall_overlap_comm: bool = key(False, "overlap expert computation with all-to-all", only_on=("npu",))
    use_fused_moe_token_permute_and_unpermute: bool = key(False, "fused permutation kernels", only_on=("npu",))
    moe_token_dispatcher_type: Literal["alltoall", "alltoall_seq", "allgather"] | None = key(
        None, "how tokens reach their experts; alltoall_seq is taken as alltoall"
    )
