"""The groups `megatron_training`, `actor_config`, `ref_config`, `reward_config`, `critic_config`: one schema for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from mindspeed_rl.catalogue.records import Bounds
from mindspeed_rl.config.keys.ignored import AnyGroup
from mindspeed_rl.config.keys.model import ModelKeys
from mindspeed_rl.config.keys.schema import Range, key

_RLStage = Literal["ray_grpo", "ray_dapo", "ray_ppo"]
_SupervisedStage = Literal["pretrain", "sft", "dpo", "simpo", "cpo", "orpo", "kto", "orm", "prm"]
RL_STAGES: tuple[_RLStage, ...] = get_args(_RLStage)
SUPERVISED_STAGES: tuple[_SupervisedStage, ...] = get_args(_SupervisedStage)
#: probabilities of dropout; in RL they act only with `rl_config.dropout_in_update`
DROPOUT_KEYS = ("attention_dropout", "hidden_dropout", "lora_dropout")
_OWN_ARGUMENTS = "it reads arguments at run time that only Megatron-LM's own training program sets"
#: features of MindSpeed core_r0.16.0 that are left off, and why: they change speed and memory, not results
LEFT_OFF_FEATURES = {
    "swap_attention": "its hooks are set only by Megatron-LM's own training program, and read its arguments at run time; "
    "recompute_granularity frees this memory by computing it again",
    "use_ascend_coc": f"{_OWN_ARGUMENTS}; products of tensor parallelism wait for their collectives",
    "moe_alltoall_overlap_comm": f"{_OWN_ARGUMENTS}; the exchange of experts' tokens is not hidden behind computation",
}
#: (key, another key, the value that it needs there where MindSpeed trains, reason)
NEEDED_BY_MINDSPEED = (
    ("swap_optimizer", "use_distributed_optimizer", True, "MindSpeed swaps only the state of the distributed optimizer"),
    ("swap_optimizer", "reuse_fp32_param", False, "it brings float32 weights to the device, and no half of them"),
    ("swap_optimizer", "grad_reduce_in_fp32", True, "MindSpeed's step reads all gradients in fp32"),
    ("gemm_gradient_accumulation_fusion", "bf16", True, "its operator multiplies 16-bit numbers"),
    ("use_ascend_mc2", "bf16", True, "its operators multiply 16-bit numbers"),
    ("gemm_gradient_accumulation_fusion", "grad_reduce_in_fp32", True, "its operator adds to fp32 sums"),
)
# Megatron-core's names of a layer's linear modules
LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

#: modules that selective recomputation supports
_RecomputedModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
_SUPERVISED = " ".join(SUPERVISED_STAGES)
#: stages whose evaluations generate
_GENERATING = " ".join((*RL_STAGES, "sft"))
_MUON = ("optimizer", ("muon",))
_DECAYING = ("lr_decay_style", ("linear", "cosine", "inverse-square-root", "WSD"))
# fmt: off


@dataclass(frozen=True, kw_only=True)
class _DataColumns:
    """Columns of raw data; without a name the handler's column is read, an empty name switches the column off."""

    prompt: str | None = key(None, "column of the question, or of the chat messages", "问题或对话消息所在的列",
        elsewhere="prompt_key input_key", on_resume="order")
    query: str | None = key(None, "column appended to the question", "接在问题之后的列", on_resume="order")
    response: str | None = key(None, "column of the reference answer", "参考答案的列", elsewhere="label_key",
        on_resume="order")
    system: str | None = key(None, "column of the system prompt", "system prompt 的列", on_resume="order")
    history: str | None = key(None, "column of earlier [question, answer] pairs", "先前 [问, 答] 对的列", on_resume="order")
    messages: str | None = key(None, "column of the conversation, or of the messages before both answers",
        "对话（或两个回答之前的消息）所在的列", on_resume="order")
    tools: str | None = key(None, "supervised stages: column of the schemas of tools", "监督阶段：工具 schema 所在的列",
        on_resume="order")
    chosen: str | None = key(None, "pairs: column of the better answer", "成对数据：较好回答所在的列", on_resume="order")
    rejected: str | None = key(None, "pairs: column of the worse answer", "成对数据：较差回答所在的列", on_resume="order")
    label: str | None = key(None, "kto: column of whether the answer is desirable", "kto：回答是否可取所在的列",
        on_resume="order")
    text: str | None = key(None, "pretrain: column of the document", "pretrain：文档所在的列", on_resume="order")


@dataclass(frozen=True, kw_only=True)
class _DataKeys:
    """Data, tokenizer and sample layout."""

    data_path: str | list[str | float] | None = key(None,
        "raw data: a file, a folder, a.jsonl,b.jsonl or hf://owner/name (ms:// for ModelScope), followed by [start:stop] or "
        "#count where a part is read; or the prefix of an indexed dataset. In pretrain a list alternates weights and data",
        "原始数据：文件、文件夹、a.jsonl,b.jsonl 或 hf://owner/name（ModelScope 为 ms://），其后可加 [start:stop] 或 #count；"
        "也可以是索引数据集的前缀。pretrain 阶段的列表为权重与数据交替",
        elsewhere="dataset dataset_name prompt_data train_files",
        upstream=("reads indexed datasets only", "只读索引数据集"), on_resume="order")
    eval_data_path: str | None = key(None, "held-out data, raw or a prefix; unset: the part that split holds back, if any",
        "留出数据：原始数据或前缀；不设时为 split 留出的部分（如有）",
        elsewhere="val_dataset eval_dataset val_files eval_prompt_data", on_resume="exact")
    eval_num_prompts: int | None = key(None, "held-out prompts of one evaluation; all when unset",
        "一次评测用的留出 prompt 数；不设为全部", range=Range.ROWS, on_resume="exact")
    split: str | None = key(None, "fractions of training, validation and test, for example 100,0,0; only the first trains",
        "训练、验证、测试的份额，例如 100,0,0；只有第一份参与训练", on_resume="order")
    dataset_additional_keys: list[str] = key([], "further dataset columns that travel with a sample, normally [labels]",
        "随样本一起走的其他数据列，通常为 [labels]", on_resume="exact")
    full_shuffle_instruction_dataset: bool = key(False, "shuffle over all epochs at once instead of inside each",
        "把所有轮次合在一起打乱，而不是每轮内部打乱", stages="sft dpo simpo cpo orpo kto orm prm", on_resume="order")
    no_shuffle: bool = key(False, "read the dataset in file order", "按文件顺序读取数据", on_resume="order")
    tokenizer_name_or_path: str | None = key(None, "folder of a Hugging Face tokenizer", "Hugging Face tokenizer 的文件夹",
        elsewhere="tokenizer_path", on_resume="order")
    tokenizer_not_use_fast: bool = key(False, "take the slow Python tokenizer", "用较慢的 Python tokenizer",
        on_resume="order")
    padded_vocab_size: int | None = key(None, "rows of the embedding; the model's vocabulary when unset",
        "嵌入的行数；不设时为模型的词表大小", range=Range.WIDTH, on_resume="fixed")
    prompt_type: str | None = key(None, "chat template of raw data", "原始数据所用的对话模板",
        elsewhere="chat_template template", on_resume="order")
    prompt_type_path: str = key("configs/model/templates.json", "file with further chat templates", "放有其他对话模板的文件",
        on_resume="order")
    map_keys: _DataColumns | None = key(None, "raw data: columns by preprocessing's names, {prompt: question, query: ''}",
        "原始数据：按预处理的名字给出列名，{prompt: question, query: ''}", on_resume="order")
    handler_name: str | None = key(None, "raw data: the handler that reads it; found by the columns when unset",
        "原始数据：读取它的 handler；不设时按列名判断", on_resume="order")
    enable_thinking: bool | None = key(None,
        "raw data: thinking mode of the chat template; the template's default when unset",
        "原始数据：对话模板是否开启思考；不设时随模板默认", on_resume="order")
    chat_template_kwargs: AnyGroup | None = key(None,
        "further arguments of the tokenizer's chat template (prompt_type hf), by the names that it reads, for raw data and "
        "the turns of agents: {enable_thinking: false}",
        "tokenizer 自带对话模板（prompt_type 为 hf）的其他参数，用于原始数据与智能体的各轮，名称以模板为准："
        "{enable_thinking: false}", elsewhere="apply_chat_template_kwargs data.apply_chat_template_kwargs", on_resume="order")
    system_prompt: str | None = key(None, "raw prompts: system prompt of every row that has none",
        "原始 prompt：行中没有 system prompt 时所用的 system prompt", elsewhere="system default_system", on_resume="order")
    on_bad_row: Literal["error", "skip"] = key("error", "raw data: reaction to a malformed row",
        "原始数据：遇到格式错误的行怎么办", on_resume="order")
    append_eod: bool = key(False,
        "raw data of supervised stages: an end token after each document, and after each sample without one",
        "监督阶段的原始数据：在每篇文档、以及没有结束符的样本之后加上结束 token",
        stages="pretrain sft dpo simpo cpo orpo kto orm", on_resume="order")
    image_folder: str | None = key(None, "raw data: folder of images with relative paths; unset: the working directory",
        "原始数据：相对路径的图像所在的文件夹；不设时为当前目录", elsewhere="image_dir media_dir", on_resume="order")
    min_pixels: int | None = key(None,
        "smaller images are enlarged to this area, in pixels; unset: the limit of the model's processor",
        "更小的图像放大到这一像素数；不设时用模型自带的下限", range=Range.TOKENS, on_resume="order")
    max_pixels: int | None = key(None,
        "larger images are reduced to this area, in pixels; unset: the limit of the model's processor",
        "更大的图像缩小到这一像素数；不设时用模型自带的上限", range=Range.TOKENS, elsewhere="image_max_pixels",
        on_resume="order")
    video_fps: float | None = key(None,
        "frames of a video that are sampled in a second, where its row has no fps; unset: the rate of the model's processor",
        "视频每秒采样的帧数，行中的视频自带 fps 时除外；不设时用模型自带的值", range=Range.POSITIVE, on_resume="order")
    video_min_frames: int | None = key(None,
        "fewest frames of a video that are sampled; unset: min_frames of the model's processor",
        "一个视频最少采样的帧数；不设时用模型自带的 min_frames", range=Range.TOKENS, on_resume="order")
    video_max_frames: int | None = key(None,
        "most frames of a video that are sampled; unset: max_frames of the model's processor",
        "一个视频最多采样的帧数；不设时用模型自带的 max_frames", range=Range.TOKENS, elsewhere="video_maxlen",
        on_resume="order")
    video_min_pixels: int | None = key(None,
        "smaller frames are enlarged to this area, in pixels of a frame (Qwen2.5-VL) or of all frames together (Qwen3-VL, "
        "Qwen3.5); unset: the limit of the model's processor",
        "更小的帧放大到这一像素数：Qwen2.5-VL 为每帧，Qwen3-VL、Qwen3.5 为全部帧之和；不设时用模型自带的下限",
        range=Range.TOKENS, on_resume="order")
    video_max_pixels: int | None = key(None,
        "larger frames are reduced to this area, in pixels of a frame (Qwen2.5-VL) or of all frames together (Qwen3-VL, "
        "Qwen3.5); unset: the limit of the model's processor",
        "更大的帧缩小到这一像素数：Qwen2.5-VL 为每帧，Qwen3-VL、Qwen3.5 为全部帧之和；不设时用模型自带的上限",
        range=Range.TOKENS, on_resume="order")
    no_pad_to_seq_lengths: bool = key(False, "pad a micro-batch to its longest sequence, not to seq_length",
        "micro-batch 填充到其中最长序列，而不是 seq_length", on_resume="exact")
    reset_position_ids: bool = key(False, "positions restart with every sample of a pack", "打包时每个样本的位置从头开始",
        stages="pretrain sft", on_resume="exact")
    reset_attention_mask: bool = key(False, "a sample of a pack attends only to itself", "打包时一个样本只看见自己",
        on_resume="exact")
    pack: bool = key(False, "rows of the dataset hold several samples each", "数据集的一行含多个样本", stages="sft",
        elsewhere="packing", on_resume="exact")
    neat_pack: bool = key(False, "packed samples attend only to themselves; needs pack and reset_attention_mask",
        "打包的样本只看见自己；需要 pack 与 reset_attention_mask", stages="sft", on_resume="exact")
    # the token of the Math-Shepherd data, as upstream has it
    placeholder_token: str = key("ки", "prm: the token at which a step is judged", "prm：对一个步骤做判断的 token",
        stages="prm", on_resume="exact")
    reward_tokens: list[str] = key([], "prm: the tokens that express judgements", "prm：代表判断结果的 token", stages="prm",
        on_resume="exact")


EngineName = Literal["megatron", "fsdp"]
ENGINES: tuple[str, ...] = get_args(EngineName)
#: whose layers are transformers' modules; the others have Megatron's layers and optimizer
BY_MODULE: frozenset[EngineName] = frozenset(("fsdp",))


@dataclass(frozen=True, kw_only=True)
class _ParallelKeys:
    """Parallelism: the split of a model over devices."""

    engine: EngineName = key("megatron",
        "what computes the role: megatron, or fsdp: transformers' own modules, a shard of all weights on each device",
        "由什么计算该角色：megatron；或 fsdp，即 transformers 自己的模块，每个设备存全部权重的一个分片",
        elsewhere="strategy", on_resume="exact")
    fsdp_size: int | None = key(None,
        "devices that divide each weight between them; groups of so many have copies (hybrid sharding); all devices when unset",
        "共同切分每个权重的设备数；各组这么多设备之间互为副本（混合分片）；不设时为全部设备", range=Range.PROCESSES,
        needs=("engine", ("fsdp",)), on_resume="random")
    num_npus: int | None = key(None, "devices of a run without rl_config; tensor x pipeline x context parallel size when unset",
        "没有 rl_config 时的设备数；不设时为张量 x 流水 x 上下文并行数", range=Range.DEVICES, on_resume="random")
    tensor_model_parallel_size: int = key(1, "devices one layer is split over", "一层切分到的设备数", range=Range.PROCESSES,
        elsewhere="tensor_parallel_size", on_resume="random")
    pipeline_model_parallel_size: int = key(1, "consecutive groups of layers, each on separate devices",
        "连续的层组数，每组在各自的设备上", range=Range.PROCESSES, elsewhere="pipeline_parallel_size", on_resume="random")
    expert_model_parallel_size: int = key(1, "devices the experts of a layer are spread over", "一层的专家分布到的设备数",
        range=Range.PROCESSES, needs=("num_experts", "set"), on_resume="random")
    expert_tensor_parallel_size: int | None = key(None,
        "devices one expert is split over; unset: 1 with moe_tp_extend_ep, otherwise the tensor parallel size",
        "一个专家切分到的设备数；不设时：moe_tp_extend_ep 为 1，否则为张量并行数", range=Range.PROCESSES,
        needs=("num_experts", "set"), on_resume="random")
    context_parallel_size: int = key(1, "devices one sequence is split over", "一条序列切分到的设备数", range=Range.PROCESSES,
        elsewhere="ulysses_sequence_parallel_size ring_attn_size", on_resume="random")
    context_parallel_algo: Literal["ulysses_cp_algo", "megatron_cp_algo"] = key("ulysses_cp_algo",
        "context parallelism by heads (Ulysses) or by ring (megatron_cp_algo)",
        "上下文并行按头切分（Ulysses），或用环（megatron_cp_algo）", needs=("context_parallel_size", "above 1"),
        on_resume="exact")
    dynamic_context_parallel: bool = key(False,
        "short rows are split over fewer devices than context_parallel_size, several at a time; a row takes the smallest "
        "divisor of it whose part of the token budget holds the row",
        "短序列只切分到少于 context_parallel_size 的设备上，多条同时计算；每条取能放下它的最小约数"
        "（按 token 预算的相应份额）", needs=("context_parallel_size", "above 1"), on_resume="exact")
    min_dynamic_context_parallel_size: int = key(1, "fewest devices that such a row is split over",
        "此时一条序列最少切分到的设备数", range=Range.PROCESSES, needs=("dynamic_context_parallel", (True,)),
        on_resume="exact")
    num_layers_per_virtual_pipeline_stage: int | None = key(None, "layers of a chunk in the interleaved pipeline schedule",
        "交错流水调度中一块的层数", range=Range.LAYERS, on_resume="random")
    num_layer_list: str | int | list[int] | None = key(None, 'layers of each pipeline stage, for example "16,17,16,15"',
        '各流水阶段的层数，例如 "16,17,16,15"', on_resume="random")
    noop_layers: str | int | list[int] | None = key(None, 'indices of layers that do nothing, for example "5,95"',
        '不做任何事的层的编号，例如 "5,95"', on_resume="fixed")
    use_tp_pp_dp_mapping: bool = key(False, "rank order tp-cp-pp-dp instead of tp-cp-dp-pp",
        "rank 顺序为 tp-cp-pp-dp，而不是 tp-cp-dp-pp", on_resume="random")
    moe_tp_extend_ep: bool = key(False, "spread unsplit experts over the tensor parallel ranks instead of splitting them",
        "把整个专家分布到张量并行 rank 上，而不是切分专家", needs=("num_experts", "set"), on_resume="random")
    sequence_parallel: bool = key(False, "split the activations between tensor parallel layers", "在张量并行层之间切分激活",
        needs=("tensor_model_parallel_size", "above 1"), on_resume="exact")


@dataclass(frozen=True, kw_only=True)
class _OptimizerKeys:
    """Optimizer, schedule and the communication around it."""

    # the defaults of this group are Megatron-LM's, on which upstream's run files rely
    optimizer: Literal["adam", "muon"] = key("adam",
        "adam: AdamW; muon: orthogonalized momentum for matrices, AdamW for embeddings, heads, norms and biases",
        "adam：AdamW；muon：矩阵用正交化的动量，embedding、输出层、norm 与偏置仍用 AdamW", elsewhere="optim", on_resume="exact")
    muon_momentum: float = key(0.95, "muon: decay of the momentum", "muon：动量的衰减", range=Range.DECAY,
        needs=_MUON, on_resume="exact")
    muon_use_nesterov: bool = key(False, "muon: look ahead along the momentum", "muon：使用 Nesterov 动量", needs=_MUON,
        on_resume="exact")
    muon_num_ns_steps: int = key(5, "muon: Newton-Schulz steps that orthogonalize a matrix",
        "muon：正交化矩阵的 Newton-Schulz 步数", range=Bounds(1, 100), needs=_MUON, on_resume="exact")
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = key("spectral",
        "muon: a step of r rows and c columns is scaled by sqrt(max(r, c)), sqrt(r / c) or sqrt(max(1, r / c))",
        "muon：r 行 c 列的更新乘以 sqrt(max(r, c))、sqrt(r / c) 或 sqrt(max(1, r / c))", needs=_MUON, on_resume="exact")
    muon_extra_scale_factor: float = key(1.0,
        "muon: factor on the steps of matrices; with spectral, 0.2 makes them as large as AdamW's",
        "muon：矩阵更新的额外系数；spectral 下取 0.2 时与 AdamW 的步长相当", range=Range.POSITIVE, needs=_MUON,
        on_resume="exact")
    muon_split_qkv: bool = key(True, "muon: queries, their gates, keys and values are matrices of their own",
        "muon：query 及其门控、key、value 各视为一个矩阵", needs=_MUON, on_resume="exact")
    muon_tp_mode: Literal["duplicated", "blockwise"] = key("duplicated",
        "muon: duplicated gathers a matrix that tensor parallelism splits; blockwise takes each part for a matrix",
        "muon：duplicated 会先收集被张量并行切分的矩阵；blockwise 把每一份视为一个矩阵", needs=_MUON, on_resume="exact")
    lr: float | None = key(None, "peak learning rate", "学习率峰值", range=Range.RATE, elsewhere="learning_rate optim.lr",
        on_resume="schedule")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = key("linear",
        "schedule after the warm-up", "预热之后的学习率曲线", elsewhere="lr_scheduler_type lr_scheduler", on_resume="schedule")
    lr_decay_iters: int | None = key(None, "iterations until min_lr; train_iters when unset",
        "到达 min_lr 的迭代数；不设时为 train_iters", range=Range.ITERATIONS, needs=_DECAYING, on_resume="schedule")
    lr_warmup_fraction: float | None = key(None, "warm-up as a fraction of lr_decay_iters", "预热占 lr_decay_iters 的比例",
        range=Range.FRACTION, elsewhere="warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio", on_resume="schedule")
    lr_warmup_iters: int = key(0, "warm-up in iterations; not together with lr_warmup_fraction",
        "预热的迭代数；不能与 lr_warmup_fraction 同时设", range=Range.ITERATIONS_FROM_0,
        elsewhere="warmup_steps lr_warmup_steps", on_resume="schedule")
    lr_warmup_init: float = key(0.0, "learning rate at the start of the warm-up", "预热开始时的学习率", range=Range.RATE,
        on_resume="schedule")
    min_lr: float = key(0.0, "learning rate at the end", "结束时的学习率", range=Range.RATE,
        needs=_DECAYING, on_resume="schedule")
    weight_decay: float = key(0.01, "decoupled weight decay", "解耦的权重衰减", range=Bounds(0, 1000), elsewhere="l2",
        on_resume="exact")
    clip_grad: float = key(1.0, "global gradient norm above which gradients are scaled down; 0 turns it off",
        "全局梯度范数超过它时缩小梯度；0 为关闭", range=Range.ITERATIONS_FROM_0, elsewhere="max_grad_norm max_norm grad_clip",
        on_resume="exact")
    adam_beta1: float = key(0.9, "decay of the first moment", "一阶矩的衰减", range=Range.DECAY, on_resume="exact")
    adam_beta2: float = key(0.999, "decay of the second moment", "二阶矩的衰减", range=Range.DECAY, on_resume="exact")
    adam_eps: float = key(1e-8, "added to the root of the second moment", "加在二阶矩的平方根上",
        range=Bounds(0, 1, excludes_low=True, default=1e-8), elsewhere="adam_epsilon", on_resume="exact")
    use_distributed_optimizer: bool = key(False, "split optimizer state over the data-parallel ranks",
        "把优化器状态切分到数据并行 rank 上", on_resume="exact")
    overlap_grad_reduce: bool = key(False, "reduce gradients during the backward pass", "反向传播进行中即归约梯度",
        on_resume="exact")
    overlap_param_gather: bool = key(False, "gather weights during the forward pass", "前向传播进行中即收集权重",
        on_resume="exact")
    no_check_for_nan_in_loss_and_grad: bool = key(False, "do not stop at NaN or infinity", "遇到 NaN 或无穷大时不停止",
        on_resume="exact")
    check_weight_copies_interval: int = key(0,
        "optimizer steps between two comparisons of each weight's copies on different ranks, bit by bit; a difference ends "
        "the run; 0 turns them off", "每隔多少个优化器步逐位比较各 rank 上同一权重的副本；不一致则结束运行；0 为关闭",
        range=Range.ITERATIONS_FROM_0, elsewhere="check_weight_hash_across_dp_replicas_interval", on_resume="exact")
    gemm_gradient_accumulation_fusion: bool = key(False, "accumulate gradients inside the matrix product",
        "在矩阵乘内部累加梯度", only_on="npu", on_resume="exact")
    ddp_bucket_size: int | None = key(None, "elements of one gradient bucket", "一个梯度桶的元素数", range=Bounds(1, 10**12),
        on_resume="exact")


@dataclass(frozen=True, kw_only=True)
class _CheckpointKeys:
    """Loading, saving, resuming."""

    load: str | None = key(None,
        "folder with Megatron checkpoints or a Hugging Face model, or owner/name, ms://owner/name on a hub",
        "含 Megatron 检查点或 Hugging Face 模型的文件夹，或 hub 上的 owner/name、ms://owner/name",
        elsewhere="model_name_or_path hf_checkpoint pretrain model.path resume_from_checkpoint",
        upstream=("reads Megatron checkpoints only", "只读 Megatron 检查点"), on_resume="exact")
    save: str | None = key(None, "folder for checkpoints", "检查点写入的文件夹",
        elsewhere="ckpt_path default_local_dir save_path", on_resume="exact")
    save_interval: int | None = key(None, "iterations between checkpoints; unset: only the last one",
        "两次检查点之间的迭代数；不设时只保存最后一次", range=Range.ITERATIONS, needs=("save", "set"),
        elsewhere="save_steps save_freq", on_resume="exact")
    save_hf: bool = key(False, "also write each checkpoint as a Hugging Face folder", "每个检查点同时写成 Hugging Face 文件夹",
        needs=("save", "set"), on_resume="exact")
    keep_last: int | None = key(None, "checkpoints that are kept; all when unset", "保留的检查点数；不设为全部",
        range=Range.ITERATIONS, needs=("save", "set"), elsewhere="save_total_limit max_ckpt_num max_actor_ckpt_to_keep",
        on_resume="exact")
    async_save: bool = key(False, "write checkpoints in the background", "在后台写检查点",
        needs=("ckpt_format", ("torch_dist",)), on_resume="exact")
    ckpt_format: Literal["torch", "torch_dist"] = key("torch_dist", "one file a rank, or sharded and loadable under any layout",
        "每个 rank 一个文件，或分片并可在任意切分下读入", on_resume="exact")
    load_iteration: int | None = key(None, "iteration of the checkpoint in `load`; the newest when unset",
        "读 `load` 中的哪个检查点；不设为最新的", range=Range.ITERATIONS_FROM_0, on_resume="exact")
    load_previous: bool = key(False, "resume from the newest intact checkpoint of `load` when the newest is damaged",
        "最新的检查点损坏时，从 `load` 中最近一个完好的继续", on_resume="exact")
    sigterm_grace_s: float = key(60.0, "seconds after SIGTERM, SIGHUP or Ctrl-C for the iteration to end and be saved",
        "收到 SIGTERM、SIGHUP 或 Ctrl-C 后，正在进行的迭代完成并保存可用的秒数", range=Bounds(0, 31 * 86400), on_resume="exact")
    finetune: bool = key(False, "load weights only: no optimizer, no random state, iteration 0",
        "只读权重：不读优化器和随机状态，从第 0 次迭代开始", on_resume="exact")
    no_load_optim: bool | None = key(None, "do not load the optimizer", "不读优化器", needs=("load", "set"),
        on_resume="exact")
    no_load_rng: bool | None = key(None, "do not load the random state", "不读随机状态", needs=("load", "set"),
        on_resume="exact")
    no_save_optim: bool | None = key(None, "do not save the optimizer", "不保存优化器", on_resume="exact")
    no_save_rng: bool | None = key(None, "do not save the random state", "不保存随机状态", on_resume="exact")
    pretrained_checkpoint: str | None = key(None, "folder to start from when `load` holds no checkpoint yet",
        "`load` 中尚无检查点时的起点文件夹", on_resume="reference")
    base_model: str | None = key(None,
        "base model where load (pretrained_checkpoint, ref_model) is a PEFT adapter; unset: the one that the adapter names",
        "load（pretrained_checkpoint、ref_model）为 PEFT 适配器时的基座模型；不设则用适配器自己写明的", on_resume="reference")
    trust_remote_code: bool = key(False,
        "run Python code that comes with the model folder, where transformers has no class for it; engine: fsdp; leave off for "
        "models you do not trust",
        "transformers 没有对应的类时，运行模型文件夹自带的 Python 代码；需要 engine: fsdp；不信任的模型不要打开",
        on_resume="exact")
    load_checkpoint_loosely: bool = key(False,
        "weights missing in the checkpoint keep their initial values, unknown ones are skipped",
        "检查点中缺少的权重保持新建时的值，多出的权重略过", on_resume="exact")


@dataclass(frozen=True, kw_only=True)
class _MemoryKeys:
    """Recomputation, swapping, low-rank adapters."""

    recompute_granularity: Literal["full", "selective"] | None = key(None, "recompute whole layers or only attention",
        "重计算整层，或只重计算注意力", on_resume="exact")
    recompute_method: Literal["uniform", "block"] | None = key(None, "full: chunks of equal size, or the first layers only",
        "full：等大的块，或只有开头若干层", needs=("recompute_granularity", ("full",)), on_resume="exact")
    recompute_num_layers: int | None = key(None, "full: layers of a chunk or of the block", "full：一块的层数，或开头的层数",
        range=Range.LAYERS, needs=("recompute_granularity", ("full",)), on_resume="exact")
    recompute_modules: list[_RecomputedModule] | None = key(None, "selective: modules that are recomputed",
        "selective：要重计算的模块", needs=("recompute_granularity", ("selective",)), on_resume="exact")
    recompute_activation_function: bool = key(False, "recompute the activation function of the MLP", "重计算 MLP 的激活函数",
        on_resume="exact")
    swap_attention: bool = key(False, "move attention activations to host memory", "把注意力的激活移到主机内存", only_on="npu",
        on_resume="exact")
    swap_optimizer: bool = key(False, "keep optimizer state in host memory", "优化器状态放在主机内存", on_resume="exact")
    swap_optimizer_times: int = key(16, "parts of a swapped optimizer that come to the device one after the other",
        "换出的优化器状态分多少份依次搬到设备上", range=Range.PARTS, needs=("swap_optimizer", (True,)), only_on="npu",
        on_resume="exact")
    grad_reduce_in_fp32: bool = key(True,
        "gradients of bf16 weights in fp32; false: in bf16, half the bytes, with sums over micro-batches rounded by chance",
        "bf16 权重的梯度用 fp32；false：用 bf16，字节数减半，micro-batch 之间的累加采用随机舍入", needs=("bf16", (True,)),
        on_resume="exact")
    optimizer_offload_fraction: float = key(0.0,
        "share of the parameters whose optimizer states are off the device and are updated by the host's processors; 0: none, "
        "1: all",
        "优化器状态不放在设备上、由主机 CPU 更新的参数所占的比例；0：没有，1：全部", range=Range.FRACTION, on_resume="exact")
    optimizer_offload_path: str | None = key(None,
        "folder on a local disk whose file has these states; unset: host memory",
        "本地磁盘上的文件夹，这些状态放在其中的文件里；不设则放在主机内存", needs=("optimizer_offload_fraction", "set"),
        on_resume="exact")
    optimizer_state_dtype: Literal["float32", "bfloat16"] = key("float32",
        "format of AdamW's moments; bfloat16: half the bytes, rounded by chance after an update in float32; engine: fsdp",
        "AdamW 动量的格式；bfloat16：字节数减半，更新用 float32 计算，之后随机舍入；需要 engine: fsdp", on_resume="exact")
    offload_gradients: bool = key(False,
        "sum the gradients in host memory, where each layer's go as soon as they are divided over the devices; engine: fsdp",
        "梯度在主机内存中累加：每层的梯度切分到各设备后立即移到主机；需要 engine: fsdp", on_resume="exact")
    stream_ref_weights: bool = key(False,
        "keep the reference's weights in host memory and bring them to the device layer by layer in each of its passes; slower",
        "参考模型的权重放在主机内存，每次前向时逐层搬到设备上；速度较慢", on_resume="exact")
    reuse_fp32_param: bool = key(False,
        "AdamW keeps no fp32 copies of bf16 weights: 16 bits of each and the weight are one; 2 bytes less, the same numbers",
        "AdamW 不保留 bf16 权重的 fp32 副本：另存 16 位，与权重合成 fp32；每个参数少 2 字节，数值不变", needs=("bf16", (True,)),
        on_resume="exact")
    loss_chunk_size: int = key(1024, "tokens whose vocabulary logits exist at the same time", "同时存在词表 logits 的 token 数",
        range=Range.TOKENS, on_resume="exact")
    loss_vocab_chunk_size: int | None = key(None,
        "entries of a rank's part of the vocabulary whose logits exist at the same time; unset: all of them",
        "同时存在 logits 的词表项数（每个 rank 自己那部分词表）；不设则为全部", range=Range.TOKENS, on_resume="exact")
    fp32_lm_head: bool | None = key(None,
        "logits of a bf16 model in float32, in the rollout engine too; unset: where that is measured and the head then takes "
        "less than a tenth of an update's products",
        "bf16 模型的 logits 用 float32 计算，推理引擎同样；不设时：在已测量的平台上，且输出层占更新计算量不到十分之一时开启",
        elsewhere="enable_fp32_lm_head", on_resume="exact")
    lora_target_modules: list[str] | None = key(None,
        "layers with adapters: linear_qkv linear_proj linear_fc1 linear_fc2; unset: no LoRA",
        "带适配器的层：linear_qkv linear_proj linear_fc1 linear_fc2；不设则不用 LoRA", elsewhere="target_modules",
        on_resume="fixed")
    lora_r: int = key(8, "rank of the adapters", "适配器的秩", range=Bounds(1, 10**5), needs=("lora_target_modules", "set"),
        elsewhere="lora_rank lora_dim", on_resume="fixed")
    lora_alpha: int = key(16, "scale of the adapters is lora_alpha / lora_r", "适配器的缩放为 lora_alpha / lora_r",
        range=Bounds(1, 10**6), needs=("lora_target_modules", "set"), on_resume="fixed")
    lora_dropout: float = key(0.0, "dropout in front of the adapters", "适配器之前的 dropout", range=Range.FRACTION,
        needs=("lora_target_modules", "set"), on_resume="exact")
    lora_ckpt_filter: bool = key(False, "save the adapters only", "只保存适配器", needs=("lora_target_modules", "set"),
        on_resume="exact")


@dataclass(frozen=True, kw_only=True)
class _VisionKeys:
    """Training of the vision tower of a model that sees images."""

    freeze_vit: bool = key(True,
        "models with images: the vision tower does not train; false with lora_target_modules: adapters of its linear layers do",
        "图像模型：不训练视觉塔；设为 false 并设了 lora_target_modules 时，训练其线性层的适配器",
        elsewhere="freeze_vision_tower freeze_vision_model", on_resume="fixed")
    freeze_aligner: bool = key(True, "models with images: the projector from tower to language model does not train",
        "图像模型：不训练视觉塔到语言模型的投影层", elsewhere="freeze_vision_projection", on_resume="fixed")
    vit_lr: float | None = key(None, "learning rate of the vision tower; unset: as lr", "视觉塔的学习率；不设时同 lr",
        range=Range.POSITIVE, needs=("freeze_vit", (False,)), on_resume="schedule")
    aligner_lr: float | None = key(None, "learning rate of the projector; unset: as lr", "投影层的学习率；不设时同 lr",
        range=Range.POSITIVE, needs=("freeze_aligner", (False,)), on_resume="schedule")
    language_model_only: bool = key(False,
        "models with images: trainer and rollout engine leave out tower and projector, and rows have text only; "
        "exported folders get both as published",
        "图像模型：训练与 rollout 引擎都不构建视觉塔和投影层，数据只能是文本；导出的目录带有发布时的视觉塔和投影层",
        on_resume="fixed")


@dataclass(frozen=True, kw_only=True)
class _KernelKeys:
    """Fused kernels and builder switches; off the NPU the plain modules compute the same."""

    use_fused_ring_attention_update: bool = key(False, "ring attention: merge partial results in one kernel",
        "环形注意力：用一个算子合并部分结果", needs=("context_parallel_algo", ("megatron_cp_algo",)), only_on="npu",
        on_resume="exact")
    use_ascend_mc2: bool = key(False, "fuse matrix products of tensor parallel layers with their collectives",
        "张量并行层的矩阵乘与其通信融合为一个算子", needs=("sequence_parallel", (True,)), only_on="npu", on_resume="exact")
    use_ascend_coc: bool = key(False, "overlap tensor parallel communication with computation", "张量并行的通信与计算重叠",
        only_on="npu", on_resume="exact")
    coc_mode: int = key(-1, "variant of that overlap", "该重叠的方式", range=Bounds(-1, 2), needs=("use_ascend_coc", (True,)),
        only_on="npu", on_resume="exact")
    coc_parallel_num: int = key(1, "slices of that overlap", "该重叠的份数", range=Bounds(1, 1024),
        needs=("use_ascend_coc", (True,)), only_on="npu", on_resume="exact")
    coc_fused_kernel: bool = key(False, "fused kernels for that overlap", "该重叠用融合算子", needs=("use_ascend_coc", (True,)),
        only_on="npu", on_resume="exact")
    hccl_group_buffer: str | None = key(None,
        "MiB of HCCL buffers by process group, like tp:256;dp:64; others have rl_config.hccl_buffersize",
        "按进程组给出的 HCCL 缓冲（MiB），如 tp:256;dp:64；其余组用 rl_config.hccl_buffersize", only_on="npu",
        on_resume="exact")


@dataclass(frozen=True, kw_only=True)
class _PreferenceKeys:
    """Losses of stage sft and of the stages that compare two answers."""

    sft_loss_type: Literal["nll", "dft", "forward_kl", "reverse_kl"] = key("nll",
        "sft: -log p of each token; dft: weighted by p itself, so that tokens that the model finds unlikely pull less; "
        "forward_kl, reverse_kl: divergence from a teacher whose log-probs `mindspeed-rl teacher-log-probs` has stored",
        "sft：每个 token 的 -log p；dft：再乘以 p 本身，模型认为不可能的 token 拉力更小；forward_kl、reverse_kl：与教师的散度，"
        "教师的对数概率由 `mindspeed-rl teacher-log-probs` 存好", stages="sft", on_resume="exact")
    teacher_topk_rest: Literal["drop", "lump"] = key("lump",
        "probability outside of the teacher's stored tokens: dropped, or lumped into one more token",
        "教师所存 token 之外的概率：舍去，或合并为一个额外的 token",
        needs=("sft_loss_type", ("forward_kl", "reverse_kl")), stages="sft", on_resume="exact")

    dpo_loss_type: Literal["sigmoid", "hinge", "ipo"] = key("sigmoid", "dpo: form of the loss", "dpo：损失的形式", stages="dpo",
        on_resume="exact")
    dpo_beta: float = key(0.1, "dpo: strength of the KL term to the reference", "dpo：与参考模型联系的强度",
        range=Range.POSITIVE, stages="dpo", on_resume="exact")
    dpo_label_smoothing: float = key(0.0, "dpo: probability that a preference is wrong", "dpo：偏好标注出错的概率",
        range=Bounds(0, 0.5), stages="dpo", on_resume="exact")
    pref_ftx: float = key(0.0, "dpo, simpo: weight of the supervised loss on the chosen answer",
        "dpo、simpo：对 chosen 回答的监督损失的权重", range=Bounds(0, 1e6), stages="dpo simpo", on_resume="exact")
    simpo_beta: float = key(2.5, "simpo: scale of the length-averaged log-probabilities", "simpo：按长度平均的对数概率的缩放",
        range=Range.POSITIVE, stages="simpo", on_resume="exact")
    gamma_beta_ratio: float = key(1.4, "simpo: margin / simpo_beta", "simpo：间隔 / simpo_beta", range=Bounds(0, 1e6),
        stages="simpo", on_resume="exact")
    simpo_loss_type: Literal["sigmoid", "hinge"] = key("sigmoid", "simpo: form of the loss", "simpo：损失的形式",
        stages="simpo", on_resume="exact")
    simpo_label_smoothing: float = key(0.0, "simpo: probability that a preference is wrong", "simpo：偏好标注出错的概率",
        range=Bounds(0, 0.5), stages="simpo", on_resume="exact")
    cpo_beta: float = key(0.1, "cpo: scale of the difference of log-probabilities", "cpo：对数概率之差的缩放",
        range=Range.POSITIVE, stages="cpo", on_resume="exact")
    cpo_alpha: float = key(1.0, "cpo: weight of the supervised loss on the chosen answer",
        "cpo：对 chosen 回答的监督损失的权重", range=Bounds(0, 1e6), stages="cpo", on_resume="exact")
    orpo_lambda: float = key(0.1, "orpo: weight of the odds ratio", "orpo：几率比项的权重", range=Bounds(0, 1e6), stages="orpo",
        on_resume="exact")
    kto_loss_type: Literal["kto", "apo_zero_unpaired"] = key("kto",
        "kto: form of the loss; apo_zero_unpaired has no KL of mismatched answers",
        "kto：损失的形式；apo_zero_unpaired 没有错配回答的 KL", stages="kto", on_resume="exact")
    kto_beta: float = key(0.1, "kto: strength of the tie to the reference", "kto：与参考模型联系的强度",
        range=Range.POSITIVE, stages="kto", on_resume="exact")
    kto_desirable_weight: float = key(1.0, "kto: weight of desirable answers", "kto：好回答的权重", range=Bounds(0, 1e6),
        stages="kto", on_resume="exact")
    kto_undesirable_weight: float = key(1.0, "kto: weight of undesirable answers", "kto：差回答的权重",
        range=Bounds(0, 1e6), stages="kto", on_resume="exact")
    center_rewards_coefficient: float = key(0.0, "orm: weight of the squared sum of both scores, which draws them to 0",
        "orm：两个分数之和的平方的权重，使分数靠近 0", range=Bounds(0, 1e6), stages="orm", on_resume="exact")
    ref_model: str = key("", "dpo, kto: folder of the reference weights; the policy's initial weights when empty",
        "dpo、kto：参考模型权重的文件夹；为空时用策略自己的起点", stages="dpo kto", on_resume="reference")
    refer_model_iter: int = key(1, "dpo, kto: iteration of that checkpoint", "dpo、kto：该检查点的迭代号",
        range=Range.ITERATIONS, stages="dpo kto", on_resume="reference")


@dataclass(frozen=True, kw_only=True)
class MegatronConfig(
    ModelKeys,
    _DataKeys,
    _ParallelKeys,
    _OptimizerKeys,
    _CheckpointKeys,
    _MemoryKeys,
    _VisionKeys,
    _KernelKeys,
    _PreferenceKeys,
):
    """One role's training engine. `megatron_training` holds what all roles share."""

    # one Literal, so that the suggestion for a wrong stage comes from all of them
    stage: Literal[_RLStage, _SupervisedStage] | None = key(None, "stage of training, which selects model and loss",
        "训练什么、用哪种损失", on_resume="fixed")
    model: str | None = key(None, "name of the model block whose keys are applied first", "模型块的名字，其键最先生效",
        on_resume="exact")
    global_batch_size: int | None = key(None,
        "prompts of one iteration; with num_generations completions of an optimizer step; supervised stages: samples of a step",
        "一次迭代的 prompt 数；设了 num_generations 时为一个优化器步的回答数；监督阶段为一步的样本数", range=Range.ROWS,
        elsewhere="rollout_batch_size data.train_batch_size", on_resume="exact")
    micro_batch_size: int | None = key(None, "samples of one forward pass of a data-parallel rank; 1 when unset",
        "一个数据并行 rank 一次前向的样本数；不设为 1", range=Range.ROWS,
        elsewhere="per_device_train_batch_size micro_train_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
        on_resume="exact")
    train_iters: int | None = key(None, "iterations of the run: rollouts in reinforcement learning, optimizer steps elsewhere",
        "运行的迭代数：强化学习为 rollout 次数，其他阶段为优化器步数", range=Range.ITERATIONS_FROM_0,
        elsewhere="max_steps total_training_steps num_rollout", on_resume="schedule")
    train_epochs: float | None = key(None,
        "passes over the prompts or rows, in place of train_iters; not in stage pretrain, which cuts documents into samples",
        "对 prompt 或数据行训练的遍数，代替 train_iters；pretrain 阶段把文档切成样本，不支持此键",
        range=Bounds(0, 1e6, excludes_low=True, default=1), elsewhere="num_train_epochs total_epochs num_episodes num_epoch",
        on_resume="schedule")
    seq_length: int | None = key(None, "longest training sequence of supervised stages; at most max_model_len",
        "监督阶段最长的训练序列；不超过 max_model_len", range=Range.TOKENS, elsewhere="max_length max_len", on_resume="order")

    seed: int = key(1234, "seed of the run", "运行的随机种子", range=Range.SEED, on_resume="order")
    bf16: bool = key(True, "weights and activations in bfloat16 with fp32 master weights; false: everything in fp32",
        "权重与激活用 bfloat16，主权重用 fp32；false：全部 fp32", on_resume="fixed")
    npu_deterministic: bool = key(False, "reproducible kernels on the NPU", "NPU 上用可复现的算子", only_on="npu",
        on_resume="exact")
    threads_per_worker: int | None = key(None,
        "threads of a worker; when unset OMP_NUM_THREADS, else the machine's cores divided by the workers on it",
        "每个 worker 的线程数；不设时取 OMP_NUM_THREADS，否则为本机核数除以其上的 worker 数", only_on="cpu",
        range=Range.PROCESSES, on_resume="exact")
    deterministic: bool = key(False, "reproducible kernels on CPU and CUDA", "CPU 与 CUDA 上用可复现的算子", only_on="cpu cuda",
        on_resume="exact")
    ai_framework: Literal["mindspore"] | None = key(None, "backend below the engine; only torch (null) is available",
        "引擎之下的后端；只有 torch（null）", on_resume="exact")

    # Megatron-LM's defaults again
    log_interval: int = key(100, "supervised stages: iterations between two metric lines", "监督阶段：两行指标之间的迭代数",
        range=Range.ITERATIONS, stages=_SUPERVISED, elsewhere="logging_steps", upstream=("read by dpo only", "只有 dpo 读取"),
        on_resume="exact")
    eval_iters: int = key(100, "supervised stages: batches of one evaluation", "监督阶段：一次评测的批数",
        range=Range.ITERATIONS_FROM_0, stages=_SUPERVISED, on_resume="exact")
    eval_interval: int = key(1000, "iterations between evaluations", "两次评测之间的迭代数", range=Range.ITERATIONS,
        elsewhere="eval_steps test_freq", on_resume="exact")
    eval_sets: AnyGroup | None = key(None,
        "further held-out prompts by name, {name: file, prefix or hf://owner/name}; figures are eval/<name>/...",
        "更多留出 prompt，按名字给出：{名字: 文件、前缀或 hf://owner/name}；指标为 eval/<名字>/...",
        stages=_GENERATING, elsewhere="eval_datasets", on_resume="exact")
    eval_n_samples: int = key(1, "responses to each held-out prompt; from 2 on with pass@k and, for answers, maj@k",
        "每个留出 prompt 的回答数；2 个起给出 pass@k，答案可比较时还有 maj@k", range=Range.ROWS, stages=_GENERATING,
        elsewhere="n_samples_per_eval_prompt val_kwargs.n num_generations_eval", on_resume="exact")
    eval_temperature: float | None = key(None,
        "temperature of evaluations, in place of rl_config.eval_greedy; 0 is greedy",
        "评测的温度，代替 rl_config.eval_greedy；0 为贪心", range=Bounds(0, 100), stages=_GENERATING,
        elsewhere="val_kwargs.temperature", on_resume="exact")
    eval_top_p: float | None = key(None,
        "nucleus of evaluations that are not greedy; unset: sampling_config.top_p",
        "非贪心评测的 nucleus；不设时同 sampling_config.top_p", range=Bounds(0, 1, excludes_low=True), stages=_GENERATING,
        elsewhere="val_kwargs.top_p", on_resume="exact")
    eval_top_k: int | None = key(None,
        "most likely tokens that evaluations keep that are not greedy; -1 keeps all; unset: sampling_config.top_k",
        "非贪心评测保留最可能的 token 数；-1 为全部；不设时同 sampling_config.top_k", range=Bounds(-1, 10**7),
        stages=_GENERATING, elsewhere="val_kwargs.top_k", on_resume="exact")
    eval_verifier: list[str] = key([],
        "sft: reward functions that score the answers to eval_sets; the first one tells right from wrong. rl_config has "
        "external_plugins for your own",
        "sft：给 eval_sets 的回答打分的奖励函数，第一个判断对错；自己的函数写在 rl_config.external_plugins",
        stages="sft", on_resume="exact")
    eval_max_tokens: int = key(256, "sft: longest answer to eval_sets, in tokens", "sft：对 eval_sets 的回答的最大 token 数",
        range=Range.TOKENS, stages="sft", on_resume="exact")
    eval_metric: str | None = key(None,
        "metric that tells which evaluation is best: higher is better, but for losses; when unset the first that exists of "
        "eval/accuracy, the accuracy of the first of eval_sets, eval/reward and eval/loss",
        "判断哪次评测最好的指标：越高越好，损失除外；不设时依次取 eval/accuracy、eval_sets 中第一个的 accuracy、eval/reward、"
        "eval/loss", elsewhere="metric_for_best_model", on_resume="exact")
    eval_target: float | None = key(None, "value of eval_metric at which the run is saved and ends",
        "eval_metric 达到此值时，运行保存并结束", range=Range.WEIGHT, on_resume="exact")
    eval_patience: int | None = key(None, "evaluations in sequence without a new best after which the run is saved and ends",
        "连续这么多次评测没有新的最好值后，运行保存并结束", range=Range.ITERATIONS,
        elsewhere="early_stopping_patience early_stopping_steps", on_resume="exact")
    keep_best: bool = key(False, "save the checkpoint of the best evaluation, and keep it in addition to the keep_last newest",
        "保存评测最好的检查点，并在 keep_last 之外保留", needs=("save", "set"), elsewhere="load_best_model_at_end",
        on_resume="exact")
    skip_train: bool = key(False, "evaluate only", "只评测", stages=_SUPERVISED, on_resume="exact")
    device_hour_price: float | None = key(None,
        "price of a device-hour in your currency, with which mindspeed-rl promise counts what the run costs",
        "一个设备小时的价格（单位自定），mindspeed-rl promise 用它计算运行的费用", range=Bounds(0, 1e9), on_resume="exact")
    # fmt: on

    def __post_init__(self) -> None:
        """Write both layer lists as text, as upstream does."""
        for name in ("num_layer_list", "noop_layers"):
            object.__setattr__(self, name, join_layers(getattr(self, name)))

    @property
    def has_held_out_data(self) -> bool:
        """True where there are evaluation datasets, or a part that `split` holds back."""
        try:
            return self.eval_data_path is not None or bool(self.eval_sets) or read_split(self.split)[1] > 0
        except ValueError:
            return False  # a rule reports the violation

    def without_model_keys(self) -> MegatronConfig:
        """Return the role without its shape, which config.json then gives; for weights of another model."""
        return replace(self, num_layers=None, padded_vocab_size=None)

    @property
    def model_parallel_size(self) -> int:
        """Devices of one replica of the model, without expert parallelism."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def computes_by_module(self) -> bool:
        """True where the layers of the role come from transformers' module, and not from Megatron."""
        return self.engine in BY_MODULE

    @property
    def has_ring_attention(self) -> bool:
        """True where context-parallel ranks pass slices of every sequence on to each other."""
        return self.context_parallel_size > 1 and self.context_parallel_algo == "megatron_cp_algo"

    @property
    def has_dynamic_context(self) -> bool:
        """True where micro-batches take slices of the context-parallel ranks."""
        return self.dynamic_context_parallel and self.context_parallel_size > 1

    @property
    def expert_sizes(self) -> tuple[int, int]:
        """Devices that share the experts of a layer, and devices one expert is split over.

        With moe_tp_extend_ep whole experts are spread over the tensor parallel ranks too.
        """
        if self.moe_tp_extend_ep:
            return self.expert_model_parallel_size * self.tensor_model_parallel_size, 1
        return self.expert_model_parallel_size, self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def adds_head_to_main_grad(self) -> bool:
        """True where the head's gradient is added to the gradients' buffer chunk by chunk.

        Megatron's reduction during the backward pass needs it as a tensor, and so do sums in bf16, which are rounded once.
        """
        return not self.overlap_grad_reduce and self.grad_reduce_in_fp32

    @property
    def trained_tower_parts(self) -> tuple[str, ...]:
        """Parts of a vision tower that train, or whose adapters do: "tower", "projector"."""
        parts = {"tower": not self.freeze_vit, "projector": not self.freeze_aligner}
        return tuple(part for part, trains in parts.items() if trains)

    @property
    def adapted_parts(self) -> tuple[str, ...]:
        """Layers and parts of a vision tower that have adapters; none without `lora_target_modules`."""
        targets = self.lora_target_modules or ()
        return (*targets, *self.trained_tower_parts) if targets else ()


def read_split(split: str | None) -> tuple[float, float, float]:
    """Return the fractions of training, validation and test in `split`, which sum to one; everything trains when unset.

    Raises:
        ValueError: `split` has more than three numbers, or a negative one.
    """
    try:
        fractions = [float(item) for item in (split or "1").split(",")]
    except ValueError:
        fractions = []
    if not 1 <= len(fractions) <= 3 or min(fractions) < 0 or sum(fractions) <= 0:
        raise ValueError(f"split: {split!r} must have fractions of training, validation and test data, such as 95,5,0.")
    # Megatron pads and normalizes them likewise
    first, second, third = (item / sum(fractions) for item in (*fractions, 0.0, 0.0)[:3])
    return first, second, third


def is_weight(item: str | float) -> bool:
    """Return True for a weight of a data_path that alternates weights and prefixes."""
    try:
        float(item)  # as text too, as in Megatron's own --data-path
    except ValueError:
        return False
    return True


def join_layers(layers: str | int | list[int] | None) -> str | None:
    """Return a layer list as comma-separated text."""
    if layers is None or isinstance(layers, str):
        return layers
    return ",".join(str(layer) for layer in ([layers] if isinstance(layers, int) else layers))


#: the process groups of Megatron-core 0.16, by the names of their options
_PROCESS_GROUPS = (
    "cp", "dp", "dp_cp", "embd", "ep", "ep_dp", "ep_tp", "hcp", "inter_ep_dp", "intra_dist_opt_instance", "intra_dp_cp",
    "intra_ep_dp", "mp", "pos_embd", "pp", "tp", "tp_cp", "tp_dp", "tp_dp_cp", "tp_ep_mp", "tp_ep_pp",
)  # fmt: skip


def parse_group_buffers(text: str | None) -> dict[str, int]:
    """Return the MiB by group name from hccl_group_buffer, such as "tp:256;dp:64" (commas separate too).

    Raises:
        ValueError: a part is not group:MiB, or Megatron has no such group.
    """
    sizes: dict[str, int] = {}
    for part in (text or "").replace(",", ";").split(";"):
        if not part.strip():
            continue
        name, _, size = (field.strip() for field in part.partition(":"))
        if not size.isdigit() or int(size) < 1:
            raise ValueError(f"hccl_group_buffer: '{part.strip()}' is not a group with its MiB, like tp:256.")
        if name not in _PROCESS_GROUPS:
            raise ValueError(f"hccl_group_buffer: '{name}' is not one of Megatron's groups {', '.join(_PROCESS_GROUPS)}.")
        sizes[name] = int(size)
    return sizes
