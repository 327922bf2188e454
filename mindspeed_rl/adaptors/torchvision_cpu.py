"""torchvision next to a CPU build of torch (torch 2.13, torchvision 0.28): runs of models with images import it, others do not.

The image processors of transformers and vLLM's classes of these models import torchvision. Its published build is for CUDA;
next to a CPU build of torch its compiled part does not load, and the import ends since `torchvision::nms` is not declared.
Resizing and normalizing, all that processors use, are torch's own operators. So the two operators whose shapes the import
registers are declared before it, without a kernel; calling one of them raises.

The package is in a folder of its own, which `envs/cpu/install.sh` fills: where transformers finds torchvision it imports it,
also in runs of text. VISION_VARIABLE in the environment of all processes of a run puts the folder on their path.

It can go when PyPI has a torchvision for CPU builds; `tests/unit/adaptors` fails once the package imports without it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from pathlib import Path

import torch

from mindspeed_rl.config.model_metadata import VISION_VARIABLE

#: under `sys.prefix`
_FOLDER = "vision"
_OPERATORS = ("nms", "qnms")
_ARGUMENTS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def apply() -> None:
    """Make torchvision importable in a process of a run with images; idempotent, and nothing in other runs.

    Raises:
        RuntimeError: it is not installed.
    """
    if os.environ.get(VISION_VARIABLE) != "1" or "torchvision" in sys.modules:
        return
    folder = str(Path(sys.prefix) / _FOLDER)
    if importlib.util.find_spec("torchvision") is None:
        if not Path(folder, "torchvision").is_dir():
            raise RuntimeError(
                f"this model reads images, which needs torchvision: run envs/cpu/install.sh, which puts it into {folder}"
            )
        sys.path.append(folder)
        importlib.invalidate_caches()
    if torch.version.cuda is None:
        spec = importlib.util.find_spec("torchvision")
        assert spec is not None and spec.origin is not None
        try:  # builds of another torch do not load; one that does, as on aarch64, declares the operators itself, and once only
            ctypes.CDLL(str(Path(spec.origin).with_name("_C.so")))
        except OSError:
            for name in _OPERATORS:
                if not hasattr(torch.ops.torchvision, name):
                    torch.library.define(f"torchvision::{name}", _ARGUMENTS)
    importlib.import_module("torchvision")  # here, so that a broken installation is one error at the start
