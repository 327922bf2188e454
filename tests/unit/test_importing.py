"""Collections are rare while a block imports, and as before afterwards."""

import gc

import pytest

from mindspeed_rl.importing import collecting_seldom


def test_collections_are_rare_in_the_block_alone() -> None:
    before = gc.get_threshold()
    count = gc.get_stats()[0]["collections"]
    with collecting_seldom():
        kept = [[] for _ in range(40_000)]
        assert gc.isenabled() and gc.get_threshold() > before
        assert gc.get_stats()[0]["collections"] - count <= 1
    assert gc.get_threshold() == before and len(kept) == 40_000
    with pytest.raises(KeyError), collecting_seldom():
        raise KeyError
    assert gc.get_threshold() == before
