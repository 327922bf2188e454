"""Device libraries are spoken to in two places only. Texts may name them (doctor's advice); code may not."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "mindspeed_rl"
ALLOWED = ("platform", "adaptors")
DEVICES = ("cuda", "npu")

SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in ALLOWED]


def device_words(source: str) -> list[str]:
    """The lines that import torch_npu or a device module of torch, use torch.cuda or torch.npu, or call .cuda() or .npu()."""
    results = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""] + [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            modules = [f"{node.value.id}.{node.attr}"]
        else:
            modules = []
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DEVICES
        if called or any(
            name.split(".")[0] == "torch_npu" or name.split(".")[:2] in (["torch", d] for d in DEVICES) for name in modules
        ):
            results.append(f"line {node.lineno}: {ast.unparse(node)}")
    return results


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_platform_and_adaptors_name_a_device_library(path):
    assert device_words(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch_npu",
        "import torch_npu.profiler as p",
        "from torch_npu.contrib import transfer_to_npu",
        "import torch.cuda",
        "from torch import npu",
        "from torch.cuda import amp",
        "torch.cuda.synchronize()",
        "x = torch.npu",
        "weight.cuda()",
    ],
)
def test_every_way_of_naming_one_is_found(source):
    assert device_words(source)


def test_a_device_library_in_a_text_is_no_offence():
    assert device_words('"""Needs torch_npu."""\nprint("torch.cuda is absent")') == []
