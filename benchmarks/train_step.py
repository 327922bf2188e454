"""Measure an optimizer step of this engine beside transformers with plain torch, on GSM8K's lengths.

    python benchmarks/train_step.py [--sizes 1M 10M 100M] [--precisions float32 bfloat16] [--threads 2] [--rounds 5]
        [--output benchmarks/train_step.md]

Both sides train the same weights on the same rows of random tokens: forward, backward, gradient clipping and an AdamW step,
in float32, or in bfloat16, where ours keeps float32 main weights and the other side has none. The loss is the mean over the
answers' tokens; the losses of both sides must agree, so the work is the same.

- transformers: `model(input_ids, attention_mask, labels)` with SDPA attention, rows padded to the longest of their
  micro-batch, `clip_grad_norm_`, `torch.optim.AdamW(fused=True)`.
- padded: this engine with the same micro-batches, padded likewise.
- packed: this engine with `use_remove_padding`, the same rows in each micro-batch.

The variants take turns, so that what else the machine does hits all of them. Only real tokens count. The median of the rounds
is printed, and nothing is written without --output.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from gsm8k_lengths import ANSWER_SHARE, length_at
from headline import Headline
from torch_as_it_comes import torch_as_it_comes
from transformers import Qwen2Config, Qwen2ForCausalLM

from mindspeed_rl import adaptors, platform

platform.select("cpu")
adaptors.apply("train")

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput  # noqa: E402  (Megatron must be imported after the adaptor)
from mindspeed_rl.checkpoint.hf import HfFolder  # noqa: E402
from mindspeed_rl.config import MegatronConfig  # noqa: E402
from mindspeed_rl.engine import parallel  # noqa: E402
from mindspeed_rl.engine.batching import MicroBatching, Rows  # noqa: E402
from mindspeed_rl.engine.build import batch_shape, build_model  # noqa: E402
from mindspeed_rl.engine.train_engine import TrainEngine  # noqa: E402
from mindspeed_rl.engine.weights import load_weights  # noqa: E402
from mindspeed_rl.models.plan import plan_model  # noqa: E402

IGNORED = -100
#: the losses of both sides may be so far apart: bfloat16 has 8 bits, and the two round in different places
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
LR, DECAY, CLIP = 1e-4, 0.1, 1.0


@dataclass(frozen=True)
class Size:
    """A model and the batch that one step takes.

    Attributes:
        rows, micro_batch: sequences of a step, and of one forward pass.
    """

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    rows: int
    micro_batch: int

    def config(self) -> Qwen2Config:
        """A Qwen2.5 of this size."""
        return Qwen2Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )


SIZES = {
    "1M": Size(vocab=4096, hidden=128, ffn=256, layers=4, heads=4, rows=32, micro_batch=16),
    "10M": Size(vocab=8192, hidden=320, ffn=896, layers=6, heads=10, rows=32, micro_batch=16),
    "100M": Size(vocab=32768, hidden=768, ffn=2048, layers=12, heads=12, rows=8, micro_batch=8),
}


def draw_rows(size: Size) -> Rows:
    """Rows of random tokens with GSM8K's lengths, the same for every call."""
    generator = torch.Generator().manual_seed(0)
    ids, prompts = [], []
    # evenly spread over the distribution, in random order: every batch has its share of long rows
    places = (torch.randperm(size.rows, generator=generator) + 0.5) / size.rows
    for place in places.tolist():
        length = length_at(place)
        ids.append(torch.randint(2, size.vocab, (length,), generator=generator))
        prompts.append(length - round(ANSWER_SHARE * length))
    return Rows(ids, prompts)


# ---------------------------------------------------------------- the two sides

Step = Callable[[], float]


def transformers_step(folder: Path, size: Size, rows: Rows, precision: str) -> Step:
    """One step of the usual loop, which returns its loss."""
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision), attn_implementation="sdpa").train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8, fused=True)
    count = sum(rows.response_lengths)
    batches = []
    for first in range(0, len(rows), size.micro_batch):
        part = rows.select(range(first, min(first + size.micro_batch, len(rows))))
        pad = torch.nn.utils.rnn.pad_sequence
        labels = [torch.where(torch.arange(len(i)) < p, IGNORED, i) for i, p in zip(part.input_ids, part.prompt_lengths)]
        batches.append(
            {
                "input_ids": pad(part.input_ids, batch_first=True, padding_value=0),
                "attention_mask": pad([torch.ones_like(ids) for ids in part.input_ids], batch_first=True),
                "labels": pad(labels, batch_first=True, padding_value=IGNORED),
            }
        )

    @torch_as_it_comes()
    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss = model(**batch, num_items_in_batch=count, use_cache=False).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return total

    return step


def answer_loss(inputs: LossInputs) -> LossOutput:
    """-log p over the answers."""
    return LossOutput(-torch.where(inputs.mask, inputs.outputs[0], 0.0).sum(), inputs.mask.sum())


def engine_step(folder: Path, size: Size, rows: Rows, precision: str, *, packed: bool, shares_prefixes: bool = False) -> Step:
    """One step of this engine, which returns its loss."""
    config = MegatronConfig(
        bf16=precision == "bfloat16",
        lr=LR,
        train_iters=1000,
        lr_decay_style="constant",
        adam_eps=1e-8,
        weight_decay=DECAY,
        clip_grad=CLIP,
    )
    plan = plan_model(config, folder)
    model = build_model(config, plan, trainable=True)
    load_weights(model, HfFolder(folder))
    engine = TrainEngine(config, model, batch_shape(config, packed=packed, pad_id=0, shares_prefixes=shares_prefixes))
    engine.start_training(1)
    count = sum(rows.response_lengths)

    def step() -> float:
        result = engine.train_step(rows, MicroBatching(size.micro_batch), answer_loss)
        return sum(loss.loss_sum.item() for loss in result.losses) / count

    return step


# ---------------------------------------------------------------- measuring


def measure(size: Size, precision: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round by variant.

    Raises:
        SystemExit: the losses differ, so the variants did not do the same work.
    """
    rows = draw_rows(size)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen2ForCausalLM(size.config()).save_pretrained(folder)
        steps = {
            "transformers": transformers_step(Path(folder), size, rows, precision),
            "padded": engine_step(Path(folder), size, rows, precision, packed=False),
            "packed": engine_step(Path(folder), size, rows, precision, packed=True),
        }
    return take_turns(steps, rounds, TOLERANCE[precision])


def take_turns(steps: Mapping[str, Step], rounds: int, tolerance: float) -> dict[str, list[float]]:
    """Seconds of each round by variant; one more round before them warms up.

    Raises:
        SystemExit: a loss is further from the first variant's, so they did not do the same work.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        losses = {}
        for name, step in steps.items():
            start = time.perf_counter()
            losses[name] = step()
            if number:
                seconds[name].append(time.perf_counter() - start)
        first = next(iter(losses.values()))
        if max(abs(loss - first) for loss in losses.values()) > tolerance:
            sys.exit(f"round {number}: the losses differ: {losses}")
    return seconds


HEADER = """\
| parameters | rows | tokens | of padded | transformers tok/s | padded tok/s | packed tok/s \
| padded / transformers | packed / transformers | packed / padded |
|---|---|---|---|---|---|---|---|---|---|"""


def line(size: Size, precision: str, seconds: dict[str, list[float]]) -> str:
    """A row of the table: tokens a second of every variant, and their ratios, which it says as headlines too."""
    lengths, step = draw_rows(size).lengths, size.micro_batch
    padded = sum(max(lengths[i : i + step]) * len(lengths[i : i + step]) for i in range(0, len(lengths), step))
    rate = {name: sum(lengths) / statistics.median(values) for name, values in seconds.items()}
    with torch.device("meta"):
        count = sum(p.numel() for p in Qwen2ForCausalLM(size.config()).parameters())
    cells = [
        f"{count / 1e6:.1f}M {precision}",
        f"{size.rows} in {size.rows // step}",
        f"{sum(lengths):,}",
        f"{sum(lengths) / padded:.0%}",
        *(f"{rate[name]:,.0f}" for name in ("transformers", "padded", "packed")),
        *(
            f"{rate[a] / rate[b]:.2f}"
            for a, b in (("padded", "transformers"), ("packed", "transformers"), ("packed", "padded"))
        ),
    ]
    for name in ("padded", "packed"):
        what, ratio = (
            f"an optimizer step of {count / 1e6:.0f} M parameters, {precision}, {name}, tokens/s",
            rate[name] / rate["transformers"],
        )
        Headline(what, f"{rate[name]:,.0f}", "transformers, padded", f"{rate['transformers']:,.0f}", ratio).say()
    return f"| {' | '.join(cells)} |"


def join_world() -> None:
    """This process is the only rank of a training world."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    parallel.init_distributed(MegatronConfig(seed=1), 1)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--precisions", nargs="+", choices=TOLERANCE, default=list(TOLERANCE))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="Markdown file to write; nothing is written without it")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    join_world()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    chosen = f"--sizes {' '.join(options.sizes)} --precisions {' '.join(options.precisions)}"
    flags = f"{chosen} --threads {options.threads} --rounds {options.rounds}"
    text = [f"`python benchmarks/train_step.py {flags}`\n", f"{versions}, median of {options.rounds} steps\n", HEADER]
    print(*text, sep="\n", flush=True)
    for name in options.sizes:
        for precision in options.precisions:
            text.append(line(SIZES[name], precision, measure(SIZES[name], precision, options.rounds)))
            print(text[-1], flush=True)
    if options.output:
        options.output.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
