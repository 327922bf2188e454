"""Keys of upstream that are accepted, and checked for their type, although they do nothing here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

#: the same text in English and Chinese
Text = tuple[str, str]


#: the type of a key whose value is a group with names of another program
AnyGroup = Mapping[str, object]


@dataclass(frozen=True)
class IgnoredKey:
    """One key without effect: type, default and meaning in MindSpeed-RL, and the reason why it does nothing here."""

    kind: object
    default: object
    doc: str
    zh: str
    reason: Text


# fmt: off
_TOWER = ("the image encoder is a part of the model that reads its features", "图像编码器是读取其特征的模型的一部分")
_BY_STAGE = ("the stage decides the row layout", "行的形式由阶段决定")
_FUSED = ("always fused on the NPU; elsewhere the plain form computes the same", "NPU 上总是融合；其他平台用普通形式，结果相同")

#: class of a group -> name -> key
IGNORED: dict[str, dict[str, IgnoredKey]] = {
    "RLConfig": {
        "vit_forward_micro_batch_size":
            IgnoredKey(int | None, None, "images of one encoder pass", "编码器一次的图像数", _TOWER),
        "actor_image_embeds_dispatch_size": IgnoredKey(int | None, None, "rows encoded at once", "一次编码的行数", _TOWER),
        "require_max_age_all_finished": IgnoredKey(bool, True, "finish the oldest partial responses", "把最老的未完回答生成完",
            ("every response ends within partial_rollout_max_split rollouts",
             "每个回答在 partial_rollout_max_split 次 rollout 内都会结束")),
        "num_samples_per_step": IgnoredKey(int, 1, "unused", "未使用",
            ("the rollout engine schedules by itself", "推理引擎自行调度")),
        "log_entropy": IgnoredKey(bool, False, "log the entropy even when it is not in the loss", "即使熵不在损失中也记录",
            ("always logged, computed together with the log-probabilities", "总是记录，与对数概率一起计算")),
        "vit_resource": IgnoredKey(AnyGroup | None, None, "devices of an image encoder", "图像编码器的设备", _TOWER),
        "async_engine": IgnoredKey(bool, False, "asynchronous rollout engine", "异步推理引擎",
            ("the engine takes one request at a time in both cases", "无论怎样，引擎都逐个接收请求")),
        "transfer_queue_data_shard_port_base": IgnoredKey(int | None, None, "first port", "第一个端口",
            ("free ports are taken", "自动取空闲端口")),
        "zmq_communication": IgnoredKey(bool, True, "send rows inside a replica over sockets", "副本内部用套接字发送行",
            ("rows are broadcast over the process group", "行在进程组内广播")),
        "reuse_image_embeds": IgnoredKey(bool, False, "encode images once", "图像只编码一次",
            ("features of a frozen encoder are always kept", "编码器冻结时，其特征总会保留")),
        "colocate_actor_and_vit": IgnoredKey(bool, False, "share the image encoder's devices", "与图像编码器共享设备", _TOWER),
        "num_cpus_for_local_task": IgnoredKey(float, 1.0, "CPUs Ray reserves for the driver", "Ray 为驱动进程保留的 CPU 数",
            ("the driver is not a Ray task and reserves none", "驱动进程不是 Ray 任务，不保留 CPU")),
        "tp_split_expert": IgnoredKey(bool, False, "unused", "未使用",
            ("expert_tensor_parallel_size decides", "由 expert_tensor_parallel_size 决定")),
    },
    "MegatronConfig": {
        "num_workers": IgnoredKey(int, 2, "loader processes of a data-parallel rank", "每个数据并行 rank 的读取进程数",
            ("rows are read from mapped memory, without loader processes", "行从内存映射读取，没有读取进程")),
        "dataloader_type": IgnoredKey(Literal["single", "cyclic", "external"] | None, None, "order of reading", "读取顺序",
            ("no_shuffle and seed decide the order", "顺序由 no_shuffle 与 seed 决定")),
        "tokenizer_type": IgnoredKey(str | None, None, "kind of tokenizer", "tokenizer 的种类",
            ("tokenizers are Hugging Face folders (PretrainedFromHF)", "tokenizer 是 Hugging Face 文件夹（PretrainedFromHF）")),
        "tokenizer_padding_side": IgnoredKey(Literal["left", "right"], "right", "side of padding", "填充在哪一侧",
            ("the engine packs or pads on the right", "引擎打包，或在右侧填充")),
        "vocab_extra_ids": IgnoredKey(int, 0, "ids added to the tokenizer", "给 tokenizer 追加的 id 数",
            ("the vocabulary is the model's", "词表取自模型")),
        "make_vocab_size_divisible_by": IgnoredKey(int, 128, "pads the vocabulary to a multiple", "把词表填充到其倍数",
            ("padded to padded_vocab_size, or as tensor parallelism needs it", "填充到 padded_vocab_size，或按张量并行所需")),
        "is_instruction_dataset": IgnoredKey(bool, False, "rows are prompt and answer", "每行是 prompt 与回答", _BY_STAGE),
        "is_pairwise_dataset": IgnoredKey(bool, False, "rows are chosen and rejected", "每行是 chosen 与 rejected", _BY_STAGE),
        "variable_seq_lengths": IgnoredKey(bool, False, "each micro-batch keeps its length", "各 micro-batch 保持自己的长度",
            ("sequences always keep their length", "序列总是保持自己的长度")),
        "pad_to_multiple_of": IgnoredKey(int, 1, "multiple to which every sequence is padded", "每条序列填充到其倍数",
            ("derived: tensor x context parallel size", "推导得出：张量并行数 x 上下文并行数")),
        "attention_mask_type": IgnoredKey(
            Literal["causal", "general"], "causal", "mask form of the fused attention", "融合注意力的掩码形式",
            ("always causal, inside each sample of a pack", "总是因果的，在打包的每个样本之内")),
        "distributed_backend": IgnoredKey(str, "nccl", "collective library", "集合通信库",
            ("the platform decides: hccl, gloo or nccl", "由平台决定：hccl、gloo 或 nccl")),
        "initial_loss_scale": IgnoredKey(float, 2.0**32, "loss scale", "损失缩放",
            ("only fp16 needs a loss scale; bf16 and fp32 do not", "只有 fp16 需要损失缩放；bf16 与 fp32 不需要")),
        "accumulate_allreduce_grads_in_fp32": IgnoredKey(bool, False, "sum gradients in fp32", "以 fp32 累加梯度",
            ("gradients are summed in fp32, unless grad_reduce_in_fp32 is false",
             "梯度以 fp32 累加，除非 grad_reduce_in_fp32 为 false")),
        "no_gradient_accumulation_fusion": IgnoredKey(bool, False, "no fused gradient accumulation", "不用融合的梯度累加",
            ("only gemm_gradient_accumulation_fusion fuses it", "只有 gemm_gradient_accumulation_fusion 会融合")),
        "enable_high_availability": IgnoredKey(bool, False, "MindIO training recovery", "MindIO 训练恢复",
            ("checkpoints and resume cover restarts", "检查点与续跑已覆盖重启")),
        "no_shared_storage": IgnoredKey(
            bool, False, "each node builds the dataset index on its local disk", "每个节点在自己的盘上建数据索引",
            ("the order is computed; no index file is built", "顺序由计算得出，不建索引文件")),
        "lora_fusion": IgnoredKey(bool, False, "overlap adapter communication", "重叠适配器的通信",
            ("adapters exchange lora_r numbers a token, nothing to overlap", "适配器每个 token 只交换 lora_r 个数")),
        "use_flash_attn": IgnoredKey(bool, False, "fused attention", "融合注意力", _FUSED),
        "use_rotary_position_embeddings": IgnoredKey(bool, False, "rotary positions", "旋转位置编码",
            ("position_embedding_type decides", "由 position_embedding_type 决定")),
        "use_fused_rmsnorm": IgnoredKey(bool, False, "fused RMSNorm", "融合的 RMSNorm", _FUSED),
        "use_fused_swiglu": IgnoredKey(bool, False, "fused SwiGLU", "融合的 SwiGLU", _FUSED),
        "use_fused_rotary_pos_emb": IgnoredKey(bool, False, "fused rotary embedding", "融合的旋转编码", _FUSED),
        "no_bias_dropout_fusion": IgnoredKey(bool, False, "no fused bias and dropout", "不融合偏置与 dropout",
            ("they are never fused", "从不融合")),
        "no_masked_softmax_fusion": IgnoredKey(bool, False, "no fused masked softmax", "不融合带掩码的 softmax",
            ("the attention of no platform has a separate masked softmax", "各平台的注意力都没有单独的带掩码 softmax")),
        "attention_softmax_in_fp32": IgnoredKey(bool, False, "attention softmax in fp32", "注意力的 softmax 用 fp32",
            ("the attention of every platform computes it in fp32", "各平台的注意力都以 fp32 计算")),
        "use_cp_send_recv_overlap": IgnoredKey(
            bool, False, "ring attention: overlap sending and receiving", "环形注意力：收发重叠",
            ("the ring always overlaps them with attention", "环总是与注意力重叠")),
        "shape_order": IgnoredKey(
            Literal["SBH", "BSH", "BSND", "BNSD", "TND"], "SBH", "memory order of the fused attention", "融合注意力的内存顺序",
            ("packed rows are TND, padded ones BSND", "打包的行为 TND，填充的行为 BSND")),
        "spec": IgnoredKey(list[str] | None, None, "module and function of a layer spec", "层规格的模块与函数",
            ("the keys of the model choose the layers", "层由模型的键选定")),
        "use_mcore_models": IgnoredKey(bool, False, "Megatron-core models", "Megatron-core 模型",
            ("models of engine megatron are Megatron-core's", "megatron 引擎的模型就是 Megatron-core 的")),
        "transformer_impl": IgnoredKey(Literal["local", "transformer_engine"], "local", "layer implementation", "层的实现",
            ("always local layers", "总是 local 层")),
        "mm_model": IgnoredKey(str | None, None, "JSON of a multimodal model", "多模态模型的 JSON",
            ("config.json of the model describes it", "由模型的 config.json 描述")),
        "algorithm": IgnoredKey(str | None, None, "unused name of an algorithm", "未使用的算法名",
            ("adv_estimator and loss_type decide", "由 adv_estimator 与 loss_type 决定")),
        "do_sample": IgnoredKey(bool, False, "sample instead of greedy", "采样而不是贪心",
            ("sampling_config decides", "由 sampling_config 决定")),
        "use_kv_cache": IgnoredKey(bool, False, "keep keys and values while generating", "生成时保留 key 与 value",
            ("the rollout engine always does", "推理引擎总是如此")),
        "log_throughput": IgnoredKey(bool, False, "log floating point operations", "记录浮点运算量",
            ("throughput is always logged", "吞吐总是记录")),
        "attention_bias": IgnoredKey(bool, False, "bias on all attention projections", "所有注意力投影都带偏置",
            ("no supported model has one; Qwen's bias is add_qkv_bias", "支持的模型都没有；Qwen 的是 add_qkv_bias")),
        "init_method_std": IgnoredKey(float, 0.02, "standard deviation of new weights", "新建权重的标准差",
            ("every weight is loaded, and a new score head starts from 0", "所有权重都从文件读取，新的打分头从 0 开始")),
        "max_position_embeddings": IgnoredKey(
            int | None, None, "longest sequence the positions reach, in tokens", "位置编码能到的最长序列，单位 token",
            ("rotary positions have no end", "旋转位置没有终点")),
        "moe_layer_freq": IgnoredKey(
            int | list[int] | str | None, None, "distance between layers with experts, or one 0/1 for each layer",
            "每隔多少层有专家，或逐层的 0/1", ("config.json decides which layers do", "哪些层有专家由 config.json 决定")),
    },
    "SamplingConfig": {
        "logprobs": IgnoredKey(
            int | None, 1, "log-probabilities returned for each generated token", "每个生成的 token 返回几个对数概率",
            ("always the sampled token's, and no other", "总是只返回所采样 token 的对数概率")),
        "detokenize": IgnoredKey(bool, False, "let the engine also turn tokens into text", "让引擎也把 token 变成文本",
            ("responses stay token ids; text is decoded where it is needed", "回答保持为 token id；需要文本时再解码")),
    },
    "GenerateConfig": {
        "data_parallel_size": IgnoredKey(
            int | None, None, "derived: devices / infer_tensor_parallel_size", "推导得出：设备数 / infer_tensor_parallel_size",
            ("the plan derives it", "由批计划推导")),
        "num_scheduler_steps": IgnoredKey(int, 1, "engine steps between two schedules", "两次调度之间的引擎步数",
            ("the engine's V1 scheduler has no such step", "引擎的 V1 调度器没有这种步")),
        "tokenizer_name_or_path": IgnoredKey(str | None, None, "folder of a tokenizer", "tokenizer 的文件夹",
            ("the tokenizer of megatron_training is used", "使用 megatron_training 的 tokenizer")),
        "torchair_graph": IgnoredKey(bool, False, "torchair graphs in vllm-ascend", "vllm-ascend 的 torchair 图",
            ("vllm-ascend has none since 0.18; enforce_eager: false captures graphs",
             "vllm-ascend 自 0.18 起没有；enforce_eager: false 会捕获图")),
        "ascend_scheduler_config_enabled": IgnoredKey(
            bool, True, "vllm-ascend's scheduler instead of chunked prefill", "用 vllm-ascend 的调度器，而不用分块预填充",
            ("vllm-ascend has none since 0.18; max_num_batched_tokens bounds a step of vLLM",
             "vllm-ascend 自 0.18 起没有；vLLM 一步的上限是 max_num_batched_tokens")),
    },
}
