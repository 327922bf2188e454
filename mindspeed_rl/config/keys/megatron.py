"""The groups `megatron_training`, `actor_config`, `ref_config`, `reward_config`, `critic_config`: one schema for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mindspeed_rl.config.keys.model import ModelKeys
from mindspeed_rl.config.keys.schema import key

RLStage = Literal["ray_grpo", "ray_dapo", "ray_ppo"]
SupervisedStage = Literal["pretrain", "sft", "dpo", "simpo", "orm", "prm"]
RL_STAGES: tuple[RLStage, ...] = get_args(RLStage)
SUPERVISED_STAGES: tuple[SupervisedStage, ...] = get_args(SupervisedStage)
# Megatron-core's names of a layer's linear modules
LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

_NPU = ("npu",)
#: what selective recomputation can compute again
RecomputedModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
_ONE_ENGINE = "Megatron-core is the only engine"
_TEXT_ONLY = "text models only"
_ALWAYS_FUSED = "on the NPU it is always fused; elsewhere the plain form computes the same"


@dataclass(kw_only=True)
class PromptColumns:
    """Columns of raw prompts; a name left out is the handler's own, an empty one switches the column off."""

    prompt: str | None = key(None, "column of the question, or of the chat messages")
    query: str | None = key(None, "column put under the question")
    response: str | None = key(None, "column of the reference answer")
    system: str | None = key(None, "column of the system prompt")
    history: str | None = key(None, "column of earlier [question, answer] pairs")


@dataclass(kw_only=True)
class DataKeys:
    """Data, tokenizer and sample layout."""

    data_path: str | list[str | float] | None = key(
        None,
        "prefix of the indexed dataset; a list alternates weights and prefixes. Prompts may also be a raw file, a folder or "
        "hf://owner/name, each with [start:stop] or #count behind it",
    )
    eval_data_path: str | None = key(None, "prefix of the held-out dataset; unset: what split holds back, if anything")
    eval_num_prompts: int | None = key(None, "held-out prompts of one evaluation; all when unset")
    split: str | None = key(None, "shares of training, validation and test, for example 100,0,0; only the first trains")
    dataset_additional_keys: list[str] = key([], "further dataset columns that travel with a sample, normally [labels]")
    full_shuffle_instruction_dataset: bool = key(False, "shuffle over all epochs at once instead of inside each")
    no_shuffle: bool = key(False, "read the dataset in file order")
    num_workers: int = key(
        2, "loader processes of a data-parallel rank", no_effect="rows are read from mapped memory, without loader processes"
    )
    dataloader_type: Literal["single", "cyclic", "external"] | None = key(
        None, "order of reading", no_effect="no_shuffle and seed decide the order"
    )
    tokenizer_type: str | None = key(
        None, "kind of tokenizer", no_effect="every tokenizer is a Hugging Face folder (PretrainedFromHF)"
    )
    tokenizer_name_or_path: str | None = key(None, "folder of a Hugging Face tokenizer")
    tokenizer_not_use_fast: bool = key(False, "take the slow Python tokenizer")
    tokenizer_padding_side: Literal["left", "right"] = key(
        "right", "side of padding", no_effect="the engine packs or pads on the right"
    )
    vocab_extra_ids: int = key(0, "ids added to the tokenizer", no_effect="the vocabulary is the model's")
    padded_vocab_size: int | None = key(None, "rows of the embedding; the model's vocabulary when unset")
    make_vocab_size_divisible_by: int = key(
        128,
        "pads the vocabulary to a multiple",
        no_effect="it is padded to padded_vocab_size, or as tensor parallelism needs it",
    )
    prompt_type: str | None = key(None, "chat template of the prompts")
    prompt_type_path: str = key("configs/model/templates.json", "file with further chat templates")
    map_keys: PromptColumns | None = key(None, "raw prompts: columns by preprocessing's names, {prompt: question, query: ''}")
    handler_name: str | None = key(None, "raw prompts: the handler that reads them; found by their columns when unset")
    enable_thinking: bool | None = key(None, "raw prompts: whether the chat template opens a thought; its default when unset")
    system_prompt: str | None = key(None, "raw prompts: system prompt of every row that brings none")
    on_bad_row: Literal["error", "skip"] = key("error", "raw prompts: what a malformed row does")
    is_instruction_dataset: bool = key(False, "rows are prompt and answer", no_effect="the stage decides the row layout")
    is_pairwise_dataset: bool = key(False, "rows are chosen and rejected", no_effect="the stage decides the row layout")
    variable_seq_lengths: bool = key(
        False, "micro-batches keep their own length", no_effect="sequences keep their length always"
    )
    no_pad_to_seq_lengths: bool = key(False, "pad a micro-batch to its own longest sequence, not to seq_length")
    pad_to_multiple_of: int = key(
        1, "multiple every sequence is padded to", no_effect="derived: tensor x context parallel size"
    )
    reset_position_ids: bool = key(False, "positions restart with every sample of a pack")
    reset_attention_mask: bool = key(False, "a sample of a pack sees only itself")
    attention_mask_type: Literal["causal", "general"] = key(
        "causal", "mask form of the fused attention", no_effect="it is causal always, inside each sample of a pack"
    )
    pack: bool = key(False, "rows of the dataset hold several samples each")
    neat_pack: bool = key(False, "packed samples see only themselves; needs pack and reset_attention_mask")
    # the token of the Math-Shepherd data, as upstream has it
    placeholder_token: str = key("ки", "prm: the token at which a step is judged")
    reward_tokens: list[str] = key([], "prm: the tokens that stand for judgements")


@dataclass(kw_only=True)
class ParallelKeys:
    """How a model is split over devices."""

    num_npus: int | None = key(None, "devices of a run without rl_config; tensor x pipeline x context parallel size when unset")
    tensor_model_parallel_size: int = key(1, "devices one layer is split over")
    pipeline_model_parallel_size: int = key(1, "consecutive groups of layers, each on its own devices")
    expert_model_parallel_size: int = key(1, "devices the experts of a layer are spread over")
    expert_tensor_parallel_size: int | None = key(
        None, "devices one expert is split over; unset: 1 with moe_tp_extend_ep, otherwise the tensor parallel size"
    )
    context_parallel_size: int = key(1, "devices one sequence is split over")
    context_parallel_algo: Literal["ulysses_cp_algo", "megatron_cp_algo"] = key(
        "ulysses_cp_algo", "context parallelism by heads (Ulysses) or by ring (megatron_cp_algo)"
    )
    num_layers_per_virtual_pipeline_stage: int | None = key(None, "layers of a chunk in the interleaved pipeline schedule")
    num_layer_list: str | int | list[int] | None = key(None, 'layers of each pipeline stage, for example "16,17,16,15"')
    noop_layers: str | int | list[int] | None = key(None, 'layer numbers that do nothing, for example "5,95"')
    use_tp_pp_dp_mapping: bool = key(False, "rank order tp-cp-pp-dp instead of tp-cp-dp-pp")
    moe_tp_extend_ep: bool = key(False, "spread whole experts over the tensor parallel ranks instead of splitting them")
    sequence_parallel: bool = key(False, "split the activations between tensor parallel layers")
    distributed_backend: str = key("nccl", "collective library", no_effect="the platform decides: hccl, gloo or nccl")


@dataclass(kw_only=True)
class OptimizerKeys:
    """Optimizer, schedule and the communication around it."""

    # the defaults of this group are Megatron-LM's, on which upstream's run files rely
    optimizer: Literal["adam"] = key("adam", "AdamW")
    lr: float | None = key(None, "peak learning rate")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = key(
        "linear", "schedule after the warm-up"
    )
    lr_decay_iters: int | None = key(None, "iterations until min_lr; train_iters when unset")
    lr_warmup_fraction: float | None = key(None, "warm-up as a fraction of lr_decay_iters")
    lr_warmup_iters: int = key(0, "warm-up in iterations; not together with lr_warmup_fraction")
    lr_warmup_init: float = key(0.0, "learning rate at the start of the warm-up")
    min_lr: float = key(0.0, "learning rate at the end")
    weight_decay: float = key(0.01, "decoupled weight decay")
    clip_grad: float = key(1.0, "global gradient norm above which gradients are scaled down; 0 turns it off")
    adam_beta1: float = key(0.9, "decay of the first moment")
    adam_beta2: float = key(0.999, "decay of the second moment")
    adam_eps: float = key(1e-8, "added to the root of the second moment")
    initial_loss_scale: float = key(float(2**32), "loss scale", no_effect="only fp16 scales its loss; bf16 and fp32 need none")
    use_distributed_optimizer: bool = key(False, "split optimizer state over the data-parallel ranks")
    overlap_grad_reduce: bool = key(False, "reduce gradients while the backward pass goes on")
    overlap_param_gather: bool = key(False, "gather weights while the forward pass goes on")
    accumulate_allreduce_grads_in_fp32: bool = key(
        False, "sum gradients in fp32", no_effect="gradients are always summed in fp32"
    )
    no_check_for_nan_in_loss_and_grad: bool = key(False, "do not stop at NaN or infinity")
    no_gradient_accumulation_fusion: bool = key(
        False, "no fused gradient accumulation", no_effect="only gemm_gradient_accumulation_fusion fuses it"
    )
    gemm_gradient_accumulation_fusion: bool = key(False, "accumulate gradients inside the matrix product", only_on=_NPU)
    ddp_bucket_size: int | None = key(None, "elements of one gradient bucket")
    enable_high_availability: bool = key(False, "MindIO training recovery", no_effect="checkpoints and resume cover restarts")


@dataclass(kw_only=True)
class CheckpointKeys:
    """Loading, saving, resuming."""

    load: str | None = key(None, "folder with Megatron checkpoints or a Hugging Face model")
    save: str | None = key(None, "folder checkpoints go to")
    save_interval: int | None = key(None, "iterations between checkpoints; unset: only the last one")
    save_hf: bool = key(False, "also write each checkpoint as a Hugging Face folder")
    keep_last: int | None = key(None, "checkpoints that are kept; all when unset")
    async_save: bool = key(False, "write checkpoints in the background", needs=("ckpt_format", ("torch_dist",)))
    ckpt_format: Literal["torch", "torch_dist"] = key("torch_dist", "one file a rank, or sharded and loadable under any layout")
    load_iteration: int | None = key(None, "which checkpoint of `load`; the newest when unset")
    load_previous: bool = key(False, "go on from the newest sound checkpoint of `load` when the newest is damaged")
    sigterm_grace_s: float = key(60.0, "seconds that SIGTERM leaves the running iteration to end and be saved")
    finetune: bool = key(False, "load weights only: no optimizer, no random state, iteration 0")
    no_load_optim: bool | None = key(None, "do not load the optimizer")
    no_load_rng: bool | None = key(None, "do not load the random state")
    no_save_optim: bool | None = key(None, "do not save the optimizer")
    no_save_rng: bool | None = key(None, "do not save the random state")
    pretrained_checkpoint: str | None = key(None, "folder to start from when `load` holds no checkpoint yet")
    load_checkpoint_loosely: bool = key(
        False, "weights missing in the checkpoint keep their fresh values, unknown ones are skipped"
    )
    no_shared_storage: bool = key(
        False, "each node builds the dataset index on its own disk", no_effect="the order is computed; no index file is built"
    )


@dataclass(kw_only=True)
class MemoryKeys:
    """Recomputation, swapping, low-rank adapters."""

    recompute_granularity: Literal["full", "selective"] | None = key(None, "recompute whole layers or only attention")
    recompute_method: Literal["uniform", "block"] | None = key(
        None, "full: chunks of equal size, or the first layers only", needs=("recompute_granularity", ("full",))
    )
    recompute_num_layers: int | None = key(
        None, "full: layers of a chunk or of the block", needs=("recompute_granularity", ("full",))
    )
    recompute_modules: list[RecomputedModule] | None = key(
        None, "selective: modules that are recomputed", needs=("recompute_granularity", ("selective",))
    )
    recompute_activation_function: bool = key(False, "recompute the activation function of the MLP")
    swap_attention: bool = key(False, "move attention activations to host memory", only_on=_NPU)
    swap_optimizer: bool = key(False, "keep optimizer state in host memory")
    reuse_fp32_param: bool = key(False, "bf16 weights share the storage of their fp32 copies", only_on=_NPU)
    loss_chunk_size: int = key(1024, "tokens whose vocabulary logits exist at the same time")
    lora_target_modules: list[str] | None = key(
        None, "layers with adapters: linear_qkv linear_proj linear_fc1 linear_fc2; unset: no LoRA"
    )
    lora_r: int = key(8, "rank of the adapters")
    lora_alpha: int = key(16, "scale of the adapters is lora_alpha / lora_r")
    lora_dropout: float = key(0.0, "dropout in front of the adapters")
    lora_fusion: bool = key(
        False, "overlap adapter communication", no_effect="adapters exchange lora_r numbers a token; nothing to overlap"
    )
    lora_ckpt_filter: bool = key(False, "save the adapters only")


@dataclass(kw_only=True)
class KernelKeys:
    """Fused kernels and builder switches; off the NPU the plain modules compute the same."""

    use_flash_attn: bool = key(False, "fused attention", no_effect=_ALWAYS_FUSED)
    use_rotary_position_embeddings: bool = key(False, "rotary positions", no_effect="position_embedding_type decides")
    use_fused_rmsnorm: bool = key(False, "fused RMSNorm", no_effect=_ALWAYS_FUSED)
    use_fused_swiglu: bool = key(False, "fused SwiGLU", no_effect=_ALWAYS_FUSED)
    use_fused_rotary_pos_emb: bool = key(False, "fused rotary embedding", no_effect=_ALWAYS_FUSED)
    no_bias_dropout_fusion: bool = key(False, "no fused bias and dropout", no_effect="they are never fused")
    no_masked_softmax_fusion: bool = key(
        False, "no fused masked softmax", no_effect="the attention of no platform has a separate masked softmax"
    )
    attention_softmax_in_fp32: bool = key(
        False, "attention softmax in fp32", no_effect="the attention of every platform computes it in fp32"
    )
    use_cp_send_recv_overlap: bool = key(
        False, "ring attention: overlap sending and receiving", no_effect="the ring always overlaps them with attention"
    )
    use_fused_ring_attention_update: bool = key(
        False, "ring attention: fused merge of partial results", no_effect="the ring merges with plain tensor operations"
    )
    use_ascend_coc: bool = key(False, "overlap tensor parallel communication with computation", only_on=_NPU)
    coc_mode: int = key(-1, "variant of that overlap", only_on=_NPU, needs=("use_ascend_coc", (True,)))
    coc_parallel_num: int = key(1, "pieces of that overlap", only_on=_NPU, needs=("use_ascend_coc", (True,)))
    coc_fused_kernel: bool = key(False, "fused kernels for that overlap", only_on=_NPU, needs=("use_ascend_coc", (True,)))
    hccl_group_buffer: str | None = key(
        None, "MiB of HCCL buffers by process group, like tp:256;dp:64; others have rl_config.hccl_buffersize", only_on=_NPU
    )
    shape_order: Literal["SBH", "BSH", "BSND", "BNSD", "TND"] = key(
        "SBH", "memory order of the fused attention", no_effect="packed rows are TND, padded ones BSND"
    )
    spec: list[str] | None = key(None, "module and function of a layer spec", no_effect="the network keys choose the layers")
    use_mcore_models: bool = key(False, "Megatron-core models", no_effect=_ONE_ENGINE)
    transformer_impl: Literal["local", "transformer_engine"] = key(
        "local", "layer implementation", no_effect="always local layers"
    )
    mm_model: str | None = key(None, "JSON of a multimodal model", no_effect=_TEXT_ONLY)
    algorithm: str | None = key(None, "unused name of an algorithm", no_effect="adv_estimator and loss_type say it")
    do_sample: bool = key(False, "sample instead of greedy", no_effect="sampling_config says it")
    use_kv_cache: bool = key(False, "keep keys and values while generating", no_effect="the rollout engine always does")


@dataclass(kw_only=True)
class PreferenceKeys:
    """Stages dpo and simpo."""

    dpo_loss_type: Literal["sigmoid", "hinge", "ipo"] = key("sigmoid", "dpo: form of the loss")
    dpo_beta: float = key(0.1, "dpo: strength of the tie to the reference")
    dpo_label_smoothing: float = key(0.0, "dpo: probability that a preference is wrong")
    pref_ftx: float = key(0.0, "dpo, simpo: weight of the supervised loss on the chosen answer")
    simpo_beta: float = key(2.5, "simpo: scale of the length-averaged log-probabilities")
    gamma_beta_ratio: float = key(1.4, "simpo: margin / simpo_beta")
    simpo_loss_type: Literal["sigmoid", "hinge"] = key("sigmoid", "simpo: form of the loss")
    simpo_label_smoothing: float = key(0.0, "simpo: probability that a preference is wrong")
    ref_model: str = key("", "dpo: folder of the reference weights; the policy's own start when empty")
    refer_model_iter: int = key(1, "dpo: iteration of that checkpoint")


@dataclass(kw_only=True)
class MegatronConfig(ModelKeys, DataKeys, ParallelKeys, OptimizerKeys, CheckpointKeys, MemoryKeys, KernelKeys, PreferenceKeys):
    """One role's training engine. `megatron_training` holds what all roles share."""

    # one Literal, so that a wrong stage is answered with the nearest of all
    stage: Literal[RLStage, SupervisedStage] | None = key(None, "what is trained and with which loss")
    model: str | None = key(None, "name of the model block whose keys are applied first")
    global_batch_size: int | None = key(
        None,
        "prompts of one iteration; with num_generations completions of an optimizer step; supervised stages: samples of a step",
    )
    micro_batch_size: int | None = key(None, "samples of one forward pass of a data-parallel rank; 1 when unset")
    train_iters: int | None = key(None, "iterations of the run: rollouts in reinforcement learning, optimizer steps elsewhere")
    train_epochs: float | None = key(
        None, "passes over the prompts, in place of train_iters; reinforcement learning, one rollout an iteration"
    )
    seq_length: int | None = key(None, "longest training sequence of supervised stages; at most max_model_len")

    seed: int = key(1234, "seed of the run")
    bf16: bool = key(True, "weights and activations in bfloat16 with fp32 master weights; false: everything in fp32")
    npu_deterministic: bool = key(False, "reproducible kernels on the NPU", only_on=_NPU)
    deterministic: bool = key(False, "reproducible kernels on CPU and CUDA", only_on=("cpu", "cuda"))
    ai_framework: Literal["mindspore"] | None = key(None, "backend below the engine; only torch (null) is available")

    # Megatron-LM's defaults again
    log_interval: int = key(100, "supervised stages: iterations between two metric lines")
    log_throughput: bool = key(False, "log floating point operations", no_effect="throughput is always logged")
    eval_iters: int = key(100, "supervised stages: batches of one evaluation")
    eval_interval: int = key(1000, "iterations between evaluations", needs=None)
    skip_train: bool = key(False, "evaluate only")

    def __post_init__(self) -> None:
        """Write both layer lists as text and derive the padding, as upstream does."""
        self.num_layer_list = joined(self.num_layer_list)
        self.noop_layers = joined(self.noop_layers)
        self.pad_to_multiple_of = self.tensor_model_parallel_size * self.context_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Devices of one replica of the model, without expert parallelism."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def expert_sizes(self) -> tuple[int, int]:
        """Devices that share the experts of a layer, and devices one expert is split over.

        With moe_tp_extend_ep whole experts are spread over the tensor parallel ranks too.
        """
        if self.moe_tp_extend_ep:
            return self.expert_model_parallel_size * self.tensor_model_parallel_size, 1
        return self.expert_model_parallel_size, self.expert_tensor_parallel_size or self.tensor_model_parallel_size


def split_shares(split: str | None) -> tuple[float, float, float]:
    """Return the shares of training, validation and test that `split` gives, of one in all; everything trains when unset.

    Raises:
        ValueError: the shares are not up to three numbers that are not negative.
    """
    try:
        shares = [float(share) for share in (split or "1").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or sum(shares) <= 0:
        raise ValueError(f"split: {split!r} must give shares of training, validation and test data, such as 95,5,0.")
    # Megatron fills up and normalizes the shares likewise
    first, second, third = (share / sum(shares) for share in (*shares, 0.0, 0.0)[:3])
    return first, second, third


def evaluates(role: MegatronConfig) -> bool:
    """Return whether there is something to evaluate on: a dataset for it, or what `split` holds back."""
    try:
        return role.eval_data_path is not None or split_shares(role.split)[1] > 0
    except ValueError:
        return False  # a rule of its own says what is wrong with it


def is_weight(item: str | float) -> bool:
    """Return whether this is a number of a data_path that alternates weights and prefixes."""
    try:
        float(item)  # as text too, as in Megatron's own --data-path
    except ValueError:
        return False
    return True


def joined(layers: str | int | list[int] | None) -> str | None:
    """Return a layer list as comma-separated text."""
    if layers is None or isinstance(layers, str):
        return layers
    return ",".join(str(layer) for layer in ([layers] if isinstance(layers, int) else layers))
