"""When prompts are started and which are taken."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_rl.trainers.admission import Admission, InFlight, QueueMarks


@pytest.mark.parametrize(
    ("threshold", "step", "version", "taken", "running", "room"),
    [
        (0, 1, 0, 0, 0, 4),  # one batch, and no more until it has trained
        (0, 1, 0, 4, 0, 0),
        (0, 1, 1, 4, 0, 4),
        (1, 1, 0, 0, 0, 8),  # one batch ahead
        (1, 1, 3, 12, 4, 4),
        (0.5, 1, 0, 0, 0, 6),
        (0.5, 1, 2, 8, 2, 4),
        (1, 2, 0, 0, 0, 16),  # two iterations to a version
        (0, 3, 1, 12, 12, 0),
        (0, 1, 0, 4, 3, 0),
    ],
)
def test_prompts_are_started_as_far_ahead_as_the_threshold_says(
    threshold: float, step: int, version: int, taken: int, running: int, room: int
) -> None:
    assert Admission("pace", threshold, 4, step).compute_room(version, taken, running) == room


def flight(*prompts: tuple[int, int, bool]) -> list[InFlight]:
    return [InFlight(*prompt) for prompt in prompts]


@pytest.mark.parametrize(
    ("strategy", "chosen"), [("pace", [1, 2]), ("drop", [1, 2]), ("wait", None)]
)  # prompt 0 may still train in the next iteration
def test_what_is_ready_is_taken_in_the_order_of_the_prompts(strategy: Any, chosen: list[int] | None) -> None:
    prompts = flight((0, 0, False), (1, 0, True), (2, 0, True), (3, 0, True))
    assert Admission(strategy, 1, 2).choose(0, 2, prompts) == chosen


def test_what_would_be_too_old_afterwards_is_waited_for() -> None:
    admission = Admission("pace", 1, 2)
    late = flight((0, 0, False), (3, 0, True), (4, 1, True), (5, 1, True))
    assert admission.choose(1, 2, late) is None  # 0 and 3 come from version 0, which trains in iteration 1 at the latest
    assert admission.choose(1, 2, flight((0, 0, True), (3, 0, True), (4, 1, True))) == [0, 3]


def test_no_more_old_prompts_are_left_than_the_iterations_to_come_can_take() -> None:
    # threshold 2, two prompts an iteration: of five from version 0, iteration 1 must take one and iteration 2 the rest
    admission = Admission("pace", 2, 2)
    assert admission.choose(1, 2, flight((0, 0, False), (1, 0, False), (2, 0, False), (3, 1, True), (4, 1, True))) is None
    assert admission.choose(1, 2, flight((0, 0, False), (1, 0, False), (2, 0, True), (3, 1, True), (4, 1, True))) == [2, 3]


def test_fractions_and_iterations_between_two_pushes_count_in_whole_versions() -> None:
    admission = Admission("drop", 0.5, 4, 2)
    assert (admission.bound, [admission.version(iteration) for iteration in range(5)]) == (1, [0, 0, 1, 1, 2])
    prompts = flight((0, 0, True), (1, 1, False))
    assert admission.find_overdue(3, prompts) == []
    assert admission.find_overdue(4, prompts) == [0]


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        # of 16 prompts in flight; awake from below 4 until 8
        ([(0, 16), (3, 16), (4, 16), (7, 16), (8, 16), (7, 16), (4, 16), (3, 16)], "awake awake awake awake - - - awake"),
        # a level that swings between the marks changes nothing
        ([(5, 16), (7, 16), (4, 16), (6, 16)], "- - - -"),
        ([(2, 16), (5, 16), (7, 16), (4, 16)], "awake awake awake awake"),
        # all that may be started is ready: there is nothing to generate, below either mark
        ([(2, 16), (6, 6), (3, 3), (3, 4), (4, 4), (0, 0)], "awake - - awake - -"),
    ],
)
def test_further_engines_generate_from_below_the_low_mark_until_the_high_one(
    levels: list[tuple[int, int]], expected: str
) -> None:
    marks, is_awake, states = QueueMarks(4, 8), False, list[str]()
    for num_ready, num_in_flight in levels:
        is_awake = marks.decide(is_awake=is_awake, num_ready=num_ready, num_in_flight=num_in_flight)
        states.append("awake" if is_awake else "-")
    assert " ".join(states) == expected
