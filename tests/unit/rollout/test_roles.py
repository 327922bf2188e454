"""Episodes of several roles on a scripted engine: whose token is whose, and what it earns against whom."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_agent_loops import PROMPT, TOKENIZER, Speaker, settings, task

from mindspeed_rl.algorithms.interfaces import AdvantageInputs
from mindspeed_rl.config import RLConfig, build_run_config
from mindspeed_rl.config.keys.rl import OpponentKeys, Resource
from mindspeed_rl.dataplane.transfer_dock import TransferDock
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rollout.agents import load_agent_loop
from mindspeed_rl.rollout.agents.conversation import TrajectoryLimits
from mindspeed_rl.rollout.opponents import Opponent, choose_held_out_opponent, choose_opponent, list_snapshots
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.run.draft import draft
from mindspeed_rl.trainers.advantages import Advantages, TrainBatch
from mindspeed_rl.trainers.rl_setup import DATA_PLANE_USERS
from mindspeed_rl.trainers.role_advantages import compute_role_advantages
from mindspeed_rl.trainers.schedule import Schedule
from mindspeed_rl.workers.responses import build_response_columns
from mindspeed_rl.workers.role_adapters import build_adapter_columns


class Debate:
    """Two speakers and a judge: pro speaks twice, con once; the judge never where con gives up."""

    roles = ("pro", "con", "judge")

    def reset(self, row):
        self.said = []
        return "pro", [{"role": "user", "content": f"for {row['label']}"}]

    async def step(self, role, text):
        self.said.append((role, text))
        if len(self.said) == 1:
            return {}, "con", [{"role": "system", "content": "against"}, {"role": "user", "content": text}]
        if len(self.said) == 2:
            return {"con": -0.5}, "pro", [{"role": "user", "content": text}]
        if len(self.said) == 3 and "give up" not in self.said[1][1]:
            return {"pro": 0.25}, "judge", []
        return {"pro": 1.0, "con": -1.0, "judge": 0.5}, None, []


class Lonely:
    """The first role ends the game before the second speaks."""

    roles = ("pro", "con")

    def reset(self, row):
        return "pro", []

    def step(self, role, text):
        return {"pro": 1.0}, None, []


class Wrong:
    roles = ("pro",)

    def reset(self, row):
        return ("pro", []) if row["label"] == "42" else ("con", [])

    def step(self, role, text):
        return {"pro": float("nan")}, None, []


@pytest.fixture(autouse=True)
def games(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "games", SimpleNamespace(Debate=Debate, Lonely=Lonely, Wrong=Wrong, Nothing=object))


def play(engine: Speaker, name: str = "Debate", **changes: Any) -> Trajectory:
    loop = load_agent_loop("roles")(settings(environment=f"games:{name}", limits=TrajectoryLimits(9000, 1000, 4000)))
    return asyncio.run(loop.run(replace(task(), **changes), engine, None))


def test_each_role_has_its_own_context_and_every_token_is_that_which_was_sampled() -> None:
    engine = Speaker(["A", "BB", "CCC", "DDDD"])
    trajectory = play(engine)
    assert "for 42" in engine.asked[0] and "against" not in engine.asked[0]
    assert "against" in engine.asked[1] and "A<|im_end|>" in engine.asked[1] and "for 42" not in engine.asked[1]
    assert engine.asked[2].startswith(engine.asked[0] + "A<|im_end|>") and "BB" in engine.asked[2]
    assert engine.asked[3] == TOKENIZER.decode(list(PROMPT))  # no messages: the row's prompt
    assert len(set(engine.seeds)) == 4 and 5 not in engine.seeds
    ids = trajectory.token_ids
    spans = [(event.role, TOKENIZER.decode(ids[event.start : event.stop])) for event in trajectory.events]
    assert spans == [("pro", "A<|im_end|>"), ("pro", "CCC<|im_end|>"), ("con", "BB<|im_end|>"), ("judge", "DDDD<|im_end|>")]
    sampled = {place for event in trajectory.events for place in range(event.start, event.stop)}
    assert [place in sampled for place in range(len(ids))] == trajectory.sampled
    assert [event.reward for event in trajectory.events] == [None, 1.25, -1.5, 0.5]
    assert trajectory.turn_rewards == (None, 1.25, -1.5, 0.5) and len(trajectory.sequences) == 3
    # contexts as the engine read them: prompt and tokens before each turn, sequence by sequence
    contexts = [TOKENIZER.decode(list(sequence.prompt_ids)) for sequence in trajectory.sequences]
    assert contexts == [engine.asked[0], engine.asked[1], engine.asked[3]]
    assert trajectory.metrics == {"turns": 4.0, "pro_reward": 1.25, "con_reward": -1.5, "judge_reward": 0.5}
    assert trajectory.finish == "stop" and not trajectory.failure


def test_a_role_without_room_ends_the_episode_when_it_is_to_speak_again() -> None:
    trajectory = play(Speaker(["AAAA", "B"]), sampling=Sampling(1.0, 3, (1,)))
    assert [event.role for event in trajectory.events] == ["pro", "con"]
    assert trajectory.finish == "length" and trajectory.turn_rewards == (None, -0.5) and not trajectory.failure


@pytest.mark.parametrize(
    ("name", "label", "text"),
    [
        ("Wrong", "42", "the reward of pro must be a finite number, not nan"),
        ("Wrong", "7", "'con' is none of its roles pro"),
    ],
)
def test_a_wrong_environment_fails_the_sample_and_says_why(name: str, label: str, text: str) -> None:
    trajectory = play(Speaker(["A"]), name, label=label)
    assert text in trajectory.failure and trajectory.sequences


def test_an_environment_without_roles_and_too_little_room_are_refused() -> None:
    with pytest.raises(ValueError, match="games:Nothing has no roles and no reset and no step"):
        load_agent_loop("roles")(settings(environment="games:Nothing"))
    with pytest.raises(ValueError, match="leaves 2000 tokens for 3 roles, whose further prompts have up to 1000"):
        load_agent_loop("roles")(settings(environment="games:Debate"))


class Adapters(Speaker):
    """A speaker that notes which adapter each turn names."""

    async def generate(self, prompt_ids: Any, sampling: Sampling, seed: int, partial: Any = None) -> Any:
        self.named = [*getattr(self, "named", []), sampling.adapter]
        return await super().generate(prompt_ids, sampling, seed, partial)


def test_an_opponents_turns_are_sampled_by_its_snapshot_and_are_no_part_of_the_row() -> None:
    engine = Adapters(["A", "BB", "CCC", "DDDD"])
    trajectory = play(engine, opponent=Opponent("con", 20))
    assert engine.named == ["", "version_0000020", "", ""]
    assert "BB" in engine.asked[2]  # pro reads what the environment passes on
    assert [event.role for event in trajectory.events] == ["pro", "pro", "judge"]
    sampled = [token for token, is_sampled in zip(trajectory.token_ids, trajectory.sampled) if is_sampled]
    assert TOKENIZER.decode(sampled) == "A<|im_end|>CCC<|im_end|>DDDD<|im_end|>" and len(trajectory.sequences) == 2
    # the opponent's rewards are in no total
    assert trajectory.turn_rewards == (None, 1.25, 0.5)
    opponent = {"opponent_version": 20.0, "opponent_reward": -1.5, "opponent_turns": 1.0, "reward_against_opponent": 1.75}
    assert trajectory.metrics == {"turns": 3.0, "pro_reward": 1.25, "judge_reward": 0.5, **opponent}


def test_each_role_samples_with_its_adapter_and_an_opponent_with_that_of_its_role() -> None:
    adapters = {"pro": "", "con": "other", "judge": "other"}
    loop = load_agent_loop("roles")(
        settings(environment="games:Debate", limits=TrajectoryLimits(9000, 1000, 4000), role_adapters=adapters)
    )
    engine = Adapters(["A", "BB", "CCC", "DDDD"])
    trajectory = asyncio.run(loop.run(task(), engine, None))
    assert engine.named == ["", "other", "", "other"]
    assert [sequence.role for sequence in trajectory.sequences] == ["pro", "con", "judge"]
    keys = replace(RLConfig(actor_resource=Resource(num_npus=1)), role_adapters={"pro": "x", "con": "y", "judge": "y"})
    assert keys.engine_adapters == {"pro": "", "con": "y", "judge": "y"}
    column = build_adapter_columns(keys, [trajectory, play(Speaker(["A"]), "Lonely", opponent=Opponent("pro", 0))])
    assert [row.tolist() for row in column["sequence_adapters"]] == [[0, 1, 1], [0]]
    for role, expected in (("con", ["", "version_0000020/other", "", "other"]), ("pro", ["version_0000020", "other"] * 2)):
        engine = Adapters(["A", "BB", "CCC", "DDDD"])
        asyncio.run(loop.run(replace(task(), opponent=Opponent(role, 20)), engine, None))
        assert engine.named == expected


@pytest.mark.parametrize("adapters", [{"pro": "a"}, {"pro": "a", "con": "b", "judge": "c", "foe": "d"}])
def test_adapters_of_other_roles_than_the_environments_are_refused(adapters: dict[str, str]) -> None:
    limits = TrajectoryLimits(9000, 1000, 4000)
    with pytest.raises(ValueError, match="role_adapters names pro.*, and the environment's roles are pro, con, judge"):
        load_agent_loop("roles")(settings(environment="games:Debate", role_adapters=adapters, limits=limits))


def test_an_episode_that_the_opponent_ends_alone_has_nothing_to_train() -> None:
    trajectory = play(Speaker(["A"]), "Lonely", opponent=Opponent("pro", 0))
    assert not trajectory.failure and not any(trajectory.sampled) and trajectory.sequences[0].prompt_ids == PROMPT
    assert trajectory.metrics["opponent_reward"] == 1.0 and trajectory.metrics["reward_against_opponent"] == 0.0


def test_opponents_that_the_environment_does_not_have_are_refused() -> None:
    limits = TrajectoryLimits(9000, 1000, 4000)
    with pytest.raises(ValueError, match="opponents.roles has 'foe', and the environment's roles are pro, con, judge"):
        load_agent_loop("roles")(settings(environment="games:Debate", opponent_roles=("con", "foe"), limits=limits))
    with pytest.raises(ValueError, match="'pro', the only role of the environment: no role would be left to train"):
        load_agent_loop("roles")(settings(environment="games:Wrong", opponent_roles=("pro",), limits=limits))


@pytest.mark.parametrize(
    ("version", "expected"), [(0, (0,)), (4, (0,)), (5, (0, 5)), (14, (0, 5, 10)), (15, (0, 10, 15)), (31, (0, 25, 30))]
)
def test_the_snapshots_of_a_version_are_the_first_and_the_last_of_the_interval(version: int, expected: tuple) -> None:
    assert list_snapshots(version, OpponentKeys(roles=["pro"], interval=5, size=2)) == expected


def test_the_choice_of_an_opponent_has_the_shares_that_the_keys_name() -> None:
    def count(**changes: Any) -> Counter:
        keys = OpponentKeys(**{"roles": ["pro", "con"], "share": 0.25, **changes})
        return Counter(choose_opponent(keys, (0, 10, 20), f"seed/{index}") for index in range(4000))

    uniform = count()
    assert uniform[None] == pytest.approx(3000, abs=120)
    assert len(uniform) == 7 and all(uniform[each] == pytest.approx(1000 / 6, abs=50) for each in uniform if each)
    assert set(count(share=1.0, choice="first", roles=["con"])) == {Opponent("con", 0)}
    assert set(count(share=1.0, choice="latest", roles=["con"])) == {Opponent("con", 20)}
    recent = count(share=1.0, choice="recent", roles=["con"])
    for version, part in ((0, 1 / 7), (10, 2 / 7), (20, 4 / 7)):
        assert recent[Opponent("con", version)] == pytest.approx(4000 * part, abs=130)
    assert count(share=0.0) == {None: 4000} and count(roles=[]) == {None: 4000}
    # evaluations: the role by the prompt, the weights by the key
    keys = OpponentKeys(roles=["pro", "con"])
    assert [choose_held_out_opponent(keys, (0, 10), index) for index in (0, 1)] == [Opponent("pro", 0), Opponent("con", 0)]
    assert choose_held_out_opponent(replace(keys, evaluation="latest"), (0, 10), 0) == Opponent("pro", 10)
    assert choose_held_out_opponent(replace(keys, evaluation="none"), (0, 10), 0) is None


def objective() -> Any:
    tree = {"megatron_training": {"stage": "ray_grpo"}, "actor_config": {}, "generate_config": {}}
    rl = {"actor_resource": {"num_npus": 1}, "n_samples_per_prompt": 2, "adv_estimator": "group_norm"}
    return draft(build_run_config({**tree, "rl_config": rl})).objective


def test_a_role_is_compared_with_itself_in_the_samples_of_the_prompt() -> None:
    """Two prompts of two samples; in the last the judge has not spoken. Other rewards of a row are all roles' own."""
    events = [
        [("pro", 0, 2, 1.0), ("con", 3, 4, -1.0), ("judge", 4, 5, 0.5)],
        [("pro", 0, 1, -1.0), ("pro", 2, 3, 0.5), ("con", 3, 5, 1.0), ("judge", 5, 6, 0.5)],
        [("pro", 0, 1, 1.0), ("con", 1, 2, -1.0), ("judge", 2, 3, 1.0)],
        [("pro", 0, 1, 0.0), ("con", 1, 2, -1.0)],
    ]
    others, weight = [0.25, 0.0, 0.0, 1.0], 2.0  # of a reward function that reads the whole row
    totals = [other + weight * sum(reward for *_, reward in row) for other, row in zip(others, events)]
    mask = torch.zeros(4, 6, dtype=torch.bool)
    for index, row in enumerate(events):
        for _, start, stop, _ in row:
            mask[index, start:stop] = True
    rows = [
        {"events": [{"name": "model", "role": role, "start": a, "stop": b, "reward": r} for role, a, b, r in row]}
        for row in events
    ]
    inputs = AdvantageInputs(torch.tensor(totals), mask, group_size=2)
    goal = objective()
    advantages, returns, metrics = compute_role_advantages(inputs, rows, goal, weight=weight)
    expected = torch.zeros(4, 6, dtype=torch.float64)
    for first in (0, 2):
        for role in ("pro", "con", "judge"):
            group = {
                index: others[index] + weight * sum(r for name, *_, r in events[index] if name == role)
                for index in (first, first + 1)
                if any(name == role for name, *_ in events[index])
            }
            values = torch.tensor(list(group.values()), dtype=torch.float64)
            std = float(values.std()) if len(values) > 1 else 0.0
            for index, value in group.items():
                scaled = (value - float(values.mean())) / (std + goal.adv_epsilon)
                for name, start, stop, _ in events[index]:
                    if name == role:
                        expected[index, start:stop] = scaled
    torch.testing.assert_close(advantages.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(advantages, returns) and not advantages[~mask].any()
    results = metrics.results()
    assert results["roles/con/reward"] == pytest.approx((0.25 - 2 + 2 - 2 + 1 - 2) / 4)
    assert results["roles/judge/tokens"] == 1.0 and advantages[2, 2] == 0.0  # the only one of its group


class Rows:
    """Two rows, as the data plane has them; keeps what is put."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._dock = TransferDock(1, 2, DATA_PLANE_USERS)
        self._dock.put(columns, range(2))
        self.written: dict[str, Any] = {}

    def get(self, consumer: str, columns: list[str], *, indexes: range, timeout_s: float) -> Any:
        return self._dock.get(consumer, columns, indexes=list(indexes))

    def put(self, data: dict[str, Any], indexes: range) -> None:
        self.written |= data


@pytest.mark.parametrize("trains", [True, False])
def test_rewards_that_do_not_train_are_nothing_to_a_role_either(trains: bool) -> None:
    """With `use_task_rewards: false` the teachers judge every row: no role wins what another one loses."""
    rl = {
        **{"actor_resource": {"num_npus": 1}, "n_samples_per_prompt": 2, "adv_estimator": "group_norm", "mini_batch_size": 1},
        **{"multi_turn_enable": True, "agent_loop": "roles", "environment": "games:Debate"},
        "distillation": {"enabled": True, "teacher_models": ["t"], "use_task_rewards": trains},
    }
    training = {"stage": "ray_grpo", "global_batch_size": 1, "train_iters": 1, "seq_length": 64, "micro_batch_size": 1}
    keys = {"megatron_training": training, "actor_config": {}, "generate_config": {"infer_tensor_parallel_size": 1}}
    run = draft(build_run_config({**keys, "rl_config": rl}))
    played = [play(Speaker(["A", text, "C", "D"])) for text in ("B", "I give up")]
    columns = build_response_columns(played)
    columns |= {"rewards": [0.75, 0.25], "reward_results": [RewardResult(0.75, {}), RewardResult(0.25, {})]}
    plane: Any = Rows(columns)
    nothing: Any = None
    batches: list[TrainBatch] = []
    metrics = Advantages(run, plane, nothing, Schedule(run), (batches.append,)).compute(0, kl_coef=0.0).results()
    advantages = torch.cat(list(plane.written["advantages"]))
    assert bool(advantages.any()) == trains
    # 0.25 + 1 of pro's two turns, and 1 where con gives up, less those of the others, of which 0 is the sum
    assert (metrics["roles/con/reward"] != 0.0) == trains
    # the order of prompts depends on them in any case: they are measured
    (batch,) = batches
    assert batch.totals.tolist() == [0.75, 0.25]
