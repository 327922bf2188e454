"""A model plays a game of two roles against itself, and wins more often against an opponent that never learns."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from grpo_command import ONE_PROCESS, finished
from test_agent_runs import HERE, TEMPLATE

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


def keys_of(task: Path, folder: Path, environment: str) -> list[str]:
    (folder / "bare.json").write_text(json.dumps([TEMPLATE]))
    return [
        *ONE_PROCESS,
        "megatron_training.prompt_type=bare",
        f"megatron_training.prompt_type_path={folder / 'bare.json'}",
        "megatron_training.global_batch_size=16",
        "rl_config.mini_batch_size=16",
        "rl_config.n_samples_per_prompt=8",
        "rl_config.multi_turn_enable=true",
        "rl_config.agent_loop=roles",
        f"rl_config.environment=agent_plugins:{environment}",
        "rl_config.max_prompt_length=8",
        "rl_config.max_total_response_length=32",
        "rl_config.verifier_function=[]",
        "rl_config.verifier_weight=[]",
    ]


def measure(task: Path, folder: Path, model: Path) -> float:
    """Points per game against the frozen opponent, of the 128 games of a first iteration, before its update."""
    folder.mkdir()
    start = [f"actor_config.load={model}", "actor_config.finetune=true", "megatron_training.train_iters=1"]
    command = finished(task, folder, *keys_of(task, folder, "DuelWithFrozen"), *start)
    return command.metrics[0]["first_reward/mean"]


def test_playing_against_itself_it_wins_more_often_against_a_frozen_opponent(task: Path, tmp_path: Path) -> None:
    before = measure(task, tmp_path / "before", task / "model")
    (tmp_path / "game").mkdir()
    learns = ["megatron_training.train_iters=5", "actor_config.lr=3e-4", "actor_config.lr_decay_style=constant"]
    command = finished(task, tmp_path / "game", *keys_of(task, tmp_path / "game", "Duel"), *learns)
    for record in command.metrics:
        # what one wins the other loses; both are trained, each against its own mean
        assert record["roles/first/reward"] == pytest.approx(-record["roles/second/reward"], abs=1e-9)
        assert record["grpo/score/mean"] == pytest.approx(0.0, abs=1e-9) and record["turns/mean"] == 2.0
        assert record["rollout/log_probs_diff_max"] < 1e-3
    after = measure(task, tmp_path / "after", command.folder / "save/hf/latest")
    assert before < 0.2 and after > 0.35, (before, after)
