"""Measure an optimizer step by both training engines and by TRL at an equal batch: seconds, processor seconds, memory.

    python benchmarks/engine_step.py --trl-python PYTHON [--model FOLDER] [--sizes 0.8M 135M] [--precisions float32 bfloat16]
        [--rounds 5] [--threads 1] [--sides megatron fsdp trl]

Three processes have the same weights and train on the same rows of random tokens with GSM8K's lengths: `engine: megatron`,
`engine: fsdp` (one rank each, packed rows), and TRL's SFTTrainer (padded rows). All have float32 weights, and with bfloat16
compute in it (TRL by autocast, as `bf16: true` of its arguments does); losses are on the answers, gradients are clipped, AdamW
is torch's fused one. The processes take turns step by step, so what else the machine does hits all of them; the losses of the
first step must agree. Memory is the highest resident size while the steps run, less what the process had before its model.

--model is the folder of SmolLM2-135M-Instruct that `examples/real_model/make_model.sh` makes, for the size 135M. 0.8M is a
Qwen2 of random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIDES = ("megatron", "fsdp", "trl")
#: rows of a step and of a forward pass, longest row in tokens
BATCHES = {"0.8M": (32, 32, 256), "135M": (4, 4, 192)}
LR, DECAY, CLIP = 1e-5, 0.1, 1.0
#: losses of the first step may be so far apart
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
_MIB = 1 << 20


@dataclass(frozen=True)
class Step:
    """Measurements of one step by one trainer.

    Attributes:
        seconds, cpu_s: on the clock, and of the processor.
        peak: highest bytes of the process so far, beyond those before its model.
        loss: before the update.
    """

    seconds: float
    cpu_s: float
    peak: int
    loss: float


# ---------------------------------------------------------------- in the process of a side


def read_bytes(name: str) -> int:
    """A size of this process in /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


class Turns:
    """Measures a step for each line of the standard input, and prints it."""

    def __init__(self) -> None:
        self._before = read_bytes("VmRSS")

    def forget_peak(self) -> None:
        """Start with the highest size again: loading the weights does not count."""
        Path("/proc/self/clear_refs").write_text("5")
        print("ready", flush=True)

    def wait(self) -> bool:
        """Wait for the turn; False at the end."""
        if not sys.stdin.readline():
            return False
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return True

    def done(self, loss: float) -> None:
        """Print what the step took."""
        seconds, cpu_s = time.perf_counter() - self._wall, time.process_time() - self._cpu
        step = Step(seconds, cpu_s, read_bytes("VmHWM") - self._before, loss)
        print("step " + json.dumps(vars(step)), flush=True)


def run_engine(side: str, settings: dict[str, Any]) -> None:
    """Steps of an engine of this suite."""
    from mindspeed_rl import adaptors, platform

    platform.select("cpu")
    adaptors.apply("train")
    import torch

    from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
    from mindspeed_rl.checkpoint.hf import HfFolder
    from mindspeed_rl.config import MegatronConfig
    from mindspeed_rl.engine import parallel
    from mindspeed_rl.engine.batching import MicroBatching, Rows
    from mindspeed_rl.models.plan import plan_model
    from mindspeed_rl.workers.engines import PassSettings, build_engine

    def loss(inputs: LossInputs) -> LossOutput:
        return LossOutput(-torch.where(inputs.mask, inputs.outputs[0], 0.0).sum(), inputs.mask.sum())

    keys: dict[str, Any] = {"engine": side, "bf16": settings["precision"] == "bfloat16", "lr": LR, "train_iters": 1000}
    keys |= {"lr_decay_style": "constant", "adam_eps": 1e-8, "weight_decay": DECAY, "clip_grad": CLIP}
    config, folder = MegatronConfig(**keys), Path(settings["folder"])
    parallel.init_process_group(parallel.RankInfo.from_env(), 600)
    parallel._init_model_parallel(config, 1, 600)
    parallel._seed_all(1)
    turns = Turns()
    passes = PassSettings(packed=True, pad_id=0, temperature=1.0)
    engine = build_engine(config, plan_model(config, folder), folder, passes, trains=True).engine
    engine.load(HfFolder(folder))
    engine.start_training(1)
    rows = Rows([torch.tensor(ids) for ids, _ in settings["rows"]], [prompt for _, prompt in settings["rows"]])
    count = sum(rows.response_lengths)
    turns.forget_peak()
    while turns.wait():
        result = engine.train_step(rows, MicroBatching(settings["micro_batch"]), loss)
        turns.done(sum(part.loss_sum.item() for part in result.losses) / count)


def run_trl(settings: dict[str, Any]) -> None:
    """Steps of TRL's SFTTrainer."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    turns = Turns()

    class Each(TrainerCallback):
        losses: list[float] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if not turns.wait():
                os._exit(0)

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            turns.done(sum(self.losses))
            self.losses.clear()

    class Trainer(SFTTrainer):
        def training_step(self, *args: Any, **others: Any) -> torch.Tensor:
            loss = super().training_step(*args, **others)
            Each.losses.append(float(loss))
            return loss

    model = AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.float32)
    rows = [{"input_ids": ids, "completion_mask": [0] * prompt + [1] * (len(ids) - prompt)} for ids, prompt in settings["rows"]]
    arguments = SFTConfig(
        output_dir=settings["folder"] + ".trl",
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=len(rows) // settings["micro_batch"],
        max_steps=1000,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        optim="adamw_torch_fused",
        bf16=settings["precision"] == "bfloat16",
        use_cpu=True,
        gradient_checkpointing=False,
        max_length=None,
        completion_only_loss=True,
        report_to=[],
        save_strategy="no",
        logging_steps=10_000,
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(settings["folder"])
    trainer = Trainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[Each()])
    turns.forget_peak()
    trainer.train()


# ---------------------------------------------------------------- the comparison


def make_rows(vocab: int, count: int, longest: int) -> list[tuple[list[int], int]]:
    """Rows of random tokens with GSM8K's lengths, and the lengths of their prompts."""
    import torch
    from gsm8k_lengths import ANSWER_SHARE, length_at

    generator = torch.Generator().manual_seed(0)
    rows = []
    for place in ((torch.arange(count) + 0.5) / count).tolist():
        length = min(length_at(place), longest)
        ids = torch.randint(3, vocab, (length,), generator=generator).tolist()
        rows.append((ids, length - round(ANSWER_SHARE * length)))
    return rows


def make_small(folder: Path) -> None:
    """A Qwen2 of 0.8 M random weights with a tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": True}
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, bos_token_id=None, eos_token_id=1, pad_token_id=0)).save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{index}": index for index in range(3, 1024)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    named = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)


@contextlib.contextmanager
def start(side: str, settings: Path, python: str, threads: int, port: int) -> Iterator[Callable[[], Step]]:
    """The process of a side, ready for its first step; yields the function that has it make one."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if side == "trl":
        environment = {name: value for name, value in environment.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [python, __file__, "--side", side, "--settings", str(settings)]
    with settings.with_suffix(f".{side}.log").open("w") as log:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        process = subprocess.Popen(command, env=environment, **pipes)
        assert process.stdin is not None and process.stdout is not None

        def read(mark: str) -> str:
            for line in process.stdout or ():
                if line.startswith(mark):
                    return line.removeprefix(mark)
            raise SystemExit(f"{side} ended: {Path(log.name).read_text()[-3000:]}")

        def step() -> Step:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            return Step(**json.loads(read("step ")))

        try:
            read("ready")
            yield step
        finally:
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()


def compare(size: str, folder: Path, precision: str, options: argparse.Namespace, work: Path) -> None:
    """Let the sides take turns, and print a line for each."""
    count, micro_batch, longest = BATCHES[size]
    rows = make_rows(json.loads((folder / "config.json").read_text())["vocab_size"], count, longest)
    settings = work / f"{size}-{precision}.json"
    settings.write_text(json.dumps({"folder": str(folder), "precision": precision, "rows": rows, "micro_batch": micro_batch}))
    found: dict[str, list[Step]] = {side: [] for side in options.sides}
    with contextlib.ExitStack() as stack:
        steps = {
            side: stack.enter_context(
                start(side, settings, options.trl_python if side == "trl" else sys.executable, options.threads, 29700 + index)
            )
            for index, side in enumerate(options.sides)
        }
        for turn in range(options.rounds + 1):  # the first warms up
            first = turn % len(found)
            for side in [*found][first:] + [*found][:first]:
                found[side].append(steps[side]())
    losses = {side: taken[0].loss for side, taken in found.items()}
    if max(losses.values()) - min(losses.values()) > TOLERANCE[precision] * max(losses.values()):
        raise SystemExit(f"{size} {precision}: the losses of the first step differ, so the work does: {losses}")
    tokens = sum(len(ids) for ids, _ in rows)
    print(f"{size} {precision}: {count} rows, {tokens} tokens, {options.threads} thread(s), load {os.getloadavg()[0]:.0f}")
    for side, taken in found.items():
        later = taken[1:]
        seconds, cpu_s = (statistics.median(getattr(step, name) for step in later) for name in ("seconds", "cpu_s"))
        spread = f"{min(step.seconds for step in later):.2f} to {max(step.seconds for step in later):.2f}"
        peak = max(step.peak for step in taken) / _MIB
        print(f"  {side:<9} {seconds:8.3f} s ({spread})  {cpu_s:8.3f} CPU s  {peak:8.0f} MiB", flush=True)


def main() -> None:
    """Runs one side, or the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="python of an environment with TRL (requirements-trl-train.txt)")
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--sizes", nargs="+", choices=list(BATCHES), default=list(BATCHES))
    parser.add_argument("--precisions", nargs="+", choices=list(TOLERANCE), default=list(TOLERANCE))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="each has all of a model in memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        settings = json.loads(options.settings.read_text())
        run_trl(settings) if options.side == "trl" else run_engine(options.side, settings)
        return
    if options.trl_python is None or ("135M" in options.sizes and options.model is None):
        parser.error("--trl-python, and for 135M --model, are needed")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for size in options.sizes:
            folder = work / size if size == "0.8M" else options.model
            if size == "0.8M":
                make_small(folder)
            for precision in options.precisions:
                compare(size, folder, precision, options, work)


if __name__ == "__main__":
    main()
