"""How far two trainings differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from mindspeed_rl.observability.metrics import merge


def losses(reports: list[dict[str, Any]]) -> list[float]:
    """The loss of each step over all ranks."""
    steps = len(reports[0]["metrics"])
    return [merge(report["metrics"][step] for report in reports).results()["loss"] for step in range(steps)]


def distances(reports: list[dict[str, Any]], reference: list[dict[str, Any]]) -> dict[str, float]:
    """Largest relative difference of loss, gradient norm and weights; by norm for each weight tensor."""
    ours, theirs = reports[0]["weights"], reference[0]["weights"]
    assert sorted(ours) == sorted(theirs)
    weights = [np.linalg.norm(ours[name] - theirs[name]) / np.linalg.norm(theirs[name]) for name in theirs]
    return {
        "loss": _relative(losses(reports), losses(reference)),
        "grad_norm": max(_relative(report["grad_norm"], reference[0]["grad_norm"]) for report in reports),
        "weights": float(max(weights)),
    }


def _relative(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def assert_same_training(reports: list[dict[str, Any]], reference: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    """Loss, gradient norm and weights agree."""
    distance = distances(reports, reference)
    assert all(value <= tolerance for value in distance.values()), distance
