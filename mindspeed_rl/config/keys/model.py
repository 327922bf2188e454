"""Keys that describe a model; they normally come from a model block (`configs/model/<name>.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_rl.catalogue.records import Bounds
from mindspeed_rl.config.keys.schema import Range, key

# fmt: off
_ROPE = ("position_embedding_type", ("rope",))
_MLA = ("multi_latent_attention", (True,))
_LINEAR = ("linear_attention_freq", "set")
_LLAMA3, _YARN = ("rope_scaling_type", ("llama3",)), ("rope_scaling_type", ("yarn",))
_EXPERTS = ("num_experts", "set")
_PREDICTION = ("mtp_num_layers", "set")


@dataclass(frozen=True, kw_only=True)
class ModelKeys:
    """Shape of a decoder-only transformer."""

    model_type: str | None = key(None, "family of the model, as in config.json; a model block of images needs it, because no "
        "other key describes the tower", "模型族，同 config.json 中的写法；图像模型的模型块需要它，因为没有别的键描述视觉塔",
        on_resume="fixed")
    num_layers: int | None = key(None, "transformer layers, noop layers included", "transformer 层数，含 noop 层",
        range=Range.LAYERS, on_resume="fixed")
    hidden_size: int | None = key(None, "width of the residual stream", "残差流的宽度", range=Range.WIDTH,
        on_resume="fixed")
    ffn_hidden_size: int | None = key(None, "width inside the MLP", "MLP 内部的宽度", range=Range.WIDTH, on_resume="fixed")
    num_attention_heads: int | None = key(None, "query heads", "query 头数", range=Range.WIDTH, on_resume="fixed")
    kv_channels: int | None = key(None, "width of one head; hidden_size / num_attention_heads when unset",
        "每个头的宽度；不设时为 hidden_size / num_attention_heads", range=Range.WIDTH, on_resume="fixed")
    group_query_attention: bool = key(False, "fewer key/value heads than query heads", "key/value 头少于 query 头（GQA）",
        on_resume="fixed")
    num_query_groups: int = key(1, "key/value heads", "key/value 头数", range=Range.WIDTH,
        needs=("group_query_attention", (True,)), on_resume="fixed")
    untie_embeddings_and_output_weights: bool = key(False, "a separate output layer instead of the transposed embedding",
        "输出层单独成层，不用嵌入的转置", on_resume="fixed")
    add_qkv_bias: bool = key(False, "bias on the query/key/value projection (Qwen2.x)", "query/key/value 投影带偏置（Qwen2.x）",
        on_resume="fixed")
    disable_bias_linear: bool = key(False, "no bias on linear layers", "线性层不带偏置", on_resume="fixed")
    qk_layernorm: bool = key(False, "normalize queries and keys (Qwen3)", "对 query 和 key 做归一化（Qwen3）",
        on_resume="fixed")
    swiglu: bool = key(False, "gated MLP with SiLU", "用 SiLU 的门控 MLP", on_resume="fixed")
    normalization: Literal["LayerNorm", "RMSNorm"] = key("LayerNorm", "kind of normalization", "归一化的种类",
        on_resume="fixed")
    norm_epsilon: float = key(1e-5, "epsilon inside the normalization", "归一化内的 epsilon",
        range=Bounds(0, 1, excludes_low=True, default=1e-6), on_resume="exact")
    attention_dropout: float = key(0.0, "dropout on attention weights; published models have none",
        "注意力权重上的 dropout；公开模型均为 0", range=Range.FRACTION, on_resume="exact")
    hidden_dropout: float = key(0.0, "dropout on the residual branches; published models have none",
        "残差支路上的 dropout；公开模型均为 0", range=Range.FRACTION, on_resume="exact")

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = key("learned_absolute",
        "kind of position information", "位置信息的种类", on_resume="exact")
    rotary_base: int = key(10000, "base of the rotary frequencies", "旋转频率的底数", range=Bounds(1, 10**10), needs=_ROPE,
        on_resume="exact")
    rotary_percent: float | None = key(None, "part of a head's width that rotates; all of it when unset",
        "每个头中参与旋转的宽度比例；不设时为全部", range=Bounds(0, 1, excludes_low=True, default=0.25), needs=_ROPE,
        on_resume="exact")
    rope_scaling_type: Literal["llama3", "yarn", "linear", "plm", "longrope"] | None = key(None,
        "stretching of rotary frequencies for long sequences", "长序列时旋转频率如何拉伸", needs=_ROPE, on_resume="exact")
    rope_scaling_factor: float = key(1.0, "stretch factor", "拉伸倍数", range=Range.FACTOR, needs=_ROPE,
        on_resume="exact")
    low_freq_factor: float | None = key(None, "llama3 scaling: below it frequencies are divided",
        "llama3 缩放：低于它的频率会被除", range=Range.FACTOR, needs=_LLAMA3, on_resume="exact")
    high_freq_factor: float | None = key(None, "llama3 scaling: above it they stay", "llama3 缩放：高于它的频率不变",
        range=Range.FACTOR, needs=_LLAMA3, on_resume="exact")
    original_max_position_embeddings: int | None = key(None, "llama3 scaling: length the model was pretrained with",
        "llama3 缩放：模型预训练时的长度", range=Range.WIDTH, needs=_LLAMA3, on_resume="exact")
    beta_fast: int = key(32, "yarn: rotations above which a frequency stays", "yarn：转数高于它的频率不变",
        range=Bounds(0, 10**6), needs=_YARN, on_resume="exact")
    beta_slow: int = key(1, "yarn: rotations below which it is divided", "yarn：转数低于它的频率会被除", range=Bounds(0, 10**6),
        needs=_YARN, on_resume="exact")
    rope_scaling_mscale: float = key(1.0, "yarn: scale of the attention logits", "yarn：注意力 logits 的缩放",
        range=Bounds(0, 1e6), needs=_YARN, on_resume="exact")
    rope_scaling_mscale_all_dim: float = key(0.0, "yarn: the same for all dimensions", "yarn：同上，作用于所有维度",
        range=Bounds(0, 1e6), needs=_YARN, on_resume="exact")
    rope_scaling_original_max_position_embeddings: int | None = key(None, "yarn: length the model was pretrained with",
        "yarn：模型预训练时的长度", range=Range.WIDTH, needs=_YARN, on_resume="exact")

    multi_latent_attention: bool = key(False, "DeepSeek's low-rank attention (MLA)", "DeepSeek 的低秩注意力（MLA）",
        on_resume="fixed")
    q_lora_rank: int | None = key(None, "MLA: rank of the query projection; none when unset",
        "MLA：query 投影的秩；不设则不用低秩", range=Bounds(0, 10**7), needs=_MLA, on_resume="fixed")
    kv_lora_rank: int | None = key(None, "MLA: rank of the key/value projection", "MLA：key/value 投影的秩", range=Range.WIDTH,
        needs=_MLA, on_resume="fixed")
    qk_head_dim: int | None = key(None, "MLA: head width without rotary part", "MLA：不含旋转部分的头宽", range=Range.WIDTH,
        needs=_MLA, on_resume="fixed")
    qk_pos_emb_head_dim: int | None = key(None, "MLA: head width of the rotary part", "MLA：旋转部分的头宽", range=Range.WIDTH,
        needs=_MLA, on_resume="fixed")
    v_head_dim: int | None = key(None, "MLA: width of a value head", "MLA：value 头的宽度", range=Range.WIDTH, needs=_MLA,
        on_resume="fixed")

    linear_attention_freq: int | None = key(None,
        "hybrid models (Qwen3-Next, Qwen3.5): every so many-th layer has full attention, the others gated delta nets",
        "混合模型（Qwen3-Next、Qwen3.5）：每隔多少层有一层全注意力，其余为 gated delta net", range=Bounds(2, 10**4),
        on_resume="fixed")
    linear_conv_kernel_dim: int = key(4, "delta nets: tokens that the convolution sees", "delta net：卷积覆盖的 token 数",
        range=Bounds(1, 10**4), needs=_LINEAR, on_resume="fixed")
    linear_key_head_dim: int = key(128, "delta nets: width of a query or key head", "delta net：query、key 头的宽度",
        range=Range.WIDTH, needs=_LINEAR, on_resume="fixed")
    linear_value_head_dim: int = key(128, "delta nets: width of a value head", "delta net：value 头的宽度", range=Range.WIDTH,
        needs=_LINEAR, on_resume="fixed")
    linear_num_key_heads: int = key(16, "delta nets: query and key heads", "delta net：query、key 头数", range=Range.WIDTH,
        needs=_LINEAR, on_resume="fixed")
    linear_num_value_heads: int = key(32, "delta nets: value heads", "delta net：value 头数", range=Range.WIDTH, needs=_LINEAR,
        on_resume="fixed")

    num_experts: int | None = key(None, "experts of a MoE layer; dense when unset", "MoE 层的专家数；不设为稠密模型",
        range=Range.EXPERTS, on_resume="fixed")
    n_shared_experts: int | None = key(None, "experts every token goes through", "每个 token 都经过的共享专家数",
        range=Bounds(0, 10**5), needs=_EXPERTS, on_resume="fixed")
    moe_ffn_hidden_size: int | None = key(None, "width inside one expert; ffn_hidden_size when unset",
        "单个专家内部的宽度；不设时为 ffn_hidden_size", range=Range.WIDTH, needs=_EXPERTS, on_resume="fixed")
    moe_router_topk: int = key(2, "experts a token goes to", "每个 token 去往的专家数", range=Range.EXPERTS,
        needs=_EXPERTS, on_resume="exact")
    first_k_dense_replace: int | None = key(None, "leading layers that stay dense", "开头保持稠密的层数",
        range=Bounds(0, 10000), needs=_EXPERTS, on_resume="fixed")
    norm_topk_prob: bool = key(False, "expert weights of a token sum to one", "一个 token 的专家权重之和归一",
        needs=_EXPERTS, on_resume="exact")
    seq_aux: bool = key(False, "load balancing loss for each sequence instead of each batch", "负载均衡损失按序列而不按批计算",
        needs=_EXPERTS, on_resume="exact")
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "sinkhorn", "none", "softmax_topk", "noaux_tc"] = key(
        "aux_loss", "balancing of the router", "路由如何均衡", needs=_EXPERTS, on_resume="exact")
    moe_router_num_groups: int | None = key(None, "groups the experts form", "专家分成的组数", range=Range.EXPERTS,
        needs=_EXPERTS, on_resume="exact")
    moe_router_group_topk: int | None = key(None, "groups a token may use", "一个 token 可用的组数", range=Range.EXPERTS,
        needs=_EXPERTS, on_resume="exact")
    moe_router_topk_scaling_factor: float | None = key(None, "factor on the expert weights", "专家权重的系数",
        range=Bounds(0, 1e6), needs=_EXPERTS, on_resume="exact")
    moe_router_score_function: Literal["softmax", "sigmoid"] = key("softmax", "function from router logits to scores",
        "由路由 logits 得到分数的函数", needs=_EXPERTS, on_resume="exact")
    moe_router_enable_expert_bias: bool = key(False, "balance by a bias on the choice instead of a loss",
        "用选择时的偏置而不用损失来均衡", needs=_EXPERTS, on_resume="fixed")
    moe_router_bias_update_rate: float = key(1e-3,
        "size of the step that this bias makes after an optimizer step, towards experts with few tokens; 0 leaves it as it is",
        "每个优化器步之后该偏置朝 token 较少的专家移动的步长；0 表示不更新", range=Bounds(0, 10), on_resume="exact")
    moe_aux_loss_coeff: float | None = key(None, "weight of the balancing loss; unset: as in the model's config.json, or 0",
        "均衡损失的权重；不设时取模型 config.json 中的值，没有则为 0", range=Bounds(0, 1e6), needs=_EXPERTS, on_resume="exact")
    moe_z_loss_coeff: float = key(0.0, "weight of the router's z-loss, which keeps its logits small",
        "路由 z-loss 的权重，用来抑制路由 logits 变大", range=Bounds(0, 1e6), needs=_EXPERTS, on_resume="exact")
    mtp_num_layers: int = key(0, "multi-token-prediction layers of the checkpoint that train; 0 leaves them out",
        "构建并训练检查点中的多少个多 token 预测（MTP）层；0 表示不加载", range=Bounds(0, 100), on_resume="fixed")
    mtp_loss_scaling_factor: float = key(0.1, "weight of the loss of the multi-token-prediction layers, a mean over them",
        "MTP 层损失的权重，损失对各层取平均", range=Bounds(0, 1e6), needs=_PREDICTION, on_resume="exact")
    mtp_detach_heads: bool | None = key(None,
        "their loss trains only these layers, not the model before them; unset: true in RL, false in supervised stages",
        "MTP 损失只训练 MTP 层，不影响主干；不设时 RL 为 true，监督阶段为 false", needs=_PREDICTION, on_resume="exact")
    dsa_indexer_loss_coeff: float = key(0.0,
        "weight of the loss that trains the indexers of sparse attention; 0 leaves them as they are",
        "稀疏注意力 indexer 的训练损失的权重；0 表示冻结 indexer", range=Bounds(0, 1e6), on_resume="fixed")
    moe_grouped_gemm: bool = key(False, "all experts of a device in one grouped product",
        "一个设备上的所有专家合成一次分组矩阵乘", needs=_EXPERTS, on_resume="exact")
    moe_permutation_async_comm: bool = key(False, "overlap token permutation with communication", "token 重排与通信重叠",
        needs=_EXPERTS, only_on="npu", on_resume="exact")
    moe_alltoall_overlap_comm: bool = key(False, "overlap expert computation with all-to-all", "专家计算与 all-to-all 重叠",
        needs=_EXPERTS, only_on="npu", on_resume="exact")
    use_fused_moe_token_permute_and_unpermute: bool | None = key(None,
        "fused kernels that permute tokens between experts; unset: on, but for the dispatcher allgather, which has none",
        "专家之间重排 token 的融合算子；不设为开启，allgather 没有这种算子，除外", only_on="npu",
        elsewhere="moe_permute_fusion", on_resume="exact")
    moe_token_dispatcher_type: Literal["alltoall", "alltoall_seq", "allgather"] | None = key(None,
        "exchange of tokens between experts; alltoall_seq is read as alltoall",
        "token 如何到达专家；alltoall_seq 按 alltoall 处理", needs=_EXPERTS, on_resume="exact")
