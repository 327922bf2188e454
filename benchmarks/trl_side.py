"""What runs in TRL's own environment for grpo_vs_trl.py and dpo_vs_trl.py: one trainer, its seconds of each step to a file.

PYTHON_WITH_TRL benchmarks/trl_side.py grpo|dpo SETTINGS.json OUTPUT.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Notes the seconds of each optimizer step, with what it generates for it."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.times.append(time.perf_counter() - self._started)


def common(settings: dict[str, Any], output: str) -> dict[str, Any]:
    """Keywords that both trainers' arguments take."""
    return {
        "output_dir": output + ".trl",
        "per_device_train_batch_size": settings["at_once"],
        "gradient_accumulation_steps": settings["rows"] // settings["at_once"],
        "max_steps": settings["iterations"],
        "learning_rate": 1e-5,
        "bf16": False,  # the whole model has the format instead: autocast converts every weight for every product
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 10_000,
    }


def grpo(settings: dict[str, Any], output: str, known: dict[str, Any]) -> GRPOTrainer:
    """A trainer of the task's prompts, rewarded for exact answers, which a model of random weights hardly ever gives."""
    rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    chat = settings["chat"]

    def prompt(text: str) -> Any:
        return [{"role": "user", "content": text}] if chat else text

    dataset = Dataset.from_list([{"prompt": prompt(row["instruction"]), "answer": row["output"]} for row in rows])

    def exact(completions: list[Any], answer: list[str], **unused: object) -> list[float]:
        texts = [completion[0]["content"] if chat else completion for completion in completions]
        return [float(text.strip() == right) for text, right in zip(texts, answer)]

    config = GRPOConfig(
        **common(settings, output),
        num_generations=settings["group"],
        max_completion_length=settings["tokens"],
        temperature=1.0,
        top_k=0,
        beta=0.0,
        generation_kwargs={"min_new_tokens": settings["tokens"]} if settings["fixed"] else {},
    )
    return GRPOTrainer(reward_funcs=exact, args=config, train_dataset=dataset, **known)


def dpo(settings: dict[str, Any], output: str, known: dict[str, Any]) -> DPOTrainer:
    """A trainer of pairs, with a reference that is computed in each step."""
    rows = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    names = {"instruction": "prompt", "chosen": "chosen", "rejected": "rejected"}
    dataset = Dataset.from_list([{theirs: row[ours] for ours, theirs in names.items()} for row in rows])
    config = DPOConfig(**common(settings, output), beta=0.1, max_length=settings["tokens"])
    return DPOTrainer(args=config, train_dataset=dataset, **known)


def main(kind: str, path: str, output: str) -> None:
    """Trains and writes the seconds."""
    settings = json.loads(Path(path).read_text())
    torch.set_num_threads(2)
    torch.manual_seed(0)
    clock = Clock()
    known = {
        "model": AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])),
        "processing_class": AutoTokenizer.from_pretrained(settings["model"], padding_side="left"),
        "callbacks": [clock],
    }
    {"grpo": grpo, "dpo": dpo}[kind](settings, output, known).train()
    Path(output).write_text(json.dumps(clock.times))


if __name__ == "__main__":
    main(*sys.argv[1:])
