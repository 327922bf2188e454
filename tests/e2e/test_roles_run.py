"""A model plays a game of two roles against itself and its past, and wins more often against an opponent that never learns."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from grpo_command import ONE_PROCESS, finished, running
from safetensors.torch import load_file
from test_agent_runs import HERE, TEMPLATE
from test_resumed_runs import steps_of

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


def play_past(task: Path, folder: Path, *changes: str) -> list[str]:
    """Keys of a run with an adapter, in whose games earlier adapters play one of the roles, and the first one evaluations."""
    folder.mkdir()
    return [
        *keys_of(task, folder, "Duel"),
        "+actor_config.lora_target_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2]",
        "+actor_config.lora_r=16",
        "+actor_config.lora_alpha=32",
        "actor_config.lr=1e-3",
        "actor_config.lr_decay_style=constant",
        "+generate_config.lora_push=adapter",
        "+rl_config.opponents.roles=[first,second]",
        "+rl_config.opponents.interval=2",
        "+rl_config.opponents.size=2",
        f"megatron_training.eval_data_path={task / 'heldout.jsonl'}",
        "megatron_training.eval_interval=1",
        *changes,
    ]


def test_against_its_past_it_learns_to_win_and_a_resumed_run_meets_the_same_opponents(task: Path, tmp_path: Path) -> None:
    keys, whole, part = ["megatron_training.train_iters=7"], tmp_path / "whole", tmp_path / "part"
    command = finished(task, whole, *play_past(task, whole, *keys))
    first = json.loads((whole / "run/metrics.jsonl").read_text().splitlines()[0])
    # evaluations: points per game, one role each, against the weights that the run started from
    assert first["iteration"] == 0 and first["eval/reward"] == 0.0
    assert command.metrics[-1]["eval/reward"] > 0.3, [record["eval/reward"] for record in command.metrics]
    versions = {record["opponent_version/max"] for record in command.metrics if "opponent_version/max" in record}
    assert versions - {0.0} and versions <= {0.0, 2.0, 4.0, 6.0}
    for record in command.metrics:
        assert record["rollout/log_probs_diff_max"] < 1e-3
    snapshots = {path.name for path in (whole / "save/opponents").iterdir()}
    assert snapshots == {f"version_{version:07d}" for version in (0, 2, 4, 6)}

    load = [f"actor_config.load={whole / 'save'}", "+actor_config.load_iteration=4"]
    resumed = finished(task, part, *play_past(task, part, *keys), *load)
    figures = steps_of(command)
    assert {step: figures[step] for step in (5, 6, 7)} == steps_of(resumed)
    ours, theirs = (load_file(folder / "save/hf/iter_0000007/model.safetensors") for folder in (part, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    (whole / "save/opponents/version_0000002").rename(tmp_path / "elsewhere")
    with running(task, tmp_path / "lost", *play_past(task, tmp_path / "lost", *keys), *load) as lost:
        assert lost.wait(200) != 0
    assert "version_0000002 is missing, and the run resumes after iteration 4 with the snapshots 0, 2, 4" in lost.output
