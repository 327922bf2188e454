"""Checkpoints are written by Megatron's own writer; the adaptor is needed as long as Megatron asks for another package."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from megatron_release import RELEASE
from patience import patient

from mindspeed_rl.adaptors import megatron_async_saves

STRATEGIES = "megatron.core.dist_checkpointing.strategies.torch"
CHOOSES = not RELEASE.startswith(megatron_async_saves._WITHOUT_STRATEGIES)


@pytest.mark.skipif(not CHOOSES, reason=f"megatron-core {RELEASE} has no choice of writers")
def test_without_the_adaptor_megatron_asks_for_a_package_that_nobody_installs() -> None:
    code = f"import {STRATEGIES} as strategies\nstrategies.get_async_strategy()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(120))
    assert "nvidia-resiliency-ext" in result.stderr.splitlines()[-1]


@pytest.mark.skipif(not CHOOSES, reason=f"megatron-core {RELEASE} has no choice of writers")
@pytest.mark.parametrize("asked", ["nvrx", "mcore"])
def test_with_it_the_answer_is_megatrons_own_whatever_is_asked_for(asked: str) -> None:
    strategies = importlib.import_module(STRATEGIES)
    own = importlib.import_module("megatron.core.dist_checkpointing.strategies.async_utils").AsyncRequest
    name, modules = strategies.get_async_strategy(asked)
    assert name == "mcore" and modules["AsyncRequest"] is own
    assert strategies.get_async_strategy(asked, "AsyncRequest") == ("mcore", own)
    adapted = strategies.get_async_strategy
    megatron_async_saves.apply()
    assert strategies.get_async_strategy is adapted


@pytest.mark.skipif(CHOOSES, reason=f"megatron-core {RELEASE} has a choice of writers")
def test_a_release_without_a_choice_is_left_alone_and_nothing_is_imported_for_it() -> None:
    code = (
        "import sys\nfrom mindspeed_rl.adaptors import megatron_async_saves\nmegatron_async_saves.apply()\n"
        "print([name for name in sys.modules if name.startswith('megatron')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(120))
    assert result.stdout.strip() == "[]", result.stderr
    assert not hasattr(importlib.import_module(STRATEGIES), "get_async_strategy")


def test_a_release_without_a_known_queue_is_named_with_what_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = importlib.import_module(megatron_async_saves._WRITER)
    for name in megatron_async_saves._QUEUES:
        monkeypatch.delattr(writer, name, raising=False)
    words = "filesystem_async .* has neither _get_write_results_queue nor get_write_results_queue"
    with pytest.raises(RuntimeError, match=words), megatron_async_saves.keep_results_in_process():
        pass


@pytest.mark.slow
def test_a_save_that_its_process_runs_itself_starts_no_process_for_the_results() -> None:
    code = (
        "import importlib, multiprocessing\n"
        "from mindspeed_rl.adaptors import megatron_async_saves as adaptor\n"
        "writer = importlib.import_module(adaptor._WRITER)\n"
        "name = next(name for name in adaptor._QUEUES if hasattr(writer, name))\n"
        "with adaptor.keep_results_in_process():\n"
        "    getattr(writer, name)().put('written')\n"
        "    print(getattr(writer, name)().get_nowait(), len(multiprocessing.active_children()))\n"
        "getattr(writer, name)()\n"
        "print(len(multiprocessing.active_children()))\n"  # 0 once Megatron does without: the adaptor can go
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(120))
    assert result.stdout.split() == ["written", "0", "1"], result.stderr[-2000:]
