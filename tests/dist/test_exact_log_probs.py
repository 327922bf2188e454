"""Log-probs of trainer and rollout engine, bit by bit, where `rl_config.exact_log_probs` is on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import exact_jobs as jobs
import pytest
from ranks import Ranks

#: numbers of formats: (bf16, fp32_lm_head)
FORMATS = {"float32": (False, None), "bfloat16": (True, False), "bfloat16, float32 head": (True, True)}
TENSOR, STAGES = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2, "num_layer_list": "1,2"}
#: layouts of two ranks: (keys of the trainer, tensor-parallel ranks of an engine)
LAYOUTS = {
    "two ranks, engines of one": (TENSOR, 1),
    "sequence parallel, engines of one": ({**TENSOR, "sequence_parallel": True}, 1),
    "two ranks, an engine of two": (TENSOR, 2),
    "copies, an engine of two": ({}, 2),
    "two stages, an engine of two": (STAGES, 2),
    "two stages, engines of one": (STAGES, 1),
}


def check(
    folder: Path,
    model: str,
    form: str,
    num_samples: int,
    layout: dict[str, Any] | None = None,
    infer_tp: int = 1,
    updates: int = 1,
    max_tokens: int = 160,
) -> None:
    """All log-probs before and after each update, in four kinds of micro-batches, equal the engine's.

    Args:
        layout: keys of the trainer's; the 331 tokens are filled up, so that each rank has a multiple of 16.
    """
    bf16, head = FORMATS[form]
    keys = {"bf16": bf16, "fp32_lm_head": head, "padded_vocab_size": 352, **(layout or {})}
    settings = {"num_samples": num_samples, "infer_tp": infer_tp, "updates": updates, "max_tokens": max_tokens}
    ranks = Ranks(1 if layout is None else 2, "rollout")  # their processes compute in this way from then on
    try:
        jobs.save(model, folder)
        reports = ranks.run(jobs.count_differences, folder=str(folder), keys=keys, timeout_s=800, **settings)
    finally:
        ranks.close()
    stages = keys.get("pipeline_model_parallel_size", 1)
    for rank, rounds in enumerate(reports):
        has_log_probs = rank // (len(reports) // stages) == stages - 1
        assert [update["differing"] for update in rounds] == [[0] * 4 if has_log_probs else []] * (updates + 1)
        assert all(update["tokens"] > 0.2 * max_tokens * num_samples for update in rounds)
        assert len({update["mean"] for update in rounds}) == updates + 1  # each update changed the weights


def test_no_bit_differs_between_a_trainer_of_two_ranks_and_engines_of_one(tmp_path: Path) -> None:
    check(tmp_path, "qwen2", "bfloat16", 6, *LAYOUTS["two ranks, engines of one"], max_tokens=100)


@pytest.mark.slow
@pytest.mark.parametrize("model", jobs.MODELS)
@pytest.mark.parametrize("form", FORMATS)
def test_no_bit_differs_in_any_model_and_format(model: str, form: str, tmp_path: Path) -> None:
    check(tmp_path, model, form, 16)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_no_bit_differs_where_trainers_share_experts(model: str, form: str, tmp_path: Path) -> None:
    check(tmp_path, model, form, 16, {"expert_model_parallel_size": 2}, max_tokens=100)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_bit_differs_in_any_layout(name: str, form: str, tmp_path: Path) -> None:
    layout, infer_tp = LAYOUTS[name]
    check(tmp_path, "qwen2" if form == "float32" else "qwen3", form, 16, layout, infer_tp, max_tokens=100)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_no_bit_differs_in_1000_samples(form: str, tmp_path: Path) -> None:
    check(tmp_path, "qwen2", form, 1000, updates=0, max_tokens=40)
