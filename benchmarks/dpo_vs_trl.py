"""DPO steps of this suite and of TRL's DPOTrainer in turn: same model, pairs and precision, a reference in both.

    .venv/bin/python benchmarks/dpo_vs_trl.py --trl-python /tmp/trl/bin/python [--sizes 0.8M 30M]
        [--precisions float32 bfloat16] [--iterations 6]

The environment is grpo_vs_trl.py's. 16 pairs a step with GSM8K's lengths, a question, a chosen and a rejected answer of
random characters. Ours packs both halves of some pairs into one pass without padding, as many as have 2,500 tokens, in one
process with two threads; TRL pads both halves to the longest, with all pairs at a time and with a quarter of them, and its
faster run counts. In bfloat16 ours keeps float32 main weights, TRL's model is only bfloat16. Seconds a step are medians
without the first one; both compute the reference's log-probs in the step.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from beside_trl import Measured, options_parser, run_ours, run_trl, say
from gsm8k_lengths import ANSWER_SHARE, length_at
from tiny_run import SHAPES, make_model, make_task, preprocess

PAIRS = 16
PASS_TOKENS = 2500
#: the longest answer and its question
LONGEST = 640
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def write_pairs(path: Path, count: int) -> None:
    """Rows with the columns that preprocessing and TRL read; the same bytes every time."""
    draw = random.Random(0)

    def text(length: float) -> str:
        return "".join(draw.choices(CHARACTERS, k=max(1, round(length))))

    rows = []
    for number in range(count):
        # evenly spread over the distribution in each step: all steps have the same work, near enough
        length = length_at((number % PAIRS + draw.random()) / PAIRS)
        answer = ANSWER_SHARE * length
        columns = {"instruction": length - answer, "chosen": answer, "rejected": answer * draw.uniform(0.7, 1.3)}
        rows.append({"input": "", **{name: text(size) for name, size in columns.items()}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def ours(folder: Path, precision: str, model: Path, pairs: Path, iterations: int) -> Measured:
    """One process with two threads."""
    keys = {
        "megatron_training.train_iters": iterations,
        "megatron_training.global_batch_size": PAIRS,
        "megatron_training.micro_batch_size": PAIRS,
        "megatron_training.seq_length": LONGEST,
        "megatron_training.bf16": str(precision == "bfloat16").lower(),
        "megatron_training.lr": 1e-5,
        "megatron_training.data_path": pairs,
        "megatron_training.split": "'100,0,0'",
        "megatron_training.eval_interval": 1000,
        "megatron_training.tokenizer_name_or_path": model,
        "megatron_training.load": model,
        "megatron_training.save": "null",
        "megatron_training.log_interval": 1,
        "rl_config.use_remove_padding": "true",
        "rl_config.use_dynamic_bsz": "true",
        "rl_config.max_packing_token_size": PASS_TOKENS,
    }
    return run_ours(folder, "dpo_tiny_cpu", keys, threads=2).measured("both passes and the optimizer")


def main() -> None:
    options = options_parser(__doc__, ["0.8M", "30M"], iterations=6).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = make_task(folder / "task")
        rows = task / "raw" / "pairs.jsonl"
        write_pairs(rows, PAIRS * options.iterations)
        pairs = preprocess(task, rows, task / "data" / "pairs", "AlpacaStylePairwiseHandler")
        for size in options.sizes:
            model = make_model(task, folder / size, {**SHAPES[size], "max_position_embeddings": 2 * LONGEST})
            for precision in options.precisions:
                mine = ours(folder / f"ours_{size}_{precision}", precision, model, pairs, options.iterations)
                settings = {
                    **{"model": str(model), "data": str(rows), "dtype": precision, "tokens": 2 * LONGEST},
                    **{"rows": PAIRS, "iterations": options.iterations},
                }
                place = folder / f"trl_{size}_{precision}"
                theirs = run_trl(place, "dpo", settings, options.trl_python, (PAIRS, PAIRS // 4))
                say(f"DPO, {size} parameters, {precision}, {PAIRS} pairs", mine, theirs)


if __name__ == "__main__":
    main()
