"""LoRA adapters merged and exported, against `peft` itself and against naive loops."""

from __future__ import annotations

import argparse
from pathlib import Path

import peft
import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file

from mindspeed_rl.cli.convert import main

R, ALPHA = 4, 12
TARGETS = {"linear_qkv": "qkv", "linear_proj": "o", "linear_fc1": "gate_up", "linear_fc2": "down"}


def run(*words: object) -> int:
    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "hf"
    tiny_models.save_hf_model("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    """An adapter made by peft, with both matrices random."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=R, lora_alpha=ALPHA, target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"])
    model = peft.get_peft_model(model, config)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(base.parent / "adapter")
    return base.parent / "adapter"


def merged_by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()


def assert_close(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(result[name], tensor, rtol=1e-6, atol=1e-6)


def test_a_peft_adapter_is_merged_on_the_way_to_mcore_and_to_hf(base: Path, adapter: Path, tmp_path: Path) -> None:
    lora = ("--lora-load", adapter, "--lora-r", R, "--lora-alpha", ALPHA)
    assert run("--load-dir", base, "--save-dir", tmp_path / "mg", "--target-tensor-parallel-size", 2, "--verify", *lora) == 0
    back = ("--load-model-type", "mg", "--save-model-type", "hf", "--load-dir")
    assert run(*back, tmp_path / "mg", "--save-dir", tmp_path / "hf") == 0
    expected = merged_by_peft(base, adapter)
    assert_close(load_file(tmp_path / "hf/model.safetensors"), expected)
    assert run("--load-dir", adapter, "--save-dir", tmp_path / "mg2") == 0, "the base is the one that the adapter names"
    assert run(*back, tmp_path / "mg2", "--save-dir", tmp_path / "hf3") == 0
    assert_close(load_file(tmp_path / "hf3/model.safetensors"), expected)
    assert run("--load-dir", base, "--save-dir", tmp_path / "plain") == 0
    assert run(*back, tmp_path / "plain", "--save-dir", tmp_path / "hf2", "--lora-load", adapter) == 0
    assert_close(load_file(tmp_path / "hf2/model.safetensors"), expected)


def test_a_peft_adapter_is_merged_in_one_conversion(base: Path, adapter: Path, tmp_path: Path) -> None:
    hf = ("--save-model-type", "hf", "--save-dir")
    expected = merged_by_peft(base, adapter)
    assert run("--load-dir", base, "--lora-load", adapter, *hf, tmp_path / "a", "--verify", "--max-shard-size", "200KB") == 0
    result = {name: tensor for file in (tmp_path / "a").glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert_close(result, expected)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    # the adapter names its base
    assert run("--load-dir", adapter, *hf, tmp_path / "b") == 0
    assert_close(load_file(tmp_path / "b/model.safetensors"), expected)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert not (tmp_path / "b" / "adapter_config.json").exists()
    ids = torch.arange(8)[None]
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    # a merge in float32, rounded once
    assert run("--load-dir", adapter, *hf, tmp_path / "c", "--params-dtype", "bf16") == 0
    half = load_file(tmp_path / "c/model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in half.values())
    for name, tensor in half.items():
        torch.testing.assert_close(tensor.float(), expected[name].float(), rtol=2**-8, atol=1e-6)


def test_a_copy_is_refused_with_what_a_conversion_may_do(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--load-dir", base, "--save-model-type", "hf", "--save-dir", tmp_path / "a") == 2
    assert "would only copy it; give --lora-load to merge an adapter" in capsys.readouterr().err
    assert run("--load-dir", base, "--lora-load", adapter, "--save-model-type", "hf", "--save-dir", adapter) == 2
    assert "which is read" in capsys.readouterr().err


def with_lora(folder: Path, tensor_parallel: int, unified: bool, out: Path) -> None:
    """Add random LoRA weights to a converted checkpoint, split as Megatron splits them: B with a column-parallel weight,
    A with a row-parallel one."""
    generator = torch.Generator().manual_seed(2)
    full: dict[str, torch.Tensor] = {}
    for rank in range(tensor_parallel):
        name = f"iter_0000001/mp_rank_{rank:02d}/model_optim_rng.pt"
        content = torch.load(folder / name, weights_only=False)
        model = content["model"]
        result = {}
        for key, tensor in model.items():
            module = key.removesuffix(".weight")
            if module.rpartition(".")[2] not in TARGETS or not key.endswith(".weight"):
                if unified:
                    result[key] = tensor
                continue
            rows, columns = tensor.shape
            column_parallel = module.endswith(("linear_qkv", "linear_fc1"))
            shapes = {
                "lora_A": (R, columns if column_parallel else columns * tensor_parallel),
                "lora_B": (rows * tensor_parallel if column_parallel else rows, R),
            }
            for kind, shape in shapes.items():
                full.setdefault(f"{module}.{kind}", 0.1 * torch.randn(shape, generator=generator))
            a, b = full[f"{module}.lora_A"], full[f"{module}.lora_B"]
            if column_parallel:
                b = b[rank * rows : (rank + 1) * rows]
            else:
                a = a[:, rank * columns : (rank + 1) * columns]
            result[f"{module}.lora_A.default.weight"] = a.clone()
            result[f"{module}.lora_B.default.weight"] = b.clone()
            if unified:
                result[f"{module}.base_layer.weight"] = tensor
        content["model"] = result
        content["args"] = argparse.Namespace(**{**vars(content["args"]), "lora_alpha": ALPHA, "lora_r": R})
        path = out / name
        path.parent.mkdir(parents=True)
        torch.save(content, path)
    (out / "latest_checkpointed_iteration.txt").write_text("1")


@pytest.fixture(scope="module")
def megatron(base: Path) -> dict[str, Path]:
    """The base cut TP 2, the same with adapters inside, and only the adapters."""
    folder = base.parent
    assert run("--load-dir", base, "--save-dir", folder / "mg", "--target-tensor-parallel-size", 2) == 0
    with_lora(folder / "mg", 2, True, folder / "unified")
    with_lora(folder / "mg", 2, False, folder / "alone")
    return {"base": folder / "mg", "unified": folder / "unified", "alone": folder / "alone"}


def expected_merge(base: Path, megatron: dict[str, Path]) -> dict[str, torch.Tensor]:
    """Merge rank by rank in Megatron's packing, where W += alpha / r * B A needs no unpacking, then export."""
    for rank in range(2):
        name = f"iter_0000001/mp_rank_{rank:02d}/model_optim_rng.pt"
        content = torch.load(megatron["unified"] / name, weights_only=False)
        other = torch.load(megatron["unified"] / f"iter_0000001/mp_rank_{1 - rank:02d}/model_optim_rng.pt", weights_only=False)
        assert content["model"].keys() == other["model"].keys()
        merged = {}
        for key, tensor in content["model"].items():
            if ".base_layer." in key:
                module = key.removesuffix(".base_layer.weight")
                a, b = (content["model"][f"{module}.{kind}.default.weight"] for kind in ("lora_A", "lora_B"))
                merged[f"{module}.weight"] = tensor + ALPHA / R * (b @ a)
            elif ".lora_" not in key:
                merged[key] = tensor
        content["model"] = merged
        path = base.parent / "naive" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
    (base.parent / "naive/latest_checkpointed_iteration.txt").write_text("1")
    result = base.parent / "naive-hf"
    if not result.exists():
        words = ("--load-model-type", "mg", "--save-model-type", "hf", "--hf-cfg-dir", base)
        assert run(*words, "--load-dir", base.parent / "naive", "--save-dir", result) == 0
    return load_file(result / "model.safetensors")


def test_adapters_inside_a_checkpoint_are_merged_with_r_and_alpha_checked(
    base: Path, megatron: dict[str, Path], tmp_path: Path
) -> None:
    expected = expected_merge(base, megatron)
    words = ("--load-model-type", "mg", "--save-model-type", "hf", "--hf-cfg-dir", base, "--lora-r", R, "--lora-alpha", ALPHA)
    assert run(*words, "--load-dir", megatron["unified"], "--save-dir", tmp_path / "unified", "--verify") == 0
    assert_close(load_file(tmp_path / "unified/model.safetensors"), expected)
    modules = ("--lora-target-modules", *TARGETS)
    assert (
        run(
            *words, "--load-dir", megatron["base"], "--lora-load", megatron["alone"], "--save-dir", tmp_path / "alone", *modules
        )
        == 0
    )
    assert_close(load_file(tmp_path / "alone/model.safetensors"), expected)


def test_biases_that_lie_under_the_base_layer_are_found(tmp_path: Path) -> None:
    tiny_models.save_hf_model("qwen2", tmp_path / "hf")
    assert run("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "mg") == 0
    with_lora(tmp_path / "mg", 1, True, tmp_path / "unified")
    words = ("--load-model-type", "mg", "--save-model-type", "hf", "--hf-cfg-dir", tmp_path / "hf")
    words = (*words, "--lora-r", R, "--lora-alpha", ALPHA, "--load-dir", tmp_path / "unified", "--save-dir")
    assert run(*words, tmp_path / "before") == 0
    path = tmp_path / "unified/iter_0000001/mp_rank_00/model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    content["model"] = {
        name.replace("linear_qkv.bias", "linear_qkv.base_layer.bias"): x for name, x in content["model"].items()
    }
    torch.save(content, path)
    assert any(name.endswith("base_layer.bias") for name in content["model"])
    assert run(*words, tmp_path / "after") == 0
    assert_close(load_file(tmp_path / "after/model.safetensors"), load_file(tmp_path / "before/model.safetensors"))


def test_the_exported_adapter_is_loaded_by_peft_and_gives_the_merged_model(
    base: Path, megatron: dict[str, Path], tmp_path: Path
) -> None:
    words = ("--load-model-type", "mg", "--save-model-type", "hf", "--hf-cfg-dir", base, "--save-lora-to-hf")
    assert run(*words, "--load-dir", megatron["unified"], "--save-dir", tmp_path / "adapter") == 0
    assert_close(merged_by_peft(base, tmp_path / "adapter"), expected_merge(base, megatron))
    config = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
    assert (config.r, config.lora_alpha) == (R, ALPHA)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lora-r", 8), "--lora-r 8 does not match the adapter, whose rank is 4"),
        (("--lora-alpha", 16), "--lora-alpha 16 does not match the checkpoint, which says 12"),
        (("--lora-target-modules", "linear_qkv"), "--lora-target-modules linear_qkv does not match the adapter"),
    ],
)
def test_a_rank_alpha_or_module_that_does_not_match_is_an_error(
    flags: tuple, message: str, base: Path, megatron: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--load-model-type", "mg", "--save-model-type", "hf", "--hf-cfg-dir", base, "--load-dir", megatron["unified"])
    assert run(*words, "--save-dir", tmp_path / "out", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_peft_adapter_of_another_rank_or_model_is_an_error(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--load-dir", base, "--save-dir", tmp_path / "out")
    assert run(*words, "--lora-load", adapter, "--lora-alpha", 5) == 2
    assert "--lora-alpha 5 does not match" in capsys.readouterr().err
    tiny_models.save_hf_model("llama", tmp_path / "llama")
    assert run("--load-dir", tmp_path / "llama", "--save-dir", tmp_path / "out", "--lora-load", adapter) == 2
    assert "does not fit" in capsys.readouterr().err
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {k: v for k, v in tensors.items() if "layers.0.self_attn.q_proj.lora_B" not in k}, damaged / "adapter_model.safetensors"
    )
    assert run(*words, "--lora-load", damaged) == 2
    assert "has no lora_B next to it" in capsys.readouterr().err


def test_an_adapter_cut_differently_from_its_base_is_an_error(
    base: Path, megatron: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--load-dir", base, "--save-dir", tmp_path / "tp1") == 0
    words = (
        "--load-model-type",
        "mg",
        "--save-model-type",
        "hf",
        "--load-dir",
        tmp_path / "tp1",
        "--save-dir",
        tmp_path / "out",
    )
    assert run(*words, "--lora-load", megatron["alone"]) == 2
    assert "LoRA and base must be cut alike" in capsys.readouterr().err
