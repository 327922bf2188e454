"""What the fault suite shares with the end-to-end tests: their task and their command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tests' task: model/, train.jsonl, heldout.jsonl."""
    from tiny_task import make_task

    return make_task(tmp_path_factory.mktemp("task"))
