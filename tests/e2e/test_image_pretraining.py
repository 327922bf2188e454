"""Stage pretrain of documents with images: the first loss is that of transformers, and no token of an image trains."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tiny_vision
import torch
import transformers
from scripts import load_script
from test_vision_run import SFT, command, metrics

from mindspeed_rl.data.images import ImageRules, make_reference, prepare_images

PLACE = "<|vision_start|>" + "<|image_pad|>" * 9 + "<|vision_end|>"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents with no, one and two pictures between their words, and a tiny Qwen3-VL."""
    folder, draw = tmp_path_factory.mktemp("documents"), random.Random(5)
    example = load_script("examples/vision/make_task.py")
    tiny_vision.save_for_the_example(example, folder / "model")
    rows = []
    for index in range(16):
        names = [f"{index}_{number}.png" for number in range(index % 3)]
        for name in names:
            (folder / name).write_bytes(example.draw_picture(draw)[0])
        words = ["".join(draw.choices("abcdefgh ", k=draw.randint(2, 8))) for _ in range(len(names) + 1)]
        rows.append({"text": "<image>".join(words), "images": names})
    rows.sort(key=lambda row: -len(row["images"]))  # the form is that of the first row
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def compute_loss(folder: Path) -> float:
    """Mean of -log p over the tokens of text and the end token of all documents, by transformers."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    rules = ImageRules.read(folder / "model")
    assert rules is not None
    start, end = (tokenizer.convert_tokens_to_ids(name) for name in ("<|vision_start|>", "<|vision_end|>"))
    total, count = 0.0, 0
    for row in map(json.loads, (folder / "documents.jsonl").read_text().splitlines()):
        text = row["text"].replace("<image>", PLACE)
        ids = torch.tensor([[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]])
        inputs: dict[str, torch.Tensor] = {"mm_token_type_ids": (ids == rules.token_id).int()}
        if row["images"]:
            images = prepare_images(rules, [make_reference(name, str(folder)) for name in row["images"]])
            inputs["pixel_values"] = torch.cat([image.read() for image in images])
            inputs["image_grid_thw"] = torch.tensor([image.grid for image in images])
        with torch.no_grad():
            log_probs = model(input_ids=ids, **inputs).logits[0, :-1].log_softmax(-1)
        labels = ids[0, 1:]
        trained = (labels != rules.token_id) & (labels != start) & (labels != end)
        total -= float(log_probs.gather(1, labels[:, None])[:, 0][trained].sum())
        count += int(trained.sum())
    return total / count


@pytest.mark.slow
def test_the_loss_of_documents_with_images_is_that_of_transformers(task: Path) -> None:
    keys = [
        "megatron_training.stage=pretrain", "megatron_training.image_folder=null", "megatron_training.save=null",
        "megatron_training.save_hf=false", "megatron_training.append_eod=true", "megatron_training.global_batch_size=16",
        "megatron_training.micro_batch_size=4", "megatron_training.lr=1e-3",
    ]  # fmt: skip
    command("train", *SFT, *keys, "megatron_training.data_path=documents.jsonl", folder=task)
    losses = [record["train/loss"] for record in metrics(task / "sft_run")]
    assert len(losses) == 3 and losses[0] == pytest.approx(compute_loss(task), rel=1e-4) and losses[2] < losses[0]
    # the same from files that `preprocess` wrote
    command(
        "preprocess", "--tokenizer-name-or-path", "model", "--input", "documents.jsonl", "--output-prefix", "data",
        "--handler-name", "ImageTextPretrainHandler", "--append-eod", folder=task,
    )  # fmt: skip
    command("train", *SFT, *keys, "megatron_training.data_path=data", "run_dir=again", folder=task)
    assert [record["train/loss"] for record in metrics(task / "again")] == losses
