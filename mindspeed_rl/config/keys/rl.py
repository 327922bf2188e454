"""The group `rl_config`: rollout batches, advantages, losses, rewards, data plane, devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_rl.catalogue import ADVANTAGES, CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES, needing, readers
from mindspeed_rl.catalogue.records import Level, Scale
from mindspeed_rl.config.keys.deadlines import DeadlineKeys, FaultTolerance
from mindspeed_rl.config.keys.schema import key

_CRITIC = ("adv_estimator", needing(ADVANTAGES, "values"))
_RULES = ("rule_reward", (True,))
_CLIP_HIGHER = ("clip_higher_enable", (True,))
_OVERLONG = ("overlong_buffer_enable", (True,))
_FILTER = ("filter_groups_enable", (True,))
_DYNAMIC = ("use_dynamic_bsz", (True,))
_ADAPTIVE = ("kl_ctrl_type", ("adaptive",))
_TOOLS = ("multi_turn_enable", (True,))
_QUEUE = ("data_strategy", ("tq", "transfer_queue", "queue"))
_MISMATCH = ("rollout_importance_sampling_mode", tuple(CORRECTIONS))
_SYNC_REF = ("sync_ref_model", (True,))
_ASYNC = ("trainer_mode", ("async",))
_WANDB = ("use_wandb", (True,))
_SWANLAB = ("use_swanlab", (True,))
_MLFLOW = ("use_mlflow", (True,))
_TEXT_ONLY = "text models only"


def _reading(setting: str) -> tuple[str, tuple[str, ...]]:
    """The condition of a key that only some advantage estimators read."""
    return "adv_estimator", readers(ADVANTAGES, setting)


def _in_loss(setting: str) -> tuple[str, tuple[str, ...]]:
    """The condition of a key that only some policy losses read."""
    return "loss_type", readers(POLICY_LOSSES, setting)


@dataclass(kw_only=True)
class Resource:
    """Devices of one role."""

    num_npus: int | None = key(None, "devices of the role over all nodes, whatever their kind")


@dataclass(kw_only=True)
class IntegratedModeConfig:
    """Extras of the mode in which actor, reference and rollout share devices."""

    ref_model_load_path: str | None = key(None, "weights of the reference model; the actor's start when unset")


@dataclass(kw_only=True)
class RouterReplay:
    """Which experts the actor sends the tokens of a rollout to; docs/router_replay.md."""

    mode: Literal["disabled", "R2", "R3"] = key(
        "disabled",
        "R2: the update sends tokens where the pass of the old log-probabilities did; R3: both send them where the rollout "
        "engine did; models with experts only",
    )


@dataclass(kw_only=True)
class BatchKeys:
    """Sizes. Prompt-level and completion-level keys say the same plan in two ways; `build_batch_plan` derives the rest."""

    n_samples_per_prompt: int = key(1, "responses drawn for each prompt (the group)")
    mini_batch_size: int = key(1, "prompts of one optimizer step")
    epochs: int = key(1, "passes over one rollout batch")
    num_iterations: int | None = key(None, "the same as epochs, in the words of ms-swift and TRL")
    num_generations: int | None = key(
        None, "the group size; setting it switches to completion-level counting of global_batch_size"
    )
    generation_batch_size: int | None = key(None, "completions of one rollout; a multiple of global_batch_size", needs=None)
    steps_per_generation: int | None = key(None, "optimizer steps of one rollout; not together with generation_batch_size")
    max_prompt_length: int = key(512, "prompts of at least this many tokens are left out")
    max_completion_length: int | None = key(None, "the same as sampling_config.max_tokens")
    actor_forward_micro_batch_size: int | None = key(
        None, "samples of one log-probability pass of the actor; micro_batch_size when unset"
    )
    ref_forward_micro_batch_size: int | None = key(
        None, "samples of one log-probability pass of the reference; micro_batch_size when unset"
    )
    vit_forward_micro_batch_size: int | None = key(None, "images of one encoder pass", no_effect=_TEXT_ONLY)

    actor_rollout_dispatch_size: int | None = key(None, "rows a rollout replica takes at once; derived when unset")
    actor_logprob_dispatch_size: int | None = key(
        None, "rows an actor replica takes at once for log-probabilities; derived when unset"
    )
    ref_dispatch_size: int | None = key(None, "rows a reference replica takes at once; derived when unset")
    reward_dispatch_size: int | None = key(None, "rows scored at once; derived when unset")
    adv_dispatch_size: int | None = key(
        None, "rows whose advantages are computed at once", no_effect="those of an iteration are computed together"
    )
    actor_update_dispatch_size: int | None = key(
        None, "rows an actor replica takes at once for the update", no_effect="it takes the rows of one optimizer step"
    )
    dynamic_sampling_dispatch_size: int | None = key(
        None, "rows filtered at once", no_effect="groups are filtered when a rollout is through"
    )
    kl_dispatch_size: int | None = key(
        None, "rows whose KL enters the reward at once", no_effect="it enters together with the advantages"
    )
    critic_value_dispatch_size: int | None = key(None, "rows a critic replica takes at once for values; derived when unset")
    critic_update_dispatch_size: int | None = key(
        None, "rows a critic replica takes at once for the update", no_effect="it takes the rows of one optimizer step"
    )
    actor_image_embeds_dispatch_size: int | None = key(None, "rows encoded at once", no_effect=_TEXT_ONLY)

    use_remove_padding: bool = key(False, "pack sequences without padding")
    use_prefix_grouper: bool = key(
        False,
        "compute a prompt once for all its samples in a micro-batch, instead of once a sample",
        needs=("use_remove_padding", (True,)),
    )
    use_dynamic_bsz: bool = key(False, "fill micro-batches up to a token budget instead of a row count")
    max_packing_token_size: int = key(
        4096, "token budget of a micro-batch; the three keys below take it when unset", needs=_DYNAMIC
    )
    ref_max_packing_token_size: int | None = key(None, "token budget of the reference pass", needs=_DYNAMIC)
    actor_max_packing_token_size: int | None = key(None, "token budget of the actor's log-probability pass", needs=_DYNAMIC)
    update_max_packing_token_size: int | None = key(None, "token budget of the update", needs=_DYNAMIC)
    dynamic_max_batch_size: int | None = key(
        None, "rows of a micro-batch at most; the three keys below take it when unset", needs=_DYNAMIC
    )
    ref_dynamic_max_batch_size: int | None = key(None, "the same for the reference pass", needs=_DYNAMIC)
    actor_dynamic_max_batch_size: int | None = key(None, "the same for the actor's log-probability pass", needs=_DYNAMIC)
    update_dynamic_max_batch_size: int | None = key(None, "the same for the update", needs=_DYNAMIC)
    use_dp_batch_balance: bool = key(False, "deal rows to data-parallel ranks so that each has about the same tokens")
    guarantee_order: bool = key(False, "rows keep their place, so that a run repeats exactly")
    shuffle_mini_batch: bool = key(False, "shuffle rows before they are cut into mini-batches")


@dataclass(kw_only=True)
class ModeKeys:
    """Whether responses are generated while others train, and how old they may be then."""

    trainer_mode: Literal["sync", "one_step_off", "async"] = key(
        "sync",
        "sync: an iteration trains on its own rollout; one_step_off: on that of the iteration before; async: on what is ready; "
        "the latter two need a rollout engine with devices of its own",
    )
    max_off_policy_threshold: float = key(
        1.0,
        "versions of the weights by which the rollout may be ahead; 0 equals sync, a fraction is a part of the last version's "
        "prompts",
        needs=_ASYNC,
    )
    max_off_policy_strategy: Literal["pace", "wait", "drop"] = key(
        "pace",
        "pace: prompts are started only while all will train in time, and are taken as they become ready; wait: taken strictly "
        "in their order; drop: more are started, and what is too old is thrown away",
        needs=_ASYNC,
    )
    parameter_sync_step: int = key(1, "iterations between two pushes of the weights to the rollout engine", needs=_ASYNC)
    num_warmup_batches: int = key(
        1, "iterations' worth of responses that are ready before the first iteration trains", needs=_ASYNC
    )
    partial_rollout: bool = key(
        True, "new weights interrupt responses, which go on with them; false: they wait until all have ended", needs=_ASYNC
    )
    partial_rollout_max_split: int = key(
        1, "sync: rollouts that a long response may be spread over; each lets it grow by max_tokens divided by this"
    )
    require_max_age_all_finished: bool = key(
        True,
        "finish the oldest partial responses",
        # all values above 1 that its bounds allow
        needs=("partial_rollout_max_split", tuple(range(2, 65))),
        no_effect="every response has ended after partial_rollout_max_split rollouts",
    )
    num_samples_per_step: int = key(1, "unused", no_effect="the rollout engine schedules by itself")
    off_policy_token_limit: float | None = key(
        None, "tokens of weights that are older by more versions than this do not train; off when unset"
    )
    async_generate: bool | None = key(None, "true is trainer_mode one_step_off, in the words of ms-swift")


@dataclass(kw_only=True)
class AdvantageKeys:
    """From rewards to advantages."""

    # text, not a Literal, like every name of an algorithm: a plug-in is module:NAME
    adv_estimator: str = key("group_norm", "how advantages are computed", names=tuple(ADVANTAGES))
    scale_rewards: Scale = key("group", "what centred rewards are divided by the spread of")
    adv_epsilon: float = key(1e-6, "added to the spread before dividing; TRL and ms-swift take 1e-4")
    gamma: float = key(1.0, "discount of later tokens", needs=_reading("gamma"))
    lam: float = key(0.95, "GAE: bias against variance", needs=_reading("lam"))
    advantage_whiten: bool = key(
        True,
        "whiten advantages over the batch",
        needs=_reading("advantage_whiten"),
    )
    critic_warmup: int = key(0, "iterations in which only the critic learns", needs=_CRITIC)
    cliprange_value: float = key(0.5, "how far a value may move from its old one before the loss is clipped", needs=_CRITIC)


@dataclass(kw_only=True)
class LossKeys:
    """From advantages to the policy loss."""

    loss_type: str | None = key(
        None,
        "form and normalizer of the loss; cispo_cap takes clip_ratio_high as an absolute cap; gspo is grpo on sequences; "
        "unset: token mean over the global batch, for ray_dapo with token_level_loss false the mean of sequence means",
        names=tuple(POLICY_LOSSES),
    )
    importance_sampling_level: Level | None = key(
        None, "what the ratio new / old is computed over; unset: token, for gspo sequence"
    )
    token_level_loss: bool = key(True, "stage ray_dapo without loss_type: token mean instead of the mean of sequence means")
    clip_ratio: float = key(0.2, "the ratio is clipped to 1 - clip_ratio .. 1 + clip_ratio")
    clip_higher_enable: bool = key(False, "clip by clip_ratio_low and clip_ratio_high instead")
    clip_ratio_low: float = key(0.1, "the ratio is clipped at 1 - this", needs=_CLIP_HIGHER)
    clip_ratio_high: float = key(0.1, "the ratio is clipped at 1 + this; the cap itself for cispo_cap", needs=_CLIP_HIGHER)
    clip_ratio_c: float | None = key(None, "dual clip: bound of the loss for negative advantages, above 1; off when unset")
    delta: float | None = key(
        None, "two-sided clip: the unclipped ratio is capped here, at least 1 + the upper clip; off when unset"
    )
    tau_pos: float = key(1.0, "sapo: temperature for positive advantages", needs=_in_loss("tau_pos"))
    tau_neg: float = key(1.05, "sapo: temperature for negative advantages", needs=_in_loss("tau_neg"))
    entropy_coeff: float = key(0.0, "weight of the entropy bonus")
    log_entropy: bool = key(
        False,
        "log the entropy even when it is not in the loss",
        no_effect="it is always logged, the log-probs give it for free",
    )
    top_entropy_quantile: float = key(1.0, "share of tokens, those of highest entropy, that enter the policy term")
    off_policy_sequence_mask_delta: float | None = key(
        None, "leave out sequences with negative advantage whose mean log-ratio old - new exceeds this; off when unset"
    )
    overlong_filter: bool = key(False, "truncated responses do not train")
    rollout_importance_sampling_mode: str | None = key(
        None,
        "weights that correct for the difference between rollout engine and trainer: of each token, of the "
        "sequence (product of "
        "its tokens) or its geometric mean, bounded or masked; token_geometric_mask: token weights, sequences "
        "masked by their mean",
        names=tuple(CORRECTIONS),
    )
    rollout_importance_sampling_threshold: float = key(2.0, "upper bound of that correction", needs=_MISMATCH)
    rollout_importance_sampling_threshold_min: float | None = key(None, "lower bound of the masking forms", needs=_MISMATCH)
    log_rollout_offpolicy_metrics: bool = key(True, "log how far trainer and rollout engine disagree")
    log_probs_diff_limit: float | None = key(
        None, "stop when trainer and rollout log-probabilities differ by more; off when unset"
    )
    router_replay: RouterReplay = key(RouterReplay, "which experts the actor sends the tokens of a rollout to")
    use_routing_replay: bool | None = key(None, "true is router_replay.mode R2, in the words of slime")
    use_rollout_routing_replay: bool | None = key(None, "true is router_replay.mode R3, in the words of slime")
    enable_rollout_routing_replay: bool | None = key(None, "true is router_replay.mode R3, in the words of verl")


@dataclass(kw_only=True)
class KlKeys:
    """The tie to the reference model."""

    kl_penalty: str = key("low_var_kl", "estimator of the KL divergence", names=tuple(KL_ESTIMATORS))
    kl_ctrl_type: Literal["fixed", "adaptive"] = key("fixed", "constant coefficient, or one steered towards kl_target")
    init_kl_coef: float = key(0.01, "coefficient of the KL divergence; no reference model is needed when 0")
    # upstream's run files carry a beta that it never reads; num_generations tells that ms-swift's is meant
    beta: float | None = key(None, "the same as init_kl_coef in the words of ms-swift; read only together with num_generations")
    kl_horizon: int = key(1000, "adaptive: samples over which the coefficient moves", needs=_ADAPTIVE)
    kl_target: float = key(100.0, "adaptive: divergence that is aimed at", needs=_ADAPTIVE)
    use_kl_in_reward: bool = key(False, "subtract the KL from the rewards instead of adding it to the loss")
    kl_clamp: bool = key(True, "clamp the log-ratio to +-20 and low_var_kl to +-10, as MindSpeed-RL does; TRL does not")
    use_bias_correction_kl: bool = key(False, "multiply the KL by the ratio new / old (unbiased off-policy)")
    sync_ref_model: bool = key(False, "let the reference follow the actor")
    ref_model_sync_steps: int = key(512, "iterations between two such moves", needs=_SYNC_REF)
    ref_model_mixup_alpha: float = key(0.6, "share of the actor in the moved reference", needs=_SYNC_REF)


@dataclass(kw_only=True)
class RewardKeys:
    """Who scores, how failures count, which groups are kept."""

    rule_reward: bool = key(True, "score by functions; false: only by a reward model")
    verifier_function: list[str] = key(["base_acc"], "reward functions by name or as module:function", needs=_RULES)
    verifier_weight: list[float] = key([1.0], "weight of each", needs=_RULES)
    reward_funcs: list[str] | None = key(None, "the same as verifier_function, in the words of ms-swift")
    reward_weights: list[float] | None = key(None, "the same as verifier_weight; 1.0 each when unset")
    external_plugins: list[str] = key(
        [],
        "Python files that register further reward functions; their folders also hold losses and estimators "
        "given as module:NAME",
    )
    # upstream never reads this key and the next
    verifier_parallel: int = key(1, "reward worker processes when num_reward_workers is unset")
    verifier_timeout: int = key(30, "seconds one score may take when reward_timeout_s is unset")
    num_reward_workers: int | None = key(None, "reward worker processes; verifier_parallel when unset")
    reward_timeout_s: float | None = key(None, "seconds one score may take; verifier_timeout when unset")
    reward_memory_gib: float | None = key(4.0, "memory one reward process may use, in GiB; null: no limit")
    reward_failure_policy: Literal["drop", "retry", "zero"] = key("drop", "what happens to a sample whose score failed")
    reward_failure_limit: float = key(0.1, "share of failed scores, of the last 1024, above which the run stops")
    unscored_iterations_limit: int = key(
        3, "iterations in a row without a score for any response after which the run stops; 0: it goes on"
    )
    reward_model: str | None = key(None, "folder of a reward model whose score is added last")
    reward_model_weight: float = key(1.0, "its weight beside the reward functions")
    process_reward_aggregation: Literal["min", "mean", "product", "last", "max"] = key(
        "min", "how the scores of steps become that of the response, for a reward model with reward_tokens"
    )
    judge_url: str | None = key(None, "OpenAI-compatible endpoint of a generative judge; off when unset")
    judge_model: str | None = key(None, "model name sent to that endpoint")
    judge_prompt: str | None = key(None, "file with the judge's prompt template")
    judge_parser: str | None = key(None, "module:function that turns the judge's reply into a score")
    judge_weight: float = key(1.0, "weight of the judge's score")
    judge_timeout_s: float = key(60.0, "seconds one reply may take")
    cosine_min_len_value_wrong: float = key(-0.5, "cosine: a wrong answer of length 0")
    cosine_max_len_value_wrong: float = key(0.0, "cosine: a wrong answer of full length")
    cosine_min_len_value_correct: float = key(1.0, "cosine: a right answer of length 0")
    cosine_max_len_value_correct: float = key(0.5, "cosine: a right answer of full length")
    cosine_max_len: int | None = key(None, "cosine: full length in tokens; max_tokens when unset")
    repetition_n_grams: int = key(3, "repetition: length of the counted pieces")
    repetition_max_penalty: float = key(-1.0, "repetition: score of a response that only repeats")
    soft_max_length: int | None = key(None, "soft_overlong: length with the full penalty; max_tokens when unset")
    soft_cache_length: int | None = key(
        None, "soft_overlong: tokens before it over which the penalty grows; required by soft_overlong"
    )
    overlong_buffer_enable: bool = key(False, "penalize responses near the length limit")
    overlong_buffer: int = key(0, "tokens before the limit over which the penalty grows", needs=_OVERLONG)
    overlong_buffer_penalty_factor: float = key(1.0, "penalty at the limit", needs=_OVERLONG)
    # upstream says the limit here once more; a rule holds both together
    rollout_max_tokens: int = key(2048, "the limit; equal to max_tokens", needs=_OVERLONG)
    filter_groups_enable: bool = key(False, "train only on groups whose metric varies, generate until there are enough")
    filter_groups_metric: str = key("acc", "reward function that must vary", needs=_FILTER)
    filter_groups_max_batches: int = key(1, "rollouts an iteration may take; 0 or less: no limit", needs=_FILTER)
    filter_groups_train_batch_size: int = key(1, "prompts that are trained on in an iteration", needs=_FILTER)
    dynamic_sample: bool = key(False, "replace groups whose total reward does not vary by fresh ones")
    max_resample_times: int = key(3, "extra rollouts an iteration may take", needs=("dynamic_sample", (True,)))
    log_completions: bool = key(False, "write prompts, responses, reward parts and advantages to completions.jsonl")
    log_completions_interval: int = key(1, "iterations between two such writes", needs=("log_completions", (True,)))
    log_completions_keep: int = key(16, "completions of one such write", needs=("log_completions", (True,)))
    save_rollouts_interval: int = key(
        0, "iterations between two rollout batches in rollouts/ of the run folder, for `mindspeed-rl parity`; 0: none"
    )
    eval_greedy: bool = key(True, "evaluate with temperature 0 instead of the training sampling")


@dataclass(kw_only=True)
class ToolKeys:
    """Samples of several turns: tools, environments, schedulers."""

    multi_turn_enable: bool = key(False, "samples of several turns, by an agent loop")
    agent_loop: str | None = key(
        None,
        "how a sample is made, by name or module:Class; by default environment, scheduler or tool_agent where environment, "
        "multi_turn_scheduler or tool_config_path is set, else single_turn",
        names=("single_turn", "tool_agent", "scheduler", "environment"),
        needs=_TOOLS,
    )
    max_turns: int | None = key(None, "turns of the model in one sample; as many as fit when unset", needs=_TOOLS)
    environment: str | None = key(
        None,
        "module:Class of an environment with reset, step and close, verifiers:NAME of that library, or a YAML file that names "
        "one under environment, with args, python and timeout_s",
        needs=_TOOLS,
    )
    multi_turn_scheduler: str | None = key(
        None,
        "module:Class with step and check_finished, or module:function of a list of rows, as ms-swift has them",
        needs=_TOOLS,
    )
    trajectory_reward: Literal["both", "turns", "final", "none"] = key(
        "both", "what tools and environments give that is added to the reward: for turns, for the final state", needs=_TOOLS
    )
    trajectory_reward_weight: float = key(1.0, "its weight", needs=_TOOLS)
    verifier_reads: Literal["response", "last_turn"] = key(
        "response",
        "what reward functions read of a sample of several turns: all of it, replies of tools too, or the model's last turn",
        needs=_TOOLS,
    )
    tool_config_path: str | None = key(None, "YAML list of tools", needs=_TOOLS)
    tool_parser_format: str | None = key(
        None, "how calls are written; by default as the template of prompt_type says, else hermes", needs=_TOOLS
    )
    max_tool_calls: int = key(0, "calls of one sample; 0: no limit", needs=_TOOLS)
    max_parallel_calls: int = key(0, "calls of one turn; 0: no limit", needs=_TOOLS)
    max_total_response_length: int = key(0, "tokens behind the prompt, of all turns together", needs=_TOOLS)
    max_tool_response_length: int = key(0, "tokens of one tool reply", needs=_TOOLS)
    tool_response_truncate_side: Literal["left", "right", "middle"] | None = key(
        None, "which part of a long reply is cut", needs=_TOOLS
    )


@dataclass(kw_only=True)
class RLConfig(BatchKeys, ModeKeys, AdvantageKeys, LossKeys, KlKeys, RewardKeys, ToolKeys):
    """Reinforcement learning: everything that is neither network, engine nor sampling."""

    actor_resource: Resource = key(Resource, "devices of the actor, and of all roles that share them")
    reference_resource: Resource | None = key(None, "own devices of the reference model")
    reward_resource: Resource | None = key(None, "own devices of the reward model")
    critic_resource: Resource | None = key(None, "own devices of the critic; the actor's when unset", needs=_CRITIC)
    rollout_resource: Resource | None = key(
        None, "own devices of the rollout: servers of infer_tensor_parallel_size devices; the actor's when unset"
    )
    rollout_server_restarts: int = key(
        3, "rollout servers that may be started anew in a run, in place of those that were lost; needs rollout_resource"
    )
    vit_resource: Resource | None = key(None, "devices of an image encoder", no_effect=_TEXT_ONLY)
    use_integrated_worker: bool = key(
        True,
        "actor, reference and rollout share their devices in time; false: each role with a resource has devices of its own",
    )
    integrated_mode_config: IntegratedModeConfig | None = key(None, "extras of that mode")
    blocking: bool = key(True, "finish every phase before the next starts; false: phases overlap as rows become ready")
    async_engine: bool = key(
        False, "asynchronous rollout engine", no_effect="the engine takes one request at a time either way"
    )
    share_backbone: bool = key(False, "LoRA: the reference is the actor with its adapters off")

    data_strategy: Literal["td", "transfer_dock", "dock", "tq", "transfer_queue", "queue"] = key(
        "td", "data plane: transfer dock, or the distributed transfer queue"
    )
    transfer_queue_data_shard_num: int = key(1, "storage actors of the transfer queue", needs=_QUEUE)
    transfer_queue_data_shard_port_base: int | None = key(None, "first port", needs=_QUEUE, no_effect="free ports are taken")
    zmq_communication: bool = key(
        True, "send rows inside a replica over sockets", no_effect="rows are broadcast over the process group"
    )
    wait_timeout_s: float = key(1800.0, "seconds any wait for rows may take before the run stops and says who waits for what")
    deadlines: DeadlineKeys = key(DeadlineKeys, "seconds that other waits may take, by what is waited for")
    fault_tolerance: FaultTolerance = key(FaultTolerance, "what becomes of a run whose worker dies or hangs")

    is_multimodal: bool = key(False, "image input; not available")
    reuse_image_embeds: bool = key(False, "encode images once", no_effect=_TEXT_ONLY)
    colocate_actor_and_vit: bool = key(False, "share devices with the image encoder", no_effect=_TEXT_ONLY)

    use_tensorboard: bool = key(False, "write TensorBoard files into the run folder")
    use_wandb: bool = key(False, "log to Weights & Biases; TensorBoard is then off, unless report_to names it")
    wandb_project: str = key("", "project", needs=_WANDB)
    wandb_exp_name: str = key("", "run name", needs=_WANDB)
    wandb_save_dir: str = key("", "local folder", needs=_WANDB)
    wandb_mode: Literal["online", "offline", "disabled"] | None = key(
        None, "where records go; wandb's own setting when unset (WANDB_MODE, else online)", needs=_WANDB
    )
    use_swanlab: bool = key(False, "log to SwanLab")
    report_to: list[str] = key([], "trackers by name, as the use_ keys switch them on, or module:Class of your own")
    swanlab_mode: str = key("", "cloud, local or offline", needs=_SWANLAB)
    swanlab_project: str = key("", "project", needs=_SWANLAB)
    swanlab_exp_name: str = key("", "run name", needs=_SWANLAB)
    swanlab_save_dir: str = key("", "local folder", needs=_SWANLAB)
    use_mlflow: bool = key(False, "log to MLflow")
    mlflow_tracking_uri: str = key(
        "", "a server (http://...) or a folder (file:///...); mlflow/ in the run folder when empty", needs=_MLFLOW
    )
    mlflow_experiment: str = key("", "experiment; mindspeed_rl when empty", needs=_MLFLOW)
    mlflow_run_name: str = key("", "run name; the name of the run folder when empty", needs=_MLFLOW)
    log_max_throughput: bool = key(True, "throughput counts the longest instead of the mean length, as MindSpeed-RL does")

    num_cpus_for_local_task: float = key(
        1.0, "CPUs Ray reserves for the driver", no_effect="the driver is no Ray task and reserves none"
    )
    num_cpus_for_placement_group: int = key(8, "CPUs Ray reserves beside each device", only_on=("npu", "cuda"))
    hccl_buffersize: int = key(256, "buffer of one HCCL communicator, in MiB", only_on=("npu",))
    runtime_env_path: str = key(
        "configs/envs/runtime_env.yaml", "environment variables of the workers", only_on=("npu", "cuda")
    )
    tp_split_expert: bool = key(False, "unused", no_effect="expert_tensor_parallel_size says it")

    def __post_init__(self) -> None:
        """Let the base budgets reach the three passes that do not set their own."""
        # upstream's base budget does not reach the passes, which then have 4096 each
        for role in ("ref", "actor", "update"):
            if getattr(self, f"{role}_max_packing_token_size") is None:
                setattr(self, f"{role}_max_packing_token_size", self.max_packing_token_size)
            if getattr(self, f"{role}_dynamic_max_batch_size") is None:
                setattr(self, f"{role}_dynamic_max_batch_size", self.dynamic_max_batch_size)
