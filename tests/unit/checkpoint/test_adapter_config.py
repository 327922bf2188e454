"""Every key of peft's LoraConfig, and every tensor of an adapter, is used as peft uses it or is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny_models
import torch
import transformers
from safetensors.torch import load_file, save_file

from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.checkpoint.lora import MergedSource, open_peft
from mindspeed_rl.models import find_architecture
from mindspeed_rl.models.weights import WeightOp

_TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]
#: adapters that peft makes; True: its logits must be found
MADE: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "use_rslora": ({"use_rslora": True}, True),
    "layers_to_transform": ({"layers_to_transform": [1, 3]}, True),
    "layers_pattern": ({"layers_to_transform": [1], "layers_pattern": "layers"}, True),
    "exclude_modules": ({"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, True),
    "target_modules": ({"target_modules": r".*layers\.[02]\..*(k_proj|up_proj)"}, True),
    "target_parameters": ({"target_modules": [], "target_parameters": ["q_proj.weight", "up_proj.weight"]}, True),
    "lora_dropout": ({"lora_dropout": 0.1}, True),
    "task_type": ({"task_type": "CAUSAL_LM"}, True),
    "init gaussian": ({"init_lora_weights": "gaussian"}, True),
    "init orthogonal": ({"init_lora_weights": "orthogonal"}, True),
    "init mica": ({"init_lora_weights": "mica"}, True),
    "lora_bias": ({"lora_bias": True}, False),
    "alora_invocation_tokens": ({"alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"}, False),
    "use_dora": ({"use_dora": True}, False),
    "rank_pattern": ({"rank_pattern": {"q_proj": 2}}, False),
    "alpha_pattern": ({"alpha_pattern": {"q_proj": 2}}, False),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, False),
    "trainable_token_indices": ({"trainable_token_indices": [3, 4]}, False),
    "target_modules embedding": ({"target_modules": ["embed_tokens", "q_proj"]}, False),
    "bias all": ({"bias": "all"}, False),
    "bias lora_only": ({"bias": "lora_only"}, False),
    "init pissa": ({"init_lora_weights": "pissa"}, False),
    "init pissa_niter_4": ({"init_lora_weights": "pissa_niter_4"}, False),
    "init olora": ({"init_lora_weights": "olora"}, False),
}
#: what peft cannot make here, or what no adapter of these modules shows: only the key is set, and it must be refused
SET = {
    "layer_replication": [[0, 2], [1, 4]],
    "fan_in_fan_out": True,
    "megatron_config": {"hidden_size": 8},
    "use_qalora": True,
    "velora_config": {"init_type": "batch_average_once"},
    "monteclora_config": {"num_samples": 2},
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 0.1},
    "peft_type": "LOHA",
    "init_lora_weights": "loftq",
    "a_key_of_another_release": 3,
}
#: what has no part in what an adapter computes
IGNORED = {
    "auto_mapping": {"base_model_class": "Qwen2ForCausalLM"},
    "peft_version": "0.1",
    "base_model_name_or_path": "elsewhere",
    "revision": "main",
    "inference_mode": False,
    "megatron_core": "megatron.core",
    "loftq_config": {"loftq_bits": 4},
    "eva_config": {"rho": 2.0},
    "corda_config": {"corda_method": "ipm"},
    "lora_ga_config": {"direction": "ArB2r"},
    "qalora_group_size": 8,
    "runtime_config": {"ephemeral_gpu_offload": True},
    "ensure_weight_tying": True,
    "a_key_of_another_release": None,
}
_NUMBERS = {"r", "lora_alpha"}  # checked in test_adapter_files.py


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_models.save_hf_model("qwen2", folder)
    return folder


@pytest.fixture(scope="module")
def ops(base: Path) -> list[WeightOp]:
    architecture = find_architecture("qwen2")
    return architecture.weight_ops(architecture.read_model_config(json.loads((base / "config.json").read_text())))


def make(base: Path, folder: Path, keys: dict[str, Any]) -> torch.Tensor:
    """Make an adapter with random weights, save it; return the logits of the model that peft loads from the file."""
    torch.manual_seed(0)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": _TARGETS, **keys})
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return compute_logits(load(base, folder))


def load(base: Path, folder: Path) -> Any:
    return peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder
    ).eval()


@torch.no_grad()
def compute_logits(model: Any) -> torch.Tensor:
    return model(torch.arange(2, 14)[None]).logits


def merge(base: Path, folder: Path, ops: list[WeightOp]) -> torch.Tensor:
    """Return the logits of the base with the adapter merged by this project."""
    source = MergedSource(HfFolder(base), open_peft(folder, ops))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.read(name))
    return compute_logits(model.eval())


@pytest.mark.parametrize("case", MADE)
def test_an_adapter_of_peft_gives_peft_s_logits_or_is_refused(
    base: Path, ops: list[WeightOp], tmp_path: Path, case: str
) -> None:
    keys, works = MADE[case]
    expected = make(base, tmp_path, keys)
    if works:
        torch.testing.assert_close(merge(base, tmp_path, ops), expected, rtol=1e-4, atol=1e-4)
    else:
        with pytest.raises(ValueError, match=rf"{tmp_path}.*({case.split()[0]}|init_lora_weights|embed_tokens)"):
            merge(base, tmp_path, ops)


@pytest.fixture
def plain(base: Path, tmp_path: Path) -> Iterator[Path]:
    make(base, tmp_path, {})
    yield tmp_path


def set_key(folder: Path, key: str, value: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def test_a_key_that_changes_what_an_adapter_computes_is_refused(ops: list[WeightOp], plain: Path) -> None:
    original = (plain / "adapter_config.json").read_bytes()
    for key, value in SET.items():
        set_key(plain, key, value)
        with pytest.raises(ValueError, match=rf"{key}|LOHA"):
            open_peft(plain, ops)
        (plain / "adapter_config.json").write_bytes(original)


def test_a_key_that_changes_nothing_is_ignored(ops: list[WeightOp], plain: Path) -> None:
    expected = open_peft(plain, ops)
    for key, value in IGNORED.items():
        set_key(plain, key, value)
        found = open_peft(plain, ops)
        assert (found.scale, found.pairs.keys()) == (expected.scale, expected.pairs.keys()), key


def test_every_field_of_peft_s_class_has_a_case() -> None:
    made = {key for keys, _ in MADE.values() for key in keys}
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= made | SET.keys() | IGNORED.keys() | _NUMBERS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": "lora_A"}, "the lora_B of .* has no lora_A"),
        ({"drop": "lora_B"}, "the lora_A of .* has no lora_B"),
        ({"add": ".lora_B.bias"}, "lora_B.bias.*not a LoRA weight"),
        ({"add": ".lora_magnitude_vector"}, "lora_magnitude_vector.*not a LoRA weight"),
        ({"add": ".lora_A.other.weight"}, "next to another lora_A"),
        ({"add": ".base_layer.bias"}, "base_layer.bias.*not a LoRA weight"),
    ],
)
def test_a_tensor_that_has_no_use_is_refused(ops: list[WeightOp], plain: Path, change: dict[str, str], message: str) -> None:
    path, module = plain / "adapter_model.safetensors", "base_model.model.model.layers.1.self_attn.q_proj"
    tensors = load_file(path)
    if "drop" in change:
        del tensors[f"{module}.{change['drop']}.weight"]
    else:
        tensors[module + change["add"]] = tensors[f"{module}.lora_A.weight"].clone()
    save_file(tensors, path)
    with pytest.raises(ValueError, match=message):
        open_peft(plain, ops)
