"""Inputs and outputs of reward functions, and the settings that all processes of the pool share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from mindspeed_rl.bounds import LARGEST_FLOAT32
from mindspeed_rl.rewards.judge_addresses import API_KEY_VARIABLE

if TYPE_CHECKING:  # worker processes import this file and need no configuration, which would take them 0.1 s
    from mindspeed_rl.config.keys.rl import RLConfig

#: largest score: scores and totals are float32 in the batch
LARGEST_SCORE = LARGEST_FLOAT32
State = Literal["ok", "skipped", "failed", "timeout", "crashed", "memory"]
FAILURES: tuple[State, ...] = ("failed", "timeout", "crashed", "memory")


@dataclass
class RewardSample:
    """One response to score.

    Attributes:
        prompt: text of the prompt.
        response: text of the response; of special tokens only the marks of thoughts.
        prompt_ids: token ids of the prompt, without padding.
        response_ids: token ids of the response, without padding; lengths are counted on them.
        label: the expected answer as the dataset gives it.
        columns: all additional dataset columns of this row.
        truncated: the response hit the length limit and has no end token.
        max_response_length: the length limit in tokens, 0 where it is unknown.
    """

    prompt: str = ""
    response: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    label: Any = ""
    columns: dict[str, Any] = field(default_factory=dict)
    truncated: bool = False
    max_response_length: int = 0


@dataclass
class RewardResult:
    """Score of one sample.

    Attributes:
        total: weighted sum of the parts plus `penalty`; None if there is no score (failed and not to be zero, or skipped).
        parts: raw unweighted scores; a function that returned a dict has one entry `name/key` for each key besides its `name`.
        state: "ok"; "skipped" (all functions returned None, the reward model scores it); else the kind of failure:
            "failed" (exception or not a number), "timeout", "crashed" (signal or exit), "memory".
        error: message of the first failure, "" if none.
        penalty: by `overlong_buffer_*` and `missing_eos_penalty`; in `total` but in no metric, so that group filters see the
            raw score.
        notes: text entries of a scorer's dict, such as missing isolation of a sandbox.
    """

    total: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    state: State = "ok"
    error: str = ""
    penalty: float = 0.0
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.state in FAILURES


@dataclass(frozen=True)
class RewardSettings:
    """Keys of `rl_config` that scorers and the pool read, under the same names, with derived values filled in.

    Attributes:
        max_tokens: generation limit in tokens.
        reward_timeout_s: limit of one call of one scorer, for one sample (for one batch, if it scores batches).
        num_reward_workers: worker processes.
        reward_memory_gib: memory that a worker and its children may use beyond an idle worker's; None: no limit.
        reward_failure_policy: a failed sample has total None ("drop"), is scored again and then has None ("retry"), or has
            total 0.0 ("zero").
        reward_failure_limit: fraction of failed samples (of the last 1024) above which scoring raises; 1.0 never raises.
        external_plugins: Python files that register names; they run in every worker.
        judge_key_variables: environment variables that may have the key of the server at `judge_url`.
    """

    max_tokens: int = 2048
    reward_timeout_s: float = 30.0
    num_reward_workers: int = 1
    reward_memory_gib: float | None = 4.0
    reward_failure_policy: Literal["drop", "retry", "zero"] = "drop"
    reward_failure_limit: float = 0.1
    external_plugins: tuple[str, ...] = ()
    environment: str | None = None
    judge_url: str | None = None
    judge_model: str | None = None
    judge_prompt: str | None = None
    judge_parser: str | None = None
    judge_rubric: str | None = None
    judge_rubric_score: Literal["weighted", "mean", "all", "any"] = "weighted"
    judge_panel: tuple[str, ...] = ()
    judge_key_variables: tuple[str, ...] = (API_KEY_VARIABLE,)
    judge_repeats: int = 1
    judge_temperature: float = 0.0
    judge_vote: Literal["mean", "median", "majority", "min"] = "mean"
    judge_quorum: int | None = None
    judge_timeout_s: float = 60.0
    judge_weight: float = 1.0
    judge_max_tokens: int = 512
    verifier_reads: str = "response"
    cosine_min_len_value_wrong: float = -0.5
    cosine_max_len_value_wrong: float = 0.0
    cosine_min_len_value_correct: float = 1.0
    cosine_max_len_value_correct: float = 0.5
    cosine_max_len: int | None = None
    repetition_n_grams: int = 3
    repetition_max_penalty: float = -1.0
    soft_max_length: int | None = None
    soft_cache_length: int | None = None
    overlong_buffer_enable: bool = False
    overlong_buffer: int = 0
    overlong_buffer_penalty_factor: float = 1.0
    rollout_max_tokens: int = 2048
    missing_eos_penalty: float = 0.0

    @classmethod
    def from_config(cls, rl: RLConfig, *, max_tokens: int) -> RewardSettings:
        """Copy the keys of `rl_config`; `max_tokens` is `generate_config.sampling_config.max_tokens`.

        Raises:
            ValueError: the value of a key is out of range.
        """
        derived = {
            "max_tokens": max_tokens,
            "reward_timeout_s": rl.reward_timeout_s if rl.reward_timeout_s is not None else float(rl.verifier_timeout),
            "num_reward_workers": rl.num_reward_workers if rl.num_reward_workers is not None else rl.verifier_parallel,
            "external_plugins": tuple(rl.external_plugins),
            "judge_panel": tuple(rl.judge_panel),
            "judge_key_variables": (API_KEY_VARIABLE,),
        }
        # by name, so that a new key needs only a field
        copied = {f.name: getattr(rl, f.name) for f in fields(cls) if f.name not in derived}
        return cls(**copied, **derived)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> RewardSettings:
        """Return the settings that were sent to a process."""
        values: dict[str, Any] = {f.name: message[f.name] for f in fields(cls)}
        # msgpack has no tuples
        values |= {name: tuple(values[name]) for name in ("external_plugins", "judge_panel", "judge_key_variables")}
        return cls(**values)

    def __post_init__(self) -> None:
        for key in ("max_tokens", "reward_timeout_s", "judge_timeout_s", "num_reward_workers", "repetition_n_grams"):
            if not getattr(self, key) > 0:
                raise ValueError(f"rl_config.{key} is {getattr(self, key)}; it must be positive")
        if self.reward_memory_gib is not None and not self.reward_memory_gib > 0:
            raise ValueError(
                f"rl_config.reward_memory_gib is {self.reward_memory_gib}; it must be a positive number of GiB, or null"
            )
        if self.reward_failure_policy not in ("drop", "retry", "zero"):
            raise ValueError(
                f"rl_config.reward_failure_policy is '{self.reward_failure_policy}'; it must be drop, retry or zero"
            )
        if not 0 <= self.reward_failure_limit <= 1:
            raise ValueError(
                f"rl_config.reward_failure_limit is {self.reward_failure_limit}; it must be a fraction between 0 and 1"
            )
        if self.overlong_buffer_enable and self.overlong_buffer <= 0:
            raise ValueError(
                f"rl_config.overlong_buffer is {self.overlong_buffer}; overlong_buffer_enable needs a positive number"
            )


def select_reward_functions(rl: RLConfig) -> tuple[list[str], list[float]]:
    """Return names and weights of the scorers that `rl_config` selects; both are empty if only a reward model scores.

    `verifier_function` and `verifier_weight` unless `rule_reward` is false, then the judge if `judge_url` is set.

    Raises:
        ValueError: not one weight for each function.
    """
    names = list(rl.verifier_function) if rl.rule_reward else []
    weights = [float(weight) for weight in rl.verifier_weight] if rl.rule_reward else []
    if len(names) != len(weights):
        raise ValueError(f"rl_config.verifier_function has {len(names)} entries but verifier_weight has {len(weights)}")
    if rl.judge_url is not None and "judge" not in names:
        names.append("judge")
        weights.append(rl.judge_weight)
    return names, weights
