"""A run is resolved once, into a record that says what is wrong before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mindspeed_rl.config import load_run_config
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.resolve import resolve


def test_a_run_has_plan_objective_platform_and_an_absolute_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = load_run_config("grpo_tiny_cpu", None, ["run_dir=mine"])
    run = resolve(cfg, platform="cpu")
    assert (run.platform, run.num_nodes, run.folder) == ("cpu", 1, tmp_path / "mine")
    assert (run.config, run.objective) == (draft(cfg).config, draft(cfg).objective)
    assert run.plan.world_size == cfg.rl_config.actor_resource.num_npus
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.platform = "npu"
    unnamed = resolve(load_run_config("grpo_tiny_cpu", None, ["run_dir=null"]), platform="cpu").folder
    assert unnamed.parent == tmp_path / "runs" and unnamed.name.startswith("grpo_tiny_cpu-")


def test_a_supervised_run_has_no_rollout_objective() -> None:
    assert resolve(load_run_config("sft_tiny_cpu"), platform="cpu").objective is None


@pytest.mark.parametrize(
    ("name", "group", "unit"),
    [("grpo_tiny_cpu", "actor_config", "iterations"), ("sft_tiny_cpu", "megatron_training", "optimizer steps")],
)
def test_a_run_without_length_is_refused(name: str, group: str, unit: str) -> None:
    cfg = load_run_config(name, None, ["megatron_training.train_iters=null"])
    with pytest.raises(ValueError, match=rf"{group}.train_iters: not set; say how many {unit} the run has"):
        resolve(cfg, platform="cpu")
