"""Groups of ranks and tiny models, shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_hf
from ranks import Ranks


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Ranks]]:
    """(number of processes) -> their group, started when first asked for and ended with the module's last test.

    A module whose jobs use vLLM says `KIND = "rollout"`.
    """
    groups: dict[int, Ranks] = {}
    kind = getattr(request.module, "KIND", "train")
    yield lambda size: groups.setdefault(size, Ranks(size, kind))
    for group in groups.values():
        group.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders of the tiny models by name."""
    return {name: tiny_hf.save(name, tmp_path_factory.mktemp(name)) for name in tiny_hf.CONFIGS}
