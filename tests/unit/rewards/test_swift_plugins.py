"""Plug-in files in ms-swift's form: they load unchanged, and score what they would score there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient

from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.rewards.static_check import check_reward_functions

PLUGIN = '''
import asyncio
from typing import List

from swift.infer_engine import RequestConfig, TransformersEngine
from {package} import ORM, AsyncORM, orms, rm_plugins
from swift.rewards.rm_plugin import DefaultRMPlugin
from swift.rollout.gym_env import Env, envs
from {turns} import MultiTurnScheduler, multi_turns
from swift.utils import get_logger

logger = get_logger()


class Sum(ORM):
    """Right where the completion is the sum of the row's numbers; `bonus` is from the arguments of the run."""

    def __init__(self, args=None, cosine_max_len=None, **kwargs):
        super().__init__(args)
        self.bonus = args.repetition_n_grams + args.max_completion_length

    def __call__(self, completions, numbers, **kwargs) -> List[float]:
        return [float(text == str(sum(row))) * self.bonus for text, row in zip(completions, numbers)]


class Words(AsyncORM):
    async def __call__(self, completions, messages, response_token_ids, **kwargs) -> List[float]:
        await asyncio.sleep(0)
        return [len(row[-1]["content"]) + 10 * len(row) + 100 * len(ids) for row, ids in zip(messages, response_token_ids)]


class Both(ORM):
    def __call__(self, completions, solution, **kwargs):
        from {package}.orm import MathAccuracy

        right = MathAccuracy()(completions, solution, **kwargs)
        form = orms["format"]()(completions)
        return [first + 10 * second for first, second in zip(right, form)]


class Judge(DefaultRMPlugin):
    pass


class Again(MultiTurnScheduler):
    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({{"role": "user", "content": "again"}})
        return {{"infer_request": infer_request}}


class Driver(MultiTurnScheduler):
    async def run(self, infer_request, request_config, **kwargs):
        return []


class Game(Env):
    """Counts up from the row's number, and ends at 3 with a reward."""

    async def reset(self, config):
        self.state = config.data_dict["start"]
        return f"at {{self.state}}", {{}}, "count"

    async def step(self, action):
        self.state += int(action[-1]["content"])
        return f"at {{self.state}}", 0.5 * self.state, self.state >= 3, {{}}

    async def close(self):
        self.state = None


orms["sum"], orms["words"], orms["both"] = Sum, Words, Both
orms["length"] = lambda completions, **kwargs: [float(len(text)) for text in completions]
rm_plugins["judge"] = Judge
envs["game"] = Game
multi_turns["again"], multi_turns["driver"] = Again, Driver
'''
PROGRAM = '''
import asyncio, json, sys
from mindspeed_rl.rewards import REWARDS
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings
from mindspeed_rl.rewards.scorer import Scorer, import_scorer
from mindspeed_rl.rewards.worker import load_plugin

load_plugin(sys.argv[1])
settings = RewardSettings(repetition_n_grams=3, max_tokens=100)
samples = [
    RewardSample(prompt="1+2", response="3", response_ids=[7], label="3", columns={"numbers": [1, 2]}),
    RewardSample(prompt="2+2", response="<think>x</think> <answer>4</answer>", response_ids=[7, 8], label="4",
                 columns={"numbers": [2, 2]}),
]
result = {}
for name in ("sum", "words", "both", "length"):
    scorer = Scorer.build(name, import_scorer(name), settings)
    returned = scorer.call(samples, settings)
    values = scorer.to_values(asyncio.run(returned) if scorer.is_async else returned, 2)
    result[name] = [value[0][name] for value in values]
plugin = next(module for name, module in sys.modules.items() if name.startswith("reward_plugin_"))
try:
    plugin.Judge(None, None)
except ValueError as error:
    result["absent"] = str(error)

class Choice:
    finish_reason = "stop"

turns = plugin.Again(max_turns=2)
result["finished"] = [turns.check_finished(None, Choice, 1), turns.check_finished(None, Choice, 2)]
from mindspeed_rl.rollout.agents.scheduler import _load_scheduler
result["scheduler"] = _load_scheduler("again", [sys.argv[1]]) is plugin.Again
from mindspeed_rl.rollout.agents.environment_loop import _ObjectEpisodes
from mindspeed_rl.tools.environments import EnvironmentSpec
from types import SimpleNamespace

async def play():
    episodes = _ObjectEpisodes(EnvironmentSpec("game"), SimpleNamespace(external_plugins=(sys.argv[1],), turns=None))
    game = episodes._make()
    opening = await game.reset({"start": 1})
    first = await game.step([*opening, {"role": "assistant", "content": "1"}])
    second = await game.step([*opening, {"role": "assistant", "content": "2"}])
    await game.close()
    return [opening, first, second]

result["game"] = asyncio.run(play())
for name in ("driver", "other"):
    try:
        _load_scheduler(name, [sys.argv[1]])
    except ValueError as error:
        result[name] = str(error)
print(json.dumps(result))
'''


@pytest.mark.parametrize(
    ("package", "turns"), [("swift.rewards", "swift.rollout.multi_turn"), ("swift.plugin", "swift.plugin.multi_turn")]
)
def test_a_file_in_ms_swifts_form_scores_as_it_does_there(tmp_path: Path, package: str, turns: str) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN.format(package=package, turns=turns))
    # another process: what it installs stays there
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(plugin)], capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    text = "<think>x</think> <answer>4</answer>"
    assert found["sum"] == [103.0, 0.0]  # repetition_n_grams 3 + max_completion_length 100
    assert found["words"] == [1 + 20 + 100, len(text) + 20 + 200]
    # a bare number is not an anchored answer; right, as the content of <answer>, and of the format
    assert found["both"] == [0.0, 11.0]
    assert found["length"] == [1.0, float(len(text))]
    assert "DefaultRMPlugin" in found["absent"] or "Judge of ms-swift is not available here" in found["absent"]
    assert found["finished"] == [False, True] and found["scheduler"]
    opening = [{"role": "system", "content": "count"}, {"role": "user", "content": "at 1"}]
    assert found["game"] == [opening, [[{"role": "user", "content": "at 2"}], 1.0, False], [[], 2.0, True]]
    assert "run of its own" in found["driver"] and "again, driver" in found["other"]


def test_names_of_such_a_file_are_known_before_anything_runs(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN.format(package="swift.plugin", turns="swift.plugin.multi_turn"))
    keys = {"external_plugins": [str(plugin)], "verifier_function": ["sum", "both"]}
    assert check_reward_functions(RLConfig(**keys)) == []
    (wrong,) = check_reward_functions(RLConfig(**(keys | {"verifier_function": ["summ"]})))
    assert "unknown reward function 'summ'" in wrong and "sum" in wrong
    turns = {"multi_turn_enable": True, "multi_turn_scheduler": "again"}
    assert check_reward_functions(RLConfig(**keys, **turns)) == []
    (wrong,) = check_reward_functions(RLConfig(**keys, **(turns | {"multi_turn_scheduler": "agian"})))
    assert "rl_config.multi_turn_scheduler: 'agian'" in wrong and "again, driver" in wrong
    game = {"multi_turn_enable": True, "rule_reward": False, "environment": "game"}
    assert check_reward_functions(RLConfig(**keys, **game)) == []
    (wrong,) = check_reward_functions(RLConfig(**keys, **(game | {"environment": "gaem"})))
    assert "rl_config.environment: 'gaem'" in wrong and "they have game" in wrong
