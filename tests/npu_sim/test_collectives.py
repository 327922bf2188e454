"""HCCL between 2 and 4 processes: every collective the suite uses, against numbers computed by hand."""

from __future__ import annotations

import pytest
from ranks import run_ranks


def values(rank: int, count: int) -> list[float]:
    return [float(100 * rank + i) for i in range(1, count + 1)]


@pytest.mark.parametrize("size", [2, 4])
def test_hccl_collectives_deliver_what_their_names_say(size: int) -> None:
    results = run_ranks("collectives", size, {"buffer_size_mib": 128})
    ranks = range(size)
    triangle = size * (size + 1) // 2
    rank_sum = 100 * sum(ranks)
    for rank, got in enumerate(results):
        for dtype in ("float32", "bfloat16", "float16", "int64", "int32", "uint8"):
            assert got[f"all_reduce torch.{dtype}"] == [triangle] * 5
        assert got["all_reduce bool max"] == [True, False, True]
        assert got["all_reduce min"] == values(0, 3)
        assert got["all_reduce avg"] == [i + rank_sum / size for i in range(1, 5)]
        assert got["broadcast"] == values(size - 1, 4)
        assert got["all_gather_into_tensor"] == [v for r in ranks for v in values(r, 2)]
        assert got["all_gather"] == [values(r, 3) for r in ranks]
        assert got["reduce_scatter_tensor"] == [size * (2 * rank + i) + rank_sum for i in (1, 2)]
        assert got["all_to_all_single"] == [100.0 * r + rank + 1 for r in ranks]
        start = rank * (rank + 1) // 2
        assert got["all_to_all_v"] == [100.0 * r + start + i for r in ranks for i in range(1, rank + 2)]
        assert got["batch ring"] == values((rank - 1) % size, 3)
        first = rank - rank % 2
        assert got["pair all_reduce"] == [a + b for a, b in zip(values(first, 2), values(first + 1, 2))]
        assert got["objects"] == [{"rank": r} for r in ranks]
        assert got["gloo"] == [triangle]
        assert got["buffer of the last group"] == 64
        assert got["group of its own"] == [size * i + rank_sum for i in (1, 2)]
        assert got["last"] == "last collective: collective on Float[1] number 1 of group SMALL (ended)"
        assert got["recorded"] == ["GLOO", "PAIR", "SMALL", "default_pg"]
    assert results[0]["reduce"] == [size * i + rank_sum for i in (1, 2)]
    assert results[1]["recv"] == values(0, 2)


@pytest.mark.slow
def test_one_kind_of_group_has_its_own_buffer_size() -> None:
    for sizes in run_ranks("group_buffers", 4):
        assert sizes["tp"] == 64 and sizes["dp"] != 64


def test_ranks_that_disagree_about_a_collective_fail_and_say_so() -> None:
    with pytest.raises(AssertionError, match="HCCL mismatch.*count 3.*count 4|HCCL mismatch.*count 4.*count 3"):
        run_ranks("disagreement", 2)


def test_a_rank_that_never_comes_is_named_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_TIMEOUT_S", "2")
    with pytest.raises(AssertionError, match=r"rank 0 of 2 waited 2 s for rank\(s\) 1"):
        run_ranks("absence", 2)
