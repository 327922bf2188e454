"""LoRA training is the same under every layout; two real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lora_jobs
import pytest
import torch
import transformers
from megatron_release import GROUPED_EXPERTS
from ranks import Ranks
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from mindspeed_rl.inference.model_files import ModelSettings, open_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True}
MOE["router_aux_loss_coef"] = 0.0  # experts balanced over a micro-batch depend on its rows
#: as `lora_jobs` chooses them
SAVED_UNDER = {"dense": "tp2-sp", "moe": "tp2-etp2-grouped" if GROUPED_EXPERTS else "tp2-etp2"}


@pytest.fixture(scope="module")
def folder(ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both processes wrote, after they trained every layout."""
    folder = tmp_path_factory.mktemp("lora")
    models = {"dense": transformers.Qwen2Config(**SIZES), "moe": transformers.Qwen3MoeConfig(**SIZES, **MOE)}
    for name, config in models.items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / name)
    ranks(2).run(lora_jobs.train_every_layout, folder=folder, timeout_s=300)
    return folder


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((tensor - theirs[name]).abs().max()) for name, tensor in ours.items())


CASES = [("dense", layout) for layout in ("tp2", "tp2-sp", "tp2-sp-recompute", "pp2", "dp2-distributed")] + [
    ("moe", layout) for layout in ("ep2", "ep2-grouped", "tp2-etp2", "tp2-etp2-grouped", "tp2-ep2")
]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_training_is_the_same_under_every_layout(folder: Path, kind: str, layout: str) -> None:
    whole = load_file(folder / f"{kind}-dp2.safetensors")
    split = load_file(folder / f"{kind}-{layout}.safetensors")
    torch.testing.assert_close(split.pop("norms"), whole.pop("norms"), rtol=1e-5, atol=0)
    assert largest_difference(split, whole) < 1e-4  # Adam turns rounding in almost zero gradients into whole steps
    start = load_file(folder / kind / "model.safetensors")
    assert (
        float((whole["model.layers.0.self_attn.q_proj.weight"] - start["model.layers.0.self_attn.q_proj.weight"]).abs().max())
        > 1e-3
    )


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("parts", ["whole", "adapters", "trained", "merged"])
def test_a_checkpoint_loads_under_another_layout(folder: Path, kind: str, parts: str) -> None:
    saved = load_file(folder / f"{kind}-{SAVED_UNDER[kind]}.safetensors")
    del saved["norms"]
    assert largest_difference(load_file(folder / f"{kind}-{parts}-loaded.safetensors"), saved) < 1e-6


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_exported_adapters_are_those_of_the_split_model(folder: Path, kind: str) -> None:
    merged = load_file(folder / f"{kind}-{SAVED_UNDER[kind]}.safetensors")
    base = load_file(folder / kind / "model.safetensors")
    with safe_open(folder / f"{kind}-adapter" / "adapter_model.safetensors", "pt") as adapter:
        modules = {key.split(".lora_")[0] for key in adapter.keys()}
        for module in modules:
            a, b = (adapter.get_tensor(f"{module}.lora_{x}.weight") for x in "AB")
            name = module.removeprefix("base_model.model.") + ".weight"
            torch.testing.assert_close(base[name] + 16 / 4 * b @ a, merged[name], atol=1e-6, rtol=0)
    changed = {name for name, tensor in base.items() if not torch.equal(tensor, merged.get(name, tensor))}
    assert changed == {module.removeprefix("base_model.model.") + ".weight" for module in modules}


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("parts", ["whole", "adapters"])
def test_inference_opens_what_training_saved_with_the_adapters_merged(folder: Path, kind: str, parts: str) -> None:
    saved = load_file(folder / f"{kind}-{SAVED_UNDER[kind]}.safetensors")
    del saved["norms"]
    checkpoint = folder / f"{kind}-{parts}"
    if parts == "whole":
        settings = ModelSettings(checkpoint, hf_folder=folder / kind, lora_alpha=16)
    else:
        settings = ModelSettings(folder / kind, lora_load=checkpoint)
    assert largest_difference(dict(open_model(settings).named_tensors()), saved) < 1e-6
