"""Held-out accuracy before and after, as vLLM measured it during the run and as plain transformers measures it now."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ["MINDSPEED_RL_VISION"] = "1"

import torch
from PIL import Image

from mindspeed_rl.adaptors import torchvision_cpu

#: answers whose two most likely tokens are this close may differ between two implementations of the same arithmetic
TOLERANCE = 0.01
#: two standard deviations of an accuracy of 50 % on 200 pictures
SPREAD = 0.07
MARKER = "<|vision_start|><|image_pad|><|vision_end|>"


@torch.no_grad()
def greedy_accuracy(folder: Path, rows: list[dict], pictures: Path) -> float:
    """Share of rows that transformers answers exactly, by greedy decoding."""
    torchvision_cpu.apply()
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration  # they look for torchvision

    processor = AutoProcessor.from_pretrained(folder)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    right = 0
    for row in rows:
        images = [Image.open(pictures / name) for name in row["images"]]
        inputs = processor(text=[row["instruction"].replace("<image>", MARKER)], images=images, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        answer = processor.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += answer.strip() == row["output"]
    return right / len(rows)


def main(before: Path, after: Path, held_out: Path, report: Path) -> int:
    """Prints the table; 1 when the two engines disagree, or GRPO has gained no more than chance may give."""
    rows = [json.loads(line) for line in held_out.read_text().splitlines()]
    results = json.loads(report.read_text())["results"]
    measured = {"before": results["eval/accuracy/first"], "after": results["eval/accuracy"]}
    pictures = held_out.parent / "pictures"
    again = {"before": greedy_accuracy(before, rows, pictures), "after": greedy_accuracy(after, rows, pictures)}
    print(f"\nheld-out accuracy on {len(rows)} pictures (greedy)\n{'':>10}{'vLLM':>12}{'transformers':>16}")
    for when in measured:
        print(f"{when:>10}{measured[when]:>12.1%}{again[when]:>16.1%}")
    if any(abs(measured[when] - again[when]) > TOLERANCE for when in measured):
        print("error: vLLM and transformers disagree about the same weights.", file=sys.stderr)
        return 1
    if again["after"] < again["before"] + SPREAD:
        print("error: GRPO has not raised the accuracy by more than chance may.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*(Path(argument) for argument in sys.argv[1:])))
