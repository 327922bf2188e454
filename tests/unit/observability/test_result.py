"""The page of a run for people: gain with its interval, examples, licence, picture, model card, index of runs."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.picture import draw_result, list_ticks
from mindspeed_rl.observability.report import write_report
from mindspeed_rl.observability.result import build_result, find_gain, find_licence
from mindspeed_rl.observability.run_files import read_run


def evaluations(metric: str, *values: float, **others: float) -> History:
    return History([{"iteration": 10 * index, metric: value, **others} for index, value in enumerate(values)])


def test_the_gain_of_an_accuracy_has_the_interval_of_two_proportions() -> None:
    gain = find_gain(evaluations("eval/accuracy", 0.25, 0.5, 0.75, **{"eval/prompts": 100.0}))
    assert gain is not None and gain.half_width == pytest.approx(1.96 * math.sqrt((0.1875 + 0.1875) / 100))
    assert str(gain) == (
        "accuracy on held-out prompts: 25.0 % -> 75.0 % (+50.0, 95 % interval +38.0 to +62.0, 100 prompts)"
    )


def test_the_gain_of_a_reward_has_the_interval_of_two_means() -> None:
    gain = find_gain(evaluations("eval/reward", 0.1, 0.2, **{"eval/prompts": 25.0, "eval/reward_std": 0.5}))
    assert gain is not None and gain.half_width == pytest.approx(1.96 * math.sqrt(2 * 0.25 / 25))
    assert str(gain).endswith("25 prompts); the interval includes 0: no difference is shown")


@pytest.mark.parametrize(
    ("metric", "others"), [("eval/accuracy", {}), ("eval/reward", {"eval/prompts": 9.0}), ("train/loss", {"eval/prompts": 9.0})]
)
def test_a_gain_whose_spread_was_not_measured_has_no_interval(metric: str, others: dict[str, float]) -> None:
    gain = find_gain(evaluations(metric, 0.5, 0.25, **others))
    assert gain is not None and gain.half_width is None and "the spread was not measured" in str(gain)


def test_one_measurement_is_no_gain() -> None:
    assert find_gain(evaluations("eval/reward", 0.5)) is None
    assert find_gain(History()) is None


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("README.md", "---\nlicense: apache-2.0\n---\n# A model\n", "apache-2.0"),
        ("README.md", '---\nlicense_name: "qwen"\n---\n', "qwen"),
        ("LICENSE", "\n  MIT License\n\nCopyright", "MIT License Copyright (LICENSE)"),
        ("other.txt", "", "not stated in {folder}"),
    ],
)
def test_the_licence_of_the_base_is_that_of_its_card_or_file(name: str, text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert find_licence(tmp_path).startswith(expected.format(folder=tmp_path))


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ((0.0, 1.0), [0.0, 0.5, 1.0]),
        ((-0.01, 0.21), [0.0, 0.1, 0.2]),
        ((1, 20), [5.0, 10.0, 15.0, 20.0]),
        ((0, 250), [0.0, 100.0, 200.0]),
        ((0, 1), [0.0, 0.5, 1.0]),
    ],
)
def test_ticks_are_round(bounds: tuple[float, float], expected: list[float]) -> None:
    assert list_ticks(*bounds) == expected


def make_run(folder: Path, **actor: object) -> dict[str, Any]:
    """Write the files of a run that has learnt; return its configuration."""
    folder.mkdir(parents=True)
    records = [
        {"iteration": index, "eval/accuracy": index / 4, "eval/prompts": 4, "grpo/score/mean": index / 3, "timing/all": 2.0}
        for index in range(4)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    examples = [
        {"iteration": iteration, "index": index, "prompt": f"2 | {index}", "response": text, "label": "x", "reward": reward}
        for iteration, index, text, reward in (
            (0, 0, "wrong", 0.0), (3, 0, "right\x1b[31m", 1.0), (0, 1, "good", 1.0), (3, 1, "bad", 0.0), (0, 2, "same", 0.5),
            (3, 2, "same", 0.5),
        )
    ]  # fmt: skip
    (folder / "examples.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    return {"actor_config": actor, "megatron_training": {"stage": "ray_grpo", "data_path": "train.jsonl"}}


def test_the_page_of_a_run_that_has_ended(tmp_path: Path) -> None:
    base, save = tmp_path / "base", tmp_path / "result"
    for folder in (base, save / "hf" / "iter_0000003"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    (save / "hf" / "latest").symlink_to("iter_0000003")
    folder = tmp_path / "runs" / "mine"
    config = make_run(folder, load=str(base), save=str(save), data_path="train.jsonl", eval_data_path="held.jsonl")
    write_report(folder, config, title="mine")
    page = (folder / "report.md").read_text()
    for text in (
        "of " + str(base).replace("_", "\\_"),
        "train.jsonl, held out held.jsonl",
        "accuracy on held-out prompts: 0.0 % -> 75.0 %",
        "0:08 in 4 iterations",
        "| licence | mit (of the base",
        f"`mindspeed-rl chat --load {save}/hf/latest`",
        "| 2 \\| 0 | wrong | right\\x1b\\[31m | 0 -> 1 |",
        "| 2 \\| 1 | good | bad | 1 -> 0 |",
    ):
        assert text in page, (text, page)
    assert page.index("Better after the run") < page.index("Worse after the run") < page.index("| Metric |")
    card = (save / "hf" / "iter_0000003" / "README.md").read_text()
    assert card.startswith(f'---\nlibrary_name: transformers\nbase_model: "{base}"\n') and "75.0 %" in card
    index = (tmp_path / "runs" / "index.html").read_text()
    assert '<a href="mine/report.html">mine</a>' in index and "finished" in index
    with Image.open(folder / "report.png") as image:
        assert image.width == 1200 and 600 < image.height < 2000
    # what a user has written stays
    (save / "hf" / "iter_0000003" / "README.md").write_text("mine")
    write_report(folder, config, title="mine")
    assert (save / "hf" / "iter_0000003" / "README.md").read_text() == "mine"


def test_a_run_that_goes_or_failed_early_has_its_page(tmp_path: Path) -> None:
    write_report(tmp_path / "a", {}, title="t", outcome="running")
    assert not (tmp_path / "a" / "report.png").exists() and not (tmp_path / "index.html").exists()
    write_report(tmp_path / "a", {}, title="t", outcome="failed: ValueError: \u4e2d\u6587 x")
    assert "| gain | not measured |" in (tmp_path / "a" / "report.md").read_text()
    assert (tmp_path / "a" / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_takes_flat_and_single_curves_and_any_text(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    run = read_run(tmp_path / "a")
    flat = History([{"iteration": index, "train/loss": 0.0} for index in range(2)])
    for history in (flat, History(), run.history):
        result = build_result(type(run)(run.folder, history, examples=run.examples, report={"title": "\u4e2d" * 300}))
        with Image.open(io.BytesIO(draw_result(result))) as image:
            image.load()
