"""What goes wrong is named within a minute, ends the command with a code that is not 0, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpo_command import ONE_PROCESS, running

from mindspeed_rl.cli.doctor.logs import read_log

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


def test_a_reward_function_that_starts_to_fail_is_named(task: Path, tmp_path: Path, touchy: tuple[Path, list[str]]) -> None:
    flag, reward = touchy
    with running(task, tmp_path, *ONE_PROCESS, *reward, LONG, "actor_config.save=null") as command:
        command.wait_until(lambda: command.metrics)
        flag.touch()
        assert command.wait(60) == 1
        assert "reward worker" in command.output and "ValueError: the examiner went home" in command.output
        assert "touchy" in command.output
        assert "Traceback" not in command.output and "Traceback" in (tmp_path / "run" / "run.log").read_text()
        assert any("the examiner went home" in found.cause for found in read_log(tmp_path / "run" / "run.log"))
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
        assert not command.metrics and not (tmp_path / "run" / "logs" / "rank_0.log").exists()
        assert command.leftovers() == []


@pytest.mark.parametrize("moment", ["while training", pytest.param("while workers start", marks=pytest.mark.slow)])
def test_ctrl_c_ends_everything(task: Path, tmp_path: Path, moment: str) -> None:
    with running(task, tmp_path, *ONE_PROCESS, LONG) as command:
        log = tmp_path / "run" / "logs" / "rank_0.log"
        command.wait_until(log.exists if moment == "while workers start" else lambda: len(command.metrics) > 1)
        command.interrupt()
        assert command.wait(60) == 130
        assert "interrupted" in command.output and "Traceback" not in command.output
        assert command.leftovers() == []
