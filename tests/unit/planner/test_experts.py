"""Experts are shared out so that no device is sent much more than the others; the file is what the NPU's engine takes."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from mindspeed_rl.cli.plan import main
from mindspeed_rl.config.expert_map import check_expert_map
from mindspeed_rl.planner.experts import place_experts


def busiest(counts: list[int], devices: list[list[int]]) -> int:
    return max(sum(counts[expert] for expert in experts) for experts in devices)


def best_possible(counts: list[int], num_devices: int) -> int:
    """By trying every way to share them out."""
    room = len(counts) // num_devices

    def split(left: frozenset[int], devices: int) -> int:
        if not devices:
            return 0
        first = min(left)
        return min(
            max(sum(counts[index] for index in (first, *others)), split(left - {first, *others}, devices - 1))
            for others in itertools.combinations(sorted(left - {first}), room - 1)
        )

    return split(frozenset(range(len(counts))), num_devices)


@pytest.mark.parametrize("seed", range(20))
def test_the_busiest_device_has_at_most_a_third_more_than_it_must(seed: int) -> None:
    rng = random.Random(seed)
    counts = [round(rng.paretovariate(1.2) * 100) for _ in range(8)]
    for devices in (2, 4):
        (layer,) = place_experts([counts], devices)
        assert sorted(expert for experts in layer.devices for expert in experts) == list(range(8))
        assert {len(experts) for experts in layer.devices} == {8 // devices}
        assert busiest(counts, layer.devices) <= 4 / 3 * best_possible(counts, devices)
        assert layer.after == pytest.approx(busiest(counts, layer.devices) * devices / sum(counts))
        assert layer.after <= layer.before


def test_experts_that_are_sent_as_much_stay_in_order() -> None:
    assert place_experts([[5, 5, 5, 5], [0, 0, 0, 0]], 2)[0].devices == [[0, 1], [2, 3]]
    assert place_experts([[0, 0, 0, 0]], 2)[0].before == 1.0


def test_the_command_writes_a_map_from_the_counts_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"0": {"0": 90, "1": 80, "2": 10, "3": 20}, "1": {"0": 1, "1": 1, "2": 1, "3": 1}}
    (tmp_path / "eplb_token_collects_0.json").write_text(json.dumps(counts))
    target = tmp_path / "expert_map.json"
    assert main(["experts", "--counts", str(tmp_path), "--devices", "2", "-o", str(target)]) == 0
    shown = capsys.readouterr()
    assert "    0       1.70        1.00" in shown.out and "    1       1.00        1.00" in shown.out
    tree = json.loads(target.read_text())
    assert tree["moe_layer_count"] == 2
    assert [device["device_expert"] for device in tree["layer_list"][0]["device_list"]] == [[0, 2], [1, 3]]
    check_expert_map(target, num_layers=2, num_experts=4, num_devices=2)


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "eplb_token_collects_0.json").write_text(json.dumps({"0": {"0": 1, "1": 2}}))
    assert main(["experts", "--counts", str(tmp_path), "--devices", "3"]) == 2
    assert main(["experts", "--counts", str(tmp_path / "nowhere"), "--devices", "2"]) == 2
    assert main(["experts", "--counts", str(tmp_path), "--devices", "2", "-o", str(tmp_path / "no" / "map.json")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: ") for line in lines)
    assert "--devices: 3 does not divide the 2 experts" in lines[0] and "cannot be written" in lines[2]
