from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models

from mindspeed_rl.models import ARCHITECTURES, architecture_for, find_architecture
from mindspeed_rl.models.architecture import ExpertPacking

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
@pytest.mark.parametrize("kind", ["local", "grouped"])
def test_the_table_names_every_tensor_that_transformers_saves_with_its_shape(name: str, kind: str, tmp_path) -> None:
    from mindspeed_rl.checkpoint.hf import HfFolder

    tiny_models.save_hf_model(name, tmp_path)
    folder = HfFolder(tmp_path)
    architecture = architecture_for(folder.config)
    model_config = architecture.read_model_config(folder.config)
    packing = ExpertPacking(kind, 2 if model_config.num_moe_experts else 1)
    shapes = {}
    for op in architecture.weight_ops(model_config, packing):
        if not op.copy_of_tied:
            assert not shapes.keys() & set(op.hf), f"{op.mcore} repeats an HF tensor"
            shapes |= dict(zip(op.hf, op.shapes))
    assert shapes == {name: folder.shape(name) for name in folder.records.keys() - folder.renamed}


@pytest.mark.parametrize("kind", ["local", "grouped"])
def test_parts_of_a_weight_follow_it_or_are_known_to_be_copies(kind: str, tmp_path) -> None:
    import torch

    from mindspeed_rl.checkpoint.hf import HfFolder

    seen = set()
    for name in tiny_models.CONFIGS:
        tiny_models.save_hf_model(name, tmp_path / name)
        config = HfFolder(tmp_path / name).config
        architecture = architecture_for(config)
        model_config = architecture.read_model_config(config)
        packing = ExpertPacking(kind, 2 if model_config.num_moe_experts else 1)
        for op in architecture.weight_ops(model_config, packing):
            packed = torch.zeros(op.packing.shape(op.shapes))
            views = [view for views in op.packing.views(packed) for view in views]
            packed.fill_(1.0)
            assert all(view.eq(0.0 if op.packing.copies else 1.0).all() for view in views), f"{name}: {op.mcore}"
            seen.add(type(op.packing).__name__)
    assert {"Concat", "FuseQkv", "Interleave"} <= seen


def test_halves_that_change_places_are_read_anew_for_each_sync() -> None:
    import torch

    from mindspeed_rl.engine.weights import LocalWeight
    from mindspeed_rl.models.weights import ROWS, SwapHalves, WeightOp
    from mindspeed_rl.resharding.transfer import Sources

    weight = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    op = WeightOp("mtp.layers.0.eh_proj.weight", ("input_proj",), ((1, 4),), SwapHalves(), (ROWS,))
    sources, read = Sources([LocalWeight(op, weight, 1, 0)], {}), torch.empty(1, 4)
    for _ in range(2):
        sources.forget_merged()  # as every sync begins
        sources.read("input_proj", ((0, 1), (0, 4)), read)
        assert read.tolist() == weight.roll(2, 1).tolist()
        weight += 10.0


def test_every_registered_architecture_loads_under_its_name() -> None:
    assert [architecture.name for architecture in map(find_architecture, ARCHITECTURES)] == list(ARCHITECTURES)


def test_importing_the_registry_loads_no_torch() -> None:
    code = "import sys, mindspeed_rl.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_unknown_name_lists_the_known_ones_and_a_suggestion() -> None:
    with pytest.raises(ValueError, match="unknown architecture 'qwen33'; known are llama, .* did you mean 'qwen3'"):
        find_architecture("qwen33")


def test_an_unsupported_config_is_refused_with_the_supported_classes() -> None:
    with pytest.raises(ValueError, match="'BloomForCausalLM'.* is not supported; supported are LlamaForCausalLM"):
        architecture_for({"architectures": ["BloomForCausalLM"], "model_type": "bloom"})


def test_rope_settings_are_read_in_both_forms() -> None:
    common = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    common |= {"intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 131072}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    llama = find_architecture("llama")
    old = llama.read_model_config({**common, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}})
    new = llama.read_model_config({**common, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    assert old == new
    assert (new.rotary_base, new.rope_scaling.type, new.rope_scaling.factor) == (5e5, "llama3", 8.0)
    assert llama.read_model_config({**common, "rope_theta": 5e5}).rope_scaling is None


def test_a_rope_type_that_megatron_cannot_express_is_refused() -> None:
    config = tiny_models.hf_config_of(tiny_models.make_hf_model("llama"))
    with pytest.raises(ValueError, match="rope type 'dynamic'; supported are default, linear, llama3 and yarn"):
        architecture_for(config).read_model_config({**config, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}})


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ValueError, match="config.json has no 'hidden_size'"):
        find_architecture("qwen2").read_model_config({"model_type": "qwen2"})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"attention_bias": True}, "sets attention_bias"),
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu'; this architecture is built with silu"),
        ("deepseek3", {"num_experts_per_tok": 4}, "must be 2"),
        ("deepseek32", {"q_lora_rank": None}, "no q_lora_rank; the indexer"),
        ("deepseek32", {"indexer_rope_interleave": True}, "indexer_rope_interleave true; transformers"),
        ("deepseek32", {"index_head_dim": 4}, "index_head_dim 4, of which qk_rope_head_dim 8 rotate"),
        ("deepseek32", {"layer_types": ["full_attention"] * 4}, "layer_types 'full_attention'; expected indexed_attention"),
        ("deepseek32", {"mlp_layer_types": ["dense", "linear"] * 2}, "expected dense or sparse for each of the 4 layers"),
        ("glm5", {"indexer_rope_interleave": False}, "indexer_rope_interleave false; transformers computes .* with true"),
        ("glm5", {"indexer_types": ["full", "shared"]}, "indexer_types .* for each of the 4 layers"),
        ("glm5", {"indexer_types": ["full", "half"] * 2}, "expected one of full, shared, F, S"),
        ("glm5", {"indexer_types": ["shared", "full"] * 2}, "no indexer in the first layer"),
        ("glm4-moe", {"norm_topk_prob": False}, "norm_topk_prob false; Megatron normalizes"),
        ("seed-oss", {"attention_out_bias": True}, "sets attention_out_bias"),
        ("ernie4.5", {"use_bias": True}, "sets use_bias"),
        ("ernie4.5-moe", {"moe_norm_min": 0.5}, "moe_norm_min 0.5; weights of experts"),
        ("hunyuan", {"attention_bias": True}, "sets attention_bias"),
        ("hunyuan-moe", {"moe_topk": [2, 1, 2, 2]}, r"moe_topk \[2, 1, 2, 2\]; Hunyuan is supported with one value"),
        ("hunyuan-moe", {"use_cla": True}, "use_cla True; Hunyuan is supported without it"),
        ("hy3", {"route_norm": False}, "route_norm False; Hy3 is supported with True"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("internlm3", {"bias": True}, "sets bias"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "'yarn' for sliding_attention"),
        ("deepseek2-lite", {"topk_method": "group_limited_greedy"}, "supported with 'greedy'"),
    ],
)
def test_settings_that_would_compute_something_else_are_refused(name: str, change: dict, message: str) -> None:
    config = {**tiny_models.hf_config_of(tiny_models.make_hf_model(name)), **change}
    with pytest.raises(ValueError, match=message):
        architecture_for(config).read_model_config(config)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_travels_to_other_processes_by_its_name(name: str) -> None:
    architecture = find_architecture(name)
    assert pickle.loads(pickle.dumps(architecture)) is architecture


def test_a_published_kimi_k2_is_a_deepseek_v3_without_groups_of_experts() -> None:
    config = {
        **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 7168, "vocab_size": 163840},
        **{"num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 18432},
        **{"n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
        **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "kv_lora_rank": 512},
        **{"q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "norm_topk_prob": True},
        **{"max_position_embeddings": 131072, "rope_theta": 50000.0, "rms_norm_eps": 1e-6, "scoring_func": "sigmoid"},
        "rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "mscale": 1.0},
    }
    for without in ((), ("architectures",)):
        published = {key: value for key, value in config.items() if key not in without}
        architecture = architecture_for(published)
        model_config = architecture.read_model_config(published)
        assert architecture.name == "deepseek_v3" and len(model_config.moe_layers) == 60
        assert (model_config.num_moe_experts, model_config.moe_router_num_groups) == (384, None)
        assert (model_config.rope_scaling.type, model_config.rope_scaling.factor) == ("yarn", 32.0)


def test_indexers_of_a_published_glm_5_are_read_in_every_form() -> None:
    config = {
        **{"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_size": 6144, "vocab_size": 154880},
        **{"num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 12288},
        **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
        **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "kv_lora_rank": 512},
        **{"q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "norm_topk_prob": True},
        **{"index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "indexer_rope_interleave": True},
        **{"rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "head_dim": 192},
    }
    read = architecture_for(config).read_model_config
    first = read(config)
    assert (first.architecture, len(first.moe_layers), first.sparse_attention.shared_layers) == ("glm5", 75, ())
    assert (first.kv_channels, first.norm_epsilon, first.sparse_attention.interleaved) == (256, 1e-5, True)
    # 5.2: the first three layers and then every fourth have an indexer
    full = [0, 1, *range(2, 78, 4)]
    kinds = ["full" if layer in full else "shared" for layer in range(78)]
    for form in (
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"indexer_types": kinds, "index_topk_freq": 2},
        {"index_topk_pattern": "".join(kind[0].upper() for kind in kinds)},
    ):
        shared = read(config | form).sparse_attention.shared_layers
        assert len(shared) == 57 and [layer for layer in range(78) if layer not in shared] == full


def test_rotary_settings_of_gemma_3_and_olmo_3_are_read_in_both_forms() -> None:
    for name, base, local, scaling in (("gemma3", 1e6, 1e4, "linear"), ("olmo3", 5e5, 5e5, "yarn")):
        config = tiny_models.hf_config_of(tiny_models.make_hf_model(name))
        new = architecture_for(config).read_model_config(config)
        assert (new.rotary_base, new.local_rotary_base, new.rope_scaling.type) == (base, local, scaling)
        rope = config.pop("rope_parameters")
        config |= {"rope_theta": base, "rope_local_base_freq": local, "rope_scaling": rope["full_attention"]}
        assert architecture_for(config).read_model_config(config) == new


def test_the_dimensions_of_minimax_that_rotate_are_read_from_its_published_key() -> None:
    config = tiny_models.hf_config_of(tiny_models.make_hf_model("minimax-m2"))
    config["rope_parameters"] = None
    read = architecture_for(config).read_model_config
    assert read({**config, "rotary_dim": 8}).rotary_percent == 0.5 and read(config).rotary_percent == 1.0


@pytest.mark.parametrize(
    ("name", "strange", "family"),
    [
        ("llama", {"residual_multiplier": 0.22}, "llama"),
        ("qwen3-moe", {"expert_bias_speed": 0.5}, "qwen3_moe"),
        ("deepseek3", {"router_noise": 0.5}, "deepseek_v3"),
        ("deepseek32", {"short_memory": [1, 2]}, "deepseek_v32"),
        ("gemma2", {}, "gemma2"),
        ("qwen3-next", {"short_memory": [1, 2]}, "qwen3_next"),
    ],
)
def test_an_unknown_family_is_told_the_nearest_one_and_what_differs(name: str, strange: dict, family: str) -> None:
    config = tiny_models.hf_config_of(tiny_models.make_hf_model(name))
    config |= {"architectures": ["NewForCausalLM"], "model_type": "new", "hidden_dropout": 0.3, **strange}
    with pytest.raises(ValueError, match=rf"'NewForCausalLM'.*the nearest family is {family} \(.*adding_a_model") as error:
        architecture_for(config)
    assert all(f"{key} {json.dumps(value)}" in str(error.value) for key, value in strange.items())
    assert "hidden_dropout" not in str(error.value) and "\n" not in str(error.value)


def test_the_documented_example_names_every_tensor_that_transformers_saves(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    from mindspeed_rl.checkpoint.hf import HfFolder

    pages = [DOCS / "adding_a_model.md", DOCS / "zh" / "adding_a_model.md"]
    code, translated = (re.search(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[1] for page in pages)
    assert code == translated
    (tmp_path / "dots1.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ARCHITECTURES, "dots1", "dots1:DOTS1")
    sizes = {"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = tiny_models._config("Dots1", **sizes, first_k_dense_replace=1, norm_topk_prob=True, head_dim=16)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    folder = HfFolder(tmp_path / "hf")
    architecture = architecture_for(folder.config)
    ops = architecture.weight_ops(architecture.read_model_config(folder.config))
    assert architecture.name == "dots1"
    assert {name: shape for op in ops for name, shape in zip(op.hf, op.shapes)} == {
        name: folder.shape(name) for name in folder.stored_names
    }


def test_a_loss_of_logits_that_a_router_does_not_have_is_refused() -> None:
    from mindspeed_rl.config import MegatronConfig
    from mindspeed_rl.models.plan import lay_out_model

    config = tiny_models.hf_config_of(tiny_models.make_hf_model("ernie4.5-moe"))
    architecture = architecture_for(config)
    model_config = architecture.read_model_config(config)
    assert lay_out_model(MegatronConfig(), architecture, model_config, config).balancing.coeff == 0.001
    with pytest.raises(ValueError, match="moe_z_loss_coeff: 0.01 cannot be used with ernie4_5_moe"):
        lay_out_model(MegatronConfig(moe_z_loss_coeff=0.01), architecture, model_config, config)
