"""GRPO runs of this suite and of TRL's GRPOTrainer in turn: same model, prompts, group size, response lengths and precision.

    python -m venv /tmp/trl
    /tmp/trl/bin/pip install torch==2.13.0+cpu -r benchmarks/requirements-trl-train.txt transformers==5.19.0
    .venv/bin/python benchmarks/grpo_vs_trl.py --trl-python /tmp/trl/bin/python [--sizes 0.8M 30M 100M]
        [--precisions float32 bfloat16] [--lengths 64 256 varying] [--iterations 5]

Models have random weights and a vocabulary of 128 characters. Responses have exactly so many tokens, or (`varying`) end where
the end token is drawn: about one in 128, so half are shorter than 90 or so, and one in eight is cut at 256. Neither side
has a reference model, and both make one optimizer step an iteration. One of our forward passes holds up to 2,500 tokens; TRL
runs twice, with all completions at a time and with a quarter of them, and its faster run counts. In bfloat16 ours keeps
float32 main weights and TRL has a model of bfloat16 alone, which is its fastest setting here. Seconds an iteration are medians
without the first one, memory is the sum over all processes (PSS).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headline import Headline
from tiny_run import SHAPES, make_model, make_task, preprocess, train_command, watched

from mindspeed_rl.observability.run_files import read_run

WARM_UP = 1
GROUP = 8
#: completions of an iteration by size of the model
COMPLETIONS = {"0.8M": 256, "30M": 64, "100M": 16}
VARYING, LONGEST = "varying", 256
MICRO_BATCH_TOKENS = 2500
#: each has one thread
WORKERS = 2
TIMINGS = {"rollout": "rollout", "rewards": "rule_reward", "advantages": "adv", "update": "update", "push": "update_weights"}


@dataclass(frozen=True)
class Cell:
    """One comparison.

    Attributes:
        length: tokens of a response, or VARYING.
    """

    size: str
    precision: str
    length: str

    @property
    def tokens(self) -> int:
        """The most that a response has."""
        return LONGEST if self.length == VARYING else int(self.length)

    @property
    def completions(self) -> int:
        return COMPLETIONS[self.size]

    def __str__(self) -> str:
        tokens = f"{self.length} tokens" if self.length != VARYING else "varying lengths"
        return f"GRPO, {self.size} parameters, {self.precision}, {self.completions} completions of {tokens}"


@dataclass(frozen=True)
class Measured:
    """Seconds an iteration, GiB of all processes, and where the seconds go or which setting it was."""

    iteration_s: float
    memory_gib: float
    notes: str


def ours(folder: Path, cell: Cell, model: Path, prompts: Path, iterations: int) -> Measured:
    """Two workers that train and generate, one thread each."""
    prompts_each = cell.completions // GROUP
    keys = {
        "run_dir": folder,
        "megatron_training.train_iters": iterations,
        "megatron_training.tokenizer_name_or_path": model,
        "megatron_training.data_path": prompts,
        "megatron_training.eval_data_path": "null",
        "megatron_training.global_batch_size": prompts_each,
        "megatron_training.bf16": str(cell.precision == "bfloat16").lower(),
        "actor_config.load": model,
        "actor_config.save": "null",
        "actor_config.tensor_model_parallel_size": 1,
        "actor_config.lr": 1e-5,
        "actor_config.min_lr": 0.0,
        "actor_config.micro_batch_size": 1,
        "rl_config.actor_resource.num_npus": WORKERS,
        "rl_config.use_dynamic_bsz": "true",
        "rl_config.max_packing_token_size": MICRO_BATCH_TOKENS,
        "rl_config.n_samples_per_prompt": GROUP,
        "rl_config.mini_batch_size": prompts_each,
        "rl_config.init_kl_coef": 0.0,
        "rl_config.log_probs_diff_limit": "null",  # bfloat16's is above that of the run file
        "generate_config.dtype": cell.precision,
        "generate_config.max_num_seqs": min(128, cell.completions // WORKERS),
        "generate_config.max_model_len": cell.tokens + 32,
        "generate_config.kv_cache_memory_gib": "null",
        "generate_config.sampling_config.max_tokens": cell.tokens,
        "generate_config.sampling_config.ignore_eos": str(cell.length != VARYING).lower(),
    }
    seen = watched(train_command(keys), folder.with_name(f"{folder.name}.log"), {"OMP_NUM_THREADS": "1"})
    series = read_run(folder).history.series

    def measured(name: str) -> list[float]:
        return list(series[name].y)[WARM_UP:]

    shortest = min(measured("response_length/min"))
    if cell.length != VARYING and shortest != cell.tokens:
        raise RuntimeError(f"a response of {shortest} tokens instead of {cell.tokens}")
    notes = ", ".join(f"{name} {statistics.median(measured(f'timing/{key}')):.2f}" for name, key in TIMINGS.items())
    notes += f"; {statistics.mean(measured('response_length/mean')):.0f} tokens a response"
    return Measured(statistics.median(measured("timing/all")), seen.memory_gib, notes)


def trl(folder: Path, cell: Cell, model: Path, prompts: Path, iterations: int, python: str) -> Measured:
    """The faster of two settings."""
    found = []
    for at_once in (cell.completions, max(GROUP, cell.completions // 4)):
        settings = {
            "model": str(model),
            "data": str(prompts),
            "dtype": cell.precision,
            "group": GROUP,
            "rows": cell.completions,
            "at_once": at_once,
            "tokens": cell.tokens,
            "fixed": cell.length != VARYING,
            "iterations": iterations,
        }
        found.append(beside(folder.with_name(f"{folder.name}_{at_once}"), "grpo", settings, python, f"{at_once} at a time"))
    return min(found, key=lambda one: one.iteration_s)


def beside(folder: Path, kind: str, settings: dict, python: str, notes: str) -> Measured:
    """One run of trl_side.py."""
    folder.mkdir()
    asked, output = folder / "settings.json", folder / "seconds.json"
    asked.write_text(json.dumps(settings))
    script = Path(__file__).with_name("trl_side.py")
    environment = {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    seen = watched([python, str(script), kind, str(asked), str(output)], folder / "log.txt", environment)
    return Measured(statistics.median(json.loads(output.read_text())[WARM_UP:]), seen.memory_gib, notes)


def say(what: str, mine: Measured, theirs: Measured) -> None:
    """Headlines of a comparison, and where our time goes."""
    name = f"TRL, {theirs.notes}"
    pairs = [("seconds an iteration", mine.iteration_s, theirs.iteration_s), ("GiB", mine.memory_gib, theirs.memory_gib)]
    for unit, a, b in pairs:
        Headline(f"{what}, {unit}", f"{a:.2f}", name, f"{b:.2f}", b / a).say()
    print(f"where our {mine.iteration_s:.2f} s go: {mine.notes}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="python of an environment with TRL")
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--precisions", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--lengths", nargs="+", default=["64", "256", VARYING])
    parser.add_argument("--iterations", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = make_task(folder / "task")
        rows = task / "raw" / "train.jsonl"
        words = ("--dataset-additional-keys", "labels")
        prompts = preprocess(task, rows, task / "data" / "train", "R1AlpacaStyleInstructionHandler", *words)
        for size in options.sizes:
            model = make_model(task, folder / size, SHAPES[size])
            for number, (precision, length) in enumerate((p, n) for p in options.precisions for n in options.lengths):
                cell, place = Cell(size, precision, length), folder / f"{size}_{number}"
                mine = ours(place.with_name(f"ours_{place.name}"), cell, model, prompts, options.iterations)
                theirs = trl(place.with_name(f"trl_{place.name}"), cell, model, rows, options.iterations, options.trl_python)
                say(str(cell), mine, theirs)


if __name__ == "__main__":
    main()
