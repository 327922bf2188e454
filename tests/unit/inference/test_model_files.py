"""A model is the same model in whatever form it lies on disk."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import tiny_models
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch import Tensor

from mindspeed_rl.checkpoint.merge import open_model as open_merged
from mindspeed_rl.cli.convert import main as convert
from mindspeed_rl.inference.model_files import ModelSettings, open_model

FORMS = {
    "torch": (),
    "tp2-pp2": ("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"),
    "padded": ("--target-tensor-parallel-size", "2", "--make-vocab-size-divisible-by", "48"),
    "legacy": ("--save-to-legacy",),
    "torch_dist": ("--ckpt-format", "torch_dist"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "hf"
    tiny_models.save_hf_model("qwen2", folder)
    return folder


def tensors(settings: ModelSettings) -> dict[str, Tensor]:
    return dict(open_model(settings).named_tensors())


def assert_equal(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(result[name], tensor, rtol=1e-6, atol=1e-6)


def test_a_hugging_face_folder_gives_its_tensors(base: Path) -> None:
    model = open_model(ModelSettings(base))
    assert_equal(dict(model.named_tensors()), load_file(base / "model.safetensors"))
    assert (model.hf_folder, model.source.dtype, model.model_config.num_layers) == (base, torch.float32, 4)


@pytest.mark.parametrize("form", FORMS)
def test_a_megatron_checkpoint_of_any_form_gives_the_tensors_it_was_made_from(base: Path, tmp_path: Path, form: str) -> None:
    assert convert(["--load-dir", str(base), "--save-dir", str(tmp_path / form), *FORMS[form]]) == 0
    model = open_model(ModelSettings(tmp_path / form))
    assert_equal(dict(model.named_tensors()), load_file(base / "model.safetensors"))
    config = json.loads((model.hf_folder / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"]) == ("qwen2", 128)


def test_a_peft_adapter_is_merged_as_peft_merges_it(base: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "o_proj", "up_proj"]))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    expected = model.merge_and_unload().state_dict()
    assert_equal(tensors(ModelSettings(base, lora_load=tmp_path, lora_r=4, lora_alpha=12)), expected)
    with pytest.raises(ValueError, match="--lora-r 8 does not match"):
        open_model(ModelSettings(base, lora_load=tmp_path, lora_r=8))
    with pytest.raises(ValueError, match="is an adapter: pass it as --lora-load"):
        open_model(ModelSettings(tmp_path))


LAYERS, HIDDEN, FFN, GROUPS, PER_GROUP, HEAD, R, ALPHA = 4, 64, 96, 4, 2, 8, 4, 12


@pytest.fixture
def saved_adapters(tmp_path: Path) -> dict[str, Tensor]:
    """Adapters alone, written as training writes them, with torch's own writer: [layers, r, in] and [layers, out, r]."""
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "self_attention.linear_qkv": (HIDDEN, GROUPS * (PER_GROUP + 2) * HEAD),
        "self_attention.linear_proj": (HIDDEN, HIDDEN),
        "mlp.linear_fc1": (HIDDEN, 2 * FFN),
    }
    state = {}
    for module, (inputs, outputs) in sizes.items():
        shapes = {"lora_A": (LAYERS, R, inputs), "lora_B": (LAYERS, outputs, R)}
        for kind, shape in shapes.items():
            state[f"decoder.layers.{module}.{kind}.default.weight"] = 0.1 * torch.randn(shape, generator=generator)
    folder = tmp_path / "run" / "iter_0000003"
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    lora = {"r": R, "alpha": ALPHA, "target_modules": ["linear_fc1", "linear_proj", "linear_qkv"], "with_base": False}
    (folder / "run_state.json").write_text(json.dumps({"lora": lora}))
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    return state


def test_trained_adapters_are_merged_over_a_base_of_another_form(
    base: Path, saved_adapters: dict[str, Tensor], tmp_path: Path
) -> None:
    expected = load_file(base / "model.safetensors")

    def delta(module: str, layer: int) -> Tensor:
        a, b = (saved_adapters[f"decoder.layers.{module}.{kind}.default.weight"][layer] for kind in ("lora_A", "lora_B"))
        return ALPHA / R * (b @ a)

    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        expected[f"{prefix}.self_attn.o_proj.weight"] += delta("self_attention.linear_proj", layer)
        gate, up = delta("mlp.linear_fc1", layer).split(FFN)
        expected[f"{prefix}.mlp.gate_proj.weight"] += gate
        expected[f"{prefix}.mlp.up_proj.weight"] += up
        # each group: its query heads, then its key, then its value
        rows = delta("self_attention.linear_qkv", layer).view(GROUPS, PER_GROUP + 2, HEAD, HIDDEN)
        expected[f"{prefix}.self_attn.q_proj.weight"] += rows[:, :PER_GROUP].reshape(-1, HIDDEN)
        expected[f"{prefix}.self_attn.k_proj.weight"] += rows[:, PER_GROUP].reshape(-1, HIDDEN)
        expected[f"{prefix}.self_attn.v_proj.weight"] += rows[:, PER_GROUP + 1].reshape(-1, HIDDEN)
    run = tmp_path / "run"
    assert_equal(tensors(ModelSettings(base, lora_load=run)), expected)
    modules = ("linear_fc1", "linear_proj", "linear_qkv")
    assert convert(["--load-dir", str(base), "--save-dir", str(tmp_path / "mg"), "--ckpt-format", "torch_dist"]) == 0
    settings = ModelSettings(tmp_path / "mg", lora_load=run, lora_r=R, lora_alpha=ALPHA, lora_target_modules=modules)
    assert_equal(tensors(settings), expected)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"lora_alpha": 3.0}, "--lora-alpha 3 does not match the checkpoint, which says 12"),
        ({"lora_target_modules": ("linear_fc1",)}, "--lora-target-modules linear_fc1 does not match the adapter, which has "),
    ],
)
def test_what_contradicts_the_trained_adapters_is_an_error(
    base: Path, saved_adapters: dict[str, Tensor], tmp_path: Path, changes: dict, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        open_model(ModelSettings(base, lora_load=tmp_path / "run", **changes))
    with pytest.raises(ValueError, match="holds only adapters .* pass it as --lora-load, and the base as --load"):
        open_model(ModelSettings(tmp_path / "run"))


def test_what_cannot_be_run_is_an_error_that_says_why(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds neither a Hugging Face model .* nor a checkpoint"):
        open_model(ModelSettings(tmp_path))
    # as roles with their own adapters export them
    for name in ("solver", "critic"):
        (tmp_path / "roles" / name).mkdir(parents=True)
        (tmp_path / "roles" / name / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"it has the adapters critic, solver: name one, such as .*roles/critic"):
        open_model(ModelSettings(tmp_path / "roles"))
    with pytest.raises(ValueError, match=r"roles is not a model; it has the adapters critic, solver"):
        open_merged(tmp_path / "roles", None, None)
    with pytest.raises(ValueError, match="--load: '.*missing' does not exist"):
        open_model(ModelSettings(tmp_path / "missing"))
    with pytest.raises(ValueError, match="need an adapter: .* holds none"):
        open_model(ModelSettings(base, lora_alpha=2.0))
    with pytest.raises(ValueError, match="--load-iteration 3: .* has no iterations"):
        open_model(ModelSettings(base, iteration=3))
    reward = transformers.Qwen2ForSequenceClassification(transformers.Qwen2Config(**tiny_models.COMMON, num_labels=1))
    reward.save_pretrained(tmp_path / "reward")
    with pytest.raises(ValueError, match="is a reward model .* which generates no text"):
        open_model(ModelSettings(tmp_path / "reward"))
