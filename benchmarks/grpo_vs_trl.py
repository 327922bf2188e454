"""GRPO runs of this suite and of TRL's GRPOTrainer in turn: same model, prompts, group size, response lengths and precision.

    python -m venv /tmp/trl
    /tmp/trl/bin/pip install torch==2.13.0+cpu -r benchmarks/requirements-trl-train.txt transformers==5.19.0
    .venv/bin/python benchmarks/grpo_vs_trl.py --trl-python /tmp/trl/bin/python [--sizes 0.8M 30M 100M]
        [--precisions float32 bfloat16] [--lengths 64 256 varying] [--iterations 5]
    .venv/bin/python benchmarks/grpo_vs_trl.py --trl-python /tmp/trl/bin/python --model FOLDER --sizes 135M
        --precisions bfloat16 --lengths 32 128 --iterations 4

--model is the folder of SmolLM2-135M-Instruct that `examples/real_model/make_model.sh` makes, for the size 135M: prompts are
questions in its chat template, 60 tokens or so. Other models have random weights and a vocabulary of 128 characters.

Responses have exactly so many tokens, or (`varying`) end where the end token is drawn: about one in 128, so half are
shorter than 90 or so, and one in eight is cut at 256. Neither side has a reference model, and both make one optimizer step
an iteration. Ours runs with one worker or two, and with as many tokens in a forward pass, as SETTINGS says, where both
numbers of workers were tried before; TRL runs twice, with all completions at a time and with a quarter of them, and its
faster run counts. In bfloat16 ours keeps float32 main weights and TRL has a model of only bfloat16, which is its fastest
setting here. Seconds an iteration are medians without the first one, memory is the sum over all processes (PSS).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from beside_trl import Measured, options_parser, run_ours, run_trl, say
from tiny_run import SHAPES, make_model, make_task, preprocess

GROUP = 8
#: completions of an iteration by size of the model
COMPLETIONS = {"0.8M": 256, "30M": 64, "100M": 16, "135M": 64}
VARYING, LONGEST = "varying", 256
SHORTEST, CORES = 64, 2
#: tokens of a prompt at most: of a chat, and of a sum
PROMPT_ROOM = {False: 128, True: 32}


@dataclass(frozen=True)
class Setting:
    """How ours runs a cell.

    Attributes:
        workers: processes that train and generate; they share the two cores, so one has two threads.
        pass_tokens: the most tokens of a forward pass.
    """

    workers: int
    pass_tokens: int


#: (size, precision) -> settings by length, of responses of 64 tokens and less, of longer ones, and of varying ones
SETTINGS = {
    ("0.8M", "float32"): {"64": Setting(2, 2500), "256": Setting(2, 2500), VARYING: Setting(2, 2500)},
    ("0.8M", "bfloat16"): {"64": Setting(2, 2500), "256": Setting(2, 1250), VARYING: Setting(2, 1250)},
    ("30M", "float32"): {"64": Setting(1, 1250), "256": Setting(2, 1250), VARYING: Setting(1, 1250)},
    ("30M", "bfloat16"): {"64": Setting(2, 1250), "256": Setting(2, 1250), VARYING: Setting(2, 1250)},
    ("100M", "float32"): {"64": Setting(1, 640), "256": Setting(1, 1250), VARYING: Setting(1, 1250)},
    ("100M", "bfloat16"): {"64": Setting(1, 640), "256": Setting(1, 1250), VARYING: Setting(1, 1250)},
    ("135M", "bfloat16"): {"64": Setting(1, 1250), "256": Setting(1, 1250), VARYING: Setting(1, 1250)},
}
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
    def setting(self) -> Setting:
        """How ours runs it."""
        fixed = "64" if self.tokens <= SHORTEST else "256"
        return SETTINGS[self.size, self.precision][self.length if self.length == VARYING else fixed]

    @property
    def completions(self) -> int:
        return COMPLETIONS[self.size]

    def __str__(self) -> str:
        tokens = f"{self.length} tokens" if self.length != VARYING else "varying lengths"
        return f"GRPO, {self.size} parameters, {self.precision}, {self.completions} completions of {tokens}"


def ours(folder: Path, cell: Cell, model: Path, prompts: Path, iterations: int) -> Measured:
    """A run of GRPO, every worker of which trains and generates."""
    setting = cell.setting
    prompts_each = cell.completions // GROUP
    keys = {
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
        "rl_config.actor_resource.num_npus": setting.workers,
        "rl_config.use_dynamic_bsz": "true",
        "rl_config.max_packing_token_size": setting.pass_tokens,
        "rl_config.n_samples_per_prompt": GROUP,
        "rl_config.mini_batch_size": prompts_each,
        "rl_config.init_kl_coef": 0.0,
        "rl_config.log_probs_diff_limit": "null",  # bfloat16's is above the run file's limit
        "generate_config.dtype": cell.precision,
        "generate_config.max_num_seqs": min(128, cell.completions // setting.workers),
        "rl_config.max_prompt_length": PROMPT_ROOM[cell.size in SHAPES],
        "generate_config.max_model_len": cell.tokens + PROMPT_ROOM[cell.size in SHAPES],
        "generate_config.kv_cache_memory_gib": "null",
        "generate_config.sampling_config.max_tokens": cell.tokens,
        "generate_config.sampling_config.ignore_eos": str(cell.length != VARYING).lower(),
    }
    run = run_ours(folder, "grpo_tiny_cpu", keys, threads=CORES // setting.workers)
    shortest = min(run.values("response_length/min"))
    if cell.length != VARYING and shortest != cell.tokens:
        raise RuntimeError(f"a response of {shortest} tokens instead of {cell.tokens}")
    notes = ", ".join(f"{name} {statistics.median(run.values(f'timing/{key}')):.2f}" for name, key in TIMINGS.items())
    return run.measured(f"{notes}; {statistics.mean(run.values('response_length/mean')):.0f} tokens a response")


def trl(folder: Path, cell: Cell, model: Path, prompts: Path, iterations: int, python: str) -> Measured:
    """The faster of two settings."""
    settings = {
        "model": str(model),
        "data": str(prompts),
        "dtype": cell.precision,
        "group": GROUP,
        "rows": cell.completions,
        "tokens": cell.tokens,
        "chat": cell.size not in SHAPES,
        "fixed": cell.length != VARYING,
        "iterations": iterations,
    }
    return run_trl(folder, "grpo", settings, python, (cell.completions, max(GROUP, cell.completions // 4)))


def write_questions(rows: Path, output: Path) -> Path:
    """The sums of the task in words."""
    lines = [json.loads(line) for line in rows.read_text().splitlines()[:2000]]
    words = "Add the two numbers, digit by digit from the right, and write nothing but their sum: "
    output.write_text("".join(json.dumps({**row, "instruction": words + row["instruction"]}) + "\n" for row in lines))
    return output


def check_cells(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program where a comparison that was asked for has no settings, before the first one runs."""
    if options.model is None and any(size not in SHAPES for size in options.sizes):
        parser.error("--model: needed for 135M")
    for length in options.lengths:
        if length != VARYING and not (length.isascii() and length.isdigit() and int(length) > 0):
            parser.error(f"--lengths: {length} is neither a number of tokens nor {VARYING}")
    missing = [key for size in options.sizes for precision in options.precisions if (key := (size, precision)) not in SETTINGS]
    if missing:
        asked, known = (", ".join(" in ".join(key) for key in keys) for keys in (missing, SETTINGS))
        parser.error(f"--sizes, --precisions: no settings of ours for {asked}; there are {known}")


def main() -> None:
    parser = options_parser(__doc__, list(SHAPES), iterations=5, others=["135M"])
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct, for 135M")
    parser.add_argument("--lengths", nargs="+", default=["64", "256", VARYING])
    options = parser.parse_args()
    check_cells(parser, options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = make_task(folder / "task")
        sums = task / "raw" / "train.jsonl"
        words = ("--dataset-additional-keys", "labels")
        for size in options.sizes:
            if size in SHAPES:
                model, rows, tokenizer = make_model(task, folder / size, SHAPES[size]), sums, task / "model"
            else:
                model = tokenizer = options.model.resolve()
                rows = write_questions(sums, folder / "questions.jsonl")
            data = folder / f"data_{size}"
            prompts = preprocess(tokenizer, rows, data / "train", "R1AlpacaStyleInstructionHandler", *words)
            for number, (precision, length) in enumerate((p, n) for p in options.precisions for n in options.lengths):
                cell, place = Cell(size, precision, length), folder / f"{size}_{number}"
                mine = ours(place.with_name(f"ours_{place.name}"), cell, model, prompts, options.iterations)
                theirs = trl(place.with_name(f"trl_{place.name}"), cell, model, rows, options.iterations, options.trl_python)
                say(str(cell), mine, theirs)


if __name__ == "__main__":
    main()
