"""Collections are rare while a block imports, a package may be hidden from it, and all is as before afterwards."""

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_rl.importing import collecting_seldom, without


@pytest.fixture
def python_s_own_threshold() -> Iterator[None]:
    """The tests' own is higher (conftest.py)."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("python_s_own_threshold")
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


def test_a_package_is_hidden_in_the_block_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brought_along.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError), without("brought_along"):
        importlib.import_module("brought_along")
    assert "brought_along" not in sys.modules
    result = importlib.import_module("brought_along")
    with without("brought_along"):  # it is here already: nothing would be saved
        assert importlib.import_module("brought_along") is result
    assert sys.modules.pop("brought_along") is result
