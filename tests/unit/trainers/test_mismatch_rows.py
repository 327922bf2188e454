"""Rows of a run on which trainer and rollout engine differ beyond a bound, as its folder keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_rl.config import load_run_config
from mindspeed_rl.dataplane.columns import Batch, pack, ragged
from mindspeed_rl.dumps.mismatch_rows import read_rows
from mindspeed_rl.observability.alerts import find_mismatches
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.trainers.batch_records import MismatchRecorder

KEYS = ["megatron_training.global_batch_size=4", "rl_config.mini_batch_size=4", "rl_config.n_samples_per_prompt=2"]
FIGURES = {"mismatch/depth/0": 0.001, "mismatch/depth/16": 0.5}


class _Plane:
    """The rows of an iteration."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = {name: pack([torch.tensor(row) for row in rows]) for name, rows in columns.items()}

    def get(self, consumer: str, columns: list[str], *, indexes: range, timeout_s: float) -> tuple[Batch, list[int]]:
        return {name: ragged(self.columns[name]).take(indexes) for name in columns}, [*indexes]


def _record(folder: Path, figures: dict[str, float], *, has_old_log_probs: bool) -> Path:
    keys = [*KEYS, f"run_dir={folder}", "actor_config.tensor_model_parallel_size=1", "actor_config.micro_batch_size=2"]
    run = resolve(load_run_config("grpo_tiny_cpu", None, keys), platform="cpu")
    lengths = [10, 20, 40, 30, 12, 9, 8, 7]
    recorded = [[-1.0] * length for length in lengths]
    computed = [row.copy() for row in recorded]
    computed[3][17], computed[1][19] = -9.0, -2.0
    columns = {
        "prompt_ids": [[100 + row] * 3 for row in range(8)],
        "responses": [[*range(length)] for length in lengths],
        "response_mask": [[True] * length for length in lengths],
        "old_log_probs": computed,
        "rollout_log_probs": recorded,
    }
    recorder = MismatchRecorder(run, _Plane(columns))  # type: ignore[arg-type]
    recorder._has_old_log_probs = has_old_log_probs
    recorder.record(6, figures)
    return folder / "mismatch_rows.json"


@pytest.mark.parametrize(
    ("has_old_log_probs", "expected"),
    [
        # rows by their largest difference from token 16 on; the engine samples up to 16 tokens after each
        (True, [(3, 16), (1, 16), (2, 16)]),
        # rows by their depth: 16 tokens before the end
        (False, [(2, 24), (3, 16), (1, 16)]),
    ],
)
def test_rows_end_where_tokens_differ(has_old_log_probs: bool, expected: list[tuple[int, int]], tmp_path: Path) -> None:
    rows = read_rows(_record(tmp_path, FIGURES, has_old_log_probs=has_old_log_probs))
    assert (rows.iteration, rows.place) == (7, "mismatch/depth/16")
    assert rows.contexts == [[*[100 + row] * 3, *range(end)] for row, end in expected]


def test_rows_within_the_bounds_are_not_kept(tmp_path: Path) -> None:
    for figures in ({}, {"mismatch/depth/0": 0.2, "mismatch/depth/16": 0.5}, {"mismatch/depth/16": 0.5}):
        assert list(find_mismatches(figures)) == [] and not _record(tmp_path, figures, has_old_log_probs=True).exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"iteration": 1, "place": "x", "contexts": [[]]}', '{"contexts": [["a"]]}'])
def test_a_damaged_file_says_what_to_do(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mismatch_rows.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"mismatch_rows.json cannot be read .*: --prompts 4 compares prompts of the data"):
        read_rows(path)


def test_the_file_has_plain_numbers(tmp_path: Path) -> None:
    record = json.loads(_record(tmp_path, FIGURES, has_old_log_probs=False).read_text())
    assert list(record) == ["iteration", "place", "contexts"] and all(isinstance(token, int) for token in record["contexts"][0])
