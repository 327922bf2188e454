"""Buckets: every weight once, in order, within the limit, from the stage and the ranks that hold it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import Qwen2Config, Qwen3MoeConfig

from mindspeed_rl.models import architecture_for
from mindspeed_rl.models.architecture import ExpertPacking
from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.weights import WeightOp
from mindspeed_rl.resharding.plan import Bucket, HeldWeight, expert_siblings, plan_buckets


def dense_ops(tied: bool) -> list[WeightOp]:
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    ).to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    architecture = architecture_for(config)
    return architecture.weight_ops(architecture.network(config))


def moe_ops(packing: ExpertPacking) -> list[WeightOp]:
    config = Qwen3MoeConfig(
        vocab_size=40,
        hidden_size=8,
        moe_intermediate_size=4,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ).to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    architecture = architecture_for(config)
    return architecture.weight_ops(architecture.network(config), packing)


def held(ops: list[WeightOp], tp: int, etp: int, dtype: str = "float32") -> dict[str, HeldWeight]:
    return {op.mcore: HeldWeight(op.mcore, op.shard_shape(etp if op.axis == "etp" else tp), dtype) for op in ops}


def delivered(buckets: list[Bucket], ops: list[WeightOp]) -> list[str]:
    """HF names in the order in which the buckets hand them out."""
    by_name = {op.mcore: op for op in ops}
    return [hf for b in buckets for item in b.items for name in dict.fromkeys(item.names) for hf in by_name[name].hf]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 700, 1 << 30])
def test_every_hf_tensor_travels_once_and_no_bucket_exceeds_the_limit(tied: bool, bucket_bytes: int) -> None:
    ops = dense_ops(tied)
    buckets = plan_buckets(ops, held(ops, 2, 1), Layout(num_layers=4, tp=2), bucket_bytes=bucket_bytes)
    names = delivered(buckets, ops)
    wanted = [name for op in ops if not op.copy_of_tied for name in op.hf]
    assert names == wanted and len(set(wanted)) == len(wanted)
    assert ("lm_head.weight" in names) is not tied
    for bucket in buckets:
        assert bucket.numel * 4 <= bucket_bytes or len(bucket.items) == 1
        ends = [item.offset + item.numel for item in bucket.items]
        assert [item.offset for item in bucket.items] == [0, *ends[:-1]] and ends[-1] == bucket.numel


def test_a_bucket_belongs_to_the_stage_that_holds_its_weights() -> None:
    ops = dense_ops(tied=False)
    layout = Layout(num_layers=4, pp=2, num_layer_list=(1, 3))
    buckets = plan_buckets(ops, held(ops, 1, 1), layout, bucket_bytes=1 << 30)
    stages = {name: bucket.stage for bucket in buckets for item in bucket.items for name in item.names}
    assert stages["embedding.word_embeddings.weight"] == 0 and stages["output_layer.weight"] == 1
    assert [stages[f"decoder.layers.{layer}.mlp.linear_fc2.weight"] for layer in range(4)] == [0, 1, 1, 1]


def test_weights_of_another_type_get_buckets_of_their_own() -> None:
    ops = dense_ops(tied=True)
    shards = held(ops, 1, 1)
    name = "decoder.final_layernorm.weight"
    shards[name] = replace(shards[name], dtype="bfloat16")
    buckets = plan_buckets(ops, shards, Layout(num_layers=4), bucket_bytes=1 << 30)
    assert [item.names for bucket in buckets if bucket.dtype == "bfloat16" for item in bucket.items] == [(name,)]


@pytest.mark.parametrize("kind", ["local", "grouped"])
@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 2, 1), (2, 2, 1), (2, 2, 2), (1, 1, 1), (2, 1, 2)])
def test_every_expert_travels_once_whatever_the_expert_layout(kind: str, tp: int, ep: int, etp: int) -> None:
    ops = moe_ops(ExpertPacking(kind, ep if kind == "grouped" else 1))
    layout = Layout(num_layers=2, tp=tp, ep=ep, etp=etp, num_experts=4)
    buckets = plan_buckets(ops, held(ops, tp, etp), layout, bucket_bytes=1 << 30)
    names = delivered(buckets, ops)
    assert sorted(names) == sorted(name for op in ops for name in op.hf)
    widths = {len(item.names) for bucket in buckets if bucket.group == "expert" for item in bucket.items}
    assert widths == {ep * etp}


def test_ranks_of_the_expert_group_hold_consecutive_experts_with_the_tensor_rank_fastest() -> None:
    ops = moe_ops(ExpertPacking("local"))
    layout = Layout(num_layers=2, tp=2, ep=2, etp=2, num_experts=4)
    experts = {("layer", op.layer, kind_of(op), op.experts[0]): op.mcore for op in ops if op.axis == "etp"}
    second_local = next(op for op in ops if op.experts == (1,) and op.layer == 0 and "fc1" in op.mcore)
    stem = "decoder.layers.0.mlp.experts.local_experts"
    expected = [f"{stem}.{expert}.linear_fc1.weight" for expert in (1, 1, 3, 3)]
    assert list(expert_siblings(second_local, experts, layout)) == expected


def kind_of(op: WeightOp) -> str:
    """An expert weight's name without its numbers."""
    return ".".join(part for part in op.mcore.split(".") if not part.isdigit())


def test_a_weight_nobody_holds_is_an_error_that_names_it() -> None:
    ops = dense_ops(tied=True)
    shards = held(ops, 1, 1)
    del shards["decoder.final_layernorm.weight"]
    with pytest.raises(RuntimeError, match="no rank holds decoder.final_layernorm.weight"):
        plan_buckets(ops, shards, Layout(num_layers=4), bucket_bytes=1 << 30)
