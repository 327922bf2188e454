"""Multi-token-prediction layers of a Qwen3.5 with its tower train as a plain computation does, alike under every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import prediction_jobs as jobs
import pytest
import torch
from comparison import assert_same_training
from ranks import Ranks
from slow_layouts import PP, RECOMPUTE, SP, ULYSSES
from tiny_prediction import PredictingImages
from training_jobs import TEMPERATURE, Setting

LAMBDA = 0.3
KEYS = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": LAMBDA, "freeze_vit": False, "freeze_aligner": False}
WHOLE = {**KEYS, "mtp_detach_heads": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(PredictingImages.build().save(tmp_path_factory.mktemp("qwen3_5_vl")))


@pytest.mark.parametrize("detaches", [False, True], ids=["whole", "detached"])
def test_logits_losses_and_gradients_are_those_of_the_plain_computation(
    ranks: Callable[[int], Ranks], folder: str, detaches: bool
) -> None:
    setting = Setting(folder, {**KEYS, "mtp_detach_heads": detaches}, packed=False, micro_batch_size=8)
    (report,) = ranks(1).run(jobs.first_step, setting=setting, with_images=True)
    plain, rows = PredictingImages.build(), jobs.masked_rows(with_images=True)
    assert rows.images is not None
    own, main, count, trained, logits = [], torch.zeros(()), 0, 0, []
    for ids, prompt, images, weights, mask in zip(rows.input_ids, rows.prompt_lengths, rows.images, *rows.columns.values()):
        first, predicted = plain.image_logits(ids, prompt, images, detaches=detaches)
        log_softmax = (first / TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        main = main - (log_softmax.gather(1, ids[prompt:, None])[:, 0] * weights + 0.1 * entropy).sum()
        count, trained = count + len(weights), trained + int(mask.sum())
        logits += predicted[prompt - 2 : -2].detach()
        own += [-predicted[at - 2].log_softmax(-1)[ids[at]] for at in range(prompt, len(ids)) if mask[at - prompt]]
    added = torch.stack(own).sum()
    assert report["metrics"]["mtp_loss"].result() == pytest.approx(added.item() / len(own), rel=1e-5)
    # positions are ordered by token first in the padded layout
    (mine,) = report["logits"]
    np.testing.assert_allclose(_sort(mine), _sort(torch.stack(logits).numpy()), rtol=1e-4, atol=2e-4)
    parameters = plain.named_parameters()
    total = main / count + LAMBDA / trained * added
    for name, expected in zip(parameters, torch.autograd.grad(total, [*parameters.values()], allow_unused=True), strict=True):
        expected = torch.zeros_like(parameters[name]) if expected is None else expected
        np.testing.assert_allclose(report["gradients"][name], expected.numpy(), rtol=2e-3, atol=1e-5, err_msg=name)


def _sort(rows: np.ndarray) -> np.ndarray:
    return rows[rows[:, 0].argsort()]


_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "micro-batches of one row, recomputed": (1, {"micro_batch_size": 1, "keys": RECOMPUTE}),
    "token budget": (1, {"token_budget": 120}),
    "DP2": (2, {"micro_batch_size": 1}),
    "TP2": (2, {"keys": {"tensor_model_parallel_size": 2}}),
    "TP2 SP": (2, {"keys": SP}),
    "PP2": (2, {"keys": PP | {"num_layer_list": "2,1"}}),
    "PP2 detached": (2, {"keys": PP | {"num_layer_list": "1,2", "mtp_detach_heads": True}}),
    "CP2 Ulysses": (2, {"keys": ULYSSES}),
    "PP2 TP2 SP": (4, {"keys": PP | SP | {"num_layer_list": "2,1"}}),
    "PP3": (3, {"keys": {"pipeline_model_parallel_size": 3}}),
}
_QUICK = ("PP2",)


@pytest.mark.parametrize("layout", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in _LAYOUTS])
def test_every_layout_trains_as_one_process_does(ranks: Callable[[int], Ranks], folder: str, layout: str) -> None:
    size, changes = _LAYOUTS[layout]
    keys = WHOLE | changes.get("keys", {})
    whole = Setting(folder, WHOLE | {"mtp_detach_heads": keys["mtp_detach_heads"]}, packed=False)
    alone = ranks(1).run(jobs.train, setting=whole, with_images=True)
    setting = Setting(folder, **{"packed": False, **changes, "keys": keys})
    reports = ranks(size).run(jobs.train, setting=setting, with_images=True, timeout_s=240)
    assert_same_training(reports, alone, tolerance=2e-5)
