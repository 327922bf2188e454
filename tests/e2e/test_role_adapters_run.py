"""Roles of one episode train their own adapters: each as it does alone, with its own folder, snapshots and exact resume."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from grpo_command import finished, running
from safetensors.torch import load_file
from test_agent_runs import HERE
from test_resumed_runs import steps_of
from test_roles_run import keys_of

pytestmark = [pytest.mark.slow, pytest.mark.extra]


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


def adapters_of(task: Path, folder: Path, environment: str, *changes: str) -> list[str]:
    folder.mkdir()
    return [
        *keys_of(task, folder, environment),
        "megatron_training.train_iters=4",
        "+actor_config.lora_target_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2]",
        "+actor_config.lora_r=16",
        "+actor_config.lora_alpha=32",
        "+actor_config.lora_ckpt_filter=true",
        "actor_config.lr=1e-3",
        "+generate_config.lora_push=adapter",
        *changes,
    ]


OWN = "+rl_config.role_adapters={first: solver, second: critic}"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_each_role_trains_its_adapter_as_a_run_of_that_role_alone_and_resumes_exactly(task: Path, tmp_path: Path) -> None:
    whole = finished(task, tmp_path / "both", *adapters_of(task, tmp_path / "both", "Pair", OWN))
    exported = whole.folder / "save/hf/latest"
    assert sorted(path.name for path in exported.iterdir()) == ["critic", "solver"]
    both = {name: tensors_of(exported / name) for name in ("solver", "critic")}
    assert not equal(both["solver"], both["critic"])
    for record in whole.metrics:
        assert record["rollout/log_probs_diff_max"] < 1e-3
        assert record["adapters/solver/grad_norm"] > 0 and record["adapters/critic/grad_norm"] > 0
    assert whole.metrics[0]["adapters/solver/grad_norm"] != whole.metrics[0]["adapters/critic/grad_norm"]

    for name, environment in (("solver", "PairOfFirst"), ("critic", "PairOfSecond")):
        # of 32 tokens a prompt of the second role takes 8
        alone = adapters_of(task, tmp_path / name, environment, "rl_config.max_total_response_length=12")
        command = finished(task, tmp_path / name, *alone)
        assert equal(both[name], tensors_of(command.folder / "save/hf/latest")), name
        role = "first" if name == "solver" else "second"
        for together, record in zip(whole.metrics, command.metrics, strict=True):
            assert together[f"roles/{role}/reward"] == record[f"roles/{role}/reward"]
            assert together[f"adapters/{name}/grad_norm"] == pytest.approx(record["actor/grad_norm"], abs=0)

    load = [f"actor_config.load={whole.folder / 'save'}", "+actor_config.load_iteration=2"]
    resumed = finished(task, tmp_path / "part", *adapters_of(task, tmp_path / "part", "Pair", OWN, *load))
    figures = steps_of(whole)
    assert {step: figures[step] for step in (3, 4)} == steps_of(resumed)
    for name, tensors in both.items():
        assert equal(tensors, tensors_of(resumed.folder / "save/hf/latest" / name)), name

    (whole.folder / "save/adapters/critic/iter_0000002").rename(tmp_path / "elsewhere")
    with running(task, tmp_path / "lost", *adapters_of(task, tmp_path / "lost", "Pair", OWN, *load)) as lost:
        assert lost.wait(200) != 0
    assert "adapters/critic/iter_0000002 is missing" in lost.output and "role_adapters" in lost.output


def test_opponents_of_the_past_play_with_the_adapter_of_their_role(task: Path, tmp_path: Path) -> None:
    past = [
        OWN,
        "+rl_config.opponents.roles=[first,second]",
        "+rl_config.opponents.interval=2",
        "+rl_config.opponents.size=2",
        f"megatron_training.eval_data_path={task / 'heldout.jsonl'}",
        "megatron_training.eval_interval=1",
    ]
    whole = finished(task, tmp_path / "whole", *adapters_of(task, tmp_path / "whole", "Duel", *past))
    for name in ("solver", "critic"):
        snapshots = sorted(path.name for path in (whole.folder / "save/opponents" / name).iterdir())
        assert snapshots == [f"version_{version:07d}" for version in (0, 2, 4)]
        last = tensors_of(whole.folder / "save/opponents" / name / "version_0000004")
        assert equal(last, tensors_of(whole.folder / "save/hf/latest" / name))
    first = json.loads((whole.folder / "run/metrics.jsonl").read_text().splitlines()[0])
    assert first["iteration"] == 0 and first["eval/reward"] == 0.0
    assert all(record["rollout/log_probs_diff_max"] < 1e-3 for record in whole.metrics)

    load = [f"actor_config.load={whole.folder / 'save'}", "+actor_config.load_iteration=2"]
    resumed = finished(task, tmp_path / "part", *adapters_of(task, tmp_path / "part", "Duel", *past, *load))
    figures = steps_of(whole)
    assert {step: figures[step] for step in (3, 4)} == steps_of(resumed)


def test_replicas_without_rows_of_an_adapter_make_its_step_with_the_others(task: Path, tmp_path: Path) -> None:
    # a prompt a replica: the second role speaks in the games of some replicas only
    keys = [
        OWN,
        "megatron_training.train_iters=2",
        "megatron_training.global_batch_size=2",
        "rl_config.mini_batch_size=2",
        "actor_config.micro_batch_size=8",
        "rl_config.use_dynamic_bsz=true",
        *(f"rl_config.{use}_max_packing_token_size=256" for use in ("actor", "ref", "update")),
        "actor_config.use_distributed_optimizer=true",
    ]
    figures = []
    for name, count in (("one", 1), ("two", 2)):
        folder = tmp_path / name
        changes = [*keys, f"rl_config.actor_resource.num_npus={count}"]
        command = finished(task, folder, *adapters_of(task, folder, "Seldom", *changes))
        exported = command.folder / "save/hf/latest"
        assert sorted(path.name for path in exported.iterdir()) == ["critic", "solver"]
        figures.append(command.metrics[0])
    one, two = figures
    for name in ("roles/first/reward", "response_length/mean", "roles/second/tokens"):
        assert one.get(name) == two.get(name), name
    for adapter in ("solver", "critic"):
        norm = f"adapters/{adapter}/grad_norm"
        assert one.get(norm, 0.0) == pytest.approx(two.get(norm, 0.0), rel=1e-4, abs=1e-9), adapter
