from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mindspeed_rl.models.weights import (
    COLUMNS,
    ROWS,
    Concat,
    FuseQkv,
    GroupedFc1,
    GroupedFc2,
    MemorySource,
    Split,
    WeightOp,
)


class CountingSource:
    """Tensors in memory that count how many elements were read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.elements = tensors, 0

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        tensor = self.tensors[name] if stop is None else self.tensors[name].narrow(dim, start, stop - start)
        self.elements += tensor.numel()
        return tensor


def qkv_op(heads: int, groups: int, head_dim: int, hidden: int) -> WeightOp:
    queries = heads // groups
    splits = (Split(0, unit=queries * head_dim), Split(0, unit=head_dim), Split(0, unit=head_dim))
    shapes = ((heads * head_dim, hidden), (groups * head_dim, hidden), (groups * head_dim, hidden))
    return WeightOp("qkv", ("q", "k", "v"), shapes, FuseQkv(queries, head_dim), splits, layer=0)


def test_fused_qkv_holds_each_group_s_queries_then_its_key_then_its_value() -> None:
    heads, groups, head_dim, hidden = 4, 2, 3, 5
    q, k, v = torch.randn(12, hidden), torch.randn(6, hidden), torch.randn(6, hidden)
    rows = []
    for group in range(groups):
        for head in range(group * 2, group * 2 + 2):
            rows += [q[head * head_dim + i] for i in range(head_dim)]
        rows += [k[group * head_dim + i] for i in range(head_dim)]
        rows += [v[group * head_dim + i] for i in range(head_dim)]
    op = qkv_op(heads, groups, head_dim, hidden)
    source = MemorySource({"q": q, "k": k, "v": v})
    full = op.read_shard(source, 1, 0)
    assert torch.equal(full, torch.stack(rows))
    assert torch.equal(op.read_shard(source, 2, 1), torch.stack(rows[12:]))
    back = op.shards_to_hf([full])
    assert torch.equal(back["q"], q) and torch.equal(back["k"], k) and torch.equal(back["v"], v)


def test_gate_and_up_are_divided_before_they_are_stacked() -> None:
    gate, up = torch.arange(8.0)[:, None], 100 + torch.arange(8.0)[:, None]
    op = WeightOp("fc1", ("gate", "up"), ((8, 1), (8, 1)), Concat((1, 1)), (ROWS, ROWS), layer=0)
    shards = [op.read_shard(MemorySource({"gate": gate, "up": up}), 4, rank) for rank in range(4)]
    assert shards[1].flatten().tolist() == [2, 3, 102, 103]
    assert op.unshard(shards).flatten().tolist() == [*range(8), *range(100, 108)]
    assert torch.equal(op.shards_to_hf(shards)["up"], up)


def test_a_tensor_of_two_blocks_is_divided_block_by_block() -> None:
    fused = torch.tensor([0.0, 1, 2, 3, 100, 101, 102, 103])[:, None]
    op = WeightOp("fc1", ("gate_up",), ((8, 1),), splits=(Split(0, blocks=2),), layer=0)
    shards = [op.read_shard(MemorySource({"gate_up": fused}), 2, rank) for rank in range(2)]
    assert shards[1].flatten().tolist() == [2, 3, 102, 103]
    assert torch.equal(op.unshard(shards), fused)


def test_columns_are_divided_along_the_second_dimension() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    op = WeightOp("proj", ("o",), ((2, 3),), splits=(COLUMNS,), layer=0)
    assert op.read_shard(MemorySource({"o": weight}), 3, 2).tolist() == [[2.0], [5.0]]


def test_vocabulary_padding_repeats_the_last_row_and_is_removed_again() -> None:
    embedding = torch.arange(5.0)[:, None]
    op = WeightOp("embedding", ("embed",), ((5, 1),), splits=(Split(0, size=5, padded=8),), section="pre")
    source = MemorySource({"embed": embedding})
    assert [op.read_shard(source, 4, rank).flatten().tolist() for rank in range(4)] == [[0, 1], [2, 3], [4, 4], [4, 4]]
    full = op.read_shard(source, 1, 0)
    assert full.flatten().tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
    assert torch.equal(op.shards_to_hf([full])["embed"], embedding)


def test_grouped_gemm_weights_follow_the_documented_reshape() -> None:
    experts, hidden, ffn = 2, 3, 4
    gate, up, down = torch.randn(experts, ffn, hidden), torch.randn(experts, ffn, hidden), torch.randn(experts, hidden, ffn)
    stacked = torch.stack([torch.cat([gate[e], up[e]]).t() for e in range(experts)])
    names = [name for e in range(experts) for name in (f"g{e}", f"u{e}")]
    shapes = ((ffn, hidden),) * 4
    op = WeightOp("weight1", tuple(names), shapes, GroupedFc1(experts), (ROWS,) * 4, axis="etp", experts=(0, 1))
    tensors = {f"g{e}": gate[e] for e in range(experts)} | {f"u{e}": up[e] for e in range(experts)}
    weight1 = op.read_shard(MemorySource(tensors), 1, 0)
    assert torch.equal(weight1, stacked.reshape(hidden, -1))
    assert torch.equal(op.shards_to_hf([weight1])["u1"], up[1])
    op2 = WeightOp(
        "weight2", ("d0", "d1"), ((hidden, ffn),) * 2, GroupedFc2(experts), (COLUMNS,) * 2, axis="etp", experts=(0, 1)
    )
    source = MemorySource({"d0": down[0], "d1": down[1]})
    weight2 = op2.read_shard(source, 1, 0)
    assert torch.equal(weight2, torch.stack([down[0].t(), down[1].t()]).reshape(-1, hidden))
    half = op2.read_shard(source, 2, 1)
    assert torch.equal(half, torch.stack([down[0][:, 2:].t(), down[1][:, 2:].t()]).reshape(-1, hidden))


def test_a_shard_is_read_without_reading_the_others() -> None:
    op = qkv_op(heads=8, groups=4, head_dim=2, hidden=6)
    source = CountingSource({"q": torch.randn(16, 6), "k": torch.randn(8, 6), "v": torch.randn(8, 6)})
    shard = op.read_shard(source, 4, 3)
    assert source.elements == shard.numel() == 32 * 6 // 4


def test_groups_that_do_not_divide_over_ranks_are_refused_even_if_rows_do() -> None:
    op = qkv_op(heads=4, groups=2, head_dim=4, hidden=6)
    with pytest.raises(ValueError, match="2 groups of 8 rows .* cannot be divided over 4 tensor parallel ranks"):
        op.read_shard(MemorySource({"q": torch.randn(16, 6), "k": torch.randn(8, 6), "v": torch.randn(8, 6)}), 4, 0)


def test_shard_shape_is_the_shape_of_the_shard() -> None:
    op = qkv_op(heads=8, groups=4, head_dim=2, hidden=6)
    source = MemorySource({"q": torch.randn(16, 6), "k": torch.randn(8, 6), "v": torch.randn(8, 6)})
    for count in (1, 2):
        assert op.shard_shape(count) == tuple(op.read_shard(source, count, 0).shape)


def test_the_chunks_of_hf_tensors_are_their_bytes_and_mostly_views() -> None:
    op = qkv_op(heads=8, groups=4, head_dim=2, hidden=6)
    tensors = {"q": torch.randn(16, 6), "k": torch.randn(8, 6), "v": torch.randn(8, 6)}
    shards = [op.read_shard(MemorySource(tensors), 2, rank) for rank in range(2)]
    places = [range(shard.data_ptr(), shard.data_ptr() + shard.nbytes) for shard in shards]
    for name, chunks in op.shards_to_hf_chunks(shards).items():
        assert torch.equal(torch.cat(chunks), tensors[name])
        assert all(any(chunk.data_ptr() in place for place in places) and chunk.is_contiguous() for chunk in chunks)


def test_padding_that_spans_several_shards_is_removed_from_their_chunks() -> None:
    embedding = torch.arange(5.0)[:, None]
    op = WeightOp("embedding", ("embed",), ((5, 1),), splits=(Split(0, size=5, padded=8),), section="pre")
    shards = [op.read_shard(MemorySource({"embed": embedding}), 4, rank) for rank in range(4)]
    assert [chunk.flatten().tolist() for chunk in op.shards_to_hf_chunks(shards)["embed"]] == [[0, 1], [2, 3], [4]]
