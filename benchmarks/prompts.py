"""Measure an optimizer step on samples that share prompts: each prompt computed once (`use_prefix_grouper`) and once a sample.

    python benchmarks/prompts.py [--size 10M] [--precisions float32 bfloat16] [--prompts 6 64 256] [--response 64] [--rounds 3]

32 samples of random tokens, eight to a prompt, in micro-batches of sixteen; both sides are this engine with packed rows, the
same weights and the same loss, which must agree. They take turns; the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from headline import Headline
from train_step import SIZES, TOLERANCE, Rows, Size, engine_step, join_world, take_turns
from transformers import Qwen2ForCausalLM

GROUP = 8


def draw_rows(size: Size, prompt: int, response: int) -> Rows:
    """Rows of random tokens, group after group."""
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randint(2, size.vocab, (count,), generator=generator)

    ids = [torch.cat([shared, draw(response)]) for shared in map(draw, [prompt] * (size.rows // GROUP)) for _ in range(GROUP)]
    return Rows(ids, [prompt] * len(ids))


def measure(size: Size, precision: str, prompt: int, response: int, rounds: int) -> tuple[float, float]:
    """Seconds of a step with prompts computed once, and once a sample.

    Raises:
        SystemExit: the losses differ, so the two did not do the same work.
    """
    rows = draw_rows(size, prompt, response)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen2ForCausalLM(size.config()).save_pretrained(folder)
        steps = {
            name: engine_step(Path(folder), size, rows, precision, packed=True, shares_prefixes=shares)
            for name, shares in (("apart", False), ("shared", True))
        }
    seconds = take_turns(steps, rounds, TOLERANCE[precision])
    return statistics.median(seconds["shared"]), statistics.median(seconds["apart"])


def main() -> None:
    """Says a headline for each prompt length and precision."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--precisions", nargs="+", choices=TOLERANCE, default=list(TOLERANCE))
    parser.add_argument("--prompts", nargs="+", type=int, default=[6, 64, 256])
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    join_world()
    for precision in options.precisions:
        for prompt in options.prompts:
            shared, apart = measure(SIZES[options.size], precision, prompt, options.response, options.rounds)
            what = f"an optimizer step of {options.size} parameters, {precision}, eight responses of {options.response} tokens"
            Headline(
                f"{what} to each prompt of {prompt}, prompts computed once, s",
                f"{shared:.2f}",
                "once a sample",
                f"{apart:.2f}",
                apart / shared,
            ).say()


if __name__ == "__main__":
    main()
