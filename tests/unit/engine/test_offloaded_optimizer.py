"""Optimizer states in host memory or in a file: every bit of the run that has them on the device."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_steps import check_equal, check_resumed, steps

from mindspeed_rl.engine import offloaded_optimizer
from mindspeed_rl.engine.checkpoint import CheckpointSaver, load_checkpoint
from mindspeed_rl.engine.offloaded_optimizer import OffloadedOptimizer, choose_offloaded
from mindspeed_rl.engine.train_engine import TrainEngine

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"bf16": True},
    {"bf16": True, "use_distributed_optimizer": True},
    {"use_distributed_optimizer": True},
    {"optimizer": "muon"},
    {"bf16": True, "optimizer": "muon"},
]
KEYS = {"weight_decay": 0.1, "lr_decay_style": "linear", "clip_grad": 0.5}
MakeEngine = Callable[..., TrainEngine]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices that divide the tiny model's weights, whose rows have 32 and 48 numbers, into several."""
    monkeypatch.setattr(offloaded_optimizer, "SLICE", 640)


def count_state_bytes(engine: TrainEngine) -> int:
    return engine.offloader.resident_bytes()["optimizer"]


@pytest.mark.parametrize("target", ["memory", "file"])
@pytest.mark.parametrize("fraction", [0.4, 1.0])
@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_every_share_takes_the_steps_of_the_device(
    make_engine: MakeEngine, keys: dict[str, Any], fraction: float, target: str, tmp_path: Path
) -> None:
    folder = str(tmp_path) if target == "file" else None
    plain = make_engine(**KEYS, **keys)
    moved = make_engine(**KEYS, **keys, optimizer_offload_fraction=fraction, optimizer_offload_path=folder)
    assert steps(plain, 4) == steps(moved, 4)
    check_equal(plain, moved)
    full, left = count_state_bytes(plain), count_state_bytes(moved)
    assert left == 0 if fraction == 1.0 else 0.4 * full < left <= 0.66 * full
    assert not list(tmp_path.iterdir())  # the file has no name


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("saved", "loaded"), [(0.0, 1.0), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1.0, 0.4), (0.4, 0.0)))]
)
def test_a_checkpoint_resumes_with_another_share(
    make_engine: MakeEngine, keys: dict[str, Any], saved: float, loaded: float, tmp_path: Path
) -> None:
    plain = make_engine(**KEYS, **keys)
    want = steps(plain, 4)
    first = make_engine(**KEYS, **keys, optimizer_offload_fraction=saved)
    steps(first, 2)
    CheckpointSaver(first, tmp_path).save(2, {})
    disk = tmp_path / "disk"
    disk.mkdir()
    resumed = make_engine(
        **KEYS, **keys, optimizer_offload_fraction=loaded, optimizer_offload_path=str(disk) if loaded else None
    )
    check_resumed(plain, want, first, resumed, tmp_path)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_file_is_saved_before_the_first_step_and_while_others_follow(
    make_engine: MakeEngine, async_save: bool, tmp_path: Path
) -> None:
    keys = {**KEYS, "bf16": True, "optimizer_offload_fraction": 1.0, "async_save": async_save}
    disk = tmp_path / "disk"
    disk.mkdir()
    engine = make_engine(**keys, optimizer_offload_path=str(disk))
    saver = CheckpointSaver(engine, tmp_path / "checkpoints")
    saver.save(0, {})
    want = steps(engine, 3)
    saver.finish()
    resumed = make_engine(**keys)
    steps(resumed, 2)
    load_checkpoint(resumed, tmp_path / "checkpoints")
    assert steps(resumed, 3) == want
    check_equal(engine, resumed)


@pytest.mark.parametrize("distributed", [False, True])
def test_weights_that_are_loaded_alone_become_main_weights(make_engine: MakeEngine, distributed: bool, tmp_path: Path) -> None:
    keys = {**KEYS, "bf16": True, "use_distributed_optimizer": distributed}
    plain = make_engine(**keys)
    steps(plain, 2)
    CheckpointSaver(plain, tmp_path).save(2, {})
    starts = [make_engine(**keys, finetune=True, optimizer_offload_fraction=fraction) for fraction in (0.0, 0.4, 1.0)]
    norms = []
    for engine in starts:
        steps(engine, 1)
        load_checkpoint(engine, tmp_path)
        norms.append(steps(engine, 2))
    assert norms[0] == norms[1] == norms[2]
    check_equal(starts[0], starts[1])
    check_equal(starts[0], starts[2])


def test_states_leave_and_return_with_a_rollout(make_engine: MakeEngine) -> None:
    plain = make_engine(**KEYS, bf16=True)
    moved = make_engine(**KEYS, bf16=True, optimizer_offload_fraction=0.4)
    for _ in range(2):
        assert steps(plain, 1) == steps(moved, 1)
        moved.offloader.offload(params=True, grads=True, optimizer=True)
        assert count_state_bytes(moved) == 0
        moved.offloader.onload(params=True, optimizer=True)
    check_equal(plain, moved)


def test_adapters_are_offloaded_too(make_engine: MakeEngine) -> None:
    keys = {**KEYS, "bf16": True, "lora_target_modules": ["linear_qkv", "linear_proj"], "lora_r": 4}
    plain, moved = make_engine(**keys), make_engine(**keys, optimizer_offload_fraction=1.0)
    assert steps(plain, 3) == steps(moved, 3)
    check_equal(plain, moved)
    assert count_state_bytes(moved) == 0


@pytest.mark.parametrize("fraction", [0.001, 0.25, 0.4, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("sizes", [[64, 3000, 64, 500, 500, 12000, 64, 700], [64, 640, 64, 4096] * 9, [5]], ids=str)
def test_the_share_is_met_to_the_smallest_parameter_of_it(fraction: float, sizes: list[int]) -> None:
    parameters = [torch.empty(size) for size in sizes]
    chosen = choose_offloaded(parameters, fraction)
    assert chosen == [parameter for parameter in parameters if any(parameter is other for other in chosen)]
    excess = sum(parameter.numel() for parameter in chosen) - fraction * sum(sizes)
    assert 0 <= excess < min(parameter.numel() for parameter in chosen) + 1


# ---------------------------------------------------------------- the file


def test_a_folder_without_room_is_named_before_the_first_step(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ValueError, match=rf"optimizer_offload_path: {tmp_path} has no room for .* GiB .* are free"):
        make_engine(optimizer_offload_fraction=1.0, optimizer_offload_path=str(tmp_path))


def test_a_missing_folder_is_named(make_engine: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"optimizer_offload_path: .*/nowhere has no room .* No such file"):
        make_engine(optimizer_offload_fraction=1.0, optimizer_offload_path=str(tmp_path / "nowhere"))


def test_a_disk_that_fails_during_a_step_is_named(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = make_engine(optimizer_offload_fraction=1.0, optimizer_offload_path=str(tmp_path))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(RuntimeError, match=r"optimizer_offload_path: .* lost the optimizer's states: Input/output error"):
        steps(engine, 1)


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    program = """
        import sys, time
        from mindspeed_rl.engine.offloaded_optimizer import _FileStates, _Slice
        states = _FileStates([3_000_000, 5], sys.argv[1], 1)
        for start in range(0, 3_000_000, 1_000_000):
            states.start_reading(_Slice(range(1), start, start + 1_000_000), is_replaced=True)
            states.finish_reading()[0].fill_(start + 1.0)
            states.start_writing()
        states.finish_writing()
        first = states.map()[0]
        assert first[0] == 1.0 and first[2_999_999] == 2_000_001.0
        print("written", flush=True)
        time.sleep(600)
    """
    arguments = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not list(tmp_path.iterdir())


def test_the_inner_optimizer_is_shown_all_states_only_while_a_checkpoint_needs_them(make_engine: MakeEngine) -> None:
    engine = make_engine(bf16=True, optimizer_offload_fraction=1.0)
    steps(engine, 1)
    for part in engine.optimizer.chained_optimizers:
        assert isinstance(part.optimizer, OffloadedOptimizer)
        parameters = part.get_parameters()
        assert not part.optimizer.state and {value.untyped_storage().size() for value in parameters} == {0}
        with part.optimizer.on_host():
            assert all(set(part.optimizer.state[value]) == {"exp_avg", "exp_avg_sq"} for value in parameters)
            assert all(value.untyped_storage().size() > 0 for value in parameters)
        assert {value.untyped_storage().size() for value in parameters} == {0}


def test_updates_are_counted_where_the_inner_optimizer_has_no_parameter_left() -> None:
    start = torch.linspace(-1, 1, 2000)
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
    expected, moved = start.clone(), start.clone()
    reference = torch.optim.AdamW([expected], **settings)
    optimizer = OffloadedOptimizer(torch.optim.AdamW([moved], **settings), {}, [moved], None)
    for step in range(3):
        expected.grad = moved.grad = torch.randn(2000, generator=torch.Generator().manual_seed(step))
        reference.step()
        optimizer.step()
    assert torch.equal(moved, expected)
