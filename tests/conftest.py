"""Fixtures of all tests; nothing heavy is imported before a test asks for it."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import parts
import pytest
from megatron_release import GROUPED_EXPERTS, RELEASE
from ports import find_free_port

# several processes share the cores, and a process with threads can't be forked
os.environ.setdefault("OMP_NUM_THREADS", "1")

#: folders whose tests build Megatron's modules; elsewhere "grouped" says how a checkpoint's files are laid out
_BUILDING = ("unit/engine", "dist", "e2e")


def pytest_configure() -> None:
    """Collect garbage seldom, and take back the handlers of signals that a parent ignores, as `nohup` and `&` do."""
    # torch, Megatron and vLLM are a million objects that stay: 4 % of the time of the unit tests went into looking through them
    gc.set_threshold(50_000, 20, 100)
    # a run would ignore them too
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parts")
    group.addoption("--share", action="append", default=[], metavar="FILE=FROM:TO", help="only these tests of FILE (parts.py)")
    group.addoption("--record-durations", action="store_true", help="write what files took to tests/durations.json")


_SECONDS: dict[str, list[float]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the seconds of a file by kind of test."""
    kind = parts.EXTRA if "extra" in report.keywords else parts.SLOW if "slow" in report.keywords else parts.QUICK
    _SECONDS.setdefault(report.nodeid.partition("::")[0], [0.0, 0.0, 0.0])[kind] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--record-durations") and not hasattr(session.config, "workerinput"):
        parts.record(_SECONDS)


@pytest.hookimpl(tryfirst=True)  # before pytest's own choice by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark extra tests as slow ones, choose the share of a file, and skip grouped experts where Megatron has none.

    A test's id tells that it has grouped experts.
    """
    for item in items:
        if item.get_closest_marker("extra") is not None:
            item.add_marker(pytest.mark.slow)
    for file, _, share in (words.rpartition("=") for words in config.getoption("--share")):
        of_file = [item for item in items if item.nodeid.partition("::")[0] == file]
        out = {item for position, item in enumerate(of_file) if not parts.is_in_share(position, len(of_file), share)}
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]
    if GROUPED_EXPERTS:
        return
    skip = pytest.mark.skip(reason=f"megatron-core {RELEASE} has no grouped experts without TransformerEngine")
    folders = [Path(__file__).parent / name for name in _BUILDING]
    for item in items:
        if "grouped" in item.nodeid.rpartition("/")[2] and any(folder in item.path.parents for folder in folders):
            item.add_marker(skip)


@pytest.fixture(scope="module")
def single_process_world() -> Iterator[None]:
    """The environment of rank 0 of 1; the process groups that a test makes are gone after its module."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in rank.items():
            patch.setenv(name, value)
        yield
        import torch.distributed as dist
        from megatron.core import parallel_state

        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
