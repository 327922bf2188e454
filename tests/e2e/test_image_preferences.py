"""Preference stages of a Qwen3.5 with its tower: the loss of pairs with images is the one of transformers' log-probs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from scripts import load_script
from test_vision_run import SFT, command, metrics
from tiny_vision import CONFIGS

from mindspeed_rl.data.images import ImageRules, make_reference, prepare_images

PLACE = "<|vision_start|>" + "<|image_pad|>" * 9 + "<|vision_end|>"
BETA, GAMMA = 2.0, 0.5


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of answers to a question about one picture, or about none, and a tiny Qwen3.5."""
    folder, draw = tmp_path_factory.mktemp("pairs"), random.Random(5)
    example = load_script("examples/vision/make_task.py")
    save_model(example, folder / "model")
    rows = []
    for index in range(16):
        row: dict[str, object] = {"instruction": "colour?", "chosen": draw.choice("rg"), "rejected": draw.choice("by") + "!"}
        if index % 4:
            (folder / f"{index}.png").write_bytes(example.draw_picture(draw)[0])
            row |= {"instruction": "<image>colour?", "images": [f"{index}.png"]}
        rows.append(row)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
    return folder


def save_model(example: Any, folder: Path) -> None:
    """Write a tiny Qwen3.5 with the tokenizer and the processor of the example."""
    tokenizer = example.make_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(token) for token in example.SPECIAL]
    small = CONFIGS["qwen3.5"].to_dict()
    text = small["text_config"] | {"eos_token_id": ids[1], "pad_token_id": ids[0]}
    vision = small["vision_config"] | {"patch_size": 14, "num_position_embeddings": 64}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **dict(zip(names, ids[3:])))
    torch.manual_seed(7)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)  # far from uniform: a wrong image must show
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    example.save_processor(folder)


def compute_loss(folder: Path) -> float:
    """Mean of -log sigmoid(beta (mean log p of chosen - of rejected) - gamma) over the pairs."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    rules = ImageRules.read(folder / "model")
    assert rules is not None
    losses = []
    for row in map(json.loads, (folder / "pairs.jsonl").read_text().splitlines()):
        means = []
        prompt = tokenizer.encode(row["instruction"].replace("<image>", PLACE), add_special_tokens=False)
        for side in ("chosen", "rejected"):
            ids = torch.tensor([[*prompt, *tokenizer.encode(row[side], add_special_tokens=False), tokenizer.eos_token_id]])
            inputs: dict[str, torch.Tensor] = {"mm_token_type_ids": (ids == rules.token_id).int()}
            if "images" in row:
                images = prepare_images(rules, [make_reference(name, str(folder)) for name in row["images"]])
                inputs["pixel_values"] = torch.cat([image.read() for image in images])
                inputs["image_grid_thw"] = torch.tensor([image.grid for image in images])
            with torch.no_grad():
                log_probs = model(input_ids=ids, **inputs).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            means.append(float(log_probs.gather(1, ids[0, len(prompt) :, None]).mean()))
        losses.append(math.log1p(math.exp(GAMMA - BETA * (means[0] - means[1]))))
    return sum(losses) / len(losses)


@pytest.mark.slow
def test_the_loss_of_pairs_with_images_is_that_of_transformers(task: Path) -> None:
    command(
        "train", *SFT, "megatron_training.stage=simpo", f"megatron_training.simpo_beta={BETA}", "megatron_training.save=null",
        f"megatron_training.gamma_beta_ratio={GAMMA / BETA}", "megatron_training.save_hf=false",
        "megatron_training.global_batch_size=16",
        "megatron_training.micro_batch_size=4", "megatron_training.lr=1e-3", "megatron_training.data_path=pairs.jsonl",
        "megatron_training.prompt_type=hf", "megatron_training.map_keys={prompt: instruction}", folder=task,
    )  # fmt: skip
    losses = [record["train/loss"] for record in metrics(task / "sft_run")]
    assert len(losses) == 3 and losses[0] == pytest.approx(compute_loss(task), rel=1e-4) and losses[2] < losses[0]
