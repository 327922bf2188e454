"""`train` with tools: the run file's keys lead from a tool file to rows in which no token of a tool trains, in every mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from grpo_command import ONE_PROCESS, finished
from safetensors.torch import load_file

HERE = Path(__file__).parent
SERVER = [
    *ONE_PROCESS,
    "rl_config.use_integrated_worker=false",
    "rl_config.rollout_resource.num_npus=1",
    "generate_config.vllm_server_timeout=100",
]
#: whatever is said stands as it is; tools may speak, and the digits they give are to be copied
TEMPLATE = {
    "name": "bare",
    "format_assistant": {"slots": ["{{content}}", ["eos_token"]]},
    "format_observation": {"slots": ["{{content}}="]},
    "format_tools": {"tool_format": "qwen"},
}


@pytest.fixture(scope="module")
def prompts(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of the task's prompts as `preprocess` writes them."""
    prefix = tmp_path_factory.mktemp("prompts") / "prompts"
    words = ["--input", str(task / "train.jsonl"), "--output-prefix", str(prefix), "--prompt-type", "empty"]
    words += ["--tokenizer-name-or-path", str(task / "model"), "--handler-name", "R1AlpacaStyleInstructionHandler"]
    words += ["--map-keys", json.dumps({"prompt": "prompt", "query": "", "response": "labels", "system": ""})]
    words += ["--dataset-additional-keys", "labels"]
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_rl.cli.main", "preprocess", *words], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return prefix


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in process", "sync", "one_step_off", "async"])
def test_a_run_with_a_function_as_its_tool_trains_what_the_model_drew(
    task: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "bare.json").write_text(json.dumps([TEMPLATE]))
    (tmp_path / "tools.yaml").write_text("tools:\n  - agent_plugins:flipped\n")
    where = ONE_PROCESS if mode == "in process" else [*SERVER, f"rl_config.trainer_mode={mode}"]
    command = finished(
        task,
        tmp_path / "run",
        *where,
        *(["rl_config.max_off_policy_threshold=1"] if mode == "async" else []),
        f"megatron_training.data_path={prompts}",
        "megatron_training.train_iters=3",
        "megatron_training.prompt_type=bare",
        f"megatron_training.prompt_type_path={tmp_path / 'bare.json'}",
        "rl_config.multi_turn_enable=true",
        f"rl_config.tool_config_path={tmp_path / 'tools.yaml'}",
        "rl_config.tool_parser_format=agent_plugins:EveryTurn",
        "rl_config.max_turns=2",
        "rl_config.max_total_response_length=24",
        "rl_config.verifier_function=[agent_plugins:called]",
        "rl_config.save_rollouts_interval=1",
        "rl_config.log_completions=true",
    )
    folder = command.folder / "run"
    assert len(command.metrics) == 3
    assert all(record["tool_call_num/max"] == 1 and 0 < record["turns/mean"] <= 2 for record in command.metrics)
    num_iteration = 3
    batch = load_file(folder / f"rollouts/iteration_{num_iteration:07}.safetensors")
    mask = batch["response_mask"]
    prompt = 3  # two digits and "="
    told = 0
    age = {"one_step_off": 1, "async": 1}.get(mode, 0)
    for row in range(len(mask)):
        width = int((batch["weight_versions"][row] >= 0).nonzero().max()) + 1
        tokens = batch["input_ids"][row, prompt : prompt + width]
        drawn = mask[row, :width]
        versions = batch["weight_versions"][row, :width]
        assert not batch["rollout_log_probs"][row, :width][~drawn].any()
        assert (versions[~drawn] == -1).all() and (versions[drawn] >= num_iteration - 1 - age).all()
        if mode == "one_step_off":
            assert (versions[drawn] == num_iteration - 2).all()
        # where the same weights drew and train, their log-probs are the same
        fresh = versions == num_iteration - 1
        ours, theirs = (batch[name][row, :width][fresh] for name in ("log_probs", "rollout_log_probs"))
        assert torch.allclose(ours, theirs, atol=1e-3)
        said = "".join(map(chr, tokens[~drawn].tolist()))
        if said:
            told += 1
            first = "".join(map(chr, tokens[: int((~drawn).nonzero()[0]) - 1].tolist()))
            assert said == f"{first[::-1]}=" if first.isdigit() else said.startswith("Error")
    assert told
