"""Mistakes in plug-ins and names of reward functions are found before anything is started, with file, line and known names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from patience import patient

from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.rewards.dry_run import DryRun, dry_run_reward_functions
from mindspeed_rl.rewards.static_check import check_reward_functions
from mindspeed_rl.rollout.trajectory import make_trial_columns

GOOD = """
from mindspeed_rl.rewards import REWARDS, register

@register("mine")
def mine(response: str) -> float:
    return 1.0

REWARDS["yours"] = mine
"""


def plugin(folder: Path, text: str) -> str:
    path = folder / "plugin.py"
    path.write_text(text)
    return str(path)


def run(*names: str, plugins: tuple[str, ...] = ()) -> RLConfig:
    return RLConfig(verifier_function=list(names), verifier_weight=[1.0] * len(names), external_plugins=list(plugins))


def test_sound_names_have_no_mistakes(tmp_path: Path) -> None:
    rl = run("mine", "yours", "acc", "json:dumps", plugins=(plugin(tmp_path, GOOD),))
    assert check_reward_functions(rl) == [] and dry_run_reward_functions(rl, {}).violations == []


@pytest.mark.parametrize(
    ("names", "text", "said"),
    [
        (["exact_mach"], None, r"unknown reward function 'exact_mach'; did you mean 'exact_match'\? Known: .*gsm8k"),
        (["min"], GOOD, r"unknown reward function 'min'; did you mean 'mine'\? Known: .*mine.*yours"),
        (["mine"], "def f(:\n    pass\n", r"plugin.py', line 1: SyntaxError: "),
        (["mine"], GOOD + "\n  x = 1\n", r"plugin.py', line 10: IndentationError: unexpected indent"),
        (["mine"], "import os, not_there.part\n" + GOOD, r"plugin.py', line 1: there is no module 'not_there'"),
        (["no_such_package_xyz:f"], None, "there is no module 'no_such_package_xyz'"),
    ],
)
def test_a_mistake_is_seen_without_running_the_file(tmp_path: Path, names: list[str], text: str | None, said: str) -> None:
    rl = run(*names, plugins=() if text is None else (plugin(tmp_path, text),))
    (mistake,) = check_reward_functions(rl)
    assert re.search(said, mistake), mistake


def test_a_file_that_is_missing_or_no_python_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    mistakes = check_reward_functions(run("acc", plugins=(str(tmp_path / "gone.py"), str(tmp_path / "notes.txt"))))
    assert [f"there is no file '{tmp_path / 'gone.py'}'" in mistakes[0], "is not a Python file" in mistakes[1]] == [True, True]


@pytest.mark.parametrize(
    "text",
    [
        "from mindspeed_rl.rewards import register\nfor name in ('a', 'b'):\n    register(name)(len)\n",
        "from mindspeed_rl.rewards import REWARDS\nREWARDS.update(b=len)\n",
        "import beside\n",
    ],
    ids=["computed", "update", "another file"],
)
def test_names_that_cannot_be_read_are_left_to_the_trial(tmp_path: Path, text: str) -> None:
    (tmp_path / "beside.py").write_text("")
    assert check_reward_functions(run("b", plugins=(plugin(tmp_path, text),))) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import json\nimport no_such_module_xyz\n", "No module named 'no_such_module_xyz' (plugin.py:2)"),
        ("print('noise')\n\nx = 1 / 0\n", "ZeroDivisionError: division by zero (plugin.py:3)"),
        ("import os\nos._exit(7)\n", "ends the process with code 7"),
        pytest.param("import time\ntime.sleep(100)\n", "did not load within ", marks=pytest.mark.slow),
        ("x = 1\n", "unknown reward function 'mine'"),
    ],
)
def test_what_only_running_shows_is_found_in_a_process_of_its_own(tmp_path: Path, text: str, said: str) -> None:
    (mistake,) = dry_run_reward_functions(run("mine", plugins=(plugin(tmp_path, text),)), {}, timeout_s=patient(10)).violations
    assert said in mistake and "rl_config." in mistake


def test_parameters_that_a_rollout_of_several_turns_fills_are_no_columns_of_the_data() -> None:
    loaded = DryRun(required={"mine": ["response", "label", "tool_call_num", "final_reward"]})
    assert loaded.find_missing("1", make_trial_columns()) == []
    assert "has the parameter 'tool_call_num' without a default" in loaded.find_missing("1", {"level": 2})[0]
