"""Models that see videos compute as transformers' do, with images in the same row, and alike under every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny_vision
import torch
import video_jobs as jobs
from comparison import assert_same_training
from ranks import Ranks
from slow_layouts import PP, RING, SP, ULYSSES
from training_jobs import TEMPERATURE, Setting

pytestmark = pytest.mark.slow
TRAINED = {"freeze_vit": False, "freeze_aligner": False}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "padded": ("qwen2.5", 1, {"packed": False}),
    "shared prefixes": ("qwen3", 1, {"token_budget": 200, "shares_prefixes": True}),
    "TP2 SP": ("qwen2.5", 2, {"keys": SP}),
    "PP2": ("qwen3", 2, {"keys": PP}),
    "CP2 ring": ("qwen2.5", 2, {"keys": RING}),
    "CP2 Ulysses": ("qwen3", 2, {"keys": ULYSSES}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(tiny_vision.save(name, tmp_path_factory.mktemp(name))) for name in tiny_vision.CONFIGS}


def _compute_log_probs(name: str) -> list[np.ndarray]:
    """Log-probs of the responses, by transformers."""
    model, media = tiny_vision.build(name), jobs.all_media()
    rows, results = jobs.all_rows(name != "qwen2.5"), []
    for ids, prompt, some in zip(rows.input_ids, rows.prompt_lengths, media):
        images = [one for one in some if not isinstance(one, jobs.NoiseVideo)]
        videos = [one for one in some if isinstance(one, jobs.NoiseVideo)]
        # what a model samples is text, also where it is the token of videos
        types = (ids == tiny_vision.IMAGE).int() + 2 * (ids == tiny_vision.VIDEO).int()
        types[prompt:] = 0
        model.model.get_placeholder_mask = lambda *args, inputs_embeds, types=types, **named: (
            (types == 1)[None, :, None].expand_as(inputs_embeds),
            (types == 2)[None, :, None].expand_as(inputs_embeds),
        )
        inputs: dict[str, torch.Tensor] = {"mm_token_type_ids": types[None], "attention_mask": torch.ones_like(ids)[None]}
        if images:
            inputs["pixel_values"] = torch.cat([image.read() for image in images])
            inputs["image_grid_thw"] = torch.tensor([image.grid for image in images])
        if videos:
            inputs["pixel_values_videos"] = torch.cat([video.read() for video in videos])
            inputs["video_grid_thw"] = torch.tensor([video.grid for video in videos])
            if name == "qwen2.5":
                inputs["second_per_grid_ts"] = torch.tensor([video.seconds for video in videos])
        with torch.no_grad():
            log_softmax = (model(input_ids=ids[None], **inputs).logits[0] / TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]
        results.append(log_softmax.gather(1, ids[prompt:, None])[:, 0].numpy())
    return results


@pytest.mark.parametrize("name", tiny_vision.CONFIGS)
def test_log_probs_are_those_of_transformers(ranks: Callable[[int], Ranks], folders: dict[str, str], name: str) -> None:
    setting = Setting(folders[name], shares_prefixes=True, token_budget=200)
    (ours,) = ranks(1).run(jobs.forward, setting=setting, has_times=name != "qwen2.5")
    for actual, expected in zip(ours, _compute_log_probs(name), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_process_does(ranks: Callable[[int], Ranks], folders: dict[str, str], layout: str) -> None:
    name, size, changes = LAYOUTS[layout]
    has_times = name != "qwen2.5"
    expected = ranks(1).run(jobs.train, setting=Setting(folders[name], TRAINED), has_times=has_times)
    changes = {**changes, "keys": TRAINED | changes.get("keys", {})}
    actual = ranks(size).run(jobs.train, setting=Setting(folders[name], **changes), has_times=has_times)
    assert_same_training(actual, expected)
