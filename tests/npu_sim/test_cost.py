"""What a step asks of the device: `mindspeed-rl npu-cost` beside plain Megatron + MindSpeed.

The counts are in docs/ascend.md, too. One that falls is lowered here and there; one that rises has its reason there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.cli import npu_cost

SOURCE = os.environ.get("MINDSPEED_SRC")
pytestmark = pytest.mark.skipif(not SOURCE, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed core_r0.16.0")

COMMON = (
    *("--config-name", "grpo_tiny_cpu", "--json", "megatron_training.bf16=true", "generate_config.dtype=bfloat16"),
    "actor_config.micro_batch_size=2",
)
#: wide enough for logits to be what memory is spent on
VOCABULARY = "model.tiny_qwen25.padded_vocab_size=4096"
ONE_RANK = "actor_config.tensor_model_parallel_size=1"
#: two layers, two micro-batches, one rank
MOST_KERNELS = {"log-probs": 122, "update": 462, "push": 47}
#: an update reads norm, finite check (a kernel for each buffer of gradients) and metrics together; a push reads its
#: fingerprints, then whether any rank differs
MOST_WAITS = {"log-probs": 1, "update": 1, "push": 2, "offload": 2, "onload": 0}
#: TP2 with sequence parallelism, four layers, four micro-batches of two packed rows
LARGER = ("actor_config.sequence_parallel=true", "--layers", "4", "--rows", "8")
MOST_KERNELS_LARGER = {"log-probs": 382, "update": 1240, "push": 61}
#: with products and norms that add to the sums of gradients
ADDED = ("actor_config.gemm_gradient_accumulation_fusion=true",)
MOST_KERNELS_ADDED = {"log-probs": 382, "update": 1144, "push": 61}
#: Qwen3-MoE of the tests: every layer has four experts, two of them for each token
EXPERTS = (
    *("+model.tiny_qwen25.num_experts=4", "+model.tiny_qwen25.moe_router_topk=2", "+model.tiny_qwen25.moe_ffn_hidden_size=64"),
    *("+model.tiny_qwen25.qk_layernorm=true", "+model.tiny_qwen25.kv_channels=32", "model.tiny_qwen25.add_qkv_bias=false"),
    *("+actor_config.moe_grouped_gemm=true", ONE_RANK),
)
#: one rank that has all experts, two layers, two micro-batches; two ranks that share them
MOST_KERNELS_EXPERTS = {"log-probs": 212, "update": 636, "push": 86}
MOST_KERNELS_SHARED_EXPERTS = {"log-probs": 244, "update": 688, "push": 72}
#: phases of a step outside the passes of its micro-batches
OUTSIDE = ("log-probs", "update", "update / gradients", "update / optimizer", "push", "push / proof", "offload")
#: columns of the loss, its terms, and blocks that the allocator does not cut
MORE_MEMORY = 1.03


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run file names folders of the quickstart, whose model has other layers than the block: where it ran, they exist."""
    monkeypatch.chdir(tmp_path)


def counted(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, Any]:
    assert npu_cost.main([*COMMON, VOCABULARY, *overrides]) == 0
    text = capsys.readouterr().out
    return json.loads(text[text.index("{") :])


def check(result: dict[str, Any], limits: dict[str, int]) -> None:
    check_kernels(result, limits)
    ours, plain = result["phases"]["ours"], result["phases"]["plain"]
    waits = result["counted"]["ours"]["waits"]
    assert [wait for wait in waits if wait[0] not in OUTSIDE] == []
    assert {phase: ours[phase]["waits"] for phase in MOST_WAITS} == MOST_WAITS
    copies = result["counted"]["ours"]["copies"]
    blocking = [(phase, kind) for phase, kind, _, _ in copies if "queued" not in kind or "not" in kind]
    assert blocking == [(phase, "to the host, blocking") for phase in ("update", "push / proof")]
    check_push(ours["push"], result["least"]["push"])
    for phase in ("log-probs / forward", "update / forward"):
        assert ours[phase]["kernels"] <= plain[phase]["kernels"]
    for phase in ("log-probs", "update"):
        assert ours[phase]["kernels"] <= plain[phase]["kernels"]
        assert ours[phase]["waits"] <= plain[phase]["waits"]
        assert ours[phase]["collective_mib"] <= plain[phase]["collective_mib"] + 1e-4
        assert ours[phase]["peak_mib"] <= MORE_MEMORY * plain[phase]["peak_mib"]
        assert ours[phase]["copies"] <= plain[phase]["copies"]
        assert ours[phase]["kernels"] >= result["least"][phase]["kernels"]


def check_kernels(result: dict[str, Any], limits: dict[str, int]) -> None:
    assert {phase: kernels for phase in limits if (kernels := result["phases"]["ours"][phase]["kernels"]) > limits[phase]} == {}


def check_push(ours: dict[str, float], least: dict[str, float]) -> None:
    """No weight travels that the rank has or its engine does not need; the fingerprints are 8 bytes for each slice."""
    assert 0 < least["kernels"] <= ours["kernels"]
    assert least["collective_bytes"] <= ours["collective_mib"] * 2**20 <= 1.01 * least["collective_bytes"] + 4096


def test_no_pass_waits_and_a_step_asks_for_no_more_than_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    result = counted(capsys, ONE_RANK)
    assert result["counted on"].startswith("a simulated NPU")
    check(result, MOST_KERNELS)


@pytest.mark.slow
def test_tensor_parallel_ranks_ask_for_no_more_than_they_did_and_exchange_no_more_than_plain_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = counted(capsys, *LARGER)
    check(result, MOST_KERNELS_LARGER)


@pytest.mark.slow
def test_products_that_add_to_the_sums_of_gradients_save_their_additions(capsys: pytest.CaptureFixture[str]) -> None:
    check(counted(capsys, *LARGER, *ADDED), MOST_KERNELS_ADDED)


@pytest.mark.slow
def test_a_rank_with_all_experts_waits_in_no_layer(capsys: pytest.CaptureFixture[str]) -> None:
    check(counted(capsys, *EXPERTS), MOST_KERNELS_EXPERTS)


@pytest.mark.slow
def test_ranks_that_share_experts_wait_for_the_sizes_of_the_exchange_alone(capsys: pytest.CaptureFixture[str]) -> None:
    result = counted(capsys, *EXPERTS, "actor_config.expert_model_parallel_size=2")
    inside = [wait for wait in result["counted"]["ours"]["waits"] if wait[0] not in OUTSIDE]
    # two layers, two micro-batches; the host tells the exchange how many rows go where
    assert [(phase, reason, count) for phase, reason, _, count in inside] == [
        ("log-probs / forward", "event", 4),
        ("update / forward", "event", 4),
    ]
    check_kernels(result, MOST_KERNELS_SHARED_EXPERTS)
    ours, plain = result["phases"]["ours"], result["phases"]["plain"]
    check_push(ours["push"], result["least"]["push"])
    assert ours["push"]["waits"] == MOST_WAITS["push"]
    for phase in ("log-probs", "update"):
        assert ours[phase]["kernels"] <= plain[phase]["kernels"]
        assert ours[phase]["waits"] <= plain[phase]["waits"]


@pytest.mark.slow
def test_a_layer_more_costs_no_more_kernels_than_in_plain_megatron(capsys: pytest.CaptureFixture[str]) -> None:
    """The difference of two depths is free of what loss and head need."""
    kernels = []
    for layers in ("2", "3"):
        phases = counted(capsys, ONE_RANK, "--layers", layers)["phases"]
        kernels.append({who: {at: phases[who][at]["kernels"] for at in ("log-probs", "update")} for who in phases})
    for phase in ("log-probs", "update"):
        mine, theirs = (kernels[1][who][phase] - kernels[0][who][phase] for who in ("ours", "plain"))
        assert 0 < mine <= theirs
