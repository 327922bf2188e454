"""The keys of msprobe_config in a whole run, and the comparison of two runs by their dumps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mindspeed_rl.cli import diff_dump
from mindspeed_rl.dumps.comparison import Dump

if TYPE_CHECKING:
    from rl_world import World

pytestmark = pytest.mark.slow

PPO = "ppo_tiny_cpu"


def keys(folder: Path, **more: object) -> list[str]:
    wanted = {"msprobe": "true", "dump_path": folder, "task": "tensor", "step_start": 1, "step_end": 1}
    wanted |= dict.fromkeys(
        ("key_data_dump", "actor_train_dump", "actor_infer_dump", "reference_dump", "critic_train_dump"), "true"
    )
    warm = ["rl_config.critic_warmup=0"]
    return warm + [f"+msprobe_config.{name}={value}" for name, value in (wanted | more).items()]


def test_a_run_dumps_what_its_keys_name_and_trains_as_without(world: World, tmp_path: Path) -> None:
    plain = world.run(PPO, "rl_config.critic_warmup=0", iterations=2)
    run = world.run(PPO, *keys(tmp_path, token_range_end=1), iterations=2)
    assert (run.weights["actor"] == plain.weights["actor"]).all()
    dump = Dump.open(tmp_path)
    expected = {("actor", "update"), ("actor", "rollout"), ("reference", "forward"), ("critic", "update"), ("driver", "data")}
    assert {key[1:3] for key in dump.entries} == expected and {key[0] for key in dump.entries} == {1}
    names = {key[3] for key in dump.entries if key[1:3] == ("actor", "rollout")}
    assert {name.split(".")[0] for name in names} == {"token_0", "token_1"}
    assert {"token_1.logits", "token_0.layers.1.mlp", "token_0.embedding"} <= names
    data = {key[3] for key in dump.entries if key[1] == "driver"}
    assert data >= {"prompt_ids", "responses", "rewards", "advantages", "loss_mask", "rollout_log_probs"}
    assert diff_dump.main([str(tmp_path), str(tmp_path)]) == 0


def test_a_run_dumps_in_the_form_of_msprobe_too(world: World, tmp_path: Path) -> None:
    run, plain = (world.run(PPO, *more, iterations=2) for more in (keys(tmp_path, dump_format="msprobe"), keys(tmp_path)))
    assert (run.weights["actor"] == plain.weights["actor"]).all()
    data = json.loads((tmp_path / "actor_update/step1/rank0/dump.json").read_text())["data"]
    entries = Dump.open(tmp_path).entries
    ours = {key[3] for key in entries if key[1:3] == ("actor", "update")}
    layers = {name.split(".")[-2] for name in ours if name.endswith(".mlp")}
    for layer in layers:
        assert {f"Module.decoder.layers.{layer}.mlp.MLP.{way}.0" for way in ("forward", "backward")} <= set(data)
    assert sum(".forward." in name for name in data) == sum(".gradients." not in name for name in ours)
    assert {path.parts[-4] for path in tmp_path.glob("*/step1/rank*/dump.json")} == {
        "actor_update", "actor_rollout", "reference_forward", "critic_update", "driver_data"
    }  # fmt: skip


def test_the_place_where_two_runs_diverge_is_reported(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another learning rate: the first iteration is the same, the second begins with a rollout of other weights."""
    for name, rate in (("a", 3e-4), ("b", 4e-4)):
        world.run(PPO, *keys(tmp_path / name, step_start=0), f"actor_config.lr={rate}", iterations=2)
    capsys.readouterr()
    assert diff_dump.main([str(tmp_path / "a"), str(tmp_path / "b"), "--tolerance", "1e-6"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("first difference: step 1, actor rollout")


def test_samples_tell_the_ratios_of_the_update_and_what_it_clipped(world: World) -> None:
    """The share of clipped tokens in the samples of a run of several steps is the metric's, and a run of one step has none."""
    keys = ["rl_config.log_completions=true", "rl_config.log_completions_interval=1", "rl_config.log_completions_keep=128"]
    run = world.run("grpo_tiny_cpu", *keys, "rl_config.epochs=3", "rl_config.clip_ratio=0.01")
    tokens = [json.loads(line)["tokens"] for line in (run.folder / "completions.jsonl").read_text().splitlines()]
    assert len(tokens) == 128 and all(len(each["ratios"]) == len(each["ids"]) for each in tokens)
    ratios = np.concatenate([each["ratios"] for each in tokens])
    clipped = np.concatenate([each["clipped"] for each in tokens])
    advantages = np.concatenate([each["advantages"] for each in tokens])
    beyond = ((ratios > 1.01) & (advantages > 0)) | ((ratios < 0.99) & (advantages < 0))
    assert clipped.any() and (clipped == beyond).mean() > 0.999  # five digits are written
    single = world.run("grpo_tiny_cpu", *keys)
    assert "ratios" not in json.loads((single.folder / "completions.jsonl").read_text().splitlines()[0])["tokens"]
