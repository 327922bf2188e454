"""Log-probs of trainer and rollout engine, bit by bit, where `rl_config.exact_log_probs` is on."""

from __future__ import annotations

from pathlib import Path

import exact_jobs as jobs
import pytest
from ranks import Ranks

#: numbers of formats: (bf16, fp32_lm_head)
FORMATS = {"float32": (False, None), "bfloat16": (True, False), "bfloat16, float32 head": (True, True)}


def check(folder: Path, model: str, form: str, num_samples: int) -> None:
    """All log-probs before and after an update, in four kinds of micro-batches, are those of the engine."""
    bf16, head = FORMATS[form]
    keys = {"bf16": bf16, "fp32_lm_head": head}
    rank = Ranks(1, "rollout")  # its process computes in this way from then on
    try:
        rank.run(jobs.save, name=model, folder=folder, timeout_s=100)
        (rounds,) = rank.run(
            jobs.count_differences, folder=str(folder), keys=keys, generate={}, num_samples=num_samples, timeout_s=1500
        )
    finally:
        rank.close()
    assert [one["differing"] for one in rounds] == [[0] * 4] * 2
    assert all(one["tokens"] > 30 * num_samples for one in rounds)
    assert rounds[0]["mean"] != rounds[1]["mean"]  # the update changed the weights


def test_no_bit_differs_between_trainer_and_rollout_engine(tmp_path: Path) -> None:
    check(tmp_path, "qwen2", "bfloat16", 6)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("form", FORMATS)
def test_no_bit_differs_in_any_model_and_format(model: str, form: str, tmp_path: Path) -> None:
    check(tmp_path, model, form, 16)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_no_bit_differs_in_1000_samples(form: str, tmp_path: Path) -> None:
    check(tmp_path, "qwen2", form, 1000)
