"""Models that see images: their config.json, the table of their weights, and conversion of both parts."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
import torch
import transformers
from published import MODELS
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_rl.adaptors.vllm_stacked_experts import join_experts
from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.cli.convert import main as convert
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models import architecture_for
from mindspeed_rl.models.costs import TowerCosts
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.model_keys import infer_model_config
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.planner.shapes import count_stage_elements, count_trained_adapters

#: as published: the sizes of the language model are at the top
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "image_token_id": 151655,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "video_token_id": 151656,
    "vision_config": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
    },
    "vocab_size": 152064,
}


def read(config: dict[str, Any]) -> ModelConfig:
    return architecture_for(config).read_model_config(config)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny_vision.save(name, tmp_path_factory.mktemp(name)) for name in tiny_vision.CONFIGS}


@pytest.mark.parametrize("name", tiny_vision.CONFIGS)
def test_the_table_names_every_tensor_of_both_parts_with_its_shape(name: str, folders: dict[str, Path]) -> None:
    folder = HfFolder(folders[name])
    architecture = architecture_for(folder.config)
    ops = architecture.weight_ops(architecture.read_model_config(folder.config))
    shapes = {hf: shape for op in ops if not op.copy_of_tied for hf, shape in zip(op.hf, op.shapes)}
    # fused experts are found one by one
    stored = {hf: folder.shape(hf) for hf in folder.records if hf not in folder.renamed}
    assert shapes == stored
    assert pickle.loads(pickle.dumps(architecture)) == architecture


def test_sizes_at_the_top_of_a_published_config_mean_what_the_parts_of_a_saved_one_do() -> None:
    text = {key: PUBLISHED[key] for key in PUBLISHED.keys() - {"architectures", "model_type", "vision_config", "rope_scaling"}}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    ids = {key: text.pop(key) for key in ("image_token_id", "video_token_id", "tie_word_embeddings")}
    names = {key: PUBLISHED[key] for key in ("architectures", "model_type", "vision_config")}
    published = read(PUBLISHED)
    assert read({**names, **ids, "text_config": text}) == published
    vision = published.vision
    assert vision is not None
    assert (vision.rotary_sections, vision.patch_dim, vision.count_tokens((1, 36, 52))) == ((16, 24, 24), 1176, 468)
    assert published.rotary_base == 1e6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 20]}}, "expected three sizes that add up to 64"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'; models with images are read with default"),
        ({"vision_config": {**PUBLISHED["vision_config"], "out_hidden_size": 2048}}, "out_hidden_size 2048"),
        ({"vision_config": [1]}, "vision_config .* expected a JSON object"),
        ({"vision_config": {**PUBLISHED["vision_config"], "depth": 0}}, "depth 0; expected a whole number from 1"),
        ({"image_token_id": "a"}, 'image_token_id "a"; expected a whole number'),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read({**PUBLISHED, **change})


def test_a_stage_without_the_layers_that_add_features_is_refused(folders: dict[str, Path]) -> None:
    config = MegatronConfig(pipeline_model_parallel_size=4)
    with pytest.raises(ValueError, match=r"pipeline_model_parallel_size: 4 leaves decoder layer 1 .* use fewer stages"):
        plan_model(config, folders["qwen3"])
    plan_model(MegatronConfig(pipeline_model_parallel_size=2), folders["qwen3"])


def test_adapters_of_all_parts_are_counted_as_they_are_built(folders: dict[str, Path]) -> None:
    rank, model = 8, tiny_vision.build("qwen3").model
    linear = [module for module in model.visual.modules() if isinstance(module, torch.nn.Linear)]
    expected = sum(rank * (module.in_features + module.out_features) for module in linear)
    text = model.language_model.layers
    # query, key and value are one layer here, with one A
    expected += sum(
        rank * (64 + sum(getattr(layer.self_attn, f"{name}_proj").out_features for name in "qkv")) for layer in text
    )
    config = MegatronConfig(lora_target_modules=["linear_qkv"], lora_r=rank, freeze_vit=False, freeze_aligner=False)
    assert count_trained_adapters(plan_model(config, folders["qwen3"]), config) == expected


def test_a_model_of_text_has_no_tower_to_train(tmp_path: Path) -> None:
    text = {key: PUBLISHED[key] for key in PUBLISHED.keys() - {"vision_config", "rope_scaling"}}
    (tmp_path / "config.json").write_text(json.dumps(text | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}))
    with pytest.raises(ValueError, match="freeze_vit: false: the model has no vision tower"):
        plan_model(MegatronConfig(freeze_vit=False), tmp_path)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen2.5", "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2"),
        ("qwen2.5", "--ckpt-format torch_dist"),
        ("qwen3", "--target-tensor-parallel-size 2 --target-pipeline-parallel-size 2"),
        ("qwen3", "--ckpt-format torch_dist"),
        ("qwen3.5", "--target-tensor-parallel-size 2"),
    ],
)
def test_both_parts_come_back_bit_by_bit(name: str, layout: str, folders: dict[str, Path], tmp_path: Path) -> None:
    assert convert(["--load-dir", str(folders[name]), "--save-dir", str(tmp_path / "mg"), *layout.split()]) == 0
    back = ["--load-model-type", "mg", "--save-model-type", "hf"]
    assert convert([*back, "--load-dir", str(tmp_path / "mg"), "--save-dir", str(tmp_path / "hf")]) == 0
    expected = load_file(folders[name] / "model.safetensors")
    result = load_file(tmp_path / "hf" / "model.safetensors")
    assert result.keys() == expected.keys()
    assert [key for key, tensor in expected.items() if not torch.equal(result[key], tensor)] == []


def test_fused_experts_are_read_in_the_published_form_too(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(folders["qwen3_moe"] / "model.safetensors")
    published = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor for name, tensor in tensors.items()
    }
    (tmp_path / "config.json").write_text((folders["qwen3_moe"] / "config.json").read_text())
    save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    hf_folder, other = HfFolder(folders["qwen3_moe"]), HfFolder(tmp_path)
    assert hf_folder.records.keys() == other.records.keys()
    for name in hf_folder.records.keys() - hf_folder.renamed:
        assert torch.equal(hf_folder.read(name), other.read(name)), name
        assert torch.equal(hf_folder.read(name, 0, 1, 3), other.read(name, 0, 1, 3)), name


def test_experts_are_written_in_the_published_form_which_transformers_reads(folders: dict[str, Path], tmp_path: Path) -> None:
    layout = "--target-tensor-parallel-size 2 --target-expert-parallel-size 2"
    assert convert(["--load-dir", str(folders["qwen3_moe"]), "--save-dir", str(tmp_path / "mg"), *layout.split()]) == 0
    back = ["--load-model-type", "mg", "--save-model-type", "hf"]
    assert convert([*back, "--load-dir", str(tmp_path / "mg"), "--save-dir", str(tmp_path / "hf")]) == 0
    original, result = (load_file(folder / "model.safetensors") for folder in (folders["qwen3_moe"], tmp_path / "hf"))
    assert result.keys() == original.keys()
    for name, tensor in original.items():
        # transformers saves [experts, outputs, inputs] and reads both; the published form is the other one
        expected = tensor.transpose(1, 2) if ".mlp.experts." in name else tensor
        assert torch.equal(result[name], expected), name
    read = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    expected = dict(tiny_vision.build("qwen3_moe").named_parameters())
    assert [name for name, tensor in read.named_parameters() if not torch.equal(tensor, expected[name])] == []


def test_saving_a_trained_model_writes_the_same_stacks() -> None:
    gate, up, down = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(2, 4, 3)
    prefix = "model.language_model.layers.0.mlp.experts"
    named = [
        (f"{prefix}.{expert}.{part}_proj.weight", tensors[expert])
        for expert in range(2)
        for part, tensors in (("gate", gate), ("up", up), ("down", down))
    ]
    results = dict(join_experts(named, 2, alternate=False))
    assert torch.equal(results[f"{prefix}.gate_up_proj"], torch.cat([gate, up], dim=1).transpose(1, 2))
    assert torch.equal(results[f"{prefix}.down_proj"], down.transpose(1, 2))


def test_the_plan_counts_a_tower_on_the_first_stage_and_its_gradients_where_it_trains(folders: dict[str, Path]) -> None:
    parts = {"visual": 0, "merger": 0}
    for key, value in tiny_vision.build("qwen3").named_parameters():
        if "visual" in key:
            parts["merger" if "merger" in key else "visual"] += value.numel()

    def count(**keys: bool) -> tuple[int, int, int]:
        """Elements of the first stage that are frozen, and that train; those that are frozen on the second."""
        config = MegatronConfig(pipeline_model_parallel_size=2, **keys)
        first, second = count_stage_elements(plan_model(config, folders["qwen3"]), config)
        return first.frozen, first.dense, second.frozen

    frozen, text, elsewhere = count()
    assert (frozen, elsewhere) == (sum(parts.values()), 0)
    assert count(freeze_vit=False) == (parts["merger"], text + parts["visual"], 0)
    assert count(freeze_vit=False, freeze_aligner=False) == (0, text + sum(parts.values()), 0)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_operations_of_a_tower_are_those_that_torch_counts(name: str, folders: dict[str, Path]) -> None:
    plan, tower = plan_model(MegatronConfig(), folders[name]), tiny_vision.build(name).model.visual
    costs, image = TowerCosts.count(plan.architecture, plan.model_config), tiny_vision.NoiseImage(1, 12, 8)
    assert costs is not None and plan.model_config.vision is not None
    with FlopCounterMode(display=False) as counter:
        output = tower(image.read(), grid_thw=torch.tensor([image.grid]))
    levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    tokens = plan.model_config.vision.count_tokens(image.grid)
    assert {len(level) for level in levels} == {tokens}
    assert costs.forward(tokens, tokens) == pytest.approx(counter.get_total_flops(), rel=0.01)
    # two images of half the size do half of the work in layers that see the image
    assert costs.forward(tokens, tokens / 2) < costs.forward(tokens, tokens)


def test_a_model_block_of_images_has_the_tower_of_its_family() -> None:
    block = {"num_layers": 28, "hidden_size": 3584, "ffn_hidden_size": 18944, "num_attention_heads": 28, "num_query_groups": 4}
    block |= {"group_query_attention": True, "padded_vocab_size": 152064, "add_qkv_bias": True, "norm_epsilon": 1e-6}
    block |= {"untie_embeddings_and_output_weights": True, "rotary_base": 1000000}
    _, result = infer_model_config(MegatronConfig(model_type="qwen2_5_vl", **block))
    assert result.vision == read(MODELS["Qwen2.5-VL-7B-Instruct"]).vision
    with pytest.raises(ValueError, match="model_type qwen3: the other model keys describe a model of family qwen2"):
        infer_model_config(MegatronConfig(model_type="qwen3", **block))
