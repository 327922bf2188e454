"""How far `mindspeed-rl plan` is off, and how long it takes: the tables of docs/planner.md.

    .venv/bin/python benchmarks/planner.py [--of assumptions speed runs] [--work FOLDER] [--only NAME ...]

Without `--of` all three parts. `runs` trains tiny models of several sizes and layouts on two workers, one run after another
(about a minute each; have a machine without other load), and sets what each report says was predicted beside what it measured.
fit_planner.py prints the errors against published runs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_run import ROOT, make_model, make_task

ITERATIONS = 6


@dataclass(frozen=True)
class PlannedRun:
    """A run on two workers.

    Attributes:
        shape: of the model, where it is not the quickstart's.
        tokens: every response has so many.
        keys: of the run file, where they are not grpo_tiny_cpu's.
    """

    name: str
    shape: dict[str, Any] = field(default_factory=dict)
    tokens: int = 8
    keys: dict[str, Any] = field(default_factory=dict)
    config: str = "grpo_tiny_cpu"


def _layout(**sizes: int) -> dict[str, Any]:
    names = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "ep": "expert_model_parallel_size"}
    return {f"actor_config.{names[name]}": size for name, size in {"tp": 1, **sizes}.items()}


_LARGER = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 768}
_LARGEST = {"num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True, "head_dim": 32}
#: the samples of a replica, where there are two
_HALF = {"actor_config.micro_batch_size": 256}
_OFFLOADED = {f"generate_config.offload_train_{part}": True for part in ("optimizer", "grad", "param")}
RUNS = (
    PlannedRun("4 x 128, TP2, 8 tokens", keys=_layout(tp=2)),
    PlannedRun("4 x 128, DP2, all offloaded, 16 tokens", tokens=16, keys=_layout() | _HALF | _OFFLOADED),
    PlannedRun("8 x 256, TP2, 8 tokens", _LARGER, keys=_layout(tp=2)),
    PlannedRun("8 x 256, PP2, 16 tokens", _LARGER, 16, _layout(pp=2) | {"actor_config.micro_batch_size": 64}),
    PlannedRun("6 x 512, TP2, 16 tokens", _LARGEST, 16, _layout(tp=2)),
    PlannedRun(
        "4 x 128, 8 experts, EP2, 8 tokens", _EXPERTS, keys=_layout(ep=2) | _HALF | {"megatron_training.num_experts": 8}
    ),
    PlannedRun(
        "4 x 128, PPO, TP2, 8 tokens",
        keys=_layout(tp=2) | {"critic_config.load": "{model}", "critic_config.save": None, "rl_config.critic_warmup": 0},
        config="ppo_tiny_cpu",
    ),
)


def run(task: Path, one: PlannedRun, work: Path) -> dict[str, Any]:
    """Trains, and returns what the report has of the plan."""
    model = make_model(task, work / f"model-{RUNS.index(one)}", one.shape)
    folder = work / one.name.replace(" ", "").replace(",", "_")
    keys = {
        "run_dir": folder,
        "megatron_training.train_iters": ITERATIONS,
        "megatron_training.tokenizer_name_or_path": model,
        "megatron_training.data_path": task / "raw" / "train.jsonl",
        "megatron_training.eval_data_path": None,
        "actor_config.load": model,
        "actor_config.save": None,
        "generate_config.max_model_len": 64,
        "generate_config.sampling_config.max_tokens": one.tokens,
        "generate_config.sampling_config.ignore_eos": True,
        **{key: value.format(model=model) if isinstance(value, str) else value for key, value in one.keys.items()},
    }
    words = [f"{key}={'null' if value is None else value}" for key, value in keys.items()]
    command = [sys.executable, "-m", "mindspeed_rl.cli.main", "train", "--config-name", one.config, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ})
    if done.returncode:
        raise RuntimeError(f"{one.name} ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-1500:]}")
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))["plan"]


def runs(work: Path, only: list[str]) -> Iterator[str]:
    """Predicted and measured of each run; seconds are predicted with the lengths that the responses had."""
    task = make_task(work / "task")
    yield "| run on two workers | | predicted | measured | predicted / measured |\n|---|---|---|---|---|"
    for one in RUNS:
        if only and not any(word in one.name for word in only):
            continue
        rows = [row for row in run(task, one, work)["rows"] if row["measured"]]
        counted = [row["predicted"] / row["measured"] for row in rows if ": " in row["name"]]
        for row in rows:
            if ": " not in row["name"]:
                predicted = row["predicted"] if row["with_lengths"] is None else row["with_lengths"]
                yield (
                    f"| {one.name} | {row['name']}, {row['unit']} | {predicted:.3g} | {row['measured']:.3g} | "
                    f"{predicted / row['measured']:.2f} |"
                )
        yield f"| {one.name} | owners by phase, {len(counted)} counts of GiB | | | {min(counted):.2f} to {max(counted):.2f} |"


def assumptions() -> Iterator[str]:
    """All numbers that plans take as given, by device."""
    from mindspeed_rl.config.loader import build_run_config
    from mindspeed_rl.config.run_files import compose, find_project_configs
    from mindspeed_rl.planner.assumptions import _UNVERIFIED, list_memory_assumptions, list_time_assumptions
    from mindspeed_rl.planner.devices import DEVICES
    from mindspeed_rl.planner.seconds import plan_time
    from mindspeed_rl.run.draft import draft

    run = draft(build_run_config(compose(find_project_configs(), "dapo_qwen3_30b_a3b_A3", [])))
    cfg = run.config
    yield "| device | | value | from | |\n|---|---|---|---|---|"
    seen: dict[tuple[str, ...], list[str]] = {}
    for device in DEVICES.values():
        for one in [*list_memory_assumptions(cfg, device), *list_time_assumptions(cfg, device, plan_time(run, device))]:
            row = (one.name, one.value, one.source, _UNVERIFIED if one.is_unverified else "")
            seen.setdefault(row, []).append(device.name)
    for row, devices in sorted(seen.items(), key=lambda item: "cpu" in item[1] and len(item[1]) == 1):
        yield f"| {', '.join(devices)} | {' | '.join(row)} |"


def speed() -> Iterator[str]:
    """Seconds of the commands, as processes of their own: of the processor, and from beginning to end."""
    from time import perf_counter

    yield "| `mindspeed-rl plan` | processor s | s | imports torch |\n|---|---|---|---|"
    for words in (
        "memory --config-name grpo_qwen3_8b_A3",
        "memory --config-name grpo_deepseek_r1_671b_A2",
        "time --config-name grpo_qwen3_8b_A3",
        "time --config-name grpo_deepseek_r1_671b_A3",
        "fit --npus 16 --model qwen3_32b --prompt 2k --response 8k",
        "fit --npus 384 --model deepseekv3_671b --prompt 1k --response 2k --prompts 384 --samples 32",
    ):
        code = f"import sys; from mindspeed_rl.cli.plan import main; main({words.split()!r}); print('torch' in sys.modules)"
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
        after, took = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter() - began
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        torch = "yes" if done.stdout.split()[-1] == "True" else "no"
        yield f"| `{words}` | {spent:.1f} | {took:.1f} | {torch} |"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("assumptions", "speed", "runs")
    parser.add_argument("--of", nargs="+", choices=parts, default=parts)
    parser.add_argument("--work", type=Path, default=None, help="folder of tasks and runs; a temporary one")
    parser.add_argument("--only", nargs="+", default=[], help="words of the runs' names")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="planner-") as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        makers = {"assumptions": assumptions, "speed": speed}
        for part in arguments.of:
            print(f"\n{part}\n")
            for line in runs(work, arguments.only) if part == "runs" else makers[part]():
                print(line, flush=True)


if __name__ == "__main__":
    main()
