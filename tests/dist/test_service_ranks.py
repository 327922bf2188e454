"""A training service on two devices has the numbers of one, whichever way they share the work, and tells when one is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import patient
from safetensors.numpy import load_file
from service_ranks_program import make_model

PROGRAM = Path(__file__).with_name("service_ranks_program.py")
#: tensor-parallel and data-parallel ranks
LAYOUTS = {"tensor": (2, 1), "data": (1, 2)}

pytestmark = [pytest.mark.slow, pytest.mark.extra]


def run_program(folder: Path, name: str, tensor: int, data: int) -> dict[str, Any]:
    others = [str(folder / "one")] if tensor * data > 1 else []
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder / "model"), str(folder / name), str(tensor), str(data), *others],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=patient(600),
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("service_ranks")
    make_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    return run_program(folder, "one", 1, 1)


def flatten(values: Any) -> list[float]:
    return [number for value in values for number in flatten(value)] if isinstance(values, list) else [values]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_devices_have_the_numbers_of_one(folder: Path, one: dict[str, Any], layout: str) -> None:
    two = run_program(folder, layout, *LAYOUTS[layout])
    # losses, log-probs and norms of two steps of two models, float32 sums in another order
    np.testing.assert_allclose(flatten(two["steps"]), flatten(one["steps"]), rtol=2e-4, atol=2e-5)
    assert two["joined"] > 0 < one["joined"]
    for (tokens, log_probs), (other_tokens, other_log_probs) in zip(*(sum(each["samples"], []) for each in (two, one))):
        assert tokens == other_tokens
        np.testing.assert_allclose(log_probs, other_log_probs, rtol=1e-3, atol=1e-3)
    # a folder of one device continues on two as it does on one
    np.testing.assert_allclose(flatten(two["of_other"]), flatten(one["again"]), rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(flatten(two["again"]), flatten(one["again"]), rtol=1e-3, atol=1e-3)
    for name in ("a/state.safetensors", "a/adapter/adapter_model.safetensors", "merged/model.safetensors"):
        own, expected = (load_file(next(path for path in (folder / run).glob(name))) for run in (layout, "one"))
        assert own.keys() == expected.keys()
        for key, values in own.items():
            # AdamW turns the sign of a gradient of rounding size into a step, here of 0.01
            assert np.abs(values - expected[key]).max() < 2e-2 and np.abs(values - expected[key]).mean() < 1e-4, (name, key)
    texts = ("exists already", "exists already", "no saved model")
    assert [text in error for text, error in zip(texts, two["errors"], strict=True)] == [True] * 3
    assert two["changed_limits"] == []
    assert "service worker" in two["lost"]
