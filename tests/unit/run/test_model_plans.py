"""The models of a run, planned before anything is started: for every run file with every published model that it fits."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
from published import ALL, FITTING, MODELS, SHIPPED, name_of

from mindspeed_rl.config import ConfigError, RunConfig, load_run_config
from mindspeed_rl.engine.build import plan_transformer_config
from mindspeed_rl.models.costs import measure_head_share
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.run.draft import draft, load_run
from mindspeed_rl.run.formula import formula
from mindspeed_rl.run.models import list_source_checks, plan_models, with_model_configs
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.run.rules.validation import unavailable

sys.path.append(str(Path(__file__).parents[1] / "models"))

import tiny_models

BY_NAME = {path.stem: path for path in SHIPPED}


def load(path: Path, overrides: list[str] | None = None) -> RunConfig | None:
    """The run file; None for one that is refused for what is not there."""
    try:
        cfg = load_run_config(path.stem, path.parent, overrides or [])
    except ConfigError:
        return None
    return None if unavailable(draft(cfg)) else cfg


def with_model(cfg: RunConfig, folder: Path, model: dict) -> RunConfig:
    """The run with all roles on a model whose config.json is in `folder`."""
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "model.safetensors").touch()
    keys = {"load": str(folder), "tokenizer_name_or_path": str(folder), "pretrained_checkpoint": None, "ref_model": ""}
    roles = {
        name: dataclasses.replace(role, **keys, train_iters=role.train_iters or 1)
        for name in ("actor_config", "ref_config", "critic_config", "reward_config")
        if (role := getattr(cfg, name)) is not None
    }
    return dataclasses.replace(cfg, **roles)


PAIRS = [
    (path, model)
    for path in ALL
    if (cfg := load(path)) is not None
    for model in FITTING.get(str(cfg.actor_config.model), ["no such model"])
]


@pytest.mark.parametrize(("path", "model"), PAIRS, ids=[f"{name_of(path)}-{model}" for path, model in PAIRS])
def test_every_role_can_be_planned(path: Path, model: str, tmp_path: Path) -> None:
    cfg = load(path)
    assert cfg is not None
    cfg = with_model_configs(with_model(cfg, tmp_path, MODELS[model]))
    run = resolve(cfg, platform="npu")
    models = plan_models(run).models
    assert "actor" in models
    for planned in models.values():
        plan = planned.plan
        said = MODELS[model] | MODELS[model].get("text_config", {})  # the sizes of a model of images may be there
        assert (
            plan.model_config.num_layers == said["num_hidden_layers"] and plan.model_config.norm_epsilon == said["rms_norm_eps"]
        )
        assert plan.model_config.rotary_base == said.get("rope_theta", said.get("rope_parameters", {}).get("rope_theta"))
        config = plan_transformer_config(planned.config, plan)
        assert config.num_moe_experts == said.get("num_experts", said.get("n_routed_experts"))
        assert config.layernorm_epsilon == said["rms_norm_eps"] and config.hidden_dropout == config.attention_dropout == 0.0


def test_every_shipped_block_with_a_published_model_is_covered() -> None:
    assert {load(path).actor_config.model for path in SHIPPED if load(path) is not None} <= set(FITTING)
    assert {model for models in FITTING.values() for model in models} <= set(MODELS)


@pytest.mark.parametrize(
    ("model", "dtype", "said"),
    [
        ("qwen3.5", "float32", "generate_config.dtype: float32 is not available for gated delta nets on cpu"),
        ("qwen3.5", "bfloat16", ""),
    ],
)
def test_a_policy_that_the_engine_does_not_compute_is_refused_before_a_worker_starts(
    tmp_path: Path, model: str, dtype: str, said: str
) -> None:
    keys = ["model.tiny_qwen25.num_layers=null", f"generate_config.dtype={dtype}", "rl_config.log_probs_diff_limit=null"]
    keys += [f"megatron_training.bf16={str(dtype == 'bfloat16').lower()}"]
    cfg = load_run_config("grpo_tiny_cpu", None, keys)
    config = tiny_models.hf_config_of(tiny_models.make_hf_model(model))
    run = resolve(with_model_configs(with_model(cfg, tmp_path, config)), platform="cpu")
    if said:
        with pytest.raises(ValueError, match=re.escape(said)):
            plan_models(run)
    else:
        assert plan_models(run).models["actor"].plan.model_config.linear_attention is not None


@pytest.mark.parametrize(
    ("model", "platform", "quantization", "said"),
    [
        ("gpt-oss", "cpu", "int8", "gpt_oss, which has experts: no run has proven its layout; among such"),
        ("qwen3-moe", "cpu", "int8", ""),
        ("qwen3-moe", "npu", "int8", ""),
        ("qwen3-moe", "npu", "mxfp8", "experts on npu whose rows are no multiples of 64 elements (moe_inter"),
        ("mixtral", "npu", "int8", ""),
        ("minimax-m2", "npu", "int8", ""),
        ("hunyuan-moe", "npu", "w4a8", "hunyuan_moe, which has experts: no run has proven its layout; among such"),
        ("hunyuan-moe", "npu", "mxfp8", "hunyuan_moe, which has experts: no run has proven its layout; among such"),
        ("deepseek3", "npu", "mxfp8", "experts on npu whose rows are no multiples of 64 elements (moe_inter"),
    ],
)
def test_a_policy_that_no_test_has_quantized_is_refused_by_name(
    tmp_path: Path, model: str, platform: str, quantization: str, said: str
) -> None:
    keys = ["model.tiny_qwen25.num_layers=null", f"generate_config.quantization={quantization}"]
    keys.append("actor_config.expert_tensor_parallel_size=1")
    config = tiny_models.hf_config_of(tiny_models.make_hf_model(model))
    cfg = with_model(load_run_config("grpo_tiny_cpu", None, keys), tmp_path, config)
    run = resolve(with_model_configs(cfg), platform=platform)
    if said:
        refused = f"generate_config.quantization ({quantization}) is not available for {said}"
        with pytest.raises(ValueError, match=re.escape(refused)):
            plan_models(run)
    else:
        assert plan_models(run).models["actor"].plan.model_config.moe_layers


@pytest.mark.parametrize(
    ("changes", "keys", "said"),
    [
        ({}, [], ""),
        ({"moe_intermediate_size": 48}, [], "down_proj.weight has 48, on 1 tensor-parallel ranks of the trainer; use int8"),
        ({}, ["actor_config.expert_tensor_parallel_size=2"], "32, on 2 tensor-parallel ranks of the trainer; use fewer ranks"),
        ({}, ["generate_config.infer_tensor_parallel_size=2"], "32, on 2 tensor-parallel ranks of the rollout engine; use"),
    ],
)
@pytest.mark.parametrize("quantization", ["mxfp8", "w4a8"])
def test_rows_that_are_not_whole_blocks_on_a_rank_are_refused(
    tmp_path: Path, quantization: str, changes: dict[str, object], keys: list[str], said: str
) -> None:
    words = ["model.tiny_qwen25.num_layers=null", f"generate_config.quantization={quantization}"]
    words += ["actor_config.expert_tensor_parallel_size=1", "rl_config.actor_resource.num_npus=2", *keys]
    config = tiny_models.hf_config_of(tiny_models.make_hf_model("qwen3-moe")) | changes
    cfg = with_model(load_run_config("grpo_tiny_cpu", None, words), tmp_path, config)
    run = resolve(with_model_configs(cfg), platform="cpu")
    if said:
        refused = f"generate_config.quantization ({quantization}) is not available"
        needs = f"{refused} without a multiple of 32 elements of a row on each rank"
        with pytest.raises(ValueError, match=f"{re.escape(needs)}.*{re.escape(said)}"):
            plan_models(run)
    else:
        assert plan_models(run).models["actor"].plan.model_config.moe_layers


@pytest.mark.parametrize(
    ("sizes", "ranks", "said"),
    [
        ((256, 512), 1, ""),
        ((64, 512), 1, "experts.0.gate_proj.weight has 64, on 1 tensor-parallel ranks of the trainer"),
        ((256, 256), 2, "down_proj.weight has 256, on 2 tensor-parallel ranks of the trainer"),
    ],
)
def test_rows_of_int4_experts_that_are_not_whole_groups_on_a_rank_are_refused_on_npus(
    tmp_path: Path, sizes: tuple[int, int], ranks: int, said: str
) -> None:
    words = ["model.tiny_qwen25.num_layers=null", "generate_config.quantization=w4a8", "rl_config.actor_resource.num_npus=2"]
    words.append(f"actor_config.expert_tensor_parallel_size={ranks}")
    config = tiny_models.hf_config_of(tiny_models.make_hf_model("qwen3-moe"))
    config |= dict(zip(("hidden_size", "moe_intermediate_size"), sizes))
    cfg = with_model(load_run_config("grpo_tiny_cpu", None, words), tmp_path, config)
    run = resolve(with_model_configs(cfg), platform="npu")
    if not said:
        assert plan_models(run).models["actor"].plan.model_config.moe_layers
        return
    needs = "generate_config.quantization (w4a8) is not available without a multiple of 256 elements of a row on each rank"
    with pytest.raises(ValueError, match=f"{re.escape(needs)}.*{re.escape(said)}"):
        plan_models(run)


@pytest.mark.parametrize(("width", "ranks", "said"), [(128, 2, ""), (64, 1, ""), (64, 2, "64, on 2"), (192, 2, "192, on 2")])
def test_scales_of_two_blocks_of_an_expert_in_mxfp8_are_on_one_rank_of_an_engine_on_npus(
    tmp_path: Path, width: int, ranks: int, said: str
) -> None:
    words = ["model.tiny_qwen25.num_layers=null", "generate_config.quantization=mxfp8", "rl_config.actor_resource.num_npus=2"]
    words += ["actor_config.expert_tensor_parallel_size=1", f"generate_config.infer_tensor_parallel_size={ranks}"]
    config = tiny_models.hf_config_of(tiny_models.make_hf_model("qwen3-moe"))
    config |= {"hidden_size": 64, "moe_intermediate_size": width}
    cfg = with_model(load_run_config("grpo_tiny_cpu", None, words), tmp_path, config)
    run = resolve(with_model_configs(cfg), platform="npu")
    if not said:
        assert plan_models(run).models["actor"].plan.model_config.moe_layers
        return
    refused = rf"without a multiple of 64 elements .*down_proj.weight has {said} .* of the rollout engine; use fewer ranks"
    with pytest.raises(ValueError, match=refused):
        plan_models(run)


def test_a_model_without_experts_has_no_int4_on_npus(tmp_path: Path) -> None:
    words = ["model.tiny_qwen25.num_layers=null", "generate_config.quantization=w4a8"]
    config = tiny_models.hf_config_of(tiny_models.make_hf_model("qwen2")) | {"intermediate_size": 128}
    cfg = with_model_configs(with_model(load_run_config("grpo_tiny_cpu", None, words), tmp_path, config))
    assert plan_models(resolve(cfg, platform="cpu"))
    with pytest.raises(ValueError, match=r"quantization \(w4a8\) is not available on npu for a model without experts"):
        plan_models(resolve(cfg, platform="npu"))


def test_a_written_key_that_contradicts_the_model_is_an_error(tmp_path: Path) -> None:
    wrong = load(BY_NAME["grpo_qwen25_7b_A3"], ["actor_config.rotary_base=10000", "megatron_training.num_layers=27"])
    assert wrong is not None
    with pytest.raises(ConfigError) as caught:
        with_model_configs(with_model(wrong, tmp_path, MODELS["Qwen2.5-7B"]))
    sentence = caught.value.errors[0]
    for words in ("actor_config: model", "num_layers: 27 (there 28)", "rotary_base: 10000 (there 1000000"):
        assert words in sentence
    assert "norm_epsilon" not in sentence  # only the block says it


def test_a_block_gives_way_to_the_model_where_nothing_is_written(tmp_path: Path) -> None:
    cfg = load(BY_NAME["grpo_qwen25_7b_A3"])
    assert cfg is not None
    actor = with_model_configs(with_model(cfg, tmp_path, MODELS["Qwen3-8B"])).actor_config
    shape = (actor.num_layers, actor.hidden_size, actor.ffn_hidden_size, actor.num_attention_heads, actor.num_query_groups)
    assert shape == (36, 4096, 12288, 32, 8)
    assert (actor.qk_layernorm, actor.add_qkv_bias, actor.kv_channels, actor.padded_vocab_size) == (True, False, 128, 152064)


def test_a_role_whose_weights_are_not_there_keeps_its_block(tmp_path: Path) -> None:
    cfg = load(BY_NAME["grpo_qwen25_7b_A3"])
    assert cfg is not None
    cfg = dataclasses.replace(cfg, actor_config=dataclasses.replace(cfg.actor_config, load=str(tmp_path / "none")))
    assert with_model_configs(cfg).actor_config.num_layers == 28


def test_the_driver_names_the_role_whose_model_is_not_supported(tmp_path: Path) -> None:
    cfg = load(BY_NAME["grpo_qwen25_7b_A3"])
    assert cfg is not None
    quantized = {**MODELS["Qwen2.5-7B"], "quantization_config": {"quant_method": "awq", "bits": 4}}
    with pytest.raises(ConfigError, match=r"actor_config: .*config.json has a quantization_config with quant_method 'awq'"):
        with_model_configs(with_model(cfg, tmp_path, quantized))


def derived(cfg: RunConfig, folder: Path, model: dict, platform: str = "npu") -> dict[str, tuple[object, str]]:
    """Values and sources that the models of a run give to keys of its losses."""
    run = plan_models(resolve(with_model_configs(with_model(cfg, folder, model)), platform=platform))
    return {name.removeprefix("actor_config."): (item.value, item.source) for name, item in run.config.derived.items()}


@pytest.mark.parametrize(("keys", "term"), [([], "+ 0.25 * B"), (["+actor_config.moe_aux_loss_coeff=0.5"], "+ 0.5 * B")])
def test_the_balancing_loss_of_experts_in_config_json_is_in_the_objective(tmp_path: Path, keys: list[str], term: str) -> None:
    cfg = load(BY_NAME["dapo_qwen3_30b_a3b_A3"], keys)
    assert cfg is not None
    model = MODELS["Qwen3-30B-A3B"] | {"router_aux_loss_coef": 0.25}
    text = formula(plan_models(resolve(with_model_configs(with_model(cfg, tmp_path, model)), platform="npu")))
    assert term in text and "of 128 sum_e f_e P_e" in text


def test_the_weight_of_the_balancing_loss_is_that_of_config_json_unless_a_key_is_written(tmp_path: Path) -> None:
    model, name = MODELS["Qwen3-30B-A3B"] | {"router_aux_loss_coef": 0.25}, "dapo_qwen3_30b_a3b_A3"
    cfg = load(BY_NAME[name])
    assert cfg is not None
    assert derived(cfg, tmp_path, model)["moe_aux_loss_coeff"] == (0.25, "the model's config.json")
    written = load(BY_NAME[name], ["+actor_config.moe_aux_loss_coeff=0.5"])
    assert written is not None
    assert "moe_aux_loss_coeff" not in derived(written, tmp_path, model)
    none = load(BY_NAME[name], ["+actor_config.moe_router_load_balancing_type=none"])
    assert none is not None
    assert derived(none, tmp_path, model)["moe_aux_loss_coeff"] == (0.0, "moe_router_load_balancing_type is none")


def test_the_balancing_loss_of_config_json_does_not_depend_on_the_engine(tmp_path: Path) -> None:
    layout = "tensor_model_parallel_size=1 pipeline_model_parallel_size=1 expert_model_parallel_size=1 moe_tp_extend_ep=false"
    keys = ["++actor_config.engine=fsdp", *(f"++actor_config.{key}" for key in layout.split())]
    model, name = MODELS["Qwen3-30B-A3B"] | {"router_aux_loss_coef": 0.25}, "dapo_qwen3_30b_a3b_A3"
    keys.append("++rl_config.use_prefix_grouper=false")
    cfg = load(BY_NAME[name], keys)
    assert cfg is not None
    assert derived(cfg, tmp_path, model)["moe_aux_loss_coeff"] == (0.25, "the model's config.json")
    without = load(BY_NAME[name], [*keys, "+actor_config.moe_aux_loss_coeff=0"])
    assert without is not None
    assert "moe_aux_loss_coeff" not in derived(without, tmp_path, model)


def test_a_float32_head_is_the_default_where_it_is_measured_and_a_small_part_of_an_update(tmp_path: Path) -> None:
    cfg = load(BY_NAME["grpo_qwen25_7b_A3"])
    assert cfg is not None
    value, source = derived(cfg, tmp_path, MODELS["Qwen2.5-7B"])["fp32_lm_head"]
    assert not value and "not measured on npu" in source
    model = MODELS["Qwen2.5-7B"]
    hidden, vocab, inner = model["hidden_size"], model["vocab_size"], model["intermediate_size"]
    kv = hidden // model["num_attention_heads"] * model["num_key_value_heads"]
    layers = model["num_hidden_layers"] * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)
    for cost in (1.0, 3.9):
        head = (2 * cost + 2) * hidden * vocab
        plan = plan_model(cfg.actor_config, tmp_path)
        share = measure_head_share(plan.architecture, plan.model_config, cost)
        assert share == pytest.approx(head / (head + 3 * layers), rel=1e-3)


def test_missing_files_of_an_included_run_file_are_told_with_the_command_that_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = {"sft_tiny": "quickstart", "grpo_tiny": "quickstart", "dpo_tiny": "quickstart", "grpo_tiny_agent": "agent"}
    examples |= {"grpo_tiny_swe": "swe_tiny", "grpo_tiny_vision": "vision", "distill_tiny": "distill"}
    for name, command in examples.items():
        run = load_run(f"{name}_cpu")
        with pytest.raises(ValueError, match=f"is made by `bash examples/{command}.sh`"):
            next(iter(list_source_checks(run)))()
    (tmp_path / "runs/quickstart/sft").mkdir(parents=True)
    (tmp_path / "runs/quickstart/model").mkdir()
    check = next(iter(list_source_checks(load_run("dpo_tiny_cpu"))))
    with pytest.raises(ValueError, match="runs/quickstart/data/pairs is made by `bash examples/supervised_stages.sh`"):
        check()
    (tmp_path / "runs/quickstart/data").mkdir()
    (tmp_path / "runs/quickstart/data/pairs_packed_x_document.idx").touch()
    check()
    # the documents of pretraining have their whole name in the run file
    check = next(iter(list_source_checks(load_run("pretrain_tiny_cpu"))))
    with pytest.raises(ValueError, match="runs/quickstart/data/documents is made by"):
        check()
    (tmp_path / "runs/quickstart/data/documents_text_document.idx").touch()
    check()
