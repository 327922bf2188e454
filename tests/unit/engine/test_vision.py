"""Images in a row of tokens: their tokens, and positions on three axes as transformers computes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny_vision
import torch
from tiny_vision import END, IMAGE, START, NoiseImage

from mindspeed_rl.engine import vision as engine_vision
from mindspeed_rl.engine.vision import (
    ImageBatch,
    ImagePositions,
    PlacedImages,
    VisionEncoder,
    build_tower,
    compute_axis_positions,
    find_images,
)
from mindspeed_rl.models import architecture_for
from mindspeed_rl.models.model_config import VisionConfig

SMALL, WIDE, TALL = NoiseImage(1, 2, 2), NoiseImage(2, 4, 10), NoiseImage(3, 12, 4)


def read_vision(name: str) -> VisionConfig:
    config = {**tiny_vision.CONFIGS[name].to_dict(), "architectures": [type(tiny_vision.build(name)).__name__]}
    vision = architecture_for(config).read_model_config(config).vision
    assert vision is not None
    return vision


def build_row(*images: NoiseImage) -> torch.Tensor:
    """Two tokens of text, then each image between its marks and a token of text."""
    parts = [torch.tensor([5, 6])]
    for image in images:
        parts.append(torch.tensor([START, *[IMAGE] * (image.grid[1] * image.grid[2] // 4), END, 7]))
    return torch.cat(parts)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
@pytest.mark.parametrize("images", [(), (SMALL,), (WIDE,), (TALL, SMALL, WIDE)], ids=["none", "small", "wide", "three"])
def test_positions_are_those_of_transformers(name: str, images: tuple[NoiseImage, ...]) -> None:
    vision, ids = read_vision(name), build_row(*images)
    expected, _ = tiny_vision.build(name).model.get_rope_index(
        ids[None], (ids == IMAGE).int()[None], image_grid_thw=torch.tensor([image.grid for image in images] or [[1, 2, 2]])
    )
    result = compute_axis_positions(len(ids), find_images(ids, images, vision), images, vision)
    assert torch.equal(result, expected[:, 0])


def test_a_sampled_image_token_is_text_and_images_of_another_size_are_refused() -> None:
    vision = read_vision("qwen2.5")
    ids = torch.cat([build_row(WIDE), torch.tensor([IMAGE]), build_row(SMALL)])
    assert find_images(ids, (WIDE,), vision) == [3]
    # the small one has a single token, as the sampled one has, which is not between the marks of an image
    assert find_images(ids, (WIDE, SMALL), vision) == [3, len(build_row(WIDE)) + 4]
    with pytest.raises(ValueError, match=r"image 1 of 2 has 12 tokens \(grid \[1, 12, 4\]\), and no run of as many tokens 120"):
        find_images(ids, (WIDE, TALL), vision)


def test_a_sampled_image_token_takes_no_place_of_an_image_of_a_later_sequence() -> None:
    vision = read_vision("qwen2.5")
    first, second = build_row(SMALL), build_row(SMALL, SMALL)
    for sampled in ([IMAGE], [9, IMAGE, 9], [START, IMAGE, END], [START, IMAGE, END, IMAGE, START, IMAGE, END]):
        response = torch.tensor(sampled)
        ids = torch.cat([first, response, second, response])
        sequences = [(len(prompt), len(prompt) + len(sampled)) for prompt in (first, second)]
        start = len(first) + len(sampled)
        assert find_images(ids, (SMALL, SMALL, SMALL), vision, sequences) == [3, start + 3, start + 7], sampled
    # a response that ends with the token, before a prompt that begins with it, has a run of its own
    ids = torch.tensor([5, IMAGE, IMAGE, 6])
    assert find_images(ids, (SMALL,), vision, [(1, 2), (2, 2)]) == [2]


def test_an_image_in_a_response_is_the_run_between_its_marks_also_where_the_prompt_repeats_a_sampled_token() -> None:
    vision = read_vision("qwen3")
    tool = torch.tensor([START, IMAGE, END])
    first = torch.cat([build_row(SMALL), torch.tensor([8, IMAGE, 8]), tool])
    again = torch.cat([build_row(SMALL), torch.tensor([IMAGE, 8]), tool, torch.tensor([9])])
    found = find_images(torch.cat([first, again]), (SMALL,) * 4, vision, [(6, len(first)), (len(again) - 1, len(again))])
    assert found == [3, 10, len(first) + 3, len(first) + 9]


def test_an_image_of_several_rows_is_computed_once_and_only_where_its_tokens_are() -> None:
    vision = read_vision("qwen2.5")
    rows = [build_row(SMALL, WIDE), build_row(WIDE), build_row(TALL)]
    images = [((3, 7), (SMALL, WIDE)), ((3,), (WIDE,)), ((3,), (TALL,))]
    starts = [0, len(rows[0]), len(rows[0]) + len(rows[1])]
    tokens = torch.cat([torch.arange(len(row)) for row in rows])
    placed = PlacedImages.build(rows, images, starts, tokens, vision)
    assert placed.images == [SMALL, WIDE, TALL]
    half = slice(0, starts[2])  # the last row is on another rank
    batch = ImageBatch.build(placed.images, placed.owners[half], placed.rows[half], vision)
    assert batch.images == (SMALL, WIDE)
    # one feature of the small image, then ten of the wide one, which both rows use
    assert batch.features.tolist() == [0, *range(1, 11), *range(1, 11)]
    assert batch.tokens.tolist() == [3, *range(7, 17), *range(starts[1] + 3, starts[1] + 13)]


def embed(encoder: VisionEncoder, vision: VisionConfig, *images: NoiseImage) -> torch.Tensor:
    """The embeddings of a row of these images, zeros for text."""
    ids = build_row(*images)
    starts = find_images(ids, images, vision)
    placed = PlacedImages.build([ids], [(starts, images)], [0], torch.arange(len(ids)), vision)
    batch = ImageBatch.build(placed.images, placed.owners, placed.rows, vision)
    return encoder.embed(torch.zeros(len(ids), 1, 64), batch)[0]


def test_a_frozen_tower_computes_an_image_once_for_log_probs_and_update(monkeypatch: pytest.MonkeyPatch) -> None:
    vision = read_vision("qwen3")
    torch.manual_seed(1)
    tower = build_tower({**tiny_vision.CONFIGS["qwen3"].to_dict(), "model_type": "qwen3_vl"})
    encoder, seen = VisionEncoder(tower, vision), []
    tower.register_forward_hook(lambda module, args, kwargs, output: seen.append(len(args[0]) // 4), with_kwargs=True)
    encoder.set_trained(())
    with torch.no_grad():
        log_probs = embed(encoder, vision, SMALL, WIDE)
    update = embed(encoder, vision, SMALL, WIDE)
    assert torch.equal(update, log_probs) and seen == [11]  # both images in one pass
    embed(encoder, vision, WIDE, TALL)
    assert seen == [11, 12]  # only the new one
    monkeypatch.setattr(engine_vision, "_CACHE_BYTES", 4 * 64 * 3 * 12)  # room for the last image and its two further levels
    embed(encoder, vision, TALL)
    embed(encoder, vision, SMALL)
    embed(encoder, vision, TALL)
    assert seen == [11, 12, 1, 12]
    # one that trains computes each time, by its weights of that time
    encoder.set_trained(("projector",))
    before = embed(encoder, vision, TALL)
    with torch.no_grad():
        next(parameter for parameter in tower.merger.parameters() if parameter.dim() == 2).mul_(2.0)
    after = embed(encoder, vision, TALL)
    assert seen == [11, 12, 1, 12, 12, 12] and not torch.equal(before, after)


class NoiseVideo(NoiseImage):
    """A video of random pixels."""

    def __init__(self, seed: int, times: int, rows: int, columns: int, time_step: float) -> None:
        super().__init__(seed, rows, columns)
        self.grid, self.time_step = (times, rows, columns), time_step


def test_a_video_takes_the_runs_of_its_own_token_and_its_time_counts_in_steps() -> None:
    vision = read_vision("qwen2.5")
    video, image = NoiseVideo(4, 3, 4, 4, 2.8), NoiseImage(5, 6, 8)  # 12 tokens each
    run = [START, *[IMAGE] * 12, END]
    ids = torch.tensor([5, *run, 6, START, *[tiny_vision.VIDEO] * 12, END, 7, 8, *[tiny_vision.VIDEO] * 12])
    assert find_images(ids, (image, video), vision, [(32, len(ids))]) == [2, 17]
    with pytest.raises(ValueError, match="no run of as many tokens 121 follows"):
        find_images(ids, (image, video, NoiseVideo(6, 2, 2, 2, 1.0)), vision)
    positions = compute_axis_positions(len(ids), [2, 17], (image, video), vision)
    # the image begins at 2 and has 3 x 4 tokens; END, 6 and START are at 6 to 8, the video begins at 9, text goes on at 11
    assert positions[0, 17:29].tolist() == [9] * 4 + [11] * 4 + [14] * 4  # 9 + 2.8 = 11.8, 9 + 5.6 = 14.6
    assert positions[1, 17:29].tolist() == [9, 9, 10, 10] * 3 and positions[2, 17:29].tolist() == [9, 10] * 6
    assert positions[:, 29:32].tolist() == [[11, 12, 13]] * 3


def test_a_pass_that_failed_leaves_no_features_to_the_next_one() -> None:
    vision = read_vision("qwen3")
    stage: Any = ImagePositions(vision)
    received, hidden = torch.randn(8, 1, 16), torch.randn(6, 1, 16)
    decoder = SimpleNamespace(input_tensor=received)
    model = SimpleNamespace(pre_process=False, decoder=decoder, set_input_tensor=lambda tensor: None)
    ids = build_row(SMALL)
    owners = torch.where(ids == IMAGE, 0, -1)
    images = ImageBatch.build([SMALL], owners, torch.zeros_like(owners), vision, [(owners, torch.zeros_like(owners))])
    stage.prepare(model, ids[None], torch.arange(len(ids))[None], None, None, images)
    assert len(stage.send(hidden)) == 7  # with the one feature of the image
    # no layer ran to the end, and the next micro-batch has no images
    stage.prepare(model, ids[None], torch.arange(len(ids))[None], None, None, None)
    assert torch.equal(stage.send(hidden), hidden)
