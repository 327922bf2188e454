"""Calls of the ranks of a service have limits that follow what earlier calls have taken."""

from __future__ import annotations

import pytest

from mindspeed_rl.config import Deadlines
from mindspeed_rl.config.keys.deadlines import DEFAULTS
from mindspeed_rl.service.backend import CallError
from mindspeed_rl.service.call_limits import CallLimits


def limit(limits: CallLimits, method: str, num_tokens: int = 1) -> float:
    return limits.find(method, num_tokens).limit("update")


def test_the_first_call_of_a_kind_has_the_deadline_of_the_run() -> None:
    limits = CallLimits(Deadlines())
    limits.note("optim_step", 1, 0.5)
    assert limit(limits, "run_passes", 8192) == DEFAULTS["update"] and limit(limits, "optim_step") == 300


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1, 300),  # the shortest limit
        (1024, 300),  # 5 x 20 s, below it
        (8192, 5 * 160),
        (16384, 5 * 320),
        (1 << 20, 1800),  # never above the run's deadline
    ],
)
def test_a_later_pass_has_five_times_what_its_tokens_let_expect(tokens: int, expected: float) -> None:
    limits = CallLimits(Deadlines())
    limits.note("run_passes", 10, 0.1)
    limits.note("run_passes", 1024, 20)
    limits.note("run_passes", 10, 1.0)
    assert limit(limits, "run_passes", tokens) == expected


def test_the_deadline_grows_with_the_longest_call() -> None:
    limits = CallLimits(Deadlines())
    limits.note("run_passes", 1024, 500)
    assert limit(limits, "run_passes", 2048) == limit(limits, "load_state") == 2500


def test_a_pass_of_which_a_part_was_refused_sets_no_limit_for_others() -> None:
    limits = CallLimits(Deadlines())
    # refused before any work: 10 ms for 100,000 tokens would allow 300 s for the next hour of tokens
    limits.note("run_passes", 100_000, 0.01, [CallError("model a is unknown."), object()])
    assert limit(limits, "run_passes", 100_000) == DEFAULTS["update"]
    limits.note("run_passes", 1024, 200, [object(), object()])
    assert limit(limits, "run_passes", 1024) == 1000


@pytest.mark.parametrize("method", ["load_state", "make_sampler", "drop_sampler", "step_sampling", "step_tenants"])
def test_calls_of_the_disk_keep_the_deadline_of_the_run(method: str) -> None:
    """A step of samples loads the full weights of another sampler."""
    limits = CallLimits(Deadlines())
    limits.note(method, 1, 0.1)
    assert limit(limits, method) == DEFAULTS["update"]


@pytest.mark.parametrize("method", ["save_state", "export_adapter", "export_merged"])
def test_calls_that_write_checkpoints_have_the_deadline_of_one(method: str) -> None:
    limits = CallLimits(Deadlines({**DEFAULTS, "update": 40.0, "save": 90.0}, frozenset({"update", "save"})))
    limits.note(method, 1, 0.1)
    assert limit(limits, method) == 90 and limits.find_key(method) == "save"


def test_runs_with_a_deadline_of_their_own_keep_it() -> None:
    own = CallLimits(Deadlines({**DEFAULTS, "update": 40.0}, frozenset({"update"})))
    own.note("run_passes", 1024, 500)
    assert limit(own, "run_passes", 1024) == limit(own, "optim_step") == 40
