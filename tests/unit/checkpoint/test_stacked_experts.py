"""gpt-oss as it is stored: the experts of a layer in one tensor, in bfloat16 or in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mindspeed_rl.adaptors.vllm_stacked_experts import find_stack, join_experts
from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.cli.convert import main
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models.plan import plan_model

EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt-oss") / "hf"
    tiny_models.save_hf_model("gpt-oss", folder, dtype=torch.bfloat16)
    return folder


def convert(*words: object) -> int:
    return main([str(word) for word in words])


def test_an_expert_is_read_from_the_stack_as_other_families_store_it(folder: Path) -> None:
    stored, read = load_file(folder / "model.safetensors"), HfFolder(folder).read
    gate_up, down = stored[f"{EXPERTS}.gate_up_proj"], stored[f"{EXPERTS}.down_proj"]
    bias = stored[f"{EXPERTS}.gate_up_proj_bias"]
    assert torch.equal(read(f"{EXPERTS}.2.gate_proj.weight"), gate_up[2, :, 0::2].t())
    assert torch.equal(read(f"{EXPERTS}.2.up_proj.weight", 0, 3, 9), gate_up[2, :, 1::2].t()[3:9])
    assert torch.equal(read(f"{EXPERTS}.3.down_proj.weight", 1, 4, 8), down[3].t()[:, 4:8])
    assert torch.equal(read(f"{EXPERTS}.1.up_proj.bias"), bias[1, 1::2])


def test_separate_experts_are_stacked_again_in_any_order(folder: Path) -> None:
    stored, opened = load_file(folder / "model.safetensors"), HfFolder(folder)
    named = [(name, opened.read(name)) for name in sorted(opened.records, reverse=True) if find_stack(name)]
    joined = dict(join_experts(iter(named), 4))
    assert joined.keys() == {name for name in stored if ".mlp.experts." in name}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in joined.items())
    # expert parallelism: of the others' experts come none, or some
    for sent in (named, [(name, tensor) for name, tensor in named if ".experts.0." not in name]):
        local = dict(join_experts(iter(sent), 4, local=range(1, 3)))
        assert local.keys() == joined.keys()
        assert all(torch.equal(local[name][1:3], stored[name][1:3]) and not local[name][[0, 3]].any() for name in local)
    with pytest.raises(RuntimeError, match=r"down_proj came without some of its 4 experts"):
        list(join_experts([("model.layers.0.mlp.experts.0.down_proj.weight", torch.zeros(2, 2))], 4))


def in_mxfp4(folder: Path, result: Path) -> dict[str, Tensor]:
    """Write the model with random experts in MXFP4; return all its tensors in bfloat16, as transformers reads them."""
    generator = torch.Generator().manual_seed(0)
    result.mkdir()
    stored, full = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = full[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 130, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        full[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, result / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (result / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return full


def test_mxfp4_is_read_as_transformers_reads_it_and_written_in_full(folder: Path, tmp_path: Path) -> None:
    full = in_mxfp4(folder, tmp_path / "mxfp4")
    read = HfFolder(tmp_path / "mxfp4").read
    gate_up = full[f"{EXPERTS}.gate_up_proj"]
    assert torch.equal(read(f"{EXPERTS}.2.gate_proj.weight"), gate_up[2, :, 0::2].t())
    assert torch.equal(read(f"{EXPERTS}.0.up_proj.weight", 0, 3, 9), gate_up[0, :, 1::2].t()[3:9])
    assert torch.equal(read(f"{EXPERTS}.1.down_proj.weight", 1, 5, 40), full[f"{EXPERTS}.down_proj"][1].t()[:, 5:40])
    split = ("--target-tensor-parallel-size", 2, "--expert-tensor-parallel-size", 1, "--verify")
    assert convert("--load-dir", tmp_path / "mxfp4", "--save-dir", tmp_path / "mg", *split) == 0
    back = ("--load-model-type", "mg", "--save-model-type", "hf", "--load-dir")
    assert convert(*back, tmp_path / "mg", "--save-dir", tmp_path / "hf", "--verify") == 0
    result = load_file(tmp_path / "hf" / "model.safetensors")
    assert result.keys() == full.keys() and all(torch.equal(result[name], full[name]) for name in full)
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())


def test_mxfp4_without_its_scales_is_one_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_mxfp4(folder, tmp_path / "mxfp4")
    path = tmp_path / "mxfp4" / "model.safetensors"
    stored = {name: tensor for name, tensor in load_file(path).items() if not name.endswith("1.mlp.experts.down_proj_scales")}
    save_file(stored, path, metadata={"format": "pt"})
    assert convert("--load-dir", tmp_path / "mxfp4", "--save-dir", tmp_path / "mg") == 2
    assert "experts.down_proj_blocks of shape" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tensor_model_parallel_size": 2}, "expert_tensor_parallel_size: 2 cannot be used with gpt_oss"),
        ({"recompute_activation_function": True}, "recompute_activation_function: true cannot be used"),
        ({"lora_target_modules": ["linear_qkv", "linear_fc1"]}, "lora_target_modules: linear_fc1 .* adapt linear_qkv"),
    ],
)
def test_what_experts_with_biases_cannot_do_is_refused(folder: Path, keys: dict[str, object], words: str) -> None:
    config = MegatronConfig(**keys)
    with pytest.raises(ValueError, match=words):
        plan_model(config, folder)
