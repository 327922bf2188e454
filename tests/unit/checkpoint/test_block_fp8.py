"""Weights in 8-bit floats with a scale for each block, read as bfloat16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import save_file
from test_round_trip import add_prediction_layer, convert, load_folder

from mindspeed_rl.checkpoint.block_fp8 import open_weights, without_quantization
from mindspeed_rl.checkpoint.source import check_hf_tensors
from mindspeed_rl.cli.convert import main
from mindspeed_rl.models import architecture_for

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


def as_published(source: Path, target: Path) -> dict[str, torch.Tensor]:
    """A DeepSeek-V3 whose projections are in 8-bit floats, its prediction layer's too; what its tensors mean."""
    rows, columns = 24, 16
    shutil.copytree(source, target)
    stored, meant = {}, {}
    for name, tensor in load_folder(source).items():
        if not name.endswith("_proj.weight"):
            stored[name] = meant[name] = tensor
            continue
        height, width = tensor.shape
        padded = torch.nn.functional.pad(tensor.float(), (0, -width % columns, 0, -height % rows))
        blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        scales = blocks.abs().amax((1, 3)) / 448
        small = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        whole = (small.float() * scales[:, None, :, None]).flatten(2, 3).flatten(0, 1)
        stored[name] = small.view(torch.uint8).flatten(2, 3).flatten(0, 1)[:height, :width].contiguous().view(small.dtype)
        stored[f"{name}_scale_inv"] = scales
        meant[name] = whole[:height, :width].to(torch.bfloat16).contiguous()
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [rows, columns]}
    (target / "config.json").write_text(json.dumps(config))
    save_file(stored, target / "model.safetensors")
    return meant


def test_weights_as_they_are_published_are_converted_as_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_models.save_hf_model("deepseek3", tmp_path / "plain", dtype=torch.bfloat16)
    add_prediction_layer(tmp_path / "plain", tmp_path / "full")
    meant = as_published(tmp_path / "full", tmp_path / "hf")
    cut = ("--target-tensor-parallel-size", 2, "--target-expert-parallel-size", 2)
    back = ("--load-model-type", "mg", "--save-model-type", "hf")
    convert("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "mg", "--mtp-num-layers", 1, "--verify", *cut)
    assert "written as bfloat16" in capsys.readouterr().err
    convert(*back, "--load-dir", tmp_path / "mg", "--save-dir", tmp_path / "back", "--verify")
    result = load_folder(tmp_path / "back")
    assert result.keys() == meant.keys()
    for name, tensor in meant.items():
        assert result[name].dtype == tensor.dtype and torch.equal(result[name], tensor), name
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    capsys.readouterr()
    convert("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "dropped", "--verify")
    assert "dropped 1 multi-token-prediction layer(s)" in capsys.readouterr().err


def test_a_model_that_is_trained_may_have_8_bit_prediction_layers(tmp_path: Path) -> None:
    tiny_models.save_hf_model("deepseek3", tmp_path / "plain", dtype=torch.bfloat16)
    add_prediction_layer(tmp_path / "plain", tmp_path / "full")
    as_published(tmp_path / "full", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    architecture = architecture_for(config)
    said = check_hf_tensors(tmp_path / "hf", architecture, architecture.read_model_config(config), loosely=False)
    assert said == ["left out 1 multi-token-prediction layer(s), which are not trained"]


def test_8_bit_weights_of_which_the_config_says_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_models.save_hf_model("deepseek3", tmp_path / "plain", dtype=torch.bfloat16)
    as_published(tmp_path / "plain", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    assert main(["--load-dir", str(tmp_path / "hf"), "--save-dir", str(tmp_path / "mg")]) == 2
    assert "is torch.float8_e4m3fn, of which config.json has no quantization_config" in capsys.readouterr().err
    assert not (tmp_path / "mg").exists()
