"""One GRPO run of this suite and one of TRL's GRPOTrainer: same model, prompts, group size and response length, in turn.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install -r benchmarks/requirements-trl-train.txt    # torch and transformers too
    .venv/bin/python benchmarks/grpo_vs_trl.py --trl-python /tmp/trl/bin/python [--tokens 64 256] [--iterations 8]

Needs a warm-started model and prompts: run examples/quickstart.sh first. Every response has exactly --tokens tokens, because
otherwise the two would compare two models' ideas of when to stop. Neither uses a reference model, and both make one optimizer
step an iteration. Ours trains on about 4,500 tokens at a time, which caches like; TRL runs twice, with all completions at a
time and with 32, and its faster run counts. Prints completions/s, seconds an iteration (median without the first two), peak
memory over all processes, and the ratios; and where our time goes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from headline import Headline

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 2
PROMPTS, GROUP = 32, 8
MICRO_BATCH_TOKENS = 5000


def run_measured(command: list[str], environment: dict[str, str]) -> float:
    """Runs a command and returns the peak of the resident memory of its process tree, in GiB (shared pages count once each)."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = 0.0
    tail: list[str] = []
    reader = threading.Thread(target=lambda: tail.extend(process.stderr), daemon=True)
    reader.start()
    root = psutil.Process(process.pid)
    while process.poll() is None:
        total = 0
        for member in [root, *root.children(recursive=True)]:
            try:
                total += member.memory_info().rss - member.memory_info().shared
            except psutil.Error:
                continue
        peak = max(peak, total / 2**30)
        time.sleep(0.5)
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {''.join(tail)[-2000:]}")
    return peak


def ours(work: Path, tokens: int, iterations: int, model: Path, prompts: Path) -> dict[str, float]:
    """Median seconds of our phases, and peak memory."""
    folder = work / f"ours_{tokens}"
    rows = 64
    while rows * (tokens + 8) > MICRO_BATCH_TOKENS:
        rows //= 2
    overrides = {
        "run_dir": folder,
        "megatron_training.train_iters": iterations,
        "megatron_training.tokenizer_name_or_path": model,
        "megatron_training.data_path": prompts,
        "megatron_training.eval_data_path": "null",
        "megatron_training.global_batch_size": PROMPTS,
        "actor_config.load": model,
        "actor_config.save": "null",
        "actor_config.tensor_model_parallel_size": 1,
        "actor_config.micro_batch_size": rows,
        "rl_config.n_samples_per_prompt": GROUP,
        "rl_config.mini_batch_size": PROMPTS,
        "rl_config.init_kl_coef": 0.0,
        "generate_config.max_num_seqs": 128,
        "generate_config.max_model_len": tokens + 32,
        "generate_config.kv_cache_memory_gib": "null",
        "generate_config.sampling_config.max_tokens": tokens,
        "generate_config.sampling_config.ignore_eos": "true",
    }
    command = [str(ROOT / ".venv/bin/mindspeed-rl"), "train", "--config-name", "grpo_tiny_cpu"]
    peak = run_measured(
        [*command, *(f"{key}={value}" for key, value in overrides.items())], dict(os.environ, OMP_NUM_THREADS="1")
    )
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    if any(record["response_length/min"] != tokens for record in records):
        raise RuntimeError(f"responses of {records[0]['response_length/min']} tokens instead of {tokens}")
    names = {
        "iteration": "all",
        "rollout": "rollout",
        "rewards": "rule_reward",
        "advantages": "adv",
        "update": "update",
        "push": "update_weights",
    }
    result = {name: statistics.median(record[f"timing/{key}"] for record in records) for name, key in names.items()}
    return result | {"peak_gib": peak}


def trl(work: Path, tokens: int, iterations: int, model: Path, prompts: Path, python: str) -> dict[str, float]:
    """Median seconds an iteration of TRL's faster setting, and that run's peak memory."""
    runs = []
    for rows in (PROMPTS * GROUP, 32):
        output = work / f"trl_{tokens}_{rows}.json"
        arguments = [str(output), str(tokens), str(iterations), str(rows), str(model), str(prompts)]
        environment = dict(os.environ, OMP_NUM_THREADS="2", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
        peak = run_measured([python, __file__, "--inside-trl", *arguments], environment)
        times = json.loads(output.read_text())[WARM_UP:]
        runs.append({"iteration": statistics.median(times), "peak_gib": peak, "rows": rows})
    return min(runs, key=lambda run: run["iteration"])


def inside_trl(output: str, tokens: str, iterations: str, at_once: str, model: str, prompts: str) -> None:
    """Runs in TRL's environment: one GRPOTrainer, seconds of each step to a file."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(2)
    length = int(tokens)

    class Clock(TrainerCallback):
        times: list[float] = []
        started = 0.0

        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            Clock.started = time.perf_counter()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            Clock.times.append(time.perf_counter() - Clock.started)

    rows = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    dataset = Dataset.from_list([{"prompt": row["instruction"], "answer": row["output"]} for row in rows])

    def exact(completions: list[str], answer: list[str], **unused: object) -> list[float]:
        return [float(text.strip() == right) for text, right in zip(completions, answer)]

    config = GRPOConfig(
        output_dir=output + ".trl",
        per_device_train_batch_size=int(at_once),
        gradient_accumulation_steps=PROMPTS * GROUP // int(at_once),
        num_generations=GROUP,
        max_steps=int(iterations),
        max_completion_length=length,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        learning_rate=2e-4,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=10_000,
        generation_kwargs={"min_new_tokens": length},
    )
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    trainer = GRPOTrainer(
        network, reward_funcs=exact, args=config, train_dataset=dataset, processing_class=tokenizer, callbacks=[Clock()]
    )
    trainer.train()
    Path(output).write_text(json.dumps(Clock.times))


def main() -> None:
    """Prints one table a response length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="python of an environment with TRL")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--quickstart", type=Path, default=ROOT / "runs/quickstart")
    options = parser.parse_args()
    model, prompts = (options.quickstart / part for part in ("sft/hf/latest", "raw/train.jsonl"))
    completions = PROMPTS * GROUP
    with tempfile.TemporaryDirectory() as folder:
        for tokens in options.tokens:
            mine = ours(Path(folder), tokens, options.iterations, model, prompts.with_suffix("").parent.parent / "data/train")
            theirs = trl(Path(folder), tokens, options.iterations, model, prompts, options.trl_python)
            print(f"\n{tokens} generated tokens, {completions} completions an iteration; TRL with {theirs['rows']} at a time")
            print(f"{'':<22}{'this suite':>12}{'TRL':>12}{'ratio':>8}")
            for label, a, b in (
                ("seconds an iteration", mine["iteration"], theirs["iteration"]),
                ("completions/s", completions / mine["iteration"], completions / theirs["iteration"]),
                ("peak memory GiB", mine["peak_gib"], theirs["peak_gib"]),
            ):
                print(f"{label:<22}{a:>12.2f}{b:>12.2f}{a / b:>8.2f}")
                if label != "completions/s":
                    what = f"GRPO, {completions} completions of {tokens} tokens, {label}"
                    Headline(what, f"{a:.2f}", "TRL", f"{b:.2f}", b / a).say()
            print(
                "where our time goes:",
                ", ".join(f"{name} {mine[name]:.2f} s" for name in ("rollout", "rewards", "advantages", "update", "push")),
            )


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--inside-trl":
        inside_trl(*sys.argv[2:])
    else:
        main()
