"""The order in which the samples of a rollout start, by the lengths of the responses before."""

from __future__ import annotations

from mindspeed_rl.rollout.agents.loop import Task
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.workers.agents import LengthOrder


def tasks(*prompts: int) -> list[Task]:
    """Two samples of each prompt."""
    sampling = Sampling(1.0, 8, ())
    return [Task((prompt, 1), sampling, 10 * prompt + sample, None, {}) for prompt in prompts for sample in range(2)]


def test_unknown_prompts_start_first_and_then_those_whose_responses_were_longest() -> None:
    order = LengthOrder(longest_first=True)
    order.note(tasks(1, 2, 3), [4, 6, 30, 2, 7, 9])  # means 5, 16 and 8
    assert order.arrange(tasks(1, 2, 3, 4)) == [6, 7, 2, 3, 4, 5, 0, 1]
    order.note(tasks(2), [1, 1])  # the last ones count
    assert order.arrange(tasks(1, 2, 3)) == [4, 5, 0, 1, 2, 3]


def test_without_the_key_samples_start_as_they_come() -> None:
    order = LengthOrder(longest_first=False)
    order.note(tasks(1, 2), [1, 1, 30, 30])
    assert order.arrange(tasks(1, 2)) == [0, 1, 2, 3]
