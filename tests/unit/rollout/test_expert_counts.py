"""Tokens for each expert are counted as the engine says, kept from run to run, and refused where they are another model's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rollout.expert_counts import ExpertCounts, _read_counts, sum_counts
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.trajectory import Trajectory

#: a model of three layers, of which the first has no experts
LAYERS, EXPERTS = [1, 2], 4


def sample(*chosen: tuple[tuple[int, int], tuple[int, int]], known: bool = True) -> Trajectory:
    """A prompt of a token and as many drawn tokens as `chosen` has; each of its entries has the two experts in both layers."""
    # the first layer has no router: whatever stands there counts nowhere
    routing = np.array([[(3, 3), *experts] for experts in chosen], dtype=np.int16) if known else None
    count = len(chosen)
    return Trajectory.from_response([7], Generated((5,) * count, (0.0,) * count, (1,) * count, "stop", routing))


def test_counts_are_those_of_the_engine_and_go_on_in_a_later_run(tmp_path: Path) -> None:
    counts = ExpertCounts(tmp_path / "counts", 3, LAYERS, EXPERTS)
    counts.add([sample(((0, 1), (2, 3)), ((0, 2), (2, 3))), sample(((0, 3), (2, 1)))])
    metrics = Metrics()
    counts.finish(metrics)
    path = tmp_path / "counts" / "eplb_token_collects_3.json"
    expected = {"0": {"0": 3, "1": 1, "2": 1, "3": 1}, "1": {"0": 0, "1": 1, "2": 3, "3": 2}}
    assert json.loads(path.read_text()) == expected
    assert metrics.results()["rollout/expert_load_max"] == pytest.approx(3 / (6 / 4))  # both layers: 3 of 6 tokens to one of 4
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]

    later = ExpertCounts(tmp_path / "counts", 3, LAYERS, EXPERTS)
    later.add([sample(((1, 2), (0, 1)))])
    later.finish(metrics)
    assert json.loads(path.read_text()) == {
        "0": {"0": 3, "1": 2, "2": 2, "3": 1},
        "1": {"0": 1, "1": 2, "2": 3, "3": 2},
    }
    later.finish(metrics)  # a rollout without responses adds nothing
    assert sum(map(sum, _read_counts(path))) == 16


def test_a_rollout_that_says_no_experts_is_an_error(tmp_path: Path) -> None:
    counts = ExpertCounts(tmp_path, 0, LAYERS, EXPERTS)
    with pytest.raises(RuntimeError, match="eplb_token_collects: the rollout engine did not report"):
        counts.add([sample(((0, 1), (2, 3)), known=False)])


def test_counts_of_another_model_are_not_added_to(tmp_path: Path) -> None:
    ExpertCounts(tmp_path, 0, LAYERS, EXPERTS).finish(Metrics())
    with pytest.raises(ValueError, match="counts of 2 layers with 4 experts, and this model has 2 with 8"):
        ExpertCounts(tmp_path, 0, LAYERS, 8)


def test_the_driver_looks_at_the_folder_before_anything_starts(tmp_path: Path) -> None:
    folder = tmp_path / "counts"
    model_config = ModelConfig("toy", 3, 8, 16, 2, 2, 4, 32, 32, 64, False, moe_layers=tuple(LAYERS), num_moe_experts=EXPERTS)
    ExpertCounts.check_folder(folder, model_config)
    ExpertCounts(folder, 0, LAYERS, EXPERTS).finish(Metrics())
    ExpertCounts.check_folder(folder, model_config)
    ExpertCounts(folder, 5, LAYERS, 8).finish(Metrics())
    with pytest.raises(ValueError, match="eplb_token_save_path: .*_5.json has counts of 2 layers with 8 experts"):
        ExpertCounts.check_folder(folder, model_config)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="eplb_token_save_path: .* cannot be made"):
        ExpertCounts.check_folder(tmp_path / "file", model_config)


def test_the_files_of_a_folder_are_added_up(tmp_path: Path) -> None:
    for rank, value in ((0, 1), (2, 10)):
        (tmp_path / f"eplb_token_collects_{rank}.json").write_text(json.dumps({"0": {"0": value, "1": 0}}))
    assert sum_counts(tmp_path) == [[11, 0]]
    (tmp_path / "eplb_token_collects_4.json").write_text(json.dumps({"0": {"0": 1}}))
    with pytest.raises(ValueError, match="they are of several models"):
        sum_counts(tmp_path)
    with pytest.raises(ValueError, match="eplb_token_collects: true"):
        sum_counts(tmp_path / "missing")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"0": {}}', '{"0": {"0": -1}}', '{"0": {"0": true}}', '{"0": {"0": 1.5}}', '{"1": {"0": 1}}', "[" * 9999],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "eplb_token_collects_0.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=path.name):
        _read_counts(path)
