"""Sampling of prompts by source, difficulty and measured pass rate; a resumed run continues with the same prompts."""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rl.config import ConfigError, load_run_config
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.trainers.prompt_loader import PromptLoader
from mindspeed_rl.trainers.prompt_sampling import PromptOrder, PromptSampler


class Prompts:
    """Rows whose columns are given."""

    def __init__(self, columns: list[dict[str, Any]]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns)

    def __getitem__(self, index: int) -> PromptItem:
        return PromptItem(prompt_ids=[index, 1], label=str(index), columns=self._columns[index])

    def where(self, index: int) -> str:
        return f"row {index}"


class Plane:
    """A data plane that keeps the labels of what is put."""

    def __init__(self) -> None:
        self.labels: list[int] = []

    def clear(self, size: int) -> None:
        pass

    def put(self, columns: dict[str, Any], rows: range) -> None:
        self.labels += map(int, columns["labels"])


def keys(**values: Any) -> PromptOrder:
    words = [f"+rl_config.{name}={value}" for name, value in values.items()]
    return PromptOrder.from_config(resolve(load_run_config("grpo_tiny_cpu", None, words), platform="cpu").rl)


def sampler(columns: list[dict[str, Any]], *, shuffle: bool = True, **values: Any) -> PromptSampler:
    return PromptSampler(keys(**values), Prompts(columns), seed=3, shuffle=shuffle)  # type: ignore[arg-type]


SOURCES = [{"data_source": "math" if row < 30 else "code"} for row in range(40)]


def test_sources_have_their_shares_at_any_time_whatever_their_sizes() -> None:
    chosen = sampler(SOURCES, prompt_sources="[code,math]", prompt_source_weights="[3,1]")
    rows = [chosen.row(index) for index in range(120)]
    for count in range(1, 121):
        num_code = sum(row >= 30 for row in rows[:count])
        assert abs(num_code - 0.75 * count) <= 1
    code = [row for row in rows if row >= 30]
    for first in range(0, 90, 10):  # every pass over a source has each of its prompts once
        assert sorted(code[first : first + 10]) == list(range(30, 40))


def test_the_first_pass_goes_from_easy_to_hard_and_later_ones_are_shuffled() -> None:
    rates = [(row * 7) % 20 / 20 for row in range(20)]
    chosen = sampler([{"rate": str(rate)} for rate in rates], prompt_curriculum="rate")
    rows = [chosen.row(index) for index in range(60)]
    assert [rates[row] for row in rows[:20]] == sorted(rates, reverse=True)
    for first in (20, 40):
        assert sorted(rows[first : first + 20]) == list(range(20)) and rows[first : first + 20] != rows[:20]
    assert rows[20:40] != rows[40:60]


def test_prompts_that_always_or_never_pass_are_passed_over_once_and_tried_again() -> None:
    chosen = sampler([{}] * 6, shuffle=False, prompt_skip_above=1.0, prompt_skip_below=0.0)
    rates = {0: 1.0, 1: 0.5, 2: 0.0, 3: 0.25, 4: 1.0, 5: 0.75}
    passes: list[list[int]] = []
    index = 0
    for expected in ([0, 1, 2, 3, 4, 5], [1, 3, 5], [0, 1, 2, 3, 4, 5], [1, 3, 5]):
        rows = [chosen.row(index + step) for step in range(len(expected))]
        for step, row in enumerate(rows):
            chosen.observe([index + step], [[1.0] * int(4 * rates[row]) + [0.0] * (4 - int(4 * rates[row]))])
        index += len(expected)
        passes.append(rows)
    assert passes == [[0, 1, 2, 3, 4, 5], [1, 3, 5], [0, 1, 2, 3, 4, 5], [1, 3, 5]]
    assert chosen.count() == {"replayed": 0, "skipped": 6, "hard": 0}


def test_a_fraction_of_prompts_are_the_hard_ones_in_the_order_in_which_they_failed() -> None:
    chosen = sampler([{}] * 12, shuffle=False, prompt_replay_fraction=0.25, prompt_replay_below=0.5)
    rows = []
    for index in range(24):
        rows.append(chosen.row(index))
        solved = rows[-1] % 3 == 0 or rows.count(rows[-1]) > 1  # the second attempt succeeds
        chosen.observe([index], [[1.0, float(solved), 0.0, float(solved)] if solved else [0.0, 0.0, 1.0, 0.0]])
    naive, stream, hard = [], 0, []
    for index in range(24):
        if hard and math.floor((index + 1) / 4) > math.floor(index / 4):
            row = hard.pop(0)
        else:
            row, stream = stream % 12, stream + 1
            hard = [other for other in hard if other != row]
        naive.append(row)
        if row % 3 and naive.count(row) == 1:
            hard.append(row)
    assert rows == naive and Counter(rows)[1] > 1


def test_a_response_without_a_reward_says_nothing() -> None:
    chosen = sampler([{}] * 2, shuffle=False, prompt_skip_above=1.0)
    assert [chosen.row(0), chosen.row(1)] == [0, 1]
    chosen.observe([0, 1], [[math.nan, math.nan], [math.nan, 1.0]])
    assert chosen.row(2) == 0 and chosen.row(3) == 0  # of row 1 all that is known passes


def test_the_next_level_opens_when_the_last_prompts_of_the_highest_one_pass() -> None:
    levels = [row % 3 for row in range(30)]
    values = {"prompt_level_key": "level", "prompt_level_pass_rate": 0.5, "prompt_level_prompts": 4}
    chosen = sampler([{"level": str(level)} for level in levels], **values)
    # right answers to prompts of a level, from how many of its prompts on
    opened, seen, naive_rates = [], Counter[int](), list[float]()
    highest = 0
    for index in range(90):
        level = levels[chosen.row(index)]
        assert level <= highest
        seen[level] += 1
        rate = 1.0 if seen[level] > 6 else 0.0
        chosen.observe([index], [[rate, rate, math.nan]])
        if level == highest:
            naive_rates = [*naive_rates, rate][-4:]
            if len(naive_rates) == 4 and sum(naive_rates) >= 2 and highest < 2:
                highest, naive_rates = highest + 1, []
                opened.append(index)
        assert chosen.count()["open_levels"] == highest + 1
    # six prompts of the lowest level fail, then two of four have passed
    assert opened[0] == 7 and len(opened) == 2 and seen[2] > 0
    assert {chosen.row(index) for index in range(30, 90)} == set(range(30))  # every open prompt takes part


def test_levels_follow_their_numbers_and_wait_for_responses_with_rewards() -> None:
    chosen = sampler([{"level": 10}, {"level": 9.5}], prompt_level_key="level", prompt_level_prompts=1)
    for index in range(5):
        assert chosen.row(index) == 1  # the number 9.5 is below 10, the text is not
        chosen.observe([index], [[math.nan, math.nan]])
    chosen.observe([4], [[1.0, 1.0]])
    assert {chosen.row(5), chosen.row(6)} == {0, 1}


def test_a_level_opens_for_all_sources_and_a_source_without_the_lowest_is_refused() -> None:
    columns = [{"data_source": "ab"[row % 2], "level": row // 4} for row in range(8)]
    sources = {"prompt_sources": "[a,b]", "prompt_source_weights": "[1,1]"}
    chosen = sampler(columns, shuffle=False, prompt_level_key="level", prompt_level_prompts=2, **sources)
    assert [chosen.row(index) for index in range(4)] == [0, 1, 2, 3]
    chosen.observe([0, 1], [[1.0], [1.0]])
    assert [chosen.row(index) for index in range(4, 8)] == [4, 5, 6, 7]
    for row in (1, 3):
        columns[row]["level"] = 1
    with pytest.raises(ValueError, match="source 'b' has no prompt of the lowest level"):
        sampler(columns, prompt_level_key="level", **sources)


def test_orders_without_levels_are_those_of_earlier_checkpoints() -> None:
    order = keys(prompt_skip_above=1.0)
    before = tuple(getattr(order, field.name) for field in dataclasses.fields(order))[:9]
    assert order.describe() == [zlib.crc32(repr(before).encode())]
    assert keys(prompt_level_key="level").describe() != keys(prompt_level_key="other").describe() != []


def simulate(loader: PromptLoader, plane: Plane, iterations: range) -> None:
    for iteration in iterations:
        loader.put()
        hard = torch.tensor([float((label * 7 + iteration) % 3 > 0) for label in plane.labels[-len(loader.batch) * 2 :]])
        loader.observe(hard)


def test_a_resumed_run_samples_the_prompts_of_the_one_that_never_stopped() -> None:
    columns = [{"data_source": "ab"[row % 3 == 0], "rate": row / 50, "level": row // 20} for row in range(50)]
    values = {"prompt_sources": "[a,b]", "prompt_source_weights": "[1,2]", "prompt_curriculum": "rate"}
    values |= {"prompt_replay_fraction": 0.3, "prompt_skip_above": 1.0, "prompt_skip_below": 0.0}
    values |= {"prompt_level_key": "level", "prompt_level_pass_rate": 0.6, "prompt_level_prompts": 12}
    run = resolve(load_run_config("grpo_tiny_cpu", None, []), platform="cpu")
    plan = dataclasses.replace(run.plan, num_prompts=6, n_samples_per_prompt=2)

    def build(plane: Plane) -> PromptLoader:
        prompts: Any = Prompts(columns)
        return PromptLoader(prompts, plane, plan, keys(**values), seed=5, shuffle=True)  # type: ignore[arg-type]

    alone, stopped = Plane(), Plane()
    simulate(build(alone), alone, range(30))
    first = build(stopped)
    simulate(first, stopped, range(13))
    second = build(stopped)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())), 13)
    simulate(second, stopped, range(13, 30))
    assert stopped.labels == alone.labels
    # the prompts of responses in flight are those that they were started with
    assert [second.item(index)["label"] for index in (0, 70, 100)] == [str(alone.labels[2 * i]) for i in (0, 70, 100)]


@pytest.mark.parametrize("filtered", [True, False])
def test_a_prompt_that_a_filter_has_measured_is_not_measured_again_by_the_update(filtered: bool) -> None:
    """The level opens after six prompts that pass, of which an iteration has four."""
    plane, prompts = Plane(), Prompts([{"level": row // 20} for row in range(40)])
    values = {"prompt_level_key": "level", "prompt_level_pass_rate": 0.5, "prompt_level_prompts": 6}
    run = resolve(load_run_config("grpo_tiny_cpu", None, []), platform="cpu")
    plan = dataclasses.replace(run.plan, num_prompts=4, n_samples_per_prompt=2)
    loader = PromptLoader(prompts, plane, plan, keys(**values), seed=5, shuffle=True)  # type: ignore[arg-type]
    open_levels = []
    for _ in range(2):
        loader.put()
        rewards = torch.ones(8)
        if filtered:
            loader.observe(rewards)
            loader.batch = loader.batch[:3]  # one is left out
            rewards = rewards[:6]
        batch: Any = SimpleNamespace(totals=rewards)
        loader.on_batch(batch)
        (report,) = loader.report()
        open_levels.append(report.metrics.results()["prompts/open_levels"])
    assert open_levels == [1, 2]


@pytest.mark.parametrize(
    ("columns", "values", "problem"),
    [
        ([{"data_source": "x"}], {"prompt_sources": "[a]", "prompt_source_weights": "[1]"}, "has 'x' in column data_source"),
        (SOURCES, {"prompt_sources": "[math,code,qa]", "prompt_source_weights": "[1,1,1]"}, "no prompt has 'qa'"),
        ([{"rate": "easy"}], {"prompt_curriculum": "rate"}, "row 0 has 'easy' in column rate, but a pass rate is a number"),
        ([{}], {"prompt_curriculum": "rate"}, "row 0 has None in column rate"),
        ([{"level": "hard"}], {"prompt_level_key": "level"}, "prompt_level_key: row 0 has 'hard' in column level, but a level"),
    ],
)
def test_columns_that_do_not_fit_are_named(columns: list, values: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        sampler(columns, **values)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"prompt_sources": "[a,b]", "prompt_source_weights": "[1]"}, "has 1 weights for 2 sources"),
        ({"prompt_skip_below": 0.5, "prompt_skip_above": 0.5}, "no prompt would train"),
        ({"prompt_level_key": "level", "prompt_level_pass_rate": 0.0}, "prompt_level_pass_rate"),
        ({"prompt_level_key": "level", "prompt_level_prompts": 0}, "prompt_level_prompts"),
    ],
)
def test_keys_that_do_not_fit_are_refused_before_anything_starts(values: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        keys(**values)
