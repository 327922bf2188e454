"""Rows/s and tokens/s of preprocessing beside the bare `tokenizers` batch encoder on the same text, and its peak memory.

    python benchmarks/preprocess.py [--rows 20000] [--documents 400] [--workers 1 2] [--tokenizer FOLDER] [--gsm8k train.jsonl]
    python benchmarks/preprocess.py --memory 16 64 256

Inputs: question and answer rows (GSM8K, or the test sample repeated with changed numbers) through
AlpacaStyleInstructionHandler, long documents of about 20 kB through GeneralPretrainHandler, and with --tokenizer the rows as
conversations through its chat template. The limit is
`encode_batch_fast` on the very texts that preprocessing encodes, in batches of 512, ids read, by as many processes as
preprocessing has workers; both sides begin with a fresh tokenizer, whose cache is empty. A CPU second is one of any process; a
busy machine disturbs tokens per CPU second less than tokens per wall second, so the share is taken of the former. Imports are
not part of any figure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from headline import Headline
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.data.indexed import open_indexed
from mindspeed_rl.data.preprocess import _build_handler, _open_input, run
from mindspeed_rl.data.preprocess_config import PreprocessConfig
from mindspeed_rl.data.sources import read_rows
from mindspeed_rl.data.tokenizer import load_tokenizer

SAMPLE = Path(__file__).parents[1] / "tests" / "data" / "gsm8k" / "sample.jsonl"
BATCH = 512


@dataclass
class Timing:
    """Work done and what it took; CPU seconds include finished child processes."""

    rows: int
    tokens: int
    wall_s: float
    cpu_s: float


def timed(work: Callable[[], tuple[int, int]]) -> Timing:
    """Run `work`, which returns (rows, tokens)."""

    def cpu() -> float:
        own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
        return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime

    wall, start = time.perf_counter(), cpu()
    rows, tokens = work()
    return Timing(rows, tokens, time.perf_counter() - wall, cpu() - start)


def questions(count: int, source: Path) -> Iterator[dict[str, str]]:
    """`count` question and answer rows: the file's, again and again with other numbers put in front."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    for number in range(count):
        row = rows[number % len(rows)]
        again = number // len(rows)
        yield row if not again else {"question": f"({again}) {row['question']}", "answer": f"{row['answer']} ({again})"}


def conversations(count: int, source: Path) -> Iterator[dict[str, list[dict[str, str]]]]:
    """The same questions and answers as conversations of two messages in ShareGPT's form."""
    for row in questions(count, source):
        yield {"conversations": [{"from": "human", "value": row["question"]}, {"from": "gpt", "value": row["answer"]}]}


def documents(count: int, source: Path) -> Iterator[dict[str, str]]:
    """`count` texts of about 20 kB, sentences of the file in random order."""
    sentences = [sentence for row in questions(500, source) for text in row.values() for sentence in text.split("\n")]
    generator = random.Random(0)
    for _ in range(count):
        yield {"text": " ".join(generator.choices(sentences, k=20_000 // (sum(map(len, sentences)) // len(sentences))))}


def write(path: Path, rows: Iterator[Any]) -> Path:
    """Write rows as JSONL."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return path


def train_tokenizer(folder: Path, source: Path) -> Path:
    """A byte-level BPE tokenizer of up to 8000 entries with ChatML's tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = [text for row in questions(2000, source) for text in row.values()]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def bare(config: PreprocessConfig, processes: int) -> Timing:
    """The bare encoder on the texts that preprocessing would encode, shared out to forked processes."""
    handler = _build_handler(config)
    renderings = [r for *_, row in read_rows(_open_input(config, handler)) for r in handler.render(row).renderings]
    sides = [side for rendering in renderings for turn in rendering.turns for side in (turn.source, turn.target)]
    texts = [piece for side in sides for piece in side if isinstance(piece, str)]
    special = sum(not isinstance(piece, str) for side in sides for piece in side)

    def share(first: int) -> int:
        tokens = 0
        for start in range(first * BATCH, len(texts), processes * BATCH):
            for encoding in encoder.encode_batch_fast(texts[start : start + BATCH], add_special_tokens=False):
                tokens += len(encoding.ids)
        return tokens

    def work() -> tuple[int, int]:
        if processes == 1:
            return len(renderings), share(0) + special
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            jobs = [pool.apply_async(_call_share, (first,)) for first in range(processes)]
            tokens = sum(job.get() for job in jobs) + special
            pool.close()
            pool.join()
        return len(renderings), tokens

    global _share
    _share = share
    # a tokenizer that has seen the texts answers from its cache, which preprocessing begins without
    encoder = _build_handler(config).settings.tokenizer.backend_tokenizer
    return timed(work)


_share: Callable[[int], int] = len


def _call_share(first: int) -> int:
    return _share(first)


def whole(config: PreprocessConfig) -> Timing:
    """The run itself, reading, encoding, writing and reporting."""

    def work() -> tuple[int, int]:
        report = run(config)
        return report.counts.rows_read, report.counts.tokens

    return timed(work)


def line(name: str, timing: Timing, limit: Timing) -> str:
    share = (timing.tokens / timing.cpu_s) / (limit.tokens / limit.cpu_s)
    return (
        f"| {name} | {timing.rows / timing.wall_s:,.0f} | {timing.tokens / timing.wall_s:,.0f} |"
        f" {timing.tokens / timing.cpu_s:,.0f} | {100 * share:.0f} % |"
    )


def speed(arguments: argparse.Namespace, folder: Path, tokenizer: str) -> None:
    """Print a table for each input."""
    source = arguments.gsm8k
    common = {"tokenizer_name_or_path": tokenizer, "output_prefix": str(folder / "out")}
    sft = {
        "input": str(write(folder / "rows.jsonl", questions(arguments.rows, source))),
        "handler_name": "AlpacaStyleInstructionHandler",
        "prompt_type": "qwen",
        "map_keys": {"prompt": "question", "query": "", "response": "answer"},
    }
    pretrain = {"input": str(write(folder / "text.jsonl", documents(arguments.documents, source)))}
    kinds = {"question and answer rows": sft, "long documents": pretrain}
    if arguments.tokenizer and load_tokenizer(arguments.tokenizer).chat_template:
        kinds["rows through the tokenizer's chat template"] = {
            "input": str(write(folder / "turns.jsonl", conversations(arguments.rows, source))),
            "handler_name": "SharegptStyleInstructionHandler",
            "prompt_type": "hf",
        }
    for title, settings in kinds.items():
        base = PreprocessConfig(**common, **settings)
        print(f"\n{title}: {os.path.getsize(base.input) / 2**20:.0f} MiB\n")
        print("| | rows/s | tokens/s | tokens per CPU second | of the bare encoder |\n|---|---|---|---|---|")
        for workers in arguments.workers:
            config = PreprocessConfig(**common, **settings, workers=workers)
            timings = [(bare(config, workers), whole(config)) for _ in range(arguments.repeat)]
            limit, best = (min(kind, key=lambda timing: timing.cpu_s) for kind in zip(*timings, strict=True))
            assert limit.tokens == best.tokens, (limit.tokens, best.tokens)
            processes = f"{workers} process{'es' if workers > 1 else ''}"
            print(line(f"bare encoder, {processes}", limit, limit))
            print(line(f"preprocess, {processes}", best, limit), flush=True)
            rates = [timing.tokens / timing.cpu_s for timing in (best, limit)]
            what = f"preprocessing {title}, {processes}, tokens per CPU second"
            Headline(what, f"{rates[0]:,.0f}", "bare `tokenizers`", f"{rates[1]:,.0f}", rates[0] / rates[1]).say()


def memory(arguments: argparse.Namespace, folder: Path, tokenizer: str) -> None:
    """Print the peak resident memory of runs over inputs of growing size, each in a process of its own."""
    print("| input | rows | workers | peak of the main process | peak of a worker |\n|---|---|---|---|---|")
    script = (
        "import resource, sys\nfrom mindspeed_rl.data.preprocess import run\n"
        "from mindspeed_rl.data.preprocess_config import PreprocessConfig\n"
        "report = run(PreprocessConfig(input=sys.argv[1], output_prefix=sys.argv[2], tokenizer_name_or_path=sys.argv[3],"
        " workers=int(sys.argv[4])))\n"
        "usage = [resource.getrusage(who).ru_maxrss // 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]\n"
        "print('peak', report.counts.rows_read, *usage)\n"
    )
    for mib in arguments.memory:
        path = folder / f"{mib}.jsonl"
        write(path, documents(max(1, mib * 2**20 // 20_500), arguments.gsm8k))
        for workers in arguments.workers:
            command = [sys.executable, "-c", script, str(path), str(folder / "out"), tokenizer, str(workers)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            _, rows, own, child = done.stdout.splitlines()[-1].split()
            worker = f"{child} MiB" if workers > 1 else "-"
            print(f"| {os.path.getsize(path) / 2**20:.0f} MiB | {rows} | {workers} | {own} MiB | {worker} |", flush=True)
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=3, help="runs of each kind; the one with the least CPU time counts")
    parser.add_argument("--tokenizer", help="folder of a real tokenizer; without it a small one is trained")
    parser.add_argument("--gsm8k", type=Path, default=SAMPLE, help="GSM8K's train.jsonl, in place of the test sample")
    parser.add_argument(
        "--memory", type=int, nargs="+", metavar="MIB", help="measure memory over inputs of these sizes instead"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = arguments.tokenizer or str(train_tokenizer(folder / "tokenizer", arguments.gsm8k))
        if arguments.memory:
            memory(arguments, folder, tokenizer)
            return
        warm_up = str(write(folder / "warm.jsonl", iter([{"text": "x"}])))
        run(PreprocessConfig(input=warm_up, output_prefix=str(folder / "warm"), tokenizer_name_or_path=tokenizer))
        open_indexed(folder / "warm_text_document")
        speed(arguments, folder, tokenizer)


if __name__ == "__main__":
    main()
