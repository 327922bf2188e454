"""The largest model that trains on a small machine: SFT and GRPO of a model with random weights, its optimizer in a file.

    .venv/bin/python benchmarks/largest_model.py [--size 1.5B] [--stages sft grpo] [--steps 2] [--folder FOLDER]

Weights and gradients are in bfloat16, all layers are recomputed, and AdamW's states (12 bytes a parameter) are in a file in
the folder, which a local disk should have. One worker trains and, in GRPO, generates too; there is no reference. Seconds of a
step are the median without the first one, and memory is the sum over all processes of the command (PSS). A stage that takes
more than the limit is named as too large.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from tiny_run import ROOT, make_model, make_task, watched

from mindspeed_rl.observability.run_files import read_run

#: shapes with the tokenizer of the quickstart; the vocabulary of the two larger ones is the published one
SHAPES: dict[str, dict[str, Any]] = {
    "0.1B": {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 2304, "num_attention_heads": 12},
    "0.5B": {
        **{"num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14},
        **{"vocab_size": 151936},
    },
    "1.5B": {
        **{"num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12},
        **{"vocab_size": 151936},
    },
}
ROWS, GROUP, PROMPT, RESPONSE = 4, 4, 32, 32


def write_run_file(folder: Path, stage: str, model: Path, data: Path, steps: int) -> Path:
    """A run of so many steps, each of a few short rows."""
    training: dict[str, Any] = {
        "stage": {"sft": "sft", "grpo": "ray_grpo"}[stage],
        "train_iters": steps,
        "data_path": str(data),
        "tokenizer_name_or_path": str(model),
        "load": str(model),
        "finetune": True,
        "bf16": True,
        "micro_batch_size": 1,
        "lr": 1e-5,
        "lr_decay_style": "constant",
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "loss_chunk_size": 64,
        "loss_vocab_chunk_size": 8192,
        "grad_reduce_in_fp32": False,
        "optimizer_offload_fraction": 1.0,
        "optimizer_offload_path": str(folder),
    }
    tree: dict[str, Any] = {"platform": "cpu", "megatron_training": training}
    if stage == "sft":
        training |= {"num_npus": 1, "global_batch_size": ROWS, "seq_length": PROMPT + RESPONSE}
    else:
        training |= {"global_batch_size": ROWS // GROUP, "dataset_additional_keys": ["labels"]}
        tree["actor_config"] = {name: training.pop(name) for name in ("load", "lr", "micro_batch_size")}
        tree["rl_config"] = {
            "actor_resource": {"num_npus": 1},
            "n_samples_per_prompt": GROUP,
            "mini_batch_size": ROWS // GROUP,
            "max_prompt_length": PROMPT,
            "use_remove_padding": True,
            "init_kl_coef": 0.0,
            "log_probs_diff_limit": None,  # random weights, in bfloat16
            "rule_reward": True,
            "verifier_function": ["exact_match"],
            "verifier_weight": [1.0],
        }
        tree["generate_config"] = {
            "infer_tensor_parallel_size": 1,
            "max_num_seqs": ROWS,
            "max_model_len": PROMPT + RESPONSE,
            "max_num_batched_tokens": 128,
            "dtype": "bfloat16",
            "kv_cache_memory_gib": 0.25,
            "sampling_config": {"max_tokens": RESPONSE, "temperature": 1.0, "ignore_eos": True},
        }
    path = folder / f"{stage}.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def measure(folder: Path, stage: str, model: Path, data: Path, steps: int) -> tuple[float, float]:
    """Seconds of a step and GiB of a run."""
    path, log = write_run_file(folder, stage, model, data, steps), folder / f"{stage}.log"
    command = [str(ROOT / ".venv/bin/mindspeed-rl"), "train", "--config-dir", str(folder), "--config-name", path.stem]
    seen = watched([*command, f"run_dir={folder / stage}"], log, {})
    timer = {"sft": "timing/update", "grpo": "timing/all"}[stage]
    seconds = list(read_run(folder / stage).history.series[timer].y)
    return statistics.median(seconds[1:] or seconds), seen.memory_gib


def main() -> int:
    """Print a line for each stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="1.5B")
    parser.add_argument("--stages", nargs="+", choices=("sft", "grpo"), default=["sft", "grpo"])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None, help="of everything that is written; default: a temporary one")
    parser.add_argument("--limit-gib", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, is_within = Path(name), True
        task = make_task(folder / "task")
        torch.set_default_dtype(torch.bfloat16)
        model = make_model(task, folder / "model", SHAPES[options.size])
        torch.set_default_dtype(torch.float32)
        data = {"sft": folder / "rows.jsonl", "grpo": folder / "prompts.jsonl"}
        sums = [(f"{index}+{index + 1}=", str(2 * index + 1)) for index in range(10, 74)]
        for path, column in ((data["sft"], "response"), (data["grpo"], "labels")):
            path.write_text("".join(json.dumps({"prompt": prompt, column: answer}) + "\n" for prompt, answer in sums))
        for stage in options.stages:
            seconds, memory = measure(folder, stage, model, data[stage], options.steps)
            is_within = is_within and memory <= options.limit_gib
            verdict = "" if memory <= options.limit_gib else f", more than {options.limit_gib:g}"
            print(json.dumps({"stage": stage, "size": options.size, "step_s": round(seconds, 1), "gib": round(memory, 2)}))
            print(f"{stage} of {options.size}: {seconds:.1f} s a step, {memory:.1f} GiB{verdict}", flush=True)
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
