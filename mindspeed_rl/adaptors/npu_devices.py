"""Which NPU a machine has, by torch_npu's number of its SoC, and what depends on it. Imports neither torch nor torch_npu.

Not verified on NPU hardware.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable

#: value of `generate_config.quantization` that not all devices have -> SoC number of the first one that does, an Ascend 950
_FIRST_SOC = {"mxfp8": 260}
_PRINT_NUMBER = "import torch, torch_npu; print(torch_npu.npu.get_soc_version())"
#: longest wait for the libraries of a device
_TIMEOUT_S = 300


def check_quantization(quantization: str, read_number: Callable[[], int]) -> None:
    """Check that the device has a number format.

    Args:
        quantization: `generate_config.quantization`.
        read_number: returns the number of the SoC; called only for formats that not all devices have.

    Raises:
        ValueError: it does not.
    """
    first = _FIRST_SOC.get(quantization)
    if first is not None and (number := read_number()) < first:
        raise ValueError(
            f"generate_config.quantization ({quantization}) is not available on this device (number {number} of torch_npu): an "
            f"Ascend 950 (number {first}) has the operators, A2 and A3 have no 8-bit floats; set int8"
        )


def read_soc_number() -> int:
    """Return the number of the SoC; 0 without torch_npu."""
    if importlib.util.find_spec("torch_npu") is None:
        return 0
    return importlib.import_module("torch_npu").npu.get_soc_version()


def read_soc_number_in_subprocess() -> int:
    """Return the number of the SoC, which is known once a device is in use: the driver itself uses none.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        done = subprocess.run([sys.executable, "-c", _PRINT_NUMBER], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ValueError(f"platform: torch_npu did not say within {_TIMEOUT_S} seconds which NPU this is") from None
    lines = done.stdout.split()
    if done.returncode or not lines or not lines[-1].isdecimal():
        reason = (done.stderr.strip().splitlines() or ["no number"])[-1]
        raise ValueError(f"platform: torch_npu does not say which NPU this is: {reason}")
    return int(lines[-1])
