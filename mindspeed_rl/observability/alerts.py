"""What the figures of a run warn of by themselves."""

from __future__ import annotations

import math
import statistics
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mindspeed_rl.observability.history import History, Series

#: iterations looked at for "now"
RECENT = 10

#: metrics that hold the total reward, by stage
_REWARDS = ("grpo/score/mean", "dapo/score/mean", "critic/score/mean")


@dataclass(frozen=True)
class Alert:
    """A warning.

    Attributes:
        kind: one word for programs.
        severity: "bad" when what follows is lost time, "watch" otherwise.
        iteration: where it shows; the last one where it is about a stretch.
        text: a sentence with the figures.
        advice: what people look at first.
    """

    kind: str
    severity: Literal["bad", "watch"]
    iteration: int
    text: str
    advice: str


def find_alerts(history: History, completions: Sequence[Mapping[str, Any]] = ()) -> list[Alert]:
    """All warnings, bad ones first.

    Args:
        history: what the iterations measured.
        completions: of completions.jsonl.
    """
    found = [sign for look in _LOOKS for sign in look(history)]
    found += _text_signs(completions)
    return sorted(found, key=lambda sign: (sign.severity != "bad", sign.iteration))


def is_repetitive(text: str) -> bool:
    """True for a text of 200 characters or more that says the same again and again (deflate leaves a tenth of it)."""
    data = text.encode("utf-8", "replace")
    return len(data) >= 200 and len(zlib.compress(data, 6)) < 0.1 * len(data)


def is_garbled(text: str) -> bool:
    """True when more than one character in fifty is no text: a broken byte, a control character, unassigned."""
    # a single odd character would be more than one in fifty
    if len(text) < 20:
        return False
    odd = sum(1 for char in text if char == "\ufffd" or (not char.isprintable() and not char.isspace()))
    return odd > len(text) / 50


def _series(history: History, *names: str) -> tuple[array[int], array[float]]:
    """Iterations and values of the first of these metrics that the run has."""
    found = history.finite(*names)
    return found.x, found.y


def _flat_reward(history: History) -> Iterator[Alert]:
    iterations, values = _series(history, *_REWARDS)
    if len(values) < 30:
        return
    quarter = len(values) // 4
    first, last = values[:quarter], values[-quarter:]
    before, after = statistics.fmean(first), statistics.fmean(last)
    error = math.sqrt(statistics.variance(first) / quarter + statistics.variance(last) / quarter)
    # within two standard errors the difference may be chance
    if abs(after - before) <= 2 * error or after == before:
        yield Alert(
            "reward_flat",
            "watch",
            iterations[-1],
            f"The reward has not moved: {before:.4g} in the first {quarter} iterations, {after:.4g} in the last {quarter}.",
            "Are there right and wrong answers to the same prompt (groups without spread)? Is the learning rate high enough?",
        )


def _no_spread(history: History) -> Iterator[Alert]:
    iterations, values = _series(history, "rewards/groups_without_spread", "reward/zero_std_groups")
    # three in a row: one batch of prompts that are too easy is no sign
    if len(values) >= 3 and min(values[-3:]) >= 0.9:
        yield Alert(
            "no_spread",
            "bad",
            iterations[-1],
            f"In {values[-1]:.0%} of the groups all answers score the same, so they teach nothing.",
            "Prompts are too hard or too easy for the model, or the reward never tells answers apart.",
        )


def _length_explosion(history: History) -> Iterator[Alert]:
    iterations, lengths = _series(history, "response_length/mean")
    cut_at, cut = _series(history, "rollout/truncated_fraction")
    if len(lengths) >= 2 * RECENT:
        before, now = statistics.median(lengths[:RECENT]), statistics.median(lengths[-RECENT:])
        if before > 0 and now >= 3 * before:
            yield Alert(
                "length_explosion",
                "watch",
                iterations[-1],
                f"Responses grew from {before:.0f} to {now:.0f} tokens.",
                "Does the reward pay for length? Look at what the long ones say.",
            )
    if len(cut) >= 3 and min(cut[-3:]) >= 0.5:
        yield Alert(
            "truncated",
            "bad",
            cut_at[-1],
            f"{cut[-1]:.0%} of the responses are cut at the limit of tokens.",
            "Raise generate_config.sampling_config.max_tokens, or teach the model to end (has its template an end token?).",
        )


def _mismatch(history: History) -> Iterator[Alert]:
    iterations, values = _series(history, "rollout/log_probs_diff_mean")
    # a median of fewer values says little of what is usual
    for index in range(min(5, len(values)), len(values)):
        usual = statistics.median(values[max(0, index - 20) : index])
        if values[index] > 0.01 and values[index] > 5 * usual:
            yield Alert(
                "mismatch",
                "bad",
                iterations[index],
                f"Trainer and rollout disagree all at once: log-probs differ by {values[index]:.3g}, {usual:.3g} before.",
                "A weight push went wrong, or the engine answers from other weights.",
            )
            return


def _entropy_collapse(history: History) -> Iterator[Alert]:
    iterations, values = _series(history, "actor/entropy")
    if len(values) >= 2 * RECENT:
        before, now = statistics.median(values[:RECENT]), statistics.median(values[-RECENT:])
        if before > 0 and now < 0.1 * before:
            yield Alert(
                "entropy_collapse",
                "watch",
                iterations[-1],
                f"The policy says the same thing every time: entropy fell from {before:.3g} to {now:.3g}.",
                "Clip higher above than below (clip_higher_enable), weigh entropy (entropy_coeff), or stop: it may be done.",
            )


def _failing_rewards(history: History) -> Iterator[Alert]:
    iterations, values = _series(history, "rewards/failure_rate")
    recent = values[-RECENT:]
    if recent and statistics.fmean(recent) > 0.05:
        yield Alert(
            "rewards_failing",
            "bad",
            iterations[-1],
            f"{statistics.fmean(recent):.0%} of the responses could not be scored in the last {len(recent)} iterations.",
            "rewards/timeout_count, crashed_count and memory_count say how; run.log has the first error of each function.",
        )


def _not_finite(history: History) -> Iterator[Alert]:
    for name in ("actor/pg_loss", "actor/grad_norm", "train/loss", "train/grad_norm", "critic/vf_loss"):
        series = history.series.get(name, Series())
        first = next((x for x, y in zip(series.x, series.y) if not math.isfinite(y)), None)
        if first is not None:
            yield Alert(
                "not_finite",
                "bad",
                first,
                f"{name} is not a finite number.",
                "Lower the learning rate, look at actor/log_ratio_clamped, or train in float32 to find the cause.",
            )


def _much_clipped(history: History) -> Iterator[Alert]:
    iterations, values = _series(history, "actor/pg_clipfrac")
    recent = values[-RECENT:]
    if len(recent) == RECENT and min(recent) > 0.3:
        yield Alert(
            "clipped",
            "watch",
            iterations[-1],
            f"{statistics.fmean(recent):.0%} of the tokens are clipped and give no gradient.",
            "Fewer optimizer steps on a batch (epochs, mini_batch_size), or a smaller learning rate.",
        )


_LOOKS: tuple[Callable[[History], Iterator[Alert]], ...] = (
    _not_finite,
    _mismatch,
    _no_spread,
    _failing_rewards,
    _length_explosion,
    _entropy_collapse,
    _flat_reward,
    _much_clipped,
)


def _text_signs(completions: Sequence[Mapping[str, Any]]) -> Iterator[Alert]:
    if not completions:
        return
    last = max(completion["iteration"] for completion in completions)
    now = [completion for completion in completions if completion["iteration"] == last]
    checks: tuple[tuple[str, Callable[[str], bool], str], ...] = (
        ("is_garbled", is_garbled, "hold characters that are no text"),
        ("repeating", is_repetitive, "say the same again and again"),
    )
    for kind, check, what in checks:
        count = sum(check(completion["response"]) for completion in now)
        if count >= max(1, len(now) // 10):
            yield Alert(
                kind,
                "bad" if count > len(now) / 2 else "watch",
                last,
                f"{count} of {len(now)} written responses of iteration {last} {what}.",
                "Look at them under Samples; after a weight push that went wrong fluent text turns into this.",
            )
