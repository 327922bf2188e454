"""vllm-ascend as the rollout engine on the simulated NPU against transformers on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks

#: bf16 keeps 8 bits, and the test's weights are four times as large as a fresh model's
BF16 = 0.3
#: of a decoding step of the tests' model
MOST_KERNELS = 90


@pytest.fixture(autouse=True)
def a_small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines take their share of the device; 8 GiB keep that small."""
    monkeypatch.setenv("NPU_SIM_MEMORY_GIB", "8")


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_SIM_MEMORY_GIB", "8")
        (report,) = run_ranks("rollout", 1, {"dtype": "float32"})
    return report


def test_log_probs_and_greedy_tokens_are_those_of_transformers(alone: dict[str, Any]) -> None:
    assert alone["worst"] < 1e-4 and alone["worst_cut"] < 1e-4  # of the full distribution, also at another temperature
    assert all(alone["same_greedy"]) and all(len(tokens) > 0 for tokens in alone["tokens"])


def test_every_layer_runs_on_the_operators_of_the_device(alone: dict[str, Any]) -> None:
    calls = alone["calls"]
    assert calls["npu::npu_fused_infer_attention_score"] == calls["atb::_npu_reshape_and_cache"] > 0
    assert calls["npu::npu_swiglu"] > 0 and calls["npu::npu_add_rms_norm"] > 0 and calls["atb::_npu_rotary_embedding"] > 0


def test_a_decoding_step_has_as_few_kernels_at_any_batch(alone: dict[str, Any]) -> None:
    kernels = {count: step[0] for count, step in alone["decode_kernels"].items()}
    assert len(set(kernels.values())) == 1 and max(kernels.values()) <= MOST_KERNELS, kernels
    assert alone["same_alone"]  # a request's tokens follow from its seed, by itself and in a batch


def test_sleep_gives_the_memory_back_and_waking_up_changes_no_token(alone: dict[str, Any]) -> None:
    assert len(alone["memory"]) == 2
    for awake, asleep in alone["memory"]:
        assert asleep < 0.1 * awake
    assert alone["equal"] == [True, True]


def test_sleep_keeps_no_copy_of_weights_that_a_push_replaces(alone: dict[str, Any]) -> None:
    # the last sleep kept what no push writes: tables of angles, and what the one block of the pool has beside the weights
    assert 0 < alone["kept_bytes"] < (2 << 20) - 0.9 * alone["weight_bytes"] and alone["equal"][-1]


def test_other_weights_give_other_responses(alone: dict[str, Any]) -> None:
    assert alone["other_weights_differ"]


@pytest.mark.slow
def test_with_drafts_greedy_tokens_and_log_probs_are_those_of_transformers() -> None:
    drafts = {"method": "suffix", "num_speculative_tokens": 3}
    (report,) = run_ranks("rollout", 1, {"dtype": "float32", "drafts": drafts, "rounds": 0})
    assert all(report["same_greedy"]) and report["worst"] < 1e-4 and report["worst_cut"] < 1e-4
    # the same greedy responses once more are found in the cache, and come in fewer steps
    proposed, accepted, _ = report["drafts"]
    assert report["again"] and 0 < accepted <= proposed


#: what the proof of a dense layer sees: its elements, its scales and the copy of them that kernels read
INT8_DAMAGE = ["down_proj.weight", "down_proj.weight_scale", "down_proj.weight_scale_fp32"]


@pytest.mark.slow
def test_int8_products_of_vllm_ascend_have_the_log_probs_of_their_definition_after_every_sleep() -> None:
    (report,) = run_ranks("rollout", 1, {"quantization": "int8", "rounds": 2})
    assert report["equal"] == [True, True] and report["other_weights_differ"]
    # bf16 moves elements over the rounding edges of int8, which are wider than its own
    assert report["mean"] < BF16 and report["worst"] < 4 * BF16
    assert report["calls"]["npu::npu_quant_matmul"] == report["calls"]["npu::npu_dynamic_quant"] > 0
    assert len(set(report["proven"])) == 1 and report["damage"] == INT8_DAMAGE


@pytest.mark.slow
def test_two_devices_of_a_replica_sample_the_same_tokens() -> None:
    first, second = run_ranks("rollout", 2, {"tensor_parallel": 2, "rounds": 1})
    assert first["tokens"] == second["tokens"] and first["worst"] < BF16
    assert first["equal"] == second["equal"] == [True]


#: graphs of whole decoding steps, for as many requests; a step of three is padded to four
GRAPHS = {
    "enforce_eager": False,
    "cudagraph_capture_sizes": [1, 2, 4, 8],
    "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
}

EXPERTS = {"model": "qwen3_moe", "dtype": "float32"}


@pytest.fixture(scope="module")
def all_experts() -> dict[str, Any]:
    """What one process says that has all experts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_SIM_MEMORY_GIB", "8")
        (report,) = run_ranks("rollout", 1, EXPERTS)
    return report


def test_experts_are_loaded_again_after_every_sleep(all_experts: dict[str, Any]) -> None:
    assert all_experts["worst"] < 1e-4 and all(all_experts["same_greedy"])
    assert all_experts["equal"] == [True, True] and all_experts["other_weights_differ"]
    assert all_experts["calls"]["npu::npu_grouped_matmul"] > 0


#: replicas of how many dies, replicas that share experts, which prompts fall to each die
SHARES = {
    "two replicas": (1, 2, [[0, 1, 2], [3]]),
    "one of two replicas has no prompts": pytest.param(1, 2, [[0, 1, 2, 3], []], marks=pytest.mark.slow),
    "one replica": pytest.param(2, 1, [[0, 1, 2, 3]] * 2, marks=pytest.mark.slow),
    "two replicas of two dies": pytest.param(2, 2, [[0, 1, 2]] * 2 + [[3]] * 2, marks=pytest.mark.slow),
}


@pytest.mark.parametrize(("tensor", "sharing", "prompts"), SHARES.values(), ids=list(SHARES))
def test_devices_that_share_experts_sample_the_tokens_of_a_single_process(
    all_experts: dict[str, Any], tensor: int, sharing: int, prompts: list[list[int]]
) -> None:
    layout = {"tensor_parallel": tensor, "sharing": sharing, "prompts": prompts, "rounds": 1}
    for numbers, report in zip(prompts, run_ranks("rollout", len(prompts), EXPERTS | layout), strict=True):
        assert report["tokens"] == [all_experts["tokens"][number] for number in numbers]
        assert report["worst"] < 1e-4 and all(report["same_greedy"])
        assert report["equal"] == [True] and report["other_weights_differ"] == bool(numbers)


#: of two layers, the experts of each of two devices; neither layer has them in their order
PLACES = [[[0, 2], [1, 3]], [[3, 1], [0, 2]]]
EXPERT_MAP = {"generate": {"expert_map_path": "expert_map.json"}}


@pytest.mark.slow
def test_experts_at_the_places_of_a_map_sample_the_tokens_of_a_single_process(all_experts: dict[str, Any]) -> None:
    prompts = [[0, 1, 2], [3]]
    layout = {"sharing": 2, "prompts": prompts, "rounds": 1, "experts_of_devices": PLACES}
    for numbers, report in zip(prompts, run_ranks("rollout", 2, EXPERTS | layout | EXPERT_MAP), strict=True):
        assert report["tokens"] == [all_experts["tokens"][number] for number in numbers]
        assert report["worst"] < 1e-4 and all(report["same_greedy"])
        assert report["equal"] == [True] and report["other_weights_differ"]


@pytest.mark.slow
def test_the_experts_that_an_engine_reports_are_those_that_transformers_chooses() -> None:
    (report,) = run_ranks("rollout", 1, EXPERTS | {"routing": True, "rounds": 0})
    assert all(report["same_experts"]) and len(report["same_experts"]) == 4


#: operators that bring tokens to their experts -> the exchange they belong to; within one device the first too
EXCHANGED_BY = {
    "npu::npu_moe_init_routing_custom": "all-gather",
    "npu::npu_moe_init_routing_v2": "all-gather",
    "npu::npu_moe_distribute_dispatch_v2": "MC2",
    "npu::npu_moe_token_permute": "all-to-all",
}
#: models whose rows are whole blocks of a format, also on each of two ranks
EXPERTS_OF = {None: "qwen3_moe", "int8": "qwen3_moe", "mxfp8": "qwen3_moe_wide_blocks", "w4a8": "qwen3_moe_groups"}
#: format of the experts, the device, ranks, settings of the layout, exchanges of tokens: steps of many tokens, of few
REPORTING: dict[str, tuple[str | None, str, int, dict[str, Any], set[str]]] = {
    "int8": ("int8", "Ascend910B3", 1, {}, {"all-gather"}),
    "int8, graphs": ("int8", "Ascend910B3", 1, {"generate": GRAPHS}, {"all-gather"}),
    "int8, two tensor parallel ranks": ("int8", "Ascend910B3", 2, {"tensor_parallel": 2}, {"all-gather"}),
    "two replicas of an A2": (None, "Ascend910B3", 2, {"sharing": 2, "prompts": [[0, 1, 2], [3]]}, {"all-gather"}),
    "int8, two replicas of an A3": (
        *("int8", "Ascend910_9391", 2, {"sharing": 2, "prompts": [[0, 1, 2], [3]]}),
        {"all-to-all", "MC2"},
    ),
    "one replica of an A3": (None, "Ascend910_9391", 2, {"tensor_parallel": 2, "sharing": 1}, {"all-to-all", "MC2"}),
    "one replica of a 950": (None, "Ascend950DT_9582", 2, {"tensor_parallel": 2, "sharing": 1}, {"all-gather", "MC2"}),
    "int8, two replicas of two ranks": (
        *("int8", "Ascend910_9391", 4),
        {"tensor_parallel": 2, "sharing": 2, "prompts": [[0, 1, 2]] * 2 + [[3]] * 2},
        {"all-to-all", "MC2"},
    ),
    "int4": ("w4a8", "Ascend910B3", 1, {}, {"all-gather"}),
    "int4, two tensor parallel ranks": ("w4a8", "Ascend910B3", 2, {"tensor_parallel": 2}, {"all-gather"}),
    "int4, two replicas of an A3": (
        *("w4a8", "Ascend910_9391", 2, {"sharing": 2, "prompts": [[0, 1, 2], [3]]}),
        {"all-to-all", "MC2"},
    ),
    "MXFP8, graphs": ("mxfp8", "Ascend950DT_9582", 1, {"generate": GRAPHS}, {"all-gather"}),
    "MXFP8, two tensor parallel ranks": ("mxfp8", "Ascend950DT_9582", 2, {"tensor_parallel": 2}, {"all-gather"}),
    "MXFP8, two replicas": (
        *("mxfp8", "Ascend950DT_9582", 2),
        {"sharing": 2, "prompts": [[0, 1, 2], [3]], "generate": {"infer_moe_token_dispatcher_type": "allgather"}},
        {"all-gather"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "device", "ranks", "layout", "exchanges"), REPORTING.values(), ids=list(REPORTING))
def test_reported_experts_are_those_that_transformers_chooses_whatever_computes_them(
    quantization: str | None,
    device: str,
    ranks: int,
    layout: dict[str, Any],
    exchanges: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", device)
    model = EXPERTS_OF[quantization]
    settings = EXPERTS | {"model": model, "routing": True, "rounds": 0, "quantization": quantization} | layout
    prompts = layout.get("prompts", [[0, 1, 2, 3]] * ranks)
    for numbers, report in zip(prompts, run_ranks("rollout", ranks, settings), strict=True):
        assert report["same_experts"] == [True] * len(numbers) and report["worst"] < 1e-4
        assert {exchange for name, exchange in EXCHANGED_BY.items() if report["calls"].get(name)} == exchanges


#: matrices of Qwen3-MoE that engines have in bytes
_QWEN3_MOE = ["w13_weight", "w2_weight"]


@pytest.mark.slow
def test_int8_experts_have_the_log_probs_of_their_definition_after_every_sync() -> None:
    (report,) = run_ranks("rollout", 1, EXPERTS | {"quantization": "int8"})
    assert report["worst"] < 1e-4 and report["worst_other"] < 1e-4 and all(report["same_greedy"])
    assert report["equal"] == [True, True] and report["other_weights_differ"]
    # every byte of every sync, and a proof that sees another one in a matrix and in a scale
    assert len(report["proven"]) == 4 and len(set(report["proven"])) == 1
    assert report["damage"] == ["w13_weight", "w2_weight_scale", "w13_weight_scale_fp32"]
    assert report["in_bytes"] == [f"mlp.experts.{name}" for name in _QWEN3_MOE] + [
        f"self_attn.{name}.weight" for name in ("o_proj", "qkv_proj")
    ]
    # gate and up, down; activations are quantized once in front of each
    calls = report["calls"]
    assert calls["npu::npu_grouped_matmul"] == 2 * calls["npu::npu_moe_init_routing_custom"] > 0
    assert calls["npu::npu_dynamic_quant"] == calls["npu::npu_quant_matmul"] + calls["npu::npu_moe_init_routing_custom"]


INT4 = {"model": "qwen3_moe_groups", "dtype": "float32", "quantization": "w4a8"}


def check_definition(report: dict[str, Any], rounds: int = 1) -> None:
    """All log-probs are those of the definition, which at edges of rounding takes the engine's side of a few elements."""
    assert report["worst"] < 1e-5 and report["worst_other"] < 1e-4  # other weights are larger, and with them the logits
    taken, elements = report["taken"]
    assert taken < 1e-4 * elements or (taken, elements) == (0, 0)
    assert report["equal"] == [True] * rounds and report["other_weights_differ"] and len(set(report["proven"])) == 1


@pytest.mark.slow
def test_int4_experts_next_to_int8_have_the_log_probs_of_their_definition_after_every_sync() -> None:
    (report,) = run_ranks("rollout", 1, INT4)
    check_definition(report, 2)
    assert all(report["same_greedy"]) and len(report["proven"]) == 4
    # elements, a scale, and the sums that kernels read beside them
    assert report["damage"] == ["w13_weight", "w2_weight_scale", "w13_scale_bias"]
    # attention is in int8; experts have eight elements in an int32
    assert report["in_bytes"] == [f"self_attn.{name}.weight" for name in ("o_proj", "qkv_proj")]
    calls = report["calls"]
    assert calls["npu::npu_grouped_matmul"] == 2 * calls["npu::npu_moe_init_routing_custom"] > 0
    assert calls["npu::npu_dynamic_quant"] == calls["npu::npu_quant_matmul"] + calls["npu::npu_moe_init_routing_custom"]


@pytest.mark.slow
def test_int4_experts_in_bfloat16_are_as_far_from_their_definition_as_rounding_moves_it() -> None:
    """Among the tokens is one that is 16 off: errors of the size of bfloat16 move the definition by as much there."""
    (report,) = run_ranks("rollout", 1, INT4 | {"dtype": "bfloat16", "rounds": 0, "disturbed": True, "counts": False})
    for gap, moved in (*report["plain"], *report["cut"]):
        assert gap < 2 * moved + 0.05
    assert sum(gap for gap, _ in report["plain"]) < 0.3 * len(report["plain"])
    assert max(gap for gap, _ in report["cut"]) > 10  # the token of this test; without one it shows less


BLOCKS = {"quantization": "mxfp8", "rounds": 1}


@pytest.mark.slow
def test_mxfp8_of_a_950_has_the_log_probs_of_its_definition_after_every_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", "Ascend950DT_9582")
    (report,) = run_ranks("rollout", 1, BLOCKS | {"dtype": "float32"})
    assert report["worst"] < 1e-3 and report["mean"] < 1e-4 and all(report["same_greedy"])
    assert report["equal"] == [True] and report["other_weights_differ"]
    assert len(set(report["proven"])) == 1 and report["damage"] == ["down_proj.weight", "down_proj.weight_scale"]
    assert report["calls"]["npu::npu_quant_matmul"] == report["calls"]["npu::npu_dynamic_mx_quant"] > 0


@pytest.mark.slow
def test_mxfp8_is_refused_by_an_a2_before_its_engine_is_built() -> None:
    with pytest.raises(AssertionError, match=r"\(mxfp8\) is not available on this device .*A2 and A3 have no 8-bit"):
        run_ranks("rollout", 1, BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "exchange"), [("Ascend910B3", "allgather"), ("Ascend910_9391", "MC2")])
def test_int8_experts_on_two_devices_have_the_log_probs_of_their_definition(
    device: str, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", device)
    layout = {"sharing": 2, "prompts": [[0, 1, 2], [3]], "rounds": 1, "quantization": "int8"}
    for report in run_ranks("rollout", 2, EXPERTS | layout):
        assert report["worst"] < 1e-4 and all(report["same_greedy"])
        assert report["equal"] == [True] and report["other_weights_differ"] and len(set(report["proven"])) == 1
        # tokens are sent in int8, and activated from whole numbers
        assert (report["calls"].get("npu::npu_moe_distribute_dispatch_v2", 0) > 0) == (exchange == "MC2")
        assert (report["calls"].get("npu::npu_dequant_swiglu_quant", 0) > 0) == (exchange == "MC2")


#: what int8 experts are combined with: processes, further settings of the program
INT8_EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "places of a map": (2, {"sharing": 2, "prompts": [[0, 1, 2], [3]], "experts_of_devices": PLACES} | EXPERT_MAP),
    "graphs": (1, {"generate": GRAPHS}),
    "weight syncs of what changed": (1, {"delta": True}),
    "weight syncs of what changed, two ranks": (2, {"delta": True, "tensor_parallel": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INT8_EXPERTS)
def test_int8_experts_have_the_log_probs_of_their_definition_combined_with(name: str) -> None:
    ranks, settings = INT8_EXPERTS[name]
    for report in run_ranks("rollout", ranks, EXPERTS | {"rounds": 2, "quantization": "int8"} | settings):
        assert report["worst"] < 1e-4 and report["worst_other"] < 1e-4 and all(report["same_greedy"])
        assert report["equal"] == [True, True] and report["other_weights_differ"] and len(set(report["proven"])) == 1
        # a byte that a fault has changed stays where its slice did not change
        assert report.get("stays_damaged") == (True if "delta" in settings else None)
        assert report["graphs"] == (len(GRAPHS["cudagraph_capture_sizes"]) if name == "graphs" else 0)


#: what int4 experts are combined with: device, processes, further settings of the program
INT4_EXPERTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "all-gather on an A2": ("Ascend910B3", 2, {"sharing": 2, "prompts": [[0, 1, 2], [3]]}),
    "MC2 on an A3": ("Ascend910_9391", 2, {"sharing": 2, "prompts": [[0, 1, 2], [3]]}),
    "places of a map": ("Ascend910B3", 2, INT8_EXPERTS["places of a map"][1]),
    "graphs": ("Ascend910B3", 1, INT8_EXPERTS["graphs"][1]),
    "a 950": ("Ascend950DT_9582", 1, {}),
    "latent attention and shared experts": ("Ascend910B3", 1, {"model": "deepseek3_groups", "cast_prompts": False}),
    "slices of experts on two ranks": ("Ascend910B3", 2, {"tensor_parallel": 2}),
    "full experts on two ranks": ("Ascend910B3", 2, {"tensor_parallel": 2, "sharing": 1}),
    "weight syncs of what changed": ("Ascend910B3", 1, {"delta": True}),
    "weight syncs of what changed, two ranks": ("Ascend910B3", 2, {"delta": True, "tensor_parallel": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INT4_EXPERTS)
def test_int4_experts_have_the_log_probs_of_their_definition_combined_with(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, ranks, settings = INT4_EXPERTS[name]
    monkeypatch.setenv("NPU_SIM_SOC", device)
    for report in run_ranks("rollout", ranks, INT4 | {"rounds": 1} | settings):
        check_definition(report)
        # where each token has one scale, whatever the ranks
        assert report.get("worst_one_scale", 1) > 0.1
        assert report.get("stays_damaged") == (True if "delta" in settings else None)
        assert (report["calls"].get("npu::npu_moe_distribute_dispatch_v2", 0) > 0) == ("MC2" in name)
        assert report["graphs"] == (len(GRAPHS["cudagraph_capture_sizes"]) if name == "graphs" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [False, True], ids=["slices of experts", "full experts"])
def test_int8_experts_on_tensor_parallel_ranks_have_a_scale_per_rank_of_each_token(shares: bool) -> None:
    layout = {"tensor_parallel": 2, "rounds": 1, "quantization": "int8"} | ({"sharing": 1} if shares else {})
    for report in run_ranks("rollout", 2, EXPERTS | layout):
        assert report["worst"] < 1e-5 and all(report["same_greedy"])
        assert report["worst_one_scale"] > 0.1  # where each token has one scale, whatever the ranks
        assert report["equal"] == [True] and report["other_weights_differ"] and len(set(report["proven"])) == 1


#: MXFP8 experts of a 950 -> processes, further settings of the program
MXFP8_EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "graphs": (1, {"generate": GRAPHS}),
    "shared by two devices": (
        2,
        {"sharing": 2, "prompts": [[0, 1, 2], [3]], "generate": {"infer_moe_token_dispatcher_type": "allgather"}},
    ),
    "slices on two ranks": (2, {"tensor_parallel": 2}),
    "full experts on two ranks": (
        *(2, {"tensor_parallel": 2, "sharing": 1, "generate": {"infer_moe_token_dispatcher_type": "allgather"}}),
    ),
    "weight syncs of what changed": (1, {"delta": True}),
    "weight syncs of what changed, two ranks": (2, {"delta": True, "tensor_parallel": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MXFP8_EXPERTS)
def test_mxfp8_experts_of_a_950_have_the_log_probs_of_their_definition_after_every_sync(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", "Ascend950DT_9582")
    ranks, settings = MXFP8_EXPERTS[name]
    model = "qwen3_moe_wide_blocks" if "tensor_parallel" in settings else "qwen3_moe_blocks"
    for report in run_ranks("rollout", ranks, BLOCKS | {"model": model, "dtype": "float32"} | settings):
        check_definition(report)
        assert all(report["same_greedy"]) and report.get("stays_damaged") == (True if "delta" in settings else None)
        assert report["damage"] == ["w13_weight", "w2_weight_scale"]
        assert report["calls"]["npu::npu_grouped_matmul"] == report["calls"]["npu::npu_grouped_matmul_swiglu_quant_v2"] > 0
        assert report["graphs"] == (len(GRAPHS["cudagraph_capture_sizes"]) if name == "graphs" else 0)


_SHARED = ["mlp.shared_experts.down_proj.weight", "mlp.shared_experts.gate_up_proj.weight"]
_ATTENTION = ["self_attn.o_proj.weight", "self_attn.qkv_proj.weight"]
_MLP = ["mlp.down_proj.weight", "mlp.gate_up_proj.weight"]
_EXPERTS = [f"mlp.experts.{name}" for name in _QWEN3_MOE]
#: further families -> their matrices in bytes
FAMILIES = {
    "qwen2_moe": [*_EXPERTS, *(name.replace("experts", "expert") for name in _SHARED), *_ATTENTION],
    "mixtral": [*(name.replace("mlp", "block_sparse_moe") for name in _EXPERTS), *_ATTENTION],
    "glm4_moe": [*_MLP, *_EXPERTS, *_SHARED, *_ATTENTION],
    "ernie4_5_moe": [*_MLP, *_EXPERTS, *_SHARED, *_ATTENTION],
    "hy_v3": [*_MLP, *_EXPERTS, *(name.replace("experts", "mlp") for name in _SHARED), *_ATTENTION],
    "deepseek_v2": [
        *(*_MLP, *_EXPERTS, *_SHARED),
        *(f"self_attn.{name}.weight" for name in ("kv_a_proj_with_mqa", "o_proj", "q_proj")),
    ],
}
SMALL = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_int8_experts_of_a_family_have_the_log_probs_of_their_definition(family: str) -> None:
    settings = {"family": family, "dtype": "float32", "cast_prompts": False, "quantization": "int8"}
    # latent attention has its own widths
    sizes = {} if family == "deepseek_v2" else SMALL
    (report,) = run_ranks("rollout", 1, settings | {"sizes": sizes, "prompts": [[0, 1]], "rounds": 1})
    check_definition(report)
    assert report["in_bytes"] == sorted(FAMILIES[family])


def _sizes(family: str, width: int) -> dict[str, int]:
    """Sizes of a family's model whose experts have rows of whole multiples of a width."""
    names = ("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "expert_hidden_dim")
    widths = dict.fromkeys(names, width)
    # latent attention has its own widths
    return widths if family == "deepseek_v2" else SMALL | widths | {"intermediate_size": width}


#: models of a 950 in MXFP8 -> settings of the program
MXFP8_FAMILIES: dict[str, dict[str, Any]] = {
    family: {"family": family, "sizes": _sizes(family, 64)} for family in FAMILIES
} | {model: {"model": model, "counts": False} for model in ("qwen3_5", "qwen3_next_blocks", "qwen3_5_moe_blocks")}


@pytest.mark.slow
@pytest.mark.parametrize("name", MXFP8_FAMILIES)
def test_mxfp8_of_a_family_on_a_950_has_the_log_probs_of_its_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", "Ascend950DT_9582")
    settings = {"dtype": "float32", "cast_prompts": False, "quantization": "mxfp8", "prompts": [[0, 1]], "rounds": 1}
    (report,) = run_ranks("rollout", 1, settings | MXFP8_FAMILIES[name])
    check_definition(report)
    assert report["in_bytes"] == sorted(FAMILIES.get(name, report["in_bytes"])) and len(report["in_bytes"]) >= 4


INT4_FAMILIES: dict[str, dict[str, Any]] = {
    family: {"family": family, "sizes": _sizes(family, 256)} for family in FAMILIES
} | {model: {"model": model, "counts": False} for model in ("qwen3_next_groups", "qwen3_5_moe_groups")}


@pytest.mark.slow
@pytest.mark.parametrize("name", INT4_FAMILIES)
def test_int4_experts_of_a_family_have_the_log_probs_of_their_definition(name: str) -> None:
    settings = {"dtype": "float32", "cast_prompts": False, "quantization": "w4a8", "prompts": [[0, 1]], "rounds": 1}
    (report,) = run_ranks("rollout", 1, settings | INT4_FAMILIES[name])
    check_definition(report)
    # experts are in int32 there, and the others in int8
    assert report["in_bytes"] == sorted(one for one in FAMILIES.get(name, report["in_bytes"]) if ".experts.w" not in one)


#: format of MiniMax-M2 -> device, processes, width of rows
MINIMAX_M2: dict[str | None, tuple[str, int, int]] = {
    None: ("Ascend910B3", 1, 64),
    "int8": ("Ascend910B3", 1, 64),
    "mxfp8": ("Ascend950DT_9582", 1, 64),
    "w4a8": ("Ascend910B3", 1, 256),
}
#: Triton kernels of the norms over all heads
_NORMS = ("triton::_split_qkv_and_compute_local_qk_var_kernel", "triton::_apply_global_rmsnorm_kernel")


@pytest.mark.slow
@pytest.mark.parametrize("quantization", MINIMAX_M2)
def test_minimax_m2_has_the_log_probs_of_its_definition_after_every_sync(
    quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, ranks, width = MINIMAX_M2[quantization]
    monkeypatch.setenv("NPU_SIM_SOC", device)
    sizes = {"hidden_size": width, "intermediate_size": width}
    settings = {"family": "minimax_m2", "dtype": "float32", "counts": False, "prompts": [[0, 1]] * ranks, "rounds": 1}
    for report in run_ranks("rollout", ranks, settings | {"sizes": sizes, "quantization": quantization}):
        if quantization is None:
            assert report["worst"] < 1e-4 and report["worst_other"] < 1e-4 and all(report["same_greedy"])
            assert report["equal"] == [True] and report["other_weights_differ"]
        else:
            check_definition(report)
        assert report["calls"][_NORMS[0]] == report["calls"][_NORMS[1]] > 0


LATENT = {"model": "deepseek3_latent", "dtype": "float32", "cast_prompts": False}


@pytest.mark.slow
def test_int8_with_latent_attention_and_shared_experts_has_the_log_probs_of_their_definition() -> None:
    (report,) = run_ranks("rollout", 1, LATENT | {"quantization": "int8", "rounds": 1})
    assert report["worst"] < 1e-4 and all(report["same_greedy"])
    assert report["equal"] == [True] and report["other_weights_differ"]
    assert len(set(report["proven"])) == 1
    weights, scales = ["down_proj.weight", "w13_weight"], ["down_proj.weight_scale", "w2_weight_scale"]
    copies = ["down_proj.weight_scale_fp32", "w13_weight_scale_fp32"]
    assert report["damage"] == [weights[0], scales[0], weights[1], scales[1], *copies]
    # kv_b_proj, of which attention folds further matrices, is none of them
    attention = [name for name in report["in_bytes"] if name.startswith("self_attn")]
    assert attention == [f"self_attn.{name}.weight" for name in ("fused_qkv_a_proj", "o_proj", "q_b_proj")]
    assert {f"mlp.shared_experts.{name}.weight" for name in ("gate_up_proj", "down_proj")} <= set(report["in_bytes"])
    assert report["calls"]["npu::npu_dequant_swiglu_quant"] > 0


#: latent attention in MXFP8 -> processes, further settings of the program
LATENT_BLOCKS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "graphs": (1, {"generate": GRAPHS}),
    "two ranks": (2, {"tensor_parallel": 2}),
    "weight syncs of what changed": (1, {"delta": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LATENT_BLOCKS)
def test_latent_attention_in_mxfp8_has_the_log_probs_of_its_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vllm-ascend's operator MLAPO, which is on by default on a 950 and reads copies that no sync replaces."""
    monkeypatch.setenv("NPU_SIM_SOC", "Ascend950DT_9582")
    ranks, settings = LATENT_BLOCKS[name]
    for report in run_ranks("rollout", ranks, LATENT | BLOCKS | {"model": "deepseek3_blocks"} | settings):
        check_definition(report)
        assert all(report["same_greedy"]) and report.get("stays_damaged") == (True if "delta" in settings else None)
        attention = [name for name in report["in_bytes"] if name.startswith("self_attn")]
        assert attention == [f"self_attn.{name}.weight" for name in ("fused_qkv_a_proj", "o_proj", "q_b_proj")]


@pytest.mark.slow
def test_latent_attention_has_the_log_probs_of_transformers() -> None:
    (report,) = run_ranks("rollout", 1, LATENT)
    assert report["worst"] < 1e-4 and all(report["same_greedy"])
    assert report["equal"] == [True, True] and report["other_weights_differ"]
    calls = report["calls"]
    prompts, tokens = calls["npu::npu_fused_infer_attention_score"], calls["npu::npu_fused_infer_attention_score_v2"]
    assert prompts > 0 and tokens > 0
    assert calls["npu::npu_kv_rmsnorm_rope_cache"] == calls["npu::npu_interleave_rope"] == prompts + tokens
    assert calls["npu::npu_transpose_batchmatmul"] == tokens


@pytest.mark.slow
def test_latent_prompts_in_chunks_and_with_shared_prefixes_have_the_log_probs_of_transformers() -> None:
    keys = {"enable_prefix_caching": True, "max_num_batched_tokens": 8}  # a prompt has 20
    (report,) = run_ranks("rollout", 1, LATENT | {"rounds": 1, "generate": keys})
    assert report["worst"] < 1e-4 and all(report["same_greedy"])
    assert report["equal"] == [True] and report["other_weights_differ"]
    assert report["calls"]["atb::npu_paged_cache_load"] == report["calls"]["npu::npu_attention_update"] > 0


@pytest.mark.slow
def test_latent_prompts_in_float32_differ_by_vllm_ascends_cast_to_bf16() -> None:
    exact = LATENT | {"model": "deepseek3_dense", "rounds": 0}  # with experts, a rounding may choose others
    (report,), (cast,) = (run_ranks("rollout", 1, exact | {"cast_prompts": cast}) for cast in (False, True))
    assert report["worst"] < 1e-4 < cast["worst"] < BF16


@pytest.mark.slow
def test_latent_attention_has_its_heads_on_two_dies() -> None:
    first, second = run_ranks("rollout", 2, LATENT | {"tensor_parallel": 2, "rounds": 1})
    assert first["tokens"] == second["tokens"] and first["equal"] == second["equal"] == [True]
    assert first["worst"] < 1e-4 and all(first["same_greedy"])


DELTA_NETS = {"dtype": "float32", "cast_prompts": False, "counts": False}
#: operators of vllm-ascend that prompts and new tokens have
_RULE = ("npu::chunk_gated_delta_rule_fwd_h", "_C_ascend::npu_recurrent_gated_delta_rule")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_delta_nets_have_the_log_probs_of_transformers_after_every_sync(model: str) -> None:
    (report,) = run_ranks("rollout", 1, DELTA_NETS | {"model": model})
    assert report["worst"] < 1e-5 and report["worst_cut"] < 1e-5 and all(report["same_greedy"])
    assert report["equal"] == [True, True] and report["other_weights_differ"]
    calls = report["calls"]
    assert calls[_RULE[0]] == calls["npu::chunk_fwd_o"] == calls["triton::solve_tril_16x16_kernel"] > 0
    assert calls[_RULE[1]] > 0 and calls["_C_ascend::npu_causal_conv1d_custom"] == calls["npu::npu_fused_gdn_gating"] > 0
    assert (calls.get("npu::triton_split_qkv_rmsnorm_mrope", 0) > 0) == (model != "qwen3_next")


#: what delta nets are combined with: model, processes, further settings of the program
DELTA_COMBINED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "parts of prompts beside tokens": ("qwen3_next", 1, {"rounds": 0, "generate": {"max_num_batched_tokens": 8}}),
    "prompts of several chunks": ("qwen3_5", 1, {"rounds": 0, "longest": 150, "generate": {"max_model_len": 256}}),
    "graphs": ("qwen3_next", 1, {"rounds": 1, "generate": GRAPHS}),
    "two devices": ("qwen3_5", 2, {"rounds": 1, "tensor_parallel": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DELTA_COMBINED)
def test_delta_nets_have_the_log_probs_of_transformers_combined_with(name: str) -> None:
    model, ranks, settings = DELTA_COMBINED[name]
    for report in run_ranks("rollout", ranks, DELTA_NETS | {"model": model} | settings):
        assert report["worst"] < 1e-5 and all(report["same_greedy"]) and all(report["equal"])
        assert report["other_weights_differ"]
        assert report["graphs"] == (len(GRAPHS["cudagraph_capture_sizes"]) if name == "graphs" else 0)


#: device, format of the model, the limit of the mean
DELTA_DEVICES = [("Ascend950DT_9582", "float32", 1e-5), ("Ascend910B3", "bfloat16", 0.03)]


@pytest.mark.slow
@pytest.mark.parametrize(("device", "dtype", "limit"), DELTA_DEVICES)
def test_delta_nets_on_a_950_and_in_bfloat16_have_the_log_probs_of_transformers(
    device: str, dtype: str, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", device)
    # in bfloat16 nothing of vllm-ascend is changed
    settings = {"model": "qwen3_5", "dtype": dtype, "counts": False, "rounds": 1, "cast_prompts": dtype == "bfloat16"}
    (report,) = run_ranks("rollout", 1, settings)
    assert report["mean"] < limit
    assert report["equal"] == [True] and report["other_weights_differ"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_delta_nets_in_int8_have_the_log_probs_of_their_definition_after_every_sync(model: str) -> None:
    (report,) = run_ranks("rollout", 1, DELTA_NETS | {"model": model, "quantization": "int8", "rounds": 1})
    check_definition(report)
    # the narrow projections of the rule keep their format
    nets = [name for name in report["in_bytes"] if name.startswith("linear_attn")]
    assert nets == ["linear_attn.in_proj_qkvz.weight", "linear_attn.out_proj.weight"]
    assert set(INT8_DAMAGE) <= set(report["damage"]) and not any(text.startswith("nothing") for text in report["damage"])


#: Qwen3.5 as it is published, without its tower (`language_model_only`) -> device, processes, settings of the program
WITHOUT_TOWER: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense, int8": ("Ascend910B3", 1, {"model": "qwen3_5_vl", "quantization": "int8"}),
    "dense, MXFP8": ("Ascend950DT_9582", 1, {"model": "qwen3_5_vl", "quantization": "mxfp8"}),
    "experts, int8, delta syncs and graphs": (
        *("Ascend910B3", 1),
        {"model": "qwen3_5_moe_vl", "quantization": "int8", "delta": True, "generate": GRAPHS},
    ),
    "experts, int8, two tensor parallel ranks": (
        *("Ascend910B3", 2),
        {"model": "qwen3_5_moe_vl", "quantization": "int8", "tensor_parallel": 2, "prompts": [[0, 1]] * 2},
    ),
    "experts, int8, shared on an A3": (
        *("Ascend910_9391", 2),
        {"model": "qwen3_5_moe_vl", "quantization": "int8", "sharing": 2, "prompts": [[0, 1], [2]]},
    ),
    "experts, MXFP8": ("Ascend950DT_9582", 1, {"model": "qwen3_5_moe_vl_blocks", "quantization": "mxfp8"}),
    "experts, W4A8": ("Ascend910B3", 1, {"model": "qwen3_5_moe_vl_groups", "quantization": "w4a8", "seed": 8}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_TOWER)
def test_published_qwen3_5_without_its_tower_has_the_log_probs_of_the_definition(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, ranks, settings = WITHOUT_TOWER[name]
    monkeypatch.setenv("NPU_SIM_SOC", device)
    for report in run_ranks("rollout", ranks, DELTA_NETS | {"tower": False, "rounds": 1, "prompts": [[0, 1]]} | settings):
        check_definition(report)
        assert report.get("stays_damaged") == (True if settings.get("delta") else None)
        nets = [name for name in report["in_bytes"] if name.startswith("linear_attn")]
        assert nets == ["linear_attn.in_proj_qkvz.weight", "linear_attn.out_proj.weight"]
        assert not any(text.startswith("nothing") for text in report["damage"])
        assert report["graphs"] == (len(GRAPHS["cudagraph_capture_sizes"]) if "graphs" in name else 0)


#: int8 on two tensor parallel ranks: row-parallel matrices of a delta net, of a gated shared expert beside experts
INT8_RANKS: dict[str, dict[str, Any]] = {
    "delta net": {"model": "qwen3_5", "counts": False},
    "gated shared expert": {"family": "qwen2_moe", "sizes": SMALL},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INT8_RANKS)
def test_int8_of_two_tensor_parallel_ranks_has_the_log_probs_of_its_definition(name: str) -> None:
    settings = {"dtype": "float32", "cast_prompts": False, "quantization": "int8", "tensor_parallel": 2, "rounds": 1}
    for report in run_ranks("rollout", 2, settings | INT8_RANKS[name]):
        check_definition(report)
        assert report["worst_one_scale"] > 0.02


#: further families in int8 whose experts are in slices on two ranks, beside latent attention and delta nets: settings
INT8_SLICES: dict[str, dict[str, Any]] = {
    family: {"family": family, "sizes": {} if family == "deepseek_v2" else SMALL}
    for family in FAMILIES
    if family != "qwen2_moe"
} | {model: {"model": model} for model in ("deepseek3_latent", "qwen3_next", "qwen3_5_moe")}


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize("name", INT8_SLICES)
def test_int8_of_two_ranks_with_delta_syncs_has_the_log_probs_of_its_definition(name: str) -> None:
    settings = {"dtype": "float32", "cast_prompts": False, "quantization": "int8", "tensor_parallel": 2, "delta": True}
    settings |= {"rounds": 1, "prompts": [[0, 1]] * 2, "counts": False}
    for report in run_ranks("rollout", 2, settings | INT8_SLICES[name]):
        check_definition(report)
        assert report["stays_damaged"]


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_reported_experts_in_int8_on_two_ranks_are_those_that_transformers_chooses(family: str) -> None:
    settings = {"family": family, "sizes": SMALL, "dtype": "float32", "quantization": "int8", "tensor_parallel": 2}
    for report in run_ranks("rollout", 2, settings | {"routing": True, "rounds": 0}):
        assert report["same_experts"] == [True] * 4 and report["worst"] < 1e-5


#: keys that change no token, by a run with all that the rules allow together
SAME_TOKENS: dict[str, dict[str, Any]] = {
    "prefixes are shared, nothing more is freed in sleep": {"enable_prefix_caching": True, "sleep_mode_extra_cleanup": False},
    "HCCL's buffers are freed in sleep": {"sleep_mode_extra_cleanup": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME_TOKENS)
def test_keys_that_change_no_token(name: str, alone: dict[str, Any]) -> None:
    (report,) = run_ranks("rollout", 1, {"dtype": "float32", "generate": SAME_TOKENS[name]})
    assert report["tokens"] == alone["tokens"] and report["worst"] < 1e-4
    assert report["equal"] == [True, True] and report["other_weights_differ"]


@pytest.mark.slow
def test_graphs_that_were_captured_once_read_the_weights_of_every_push(alone: dict[str, Any]) -> None:
    (report,) = run_ranks("rollout", 1, {"dtype": "float32", "generate": GRAPHS})
    assert report["tokens"] == alone["tokens"] and report["worst"] < 1e-4 and all(report["same_greedy"])
    assert report["equal"] == [True, True] and report["other_weights_differ"]
    assert report["graphs"] == len(GRAPHS["cudagraph_capture_sizes"])  # after the second sleep as after the start


#: (name of a device, its number, its kind)
DEVICES = [("Ascend910B3", 223, "A2"), ("Ascend910_9391", 250, "A3"), ("Ascend950DT_9582", 260, "A5")]
#: (devices that share experts, tokens of the step) -> exchange on A2, A3, 950, by the rules written in vllm-ascend's docstring
EXCHANGES: dict[tuple[int, int], tuple[str, str, str]] = {
    (1, 8): ("ALLGATHER", "ALLGATHER", "ALLGATHER"),
    (4, 8): ("ALLGATHER", "MC2", "MC2"),
    (4, 100): ("ALLGATHER", "ALLTOALL", "ALLGATHER"),
    (16, 8): ("MC2", "MC2", "MC2"),
    (16, 100): ("ALLGATHER", "ALLTOALL", "ALLTOALL"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("device", "number", "kind"), DEVICES)
def test_each_device_is_taken_for_what_it_is_and_chooses_its_exchange(
    device: str, number: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", device)
    steps, column = list(EXCHANGES), [name for _, _, name in DEVICES].index(kind)
    settings = {"steps": steps, "capacity": 16, "top_k": 8}
    (report,) = run_ranks("experts_exchange", 1, settings)
    assert report == [number, kind, [EXCHANGES[step][column] for step in steps], None]
    (report,) = run_ranks("experts_exchange", 1, settings | {"infer_moe_token_dispatcher_type": "allgather"})
    assert report[2:] == [["ALLGATHER"] * len(steps), None]


@pytest.mark.slow
def test_an_a3_that_exchanges_by_all_gather_samples_the_tokens_of_a_single_process(
    all_experts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", "Ascend910_9391")
    layout = {"sharing": 2, "prompts": [[0, 1, 2], [3]], "rounds": 1}
    keys = {"generate": {"infer_moe_token_dispatcher_type": "allgather"}}
    for numbers, report in zip(layout["prompts"], run_ranks("rollout", 2, EXPERTS | layout | keys), strict=True):
        assert report["tokens"] == [all_experts["tokens"][number] for number in numbers]
        assert report["worst"] < 1e-4 and report["equal"] == [True]


#: the end token is the first response's third token
SAMPLING = [{"repetition_penalty": 1.0}, {"repetition_penalty": 1.5, "ignore_eos": True}]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["Ascend910_9391", "Ascend950DT_9582"])
def test_an_a3_and_a_950_sample_the_tokens_of_transformers(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", device)
    (report,) = run_ranks("rollout", 1, {"dtype": "float32", "rounds": 1, "sampling": SAMPLING})
    assert report["worst"] < 1e-4 and report["worst_cut"] < 1e-4 and all(report["same_greedy"])
    assert report["equal"] == [True] and report["other_weights_differ"]
    (ended, is_plain), (lengths, is_penalized) = report["limited"]
    assert is_plain and is_penalized and ended[0] <= 3 and set(lengths) == {8}
    written = {"npu::npu_scatter_pa_kv_cache", "atb::_npu_reshape_and_cache"} & report["calls"].keys()
    assert written == {"npu::npu_scatter_pa_kv_cache" if "950" in device else "atb::_npu_reshape_and_cache"}


#: operators of experts that a 950 has in place of vllm-ascend's own
OF_950 = ("npu::npu_moe_init_routing_v2", "npu::npu_moe_gating_top_k")


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["allgather", "auto"])
def test_experts_on_two_devices_of_a_950_sample_the_tokens_of_transformers(
    exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", "Ascend950DT_9582")
    layout = {"sharing": 2, "prompts": [[0, 1, 2], [3]], "rounds": 1}
    keys = {"generate": {"infer_moe_token_dispatcher_type": exchange}}
    for report in run_ranks("rollout", 2, EXPERTS | layout | keys):
        assert report["worst"] < 1e-4 and all(report["same_greedy"])
        assert report["equal"] == [True] and report["other_weights_differ"]
        assert (report["calls"].get("npu::npu_moe_distribute_dispatch_v2", 0) > 0) == (exchange == "auto")
        assert report["calls"][OF_950[1]] > 0


@pytest.mark.slow
def test_latent_prompts_of_a_950_have_the_log_probs_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", "Ascend950DT_9582")
    keys = {"enable_prefix_caching": True, "max_num_batched_tokens": 8}  # a prompt has 20
    (report,) = run_ranks("rollout", 1, LATENT | {"rounds": 1, "generate": keys})
    assert report["worst"] < 1e-4 and all(report["same_greedy"]) and report["equal"] == [True]
    assert report["calls"]["npu::npu_gather_pa_kv_cache"] == report["calls"]["npu::npu_attention_update"] > 0
