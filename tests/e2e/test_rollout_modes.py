"""Runs whose responses are generated while others train, or over several rollouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from grpo_command import ONE_PROCESS, Command, finished
from safetensors.torch import load_file
from test_grpo_run import figures

SHARED = [*ONE_PROCESS, "rl_config.log_completions=true", "rl_config.log_completions_keep=1000"]
SERVER = [
    *SHARED,
    "rl_config.use_integrated_worker=false",
    "rl_config.rollout_resource.num_npus=1",
    "generate_config.vllm_server_timeout=100",
]


def iterations(count: int) -> str:
    return f"megatron_training.train_iters={count}"


def responses(command: Command) -> list[str]:
    """Of the run, in the order in which they trained."""
    lines = (command.folder / "run" / "completions.jsonl").read_text().splitlines()
    return [json.loads(line)["response"] for line in lines]


def consumed(command: Command) -> list[dict[str, Any]]:
    """The run's record of what trained."""
    return [json.loads(line) for line in (command.folder / "run" / "consumed.jsonl").read_text().splitlines()]


def test_an_asynchronous_run_keeps_its_bound_and_says_what_trained(task: Path, tmp_path: Path) -> None:
    keys = ["rl_config.trainer_mode=async", "rl_config.max_off_policy_threshold=1", "rl_config.save_rollouts_interval=1"]
    run = finished(task, tmp_path, *SERVER, *keys, iterations(5))
    records = consumed(run)
    assert [record["iteration"] for record in records] == [1, 2, 3, 4, 5]
    taken = [one["prompt"] for record in records for one in record["prompts"]]
    assert len(set(taken)) == len(taken) == 5 * 8
    for record, metrics in zip(records, run.metrics, strict=True):
        versions = [span[0] for one in record["prompts"] for sample in one["samples"] for span in sample["versions"]]
        assert max(record["version"] - version for version in versions) <= 1
        assert metrics["rollout/staleness_max"] == max(record["version"] - version for version in versions)
    assert any(metrics["rollout/staleness_max"] == 1 for metrics in run.metrics)  # the rollout was ahead
    saved = load_file(run.folder / "run" / "rollouts" / "iteration_0000003.safetensors")
    found = saved["weight_versions"][saved["response_mask"]].tolist()
    expected = [
        version
        for one in records[2]["prompts"]
        for sample in one["samples"]
        for version, count in sample["versions"]
        for _ in range(count)
    ]
    assert found == expected


def same_figures(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """But for rounding: a server's batches form as requests arrive, and kernels round differently for other batches."""
    for name, value in figures(expected).items():
        if name in ("rollout/ready_prompts", "rollout/in_flight_prompts"):
            continue  # how far the servers happened to be
        assert figures(found)[name] == pytest.approx(value, rel=1e-4, abs=2e-5), name


@pytest.mark.slow
def test_without_a_threshold_an_asynchronous_run_is_the_synchronous_one(task: Path, tmp_path: Path) -> None:
    sync = finished(task, tmp_path / "sync", *SERVER, iterations(3))
    bounded = ["rl_config.trainer_mode=async", "rl_config.max_off_policy_threshold=0"]
    run = finished(task, tmp_path / "async", *SERVER, *bounded, iterations(3))
    assert responses(run) == responses(sync)
    for found, expected in zip(run.metrics, sync.metrics, strict=True):
        same_figures(found, expected)


@pytest.mark.slow
def test_one_step_off_goes_on_as_if_it_had_not_stopped(task: Path, tmp_path: Path) -> None:
    keys = [*SERVER, "rl_config.trainer_mode=one_step_off", "actor_config.lr_decay_style=constant"]
    whole = finished(task, tmp_path / "whole", *keys, iterations(4))
    first = finished(task, tmp_path / "parts", *keys, iterations(2))
    begun = responses(first)
    second = finished(task, tmp_path / "parts", *keys, iterations(4))
    assert consumed(second) == consumed(whole)
    assert begun == responses(whole)[: len(begun)]
    assert responses(second)[-2 * 32 :] == responses(whole)[-2 * 32 :]
    same_figures(second.metrics[-1], whole.metrics[-1])


@pytest.mark.slow
def test_long_responses_go_on_in_later_rollouts(task: Path, tmp_path: Path) -> None:
    keys = [
        "rl_config.partial_rollout_max_split=2",
        "rl_config.guarantee_order=false",
        "generate_config.sampling_config.ignore_eos=true",
        "rl_config.off_policy_token_limit=0",
    ]
    run = finished(task, tmp_path, *SHARED, *keys, iterations(4))
    taken = [one["prompt"] for record in consumed(run) for one in record["prompts"]]
    assert taken == list(range(4 * 8))
    assert all(metrics["rollout/staleness_max"] <= 2 for metrics in run.metrics)
    assert any(metrics["rollout/old_tokens_masked"] > 0 for metrics in run.metrics)
    assert all(metrics["response_length/mean"] == 4 for metrics in run.metrics)
