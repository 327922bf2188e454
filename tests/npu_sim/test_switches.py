"""Switches together: each run trains, saves, resumes, and has every number of the run without them.

A run takes as many switches as the rules allow in one model and layout, so that pairs of them meet too; `switches.py` lists
which switch is in which run. Switches that change the numbers are compared with the CPU, which has them as well.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from test_engine import losses

SOURCE = os.environ.get("MINDSPEED_SRC")
pytestmark = pytest.mark.skipif(not SOURCE, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed core_r0.16.0")

STEPS, SAVED = 4, 2
#: rates differ in every step, so that one from before a load is found
SCHEDULE = {"lr_decay_style": "linear", "train_iters": 8, "min_lr": 0.0, "lr": 5e-3}
#: bf16 keeps 8 bits
BF16 = 2e-3
#: sums in another order in float32
_FP32 = 2e-5


@dataclass(frozen=True)
class Case:
    """A model in a layout, and switches on top.

    Attributes:
        model: of `programs/engine.py`.
        switches: keys that are on in one run and off in the other.
        size: processes.
        layout: keys of both runs.
        rel: relative difference of losses; 0 where every number is equal, weights too.
        bf16: format of both.
    """

    model: str
    switches: dict[str, Any]
    size: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    rel: float = 0.0
    bf16: bool = True


#: compared with the same layout without the switches
UNCHANGED: dict[str, Case] = {
    "memory and checkpoints": Case(
        "qwen2",
        {
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", "layernorm", "mlp"],
            "npu_deterministic": True,
            "async_save": True,
            "keep_last": 1,
            "no_check_for_nan_in_loss_and_grad": True,
            "no_save_rng": True,
            "no_load_rng": True,
            "no_load_optim": False,
            "no_save_optim": False,
            "swap_optimizer": True,
        },
    ),
    "gradients in buckets on four ranks": Case(
        "qwen2",
        {
            "overlap_grad_reduce": True,
            "ddp_bucket_size": 4096,
            "check_weight_copies_interval": 1,
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 1,
            "use_tp_pp_dp_mapping": True,
            "no_load_rng": False,
            "no_save_rng": False,
        },
        4,
        {"pipeline_model_parallel_size": 2},
        rel=BF16,  # gradients are added in another order, and bf16 weights differ in their last bit
    ),
    "latent attention and experts on two ranks": Case(
        "deepseek3",
        {
            "recompute_granularity": "selective",
            "recompute_modules": ["mla_up_proj", "moe", "shared_experts"],
            "moe_token_dispatcher_type": "alltoall_seq",
            "use_fused_moe_token_permute_and_unpermute": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
        2,
        {"expert_model_parallel_size": 2},
        rel=_FP32,  # gradients are added in another order; after four steps in bf16 that is 0.2 % of a loss
        bf16=False,
    ),
    "grouped experts": Case(
        "qwen3_moe",
        {
            "recompute_granularity": "selective",
            "recompute_modules": ["moe_act"],
            "moe_token_dispatcher_type": "alltoall",
            "moe_permutation_async_comm": True,
        },
        2,
        {"expert_model_parallel_size": 2, "moe_grouped_gemm": True},
    ),
    "experts over all ranks of a tensor": Case(
        "qwen3_moe",
        {"moe_tp_extend_ep": True},
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        rel=_FP32,
        bf16=False,
    ),
    "experts gathered": Case(
        "qwen3_moe", {"moe_token_dispatcher_type": "allgather"}, 2, {"expert_model_parallel_size": 2}, rel=BF16
    ),
    "ring attention in one update": Case(
        "qwen2",
        {"use_fused_ring_attention_update": True},
        2,
        {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo"},
        rel=BF16,
    ),
    "weights in two halves": Case(
        "qwen2",
        {"reuse_fp32_param": True, "recompute_activation_function": True, "async_save": True},
        2,
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
    "weights in two halves on every rank": Case(
        "deepseek3",
        {"reuse_fp32_param": True, "recompute_activation_function": True},
        2,
        {
            "use_distributed_optimizer": False,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "grad_reduce_in_fp32": False,
        },
    ),
    "grouped experts with activations computed again": Case(
        "qwen3_moe",
        {"recompute_activation_function": True, "reuse_fp32_param": True},
        2,
        {"expert_model_parallel_size": 2, "moe_grouped_gemm": True},
    ),
    "layers by a list": Case("qwen2", {"num_layer_list": "1,3"}, 2, {"pipeline_model_parallel_size": 2}, rel=BF16),
    "empty layers": Case("qwen2", {"noop_layers": "1,4"}, 2, {"pipeline_model_parallel_size": 2}, rel=BF16),
}


def train(case: Case, keys: dict[str, Any], folder: Path | None = None, **settings: Any) -> list[Any]:
    """Return the reports of a run with weights that are streamed after each step; up to `SAVED` where it saves to `folder`."""
    common = {"mode": "mindspeed", "bf16": case.bf16, "model": case.model, "stream_each_step": True, "steps": STEPS}
    settings = common | settings
    if folder is not None:
        settings |= {"save": str(folder), "steps": SAVED}
    return run_ranks("engine", case.size, settings | {"layout": SCHEDULE | case.layout | keys}, timeout_s=600)


def check(reports: list[Any], want: list[Any], rel: float) -> None:
    """The steps have the losses, norms and weights of the steps that are wanted."""
    if rel == 0.0:
        assert [[{**step, "resident": None} for step in report["steps"]] for report in reports] == [
            [{**step, "resident": None} for step in report["steps"]] for report in want
        ]
        return
    for got, expected in zip(losses(reports), losses(want), strict=True):
        assert got[0] == pytest.approx(expected[0], rel=rel) and got[1] == pytest.approx(expected[1], rel=5 * rel)


def part(reports: list[Any], start: int, end: int) -> list[Any]:
    return [{**report, "steps": report["steps"][start:end]} for report in reports]


@pytest.mark.slow
@pytest.mark.parametrize("name", UNCHANGED)
def test_a_run_with_switches_saves_and_resumes_with_the_numbers_of_the_plain_one(name: str, tmp_path: Path) -> None:
    case = UNCHANGED[name]
    plain = train(case, {})
    check(train(case, case.switches, tmp_path), part(plain, 0, SAVED), case.rel)
    check(train(case, case.switches, load=str(tmp_path)), part(plain, SAVED, STEPS), case.rel)


_MUON = {"optimizer": "muon", "use_distributed_optimizer": False}
_EXPERTS = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
_PREDICTS = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5}
_ADAPTERS = {"lora_target_modules": ["linear_qkv", "linear_proj"], "lora_r": 4, "lora_alpha": 8}
#: compared with the CPU, which has the same keys
CHANGED: dict[str, Case] = {
    "muon": Case("qwen2", _MUON | {"muon_use_nesterov": True, "muon_scale_mode": "unit_rms_norm"}, rel=_FP32, bf16=False),
    "muon on two ranks": Case(
        "qwen2",
        _MUON
        | {
            "muon_scale_mode": "shape_scaling",
            "muon_extra_scale_factor": 0.5,
            "muon_split_qkv": False,
            "muon_tp_mode": "blockwise",
        },
        2,
        {"tensor_model_parallel_size": 2},
        rel=_FP32,
        bf16=False,
    ),
    "balanced by sequence": Case(
        "qwen3_moe", _EXPERTS | {"moe_router_load_balancing_type": "seq_aux_loss"}, rel=_FP32, bf16=False
    ),
    "balanced by Sinkhorn": Case("qwen3_moe", {"moe_router_load_balancing_type": "sinkhorn"}, rel=_FP32, bf16=False),
    "not balanced": Case("qwen3_moe", {"moe_router_load_balancing_type": "none"}, rel=_FP32, bf16=False),
    "chosen by softmax": Case("qwen3_moe", {"moe_router_load_balancing_type": "softmax_topk"}, rel=_FP32, bf16=False),
    "balanced by a bias": Case("deepseek3", {"moe_router_load_balancing_type": "noaux_tc"}, rel=_FP32, bf16=False),
    "prediction layers by themselves": Case(
        "deepseek3_predicting", _PREDICTS | {"mtp_detach_heads": True}, rel=_FP32, bf16=False
    ),
    "prediction layers with the model": Case(
        "deepseek3_predicting", _PREDICTS | {"mtp_detach_heads": False}, rel=_FP32, bf16=False
    ),
    "head in float32": Case("qwen2", {"fp32_lm_head": True}, rel=BF16),
    "head in bfloat16, a part of the vocabulary at a time": Case(
        "qwen2", {"fp32_lm_head": False, "loss_vocab_chunk_size": 48}, rel=BF16
    ),
    "adapters that are saved by themselves": Case("qwen2", _ADAPTERS | {"lora_ckpt_filter": True}, rel=BF16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_a_run_with_switches_saves_and_resumes_with_the_numbers_of_the_cpu(name: str, tmp_path: Path) -> None:
    case = CHANGED[name]
    on_cpu = train(case, case.switches, mode="cpu", stream_each_step=False)
    check(train(case, case.switches, tmp_path), part(on_cpu, 0, SAVED), case.rel)
    check(train(case, case.switches, load=str(tmp_path)), part(on_cpu, SAVED, STEPS), case.rel)


#: on another device; its operators' sums are in the same order here
OF_950 = {
    "dense": Case("qwen2", {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}),
    "experts of two ranks": Case("qwen3_moe", {}, 2, {"expert_model_parallel_size": 2, "moe_grouped_gemm": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_950)
def test_a_950_trains_saves_and_resumes_with_the_numbers_of_an_a2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = OF_950[name]
    of_an_a2 = train(case, {})
    monkeypatch.setenv("NPU_SIM_SOC", "Ascend950DT_9582")
    first = train(case, case.switches, tmp_path)
    check(first, part(of_an_a2, 0, SAVED), 0.0)
    check(train(case, case.switches, load=str(tmp_path)), part(of_an_a2, SAVED, STEPS), 0.0)
    assert [[report["soc"] for report in reports] for reports in (of_an_a2, first)] == [[223] * case.size, [260] * case.size]


@pytest.mark.slow
def test_a_950_says_that_it_has_no_products_fused_with_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", "Ascend950DT_9582")
    with pytest.raises(AssertionError, match="use_ascend_mc2: the operators are those of A2 and A3"):
        train(Case("qwen2", {}, 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}), {"use_ascend_mc2": True})


@pytest.mark.slow
def test_a_checkpoint_without_an_optimizer_starts_one_as_on_the_cpu(tmp_path: Path) -> None:
    case, reports = Case("qwen2", {"no_save_optim": True, "no_load_optim": True}, rel=_FP32, bf16=False), []
    for mode in ("cpu", "mindspeed"):
        folder = tmp_path / mode
        train(case, case.switches, folder, mode=mode, stream_each_step=False)
        reports.append(train(case, case.switches, load=str(folder), mode=mode, stream_each_step=False))
    check(reports[1], reports[0], case.rel)


@pytest.mark.slow
def test_dropout_goes_on_after_a_checkpoint_where_it_was(tmp_path: Path) -> None:
    case = Case("qwen2", _ADAPTERS | {"attention_dropout": 0.1, "hidden_dropout": 0.1, "lora_dropout": 0.1})
    whole, plain = train(case, case.switches), train(case, _ADAPTERS)
    assert losses(whole) != losses(plain)
    check(train(case, case.switches, tmp_path), part(whole, 0, SAVED), 0.0)
    check(train(case, case.switches, load=str(tmp_path)), part(whole, SAVED, STEPS), 0.0)
