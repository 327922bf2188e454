"""Rows of 32k tokens give the update of one process in every layout, and it is the update of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import long_row_jobs as jobs
import pytest
import torch
import transformers
from comparison import assert_same_training, losses
from ranks import Ranks
from slow_layouts import PP, RING, SP, ULYSSES
from training_jobs import KEYS, TEMPERATURE, Setting

pytestmark = pytest.mark.slow

#: memory of all processes of a layout
LIMIT_GIB = 6.0
DYNAMIC = RING | {"context_parallel_size": 4, "dynamic_context_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any], int | None]] = {
    "TP2 SP": (2, SP, None),
    "PP2": (2, PP, None),
    "CP2 Ulysses": (2, ULYSSES, None),
    "CP2 ring": (2, RING, None),
    # the long row takes four ranks, and each of the short ones two
    "CP4 ring dynamic": (4, DYNAMIC, jobs.LONG),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.save_model(tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="module")
def one_process(folder: Path) -> Iterator[list[dict[str, Any]]]:
    """What one process reports, a row at a time."""
    group = Ranks(1)
    yield group.run(jobs.train_long, setting=Setting(str(folder), micro_batch_size=1), timeout_s=300)
    group.close()


def test_one_process_follows_transformers(folder: Path, one_process: list[dict[str, Any]]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    rows, total = jobs.long_rows(), 0.0
    count = sum(rows.response_lengths)
    for ids, prompt, weights in zip(rows.input_ids, rows.prompt_lengths, rows.columns["weights"]):
        log_softmax = (model(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]
        log_probs = log_softmax.gather(1, ids[prompt:, None])[:, 0]
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        loss = -(weights * log_probs + 0.1 * entropy).sum() / count
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), KEYS["clip_grad"]).item()
    assert losses(one_process) == pytest.approx([total], rel=1e-5)
    assert one_process[0]["grad_norm"] == pytest.approx([norm], rel=1e-4)


@pytest.mark.parametrize(("size", "keys", "budget"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_train_as_one_process_does(
    folder: Path, one_process: list[dict[str, Any]], size: int, keys: dict[str, Any], budget: int | None
) -> None:
    group = Ranks(size)  # new ones, whose memory is of this layout only
    setting = Setting(str(folder), keys, micro_batch_size=1, token_budget=budget)
    try:
        reports = group.run(jobs.train_long, setting=setting, timeout_s=300)
    finally:
        group.close()
    assert_same_training(reports, one_process)
    assert sum(report["peak_gib"] for report in reports) < LIMIT_GIB
