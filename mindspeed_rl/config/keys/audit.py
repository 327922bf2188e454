"""The group `audit`: a second, stricter check beside the reward, and the diversity of responses."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.catalogue.records import Bounds
from mindspeed_rl.config.keys.schema import Range, key

# fmt: off


@dataclass(frozen=True, kw_only=True)
class AuditKeys:
    """A check that the policy is not trained on: where the reward rises and the check does not, the reward is tricked."""

    verifier_function: list[str] = key([],
        "stricter reward functions, which no update reads; they score responses to held-out prompts beside the run's reward",
        "更严格的奖励函数，不参与任何更新；与运行的奖励一起给留出 prompt 的回答打分", on_resume="exact")
    verifier_weight: list[float] = key([], "weights of these functions; 1 each when omitted", "这些函数的权重；不写时均为 1",
        range=Range.WEIGHT, on_resume="exact")
    judge_url: str | None = key(None, "OpenAI-compatible address of a second judge, one of the stricter functions",
        "第二个评判的 OpenAI 兼容地址，作为更严格的函数之一", on_resume="exact")
    judge_model: str | None = key(None, "second judge: name of its model", "第二个评判：模型名", needs=("judge_url", "set"),
        on_resume="exact")
    judge_prompt: str | None = key(None, "second judge: file with its prompt", "第二个评判：prompt 文件",
        needs=("judge_url", "set"), on_resume="exact")
    judge_parser: str | None = key(None, "second judge: module:function that turns its reply into a score",
        "第二个评判：把回复变成得分的 module:function", needs=("judge_url", "set"), on_resume="exact")
    environment: str | None = key(None,
        "environment that plays the responses again, one of the stricter functions: module:Class, or a YAML file with it",
        "重新评判回答的环境，作为更严格的函数之一：module:Class 或包含它的 YAML 文件", on_resume="exact")
    full_score: float | None = key(None,
        "largest total reward of a response, of which audit/earned is the share; when unset the sum of the positive weights of "
        "functions, judge and environment, each of which gives at most 1; needed with a reward model",
        "一个回答的最大总奖励，audit/earned 是它的占比；不设时为函数、评判与环境的正权重之和（各自最高为 1）；"
        "有奖励模型时必须设置",
        range=Range.POSITIVE, on_resume="exact")
    data_path: str | None = key(None, "held-out prompts of the check; when unset the prompts of the evaluation",
        "检查所用的留出 prompt；不设时为评测的 prompt", on_resume="exact")
    num_prompts: int = key(64, "prompts of one check, sampled as in training", "一次检查的 prompt 数，按训练时的方式采样",
        range=Range.ROWS, on_resume="exact")
    interval: int = key(10, "iterations between checks; the first is before the first iteration",
        "两次检查之间的迭代数；第一次在首次迭代之前", range=Range.ITERATIONS, on_resume="exact")
    samples: int = key(8, "responses of a check in audit.jsonl, those that the reward overpays most first",
        "一次检查写入 audit.jsonl 的回答数，奖励高出最多的在前", range=Bounds(0, 10**6), on_resume="exact")
    diversity_responses: int = key(256,
        "responses of a rollout whose sentences are counted for diversity/..., in whole groups; 0: none",
        "每次 rollout 用于统计 diversity/... 的回答数，按整组取；0：不统计", range=Bounds(0, 10**7), on_resume="exact")
    # fmt: on

    @property
    def has_check(self) -> bool:
        """True where a stricter check is configured."""
        return bool(self.verifier_function or self.judge_url or self.environment)
