"""No tensor is dropped unsaid: what config.json does not count is an error unless it is a whole prediction layer."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_round_trip import add_prediction_layer, load_folder
from torch import Tensor

from mindspeed_rl.checkpoint.source import check_hf_tensors
from mindspeed_rl.cli.convert import main
from mindspeed_rl.models.plan import read_model

LAYERS = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every tiny model as an HF folder."""
    folder = tmp_path_factory.mktemp("models")
    for name in tiny_models.CONFIGS:
        tiny_models.save_hf_model(name, folder / name)
    return folder


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line of a conversion that fails and leaves nothing."""
    words = tuple(str(word) for word in words)
    destination = Path(words[words.index("--save-dir") + 1])
    assert main(words) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert not destination.exists()
    return line


def copied(
    source: Path, target: Path, config: Mapping[str, Any] | None = None, tensors: dict[str, Tensor] | None = None
) -> Path:
    """The folder with other keys in config.json and, if given, other tensors."""
    shutil.copytree(source, target)
    content = {**json.loads((source / "config.json").read_text()), **(config or {})}
    layers = content["num_hidden_layers"]
    for kinds in ("layer_types", "indexer_types"):
        if content.get(kinds):
            content[kinds] = (content[kinds] * layers)[:layers]
    if kinds := content.get("mlp_layer_types"):  # dense ones are in front
        content["mlp_layer_types"] = (kinds + kinds[-1:] * layers)[:layers]
    (target / "config.json").write_text(json.dumps(content))
    if tensors is not None:
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_a_layer_too_many_or_too_few_and_a_tensor_too_many_or_too_few_are_named(
    name: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = folders / name, ("--save-dir", tmp_path / "out")
    tensors = load_file(source / "model.safetensors")

    few = error_of(capsys, "--load-dir", copied(source, tmp_path / "few", {"num_hidden_layers": LAYERS - 1}), *out)
    assert "'model.layers.3." in few and "num_hidden_layers 3" in few
    many = error_of(capsys, "--load-dir", copied(source, tmp_path / "many", {"num_hidden_layers": LAYERS + 1}), *out)
    assert "'model.layers.4" in many and "num_hidden_layers 5" in many
    huge = error_of(capsys, "--load-dir", copied(source, tmp_path / "huge", {"num_hidden_layers": 9999}), *out)
    assert "'model.layers.4'" in huge and "num_hidden_layers 9999" in huge

    for extra in ("model.layers.1.self_attn.extra.weight", "model.layers.9.input_layernorm.weight", "other.weight"):
        surplus = copied(source, tmp_path / extra, tensors={**tensors, extra: torch.zeros(64)})
        text = error_of(capsys, "--load-dir", surplus, *out)
        assert f"holds '{extra}' unknown to" in text and "--load-checkpoint-loosely" in text
    lost = sorted(tensors)[len(tensors) // 2]
    rest = {name: tensor for name, tensor in tensors.items() if name != lost}
    text = error_of(capsys, "--load-dir", copied(source, tmp_path / "lost", tensors=rest), *out)
    assert f"has no tensor '{lost}'" in text and "num_hidden_layers 4" in text


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "deepseek3", "gemma2"])
def test_a_megatron_checkpoint_with_another_number_of_layers_than_config_json_is_refused(
    form: str, name: str, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--load-dir", str(folders / name), "--save-dir", str(tmp_path / "mg"), "--ckpt-format", form]) == 0
    for layers in (LAYERS - 1, LAYERS + 1):
        config = copied(folders / name, tmp_path / f"{layers}", {"num_hidden_layers": layers})
        words = ("--save-model-type", "hf", "--hf-cfg-dir", config, "--save-dir", tmp_path / "out")
        text = error_of(capsys, "--load-dir", tmp_path / "mg", *words)
        assert "decoder.layers." in text and f"num_hidden_layers {layers}" in text


def test_a_real_layer_beside_a_prediction_layer_is_no_prediction_layer(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "whole"
    tensors = add_prediction_layer(folders / "deepseek3", whole)
    out = ("--save-dir", tmp_path / "out")
    text = error_of(capsys, "--load-dir", copied(whole, tmp_path / "few", {"num_hidden_layers": LAYERS - 1}), *out)
    assert "holds 'model.layers.3." in text and "num_hidden_layers 3" in text
    text = error_of(capsys, "--load-dir", copied(whole, tmp_path / "many", {"num_hidden_layers": LAYERS + 1}), *out)
    assert "holds 'model.layers.4." in text and "unknown to deepseek_v3" in text
    for lost in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "mlp.gate"):
        rest = {name: tensor for name, tensor in tensors.items() if name != f"model.layers.4.{lost}.weight"}
        text = error_of(capsys, "--load-dir", copied(whole, tmp_path / f"without-{lost}", tensors=rest), *out)
        assert "holds 'model.layers.4." in text
    other = {**tensors, "model.layers.4.eh_proj.weight": torch.zeros(64, 64).bfloat16()}
    assert "holds 'model.layers.4." in error_of(capsys, "--load-dir", copied(whole, tmp_path / "o", tensors=other), *out)
    text = error_of(capsys, "--load-dir", whole, *out, "--mtp-num-layers", 2)
    assert "'model.layers.5'" in text and "--mtp-num-layers 2" in text
    assert main(["--load-dir", str(whole), *map(str, out), "--verify"]) == 0
    said = capsys.readouterr().err
    assert "dropped 1 multi-token-prediction layer(s); --mtp-num-layers keeps them" in said
    count = sum(name.startswith("model.layers.4.") for name in tensors)
    assert f"every tensor that was not skipped ({count} were) verified" in said


def test_a_fused_tensor_holds_no_expert_and_no_layer_too_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, key in (("mixtral", "num_local_experts"), ("qwen3-moe", "num_experts")):
        model = tiny_models.make_hf_model(name)
        model.save_pretrained(tmp_path / name, save_original_format=False)
        tensors = load_folder(tmp_path / name)
        assert "model.layers.1.mlp.experts.gate_up_proj" in tensors
        for stored in list(tensors):
            if stored.endswith("mlp.gate.weight"):
                tensors[stored] = tensors[stored][:3].clone()  # else the router's shape is what is wrong
        fewer = copied(tmp_path / name, tmp_path / f"{name}-few", {key: 3}, tensors)
        text = error_of(capsys, "--load-dir", fewer, "--save-dir", tmp_path / "out")
        assert "experts.3." in text and "unknown to" in text
        tensors = load_folder(tmp_path / name)
        tensors["model.layers.7.mlp.experts.gate_up_proj"] = tensors["model.layers.1.mlp.experts.gate_up_proj"].clone()
        more = copied(tmp_path / name, tmp_path / f"{name}-more", tensors=tensors)
        text = error_of(capsys, "--load-dir", more, "--save-dir", tmp_path / "out")
        assert "model.layers.7." in text and "unknown to" in text


@pytest.mark.parametrize(("change", "refuses"), [(0.0, False), (2.0**-8, True)])
def test_a_tied_head_is_compared_by_its_values(tmp_path: Path, change: float, refuses: bool) -> None:
    """A head in float32 with the values of an embedding in bfloat16 is tied to it."""
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**tiny_models.COMMON, "tie_word_embeddings": True}))
    model.bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].float() + change
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    architecture, model_config, _ = read_model(tmp_path)
    with pytest.raises(ValueError, match="lm_head.weight differs") if refuses else contextlib.nullcontext():
        check_hf_tensors(tmp_path, architecture, model_config, loosely=False)
