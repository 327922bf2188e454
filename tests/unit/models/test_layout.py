from __future__ import annotations

import pytest

from mindspeed_rl.models.layout import Layout, Rank


def test_plain_pipeline_gives_contiguous_blocks() -> None:
    layout = Layout(num_layers=8, pp=2)
    assert layout.chunk_layers(0) == [0, 1, 2, 3]
    assert layout.chunk_layers(1) == [4, 5, 6, 7]
    assert (layout.first_chunk, layout.last_chunk) == ((0, 0), (1, 0))


def test_virtual_stages_interleave_blocks_as_megatron_documents() -> None:
    layout = Layout(num_layers=8, pp=2, vpp=2)
    chunks = {(p, v): layout.chunk_layers(p, v) for p in range(2) for v in range(2)}
    assert chunks == {(0, 0): [0, 1], (1, 0): [2, 3], (0, 1): [4, 5], (1, 1): [6, 7]}
    assert layout.last_chunk == (1, 1)


def test_dualpipev_pairs_front_and_back_blocks_and_ends_on_stage_zero() -> None:
    layout = Layout(num_layers=8, pp=2, vpp=2, schedule="dualpipev")
    chunks = {(p, v): layout.chunk_layers(p, v) for p in range(2) for v in range(2)}
    assert chunks == {(0, 0): [0, 1], (1, 0): [2, 3], (1, 1): [4, 5], (0, 1): [6, 7]}
    assert layout.last_chunk == (0, 1)


def test_num_layer_list_sets_the_layers_of_each_stage() -> None:
    layout = Layout(num_layers=6, pp=3, num_layer_list=(1, 3, 2))
    assert [layout.chunk_layers(p) for p in range(3)] == [[0], [1, 2, 3], [4, 5]]


def test_noop_layers_shift_real_layers_and_leave_gaps_in_local_numbers() -> None:
    layout = Layout(num_layers=4, pp=2, noop_layers=(0, 5))
    assert layout.num_slots == 6
    assert [layout.chunk_layers(p) for p in range(2)] == [[None, 0, 1], [2, 3, None]]
    assert layout.find_layer(0) == (0, 0, 1)
    assert layout.local_name("decoder.layers.2.input_layernorm.weight") == "decoder.layers.0.input_layernorm.weight"
    assert layout.global_name("decoder.layers.1.input_layernorm.weight", 0) == "decoder.layers.0.input_layernorm.weight"


def test_local_and_global_names_of_layers_and_experts_are_inverse() -> None:
    layout = Layout(num_layers=4, tp=2, pp=2, ep=2, num_experts=8)
    local = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"
    name = layout.global_name(local, pp_rank=1, tp_rank=1, ep_rank=1)
    assert name == "decoder.layers.3.mlp.experts.local_experts.6.linear_fc1.weight"
    assert layout.local_name(name) == local
    grouped = layout.global_name("module.decoder.layers.0.mlp.experts.weight1", ep_rank=1)
    assert grouped == "decoder.layers.0.mlp.experts.weight1[4:8]"
    assert layout.local_name(grouped) == "decoder.layers.0.mlp.experts.weight1"


def test_experts_divided_over_tp_and_ep_are_not_split_inside() -> None:
    layout = Layout(num_layers=1, tp=2, ep=2, num_experts=8, moe_tp_extend_ep=True)
    assert layout.expert_tp_size == 1
    held = {(rank.tp, rank.ep): list(layout.local_experts(rank.tp, rank.ep)) for rank in layout.ranks()}
    assert held == {(0, 0): [0, 1], (1, 0): [2, 3], (0, 1): [4, 5], (1, 1): [6, 7]}


def test_expert_tp_of_one_lays_expert_ranks_across_tensor_ranks() -> None:
    assert list(Layout(num_layers=1, tp=2, ep=2, etp=1, num_experts=4).ranks()) == [Rank(0, 0, 0), Rank(1, 0, 1)]
    ranks = list(Layout(num_layers=1, tp=2, ep=4, etp=1, num_experts=4).ranks())
    assert ranks == [Rank(0, 0, 0), Rank(0, 0, 2), Rank(1, 0, 1), Rank(1, 0, 3)]
    assert all(rank.tp == rank.ep % 2 for rank in ranks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 5, "pp": 2}, "5 layers cannot be divided over pipeline size 2"),
        ({"num_layers": 8, "pp": 2, "vpp": 3}, "4 layers per pipeline stage cannot be divided over 3"),
        ({"num_layers": 8, "vpp": 2}, "need a pipeline size above 1"),
        ({"num_layers": 8, "pp": 2, "num_layer_list": (3, 4)}, "adds up to 7 layers; the model has 8"),
        ({"num_layers": 8, "pp": 2, "num_layer_list": (8,)}, "has 1 entries; it needs one per pipeline stage"),
        ({"num_layers": 8, "pp": 2, "num_layer_list": (8, 0)}, "gives a stage no layer"),
        ({"num_layers": 8, "pp": 2, "vpp": 2, "num_layer_list": (4, 4)}, "cannot be combined with virtual"),
        ({"num_layers": 8, "pp": 2, "num_layer_list": (4, 4), "noop_layers": (1,)}, "cannot be combined with noop"),
        ({"num_layers": 4, "noop_layers": (5,)}, "distinct positions from 0 to 4"),
        ({"num_layers": 4, "ep": 2}, "needs a model with experts"),
        ({"num_layers": 4, "ep": 3, "num_experts": 4}, "4 experts cannot be divided over 3"),
        ({"num_layers": 4, "tp": 2, "etp": 4, "num_experts": 4}, "must divide the tensor parallel size 2"),
        ({"num_layers": 4, "tp": 4, "etp": 2, "moe_tp_extend_ep": True, "num_experts": 4}, "contradicts it"),
        ({"num_layers": 4, "tp": 0}, "tp is 0"),
    ],
)
def test_impossible_layouts_are_refused_with_the_reason(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**options)
