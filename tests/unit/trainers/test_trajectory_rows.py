"""Trajectories on their way to training: as rows, in a checkpoint, while they are interrupted, and what they earn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, JumpingClock

from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rewards.totals import TRAJECTORY_PART, add_trajectory_rewards
from mindspeed_rl.rollout.agents.conversation import AgentConversation, TrajectoryLimits
from mindspeed_rl.rollout.agents.loop import AgentLoop, AgentRunner, LoopSettings, Task
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.trajectory import Segment, TokenSequence, Trajectory
from mindspeed_rl.trainers.admission import Admission
from mindspeed_rl.trainers.group_rollout import _response_rows, _version_spans
from mindspeed_rl.trainers.group_sources import Requests, StreamingSource
from mindspeed_rl.trainers.prompt_groups import PromptGroup, load_groups, save_groups
from mindspeed_rl.workers.responses import build_response_columns, compute_response_metrics


def prompt(number: int) -> PromptItem:
    return PromptItem(prompt_ids=[number, 1], label=str(number), columns={})


def sampled_segment(*tokens: int, version: int = 3) -> Segment:
    return Segment.from_generated(Generated(tokens, (-0.25,) * len(tokens), (version,) * len(tokens), "stop"))


SPLIT = Trajectory(
    (
        TokenSequence((7, 1), (sampled_segment(11, 12), Segment.from_context((21,)), sampled_segment(13, version=4))),
        TokenSequence((7, 1, 11, 22), (sampled_segment(14),)),
    ),
    "length",
    turn_rewards=(None, 0.5, 1.0),
    final_reward=2.0,
    metrics={"turns": 3.0, "tool_call_num": 1.0, "tool_calls_failed/timeout": 1.0},
)


def test_a_row_has_sampled_and_given_tokens_with_a_single_mask() -> None:
    columns = build_response_columns([SPLIT, Trajectory.from_response((5,), Generated((6, 7), (-1.0, -2.0), (9, 9), "stop"))])
    assert columns["responses"][0].tolist() == [11, 12, 21, 13, 14]
    assert columns["response_mask"][0].tolist() == [True, True, False, True, True]
    assert columns["rollout_log_probs"][0].tolist() == [-0.25, -0.25, 0.0, -0.25, -0.25]
    assert columns["weight_versions"][0].tolist() == [3, 3, -1, 4, 3]
    assert columns["input_ids"][0].tolist() == [7, 1, 11, 12, 21, 13, 7, 1, 11, 22, 14]
    assert [lengths.tolist() for lengths in columns["sequence_lengths"]] == [[2, 4, 4, 1], [1, 2]]
    assert columns["truncated"] == [True, False]
    assert columns["response_mask"][1].tolist() == [True, True] and columns["trajectories"][1] == {}


def test_figures_count_trajectories_and_sampled_tokens_once() -> None:
    results = compute_response_metrics([SPLIT, SPLIT]).results()
    assert results["rollout/tokens"] == 8 and results["response_length/mean"] == 5 and results["prompt_length/max"] == 2
    assert results["tool_call_num/mean"] == results["tool_call_num/max"] == 1 and results["turns/mean"] == 3
    assert results["tool_calls_failed/timeout"] == 2
    assert results["rollout/sequences_mean"] == 2 and results["rollout/failed_trajectories"] == 0


def test_the_last_turn_begins_behind_what_was_told_last() -> None:
    assert SPLIT.reward_columns()["last_turn_start"] == 4
    told_last = Trajectory(
        (TokenSequence((7,), (sampled_segment(11), Segment.from_context((21, 22)), sampled_segment(13))),),
        "stop",
        metrics={"turns": 2.0},
    )
    assert told_last.token_ids[told_last.reward_columns()["last_turn_start"] :] == [13]


def test_trajectories_of_a_checkpoint_are_those_that_were_written(tmp_path: Path) -> None:
    groups = [
        PromptGroup(4, prompt(4), 3, [SPLIT, None], None),
        PromptGroup(
            5, prompt(5), 3, [Trajectory.from_response((5, 1), Generated((6,), (-1.0,), (3,), "aborted")), SPLIT], None
        ),
    ]
    save_groups(tmp_path / "groups.safetensors", groups)
    assert load_groups(tmp_path / "groups.safetensors", prompt) == groups
    assert groups[0].oldest_version == 3 and _version_spans(SPLIT.sampled_versions) == [(3, 2), (4, 1), (3, 1)]
    assert "rewards" not in _response_rows([PromptGroup(4, prompt(4), 3, [SPLIT, SPLIT])])


# --- what a trajectory earns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("which", "earned"), [("both", 3.5), ("turns", 1.5), ("final", 2.0)])
def test_rewards_of_turns_and_of_the_final_state_are_one_more_part(which: Any, earned: float) -> None:
    scored = RewardResult(1.0, {"acc": 1.0})
    (reward,) = add_trajectory_rewards([scored], [SPLIT.reward_columns()], which=which, weight=2.0)
    assert reward.parts == {"acc": 1.0, TRAJECTORY_PART: earned} and reward.total == 1.0 + 2.0 * earned


def test_what_nobody_gave_changes_nothing_and_a_failure_has_no_score() -> None:
    scored, silent, failed = (
        RewardResult(1.0, {"acc": 1.0}),
        RewardResult(None, state="skipped"),
        RewardResult(None, state="timeout"),
    )
    nothing = Trajectory((), "stop", turn_rewards=(None,), metrics={"turns": 1.0}).reward_columns()
    assert add_trajectory_rewards([scored], [nothing], which="both") == [scored]
    assert add_trajectory_rewards([scored], [{}], which="both") == [scored]
    assert add_trajectory_rewards([scored], [SPLIT.reward_columns()], which="none") == [scored]
    (given,) = add_trajectory_rewards([silent], [SPLIT.reward_columns()], which="both")
    assert (given.total, given.state) == (3.5, "ok")
    zero = Trajectory((), "stop", turn_rewards=(0.0,)).reward_columns()
    assert add_trajectory_rewards([silent], [zero], which="both")[0].total == 0.0
    assert add_trajectory_rewards([failed], [SPLIT.reward_columns()], which="both") == [failed]
    broken = Trajectory((), "stop", failure="environment: KeyError: 'x'").reward_columns()
    (reward,) = add_trajectory_rewards([scored], [broken], which="both")
    assert (reward.total, reward.state, reward.error) == (None, "failed", "environment: KeyError: 'x'")
    odd = Trajectory((), "stop", turn_rewards=(math.inf,)).reward_columns()
    assert add_trajectory_rewards([scored], [odd], which="both")[0].state == "failed"


# --- beside training ------------------------------------------------------------------------------------------------------


@pytest.fixture
def clocks() -> Iterator[list[JumpingClock]]:
    """What runs on them ends with the test."""
    results: list[JumpingClock] = []
    yield results
    for clock in results:
        clock.end()


class Plain:
    """A chat template of tokens: 90 stands in front of what is said."""

    def render_next(self, messages: Any, last_token: int, **kind: Any) -> tuple[int, ...]:
        return (90, *(ord(char) for message in messages for char in message["content"]))


class Letters:
    """A tokenizer of a kind."""

    eos_token_id = None

    def decode(self, tokens: list[int], **options: Any) -> str:
        return " ".join(map(str, tokens))


class TwoTurns(AgentLoop):
    """Answers, is asked once more, and answers."""

    async def run(self, task: Task, engine: Any, tools: Any) -> Trajectory:
        turns: Any = Plain()
        tokenizer: Any = Letters()
        limits = TrajectoryLimits(500, 500, 500)
        conversation = AgentConversation(task.prompt_ids, task.sampling, task.seed, engine, turns, tokenizer, limits)
        turn = await conversation.reply()
        if conversation.can_continue(turn) and conversation.add_messages([{"role": "user", "content": "x"}]):
            await conversation.reply()
        return conversation.end()


@pytest.mark.parametrize("interrupts", [True, False])
def test_turns_go_on_over_pushes_and_begin_anew_from_a_checkpoint(
    tmp_path: Path, clocks: list[JumpingClock], interrupts: bool
) -> None:
    unset: Any = LoopSettings.__new__(LoopSettings)

    def started() -> tuple[StreamingSource, JumpingClock, FakeEngine]:
        clock, engine = JumpingClock(), FakeEngine(lambda seed: 4 + seed % 5)
        admission = Admission("pace", 2, 2)
        requests = Requests(prompt, lambda number, sample: number * 100 + sample, Sampling(1.0, 64, ()), 2)

        async def score(group: PromptGroup) -> list[RewardResult]:
            return [RewardResult(1.0, {"acc": 1.0}) for _ in group.samples]

        agents = AgentRunner(TwoTurns(unset))
        source = StreamingSource(engine, agents, clock, requests, admission, score, interrupts=interrupts, timeout_s=1000.0)
        clocks.append(clock)
        return source, clock, engine

    source, clock, engine = started()
    taken: list[PromptGroup] = []
    for version in range(4):
        if version:
            source.before_push()
        engine.version = version
        source.after_push(version)
        taken += source.take(version, 2)[0]
        clock.run(asyncio.sleep(3))
    for group in taken:
        for trajectory in group.trajectories:
            assert trajectory.metrics["turns"] == 2 and trajectory.sampled.count(False) == 2
            assert len(trajectory.sampled_versions) == trajectory.sampled.count(True)
    groups, next_prompt, num_taken = source.snapshot()
    assert any(sample is None for group in groups for sample in group.samples)
    assert all(sample is None or sample.finish != "aborted" for group in groups for sample in group.samples)
    save_groups(tmp_path / "groups.safetensors", groups)

    def gone_on() -> list[PromptGroup]:
        other, _, engine = started()
        other.restore(load_groups(tmp_path / "groups.safetensors", prompt), next_prompt, num_taken)
        engine.version = 4
        other.after_push(4)
        return other.take(4, 2)[0]

    assert gone_on() == gone_on()


def test_samples_with_metrics_of_many_names_have_500_of_them_and_the_number_of_the_others() -> None:
    samples = [replace(SPLIT, metrics={f"m{index}_{name}": 1.0 for name in range(100)}) for index in range(7)]
    results = compute_response_metrics(samples).results()
    assert sum(name.endswith("/mean") and name.startswith("m") for name in results) == 500
    assert results["rollout/metrics_left_out"] == 200
