"""Measure how much of the time that its products alone would take an update of a 135M model reaches.

    python benchmarks/update_limit.py [--precision bfloat16] [--threads 1] [--groups 8] [--prompt 49] [--response 32]
        [--micro-batch 32] [--rounds 3] [--profile]

Random weights in the shapes of SmolLM2-135M (30 layers of 576, 9 heads with 3 of keys and values, a tied vocabulary of 49,152),
eight responses to each prompt, packed rows in which each prompt is computed once, as a run of GRPO has them by default. The
limit is torch's own products of the same shapes, number and precision, forward, for the input's gradient and for the weight's,
of all layers and the head, on tensors that are ready; attention, norms, activations, the loss and the optimizer are not in it.
Both are measured in turn, in seconds of the processor (the machine may do other work); medians count. --profile prints the
operators of one step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from headline import Headline
from prompts import GROUP, draw_rows
from train_step import Size, engine_step, join_world
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, VOCAB = 576, 1536, 30, 9, 3, 49_152
HEAD = HIDDEN // HEADS
#: outputs and inputs of the products of a layer: query, key and value; attention's output; gate and up; down
LAYER_PRODUCTS = (((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN))
#: tokens for which the head computes logits at a time: `loss_chunk_size`
CHUNK = 1024
SHOWN = 28


def make_model(folder: Path) -> None:
    """Random weights of these shapes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class Products:
    """The products of an update: one pass of `tokens` tokens, of which `answers` reach the head, `passes` times."""

    def __init__(self, tokens: int, answers: int, passes: int, dtype: torch.dtype) -> None:
        self._passes = passes
        self._work: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        counts = [(LAYERS, tokens, *shape) for shape in LAYER_PRODUCTS]
        counts += [(1, min(CHUNK, answers - first), VOCAB, HIDDEN) for first in range(0, answers, CHUNK)]
        self.flop = 0
        for times, rows, outputs, inputs in counts:
            shapes = ((rows, inputs), (outputs, inputs), (rows, outputs))
            self._work.append((times, *(torch.randn(shape).to(dtype) for shape in shapes)))
            self.flop += passes * times * 6 * rows * outputs * inputs

    def step(self) -> None:
        for _ in range(self._passes):
            for times, rows, weight, gradient in self._work:
                for _ in range(times):
                    torch.mm(rows, weight.t())
                    torch.mm(gradient, weight)
                    torch.mm(gradient.t(), rows)


def processor_seconds(step: Callable[[], object]) -> float:
    """Seconds of the processor that a step takes."""
    before = time.process_time()
    step()
    return time.process_time() - before


def main() -> None:
    """Says the share."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=49)
    parser.add_argument("--response", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    join_world()
    size = Size(VOCAB, HIDDEN, FFN, LAYERS, HEADS, options.groups * GROUP, options.micro_batch)
    rows = draw_rows(size, options.prompt, options.response)
    passes = len(rows) // options.micro_batch
    tokens = options.micro_batch // GROUP * options.prompt + options.micro_batch * options.response
    products = Products(tokens, options.micro_batch * options.response, passes, getattr(torch, options.precision))
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        step = engine_step(Path(folder), size, rows, options.precision, packed=True, shares_prefixes=True)
        step(), products.step()
        ours, limit = [], []
        for _ in range(options.rounds):
            ours.append(processor_seconds(step))
            limit.append(processor_seconds(products.step))
        mine, least = statistics.median(ours), statistics.median(limit)
        cell = f"{options.precision}, {len(rows)} x {options.response} tokens, {options.threads} threads"
        print(f"products: {products.flop / 1e12:.2f} TFLOP at {products.flop / least / 1e9:.0f} GFLOP/s a core")
        Headline(
            f"an update of 135M parameters, {cell}, processor seconds",
            f"{mine:.2f}",
            "its products alone",
            f"{least:.2f}",
            least / mine,
        ).say()
        if options.profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
                step()
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=SHOWN, max_name_column_width=50))


if __name__ == "__main__":
    main()
