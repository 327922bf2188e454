"""What goes into a reward function, what comes out, and the settings that both sides share. No dependency but the standard library."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ok", "skipped", "failed", "timeout", "crashed", "memory"]
FAILURES: tuple[State, ...] = ("failed", "timeout", "crashed", "memory")


@dataclass
class RewardSample:
    """One response to score.

    Attributes:
        prompt: text of the prompt.
        response: text of the response, special tokens removed.
        prompt_ids: token ids of the prompt, without padding.
        response_ids: token ids of the response, without padding; lengths are counted on them.
        label: the expected answer as the dataset gives it.
        columns: every additional dataset column of this row.
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
    """What became of one sample.

    Attributes:
        total: weighted sum of the parts plus `penalty`; None if there is no score (failed and not to be zero, or skipped).
        parts: raw unweighted scores; a function that returned a dict has one entry `name/key` for each key besides its `name`.
        state: "ok"; "skipped" (no function had an opinion, leave it to the reward model); else why it failed:
            "failed" (exception or not a number), "timeout", "crashed" (signal or exit), "memory".
        error: the first failure in words, "" if none.
        penalty: length penalty of `overlong_buffer_*`; in `total` but in no metric, so group filters see the raw score.
    """

    total: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    state: State = "ok"
    error: str = ""
    penalty: float = 0.0

    @property
    def failed(self) -> bool:
        return self.state in FAILURES


@dataclass(frozen=True)
class RewardSettings:
    """The keys of `rl_config` that rewards read, under the same names (so that one comprehension copies them).

    Attributes:
        verifier_timeout: seconds one call of one scorer may take for one sample (for one batch, if it scores batches).
        num_reward_workers: worker processes.
        reward_memory_gib: memory one worker, with everything it starts, may take on top of what it holds when idle.
        reward_failure_policy: what a failed sample becomes: "drop" total None; "retry" once more in a fresh worker, then None;
            "zero" total 0.0.
        reward_failure_limit: share of failed samples (of the last 1024) above which collecting raises; 1.0 never does.
        external_plugins: Python files run in every worker; they register names.
    """

    verifier_timeout: float = 30.0
    num_reward_workers: int = 2
    reward_memory_gib: float = 4.0
    reward_failure_policy: Literal["drop", "retry", "zero"] = "drop"
    reward_failure_limit: float = 0.2
    external_plugins: tuple[str, ...] = ()
    max_completion_length: int = 0
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

    def __post_init__(self) -> None:
        if not self.verifier_timeout > 0:
            raise ValueError(f"verifier_timeout is {self.verifier_timeout}; it must be a positive number of seconds")
        if self.num_reward_workers < 1:
            raise ValueError(f"num_reward_workers is {self.num_reward_workers}; at least one worker process is needed")
        if not self.reward_memory_gib > 0:
            raise ValueError(f"reward_memory_gib is {self.reward_memory_gib}; it must be a positive number of GiB")
        if self.reward_failure_policy not in ("drop", "retry", "zero"):
            raise ValueError(f"reward_failure_policy is '{self.reward_failure_policy}'; it must be drop, retry or zero")
        if not 0 <= self.reward_failure_limit <= 1:
            raise ValueError(f"reward_failure_limit is {self.reward_failure_limit}; it is a share between 0 and 1")
        if self.overlong_buffer_enable and self.overlong_buffer <= 0:
            raise ValueError(
                f"overlong_buffer is {self.overlong_buffer}; with overlong_buffer_enable it must be positive (tokens)"
            )
