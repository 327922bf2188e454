"""`train` with tools: the run file's keys lead from a tool file to rows in which no token of a tool trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from grpo_command import ONE_PROCESS, Command
from safetensors.torch import load_file

HERE = Path(__file__).parent
#: whatever is said stands as it is; tools may speak, and the digits they give are to be copied
TEMPLATE = {
    "name": "bare",
    "format_assistant": {"slots": ["{{content}}", ["eos_token"]]},
    "format_observation": {"slots": ["{{content}}="]},
    "format_tools": {"tool_format": "qwen"},
}


@pytest.mark.slow
def test_a_run_with_a_function_as_its_tool_trains_what_the_model_drew(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "bare.json").write_text(json.dumps([TEMPLATE]))
    (tmp_path / "tools.yaml").write_text("tools:\n  - agent_plugins:flipped\n")
    words = ["--input", str(task / "train.jsonl"), "--output-prefix", str(tmp_path / "prompts"), "--prompt-type", "empty"]
    words += ["--tokenizer-name-or-path", str(task / "model"), "--handler-name", "R1AlpacaStyleInstructionHandler"]
    words += ["--map-keys", json.dumps({"prompt": "prompt", "query": "", "response": "labels", "system": ""})]
    words += ["--dataset-additional-keys", "labels"]
    done = subprocess.run(
        [sys.executable, "-m", "mindspeed_rl.cli.main", "preprocess", *words], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    command = Command(
        task,
        tmp_path / "run",
        *ONE_PROCESS,
        f"megatron_training.data_path={tmp_path / 'prompts'}",
        "megatron_training.train_iters=2",
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
    assert command.wait(400) == 0, command.output[-4000:]
    folder = tmp_path / "run/run"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 2
    assert all(record["tool_call_num/max"] == 1 and 0 < record["turns/mean"] <= 2 for record in records)
    batch = load_file(folder / "rollouts/iteration_0000002.safetensors")
    mask = batch["response_mask"]
    prompt = 3  # two digits and "="
    told = 0
    for row in range(len(mask)):
        width = int((batch["weight_versions"][row] >= 0).nonzero().max()) + 1
        tokens = batch["input_ids"][row, prompt : prompt + width]
        drawn = mask[row, :width]
        assert not batch["rollout_log_probs"][row, :width][~drawn].any()
        assert (batch["weight_versions"][row, :width][~drawn] == -1).all()
        # the trainer's log-probs of what was drawn are the sampler's
        assert torch.allclose(batch["log_probs"][row, :width][drawn], batch["rollout_log_probs"][row, :width][drawn], atol=1e-3)
        said = "".join(map(chr, tokens[~drawn].tolist()))
        if said:
            told += 1
            first = "".join(map(chr, tokens[: int((~drawn).nonzero()[0]) - 1].tolist()))
            assert said == f"{first[::-1]}=" if first.isdigit() else said.startswith("Error")
    assert told
