"""The group `rl_config`: rollout batches, advantages, losses, rewards, data plane, devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mindspeed_rl.catalogue import ADVANTAGES, CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES
from mindspeed_rl.catalogue.records import Algorithm, Bounds, Level, Scale
from mindspeed_rl.config.keys.deadlines import DeadlineKeys, FaultTolerance
from mindspeed_rl.config.keys.ignored import AnyGroup
from mindspeed_rl.config.keys.schema import Needs, Range, key

#: agent loop -> the key that it needs
AGENT_LOOP_KEYS = {
    "program": "agent",
    "environment": "environment",
    "scheduler": "multi_turn_scheduler",
    "tool_agent": "tool_config_path",
    "roles": "environment",
}
#: loops that sample each turn as `sampling_config` says; a program's requests, and loops of your own, may add stop texts
_LOOPS_WITHOUT_TEXTS = frozenset(("single_turn", "scheduler", "tool_agent", "roles"))
# fmt: off
_CRITIC = ("adv_estimator", tuple(name for name, record in ADVANTAGES.items() if "values" in record.needs))
_RULES = ("rule_reward", (True,))
_CLIP_HIGHER = ("clip_higher_enable", (True,))
_OVERLONG = ("overlong_buffer_enable", (True,))
_FILTER = ("filter_groups_enable", (True,))
_DYNAMIC = ("use_dynamic_bsz", (True,))
_ADAPTIVE = ("kl_ctrl_type", ("adaptive",))
_TOOLS = ("multi_turn_enable", (True,))
_QUEUE = ("data_strategy", ("tq", "transfer_queue", "queue"))
_RECORDED = ("old_log_probs", ("rollout",))
_MISMATCH = ("rollout_importance_sampling_mode", tuple(CORRECTIONS))
_SYNC_REF = ("sync_ref_model", (True,))
_ASYNC = ("trainer_mode", ("async",))
_ELASTIC = ("elastic_rollout", (True,))
_ELASTIC_TRAINING = ("elastic_training_devices", "set")
_WANDB = ("use_wandb", (True,))
_SWANLAB = ("use_swanlab", (True,))
_MLFLOW = ("use_mlflow", (True,))
_TRACKIO = ("use_trackio", (True,))
_OTLP = ("use_otlp", (True,))


def _read_by(algorithms: Mapping[str, Algorithm], setting: str) -> Needs:
    """Return the condition of a key that only some advantage estimators or policy losses read."""
    readers = tuple(name for name, record in algorithms.items() if record.may_read(setting))
    return "adv_estimator" if algorithms is ADVANTAGES else "loss_type", readers


@dataclass(frozen=True, kw_only=True)
class Resource:
    """Devices of one role."""

    num_npus: int | None = key(None, "devices of the role on all nodes, of any kind",
        "该角色在所有节点上的设备数，不论设备种类", range=Range.DEVICES, on_resume="random")


@dataclass(frozen=True, kw_only=True)
class IntegratedModeConfig:
    """Extras of the mode in which actor, reference and rollout share devices."""

    ref_model_load_path: str | None = key(None, "weights of the reference model; the actor's initial weights when unset",
        "参考模型的权重；不设时为 actor 的起点", elsewhere="ref_load ref_model_path", on_resume="reference")


@dataclass(frozen=True, kw_only=True)
class RouterReplay:
    """Routing of the tokens of a rollout in the actor; docs/router_replay.md."""

    mode: Literal["disabled", "R2", "R3"] = key("disabled",
        "R2: the update routes tokens as the pass of the old log-probabilities did; R3: both route them as the rollout "
        "engine did; models with experts only",
        "R2：更新时 token 送往旧对数概率那一遍选的专家；R3：两遍都送往推理引擎选的专家；仅用于有专家的模型",
        elsewhere="router_replay.mode", on_resume="in_flight")


#: loss modes of distillation over tokens that the student sampled: names of `catalogue.KL_ESTIMATORS`
SAMPLED_MODES = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k3+", "low_var_kl+")
_DISTILLS, _TOP_K = ("enabled", (True,)), ("loss_mode", ("forward_kl_topk", "reverse_kl_topk", "jsd_topk"))
_MIXES = ("on_policy_fraction", "above 1")


@dataclass(frozen=True, kw_only=True)
class DistillationKeys:
    """On-policy distillation: teachers judge the tokens that the student samples; docs/distillation.md. Names are verl's."""

    enabled: bool = key(False, "teachers judge the tokens that the actor, the student, samples",
        "由教师模型评判 actor（学生）采样的 token", elsewhere="distillation.enabled", on_resume="exact")
    loss_mode: Literal["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k3+", "low_var_kl+", "forward_kl_topk",
        "reverse_kl_topk", "jsd_topk"] = key("k3",
        "divergence of student and teacher: an estimator of KL(student || teacher) at sampled tokens, or a sum over the "
        "teacher's topk tokens",
        "学生与教师的散度：在采样 token 上对 KL(student || teacher) 的估计，或在教师概率最高的 topk 个 token 上求和",
        needs=_DISTILLS, elsewhere="distillation_loss.loss_mode", on_resume="exact")
    topk: int = key(32, "tokens of the teacher; with the size of the vocabulary or more, all of it",
        "教师的 token 数；不小于词表大小时即为整个词表", range=Bounds(1, 10**6), needs=_TOP_K,
        elsewhere="distillation_loss.topk gkd_logits_topk", on_resume="exact")
    topk_rest: Literal["drop", "lump", "renormalize"] = key("drop",
        "probability outside of the topk tokens: dropped, as verl does; lumped into one more token; or both models are "
        "renormalized over the topk tokens, as ms-swift does",
        "topk 之外的概率：舍去（drop，同 verl）；合并为一个额外的 token（lump）；或师生都在 topk 之内重新归一化（renormalize，"
        "同 ms-swift）",
        needs=_TOP_K, on_resume="exact")
    beta: float = key(0.5, "jsd_topk: weight of the teacher; 0 is forward_kl_topk, 1 is reverse_kl_topk",
        "jsd_topk：教师的权重；0 即 forward_kl_topk，1 即 reverse_kl_topk", range=Range.FRACTION,
        needs=("loss_mode", ("jsd_topk",)), on_resume="exact")
    use_task_rewards: bool = key(True, "rewards of the task train too; false: only the teachers",
        "任务奖励也参与训练；false：只用教师", needs=_DISTILLS, elsewhere="distillation_loss.use_task_rewards",
        on_resume="exact")
    distillation_loss_coef: float = key(1.0, "weight of the divergence next to rewards of the task",
        "与任务奖励并用时散度的权重", range=Bounds(0, 1e6), needs=("use_task_rewards", (True,)),
        elsewhere="distillation_loss.distillation_loss_coef teacher_kl_coef", on_resume="exact")
    loss_max_clamp: float | None = key(None, "the divergence of a token counts within +- this; off when unset",
        "一个 token 的散度限制在 +- 此值之内；不设则不限", range=Range.POSITIVE, needs=_DISTILLS,
        elsewhere="distillation_loss.loss_max_clamp", on_resume="exact")
    log_prob_min_clamp: float | None = key(None, "log-probs count as at least this in the divergence; off when unset",
        "散度中对数概率至少按此值计；不设则不限", range=Bounds(-1e4, 0, excludes_high=True, default=-10.0), needs=_DISTILLS,
        elsewhere="distillation_loss.log_prob_min_clamp", on_resume="exact")
    use_policy_gradient: bool = key(False,
        "the negative divergence is added to the advantage of its token; false: it is a loss that is differentiated",
        "负的散度加到该 token 的优势上；false：散度本身作为损失求导", needs=_DISTILLS,
        elsewhere="distillation_loss.use_policy_gradient", on_resume="exact")
    teacher_models: list[str] = key([],
        "teachers: folders of weights; `actor`, the student itself; `ref`, the reference; or addresses http(s)://... of "
        "servers with vLLM's completions and prompt_logprobs",
        "教师：权重文件夹；`actor` 即学生自己；`ref` 即参考模型；或提供 vLLM completions 与 prompt_logprobs 的服务地址 http(s)://...",
        needs=_DISTILLS, elsewhere="teacher_model teacher_model_server teacher_model_name_or_path", on_resume="exact")
    teacher_key: str = key("data_source", "column of the prompts that chooses the teacher, where there are teacher_keys",
        "有 teacher_keys 时，选择教师的数据列", needs=("teacher_keys", "set"), elsewhere="distillation.teacher_key",
        on_resume="exact")
    teacher_keys: list[str] = key([], "value of that column for each teacher, which then judges only these rows",
        "每个教师对应的该列的值，该教师只评判这些行", needs=_DISTILLS, on_resume="exact")
    teacher_weights: list[float] = key([],
        "weight of each teacher's divergence, where all judge all rows; equal when unset",
        "所有教师都评判所有行时，各教师散度的权重；不设时相等", range=Bounds(0, 1e6), needs=_DISTILLS, on_resume="exact")
    teacher_temperature: float | None = key(None,
        "the teachers' logits are divided by it; unset: the sampling temperature",
        "教师的 logits 除以它；不设时同采样温度", range=Range.POSITIVE, needs=_DISTILLS, on_resume="exact")
    teacher_prompt: str | None = key(None,
        "column of the prompts with the text or messages that the teachers read in place of the prompt",
        "数据列，其文本或消息由教师代替 prompt 来读", needs=_DISTILLS, elsewhere="teacher_prompt", on_resume="exact")
    on_policy_fraction: float = key(1.0,
        "probability that the student samples the responses of an iteration; otherwise they come from the data set (GKD)",
        "一次迭代的回答由学生采样的概率；否则用数据集自带的回答（GKD）", range=Range.FRACTION, needs=_DISTILLS,
        elsewhere="lmbda", on_resume="exact")
    response_column: str = key("labels",
        "column of the prompts with the response of the data: a text, or messages of which it is the last",
        "数据集回答所在的列：文本，或以该回答结尾的消息列表", needs=_MIXES, on_resume="exact")
    supervised_coef: float = key(0.0, "weight of -log q(response) next to the divergence, on responses of the data",
        "用数据集的回答训练时，-log q(回答) 与散度相加的权重", range=Bounds(0, 1e6), needs=_MIXES, elsewhere="sft_alpha",
        on_resume="exact")


@dataclass(frozen=True, kw_only=True)
class _BatchKeys:
    """Sizes. Prompt-level and completion-level keys describe the same plan; `Run.plan` has the rest."""

    n_samples_per_prompt: int = key(1, "responses sampled for each prompt (the group)", "每个 prompt 采样的回答数（一组）",
        range=Range.ROWS, elsewhere="num_samples_per_prompt group_size rollout.n rollout_n", on_resume="in_flight")
    mini_batch_size: int = key(1, "prompts of one optimizer step", "一个优化器步的 prompt 数", range=Range.ROWS,
        elsewhere="ppo_mini_batch_size", on_resume="exact")
    epochs: int = key(1, "passes over one rollout batch", "对一个 rollout 批训练几遍", range=Bounds(1, 10000),
        elsewhere="ppo_epochs", on_resume="exact")
    num_iterations: int | None = key(None, "the same as epochs, the name in ms-swift and TRL",
        "同 epochs，ms-swift 与 TRL 的叫法", range=Bounds(1, 10000), on_resume="exact")
    num_generations: int | None = key(None,
        "the group size; setting it switches to completion-level counting of global_batch_size",
        "组的大小；设了它，global_batch_size 就改按回答计数", range=Range.ROWS, on_resume="in_flight")
    generation_batch_size: int | None = key(None, "completions of one rollout; a multiple of global_batch_size",
        "一次 rollout 的回答数；是 global_batch_size 的倍数", range=Range.ROWS, on_resume="exact")
    steps_per_generation: int | None = key(None, "optimizer steps of one rollout; not together with generation_batch_size",
        "一次 rollout 的优化器步数；不能与 generation_batch_size 同时设", range=Range.ROWS, on_resume="exact")
    max_prompt_length: int = key(512, "prompts of at least this many tokens are left out",
        "达到这么多 token 的 prompt 会被略去", range=Range.TOKENS,
        elsewhere="prompt_max_len rollout_max_prompt_len prompt_length", on_resume="order")
    long_prompts: Literal["drop", "drop_longer", "cut_left"] = key("drop",
        "leave out prompts of max_prompt_length tokens and more, leave out only longer ones (drop_longer), or train on the "
        "last max_prompt_length tokens of longer ones (cut_left; prompts with images are left out instead)",
        "略去达到 max_prompt_length 的 prompt（drop），只略去超过它的（drop_longer），或对超长的 prompt 只保留最后 "
        "max_prompt_length 个 token 参与训练（cut_left；带图像的仍略去）",
        elsewhere="truncation truncation_strategy filter_overlong_prompts", on_resume="order")
    max_completion_length: int | None = key(None, "the same as sampling_config.max_tokens", "同 sampling_config.max_tokens",
        range=Range.TOKENS, on_resume="in_flight")
    actor_forward_micro_batch_size: int | None = key(None,
        "samples of one log-probability pass of the actor; micro_batch_size when unset",
        "actor 计算对数概率时一次的样本数；不设时为 micro_batch_size", range=Range.ROWS,
        elsewhere="log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu", on_resume="exact")
    ref_forward_micro_batch_size: int | None = key(None,
        "samples of one log-probability pass of the reference; micro_batch_size when unset",
        "参考模型计算对数概率时一次的样本数；不设时为 micro_batch_size", range=Range.ROWS,
        elsewhere="ref.log_prob_micro_batch_size_per_gpu", on_resume="exact")

    actor_rollout_dispatch_size: int | None = key(None, "rows a rollout replica takes at once; derived when unset",
        "一个推理副本一次取的行数；不设时推导", range=Range.ROWS, on_resume="exact")
    actor_logprob_dispatch_size: int | None = key(None,
        "rows an actor replica takes at once for log-probabilities; derived when unset",
        "一个 actor 副本为对数概率一次取的行数；不设时推导", range=Range.ROWS, on_resume="exact")
    ref_dispatch_size: int | None = key(None, "rows a reference replica takes at once; derived when unset",
        "一个参考模型副本一次取的行数；不设时推导", range=Range.ROWS, on_resume="exact")
    reward_dispatch_size: int | None = key(None, "rows scored at once; derived when unset", "一次打分的行数；不设时推导",
        range=Range.ROWS, on_resume="exact")
    adv_dispatch_size: int | None = key(None, "rows whose advantages are computed at once", "一次计算优势的行数",
        range=Range.ROWS, no_effect=("the advantages of an iteration are computed together", "一次迭代的优势一起计算"),
        on_resume="exact")
    actor_update_dispatch_size: int | None = key(None, "rows an actor replica takes at once for the update",
        "一个 actor 副本为更新一次取的行数", range=Range.ROWS,
        no_effect=("an update takes the rows of one optimizer step", "取一个优化器步的行"), on_resume="exact")
    dynamic_sampling_dispatch_size: int | None = key(None, "rows filtered at once", "一次过滤的行数", range=Range.ROWS,
        no_effect=("groups are filtered after a rollout", "一次 rollout 结束后才过滤组"), on_resume="exact")
    kl_dispatch_size: int | None = key(None, "rows whose KL enters the reward at once", "一次把 KL 计入奖励的行数",
        range=Range.ROWS, no_effect=("the KL enters together with the advantages", "与优势一起计入"), on_resume="exact")
    critic_value_dispatch_size: int | None = key(None, "rows a critic replica takes at once for values; derived when unset",
        "一个 critic 副本为价值一次取的行数；不设时推导", range=Range.ROWS, on_resume="exact")
    critic_update_dispatch_size: int | None = key(None, "rows a critic replica takes at once for the update",
        "一个 critic 副本为更新一次取的行数", range=Range.ROWS,
        no_effect=("an update takes the rows of one optimizer step", "取一个优化器步的行"), on_resume="exact")

    use_remove_padding: bool | None = key(None,
        "pack sequences without padding; when unset true in runs with rollouts, false in supervised stages",
        "打包序列，不留填充；不设时，含 rollout 的运行为 true，监督阶段为 false", supervised=True,
        elsewhere="padding_free packing_samples",
        on_resume="exact")
    use_prefix_grouper: bool | None = key(None,
        "prefix sharing: compute a prompt once for all its samples in a micro-batch; when unset true where the run allows it",
        "前缀共享：同一 micro-batch 中，一个 prompt 的所有样本只计算一次 prompt；不设时，运行允许即为 true",
        needs=("use_remove_padding", (True,)), on_resume="exact")
    use_dynamic_bsz: bool = key(False, "fill micro-batches up to a token budget instead of a row count",
        "micro-batch 按 token 预算装满，而不按行数", supervised=True, elsewhere="use_dynamic_batch_size", on_resume="exact")
    max_packing_token_size: int = key(4096, "token budget of a micro-batch; the three keys below take it when unset",
        "一个 micro-batch 的 token 预算；下面三个键不设时取它", range=Range.TOKENS, needs=_DYNAMIC, supervised=True,
        elsewhere="ppo_max_token_len_per_gpu max_tokens_per_gpu",
        upstream=("does not reach the three passes, which then have 4096 each", "不会传到三个阶段，它们各为 4096"),
        on_resume="exact")
    ref_max_packing_token_size: int | None = key(None, "token budget of the reference pass", "参考模型的 token 预算",
        range=Range.TOKENS, needs=_DYNAMIC, on_resume="exact")
    actor_max_packing_token_size: int | None = key(None, "token budget of the actor's log-probability pass",
        "actor 计算对数概率的 token 预算", range=Range.TOKENS, needs=_DYNAMIC, on_resume="exact")
    update_max_packing_token_size: int | None = key(None, "token budget of the update", "更新的 token 预算", range=Range.TOKENS,
        needs=_DYNAMIC, supervised=True, on_resume="exact")
    dynamic_max_batch_size: int | None = key(None, "rows of a micro-batch at most; the three keys below take it when unset",
        "一个 micro-batch 最多的行数；下面三个键不设时取它", range=Range.ROWS, needs=_DYNAMIC, supervised=True,
        upstream=("does not reach the three passes", "不会传到三个阶段"), on_resume="exact")
    ref_dynamic_max_batch_size: int | None = key(None, "the same for the reference pass", "同上，用于参考模型",
        range=Range.ROWS, needs=_DYNAMIC, on_resume="exact")
    actor_dynamic_max_batch_size: int | None = key(None, "the same for the actor's log-probability pass",
        "同上，用于 actor 的对数概率", range=Range.ROWS, needs=_DYNAMIC, on_resume="exact")
    update_dynamic_max_batch_size: int | None = key(None, "the same for the update", "同上，用于更新", range=Range.ROWS,
        needs=_DYNAMIC, supervised=True, on_resume="exact")
    use_dp_batch_balance: bool = key(False, "distribute rows so that data-parallel ranks have about the same number of tokens",
        "分配行时使各数据并行 rank 的 token 数相近", supervised=True, elsewhere="balance_batch balance_data", on_resume="exact")
    guarantee_order: bool = key(False, "rows keep their order, so that a run repeats exactly", "行保持原位，使运行可完全复现",
        on_resume="exact")
    shuffle_mini_batch: bool = key(False, "shuffle rows before they are cut into mini-batches", "切成 mini-batch 之前打乱行",
        on_resume="exact")


@dataclass(frozen=True, kw_only=True)
class _ModeKeys:
    """Overlap of generation with training, and the age that responses may have."""

    trainer_mode: Literal["sync", "one_step_off", "async"] = key("sync",
        "sync: an iteration trains on its own rollout; one_step_off: on the rollout of the iteration before; async: on what is "
        "ready; the latter two need a rollout engine on dedicated devices",
        "sync：每次迭代用自己的 rollout 训练；one_step_off：用上一次迭代的；async：用已就绪的；后两者需要推理引擎有专用设备",
        on_resume="in_flight")
    max_off_policy_threshold: float = key(1.0,
        "versions of the weights by which the rollout may be ahead; 0 equals sync, a fraction is a part of the last "
        "version's prompts", "rollout 最多领先几个权重版本；0 与 sync 相同，小数表示最后一个版本中的一部分 prompt",
        range=Bounds(0, 1e6), needs=_ASYNC, on_resume="exact")
    max_off_policy_strategy: Literal["pace", "wait", "drop"] = key("pace",
        "pace: starts prompts only while all will train in time, and takes them as they become ready; wait: takes them "
        "strictly in order; drop: starts more, and discards what is too old",
        "pace：只在都能及时训练时才开始新 prompt，就绪即取；wait：严格按 prompt 顺序取；drop：多开始一些，太旧的丢弃",
        needs=_ASYNC, on_resume="exact")
    parameter_sync_step: int = key(1, "iterations between two weight syncs to the rollout engine",
        "两次把权重推给推理引擎之间的迭代数", range=Range.ITERATIONS, needs=_ASYNC, on_resume="in_flight")
    num_warmup_batches: int = key(1, "iterations for which responses are ready before the first iteration trains",
        "第一次迭代训练之前须就绪的回答，以迭代数计", range=Bounds(1, 10000), needs=_ASYNC, on_resume="exact")
    partial_rollout: bool = key(True,
        "new weights interrupt responses, which continue with them; false: weights wait until all have ended",
        "新权重打断正在生成的回答，之后用新权重继续；false：等它们全部结束", needs=_ASYNC, on_resume="exact")
    partial_rollout_max_split: int = key(1,
        "sync: rollouts over which a long response may extend; each lets it grow by max_tokens divided by this",
        "sync：一个长回答可跨几次 rollout；每次最多再生成 max_tokens 除以此值个 token", range=Bounds(1, 64),
        on_resume="in_flight")
    over_sample_rate: float = key(1.0,
        "prompts under way in such a rollout beyond an iteration's, as a fraction of them; the unfinished ones continue",
        "这样的 rollout 中，除一次迭代的 prompt 之外还在生成的 prompt 所占比例；未完成的在下次继续", range=Bounds(0, 64),
        needs=("partial_rollout_max_split", "above 1"), on_resume="in_flight")
    spare_samples_per_prompt: int = key(0,
        "samples of each prompt that are generated beyond n_samples_per_prompt: when enough have ended, the others are "
        "aborted; trains on more short responses", "每个 prompt 在 n_samples_per_prompt 之外多生成的样本数：够数即中止其余的；"
        "训练的短回答会偏多", range=Bounds(0, 1024), on_resume="in_flight")
    keep_spare_samples: bool = key(False,
        "samples that are unfinished then are not aborted: they continue, with new samples up to n_samples_per_prompt, as a "
        "second group of the prompt in a later iteration; no token is lost, and each prompt trains twice",
        "够数时未完成的样本不中止：与补足 n_samples_per_prompt 的新样本一起，作为该 prompt 的第二组在后面的迭代训练；"
        "不丢 token，每个 prompt 训练两次", needs=("spare_samples_per_prompt", "set"), on_resume="in_flight")
    longest_first: bool = key(False,
        "prompts whose last responses, in an earlier epoch of this process, were longest are generated first; pays where a "
        "replica has more samples than max_num_seqs",
        "上一轮（本进程内）回答最长的 prompt 先生成；副本的样本数多于 max_num_seqs 时划算", needs=("trainer_mode", ("sync",)),
        on_resume="exact")
    off_policy_token_limit: float | None = key(None,
        "tokens from weights that are older by more versions than this do not train; off when unset",
        "权重版本落后超过此值的 token 不参与训练；不设为关闭", range=Range.ITERATIONS_FROM_0, on_resume="exact")
    elastic_rollout: bool = key(False,
        "the actor's devices generate too while an iteration waits for responses; their training state is offloaded as the "
        "offload_train_ keys say", "迭代等待回答时，actor 的设备也参与生成；其训练状态按 offload_train_ 各键卸载",
        needs=_ASYNC, on_resume="exact")
    elastic_rollout_low: float = key(0.5, "they start while fewer prompts are ready than this part of an iteration's",
        "已就绪的 prompt 少于一次迭代的这一比例时开始", range=Bounds(0, 1, excludes_low=True, default=0.5), needs=_ELASTIC,
        on_resume="exact")
    elastic_rollout_high: float = key(1.0, "they train again when so many iterations' prompts are ready",
        "已就绪的 prompt 达到这么多次迭代的量时回去训练", range=Bounds(1, 1e6), needs=_ELASTIC, on_resume="exact")
    elastic_training_devices: int = key(0,
        "devices of rollout_resource that train with the actor's once the rollout keeps ahead of the training, and generate "
        "again once it falls behind; the run resumes on the other division after an iteration",
        "rollout_resource 中这么多个设备，在推理一直领先于训练时与 actor 的设备一起训练，落后时再回去生成；每次都在一次迭代之后"
        "按另一种划分续训", range=Bounds(0, 1e6), needs=_ASYNC, on_resume="exact")
    elastic_training_high: float = key(1.0,
        "they train when so many iterations' prompts are ready at the end of updates", "更新结束时已就绪的 prompt 达到这么多次"
        "迭代的量，它们就去训练", range=Bounds(0, 1e6, excludes_low=True, default=1.0), needs=_ELASTIC_TRAINING,
        on_resume="exact")
    elastic_training_wait: float = key(0.2,
        "they generate again when the trainers wait for responses during more than this part of an iteration, and iterations "
        "are not faster than before the move",
        "训练等待回答的时间超过一次迭代的这一比例、且迭代不比移动之前快时，它们回去生成",
        range=Bounds(0, 1, default=0.2), needs=_ELASTIC_TRAINING, on_resume="exact")
    elastic_training_patience: int = key(3,
        "iterations whose mean has to be beyond either limit before the devices move; doubles each time that they move back",
        "取多少次迭代的平均值与界限比较后才移动设备；每移回一次即加倍", range=Bounds(1, 10000), needs=_ELASTIC_TRAINING,
        on_resume="exact")
    async_generate: bool | None = key(None, "true is trainer_mode one_step_off, the name in ms-swift",
        "true 即 trainer_mode one_step_off，ms-swift 的说法", on_resume="in_flight")


@dataclass(frozen=True, kw_only=True)
class _AdvantageKeys:
    """From rewards to advantages."""

    # text, not a Literal, like every name of an algorithm: a plug-in is module:NAME
    adv_estimator: str = key("group_norm", "advantage estimator; when omitted in stage ray_ppo: gae",
        "优势如何计算；阶段 ray_ppo 不写时为 gae", names=tuple(ADVANTAGES), elsewhere="advantage_estimator",
        upstream=("group_norm and gae only", "只有 group_norm 与 gae"),
        on_resume="exact")
    scale_rewards: Scale = key("group", "rewards whose spread divides the centred rewards",
        "中心化后的奖励除以什么范围的离散度", on_resume="exact")
    adv_epsilon: float = key(1e-6, "added to the spread before dividing; TRL and ms-swift take 1e-4",
        "除之前加在离散度上；TRL 与 ms-swift 取 1e-4", on_resume="exact")
    gamma: float = key(1.0, "discount of later tokens", "对后面 token 的折扣", needs=_read_by(ADVANTAGES, "gamma"),
        on_resume="exact")
    lam: float = key(0.95, "GAE: bias against variance", "GAE：偏差与方差的权衡",
        needs=_read_by(ADVANTAGES, "lam"), elsewhere="lambd", on_resume="exact")
    advantage_whiten: bool = key(True, "whiten advantages over the batch", "在整批上白化优势",
        needs=_read_by(ADVANTAGES, "advantage_whiten"), upstream=("never read", "从未读取"), on_resume="exact")
    critic_warmup: int = key(0, "iterations in which only the critic learns", "只训练 critic 的迭代数",
        range=Range.ITERATIONS_FROM_0, needs=_CRITIC, on_resume="exact")
    cliprange_value: float = key(0.5, "distance from its old value beyond which the loss of a value is clipped",
        "价值离旧值多远之后损失被截断", needs=_CRITIC, elsewhere="value_clip", on_resume="exact")


@dataclass(frozen=True, kw_only=True)
class _LossKeys:
    """From advantages to the policy loss."""

    loss_type: str | None = key(None,
        "form and normalizer of the loss; cispo_cap takes clip_ratio_high as an absolute cap; gspo is grpo on sequences; "
        "unset: token mean over the global batch, for ray_dapo with token_level_loss false the mean of sequence means",
        "损失的形式与归一化；cispo_cap 把 clip_ratio_high 当作绝对上限；gspo 是序列级的 grpo；不设：全局批的 token 均值，"
        "ray_dapo 且 token_level_loss 为 false 时为序列均值的均值", names=tuple(POLICY_LOSSES),
        upstream=(
            "no such key; the token mean is taken in each micro-batch, here over the global batch",
            "没有此键；token 均值在每个 micro-batch 内取，这里在全局批上取"), on_resume="exact")
    importance_sampling_level: Level | None = key(None, "unit of the ratio new / old; unset: token, for gspo sequence",
        "新旧策略比值在什么范围上计算；不设：token，gspo 为 sequence", on_resume="exact")
    token_level_loss: bool = key(True, "stage ray_dapo without loss_type: token mean instead of the mean of sequence means",
        "阶段 ray_dapo 且未设 loss_type：用 token 均值，而不用序列均值的均值", on_resume="exact")
    clip_ratio: float = key(0.2, "the ratio is clipped to 1 - clip_ratio .. 1 + clip_ratio",
        "比值截断到 1 - clip_ratio .. 1 + clip_ratio", elsewhere="cliprange eps_clip epsilon", on_resume="exact")
    clip_higher_enable: bool = key(False,
        "clip by clip_ratio_low and clip_ratio_high instead; when omitted: true if one of them is set",
        "改用 clip_ratio_low 与 clip_ratio_high 截断；不写时：设了其中之一即为 true", upstream=(
            "when omitted false, also if one of them is set", "不写时为 false，即使设了其中之一"), on_resume="exact")
    clip_ratio_low: float = key(0.1,
        "the ratio is clipped at 1 - this; when only clip_ratio_high is set: clip_ratio",
        "比值在 1 - 此值处截断；只设了 clip_ratio_high 时同 clip_ratio", needs=_CLIP_HIGHER,
        elsewhere="epsilon_low", on_resume="exact")
    clip_ratio_high: float = key(0.1,
        "the ratio is clipped at 1 + this; the cap itself for cispo_cap; when only clip_ratio_low is set: clip_ratio",
        "比值在 1 + 此值处截断；cispo_cap 时即为上限本身；只设了 clip_ratio_low 时同 clip_ratio", needs=_CLIP_HIGHER,
        elsewhere="epsilon_high eps_clip_high",
        on_resume="exact")
    clip_ratio_c: float | None = key(None, "dual clip: bound of the loss for negative advantages, above 1; off when unset",
        "双重截断：负优势时损失的界，大于 1；不设为关闭", elsewhere="eps_clip_c", on_resume="exact")
    delta: float | None = key(None,
        "two-sided clip: the unclipped ratio is capped here, at least 1 + the upper clip; off when unset",
        "双侧截断：未截断的比值以此为上限，至少为 1 + 上截断；不设为关闭", range=Bounds(1, 1e6, excludes_low=True, default=2),
        on_resume="exact")
    tau_pos: float = key(1.0, "sapo: temperature for positive advantages", "sapo：正优势的温度",
        needs=_read_by(POLICY_LOSSES, "tau_pos"), on_resume="exact")
    tau_neg: float = key(1.05, "sapo: temperature for negative advantages", "sapo：负优势的温度",
        needs=_read_by(POLICY_LOSSES, "tau_neg"), on_resume="exact")
    vespo_k_pos: float = key(2.0, "vespo: exponent of the weight where the advantage is not negative",
        "vespo：优势非负时权重的指数", needs=_read_by(POLICY_LOSSES, "vespo_k_pos"), on_resume="exact")
    vespo_lambda_pos: float = key(3.0, "vespo: decay of the weight where the advantage is not negative",
        "vespo：优势非负时权重的衰减率", needs=_read_by(POLICY_LOSSES, "vespo_lambda_pos"), on_resume="exact")
    vespo_k_neg: float = key(3.0, "vespo: exponent of the weight for negative advantages", "vespo：负优势时权重的指数",
        needs=_read_by(POLICY_LOSSES, "vespo_k_neg"), on_resume="exact")
    vespo_lambda_neg: float = key(2.0, "vespo: decay of the weight for negative advantages", "vespo：负优势时权重的衰减率",
        needs=_read_by(POLICY_LOSSES, "vespo_lambda_neg"), on_resume="exact")
    fipo_decay_rate: float = key(32.0, "fipo: tokens after which the drift of a later token counts half",
        "fipo：相隔多少 token 时，后面 token 的偏移只计一半", needs=_read_by(POLICY_LOSSES, "fipo_decay_rate"),
        on_resume="exact")
    fipo_clip_range: float = key(0.2, "fipo: the weight is at most 1 + this", "fipo：权重最多为 1 + 此值",
        needs=_read_by(POLICY_LOSSES, "fipo_clip_range"), on_resume="exact")
    fipo_clip_high_only: bool = key(True, "fipo: the weight is at least 1; false: at least 1 - fipo_clip_range",
        "fipo：权重至少为 1；false：至少为 1 - fipo_clip_range", needs=_read_by(POLICY_LOSSES, "fipo_clip_high_only"),
        on_resume="exact")
    fipo_safety_threshold: float | None = key(4.0,
        "fipo: tokens with negative advantage and a ratio above this have a weight of at most 1; unset: no limit",
        "fipo：优势为负且比值超过此值的 token，权重最多为 1；不设则不限",
        needs=_read_by(POLICY_LOSSES, "fipo_safety_threshold"), on_resume="exact")
    dro_beta: float = key(1.0, "dro: weight of the squared log-ratio", "dro：对数比平方项的权重",
        needs=_read_by(POLICY_LOSSES, "dro_beta"), on_resume="exact")
    clip_cov_ratio: float = key(0.0002, "clip_cov: fraction of all tokens that lose their policy term",
        "clip_cov：失去策略项的 token 占全部 token 的比例", needs=_read_by(POLICY_LOSSES, "clip_cov_ratio"),
        on_resume="exact")
    clip_cov_lb: float = key(1.0, "clip_cov: these tokens have a covariance of advantage and log-prob above this",
        "clip_cov：这些 token 的优势与对数概率的协方差大于此值", needs=_read_by(POLICY_LOSSES, "clip_cov_lb"),
        on_resume="exact")
    clip_cov_ub: float = key(5.0, "clip_cov: and below this", "clip_cov：且小于此值",
        needs=_read_by(POLICY_LOSSES, "clip_cov_ub"), on_resume="exact")
    kl_cov_ratio: float = key(0.0002,
        "kl_cov: fraction of all tokens, those with the largest covariance of advantage and log-prob, that are held back",
        "kl_cov：受约束的 token 比例，取优势与对数概率的协方差最大者", needs=_read_by(POLICY_LOSSES, "kl_cov_ratio"),
        on_resume="exact")
    ppo_kl_coef: float = key(1.0, "kl_cov: weight of their distance to the old policy",
        "kl_cov：这些 token 与旧策略距离的权重", needs=_read_by(POLICY_LOSSES, "ppo_kl_coef"), on_resume="exact")
    real_tau: float = key(0.5, "real: temperature of the scores; the lower, the more the worst ones count",
        "real：得分的温度；越低，最差的得分越重要", needs=_read_by(POLICY_LOSSES, "real_tau"), on_resume="exact")
    online_dpo_beta: float = key(0.1, "online_dpo: strength of the tie to the reference", "online_dpo：与参考模型联系的强度",
        needs=_read_by(POLICY_LOSSES, "online_dpo_beta"), on_resume="exact")
    online_dpo_loss_type: Literal["sigmoid", "ipo"] = key("sigmoid", "online_dpo: form of the loss", "online_dpo：损失的形式",
        needs=_read_by(POLICY_LOSSES, "online_dpo_loss_type"), on_resume="exact")
    entropy_coeff: float = key(0.0, "weight of the entropy bonus", "熵奖励的权重", range=Range.WEIGHT,
        elsewhere="entropy_coef entropy_loss_coef", on_resume="exact")
    top_entropy_quantile: float = key(1.0, "fraction of tokens that enter the policy term, those with the highest entropy",
        "进入策略项的 token 比例，取熵最高的", on_resume="exact")
    off_policy_sequence_mask_delta: float | None = key(None,
        "leave out sequences with negative advantage whose mean log-ratio old - new exceeds this; off when unset",
        "略去优势为负且平均对数比 old - new 超过此值的序列；不设为关闭", range=Range.WEIGHT, on_resume="exact")
    overlong_filter: bool = key(False, "truncated responses do not train", "被截断的回答不参与训练",
        elsewhere="mask_truncated_completions", on_resume="exact")
    rollout_importance_sampling_mode: str | None = key(None,
        "weights that correct for the difference between rollout engine and trainer: of each token, of the sequence (product "
        "of its tokens) or its geometric mean, bounded or masked; token_geometric_mask: token weights, sequences masked by "
        "their mean; rejection masks leave tokens or sequences out and weigh nothing",
        "修正推理引擎与训练器差异的权重：按 token、按序列（其 token 之积）或其几何均值，截断或掩蔽；token_geometric_mask：按 "
        "token 加权，按序列均值掩蔽；rejection_mask 只剔除 token 或序列，不加权", names=tuple(CORRECTIONS),
        elsewhere="vllm_importance_sampling_mode rollout_is", on_resume="exact")
    rollout_importance_sampling_threshold: float = key(2.0, "upper bound of that correction", "该修正的上界", needs=_MISMATCH,
        elsewhere="tis_clip rollout_is_threshold vllm_importance_sampling_cap", on_resume="exact")
    rollout_importance_sampling_threshold_min: float | None = key(None, "lower bound of the masking forms", "掩蔽形式的下界",
        needs=_MISMATCH, on_resume="exact")
    old_log_probs: Literal["trainer", "rollout"] = key("trainer",
        "log-probs of the old policy, to which the ratio of the loss compares: trainer: computed by the trainer before the "
        "update; rollout: recorded by the rollout engine when it sampled, which saves that pass and makes the ratio correct "
        "for the difference of the two and for older weights too",
        "损失中比值所对照的旧策略的对数概率：trainer：训练器在更新前计算；rollout：取推理引擎采样时记录的值，省去这一遍前向，"
        "比值因此也修正训练与推理之差以及旧权重的影响", elsewhere="bypass_mode use_rollout_logprobs", on_resume="exact")
    old_log_probs_check_fraction: float = key(0.1,
        "fraction of the rows whose old log-probs the trainer computes as well before the update, the first ones; "
        "`rollout/old_log_probs_diff_mean` tells how far they are from the recorded ones; 0: none",
        "在更新前由训练器也计算旧对数概率的行的比例，取最前面的行；`rollout/old_log_probs_diff_mean` 给出与记录值的差；"
        "0：不检查",
        range=Range.FRACTION, needs=_RECORDED, on_resume="exact")
    old_log_probs_fallback: Literal["stop", "warn", "trainer"] = key("stop",
        "what follows where the two differ by more than log_probs_diff_limit: the run stops, says so and goes on, or computes "
        "the trainer's log-probs of all rows of the iteration and takes those",
        "两者之差超过 log_probs_diff_limit 时：停止运行；提示后继续；或由训练器重新计算本次迭代所有行的对数概率并采用之",
        needs=_RECORDED, on_resume="exact")
    log_rollout_offpolicy_metrics: bool = key(True, "log the difference between trainer and rollout engine",
        "记录训练器与推理引擎相差多少", on_resume="exact")
    log_probs_diff_limit: Literal["auto"] | float | None = key("auto",
        "stop when a log-probability of trainer and rollout engine differs by more; auto: when they differ in the mean by more "
        "than 0.05 in float32 and 0.5 in bfloat16, which only wrong weights or kernels reach, and in no update with dropout; "
        "null: off",
        "训练器与推理引擎的某个对数概率相差超过此值时停止；auto：平均相差超过 0.05（float32）或 0.5（bfloat16）时停止，"
        "只有权重或算子出错才会到这个程度；带 dropout 的更新不检查；null：关闭",
        range=Bounds(0, 1e6, excludes_low=True, default=0.1), on_resume="exact")
    exact_log_probs: bool = key(False,
        "trainer and rollout engine compute log-probs that are equal bit for bit, by the same functions with a fixed order of "
        "sums; slower",
        "训练器与推理引擎用同一组求和次序固定的函数计算，对数概率逐位相同；速度较慢", elsewhere="true_on_policy_mode",
        on_resume="exact")
    dropout_in_update: bool = key(False,
        "attention_dropout, hidden_dropout and lora_dropout act in the updates; rollout, old log-probs and reference have "
        "none, so that ratios and KL then differ from 1 and 0 by the dropout itself",
        "attention_dropout、hidden_dropout 与 lora_dropout 在更新时起作用；rollout、旧对数概率与参考模型都没有 dropout，"
        "因此比值与 KL 会因 dropout 本身而偏离 1 与 0", on_resume="exact")
    distillation: DistillationKeys = key(DistillationKeys, "on-policy distillation from teachers", "从教师模型做在线策略蒸馏",
        on_resume="exact")
    router_replay: RouterReplay = key(RouterReplay, "experts to which the actor routes the tokens of a rollout",
        "actor 把一次 rollout 的 token 送往哪些专家", on_resume="exact")
    use_routing_replay: bool | None = key(None, "true is router_replay.mode R2, the name in slime",
        "true 即 router_replay.mode R2，slime 的说法", on_resume="in_flight")
    use_rollout_routing_replay: bool | None = key(None, "true is router_replay.mode R3, the name in slime",
        "true 即 router_replay.mode R3，slime 的说法", on_resume="in_flight")
    enable_rollout_routing_replay: bool | None = key(None, "true is router_replay.mode R3, the name in verl",
        "true 即 router_replay.mode R3，verl 的说法", on_resume="in_flight")


@dataclass(frozen=True, kw_only=True)
class _KlKeys:
    """KL divergence to the reference model."""

    kl_penalty: str = key("low_var_kl", "estimator of the KL divergence", "KL 散度的估计器", names=tuple(KL_ESTIMATORS),
        elsewhere="kl_loss_type kl_estimator", upstream=("kl, abs, mse and low_var_kl only", "只有 kl、abs、mse 与 low_var_kl"),
        on_resume="exact")
    kl_ctrl_type: Literal["fixed", "adaptive"] = key("fixed", "constant coefficient, or one steered towards kl_target",
        "固定系数，或向 kl_target 调节的系数",
        upstream=("the adapted coefficient never reaches the loss", "调节后的系数从未到达损失"), on_resume="exact")
    init_kl_coef: float = key(0.01, "coefficient of the KL divergence; no reference model is needed when 0",
        "KL 散度的系数；为 0 时不需要参考模型", elsewhere="kl_coef kl_loss_coef", on_resume="kl")
    # upstream's run files carry a beta that it never reads; with num_generations it is the one of ms-swift
    beta: float | None = key(None, "the same as init_kl_coef, the name in ms-swift; read only together with num_generations",
        "同 init_kl_coef，ms-swift 的叫法；只与 num_generations 一起读", range=Bounds(0, 1e6),
        upstream=("has the default 0.1 and is never read", "默认 0.1，从未读取"), on_resume="kl")
    kl_horizon: int = key(1000, "adaptive: samples over which the coefficient moves", "adaptive：系数变化所经过的样本数",
        needs=_ADAPTIVE, elsewhere="horizon", on_resume="exact")
    kl_target: float = key(0.1, "adaptive: KL of a token that the coefficient is steered to",
        "adaptive：系数所趋向的每 token KL", needs=_ADAPTIVE, elsewhere="target_kl",
        upstream=("default 100", "默认 100"), on_resume="exact")
    use_kl_in_reward: bool = key(False, "subtract the KL from the rewards instead of adding it to the loss",
        "从奖励中减去 KL，而不加到损失里", elsewhere="kl_in_reward", on_resume="exact")
    kl_clamp: bool = key(True, "clamp the log-ratio to +-20 and low_var_kl to +-10, as MindSpeed-RL does; TRL does not",
        "把对数比限制到 +-20、low_var_kl 限制到 +-10，同 MindSpeed-RL；TRL 不限制", on_resume="exact")
    use_bias_correction_kl: bool = key(False, "multiply the KL by the ratio new / old (unbiased off-policy)",
        "KL 乘以新旧策略比值（off-policy 时无偏）", on_resume="exact")
    sync_ref_model: bool = key(False, "update the reference with the actor's weights during the run", "让参考模型跟随 actor",
        on_resume="reference")
    ref_model_sync_steps: int = key(512, "iterations between two such updates", "两次跟随之间的迭代数", range=Range.ITERATIONS,
        needs=_SYNC_REF, elsewhere="ref_update_interval", on_resume="exact")
    ref_model_mixup_alpha: float = key(0.6, "fraction of the actor in the updated reference",
        "跟随后的参考模型中 actor 所占的份额", range=Range.FRACTION, needs=_SYNC_REF, on_resume="exact")
    ema_decay: float = key(0.0,
        "decay of a moving average of the actor's weights, a = decay * a + (1 - decay) * w after each optimizer step, which is "
        "evaluated and exported too; 0 for none",
        "actor 权重滑动平均的衰减系数，每个优化步后 a = decay * a + (1 - decay) * w，也会评测并导出；0 表示不保留",
        range=Range.DECAY, on_resume="exact")


@dataclass(frozen=True, kw_only=True)
class _RewardKeys:
    """Reward functions and models, failed scores, filters of groups."""

    rule_reward: bool = key(True, "score by functions; false: only by a reward model", "用函数打分；false：只用奖励模型",
        on_resume="in_flight")
    verifier_function: list[str] = key(["base_acc"], "reward functions by name or as module:function",
        "奖励函数，用名字或 module:function", needs=_RULES, elsewhere="rm_type reward_fn custom_reward_function.name",
        upstream=("skips names that are unknown", "跳过不认识的名字"), on_resume="in_flight")
    verifier_weight: list[float] = key([1.0], "weight of each", "各自的权重", range=Range.WEIGHT, needs=_RULES,
        on_resume="in_flight")
    reward_funcs: list[str] | None = key(None, "the same as verifier_function, the name in ms-swift",
        "同 verifier_function，ms-swift 的叫法", on_resume="in_flight")
    reward_weights: list[float] | None = key(None, "the same as verifier_weight; 1.0 each when unset",
        "同 verifier_weight；不设时各为 1.0", range=Range.WEIGHT, on_resume="in_flight")
    external_plugins: list[str] = key([],
        "Python files that register further reward functions; their folders also hold losses and estimators given as "
        "module:NAME", "登记更多奖励函数的 Python 文件；其文件夹中也查找以 module:NAME 给出的损失与估计器",
        supervised=True, elsewhere="custom_rm_path custom_reward_function.path", on_resume="in_flight")
    # upstream never reads this key and the next
    verifier_parallel: int = key(1, "reward worker processes when num_reward_workers is unset",
        "num_reward_workers 未设时的奖励进程数", range=Range.PROCESSES, upstream=("never read", "从未读取"), on_resume="exact")
    verifier_timeout: int = key(30, "seconds one score may take when reward_timeout_s is unset",
        "reward_timeout_s 未设时一次打分可用的秒数", range=Bounds(1, 31 * 86400), upstream=("never read", "从未读取"),
        on_resume="exact")
    num_reward_workers: int | None = key(None, "reward worker processes; verifier_parallel when unset",
        "奖励进程数；不设时为 verifier_parallel", range=Range.PROCESSES, on_resume="exact")
    reward_timeout_s: float | None = key(None, "seconds one score may take; verifier_timeout when unset",
        "一次打分可用的秒数；不设时为 verifier_timeout", range=Range.SCORE_S, on_resume="exact")
    reward_memory_gib: float | None = key(4.0, "memory one reward process may use, in GiB; null: no limit",
        "一个奖励进程可用的内存，单位 GiB；null：不限", range=Range.POSITIVE, on_resume="exact")
    reward_failure_policy: Literal["drop", "retry", "zero"] = key("drop", "treatment of a sample whose score failed",
        "打分失败的样本怎么办", on_resume="in_flight")
    reward_failure_limit: float = key(0.1, "fraction of failed scores among the last 1024 above which the run stops",
        "最近 1024 次打分中失败的比例超过此值时停止", range=Range.FRACTION, on_resume="exact")
    unscored_iterations_limit: int = key(3,
        "consecutive iterations without any scored response after which the run stops; 0: it continues",
        "连续多少次迭代没有任何回答得到分数就停止运行；0 表示一直运行", range=Range.ITERATIONS_FROM_0, on_resume="exact")
    reward_model: str | None = key(None, "folder of a reward model whose score is added last",
        "奖励模型的文件夹，其得分最后加入", elsewhere="reward_model_path reward_pretrain reward_model.path",
        on_resume="in_flight")
    reward_model_weight: float = key(1.0, "its weight next to the reward functions", "它与奖励函数并列时的权重",
        range=Range.WEIGHT, on_resume="in_flight")
    process_reward_aggregation: Literal["min", "mean", "product", "last", "max"] = key("min",
        "aggregation of the scores of steps into the response's score, for a reward model with reward_tokens",
        "带 reward_tokens 的奖励模型：各步骤得分如何合成回答的得分", on_resume="in_flight")
    judge_url: str | None = key(None, "OpenAI-compatible endpoint of a generative judge; off when unset",
        "生成式评判的 OpenAI 兼容地址；不设为关闭", on_resume="in_flight")
    judge_model: str | None = key(None,
        "with judge_url the model's name there; without, the folder of a generative judge that the run serves itself",
        "有 judge_url 时为该地址的模型名；没有时为由本次运行自己启动的生成式评判模型的文件夹", on_resume="in_flight")
    judge_prompt: str | None = key(None, "file with the judge's prompt template", "评判 prompt 模板的文件",
        on_resume="in_flight")
    judge_parser: str | None = key(None, "module:function that turns the judge's reply into a score",
        "把评判的回复变成得分的 module:function", on_resume="in_flight")
    judge_rubric: str | None = key(None,
        "criteria with weights, all of which one request judges: a column of the row, or a .json file for all rows",
        "带权重的评分标准，一次请求判断全部：行中的列名，或用于所有行的 .json 文件", on_resume="in_flight")
    judge_rubric_score: Literal["weighted", "mean", "all", "any"] = key("weighted",
        "score of a rubric: weights that are met over the positive ones, the share of the criteria that pass, or 1 where all "
        "or any pass; a fault (negative weight) passes where it is not found",
        "评分标准的得分：满足的权重之和除以正权重之和；通过的标准所占比例；全部或任一通过时为 1；"
        "扣分项（负权重）未出现即算通过",
        on_resume="in_flight")
    judge_panel: list[str] = key([],
        "further judges, each [MODEL@]URL, which get the same requests as the one at judge_url; all of them vote",
        "更多的评判，每个写作 [MODEL@]URL，收到与 judge_url 处评判相同的请求；所有评判一起投票", needs=("judge_url", "set"),
        on_resume="in_flight")
    judge_repeats: int = key(1, "votes of each judge about a response; more than 1 need judge_temperature",
        "每个评判对一个回答的投票次数；大于 1 时需要 judge_temperature", range=Bounds(1, 64), on_resume="in_flight")
    judge_temperature: float = key(0.0, "temperature of a judge's replies", "评判回复的采样温度", range=Bounds(0, 10),
        on_resume="in_flight")
    judge_vote: Literal["mean", "median", "majority", "min"] = key("mean",
        "score of several votes; majority: 1 where more than half give at least 0.5, and with a rubric the score of the "
        "criteria that more than half find met",
        "多个投票的合并得分；majority：过半投票不低于 0.5 时为 1；有评分标准时，为过半投票认为满足的标准的得分",
        on_resume="in_flight")
    judge_quorum: int | None = key(None,
        "votes that a response needs, so that it has a score without a judge that cannot be reached; when unset all",
        "一个回答所需的最少票数，使个别评判无法访问时仍有得分；不设时需要全部", range=Bounds(1, 10**4), on_resume="in_flight")
    judge_weight: float = key(1.0, "weight of the judge's score", "评判得分的权重", range=Range.WEIGHT,
        on_resume="in_flight")
    judge_timeout_s: float = key(60.0, "seconds one reply may take", "一次回复可用的秒数", range=Range.SCORE_S,
        needs=("judge_url", "set"), on_resume="exact")
    judge_max_tokens: int = key(512, "judge served by the run: longest reply, in tokens",
        "由运行启动的评判：回复的最大 token 数", range=Range.TOKENS, on_resume="in_flight")
    judge_max_model_len: int | None = key(None,
        "judge served by the run: longest request with its reply, in tokens; when unset the model's own, but at most the "
        "larger of 8192 and twice generate_config.max_model_len plus judge_max_tokens",
        "由运行启动的评判：请求加回复的最大 token 数；不设时取模型自身上限，但不超过 8192 与两倍 "
        "generate_config.max_model_len 加 judge_max_tokens 中的较大者", range=Range.TOKENS, on_resume="in_flight")
    judge_tensor_parallel_size: int = key(1, "judge served by the run: devices of one engine",
        "由运行启动的评判：一个引擎的设备数", range=Range.DEVICES, on_resume="exact")
    cosine_min_len_value_wrong: float = key(-0.5, "cosine: a wrong answer of length 0", "cosine：长度为 0 的错误答案",
        range=Range.WEIGHT, on_resume="in_flight")
    cosine_max_len_value_wrong: float = key(0.0, "cosine: a wrong answer of full length", "cosine：满长的错误答案",
        range=Range.WEIGHT, on_resume="in_flight")
    cosine_min_len_value_correct: float = key(1.0, "cosine: a right answer of length 0", "cosine：长度为 0 的正确答案",
        range=Range.WEIGHT, on_resume="in_flight")
    cosine_max_len_value_correct: float = key(0.5, "cosine: a right answer of full length", "cosine：满长的正确答案",
        range=Range.WEIGHT, on_resume="in_flight")
    cosine_max_len: int | None = key(None, "cosine: full length in tokens; max_tokens when unset",
        "cosine：满长的 token 数；不设时为 max_tokens", range=Range.TOKENS, on_resume="in_flight")
    repetition_n_grams: int = key(3, "repetition: length of the counted n-grams", "repetition：所计片段的长度",
        range=Bounds(1, 10**6), on_resume="in_flight")
    repetition_max_penalty: float = key(-1.0, "repetition: score of a response that only repeats",
        "repetition：全是重复的回答的得分", range=Range.WEIGHT, on_resume="in_flight")
    soft_max_length: int | None = key(None, "soft_overlong: length with the full penalty; max_tokens when unset",
        "soft_overlong：全额惩罚的长度；不设时为 max_tokens", range=Range.TOKENS, on_resume="in_flight")
    soft_cache_length: int | None = key(None,
        "soft_overlong: tokens before it over which the penalty grows; required by soft_overlong",
        "soft_overlong：在此长度之前惩罚逐渐增大的 token 数；soft_overlong 必须设", range=Range.TOKENS_FROM_0,
        on_resume="in_flight")
    overlong_buffer_enable: bool = key(False, "penalize responses near the length limit", "惩罚接近长度上限的回答",
        elsewhere="overlong_buffer.enable", on_resume="in_flight")
    overlong_buffer: int = key(0, "tokens before the limit over which the penalty grows", "上限之前惩罚逐渐增大的 token 数",
        range=Range.TOKENS_FROM_0, needs=_OVERLONG, elsewhere="overlong_buffer.len", on_resume="in_flight")
    overlong_buffer_penalty_factor: float = key(1.0, "penalty at the limit", "到上限时的惩罚", range=Range.WEIGHT,
        needs=_OVERLONG, elsewhere="overlong_buffer.penalty_factor", on_resume="in_flight")
    # upstream repeats the limit here; a rule keeps both equal
    rollout_max_tokens: int = key(2048, "the limit; equal to max_tokens", "该上限；等于 max_tokens", range=Range.TOKENS,
        needs=_OVERLONG, on_resume="in_flight")
    missing_eos_penalty: float = key(0.0, "subtracted from the total reward of a truncated response, which has no end token",
        "从被截断（没有结束 token）的回答的总奖励中减去", range=Range.WEIGHT, on_resume="in_flight")
    prompt_sources: list[str] = key([], "data sources whose prompts are mixed by prompt_source_weights",
        "按 prompt_source_weights 混合的数据来源", on_resume="order")
    prompt_source_weights: list[float] = key([], "share of the prompts of each of prompt_sources, whatever its size",
        "prompt_sources 中各来源的 prompt 占比，与其大小无关", range=Range.POSITIVE, needs=("prompt_sources", "set"),
        on_resume="order")
    prompt_source_key: str = key("data_source", "column with the source of a prompt", "prompt 来源所在的列",
        needs=("prompt_sources", "set"), on_resume="order")
    prompt_curriculum: str | None = key(None,
        "column with the pass rate of each prompt; the first pass over the data goes from high to low",
        "记有各 prompt 通过率的列；第一遍数据按通过率从高到低进行", on_resume="order")
    prompt_replay_fraction: float | None = key(None,
        "fraction of prompts that are hard ones again: with few passing responses; none when unset",
        "重放难题（通过的回答很少的 prompt）的比例；不设则不重放",
        range=Bounds(0, 1, excludes_low=True, excludes_high=True), on_resume="order")
    prompt_replay_below: float = key(0.5, "prompts with a lower pass rate are replayed", "通过率低于此值的 prompt 会被重放",
        range=Bounds(0, 1, excludes_low=True), needs=("prompt_replay_fraction", "set"), on_resume="order")
    prompt_skip_above: float | None = key(None,
        "prompts with at least this pass rate are passed over in the next pass; off when unset",
        "通过率不低于此值的 prompt 在下一遍中跳过；不设则不跳过", range=Bounds(0, 1, excludes_low=True), on_resume="order")
    prompt_skip_below: float | None = key(None,
        "prompts with at most this pass rate are passed over in the next pass; off when unset",
        "通过率不高于此值的 prompt 在下一遍中跳过；不设则不跳过", range=Bounds(0, 1, excludes_high=True), on_resume="order")
    prompt_pass_reward: float = key(0.5, "a response passes from this total reward on", "总奖励不低于此值的回答算通过",
        range=Range.WEIGHT, on_resume="order")
    prompt_level_key: str | None = key(None,
        "column with the level of each prompt, a number; a higher level opens when prompts of the highest open level pass",
        "记有各 prompt 难度等级（数字）的列；当前最高等级的 prompt 通过后才采样更高等级", on_resume="order")
    prompt_level_pass_rate: float = key(0.7, "mean pass rate of the highest open level from which on the next one opens",
        "当前最高等级的平均通过率不低于此值时开放下一等级", range=Bounds(0, 1, excludes_low=True),
        needs=("prompt_level_key", "set"), on_resume="order")
    prompt_level_prompts: int = key(32, "the last prompts of the highest open level, of which that mean is",
        "计算该平均值所用的、当前最高等级最近的 prompt 数", range=Range.ROWS, needs=("prompt_level_key", "set"),
        on_resume="order")
    filter_groups_enable: bool = key(False, "train only on groups whose metric varies, generate until there are enough",
        "只训练指标有差异的组，一直生成到够数", elsewhere="filter_groups.enable", on_resume="exact")
    filter_groups_metric: str = key("acc", "reward function that must vary; when omitted: acc, else the first",
        "必须有差异的奖励函数；不写时：acc，没有则第一个", needs=_FILTER,
        elsewhere="filter_groups.metric", on_resume="exact")
    filter_groups_max_batches: int = key(1, "rollouts an iteration may take; 0 or less: no limit; when omitted: 10",
        "一次迭代最多的 rollout 数；0 或更小：不限；不写时：10", range=Bounds(-1, 10**6), needs=_FILTER,
        elsewhere="filter_groups.max_num_gen_batches", on_resume="exact")
    filter_groups_train_batch_size: int = key(1,
        "prompts on which an iteration trains; when omitted: all prompts of a rollout",
        "一次迭代训练的 prompt 数；不写时：一次 rollout 的",
        range=Range.ROWS, needs=_FILTER, on_resume="exact")
    dynamic_sample: bool = key(False, "replace groups whose advantages are 0, because rewards do not vary, by new ones",
        "奖励没有差异、因而优势为 0 的组用新的组替换", elsewhere="dynamic_filtering", on_resume="exact")
    max_resample_times: int = key(3, "extra rollouts an iteration may take", "一次迭代最多追加的 rollout 数",
        range=Bounds(0, 10**6), needs=("dynamic_sample", (True,)), on_resume="exact")
    log_completions: bool = key(False,
        "write prompts, responses, reward parts and advantages to completions.jsonl, and show some of them on the console",
        "把 prompt、回答、各项奖励与优势写入 completions.jsonl，并在终端显示其中一部分", on_resume="exact")
    log_completions_interval: int = key(1, "iterations between two such writes", "两次写入之间的迭代数", range=Range.ITERATIONS,
        needs=("log_completions", (True,)), on_resume="exact")
    log_completions_keep: int = key(16, "completions of one such write", "一次写入的回答数", range=Bounds(0, 10**7),
        needs=("log_completions", (True,)), on_resume="exact")
    save_rollouts_interval: int = key(0,
        "iterations between two rollout batches in rollouts/ of the run folder, for `mindspeed-rl parity`; 0: none",
        "每隔多少次迭代把 rollout 批写入运行文件夹的 rollouts/，供 `mindspeed-rl parity` 用；0：不写",
        range=Range.ITERATIONS_FROM_0, on_resume="exact")
    eval_greedy: bool = key(True, "evaluate with temperature 0 instead of the training sampling",
        "评测用温度 0，而不用训练时的采样", on_resume="exact")


@dataclass(frozen=True, kw_only=True)
class AgentKeys:
    """A program with a loop of its own, which plays each sample; docs/agents.md, section Programs."""

    command: list[str] = key([], "words of the program's command; {column} stands for a column of the row",
        "程序命令的各个词；{column} 代表该行的一列", on_resume="in_flight")
    url: str | None = key(None, "service on this machine that plays a sample for each POST, in place of a command",
        "代替命令：本机上的服务，每个 POST 跑一个样本", on_resume="in_flight")
    env: AnyGroup | None = key(None,
        "environment variables of the program, in addition to its address; {column} as in command, ${NAME} is one of the run",
        "程序的环境变量（地址之外）；{column} 同 command，${NAME} 取运行环境中的同名变量",
        needs=("command", "set"), on_resume="in_flight")
    grader: list[str] = key([],
        "command that grades a sample in its folder, after the program: exit status 0 is a reward of 1, any other is 0, or a "
        "last line of JSON has `reward`",
        "程序结束后在样本文件夹中打分的命令：退出码 0 得 1 分、其他得 0 分，或最后一行 JSON 中有 `reward`",
        needs=("command", "set"), on_resume="in_flight")
    timeout_s: float = key(1800.0, "seconds of one sample", "一个样本的秒数", range=Range.WAIT_S, on_resume="in_flight")
    memory_gib: float = key(4.0, "memory of the processes of one sample", "一个样本的进程可用的内存",
        range=Bounds(0, 1e4, excludes_low=True, default=4), needs=("command", "set"), on_resume="in_flight")
    disk_gib: float = key(16.0, "room of the files of one sample, in GiB; a command that writes more is ended",
        "一个样本的文件可占的空间（GiB）；写得更多的命令会被终止",
        range=Bounds(0, 1e6, excludes_low=True, default=16), needs=("command", "set"), on_resume="in_flight")
    max_parallel: int = key(16, "samples that are played at once by a rollout process", "一个推理进程同时跑的样本数",
        range=Range.PROCESSES, on_resume="in_flight")


_HAS_OPPONENTS = ("roles", "set")


@dataclass(frozen=True, kw_only=True)
class OpponentKeys:
    """Opponents from the run's past: earlier weights of the actor play a role; docs/agents.md, section Several roles."""

    roles: list[str] = key([],
        "roles of the environment that earlier weights may play, one of them in an episode; empty: none",
        "历史权重可以扮演的环境角色，每局其中一个；为空则没有", on_resume="exact")
    share: float = key(0.5,
        "part of the prompts whose episodes have an opponent; in the others the present weights play all roles",
        "有多大比例的 prompt 的对局有历史对手；其余对局由当前权重扮演所有角色", range=Range.FRACTION, needs=_HAS_OPPONENTS,
        on_resume="exact")
    interval: int = key(10, "iterations between two snapshots of the weights", "两次快照之间的迭代数", range=Range.ITERATIONS,
        needs=_HAS_OPPONENTS, on_resume="exact")
    size: int = key(4, "snapshots that are kept besides the weights that the run started from; the oldest goes first",
        "除起始权重外保留的快照数；最旧的先删", range=Bounds(1, 256), needs=_HAS_OPPONENTS, on_resume="exact")
    choice: Literal["uniform", "latest", "first", "recent"] = key("uniform",
        "snapshot that plays: any with the same chance, the latest, the weights that the run started from, or recent ones more "
        "often, each twice as often as the one before",
        "由哪个快照出战：等概率任选（uniform）、最新的（latest）、起始权重（first），或越新越常选（recent，每个的概率是前一个的两倍）",
        needs=_HAS_OPPONENTS, on_resume="exact")
    evaluation: Literal["first", "latest", "none"] = key("first",
        "opponent in evaluations: the weights that the run started from, the latest snapshot, or none",
        "评测时的对手：起始权重、最新的快照，或没有", needs=_HAS_OPPONENTS, on_resume="in_flight")

    @property
    def num_snapshots(self) -> int:
        """Snapshots that the rollout engine holds at most, besides the adapter that trains."""
        return self.size + 1 if self.roles else 0


@dataclass(frozen=True, kw_only=True)
class _ToolKeys:
    """Samples of several turns: tools, environments, schedulers."""

    multi_turn_enable: bool = key(False, "samples of several turns, by an agent loop", "由智能体循环生成多轮样本",
        elsewhere="multi_turn.enable", on_resume="in_flight")
    agent_loop: str | None = key(None,
        "loop that generates a sample, by name or module:Class; by default program, environment, scheduler or tool_agent "
        "where agent, environment, multi_turn_scheduler or tool_config_path is set, else single_turn",
        "样本如何生成：名称或 module:Class；不设时：设了 agent、environment、multi_turn_scheduler 或 tool_config_path 就用 "
        "program、environment、scheduler 或 tool_agent，否则 single_turn",
        names=("single_turn", "tool_agent", "scheduler", "environment", "roles", "program"), needs=_TOOLS,
        elsewhere="default_agent_loop", on_resume="in_flight")
    max_turns: int | None = key(None, "turns of the model in one sample; as many as fit when unset",
        "一个样本中模型的轮数；不设时能放多少轮就多少轮", range=Bounds(1, 10**6), needs=_TOOLS, elsewhere="max_assistant_turns",
        on_resume="in_flight")
    environment: str | None = key(None,
        "module:Class of an environment with reset, step and close, verifiers:NAME of that library, or a YAML file that "
        "names one under environment, with args, python and timeout_s; or a name in envs of a file in external_plugins",
        "环境的 module:Class，有 reset、step 与 close；或该库的 verifiers:NAME；或一个 YAML 文件，在 environment 下指定其一，"
        "另有 args、python 与 timeout_s；或 external_plugins 文件里 envs 中的名字", needs=_TOOLS, on_resume="in_flight")
    opponents: OpponentKeys = key(OpponentKeys, "earlier weights of the actor that play roles of the environment",
        "扮演环境角色的 actor 历史权重", needs=_TOOLS, on_resume="exact")
    role_adapters: AnyGroup | None = key(None,
        "LoRA adapter of each role of the environment, role: adapter, each with its own optimizer; roles that name the same "
        "adapter share it; unset: one for all roles",
        "环境中每个角色的 LoRA 适配器，写成 角色: 适配器，各有自己的优化器；同名则共用；不设时所有角色共用一个", needs=_TOOLS,
        on_resume="fixed")
    agent: AgentKeys | None = key(None, "a program with a loop of its own, which plays each sample at an address of its own",
        "自带循环的程序：每个样本由它通过专属地址完成", needs=_TOOLS, on_resume="in_flight")
    multi_turn_scheduler: str | None = key(None,
        "module:Class with step and check_finished, or module:function of a list of rows, as ms-swift has them, or a name in "
        "multi_turns of a file in external_plugins",
        "有 step 与 check_finished 的 module:Class，或处理行列表的 module:function，写法同 ms-swift；"
        "或 external_plugins 文件里 multi_turns 中的名字", needs=_TOOLS,
        on_resume="in_flight")
    trajectory_reward: Literal["both", "turns", "final", "none"] = key("both",
        "rewards of tools and environments to add: of turns, of the final state, both or none",
        "工具与环境给的分中哪些加入奖励：各轮的、最终状态的", needs=_TOOLS, on_resume="in_flight")
    trajectory_reward_weight: float = key(1.0, "its weight", "它的权重", range=Range.WEIGHT, needs=_TOOLS,
        on_resume="in_flight")
    verifier_reads: Literal["response", "last_turn", "output"] = key("response",
        "part of a sample of several turns that reward functions read: all of it, with replies of tools, the model's last "
        "turn, or the output of the program of `agent`",
        "奖励函数读多轮样本的哪一部分：全部（连同工具的回复），模型的最后一轮，或 `agent` 程序的输出", needs=_TOOLS,
        on_resume="in_flight")
    tool_config_path: str | None = key(None, "YAML list of tools", "工具的 YAML 列表", needs=_TOOLS, on_resume="order")
    tool_parser_format: str | None = key(None, "format of calls; default: as the template prompt_type has it, else hermes",
        "调用的写法；默认按 prompt_type 的模板，否则为 hermes", needs=_TOOLS, elsewhere="multi_turn.format",
        on_resume="in_flight")
    max_tool_calls: int = key(0, "calls of one sample; 0: no limit", "一个样本的调用次数；0：不限", range=Range.CALLS,
        needs=_TOOLS, on_resume="in_flight")
    max_parallel_calls: int = key(0, "calls of one turn; 0: no limit", "一轮的调用数；0：不限", range=Range.CALLS, needs=_TOOLS,
        on_resume="in_flight")
    max_total_response_length: int = key(0,
        "tokens after the prompt, of all turns together; 0: as many as max_model_len, or seq_length where that is not set, "
        "has after max_prompt_length",
        "prompt 之后所有轮合计的 token 数；0：max_model_len（未设时为 seq_length）减去 max_prompt_length",
        range=Range.TOKENS_FROM_0, needs=_TOOLS, on_resume="in_flight")
    max_tool_response_length: int = key(0, "tokens of one tool reply", "一次工具回复的 token 数", range=Range.TOKENS_FROM_0,
        needs=_TOOLS, on_resume="in_flight")
    max_tool_response_characters: int = key(0,
        "characters of one tool reply, as verl counts them: a longer one keeps so many, and has a mark where text was removed; "
        "0: no limit",
        "一次工具回复的字符数（verl 的计法）：更长的回复保留这么多字符，并在删去处加标记；0：不限", range=Range.TOKENS_FROM_0,
        needs=_TOOLS, on_resume="in_flight")
    tool_response_truncate_side: Literal["left", "right", "middle"] | None = key(None, "part of a long reply that is cut",
        "过长的回复截掉哪一部分", needs=_TOOLS, on_resume="in_flight")


@dataclass(frozen=True, kw_only=True)
class RLConfig(_BatchKeys, _ModeKeys, _AdvantageKeys, _LossKeys, _KlKeys, _RewardKeys, _ToolKeys):
    """Reinforcement learning: everything that is neither model, engine nor sampling."""

    actor_resource: Resource = key(Resource, "devices of the actor, and of all roles that share them",
        "actor 及与它共用设备的所有角色的设备", on_resume="exact")
    reference_resource: Resource | None = key(None, "dedicated devices of the reference model", "参考模型专用设备",
        on_resume="exact")
    reward_resource: Resource | None = key(None, "dedicated devices of the reward model", "奖励模型专用设备",
        on_resume="exact")
    judge_resource: Resource | None = key(None,
        "dedicated devices of a judge that the run serves; when unset it takes turns on the actor's",
        "由运行启动的评判专用设备；不设时与 actor 轮流使用同一批设备", on_resume="exact")
    teacher_resource: Resource | None = key(None, "dedicated devices of the teachers; the actor's when unset",
        "教师模型专用设备；不设时同 actor", on_resume="exact")
    critic_resource: Resource | None = key(None, "dedicated devices of the critic; the actor's when unset",
        "critic 专用设备；不设时同 actor", needs=_CRITIC, on_resume="exact")
    rollout_resource: Resource | None = key(None,
        "dedicated devices of the rollout: servers of infer_tensor_parallel_size devices; the actor's when unset",
        "推理专用设备：每个服务器 infer_tensor_parallel_size 个；不设时同 actor", on_resume="exact")
    rollout_server_restarts: int = key(3,
        "rollout servers that may be started anew in a run, in place of lost ones; needs rollout_resource",
        "一次运行中最多重新启动几个失去的推理服务器；需要 rollout_resource", range=Range.RESTARTS, on_resume="exact")
    use_integrated_worker: bool = key(True,
        "actor, reference and rollout share their devices in time; false: each role with a resource has dedicated devices",
        "actor、参考模型与推理分时共用设备；false：设了资源的角色有专用设备",
        upstream=("false is documented but not supported", "false 时各角色有专用设备"), on_resume="exact")
    integrated_mode_config: IntegratedModeConfig | None = key(None, "extras of that mode", "该方式的附加设置",
        on_resume="exact")
    blocking: bool = key(True, "finish every phase before the next starts; false: phases overlap as rows become ready",
        "每个阶段结束后才开始下一个；false：行一就绪阶段就重叠进行",
        upstream=(
            "false waits for single rows without a limit; here wait_timeout_s ends a wait",
            "false 时无限期等待；这里由 wait_timeout_s 结束等待"), on_resume="exact")
    share_backbone: bool = key(False, "LoRA: the reference is the actor with its adapters off",
        "LoRA：参考模型就是关掉适配器的 actor", on_resume="reference")

    data_strategy: Literal["td", "transfer_dock", "dock", "tq", "transfer_queue", "queue"] = key("td",
        "data plane: transfer dock, or the distributed transfer queue", "数据面：transfer dock，或分布式的 transfer queue",
        on_resume="exact")
    transfer_queue_data_shard_num: int = key(1, "storage actors of the transfer queue", "transfer queue 的存储 actor 数",
        range=Range.PROCESSES, needs=_QUEUE, on_resume="exact")
    wait_timeout_s: float = key(1800.0, "seconds any wait for rows may take before the run stops with a report of the wait",
        "等待行最多的秒数，超过即停止并说明谁在等什么", range=Range.WAIT_S, on_resume="exact")
    deadlines: DeadlineKeys = key(DeadlineKeys, "seconds that other waits may take, one key for each kind of wait",
        "其他等待各可持续的秒数，按等待的对象", supervised=True, on_resume="exact")
    fault_tolerance: FaultTolerance = key(FaultTolerance, "recovery of a run whose worker dies or hangs",
        "有 worker 死亡或卡住时运行如何处理", supervised=True, on_resume="exact")

    is_multimodal: bool = key(False, "the model must be one of images; without it only the model's config.json decides",
        "模型必须是图像模型；不写时只由模型的 config.json 决定", on_resume="exact")

    use_tensorboard: bool = key(False, "write TensorBoard files into the run folder", "在运行文件夹中写 TensorBoard 文件",
        supervised=True, on_resume="exact")
    use_wandb: bool = key(False, "log to Weights & Biases; TensorBoard is then off, unless report_to names it",
        "记录到 Weights & Biases；此时 TensorBoard 关闭，除非 report_to 写明它", supervised=True, on_resume="exact")
    wandb_project: str = key("", "project", "项目", needs=_WANDB, supervised=True, elsewhere="project_name",
        on_resume="exact")
    wandb_exp_name: str = key("", "run name", "运行名", needs=_WANDB, supervised=True,
        elsewhere="wandb_run_name run_name experiment_name", on_resume="exact")
    wandb_save_dir: str = key("", "local folder", "本地文件夹", needs=_WANDB, supervised=True, on_resume="exact")
    wandb_mode: Literal["online", "offline", "disabled"] | None = key(None,
        "destination of records; wandb's setting when unset (WANDB_MODE, else online)",
        "记录去哪里；不设时按 wandb 自己的设置（WANDB_MODE，否则 online）", needs=_WANDB, supervised=True, on_resume="exact")
    use_swanlab: bool = key(False, "log to SwanLab", "记录到 SwanLab", supervised=True, on_resume="exact")
    report_to: list[str] = key([], "trackers by name, as the use_ keys switch them on, or module:Class of your own",
        "按名字列出的记录器（等同于打开相应的 use_ 键），或自己的 module:Class", supervised=True, on_resume="exact")
    swanlab_mode: str = key("", "cloud, local or offline", "cloud、local 或 offline", needs=_SWANLAB, supervised=True,
        on_resume="exact")
    swanlab_project: str = key("", "project", "项目", needs=_SWANLAB, supervised=True, on_resume="exact")
    swanlab_exp_name: str = key("", "run name", "运行名", needs=_SWANLAB, supervised=True, on_resume="exact")
    swanlab_save_dir: str = key("", "local folder", "本地文件夹", needs=_SWANLAB, supervised=True, on_resume="exact")
    use_mlflow: bool = key(False, "log to MLflow", "记录到 MLflow", supervised=True, on_resume="exact")
    mlflow_tracking_uri: str = key("", "a server (http://...) or a folder (file:///...); mlflow/ in the run folder when empty",
        "服务地址（http://...）或文件夹（file:///...）；为空时是运行文件夹里的 mlflow/", needs=_MLFLOW, supervised=True,
        on_resume="exact")
    mlflow_experiment: str = key("", "experiment; mindspeed_rl when empty", "实验名；为空时是 mindspeed_rl", needs=_MLFLOW,
        supervised=True, on_resume="exact")
    mlflow_run_name: str = key("", "run name; the name of the run folder when empty", "运行名；为空时是运行文件夹的名字",
        needs=_MLFLOW, supervised=True, on_resume="exact")
    use_trackio: bool = key(False, "log to Trackio", "记录到 Trackio", supervised=True, on_resume="exact")
    trackio_project: str = key("", "project; mindspeed_rl when empty", "项目；为空时是 mindspeed_rl", needs=_TRACKIO,
        supervised=True, on_resume="exact")
    trackio_run_name: str = key("", "run name; the name of the run folder when empty", "运行名；为空时是运行文件夹的名字",
        needs=_TRACKIO, supervised=True, on_resume="exact")
    trackio_space_id: str = key("", "Hugging Face Space that shows the run; this machine when empty",
        "展示该运行的 Hugging Face Space；为空时记录在本机", needs=_TRACKIO, supervised=True, on_resume="exact")
    use_otlp: bool = key(False, "send metrics to an OpenTelemetry collector (OTLP over HTTP)",
        "把指标发送到 OpenTelemetry collector（OTLP/HTTP）", supervised=True, on_resume="exact")
    otlp_endpoint: str = key("",
        "address of the collector, such as http://host:4318; OTEL_EXPORTER_OTLP_ENDPOINT, else this machine, when empty",
        "collector 的地址，例如 http://host:4318；为空时用 OTEL_EXPORTER_OTLP_ENDPOINT，否则为本机", needs=_OTLP,
        supervised=True, on_resume="exact")
    log_max_throughput: bool = key(True, "throughput counts the longest instead of the mean length, as MindSpeed-RL does",
        "吞吐按最长而不按平均长度计算，同 MindSpeed-RL", upstream=("read by grpo only", "只有 grpo 读取"), on_resume="exact")

    num_cpus_for_placement_group: int = key(8, "CPUs that Ray reserves with each device", "Ray 在每个设备旁保留的 CPU 数",
        range=Bounds(0, 10000), only_on="npu cuda", supervised=True, on_resume="exact")
    hccl_buffersize: int = key(256, "buffer of one HCCL communicator, in MiB", "一个 HCCL 通信域的缓冲，单位 MiB",
        range=Bounds(1, 10**6), only_on="npu", supervised=True, on_resume="exact")
    runtime_env_path: str = key("configs/envs/runtime_env.yaml", "environment variables of the workers", "各工作进程的环境变量",
        only_on="npu cuda", supervised=True, on_resume="exact")
    # fmt: on

    def __post_init__(self) -> None:
        """Give the base budgets to the three passes that do not set their budget."""
        # upstream's base budget does not reach the passes, which then have 4096 each
        for role in ("ref", "actor", "update"):
            for budget in ("max_packing_token_size", "dynamic_max_batch_size"):
                if getattr(self, f"{role}_{budget}") is None:
                    object.__setattr__(self, f"{role}_{budget}", getattr(self, budget))

    @property
    def served_judge(self) -> str | None:
        """Folder of the generative judge that the run serves itself; None without one."""
        return None if self.judge_url is not None else self.judge_model

    @property
    def num_judge_votes(self) -> int:
        """Votes about a response: of each judge, as often as it is asked; 0 without a judge."""
        num_judges = 1 + len(self.judge_panel) if self.judge_url is not None else int(self.served_judge is not None)
        return num_judges * self.judge_repeats

    @property
    def tracker_names(self) -> list[str]:
        """The trackers that the use_ keys switch on, then the names in `report_to`; wandb replaces tensorboard, as upstream."""
        switched_on = {
            "tensorboard": self.use_tensorboard and not self.use_wandb,
            "wandb": self.use_wandb,
            "swanlab": self.use_swanlab,
            "mlflow": self.use_mlflow,
            "trackio": self.use_trackio,
            "otlp": self.use_otlp,
        }
        return list(dict.fromkeys([*(name for name, is_on in switched_on.items() if is_on), *self.report_to]))

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters of `role_adapters`, each once; the first is the actor's own. Empty where roles share one."""
        return tuple(dict.fromkeys(map(str, (self.role_adapters or {}).values())))

    @property
    def engine_adapters(self) -> dict[str, str]:
        """Role -> name of its adapter in the rollout engine, in which "" is the actor's own."""
        own = self.adapter_names[:1]
        return {role: "" if str(name) in own else str(name) for role, name in (self.role_adapters or {}).items()}

    @property
    def num_engine_adapters(self) -> int:
        """Adapters that the rollout engine holds at most: those that train, and the opponents' snapshots of each."""
        return max(1, len(self.adapter_names)) * (1 + self.opponents.num_snapshots)

    @property
    def agent_loop_name(self) -> str:
        """The loop that generates the samples, by name or "module:Class"."""
        if not self.multi_turn_enable:
            return "single_turn"
        if self.agent_loop is not None:
            return self.agent_loop
        # without an environment, a scheduler or tools there is one turn
        return next((loop for loop, key in AGENT_LOOP_KEYS.items() if getattr(self, key) is not None), "single_turn")

    @property
    def requests_have_texts(self) -> bool:
        """True where turns may end by texts that the run file does not name, which an engine finds only with a tokenizer."""
        return self.agent_loop_name not in _LOOPS_WITHOUT_TEXTS
