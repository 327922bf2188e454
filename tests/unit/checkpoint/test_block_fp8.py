"""Weights in 8-bit floats with a scale for each block, read as bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_rl.checkpoint.block_fp8 import open_weights, without_quantization

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 3]}


def folder_of(path: Path, tensors: dict[str, torch.Tensor], quantization: object = FP8) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "quantization_config": quantization}))
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture
def matrix() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[10, 7] in blocks of [4, 3], which do not come out even; its scales; what it means, by a plain loop."""
    generator = torch.Generator().manual_seed(3)
    stored = torch.randn(10, 7, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3, generator=generator) + 0.5
    meant = torch.empty(10, 7)
    for row in range(10):
        for column in range(7):
            meant[row, column] = float(stored[row, column]) * float(scales[row // 4, column // 3])
    return stored, scales, meant.to(torch.bfloat16)


def test_a_weight_is_its_numbers_times_the_scale_of_their_block(
    tmp_path: Path, matrix: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    stored, scales, meant = matrix
    norm = torch.randn(5).to(torch.bfloat16)
    source = open_weights(folder_of(tmp_path, {"w": stored, "w_scale_inv": scales, "norm": norm}))
    assert source.shape("w") == (10, 7) and source.read("w").dtype == torch.bfloat16
    assert torch.equal(source.read("w"), meant)
    assert torch.equal(source.read("norm"), norm)
    for dim, start, stop in ((0, 3, 9), (1, 2, 7), (0, 0, 1), (1, 6, 7)):
        assert torch.equal(source.read("w", dim, start, stop), meant.narrow(dim, start, stop - start))


def test_missing_and_misshapen_scales_are_named(tmp_path: Path, matrix: tuple[torch.Tensor, ...]) -> None:
    alone = open_weights(folder_of(tmp_path / "alone", {"w": matrix[0]}))
    with pytest.raises(ValueError, match="w is torch.float8_e4m3fn without w_scale_inv"):
        alone.read("w")
    wrong = open_weights(folder_of(tmp_path / "wrong", {"w": matrix[0], "w_scale_inv": matrix[1][:2].contiguous()}))
    with pytest.raises(ValueError, match=r"w_scale_inv has shape \[2, 3\]; w of shape \[10, 7\].* needs \[3, 3\]"):
        wrong.read("w")


@pytest.mark.parametrize("quantization", [{"quant_method": "awq", "bits": 4}, {"quant_method": "fp8"}])
def test_other_quantization_is_refused(tmp_path: Path, quantization: dict) -> None:
    with pytest.raises(ValueError, match="quantization_config with quant_method"):
        open_weights(folder_of(tmp_path, {"w": torch.ones(1)}, quantization))


def test_what_is_written_says_nothing_of_quantization() -> None:
    assert without_quantization({"quantization_config": FP8}) == {"quantization_config": None}
    assert without_quantization({}) == {}
