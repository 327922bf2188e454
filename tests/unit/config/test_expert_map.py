"""A map of experts that cannot be used is refused in one sentence, before a device is claimed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_rl.config.expert_map import check_expert_map, read_expert_map, write_expert_map

LAYERS = [[[0, 2], [1, 3]], [[3, 1], [2, 0]]]


def saved(folder: Path, layers: list[list[list[int]]]) -> Path:
    path = folder / "map.json"
    path.write_text(write_expert_map(layers))
    return path


def test_a_map_says_what_was_written(tmp_path: Path) -> None:
    path = saved(tmp_path, LAYERS)
    assert read_expert_map(path) == LAYERS
    check_expert_map(path, num_layers=2, num_experts=4, num_devices=2)
    layer = json.loads(path.read_text())["layer_list"][1]
    # the form of vllm-ascend's own maps
    assert layer == {
        "layer_id": 1,
        "device_count": 2,
        "device_list": [{"device_id": 0, "device_expert": [3, 1]}, {"device_id": 1, "device_expert": [2, 0]}],
    }


@pytest.mark.parametrize(
    "text", ["{}", "[]", "{", '{"layer_list": [1]}', '{"layer_list": [{"device_list": [{"device_expert": 1}]}]}']
)
def test_another_file_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "map.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="expert_map_path: .*map.json is not an expert map"):
        read_expert_map(path)


def test_what_an_expert_is_must_be_a_number(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"layer_list": [{"device_list": [{"device_expert": ["0", 1]}]}]}))
    with pytest.raises(ValueError, match="the experts of layer 0 are not all numbers"):
        read_expert_map(path)
    with pytest.raises(ValueError, match="missing.json cannot be read"):
        read_expert_map(tmp_path / "missing.json")


def test_an_expert_lies_on_one_device(tmp_path: Path) -> None:
    path = saved(tmp_path, [LAYERS[0], [[0, 2], [1, 2, 3]]])
    with pytest.raises(ValueError, match="places expert 2 of layer 1 on two devices"):
        read_expert_map(path)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ((1, 4, 2), "is for 2 layers with experts, and this model has 1"),
        ((0, 0, 1), "is for 2 layers with experts, and this model has 0"),
        ((2, 4, 4), "spreads layer 0 over 2 devices, and the engine's experts are on 4"),
        ((2, 8, 2), "does not place each of the 8 experts of layer 0"),
        ((2, 2, 2), "does not place each of the 2 experts of layer 0"),
    ],
)
def test_a_map_of_another_model_or_layout_is_refused(tmp_path: Path, model: tuple[int, int, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_expert_map(saved(tmp_path, LAYERS), *model)
