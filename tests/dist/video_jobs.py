"""Rows with videos and images, and jobs that compute and train on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tiny_vision import END, IMAGE, START, VIDEO, NoiseImage
from training_jobs import Setting, engine_of, full_weights, my_rows, summary, weighted_loss

from mindspeed_rl.engine.batching import Rows


@dataclass(frozen=True)
class NoiseVideo:
    """Frames of random pixels; `part` is the index in time of a part, None for all."""

    seed: int
    times: int
    rows: int
    columns: int
    seconds: float = 1.0
    part: int | None = None

    @property
    def key(self) -> str:
        return f"video{self.seed}/{self.rows}x{self.columns}@{self.part}"

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.times if self.part is None else 1, self.rows, self.columns

    @property
    def time_step(self) -> float:
        """Of a model with 4 positions a second."""
        return 4 * self.seconds if self.part is None else 1.0

    def read(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 + self.seed)
        pixels = torch.randn(self.times * self.rows * self.columns, 3 * 2 * 4 * 4, generator=generator)
        return pixels if self.part is None else pixels.view(self.times, -1, pixels.shape[1])[self.part]

    def list_parts(self, has_times: bool) -> list[NoiseVideo]:
        """The video, or each of its times by itself."""
        if not has_times:
            return [self]
        return [NoiseVideo(self.seed, self.times, self.rows, self.columns, part=time) for time in range(self.times)]


LONG, SHORT, WIDE = NoiseVideo(1, 5, 4, 4, 0.7), NoiseVideo(2, 2, 6, 2, 1.1), NoiseVideo(3, 3, 2, 8, 0.33)
PICTURE, SMALL = NoiseImage(1, 4, 8), NoiseImage(3, 2, 2)
#: images and videos of each row; the first two have the same prompt
_MEDIA = ((LONG,), (LONG,), (PICTURE, SHORT, SMALL), (SHORT, WIDE), (), (WIDE, PICTURE))
_PROMPTS = (0, 0, 1, 2, 3, 4)


def all_media() -> list[tuple[Any, ...]]:
    return list(_MEDIA)


def all_rows(has_times: bool) -> Rows:
    """Six rows with images and videos, and a weight for every response token.

    Args:
        has_times: each time of a video is by itself between two tokens of text, as in Qwen3-VL.
    """
    input_ids, prompts, weights, parts_of_rows = [], [], [], []
    for prompt, media in zip(_PROMPTS, _MEDIA):
        generator = torch.Generator().manual_seed(11 + prompt)
        ids = [torch.randint(2, 120, (3,), generator=generator)]
        parts: list[Any] = []
        for one in media:
            own = one.list_parts(has_times) if isinstance(one, NoiseVideo) else [one]
            token = VIDEO if isinstance(one, NoiseVideo) else IMAGE
            for part in own:
                count = part.grid[0] * part.grid[1] * part.grid[2] // 4
                ids += [torch.tensor([START]), torch.full((count,), token), torch.tensor([END])]
                ids.append(torch.randint(2, 120, (2,), generator=generator))
            parts += own
        generator.manual_seed(len(input_ids))
        length = int(torch.randint(3, 12, (), generator=generator))
        response = torch.randint(2, 120, (length,), generator=generator)
        if len(input_ids) in (1, 3):
            response[1] = VIDEO  # sampled by the model: text
        prompts.append(sum(map(len, ids)))
        input_ids.append(torch.cat([*ids, response]))
        weights.append(2.0 + torch.randn(length, generator=generator))
        parts_of_rows.append(tuple(parts))
    return Rows(input_ids, prompts, {"weights": weights}, images=parts_of_rows)


def forward(setting: Setting, has_times: bool) -> list[Any]:
    """Log-probs of all rows in one process."""
    with engine_of(setting) as engine:
        output = engine.forward(all_rows(has_times), setting.batching)
        assert output is not None
        return [values.numpy() for values in output[0]]


def train(setting: Setting, has_times: bool, steps: int = 3) -> dict[str, Any]:
    """Trains and reports each step's metrics and gradient norm, and the weights at the end."""
    with engine_of(setting) as engine:
        rows = my_rows(all_rows(has_times))
        results = [engine.train_step(rows, setting.batching, weighted_loss) for _ in range(steps)]
        return summary(results, full_weights(engine))
