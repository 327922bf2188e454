"""Seconds an iteration by mode, computed event by event."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mindspeed_rl.diagnostics.mode_simulation import (
    Elastic,
    Mode,
    Moving,
    PhaseTimes,
    build_elastic_table,
    build_moving_table,
    build_partial_table,
    build_table,
    build_tail_table,
    simulate,
    simulate_partial,
)
from mindspeed_rl.trainers.admission import Admission, QueueMarks

ROOT = Path(__file__).parents[3]

#: all lengths are cut to the same; on half of the devices a batch takes (1 + 2) / 2 of generate_s, and training twice train_s
EQUAL = PhaseTimes("equal", 10.0, 4.0, 1.0, 4, 2, max_length=0.001)


def seconds(times: PhaseTimes, mode: Mode) -> float:
    return simulate(times, mode).iteration_s


def test_phases_that_take_turns_take_their_sum() -> None:
    assert seconds(EQUAL, Mode(Admission("pace", 0, 4), False, 1.0)) == pytest.approx(10 + 4 + 1)


@pytest.mark.parametrize(("train_s", "longer"), [(4.0, 15.0), (10.0, 20.0)])
def test_phases_beside_each_other_take_the_longer_one_and_the_push(train_s: float, longer: float) -> None:
    times = PhaseTimes("equal", 10.0, train_s, 1.0, 4, 2, max_length=0.001)
    outcome = simulate(times, Mode(Admission("wait", 1, 4), False, 0.5))
    assert outcome.iteration_s == pytest.approx(longer + 1)
    assert outcome.trainer_idle == pytest.approx((longer - 2 * train_s) / (longer + 1), abs=1e-6)
    assert outcome.staleness == 1.0


def test_the_published_asynchronous_run_comes_out_within_a_tenth() -> None:
    # Qwen3-4B on A3, devices apart in both: 178.3 s of which trainers waited 97.2, asynchronous 104.0; half of the devices each
    # makes a batch take 1.5 and training 2 of what they would on all of them, which is turned back here
    times = PhaseTimes("Qwen3-4B", 97.2 / 1.5, (178.3 - 97.2) / 2, 0.0, 32, 8, max_length=0.001)
    assert seconds(times, Mode(Admission("wait", 0, 32), False, 0.5)) == pytest.approx(178.3)
    assert seconds(times, Mode(Admission("wait", 1, 32), False, 0.5)) == pytest.approx(104.0, rel=0.1)


def test_a_long_tail_is_hidden_by_what_comes_after_it() -> None:
    tail = PhaseTimes("tail", 10.0, 3.0, 0.0, 16, 4)
    waiting = simulate(tail, Mode(Admission("wait", 1, 16), False, 0.625))
    streaming = simulate(tail, Mode(Admission("pace", 2, 16), True, 0.625))
    assert streaming.iteration_s < 0.95 * waiting.iteration_s


def test_a_partial_rollout_of_one_slice_is_a_synchronous_one() -> None:
    tail = PhaseTimes("tail", 10.0, 3.0, 1.0, 16, 4)
    expected = simulate(tail, Mode(Admission("pace", 0, 16), False, 1.0))
    result = simulate_partial(tail, 1, 0.0)
    assert result.iteration_s == pytest.approx(expected.iteration_s) and result.staleness == expected.staleness == 0.0
    assert result.trainer_idle == pytest.approx(expected.trainer_idle)


def test_slices_pay_with_more_prompts_under_way() -> None:
    tail = PhaseTimes("tail", 10.0, 3.0, 1.0, 16, 4)
    alone, spare = simulate_partial(tail, 4, 0.0), simulate_partial(tail, 4, 1.0)
    assert spare.iteration_s < 0.9 * alone.iteration_s and 0.0 == alone.staleness < spare.staleness <= 4


def test_engines_without_room_for_all_samples_gain_by_starting_the_longest_first() -> None:
    tail = PhaseTimes("tail", 10.0, 0.0, 0.0, 32, 8)
    sync = Mode(Admission("pace", 0, 32), False, 1.0)
    seconds = {
        (places, first): simulate(
            tail, dataclasses.replace(sync, places=places, longest_first=first), by_prompt=True
        ).iteration_s
        for places in (1.0, 0.25)
        for first in (False, True)
    }
    assert seconds[1.0, True] == pytest.approx(seconds[1.0, False]) and seconds[0.25, True] < 0.95 * seconds[0.25, False]


def test_first_samples_say_less_than_an_earlier_epoch() -> None:
    tail = PhaseTimes("tail", 10.0, 0.0, 0.0, 32, 8)
    sync = Mode(Admission("pace", 0, 32), False, 1.0, places=0.25)
    seconds = {
        (first, earlier): simulate(
            tail, dataclasses.replace(sync, first_samples=first, longest_first=earlier), by_prompt=True
        ).iteration_s
        for first in (False, True)
        for earlier in (False, True)
    }
    assert seconds[False, True] < seconds[True, False] < seconds[False, False]
    assert seconds[True, True] == pytest.approx(seconds[False, True], rel=0.02)


def test_spare_samples_shorten_a_rollout_by_its_longest_responses_and_cost_their_tokens() -> None:
    tail = PhaseTimes("tail", 10.0, 0.0, 0.0, 32, 8)
    sync = Mode(Admission("pace", 0, 32), False, 1.0)
    without, spare = simulate(tail, sync), simulate(tail, dataclasses.replace(sync, num_spare=2))
    assert without.aborted == 0.0 < spare.aborted < 0.5 and spare.iteration_s < without.iteration_s


@pytest.mark.parametrize("page", ["docs/mode_figures.md", "docs/zh/mode_figures.md"])
def test_the_documented_table_is_the_computed_one(page: str, computed: str) -> None:
    rows = [line for line in computed.splitlines() if line]
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [row for row in rows if row not in text] == []


def test_trainers_that_wait_generate_with_all_devices_after_the_wake_up() -> None:
    # a length of all 8 responses takes 10 s on all devices, half of it for the fixed part: 5 + 5 / 0.25 = 25 s on a quarter
    times, split = dataclasses.replace(EQUAL, train_s=3.0), Mode(Admission("pace", 0, 4), True, 0.25)
    assert seconds(times, split) == pytest.approx(25 + 3 / 0.75 + 1)
    # in 2.5 s a tenth is generated, then the others in 10 s a length
    elastic = dataclasses.replace(split, elastic=Elastic(QueueMarks(2, 4), 2.5))
    outcome = simulate(times, elastic)
    assert outcome.iteration_s == pytest.approx(2.5 + 0.9 * 10 + 3 / 0.75 + 1) and outcome.helped == 1.0
    # with none below the mark nothing changes
    assert seconds(times, dataclasses.replace(split, elastic=Elastic(QueueMarks(0, 4), 2.5))) == seconds(times, split)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/mode_figures.md", "docs/zh/mode_figures.md"])
def test_the_documented_table_of_elastic_rollouts_is_the_computed_one(page: str) -> None:
    assert build_elastic_table() in (ROOT / page).read_text()


def test_when_devices_move_does_not_depend_on_how_long_a_move_takes() -> None:
    # long responses set the pace: devices move, and back; with a patience of 1 each iteration decides
    tail = PhaseTimes("tail", 40.0, 36.0, 1.0, 16, 4)
    split = Mode(Admission("pace", 1, 16), True, 0.375)
    for patience in (1, 3):
        outcomes = [
            simulate(tail, dataclasses.replace(split, moving=Moving(0.125, 1.0, 0.2, patience, move_s)), iterations=40)
            for move_s in (0.0, 1000.0)
        ]
        assert outcomes[0].moves == outcomes[1].moves > 0, patience
        # moves before the fourth iteration are in no mean
        longer_s = (outcomes[1].iteration_s - outcomes[0].iteration_s) * 40
        counted = round(longer_s / 1000.0)
        assert longer_s == pytest.approx(1000.0 * counted) and 0 < counted <= outcomes[0].moves


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/mode_figures.md", "docs/zh/mode_figures.md"])
def test_the_documented_table_of_moving_devices_is_the_computed_one(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [row for row in build_moving_table().splitlines() if row not in text] == []


def test_devices_train_where_the_trainers_are_waited_for() -> None:
    # training takes six times as long: engines on half of the devices always have the next prompts complete
    slow_training = PhaseTimes("slow training", 100.0, 600.0, 1.0, 4, 2)
    half = Mode(Admission("pace", 1, 4), True, 0.5)
    fixed = simulate(slow_training, half, iterations=40)
    moves = {
        patience: simulate(
            slow_training, dataclasses.replace(half, moving=Moving(0.25, 1.0, 0.2, patience, 300.0)), iterations=40
        )
        for patience in (1, 20)
    }
    assert fixed.moves == 0 and {outcome.moves for outcome in moves.values()} == {1}
    # on 4 / 8 training takes 1200 s, on 6 / 8 800 s; the move is before the iterations that count, which are those after the
    # first three, or before the 22nd, as the first has no level
    assert fixed.iteration_s == pytest.approx(1201.0)
    assert moves[1].iteration_s == pytest.approx(801.0)
    assert moves[20].iteration_s == pytest.approx((18 * 1201.0 + 300.0 + 22 * 801.0) / 40)


@pytest.fixture(scope="module")
def computed() -> str:
    return f"{build_table()}\n\n{build_partial_table()}\n\n{build_tail_table()}"
