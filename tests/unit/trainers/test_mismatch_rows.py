"""Rows of a run on which trainer and rollout engine differ beyond a bound, as its folder keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_rl.config import load_run_config
from mindspeed_rl.dataplane.transfer_dock import TransferDock
from mindspeed_rl.dumps.mismatch_rows import read_rows
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.trainers.mismatch import EngineMismatch
from mindspeed_rl.trainers.schedule import Schedule

KEYS = ["megatron_training.global_batch_size=4", "rl_config.mini_batch_size=4", "rl_config.n_samples_per_prompt=2"]


class _Rows:
    """The rows of an iteration, without the process in which a run keeps them."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self._dock = TransferDock(4, 2, {"worker": tuple(columns), "metrics": ()})
        self._dock.put({name: [torch.tensor(row) for row in rows] for name, rows in columns.items()}, range(8))

    def get(self, consumer: str, columns: list[str], *, indexes: list[int], timeout_s: float) -> Any:
        return self._dock.get(consumer, columns, indexes=list(indexes))


LENGTHS = [10, 20, 40, 30, 12, 9, 8, 7]


def _measure(folder: Path, differences: dict[tuple[int, int], float], *keys: str, iteration: int = 1) -> dict[str, float]:
    """Return the figures of an iteration with differences at (row, token)."""
    keys = (*KEYS, f"run_dir={folder}", "actor_config.tensor_model_parallel_size=1", "actor_config.micro_batch_size=2", *keys)
    run = resolve(load_run_config("grpo_tiny_cpu", None, keys), platform="cpu")
    recorded = [[-1.0] * length for length in LENGTHS]
    computed = [row.copy() for row in recorded]
    for (row, token), difference in differences.items():
        computed[row][token] -= difference
    schedule = Schedule(run)
    columns = {
        "prompt_ids": [[100 + row] * 3 for row in range(8)],
        "responses": [[*range(length)] for length in LENGTHS],
        "response_mask": [[True] * length for length in LENGTHS],
        "rollout_log_probs": recorded,
        "update_log_probs" if schedule.compares_update(iteration) else "old_log_probs": computed,
    }
    rows: Any = _Rows(columns)
    mismatch = EngineMismatch(run, rows, schedule)
    mismatch._has_old_log_probs = schedule.computes_old_log_probs(iteration)
    return mismatch.measure(iteration).results()


@pytest.mark.parametrize("keys", [[], ["rl_config.mini_batch_size=2"]], ids=["by the update", "by a pass before it"])
def test_rows_end_where_tokens_differ(keys: list[str], tmp_path: Path) -> None:
    figures = _measure(tmp_path, {(3, 17): 8.0, (1, 19): 1.0, (2, 3): 0.01, (2, 38): 3.0}, *keys)
    # tokens from the 16-th on: 4 of row 1, 24 of row 2, 14 of row 3
    assert figures["mismatch/depth/16"] == pytest.approx(12.0 / 42) and figures["mismatch/depth/0"] < 1e-3
    rows = read_rows(tmp_path / "mismatch_rows.json")
    assert (rows.iteration, rows.place) == (2, "mismatch/depth/16")
    # the largest difference first; the engine samples up to 16 tokens after each
    assert rows.contexts == [[*[100 + row] * 3, *range(end)] for row, end in ((3, 16), (2, 23), (1, 16))]
    record = json.loads((tmp_path / "mismatch_rows.json").read_text())
    assert list(record) == ["iteration", "place", "contexts"] and all(isinstance(token, int) for token in record["contexts"][0])


def test_rows_within_the_bounds_are_not_kept(tmp_path: Path) -> None:
    for differences in ({}, {(3, 17): 0.5}, {(3, 17): 8.0, (3, 3): 8.0}):  # the last differs at the start as well
        assert _measure(tmp_path, differences)["mismatch/depth/16"] < 0.2 and not (tmp_path / "mismatch_rows.json").exists()


def test_rows_of_an_earlier_run_in_the_folder_are_dropped(tmp_path: Path) -> None:
    _measure(tmp_path, {(3, 17): 8.0, (1, 19): 5.0})
    assert (tmp_path / "mismatch_rows.json").exists()
    _measure(tmp_path, {})
    assert not (tmp_path / "mismatch_rows.json").exists()


def test_updates_are_compared_in_the_first_iterations_and_every_tenth(tmp_path: Path) -> None:
    compared = [iteration for iteration in range(31) if _measure(tmp_path, {}, iteration=iteration)]
    assert compared == [0, 1, 2, 9, 19, 29]
    assert _measure(tmp_path, {}, "rl_config.log_rollout_offpolicy_metrics=false") == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"iteration": 1, "place": "x", "contexts": [[]]}', '{"contexts": [["a"]]}'])
def test_a_damaged_file_says_what_to_do(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mismatch_rows.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"mismatch_rows.json cannot be read .*: --prompts 4 compares prompts of the data"):
        read_rows(path)
