"""Find anomalies in the metrics and completions of a run."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mindspeed_rl.observability.completions import CompletionRecord
from mindspeed_rl.observability.diversity import ONE_PATTERN
from mindspeed_rl.observability.history import History, Series
from mindspeed_rl.observability.observer import RunObserver

#: iterations that count as the present, and iterations after which a reward of 0 is not bad luck
_RECENT, _FEW = 10, 5
#: KL divergence to the reference, in nats a token, beyond which a policy is another model
_FAR_NATS = 1.0
#: worth an alert: gap between reward and audit, in fractions of their full scores; rise of the share of one pattern
_GAP, _PATTERN_RISE = 0.1, 0.3

#: mean difference of log-probs, and its ratio to the first tokens', beyond which a depth or class of tokens is wrong
_DEPTH_BOUND, _DEPTH_RATIO = 0.02, 4.0
#: iterations whose memory is not compared, and measured ones from which growth is one; GiB that are growth
_WARM_UP, _LEAK_POINTS, _LEAK_GIB = 2, 8, 0.25
#: owner of memory that does not come back -> what to check first
_LEAK_ADVICE = {
    "driver": "Objects of the driver's program grow: rewards, callbacks or rows that are kept (run.log, heap of the process).",
    "engine": "The rollout engine keeps memory over sleep and wake-up: sleep_mode_extra_cleanup, or another release of it.",
    "communicator": "Memory that no allocator counts grows: communicators, the device's runtime; see hccl_buffersize.",
    "cache": "The allocator's cache grows, which fragments: lengths of micro-batches that vary (max_packing_token_size).",
    "tensors": "Tensors without an owner stay on the device between phases: a hook or loss of yours that keeps them.",
}

#: metrics of the total reward, by stage
REWARDS = ("grpo/score/mean", "dapo/score/mean", "critic/score/mean")


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
        completions: rows of completions.jsonl.
    """
    alerts = [alert for check in _CHECKS for alert in check(history)]
    explained = {kind for alert in alerts for kind in _EXPLAINS.get(alert.kind, ())}
    alerts = [alert for alert in alerts if alert.kind not in explained] + [*_check_texts(completions)]
    return sorted(alerts, key=lambda alert: (alert.severity != "bad", alert.iteration))


def _is_repetitive(text: str) -> bool:
    """Return True for a text of 200 bytes or more that repeats itself: deflate leaves a tenth of it."""
    data = text.encode("utf-8", "replace")
    return len(data) >= 200 and len(zlib.compress(data, 6)) < 0.1 * len(data)


def _is_garbled(text: str) -> bool:
    """Return True when more than 2 % of the characters are not text: a broken byte, a control character, unassigned."""
    # a single odd character of a short text would be more than 2 %
    if len(text) < 20:
        return False
    odd = sum(1 for char in text if char == "\ufffd" or (not char.isprintable() and not char.isspace()))
    return odd > len(text) / 50


def _name_learning_rate(history: History) -> str:
    """Return the key of the learning rate with the largest value so far."""
    key = "megatron_training.lr" if "train/lr" in history.series else "actor_config.lr"
    values = history.finite("train/lr", "actor/lr").y
    return f"{key} ({max(values):.3g} here)" if values else key


def _is_solved(history: History) -> bool:
    """Return True where the reward of the last iterations is nearly the highest that any response has got."""
    means, highest = history.finite(*REWARDS).y[-_RECENT:], history.finite(*(f"{name[:-4]}max" for name in REWARDS)).y
    return bool(means) and bool(highest) and max(highest) > 0 and statistics.fmean(means) >= 0.9 * max(highest)


def _check_collapse(history: History) -> Iterator[Alert]:
    held_out = history.finite("eval/accuracy", "eval/reward")
    iterations, values, what = held_out.x, list(held_out.y), "held-out score"
    if len(values) < 2:
        series, what = history.finite(*REWARDS), "reward"
        # medians of a window: the reward of one batch of prompts varies
        iterations = series.x[_RECENT - 1 :]
        values = [statistics.median(series.y[end - _RECENT : end]) for end in range(_RECENT, len(series.y) + 1)]
    if len(values) < 2 or (best := max(values)) < 0.05 or values[-1] > best / 2:
        return
    yield Alert(
        "collapse",
        "bad",
        iterations[-1],
        f"The {what} has fallen to {values[-1]:.3g}, from {best:.3g} at iteration {iterations[values.index(best)]}.",
        f"The learning rate is the first suspect: lower {_name_learning_rate(history)}, or keep the policy nearer to its start "
        "(raise rl_config.init_kl_coef). Go back to a checkpoint of that time; later ones are worse.",
    )


def _check_zero(history: History) -> Iterator[Alert]:
    series = history.finite(*(f"{name[:-4]}max" for name in REWARDS))
    lowest = history.finite(*(f"{name[:-4]}min" for name in REWARDS)).y
    if len(series.y) >= _FEW and max(series.y) <= 0 and min(lowest, default=0.0) >= 0:
        yield Alert(
            "reward_zero",
            "bad",
            series.x[-1],
            f"No response has got a reward above 0 in {len(series.y)} iterations, so that nothing can be learnt.",
            "Read some responses: do they have the form that rl_config.verifier_function reads, and do they end before "
            "max_tokens? If the model cannot do the task at all, warm-start it with stage sft, or begin with easier prompts.",
        )


def _check_reward(history: History) -> Iterator[Alert]:
    series = history.finite(*REWARDS)
    iterations, values = series.x, series.y
    if len(values) < 30 or _is_solved(history):
        return
    quarter = len(values) // 4
    first, last = values[:quarter], values[-quarter:]
    before, after = statistics.fmean(first), statistics.fmean(last)
    error = math.sqrt(statistics.variance(first) / quarter + statistics.variance(last) / quarter)
    lr = _name_learning_rate(history)
    if after < before - 2 * error:
        yield Alert(
            "reward_falls",
            "watch",
            iterations[-1],
            f"The reward falls: {before:.4g} in the first {quarter} iterations, {after:.4g} in the last {quarter}.",
            f"Lower {lr}, raise rl_config.init_kl_coef, or make fewer optimizer steps on a batch (rl_config.epochs).",
        )
    # a difference within two standard errors may be chance
    elif after - before <= 2 * error:
        kl, clipped = history.finite("actor/kl_loss", "actor/ppo_kl"), history.finite("actor/pg_clipfrac")
        moved = [*kl.y[-_RECENT:], *clipped.y[-_RECENT:]]
        is_still = bool(moved) and max(map(abs, moved)) < 1e-3
        yield Alert(
            "reward_flat",
            "watch",
            iterations[-1],
            f"The reward has not moved: {before:.4g} in the first {quarter} iterations, {after:.4g} in the last {quarter}.",
            f"The policy hardly moves either: raise {lr}."
            if is_still
            else "Are there right and wrong responses to the same prompt (groups without spread)? Does the reward tell them "
            "apart?",
        )


def _check_held_out_loss(history: History) -> Iterator[Alert]:
    series = history.finite("eval/loss")
    if len(series.y) >= 3 and min(series.y[-2:]) > 1.05 * min(series.y) > 0:
        best = series.x[series.y.index(min(series.y))]
        yield Alert(
            "overfitting",
            "watch",
            series.x[-1],
            f"The held-out loss has risen to {series.y[-1]:.4g}, from {min(series.y):.4g} at iteration {best}.",
            "Use a checkpoint of that time; train fewer epochs, on more rows, or with a lower learning rate.",
        )


def _check_gradients(history: History) -> Iterator[Alert]:
    series = history.finite("actor/grad_norm", "train/grad_norm")
    for index in range(max(_RECENT, len(series.y) - 3), len(series.y)):
        median = statistics.median(series.y[max(0, index - 20) : index])
        if series.y[index] > max(10 * median, 1.0):
            yield Alert(
                "gradient_spike",
                "watch",
                series.x[index],
                f"The gradient norm jumped to {series.y[index]:.3g}, from {median:.3g} before.",
                f"megatron_training.clip_grad bounds such a step. If it happens again, lower {_name_learning_rate(history)}.",
            )
            return


def _check_kl(history: History) -> Iterator[Alert]:
    series = history.finite("actor/kl_loss", "reward/kl")
    # three iterations in sequence: the estimate of a batch varies
    if len(series.y) >= 3 and min(series.y[-3:]) > _FAR_NATS:
        yield Alert(
            "kl_far",
            "watch",
            series.x[-1],
            f"The policy is far from the reference model: a KL divergence of {series.y[-1]:.3g} nats a token.",
            f"Raise rl_config.init_kl_coef, or lower {_name_learning_rate(history)}. Are the responses still text?",
        )


def _check_spread(history: History) -> Iterator[Alert]:
    series = history.finite("rewards/groups_without_spread", "reward/zero_std_groups")
    iterations, values = series.x, series.y
    # three iterations in sequence: one batch of prompts that are too easy is not an anomaly
    if len(values) >= 3 and min(values[-3:]) >= 0.9:
        is_solved = _is_solved(history)
        yield Alert(
            "no_spread",
            "watch" if is_solved else "bad",
            iterations[-1],
            f"In {values[-1]:.0%} of the groups all responses score the same, so they give no gradient.",
            "Nearly all of them are right: the task is learnt. Stop here, or choose harder prompts."
            if is_solved
            else "The prompts are too hard for the model (warm-start it with stage sft, or choose easier ones), the responses "
            "of a prompt are all alike (raise sampling_config.temperature), or the reward does not tell them apart.",
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
                "Does the reward pay for length? Read the long ones; rl_config.loss_type dr_grpo keeps wrong ones short.",
            )
    if len(cut) >= 3 and min(cut[-3:]) >= 0.5 and not _is_solved(history):
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


def _list_places(names: Iterable[str]) -> dict[str, str]:
    """Return the metrics of depths and classes of tokens that have a bound, each with its place in words."""
    depths = sorted(int(name.rpartition("/")[2]) for name in names if name.startswith("mismatch/depth/"))
    places = {f"mismatch/depth/{depth}": f"from token {depth} of a response on" for depth in depths if depth}
    return places | {
        "mismatch/first_token": "at the first token of a response",
        "mismatch/after_tool": "at the first token after a tool",
    }


def find_mismatches(results: Mapping[str, float]) -> Iterator[str]:
    """Yield the metrics of depths and classes of tokens in which trainer and rollout engine differ beyond their bound."""
    near = results.get("mismatch/depth/0", math.inf)  # without it nothing can be said
    for name in _list_places(results):
        if _is_beyond(results.get(name, 0.0), near):
            yield name


def _is_beyond(difference: float, near: float) -> bool:
    """Return True where a mean difference of log-probs is beyond its bound; `near` is that of the first 16 tokens."""
    return difference > max(_DEPTH_BOUND, _DEPTH_RATIO * near)


def _check_depths(history: History) -> Iterator[Alert]:
    """Yield where trainer and rollout engine differ more than at the start of responses, three iterations in sequence."""
    start = history.finite("mismatch/depth/0")
    for name, where in _list_places(history.series).items():
        series = history.finite(name)
        known = dict(zip(start.x, start.y))
        common = [(x, y, known[x]) for x, y in zip(series.x, series.y) if x in known]
        beyond = [_is_beyond(value, near) for _, value, near in common]
        # the newest of them: the rows that are recorded are of that time
        last = next((index for index in range(len(common) - 1, 1, -1) if all(beyond[index - 2 : index + 1])), None)
        if last is not None:
            iteration, value, near = common[last]
            yield Alert(
                "mismatch_depth" if name.startswith("mismatch/depth/") else "mismatch_token",
                "bad",
                iteration,
                f"Trainer and rollout differ {where}: log-probs by {value:.3g} in the mean, {near:.3g} in the first 16 tokens.",
                "`mindspeed-rl diff train rollout --run FOLDER`, which train runs at the end, names the first module that "
                "differs: position embeddings and the cache are suspects of deep tokens, the template of tokens after a tool.",
            )
            return


def _check_memory(history: History) -> Iterator[Alert]:
    """Yield the owner whose memory at the same point of iterations grows and does not come back."""
    for name, series in history.series.items():
        if not name.startswith("residue/"):
            continue
        finite = series.finite()
        x, y = finite.x[_WARM_UP:], finite.y[_WARM_UP:]
        if len(y) < _LEAK_POINTS:
            continue
        quarter = len(y) // 4
        parts = [y[start : start + quarter] for start in range(0, 4 * quarter, quarter)]
        lowest = [min(part) for part in parts]
        # each quarter begins above the one before, and the growth does not fade
        grows = all(after > before for before, after in zip(lowest, lowest[1:]))
        grown, each = y[-1] - y[0], (y[-1] - y[0]) / (x[-1] - x[0])
        if not grows or grown < _LEAK_GIB or lowest[3] - lowest[2] < (lowest[1] - lowest[0]) / 4:
            continue
        point, owner = name.removeprefix("residue/").removesuffix("_gib").split("/", 1)
        yield Alert(
            "memory_leak",
            "watch",
            x[-1],
            f"Memory does not come back ({owner}, after {point.replace('_', ' ')}): {grown:.2f} GiB more than at iteration "
            f"{x[0]}, {each * 1024:.0f} MiB an iteration.",
            _LEAK_ADVICE[owner],
        )


def _check_entropy(history: History) -> Iterator[Alert]:
    series = history.finite("actor/entropy")
    iterations, values = series.x, series.y
    if len(values) >= 2 * _RECENT and not _is_solved(history):
        before, now = statistics.median(values[:_RECENT]), statistics.median(values[-_RECENT:])
        if before > 0 and now < 0.1 * before:
            yield Alert(
                "entropy_collapse",
                "watch",
                iterations[-1],
                f"The policy repeats itself: entropy fell from {before:.3g} to {now:.3g}.",
                "Clip less above than below (rl_config.clip_ratio_high: 0.28), or set rl_config.entropy_coeff to 0.001.",
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


def _check_votes(history: History) -> Iterator[Alert]:
    series = history.finite("judge/missing_rewards/mean")
    recent = series.y[-_RECENT:]
    if recent and statistics.fmean(recent) > 0.05:
        yield Alert(
            "votes_missing",
            "watch",
            series.x[-1],
            f"{statistics.fmean(recent):.2g} votes of judges per response are missing in the last {len(recent)} iterations; "
            "the other votes decide (rl_config.judge_quorum).",
            "The figures judge/of_... are those of each judge; logs/reward_0.log, or run.log for a judge that the run serves, "
            "has the first error of each.",
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


def _check_audit(history: History) -> Iterator[Alert]:
    """Compare the gap between reward and stricter check with that before the first iteration, beyond three errors."""
    gap, error = history.finite("audit/gap"), history.finite("audit/gap_error")
    earned, audited = history.finite("audit/earned"), history.finite("audit/audited")
    if len(gap.y) < 2 or len({len(series.y) for series in (gap, error, earned, audited)}) > 1:
        return
    for index in range(1, len(gap.y)):
        chance = 3 * math.hypot(error.y[0], error.y[index])
        if gap.y[index] - gap.y[0] > max(_GAP, chance):
            yield Alert(
                "reward_tricked",
                "bad",
                gap.x[index],
                f"The reward and its audit part: of their full scores, the reward went from {earned.y[0]:.2f} to "
                f"{earned.y[index]:.2f}, and the stricter check from {audited.y[0]:.2f} to {audited.y[index]:.2f}.",
                "Read audit.jsonl of the run folder, which has the responses that the reward overpays most, and close the hole "
                "in rl_config.verifier_function; `mindspeed-rl audit reward` tries it with known cheats.",
            )
            return


def _check_pattern(history: History) -> Iterator[Alert]:
    series = history.finite("diversity/pattern_share")
    if len(series.y) < 3:
        return
    before, now = min(series.y[:2]), statistics.median(series.y[-3:])
    if now >= ONE_PATTERN and now - before >= _PATTERN_RISE:
        first = next(x for x, y in zip(series.x, series.y) if y >= ONE_PATTERN)
        yield Alert(
            "one_sentence",
            "watch",
            first,
            f"{now:.0%} of the responses are one sentence with words of their prompt filled in, {before:.0%} at the start.",
            "Read some: does it answer every prompt, or does the reward pay only for a form? A stricter check beside the "
            "reward (group audit of the run file) tells.",
        )


_CHECKS: tuple[Callable[[History], Iterator[Alert]], ...] = (
    _check_finite,
    _check_collapse,
    _check_zero,
    _check_mismatch,
    _check_depths,
    _check_memory,
    _check_spread,
    _check_reward_failures,
    _check_votes,
    _check_lengths,
    _check_entropy,
    _check_reward,
    _check_held_out_loss,
    _check_gradients,
    _check_kl,
    _check_clipping,
    _check_audit,
    _check_pattern,
)
#: an alert -> those that it explains, whose advice would not help or would be the opposite one
_EXPLAINS: dict[str, tuple[str, ...]] = {
    "collapse": ("reward_falls", "reward_flat", "no_spread"),
    "reward_zero": ("no_spread", "reward_flat"),
    "no_spread": ("reward_flat",),
}


def _check_texts(completions: Sequence[CompletionRecord]) -> Iterator[Alert]:
    if not completions:
        return
    last = max(completion["iteration"] for completion in completions)
    recent = [completion for completion in completions if completion["iteration"] == last]
    checks: tuple[tuple[str, Callable[[str], bool], str], ...] = (
        ("garbled", _is_garbled, "contain characters that are not text"),
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


class LiveAlerts(RunObserver):
    """Show every alert of a run while it goes, each kind once; an observer of its figures.

    Args:
        history: iterations before a resume.
        show: takes the line.
    """

    def __init__(self, history: History, show: Callable[[str], None]) -> None:
        self._history, self._show = history, show
        self._shown = set[str]()

    def on_figures(self, iteration: int, results: Mapping[str, float]) -> None:
        """Show what these figures give rise to; of a long run every few iterations, because all of it is read again."""
        self._history.add({"iteration": iteration, **results})
        if iteration % (1 + len(self._history.iterations) // 500):
            return
        for alert in find_alerts(self._history):
            if alert.kind not in self._shown:
                self._shown.add(alert.kind)
                self._show(f"warning, iteration {alert.iteration}: {alert.text} {alert.advice}")
