"""Slices go from training shards into an engine's layout, bit for bit what its loader makes of a checkpoint, and proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from push_jobs import Case, deliver, tamper
from ranks import Ranks
from transformers import DeepseekV3Config, Qwen2Config, Qwen2MoeConfig, Qwen3MoeConfig

_SIZES: dict[str, Any] = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 8}


def _written(entry: str, config: Any, **changes: Any) -> dict[str, Any]:
    return config.to_dict() | {"architectures": [entry]} | changes


TIED = _written("Qwen2ForCausalLM", Qwen2Config(**_SIZES, tie_word_embeddings=True))
ONE_HEAD = _written("Qwen2ForCausalLM", Qwen2Config(**_SIZES | {"num_key_value_heads": 1}, tie_word_embeddings=False))
FOUR_HEADS = _written("Qwen2ForCausalLM", Qwen2Config(**_SIZES | {"num_key_value_heads": 4, "vocab_size": 96}))
WIDE = FOUR_HEADS | {"hidden_size": 128, "intermediate_size": 256}
MOE = _written("Qwen3MoeForCausalLM", Qwen3MoeConfig(**_SIZES, **_EXPERTS))
SHARED = _written("Qwen2MoeForCausalLM", Qwen2MoeConfig(**_SIZES, **_EXPERTS, shared_expert_intermediate_size=32))
LATENT = _written(
    "DeepseekV3ForCausalLM",
    DeepseekV3Config(
        **_SIZES | {"num_key_value_heads": 4},
        q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1,
    ),
    num_nextn_predict_layers=0,
)  # fmt: skip
PP, TP, TP_PP = {"pp": 2}, {"tp": 2}, {"tp": 2, "pp": 2}

#: name -> (processes, case)
CASES = {
    "TP2 PP2 to TP1x4": (4, Case(TIED, TP_PP, 1)),
    "TP4 to TP2x2": (4, Case(FOUR_HEADS, {"tp": 4}, 2)),
    "PP2 DP2 to TP4, one key/value head": (4, Case(ONE_HEAD, PP, 4)),
    "EP2 TP2 to EP4": (4, Case(MOE, {"tp": 2, "ep": 2, "etp": 1}, 2, 4, grouped=True)),
    "EP2 TP2 latent to EP4": (4, Case(LATENT, {"tp": 2, "ep": 2, "etp": 2}, 2, 4, transposed=True)),
    "disjoint TP2 to TP2": (4, Case(TIED, TP, 2, train_ranks=2)),
    "disjoint EP2 to EP2": (4, Case(SHARED, {"ep": 2}, 2, 2, train_ranks=2)),
    "TP2 to TP2": (2, Case(TIED, TP, 2)),
    "PP2 to TP1x2, bfloat16": (2, Case(TIED, PP, 1, dtype=torch.bfloat16)),
    "PP2 to TP2": (2, Case(ONE_HEAD, PP, 2)),
    "EP2 to TP2": (2, Case(MOE, {"ep": 2}, 2, transposed=True)),
    "EP2 grouped to TP1x2, shared experts": (2, Case(SHARED, {"ep": 2}, 1, grouped=True)),
    "PP2 to TP2, a loader that deals out rows": (2, Case(TIED | {"hidden_size": 160}, PP, 2, dealt=True, bucket_bytes=50000)),
    "TP2 PP2 to TP2x2, int8": (4, Case(FOUR_HEADS, TP_PP, 2, quantization="int8")),
    "TP2 to TP1x2, bfloat16 in int8": (2, Case(TIED, TP, 1, quantization="int8", dtype=torch.bfloat16)),
    "disjoint TP2 to TP2, int8, only changes": (4, Case(TIED, TP, 2, train_ranks=2, quantization="int8", delta=True)),
    "TP4 to TP2x2, mxfp8": (4, Case(WIDE, {"tp": 4}, 2, quantization="mxfp8")),
    "disjoint TP2 to TP2, mxfp8, only changes": (4, Case(WIDE, TP, 2, train_ranks=2, quantization="mxfp8", delta=True)),
    "TP2 to TP1x2, bfloat16 in w4a8": (2, Case(WIDE, TP, 1, quantization="w4a8", dtype=torch.bfloat16)),
    "TP2 to TP1x2, latent in bfloat16 with a float32 buffer": (2, Case(LATENT, TP, 1, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_the_engine_holds_what_its_loader_makes_of_the_checkpoint(ranks: Callable[[int], Ranks], name: str) -> None:
    size, case = CASES[name]
    for report in ranks(size).run(deliver, case=case, timeout_s=120):
        assert report["differing"] == [[]] * case.updates
        assert report["proven"] == [report["parameters"]] * case.updates
        assert report["received"] == [report["planned"]] * case.updates == [report["needed"]] * case.updates
        assert bool(report["loaded whole"]) == (case.dealt and report["parameters"] > 0)


def test_layouts_that_are_equal_exchange_nothing_but_the_padded_vocabulary(ranks: Callable[[int], Ranks]) -> None:
    config = TIED | {"vocab_size": 128}
    for report in ranks(2).run(deliver, case=Case(config, TP, 2), timeout_s=120):
        assert report["received"] == [0] * 3


@pytest.mark.parametrize("name", ["TP2 to TP1x2", "EP2 to TP2", "disjoint"])
def test_a_dropped_stale_repeated_or_corrupted_bucket_is_detected(ranks: Callable[[int], Ranks], name: str) -> None:
    size, case = {
        "TP2 to TP1x2": (2, Case(TIED, TP, 1)),
        "EP2 to TP2": (2, Case(MOE, {"ep": 2}, 2)),
        "disjoint": (4, Case(TIED, TP, 2, train_ranks=2)),
    }[name]
    faults = ["dropped", "stale", "repeated", "corrupted"]
    for said in ranks(size).run(tamper, case=case, faults=faults, timeout_s=120):
        for fault in faults:
            assert "parameters of the rollout engine differ from those trained" in said[fault], fault
            assert said[f"after {fault}"] == "nothing"


def test_a_delta_carries_what_changed_and_proves_everything(ranks: Callable[[int], Ranks]) -> None:
    case = Case(MOE, {"pp": 2}, 1, delta=True, keywords={"frozen": "mlp.experts.1."})
    full = Case(MOE, {"pp": 2}, 1)
    # experts 1 of 4 stay the same: three matrices of 16 x 32 float32 in the one layer that comes from the other rank
    frozen_bytes = 3 * 16 * 32 * 4
    for report, whole in zip(*(ranks(2).run(deliver, case=variant, timeout_s=120) for variant in (case, full))):
        assert report["differing"] == [[]] * 3 and report["proven"] == whole["proven"]
        first, *later = report["received"]
        assert first == whole["received"][0]
        assert later == [first - frozen_bytes] * 2


def test_a_delta_of_nothing_carries_nothing(ranks: Callable[[int], Ranks]) -> None:
    case = Case(TIED, PP, 1, delta=True, keywords={"frozen": ""})
    for report in ranks(2).run(deliver, case=case, timeout_s=120):
        assert report["received"][0] > 0 and report["received"][1:] == [0, 0] and report["differing"] == [[]] * 3
