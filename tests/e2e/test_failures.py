"""What goes wrong is named within a minute, ends the command with a code that is not 0, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpo_command import ONE_PROCESS, running

from mindspeed_rl.cli.doctor.logs import _read_log

PLUGIN = """
from pathlib import Path
from mindspeed_rl.rewards import register

@register("touchy")
def touchy(response: str, label: str) -> float:
    if Path({flag!r}).exists():
        raise ValueError("the examiner went home")
    return float(response.strip() == label)
"""


@pytest.fixture()
def touchy(tmp_path: Path) -> tuple[Path, list[str]]:
    """A file, and the overrides of a reward function that raises once it exists."""
    flag, plugin = tmp_path / "flag", tmp_path / "touchy.py"
    plugin.write_text(PLUGIN.format(flag=str(flag)))
    return flag, ["rl_config.verifier_function=[touchy]", f"rl_config.external_plugins=[{plugin}]"]


LONG = "megatron_training.train_iters=100000"


@pytest.mark.slow
def test_a_reward_function_that_starts_to_fail_is_named(task: Path, tmp_path: Path, touchy: tuple[Path, list[str]]) -> None:
    flag, reward = touchy
    with running(task, tmp_path, *ONE_PROCESS, *reward, LONG, "actor_config.save=null") as command:
        command.wait_until(lambda: command.metrics)
        flag.touch()
        assert command.wait(60) == 1
        assert "reward worker" in command.output and "ValueError: the examiner went home" in command.output
        assert "touchy" in command.output
        assert "Traceback" not in command.output and "Traceback" in (tmp_path / "run" / "run.log").read_text()
        assert any("the examiner went home" in result.cause for result in _read_log(tmp_path / "run" / "run.log"))
        assert command.leftovers() == []


@pytest.mark.slow
def test_a_reward_function_that_fails_at_once_stops_the_run_before_models_are_built(
    task: Path, tmp_path: Path, touchy: tuple[Path, list[str]]
) -> None:
    flag, reward = touchy
    flag.touch()
    with running(task, tmp_path, *ONE_PROCESS, *reward, LONG) as command:
        assert command.wait(120) in (1, 2)
        assert "touchy" in command.output and "the examiner went home" in command.output
        assert not command.metrics and "the models are loaded" not in command.output
        assert command.leftovers() == []


@pytest.mark.parametrize("moment", ["while training", pytest.param("while workers start", marks=pytest.mark.slow)])
def test_ctrl_c_ends_everything(task: Path, tmp_path: Path, moment: str) -> None:
    with running(task, tmp_path, *ONE_PROCESS, LONG) as command:
        log = tmp_path / "run" / "logs" / "rank_0.log"
        command.wait_until(log.exists if moment == "while workers start" else lambda: len(command.metrics) > 1)
        command.interrupt()
        assert command.wait(60) == 130
        assert "interrupted" in command.output and "Traceback" not in command.output
        assert "to resume" in command.output.strip().splitlines()[-1]
        assert command.leftovers() == []


@pytest.mark.slow
def test_sigterm_lets_the_iteration_be_saved_and_the_same_command_goes_on(task: Path, tmp_path: Path) -> None:
    rarely = "megatron_training.save_interval=1000"
    with running(task, tmp_path, *ONE_PROCESS, LONG, rarely) as command:
        command.wait_until(lambda: command.metrics)
        command.process.terminate()
        assert command.wait(90) == 143
        assert "Traceback" not in command.output and "SIGABRT" not in command.output and "***" not in command.output
        last = command.metrics[-1]["iteration"]
        assert command.output.strip().splitlines()[-1] == f"to resume after iteration {last}, give the same command again."
        assert not list((tmp_path / "save").glob("*.partial"))
        assert command.leftovers() == []
    with running(task, tmp_path, *ONE_PROCESS, rarely, f"megatron_training.train_iters={last + 1}") as command:
        assert command.wait(300) == 0
        assert f"resumes after iteration {last} of" in command.output
        assert [record["iteration"] for record in command.metrics] == list(range(1, last + 2))


SILENT = """
from mindspeed_rl.rewards import register

@register("silent")
def silent(response: str) -> None:
    return None
"""


@pytest.mark.slow
def test_a_reward_function_without_an_opinion_is_warned_of_and_then_stops_the_run(task: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "silent.py"
    plugin.write_text(SILENT)
    reward = ["rl_config.verifier_function=[silent]", f"rl_config.external_plugins=[{plugin}]"]
    held_out = f"megatron_training.eval_data_path={task / 'heldout.jsonl'}"
    with running(task, tmp_path, *ONE_PROCESS, *reward, LONG, held_out) as command:
        assert command.wait(300) == 1
        assert "held-out responses have no score on" in command.output and "accuracy" not in command.output
        assert command.output.count("none of 32 responses got a score (32 skipped)") == 3
        assert "iteration 3 in a row (rl_config.unscored_iterations_limit)" in command.output
        assert command.output.strip().splitlines()[-1] == "to resume after iteration 2, give the same command again."
        assert command.leftovers() == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["rl_config.verifier_function=[exact_mach]"], "unknown reward function 'exact_mach'; did you mean 'exact_match'?"),
        (["rl_config.external_plugins=[broken.py]"], "'broken.py', line 2: there is no module 'no_such_module_xyz'"),
    ],
    ids=["name", "import"],
)
def test_a_mistake_in_a_plug_in_ends_the_command_before_ray_starts(
    task: Path, tmp_path: Path, changes: list[str], said: str
) -> None:
    (tmp_path / "broken.py").write_text("import json\nimport no_such_module_xyz\n")
    with running(task, tmp_path, *ONE_PROCESS, LONG, *changes) as command:
        assert command.wait(120) == 2
        assert said in command.output and "starting" not in command.output and "died" not in command.output
        assert not (tmp_path / "run").exists()
