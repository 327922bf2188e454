"""Models of clients on two ranks have the numbers of one, and in joint passes the bits that they have alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import client_models_jobs as jobs
import numpy as np
import pytest
import torch
import transformers
from ranks import Ranks
from safetensors.numpy import load_file

SIZES = {"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2, "max_position_embeddings": 128, "vocab_size": 144}
TP = {"tensor_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {"data": {}, "tensor": TP, "sequence": {**TP, "sequence_parallel": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("client_models")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SIZES, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def one(ranks: Callable[[int], Ranks], folder: Path) -> dict[str, Any]:
    seen = ranks(1).run(jobs.train, folder=folder / "model", out=folder / "one")[0]
    return seen | {"resumed": ranks(1).run(jobs.resume, folder=folder / "model", saved=folder / "one")[0]}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_have_the_numbers_of_one(
    ranks: Callable[[int], Ranks], folder: Path, one: dict[str, Any], layout: str
) -> None:
    keys = LAYOUTS[layout]
    first, second = ranks(2).run(jobs.train, folder=folder / "model", out=folder / layout, **keys)
    np.testing.assert_allclose(first["numbers"], one["numbers"], rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(first["norms"], one["norms"], rtol=1e-4)
    for name, values in first["weights"].items():
        # every rank has all of a model, with the same bits
        assert values.tobytes() == second["weights"][name].tobytes(), name
        # AdamW turns the sign of a gradient of rounding size into a step, here of 0.001
        assert np.abs(values - one["weights"][name]).max() < 5e-3
        assert np.abs(values - one["weights"][name]).mean() < 1e-5, name
    assert len(first["errors"]) == 2 and first["errors"] == second["errors"]
    resumed = ranks(2).run(jobs.resume, folder=folder / "model", saved=folder / "one", **keys)[1]
    np.testing.assert_allclose(resumed, one["resumed"], rtol=1e-4)
    own, expected = (load_file(folder / name / "adapter" / "adapter_model.safetensors") for name in (layout, "one"))
    assert own.keys() == expected.keys()
    assert all(np.abs(own[key] - expected[key]).max() < 5e-3 for key in own)


@pytest.fixture
def alone() -> Iterator[Ranks]:
    """A process of its own: exact log-probs cannot be switched off again."""
    own = Ranks(1)
    yield own
    own.close()


@pytest.mark.slow
def test_joint_passes_leave_every_model_its_bits(alone: Ranks, folder: Path) -> None:
    # all in one pass, and a few in each
    for budget, num_joined in ((2048, 5), (460, 1)):
        seen = alone.run(jobs.compare_company, folder=folder / "model", budget=budget, orders=["abcd", "dcab", "ca", "bd"])[0]
        assert seen["differing"] == [] and seen["joined"] >= num_joined
        assert "data[1] is not finite" in seen["refused"][0]
