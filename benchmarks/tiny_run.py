"""Runs of `grpo_tiny_cpu` with other keys and models, as the benchmarks make them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mindspeed_rl.observability.run_files import RunFiles, read_run

ROOT = Path(__file__).resolve().parents[1]
#: the quickstart's model
SHAPE = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4}
#: models of about so many parameters, the quickstart's vocabulary of characters included
SHAPES: dict[str, dict[str, int]] = {
    "0.8M": {},
    "30M": {
        **{"num_hidden_layers": 10, "hidden_size": 512, "intermediate_size": 1536},
        **{"num_attention_heads": 8, "num_key_value_heads": 4},
    },
    "100M": {
        **{"num_hidden_layers": 14, "hidden_size": 768, "intermediate_size": 2304},
        **{"num_attention_heads": 12, "num_key_value_heads": 6},
    },
}
#: seconds: how long a command is taken to start, and between two looks at its memory until then and afterwards
_STARTS, _OFTEN, _SELDOM = 20.0, 0.5, 2.0


@dataclass(frozen=True)
class Watched:
    """A command that has ended well, seen from outside.

    Attributes:
        first_s: seconds until its log had the words that were waited for; 0 where none were.
        end_s: seconds until its end.
        cpu_s: seconds of the processor, of all its processes.
        memory_gib: the greatest sum over all its processes of what each holds for itself and its share of what several hold
            (PSS), looked at twice a second while the command starts and every two seconds afterwards: each look takes the
            kernel some hundredths of a second for a gigabyte, in which the process that it looks at cannot get memory.
    """

    first_s: float
    end_s: float
    cpu_s: float
    memory_gib: float


def watched(command: Sequence[str], log: Path, environment: Mapping[str, str], words: str = "") -> Watched:
    """Runs a command to its end; what it prints is in `log`.

    Raises:
        RuntimeError: it failed, or ended without having printed the words.
    """
    begun, first_s, memory = time.monotonic(), 0.0, 0
    cpu: dict[tuple[int, float], float] = {}
    with log.open("w") as stream:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=stream, stderr=stream)
    family = psutil.Process(process.pid)
    while process.poll() is None:
        held = 0
        try:
            members = [family, *family.children(recursive=True)]
        except psutil.NoSuchProcess:
            break
        for member in members:
            try:
                times = member.cpu_times()
                cpu[member.pid, member.create_time()] = times.user + times.system
                held += member.memory_full_info().pss
            except psutil.Error:
                continue  # it has just ended
        memory = max(memory, held)
        if words and not first_s and words in log.read_text():
            first_s = time.monotonic() - begun
        time.sleep(_OFTEN if time.monotonic() - begun < _STARTS else _SELDOM)
    if process.wait() or (words and not first_s):
        raise failure(process.returncode, log)
    return Watched(first_s, time.monotonic() - begun, sum(cpu.values()), memory / 2**30)


def preprocess(tokenizer: Path, rows: Path, prefix: Path, handler: str, *words: str) -> Path:
    """Token ids of these rows by this folder's tokenizer under `prefix`, which is returned."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    command = [str(ROOT / ".venv/bin/mindspeed-rl"), "preprocess", "--tokenizer-type", "PretrainedFromHF"]
    command += ["--tokenizer-name-or-path", str(tokenizer), "--input", str(rows), "--output-prefix", str(prefix)]
    command += ["--prompt-type", "hf", "--handler-name", handler, *words]
    subprocess.run(command, check=True, capture_output=True)
    return prefix


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


def train_command(keys: Mapping[str, Any], *words: str, config: str = "grpo_tiny_cpu") -> list[str]:
    """The command line; `words` are further overrides."""
    command = [str(ROOT / ".venv/bin/mindspeed-rl"), "train", "--config-name", config]
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
