"""The group `generate_config`: layout, memory and sampling of the rollout engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_rl.catalogue.records import Bounds
from mindspeed_rl.config.keys.ignored import AnyGroup
from mindspeed_rl.config.keys.schema import Range, key

# fmt: off

@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Sampling of one response.

    A run file without `sampling_config` gets these defaults. A run file with the group replaces all of it: sub-keys that it
    omits take the engine's neutral values (see `ENGINE_SAMPLING`), not the ones below.
    """

    # the defaults are upstream's, but for top_k
    max_tokens: int = key(128, "longest response, in tokens", "最长的回答，单位 token", range=Range.TOKENS,
        elsewhere="max_response_length response_length rollout_max_response_len generate_max_len max_new_tokens",
        on_resume="in_flight")
    top_p: float = key(1.0, "nucleus: probability mass that is kept", "nucleus：保留的概率质量",
        range=Bounds(0, 1, excludes_low=True), elsewhere="rollout_top_p", on_resume="in_flight")
    top_k: int = key(-1, "most likely tokens that are kept; -1 keeps all", "保留最可能的 token 数；-1 为全部",
        range=Bounds(-1, 10**7), elsewhere="rollout_top_k", upstream=("default 50", "默认 50"), on_resume="in_flight")
    min_p: float = key(0.0, "tokens below this fraction of the most likely one are dropped",
        "低于最可能 token 的这一比例的 token 被去掉", range=Range.FRACTION, on_resume="in_flight")
    temperature: float = key(0.2, "divides the logits, in rollout and in training alike: 0 (greedy), or 0.01 to 2",
        "logits 除以它，推理与训练相同：0（贪心），或 0.01 到 2", range=Bounds(0, 2), elsewhere="rollout_temperature",
        upstream=("a group sampling_config without it fails in the workers", "写了 sampling_config 而缺它，工作进程会出错"),
        on_resume="in_flight")
    repetition_penalty: float = key(1.0,
        "logits of tokens that prompt or response has already are divided by it (multiplied where negative); 1 is off",
        "prompt 或回答中已出现的 token，其 logits 除以它（为负时乘以它）；1 为关闭",
        range=Bounds(0.01, 100), on_resume="in_flight")
    presence_penalty: float = key(0.0, "subtracted from the logits of tokens that the response has already; 0 is off",
        "从回答中已出现的 token 的 logits 中减去；0 为关闭", range=Bounds(-2, 2), on_resume="in_flight")
    frequency_penalty: float = key(0.0, "the same, times the number of their occurrences; 0 is off",
        "同上，再乘以出现次数；0 为关闭", range=Bounds(-2, 2), on_resume="in_flight")
    stop: list[str] = key([], "texts after which a response ends; the tokens up to the one that completes the text train",
        "出现即结束回答的文本；直到写完该文本的 token 都参与训练", elsewhere="stop_words stop_strings rollout_stop",
        on_resume="in_flight")
    stop_token_ids: list[int] = key([],
        "further tokens that end a response, next to the tokenizer's and generation_config.json's; they train",
        "除 tokenizer 与 generation_config.json 的结束 token 外，另外会结束回答的 token；它们参与训练",
        range=Bounds(0, 10**7), elsewhere="rollout_stop_token_ids", on_resume="in_flight")
    structured_output: AnyGroup | None = key(None,
        "form that a response must have: one of regex, json (a schema), choice (a list), grammar, by vLLM's names",
        "回答必须符合的形式：regex、json（schema）、choice（列表）、grammar 之一，名称同 vLLM", on_resume="in_flight")
    ignore_eos: bool = key(False, "continue after the end token: every response has max_tokens (for benchmarks)",
        "越过结束 token 继续：每个回答都有 max_tokens（用于性能测试）", on_resume="in_flight")
    seed: int | None = key(None, "base of the per-sample seeds; the run's seed when unset",
        "每个样本的种子的基数；不设时为运行的种子", range=Range.SEED, on_resume="exact")


#: names of `speculative_config` that vLLM's command line has for some of its keys
_SHORT_NAMES = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
#: longest draft of the method suffix where none is set; vLLM's
_SUFFIX_TOKENS = 24

ENGINE_SAMPLING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "temperature": 1.0}


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Rollout engine: layout, limits, offloading of training state, sampling."""

    engine: Literal["vllm", "transformers"] = key("vllm",
        "what generates: vllm, or transformers' own module, a response at a time (slow); when omitted: vllm, and transformers "
        "for a model that vLLM does not serve on the cpu",
        "由什么来生成：vllm，或 transformers 自己的模块，逐个回答生成（慢）；不写时为 vllm，"
        "而 vLLM 在 cpu 上不支持的模型用 transformers",
        on_resume="exact")
    infer_tensor_parallel_size: int = key(8,
        "devices one rollout replica is split over; when omitted: as many as the actor's weights, if heads allow",
        "一个推理副本切分到的设备数", range=Range.PROCESSES,
        elsewhere="vllm_tensor_parallel_size rollout.tensor_model_parallel_size rollout_num_gpus_per_engine",
        on_resume="exact")
    infer_pipeline_parallel_size: int = key(1, "must be 1: the rollout engine has no pipeline here",
        "必须为 1：这里的推理引擎没有流水并行", range=Range.PROCESSES, on_resume="exact")
    infer_expert_parallel_size: int = key(1, "replicas that share the experts of a MoE model", "共同分担 MoE 模型专家的副本数",
        range=Range.DEVICES, needs=("enable_expert_parallel", (True,)), on_resume="exact")
    enable_expert_parallel: bool = key(False,
        "keep experts unsplit and spread them over all devices of the replicas that share them",
        "专家保持完整，分散到共享它们的各副本的全部设备上", on_resume="exact")

    infer_moe_token_dispatcher_type: Literal["auto", "allgather"] = key("auto",
        "exchange of tokens between these experts: auto is vllm-ascend's choice, MC2 in small steps on A3 and 950, and on A2 "
        "from 16 devices on; allgather in every step, by plain collectives",
        "这些专家之间如何交换 token：auto 由 vllm-ascend 选择（A3 与 950 的小批用 MC2，A2 从 16 个设备起）；"
        "allgather 每一步都用普通集合通信", needs=("enable_expert_parallel", (True,)), only_on="npu", on_resume="exact")

    max_num_seqs: int = key(1,
        "responses that are generated at the same time in one replica; when omitted: its part of a rollout",
        "一个副本同时生成的回答数", range=Bounds(1, 10**6), elsewhere="vllm_max_num_seqs", on_resume="exact")
    max_model_len: int = key(2048, "longest prompt + response, in tokens; when omitted: max_prompt_length + max_tokens",
        "最长的 prompt + 回答，单位 token", range=Range.TOKENS, elsewhere="vllm_max_model_len vllm_max_model_length",
        on_resume="in_flight")
    max_num_batched_tokens: int = key(2048,
        "tokens one engine step may process; longer prompts are split, but on the cpu, where a step takes a full prompt",
        "引擎一步可处理的 token 数，更长的 prompt 会分块；cpu 上一步总能放下一个完整的 prompt",
        range=Range.TOKENS, needs=("engine", ("vllm",)), on_resume="exact")
    dtype: Literal["bfloat16", "float32"] = key("bfloat16",
        "number format of the rollout weights; float32 exactly when bf16 is false",
        "推理权重的数值格式；bf16 为 false 时必须是 float32，否则不是", on_resume="exact")
    fp32_lm_head: bool | None = key(None, "logits of a bfloat16 engine in float32; unset: as the actor's",
        "bfloat16 引擎的 logits 用 float32 计算；不设时与 actor 相同", on_resume="exact")
    quantization: Literal["int8", "mxfp8", "w4a8"] | None = key(None,
        "format of the engine's matrices of attention, MLP and experts, quantized from the trained weights at each weight "
        "sync; int8: a scale per row of weights and per token (W8A8); mxfp8: E4M3 with a power of two per 32 elements; w4a8: "
        "int4 with a scale per 32 elements, int8 activations; on npu only experts, per 256, all others in int8; unset: "
        "dtype",
        "引擎中注意力、MLP 与专家矩阵的格式，每次推送时由训练权重量化；int8：权重每行、每个 token 各一个 scale（W8A8）；"
        "mxfp8：E4M3，每 32 个元素共用一个 2 的幂；w4a8：int4 权重每 32 个元素一个 scale，激活为 int8，"
        "npu 上只有专家如此，每 256 个元素一个 scale，其余矩阵为 int8；不设时同 dtype",
        elsewhere="rollout_quantization vllm_quantization rollout.quantization", on_resume="exact")
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = key("auto",
        "format of the engine's keys and values; auto: dtype", "引擎 KV cache 的格式；auto 同 dtype",
        elsewhere="vllm_kv_cache_dtype", on_resume="exact")
    update_weights_bucket_mb: int = key(512,
        "maximum MiB in flight on a device in one exchange of a weight sync, which takes two such buckets of memory",
        "一次权重推送的每轮交换中，一个设备上在途数据的上限，单位 MiB；推送共占两个这样的桶", range=Bounds(1, 10**6),
        on_resume="exact")
    update_weight_mode: Literal["full", "delta"] = key("full",
        "slices in a weight sync: all, or those whose bits changed since the last sync; the proof covers all",
        "权重推送传什么：全部切片，或只传自上次推送以来比特有变化的切片；校验始终覆盖全部", on_resume="exact")
    lora_push: Literal["merged", "adapter"] = key("merged",
        "form of low-rank adapters in the engine: merged into the weights, or as an adapter next to weights that are sent once",
        "低秩适配器如何到达引擎：合并进权重，或作为适配器放在只推送一次的权重旁边", on_resume="exact")
    gpu_memory_utilization: float = key(0.5, "fraction of the device memory for weights and KV cache",
        "权重与 KV cache 占设备内存的比例", range=Bounds(0, 1, excludes_low=True), only_on="npu cuda",
        elsewhere="vllm_gpu_memory_utilization sglang_mem_fraction_static", on_resume="exact")
    kv_cache_memory_gib: float | None = key(None, "KV cache of one replica, in GiB; unset: a size for max_num_seqs",
        "一个副本的 KV cache，单位 GiB；不设：够 max_num_seqs 用的大小", range=Range.POSITIVE, needs=("engine", ("vllm",)),
        only_on="cpu", on_resume="exact")
    trust_remote_code: bool = key(False,
        "run Python code that comes with the model folder; leave off for models you do not trust",
        "运行模型文件夹自带的 Python 代码；不信任的模型不要打开", on_resume="exact")

    offload_train_optimizer: bool = key(False, "move optimizer state to host memory while the engine generates",
        "生成时把优化器状态移到主机内存", elsewhere="offload_optimizer optimizer_offload adam_offload", on_resume="exact")
    offload_train_grad: bool = key(False, "free the gradient buffers while the engine generates", "生成时释放梯度缓冲",
        elsewhere="grad_offload", on_resume="exact")
    offload_train_param: bool = key(False, "move the training weights to host memory while the engine generates",
        "生成时把训练权重移到主机内存", elsewhere="offload_model param_offload", on_resume="exact")

    limit_mm_image_per_prompt: int = key(1, "images in the context of a response, at most; models of images",
        "一个回答的上下文中最多的图像数；用于视觉语言模型", range=Range.PROCESSES,
        elsewhere="vllm_limit_mm_per_prompt limit_images", on_resume="exact")
    limit_mm_video_per_prompt: int = key(0, "videos in the context of a response, at most; models that read videos",
        "一个回答的上下文中最多的视频数；用于能读视频的模型", range=Bounds(0, 4096), on_resume="exact")
    enable_prefix_caching: bool = key(False, "share the KV cache of equal prompt prefixes", "相同 prompt 开头共用 KV cache",
        elsewhere="vllm_enable_prefix_caching", on_resume="exact")
    speculative_config: AnyGroup | None = key(None,
        "speculative decoding, by vLLM's names: method, num_speculative_tokens, model and others; see docs/speculative.md",
        "投机解码，名称同 vLLM：method、num_speculative_tokens、model 等，见 docs/zh/speculative.md",
        elsewhere="vllm_speculative_config engine_kwargs.vllm.speculative_config", on_resume="exact")
    enforce_eager: bool = key(True, "no graph capture in the engine", "引擎不捕获计算图", elsewhere="vllm_enforce_eager",
        needs=("engine", ("vllm",)), on_resume="exact")
    cudagraph_capture_sizes: list[int] | None = key(None,
        "batch sizes, in tokens, for which graphs are captured; unset: the engine's own; few of them save streams and memory",
        "捕获计算图的批大小（token 数）；不设时由引擎决定；取少几个可省流与内存", range=Range.TOKENS,
        needs=("enforce_eager", (False,)), only_on="npu cuda", on_resume="exact")
    compilation_config: AnyGroup | None = key(None, "vLLM's settings of compilation and graphs, by vLLM's names",
        "vLLM 的编译与计算图设置，名称同 vLLM", on_resume="exact")
    engine_kwargs: AnyGroup | None = key(None,
        "further arguments of vLLM's engine, by vLLM's names; those that this suite sets are refused",
        "vLLM 引擎的其他参数，名称同 vLLM；由本套件设置的会被拒绝", elsewhere="vllm_engine_kwargs engine_kwargs.vllm",
        on_resume="exact")
    sleep_mode_extra_cleanup: bool | None = key(None,
        "a sleeping engine also frees its HCCL buffers and graphs, and makes them anew when it wakes up; unset: without graphs "
        "(enforce_eager), whose capture would take minutes at each wake-up",
        "引擎睡眠时也释放 HCCL 缓冲与计算图，唤醒时重新建立；不设时仅在不捕获计算图（enforce_eager）时开启，"
        "否则每次唤醒都要重新捕获", only_on="npu", on_resume="exact")
    additional_config: AnyGroup | None = key(None, "vllm-ascend's own settings, by its names, next to this suite's",
        "vllm-ascend 自己的设置，名称同 vllm-ascend，与本套件设置的并用", only_on="npu", on_resume="exact")
    expert_map_path: str | None = key(None, "JSON file with the experts of each device", "说明哪个设备放哪些专家的 JSON 文件",
        only_on="npu", on_resume="exact")
    eplb_token_collects: bool = key(False, "count the tokens of each expert in rollouts",
        "统计 rollout 中发给各专家的 token 数", on_resume="exact")
    eplb_token_save_path: str = key("./", "folder of these counts, a file for each rank; counts of later runs are added",
        "存放这些统计的文件夹，每个 rank 一个文件；以后的运行在其上累加", needs=("eplb_token_collects", (True,)),
        on_resume="exact")

    vllm_server_host: str | list[str] | None = key(None,
        "machines with standalone servers (`mindspeed-rl rollout`) that generate for the run; unset: the run's own engines",
        "运行 `mindspeed-rl rollout` 的机器，在那里生成；不设时用本次运行自己的引擎", on_resume="exact")
    vllm_server_port: int | list[int] = key(8000, "port of these servers: one for all, or one for each host",
        "这些服务器的端口：一个通用，或每台一个", range=Bounds(1, 65535), on_resume="exact")
    vllm_server_timeout: float = key(120.0,
        "seconds a rollout server may be silent, with requests or during a weight sync, before it is removed",
        "推理服务器（生成或推送权重时）最多可沉默多少秒，超过就剔除", range=Range.POSITIVE, on_resume="exact")
    vllm_server_token_file: str | None = key(None,
        "file with the token that these servers require; unset: the variable MINDSPEED_RL_SERVER_TOKEN",
        "存有这些服务器令牌的文件；不设时取变量 MINDSPEED_RL_SERVER_TOKEN", on_resume="exact")

    sampling_config: SamplingConfig = key(SamplingConfig, "sampling of a response", "如何采样一个回答", on_resume="exact")

    @property
    def cache_itemsize(self) -> int:
        """Bytes of a value in the KV cache."""
        return 1 if self.kv_cache_dtype != "auto" else 4 if self.dtype == "float32" else 2

    @property
    def drafts(self) -> dict[str, object] | None:
        """`speculative_config` under vLLM's full names, with the defaults of its methods; None without it."""
        if self.speculative_config is None:
            return None
        given = {name.replace("-", "_"): value for name, value in self.speculative_config.items() if value is not None}
        settings = {_SHORT_NAMES.get(name, name): value for name, value in given.items()}
        method = settings.get("method", settings.get("model"))
        if method in ("ngram", "[ngram]", "suffix"):
            settings["method"] = str(method).strip("[]")
            settings.pop("model", None)
        if settings.get("method") == "suffix":
            settings.setdefault("num_speculative_tokens", _SUFFIX_TOKENS)
        return settings

    @property
    def draft_method(self) -> str:
        """Method of drafts, as it is written; empty without drafts."""
        return str((self.drafts or {}).get("method", ""))

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens of a response in a step at most; 0 without drafts.

        1 without the key: published prediction layers of this suite's families make one.
        """
        tokens = 0 if self.drafts is None else self.drafts.get("num_speculative_tokens", 1)
        return tokens if isinstance(tokens, int) else 0
