"""Groups of ranks and tiny models, shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_hf
from ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """(number of processes) -> their group, started when first asked for and ended with the module's last test."""
    groups: dict[int, Ranks] = {}
    yield lambda size: groups.setdefault(size, Ranks(size))
    for group in groups.values():
        group.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders of the tiny models by name."""
    return {name: tiny_hf.save(name, tmp_path_factory.mktemp(name)) for name in tiny_hf.CONFIGS}
