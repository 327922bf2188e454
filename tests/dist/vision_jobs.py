"""Rows with images, and jobs that train on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_vision import END, IMAGE, START, NoiseImage
from training_jobs import Setting, engine_of, full_weights, my_rows, summary, weighted_loss

from mindspeed_rl.checkpoint.lora import open_peft
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.lora import load_peft, save_peft
from mindspeed_rl.engine.lora_layers import LoraSettings

WIDE, TALL, SMALL, SQUARE = NoiseImage(1, 4, 8), NoiseImage(2, 8, 2), NoiseImage(3, 2, 2), NoiseImage(4, 6, 6)
OTHER = NoiseImage(5, 4, 8)  # the size of WIDE
#: images of each row; the second and third rows have the same tokens in their prompts, and the third and fourth another image
_IMAGES = ((), (WIDE,), (WIDE,), (OTHER,), (TALL, SMALL, SQUARE), (SQUARE,), (), (SMALL, WIDE))
_PROMPTS = (0, 1, 1, 1, 2, 3, 4, 5)


def all_rows() -> Rows:
    """Eight rows with no, one, two and three images, and a weight for every response token."""
    input_ids, prompts, weights = [], [], []
    for prompt, images in zip(_PROMPTS, _IMAGES):
        generator = torch.Generator().manual_seed(11 + prompt)
        parts = [torch.randint(2, 120, (3,), generator=generator)]
        for image in images:
            count = image.grid[1] * image.grid[2] // 4
            parts += [torch.tensor([START]), torch.full((count,), IMAGE), torch.tensor([END])]
            parts.append(torch.randint(2, 120, (2,), generator=generator))
        generator.manual_seed(len(input_ids))
        length = int(torch.randint(3, 12, (), generator=generator))
        response = torch.randint(2, 120, (length,), generator=generator)
        if len(input_ids) == 5:
            response[1] = IMAGE  # sampled by the model: text
        prompts.append(sum(map(len, parts)))
        input_ids.append(torch.cat([*parts, response]))
        weights.append(2.0 + torch.randn(length, generator=generator))
    return Rows(input_ids, prompts, {"weights": weights}, images=list(_IMAGES))


def forward(setting: Setting, swapped: bool = False) -> list[Any]:
    """Log-probs of all rows in one process; `swapped` exchanges the images of the second and the fourth row."""
    with engine_of(setting) as engine:
        rows = all_rows()
        assert rows.images is not None
        if swapped:
            rows.images[1], rows.images[3] = rows.images[3], rows.images[1]
        output = engine.forward(rows, setting.batching)
        again = engine.forward(rows, setting.batching)  # with features that were kept
        assert output is not None and again is not None
        assert all(torch.equal(first, other) for first, other in zip(output[0], again[0]))
        return [values.numpy() for values in output[0]]


def use_adapters(setting: Setting, folder: str, is_read: bool) -> list[Any]:
    """Log-probs of all rows with adapters that have an effect: written for `peft` here, or read from there."""
    with engine_of(setting) as engine:
        settings, plan = LoraSettings.from_config(engine.config), engine.model.plan
        assert settings is not None
        if is_read:
            load_peft(engine.model, settings, open_peft(Path(folder), plan.architecture.weight_ops(plan.model_config)))
        else:
            generator = torch.Generator().manual_seed(3)
            for name, parameter in engine.model.models[0].named_parameters():
                if ".lora_" in name:
                    parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            save_peft(engine.model, settings, folder, setting.folder)
        output = engine.forward(all_rows(), setting.batching)
        assert output is not None
        return [values.numpy() for values in output[0]]


def train(setting: Setting, steps: int = 3) -> dict[str, Any]:
    """Trains and reports each step's metrics and gradient norm, and the weights at the end."""
    with engine_of(setting) as engine:
        rows = my_rows(all_rows())
        results = [engine.train_step(rows, setting.batching, weighted_loss) for _ in range(steps)]
        return summary(results, full_weights(engine))
