"""Plans of few long samples on many devices: finite, growing with the length, and of verl's script of 256k tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from published import DATA, MODELS

from mindspeed_rl.config import load_run_config
from mindspeed_rl.config.run_files import find_project_configs
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import ImportSettings
from mindspeed_rl.importers.verl import PROJECT
from mindspeed_rl.planner.devices import DEVICES, find_device
from mindspeed_rl.planner.fit import FitRequest, build_grpo_tree, fit
from mindspeed_rl.planner.memory import plan_memory
from mindspeed_rl.planner.promise import make_promise
from mindspeed_rl.planner.seconds import plan_time
from mindspeed_rl.rewards import REWARDS
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.models import resolve_run
from mindspeed_rl.run.rules.validation import validate


def long_run(length: int) -> Run:
    """4 prompts x 4 responses on 32 engines and 4 replicas of the actor."""
    keys = {
        "megatron_training.global_batch_size": 4,
        "megatron_training.seq_length": length,
        "actor_config.micro_batch_size": 1,
        "actor_config.context_parallel_size": 4,
        "actor_config.tensor_model_parallel_size": 4,
        "actor_config.pipeline_model_parallel_size": 1,
        "rl_config.actor_resource.num_npus": 64,
        "rl_config.mini_batch_size": 4,
        "rl_config.n_samples_per_prompt": 4,
        "rl_config.max_prompt_length": 1024,
        "rl_config.use_dynamic_bsz": False,
        "generate_config.infer_tensor_parallel_size": 2,
        "generate_config.max_model_len": length,
        "generate_config.sampling_config.max_tokens": length - 1024,
    }
    return draft(load_run_config("grpo_qwen3_8b_A3", None, [f"{name}={value}" for name, value in keys.items()]), 4)


def test_seconds_and_bytes_of_128k_to_1m_tokens_are_finite_and_grow() -> None:
    totals, peaks = [], []
    for length in (1 << 17, 1 << 18, 1 << 19, 1 << 20):
        run = long_run(length)
        assert validate(run) == [] and run.sizes.idle_rollout_replicas == 16
        device = find_device(run)
        totals.append(plan_time(run, device).total)
        peaks.append(plan_memory(run, device).without(("generate",)).fullest.peak.total)
        assert not any(word in line for line in make_promise(run, device=device).list_lines() for word in (" inf", "nan"))
    assert all(math.isfinite(seconds) for seconds in totals) and totals == sorted(totals) and peaks == sorted(peaks)
    # attention grows with the square of the length, all else with the length
    assert 8 < totals[-1] / totals[0] < 64 and 4 < peaks[-1] / peaks[0] < 16


@pytest.mark.slow
def test_rows_of_1m_tokens_have_layouts() -> None:
    # keys and values of a row: 36 layers x 2 x 8 heads x 128 x 2 bytes x 2^20 tokens = 144 GiB, 36 GiB on each of four devices
    block = yaml.safe_load((find_project_configs() / "model" / "qwen3_8b.yaml").read_text())["qwen3_8b"]
    request = FitRequest("qwen3_8b", block, 64, 1024, (1 << 20) - 1024, prompts=4, samples=4, num_nodes=8)
    results = fit(request, DEVICES["A3"])
    assert results[0].memory.verdict == "fits" and 4 in {
        result.values["generate_config.infer_tensor_parallel_size"] for result in results
    }


def test_the_step_of_an_engine_does_not_grow_with_rows_above_32k_tokens() -> None:
    def count(length: int) -> int:
        return build_grpo_tree(FitRequest("qwen3_8b", {}, 64, 1024, length - 1024))["generate_config"]["max_num_batched_tokens"]

    assert [count(length) for length in (4096, 1 << 14, 1 << 15, 1 << 20)] == [8192, 1 << 14, 1 << 15, 1 << 15]


def test_verls_run_of_256k_tokens_on_256_devices_imports_and_is_planned(tmp_path: Path) -> None:
    case = yaml.safe_load((DATA / "import_cases" / "verl.yaml").read_text())["cases"][0]
    name = "Qwen3-235B-A22B-Instruct-2507"
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(MODELS[name]))
    command = case["command"].replace(f"/data/work_dir/{name}", str(tmp_path / name))
    (tmp_path / "long.yaml").write_text(import_command(PROJECT, command, ImportSettings(rewards=REWARDS)).render(command))
    run = resolve_run(load_run_config("long", str(tmp_path)), 16)
    # 94 layers: 5 in the first and the last of 16 stages, 6 in the others
    assert run.config.actor_config.num_layer_list == "5,6,6,6,6,6,6,6,6,6,6,6,6,6,6,5"
    # 16 samples on 256 / 4 engines, of which 32 share the experts
    assert (run.plan.num_samples, run.sizes.idle_rollout_replicas, run.plan.dp_size) == (16, 48, 1)
    device = find_device(run, "A3")
    memory, time = plan_memory(run, device), plan_time(run, device)
    assert memory.verdict == "fits" and all(math.isfinite(seconds) and seconds > 0 for seconds in time.phases.values())
