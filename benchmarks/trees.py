"""Measure an optimizer step on trees of turns: each part of a history computed once (`use_prefix_grouper`) and once a sequence.

    python benchmarks/trees.py [--size 1M] [--precision float32] [--rounds 3] [--record]

The trees are in trees.json: four samples of each of four kinds of programs, as their requests make them. Tokens are random, and
those that sequences share are equal. Both sides are this engine with packed rows, a micro-batch for the four samples of a kind,
the same weights and the same loss, which must agree. They take turns; processor time counts, the median of the rounds.

With --record, the programs play again through the gateway, whose model writes texts of random lengths, and trees.json is
written anew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from headline import Headline
from train_step import SIZES, TOLERANCE, Rows, Size, engine_step, join_world
from transformers import Qwen2ForCausalLM

FILE = Path(__file__).with_name("trees.json")
SAMPLES = 4
#: tokens of the system prompt and the task, of a result of a tool, and of a turn, which vary by half
START, RESULT, TURN = 120, 48, 32
#: index of the earlier sequence of the sample that it continues, or -1; tokens of that which it keeps; numbers of tokens after
#: these: its prompt, then sampled tokens and context in turn
Shape = tuple[int, int, list[int]]


# ---------------------------------------------------------------------- recording

Ask = Callable[[list[dict[str, Any]]], Awaitable[str]]
Choose = Callable[[list[dict[str, Any]], int], Awaitable[list[str]]]


def letters(draw: random.Random, count: int) -> str:
    return "".join(draw.choices("abcdefghij", k=max(1, round(count * draw.uniform(0.5, 1.5)))))


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def converse(ask: Ask, messages: list[dict[str, Any]], turns: int, draw: random.Random) -> list[dict[str, Any]]:
    for _ in range(turns):
        messages = [*messages, said(await ask(messages)), {"role": "user", "content": letters(draw, RESULT)}]
    return messages


async def summarise(ask: Ask, choose: Choose, start: list[dict[str, Any]], draw: random.Random) -> None:
    """Eight turns, a summary of them, and four more."""
    await converse(ask, start, 8, draw)
    await converse(ask, [start[0], {"role": "user", "content": letters(draw, 2 * RESULT)}], 4, draw)


async def delegate(ask: Ask, choose: Choose, start: list[dict[str, Any]], draw: random.Random) -> None:
    """Three sub-agents of three turns, each with the history of the two turns before them; then three more."""
    messages = await converse(ask, start, 2, draw)
    for _ in range(3):
        await converse(ask, [*messages[:-1], {"role": "user", "content": letters(draw, RESULT)}], 3, draw)
    await converse(ask, messages, 3, draw)


async def search(ask: Ask, choose: Choose, start: list[dict[str, Any]], draw: random.Random) -> None:
    """Four choices at each of four levels, of which one continues."""
    messages = start
    for _ in range(4):
        chosen = draw.choice(await choose(messages, 4))
        messages = [*messages, said(chosen), {"role": "user", "content": letters(draw, RESULT)}]


async def forget(ask: Ask, choose: Choose, start: list[dict[str, Any]], draw: random.Random) -> None:
    """Eight turns, of which the next request has the second half alone: thoughts are dropped."""
    messages = start
    for _ in range(8):
        text = await ask(messages)
        messages = [*messages, said(text[len(text) // 2 :]), {"role": "user", "content": letters(draw, RESULT)}]


PROGRAMS = {"summary": summarise, "sub-agents": delegate, "search": search, "thoughts dropped": forget}


async def record_sample(name: str, seed: int) -> list[Shape]:
    """The sequences of a sample, each with the longest start that an earlier one has."""
    import sys

    tests = Path(__file__).resolve().parents[1] / "tests"
    sys.path[:0] = [str(tests), str(tests / "unit"), str(tests / "unit" / "rollout")]
    from test_agent_loops import END, SAMPLING, TOKENIZER, settings  # a tokenizer of characters, and limits

    from mindspeed_rl.data.templates import load_template
    from mindspeed_rl.data.turns import ChatTurns
    from mindspeed_rl.rollout.agents.conversation import TrajectoryLimits
    from mindspeed_rl.rollout.agents.loop import Task
    from mindspeed_rl.rollout.agents.turn_tree import TurnTree
    from mindspeed_rl.rollout.protocol import Generated
    from mindspeed_rl.tools.request_forms import TurnRequest

    draw = random.Random(f"{name}/{seed}")

    class Writer:
        async def generate(self, *_: Any) -> Generated:
            ids = (*TOKENIZER.encode(letters(draw, TURN)), END)
            return Generated(ids, (-1.0,) * len(ids), (0,) * len(ids), "stop")

    turns, limits = ChatTurns(load_template("qwen"), TOKENIZER), TrajectoryLimits(10**6, 10**5, 10**6)
    task: Any = Task((), replace(SAMPLING, max_tokens=4096), seed)
    engine: Any = Writer()
    tree = TurnTree(task, engine, settings(turns=turns, limits=limits))

    async def choose(messages: list[dict[str, Any]], count: int) -> list[str]:
        return [reply.turn.content for reply in await tree.complete(TurnRequest(tuple(messages), num_choices=count))]

    async def ask(messages: list[dict[str, Any]]) -> str:
        return (await choose(messages, 1))[0]

    shared = random.Random(name)  # the samples of a task start alike
    start = [{"role": role, "content": letters(shared, START / 2)} for role in ("system", "user")]
    await PROGRAMS[name](ask, choose, start, draw)
    shapes: list[Shape] = []
    known: list[list[int]] = []
    for sequence in tree.end().sequences:
        counts, ids = [len(sequence.prompt_ids)], list(sequence.prompt_ids)
        for segment in sequence.segments:
            counts.append(len(segment.token_ids))
            ids += segment.token_ids
        kept = [len(os.path.commonprefix([ids[: counts[0] - 1], other])) for other in known]
        best = max(range(len(kept)), key=lambda index: kept[index], default=-1)
        count = kept[best] if best >= 0 else 0
        shapes.append((best if count else -1, count, [counts[0] - count, *counts[1:]]))
        known.append(ids)
    return shapes


# ---------------------------------------------------------------------- measuring


def build_rows(samples: Sequence[Sequence[Shape]], vocab: int) -> Rows:
    """Rows of random tokens with these shapes; the samples begin alike, as far as the shortest context of a first sequence."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randint(2, vocab, (min(sample[0][2][0] for sample in samples) - 1,), generator=generator)
    rows, spans = [], []
    for sample in samples:
        sequences: list[torch.Tensor] = []
        own = []
        for parent, kept, counts in sample:
            new = torch.randint(2, vocab, (sum(counts),), generator=generator)
            if parent < 0 and not sequences:
                new[: len(common)] = common
            sequences.append(torch.cat([sequences[parent][:kept], new]) if parent >= 0 else new)
            own.append((kept + counts[0], sum(counts[1:])))
        rows.append(torch.cat(sequences))
        spans.append(own)
    return Rows(rows, [row[0][0] for row in spans], sequences=spans)


def measure(size: Size, precision: str, rows: Rows, rounds: int) -> tuple[float, float]:
    """Seconds of the processor for a step with shared histories, and without.

    Raises:
        SystemExit: the losses differ, so the two did not do the same work.
    """
    config = size.config()
    config.max_position_embeddings = 4096
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)
        size = replace(size, micro_batch=SAMPLES)
        steps = {
            shares: engine_step(Path(folder), size, rows, precision, packed=True, shares_prefixes=shares)
            for shares in (False, True)
        }
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        losses = []
        for shares, step in steps.items():
            start = time.process_time()
            losses.append(step())
            seconds[shares] += [time.process_time() - start] if number else []  # the first round warms up
        if abs(losses[1] - losses[0]) > TOLERANCE[precision] * abs(losses[0]):
            raise SystemExit(f"the losses differ: {losses}")
    return statistics.median(seconds[True]), statistics.median(seconds[False])


def main() -> None:
    """Says a headline for each kind of tree."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="1M")
    parser.add_argument("--precision", choices=TOLERANCE, default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if options.record:
        kinds = {name: [asyncio.run(record_sample(name, seed)) for seed in range(SAMPLES)] for name in PROGRAMS}
        FILE.write_text("{\n" + ",\n".join(f'"{name}": {json.dumps(trees)}' for name, trees in kinds.items()) + "\n}\n")
        return
    join_world()
    size = SIZES[options.size]
    for name, samples in json.loads(FILE.read_text()).items():
        rows = build_rows(samples, size.vocab)
        total = sum(len(ids) for ids in rows.input_ids)
        computed = sum(sum(counts) for sample in samples for _, _, counts in sample)
        shared, apart = measure(size, options.precision, rows, options.rounds)
        Headline(
            f"an optimizer step of {options.size} parameters on trees of {name} ({computed:,} of {total:,} tokens differ), "
            "histories computed once, CPU s",
            f"{shared:.2f}",
            "once a sequence",
            f"{apart:.2f}",
            apart / shared,
        ).say()


if __name__ == "__main__":
    main()
