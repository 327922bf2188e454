"""HF -> Megatron at some layout -> HF gives every tensor back bit for bit, for every architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file

from mindspeed_rl.cli.convert import main

DENSE = {
    "tp1": "",
    "tp2": "--target-tensor-parallel-size 2",
    "tp4": "--target-tensor-parallel-size 4",
    "pp2": "--target-pipeline-parallel-size 2",
    "tp2-pp2": "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2",
    "vpp": "--target-pipeline-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "dualpipev": "--target-pipeline-parallel-size 2 --schedules-method dualpipev",
    "layer-list": "--target-pipeline-parallel-size 2 --num-layer-list 1,3 --target-tensor-parallel-size 2",
    "noop": "--target-pipeline-parallel-size 2 --noop-layers 0,5 --num-layers-per-virtual-pipeline-stage 1",
    "padded": "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2 --make-vocab-size-divisible-by 48",
    "te-names": "--target-tensor-parallel-size 2 --transformer-impl transformer_engine",
    "torch_dist": "--ckpt-format torch_dist",
}
EXPERTS = {
    "ep2": "--target-expert-parallel-size 2",
    "ep2-tp2": "--target-expert-parallel-size 2 --target-tensor-parallel-size 2",
    "ep2-tp2-pp2": "--target-expert-parallel-size 2 --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2",
    "ep2-tp2-etp1": "--target-expert-parallel-size 2 --target-tensor-parallel-size 2 --expert-tensor-parallel-size 1",
    "ep4-tp2-etp1": "--target-expert-parallel-size 4 --target-tensor-parallel-size 2 --expert-tensor-parallel-size 1",
    "tp-extend-ep": "--target-expert-parallel-size 2 --target-tensor-parallel-size 2 --moe-tp-extend-ep",
    "grouped": "--moe-grouped-gemm",
    "grouped-ep2-tp2": "--moe-grouped-gemm --target-expert-parallel-size 2 --target-tensor-parallel-size 2",
    "grouped-etp1": "--moe-grouped-gemm --target-expert-parallel-size 2 --target-tensor-parallel-size 2 "
    "--expert-tensor-parallel-size 1",
}
MOE = (
    *("mixtral", "qwen2-moe", "qwen3-moe", "qwen3-next", "deepseek2-lite", "deepseek3", "deepseek32"),
    *("glm5", "glm4-moe", "minimax-m2", "ernie4.5-moe", "gpt-oss", "hunyuan-moe", "hy3"),
)
LEGACY = ("llama", "llama31-tied", "mistral", "qwen2", "qwen2-tied")
#: one model of each weight table; the others differ in rotary settings only
TABLES = ("llama", "qwen2-tied", "qwen3", "qwen3.5", "gemma2", "glm4", "phi3", "olmo3", "hunyuan", *MOE)
#: what runs by default: every table under a few layouts that together cover every option
QUICK = {
    *((name, "tp2-pp2") for name in TABLES),
    *((name, "ep2-tp2") for name in MOE),
    *(("llama", layout) for layout in ("tp1", "tp4", "vpp", "dualpipev", "layer-list", "torch_dist", "te-names")),
    *(("qwen2-tied", layout) for layout in ("noop", "padded", "torch_dist", "layer-list")),
    *(("qwen3-moe", layout) for layout in EXPERTS),
    *(("deepseek3", layout) for layout in ("te-names", "torch_dist", "grouped-ep2-tp2", "noop")),
    *(("qwen2-moe", layout) for layout in ("torch_dist", "tp-extend-ep")),
    ("glm5", "torch_dist"),
}
GRID = [(name, layout) for name in tiny_models.CONFIGS for layout in {**DENSE, **(EXPERTS if name in MOE else {})}]


@pytest.fixture(scope="module")
def hf_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


def saved(name: str, folders: Path) -> Path:
    folder = folders / name
    if not folder.exists():
        tiny_models.save_hf_model(name, folder, dtype=torch.bfloat16)
    return folder


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def assert_same_tensors(first: Path, other: Path) -> None:
    expected, result = load_folder(first), load_folder(other)
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert result[name].dtype == tensor.dtype and torch.equal(result[name], tensor), name


def convert(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def round_trip(name: str, layout: str, hf_folders: Path, folder: Path, *back: str) -> None:
    source = saved(name, hf_folders)
    convert("--load-dir", source, "--save-dir", folder / "mg", *{**DENSE, **EXPERTS}[layout].split())
    convert(
        "--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", folder / "mg", "--save-dir", folder / "back", *back
    )
    assert_same_tensors(source, folder / "back")


@pytest.mark.parametrize(("name", "layout"), sorted(QUICK))
def test_round_trip_is_bit_equal(name: str, layout: str, hf_folders: Path, tmp_path: Path) -> None:
    round_trip(name, layout, hf_folders, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [case for case in GRID if case not in QUICK])
def test_round_trip_is_bit_equal_on_the_whole_grid(name: str, layout: str, hf_folders: Path, tmp_path: Path) -> None:
    round_trip(name, layout, hf_folders, tmp_path)


@pytest.mark.parametrize("name", LEGACY)
def test_round_trip_through_the_legacy_layout_is_bit_equal(name: str, hf_folders: Path, tmp_path: Path) -> None:
    source = saved(name, hf_folders)
    split = "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    convert("--load-dir", source, "--save-dir", tmp_path / "legacy", "--save-to-legacy", *split.split())
    convert(
        "--load-model-type", "mg", "--load-from-legacy", "--load-dir", tmp_path / "legacy", "--save-dir", tmp_path / "mcore"
    )
    convert(
        "--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", tmp_path / "mcore", "--save-dir", tmp_path / "hf"
    )
    assert_same_tensors(source, tmp_path / "hf")


def test_megatron_checkpoints_are_cut_anew_without_a_detour(hf_folders: Path, tmp_path: Path) -> None:
    source = saved("qwen3-moe", hf_folders)
    direct, detour = tmp_path / "direct", tmp_path / "detour"
    final = ("--target-pipeline-parallel-size", 2, "--moe-grouped-gemm", "--target-expert-parallel-size", 2)
    convert("--load-dir", source, "--save-dir", direct, *final)
    convert("--load-dir", source, "--save-dir", tmp_path / "a", *EXPERTS["ep4-tp2-etp1"].split())
    convert(
        "--load-model-type", "mg", "--load-dir", tmp_path / "a", "--save-dir", tmp_path / "b", "--ckpt-format", "torch_dist"
    )
    convert("--load-model-type", "mg", "--load-dir", tmp_path / "b", "--save-dir", detour, *final)
    files = sorted(path.relative_to(direct) for path in direct.rglob("*.pt"))
    assert len(files) == 4
    for path in files:
        result, other = (torch.load(root / path, weights_only=False)["model"] for root in (direct, detour))
        assert result.keys() == other.keys() and all(torch.equal(result[key], other[key]) for key in result)


@pytest.mark.parametrize("name", ["deepseek3", "qwen3.5", "qwen3-next", "glm4-moe", "mimo"])
def test_prediction_layers_are_kept_on_request_and_dropped_otherwise(name: str, tmp_path: Path) -> None:
    tiny_models.save_hf_model(name, tmp_path / "plain", dtype=torch.bfloat16)
    numbered = name in ("deepseek3", "glm4-moe", "mimo")
    add = add_mimo_layer if name == "mimo" else add_prediction_layer if numbered else add_separate_prediction_layer
    with_predictions = add(tmp_path / "plain", tmp_path / "hf")
    for layout in ("tp2-pp2", "torch_dist"):
        kept = tmp_path / layout
        convert("--load-dir", tmp_path / "hf", "--save-dir", kept, "--mtp-num-layers", 1, "--verify", *DENSE[layout].split())
        back = ("--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", kept)
        convert(*back, "--save-dir", tmp_path / f"{layout}-kept", "--verify")
        result = load_folder(tmp_path / f"{layout}-kept")
        assert result.keys() == with_predictions.keys()
        assert all(torch.equal(result[name], tensor) for name, tensor in with_predictions.items())
        convert(*back, "--save-dir", tmp_path / f"{layout}-dropped", "--mtp-num-layers", 0)
        assert_same_tensors(tmp_path / "plain", tmp_path / f"{layout}-dropped")
    convert("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "dropped")
    convert(
        "--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", tmp_path / "dropped", "--save-dir", tmp_path / "hf2"
    )
    assert_same_tensors(tmp_path / "plain", tmp_path / "hf2")
    for folder, number in (("tp2-pp2-kept", 1), ("tp2-pp2-dropped", 0), ("hf2", 0)):
        key = "num_nextn_predict_layers" if numbered else "mtp_num_hidden_layers"
        assert json.loads((tmp_path / folder / "config.json").read_text())[key] == number


def add_separate_prediction_layer(source: Path, target: Path) -> dict[str, torch.Tensor]:
    """The checkpoint with one multi-token-prediction layer, laid out as Qwen3-Next and Qwen3.5 are published."""
    from safetensors.torch import save_file

    tensors = load_folder(source)
    hidden = tensors["model.norm.weight"].numel()
    layers = {key.replace("model.layers.3.", "mtp.layers.0."): tensor + 1 for key, tensor in tensors.items() if ".3." in key}
    generator = torch.Generator().manual_seed(1)
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    shapes = dict.fromkeys(norms, (hidden,)) | {"fc": (hidden, 2 * hidden)}
    tensors |= {key: tensor for key, tensor in layers.items() if key.startswith("mtp.")}
    tensors |= {f"mtp.{key}.weight": torch.randn(shape, generator=generator).bfloat16() for key, shape in shapes.items()}
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (target / "config.json").write_text(json.dumps(config))
    return tensors


def add_mimo_layer(source: Path, target: Path) -> dict[str, torch.Tensor]:
    """The checkpoint with one multi-token-prediction layer, laid out as MiMo is published."""
    from safetensors.torch import save_file

    tensors = load_folder(source)
    hidden = tensors["model.norm.weight"].numel()
    prefix = "model.mtp_layers.0."
    tensors |= {key.replace("model.layers.3.", prefix): tensor + 1 for key, tensor in tensors.items() if ".3." in key}
    generator = torch.Generator().manual_seed(1)
    shapes = dict.fromkeys(("token_layernorm", "hidden_layernorm", "final_layernorm"), (hidden,))
    shapes["input_proj"] = (hidden, 2 * hidden)
    tensors |= {f"{prefix}{key}.weight": torch.randn(size, generator=generator).bfloat16() for key, size in shapes.items()}
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (target / "config.json").write_text(json.dumps(config))
    return tensors


def add_prediction_layer(source: Path, target: Path) -> dict[str, torch.Tensor]:
    """The checkpoint with one multi-token-prediction layer, laid out as DeepSeek publishes it."""
    from safetensors.torch import save_file

    tensors = load_folder(source)
    hidden = tensors["model.norm.weight"].numel()
    for name, tensor in list(tensors.items()):
        if name.startswith("model.layers.3."):
            tensors[name.replace("layers.3.", "layers.4.")] = tensor + 1
    generator = torch.Generator().manual_seed(1)
    for name, shape in {
        "enorm": (hidden,),
        "hnorm": (hidden,),
        "shared_head.norm": (hidden,),
        "eh_proj": (hidden, 2 * hidden),
    }.items():
        tensors[f"model.layers.4.{name}.weight"] = torch.randn(shape, generator=generator).bfloat16()
    tensors["model.layers.4.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.4.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return tensors


def test_transformers_fused_experts_are_read_like_separate_ones(tmp_path: Path) -> None:
    for name in ("mixtral", "qwen3-moe"):
        model = tiny_models.save_hf_model(name, tmp_path / name)
        model.save_pretrained(tmp_path / f"{name}-fused", save_original_format=False)
        assert any(key.endswith("experts.gate_up_proj") for key in load_folder(tmp_path / f"{name}-fused"))
        convert(
            "--load-dir", tmp_path / f"{name}-fused", "--save-dir", tmp_path / f"{name}-mg", "--target-tensor-parallel-size", 2
        )
        back = ("--load-model-type", "mg", "--save-model-type", "hf")
        convert(*back, "--load-dir", tmp_path / f"{name}-mg", "--save-dir", tmp_path / f"{name}-back")
        assert_same_tensors(tmp_path / name, tmp_path / f"{name}-back")


def test_a_reward_model_keeps_its_head(tmp_path: Path) -> None:
    import transformers

    config = tiny_models.CONFIGS["llama"]()
    config.num_labels = 1
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path / "hf")
    split = ("--target-tensor-parallel-size", 2, "--target-pipeline-parallel-size", 2)
    convert("--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "mg", "--orm", "--verify", *split)
    shard = torch.load(tmp_path / "mg/iter_0000001/mp_rank_01_001/model_optim_rng.pt", weights_only=False)["model"]
    assert torch.equal(shard["rm_head.weight"], model.score.weight[:, 32:])
    assert "output_layer.weight" not in shard
    back = ("--load-model-type", "mg", "--save-model-type", "hf", "--orm")
    convert(*back, "--load-dir", tmp_path / "mg", "--save-dir", tmp_path / "back", "--verify")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "back")
    assert again.num_labels == 1 and torch.equal(again.score.weight, model.score.weight)


def test_a_language_model_starts_a_reward_model_with_a_fresh_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    model = tiny_models.save_hf_model("qwen2", tmp_path / "lm")
    convert("--load-dir", tmp_path / "lm", "--save-dir", tmp_path / "mg", "--orm", "--verify")
    assert "the reward head starts from normal(0, 0.02)" in capsys.readouterr().err
    back = ("--load-model-type", "mg", "--save-model-type", "hf", "--orm")
    convert(*back, "--load-dir", tmp_path / "mg", "--save-dir", tmp_path / "rm")
    reward = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    assert torch.equal(reward.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert reward.score.weight.shape == (1, 64) and 0.01 < reward.score.weight.std() < 0.04
