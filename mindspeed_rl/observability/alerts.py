"""Find anomalies in the metrics and completions of a run."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mindspeed_rl.observability.completions import CompletionRecord
from mindspeed_rl.observability.history import History, Series

#: iterations that count as the present
_RECENT = 10

#: metrics of the total reward, by stage
_REWARDS = ("grpo/score/mean", "dapo/score/mean", "critic/score/mean")


@dataclass(frozen=True)
class Alert:
    """A warning.

    Attributes:
        kind: one word for programs.
        severity: "bad" when further training is lost time, "watch" otherwise.
        iteration: the anomaly's, or the last one of several.
        text: a sentence with the figures.
        advice: the first things to check.
    """

    kind: str
    severity: Literal["bad", "watch"]
    iteration: int
    text: str
    advice: str


def find_alerts(history: History, completions: Sequence[CompletionRecord] = ()) -> list[Alert]:
    """Return all warnings, bad ones first.

    Args:
        history: metrics of the iterations.
        completions: of completions.jsonl.
    """
    alerts = [alert for check in _CHECKS for alert in check(history)]
    alerts += _check_texts(completions)
    return sorted(alerts, key=lambda alert: (alert.severity != "bad", alert.iteration))


def _is_repetitive(text: str) -> bool:
    """Return True for a text of 200 bytes or more that repeats itself: deflate leaves a tenth of it."""
    data = text.encode("utf-8", "replace")
    return len(data) >= 200 and len(zlib.compress(data, 6)) < 0.1 * len(data)


def _is_garbled(text: str) -> bool:
    """Return True when more than 2 % of the characters are no text: a broken byte, a control character, unassigned."""
    # a single odd character of a short text would be more than 2 %
    if len(text) < 20:
        return False
    odd = sum(1 for char in text if char == "\ufffd" or (not char.isprintable() and not char.isspace()))
    return odd > len(text) / 50


def _check_reward(history: History) -> Iterator[Alert]:
    series = history.finite(*_REWARDS)
    iterations, values = series.x, series.y
    if len(values) < 30:
        return
    quarter = len(values) // 4
    first, last = values[:quarter], values[-quarter:]
    before, after = statistics.fmean(first), statistics.fmean(last)
    error = math.sqrt(statistics.variance(first) / quarter + statistics.variance(last) / quarter)
    # a difference within two standard errors may be chance
    if abs(after - before) <= 2 * error or after == before:
        yield Alert(
            "reward_flat",
            "watch",
            iterations[-1],
            f"The reward has not moved: {before:.4g} in the first {quarter} iterations, {after:.4g} in the last {quarter}.",
            "Are there right and wrong answers to the same prompt (groups without spread)? Is the learning rate high enough?",
        )


def _check_spread(history: History) -> Iterator[Alert]:
    series = history.finite("rewards/groups_without_spread", "reward/zero_std_groups")
    iterations, values = series.x, series.y
    # three iterations in sequence: one batch of prompts that are too easy is no anomaly
    if len(values) >= 3 and min(values[-3:]) >= 0.9:
        yield Alert(
            "no_spread",
            "bad",
            iterations[-1],
            f"In {values[-1]:.0%} of the groups all answers score the same, so they give no gradient.",
            "Prompts are too hard or too easy for the model, or the reward does not distinguish answers.",
        )


def _check_lengths(history: History) -> Iterator[Alert]:
    series = history.finite("response_length/mean")
    iterations, lengths = series.x, series.y
    series = history.finite("rollout/truncated_fraction")
    cut_at, cut = series.x, series.y
    if len(lengths) >= 2 * _RECENT:
        before, now = statistics.median(lengths[:_RECENT]), statistics.median(lengths[-_RECENT:])
        if before > 0 and now >= 3 * before:
            yield Alert(
                "length_explosion",
                "watch",
                iterations[-1],
                f"Responses grew from {before:.0f} to {now:.0f} tokens.",
                "Does the reward pay for length? Read some of the long ones.",
            )
    if len(cut) >= 3 and min(cut[-3:]) >= 0.5:
        yield Alert(
            "truncated",
            "bad",
            cut_at[-1],
            f"{cut[-1]:.0%} of the responses are cut at the limit of tokens.",
            "Raise generate_config.sampling_config.max_tokens, or teach the model to end (has its template an end token?).",
        )


def _check_mismatch(history: History) -> Iterator[Alert]:
    series = history.finite("rollout/log_probs_diff_mean")
    iterations, values = series.x, series.y
    # a median of fewer values is not reliable
    for index in range(min(5, len(values)), len(values)):
        median = statistics.median(values[max(0, index - 20) : index])
        if values[index] > 0.01 and values[index] > 5 * median:
            yield Alert(
                "mismatch",
                "bad",
                iterations[index],
                f"Trainer and rollout differ suddenly: log-probs differ by {values[index]:.3g}, {median:.3g} before.",
                "A weight sync failed, or the engine samples from other weights.",
            )
            return


def _check_entropy(history: History) -> Iterator[Alert]:
    series = history.finite("actor/entropy")
    iterations, values = series.x, series.y
    if len(values) >= 2 * _RECENT:
        before, now = statistics.median(values[:_RECENT]), statistics.median(values[-_RECENT:])
        if before > 0 and now < 0.1 * before:
            yield Alert(
                "entropy_collapse",
                "watch",
                iterations[-1],
                f"The policy repeats itself: entropy fell from {before:.3g} to {now:.3g}.",
                "Clip higher above than below (clip_higher_enable), weigh entropy (entropy_coeff), or stop: it may be done.",
            )


def _check_reward_failures(history: History) -> Iterator[Alert]:
    series = history.finite("rewards/failure_rate")
    iterations, values = series.x, series.y
    recent = values[-_RECENT:]
    if recent and statistics.fmean(recent) > 0.05:
        yield Alert(
            "rewards_failing",
            "bad",
            iterations[-1],
            f"{statistics.fmean(recent):.0%} of the responses could not be scored in the last {len(recent)} iterations.",
            "See rewards/timeout_count, crashed_count and memory_count; run.log has the first error of each function.",
        )


def _check_finite(history: History) -> Iterator[Alert]:
    for name in ("actor/pg_loss", "actor/grad_norm", "train/loss", "train/grad_norm", "critic/vf_loss"):
        series = history.series.get(name, Series())
        first = next((x for x, y in zip(series.x, series.y) if not math.isfinite(y)), None)
        if first is not None:
            yield Alert(
                "not_finite",
                "bad",
                first,
                f"{name} is not a finite number.",
                "Lower the learning rate, check actor/log_ratio_clamped, or train in float32 to find the cause.",
            )


def _check_clipping(history: History) -> Iterator[Alert]:
    series = history.finite("actor/pg_clipfrac")
    iterations, values = series.x, series.y
    recent = values[-_RECENT:]
    if len(recent) == _RECENT and min(recent) > 0.3:
        yield Alert(
            "clipped",
            "watch",
            iterations[-1],
            f"{statistics.fmean(recent):.0%} of the tokens are clipped and give no gradient.",
            "Fewer optimizer steps on a batch (epochs, mini_batch_size), or a smaller learning rate.",
        )


_CHECKS: tuple[Callable[[History], Iterator[Alert]], ...] = (
    _check_finite,
    _check_mismatch,
    _check_spread,
    _check_reward_failures,
    _check_lengths,
    _check_entropy,
    _check_reward,
    _check_clipping,
)


def _check_texts(completions: Sequence[CompletionRecord]) -> Iterator[Alert]:
    if not completions:
        return
    last = max(completion["iteration"] for completion in completions)
    recent = [completion for completion in completions if completion["iteration"] == last]
    checks: tuple[tuple[str, Callable[[str], bool], str], ...] = (
        ("garbled", _is_garbled, "contain characters that are no text"),
        ("repeating", _is_repetitive, "repeat themselves"),
    )
    for kind, check, problem in checks:
        count = sum(check(completion["response"]) for completion in recent)
        if count >= max(1, len(recent) // 10):
            yield Alert(
                kind,
                "bad" if count > len(recent) / 2 else "watch",
                last,
                f"{count} of {len(recent)} written responses of iteration {last} {problem}.",
                "Read them under Samples; after a weight sync that failed fluent text turns into this.",
            )
