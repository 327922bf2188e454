"""Generation beside training: what is started, taken, interrupted, thrown away and resumed, on a clock that jumps."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, JumpingClock, log_prob, token

from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rollout.agents.loop import AgentRunner, SingleTurn
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.trainers.admission import Admission
from mindspeed_rl.trainers.group_rollout import _write_record
from mindspeed_rl.trainers.group_sources import Requests, StreamingSource
from mindspeed_rl.trainers.prompt_groups import PromptGroup, load_groups, save_groups

BATCH, GROUP, TRAIN_S = 3, 2, 7.0


def prompt(number: int) -> PromptItem:
    return PromptItem(prompt_ids=[number, 1], label=str(number), columns={})


async def score(group: PromptGroup) -> list[RewardResult]:
    return [RewardResult(float(sum(response.token_ids)), {"sum": 1.0}) for response in group.trajectories]


def long_tail(seed: int) -> int:
    """1 to 9 tokens, or now and then 40."""
    rng = random.Random(seed)
    return 40 if rng.random() < 0.1 else rng.randint(1, 9)


_clocks: list[JumpingClock] = []


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """What a test leaves running ends with it."""
    yield
    for clock in _clocks:
        clock.end()
    _clocks.clear()


@dataclass
class Driver:
    """A trainer that does nothing for some seconds.

    Attributes:
        batches: of each iteration, its number and what it took.
    """

    admission: Admission
    interrupts: bool = True
    length: Callable[[int], int] = long_tail
    timeout_s: float = 1000.0
    warmup: int = 1
    spare: int = 0
    keeps: bool = False
    batches: list[tuple[int, list[PromptGroup]]] = field(default_factory=list)
    dropped: float = 0.0
    aborted: float = 0.0
    continued: float = 0.0

    def __post_init__(self) -> None:
        self.clock = JumpingClock()
        _clocks.append(self.clock)
        self.engine = FakeEngine(self.length)
        self.source = StreamingSource(
            self.engine,
            AgentRunner(SingleTurn()),
            self.clock,
            Requests(
                prompt, lambda number, sample: number * 100 + sample, Sampling(1.0, 64, ()), GROUP, self.spare, self.keeps
            ),
            self.admission,
            score,
            interrupts=self.interrupts,
            num_warmup_batches=self.warmup,
            timeout_s=self.timeout_s,
        )
        self.version = -1

    def push(self, iteration: int) -> None:
        version = self.admission.version(iteration)
        if version != self.version:
            self.source.before_push()
            self.engine.version = self.version = version
            self.source.after_push(version)

    def train(self, iterations: range) -> Driver:
        self.push(iterations.start)
        for iteration in iterations:
            groups, reports = self.source.take(iteration, self.admission.batch_prompts)
            results = reports[0].metrics.results()
            self.dropped += results.get("rollout/dropped_tokens", 0.0)
            self.aborted += results.get("rollout/aborted_samples", 0.0)
            self.continued += results.get("rollout/continued_samples", 0.0)
            self.batches.append((iteration, groups))
            self.clock.run(asyncio.sleep(TRAIN_S))
            self.push(iteration + 1)
        return self

    def staleness(self) -> list[int]:
        """Of every sample that was taken, by its oldest token."""
        return [
            self.admission.version(iteration) - min(response.versions)
            for iteration, groups in self.batches
            for group in groups
            for response in group.trajectories
        ]

    def numbers(self) -> list[list[int]]:
        return [[group.index for group in groups] for _, groups in self.batches]


def expected_tokens(group: PromptGroup, sample: int) -> tuple[list[int], list[float]]:
    """The tokens and log-probs of a sample, computed from its versions."""
    seed = group.index * 100 + sample
    tokens = [token(seed, place, version) for place, version in enumerate(group.trajectories[sample].versions)]
    return tokens, [log_prob(value) for value in tokens]


@pytest.mark.parametrize("strategy", ["pace", "wait", "drop"])
@pytest.mark.parametrize("interrupts", [True, False])
@pytest.mark.parametrize(("threshold", "step"), [(0, 1), (0.5, 1), (1, 1), (3, 1), (1, 2), (0.7, 3)])
def test_no_token_trains_that_is_older_than_the_bound(strategy: Any, interrupts: bool, threshold: float, step: int) -> None:
    driver = Driver(Admission(strategy, threshold, BATCH, step), interrupts).train(range(30))
    assert max(driver.staleness()) <= driver.admission.bound
    taken = [number for numbers in driver.numbers() for number in numbers]
    assert len(set(taken)) == len(taken) == 30 * BATCH  # nothing trains twice
    assert all(numbers == sorted(numbers) for numbers in driver.numbers())
    if strategy != "drop":
        # what did not train is still under way: nothing is thrown away
        started = set(range(driver.source.snapshot()[1]))
        assert started - set(taken) == {group.index for group in driver.source.snapshot()[0]}
    for _, groups in driver.batches:
        for group in groups:
            for sample, response in enumerate(group.trajectories):
                assert (list(response.token_ids), list(response.log_probs)) == expected_tokens(group, sample)
                assert len(response.token_ids) == long_tail(group.index * 100 + sample)
                assert list(response.versions) == sorted(response.versions)


@pytest.mark.parametrize("strategy", ["pace", "wait"])
def test_without_a_threshold_every_iteration_trains_on_its_own_rollout(strategy: Any) -> None:
    driver = Driver(Admission(strategy, 0, BATCH)).train(range(6))
    assert driver.numbers() == [list(range(i * BATCH, (i + 1) * BATCH)) for i in range(6)]
    assert [{v for group in groups for r in group.trajectories for v in r.versions} for _, groups in driver.batches] == [
        {version} for version in range(6)
    ]


def test_one_step_off_trains_on_the_rollout_of_the_weights_before() -> None:
    driver = Driver(Admission("wait", 1, BATCH), interrupts=False).train(range(6))
    assert driver.numbers() == [list(range(i * BATCH, (i + 1) * BATCH)) for i in range(6)]
    versions = [{v for group in groups for r in group.trajectories for v in r.versions} for _, groups in driver.batches]
    assert versions == [{0}, {0}, {1}, {2}, {3}, {4}]
    assert set(driver.engine.calls) == {"wait"}


def test_generation_goes_on_while_the_trainer_trains() -> None:
    seconds = {}
    for name, admission in {"sync": Admission("pace", 0, BATCH), "async": Admission("pace", 1, BATCH)}.items():
        driver = Driver(admission, length=lambda seed: 7).train(range(10))
        seconds[name] = driver.clock.now
    assert seconds["sync"] == pytest.approx(10 * (7 + TRAIN_S))
    assert seconds["async"] == pytest.approx(7 + 10 * TRAIN_S)  # both halves take 7 s: after the first, one is hidden


def test_new_weights_interrupt_a_response_which_goes_on_with_them() -> None:
    driver = Driver(Admission("pace", 3, BATCH), length=lambda seed: 20 if seed < 100 else 5).train(range(5))
    long = next(group for _, groups in driver.batches for group in groups if group.index == 0)
    # three batches are ready after 5 s without prompt 0; an iteration takes 7 s
    assert long.trajectories[0].versions == [0] * 12 + [1] * 7 + [2]
    assert driver.numbers()[0] == [1, 2, 3]


def test_a_group_ends_when_enough_of_its_samples_have_and_the_others_are_aborted() -> None:
    def length(seed: int) -> int:
        return 40 if seed % 100 == 1 else 5  # the second sample of each prompt

    seconds = {}
    for spare in (0, 1):
        driver = Driver(Admission("pace", 0, BATCH), length=length, spare=spare).train(range(4))
        seconds[spare] = driver.clock.now
        kept = {seed for _, groups in driver.batches for group in groups for seed in (0, 1, 2) if trained(group, seed)}
        assert kept == ({0, 2} if spare else {0, 1})
        assert all(len(group.samples) == GROUP for _, groups in driver.batches for group in groups)
        assert driver.aborted == 4 * BATCH * spare
    assert seconds == {0: pytest.approx(4 * (40 + TRAIN_S)), 1: pytest.approx(4 * (5 + TRAIN_S))}


@pytest.mark.parametrize("interrupts", [True, False])
@pytest.mark.parametrize(("strategy", "threshold", "step"), [("pace", 1, 1), ("pace", 2.5, 1), ("pace", 1, 2), ("drop", 3, 1)])
def test_samples_that_are_kept_train_once_in_time_and_with_their_tokens(
    strategy: Any, threshold: float, step: int, interrupts: bool
) -> None:
    driver = Driver(Admission(strategy, threshold, BATCH, step), interrupts, spare=1, keeps=True).train(range(30))
    assert max(driver.staleness()) <= driver.admission.bound and driver.aborted == 0 < driver.continued
    seen: dict[int, list[int]] = {}
    for group in (group for _, groups in driver.batches for group in groups):
        for sample, response in zip(group.ids, group.trajectories, strict=True):
            seed = group.index * 100 + sample
            assert list(response.token_ids) == [token(seed, place, version) for place, version in enumerate(response.versions)]
            assert len(response.token_ids) == long_tail(seed)
        seen.setdefault(group.index, []).extend(group.ids)
    in_flight = {group.index for group in driver.source.snapshot()[0]}
    assert all(len(set(ids)) == len(ids) for ids in seen.values())
    if strategy == "pace":
        assert all(sorted(ids) == list(range(2 * GROUP)) for number, ids in seen.items() if number not in in_flight)
        assert set(seen) | in_flight == set(range(driver.source.snapshot()[1]))


def test_a_sample_that_is_kept_goes_on_while_the_first_group_of_its_prompt_trains() -> None:
    def length(seed: int) -> int:
        return 40 if seed % 100 == 1 else 5  # the second sample of each prompt

    driver = Driver(Admission("pace", 8, BATCH), length=length, spare=1, keeps=True).train(range(10))
    parts = {(group.index, group.part): (iteration, group) for iteration, groups in driver.batches for group in groups}
    (first, _), (second, group) = parts[0, 0], parts[0, 1]
    assert first == 0 < second
    # it was interrupted by each push, and never started anew
    long = group.trajectories[group.ids.index(1)]
    assert len(long.token_ids) == 40 and long.versions[0] == 0 and len(set(long.versions)) > 3


def test_a_resumed_run_has_both_groups_of_a_prompt(tmp_path: Path) -> None:
    admission = Admission("pace", 3, BATCH)
    first = Driver(admission, spare=1, keeps=True).train(range(7))
    groups, next_prompt, taken = first.source.snapshot()
    assert any(group.part for group in groups)
    save_groups(tmp_path / "groups.safetensors", groups)
    loaded = load_groups(tmp_path / "groups.safetensors", prompt)
    assert loaded == groups
    second = Driver(admission, spare=1, keeps=True)
    second.source.restore(loaded, next_prompt, taken)
    second.train(range(7, 30))
    seen = [
        (group.index, sample)
        for driver in (first, second)
        for _, batch in driver.batches
        for group in batch
        for sample in group.ids
    ]
    assert len(set(seen)) == len(seen) == 30 * BATCH * GROUP and max(second.staleness()) <= 3


def trained(group: PromptGroup, sample: int) -> bool:
    """Return True where a response of the group has the tokens of this sample's seed."""
    expected = [
        [token(group.index * 100 + sample, place, version) for place, version in enumerate(trajectory.versions)]
        for trajectory in group.trajectories
    ]
    return any(list(trajectory.token_ids) == tokens for trajectory, tokens in zip(group.trajectories, expected, strict=True))


def test_spare_samples_of_a_checkpoint_go_on_as_spare_ones(tmp_path: Path) -> None:
    driver = Driver(Admission("pace", 1, BATCH), length=lambda seed: 30 if seed % 100 else 5, spare=1)
    driver.push(0)
    driver.clock.run(asyncio.sleep(8))
    driver.source.before_push()
    groups, next_prompt, taken = driver.source.snapshot()
    save_groups(tmp_path / "groups.safetensors", groups)
    loaded = load_groups(tmp_path / "groups.safetensors", prompt)
    assert [(len(group.samples), group.needed, group.num_missing) for group in loaded] == [(3, 2, 1)] * 6
    resumed = Driver(Admission("pace", 1, BATCH), length=lambda seed: 30 if seed % 100 else 5, spare=1)
    resumed.source.restore(loaded, next_prompt, taken)
    resumed.push(0)
    assert [len(group.trajectories) for group in resumed.source.take(0, BATCH)[0]] == [GROUP] * BATCH


def test_what_is_too_old_is_dropped_and_counted() -> None:
    driver = Driver(Admission("drop", 1, BATCH), length=lambda seed: 60 if seed < 100 else 5).train(range(12))
    assert 0 not in [number for numbers in driver.numbers() for number in numbers]
    assert driver.dropped > 0
    assert max(driver.staleness()) <= 1


def test_rejected_prompts_make_room_for_just_as_many() -> None:
    driver = Driver(Admission("pace", 0, BATCH))
    driver.push(0)
    assert [group.index for group in driver.source.take(0, 3)[0]] == [0, 1, 2]
    driver.source.reject(2)
    assert [group.index for group in driver.source.take(0, 2)[0]] == [3, 4]
    assert driver.source.snapshot() == ([], 5, 3)


def test_training_begins_when_the_warm_up_is_ready() -> None:
    driver = Driver(Admission("pace", 1, BATCH), warmup=2, length=lambda seed: 3 if seed < 300 else 9)
    driver.push(0)
    driver.source.take(0, BATCH)
    assert driver.clock.now == pytest.approx(9.0)


@pytest.mark.parametrize("interrupts", [True, False])
def test_a_resumed_run_has_all_that_was_in_flight(tmp_path: Path, interrupts: bool) -> None:
    admission = Admission("pace", 2, BATCH)
    first = Driver(admission, interrupts).train(range(7))
    groups, next_prompt, taken = first.source.snapshot()
    save_groups(tmp_path / "groups.safetensors", groups)
    second = Driver(admission, interrupts)
    loaded = load_groups(tmp_path / "groups.safetensors", prompt)
    assert loaded == groups
    second.source.restore(loaded, next_prompt, taken)
    second.train(range(7, 14))
    numbers = [number for driver in (first, second) for batch in driver.numbers() for number in batch]
    assert len(set(numbers)) == len(numbers) == 14 * BATCH
    assert max(second.staleness()) <= 2
    finished = {group.index: group for group in groups if group.is_complete}
    for _, batch in second.batches:
        for group in batch:
            assert group.index not in finished or group.trajectories == finished[group.index].trajectories


def test_one_step_off_resumes_bit_for_bit(tmp_path: Path) -> None:
    admission = Admission("wait", 1, BATCH)
    whole = Driver(admission, interrupts=False).train(range(8))
    first = Driver(admission, interrupts=False).train(range(4))
    groups, next_prompt, taken = first.source.snapshot()
    save_groups(tmp_path / "groups.safetensors", groups)
    second = Driver(admission, interrupts=False)
    second.source.restore(load_groups(tmp_path / "groups.safetensors", prompt), next_prompt, taken)
    second.train(range(4, 8))
    assert first.batches + second.batches == whole.batches


def test_samples_that_were_cut_are_written_down_with_what_they_have(tmp_path: Path) -> None:
    driver = Driver(Admission("pace", 2, BATCH), length=lambda seed: 30).train(range(0))
    driver.clock.run(asyncio.sleep(4))
    driver.version = -1
    driver.push(0)  # the same weights once more: everything is interrupted
    groups, *_ = driver.source.snapshot()
    assert {sample.finish for group in groups for sample in group.samples if sample} == {"aborted"}
    assert {len(sample.token_ids) for group in groups for sample in group.samples if sample} == {4}
    save_groups(tmp_path / "groups.safetensors", groups)
    assert load_groups(tmp_path / "groups.safetensors", prompt) == groups
    with pytest.raises(ValueError, match="nothing.safetensors"):
        load_groups(tmp_path / "nothing.safetensors", prompt)


def test_the_record_says_which_prompts_trained_with_tokens_of_which_weights(tmp_path: Path) -> None:
    driver = Driver(Admission("pace", 3, BATCH), length=lambda seed: 20 if seed < 100 else 5).train(range(5))
    for iteration, groups in driver.batches:
        _write_record(tmp_path / "consumed.jsonl", iteration + 1, iteration, groups)
    lines = [json.loads(line) for line in (tmp_path / "consumed.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5]
    (long,) = [prompt for line in lines for prompt in line["prompts"] if prompt["prompt"] == 0]
    assert long["samples"][0] == {"versions": [[0, 12], [1, 7], [2, 1]], "finish": "stop"}


def test_a_wait_for_responses_has_a_deadline_and_says_what_for() -> None:
    driver = Driver(Admission("pace", 0, BATCH), length=lambda seed: 60 if seed == 101 else 2, timeout_s=20)
    with pytest.raises(TimeoutError, match="iteration 1 waited 20 s .* 3 prompts: 2 are ready, 1 are .* prompt 1 lacks 1 of 2"):
        driver.train(range(1))


def test_an_engine_that_fails_ends_the_run_with_its_own_error() -> None:
    driver = Driver(Admission("pace", 0, BATCH))
    driver.engine.failing = True
    with pytest.raises(RuntimeError, match="the server is gone"):
        driver.train(range(1))


def test_the_failures_that_follow_from_the_first_are_not_logged_later(caplog: pytest.LogCaptureFixture) -> None:
    def train() -> str:
        driver = Driver(Admission("pace", 0, BATCH))
        driver.engine.failing = True
        with pytest.raises(RuntimeError) as error:
            driver.train(range(1))
        _clocks.remove(driver.clock)
        driver.clock.end()
        return str(error.value)

    assert train() == "the server is gone"
    gc.collect()  # asyncio logs an exception that was never retrieved when its task is garbage-collected
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_a_push_that_waits_for_responses_has_the_same_deadline() -> None:
    driver = Driver(Admission("wait", 1, BATCH), interrupts=False, length=lambda seed: 60 if seed >= 300 else 2, timeout_s=20)
    with pytest.raises(TimeoutError, match="the push of new weights waited 20 s .*: 0 are ready, 3 are being generated"):
        driver.train(range(2))


def test_while_the_driver_waits_it_keeps_the_engine_alive() -> None:
    seen: list[float] = []
    driver = Driver(Admission("pace", 0, BATCH), length=lambda seed: 9)
    driver.source._keep_alive = lambda: seen.append(driver.clock.now)
    driver.train(range(1))
    assert seen == pytest.approx([2.0, 4.0, 6.0, 8.0])
