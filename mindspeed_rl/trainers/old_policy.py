"""The old policy of an update, to which the ratio of the loss compares: whose log-probs it has, and how they are checked."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from mindspeed_rl.config.keys.megatron import DROPOUT_KEYS
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.run import Run

_LOG = logging.getLogger(__name__)
#: metrics of the difference in the update
_DIFFERENCE = "rollout/log_probs_diff"
#: metrics of the difference of recorded log-probs from computed ones, before the update
RECORDED_DIFFERENCE = "rollout/old_log_probs_diff"


class DisagreementError(RuntimeError):
    """Trainer and rollout engine disagree about the log-probs of the same tokens."""


#: mean difference of log-probs that `log_probs_diff_limit: auto` accepts, by format. Rounding gives 3e-7 in float32 (the toy of
#: `new`) and 0.05 in bfloat16 (SmolLM2-135M), both on the CPU.
_MEAN_DIFFERENCE = {"float32": 0.05, "bfloat16": 0.5}
#: times that `log_probs_diff_limit` is larger where the engine has quantized matrices: a product of normal numbers is wrong by
#: 1.1 % in int8, 4.1 % in mxfp8, 9.6 % in w4a8 (on NPUs 12.6 % in experts, and 1.1 % elsewhere), and by 0.28 % in bfloat16
_QUANTIZED_DIFFERENCE = {"int8": 4.0, "mxfp8": 8.0, "w4a8": 16.0}
#: mean that `auto` never exceeds: other weights differ by more
_LARGEST_MEAN = 2.0


@dataclass(frozen=True)
class Agreement:
    """How far trainer and rollout engine may differ about the log-probs of the same tokens.

    Attributes:
        statistic: "mean" or "max" of the differences, which is compared with the limit.
        source: where the limit comes from, in words.
        covers_update: the log-probs of an update are compared too; not with dropout, which the rollout engine does not have.
    """

    statistic: str
    limit: float
    source: str
    covers_update: bool = True

    @classmethod
    def choose(cls, run: Run) -> Agreement | None:
        """Return the limit of a run; None where it has none."""
        limit, exact = run.rl.log_probs_diff_limit, not run.config.actor_config.bf16 and run.generate.dtype == "float32"
        if limit is None:
            return None
        quantization = run.generate.quantization
        factor = 1.0 if quantization is None else _QUANTIZED_DIFFERENCE[quantization]
        if limit == "auto":
            kind = "float32" if exact else "bfloat16"
            allowed = min(factor * _MEAN_DIFFERENCE[kind], _LARGEST_MEAN)
            source = f"the {allowed:g} that log_probs_diff_limit auto allows in {kind}"
            return cls("mean", allowed, source, covers_update=not _drops_out(run))
        scaled = "" if factor == 1.0 else f" ({factor:g} times the key: the engine is in {quantization})"
        return cls("max", factor * limit, f"log_probs_diff_limit {factor * limit:g}{scaled}")

    def find_excess(self, results: Mapping[str, float], prefix: str = _DIFFERENCE) -> str | None:
        """Return a sentence where the metrics of this prefix are above the limit; None where they are not, or are missing."""
        difference = results.get(f"{prefix}_{self.statistic}")
        if difference is None or difference <= self.limit:
            return None
        amount = f"{difference:.3g} in the mean" if self.statistic == "mean" else f"{difference:.3g}"
        return f"log-probs of trainer and rollout engine differ by {amount}, more than {self.source}"

    def check(self, iteration: int, results: Mapping[str, float]) -> None:
        """Raise DisagreementError where the results of an iteration's update differ by more."""
        excess = self.find_excess(results) if self.covers_update else None
        if excess is not None:
            raise DisagreementError(f"iteration {iteration + 1}: {excess}: other weights, or another precision.")


def _drops_out(run: Run) -> bool:
    """Return whether the updates have dropout."""
    return run.rl.dropout_in_update and any(getattr(run.config.actor_config, name) for name in DROPOUT_KEYS)


class OldPolicy:
    """Log-probs of the policy that the update starts from: a pass of the trainer, or what the rollout engine recorded.

    Attributes:
        was_computed: the trainer's take the place of recorded ones, in this iteration.
        metrics: metrics of this iteration's comparison.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        recorded: bool,
        checked_rows: int = 0,
        agreement: Agreement | None = None,
        fallback: str = "stop",
    ) -> None:
        """Compare nothing yet.

        Args:
            num_rows: rows that train in an iteration.
            recorded: the log-probs are the rollout engine's.
            checked_rows: rows, the first ones, whose recorded log-probs are compared with the trainer's.
            agreement: how far they may differ; None: by any amount.
            fallback: `old_log_probs_fallback`.
        """
        self._num_rows, self._checked_rows, self._recorded = num_rows, checked_rows, recorded
        self._agreement, self._fallback = agreement, fallback
        self.was_computed, self.metrics = False, Metrics()

    @classmethod
    def choose(cls, run: Run) -> OldPolicy:
        """Return the one of a run."""
        plan, objective = run.plan, run.objective
        assert objective is not None
        if not objective.reads_rollout_policy:
            return cls(plan.num_train_samples, recorded=False)
        # all replicas compute the same number of rows, or one and none
        replicas = min(plan.dp_size, plan.num_train_samples)
        per_replica = math.ceil(plan.num_train_samples // replicas * objective.old_log_probs_check_fraction)
        return cls(
            plan.num_train_samples,
            recorded=True,
            checked_rows=per_replica * replicas,
            agreement=Agreement.choose(run),
            fallback=run.rl.old_log_probs_fallback,
        )

    @property
    def column(self) -> str:
        """Column of the data plane with them, in this iteration."""
        return "rollout_log_probs" if self._recorded and not self.was_computed else "old_log_probs"

    def passes(self, iteration: int, *, needs_all: bool, compare: Callable[[int], tuple[Metrics, bool]]) -> Iterator[range]:
        """Yield the rows of each pass of the trainer that this iteration needs.

        Args:
            needs_all: the pass over all rows is made in any case.
            compare: returns, once the pass over so many rows was made, RECORDED_DIFFERENCE and `_max`, and whether the tokens
                are of the weights that train; older ones also differ by what was learnt since, which stops no run.

        Raises:
            DisagreementError: the recorded log-probs differ by more than `log_probs_diff_limit`, and the run is to stop.
        """
        self.was_computed, self.metrics = False, Metrics()
        count = self._num_rows if needs_all else self._checked_rows
        if count:
            yield range(count)
        if not self._checked_rows:
            return
        self.metrics, is_current = compare(count)
        excess = None if self._agreement is None else self._agreement.find_excess(self.metrics.results(), RECORDED_DIFFERENCE)
        if excess is not None:
            cause = "other weights, or another precision" if is_current else "tokens of older weights"
            text = f"iteration {iteration + 1}: {excess}: {cause}"
            if self._fallback == "stop" and is_current:
                raise DisagreementError(f"{text} (rl_config.old_log_probs_fallback stop).")
            if self._fallback == "trainer":
                if count < self._num_rows:
                    yield range(count, self._num_rows)
                self.was_computed = True
            follows = "the trainer's are taken" if self.was_computed else "the recorded ones are taken all the same"
            _LOG.warning("warning: %s; %s (rl_config.old_log_probs_fallback).", text, follows)
        if self._fallback == "trainer":
            self.metrics.add_last("rollout/old_log_probs_computed", float(self.was_computed))
