"""Runs of `grpo_tiny_cpu` with other keys and models, as the benchmarks make them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_rl.observability.run_files import RunFiles, read_run

ROOT = Path(__file__).resolve().parents[1]
#: the quickstart's model
SHAPE = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4}


def make_task(folder: Path) -> Path:
    """The quickstart's task: raw/train.jsonl, and model/ with its tokenizer."""
    command = [sys.executable, str(ROOT / "examples" / "quickstart" / "make_task.py"), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def make_model(task: Path, folder: Path, shape: Mapping[str, Any]) -> Path:
    """A model of random weights with the task's tokenizer, of the quickstart's shape but for what `shape` says."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(task / "model")
    known = {**SHAPE, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 512, "tie_word_embeddings": True}
    known |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, **shape}
    kind = transformers.Qwen3MoeConfig if "num_experts" in shape else transformers.Qwen2Config
    transformers.AutoModelForCausalLM.from_config(kind(**known)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train_command(keys: Mapping[str, Any], *words: str) -> list[str]:
    """The command line; `words` are further overrides."""
    command = [str(ROOT / ".venv/bin/mindspeed-rl"), "train", "--config-name", "grpo_tiny_cpu"]
    return [*command, *(f"{key}={value}" for key, value in keys.items()), *words]


def train(folder: Path, keys: Mapping[str, Any], *words: str, environment: Mapping[str, str]) -> RunFiles:
    """Runs until the end; what the run printed lies beside its folder.

    Raises:
        RuntimeError: it failed.
    """
    log = folder.with_name(f"{folder.name}.log")
    with log.open("w") as stream:
        command = train_command({"run_dir": folder, **keys}, *words)
        done = subprocess.run(command, env={**os.environ, **environment}, stdout=stream, stderr=stream)
    if done.returncode:
        raise failure(done.returncode, log)
    return read_run(folder)


def failure(code: int, log: Path) -> RuntimeError:
    """What a run that has not ended well is told as, with the end of its log."""
    return RuntimeError(f"the run ended with {code}: {log.read_text()[-3000:]}")
