"""All unit tests share one process, so Megatron is adapted before any of them can import it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mindspeed_rl import adaptors, platform

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # as in all workers on the CPU, for programs that import vLLM too
platform.select("cpu")
adaptors.apply("train")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen2.5 of random weights (`supervised_samples.save_tiny_model`)."""
    from supervised_samples import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny_qwen25"))
