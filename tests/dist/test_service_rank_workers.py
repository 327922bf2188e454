"""Two ranks of a training service, called in step, have the numbers and samples of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import service_rank_jobs as jobs
from ranks import Ranks
from safetensors.numpy import load_file
from service_ranks_program import make_model

KIND = "rollout"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", [(2, 1), (1, 2)], ids=["tensor", "data"])
def test_two_ranks_in_step_have_the_numbers_and_samples_of_one(
    ranks: Callable[[int], Ranks], tmp_path: Path, layout: tuple[int, int]
) -> None:
    folder = str(tmp_path / "model")
    make_model(tmp_path / "model")
    one = ranks(1).run(jobs.serve, folder=folder, work=tmp_path / "one", tensor=1, data=1, timeout_s=240)[0]
    ranks(1).close()
    both = ranks(2).run(jobs.serve, folder=folder, work=tmp_path / "two", tensor=layout[0], data=layout[1], timeout_s=240)
    ranks(2).close()  # exact log-probs cannot be switched off, nor divided otherwise
    np.testing.assert_allclose(both[0]["numbers"], one["numbers"], rtol=2e-4, atol=2e-5)
    assert both[1]["numbers"] == [] and both[0]["joined"] > 0 < one["joined"]
    assert both[0]["refused"] == both[1]["refused"] and {kind for kind, _ in both[0]["refused"]} == {"refused"}
    samples = both[0]["samples"] | both[1]["samples"]
    assert sorted(samples) == sorted(one["samples"]) == list(range(8))
    assert bool(both[1]["samples"]) == (layout[1] == 2)
    for index, expected in one["samples"].items():
        for (tokens, log_probs), (other, other_log_probs) in zip(samples[index], expected, strict=True):
            assert tokens == other
            np.testing.assert_allclose(log_probs, other_log_probs, rtol=1e-3, atol=1e-3)
    merged, expected_merged = (load_file(tmp_path / name / "merged" / "model.safetensors") for name in ("two", "one"))
    assert merged.keys() == expected_merged.keys()
    # AdamW turns the sign of a gradient of rounding size into a step, here of 0.01, times the scale of an adapter
    assert all(np.abs(merged[key] - expected_merged[key]).mean() < 1e-4 for key in merged)
