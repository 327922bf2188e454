# ruff: noqa: E402  (Megatron must be imported after the adaptors)
"""Run by one process: a tiny Qwen3-VL learns to name the direction in which a square moves in a video.

Opposite directions have the same frames in reverse order. usage: moving_shapes_program.py FOLDER STEPS. Prints
the accuracy on held-out videos before and after.
"""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.update(MINDSPEED_RL_VISION="1")
TESTS = Path(__file__).resolve().parents[2]
sys.path += [str(TESTS), str(TESTS / "dist"), str(TESTS / "unit" / "data")]

import torch
from training_jobs import Setting, engine_of  # applies the adaptors

from mindspeed_rl.data.datasets import InstructionDataset
from mindspeed_rl.data.images import ImageRules
from mindspeed_rl.data.preprocess import run
from mindspeed_rl.data.preprocess_config import PreprocessConfig
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.workers.stages.instruction import Instruction

BATCH, NUM_HELD_OUT = 32, 64


def build_dataset(folder: Path, model: Path, count: int, seed: int) -> InstructionDataset:
    """Write rows with videos, preprocess them, and open the result."""
    from moving_shapes import write_video  # it imports transformers, so after the adaptors

    folder.mkdir()
    draw, rows = random.Random(seed), []
    for index in range(count):
        path = folder / f"{index}.avi"
        answer = {"role": "assistant", "content": write_video(path, draw)}
        rows.append({"messages": [{"role": "user", "content": "<video>to?"}, answer], "videos": [str(path)]})
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"handler_name": "OpenAIInstructionHandler", "prompt_type": "hf", "tokenizer_name_or_path": str(model)}
    run(PreprocessConfig(input=str(data), output_prefix=str(folder / "set"), **keys))
    return InstructionDataset(folder / "set", image_rules=ImageRules.read(model))


def measure(engine: TrainEngine, stage: Instruction, held_out: InstructionDataset, letters: list[int]) -> float:
    """Return the share of held-out videos whose direction is the most likely of the four answers."""
    rows = stage.rows([held_out[index] for index in range(len(held_out))])
    found = []
    for letter in letters:
        ids = [torch.cat([row[:prompt], torch.tensor([letter])]) for row, prompt in zip(rows.input_ids, rows.prompt_lengths)]
        output = engine.forward(Rows(ids, rows.prompt_lengths, images=rows.images), MicroBatching(16))
        assert output is not None
        found.append(torch.stack([row[0] for row in output[0]]))
    labels = [letters.index(int(row[prompt])) for row, prompt in zip(rows.input_ids, rows.prompt_lengths)]
    return float((torch.stack(found).argmax(0) == torch.tensor(labels)).float().mean())


def main(folder: str, steps: int) -> None:
    """Train and print both accuracies."""
    # transformers looks for torchvision when it is imported, so after the adaptors
    from moving_shapes import DIRECTIONS, save_model

    model = Path(folder, "model")
    save_model(model)
    train = build_dataset(Path(folder, "train"), model, BATCH * 16, 1)
    held_out = build_dataset(Path(folder, "held_out"), model, NUM_HELD_OUT, 2)
    keys = {"freeze_vit": False, "freeze_aligner": False, "lr": 1e-3, "lr_warmup_iters": 10, "train_iters": steps}
    keys |= {"weight_decay": 0.0, "lr_warmup_init": 0.0}
    with engine_of(Setting(str(model), keys)) as engine:
        tokenizer = load_tokenizer(str(model))
        stage = Instruction(engine.config, tokenizer)
        stage.image_rules = ImageRules.read(model)
        letters = [tokenizer.convert_tokens_to_ids(letter) for letter in DIRECTIONS]
        before = measure(engine, stage, held_out, letters)
        draw = random.Random(3)
        for _ in range(steps):
            rows = stage.rows([train[index] for index in draw.sample(range(len(train)), BATCH)])
            engine.train_step(rows, MicroBatching(16), stage.loss)
        print(json.dumps([before, measure(engine, stage, held_out, letters)]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
