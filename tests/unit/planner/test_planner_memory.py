from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
import yaml
from published import MODELS

from mindspeed_rl.cli import plan as command
from mindspeed_rl.config import GenerateConfig, MegatronConfig
from mindspeed_rl.config.device_limits import SPLIT_BUFFERS
from mindspeed_rl.config.loader import build_run_config, load_run_config
from mindspeed_rl.config.run_files import apply_values, compose, find_project_configs, locate
from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.costs import kv_bytes_per_token, read_draft_bytes
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.model_keys import infer_model_config
from mindspeed_rl.models.plan import lay_out_model
from mindspeed_rl.planner import advice
from mindspeed_rl.planner.advice import find_changes_to_fit
from mindspeed_rl.planner.assumptions import list_memory_assumptions
from mindspeed_rl.planner.devices import DEVICES, GIB, choose_platform, find_device
from mindspeed_rl.planner.engine import _count_quantized_bytes, _count_rollout_elements
from mindspeed_rl.planner.fit import FitRequest, build_grpo_tree
from mindspeed_rl.planner.memory import DeviceGroup, MemoryPlan, Phase, compute_head_bytes, compute_layer_bytes, plan_memory
from mindspeed_rl.planner.run_files import read_block, read_folder
from mindspeed_rl.planner.run_shape import Model
from mindspeed_rl.planner.shapes import count_stage_elements, list_grouped_ops, plan_role
from mindspeed_rl.platform import resolve_name
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import is_valid, validate

#: parameters that the publishers and transformers give; embeddings that are tied count once
PARAMETERS = {
    "deepseekv3_671b": 671_026_404_352,
    "llama32_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "mixtral_8x7b": 46_702_792_704,
    "qwen25_0p5b": 494_032_768,
    "qwen25_1p5b": 1_543_714_304,
    "qwen25_32b": 32_763_876_352,
    "qwen25_7b": 7_615_616_512,
    "qwen25_vl_7b": 8_292_166_656,
    "qwen3_0p6b": 596_049_920,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_32b": 32_762_123_264,
    "qwen3_8b": 8_190_735_360,
    "qwen35_4b": 4_539_265_536,
    "qwen35_9b": 9_409_813_744,
    "qwen35_27b": 27_356_728_560,
    "qwen35_35b_a3b": 35_107_181_936,
    "qwen35_122b_a10b": 122_562_817_776,
    "qwen35_397b_a17b": 396_802_360_816,
    "qwen3_vl_30b_a3b": 31_070_754_032,
    "qwen3_vl_8b": 8_767_123_696,
}
KEYS = {field.name for field in fields(MegatronConfig)}
BLOCKS = {
    path.stem: {name: value for name, value in yaml.safe_load(path.read_text())[path.stem].items() if name in KEYS}
    for path in (find_project_configs() / "model").glob("*.yaml")
}
NPU = sorted(path.stem for path in find_project_configs().glob("*.yaml") if "tiny" not in path.stem)


def planned(name: str, **overrides: object) -> MemoryPlan:
    tree = compose(*locate(name, None), [])
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    run = draft(build_run_config(apply_values(tree, values), config_name=name))
    return plan_memory(run, find_device(run))


def saved_config(folder: Path, **sizes: int) -> transformers.Qwen2Config:
    """A model's config.json in the folder."""
    config = transformers.Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    config.architectures = ["Qwen2ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    return config


def count_parameters(architecture: Architecture, model_config: ModelConfig) -> int:
    """Count the parameters of a model, tied ones once, without padding."""
    ops = list_grouped_ops(architecture, model_config.pad_vocab(1, 1))
    return sum(math.prod(op.shard_shape()) for op in ops if not op.copy_of_tied and not op.buffer)


def owners(plan: MemoryPlan, owner: str) -> int:
    return max(phase.owners.get(owner, 0) for group in plan.groups for phase in group.phases)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_a_model_block_has_as_many_parameters_as_the_published_model(name: str) -> None:
    architecture, model_config = infer_model_config(MegatronConfig(**BLOCKS[name]))
    # the blocks name the rows of the published checkpoints
    assert count_parameters(architecture, model_config) == PARAMETERS[name]


def test_a_run_whose_files_are_here_is_planned_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tree: dict[str, Any] = {
        "platform": "auto",
        "megatron_training": {"stage": "sft", "num_npus": 1, "data_path": "rows.jsonl", "load": "nothing"},
    }

    def find(name: str = "own") -> tuple[str, int]:
        device = find_device(draft(choose_platform(build_run_config(tree, config_name=name))))
        return device.name, device.memory

    assert (find()[0], find("sft_A2")[0]) == ("A3", "A2")  # on a machine that has no file of the run
    (tmp_path / "rows.jsonl").touch()
    assert find("sft_A2")[0] == "A2"
    if resolve_name("auto") != "cpu":
        pytest.skip("this machine has other devices")
    one = find()
    tree["megatron_training"]["num_npus"] = 4
    four = find()
    # Ray ends workers at 95 % of the memory, which a container may limit below the machine's
    assert one[0] == four[0] == "cpu" and one[1] // 4 == four[1] and one[1] <= 0.95 * psutil.virtual_memory().total
    assert DEVICES["cpu"].memory == 8 * GIB


def test_every_shipped_model_block_is_counted() -> None:
    assert set(BLOCKS) == {*PARAMETERS, "tiny_qwen25"}


@pytest.mark.parametrize(
    ("block", "changes"),
    [
        ("tiny_qwen25", {}),
        ("tiny_qwen25", {"untie_embeddings_and_output_weights": True}),
        ("qwen3_0p6b", {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "padded_vocab_size": 128}),
    ],
)
def test_a_block_is_counted_as_the_model_that_transformers_builds(block: str, changes: dict) -> None:
    keys = {**BLOCKS[block], **changes}
    kind = transformers.Qwen3Config if keys.get("qk_layernorm") else transformers.Qwen2Config
    config = kind(
        vocab_size=keys["padded_vocab_size"],
        hidden_size=keys["hidden_size"],
        intermediate_size=keys["ffn_hidden_size"],
        num_hidden_layers=keys["num_layers"],
        num_attention_heads=keys["num_attention_heads"],
        num_key_value_heads=keys["num_query_groups"],
        head_dim=keys.get("kv_channels") or keys["hidden_size"] // keys["num_attention_heads"],
        tie_word_embeddings=not keys.get("untie_embeddings_and_output_weights", False),
    )
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    assert count_parameters(*infer_model_config(MegatronConfig(**keys))) == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize(("tp", "pp", "ep"), [(1, 1, 1), (2, 2, 1), (4, 1, 1)])
def test_the_stages_of_a_dense_model_hold_all_of_it_between_them(tp: int, pp: int, ep: int) -> None:
    # by hand: 64 layers of 5120; qkv 8192 + 2 x 1024 rows, output 5120 x 8192, gated MLP of 25600, two norms, two head norms
    layer_cut = (8192 + 2048) * 5120 + 5120 * 8192 + 3 * 25600 * 5120
    layer_whole = 2 * 5120 + 2 * 128
    vocabulary = 151936 * 5120
    config = MegatronConfig(**BLOCKS["qwen3_32b"], tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    stages = count_stage_elements(lay_out_model(config, *infer_model_config(config), {}), config)
    layers = 64 // pp * (layer_cut // tp + layer_whole)
    expected = [layers] * pp
    expected[0] += vocabulary // tp
    expected[-1] += vocabulary // tp + 5120
    assert [stage.dense for stage in stages] == expected
    assert not any(stage.expert for stage in stages)


def test_experts_are_divided_over_expert_ranks_and_cut_over_expert_tensor_ranks() -> None:
    keys = {**BLOCKS["qwen3_30b_a3b"], "tensor_model_parallel_size": 4, "expert_model_parallel_size": 2}
    experts = 48 * 128 * 3 * 768 * 2048
    config = MegatronConfig(**keys)
    (cut,) = count_stage_elements(lay_out_model(config, *infer_model_config(config), {}), config)
    config = MegatronConfig(**keys, moe_tp_extend_ep=True)
    (whole,) = count_stage_elements(lay_out_model(config, *infer_model_config(config), {}), config)
    assert cut.expert == whole.expert == experts // 8


def test_the_engine_cuts_by_heads_and_spreads_experts() -> None:
    architecture, model_config = infer_model_config(MegatronConfig(**BLOCKS["qwen3_30b_a3b"]))
    layer_cut = 32 * 128 * 2048 + 2048 * 32 * 128  # query and output
    key_value = 2 * 128 * 2048  # of one head; there are four
    experts = 128 * 3 * 768 * 2048
    whole = 2 * 2048 + 2 * 128 + 128 * 2048  # norms, head norms, router
    vocabulary = 2 * 151936 * 2048
    rest = 48 * whole + 2048
    # eight ranks: each has one of four key/value heads, and vocabulary rows come in 64s
    expected = 48 * (layer_cut // 8 + key_value + experts // 8) + rest + vocabulary // 8
    assert _count_rollout_elements(architecture, model_config, 8, 1) == expected
    # replicas of one rank that share experts hold the rest whole
    assert (
        _count_rollout_elements(architecture, model_config, 1, 8)
        == 48 * (layer_cut + 4 * key_value + experts // 8) + rest + vocabulary
    )
    # in int8: matrices of attention and experts, without norms, routers and vocabulary
    in_int8 = 48 * (layer_cut // 8 + key_value + experts // 8)
    assert _count_rollout_elements(architecture, model_config, 8, 1, quantized=True) == in_int8


def test_the_bytes_of_quantized_matrices_are_those_of_elements_and_scales() -> None:
    architecture, model_config = infer_model_config(MegatronConfig(**BLOCKS["qwen3_30b_a3b"]))
    # rows and columns of a layer: query, key, value, output, and of 128 experts gate, up, down
    matrices = [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096)]
    matrices += 128 * [(768, 2048), (768, 2048), (2048, 768)]
    elements = 48 * sum(rows * columns for rows, columns in matrices)
    # attention in int8; of experts half a byte, 8 bytes of each scale of 256, and 4 of a row's sum
    in_int8 = 48 * sum(rows * columns + 2 * rows for rows, columns in matrices[:4])
    in_int4 = 48 * sum(rows * columns // 2 + rows * (columns // 256 * 8 + 4) for rows, columns in matrices[4:])
    for name, expected in (
        ("int8", elements + 2 * 48 * sum(rows for rows, _ in matrices)),  # a scale of bfloat16 per row
        ("mxfp8", elements + elements // 32),  # a byte per 32
        ("w4a8", elements // 2 + 2 * elements // 32),  # half a byte, and a scale of bfloat16 per 32
        ("w4a8_dynamic", in_int8 + in_int4),
    ):
        assert _count_quantized_bytes(architecture, model_config, 1, 1, name, 2) == expected


def test_adapters_are_all_that_trains() -> None:
    keys = {**BLOCKS["tiny_qwen25"], "lora_target_modules": ["linear_qkv", "linear_fc2"], "lora_r": 8}
    config = MegatronConfig(**keys, tensor_model_parallel_size=2)
    (held,) = count_stage_elements(lay_out_model(config, *infer_model_config(config), {}), config)
    # qkv: [8, 128] and [256 / 2, 8]; fc2: [8, 384 / 2] and [128, 8]
    assert held.dense_adapters == 4 * 8 * (128 + 128 + 192 + 128)


def test_bytes_of_gradients_and_optimizer_follow_from_parameters_and_ranks() -> None:
    plan = planned("dapo_qwen3_32b_A3")  # TP8 PP2 on 16 devices: one replica, bf16
    layer = ((8192 + 2048) * 5120 + 5120 * 8192 + 3 * 25600 * 5120) // 8 + 2 * 5120 + 2 * 128
    first = 32 * layer + 151936 * 5120 // 8
    update = plan.groups[0].phases[-2]
    assert update.name == "update"
    assert update.owners["weights"] == 2 * first
    assert update.owners["gradients"] == 4 * first
    assert update.owners["optimizer"] == 12 * first
    half = planned("dapo_qwen3_32b_A3", rl_config__actor_resource__num_npus=32).groups[0].phases[-2]
    assert half.owners["optimizer"] == 6 * first


def test_bytes_of_a_cached_token() -> None:
    _, dense = infer_model_config(MegatronConfig(**BLOCKS["qwen3_235b_a22b"]))
    # 94 layers, 4 heads of 128, keys and values, bf16: 1.47 GB for 32768 tokens on a rank of TP4, as published
    assert kv_bytes_per_token(dense, 2, 4) == 94 * 2 * 128 * 2
    assert round(kv_bytes_per_token(dense, 2, 4) * 32768 / 1e9, 2) == 1.58  # 1.47 GiB
    assert round(kv_bytes_per_token(dense, 2, 4) * 32768 / GIB, 2) == 1.47
    _, latent = infer_model_config(MegatronConfig(**BLOCKS["deepseekv3_671b"]))
    assert kv_bytes_per_token(latent, 2, 4) == 61 * (512 + 64) * 2


#: with every micro-batch full of the longest sequences, which their data does not have
OVER = {"dapo_qwen3_30b_a3b_A3", "grpo_deepseek_r1_671b_A2"}


@pytest.mark.parametrize("name", NPU)
def test_shipped_configurations_for_npus_fit(name: str) -> None:
    assert planned(name).verdict in (("over",) if name in OVER else ("fits", "tight"))


def test_a_published_configuration_that_is_over_fits_with_the_prompts_of_its_data() -> None:
    # prompts of mathematical data end below 500 tokens, where the run file allows 2048
    lengths = {"rl_config__max_prompt_length": 500, "generate_config__max_model_len": 2548}
    assert planned("dapo_qwen3_30b_a3b_A3", **lengths).verdict == "tight"


def test_the_verdict_says_where_the_capacity_lies_in_the_range_of_the_peak() -> None:
    # 40 bytes that are counted and 20 that are modelled: 60, and 55 to 65 within a quarter of the latter
    phase = Phase("update", {"weights": 40, "activations": 20})
    plan = MemoryPlan("A3", 0, (DeviceGroup("all devices", "0", 1, (phase,)),))
    results = {capacity: replace(plan, capacity=capacity).verdict for capacity in (54, 55, 59, 60, 64, 65)}
    assert results == {54: "does not fit", 55: "over", 59: "over", 60: "tight", 64: "tight", 65: "fits"}
    assert replace(plan, capacity=65, problems=("no room",)).verdict == "does not fit"


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        # 32B with its optimizer on 8 devices: 16 bytes a parameter are 61 GiB before anything else
        ("dapo_qwen3_32b_A3", {"actor_config__pipeline_model_parallel_size": 1, "rl_config__actor_resource__num_npus": 8}),
        # everything of the trainer beside an engine that takes six tenths
        (
            "dapo_qwen25_32b_A3",
            {f"generate_config__offload_train_{part}": False for part in ("optimizer", "grad", "param")},
        ),
        # a whole 32B replica on one device
        ("grpo_qwen25_32b_A3", {"generate_config__infer_tensor_parallel_size": 1}),
        # the whole of DeepSeek's optimizer state on the device
        ("grpo_deepseek_r1_671b_A3", {"megatron_training__swap_optimizer": False}),
    ],
)
def test_what_cannot_fit_does_not(name: str, overrides: dict) -> None:
    assert planned(name, **overrides).verdict == "does not fit"


@pytest.mark.parametrize("name", ["dapo_qwen3_32b_A3", "grpo_qwen25_7b_A3", "dapo_qwen3_30b_a3b_A3"])
def test_more_tensor_ranks_never_raise_the_weights_of_a_die(name: str) -> None:
    held = [owners(planned(name, actor_config__tensor_model_parallel_size=tp), "weights") for tp in (1, 2, 4)]
    served = [owners(planned(name, generate_config__infer_tensor_parallel_size=tp), "rollout weights") for tp in (1, 2, 4)]
    assert held == sorted(held, reverse=True)
    assert served == sorted(served, reverse=True)


def test_longer_responses_never_lower_the_cache_they_need_nor_activations() -> None:
    plans = [
        planned(
            "grpo_qwen3_8b_A3",
            generate_config__sampling_config__max_tokens=length,
            generate_config__max_model_len=length + 2048,
        )
        for length in (1024, 4096, 16384)
    ]
    needed = [plan.cache.needed for plan in plans if plan.cache is not None]
    kept = [owners(plan, "activations") for plan in plans]
    assert len(needed) == 3 and needed == sorted(needed) and kept == sorted(kept)


def test_recomputation_and_context_parallelism_lower_activations_and_more_stages_in_front_raise_them() -> None:
    base = planned("dapo_qwen3_32b_A3")
    full = {"actor_config__recompute_granularity": "full", "actor_config__recompute_method": "uniform"}
    again = planned("dapo_qwen3_32b_A3", **full, actor_config__recompute_num_layers=1)
    split = planned("dapo_qwen3_32b_A3", actor_config__context_parallel_size=2, rl_config__actor_resource__num_npus=32)
    assert owners(again, "activations") < owners(base, "activations") / 4
    assert owners(split, "activations") == pytest.approx(owners(base, "activations") / 2, rel=0.01)
    first, last = (group.phases[-2].owners["activations"] for group in base.groups)
    assert first > last  # two micro-batches are under way in front, one behind


@pytest.mark.parametrize(
    ("block", "module", "numbers"),
    [
        ("qwen3_32b", "layernorm", 2 * 5120),
        # 128 heads, on two ranks: queries and keys of 128 + 64, values of 128
        ("deepseekv3_671b", "mla_up_proj", 128 * (2 * 192 + 128) // 2),
    ],
)
def test_what_is_computed_again_stays_in_the_layer_that_the_backward_pass_is_in(block: str, module: str, numbers: int) -> None:
    keys = BLOCKS[block] | {"tensor_model_parallel_size": 2, "recompute_granularity": "selective"}
    plain, again = (
        MegatronConfig(**keys, recompute_modules=names)
        for names in (["core_attn"], ["core_attn", module])
    )
    _, model_config = infer_model_config(plain)
    whole, less = (compute_layer_bytes(config, model_config, 1000, 5) for config in (plain, again))
    assert whole.again == 0 and whole.saved - less.saved == pytest.approx(less.again) == pytest.approx(2 * 1000 * numbers)


def test_advice_makes_a_run_fit_and_is_a_sound_run_file() -> None:
    changed = {"actor_config.pipeline_model_parallel_size": 1, "rl_config.actor_resource.num_npus": 8}
    tree = apply_values(compose(*locate("dapo_qwen3_32b_A3", None), []), changed)
    run = draft(build_run_config(tree))
    device = DEVICES["A3"]
    changes = find_changes_to_fit(tree, run, plan_memory(run, device), device)
    assert changes and all(change.plan.verdict == "fits" for change in changes)
    assert plan_memory(draft(build_run_config(apply_values(tree, changes[0].values))), device).verdict == "fits"
    roomy = replace(device, memory=400 * GIB)
    assert find_changes_to_fit(tree, run, plan_memory(run, roomy), roomy) == []


def test_the_plan_of_the_largest_model_with_a_tower_takes_seconds() -> None:
    name = "qwen35_397b_a17b"
    words = [f"model=[{name}]", f"actor_config.model={name}", f"megatron_training.model={name}"]
    sizes = ["rl_config.actor_resource.num_npus=256", "actor_config.expert_model_parallel_size=32"]
    tree = compose(*locate("grpo_qwen35_122b_a10b_A3", None), words + sizes)
    begun = time.process_time()  # of this process: other work does not count
    run = draft(build_run_config(tree))
    plan = plan_memory(run, DEVICES["A3"])
    assert plan.verdict == "does not fit" and find_changes_to_fit(tree, run, plan, DEVICES["A3"])
    assert time.process_time() - begun < 10  # more than a minute where each count of the tower lists all experts


def test_the_shape_comes_from_config_json_where_it_is_here(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = saved_config(folder, vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=2)
    with torch.device("meta"):
        built = transformers.Qwen2ForCausalLM(config)
    tree = compose(*locate("sft_tiny_cpu", None), [])
    tree = apply_values(tree, {"megatron_training.tokenizer_name_or_path": str(folder), "megatron_training.load": str(folder)})
    tree = apply_values(tree, {"model": {"tiny_qwen25": {}}, "megatron_training.tensor_model_parallel_size": 1})
    run = draft(build_run_config(tree))
    counted = owners(plan_memory(run, DEVICES["cpu"]), "weights")
    assert counted == sum(parameter.numel() for parameter in built.parameters()) * (2 if run.config.actor_config.bf16 else 4)


def test_a_model_that_nothing_describes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["memory", "--config-name", "dapo_qwen3_32b_A3", "model.qwen3_32b.num_layers=null"]) == 2
    assert "model keys num_layers are not set" in capsys.readouterr().err


def test_the_command_prints_the_peak_and_returns_1_where_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["memory", "--config-name", "dapo_qwen3_32b_A3", "--memory-gib", "32", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "does not fit" and report["changes"]
    assert command.main(["memory", "--config-name", "dapo_qwen3_32b_A3"]) == 0
    assert capsys.readouterr().out.startswith("fits: the peak is ")
    assert command.main(["memory", "--config-name", "dapo_qwen3_32b_A3", "--memory-gib", "-1"]) == 2
    assert "--memory-gib: -1 must be above 0" in capsys.readouterr().err


def test_a_plan_imports_no_heavy_library() -> None:
    code = (
        "import sys\nfrom mindspeed_rl.cli.plan import main\n"
        "status = main(['memory', '--config-name', 'grpo_deepseek_r1_671b_A3'])\n"
        "heavy = {'torch', 'ray', 'vllm', 'megatron', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_engines_on_dedicated_devices_leave_the_trainers_theirs() -> None:
    dedicated = {
        "rl_config__use_integrated_worker": False,
        "rl_config__rollout_resource": {"num_npus": 16},
        "rl_config__trainer_mode": "one_step_off",
    }
    plan = planned("dapo_qwen3_32b_A3", **dedicated)
    trainers, engines = plan.groups[:-1], plan.groups[-1]
    assert (engines.name, engines.count) == ("rollout", 16)
    assert not any(
        "KV cache" in phase.owners or "rollout weights" in phase.owners for group in trainers for phase in group.phases
    )
    assert not any("optimizer" in phase.owners for phase in engines.phases)
    assert {"KV cache", "rollout weights"} <= set(engines.phases[0].owners)


def test_elastic_servers_take_turns_with_training_on_the_trainers_devices() -> None:
    apart: dict[str, Any] = {
        "rl_config__use_integrated_worker": False,
        "rl_config__rollout_resource": {"num_npus": 16},
        "rl_config__trainer_mode": "async",
    }
    shared, plain = planned("dapo_qwen3_32b_A3"), planned("dapo_qwen3_32b_A3", **apart)
    plan = planned("dapo_qwen3_32b_A3", **apart, rl_config__elastic_rollout=True)
    for trainer, alone, colocated in zip(plan.groups[:-1], plain.groups[:-1], shared.groups, strict=True):
        phases, before, engines = (
            {phase.name: phase.owners for phase in group.phases} for group in (trainer, alone, colocated)
        )
        # an engine of the same size as in the workers is there while it generates and takes weights, and in no other phase
        for name in ("generate", "update_weights"):
            for owner in ("rollout weights", "KV cache"):
                assert phases[name][owner] == engines[name][owner] and owner not in before[name]
        # its process is there in all of them
        assert phases["update"] == before["update"] | {"elastic process": before["update"]["runtime"]}
    # the weights of an engine that sleeps are in host memory
    assert plan.host is not None and plain.host is not None
    assert plan.host.total - plain.host.total == plan.host.devices * engines["generate"]["rollout weights"]


def test_a_critic_on_dedicated_devices_is_reported_by_owner() -> None:
    dedicated = {"rl_config__use_integrated_worker": False, "rl_config__critic_resource": {"num_npus": 8}}
    plan = planned("ppo_qwen25_32b_A3", **dedicated)
    (critic, *_) = [group for group in plan.groups if group.name.startswith("critic")]
    assert [phase.name for phase in critic.phases] == ["critic pass", "update critic"]
    forward, update = (phase.owners for phase in critic.phases)
    state = ("weights", "gradients", "optimizer")
    assert {owner: forward[owner] for owner in state} == {owner: update[owner] for owner in state}
    assert forward["activations"] < update["activations"]


def test_a_background_save_finds_the_engine_on_the_device() -> None:
    plan = planned("dapo_qwen3_32b_A3", actor_config__async_save=True)
    assert {"KV cache", "optimizer"} <= set(plan.groups[0].phases[-1].owners) and plan.groups[0].phases[-1].name == "save"


def test_the_weights_of_transformers_module_stay_while_the_actor_trains() -> None:
    keys: dict[str, object] = {"generate_config.infer_tensor_parallel_size": 1, "generate_config.offload_train_param": True}
    module, vllm = (planned("grpo_qwen3_8b_A3", **keys | {"generate_config.engine": name}) for name in ("transformers", "vllm"))
    kept, sleeping = (next(p for p in plan.fullest.phases if p.name == "update").owners for plan in (module, vllm))
    # two bytes of each parameter, on each device, and rows of the vocabulary that pad it
    assert kept["rollout weights"] == pytest.approx(2 * PARAMETERS["qwen3_8b"], rel=1e-3)
    assert "rollout weights" not in sleeping
    assert module.cache is not None and module.cache.room == module.cache.needed and not module.problems


def test_a_critic_leaves_before_the_actor_trains() -> None:
    phases = {phase.name: phase.owners for phase in planned("ppo_qwen25_32b_A3").groups[0].phases}
    assert "critic" in phases["update critic"] and "critic" not in phases["update"]


def test_a_platform_without_figures_asks_for_a_chip(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["memory", "--config-name", "grpo_qwen3_8b_A3", "platform=cuda"]
    assert command.main(asked) == 2
    assert "no figures of cuda devices" in capsys.readouterr().err
    assert command.main([*asked, "--chip", "A2"]) in (0, 1)


def test_a_run_that_is_over_as_computed_returns_1_and_says_what_that_means(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["memory", "--config-name", "dapo_qwen3_30b_a3b_A3"]) == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("over: the peak is ") and second.startswith("It does not fit as it is computed, and might")


@pytest.mark.parametrize("device", ["A2", "A3", "950PR", "950DT", "cpu"])
def test_every_assumption_has_a_source_and_what_no_npu_confirmed_says_so(device: str) -> None:
    run = draft(build_run_config(compose(*locate("dapo_qwen3_30b_a3b_A3", None), [])))
    results = {assumption.name: assumption for assumption in list_memory_assumptions(run.config, DEVICES[device])}
    assert all(assumption.value and assumption.source for assumption in results.values())
    assert any(assumption.is_unverified for assumption in results.values()) == (device != "cpu")
    if device != "cpu":
        assert str(results["HCCL buffers"]).startswith("HCCL buffers 2 x 640 MiB a communicator: ")
        assert str(results["runtime"]).endswith("; not verified on NPU")
        # the driver's part is what torch does not count of a device: 64 GiB less what users' messages have
        counted = {"A2": 60.97, "A3": 61.27}
        if device in counted:
            assert DEVICES[device].visible / GIB == pytest.approx(counted[device], abs=0.005)
        else:  # nothing but what was announced
            assert all(results[name].is_unverified for name in ("memory of a device", "driver"))


def test_models_start_one_after_the_other() -> None:
    keys = {"actor_config__swap_optimizer": True, "rl_config__init_kl_coef": 0.01}
    plan = planned("grpo_qwen3_8b_A3", **keys)
    start, update = (next(phase for phase in plan.groups[0].phases if phase.name == name) for name in ("start", "update"))
    # everything is offloaded, so the reference starts on an empty device, and the actor with its gradients is the fullest
    assert "reference" not in start.owners and start.owners["gradients"] == update.owners["gradients"]
    kept = planned("grpo_qwen3_8b_A3", **keys, generate_config__offload_train_param=False)
    start = next(phase for phase in kept.groups[0].phases if phase.name == "start")
    assert start.total <= update.total


def test_the_window_of_a_swapped_optimizer_is_counted_in_its_step() -> None:
    keys = {"actor_config__swap_optimizer": True, "actor_config__tensor_model_parallel_size": 1}
    keys |= {"actor_config__pipeline_model_parallel_size": 1, "rl_config__actor_resource": {"num_npus": 1}}
    recomputed = {"granularity": "full", "method": "uniform", "num_layers": 1}
    keys |= {f"actor_config__recompute_{name}": value for name, value in recomputed.items()}
    wide, narrow = (planned("grpo_qwen3_8b_A3", **keys, actor_config__swap_optimizer_times=parts) for parts in (4, 64))
    windows = [
        next(p for p in plan.groups[0].phases if p.name == "update").owners.get("optimizer window", 0)
        for plan in (wide, narrow)
    ]
    # main weights and two moments of 8.19e9 parameters, 4 bytes each; one of four parts at a time
    assert windows[0] == pytest.approx(8.19e9 * 12 / 4, rel=0.01)
    assert windows[1] == 0  # backward is the fuller moment
    # with one layer's activations it is not; a step brings in the whole embedding, which is more than one of 64 parts
    owners = next(p for p in planned("grpo_qwen3_8b_A2_1die").groups[0].phases if p.name == "update").owners
    assert owners["optimizer window"] == HEAD * 12
    assert wide.host is not None and wide.host.owners["optimizer"] == pytest.approx(8.19e9 * 12, rel=0.01)


def test_gradients_in_bf16_are_half() -> None:
    plans = [planned("grpo_qwen3_8b_A3", actor_config__grad_reduce_in_fp32=is_float32) for is_float32 in (True, False)]
    wide, narrow = (next(phase for phase in plan.groups[0].phases if phase.name == "update").owners for plan in plans)
    assert wide["gradients"] == 2 * narrow["gradients"]


@pytest.mark.parametrize(("fraction", "folder"), [(0.25, None), (1.0, None), (1.0, "/nvme")])
def test_states_that_the_host_updates_are_counted_there(fraction: float, folder: str | None) -> None:
    keys = {"actor_config__tensor_model_parallel_size": 1, "actor_config__pipeline_model_parallel_size": 1}
    keys |= {"rl_config__actor_resource": {"num_npus": 1}, "generate_config__offload_train_optimizer": False}
    keys |= {"actor_config__optimizer_offload_fraction": fraction, "actor_config__optimizer_offload_path": folder}
    plan = planned("grpo_qwen3_8b_A3", **keys)
    update = next(phase for phase in plan.groups[0].phases if phase.name == "update")
    # main weights and two moments of 8.19e9 parameters, 4 bytes each
    states = 8.19e9 * 12
    assert update.owners.get("optimizer", 0) == pytest.approx((1 - fraction) * states, rel=0.01)
    assert plan.host is not None
    assert plan.host.owners.get("optimizer", 0) == pytest.approx(fraction * states if folder is None else 0, rel=0.01)
    assert plan.host.disk == pytest.approx(states if folder else 0, rel=0.01)
    assert ("Disk: 91.5 GiB for a device in optimizer_offload_path" in [*plan.host.list_lines()]) == (folder is not None)


@pytest.mark.parametrize(
    ("keys", "moments", "on_host"),
    [
        ({}, 8, 0),
        ({"optimizer_state_dtype": "bfloat16"}, 4, 0),
        ({"optimizer_offload_fraction": 1.0}, 0, 8),
        ({"optimizer_offload_fraction": 0.25}, 6, 2),
        ({"optimizer_state_dtype": "bfloat16", "swap_optimizer": True}, 4, 4),
    ],
)
def test_moments_of_the_other_engine_are_counted_where_they_are(keys: dict[str, Any], moments: float, on_host: float) -> None:
    changes = {"engine": "fsdp", "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1} | keys
    values: dict[str, Any] = {f"actor_config__{name}": value for name, value in changes.items()}
    values |= {"rl_config__actor_resource": {"num_npus": 1}, "generate_config__offload_train_optimizer": False}
    plan = planned("grpo_qwen3_8b_A3", **values, rl_config__init_kl_coef=0.0)
    update = next(phase for phase in plan.groups[0].phases if phase.name == "update")
    count = 8.190735360e9
    assert update.owners["weights"] == pytest.approx(4 * count, rel=1e-3)
    assert update.owners.get("optimizer", 0) == pytest.approx(0 if "swap_optimizer" in keys else moments * count, rel=0.01)
    assert plan.host is not None
    assert plan.host.owners.get("optimizer", 0) == pytest.approx(on_host * count, rel=0.01)
    # float32 weights, and all moments wherever they are
    saved = 4 if keys.get("optimizer_state_dtype") == "bfloat16" else 8
    assert plan.host.checkpoint == pytest.approx((4 + saved) * count, rel=1e-3)


def test_a_reduction_of_gradients_needs_full_ones_however_many_ranks_divide_them() -> None:
    values: dict[str, Any] = {"actor_config__engine": "fsdp", "actor_config__offload_gradients": True}
    values |= {f"actor_config__{name}_model_parallel_size": 1 for name in ("tensor", "pipeline")}
    values |= {"rl_config__init_kl_coef": 0.0, "rl_config__max_prompt_length": 64}
    values |= {"generate_config__sampling_config__max_tokens": 64}
    values |= {"rl_config__use_dynamic_bsz": False, "actor_config__recompute_granularity": "full"}
    values |= {"actor_config__recompute_method": "uniform", "actor_config__recompute_num_layers": 1}
    for devices in (8, 32):
        plan = planned("grpo_qwen3_8b_A3", **values, rl_config__actor_resource={"num_npus": devices})
        owners = next(phase for phase in plan.groups[0].phases if phase.name == "update").owners
        assert "activations" not in owners  # with short rows the last reduction is the fullest moment
        assert owners["reduced gradients"] == (2 + 4) * (2 * 151936 * 4096 + 4096)


def test_the_buffers_of_split_weights_are_counted_in_their_step() -> None:
    for block, count in (("tiny_qwen25", None), ("qwen3_0p6b", 16 << 20)):
        config = MegatronConfig(**BLOCKS[block], bf16=True, reuse_fp32_param=True)
        model = Model.build(config, 1, trains=True)
        (elements,) = model.elements
        assert model.split_buffers(elements) == SPLIT_BUFFERS * (count or elements.parameters)
        assert not replace(model, trains=False).split_buffers(elements)


@pytest.mark.parametrize("devices", [1, 8])
def test_gradients_that_leave_the_device_are_counted_on_the_host(devices: int) -> None:
    values: dict[str, Any] = {"actor_config__engine": "fsdp", "rl_config__actor_resource": {"num_npus": devices}}
    values |= {f"actor_config__{name}_model_parallel_size": 1 for name in ("tensor", "pipeline")}
    values |= {"rl_config__init_kl_coef": 0.0}
    plans = [planned("grpo_qwen3_8b_A3", **values, actor_config__offload_gradients=moved) for moved in (False, True)]
    here, there = (next(phase for phase in plan.groups[0].phases if phase.name == "update").owners for plan in plans)
    count, ends = 8.190735360e9, 2 * 151936 * 4096
    assert here["gradients"] == pytest.approx(4 * count / devices, rel=1e-3)
    # the rows of embedding, head and norm, and of two of the 36 layers
    assert there["gradients"] == pytest.approx(4 * ((count - ends) / 18 + ends) / devices, rel=1e-3)
    # several micro-batches are added up in full before ranks divide them, or divided at once
    assert here.get("gradients of all ranks", 0) == pytest.approx(4 * count * (1 - 1 / devices), rel=1e-3)
    assert "gradients of all ranks" not in there
    # bf16 gradients of a layer in full, and the float32 input where there are other ranks, beside those of head and norm
    layer = 4096 * (32 + 2 * 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    assert there["reduced gradients"] == (2 if devices == 1 else 2 + 4) * layer + 2 * (ends // 2 + 4096)
    # an engine of shards has gradients in an update only
    assert [phase.name for phase in plans[0].groups[0].phases if "gradients" in phase.owners] == ["update"]
    on_host = [plan.host.owners.get("gradients", 0) for plan in plans if plan.host is not None]
    assert on_host == [0, pytest.approx(4 * count / devices, rel=1e-3)]


#: keys of a run of Qwen3-8B on one device whose optimizer is in host memory, and which saves
SAVES = {
    "actor_config__tensor_model_parallel_size": 1,
    "actor_config__pipeline_model_parallel_size": 1,
    "actor_config__swap_optimizer": True,
    "rl_config__actor_resource": {"num_npus": 1},
    "rl_config__init_kl_coef": 0.0,
}


@pytest.mark.parametrize(
    ("keys", "bytes_each"),
    [
        ({}, 2),  # bf16 weights; the states are written from where they are
        ({"no_save_optim": True}, 2),
        ({"async_save": True}, 2 + 12),  # the next step changes states that are being written
        # Megatron gathers copies of 12 bytes, and has one of the three states twice as it arrives; weights follow
        ({"swap_optimizer": False}, 12 + 12 + 8),
        ({"swap_optimizer": False, "no_save_optim": True}, 2),
        ({"swap_optimizer": False, "use_distributed_optimizer": False}, 2 + 12),
        ({"swap_optimizer": False, "use_distributed_optimizer": False, "optimizer_offload_fraction": 0.5}, 2 + 6),
        ({"swap_optimizer": False, "use_distributed_optimizer": False, "optimizer_offload_fraction": 1.0}, 2),
    ],
    ids=str,
)
def test_a_save_copies_to_the_host_what_is_on_the_device(keys: dict[str, Any], bytes_each: int) -> None:
    values = SAVES | {f"actor_config__{name}": value for name, value in keys.items()}
    host = planned("grpo_qwen3_8b_A3", **values).host
    assert host is not None
    phases = {phase.name: phase for phase in host.phases}
    staged = phases["save"].total - phases["iteration"].total
    assert staged == pytest.approx(8.190735360e9 * bytes_each, rel=1e-6)
    assert phases["save"].owners.get("tensors of the save") == staged
    states = 0 if keys.get("no_save_optim") else 12
    assert host.checkpoint == pytest.approx(8.190735360e9 * (2 + states), rel=1e-6)
    assert host.total == phases["save"].total and "in save" in next(host.list_lines())


@pytest.mark.parametrize(
    "name",
    [
        "grpo_qwen3_8b_A2_1die",
        "grpo_lora_qwen3_8b_A2_1die",
        "grpo_qwen3_30b_a3b_A2_4dies",
        "grpo_qwen3_30b_a3b_A3_8dies",
    ],
)
def test_run_files_of_small_machines_leave_a_tenth_and_say_what_they_take(name: str) -> None:
    plan, text = planned(name), (find_project_configs() / f"{name}.yaml").read_text()
    assert plan.verdict == "fits" and plan.fullest.peak.total <= 0.9 * plan.capacity
    assert plan.host is not None
    peak = plan.fullest.peak
    assert f"{peak.total / GIB:.0f} of 64 GiB in {peak.name}, {plan.host.total / GIB:.0f} GiB of host memory, " in text
    for language, cell in (("", f"{peak.total / GIB:.0f}, in {peak.name}"), ("zh/", f"{peak.total / GIB:.0f}，{peak.name}")):
        guide = (find_project_configs().parent / "docs" / language / "ascend.md").read_text()
        row = next(line for line in guide.splitlines() if line.startswith(f"| `{name}`"))
        assert f"| {cell} | {plan.host.total / GIB:.0f} GiB |" in row


def test_an_export_gathers_a_file_of_weights_and_is_part_of_the_checkpoint() -> None:
    plain, exported = (planned("grpo_qwen3_8b_A3", **SAVES, actor_config__save_hf=on).host for on in (False, True))
    assert plain is not None and exported is not None
    assert exported.peak.total - plain.peak.total == 5 * 10**9
    assert exported.checkpoint - plain.checkpoint == pytest.approx(2 * 8.190735360e9, rel=1e-6)
    unsaved = planned("grpo_qwen3_8b_A3", **SAVES, actor_config__save=None).host
    assert unsaved is not None and unsaved.phases[-1].name == "iteration" and unsaved.checkpoint == 0


def test_a_save_of_experts_copies_those_of_each_rank_and_a_part_of_what_all_ranks_have() -> None:
    plan = planned("grpo_qwen3_30b_a3b_A2_4dies")
    assert plan.host is not None
    # of each of 128 experts in 48 layers three matrices of 2048 x 768, a quarter on each die; all others are on every die
    expert = 48 * 128 * 3 * 2048 * 768
    dense = 30_532_122_624 - expert
    # the distributed optimizer of the experts is on one rank, whose states are in place; the others' are gathered
    expected = 2 * expert // 4 + (2 + 12) * dense // 4
    assert plan.host.phases[-1].owners["tensors of the save"] == pytest.approx(expected, rel=1e-4)


#: of Qwen3-8B: embedding, head and last norm; a layer's projections of attention and MLP, and its four norms
ENDS_8B = 2 * 151936 * 4096 + 4096
LAYER_8B = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 12288) + 2 * 4096 + 2 * 128


def test_a_streamed_reference_is_on_the_device_by_two_layers_and_in_its_pass_only() -> None:
    one = {"actor_config__tensor_model_parallel_size": 1, "actor_config__pipeline_model_parallel_size": 1}
    keys = one | {"rl_config__actor_resource": {"num_npus": 1}, "generate_config__offload_train_param": False}
    keys |= {"rl_config__init_kl_coef": 0.01}
    resident, streamed = (planned("grpo_qwen3_8b_A3", **keys, actor_config__stream_ref_weights=on) for on in (False, True))
    before, after = ({phase.name: phase.owners for phase in plan.groups[0].phases} for plan in (resident, streamed))
    assert {name for name, owners in before.items() if "reference" in owners} == {*before} - {"start"}
    assert {name for name, owners in after.items() if "reference" in owners} == {"reference pass"}
    assert before["update"]["reference"] == 2 * (ENDS_8B + 36 * LAYER_8B)
    assert after["reference pass"]["reference"] == 2 * (ENDS_8B + 2 * LAYER_8B)
    assert resident.host is not None and streamed.host is not None
    assert "reference" not in resident.host.owners
    assert streamed.host.owners["reference"] == 2 * (ENDS_8B + 36 * LAYER_8B)


def test_a_streamed_reference_of_a_preference_stage_is_a_moment_of_its_step(tmp_path: Path) -> None:
    saved_config(tmp_path, num_hidden_layers=6, hidden_size=64, intermediate_size=96, vocab_size=512)
    tree: dict[str, Any] = {
        "platform": "npu",
        "megatron_training": {
            "stage": "dpo", "load": str(tmp_path), "num_npus": 1, "global_batch_size": 8, "seq_length": 128, "train_iters": 2,
        },
    }  # fmt: skip
    owners = []
    for streams in (False, True):
        tree["megatron_training"]["stream_ref_weights"] = streams
        plan = plan_memory(draft(build_run_config(tree)), DEVICES["A2"])
        owners.append(next(phase for phase in plan.groups[0].phases if phase.name == "update").owners)
        assert plan.host is not None and ("reference" in plan.host.owners) == streams
    # the update itself is fuller than the reference's pass over two of six layers
    assert owners[0].pop("reference") and owners[0] == owners[1]


def test_advice_takes_a_reference_off_the_device_or_out_of_the_run() -> None:
    tree = compose(*locate("grpo_qwen3_8b_A3", None), [])
    for coefficient, named in ((0.001, True), (0.05, False)):
        values = {"rl_config.init_kl_coef": coefficient, "generate_config.offload_train_param": False}
        run = draft(build_run_config(apply_values(tree, values)))
        candidates = dict((*values, costs) for values, costs in advice._candidates_of_ref(run) if len(values) == 1)
        assert "actor_config.stream_ref_weights" in candidates
        assert ("rl_config.init_kl_coef" in candidates) == named
    # without a KL there is no reference
    values = {"rl_config.init_kl_coef": 0.0}
    assert not list(advice._candidates_of_ref(draft(build_run_config(apply_values(tree, values)))))


def test_the_engines_share_is_of_what_a_process_sees() -> None:
    plan = planned("grpo_qwen25_7b_A3")  # gpu_memory_utilization 0.4, of 64 GiB less the driver's 2.73
    generate = next(phase for phase in plan.groups[0].phases if phase.name == "generate").owners
    engine = generate["rollout weights"] + generate["KV cache"] + generate["engine step"]
    assert engine / GIB == pytest.approx(0.4 * (64 - 2.73), abs=0.01)


def test_the_cpu_engine_keeps_large_matrices_packed_until_the_next_push() -> None:
    plan = planned("grpo_tiny_cpu")
    # fp32, four layers over 128: gate and up (768 rows), what leads down (384), query, key and value (256), and what leads out
    # of attention (128); the head has 128 rows
    by_phase = {phase.name: phase.owners.get("packed weights", 0) for phase in plan.groups[0].phases}
    assert by_phase["generate"] == by_phase["update"] == 4 * 128 * (4 * (768 + 384 + 256 + 128) + 128)
    assert by_phase["start"] == by_phase["update_weights"] == 0
    assert owners(planned("grpo_qwen25_7b_A3"), "packed weights") == 0


def test_an_adapter_beside_the_weights_takes_room_in_the_engine() -> None:
    lora = {
        "actor_config__lora_target_modules": ["linear_qkv"],
        "actor_config__lora_r": 12,
        "actor_config__lora_alpha": 16,
    }
    merged, beside = (planned("grpo_tiny_cpu", **lora, generate_config__lora_push=push) for push in ("merged", "adapter"))
    # room of rank 16 in every linear layer of fp32, whatever trains: q 128, k and v 64 rows over 128; o 128 over 128; gate and
    # up 384 over 128, down 128 over 384; four layers
    rows_and_columns = 256 + 2 * 192 + 256 + 2 * 512 + 512
    assert owners(beside, "engine adapters") == 4 * 4 * 16 * rows_and_columns
    assert owners(merged, "engine adapters") == 0


def test_a_reward_model_named_by_its_folder_is_counted(tmp_path: Path) -> None:
    config = saved_config(tmp_path, vocab_size=256, hidden_size=64, intermediate_size=80, num_hidden_layers=2)
    with torch.device("meta"):
        body = transformers.Qwen2Model(config)
    plan = planned("grpo_tiny_cpu", rl_config__reward_model=str(tmp_path), actor_config__tensor_model_parallel_size=1)
    # the body and a score for each of 64 numbers
    assert owners(plan, "reward model") == 4 * (sum(value.numel() for value in body.parameters()) + 64)


def test_a_reference_of_another_model_is_counted_as_its_folder_says(tmp_path: Path) -> None:
    config = saved_config(tmp_path, vocab_size=256, hidden_size=128, intermediate_size=96, num_hidden_layers=3)
    with torch.device("meta"):
        built = transformers.Qwen2ForCausalLM(config)
    alone = {"actor_config__tensor_model_parallel_size": 1}
    named = {"rl_config__integrated_mode_config": {"ref_model_load_path": str(tmp_path)}}
    plan = planned("grpo_tiny_cpu", **alone, **named)
    assert owners(plan, "reference") == 4 * sum(value.numel() for value in built.parameters())
    # weights that are elsewhere are taken to be of the actor's shape
    named["rl_config__integrated_mode_config"]["ref_model_load_path"] = str(tmp_path / "elsewhere")
    same = planned("grpo_tiny_cpu", **alone)
    assert owners(planned("grpo_tiny_cpu", **alone, **named), "reference") == owners(same, "reference")


def test_a_backbone_that_is_shared_makes_the_pass_of_the_reference() -> None:
    plan = planned("grpo_lora_qwen25_32b_A2", rl_config__share_backbone=True)
    phases = {phase.name: phase.owners for phase in plan.groups[0].phases}
    assert phases["reference pass"]["weights"] == phases["update"]["weights"]
    assert not any("reference" in held for held in phases.values())


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"actor_config__tensor_model_parallel_size": 3},
        {"actor_config__tensor_model_parallel_size": 0},
        {"rl_config__mini_batch_size": 7},
        {"rl_config__actor_resource__num_npus": 12},
        {"megatron_training__global_batch_size": None},
        {"generate_config__max_model_len": 16},
        {"generate_config__lora_push": "adapter"},
    ],
)
def test_a_candidate_is_valid_where_validate_finds_nothing(overrides: dict) -> None:
    tree = compose(*locate("grpo_qwen3_8b_A3", None), [])
    run = draft(build_run_config(apply_values(tree, {key.replace("__", "."): value for key, value in overrides.items()})))
    assert is_valid(run) == (not validate(run)) == (not overrides)


def test_teachers_are_counted_as_their_folders_say_on_either_devices(tmp_path: Path) -> None:
    shape = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes, teachers = [], []
    for layers in (3, 5):
        config = transformers.Qwen2Config(**shape, num_hidden_layers=layers, tie_word_embeddings=True)
        built = transformers.Qwen2ForCausalLM(config)
        built.save_pretrained(folder := tmp_path / f"teacher_{layers}")
        teachers.append(str(folder))
        sizes.append(4 * sum(value.numel() for value in built.parameters()))
    keys = {"enabled": True, "teacher_models": teachers}
    alone = {"rl_config__actor_resource__num_npus": 1, "actor_config__tensor_model_parallel_size": 1}
    plan = planned("grpo_tiny_cpu", **alone, rl_config__distillation=keys)
    assert [owners(plan, name) for name in ("teacher", "teacher_1")] == sizes
    dedicated = planned("grpo_tiny_cpu", **alone, rl_config__distillation=keys, rl_config__teacher_resource__num_npus=1)
    group = next(group for group in dedicated.groups if group.name == "teacher")
    assert group.count == 1 and "1 of its own" in group.ranks
    assert group.phases[0].owners["teacher_1"] == sizes[1]
    assert not any("teacher" in phase.owners for phase in dedicated.groups[0].phases)


def test_a_draft_model_is_counted_from_its_files(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(heads | {"torch_dtype": "bfloat16"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    drafts = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    # stored in 2 bytes a value; keys and values of 3 layers with 2 heads of 16
    assert read_draft_bytes(GenerateConfig(speculative_config=drafts), 4) == (2000, 2 * 3 * 2 * 16 * 4)
    assert read_draft_bytes(GenerateConfig(speculative_config={"method": "suffix"}), 4) == (0, 0)
    assert read_draft_bytes(GenerateConfig(), 4) == (0, 0)


def test_a_tower_that_trains_takes_its_activations_and_a_frozen_one_a_block_of_them() -> None:
    keys = {"freeze_vit": False, "freeze_aligner": False}
    frozen = planned("grpo_qwen25_vl_7b_A3")
    trained = planned("grpo_qwen25_vl_7b_A3", **{f"megatron_training__{key}": value for key, value in keys.items()})
    tokens = 1280  # of max_pixels, in one prompt of a micro-batch of two samples
    hidden, ffn, patches = 1280, 3420, 4
    # a block for each patch: 8 hidden and three widths; before and after: pixels, their embedding, features; in bfloat16
    block, ends = patches * (8 * hidden + 3 * ffn), patches * (3 * 2 * 14 * 14 + hidden) + 3584
    in_flight = 2  # two stages, at least as many micro-batches
    assert owners(frozen, "tower") == (block + ends) * tokens * 2
    assert owners(trained, "tower") == (32 * block + ends) * tokens * 2 * in_flight
    first, same = (plan.groups[0].peak.owners["gradients"] for plan in (trained, frozen))
    assert first - same == 4 * 676_550_144


HEAD = 151936 * 4096  # of Qwen3-8B


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # 256 tokens of 1024 have logits: a bf16 product and five float32 tensors of them; a product of 8192 rows of the head
        ({}, 2 * 1024 * 4096 * 2 + 256 * 151936 * 22 + 8192 * 4096 * 2),
        # 4096 entries of the vocabulary at a time, for all tokens, whose gradient is a sum in float32
        (
            {"loss_chunk_size": 1024, "loss_vocab_chunk_size": 4096},
            2 * 1024 * 4096 * 2 + 1024 * 4096 * 4 + 1024 * 4096 * 22 + 4096 * 4096 * 2,
        ),
        # reduced during backward the gradient is a tensor, summed in float32 and rounded
        ({"overlap_grad_reduce": True}, 2 * 1024 * 4096 * 2 + 256 * 151936 * 22 + HEAD * 6),
        # adapters leave the head as it is
        ({"lora_target_modules": ["linear_qkv"]}, 2 * 1024 * 4096 * 2 + 256 * 151936 * 22),
    ],
)
def test_bytes_of_the_head_are_those_of_its_chunks(keys: dict[str, Any], expected: int) -> None:
    model_config = plan_role(load_run_config("grpo_qwen3_8b_A3").actor_config).model_config
    config = MegatronConfig(**{"bf16": True, "loss_chunk_size": 256} | keys)
    assert compute_head_bytes(config, model_config, 1024, trains=True) == expected


@pytest.mark.parametrize(("model", "block"), [("Qwen3-8B", "qwen3_8b"), ("Qwen3-30B-A3B", "qwen3_30b_a3b")])
def test_a_model_folder_is_planned_like_the_block_of_its_shape(tmp_path: Path, model: str, block: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    keys, written = read_folder(tmp_path), read_block(block, None)
    trees = [
        build_grpo_tree(FitRequest("mine", keys, 8, 1024, 1024, folder=str(tmp_path))),
        build_grpo_tree(FitRequest(block, written, 8, 1024, 1024)),
    ]
    plans = [plan_memory(draft(build_run_config(tree)), DEVICES["A3"]) for tree in trees]
    for name in ("weights", "optimizer", "rollout weights"):
        found, expected = ([phase.owners.get(name, 0) for phase in plan.fullest.phases] for plan in plans)
        assert found == pytest.approx(expected, rel=1e-3), name


def test_fit_takes_the_folder_of_a_model_and_writes_a_run_file_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "Qwen2.5-0.5B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["Qwen2.5-0.5B"]))
    output = tmp_path / "best.yaml"
    words = ["--npus", "1", "--model", str(folder), "--prompt", "256", "--response", "256", "--top", "1", "-o", str(output)]
    assert command.main(["fit", *words]) == 0
    assert "Qwen2.5-0.5B on 1 x A3" in capsys.readouterr().out
    text = output.read_text()
    assert f'load: "{folder}"' in text and "model:" not in text.replace("tensor_model", "")
    (folder / "config.json").write_text('{"model_type": "unheard_of"}')
    assert command.main(["fit", *words]) == 2 and "unheard_of" in capsys.readouterr().err
