"""generate, chat and evaluate with a tool and vLLM: a parser that takes every turn for a call makes each answer two turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import patient
from shared_forks import shared
from test_inference import PROGRAM, TEST_DATA
from test_inference import build_tokenizer as byte_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from mindspeed_rl.runtime.fork_server import INFERENCE

HERE = Path(__file__).parent
REPLY = "ValueError: these are not digits"


@pytest.mark.slow
def test_the_three_commands_answer_by_calls(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(eos_token="<|im_end|>")
    tokenizer.chat_template = (TEST_DATA / "chat_templates" / "qwen25.jinja").read_text(encoding="utf-8")
    torch.manual_seed(11)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        model.model.norm.weight.fill_(0.0)  # all tokens are equally likely
    model.save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    (tmp_path / "tools.yaml").write_text("tools:\n  - agent_plugins:flipped\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "12", "label": "no such answer"}) + "\n")
    model = ["--load", str(tmp_path / "hf"), "--hf-chat-template", "--max-new-tokens", "8", "--kv-cache-memory-gib", "0.1"]
    model += ["--tools", str(tmp_path / "tools.yaml"), "--tool-parser", "agent_plugins:EveryTurn", "--max-turns", "2"]
    # about half of the turns end by themselves, and these are calls
    sampled = ["--temperature", "1.0", "--top-k", "-1", "--top-p", "1.0", "--add-eos-token", *"abcdefghijklmnopqrstuvwxyz"]
    commands = [
        (["generate", *model, *sampled, "--prompt", "12", "--num-return", "24", "--output", str(tmp_path / "out.jsonl")], ""),
        (["chat", *model, *sampled], "12\nquit\n"),
        (
            [
                *("evaluate", *model, "--task", "jsonl", "--task-data-path", str(tmp_path / "rows.jsonl")),
                *("--scorer", "exact_match", "--input-key", "prompt", "--label-key", "label"),
                *("--output", str(tmp_path / "scores.json")),
            ],
            "",
        ),
    ]
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **shared(INFERENCE, platform="auto")},
        capture_output=True,
        text=True,
        timeout=patient(500),
    )
    assert done.returncode == 0 and json.loads(done.stdout.rsplit("=== codes", 1)[1]) == [0, 0, 0], done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    called = [row for row in rows if REPLY in row["response"]]
    assert len(rows) == 24 and called and all("flipped" not in row["prompt"] for row in rows)
    assert all(row["prompt_tokens"] > 300 for row in rows)  # the schema of the tool is in the prompt, a token a byte
    assert all(row["response"].count(REPLY) == 1 for row in called)  # max_turns: no second call
    scores = json.loads((tmp_path / "scores.json").read_text())["tasks"]["jsonl"]
    assert scores["total"] == 1 and scores["right"] == 0
