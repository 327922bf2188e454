"""All unit tests share one process, so Megatron is adapted before any of them can import it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from loop_watch import LoopWatch

from mindspeed_rl import adaptors, platform

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # as in all workers on the CPU, for programs that import vLLM too
platform.select("cpu")
adaptors.apply("train")


#: tests of code with event loops
_WATCHED = tuple(
    str(Path(__file__).parent / name)
    for name in (
        "tools",
        "rollout",
        "serving",
        "rewards",
        "isolation",
        "inference",
        "dataplane",
        "trainers",
        "observability",
        "workers",
        "data",
        "service",
        "cli/test_serve_command",
        "test_http_client",
    )
)


@pytest.fixture(autouse=True)
def loops_never_stand(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which an event loop of the product stood for more than half a second."""
    if not str(request.path).startswith(_WATCHED):
        yield
        return
    watch = LoopWatch()
    watch.start()
    yield
    if reports := watch.stop():
        pytest.fail("\n".join(reports), pytrace=False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen2.5 of random weights (`supervised_samples.save_tiny_model`)."""
    from supervised_samples import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny_qwen25"))
