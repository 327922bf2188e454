"""Responses that are spread over several rollouts of the engine on the training devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fake_engine import log_prob, token

from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.rollout.protocol import Generated, PartialResponse
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.admission import Admission
from mindspeed_rl.trainers.advantages import _staleness_metrics, _young_tokens
from mindspeed_rl.trainers.group_rollout import _response_rows
from mindspeed_rl.trainers.group_sources import PartialSource, Requests
from mindspeed_rl.trainers.prompt_groups import PromptGroup, load_groups, save_groups
from mindspeed_rl.trainers.staleness import check_versions

BATCH, GROUP, MOST, SPLIT = 2, 2, 12, 3


def prompt(number: int) -> PromptItem:
    return PromptItem(prompt_ids=[number], label=None, columns={})


def length(seed: int) -> int:
    """Every third prompt's first sample is as long as may be, the others have 1 to 3 tokens."""
    return MOST if seed % 300 == 0 else 1 + seed % 3


class Engines:
    """What the workers do with pieces: grows them with the weights of now.

    Attributes:
        rounds: pieces of each call.
        num_tokens: sampled so far.
    """

    def __init__(self) -> None:
        self.version = self.num_tokens = 0
        self.rounds: list[int] = []

    def __call__(self, responses: Sequence[PartialResponse], num_tokens: int) -> tuple[list[WorkerReport], list[Generated]]:
        self.rounds.append(len(responses))
        return [], [self._grown(response, num_tokens) for response in responses]

    def _grown(self, response: PartialResponse, num_tokens: int) -> Generated:
        partial = response.partial or Generated((), (), (), "aborted")
        kept, wanted = len(partial.token_ids), length(response.seed)
        places = range(kept, min(wanted, kept + num_tokens))
        new = tuple(token(response.seed, place, self.version) for place in places)
        self.num_tokens += len(new)
        finish = ("length" if wanted == MOST else "stop") if kept + len(new) == wanted else "aborted"
        return partial.concat(Generated(new, tuple(map(log_prob, new)), (self.version,) * len(new), finish))


def source(engines: Engines, over_sample_rate: float = 1.0, spare: int = 0, keeps: bool = False) -> PartialSource:
    requests = Requests(prompt, lambda number, sample: number * 100 + sample, Sampling(1.0, MOST, ()), GROUP, spare, keeps)
    return PartialSource(engines, requests, Admission("pace", SPLIT, BATCH), MOST // SPLIT, over_sample_rate)


def train(partial: PartialSource, engines: Engines, iterations: range) -> list[list[PromptGroup]]:
    batches = []
    for iteration in iterations:
        engines.version = iteration
        partial.after_push(iteration)
        batches.append(partial.take(iteration, BATCH)[0])
    return batches


def test_a_long_response_goes_on_in_later_rollouts_while_others_train() -> None:
    engines = Engines()
    batches = train(source(engines), engines, range(12))
    numbers = [[group.index for group in batch] for batch in batches]
    # four prompts are under way; 0 and 3 take three rollouts of four tokens, and nobody waits for them
    assert numbers[:4] == [[1, 2], [4, 5], [0, 3], [7, 8]]
    taken = [number for batch in numbers for number in batch]
    assert len(set(taken)) == len(taken) == 12 * BATCH
    first = next(group for batch in batches for group in batch if group.index == 0)
    assert first.trajectories[0].versions == [0] * 4 + [1] * 4 + [2] * 4
    assert first.trajectories[0].finish == "length"
    for batch in batches:
        for group in batch:
            for sample, response in enumerate(group.trajectories):
                seed = group.index * 100 + sample
                expected = [token(seed, place, version) for place, version in enumerate(response.versions)]
                assert list(response.token_ids) == expected
                assert list(response.log_probs) == [log_prob(token) for token in expected]
                assert len(expected) == length(seed)


def test_no_token_is_older_than_the_rollouts_that_a_response_may_take() -> None:
    engines = Engines()
    for iteration, batch in enumerate(train(source(engines), engines, range(40))):
        oldest = min(min(response.versions) for group in batch for response in group.trajectories)
        assert iteration - oldest <= SPLIT


@pytest.mark.parametrize("rate", [0.0, 0.5, 2.0, 3.0])
def test_over_sampling_keeps_the_bound_and_every_prompt_trains_once(rate: float) -> None:
    engines = Engines()
    partial = source(engines, rate)
    batches = train(partial, engines, range(40))
    taken = sorted(group.index for batch in batches for group in batch)
    left = [group.index for group in partial.snapshot()[0]]
    assert sorted(taken + left) == list(range(len(taken) + len(left)))
    assert len(taken) == 40 * BATCH and len(left) <= rate * BATCH
    for iteration, batch in enumerate(batches):
        assert iteration - min(min(response.versions) for group in batch for response in group.trajectories) <= SPLIT
    # without any to spare an iteration waits for its longest response, and no prompt is left over
    assert bool(left) == bool(rate)


def test_spare_samples_end_a_group_whose_longest_response_is_left_out() -> None:
    steps = {}
    for spare in (0, 1):
        engines = Engines()
        batches = train(source(engines, 0.0, spare), engines, range(12))
        groups = [group for batch in batches for group in batch]
        assert [group.index for group in groups] == list(range(12 * BATCH))
        assert all(len(group.trajectories) == GROUP for group in groups)
        lengths = [len(group.trajectories[0].token_ids) for group in groups]
        # the first sample of every third prompt takes three slices, in which two others have ended
        assert max(lengths) == (3 if spare else MOST)
        steps[spare] = len(engines.rounds)
    assert steps[1] == 12 < steps[0]


@pytest.mark.parametrize("spare", [1, GROUP])
@pytest.mark.parametrize("rate", [1.0, 3.0])
def test_spare_samples_that_are_kept_train_once_in_a_second_group_of_their_prompt(rate: float, spare: int) -> None:
    engines = Engines()
    partial = source(engines, rate, spare, keeps=True)
    batches = train(partial, engines, range(40))
    left = partial.snapshot()[0]
    for iteration, batch in enumerate(batches):
        assert len(batch) == BATCH
        assert iteration - min(min(response.versions) for group in batch for response in group.trajectories) <= SPLIT
    trained: dict[int, list[int]] = {}
    for group in (group for batch in batches for group in batch):
        for sample, response in zip(group.ids, group.trajectories, strict=True):
            seed = group.index * 100 + sample
            expected = [token(seed, place, version) for place, version in enumerate(response.versions)]
            assert list(response.token_ids) == expected and len(expected) == length(seed)
            assert list(response.log_probs) == [log_prob(token) for token in expected]
        trained.setdefault(group.index, []).extend(group.ids)
    # short responses are not preferred: of a prompt that is done, each of the 2 x GROUP samples trained, and trained once
    assert all(len(set(ids)) == len(ids) for ids in trained.values())
    in_flight = {group.index for group in left}
    assert all(sorted(ids) == list(range(2 * GROUP)) for number, ids in trained.items() if number not in in_flight)
    assert set(trained) | in_flight == set(range(partial.snapshot()[1]))
    responses = [trajectory for batch in batches for group in batch for trajectory in group.trajectories]
    started = [sample for group in left for sample in group.samples if sample is not None]
    assert engines.num_tokens == sum(len(response.token_ids) for response in responses + started)


def test_the_first_group_of_a_prompt_does_not_wait_for_the_samples_that_are_kept() -> None:
    engines = Engines()
    batches = train(source(engines, 1.0, 1, keeps=True), engines, range(12))
    taken = [
        (iteration, group.index, group.part, max(len(trajectory.token_ids) for trajectory in group.trajectories))
        for iteration, batch in enumerate(batches)
        for group in batch
    ]
    # prompt 0 is started in iteration 0; its first sample takes three slices, which the second group has
    assert [(iteration, part, longest) for iteration, number, part, longest in taken if number == 0] == [
        (0, 0, 3),
        (2, 1, MOST),
    ]


def test_kept_spare_samples_resume_bit_for_bit(tmp_path: Path) -> None:
    engines = Engines()
    whole = train(source(engines, 1.0, 1, keeps=True), engines, range(9))
    first = source(Engines(), 1.0, 1, keeps=True)
    partial = train(first, first._continue, range(4))
    groups, next_prompt, taken = first.snapshot()
    assert any(group.part for group in groups)
    save_groups(tmp_path / "groups.safetensors", groups)
    second = source(Engines(), 1.0, 1, keeps=True)
    second.restore(load_groups(tmp_path / "groups.safetensors", prompt), next_prompt, taken)
    assert partial + train(second, second._continue, range(4, 9)) == whole


def test_more_prompts_under_way_need_fewer_steps_where_some_responses_are_long() -> None:
    steps = {}
    for rate in (0.0, 1.0):
        engines = Engines()
        train(source(engines, rate), engines, range(30))
        steps[rate] = len(engines.rounds)
    # each call lasts as long as its longest response, up to four tokens
    assert steps[1.0] == 30 < steps[0.0]


def test_a_partial_rollout_resumes_bit_for_bit(tmp_path: Path) -> None:
    engines = Engines()
    whole = train(source(engines), engines, range(9))
    first = source(Engines())
    partial = train(first, first._continue, range(4))
    groups, next_prompt, taken = first.snapshot()
    assert any(not group.is_complete for group in groups)
    save_groups(tmp_path / "groups.safetensors", groups)
    second = source(Engines())
    second.restore(load_groups(tmp_path / "groups.safetensors", prompt), next_prompt, taken)
    assert partial + train(second, second._continue, range(4, 9)) == whole


def test_rejected_prompts_make_room_for_further_ones_in_the_same_iteration() -> None:
    engines = Engines()
    partial = source(engines)
    partial.after_push(0)
    taken = [group.index for group in partial.take(0, BATCH)[0]]
    partial.reject(2)
    more = [group.index for group in partial.take(0, 2)[0]]
    assert (taken, more) == ([1, 2], [4, 5])


# --- what training makes of the versions ------------------------------------------------------------------------------------


def test_tokens_carry_their_versions_into_the_data_plane() -> None:
    response = Generated((5, 6, 9), (-0.5, -1.0, 0.0), (1, 1, 2), "stop")
    group = PromptGroup(7, prompt(7), 1, [Trajectory.from_response(prompt(7)["prompt_ids"], response)])
    columns = _response_rows([group])
    assert columns["weight_versions"][0].tolist() == [1, 1, 2]
    assert columns["input_ids"][0].tolist() == [7, 5, 6, 9]
    assert columns["sequence_lengths"][0].tolist() == [1, 3]
    assert columns["response_mask"][0].tolist() == [True] * 3
    assert columns["truncated"] == [False]
    assert "rewards" not in columns


def test_tokens_of_the_future_and_of_the_far_past_are_refused() -> None:
    rows = [torch.tensor([3, 4]), torch.tensor([5])]
    check_versions(rows, 5, 2, iteration=5)
    with pytest.raises(RuntimeError, match=r"iteration 6: responses come from weights \[3\], not 4 to 5"):
        check_versions(rows, 5, 1, iteration=5)
    with pytest.raises(RuntimeError, match=r"weights \[5\], not 2 to 4"):
        check_versions(rows, 4, 2, iteration=4)
    with pytest.raises(RuntimeError, match=r"weights \[3, 4\], not 5"):
        check_versions(rows, 5, 0, iteration=5)


def test_staleness_is_measured_token_by_token() -> None:
    rows = [torch.tensor([5] * 6 + [4] * 3), torch.tensor([2])]
    results = _staleness_metrics(rows, 5).results()
    assert results["rollout/staleness_p50"] == 0
    assert results["rollout/staleness_p90"] == 1
    assert results["rollout/staleness_p99"] == results["rollout/staleness_max"] == 3
    assert results["rollout/staleness_mean"] == pytest.approx(6 / 10)
    assert results["rollout/mixed_fraction"] == 0.5
    assert _staleness_metrics([torch.tensor([], dtype=torch.int64)], 5).results() == {}


def test_tokens_that_were_not_sampled_have_no_age() -> None:
    rows = [torch.tensor([5, -1, -1, 4]), torch.tensor([-1, 5])]
    check_versions(rows, 5, 1, iteration=5)
    sampled = [torch.tensor([5, 4]), torch.tensor([5])]
    assert _staleness_metrics(rows, 5).results() == _staleness_metrics(sampled, 5).results()


@pytest.mark.parametrize(("limit", "young"), [(None, [1, 1, 1]), (2, [1, 1, 1]), (1.5, [0, 1, 1]), (0, [0, 0, 1])])
def test_old_tokens_can_be_left_out(limit: float | None, young: list[int]) -> None:
    rows = [torch.tensor([3, 4, 5]), torch.tensor([5])]
    assert _young_tokens(rows, 5, limit, 4).int().tolist() == [[*young, 0], [1, 0, 0, 0]]


def test_partial_responses_fit_together() -> None:
    first = Generated((1,), (-1.0,), (0,), "aborted")
    assert first.concat(Generated((2,), (-2.0,), (1,), "stop")) == Generated((1, 2), (-1.0, -2.0), (0, 1), "stop")
    with pytest.raises(ValueError, match="1 tokens has 0 log-probs"):
        dataclasses.replace(first, log_probs=())
