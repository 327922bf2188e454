"""The group `generate_config`: layout, memory and sampling of the rollout engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_rl.config.keys.schema import key


@dataclass(kw_only=True)
class SamplingConfig:
    """How one response is drawn.

    A run file without `sampling_config` gets these defaults. A run file with the group replaces it whole: sub-keys it
    leaves out take the engine's neutral values (see `ENGINE_SAMPLING`), not the ones below.
    """

    # the defaults are upstream's
    logprobs: int | None = key(
        1, "log-probabilities returned for each generated token", no_effect="that of the drawn token comes always, no other one"
    )
    max_tokens: int = key(128, "longest response, in tokens")
    top_p: float = key(1.0, "nucleus: probability mass that is kept")
    top_k: int = key(50, "number of most likely tokens that are kept; -1 keeps all")
    min_p: float = key(0.0, "tokens below this fraction of the most likely one are dropped")
    temperature: float = key(0.2, "divides the logits, in rollout and in training alike; 0 is greedy")
    detokenize: bool = key(
        False, "let the engine also turn tokens into text", no_effect="responses stay token ids; who needs text decodes them"
    )
    ignore_eos: bool = key(False, "go on after the end token: every response has max_tokens (for benchmarks)")
    seed: int | None = key(None, "base of the per-sample seeds; the run's seed when unset")


ENGINE_SAMPLING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "temperature": 1.0}


@dataclass(kw_only=True)
class GenerateConfig:
    """Rollout engine: layout, limits, what leaves the device while it generates, sampling."""

    infer_tensor_parallel_size: int = key(
        8, "devices one rollout replica is split over; not written: as many as the actor's weights, if heads allow"
    )
    infer_pipeline_parallel_size: int = key(1, "must be 1: the rollout engine has no pipeline here")
    infer_expert_parallel_size: int = key(
        1, "replicas that share the experts of a MoE model", needs=("enable_expert_parallel", (True,))
    )
    enable_expert_parallel: bool = key(
        False, "keep experts whole and spread them over all devices of the replicas that share them"
    )
    data_parallel_size: int | None = key(None, "derived: devices / infer_tensor_parallel_size", no_effect="the plan derives it")

    max_num_seqs: int = key(
        1, "responses that are generated at the same time in one replica; not written: its share of a rollout"
    )
    max_model_len: int = key(2048, "longest prompt + response, in tokens; not written: max_prompt_length + max_tokens")
    max_num_batched_tokens: int = key(2048, "tokens one engine step may process")
    dtype: Literal["bfloat16", "float32"] = key(
        "bfloat16", "number format of the rollout weights; float32 exactly when bf16 is false"
    )
    update_weights_bucket_mb: int = key(
        512, "most MiB in flight on a device in one exchange of a weight push; a push takes two such buckets of memory"
    )
    update_weight_mode: Literal["full", "delta"] = key(
        "full", "what a weight push carries: all slices, or those whose bits changed since the last push; the proof covers all"
    )
    lora_push: Literal["merged", "adapter"] = key(
        "merged",
        "how low-rank adapters reach the engine: merged into the weights, or as an adapter beside weights that are pushed once",
    )
    gpu_memory_utilization: float = key(0.5, "fraction of the device memory for weights and KV cache", only_on=("npu", "cuda"))
    kv_cache_memory_gib: float | None = key(
        None, "KV cache of one replica, in GiB; unset: a size for max_num_seqs", only_on=("cpu",)
    )
    num_scheduler_steps: int = key(
        1, "engine steps between two schedules", no_effect="the engine's V1 scheduler has no such step"
    )
    trust_remote_code: bool = key(
        False, "run Python code that comes with the model folder; leave off for models you do not trust"
    )
    tokenizer_name_or_path: str | None = key(
        None, "folder of a tokenizer", no_effect="the tokenizer of megatron_training is used"
    )

    offload_train_optimizer: bool = key(False, "move optimizer state to host memory while the engine generates")
    offload_train_grad: bool = key(False, "free the gradient buffers while the engine generates")
    offload_train_param: bool = key(False, "move the training weights to host memory while the engine generates")

    enable_prefix_caching: bool = key(False, "share the KV cache of equal prompt beginnings")
    enforce_eager: bool = key(True, "no graph capture in the engine")
    torchair_graph: bool = key(
        False,
        "torchair graphs in vllm-ascend",
        no_effect="vllm-ascend has none since 0.18; enforce_eager: false captures graphs",
    )
    ascend_scheduler_config_enabled: bool = key(
        True,
        "vllm-ascend's own scheduler instead of chunked prefill",
        no_effect="vllm-ascend has none since 0.18; max_num_batched_tokens bounds a step of vLLM's",
    )
    expert_map_path: str | None = key(None, "JSON file that says which device holds which experts", only_on=("npu",))
    eplb_token_collects: bool = key(False, "count the tokens that each expert is sent in rollouts")
    eplb_token_save_path: str = key(
        "./",
        "folder of these counts, a file for each rank; counts of later runs are added",
        needs=("eplb_token_collects", (True,)),
    )
    limit_mm_image_per_prompt: int = key(1, "images in a prompt", no_effect="text models only")
    limit_mm_video_per_prompt: int = key(0, "videos in a prompt", no_effect="text models only")

    vllm_server_host: str | list[str] | None = key(
        None, "machines on which `mindspeed-rl rollout` serves; the run generates there. Unset: it has engines of its own"
    )
    vllm_server_port: int | list[int] = key(8000, "port of these servers: one for all, or one for each host")
    vllm_server_timeout: float = key(
        120.0, "seconds a rollout server may be silent, with requests or during a weight push, before it is taken out"
    )
    vllm_server_token_file: str | None = key(
        None, "file with the token that these servers ask for; unset: the variable MINDSPEED_RL_SERVER_TOKEN"
    )

    sampling_config: SamplingConfig = key(SamplingConfig, "how one response is drawn")
