"""What the NPU platform decides without a device; the simulator runs this file too, with torch_npu installed."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from mindspeed_rl.platform.npu import NpuPlatform

ALL_VISIBLE = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"


def test_an_installation_without_torch_npu_has_no_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not NpuPlatform.is_available()


def test_a_torch_npu_that_does_not_load_is_said_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # an import of it fails
    with pytest.raises(ImportError, match="torch_npu is installed but does not load .*mindspeed-rl doctor"):
        NpuPlatform.is_available()


def test_a_group_without_a_size_of_its_own_has_no_options() -> None:
    assert NpuPlatform().process_group_options("tp", None) is None


@pytest.mark.parametrize(
    ("all_visible", "visible", "assigned", "index"),
    [
        pytest.param("", None, "5", 0, id="Ray narrowed the process to one die"),
        pytest.param("1", None, "5", 5, id="every die of the machine is visible"),
        pytest.param("1", "4,5,6,7", "5", 1, id="four dies are visible"),
    ],
)
def test_the_die_of_a_worker_counts_among_those_it_sees(
    monkeypatch: pytest.MonkeyPatch, all_visible: str, visible: str | None, assigned: str, index: int
) -> None:
    monkeypatch.setenv(ALL_VISIBLE, all_visible)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    assert NpuPlatform().device_id_for_ray([assigned]) == index


def test_a_worker_without_a_die_it_can_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Ray assigned no NPU"):
        NpuPlatform().device_id_for_ray([])
    monkeypatch.setenv(ALL_VISIBLE, "1")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ValueError, match="Ray assigned NPU 5, but ASCEND_RT_VISIBLE_DEVICES is '0,1'"):
        NpuPlatform().device_id_for_ray(["5"])
