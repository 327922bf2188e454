"""When to use which algorithm, its paper and its names in other projects; and what other projects have that this one has not.

`config.explain.algorithm_page` makes docs/which_algorithm.md of it. Names in other projects are taken from verl 0.9.1, ms-swift
4.6 and TRL 1.16.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    """When to use an algorithm.

    Attributes:
        paper: arXiv number; "" where there is none.
        use: a sentence in English and one in Chinese.
        verl, swift, trl: its names there; "" where it is missing.
    """

    paper: str
    use: tuple[str, str]
    verl: str = ""
    swift: str = ""
    trl: str = ""


#: key of rl_config -> name -> advice
ADVICE: dict[str, dict[str, Advice]] = {
    "loss_type": {
        "grpo": Advice(
            "2402.03300",
            ("the original; long responses weigh as much as short ones", "最初的形式；长回答与短回答权重相同"),
            "vanilla with seq-mean-token-mean",
            "grpo",
            "grpo",
        ),
        "dapo": Advice(
            "2503.14476",
            (
                "the default: every token weighs the same; with clip_higher_enable it keeps entropy up",
                "默认：每个 token 权重相同；配 clip_higher_enable 可保持熵",
            ),
            "vanilla with token-mean",
            "dapo",
            "dapo",
        ),
        "bnpo": Advice(
            "",
            ("another name of dapo, for run files of TRL and ms-swift", "dapo 的别名，供 TRL 与 ms-swift 的配置使用"),
            "",
            "bnpo",
            "bnpo",
        ),
        "dr_grpo": Advice(
            "2503.20783",
            (
                "when wrong answers grow longer and longer; with scale_rewards: none",
                "错误回答越来越长时；配 scale_rewards: none",
            ),
            "vanilla with seq-mean-token-sum-norm",
            "dr_grpo",
            "dr_grpo",
        ),
        "gspo": Advice(
            "2507.18071",
            (
                "models with experts, where ratios of tokens are noisy; choose the clip about a thousand times narrower",
                "MoE 模型，token 比值噪声大时；截断范围约取千分之一",
            ),
            "gspo (the form sequence_token)",
            "grpo with importance_sampling_level sequence",
            "grpo with importance_sampling_level sequence",
        ),
        "luspo": Advice(
            "2602.05261",
            ("gspo whose responses shrink in training", "用 gspo 而回答越来越短时"),
            "",
            "",
            "luspo",
        ),
        "cispo": Advice(
            "2506.13585",
            (
                "rare, decisive tokens are clipped away by dapo: here clipped tokens keep their gradient",
                "dapo 把少见而关键的 token 截掉时：这里被截断的 token 保留梯度",
            ),
            "cispo",
            "",
            "",
        ),
        "cispo_cap": Advice(
            "2510.13786",
            ("the same with one cap, for long asynchronous runs", "同上，只有一个上限，用于长时间的异步训练"),
            "",
            "cispo",
            "cispo",
        ),
        "sapo": Advice(
            "2511.20347",
            ("a smooth gate in place of the clip; models with experts", "用平滑的门代替截断；MoE 模型"),
            "sapo",
            "sapo",
            "sapo",
        ),
        "gmpo": Advice(
            "2507.20673",
            ("single tokens with extreme ratios make updates jump", "个别 token 的极端比值使更新跳动时"),
            "geo_mean",
            "",
            "GMPOTrainer",
        ),
        "gpg": Advice(
            "2504.02546",
            ("one update a rollout: nothing to clip, nothing to tune", "每次 rollout 只更新一步：无需截断，也没有要调的"),
            "gpg",
        ),
        "dppo_tv": Advice(
            "2602.04879",
            (
                "large vocabularies: bounds the change of the probability itself, so rare tokens may change",
                "词表大时：界定概率本身的变化，少见 token 仍可变化",
            ),
            "dppo_tv",
        ),
        "dppo_kl": Advice("2602.04879", ("the same with a KL as the bound", "同上，以 KL 为界"), "dppo_kl"),
        "vespo": Advice(
            "2602.10693",
            (
                "responses several versions old: old sequences fade instead of being clipped",
                "回答旧了好几个版本时：旧序列的权重衰减而不是截断",
            ),
            "",
            "",
            "vespo",
        ),
        "fipo": Advice(
            "2603.19835",
            (
                "long chains of thought, where later tokens tell which earlier ones mattered",
                "长思维链，后面的 token 说明前面哪些重要",
            ),
            "",
            "fipo",
        ),
        "dro": Advice(
            "2405.19107",
            (
                "data of another policy; no clip, a quadratic pull towards the old policy",
                "数据来自别的策略；不截断，以二次项拉向旧策略",
            ),
            "dro",
        ),
        "clip_cov": Advice(
            "2505.22617",
            (
                "entropy collapses: a few tokens that would lower it most lose their gradient",
                "熵坍缩时：最使熵下降的少数 token 不更新",
            ),
            "clip_cov",
        ),
        "kl_cov": Advice(
            "2505.22617",
            (
                "entropy collapses: the same tokens are held near the old policy",
                "熵坍缩时：把这些 token 约束在旧策略附近",
            ),
            "kl_cov",
        ),
        "real": Advice(
            "2602.05630",
            (
                "rewards of right or wrong: a classifier of each group, whose weights stay bounded; with scale_rewards: none",
                "对错型奖励：对每组回答做分类，权重有界；配 scale_rewards: none",
            ),
            "",
            "real",
        ),
        "online_dpo": Advice(
            "2402.04792",
            (
                "preferences instead of sizes of rewards: a judge or reward model that only orders responses",
                "只看好坏次序、不看奖励大小：评判或奖励模型只能给出排序时",
            ),
            "",
            "",
            "OnlineDPOTrainer",
        ),
    },
    "adv_estimator": {
        "group_norm": Advice(
            "2402.03300",
            ("the default for rewards that can be checked", "默认；用于可验证的奖励"),
            "grpo, grpo_vectorized",
            "grpo",
            "GRPOTrainer",
        ),
        "group_norm_whitened": Advice(
            "2508.08221",
            ("groups, and advantages of one spread over the whole batch", "有组，且整批优势的离散度统一"),
        ),
        "rloo": Advice(
            "2402.14740",
            ("an unbiased baseline from the group; reward models", "由组得到的无偏基线；配奖励模型"),
            "rloo, rloo_vectorized",
            "rloo",
            "RLOOTrainer",
        ),
        "opo": Advice(
            "2505.23585",
            ("lengths differ much within a group; one update a rollout", "组内长度差别大；每次 rollout 只更新一步"),
            "opo",
        ),
        "pass_at_k": Advice(
            "2503.19595", ("what counts is that one of k answers is right", "只要 k 个回答中有一个对"), "grpo_passk"
        ),
        "gpg": Advice(
            "2504.02546", ("with loss_type gpg; few responses have a reward", "配 loss_type gpg；有奖励的回答很少"), "gpg"
        ),
        "max_rl": Advice("2602.02710", ("hard prompts: rewards of 0 and 1, rarely 1", "难题：奖励为 0 或 1，且很少为 1")),
        "reinforce_plus_plus": Advice(
            "2501.03262", ("one response a prompt, many prompts", "每个 prompt 一个回答，prompt 很多"), "reinforce_plus_plus"
        ),
        "reinforce_plus_plus_baseline": Advice(
            "2501.03262",
            ("groups, with one scale for the whole batch", "有组，但整批用同一尺度"),
            "reinforce_plus_plus_baseline",
            "reinforce_plus_plus",
        ),
        "flash_reinforce": Advice(
            "",
            (
                "one response a prompt and no critic: the mean of the batch is the baseline",
                "每个 prompt 一个回答且不用 critic：以整批均值为基线",
            ),
        ),
        "remax": Advice(
            "2310.10505",
            ("one response a prompt, with a greedy one as its baseline", "每个 prompt 一个回答，以贪心回答为基线"),
            "remax",
        ),
        "gae": Advice(
            "1506.02438",
            (
                "PPO: credit for each token from a critic, which costs a second model",
                "PPO：critic 给出每个 token 的功劳，代价是第二个模型",
            ),
            "gae",
            "ppo",
            "PPOTrainer",
        ),
        "grouped_gae": Advice(
            "1506.02438",
            (
                "a critic, and prompts whose difficulty and length differ much: each group has its own scale",
                "有 critic，且各 prompt 的难度和长度差别大：每组用自己的尺度",
            ),
        ),
        "optimal_token_baseline": Advice(
            "2602.07078",
            (
                "long responses and small groups, whose gradient norm jumps; costs a second product with the vocabulary",
                "回答长、组小、梯度范数跳动时；代价是多一次与词表的乘积",
            ),
            "optimal_token_baseline, tir_optimal_token_baseline",
        ),
        "gdpo": Advice(
            "2601.05242",
            ("several rewards of different size and spread", "多个大小、方差不同的奖励"),
            "gdpo",
            "scale_rewards gdpo",
            "multi_objective_aggregation normalize_then_sum",
        ),
    },
}

#: key of rl_config -> name elsewhere -> what it is, and the nearest that is here
NOT_AVAILABLE: dict[str, dict[str, str]] = {
    "loss_type": {
        "chord": "CHORD mixes expert data into the loss; nearest: a stage sft before",
        "aspo": "ASPO (2510.06062) inverts the ratio of tokens with A > 0; nearest: cispo, which keeps every gradient",
        "bypass_mode": "rollout log-probs are taken as old ones; nearest: rl_config.old_log_probs rollout, beside any loss",
        "icepop": "IcePop masks tokens by pi_old / pi_rollout, next to any loss; nearest: rollout_importance_sampling_mode "
        "token_mask with a threshold and a threshold_min",
        "a2po": "A*-PO (2505.20686) regresses on optimal values that are estimated before training; nearest: dro",
        "ppo_clip": "that is dapo, with rollout log-probs as old ones in verl; nearest: dapo with rl_config.old_log_probs "
        "rollout",
        "reinforce": "the plain policy gradient; nearest: gpg",
    },
    "adv_estimator": {
        "a2po": "A*-PO (2505.20686) estimates optimal values with the reference before training; nearest: rloo",
        "tpo": "triple preference optimization (2405.16681) trains on preference data; nearest: stage cpo, which is the same "
        "where the best response is the gold one",
        "rlsd": "self-distillation weighs tokens by a teacher; nearest: rl_config.distillation with teacher_models: [actor]",
    },
    "dpo_loss_type": {
        "exo_pair": "EXO (2402.00856) fits the smoothed preference by a reverse KL; nearest: sigmoid with dpo_label_smoothing",
        "nca_pair": "NCA (2402.05369) also keeps the chosen log-prob up; nearest: sigmoid with pref_ftx",
        "robust": "robust DPO (2403.00409) makes the smoothed loss unbiased; nearest: sigmoid with dpo_label_smoothing",
        "bco_pair": "BCO (2404.04656) is a classifier with a moving average of rewards; nearest: stage kto",
        "sppo_hard": "SPPO (2405.00675) regresses each log-ratio on half a win; nearest: ipo",
        "aot": "AOT (2406.05882) compares sorted margins of a batch; nearest: sigmoid",
        "aot_unpaired": "AOT (2406.05882) compares sorted rewards of a batch; nearest: stage kto",
        "apo_zero": "APO (2408.06266) lifts the chosen response, lowers the other; nearest: kto_loss_type apo_zero_unpaired",
        "apo_down": "APO (2408.06266) lowers both responses, the rejected one more; nearest: sigmoid",
        "discopop": "DiscoPOP (2406.08414) blends a logistic and an exponential loss; nearest: sigmoid",
        "sft": "the log-prob of the chosen response; nearest: sigmoid with pref_ftx, which adds it, or stage sft",
        "sigmoid_norm": "log-probs divided by the length (Tulu 3, 2411.15124); nearest: stage simpo, which does so without a "
        "reference",
    },
    "stage": {
        "distillation": "no stage of its own; nearest: rl_config.distillation, or stage sft with sft_loss_type forward_kl",
        "server_distillation": "teachers are servers; nearest: rl_config.distillation with addresses in teacher_models",
        "async_distillation": "nearest: rl_config.distillation with trainer_mode async",
        "gkd": "no stage of its own; nearest: rl_config.distillation with loss_mode jsd_topk and on_policy_fraction (lmbda)",
        "gold": "distillation between tokenizers; nearest: rl_config.distillation, with a teacher of the same tokenizer",
        "iw_opd": "distillation with importance weights; nearest: rl_config.distillation with rollout_importance_sampling_mode",
        "sdft": "self-distillation from a prompt with an example; nearest: rl_config.distillation with teacher_models: [actor]",
        "sdpo": "self-distillation from feedback; nearest: rl_config.distillation with teacher_models: [actor]",
        "async_grpo": "nearest: stage ray_grpo with rl_config.trainer_mode async",
        "a2po": "A*-PO (2505.20686) estimates optimal values before training; nearest: stage ray_grpo with adv_estimator rloo",
        "tpo": "triple preference optimization (2405.16681); nearest: stage cpo, the same where the best response is gold",
        "bema_for_ref_model": "a reference that follows the actor; nearest: rl_config.sync_ref_model in reinforcement learning",
    },
    "optimizer": {
        "dist_muon": "Muon with a state that is split over data-parallel ranks; nearest: muon",
        "sgd": "gradient descent without moments; nearest: adam",
    },
}
